//! Pulls, pushes and layer-wise transfers of caches with gaps between their rows: every byte arrives where a model written row by
//! row has it, and no other byte changes.

use std::ops::Range;

use llm_datadist_core::bindings::{DataDist, LayerRange, Layers, LayerwiseArgs, Name, Rows, Side, SubRow};
use llm_datadist_core::testing::net::Tcp;
use llm_datadist_core::testing::protocol::{NamedCache, Reply, Request};
use llm_datadist_core::{CacheDesc, CacheKind, Verify};

use super::fake_peer::{Fake, ask, hear, one_span, plan_of};
use super::layerwise::{addressed, finish, is_done, named, start, to};
use super::{Held, device, of, rounds, row, verified};
use crate::fixtures::Chance;

/// A cache, and where the rows of its tensors lie.
struct Padded {
    held: Held,
    row_bytes: usize,
    stride: usize,
}

impl Padded {
    /// A cache of `kind` with `tensors` tensors of `count` rows. It may have gaps.
    fn new(
        engine: &DataDist,
        chance: &mut Chance,
        kind: CacheKind,
        (tensors, count, row_bytes): (usize, u64, usize),
    ) -> Padded {
        let stride = row_bytes + 3 * chance.below(4).saturating_sub(2) as usize;
        let dense = device(tensors as u32, count as usize, row_bytes);
        let desc = CacheDesc { row_stride: Some(stride as u64), ..dense };
        let held = Held::new(engine, chance.below(2) == 0, &desc, kind, &[]);
        Padded { held, row_bytes, stride }
    }

    /// Where the bytes `skip..skip + len` of a row are.
    fn part(&self, row: i64, skip: usize, len: usize) -> Range<usize> {
        let start = row as usize * self.stride + skip;
        start..start + len
    }
}

/// What copying `part` of each row of `pairs`, tensor after tensor, leaves in `into`.
fn naive(
    (from, src): (&[Vec<u8>], &Padded),
    (into, dst): (&mut [Vec<u8>], &Padded),
    pairs: &[(i64, i64)],
    part: SubRow,
    tensors: Range<usize>,
) {
    let (skip, to_skip) = (part.src_offset as usize, part.dst_offset as usize);
    let rest = (src.row_bytes - skip).min(dst.row_bytes - to_skip);
    let len = part.length.map_or(rest, |length| length as usize);
    for tensor in tensors {
        for &(src_row, dst_row) in pairs {
            let bytes = &from[tensor][src.part(src_row, skip, len)];
            into[tensor][dst.part(dst_row, to_skip, len)].copy_from_slice(bytes);
        }
    }
}

fn random_part(chance: &mut Chance, row_bytes: u64) -> SubRow {
    let (src_offset, dst_offset) = (chance.below(row_bytes), chance.below(row_bytes));
    let room = row_bytes - src_offset.max(dst_offset);
    let length = if chance.below(2) == 0 { Some(1 + chance.below(room)) } else { None };
    SubRow { src_offset, dst_offset, length }
}

/// All tensors, or some of them.
fn random_layers(chance: &mut Chance, tensors: usize) -> (Layers, Range<usize>) {
    if chance.below(2) == 0 {
        return (Layers::ALL, 0..tensors);
    }
    let first = chance.below(tensors as u64) as u32;
    let end = first + 1 + chance.below(tensors as u64 - u64::from(first)) as u32;
    let range = Some(LayerRange { first, end });
    (Layers { src: range, dst: range, tensors_per_layer: 1 }, first as usize..end as usize)
}

