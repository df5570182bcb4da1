//! Measures layer-wise transfers between processes: the cost of a layer beyond its bytes, how much of it
//! overlaps with compute, and four destinations at once compared with four pulls. All in one run; prints
//! ratios.
//!
//! `cargo bench -p llm-datadist-core --bench layerwise [-- --only overhead,overlap,four --rounds 9]`
//!
//! The other processes run this program too. Everything that arrived is verified outside the timed part, on
//! memory that was overwritten before. Compute is simulated by a sleep (a device computes) or by a loop (a
//! core computes). Absolute figures mean little, because machines differ and are shared.

#![allow(clippy::print_stdout, reason = "a benchmark prints its table")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a benchmark stops at the first surprise")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
#![allow(clippy::cast_possible_wrap, reason = "sizes of a few GiB")]
#![allow(clippy::cast_ptr_alignment, clippy::multiple_unsafe_ops_per_block, reason = "memory of caches")]
#![allow(unsafe_code, missing_docs, unreachable_pub, reason = "a program, not a library")]

#[path = "layerwise/decode.rs"]
mod decode;
#[path = "hand.rs"]
mod hand;

use std::time::{Duration, Instant};

use decode::{Decode, KEY, Kv, config};
use hand::Shuffle;
use llm_datadist_core::bindings::{
    CacheTask, DataDist, Destination, LayerRange, LayerwiseArgs, Name, Outcome, Target,
};
use llm_datadist_core::{ClusterId, Deadline};

pub const LAYERS: u32 = 40;
const KIB: u64 = 1 << 10;

/// What one word of `--only` runs.
type Part = fn(usize);

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if words.get(1).is_some_and(|word| word == "--decode") {
        return decode::serve(words[2].parse().unwrap());
    }
    let value = |name: &str| words.iter().position(|word| word == name).map(|at| words[at + 1].clone());
    let rounds = value("--rounds").map_or(9, |rounds| rounds.parse().unwrap());
    let only = value("--only").unwrap_or_else(|| "overhead,overlap,four".into());
    let parts: [(&str, Part); 3] = [("overhead", overhead), ("overlap", overlap), ("four", four)];
    for (name, part) in parts {
        if only.split(',').any(|only| only == name) {
            part(rounds);
        }
    }
}

/// This process with a source, and the decode processes to which it is linked.
struct Bed {
    engine: DataDist,
    source: Kv,
    decodes: Vec<Decode>,
    src: Vec<i64>,
    dst: Vec<i64>,
}

impl Bed {
    fn new(decodes: u64, rows: u64, len: u64) -> Bed {
        let mib = ((u64::from(LAYERS) * 2 * rows * len) >> 20) + 64;
        let engine = DataDist::open(config(1, mib)).unwrap();
        let source = Kv::new(&engine, rows, len);
        source.fill(1);
        let mut decodes: Vec<_> = (0..decodes).map(|n| Decode::start(2 + n, mib, rows, len)).collect();
        let peers: Vec<_> = decodes.iter().map(Decode::address).collect();
        for linked in engine.link_clusters(&peers, Duration::from_secs(10)) {
            linked.unwrap();
        }
        let port = engine.listening().unwrap().port();
        for decode in &mut decodes {
            decode.ask(&format!("link {port}"));
        }
        let mut shuffle = Shuffle(7);
        let (src, dst) = (shuffle.order(rows), shuffle.order(rows));
        Bed { engine, source, decodes, src, dst }
    }

    fn start(&self, first: u32, end: u32) -> CacheTask {
        let list = |blocks: &[i64]| blocks.iter().map(|&block| block as u64).collect();
        let args = LayerwiseArgs {
            src_blocks: list(&self.src),
            dst_blocks: list(&self.dst),
            dst_block_bytes: None,
            tensors_per_layer: 2,
        };
        let to = |n: u64| Destination {
            cluster: ClusterId(2 + n),
            target: Target::Cache { name: Name::Key(KEY).into(), first_layer: Some(first) },
            src_layers: LayerRange { first, end },
            src_row: 0,
        };
        let to = (0..self.decodes.len() as u64).map(to).collect();
        self.engine.transfer_async(&self.source.end, &args, to, None).unwrap()
    }

    /// Returns the seconds from the call to the last layer in place. `compute` blocks until its layer is
    /// ready.
    fn run(&self, mut compute: impl FnMut(u32, Instant)) -> f64 {
        let started = Instant::now();
        let task = self.start(0, LAYERS);
        for layer in 0..LAYERS {
            compute(layer, started);
            task.ready(layer).unwrap();
        }
        assert!(task.wait(Deadline::after(Duration::from_secs(60))).unwrap());
        let took = started.elapsed().as_secs_f64();
        assert!(
            task.outcomes().iter().all(|outcome| matches!(outcome, Outcome::Done)),
            "{:?}",
            task.outcomes()
        );
        took
    }

    fn poison(&mut self) {
        for decode in &mut self.decodes {
            decode.ask("poison");
        }
    }

