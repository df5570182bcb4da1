//! One link to a peer: its control stream, the descriptions of remote caches, and whether it is alive.
//!
//! Links are made in `establish` and `accept`. `control_thread` detects that a peer is gone, and
//! `call_streams` manages the streams of calls.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::dial::Dialer;
use super::known_cache::{KnownCache, KnownCaches};
use super::limits::{ahead, body_time};
use super::notification_window::Notifications;
use super::peer_memory::{PeerMemory, Readable};
use super::pushes_in_flight::PushesInFlight;
use super::shared_writes::SharedWrites;
use super::stream_set::{self, MOST_CALLS, StreamSet};
use crate::budget::{Budget, BudgetShare, PeerBudget};
use crate::error::{Error, ErrorKind, Result};
use crate::events::{LinkEnd, PeerInfo};
use crate::fabric::PeerFabric;
use crate::model::{ClusterId, Deadline, Name};
use crate::net::Stream;
use crate::protocol::{self, ControlMessage};
use crate::stats::{Counters, LinkState, PathCounters};
use crate::sync::{Condvar, Mutex, MutexGuard, OnDrop};

/// Most streams on which one peer may send requests. A peer uses at most [`MOST_CALLS`]; the rest allows for
/// streams that it has closed and this side has not noticed yet (`the_streams_of_one_peer_are_bounded`).
const MOST_SERVED: usize = 2 * MOST_CALLS;
/// How long a peer that may be gone has to answer a ping.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(1);

/// How a link was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This side called `link_clusters`.
    Outgoing,
    /// The peer called `link_clusters`.
    Incoming,
    /// Both sides called `link`; the number is the id of the communicator.
    Communicator(u64),
    /// One of the sides called `ensure_link`.
    Ensured,
}

/// The identity of the peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its cluster id, as the peer reported it.
    pub cluster: ClusterId,
    /// A random number that is chosen when an engine is opened. It distinguishes a restarted peer from its
    /// predecessor.
    pub instance: u64,
    /// Its address, for logs and errors.
    pub address: String,
    /// The metadata of its program.
    pub metadata: Arc<Vec<u8>>,
}

/// The cluster id and the instance number of an engine.
pub(super) type EngineId = (ClusterId, u64);

/// A link to one peer.
#[derive(Debug)]
pub struct Link {
    /// The id of the link, the same on both sides.
    pub(super) id: u64,
    pub(super) kind: Kind,
    pub(super) peer: Peer,
    peer_memory: Option<PeerMemory>,
    fabric: Readable<PeerFabric>,
    pub(super) control: Arc<Stream>,
    /// Guards sending on the control stream. Held during socket I/O, which never waits: a short message is
    /// sent at once or not at all.
    pub(super) sending: Mutex<()>,
    /// Opens call streams. `None` if only the peer can dial; then this side asks the peer to open one.
    pub(super) dialer: Option<Dialer>,
    pub(super) streams: Mutex<StreamSet>,
    /// Notified when a stream is returned or arrives, the peer answers a ping, the link breaks, or the last
    /// transfer of an unlink ends.
    pub(super) changed: Condvar,
    /// When and why the last attempt to give a stream rings failed; `None` if it succeeded.
    pub(super) rings_refused: Mutex<Option<(Instant, String)>>,
    serving: Mutex<Serving>,
    broken: OnceLock<(Instant, String)>,
    /// Whether the streams were closed.
    closed: AtomicBool,
    opened: Instant,
    /// Milliseconds between `opened` and the latest sign of life from the peer.
    last_sign_of_life: AtomicU64,
    /// Number of answered pings.
    pongs: AtomicU64,
    pub(super) records: Mutex<KnownCaches>,
    /// The pushes to the engine of the peer, over any link.
    pub(crate) pushes: Arc<PushesInFlight>,
    /// Writes of the peer over several streams.
    pub(super) shared_writes: SharedWrites,
    /// Number of the next write of this side over several streams.
    next_write: AtomicU64,
    pub(super) notifications: Notifications,
    /// Pulls and pushes in progress.
    active: AtomicUsize,
    /// Whether new transfers are refused because the link is about to be unlinked.
    unlinking: AtomicBool,
    /// The memory that the peer makes this process hold.
    pub(super) budget: Arc<PeerBudget>,
    pub(super) requests: Counters,
    pub(crate) transfers: Counters,
    pub(crate) paths: PathCounters,
}

