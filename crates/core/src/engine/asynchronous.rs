//! Asynchronous calls: the same arguments, checks and results as their synchronous twins, without waiting.
//!
//! A call checks its arguments and enters the queues of its rows before it returns. A lane does the rest, and the
//! outcome is an event.

use std::sync::Arc;
use std::time::Duration;

use super::call_extras::CallExtras;
use super::{DataDist, End, RemoteName};
use crate::cache::{Cache, CallRows, RowUse};
use crate::copy::Staging;
use crate::error::Result;
use crate::events::{Event, EventQueue, Transfer};
use crate::model::{Deadline, Placement, SubRow};
use crate::stats::Op;
use crate::transfer::{Call, CallPurpose, Execution, LaneKey, LocalCopy, LocalMoves, Work};
use crate::validate::{self, CopyArgs, Layers, PullRows, PushRows};

/// How an asynchronous call differs from its synchronous twin.
#[derive(Clone, Debug, Default)]
pub struct CallOptions {
    /// Its time limit; `sync_kv_timeout` if there is none.
    pub limit: Option<Duration>,
    /// What else it does.
    pub extras: CallExtras,
    /// Whether the end of a group is no event, because its caller waits for it.
    pub quiet: bool,
}

impl From<Option<Duration>> for CallOptions {
    fn from(limit: Option<Duration>) -> Self {
        CallOptions { limit, ..CallOptions::default() }
    }
}

impl DataDist {
    /// Starts a [`pull`](Self::pull), which ends within the limit of `options`.
    ///
    /// Returns `Err` for what the arguments and the local cache decide, and `Err(Busy)` if too many transfers run or
    /// wait for their outcome to be taken. The [`Transfer`] has the outcome, and [`poll`](Self::poll) returns it.
    pub fn pull_async(
        &self,
        from: RemoteName,
        to: &End,
        rows: PullRows,
        layers: Layers,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        let CallOptions { limit, extras, .. } = options.into();
        let deadline = self.limited(limit);
        let (local, checked) = self.checked_pull(from, to, rows, layers, extras.raw_layout)?;
        let writes = checked.rows().local_rows()?;
        let used = CallRows::of(local.clone(), RowUse { writes, ..RowUse::default() });
        let verify = self.verify(&extras);
        let (notify, grant) = extras.checked()?;
        let (resources, link) = (self.resources.clone(), self.links.finder().for_later(from.cluster));
        let work = move |execution: &Arc<Execution>, deadline: Deadline| {
            let link = link.find(deadline)?;
            let (name, execution, to_the_end) = (from.name, Some(execution.clone()), true);
            Call { resources, link, name, local, deadline, execution, to_the_end, notify, grant, verify }
                .pull_rows(&checked)
        };
        let purpose = self.outgoing(Op::Pull, LaneKey::Calls(from.cluster), deadline);
        self.start(purpose, used, Box::new(work))
    }

    /// Starts a [`push`](Self::push); otherwise like [`pull_async`](Self::pull_async).
    pub fn push_async(
        &self,
        from: &End,
        to: RemoteName,
        rows: PushRows,
        layers: Layers,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        let CallOptions { limit, extras, .. } = options.into();
        let deadline = self.limited(limit);
        let (local, checked) = self.checked_push(from, to, rows, layers, extras.raw_layout)?;
        let reads = checked.rows().local_rows()?;
        let used = CallRows::of(local.clone(), RowUse { reads, ..RowUse::default() });
        let verify = self.verify(&extras);
        let notify = extras.checked_of_push()?;
        let (resources, link) = (self.resources.clone(), self.links.finder().for_later(to.cluster));
        let work = move |execution: &Arc<Execution>, deadline: Deadline| {
            let link = link.find(deadline)?;
            // The end of an asynchronous call says that nobody reads its rows any more.
            let (execution, to_the_end) = (Some(execution.clone()), true);
            let (name, grant) = (to.name.without_slot().0, None);
            Call { resources, link, name, local, deadline, execution, to_the_end, notify, grant, verify }
                .push_rows(to.name, &checked)
        };
        let purpose = self.outgoing(Op::Push, LaneKey::Calls(to.cluster), deadline);
        self.start(purpose, used, Box::new(work))
    }

    /// Starts a [`copy_cache`](Self::copy_cache); otherwise like [`pull_async`](Self::pull_async).
    pub fn copy_cache_async(
        &self,
        dst: &End,
        src: &End,
        args: CopyArgs,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(limit);
        let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
        let moves = LocalMoves::of_slots(&src, &dst, args, validate::copy_cache)?;
        super::rows_alike(&src, &dst)?;
        self.start_copy(Op::CopyCache, (src, dst), moves, Staging::DEFAULT, deadline)
    }

