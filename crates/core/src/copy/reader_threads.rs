//! Threads that have the kernel read another process's memory, so that a call can return at its deadline.
//!
//! The system call cannot be interrupted while the memory of the other process does not answer (behind
//! userfaultfd, or on a network file system that hangs). Its thread is lost until that process ends. So
//! neither a caller's thread nor a copy worker makes this call. A call that leaves at its deadline abandons
//! its job. The job keeps the destination memory and its pins until the kernel has finished. One process can
//! cost only a limited number of threads. All engines of this process share the threads, and so the limits.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use super::unit_job::{UnitJob, Work};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::SPIN_BEFORE_PARK;
use crate::threads::{CLOSE_WAIT, EngineNumber, JobQueue, PollLimits, ThreadPool};

/// Threads that may read one process at the same time, and so be lost to it: minimum and maximum.
const THREADS_OF_ONE: (usize, usize) = (8, 32);
/// Limit on all reader threads, as a multiple of the limit for one process.
const FACTOR_OF_ALL: usize = 8;

/// The reader threads. Drop ends them, except those that are blocked in the kernel.
#[derive(Debug)]
pub(super) struct ReaderThreads(ThreadPool<Tickets>);

/// The reads of one engine. Other engines may use the same threads.
#[derive(Debug)]
pub(super) struct Readers {
    threads: Arc<ReaderThreads>,
    engine: EngineNumber,
    of_a_process: usize,
}

/// The tickets of all reads in progress.
#[derive(Default)]
struct Tickets {
    /// The limits for one process that the engines have. The largest counts.
    of_a_process: Vec<usize>,
    queue: VecDeque<Ticket>,
    /// Tickets in work, each with its number.
    running: Vec<(u64, Ticket)>,
    last: u64,
}

/// One thread's share of a job.
#[derive(Clone)]
struct Ticket {
    engine: EngineNumber,
    pid: i32,
    job: Arc<UnitJob>,
}

impl ReaderThreads {
    /// Creates the set without any thread.
    pub(super) fn new() -> Self {
        let polls = PollLimits { threads: usize::MAX, time: SPIN_BEFORE_PARK };
        // The allowance of a process bounds the threads.
        ReaderThreads(ThreadPool::new("llm-read", usize::MAX, polls))
    }

    /// Waits for the reads of the engines for which `is_of` holds, except those that are blocked in the kernel. Returns the
    /// processes that these read.
    fn wait_for(&self, is_of: impl Fn(EngineNumber) -> bool) -> Vec<i32> {
        let mut state = self.0.lock();
        loop {
            let running = || {
                let tickets = state.queue.running.iter().map(|(_, ticket)| ticket);
                tickets.filter(|ticket| is_of(ticket.engine))
            };
            // Every job has ended or was abandoned, and a job that was not abandoned ends by itself.
            if running().all(|ticket| ticket.job.abandoned()) {
                return running().map(|ticket| ticket.pid).collect();
            }
            state = self.0.wait_job(state, CLOSE_WAIT);
        }
    }
}

impl Drop for ReaderThreads {
    fn drop(&mut self) {
        drop(self.0.close());
        let lost = self.wait_for(|_| true);
        self.0.threads().wait(lost.len());
    }
}

impl Readers {
    /// Creates the reads of an engine with this number of copy workers.
    pub(super) fn new(threads: &Arc<ReaderThreads>, engine: EngineNumber, workers: usize) -> Self {
        let (least, most) = THREADS_OF_ONE;
        let of_a_process = workers.clamp(least, most);
        threads.0.lock().queue.of_a_process.push(of_a_process);
        Readers { threads: threads.clone(), engine, of_a_process }
    }

