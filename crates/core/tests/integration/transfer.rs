//! Pull and push on paper: what may be asked, and that the moves and their plan do what copying byte by byte does.
//!
//! Not for: links or memory of two processes.

use std::collections::BTreeSet;

use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::testing::plan::Moves;
use llm_datadist_core::testing::validate::{
    self, ExtParam, LayerRange, Layers, PullRows, PushRows, RemoteCache, Side, accessible, pull,
    pull_kv_layers, pull_local, push, push_kv_cache, push_local,
};
use llm_datadist_core::{CacheKind, Error, ErrorKind, Geometry, Placement, Result, Role};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::bed::{desc, proptest_cases};
use CacheKind::{Batch, Blocks};
use ErrorKind::{CacheNotFound, InvalidArgument};
use Placement::{Device, Host};

fn side(kind: CacheKind, num_tensors: u32, rows: u64, row_bytes: u64) -> Side {
    let geometry = Geometry::new(&desc(Device, num_tensors, rows as usize, row_bytes as usize)).unwrap();
    Side { geometry, kind, placement: Device }
}

fn remote(side: Side, row: u32) -> RemoteCache {
    RemoteCache { side, row, accessible: true }
}

fn layers(src: Option<(u32, u32)>, dst: Option<(u32, u32)>, tensors_per_layer: u32) -> Layers {
    let range = |(first, end)| LayerRange { first, end };
    Layers { src: src.map(range), dst: dst.map(range), tensors_per_layer }
}

fn refused<T: std::fmt::Debug>(kind: ErrorKind, result: Result<T>, facts: &[&str]) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    for fact in facts {
        assert!(error.to_string().contains(fact), "{error} does not say {fact:?}");
    }
    error
}

/// One byte: tensor and position it is read from, and is written to.
type Byte = ((u64, u64), (u64, u64));

/// The tensors of some layers, one by one.
fn listed(range: Option<LayerRange>, per_layer: u32) -> Vec<u64> {
    let mut tensors = vec![];
    for layer in range.map_or(0..0, |range| range.first..range.end) {
        for k in 0..per_layer {
            tensors.push(u64::from(layer) * u64::from(per_layer) + u64::from(k));
        }
    }
    tensors
}

struct Shape {
    kind: CacheKind,
    tensors: u64,
    rows: u64,
    stride: u64,
}

impl Shape {
    fn of(side: Side) -> Shape {
        let geometry = side.geometry;
        let tensors = u64::from(geometry.num_tensors());
        Shape { kind: side.kind, tensors, rows: geometry.rows(), stride: geometry.row_bytes() }
    }

    fn has(&self, blocks: &[i64]) -> bool {
        blocks.iter().all(|&block| block >= 0 && (block as u64) < self.rows)
    }
}

fn across(src: &[u64], dst: &[u64], bytes: &[(u64, u64)]) -> Vec<Byte> {
    let mut all = vec![];
    for (&from, &to) in src.iter().zip(dst) {
        all.extend(bytes.iter().map(|&(read, written)| ((from, read), (to, written))));
    }
    all
}

/// What the C++ class pulls: rows of caches of either kind.
fn any_kind(rows: &PullRows) -> bool {
    matches!(rows, PullRows::Rows { .. })
}

