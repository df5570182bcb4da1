//! Which pulls and pushes are legal, and which bytes they move: rules and plans, compared with a naive model.
//!
//! Links and real memory are covered by `links/pull_and_push.rs`.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;

use llm_datadist_core::bindings::{CacheLayout, Geometry, Role, SubRow, Words};
use llm_datadist_core::testing::plan::{CopyPlan, Moves, Piece, Side};
use llm_datadist_core::testing::validate::{
    self, CheckedTransfer, ExtParam, LayerRange, Layers, OwnerShare, RemoteCache, Rows, accessible,
    pull_kv_layers, push_kv_alone, push_kv_cache,
};
use llm_datadist_core::{CacheDesc, CacheKind, ErrorKind, Placement, Result};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::arguments::{refused, refused_as};
use crate::fixtures::{desc, proptest_cases};
use CacheKind::{Batch, Blocks};
use ErrorKind::{CacheNotFound, InvalidArgument};
use Placement::{Device, Host};

fn spec(kind: CacheKind, num_tensors: u32, rows: u64, row_bytes: u64) -> CacheLayout {
    with_gaps(kind, num_tensors, rows, (row_bytes, 0))
}

/// Rows of `row_bytes` bytes, with `gap` bytes between two of them.
fn with_gaps(kind: CacheKind, num_tensors: u32, rows: u64, (row_bytes, gap): (u64, u64)) -> CacheLayout {
    let dense = desc(Device, num_tensors, rows as usize, row_bytes as usize);
    let geometry = Geometry::new(&CacheDesc { row_stride: Some(row_bytes + gap), ..dense }).unwrap();
    CacheLayout { geometry, kind, placement: Device }
}

fn remote(layout: CacheLayout, row: u32) -> RemoteCache {
    RemoteCache { layout, kv: None, row, accessible: true }
}

pub fn layers(src: Option<(u32, u32)>, dst: Option<(u32, u32)>, tensors_per_layer: u32) -> Layers {
    let range = |(first, end)| LayerRange { first, end };
    Layers { src: src.map(range), dst: dst.map(range), tensors_per_layer }
}

fn pull(local: CacheLayout, remote: &RemoteCache, rows: &Rows, layers: Layers) -> Result<Moves> {
    CheckedTransfer::new(Words::ORIGINAL, Side::Destination, local, rows.clone(), layers)?.moves(remote)
}

fn push(local: CacheLayout, remote: &RemoteCache, rows: &Rows, layers: Layers) -> Result<Moves> {
    CheckedTransfer::new(Words::ORIGINAL, Side::Source, local, rows.clone(), layers)?.moves(remote)
}

#[derive(Clone, Debug)]
struct Case {
    local: CacheLayout,
    remote: RemoteCache,
    pull: Rows,
    push: Rows,
    layers: Layers,
    cut: u64,
}

/// Position of a byte that is read and of the byte that it is written to.
type Offsets = (u64, u64);
/// The same, each with its tensor.
type Byte = ((u64, u64), (u64, u64));

/// A cache as the naive model sees it.
struct Shape {
    kind: CacheKind,
    tensors: u64,
    rows: u64,
    /// Bytes of a row, and from the start of one row to the start of the next.
    row: u64,
    stride: u64,
}

impl Shape {
    fn of(CacheLayout { geometry, kind, .. }: CacheLayout) -> Shape {
        let tensors = u64::from(geometry.num_tensors());
        let (row, stride) = (geometry.row_bytes(), geometry.row_stride());
        Shape { kind, tensors, rows: geometry.rows(), row, stride }
    }

    fn has_blocks(&self, blocks: &[i64]) -> bool {
        !blocks.is_empty() && blocks.iter().all(|&block| block >= 0 && (block as u64) < self.rows)
    }

    fn has_part(&self, slot: u32, offset: u64, size: i64) -> bool {
        let fits = size == -1 || (size > 0 && offset.saturating_add(size as u64) <= self.row);
        u64::from(slot) < self.rows && offset < self.row && fits
    }

    fn has_tensors(&self, tensors: &[u64]) -> bool {
        tensors.iter().all(|&tensor| tensor < self.tensors)
    }
}

fn need(rule: bool, kind: ErrorKind) -> Result<(), ErrorKind> {
    if rule { Ok(()) } else { Err(kind) }
}

