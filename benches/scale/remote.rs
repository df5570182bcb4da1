//! The other process: an owner of blocks and keys, a herd of engines that listen, or a crowd that pulls; and
//! the commands to it. Each command and each answer is one line of words.
//!
//! It measures nothing except its own resources.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use llm_datadist_core::bindings::{CacheKey, DataDist, PeerAddress};
use llm_datadist_core::{CacheKind, Placement};

use crate::crowd::Crowd;
use crate::heap::Count;
use crate::setup::{Blocks, OWNER, SHARED, address, config, desc, on_cpu, status};

/// The other process, as the measuring process sees it.
pub struct RemoteCache {
    child: Child,
    say: ChildStdin,
    hear: BufReader<ChildStdout>,
}

impl RemoteCache {
    pub fn start() -> RemoteCache {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .arg("--remote")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (say, hear) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        RemoteCache { child, say, hear }
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

    /// Starts an owner of `rows` blocks of `bytes` each, filled. Returns its address.
    pub fn owner(
        &mut self,
        transport: &str,
        one_sided: bool,
        rows: u64,
        bytes: u64,
        port: u16,
    ) -> PeerAddress {
        let order = format!("owner {transport} {one_sided} {rows} {bytes} {port}");
        address(OWNER, self.number(&order) as u16)
    }

    /// Kills the process without a clean shutdown.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for RemoteCache {
    fn drop(&mut self) {
        let _ = writeln!(self.say, "end");
        let _ = self.child.wait();
    }
}

#[derive(Default)]
struct There {
    owner: Option<DataDist>,
    keys: u64,
    herd: Vec<DataDist>,
    crowd: Crowd,
    count: Option<Count>,
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

/// The key that a number stands for.
pub fn numbered(id: u64) -> CacheKey {
    CacheKey::Request { model: 5, id }
}

impl There {
    fn obey(&mut self, order: &str, words: &[&str]) -> String {
        let number = |at: usize| words[at].parse::<u64>().unwrap();
        match order {
            "owner" => self.own(words[0], words[1] == "true", number(2), number(3), number(4) as u16),
            "keys" => self.keys(number(0), number(1)),
            "herd" => self.herd(words[0], number(1), number(2)),
            "decoders" => {
                self.crowd.grow(words[0], number(1));
                let peer = address(OWNER, number(2) as u16);
                self.crowd.link(&peer, std::time::Instant::now).to_string()
            }
            "pull" => self.crowd.pull(Duration::from_millis(number(0))).to_string(),
            "cpu" => on_cpu().to_string(),
            "threads" => status("Threads:").to_string(),
            "rss" => status("VmRSS:").to_string(),
            "count" => {
                self.count = Some(Count::start());
                "counting".into()
            }
            "most" => self.count.take().unwrap().most().to_string(),
            _ => panic!("{order}?"),
        }
    }

    fn own(&mut self, transport: &str, one_sided: bool, rows: u64, bytes: u64, port: u16) -> String {
        // The previous owner frees its memory first.
        self.owner = None;
        self.keys = 0;
        let mut config = config(OWNER.0, transport, ((rows * bytes) >> 20) + 512, 10);
        config.remote_accessible = one_sided;
        config.links.listen = Some(([127, 0, 0, 1], port).into());
        let engine = DataDist::open(config).unwrap();
        if rows > 0 {
            Blocks::new(&engine, rows, bytes, Placement::Device, Some(SHARED)).fill();
        }
        let port = engine.listening().unwrap().port();
        self.owner = Some(engine);
        port.to_string()
    }

    /// Binds `count` more keys, `rows` per cache, and returns the first number. Only the keys hold the
    /// caches.
    fn keys(&mut self, count: u64, rows: u64) -> String {
        let (engine, first) = (self.owner.as_ref().unwrap(), self.keys);
        self.keys += count;
        let mut from = first;
        while from < self.keys {
            let rows = rows.min(self.keys - from);
            let keys: Vec<_> = (from..from + rows).map(|id| Some(numbered(id))).collect();
            let shape = desc(rows, 64, 1, Placement::Device);
            let cache = engine.allocate(&shape, CacheKind::Batch, &keys).unwrap();
            engine.deallocate(cache.id()).unwrap();
            from += rows;
        }
        first.to_string()
    }

    /// Opens engines of clusters `first..first + count`, each with one block, and returns their ports.
    fn herd(&mut self, transport: &str, first: u64, count: u64) -> String {
        let mut ports = String::new();
        for cluster in first..first + count {
            let mut config = config(cluster, transport, 1, 12);
            config.copy_workers = Some(1);
            let engine = DataDist::open(config).unwrap();
            Blocks::new(&engine, 1, 16 << 10, Placement::Device, Some(SHARED)).fill();
            write!(ports, "{} ", engine.listening().unwrap().port()).unwrap();
            self.herd.push(engine);
        }
        ports
    }
}
