//! Rows with gaps between them: sizes, plans of peers that touch a gap, and copies on the simulated device.
//!
//! `transfer.rs` compares the requests and plans of pulls and pushes with a model, gaps and parts of rows included.
//! `tests/native/test_strides.py` has the transports.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::Arc;

use llm_datadist_core::bindings::{CacheLayout, Geometry, RowSizes, SubRow, SwapInPath, Words};
use llm_datadist_core::testing::copy::Progress;
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::memory::Tensors;
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Piece, Pieces, Side, Span, Template, TensorSteps};
use llm_datadist_core::testing::validate;
use llm_datadist_core::{CacheDesc, CacheKind, DataType, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::arguments::refused;
use crate::fixtures::{
    Buffer, Own, adopt, config, desc, end, engine_on, listed, patterned, plan_of_peer, proptest_cases,
};

fn with_stride(desc: CacheDesc, row_stride: u64) -> CacheDesc {
    CacheDesc { row_stride: Some(row_stride), ..desc }
}

#[test]
fn sizes_count_gaps_between_rows_only() {
    let dense = desc(Placement::Host, 3, 5, 64);
    let sizes = |desc: &CacheDesc| {
        let geometry = Geometry::new(desc).unwrap();
        (geometry.row_bytes(), geometry.row_stride(), geometry.tensor_bytes(), geometry.bytes())
    };
    assert_eq!(sizes(&dense), (64, 64, 320, 960));
    assert_eq!(Geometry::new(&with_stride(dense.clone(), 64)).unwrap(), Geometry::new(&dense).unwrap());
    assert_eq!(sizes(&with_stride(dense.clone(), 100)), (64, 100, 464, 1392));
    // One row has no gap, so its stride does not matter, but it may not be endless.
    let one = desc(Placement::Host, 1, 1, 64);
    assert_eq!(sizes(&with_stride(one.clone(), i64::MAX as u64)), (64, i64::MAX as u64, 64, 64));
    let geometry = Geometry::new(&with_stride(dense, 100)).unwrap();
    assert_eq!((geometry.row_start(0), geometry.row_start(4)), (0, 400));
}

#[test]
fn strides_that_do_not_fit_are_refused() {
    let words = |rows: i64, row_stride| CacheDesc {
        shape: vec![rows, 16],
        data_type: DataType::Int32,
        ..with_stride(desc(Placement::Host, 2, 1, 1), row_stride)
    };
    let limit = (i64::MAX as u64 / 2 - 64) / 4 * 4;
    Geometry::new(&words(2, limit)).unwrap();
    for (desc, text) in [
        (words(2, 0), "row_stride=0 must be at least the 64 bytes of a row"),
        (words(2, 60), "row_stride=60 must be at least the 64 bytes of a row"),
        (words(2, 66), "row_stride=66 must be a multiple of the 4 bytes of an element"),
        (words(2, limit + 4), "less than 2^63 bytes in all tensors"),
        (words(4, u64::MAX - 3), "row_stride=18446744073709551612"),
        (words(i64::MAX / 128, 128), "row_stride=128"),
    ] {
        refused(Geometry::new(&desc), &[text]);
    }
}

/// Whether every byte of `len` bytes from `start` on is in a row, looked up byte by byte.
fn in_rows(rows: RowSizes, start: u64, len: u64) -> bool {
    (start..start + len).all(|at| at % rows.stride() < rows.bytes())
        && (start / rows.stride() == (start + len - 1) / rows.stride() || !rows.has_gaps())
}

/// Pieces that a peer can send: spans that are not repeated, or a template.
#[derive(Clone, Debug)]
enum Sent {
    Spans(Vec<Span>),
    Template(Template),
}

impl Sent {
    fn plan(&self) -> llm_datadist_core::Result<CopyPlan> {
        match self.clone() {
            Sent::Spans(spans) => plan_of_peer(1, 0, 0, spans),
            Sent::Template(template) => {
                let first = TensorSteps::consecutive(0);
                CopyPlan::from_templates(1, first, first, listed(vec![template]))
            }
        }
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    let steps = || prop_oneof![Just(8i64), Just(16), 1..20i64];
    let span = (0..40u64, 0..40u64, 1..6u64, 1..5u64, steps(), steps());
    let span = span.prop_map(|(src, dst, len, count, src_step, dst_step)| {
        let dst_step = dst_step.max(len as i64);
        Span { src, dst, len, count, src_step, dst_step }
    });
    let far_apart = |spans: Vec<Span>| {
        let shift = |(at, span): (usize, Span)| Span { dst: span.dst + 160 * at as u64, ..span };
        spans.into_iter().enumerate().map(shift).collect::<Vec<_>>()
    };
    let spans = vec(span, 1..5).prop_map(far_apart);
    let pairs = || vec((0..12u32, 0..12u32), 1..6);
    let unit = || prop_oneof![Just(8u64), Just(16), Just(24), 1..20u64];
    prop_oneof![
        spans.clone().prop_map(Sent::Spans),
        // Long lists.
        spans.clone().prop_map(|spans| {
            let repeated = (0..5000u64).map(|k| Span { dst: spans[0].dst + 160 * k, ..spans[0] });
            Sent::Spans(repeated.collect())
        }),
        (1..9u64, 0..20u64, 0..20u64, pairs()).prop_map(|(len, src, dst, pairs)| {
            let spans = vec![Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }];
            Sent::Template(Template::new((len, len), pairs, spans))
        }),
        (unit(), unit(), pairs(), spans).prop_map(|(src_unit, dst_unit, pairs, spans)| {
            Sent::Template(Template::new((src_unit, dst_unit), pairs, spans))
        }),
    ]
}

/// A plan of a peer passes exactly if no byte of it is in a gap and no piece crosses one, and it names the rows it touches.
#[test]
fn plans_that_touch_a_gap_are_refused() {
    let (passed, refused) = (Cell::new(0), Cell::new(0));
    let sizes = || (1..10u64, prop_oneof![Just(0), Just(8), 1..10u64]);
    let rows = || sizes().prop_map(|(bytes, gap)| RowSizes::new(bytes, (bytes + gap).next_multiple_of(4)));
    TestRunner::new(proptest_cases(3000))
        .run(&(sent(), rows(), rows()), |(sent, src, dst)| {
            // Plans that write a byte twice are refused before.
            let Ok(plan) = sent.plan() else { return Ok(()) };
            let pieces: Vec<Piece> = plan.templates().iter().flat_map(Template::pieces).collect();
            for (side, rows, start) in [
                (Side::Source, src, (|piece| piece.src) as fn(&Piece) -> u64),
                (Side::Destination, dst, |piece| piece.dst),
            ] {
                let result = plan.check_rows(side, rows);
                let fits =
                    !rows.has_gaps() || pieces.iter().all(|piece| in_rows(rows, start(piece), piece.len));
                prop_assert_eq!(result.is_ok(), fits, "{:?} in {:?}", &sent, rows);
                let named = plan.touched_rows(side, rows).unwrap();
                prop_assert!(named.is_sorted_by(|a, b| a < b), "{:?} in {:?}", named, rows);
                if let Err(error) = result {
                    prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                    refused.set(refused.get() + 1);
                } else {
                    passed.set(passed.get() + usize::from(rows.has_gaps()));
                    let bytes = pieces.iter().flat_map(|piece| start(piece)..start(piece) + piece.len);
                    let touched: BTreeSet<u64> = bytes.map(|at| at / rows.stride()).collect();
                    prop_assert!(touched.iter().eq(&named), "{:?} in {:?}", named, rows);
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(passed.get() > 100 && refused.get() > 100, "{passed:?} passed, {refused:?} refused");
}

/// Scattered rows become templates, others strided spans.
#[test]
fn forms_of_plans_of_rows() {
    let scattered: Vec<(u64, u64)> = (0..200).map(|k| (k * 77 % 200, k * 131 % 200)).collect();
    let template = |len, strides, pairs: &[(u64, u64)]| {
        let first = Piece { src: 0, dst: 0, len };
        let pieces = Pieces::rows(first, strides, pairs.iter().copied()).unwrap();
        let listed: Vec<Piece> = pieces.iter().collect();
        let at = |&(src, dst): &(u64, u64)| Piece { src: src * strides.0, dst: dst * strides.1, len };
        assert_eq!(listed, pairs.iter().map(at).collect::<Vec<_>>());
        let mut moves = Moves { pieces, num_tensors: 2, ..Moves::default() };
        let plan = CopyPlan::moves(&mut moves).unwrap();
        assert_eq!((plan.templates().len(), plan.bytes()), (1, 2 * len * pairs.len() as u64));
        plan.templates()[0].clone()
    };
    for strides in [(64, 64), (64, 80), (80, 64), (128, 128)] {
        let template = template(64, strides, &scattered);
        assert_eq!((template.src_unit, template.dst_unit), strides);
        assert_eq!(template.num_spans(), 200);
    }
    let even: Vec<(u64, u64)> = (0..200).map(|row| (row, row)).collect();
    assert_eq!(template(64, (64, 80), &even).num_spans(), 1);
}

/// Rows that have arrived are counted by the stride.
#[test]
fn rows_that_arrived_are_found_between_gaps() {
    let pieces =
        Pieces::rows(Piece { src: 0, dst: 8, len: 16 }, (64, 100), [(0, 7), (1, 3), (2, 9)].into_iter());
    let mut moves = Moves { pieces: pieces.unwrap(), num_tensors: 1, ..Moves::default() };
    let plan = CopyPlan::moves(&mut moves).unwrap();
    let progress = Progress::default();
    progress.done(0, 16);
    progress.done(20, 48);
    let arrived = progress.arrived(&plan, RowSizes::new(24, 100)).unwrap();
    assert_eq!(arrived.iter().map(|tensor| tensor.rows.clone()).collect::<Vec<_>>(), [[7..8, 9..10]]);
}

/// Gaps of registered memory are the caller's, so the engine does not merge it into huge pages.
#[test]
fn registered_memory_with_gaps_is_not_merged() {
    let bytes = 6 << 20;
    let buffer = Buffer::new(bytes, |_| 0);
    let units = |desc: &CacheDesc| {
        let adopted = adopt(desc, CacheKind::Blocks, &[buffer.addr()]);
        Tensors::adopted(adopted).whole_units().len()
    };
    let dense = desc(Placement::Host, 1, bytes >> 12, 4096);
    assert!(units(&dense) >= 2);
    assert_eq!(units(&with_stride(desc(Placement::Host, 1, bytes >> 13, 4096), 8192)), 0);
}

fn blocks(row_bytes: usize, stride: u64) -> CacheLayout {
    let geometry = Geometry::new(&with_stride(desc(Placement::Device, 2, 8, row_bytes), stride)).unwrap();
    CacheLayout { geometry, kind: CacheKind::Blocks, placement: Placement::Device }
}

/// Within one cache, the part that is read and the part that is written are the same or have no byte in common.
#[test]
fn parts_of_one_cache_must_not_overlap_in_part() {
    let cache = blocks(64, 100);
    let copy = |src_offset, dst_offset, length| {
        let part = SubRow { src_offset, dst_offset, length: Some(length) };
        validate::copy_within(Words::ORIGINAL, cache, &[(0, 1), (1, 2)], part)
    };
    for (src, dst, length) in [(0, 0, 64), (16, 16, 48), (0, 32, 32), (32, 0, 32), (48, 0, 16), (0, 63, 1)] {
        copy(src, dst, length).unwrap();
    }
    for (src, dst, length) in [(0, 31, 32), (31, 0, 32), (0, 1, 2), (33, 32, 31)] {
        refused(copy(src, dst, length), &[&format!("dst_offset={dst} must be src_offset={src}")]);
    }
}

/// What copying a part of each row, one after the other, leaves in `to`.
fn naive(
    (from, src): (&[Vec<u8>], Geometry),
    (to, dst): (&mut [Vec<u8>], Geometry),
    pairs: &[(i64, i64)],
    part: SubRow,
) {
    let rest = (src.row_bytes() - part.src_offset).min(dst.row_bytes() - part.dst_offset);
    let len = part.length.unwrap_or(rest) as usize;
    for (from, to) in from.iter().zip(to) {
        for &(read, written) in pairs {
            let read = (read as u64 * src.row_stride() + part.src_offset) as usize;
            let written = (written as u64 * dst.row_stride() + part.dst_offset) as usize;
            to[written..written + len].copy_from_slice(&from[read..read + len]);
        }
    }
}

/// Swaps between host rows and rows of the simulated device, and copies between rows of the device, on every path.
#[test]
fn copies_on_the_simulated_device_leave_gaps_alone() {
    let pairs: Vec<(i64, i64)> = (0..40).map(|k| (k * 7 % 40, k * 11 % 40)).collect();
    let within: Vec<(i64, i64)> = (0..30).map(|k| (k * 7 % 40, (k * 11 + 1) % 40)).collect();
    let part = SubRow { src_offset: 24, dst_offset: 8, length: Some(100) };
    let same = SubRow { src_offset: 50, dst_offset: 50, length: None };
    let mut runs = 0;
    // A device that needs its own buffers cannot read host memory directly.
    for (reach, path) in [
        (HostReach::Direct, SwapInPath::Direct),
        (HostReach::Direct, SwapInPath::Ring),
        (HostReach::Staged, SwapInPath::Ring),
    ] {
        for (host_stride, device_stride) in [(256, 300), (300, 256), (256, 256), (1000, 4096)] {
            let mut config = config(64 << 20);
            config.swap_in = path;
            let sim = Arc::new(SimDevice::new(reach));
            let engine = engine_on(config, sim.clone());
            let host_desc = with_stride(desc(Placement::Host, 3, 40, 256), host_stride);
            let device_desc = with_stride(desc(Placement::Device, 3, 40, 256), device_stride);
            let (host, back) =
                (Own::loose(&host_desc, CacheKind::Blocks), Own::loose(&host_desc, CacheKind::Blocks));
            let device = engine.allocate(&device_desc, CacheKind::Blocks, &[]).unwrap();
            let [from, to] = [host.cache.geometry(), device.geometry()];
            let written = patterned(1, 3, from.tensor_bytes() as usize);
            let empty = patterned(2, 3, from.tensor_bytes() as usize);
            host.write(&written);
            back.write(&empty);
            let all: Vec<(i64, i64)> = (0..40).map(|row| (row, row)).collect();

            let mut there = vec![vec![0; to.tensor_bytes() as usize]; 3];
            let mut here = empty.clone();
            engine.swap_blocks(&host.end(), &end(&device), &all).run().unwrap();
            naive((&written, from), (&mut there, to), &all, SubRow::default());
            engine.copy(&end(&device), &host.end(), &pairs, part, None).run().unwrap();
            naive((&written, from), (&mut there, to), &pairs, part);
            for part in [part, same] {
                // The parts are apart or the same, so copying from a copy of the cache is the same only in order.
                let part = if part == same { part } else { SubRow { length: Some(16), ..part } };
                engine.copy(&end(&device), &end(&device), &within, part, None).run().unwrap();
                for pair in &within {
                    let before = there.clone();
                    naive((&before, to), (&mut there, to), &[*pair], part);
                }
            }
            engine.swap_blocks(&end(&device), &back.end(), &all).run().unwrap();
            naive((&there, to), (&mut here, from), &all, SubRow::default());
            let got = (back.read(), host.read());
            assert!(got == (here, written), "{reach:?}, {path:?}, {host_stride}, {device_stride}");
            assert!(back.outside_untouched() > 0 && host.outside_untouched() > 0);
            assert!(sim.copies() > 0);
            runs += 1;
        }
    }
    assert_eq!(runs, 12);
}
