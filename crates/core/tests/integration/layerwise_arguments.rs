//! Validation of the arguments of a layer-wise transfer, against the table of contract §8.1 row by row.

use std::fmt::Debug;

use llm_datadist_core::bindings::{CacheLayout, Destination, LayerRange, Name, RemoteCacheName, Target};
use llm_datadist_core::testing::validate::{self, LayerRows, LayerwiseArgs};
use llm_datadist_core::{CacheId, CacheKind, ClusterId, ErrorKind, Placement, Result};
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};

use crate::arguments::spec;
use crate::fixtures::{Tally, proptest_cases};

/// A row of the table, whether the arguments break it, and the start of the message if they do.
type Rule = (&'static str, bool, String);

/// The first row that the lists or the source break.
fn broken_by_lists(local: CacheLayout, args: &LayerwiseArgs) -> Option<Rule> {
    let (src, dst, size) = (args.src_blocks.len(), args.dst_blocks.len(), args.dst_block_bytes);
    let (tensors, per_layer) = (local.geometry.num_tensors(), args.tensors_per_layer);
    let (block, bytes) = (local.geometry.row_bytes(), size.unwrap_or(0));
    let rules: [Rule; 9] = [
        ("2", local.placement == Placement::Host, "src_cache is in host memory".into()),
        (
            "6",
            src > 0 && dst == 0,
            format!("transfer from blocks to cache is not supported: src_block_indices has {src} entries"),
        ),
        (
            "7",
            src > 0 && dst > 0 && src != dst,
            format!("src_block_indices has {src} entries and dst_block_indices {dst}"),
        ),
        ("8", src == 0 && dst > 0 && size.is_none(), "dst_block_memory_size was not given".into()),
        ("11", dst == 0 && bytes != 0, format!("dst_block_memory_size={bytes} must be None or 0")),
        ("per layer", per_layer == 0, "tensor_num_per_layer=0".into()),
        (
            "12",
            tensors.checked_rem(per_layer).is_some_and(|rest| rest > 0),
            format!("num_tensors={tensors} must be a multiple of tensor_num_per_layer={per_layer}"),
        ),
        (
            "block size",
            src > 0 && bytes != 0 && bytes != block,
            format!(
                "dst_block_memory_size={bytes} must be None, 0 or the size of a block of src_cache, {block}"
            ),
        ),
        (
            "blocks",
            src == 0 && dst > 0 && local.kind == CacheKind::Blocks,
            "src_cache is a blocks cache, and src_block_indices were not given".into(),
        ),
    ];
    rules.into_iter().find(|(_, broken, _)| *broken)
}

/// The first row that a destination breaks.
fn broken_by_destination(local: CacheLayout, args: &LayerwiseArgs, to: &Destination) -> Option<Rule> {
    let (row, LayerRange { first, end }, rows) = (to.src_row, to.src_layers, local.geometry.rows());
    let layers = local.geometry.num_tensors() / args.tensors_per_layer;
    // Counts the layers of the range one by one, and those of them that exist.
    let named: Vec<u32> = (first..end).collect();
    let existing = named.iter().filter(|&&layer| layer < layers).count();
    let needed = named.len() * args.tensors_per_layer as usize;
    let (addresses, remote_row) = match &to.target {
        Target::Addresses(addrs) => (addrs.len(), 0),
        Target::Cache { name: RemoteCacheName::Name(Name::Row { row, .. }), .. } => (needed, *row),
        Target::Cache { .. } => (needed, 0),
    };
    let blocks = !args.src_blocks.is_empty();
    let one_block = local.kind == CacheKind::Blocks && !blocks;
    let rules: [Rule; 5] = [
        (
            "13 slot",
            (blocks || one_block) && row != 0,
            format!("src_batch_index {row} != 0 while src is blocks (cluster=7)"),
        ),
        (
            "one block",
            one_block && remote_row != 0,
            format!("batch_index={remote_row} of cache_key must be 0: src_cache is a blocks cache"),
        ),
        (
            "13 range",
            named.is_empty() || existing < named.len(),
            format!(
                "src_layer_range={first}..{end} must be a range of at least one layer within 0..{layers}"
            ),
        ),
        ("13 addresses", addresses != needed, format!("len(dst_addrs)={addresses} must be {needed}")),
        (
            "13a",
            !blocks && u64::from(row) >= rows,
            format!("src_batch_index {row} out of range: [0, {rows}) (cluster=7)"),
        ),
    ];
    rules.into_iter().find(|(_, broken, _)| *broken)
}

/// Checks that the call failed because of `expected`, or passed if that is `None`. Counts the row that was the first one broken.
fn check<T: Debug>(seen: &Tally, result: &Result<T>, expected: Option<Rule>) -> TestCaseResult {
    seen.count(expected.as_ref().map_or("none", |rule| rule.0));
    match (result, expected) {
        (Ok(_), None) => Ok(()),
        (Err(error), Some((row, _, start))) => {
            prop_assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            let text = error.original().to_string();
            prop_assert!(text.starts_with(&start), "row {}: {}: no {:?}", row, text, start);
            Ok(())
        }
        (result, expected) => Err(TestCaseError::fail(format!("{result:?} instead of {expected:?}"))),
    }
}

fn layouts() -> impl Strategy<Value = CacheLayout> {
    let kind = prop_oneof![Just(CacheKind::Batch), Just(CacheKind::Blocks)];
    let placement = prop_oneof![7 => Just(Placement::Device), 1 => Just(Placement::Host)];
    (1..9u32, 1..5i64, 1..5i64, kind, placement)
        .prop_map(|(tensors, rows, bytes, kind, placement)| spec(tensors, rows, bytes, kind, placement))
}

fn arguments(least_per_layer: u32) -> impl Strategy<Value = LayerwiseArgs> {
    let list = || prop_oneof![Just(vec![]), prop::collection::vec(any::<u64>(), 1..4)];
    let size = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (1..6u64).prop_map(Some), 1 => Just(Some(u64::MAX))];
    let all = (list(), list(), size, least_per_layer..4);
    all.prop_map(|(src_blocks, dst_blocks, dst_block_bytes, tensors_per_layer)| LayerwiseArgs {
        src_blocks,
        dst_blocks,
        dst_block_bytes,
        tensors_per_layer,
    })
}