/// contract §7.12, §7.13, as lists of tensors and bytes.
fn naive_pull(
    local: Side,
    remote: RemoteCache,
    rows: &PullRows,
    layers: Layers,
) -> Result<Vec<Byte>, ErrorKind> {
    let (here, there, row) = (Shape::of(local), Shape::of(remote.side), u64::from(remote.row));
    let right_near = match rows {
        PullRows::Slot { local, size } => {
            here.kind == Batch
                && (*size == -1 || (*size > 0 && *size as u64 <= here.stride))
                && u64::from(*local) < here.rows
        }
        PullRows::Part { local, local_offset, size, .. } => {
            here.kind == Batch
                && *local_offset < here.stride
                && (*size == -1 || (*size > 0 && local_offset.saturating_add(*size as u64) <= here.stride))
                && u64::from(*local) < here.rows
        }
        PullRows::Blocks { remote, local } | PullRows::Rows { remote, local } => {
            (here.kind == Blocks || any_kind(rows))
                && !local.is_empty()
                && remote.len() == local.len()
                && here.has(local)
        }
        PullRows::SlotToBlocks { local } => here.kind == Blocks && !local.is_empty() && here.has(local),
    };
    let per_layer = layers.tensors_per_layer;
    let (src, dst) = (listed(layers.src, per_layer), listed(layers.dst, per_layer));
    let partial = !src.is_empty() || !dst.is_empty();
    let all: Vec<u64> = (0..here.tensors).collect();
    let to = if dst.is_empty() { all } else { dst };
    if !right_near
        || per_layer == 0
        || (partial && here.tensors % u64::from(per_layer) != 0)
        || to.iter().any(|&tensor| tensor >= here.tensors)
        || (!src.is_empty() && src.len() != to.len())
    {
        return Err(InvalidArgument);
    }
    if row >= if there.kind == Batch { there.rows } else { 1 } {
        return Err(CacheNotFound);
    }
    if src.is_empty() && there.tensors != to.len() as u64 {
        return Err(InvalidArgument);
    }
    let from: Vec<u64> = if src.is_empty() { (0..there.tensors).collect() } else { src };
    if !remote.accessible || from.iter().any(|&tensor| tensor >= there.tensors) {
        return Err(InvalidArgument);
    }
    let mut bytes = vec![];
    match rows {
        PullRows::Slot { local, size } => {
            let size = if *size == -1 { here.stride } else { *size as u64 };
            if there.kind != Batch || size > there.stride {
                return Err(InvalidArgument);
            }
            bytes.extend((0..size).map(|at| (row * there.stride + at, u64::from(*local) * here.stride + at)));
        }
        PullRows::Part { local, remote_offset, local_offset, size } => {
            if there.kind != Batch || *remote_offset >= there.stride {
                return Err(InvalidArgument);
            }
            let first = u64::from(*local) * here.stride;
            let end = if *size == -1 { here.stride } else { local_offset + *size as u64 };
            for (to, from) in (*local_offset..end).zip(*remote_offset..) {
                if from >= there.stride {
                    return Err(InvalidArgument);
                }
                bytes.push((row * there.stride + from, first + to));
            }
        }
        PullRows::Blocks { remote, local } | PullRows::Rows { remote, local } => {
            let right_kind = there.kind == Blocks || any_kind(rows);
            if !right_kind || there.stride != here.stride || !there.has(remote) {
                return Err(InvalidArgument);
            }
            for (&from, &to) in remote.iter().zip(local) {
                let at = |block: i64, at: u64| block as u64 * here.stride + at;
                bytes.extend((0..here.stride).map(|k| (at(from, k), at(to, k))));
            }
        }
        PullRows::SlotToBlocks { local } => {
            if there.kind != Batch {
                return Err(InvalidArgument);
            }
            let mut read = 0;
            for &block in local {
                if read == there.stride {
                    return Err(InvalidArgument);
                }
                for at in 0..here.stride {
                    if read < there.stride {
                        bytes.push((row * there.stride + read, block as u64 * here.stride + at));
                        read += 1;
                    }
                }
            }
        }
    }
    Ok(across(&from, &to, &bytes))
}

/// contract §7.14, §7.15.
fn naive_push(
    local: Side,
    remote: RemoteCache,
    rows: &PushRows,
    layers: Layers,
) -> Result<Vec<Byte>, ErrorKind> {
    let (here, there) = (Shape::of(local), Shape::of(remote.side));
    let per_layer = layers.tensors_per_layer;
    let kinds = match rows {
        PushRows::Slot { .. } => vec![Batch],
        PushRows::Blocks { .. } => vec![Blocks],
        PushRows::Rows { .. } => vec![Batch, Blocks],
    };
    if per_layer == 0 || !kinds.contains(&here.kind) || layers.src.is_some() != layers.dst.is_some() {
        return Err(InvalidArgument);
    }
    let every = Some(LayerRange { first: 0, end: here.tensors as u32 / per_layer });
    let (src, dst) = (layers.src.or(every), layers.dst.or(every));
    let (from, to) = (listed(src, per_layer), listed(dst, per_layer));
    let given = layers.src.is_some();
    if (given && (from.is_empty() || to.is_empty()))
        || from.len() != to.len()
        || (!from.is_empty() && here.tensors % u64::from(per_layer) != 0)
        || from.iter().any(|&tensor| tensor >= here.tensors)
        || to.iter().any(|&tensor| tensor >= there.tensors)
        || !remote.accessible
        || !kinds.contains(&there.kind)
    {
        return Err(InvalidArgument);
    }
    let mut bytes = vec![];
    match rows {
        PushRows::Slot { local } => {
            if u64::from(*local) >= here.rows
                || u64::from(remote.row) >= there.rows
                || here.stride > there.stride
            {
                return Err(InvalidArgument);
            }
            let start = (u64::from(*local) * here.stride, u64::from(remote.row) * there.stride);
            bytes.extend((0..here.stride).map(|at| (start.0 + at, start.1 + at)));
        }
        PushRows::Blocks { local, remote } | PushRows::Rows { local, remote } => {
            if local.is_empty()
                || local.len() != remote.len()
                || !here.has(local)
                || !there.has(remote)
                || here.stride != there.stride
            {
                return Err(InvalidArgument);
            }
            for (&from, &to) in local.iter().zip(remote) {
                let at = |block: i64, at: u64| block as u64 * here.stride + at;
                bytes.extend((0..here.stride).map(|k| (at(from, k), at(to, k))));
            }
        }
    }
    Ok(across(&from, &to, &bytes))
}

type Memory = Vec<Vec<u16>>;

fn memory(side: Side, mark: u16) -> Memory {
    let geometry = side.geometry;
    (0..geometry.num_tensors())
        .map(|t| (0..geometry.tensor_bytes()).map(|at| mark + (t as u16) * 512 + at as u16).collect())
        .collect()
}

