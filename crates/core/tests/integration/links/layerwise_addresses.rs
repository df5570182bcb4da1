//! How the owner of memory finds the caches that addresses of a layer-wise transfer lie in, and peers that misuse it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use llm_datadist_core::testing::model::AddressLocation;
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::protocol::{self, MAX_ADDRS, Place, Record, Reply, Request};
use llm_datadist_core::testing::validate::Side;
use llm_datadist_core::{CacheDesc, CacheId, CacheKind, ErrorKind, Geometry, Placement, Target};

use super::fake_peer::{Fake, hear, say, soon};
use super::layerwise::{SLOTS, failure, finish, is_done, start, to};
use super::{Held, LONG, Pair, WAYS, Way, config, device, open};
use crate::counting_allocator;
use crate::fixtures::{Buffer, adopt};

use CacheKind::{Batch, Blocks};

/// Addresses point into tensors of several caches, in any order. Some of the caches share memory.
#[test]
fn addresses_may_lie_anywhere_in_a_tensor() {
    for way in WAYS {
        let pair = Pair::new(way);
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
        let aim = to(2, Target::Addresses(offsets.map(at).to_vec()), 3);
        let task = start(&pair.local, &source, &SLOTS, &[aim]);
        finish(&task);
        assert!(is_done(&task, 0), "{way:?}: {:?}", task.outcomes());
        let mut expected = vec![0xEE; 3000];
        for (tensor, offset) in offsets.into_iter().enumerate() {
            expected[offset as usize..][..100].copy_from_slice(&bytes[tensor]);
        }
        assert!(memory.read(0, 3000) == expected, "{way:?}");
    }
}

#[test]
fn wrong_locations_from_a_peer_fail_the_transfer() {
    let local = open(config(1, Way::Tcp), Way::Tcp);
    let fake = Fake::new(2, 1);
    let source = Held::pool(&local, &device(4, 1, 100), Batch);
    let geometry = Geometry::new(&device(4, 1, 200)).unwrap();
    let side = Side { geometry, kind: Batch, placement: Placement::Device };
    let mut record = Record::new(Place { place: 0, generation: 0 }, CacheId(7), 0, side);
    record.accessible = true;
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
            while let Ok(request) = hear::<Request>(&stream) {
                if let Request::Write { ahead: true, from, to, .. } = request {
                    stream.discard_payload(to - from, soon()).unwrap();
                }
                let reply = match request {
                    Request::Locate { .. } => Reply::Located(spots.clone()),
                    Request::Describe { .. } => Reply::Described(record.clone()),
                    _ => Reply::Stale,
                };
                say(&stream, &reply);
            }
        };
        let task = thread::scope(|scope| {
            let control = scope.spawn(|| fake.linked());
            local.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
            let _control = control.join().unwrap();
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
    for count in [MAX_ADDRS, MAX_ADDRS + 1, 20 * MAX_ADDRS] {
        let request = Request::Locate { addrs: vec![1; count], limit_ms: 0 };
        let request = protocol::encode(&request).unwrap();
        let (ok, peak) =
            counting_allocator::peak(|| protocol::decode::<Request>(&request[protocol::HEADER..]).is_ok());
        assert_eq!(ok, count == MAX_ADDRS);
        assert!(peak <= 32 * MAX_ADDRS, "{peak} for {count}");
        let spot = AddressLocation { cache: CacheId(1), tensor: 1, offset: 1 };
        let reply = protocol::encode(&Reply::Located(vec![spot; count])).unwrap();
        let (ok, peak) =
            counting_allocator::peak(|| protocol::decode::<Reply>(&reply[protocol::HEADER..]).is_ok());
        assert_eq!(ok, count == MAX_ADDRS);
        assert!(peak <= 96 * MAX_ADDRS, "{peak} for {count}");
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
        let locate = |places: &[(u64, u64)]| {
            let addrs = places.iter().map(|(cache, offset)| base(*cache) + offset).collect();
            say(&stream, &Request::Locate { addrs, limit_ms: 10_000 });
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
        for &place in closed.iter().take(20) {
            let Reply::Failed { message, .. } = locate(&[open[0], place]) else { panic!("{place:?}") };
            assert!(message.contains("dst_addrs[1]"), "{message}");
        }
        stop.store(true, Ordering::SeqCst);
    });
}
