//! Compares copies between KV layouts with the limit of this machine, in one run. The engine and hand-written
//! loops take turns over the same memory and blocks. Some loops walk a list of pieces, as in the benchmark of
//! copies; others compute the addresses in two nested loops, in either order. Also prints the time of planning.
//!
//! `cargo bench -p llm-datadist-core --bench layouts [-- --mib 256,4 --rounds 9 --only NHD-HND --workers 2 --all]`
//! `--alone` runs the engine without the loops, for a profiler.
//!
//! Every round is verified outside the timed part. Not for: equal layouts (`copy`), transfers (`transfer`).

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

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

#[path = "hand.rs"]
mod hand;
#[path = "layouts/nested.rs"]
mod nested;

use hand::{Flat, LOOPS, Shuffle, loop_over, median, timed};
use llm_datadist_core::bindings::{Config, Geometry, KvGeometry, Role, Words};
use llm_datadist_core::testing::copy::{CopyEngine, Staging};
use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::memory::{Region, Tensors};
use llm_datadist_core::testing::plan::{CopyPlan, KvPart, KvSequence};
use llm_datadist_core::{
    CacheDesc, ClusterId, DataType, Deadline, KvLayout, KvPlanes, Placement, TokenOrder,
};
use nested::{Dimension, NESTED, Nest};

const HEAD_DIM: u32 = 128;
const HEAD_BYTES: u64 = HEAD_DIM as u64 * 2;

struct Options {
    mib: Vec<u64>,
    rounds: usize,
    only: Option<String>,
    workers: Option<usize>,
    all: bool,
    alone: bool,
}

fn options() -> Options {
    let mut options =
        Options { mib: vec![256, 4], rounds: 9, only: None, workers: None, all: false, alone: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().expect("a value after the option");
        match word.as_str() {
            "--mib" => options.mib = value().split(',').map(|mib| mib.parse().unwrap()).collect(),
            "--rounds" => options.rounds = value().parse().unwrap(),
            "--all" => options.all = true,
            "--alone" => options.alone = true,
            "--only" => options.only = Some(value()),
            "--workers" => options.workers = Some(value().parse().unwrap()),
            _ => {} // what cargo itself passes
        }
    }
    options
}

/// A move between two ranks: the heads and the order of each side.
struct Case {
    name: &'static str,
    tokens_per_block: u32,
    src: (Range<u32>, TokenOrder),
    dst: (Range<u32>, TokenOrder),
}

/// The cases. The first two have goals for pieces of 4 KiB and more, and those between the orders for 128 tokens.
fn cases() -> Vec<Case> {
    use TokenOrder::{Hnd, Nhd};
    let case = |name, tokens_per_block, src, dst| Case { name, tokens_per_block, src, dst };
    let mut cases = Vec::new();
    // Heads of the smaller rank: pieces of 512 bytes to 16 KiB.
    for heads in [2, 4, 8, 16, 64] {
        cases.push(case("TP 2 to 4", 16, (0..2 * heads, Nhd), (heads..2 * heads, Nhd)));
        cases.push(case("TP 2 to 1", 16, (heads..2 * heads, Nhd), (0..2 * heads, Nhd)));
    }
    for tokens in [16, 128] {
        cases.push(case("NHD to HND", tokens, (0..8, Nhd), (0..8, Hnd)));
        cases.push(case("HND to NHD", tokens, (0..8, Hnd), (0..8, Nhd)));
    }
    cases.push(case("TP 2 to 4, NHD to HND", 128, (0..8, Nhd), (4..8, Hnd)));
    cases.push(case("TP 2 to 1, HND to NHD", 128, (4..8, Hnd), (0..8, Nhd)));
    cases
}

impl Case {
    fn common_heads(&self) -> Range<u32> {
        self.src.0.start.max(self.dst.0.start)..self.src.0.end.min(self.dst.0.end)
    }