/// The streams on which requests of the peer are answered.
#[derive(Debug, Default)]
struct Serving {
    streams: Vec<Arc<Stream>>,
    /// Streams that this side is opening at the request of the peer.
    opening: usize,
}

impl Link {
    pub(super) fn new(
        id: u64,
        kind: Kind,
        peer: Peer,
        (peer_memory, fabric): (Option<PeerMemory>, Readable<PeerFabric>),
        control: Arc<Stream>,
        dialer: Option<Dialer>,
        (budget, silence, pushes): (&Arc<Budget>, Duration, Arc<PushesInFlight>),
    ) -> Arc<Link> {
        Arc::new(Link {
            id,
            kind,
            peer,
            peer_memory,
            fabric,
            control,
            sending: Mutex::default(),
            dialer,
            streams: Mutex::default(),
            changed: Condvar::new(),
            rings_refused: Mutex::default(),
            serving: Mutex::default(),
            broken: OnceLock::new(),
            closed: AtomicBool::new(false),
            opened: Instant::now(),
            last_sign_of_life: AtomicU64::new(0),
            pongs: AtomicU64::new(0),
            records: Mutex::default(),
            pushes,
            shared_writes: SharedWrites::new(silence),
            next_write: AtomicU64::new(0),
            notifications: Notifications::default(),
            active: AtomicUsize::new(0),
            unlinking: AtomicBool::new(false),
            budget: PeerBudget::new(budget),
            requests: Counters::default(),
            transfers: Counters::default(),
            paths: PathCounters::default(),
        })
    }

    /// Returns the cluster of the peer.
    pub(crate) fn cluster(&self) -> ClusterId {
        self.peer.cluster
    }

    /// Describes the peer for the program.
    pub(super) fn peer_info(&self) -> PeerInfo {
        PeerInfo {
            cluster: self.peer.cluster,
            incarnation: self.peer.instance,
            address: self.peer.address.clone(),
            transport: self.control.about.transport,
            metadata: self.peer.metadata.clone(),
        }
    }

    /// Whether the peer has dialled this side for the link, or both sides belong to a communicator.
    pub(super) fn is_incoming(&self) -> bool {
        match self.kind {
            Kind::Outgoing => false,
            Kind::Incoming | Kind::Communicator(_) => true,
            Kind::Ensured => self.dialer.is_none(),
        }
    }

    /// Describes the end of the link for the program, which gets no message of the link any more. `why` is the reason of a
    /// link that has not broken yet.
    pub(super) fn end_info(&self, why: &str) -> LinkEnd {
        self.mark_broken(why);
        self.notifications.end();
        let reason = self.broken.get().map_or(why, |(_, why)| why).to_owned();
        LinkEnd { peer: self.peer_info(), reason, unacknowledged: self.notifications.unacknowledged() }
    }

    /// Returns a number that no other link has while this one exists.
    pub(super) fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Returns which memory of the peer this process can read in place. `None` if it can read none.
    pub(crate) fn peer_memory(&self) -> Option<&PeerMemory> {
        self.peer_memory.as_ref()
    }

    /// Returns what UCX reads of the peer, or the reason why it reads nothing.
    pub(crate) fn fabric(&self) -> &Readable<PeerFabric> {
        &self.fabric
    }

