//! The set of call streams of one link: those of calls in progress, and idle ones.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::handshake::HANDSHAKE_TIME;
use crate::error::{Error, ErrorKind};
use crate::net::Stream;

/// Maximum number of calls of one link in progress at a time. Further calls wait.
pub(super) const MOST_CALLS: usize = 64;

/// How long this side expects a stream after a request: twice the handshake limit, so that the peer has time to start a dial.
const DIAL_LIMIT: Duration = HANDSHAKE_TIME.saturating_mul(2);

/// The call streams of one link.
#[derive(Debug, Default)]
pub(super) struct StreamSet {
    /// Idle streams with the time of their return: first those without rings, then those with rings, each most recent last.
    pub(super) idle: Vec<(Arc<Stream>, Instant)>,
    pub(super) busy: Vec<Arc<Stream>>,
    /// Streams that this side is opening: the addresses at which the peer listens, if known.
    pub(super) opening: Vec<Option<IpAddr>>,
    /// Whether the streams lead to different addresses of the listening end.
    several_addresses: bool,
    /// The requests for streams that the peer has not opened yet, the oldest first: a number, and when each was made.
    asked: VecDeque<(u64, Instant)>,
    last_request: u64,
    /// Calls that wait for a stream.
    pub(super) waiting: usize,
}

impl StreamSet {
    /// Returns the number of streams in use, with those that are being opened.
    pub(super) fn in_use(&self) -> usize {
        self.busy.len() + self.opening.len() + self.asked.len()
    }

    /// Records a request for one more stream, unless there are as many requests as waiting calls. Returns its number.
    pub(super) fn ask(&mut self) -> Option<u64> {
        if self.asked.len() >= self.waiting {
            return None;
        }
        self.last_request += 1;
        self.asked.push_back((self.last_request, Instant::now()));
        Some(self.last_request)
    }

    /// Forgets a request whose stream has not arrived, so that the next call makes another one.
    pub(super) fn take_back(&mut self, request: u64) {
        self.asked.retain(|&(number, _)| number != request);
    }

    /// Forgets requests that are older than [`DIAL_LIMIT`]. Their calls have found another stream. Returns how long the oldest of
    /// the others is still expected.
    pub(super) fn forget_late_requests(&mut self) -> Option<Duration> {
        self.asked.retain(|(_, since)| since.elapsed() < DIAL_LIMIT);
        self.asked.front().map(|(_, since)| DIAL_LIMIT.saturating_sub(since.elapsed()))
    }

    /// Removes the oldest request, because a stream has arrived. Returns `false` if there is none.
    pub(super) fn fulfil_request(&mut self) -> bool {
        self.asked.pop_front().is_some()
    }

    /// Returns the number of streams over one address of the listening end, with those that are being opened.
    pub(super) fn count_at(&self, ip: IpAddr) -> usize {
        let idle = self.idle.iter().filter(|(stream, _)| stream.about.listened_at == Some(ip)).count();
        self.busy_at(Some(ip)) + idle
    }

    /// Returns the idle stream that a call is to use: the one that was used last, of those over the address with the
    /// fewest calls.
    pub(super) fn next_idle(&self) -> Option<(usize, Arc<Stream>)> {
        let last = self.idle.len().checked_sub(1)?;
        let calls = |at: &usize| self.busy_at(self.idle[*at].0.about.listened_at);
        let at = if self.several_addresses { (0..=last).rev().min_by_key(calls)? } else { last };
        Some((at, self.idle[at].0.clone()))
    }

    /// Returns the number of streams with rings.
    pub(super) fn ringed(&self) -> usize {
        let streams = self.idle.iter().map(|(stream, _)| stream).chain(&self.busy);
        streams.filter(|stream| stream.has_rings()).count()
    }

    /// Keeps a stream for later calls. Those with rings are taken first.
    pub(super) fn put_idle(&mut self, stream: Arc<Stream>) {
        let others = self.idle.iter().rposition(|(idle, _)| !idle.has_rings());
        let at = if stream.has_rings() { self.idle.len() } else { others.map_or(0, |last| last + 1) };
        self.idle.insert(at, (stream, Instant::now()));
    }

    /// Removes the idle streams over the address of a stream whose call ended early, because that network may be cut. If the
    /// peer has one address, they stay: the heartbeat detects that it is gone.
    pub(super) fn leave_address(&mut self, stream: &Stream) -> Vec<Arc<Stream>> {
        if !self.several_addresses {
            return Vec::new();
        }
        let left = self.idle.extract_if(.., |(idle, _)| idle.about.listened_at == stream.about.listened_at);
        left.map(|(idle, _)| idle).collect()
    }

