//! The other process: an engine that answers, and the commands to it.
//!
//! Each command and each answer is one line of words. It measures nothing except its own resources.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{CacheKey, DataDist, PeerAddress};
use llm_datadist_core::{CacheKind, ClusterId};

use crate::hand::Shuffle;
use crate::layouts;
use crate::links::on_cpu;
use crate::memory::{Blocks, config, desc, mapped};

/// The other process, as the measuring process sees it.
pub struct Prefill {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl Prefill {
    pub fn start() -> Prefill {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("--prefill")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Prefill { child, say, hear }
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends one command, and returns its answer.
    pub fn ask(&mut self, order: &str) -> String {
        writeln!(self.say, "{order}").unwrap();
        let mut answer = String::new();
        assert!(self.hear.read_line(&mut answer).unwrap() > 0, "the other process died at: {order}");
        answer.trim().to_owned()
    }

    pub fn number(&mut self, order: &str) -> u64 {
        self.ask(order).parse().unwrap()
    }

    /// Opens an engine there, in place of the previous one, and returns its address.
    pub fn open(&mut self, transport: &str, one_sided: bool, mib: u64, streams: usize) -> PeerAddress {
        let port = self.number(&format!("open {transport} {one_sided} {mib} {streams}"));
        address(2, port as u16)
    }
}

impl Drop for Prefill {
    fn drop(&mut self) {
        let _ = writeln!(self.say, "end");
        let _ = self.child.wait();
    }
}

pub fn address(cluster: u64, port: u16) -> PeerAddress {
    PeerAddress { cluster: ClusterId(cluster), remote: vec![([127, 0, 0, 1], port).into()], local: vec![] }
}

#[derive(Default)]
struct There {
    engine: Option<Arc<DataDist>>,
    more: Vec<DataDist>,
    blocks: Option<Blocks>,
    own: Option<(u64, u64)>,
    requests: u64,
}

/// Runs the other process until its end.
pub fn serve() {
    let mut there = There::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        if words[0] == "end" {
            return;
        }
        println!("{}", there.obey(words[0], &words[1..]));
        std::io::stdout().flush().unwrap();
    }
}

impl There {
    fn engine(&self) -> &DataDist {
        self.engine.as_ref().unwrap()
    }

    fn obey(&mut self, order: &str, words: &[&str]) -> String {
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match order {
            "open" => {
                (self.blocks, self.engine) = (None, None);
                let config = config(2, words[0], words[1] == "true", number(2), number(3) as usize);
                let engine = DataDist::open(config).unwrap();
                let port = engine.listening().unwrap().port();
                self.engine = Some(Arc::new(engine));
                port.to_string()
            }
            "blocks" => self.blocks(words[0] == "own", number(1), number(2)),
            "layout" => layouts::hold(self.engine(), number(0), number(1), &layouts::Rank::of(&words[2..]))
                .to_string(),
            "fill" => self.on_blocks(|blocks| blocks.fill(number(0))),
            "poison" => self.on_blocks(Blocks::poison),
            "verify" => self.on_blocks(|blocks| {
                let mut shuffle = Shuffle(number(1));
                let (from, to) = (shuffle.order(blocks.rows), shuffle.order(blocks.rows));
                blocks.verify(number(0), &from, &to);
            }),
            "bare" => self.bare().port().to_string(),
            "requests" => self.requests(number(0), number(1)),
            "keys" => self.keys(number(0), number(1)),
            "more" => self.one_more(number(0)),
            "engines" => self.engines(number(0), number(1)),
            "served" => {
                let ops = self.engine().stats().ops;
                ops.iter().find(|(name, _)| *name == "served").unwrap().1.calls.to_string()
            }
            "cpu" => on_cpu().to_string(),
            _ => panic!("{order}?"),
        }
    }

    fn on_blocks(&self, call: impl FnOnce(&Blocks)) -> String {
        call(self.blocks.as_ref().unwrap());
        "done".into()
    }

    fn blocks(&mut self, own: bool, rows: u64, len: u64) -> String {
        if let Some(Blocks { end: llm_datadist_core::bindings::End::Managed(id), .. }) = self.blocks.take() {
            self.engine().deallocate(id).unwrap();
            self.engine().unregister(id).unwrap();
        }
        let blocks = if own {
            let (base, bytes) = *self.own.get_or_insert_with(|| (mapped(rows * len), rows * len));
            assert!(rows * len <= bytes);
            Blocks::own(self.engine(), base, rows, len, true)
        } else {
            Blocks::pool(self.engine(), rows, len, true)
        };
        blocks.fill(1);
        let base = blocks.base;
        self.blocks = Some(blocks);
        base.to_string()
    }

