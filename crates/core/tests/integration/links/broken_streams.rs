//! Streams that are cut, stall or garble at every byte of a greeting and of every call: a call ends within its limit, what
//! it reports as done is done, both sides forget the rest, and linking again works.
//!
//! Not for: peers that misbehave on purpose (`linking`, `fake_peer`).

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use llm_datadist_core::testing::device::DeviceSet;
use llm_datadist_core::testing::net::{Tcp, Unix};
use llm_datadist_core::testing::session::Transports;
use llm_datadist_core::{
    CacheKey, CacheKind, DataDist, Error, ErrorKind, Layers, Name, Placement, PullRows, PushRows,
    TransportChoice,
};
use llm_datadist_testing::{Fault, Faults, Faulty};

use super::{Held, LONG, Way, address, config, eventually, link, of, open, request, times};
use crate::fixtures::desc;

use CacheKind::{Batch, Blocks};

/// The faults of the next streams that are dialled, first come, first served.
type Armed = Arc<Mutex<VecDeque<Faults>>>;

const LIMIT: Duration = Duration::from_millis(80);

/// An engine whose dialled streams have the faults that are armed, and its sound peer.
struct Bed {
    local: DataDist,
    remote: DataDist,
    armed: Armed,
}

impl Bed {
    fn new(way: Way) -> Bed {
        let armed = Armed::default();
        let next = armed.clone();
        let faults = move |_| next.lock().unwrap().pop_front().unwrap_or_default();
        let transports = if way == Way::Shm {
            Transports { tcp: Arc::new(Tcp), unix: Arc::new(Faulty::new(Arc::new(Unix), faults)) }
        } else {
            Transports { tcp: Arc::new(Faulty::new(Arc::new(Tcp), faults)), unix: Arc::new(Unix) }
        };
        let mut local = config(1, way);
        local.sync_timeout = LIMIT;
        if way == Way::Shm {
            // No way back to sockets: the fault shows.
            local.links.transport = TransportChoice::Shm;
        }
        let local = DataDist::open_over(local, DeviceSet::host_only(), transports).unwrap();
        Bed { local, remote: open(config(2, way), way), armed }
    }

    fn arm(&self, faults: Faults) {
        *self.armed.lock().unwrap() = [faults].into();
    }

    /// Both sides without links, whatever there was.
    fn clean(&self) {
        self.armed.lock().unwrap().clear();
        self.local.unlink_clusters(&[address(&self.remote)], LONG, true).remove(0).unwrap();
        eventually("the end of the link on the other side", || self.remote.stats().links.is_empty());
        assert!(self.local.stats().links.is_empty());
    }
}

/// One fault in one direction.
fn faults() -> impl Iterator<Item = (&'static str, fn(u64) -> Faults)> {
    fn sending(fault: Fault) -> Faults {
        Faults { sending: Some(fault), ..Faults::default() }
    }
    fn receiving(fault: Fault) -> Faults {
        Faults { receiving: Some(fault), ..Faults::default() }
    }
    let all: [(&str, fn(u64) -> Faults); 6] = [
        ("cut out", |at| sending(Fault::Cut(at))),
        ("cut in", |at| receiving(Fault::Cut(at))),
        ("stall out", |at| sending(Fault::Stall(at))),
        ("stall in", |at| receiving(Fault::Stall(at))),
        ("garble out", |at| sending(Fault::Garble(at))),
        ("garble in", |at| receiving(Fault::Garble(at))),
    ];
    all.into_iter()
}

/// Every byte where somebody digs, else one in so many.
fn steps(end: u64, one_in: usize) -> impl Iterator<Item = u64> {
    let step = if times(1) > 1 { 1 } else { one_in };
    (0..end).step_by(step)
}

fn bounded<T>(what: &str, call: impl FnOnce() -> T) -> T {
    let started = Instant::now();
    let result = call();
    assert!(started.elapsed() < Duration::from_secs(5), "{what} took {:?}", started.elapsed());
    result
}

#[test]
fn a_greeting_that_breaks_anywhere_leaves_nothing() {
    for way in [Way::Tcp, Way::Shm] {
        let bed = Bed::new(way);
        let (mut failed, mut linked) = (0, 0);
        for (name, fault) in faults() {
            for at in steps(360, 29) {
                let what = format!("{way:?}, {name} at {at}");
                bed.arm(fault(at));
                let peer = [address(&bed.remote)];
                match bounded(&what, || bed.local.link_clusters(&peer, LIMIT).remove(0)) {
                    Ok(()) => linked += 1,
                    Err(error) => {
                        let fits = matches!(error.kind(), ErrorKind::LinkFailed | ErrorKind::Timeout);
                        // A garbled mode or kind is what the other side read.
                        assert!(fits || name.starts_with("garble"), "{what}: {error}");
                        assert!(bed.local.stats().links.is_empty(), "{what}");
                        failed += 1;
                    }
                }
                bed.clean();
            }
            link(&bed.local, &bed.remote).unwrap_or_else(|error| panic!("{way:?} after {name}: {error}"));
            bed.local.check_link(bed.remote.config().cluster).unwrap();
            bed.clean();
        }
        assert!(failed > 20 && linked > 0, "{way:?}: {failed} failed, {linked} did not");
    }
}

/// The rows that an error says have arrived hold the bytes of their source.
fn arrived_is_there(
    error: &Error,
    source: &[Vec<u8>],
    local: &[Vec<u8>],
    row_bytes: usize,
    what: &str,
) -> usize {
    let mut rows = 0;
    for (tensor, ranges) in error.arrived() {
        for row in ranges.iter().flat_map(Clone::clone) {
            let at = row as usize * row_bytes..(row as usize + 1) * row_bytes;
            assert!(
                local[*tensor as usize][at.clone()] == source[*tensor as usize][at],
                "{what}: tensor {tensor} row {row}"
            );
            rows += 1;
        }
    }
    rows
}

