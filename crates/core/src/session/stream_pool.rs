//! The streams of calls of one link: those under way, and those kept for the next call.

use std::sync::Arc;
use std::time::Instant;

use crate::error::{Error, ErrorKind};
use crate::net::Stream;

/// Calls of one link that may be under way at a time; more wait their turn.
pub(super) const MOST_CALLS: usize = 64;
/// The call streams of one link.
#[derive(Debug, Default)]
pub(super) struct Calls {
    /// With the time at which each came back; the latest last.
    pub(super) idle: Vec<(Arc<Stream>, Instant)>,
    pub(super) busy: Vec<Arc<Stream>>,
    /// Streams being opened from here.
    pub(super) opening: usize,
    /// Streams the peer was asked to open.
    pub(super) asked: usize,
    /// Calls that wait for a stream.
    pub(super) waiting: usize,
}

impl Calls {
    /// Every stream, for a link that has broken. The idle ones are taken out.
    pub(super) fn end(&mut self) -> Vec<Arc<Stream>> {
        let idle: Vec<_> = self.idle.drain(..).map(|(stream, _)| stream).collect();
        idle.into_iter().chain(self.busy.iter().cloned()).collect()
    }
}

/// A peer that calls on more streams than this side ever would.
#[cold]
pub(super) fn too_many(most: usize) -> Error {
    Error::new(ErrorKind::NotLinked, "the link has too many streams of calls").with("limit", most)
}
