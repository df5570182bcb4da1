//! Writes of one peer whose bytes arrive over several streams.
//!
//! The first request of a shared write pins the rows and brings the plan; the other ones name the write and a range of
//! the plan's bytes. The pin lasts until all bytes are in place, one of the parts fails, the deadline passes or the link
//! ends. The parts cannot overlap, so no two threads write the same bytes.

use std::ops::Range;
use std::sync::Arc;

use super::limits::BudgetShare;
use crate::cache::{Cache, Pin};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::Deadline;
use crate::plan::CopyPlan;
use crate::sync::Mutex;

/// Maximum number of shared writes of one link in progress.
const MOST_WRITES: usize = 64;
/// Maximum number of parts of one of them.
const MOST_PARTS: usize = 16;
/// Name of these lists in out-of-memory errors.
const WRITES: &str = "the writes over several streams";

/// The shared writes of one peer.
#[derive(Debug, Default)]
pub(super) struct SharedWrites(Mutex<Vec<PendingWrite>>);

#[derive(Debug)]
struct PendingWrite {
    write: Arc<SharedWrite>,
    /// The ranges of bytes that have arrived or are arriving.
    begun: Vec<Range<u64>>,
    /// Number of bytes that have not arrived.
    missing: u64,
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
    pub(super) _held: BudgetShare,
}

/// A part that is arriving. Dropping it without [`arrived`](Self::arrived) ends the write.
#[derive(Debug)]
pub(super) struct WritePart<'a> {
    writes: &'a SharedWrites,
    write: Arc<SharedWrite>,
    bytes: u64,
    arrived: bool,
}

impl SharedWrites {
    /// Begins a shared write with its first part. Returns `Err` if its number is in use, or if there are too many.
    pub(super) fn begin(&self, write: SharedWrite, range: Range<u64>) -> Result<WritePart<'_>> {
        let missing = write.plan.bytes();
        let write = Arc::new(write);
        let mut begun = fallible::with_capacity(WRITES, 1)?;
        begun.push(range.clone());
        let ended = self.end_late();
        let mut writes = self.0.lock();
        if writes.iter().any(|entry| entry.write.id == write.id) {
            return Err(Error::argument(
                "the number of a write",
                write.id,
                "one that no write in progress has",
            ));
        }
        if writes.len() >= MOST_WRITES {
            let text = "the link has too many writes over several streams";
            return Err(Error::new(ErrorKind::NotLinked, text).with("limit", MOST_WRITES));
        }
        fallible::grow(WRITES, &mut writes, 1)?;
        writes.push(PendingWrite { write: write.clone(), begun, missing });
        drop(writes);
        drop(ended);
        Ok(WritePart { writes: self, write, bytes: range.end - range.start, arrived: false })
    }

    /// Begins a further part. Returns `Err` if there is no such write any more, or if `range` overlaps another part or
    /// is not within the plan.
    pub(super) fn part(&self, id: u64, range: Range<u64>) -> Result<WritePart<'_>> {
        let mut writes = self.0.lock();
        let Some(entry) =
            writes.iter_mut().find(|entry| entry.write.id == id && !entry.write.deadline.passed())
        else {
            let text = "the write has ended: one of its other parts failed, or its time is over";
            return Err(Error::new(ErrorKind::NotLinked, text).with("write", id));
        };
        let overlaps = |other: &Range<u64>| range.start < other.end && other.start < range.end;
        if range.is_empty() || range.end > entry.write.plan.bytes() || entry.begun.iter().any(overlaps) {
            let allowed =
                format!("bytes of the plan that no other part has, below {}", entry.write.plan.bytes());
            let range = format_args!("{} to {}", range.start, range.end);
            return Err(Error::argument("the range of a part", range, allowed));
        }
        if entry.begun.len() >= MOST_PARTS {
            return Err(
                Error::new(ErrorKind::NotLinked, "the write has too many parts").with("limit", MOST_PARTS)
            );
        }
        fallible::grow(WRITES, &mut entry.begun, 1)?;
        entry.begun.push(range.clone());
        let write = entry.write.clone();
        Ok(WritePart { writes: self, write, bytes: range.end - range.start, arrived: false })
    }

    /// Ends the writes whose deadline has passed. Those that still have a part on its way keep their pins until it has
    /// ended.
    pub(super) fn trim(&self) {
        drop(self.end_late());
    }

    /// Ends all writes, for a link that has broken.
    pub(super) fn end(&self) {
        let ended = std::mem::take(&mut *self.0.lock());
        drop(ended);
    }

    /// Removes the writes whose deadline has passed. The caller drops them without the lock, because that frees rows.
    fn end_late(&self) -> Vec<PendingWrite> {
        let mut writes = self.0.lock();
        let late = writes.iter().filter(|entry| entry.write.deadline.passed()).count();
        let mut ended = Vec::new();
        if late > 0 && ended.try_reserve(late).is_ok() {
            ended.extend(writes.extract_if(.., |entry| entry.write.deadline.passed()).take(late));
        }
        ended
    }

    fn end_part(&self, part: &WritePart<'_>) {
        let mut writes = self.0.lock();
        let Some(at) = writes.iter().position(|entry| Arc::ptr_eq(&entry.write, &part.write)) else { return };
        let entry = &mut writes[at];
        entry.missing -= if part.arrived { part.bytes } else { 0 };
        let ended = (!part.arrived || entry.missing == 0).then(|| writes.swap_remove(at));
        drop(writes);
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
