//! One asynchronous call, which waits for its rows and for a worker without a thread of its own.
//!
//! ```text
//!  start ── queues of its rows ── (all free) ── queue of its cluster ── a worker runs the work, which takes the rows
//!    └──────────── the deadline, a cancellation or the end of the engine stops it until here
//! ```
//!
//! The work takes the rows when it is about to use them. Until then it holds nothing for which a peer could
//! wait.
//!
//! A call that a worker has begun ends when the last reference to its [`Execution`] is dropped. Whatever may touch its
//! memory has one. So the end is reported only when nothing touches that memory any more, even if the kernel keeps a
//! read beyond the deadline.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::clock::{Alarm, Alarmed};
use super::current_call::{watched, work_for};
use super::executor::{ExecutorHandle, Job, JobClass, JobKey};
use super::running_calls::{RunningCall, RunningCalls};
use crate::cache::{CallRows, OnReady, Pin, WaitingCall};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{PeerInfo, Stops, Transfer};
use crate::model::{ClusterId, Deadline};
use crate::resources::{OutgoingCall, Resources};
use crate::stats::Op;
use crate::sync::Mutex;

/// The work of a call, which a worker runs after the rows became free. Takes the rows ([`Execution::pin`]), moves bytes and returns their number.
pub(crate) type Work = Box<dyn FnOnce(&Arc<Execution>, Deadline) -> Result<u64> + Send>;

/// What a call is for.
#[derive(Debug)]
pub(crate) struct CallPurpose {
    /// As what it is counted, if it is.
    pub(crate) op: Option<Op>,
    /// The class of its job.
    pub(crate) class: JobClass,
    pub(crate) deadline: Deadline,
    /// Whether it calls that cluster. Set before the call waits for a row.
    pub(crate) outgoing: Option<OutgoingCall>,
    /// The peer that it calls, if it was linked when the call was started, for errors.
    pub(crate) peer: Option<Arc<PeerInfo>>,
    /// The address that it dials, for errors.
    pub(crate) dials: Option<Box<SocketAddr>>,
}

impl CallPurpose {
    pub(crate) fn new(op: Option<Op>, class: JobClass, deadline: Deadline) -> Self {
        CallPurpose { op, class, deadline, outgoing: None, peer: None, dials: None }
    }

    /// Has it count as a call to a peer until it has ended.
    pub(crate) fn outgoing(self, resources: &Resources) -> Self {
        CallPurpose { outgoing: Some(resources.outgoing_calls.begin()), ..self }
    }
}

/// What all asynchronous calls of an engine share.
pub(super) struct CallsOfEngine {
    pub(super) executor: ExecutorHandle,
    /// Weak, because a read that the kernel keeps must not keep the engine.
    pub(super) resources: Weak<Resources>,
    pub(super) running: Arc<RunningCalls>,
}

/// One asynchronous call that has not ended.
pub(super) struct AsyncCall {
    transfer: Arc<Transfer>,
    engine: Arc<CallsOfEngine>,
    purpose: CallPurpose,
    stage: Mutex<CallStage>,
}

/// A call is the largest of the objects of a transfer in flight (`serving_latency.py --only memory`).
#[cfg(not(any(loom, feature = "testing")))]
const _: () = assert!(size_of::<AsyncCall>() <= 256);

/// How far a call is.
#[derive(Default)]
struct CallStage {
    /// `None` once a worker has begun it, or once it was stopped.
    work: Option<Work>,
    /// Its entries in the queues of its rows. `None` before it has entered them, and whenever `work` is `None`.
    rows: Option<WaitingCall>,
    /// Whether it was handed to the workers.
    queued: bool,
    /// Its key among the jobs that wait for a worker.
    job: Option<JobKey>,
    alarm: Option<Alarm>,
}

