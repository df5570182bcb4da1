//! Transfers through sockets: one request and one stream of bytes, or a large transfer cut into as many as configured.
//!
//! Every part names the whole plan and the stretch of it that it carries, so that parts need nothing of each other. Not
//! for: sending and receiving bytes (`engine`).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::transfer::Moved;
use crate::cluster::Cluster;
use crate::engine::{Progress, Work};
use crate::error::Result;
use crate::id::Deadline;
use crate::keys::Name;
use crate::links::{Known, Lease, Link, limit_ms, reply};
use crate::plan::CopyPlan;
use crate::table::Cache;
use crate::wire::{Reply, Request, WirePlan};

/// Below this one part is as fast: what a stream moves while another is being asked for.
const PART: u64 = 8 << 20;

/// One transfer through sockets.
pub(super) struct Streams {
    pub(super) cluster: Arc<Cluster>,
    pub(super) link: Arc<Link>,
    pub(super) name: Name,
    pub(super) known: Arc<Known>,
    pub(super) plan: Arc<CopyPlan>,
    pub(super) near: Arc<Cache>,
    pub(super) deadline: Deadline,
}

/// Brings the bytes of the plan into the near cache.
pub(super) fn receive(streams: Streams, progress: Arc<Progress>) -> Result<Moved> {
    streams.in_parts(move |streams, range| streams.receive(range, &progress))
}

/// Takes the bytes of the plan out of the near cache; they are in place when this returns. One stream: parts of a push
/// would write the same rows of other tensors, and rows are what the owner pins.
pub(super) fn send(streams: &Streams) -> Result<Moved> {
    streams.send(0..streams.plan.bytes())
}

impl Streams {
    /// Does `part` for the whole plan, or for several stretches of it at the same time.
    fn in_parts(
        self,
        part: impl Fn(&Streams, Range<u64>) -> Result<Moved> + Send + Sync + 'static,
    ) -> Result<Moved> {
        let bytes = self.plan.bytes();
        // Waves have an order, which parts that run at the same time would not keep.
        let most = if self.plan.waves().len() == 1 { self.cluster.config.links.streams } else { 1 };
        let count = (bytes / PART).clamp(1, most.max(1) as u64);
        if count == 1 {
            return part(&self, 0..bytes);
        }
        let (deadline, cluster) = (self.deadline, self.cluster.clone());
        let each = bytes.div_ceil(count);
        let parts = Arc::new(Parts { streams: self, each, bytes, part, stale: AtomicBool::new(false) });
        let units = usize::try_from(bytes.div_ceil(each)).unwrap_or(usize::MAX);
        cluster.engine.streamers()?.run(parts.clone(), units, deadline)?;
        Ok(if parts.stale.load(Ordering::Acquire) { Moved::Stale } else { Moved::Bytes(bytes) })
    }

    /// One request, and its bytes into place.
    fn receive(&self, range: Range<u64>, progress: &Progress) -> Result<Moved> {
        let Streams { link, deadline, .. } = self;
        let bytes = range.end - range.start;
        let request = Request::Read {
            name: self.name.into(),
            cache: self.known.cache.0,
            plan: WirePlan::from(&*self.plan),
            from: range.start,
            to: range.end,
            limit_ms: limit_ms(*deadline),
        };
        let mut lease = link.lease(*deadline)?;
        match link.exchange(&lease, &request, *deadline)? {
            Reply::Ready { bytes: ready } if ready == bytes => {}
            other => return stale(link, &mut lease, other),
        }
        let engine = &self.cluster.engine;
        let received =
            engine.receive(&self.plan, range, self.near.tensors(), lease.stream(), *deadline, progress);
        received.map_err(|error| link.why_or(error))?;
        lease.whole = true;
        Ok(Moved::Bytes(bytes))
    }

    /// One request, the bytes, and the word that they are in place.
    fn send(&self, range: Range<u64>) -> Result<Moved> {
        let Streams { link, deadline, .. } = self;
        let bytes = range.end - range.start;
        let request = Request::Write {
            name: self.name.into(),
            cache: self.known.cache.0,
            plan: WirePlan::from(&*self.plan),
            from: range.start,
            to: range.end,
            limit_ms: limit_ms(*deadline),
        };
        let mut lease = link.lease(*deadline)?;
        match link.exchange(&lease, &request, *deadline)? {
            Reply::Ready { bytes: ready } if ready == bytes => {}
            other => return stale(link, &mut lease, other),
        }
        let sent =
            self.cluster.engine.send(&self.plan, range, self.near.tensors(), lease.stream(), *deadline);
        sent.map_err(|error| link.why_or(error))?;
        match reply(&lease, *deadline).map_err(|error| link.why_or(error))? {
            Reply::Done { .. } => {
                lease.whole = true;
                Ok(Moved::Bytes(bytes))
            }
            other => stale(link, &mut lease, other),
        }
    }
}

/// A transfer in several parts.
struct Parts<F> {
    streams: Streams,
    each: u64,
    bytes: u64,
    part: F,
    /// The owner said of some part that the cache is not what it was.
    stale: AtomicBool,
}

impl<F: Fn(&Streams, Range<u64>) -> Result<Moved> + Send + Sync + 'static> Work for Parts<F> {
    fn unit(&self, index: usize) -> Result<()> {
        let from = index as u64 * self.each;
        let to = (from + self.each).min(self.bytes);
        if let Moved::Stale = (self.part)(&self.streams, from..to)? {
            self.stale.store(true, Ordering::Release);
        }
        Ok(())
    }
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