/// The tensors of some layers, one by one.
fn listed(range: Option<LayerRange>, per_layer: u32) -> Vec<u64> {
    let layers = range.map_or(0..0, |range| range.first..range.end);
    layers.flat_map(|layer| (0..per_layer).map(move |at| u64::from(layer * per_layer + at))).collect()
}

/// The bytes of `part` of some rows of `src` and the rows of `dst` that they go to.
fn parts_of_rows(
    (src, from): (&Shape, &[i64]),
    (dst, to): (&Shape, &[i64]),
    part: SubRow,
) -> Option<Vec<Offsets>> {
    let room = |row: u64, offset: u64| row.checked_sub(offset).filter(|&room| room > 0);
    let (read, written) = (room(src.row, part.src_offset)?, room(dst.row, part.dst_offset)?);
    let len = part.length.unwrap_or(read.min(written));
    if len == 0 || len > read || len > written || (part == SubRow::default() && src.row != dst.row) {
        return None;
    }
    let pairs = from.iter().zip(to).map(|(&from, &to)| {
        (from as u64 * src.stride + part.src_offset, to as u64 * dst.stride + part.dst_offset)
    });
    Some(pairs.flat_map(|(from, to)| (0..len).map(move |byte| (from + byte, to + byte))).collect())
}

fn in_all(src: &[u64], dst: &[u64], bytes: &[Offsets]) -> Vec<Byte> {
    let tensors = src.iter().zip(dst);
    tensors
        .flat_map(|(&from, &to)| bytes.iter().map(move |&(read, written)| ((from, read), (to, written))))
        .collect()
}

/// The part of each row that is moved; by default all of it.
fn part_of(rows: &Rows) -> SubRow {
    if let Rows::SubRows { part, .. } = rows { *part } else { SubRow::default() }
}

const NOT_HERE: &str =
    "`links/bytes.rs` and `kv_pulls` have models of their own, and no push is made of a slot and blocks";

/// contract §7.12, §7.13, as lists of tensors and bytes.
fn naive_pull(case: &Case) -> Result<Vec<Byte>, ErrorKind> {
    let Case { local, remote, pull: rows, layers, .. } = case;
    let (here, there, row) = (Shape::of(*local), Shape::of(remote.layout), u64::from(remote.row));
    let (local_fits, remote_kind) = match rows {
        Rows::Bytes { .. } | Rows::Sequence { .. } => unreachable!("{NOT_HERE}"),
        Rows::Slot { local, local_offset, size, .. } => {
            (here.kind == Batch && here.has_part(*local, *local_offset, *size), Batch)
        }
        Rows::SubRows { remote, local, part } => {
            let room = here.row.saturating_sub(part.dst_offset);
            let fits = room > 0 && part.length.is_none_or(|length| (1..=room).contains(&length));
            (here.kind == Blocks && remote.len() == local.len() && here.has_blocks(local) && fits, Blocks)
        }
        Rows::Blocks { remote, local } => {
            (here.kind == Blocks && remote.len() == local.len() && here.has_blocks(local), Blocks)
        }
        Rows::AnyKind { remote, local } => {
            (remote.len() == local.len() && here.has_blocks(local), there.kind)
        }
        Rows::SlotToBlocks { local } => (here.kind == Blocks && here.has_blocks(local), Batch),
    };
    let per_layer = layers.tensors_per_layer;
    need(local_fits && per_layer > 0, InvalidArgument)?;
    let (src, dst) = (listed(layers.src, per_layer), listed(layers.dst, per_layer));
    let all_layers = src.is_empty() && dst.is_empty();
    let to = if dst.is_empty() { (0..here.tensors).collect() } else { dst };
    need(all_layers || here.tensors.is_multiple_of(u64::from(per_layer)), InvalidArgument)?;
    need(here.has_tensors(&to) && (src.is_empty() || src.len() == to.len()), InvalidArgument)?;

    need(row < if there.kind == Batch { there.rows } else { 1 }, CacheNotFound)?;
    let from = if src.is_empty() { (0..there.tensors).collect() } else { src };
    need(from.len() == to.len() && there.has_tensors(&from), InvalidArgument)?;
    need(remote.accessible && there.kind == remote_kind, InvalidArgument)?;
    let bytes = match rows {
        Rows::Bytes { .. } | Rows::Sequence { .. } => unreachable!("{NOT_HERE}"),
        Rows::Slot { local, remote_offset, local_offset, size } => {
            let len = if *size == -1 { here.row - local_offset } else { *size as u64 };
            need(remote_offset.saturating_add(len) <= there.row, InvalidArgument)?;
            let dst = u64::from(*local) * here.stride + local_offset;
            (0..len).map(|byte| (row * there.stride + remote_offset + byte, dst + byte)).collect()
        }
        Rows::Blocks { remote, local }
        | Rows::AnyKind { remote, local }
        | Rows::SubRows { remote, local, .. } => {
            need(there.has_blocks(remote), InvalidArgument)?;
            parts_of_rows((&there, remote), (&here, local), part_of(rows)).ok_or(InvalidArgument)?
        }
        Rows::SlotToBlocks { local } => {
            let blocks = local.len() as u64;
            need((blocks - 1) * here.row < there.row, InvalidArgument)?;
            let into = |byte: u64| local[(byte / here.row) as usize] as u64 * here.stride + byte % here.row;
            let len = there.row.min(blocks * here.row);
            (0..len).map(|byte| (row * there.stride + byte, into(byte))).collect()
        }
    };
    Ok(in_all(&from, &to, &bytes))
}

