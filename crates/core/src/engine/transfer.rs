//! Pull and push.
//!
//! Both resolve their two ends, check, plan, and let the side that receives read: from memory it can see of the other,
//! else through a socket. What is known of a far cache may be out of date; then its owner says so, or its generation
//! does, and the call starts over within its deadline. Not for: links (`remote`), or moving bytes (`engine`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::streams::{self, Streams};
use super::{DataDist, End, STAGED};
use crate::cache::{Cache, Pin, pin_reads, pin_writes};
use crate::cluster::Cluster;
use crate::config::Mode;
use crate::copy::{Progress, STILL_READING, arrived};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{CacheId, ClusterId, Deadline};
use crate::model::{CacheKey, Name};
use crate::plan::CopyPlan;
use crate::protocol::{Reply, Request, WirePlan};
use crate::session::{self, Known, Link, SAID_BY, limit_ms, location};
use crate::stats::Op;
use crate::validate::{self, ExtParam, Far, Layers, Moves, PullRows, PushRows};

/// How often a call starts over because the far cache changed under it; each time costs a request and the deadline goes
/// on.
const MOST_ROUNDS: usize = 8;
/// A cache of a peer: whose, and which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FarName {
    /// Who owns it.
    pub cluster: ClusterId,
    /// What it is called there.
    pub name: Name,
}

/// The seed's `CacheIndex`: one batch slot of a peer's cache (seed `PushKvCache.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheIndex {
    /// Who owns it.
    pub cluster: ClusterId,
    /// Its id there.
    pub cache: CacheId,
    /// The batch slot.
    pub row: u32,
}

impl DataDist {
    /// Brings rows of a peer's cache here (contract §7.12, §7.13). An error says what arrived.
    pub fn pull(&self, from: FarName, to: &End, rows: &PullRows, layers: Layers) -> Result<()> {
        self.cluster.stats.timed(Op::Pull, || {
            let deadline = self.deadline();
            let near = self.near(from.cluster, to)?;
            super::room_for_lists(pulled_blocks(rows))?;
            validate::pull_near(near.side(), rows, layers)?;
            let link = self.links.find_other(from.cluster, deadline)?;
            let call = Call { cluster: &self.cluster, link, name: from.name, near, deadline };
            let bytes = call.counted(|| {
                call.rounds(|known| {
                    let mut moves = validate::pull(call.near.side(), known.far, rows, layers)?;
                    call.bring(known, &mut moves)
                })
            })?;
            self.cluster.stats.travelled(Op::Pull, bytes);
            self.cluster.merger.moved(bytes);
            Ok(())
        })
    }

    /// Brings rows of a cache of this engine to a peer's (contract §7.14, §7.15): they are in place there when this
    /// returns. All layers are one submission under one deadline. An error says how far it got.
    pub fn push(&self, from: &End, to: FarName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.cluster.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            let near = self.near(to.cluster, from)?;
            super::room_for_lists(pushed_blocks(rows))?;
            validate::push_near(near.side(), rows, layers)?;
            let link = self.links.find_other(to.cluster, deadline)?;
            // The slot is an argument here, not part of the name: one that is not there is a wrong argument (§7.14).
            let (name, row) = match to.name {
                Name::Row { cache, row } => (Name::Row { cache, row: 0 }, Some(row)),
                name @ Name::Key(_) => (name, None),
            };
            let call = Call { cluster: &self.cluster, link, name, near, deadline };
            let bytes = call.counted(|| {
                call.rounds(|known| {
                    let far = Far { row: row.unwrap_or(known.far.row), ..known.far };
                    let mut moves = validate::push(call.near.side(), far, rows, layers)?;
                    let near_rows = std::mem::take(&mut moves.near_rows);
                    let plan = Arc::new(CopyPlan::moves(&mut moves)?);
                    let outcome = call.take(known, &plan, near_rows)?;
                    if let (PushRows::Slot { near: row }, Moved::Bytes(1..), true) =
                        (rows, &outcome, moves.whole)
                    {
                        // Seed `deprecated.md`: a push ends the reference by key as a pull does (contract §17,
                        // further rulings).
                        self.cluster.table.release_row(call.near.id(), *row);
                    }
                    Ok(outcome)
                })
            })?;
            self.cluster.stats.travelled(Op::Push, bytes);
            self.cluster.merger.moved(bytes);
            Ok(())
        })
    }

    /// The seed's `PushKvCache`: not the decoder role, only whole slots, layer ranges with both ends inclusive.
    pub fn push_kv_cache(
        &self,
        src: CacheId,
        dst: CacheIndex,
        src_batch_index: u32,
        size: i64,
        ext: ExtParam,
    ) -> Result<()> {
        validate::push_kv_alone("PushKvCache", self.pushing_role(), size, ext)?;
        self.other(dst.cluster)?;
        let near = self.cluster.table.find(src)?;
        let layers = validate::push_kv_cache(self.pushing_role(), near.side(), size, ext)?;
        self.push(&End::Managed(src), dst.name(), &PushRows::Slot { near: src_batch_index }, layers)
    }

    /// The cache of this engine at one end of a transfer with `cluster`.
    fn near(&self, cluster: ClusterId, end: &End) -> Result<Arc<Cache>> {
        self.other(cluster)?;
        self.source(end)
    }

    /// `cluster` must not be this engine. Without the cache manager another may go by the same id: there the link says
    /// who it is.
    pub(super) fn other(&self, cluster: ClusterId) -> Result<()> {
        if self.links.goes_by(cluster) && self.cluster.config.mode == Mode::CacheManager {
            return Err(session::own(cluster));
        }
        Ok(())
    }

    /// A cache of this engine that may take part in a transfer.
    pub(super) fn source(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.cluster.table.find(*id),
            End::Loose(_) => {
                let text = "a cache that was never registered cannot take part in a transfer";
                Err(Error::new(ErrorKind::CacheNotFound, text))
            }
        }
    }
}

