//! Answers to the requests of peers. Every request is checked here, whatever the peer claims.
//!
//! A request names a cache. This side resolves the name, checks that peers may access the cache, and checks
//! all bounds of the plan in the request before it moves a byte. Only this process writes into the memory of
//! this cluster.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::Link;
use super::message_io::send_message;
use super::peer_memory::location;
use super::request_context::{RequestContext, RequestFailure, bounded, check_plan, deadline_of, rows};
use crate::budget::BudgetShare;
use crate::cache::{Cache, Origin, Pin, RowUse};
use crate::checksums::Checksums;
use crate::copy::{DataPath, Progress, StreamPath, WindowSum, with_arrived_rows};
use crate::error::{Error, ErrorKind, Result, ensure};
use crate::fallible;
use crate::grants::{GrantedRead, RowRanges};
use crate::model::{Deadline, Geometry, Name};
use crate::net::Stream;
use crate::plan::{CopyPlan, Side};
use crate::protocol::{
    self, EntryVersion, MAX_CHECKSUMS, MAX_HASHED, MESSAGE_LIMIT, NamedCache, Payload, Reply, Request, Timed,
    WireCache, WireLayout, WireLocation, WirePlan, WireUsedKey,
};
use crate::resources::{MemoryLocation, Resources};
use crate::stats::Op;

/// Answers requests for one cluster.
pub(super) struct Answers {
    resources: Arc<Resources>,
}

impl Answers {
    pub(super) fn new(resources: Arc<Resources>) -> Self {
        Answers { resources }
    }

    /// How long a peer may be silent in the middle of a call.
    pub(super) fn silence(&self) -> Duration {
        self.resources.config.links.silence
    }

    /// Reads the next request on `stream`, which has arrived or is arriving. If there is no memory for it, sends the reason, and the
    /// stream stays open.
    pub(super) fn receive(&self, link: &Link, stream: &Stream) -> Result<StreamState> {
        let silence = self.silence();
        // The request has arrived or begun to arrive. The budget of the link decides how much memory and time
        // a large one gets.
        let begun = Deadline::after(silence).named("the time limit of a request");
        let frame =
            stream.receive_admitted(MESSAGE_LIMIT, Duration::ZERO, begun, |bytes| link.admit(bytes, silence));
        let (Timed { limit_ms, request }, share) =
            match frame.and_then(|frame| frame.map(read_frame).transpose()) {
                Ok(Some(received)) => received,
                Ok(None) => return Ok(StreamState::Ended),
                // The body was read completely, so the stream remains usable: report the error, and the next
                // request may fit.
                Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                    send_message(stream, &Reply::failed(&error), Deadline::after(silence))?;
                    return Ok(StreamState::open_if(!stream.is_closed()));
                }
                Err(error) => return Err(error),
            };
        stream.restart_pace();
        let deadline = deadline_of(limit_ms, self.resources.config.links.pin_limit);
        Ok(StreamState::Unanswered(ReceivedRequest { request, share, deadline }))
    }

    /// Answers a request that was read from `stream`. If the peer unlinks, calls `unlinked` before it sends the reply, so that no
    /// trace of the link is left here when the peer receives the reply. `replied` is when this thread replied to the previous
    /// request, if it did; the time of this reply replaces it.
    pub(super) fn answer(
        &self,
        link: &Arc<Link>,
        stream: &Stream,
        ReceivedRequest { request, share, deadline }: ReceivedRequest,
        unlinked: &dyn Fn(),
        replied: &Cell<Option<Instant>>,
    ) -> Result<StreamState> {
        let started = Instant::now();
        let resources = &*self.resources;
        let context = RequestContext { resources, link, stream, share, deadline, unlinked, replied };
        // The plan of a request is written as bytes for its digest, which may take as much memory as its frame.
        let digest = context.share.charged(|| fallible::temporary(|| digest_of_summed(&request)));
        let served = context.dispatch(request, digest);
        let done = matches!(served, Ok(()) | Err(RequestFailure::Unlinked));
        self.resources.stats.counted(Op::Served, started.elapsed(), done);
        match served {
            Ok(()) | Err(RequestFailure::Refused) => Ok(StreamState::Open),
            Err(RequestFailure::Unlinked) => Ok(StreamState::Ended),
            Err(RequestFailure::Broken(error)) => Err(error),
        }
    }
}

