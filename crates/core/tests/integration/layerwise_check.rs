//! The entry checks of a layer-wise transfer against the table of contract §8.1, row by row.
//!
//! Not for: where bytes land at a peer, or what moves.

use std::cell::RefCell;
use std::collections::BTreeMap;

use llm_datadist_core::testing::validate::{self, LayerRows, LayerwiseArgs, Side};
use llm_datadist_core::{
    CacheDesc, CacheId, CacheKind, ClusterId, DataType, Destination, ErrorKind, Geometry, LayerRange, Name,
    Placement, Result, Target,
};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};

use crate::bed::proptest_cases;

/// What a refusal is about: a row of the table, and words of its text.
type Row = (&'static str, Vec<String>);

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// The first row that the lists and the source break, by trying one after the other.
fn broken(local: Side, args: &LayerwiseArgs) -> Option<Row> {
    let (src, dst, size) = (args.src_blocks.len(), args.dst_blocks.len(), args.dst_block_bytes);
    let (tensors, per_layer) = (local.geometry.num_tensors(), args.tensors_per_layer);
    let block = local.geometry.row_bytes();
    let table: [(&'static str, bool, Vec<String>); 9] = [
        ("2", local.placement == Placement::Host, words(&["src_cache", "host"])),
        (
            "6",
            src > 0 && dst == 0,
            words(&["transfer from blocks to cache is not supported", &src.to_string()]),
        ),
        (
            "7",
            src > 0 && dst > 0 && src != dst,
            words(&[&format!("src_block_indices has {src} entries and dst_block_indices {dst}")]),
        ),
        ("8", src == 0 && dst > 0 && size.is_none(), words(&["dst_block_memory_size was not given"])),
        (
            "11",
            dst == 0 && size.unwrap_or(0) != 0,
            words(&[&format!("dst_block_memory_size={}", size.unwrap_or(0)), "None or 0"]),
        ),
        ("per layer", per_layer == 0, words(&["tensor_num_per_layer=0"])),
        (
            "12",
            per_layer != 0 && tensors % per_layer.max(1) != 0,
            words(&[&format!("num_tensors={tensors}"), &format!("tensor_num_per_layer={per_layer}")]),
        ),
        (
            "8.2",
            src > 0 && size.unwrap_or(0) != 0 && size != Some(block),
            words(&[&format!("dst_block_memory_size={}", size.unwrap_or(0)), &block.to_string()]),
        ),
        (
            "blocks",
            src == 0 && dst > 0 && local.kind == CacheKind::Blocks,
            words(&["blocks cache", "src_block_indices were not given"]),
        ),
    ];
    table.into_iter().find(|(_, broken, _)| *broken).map(|(row, _, text)| (row, text))
}

/// The first row that a destination breaks.
fn broken_by(local: Side, args: &LayerwiseArgs, to: &Destination) -> Option<Row> {
    let blocks = !args.src_blocks.is_empty();
    let (row, LayerRange { first, end }) = (to.src_row, to.src_layers);
    let layers = local.geometry.num_tensors() / args.tensors_per_layer;
    // By counting: the layers of the range, and those of them that are there.
    let named: Vec<u32> = (first..end).collect();
    let there = named.iter().filter(|&&layer| layer < layers).count();
    let addresses = match &to.target {
        Target::Addresses(addrs) => Some(addrs.len()),
        Target::Cache { .. } => None,
    };
    let needed = named.len() * args.tensors_per_layer as usize;
    let rows = local.geometry.rows();
    let one_block = local.kind == CacheKind::Blocks && !blocks;
    let remote_row = match &to.target {
        Target::Cache { name: Name::Row { row, .. }, .. } => *row,
        _ => 0,
    };
    let table: [(&'static str, bool, Vec<String>); 5] = [
        (
            "13 slot",
            (blocks || one_block) && row != 0,
            words(&[&format!("src_batch_index {row} != 0 while src is blocks")]),
        ),
        (
            "one block",
            one_block && remote_row != 0,
            words(&[&format!("batch_index={remote_row} of cache_key must be 0"), "one slot of one block"]),
        ),
        (
            "13 range",
            named.is_empty() || there < named.len(),
            words(&[&format!("src_layer_range={first}..{end}"), &format!("0..{layers}")]),
        ),
        (
            "13 addresses",
            addresses.is_some_and(|count| count != needed),
            words(&[&format!("len(dst_addrs)={}", addresses.unwrap_or(0)), &needed.to_string()]),
        ),
        (
            "13a",
            !blocks && u64::from(row) >= rows,
            words(&[&format!("src_batch_index {row} out of range: [0, {rows})")]),
        ),
    ];
    table.into_iter().find(|(_, broken, _)| *broken).map(|(row, _, text)| (row, text))
}

/// Refused just for that row, or not at all.
fn judge<T: std::fmt::Debug>(result: &Result<T>, expected: Option<Row>, seen: &Seen) -> TestCaseResult {
    *seen.borrow_mut().entry(expected.as_ref().map_or("passed", |(row, _)| row)).or_default() += 1;
    match (result, expected) {
        (Ok(_), None) => Ok(()),
        (Err(error), Some((row, texts))) => {
            prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            for text in texts {
                prop_assert!(error.to_string().contains(&text), "row {}: {}: no {:?}", row, error, text);
            }
            Ok(())
        }
        (result, expected) => Err(TestCaseError::fail(format!("{result:?} instead of {expected:?}"))),
    }
}

/// How often each row was the one.
type Seen = RefCell<BTreeMap<&'static str, u32>>;

fn all_seen(seen: &Seen, rows: usize) {
    let seen = seen.borrow();
    assert_eq!(seen.len(), rows, "{seen:?}");
    assert!(seen.values().all(|&count| count >= 10), "{seen:?}");
}

fn side(num_tensors: u32, rows: i64, row_bytes: i64, kind: CacheKind, placement: Placement) -> Side {
    let desc = CacheDesc { num_tensors, shape: vec![rows, row_bytes], data_type: DataType::Uint8, placement };
    Side { geometry: Geometry::new(&desc).unwrap(), kind, placement }
}

fn sides() -> impl Strategy<Value = Side> {
    let kind = prop_oneof![Just(CacheKind::Batch), Just(CacheKind::Blocks)];
    let placement = prop_oneof![7 => Just(Placement::Device), 1 => Just(Placement::Host)];
    (1..9u32, 1..5i64, 1..5i64, kind, placement)
        .prop_map(|(tensors, rows, bytes, kind, placement)| side(tensors, rows, bytes, kind, placement))
}

fn arguments(least_per_layer: u32) -> impl Strategy<Value = LayerwiseArgs> {
    let list = || prop_oneof![Just(vec![]), prop::collection::vec(any::<u64>(), 1..4)];
    let size = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (1..6u64).prop_map(Some), 1 => Just(Some(u64::MAX))];
    (list(), list(), size, least_per_layer..4).prop_map(
        |(src_blocks, dst_blocks, dst_block_bytes, per_layer)| LayerwiseArgs {
            src_blocks,
            dst_blocks,
            dst_block_bytes,
            tensors_per_layer: per_layer,
        },
    )
}

#[test]
fn lists_and_source_are_checked_in_the_order_of_the_table() {
    let seen = Seen::default();
    TestRunner::new(proptest_cases(6000))
        .run(&(sides(), arguments(0)), |(local, args)| {
            let result = validate::layerwise(local, &args);
            judge(&result, broken(local, &args), &seen)?;
            if let Ok(rows) = result {
                let expected = match (args.src_blocks.is_empty(), args.dst_blocks.is_empty()) {
                    (false, _) => LayerRows::Blocks { src: args.src_blocks, dst: args.dst_blocks },
                    (true, true) => LayerRows::Slot,
                    (true, false) => {
                        let block_bytes = args.dst_block_bytes.unwrap();
                        LayerRows::SlotToBlocks { dst: args.dst_blocks, block_bytes }
                    }
                };
                prop_assert_eq!(rows, expected);
            }
            Ok(())
        })
        .unwrap();
    all_seen(&seen, 10);
}

/// The parts that the binding calls between its own checks refuse what the whole refuses, and nothing else.
#[test]
fn the_parts_are_the_whole() {
    TestRunner::new(proptest_cases(3000))
        .run(&(sides(), arguments(0)), |(local, args)| {
            let parts = validate::on_device("src_cache", local.placement)
                .and_then(|()| validate::block_lists(&args))
                .and_then(|()| validate::block_bytes_alone(&args))
                .and_then(|()| validate::whole_layers(local.geometry, args.tensors_per_layer));
            match (parts, validate::layerwise(local, &args)) {
                (Err(part), whole) => prop_assert_eq!(part.to_string(), whole.unwrap_err().to_string()),
                (Ok(layers), whole) => {
                    prop_assert_eq!(layers * args.tensors_per_layer, local.geometry.num_tensors());
                    let after = broken(local, &args).map(|(row, _)| row);
                    prop_assert!(whole.is_ok() || matches!(after, Some("8.2" | "blocks")), "{:?}", after);
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn destinations_are_checked_in_the_order_of_the_table() {
    let seen = Seen::default();
    let target = prop_oneof![
        3 => prop::collection::vec(any::<u64>(), 0..9).prop_map(Target::Addresses),
        2 => any::<u32>().prop_map(|first_layer| {
            Target::Cache { name: Name::Row { cache: CacheId(1), row: 0 }, first_layer }
        }),
    ];
    let range = prop_oneof![
        9 => (0..5u32, 0..7u32),
        1 => Just((0, u32::MAX)),
    ];
    let row = prop_oneof![2 => Just(0), 2 => 1..6u32, 1 => Just(u32::MAX)];
    let cases = (sides(), arguments(1), target, range, row, any::<bool>());
    TestRunner::new(proptest_cases(6000))
        .run(&cases, |(local, mut args, target, (first, end), src_row, fits)| {
            if !local.geometry.num_tensors().is_multiple_of(args.tensors_per_layer) {
                args.tensors_per_layer = 1; // that is a row before these
            }
            let mut to = Destination {
                cluster: ClusterId(7),
                target,
                src_layers: LayerRange { first, end: end.min(1000) },
                src_row,
            };
            if let (true, Target::Addresses(addrs)) = (fits, &mut to.target) {
                let layers = to.src_layers.end.saturating_sub(first);
                addrs.resize((layers * args.tensors_per_layer) as usize, 1);
            }
            let result = validate::destination(local, &args, &to);
            if let Err(error) = &result {
                prop_assert_eq!(error.fact("cluster"), Some("7"));
            }
            judge(&result, broken_by(local, &args, &to), &seen)
        })
        .unwrap();
    all_seen(&seen, 5);
}

/// The texts that users and tests of the original look for, letter by letter.
#[test]
fn texts_of_the_contract() {
    let local = side(4, 4, 16, CacheKind::Batch, Placement::Device);
    let text = |result: Result<()>| result.unwrap_err().to_string();
    let args = |src: &[u64], dst: &[u64]| LayerwiseArgs {
        src_blocks: src.to_vec(),
        dst_blocks: dst.to_vec(),
        dst_block_bytes: None,
        tensors_per_layer: 2,
    };
    let to = |src_row| Destination {
        cluster: ClusterId(2),
        target: Target::Addresses(vec![1; 4]),
        src_layers: LayerRange { first: 0, end: 2 },
        src_row,
    };
    let refused = text(validate::layerwise(local, &args(&[1, 2], &[])).map(drop));
    assert!(refused.starts_with("transfer from blocks to cache is not supported"), "{refused}");
    let refused = text(validate::destination(local, &args(&[1], &[2]), &to(3)));
    assert_eq!(refused, "src_batch_index 3 != 0 while src is blocks (cluster=2)");
    let refused = text(validate::destination(local, &args(&[], &[]), &to(4)));
    assert_eq!(refused, "src_batch_index 4 out of range: [0, 4) (cluster=2)");
    validate::destination(local, &args(&[], &[]), &to(3)).unwrap();
    validate::destination(local, &args(&[1], &[2]), &to(0)).unwrap();
}
