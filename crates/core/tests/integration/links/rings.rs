//! Call streams with rings: which calls use them, and how many streams of a link have them.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::testing::device::HostReach;
use llm_datadist_core::testing::net::{
    Address, Interference, Listener, Stream, Transport, Unix, Way as Direction, unreachable,
};
use llm_datadist_core::testing::protocol::{self, RingOffer};
use llm_datadist_core::{CacheKind, Deadline, ErrorKind, Placement, Result};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use super::{
    Held, Memory, Pair, WAYS, Way, config, device, eventually, link, of, open_gated, pull_slot, push_slot,
    row,
};
use crate::fixtures::Gated;

/// Streams with rings of one link, in each direction.
const RINGED: usize = 4;
const HOST: Memory = Memory { registered: false, placement: Placement::Host };

fn rings(engine: &DataDist) -> usize {
    engine.stats().links.remove(0).call_rings
}

fn held(engine: &DataDist) -> Held {
    HOST.held(engine, (2, 1, 96), CacheKind::Batch, &[])
}

#[test]
fn calls_over_a_local_socket_use_rings_in_both_directions() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        let (local, remote) = (held(&pair.local), held(&pair.remote));
        let expected = usize::from(way.shares_sockets());
        let ends = [(&pair.local, &local, 2, &remote), (&pair.remote, &remote, 1, &local)];
        for ((engine, source, cluster, into), directions) in ends.into_iter().zip(1..) {
            for round in 0..20 {
                let bytes = source.fill(20 * directions as u8 + round);
                push_slot(engine, source, 0, of(cluster, row(into, 0))).unwrap();
                assert!(into.read() == bytes, "{way:?}");
            }
            assert_eq!([rings(&pair.local), rings(&pair.remote)], [directions * expected; 2], "{way:?}");
        }
    }
}

#[test]
fn calls_beyond_the_first_streams_use_sockets() {
    let pair = Pair::with(Way::Shm, |config| config.remote_accessible = true);
    let caches: Vec<_> = (0..24).map(|_| (held(&pair.local), held(&pair.remote))).collect();
    for round in 0..20_u8 {
        thread::scope(|scope| {
            for ((local, remote), at) in caches.iter().zip(0_u8..) {
                let pair = &pair;
                scope.spawn(move || {
                    let source = remote.fill(at * 2 + round);
                    pull_slot(&pair.local, of(2, row(remote, 0)), local).unwrap();
                    assert!(local.read() == source);
                    let source = local.fill(at * 2 + round + 101);
                    push_slot(&pair.local, local, 0, of(2, row(remote, 0))).unwrap();
                    assert!(remote.read() == source);
                });
            }
        });
        assert!((1..=RINGED).contains(&rings(&pair.local)), "{}", rings(&pair.local));
        assert_eq!(rings(&pair.local), rings(&pair.remote));
    }
}

/// Local sockets on which a test can prevent rings, or further streams.
#[derive(Debug, Default)]
struct Prevented {
    rings: AtomicBool,
    streams: AtomicBool,
    /// Number of streams that were prevented.
    refused: AtomicUsize,
    /// The socket of the last stream.
    last: Mutex<Option<OwnedFd>>,
}

impl Transport for Prevented {
    fn name(&self) -> &'static str {
        Unix.name()
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        if self.streams.load(Ordering::SeqCst) {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(unreachable(to, "connect to", Errno::CONNREFUSED));
        }
        let mut stream = Unix.dial(to, deadline)?;
        *self.last.lock().unwrap() = Some(stream.as_fd().try_clone_to_owned().unwrap());
        if self.rings.load(Ordering::SeqCst) {
            stream.faults = Some(Box::new(GarbledOffers));
        }
        Ok(stream)
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        Unix.listen(at)
    }
}

/// Garbles the offers of rings.
#[derive(Debug)]
struct GarbledOffers;

impl Interference for GarbledOffers {
    fn garble(&self, way: Direction, bytes: &mut [u8]) {
        if way == Direction::Out && *bytes == protocol::encode(&RingOffer).unwrap() {
            bytes.fill(0xFF);
        }
    }
}

/// A stream without rings is idle, and a call tries to open another one with rings, which fails.
#[test]
fn a_call_uses_an_idle_stream_if_none_with_rings_can_be_opened() {
    let (unix, gate) = (Arc::new(Prevented::default()), Gated::new(HostReach::Direct));
    let mut transports = Way::Shm.transports();
    transports.unix = unix.clone();
    let local = DataDist::open_over(config(1, Way::Shm), Way::Shm.devices(), transports).unwrap();
    let remote = open_gated(config(2, Way::Shm), Way::Shm, &gate);
    link(&local, &remote).unwrap();
    let in_pool = |engine| Held::pool(engine, &device(2, 1, 96), CacheKind::Batch);
    let [first, second] = [(); 2].map(|()| (in_pool(&local), in_pool(&remote)));
    let push = |seed| {
        let source = first.0.fill(seed);
        push_slot(&local, &first.0, 0, of(2, row(&first.1, 0))).unwrap();
        assert!(first.1.read() == source);
    };
    unix.rings.store(true, Ordering::SeqCst);
    push(1);
    assert_eq!(rings(&local), 0);
    unix.rings.store(false, Ordering::SeqCst);
    // While one call has the first stream, another one gets a stream with rings, which breaks.
    gate.shut();
    thread::scope(|scope| {
        let pushing = scope.spawn(|| push(2));
        gate.wait_for(1);
        let failing = scope.spawn(|| push_slot(&local, &second.0, 0, of(2, row(&second.1, 0))));
        eventually("a stream with rings", || rings(&local) == 1);
        // Now the peer cannot answer before this side sees the end.
        gate.wait_for(2);
        let last = unix.last.lock().unwrap();
        shutdown(last.as_ref().unwrap(), Shutdown::Both).unwrap();
        assert_eq!(failing.join().unwrap().unwrap_err().kind(), ErrorKind::NotLinked);
        gate.open();
        pushing.join().unwrap();
    });
    assert_eq!(rings(&local), 0);
    unix.streams.store(true, Ordering::SeqCst);
    push(3);
    assert!(unix.refused.load(Ordering::SeqCst) > 0, "no stream with rings was tried");
    assert_eq!(rings(&local), 0);
}
