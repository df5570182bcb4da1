//! Bytes of a push that follow their request unasked: when they do, and that whatever is wrong with them costs nothing but
//! the call.
//!
//! Not for: streams that break (`broken`), or a process that was stopped (`tests/test_peer_faults.py`).

use std::sync::Arc;
use std::thread;

use llm_datadist_core::testing::memory::Tensors;
use llm_datadist_core::testing::net::{Stream, Tcp, Transport};
use llm_datadist_core::testing::plan::SpanList;
use llm_datadist_core::testing::protocol::{
    self, MOST_AHEAD, Pairs, Place, Record, Reply, Request, WireName, WirePlan, WireSpan, WireSteps,
};
use llm_datadist_core::testing::validate::Side;
use llm_datadist_core::{
    CacheId, CacheKind, DataDist, ErrorKind, Geometry, Layers, Name, Placement, PushRows,
};

use super::fake::{Fake, hear, say, soon};
use super::{Held, LONG, Ports, Way, config, eventually, of, open};
use crate::bed::{Buffer, desc, pattern};

const BLOCK: u64 = 4096;
const TENSORS: u32 = 2;
/// Of the engine's cache, in one tensor.
const BLOCKS: u64 = 40;

/// An engine, and the stream of a peer that says to it what it likes.
struct Bed {
    engine: DataDist,
    into: Held,
    _control: Stream,
    call: Stream,
}

/// Over TCP, and over a local socket.
fn each(judge: impl Fn(&Bed)) {
    for (way, over) in [(Way::Tcp, &Tcp as &dyn Transport), (Way::Local, &Ports)] {
        let engine = open(config(2, way), way);
        let shape = desc(Placement::Device, TENSORS, BLOCKS as usize, BLOCK as usize);
        let into = Held::new(&engine, false, &shape, CacheKind::Blocks, &[]);
        let (control, call) = Fake::new(1, 1).calling(&engine, over, 7);
        assert_eq!(call.carries_descriptors(), way == Way::Local);
        judge(&Bed { engine, into, _control: control, call });
    }
}

/// `len` bytes at the start of the source, to `dst` in each tensor.
fn plan(dst: u64, len: u64) -> WirePlan {
    let span = WireSpan { src: 0, dst, len, count: 1, src_step: 0, dst_step: 0 };
    let steps = WireSteps::Spans { waves: vec![1], spans: SpanList::pack([span]).unwrap() };
    WirePlan { num_tensors: TENSORS, src_tensor: 0, dst_tensor: 0, steps }
}

fn write(cache: CacheId, plan: WirePlan, (from, to): (u64, u64), ahead: bool) -> Request {
    let name = WireName::Row { cache: cache.0, row: 0 };
    Request::Write { name, cache: cache.0, plan, from, to, ahead, limit_ms: 10_000 }
}

fn bytes(count: u64) -> Vec<u8> {
    (0..count as usize).map(|at| pattern(9, 0, at)).collect()
}

/// A request and bytes behind it, in one go.
fn say_with(stream: &Stream, request: &Request, behind: &[u8]) {
    stream.send(&[protocol::encode(request).unwrap(), behind.to_vec()].concat(), soon()).unwrap();
}

impl Bed {
    fn cache(&self) -> CacheId {
        self.into.cache.id()
    }

    /// The stream is where the next request begins.
    fn goes_on(&self) {
        say(&self.call, &Request::Ping { limit_ms: 10_000 });
        assert_eq!(hear::<Reply>(&self.call).unwrap(), Reply::Done { bytes: 0 });
    }

    /// Nobody holds a row, and the link is there.
    fn is_free(&self) {
        let own = self.into.fill(3);
        let all: Vec<_> = (0..BLOCKS as i64 - 1).map(|row| (row, row + 1)).collect();
        self.engine.copy_blocks(&self.into.end(), &all).unwrap();
        assert!(self.into.read()[0].starts_with(&own[0][..BLOCK as usize]));
    }
}

#[test]
fn as_many_bytes_as_may_come_unasked_are_taken() {
    each(|bed| {
        let mut expected = bed.into.fill(1);
        for each in [1, BLOCK, MOST_AHEAD / u64::from(TENSORS)] {
            let sent = bytes(each * u64::from(TENSORS));
            let request = write(bed.cache(), plan(BLOCK, each), (0, sent.len() as u64), true);
            say_with(&bed.call, &request, &sent);
            assert_eq!(hear::<Reply>(&bed.call).unwrap(), Reply::Done { bytes: sent.len() as u64 });
            for (tensor, bytes) in expected.iter_mut().zip(sent.chunks(each as usize)) {
                tensor[BLOCK as usize..][..each as usize].copy_from_slice(bytes);
            }
            assert!(bed.into.read() == expected, "{each} bytes a tensor");
        }
        // No bytes, and some of those of the plan.
        for (from, to) in [(0, 0), (5, 5), (1, BLOCK)] {
            let sent = bytes(to - from);
            say_with(&bed.call, &write(bed.cache(), plan(0, BLOCK), (from, to), true), &sent);
            assert_eq!(hear::<Reply>(&bed.call).unwrap(), Reply::Done { bytes: to - from });
            expected[0][from as usize..to as usize].copy_from_slice(&sent);
            assert!(bed.into.read() == expected, "{from} to {to}");
        }
    });
}

