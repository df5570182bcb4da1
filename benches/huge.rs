//! Measures the benefit of huge pages and the cost of making them: first touch, copies, first reads of a
//! peer's pool, and reads through the kernel. Everything runs with `huge_pages` off and eager in turn, in one
//! run. Prints medians.
//!
//! `cargo bench -p llm-datadist-core --bench huge [-- --only first,copies,cold,process --mib 256 --rounds 5]`
//!
//! Both engines are in this process; a mapping of the other's pool still has its own page tables. Every byte
//! that was pulled or copied is verified outside the timed part. `copy` and `transfer` compare with limits of
//! the machine.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a benchmark stops at the first surprise")]
#![allow(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "sizes of a few GiB"
)]
#![allow(unreachable_pub, unsafe_code, missing_docs, reason = "shares the lists of the other benchmarks")]
#![allow(
    clippy::cast_ptr_alignment,
    clippy::multiple_unsafe_ops_per_block,
    reason = "hand-written loops of the other benchmarks"
)]

use std::sync::Arc;
use std::time::{Duration, Instant};

#[path = "hand.rs"]
mod hand;

use hand::{Shuffle, median};
use llm_datadist_core::bindings::{
    Cache, Config, DataDist, End, HugeChoice, Layers, Name, PeerAddress, PoolConfig, RemoteName, Role, Rows,
};
use llm_datadist_core::{Adopted, CacheDesc, CacheKind, ClusterId, DataType, Placement};

const BLOCKS: [u64; 4] = [16 << 10, 64 << 10, 256 << 10, 1 << 20];
const CHOICES: [HugeChoice; 2] = [HugeChoice::Off, HugeChoice::Eager];

struct Options {
    only: Vec<String>,
    mib: u64,
    rounds: usize,
}

fn options() -> Options {
    let mut options = Options { only: vec![], mib: 256, rounds: 5 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--only" => options.only = value().split(',').map(str::to_owned).collect(),
            "--mib" => options.mib = value().parse().unwrap(),
            "--rounds" => options.rounds = value().parse().unwrap(),
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// An engine with both pools, of `mib` and a little more.
fn engine(cluster: u64, mib: u64, choice: HugeChoice) -> DataDist {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: mib << 20, page_shift: 16 });
    config.host_pool = config.device_pool;
    config.sync_timeout = Duration::from_secs(60);
    config.huge_pages = choice;
    config.remote_accessible = true;
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    DataDist::open(config).unwrap()
}

fn desc(placement: Placement, mib: u64, block: u64) -> CacheDesc {
    let shape = vec![((mib << 20) / block) as i64, block as i64];
    CacheDesc {
        num_tensors: 1,
        shape,
        data_type: DataType::Uint8,
        placement,
        row_stride: None,
        kv_layout: None,
    }
}

fn allocate(engine: &DataDist, placement: Placement, mib: u64, block: u64) -> Arc<Cache> {
    engine.allocate(&desc(placement, mib, block), CacheKind::Blocks, &[]).unwrap()
}

#[expect(clippy::mut_from_ref, reason = "the memory behind a cache, not the cache")]
fn words(cache: &Cache) -> &mut [u64] {
    let count = (cache.geometry().tensor_bytes() / 8) as usize;
    // SAFETY: memory of a live cache of one tensor, which nothing else touches between the timed calls.
    unsafe { std::slice::from_raw_parts_mut(cache.addrs()[0] as *mut u64, count) }
}