/// The plan of the moves leaves in `dst` what copying `bytes` one after the other leaves, whatever the order inside a
/// wave and wherever the byte positions are cut; and touches the rows it says.
fn plan_does(moves: &Moves, bytes: &[Byte], (src, dst): (Side, Side), cut: u64) {
    let (from, before) = (memory(src, 0), memory(dst, 1 << 15));
    let mut expected = before.clone();
    for &((tensor, read), (into, written)) in bytes {
        expected[into as usize][written as usize] = from[tensor as usize][read as usize];
    }
    let plan = CopyPlan::moves(&mut moves.clone()).unwrap();
    let first = (plan.src_tensor() as usize, plan.dst_tensor() as usize);
    assert_eq!((plan.src_tensor(), plan.dst_tensor()), (moves.src_tensor, moves.dst_tensor));
    assert_eq!(plan.bytes(), bytes.len() as u64);
    let ends = |side: Side| Some((side.geometry.num_tensors(), side.geometry.tensor_bytes()));
    plan.check_ends(ends(src), ends(dst)).unwrap();

    let mut got = before.clone();
    for wave in plan.waves() {
        let total = wave.tensor_bytes() * u64::from(plan.num_tensors());
        let mut pieces: Vec<_> = wave.across_tensors(0, total).collect();
        pieces.reverse();
        for (tensor, piece) in pieces {
            for at in 0..piece.len {
                got[first.1 + tensor][(piece.dst + at) as usize] =
                    from[first.0 + tensor][(piece.src + at) as usize];
            }
        }
    }
    assert_eq!(got, expected, "{plan:?}");

    let (mut got, mut at) = (before, 0);
    while at < plan.bytes() {
        let end = (at + cut).min(plan.bytes());
        let mut seen = 0;
        for (tensor, piece) in plan.pieces(at, end) {
            for k in 0..piece.len {
                got[first.1 + tensor][(piece.dst + k) as usize] =
                    from[first.0 + tensor][(piece.src + k) as usize];
            }
            seen += piece.len;
        }
        assert_eq!(seen, end - at, "bytes {at} to {end} of {plan:?}");
        at = end;
    }
    assert_eq!(got, expected, "in cuts of {cut}: {plan:?}");

    let rows = |which: fn(&Byte) -> u64, side: Side| {
        let rows: BTreeSet<u64> = bytes.iter().map(|byte| which(byte) / side.geometry.row_bytes()).collect();
        rows.into_iter().collect::<Vec<_>>()
    };
    assert_eq!(plan.src_rows(src.geometry.row_bytes()).unwrap(), rows(|byte| byte.0.1, src));
    assert_eq!(plan.dst_rows(dst.geometry.row_bytes()).unwrap(), rows(|byte| byte.1.1, dst));
}

/// Source, destination and bytes of the first piece.
fn first(moves: &Moves) -> (u64, u64, u64) {
    let piece = moves.pieces.iter().next().unwrap();
    (piece.src, piece.dst, piece.len)
}

fn unique(rows: &[u64]) -> Vec<u64> {
    rows.iter().copied().collect::<BTreeSet<_>>().into_iter().collect()
}

#[derive(Clone, Debug)]
struct Case {
    local: Side,
    remote: RemoteCache,
    pull: PullRows,
    push: PushRows,
    layers: Layers,
    cut: u64,
}

fn kinds() -> impl Strategy<Value = CacheKind> {
    prop_oneof![Just(Batch), Just(Blocks)]
}

fn ranges() -> impl Strategy<Value = Option<(u32, u32)>> {
    prop::option::weighted(0.5, prop_oneof![6 => (0..3u32, 1..3u32), 1 => Just((2, 0))])
        .prop_map(|range| range.map(|(first, count)| (first, if count == 0 { 0 } else { first + count })))
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (kinds(), kinds(), 1..7u32, 1..7u32, 1..6u64, 1..6u64, 1..9u64, 1..9u64);
    let alike = (prop::bool::weighted(0.85), prop::bool::weighted(0.7), prop::bool::weighted(0.6));
    let block = prop_oneof![20 => 0..5i64, 1 => Just(-1i64), 1 => Just(i64::MAX)];
    let list = prop::collection::vec(block, 0..6);
    let size = prop_oneof![3 => Just(-1i64), 4 => 1..10i64, 1 => -3..1i64, 1 => Just(i64::MIN)];
    let given = (0..6u32, 0..6u32, size, list.clone(), list, prop::bool::weighted(0.95), 0..5u8);
    let per_layer = prop_oneof![1 => Just(0u32), 8 => Just(1), 8 => Just(2), 2 => 3..8u32];
    let tame = prop::bool::weighted(0.6);
    let offset = || prop_oneof![20 => 0..9u64, 1 => Just(u64::MAX)];
    let offsets = prop::option::weighted(0.5, (offset(), offset()));
    (sizes, alike, given, (ranges(), ranges(), offsets), per_layer, 1..40u64, tame).prop_map(
        |(sizes, alike, given, (src, dst, offsets), per_layer, cut, tame)| {
            let (kind, far_kind, tensors, far_tensors, rows, far_rows, bytes, far_bytes) = sizes;
            let (slot, row, size, ours, mut theirs, accessible, what) = given;
            let kind = if what >= 3 {
                kind
            } else if what == 0 {
                Batch
            } else {
                Blocks
            };
            let kind_alike = if what == 2 { Batch } else { kind };
            let far_kind = if alike.0 { kind_alike } else { far_kind };
            let far_tensors = if alike.1 { tensors } else { far_tensors };
            let far_bytes = if alike.2 { bytes } else { far_bytes };
            if alike.1 {
                theirs.resize(ours.len(), 0);
            }
            let row = if far_kind == Blocks && alike.0 { 0 } else { row };
            let (pull, push) = match what {
                0 => {
                    let whole = PullRows::Slot { local: slot, size };
                    let part = |(remote_offset, local_offset)| PullRows::Part {
                        local: slot,
                        remote_offset,
                        local_offset,
                        size,
                    };
                    (offsets.map_or(whole, part), PushRows::Slot { local: slot })
                }
                2 => (PullRows::SlotToBlocks { local: ours }, PushRows::Slot { local: slot }),
                4 => (
                    PullRows::Rows { remote: theirs.clone(), local: ours.clone() },
                    PushRows::Rows { local: ours, remote: theirs },
                ),
                _ => (
                    PullRows::Blocks { remote: theirs.clone(), local: ours.clone() },
                    PushRows::Blocks { local: ours, remote: theirs },
                ),
            };
            let remote =
                RemoteCache { side: side(far_kind, far_tensors, far_rows, far_bytes), row, accessible };
            let local = side(kind, tensors, rows, bytes);
            let case = Case { local, remote, pull, push, layers: layers(src, dst, per_layer), cut };
            if tame { tamed(case) } else { case }
        },
    )
}

