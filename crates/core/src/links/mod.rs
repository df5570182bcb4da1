//! Links: which clusters this one is linked with, and the threads that listen, greet and keep them alive.
//!
//! ```text
//! link_clusters ── dialer ── greeting ─┐
//! listener ─────── accept ── greeting ─┼─ link ── control stream ── keeper
//! link (rank table) ── communicator ───┘      └── call streams ──── one call at a time; answered by `Answer`
//! ```
//!
//! One lock, held for a few look-ups and never across a socket. Not for: what a peer may ask (`peer`), or moving bytes
//! (`engine`).

mod accept;
mod communicator;
mod dialer;
mod far;
mod greeting;
mod keeper;
mod link;
mod reach;
mod state;
mod talk;
mod threads;

pub use communicator::CommStatus;
pub use link::{Kind, Link, Peer};

pub(crate) use far::{Known, limit_ms, reply};
pub(crate) use link::Lease;
pub(crate) use reach::location;
pub(crate) use talk::{hear_next, say};

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use crate::check::ranks::RankEnd;
use crate::cluster::Cluster;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::stats::LinkState;
use crate::transport::{Address, Listener, Stream, Tcp, Transport, Unix};
use crate::wire::{Comm, Control, Purpose};
use dialer::Dialer;
use greeting::Me;
use keeper::Bell;
use state::State;
use threads::Threads;

/// How long closing waits for threads that are still answering a peer.
const FAREWELL: Duration = Duration::from_secs(10);

/// Answers what peers ask.
pub(crate) trait Answer: Send + Sync {
    /// Answers the calls that come on `stream` until it ends, or until the peer unlinks: then `unlinked` is called before
    /// it is answered, so that the peer, once it knows, finds no trace of the link here.
    fn answer(&self, link: &Arc<Link>, stream: &Stream, unlinked: &dyn Fn()) -> Result<()>;
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
    bell: Arc<Bell>,
    keeper: OnceLock<()>,
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
        let shared = Arc::new(Shared {
            me: Me::new(config.cluster, config.remote_accessible)?,
            answer,
            state: State::default(),
            bell: Arc::new(Bell::new()?),
            keeper: OnceLock::new(),
            threads: Arc::default(),
            transports,
            cluster,
        });
        let links = Links { shared };
        if let Some(address) = links.shared.cluster.config.links.listen {
            links.shared.listen_main(address)?;
        }
        Ok(links)
    }

    /// Where peers are listened for, if anywhere.
    pub(crate) fn listening(&self) -> Option<SocketAddr> {
        self.shared.state.listening()
    }

    /// Links to `peer`, as the side that calls `link_clusters`.
    pub(crate) fn link(&self, peer: &PeerAddress, deadline: Deadline) -> Result<()> {
        let address = one_address(peer)?;
        let both_ways = self.shared.cluster.config.links.both_ways;
        let _turn = self.shared.state.turn_to_link(peer.cluster, both_ways, deadline)?;
        self.shared.connect(&address, peer.cluster, None, Kind::Outgoing, deadline).map(|_| ())
    }

    /// Ends every link of `link_clusters` with `peer`; with `force` without telling it. A cluster that is not linked is
    /// no error.
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
                told = told.and(done.map_err(unlink_failed));
            }
            self.shared.drop_link(&link, "it was unlinked here");
        }
        told
    }

    /// The link that calls to `cluster` use: the latest that lives. Waits for one that is being made by a rank table.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.state.find(cluster, deadline)
    }

    /// Whether `cluster` is this engine itself, and not another process that goes by the same id.
    pub(crate) fn is_self(&self, cluster: ClusterId) -> bool {
        let me = self.shared.me.party;
        let others = || self.shared.state.of(cluster).iter().any(|link| link.peer().instance != me.instance);
        cluster.0 == me.cluster && !others()
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
        if self.any() {
            let text = "there are links; unlink them before the role is switched";
            return Err(Error::new(ErrorKind::LinksExist, text));
        }
        let now = self.shared.state.listening();
        match address {
            Some(address) if now.is_some_and(|now| now == address) => Ok(()),
            Some(address) => {
                // The new one first: if it cannot be had, the old one stays.
                let old = self.shared.state.take_main();
                let opened = self.shared.listen_main(address);
                match opened {
                    Ok(()) => old.into_iter().for_each(|listener| listener.close()),
                    Err(_) => self.shared.state.put_main(old),
                }
                opened
            }
            None => {
                self.shared.state.take_main().into_iter().for_each(|listener| listener.close());
                Ok(())
            }
        }
    }

    /// Every link that lives.
    pub(crate) fn states(&self) -> Vec<LinkState> {
        self.shared.state.states()
    }

    /// Lines for the log since the last call.
    pub(crate) fn notes(&self) -> Vec<String> {
        self.shared.state.notes()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        for listener in self.shared.state.close() {
            listener.close();
        }
        self.shared.bell.ring();
        self.shared.threads.wait(FAREWELL);
    }
}

