//! The blocks of a plan against a naive twin, and checksums against the bytes that they stand for.

use std::collections::{BTreeMap, BTreeSet};

use llm_datadist_core::bindings::{CacheKey, Config, Name, Role};
use llm_datadist_core::testing::checksums::Checksums;
use llm_datadist_core::testing::copy::CopyEngine;
use llm_datadist_core::testing::device::{DeviceSet, HostReach};
use llm_datadist_core::testing::plan::{
    BlockSizes, CopyPlan, Moves, Piece, Pieces, Side, Span, Template, TensorSteps,
};
use llm_datadist_core::testing::tensors;
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Deadline, ErrorKind, Placement};
use llm_datadist_testing::SimDevice;
use proptest::prelude::*;

use crate::fixtures::{block_plan, config, desc, engine_on, listed, patterned, proptest_cases, soon};

const ROW: u64 = 12;

/// The source of every byte that the pieces write, if they run one after the other.
fn last_sources(pieces: &[Piece]) -> BTreeMap<u64, u64> {
    let bytes =
        |piece: &Piece| (0..piece.len).map(move |at| (piece.dst + at, piece.src + at)).collect::<Vec<_>>();
    pieces.iter().flat_map(bytes).collect()
}

fn judge(plan: &CopyPlan, expected: &BTreeMap<u64, u64>, local: Side, row_bytes: u64, most: u64) {
    let blocks = |sample| -> Vec<Piece> {
        let compared = plan.compared(BlockSizes { local, rows: row_bytes.into(), most }, sample).unwrap();
        compared.templates().iter().flat_map(Template::pair_blocks).collect()
    };
    let all = blocks(None);
    let mut found = BTreeMap::new();
    for block in &all {
        let at = block.start(local);
        assert!(block.len > 0 && block.len <= most, "{block:?}");
        assert_eq!(at / row_bytes, (at + block.len - 1) / row_bytes, "{block:?} is in one row");
        for byte in 0..block.len {
            assert_eq!(found.insert(block.dst + byte, block.src + byte), None, "each byte is in one block");
        }
    }
    assert_eq!(&found, expected);
    // A sample is a part of the blocks, and never none of them.
    for random in 0..4 {
        let some = blocks(Some(random));
        assert!(some.iter().all(|block| all.contains(block)));
        assert_eq!(some.is_empty(), all.is_empty());
        assert!(some.len() <= all.len().div_ceil(64));
    }
}

proptest! {
    #![proptest_config(proptest_cases(256))]

    #[test]
    fn the_blocks_of_a_list_are_what_it_leaves_in_place(
        pairs in prop::collection::vec((0..20u64, 0..12u64), 0..200),
        source in any::<bool>(),
        most in 1..20u64,
    ) {
        let plan = block_plan(&pairs, ROW, 2);
        let pieces: Vec<_> =
            pairs.iter().map(|&(src, dst)| Piece { src: src * ROW, dst: dst * ROW, len: ROW }).collect();
        let local = if source { Side::Source } else { Side::Destination };
        judge(&plan, &last_sources(&pieces), local, ROW, most);
    }

    #[test]
    fn the_blocks_of_a_slot_are_what_it_leaves_in_place(
        first in 0..50u64,
        to in prop::collection::vec(0..6u64, 1..8),
        last in 1..=ROW,
        source in any::<bool>(),
        slot in 1..3 * ROW,
        most in 1..20u64,
    ) {
        let whole = if last == ROW { to.len() } else { to.len() - 1 };
        let pairs = (0..whole).map(|at| (at as u64, to[at]));
        let pieces = Pieces::rows(Piece { src: first, dst: 0, len: ROW }, (ROW, ROW), pairs).unwrap();
        let cut = |row: &u64| Piece { src: first + whole as u64 * ROW, dst: row * ROW, len: last };
        let pieces = pieces.with_last(to.get(whole).map(cut));
        let mut moves = Moves { pieces: pieces.clone(), num_tensors: 1, ..Moves::default() };
        let pieces: Vec<_> = pieces.iter().collect();
        let plan = CopyPlan::moves(&mut moves).unwrap();
        // The rows of a slot need not have the size of the blocks.
        let (local, row) = if source { (Side::Source, slot) } else { (Side::Destination, ROW) };
        judge(&plan, &last_sources(&pieces), local, row, most);
    }
}

