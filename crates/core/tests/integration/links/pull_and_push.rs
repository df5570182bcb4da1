//! Pulls and pushes: which bytes arrive, over every transport, in both modes, between all kinds of memory.
//!
//! `tests/test_pull.py`, `tests/test_push.py` and `tests/test_cpp.py` cover layouts and refusals between
//! processes; `broken_streams` and `races` cover failures.

use llm_datadist_core::bindings::{CacheKey, LayerRange, Layers, Name, Rows, Target};
use llm_datadist_core::testing::model::GrantId;
use llm_datadist_core::testing::protocol::{Reply, Request, WireCache};
use llm_datadist_core::{CacheId, CacheKind, ClusterId, Deadline, ErrorKind, GrantToken, Placement};

use super::asynchronous::outcome;
use super::fake_peer::{Fake, described, hear_request, say};
use super::layerwise::{blocks, to};
use super::{
    Held, LONG, Pair, Way, block_rows, config, device, each, fails_saying, fails_with, of, open, pairs,
    pull_blocks, pulling, push_blocks, push_slot, request, row, under,
};
use crate::fixtures::{Own, desc};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

fn layers(src: (u32, u32), dst: (u32, u32), tensors_per_layer: u32) -> Layers {
    let range = |(first, end)| Some(LayerRange { first, end });
    Layers { src: range(src), dst: range(dst), tensors_per_layer }
}

/// How a slot is copied to the other cache.
#[derive(Clone, Copy, Debug)]
enum Call {
    /// A pull of this many bytes; −1 for a whole slot of the caller's cache.
    Pull(i64),
    /// A push of a whole slot of the caller's cache.
    Push,
}

/// Slots arrive, named by key or by id, by calls that wait and by calls that are started. A call with every tensor of an
/// allocated slot releases its key; contract §17.4 states this for pushes.
#[test]
fn slots_arrive() {
    use Call::{Pull, Push};
    // Bytes of a slot of source and destination; calls; layers; first tensor read, first written, and count.
    type Case = (usize, usize, &'static [Call], Layers, (usize, usize, usize));
    let cases: [Case; 6] = [
        (64, 64, &[Pull(-1), Push], Layers::ALL, (0, 0, 6)),
        (96, 64, &[Pull(-1)], layers((1, 3), (0, 2), 2), (2, 0, 4)),
        (5000, 4999, &[Pull(33)], layers((1, 2), (0, 1), 3), (3, 0, 3)),
        (64, 96, &[Pull(1), Push], layers((2, 5), (3, 6), 1), (2, 3, 3)),
        (4097, 4097, &[Push], layers((1, 2), (0, 1), 2), (2, 0, 2)),
        // Six tensors are no complete layer of seven tensors.
        (64, 64, &[Push], Layers { tensors_per_layer: 7, ..Layers::ALL }, (0, 0, 0)),
    ];
    each(|one_sided, pair, local, remote| {
        let calls = cases.iter().flat_map(|case| case.2.iter().map(move |call| (case, *call)));
        let both_ways = calls.flat_map(|call| [(call, false), (call, true)]);
        for ((&(from, to, _, layers, (src, dst, count)), call), starts) in both_ways {
            let what = format!("{call:?}, {from} to {to}, started {starts}");
            let (ends, memory) = match call {
                Pull(_) => ([&pair.remote, &pair.local], [remote, local]),
                Push => ([&pair.local, &pair.remote], [local, remote]),
            };
            let keys = [Some(request(1)), Some(request(2)), None];
            let source = memory[0].held(ends[0], (6, 3, from), Batch, &keys);
            let into = memory[1].held(ends[1], (6, 3, to), Batch, &[]);
            let (bytes, mut expected) = (source.fill(1), into.fill(2));
            let len = match call {
                Pull(-1) => to,
                Pull(size) => size as usize,
                Push => from,
            };
            for tensor in 0..count {
                let slot = &bytes[src + tensor][from..][..len];
                expected[dst + tensor][2 * to..][..len].copy_from_slice(slot);
            }
            let moves = match call {
                Pull(size) => {
                    let name = if size == -1 { Name::Key(request(2)) } else { row(&source, 1) };
                    pair.local.pull(of(2, name), &into.end(), Rows::slot(2, size), layers)
                }
                Push => {
                    let missing = fails_with(
                        push_slot(&pair.local, &source, 0, of(2, row(&into, 9))),
                        ErrorKind::InvalidArgument,
                    );
                    assert!(
                        missing.fact("name").is_some_and(|name| name.starts_with("slot 9 of")),
                        "{missing}"
                    );
                    pair.local.push(&source.end(), of(2, row(&into, 2)), Rows::slot(1, -1), layers)
                }
            };
            if starts {
                let transfer = moves.start().unwrap();
                assert_eq!(outcome(&transfer), Ok((count * len) as u64), "{what}");
                assert_eq!(transfer.progress().done, (count * len) as u64, "{what}");
            } else {
                moves.run().unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            assert!(into.read() == expected, "{what}");
            assert!(source.read() == bytes, "{what}: the source changed");
            let served = matches!(call, Push) || !one_sided;
            let released = count == 6 && served && !memory[0].registered;
            assert_eq!(ends[0].find_key(request(2)).is_err(), released, "{what}");
            ends[0].find_key(request(1)).unwrap();
            [1, 2].into_iter().for_each(|key| ends[0].remove_key(request(key)).unwrap());
            source.free(ends[0]);
            into.free(ends[1]);
        }
    });
}

#[test]
fn large_pulls_over_several_streams_keep_their_order() {
    const BLOCKS: usize = 36;
    const BYTES: usize = 1 << 20;
    let pair = Pair::with(Way::Tcp, |config| config.links.streams = 3);
    let shape = desc(Placement::Host, 1, BLOCKS, BYTES);
    let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(KEY)]);
    let local = Held::pool(&pair.local, &device(1, BLOCKS, BYTES), Blocks);
    let source = remote.fill(1);
    let straight: Vec<i64> = (0..BLOCKS as i64).collect();
    let scattered: Vec<i64> = straight.iter().map(|block| block * 7 % BLOCKS as i64).collect();
    let cases = [
        (scattered.clone(), straight.clone()),
        (straight.clone(), scattered.clone()),
        // Every block is written twice. The last write takes effect, whichever stream it uses.
        ([&straight[..], &scattered].concat(), straight.repeat(2)),
    ];
    for (theirs, ours) in cases {
        let mut expected = local.fill(2);
        for (&from, &to) in theirs.iter().zip(&ours) {
            let (from, to) = (from as usize * BYTES, to as usize * BYTES);
            expected[0][to..to + BYTES].copy_from_slice(&source[0][from..from + BYTES]);
        }
        pull_blocks(&pair.local, of(2, Name::Key(KEY)), &local, &theirs, &ours).unwrap();
        assert!(local.read() == expected);
    }
    let served = pair.remote.stats().links.remove(0);
    assert_eq!(served.requests.calls, 0, "the owner asks nothing");
}

