//! Destinations of layers: plans compared with bytes that are moved one by one, over any geometry, rows and ranges.
//!
//! `links/layerwise.rs` covers engines.

use llm_datadist_core::bindings::{CacheLayout, Geometry, RowSizes, Words};
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Side};
use llm_datadist_core::testing::validate::{
    LayerDestination, LayerRows, RemoteCache, destination_layers, layer_moves,
};
use llm_datadist_core::{CacheKind, ErrorKind, Placement, Result};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{Tally, desc, patterned, proptest_cases};

fn spec(kind: CacheKind, tensors: u32, rows: usize, row_bytes: usize) -> CacheLayout {
    let geometry = Geometry::new(&desc(Placement::Device, tensors, rows, row_bytes)).unwrap();
    CacheLayout { geometry, kind, placement: Placement::Device }
}

fn remote(layout: CacheLayout, row: u32) -> RemoteCache {
    RemoteCache { layout, kv: None, row, accessible: true }
}

/// Applies the plan of `moves` to layer `layer` of `src`, which goes to layer `to` of `dst`.
fn moved(
    mut moves: Moves,
    (layer, to, per_layer): (u32, u32, u32),
    src: &[Vec<u8>],
    dst: &mut [Vec<u8>],
) -> u64 {
    let plan = CopyPlan::moves(&mut moves).unwrap().in_tensors(layer * per_layer, to * per_layer, per_layer);
    for (tensor, piece) in plan.pieces(0, plan.bytes()) {
        let [from, into] = Side::BOTH.map(|side| plan.tensors(side).first as usize + tensor);
        let from = &src[from][piece.src as usize..][..piece.len as usize];
        dst[into][piece.dst as usize..][..from.len()].copy_from_slice(from);
    }
    plan.bytes()
}

/// Moves byte by byte. Returns `None` if a byte lies outside the caches.
fn by_hand(
    rows: &LayerRows,
    (slot, row_bytes): (usize, usize),
    (start, room): (usize, usize),
    src: &[u8],
    dst: &mut [u8],
) -> Option<u64> {
    let mut bytes: Vec<(usize, usize)> = vec![];
    match rows {
        LayerRows::Slot => bytes.extend((0..row_bytes).map(|at| (slot * row_bytes + at, at))),
        LayerRows::Blocks { src, dst } => {
            for (from, to) in src.iter().zip(dst) {
                let (from, to) = (*from as usize * row_bytes, *to as usize * row_bytes);
                bytes.extend((0..row_bytes).map(|at| (from + at, to + at)));
            }
        }
        LayerRows::SlotToBlocks { dst, block_bytes } => {
            let block = *block_bytes as usize;
            for at in 0..row_bytes.min(dst.len() * block) {
                bytes.push((slot * row_bytes + at, dst[at / block] as usize * block + at % block));
            }
        }
    }
    if bytes.iter().any(|(from, to)| *from >= src.len() || *to >= room) {
        return None;
    }
    bytes.iter().for_each(|(from, to)| dst[start + to] = src[*from]);
    // What a later pair overwrites does not move.
    let written: std::collections::BTreeSet<_> = bytes.iter().map(|(_, to)| to).collect();
    Some(written.len() as u64)
}

/// The rows and their bytes of the local and of the remote cache, and a slot of each.
type Sizes = ((usize, usize), (usize, usize), (usize, usize));

/// Sizes; pairs of blocks; bytes of a block; whether the cache is named, and the form of the rows; an offset; and the tensors of a layer,
/// the layer and its position.
type Case = (Sizes, Vec<(u64, u64)>, usize, (bool, u8), usize, (u32, u32, u32));

fn case() -> impl Strategy<Value = Case> {
    let pairs = prop::collection::vec((0..4u64, 0..5u64), 1..7);
    let sizes = ((1..7usize, 1..30usize), (1..12usize, 1..60usize), (0..4usize, 0..6usize));
    let layers = (1..4u32, 0..3u32, 0..3u32);
    (sizes, pairs, 1..40usize, (any::<bool>(), 0..3u8), 0..200usize, layers)
}

