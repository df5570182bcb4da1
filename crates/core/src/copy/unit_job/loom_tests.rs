//! Checks the job of copy workers with loom: every order in which workers start, take units, fail and leave.
//!
//! Part of the library's own tests, because the job is private. To run it: `RUSTFLAGS="--cfg loom"
//! LOOM_MAX_PREEMPTIONS=2 cargo test -p llm-datadist-core --lib --target-dir target/loom -- loom_tests::`.

use std::sync::Arc as Shared;
use std::sync::atomic::{AtomicU64, Ordering as Std};

use loom::sync::atomic::AtomicUsize as Counter;
use loom::thread;

use super::*;

/// Counts its units and fails at one of them. No unit may run after the caller has seen the end.
struct Units {
    done: [Counter; 3],
    fails_at: Option<usize>,
    over: Counter,
    /// Number of units that ran after the end. A job catches panics, so this is checked afterwards.
    late: AtomicU64,
}

impl Units {
    fn unit(&self, index: usize) -> Result<()> {
        self.check();
        self.done[index].fetch_add(1, Ordering::SeqCst);
        thread::yield_now();
        self.check();
        if self.fails_at == Some(index) { Err(Error::new(ErrorKind::System, "injected")) } else { Ok(()) }
    }

    fn check(&self) {
        self.late.fetch_add(self.over.load(Ordering::SeqCst) as u64, Std::SeqCst);
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
            late: AtomicU64::new(0),
        });
        let inside = checks.clone();
        let work = Arc::new(move |index| inside.unit(index));
        let job = Arc::new(UnitJob::new(work.clone(), units));
        let threads: Vec<_> = (0..helpers)
            .map(|_| {
                let job = job.clone();
                thread::spawn(move || job.help())
            })
            .collect();
        job.help();
        let outcome = job.close();
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
        assert_eq!(checks.late.load(Std::SeqCst), 0, "a unit ran after the end");
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