/// The state of a call stream between two steps of an answer.
#[allow(
    clippy::large_enum_variant,
    reason = "almost every request is answered at once, and a box would cost an allocation"
)]
pub(super) enum StreamState {
    /// The next request may arrive.
    Open,
    /// No further request will arrive.
    Ended,
    /// This request was read and is not answered yet.
    Unanswered(ReceivedRequest),
}

impl StreamState {
    fn open_if(open: bool) -> StreamState {
        if open { StreamState::Open } else { StreamState::Ended }
    }
}

/// A request of a peer that is not answered yet.
pub(super) struct ReceivedRequest {
    request: Request,
    /// The memory that the request takes.
    share: Arc<BudgetShare>,
    /// The deadline of the caller, by the clock of this side. It includes the wait for a slot.
    deadline: Deadline,
}

impl ReceivedRequest {
    /// Whether the answer may have to wait until rows are free.
    pub(super) fn waits_for_rows(&self) -> bool {
        use Request::{Checksums, Fetch, Read, Write};
        matches!(self.request, Read { .. } | Write { .. } | Fetch { .. } | Checksums { .. })
    }

    /// Returns to the budget what the request does not need while it waits for a slot.
    pub(super) fn trim(&self) {
        self.share.trim();
    }
}

/// The cache of a request that reads, with its pin and the read under a grant, if there is one.
type BegunRead = (Arc<Cache>, Pin, Option<GrantedRead>);