    fn geometry(&self, side: &(Range<u32>, TokenOrder), rows: u64, tensors: u32) -> KvGeometry {
        let heads = side.0.clone();
        let elements = self.tokens_per_block * heads.len() as u32 * HEAD_DIM;
        let desc = CacheDesc {
            num_tensors: tensors,
            shape: vec![rows as i64, elements.into()],
            data_type: DataType::Float16,
            placement: Placement::Host,
            row_stride: None,
            kv_layout: None,
        };
        let layout = KvLayout {
            tokens_per_block: self.tokens_per_block,
            heads,
            total_heads: 128,
            head_dim: HEAD_DIM,
            order: side.1,
            kv: KvPlanes::Separate,
            layers: 0..tensors / 2,
            model: String::new(),
        };
        KvGeometry::new(layout, &Geometry::new(&desc).unwrap(), DataType::Float16).unwrap()
    }

    /// Bytes from the start of a block to one head of one token, from the definition of the layout.
    fn offset(&self, (heads, order): &(Range<u32>, TokenOrder), token: u64, head: u32) -> u64 {
        let (count, head) = (heads.len() as u64, u64::from(head - heads.start));
        HEAD_BYTES
            * match order {
                TokenOrder::Nhd => token * count + head,
                TokenOrder::Hnd => head * u64::from(self.tokens_per_block) + token,
            }
    }

    fn transposes(&self) -> bool {
        self.src.1 != self.dst.1
    }

    /// The nested loops: over the tokens and the heads of a block or, if the heads of a token are contiguous on
    /// both sides, over the tokens.
    fn nest(&self, offsets: Vec<(u64, u64)>) -> Nest {
        let heads = self.common_heads();
        let at = |token, head| (self.offset(&self.src, token, head), self.offset(&self.dst, token, head));
        let (first, token, head) = (at(0, heads.start), at(1, heads.start), at(0, heads.start + 1));
        let dimension =
            |count, to: (u64, u64)| Dimension { count, src_step: to.0 - first.0, dst_step: to.1 - first.1 };
        let tokens = dimension(self.tokens_per_block.into(), token);
        let offsets = offsets.into_iter().map(|(src, dst)| (src + first.0, dst + first.1)).collect();
        if self.transposes() {
            let heads = dimension(heads.len() as u64, head);
            Nest { offsets, outer: tokens, inner: heads, len: HEAD_BYTES as usize }
        } else {
            let len = heads.len() * HEAD_BYTES as usize;
            Nest { offsets, outer: Dimension::ONE, inner: tokens, len }
        }
    }
}

/// The memory of one side, and the blocks of a sequence in it.
struct Side {
    geometry: KvGeometry,
    tensors: Arc<Tensors>,
    blocks: Vec<u64>,
}

impl Side {
    fn new(geometry: KvGeometry, tensors: u32, seed: u64) -> Side {
        let tensor_bytes = geometry.geometry().tensor_bytes();
        let bytes = tensor_bytes * u64::from(tensors);
        let region = Arc::new(Region::shared("bench", bytes).unwrap());
        let memory = Tensors::contiguous(region, 0, tensors, tensor_bytes, ()).unwrap();
        let order = Shuffle(seed).order(geometry.geometry().rows());
        let side = Side {
            blocks: order.into_iter().map(|block| block as u64).collect(),
            geometry,
            tensors: Arc::new(memory),
        };
        for (at, word) in side.words().iter_mut().enumerate() {
            *word = (seed << 56) ^ (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        }
        side
    }

    #[allow(clippy::mut_from_ref, reason = "the memory is not borrowed from the tensors")]
    fn words(&self) -> &mut [u64] {
        let bytes = self.tensors.tensor_bytes() as usize * self.tensors.addrs().len();
        // SAFETY: all tensors are one page-aligned range of a live region, which nothing else touches between
        // the timed calls.
        unsafe { std::slice::from_raw_parts_mut(self.tensors.addrs()[0] as *mut u64, bytes / 8) }
    }

    fn sequence(&self) -> KvSequence<'_> {
        KvSequence {
            geometry: &self.geometry,
            blocks: &self.blocks,
            tokens: None,
            words: &Words::ORIGINAL.src,
        }
    }
}

/// One case with its memory.
struct Bed {
    src: Side,
    dst: Side,
    plans: Vec<CopyPlan>,
    flat: Flat,
    nest: Nest,
}

