//! The same with a real UCX, between two processes of this host: `make test-ucx` runs these tests.
//!
//! `LLM_DATADIST_UCX_LIBRARY` is the path of `libucp.so.0`, and `LLM_DATADIST_UCX_TLS` the transports (`tcp` by default).

#![allow(unsafe_code, reason = "addresses of buffers, and signals")]
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small numbers")]
#![allow(clippy::cast_precision_loss, clippy::print_stdout, reason = "a rate that is printed")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "shared/owner.rs"]
mod owner;

use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_ucx::{Error, Fabric, Library, Options};
use owner::{BLOCK, BLOCKS, LONG, Owner, arrived, descriptors, percentiles, serve};

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
            owner.read(&peer, &target, Instant::now() + LONG).unwrap();
        }
        ours.push(8.0 * target.len() as f64 / started.elapsed().as_secs_f64() / 1e9);
        theirs.extend(perftest(13_400 + round));
    }
    assert!(arrived(&target));
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates.get(rates.len() / 2).copied()
    };
    println!("reads {:.2?} GB/s, ucx_perftest {:.2?} GB/s (medians)", median(&mut ours), median(&mut theirs));
    drop(mapping);
}

#[test]
#[ignore = "started by the tests below"]
fn owner() {
    serve(open);
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
        owner.read(&peer, &target, started + LONG).unwrap();
        println!(
            "registered {registered}: {:.2} GB/s",
            target.len() as f64 / started.elapsed().as_secs_f64() / 1e9
        );
        assert!(arrived(&target));
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
    let (mut late, mut max_descriptors) = (Vec::new(), (0, 0));
    for round in 0..rounds {
        owner.signal(libc::SIGSTOP);
        let deadline = Instant::now() + Duration::from_millis(20 + round % 7);
        let read = owner.read(&peer, &target, deadline);
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
        max_descriptors = (now.0.max(max_descriptors.0), now.1.max(max_descriptors.1));
        if round % 10 > 0 {
            continue;
        }
        let again = owner.read(&peer, &target, Instant::now() + LONG);
        again.unwrap();
        assert!(arrived(&target), "round {round}");
    }
    let times = percentiles(late);
    println!(
        "UCX {}: {given_up} of {rounds} reads were given up, {times:?} after their deadline (median, 99 %, at most)",
        fabric.version()
    );
    println!("{:?}; at most {max_descriptors:?} descriptors, of reader and owner", fabric.counts());
}

#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn an_owner_that_dies_fails_the_read() {
    let (mut owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    owner.process.kill().unwrap();
    owner.process.wait().unwrap();
    let read = owner.read(&peer, &target, Instant::now() + LONG);
    println!("{}", read.unwrap_err());
}

#[test]
#[ignore = "needs a real UCX: make test-ucx"]
fn an_idle_fabric_takes_no_time() {
    let (owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    owner.read(&peer, &target, Instant::now() + LONG).unwrap();
    thread::sleep(Duration::from_millis(500));
    let ticks = owner.idle_ticks();
    assert!(ticks <= 2, "{ticks} ticks of 10 ms in two seconds");
}