impl RequestContext<'_> {
    /// Answers `request`. `digest` is that of a request for checksums.
    fn dispatch(&self, request: Request, digest: Result<u64>) -> Result<(), RequestFailure> {
        match request {
            Request::Describe { name } => self.answer_with(|| self.describe(name)),
            Request::Finish { used_key, message } => self.answer_with(|| self.finish(used_key, message)),
            Request::Notify { messages } => self.answer_with(|| {
                self.still_wanted()?;
                self.link.receive_notifications(&self.resources.events, messages, || Ok(()))
            }),
            Request::Fetch { cache, plan, source, num_tensors, tensor_bytes } => {
                let source = (&source, num_tensors, tensor_bytes);
                self.answer_with(|| self.fetch(&cache, plan, source))
            }
            Request::Read { cache, generation, plan, range, summed } => {
                self.send_bytes(&cache, generation, (plan, range), summed.then_some(digest))
            }
            Request::Write { cache, plan, range, ahead, shared } => {
                self.write(&cache, (plan, range), ahead, shared)
            }
            Request::WritePart { write, range } => self.write_part(write, range),
            Request::Checksums { cache, plan, side } => self.answer_with(|| {
                // First the plan: no digest can be made of an invalid one.
                let plan = CopyPlan::try_from(plan)?;
                self.checksums(&cache, &plan, side, digest?)
            }),
            Request::Locate { addrs } => self.answer_with(move || self.locate(&addrs)),
            Request::Find { name } => {
                self.answer_with(|| self.resources.table.find_name(&name).map(|cache| Reply::Found { cache }))
            }
            Request::Ping => self.answer_with(|| Ok(Reply::Done { bytes: 0 })),
            Request::Unlink => {
                (self.unlinked)();
                self.answer_with(|| Ok(Reply::Done { bytes: 0 })).and(Err(RequestFailure::Unlinked))
            }
        }
    }

    /// Does what the end of a call of the peer asks for: releases the key of a pull, or notes that the peer is done with a grant,
    /// and then queues a notification, for which there is room.
    fn finish(&self, used_key: Option<WireUsedKey>, message: Option<Payload>) -> Result<Reply> {
        self.still_wanted()?;
        // Dropped at the end, because the queue of events is locked while the notification is queued.
        let mut ended = None;
        let mut first = || {
            let Some(WireUsedKey { cache, first, count }) = used_key else { return Ok(()) };
            match cache.name {
                Name::Grant(grant) => {
                    let reader = (self.link.peer.cluster, self.link.peer.incarnation);
                    ended = self.resources.grants.report(&grant, reader)?;
                    Ok(())
                }
                name => self.resources.table.consume(name, cache.id, first, count),
            }
        };
        let Some(message) = message else { return first().map(|()| Reply::Done { bytes: 0 }) };
        self.link.receive_notifications(&self.resources.events, vec![message], first)
    }

    /// Pins the rows that a request reads, after `check`: those of its cache, which is `side` of `plan`. If the request names a
    /// grant, begins a read under it, and checks that it lends these rows. Returns `None` if the name no longer resolves to that
    /// cache.
    fn begin_read(
        &self,
        named: &NamedCache,
        (plan, side): (&CopyPlan, Side),
        check: impl FnOnce(&Cache) -> Result<()>,
    ) -> Result<Option<BegunRead>> {
        let pinned = self.pinned(named, |cache| {
            check(cache)?;
            let reads = rows(cache, plan, side)?;
            self.pin(cache, RowUse { reads, ..RowUse::default() }, named)
        })?;
        let Some((cache, pin)) = pinned else { return Ok(None) };
        let Name::Grant(id) = named.name else { return Ok(Some((cache, pin, None))) };
        let read = self.resources.grants.read(&id)?;
        let rows = plan.touched_rows(side, cache.geometry().row_sizes())?;
        read.grant().rows().check(cache.id(), &rows)?;
        Ok(Some((cache, pin, Some(read))))
    }

    /// Hashes the pairs of a plan, of which a cache here is one side, as they are now. Under a grant, checks that it lends them and
    /// has not ended. `request` is the digest of the request.
    fn checksums(&self, named: &NamedCache, plan: &CopyPlan, side: Side, request: u64) -> Result<Reply> {
        let check = |cache: &Cache| check_hashed(plan, side, cache.geometry());
        let begun = self.begin_read(named, (plan, side), check)?;
        let Some((cache, _pin, granted)) = begun else { return Ok(Reply::Stale) };
        let found = self.resources.resolve(named.name)?;
        if found.cache.id() != cache.id() {
            return Ok(Reply::Stale);
        }
        let checksums = Checksums::bound_to(named.name, cache.id(), found.generation, request)?;
        let (memory, blocks) = ((cache.tensors(), cache.placement()), (plan, side));
        let sums = self.resources.copy_engine.block_sums(memory, blocks, checksums, self.deadline)?;
        granted.map_or(Ok(()), GrantedRead::finish)?;
        // Hashing took time in which the caller could not be expected to read.
        self.stream.restart_pace();
        Ok(Reply::Checksums { generation: found.generation, sums })
    }

    /// Describes a cache and the location of its memory.
    fn describe(&self, name: Name) -> Result<Reply> {
        let found = self.resources.resolve(name)?;
        let cache = &found.cache;
        let version = EntryVersion { index: found.index, generation: found.generation };
        let mut record = WireCache::new(version, cache.id(), found.row, cache.layout());
        record.allocated = cache.origin() == Origin::Allocated;
        record.accessible = cache.remote_accessible();
        record.layout = cache.kv().map(|kv| WireLayout::from(&**kv));
        if let Name::Grant(id) = name {
            let grant = self.resources.grants.find(&id)?;
            let ranges = grant.rows().ranges().iter().map(|range| (range.start, range.end));
            record.granted = fallible::collect(RowRanges::LIST, ranges)?;
        }
        if record.accessible && self.link.view.local().is_some() {
            let at = self.resources.memory_location(cache)?;
            if self.link.view.path_of_peer(&at).is_ok() {
                self.resources.described_to_peer(cache, &at);
            }
            record.location = location(at)?;
        } else if record.accessible && self.link.view.uses_fabric() {
            let at = self.resources.memory_location(cache)?;
            if matches!(at, MemoryLocation::Pool(..)) {
                record.location = location(at)?;
            }
        }
        Ok(Reply::Described(record))
    }

    /// Finds the caches in which addresses lie. Returns `Err` with `InvalidArgument` if an address lies in no
    /// cache that peers may access.
    fn locate(&self, addrs: &[u64]) -> Result<Reply> {
        self.resources.table.locate(addrs).map(Reply::Located)
    }

    /// Sends bytes of a cache, unless the generation of its entry is another one than `expected`. Under a grant, also sends
    /// whether it lasted until they were sent. If their checksum is asked for, sends it too, bound to the `digest` of the request.
    fn send_bytes(
        &self,
        named: &NamedCache,
        expected: Option<u64>,
        (plan, range): (WirePlan, Range<u64>),
        digest: Option<Result<u64>>,
    ) -> Result<(), RequestFailure> {
        let begun = self.charged(|| {
            let plan = bounded(plan, &range)?;
            let check = |cache: &Cache| {
                check_plan(&plan, Side::Source, cache.geometry())?;
                StreamPath::check(Side::Source, cache.tensors()).map(drop)
            };
            let begun = self.begin_read(named, (&plan, Side::Source), check)?;
            let Some((cache, pin, granted)) = begun else { return Ok(None) };
            let confirmed = granted.is_some() || digest.is_some();
            let sum = confirmed.then(|| self.stream_sum(named.name, &cache, digest)).transpose()?;
            let changed =
                |(generation, _): &(u64, _)| expected.is_some_and(|expected| expected != *generation);
            if sum.as_ref().is_some_and(changed) {
                return Ok(None);
            }
            Ok(Some((plan, cache, pin, granted, sum)))
        });
        let bytes = range.end.saturating_sub(range.start);
        let Some((plan, cache, _pin, granted, mut sum)) = self.reply_ready(begun, bytes, bytes > 0)? else {
            return Err(RequestFailure::Refused);
        };
        self.stream.restart_pace();
        let adding = sum.as_mut().and_then(|(_, sum)| sum.as_mut());
        let mut path = StreamPath { stream: self.stream, range, sum: adding };
        let sent = path.send(self.job(&plan), cache.tensors(), &Progress::default());
        sent.map_err(|error| RequestFailure::Broken(error.with_replaced("of_bytes", bytes)))?;
        self.resources.stats.add_bytes(Op::Served, bytes);
        let Some((generation, sum)) = sum else { return Ok(()) };
        self.answer_with(|| {
            granted.map_or(Ok(()), GrantedRead::finish)?;
            Ok(Reply::Checksums { generation, sums: sum.into_iter().map(WindowSum::value).collect() })
        })
    }

    /// Returns the generation of the entry of `cache`, which has this name. If there is a `digest` of the request, begins a
    /// checksum that is bound to all of these.
    fn stream_sum(
        &self,
        name: Name,
        cache: &Cache,
        digest: Option<Result<u64>>,
    ) -> Result<(u64, Option<WindowSum>)> {
        let generation = self.resources.resolve(name)?.generation;
        let bound = |digest: Result<u64>| Checksums::bound_to(name, cache.id(), generation, digest?);
        let sum = digest.map(|digest| bound(digest).and_then(WindowSum::new));
        Ok((generation, sum.transpose()?))
    }

    /// Reads bytes from the peer's memory into a cache.
    fn fetch(
        &self,
        named: &NamedCache,
        plan: WirePlan,
        (source, num_tensors, tensor_bytes): (&WireLocation, u32, u64),
    ) -> Result<Reply> {
        let plan = CopyPlan::try_from(plan)?;
        let tensors = match self.link.view.tensors(source, num_tensors, tensor_bytes)? {
            Ok(tensors) => tensors,
            Err(reason) => return Ok(Reply::Unreachable { reason: reason.into_owned() }),
        };
        let pinned = self.pinned(named, |cache| {
            plan.check_bounds(Side::Source, (num_tensors, tensor_bytes))?;
            check_plan(&plan, Side::Destination, cache.geometry())?;
            let writes = rows(cache, &plan, Side::Destination)?;
            self.pin(cache, RowUse { writes, ..RowUse::default() }, named)
        })?;
        let Some((cache, pin)) = pinned else { return Ok(Reply::Stale) };
        // Limited by `llm.LinkSilence`, so that a peer whose memory does not respond cannot occupy a thread
        // of this side.
        // It also stops between two units once the link has ended, because the caller no longer keeps the memory for it
        // (`test_push_stops_when_its_link_ends`).
        let link = Arc::downgrade(self.link);
        let wanted = move || {
            let stands = link.upgrade().is_some_and(|link| link.stands());
            ensure(stands, || Error::new(ErrorKind::NotLinked, "the link of the caller has ended"))
        };
        let progress = Arc::new(Progress::within(self.resources.config.links.silence).while_wanted(wanted));
        let to = (cache.tensors(), cache.placement());
        // The pin outlives this call if the kernel may still write to the rows afterwards.
        let read = (&tensors).read(self.job(&plan), to, &progress, Arc::new(pin));
        match read {
            Ok(_) => {
                let bytes = plan.bytes();
                self.resources.stats.add_bytes(Op::Served, bytes);
                Ok(Reply::Done { bytes })
            }
            // The kernel permitted this when the link was made, and refuses it now.
            Err(error) if error.kind() == ErrorKind::NotEnabled => {
                Ok(Reply::Unreachable { reason: error.to_string() })
            }
            Err(error) => Err(with_arrived_rows(error, &progress, &plan, cache.geometry().row_sizes())),
        }
    }
}

