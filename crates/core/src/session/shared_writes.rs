//! Writes of one peer whose bytes arrive over several streams.
//!
//! The first request of a shared write pins the rows and brings the plan; the other ones name the write and a range of
//! the plan's bytes. The pin lasts until all bytes are in place, one of the parts fails, no part has been arriving for the
//! time that a peer may be silent, the deadline passes or the link ends. No two threads write the same bytes: parts do not
//! overlap, and a plan writes no byte twice (`plan::conflicts`).

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::budget::BudgetShare;
use crate::cache::{Cache, Pin};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::plan::CopyPlan;
use crate::sync::Mutex;

/// Maximum number of shared writes of one link in progress. A caller has at most one in each of its streams, and others
/// whose streams have ended.
const MAX_WRITES: usize = 128;
/// Maximum number of parts of one of them.
const MAX_PARTS: usize = 16;
/// Name of these lists in out-of-memory errors.
const WRITES: &str = "the writes over several streams";

/// The shared writes of one peer.
#[derive(Debug)]
pub(super) struct SharedWrites {
    /// `None` once the link has ended.
    pending: Mutex<Option<Vec<PendingWrite>>>,
    /// How long a write may be without a part that is arriving.
    silence: Duration,
}

#[derive(Debug)]
struct PendingWrite {
    write: Arc<SharedWrite>,
    /// The ranges of bytes that have arrived or are arriving.
    begun: Vec<Range<u64>>,
    /// Number of bytes that have not arrived.
    missing: u64,
    /// Number of parts that are arriving.
    arriving: usize,
    /// When the last part that was arriving ended.
    since: Instant,
}

/// A write whose rows are pinned.
#[derive(Debug)]
pub(super) struct SharedWrite {
    pub(super) id: u64,
    pub(super) plan: CopyPlan,
    pub(super) cache: Arc<Cache>,
    pub(super) deadline: Deadline,
    /// Released with the write, as is the share of the budget for the memory of the plan.
    pub(super) _pin: Pin,
    pub(super) _share: Arc<BudgetShare>,
}

/// A part that is arriving. Dropping it without [`arrived`](Self::arrived) ends the write.
#[derive(Debug)]
pub(super) struct WritePart<'a> {
    writes: &'a SharedWrites,
    write: Arc<SharedWrite>,
    bytes: u64,
    arrived: bool,
}

impl PendingWrite {
    fn is_over(&self, silence: Duration) -> bool {
        self.write.deadline.passed() || (self.arriving == 0 && self.since.elapsed() > silence)
    }
}

impl SharedWrites {
    /// Returns an empty list, of a peer that may be silent for `silence`.
    pub(super) fn new(silence: Duration) -> SharedWrites {
        SharedWrites { pending: Mutex::new(Some(Vec::new())), silence }
    }

    /// Begins a shared write with its first part. Returns `Err` if its number is in use, if the part is empty, if there are
    /// too many writes, or if the link has ended.
    pub(super) fn begin(&self, write: SharedWrite, range: Range<u64>) -> Result<WritePart<'_>> {
        let (missing, write) = (write.plan.bytes(), Arc::new(write));
        let mut begun = fallible::with_capacity(WRITES, 1)?;
        begun.push(range.clone());
        self.trim();
        let mut pending = self.pending.lock();
        let writes = pending.as_mut().ok_or_else(ended_link)?;
        if range.is_empty() {
            return Err(Error::argument("the range of the first part", "0 bytes", "at least one byte"));
        }
        if writes.iter().any(|other| other.write.id == write.id) {
            let allowed = "one that no write in progress has";
            return Err(Error::argument("the number of a write", write.id, allowed));
        }
        if writes.len() >= MAX_WRITES {
            let text = "the link has too many writes over several streams";
            return Err(Error::new(ErrorKind::NotLinked, text).with("limit", MAX_WRITES));
        }
        fallible::grow(WRITES, writes, 1)?;
        writes.push(PendingWrite {
            write: write.clone(),
            begun,
            missing,
            arriving: 1,
            since: Instant::now(),
        });
        drop(pending);
        Ok(WritePart { writes: self, write, bytes: range.end - range.start, arrived: false })
    }

    /// Begins a further part. Returns `Err` if there is no such write any more, or if `range` overlaps another part or
    /// is not within the plan.
    pub(super) fn part(&self, id: u64, range: Range<u64>) -> Result<WritePart<'_>> {
        self.trim();
        let mut pending = self.pending.lock();
        let writes = pending.as_mut().ok_or_else(ended_link)?;
        let Some(write) = writes.iter_mut().find(|pending| pending.write.id == id) else {
            let text = "no write with this number is in progress: it is complete, a part of it failed, or its time is over";
            return Err(Error::new(ErrorKind::NotLinked, text).with("write", id));
        };
        let (overlaps, bytes) = (
            |other: &Range<u64>| range.start < other.end && other.start < range.end,
            write.write.plan.bytes(),
        );
        if range.is_empty() || range.end > bytes || write.begun.iter().any(overlaps) {
            let range = format_args!("{} to {}", range.start, range.end);
            let allowed = format!("bytes of the plan that no other part has, below {bytes}");
            return Err(Error::argument("the range of a part", range, allowed));
        }
        if write.begun.len() >= MAX_PARTS {
            let text = "the write has too many parts";
            return Err(Error::new(ErrorKind::NotLinked, text).with("limit", MAX_PARTS));
        }
        fallible::grow(WRITES, &mut write.begun, 1)?;
        write.begun.push(range.clone());
        write.arriving += 1;
        let write = write.write.clone();
        drop(pending);
        Ok(WritePart { writes: self, write, bytes: range.end - range.start, arrived: false })
    }

    /// Whether a write waits for parts.
    pub(super) fn any(&self) -> bool {
        self.pending.lock().as_ref().is_some_and(|writes| !writes.is_empty())
    }

    /// Ends the writes whose time is over. A write with a part that is still arriving keeps its pin until that part ends.
    pub(super) fn trim(&self) {
        let mut over = Vec::new();
        if let Some(writes) = &mut *self.pending.lock() {
            let count = writes.iter().filter(|write| write.is_over(self.silence)).count();
            if count > 0 && over.try_reserve(count).is_ok() {
                over.extend(writes.extract_if(.., |write| write.is_over(self.silence)).take(count));
            }
        }
        // Without the lock, because that frees rows.
        drop(over);
    }

    /// Ends all writes, for a link that has broken. No write begins afterwards.
    pub(super) fn end(&self) {
        let ended = self.pending.lock().take();
        drop(ended);
    }

    fn end_part(&self, part: &WritePart<'_>) {
        let mut pending = self.pending.lock();
        let Some(writes) = pending.as_mut() else { return };
        let Some(at) = writes.iter().position(|write| Arc::ptr_eq(&write.write, &part.write)) else { return };
        let write = &mut writes[at];
        (write.arriving, write.since) = (write.arriving - 1, Instant::now());
        write.missing -= if part.arrived { part.bytes } else { 0 };
        let ended = (!part.arrived || write.missing == 0).then(|| writes.swap_remove(at));
        drop(pending);
        drop(ended);
    }
}

impl WritePart<'_> {
    pub(super) fn write(&self) -> &SharedWrite {
        &self.write
    }

    /// Notes that the bytes are in place. If those of all other parts are too, the rows are free once these have ended.
    pub(super) fn arrived(mut self) {
        self.arrived = true;
    }
}

impl Drop for WritePart<'_> {
    fn drop(&mut self) {
        self.writes.end_part(self);
    }
}

fn ended_link() -> Error {
    Error::new(ErrorKind::NotLinked, "the link has ended")
}
