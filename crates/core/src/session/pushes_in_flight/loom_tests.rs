//! Checks with loom that a read in place never accepts a row of which a push of this engine wrote a part meanwhile, in whatever
//! order the processor makes the loads.

use std::sync::atomic::{AtomicU64 as Count, Ordering as Std};

use loom::thread;

use super::*;

const CACHE: CacheId = CacheId(7);

/// Two bytes of a row of the peer, which every push changes to another value.
type Row = [AtomicU64; 2];

/// A push. The stores are release ones because the peer makes them after it has received the message of the push.
fn push(pushes: &PushesInFlight, row: &Row) {
    let push = pushes.begin(CACHE);
    row.iter().for_each(|byte| byte.store(1, Ordering::Release));
    drop(push);
}

/// A read in place, whose loads have no order. Returns `None` if the bytes are discarded.
fn read(pushes: &PushesInFlight, row: &Row) -> Option<[u64; 2]> {
    let before = pushes.none_now(CACHE)?;
    let found = [0, 1].map(|at| row[at].load(Ordering::Relaxed));
    pushes.none_since(CACHE, before).then_some(found)
}

#[test]
fn bytes_of_a_push_are_discarded() {
    // The first push ever, and one after another that has ended.
    for earlier in [0, 1] {
        let orders = Arc::new(Count::new(0));
        let counted = orders.clone();
        loom::model(move || {
            counted.fetch_add(1, Std::Relaxed);
            let shared = Arc::new((PushesInFlight::default(), Row::default()));
            (0..earlier).for_each(|_| drop(shared.0.begin(CACHE)));
            let pushing = shared.clone();
            let pusher = thread::spawn(move || push(&pushing.0, &pushing.1));
            if let Some([first, second]) = read(&shared.0, &shared.1) {
                assert_eq!(first, second, "a row with a part of a push");
            }
            pusher.join().unwrap();
        });
        let orders = orders.load(Std::Relaxed);
        assert!(orders > 10, "loom looked at {orders} orders");
    }
}
