//! Another process's memory beside one's own, in one run: the engine over a mapping of it and through the kernel, and
//! hand-written loops with the same threads and the same list of blocks. Prints ratios.
//!
//! `cargo bench -p llm-datadist-core --bench foreign [-- --mib 512 --rounds 7 --blocks 16,64,1024 --workers 2]`
//!
//! Every round is verified outside the clock. `cold` maps anew for each round. Not for: absolute figures.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark stops at the first surprise")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "sizes of a few GiB"
)]
#![allow(
    clippy::cast_ptr_alignment,
    clippy::multiple_unsafe_ops_per_block,
    reason = "hand-written copy loops"
)]
#![allow(unsafe_code, missing_docs, reason = "the hand-written loops are the point of comparison")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::check::BlockPairs;
use llm_datadist_core::device::DeviceSet;
use llm_datadist_core::engine::{CopyEngine, Staging};
use llm_datadist_core::mem::{
    ForeignProcess, ForeignRegion, Probe, Region, Tensors, allow_readers, own_probe,
};
use llm_datadist_core::plan::{CopyPlan, Ends};
use llm_datadist_core::{ClusterId, Config, Deadline, Placement, Role, SwapInPath};

struct Options {
    mib: u64,
    rounds: usize,
    blocks: Vec<u64>,
    workers: usize,
}

fn options() -> Options {
    let mut options = Options { mib: 512, rounds: 7, blocks: vec![16, 64, 1024], workers: 2 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--mib" => options.mib = value().parse().unwrap(),
            "--rounds" => options.rounds = value().parse().unwrap(),
            "--workers" => options.workers = value().parse().unwrap(),
            "--blocks" => options.blocks = value().split(',').map(|kib| kib.parse().unwrap()).collect(),
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// What every word of the memory says.
fn word(at: u64) -> u64 {
    at.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn fill(base: u64, bytes: u64) {
    for at in 0..bytes / 8 {
        // SAFETY: inside a live region of `bytes` bytes.
        unsafe { *((base + at * 8) as *mut u64) = word(at) };
    }
}

/// The other process: a region full of words, until its input ends.
fn child(bytes: u64) {
    allow_readers();
    let region = Region::shared("bench", bytes).unwrap();
    fill(region.base(), bytes);
    let probe = own_probe().unwrap();
    let secret = u128::from_le_bytes(probe.secret);
    let fd = region.descriptor().unwrap().as_raw_fd();
    println!("{fd} {} {} {secret}", region.base(), probe.address);
    std::io::stdout().flush().unwrap();
    let _ = std::io::stdin().read_line(&mut String::new());
}

struct Peer {
    child: Child,
    fd: String,
    base: u64,
    probe: Probe,
}

fn peer(bytes: u64) -> Peer {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .env("FOREIGN_BENCH_CHILD", bytes.to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let words: Vec<&str> = line.split_whitespace().collect();
    let fd = format!("/proc/{}/fd/{}", child.id(), words[0]);
    let secret = words[3].parse::<u128>().unwrap().to_le_bytes();
    let probe = Probe { address: words[2].parse().unwrap(), secret };
    Peer { fd, base: words[1].parse().unwrap(), probe, child }
}

impl Peer {
    fn mapped(&self, bytes: u64) -> Arc<Tensors> {
        let region = ForeignRegion::map(File::open(&self.fd).unwrap().into(), bytes).unwrap();
        Arc::new(Tensors::mapped(region, [0], bytes).unwrap())
    }
}

fn shuffled(count: u64) -> Vec<(u64, u64)> {
    let mut state = 0x1234_5678_9ABC_DEF1_u64;
    let mut list: Vec<u64> = (0..count).collect();
    for at in (1..list.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        list.swap(at, (state % (at as u64 + 1)) as usize);
    }
    list.into_iter().enumerate().map(|(src, dst)| (src as u64, dst)).collect()
}

/// Gives out stretches of `chunk` moves to `threads` threads.
fn spread(moves: &[(u64, u64)], chunk: usize, threads: usize, each: impl Fn(&[(u64, u64)]) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(chunk, Ordering::Relaxed);
                    if at >= moves.len() {
                        return;
                    }
                    each(&moves[at..moves.len().min(at + chunk)]);
                }
            });
        }
    });
}

