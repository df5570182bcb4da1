//! Small pushes send their bytes directly after the request, and an invalid one fails only its call.
//!
//! `broken_streams` covers streams that break, `tests/test_peer_faults.py` stopped processes.

use std::thread;

use llm_datadist_core::bindings::{DataDist, Name};
use llm_datadist_core::testing::memory::Tensors;
use llm_datadist_core::testing::net::{Stream, Tcp, Transport};
use llm_datadist_core::testing::plan::TensorSteps;
use llm_datadist_core::testing::protocol::{self, MAX_AHEAD, NamedCache, Reply, Request, Timed, WirePlan};
use llm_datadist_core::{CacheId, CacheKind, Error, ErrorKind};

use super::fake_peer::{Fake, ask, describe, described, hear, hear_request, one_span, plan_of, say, soon};
use super::{Held, Ports, Way, config, device, fails_saying, of, open, push_blocks};
use crate::fixtures::{Buffer, Own, pattern};

const BLOCK: u64 = 4096;
const TENSORS: u32 = 2;
/// Blocks of each tensor of the engine's cache.
const BLOCKS: u64 = 40;
/// Bytes of one block in every tensor.
const WHOLE: u64 = BLOCK * TENSORS as u64;

/// An engine with a cache, and the streams of a simulated peer.
struct Owner {
    engine: DataDist,
    into: Held,
    _control: Stream,
    call: Stream,
}

/// Runs `judge` over TCP and over a local socket.
fn each(judge: impl Fn(&Owner)) {
    for (way, over) in [(Way::Tcp, &Tcp as &dyn Transport), (Way::Local, &Ports)] {
        let engine = open(config(2, way), way);
        let shape = device(TENSORS, BLOCKS as usize, BLOCK as usize);
        let into = Held::pool(&engine, &shape, CacheKind::Blocks);
        let (control, call) = Fake::new(1, 1).calling(&engine, over, 7);
        assert_eq!(call.about.carries_descriptors, way == Way::Local);
        judge(&Owner { engine, into, _control: control, call });
    }
}

/// `len` bytes from the start of the source to `dst`, in each tensor.
fn plan(dst: u64, len: u64) -> WirePlan {
    plan_of(0, TENSORS, &[one_span(0, dst, len)])
}

fn bytes(count: u64) -> Vec<u8> {
    (0..count as usize).map(|at| pattern(9, 0, at)).collect()
}

impl Owner {
    /// Sends a request to write bytes `from..to` of `plan`, followed by the bytes `behind`, in one call.
    fn send(&self, cache: CacheId, plan: WirePlan, (from, to): (u64, u64), behind: &[u8]) {
        let cache = NamedCache { name: Name::Row { cache, row: 0 }, id: cache };
        let request = Request::Write { cache, plan, range: from..to, ahead: true, shared: None };
        let frame = protocol::encode(&Timed { limit_ms: 10_000, request }).unwrap();
        self.call.send(&[frame, behind.to_vec()].concat(), soon()).unwrap();
    }

    fn write(&self, plan: WirePlan, range: (u64, u64), behind: &[u8]) {
        self.send(self.into.cache.id(), plan, range, behind);
    }

    /// Checks that the next request on the stream is read from its beginning.
    fn answers(&self) {
        ask(&self.call, &Request::Ping);
        assert_eq!(hear::<Reply>(&self.call).unwrap(), Reply::Done { bytes: 0 });
    }

    /// Checks that no row is pinned.
    fn is_free(&self) {
        let own = self.into.fill(3);
        let all: Vec<_> = (0..BLOCKS as i64 - 1).map(|row| (row, row + 1)).collect();
        self.engine.copy_blocks(&self.into.end(), &all).run().unwrap();
        assert!(self.into.read()[0].starts_with(&own[0][..BLOCK as usize]));
    }
}

/// Bytes up to the limit are written. One byte more ends the stream, and nothing is written.
#[test]
fn bytes_up_to_the_limit_are_written() {
    each(|owner| {
        let mut expected = owner.into.fill(1);
        for each in [1, BLOCK, MAX_AHEAD / u64::from(TENSORS)] {
            let sent = bytes(each * u64::from(TENSORS));
            let count = sent.len() as u64;
            owner.write(plan(BLOCK, each), (0, count), &sent);
            assert_eq!(hear::<Reply>(&owner.call).unwrap(), Reply::Done { bytes: count });
            for (tensor, bytes) in expected.iter_mut().zip(sent.chunks(each as usize)) {
                tensor[BLOCK as usize..][..each as usize].copy_from_slice(bytes);
            }
            assert!(owner.into.read() == expected, "{each} bytes a tensor");
        }
        // None of the bytes of the plan, or some of them.
        for (from, to) in [(0, 0), (5, 5), (1, BLOCK)] {
            let sent = bytes(to - from);
            owner.write(plan(0, BLOCK), (from, to), &sent);
            assert_eq!(hear::<Reply>(&owner.call).unwrap(), Reply::Done { bytes: to - from });
            expected[0][from as usize..to as usize].copy_from_slice(&sent);
            assert!(owner.into.read() == expected, "{from} to {to}");
        }
        owner.write(plan(0, BLOCK * 30), (0, MAX_AHEAD + 1), &bytes(MAX_AHEAD + 1));
        let Ok(Reply::Failed { kind, message, .. }) = hear(&owner.call) else { panic!("no refusal") };
        assert_eq!(protocol::kind_of(kind), ErrorKind::NotLinked);
        assert!(message.contains(&format!("bytes={}", MAX_AHEAD + 1)), "{message}");
        ask(&owner.call, &Request::Ping);
        assert!(hear::<Reply>(&owner.call).is_err(), "the stream goes on");
        assert!(owner.into.read() == expected);
        owner.is_free();
    });
}

