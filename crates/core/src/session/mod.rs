//! Links to other clusters, and the threads that listen, run handshakes, send heartbeats and answer peers.
//!
//! ```text
//! link_clusters ────── establish ── handshake ─┐
//! listener ─────────── accept ───── handshake ─┼─ link ── control stream ── control_thread (also accepts)
//! link (rank table) ── communicator ───────────┘      └── call streams ──── server (threads call `Answer`)
//! ```
//!
//! One lock (`state`) guards the set of links. It is held for look-ups only and never while waiting for a
//! socket. A thread that holds it may lock the progress of a communicator, never the other way round.

mod accept;
mod answers;
mod call_slots;
mod call_streams;
mod client;
mod communicator;
mod control_thread;
mod dial;
mod establish;
mod handshake;
mod limits;
mod link;
mod listeners;
mod member_search;
mod message_io;
mod peer_memory;
mod pending;
mod poller;
mod pushes_in_flight;
mod refusals;
mod registry;
mod remote_cache;
mod server;
mod stream_pool;
mod threads;

pub(crate) use answers::Answers;
pub use communicator::CommStatus;
pub use link::{Kind, Link};

pub(crate) use call_streams::Lease;
pub(crate) use client::{SAID_BY, limit_ms, reply};
pub(crate) use message_io::{say, say_before};
pub(crate) use peer_memory::location;
pub(crate) use remote_cache::Known;

use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::cluster::Cluster;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::net::{Address, Stream, Tcp, Transport, Unix};
use crate::protocol::{Comm, Control};
use crate::stats::LinkState;
use crate::validate::rank_table::RankEnd;
use control_thread::ControlThread;
use handshake::Me;
use limits::Connections;
use listeners::Listeners;
use refusals::Refusals;
use registry::State;
use server::Server;
use threads::Threads;

/// Shortest and longest time after which another link may replace the link of a silent peer.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// How long closing waits for threads that are still answering a peer.
const FAREWELL: Duration = Duration::from_secs(10);

/// Answers the requests of peers.
pub(crate) trait Answer: Send + Sync {
    /// Answers the next request on `stream`, which has arrived or is arriving. Returns `false` if the stream
    /// has ended. If the peer unlinks, calls `unlinked` before it sends the reply, so that no trace of the
    /// link is left here when the peer receives the reply.
    fn answer(&self, link: &Arc<Link>, stream: &Stream, unlinked: &dyn Fn()) -> Result<bool>;
}

/// The address of one cluster in a `link_clusters` or `unlink_clusters` call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// The cluster id of the peer.
    pub cluster: ClusterId,
    /// The addresses of the peer. Linking requires exactly one.
    pub remote: Vec<SocketAddr>,
    /// The addresses of this side. Their ports are ignored.
    pub local: Vec<SocketAddr>,
}

/// The transports over which streams reach peers.
#[derive(Clone, Debug)]
pub struct Transports {
    /// For peers on other hosts, and for peers that are linked by TCP only.
    pub tcp: Arc<dyn Transport>,
    /// For peers on this host.
    pub unix: Arc<dyn Transport>,
}

impl Default for Transports {
    fn default() -> Self {
        Transports { tcp: Arc::new(Tcp), unix: Arc::new(Unix) }
    }
}

/// All links of one engine. Dropping it ends the links and waits up to 10 s for their threads.
pub(crate) struct Links {
    shared: Arc<Shared>,
}

/// The state that the threads share.
pub(crate) struct Shared {
    cluster: Arc<Cluster>,
    me: Me,
    answer: Box<dyn Answer>,
    state: State,
    control: Arc<ControlThread>,
    server: Arc<Server>,
    limits: Connections,
    refusals: Refusals,
    listeners: Listeners,
    /// Whether the warning that other processes may read this one has been logged.
    opened_to_readers: AtomicBool,
    threads: Arc<Threads>,
    transports: Transports,
}

impl Links {
    /// Creates the state without links, and starts a listener if the configuration names an address. Returns
    /// `Err` if the system refuses a descriptor, random bytes or the listening address.
    pub(crate) fn open(
        cluster: Arc<Cluster>,
        answer: Box<dyn Answer>,
        transports: Transports,
    ) -> Result<Links> {
        let config = &cluster.config;
        let (threads, limits) = (Arc::<Threads>::default(), Connections::of_this_process());
        let shared = Arc::new(Shared {
            me: Me::new(config.cluster, config.remote_accessible)?,
            answer,
            state: State::new(limits),
            control: Arc::new(ControlThread::new()?),
            server: Arc::new(Server::new(threads.clone(), limits)?),
            limits,
            refusals: Refusals::default(),
            listeners: Listeners::default(),
            opened_to_readers: AtomicBool::default(),
            threads,
            transports,
            cluster,
        });
        let links = Links { shared };
        if let Some(address) = links.shared.cluster.config.links.listen {
            links.shared.listeners.change(&links.shared, Some(address))?;
        }
        Ok(links)
    }