    /// Begins a pull or push. An unlink waits until the returned guard is dropped. Returns `Err` with
    /// `NotLinked` if the link has broken or is being unlinked.
    pub(crate) fn begin(&self) -> Result<impl Drop> {
        // Incremented before the check, so that `drain` either sees the count or is seen here.
        self.active.fetch_add(1, Ordering::SeqCst);
        let active = OnDrop(|| {
            let last = self.active.fetch_sub(1, Ordering::SeqCst) == 1;
            if last && self.unlinking.load(Ordering::SeqCst) {
                drop(self.streams.lock());
                self.changed.notify_all();
            }
        });
        self.check()?;
        if self.unlinks() {
            let text = format!("the link to cluster {} is being unlinked", self.peer.cluster);
            return Err(Error::new(ErrorKind::NotLinked, text));
        }
        Ok(active)
    }

    /// Records that this side unlinks the link, which is then the reason of its end. Refuses new pulls and pushes.
    pub(super) fn begin_unlink(&self) {
        self.unlinking.store(true, Ordering::SeqCst);
    }

    /// Waits for the pulls and pushes in progress, after [`begin_unlink`](Self::begin_unlink). Returns `Err` if the deadline
    /// passes or the caller is interrupted.
    pub(super) fn drain(&self, deadline: Deadline) -> Result<()> {
        let mut streams = self.streams.lock();
        while self.active.load(Ordering::SeqCst) > 0 && self.alive() {
            drop(self.changed.wait_timeout(streams, deadline.nap()));
            deadline
                .waiting("waiting for transfers over the link to end")
                .map_err(|error| self.named(error))?;
            streams = self.streams.lock();
        }
        Ok(())
    }

    /// Whether this side is unlinking the link.
    pub(super) fn unlinks(&self) -> bool {
        self.unlinking.load(Ordering::SeqCst)
    }

    /// Returns the current state, for `stats()`.
    pub(super) fn state(&self) -> LinkState {
        let seen = |yes| if yes { "process" } else { "stream" };
        LinkState {
            cluster: self.peer.cluster,
            address: self.peer.address.clone(),
            transport: self.control.about.transport,
            pools: self.peer_memory.as_ref().map_or("stream", PeerMemory::pools),
            registered: seen(
                self.peer_memory.as_ref().is_some_and(|peer_memory| peer_memory.refusal().is_none()),
            ),
            refusal: self.peer_memory.as_ref().and_then(PeerMemory::refused).map(str::to_owned),
            outgoing: self.dialer.is_some(),
            call_rings: self.ringed(false) + self.ringed(true),
            call_rings_refusal: self.rings_refused.lock().as_ref().map(|(_, why)| why.clone()),
            silent_ms: u64::try_from(self.silent().as_millis()).unwrap_or(u64::MAX),
            requests: self.requests.state(),
            transfers: self.transfers.state(),
            paths: self.paths.states(),
            staged_bytes: self.paths.staged_bytes(),
            sockets_reason: self.paths.reason(),
        }
    }

    /// Whether the link has not broken.
    pub fn alive(&self) -> bool {
        self.broken.get().is_none()
    }