/// The owner checks every bound of a request before it writes. It skips the bytes of a refused request.
#[test]
fn bytes_behind_a_refused_request_are_skipped() {
    use ErrorKind::InvalidArgument as Wrong;
    each(|owner| {
        let before = owner.into.fill(1);
        let shape = device(TENSORS, BLOCKS as usize, BLOCK as usize);
        let register = |adopted| owner.engine.register(adopted, &[], Some(false)).unwrap();
        let closed = Own::new(&shape, CacheKind::Blocks, register);
        let shut = closed.read();
        let good = || plan(0, BLOCK);
        let open = owner.into.cache.id();
        let all = (0, WHOLE);
        let cases = [
            ("another cache", CacheId(99), good(), all, None),
            ("closed to peers", closed.cache.id(), good(), all, Some(Wrong)),
            ("behind the tensor", open, plan(BLOCKS * BLOCK - 1, BLOCK), all, Some(Wrong)),
            ("past every address", open, plan(u64::MAX, BLOCK), all, Some(Wrong)),
            (
                "a tensor too many",
                open,
                WirePlan { dst: TensorSteps::consecutive(1), ..good() },
                all,
                Some(Wrong),
            ),
            ("more than the plan has", open, good(), (0, WHOLE + 1), Some(Wrong)),
            ("behind the plan", open, good(), (WHOLE + 1, WHOLE + 9), Some(Wrong)),
            ("a range that ends before it begins", open, good(), (9, 1), Some(Wrong)),
        ];
        // What follows looks like requests.
        let unlink = protocol::encode(&Timed { limit_ms: 1, request: Request::Unlink }).unwrap();
        let behind = |(from, to): (u64, u64)| -> Vec<u8> {
            unlink.iter().copied().cycle().take(to.saturating_sub(from) as usize).collect()
        };
        for (what, cache, plan, range, kind) in cases {
            owner.send(cache, plan, range, &behind(range));
            let refused = match hear::<Reply>(&owner.call).unwrap() {
                Reply::Failed { kind, .. } => Some(protocol::kind_of(kind)),
                Reply::Stale => None,
                reply => panic!("{what}: {reply:?}"),
            };
            assert_eq!(refused, kind, "{what}");
            owner.answers();
            assert!(owner.into.read() == before && closed.read() == shut, "{what}: something was written");
        }
        owner.is_free();
    });
}

/// The peer dies directly after its request, in the middle of its bytes, or before the last of them.
#[test]
fn peer_that_dies_behind_its_request_leaves_no_pin() {
    for behind in [0, 1, BLOCK, WHOLE - 1] {
        each(|owner| {
            owner.write(plan(0, BLOCK), (0, WHOLE), &bytes(behind));
            owner.call.close();
            owner.is_free();
        });
    }
}

/// An engine sends few bytes directly after its request, and more only once the owner is ready.
#[test]
fn few_bytes_follow_their_request() {
    let cases = [(1, BLOCK, true), (1, MAX_AHEAD / 2, true), (1, MAX_AHEAD / 2 + 1, false), (200, 64, false)];
    for (count, len, ahead) in cases {
        let engine = open(config(1, Way::Tcp), Way::Tcp);
        let shape = device(TENSORS, 2 * count as usize, len as usize);
        let local = Held::pool(&engine, &shape, CacheKind::Blocks);
        let own = local.fill(1);
        // Rows that are not neighbours, so that they are not joined.
        let rows: Vec<i64> = (0..count).map(|row: i64| row * row % 7 % 2 + 2 * row).collect();
        let block = |tensor: &[u8], row: i64| tensor[row as usize * len as usize..][..len as usize].to_vec();
        let expected: Vec<u8> =
            own.iter().flat_map(|tensor| rows.iter().flat_map(|&row| block(tensor, row))).collect();
        let total = expected.len() as u64;
        let take = |call: &Stream| {
            let got = Buffer::new(expected.len(), |_| 0);
            let tensors = Tensors::adopted(got.adopt(0, expected.len()));
            if total > MAX_AHEAD {
                call.receive_padding(soon()).unwrap();
            }
            call.receive_windows(&[tensors.window(0, 0, total).unwrap()], soon()).unwrap();
            assert!(got.read(0, expected.len()) == expected, "other bytes");
        };
        let (fake, _control) = Fake::linked_to(&engine);
        thread::scope(|scope| {
            scope.spawn(|| {
                let (call, _) = fake.greet();
                describe(&call, described(CacheId(5), &shape, CacheKind::Blocks));
                // The owner refuses the first request and takes the second, on the same stream.
                for refuses in [true, false] {
                    let request = hear_request(&call).unwrap();
                    let Request::Write { ahead: sent, range, .. } = request else { panic!("{request:?}") };
                    let to = range.end;
                    assert_eq!((sent, to), (ahead, total), "{count} blocks of {len}");
                    if ahead {
                        take(&call);
                    }
                    if refuses {
                        say(&call, &Reply::failed(&Error::new(ErrorKind::OutOfMemory, "not today")));
                        continue;
                    }
                    if !ahead {
                        say(&call, &Reply::Ready { bytes: to });
                        take(&call);
                    }
                    say(&call, &Reply::Done { bytes: to });
                }
            });
            let to = of(2, Name::Row { cache: CacheId(5), row: 0 });
            let push = || push_blocks(&engine, &local, &rows, to, &rows);
            fails_saying(push(), ErrorKind::OutOfMemory, "not today");
            push().unwrap();
        });
    }
}