impl CallsOfEngine {
    /// Counts a call, and ends its transfer.
    pub(super) fn ended(&self, transfer: &Arc<Transfer>, op: Option<Op>, outcome: Result<u64>) {
        let took = Duration::from_nanos(transfer.elapsed());
        // Before anybody learns of the end, and may look at the counters.
        if let Some(op) = op
            && let Some(resources) = self.resources.upgrade()
        {
            resources.stats.counted(op, took, outcome.is_ok());
        }
        transfer.finish(outcome);
    }
}

impl AsyncCall {
    /// Creates a call that waits for nothing yet.
    pub(super) fn new(
        transfer: &Arc<Transfer>,
        engine: &Arc<CallsOfEngine>,
        purpose: CallPurpose,
        work: Work,
    ) -> Arc<Self> {
        let call = Arc::new(AsyncCall {
            transfer: transfer.clone(),
            engine: engine.clone(),
            purpose,
            stage: Mutex::new(CallStage { work: Some(work), ..CallStage::default() }),
        });
        let stops: Weak<Self> = Arc::downgrade(&call);
        transfer.stop_with(stops);
        call
    }

    /// Enters the queues of its rows. The call may run, and end, before this returns.
    pub(super) fn wait_for(self: &Arc<Self>, rows: CallRows) -> Result<()> {
        let waiting = rows.enter(false, Some(self.clone()))?;
        let due = Instant::now() + self.purpose.deadline.left();
        let alarm = self.engine.executor.clock().at(due, self.clone())?;
        let mut stage = self.stage.lock();
        let stopped = stage.work.is_none();
        if !stopped {
            (stage.rows, stage.alarm) = (Some(waiting), Some(alarm));
            drop(stage);
            self.submit();
            if self.purpose.deadline.passed() {
                // The alarm may have come before there was anything to stop.
                self.late();
            }
            return Ok(());
        }
        drop(stage);
        // The engine has closed meanwhile.
        self.engine.executor.clock().forget(alarm);
        drop(waiting);
        Ok(())
    }

    /// Hands the call to the workers, once, if its rows are free.
    fn submit(self: &Arc<Self>) {
        let mut stage = self.stage.lock();
        if stage.queued || !stage.rows.as_ref().is_some_and(WaitingCall::is_ready) {
            return;
        }
        stage.queued = true;
        drop(stage);
        let job = self.engine.executor.submit(self.purpose.class, self.clone());
        let mut stage = self.stage.lock();
        if stage.work.is_some() {
            stage.job = job;
            return;
        }
        drop(stage);
        self.withdraw_job(job);
    }

    /// Ends the call with `error`, unless a worker has begun it.
    fn end_waiting(&self, error: Error) {
        let mut stage = self.stage.lock();
        let (work, rows, job) = (stage.work.take(), stage.rows.take(), stage.job.take());
        drop(stage);
        if work.is_none() {
            return;
        }
        self.withdraw_job(job);
        // Without a lock, because other calls may continue now.
        drop((work, rows));
        self.end(Err(self.named(error)));
    }

    /// Adds the peer of the call to an error.
    fn named(&self, mut error: Error) -> Error {
        if let (Some(_), JobClass::Calls(cluster)) = (&self.purpose.outgoing, self.purpose.class) {
            error = error.with("cluster", cluster);
        }
        if let Some(peer) = &self.purpose.peer {
            error = peer.named(error);
        }
        self.purpose.dials.iter().fold(error, |error, address| error.with("address", address))
    }

    fn forget_alarm(&self) {
        let alarm = self.stage.lock().alarm.take();
        if let Some(alarm) = alarm {
            self.engine.executor.clock().forget(alarm);
        }
    }

    fn withdraw_job(&self, job: Option<JobKey>) {
        if let Some(job) = job {
            drop(self.engine.executor.withdraw(self.purpose.class, job));
        }
    }

    /// Fails the call, whose deadline has passed, unless a worker has begun it.
    fn late(&self) {
        let stage = self.stage.lock();
        let Some(rows) = &stage.rows else { return };
        let doing = if rows.is_ready() {
            "waiting for a thread"
        } else {
            "waiting for blocks that another call uses"
        };
        let error = rows.named(self.purpose.deadline.error(doing));
        drop(stage);
        self.end_waiting(error);
    }