    /// Starts a [`copy_blocks`](Self::copy_blocks); otherwise like [`pull_async`](Self::pull_async).
    pub fn copy_blocks_async(
        &self,
        cache: &End,
        pairs: &[(i64, i64)],
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        self.copy_sub_rows_async(cache, pairs, SubRow::default(), limit)
    }

    /// Starts a [`copy_sub_rows`](Self::copy_sub_rows); otherwise like [`pull_async`](Self::pull_async).
    pub fn copy_sub_rows_async(
        &self,
        cache: &End,
        pairs: &[(i64, i64)],
        part: SubRow,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(limit);
        let (cache, moves) = self.checked_copy_blocks(cache, pairs, part)?;
        self.start_copy(Op::CopyBlocks, (cache.clone(), cache), moves, Staging::DEFAULT, deadline)
    }

    /// Starts a [`swap_blocks`](Self::swap_blocks); otherwise like [`pull_async`](Self::pull_async).
    pub fn swap_blocks_async(
        &self,
        src: &End,
        dst: &End,
        pairs: &[(i64, i64)],
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        self.swap_sub_rows_async((src, dst), pairs, SubRow::default(), limit)
    }

    /// Starts a [`swap_sub_rows`](Self::swap_sub_rows) from the first end to the second; otherwise like
    /// [`pull_async`](Self::pull_async).
    pub fn swap_sub_rows_async(
        &self,
        (src, dst): (&End, &End),
        pairs: &[(i64, i64)],
        part: SubRow,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(limit);
        let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
        let (moves, staging) = self.checked_swap((&src, &dst), pairs, part)?;
        let op = if src.placement() == Placement::Host { Op::SwapIn } else { Op::SwapOut };
        self.start_copy(op, (src, dst), moves, staging, deadline)
    }

    /// Returns at most `most` outcomes of transfers that nobody has taken yet, in the order in which they ended, and
    /// removes them from the queue. Never waits.
    pub fn poll(&self, most: usize) -> Result<Vec<Event>> {
        self.calls.queue().poll(most)
    }

    /// Returns the queue of events.
    pub fn events(&self) -> &Arc<EventQueue> {
        self.calls.queue()
    }

    /// Waits until no asynchronous call runs. Returns `false` once `limit` has passed, and `Err` only if interrupted.
    pub fn drain(&self, limit: Duration) -> Result<bool> {
        self.calls.drain(Deadline::after(limit).named("timeout_ms").watched(self.interrupted))
    }

    /// Ends all asynchronous calls with an error of kind `Closed` and refuses new ones, because the engine is about to
    /// be dropped. Other threads may still be in calls of the engine.
    pub fn end_transfers(&self) {
        self.calls.close();
    }

    pub(super) fn start_copy(
        &self,
        op: Op,
        (src, dst): (Arc<Cache>, Arc<Cache>),
        moves: impl Into<LocalMoves>,
        staging: Staging,
        deadline: Deadline,
    ) -> Result<Arc<Transfer>> {
        let mut moves = moves.into();
        let (reads, writes) = moves.take_rows();
        let used = CallRows::copy((src.clone(), reads), (dst.clone(), writes));
        let copy = LocalCopy { resources: self.resources.clone(), op, src, dst, staging };
        let work = move |execution: &Arc<Execution>, deadline| copy.execute(moves, execution, deadline);
        let lanes = LaneKey::Calls(self.resources.config.cluster);
        let purpose = CallPurpose { op, lanes, deadline, outgoing: None, dials: None, event: true };
        self.start(purpose, used, Box::new(work))
    }

    pub(super) fn start(&self, purpose: CallPurpose, rows: CallRows, work: Work) -> Result<Arc<Transfer>> {
        self.calls.start(purpose, rows, work)
    }

    /// Returns the purpose of a call to a peer.
    pub(super) fn outgoing(&self, op: Op, lanes: LaneKey, deadline: Deadline) -> CallPurpose {
        let outgoing = Some(self.resources.outgoing_calls.begin());
        CallPurpose { op, lanes, deadline, outgoing, dials: None, event: true }
    }

    /// Returns the deadline of a call with its own limit.
    pub(super) fn limited(&self, limit: Option<Duration>) -> Deadline {
        match limit {
            Some(limit) => Deadline::after(limit).named("timeout_ms"),
            None => Deadline::after(self.resources.config.sync_timeout),
        }
    }
}
