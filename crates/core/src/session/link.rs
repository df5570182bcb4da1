//! One link to a peer: who the peer is, whether the link is alive, and its parts.
//!
//! Links are made in `establish` and `accept`. `control_thread` detects that a peer is gone, and
//! `call_streams` gives each call its stream.

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::call_pool::CallPool;
use super::control_channel::ControlChannel;
use super::dial::Dialer;
use super::limits::{ahead, body_time};
use super::notification_window::Notifications;
use super::peer_memory::PeerMemory;
use super::poller::next_number;
use super::remote_view::RemoteView;
use super::served::Served;
use crate::budget::{Budget, BudgetShare, PeerBudget};
use crate::config::LinkConfig;
use crate::error::{Error, ErrorKind, Result};
use crate::events::{LinkEnd, PeerInfo};
use crate::model::{ClusterId, Deadline};
use crate::net::Stream;
use crate::protocol::{self, ControlMessage};
use crate::stats::{LinkState, LinkStats};
use crate::sync::MutexGuard;

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

/// Checks that the engine `peer` has the name `expected`, if it is given. Otherwise returns `Err(LinkFailed)`.
pub(super) fn check_name(peer: &PeerInfo, expected: Option<&str>) -> Result<()> {
    let Some(expected) = expected.filter(|expected| **expected != *peer.name) else { return Ok(()) };
    let text = format!("the peer at {} is named '{}', not '{expected}'", peer.address, peer.name);
    Err(Error::new(ErrorKind::LinkFailed, text).permanent())
}

/// The cluster id and the instance number of an engine.
pub(super) type EngineId = (ClusterId, u64);

/// A link to one peer. When it breaks, it ends its parts.
#[derive(Debug)]
pub struct Link {
    /// The id of the link, the same on both sides.
    pub(super) id: u64,
    /// A number that no other link of this process has, and no other descriptor that the control thread watches.
    pub(super) number: u64,
    pub(super) kind: Kind,
    pub(crate) peer: Arc<PeerInfo>,
    /// How long the peer may write for one push.
    pub(super) pin_limit: Duration,
    broken: OnceLock<(Instant, EndReason)>,
    /// Whether the streams were closed.
    closed: AtomicBool,
    /// The address at which a link call has found the peer. Another engine may listen there later.
    pub(super) found_at: OnceLock<SocketAddr>,
    pub(super) control: ControlChannel,
    pub(crate) calls: CallPool,
    pub(super) served: Served,
    pub(crate) view: RemoteView,
    pub(super) notifications: Notifications,
    /// The memory that the peer makes this process hold.
    pub(super) budget: Arc<PeerBudget>,
    pub(crate) stats: LinkStats,
}

impl Link {
    /// Makes a link to a peer.
    pub(super) fn new(
        id: u64,
        kind: Kind,
        peer: PeerInfo,
        view: RemoteView,
        control: Arc<Stream>,
        dialer: Option<Dialer>,
        (budget, config): (&Arc<Budget>, &LinkConfig),
    ) -> Arc<Link> {
        Arc::new(Link {
            id,
            number: next_number(),
            kind,
            peer: Arc::new(peer),
            pin_limit: config.pin_limit,
            broken: OnceLock::new(),
            closed: AtomicBool::new(false),
            found_at: OnceLock::new(),
            control: ControlChannel::new(control),
            calls: CallPool::new(dialer),
            served: Served::new(config.silence),
            view,
            notifications: Notifications::default(),
            budget: PeerBudget::new(budget),
            stats: LinkStats::default(),
        })
    }

    /// Whether the peer has dialled this side for the link, or both sides belong to a communicator.
    pub(super) fn is_incoming(&self) -> bool {
        match self.kind {
            Kind::Outgoing => false,
            Kind::Incoming | Kind::Communicator(_) => true,
            Kind::Ensured => self.calls.dialer().is_none(),
        }
    }