/// contract §7.14, §7.15.
fn naive_push(case: &Case) -> Result<Vec<Byte>, ErrorKind> {
    let Case { local, remote, push: rows, layers, .. } = case;
    let (here, there) = (Shape::of(*local), Shape::of(remote.layout));
    let per_layer = layers.tensors_per_layer;
    need(per_layer > 0 && layers.src.is_some() == layers.dst.is_some(), InvalidArgument)?;
    let all = LayerRange { first: 0, end: here.tensors as u32 / per_layer };
    let from = listed(layers.src.or(Some(all)), per_layer);
    let to = listed(layers.dst.or(Some(all)), per_layer);
    need(layers.src.is_none() || (!from.is_empty() && !to.is_empty()), InvalidArgument)?;
    need(from.is_empty() || here.tensors.is_multiple_of(u64::from(per_layer)), InvalidArgument)?;
    need(from.len() == to.len() && here.has_tensors(&from) && there.has_tensors(&to), InvalidArgument)?;
    let kinds = match rows {
        Rows::Slot { .. } => (Batch, Batch),
        Rows::Blocks { .. } | Rows::SubRows { .. } => (Blocks, Blocks),
        Rows::AnyKind { .. } => (here.kind, there.kind),
        Rows::Bytes { .. } | Rows::SlotToBlocks { .. } | Rows::Sequence { .. } => unreachable!("{NOT_HERE}"),
    };
    need((here.kind, there.kind) == kinds && remote.accessible, InvalidArgument)?;
    let bytes = match rows {
        Rows::Slot { local, .. } => {
            let (slot, row) = (u64::from(*local), u64::from(remote.row));
            need(slot < here.rows && row < there.rows && here.row <= there.row, InvalidArgument)?;
            (0..here.row).map(|byte| (slot * here.stride + byte, row * there.stride + byte)).collect()
        }
        Rows::Blocks { local, remote }
        | Rows::AnyKind { local, remote }
        | Rows::SubRows { local, remote, .. } => {
            let lists = local.len() == remote.len() && here.has_blocks(local) && there.has_blocks(remote);
            need(lists, InvalidArgument)?;
            parts_of_rows((&here, local), (&there, remote), part_of(rows)).ok_or(InvalidArgument)?
        }
        Rows::Bytes { .. } | Rows::SlotToBlocks { .. } | Rows::Sequence { .. } => unreachable!("{NOT_HERE}"),
    };
    Ok(in_all(&from, &to, &bytes))
}

type Memory = Vec<Vec<u16>>;

fn memory(layout: CacheLayout, mark: u16) -> Memory {
    let bytes = |tensor| (0..layout.geometry.tensor_bytes()).map(move |at| mark + tensor * 512 + at as u16);
    (0..layout.geometry.num_tensors()).map(|tensor| bytes(tensor as u16).collect()).collect()
}

