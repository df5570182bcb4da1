//! Pulls: which bytes arrive, over every transport, in both modes, between all kinds of memory.
//!
//! `tests/test_pull.py` covers every layout. Not for: what goes wrong (`broken`, `races`).

use llm_datadist_core::{
    CacheId, CacheKey, CacheKind, End, ErrorKind, LayerRange, Layers, Name, Placement, PullRows,
};

use super::{Held, Pair, WAYS, Way, device, each, of, request, row};
use crate::bed::{Own, desc};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

fn layers(src: (u32, u32), dst: (u32, u32), tensors_per_layer: u32) -> Layers {
    let range = |(first, end)| Some(LayerRange { first, end });
    Layers { src: range(src), dst: range(dst), tensors_per_layer }
}

/// A pull between two shapes (kind, tensors, rows, bytes of a row), and the bytes that it moves.
struct Case {
    what: &'static str,
    remote: (CacheKind, u32, usize, usize),
    local: (CacheKind, u32, usize, usize),
    /// Row 1 of the remote cache has this key.
    key: CacheKey,
    by_key: bool,
    rows: PullRows,
    layers: Layers,
    /// First tensor read, first tensor written, how many.
    tensors: (usize, usize, usize),
    /// Offset read, offset written, length; in each tensor.
    moves: Vec<(usize, usize, usize)>,
    /// Whether the pull releases the key of an allocated cache.
    releases: bool,
}

#[test]
fn bytes_arrive() {
    let whole = Case {
        what: "whole slot",
        remote: (Batch, 2, 3, 96),
        local: (Batch, 2, 3, 64),
        key: request(1),
        by_key: true,
        rows: PullRows::Slot { local: 2, size: -1 },
        layers: Layers::ALL,
        tensors: (0, 0, 2),
        moves: vec![(96, 128, 64)],
        releases: true,
    };
    let cases = [
        Case {
            what: "part of a slot, some layers",
            remote: (Batch, 6, 2, 64),
            local: (Batch, 4, 2, 96),
            rows: PullRows::Slot { local: 1, size: 33 },
            layers: layers((1, 3), (0, 2), 2),
            tensors: (2, 0, 4),
            moves: vec![(64, 96, 33)],
            releases: false,
            ..whole
        },
        Case {
            what: "slot to blocks, the last in part",
            remote: (Batch, 3, 3, 1000),
            local: (Blocks, 3, 8, 256),
            by_key: false,
            rows: PullRows::SlotToBlocks { local: vec![6, 0, 3, 5] },
            tensors: (0, 0, 3),
            moves: vec![(1000, 6 * 256, 256), (1256, 0, 256), (1512, 3 * 256, 256), (1768, 5 * 256, 232)],
            ..whole
        },
        Case {
            // Neighbours, in reverse, block 3 read twice and block 2 written twice: the last write counts.
            what: "blocks, some layers",
            remote: (Blocks, 6, 9, 100),
            local: (Blocks, 4, 7, 100),
            key: KEY,
            rows: PullRows::Blocks {
                remote: vec![0, 1, 2, 8, 7, 3, 3, 5],
                local: vec![2, 3, 4, 1, 0, 6, 5, 2],
            },
            layers: layers((2, 3), (1, 2), 2),
            tensors: (4, 2, 2),
            moves: [(0, 2), (1, 3), (2, 4), (8, 1), (7, 0), (3, 6), (3, 5), (5, 2)]
                .map(|(from, to)| (from * 100, to * 100, 100))
                .to_vec(),
            releases: false,
            ..whole
        },
        whole,
    ];
    each(|_, one_sided, pair, ends| {
        for case in &cases {
            let what = case.what;
            let shape = |placement, (_, tensors, rows, bytes)| desc(placement, tensors, rows, bytes);
            let keys = if case.key == KEY { vec![Some(KEY)] } else { vec![None, Some(case.key)] };
            let remote_shape = shape(ends.remote.1, case.remote);
            let remote = Held::new(&pair.remote, ends.remote.0, &remote_shape, case.remote.0, &keys);
            let local_shape = shape(ends.local.1, case.local);
            let local = Held::new(&pair.local, ends.local.0, &local_shape, case.local.0, &[]);
            let (bytes, mut expected) = (remote.fill(1), local.fill(2));
            for tensor in 0..case.tensors.2 {
                for &(from, to, len) in &case.moves {
                    expected[case.tensors.1 + tensor][to..to + len]
                        .copy_from_slice(&bytes[case.tensors.0 + tensor][from..from + len]);
                }
            }
            let name = if case.by_key { Name::Key(case.key) } else { row(&remote, 1) };
            let pull = |rows: &PullRows| pair.local.pull(of(2, name), &local.end(), rows, case.layers);
            if let PullRows::SlotToBlocks { local } = &case.rows {
                let rows = PullRows::SlotToBlocks { local: [&local[..], &[7]].concat() };
                assert_eq!(pull(&rows).unwrap_err().kind(), ErrorKind::InvalidArgument, "a block too many");
            }
            pull(&case.rows).unwrap();
            assert!(local.read() == expected, "{what}");
            assert!(remote.read() == bytes, "{what}: the source changed");
            let released = case.releases && !one_sided && !ends.remote.0;
            assert_eq!(pair.remote.find_key(case.key).is_err(), released, "{what}");
            pair.remote.remove_key(case.key).unwrap();
            local.free(&pair.local);
            remote.free(&pair.remote);
        }
    });
}

