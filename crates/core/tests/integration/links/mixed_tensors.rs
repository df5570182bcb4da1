//! Pulls, pushes and layer-wise transfers of caches whose tensors differ: every byte arrives where a model written row by
//! row has it, and no other byte changes.

use llm_datadist_core::testing::net::Tcp;
use llm_datadist_core::testing::plan::{Side, Span, Template, TensorSteps};
use llm_datadist_core::testing::protocol::{NamedCache, Reply, Request, WirePlan, WireTemplates};
use llm_datadist_core::{
    CacheDesc, CacheKind, CallExtras, DataType, Error, ErrorKind, LayerRange, Layers, LayerwiseArgs, Name,
    Placement, Rows, SubRow, TensorDesc, Verify,
};

use super::fake_peer::{Fake, ask, hear};
use super::layerwise::{addressed, failure, finish, is_done, named, start, to};
use super::{Held, Pair, WAYS, of, row, times};
use crate::fixtures::{Chance, listed};

/// Element sizes and element counts of the rows of each tensor.
type TensorRows = Vec<(DataType, u64)>;

fn bytes_of((data_type, elements): (DataType, u64)) -> usize {
    (data_type.bytes() * elements) as usize
}

fn random_rows(chance: &mut Chance) -> TensorRows {
    let types = [DataType::Uint8, DataType::Float16, DataType::Int32];
    let mut rows = Vec::new();
    for _ in 0..2 + chance.below(4) {
        let one = (types[chance.below(3) as usize], 1 + chance.below(300));
        rows.extend(vec![one; 1 + chance.below(3) as usize]);
    }
    rows
}

/// A cache, and where the rows of each of its tensors lie.
struct MixedCache {
    held: Held,
    rows: Vec<usize>,
    strides: Vec<usize>,
}

impl MixedCache {
    fn new(
        engine: &llm_datadist_core::DataDist,
        chance: &mut Chance,
        rows: &TensorRows,
        (kind, count): (CacheKind, u64),
    ) -> MixedCache {
        let mut strides = Vec::new();
        let tensors = rows
            .iter()
            .map(|&(data_type, elements)| {
                let gap = chance.below(4).saturating_sub(2) * 3 * data_type.bytes();
                let stride = data_type.bytes() * elements + gap;
                strides.push(stride as usize);
                let shape = vec![count.cast_signed(), elements.cast_signed()];
                TensorDesc { count: 1, shape, data_type, row_stride: (gap > 0).then_some(stride) }
            })
            .collect();
        let desc = CacheDesc::of_tensors(tensors, Placement::Device).unwrap();
        let held = Held::new(engine, chance.below(2) == 0, &desc, kind, &[]);
        MixedCache { held, rows: rows.iter().map(|&row| bytes_of(row)).collect(), strides }
    }

    /// The bytes `skip..skip + len` of a row of a tensor.
    fn part(&self, tensor: usize, row: i64, skip: usize, len: usize) -> std::ops::Range<usize> {
        let start = row as usize * self.strides[tensor] + skip;
        start..start + len
    }
}

/// What copying `part` of each row of `pairs`, tensor after tensor, leaves in `into`.
fn naive(
    (from, src): (&[Vec<u8>], &MixedCache),
    (into, dst): (&mut [Vec<u8>], &MixedCache),
    pairs: &[(i64, i64)],
    part: SubRow,
    (src_tensor, dst_tensor, count): (usize, usize, usize),
) {
    for index in 0..count {
        let (read, written) = (src_tensor + index, dst_tensor + index);
        let (skip, to_skip) = (part.src_offset as usize, part.dst_offset as usize);
        let rest = (src.rows[read] - skip).min(dst.rows[written] - to_skip);
        let len = part.length.map_or(rest, |length| length as usize);
        for &(src_row, dst_row) in pairs {
            let bytes = from[read][src.part(read, src_row, skip, len)].to_vec();
            into[written][dst.part(written, dst_row, to_skip, len)].copy_from_slice(&bytes);
        }
    }
}

fn random_part(chance: &mut Chance, shortest: usize) -> SubRow {
    let shortest = shortest as u64;
    let (src_offset, dst_offset) = (chance.below(shortest), chance.below(shortest));
    let room = shortest - src_offset.max(dst_offset);
    let length = if chance.below(2) == 0 { Some(1 + chance.below(room)) } else { None };
    SubRow { src_offset, dst_offset, length }
}