/// How many blocks a pull names.
fn pulled_blocks(rows: &PullRows) -> usize {
    match rows {
        PullRows::Slot { .. } | PullRows::Part { .. } => 0,
        PullRows::Blocks { near, .. } | PullRows::Rows { near, .. } | PullRows::SlotToBlocks { near } => {
            near.len()
        }
    }
}

/// How many blocks a push names.
fn pushed_blocks(rows: &PushRows) -> usize {
    match rows {
        PushRows::Slot { .. } => 0,
        PushRows::Blocks { near, .. } | PushRows::Rows { near, .. } => near.len(),
    }
}

/// What became of an attempt that did not fail.
pub(super) enum Moved {
    /// Every byte is in place: so many.
    Bytes(u64),
    /// The far cache is not what it was: describe it again.
    Stale,
}

/// One pull, push or layer under way.
pub(super) struct Call<'a> {
    pub(super) cluster: &'a Arc<Cluster>,
    pub(super) link: Arc<Link>,
    /// The far cache.
    pub(super) name: Name,
    pub(super) near: Arc<Cache>,
    pub(super) deadline: Deadline,
}

impl Call<'_> {
    /// Counts the call with its link, which does not go away under it by an unlink.
    pub(super) fn counted(&self, call: impl FnOnce() -> Result<u64>) -> Result<u64> {
        let started = Instant::now();
        let result = self.link.begin().and_then(|_active| call());
        self.link.transfers().count(started.elapsed(), result.is_ok());
        if let Ok(bytes) = result {
            self.link.transfers().moved(bytes);
        }
        result
    }

    /// Finds the far cache and attempts the transfer; once more if the far cache was not what it was thought to be.
    pub(super) fn rounds(&self, mut attempt: impl FnMut(&Arc<Known>) -> Result<Moved>) -> Result<u64> {
        let Call { link, name, deadline, .. } = self;
        self.one_sided()?;
        let mut known = link.known(*name, *deadline)?;
        for _ in 0..MOST_ROUNDS {
            let open = validate::reachable("the cache of the peer", known.far.accessible);
            let outcome = open.and_then(|()| attempt(&known));
            match outcome {
                Ok(Moved::Bytes(bytes)) => return Ok(bytes),
                Ok(Moved::Stale) => deadline.waiting("finding a cache of the peer that keeps changing")?,
                // An argument that does not fit what was known may fit what is there now.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => {
                    let now = link.describe(*name, *deadline)?;
                    if now.at == known.at && now.cache == known.cache {
                        return Err(self.named(error));
                    }
                    known = now;
                    continue;
                }
                Err(error) => return Err(self.named(error)),
            }
            known = link.describe(*name, *deadline)?;
        }
        let text = "the cache of the peer changed each time it was looked at";
        Err(self.named(Error::new(ErrorKind::CacheNotFound, text)))
    }

    /// In remote-accessible mode both caches must be (contract §12.4).
    pub(super) fn one_sided(&self) -> Result<()> {
        if self.cluster.config.remote_accessible {
            validate::reachable("the cache of this side", self.near.remote_accessible())?;
        }
        Ok(())
    }

    /// Pulls: reads memory of the peer that this process can see, else asks for a stream. The key goes last.
    fn bring(&self, known: &Arc<Known>, moves: &mut Moves) -> Result<Moved> {
        let plan = Arc::new(CopyPlan::moves(moves)?);
        if plan.waves().is_empty() {
            return Ok(Moved::Bytes(0));
        }
        let pinned = Arc::new(pin_writes(&self.near, std::mem::take(&mut moves.near_rows), self.deadline)?);
        self.cluster.kept(&self.near)?;
        let mut progress = Arc::new(Progress::default());
        let outcome = self.moved_in(known, &plan, &mut progress, &pinned);
        let row_bytes = self.near.geometry().row_bytes();
        let with_arrived = |error| arrived(error, &progress, &plan, row_bytes);
        let outcome = outcome.map_err(with_arrived)?;
        drop(pinned);
        if let Moved::Bytes(_) = outcome
            && !self.cluster.config.remote_accessible
            && known.consumable
        {
            let (first, count) = (moves.src_tensor, moves.num_tensors);
            let released = self.link.consume(self.name, known, first, count, self.deadline);
            released.map_err(with_arrived)?;
            if let Name::Key(CacheKey::Request { .. }) = self.name {
                self.link.forget(&self.name);
            }
        }
        Ok(outcome)
    }

    /// The bytes of a pull, by the way that is open. `progress` ends empty if nobody knows whether what was read was the
    /// cache.
    fn moved_in(
        &self,
        known: &Arc<Known>,
        plan: &Arc<CopyPlan>,
        progress: &mut Arc<Progress>,
        pinned: &Arc<Pin>,
    ) -> Result<Moved> {
        if let Some(tensors) = &known.tensors
            && let Some(unwritten) = self.link.unwritten(known.cache)
        {
            let (from, to) = ((tensors, self.near.placement()), (self.near.tensors(), self.near.placement()));
            let (engine, held) = (&self.cluster.engine, pinned.clone());
            let run = engine.run_holding(plan.clone(), from, to, STAGED, self.deadline, progress, held);
            // The kernel may still write to the rows: nothing else may be brought there.
            if run.as_ref().is_err_and(|error| error.fact(STILL_READING).is_some()) {
                if !self.link.still_unwritten(known.cache, unwritten) || !self.link.current(known) {
                    *progress = Arc::default();
                }
                return run.map(|outcome| Moved::Bytes(outcome.bytes));
            }
            // The kernel allowed it when the link was made, and does not now: the sockets always work.
            let refused = run.as_ref().is_err_and(|error| error.kind() == ErrorKind::NotEnabled);
            if !refused && self.link.still_unwritten(known.cache, unwritten) {
                return self.confirm(known, run.map(|outcome| outcome.bytes), progress);
            }
            *progress = Arc::default();
        }
        // Here the owner reads, behind its pins.
        streams::receive(self.streams(known, plan), progress.clone())
    }

    /// After a read from memory of the peer: whether what was read was the cache all the time.
    fn confirm(&self, known: &Known, read: Result<u64>, progress: &mut Arc<Progress>) -> Result<Moved> {
        let unchanged = self.link.current(known);
        if unchanged {
            self.link.check()?;
            return read.map(Moved::Bytes);
        }
        let unconfirmed = std::mem::take(progress);
        // Something about the cache changed, perhaps only one of its keys: its id is never used again, so the same id
        // means the same memory.
        let now = self.link.describe(self.name, self.deadline)?;
        if now.cache == known.cache && now.far == known.far {
            *progress = unconfirmed;
            return read.map(Moved::Bytes);
        }
        Ok(Moved::Stale)
    }

    /// Pushes: the peer reads this process's memory if it can, else the bytes are sent.
    pub(super) fn take(
        &self,
        known: &Arc<Known>,
        plan: &Arc<CopyPlan>,
        near_rows: Vec<u64>,
    ) -> Result<Moved> {
        if plan.waves().is_empty() {
            return Ok(Moved::Bytes(0));
        }
        // Before the rows are pinned: a read of the peer that comes meanwhile must know that this side may hold them.
        let writing = self.link.writing(known.cache);
        let _pinned = pin_reads(&self.near, near_rows, self.deadline)?;
        self.cluster.kept(&self.near)?;
        let limit = Duration::from_millis(limit_ms(self.deadline));
        let taken = self.taken(known, plan);
        if taken.as_ref().is_err_and(|error| error.fact(SAID_BY).is_none()) {
            writing.unanswered(limit);
        }
        taken
    }

    /// The bytes of a push, by the way that is open.
    fn taken(&self, known: &Arc<Known>, plan: &Arc<CopyPlan>) -> Result<Moved> {
        let whereabouts = self.cluster.whereabouts(&self.near)?;
        if self.link.reach().is_some_and(|reach| reach.seen(&whereabouts)) {
            self.cluster.told_of(&self.near, &whereabouts);
            let geometry = self.near.geometry();
            let request = Request::Fetch {
                name: self.name.into(),
                cache: known.cache.0,
                plan: WirePlan::try_from(&**plan)?,
                source: location(whereabouts)?,
                num_tensors: geometry.num_tensors(),
                tensor_bytes: geometry.tensor_bytes(),
                limit_ms: limit_ms(self.deadline),
            };
            match self.link.ask(&request, self.deadline)? {
                Reply::Done { bytes } => return Ok(Moved::Bytes(bytes)),
                Reply::Stale => return Ok(Moved::Stale),
                // The peer could see it when the link was made, and cannot now: the sockets always work.
                Reply::Unreachable { .. } => {}
                reply => return Err(self.link.unexpected(&reply)),
            }
        }
        streams::send(&self.streams(known, plan))
    }

    /// The transfer through sockets.
    fn streams(&self, known: &Arc<Known>, plan: &Arc<CopyPlan>) -> Streams {
        Streams {
            cluster: self.cluster.clone(),
            link: self.link.clone(),
            name: self.name,
            known: known.clone(),
            plan: plan.clone(),
            near: self.near.clone(),
            deadline: self.deadline,
        }
    }

    /// The same error with what the call was about.
    pub(super) fn named(&self, error: Error) -> Error {
        let error = if error.fact("cluster").is_some() { error } else { self.link.named(error) };
        error.with("name", self.name)
    }
}
