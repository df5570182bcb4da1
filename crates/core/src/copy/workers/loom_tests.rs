//! Checks the job of `copy::workers` with loom: every order in which workers start, take units, fail and leave.
//!
//! Part of the library's own tests, because the job is private. To run it: `RUSTFLAGS="--cfg loom"
//! LOOM_MAX_PREEMPTIONS=2 cargo test -p llm-datadist-core --lib --target-dir target/loom -- loom_tests::`.

use std::sync::Arc as Shared;
use std::sync::atomic::{AtomicU64, Ordering as Std};
use std::time::Duration;

use loom::sync::atomic::AtomicUsize as Counter;
use loom::thread;

use super::*;
use crate::model::Deadline;

/// Counts its units and fails at one of them. No unit may run after the caller has seen the end.
struct Units {
    done: [Counter; 3],
    fails_at: Option<usize>,
    over: Counter,
}

impl Units {
    fn unit(&self, index: usize) -> Result<()> {
        assert_eq!(self.over.load(Ordering::SeqCst), 0, "a unit runs after the end");
        self.done[index].fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        assert_eq!(self.over.load(Ordering::SeqCst), 0, "the caller was notified of the end too early");
        if self.fails_at == Some(index) { Err(Error::new(ErrorKind::System, "injected")) } else { Ok(()) }
    }
}

fn model(helpers: usize, units: usize, fails_at: Option<usize>) {
    let ran = Shared::new(AtomicU64::new(0));
    let counted = ran.clone();
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        let checks = Arc::new(Units {
            done: std::array::from_fn(|_| Counter::new(0)),
            fails_at,
            over: Counter::new(0),
        });
        let inside = checks.clone();
        let work = Arc::new(move |index| inside.unit(index));
        let job = Arc::new(CopyJob {
            units,
            limit: Deadline::after(Duration::from_secs(3600)).into(),
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            state: Mutex::new(State { work: Some(work.clone()), inside: 0, failure: None }),
            left: Condvar::new(),
        });
        let threads: Vec<_> = (0..helpers)
            .map(|_| {
                let job = job.clone();
                thread::spawn(move || job.help())
            })
            .collect();
        job.help();
        job.close();
        let outcome = job.outcome();
        assert_eq!(Arc::strong_count(&work), 1, "somebody still holds what was copied");
        checks.over.store(1, Ordering::SeqCst);
        let done: Vec<usize> =
            checks.done[..units].iter().map(|count| count.load(Ordering::SeqCst)).collect();
        match fails_at {
            None => assert!(outcome.is_ok() && done.iter().all(|&count| count == 1), "{done:?}"),
            Some(unit) => {
                assert!(outcome.is_err() && done[unit] == 1);
                assert!(done.iter().all(|&count| count <= 1), "{done:?}");
            }
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    let ran = ran.load(Std::Relaxed);
    eprintln!("{helpers} helpers, {units} units: {ran} orders");
    assert!(ran > 10, "loom looked at {ran} orders");
}

#[test]
fn every_unit_once_and_nobody_inside_at_the_end() {
    model(1, 3, None);
    model(2, 2, None);
}

#[test]
fn a_failure_stops_the_job() {
    model(1, 3, Some(0));
    model(2, 2, Some(1));
}