fn judge(case: &Case, seen: &Tally) {
    let ((local, mut remote, slots), ref pairs, block, (by_name, form), offset, (per_layer, layer, to)) =
        *case;
    let (ours, theirs): (Vec<u64>, Vec<u64>) = pairs.iter().copied().unzip();
    let rows = match form {
        0 => LayerRows::Slot,
        1 => LayerRows::Blocks { src: ours.clone(), dst: theirs },
        _ => LayerRows::SlotToBlocks { dst: theirs, block_bytes: block as u64 },
    };
    let slots_alone = form == 0;
    let kinds = if slots_alone { CacheKind::Batch } else { CacheKind::Blocks };
    if by_name && form == 1 {
        remote.1 = local.1;
    } else if by_name && form == 2 {
        remote.1 = block;
    }
    let here = spec(if form == 1 { CacheKind::Blocks } else { CacheKind::Batch }, 9, local.0, local.1);
    let there = spec(kinds, 9, remote.0, remote.1);
    let row = if slots_alone { slots.1 as u32 } else { 0 };
    let far_bytes = remote.0 * remote.1;
    let at = if by_name {
        LayerDestination::Cache(self::remote(there, row))
    } else {
        let (offset, tensor_bytes) = (offset as u64, far_bytes as u64);
        LayerDestination::Memory { offset, tensor_bytes, rows: RowSizes::dense(1) }
    };
    let (start, room) = match (by_name, form) {
        (false, _) => (offset, far_bytes.saturating_sub(offset)),
        (true, 0) => (slots.1 * remote.1, remote.1),
        (true, _) => (0, far_bytes),
    };
    let source = patterned(1, 9, local.0 * local.1);
    let before = patterned(2, 9, far_bytes);
    let planned: Result<Moves> = layer_moves(Words::ORIGINAL, here, &rows, slots.0 as u32, &at);
    let (mut expected, mut got) = (before.clone(), before);
    let mut legal = slots.0 < local.0 || form == 1;
    legal &= !by_name || !slots_alone || slots.1 < remote.0;
    if let LayerRows::SlotToBlocks { dst, .. } = &rows {
        legal &= block < local.0 * local.1 && dst.len() <= local.1.div_ceil(block);
    }
    let mut bytes = Some(0);
    for tensor in 0..per_layer {
        let (from, into) = ((layer * per_layer + tensor) as usize, (to * per_layer + tensor) as usize);
        let (src, dst) = (&source[from % 9], &mut expected[into % 9]);
        let one = if legal { by_hand(&rows, (slots.0, local.1), (start, room), src, dst) } else { None };
        bytes = bytes.zip(one).map(|(sum, one)| sum + one);
    }
    seen.count(if bytes.is_some() { "done" } else { "refused" });
    match (planned, bytes) {
        (Err(error), None) => assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{case:?}"),
        (Ok(moves), Some(bytes)) => {
            let read: std::collections::BTreeSet<_> = moves.src_rows.iter().copied().collect();
            let rows_read = if form == 1 { ours } else { vec![slots.0 as u64] };
            assert_eq!(read, rows_read.into_iter().collect(), "the rows that are pinned: {case:?}");
            assert_eq!(moved(moves, (layer, to, per_layer), &source, &mut got), bytes, "{case:?}");
            assert!(got == expected, "{case:?}");
        }
        (planned, bytes) => panic!("{planned:?}, by hand {bytes:?}: {case:?}"),
    }
}

#[test]
fn a_layer_lands_as_by_hand() {
    let seen = Tally::default();
    let ran = TestRunner::new(proptest_cases(3000)).run(&case(), |case| {
        judge(&case, &seen);
        Ok(())
    });
    ran.unwrap_or_else(|error| panic!("{error}"));
    seen.check(2, 201);
}

/// Layers at any position, including numbers of layers whose tensors exceed 32 bits.
#[test]
fn layers_are_in_the_remote_cache_or_refused() {
    let there = remote(spec(CacheKind::Batch, 12, 1, 4), 0);
    let bounds = [0, 1, 2, 3, 4, 6, 12, 13, 1 << 16, u32::MAX - 1, u32::MAX];
    for first in bounds {
        for layers in bounds {
            for per_layer in bounds {
                let inside = (u128::from(first) + u128::from(layers)) * u128::from(per_layer) <= 12;
                let result = destination_layers(Words::ORIGINAL, &there, first, layers, per_layer);
                assert_eq!(result.is_ok(), inside, "{first} {layers} {per_layer}");
            }
        }
    }
}
