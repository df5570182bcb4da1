//! Pools: which threads take a job, and when they are started, woken, poll and end.

use std::sync::Barrier;
use std::sync::mpsc::channel;
use std::thread::{self, ThreadId};

use super::*;

const HOUR: Duration = Duration::from_secs(3600);
const NO_POLL: PollLimits = PollLimits { threads: 1, time: Duration::ZERO };
const ONE_POLLS: PollLimits = PollLimits { threads: 1, time: HOUR };
const ALL_POLL: PollLimits = PollLimits { threads: usize::MAX, time: HOUR };

fn pool(polls: PollLimits, idle_exit: Duration) -> ThreadPool<Closures> {
    ThreadPool::with_idle_exit("test", usize::MAX, polls, (idle_exit, true))
}

/// Ends the pool of a test.
struct Closes<'a>(&'a ThreadPool<Closures>);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        assert!(self.0.close().is_empty() || thread::panicking());
        self.0.threads().wait(0);
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Adds jobs at once. Returns the error and the number of jobs that it gives back, if no thread can run them.
fn try_add(
    pool: &ThreadPool<Closures>,
    jobs: impl IntoIterator<Item = Work>,
) -> Result<(), (Option<i32>, usize)> {
    let mut state = pool.lock();
    let before = state.queue.len();
    state.queue.extend(jobs);
    let count = state.queue.len() - before;
    pool.dispatch(state, count, false).map_err(|(error, jobs)| (error.raw_os_error(), jobs.len()))
}

fn add(pool: &ThreadPool<Closures>, job: impl FnOnce() + Send + 'static) {
    try_add(pool, [Box::new(job) as Work]).unwrap();
}

/// Adds `count` jobs at once, each of which waits until all run, and returns their threads.
fn meet_at_once(pool: &ThreadPool<Closures>, count: usize, at_once: usize) -> Vec<ThreadId> {
    let (sender, ran) = channel();
    let barrier = Arc::new(Barrier::new(count));
    let job = || {
        let (barrier, sender) = (barrier.clone(), sender.clone());
        Box::new(move || {
            barrier.wait();
            sender.send(thread::current().id()).unwrap();
        }) as Work
    };
    for _ in 0..count / at_once {
        try_add(pool, (0..at_once).map(|_| job())).unwrap();
    }
    (0..count).map(|_| ran.recv_timeout(HOUR).unwrap()).collect()
}

/// The same, one job after the other.
fn meet(pool: &ThreadPool<Closures>, count: usize) -> Vec<ThreadId> {
    meet_at_once(pool, count, 1)
}

/// Waits until the lock shows what a test waits for.
fn eventually(pool: &ThreadPool<Closures>, what: impl Fn(&State<Closures>) -> bool) {
    while !what(&pool.lock()) {
        thread::yield_now();
    }
}

#[test]
fn the_polling_thread_takes_the_next_job_and_no_thread_is_woken() {
    let pool = pool(ONE_POLLS, HOUR);
    let _closes = Closes(&pool);
    let [first] = meet(&pool, 1)[..] else { panic!() };
    for _ in 0..100 {
        eventually(&pool, |state| state.polling == 1);
        assert_eq!(meet(&pool, 1), [first]);
        assert_eq!(pool.lock().waking, 0);
    }
    assert_eq!(pool.lock().threads, 1);
}

/// The polling thread takes one of the jobs. Those that are added together wake a thread each, but only as many as do not
/// poll; of those that are added one by one, each thread that takes one wakes the next.
#[test]
fn jobs_are_taken_by_polling_and_woken_threads() {
    for (polls, at_once) in [(NO_POLL, 4), (ONE_POLLS, 4), (ALL_POLL, 4), (ONE_POLLS, 1)] {
        let pool = pool(polls, HOUR);
        let _closes = Closes(&pool);
        let polling = if polls.time.is_zero() { 0 } else { polls.threads.min(4) };
        for _ in 0..100 {
            meet_at_once(&pool, 4, at_once);
            assert!(pool.lock().polling <= polling);
            eventually(&pool, |state| (state.polling, state.asleep.len()) == (polling, 4 - polling));
            assert_eq!(pool.lock().waking, 0, "{at_once} at once");
        }
        assert_eq!(pool.lock().threads, 4);
    }
}

#[test]
fn the_thread_that_fell_asleep_last_takes_the_next_job() {
    let pool = pool(NO_POLL, HOUR);
    let _closes = Closes(&pool);
    meet(&pool, 8);
    eventually(&pool, |state| state.asleep.len() == 8);
    let [last] = meet(&pool, 1)[..] else { panic!() };
    for _ in 0..100 {
        eventually(&pool, |state| state.asleep.len() == 8);
        assert_eq!(meet(&pool, 1), [last]);
    }
}

/// Calls `step` until one thread is left. Fails after a minute, many times longer than the threads are kept.
fn until_one_thread_is_left(pool: &ThreadPool<Closures>, mut step: impl FnMut()) {
    let limit = Instant::now() + Duration::from_secs(60);
    let threads = || pool.lock().threads;
    while threads() > 1 {
        assert!(Instant::now() < limit, "{} threads are left", threads());
        step();
        thread::sleep(Duration::from_millis(1));
    }
}

