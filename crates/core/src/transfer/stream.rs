//! Transfers through streams: one request and one stream of bytes, or, for large ones, several.
//!
//! Each part of a pull names the whole plan and the range of it that it carries, so no part depends on another. The parts
//! of a push share the pin of the first one, because the owner pins whole rows, and each part may write to all rows.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::call::{Call, Moved};
use crate::checksums::Checksums;
use crate::copy::{DataPath, PathKind, Progress, StreamPath, WindowSum, with_copied_bytes};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Verify;
use crate::plan::CopyPlan;
use crate::protocol::{MAX_AHEAD, NamedCache, Reply, Request, WirePlan, digest};
use crate::session::{KnownCache, REPORTED_BY, StreamLease, send_message_before};
use crate::sync::Mutex;

/// Minimum size of a part in bytes: a stream moves this many while another one is being requested.
const PART: u64 = 8 << 20;

/// How long a call waits for each stream beyond its first one.
const FURTHER_STREAM: Duration = Duration::from_secs(1);

/// Maximum number of spans and pairs of a plan that is sent with each part: some 300 KiB.
const MAX_ENTRIES_OF_PARTS: usize = 1 << 16;

/// Name of the list of streams in out-of-memory errors.
const STREAMS: &str = "the streams of a transfer";

/// Maximum number of pieces in one tensor of a plan whose bytes follow their request at once.
const MAX_PIECES_AHEAD: u64 = 128;

/// One transfer through streams.
pub(super) struct Streams {
    pub(super) call: Call,
    pub(super) known: Arc<KnownCache>,
    pub(super) plan: CopyPlan,
}

/// Returns the path of a transfer over these streams. Those without rings are slower, so they decide.
fn path(leases: &[StreamLease]) -> PathKind {
    if leases.iter().all(|lease| lease.stream().has_rings()) { PathKind::Rings } else { PathKind::Sockets }
}

impl Streams {
    /// Receives the bytes of the plan into the local cache through `first`, or a stream that this waits for, and further streams.
    /// Also returns the path that they took.
    pub(super) fn receive(
        self,
        first: Option<StreamLease>,
        progress: Arc<Progress>,
    ) -> Result<(Moved, PathKind)> {
        let leases = self.leases(first)?;
        let path = path(&leases);
        let moved = progress.clone();
        let part = move |streams: &Streams, lease, range| streams.receive_range(lease, range, &progress);
        Ok((self.in_parts(leases, &moved, part)?, path))
    }

    /// Returns the streams for the parts of the transfer. The first is `first` if given; otherwise this waits for one. It waits
    /// at most [`FURTHER_STREAM`] for each other one, because a call whose rows are pinned at the owner must not wait for
    /// streams of calls that wait for these rows.
    fn leases(&self, first: Option<StreamLease>) -> Result<Vec<StreamLease>> {
        let (link, deadline) = (&self.call.link, self.call.deadline);
        let most = self.max_parts();
        let mut leases = fallible::with_capacity(STREAMS, most)?;
        // Until a request is sent, the next call can use the stream.
        let unused = |mut lease: StreamLease| {
            lease.reusable = true;
            lease
        };
        leases.push(unused(first.map_or_else(|| link.lease(deadline), Ok)?));
        while leases.len() < most {
            match link.lease(deadline.at_most(FURTHER_STREAM)) {
                Ok(lease) => leases.push(unused(lease)),
                Err(error) if error.kind() == ErrorKind::Interrupted => return Err(error),
                Err(_) => break,
            }
        }
        Ok(leases)
    }

    /// Returns the largest number of streams for the transfer.
    fn max_parts(&self) -> usize {
        // Each part of a pull sends the plan.
        if self.plan.num_entries() > MAX_ENTRIES_OF_PARTS {
            return 1;
        }
        let most = self.call.resources.config.links.max_streams(self.call.link.calls.addresses());
        usize::try_from(self.plan.bytes() / PART).unwrap_or(usize::MAX).clamp(1, most)
    }