/// The binding calls the parts between checks of its own, so they must refuse what the whole refuses.
#[test]
fn lists_and_source_are_checked_in_the_order_of_the_table() {
    let seen = Tally::default();
    TestRunner::new(proptest_cases(6000))
        .run(&(layouts(), arguments(0)), |(local, args)| {
            let whole = validate::layerwise(local, &args);
            let expected = broken_by_lists(local, &args);
            let row = expected.as_ref().map(|rule| rule.0);
            check(&seen, &whole, expected)?;
            let parts = validate::on_device("src_cache", local.placement)
                .and_then(|()| validate::block_lists(&args))
                .and_then(|()| validate::block_bytes_alone(&args))
                .and_then(|()| validate::whole_layers(local.geometry, args.tensors_per_layer));
            match parts {
                Ok(layers) => {
                    prop_assert_eq!(layers * args.tensors_per_layer, local.geometry.num_tensors());
                    prop_assert!(matches!(row, None | Some("block size" | "blocks")), "{:?}", row);
                }
                Err(ref part) => prop_assert_eq!(Some(part), whole.as_ref().err()),
            }
            if let Ok(rows) = whole {
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
    seen.check(10, 10);
}

#[test]
fn destinations_are_checked_in_the_order_of_the_table() {
    let seen = Tally::default();
    let row = || prop_oneof![2 => Just(0), 2 => 1..6u32, 1 => Just(u32::MAX)];
    let target = prop_oneof![
        3 => prop::collection::vec(any::<u64>(), 0..9).prop_map(Target::Addresses),
        2 => (row(), any::<u32>()).prop_map(|(row, first_layer)| {
            Target::Cache { name: Name::Row { cache: CacheId(1), row }.into(), first_layer: Some(first_layer) }
        }),
    ];
    let range = prop_oneof![9 => (0..5u32, 0..7u32), 1 => Just((0, 1000))];
    let cases = (layouts(), arguments(1), target, range, row(), any::<bool>());
    TestRunner::new(proptest_cases(6000))
        .run(&cases, |(local, mut args, target, (first, end), src_row, fits)| {
            if !local.geometry.num_tensors().is_multiple_of(args.tensors_per_layer) {
                args.tensors_per_layer = 1; // `layerwise` refuses this before
            }
            let src_layers = LayerRange { first, end };
            let mut to = Destination { cluster: ClusterId(7), target, src_layers, src_row };
            if let (true, Target::Addresses(addrs)) = (fits, &mut to.target) {
                addrs.resize((end.saturating_sub(first) * args.tensors_per_layer) as usize, 1);
            }
            let result = validate::destination(local, &args, &to);
            if let Err(error) = &result {
                prop_assert_eq!(error.fact("cluster"), Some("7"));
            }
            check(&seen, &result, broken_by_destination(local, &args, &to))
        })
        .unwrap();
    seen.check(6, 10);
}