    /// Runs the work, unless the call was stopped.
    fn begin(self: Arc<Self>) {
        let mut stage = self.stage.lock();
        let (Some(work), Some(rows)) = (stage.work.take(), stage.rows.take()) else { return };
        drop(stage);
        self.forget_alarm();
        let execution = Arc::new(Execution {
            waiting: Mutex::new(Some(rows)),
            pin: OnceLock::new(),
            call: self.clone(),
            outcome: Mutex::default(),
        });
        let (_current, deadline) = execution.on_this_thread(self.purpose.deadline);
        let outcome = self.transfer.proceed().and_then(|()| work(&execution, deadline));
        *execution.outcome.lock() = Some(outcome);
    }

    /// Ends the call. Nothing of it may touch memory any more.
    fn end(&self, outcome: Result<u64>) {
        self.forget_alarm();
        self.engine.ended(&self.transfer, self.purpose.op, outcome);
        self.engine.running.leave(&self.transfer);
    }
}

impl RunningCall for AsyncCall {
    fn close(&self) {
        self.transfer.close();
    }

    fn transfer_with(&self, cluster: ClusterId) -> Option<&Arc<Transfer>> {
        let uses = match self.purpose.class {
            JobClass::Calls(of) => of == cluster,
            JobClass::SeveralClusters => true,
            _ => false,
        };
        uses.then_some(&self.transfer)
    }
}

impl Stops for AsyncCall {
    fn stop(&self, why: Error) {
        self.end_waiting(why);
    }
}

/// Its rows are free.
impl OnReady for AsyncCall {
    fn ready(self: Arc<Self>) {
        self.submit();
    }
}

/// A worker is free for it.
impl Job for AsyncCall {
    fn run(self: Arc<Self>) {
        self.begin();
    }

    fn refused(self: Arc<Self>, why: Error) {
        self.end_waiting(why);
    }
}

/// Its deadline has passed.
impl Alarmed for AsyncCall {
    fn due(self: Arc<Self>) {
        self.late();
    }
}

/// A call that a worker has begun, for everything that touches its memory. The last reference ends the call.
pub(crate) struct Execution {
    /// The entries in the queues of its rows, until it takes the rows.
    waiting: Mutex<Option<WaitingCall>>,
    pin: OnceLock<Pin>,
    call: Arc<AsyncCall>,
    /// `None` if the work panicked.
    outcome: Mutex<Option<Result<u64>>>,
}

impl Execution {
    /// Returns the record of the call.
    pub(crate) fn transfer(&self) -> &Transfer {
        &self.call.transfer
    }

    /// Takes the rows of the call, unless it has them. Another call may have passed this one, so it may have to wait.
    pub(crate) fn pin(&self, deadline: Deadline) -> Result<()> {
        let waiting = self.waiting.lock().take();
        if let Some(waiting) = waiting {
            // Set once, because the entries are taken once.
            let _ = self.pin.set(waiting.pin(deadline)?);
        }
        Ok(())
    }

    /// Marks this thread as working for the call until the guard is dropped. The waits of the deadline then end early once the
    /// transfer is stopped.
    pub(crate) fn on_this_thread(&self, deadline: Deadline) -> (impl Drop + use<>, Deadline) {
        (work_for(&self.call.transfer), watched(deadline))
    }
}

impl Drop for Execution {
    fn drop(&mut self) {
        drop(self.waiting.lock().take());
        // The calls that wait for the rows are notified after the end of this one was reported. So the event of a call that
        // waited comes after this one. A call that starts now finds the rows free and may be reported first. The rows are
        // released before the report nevertheless, because a program that learns of the end may release the cache and
        // allocate its memory again.
        let _ready = self.pin.take().map(Pin::release);
        let text = "the thread of a transfer ended without a result";
        let missing = || Err(Error::new(ErrorKind::System, text));
        self.call.end(self.outcome.lock().take().unwrap_or_else(missing));
    }
}
