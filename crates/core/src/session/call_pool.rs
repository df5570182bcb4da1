//! The calls of this side over one link: a stream for each call in progress, and idle streams for later calls.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::dial::Dialer;
use super::handshake::HANDSHAKE_TIME;
use super::peer_addresses::FurtherAddress;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::{Address, Stream};
use crate::sync::{Condvar, Mutex, OnDrop};

/// Maximum number of calls of one link in progress at a time. Further calls wait.
pub(super) const MAX_CALLS: usize = 64;
/// Maximum number of call streams with rings of a link in each direction. Each costs memory, and only many simultaneous calls
/// need more streams.
pub(super) const RINGED: usize = 4;
/// How long calls keep to streams without rings after an attempt to get rings has failed.
const RETRY_TIME: Duration = Duration::from_secs(30);
/// Maximum number of idle streams kept for later calls.
const MAX_IDLE_STREAMS: usize = 32;
/// Idle streams that are kept without a time limit.
const IDLE_STREAMS: usize = 2;
/// How long further idle streams are kept.
const IDLE_TIME: Duration = Duration::from_secs(30);
/// How long this side expects a stream after a request: twice the handshake limit, so that the peer has time to start a dial.
const DIAL_LIMIT: Duration = HANDSHAKE_TIME.saturating_mul(2);

/// The calls of this side over one link: their streams, and the number of pulls and pushes. [`end`](Self::end) closes the streams.
#[derive(Debug, Default)]
pub(crate) struct CallPool {
    /// Opens call streams. `None` if only the peer can dial; then this side asks the peer to open one.
    dialer: Option<Dialer>,
    streams: Mutex<StreamSet>,
    /// Notified when a stream is returned or arrives, the link breaks, or the last transfer of an unlink ends.
    changed: Condvar,
    /// When and why the last attempt to give a stream rings failed; `None` if it succeeded.
    rings_refused: Mutex<Option<(Instant, String)>>,
    /// Pulls and pushes in progress.
    active: AtomicUsize,
    /// Whether new transfers are refused because the link is about to be unlinked.
    unlinking: AtomicBool,
    /// Number of the next write over several streams.
    next_write: AtomicU64,
}

/// What a waiting call receives: an idle stream, or the right to open one.
pub(super) enum StreamPermit<'a> {
    Idle(Arc<Stream>),
    /// At a further address of the peer, or at the main one.
    Dial(&'a Dialer, Option<&'a FurtherAddress>),
}

impl CallPool {
    pub(super) fn new(dialer: Option<Dialer>) -> CallPool {
        CallPool { dialer, ..CallPool::default() }
    }

    /// Returns the dialer that opens call streams; `None` if only the peer can open them.
    pub(super) fn dialer(&self) -> Option<&Dialer> {
        self.dialer.as_ref()
    }

    /// Returns the number of addresses over which this side opens streams.
    pub(crate) fn addresses(&self) -> usize {
        self.dialer.as_ref().map_or(1, |dialer| dialer.addresses.count())
    }