/// Checks that the plan of the moves leaves in `dst` what copying `bytes` one after the other leaves, whatever
/// the order of the pieces and wherever the byte positions are cut, and that it reports the rows it touches.
fn plan_does(moves: &Moves, bytes: &[Byte], (src, dst): (CacheLayout, CacheLayout), cut: u64) {
    let (from, before) = (memory(src, 0), memory(dst, 1 << 15));
    let mut expected = before.clone();
    for &((tensor, read), (into, written)) in bytes {
        expected[into as usize][written as usize] = from[tensor as usize][read as usize];
    }
    let plan = CopyPlan::moves(&mut moves.clone()).unwrap();
    assert_eq!(
        (plan.tensors(Side::Source).first, plan.tensors(Side::Destination).first),
        (moves.src_tensor, moves.dst_tensor)
    );
    // Only the last byte that is written to a place is copied.
    let last: BTreeMap<_, _> = bytes.iter().map(|&(read, written)| (written, read)).collect();
    assert_eq!(plan.bytes(), last.len() as u64);
    for (side, of) in [(Side::Source, src.geometry), (Side::Destination, dst.geometry)] {
        plan.check_bounds(side, (of.num_tensors(), of.tensor_bytes())).unwrap();
        plan.check_rows(side, of.row_sizes()).unwrap();
    }

    let copy = |to: &mut Memory, tensor: usize, piece: Piece| {
        let read = &from[moves.src_tensor as usize + tensor][piece.src as usize..][..piece.len as usize];
        let written = &mut to[moves.dst_tensor as usize + tensor][piece.dst as usize..];
        written[..piece.len as usize].copy_from_slice(read);
    };
    let mut backwards = before.clone();
    let pieces: Vec<_> = plan.pieces(0, plan.bytes()).collect();
    pieces.into_iter().rev().for_each(|(tensor, piece)| copy(&mut backwards, tensor, piece));
    assert_eq!(backwards, expected, "{plan:?}");

    let mut in_cuts = before;
    for at in (0..plan.bytes()).step_by(cut as usize) {
        let end = (at + cut).min(plan.bytes());
        let pieces: Vec<_> = plan.pieces(at, end).collect();
        let len: u64 = pieces.iter().map(|(_, piece)| piece.len).sum();
        assert_eq!(len, end - at, "{at} to {end}: {plan:?}");
        pieces.into_iter().for_each(|(tensor, piece)| copy(&mut in_cuts, tensor, piece));
    }
    assert_eq!(in_cuts, expected, "in cuts of {cut}: {plan:?}");

    let read = last.values().map(|(_, at)| at / src.geometry.row_stride());
    assert_eq!(plan.touched_rows(Side::Source, src.geometry.row_sizes()).unwrap(), sorted(read));
    let written = last.keys().map(|(_, at)| at / dst.geometry.row_stride());
    assert_eq!(plan.touched_rows(Side::Destination, dst.geometry.row_sizes()).unwrap(), sorted(written));
}

fn sorted(rows: impl IntoIterator<Item = u64>) -> Vec<u64> {
    rows.into_iter().collect::<BTreeSet<_>>().into_iter().collect()
}