    /// Allocates `count` batch caches of one slot, each with its own request key. Returns the number of the
    /// first key.
    fn requests(&mut self, count: u64, len: u64) -> String {
        let first = self.requests;
        self.requests += count;
        for id in first..self.requests {
            let key = CacheKey::Request { model: 1, id };
            self.engine().allocate(&desc(1, len), CacheKind::Batch, &[Some(key)]).unwrap();
        }
        first.to_string()
    }

    fn keys(&mut self, caches: u64, rows: u64) -> String {
        for cache in 0..caches {
            let keys: Vec<_> =
                (0..rows).map(|row| Some(CacheKey::Request { model: 2, id: cache * rows + row })).collect();
            self.engine().allocate(&desc(rows, 64), CacheKind::Batch, &keys).unwrap();
        }
        "done".into()
    }

    /// Nanoseconds of one more cache with one key.
    fn one_more(&mut self, id: u64) -> String {
        let started = Instant::now();
        let key = CacheKey::Request { model: 3, id };
        self.engine().allocate(&desc(1, 64), CacheKind::Batch, &[Some(key)]).unwrap();
        started.elapsed().as_nanos().to_string()
    }

    /// Opens engines of clusters `first..first + count`, and returns their ports.
    fn engines(&mut self, first: u64, count: u64) -> String {
        let mut ports = String::new();
        for cluster in first..first + count {
            let mut config = config(cluster, "shm", true, 1, 1);
            config.copy_workers = Some(1);
            let engine = DataDist::open(config).unwrap();
            write!(ports, "{} ", engine.listening().unwrap().port()).unwrap();
            self.more.push(engine);
        }
        ports
    }

    /// A listener that sends and receives the blocks without any engine.
    fn bare(&self) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let (base, bytes) = (self.blocks.as_ref().unwrap().base, self.blocks.as_ref().unwrap().bytes());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let stream = stream.unwrap();
                std::thread::spawn(move || while bare_round(&stream, base, bytes) {});
            }
        });
        at
    }
}

/// Executes one command on a bare stream: direction, chunk, from, to. Returns `false` at the end of the
/// stream.
fn bare_round(mut stream: &TcpStream, base: u64, bytes: u64) -> bool {
    stream.set_nodelay(true).unwrap();
    let mut order = [0u8; 32];
    if stream.read_exact(&mut order).is_err() {
        return false;
    }
    let word = |at: usize| u64::from_le_bytes(order[at * 8..][..8].try_into().unwrap());
    let (out, chunk, from, to) = (word(0) == 1, word(1), word(2), word(3));
    assert!(to <= bytes);
    if out {
        send_bare(stream, base, chunk, from, to);
    } else {
        receive_bare(stream, base, chunk, from, to);
        stream.write_all(&[1]).unwrap();
    }
    true
}

/// Tells the other end of a bare stream what to do.
pub fn order_bare(mut stream: &TcpStream, out: bool, chunk: u64, from: u64, to: u64) {
    let words = [u64::from(out), chunk, from, to];
    let order: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    stream.write_all(&order).unwrap();
}

pub fn send_bare(mut stream: &TcpStream, base: u64, chunk: u64, from: u64, to: u64) {
    let mut at = from;
    while at < to {
        let len = chunk.min(to - at) as usize;
        // SAFETY: inside memory of this program that nobody writes meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts((base + at) as *const u8, len) };
        at += stream.write(bytes).unwrap() as u64;
    }
}

pub fn receive_bare(mut stream: &TcpStream, base: u64, chunk: u64, from: u64, to: u64) {
    let mut at = from;
    while at < to {
        let len = chunk.min(to - at) as usize;
        // SAFETY: inside memory of this program that nothing else uses meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut((base + at) as *mut u8, len) };
        let got = stream.read(bytes).unwrap() as u64;
        assert!(got > 0);
        at += got;
    }
}

/// A time limit for links that is never reached.
pub const LIMIT: Duration = Duration::from_secs(10);