#[test]
fn blocks_between_gaps_are_pulled_and_pushed() {
    rounds((5, 50), false, |pair, chance, _| {
        let (tensors, count) = (1 + chance.below(8) as usize, 2 + chance.below(90));
        let row_bytes = 1 + chance.below(1200) as usize;
        let sizes = (tensors, count, row_bytes);
        let [here, there] =
            [&pair.local, &pair.remote].map(|engine| Padded::new(engine, chance, CacheKind::Blocks, sizes));
        let moved = 1 + chance.below(count) as usize;
        let (reads, writes) = (chance.shuffled(moved, count), chance.shuffled(moved, count));
        let pairs: Vec<(i64, i64)> = reads.iter().copied().zip(writes.iter().copied()).collect();
        let (layers, tensors) = random_layers(chance, tensors);
        let part = match chance.below(2) {
            0 => SubRow::default(),
            _ => random_part(chance, row_bytes as u64),
        };
        let verify = [Verify::Off, Verify::Sample, Verify::Full][chance.below(3) as usize];
        let (name, pulled) = (of(2, row(&there.held, 0)), chance.below(2) == 0);
        let (src, dst) = if pulled { (&there, &here) } else { (&here, &there) };
        let (bytes, mut expected) = (src.held.fill(1), dst.held.fill(2));
        naive((&bytes, src), (&mut expected, dst), &pairs, part, tensors);
        let (side, rows) = if pulled {
            (Side::Destination, Rows::SubRows { remote: reads, local: writes, part })
        } else {
            (Side::Source, Rows::SubRows { local: reads, remote: writes, part })
        };
        let moved = pair.local.transfer(side, name, &here.held.end(), (rows, layers), verified(verify));
        moved.run().unwrap();
        assert!(dst.held.read() == expected, "pulled {pulled}");
        assert!(src.held.read() == bytes);
        pair.free(&here.held, &there.held);
    });
}

#[test]
fn slots_between_gaps_are_pulled_and_pushed() {
    rounds((6, 30), false, |pair, chance, _| {
        let count = 1 + chance.below(4);
        let sizes = (1 + chance.below(6) as usize, count, 1 + chance.below(1200) as usize);
        let [here, there] =
            [&pair.local, &pair.remote].map(|engine| Padded::new(engine, chance, CacheKind::Batch, sizes));
        let (read, written) = (chance.below(count) as u32, chance.below(count) as u32);
        let (bytes, mut expected) = (there.held.fill(1), here.held.fill(2));
        let moved = [(read.into(), written.into())];
        naive((&bytes, &there), (&mut expected, &here), &moved, SubRow::default(), 0..sizes.0);
        let from = of(2, row(&there.held, read));
        pair.local.pull(from, &here.held.end(), Rows::slot(written, -1), Layers::ALL).run().unwrap();
        assert!(here.held.read() == expected);

        let back = [(written.into(), read.into())];
        let mut there_expected = there.held.fill(3);
        naive((&expected, &here), (&mut there_expected, &there), &back, SubRow::default(), 0..sizes.0);
        pair.local.push(&here.held.end(), from, Rows::slot(written, -1), Layers::ALL).run().unwrap();
        assert!(there.held.read() == there_expected);
        pair.free(&here.held, &there.held);
    });
}

#[test]
fn slots_are_cut_into_blocks_between_gaps() {
    rounds((7, 5), false, |pair, chance, _| {
        let (tensors, len) = (3, 1 + chance.below(600) as usize);
        let here = Padded::new(&pair.local, chance, CacheKind::Blocks, (tensors, 9, len));
        let there = Padded::new(&pair.remote, chance, CacheKind::Batch, (tensors, 3, 4 * len));
        let (bytes, mut expected) = (there.held.fill(1), here.held.fill(2));
        for tensor in 0..tensors {
            for (index, block) in [5, 0, 8].into_iter().enumerate() {
                let part = &bytes[tensor][there.part(2, index * len, len)];
                expected[tensor][here.part(block, 0, len)].copy_from_slice(part);
            }
        }
        let rows = Rows::SlotToBlocks { local: vec![5, 0, 8] };
        pair.local.pull(of(2, row(&there.held, 2)), &here.held.end(), rows, Layers::ALL).run().unwrap();
        assert!(here.held.read() == expected);
        pair.free(&here.held, &there.held);
    });
}