impl Bed {
    fn new(case: &Case, mib: u64) -> Bed {
        let tensors = if mib >= 64 { 16 } else { 2 };
        let block = u64::from(case.tokens_per_block) * case.common_heads().len() as u64 * HEAD_BYTES;
        let rows = ((mib << 20) / (u64::from(tensors) * block)).max(1);
        let src = Side::new(case.geometry(&case.src, rows, tensors), tensors, 0x5EED_0001);
        let dst = Side::new(case.geometry(&case.dst, rows, tensors), tensors, 0x5EED_0002);
        let part = KvPart::common(src.geometry.layout(), dst.geometry.layout()).unwrap();
        let plans = CopyPlan::between_layouts(&src.sequence(), &dst.sequence(), &part).unwrap();
        let offsets = || {
            let addrs = || src.tensors.addrs().iter().zip(dst.tensors.addrs());
            let at =
                |side: &Side, addr: u64, block: u64| addr + block * side.geometry.geometry().row_stride();
            let blocks = src.blocks.iter().zip(&dst.blocks);
            let pairs = blocks.flat_map(|(&s, &d)| addrs().map(move |(&from, &to)| (from, to, s, d)));
            let mut offsets: Vec<_> =
                pairs.map(|(from, to, s, d)| (at(&src, from, s), at(&dst, to, d))).collect();
            offsets.sort_unstable();
            offsets
        };
        let (nest, flat) = (case.nest(offsets()), flat(case, &offsets()));
        let bed = Bed { src, dst, plans, flat, nest };
        assert_eq!(bed.bytes(), (bed.flat.moves.len() * bed.flat.len) as u64);
        bed
    }

    fn bytes(&self) -> u64 {
        self.plans.iter().map(CopyPlan::bytes).sum()
    }

    fn run(&self, engine: &CopyEngine) {
        let limit = Deadline::after(Duration::from_secs(60));
        for plan in &self.plans {
            let (from, to) = ((&self.src.tensors, Placement::Host), (&self.dst.tensors, Placement::Host));
            engine.run(plan.clone(), from, to, Staging::DEFAULT, limit, &Arc::default()).unwrap();
        }
    }

    fn verify(&self) {
        for &(src, dst) in &self.flat.moves {
            // SAFETY: pieces of live tensors, read only here.
            let same = unsafe {
                std::slice::from_raw_parts(src as *const u8, self.flat.len)
                    == std::slice::from_raw_parts(dst as *const u8, self.flat.len)
            };
            assert!(same, "a piece arrived wrong");
        }
    }
}

/// The pieces in the order of the destination, from the definitions of the layouts.
fn flat(case: &Case, offsets: &[(u64, u64)]) -> Flat {
    let heads = case.common_heads();
    let (step, len) = if case.transposes() { (1, 1) } else { (heads.len(), heads.len() as u64) };
    let mut moves = Vec::new();
    for &(src, dst) in offsets {
        let block = moves.len();
        for token in 0..case.tokens_per_block.into() {
            let offsets = heads.clone().step_by(step).map(|head| {
                (src + case.offset(&case.src, token, head), dst + case.offset(&case.dst, token, head))
            });
            moves.extend(offsets);
        }
        moves[block..].sort_unstable_by_key(|&(_, dst)| dst);
    }
    Flat { moves, len: (len * HEAD_BYTES) as usize }
}

