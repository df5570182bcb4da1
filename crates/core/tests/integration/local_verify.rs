//! Verified copies and swaps within one engine: through the staging ring and directly, in chains, and with flipped bits.

use llm_datadist_core::bindings::{Cache, Config, CopyArgs, DataDist, SwapInPath};
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::{CacheKind, Error, ErrorKind, Placement, Verify};
use llm_datadist_testing::SimDevice;
use proptest::prelude::*;
use std::sync::Arc;

use crate::fixtures::{self, config, contents, desc, end, engine_on, fill, patterned, proptest_cases};
use crate::moved::{after_the_move, flip};

fn engine(verify: Verify, path: SwapInPath) -> DataDist {
    let config = Config { verify, swap_in: path, ..config(4 << 20) };
    engine_on(config, Arc::new(llm_datadist_core::testing::device::HostDevice))
}

fn cache(engine: &DataDist, placement: Placement) -> Arc<Cache> {
    engine.allocate(&desc(placement, 3, 32, 5000), CacheKind::Blocks, &[]).unwrap()
}

fn failed(result: Result<(), Error>, block: u64) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::VerifyFailed, "{error}");
    assert_eq!(error.fact("blocks"), Some(block.to_string().as_str()), "{error}");
}

#[test]
fn every_bit_that_changes_in_a_swap_is_found() {
    for path in [SwapInPath::Direct, SwapInPath::Ring] {
        let engine = engine(Verify::Full, path);
        let (host, far) = (cache(&engine, Placement::Host), cache(&engine, Placement::Device));
        fill(&host, &patterned(1, 3, 160_000));
        let pairs: Vec<_> = (0..32).map(|row| (row, 31 - row)).collect();
        for at in 0..u64::from(proptest_cases(20).cases) {
            let (tensor, bit) = ((at % 3) as usize, (at * 7_654_321) % (160_000 * 8));
            for (src, dst) in [(&host, &far), (&far, &host)] {
                after_the_move(dst, move |cache| flip(cache, tensor, bit));
                failed(engine.swap_blocks(&end(src), &end(dst), &pairs).run(), bit / 8 / 5000);
                engine.swap_blocks(&end(src), &end(dst), &pairs).run().unwrap();
            }
        }
        assert_eq!(contents(&host), patterned(1, 3, 160_000), "an even number of swaps");
    }
}

#[test]
fn every_bit_that_changes_in_a_copy_is_found() {
    let engine = engine(Verify::Full, SwapInPath::Auto);
    let own = cache(&engine, Placement::Device);
    fill(&own, &patterned(1, 3, 160_000));
    after_the_move(&own, |cache| flip(cache, 1, 9 * 5000 * 8 + 3));
    failed(engine.copy_blocks(&end(&own), &[(1, 9), (2, 8)]).run(), 9);
    let shape = desc(Placement::Device, 2, 3, 100_000);
    let [from, to] = [1, 2].map(|_| engine.allocate(&shape, CacheKind::Batch, &[]).unwrap());
    fill(&from, &patterned(1, 2, 300_000));
    after_the_move(&to, |cache| flip(cache, 1, (200_000 + 65_600) * 8));
    let args = CopyArgs { dst_batch_index: 2, src_batch_index: 1, offset: 0, size: -1 };
    let error = engine.copy_cache(&end(&to), &end(&from), args).run().unwrap_err();
    assert_eq!((error.kind(), error.fact("slots")), (ErrorKind::VerifyFailed, Some("2[65536..100000]")));
}

/// Memory that the CPU cannot address is read through the device.
#[test]
fn swaps_with_a_device_are_compared() {
    for reach in [HostReach::Direct, HostReach::Staged] {
        let config = Config { verify: Verify::Full, ..config(4 << 20) };
        let engine = engine_on(config, Arc::new(SimDevice::new(reach)));
        let (host, far) = (cache(&engine, Placement::Host), cache(&engine, Placement::Device));
        fill(&host, &patterned(1, 3, 160_000));
        let pairs: Vec<_> = (0..32).map(|row| (row, row)).collect();
        engine.swap_blocks(&end(&host), &end(&far), &pairs).run().unwrap();
        fill(&host, &patterned(2, 3, 160_000));
        after_the_move(&host, |cache| flip(cache, 2, 77 * 8));
        failed(engine.swap_blocks(&end(&far), &end(&host), &pairs).run(), 0);
        engine.swap_blocks(&end(&far), &end(&host), &pairs).run().unwrap();
        assert_eq!(contents(&host), patterned(1, 3, 160_000));
        // The source differs instead: the copy in the device is compared with what is in host memory now.
        after_the_move(&far, {
            let host = host.clone();
            move |_| flip(&host, 0, 31 * 5000 * 8)
        });
        failed(engine.swap_blocks(&end(&host), &end(&far), &pairs).run(), 31);
    }
}

proptest! {
    #![proptest_config(proptest_cases(64))]

    /// Blocks that are read and written again by the same call differ from nothing, and end as without verification.
    #[test]
    fn lists_in_any_order_end_as_without_verification(
        pairs in prop::collection::vec((0..12i64, 0..12i64), 1..60),
        sample in any::<bool>(),
    ) {
        let verify = if sample { Verify::Sample } else { Verify::Full };
        let [plain, verified] = [Verify::Off, verify].map(|verify| {
            let engine = engine(verify, SwapInPath::Auto);
            let own = engine.allocate(&desc(Placement::Device, 2, 12, 40), CacheKind::Blocks, &[]).unwrap();
            fill(&own, &patterned(1, 2, 480));
            engine.copy_blocks(&end(&own), &pairs).run().unwrap();
            let blocks = engine.stats().verified_blocks;
            assert_eq!(blocks > 0, verify != Verify::Off && pairs.iter().any(|(src, dst)| src != dst));
            fixtures::contents(&own)
        });
        prop_assert_eq!(plain, verified);
    }
}
