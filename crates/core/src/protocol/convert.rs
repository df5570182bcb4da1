//! Converts between the types of the engine and the protocol messages.
//!
//! Received values are checked as far as possible without the cache that they concern. `plan` and `validate`
//! check the bounds; `messages` defines the bytes.

use super::messages::{MAX_ARRIVED, NamedCache, Reply, Run, WireUsedKey};
use crate::error::{ArrivedRows, Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheId, Geometry, GrantEnd, GrantId, Name};

/// Name of the lists of tensor positions in out-of-memory errors.
const TENSORS: &str = "the places of the tensors of a cache";
/// Name of the lists of rows that have arrived in out-of-memory errors.
const ARRIVED: &str = "the rows that have arrived";
/// Maximum number of characters of a peer's text that are kept.
const MAX_TEXT: usize = 4 << 10;

/// Returns the number of an error kind in messages: its position in [`ErrorKind::ALL`], which may only grow
/// at its end.
pub fn kind_number(kind: ErrorKind) -> u8 {
    let position = ErrorKind::ALL.iter().position(|&known| known == kind);
    position.and_then(|at| u8::try_from(at).ok()).unwrap_or(u8::MAX)
}

/// Returns the kind with a number. A kind that only the peer knows becomes [`ErrorKind::System`].
pub fn kind_of(number: u8) -> ErrorKind {
    ErrorKind::ALL.get(usize::from(number)).copied().unwrap_or(ErrorKind::System)
}

/// Returns the kind that an error reported by the peer has in this process. Some kinds describe the process
/// that reports them, and must not be taken for a state of this one.
pub(super) fn local_kind(kind: ErrorKind) -> ErrorKind {
    match kind {
        ErrorKind::Closed | ErrorKind::Interrupted => ErrorKind::NotLinked,
        ErrorKind::Forked => ErrorKind::System,
        ErrorKind::AlreadyLinked | ErrorKind::LinksExist | ErrorKind::UnlinkFailed => ErrorKind::LinkFailed,
        kind => kind,
    }
}

/// Returns a peer's text for use in a message: at most `MAX_TEXT` characters, with control characters replaced
/// by spaces.
pub(super) fn printable(text: &str) -> String {
    let shown = text.chars().take(MAX_TEXT).map(|letter| if letter.is_control() { ' ' } else { letter });
    shown.collect()
}

/// Splits a peer's text about a grant that has ended into what precedes its fact `ended`, and the fact. The text has all facts of the
/// peer, and programs ask for this one.
fn end_of_grant(message: &str) -> Option<(&str, GrantEnd)> {
    let (text, fact) = message.strip_suffix(')')?.rsplit_once(" (ended=")?;
    let why = GrantEnd::ALL.iter().find(|why| why.name() == fact)?;
    Some((text, *why))
}

impl WireUsedKey {
    /// Returns the report that the caller is done with a grant.
    pub fn of_grant(grant: GrantId) -> WireUsedKey {
        let cache = NamedCache { name: Name::Grant(grant), id: CacheId(0) };
        WireUsedKey { cache, first: 0, count: 0 }
    }
}

impl Run {
    /// Packs `numbers` into runs of a constant step.
    pub fn pack(numbers: &[u64]) -> Result<Vec<Run>> {
        let mut runs: Vec<Run> = Vec::new();
        for &number in numbers {
            match runs.last_mut() {
                Some(run) if run.count == 1 => {
                    run.step = number.wrapping_sub(run.start);
                    run.count = 2;
                }
                Some(run) if run.at(run.count) == number && run.count < u32::MAX => run.count += 1,
                _ => fallible::push(TENSORS, &mut runs, Run { start: number, step: 0, count: 1 })?,
            }
        }
        Ok(runs)
    }

    /// Returns the numbers of `runs`. `Err(NotLinked)` unless there are exactly `expected`, a count that must
    /// be known from elsewhere. So a peer cannot make this process allocate a longer list.
    pub fn unpack(runs: &[Run], expected: u32) -> Result<Vec<u64>> {
        let count: u64 = runs.iter().fold(0, |sum, run| sum.saturating_add(u64::from(run.count)));
        if count != u64::from(expected) || expected > Geometry::MAX_TENSORS {
            let text = "the peer sent locations for a different number of tensors than the cache has";
            return Err(Error::new(ErrorKind::NotLinked, text)
                .with("located", count)
                .with("tensors", expected));
        }
        let numbers = runs.iter().flat_map(|run| (0..run.count).map(|k| run.at(k)));
        fallible::collect_growing(TENSORS, expected as usize, numbers)
    }

    fn at(&self, k: u32) -> u64 {
        self.start.wrapping_add(self.step.wrapping_mul(u64::from(k)))
    }
}

impl Reply {
    /// Returns the reply to a request that failed with `error`. The message contains the facts and causes of
    /// the error.
    pub fn failed(error: &Error) -> Reply {
        let rows = error
            .arrived()
            .iter()
            .flat_map(|ArrivedRows { tensor, rows }| rows.iter().map(|rows| (*tensor, rows.start, rows.end)));
        Reply::Failed {
            kind: kind_number(error.kind()),
            message: error.to_string(),
            // Rows beyond the limit, or without memory all rows, are left out. That is safe, because a row that is not listed does
            // not count as arrived.
            arrived: fallible::collect_growing(ARRIVED, 0, rows.take(MAX_ARRIVED)).unwrap_or_default(),
        }
    }

    /// Returns the error for a failure that the peer reported. Without memory for the list, no row counts as arrived.
    pub fn error(kind: u8, message: &str, arrived: &[(u32, u64, u64)]) -> Error {
        let rows = |ranges: &[(u32, u64, u64)]| {
            fallible::collect(ARRIVED, ranges.iter().map(|&(_, from, to)| from..to))
                .map(|rows| ArrivedRows { tensor: ranges[0].0, rows })
        };
        let mut tensors = Vec::new();
        let listed = arrived
            .chunk_by(|(tensor, ..), (next, ..)| tensor == next)
            .try_for_each(|ranges| fallible::push(ARRIVED, &mut tensors, rows(ranges)?));
        let tensors = listed.map_or_else(|_| Vec::new(), |()| tensors);
        let kind = local_kind(kind_of(kind));
        let ended = if kind == ErrorKind::GrantEnded { end_of_grant(message) } else { None };
        let error = match ended {
            Some((text, why)) => Error::new(kind, printable(text)).with("ended", why.name()),
            None => Error::new(kind, printable(message)),
        };
        error.with_arrived(tensors)
    }

    pub fn name(&self) -> &'static str {
        match self {
            Reply::Described(_) => "described",
            Reply::Ready { .. } => "ready",
            Reply::Done { .. } => "done",
            Reply::Stale => "stale",
            Reply::Unreachable { .. } => "unreachable",
            Reply::Failed { .. } => "failed",
            Reply::Located(_) => "located",
            Reply::Checksums { .. } => "checksums",
            Reply::Found { .. } => "found",
        }
    }
}