    /// Runs units `0..units` of `work`, which read process `pid`, on at most `most` threads, until the
    /// deadline, or until no unit has ended for `silence`.
    ///
    /// When it returns, no thread touches `work` any more, unless the error carries
    /// [`STILL_READING`](super::STILL_READING). In that case, threads that are still inside keep the work
    /// until the kernel has finished.
    pub(super) fn run(
        &self,
        pid: i32,
        work: Arc<impl Work>,
        units: usize,
        most: usize,
        (deadline, silence): (Deadline, Option<Duration>),
    ) -> Result<()> {
        let job = Arc::new(UnitJob::new(work, units));
        let ticket = Ticket { engine: self.engine, pid, job: job.clone() };
        self.submit(&ticket, units.min(most), deadline)?;
        job.wait(pid, deadline, silence)
    }

    /// Queues 1 to `count` tickets as soon as the process may have them. Returns `Err` at the deadline, or if no thread can
    /// become free or be started. Then no thread will run the job.
    fn submit(&self, ticket: &Ticket, count: usize, deadline: Deadline) -> Result<()> {
        let pool = &self.threads.0;
        let mut state = pool.lock();
        let allowance = loop {
            let allowance = state.queue.allowance(ticket.pid);
            if allowance.threads > 0 {
                break allowance;
            }
            if let Some(error) = allowance.blocked {
                return Err(error);
            }
            drop(pool.wait_job(state, deadline.wait_limit()));
            deadline.waiting("waiting for a thread that reads the memory of the peer")?;
            state = pool.lock();
        };
        let count = count.min(allowance.threads);
        state.queue.queue.extend(std::iter::repeat_n(ticket, count).cloned());
        // Simultaneous reads of one unit each wake a thread each.
        let ready = state.queue.ready();
        pool.dispatch(state, ready, false)
            .map_err(|(error, _)| Error::no_thread("the thread that reads the memory of the peer", error))
    }
}

impl Drop for Readers {
    /// Waits for the reads of the engine, except those that are blocked in the kernel. The memory that these write to stays
    /// mapped as long as they exist.
    fn drop(&mut self) {
        let _here = self.engine.on_this_thread();
        let mut lost = self.threads.wait_for(|engine| engine == self.engine);
        let limits = &mut self.threads.0.lock().queue.of_a_process;
        if let Some(at) = limits.iter().position(|&limit| limit == self.of_a_process) {
            limits.swap_remove(at);
        }
        if !lost.is_empty() {
            lost.sort_unstable();
            tracing::error!(
                target: "llm_datadist::memory",
                "the engine ended while the kernel still reads memory of other processes (pids {lost:?}) into its rows: \
                 pool memory stays mapped, and registered memory must stay valid, until those processes end"
            );
        }
    }
}

impl JobQueue for Tickets {
    type Job = (EngineNumber, Arc<UnitJob>);
    type Key = u64;

    fn ready(&self) -> usize {
        self.queue.len()
    }

    fn next(&mut self, ended: Option<u64>) -> Option<(u64, Self::Job)> {
        self.running.retain(|&(number, _)| Some(number) != ended);
        let ticket = self.queue.pop_front()?;
        let job = (ticket.engine, ticket.job.clone());
        self.last += 1;
        self.running.push((self.last, ticket));
        Some((self.last, job))
    }

    fn take_all(&mut self) -> Vec<Self::Job> {
        self.queue.drain(..).map(|ticket| (ticket.engine, ticket.job)).collect()
    }

    fn run((engine, job): Self::Job) {
        let _engine = engine.on_this_thread();
        job.help();
    }
}

/// How many more threads may read a process.
struct Allowance {
    threads: usize,
    /// Why no thread can become free, if so.
    blocked: Option<Error>,
}