    /// Returns the address of the main listener, if there is one.
    pub(crate) fn listening(&self) -> Option<SocketAddr> {
        self.shared.listeners.listening()
    }

    /// Links to `peer` as the side that calls `link_clusters`. Returns `Err` with `AlreadyLinked` if a link
    /// exists whose peer still answers.
    pub(crate) fn link(&self, peer: &PeerAddress, deadline: Deadline) -> Result<()> {
        let address = one_address(peer)?;
        let _turn = self.shared.state.turn_to_link(peer.cluster, deadline)?;
        self.shared.unless_linked(peer.cluster, deadline)?;
        self.shared.connect(&address, peer.cluster, None, Kind::Outgoing, deadline).map(|_| ())
    }

    /// Ends every link to `peer` that `link_clusters` made on either side. With `force` it does not wait for
    /// the peer: it sends a goodbye and does not check whether that arrives. A cluster that is not linked, or
    /// whose link ends meanwhile, is not an error. Without `force`, returns `Err` with `Timeout`,
    /// `Interrupted` or `UnlinkFailed` if the peer does not confirm; the links are dropped here anyway.
    pub(crate) fn unlink(&self, peer: &PeerAddress, force: bool, deadline: Deadline) -> Result<()> {
        if !force {
            one_address(peer)?;
        }
        self.shared.state.forgive(peer.cluster);
        let mut told = Ok(());
        for link in self.shared.state.of(peer.cluster) {
            if let Kind::Communicator(_) = link.kind() {
                continue;
            }
            if !force {
                let done = link.settle(deadline).and_then(|()| link.unlink(deadline));
                told = told.and(done.or_else(|error| unlinked(&link, error, deadline)));
            }
            self.shared.drop_link(&link, "it was unlinked here");
        }
        told
    }

    /// Returns the link for calls to `cluster`, chosen as in `State::find`. Waits for a link that a
    /// communicator is still preparing.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.state.find(cluster, self.shared.patience(), deadline)
    }

    /// Returns a handle that finds links as [`find_other`](Self::find_other) does without keeping the engine
    /// alive.
    pub(crate) fn finder(&self) -> Finder {
        Finder(Arc::downgrade(&self.shared))
    }

    /// Whether `cluster` is the cluster id of this engine.
    pub(crate) fn goes_by(&self, cluster: ClusterId) -> bool {
        cluster.0 == self.shared.me.party.cluster
    }

    /// Returns the link to another engine with the id `cluster`. Without the cache manager, that engine may
    /// have the same cluster id as this one (`two_engines_of_one_id`). A link of this engine to itself is
    /// refused, because it carries no transfers.
    pub(crate) fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.find_other(cluster, deadline)
    }

    /// Enters a communicator and returns its id. Links to its members are made in the background.
    pub(crate) fn enter(&self, comm: Comm, ends: Vec<RankEnd>) -> Result<u64> {
        communicator::enter(&self.shared, comm, ends)
    }

    /// Leaves a communicator and ends its links.
    pub(crate) fn leave(&self, comm: u64) -> Result<()> {
        communicator::leave(&self.shared, comm)
    }

    /// Returns the progress of a communicator.
    pub(crate) fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.shared.state.comm_status(comm)
    }

    /// Whether a link exists or is being made.
    pub(crate) fn any(&self) -> bool {
        self.shared.state.any()
    }

    /// Whether a communicator was ever entered.
    pub(crate) fn ranked(&self) -> bool {
        self.shared.state.ranked()
    }

    /// Moves the main listener to `address`, or closes it. Returns `Err` with `LinksExist` if a link exists
    /// or is being made.
    pub(crate) fn listen(&self, address: Option<SocketAddr>) -> Result<()> {
        let _quiet = self.shared.state.quiet()?;
        self.shared.listeners.change(&self.shared, address)
    }

    /// Returns the state of every link.
    pub(crate) fn states(&self) -> Vec<LinkState> {
        self.shared.state.states()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        self.shared.listeners.close(&self.shared);
        self.shared.state.close();
        self.shared.server.close();
        self.shared.control.ring();
        self.shared.threads.wait(FAREWELL);
    }
}

/// Finds links for objects that may outlive the engine.
pub(crate) struct Finder(Handle);

