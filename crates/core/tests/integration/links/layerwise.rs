//! Layer-wise transfers to caches and to addresses: which bytes arrive, over every transport.
//!
//! `tests/test_layerwise.py` covers every layout, `task.rs` tasks alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use llm_datadist_core::bindings::{
    CacheTask, DataDist, Destination, LayerRange, LayerwiseArgs, Outcome, Target,
};
use llm_datadist_core::testing::model::AddressLocation;
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::protocol::{HEADER, MAX_ADDRS, Reply, Request, decode, encode};
use llm_datadist_core::{CacheDesc, CacheId, CacheKind, ClusterId, Deadline, Error, ErrorKind};

use super::fake_peer::{Fake, ask, described, hear, hear_request, say, soon};
use super::{Held, LONG, Way, config, device, open, pairs, row};
use crate::counting_allocator::peak;
use crate::fixtures::{Buffer, adopt};

use CacheKind::{Batch, Blocks};

/// Whole slots, in layers of two tensors.
pub(super) const SLOTS: LayerwiseArgs =
    LayerwiseArgs { src_blocks: vec![], dst_blocks: vec![], dst_block_bytes: None, tensors_per_layer: 2 };

pub(super) fn blocks(src: &[u64], dst: &[u64]) -> LayerwiseArgs {
    LayerwiseArgs { src_blocks: src.to_vec(), dst_blocks: dst.to_vec(), ..SLOTS }
}

/// A destination for the first `layers` layers of row 0.
pub(super) fn to(cluster: u64, target: Target, layers: u32) -> Destination {
    let src_layers = LayerRange { first: 0, end: layers };
    Destination { cluster: ClusterId(cluster), target, src_layers, src_row: 0 }
}

pub(super) fn named(held: &Held) -> Target {
    Target::Cache { name: row(held, 0).into(), first_layer: Some(0) }
}

pub(super) fn addressed(held: &Held) -> Target {
    Target::Addresses(held.cache.addrs().to_vec())
}

/// Starts a transfer that waits for its layers as long as the engine's limit for calls.
pub(super) fn start(local: &DataDist, source: &Held, args: &LayerwiseArgs, to: &[Destination]) -> CacheTask {
    local.transfer_async(&source.end(), args, to.to_vec(), None).unwrap()
}

pub(super) fn wait(task: &CacheTask) {
    assert!(task.wait(Deadline::after(LONG)).unwrap(), "{:?}", task.outcomes());
}

/// Marks every layer ready.
pub(super) fn all_ready(task: &CacheTask) {
    task.layers().into_iter().for_each(|layer| _ = task.ready(layer));
}

/// Marks every layer ready and waits for the end.
pub(super) fn finish(task: &CacheTask) {
    all_ready(task);
    wait(task);
}

pub(super) fn is_done(task: &CacheTask, at: usize) -> bool {
    matches!(task.outcomes()[at], Outcome::Done)
}

pub(super) fn failure(task: &CacheTask, at: usize) -> Error {
    match task.outcomes().swap_remove(at) {
        Outcome::Failed(error) => error,
        other => panic!("{other:?}"),
    }
}

/// Checks why a destination in cluster 2 failed, and at which layer.
pub(super) fn check_failed(task: &CacheTask, at: usize, kind: ErrorKind, layer: u32) {
    let error = failure(task, at);
    assert_eq!(error.kind(), kind, "{error}");
    let facts = (error.fact("cluster"), error.fact("layer"));
    assert_eq!(facts, (Some("2"), Some(layer.to_string().as_str())), "{error}");
}

/// Addresses point into tensors of several caches, in any order. Some of the caches share memory. A layer that does not lie in a
/// tensor is refused.
#[test]
fn addresses_may_lie_anywhere_in_a_tensor() {
    for pair in pairs() {
        let source = Held::pool(&pair.local, &device(6, 1, 100), Batch);
        let bytes = source.fill(1);
        let memory = Buffer::new(3000, |_| 0xEE);
        let at = |offset: u64| memory.addr() + offset;
        let register = |desc: CacheDesc, kind, addrs: &[u64]| {
            pair.remote.register(adopt(&desc, kind, addrs), &[], Some(true)).unwrap()
        };
        // The large cache is registered between two that begin in it and are too small.
        let _caches = [
            register(device(2, 1, 50), Batch, &[at(200), at(600)]),
            register(device(1, 4, 250), Blocks, &[at(100)]),
            register(device(2, 1, 60), Batch, &[at(195), at(595)]),
            register(device(3, 1, 130), Batch, &[at(1500), at(1200), at(1800)]),
        ];
        let offsets = [1830, 200, 1500, 601, 1215, 950];
        let aims = [&offsets[..], &[200, 2900], &[200, 1531], &[1199, 200]].map(|offsets| {
            to(2, Target::Addresses(offsets.iter().copied().map(at).collect()), offsets.len() as u32 / 2)
        });
        let task = start(&pair.local, &source, &SLOTS, &aims);
        finish(&task);
        assert!(is_done(&task, 0), "{:?}", task.outcomes());
        for outside in 1..aims.len() {
            let error = failure(&task, outside);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            assert_eq!(error.fact("cluster"), Some("2"), "{error}");
        }
        let mut expected = vec![0xEE; 3000];
        for (tensor, offset) in offsets.into_iter().enumerate() {
            expected[offset as usize..][..100].copy_from_slice(&bytes[tensor]);
        }
        assert!(memory.read(0, 3000) == expected);
    }
}