    /// Waits for a stream, or for the right to open one, which [`opened`](Self::opened) ends. `ask` has the peer open a stream.
    /// Further addresses of the peer count only if `spread` is set. Returns `None` if the link is not `alive`.
    pub(super) fn take(
        &self,
        alive: impl Fn() -> bool,
        ask: impl Fn() -> Result<()>,
        deadline: Deadline,
        spread: bool,
    ) -> Result<Option<StreamPermit<'_>>> {
        let mut streams = self.streams.lock();
        streams.waiting += 1;
        let mut request = None;
        let permit = loop {
            if !alive() {
                break Ok(None);
            }
            let late = streams.forget_late_requests().unwrap_or(Duration::MAX);
            if let Some(permit) = self.pick(&mut streams, spread) {
                break Ok(Some(permit));
            }
            if self.dialer.is_none()
                && let Some(made) = streams.ask()
            {
                request = Some(made);
                drop(streams);
                // Never waits: if the peer does not read its control stream, the link breaks.
                let sent = ask();
                streams = self.streams.lock();
                if let Err(error) = sent {
                    streams.take_back(made);
                    break Err(error);
                }
                continue;
            }
            drop(self.changed.wait_timeout(streams, deadline.wait_limit().min(late)));
            let passed = deadline.waiting("waiting for a stream to the peer");
            streams = self.streams.lock();
            // A stream that arrived at the last moment is still used. An interruption is returned in any
            // case, because it is reported only once.
            if let Err(error) = passed
                && (streams.idle.is_empty() || error.kind() == ErrorKind::Interrupted)
            {
                if let Some(made) = request {
                    streams.take_back(made);
                }
                break Err(error);
            }
        };
        streams.waiting -= 1;
        permit
    }

    /// Takes an idle stream, unless a new one is better, or the right to open one.
    fn pick(&self, streams: &mut StreamSet, spread: bool) -> Option<StreamPermit<'_>> {
        let room = streams.in_use() < MAX_CALLS;
        if let Some((at, stream)) = streams.next_idle()
            && !(room && spread && self.has_unused_address(streams, &stream))
            && !(room && !stream.has_rings() && self.may_ring(streams))
        {
            streams.idle.remove(at);
            streams.busy.push(stream.clone());
            return Some(StreamPermit::Idle(stream));
        }
        let dialer = self.dialer.as_ref().filter(|_| room)?;
        let at = dialer.addresses.choose(|ip| streams.count_at(ip)).filter(|_| spread);
        streams.opening.push(dialer.addresses.ip_of(at));
        Some(StreamPermit::Dial(dialer, at))
    }

    /// Whether the idle `stream` leads to an address that calls are using, and the peer has one without streams.
    fn has_unused_address(&self, streams: &StreamSet, stream: &Stream) -> bool {
        let dialer = self.dialer.as_ref().filter(|_| streams.busy_at(stream.about.listened_at) > 0);
        dialer.is_some_and(|dialer| dialer.addresses.unused(|ip| streams.count_at(ip)).is_some())
    }

    /// Whether another stream of `streams` may get rings: there are too few, and none was refused lately.
    fn may_ring(&self, streams: &StreamSet) -> bool {
        let refused =
            || self.rings_refused.lock().as_ref().is_some_and(|(when, _)| when.elapsed() < RETRY_TIME);
        let locally = self.dialer.as_ref().is_some_and(|dialer| !matches!(dialer.address, Address::Tcp(_)));
        locally && streams.ringed() + streams.opening.len() < RINGED && !refused()
    }

    /// Takes an idle stream with rings, if there is one. Does not wait.
    pub(super) fn take_idle_ringed(&self) -> Option<Arc<Stream>> {
        let mut streams = self.streams.lock();
        // Those with rings are at the end.
        let (stream, _) = streams.idle.pop_if(|(stream, _)| stream.has_rings())?;
        streams.busy.push(stream.clone());
        Some(stream)
    }

    /// Whether a stream is idle.
    pub(super) fn has_idle(&self) -> bool {
        !self.streams.lock().idle.is_empty()
    }

    /// Ends the right to open a stream at the address `ip`, with the `stream` unless that failed.
    pub(super) fn opened(&self, ip: Option<IpAddr>, stream: Option<&Arc<Stream>>) {
        let mut streams = self.streams.lock();
        if let Some(opening) = streams.opening.iter().position(|opening| *opening == ip) {
            streams.opening.swap_remove(opening);
        }
        if let Some(stream) = stream {
            streams.note_address(stream);
            streams.busy.push(stream.clone());
        }
        drop(streams);
        if stream.is_none() {
            self.changed.notify_all();
        }
    }

    /// Adds a stream that the peer has opened for calls of this side.
    pub(super) fn add(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        // Streams beyond the requested number are closed; peers of this version open none.
        let welcome = streams.asked.pop_front().is_some()
            && !streams.ended
            && streams.idle.len() + streams.busy.len() < MAX_CALLS;
        if welcome {
            streams.note_address(stream);
            streams.put_idle(stream.clone());
        }
        drop(streams);
        if !welcome {
            stream.close();
        }
        self.changed.notify_all();
    }

    /// Takes back the stream of a call. Keeps it if it is `reusable`: request and reply were complete.
    pub(super) fn give_back(&self, stream: &Arc<Stream>, reusable: bool) {
        let mut streams = self.streams.lock();
        streams.busy.retain(|busy| !Arc::ptr_eq(busy, stream));
        let kept = reusable && !streams.ended && streams.idle.len() < MAX_IDLE_STREAMS;
        if kept {
            streams.put_idle(stream.clone());
        }
        let dubious = if reusable { Vec::new() } else { streams.leave_address(stream) };
        drop(streams);
        for stream in dubious.iter().chain((!kept).then_some(stream)) {
            stream.close();
        }
        // Wake all threads: one that waits may be a call, or an unlink that waits for something else.
        self.changed.notify_all();
    }

    /// Closes the streams that have been idle for long, except the few most recently used.
    pub(super) fn trim(&self) {
        let mut streams = self.streams.lock();
        let spare = streams.idle.len().saturating_sub(IDLE_STREAMS);
        // Streams without rings come first, those idle longest at the front. Calls take the last stream.
        let old = streams.idle[..spare].iter().take_while(|(_, since)| since.elapsed() > IDLE_TIME).count();
        let old: Vec<_> = streams.idle.drain(..old).collect();
        drop(streams);
        for (stream, _) in old {
            stream.close();
        }
    }

    /// Closes all streams, because the link has broken, and wakes all threads that wait for one.
    pub(super) fn end(&self) {
        let mut streams = self.streams.lock();
        streams.ended = true;
        let idle = std::mem::take(&mut streams.idle);
        let busy = streams.busy.clone();
        drop(streams);
        idle.iter().map(|(stream, _)| stream).chain(&busy).for_each(|stream| stream.close());
        self.changed.notify_all();
    }

    /// Returns the number of streams with rings.
    pub(super) fn ringed(&self) -> usize {
        self.streams.lock().ringed()
    }

    /// Records that a stream got its rings, or why it did not.
    pub(super) fn note_rings(&self, refused: Option<&Error>) {
        *self.rings_refused.lock() = refused.map(|error| (Instant::now(), error.to_string()));
    }

    /// Returns why the last attempt to give a stream rings failed; `None` if it succeeded.
    pub(super) fn rings_refusal(&self) -> Option<String> {
        self.rings_refused.lock().as_ref().map(|(_, why)| why.clone())
    }

    /// Returns a number for a write over several streams.
    pub(crate) fn next_write(&self) -> u64 {
        self.next_write.fetch_add(1, Ordering::Relaxed)
    }

    /// Counts a pull or push until the returned guard is dropped.
    pub(super) fn begin(&self) -> impl Drop {
        self.active.fetch_add(1, Ordering::SeqCst);
        OnDrop(|| {
            let last = self.active.fetch_sub(1, Ordering::SeqCst) == 1;
            if last && self.unlinks() {
                drop(self.streams.lock());
                self.changed.notify_all();
            }
        })
    }

    /// Records that this side unlinks the link, which is then the reason of its end. Refuses new pulls and pushes.
    pub(super) fn begin_unlink(&self) {
        self.unlinking.store(true, Ordering::SeqCst);
    }

    /// Whether this side is unlinking the link.
    pub(super) fn unlinks(&self) -> bool {
        self.unlinking.load(Ordering::SeqCst)
    }

    /// Waits for the pulls and pushes in progress while the link is `alive`, after [`begin_unlink`](Self::begin_unlink). Returns
    /// `Err` if the deadline passes or the caller is interrupted.
    pub(super) fn drain(&self, alive: impl Fn() -> bool, deadline: Deadline) -> Result<()> {
        let mut streams = self.streams.lock();
        while self.active.load(Ordering::SeqCst) > 0 && alive() {
            drop(self.changed.wait_timeout(streams, deadline.wait_limit()));
            deadline.waiting("waiting for transfers over the link to end")?;
            streams = self.streams.lock();
        }
        Ok(())
    }
}

