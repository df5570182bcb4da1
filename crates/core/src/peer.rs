//! The answering side: what a peer may ask of this cluster, checked here whatever it says.
//!
//! A peer names a cache; this side resolves it, looks whether peers may reach it, and checks every bound of the plan that
//! came with the request before a byte moves. Into this cluster's memory only this process writes. Not for: streams
//! (`links`), or moving bytes (`engine`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::check;
use crate::cluster::Cluster;
use crate::desc::Geometry;
use crate::engine::{Progress, Staging};
use crate::error::{Error, Result};
use crate::id::{CacheId, Deadline};
use crate::links::{Answer, Link, hear_next, location, say};
use crate::plan::CopyPlan;
use crate::stats::Op;
use crate::table::{Cache, Origin, pin_reads, pin_writes};
use crate::transport::Stream;
use crate::wire::{Location, MESSAGE_LIMIT, Place, Record, Reply, Request, WirePlan};

/// After a description the next request of the same call comes within microseconds: it is watched for before the thread
/// sleeps. Elsewhere a thread that waits uses no CPU.
const PATIENCE: Duration = Duration::from_micros(60);
/// A stream is idle until its link ends: the wait for a request has no limit of its own, the keeper's is what ends it.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The memory of a peer is read straight; the ring is for host memory that a device cannot read.
const STAGED: Staging = Staging { path: crate::config::SwapInPath::Auto, buffer_bytes: 1 << 20 };

/// Answers for one cluster.
pub(crate) struct Answers {
    cluster: Arc<Cluster>,
}

impl Answers {
    pub(crate) fn new(cluster: Arc<Cluster>) -> Self {
        Answers { cluster }
    }
}

impl Answer for Answers {
    fn answer(&self, link: &Arc<Link>, stream: &Stream, unlinked: &dyn Fn()) -> Result<()> {
        let mut patience = Duration::ZERO;
        while let Some(request) =
            hear_next::<Request>(stream, MESSAGE_LIMIT, patience, Deadline::after(NEVER))?
        {
            patience = if matches!(request, Request::Describe { .. }) { PATIENCE } else { Duration::ZERO };
            let started = Instant::now();
            let call = Call { cluster: &self.cluster, link, stream, unlinked };
            let served = call.serve(request);
            self.cluster.stats.counted(Op::Served, started.elapsed(), served.is_ok());
            if let Ended::Broken(error) = served.map_or_else(|ended| ended, |()| Ended::Refused) {
                return Err(error);
            }
        }
        Ok(())
    }
}

/// How a request came to its end without being done.
enum Ended {
    /// The peer was told; the stream goes on.
    Refused,
    /// The stream is in the middle of something and of no more use.
    Broken(Error),
}

/// One request being answered.
struct Call<'a> {
    cluster: &'a Cluster,
    link: &'a Arc<Link>,
    stream: &'a Stream,
    unlinked: &'a dyn Fn(),
}

