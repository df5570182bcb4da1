//! Pulls: which bytes arrive, over every transport, in both modes, between all kinds of memory.
//!
//! `tests/test_pull.py` covers every layout. Not for: what goes wrong (`broken_streams`, `races`).

use llm_datadist_core::{
    CacheId, CacheKey, CacheKind, End, ErrorKind, LayerRange, Layers, Name, Placement, PullRows,
};

use super::{Held, Pair, WAYS, Way, device, each, of, request, row};
use crate::fixtures::{Own, desc};

use CacheKind::{Batch, Blocks};

const KEY: CacheKey = CacheKey::Blocks { model: 7 };

fn layers(src: (u32, u32), dst: (u32, u32), tensors_per_layer: u32) -> Layers {
    let range = |(first, end)| Some(LayerRange { first, end });
    Layers { src: range(src), dst: range(dst), tensors_per_layer }
}

/// Slots arrive, named by key or by id.
#[test]
fn slots_arrive() {
    // Bytes of a slot there and here, size, layers; first tensor read, first tensor written, how many.
    let cases = [
        (64, 64, -1, Layers::ALL, (0, 0, 6)),
        (96, 64, -1, layers((1, 3), (0, 2), 2), (2, 0, 4)),
        (5000, 4999, 33, layers((1, 2), (0, 1), 3), (3, 0, 3)),
        (64, 96, 1, layers((2, 5), (3, 6), 1), (2, 3, 3)),
    ];
    each(|_, one_sided, pair, ends| {
        for (theirs, ours, size, layers, (src, dst, count)) in cases {
            let shape = desc(ends.remote.1, 6, 2, theirs);
            let remote = Held::new(&pair.remote, ends.remote.0, &shape, Batch, &[None, Some(request(1))]);
            let local = Held::new(&pair.local, ends.local.0, &desc(ends.local.1, 6, 3, ours), Batch, &[]);
            let (bytes, mut expected) = (remote.fill(1), local.fill(2));
            let len = usize::try_from(size).unwrap_or(ours);
            for tensor in 0..count {
                expected[dst + tensor][2 * ours..][..len]
                    .copy_from_slice(&bytes[src + tensor][theirs..][..len]);
            }
            let name = if size == -1 { Name::Key(request(1)) } else { row(&remote, 1) };
            let rows = PullRows::Slot { local: 2, size };
            pair.local.pull(of(2, name), &local.end(), &rows, layers).unwrap();
            assert!(local.read() == expected, "{theirs} to {ours}");
            assert!(remote.read() == bytes, "the source changed");
            // A pull of every tensor of an allocated slot releases its key.
            let released = count == 6 && !one_sided && !ends.remote.0;
            assert_eq!(pair.remote.find_key(request(1)).is_err(), released, "{theirs} to {ours}");
            pair.remote.remove_key(request(1)).unwrap();
            local.free(&pair.local);
            remote.free(&pair.remote);
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

#[test]
fn local_checks_come_before_the_link() {
    let pair = Pair::new(Way::Local);
    let into = Held::pool(&pair.local, &device(4, 2, 128), Batch);
    let before = into.fill(7);
    let own_cluster = (1, End::Managed(CacheId(99)), 0);
    let no_link = (7, into.end(), 2);
    for (cluster, end, slot) in [own_cluster, no_link] {
        let rows = PullRows::Slot { local: slot, size: -1 };
        let error =
            pair.local.pull(of(cluster, Name::Key(request(1))), &end, &rows, Layers::ALL).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.arrived().is_empty(), "{error}");
    }
    assert!(into.read() == before);
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
        let mut caches = vec![register(false)];
        for open in [true, false, true] {
            caches.push(register(open));
            let refused = pull(0).err().map(|error| error.kind());
            assert_eq!(refused, (!open).then_some(ErrorKind::InvalidArgument), "{way:?}");
        }
    }
}