/// The call streams of one link: those of calls in progress, and idle ones.
#[derive(Debug, Default)]
struct StreamSet {
    /// Idle streams with the time of their return: first those without rings, then those with rings, each most recent last.
    idle: Vec<(Arc<Stream>, Instant)>,
    busy: Vec<Arc<Stream>>,
    /// Streams that this side is opening: the addresses at which the peer listens, if known.
    opening: Vec<Option<IpAddr>>,
    /// Whether the streams lead to different addresses of the listening end.
    several_addresses: bool,
    /// The requests for streams that the peer has not opened yet, the oldest first: a number, and when each was made.
    asked: VecDeque<(u64, Instant)>,
    last_request: u64,
    /// Calls that wait for a stream.
    waiting: usize,
    /// Whether the link has broken.
    ended: bool,
}

impl StreamSet {
    /// Returns the number of streams in use, with those that are being opened.
    fn in_use(&self) -> usize {
        self.busy.len() + self.opening.len() + self.asked.len()
    }

    /// Records a request for one more stream, unless there is no room or there are as many requests as waiting calls. Returns its
    /// number.
    fn ask(&mut self) -> Option<u64> {
        if self.in_use() >= MAX_CALLS || self.asked.len() >= self.waiting {
            return None;
        }
        self.last_request += 1;
        self.asked.push_back((self.last_request, Instant::now()));
        Some(self.last_request)
    }