/// All tensors, or the same number of tensors of each side.
fn random_layers(chance: &mut Chance, tensors: usize) -> (Layers, (usize, usize, usize)) {
    if chance.below(2) == 0 {
        return (Layers::ALL, (0, 0, tensors));
    }
    let first = chance.below(tensors as u64) as u32;
    let end = first + 1 + chance.below(tensors as u64 - u64::from(first)) as u32;
    let range = Some(LayerRange { first, end });
    let layers = Layers { src: range, dst: range, tensors_per_layer: 1 };
    (layers, (first as usize, first as usize, (end - first) as usize))
}

#[test]
fn blocks_of_tensors_that_differ_are_pulled_and_pushed() {
    for way in WAYS {
        let pair = Pair::new(way);
        let mut chance = Chance(5);
        for round in 0..times(50) {
            let sizes = random_rows(&mut chance);
            let count = 2 + chance.below(90);
            let [here, there] = [&pair.local, &pair.remote]
                .map(|engine| MixedCache::new(engine, &mut chance, &sizes, (CacheKind::Blocks, count)));
            let moved = 1 + chance.below(count) as usize;
            let (reads, writes) = (chance.shuffled(moved, count), chance.shuffled(moved, count));
            let pairs: Vec<(i64, i64)> = reads.iter().copied().zip(writes.iter().copied()).collect();
            let (layers, tensors) = random_layers(&mut chance, sizes.len());
            let shortest = *here.rows[tensors.0..tensors.0 + tensors.2].iter().min().unwrap();
            let part = match chance.below(2) {
                0 => SubRow::default(),
                _ => random_part(&mut chance, shortest),
            };
            let verify = [Verify::Off, Verify::Sample, Verify::Full][chance.below(3) as usize];
            let extras = CallExtras { verify: Some(verify), ..CallExtras::default() };
            let (name, pulled) = (of(2, row(&there.held, 0)), chance.below(2) == 0);
            let (src, dst) = if pulled { (&there, &here) } else { (&here, &there) };
            let (bytes, mut expected) = (src.held.fill(1), dst.held.fill(2));
            naive((&bytes, src), (&mut expected, dst), &pairs, part, tensors);
            if pulled {
                let rows = Rows::SubRows { remote: reads, local: writes, part };
                pair.local.pull_with(name, &here.held.end(), rows, layers, extras).run()
            } else {
                let rows = Rows::SubRows { local: reads, remote: writes, part };
                pair.local.push_with(&here.held.end(), name, rows, layers, extras).run()
            }
            .unwrap_or_else(|error| panic!("{way:?}, round {round}: {error}"));
            assert!(dst.held.read() == expected, "{way:?}, round {round}, pulled {pulled}");
            assert!(src.held.read() == bytes, "{way:?}, round {round}");
            here.held.free(&pair.local);
            there.held.free(&pair.remote);
        }
    }
}

#[test]
fn slots_of_tensors_that_differ_are_pulled_and_pushed() {
    for way in WAYS {
        let pair = Pair::new(way);
        let mut chance = Chance(6);
        for round in 0..times(30) {
            let sizes = random_rows(&mut chance);
            let count = 1 + chance.below(4);
            let [here, there] = [&pair.local, &pair.remote]
                .map(|engine| MixedCache::new(engine, &mut chance, &sizes, (CacheKind::Batch, count)));
            let (read, written) = (chance.below(count) as u32, chance.below(count) as u32);
            let all = (0, 0, sizes.len());
            let (bytes, mut expected) = (there.held.fill(1), here.held.fill(2));
            let moved = [(read.into(), written.into())];
            naive((&bytes, &there), (&mut expected, &here), &moved, SubRow::default(), all);
            let from = of(2, row(&there.held, read));
            pair.local
                .pull(from, &here.held.end(), Rows::slot(written, -1), Layers::ALL)
                .run()
                .unwrap_or_else(|error| panic!("{way:?}, round {round}: {error}"));
            assert!(here.held.read() == expected, "{way:?}, round {round}");

            let back = [(written.into(), read.into())];
            let mut there_expected = there.held.fill(3);
            naive((&expected, &here), (&mut there_expected, &there), &back, SubRow::default(), all);
            pair.local.push(&here.held.end(), from, Rows::slot(written, -1), Layers::ALL).run().unwrap();
            assert!(there.held.read() == there_expected, "{way:?}, round {round}");

            for (size, offset) in [(1, 0), (-1, 1)] {
                let rows = Rows::Slot { local: 0, remote_offset: offset, local_offset: offset, size };
                let error = pair.local.pull(from, &here.held.end(), rows, Layers::ALL).run().unwrap_err();
                refused(&error, &["move whole slots"]);
            }
            assert!(here.held.read() == expected);
            here.held.free(&pair.local);
            there.held.free(&pair.remote);
        }
    }
}