/// A pull is checked against the current cache, not against a description remembered from an earlier pull.
#[test]
fn remembered_description_does_not_decide_what_is_legal() {
    for pair in pairs() {
        let local = Held::pool(&pair.local, &desc(Placement::Host, 2, 4, 64), Blocks);
        let pull = |block| pull_blocks(&pair.local, of(2, Name::Key(KEY)), &local, &[block], &[0]);
        for blocks in [4, 9, 8] {
            let shape = desc(Placement::Host, 2, blocks, 64);
            let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(KEY)]);
            let bytes = remote.fill(blocks as u8);
            pull(blocks as i64 - 1).unwrap();
            assert_eq!(local.read()[1][..64], bytes[1][(blocks - 1) * 64..]);
            remote.free(&pair.remote);
        }
        // The cache is gone. Block 100 would not have fitted it either.
        for block in [0, 100] {
            fails_with(pull(block), ErrorKind::CacheNotFound);
        }
        // The same key names caches that are closed and open to peers in turn.
        let mut caches = vec![];
        for open in [false, true, false, true] {
            caches.push(Own::new(&desc(Placement::Host, 2, 4, 64), Blocks, |adopted| {
                pair.remote.register(adopted, &[Some(KEY)], Some(open)).unwrap()
            }));
            let refused = pull(0).err().map(|error| error.kind());
            assert_eq!(refused, (!open).then_some(ErrorKind::InvalidArgument));
        }
    }
}

/// A pull takes a grant beside the name of the remote cache. In the place of that name it is refused, by every call.
#[test]
fn a_grant_is_no_name_of_a_remote_cache() {
    let pair = Pair::new(Way::Shm);
    let local = Held::pool(&pair.local, &device(2, 1, 64), Blocks);
    let name = Name::Grant(GrantId { slot: 0, generation: 0, secret: [0; 16] });
    let layers = vec![to(2, Target::Cache { name: name.into(), first_layer: Some(0) }, 1)];
    for refused in [
        pull_blocks(&pair.local, of(2, name), &local, &[0], &[0]),
        push_blocks(&pair.local, &local, &[0], of(2, name), &[0]),
        pair.local.transfer_async(&local.end(), &blocks(&[0], &[0]), layers, None).map(drop),
    ] {
        fails_saying(refused, ErrorKind::InvalidArgument, "pass it as the grant of a pull");
    }
}

/// An owner that does not know the name any more answers with another kind when it is asked why a grant has ended.
#[test]
fn a_pull_under_an_ended_grant_fails_with_grant_ended() {
    let engine = open(config(1, Way::Shm), Way::Shm);
    let (listener, owner, socket) = Fake::on_this_host("reason");
    let (linked, _control) =
        listener.linked_by(&engine, || (listener.greet_with(Some(socket)), owner.linked()));
    linked.unwrap();

    // The owner offers the memory of the engine as its own, so the engine sees its own grants as those of the owner.
    let shape = device(2, 2, 64);
    let near = Held::pool(&engine, &shape, Blocks);
    let lent = engine.grant(&near.end(), &[0, 1], LONG, 1).unwrap();
    let token = GrantToken { cluster: ClusterId(2), incarnation: 1, ..engine.grant_token(&lent) };
    let pull = || {
        let from = of(2, Name::Row { cache: CacheId(5), row: 0 });
        pulling(&engine, from, &near, block_rows(&[0], &[1]), under(token)).run().unwrap_err()
    };
    let record = WireCache { granted: vec![(0, 2)], ..described(CacheId(5), &shape, Blocks) };
    let described = Reply::Described(record);
    let kind = ErrorKind::ALL.iter().position(|&kind| kind == ErrorKind::CacheNotFound).unwrap();
    let failed =
        Reply::Failed { kind: u8::try_from(kind).unwrap(), message: "injected".into(), arrived: vec![] };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (stream, _) = owner.greet();
            while let Ok(request) = hear_request(&stream) {
                let answers = matches!(request, Request::Describe { .. }) && lent.ended().is_none();
                say(&stream, if answers { &described } else { &failed });
            }
        });
        assert_eq!(pull().kind(), ErrorKind::CacheNotFound);
        engine.start_revoke(&lent, None).unwrap().join(Deadline::after(LONG)).unwrap();
        let error = pull();
        // Ends the stream.
        engine.unlink_clusters(&[listener.address()], LONG, true).remove(0).unwrap();
        assert_eq!((error.kind(), error.fact("ended")), (ErrorKind::GrantEnded, None), "{error}");
    });
}