/// Runs the engine and the loops in turn, each round beginning with another one, and prints one line.
fn compare(case: &Case, options: &Options, mib: u64, engine: &CopyEngine) {
    let bed = Bed::new(case, mib);
    if options.alone {
        let mut times: Vec<f64> = (0..options.rounds).map(|_| timed(|| bed.run(engine))).collect();
        let (half, all) = (median(&mut times), bed.bytes() as f64);
        println!(
            "{} {}: median {:.1}, best {:.1}",
            case.name,
            bed.flat.len,
            all / half / 1e9,
            all / times[0] / 1e9
        );
        return;
    }
    let sorted = bed.flat.sorted();
    let names: Vec<String> = LOOPS
        .iter()
        .map(|(name, ..)| format!("list, {name}"))
        .chain(NESTED.iter().map(|(name, ..)| (*name).to_owned()))
        .collect();
    // Small copies are noisy, and cheap.
    let rounds = if mib < 64 { 5 * options.rounds } else { options.rounds };
    let mut times = vec![Vec::new(); names.len() + 1];
    for round in 0..=rounds {
        for shift in 0..times.len() {
            let who = (shift + round) % times.len();
            // Before every turn, because what it leaves in the caches slows the next copy down.
            bed.dst.words().fill(0xEEEE_EEEE_EEEE_EEEE);
            let took = if who == 0 {
                let took = timed(|| bed.run(engine));
                bed.verify();
                took
            } else if let Some(&(_, copy, threads, in_order)) = LOOPS.get(who - 1) {
                timed(|| loop_over(if in_order { &sorted } else { &bed.flat }, threads, copy))
            } else {
                let (_, copy, threads, swapped) = NESTED[who - 1 - LOOPS.len()];
                timed(|| bed.nest.run(copy, threads, swapped))
            };
            if round > 0 {
                times[who].push(took);
            }
        }
    }
    let bytes = bed.bytes() as f64;
    let medians: Vec<f64> = times.iter().map(|all| median(&mut all.clone())).collect();
    let best = (1..medians.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b])).unwrap();
    let mut ratios: Vec<f64> = (0..rounds).map(|round| times[best][round] / times[0][round]).collect();
    let ratio = median(&mut ratios);
    println!(
        "{:22} {:4} MiB {:6} B {:7.1} {:7.1}  {:24} {ratio:6.2}  ({:.2}-{:.2})",
        format!("{}, {}", case.name, case.tokens_per_block),
        mib,
        bed.flat.len,
        bytes / medians[0] / 1e9,
        bytes / medians[best] / 1e9,
        names[best - 1],
        ratios[rounds / 10],
        ratios[rounds - 1 - rounds / 10],
    );
    for (name, took) in names.iter().zip(&medians[1..]).filter(|_| options.all) {
        println!("    {name:24} {:7.1}", bytes / took / 1e9);
    }
}

fn main() {
    let options = options();
    let workers = options.workers.map_or("default".into(), |count| count.to_string());
    println!(
        "{} rounds, {workers} workers; GB/s = 10^9 bytes, each counted once; the range is without the outer tenths",
        options.rounds
    );
    println!(
        "{:22} {:>8} {:>8} {:>7} {:>7}  {:24} {:>6}  (range)",
        "layouts, block", "moved", "piece", "ours", "limit", "limit by", "ratio"
    );
    let mut config = Config::new(Role::Mix, ClusterId(1));
    config.copy_workers = options.workers;
    let engine = CopyEngine::new(&config, DeviceSet::host_only());
    for &mib in &options.mib {
        for case in cases().iter().filter(|case| options.only.as_ref().is_none_or(|only| case.name == only)) {
            compare(case, &options, mib, &engine);
        }
    }
    planning();
}

/// Prints the time to plan the move of 4,096 shuffled blocks of 16 tokens in 40 layers.
fn planning() {
    use TokenOrder::{Hnd, Nhd};
    println!("\nplanning 4,096 blocks in 80 tensors, microseconds, median of 101");
    let order = |seed| -> Vec<u64> {
        Shuffle(seed).order(8192).into_iter().take(4096).map(|block| block as u64).collect()
    };
    let (src_blocks, dst_blocks) = (order(0x5EED_0001), order(0x5EED_0002));
    for (name, dst_order) in [("TP 2 to 4", Nhd), ("TP 2 to 4, NHD to HND", Hnd)] {
        let case = Case { name, tokens_per_block: 16, src: (0..4, Nhd), dst: (2..4, dst_order) };
        let (src, dst) = (case.geometry(&case.src, 8192, 80), case.geometry(&case.dst, 8192, 80));
        let plan = || {
            let src =
                KvSequence { geometry: &src, blocks: &src_blocks, tokens: None, words: &Words::ORIGINAL.src };
            let dst =
                KvSequence { geometry: &dst, blocks: &dst_blocks, tokens: None, words: &Words::ORIGINAL.src };
            let part = KvPart::common(src.geometry.layout(), dst.geometry.layout()).unwrap();
            drop(std::hint::black_box(CopyPlan::between_layouts(&src, &dst, &part).unwrap()));
        };
        let mut times: Vec<f64> = (0..101).map(|_| timed(plan)).collect();
        println!("{name:24} {:9.0}", median(&mut times) * 1e6);
    }
}
