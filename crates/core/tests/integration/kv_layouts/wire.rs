//! Plans between KV layouts as messages: the receiver moves what the twin moves, and both sides calculate the same
//! checksums.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::{Name, RowSizes};
use llm_datadist_core::testing::checksums::Checksums;
use llm_datadist_core::testing::copy::{CopyEngine, Staging};
use llm_datadist_core::testing::memory::Tensors;
use llm_datadist_core::testing::plan::{BlockSizes, CopyPlan, MAX_TEMPLATES, PartLimits, Side, Template};
use llm_datadist_core::testing::protocol::{self, HEADER, MESSAGE_LIMIT, WirePlan};
use llm_datadist_core::{CacheId, KvLayout, KvPlanes, Placement, TokenOrder};
use proptest::prelude::*;

use super::{Case, Holder, Moved, between, block_list, cases, rank, whole};
use crate::fixtures::{Buffer, for_all, local_streams, pattern, shared_copy_engine, soon, tensors_over};
use crate::socket_copies::SocketCopies as _;

/// The plan as the peer has it that receives it in a message.
pub fn received(plan: &CopyPlan) -> CopyPlan {
    let frame = protocol::encode(&WirePlan::try_from(plan).unwrap()).unwrap();
    CopyPlan::try_from(protocol::decode::<WirePlan>(&frame[HEADER..]).unwrap()).unwrap()
}

/// Where the rows of one side lie.
fn rows_of(side: &Holder) -> RowSizes {
    RowSizes::new(side.row_bytes(), side.row_stride)
}

/// Memory of one side: byte `at` of each tensor has the value of the pattern `seed`.
fn memory(side: &Holder, seed: u8) -> (Arc<Buffer>, Arc<Tensors>) {
    let (tensors, row) = (side.num_tensors() as usize, side.row_stride as usize);
    tensors_over(tensors, side.rows as usize, row, |tensor, at| pattern(seed, tensor, at))
}

fn offset(side: &Holder, (tensor, at): (u32, u64)) -> usize {
    tensor as usize * (side.rows * side.row_stride) as usize + at as usize
}

/// Moves the elements of `moved` one by one.
fn move_elements(case: &Case, moved: &[Moved], src: &Buffer, dst: &Buffer) {
    let bytes = case.src.data_type.bytes() as usize;
    for &(to, from) in moved {
        for byte in 0..bytes {
            let value = src.read(offset(&case.src, from) + byte, 1);
            dst.write(offset(&case.dst, to) + byte, &value);
        }
    }
}

fn bound() -> Checksums {
    Checksums::bound_to(Name::Row { cache: CacheId(1), row: 0 }, CacheId(1), 0, 0).unwrap()
}

fn sums(engine: &CopyEngine, plan: &CopyPlan, end: Side, memory: &Arc<Tensors>) -> Vec<u64> {
    engine.block_sums((memory, Placement::Host), (plan, end), bound(), soon()).unwrap()
}

/// Whether spans of the plan are repeated.
pub fn repeats(plan: &CopyPlan) -> bool {
    plan.templates().iter().any(|template| template.pairs.len() > 1)
}

/// The pieces of a plan in one tensor.
fn pieces(plan: &CopyPlan) -> Vec<(u64, u64, u64)> {
    plan.templates()
        .iter()
        .flat_map(Template::pieces)
        .map(|piece| (piece.src, piece.dst, piece.len))
        .collect()
}

