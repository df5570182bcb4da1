//! The same with a real NIXL, between two processes of this host: `make test-nixl` runs these tests.
//!
//! `LLM_DATADIST_NIXL_LIBRARY` is the path of `libnixl_capi.so`. NIXL uses TCP.

#![allow(unsafe_code, reason = "addresses of buffers, and signals")]
#![allow(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "small numbers")]
#![allow(clippy::cast_precision_loss, clippy::print_stdout, reason = "figures that are printed")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../../fabric/tests/shared/owner.rs"]
mod owner;

use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_fabric::{Error, Fabric as _};
use llm_datadist_nixl::{Fabric, Library, Options};
use owner::{BLOCK, BLOCKS, LONG, Owner, arrived, descriptors, percentiles, serve};

fn open() -> Fabric {
    let path = std::env::var("LLM_DATADIST_NIXL_LIBRARY").expect("it names libnixl_capi.so");
    let started = Instant::now();
    // SAFETY: the variable names the library of NIXL, and no other thread uses the environment through functions of C.
    let library = unsafe { Library::open(path.as_ref()) }.unwrap();
    let loaded = started.elapsed();
    let settings = vec![("TLS".to_owned(), "tcp".to_owned())];
    let fabric = Fabric::open(&library, &Options { settings, ..Options::default() }).unwrap();
    println!("{library:?}: loaded in {loaded:?}, opened in {:?}", started.elapsed().saturating_sub(loaded));
    fabric
}

#[test]
#[ignore = "started by the tests below"]
fn owner() {
    serve(open);
}

fn resident_mib() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() / 256
}

#[test]
#[ignore = "needs a real NIXL: make test-nixl"]
fn bytes_arrive() {
    let (owner, fabric) = (Owner::start(), open());
    println!("addresses of {} bytes with one mapping", owner.address.len());
    let peer = fabric.peer(owner.address.clone());
    for registered in [false, true, true] {
        let target = vec![0u8; BLOCK * BLOCKS];
        // SAFETY: the memory lives longer than the mapping.
        let mapping =
            registered.then(|| unsafe { fabric.map(target.as_ptr() as u64, target.len() as u64) }.unwrap());
        let started = Instant::now();
        owner.read(&*peer, &target, started + LONG).unwrap();
        let rate = target.len() as f64 / started.elapsed().as_secs_f64() / 1e9;
        println!("registered {registered}: {rate:.2} GB/s");
        assert!(arrived(&target));
        drop(mapping);
    }
}

fn rounds() -> u64 {
    std::env::var("ROUNDS").map_or(5, |rounds| rounds.parse().unwrap())
}

/// Whether a byte of the target changes within 100 ms after this call.
fn bytes_arrive_late(target: &mut [u8], meanwhile: impl FnOnce()) -> bool {
    target.fill(0xEE);
    meanwhile();
    thread::sleep(Duration::from_millis(100));
    target.iter().any(|&byte| byte != 0xEE)
}

/// Gives up reads in the middle, while the owner goes on sending, or after it was stopped. In the second case, it continues
/// afterwards. UCX sometimes aborts an owner whose reader has gone, over TCP (docs/networks.md), so such an owner is replaced and
/// counted.
fn give_up(stops: bool) {
    let (mut owner, fabric) = (Owner::start(), open());
    let mut peer = fabric.peer(owner.address.clone());
    let mut target = vec![0u8; BLOCK * BLOCKS];
    let (mut late, mut begun, mut aborted, mut most_descriptors) = (Vec::new(), 0, 0, 0);
    let resident = resident_mib();
    for round in 0..rounds() {
        target.fill(0);
        let deadline = Instant::now() + Duration::from_millis(35 + round % 29);
        let outcome = thread::scope(|scope| {
            let reading = scope.spawn(|| owner.read(&*peer, &target, deadline));
            if stops {
                thread::sleep(Duration::from_millis(27 + round % 11));
                owner.signal(libc::SIGSTOP);
            }
            reading.join().unwrap()
        });
        if let Err(error) = outcome {
            assert_eq!(error, Error::DeadlinePassed);
            late.push(deadline.elapsed());
            begun += u64::from(target.iter().any(|&byte| byte != 0));
            let came = bytes_arrive_late(&mut target, || owner.signal(libc::SIGCONT));
            assert!(!came, "round {round}: bytes came after the end");
        }
        owner.signal(libc::SIGCONT);
        if owner.process.try_wait().unwrap().is_some() {
            aborted += 1;
            owner = Owner::start();
            peer = fabric.peer(owner.address.clone());
        }
        most_descriptors = most_descriptors.max(descriptors(std::process::id()));
        if round % 10 == 0 {
            owner.read(&*peer, &target, Instant::now() + LONG).unwrap();
            assert!(arrived(&target), "round {round}");
        }
    }
    let (given_up, rounds, times) = (late.len(), rounds(), percentiles(late));
    println!(
        "{given_up} of {rounds} reads were given up, {begun} of them in the middle; {aborted} owners aborted"
    );
    println!("after the deadline: {times:?} (median, 99 %, at most); at most {most_descriptors} descriptors");
    println!(
        "{:?}; {resident} MiB of memory at the beginning, {} at the end",
        fabric.counts(),
        resident_mib()
    );
}

#[test]
#[ignore = "needs a real NIXL: make test-nixl"]
fn no_byte_arrives_after_a_read_was_given_up() {
    give_up(false);
}

#[test]
#[ignore = "needs a real NIXL: make test-nixl"]
fn no_byte_arrives_from_an_owner_that_was_stopped() {
    give_up(true);
}

#[test]
#[ignore = "needs a real NIXL: make test-nixl"]
fn an_owner_that_dies_fails_the_read() {
    let (mut owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    owner.process.kill().unwrap();
    owner.process.wait().unwrap();
    let started = Instant::now();
    let failed = owner.read(&*peer, &target, started + LONG).unwrap_err();
    println!("{failed}, after {:?}", started.elapsed());
}

#[test]
#[ignore = "needs a real NIXL: make test-nixl"]
fn an_idle_fabric_takes_no_time() {
    let (owner, fabric) = (Owner::start(), open());
    let peer = fabric.peer(owner.address.clone());
    let target = vec![0u8; BLOCK * BLOCKS];
    owner.read(&*peer, &target, Instant::now() + LONG).unwrap();
    thread::sleep(Duration::from_millis(500));
    let ticks = owner.idle_ticks();
    println!("{ticks} ticks of 10 ms in two seconds, of both processes");
    assert!(ticks <= 2, "{ticks} ticks of 10 ms in two seconds");
}