    fn verify(&mut self) {
        for decode in &mut self.decodes {
            decode.ask("verify 1");
        }
    }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Every layer is ready at once, so only the transfer is measured. For comparison, the other side pulls layer
/// by layer.
fn overhead(rounds: usize) {
    println!("\na layer of two tensors, microseconds: transferred, pulled by the other side, difference");
    for (rows, len) in [(1, 4 * KIB), (16, 16 * KIB), (128, 16 * KIB), (512, 16 * KIB), (64, 256 * KIB)] {
        let mut bed = Bed::new(1, rows, len);
        let (mut pushed, mut pulled, mut paced) = (vec![], vec![], vec![]);
        for _ in 0..=rounds {
            bed.poison();
            pushed.push(bed.run(|_, _| ()) / f64::from(LAYERS));
            bed.verify();
            bed.poison();
            let nanos: f64 = bed.decodes[0].ask("pull_layers").parse().unwrap();
            pulled.push(nanos / 1e9 / f64::from(LAYERS));
            bed.verify();
            let gap = Duration::from_secs_f64(pushed[pushed.len() - 1] * 1.2) + Duration::from_millis(1);
            paced.push(after_pauses(&bed, gap));
        }
        // The first round maps pages.
        let per_layer = |times: &[f64]| median(times[1..].to_vec()) * 1e6;
        let (pushed, pulled, paced) = (per_layer(&pushed), per_layer(&pulled), per_layer(&paced));
        println!(
            "{rows:4} blocks of {:4} KiB {pushed:9.1} {pulled:9.1} {:9.1}   after a pause {paced:9.1}",
            len / KIB,
            pushed - pulled
        );
    }
}

/// Returns the median seconds from a layer being ready to its being in place, after a pause of `gap` in which
/// both sides fall asleep. Each layer has its own task, because a loop that polls for a layer would take a
/// core from the transfer.
fn after_pauses(bed: &Bed, gap: Duration) -> f64 {
    let one = |layer| {
        let task = bed.start(layer, layer + 1);
        std::thread::sleep(gap);
        let started = Instant::now();
        task.ready(layer).unwrap();
        assert!(task.wait(Deadline::after(Duration::from_secs(60))).unwrap());
        started.elapsed().as_secs_f64()
    };
    median((0..LAYERS).map(one).collect())
}

/// Compute takes as long per layer as the transfer. The ideal is the time of one layer more than compute
/// alone.
fn overlap(rounds: usize) {
    println!("\n{LAYERS} layers, compute as long as transfer: time over {} layer times", LAYERS + 1);
    for (rows, len) in [(128, 16 * KIB), (512, 16 * KIB), (64, 256 * KIB)] {
        let mut bed = Bed::new(1, rows, len);
        bed.run(|_, _| ());
        // Either a device computes and this process waits for it, or a core computes and the copy cannot use
        // that core.
        for (who, spins) in [("a device computes", false), ("a core computes", true)] {
            let (mut over, mut alone) = (vec![], vec![]);
            for _ in 0..rounds {
                let layer = beside(spins, || bed.run(|_, _| ())) / f64::from(LAYERS);
                bed.poison();
                let took = bed.run(|number, started| {
                    let ready = started + Duration::from_secs_f64(layer * f64::from(number + 1));
                    if !spins {
                        std::thread::sleep(ready.saturating_duration_since(Instant::now()));
                    }
                    while Instant::now() < ready {
                        std::hint::spin_loop();
                    }
                });
                bed.verify();
                over.push(took / (layer * f64::from(LAYERS + 1)));
                alone.push(layer);
            }
            let (kib, ms) = (len / KIB, median(alone) * 1e3);
            println!("{rows:4} blocks of {kib:4} KiB, layer {ms:6.2} ms, {who:17}: {:.3}", median(over));
        }
    }
}

/// Runs `call`, with a busy core meanwhile if `spins` is set. Returns its result.
fn beside<T>(spins: bool, call: impl FnOnce() -> T) -> T {
    let stop = std::sync::atomic::AtomicBool::new(!spins);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let measured = call();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        measured
    })
}

/// Four decode processes: one transfer to all of them, compared with all of them pulling at once.
fn four(rounds: usize) {
    println!("\nfour destinations at once, share of four pulls at once");
    for (rows, len) in [(128, 16 * KIB), (32, 256 * KIB)] {
        let mut bed = Bed::new(4, rows, len);
        let mut shares = vec![];
        let bytes = 4.0 * f64::from(LAYERS) * 2.0 * (rows * len) as f64;
        let mut rate = vec![];
        for round in 0..=rounds {
            bed.poison();
            let pushed = bed.run(|_, _| ());
            bed.verify();
            bed.poison();
            let started = Instant::now();
            bed.decodes.iter_mut().for_each(|decode| decode.say("pull"));
            bed.decodes.iter_mut().for_each(|decode| drop(decode.hear()));
            let pulled = started.elapsed().as_secs_f64();
            bed.verify();
            if round > 0 {
                shares.push(pulled / pushed);
                rate.push(bytes / pushed / 1e9);
            }
        }
        println!(
            "{rows:4} blocks of {:4} KiB: {:.3} ({:.1} GB/s in all)",
            len / KIB,
            median(shares),
            median(rate)
        );
    }
}