#[test]
fn wrong_locations_from_a_peer_fail_the_transfer() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let source = Held::pool(&local, &device(4, 1, 100), Batch);
    let record = described(CacheId(7), &device(4, 1, 200), Batch);
    let spot = |cache, tensor, offset| AddressLocation { cache: CacheId(cache), tensor, offset };
    let first = spot(7, 0, 0);
    let [before_last, last] = [u32::MAX - 1, u32::MAX].map(|tensor| spot(7, tensor, 0));
    let cases = [
        (vec![], ErrorKind::System),
        (vec![first; 3], ErrorKind::System),
        (vec![first; 5], ErrorKind::System),
        (vec![spot(7, 0, u64::MAX); 4], ErrorKind::InvalidArgument),
        (vec![spot(7, 0, u64::MAX - 50); 4], ErrorKind::InvalidArgument),
        (vec![before_last, last, last, first], ErrorKind::CacheNotFound),
        (vec![last; 4], ErrorKind::CacheNotFound),
        (vec![spot(-1, 0, 0), spot(0, 0, 0), spot(i64::MIN, 1, 1), first], ErrorKind::CacheNotFound),
    ];
    for (spots, kind) in cases {
        let serve = |stream: Stream| {
            while let Ok(request) = hear_request(&stream) {
                if let Request::Write { ahead: true, range, .. } = &request {
                    stream.discard_payload(range.end - range.start, soon()).unwrap();
                }
                let reply = match request {
                    Request::Locate { .. } => Reply::Located(spots.clone()),
                    Request::Describe { .. } => Reply::Described(record.clone()),
                    _ => Reply::Stale,
                };
                say(&stream, &reply);
            }
        };
        let (fake, _control) = Fake::linked_to(&local);
        let task = thread::scope(|scope| {
            scope.spawn(|| serve(fake.greet().0));
            let aim = to(2, Target::Addresses(vec![1, 2, 3, 4]), 2);
            let task = start(&local, &source, &SLOTS, &[aim]);
            finish(&task);
            local.unlink_clusters(&[fake.address()], LONG, true).remove(0).unwrap();
            task
        });
        assert_eq!(failure(&task, 0).kind(), kind, "{spots:?}: {}", failure(&task, 0));
    }
}

/// Messages with more addresses than any transfer has are refused. Decoding them takes memory in proportion to the limit.
#[test]
fn too_many_addresses_take_bounded_memory() {
    for count in [MAX_ADDRS, MAX_ADDRS + 1, 4 * MAX_ADDRS] {
        let spot = AddressLocation { cache: CacheId(1), tensor: 1, offset: 1 };
        let request = encode(&Request::Locate { addrs: vec![1; count] }).unwrap();
        let reply = encode(&Reply::Located(vec![spot; count])).unwrap();
        let located = peak(|| decode::<Request>(&request[HEADER..]).is_ok());
        let answered = peak(|| decode::<Reply>(&reply[HEADER..]).is_ok());
        for ((ok, peak), each) in [(located, 32), (answered, 96)] {
            assert_eq!(ok, count == MAX_ADDRS);
            assert!(peak <= each * MAX_ADDRS, "{peak} for {count}");
        }
    }
}

/// Every address is found among many caches while other threads use the table.
#[test]
fn addresses_are_found_among_many_caches() {
    const CACHES: u64 = 100_000;
    let engine = open(config(2, Way::Tcp), Way::Tcp);
    let fake = Fake::new(1, 1);
    let _control = fake.link(&engine, 7).unwrap();
    // Two tensors of 64 bytes in every 256 bytes, which nothing touches. Every third cache is closed to peers.
    let base = |cache: u64| (1 << 40) + cache * 256;
    for cache in 0..CACHES {
        let adopted = adopt(&device(2, 1, 64), Batch, &[base(cache) + 128, base(cache)]);
        engine.register(adopted, &[], Some(cache % 3 != 0)).unwrap();
    }
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                assert!(engine.find(CacheId(1)).is_ok() && engine.find(CacheId(-3)).is_err());
            }
        });
        let stream = fake.call(&engine, 7).unwrap();
        let locate = |addresses: &[(u64, u64)]| {
            let addrs = addresses.iter().map(|(cache, offset)| base(*cache) + offset).collect();
            ask(&stream, &Request::Locate { addrs });
            hear::<Reply>(&stream).unwrap()
        };
        let (open, closed): (Vec<_>, Vec<_>) = (0..4000)
            .map(|at: u64| (at * 7919 % CACHES, at * 31 % 256))
            .partition(|&(cache, offset)| cache % 3 != 0 && offset % 128 < 64);
        let expected = open.iter().map(|&(cache, offset)| {
            let (tensor, offset) = (u32::from(offset < 64), offset % 128);
            AddressLocation { cache: CacheId(cache as i64 + 1), tensor, offset }
        });
        let expected: Vec<_> = expected.collect();
        assert!(expected.len() > 1000);
        assert_eq!(locate(&open), Reply::Located(expected));
        for &closed_address in closed.iter().take(20) {
            let Reply::Failed { message, .. } = locate(&[open[0], closed_address]) else {
                panic!("{closed_address:?}")
            };
            assert!(message.contains("dst_addrs[1]"), "{message}");
        }
        stop.store(true, Ordering::SeqCst);
    });
}