    /// Checks that the link has not broken. Otherwise returns `Err` with `NotLinked` and the reason.
    pub fn check(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |(when, why)| Err(broken(self.peer.cluster, *when, why)))
    }

    /// Whether the peer gave a sign of life within `silence_limit`, or a message from it is waiting to be read.
    /// Each side sends something at least once per heartbeat, so this neither asks the peer nor waits.
    pub(super) fn works(&self, silence_limit: Duration) -> bool {
        let recent = || self.silent() < silence_limit || self.control.readable_within(Duration::ZERO);
        self.alive() && !self.control.abandoned() && recent()
    }

    /// Returns the reason why the link broke, if it did; otherwise `error`. A lack of local resources fails the call with kind
    /// `System`, because the link still stands.
    pub(crate) fn break_reason_or(&self, error: Error) -> Error {
        match self.check() {
            Err(broke) if error.kind() == ErrorKind::NotLinked => self.named(broke),
            _ if error.is_shortage()
                && matches!(error.kind(), ErrorKind::NotLinked | ErrorKind::LinkFailed) =>
            {
                self.named(error.of_kind(ErrorKind::System))
            }
            _ => self.named(error),
        }
    }

    /// Returns when and why the link broke.
    pub(super) fn break_reason(&self) -> Option<&(Instant, String)> {
        self.broken.get()
    }

    /// Has all calls fail from now on. Only the first reason is kept. The streams stay open until
    /// [`break_off`](Self::break_off).
    fn mark_broken(&self, why: impl Into<String>) {
        // The peer ends the link as well, and may be first.
        let why = if self.unlinks() { UNLINKED_HERE.to_owned() } else { why.into() };
        // Fails if it is broken already.
        let _ = self.broken.set((Instant::now(), why));
    }

    /// Ends the link. Only the first call has an effect, and its reason is kept. Wakes all threads that wait
    /// on its streams.
    pub(super) fn break_off(&self, why: impl Into<String>) {
        self.mark_broken(why);
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.peer_memory.iter().for_each(PeerMemory::release_soon);
        self.fabric.iter().for_each(PeerFabric::end);
        self.control.close();
        self.shared_writes.end();
        let served = self.serving.lock().streams.clone();
        for stream in self.streams.lock().end().iter().chain(&served) {
            stream.close();
        }
        self.changed.notify_all();
        self.notifications.wake();
    }

    /// Waits until a request of `bytes` fits the budget of the peer, which may be silent for `silence`. Returns the share of
    /// the budget and the deadline by which the request must have arrived.
    pub(super) fn admit(&self, bytes: usize, silence: Duration) -> Result<(Arc<BudgetShare>, Deadline)> {
        let until = Deadline::after(body_time(bytes, silence)).named("the time limit of a request body");
        let share = self.budget.admit(bytes as u64, ahead(bytes), until.left());
        share.map(|share| (share, until)).map_err(|error| self.named(error))
    }

    /// Waits until a reply of `bytes` fits the budget of the peer, until the deadline of the call.
    pub(super) fn admit_reply(
        &self,
        bytes: usize,
        deadline: Deadline,
    ) -> Result<(Arc<BudgetShare>, Deadline)> {
        loop {
            match self.budget.admit(bytes as u64, ahead(bytes), deadline.nap()) {
                Ok(share) => return Ok((share, deadline)),
                Err(error) if deadline.passed() => return Err(self.named(error)),
                Err(_) => deadline.interruption("waiting for memory for a reply")?,
            }
        }
    }

    /// Sends one control message. The link breaks if the peer does not read its control stream.
    pub(super) fn send_control(&self, message: &ControlMessage) -> Result<()> {
        self.send_control_with(&self.sending.lock(), message)
    }

    /// Sends one message on the control stream with the right to send, which the caller already holds.
    pub(super) fn send_control_with<T: Serialize>(&self, _: &MutexGuard<'_, ()>, message: &T) -> Result<()> {
        let frame = protocol::encode(message)?;
        self.control.send_now(&frame, &[]).inspect_err(|error| {
            // Part of the message may have been sent, and the peer would misread whatever follows.
            if error.is_hang_up() {
                self.break_off(HUNG_UP);
            } else {
                self.break_off(format!("a control message could not be sent: {error}"));
            }
        })
    }

    /// Whether the peer answers a ping within `limit`. A link whose peer is stopped or cut off looks alive
    /// for a while.
    pub(super) fn answers(&self, limit: Duration) -> bool {
        let (limit, before) = (Deadline::after(limit), self.pongs.load(Ordering::SeqCst));
        if self.send_control(&ControlMessage::Ping).is_err() {
            return false;
        }
        let mut streams = self.streams.lock();
        while self.alive() && self.pongs.load(Ordering::SeqCst) == before && !limit.passed() {
            streams = self.changed.wait_timeout(streams, limit.left()).0;
        }
        drop(streams);
        self.alive() && self.pongs.load(Ordering::SeqCst) != before
    }

    /// Waits until the link has ended or `limit` has passed.
    pub(super) fn wait_until_broken(&self, limit: Deadline) {
        let mut streams = self.streams.lock();
        while self.alive() && !limit.passed() {
            streams = self.changed.wait_timeout(streams, limit.left()).0;
        }
    }

    /// Records the answer to a ping.
    pub(super) fn answered(&self) {
        self.pongs.fetch_add(1, Ordering::SeqCst);
        // Taking the lock ensures that a waiting thread either sees the new count or receives the
        // notification.
        drop(self.streams.lock());
        self.changed.notify_all();
    }

    /// Records a sign of life.
    pub(super) fn record_sign_of_life(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_sign_of_life.fetch_max(now, Ordering::Relaxed);
    }

    /// Returns the time since the latest sign of life.
    pub(super) fn silent(&self) -> Duration {
        self.opened
            .elapsed()
            .saturating_sub(Duration::from_millis(self.last_sign_of_life.load(Ordering::Relaxed)))
    }

    /// Registers a stream on which requests of the peer are answered, so that breaking the link closes it.
    /// Refuses more than [`MOST_SERVED`] streams.
    pub(super) fn serve_on(&self, stream: &Arc<Stream>) -> Result<()> {
        let mut served = self.serving.lock();
        if served.streams.len() >= MOST_SERVED {
            return Err(self.named(stream_set::too_many(MOST_SERVED)));
        }
        served.streams.push(stream.clone());
        drop(served);
        if !self.alive() {
            stream.close();
        }
        Ok(())
    }

    /// Returns the number of streams over one address of the peer on which its requests are answered.
    pub(super) fn serves_at(&self, ip: IpAddr) -> usize {
        stream_set::count_at(&self.serving.lock().streams, ip)
    }

    /// Returns the number of streams on which requests of the peer are answered.
    pub(super) fn serves(&self) -> usize {
        self.serving.lock().streams.len()
    }

    /// Returns the number of streams with rings on which this side answers requests (`serves`) or sends them.
    pub(super) fn ringed(&self, serves: bool) -> usize {
        if serves {
            return self.serving.lock().streams.iter().filter(|stream| stream.has_rings()).count();
        }
        self.streams.lock().ringed()
    }

    /// Removes a stream that has ended.
    pub(super) fn stop_serving(&self, stream: &Arc<Stream>) {
        self.serving.lock().streams.retain(|known| !Arc::ptr_eq(known, stream));
    }

    /// Reserves a place for one more stream for requests of the peer. Returns `false` if there is none. Each
    /// success is paired with a call of [`opened`](Self::opened).
    pub(super) fn may_open(&self) -> bool {
        let mut served = self.serving.lock();
        let room = served.streams.len() + served.opening < MOST_SERVED;
        served.opening += usize::from(room);
        room
    }

    /// Returns the reservation of [`may_open`](Self::may_open).
    pub(super) fn opened(&self) {
        self.serving.lock().opening -= 1;
    }

    /// Returns a number for a write over several streams.
    pub(crate) fn next_write(&self) -> u64 {
        self.next_write.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns the stored description of a remote cache.
    pub(crate) fn record(&self, name: &Name) -> Option<Arc<KnownCache>> {
        self.records.lock().get(name).cloned()
    }

    /// Removes the description of a remote cache.
    pub(crate) fn forget(&self, name: &Name) {
        self.records.lock().remove(name);
    }

    /// Returns `error` with the cluster id and the address of the peer.
    pub(crate) fn named(&self, error: Error) -> Error {
        error.with("cluster", self.peer.cluster).with("peer", &self.peer.address)
    }
}

/// Why a link has ended that this side unlinked.
pub(super) const UNLINKED_HERE: &str = "it was unlinked here";
/// Why a link has ended whose connection the peer closed without a goodbye, in whatever way this side noticed it.
pub(super) const HUNG_UP: &str =
    "the peer closed the connection: its process ended or was killed, or it dropped the link";

/// Returns the error of a call over a link that has broken.
pub(super) fn broken(cluster: ClusterId, when: Instant, why: &str) -> Error {
    let text = format!("the link to cluster {cluster} broke: {why}; link again");
    Error::new(ErrorKind::NotLinked, text).with("broke_ms_ago", when.elapsed().as_millis())
}