/// The same request, with every number brought into its range.
fn tamed(case: Case) -> Case {
    let Case { local, remote, mut pull, mut push, layers: asked, cut } = case;
    let per_layer = asked.tensors_per_layer.clamp(1, 3);
    let both = asked.src.is_some() || asked.dst.is_some();
    let (count, first) = if both { (2, asked.src.map_or(0, |range| range.first)) } else { (3, 0) };
    let far_first = if both { asked.dst.map_or(1, |range| range.first) } else { 0 };
    let range = |first: u32| LayerRange { first, end: first + count };
    let layers = Layers {
        src: both.then(|| range(first)),
        dst: both.then(|| range(far_first)),
        tensors_per_layer: per_layer,
    };
    // Room for the ranges, whichever side is the source.
    let tensors = if both { (first.max(far_first) + count) * per_layer } else { count * per_layer };
    let more = |old: Side, kind, bytes| side(kind, tensors, old.geometry.rows(), bytes);
    let (bytes, far_bytes) = (local.geometry.row_bytes(), remote.side.geometry.row_bytes());
    let within = |list: &mut Vec<i64>, rows: u64| {
        list.push(1);
        list.iter_mut().for_each(|block| *block = block.rem_euclid(rows as i64));
    };
    let (rows, far_rows) = (local.geometry.rows(), remote.side.geometry.rows());
    let (own_kind, their_kind) = (local.kind, remote.side.kind);
    let (kind, far_kind, far_bytes) = match (&mut pull, &mut push) {
        (PullRows::Slot { local: slot, size }, PushRows::Slot { local }) => {
            *slot %= rows as u32;
            *local = *slot;
            *size = if *size > 0 { *size % bytes as i64 + 1 } else { -1 };
            (Batch, Batch, far_bytes.max(bytes))
        }
        (PullRows::Part { local: slot, remote_offset, local_offset, size }, PushRows::Slot { local }) => {
            *slot %= rows as u32;
            *local = *slot;
            *local_offset %= bytes;
            let room = bytes - *local_offset;
            *size = if *size > 0 { *size % room as i64 + 1 } else { -1 };
            // No more is read than lies behind the offset there.
            *remote_offset %= 4;
            (Batch, Batch, far_bytes.max(*remote_offset + room).max(bytes))
        }
        (PullRows::SlotToBlocks { local }, _) => {
            within(local, rows);
            local.truncate(far_bytes.div_ceil(bytes) as usize);
            (Blocks, Batch, far_bytes)
        }
        (PullRows::Blocks { remote, local }, PushRows::Blocks { local: pushed, remote: into }) => {
            within(local, rows);
            remote.resize(local.len() - 1, 2);
            within(remote, far_rows);
            (*pushed, *into) = (local.clone(), remote.clone());
            (Blocks, Blocks, bytes)
        }
        (PullRows::Rows { remote, local: ours }, PushRows::Rows { local: pushed, remote: into }) => {
            within(ours, rows);
            remote.resize(ours.len() - 1, 2);
            within(remote, far_rows);
            (*pushed, *into) = (ours.clone(), remote.clone());
            (own_kind, their_kind, bytes)
        }
        _ => unreachable!("each pull has its push"),
    };
    let row = if far_kind == Batch { remote.row % far_rows as u32 } else { 0 };
    let remote = RemoteCache { side: more(remote.side, far_kind, far_bytes), row, accessible: true };
    Case { local: more(local, kind, bytes), remote, pull, push, layers, cut }
}