/// A slot of several blocks is cut into blocks, tensor by tensor.
#[test]
fn slots_of_tensors_that_differ_are_cut_into_blocks() {
    for way in WAYS {
        let pair = Pair::new(way);
        let mut chance = Chance(7);
        let sizes = random_rows(&mut chance);
        let slots: TensorRows =
            sizes.iter().map(|&(data_type, elements)| (data_type, 4 * elements)).collect();
        let here = MixedCache::new(&pair.local, &mut chance, &sizes, (CacheKind::Blocks, 9));
        let there = MixedCache::new(&pair.remote, &mut chance, &slots, (CacheKind::Batch, 3));
        let (bytes, mut expected) = (there.held.fill(1), here.held.fill(2));
        for tensor in 0..sizes.len() {
            for (index, block) in [5, 0, 8].into_iter().enumerate() {
                let len = here.rows[tensor];
                let part = bytes[tensor][there.part(tensor, 2, index * len, len)].to_vec();
                expected[tensor][here.part(tensor, block, 0, len)].copy_from_slice(&part);
            }
        }
        let rows = Rows::SlotToBlocks { local: vec![5, 0, 8] };
        pair.local.pull(of(2, row(&there.held, 2)), &here.held.end(), rows, Layers::ALL).run().unwrap();
        assert!(here.held.read() == expected, "{way:?}");
        let many = Rows::SlotToBlocks { local: vec![0, 1, 2, 3, 4] };
        let error = pair.local.pull(of(2, row(&there.held, 2)), &here.held.end(), many, Layers::ALL).run();
        refused(&error.unwrap_err(), &["len(dst_blocks)=5", "at most 4"]);
    }
}

fn refused(error: &Error, texts: &[&str]) {
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    for text in texts {
        assert!(error.to_string().contains(text), "{error} does not contain {text}");
    }
}

/// Tensors of other sizes, on either side, are refused before a byte moves, unless only tensors of equal sizes move.
#[test]
fn tensors_of_other_sizes_are_refused() {
    let rows = |bytes: &[u64]| bytes.iter().map(|&bytes| (DataType::Uint8, bytes)).collect::<TensorRows>();
    let shapes = [rows(&[8, 8, 4]), rows(&[8, 4, 4]), rows(&[8, 8, 8])];
    for way in WAYS {
        let pair = Pair::new(way);
        let mut chance = Chance(8);
        for (mine, theirs) in [(0, 1), (1, 0), (0, 2), (2, 0)] {
            let [here, there] = [(&pair.local, mine), (&pair.remote, theirs)].map(|(engine, shape)| {
                MixedCache::new(engine, &mut chance, &shapes[shape], (CacheKind::Blocks, 6))
            });
            let before = (here.held.fill(1), there.held.fill(2));
            let name = of(2, row(&there.held, 0));
            let (pull, push) = (
                Rows::Blocks { remote: vec![1], local: vec![2] },
                Rows::Blocks { local: vec![1], remote: vec![2] },
            );
            let calls = [
                pair.local.pull(name, &here.held.end(), pull.clone(), Layers::ALL).run(),
                pair.local.push(&here.held.end(), name, push.clone(), Layers::ALL).run(),
            ];
            let differs =
                if (mine, theirs) == (0, 1) || (mine, theirs) == (1, 0) { "tensor=1" } else { "tensor=2" };
            for call in calls {
                let error = call.unwrap_err();
                refused(&error, &[differs, "a row of the tensor has"]);
                assert!(
                    ["4 bytes", "8 bytes"].iter().any(|bytes| error.to_string().contains(bytes)),
                    "{error}"
                );
            }
            assert!((here.held.read(), there.held.read()) == before, "{way:?}");
            let range = Some(LayerRange { first: 0, end: 1 });
            let one = Layers { src: range, dst: range, tensors_per_layer: 1 };
            pair.local.pull(name, &here.held.end(), pull.clone(), one).run().unwrap();
            pair.local.push(&here.held.end(), name, push.clone(), one).run().unwrap();
            let parts = Rows::SubRows {
                remote: vec![1],
                local: vec![2],
                part: SubRow { length: Some(5), ..SubRow::default() },
            };
            let error = pair.local.pull(name, &here.held.end(), parts, Layers::ALL).run().unwrap_err();
            refused(&error, &["length=5", "1 to 4"]);
            here.held.free(&pair.local);
            there.held.free(&pair.remote);
        }
    }
}

