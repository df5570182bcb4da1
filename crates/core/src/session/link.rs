//! One link: who is at the other end, its control stream, what is known of its caches, and whether it still lives.
//!
//! Not for: making links (`connect`), noticing that the peer is gone (`control`), or the streams of calls (`calls`).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::dial::Dialer;
use super::limits::{Budget, Held, PeerBudget};
use super::peer_memory::Reach;
use super::pushes_in_flight::Writes;
use super::remote_cache::{self, Known};
use super::stream_pool::{self, Calls, MOST_CALLS};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline, Name};
use crate::net::Stream;
use crate::protocol::{self, Control, Purpose};
use crate::stats::{Counters, LinkState};

/// Streams on which one peer may call. It has [`MOST_CALLS`] at most; some that it has closed may not be noticed yet
/// (`the_streams_of_one_peer_are_bounded`).
const MOST_SERVED: usize = 2 * MOST_CALLS;
/// How long a peer that may be gone is given to answer.
pub(super) const ANSWER_TIME: Duration = Duration::from_secs(1);

/// How a link came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// This side called `link_clusters`.
    Outgoing,
    /// The peer did.
    Incoming,
    /// Both called `link`; the number is the communicator's.
    Communicator(u64),
}

/// Who is at the other end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its cluster id, as it said itself.
    pub cluster: ClusterId,
    /// One number for each time an engine is opened: tells a restarted peer from the one before.
    pub instance: u64,
    /// Its address, for people.
    pub address: String,
}

/// One link.
#[derive(Debug)]
pub struct Link {
    /// Names the link to both sides.
    pub(super) id: u64,
    kind: Kind,
    peer: Peer,
    transport: &'static str,
    reach: Option<Reach>,
    control: Arc<Stream>,
    /// Who sends on the control stream. Held across a socket, which takes one short message at once or never.
    speaking: Mutex<()>,
    /// Opens a stream for calls; `None` where only the peer can, and is asked to.
    pub(super) dialer: Option<Dialer>,
    pub(super) calls: Mutex<Calls>,
    /// A stream came back, came in, or the link broke; or the peer answered.
    pub(super) changed: Condvar,
    serving: Mutex<Serving>,
    why: OnceLock<(Instant, String)>,
    opened: Instant,
    /// Milliseconds after `opened` at which the peer last gave a sign of life.
    heard: AtomicU64,
    /// Answers to pings.
    pongs: AtomicU64,
    records: Mutex<HashMap<Name, Arc<Known>>>,
    writes: Writes,
    /// Pulls and pushes under way.
    active: AtomicUsize,
    /// No new ones: the link is about to be unlinked.
    settling: AtomicBool,
    /// What its peer's large requests may take.
    budget: Arc<PeerBudget>,
    requests: Counters,
    transfers: Counters,
}

/// Streams on which the peer's calls are answered.
#[derive(Debug, Default)]
struct Serving {
    streams: Vec<Arc<Stream>>,
    /// Those that this side is opening because the peer asked.
    opening: usize,
}

impl Link {
    #[expect(clippy::too_many_arguments, reason = "what a link is made of")]
    pub(super) fn new(
        id: u64,
        kind: Kind,
        peer: Peer,
        transport: &'static str,
        reach: Option<Reach>,
        control: Arc<Stream>,
        dialer: Option<Dialer>,
        budget: &Arc<Budget>,
    ) -> Arc<Link> {
        Arc::new(Link {
            id,
            kind,
            peer,
            transport,
            reach,
            control,
            speaking: Mutex::default(),
            dialer,
            calls: Mutex::default(),
            changed: Condvar::new(),
            serving: Mutex::default(),
            why: OnceLock::new(),
            opened: Instant::now(),
            heard: AtomicU64::new(0),
            pongs: AtomicU64::new(0),
            records: Mutex::default(),
            writes: Writes::default(),
            active: AtomicUsize::new(0),
            settling: AtomicBool::new(false),
            budget: PeerBudget::new(budget),
            requests: Counters::default(),
            transfers: Counters::default(),
        })
    }

