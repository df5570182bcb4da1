//! One request of a peer that is being answered: what all requests need, whatever they ask for.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::Link;
use super::message_io::{send_message, send_message_before};
use crate::budget::BudgetShare;
use crate::cache::{Cache, CallRows, Pin, RowUse, rows_of_a_pin};
use crate::copy::PathJob;
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::model::{Deadline, Geometry, Name, RowList, Words};
use crate::net::Stream;
use crate::plan::{CopyPlan, Side};
use crate::protocol::{self, NamedCache, Reply, WirePlan};
use crate::resources::Resources;
use crate::validate;

/// How a request ended without success.
pub(super) enum RequestFailure {
    /// The peer received the error; the stream remains usable.
    Refused,
    /// The request ended the link.
    Unlinked,
    /// The stream stopped in the middle of a message or payload and is unusable.
    Broken(Error),
}

/// One request that is being answered.
pub(super) struct RequestContext<'a> {
    pub(super) resources: &'a Resources,
    pub(super) link: &'a Arc<Link>,
    pub(super) stream: &'a Stream,
    /// The memory that the request takes.
    pub(super) share: Arc<BudgetShare>,
    /// When the caller gives up, by the clock of this side.
    pub(super) deadline: Deadline,
    pub(super) unlinked: &'a dyn Fn(),
    /// When this thread last began to send a reply, if it did. The request is not older.
    pub(super) replied: &'a Cell<Option<Instant>>,
}

/// Maximum time since the last reply for which a request through rings skips the system call that finds a killed caller.
const RECENT: Duration = Duration::from_micros(200);

impl RequestContext<'_> {
    /// Returns what a path needs to move the bytes of `plan` for this request.
    pub(super) fn job<'a>(&'a self, plan: &'a CopyPlan) -> PathJob<'a> {
        PathJob { copy_engine: &self.resources.copy_engine, plan, deadline: self.deadline }
    }

    /// Runs `call`, and sends its reply or its error. What `call` contains is freed before the reply is sent.
    pub(super) fn answer_with(&self, call: impl FnOnce() -> Result<Reply>) -> Result<(), RequestFailure> {
        // The peer may read its reply slowly, so only the frame stays in memory.
        let (before, frame) =
            (self.share.used(), self.share.charged(|| call().and_then(|reply| protocol::encode(&reply))));
        match frame {
            Ok(frame) => {
                self.share.shrink_to(before + frame.capacity() as u64);
                self.replied.set(Some(Instant::now()));
                self.stream.send(&frame, self.deadline).map_err(RequestFailure::Broken)
            }
            Err(error) => {
                self.share.shrink_to(before);
                self.reply(&Reply::failed(&error))?;
                Err(RequestFailure::Refused)
            }
        }
    }

    /// Sends a short reply.
    pub(super) fn reply(&self, reply: &Reply) -> Result<(), RequestFailure> {
        self.replied.set(Some(Instant::now()));
        send_message(self.stream, reply, self.deadline).map_err(RequestFailure::Broken)
    }

    /// Runs `work`, and charges what it allocates to the request. What it does not need afterwards returns to the budget.
    pub(super) fn charged<T>(&self, work: impl FnOnce() -> T) -> T {
        let result = self.share.charged(work);
        self.share.trim();
        result
    }

    /// Returns `Err` with `NotLinked` if the caller is gone. A request that is read late, because this
    /// process was stopped, must not be executed any more (`tests/test_peer_faults.py`).
    pub(super) fn still_wanted(&self) -> Result<()> {
        let gone = if self.is_recent() { self.stream.peer_closed_rings() } else { self.stream.abandoned() };
        if gone || !self.link.alive() {
            return Err(Error::new(ErrorKind::NotLinked, "the caller has given up"));
        }
        Ok(())
    }

    /// Whether this side replied so recently, on a stream with rings, that it checks only the shared memory, which takes no
    /// system call. It then misses only a caller that was killed.
    fn is_recent(&self) -> bool {
        self.stream.has_rings() && self.replied.get().is_some_and(|at| at.elapsed() < RECENT)
    }

    /// Returns the cache of a request, or `None` if its name no longer resolves to that cache. Returns `Err`
    /// with `InvalidArgument` if peers may not access it, and with `GrantEnded` if its name is a grant that has ended.
    fn opened(&self, named: &NamedCache) -> Result<Option<Arc<Cache>>> {
        let found = match self.resources.resolve(named.name) {
            Err(error) if error.kind() == ErrorKind::CacheNotFound => return Ok(None),
            found => found?,
        };
        let Some(cache) = Some(found.cache).filter(|cache| cache.id() == named.id) else { return Ok(None) };
        // The text goes to the peer, whose caller the owner does not know.
        validate::check_accessible(Words::ORIGINAL, "the remote cache", cache.remote_accessible())?;
        Ok(Some(cache))
    }

    /// Returns the cache of a request, pinned by `check_and_pin`, which checks the plan first. Returns `None` if the
    /// name no longer resolves to that cache.
    pub(super) fn pinned(
        &self,
        named: &NamedCache,
        check_and_pin: impl FnOnce(&Arc<Cache>) -> Result<Pin>,
    ) -> Result<Option<(Arc<Cache>, Pin)>> {
        self.still_wanted()?;
        let Some(cache) = self.opened(named)? else { return Ok(None) };
        let pin = match check_and_pin(&cache) {
            // The cache was freed meanwhile, and another one may have its name.
            Err(error) if error.kind() == ErrorKind::CacheNotFound => return Ok(None),
            pin => pin?,
        };
        // A caller that has given up may repeat the write on another stream. If this side sees here that the stream has ended, it
        // refuses the request. Otherwise the repeated write waits for these rows, and so writes last
        // (`test_repeated_write_is_the_last_one`). Over TCP, this side may see the end late.
        if pin.waited() || pin.may_write() || !self.link.alive() {
            self.still_wanted()?;
        }
        // While `check_and_pin` ran, the cache may have been released, so it is looked up again.
        Ok(self.opened(named)?.map(|cache| (cache, pin)))
    }

    /// Takes rows for a request. While this engine calls peers, the request passes calls that only wait. Returns
    /// `Err(InvalidArgument)` for a write under a grant.
    pub(super) fn pin(&self, cache: &Arc<Cache>, rows: RowUse, named: &NamedCache) -> Result<Pin> {
        let written = !rows.writes.is_empty() && matches!(named.name, Name::Grant(_));
        ensure(!written, || Error::invalid("a push takes no grant"))?;
        // This may wait as long as `llm.LinkPinLimit`. Meanwhile the request keeps only what it has allocated.
        self.share.trim();
        CallRows::of(cache.clone(), rows).pin_for_peer(self.deadline, || self.resources.outgoing_calls.any())
    }

    /// Sends `Ready` and returns `begun`, or sends the reason for a refusal and returns `None`. If `payload_follows`, `Ready` is
    /// sent together with the bytes that follow it, which saves a packet when they are few.
    pub(super) fn reply_ready<T>(
        &self,
        begun: Result<Option<T>>,
        bytes: u64,
        payload_follows: bool,
    ) -> Result<Option<T>, RequestFailure> {
        let reply = match begun {
            Ok(Some(begun)) => {
                let ready = Reply::Ready { bytes };
                self.replied.set(Some(Instant::now()));
                let sent = if payload_follows {
                    send_message_before(self.stream, &ready, self.deadline)
                } else {
                    send_message(self.stream, &ready, self.deadline)
                };
                return sent.map(|()| Some(begun)).map_err(RequestFailure::Broken);
            }
            Ok(None) => Reply::Stale,
            Err(error) => Reply::failed(&error),
        };
        self.reply(&reply)?;
        Ok(None)
    }
}

