//! The asynchronous calls of a client that has no engine: a store of a keeper. They have the workers, the clock, the records and the
//! events of those of engines.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::async_call::CallPurpose;
use super::async_calls::AsyncCalls;
use super::executor::{ClientCallKind, Executor, JobClass};
use crate::cache::CallRows;
use crate::error::Result;
use crate::events::{EventQueue, Transfer};
use crate::model::Deadline;
use crate::threads::{CLOSE_WAIT, EngineNumber};

/// The asynchronous calls of one client. Drop ends those that wait, and waits for those that run, which it does not have end early.
pub struct ClientCalls {
    calls: AsyncCalls,
    /// Dropped last, because it waits for the calls that run.
    _executor: Executor,
}

impl ClientCalls {
    /// Creates the state without calls, and no thread. At most `limit` calls run or have an outcome that the program has not taken.
    pub fn new(limit: usize) -> Self {
        let executor = Executor::of_process(EngineNumber::next(), Duration::ZERO);
        let calls = AsyncCalls::new(Arc::new(EventQueue::new(limit)), executor.handle(), Weak::new());
        ClientCalls { calls, _executor: executor }
    }

    /// Returns the queue that receives the outcomes.
    pub fn events(&self) -> &Arc<EventQueue> {
        self.calls.queue()
    }

    /// Starts a call that runs `work` on a worker. Calls of a kind begin in the order in which they were started.
    ///
    /// A call that has not begun when `deadline` passes ends then. The waits of the deadline that `work` gets end early once the call is
    /// stopped. Whatever `work` holds is dropped before the end of the call is reported. Returns `Err(Busy)` beyond the limit, and
    /// `Err(Closed)` once the calls were closed.
    pub fn start(
        &self,
        kind: ClientCallKind,
        deadline: Deadline,
        work: impl FnOnce(Deadline) -> Result<u64> + Send + 'static,
    ) -> Result<Arc<Transfer>> {
        let purpose = CallPurpose::new(None, JobClass::Client(kind), deadline);
        self.calls.start(purpose, CallRows::none(), Box::new(|_, deadline| work(deadline)))
    }

    /// Refuses new calls, ends those that wait, has those that run end early, and waits until none runs, at most 10 s.
    pub fn close(&self) {
        self.calls.close();
        // Its only error is an interruption, which this deadline does not have.
        let _ = self.calls.drain(Deadline::after(CLOSE_WAIT));
    }
}

impl std::fmt::Debug for ClientCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClientCalls").field("events", self.events()).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::error::ErrorKind;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    /// A call that reports its number when it begins, and runs until the returned sender sends or is dropped.
    fn blocking(
        calls: &ClientCalls,
        kind: ClientCallKind,
        begun: &Sender<usize>,
        number: usize,
    ) -> (Arc<Transfer>, Sender<()>) {
        let (begun, (open, gate)) = (begun.clone(), channel::<()>());
        let work = move |_| {
            begun.send(number).unwrap();
            let _ = gate.recv();
            Ok(number as u64)
        };
        (calls.start(kind, soon(), work).unwrap(), open)
    }

    #[test]
    fn reads_do_not_wait_for_writes_and_writes_run_one_after_the_other() {
        let (calls, (begun, order)) = (ClientCalls::new(100), channel());
        let writes: Vec<_> = (0..3).map(|at| blocking(&calls, ClientCallKind::Writes, &begun, at)).collect();
        assert_eq!(order.recv(), Ok(0));
        let reads: Vec<_> = (10..12).map(|at| blocking(&calls, ClientCallKind::Reads, &begun, at)).collect();
        let mut both = [order.recv().unwrap(), order.recv().unwrap()];
        both.sort_unstable();
        assert_eq!(both, [10, 11], "two reads run beside each other and beside the write");
        let (third, _open) = blocking(&calls, ClientCallKind::Reads, &begun, 12);
        assert!(
            order.recv_timeout(Duration::from_millis(20)).is_err(),
            "the workers of a client are bounded"
        );
        drop(reads);
        assert_eq!(order.recv(), Ok(12));
        assert!(!third.done());
        for (at, (write, open)) in writes.into_iter().enumerate() {
            assert!(at == 0 || order.recv() == Ok(at));
            drop(open);
            write.join(soon()).unwrap();
        }
    }

    #[test]
    fn a_call_that_waits_ends_at_its_deadline_and_drops_what_it_holds() {
        let (calls, (begun, order)) = (ClientCalls::new(100), channel());
        let (first, open) = blocking(&calls, ClientCallKind::Writes, &begun, 0);
        assert_eq!(order.recv(), Ok(0));
        let held = Arc::new(());
        let kept = held.clone();
        let deadline = Deadline::after(Duration::from_millis(5)).named("timeout");
        let late =
            calls.start(ClientCallKind::Writes, deadline, move |_| Ok(Arc::strong_count(&kept) as u64));
        let late = late.unwrap();
        let error = late.join(soon()).unwrap_err();
        assert_eq!((error.kind(), Arc::strong_count(&held)), (ErrorKind::Timeout, 1));
        assert!(error.to_string().contains("timeout passed while waiting for a thread"), "{error}");
        assert!(!first.done());
        drop(open);
        first.join(soon()).unwrap();
    }

    #[test]
    fn close_ends_all_calls_and_waits_for_those_that_run() {
        let (calls, (begun, order)) = (ClientCalls::new(100), channel());
        let stopped = Arc::new(Mutex::new(None));
        let (reports, started) = (stopped.clone(), begun.clone());
        let running = calls.start(ClientCallKind::Writes, soon(), move |deadline| {
            started.send(0).unwrap();
            while deadline.waiting("testing").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
            *reports.lock().unwrap() = Some(deadline.waiting("testing").unwrap_err().kind());
            Ok(0)
        });
        let (running, queue) = (running.unwrap(), calls.events().clone());
        assert_eq!(order.recv(), Ok(0));
        let (waiting, _open) = blocking(&calls, ClientCallKind::Writes, &begun, 1);
        calls.close();
        assert_eq!(stopped.lock().unwrap().take(), Some(ErrorKind::Interrupted));
        for ended in [running, waiting] {
            assert_eq!(ended.peek().unwrap().unwrap_err().kind(), ErrorKind::Closed);
        }
        let refused = calls.start(ClientCallKind::Reads, soon(), |_| Ok(0));
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(queue.poll(1).unwrap_err().kind(), ErrorKind::Closed);
        drop(calls);
        assert!(order.try_recv().is_err(), "a call began after the end");
    }

    #[test]
    fn calls_beyond_the_limit_are_refused_until_an_outcome_is_taken() {
        let calls = ClientCalls::new(2);
        let start = || calls.start(ClientCallKind::Reads, soon(), |_| Ok(7));
        let (first, second) = (start().unwrap(), start().unwrap());
        assert!(first.wait(soon()).unwrap() && second.wait(soon()).unwrap());
        assert_eq!(start().unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(first.outcome().unwrap().unwrap(), 7);
        assert_eq!(calls.events().poll(9).unwrap().len(), 1, "the other one");
        start().unwrap().join(soon()).unwrap();
    }
}
