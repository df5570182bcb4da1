//! Checks a pool with loom: every order in which two threads start, take jobs, sleep, are woken and end.
//!
//! Part of the library's own tests, because the pool is private (`make loom`). Loom's clock does not move, so no thread ends before
//! the pool closes, and a job that no thread is woken for is a deadlock.

use std::sync::Arc as Shared;
use std::sync::atomic::{AtomicU64, Ordering as Std};

use loom::thread;

use super::*;

/// How many jobs ran, and what notifies of it.
type Ran = Arc<(Mutex<usize>, Condvar)>;

fn pool() -> Arc<ThreadPool<Closures>> {
    let polls = PollLimits { threads: 0, time: Duration::ZERO };
    Arc::new(ThreadPool::with_idle_exit("test", 2, polls, (Duration::from_secs(3600), true)))
}

/// Adds a job that counts itself, unless the pool has been closed.
fn add(pool: &ThreadPool<Closures>, ran: &Ran) -> bool {
    let (mut state, ran) = (pool.lock(), ran.clone());
    if state.closed {
        return false;
    }
    state.queue.push_back(Box::new(move || {
        *ran.0.lock() += 1;
        ran.1.notify_one();
    }));
    pool.dispatch(state, 1, false).map_err(|(error, _)| error).unwrap();
    true
}

/// Runs `model` under loom, and checks that it explored several orders.
fn explore(model: impl Fn() + Send + Sync + 'static) {
    let orders = Shared::new(AtomicU64::new(0));
    let counted = orders.clone();
    loom::model(move || {
        counted.fetch_add(1, Std::Relaxed);
        model();
    });
    let orders = orders.load(Std::Relaxed);
    eprintln!("{orders} orders");
    assert!(orders > 10, "loom looked at {orders} orders");
}

/// Closes the pool, waits for its threads, and returns the number of jobs that none of them ran.
fn close(pool: &ThreadPool<Closures>) -> usize {
    let left = pool.close().len();
    pool.threads().wait(0);
    let state = pool.lock();
    assert_eq!((state.threads, state.starting, state.waking, state.asleep.len()), (0, 0, 0, 0));
    assert_eq!(state.queue.len(), 0);
    left
}

/// The first job starts a thread. The other jobs start one or wake one.
#[test]
fn every_job_runs() {
    explore(|| {
        let (pool, ran) = (pool(), Ran::default());
        assert!(add(&pool, &ran) && add(&pool, &ran));
        let mut count = ran.0.lock();
        while *count < 2 {
            count = ran.1.wait(count);
        }
        drop(count);
        assert_eq!(close(&pool), 0);
    });
}

#[test]
fn a_pool_is_closed_at_any_moment() {
    // One bit per number of jobs that were added, and per number of those that no thread ran.
    let seen = Shared::new([AtomicU64::new(0), AtomicU64::new(0)]);
    let noted = seen.clone();
    explore(move || {
        let (pool, ran) = (pool(), Ran::default());
        let adds = {
            let (pool, ran) = (pool.clone(), ran.clone());
            thread::spawn(move || usize::from(add(&pool, &ran)) + usize::from(add(&pool, &ran)))
        };
        let left = close(&pool);
        let added = adds.join().unwrap();
        assert_eq!(*ran.0.lock() + left, added, "a job ran twice or is lost");
        noted[0].fetch_or(1 << added, Std::Relaxed);
        noted[1].fetch_or(1 << left, Std::Relaxed);
    });
    let seen = [0, 1].map(|at| seen[at].load(Std::Relaxed));
    assert_eq!(seen, [0b111, 0b111], "not every end came about");
}
