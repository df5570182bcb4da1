//! The hand-over of `engine::ring` under loom: every order in which two stages fill, drain, sleep, wake and end.
//!
//! Part of the library's own tests (the hand-over is private). `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p
//! llm-datadist-core --lib --target-dir target/loom`. Loom's clock stands still, so a stage that is not woken is a deadlock
//! that loom reports.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Count, Ordering as Std};
use std::time::Duration;

use loom::thread;

use super::*;

/// Buffers whose bytes nothing but the hand-over keeps in order.
struct Both<const BUFFERS: usize> {
    counts: HandOver,
    buffers: [AtomicUsize; BUFFERS],
}

/// A stage that drains `drains` pieces and ends, beside one that fills `fills`.
fn model<const BUFFERS: usize>(fills: u64, drains: u64) {
    let ran = Arc::new(Count::new(0));
    let counted = ran.clone();
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        let both = Arc::new(Both::<BUFFERS> {
            counts: HandOver::default(),
            buffers: std::array::from_fn(|_| AtomicUsize::new(0)),
        });
        let theirs = both.clone();
        let draining = thread::spawn(move || {
            let mut drained = 0;
            while drained < drains && theirs.counts.wait_filled(drained) {
                let buffer = &theirs.buffers[drained as usize % BUFFERS];
                assert_eq!(buffer.load(Ordering::Relaxed) as u64, drained + 1, "not what was filled");
                drained += 1;
                theirs.counts.drained();
            }
            theirs.counts.end();
            drained
        });
        let deadline = Deadline::after(Duration::from_secs(3600));
        let mut filled = 0;
        while filled < fills {
            match both.counts.wait_free(filled, BUFFERS as u64, deadline) {
                Some(true) => {
                    both.buffers[filled as usize % BUFFERS].store(filled as usize + 1, Ordering::Relaxed)
                }
                Some(false) => break,
                None => panic!("an hour has passed"),
            }
            filled += 1;
            both.counts.filled();
        }
        both.counts.close();
        both.counts.wait_end();
        assert!(filled == fills || drains < fills, "{filled} filled");
        assert_eq!(draining.join().unwrap(), fills.min(drains));
    });
    let ran = ran.load(Std::Relaxed);
    eprintln!("{BUFFERS} buffers, {fills} filled, {drains} drained: {ran} orders");
    assert!(ran > 10, "loom looked at {ran} orders");
}

#[test]
fn every_piece_arrives_and_nobody_sleeps_for_ever() {
    model::<1>(2, u64::MAX);
    model::<2>(3, u64::MAX);
}

#[test]
fn a_draining_stage_that_ends_early_lets_the_other_go() {
    model::<1>(3, 1);
    model::<1>(2, 0);
}