    /// Runs `part` for the whole plan, or for as many ranges of it at the same time as there are streams. `moved` counts the bytes of
    /// all ranges.
    fn in_parts(
        self,
        mut leases: Vec<StreamLease>,
        moved: &Progress,
        part: impl Fn(&Streams, StreamLease, Range<u64>) -> Result<Moved> + Send + Sync + 'static,
    ) -> Result<Moved> {
        let bytes = self.plan.bytes();
        if leases.len() == 1
            && let Some(lease) = leases.pop()
        {
            return part(&self, lease, 0..bytes);
        }
        let each = bytes.div_ceil(leases.len() as u64);
        let (deadline, resources) = (self.call.deadline, self.call.resources.clone());
        // Whether the owner reported, for any part, that the cache has changed.
        let stale = Arc::new(AtomicBool::new(false));
        let changed = stale.clone();
        // Whether it is unknown, for any part, whether its bytes are equal to their source.
        let compare = Arc::new(AtomicBool::new(false));
        let unknown = compare.clone();
        // The first stream is that of the first part, whose request may have been sent.
        let leases = fallible::collect(STREAMS, leases.into_iter().map(|lease| Mutex::new(Some(lease))))?;
        let work = move |index: usize| {
            let from = index as u64 * each;
            let current = self.call.execution.as_ref().map(|execution| execution.on_this_thread(deadline));
            let (_current, deadline) = current.unzip();
            let call = Call { deadline: deadline.unwrap_or(self.call.deadline), ..self.call.clone() };
            let streams = Streams { call, known: self.known.clone(), plan: self.plan.clone() };
            let Some(lease) = leases.get(index).and_then(|lease| lease.lock().take()) else { return Ok(()) };
            match part(&streams, lease, from..(from + each).min(bytes))? {
                Moved::Equal(_) => {}
                Moved::Bytes(_) => unknown.store(true, Ordering::Release),
                Moved::Stale => changed.store(true, Ordering::Release),
            }
            Ok(())
        };
        let units = usize::try_from(bytes.div_ceil(each)).unwrap_or(usize::MAX);
        let ended = resources.copy_engine.streamers().run(Arc::new(work), units, deadline);
        ended.map_err(|error| {
            // The other parts went on after the first one had failed, which may have moved nothing.
            if error.fact("copied_bytes").is_some() {
                error.with_replaced("copied_bytes", moved.bytes())
            } else if moved.bytes() == 0 || error.fact(REPORTED_BY).is_some() {
                error
            } else {
                with_copied_bytes(error, moved, bytes)
            }
        })?;
        Ok(match (stale.load(Ordering::Acquire), compare.load(Ordering::Acquire)) {
            (true, _) => Moved::Stale,
            (false, true) => Moved::Bytes(bytes),
            (false, false) => Moved::Equal(bytes),
        })
    }

    /// Sends one request and receives its bytes into place.
    fn receive_range(
        &self,
        mut lease: StreamLease,
        range: Range<u64>,
        progress: &Arc<Progress>,
    ) -> Result<Moved> {
        let bytes = range.end - range.start;
        let summed = self.is_summed();
        let request = Request::Read {
            cache: NamedCache { name: self.call.name_to_read(&self.known), id: self.known.cache },
            // The caller's name may be that of another cache by now.
            generation: self.known.granted.is_some().then_some(self.known.at.generation),
            plan: WirePlan::try_from(&self.plan)?,
            range: range.clone(),
            summed,
        };
        let mut sum = if summed { Some(self.sum(&request)?) } else { None };
        lease.reusable = false;
        if !self.ready(&mut lease, &request, bytes)? {
            return Ok(Moved::Stale);
        }
        let to = (self.call.local.tensors(), self.call.local.placement());
        let mut path = StreamPath { stream: lease.stream(), range, sum: sum.as_mut() };
        // The call holds the pins until this returns.
        let received = path.read(self.call.job(&self.plan), to, progress, Arc::new(()));
        received.map_err(|error| self.late_or(error))?;
        let mut equal = false;
        if self.known.granted.is_some() || sum.is_some() {
            let sent =
                self.call.link.reply(&lease, self.call.deadline).map_err(|error| self.late_or(error))?;
            let Reply::Checksums { generation, sums } = sent else {
                return self.stale(&mut lease, sent).map(|()| Moved::Stale);
            };
            let unchanged = generation == self.known.at.generation;
            equal = unchanged && sum.is_some_and(|sum| sums[..] == [sum.value()]);
        }
        lease.reusable = true;
        Ok(if equal { Moved::Equal(bytes) } else { Moved::Bytes(bytes) })
    }

    /// Whether the bytes are hashed when they arrive, because the call compares all of them. What is in memory of a device is
    /// compared afterwards.
    fn is_summed(&self) -> bool {
        let host = self.call.local.tensors().host_addressable();
        self.call.verify == Verify::Full && host
    }

    /// Begins the checksum of the bytes that answer `request`.
    fn sum(&self, request: &Request) -> Result<WindowSum> {
        let (name, KnownCache { cache, at, .. }) = (self.call.name_to_read(&self.known), &*self.known);
        WindowSum::new(Checksums::bound_to(name, *cache, at.generation, digest(request)?)?)
    }