/// One value in 40 comes from `wild`, so that about half of all requests are legal.
fn mostly<T: Debug>(
    legal: impl Strategy<Value = T> + 'static,
    wild: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = T> {
    prop_oneof![39 => legal, 1 => wild]
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1..6u64, 1..6u64, 1..9u64, 0..6u64, 1..6usize);
    let tensors = (1..4u32, 1..4u32, prop::bool::ANY, prop::bool::ANY);
    let kinds = || prop_oneof![Just(Batch), Just(Blocks)];
    let gap = || prop_oneof![Just(0), 1..5u64];
    (0..7u8, (kinds(), gap()), (kinds(), gap()), sizes, tensors, 0..8u64).prop_flat_map(move |drawn| {
        let (what, (any_local, local_gap), (any_remote, remote_gap), sizes, tensors, offset) = drawn;
        let (per_layer, count, src_given, dst_given) = tensors;
        let (rows, remote_rows, bytes, more, blocks) = sizes;
        let (kind, remote_kind, remote_bytes, blocks) = match what {
            0 | 1 => (Batch, Batch, bytes + more, blocks),
            2 => (Blocks, Batch, bytes + 2 * more, blocks.min((bytes + 2 * more).div_ceil(bytes) as usize)),
            3 => (any_local, any_remote, bytes, blocks),
            6 => (Blocks, Blocks, bytes + more, blocks),
            _ => (Blocks, Blocks, bytes, blocks),
        };
        let remote_row = if remote_kind == Batch { remote_rows as u32 } else { 1 };
        let local_offset = offset % bytes;
        let room = if what == 0 { bytes } else { bytes - local_offset };
        let tensors = |given| mostly(Just(per_layer * if given { 5 } else { count }), 1..16u32);
        let range = |given: bool| {
            let legal = (0..3u32).prop_map(move |first| given.then_some((first, first + count)));
            mostly(legal, prop::option::of((0..7u32, 0..7u32)))
        };
        let list = |rows: u64| {
            let wild = prop_oneof![-1..7i64, Just(i64::MAX)];
            let block = move || mostly(0..rows as i64, wild.clone());
            mostly(vec(block(), blocks), vec(block(), 0..6))
        };
        let offsets = |legal: std::ops::Range<u64>| mostly(legal, prop_oneof![0..12u64, Just(u64::MAX)]);
        let size = prop_oneof![Just(-1), 1..=room as i64];
        let wild_size = prop_oneof![-3..12i64, Just(i64::MIN), Just(i64::MAX)];
        let kinds = (mostly(Just(kind), kinds()), mostly(Just(remote_kind), kinds()));
        let local = (tensors(dst_given), mostly(0..rows as u32, 0..7u32));
        let remote = (tensors(src_given), mostly(0..remote_row, 0..7u32));
        let other = (mostly(Just(remote_bytes), 1..12u64), mostly(Just(true), Just(false)), 1..40u64);
        let part = (
            offsets(local_offset..local_offset + 1),
            offsets(0..(remote_bytes.saturating_sub(room) + 1).min(remote_bytes)),
            mostly(size, wild_size),
        );
        let layering = (range(src_given), range(dst_given), mostly(Just(per_layer), 0..9u32));
        let lists = (list(rows), list(remote_rows));
        (kinds, local, remote, other, part, layering, lists).prop_map(move |made| {
            let (kinds, (tensors, slot), (remote_tensors, row), other, part, layering, lists) = made;
            let (remote_bytes, accessible, cut) = other;
            let (local_offset, remote_offset, size) = part;
            let (local, remote) = lists;
            let slot_push = Rows::slot(slot, -1);
            let blocks_push = Rows::Blocks { local: local.clone(), remote: remote.clone() };
            let rows_push = Rows::AnyKind { local: local.clone(), remote: remote.clone() };
            let (pull, push) = match what {
                0 => (Rows::slot(slot, size), slot_push),
                1 => (Rows::Slot { local: slot, remote_offset, local_offset, size }, slot_push),
                2 => (Rows::SlotToBlocks { local }, slot_push),
                3 => (Rows::AnyKind { remote, local }, rows_push),
                6 => {
                    let length = u64::try_from(size).ok().filter(|&length| length != 5);
                    let part = SubRow { src_offset: remote_offset, dst_offset: local_offset, length };
                    let back = SubRow { src_offset: local_offset, dst_offset: remote_offset, length };
                    let (from, to) = (local.clone(), remote.clone());
                    (
                        Rows::SubRows { remote, local, part },
                        Rows::SubRows { local: from, remote: to, part: back },
                    )
                }
                _ => (Rows::Blocks { remote, local }, blocks_push),
            };
            let there = with_gaps(kinds.1, remote_tensors, remote_rows, (remote_bytes, remote_gap));
            Case {
                local: with_gaps(kinds.0, tensors, rows, (bytes, local_gap)),
                remote: RemoteCache { layout: there, kv: None, row, accessible },
                pull,
                push,
                layers: layers(layering.0, layering.1, layering.2),
                cut,
            }
        })
    })
}

/// The answer to a request, and the answer of the model.
type Answers = (Result<Moves>, Result<Vec<Byte>, ErrorKind>);

