//! One call that moves bytes. A method of [`DataDist`] checks its arguments. Then it runs on the calling thread
//! ([`Operation::run`]) or on the threads of the engine ([`Operation::start`]).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::DataDist;
use crate::cache::CallRows;
use crate::error::{Error, Result};
use crate::events::Transfer;
use crate::model::Deadline;
use crate::stats::Op;
use crate::transfer::{
    AsyncWork, CallPurpose, Execution, JobClass, LocalCopy, PeerTransfer, Work, used_rows,
};

/// One call that moves bytes and has not begun. Its arguments and the local caches are checked. If a check failed,
/// [`run`](Self::run) and [`start`](Self::start) return its error.
#[must_use = "an operation does nothing until it runs or starts"]
pub struct Operation<'a> {
    engine: &'a DataDist,
    op: Op,
    started: Instant,
    limit: Option<Duration>,
    /// A fact of every error with which the call does not run or start.
    fact: Option<(&'static str, u64)>,
    prepared: Result<Prepared>,
}

/// A call whose arguments and local caches were checked.
pub(super) enum Prepared {
    /// Within this engine.
    Copy(LocalCopy),
    /// With one peer.
    Transfer(PeerTransfer),
    /// Several transfers, which run on a thread of the engine, or why they were refused.
    Group(Result<AsyncWork>),
    /// Several copies within this engine, which run on one of its threads, or why they were refused.
    Copies(Result<AsyncWork>),
}

impl<'a> Operation<'a> {
    /// Checks a call with `prepare`.
    pub(super) fn new(engine: &'a DataDist, op: Op, prepare: impl FnOnce() -> Result<Prepared>) -> Self {
        let started = Instant::now();
        Operation { engine, op, started, limit: None, fact: None, prepared: prepare() }
    }

    /// Ends the call within `limit`; within `sync_kv_timeout` if there is none.
    pub fn within(mut self, limit: impl Into<Option<Duration>>) -> Self {
        self.limit = limit.into();
        self
    }

    /// Adds a fact to the error that [`run`](Self::run) or [`start`](Self::start) returns, if there is a value.
    pub fn with(mut self, name: &'static str, value: impl Into<Option<u64>>) -> Self {
        self.fact = value.into().map(|value| (name, value));
        self
    }

    /// Moves the bytes, and returns once they are in place. A group runs on a thread of the engine meanwhile, and an
    /// interruption cancels it. Returns `Err(Busy)` for a group if too many transfers run or wait for their outcome to be taken.
    pub fn run(self) -> Result<()> {
        let Operation { engine, op, started, limit, fact, prepared } = self;
        let deadline = engine.deadline_since(started, limit);
        let moved = match prepared {
            Ok(Prepared::Copy(copy)) => copy.run(&engine.resources, None, deadline),
            Ok(Prepared::Transfer(transfer)) => engine
                .links
                .find_other(transfer.cluster, deadline)
                .and_then(|link| transfer.run(engine.resources.clone(), link, None, deadline)),
            // A group is counted when it ends. One that is refused or does not start is not counted.
            Ok(group) => {
                let forever = Deadline::after(Duration::MAX).watched(engine.interrupted);
                let begun = group.start(engine, op, engine.limited(started, limit), false);
                let ended = begun.and_then(|group| group.join(forever));
                return ended.map_err(|error| with_fact(error, fact));
            }
            Err(error) => Err(error),
        };
        engine.resources.stats.counted(op, started.elapsed(), moved.is_ok());
        moved.map(drop).map_err(|error| with_fact(error, fact))
    }

    /// Returns without waiting: before the bytes move, or once they are in place if they are few and neither a peer nor another
    /// call has to be waited for. Calls that meet in a row take turns in the order in which they were started.
    ///
    /// Returns `Err` for what the arguments and the local caches decide, and `Err(Busy)` if too many transfers run or
    /// wait for their outcome to be taken. The [`Transfer`] has the outcome, and [`poll`](DataDist::poll) returns it.
    pub fn start(self) -> Result<Arc<Transfer>> {
        let Operation { engine, op, started, limit, fact, prepared } = self;
        let deadline = engine.limited(started, limit);
        let transfer = prepared.and_then(|prepared| prepared.start(engine, op, deadline, true));
        transfer.map_err(|error| with_fact(error, fact))
    }
}

impl Prepared {
    /// Starts the call, whose end is an event if `event` is set. A short one that need not wait has ended when it is returned.
    fn start(self, engine: &DataDist, op: Op, deadline: Deadline, event: bool) -> Result<Arc<Transfer>> {
        let resources = engine.resources.clone();
        let own = resources.config.cluster;
        match self {
            Prepared::Copy(mut copy) => {
                let begun = engine.calls.begin(event)?;
                let begun = match begun.run_now(op, own, || copy.run_now(&resources, deadline)) {
                    Ok(ended) => return Ok(ended),
                    Err(begun) => begun,
                };
                let rows = copy.take_rows();
                let work: Work = Box::new(move |execution: &Arc<Execution>, deadline| {
                    copy.run(&resources, Some(execution.as_ref()), deadline)
                });
                begun.start(purpose(op, JobClass::Calls(own), deadline, event), rows, work)
            }
            Prepared::Transfer(transfer) => {
                let (begun, cluster) = (engine.calls.begin(event)?, transfer.cluster);
                let link = engine.links.finder().for_later(cluster);
                let now = || transfer.run_now(&resources, link.known()?, deadline);
                let begun = match begun.run_now(op, cluster, now) {
                    Ok(ended) => return Ok(ended),
                    Err(begun) => begun,
                };
                let rows = CallRows::of(transfer.local.clone(), used_rows(&transfer.checked)?);
                let outgoing = Some(resources.outgoing_calls.begin());
                let work: Work = Box::new(move |execution: &Arc<Execution>, deadline| {
                    let link = link.find(deadline)?;
                    transfer.run(resources, link, Some(execution.clone()), deadline)
                });
                let purpose = purpose(op, JobClass::Calls(cluster), deadline, event);
                begun.start(CallPurpose { outgoing, ..purpose }, rows, work)
            }
            Prepared::Group(group) => {
                let AsyncWork { class, rows, work } = group?;
                let outgoing = Some(resources.outgoing_calls.begin());
                let purpose = CallPurpose { outgoing, ..purpose(op, class, deadline, event) };
                engine.calls.start(purpose, rows, work)
            }
            Prepared::Copies(copies) => {
                let AsyncWork { class, rows, work } = copies?;
                engine.calls.start(purpose(op, class, deadline, event), rows, work)
            }
        }
    }
}

fn purpose(op: Op, class: JobClass, deadline: Deadline, event: bool) -> CallPurpose {
    CallPurpose { op: Some(op), class, deadline, outgoing: None, dials: None, event }
}

fn with_fact(error: Error, fact: Option<(&'static str, u64)>) -> Error {
    fact.into_iter().fold(error, |error, (name, value)| error.with(name, value))
}
