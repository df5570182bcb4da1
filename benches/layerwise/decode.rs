//! A decode process: an engine with a destination, controlled by lines of words.
//!
//! It measures nothing except its own pulls.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{
    CacheKey, Config, DataDist, End, LayerRange, Layers, Name, PeerAddress, PoolConfig, RemoteName, Role,
    Rows,
};
use llm_datadist_core::{CacheDesc, CacheKind, ClusterId, DataType, Placement};

use crate::LAYERS;
use crate::hand::Shuffle;

/// The blocks cache on every side.
pub const KEY: CacheKey = CacheKey::Blocks { model: 7 };

pub fn config(cluster: u64, mib: u64) -> Config {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: mib << 20, page_shift: 12 });
    config.remote_accessible = true;
    config.sync_timeout = Duration::from_secs(60);
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    config
}

fn address(cluster: u64, port: u16) -> PeerAddress {
    PeerAddress { cluster: ClusterId(cluster), remote: vec![([127, 0, 0, 1], port).into()], local: vec![] }
}

/// Two tensors for each layer.
pub struct Kv {
    pub end: End,
    addrs: Vec<u64>,
    rows: u64,
    len: u64,
}

impl Kv {
    pub fn new(engine: &DataDist, rows: u64, len: u64) -> Kv {
        let shape = vec![rows as i64, len as i64];
        let (num_tensors, placement) = (LAYERS * 2, Placement::Device);
        let desc = CacheDesc {
            num_tensors,
            shape,
            data_type: DataType::Uint8,
            placement,
            row_stride: None,
            kv_layout: None,
        };
        let cache = engine.allocate(&desc, CacheKind::Blocks, &[Some(KEY)]).unwrap();
        Kv { end: End::Managed(cache.id()), addrs: cache.addrs().to_vec(), rows, len }
    }

    /// Gives every 8-byte word a value of its own.
    pub fn fill(&self, seed: u64) {
        for (tensor, &base) in self.addrs.iter().enumerate() {
            for at in 0..self.rows * self.len / 8 {
                // SAFETY: inside a cache of this program that nothing else uses now.
                unsafe { *((base + at * 8) as *mut u64) = word(seed, tensor as u64, at) };
            }
        }
    }

    fn poison(&self) {
        for &base in &self.addrs {
            // SAFETY: as in `fill`.
            unsafe { (base as *mut u8).write_bytes(0xEE, (self.rows * self.len) as usize) };
        }
    }

    fn verify(&self, seed: u64, from: &[i64], to: &[i64]) {
        let words = self.len / 8;
        for (tensor, &base) in self.addrs.iter().enumerate() {
            for (&from, &to) in from.iter().zip(to) {
                for at in 0..words {
                    // SAFETY: as in `fill`.
                    let got = unsafe { *((base + (to as u64 * words + at) * 8) as *const u64) };
                    let expected = word(seed, tensor as u64, from as u64 * words + at);
                    assert_eq!(got, expected, "tensor {tensor}, block {from} arrived wrong in {to}");
                }
            }
        }
    }
}

fn word(seed: u64, tensor: u64, at: u64) -> u64 {
    (seed << 56) ^ (tensor << 44) ^ at.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A decode process, as the measuring process sees it.
pub struct Decode {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
    cluster: u64,
    port: u16,
}

impl Decode {
    pub fn start(cluster: u64, mib: u64, rows: u64, len: u64) -> Decode {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.arg("--decode").arg(cluster.to_string()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut decode = Decode { child, say, hear, cluster, port: 0 };
        decode.port = decode.ask(&format!("open {mib} {rows} {len}")).parse().unwrap();
        decode
    }

    pub fn address(&self) -> PeerAddress {
        address(self.cluster, self.port)
    }

    pub fn say(&mut self, order: &str) {
        writeln!(self.say, "{order}").unwrap();
    }

    pub fn hear(&mut self) -> String {
        let mut answer = String::new();
        assert!(self.hear.read_line(&mut answer).unwrap() > 0, "a decode process died");
        answer.trim().to_owned()
    }

    pub fn ask(&mut self, order: &str) -> String {
        self.say(order);
        self.hear()
    }
}

impl Drop for Decode {
    fn drop(&mut self) {
        let _ = writeln!(self.say, "end");
        let _ = self.child.wait();
    }
}

/// Runs a decode process until its end.
pub fn serve(cluster: u64) {
    let mut there: Option<(DataDist, Kv)> = None;
    let mut shuffle = Shuffle(7);
    let (mut src, mut dst) = (vec![], vec![]);
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        let answer = match (words[0], &there) {
            ("end", _) => return,
            ("open", _) => {
                let engine = DataDist::open(config(cluster, number(1))).unwrap();
                let kv = Kv::new(&engine, number(2), number(3));
                (src, dst) = (shuffle.order(kv.rows), shuffle.order(kv.rows));
                let port = engine.listening().unwrap().port();
                there = Some((engine, kv));
                port.to_string()
            }
            // The other side has already made the link; it serves both directions.
            ("link", Some((engine, _))) => engine.stats().links.len().to_string(),
            ("poison", Some((_, kv))) => {
                kv.poison();
                "done".into()
            }
            ("verify", Some((_, kv))) => {
                kv.verify(number(1), &src, &dst);
                "done".into()
            }
            ("pull", Some((engine, kv))) => pull(engine, kv, (&src, &dst), Layers::ALL).to_string(),
            ("pull_layers", Some((engine, kv))) => {
                let one = |layer: u32| {
                    let range = Some(LayerRange { first: layer, end: layer + 1 });
                    pull(engine, kv, (&src, &dst), Layers { src: range, dst: range, tensors_per_layer: 2 })
                };
                (0..LAYERS).map(one).sum::<u128>().to_string()
            }
            _ => panic!("{line}?"),
        };
        println!("{answer}");
        std::io::stdout().flush().unwrap();
    }
}

/// Nanoseconds of one pull.
fn pull(engine: &DataDist, kv: &Kv, (src, dst): (&[i64], &[i64]), layers: Layers) -> u128 {
    let from = RemoteName { cluster: ClusterId(1), name: Name::Key(KEY) };
    let rows = Rows::Blocks { remote: src.to_vec(), local: dst.to_vec() };
    let started = Instant::now();
    engine.pull(from, &kv.end, rows, layers).run().unwrap();
    started.elapsed().as_nanos()
}
