//! Caches whose tensors differ: checked sizes, descriptions by peers, allocation, and copies on the simulated device.
//!
//! `links::mixed_tensors` has pulls, pushes and layer-wise transfers.

use std::sync::Arc;

use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::model::TensorSpan;
use llm_datadist_core::testing::protocol::{
    CHECKSUM, EntryVersion, HEADER, WireCache, WireSizes, decode, encode,
};
use llm_datadist_core::{
    CacheDesc, CacheId, CacheKind, CopyArgs, DataDist, DataType, Error, ErrorKind, Geometry, KvLayout,
    KvPlanes, MixedSizes, Placement, SubRow, SwapInPath, TensorDesc, TokenOrder, Verify,
};
use llm_datadist_testing::SimDevice;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{Own, config, end, engine_on, pattern, proptest_cases, tensor_bytes};

fn tensor(rows: i64, row_bytes: i64, row_stride: Option<u64>) -> TensorDesc {
    TensorDesc { count: 1, shape: vec![rows, row_bytes], data_type: DataType::Uint8, row_stride }
}

fn desc(placement: Placement, tensors: Vec<TensorDesc>) -> CacheDesc {
    CacheDesc::of_tensors(tensors, placement).unwrap()
}

fn refused<T: std::fmt::Debug>(result: Result<T, Error>, texts: &[&str]) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    for text in texts {
        assert!(error.to_string().contains(text), "{error} does not contain {text}");
    }
}

#[test]
fn equal_tensors_are_an_ordinary_description() {
    let equal = desc(Placement::Host, vec![tensor(4, 8, None); 3]);
    assert!(equal.tensors.is_empty() && equal.num_tensors == 3);
    assert_eq!(MixedSizes::of(&equal).unwrap(), None);
    assert_eq!(Geometry::new(&equal).unwrap().bytes(), 96);
}

