//! Compares copies and swaps with the limit of this machine, in one run. The engine and hand-written loops
//! take turns over the same mapping and list of blocks. The loops use one and two threads, and ordinary and
//! streaming stores (in plain order, with prefetch of the next block, four pages in turn). Prints ratios;
//! with `--all` also the speed of every loop.
//!
//! `cargo bench -p llm-datadist-core --bench copy [-- --mib 512 --rounds 7 --only swap_out --blocks 16,64 --all]`
//!
//! Every round is verified outside the timed part. Absolute figures mean little, because machines differ and
//! are shared.

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
#![allow(unreachable_pub, reason = "one file of several benchmarks")]
#![allow(unsafe_code, missing_docs, reason = "the hand-written loops are the point of comparison")]

use std::sync::Arc;
use std::time::Duration;

#[path = "hand.rs"]
mod hand;

use hand::{Flat, LOOPS, Shuffle, loop_over, median, timed};
use llm_datadist_core::bindings::{Cache, Config, CopyArgs, DataDist, End, PoolConfig, Role, SwapInPath};
use llm_datadist_core::{CacheDesc, CacheKind, ClusterId, DataType, Placement};

struct Options {
    mib: u64,
    rounds: usize,
    only: Option<String>,
    blocks: Vec<u64>,
    workers: Option<usize>,
    tensors: Vec<u32>,
    all: bool,
}

fn options() -> Options {
    let mut options = Options {
        mib: 512,
        rounds: 7,
        only: None,
        blocks: vec![4, 16, 64, 256, 1024, 2048],
        workers: None,
        tensors: vec![2, 80],
        all: false,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--mib" => options.mib = value().parse().unwrap(),
            "--rounds" => options.rounds = value().parse().unwrap(),
            "--all" => options.all = true,
            "--only" => options.only = Some(value()),
            "--workers" => options.workers = Some(value().parse().unwrap()),
            "--blocks" => options.blocks = value().split(',').map(|kib| kib.parse().unwrap()).collect(),
            "--tensors" => options.tensors = value().split(',').map(|count| count.parse().unwrap()).collect(),
            _ => {} // what cargo itself passes
        }
    }
    options
}

struct Bed {
    engine: DataDist,
    device: Arc<Cache>,
    host: Arc<Cache>,
}

impl Bed {
    fn new(options: &Options, tensors: u32, block: u64, kind: CacheKind, swap_in: SwapInPath) -> Bed {
        let rows = (options.mib << 20) / (u64::from(tensors) * block);
        let bytes = rows * block * u64::from(tensors) + (u64::from(tensors) << 16);
        let mut config = Config::new(Role::Mix, ClusterId(1));
        config.device_pool = Some(PoolConfig { memory_size: bytes, page_shift: 16 });
        config.host_pool = config.device_pool;
        config.sync_timeout = Duration::from_secs(60);
        config.copy_workers = options.workers;
        config.swap_in = swap_in;
        let engine = DataDist::open(config).unwrap();
        let cache = |placement| {
            let desc = CacheDesc {
                num_tensors: tensors,
                shape: vec![rows as i64, block as i64],
                data_type: DataType::Uint8,
                placement,
                row_stride: None,
                kv_layout: None,
            };
            engine.allocate(&desc, kind, &[]).unwrap()
        };
        let bed = Bed { device: cache(Placement::Device), host: cache(Placement::Host), engine };
        fill(&bed.device, 1);
        fill(&bed.host, 2);
        bed
    }
}

