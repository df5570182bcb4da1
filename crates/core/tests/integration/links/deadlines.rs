//! Deadlines and interrupts of calls that wait for a peer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{CacheKey, CallExtras, Layers, Name, Side};
use llm_datadist_core::{CacheKind, ClusterId, Deadline, ErrorKind, Placement, Result};

use super::fake_peer::Fake;
use super::layerwise_faults::Slow;
use super::{
    Held, LONG, Pair, WAYS, Way, block_rows, config, eventually, fails_with, link, member, of, open,
    open_with, pull_blocks, pull_slot, push_blocks, request, row, times,
};
use crate::emulation::PROCESS_READS;
use crate::fixtures::{adopt, desc};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

/// Whichever side's clock is first, a call that runs out of time reports a timeout.
#[test]
fn late_calls_time_out() {
    let shape = desc(Placement::Host, 1, 48, 256 << 10);
    let all: Vec<i64> = (0..48).collect();
    for (way, millis) in WAYS.into_iter().flat_map(|way| [1, 2, 5].map(|millis| (way, millis))) {
        let pair = Pair::with(way, |config| config.sync_timeout = Duration::from_millis(millis));
        let local = Held::pool(&pair.local, &shape, Blocks);
        let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(KEY)]);
        remote.fill(1);
        let name = of(2, Name::Key(KEY));
        for _ in 0..times(12) {
            let pulled = pull_blocks(&pair.local, name, &local, &all, &all);
            let pushed = push_blocks(&pair.local, &local, &all, name, &all);
            for (what, result) in [("pull", pulled), ("push", pushed)] {
                if let Err(error) = result {
                    assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?} {what} {millis} ms: {error}");
                }
            }
        }
    }
}

static ASKED: Mutex<Vec<thread::ThreadId>> = Mutex::new(Vec::new());

fn note_thread() -> bool {
    ASKED.lock().unwrap().push(thread::current().id());
    false
}

/// How often `note_thread` ran during `call`, always on this thread.
fn asked_here(call: impl FnOnce()) -> usize {
    ASKED.lock().unwrap().clear();
    call();
    let asked = std::mem::take(&mut *ASKED.lock().unwrap());
    assert!(asked.iter().all(|&id| id == thread::current().id()), "asked on another thread");
    asked.len()
}

/// The binding runs the interpreter's signal handlers in `interrupted_by`.
#[test]
fn only_the_calling_thread_checks_for_interrupts() {
    let silent = [50, 51].map(|cluster| Fake::new(cluster, 1));
    let peers = silent.each_ref().map(Fake::address);
    let local = open(config(1, Way::Tcp), Way::Tcp).interrupted_by(note_thread);
    let asked = asked_here(|| {
        let results = local.link_clusters(&peers, Duration::from_millis(250));
        assert!(results.iter().all(|result| result.as_ref().unwrap_err().kind() == ErrorKind::Timeout));
    });
    assert!(asked > 0);

    // A large pull uses several streams.
    let streams = |cluster| open_with(cluster, Way::Tcp, |config| config.links.streams = 3);
    let (local, remote) = (streams(1).interrupted_by(note_thread), streams(2));
    link(&local, &remote).unwrap();
    let shape = desc(Placement::Host, 1, 1, 40 << 20);
    let (into, source) = (Held::pool(&local, &shape, Batch), Held::pool(&remote, &shape, Batch));
    asked_here(|| (0..times(10)).for_each(|_| pull_slot(&local, of(2, row(&source, 0)), &into).unwrap()));
}

/// Makes a call, and sets `flag` after a while.
fn set_meanwhile<T>(flag: &'static AtomicBool, after: Duration, call: impl FnOnce() -> T) -> T {
    thread::scope(|scope| {
        scope.spawn(move || {
            thread::sleep(after);
            flag.store(true, Ordering::SeqCst);
        });
        call()
    })
}

