//! One link: who is at the other end, the streams to it, what is known of its caches, and whether it still lives.
//!
//! A call takes a stream for itself, asks, and gives the stream back; a stream whose call ended in the middle is closed,
//! so that no answer can ever be taken for another call's. Not for: making links (`greeting`), noticing that the peer
//! is gone (`keeper`) or what calls ask (`far`).

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::dialer::Dialer;
use super::far::Known;
use super::reach::Reach;
use crate::counters::Counters;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::keys::Name;
use crate::stats::LinkState;
use crate::transport::Stream;
use crate::wire::{self, Control};

/// Calls of one link that may be under way at a time; more wait their turn.
const MOST_CALLS: usize = 64;
/// Streams that are kept for the next calls.
const KEPT_STREAMS: usize = 32;
/// Descriptions that are kept; beyond, all are forgotten, which costs one request each.
const MOST_RECORDS: usize = 1 << 16;
/// A message on the control stream that is not taken at once is given up: the peer is not reading.
const CONTROL_LIMIT: Duration = Duration::from_millis(20);

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
    /// Opens a stream for calls; `None` where only the peer can, and is asked to.
    dialer: Option<Dialer>,
    calls: Mutex<Calls>,
    /// A stream came back, came in, or the link broke.
    changed: Condvar,
    /// Streams on which the peer's calls are answered.
    serving: Mutex<Vec<Arc<Stream>>>,
    why: OnceLock<(Instant, String)>,
    opened: Instant,
    /// Milliseconds after `opened` at which the peer last gave a sign of life.
    heard: AtomicU64,
    records: Mutex<HashMap<Name, Arc<Known>>>,
    /// Pulls and pushes under way.
    active: AtomicUsize,
    /// No new ones: the link is about to be unlinked.
    settling: AtomicBool,
    requests: Counters,
    transfers: Counters,
}

#[derive(Debug, Default)]
struct Calls {
    idle: Vec<Arc<Stream>>,
    busy: Vec<Arc<Stream>>,
    /// Streams being opened from here.
    opening: usize,
    /// Streams the peer was asked to open.
    asked: usize,
    /// Calls that wait for a stream.
    waiting: usize,
}

/// A stream that one call has for itself.
#[derive(Debug)]
pub(crate) struct Lease<'a> {
    link: &'a Link,
    stream: Arc<Stream>,
    /// Whether request and reply were complete, so that the next call may use the stream.
    pub(crate) whole: bool,
}

