//! Pull: the bytes of a copy made by hand, over every transport, in both modes, between all kinds of memory.
//!
//! Not for: what goes wrong (`broken`, `races`).

use llm_datadist_core::{CacheKey, CacheKind, ErrorKind, LayerRange, Layers, Name, Placement, PullRows};

use super::{Pair, WAYS, Way, each, of, request, row};
use crate::bed::desc;
use crate::links::Held;

use CacheKind::{Batch, Blocks};

#[expect(clippy::unnecessary_wraps, reason = "as the arguments are")]
fn range(first: u32, end: u32) -> Option<LayerRange> {
    Some(LayerRange { first, end })
}

/// A slot from one cache into a slot of another, byte by byte.
struct Slot {
    remote: (u32, usize, usize),
    local: (u32, usize, usize),
    rows: (u32, u32),
    size: i64,
    layers: Layers,
    /// First tensor read, first written, how many.
    tensors: (usize, usize, usize),
}

#[test]
fn slots_arrive() {
    let plain = Layers::ALL;
    let per = |src, dst, tensors_per_layer| Layers { src, dst, tensors_per_layer };
    let cases = [
        Slot {
            remote: (2, 3, 64),
            local: (2, 3, 64),
            rows: (1, 2),
            size: -1,
            layers: plain,
            tensors: (0, 0, 2),
        },
        // The near slot is smaller, larger, or only a part is wanted.
        Slot {
            remote: (2, 3, 96),
            local: (2, 2, 64),
            rows: (2, 1),
            size: -1,
            layers: plain,
            tensors: (0, 0, 2),
        },
        Slot {
            remote: (1, 4, 64),
            local: (1, 2, 96),
            rows: (3, 0),
            size: 33,
            layers: plain,
            tensors: (0, 0, 1),
        },
        Slot {
            remote: (1, 2, 5000),
            local: (1, 2, 4999),
            rows: (1, 1),
            size: 1,
            layers: plain,
            tensors: (0, 0, 1),
        },
        // Layers of one, two and three tensors; of another number of tensors; only the source named.
        Slot {
            remote: (6, 2, 64),
            local: (4, 2, 64),
            rows: (1, 0),
            size: -1,
            layers: per(range(1, 3), range(0, 2), 2),
            tensors: (2, 0, 4),
        },
        Slot {
            remote: (6, 2, 64),
            local: (6, 2, 64),
            rows: (0, 1),
            size: 40,
            layers: per(range(1, 2), range(0, 1), 3),
            tensors: (3, 0, 3),
        },
        Slot {
            remote: (5, 1, 64),
            local: (3, 2, 64),
            rows: (0, 0),
            size: -1,
            layers: per(range(2, 5), None, 1),
            tensors: (2, 0, 3),
        },
        Slot {
            remote: (2, 1, 64),
            local: (5, 2, 64),
            rows: (0, 1),
            size: -1,
            layers: per(None, range(3, 5), 1),
            tensors: (0, 3, 2),
        },
    ];
    each(|_, one_sided, pair, ends| {
        for (seed, case) in cases.iter().enumerate() {
            let shape = |placement, (tensors, rows, bytes)| desc(placement, tensors, rows, bytes);
            let key = request(seed as u64);
            let mut keys = vec![None; case.remote.1];
            keys[case.rows.0 as usize] = Some(key);
            let remote =
                Held::new(&pair.remote, ends.remote.0, &shape(ends.remote.1, case.remote), Batch, &keys);
            let local = Held::new(&pair.local, ends.local.0, &shape(ends.local.1, case.local), Batch, &[]);
            let (bytes, mut expected) = (remote.fill(1), local.fill(2));
            let len = usize::try_from(case.size).unwrap_or(case.local.2);
            for tensor in 0..case.tensors.2 {
                for at in 0..len {
                    expected[case.tensors.1 + tensor][case.rows.1 as usize * case.local.2 + at] =
                        bytes[case.tensors.0 + tensor][case.rows.0 as usize * case.remote.2 + at];
                }
            }
            let name = if one_sided || seed % 2 == 1 { row(&remote, case.rows.0) } else { Name::Key(key) };
            let rows = PullRows::Slot { local: case.rows.1, size: case.size };
            pair.local.pull(of(2, name), &local.end(), &rows, case.layers).unwrap();
            assert!(local.read() == expected, "case {seed}");
            assert!(remote.read() == bytes, "the source changed");
            // Every tensor of an allocated slot was pulled: its key goes, whatever it was named by (§12.3).
            let whole = case.tensors.2 == case.remote.0 as usize;
            let gone = whole && !one_sided && !ends.remote.0;
            assert_eq!(pair.remote.find_key(key).is_err(), gone, "case {seed}");
            pair.remote.remove_key(key).unwrap();
            for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
                engine.deallocate(held.cache.id()).unwrap();
                engine.unregister(held.cache.id()).unwrap();
            }
        }
    });
}