    /// Sends the bytes of the plan from the local cache, and receives the reply that they are in place. Also returns the path that
    /// they took.
    pub(super) fn send(self, first: Option<StreamLease>, sent: Arc<Progress>) -> Result<(Moved, PathKind)> {
        let mut leases = self.leases(first)?;
        let path = path(&leases);
        let shared = (leases.len() > 1).then(|| self.call.link.calls.next_write());
        if shared.is_some() {
            let each = self.plan.bytes().div_ceil(leases.len() as u64);
            let request = self.write(0..each, false, shared)?;
            leases[0].reusable = false;
            if !self.ready(&mut leases[0], &request, each)? {
                return Ok((Moved::Stale, path));
            }
        }
        let moved = sent.clone();
        let part = move |streams: &Streams, lease, range| streams.send_part(shared, lease, range, &sent);
        Ok((self.in_parts(leases, &moved, part)?, path))
    }

    /// Sends the bytes of a range on one stream: a part of a shared write, for whose first part the owner is ready, or all
    /// bytes. Few bytes follow the request without waiting for a reply, which takes one round trip instead of two
    /// (`few_bytes_follow_their_request`).
    fn send_part(
        &self,
        shared: Option<u64>,
        mut lease: StreamLease,
        range: Range<u64>,
        sent: &Progress,
    ) -> Result<Moved> {
        let (deadline, bytes) = (self.call.deadline, range.end - range.start);
        lease.reusable = false;
        let ahead = shared.is_none() && self.ahead(bytes);
        let request = match shared {
            None => Some(self.write(range.clone(), ahead, None)?),
            Some(_) if range.start == 0 => None,
            Some(write) => Some(Request::WritePart { write, range: range.clone() }),
        };
        let answer = match &request {
            Some(request) if ahead => self.call.link.exchange_with(&lease, deadline, || {
                send_message_before(lease.stream(), &self.call.link.timed(request, deadline), deadline)
                    .and_then(|()| self.send_range(&lease, range, sent))
            }),
            Some(request) if !self.ready(&mut lease, request, bytes)? => return Ok(Moved::Stale),
            _ => self.send_range(&lease, range, sent).and_then(|()| self.call.link.reply(&lease, deadline)),
        };
        self.sent(lease, answer)
    }

    fn write(&self, range: Range<u64>, ahead: bool, shared: Option<u64>) -> Result<Request> {
        Ok(Request::Write {
            cache: NamedCache { name: self.call.name_of(&self.known), id: self.known.cache },
            plan: WirePlan::try_from(&self.plan)?,
            range,
            ahead,
            shared,
        })
    }

    fn send_range(&self, lease: &StreamLease, range: Range<u64>, sent: &Progress) -> Result<()> {
        let mut path = StreamPath { stream: lease.stream(), range, sum: None };
        path.send(self.call.job(&self.plan), self.call.local.tensors(), sent)
    }

    /// Takes the answer to a write whose bytes were sent.
    fn sent(&self, mut lease: StreamLease, answer: Result<Reply>) -> Result<Moved> {
        match answer.map_err(|error| self.late_or(error))? {
            Reply::Done { bytes } => {
                lease.reusable = true;
                Ok(Moved::Bytes(bytes))
            }
            other => self.stale(&mut lease, other).map(|()| Moved::Stale),
        }
    }

    /// Whether `bytes` bytes of the plan may follow their request without waiting for a reply.
    fn ahead(&self, bytes: u64) -> bool {
        bytes <= MAX_AHEAD && self.plan.num_pieces() <= MAX_PIECES_AHEAD
    }

    /// Sends the request, and waits until the peer is ready for its `bytes`. Returns `false` if the remote cache has
    /// changed.
    fn ready(&self, lease: &mut StreamLease, request: &Request, bytes: u64) -> Result<bool> {
        match self.call.link.exchange(lease, request, self.call.deadline)? {
            Reply::Ready { bytes: ready } if ready == bytes => Ok(true),
            other => self.stale(lease, other).map(|()| false),
        }
    }

    /// Error of a stream that failed: a timeout if the deadline has passed and the peer only noticed it
    /// first.
    fn late_or(&self, error: Error) -> Error {
        let late =
            error.kind() == ErrorKind::NotLinked && self.call.deadline.passed() && self.call.link.alive();
        let error = self.call.link.break_reason_or(error);
        if late { self.call.deadline.error("moving bytes through a stream").because(error) } else { error }
    }

    /// Handles a reply other than the expected one: `Ok` if the remote cache has changed, otherwise an error.
    fn stale(&self, lease: &mut StreamLease, reply: Reply) -> Result<()> {
        // The peer waits for the next request, so the stream remains usable.
        lease.reusable = matches!(reply, Reply::Stale | Reply::Failed { .. });
        match self.call.link.refusal(reply)? {
            Reply::Stale => Ok(()),
            reply => Err(self.call.link.unexpected(&reply)),
        }
    }
}