    /// Describes the end of the link for the program, which gets no message of the link any more. `why` is the reason of a
    /// link that has not broken yet.
    pub(super) fn end_info(&self, why: impl Into<EndReason>) -> LinkEnd {
        self.mark_broken(why);
        self.notifications.end();
        let reason = self.break_reason().map_or_else(String::new, |(_, why)| why.0.to_string());
        LinkEnd {
            peer: PeerInfo::clone(&self.peer),
            reason,
            unacknowledged: self.notifications.unacknowledged(),
        }
    }

    /// Begins a pull or push. An unlink waits until the returned guard is dropped. Returns `Err` with
    /// `NotLinked` if the link has broken or is being unlinked.
    pub(crate) fn begin(&self) -> Result<impl Drop> {
        // Counted before the check, so that `drain` either sees the count or is seen here.
        let active = self.calls.begin();
        self.check()?;
        if self.calls.unlinks() {
            let text = format!("the link to {} is being unlinked", self.peer);
            return Err(Error::new(ErrorKind::NotLinked, text));
        }
        Ok(active)
    }

    /// Returns the current state, for `stats()`.
    pub(super) fn state(&self) -> LinkState {
        let memory = self.view.local();
        let by_process = memory.is_some_and(|memory| memory.refusal().is_none());
        let ((requests, transfers), (paths, staged_bytes, sockets_reason)) =
            (self.stats.calls(), self.stats.paths());
        LinkState {
            cluster: self.peer.cluster,
            address: self.peer.address.clone(),
            transport: self.control.stream().about.transport,
            pools: memory.map_or("stream", PeerMemory::pools),
            registered: if by_process { "process" } else { "stream" },
            refusal: memory.and_then(|memory| memory.unmapped().or(memory.refusal())).map(str::to_owned),
            outgoing: self.calls.dialer().is_some(),
            call_rings: self.ringed(false) + self.ringed(true),
            call_rings_refusal: self.calls.rings_refusal(),
            silent_ms: u64::try_from(self.control.silent().as_millis()).unwrap_or(u64::MAX),
            requests,
            transfers,
            paths,
            staged_bytes,
            sockets_reason,
        }
    }

    /// Whether the link has not broken.
    pub fn alive(&self) -> bool {
        self.broken.get().is_none()
    }

    /// Whether the link [works](Self::works), and this side is not unlinking it.
    pub(super) fn is_kept(&self, silence_limit: Duration) -> bool {
        !self.calls.unlinks() && self.works(silence_limit)
    }

    /// Checks that the link has not broken. Otherwise returns `Err` with `NotLinked` and the reason.
    pub fn check(&self) -> Result<()> {
        self.broken.get().map_or(Ok(()), |(when, why)| Err(broken(&self.peer, *when, why)))
    }

    /// Whether the link has not broken, and the peer has not closed it.
    pub(super) fn stands(&self) -> bool {
        self.alive() && !self.control.stream().abandoned()
    }

    /// Whether the peer gave a sign of life within `silence_limit`, or a message from it is waiting to be read.
    /// Each side sends something at least once per heartbeat, so this neither asks the peer nor waits.
    pub(super) fn works(&self, silence_limit: Duration) -> bool {
        let unread = || self.control.stream().readable_within(Duration::ZERO);
        self.stands() && (self.control.silent() < silence_limit || unread())
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
    pub(super) fn break_reason(&self) -> Option<&(Instant, EndReason)> {
        self.broken.get()
    }

    /// Makes all later calls fail. Keeps only the first reason, and returns `true` if this call gave it. The streams stay open until
    /// [`break_off`](Self::break_off).
    pub(super) fn mark_broken(&self, why: impl Into<EndReason>) -> bool {
        // The peer ends the link as well, and may be first.
        let why = if self.calls.unlinks() { UNLINKED_HERE.into() } else { why.into() };
        self.broken.set((Instant::now(), why)).is_ok()
    }

    /// Ends the link. Only the first call has an effect, and its reason is kept. Wakes all threads that wait
    /// on its streams.
    pub(super) fn break_off(&self, why: impl Into<EndReason>) {
        self.mark_broken(why);
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.view.end();
        self.control.end();
        self.served.end();
        self.calls.end();
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
            match self.budget.admit(bytes as u64, ahead(bytes), deadline.wait_limit()) {
                Ok(share) => return Ok((share, deadline)),
                Err(error) if deadline.passed() => return Err(self.named(error)),
                Err(_) => deadline.interruption("waiting for memory for a reply")?,
            }
        }
    }

