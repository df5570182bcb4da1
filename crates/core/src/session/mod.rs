//! Links: which clusters this one is linked with, and the threads that listen, greet and keep them alive.
//!
//! ```text
//! link_clusters ── dialer ─── greeting ─┐
//! listener ─────── accept ─── greeting ─┼─ link ── control stream ── control (one thread, which also accepts)
//! link (rank table) ── communicator ────┘      └── call streams ──── server (a few threads); answered by `Answer`
//! ```
//!
//! One lock (`state`), held for a few look-ups and never across a socket; under it only the progress of a communicator is
//! looked at, never the other way round. Not for: what a peer may ask (`peer`), or moving bytes
//! (`engine`).

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
pub use link::{Kind, Link, Peer};

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

/// Least and most time after which a silent peer may lose its place to another.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_secs(10));
/// How long closing waits for threads that are still answering a peer.
const FAREWELL: Duration = Duration::from_secs(10);

/// Answers what peers ask.
pub(crate) trait Answer: Send + Sync {
    /// Answers the next request on `stream`, which is there or on its way; `false` if the stream has ended. If the peer
    /// unlinks, `unlinked` is called before it is answered, so that the peer, once it knows, finds no trace of the link here.
    fn answer(&self, link: &Arc<Link>, stream: &Stream, unlinked: &dyn Fn()) -> Result<bool>;
}

/// Where one cluster of a `link_clusters` or `unlink_clusters` call is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// Its cluster id.
    pub cluster: ClusterId,
    /// Addresses it may be reached at: exactly one to link.
    pub remote: Vec<SocketAddr>,
    /// Addresses of this side, of which the port has no meaning.
    pub local: Vec<SocketAddr>,
}

/// How streams reach peers.
#[derive(Clone, Debug)]
pub struct Transports {
    /// Those of other hosts, and whoever is linked with sockets alone.
    pub tcp: Arc<dyn Transport>,
    /// Those of this host.
    pub unix: Arc<dyn Transport>,
}

impl Default for Transports {
    fn default() -> Self {
        Transports { tcp: Arc::new(Tcp), unix: Arc::new(Unix) }
    }
}

/// Every link of one engine. Dropped, all have ended and so have their threads.
pub(crate) struct Links {
    shared: Arc<Shared>,
}

/// What the threads share.
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
    /// It was said that others may read this process.
    opened_to_readers: AtomicBool,
    threads: Arc<Threads>,
    transports: Transports,
}

impl Links {
    /// No links yet, and a listener if the configuration names an address.
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

    /// Where peers are listened for, if anywhere.
    pub(crate) fn listening(&self) -> Option<SocketAddr> {
        self.shared.listeners.listening()
    }

    /// Links to `peer`, as the side that calls `link_clusters`.
    pub(crate) fn link(&self, peer: &PeerAddress, deadline: Deadline) -> Result<()> {
        let address = one_address(peer)?;
        let _turn = self.shared.state.turn_to_link(peer.cluster, deadline)?;
        self.shared.unless_linked(peer.cluster, deadline)?;
        self.shared.connect(&address, peer.cluster, None, Kind::Outgoing, deadline).map(|_| ())
    }

    /// Ends every link of `link_clusters` with `peer`; with `force` without waiting for it: a goodbye is sent, and nobody
    /// looks whether it arrives. A cluster that is not linked is no error, nor one whose link ends meanwhile.
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

    /// The link that calls to `cluster` use, as `State::find` chooses it. Waits for one that is being made by a rank table.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.state.find(cluster, self.shared.patience(), deadline)
    }

    /// What finds links as [`find_other`](Self::find_other) does, and keeps no engine alive.
    pub(crate) fn finder(&self) -> Finder {
        Finder(Arc::downgrade(&self.shared))
    }

    /// Whether `cluster` is the id of this engine.
    pub(crate) fn goes_by(&self, cluster: ClusterId) -> bool {
        cluster.0 == self.shared.me.party.cluster
    }

    /// The link to `cluster`, another engine. Without the cache manager that one may go by this one's id
    /// (`two_engines_of_one_id`); a link of this engine to itself carries no transfer.
    pub(crate) fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.find_other(cluster, deadline)
    }

    /// Enters a communicator; links to its members come about in the background.
    pub(crate) fn enter(&self, comm: Comm, ends: Vec<RankEnd>) -> Result<u64> {
        communicator::enter(&self.shared, comm, ends)
    }

    /// Leaves a communicator and ends its links.
    pub(crate) fn leave(&self, comm: u64) -> Result<()> {
        communicator::leave(&self.shared, comm)
    }

    /// How far a communicator is.
    pub(crate) fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.shared.state.comm_status(comm)
    }

    /// Whether there is any link, or any on the way.
    pub(crate) fn any(&self) -> bool {
        self.shared.state.any()
    }

    /// Whether a rank-table link was ever asked for.
    pub(crate) fn ranked(&self) -> bool {
        self.shared.state.ranked()
    }

    /// Listens elsewhere, or nowhere. Only without links.
    pub(crate) fn listen(&self, address: Option<SocketAddr>) -> Result<()> {
        let _quiet = self.shared.state.quiet()?;
        self.shared.listeners.change(&self.shared, address)
    }

    /// Every link that lives.
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

