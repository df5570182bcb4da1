//! `DataDist::copy` and `copy_group`: between any two caches, in the order of the pairs, compared with a naive copy.

use std::sync::Arc;

use llm_datadist_core::bindings::{Cache, Config, CopyMember, DataDist, End, Operation, SubRow};
use llm_datadist_core::testing::device::{HostDevice, HostReach};
use llm_datadist_core::{CacheId, CacheKind, Error, ErrorKind, Placement, Verify};
use llm_datadist_testing::SimDevice;

use crate::arguments;
use crate::fixtures::{Chance, config, contents, desc, end, engine_on, fill, outcome, patterned};
use crate::moved::{after_the_move, flip};

use Placement::{Device, Host};

const ROWS: usize = 8;
const ROW: usize = 3000;

fn cache(engine: &DataDist, placement: Placement, row_bytes: usize) -> Arc<Cache> {
    engine.allocate(&desc(placement, 2, ROWS, row_bytes), CacheKind::Blocks, &[]).unwrap()
}

fn engines() -> [DataDist; 3] {
    let simulated = |reach| engine_on(config(4 << 20), Arc::new(SimDevice::new(reach)));
    [
        engine_on(config(4 << 20), Arc::new(HostDevice)),
        simulated(HostReach::Direct),
        simulated(HostReach::Staged),
    ]
}

/// Runs an operation, one time on this thread and the next on one of the engine.
fn finish(operation: Operation<'_>, starts: bool) -> Result<(), Error> {
    if !starts {
        return operation.run();
    }
    outcome(&*operation.start()?).map(drop)
}

/// What a copy of `part` does to the bytes of caches, pair by pair.
fn naive(caches: &mut [Vec<Vec<u8>>], (from, to): (usize, usize), pairs: &[(i64, i64)], part: SubRow) {
    let len = part.length.map_or(ROW - part.src_offset.max(part.dst_offset) as usize, |len| len as usize);
    for &(src, dst) in pairs {
        let (src, dst) = (src as usize * ROW, dst as usize * ROW);
        let (src, dst) = (src + part.src_offset as usize, dst + part.dst_offset as usize);
        let read: Vec<_> = caches[from].iter().map(|tensor| tensor[src..src + len].to_vec()).collect();
        for (tensor, bytes) in caches[to].iter_mut().zip(read) {
            tensor[dst..dst + len].copy_from_slice(&bytes);
        }
    }
}

/// Random pairs, also with rows that are written twice, and rows that are read after they were written. Every third call
/// is a group, whose copies follow one another.
#[test]
fn rows_are_copied_between_any_two_caches() {
    let mut chance = Chance(8);
    for engine in engines() {
        let caches = [Host, Host, Device, Device].map(|placement| cache(&engine, placement, ROW));
        for round in 0..200u64 {
            let mut expected: Vec<_> =
                (0..4).map(|at| patterned(at as u8 + round as u8, 2, ROWS * ROW)).collect();
            caches.iter().zip(&expected).for_each(|(cache, bytes)| fill(cache, bytes));
            let mut copy = |_| {
                let [from, to] = [0, 1].map(|_| chance.index(4));
                let pairs: Vec<_> = (0..chance.below(12))
                    .map(|_| (chance.below(ROWS as u64) as i64, chance.below(ROWS as u64) as i64))
                    .collect();
                let parted =
                    SubRow { src_offset: 100, dst_offset: 1700, length: Some(1 + chance.below(1000)) };
                let part = if chance.below(3) > 0 { SubRow::default() } else { parted };
                naive(&mut expected, (from, to), &pairs, part);
                CopyMember { part, ..member(&caches[to], &caches[from], &pairs) }
            };
            let copies: Vec<_> = (0..if round % 3 == 2 { 4 } else { 1 }).map(&mut copy).collect();
            let verify = [None, Some(Verify::Full)][round as usize % 2];
            if let [CopyMember { dst, src, pairs, part }] = &copies[..] {
                finish(engine.copy(dst, src, pairs, *part, verify), round % 4 > 1).unwrap();
            } else {
                outcome(&engine.copy_group(&copies, verify, None).unwrap()).unwrap();
            }
            for (cache, expected) in caches.iter().zip(&expected) {
                assert!(contents(cache) == *expected, "round {round}: {copies:?}");
            }
        }
    }
}