#[test]
fn one_byte_more_costs_the_stream_and_writes_nothing() {
    each(|bed| {
        let before = bed.into.fill(1);
        let sent = bytes(MOST_AHEAD + 1);
        say_with(&bed.call, &write(bed.cache(), plan(0, BLOCK * 30), (0, MOST_AHEAD + 1), true), &sent);
        let Ok(Reply::Failed { kind, message, .. }) = hear(&bed.call) else { panic!("no refusal") };
        assert_eq!(protocol::kind_of(kind), ErrorKind::NotLinked);
        assert!(message.contains(&format!("bytes={}", MOST_AHEAD + 1)), "{message}");
        say(&bed.call, &Request::Ping { limit_ms: 10_000 });
        assert!(hear::<Reply>(&bed.call).is_err(), "the stream goes on");
        assert!(bed.into.read() == before);
        bed.is_free();
    });
}

/// Every bound of a request is checked before a byte is written, and the bytes behind it are not taken for requests.
#[test]
fn bytes_behind_a_refused_request_are_passed_over() {
    use ErrorKind::InvalidArgument as Wrong;
    each(|bed| {
        let before = bed.into.fill(1);
        let closed = crate::bed::Own::new(
            &desc(Placement::Host, TENSORS, BLOCKS as usize, BLOCK as usize),
            CacheKind::Blocks,
            |adopted| bed.engine.register(adopted, &[], Some(false)).unwrap(),
        );
        let shut = closed.read();
        let (whole, tensor) = (2 * BLOCK, BLOCKS * BLOCK);
        let good = || plan(0, BLOCK);
        let uneven = |mut plan: WirePlan| {
            plan.steps = WireSteps::Spans { waves: vec![2], spans: SpanList::default() };
            plan
        };
        let at = |dst| WireSpan { src: 0, dst, len: BLOCK, count: 1, src_step: 0, dst_step: 0 };
        let over = |spans: Vec<WireSpan>| {
            let steps =
                WireSteps::Spans { waves: vec![spans.len() as u32], spans: SpanList::pack(spans).unwrap() };
            WirePlan { steps, ..good() }
        };
        let blocks = |pairs| WirePlan {
            steps: WireSteps::Blocks { len: BLOCK, src: 0, dst: 0, pairs: Pairs(Arc::new(pairs)) },
            ..good()
        };
        let cases = [
            ("one destination twice", bed.cache(), over(vec![at(0), at(0)]), (0, whole), Some(Wrong)),
            ("over each other", bed.cache(), over(vec![at(BLOCK - 1), at(0)]), (0, whole), Some(Wrong)),
            ("one block twice", bed.cache(), blocks(vec![(0, 1), (1, 1)]), (0, whole), Some(Wrong)),
            ("another cache", CacheId(99), good(), (0, whole), None),
            ("closed to peers", closed.cache.id(), good(), (0, whole), Some(Wrong)),
            ("behind the tensor", bed.cache(), plan(tensor - 1, BLOCK), (0, whole), Some(Wrong)),
            ("past every address", bed.cache(), plan(u64::MAX, BLOCK), (0, whole), None),
            ("a tensor too many", bed.cache(), WirePlan { dst_tensor: 1, ..good() }, (0, whole), Some(Wrong)),
            ("more than the plan has", bed.cache(), good(), (0, whole + 1), Some(Wrong)),
            ("behind the plan", bed.cache(), good(), (whole + 1, whole + 9), Some(Wrong)),
            ("from behind to before", bed.cache(), good(), (9, 1), Some(Wrong)),
            ("no plan", bed.cache(), uneven(good()), (0, MOST_AHEAD), Some(ErrorKind::NotLinked)),
        ];
        for (what, cache, plan, (from, to), kind) in cases {
            // What follows looks like requests, in case somebody reads it as such.
            let ping = protocol::encode(&Request::Unlink { limit_ms: 1 }).unwrap();
            let behind: Vec<u8> =
                ping.iter().copied().cycle().take(to.saturating_sub(from) as usize).collect();
            say_with(&bed.call, &write(cache, plan, (from, to), true), &behind);
            match (hear::<Reply>(&bed.call).unwrap(), kind) {
                (Reply::Failed { kind, .. }, Some(expected)) => {
                    assert_eq!(protocol::kind_of(kind), expected, "{what}");
                }
                (Reply::Failed { .. }, None) => assert_ne!(what, "another cache"),
                (Reply::Stale, None) => assert_eq!(what, "another cache"),
                (reply, _) => panic!("{what}: {reply:?}"),
            }
            bed.goes_on();
            assert!(bed.into.read() == before && closed.read() == shut, "{what}: something was written");
        }
        bed.is_free();
    });
}