/// Finds links for whoever may outlive the engine.
pub(crate) struct Finder(Handle);

impl Finder {
    /// As [`Links::find_other`].
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let closed = || Error::new(ErrorKind::Closed, "the engine was finalized");
        self.0.upgrade().ok_or_else(closed)?.find_other(cluster, deadline)
    }
}

/// The refusal of a transfer with oneself.
#[cold]
pub(crate) fn own(cluster: ClusterId) -> Error {
    Error::argument("cluster_id", cluster, "another cluster: this one's own caches need no transfer")
}

impl Shared {
    /// How long a peer may be silent before its link may be taken for a dead one: two heartbeats, within bounds that neither
    /// a slow network nor a rare heartbeat makes wrong.
    fn patience(&self) -> Duration {
        self.cluster.config.links.heartbeat.saturating_mul(2).clamp(PATIENCE.0, PATIENCE.1)
    }

    fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        let link = self.state.find(cluster, self.patience(), deadline)?;
        if link.peer().instance == self.me.party.instance { Err(own(cluster)) } else { Ok(link) }
    }

    /// A link broke; `false` if that was known, or it had made room for another.
    fn lost(&self, link: &Arc<Link>, why: &str) -> bool {
        link.shatter(why);
        let removed = self.state.remove(link);
        // One that is being unlinked here ends as it should, whichever side is first.
        if removed && !link.settles() {
            // The first reason is the one that counts.
            let why = link.why().map_or(why, |(_, why)| why);
            tracing::warn!(target: "llm_datadist::links", "the link to cluster {} broke: {why}", link.peer().cluster);
        }
        removed
    }

    /// The peer of a link has gone, and may come back.
    fn died(self: &Arc<Self>, link: &Arc<Link>, why: &str) {
        if self.lost(link, why) {
            member_search::mend(self, link);
        }
    }

    /// A link ends because this side wants it to.
    fn drop_link(&self, link: &Arc<Link>, why: &str) {
        let _ = link.tell(&Control::Bye { reason: "the peer unlinked".into(), unlinked: true });
        link.shatter(why);
        self.state.remove(link);
        self.state.forgive(link.peer().cluster);
        self.control.ring();
    }

    /// Answers the next request on `stream`; `false` if nothing more comes on it.
    fn serve(&self, link: &Arc<Link>, stream: &Arc<Stream>) -> bool {
        let gone = std::cell::Cell::new(false);
        let unlinked = || gone.set(self.state.remove(link));
        let on = self.answer.answer(link, stream, &unlinked).unwrap_or_else(|error| {
            // Of interest only while the link goes on: a broken one has been reported with its reason.
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

/// Opens a stream on which the peer of `link` may call.
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

/// What becomes of an unlink whose peer gave no answer: a link that has ended is one that is unlinked
/// (`both_sides_may_unlink_at_once`, `a_goodbye_that_is_read_late_is_one`).
#[cold]
fn unlinked(link: &Link, error: Error, deadline: Deadline) -> Result<()> {
    if error.kind() == ErrorKind::NotLinked {
        // What ended the call may be the peer's own unlink, whose goodbye comes by another stream: it is waited for.
        let limit = Deadline::after(link::ANSWER_TIME.min(deadline.left()));
        // It may even be too late to ask, and the goodbye not read yet.
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

/// A weak handle that threads hold, so that they never keep an engine alive.
type Handle = Weak<Shared>;

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.states()).finish()
    }
}