/// Decodes a request, and frees its frame.
fn read_frame(
    (kind, body, share): (u8, Vec<u8>, Arc<BudgetShare>),
) -> Result<(Timed<Request>, Arc<BudgetShare>)> {
    let request = share.charged(|| protocol::open(kind, &body))?;
    share.freed(body.len() as u64);
    Ok((request, share))
}

/// Checks that a cache has the tensors of a request for checksums, and that the pairs lie inside them and touch no gap between rows.
/// There are at most [`MAX_CHECKSUMS`], and all together have at most [`MAX_HASHED`] bytes. A single pair may have as many bytes as a
/// tensor, in each tensor. So a request takes a bounded time, even if its caller is gone.
fn check_hashed(plan: &CopyPlan, side: Side, geometry: Geometry) -> Result<()> {
    let pairs = plan.num_pairs();
    ensure(pairs <= MAX_CHECKSUMS, || {
        let text = "a request for checksums asks for too many pairs";
        Error::invalid(text).with("pairs", pairs).with("limit", MAX_CHECKSUMS)
    })?;
    check_plan(plan, side, geometry)?;
    let one = if pairs == 1 { geometry.tensor_bytes() } else { 0 };
    // A plan has at least one tensor.
    let most = (MAX_HASHED / u64::from(plan.num_tensors()).max(1)).max(one);
    let bytes = plan.tensor_bytes();
    ensure(bytes <= most, || {
        let text = "a request for checksums asks for too many bytes";
        Error::invalid(text).with("bytes", bytes).with("limit", most)
    })
}

/// Returns the digest of a request for checksums as this side has understood it. 0 for other requests. `Err` also if its plan
/// is invalid.
fn digest_of_summed(request: &Request) -> Result<u64> {
    let summed = match request {
        Request::Read { summed, .. } => *summed,
        Request::Checksums { .. } => true,
        _ => false,
    };
    if summed { protocol::digest(request) } else { Ok(0) }
}