#[test]
fn pulls_do_what_the_naive_twin_does() {
    let (done, refused) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    TestRunner::new(proptest_cases(4000))
        .run(&cases(), |Case { local, remote, pull: rows, layers, cut, .. }| {
            let expected = naive_pull(local, remote, &rows, layers);
            match pull(local, remote, &rows, layers) {
                Err(error) => {
                    prop_assert_eq!(Err(error.kind()), expected.map(|_| ()), "{}", error);
                    refused.set(refused.get() + 1);
                }
                Ok(moves) => {
                    let bytes = expected.map_err(|kind| TestCaseError::fail(format!("{kind:?} expected")))?;
                    pull_local(local, &rows, layers).unwrap();
                    plan_does(&moves, &bytes, (remote.side, local), cut);
                    let written = CopyPlan::moves(&mut moves.clone()).unwrap();
                    let written = written.dst_rows(local.geometry.row_bytes()).unwrap();
                    prop_assert_eq!(unique(&moves.local_rows), written);
                    prop_assert_eq!(moves.whole, moves.num_tensors == remote.side.geometry.num_tensors());
                    done.set(done.get() + 1);
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(done.get() > 400 && refused.get() > 400, "{done:?} pulls, {refused:?} refused");
}

#[test]
fn pushes_do_what_the_naive_twin_does() {
    let (done, refused) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    TestRunner::new(proptest_cases(4000))
        .run(&cases(), |Case { local, remote, push: rows, layers, cut, .. }| {
            let expected = naive_push(local, remote, &rows, layers);
            match push(local, remote, &rows, layers) {
                Err(error) => {
                    prop_assert_eq!(Err(error.kind()), expected.map(|_| ()), "{}", error);
                    refused.set(refused.get() + 1);
                }
                Ok(moves) => {
                    let bytes = expected.map_err(|kind| TestCaseError::fail(format!("{kind:?} expected")))?;
                    push_local(local, &rows, layers).unwrap();
                    plan_does(&moves, &bytes, (local, remote.side), cut);
                    let read = CopyPlan::moves(&mut moves.clone()).unwrap();
                    let read = read.src_rows(local.geometry.row_bytes()).unwrap();
                    prop_assert_eq!(unique(&moves.local_rows), read);
                    prop_assert_eq!(moves.whole, moves.num_tensors == local.geometry.num_tensors());
                    done.set(done.get() + 1);
                }
            }
            Ok(())
        })
        .unwrap();
    assert!(done.get() > 200 && refused.get() > 400, "{done:?} pushes, {refused:?} refused");
}

#[test]
fn what_a_pull_may_ask() {
    let local = side(Batch, 4, 3, 8);
    let slot = |local, size| PullRows::Slot { local, size };
    let all = Layers::ALL;
    // In this order, and before the remote side is known.
    let rules: &[(Side, PullRows, Layers, &[&str])] = &[
        (side(Blocks, 4, 3, 8), slot(9, 0), layers(None, None, 0), &["cache is a blocks cache"]),
        (local, slot(9, 0), layers(None, None, 0), &["size=0"]),
        (local, slot(9, i64::MIN), all, &["size=-9223372036854775808"]),
        (local, slot(9, 99), layers(None, None, 0), &["tensor_num_per_layer=0"]),
        (local, slot(3, 99), all, &["batch_index=3", "0 to 2"]),
        (local, slot(2, 9), layers(Some((0, 1)), None, 3), &["size=9", "8 bytes"]),
        (
            local,
            slot(2, 8),
            layers(Some((0, 1)), Some((0, 9)), 3),
            &["tensor_num_per_layer=3", "num_tensors, 4"],
        ),
        (local, slot(2, 8), layers(Some((0, 1)), Some((1, 3)), 2), &["dst_layer_range", "tensors 2 to 5"]),
        (
            local,
            slot(2, 8),
            layers(Some((0, 2)), Some((1, 2)), 2),
            &["src_layer_range names 4 tensors and 2"],
        ),
        (local, slot(2, 8), layers(Some((0, 1)), None, 2), &["src_layer_range names 2 tensors and 4"]),
        (
            side(Batch, 1, 3, 8),
            slot(0, -1),
            layers(Some((0, 1)), Some((0, 1)), 2),
            &["tensor_num_per_layer=2"],
        ),
    ];
    for (local, rows, layers, facts) in rules {
        refused(InvalidArgument, pull_local(*local, rows, *layers), facts);
        // Also when the remote side is asked wrongly.
        refused(InvalidArgument, pull(*local, remote(side(Batch, 4, 3, 8), 99), rows, *layers), facts);
    }
    pull_local(side(Batch, 1, 3, 8), &slot(0, -1), layers(None, None, 2)).unwrap();
    // Empty is all, also for layers beyond any cache.
    pull_local(local, &slot(2, 8), layers(Some((u32::MAX, 0)), Some((5, 5)), 3)).unwrap();
    // The largest numbers there are.
    let most = layers(Some((u32::MAX - 1, u32::MAX)), Some((0, 1)), u32::MAX);
    refused(InvalidArgument, pull_local(local, &slot(2, 8), most), &["tensor_num_per_layer=4294967295"]);
    let far_layers = layers(Some((u32::MAX - 1, u32::MAX)), Some((0, 1)), 4);
    refused(
        InvalidArgument,
        pull(local, remote(local, 0), &slot(2, 8), far_layers),
        &["src_layer_range", "remote cache"],
    );

    let mut theirs = remote(side(Batch, 4, 2, 8), 2);
    refused(CacheNotFound, pull(local, theirs, &slot(0, -1), all), &["no slot 2", "0 to 1"]);
    theirs.row = 1;
    theirs.accessible = false;
    refused(InvalidArgument, pull(local, theirs, &slot(0, -1), all), &["remote_accessible False"]);
    let fewer = remote(side(Blocks, 3, 2, 8), 0);
    refused(InvalidArgument, pull(local, fewer, &slot(0, -1), all), &["3 tensors", "the local range has 4"]);
    let blocks = remote(side(Blocks, 4, 2, 8), 0);
    refused(InvalidArgument, pull(local, blocks, &slot(0, -1), all), &["remote cache is a blocks cache"]);
    let narrow = remote(side(Batch, 4, 2, 7), 0);
    refused(
        InvalidArgument,
        pull(local, narrow, &slot(0, -1), all),
        &["size=-1", "7 bytes of a slot of the remote cache"],
    );
    assert_eq!(pull(local, narrow, &slot(0, 7), all).unwrap().pieces.count(), 1);
}

#[test]
fn part_of_a_slot() {
    let local = side(Batch, 4, 3, 8);
    let part =
        |remote_offset, local_offset, size| PullRows::Part { local: 2, remote_offset, local_offset, size };
    let moves = |remote_offset, local_offset, size| {
        let moves = pull(
            local,
            remote(side(Batch, 4, 2, 10), 1),
            &part(remote_offset, local_offset, size),
            Layers::ALL,
        );
        moves.map(|moves| first(&moves))
    };
    // The rest of the near slot: from byte 16 of the near tensor on there are 8, from byte 10 of the far one on 10.
    assert_eq!(moves(0, 0, -1).unwrap(), (10, 16, 8));
    assert_eq!(moves(2, 0, -1).unwrap(), (12, 16, 8));
    assert_eq!(moves(5, 3, -1).unwrap(), (15, 19, 5));
    assert_eq!(moves(9, 7, 1).unwrap(), (19, 23, 1));
    refused(InvalidArgument, moves(3, 0, -1), &["size=-1", "8 bytes", "7 bytes", "remote cache"]);
    refused(InvalidArgument, moves(0, 3, 6), &["size=6", "5 bytes"]);
    refused(InvalidArgument, moves(10, 0, 1), &["src_cache_offset=10", "10 bytes"]);
    refused(InvalidArgument, moves(0, 8, 1), &["dst_cache_offset=8", "8 bytes"]);
    refused(InvalidArgument, moves(u64::MAX, u64::MAX, i64::MAX), &["dst_cache_offset"]);
    refused(InvalidArgument, moves(0, 0, 0), &["size=0"]);
}

#[test]
fn which_blocks_a_pull_may_name() {
    let local = side(Blocks, 2, 4, 8);
    let blocks =
        |remote: &[i64], local: &[i64]| PullRows::Blocks { remote: remote.to_vec(), local: local.to_vec() };
    let cut = |local: &[i64]| PullRows::SlotToBlocks { local: local.to_vec() };
    let all = Layers::ALL;
    refused(InvalidArgument, pull_local(local, &blocks(&[], &[]), all), &["dst_blocks"]);
    refused(InvalidArgument, pull_local(local, &blocks(&[], &[1]), all), &["src_blocks=[]"]);
    refused(InvalidArgument, pull_local(local, &blocks(&[1], &[1, 2]), all), &["src_blocks has 1", "2"]);
    refused(
        InvalidArgument,
        pull_local(local, &blocks(&[1, 1], &[0, -1]), all),
        &["dst_blocks[1]=-1", "0 to 3"],
    );
    refused(InvalidArgument, pull_local(local, &cut(&[4]), all), &["dst_blocks[0]=4"]);
    refused(InvalidArgument, pull_local(side(Batch, 2, 4, 8), &cut(&[0]), all), &["continuous cache"]);
    let theirs = remote(side(Blocks, 2, 9, 8), 0);
    refused(InvalidArgument, pull(local, theirs, &blocks(&[9], &[0]), all), &["src_blocks[0]=9", "0 to 8"]);
    let other = remote(side(Blocks, 2, 9, 4), 0);
    refused(
        InvalidArgument,
        pull(local, other, &blocks(&[8], &[0]), all),
        &["8 bytes in the local cache and 4"],
    );
    // A slot of 20 bytes is two and a half blocks: bounded by the slot, not by the tensor.
    let slots = remote(side(Batch, 2, 3, 20), 1);
    let moves = pull(local, slots, &cut(&[3, 0, 2]), all).unwrap();
    let pieces: Vec<_> = moves.pieces.iter().map(|piece| (piece.src, piece.dst, piece.len)).collect();
    assert_eq!(pieces, [(20, 24, 8), (28, 0, 8), (36, 16, 4)]);
    refused(
        InvalidArgument,
        pull(local, slots, &cut(&[0, 1, 2, 3]), all),
        &["len(dst_blocks)=4", "at most 3"],
    );
    let fewer = pull(local, slots, &cut(&[1]), all).unwrap();
    assert_eq!((first(&fewer).2, fewer.whole), (8, true));
    refused(InvalidArgument, pull(local, theirs, &cut(&[1]), all), &["remote cache is a blocks cache"]);
}

#[test]
fn what_a_push_may_ask() {
    let local = side(Batch, 10, 3, 8);
    let slot = PushRows::Slot { local: 2 };
    let theirs = remote(local, 1);
    let given = |src, dst, n| layers(Some(src), Some(dst), n);
    // Fewer tensors than a layer has: no layer, nothing to do (contract §7.14).
    let one = side(Batch, 1, 3, 8);
    let nothing = push(one, remote(one, 0), &slot, layers(None, None, 2)).unwrap();
    assert_eq!((nothing.num_tensors, nothing.pieces.count(), nothing.whole), (0, 0, false));
    assert!(CopyPlan::moves(&mut nothing.clone()).unwrap().waves().is_empty());
    // The rest would be left behind silently.
    refused(
        InvalidArgument,
        push_local(local, &slot, layers(None, None, 3)),
        &["tensor_num_per_layer=3", "10"],
    );
    for half in [layers(Some((0, 1)), None, 2), layers(None, Some((0, 1)), 2)] {
        refused(InvalidArgument, push_local(local, &slot, half), &["_layer_range was given without"]);
    }
    let rules: &[(Layers, &[&str])] = &[
        (layers(None, None, 0), &["tensor_num_per_layer=0"]),
        (given((0, 0), (0, 0), 2), &["src_layer_range=0..0", "at least one layer"]),
        (given((0, 2), (0, 1), 2), &["2 layers", "1"]),
        (given((4, 6), (0, 2), 2), &["src_layer_range", "tensors 8 to 11"]),
        (given((0, 1), (0, 1), 3), &["tensor_num_per_layer=3"]),
    ];
    for (layers, facts) in rules {
        refused(InvalidArgument, push_local(local, &slot, *layers), facts);
    }
    refused(
        InvalidArgument,
        push_local(local, &PushRows::Slot { local: 3 }, Layers::ALL),
        &["src_batch_index=3"],
    );
    refused(InvalidArgument, push(local, remote(local, 3), &slot, Layers::ALL), &["no slot 3"]);
    refused(
        InvalidArgument,
        push(local, theirs, &slot, given((0, 1), (5, 6), 2)),
        &["dst_layer_range", "remote cache"],
    );
    let hidden = RemoteCache { accessible: false, ..theirs };
    refused(InvalidArgument, push(local, hidden, &slot, Layers::ALL), &["remote_accessible False"]);
    let narrow = remote(side(Batch, 10, 3, 7), 0);
    refused(
        InvalidArgument,
        push(local, narrow, &slot, Layers::ALL),
        &["8 bytes", "the 7 bytes of a slot of the remote cache"],
    );
    let moves = push(local, remote(side(Batch, 12, 3, 9), 1), &slot, given((1, 3), (4, 6), 2)).unwrap();
    assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors, moves.whole), (2, 8, 4, false));
    assert_eq!(first(&moves), (16, 9, 8));
    validate::push_size(-1).unwrap();
    for size in [0, 1, -2, i64::MIN] {
        refused(InvalidArgument, validate::push_size(size), &["size", "-1"]);
    }
    let blocks = side(Blocks, 10, 3, 8);
    let pairs =
        |local: &[i64], remote: &[i64]| PushRows::Blocks { local: local.to_vec(), remote: remote.to_vec() };
    refused(InvalidArgument, push_local(blocks, &pairs(&[0], &[]), Layers::ALL), &["dst_blocks=[]"]);
    refused(InvalidArgument, push_local(blocks, &pairs(&[], &[0]), Layers::ALL), &["src_blocks=[]"]);
    refused(InvalidArgument, push_local(blocks, &pairs(&[0, 3], &[0, 0]), Layers::ALL), &["src_blocks[1]=3"]);
    refused(
        InvalidArgument,
        push(blocks, remote(blocks, 0), &pairs(&[0], &[-5]), Layers::ALL),
        &["dst_blocks[0]"],
    );
}

/// The seed's default of 2: never a fault of a program that said nothing, and kept with ranges where it leaves a rest.
#[test]
fn the_default_tensors_of_a_layer_fit_one_tensor_and_five() {
    let ext = |src, dst, n| ExtParam { src_layer_range: src, dst_layer_range: dst, tensor_num_per_layer: n };
    let [one, five] = [1, 5].map(|tensors| side(Batch, tensors, 4, 64));
    let call = |local, ext| push_kv_cache(Role::Prompt, local, -1, ext);
    for local in [one, five] {
        assert_eq!(call(local, ExtParam::default()).unwrap(), Layers::ALL);
        assert_eq!(pull_kv_layers(local.geometry, ExtParam::default()).unwrap(), Layers::ALL);
        refused(InvalidArgument, call(local, ext((-1, -1), (-1, -1), 6)), &["tensor_num_per_layer=6"]);
        refused(InvalidArgument, call(local, ext((0, 0), (0, 0), 4)), &["tensor_num_per_layer=4"]);
    }
    // Layers of 2 in 5 tensors: 0 and 1; the last tensor is in none.
    let kept = call(five, ext((0, 1), (0, 1), 2)).unwrap();
    let moves = push(five, remote(five, 3), &PushRows::Slot { local: 3 }, kept).unwrap();
    assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors), (0, 0, 4));
    let kept = call(five, ext((1, 1), (0, 0), 2)).unwrap();
    let moves = push(five, remote(five, 3), &PushRows::Slot { local: 3 }, kept).unwrap();
    assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors), (2, 0, 2));
    let kept = pull_kv_layers(five.geometry, ext((0, 0), (1, 1), 2)).unwrap();
    let moves = pull(five, remote(five, 3), &PullRows::Slot { local: 3, size: -1 }, kept).unwrap();
    assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors), (0, 2, 2));
    refused(InvalidArgument, call(five, ext((2, 2), (2, 2), 2)), &["src_layer_range=(2, 2)", "last <= 1"]);
    refused(InvalidArgument, call(one, ext((0, 0), (0, 0), 2)), &["tensor_num_per_layer=2", "1 to 1"]);
    let uneven = pull_kv_layers(five.geometry, ext((0, 1), (0, 0), 2));
    refused(InvalidArgument, uneven, &["2 layers"]);
}

