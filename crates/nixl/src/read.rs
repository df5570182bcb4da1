//! A read: destinations that must be registered, and requests of bounded size.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use llm_datadist_fabric::{Error, Piece};

use crate::limits::{Limits, Pauses};
use crate::readers::Reader;
use crate::request::Request;

/// Maximum number of pieces of one request. NIXL posts a request in one call (measured: about 10 µs for each piece), and the
/// deadline is checked only between calls.
const PIECES: usize = 512;
/// Maximum number of bytes of one request. A status call copies all bytes that have arrived, so this bounds the time between
/// two checks of the deadline.
const BYTES: u64 = 4 << 20;
/// Maximum number of requests in flight: one moves bytes while the next one waits.
const REQUESTS: usize = 2;
/// Two destinations with a smaller gap have no page between them, so one registration covers both.
const GAP: u64 = 4096;

/// Reads all pieces. The agent must be destroyed afterwards unless it is clean (`Reader::is_clean`): bytes may still arrive.
pub(crate) fn read(
    reader: &mut Reader,
    pieces: &[Piece],
    limits: &Limits<'_>,
    drain: Duration,
) -> Result<(), Error> {
    limits.check()?;
    let others = reader.register_mapped(pieces)?;
    let registered = if others.is_empty() { None } else { Some(reader.agent.register(&others)?) };
    reader.has_posted();
    let mut requests = VecDeque::with_capacity(REQUESTS);
    let outcome = transfer(reader, pieces, limits, &mut requests);
    let ended = match &outcome {
        Ok(()) => true,
        Err(Error::DeadlinePassed | Error::Cancelled | Error::Closed) => drained(&mut requests, drain),
        Err(_) => false,
    };
    drop(requests);
    if ended {
        let deregistered = registered.map_or(Ok(()), |registered| reader.agent.deregister(&registered));
        match deregistered {
            Ok(()) => reader.has_ended(),
            // Nothing arrives any more. The end of the agent ends its registrations too.
            Err(error) => {
                tracing::warn!(target: "llm_datadist::links", "NIXL could not deregister the destinations of a read, so the engine destroys its agent: {error}");
            }
        }
    }
    outcome
}

/// Posts requests, and waits until all have ended.
fn transfer<'a>(
    reader: &'a Reader,
    pieces: &[Piece],
    limits: &Limits<'_>,
    requests: &mut VecDeque<Request<'a>>,
) -> Result<(), Error> {
    let (mut rest, mut pauses) = (Rest { pieces, skip: 0 }, Pauses::new());
    loop {
        limits.check()?;
        if requests.len() < REQUESTS && !rest.is_empty() {
            requests.push_back(Request::post(&reader.agent, &reader.peer, rest.next_request())?);
            continue;
        }
        let Some(oldest) = requests.front() else { return Ok(()) };
        if oldest.ended()? {
            requests.pop_front();
            pauses = Pauses::new();
        } else {
            pauses.pause(limits);
        }
    }
}

/// Waits at most `limit` for the requests of a read that is given up. Returns whether all have ended. If so, the agent is kept:
/// destroying it takes as long as this wait, and may abort the process of the peer (docs/networks.md).
fn drained(requests: &mut VecDeque<Request<'_>>, limit: Duration) -> bool {
    let (never, open) = (|| false, AtomicBool::new(false));
    let limits = Limits::new(Some(Instant::now() + limit), &never, &open);
    let mut pauses = Pauses::new();
    while let Some(oldest) = requests.front() {
        match oldest.ended() {
            Ok(true) => drop(requests.pop_front()),
            Ok(false) if limits.check().is_ok() => pauses.pause(&limits),
            Ok(false) | Err(_) => return false,
        }
    }
    true
}

/// The pieces that no request has yet.
struct Rest<'a> {
    pieces: &'a [Piece],
    /// Number of bytes of the first piece that a request has.
    skip: u64,
}

impl Rest<'_> {
    /// Drops empty pieces. Returns whether nothing is left.
    fn is_empty(&mut self) -> bool {
        while self.pieces.first().is_some_and(|piece| piece.len == self.skip) {
            (self.pieces, self.skip) = (&self.pieces[1..], 0);
        }
        self.pieces.is_empty()
    }

    /// Takes the pieces of the next request, and cuts the last one where the request is full.
    fn next_request(&mut self) -> impl Iterator<Item = Piece> {
        let mut room = BYTES;
        std::iter::from_fn(move || {
            if self.is_empty() || room == 0 {
                return None;
            }
            let Piece { local, remote, len } = self.pieces[0];
            let taken = (len - self.skip).min(room);
            let piece = Piece { local: local + self.skip, remote: remote + self.skip, len: taken };
            self.skip += taken;
            room -= taken;
            Some(piece)
        })
        .take(PIECES)
    }
}

/// Returns the ranges that cover these destinations and no whole page beside them.
pub(crate) fn covering(pieces: impl Iterator<Item = Piece>) -> Result<Vec<Range<u64>>, Error> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for Piece { local, len, .. } in pieces {
        if ranges.len() == ranges.capacity() {
            let more = ranges.len().max(64);
            ranges.try_reserve(more).map_err(|_| {
                Error::System("no memory for the list of destinations of a read by NIXL".into())
            })?;
        }
        ranges.push(local..local.saturating_add(len));
    }
    ranges.sort_unstable_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let joins = next.start.saturating_sub(range.end) < GAP;
        if joins {
            range.end = range.end.max(next.end);
        }
        joins
    });
    Ok(ranges)
}