    /// Forgets a request whose stream has not arrived, so that the next call makes another one.
    fn take_back(&mut self, request: u64) {
        self.asked.retain(|&(number, _)| number != request);
    }

    /// Forgets requests that are older than [`DIAL_LIMIT`]. Their calls have found another stream. Returns how long the oldest of
    /// the others is still expected.
    fn forget_late_requests(&mut self) -> Option<Duration> {
        self.asked.retain(|(_, since)| since.elapsed() < DIAL_LIMIT);
        self.asked.front().map(|(_, since)| DIAL_LIMIT.saturating_sub(since.elapsed()))
    }

    /// Returns the number of streams over one address of the listening end, with those that are being opened.
    fn count_at(&self, ip: IpAddr) -> usize {
        let idle = self.idle.iter().filter(|(stream, _)| stream.about.listened_at == Some(ip)).count();
        self.busy_at(Some(ip)) + idle
    }

    /// Returns the idle stream that a call is to use: the one that was used last, of those over the address with the
    /// fewest calls.
    fn next_idle(&self) -> Option<(usize, Arc<Stream>)> {
        let last = self.idle.len().checked_sub(1)?;
        let calls = |at: &usize| self.busy_at(self.idle[*at].0.about.listened_at);
        let at = if self.several_addresses { (0..=last).rev().min_by_key(calls)? } else { last };
        Some((at, self.idle[at].0.clone()))
    }

    /// Returns the number of streams with rings.
    fn ringed(&self) -> usize {
        let streams = self.idle.iter().map(|(stream, _)| stream).chain(&self.busy);
        streams.filter(|stream| stream.has_rings()).count()
    }

    /// Keeps a stream for later calls. Those with rings are taken first.
    fn put_idle(&mut self, stream: Arc<Stream>) {
        let others = self.idle.iter().rposition(|(idle, _)| !idle.has_rings());
        let at = if stream.has_rings() { self.idle.len() } else { others.map_or(0, |last| last + 1) };
        self.idle.insert(at, (stream, Instant::now()));
    }

    /// Removes the idle streams over the address of a stream whose call ended early, because that network may be cut. If the
    /// peer has one address, they stay: the heartbeat detects that it is gone.
    fn leave_address(&mut self, stream: &Stream) -> Vec<Arc<Stream>> {
        if !self.several_addresses {
            return Vec::new();
        }
        let left = self.idle.extract_if(.., |(idle, _)| idle.about.listened_at == stream.about.listened_at);
        left.map(|(idle, _)| idle).collect()
    }

    /// Notes that there is another stream.
    fn note_address(&mut self, stream: &Stream) {
        let mut others = self.idle.iter().map(|(stream, _)| stream).chain(&self.busy);
        self.several_addresses |= others.any(|other| other.about.listened_at != stream.about.listened_at);
    }

    /// Returns the number of calls over one address, with the streams that are being opened for calls.
    fn busy_at(&self, ip: Option<IpAddr>) -> usize {
        let busy = self.busy.iter().map(|stream| stream.about.listened_at);
        busy.chain(self.opening.iter().copied()).filter(|at| *at == ip).count()
    }
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
        let arrived = |set: &mut StreamSet| set.asked.pop_front().is_some();
        let mut set = StreamSet { waiting: 1, ..StreamSet::default() };
        let request = set.ask().unwrap();
        assert_eq!((set.ask(), set.in_use()), (None, 1));
        set.waiting = 2;
        let other = set.ask().unwrap();
        assert!(arrived(&mut set) && arrived(&mut set) && !arrived(&mut set));
        set.take_back(other);
        let again = set.ask().unwrap();
        set.take_back(request);
        assert_eq!(set.in_use(), 1, "only its own request");
        set.take_back(again);
        assert!(!arrived(&mut set));
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