/// The sizes of every tensor are those of its description, and some tensors have common sizes exactly if their sizes are
/// equal.
#[test]
fn sizes_are_those_of_each_tensor() {
    let one = (1..4i64, 0..3u64).prop_map(|(bytes, gap)| (bytes * 4, gap));
    let spans = (0..14u32, 1..4u32, 0..8u32);
    TestRunner::new(proptest_cases(2000))
        .run(&(vec(one, 1..12), spans), |(tensors, (first, step, count))| {
            let stride = |&(bytes, gap): &(i64, u64)| bytes.unsigned_abs() + gap;
            let described = tensors.iter().map(|one| tensor(5, one.0, Some(stride(one)))).collect::<Vec<_>>();
            let desc = desc(Placement::Host, described);
            let Some(sizes) = MixedSizes::of(&desc).unwrap() else {
                prop_assert!(tensors.iter().all(|one| *one == tensors[0]));
                return Ok(());
            };
            let expected = |one: &(i64, u64)| {
                (5, one.0.unsigned_abs(), stride(one), 4 * stride(one) + one.0.unsigned_abs())
            };
            let mut total = 0;
            for (number, one) in (0..).zip(&tensors) {
                let geometry = sizes.run(number).geometry;
                let got =
                    (geometry.rows(), geometry.row_bytes(), geometry.row_stride(), geometry.tensor_bytes());
                prop_assert_eq!(got, expected(one));
                prop_assert_eq!(geometry.num_tensors() as usize, tensors.len());
                total += expected(one).3;
            }
            prop_assert_eq!(sizes.bytes(), total);
            prop_assert_eq!(
                sizes.smallest_tensor(),
                tensors.iter().map(|one| expected(one).3).min().unwrap()
            );
            prop_assert_eq!(sizes.counted().map(|(_, count)| count).sum::<u32>() as usize, tensors.len());
            prop_assert!(sizes.runs().windows(2).all(|pair| pair[0].geometry != pair[1].geometry));
            let touched: Vec<_> =
                (0..count).filter_map(|k| tensors.get((first + k * step) as usize)).collect();
            let common = sizes.common(TensorSpan { first, step, count });
            prop_assert_eq!(common.is_ok(), touched.windows(2).all(|pair| pair[0] == pair[1]));
            if let (Ok(common), Some(one)) = (common, touched.first()) {
                prop_assert_eq!(common.row_stride(), stride(one));
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn descriptions_that_do_not_fit_are_refused() {
    let of = |tensors: Vec<TensorDesc>| MixedSizes::of(&desc(Placement::Host, tensors));
    refused(CacheDesc::of_tensors(vec![], Placement::Host), &["num_tensors=0"]);
    refused(
        of(vec![tensor(4, 8, None), tensor(5, 8, None)]),
        &["dimension 0=5", "4, the number of rows", "tensor=1"],
    );
    refused(of(vec![tensor(4, 8, None), tensor(4, 0, None)]), &["shape=[4, 0]", "tensor=1"]);
    refused(of(vec![tensor(4, 8, None), tensor(4, 8, Some(7))]), &["row_stride=7", "tensor=1"]);
    let half = i64::MAX / 2 - 1;
    refused(
        of(vec![tensor(1, half, None), tensor(1, half - 1, None), tensor(1, 8, None)]),
        &["2^63", "tensor=2"],
    );
    let alternating =
        |count: usize| (0..count).map(|at| tensor(4, 8 + (at % 2) as i64, None)).collect::<Vec<_>>();
    assert_eq!(of(alternating(4096)).unwrap().unwrap().runs().len(), 4096);
    refused(of(alternating(4097)), &["at most 4096 runs"]);
    let good = desc(Placement::Host, alternating(2));
    refused(MixedSizes::of(&CacheDesc { num_tensors: 3, ..good.clone() }), &["num_tensors=3", "must be 2"]);
    refused(Geometry::new(&good), &["2 descriptions", "equal tensors"]);
    let layout = KvLayout {
        tokens_per_block: 1,
        heads: 0..1,
        total_heads: 1,
        head_dim: 8,
        order: TokenOrder::Nhd,
        kv: KvPlanes::Separate,
        layers: 0..1,
        model: "m".into(),
    };
    refused(MixedSizes::of(&CacheDesc { kv_layout: Some(Box::new(layout)), ..good }), &["layout", "differ"]);
}

fn record() -> WireCache {
    let sizes = MixedSizes::of(&desc(
        Placement::Host,
        vec![tensor(4, 8, None), tensor(4, 8, None), tensor(4, 16, Some(20)), tensor(4, 8, None)],
    ))
    .unwrap()
    .unwrap();
    let layout = llm_datadist_core::CacheLayout {
        geometry: sizes.first(),
        kind: CacheKind::Blocks,
        placement: Placement::Host,
    };
    let mut record = WireCache::new(EntryVersion { index: 1, generation: 2 }, CacheId(3), 0, layout);
    record.mixed = WireSizes::list(&sizes).unwrap();
    record
}

/// The bytes of the runs: they may change only with the version of the protocol.
#[test]
fn sizes_survive_the_message() {
    let record = record();
    let frame = encode(&record).unwrap();
    let message = &frame[..frame.len() - CHECKSUM];
    assert!(message.ends_with(&[3, 0, 8, 8, 2, 16, 20, 3, 8, 8, 0, 0]), "{frame:?}");
    let read: WireCache = decode(&frame[HEADER..]).unwrap();
    assert_eq!(read, record);
    let sizes = read.mixed_sizes().unwrap().unwrap();
    let strides = (0..4).map(|tensor| sizes.run(tensor).geometry.row_stride()).collect::<Vec<_>>();
    assert_eq!((strides, sizes.bytes()), (vec![8, 8, 20, 8], 3 * 32 + 76));
    assert_eq!(WireCache { mixed: vec![], ..read }.mixed_sizes().unwrap(), None);
}

#[test]
fn a_peer_cannot_describe_impossible_tensors() {
    let changes: [fn(&mut WireCache); 12] = [
        |record| record.mixed[0].first = 1,
        |record| record.mixed[1].first = 0,
        |record| record.mixed[2].first = 2,
        |record| record.mixed[2].first = 4,
        |record| record.mixed[2].first = u32::MAX,
        |record| record.mixed[1].row_bytes = 0,
        |record| record.mixed[1].row_bytes = u64::MAX,
        |record| record.mixed[1].row_stride = 15,
        |record| record.mixed[1].row_stride = u64::MAX,
        |record| record.mixed[0].row_bytes = 4,
        |record| record.row_stride = 9,
        |record| record.num_tensors = 3,
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut bad = record();
        change(&mut bad);
        let error = bad.mixed_sizes().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked, "change {index}: {error}");
        assert!(error.to_string().contains("the peer described cache 3"), "{error}");
    }
    // More runs than a cache may have are refused while the message is read.
    let run = WireSizes { first: 0, row_bytes: 8, row_stride: 8 };
    let long = WireCache { mixed: vec![run; MixedSizes::MAX_RUNS + 1], ..record() };
    assert!(decode::<WireCache>(&encode(&long).unwrap()[HEADER..]).is_err());
}

/// Tensors of random sizes: bytes of a row and bytes after it.
fn random_tensors(seed: u64, rows: i64, gaps: bool) -> Vec<TensorDesc> {
    let size = |at: u64| {
        let mixed = (seed + at / 2).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40;
        let bytes = 1 + (mixed % 400).cast_signed();
        let stride = (gaps && at.is_multiple_of(3)).then(|| bytes.unsigned_abs() + 7 + mixed % 5);
        tensor(rows, bytes, stride)
    };
    (0..9).map(size).collect()
}

/// What copying part of each row, pair by pair, leaves in `to`.
fn naive(
    from: &[Vec<u8>],
    src: &[TensorDesc],
    to: &mut [Vec<u8>],
    dst: &[TensorDesc],
    pairs: &[(i64, i64)],
    part: SubRow,
) {
    let stride = |one: &TensorDesc| one.row_stride.unwrap_or(one.shape[1].unsigned_abs());
    for tensor in 0..from.len() {
        let rest = (src[tensor].shape[1].unsigned_abs() - part.src_offset)
            .min(dst[tensor].shape[1].unsigned_abs() - part.dst_offset);
        let len = part.length.unwrap_or(rest) as usize;
        for &(read, written) in pairs {
            let read = (read.unsigned_abs() * stride(&src[tensor]) + part.src_offset) as usize;
            let written = (written.unsigned_abs() * stride(&dst[tensor]) + part.dst_offset) as usize;
            let bytes = from[tensor][read..read + len].to_vec();
            to[tensor][written..written + len].copy_from_slice(&bytes);
        }
    }
}

fn filled(desc: &CacheDesc, seed: u8) -> Vec<Vec<u8>> {
    let tensor = |(at, bytes): (usize, usize)| (0..bytes).map(|byte| pattern(seed, at, byte)).collect();
    tensor_bytes(desc).into_iter().enumerate().map(tensor).collect()
}

/// Swaps between host rows and rows of the simulated device, and copies between rows of one cache, on every path.
#[test]
fn swaps_and_copies_move_the_rows_of_each_tensor() {
    let rows = 40;
    let pairs: Vec<(i64, i64)> = (0..rows).map(|k| (k * 7 % rows, k * 11 % rows)).collect();
    let within: Vec<(i64, i64)> = (0..30).map(|k| (k * 7 % rows, (k * 11 + 1) % rows)).collect();
    for (reach, path) in [
        (HostReach::Direct, SwapInPath::Direct),
        (HostReach::Direct, SwapInPath::Ring),
        (HostReach::Staged, SwapInPath::Ring),
    ] {
        for (seed, verify) in [(1, Verify::Off), (2, Verify::Full), (3, Verify::Sample)] {
            let mut config = config(64 << 20);
            (config.swap_in, config.verify) = (path, verify);
            // The engine compares what it can read; memory of this device is not.
            if reach == HostReach::Staged {
                config.verify = Verify::Off;
            }
            let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
            let (here, there) = (random_tensors(seed, rows, true), random_tensors(seed, rows, false));
            let host_desc = desc(Placement::Host, here.clone());
            let host = Own::loose(&host_desc, CacheKind::Blocks);
            let back = Own::loose(&host_desc, CacheKind::Blocks);
            let device =
                engine.allocate(&desc(Placement::Device, there.clone()), CacheKind::Blocks, &[]).unwrap();
            let (written, mut expected) = (filled(&host_desc, 1), filled(&host_desc, 2));
            host.write(&written);
            back.write(&expected);
            let all: Vec<(i64, i64)> = (0..rows).map(|row| (row, row)).collect();
            let mut model = filled(&desc(Placement::Device, there.clone()), 3);
            engine.swap_blocks(&host.end(), &end(&device), &all).run().unwrap();
            naive(&written, &here, &mut model, &there, &all, SubRow::default());
            engine.swap_blocks(&host.end(), &end(&device), &pairs).run().unwrap();
            naive(&written, &here, &mut model, &there, &pairs, SubRow::default());
            engine.copy_blocks(&end(&device), &within).run().unwrap();
            let before = model.clone();
            let mut after = model;
            for &pair in &within {
                let from = after.clone();
                naive(&from, &there, &mut after, &there, &[pair], SubRow::default());
            }
            assert!(before != after);
            engine.swap_blocks(&end(&device), &back.end(), &pairs).run().unwrap();
            naive(&after, &there, &mut expected, &here, &pairs, SubRow::default());
            assert!(back.read() == expected, "{reach:?}, {path:?}, {seed}");
            assert!(back.outside_untouched() > 0);
            let stats = engine.stats();
            let copies = stats.ops.iter().map(|(_, op)| op.calls).sum::<u64>();
            assert!(copies >= 4, "{copies}");
        }
    }
}

fn plain_engine() -> DataDist {
    engine_on(config(64 << 20), Arc::new(SimDevice::new(HostReach::Direct)))
}

#[test]
fn slots_are_copied_whole() {
    let engine = plain_engine();
    let (here, there) = (random_tensors(4, 3, true), random_tensors(4, 3, false));
    let (src_desc, dst_desc) = (desc(Placement::Host, here.clone()), desc(Placement::Host, there.clone()));
    let (src, dst) = (Own::loose(&src_desc, CacheKind::Batch), Own::loose(&dst_desc, CacheKind::Batch));
    let (written, mut expected) = (filled(&src_desc, 1), filled(&dst_desc, 2));
    src.write(&written);
    dst.write(&expected);
    let args = |offset, size| CopyArgs { dst_batch_index: 2, src_batch_index: 1, offset, size };
    engine.copy_cache(&dst.end(), &src.end(), args(0, -1)).run().unwrap();
    naive(&written, &here, &mut expected, &there, &[(1, 2)], SubRow::default());
    assert!(dst.read() == expected);
    refused(engine.copy_cache(&dst.end(), &src.end(), args(0, 1)).run(), &["size=1", "whole slots"]);
    let wide =
        Own::loose(&desc(Placement::Host, vec![tensor(3, 8, None), tensor(3, 9, None)]), CacheKind::Batch);
    let narrow =
        Own::loose(&desc(Placement::Host, vec![tensor(3, 8, None), tensor(3, 7, None)]), CacheKind::Batch);
    let (a, b) =
        (filled(&desc(Placement::Host, vec![tensor(3, 8, None), tensor(3, 9, None)]), 1), narrow.read());
    wide.write(&a);
    for (from, to) in [(&wide, &narrow), (&narrow, &wide)] {
        refused(engine.copy_cache(&to.end(), &from.end(), args(0, -1)).run(), &["tensor=1"]);
    }
    assert!(wide.read() == a && narrow.read() == b);
}

#[test]
fn parts_of_rows_fit_the_shortest_row() {
    let engine = plain_engine();
    let tensors = vec![tensor(8, 64, Some(80)), tensor(8, 32, None), tensor(8, 64, None)];
    let cache = Own::loose(&desc(Placement::Host, tensors.clone()), CacheKind::Blocks);
    let mut expected = filled(&desc(Placement::Host, tensors.clone()), 1);
    cache.write(&expected);
    let part = SubRow { src_offset: 0, dst_offset: 16, length: Some(16) };
    engine.copy_sub_rows(&cache.end(), &[(0, 3), (5, 1)], part).run().unwrap();
    let from = expected.clone();
    naive(&from, &tensors, &mut expected, &tensors, &[(0, 3), (5, 1)], part);
    assert!(cache.read() == expected);
    let long = SubRow { length: Some(40), ..SubRow::default() };
    refused(engine.copy_sub_rows(&cache.end(), &[(0, 3)], long).run(), &["length=40", "1 to 32", "tensor=1"]);
    assert!(cache.read() == expected);
}

/// Every size in a call has a plan of its own, so there must not be too many.
#[test]
fn a_call_has_few_different_sizes() {
    let engine = plain_engine();
    let cache = |count| {
        Own::loose(
            &desc(Placement::Host, (1..=count).map(|b| tensor(4, b, None)).collect()),
            CacheKind::Blocks,
        )
    };
    let (most, more) = (cache(64), cache(65));
    engine.copy_blocks(&most.end(), &[(0, 1)]).run().unwrap();
    refused(engine.copy_blocks(&more.end(), &[(0, 1)]).run(), &["more than 64 different sizes"]);
}

/// A pool gives each tensor its own pages, takes all of them back, and is as before after a failure.
#[test]
fn pools_hold_tensors_of_each_size() {
    let engine = plain_engine();
    let used = || engine.stats().host_pool.unwrap().pool.used_bytes;
    let page = 1 << 16;
    let tensors = vec![tensor(2, 100, None), tensor(2, 100, None), tensor(2, page, Some(page as u64 + 8))];
    let cache = engine.allocate(&desc(Placement::Host, tensors), CacheKind::Blocks, &[]).unwrap();
    assert_eq!(used(), 2 * page as u64 + 3 * page as u64);
    let mut ranges: Vec<(u64, u64)> =
        cache.addrs().iter().zip([200, 200, 2 * page as u64 + 8]).map(|(&at, len)| (at, at + len)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "{ranges:?}");
    assert_eq!(cache.bytes(), 400 + 2 * page as u64 + 8);
    refused(cache.layout(), &["tensors are equal", "runs=2"]);
    engine.deallocate(cache.id()).unwrap();
    drop(cache);
    assert_eq!(used(), 0);
    let too_large = desc(Placement::Host, vec![tensor(1, 1 << 20, None), tensor(1, 1 << 30, None)]);
    let error = engine.allocate(&too_large, CacheKind::Blocks, &[]).unwrap_err();
    assert_eq!((error.kind(), error.fact("tensor")), (ErrorKind::OutOfMemory, Some("1")), "{error}");
    assert_eq!(used(), 0);
    let two = desc(Placement::Host, vec![tensor(1, 8, None), tensor(1, 9, None)]);
    refused(engine.allocate_contiguous(&two, CacheKind::Blocks, &[]), &["contiguous=True", "differ"]);
}
