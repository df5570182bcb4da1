//! The same with a real UCX, between two processes of this host: `make test-ucx` runs these tests.
//!
//! `LLM_DATADIST_UCX_LIBRARY` is the path of `libucp.so.0`, and `LLM_DATADIST_UCX_TLS` the transports (`tcp` by default).

#![allow(unsafe_code, reason = "addresses of buffers, and signals")]
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small numbers")]
#![allow(clippy::cast_precision_loss, clippy::print_stdout, reason = "a rate that is printed")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_fabric::{Error, Fabric as _, Piece};
use llm_datadist_ucx::{Fabric, Library, Options};

const LONG: Duration = Duration::from_secs(20);
const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 2048;

fn open() -> Fabric {
    let path = std::env::var("LLM_DATADIST_UCX_LIBRARY").expect("LLM_DATADIST_UCX_LIBRARY names libucp.so.0");
    let transports = std::env::var("LLM_DATADIST_UCX_TLS").unwrap_or_else(|_| "tcp".into());
    // SAFETY: the variable names the library of UCX, and no other thread uses the environment through functions of C.
    let library = unsafe { Library::open(path.as_ref()) }.unwrap();
    // The shared memory of UCX cannot report a peer that has failed.
    let peer_failures = transports == "tcp";
    let settings = vec![("TLS".to_owned(), transports)];
    Fabric::open(&library, Options { settings, peer_failures, ..Options::default() }).unwrap()
}

/// The rate at which `ucx_perftest` gets pieces of the same size through the same transports, in GB/s.
fn perftest(port: u16) -> Option<f64> {
    let program = std::env::var("LLM_DATADIST_UCX_PERFTEST").ok().filter(|path| !path.is_empty())?;
    let transports = std::env::var("LLM_DATADIST_UCX_TLS").unwrap_or_else(|_| "tcp".into());
    let command = |peer: &[&str]| {
        let mut command = Command::new(&program);
        command.args(peer).args([
            "-t",
            "ucp_get",
            "-s",
            &BLOCK.to_string(),
            "-n",
            "20000",
            "-w",
            "2000",
            "-O",
            "64",
        ]);
        command.args(["-f", "-p", &port.to_string()]).env("UCX_TLS", &transports);
        // Memory of its own, not shared memory of UCX.
        command.env("UCX_ALLOC_PRIO", "mmap,heap").stdout(Stdio::piped());
        command
    };
    let mut server = command(&[]).spawn().unwrap();
    thread::sleep(Duration::from_millis(500));
    let output = command(&["127.0.0.1"]).output().unwrap();
    let _ = server.kill();
    let _ = server.wait();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    // Columns of the last line: iterations, latency (percentile, average, overall), bandwidth in MB/s of 2^20 bytes.
    let rate =
        text.lines().filter_map(|line| line.split_whitespace().nth(5)?.parse::<f64>().ok()).next_back();
    Some(rate.unwrap_or_else(|| panic!("no figures: {text}")) * f64::from(1 << 20) / 1e9)
}

/// Not a test of speed: it prints the rates, in turns. `ucx_perftest` gets one block again and again, so this does too.
#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn rates_beside_perftest() {
    let (owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    // SAFETY: the memory lives longer than the mapping.
    let mapping = unsafe { fabric.map(target.as_ptr() as u64, target.len() as u64) }.unwrap();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..7 {
        let started = Instant::now();
        for _ in 0..8 {
            // SAFETY: the destinations live longer.
            unsafe {
                peer.read(&owner.key, pieces(&target, owner.start), Some(Instant::now() + LONG), &|| false)
            }
            .unwrap();
        }
        ours.push(8.0 * target.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
        theirs.extend(perftest(13_400 + round));
    }
    assert!(target.iter().enumerate().all(|(at, &byte)| byte == pattern(at)));
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    };
    println!("reads {:.2?} GB/s, ucx_perftest {:.2?} GB/s (medians)", median(&mut ours), median(&mut theirs));
    drop(mapping);
}