impl Shared {
    /// Makes a link to whoever answers at `address`, by way of the local socket where both are on one host.
    fn connect(
        self: &Arc<Self>,
        address: &Address,
        asked: ClusterId,
        comm: Option<&Comm>,
        kind: Kind,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let choice = self.cluster.config.links.transport;
        let link = u64::from_le_bytes(greeting::random()?);
        let purpose = |probe_local| Purpose::Link { link, comm: comm.cloned(), probe_local };
        let probe_local = choice != TransportChoice::Tcp && matches!(address, Address::Tcp(_));
        let dialer = self.dialer(address.clone());
        let (stream, welcome) = dialer.greet(Some(asked), purpose(probe_local), deadline)?;
        let Some(name) = welcome.local.filter(|_| probe_local) else {
            return self.establish(dialer, stream, &welcome.from, kind, link, None, deadline);
        };
        drop(stream);
        let local = self.dialer(Address::Unix(name));
        let shown = Some(address.to_string());
        let near = local.greet(Some(asked), purpose(false), deadline).and_then(|(stream, welcome)| {
            self.establish(local, stream, &welcome.from, kind, link, shown, deadline)
        });
        let Err(why) = near else { return near };
        if choice == TransportChoice::Shm || deadline.passed() {
            return Err(why);
        }
        self.state.note(format!("cluster {asked} is on this host, but only sockets reach it: {why}"));
        let (stream, welcome) = dialer.greet(Some(asked), purpose(false), deadline)?;
        self.establish(dialer, stream, &welcome.from, kind, link, None, deadline)
    }

    /// The dialling side's half of a link: see what can be seen of the peer, and wait for its word that it has its half.
    #[expect(clippy::too_many_arguments, reason = "what a link is made of")]
    fn establish(
        self: &Arc<Self>,
        dialer: Dialer,
        stream: Stream,
        from: &crate::wire::Party,
        kind: Kind,
        id: u64,
        shown: Option<String>,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let transport = transport_name(&dialer.address);
        let near = stream.carries_descriptors();
        let reach = if near { Some(reach::Reach::exchange(&self.cluster, &stream, deadline)?) } else { None };
        if !near && self.cluster.config.links.transport == TransportChoice::Shm {
            let text = "llm.LinkTransport = shm, but the peer is reached by sockets only";
            return Err(Error::new(ErrorKind::LinkFailed, text).with("peer", stream.peer()));
        }
        let up: Control = talk::hear(&stream, crate::wire::GREETING_LIMIT, Duration::ZERO, deadline)?;
        if up != Control::Pong {
            return Err(Error::new(ErrorKind::LinkFailed, "the peer did not confirm the link"));
        }
        let address = shown.unwrap_or_else(|| dialer.address.to_string());
        let peer = Peer { cluster: ClusterId(from.cluster), instance: from.instance, address };
        let link = Link::new(id, kind, peer, transport, reach, Arc::new(stream), Some(dialer));
        self.enroll(&link)?;
        Ok(link)
    }

    /// Enters a link that is complete, in place of what the same peer left behind.
    fn enroll(self: &Arc<Self>, link: &Arc<Link>) -> Result<()> {
        for stale in self.state.enroll(link)? {
            stale.shatter("the peer linked again");
        }
        self.state.note(link.report());
        self.keep()?;
        self.bell.ring();
        Ok(())
    }

    /// Starts the thread that keeps links, once.
    fn keep(self: &Arc<Self>) -> Result<()> {
        if self.keeper.set(()).is_ok() {
            let (weak, bell) = (Arc::downgrade(self), self.bell.clone());
            self.threads.spawn("llm-links", move || keeper::keep(&weak, &bell))?;
        }
        Ok(())
    }

    /// The links the keeper looks after; `None` once all is closed.
    fn kept(&self) -> Option<Vec<Arc<Link>>> {
        self.state.kept()
    }

    /// A link broke.
    fn lost(self: &Arc<Self>, link: &Arc<Link>, why: &str) {
        link.shatter(why);
        if self.state.remove(link) {
            self.state.note(format!("the link to cluster {} broke: {why}", link.peer().cluster));
        }
    }

    /// The peer of a link has gone without a word.
    fn died(self: &Arc<Self>, link: &Arc<Link>, why: &str) {
        self.lost(link, why);
        communicator::mend(self, link);
    }

    /// A link ends because this side wants it to.
    fn drop_link(&self, link: &Arc<Link>, why: &str) {
        let _ = link.tell(&Control::Bye { reason: "the peer unlinked".into(), unlinked: true });
        link.shatter(why);
        self.state.remove(link);
        self.state.forgive(link.peer().cluster);
        self.bell.ring();
    }