#[test]
fn a_slot_arrives_in_blocks_the_last_in_part() {
    each(|_, one_sided, pair, ends| {
        // A slot of 1000 bytes takes three blocks of 256 and 232 bytes of a fourth; the second slot of three, so that
        // reading past it would show.
        let key = request(5);
        let remote = Held::new(
            &pair.remote,
            ends.remote.0,
            &desc(ends.remote.1, 3, 3, 1000),
            Batch,
            &[None, Some(key)],
        );
        let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 3, 8, 256), Blocks, &[]);
        let (bytes, mut expected) = (remote.fill(3), local.fill(4));
        let blocks = [6usize, 0, 3, 5];
        for tensor in 0..3 {
            for at in 0..1000 {
                expected[tensor][blocks[at / 256] * 256 + at % 256] = bytes[tensor][1000 + at];
            }
        }
        let rows = |local: &[i64]| PullRows::SlotToBlocks { local: local.to_vec() };
        let pull = |rows| pair.local.pull(of(2, row(&remote, 1)), &local.end(), &rows, Layers::ALL);
        let more = pull(rows(&[6, 0, 3, 5, 7])).unwrap_err();
        assert_eq!(more.kind(), ErrorKind::InvalidArgument, "{more}");
        pull(rows(&[6, 0, 3, 5])).unwrap();
        assert!(local.read() == expected);
        assert_eq!(pair.remote.find_key(key).is_err(), !one_sided && !ends.remote.0);
        pair.remote.remove_key(key).unwrap();
        for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
            engine.deallocate(held.cache.id()).unwrap();
            engine.unregister(held.cache.id()).unwrap();
        }
    });
}

#[test]
fn blocks_arrive() {
    let per = |src, dst, tensors_per_layer| Layers { src, dst, tensors_per_layer };
    let cases: [(u32, u32, Layers, (usize, usize, usize)); 2] =
        [(3, 3, Layers::ALL, (0, 0, 3)), (6, 4, per(range(2, 3), range(1, 2), 2), (4, 2, 2))];
    let model = std::cell::Cell::new(0);
    each(|_, _, pair, ends| {
        for (far_tensors, near_tensors, layers, (src, dst, count)) in cases {
            let key = CacheKey::Blocks { model: model.replace(model.get() + 1) };
            let remote = Held::new(
                &pair.remote,
                ends.remote.0,
                &desc(ends.remote.1, far_tensors, 9, 100),
                Blocks,
                &[Some(key)],
            );
            let local =
                Held::new(&pair.local, ends.local.0, &desc(ends.local.1, near_tensors, 7, 100), Blocks, &[]);
            let (bytes, mut expected) = (remote.fill(5), local.fill(6));
            // Neighbours, in reverse, one read twice, one written twice: the last word counts.
            let (theirs, ours) = ([0, 1, 2, 8, 7, 3, 3, 5], [2, 3, 4, 1, 0, 6, 5, 2]);
            for tensor in 0..count {
                for (from, to) in theirs.into_iter().zip(ours) {
                    for at in 0..100 {
                        expected[dst + tensor][to * 100 + at] = bytes[src + tensor][from * 100 + at];
                    }
                }
            }
            let rows = PullRows::Blocks {
                remote: theirs.map(|at| at as i64).to_vec(),
                local: ours.map(|at| at as i64).to_vec(),
            };
            pair.local.pull(of(2, Name::Key(key)), &local.end(), &rows, layers).unwrap();
            assert!(local.read() == expected);
            assert!(pair.remote.find_key(key).is_ok(), "blocks keep their key");
            for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
                engine.deallocate(held.cache.id()).unwrap();
                engine.unregister(held.cache.id()).unwrap();
            }
        }
    });
}