/// A permutation with few neighbours.
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
fn large_pulls_over_several_streams_keep_their_order() {
    const BLOCKS: usize = 36;
    const BYTES: usize = 1 << 20;
    let pair = Pair::with(Way::Tcp, |config| config.links.streams = 3);
    let shape = desc(Placement::Host, 1, BLOCKS, BYTES);
    let remote = Held::new(&pair.remote, false, &shape, Blocks, &[Some(KEY)]);
    let local = Held::pool(&pair.local, &device(1, BLOCKS, BYTES), Blocks);
    let source = remote.fill(1);
    let scattered = scattered(BLOCKS);
    let straight: Vec<i64> = (0..BLOCKS as i64).collect();
    let cases = [
        (scattered.clone(), straight.clone()),
        (straight.clone(), scattered.clone()),
        // Every block is written twice: the last write counts, whichever stream it takes.
        ([&straight[..], &scattered].concat(), straight.repeat(2)),
    ];
    for (theirs, ours) in cases {
        let mut expected = local.fill(2);
        for (&from, &to) in theirs.iter().zip(&ours) {
            let (from, to) = (from as usize * BYTES, to as usize * BYTES);
            expected[0][to..to + BYTES].copy_from_slice(&source[0][from..from + BYTES]);
        }
        let rows = PullRows::Blocks { remote: theirs, local: ours };
        pair.local.pull(of(2, Name::Key(KEY)), &local.end(), &rows, Layers::ALL).unwrap();
        assert!(local.read() == expected);
    }
    let served = pair.remote.stats().links.remove(0);
    assert_eq!(served.requests.calls, 0, "the owner asks nothing");
}

/// The local checks come before the link, and a refused pull moves nothing.
#[test]
fn first_broken_rule_decides_the_error() {
    use ErrorKind::{CacheNotFound, InvalidArgument, NotLinked};
    for (way, one_sided) in WAYS.into_iter().flat_map(|way| [(way, false), (way, true)]) {
        let pair = Pair::with(way, |config| config.remote_accessible = one_sided);
        let remote = Held::new(&pair.remote, false, &device(4, 2, 128), Batch, &[Some(request(1))]);
        let into = Held::pool(&pair.local, &device(4, 2, 128), Batch);
        let wide = Held::pool(&pair.local, &device(4, 2, 256), Batch);
        let (name, nowhere) = (Name::Key(request(1)), End::Managed(CacheId(99)));
        let slot = |local, size| PullRows::Slot { local, size };
        let cases = [
            ("own cluster and no such local cache", 1, name, nowhere.clone(), slot(0, -1), InvalidArgument),
            ("no such local cache", 2, name, nowhere, slot(0, -1), CacheNotFound),
            ("no such local slot and no link", 7, name, into.end(), slot(2, -1), InvalidArgument),
            ("no link", 7, name, into.end(), slot(0, -1), NotLinked),
            ("no such key", 2, Name::Key(request(9)), into.end(), slot(0, -1), CacheNotFound),
            ("no such remote slot", 2, row(&remote, 2), into.end(), slot(0, -1), CacheNotFound),
            ("remote slot is smaller", 2, row(&remote, 0), wide.end(), slot(0, -1), InvalidArgument),
            ("size of 0", 2, name, into.end(), slot(0, 0), InvalidArgument),
        ];
        let before = [&into, &wide].map(|held| held.fill(7));
        for (what, cluster, name, end, rows, kind) in cases {
            let error = pair.local.pull(of(cluster, name), &end, &rows, Layers::ALL).unwrap_err();
            assert_eq!(error.kind(), kind, "{way:?} {one_sided} {what}: {error}");
            assert!(error.arrived().is_empty(), "{what}: {error}");
        }
        assert!(before == [&into, &wide].map(Held::read));
        assert!(pair.remote.find_key(request(1)).is_ok(), "a failed pull keeps the key");
        pair.local.pull(of(2, name), &into.end(), &slot(0, -1), Layers::ALL).unwrap();
    }
}

/// A pull is checked against the cache that is there, not against a description remembered from an earlier pull.
#[test]
fn remembered_description_does_not_decide_what_is_legal() {
    for way in WAYS {
        let pair = Pair::new(way);
        let local = Held::pool(&pair.local, &desc(Placement::Host, 2, 4, 64), Blocks);
        let pull = |block| {
            let rows = PullRows::Blocks { remote: vec![block], local: vec![0] };
            pair.local.pull(of(2, Name::Key(KEY)), &local.end(), &rows, Layers::ALL)
        };
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
            let error = pull(block).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{way:?}: {error}");
        }
        // The same key names caches that are closed and open to peers in turn.
        let register = |open| {
            Own::new(&desc(Placement::Host, 2, 4, 64), Blocks, |adopted| {
                pair.remote.register(adopted, &[Some(KEY)], Some(open)).unwrap()
            })
        };
        let _first = register(false);
        for open in [true, false, true] {
            let _cache = register(open);
            let refused = pull(0).err().map(|error| error.kind());
            assert_eq!(refused, (!open).then_some(ErrorKind::InvalidArgument), "{way:?}");
        }
    }
}
