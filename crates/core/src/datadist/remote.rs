//! Links, pull and push: what an engine does with its peers.
//!
//! A pull or push resolves both ends, checks, plans, and lets the side that receives read: from memory it can see of the
//! other, else through a socket. What is known of a far cache may be out of date; then the owner says so, or its
//! generation does, and the call starts over within its deadline. Not for: local operations (`mod`).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{DataDist, End, STAGED};
use crate::check::{self, ExtParam, Layers, Moves, PullRows, PushRows};
use crate::config::Role;
use crate::engine::Progress;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{CacheId, ClusterId, Deadline};
use crate::keys::{CacheKey, Name};
use crate::links::{CommStatus, Known, Lease, Link, PeerAddress, limit_ms, location};
use crate::plan::CopyPlan;
use crate::stats::Op;
use crate::table::{Cache, pin_reads, pin_writes};
use crate::wire::{Comm, Reply, Request, WirePlan};

/// How often a call starts over because the far cache changed under it; each time costs a request and the deadline goes on.
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
    /// Where peers are listened for, with the port that was chosen; `None` without a listener.
    #[must_use]
    pub fn listening(&self) -> Option<SocketAddr> {
        self.links.listening()
    }

    /// Links to each of `peers`, in parallel; one result for each, in order (python-api.md §6.8).
    pub fn link_clusters(&self, peers: &[PeerAddress], timeout: Duration) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        self.each(peers, |peer| {
            let linked = self.cluster.stats.timed(Op::Link, || self.links.link(peer, deadline));
            linked.map_err(|error| link_failed(error).with("cluster", peer.cluster))
        })
    }

    /// Ends the links to each of `peers`, in parallel; one result for each, in order (python-api.md §6.8).
    pub fn unlink_clusters(&self, peers: &[PeerAddress], timeout: Duration, force: bool) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout");
        self.each(peers, |peer| {
            let unlinked = self.cluster.stats.timed(Op::Unlink, || self.links.unlink(peer, force, deadline));
            unlinked.map_err(|error| error.with("cluster", peer.cluster))
        })
    }

    /// Enters a communicator (python-api.md §6.5): its number at once, links to its members in the background.
    pub fn link(&self, name: &str, clusters: &[(ClusterId, u32)], rank_table: &str) -> Result<u64> {
        let config = &self.cluster.config;
        check::ranks::members(name, clusters, config.cluster)?;
        let ends = check::ranks::ends(rank_table, clusters, config.cluster, &config.links)?;
        let members = clusters.iter().map(|&(cluster, rank)| (cluster.0, rank)).collect();
        self.links.enter(Comm { name: name.into(), members }, ends)
    }

    /// Leaves a communicator (python-api.md §6.6).
    pub fn unlink(&self, comm: u64) -> Result<()> {
        self.links.leave(comm)
    }

    /// How far a communicator is (python-api.md §6.7).
    pub fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.links.comm_status(comm)
    }

    /// Takes another role, and listens at `listen` from now on, or nowhere (python-api.md §6.9). Only without links.
    pub fn switch_role(&self, _role: Role, listen: Option<SocketAddr>) -> Result<()> {
        self.links.listen(listen)
    }

    /// Whether the link to `cluster` works: the peer answers within `sync_kv_timeout` (python-api.md §6.11).
    pub fn check_link(&self, cluster: ClusterId) -> Result<()> {
        let deadline = self.deadline();
        self.links.find(cluster, deadline)?.ping(deadline)
    }

    /// Nothing to do for memory that peers read in place; refused without a link (python-api.md §7.17).
    pub fn remap(&self) -> Result<()> {
        if self.links.any() { Ok(()) } else { Err(Error::new(ErrorKind::NotLinked, "there is no link")) }
    }

    /// Lines for the log since the last call: links made and broken, with their transports and reasons.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        self.links.notes()
    }

    /// Brings rows of a peer's cache here (python-api.md §7.12, §7.13). An error says what arrived.
    pub fn pull(&self, from: FarName, to: &End, rows: &PullRows, layers: Layers) -> Result<()> {
        self.cluster.stats.timed(Op::Pull, || {
            let deadline = self.deadline();
            let near = self.near(from.cluster, to)?;
            check::pull_near(near.side(), rows, layers)?;
            let link = self.links.find(from.cluster, deadline)?;
            let moves = |known: &Known| check::pull(near.side(), known.far, rows, layers);
            let moved = self.transfer(&link, from.name, &near, moves, |known, moves, plan| {
                self.bring(&link, from.name, known, moves, plan, &near, deadline)
            }, deadline)?;
            self.cluster.stats.travelled(Op::Pull, moved);
            Ok(())
        })
    }

    /// Brings rows of a cache of this engine to a peer's (python-api.md §7.14, §7.15): they are in place there when this
    /// returns. All layers are one submission under one deadline. An error says how far it got.
    pub fn push(&self, from: &End, to: FarName, rows: &PushRows, layers: Layers) -> Result<()> {
        self.cluster.stats.timed(Op::Push, || {
            let deadline = self.deadline();
            let near = self.near(to.cluster, from)?;
            check::push_near(near.side(), rows, layers)?;
            let link = self.links.find(to.cluster, deadline)?;
            // The slot is an argument here, not part of the name: one that is not there is a wrong argument (§7.14).
            let (name, row) = match to.name {
                Name::Row { cache, row } => (Name::Row { cache, row: 0 }, Some(row)),
                name @ Name::Key(_) => (name, None),
            };
            let moves = |known: &Known| {
                let far = check::Far { row: row.unwrap_or(known.far.row), ..known.far };
                check::push(near.side(), far, rows, layers)
            };
            let mut whole = false;
            let moved = self.transfer(&link, name, &near, moves, |known, moves, plan| {
                whole = moves.whole;
                self.take(&link, known, moves, plan, &near, deadline)
            }, deadline)?;
            // Seed `deprecated.md`: a push ends the reference by key as a pull does (python-api.md §17, further rulings).
            if let PushRows::Slot { near: row } = rows
                && whole
            {
                self.cluster.table.release_row(near.id(), *row);
            }
            self.cluster.stats.travelled(Op::Push, moved);
            Ok(())
        })
    }

    /// The seed's `PushKvCache`: only the prompt role, only whole slots, layer ranges with both ends inclusive.
    pub fn push_kv_cache(
        &self,
        src: CacheId,
        dst: CacheIndex,
        src_batch_index: u32,
        size: i64,
        ext: ExtParam,
    ) -> Result<()> {
        let near = self.cluster.table.find(src)?;
        let layers = check::push_kv_cache(self.cluster.config.role, near.side(), size, ext)?;
        let to = FarName { cluster: dst.cluster, name: Name::Row { cache: dst.cache, row: dst.row } };
        self.push(&End::Managed(src), to, &PushRows::Slot { near: src_batch_index }, layers)
    }

    /// The cache of this engine at one end of a transfer with `cluster`.
    fn near(&self, cluster: ClusterId, end: &End) -> Result<Arc<Cache>> {
        if self.links.is_self(cluster) {
            let allowed = "another cluster: this one's own caches need no transfer";
            return Err(Error::argument("cluster_id", cluster, allowed));
        }
        match end {
            End::Managed(id) => self.cluster.table.find(*id),
            End::Loose(_) => {
                let text = "a cache that was never registered cannot take part in a transfer";
                Err(Error::new(ErrorKind::CacheNotFound, text))
            }
        }
    }

    /// Finds the far cache, checks and plans, and has the bytes moved; once more if the far cache was not what it was
    /// thought to be. Returns the bytes moved.
    fn transfer(
        &self,
        link: &Arc<Link>,
        name: Name,
        near: &Arc<Cache>,
        moves: impl Fn(&Known) -> Result<Moves>,
        mut moved: impl FnMut(&Known, &Moves, Arc<CopyPlan>) -> Result<Moved>,
        deadline: Deadline,
    ) -> Result<u64> {
        let started = Instant::now();
        let result = (|| {
            let _active = link.begin()?;
            self.one_sided(near)?;
            for round in 0..MOST_ROUNDS {
                let known =
                    if round == 0 { link.known(name, deadline)? } else { link.describe(name, deadline)? };
                check::reachable("the cache of the peer", known.far.accessible).map_err(|error| link.named(error))?;
                let moves = moves(&known).map_err(|error| link.named(error).with("name", name))?;
                let plan = Arc::new(CopyPlan::moves(&moves));
                if plan.waves().is_empty() {
                    return Ok(0);
                }
                let bytes = plan.bytes();
                match moved(&known, &moves, plan)? {
                    Moved::All => return Ok(bytes),
                    Moved::Stale => deadline.check("finding a cache of the peer that keeps changing")?,
                }
            }
            let text = "the cache of the peer changed each time it was looked at";
            Err(link.named(Error::new(ErrorKind::CacheNotFound, text)).with("name", name))
        })();
        link.transfers().count(started.elapsed(), result.is_ok());
        if let Ok(bytes) = result {
            link.transfers().moved(bytes);
        }
        result
    }

    /// In remote-accessible mode both caches must be (python-api.md §12.4).
    fn one_sided(&self, near: &Cache) -> Result<()> {
        let needed = self.cluster.config.remote_accessible;
        if needed { check::reachable("the cache of this side", near.remote_accessible()) } else { Ok(()) }
    }

    /// The bytes of a pull.
    #[expect(clippy::too_many_arguments, reason = "both ends of one pull")]
    fn bring(
        &self,
        link: &Link,
        name: Name,
        known: &Known,
        moves: &Moves,
        plan: Arc<CopyPlan>,
        near: &Arc<Cache>,
        deadline: Deadline,
    ) -> Result<Moved> {
        let _pin = pin_writes(near, moves.near_rows.clone(), deadline)?;
        let progress = Arc::new(Progress::default());
        let brought = match &known.tensors {
            Some(tensors) => {
                let (from, to) = ((tensors, near.placement()), (near.tensors(), near.placement()));
                let run = self.cluster.engine.run(plan.clone(), from, to, STAGED, deadline, &progress);
                self.confirm(link, name, known, run.map(|_| ()), deadline)
            }
            None => self.streamed(link, known, &plan, near, &progress, deadline),
        };
        let row_bytes = near.geometry().row_bytes();
        let brought = brought.map_err(|error| arrived(link.named(error), &progress, &plan, row_bytes))?;
        if let Moved::All = brought
            && !self.cluster.config.remote_accessible
            && known.consumable
        {
            let (first, count) = (moves.src_tensor, moves.num_tensors);
            link.consume(name, known, first, count, deadline)?;
            if let Name::Key(CacheKey::Request { .. }) = name {
                link.forget(&name);
            }
        }
        Ok(brought)
    }

    /// After a read from memory of the peer: whether what was read was the cache all the time.
    fn confirm(&self, link: &Link, name: Name, known: &Known, read: Result<()>, deadline: Deadline) -> Result<Moved> {
        let unchanged = link.current(known);
        link.check()?;
        if unchanged {
            return read.map(|()| Moved::All);
        }
        // Something about the cache changed, perhaps only one of its keys: its id is never used again, so the same id
        // means the same memory.
        let now = link.describe(name, deadline)?;
        if now.cache == known.cache && now.far == known.far {
            return read.map(|()| Moved::All);
        }
        Ok(Moved::Stale)
    }

    /// The bytes of a pull through sockets: one request, and the answer into place.
    fn streamed(
        &self,
        link: &Link,
        known: &Known,
        plan: &CopyPlan,
        near: &Arc<Cache>,
        progress: &Progress,
        deadline: Deadline,
    ) -> Result<Moved> {
        let bytes = plan.bytes();
        let (at, limit_ms) = (known.at, limit_ms(deadline));
        let request = Request::Read { at, plan: WirePlan::from(plan), from: 0, to: bytes, limit_ms };
        let mut lease = link.lease(deadline)?;
        match link.exchange(&lease, &request, deadline)? {
            Reply::Ready { bytes: ready } if ready == bytes => {}
            reply => return stale(link, &mut lease, reply),
        }
        let received =
            self.cluster.engine.receive(plan, 0..bytes, near.tensors(), lease.stream(), deadline, progress);
        received.map_err(|error| link.why_or(error))?;
        lease.whole = true;
        Ok(Moved::All)
    }

    /// The bytes of a push: the peer reads them from this process's memory if it can, else they are sent.
    fn take(
        &self,
        link: &Link,
        known: &Known,
        moves: &Moves,
        plan: Arc<CopyPlan>,
        near: &Arc<Cache>,
        deadline: Deadline,
    ) -> Result<Moved> {
        let _pin = pin_reads(near, moves.near_rows.clone(), deadline)?;
        let whereabouts = self.cluster.whereabouts(near);
        if link.reach().is_some_and(|reach| reach.seen(&whereabouts)) {
            let geometry = near.geometry();
            let request = Request::Fetch {
                at: known.at,
                plan: WirePlan::from(&*plan),
                source: location(whereabouts),
                num_tensors: geometry.num_tensors(),
                tensor_bytes: geometry.tensor_bytes(),
                limit_ms: limit_ms(deadline),
            };
            match link.ask(&request, deadline)? {
                Reply::Done { .. } => return Ok(Moved::All),
                Reply::Stale => return Ok(Moved::Stale),
                // The peer could see it when the link was made, and cannot now: the sockets always work.
                Reply::Unreachable { .. } => {}
                reply => return Err(link.unexpected(&reply)),
            }
        }
        self.sent(link, known, &plan, near, deadline)
    }

    /// The bytes of a push through sockets.
    fn sent(
        &self,
        link: &Link,
        known: &Known,
        plan: &CopyPlan,
        near: &Arc<Cache>,
        deadline: Deadline,
    ) -> Result<Moved> {
        let bytes = plan.bytes();
        let (at, limit_ms) = (known.at, limit_ms(deadline));
        let request = Request::Write { at, plan: WirePlan::from(plan), from: 0, to: bytes, limit_ms };
        let mut lease = link.lease(deadline)?;
        match link.exchange(&lease, &request, deadline)? {
            Reply::Ready { .. } => {}
            reply => return stale(link, &mut lease, reply),
        }
        let sent = self.cluster.engine.send(plan, 0..bytes, near.tensors(), lease.stream(), deadline);
        sent.map_err(|error| link.why_or(error))?;
        match link.reply(&lease, deadline).map_err(|error| link.why_or(error))? {
            Reply::Done { .. } => {
                lease.whole = true;
                Ok(Moved::All)
            }
            reply => stale(link, &mut lease, reply),
        }
    }

    /// Does `call` for each of `peers`: here for one, in parallel for more, sixteen at a time.
    fn each(&self, peers: &[PeerAddress], call: impl Fn(&PeerAddress) -> Result<()> + Sync) -> Vec<Result<()>> {
        if let [only] = peers {
            return vec![call(only)];
        }
        let next = std::sync::atomic::AtomicUsize::new(0);
        let results = std::sync::Mutex::new(Vec::with_capacity(peers.len()));
        let work = || {
            while let Some((index, peer)) = {
                let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                peers.get(index).map(|peer| (index, peer))
            } {
                let result = call(peer);
                results.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((index, result));
            }
        };
        // Links are made a few times in the life of a process: threads for the length of the call are no cost there.
        std::thread::scope(|scope| {
            for _ in 1..peers.len().min(AT_ONCE) {
                scope.spawn(work);
            }
            work();
        });
        let mut results = results.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        results.sort_by_key(|&(index, _)| index);
        results.into_iter().map(|(_, result)| result).collect()
    }

    fn limit(&self, limit: Duration, name: &'static str) -> Deadline {
        Deadline::after(limit).named(name).watched(self.interrupted)
    }
}

