//! Streams that are cut, stall or garble bytes at every position of a handshake and of every call. A call ends within
//! its limit, everything that it reports as done is done, both sides release the rest, and linking again works.
//!
//! `linking` and `fake_peer` cover peers that misbehave on purpose.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{CacheKey, DataDist, Name, TransportChoice};
use llm_datadist_core::{CacheKind, Error, ErrorKind, Result};
use llm_datadist_testing::{Fault, Faults, Faulty};

use super::{
    Held, LONG, SOCKETS, Way, address, config, device, eventually, link, of, open, pull_blocks, pull_slot,
    push_slot, request, row, times,
};
use CacheKind::{Batch, Blocks};

const LIMIT: Duration = Duration::from_millis(80);

/// A fault of one direction of a stream.
pub(super) struct Broken {
    pub(super) what: String,
    at: u64,
    pub(super) garbles: bool,
    faults: Faults,
}

impl Broken {
    /// Checks the kind of an error. After a garbled message it may be any.
    pub(super) fn explains(&self, error: &Error, kinds: [ErrorKind; 2]) {
        assert!(self.garbles || kinds.contains(&error.kind()), "{}: {error:?}", self.what);
    }

    fn bounded<T>(&self, call: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let result = call();
        assert!(started.elapsed() < Duration::from_secs(5), "{} took {:?}", self.what, started.elapsed());
        result
    }
}

/// Every fault, in both directions, at each of `offsets`.
pub(super) fn faults(way: Way, offsets: impl Iterator<Item = u64>) -> impl Iterator<Item = Broken> {
    let kinds: [fn(u64) -> Fault; 3] = [Fault::Cut, Fault::Stall, Fault::Garble];
    offsets.flat_map(move |at| {
        kinds.into_iter().flat_map(move |kind| {
            let fault = Some(kind(at));
            let garbles = matches!(fault, Some(Fault::Garble(_)));
            let sending = Faults { sending: fault, ..Faults::default() };
            let receiving = Faults { receiving: fault, ..Faults::default() };
            [sending, receiving].map(|faults| {
                let what = format!("{way:?}, {faults:?}");
                Broken { what, at, garbles, faults }
            })
        })
    })
}

/// Returns every position for an exhaustive run, otherwise one in `one_in`.
fn steps(end: u64, one_in: usize) -> impl Iterator<Item = u64> {
    (0..end).step_by(if times(1) > 1 { 1 } else { one_in })
}

/// An engine whose next dialled stream has the armed fault, and a peer without faults.
pub(super) struct Fixture {
    pub(super) local: DataDist,
    pub(super) remote: DataDist,
    armed: Arc<Mutex<Option<Faults>>>,
}

impl Fixture {
    pub(super) fn new(way: Way, limit: Duration) -> Fixture {
        let armed: Arc<Mutex<Option<Faults>>> = Arc::default();
        let next = armed.clone();
        let faults = move |_| next.lock().unwrap().take().unwrap_or_default();
        let (mut local, mut transports) = (config(1, way), way.transports());
        local.sync_timeout = limit;
        if way.shares_sockets() {
            // No fallback to sockets, so that the fault shows.
            local.links.transport = TransportChoice::Shm;
            transports.unix = Arc::new(Faulty::new(transports.unix, faults));
        } else {
            transports.tcp = Arc::new(Faulty::new(transports.tcp, faults));
        }
        let local = DataDist::open_over(local, way.devices(), transports).unwrap();
        Fixture { local, remote: open(config(2, way), way), armed }
    }

    pub(super) fn arm(&self, broken: &Broken) {
        *self.armed.lock().unwrap() = Some(broken.faults);
    }

    /// Makes a link, and the call that breaks.
    fn call(&self, broken: &Broken, call: impl FnOnce() -> Result<()>) -> Result<()> {
        link(&self.local, &self.remote).unwrap();
        self.arm(broken);
        broken.bounded(call)
    }

    /// Removes the links of both sides, whatever their state.
    pub(super) fn clean(&self) {
        *self.armed.lock().unwrap() = None;
        self.local.unlink_clusters(&[address(&self.remote)], LONG, true).remove(0).unwrap();
        eventually("the end of the link on the other side", || self.remote.stats().links.is_empty());
        assert!(self.local.stats().links.iter().all(|link| link.cluster != self.remote.config().cluster));
    }
}

#[test]
fn a_greeting_that_breaks_anywhere_leaves_nothing() {
    for way in SOCKETS {
        let pair = Fixture::new(way, LIMIT);
        let (mut failed, mut linked) = (0, 0);
        for broken in faults(way, steps(360, 29)) {
            pair.arm(&broken);
            match broken.bounded(|| pair.local.link_clusters(&[address(&pair.remote)], LIMIT).remove(0)) {
                Ok(()) => linked += 1,
                Err(error) => {
                    broken.explains(&error, [ErrorKind::LinkFailed, ErrorKind::Timeout]);
                    assert!(pair.local.stats().links.is_empty(), "{}", broken.what);
                    failed += 1;
                }
            }
            pair.clean();
            link(&pair.local, &pair.remote).unwrap_or_else(|error| panic!("after {}: {error}", broken.what));
            // Calls of this pair have little time.
            eventually("an answer", || pair.local.check_link(pair.remote.config().cluster).is_ok());
            pair.clean();
        }
        assert!(failed > 20 && linked > 0, "{way:?}: {failed} failed, {linked} did not");
    }
}