impl Tickets {
    fn allowance(&self, pid: i32) -> Allowance {
        let of_a_process = self.of_a_process.iter().copied().max().unwrap_or(THREADS_OF_ONE.0);
        let in_all = of_a_process * FACTOR_OF_ALL;
        let (mut own, mut own_lost, mut lost) = (0, 0, 0);
        for (_, ticket) in &self.running {
            let (same, gone) = (ticket.pid == pid, ticket.job.abandoned());
            own += usize::from(same);
            own_lost += usize::from(same && gone);
            lost += usize::from(gone);
        }
        own += self.queue.iter().filter(|ticket| ticket.pid == pid).count();
        let used = self.running.len() + self.queue.len();
        let threads = of_a_process.saturating_sub(own).min(in_all.saturating_sub(used));
        // A process that has cost a thread gets only one thread per call.
        let threads = if own_lost > 0 { threads.min(1) } else { threads };
        let blocked = if own_lost >= of_a_process {
            Some(all_lost(pid, own_lost))
        } else {
            (lost >= in_all).then(|| lost_to_others(lost))
        };
        Allowance { threads, blocked }
    }
}

fn all_lost(pid: i32, threads: usize) -> Error {
    let text = "all threads that may read this peer's memory are blocked in the kernel, because the memory does not \
                respond; end that process";
    Error::new(ErrorKind::Timeout, text).with("pid", pid).with("threads", threads)
}

/// Returns an error of kind [`ErrorKind::NotEnabled`], after which the owner sends the bytes.
fn lost_to_others(threads: usize) -> Error {
    let text = "all reader threads are blocked in the kernel by peers whose memory does not respond";
    Error::new(ErrorKind::NotEnabled, text).with("threads", threads)
}

#[cfg(test)]
mod tests {
    use std::sync::{Condvar, Mutex};

    use super::*;
    use crate::copy::STILL_READING;

    fn readers(workers: usize) -> Readers {
        Readers::new(&Arc::new(ReaderThreads::new()), EngineNumber::next(), workers)
    }

    fn limit(millis: u64) -> (Deadline, Option<Duration>) {
        (Deadline::after(Duration::from_millis(millis)), None)
    }

    #[test]
    fn threads_lost_to_some_processes_leave_the_sockets_to_others() {
        let (readers, gate) = (readers(1), Arc::new((Mutex::new(false), Condvar::new())));
        let opened = gate.clone();
        let ends_when_opened = Arc::new(move |_| {
            drop(opened.1.wait_while(opened.0.lock().unwrap(), |open| !*open).unwrap());
            Ok(())
        });
        let (each, _) = THREADS_OF_ONE;
        std::thread::scope(|scope| {
            for call in 0..each * FACTOR_OF_ALL {
                let (readers, work) = (&readers, ends_when_opened.clone());
                let pid = i32::try_from(call / each).unwrap() + 1;
                // On a busy machine, the deadline may pass before a thread has started.
                scope.spawn(move || {
                    while readers
                        .run(pid, work.clone(), 1, 4, limit(50))
                        .unwrap_err()
                        .fact(STILL_READING)
                        .is_none()
                    {}
                });
            }
        });
        let (hour, quick) = (3_600_000, || Arc::new(|_| Ok(())));
        let error = readers.run(1, quick(), 1, 1, limit(hour)).unwrap_err();
        assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::Timeout, Some("8")), "{error}");
        // Another engine has no more threads, and does not wait for those that were lost when it closes.
        let other = Readers::new(&readers.threads, EngineNumber::next(), 1);
        for readers in [&readers, &other] {
            let error = readers.run(99, quick(), 1, 1, limit(hour)).unwrap_err();
            assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::NotEnabled, Some("64")), "{error}");
        }
        drop(other);
        *gate.0.lock().unwrap() = true;
        gate.1.notify_all();
        while readers.run(99, quick(), 1, 1, limit(hour)).is_err() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_panic_is_the_error_of_its_call_and_no_thread_stays() {
        let panics = |unit| {
            assert_ne!(unit, 1, "injected");
            Ok(())
        };
        let readers = readers(4);
        let error = readers.run(1, Arc::new(panics), 8, 4, limit(60_000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        readers.run(1, Arc::new(|_| Ok(())), 100, 4, limit(60_000)).unwrap();
        let threads = readers.threads.0.threads().clone();
        drop(readers);
        assert_eq!(threads.count(), 0);
    }
}