    /// How it came about.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Who is at the other end.
    #[must_use]
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    /// How its messages travel: `shm` (a socket of this host, memory shared), `tcp`, `local`.
    #[must_use]
    pub fn transport(&self) -> &'static str {
        self.transport
    }

    /// What of the peer's memory this process can read in place.
    pub(crate) fn reach(&self) -> Option<&Reach> {
        self.reach.as_ref()
    }

    /// Counts of requests.
    pub(super) fn requests(&self) -> &Counters {
        &self.requests
    }

    /// Counts of pulls and pushes.
    pub(crate) fn transfers(&self) -> &Counters {
        &self.transfers
    }

    /// Begins a pull or push, which an unlink waits for.
    pub(crate) fn begin(&self) -> Result<Active<'_>> {
        // Counted before looking, so that whoever settles sees the count or is seen here.
        self.active.fetch_add(1, Ordering::SeqCst);
        let active = Active(self);
        self.check()?;
        if self.settles() {
            let text = format!("the link to cluster {} is being unlinked", self.peer.cluster);
            return Err(Error::new(ErrorKind::NotLinked, text));
        }
        Ok(active)
    }

    /// Lets no pull or push begin any more, and waits for those under way.
    pub(super) fn settle(&self, deadline: Deadline) -> Result<()> {
        self.settling.store(true, Ordering::SeqCst);
        let mut calls = self.locked();
        while self.active.load(Ordering::SeqCst) > 0 && self.alive() {
            drop(self.changed.wait_timeout(calls, deadline.nap()));
            deadline
                .waiting("waiting for transfers over the link to end")
                .map_err(|error| self.named(error))?;
            calls = self.locked();
        }
        Ok(())
    }

    /// Whether this side is unlinking it.
    pub(super) fn settles(&self) -> bool {
        self.settling.load(Ordering::SeqCst)
    }

    /// As it is now.
    pub(super) fn state(&self) -> LinkState {
        let seen = |yes| if yes { "process" } else { "stream" };
        LinkState {
            cluster: self.peer.cluster,
            address: self.peer.address.clone(),
            transport: self.transport,
            pools: self.reach.as_ref().map_or("stream", Reach::pools),
            registered: seen(self.reach.as_ref().is_some_and(|reach| reach.refusal().is_none())),
            refusal: self.reach.as_ref().and_then(Reach::refused).map(str::to_owned),
            outgoing: self.dialer.is_some(),
            silent_ms: u64::try_from(self.silent().as_millis()).unwrap_or(u64::MAX),
            requests: self.requests.state(),
            transfers: self.transfers.state(),
        }
    }

    /// Whether it has not broken.
    #[must_use]
    pub fn alive(&self) -> bool {
        self.why.get().is_none()
    }

    /// `Err` with the reason once it has broken.
    pub fn check(&self) -> Result<()> {
        self.why.get().map_or(Ok(()), |(when, why)| Err(broken(self.peer.cluster, *when, why)))
    }

    /// Whether its peer was heard of within `patience`, or can be heard now. Peers say something once a heartbeat, so
    /// nobody is asked, and nothing waited for.
    pub(super) fn works(&self, patience: Duration) -> bool {
        let heard = || self.silent() < patience || self.control.readable_within(Duration::ZERO);
        self.alive() && !self.control.abandoned() && heard()
    }

    /// When and why it broke.
    pub(super) fn why(&self) -> Option<&(Instant, String)> {
        self.why.get()
    }

    /// Ends it, once: the first reason stays. Whoever waits on one of its streams wakes.
    pub(super) fn shatter(&self, why: impl Into<String>) {
        if self.why.set((Instant::now(), why.into())).is_err() {
            return;
        }
        self.reach.iter().for_each(Reach::leave);
        self.control.close();
        let served = self.served().streams.clone();
        for stream in self.locked().end().iter().chain(&served) {
            stream.close();
        }
        self.changed.notify_all();
    }

    pub(super) fn control(&self) -> &Stream {
        &self.control
    }

    /// Waits until a request of `bytes` fits what the peer may have here, and says until when it must have arrived.
    pub(crate) fn admit(&self, bytes: usize, silence: Duration) -> Result<(Held, Deadline)> {
        self.budget.admit(bytes, silence).map_err(|error| self.named(error))
    }

    /// Sends one control message; a peer that does not read loses the link.
    pub(super) fn tell(&self, message: &Control) -> Result<()> {
        self.tell_as(&self.speaker(), message)
    }

    /// The right to speak on the control stream: what is told with it comes before what others have to say.
    pub(super) fn speaker(&self) -> Speaker<'_> {
        Speaker(self.speaking.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn tell_as(&self, _: &Speaker<'_>, message: &Control) -> Result<()> {
        let frame = protocol::encode(message)?;
        self.control.send_now(&frame, &[]).inspect_err(|error| {
            // What it has taken of the message would be read as something else.
            self.shatter(format!("a control message could not be sent: {error}"));
        })
    }

    /// Whether the peer answers now, within `limit`: a link whose peer is stopped, or cut off, looks alive for a while.
    pub(super) fn answers(&self, limit: Duration) -> bool {
        let (limit, before) = (Deadline::after(limit), self.pongs.load(Ordering::SeqCst));
        if self.tell(&Control::Ping).is_err() {
            return false;
        }
        let mut calls = self.locked();
        while self.alive() && self.pongs.load(Ordering::SeqCst) == before && !limit.passed() {
            calls = self.changed.wait_timeout(calls, limit.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(calls);
        self.alive() && self.pongs.load(Ordering::SeqCst) != before
    }

    /// Waits until it has ended, or `limit` has passed.
    pub(super) fn ends(&self, limit: Deadline) {
        let mut calls = self.locked();
        while self.alive() && !limit.passed() {
            calls = self.changed.wait_timeout(calls, limit.left()).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Notes the answer to a ping.
    pub(super) fn answered(&self) {
        self.pongs.fetch_add(1, Ordering::SeqCst);
        // Whoever waits has looked before this, or sees it.
        drop(self.locked());
        self.changed.notify_all();
    }

    /// Notes a sign of life.
    pub(super) fn hear(&self) {
        let now = u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.heard.fetch_max(now, Ordering::Relaxed);
    }

    /// How long there has been no sign of life.
    pub(super) fn silent(&self) -> Duration {
        self.opened.elapsed().saturating_sub(Duration::from_millis(self.heard.load(Ordering::Relaxed)))
    }

    /// Opens a stream on which the peer may call this side.
    pub(super) fn open_reverse(&self, deadline: Deadline) -> Result<Stream> {
        match &self.dialer {
            Some(dialer) => self.open_call_stream(dialer, true, deadline),
            None => Err(Error::new(ErrorKind::System, "this side of the link has no address to dial")),
        }
    }

    /// Opens one more stream of this link with `dialer`; with `reverse` the peer will call on it.
    pub(super) fn open_call_stream(
        &self,
        dialer: &Dialer,
        reverse: bool,
        deadline: Deadline,
    ) -> Result<Stream> {
        let greet = || {
            let purpose = Purpose::Call { link: self.id, reverse };
            dialer.greet(Some(self.peer().cluster), purpose, deadline)
        };
        // A listener full of strangers sends away the oldest, who may be this one: once more.
        let greeted = match greet() {
            Err(error) if error.kind() == ErrorKind::NotLinked && self.alive() => greet(),
            greeted => greeted,
        };
        let (stream, welcome) = greeted?;
        if welcome.from.instance == self.peer().instance {
            return Ok(stream);
        }
        let text = "another process answers at the address of the peer: it was restarted; link again";
        Err(Error::new(ErrorKind::NotLinked, text))
    }

    /// Notes a stream on which the peer's calls are answered, so that breaking the link ends it; refuses more than any
    /// peer needs.
    pub(super) fn serve_on(&self, stream: &Arc<Stream>) -> Result<()> {
        let mut served = self.served();
        if served.streams.len() >= MOST_SERVED {
            return Err(self.named(stream_pool::too_many(MOST_SERVED)));
        }
        served.streams.push(stream.clone());
        drop(served);
        if !self.alive() {
            stream.close();
        }
        Ok(())
    }

    /// On how many streams the peer's calls are answered.
    pub(super) fn serves(&self) -> usize {
        self.served().streams.len()
    }

    /// Forgets a stream that has ended.
    pub(super) fn served_on(&self, stream: &Arc<Stream>) {
        self.served().streams.retain(|known| !Arc::ptr_eq(known, stream));
    }

    /// Whether this side knows where the peer listens.
    pub(super) fn dials(&self) -> bool {
        self.dialer.is_some()
    }

    /// Leave to open one more stream for the calls of the peer, to be paired with [`opened`](Self::opened).
    pub(super) fn may_open(&self) -> bool {
        let mut served = self.served();
        let room = served.streams.len() + served.opening < MOST_SERVED;
        served.opening += usize::from(room);
        room
    }

    pub(super) fn opened(&self) {
        self.served().opening -= 1;
    }

    /// What is known of a remote cache.
    pub(crate) fn record(&self, name: &Name) -> Option<Arc<Known>> {
        self.recorded().get(name).cloned()
    }

    /// Keeps what is known of a remote cache.
    pub(crate) fn remember(&self, name: Name, known: Arc<Known>) {
        let mut records = self.recorded();
        remote_cache::make_room(&mut records);
        records.insert(name, known);
    }

    /// Forgets a remote cache.
    pub(crate) fn forget(&self, name: &Name) {
        self.recorded().remove(name);
    }

    /// The same error with the names of the peer.
    pub(crate) fn named(&self, error: Error) -> Error {
        error.with("cluster", self.peer.cluster).with("peer", &self.peer.address)
    }

    /// What this side has the peer write.
    pub(crate) fn writes(&self) -> &Writes {
        &self.writes
    }

    /// The streams of calls.
    pub(super) fn locked(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn served(&self) -> MutexGuard<'_, Serving> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, HashMap<Name, Arc<Known>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to speak on the control stream of a link.
pub(super) struct Speaker<'a>(#[expect(dead_code, reason = "held, not read")] MutexGuard<'a, ()>);

/// A pull or push under way.
pub(crate) struct Active<'a>(&'a Link);

impl Drop for Active<'_> {
    fn drop(&mut self) {
        let last = self.0.active.fetch_sub(1, Ordering::SeqCst) == 1;
        if last && self.0.settling.load(Ordering::SeqCst) {
            drop(self.0.locked());
            self.0.changed.notify_all();
        }
    }
}

/// The error of a call over a link that has broken.
#[cold]
pub(super) fn broken(cluster: ClusterId, when: Instant, why: &str) -> Error {
    let text = format!("the link to cluster {cluster} broke: {why}; link again");
    Error::new(ErrorKind::NotLinked, text).with("broke_ms_ago", when.elapsed().as_millis())
}