/// Returns the deadline of a caller by this side's clock. It is at most `most`, the pin limit, from now, so that
/// no caller keeps rows pinned for longer.
pub(super) fn deadline_of(limit_ms: u64, most: Duration) -> Deadline {
    let asked = Duration::from_millis(limit_ms);
    let name = if asked > most { "the pin limit" } else { "the rest of the caller's time limit" };
    Deadline::after(asked.min(most)).named(name)
}

/// Returns the rows of `cache` to pin for one side of a plan: one for each pin, because rows may share a pin.
pub(super) fn rows(cache: &Cache, plan: &CopyPlan, side: Side) -> Result<RowList> {
    let together = rows_of_a_pin(cache);
    let mut rows = plan.touched_rows(side, cache.geometry().row_sizes().grouped(together))?;
    for row in &mut rows {
        *row *= together;
    }
    Ok(rows.into())
}

/// Checks a plan from a peer, and that the bytes `range` lie within it.
pub(super) fn bounded(plan: WirePlan, range: &Range<u64>) -> Result<CopyPlan> {
    let plan = CopyPlan::try_from(plan)?;
    let Range { start: from, end: to } = *range;
    if from <= to && to <= plan.bytes() {
        return Ok(plan);
    }
    let allowed = format!("within the {} bytes of the plan", plan.bytes());
    Err(Error::argument("the range of a transfer", format_args!("{from} to {to}"), allowed))
}

/// Checks that one side of a plan from a peer stays inside the rows of a cache of this engine.
pub(super) fn check_plan(plan: &CopyPlan, side: Side, geometry: Geometry) -> Result<()> {
    plan.check_bounds(side, (geometry.num_tensors(), geometry.tensor_bytes()))?;
    plan.check_rows(side, geometry.row_sizes())
}