fn pattern(at: usize) -> u8 {
    (at * 31 + at / 4099) as u8
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

/// The other process: it maps memory, and waits.
#[test]
#[ignore = "started by the tests below"]
fn owner() {
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

struct Owner {
    process: Child,
    /// Kept open: after a minute, the test program of the owner says that it is slow.
    _output: BufReader<ChildStdout>,
    address: Vec<u8>,
    key: Arc<Vec<u8>>,
    start: u64,
}

impl Owner {
    fn start() -> Owner {
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

    fn signal(&self, signal: i32) {
        // SAFETY: a process of this test.
        unsafe { libc::kill(self.process.id() as i32, signal) };
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// All blocks, in an order in which no two neighbours follow each other.
fn pieces(target: &[u8], start: u64) -> Vec<Piece> {
    let piece = |at: usize| Piece {
        local: target.as_ptr() as u64 + (at * BLOCK) as u64,
        remote: start + (at * BLOCK) as u64,
        len: BLOCK as u64,
    };
    (0..BLOCKS).map(|at| piece(at * 1021 % BLOCKS)).collect()
}

fn descriptors(pid: u32) -> usize {
    std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn bytes_arrive() {
    let (owner, fabric) = (Owner::start(), open());
    println!(
        "UCX {}, keys of {} bytes, addresses of {}",
        fabric.version(),
        owner.key.len(),
        owner.address.len()
    );
    let peer = fabric.peer(owner.address.clone());
    for registered in [false, true] {
        let target = vec![0u8; BLOCK * BLOCKS];
        // SAFETY: the memory lives longer than the mapping.
        let mapping =
            registered.then(|| unsafe { fabric.map(target.as_ptr() as u64, target.len() as u64) }.unwrap());
        let started = Instant::now();
        // SAFETY: the destinations live longer.
        unsafe { peer.read(&owner.key, pieces(&target, owner.start), Some(started + LONG), &|| false) }
            .unwrap();
        println!(
            "registered {registered}: {:.2} GB/s",
            target.len() as f64 / started.elapsed().as_secs_f64() / 1e9
        );
        assert!(target.iter().enumerate().all(|(at, &byte)| byte == pattern(at)));
        drop(mapping);
    }
}

/// The owner is stopped in the middle of a read, and continues after the reader has given up.
#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn no_byte_arrives_after_a_read_was_given_up() {
    let rounds = std::env::var("ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    let (owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let mut target = vec![0u8; BLOCK * BLOCKS];
    let mut given_up = 0;
    let (mut late, mut most_descriptors) = (Vec::new(), (0, 0));
    for round in 0..rounds {
        owner.signal(libc::SIGSTOP);
        let deadline = Instant::now() + Duration::from_millis(20 + round % 7);
        // SAFETY: the destinations live longer.
        let read = unsafe { peer.read(&owner.key, pieces(&target, owner.start), Some(deadline), &|| false) };
        if let Err(error) = &read {
            assert_eq!(*error, Error::DeadlinePassed);
            late.push(deadline.elapsed());
            given_up += 1;
            target.fill(0xEE);
            owner.signal(libc::SIGCONT);
            thread::sleep(Duration::from_millis(100));
            let written = target.iter().filter(|&&byte| byte != 0xEE).count();
            assert_eq!(written, 0, "round {round}: bytes came after the end");
        }
        owner.signal(libc::SIGCONT);
        let now = (descriptors(std::process::id()), descriptors(owner.process.id()));
        most_descriptors = (now.0.max(most_descriptors.0), now.1.max(most_descriptors.1));
        if round % 10 > 0 {
            continue;
        }
        // SAFETY: as above.
        let again = unsafe {
            peer.read(&owner.key, pieces(&target, owner.start), Some(Instant::now() + LONG), &|| false)
        };
        again.unwrap();
        assert!(target.iter().enumerate().all(|(at, &byte)| byte == pattern(at)), "round {round}");
    }
    late.sort();
    let at =
        |percent: usize| late.get(late.len() * percent / 100).or(late.last()).copied().unwrap_or_default();
    println!(
        "UCX {}: {given_up} of {rounds} reads were given up, {:?} after their deadline (median), {:?} (99 %), {:?} at most",
        fabric.version(),
        at(50),
        at(99),
        at(100)
    );
    println!("{:?}; at most {most_descriptors:?} descriptors, of reader and owner", fabric.counts());
}

#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn an_owner_that_dies_fails_the_read() {
    let (mut owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    owner.process.kill().unwrap();
    owner.process.wait().unwrap();
    // SAFETY: the destinations live longer.
    let read = unsafe {
        peer.read(&owner.key, pieces(&target, owner.start), Some(Instant::now() + LONG), &|| false)
    };
    println!("{}", read.unwrap_err());
}

#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn an_idle_fabric_takes_no_time() {
    let (owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    // SAFETY: the destinations live longer.
    unsafe { peer.read(&owner.key, pieces(&target, owner.start), Some(Instant::now() + LONG), &|| false) }
        .unwrap();
    thread::sleep(Duration::from_millis(500));
    let used = |pid: u32| -> u64 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let words: Vec<&str> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
        words[11].parse::<u64>().unwrap() + words[12].parse::<u64>().unwrap()
    };
    let both = || used(std::process::id()) + used(owner.process.id());
    let before = both();
    thread::sleep(Duration::from_secs(2));
    let ticks = both() - before;
    assert!(ticks <= 2, "{ticks} ticks of 10 ms in two seconds");
}