#[test]
fn push_kv_cache_has_rules_of_its_own() {
    let local = side(Batch, 4, 4, 64);
    let ext = |src, dst, n| ExtParam { src_layer_range: src, dst_layer_range: dst, tensor_num_per_layer: n };
    let call = |ext| push_kv_cache(Role::Prompt, local, -1, ext);
    // The example of the seed.
    let example = call(ext((3, 3), (3, 3), 1)).unwrap();
    assert_eq!(example, layers(Some((3, 4)), Some((3, 4)), 1));
    let moves = push(local, remote(local, 3), &PushRows::Slot { local: 3 }, example).unwrap();
    assert_eq!((moves.src_tensor, moves.dst_tensor, moves.num_tensors), (3, 3, 1));
    assert_eq!(call(ExtParam::default()).unwrap(), Layers::ALL);
    // All layers need no divisor.
    assert_eq!(call(ext((-1, -1), (-1, -1), 3)).unwrap(), Layers::ALL);
    let both = call(ext((0, 1), (5, 6), 2)).unwrap();
    assert_eq!(both, layers(Some((0, 2)), Some((5, 7)), 2));
    let rules: &[(ExtParam, &[&str])] = &[
        (ext((-1, -1), (-1, -1), 0), &["tensor_num_per_layer=0", "above 0"]),
        (ext((-1, -1), (-1, -1), 5), &["tensor_num_per_layer=5", "1 to 4"]),
        (ext((0, 0), (0, 0), 3), &["tensor_num_per_layer=3", "num_tensors, 4"]),
        (ext((0, 0), (-1, -1), 1), &["dst_layer_range=(-1, -1)"]),
        (ext((-1, -1), (0, 0), 1), &["src_layer_range=(-1, -1)"]),
        (ext((-1, 0), (0, 0), 1), &["src_layer_range=(-1, 0)"]),
        (ext((0, -1), (0, 0), 1), &["src_layer_range=(0, -1)"]),
        (ext((1, 0), (0, 0), 1), &["src_layer_range=(1, 0)"]),
        (ext((0, 2), (0, 2), 2), &["src_layer_range=(0, 2)", "last <= 1"]),
        (ext((i32::MIN, i32::MAX), (0, 0), 1), &["src_layer_range"]),
    ];
    for (ext, facts) in rules {
        refused(InvalidArgument, call(*ext), facts);
    }
    refused(InvalidArgument, call(ext((0, 1), (0, 0), 1)), &["2 layers", "dst_layer_range 1"]);
    refused(
        InvalidArgument,
        call(ext((0, 0), (0, i32::MAX), 1)),
        &["1 layers", "dst_layer_range 2147483648"],
    );
    call(ext((0, 0), (i32::MAX, i32::MAX), 1)).unwrap();
    let default = ExtParam::default();
    refused(
        InvalidArgument,
        push_kv_cache(Role::Decoder, local, -1, default),
        &["Prompt", "this is Decoder"],
    );
    push_kv_cache(Role::Mix, local, -1, default).unwrap();
    refused(InvalidArgument, push_kv_cache(Role::Prompt, local, 64, default), &["size=64"]);
    let host = Side { placement: Host, ..local };
    refused(InvalidArgument, push_kv_cache(Role::Prompt, host, -1, default), &["host memory"]);
    refused(
        InvalidArgument,
        push_kv_cache(Role::Prompt, side(Blocks, 4, 4, 64), -1, default),
        &["blocks cache"],
    );
}

#[test]
fn who_may_reach_registered_memory() {
    let mut looked_at = 0;
    for placement in [Device, Host] {
        for one_sided in [false, true] {
            for linked in [false, true] {
                let ask = |given| accessible(given, placement, one_sided, linked);
                assert!(!ask(Some(false)).unwrap());
                match ask(Some(true)) {
                    Ok(reached) => assert!(reached && !linked),
                    Err(error) => {
                        assert!(linked, "{error}");
                        assert_eq!(
                            error.to_string(),
                            "remote_accessible=True must be False or None after link()"
                        );
                    }
                }
                let expected = !one_sided || (placement == Device && !linked);
                assert_eq!(ask(None).unwrap(), expected);
                looked_at += 1;
            }
        }
    }
    assert_eq!(looked_at, 8);
    validate::reachable("cache", true).unwrap();
    refused(
        InvalidArgument,
        validate::reachable("src_cache", false),
        &["src_cache", "remote_accessible False"],
    );
}
