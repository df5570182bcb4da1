//! `DataDist::copy` and `copy_group`: between any two caches, in the order of the pairs, compared with a naive copy.

use std::sync::Arc;

use llm_datadist_core::bindings::{Cache, CopyMember, DataDist, Operation, SubRow};
use llm_datadist_core::testing::device::{HostDevice, HostReach};
use llm_datadist_core::{CacheKind, Error, ErrorKind, Placement, Transfer, Verify};
use llm_datadist_testing::SimDevice;

use crate::fixtures::{Chance, config, contents, desc, end, engine_on, fill, patterned};
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

fn outcome(transfer: &Transfer) -> Result<u64, Error> {
    assert!(transfer.wait(llm_datadist_core::Deadline::after(std::time::Duration::from_secs(60))).unwrap());
    transfer.outcome().expect("it has ended")
}

/// Runs an operation, one time on this thread and the next on one of the engine.
fn finish(operation: Operation<'_>, starts: bool) -> Result<(), Error> {
    if !starts {
        return operation.run();
    }
    let transfer = operation.start()?;
    outcome(&transfer).map(drop)
}

/// What a copy of `part` does, pair by pair.
fn naive(src: Option<&[Vec<u8>]>, dst: &mut [Vec<u8>], pairs: &[(i64, i64)], part: SubRow) {
    let len = part.length.map_or(ROW - part.src_offset.max(part.dst_offset) as usize, |len| len as usize);
    for &(from, to) in pairs {
        for tensor in 0..dst.len() {
            let from = from as usize * ROW + part.src_offset as usize;
            let bytes = src.map_or(&dst[tensor], |src| &src[tensor])[from..from + len].to_vec();
            let to = to as usize * ROW + part.dst_offset as usize;
            dst[tensor][to..to + len].copy_from_slice(&bytes);
        }
    }
}