#[test]
fn a_call_that_breaks_anywhere_says_what_arrived() {
    const BLOCK: usize = 96 << 10;
    for way in [Way::Tcp, Way::Shm] {
        let bed = Bed::new(way);
        let shape = desc(Placement::Device, 2, 48, BLOCK);
        let key = CacheKey::Blocks { model: 1 };
        let remote = Held::new(&bed.remote, false, &shape, Blocks, &[Some(key)]);
        let local = Held::new(&bed.local, false, &shape, Blocks, &[]);
        let source = remote.fill(1);
        let all: Vec<i64> = (0..48).collect();
        let rows = PullRows::Blocks { remote: all.clone(), local: all };
        let (mut failed, mut partly) = (0, 0);
        let places: Vec<u64> = steps(400, 61).chain([450, 1 << 20, 5 << 20, 8 << 20]).collect();
        for (name, fault) in faults() {
            for &at in &places {
                let what = format!("{way:?}, {name} at {at}");
                link(&bed.local, &bed.remote).unwrap();
                local.write(&[vec![0; 48 * BLOCK], vec![0; 48 * BLOCK]]);
                bed.arm(fault(at));
                let pulled = bounded(&what, || {
                    bed.local.pull(of(2, Name::Key(key)), &local.end(), &rows, Layers::ALL)
                });
                let got = local.read();
                match pulled {
                    Ok(()) => assert!(
                        got == source || name.starts_with("garble"),
                        "{what}: a success without its bytes"
                    ),
                    Err(error) => {
                        let fits = matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::Timeout);
                        assert!(fits || name.starts_with("garble"), "{what}: {error:?}");
                        if !name.starts_with("garble") {
                            partly += usize::from(arrived_is_there(&error, &source, &got, BLOCK, &what) > 0);
                        }
                        failed += 1;
                    }
                }
                assert!(remote.read() == source, "{what}: the source changed");
                bed.clean();
            }
        }
        // A stream that breaks while it is being opened is opened once more.
        assert!(failed > 5, "{way:?}: only {failed} failed");
        assert!(partly > 0 || way == Way::Shm, "no pull arrived in part");
        link(&bed.local, &bed.remote).unwrap();
        // On a busy machine this pull may exceed the short limit again.
        let pull = || bed.local.pull(of(2, Name::Key(key)), &local.end(), &rows, Layers::ALL);
        eventually("a pull that works", || pull().is_ok());
        assert!(local.read() == source);
    }
}

/// A key whose pull reports success is gone; one whose pull never got its bytes is still there; and a push that reports
/// success is in place.
#[test]
fn keys_and_pushes_survive_broken_calls() {
    for way in [Way::Tcp, Way::Shm] {
        let bed = Bed::new(way);
        let shape = desc(Placement::Device, 2, 1, 4096);
        let local = Held::new(&bed.local, false, &shape, Batch, &[]);
        let pushed = [4096, 96 << 10].map(|bytes| {
            let shape = desc(Placement::Device, 2, 1, bytes);
            let from = Held::new(&bed.local, false, &shape, Batch, &[]);
            let own = from.fill(7);
            (from, Held::new(&bed.remote, false, &shape, Batch, &[]), own)
        });
        let (mut round, mut done, mut failed) = (0, 0, 0);
        for (name, fault) in faults().filter(|(name, _)| !name.starts_with("garble")) {
            for at in steps(600, 83).chain([9000]) {
                let what = format!("{way:?}, {name} at {at}");
                round += 1;
                let remote = Held::new(&bed.remote, false, &shape, Batch, &[Some(request(round))]);
                let bytes = remote.fill(round as u8);
                link(&bed.local, &bed.remote).unwrap();
                bed.arm(fault(at));
                local.write(&[vec![0; 4096], vec![0; 4096]]);
                let slot = PullRows::Slot { local: 0, size: -1 };
                let pulled = bounded(&what, || {
                    bed.local.pull(of(2, Name::Key(request(round))), &local.end(), &slot, Layers::ALL)
                });
                if pulled.is_ok() {
                    assert!(local.read() == bytes, "{what}");
                    assert!(bed.remote.find_key(request(round)).is_err(), "{what}: pulled, and not released");
                } else if local.read() != bytes {
                    assert!(bed.remote.find_key(request(round)).is_ok(), "{what}: released, and not pulled");
                }
                bed.clean();
                // Bytes that follow their request, and bytes that are asked for.
                for (local, into, own) in &pushed {
                    link(&bed.local, &bed.remote).unwrap();
                    bed.arm(fault(at));
                    let before = into.fill(8);
                    let to = of(2, Name::Row { cache: into.cache.id(), row: 0 });
                    let pushed = bounded(&what, || {
                        bed.local.push(&local.end(), to, &PushRows::Slot { local: 0 }, Layers::ALL)
                    });
                    if pushed.is_ok() {
                        assert!(into.read() == *own, "{what}: pushed, and not there");
                        done += 1;
                    } else if at < 83 {
                        assert!(into.read() == before, "{what}: half a request, and something was written");
                        failed += 1;
                    }
                    bed.clean();
                }
                bed.remote.deallocate(remote.cache.id()).unwrap();
                bed.remote.remove_key(request(round)).unwrap();
            }
        }
        assert!(done > 0 && failed > 0, "{way:?}: {done} pushes went well, {failed} did not");
    }
}