static STOP: AtomicBool = AtomicBool::new(false);

/// An interrupt ends every wait of a call: for a link, for a stream of the peer, and for its answer.
#[test]
fn interrupted_call_ends() {
    let silent = Fake::new(2, 1);
    let engine = open(config(1, Way::Tcp), Way::Tcp).interrupted_by(|| STOP.load(Ordering::SeqCst));
    let into = Held::pool(&engine, &desc(Placement::Host, 2, 1, 64), Batch);
    let ends = |call: &dyn Fn() -> Result<()>| {
        let interrupted = set_meanwhile(&STOP, Duration::from_millis(600), call);
        fails_with(interrupted, ErrorKind::Interrupted);
        STOP.store(false, Ordering::SeqCst);
    };
    let link = || engine.link_clusters(&[silent.address()], LONG).remove(0);
    let pull = || pull_slot(&engine, of(2, Name::Key(request(1))), &into);
    ends(&link);
    drop(silent.accept());
    for outgoing in [true, false] {
        let _control = if outgoing {
            silent.linked_by(&engine, || silent.linked()).1
        } else {
            // The engine asks for a stream, and none comes.
            silent.link(&engine, 5).unwrap()
        };
        ends(&pull);
        ends(&|| engine.check_link(ClusterId(2)));
        if outgoing {
            // The peer takes the request and does not answer. The two calls above gave up their streams.
            drop((silent.accept(), silent.accept()));
            thread::scope(|scope| {
                let peer = scope.spawn(|| silent.greet());
                ends(&pull);
                drop(peer.join().unwrap());
            });
        }
        engine.unlink_clusters(&[silent.address()], LONG, true).remove(0).unwrap();
    }
}

static INTERRUPT: AtomicBool = AtomicBool::new(false);

/// An interruption of the wait for a group cancels the group. It returns once the group has ended.
#[test]
fn interrupted_group_is_cancelled() {
    // The wait for the end of the cancelled group is not interrupted.
    let engine = open(config(1, Way::Tcp), Way::Tcp);
    let (_silent, _control) = Fake::linked_to(&engine);
    let into = Held::pool(&engine, &desc(Placement::Host, 2, 1, 64), Blocks);
    let part = member(of(2, Name::Key(KEY)), &into, block_rows(&[0], &[0]));
    let began = Instant::now();
    let extras = CallExtras::default();
    let group = engine.transfer_group(Side::Destination, vec![part], false, extras, None).unwrap();
    let interrupted: fn() -> bool = || INTERRUPT.swap(false, Ordering::SeqCst);
    let joined = set_meanwhile(&INTERRUPT, Duration::from_millis(300), || {
        group.join(Deadline::after(2 * LONG).watched(Some(interrupted)))
    });
    fails_with(joined, ErrorKind::Interrupted);
    let pulls = engine.stats().ops.into_iter().find(|(name, _)| *name == "pull").unwrap().1;
    assert_eq!((pulls.calls, pulls.failures), (1, 1), "the group has ended");
    assert!(began.elapsed() < LONG / 2, "the group was not cancelled");
}

/// The peer ends a transfer that pins its rows for longer than its pin limit, whatever the limit of the push.
#[test]
fn unanswered_push_keeps_reads_out_of_place_for_the_pin_limit() {
    for way in WAYS.into_iter().filter(|way| way.shares()) {
        let slow = Slow::with_pin_limit(way, Duration::from_millis(300), Duration::from_secs(1));
        let shape = desc(Placement::Host, 2, 4, 64);
        let [source, into] = [(); 2].map(|()| Held::pool(&slow.local, &shape, Blocks));
        let remote = Held::new(&slow.remote, false, &shape, Blocks, &[Some(KEY)]);
        let name = of(2, Name::Key(KEY));
        let pull = || pull_blocks(&slow.local, name, &into, &[1], &[1]);
        pull().unwrap();
        slow.holding(&remote, |release| {
            let rows = block_rows(&[1], &[1]);
            let push = slow.local.push(&source.end(), name, rows, Layers::ALL).within(Some(LONG * 100));
            let push = push.start().unwrap();
            // While the push is under way, the owner is asked, and its row is pinned.
            eventually("the push", || pull().is_err());
            push.cancel();
            eventually("a read in place", || pull().is_ok());
            release();
            assert!(push.wait(Deadline::after(LONG)).unwrap());
        });
    }
}

