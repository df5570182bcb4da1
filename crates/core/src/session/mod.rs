//! Links to other clusters, and the threads that listen, run handshakes, send heartbeats and answer peers.
//!
//! ```text
//! link_clusters, ensure ─ establish ─ handshake ┐
//! listener ─────────── accept ───── handshake ─┼─ link ── control stream ── control_thread (also accepts)
//! link (rank table) ─── membership ────────────┘      └── call streams ──── server (threads call `answers`)
//! ```
//!
//! One lock (`registry`) guards the set of links. It is held for look-ups only and never while waiting for a
//! socket. A thread that holds it may lock the progress of a communicator, never the other way round.

mod accept;
mod answered_writes;
mod answers;
mod call_pool;
mod call_slots;
mod call_streams;
mod client;
mod communicator;
mod control_channel;
mod control_poller;
mod control_thread;
mod dial;
mod dials;
mod ensure;
mod establish;
mod handshake;
mod known_cache;
mod limits;
mod link;
mod link_attempts;
mod listeners;
mod membership;
mod message_io;
mod notification_window;
mod notifications;
mod peer_addresses;
mod peer_memory;
mod peer_snapshot;
mod pending;
mod poller;
mod proof;
mod pushes_in_flight;
mod refusals;
mod registry;
mod remote_view;
mod request_context;
mod served;
mod server;
mod shared;
mod shared_writes;
mod unlink;

pub use communicator::CommStatus;
pub use dial::Transports;
pub use link::Link;
pub use poller::{Poller, Watching};
pub use proof::KeyProof;

pub(crate) use call_streams::StreamLease;
pub(crate) use client::{DescriptionSource, REPORTED_BY};
pub(crate) use ensure::{LinkOnDemand, check_metadata};
pub(crate) use handshake::draw_instance;
pub(crate) use known_cache::KnownCache;
pub(crate) use message_io::{send_message, send_message_before};
pub(crate) use notifications::{ReservedNotification, check_notification};
pub(crate) use peer_memory::location;
pub(crate) use peer_snapshot::{BEING_PUSHED, PeerSnapshot, Validity};
pub(crate) use shared::own;

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::events::PeerInfo;
use crate::model::{ClusterId, Deadline};
use crate::net::Address;
use crate::protocol::Comm;
use crate::resources::Resources;
use crate::stats::LinkState;
use crate::validate::{self, rank_table::RankMember};
use establish::LinkRequest;
use link::Kind;
use shared::Shared;

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

/// All links of one engine. Dropping it ends the links and waits up to 10 s for their threads.
pub(crate) struct Links {
    shared: Arc<Shared>,
}

impl Links {
    /// Creates the state without links, and starts a listener if the configuration names an address. Returns
    /// `Err` if the system refuses a descriptor, random bytes or the listening address.
    pub(crate) fn open(resources: Arc<Resources>, transports: Transports) -> Result<Links> {
        let listen = resources.config.links.listen;
        let links = Links { shared: Arc::new(Shared::new(resources, transports)?) };
        if listen.is_some() {
            links.move_listener(listen)?;
        }
        Ok(links)
    }

    /// Returns the incarnation of this engine: a number that was drawn when it was opened.
    pub(crate) fn incarnation(&self) -> u64 {
        self.shared.me.party.instance
    }

    /// Returns the address of the main listener, if there is one.
    pub(crate) fn listening(&self) -> Option<SocketAddr> {
        self.shared.listeners.listening()
    }

    /// Links to `peer` as the side that calls `link_clusters`. Returns `Err` with `AlreadyLinked` if a link
    /// exists whose peer still answers.
    pub(crate) fn link(&self, peer: &PeerAddress, deadline: Deadline) -> Result<()> {
        let address = one_address(peer)?;
        validate::peer_port(peer.remote[0]).map_err(|error| error.with("cluster", peer.cluster))?;
        let _linking = self.shared.registry.lock_linking(peer.cluster, deadline)?;
        self.shared.unless_linked(peer.cluster, deadline)?;
        control_thread::start(&self.shared)?;
        let request = LinkRequest::new(Some(peer.cluster), Kind::Outgoing);
        self.shared.connect(&address, &request, deadline).map(|_| ())
    }

    /// Prepares a link on demand to the engine at `address`. If `name` is given, the engine must have this name.
    pub(crate) fn on_demand(&self, address: SocketAddr, name: Option<String>) -> LinkOnDemand {
        LinkOnDemand { shared: Arc::downgrade(&self.shared), target: (address, name) }
    }

    /// Ends every link to `peer` that `link_clusters` or `ensure_link` made on either side. With `force` it does not wait for
    /// the peer: it sends a goodbye and does not check whether that arrives. A cluster that is not linked, or
    /// whose link ends meanwhile, is not an error. Without `force`, returns `Err` with `Timeout`,
    /// `Interrupted` or `UnlinkFailed` if the peer does not confirm; the links are dropped here anyway.
    pub(crate) fn unlink(&self, peer: &PeerAddress, force: bool, deadline: Deadline) -> Result<()> {
        if !force {
            one_address(peer)?;
        }
        self.shared.unlink(peer.cluster, force, deadline)
    }

