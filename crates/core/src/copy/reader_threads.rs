//! Threads that have the kernel read another process's memory, so that a call can return at its deadline.
//!
//! The system call cannot be interrupted while the memory of the other process does not answer (behind
//! userfaultfd, or on a network file system that hangs). Its thread is lost until that process ends. So
//! neither a caller's thread nor a copy worker makes this call. A call that leaves at its deadline abandons
//! its job. The job keeps the destination memory and its pins until the kernel has finished. One process can
//! cost only a limited number of threads. Threads start on demand, and a thread ends when it has had no work for one second,
//! whatever the others do (`work_of_one_reader_keeps_no_other_reader`).

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::peer_read::{PeerRead, ReadJob};
use super::workers::Work;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex, PATIENCE, Sleeper, Sleepers, poll};

/// Threads that may read one process at the same time, and so be lost to it: minimum and maximum.
const THREADS_OF_ONE: (usize, usize) = (8, 32);
/// Limit on the reader threads of one engine, as a multiple of the limit for one process.
const FACTOR_OF_ALL: usize = 8;
/// How long a reader thread is kept after its last ticket.
const IDLE: Duration = Duration::from_secs(1);
/// Stack size in bytes: enough for one unit, whose lists are on the heap.
const READER_STACK: usize = 256 << 10;

/// The reader threads of one engine.
pub(super) struct Readers(Arc<Shared>);

struct Shared {
    of_a_process: usize,
    /// How long a thread is kept after its last ticket.
    idle: Duration,
    state: Mutex<State>,
    /// Number of tickets in the queue, which a reader polls before it sleeps.
    queued: AtomicUsize,
    /// Notified when a ticket is finished.
    freed: Condvar,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Ticket>,
    /// Tickets in work, by the number of the reader.
    running: Vec<(u64, Ticket)>,
    threads: HashMap<u64, JoinHandle<()>>,
    last_reader: u64,
    /// Readers that poll for a ticket, readers that sleep, and readers that were started or woken but have
    /// not arrived yet.
    polling: usize,
    sleeping: Sleepers,
    starting: usize,
    /// Callers that wait for a free thread, and whether the engine has ended.
    waiting: usize,
    closed: bool,
}

/// One thread's share of a job.
#[derive(Clone)]
struct Ticket {
    pid: i32,
    job: Arc<dyn ReadJob>,
}

impl Readers {
    /// Creates the set without any thread. `workers` is the number of copy workers of the engine.
    pub(super) fn new(workers: usize) -> Self {
        Readers::keeping(workers, IDLE)
    }

    /// Creates a set whose threads end when they have had no ticket for `idle`.
    fn keeping(workers: usize, idle: Duration) -> Self {
        let (least, most) = THREADS_OF_ONE;
        Readers(Arc::new(Shared {
            of_a_process: workers.clamp(least, most),
            idle,
            state: Mutex::default(),
            queued: AtomicUsize::new(0),
            freed: Condvar::new(),
        }))
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
        let job = Arc::new(PeerRead::new(work, units));
        self.0.submit(&Ticket { pid, job: job.clone() }, units.min(most), deadline)?;
        job.wait(pid, deadline, silence)
    }
}

impl std::fmt::Debug for Readers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Readers").field("threads", &self.0.state.lock().threads.len()).finish_non_exhaustive()
    }
}