/// Checksums are a part of the protocol: both sides must calculate the same.
#[test]
fn checksums_keep_their_values() {
    let value = |name, cache, generation, request, bytes: &[u8]| {
        let mut block = Checksums::bound_to(name, CacheId(cache), generation, request).unwrap().block();
        bytes.iter().for_each(|byte| block.add(&[*byte]));
        block.value()
    };
    let bytes: Vec<u8> = (0..=255).cycle().take(1000).collect();
    let blocks = Name::Key(CacheKey::Blocks { model: 1 });
    let known = value(blocks, 3, 600, 77, &bytes);
    // The seed is the unseeded XXH3 of six words.
    let words: Vec<u8> = [2u64, 1, 0, 3, 600, 77].iter().flat_map(|word| word.to_le_bytes()).collect();
    let seed = twox_hash::XxHash3_64::oneshot(&words);
    assert_eq!(known, twox_hash::XxHash3_64::oneshot_with_seed(seed, &bytes));
    let mut whole = Checksums::bound_to(blocks, CacheId(3), 600, 77).unwrap().block();
    whole.add(&bytes);
    assert_eq!(whole.value(), known, "it does not matter how the bytes are cut");
    let others = [
        value(Name::Key(CacheKey::Blocks { model: 2 }), 3, 600, 77, &bytes),
        value(Name::Row { cache: CacheId(3), row: 1 }, 3, 600, 77, &bytes),
        value(Name::Key(CacheKey::Request { model: 1, id: 0 }), 3, 600, 77, &bytes),
        value(Name::Key(CacheKey::Prefix { model: 1, id: 0 }), 3, 600, 77, &bytes),
        value(blocks, 4, 600, 77, &bytes),
        value(blocks, 3, 601, 77, &bytes),
        value(blocks, 3, 600, 78, &bytes),
        value(blocks, 3, 600, 77, &bytes[1..]),
        value(blocks, 3, 600, 77, &[]),
    ];
    assert!(others.iter().all(|&other| other != known), "another cache, generation, request or content");
}

/// Memory of a device is hashed through host memory, many small pieces at a time, with the same result.
#[test]
fn memory_of_a_device_has_the_checksums_of_its_bytes() {
    let device = std::sync::Arc::new(SimDevice::new(HostReach::Staged));
    let engine = engine_on(config(4 << 20), device.clone());
    let shape = |placement| desc(placement, 3, 5, 40_000);
    let host = engine.allocate(&shape(Placement::Host), CacheKind::Blocks, &[]).unwrap();
    let far = engine.allocate(&shape(Placement::Device), CacheKind::Blocks, &[]).unwrap();
    let bytes = patterned(3, 3, 200_000);
    crate::fixtures::fill(&host, &bytes);
    let pairs: Vec<_> = (0..5).map(|row| (row, row)).collect();
    engine.swap_blocks(&crate::fixtures::end(&host), &crate::fixtures::end(&far), &pairs).run().unwrap();
    let copies = CopyEngine::new(&Config::new(Role::Mix, ClusterId(1)), DeviceSet::with_device(device));
    let blocks = [(0, 40_000), (39_000, 100_001)];
    let template = |dst_unit, pairs: Vec<(u32, u32)>, src, len| {
        let spans = vec![Span { src, dst: 0, len, count: 1, src_step: 0, dst_step: 0 }];
        Template::new((0, dst_unit), pairs, spans)
    };
    let plan = |first, count, templates| {
        let tensors = TensorSteps::consecutive(first);
        CopyPlan::from_templates(count, tensors, tensors, listed(templates)).unwrap()
    };
    let asked = (0..).zip(blocks).map(|(at, (start, len))| template(1 << 20, vec![(0, at)], start, len));
    let asked = plan(1, 2, asked.collect());
    let checksums = Checksums::bound_to(Name::Row { cache: CacheId(1), row: 0 }, CacheId(1), 0, 0).unwrap();
    let expected: Vec<u64> = blocks
        .iter()
        .map(|&(start, len)| {
            let mut block = checksums.block();
            bytes[1..].iter().for_each(|tensor| block.add(&tensor[start as usize..(start + len) as usize]));
            block.value()
        })
        .collect();
    let short = Span { src: 5, dst: 0, len: 3, count: 900, src_step: 7, dst_step: 3 };
    let long = Span { src: 7000, dst: 2700, len: 12_000, count: 1, src_step: 0, dst_step: 0 };
    let small = Template::new((20_000, 20_000), vec![(6, 0), (1, 1), (3, 2)], vec![short, long]);
    let (src, dst) = (TensorSteps { first: 0, step: 2 }, TensorSteps::consecutive(0));
    let small = CopyPlan::from_templates(2, src, dst, listed(vec![small])).unwrap();
    let memories = [(tensors(&host), Placement::Host), (tensors(&far), Placement::Device)];
    let of_small = memories
        .map(|memory| copies.block_sums(memory, (&small, Side::Source), checksums.clone(), soon()).unwrap());
    assert_eq!(of_small[0], of_small[1]);
    assert_eq!(of_small[0].iter().collect::<BTreeSet<_>>().len(), 3);
    for memory in memories {
        let sums = copies.block_sums(memory, (&asked, Side::Source), checksums.clone(), soon()).unwrap();
        assert_eq!(sums, expected);
        let passed = Deadline::after(std::time::Duration::ZERO);
        for count in [1, 64] {
            let pairs = (0..count).map(|at| (0, at)).collect();
            let late = plan(0, 3, vec![template(200_000, pairs, 0, 200_000)]);
            let blocks = (&late, Side::Source);
            let late = copies.block_sums(memory, blocks, checksums.clone(), passed).unwrap_err();
            assert_eq!(late.kind(), ErrorKind::Timeout);
        }
    }
    // 32 units. Each thread takes one host buffer after the other, and returns it for the next unit.
    let many = plan(0, 3, vec![template(200_000, (0..32).map(|at| (0, at)).collect(), 0, 200_000)]);
    let memory = (tensors(&far), Placement::Device);
    copies.block_sums(memory, (&many, Side::Source), checksums, soon()).unwrap();
    let buffers = copies.idle_host_buffers();
    assert!((1..=copies.workers().count()).contains(&buffers), "{buffers} host buffers for 32 units");
}