/// Random pairs, also with rows that are written twice, and rows that are read after they were written.
#[test]
fn rows_are_copied_between_any_two_caches() {
    let mut chance = Chance(8);
    for engine in engines() {
        let caches = [Host, Host, Device, Device].map(|placement| cache(&engine, placement, ROW));
        for round in 0..200u64 {
            let [from, to] = [0, 1].map(|_| chance.below(4) as usize);
            let pairs: Vec<_> = (0..chance.below(12))
                .map(|_| (chance.below(ROWS as u64) as i64, chance.below(ROWS as u64) as i64))
                .collect();
            let whole = round % 3 > 0;
            let parted = SubRow { src_offset: 100, dst_offset: 1700, length: Some(1 + chance.below(1000)) };
            let part = if whole { SubRow::default() } else { parted };
            let bytes: Vec<_> = (0..4).map(|at| patterned(at as u8 + round as u8, 2, ROWS * ROW)).collect();
            caches.iter().zip(&bytes).for_each(|(cache, bytes)| fill(cache, bytes));
            let verify = [None, Some(Verify::Full)][round as usize % 2];
            let copy = engine.copy(&end(&caches[to]), &end(&caches[from]), &pairs, part, verify);
            finish(copy, round % 4 > 1).unwrap();
            let mut expected = bytes.clone();
            naive((from != to).then(|| &bytes[from][..]), &mut expected[to], &pairs, part);
            for (cache, expected) in caches.iter().zip(&expected) {
                assert!(contents(cache) == *expected, "round {round}: {from} to {to}, {pairs:?}, {part:?}");
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
        for error in [copy().run().unwrap_err(), copy().start().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    };
    let (all, some) = (SubRow::default(), SubRow { length: Some(8), ..SubRow::default() });
    refused(&host, &long, &[(0, 0)], all, "block sizes 3008 and 3000");
    refused(&three, &host, &[(0, 0)], all, "tensors 2 and 3");
    refused(&host, &long, &[(0, ROWS as i64)], some, "dst");
    refused(&host, &host, &[(0, 0)], SubRow { dst_offset: 4, ..some }, "dst: byte offset 4");
    engine.copy(&end(&host), &end(&long), &[(0, 0)], some, None).run().unwrap();
    engine.deallocate(long.id()).unwrap();
    let gone =
        engine.copy(&llm_datadist_core::bindings::End::Managed(long.id()), &end(&host), &[], all, None);
    assert_eq!(gone.run().unwrap_err().kind(), ErrorKind::CacheNotFound);
}

/// The verification of a call wins over the configured one.
#[test]
fn a_copy_is_verified_as_its_call_says() {
    let mut verifying = config(4 << 20);
    verifying.verify = Verify::Full;
    for (engine, configured) in [(config(4 << 20), false), (verifying, true)]
        .map(|(config, configured)| (engine_on(config, Arc::new(HostDevice)), configured))
    {
        let [src, dst] = [0, 1].map(|_| cache(&engine, Host, ROW));
        for (verify, verifies) in [(None, configured), (Some(Verify::Full), true), (Some(Verify::Off), false)]
        {
            fill(&src, &patterned(1, 2, ROWS * ROW));
            after_the_move(&dst, |cache| flip(cache, 1, (2 * ROW as u64 + 5) * 8));
            let copied = engine.copy(&end(&dst), &end(&src), &[(1, 2)], SubRow::default(), verify).run();
            match copied {
                Ok(()) => assert!(!verifies, "{verify:?}"),
                Err(error) => {
                    assert!(verifies, "{error}");
                    assert_eq!((error.kind(), error.fact("blocks")), (ErrorKind::VerifyFailed, Some("2")));
                }
            }
            // What was not compared is not changed either.
            engine
                .copy(&end(&dst), &end(&src), &[(1, 2)], SubRow::default(), Some(Verify::Sample))
                .run()
                .ok();
        }
    }
}

fn member(dst: &Arc<Cache>, src: &Arc<Cache>, pairs: &[(i64, i64)]) -> CopyMember {
    CopyMember { dst: end(dst), src: end(src), pairs: pairs.to_vec(), part: SubRow::default() }
}

#[test]
fn the_copies_of_a_group_follow_one_another() {
    for engine in engines() {
        let [host, device] = [Host, Device].map(|placement| cache(&engine, placement, ROW));
        let bytes = [patterned(1, 2, ROWS * ROW), patterned(2, 2, ROWS * ROW)];
        fill(&host, &bytes[0]);
        fill(&device, &bytes[1]);
        let steps = [
            (&device, &host, vec![(0, 1), (1, 1)]),
            (&device, &device, vec![(1, 2), (2, 3)]),
            (&host, &device, vec![(3, 4)]),
            (&host, &host, vec![]),
        ];
        let parts: Vec<_> = steps.iter().map(|(dst, src, pairs)| member(dst, src, pairs)).collect();
        outcome(&engine.copy_group(&parts, None, None).unwrap()).unwrap();
        let [mut on_host, mut on_device] = bytes;
        naive(Some(&on_host), &mut on_device, &[(0, 1), (1, 1)], SubRow::default());
        naive(None, &mut on_device, &[(1, 2), (2, 3)], SubRow::default());
        naive(Some(&on_device), &mut on_host, &[(3, 4)], SubRow::default());
        assert!(contents(&host) == on_host && contents(&device) == on_device);
        let parts = vec![member(&device, &host, &[(0, 1)]); 3];
        let moved = engine.copy_group(&parts, Some(Verify::Full), None);
        assert_eq!(outcome(&moved.unwrap()).unwrap(), 3 * 2 * ROW as u64);
    }
}

#[test]
fn a_group_of_copies_moves_nothing_if_a_part_is_refused() {
    let [engine, ..] = engines();
    let [host, device] = [Host, Device].map(|placement| cache(&engine, placement, ROW));
    let before = contents(&device);
    fill(&host, &patterned(3, 2, ROWS * ROW));
    for (bad, kind) in [
        (member(&device, &host, &[(0, 1), (0, 99)]), ErrorKind::InvalidArgument),
        (
            CopyMember {
                src: llm_datadist_core::bindings::End::Managed(llm_datadist_core::CacheId(99)),
                ..member(&host, &host, &[])
            },
            ErrorKind::CacheNotFound,
        ),
    ] {
        let error = engine.copy_group(&[member(&device, &host, &[(0, 0)]), bad], None, None).unwrap_err();
        assert_eq!((error.kind(), error.fact("part")), (kind, Some("1")), "{error}");
    }
    assert!(contents(&device) == before);
    let none = engine.copy_group(&[], None, None).unwrap_err();
    assert_eq!(none.kind(), ErrorKind::InvalidArgument);
    // A part that fails while it runs is named, too.
    after_the_move(&device, |cache| flip(cache, 0, 0));
    let parts = vec![member(&host, &host, &[]), member(&device, &host, &[(0, 0)])];
    let error = outcome(&engine.copy_group(&parts, Some(Verify::Full), None).unwrap()).unwrap_err();
    assert_eq!((error.kind(), error.fact("part")), (ErrorKind::VerifyFailed, Some("1")), "{error}");
}