/// Cut off behind its request, in the middle of its bytes, or only behind them: rows are free again, and what was not whole
/// is not reported.
#[test]
fn a_peer_that_dies_behind_its_request_leaves_no_pin() {
    for behind in [0, 1, BLOCK, 2 * BLOCK - 1] {
        each(|bed| {
            let before = bed.into.fill(1);
            let request = write(bed.cache(), plan(0, BLOCK), (0, 2 * BLOCK), true);
            say_with(&bed.call, &request, &bytes(behind));
            bed.call.close();
            bed.is_free();
            if behind == 0 {
                bed.into.write(&before);
                eventually("the end of the call", || bed.engine.stats().links.len() == 1);
                assert!(bed.into.read() == before, "written without bytes");
            }
        });
    }
}

/// What an engine sends to a peer: few bytes at once, more when it is told to, and either way the same bytes.
#[test]
fn few_bytes_follow_their_request() {
    let blocks =
        [(1, BLOCK, true), (1, MOST_AHEAD / 2, true), (1, MOST_AHEAD / 2 + 1, false), (200, 64, false)];
    for (count, len, ahead) in blocks {
        let engine = open(config(1, Way::Tcp), Way::Tcp);
        let shape = desc(Placement::Device, TENSORS, 2 * count as usize, len as usize);
        let local = Held::new(&engine, false, &shape, CacheKind::Blocks, &[]);
        let own = local.fill(1);
        let side = Side {
            geometry: Geometry::new(&shape).unwrap(),
            kind: CacheKind::Blocks,
            placement: Placement::Device,
        };
        // Not in a row, so that they do not become one.
        let rows: Vec<i64> = (0..i64::from(count)).map(|row| row * row % 7 % 2 + 2 * row).collect();
        let expected: Vec<u8> = own
            .iter()
            .flat_map(|tensor| {
                rows.iter().flat_map(|&row| &tensor[row as usize * len as usize..][..len as usize])
            })
            .copied()
            .collect();
        let fake = Fake::new(2, 1);
        thread::scope(|scope| {
            let peer = scope.spawn(|| {
                let control = fake.linked();
                let (call, _) = fake.greet();
                let Request::Describe { .. } = hear(&call).unwrap() else { panic!("not asked what it is") };
                let mut record = Record::new(Place { place: 0, generation: 0 }, CacheId(5), 0, side);
                record.accessible = true;
                say(&call, &Reply::Described(record));
                // Refused, then taken, on the same stream.
                for refused in [true, false] {
                    let request: Request = hear(&call).unwrap();
                    let Request::Write { ahead: told, to, .. } = request else { panic!("{request:?}") };
                    assert_eq!((told, to), (ahead, expected.len() as u64), "{count} blocks of {len}");
                    let got = Buffer::new(expected.len(), |_| 0);
                    let take = || {
                        let tensors = Tensors::adopted(got.adopt(0, expected.len()));
                        let all = tensors.window(0, 0, expected.len() as u64).unwrap();
                        if expected.len() as u64 > MOST_AHEAD {
                            call.receive_lead(soon()).unwrap();
                        }
                        call.receive_windows(&[all], soon()).unwrap();
                        assert!(got.read(0, expected.len()) == expected, "other bytes");
                    };
                    if ahead {
                        take();
                    }
                    if refused {
                        let error = llm_datadist_core::Error::new(ErrorKind::OutOfMemory, "not today");
                        say(&call, &Reply::failed(&error));
                        continue;
                    }
                    if !ahead {
                        say(&call, &Reply::Ready { bytes: to });
                        take();
                    }
                    say(&call, &Reply::Done { bytes: to });
                }
                control
            });
            engine.link_clusters(&[fake.address()], LONG).remove(0).unwrap();
            let push = || {
                let rows = PushRows::Blocks { local: rows.clone(), remote: rows.clone() };
                let to = of(2, Name::Row { cache: CacheId(5), row: 0 });
                engine.push(&local.end(), to, &rows, Layers { tensors_per_layer: 1, ..Layers::ALL })
            };
            let error = push().unwrap_err();
            assert!(
                error.kind() == ErrorKind::OutOfMemory && error.to_string().contains("not today"),
                "{error}"
            );
            push().unwrap();
            drop(peer.join().unwrap());
        });
    }
}