#[test]
fn layers_of_tensors_that_differ_are_transferred() {
    for way in WAYS {
        let pair = Pair::new(way);
        let mut chance = Chance(9);
        for round in 0..times(20) {
            let layer: TensorRows = random_rows(&mut chance);
            let (per_layer, layers) = (layer.len() as u32, 1 + chance.below(3) as u32);
            let sizes: TensorRows = (0..layers).flat_map(|_| layer.clone()).collect();
            let kind = if chance.below(2) == 0 { CacheKind::Blocks } else { CacheKind::Batch };
            let count = 2 + chance.below(5);
            let [here, there] = [&pair.local, &pair.remote]
                .map(|engine| MixedCache::new(engine, &mut chance, &sizes, (kind, count)));
            let moved = 1 + chance.below(count) as usize;
            let (reads, writes) = (chance.shuffled(moved, count), chance.shuffled(moved, count));
            let unsigned = |list: &[i64]| list.iter().map(|&block| block as u64).collect::<Vec<_>>();
            let (args, pairs) = if kind == CacheKind::Blocks {
                let (src_blocks, dst_blocks) = (unsigned(&reads), unsigned(&writes));
                let args = LayerwiseArgs {
                    src_blocks,
                    dst_blocks,
                    dst_block_bytes: None,
                    tensors_per_layer: per_layer,
                };
                (args, reads.iter().copied().zip(writes.iter().copied()).collect())
            } else {
                let args = LayerwiseArgs {
                    src_blocks: vec![],
                    dst_blocks: vec![],
                    dst_block_bytes: None,
                    tensors_per_layer: per_layer,
                };
                (args, vec![(0, 0)])
            };
            // Blocks beyond an address follow each other there, unless the cache has gaps, and so do they in the cache.
            let target = if chance.below(2) == 0 { named(&there.held) } else { addressed(&there.held) };
            let (bytes, mut expected) = (here.held.fill(1), there.held.fill(2));
            naive((&bytes, &here), (&mut expected, &there), &pairs, SubRow::default(), (0, 0, sizes.len()));
            let task = start(&pair.local, &here.held, &args, &[to(2, target, layers)]);
            finish(&task);
            assert!(is_done(&task, 0), "{way:?}, round {round}: {:?}", task.outcomes());
            assert!(there.held.read() == expected, "{way:?}, round {round}");
            let given = LayerwiseArgs { dst_block_bytes: Some(8), ..args };
            let given = if kind == CacheKind::Blocks {
                given
            } else {
                LayerwiseArgs { dst_blocks: vec![0], ..given }
            };
            let error = pair.local.transfer_async(&here.held.end(), &given, vec![], None).unwrap_err();
            refused(&error, &["dst_block_memory_size=8", "tensors differ"]);
            here.held.free(&pair.local);
            there.held.free(&pair.remote);
        }
        let rows =
            |bytes: &[u64]| bytes.iter().map(|&bytes| (DataType::Uint8, bytes)).collect::<TensorRows>();
        let here = MixedCache::new(&pair.local, &mut chance, &rows(&[8, 4]), (CacheKind::Batch, 1));
        let there = MixedCache::new(&pair.remote, &mut chance, &rows(&[8, 2]), (CacheKind::Batch, 1));
        let args = LayerwiseArgs { tensors_per_layer: 2, ..LayerwiseArgs::default() };
        let task = start(&pair.local, &here.held, &args, &[to(2, named(&there.held), 1)]);
        finish(&task);
        refused(&failure(&task, 0), &["tensor=1", "4 bytes", "2 in"]);
        // Addresses in another order: a block of 8 bytes would cover two blocks of 4.
        let here = MixedCache::new(&pair.local, &mut chance, &rows(&[8, 4]), (CacheKind::Blocks, 4));
        let there = MixedCache::new(&pair.remote, &mut chance, &rows(&[4, 8]), (CacheKind::Blocks, 4));
        let before = there.held.fill(3);
        let args = LayerwiseArgs { src_blocks: vec![0], dst_blocks: vec![1], dst_block_bytes: None, ..args };
        let task = start(&pair.local, &here.held, &args, &[to(2, addressed(&there.held), 1)]);
        finish(&task);
        refused(&failure(&task, 0), &["tensor=0", "8 bytes", "4 in"]);
        assert!(there.held.read() == before);
    }
}