    /// Notes that there is another stream.
    pub(super) fn note_address(&mut self, stream: &Stream) {
        let mut others = self.idle.iter().map(|(stream, _)| stream).chain(&self.busy);
        self.several_addresses |= others.any(|other| other.about.listened_at != stream.about.listened_at);
    }

    /// Returns the number of calls over one address, with the streams that are being opened for calls.
    pub(super) fn busy_at(&self, ip: Option<IpAddr>) -> usize {
        let busy = self.busy.iter().map(|stream| stream.about.listened_at);
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
    streams.iter().filter(|stream| stream.about.listened_at == Some(ip)).count()
}

/// Returns the error for a peer that opens more call streams than the limit allows.
pub(super) fn too_many(most: usize) -> Error {
    Error::new(ErrorKind::NotLinked, "the link has too many streams of calls").with("limit", most)
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::net::About;

    /// A stream whose listening end has the address 10.0.0.`last`.
    fn stream(last: u8) -> Arc<Stream> {
        let about = About {
            transport: "test",
            peer: String::new(),
            listened_at: Some(IpAddr::from([10, 0, 0, last])),
            same_host: false,
            carries_descriptors: false,
            credentials: None,
        };
        Arc::new(Stream::new(OwnedFd::from(UnixStream::pair().unwrap().0), about))
    }

    /// Returns the last bytes of the addresses that calls get which begin one after the other.
    fn taken(mut set: StreamSet) -> Vec<u8> {
        let mut taken = Vec::new();
        while let Some((at, stream)) = set.next_idle() {
            set.idle.remove(at);
            let Some(IpAddr::V4(ip)) = stream.about.listened_at else { unreachable!("an IPv4 address") };
            taken.push(ip.octets()[3]);
            set.busy.push(stream);
        }
        taken
    }

    fn set(idle: &[u8], busy: &[u8]) -> StreamSet {
        let mut set = StreamSet::default();
        for last in idle {
            let stream = stream(*last);
            set.note_address(&stream);
            set.idle.push((stream, Instant::now()));
        }
        set.busy.extend(busy.iter().map(|last| stream(*last)));
        set
    }

    #[test]
    fn a_request_is_met_once_or_taken_back_by_the_call_that_made_it() {
        let mut set = StreamSet { waiting: 1, ..StreamSet::default() };
        let request = set.ask().unwrap();
        assert_eq!((set.ask(), set.in_use()), (None, 1));
        set.waiting = 2;
        let other = set.ask().unwrap();
        assert!(set.fulfil_request() && set.fulfil_request() && !set.fulfil_request());
        set.take_back(other);
        let again = set.ask().unwrap();
        set.take_back(request);
        assert_eq!(set.in_use(), 1, "only its own request");
        set.take_back(again);
        assert!(!set.fulfil_request());
        assert_eq!(set.forget_late_requests(), None);
        set.asked.push_back((100, Instant::now().checked_sub(DIAL_LIMIT).unwrap()));
        set.ask().unwrap();
        assert!(set.forget_late_requests().is_some_and(|left| left <= DIAL_LIMIT));
        assert_eq!(set.in_use(), 1);
    }

    #[test]
    fn calls_are_spread_over_addresses() {
        assert_eq!(taken(set(&[1, 1, 2, 2], &[])), [2, 1, 2, 1]);
        assert_eq!(taken(set(&[2, 1, 1, 1], &[1, 1])), [2, 1, 1, 1]);
        assert_eq!(taken(set(&[1, 2, 3], &[3, 2])), [1, 3, 2]);
    }

    #[test]
    fn streams_over_an_address_that_failed_are_left() {
        let mut several = set(&[1, 2, 1, 3], &[]);
        assert_eq!(several.leave_address(&stream(1)).len(), 2);
        assert_eq!(taken(several), [3, 2]);
        assert!(set(&[1, 1], &[]).leave_address(&stream(1)).is_empty());
    }

    #[test]
    fn the_stream_that_was_used_last_is_the_next() {
        let set = set(&[1, 1, 1], &[1]);
        assert_eq!(set.next_idle().map(|(at, _)| at), Some(2));
        assert!(StreamSet::default().next_idle().is_none());
    }
}