/// A permutation that leaves hardly any neighbours together.
fn scattered(count: usize) -> Vec<i64> {
    let mut order: Vec<i64> = (0..count as i64).collect();
    let mut state = 7u64;
    for at in (1..count).rev() {
        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
        order.swap(at, (state >> 33) as usize % (at + 1));
    }
    order
}

#[test]
fn many_blocks_and_then_one() {
    const MANY: usize = 60_000;
    for way in WAYS {
        let pair = Pair::new(way);
        let key = CacheKey::Blocks { model: 1 };
        let shape = desc(Placement::Device, 2, MANY, 64);
        let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(key)]);
        let local = Held::new(&pair.local, false, &shape, Blocks, &[]);
        let (bytes, mut expected) = (remote.fill(1), local.fill(2));
        let (theirs, mut ours) = (scattered(MANY), scattered(MANY));
        ours.reverse();
        let mut pull = |theirs: &[i64], ours: &[i64]| {
            let rows = PullRows::Blocks { remote: theirs.to_vec(), local: ours.to_vec() };
            pair.local.pull(of(2, Name::Key(key)), &local.end(), &rows, Layers::ALL).unwrap();
            for tensor in 0..2 {
                for (&from, &to) in theirs.iter().zip(ours) {
                    let (from, to) = (from as usize * 64, to as usize * 64);
                    expected[tensor][to..to + 64].copy_from_slice(&bytes[tensor][from..from + 64]);
                }
            }
            assert!(local.read() == expected, "{way:?}, {} blocks", theirs.len());
        };
        pull(&theirs, &ours);
        pull(&[MANY as i64 - 1], &[0]);
        pull(&[0], &[MANY as i64 - 1]);
    }
}

#[test]
fn large_pulls_take_several_streams_and_keep_their_order() {
    let pair = Pair::with(Way::Tcp, |config| config.links.streams = 3);
    let key = CacheKey::Blocks { model: 1 };
    let (blocks, bytes) = (36usize, 1 << 20);
    let remote =
        Held::new(&pair.remote, false, &desc(Placement::Host, 1, blocks, bytes), Blocks, &[Some(key)]);
    let local = Held::new(&pair.local, false, &desc(Placement::Device, 1, blocks, bytes), Blocks, &[]);
    let source = remote.fill(1);
    let scattered = scattered(blocks);
    let straight: Vec<i64> = (0..blocks as i64).collect();
    // The third writes every block twice: what comes last must stay, whichever stream brings it.
    let twice = ([&straight[..], &scattered[..]].concat(), [&straight[..], &straight[..]].concat());
    for (theirs, ours) in
        [(scattered.clone(), straight.clone()), (straight.clone(), scattered.clone()), twice]
    {
        local.fill(2);
        let rows = PullRows::Blocks { remote: theirs.clone(), local: ours.clone() };
        pair.local.pull(of(2, Name::Key(key)), &local.end(), &rows, Layers::ALL).unwrap();
        let mut expected = vec![vec![0; blocks * bytes]];
        for (&from, &to) in theirs.iter().zip(&ours) {
            let (from, to) = (from as usize * bytes, to as usize * bytes);
            expected[0][to..to + bytes].copy_from_slice(&source[0][from..from + bytes]);
        }
        assert!(local.read() == expected);
    }
    let served = pair.remote.stats().links.remove(0);
    assert_eq!(served.requests.calls, 0, "the owner asks nothing");
}

/// Every pair of sizes, slots and layers that fits, at random.
#[test]
fn random_slots_arrive() {
    use proptest::prelude::*;
    for way in WAYS {
        let pair = Pair::new(way);
        let sizes = (1usize..5, 1usize..5, 1usize..300, 1usize..300, 1u32..4, any::<u64>());
        proptest!(crate::bed::proptest_cases(12), |((far_rows, local_rows, far_bytes, near_bytes, tensors, seed) in sizes)| {
            let remote = Held::new(&pair.remote, seed % 2 == 0, &desc(Placement::Host, tensors, far_rows, far_bytes), Batch, &[]);
            let local = Held::new(&pair.local, seed % 3 == 0, &desc(Placement::Device, tensors, local_rows, near_bytes), Batch, &[]);
            let (bytes, mut expected) = (remote.fill(1), local.fill(2));
            let (from, to) = (seed as usize % far_rows, (seed >> 8) as usize % local_rows);
            let most = far_bytes.min(near_bytes);
            let len = 1 + (seed >> 16) as usize % most;
            for tensor in 0..tensors as usize {
                expected[tensor][to * near_bytes..][..len].copy_from_slice(&bytes[tensor][from * far_bytes..][..len]);
            }
            let rows = PullRows::Slot { local: to as u32, size: len as i64 };
            pair.local.pull(of(2, row(&remote, from as u32)), &local.end(), &rows, Layers::ALL).unwrap();
            prop_assert!(local.read() == expected);
            for (engine, held) in [(&pair.remote, &remote), (&pair.local, &local)] {
                engine.deallocate(held.cache.id()).unwrap();
                engine.unregister(held.cache.id()).unwrap();
            }
        });
    }
}