/// A pulled request is released once all its tensors were pulled, in one call or in several.
#[test]
fn keys_of_tensors_that_differ_are_released() {
    let pair = Pair::new(super::Way::Shm);
    let rows: TensorRows = vec![(DataType::Uint8, 64), (DataType::Uint8, 64), (DataType::Uint8, 16)];
    let desc = |engine, chance: &mut Chance| MixedCache::new(engine, chance, &rows, (CacheKind::Batch, 1));
    let into = desc(&pair.local, &mut Chance(10));
    let tensors: Vec<TensorDesc> = rows
        .iter()
        .map(|&(data_type, elements)| TensorDesc {
            count: 1,
            shape: vec![1, elements.cast_signed()],
            data_type,
            row_stride: None,
        })
        .collect();
    let desc = CacheDesc::of_tensors(tensors, Placement::Device).unwrap();
    let from = |id| of(2, Name::Key(super::request(id)));
    let keyed = |id| {
        let cache = pair.remote.allocate(&desc, CacheKind::Batch, &[Some(super::request(id))]).unwrap();
        pair.remote.deallocate(cache.id()).unwrap();
    };
    keyed(1);
    let pull = |id, layers| pair.local.pull(from(id), &into.held.end(), Rows::slot(0, -1), layers).run();
    pull(1, Layers::ALL).unwrap();
    assert_eq!(pull(1, Layers::ALL).unwrap_err().kind(), ErrorKind::CacheNotFound);
    keyed(2);
    let part = |first, end| {
        let range = Some(LayerRange { first, end });
        Layers { src: range, dst: range, tensors_per_layer: 1 }
    };
    pull(2, part(0, 1)).unwrap();
    pull(2, part(1, 3)).unwrap();
    assert_eq!(pull(2, Layers::ALL).unwrap_err().kind(), ErrorKind::CacheNotFound);
    assert_eq!(pair.remote.stats().table.caches, 0);
}

/// A peer that claims that tensors of different sizes are equal is refused in every request, before a byte moves.
#[test]
fn plans_over_tensors_that_differ_are_refused() {
    let engine = super::open(super::config(2, super::Way::Tcp), super::Way::Tcp);
    let tensor = |bytes: i64| TensorDesc {
        count: 1,
        shape: vec![8, bytes],
        data_type: DataType::Uint8,
        row_stride: None,
    };
    let tensors = vec![tensor(64), tensor(64), tensor(16), tensor(64)];
    let desc = CacheDesc::of_tensors(tensors, Placement::Device).unwrap();
    let held = Held::pool(&engine, &desc, CacheKind::Blocks);
    let bytes = held.fill(1);
    let (_control, call) = Fake::new(1, 1).calling(&engine, &Tcp, 7);
    let id = held.cache.id();
    let cache = NamedCache { name: Name::Row { cache: id, row: 0 }, id };
    let templates = |len: u64| {
        let spans = vec![Span { src: 0, dst: 0, len, count: 1, src_step: 0, dst_step: 0 }];
        WireTemplates(Ok(listed(vec![Template::new((0, 0), vec![(0, 0)], spans)])))
    };
    let plan = |first, num_tensors, len| WirePlan {
        num_tensors,
        src: TensorSteps::consecutive(first),
        dst: TensorSteps::consecutive(first),
        templates: templates(len),
    };
    let read = |plan, bytes| Request::Read { cache, generation: None, plan, range: 0..bytes, summed: false };
    let write = |plan, bytes| Request::Write { cache, plan, range: 0..bytes, ahead: false, shared: None };
    let checksums = |first, num_tensors, len| Request::Checksums {
        cache,
        plan: plan(first, num_tensors, len),
        side: Side::Source,
    };
    let different = "different rows";
    for (request, text) in [
        (read(plan(0, 4, 8), 32), different),
        (write(plan(1, 2, 8), 16), different),
        (checksums(1, 2, 8), different),
        (read(plan(2, 1, 129), 129), "exceeds the bounds"),
        (write(plan(2, 1, 129), 129), "exceeds the bounds"),
        (checksums(2, 1, 129), "exceeds the bounds"),
        (read(plan(3, 2, 8), 16), "2 tensors from tensor 3"),
        (read(plan(9, 1, 8), 8), "1 tensors from tensor 9"),
        (checksums(9, 1, 8), "1 tensors from tensor 9"),
    ] {
        ask(&call, &request);
        match hear(&call).unwrap() {
            Reply::Failed { message, .. } => assert!(message.contains(text), "{request:?}: {message}"),
            reply => panic!("{request:?}: {reply:?}"),
        }
    }
    assert!(held.read() == bytes);
    ask(&call, &checksums(0, 2, 512));
    assert!(matches!(hear(&call).unwrap(), Reply::Checksums { .. }));
    ask(&call, &checksums(2, 1, 128));
    assert!(matches!(hear(&call).unwrap(), Reply::Checksums { .. }));
}