fn agrees_with_the_model(pulls: bool, answer: impl Fn(&Case) -> Answers) {
    let (done, refused) = (Cell::new(0), Cell::new(0));
    TestRunner::new(proptest_cases(4000))
        .run(&cases(), |case| {
            let (src, dst) =
                if pulls { (case.remote.layout, case.local) } else { (case.local, case.remote.layout) };
            match answer(&case) {
                (Err(error), Err(expected)) => {
                    prop_assert_eq!(error.kind(), expected, "{}", error);
                    refused.set(refused.get() + 1);
                }
                (Ok(moves), Ok(bytes)) => {
                    plan_does(&moves, &bytes, (src, dst), case.cut);
                    let plan = CopyPlan::moves(&mut moves.clone()).unwrap();
                    let stride = case.local.geometry.row_sizes();
                    let (rows, planned) = if pulls {
                        (&case.pull, plan.touched_rows(Side::Destination, stride))
                    } else {
                        (&case.push, plan.touched_rows(Side::Source, stride))
                    };
                    // A push also takes rows whose bytes are overwritten by later ones.
                    let (rows, planned) = (sorted(rows.local_rows().unwrap()), planned.unwrap());
                    prop_assert!(planned.iter().all(|row| rows.contains(row)));
                    prop_assert!(!pulls || rows == planned);
                    done.set(done.get() + 1);
                }
                unlike => return Err(TestCaseError::fail(format!("{unlike:?}"))),
            }
            Ok(())
        })
        .unwrap();
    assert!(done.get() > 400 && refused.get() > 400, "{done:?} done, {refused:?} refused");
}

#[test]
fn pulls_agree_with_the_model() {
    agrees_with_the_model(true, |case| {
        let Case { local, remote, pull: rows, layers, .. } = case;
        (pull(*local, remote, rows, *layers), naive_pull(case))
    });
}

#[test]
fn pushes_agree_with_the_model() {
    agrees_with_the_model(false, |case| {
        let Case { local, remote, push: rows, layers, .. } = case;
        (push(*local, remote, rows, *layers), naive_push(case))
    });
}

/// The local side is checked first: a remote cache that lacks the slot is not noticed. `words` has the whole texts of
/// other rules.
#[test]
fn refused_pulls_name_the_argument_and_its_limit() {
    let (batch, blocks, all) = (spec(Batch, 4, 3, 8), spec(Blocks, 4, 4, 8), Layers::ALL);
    let slot = Rows::slot;
    let part = |remote_offset, local_offset, size| Rows::Slot { local: 2, remote_offset, local_offset, size };
    let pairs = |from: &[i64], to: &[i64]| Rows::Blocks { remote: from.to_vec(), local: to.to_vec() };
    let cut = |local: &[i64]| Rows::SlotToBlocks { local: local.to_vec() };
    let given = |src, dst, per_layer| layers(Some(src), Some(dst), per_layer);
    let last = (u32::MAX - 1, u32::MAX);
    let absent = remote(batch, 99);
    let slots = |tensors, bytes| remote(spec(Batch, tensors, 2, bytes), 1);
    let hidden = RemoteCache { accessible: false, ..slots(4, 8) };
    let wide = |bytes| remote(spec(Blocks, 4, 9, bytes), 0);
    let rules: &[(CacheLayout, RemoteCache, Rows, Layers, &[&str])] = &[
        (batch, absent.clone(), slot(9, i64::MIN), all, &["size=-9223372036854775808"]),
        (batch, absent.clone(), slot(3, 99), all, &["batch_index=3", "0 to 2"]),
        (batch, absent.clone(), slot(2, 9), given((0, 1), (0, 1), 3), &["size=9", "8 bytes"]),
        (
            batch,
            absent.clone(),
            slot(2, 8),
            given(last, (0, 1), u32::MAX),
            &["tensor_num_per_layer=4294967295"],
        ),
        (batch, absent.clone(), part(0, 3, 6), all, &["size=6", "5 bytes"]),
        (batch, absent.clone(), part(0, 8, 1), all, &["dst_cache_offset=8", "8 bytes"]),
        (batch, absent.clone(), part(u64::MAX, u64::MAX, i64::MAX), all, &["dst_cache_offset"]),
        (batch, absent.clone(), cut(&[0]), all, &["continuous cache"]),
        (blocks, absent.clone(), cut(&[4]), all, &["dst_blocks[0]=4"]),
        (blocks, absent.clone(), pairs(&[], &[1]), all, &["src_blocks=[]"]),
        (blocks, absent.clone(), pairs(&[1, 1], &[0, -1]), all, &["dst_blocks[1]=-1", "0 to 3"]),
        (batch, slots(4, 8), slot(2, 8), given(last, (0, 1), 4), &["src_layer_range", "remote cache"]),
        (batch, hidden, slot(0, -1), all, &["remote_accessible False"]),
        (batch, wide(8), slot(0, -1), all, &["remote cache is a blocks cache"]),
        (batch, slots(4, 7), slot(0, -1), all, &["size=-1", "7 bytes of a slot of the remote cache"]),
        (batch, slots(4, 10), part(3, 0, -1), all, &["size=-1", "8 bytes", "7 bytes", "remote cache"]),
        (batch, slots(4, 10), part(10, 0, 1), all, &["src_cache_offset=10", "10 bytes"]),
        (blocks, wide(8), pairs(&[9], &[0]), all, &["src_blocks[0]=9", "0 to 8"]),
        // A slot of 20 bytes is two and a half blocks.
        (blocks, slots(4, 20), cut(&[0, 1, 2, 3]), all, &["len(dst_blocks)=4", "at most 3"]),
    ];
    for (local, remote, rows, layers, facts) in rules {
        refused(pull(*local, remote, rows, *layers), facts);
    }
    refused_as(CacheNotFound, pull(batch, &absent, &slot(0, -1), all), &["no slot 99", "0 to 2"]);
}

