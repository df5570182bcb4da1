//! An owner answers for the checksums of the pairs of a plan, and refuses what it must not answer.
//!
//! `kv_layouts::wire` tests that both sides calculate the same, `tests/test_hostile_verify.py` grants, load, and plans that
//! lie.

use std::io::Read;
use std::os::fd::AsFd;

use llm_datadist_core::bindings::Name;
use llm_datadist_core::testing::checksums::Checksums;
use llm_datadist_core::testing::net::{Stream, Tcp};
use llm_datadist_core::testing::plan::{Side, Span, Template, TensorSteps};
use llm_datadist_core::testing::protocol::{
    MAX_CHECKSUMS, NamedCache, Reply, Request, WirePlan, WireTemplates, digest, kind_of,
};
use llm_datadist_core::{CacheId, CacheKind, ErrorKind};

use super::fake_peer::{Fake, ask, hear, one_span};
use super::{Held, Way, config, device, open, row};
use crate::fixtures::listed;

const TENSORS: u32 = 4;
const ROWS: u64 = 6;
const ROW: u64 = 4096;

/// An owner with a cache, and the call stream of a simulated peer.
struct Owner {
    into: Held,
    call: Stream,
    _open: (llm_datadist_core::bindings::DataDist, Stream),
}

impl Owner {
    fn new() -> Owner {
        let engine = open(config(2, Way::Tcp), Way::Tcp);
        let into = Held::pool(&engine, &device(TENSORS, ROWS as usize, ROW as usize), CacheKind::Blocks);
        let (control, call) = Fake::new(1, 1).calling(&engine, &Tcp, 7);
        Owner { into, call, _open: (engine, control) }
    }

    fn ask(&self, cache: CacheId, plan: WirePlan, side: Side) -> Reply {
        ask(&self.call, &request(cache, plan, side));
        hear(&self.call).unwrap()
    }

    /// Returns the checksums, and the digest of the request.
    fn sums(&self, plan: WirePlan, side: Side) -> (Vec<u64>, u64) {
        let cache = self.into.cache.id();
        let asked = digest(&request(cache, plan.clone(), side)).unwrap();
        match self.ask(cache, plan, side) {
            Reply::Checksums { generation: 0, sums } => (sums, asked),
            reply => panic!("{reply:?}"),
        }
    }

    fn refusal(&self, plan: WirePlan, side: Side) -> String {
        match self.ask(self.into.cache.id(), plan, side) {
            Reply::Failed { kind, message, .. } => {
                assert_eq!(kind_of(kind), ErrorKind::InvalidArgument, "{message}");
                message
            }
            reply => panic!("{reply:?}"),
        }
    }
}

fn request(cache: CacheId, plan: WirePlan, side: Side) -> Request {
    let name = Name::Row { cache, row: 0 };
    Request::Checksums { cache: NamedCache { name, id: cache }, plan, side }
}

fn template(units: (u64, u64), pairs: &[(u32, u32)], spans: &[Span]) -> Template {
    Template::new(units, pairs.to_vec(), spans.to_vec())
}

/// A plan that reads tensors 1 and 3, and writes tensors 2 and 3.
fn plan(templates: Vec<Template>) -> WirePlan {
    let (src, dst) = (TensorSteps { first: 1, step: 2 }, TensorSteps { first: 2, step: 1 });
    WirePlan { num_tensors: 2, src, dst, templates: WireTemplates(Ok(listed(templates))) }
}

/// Ranges of bytes at one end, each of a first byte and a length.
type Ranges = Vec<(u64, u64)>;

#[test]
fn an_owner_hashes_the_pairs_that_a_plan_names() {
    let owner = Owner::new();
    let mut bytes = owner.into.fill(3);
    let spans =
        [Span { src: 64, dst: 512, len: 16, count: 3, src_step: 100, dst_step: -32 }, one_span(0, 700, 40)];
    let asked = || {
        plan(vec![
            template((ROW, 2048), &[(2, 3), (5, 0)], &spans),
            template((8, 8), &[(1, 100)], &[one_span(8, 0, 8)]),
        ])
    };
    // What each pair reads and writes in a tensor.
    let read_from = |at: u64| vec![(at + 64, 16), (at + 164, 16), (at + 264, 16), (at, 40)];
    let written_to = |at: u64| vec![(at + 512, 16), (at + 480, 16), (at + 448, 16), (at + 700, 40)];
    let read = [read_from(2 * ROW), read_from(5 * ROW), vec![(16, 8)]];
    let written = [written_to(3 * 2048), written_to(0), vec![(800, 8)]];
    let name = row(&owner.into, 0);
    let check =
        |(sums, asked): (Vec<u64>, u64), bytes: &[Vec<u8>], pairs: &[Ranges; 3], tensors: [usize; 2]| {
            let sum = |ranges: &Ranges| {
                let mut block = Checksums::bound_to(name, owner.into.cache.id(), 0, asked).unwrap().block();
                for tensor in tensors {
                    for &(start, len) in ranges {
                        block.add(&bytes[tensor][start as usize..][..len as usize]);
                    }
                }
                block.value()
            };
            assert_eq!(sums, pairs.each_ref().map(sum));
        };
    check(owner.sums(asked(), Side::Source), &bytes, &read, [1, 3]);
    check(owner.sums(asked(), Side::Destination), &bytes, &written, [2, 3]);
    // One bit of the second pair of the source.
    bytes[3][5 * ROW as usize + 39] ^= 4;
    owner.into.write(&bytes);
    check(owner.sums(asked(), Side::Source), &bytes, &read, [1, 3]);
    assert!(owner.sums(plan(vec![]), Side::Source).0.is_empty());
}

