//! One call that moves bytes. A method of [`DataDist`] checks its arguments. Then it runs on the calling thread
//! ([`Operation::run`]) or on the threads of the engine ([`Operation::start`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DataDist;
use crate::cache::CallRows;
use crate::error::Result;
use crate::events::Transfer;
use crate::model::Deadline;
use crate::stats::Op;
use crate::transfer::{CallPurpose, Execution, JobClass, LocalCopy, PeerTransfer, Work, used_rows};

/// One call that moves bytes and has not begun. Its arguments and the local caches are checked. If a check failed,
/// [`run`](Self::run) and [`start`](Self::start) return its error.
#[must_use = "an operation does nothing until it runs or starts"]
pub struct Operation<'a> {
    engine: &'a DataDist,
    op: Op,
    started: Instant,
    limit: Option<Duration>,
    prepared: Result<Prepared>,
}

/// A call whose arguments and local caches were checked.
pub(super) enum Prepared {
    /// Within this engine.
    Copy(LocalCopy),
    /// With one peer.
    Transfer(PeerTransfer),
}

impl<'a> Operation<'a> {
    /// Checks a call with `prepare`.
    pub(super) fn new(engine: &'a DataDist, op: Op, prepare: impl FnOnce() -> Result<Prepared>) -> Self {
        let started = Instant::now();
        Operation { engine, op, started, limit: None, prepared: prepare() }
    }

    /// Ends the call within `limit`; within `sync_kv_timeout` if there is none.
    pub fn within(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.limit = limit.into();
        self
    }

    /// Moves the bytes on the calling thread, and returns once they are in place.
    pub fn run(self) -> Result<()> {
        let Operation { engine, op, started, limit, prepared } = self;
        let deadline = engine.deadline_since(started, limit);
        let _here = engine.resources.engine.on_this_thread();
        let moved = match prepared {
            Ok(Prepared::Copy(copy)) => copy.run(&engine.resources, None, deadline),
            Ok(Prepared::Transfer(transfer)) => transfer.run(engine.resources.clone(), None, deadline),
            Err(error) => Err(error),
        };
        engine.resources.stats.counted(op, started.elapsed(), moved.is_ok());
        moved.map(drop)
    }

    /// Returns without waiting: before the bytes move, or once they are in place if they are few and neither a peer nor another
    /// call has to be waited for. Calls that meet in a row take turns in the order in which they were started.
    ///
    /// Returns `Err` for what the arguments and the local caches decide, and `Err(Busy)` if too many transfers run or
    /// wait for their outcome to be taken. The [`Transfer`] has the outcome, and [`poll`](DataDist::poll) returns it.
    pub fn start(self) -> Result<Arc<Transfer>> {
        let Operation { engine, op, started, limit, prepared } = self;
        let deadline = engine.limited(started, limit);
        let _here = engine.resources.engine.on_this_thread();
        prepared?.start(engine, op, deadline)
    }
}

impl Prepared {
    /// Starts the call. A short one that need not wait has ended when it is returned.
    fn start(self, engine: &DataDist, op: Op, deadline: Deadline) -> Result<Arc<Transfer>> {
        let (resources, begun) = (engine.resources.clone(), engine.calls.begin()?);
        match self {
            Prepared::Copy(mut copy) => {
                let own = resources.config.cluster;
                let begun = match begun.run_now(op, own, |_| copy.run_now(&resources, deadline)) {
                    Ok(ended) => return Ok(ended),
                    Err(begun) => begun,
                };
                let rows = copy.take_rows();
                let work: Work = Box::new(move |execution: &Arc<Execution>, deadline| {
                    copy.run(&resources, Some(execution.as_ref()), deadline)
                });
                begun.start(CallPurpose::new(Some(op), engine.own_class(), deadline), rows, work)
            }
            Prepared::Transfer(transfer) => {
                let cluster = transfer.link.cluster();
                let begun = match begun.run_now(op, cluster, |_| transfer.run_now(&resources, deadline)) {
                    Ok(ended) => return Ok(ended),
                    Err(begun) => begun,
                };
                let rows = CallRows::of(transfer.local.clone(), used_rows(&transfer.checked)?);
                let purpose = CallPurpose::new(Some(op), JobClass::Calls(cluster), deadline);
                let purpose =
                    CallPurpose { peer: transfer.link.peer().cloned(), ..purpose.outgoing(&resources) };
                let work: Work = Box::new(move |execution: &Arc<Execution>, deadline| {
                    transfer.run(resources, Some(execution.clone()), deadline)
                });
                begun.start(purpose, rows, work)
            }
        }
    }
}
