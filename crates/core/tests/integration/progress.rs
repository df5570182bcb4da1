//! The rows that have arrived, compared with a model that checks every byte; and ranges of plans sent through a stream.
//!
//! `links/broken_streams.rs` covers streams that break.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::fd::AsFd;
use std::sync::Arc;

use llm_datadist_core::testing::copy::Progress;
use llm_datadist_core::testing::plan::{CopyPlan, Side, Template, TensorSteps};
use llm_datadist_core::{ArrivedRows, ErrorKind};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{block_plan, copy_engine, local_streams, pattern, proptest_cases, soon, tensors_over};
use crate::socket_copies::SocketCopies as _;

/// The rows whose planned bytes all lie at positions that are done, byte by byte.
fn twin(plan: &CopyPlan, row_bytes: u64, done: impl Fn(u64) -> bool) -> Vec<(u32, BTreeSet<u64>)> {
    let mut at = 0;
    let mut planned = vec![BTreeSet::new(); plan.num_tensors() as usize];
    let mut missing = planned.clone();
    for tensor in 0..plan.num_tensors() as usize {
        for piece in plan.templates().iter().flat_map(Template::pieces) {
            for byte in piece.dst..piece.dst + piece.len {
                planned[tensor].insert(byte / row_bytes);
                if !done(at) {
                    missing[tensor].insert(byte / row_bytes);
                }
                at += 1;
            }
        }
    }
    assert_eq!(at, plan.bytes());
    let rows = planned.iter().zip(&missing).map(|(planned, missing)| planned - missing);
    let tensors = (0..).map(|index| plan.tensors(Side::Destination).tensor(index) as u32);
    tensors.zip(rows).filter(|(_, rows)| !rows.is_empty()).collect()
}

fn as_sets(arrived: &[ArrivedRows]) -> Vec<(u32, BTreeSet<u64>)> {
    for ArrivedRows { rows, .. } in arrived {
        assert!(rows.windows(2).all(|two| two[0].end < two[1].start), "ascending and apart: {rows:?}");
    }
    arrived.iter().map(|arrived| (arrived.tensor, arrived.rows.iter().cloned().flatten().collect())).collect()
}

#[test]
fn what_arrived_is_what_the_twin_says() {
    let pairs = prop::collection::vec((0..12_u64, 0..12_u64), 1..14);
    // Rows larger and smaller than what is moved, and stretches done in any order.
    let input = (
        pairs,
        (1..4_u32, 0..3_u32, 1..4_u32),
        prop::sample::select(vec![3, 6, 12]),
        prop::collection::vec(any::<bool>(), 1..40),
        any::<u64>(),
    );
    TestRunner::new(proptest_cases(400))
        .run(&input, |(pairs, (tensors, first, step), row_bytes, taken, seed)| {
            let steps = TensorSteps { first, step };
            let plan = block_plan(&pairs, 6, tensors).in_tensor_steps(steps, steps, tensors);
            let unit = plan.bytes().div_ceil(taken.len() as u64);
            let progress = Arc::new(Progress::default());
            let mut order: Vec<usize> = (0..taken.len()).filter(|&unit| taken[unit]).collect();
            order.sort_by_key(|&index| (index as u64 ^ seed).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            for index in order {
                let from = (index as u64 * unit).min(plan.bytes());
                progress.done(from, (from + unit).min(plan.bytes()));
            }
            let done = |at: u64| taken[(at / unit) as usize];
            prop_assert_eq!(progress.bytes(), (0..plan.bytes()).filter(|&at| done(at)).count() as u64);
            let expected = twin(&plan, row_bytes, done);
            prop_assert_eq!(as_sets(&progress.arrived(&plan, row_bytes).unwrap()), expected);
            Ok(())
        })
        .unwrap();
    // A case that was computed by hand checks the model: of two tensors, the second row of the second one is missing.
    let plan = block_plan(&[(0, 4), (9, 2)], 10, 2);
    let progress = Arc::new(Progress::default());
    for (from, to, second) in [(0, 25, &[][..]), (25, 39, &[4]), (39, 40, &[2, 4])] {
        progress.done(from, to);
        let expected = [(0, &[2, 4][..]), (1, second)].into_iter().filter(|(_, rows)| !rows.is_empty());
        let expected: Vec<_> =
            expected.map(|(tensor, rows)| (tensor, rows.iter().copied().collect())).collect();
        assert_eq!(as_sets(&progress.arrived(&plan, 10).unwrap()), expected);
    }
    assert_eq!(progress.bytes(), 40);
}

const ROWS: usize = 300;
const ROW: usize = 5000;

/// More pieces than one batch takes. Several pairs write one block, of which the plan keeps the last.
fn shuffled() -> Vec<(u64, u64)> {
    let mut pairs: Vec<(u64, u64)> = (0..ROWS as u64).map(|row| (row, row * 77 % ROWS as u64)).collect();
    pairs.extend([(8, 77), (9, 77)]);
    pairs
}

fn expected(pairs: &[(u64, u64)], tensors: usize) -> Vec<u8> {
    let mut bytes = vec![0xEE; tensors * ROWS * ROW];
    for (tensor, rows) in bytes.chunks_mut(ROWS * ROW).enumerate() {
        for &(src, dst) in pairs {
            let row = rows[dst as usize * ROW..][..ROW].iter_mut();
            row.zip(src as usize * ROW..).for_each(|(byte, at)| *byte = pattern(4, tensor, at));
        }
    }
    bytes
}

#[test]
fn a_plan_through_a_stream_ends_like_a_plan_in_memory() {
    let (engine, plan) = (copy_engine(), block_plan(&shuffled(), ROW as u64, 3));
    let (_kept, src) = tensors_over(3, ROWS, ROW, |tensor, at| pattern(4, tensor, at));
    // In one range, and in three ranges that cut pieces.
    for cuts in [vec![], vec![1_234_567, plan.bytes() - 17]] {
        let (buffer, dst) = tensors_over(3, ROWS, ROW, |_, _| 0xEE);
        let (local, remote) = local_streams("progress");
        let progress = Arc::new(Progress::default());
        let mut from = 0;
        for to in cuts.into_iter().chain([plan.bytes()]) {
            std::thread::scope(|scope| {
                let sender = scope.spawn(|| engine.send(&plan, from..to, &src, &local, soon(), None));
                engine.receive(&plan, from..to, &dst, &remote, soon(), &progress).unwrap();
                sender.join().unwrap().unwrap();
            });
            from = to;
            assert_eq!(progress.bytes(), to);
        }
        assert!(buffer.read(0, 3 * ROWS * ROW) == expected(&shuffled(), 3));
        let all = progress.arrived(&plan, ROW as u64).unwrap();
        let whole = 0..ROWS as u64;
        assert_eq!(all, [0, 1, 2].map(|tensor| ArrivedRows { tensor, rows: vec![whole.clone()] }));
    }
    let (local, _far) = local_streams("progress");
    let error = engine.send(&plan, 0..plan.bytes() + 1, &src, &local, soon(), None).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::System, "a stretch beyond the plan");
}