impl Finder {
    /// Finds a link as [`Links::find_other`] does. Returns `Err` with `Closed` if the engine was finalized.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let closed = || Error::new(ErrorKind::Closed, "the engine was finalized");
        self.0.upgrade().ok_or_else(closed)?.find_other(cluster, deadline)
    }
}

/// Refuses a transfer between the engine and itself.
#[cold]
pub(crate) fn own(cluster: ClusterId) -> Error {
    Error::argument("cluster_id", cluster, "another cluster: this one's own caches need no transfer")
}

impl Shared {
    /// How long a peer may be silent before its link may be treated as dead: two heartbeats, clamped to
    /// [`PATIENCE`] so that neither a slow network nor a very long heartbeat makes the value unreasonable.
    fn patience(&self) -> Duration {
        self.cluster.config.links.heartbeat.saturating_mul(2).clamp(PATIENCE.0, PATIENCE.1)
    }

    fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let link = self.state.find(cluster, self.patience(), deadline)?;
        if link.peer().instance == self.me.party.instance { Err(own(cluster)) } else { Ok(link) }
    }

    /// Ends a link that broke. Returns `false` if the link was already removed or replaced.
    fn lost(&self, link: &Arc<Link>, why: &str) -> bool {
        link.shatter(why);
        let removed = self.state.remove(link);
        // A link that this side is unlinking ends as expected, whichever side closes it first.
        if removed && !link.settles() {
            // The first recorded reason is the one that counts.
            let why = link.why().map_or(why, |(_, why)| why);
            tracing::warn!(target: "llm_datadist::links", "the link to cluster {} broke: {why}", link.peer().cluster);
        }
        removed
    }

    /// Handles a peer that ended but may return: a communicator searches for it again.
    fn died(self: &Arc<Self>, link: &Arc<Link>, why: &str) {
        if self.lost(link, why) {
            member_search::mend(self, link);
        }
    }

    /// Ends a link that this side no longer wants.
    fn drop_link(&self, link: &Arc<Link>, why: &str) {
        let _ = link.tell(&Control::Bye { reason: "the peer unlinked".into(), unlinked: true });
        link.shatter(why);
        self.state.remove(link);
        self.state.forgive(link.peer().cluster);
        self.control.ring();
    }

    /// Answers the next request on `stream`. Returns `false` if no further request will arrive on it.
    fn serve(&self, link: &Arc<Link>, stream: &Arc<Stream>) -> bool {
        let gone = std::cell::Cell::new(false);
        let unlinked = || gone.set(self.state.remove(link));
        let on = self.answer.answer(link, stream, &unlinked).unwrap_or_else(|error| {
            // Logged only while the link is alive: the reason why a link broke is logged elsewhere.
            if link.alive() {
                let cluster = link.peer().cluster;
                tracing::info!(target: "llm_datadist::links", "a call of cluster {cluster} ended early: {error}");
            }
            false
        });
        if gone.get() {
            stream.close();
            self.drop_link(link, "the peer unlinked");
            return false;
        }
        on
    }
}

/// Opens a stream on which the peer of `link` may send requests.
fn open_reverse(link: &Link) -> Result<Arc<Stream>> {
    let deadline = Deadline::after(handshake::GREETING_TIME).named("the limit of a greeting");
    link.open_reverse(deadline).map(Arc::new)
}

fn one_address(peer: &PeerAddress) -> Result<Address> {
    match peer.remote.as_slice() {
        [address] => Ok(Address::Tcp(*address)),
        all => {
            let error = Error::argument("len(remote_ip_info_list)", all.len(), "exactly one remote address");
            Err(error.with("cluster", peer.cluster))
        }
    }
}

/// Decides the result of an unlink that the peer did not answer. A link that has ended counts as unlinked
/// (`both_sides_may_unlink_at_once`, `a_goodbye_that_is_read_late_is_one`).
#[cold]
fn unlinked(link: &Link, error: Error, deadline: Deadline) -> Result<()> {
    if error.kind() == ErrorKind::NotLinked {
        // The peer's own unlink may have ended the call. Its goodbye arrives on the control stream, so wait
        // for it.
        let limit = Deadline::after(link::ANSWER_TIME.min(deadline.left()));
        // If even the ping fails, the goodbye may still be unread.
        if !link.answers(limit.left()) {
            link.ends(limit);
        }
    }
    match error.kind() {
        ErrorKind::Timeout | ErrorKind::Interrupted => Err(error),
        _ if !link.alive() => Ok(()),
        _ => {
            let text = "the peer could not be told; the link is dropped on this side";
            Err(Error::new(ErrorKind::UnlinkFailed, text).because(error))
        }
    }
}

/// A weak handle for threads, so that they never keep an engine alive.
type Handle = Weak<Shared>;

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.states()).finish()
    }
}