/// Clusters of one call that are linked at the same time.
const AT_ONCE: usize = 16;

/// What became of a transfer that did not fail.
enum Moved {
    /// Every byte is in place.
    All,
    /// The far cache is not what it was: describe it again.
    Stale,
}

/// A reply in place of the one that a transfer was waiting for.
fn stale(link: &Link, lease: &mut Lease<'_>, reply: Reply) -> Result<Moved> {
    // The peer waits for the next request: the stream is as good as before.
    lease.whole = matches!(reply, Reply::Stale | Reply::Failed { .. });
    match link.refusal(reply)? {
        Reply::Stale => Ok(Moved::Stale),
        reply => Err(link.unexpected(&reply)),
    }
}

/// The error of a transfer with what of the destination is in place.
#[cold]
fn arrived(error: Error, progress: &Progress, plan: &CopyPlan, row_bytes: u64) -> Error {
    let whole = progress.arrived(plan, row_bytes);
    let mut text = String::new();
    for tensor in whole.iter().take(8) {
        let rows: Vec<String> =
            tensor.rows.iter().take(8).map(|rows| format!("{}-{}", rows.start, rows.end - 1)).collect();
        let more = if tensor.rows.len() > rows.len() { " …" } else { "" };
        text += &format!("tensor {}: {}{more}; ", tensor.tensor, rows.join(" "));
    }
    let more = if whole.len() > 8 { "…" } else { "the rest did not" };
    let error = error.with("arrived", format_args!("{text}{more}"));
    error.with_arrived(whole.into_iter().map(|tensor| (tensor.tensor, tensor.rows)).collect())
}

/// The error of a link that was not made: what a peer that refused calls not linked is a failed link here.
#[cold]
fn link_failed(error: Error) -> Error {
    match error.kind() {
        ErrorKind::NotLinked | ErrorKind::System | ErrorKind::NotEnabled => {
            Error::new(ErrorKind::LinkFailed, "the link could not be made").because(error)
        }
        _ => error,
    }
}