/// What the codes of contract §12.5 say, and nothing moved.
#[test]
fn what_does_not_fit_is_refused_by_its_code() {
    for way in WAYS {
        for one_sided in [false, true] {
            let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
            let (local, remote) = (&pair.local, &pair.remote);
            let batch =
                Held::new(remote, false, &desc(Placement::Device, 4, 2, 128), Batch, &[Some(request(1))]);
            let blocks = CacheKey::Blocks { model: 3 };
            let other = Held::new(remote, false, &desc(Placement::Device, 4, 8, 64), Blocks, &[Some(blocks)]);
            let own = crate::bed::Own::new(&desc(Placement::Host, 4, 2, 128), Batch, |adopted| {
                remote.register(adopted, &[Some(request(8))], Some(false)).unwrap()
            });
            let into = Held::new(local, false, &desc(Placement::Device, 4, 2, 128), Batch, &[]);
            let cut = Held::new(local, false, &desc(Placement::Device, 4, 4, 64), Blocks, &[]);
            let small = Held::new(local, false, &desc(Placement::Device, 4, 4, 32), Blocks, &[]);
            let wide = Held::new(local, false, &desc(Placement::Device, 4, 2, 256), Batch, &[]);
            let few = Held::new(local, false, &desc(Placement::Device, 3, 2, 128), Batch, &[]);
            let (k, r) = (Name::Key(request(1)), |at| row(&batch, at));
            let slot = |local, size| PullRows::Slot { local, size };
            let pairs = |remote: &[i64], local: &[i64]| PullRows::Blocks {
                remote: remote.to_vec(),
                local: local.to_vec(),
            };
            let all = Layers::ALL;
            let per = |src, dst, n| Layers { src, dst, tensors_per_layer: n };
            let nowhere = llm_datadist_core::End::Managed(llm_datadist_core::CacheId(99));
            let closed = Name::Key(request(8));
            use ErrorKind::{CacheNotFound as Missing, InvalidArgument as Wrong, NotLinked};
            let cases = [
                ("no such near cache", 2, k, nowhere, slot(0, -1), all, Missing),
                ("own id", 1, k, into.end(), slot(0, -1), all, Wrong),
                ("own id goes first", 1, k, nowhere_end(), slot(0, -1), all, Wrong),
                ("not linked", 7, k, into.end(), slot(0, -1), all, NotLinked),
                ("near rules go before the link", 7, k, into.end(), slot(2, -1), all, Wrong),
                ("no such key", 2, Name::Key(request(9)), into.end(), slot(0, -1), all, Missing),
                (
                    "no such blocks",
                    2,
                    Name::Key(CacheKey::Blocks { model: 9 }),
                    cut.end(),
                    pairs(&[0], &[0]),
                    all,
                    Missing,
                ),
                (
                    "no such id",
                    2,
                    Name::Row { cache: llm_datadist_core::CacheId(99), row: 0 },
                    into.end(),
                    slot(0, -1),
                    all,
                    Missing,
                ),
                ("no such slot", 2, r(2), into.end(), slot(0, -1), all, Missing),
                ("near slot", 2, r(0), into.end(), slot(2, -1), all, Wrong),
                ("size", 2, r(0), into.end(), slot(0, 129), all, Wrong),
                ("size 0", 2, r(0), into.end(), slot(0, 0), all, Wrong),
                ("far slot smaller", 2, r(0), wide.end(), slot(0, -1), all, Wrong),
                ("another number of tensors", 2, r(0), few.end(), slot(0, -1), all, Wrong),
                ("near blocks for a slot", 2, r(0), cut.end(), slot(0, -1), all, Wrong),
                ("far blocks for a slot", 2, row(&other, 0), into.end(), slot(0, -1), all, Wrong),
                ("far batch for blocks", 2, r(0), cut.end(), pairs(&[0], &[0]), all, Wrong),
                ("block sizes", 2, Name::Key(blocks), small.end(), pairs(&[0], &[0]), all, Wrong),
                ("far block", 2, Name::Key(blocks), cut.end(), pairs(&[8], &[0]), all, Wrong),
                ("near block", 2, Name::Key(blocks), cut.end(), pairs(&[0], &[4]), all, Wrong),
                ("negative", 2, Name::Key(blocks), cut.end(), pairs(&[-1], &[0]), all, Wrong),
                ("unequal", 2, Name::Key(blocks), cut.end(), pairs(&[0, 1], &[0]), all, Wrong),
                ("layers", 2, r(0), into.end(), slot(0, -1), per(range(3, 5), range(0, 2), 1), Wrong),
                ("layers uneven", 2, r(0), into.end(), slot(0, -1), per(range(0, 2), range(0, 1), 1), Wrong),
                (
                    "layers of three",
                    2,
                    r(0),
                    into.end(),
                    slot(0, -1),
                    per(range(0, 1), range(0, 1), 3),
                    Wrong,
                ),
                ("not open to peers", 2, closed, into.end(), slot(0, -1), all, Wrong),
            ];
            let before: Vec<_> = [&into, &cut, &small, &wide, &few].map(|held| held.fill(7)).into();
            for (what, cluster, name, end, rows, layers, kind) in cases {
                let error = local.pull(of(cluster, name), &end, &rows, layers).unwrap_err();
                assert_eq!(error.kind(), kind, "{way:?} {one_sided} {what}: {error}");
                assert!(error.arrived().is_empty(), "{what}: {error}");
            }
            let after: Vec<_> = [&into, &cut, &small, &wide, &few].map(Held::read).into();
            assert!(before == after);
            assert!(remote.find_key(request(1)).is_ok(), "a failed pull keeps the key");
            // And the link is as good as before.
            local.pull(of(2, k), &into.end(), &slot(0, -1), all).unwrap();
            drop(own);
        }
    }
}