#[test]
fn a_copy_checks_both_caches() {
    let [engine, ..] = engines();
    let [host, long] = [ROW, ROW + 8].map(|row| cache(&engine, Host, row));
    let three = engine.allocate(&desc(Device, 3, ROWS, ROW), CacheKind::Blocks, &[]).unwrap();
    let refused = |dst: &Arc<Cache>, src: &Arc<Cache>, pairs: &[(i64, i64)], part: SubRow, text: &str| {
        let copy = || engine.copy(&end(dst), &end(src), pairs, part, None);
        arguments::refused(copy().run(), &[text]);
        arguments::refused(copy().start().map(drop), &[text]);
    };
    let (all, some) = (SubRow::default(), SubRow { length: Some(8), ..SubRow::default() });
    refused(&host, &long, &[(0, 0)], all, "block sizes 3008 and 3000");
    refused(&three, &host, &[(0, 0)], all, "tensors 2 and 3");
    refused(&host, &long, &[(0, ROWS as i64)], some, "dst");
    refused(&host, &host, &[(0, 0)], SubRow { dst_offset: 4, ..some }, "dst: byte offset 4");
    engine.copy(&end(&host), &end(&long), &[(0, 0)], some, None).run().unwrap();
    engine.deallocate(long.id()).unwrap();
    let gone = engine.copy(&end(&long), &end(&host), &[], all, None).run().unwrap_err();
    let id = long.id().to_string();
    assert_eq!((gone.kind(), gone.fact("cache_id")), (ErrorKind::CacheNotFound, Some(&*id)), "{gone}");
}

/// The verification of a call wins over the configured one.
#[test]
fn a_copy_is_verified_as_its_call_says() {
    for (verify, configured) in [(Verify::Off, false), (Verify::Full, true)] {
        let engine = DataDist::open(Config { verify, ..config(4 << 20) }).unwrap();
        let [src, dst] = [0, 1].map(|_| cache(&engine, Host, ROW));
        for (verify, verifies) in [(None, configured), (Some(Verify::Full), true), (Some(Verify::Off), false)]
        {
            fill(&src, &patterned(1, 2, ROWS * ROW));
            after_the_move(&dst, |cache| flip(cache, 1, (2 * ROW as u64 + 5) * 8));
            let copy =
                |verify| engine.copy(&end(&dst), &end(&src), &[(1, 2)], SubRow::default(), verify).run();
            match copy(verify) {
                Ok(()) => assert!(!verifies, "{verify:?}"),
                Err(error) => {
                    assert!(verifies, "{error}");
                    assert_eq!((error.kind(), error.fact("blocks")), (ErrorKind::VerifyFailed, Some("2")));
                }
            }
            // What was not compared is not changed either.
            copy(Some(Verify::Sample)).ok();
        }
    }
}

fn member(dst: &Arc<Cache>, src: &Arc<Cache>, pairs: &[(i64, i64)]) -> CopyMember {
    CopyMember { dst: end(dst), src: end(src), pairs: pairs.to_vec(), part: SubRow::default() }
}

#[test]
fn a_group_of_copies_moves_nothing_if_a_part_is_refused() {
    let [engine, ..] = engines();
    let [host, device] = [Host, Device].map(|placement| cache(&engine, placement, ROW));
    let before = contents(&device);
    fill(&host, &patterned(3, 2, ROWS * ROW));
    let gone = CopyMember { src: End::Managed(CacheId(99)), ..member(&host, &host, &[]) };
    for (bad, kind) in [
        (member(&device, &host, &[(0, 1), (0, 99)]), ErrorKind::InvalidArgument),
        (gone, ErrorKind::CacheNotFound),
    ] {
        let error = engine.copy_group(&[member(&device, &host, &[(0, 0)]), bad], None, None).unwrap_err();
        assert_eq!((error.kind(), error.fact("part")), (kind, Some("1")), "{error}");
    }
    assert!(contents(&device) == before);
    let thrice = engine.copy_group(&vec![member(&device, &host, &[(0, 1)]); 3], Some(Verify::Full), None);
    assert_eq!(outcome(&thrice.unwrap()).unwrap(), 3 * 2 * ROW as u64);
    let none = engine.copy_group(&[], None, None).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument);
    // A part that fails while it runs is named, too.
    after_the_move(&device, |cache| flip(cache, 0, 0));
    let parts = vec![member(&host, &host, &[]), member(&device, &host, &[(0, 0)])];
    let error = outcome(&engine.copy_group(&parts, Some(Verify::Full), None).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.fact("part")), (ErrorKind::VerifyFailed, Some("1")), "{error}");
}