/// The peer may still execute a push that it did not answer. Until it no longer can, no read is made in
/// place. The owner makes such a read wait for a pinned row within the caller's limit, and serves other rows
/// meanwhile. A push that the peer refused is over.
#[test]
fn unanswered_push_keeps_reads_out_of_place() {
    for way in WAYS.into_iter().filter(|way| way.shares()) {
        let slow = Slow::new(way, Duration::from_secs(2));
        let shape = desc(Placement::Host, 2, 4, 64);
        let [source, into] = [(); 2].map(|()| Held::pool(&slow.local, &shape, Blocks));
        let remote = Held::new(&slow.remote, false, &shape, Blocks, &[Some(KEY)]);
        let (bytes, before) = (source.fill(1), remote.fill(2));
        let name = of(2, Name::Key(KEY));
        let push = |source: &Held| push_blocks(&slow.local, source, &[1], name, &[1]);
        // Usually this side gives up first. If the machine stalls, the peer may answer in time.
        let unanswered = || {
            eventually("a push without an answer", || {
                let error = push(&source).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?}: {error}");
                error.fact("reported_by").is_none()
            });
        };
        let pull = || {
            into.fill(3);
            pull_blocks(&slow.local, name, &into, &[1], &[1])
        };
        let pulled = |bytes: &[Vec<u8>], what: &str| {
            let got = into.read();
            assert!((0..2).all(|t| got[t][64..128] == bytes[t][64..128]), "{way:?}: {what}");
        };
        // While the peer pins the row, only a read in place succeeds.
        let in_place = |what: &str| {
            pull().unwrap_or_else(|error| panic!("{way:?}: {what}: {error}"));
            pulled(&before, what);
        };
        pull().unwrap();
        slow.holding(&remote, |release| {
            in_place("nothing was pushed");
            release();
        });
        remote.write(&before);
        // The source is memory that is not mapped. The side that reads it refuses: the peer, if reads by process id work.
        // Otherwise this side refuses after it has asked the peer, and does not know when the peer has ended the push.
        let by_peer = PROCESS_READS.missing().is_none();
        let refused =
            if by_peer { (ErrorKind::System, Some("the peer")) } else { (ErrorKind::InvalidArgument, None) };
        let hollow = adopt(&shape, Blocks, &[4096, 8192]);
        let hollow = Held { cache: slow.local.register(hollow, &[], Some(true)).unwrap(), own: None };
        let error = push(&hollow).unwrap_err();
        assert_eq!((error.kind(), error.fact("reported_by")), refused, "{error}");
        slow.holding(&remote, |release| {
            if by_peer {
                in_place("the push was refused");
            }
            unanswered();
            let error = pull().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{way:?}, behind the owner's pin: {error}");
            pull_blocks(&slow.local, name, &into, &[2], &[2]).unwrap();
            eventually("a read in place", || pull().is_ok());
            in_place("the push can come no more");
            release();
        });
        remote.write(&before);
        slow.holding(&remote, |release| {
            in_place("as before");
            unanswered();
            thread::scope(|scope| {
                let behind = scope.spawn(pull);
                thread::sleep(Duration::from_millis(50));
                release();
                behind.join().unwrap().unwrap();
            });
            pulled(&remote.read(), "not what the owner's own copy left");
            assert!(remote.read()[0][64..128] != bytes[0][64..128], "{way:?}: the push came late");
        });
    }
}