/// Writes a different value to every 8-byte word of a cache.
fn fill(cache: &Cache, seed: u64) {
    for (tensor, words) in words(cache).enumerate() {
        for (at, word) in words.iter_mut().enumerate() {
            *word = (seed << 56) ^ ((tensor as u64) << 40) ^ (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
    }
}

fn words(cache: &Cache) -> impl Iterator<Item = &mut [u64]> {
    let count = (cache.geometry().tensor_bytes() / 8) as usize;
    // SAFETY: page-aligned memory of a live cache that nothing else touches between the timed calls.
    cache.addrs().iter().map(move |&addr| unsafe { std::slice::from_raw_parts_mut(addr as *mut u64, count) })
}

fn verify(flat: &Flat) {
    for &(src, dst) in &flat.moves {
        // SAFETY: blocks of live caches, read only here.
        let same = unsafe {
            std::slice::from_raw_parts(src as *const u8, flat.len)
                == std::slice::from_raw_parts(dst as *const u8, flat.len)
        };
        assert!(same, "a block arrived wrong");
    }
}

/// Overwrites the destination blocks, so that a missing copy is detected.
fn poison(cache: &Cache, rows: &[i64]) {
    let row = cache.geometry().row_bytes();
    for &addr in cache.addrs() {
        for &index in rows {
            // SAFETY: a block of a live cache that nothing else touches now.
            unsafe { ((addr + index as u64 * row) as *mut u8).write_bytes(0xEE, row as usize) };
        }
    }
}

fn flat(src: &Cache, dst: &Cache, pairs: &[(i64, i64)]) -> Flat {
    let row = src.geometry().row_bytes();
    let at = |base: u64, index: i64| base + index as u64 * row;
    let tensors = src.addrs().iter().zip(dst.addrs());
    let moves =
        tensors.flat_map(|(&s, &d)| pairs.iter().map(move |&(from, to)| (at(s, from), at(d, to)))).collect();
    Flat { moves, len: row as usize }
}

/// Runs the engine and the loops in turn, each round beginning with another one, and prints one line.
fn compare(name: &str, options: &Options, tensors: u32, flat: &Flat, dst: (&Cache, &[i64]), ours: impl Fn()) {
    let sorted = flat.sorted();
    let bytes = (flat.moves.len() * flat.len) as f64;
    let mut times = vec![Vec::new(); LOOPS.len() + 1];
    for round in 0..=options.rounds {
        for step in 0..times.len() {
            let who = (step + round) % times.len();
            let took = if who == 0 {
                poison(dst.0, dst.1);
                let took = timed(&ours);
                verify(flat);
                took
            } else {
                let (_, copy, threads, in_order) = LOOPS[who - 1];
                timed(|| loop_over(if in_order { &sorted } else { flat }, threads, copy))
            };
            if round > 0 {
                times[who].push(took);
            }
        }
    }
    let medians: Vec<f64> = times.iter().map(|all| median(&mut all.clone())).collect();
    let best = (1..medians.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap();
    let mut ratios: Vec<f64> =
        (0..options.rounds).map(|round| times[best][round] / times[0][round]).collect();
    let ratio = median(&mut ratios);
    println!(
        "{name:12} {tensors:7} {:6} KiB {:7.1} {:7.1}  {:16} {ratio:6.2}  ({:.2}-{:.2})",
        flat.len >> 10,
        bytes / medians[0] / 1e9,
        bytes / medians[best] / 1e9,
        LOOPS[best - 1].0,
        ratios[0],
        ratios[ratios.len() - 1],
    );
    for (&(name, ..), took) in LOOPS.iter().zip(&medians[1..]).filter(|_| options.all) {
        println!("    {name:18} {:7.1}", bytes / took / 1e9);
    }
}

fn main() {
    let options = options();
    let workers = options.workers.map_or("default".into(), |count| count.to_string());
    println!(
        "{} MiB a round, {} rounds, {workers} workers; GB/s = 10^9 bytes, each counted once",
        options.mib, options.rounds
    );
    println!(
        "{:12} {:>7} {:>10} {:>7} {:>7}  {:16} {:>6}  (range)",
        "operation", "tensors", "block", "ours", "limit", "limit by", "ratio"
    );
    let wanted = |name: &str| options.only.as_deref().is_none_or(|only| name == only);
    for &tensors in &options.tensors {
        for &kib in &options.blocks {
            swaps(&options, tensors, kib << 10, &wanted);
            blocks(&options, tensors, kib << 10, &wanted);
        }
        slots(&options, tensors, &wanted);
    }
}

fn swaps(options: &Options, tensors: u32, block: u64, wanted: &impl Fn(&str) -> bool) {
    for (name, path) in
        [("swap_out", SwapInPath::Auto), ("swap_in", SwapInPath::Direct), ("swap_in_ring", SwapInPath::Ring)]
    {
        if !wanted(name) {
            continue;
        }
        let bed = Bed::new(options, tensors, block, CacheKind::Blocks, path);
        let (src, dst) = if name == "swap_out" { (&bed.device, &bed.host) } else { (&bed.host, &bed.device) };
        let rows = src.geometry().rows();
        let mut shuffle = Shuffle(0x5EED_0001);
        let (from, to) = (shuffle.order(rows), shuffle.order(rows));
        let pairs: Vec<_> = from.into_iter().zip(to.iter().copied()).collect();
        let ends = (End::Managed(src.id()), End::Managed(dst.id()));
        let ours = || bed.engine.swap_blocks(&ends.0, &ends.1, &pairs).run().unwrap();
        compare(name, options, tensors, &flat(src, dst, &pairs), (dst, &to), ours);
    }
}

fn blocks(options: &Options, tensors: u32, block: u64, wanted: &impl Fn(&str) -> bool) {
    if !wanted("copy_blocks") {
        return;
    }
    let twice = Options { mib: options.mib * 2, only: None, blocks: vec![], tensors: vec![], ..*options };
    let bed = Bed::new(&twice, tensors, block, CacheKind::Blocks, SwapInPath::Auto);
    let half = (bed.device.geometry().rows() / 2) as i64;
    let mut shuffle = Shuffle(0x5EED_0002);
    let order = shuffle.order(half as u64 * 2);
    let (from, to) = order.split_at(half as usize);
    let pairs: Vec<_> = from.iter().copied().zip(to.iter().copied()).collect();
    let end = End::Managed(bed.device.id());
    let ours = || bed.engine.copy_blocks(&end, &pairs).run().unwrap();
    compare(
        "copy_blocks",
        options,
        tensors,
        &flat(&bed.device, &bed.device, &pairs),
        (&bed.device, &to[..pairs.len()]),
        ours,
    );
}

/// One slot that holds everything, device to host.
fn slots(options: &Options, tensors: u32, wanted: &impl Fn(&str) -> bool) {
    if !wanted("copy_cache") {
        return;
    }
    let slot = ((options.mib << 20) / u64::from(tensors)) & !4095;
    let bed = Bed::new(options, tensors, slot, CacheKind::Batch, SwapInPath::Auto);
    let ends = (End::Managed(bed.host.id()), End::Managed(bed.device.id()));
    let args = CopyArgs { dst_batch_index: 0, src_batch_index: 0, offset: 0, size: -1 };
    let ours = || bed.engine.copy_cache(&ends.0, &ends.1, args).run().unwrap();
    let whole = flat(&bed.device, &bed.host, &[(0, 0)]);
    // The loops split the slot into two halves, as a programmer would by hand.
    let halves = whole.moves.iter().flat_map(|&(s, d)| {
        let half = (whole.len as u64 / 2) & !4095;
        [(s, d), (s + whole.len as u64 - half, d + whole.len as u64 - half)]
    });
    let halves = Flat { moves: halves.collect(), len: (whole.len / 2) & !4095 };
    compare("copy_cache", options, tensors, &halves, (&bed.host, &[0]), ours);
}
