//! The set of call streams of one link: those of calls in progress, and idle ones.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, ErrorKind};
use crate::net::Stream;

/// Maximum number of calls of one link in progress at a time. Further calls wait.
pub(super) const MOST_CALLS: usize = 64;

/// The call streams of one link.
#[derive(Debug, Default)]
pub(super) struct StreamSet {
    /// Idle streams with the time of their return, most recent last.
    pub(super) idle: Vec<(Arc<Stream>, Instant)>,
    pub(super) busy: Vec<Arc<Stream>>,
    /// Streams that this side is opening: the addresses at which the peer listens, if known.
    pub(super) opening: Vec<Option<IpAddr>>,
    /// Whether the streams lead to different addresses of the listening end.
    several_addresses: bool,
    /// Streams that the peer was asked to open.
    pub(super) asked: usize,
    /// Calls that wait for a stream.
    pub(super) waiting: usize,
}

impl StreamSet {
    /// Returns the number of streams in use, with those that are being opened.
    pub(super) fn in_use(&self) -> usize {
        self.busy.len() + self.opening.len() + self.asked
    }

    /// Returns the number of streams over one address of the listening end, with those that are being opened.
    pub(super) fn count_at(&self, ip: IpAddr) -> usize {
        let idle = self.idle.iter().filter(|(stream, _)| stream.listened_at() == Some(ip)).count();
        self.busy_at(Some(ip)) + idle
    }

    /// Returns the idle stream that a call is to use: the one that was used last, of those over the address with the
    /// fewest calls.
    pub(super) fn next_idle(&self) -> Option<(usize, Arc<Stream>)> {
        let last = self.idle.len().checked_sub(1)?;
        let calls = |at: &usize| self.busy_at(self.idle[*at].0.listened_at());
        let at = if self.several_addresses { (0..=last).rev().min_by_key(calls)? } else { last };
        Some((at, self.idle[at].0.clone()))
    }

    /// Notes that there is another stream.
    pub(super) fn note_address(&mut self, stream: &Stream) {
        let mut others = self.idle.iter().map(|(stream, _)| stream).chain(&self.busy);
        self.several_addresses |= others.any(|other| other.listened_at() != stream.listened_at());
    }

    /// Returns the number of calls over one address, with the streams that are being opened for calls.
    pub(super) fn busy_at(&self, ip: Option<IpAddr>) -> usize {
        let busy = self.busy.iter().map(|stream| stream.listened_at());
        busy.chain(self.opening.iter().copied()).filter(|at| *at == ip).count()
    }

    /// Returns all streams, for a link that has broken. Removes the idle ones.
    pub(super) fn end(&mut self) -> Vec<Arc<Stream>> {
        let idle: Vec<_> = self.idle.drain(..).map(|(stream, _)| stream).collect();
        idle.into_iter().chain(self.busy.iter().cloned()).collect()
    }
}

/// Returns how many of `streams` lead to one address of the listening end.
pub(super) fn count_at(streams: &[Arc<Stream>], ip: IpAddr) -> usize {
    streams.iter().filter(|stream| stream.listened_at() == Some(ip)).count()
}

/// Returns the error for a peer that opens more call streams than the limit allows.
pub(super) fn too_many(most: usize) -> Error {
    Error::new(ErrorKind::NotLinked, "the link has too many streams of calls").with("limit", most)
}