fn nowhere_end() -> llm_datadist_core::End {
    llm_datadist_core::End::Managed(llm_datadist_core::CacheId(98))
}

/// Over sockets nothing tells this side that a cache changed: a remembered description must not decide what is legal.
#[test]
fn a_stale_record_is_not_what_a_pull_is_checked_against() {
    for way in WAYS {
        let pair = Pair::new(way);
        let key = CacheKey::Blocks { model: 9 };
        let local = Held::new(&pair.local, false, &desc(Placement::Host, 2, 4, 64), Blocks, &[]);
        let pull = |block| {
            let rows = PullRows::Blocks { remote: vec![block], local: vec![0] };
            pair.local.pull(of(2, Name::Key(key)), &local.end(), &rows, Layers::ALL)
        };
        let shapes = [(2, 4, 64), (2, 9, 64), (2, 8, 64)]
            .map(|(tensors, rows, bytes)| desc(Placement::Host, tensors, rows, bytes));
        for (seed, shape) in shapes.into_iter().enumerate() {
            let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(key)]);
            let bytes = remote.fill(seed as u8);
            let last = shape.shape[0] - 1;
            pull(last).unwrap();
            assert_eq!(local.read()[1][..64], bytes[1][last as usize * 64..]);
            pair.remote.deallocate(remote.cache.id()).unwrap();
        }
        // Gone; also for a call that would not have fitted what was there.
        for block in [0, 100] {
            let error = pull(block).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?}: {error}");
        }
        // Closed to peers, then open, under one key.
        let own = |open| {
            crate::bed::Own::new(&desc(Placement::Host, 2, 4, 64), Blocks, |adopted| {
                pair.remote.register(adopted, &[Some(key)], Some(open)).unwrap()
            })
        };
        let (closed, open) = (own(false), own(true));
        assert!(closed.cache.id() < open.cache.id());
        pull(0).unwrap();
        let closed = own(false);
        assert_eq!(pull(0).unwrap_err().kind(), ErrorKind::InvalidArgument);
        let open = own(true);
        pull(0).unwrap_or_else(|error| panic!("{way:?}: {error}"));
        drop((closed, open));
    }
}