impl Call<'_> {
    fn serve(&self, request: Request) -> Result<(), Ended> {
        match request {
            Request::Describe { name, limit_ms } => self.told(limit_ms, || self.describe(name.into())),
            Request::Consume { name, cache, first, count, limit_ms } => self.told(limit_ms, || {
                self.cluster.table.consume(name.into(), CacheId(cache), first, count)?;
                Ok(Reply::Done { bytes: 0 })
            }),
            Request::Fetch { at, plan, source, num_tensors, tensor_bytes, limit_ms } => {
                let deadline = limit(limit_ms);
                self.told(limit_ms, || self.fetch(at, plan, &source, (num_tensors, tensor_bytes), deadline))
            }
            Request::Read { at, plan, from, to, limit_ms } => self.read(at, plan, from, to, limit(limit_ms)),
            Request::Write { at, plan, from, to, limit_ms } => {
                self.write(at, plan, from, to, limit(limit_ms))
            }
            Request::Ping { limit_ms } => self.told(limit_ms, || Ok(Reply::Done { bytes: 0 })),
            Request::Unlink { limit_ms } => {
                (self.unlinked)();
                self.told(limit_ms, || Ok(Reply::Done { bytes: 0 }))
            }
        }
    }

    /// Answers with what `call` gives, or with its error.
    fn told(&self, limit_ms: u64, call: impl FnOnce() -> Result<Reply>) -> Result<(), Ended> {
        let reply = call();
        let refused = reply.is_err();
        self.reply(&reply.unwrap_or_else(|error| Reply::failed(&error)), limit(limit_ms))?;
        if refused { Err(Ended::Refused) } else { Ok(()) }
    }

    fn reply(&self, reply: &Reply, deadline: Deadline) -> Result<(), Ended> {
        say(self.stream, reply, deadline).map_err(Ended::Broken)
    }

    /// Where a cache is and what it looks like.
    fn describe(&self, name: crate::keys::Name) -> Result<Reply> {
        let found = self.cluster.table.describe(name)?;
        let cache = &found.cache;
        let place = Place { place: found.place, generation: found.generation };
        let mut record = Record::new(place, cache.id(), found.row, cache.side());
        record.allocated = cache.origin() == Origin::Allocated;
        record.accessible = cache.remote_accessible();
        if record.accessible && self.link.reach().is_some() {
            record.location = location(self.cluster.whereabouts(cache));
        }
        Ok(Reply::Described(record))
    }

    /// The cache at a place, unchanged since it was described, and open to peers.
    fn opened(&self, at: Place) -> Result<Option<Arc<Cache>>> {
        let Some(cache) = self.cluster.table.at(at.place, at.generation) else { return Ok(None) };
        check::reachable("the cache of the peer", cache.remote_accessible())?;
        Ok(Some(cache))
    }

    /// Sends bytes of a cache.
    fn read(&self, at: Place, plan: WirePlan, from: u64, to: u64, deadline: Deadline) -> Result<(), Ended> {
        let begun = (|| {
            let Some(cache) = self.opened(at)? else { return Ok(None) };
            let plan = bounded(plan, from, to)?;
            plan.check_ends(Some(ends(cache.geometry())), None)?;
            let pinned = pin_reads(&cache, plan.src_rows(cache.geometry().row_bytes()), deadline)?;
            Ok(Some((cache, plan, pinned)))
        })();
        let Some((cache, plan, _pinned)) = self.begin(begun, to - from.min(to), deadline)? else {
            return Err(Ended::Refused);
        };
        let sent = self.cluster.engine.send(&plan, from..to, cache.tensors(), self.stream, deadline);
        sent.map_err(Ended::Broken)?;
        self.cluster.stats.travelled(Op::Served, to - from);
        Ok(())
    }

    /// Takes bytes into a cache.
    fn write(&self, at: Place, plan: WirePlan, from: u64, to: u64, deadline: Deadline) -> Result<(), Ended> {
        let begun = (|| {
            let Some(cache) = self.opened(at)? else { return Ok(None) };
            let plan = bounded(plan, from, to)?;
            plan.check_ends(None, Some(ends(cache.geometry())))?;
            let pinned = pin_writes(&cache, plan.dst_rows(cache.geometry().row_bytes()), deadline)?;
            Ok(Some((cache, plan, pinned)))
        })();
        let Some((cache, plan, pinned)) = self.begin(begun, to - from.min(to), deadline)? else {
            return Err(Ended::Refused);
        };
        let progress = Progress::default();
        let taken =
            self.cluster.engine.receive(&plan, from..to, cache.tensors(), self.stream, deadline, &progress);
        taken.map_err(Ended::Broken)?;
        drop(pinned);
        self.cluster.stats.travelled(Op::Served, to - from);
        self.reply(&Reply::Done { bytes: to - from }, deadline)
    }

    /// Says that the bytes may come or follow, or why not; `None` if they do not.
    fn begin<T>(&self, begun: Result<Option<T>>, bytes: u64, deadline: Deadline) -> Result<Option<T>, Ended> {
        let (reply, begun) = match begun {
            Ok(Some(begun)) => (Reply::Ready { bytes }, Some(begun)),
            Ok(None) => (Reply::Stale, None),
            Err(error) => (Reply::failed(&error), None),
        };
        self.reply(&reply, deadline)?;
        Ok(begun)
    }

    /// Reads bytes of the peer's memory into a cache.
    fn fetch(
        &self,
        at: Place,
        plan: WirePlan,
        source: &Location,
        (num_tensors, tensor_bytes): (u32, u64),
        deadline: Deadline,
    ) -> Result<Reply> {
        let Some(cache) = self.opened(at)? else { return Ok(Reply::Stale) };
        let plan = CopyPlan::try_from(plan)?;
        plan.check_ends(Some((num_tensors, tensor_bytes)), Some(ends(cache.geometry())))?;
        let seen = self.link.reach().map(|reach| reach.tensors(source, num_tensors, tensor_bytes));
        let Some(tensors) = seen.transpose()?.flatten() else {
            let refusal = self.link.reach().and_then(|reach| reach.refusal());
            let reason = refusal.unwrap_or("the memory of the peer is not visible here").to_owned();
            return Ok(Reply::Unreachable { reason });
        };
        let pinned = pin_writes(&cache, plan.dst_rows(cache.geometry().row_bytes()), deadline)?;
        let (from, to) = ((&tensors, cache.placement()), (cache.tensors(), cache.placement()));
        let progress = Arc::new(Progress::default());
        let outcome = self.cluster.engine.run(plan, from, to, STAGED, deadline, &progress)?;
        drop(pinned);
        self.cluster.stats.travelled(Op::Served, outcome.bytes);
        Ok(Reply::Done { bytes: outcome.bytes })
    }
}

/// A plan that came over the wire, of which bytes `from..to` are asked for.
fn bounded(plan: WirePlan, from: u64, to: u64) -> Result<CopyPlan> {
    let plan = CopyPlan::try_from(plan)?;
    if from <= to && to <= plan.bytes() {
        return Ok(plan);
    }
    let allowed = format!("within the {} bytes of the plan", plan.bytes());
    Err(Error::argument("the range of a transfer", format_args!("{from} to {to}"), allowed))
}

fn ends(geometry: Geometry) -> (u32, u64) {
    (geometry.num_tensors(), geometry.tensor_bytes())
}

/// What the caller has left, by this side's clock.
fn limit(limit_ms: u64) -> Deadline {
    Deadline::after(Duration::from_millis(limit_ms)).named("what was left of the caller's sync_kv_timeout")
}