#[test]
fn a_call_that_breaks_anywhere_says_what_arrived() {
    const BLOCK: usize = 96 << 10;
    for way in SOCKETS {
        let pair = Fixture::new(way, LIMIT);
        let shape = device(2, 48, BLOCK);
        let key = CacheKey::Blocks { model: 1 };
        let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(key)]);
        let local = Held::pool(&pair.local, &shape, Blocks);
        let source = remote.fill(1);
        let all: Vec<i64> = (0..48).collect();
        let pull = || pull_blocks(&pair.local, of(2, Name::Key(key)), &local, &all, &all);
        let (mut failed, mut partly) = (0, 0);
        for broken in faults(way, steps(400, 61).chain([450, 1 << 20, 5 << 20, 8 << 20])) {
            let what = &broken.what;
            local.write(&[vec![0; 48 * BLOCK], vec![0; 48 * BLOCK]]);
            let pulled = pair.call(&broken, pull);
            let got = local.read();
            match pulled {
                Ok(()) => assert!(got == source || broken.garbles, "{what}: a success without its bytes"),
                Err(error) => {
                    broken.explains(&error, [ErrorKind::NotLinked, ErrorKind::Timeout]);
                    if !broken.garbles {
                        partly += usize::from(!error.arrived().is_empty());
                        check_arrived(&error, &source, &got, BLOCK);
                    }
                    failed += 1;
                }
            }
            assert!(remote.read() == source, "{what}: the source changed");
            pair.clean();
        }
        // A stream that breaks while it is being opened is opened once more.
        assert!(failed > 5, "{way:?}: only {failed} failed");
        assert!(partly > 0 || way == Way::Shm || way.has_fabric(), "no pull arrived in part");
        link(&pair.local, &pair.remote).unwrap();
        // On a busy machine this pull may exceed the short limit again.
        eventually("a pull that works", || pull().is_ok());
        assert!(local.read() == source);
    }
}

/// Checks that the rows that an error reports as arrived hold the bytes of their source.
fn check_arrived(error: &Error, source: &[Vec<u8>], local: &[Vec<u8>], row_bytes: usize) {
    for arrived in error.arrived() {
        let tensor = arrived.tensor as usize;
        for row in arrived.rows.iter().flat_map(Clone::clone) {
            let at = row as usize * row_bytes;
            let there = local[tensor][at..][..row_bytes] == source[tensor][at..][..row_bytes];
            assert!(there, "tensor {tensor} row {row}: {error:?}");
        }
    }
}

/// If a pull reports success, its key is gone. If a pull never received its bytes, its key is still there. If
/// a push reports success, its bytes are in place.
#[test]
fn keys_and_pushes_survive_broken_calls() {
    for way in SOCKETS {
        let pair = Fixture::new(way, LIMIT);
        let local = Held::pool(&pair.local, &device(2, 1, 4096), Batch);
        // Bytes that follow their request, and bytes that are asked for.
        let pushed = [4096, 96 << 10].map(|bytes| {
            let ends = [&pair.local, &pair.remote].map(|end| Held::pool(end, &device(2, 1, bytes), Batch));
            (ends[0].fill(7), ends)
        });
        let (mut done, mut failed) = (0, 0);
        let faults = faults(way, steps(600, 83).chain([9000])).filter(|broken| !broken.garbles);
        for (round, broken) in (1..).zip(faults) {
            let (what, key) = (&broken.what, request(round));
            let remote = Held::new(&pair.remote, false, &device(2, 1, 4096), Batch, &[Some(key)]);
            let bytes = remote.fill(round as u8);
            local.write(&[vec![0; 4096], vec![0; 4096]]);
            let pulled = pair.call(&broken, || pull_slot(&pair.local, of(2, Name::Key(key)), &local));
            if pulled.is_ok() {
                assert!(local.read() == bytes, "{what}");
                assert!(pair.remote.find_key(key).is_err(), "{what}: pulled, and not released");
            } else if local.read() != bytes {
                assert!(pair.remote.find_key(key).is_ok(), "{what}: released, and not pulled");
            }
            pair.clean();
            for (own, [local, into]) in &pushed {
                let before = into.fill(8);
                let pushed = pair.call(&broken, || push_slot(&pair.local, local, 0, of(2, row(into, 0))));
                if pushed.is_ok() {
                    assert!(into.read() == *own, "{what}: pushed, and not there");
                    done += 1;
                } else if broken.at < 83 {
                    assert!(into.read() == before, "{what}: half a request, and something was written");
                    failed += 1;
                }
                pair.clean();
            }
            pair.remote.deallocate(remote.cache.id()).unwrap();
            pair.remote.remove_key(key).unwrap();
        }
        assert!(done > 0 && failed > 0, "{way:?}: {done} pushes went well, {failed} did not");
    }
}
