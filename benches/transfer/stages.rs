//! Measures where a call with a long list spends its time apart from the copy: each stage of a push of
//! shuffled blocks, alone.
//!
//! Everything runs in one process: the request is encoded and decoded, but not sent. `speed` measures copies.
//! Under `valgrind --tool=callgrind`, the functions below are the rows (`--only stages --lists 512 --calls
//! 10`).

use std::hint::black_box;
use std::time::Instant;

use llm_datadist_core::bindings::{CacheKey, CacheLayout, DataDist};
use llm_datadist_core::testing::model::{Geometry, Name};
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Side};
use llm_datadist_core::testing::protocol::{self, HEADER, NamedCache, Request, Run, WireLocation, WirePlan};
use llm_datadist_core::testing::validate::{CheckedTransfer, Layers, RemoteCache, Rows};
use llm_datadist_core::{CacheId, CacheKind, Placement};

use crate::Options;
use crate::hand::{Shuffle, median};
use crate::memory::{config, desc};

const LEN: u64 = 16 << 10;

pub fn stages(options: &Options) {
    // An open engine changes settings of its process, which affect the measurement.
    let _engine = DataDist::open(config(1, "shm", true, 0, 1)).unwrap();
    println!("\nstages of a push of shuffled blocks, microseconds (page faults of all together)");
    println!(
        "{:>7} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}",
        "blocks", "check", "plan", "write", "read", "take", "bounds", "rows", "all", "bytes", "faults"
    );
    for &rows in &options.lists {
        let mut shuffle = Shuffle(7);
        let list = Rows::Blocks { local: shuffle.order(rows), remote: shuffle.order(rows) };
        let geometry = Geometry::new(&desc(rows, LEN)).unwrap();
        let layout = CacheLayout { geometry, kind: CacheKind::Blocks, placement: Placement::Device };
        let mut times = vec![Vec::new(); 8];
        let (mut bytes, mut faulted) = (0, Vec::new());
        for call in 0..options.calls.min(300) + 3 {
            let before = faults();
            let (took, length) = push(layout, list.clone());
            bytes = length;
            if call >= 3 {
                faulted.push((faults() - before) as f64);
                let all = took.iter().sum();
                took.into_iter().chain([all]).zip(&mut times).for_each(|(took, times)| times.push(took));
            }
        }
        print!("{rows:7}");
        for times in &mut times {
            print!(" {:8.1}", median(times) * 1e6);
        }
        println!(" {bytes:8} {:8.0}", median(&mut faulted));
    }
}

/// Seconds of each stage, and the bytes of the request.
fn push(layout: CacheLayout, list: Rows) -> ([f64; 7], usize) {
    let (mut took, mut at, mut stage) = ([0.0; 7], Instant::now(), 0);
    let mut lap = || {
        took[stage] = at.elapsed().as_secs_f64();
        stage += 1;
        at = Instant::now();
    };
    let (checked, mut moves) = checked(layout, list);
    lap();
    let plan = planned(&mut moves);
    lap();
    let frame = written(&plan);
    lap();
    let request = read(&frame[HEADER..]);
    lap();
    let there = taken(request);
    lap();
    bounds(&there, layout.geometry);
    lap();
    black_box(rows(&there, layout.geometry));
    lap();
    drop((checked, moves, plan, there));
    (took, frame.len())
}

#[inline(never)]
fn checked(layout: CacheLayout, list: Rows) -> (CheckedTransfer, Moves) {
    let remote = RemoteCache { layout, kv: None, row: 0, accessible: true };
    let checked = CheckedTransfer::new(
        llm_datadist_core::bindings::Words::ORIGINAL,
        Side::Source,
        layout,
        list,
        Layers::ALL,
    )
    .unwrap();
    let moves = checked.moves(&remote).unwrap();
    (checked, moves)
}

#[inline(never)]
fn planned(moves: &mut Moves) -> CopyPlan {
    CopyPlan::moves(moves).unwrap()
}

#[inline(never)]
fn written(plan: &CopyPlan) -> Vec<u8> {
    let source = WireLocation::Pool { pool: 1, runs: vec![Run { start: 0, step: 0, count: 1 }] };
    let request = Request::Fetch {
        cache: NamedCache { name: Name::Key(CacheKey::Blocks { model: 7 }), id: CacheId(3) },
        plan: WirePlan::try_from(plan).unwrap(),
        source,
        num_tensors: 1,
        tensor_bytes: plan.bytes(),
    };
    protocol::encode(&request).unwrap()
}

#[inline(never)]
fn read(body: &[u8]) -> Request {
    protocol::decode(body).unwrap()
}

#[inline(never)]
fn taken(request: Request) -> CopyPlan {
    let Request::Fetch { plan, .. } = request else { panic!("another request") };
    CopyPlan::try_from(plan).unwrap()
}

#[inline(never)]
fn bounds(plan: &CopyPlan, of: Geometry) {
    for side in [Side::Source, Side::Destination] {
        plan.check_bounds(side, (of.num_tensors(), of.tensor_bytes())).unwrap();
    }
}

#[inline(never)]
fn rows(plan: &CopyPlan, of: Geometry) -> Vec<u64> {
    plan.touched_rows(Side::Destination, of.row_bytes()).unwrap()
}

/// Returns the number of page faults of this thread so far.
fn faults() -> i64 {
    // SAFETY: `getrusage` fills what it is given.
    unsafe {
        let mut usage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_minflt
    }
}