/// The positions of the zeros follow from the number of bytes alone, so each side may cut its pieces differently.
#[test]
fn zeros_stand_before_each_stretch_however_it_is_cut() {
    const BLOCK: usize = 4096;
    let engine = copy_engine();
    for (blocks, from) in [(12, 0), (13, 0), (13, 100), (1024, 0), (1037, 0), (2100, 5000)] {
        let bytes = blocks * BLOCK;
        // One piece a block, read backwards; and one piece for all of them.
        let backwards: Vec<(u64, u64)> = (0..blocks as u64).rev().zip(0..).collect();
        let pieces = block_plan(&backwards, BLOCK as u64, 1);
        let whole = block_plan(&[(0, 0)], bytes as u64, 1);
        let (_kept, src) = tensors_over(1, blocks, BLOCK, |_, at| pattern(4, 0, at) | 1);
        // In the order of the plan.
        let order: Vec<u8> = pieces
            .pieces(0, bytes as u64)
            .flat_map(|(_, piece)| piece.src..piece.src + piece.len)
            .map(|at| pattern(4, 0, at as usize) | 1)
            .collect();
        let mut wanted = Vec::new();
        for stretch in order[from..].chunks(4 << 20) {
            let left = bytes - from - (wanted.len() / ((4 << 20) + 64)) * (4 << 20);
            wanted.extend(vec![0; if left > 48 << 10 { 64 } else { 0 }]);
            wanted.extend(stretch);
        }
        let range = from as u64..bytes as u64;
        let (local, remote) = local_streams("progress");
        let mut got = vec![1; wanted.len()];
        std::thread::scope(|scope| {
            scope.spawn(|| engine.send(&pieces, range.clone(), &src, &local, soon(), None).unwrap());
            let mut remote = std::fs::File::from(remote.as_fd().try_clone_to_owned().unwrap());
            remote.read_exact(&mut got).unwrap();
        });
        assert!(got == wanted, "{blocks} blocks from {from}");
        let (buffer, dst) = tensors_over(1, blocks, BLOCK, |_, _| 0xEE);
        std::thread::scope(|scope| {
            scope.spawn(|| engine.send(&pieces, range.clone(), &src, &local, soon(), None).unwrap());
            engine.receive(&whole, range.clone(), &dst, &remote, soon(), &Arc::default()).unwrap();
        });
        assert!(buffer.read(from, bytes - from) == order[from..], "{blocks} blocks from {from}");
    }
}