/// In memory, and through a stream: first the request, then the bytes. The receiver knows the plan only from the request.
#[test]
fn plans_between_layouts_move_bytes() {
    let shuffled = |side: Holder| Holder { blocks: block_list(50, 60, 5, false), rows: 60, ..side };
    let fused = KvLayout { kv: KvPlanes::KThenV, order: TokenOrder::Hnd, ..rank(8, 4, 1) };
    let there = between(shuffled(whole(rank(8, 2, 0), 50)), shuffled(whole(fused, 50)));
    let back = between(there.dst.clone(), there.src.clone());
    let engine = shared_copy_engine();
    for case in [there, back] {
        let part = case.common();
        let plans = case.plan(&part).unwrap();
        assert!(plans.len() == 2 && plans.iter().all(repeats));
        let ((source, src), (expected, _)) = (memory(&case.src, 1), memory(&case.dst, 2));
        move_elements(&case, &case.twin(&part), &source, &expected);
        let all = case.dst.num_tensors() as usize * (case.dst.rows * case.dst.row_stride) as usize;
        let (written, dst) = memory(&case.dst, 2);
        for plan in plans.clone() {
            let (from, to) = ((&src, Placement::Host), (&dst, Placement::Host));
            engine.run(plan, from, to, Staging::DEFAULT, soon(), &Arc::default()).unwrap();
        }
        assert!(written.read(0, all) == expected.read(0, all), "in memory");
        let (written, dst) = memory(&case.dst, 2);
        let (local, remote) = local_streams("kv_layouts_wire");
        for plan in &plans {
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    let frame = protocol::encode(&WirePlan::try_from(plan).unwrap()).unwrap();
                    local.send(&frame, soon()).unwrap();
                    engine.send(plan, 0..plan.bytes(), &src, &local, soon(), None).unwrap();
                });
                let (kind, body) = remote.receive(MESSAGE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
                let plan = CopyPlan::try_from(protocol::open::<WirePlan>(kind, &body).unwrap()).unwrap();
                let bytes = 0..plan.bytes();
                engine.receive(&plan, bytes, &dst, &remote, soon(), &Arc::default()).unwrap();
            });
        }
        assert!(written.read(0, all) == expected.read(0, all), "through a stream");
    }
}

/// For any two layouts, and for a part of the pairs: equal bytes have equal checksums, and any flipped bit of a moved
/// element changes that of exactly one pair.
#[test]
fn pairs_have_equal_checksums_on_both_sides() {
    let seen = std::cell::Cell::new(0u32);
    let engine = shared_copy_engine();
    let positions = (cases(), any::<prop::sample::Index>(), any::<u32>(), prop::option::of(any::<u64>()));
    for_all(600, &positions, |(case, element, bit, sample)| {
        let part = case.common();
        let plans = case.plan(&part).unwrap();
        let moved = case.twin(&part);
        let ((source, src), (copied, dst)) = (memory(&case.src, 1), memory(&case.dst, 2));
        move_elements(&case, &moved, &source, &copied);
        let sizes = BlockSizes { local: Side::Destination, rows: rows_of(&case.dst), most: u64::MAX };
        let asked = |plan: &CopyPlan| plan.compared(sizes, sample).unwrap();
        let asked: Vec<CopyPlan> = plans.iter().map(asked).collect();
        let both = || -> Vec<(u64, u64)> {
            let of_plan = |plan: &CopyPlan| {
                let read = sums(engine, plan, Side::Source, &src);
                let written = sums(engine, &received(plan), Side::Destination, &dst);
                assert_eq!((read.len(), written.len()), (plan.num_pairs(), plan.num_pairs()));
                read.into_iter().zip(written).collect::<Vec<_>>()
            };
            asked.iter().flat_map(of_plan).collect()
        };
        prop_assert!(both().iter().all(|(read, written)| read == written));
        if moved.is_empty() {
            return Ok(());
        }
        let (to, _) = moved[element.index(moved.len())];
        let at = offset(&case.dst, to) + bit as usize / 8 % case.dst.data_type.bytes() as usize;
        let byte = copied.read(at, 1)[0];
        copied.write(at, &[byte ^ (1 << (bit % 8))]);
        let different = both().iter().filter(|(read, written)| read != written).count();
        prop_assert!(different == 1 || sample.is_some() && different == 0, "{different} pairs differ");
        seen.set(seen.get() + u32::from(different == 1));
        Ok(())
    });
    assert!(seen.get() > 0);
}