fn word(seed: u64, at: usize) -> u64 {
    (seed << 56) ^ (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

fn fill(cache: &Cache, seed: u64) {
    words(cache).iter_mut().enumerate().for_each(|(at, item)| *item = word(seed, at));
}

/// Whether block `dst` holds what block `src` of memory filled with `seed` did, for every pair.
fn verify(cache: &Cache, seed: u64, pairs: &[(i64, i64)]) {
    let block = (cache.geometry().row_bytes() / 8) as usize;
    let all = words(cache);
    for &(src, dst) in pairs {
        let (from, to) = (src as usize * block, dst as usize * block);
        assert!((0..block).all(|at| all[to + at] == word(seed, from + at)), "block {src} at {dst} is wrong");
    }
}

fn pairs(blocks: u64) -> Vec<(i64, i64)> {
    let mut shuffle = Shuffle(0x1234_5678_9ABC_DEF1);
    shuffle.order(blocks).into_iter().zip(shuffle.order(blocks)).collect()
}

fn clocked(call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_secs_f64()
}

/// Runs both choices in turn, beginning with another one in each round. Returns the medians of their results.
fn alternating<const N: usize>(rounds: usize, mut round: impl FnMut(usize) -> [f64; N]) -> [[f64; N]; 2] {
    let mut all: [Vec<[f64; N]>; 2] = [vec![], vec![]];
    for number in 0..rounds {
        for side in [number % 2, 1 - number % 2] {
            all[side].push(round(side));
        }
    }
    all.map(|rounds| {
        std::array::from_fn(|part| median(&mut rounds.iter().map(|all| all[part]).collect::<Vec<f64>>()))
    })
}

fn first(options: &Options) {
    println!("\nfirst touch of {} MiB, ms: opening two pools, then writing all of one", options.mib);
    let [off, eager] = alternating(options.rounds, |side| {
        let mut made = None;
        let open = clocked(|| made = Some(engine(1, options.mib, CHOICES[side])));
        let made = made.unwrap();
        let cache = allocate(&made, Placement::Device, options.mib, 1 << 20);
        [open * 1e3, clocked(|| words(&cache).fill(7)) * 1e3, clocked(|| words(&cache).fill(8)) * 1e3]
    });
    for (name, [open, touch, again]) in [("off", off), ("eager", eager)] {
        println!("  {name:6} open {open:8.1}  first writing {touch:7.1}  second {again:7.1}");
    }
}

fn copies(options: &Options) {
    println!("\nswap_out of {} MiB in shuffled blocks, GB/s", options.mib);
    for block in BLOCKS {
        let pairs = pairs((options.mib << 20) / block);
        let beds = CHOICES.map(|choice| {
            let engine = engine(1, options.mib, choice);
            let caches =
                [Placement::Device, Placement::Host].map(|at| allocate(&engine, at, options.mib, block));
            fill(&caches[0], 3);
            fill(&caches[1], 4);
            (engine, caches)
        });
        let medians = alternating(options.rounds + 1, |side| {
            let (engine, [device, host]) = &beds[side];
            let (src, dst) = (End::Managed(device.id()), End::Managed(host.id()));
            words(host).fill(0);
            let took = clocked(|| engine.swap_blocks(&src, &dst, &pairs).run().unwrap());
            verify(host, 3, &pairs);
            [(options.mib << 20) as f64 / took / 1e9]
        });
        let [[off], [huge]] = medians;
        println!("  {:5} KiB  off {off:5.1}  huge {huge:5.1}  ratio {:.2}", block >> 10, huge / off);
    }
}

fn link(local: &DataDist, remote: &DataDist, linked: bool) {
    let peer =
        PeerAddress { cluster: ClusterId(2), remote: vec![remote.listening().unwrap()], local: vec![] };
    let limit = Duration::from_secs(5);
    let outcomes = if linked {
        local.link_clusters(&[peer], limit)
    } else {
        local.unlink_clusters(&[peer], limit, false)
    };
    for outcome in outcomes {
        outcome.unwrap();
    }
}

/// Pulls all blocks once, and returns GB/s.
fn pull(local: &DataDist, remote: &Cache, to: &Cache, pairs: &[(i64, i64)]) -> f64 {
    let name = RemoteName { cluster: ClusterId(2), name: Name::Row { cache: remote.id(), row: 0 } };
    let (src, dst): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
    let rows = Rows::Blocks { remote: src, local: dst };
    words(to).fill(0);
    let took = clocked(|| local.pull(name, &End::Managed(to.id()), rows, Layers::ALL).run().unwrap());
    verify(to, 5, pairs);
    to.geometry().tensor_bytes() as f64 / took / 1e9
}

fn cold(options: &Options) {
    println!("\npull of {} MiB out of a peer's pool, GB/s: over a link just made, and again", options.mib);
    for block in BLOCKS {
        let pairs = pairs((options.mib << 20) / block);
        let local = engine(1, options.mib, HugeChoice::Off);
        let to = allocate(&local, Placement::Device, options.mib, block);
        fill(&to, 1);
        let peers = CHOICES.map(|choice| {
            let engine = engine(2, options.mib, choice);
            let cache = allocate(&engine, Placement::Device, options.mib, block);
            fill(&cache, 5);
            (engine, cache)
        });
        let [off, huge] = alternating(options.rounds, |side| {
            let (engine, cache) = &peers[side];
            link(&local, engine, true);
            let speeds = [pull(&local, cache, &to, &pairs), pull(&local, cache, &to, &pairs)];
            link(&local, engine, false);
            speeds
        });
        for (name, [cold, warm]) in [("off", off), ("eager", huge)] {
            let (best, block) = (off[1].max(huge[1]), block >> 10);
            println!(
                "  {block:5} KiB  {name:6} cold {cold:5.1}  warm {warm:5.1}  cold/warm {:.2}  cold/best warm {:.2}",
                cold / warm,
                cold / best
            );
        }
    }
}

fn process(options: &Options) {
    println!("\npull of {} MiB of registered memory through the kernel, GB/s", options.mib);
    let len = (options.mib << 20) as usize;
    for block in BLOCKS {
        let pairs = pairs((options.mib << 20) / block);
        let local = engine(1, options.mib, HugeChoice::Off);
        let to = allocate(&local, Placement::Device, options.mib, block);
        fill(&to, 1);
        let peers = CHOICES.map(|choice| {
            let engine = engine(2, 1, choice);
            let mut memory = vec![0_u8; len + (2 << 20)];
            let at = (memory.as_mut_ptr() as u64).next_multiple_of(2 << 20);
            // SAFETY: the memory lives in the tuple made here as long as the cache.
            let adopted = unsafe {
                Adopted::new(&desc(Placement::Device, options.mib, block), CacheKind::Blocks, &[at])
            };
            memory.fill(1);
            let cache = engine.register(adopted.unwrap(), &[], Some(true)).unwrap();
            fill(&cache, 5);
            (engine, cache, memory)
        });
        let [[off], [huge]] = alternating(options.rounds, |side| {
            let (engine, cache, _) = &peers[side];
            link(&local, engine, true);
            pull(&local, cache, &to, &pairs);
            let speed = pull(&local, cache, &to, &pairs);
            link(&local, engine, false);
            [speed]
        });
        println!("  {:5} KiB  off {off:5.1}  eager {huge:5.1}  ratio {:.2}", block >> 10, huge / off);
    }
}

type Part = fn(&Options);

fn main() {
    let options = options();
    let parts: [(&str, Part); 4] =
        [("first", first), ("copies", copies), ("cold", cold), ("process", process)];
    for (name, part) in parts {
        if options.only.is_empty() || options.only.iter().any(|only| only == name) {
            part(&options);
        }
    }
}
