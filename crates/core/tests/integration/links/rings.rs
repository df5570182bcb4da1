//! Call streams with rings: which calls use them, and how many streams of a link have them.

use std::thread;

use llm_datadist_core::{CacheKind, DataDist, Placement};

use super::{Held, Memory, Pair, WAYS, Way, of, pull_slot, push_slot, row};

/// Streams with rings of one link, in each direction.
const RINGED: usize = 4;
const HOST: Memory = Memory { registered: false, placement: Placement::Host };

fn rings(engine: &DataDist) -> usize {
    engine.stats().links.remove(0).call_rings
}

fn held(engine: &DataDist) -> Held {
    HOST.held(engine, (2, 1, 96), CacheKind::Batch, &[])
}

#[test]
fn calls_over_a_local_socket_use_rings_in_both_directions() {
    for way in WAYS {
        let pair = Pair::with(way, |config| config.remote_accessible = true);
        let (local, remote) = (held(&pair.local), held(&pair.remote));
        let expected = usize::from(way.shares_sockets());
        for round in 0..20 {
            let source = local.fill(round);
            push_slot(&pair.local, &local, 0, of(2, row(&remote, 0))).unwrap();
            assert!(remote.read() == source, "{way:?}");
        }
        assert_eq!((rings(&pair.local), rings(&pair.remote)), (expected, expected), "{way:?}");
        for round in 20..40 {
            let source = remote.fill(round);
            push_slot(&pair.remote, &remote, 0, of(1, row(&local, 0))).unwrap();
            assert!(local.read() == source, "{way:?}");
        }
        assert_eq!((rings(&pair.local), rings(&pair.remote)), (2 * expected, 2 * expected), "{way:?}");
    }
}

#[test]
fn calls_beyond_the_first_streams_use_sockets() {
    let pair = Pair::with(Way::Shm, |config| config.remote_accessible = true);
    let caches: Vec<_> = (0..24).map(|_| (held(&pair.local), held(&pair.remote))).collect();
    for round in 0..20_u8 {
        thread::scope(|scope| {
            for ((local, remote), at) in caches.iter().zip(0_u8..) {
                let pair = &pair;
                scope.spawn(move || {
                    let source = remote.fill(at * 2 + round);
                    pull_slot(&pair.local, of(2, row(remote, 0)), local).unwrap();
                    assert!(local.read() == source);
                    let source = local.fill(at * 2 + round + 101);
                    push_slot(&pair.local, local, 0, of(2, row(remote, 0))).unwrap();
                    assert!(remote.read() == source);
                });
            }
        });
        assert!((1..=RINGED).contains(&rings(&pair.local)), "{}", rings(&pair.local));
        assert_eq!(rings(&pair.local), rings(&pair.remote));
    }
}