/// Jobs that one thread can do, more often than a thread is kept.
#[test]
fn work_of_one_thread_keeps_no_other_thread() {
    for polls in [NO_POLL, PollLimits { time: Duration::from_micros(50), ..ALL_POLL }] {
        let pool = pool(polls, Duration::from_millis(200));
        let _closes = Closes(&pool);
        meet(&pool, 16);
        until_one_thread_is_left(&pool, || drop(meet(&pool, 1)));
    }
}

/// A thread whose sleep is interrupted without a job sleeps on, and its time goes on.
#[test]
fn wake_ups_without_a_job_keep_no_thread() {
    let pool = pool(NO_POLL, Duration::from_millis(200));
    let _closes = Closes(&pool);
    meet(&pool, 16);
    until_one_thread_is_left(&pool, || notify(&pool.lock().asleep));
}

/// A job that waits for the thread of another one runs there; a job that panics does not end its thread.
#[test]
fn no_more_threads_than_allowed_and_none_is_lost_to_a_panic() {
    let pool = ThreadPool::with_idle_exit("test", 2, NO_POLL, (HOUR, true));
    let _closes = Closes(&pool);
    let (sender, ran) = channel();
    for number in 0..200 {
        let sender = sender.clone();
        add(&pool, move || {
            sender.send((number, thread::current().id())).unwrap();
            assert!(number % 3 > 0, "injected");
        });
    }
    let mut all: Vec<_> = (0..200).map(|_| ran.recv_timeout(HOUR).unwrap()).collect();
    all.sort_unstable_by_key(|&(number, _)| number);
    assert!(all.iter().map(|&(number, _)| number).eq(0..200));
    let threads: hashbrown::HashSet<_> = all.iter().map(|&(_, thread)| thread).collect();
    assert!(threads.len() <= 2 && pool.lock().threads <= 2);
}

/// The first thread starts the second when it takes its job, and so on.
#[test]
fn a_caller_starts_one_thread_which_starts_the_next() {
    let pool = pool(NO_POLL, HOUR);
    let _closes = Closes(&pool);
    let (barrier, (ended, end)) = (Arc::new(Barrier::new(4)), channel());
    let mut state = pool.lock();
    for _ in 0..4 {
        let (barrier, ended) = (barrier.clone(), ended.clone());
        state.queue.push_back(Box::new(move || {
            barrier.wait();
            ended.send(()).unwrap();
        }));
    }
    // The thread needs the lock to start another one.
    pool.0.start(&mut state, false).unwrap();
    assert_eq!((state.threads, pool.threads().count()), (1, 1));
    drop(state);
    (0..4).for_each(|_| end.recv_timeout(HOUR).unwrap());
    assert_eq!(pool.lock().threads, 4);
}

/// A job that is added while another thread starts wakes a thread that sleeps.
#[test]
fn a_thread_that_starts_leaves_no_other_asleep() {
    let pool = pool(NO_POLL, HOUR);
    let _closes = Closes(&pool);
    let [sleeping] = meet(&pool, 1)[..] else { panic!() };
    eventually(&pool, |state| state.asleep.len() == 1);
    let (sender, ran) = channel();
    // Stands for a thread that takes long to start.
    pool.lock().starting += 1;
    add(&pool, move || sender.send(thread::current().id()).unwrap());
    assert_eq!(ran.recv_timeout(HOUR), Ok(sleeping));
    pool.lock().starting -= 1;
}

/// Jobs that were left without a thread get one when another job is added or taken.
#[test]
fn threads_that_could_not_be_started_are_started_later() {
    let pool = pool(NO_POLL, HOUR);
    let _closes = Closes(&pool);
    let (gates, barrier) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(4)));
    let gate = gates.clone();
    add(&pool, move || _ = gate.wait());
    eventually(&pool, |state| state.starting == 0 && state.queue.is_empty());
    pool.threads().refuse(true);
    for _ in 0..3 {
        let barrier = barrier.clone();
        add(&pool, move || _ = barrier.wait());
    }
    eventually(&pool, |state| (state.threads, state.queue.len()) == (1, 3));
    pool.threads().refuse(false);
    // The thread takes one job and starts a thread for the next.
    gates.wait();
    barrier.wait();
    assert_eq!(pool.lock().threads, 3);
}

/// Without any thread the caller has its jobs back; otherwise the existing threads run them.
#[test]
fn jobs_without_a_thread_are_returned() {
    let pool = pool(NO_POLL, HOUR);
    let _closes = Closes(&pool);
    let three = || (0..3).map(|_| Box::new(|| ()) as Work);
    pool.threads().refuse(true);
    assert_eq!(try_add(&pool, three()), Err((Some(libc::EAGAIN), 3)));
    assert_eq!((pool.lock().queue.len(), pool.threads().count()), (0, 0));
    pool.threads().refuse(false);
    meet(&pool, 1);
    pool.threads().refuse(true);
    assert_eq!(try_add(&pool, three()), Ok(()));
    eventually(&pool, |state| state.queue.is_empty());
}

#[test]
fn the_largest_limits_of_the_engines_count() {
    let pool = ThreadPool::<Closures>::with_idle_exit("test", 1, NO_POLL, (HOUR, true));
    let limits = || {
        let state = pool.lock();
        (state.most, state.polls.time)
    };
    pool.enter(4, NO_POLL);
    pool.enter(2, ONE_POLLS);
    pool.enter(2, NO_POLL);
    assert_eq!(limits(), (4, HOUR));
    pool.leave(4, NO_POLL);
    assert_eq!(limits(), (2, HOUR));
    pool.leave(2, ONE_POLLS);
    assert_eq!(limits(), (2, Duration::ZERO));
}