#[test]
fn layers_between_gaps_are_transferred() {
    rounds((9, 20), false, |pair, chance, _| {
        let (per_layer, layers) = (1 + chance.below(3) as u32, 1 + chance.below(3) as u32);
        let tensors = (per_layer * layers) as usize;
        let kind = if chance.below(2) == 0 { CacheKind::Blocks } else { CacheKind::Batch };
        let count = 2 + chance.below(5);
        let sizes = (tensors, count, 1 + chance.below(1200) as usize);
        let [here, there] =
            [&pair.local, &pair.remote].map(|engine| Padded::new(engine, chance, kind, sizes));
        let moved = 1 + chance.below(count) as usize;
        let (reads, writes) = (chance.shuffled(moved, count), chance.shuffled(moved, count));
        let unsigned = |list: &[i64]| list.iter().map(|&block| block as u64).collect::<Vec<_>>();
        let (src_blocks, dst_blocks, pairs) = if kind == CacheKind::Blocks {
            let pairs = reads.iter().copied().zip(writes.iter().copied()).collect();
            (unsigned(&reads), unsigned(&writes), pairs)
        } else {
            (vec![], vec![], vec![(0, 0)])
        };
        let args =
            LayerwiseArgs { src_blocks, dst_blocks, dst_block_bytes: None, tensors_per_layer: per_layer };
        // Blocks beyond an address follow each other there, unless the cache has gaps, and so do they in the cache.
        let target = if chance.below(2) == 0 { named(&there.held) } else { addressed(&there.held) };
        let (bytes, mut expected) = (here.held.fill(1), there.held.fill(2));
        naive((&bytes, &here), (&mut expected, &there), &pairs, SubRow::default(), 0..tensors);
        let task = start(&pair.local, &here.held, &args, &[to(2, target, layers)]);
        finish(&task);
        assert!(is_done(&task, 0), "{:?}", task.outcomes());
        assert!(there.held.read() == expected);
        pair.free(&here.held, &there.held);
    });
}

/// A peer that asks for bytes outside the rows of a cache is refused in every request, before a byte moves.
#[test]
fn plans_that_leave_the_rows_are_refused() {
    let engine = super::open(super::config(2, super::Way::Tcp), super::Way::Tcp);
    let desc = CacheDesc { row_stride: Some(24), ..device(4, 8, 16) };
    let held = Held::pool(&engine, &desc, CacheKind::Blocks);
    let bytes = held.fill(1);
    let (_control, call) = Fake::new(1, 1).calling(&engine, &Tcp, 7);
    let id = held.cache.id();
    let cache = NamedCache { name: Name::Row { cache: id, row: 0 }, id };
    let plan = |first, num_tensors, len| plan_of(first, num_tensors, &[one_span(0, 0, len)]);
    let read = |plan, bytes| Request::Read { cache, generation: None, plan, range: 0..bytes, summed: false };
    let write = |plan, bytes| Request::Write { cache, plan, range: 0..bytes, ahead: false, shared: None };
    let checksums = |first, num_tensors, len| Request::Checksums {
        cache,
        plan: plan(first, num_tensors, len),
        side: Side::Source,
    };
    let gap = "bytes between two rows";
    for (request, text) in [
        (read(plan(0, 4, 17), 68), gap),
        (write(plan(1, 2, 17), 34), gap),
        (checksums(1, 2, 17), gap),
        (read(plan(2, 1, 185), 185), "exceeds the bounds"),
        (write(plan(2, 1, 185), 185), "exceeds the bounds"),
        (checksums(2, 1, 185), "exceeds the bounds"),
    ] {
        ask(&call, &request);
        match hear(&call).unwrap() {
            Reply::Failed { message, .. } => assert!(message.contains(text), "{request:?}: {message}"),
            reply => panic!("{request:?}: {reply:?}"),
        }
    }
    assert!(held.read() == bytes);
    ask(&call, &checksums(0, 4, 16));
    assert!(matches!(hear(&call).unwrap(), Reply::Checksums { .. }));
}
