//! The set of call streams of one link: those of calls in progress, and idle ones.

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
    /// Streams that this side is opening.
    pub(super) opening: usize,
    /// Streams that the peer was asked to open.
    pub(super) asked: usize,
    /// Calls that wait for a stream.
    pub(super) waiting: usize,
}

impl StreamSet {
    /// Returns all streams, for a link that has broken. Removes the idle ones.
    pub(super) fn end(&mut self) -> Vec<Arc<Stream>> {
        let idle: Vec<_> = self.idle.drain(..).map(|(stream, _)| stream).collect();
        idle.into_iter().chain(self.busy.iter().cloned()).collect()
    }
}

/// Returns the error for a peer that opens more call streams than the limit allows.
pub(super) fn too_many(most: usize) -> Error {
    Error::new(ErrorKind::NotLinked, "the link has too many streams of calls").with("limit", most)
}
