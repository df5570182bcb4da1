//! Checks with loom that a thread that sees the end of a transfer without taking its lock also sees the bytes of the transfer.

use std::sync::atomic::{AtomicU64 as Count, Ordering as Std};
use std::time::Duration;

use loom::thread;

use super::*;
use crate::sync::AtomicUsize;

#[test]
fn rows_are_there_when_a_wait_returns() {
    let orders = Arc::new(Count::new(0));
    let counted = orders.clone();
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        let shared = Arc::new((Transfer::unreported(), AtomicUsize::new(0)));
        let working = shared.clone();
        let worker = thread::spawn(move || {
            working.1.store(1, Ordering::Relaxed);
            working.0.finish(Ok(1));
        });
        let (transfer, row) = &*shared;
        assert!(transfer.wait(Deadline::after(Duration::from_secs(60))).unwrap());
        assert_eq!(row.load(Ordering::Relaxed), 1, "the row is not there");
        worker.join().unwrap();
    });
    let orders = orders.load(Std::Relaxed);
    assert!(orders > 3, "loom looked at {orders} orders");
}
