//! Answers to pushes: receives their bytes into caches, over one stream or several.

use std::ops::Range;
use std::sync::Arc;

use super::request_context::{RequestContext, RequestFailure, bounded, check_plan, rows};
use super::shared_writes::{SharedWrite, WritePart};
use crate::cache::{Cache, Pin, RowUse};
use crate::copy::{DataPath, PathJob, StreamPath};
use crate::error::{Error, ErrorKind, Result};
use crate::plan::{CopyPlan, Side};
use crate::protocol::{MAX_AHEAD, NamedCache, Reply, WirePlan};
use crate::stats::Op;

impl RequestContext<'_> {
    /// Receives bytes into a cache: bytes that follow the request (`ahead`), or bytes that this side then asks for. `shared`
    /// is the number of a shared write.
    pub(super) fn write(
        &self,
        named: &NamedCache,
        (plan, range): (WirePlan, Range<u64>),
        ahead: bool,
        shared: Option<u64>,
    ) -> Result<(), RequestFailure> {
        if let Some(id) = shared {
            return self.begin_shared_write(named, plan, range, id);
        }
        let bytes = range.end.saturating_sub(range.start);
        let begun = self.charged(|| {
            let plan = bounded(plan, &range)?;
            let pinned = self.pin_for_write(named, &plan)?;
            Ok(pinned.map(|(cache, pin)| (plan, cache, pin)))
        });
        let begun =
            if ahead { self.accept_ahead(begun, bytes) } else { self.reply_ready(begun, bytes, false) };
        let Some((plan, cache, pin)) = begun? else { return Err(RequestFailure::Refused) };
        self.stream.restart_pace();
        self.receive(self.job(&plan), range, &cache)?;
        drop(pin);
        self.resources.stats.add_bytes(Op::Served, bytes);
        self.reply(&Reply::Done { bytes })
    }

    /// Pins the rows that a plan of the peer writes.
    fn pin_for_write(&self, named: &NamedCache, plan: &CopyPlan) -> Result<Option<(Arc<Cache>, Pin)>> {
        self.pinned(named, |cache| {
            check_plan(plan, Side::Destination, cache.geometry())?;
            StreamPath::check(Side::Destination, cache.tensors())?;
            let writes = rows(cache, plan, Side::Destination)?;
            self.pin(cache, RowUse { writes, ..RowUse::default() }, named)
        })
    }

    /// Begins a write over several streams, and receives its first part.
    fn begin_shared_write(
        &self,
        named: &NamedCache,
        plan: WirePlan,
        range: Range<u64>,
        id: u64,
    ) -> Result<(), RequestFailure> {
        let begun = self.charged(|| {
            let plan = bounded(plan, &range)?;
            let Some((cache, pin)) = self.pin_for_write(named, &plan)? else { return Ok(None) };
            let write = SharedWrite {
                id,
                plan,
                cache,
                deadline: self.deadline,
                _pin: pin,
                _share: self.share.clone(),
            };
            self.link.served.writes.begin(write, range.clone()).map(Some)
        });
        self.receive_part(begun, range)
    }

    /// Receives a further part of a write over several streams.
    pub(super) fn write_part(&self, id: u64, range: Range<u64>) -> Result<(), RequestFailure> {
        let part = self.still_wanted().and_then(|()| self.link.served.writes.part(id, range.clone()));
        self.receive_part(part.map(Some), range)
    }

    fn receive_part(
        &self,
        begun: Result<Option<WritePart<'_>>>,
        range: Range<u64>,
    ) -> Result<(), RequestFailure> {
        let bytes = range.end.saturating_sub(range.start);
        let Some(part) = self.reply_ready(begun, bytes, false)? else { return Err(RequestFailure::Refused) };
        self.stream.restart_pace();
        let write = part.write();
        let deadline = if write.deadline.at() < self.deadline.at() { write.deadline } else { self.deadline };
        let request = RequestContext { share: self.share.clone(), deadline, ..*self };
        request.receive(request.job(&write.plan), range, &write.cache)?;
        part.arrived();
        self.resources.stats.add_bytes(Op::Served, bytes);
        request.reply(&Reply::Done { bytes })
    }

    /// Receives the bytes `range` of the plan of `job` into rows of `cache`, which are pinned.
    fn receive(&self, job: PathJob<'_>, range: Range<u64>, cache: &Cache) -> Result<(), RequestFailure> {
        let bytes = range.end.saturating_sub(range.start);
        let mut path = StreamPath { stream: self.stream, range, sum: None };
        let to = (cache.tensors(), cache.placement());
        let read = path.read(job, to, &Arc::default(), Arc::new(()));
        read.map(drop).map_err(|error| RequestFailure::Broken(error.with_replaced("of_bytes", bytes)))
    }

    /// Accepts bytes that follow the request, and returns `begun`. If the request is refused, discards these
    /// bytes, sends the reason and returns `None`.
    fn accept_ahead<T>(&self, begun: Result<Option<T>>, bytes: u64) -> Result<Option<T>, RequestFailure> {
        if bytes > MAX_AHEAD {
            // Peers of this version send no such request, so the stream is closed without reading the bytes.
            let text = "too many bytes follow a request without a reply";
            let error = Error::new(ErrorKind::NotLinked, text).with("bytes", bytes).with("limit", MAX_AHEAD);
            self.reply(&Reply::failed(&error))?;
            return Err(RequestFailure::Broken(error));
        }
        let reply = match begun {
            Ok(Some(begun)) => return Ok(Some(begun)),
            Ok(None) => Reply::Stale,
            Err(error) => Reply::failed(&error),
        };
        self.stream.discard_payload(bytes, self.deadline).map_err(RequestFailure::Broken)?;
        self.reply(&reply)?;
        Ok(None)
    }
}