/// The checksum of a pair is that of its bytes in the order of the plan, tensor after tensor.
#[test]
fn the_checksum_of_a_pair_is_that_of_its_pieces_in_order() {
    let hnd = KvLayout { order: TokenOrder::Hnd, ..rank(8, 2, 0) };
    let case = between(whole(rank(8, 2, 0), 6), whole(hnd, 6));
    let plan = &case.plan(&case.common()).unwrap()[0];
    let template = &plan.templates()[0];
    assert_eq!((template.pairs.len(), template.spans.len()), (6, 4));
    let (source, src) = memory(&case.src, 1);
    let per_pair = plan.tensor_bytes() / 6;
    let expected = (0..6).map(|pair| {
        let mut block = bound().block();
        for tensor in 0..plan.num_tensors() {
            for piece in plan.tensor_pieces(pair * per_pair, (pair + 1) * per_pair) {
                block.add(&source.read(offset(&case.src, (tensor, piece.src)), piece.len as usize));
            }
        }
        block.value()
    });
    assert_eq!(sums(shared_copy_engine(), plan, Side::Source, &src), expected.collect::<Vec<_>>());
}

/// Every byte that a plan writes, with the byte that it reads.
fn bytes_of(plan: &CopyPlan) -> BTreeMap<u64, u64> {
    let bytes = |(src, dst, len): (u64, u64, u64)| (0..len).map(move |at| (dst + at, src + at));
    let all: Vec<_> = pieces(plan).into_iter().flat_map(bytes).collect();
    let map: BTreeMap<_, _> = all.iter().copied().collect();
    assert_eq!(map.len(), all.len(), "no byte twice");
    map
}

/// The compared blocks are the bytes of the plan, each once and in one row, and requests keep to their limits.
#[test]
fn the_pairs_of_all_requests_are_those_of_the_plan() {
    let limits = (1..2000u64, 1..20usize, any::<bool>(), any::<u64>());
    for_all(600, &(cases(), limits), |(case, (bytes, pairs, read, random))| {
        let (local, side) = if read { (Side::Source, &case.src) } else { (Side::Destination, &case.dst) };
        let sizes = BlockSizes { local, rows: rows_of(side), most: u64::MAX };
        for plan in case.plan(&case.common()).unwrap() {
            let all = plan.compared(sizes, None).unwrap();
            let (mut found, mut blocks) = (BTreeMap::new(), 0);
            for part in all.parts(PartLimits { bytes, pairs }) {
                let part = part.unwrap();
                let total: u64 = part.bytes() / u64::from(part.num_tensors());
                prop_assert!(part.num_pairs() == 1 || part.num_pairs() <= pairs && total <= bytes);
                prop_assert!(part.num_pairs() > 0 && part.templates().len() <= MAX_TEMPLATES);
                blocks += part.num_pairs();
                for template in part.templates().iter() {
                    for (pair, block) in template.pairs.iter().zip(template.pair_blocks()) {
                        let row = block.start(local) / side.row_stride;
                        let mut ranges = template.ranges(*pair, local);
                        let inside = |at| at / side.row_stride == row;
                        prop_assert!(ranges.all(|(at, len)| inside(at) && inside(at + len - 1)));
                    }
                }
                found.extend(bytes_of(&part));
            }
            prop_assert_eq!(&found, &bytes_of(&plan));
            let some = plan.compared(sizes, Some(random)).unwrap();
            prop_assert!(some.num_pairs() > 0 && some.num_pairs() <= blocks.div_ceil(64));
            prop_assert!(bytes_of(&some).into_iter().all(|(dst, src)| found.get(&dst) == Some(&src)));
        }
        Ok(())
    });
}