fn plain(moves: &[(u64, u64)], len: usize) {
    for &(src, dst) in moves {
        // SAFETY: blocks of two live regions, `len` bytes each.
        unsafe { std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, len) };
    }
}

#[cfg(target_arch = "x86_64")]
fn streaming(moves: &[(u64, u64)], len: usize) {
    #[target_feature(enable = "avx2")]
    unsafe fn go(src: *const u8, dst: *mut u8, len: usize) {
        use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
        for at in (0..len).step_by(128) {
            // SAFETY: whole blocks, aligned to a page, a multiple of 128 bytes.
            unsafe {
                let (from, to) = (src.add(at).cast::<__m256i>(), dst.add(at).cast::<__m256i>());
                let four = [0, 1, 2, 3].map(|part| _mm256_loadu_si256(from.add(part)));
                for (part, bytes) in four.into_iter().enumerate() {
                    _mm256_stream_si256(to.add(part), bytes);
                }
            }
        }
        _mm_sfence();
    }
    for &(src, dst) in moves {
        // SAFETY: as above; every machine this benchmark is read on has AVX2.
        unsafe { go(src as *const u8, dst as *mut u8, len) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
use plain as streaming;

/// One call of the kernel for all of `moves`.
fn bare(pid: i32, moves: &[(u64, u64)], len: usize) {
    let vector = |at: u64| libc::iovec { iov_base: at as *mut libc::c_void, iov_len: len };
    let far: Vec<_> = moves.iter().map(|&(src, _)| vector(src)).collect();
    let near: Vec<_> = moves.iter().map(|&(_, dst)| vector(dst)).collect();
    let count = moves.len() as libc::c_ulong;
    // SAFETY: the near blocks are in a live region of this process.
    let got = unsafe { libc::process_vm_readv(pid, near.as_ptr(), count, far.as_ptr(), count, 0) };
    assert_eq!(got, (moves.len() * len) as isize);
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64()
}

fn main() {
    if let Ok(bytes) = std::env::var("FOREIGN_BENCH_CHILD") {
        return child(bytes.parse().unwrap());
    }
    let options = options();
    let bytes = options.mib << 20;
    let mut peer = peer(bytes);
    let (own, target) = (region(bytes), region(bytes));
    fill(own.addrs()[0], bytes);
    let config = Config { copy_workers: Some(options.workers), ..Config::new(Role::Prompt, ClusterId(1)) };
    let engine = CopyEngine::new(&config, DeviceSet::host_only()).unwrap();
    println!("{} MiB, {} workers, shares of the best hand-written loop", options.mib, options.workers);
    for &kib in &options.blocks {
        blocks(&options, &engine, &peer, (&own, &target), bytes, kib << 10);
    }
    drop(peer.child.stdin.take());
    peer.child.wait().unwrap();
}

fn region(bytes: u64) -> Arc<Tensors> {
    let region = Arc::new(Region::shared("bench", bytes).unwrap());
    let tensors = Tensors::carved(region, [0], bytes, Box::new(())).unwrap();
    fill(tensors.addrs()[0], bytes);
    Arc::new(tensors)
}

/// A name, and what is timed.
type Way<'a> = (&'static str, Box<dyn Fn() + 'a>);

fn blocks(
    options: &Options,
    engine: &CopyEngine,
    peer: &Peer,
    (own, target): (&Arc<Tensors>, &Arc<Tensors>),
    bytes: u64,
    len: u64,
) {
    let pairs = shuffled(bytes / len);
    let plan = CopyPlan::blocks(
        &BlockPairs { pairs: pairs.clone(), block_bytes: len, num_tensors: 1 },
        Ends::TwoCaches,
    );
    let moves = |from: u64| {
        pairs.iter().map(|&(src, dst)| (from + src * len, target.addrs()[0] + dst * len)).collect::<Vec<_>>()
    };
    let (near, far) = (moves(own.addrs()[0]), moves(peer.base));
    let chunk = (512 << 10) / len.min(512 << 10) as usize;
    let mapped = peer.mapped(bytes);
    let seen = moves(mapped.addrs()[0]);
    let pid = peer.child.id() as i32;
    let process = ForeignProcess::open(pid, peer.probe).unwrap();
    let read = Arc::new(Tensors::of_process(process, [peer.base].into(), bytes).unwrap());
    // Kept until the clock has stopped: giving a mapping back takes time of its own.
    let cold = Mutex::new(None);
    let run = |src: &Arc<Tensors>| {
        let staging = Staging { path: SwapInPath::Auto, buffer_bytes: 1 << 20 };
        let deadline = Deadline::after(Duration::from_secs(60));
        let ends = ((src, Placement::Device), (target, Placement::Device));
        engine.run(plan.clone(), ends.0, ends.1, staging, deadline, &Arc::default()).unwrap();
    };
    let len = len as usize;
    let ways: Vec<Way<'_>> = vec![
        ("plain loop", Box::new(|| spread(&near, chunk, options.workers, |moves| plain(moves, len)))),
        ("streaming loop", Box::new(|| spread(&near, chunk, options.workers, |moves| streaming(moves, len)))),
        ("engine, own", Box::new(|| run(own))),
        (
            "streaming, mapped",
            Box::new(|| spread(&seen, chunk, options.workers, |moves| streaming(moves, len))),
        ),
        ("engine, mapped", Box::new(|| run(&mapped))),
        ("engine, mapped cold", Box::new(|| run(&cold.lock().unwrap().insert(peer.mapped(bytes)).clone()))),
        (
            "bare readv, small",
            Box::new(|| spread(&far, chunk, options.workers, |moves| bare(pid, moves, len))),
        ),
        (
            "bare readv, 1024",
            Box::new(|| {
                spread(&far, 1024.min(far.len() / 4), options.workers, |moves| bare(pid, moves, len));
            }),
        ),
        ("engine, process", Box::new(|| run(&read))),
    ];
    let mut times = vec![Vec::new(); ways.len()];
    for round in 0..=options.rounds {
        // Another one first in each round, so that none always finds the caches as the same neighbour left them.
        for turn in 0..ways.len() {
            let index = (turn * 2 + round) % ways.len();
            let (name, way) = &ways[index];
            cold.lock().unwrap().take();
            // SAFETY: a live region of `bytes` bytes that nobody uses now.
            unsafe { std::ptr::write_bytes(target.addrs()[0] as *mut u8, 0, bytes as usize) };
            let started = Instant::now();
            way();
            let took = started.elapsed();
            if round > 0 {
                times[index].push(took);
            }
            for &(src, dst) in &pairs {
                let at = target.addrs()[0] + dst * len as u64;
                // SAFETY: inside that region.
                let got = unsafe { *(at as *const u64) };
                assert_eq!(got, word(src * len as u64 / 8), "{name}");
            }
        }
    }
    let medians: Vec<f64> = times.into_iter().map(median).collect();
    let (copy, kernel) = (medians[0].min(medians[1]), medians[6].min(medians[7]));
    println!("blocks of {} KiB", len >> 10);
    for (index, (name, _)) in ways.iter().enumerate() {
        let best = if index < 6 { copy } else { kernel };
        let speed = bytes as f64 / medians[index] / 1e9;
        println!("  {name:20} {speed:6.2} GB/s  {:5.2}", best / medians[index]);
    }
}
