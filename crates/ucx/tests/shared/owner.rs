//! A process that maps memory, which a test reads with the real UCX.

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use llm_datadist_ucx::{Error, Fabric, Peer, Piece};

pub(crate) const LONG: Duration = Duration::from_secs(20);
pub(crate) const BLOCK: usize = 64 << 10;
pub(crate) const BLOCKS: usize = 2048;

fn pattern(at: usize) -> u8 {
    (at * 31 + at / 4099) as u8
}

/// Whether a target has the bytes of an owner.
pub(crate) fn arrived(target: &[u8]) -> bool {
    target.iter().enumerate().all(|(at, &byte)| byte == pattern(at))
}

fn hex(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        write!(text, "{byte:02x}").unwrap();
    }
    text
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// Maps memory, and waits until standard input ends. Does nothing unless `OWNER` is set, as it is in the other process.
pub(crate) fn serve(open: impl FnOnce() -> Fabric) {
    if std::env::var_os("OWNER").is_none() {
        return;
    }
    let fabric = open();
    let memory: Vec<u8> = (0..BLOCK * BLOCKS).map(pattern).collect();
    // SAFETY: the memory lives until the end of the process.
    let mapping = unsafe { fabric.map(memory.as_ptr() as u64, memory.len() as u64) }.unwrap();
    println!("OWNER {} {} {}", hex(&fabric.address().unwrap()), hex(mapping.key()), memory.as_ptr() as u64);
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

/// The other process.
pub(crate) struct Owner {
    pub(crate) process: Child,
    /// Kept open: after a minute, the test program of the owner prints a warning.
    _output: BufReader<ChildStdout>,
    pub(crate) address: Vec<u8>,
    pub(crate) key: Arc<Vec<u8>>,
    start: u64,
}

impl Owner {
    /// Starts the test `owner` of this program in another process.
    pub(crate) fn start() -> Owner {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["owner", "--exact", "--ignored", "--nocapture"]).env("OWNER", "1");
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap());
        let found = (&mut output)
            .lines()
            .map(Result::unwrap)
            .find_map(|line| line.split_once("OWNER ").map(|(_, rest)| rest.to_owned()));
        let found = found.expect("the owner did not start");
        let words: Vec<&str> = found.split(' ').collect();
        let (address, key) = (bytes(words[0]), Arc::new(bytes(words[1])));
        Owner { process, _output: output, address, key, start: words[2].parse().unwrap() }
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a process of this test.
        unsafe { libc::kill(self.process.id() as i32, signal) };
    }

    /// Reads all blocks, in an order in which no two neighbours follow each other.
    pub(crate) fn read(&self, peer: &Peer, target: &[u8], deadline: Instant) -> Result<(), Error> {
        let piece = |at: usize| Piece {
            local: target.as_ptr() as u64 + (at * BLOCK) as u64,
            remote: self.start + (at * BLOCK) as u64,
            len: BLOCK as u64,
        };
        let pieces = (0..BLOCKS).map(|at| piece(at * 1021 % BLOCKS)).collect();
        // SAFETY: the destinations are the target, which lives longer.
        unsafe { peer.read(&self.key, pieces, Some(deadline), &|| false) }
    }

    /// Returns how many ticks of 10 ms both processes use in two seconds.
    pub(crate) fn idle_ticks(&self) -> u64 {
        let used = |pid: u32| -> u64 {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
            let words: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
            words[11].parse::<u64>().unwrap() + words[12].parse::<u64>().unwrap()
        };
        let both = || used(std::process::id()) + used(self.process.id());
        let before = both();
        std::thread::sleep(Duration::from_secs(2));
        both() - before
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub(crate) fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

/// Returns the median, the 99th percentile and the largest of these times.
pub(crate) fn percentiles(mut times: Vec<Duration>) -> [Duration; 3] {
    times.sort();
    [50, 99, 100]
        .map(|percent| times.get(times.len() * percent / 100).or(times.last()).copied().unwrap_or_default())
}