/// A plan that the peer would refuse fails here, before anything is sent.
#[test]
fn plans_with_too_many_pieces_are_not_sent() {
    let tokens = |order, tokens_per_block| {
        let layout = KvLayout { order, tokens_per_block, head_dim: 1, layers: 0..1, ..rank(16, 1, 0) };
        whole(layout, (1 << 22) / u64::from(tokens_per_block))
    };
    let sent = |src: Holder, mut dst: Holder, stride: u64| {
        dst.row_stride = stride;
        let case = between(src, dst);
        let plan = case.plan(&case.common()).unwrap().remove(0);
        (plan.num_pieces(), WirePlan::try_from(&plan))
    };
    let (nhd, hnd) = (TokenOrder::Nhd, TokenOrder::Hnd);
    // Every head of every token is a piece: as many as may be.
    let (pieces, wire) = sent(tokens(nhd, 16), tokens(hnd, 16), 512);
    assert_eq!(pieces, 1 << 26);
    assert_eq!(CopyPlan::try_from(wire.unwrap()).unwrap().num_pieces(), pieces);
    let mut longer = (tokens(nhd, 16), tokens(hnd, 16));
    for side in [&mut longer.0, &mut longer.1] {
        side.rows += 1;
        side.blocks.push(side.rows - 1);
    }
    let (_, wire) = sent(longer.0, longer.1, 512);
    let error = wire.unwrap_err();
    assert!(error.to_string().contains("more than 67108864 pieces in one tensor"), "{error}");
    // Full blocks and the tail of another one are checked by their positions, however many pieces they have.
    let rows_with_gaps = |order| {
        let rank = KvLayout { head_dim: 128, layers: 0..1, ..rank(8, 1, 0) };
        let mut side = whole(KvLayout { order, kv: KvPlanes::KThenV, ..rank }, 4101);
        side.row_stride = side.row_bytes() + 2;
        side
    };
    let mut case = between(rows_with_gaps(nhd), rows_with_gaps(hnd));
    (case.src.tokens, case.dst.tokens) = (Some(0..4100 * 16 + 5), Some(0..4100 * 16 + 5));
    let plan = case.plan(&case.common()).unwrap().remove(0);
    assert_eq!((plan.templates().len(), plan.num_pieces()), (2, 4100 * 256 + 80));
    assert!(CopyPlan::try_from(WirePlan::try_from(&plan).unwrap()).is_ok());
    // Blocks inside larger ones, at distances without a common divisor, cannot be checked for overlaps.
    let (_, wire) = sent(tokens(hnd, 16), tokens(hnd, 64), 4096);
    assert!(wire.is_ok(), "{wire:?}");
    let (_, wire) = sent(tokens(hnd, 16), tokens(hnd, 64), 4098);
    let error = wire.unwrap_err();
    assert!(error.to_string().contains("too many and too irregular"), "{error}");
}

/// Runs of one token and runs of two could both be joined, but a message has too many spans for both. So one of them stays pairs.
#[test]
fn runs_of_several_lengths_share_the_spans_of_a_message() {
    let tokens = |tokens_per_block, blocks: Vec<u64>| {
        let layout = KvLayout { tokens_per_block, head_dim: 1, layers: 0..1, ..rank(1, 1, 0) };
        Holder { blocks, ..whole(layout, 240_000 / u64::from(tokens_per_block)) }
    };
    // Groups of 12 tokens, of which each two change positions.
    let swapped = |size: u64, count: u64| (0..count).map(|k| ((k / size) ^ 1) * size + k % size).collect();
    let case = between(tokens(3, (0..80_000).collect()), tokens(2, swapped(6, 120_000)));
    let plan = case.plan(&case.common()).unwrap().remove(0);
    let forms: Vec<_> =
        plan.templates().iter().map(|template| (template.pairs.len(), template.spans.len())).collect();
    assert_eq!(forms, [(1, 40_000), (80_000, 1)]);
    let received = CopyPlan::try_from(WirePlan::try_from(&plan).unwrap()).unwrap();
    assert_eq!(received.bytes(), plan.bytes());
}