    /// Opens a stream on which the peer calls, in a thread that then answers on it.
    fn dial_back(self: &Arc<Self>, link: &Arc<Link>) {
        let (shared, link) = (self.clone(), link.clone());
        let serve = move || {
            let deadline = Deadline::after(greeting::GREETING_TIME).named("the limit of a greeting");
            match link.open_reverse(deadline) {
                Ok(stream) => shared.serve(&link, &Arc::new(stream)),
                Err(error) => shared.state.note(format!("no stream for the calls of the peer: {error}")),
            }
        };
        if let Err(error) = self.threads.spawn("llm-serve", serve) {
            self.state.note(error.to_string());
        }
    }

    /// Answers the peer's calls on `stream` until it ends.
    fn serve(&self, link: &Arc<Link>, stream: &Arc<Stream>) {
        link.serve_on(stream);
        let gone = std::cell::Cell::new(false);
        let unlinked = || gone.set(self.state.remove(link));
        if let Err(error) = self.answer.answer(link, stream, &unlinked) {
            // Of interest only while the link goes on: a broken one has been reported with its reason.
            if link.alive() {
                self.state.note(format!("a call of cluster {} ended early: {error}", link.peer().cluster));
            }
        }
        stream.close();
        link.served_on(stream);
        if gone.get() {
            self.drop_link(link, "the peer unlinked");
        }
    }

    fn dialer(&self, address: Address) -> Dialer {
        let transport = match address {
            Address::Unix(_) => self.transports.unix.clone(),
            _ => self.transports.tcp.clone(),
        };
        Dialer { transport, address, me: self.me.clone(), token: self.cluster.config.links.token.clone() }
    }

    /// The listener of the configured address, and the local socket beside it.
    fn listen_main(self: &Arc<Self>, address: SocketAddr) -> Result<()> {
        let listener = self.listen_at(&Address::Tcp(address))?;
        let config = &self.cluster.config.links;
        if config.token.is_none() && !address.ip().is_loopback() {
            let who = if config.accept_remote {
                "peers of any host (llm.LinkAcceptRemote)"
            } else {
                "peers of this host only"
            };
            self.state
                .note(format!("listening on {} without a token: {who} are accepted", listener.address()));
        }
        self.state.put_main(Some(listener));
        self.listen_local();
        Ok(())
    }

    /// The local socket that peers of this host are sent to; once.
    fn listen_local(self: &Arc<Self>) {
        if self.cluster.config.links.transport == TransportChoice::Tcp || self.state.local_name().is_some() {
            return;
        }
        let name = format!("llm_datadist.{:016x}", self.me.party.instance);
        match self.listen_at(&Address::Unix(name.clone())) {
            Ok(listener) => self.state.put_local(name, listener),
            // Peers of this host come through the other listener and use sockets, as those of other hosts do.
            Err(error) => {
                self.state.note(format!("no local socket, peers of this host use sockets: {error}"));
            }
        }
    }

    /// Listens at `address`, with a thread that accepts.
    fn listen_at(self: &Arc<Self>, address: &Address) -> Result<Arc<dyn Listener>> {
        let Transports { tcp, unix } = &self.transports;
        let transport = if matches!(address, Address::Unix(_)) { unix } else { tcp };
        let listener: Arc<dyn Listener> = transport.listen(address)?.into();
        let (weak, accepting) = (Arc::downgrade(self), listener.clone());
        self.threads.spawn("llm-listen", move || accept::accept(&weak, accepting.as_ref()))?;
        Ok(listener)
    }
}

impl Link {
    /// One line for the log.
    fn report(&self) -> String {
        let way = match (self.transport(), self.reach().map(|reach| reach.refusal())) {
            (transport, Some(None)) => format!("{transport}: pools mapped, registered memory by process id"),
            (transport, Some(Some(why))) => {
                format!("{transport}: pools mapped, registered memory by sockets ({why})")
            }
            (transport, None) => format!("{transport}: sockets"),
        };
        let Peer { cluster, address, .. } = self.peer();
        format!("linked with cluster {cluster} at {address} over {way}")
    }
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

#[cold]
fn unlink_failed(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Timeout | ErrorKind::Interrupted => error,
        _ => {
            let text = "the peer could not be told; the link is dropped on this side";
            Error::new(ErrorKind::UnlinkFailed, text).because(error)
        }
    }
}

fn transport_name(address: &Address) -> &'static str {
    match address {
        Address::Tcp(_) => "tcp",
        Address::Unix(_) => "shm",
        Address::Local(_) => "local",
    }
}

/// A weak handle that threads hold, so that they never keep an engine alive.
type Handle = Weak<Shared>;

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.states()).finish()
    }
}