    /// Returns the link for calls to `cluster`, chosen as in `Registry::find`. Waits for a link that a
    /// communicator is still preparing.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.registry.find(cluster, self.shared.silence_limit(), deadline)
    }

    /// Returns a handle that finds links as [`find_other`](Self::find_other) does without keeping the engine
    /// alive.
    pub(crate) fn finder(&self) -> Finder {
        Finder(Arc::downgrade(&self.shared))
    }

    /// Returns the link to another engine with the id `cluster`. Without the cache manager, that engine may
    /// have the same cluster id as this one (`test_layers_travel_between_clusters_of_one_id`). A link of this engine to itself is
    /// refused, because it carries no transfers.
    pub(crate) fn find_other(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.shared.find_other(cluster, deadline)
    }

    /// Enters a communicator and returns its id. Links to its members are made in the background.
    pub(crate) fn enter(&self, comm: Comm, members: Vec<RankMember>) -> Result<u64> {
        control_thread::start(&self.shared)?;
        membership::enter(&self.shared, comm, members)
    }

    /// Leaves a communicator and ends its links.
    pub(crate) fn leave(&self, comm: u64) -> Result<()> {
        membership::leave(&self.shared, comm)
    }

    /// Returns the progress of a communicator.
    pub(crate) fn comm_status(&self, comm: u64) -> Result<CommStatus> {
        self.shared.registry.comm_status(comm)
    }

    /// Whether a link exists or is being made.
    pub(crate) fn any(&self) -> bool {
        self.shared.registry.any()
    }

    /// Whether a communicator was ever entered.
    pub(crate) fn ranked(&self) -> bool {
        self.shared.registry.ranked()
    }

    /// Moves the main listener to `address`, or closes it. Returns `Err` with `LinksExist` if a link exists
    /// or is being made.
    pub(crate) fn listen(&self, address: Option<SocketAddr>) -> Result<()> {
        let _no_links = self.shared.registry.refuse_links()?;
        self.move_listener(address)
    }

    fn move_listener(&self, address: Option<SocketAddr>) -> Result<()> {
        if address.is_some() {
            control_thread::start(&self.shared)?;
        }
        self.shared.listeners.change(address)
    }

    /// Returns the peer of every link.
    pub(crate) fn peers(&self) -> Vec<PeerInfo> {
        self.shared.registry.peers()
    }

    /// Returns the state of every link.
    pub(crate) fn states(&self) -> Vec<LinkState> {
        self.shared.registry.states()
    }
}

impl Drop for Links {
    fn drop(&mut self) {
        let _here = self.shared.resources.engine.on_this_thread();
        self.shared.listeners.close();
        self.shared.registry.close();
        self.shared.server.close();
        self.shared.control.bell().signal();
        self.shared.threads.wait(0);
    }
}

/// Finds links for objects that may outlive the engine.
pub(crate) struct Finder(Weak<Shared>);

/// The link of a call that runs later.
pub(crate) struct LinkOfCall {
    finder: Finder,
    cluster: ClusterId,
    /// The link that there was when the call was started. The call uses no other one: the peer may be another process, or
    /// may use its blocks for something else.
    link: Option<Weak<Link>>,
    /// The peer of that link.
    peer: Option<Arc<PeerInfo>>,
}

impl LinkOfCall {
    pub(crate) fn cluster(&self) -> ClusterId {
        self.cluster
    }

    /// Returns the link. If there was none when the call was started, waits for one as [`Finder::find`] does.
    pub(crate) fn find(&self, deadline: Deadline) -> Result<Arc<Link>> {
        let Some(link) = &self.link else { return self.finder.find(self.cluster, deadline) };
        let text = "the link over which the call was started has ended";
        link.upgrade().ok_or_else(|| self.named(Error::new(ErrorKind::NotLinked, text)))
    }

    /// Returns the link that there was when the call was started, if it still exists.
    pub(crate) fn at_start(&self) -> Option<Arc<Link>> {
        self.link.as_ref()?.upgrade()
    }

    /// Returns the peer of the link that there was when the call was started.
    pub(crate) fn peer(&self) -> Option<&Arc<PeerInfo>> {
        self.peer.as_ref()
    }

    /// Returns `error` with what is known about the peer.
    pub(crate) fn named(&self, error: Error) -> Error {
        match &self.peer {
            Some(peer) => peer.named(error),
            None => error.with("cluster", self.cluster),
        }
    }
}

impl Finder {
    /// Remembers the link to `cluster` for a call that runs later.
    pub(crate) fn for_later(self, cluster: ClusterId) -> LinkOfCall {
        let link = self.find(cluster, Deadline::after(Duration::ZERO)).ok();
        let peer = link.as_ref().map(|link| link.peer.clone());
        LinkOfCall { finder: self, cluster, link: link.as_ref().map(Arc::downgrade), peer }
    }

    /// Ends links as [`Links::unlink`] does, without an address. Returns `Err` with `Closed` if the engine was closed.
    pub(crate) fn unlink(&self, cluster: ClusterId, force: bool, deadline: Deadline) -> Result<()> {
        self.0.upgrade().ok_or_else(Error::closed)?.unlink(cluster, force, deadline)
    }

    /// Finds a link as [`Links::find_other`] does. Returns `Err` with `Closed` if the engine was closed.
    pub(crate) fn find(&self, cluster: ClusterId, deadline: Deadline) -> Result<Arc<Link>> {
        self.0.upgrade().ok_or_else(Error::closed)?.find_other(cluster, deadline)
    }
}

fn one_address(peer: &PeerAddress) -> Result<Address> {
    let one = validate::one_address("len(remote_ip_info_list)", peer.remote.len(), "remote");
    one.map_err(|error| error.with("cluster", peer.cluster))?;
    Ok(Address::Tcp(peer.remote[0]))
}