#[test]
fn refused_pushes_name_the_argument_and_its_limit() {
    let (local, slot) = (spec(Batch, 10, 3, 8), Rows::slot(2, -1));
    let (good, narrow) = (remote(local, 1), remote(spec(Batch, 10, 3, 7), 0));
    let hidden = RemoteCache { accessible: false, ..good.clone() };
    let one = Some((0, 1));
    let rules: &[(RemoteCache, Layers, &[&str])] = &[
        (good.clone(), layers(None, None, 3), &["tensor_num_per_layer=3", "10"]),
        (good.clone(), layers(None, one, 2), &["dst_layer_range was given without src_layer_range"]),
        (good.clone(), layers(one, Some((5, 6)), 2), &["dst_layer_range", "remote cache"]),
        (hidden, Layers::ALL, &["remote_accessible False"]),
        (narrow, Layers::ALL, &["8 bytes", "the 7 bytes of a slot of the remote cache"]),
    ];
    for (remote, layers, facts) in rules {
        refused(push(local, remote, &slot, *layers), facts);
    }
    for rows in [Rows::slot(2, 8), Rows::SlotToBlocks { local: vec![0] }] {
        refused(push(local, &good, &rows, Layers::ALL), &["a push moves whole slots"]);
    }
    let pairs = Rows::Blocks { local: vec![0], remote: vec![] };
    refused(push(spec(Blocks, 10, 3, 8), &good, &pairs, Layers::ALL), &["dst_blocks=[]"]);
    validate::push_size(-1).unwrap();
    for size in [0, 1, -2, i64::MIN] {
        refused(validate::push_size(size), &["size", "-1"]);
    }
}

type Range = (i32, i32);
const ALL: Range = (-1, -1);

fn ext(src_layer_range: Range, dst_layer_range: Range, tensor_num_per_layer: u8) -> ExtParam {
    ExtParam { src_layer_range, dst_layer_range, tensor_num_per_layer }
}

fn pushed(local: CacheLayout, ext: ExtParam) -> Result<Layers> {
    push_kv_alone("PushKvCache", Role::Mix, -1, ext)?;
    push_kv_cache(local, ext)
}

/// The default is 2 tensors in a layer. It also holds for caches of one tensor, and of an odd number of them.
#[test]
fn ranges_of_an_ext_param_name_tensors() {
    for (tensors, src, dst, per_layer, expected) in [
        (4, ALL, ALL, 2, (0, 0, 4)),
        (4, ALL, ALL, 3, (0, 0, 4)), // all layers need no divisor
        (1, ALL, ALL, 2, (0, 0, 1)),
        (5, ALL, ALL, 2, (0, 0, 5)),
        (4, (3, 3), (3, 3), 1, (3, 3, 1)),
        (5, (0, 1), (0, 1), 2, (0, 0, 4)), // the last tensor is in no layer
        (5, (1, 1), (0, 0), 2, (2, 0, 2)),
        (5, (0, 0), (1, 1), 2, (0, 2, 2)),
    ] {
        let (local, given) = (spec(Batch, tensors, 4, 64), ext(src, dst, per_layer));
        let (pushed, pulled) =
            (pushed(local, given).unwrap(), pull_kv_layers(local.geometry, given).unwrap());
        for moves in [
            push(local, &remote(local, 3), &Rows::slot(3, -1), pushed).unwrap(),
            pull(local, &remote(local, 3), &Rows::slot(3, -1), pulled).unwrap(),
        ] {
            assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors), expected, "{given:?}");
        }
    }
    let local = spec(Batch, 4, 4, 64);
    let beyond = pushed(local, ext((0, 1), (5, 6), 2)).unwrap();
    assert_eq!(beyond, layers(Some((0, 2)), Some((5, 7)), 2));
    pushed(local, ext((0, 0), (i32::MAX, i32::MAX), 1)).unwrap();
}