    /// Sends one control message. The link breaks if the peer does not read its control stream.
    pub(super) fn send_control(&self, message: &ControlMessage) -> Result<()> {
        self.send_control_with(&self.control.lock(), message)
    }

    /// Sends one message on the control stream with the right to send, which the caller already holds.
    pub(super) fn send_control_with<T: Serialize>(&self, _: &MutexGuard<'_, ()>, message: &T) -> Result<()> {
        let frame = protocol::encode(message)?;
        self.control.stream().send_now(&frame, &[]).inspect_err(|error| {
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
        let (limit, before) = (Deadline::after(limit), self.control.pongs());
        if self.send_control(&ControlMessage::Ping).is_err() {
            return false;
        }
        let pongs = self.control.wait_while(limit, |pongs| self.alive() && pongs == before);
        self.alive() && pongs != before
    }

    /// Waits until the link has ended or `limit` has passed.
    pub(super) fn wait_until_broken(&self, limit: Deadline) {
        self.control.wait_while(limit, |_| self.alive());
    }

    /// Returns the number of streams with rings on which this side answers requests (`serves`) or sends them.
    pub(super) fn ringed(&self, serves: bool) -> usize {
        if serves { self.served.count(Stream::has_rings) } else { self.calls.ringed() }
    }

    /// Returns `error` with what tells which engine the peer is.
    pub(crate) fn named(&self, error: Error) -> Error {
        self.peer.named(error)
    }
}

/// Why a link has ended.
#[derive(Clone, Debug)]
pub(super) struct EndReason(Error);

impl From<Error> for EndReason {
    fn from(error: Error) -> Self {
        EndReason(error)
    }
}

impl From<&str> for EndReason {
    fn from(text: &str) -> Self {
        EndReason(Error::new(ErrorKind::NotLinked, text))
    }
}

impl From<String> for EndReason {
    fn from(text: String) -> Self {
        EndReason(Error::new(ErrorKind::NotLinked, text))
    }
}

impl EndReason {
    /// Returns it for the log of an engine.
    pub(super) fn for_engine(&self, native: bool) -> impl fmt::Display {
        self.0.for_engine(native)
    }
}

/// Why a link has ended that this side unlinked.
pub(super) const UNLINKED_HERE: &str = "it was unlinked here";
/// Why a link has ended whose connection the peer closed without a goodbye, in whatever way this side noticed it.
pub(super) const HUNG_UP: &str =
    "the peer closed the connection: its process ended or was killed, or it dropped the link";

/// Returns the error of a call over a link that has broken.
pub(super) fn broken(peer: &PeerInfo, when: Instant, why: &EndReason) -> Error {
    let error = Error::new(ErrorKind::NotLinked, format!("the link to {peer} broke; link again"));
    peer.named(error.with("broke_ms_ago", when.elapsed().as_millis())).because(why.0.clone())
}

/// Whether a living link leads to the same process as another one.
pub(super) fn is_same_peer(link: &Link, other: &Link) -> bool {
    link.alive() && link.peer.incarnation == other.peer.incarnation
}

/// Returns why `link` replaces `old`.
pub(super) fn replaced_because(link: &Link, old: &Link) -> &'static str {
    if link.peer.incarnation == old.peer.incarnation {
        "the peer linked again"
    } else {
        "the peer was restarted and linked again"
    }
}

/// Whether `link` would replace `other`, a link to the same cluster.
pub(super) fn replaces(link: &Link, other: &Link) -> bool {
    other.kind == link.kind || other.peer.incarnation != link.peer.incarnation
}