impl Link {
    pub(super) fn new(
        id: u64,
        kind: Kind,
        peer: Peer,
        transport: &'static str,
        reach: Option<Reach>,
        control: Arc<Stream>,
        dialer: Option<Dialer>,
    ) -> Arc<Link> {
        Arc::new(Link {
            id,
            kind,
            peer,
            transport,
            reach,
            control,
            dialer,
            calls: Mutex::default(),
            changed: Condvar::new(),
            serving: Mutex::default(),
            why: OnceLock::new(),
            opened: Instant::now(),
            heard: AtomicU64::new(0),
            records: Mutex::default(),
            active: AtomicUsize::new(0),
            settling: AtomicBool::new(false),
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
        if self.settling.load(Ordering::SeqCst) {
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

    /// As it is now.
    pub(super) fn state(&self) -> LinkState {
        let seen = |yes| if yes { "process" } else { "stream" };
        LinkState {
            cluster: self.peer.cluster,
            address: self.peer.address.clone(),
            transport: self.transport,
            pools: if self.reach.is_some() { "mapped" } else { "stream" },
            registered: seen(self.reach.as_ref().is_some_and(|reach| reach.refusal().is_none())),
            refusal: self.reach.as_ref().and_then(|reach| reach.refusal()).map(str::to_owned),
            outgoing: self.kind == Kind::Outgoing,
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

    /// When and why it broke.
    pub(super) fn why(&self) -> Option<&(Instant, String)> {
        self.why.get()
    }

    /// Ends it, once: the first reason stays. Whoever waits on one of its streams wakes.
    pub(super) fn shatter(&self, why: impl Into<String>) {
        if self.why.set((Instant::now(), why.into())).is_err() {
            return;
        }
        self.control.close();
        let mut calls = self.locked();
        let Calls { idle, busy, .. } = &mut *calls;
        for stream in idle.drain(..).chain(busy.iter().cloned()) {
            stream.close();
        }
        drop(calls);
        for stream in self.served().iter() {
            stream.close();
        }
        self.changed.notify_all();
    }

    pub(super) fn control(&self) -> &Stream {
        &self.control
    }

    /// Sends one control message; a peer that does not read loses it.
    pub(super) fn tell(&self, message: &Control) -> Result<()> {
        self.control.send(&wire::encode(message)?, Deadline::after(CONTROL_LIMIT))
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

    /// A stream for one call: one that is idle, or a new one. Waits for its turn until `deadline`.
    pub(crate) fn lease(&self, deadline: Deadline) -> Result<Lease<'_>> {
        let mut calls = self.locked();
        calls.waiting += 1;
        let (mut calls, turn) = self.queue(calls, deadline);
        calls.waiting -= 1;
        drop(calls);
        match turn? {
            Turn::Idle(stream) => Ok(Lease { link: self, stream, whole: false }),
            Turn::Dial(dialer) => self.dial(dialer, deadline),
        }
    }

    fn queue<'a>(&'a self, mut calls: Locked<'a>, deadline: Deadline) -> (Locked<'a>, Result<Turn<'a>>) {
        loop {
            if let Err(error) = self.check() {
                return (calls, Err(error));
            }
            if let Some(stream) = calls.idle.pop() {
                calls.busy.push(stream.clone());
                return (calls, Ok(Turn::Idle(stream)));
            }
            if calls.busy.len() + calls.opening + calls.asked < MOST_CALLS {
                if let Some(dialer) = &self.dialer {
                    calls.opening += 1;
                    return (calls, Ok(Turn::Dial(dialer)));
                }
                if calls.asked < calls.waiting {
                    calls.asked += 1;
                    drop(calls);
                    // Loses the message rather than wait for a peer that does not read.
                    let told = self.tell(&Control::Dial);
                    calls = self.locked();
                    if let Err(error) = told {
                        calls.asked = calls.asked.saturating_sub(1);
                        return (calls, Err(self.named(error)));
                    }
                    continue;
                }
            }
            drop(self.changed.wait_timeout(calls, deadline.nap()));
            let late = deadline.waiting("waiting for a stream to the peer");
            calls = self.locked();
            if calls.idle.is_empty()
                && let Err(error) = late
            {
                // The stream that was asked for may never come: the next call asks again.
                calls.asked = calls.asked.saturating_sub(1);
                return (calls, Err(self.named(error)));
            }
        }
    }

    fn dial(&self, dialer: &Dialer, deadline: Deadline) -> Result<Lease<'_>> {
        let opened = dialer.call(self, false, deadline).map(Arc::new);
        let mut calls = self.locked();
        calls.opening -= 1;
        let stream = opened.map_err(|error| self.named(error))?;
        calls.busy.push(stream.clone());
        drop(calls);
        let lease = Lease { link: self, stream, whole: false };
        self.check()?;
        Ok(lease)
    }

    /// A stream on which the peer, who opened it, lets this side call.
    pub(super) fn lend(&self, stream: Arc<Stream>) {
        let mut calls = self.locked();
        calls.asked = calls.asked.saturating_sub(1);
        if self.alive() {
            calls.idle.push(stream);
        } else {
            stream.close();
        }
        drop(calls);
        self.changed.notify_all();
    }

    /// Opens a stream on which the peer may call this side.
    pub(super) fn open_reverse(&self, deadline: Deadline) -> Result<Stream> {
        match &self.dialer {
            Some(dialer) => dialer.call(self, true, deadline),
            None => Err(Error::new(ErrorKind::System, "this side of the link has no address to dial")),
        }
    }

    /// Notes a stream on which the peer's calls are answered, so that breaking the link ends it.
    pub(super) fn serve_on(&self, stream: &Arc<Stream>) {
        self.served().push(stream.clone());
        if !self.alive() {
            stream.close();
        }
    }

    /// Forgets a stream that has ended.
    pub(super) fn served_on(&self, stream: &Arc<Stream>) {
        self.served().retain(|known| !Arc::ptr_eq(known, stream));
    }

    /// What is known of a far cache.
    pub(crate) fn record(&self, name: &Name) -> Option<Arc<Known>> {
        self.recorded().get(name).cloned()
    }

    /// Keeps what is known of a far cache.
    pub(crate) fn remember(&self, name: Name, known: Arc<Known>) {
        let mut records = self.recorded();
        if records.len() >= MOST_RECORDS {
            records.clear();
        }
        records.insert(name, known);
    }

    /// Forgets a far cache.
    pub(crate) fn forget(&self, name: &Name) {
        self.recorded().remove(name);
    }

    /// The same error with the names of the peer.
    pub(crate) fn named(&self, error: Error) -> Error {
        error.with("cluster", self.peer.cluster).with("peer", &self.peer.address)
    }

    fn locked(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn served(&self) -> MutexGuard<'_, Vec<Arc<Stream>>> {
        self.serving.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn recorded(&self) -> MutexGuard<'_, HashMap<Name, Arc<Known>>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

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

impl Lease<'_> {
    /// The stream.
    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut calls = self.link.locked();
        calls.busy.retain(|stream| !Arc::ptr_eq(stream, &self.stream));
        if self.whole && self.link.alive() && calls.idle.len() < KEPT_STREAMS {
            calls.idle.push(self.stream.clone());
        } else {
            self.stream.close();
        }
        drop(calls);
        self.link.changed.notify_one();
    }
}

type Locked<'a> = MutexGuard<'a, Calls>;

/// What a call gets when its turn comes: a stream, or leave to open one.
enum Turn<'a> {
    Idle(Arc<Stream>),
    Dial(&'a Dialer),
}

/// The error of a call over a link that has broken.
#[cold]
pub(super) fn broken(cluster: ClusterId, when: Instant, why: &str) -> Error {
    let text = format!("the link to cluster {cluster} broke: {why}; link again");
    Error::new(ErrorKind::NotLinked, text).with("broke_ms_ago", when.elapsed().as_millis())
}