impl Drop for Readers {
    /// Ends the threads, except those that are blocked in the kernel. The memory that they write to stays mapped
    /// as long as they exist.
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        while let Some(reader) = state.sleeping.pop() {
            state.starting += 1;
            reader.wake();
        }
        // Every job has ended or was abandoned, and a job that was not abandoned ends by itself.
        while state.running.iter().any(|(_, ticket)| !ticket.job.abandoned()) {
            state = self.0.freed.wait(state);
        }
        let mut lost: Vec<i32> = state.running.iter().map(|(_, ticket)| ticket.pid).collect();
        let running: Vec<u64> = state.running.iter().map(|&(id, _)| id).collect();
        let threads: Vec<_> = state.threads.drain().filter(|(id, _)| !running.contains(id)).collect();
        drop(state);
        for (_, thread) in threads {
            // A reader that drops the last handle of its engine cannot join itself. It is about to end.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
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

impl Shared {
    /// Queues 1 to `count` tickets as soon as the process may have them, and wakes or starts threads for
    /// them. Returns `Err` if the engine has ended, at the deadline, or if no thread can become free.
    fn submit(self: &Arc<Self>, ticket: &Ticket, count: usize, deadline: Deadline) -> Result<()> {
        let mut state = self.state.lock();
        let allowance = loop {
            if state.closed {
                return Err(Error::closed());
            }
            let allowance = state.allowance(ticket.pid, self.of_a_process);
            if allowance.threads > 0 {
                break allowance;
            }
            if let Some(error) = allowance.blocked {
                return Err(error);
            }
            state.waiting += 1;
            state = self.freed.wait_timeout(state, deadline.nap()).0;
            state.waiting -= 1;
            drop(state);
            deadline.waiting("waiting for a thread that reads the memory of the peer")?;
            state = self.state.lock();
        };
        for _ in 0..count.min(allowance.threads) {
            state.queue.push_back(ticket.clone());
        }
        let mut woken = Vec::new();
        while state.queue.len() > state.polling + state.starting {
            state.starting += 1;
            if let Some(reader) = state.sleeping.pop() {
                woken.push(reader);
            } else if let Err(error) = self.start(&mut state) {
                state.starting -= 1;
                // Existing threads take the tickets. Without any thread, the tickets would wait forever.
                if state.threads.is_empty() {
                    state.queue.retain(|queued| !Arc::ptr_eq(&queued.job, &ticket.job));
                    return Err(error);
                }
                break;
            }
        }
        let queued = state.queue.len();
        drop(state);
        self.queued.store(queued, Ordering::Release);
        for reader in woken {
            reader.wake();
        }
        Ok(())
    }

    fn start(self: &Arc<Self>, state: &mut State) -> Result<()> {
        state.last_reader += 1;
        let (id, shared) = (state.last_reader, self.clone());
        let named = Builder::new().name("llm-read".into()).stack_size(READER_STACK);
        let thread = named
            .spawn(move || shared.serve(id))
            .map_err(|error| Error::no_thread("the thread that reads the memory of the peer", error))?;
        state.threads.insert(id, thread);
        Ok(())
    }

    /// Body of reader `id`, until it is idle or the engine ends.
    fn serve(&self, id: u64) {
        let mut state = self.state.lock();
        state.starting -= 1;
        let (sleeper, mut until) = (Arc::<Sleeper>::default(), Instant::now() + self.idle);
        loop {
            if let Some(ticket) = state.queue.pop_front() {
                self.queued.store(state.queue.len(), Ordering::Release);
                state.running.push((id, ticket.clone()));
                drop(state);
                ticket.job.help();
                until = Instant::now() + self.idle;
                state = self.state.lock();
                state.running.retain(|&(running, _)| running != id);
                if state.waiting > 0 || state.closed {
                    self.freed.notify_all();
                }
                continue;
            }
            if state.closed {
                return;
            }
            state.polling += 1;
            drop(state);
            poll(PATIENCE, || self.queued.load(Ordering::Acquire) > 0);
            state = self.state.lock();
            state.polling -= 1;
            if !state.queue.is_empty() || state.closed {
                continue;
            }
            let (rested, called) = sleeper.sleep(state, |state| &mut state.sleeping, until);
            state = rested;
            if called {
                state.starting -= 1;
            } else if state.queue.is_empty() && !state.closed {
                // Nobody waits for this thread, so it drops its own handle.
                state.threads.remove(&id);
                return;
            }
        }
    }
}

/// How many more threads may read a process.
struct Allowance {
    threads: usize,
    /// Why no thread can become free, if so.
    blocked: Option<Error>,
}

impl State {
    fn allowance(&self, pid: i32, of_a_process: usize) -> Allowance {
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

    fn limit(millis: u64) -> (Deadline, Option<Duration>) {
        (Deadline::after(Duration::from_millis(millis)), None)
    }

    #[test]
    fn threads_lost_to_some_processes_leave_the_sockets_to_others() {
        let (readers, gate) = (Readers::new(1), Arc::new((Mutex::new(false), Condvar::new())));
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
        let error = readers.run(99, quick(), 1, 1, limit(hour)).unwrap_err();
        assert_eq!((error.kind(), error.fact("threads")), (ErrorKind::NotEnabled, Some("64")), "{error}");
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
        let readers = Readers::new(4);
        let error = readers.run(1, Arc::new(panics), 8, 4, limit(60_000)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{error}");
        readers.run(1, Arc::new(|_| Ok(())), 100, 4, limit(60_000)).unwrap();
        // Joins the threads.
        drop(readers);
    }

    /// Work that one reader can do, more often than a reader is kept.
    #[test]
    fn work_of_one_reader_keeps_no_other_reader() {
        let readers = Readers::keeping(8, Duration::from_millis(200));
        let barrier = Arc::new(std::sync::Barrier::new(8));
        let meets = Arc::new(move |_| {
            barrier.wait();
            Ok(())
        });
        readers.run(1, meets, 8, 8, limit(3_600_000)).unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let count = || readers.0.state.lock().threads.len();
        while count() > 1 {
            assert!(Instant::now() < until, "{} readers are left", count());
            readers.run(1, Arc::new(|_| Ok(())), 1, 1, limit(3_600_000)).unwrap();
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