#[test]
fn refused_ext_params_name_the_argument_and_its_limit() {
    let rules: &[(u32, ExtParam, &[&str])] = &[
        (1, ext((0, 0), (0, 0), 2), &["tensor_num_per_layer=2", "1 to 1"]),
        (4, ext((0, 0), (0, 0), 3), &["tensor_num_per_layer=3", "num_tensors, 4"]),
        (4, ext(ALL, (0, 0), 1), &["src_layer_range=(-1, -1)"]),
        (4, ext((0, -1), (0, 0), 1), &["src_layer_range=(0, -1)"]),
        (5, ext((2, 2), (2, 2), 2), &["src_layer_range=(2, 2)", "last <= 1"]),
        (4, ext((i32::MIN, i32::MAX), (0, 0), 1), &["src_layer_range"]),
        (4, ext((0, 0), (0, i32::MAX), 1), &["1 layers", "dst_layer_range 2147483648"]),
    ];
    for (tensors, ext, facts) in rules {
        refused(pushed(spec(Batch, *tensors, 4, 64), *ext), facts);
    }
    let uneven = pull_kv_layers(spec(Batch, 5, 4, 64).geometry, ext((0, 1), (0, 0), 2));
    refused(uneven, &["2 layers"]);
    let blocks = pushed(spec(Blocks, 4, 4, 64), ExtParam::default());
    refused(blocks, &["blocks cache"]);
}

#[test]
fn registered_memory_is_accessible_as_given_or_by_mode() {
    for (placement, one_sided, linked, by_default) in [
        (Device, false, false, true),
        (Device, false, true, true),
        (Device, true, false, true),
        (Device, true, true, false),
        (Host, false, false, true),
        (Host, false, true, true),
        (Host, true, false, false),
        (Host, true, true, false),
    ] {
        let ask = |given| accessible(given, placement, one_sided, linked);
        assert_eq!((ask(None).unwrap(), ask(Some(false)).unwrap()), (by_default, false));
        if linked {
            let text = "remote_accessible=True must be False or None after link()";
            assert_eq!(ask(Some(true)).unwrap_err().to_string(), text);
        } else {
            assert!(ask(Some(true)).unwrap());
        }
    }
    validate::check_accessible(Words::ORIGINAL, "cache", true).unwrap();
    refused(
        validate::check_accessible(Words::ORIGINAL, "src_cache", false),
        &["src_cache was registered with"],
    );
}

/// A row that a plan cannot name is refused when the transfer is planned or shared, by the first such number. A push of no
/// tensors plans nothing.
#[test]
fn rows_beyond_32_bits_are_refused_last() {
    let wide = spec(Blocks, 2, (1 << 32) + 2, 1);
    let closed = RemoteCache { accessible: false, ..remote(wide, 0) };
    let rows = Rows::Blocks { local: vec![3, 1 << 32], remote: vec![(1 << 32) + 1, 0] };
    let share = OwnerShare::default();
    let checked = |side, per_layer| {
        CheckedTransfer::new(Words::ORIGINAL, side, wide, rows.clone(), layers(None, None, per_layer))
            .unwrap()
    };
    for (side, name) in [(Side::Destination, "source"), (Side::Source, "destination")] {
        let checked = checked(side, 1);
        refused(checked.plan(&closed, &share).map(drop), &["remote_accessible"]);
        checked.moves(&remote(wide, 0)).unwrap();
        let text = format!("{name} block=4294967297 is out of range (0 to 4294967295)");
        refused(checked.plan(&remote(wide, 0), &share).map(drop), &[&text]);
        refused(checked.check_share(&remote(wide, 0), &share), &[&text]);
    }
    let planned = checked(Side::Source, 3).plan(&remote(wide, 0), &share).unwrap();
    assert!(planned.plans.iter().all(CopyPlan::is_empty));
}
