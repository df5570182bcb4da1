//! Keeps the workers off the core of the thread that calls.
//!
//! A kernel may put a thread it wakes on the core of whoever woke it although another is idle (in virtual machines a core that
//! sleeps can count as taken), and there it runs when the call is nearly over. So whoever calls looks where each worker ran last,
//! and has the kernel move those that would come in its way: a system call where two meet, none while they stay apart. A
//! worker keeps every other core that it was given, so a scheduler that knows better is free, and what others say about its
//! cores counts (`what_others_say_of_its_cores_counts`). Not for: pinning, or other processes.

use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// Not known, or about to change.
const NOWHERE: usize = usize::MAX;

/// Where the workers of an engine ran last.
#[derive(Debug)]
pub(super) struct Apart {
    workers: Box<[Place]>,
}

#[derive(Debug)]
struct Place {
    thread: AtomicI32,
    core: AtomicUsize,
    cores: Mutex<Cores>,
}

/// The cores of a worker: those it was given, and those it was left with here.
#[derive(Debug, Default)]
struct Cores {
    given: CpuSet,
    left: Option<CpuSet>,
}

impl Apart {
    pub(super) fn new(workers: usize) -> Self {
        let place =
            |_| Place { thread: AtomicI32::new(0), core: AtomicUsize::new(NOWHERE), cores: Mutex::default() };
        Apart { workers: (0..workers).map(place).collect() }
    }

    /// This thread is worker `index`, and here.
    pub(super) fn seen(&self, index: usize) {
        if let Some(place) = self.workers.get(index) {
            if place.thread.load(Ordering::Relaxed) == 0 {
                place.thread.store(gettid().as_raw_nonzero().get(), Ordering::Relaxed);
            }
            place.core.store(sched_getcpu(), Ordering::Release);
        }
    }

    /// Before workers are woken: those that ran last where this thread runs now have to run elsewhere, as far as the kernel
    /// lets it. Where it does not they come late, as they would have.
    pub(super) fn make_room(&self) {
        let here = sched_getcpu();
        for place in &self.workers {
            let met = place.core.compare_exchange(here, NOWHERE, Ordering::AcqRel, Ordering::Relaxed);
            if let (Ok(_), Some(thread)) = (met, Pid::from_raw(place.thread.load(Ordering::Relaxed))) {
                let mut cores = place.cores.lock().unwrap_or_else(PoisonError::into_inner);
                let _ = cores.leave(thread, here);
            }
        }
    }
}

impl Cores {
    /// Takes core `here` from `thread`, if it has another.
    fn leave(&mut self, thread: Pid, here: usize) -> rustix::io::Result<()> {
        let now = sched_getaffinity(Some(thread))?;
        if self.left != Some(now) {
            self.given = now;
        }
        let mut elsewhere = self.given;
        if here < CpuSet::MAX_CPU {
            elsewhere.unset(here);
        }
        if elsewhere.count() > 0 {
            sched_setaffinity(Some(thread), &elsewhere)?;
            // As the kernel took it: it may allow fewer.
            self.left = Some(sched_getaffinity(Some(thread))?);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread;

    use super::*;

    fn cores(of: &[usize]) -> CpuSet {
        let mut set = CpuSet::new();
        for &core in of {
            set.set(core);
        }
        set
    }

    /// Cores that this thread may use; fewer than two, and there is nothing to test.
    fn own() -> Vec<usize> {
        let set = sched_getaffinity(None).unwrap();
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
    }

    /// What `judge` finds on core `here` while a worker that ran there, or on core `there`, waits.
    fn beside(here: usize, there: usize, judge: impl FnOnce(&Apart, Pid) + Send) {
        let apart = Apart::new(1);
        let ((ready, is_ready), (end, ended)) = (channel(), channel::<()>());
        thread::scope(|scope| {
            let apart = &apart;
            scope.spawn(move || {
                let given = sched_getaffinity(None).unwrap();
                sched_setaffinity(None, &cores(&[there])).unwrap();
                apart.seen(0);
                sched_setaffinity(None, &given).unwrap();
                ready.send(gettid()).unwrap();
                let _ = ended.recv();
            });
            let worker = is_ready.recv().unwrap();
            let judged = scope.spawn(move || {
                sched_setaffinity(None, &cores(&[here])).unwrap();
                judge(apart, worker);
            });
            let judged = judged.join();
            drop(end);
            judged.unwrap();
        });
    }

    #[test]
    fn a_worker_leaves_the_core_of_who_calls_and_no_other() {
        let own = own();
        let [here, there, ..] = own[..] else { return };
        let rest: Vec<_> = own.iter().copied().filter(|&core| core != here).collect();
        beside(here, here, |apart, worker| {
            apart.make_room();
            assert_eq!(sched_getaffinity(Some(worker)).unwrap(), cores(&rest));
        });
        beside(here, there, |apart, worker| {
            apart.make_room();
            assert_eq!(sched_getaffinity(Some(worker)).unwrap(), cores(&own), "it is not in the way");
        });
        // It ran on the core that it had left; now the caller is there.
        beside(here, here, |apart, worker| {
            apart.make_room();
            sched_setaffinity(None, &cores(&[there])).unwrap();
            apart.workers[0].core.store(there, Ordering::Release);
            apart.make_room();
            let rest: Vec<_> = own.iter().copied().filter(|&core| core != there).collect();
            assert_eq!(sched_getaffinity(Some(worker)).unwrap(), cores(&rest), "it got the first one back");
        });
    }

    #[test]
    fn what_others_say_of_its_cores_counts() {
        let own = own();
        let [here, there, ..] = own[..] else { return };
        beside(here, here, |apart, worker| {
            sched_setaffinity(Some(worker), &cores(&[here])).unwrap();
            apart.make_room();
            assert_eq!(sched_getaffinity(Some(worker)).unwrap(), cores(&[here]), "it has no other");
        });
        beside(here, here, |apart, worker| {
            apart.make_room();
            sched_setaffinity(Some(worker), &cores(&[here, there])).unwrap();
            apart.workers[0].core.store(here, Ordering::Release);
            apart.make_room();
            assert_eq!(sched_getaffinity(Some(worker)).unwrap(), cores(&[there]));
        });
    }

    #[test]
    fn a_worker_that_was_never_seen_is_not_moved() {
        let apart = Apart::new(2);
        apart.make_room();
        apart.seen(2);
        assert!(apart.workers.iter().all(|place| place.thread.load(Ordering::Relaxed) == 0));
    }
}