#[test]
fn an_owner_refuses_pairs_that_it_must_not_hash() {
    let owner = Owner::new();
    let tensor = ROWS * ROW;
    let one = |span: Span| plan(vec![template((ROW, ROW), &[(0, 0)], &[span])]);
    // Bounds at the end that is asked for; the other end is not here.
    for (side, span) in [(Side::Source, one_span(1, 0, tensor)), (Side::Destination, one_span(0, 1, tensor))]
    {
        assert_eq!(owner.sums(one(span), side.other()).0.len(), 1);
        let refused = owner.refusal(one(span), side);
        assert!(refused.contains("exceeds the bounds"), "{refused}");
    }
    let whole = one(one_span(0, 0, tensor));
    let tensors = |src, dst| WirePlan {
        src: TensorSteps { first: src, ..whole.src },
        dst: TensorSteps { first: dst, ..whole.dst },
        ..whole.clone()
    };
    assert!(owner.refusal(tensors(2, 0), Side::Source).contains("2 tensors from tensor 2"));
    assert!(owner.refusal(tensors(0, 3), Side::Destination).contains("2 tensors from tensor 3"));
    // More bytes than a request may ask for, although the cache has few: each pair reads the same row.
    let same = |count: usize, len: u64| {
        let pairs: Vec<_> = (0..count as u32).map(|at| (0, at)).collect();
        plan(vec![template((0, len), &pairs, &[one_span(0, 0, len)])])
    };
    let long = one(Span { count: 40_000, dst_step: ROW.cast_signed(), ..one_span(0, 0, ROW) });
    for plan in [same(40_000, ROW), long] {
        let refused = owner.refusal(plan, Side::Source);
        assert!(refused.contains("too many bytes") && refused.contains("limit=134217728"), "{refused}");
    }
    let refused = owner.refusal(same(MAX_CHECKSUMS + 1, 1), Side::Source);
    assert!(refused.contains("too many pairs (pairs=65537, limit=65536"), "{refused}");
    let sums = owner.sums(same(MAX_CHECKSUMS, 1), Side::Source).0;
    assert!(sums.len() == MAX_CHECKSUMS && sums.iter().all(|sum| *sum == sums[0]));
}

/// A read sends the checksum of its bytes in the order of the plan, if it is asked for. Otherwise nothing follows the bytes.
#[test]
fn an_owner_sums_the_bytes_that_it_sends() {
    let owner = Owner::new();
    let bytes = owner.into.fill(3);
    let cache = owner.into.cache.id();
    let name = Name::Row { cache, row: 0 };
    let spans = [Span { src: 64, dst: 0, len: 16, count: 3, src_step: 100, dst_step: 16 }];
    for (from, to, summed) in
        [(0, 192, true), (0, 192, false), (40, 150, true), (100, 100, true), (0, 192, true)]
    {
        let plan = plan(vec![template((ROW, ROW), &[(2, 0), (5, 1)], &spans)]);
        let named = NamedCache { name, id: cache };
        let read = Request::Read { cache: named, generation: None, plan, range: from..to, summed };
        ask(&owner.call, &read);
        let ready: Reply = hear(&owner.call).unwrap();
        assert_eq!(ready, Reply::Ready { bytes: to - from });
        let pieces = |tensor: usize, row: usize| {
            [64, 164, 264].map(|start| &bytes[tensor][row * ROW as usize + start..][..16]).concat()
        };
        let right = [pieces(1, 2), pieces(1, 5), pieces(3, 2), pieces(3, 5)].concat();
        let right = &right[from as usize..to as usize];
        let mut got = vec![0; right.len()];
        read_exactly(&owner.call, &mut got);
        assert_eq!(got, right);
        if summed {
            let asked = digest(&read).unwrap();
            let mut block = Checksums::bound_to(name, cache, 0, asked).unwrap().block();
            block.add(right);
            assert_eq!(
                hear::<Reply>(&owner.call).unwrap(),
                Reply::Checksums { generation: 0, sums: vec![block.value()] }
            );
        }
    }
    let nothing = NamedCache { name: Name::Row { cache, row: 99 }, id: cache };
    let plan = plan(vec![template((ROW, ROW), &[(2, 0)], &spans)]);
    ask(&owner.call, &Request::Read { cache: nothing, generation: None, plan, range: 0..8, summed: true });
    assert_eq!(hear::<Reply>(&owner.call).unwrap(), Reply::Stale);
}

fn read_exactly(stream: &Stream, bytes: &mut [u8]) {
    let mut socket = std::fs::File::from(stream.as_fd().try_clone_to_owned().unwrap());
    let mut done = 0;
    while done < bytes.len() {
        match socket.read(&mut bytes[done..]) {
            Ok(count) => done += count,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock),
        }
    }
}
