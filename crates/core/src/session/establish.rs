//! Makes links as the dialing side, and enters finished links into the registry for both sides.
//!
//! The messages of the handshake are in `handshake`, the accepting side is in `accept`.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::dial::{ANSWERED_AS, Dialer};
use super::dials::DialStart;
use super::handshake::{self, Key};
use super::link::replaced_because;
use super::link::{ANSWER_TIME, EngineId, Kind, Link, check_name};
use super::message_io;
use super::peer_addresses::PeerAddresses;
use super::peer_memory::{self, PeerMemory};
use super::registry::RIVAL_LINK;
use super::remote_view::{ReadableMemory, RemoteView};
use super::shared::Shared;
use crate::config::{Mode, TransportChoice};
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::events::PeerInfo;
use crate::fabric::EngineFabric;
use crate::memory::random;
use crate::model::{ClusterId, Deadline};
use crate::net::{Address, Stream};
use crate::protocol::{
    BoundedBytes, Comm, Confirm, EnteredLink, FabricOffer, LinkAnswer, METADATA_LIMIT, Party, Purpose,
    Welcome,
};

/// Why nothing is read in place over a link without [`PeerMemory`].
const NOTHING_SHARED: &str = "the link uses TCP, or the peer is on another host: no memory is shared";

/// A ping that is unanswered for a shorter time does not show that the peer is gone.
const MIN_ANSWER_TIME: Duration = Duration::from_millis(200);

/// What is asked of the dialing side.
pub(super) struct LinkRequest<'a> {
    /// The cluster to reach, if its id is known.
    pub(super) asked: Option<ClusterId>,
    pub(super) comm: Option<&'a Comm>,
    pub(super) kind: Kind,
    /// The name that the peer must have, if it is given.
    pub(super) name: Option<&'a str>,
    /// Called before this side enters the link. If it fails, there is no link.
    pub(super) commit: &'a dyn Fn() -> Result<()>,
    /// The engine that has answered, for links on demand.
    pub(super) reached: Cell<Option<EngineId>>,
}

impl LinkRequest<'_> {
    pub(super) fn new(asked: Option<ClusterId>, kind: Kind) -> Self {
        LinkRequest { asked, comm: None, kind, name: None, commit: &|| Ok(()), reached: Cell::new(None) }
    }

    fn purpose(&self, link: u64, probe_local: bool) -> Purpose {
        Purpose::Link { link, comm: self.comm.cloned(), probe_local, ensure: self.kind == Kind::Ensured }
    }
}

impl Shared {
    /// Returns `Err` with `AlreadyLinked` if `cluster` is linked. A link that the peer made counts unless both
    /// sides may link to each other (`both_ways`). A link whose peer does not answer a ping is
    /// broken instead, which makes room for a new one (`a_silent_link_is_replaced`).
    pub(super) fn unless_linked(self: &Arc<Self>, cluster: ClusterId, deadline: Deadline) -> Result<()> {
        let both_ways = self.resources.config.links.both_ways;
        let counts = |kind| match kind {
            Kind::Outgoing | Kind::Ensured => true,
            Kind::Incoming => !both_ways,
            Kind::Communicator(_) => false,
        };
        while let Some(link) =
            self.registry.links_to(cluster).into_iter().find(|link| link.alive() && counts(link.kind))
        {
            if self.has_answer(&link, self.silence_limit() / 2, deadline)? {
                let text = format!("{} is linked already", link.peer);
                return Err(Error::new(ErrorKind::AlreadyLinked, text).with("peer", &link.peer.address));
            }
        }
        Ok(())
    }

    /// Whether the peer of `link` answers a ping within `limit`, which is shorter before `deadline`. If it does not, the link is
    /// broken. Returns `Err` with `Timeout`, and leaves the link, if too little time is left to decide
    /// (`a_short_call_breaks_no_link`).
    fn has_answer(&self, link: &Arc<Link>, limit: Duration, deadline: Deadline) -> Result<bool> {
        // The other half is for the handshake of a new link.
        let limit = limit.min(deadline.left() / 2);
        if link.answers(limit) {
            return Ok(true);
        }
        if link.alive() && limit < MIN_ANSWER_TIME {
            return Err(deadline.error("waiting for the peer to answer a ping"));
        }
        self.registry.lost(link, "the peer did not answer a ping before relinking");
        Ok(false)
    }

    /// Makes a link to the engine at `address`. If both sides are on one host, it uses the local
    /// socket that the peer names, provided that the same process answers there
    /// (`another_process_at_the_local_socket_is_not_the_peer`).
    pub(super) fn connect(
        self: &Arc<Self>,
        address: &Address,
        request: &LinkRequest<'_>,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let asked = request.asked;
        let config = &self.resources.config;
        let (choice, token) = (config.links.transport, config.links.token.is_some());
        let link = u64::from_le_bytes(random()?);
        let purpose = |probe_local| request.purpose(link, probe_local);
        // Without a token, the two sides first connect at the local socket, even if they use TCP afterwards.
        let meet = matches!(address, Address::Tcp(_)) && (choice != TransportChoice::Tcp || !token);
        let dialer = self.dialer(address.clone());
        let (stream, welcome) = dialer.handshake(asked, purpose(meet), deadline)?;
        // With `link_clusters`, a process may link to itself, and without the cache manager to an engine of the same id, which
        // the link identifies.
        let may_be_own = welcome.from.instance == self.me.party.instance || config.mode != Mode::CacheManager;
        if request.kind == Kind::Ensured || (request.kind == Kind::Outgoing && !may_be_own) {
            self.check_is_other(&welcome.from)?;
        }
        let Some(name) = welcome.local.filter(|_| meet) else {
            return self.establish((dialer, stream), &welcome.from, link, None, request, deadline);
        };
        drop(stream);
        let socket = self.dialer(Address::Unix(name));
        let is_same = |answer: &Welcome| check_is_same(&socket, &welcome.from, &answer.from);
        if choice != TransportChoice::Tcp {
            let shown = Some(address.to_string());
            let answer = socket.handshake(asked, purpose(false), deadline).and_then(|(stream, answer)| {
                is_same(&answer)?;
                let made = (socket.clone(), stream);
                self.establish(made, &answer.from, link, shown, request, deadline)
            });
            let Err(why) = answer else { return answer };
            let why = if why.is_permanent() { why.with(ANSWERED_AS, welcome.from.cluster) } else { why };
            if choice == TransportChoice::Shm || deadline.passed() || is_final(&why) {
                return Err(why);
            }
            tracing::warn!(
                target: "llm_datadist::links",
                "the peer at {address} is on this host, but the link uses TCP only: {why}"
            );
        }
        let mut dialer = dialer;
        if !dialer.key.proves() {
            let answer = socket.handshake(asked, Purpose::Meet, deadline);
            let secret = answer.and_then(|(_, answer)| is_same(&answer).map(|()| answer.secret));
            // With `accept_remote`, a peer needs no proof, so a failure to get its secret is ignored.
            let secret = if dialer.accept_remote { secret.ok().flatten() } else { secret? };
            dialer.key = secret.map_or(Key::Empty, Key::Secret);
        }
        let (stream, welcome) = dialer.handshake(asked, purpose(false), deadline)?;
        self.establish((dialer, stream), &welcome.from, link, None, request, deadline)
    }

    /// Completes the dialing side of a link: exchanges memory with the peer, confirms the link, waits until the peer has
    /// entered it, and enters it here. If any link will do and there is one to the same engine, returns that one.
    fn establish(
        self: &Arc<Self>,
        (mut dialer, stream): (Dialer, Stream),
        from: &Party,
        id: u64,
        shown: Option<String>,
        request: &LinkRequest<'_>,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let (cluster, instance, kind) = (ClusterId(from.cluster), from.instance, request.kind);
        let mut dials = None;
        if kind == Kind::Ensured {
            request.reached.set(Some((cluster, instance)));
            while dials.is_none() {
                match self.registry.begin_dial((cluster, instance), self.silence_limit())? {
                    DialStart::Linked(link) => return Ok(link),
                    // The peer lives, but its old link may lead nowhere.
                    DialStart::Silent(link) => {
                        if self.has_answer(&link, ANSWER_TIME, deadline)? {
                            return Ok(link);
                        }
                    }
                    DialStart::Dials(guard) => dials = Some(guard),
                }
            }
        }
        // Memory is exchanged with descriptors, so only over a stream that carries them.
        let mut memory = None;
        if stream.about.carries_descriptors {
            memory = Some(PeerMemory::exchange(&self.resources, &stream, deadline)?);
            self.note_readers();
        }
        if memory.is_none() && self.resources.config.links.transport == TransportChoice::Shm {
            let text = "this side links over shared memory only, but the peer is reachable only over TCP";
            let error = Error::new(ErrorKind::LinkFailed, text).with("peer", &stream.about.peer);
            let error = error.of_option(OptionName::TRANSPORT);
            handshake::decline(&stream, None, &error);
            return Err(error);
        }
        let EnteredLink { name, metadata, fabric, addresses } = self.confirm(&stream, kind, deadline)?;
        let memory = self.readable_memory(&stream, memory, fabric.as_ref())?;
        dialer.addresses = Arc::new(PeerAddresses::new(stream.about.listened_at, addresses));
        let address = shown.unwrap_or_else(|| dialer.address.to_string());
        let (name, transport, metadata) = (name.into(), stream.about.transport, metadata.0);
        let peer = PeerInfo { cluster, incarnation: instance, name, address, transport, metadata };
        check_name(&peer, request.name)?;
        let view = RemoteView::new(memory, self.pushes.to((cluster, instance)));
        let bounds = (self.server.budget(), &self.resources.config.links);
        let link = Link::new(id, kind, peer, view, Arc::new(stream), Some(dialer), bounds);
        (request.commit)()?;
        self.enroll(&link)?;
        // Not earlier: the accepting side of this engine must see the dial or the link.
        drop(dials);
        Ok(link)
    }

    /// Asks the peer to enter the link, and returns what it tells about itself once it has.
    fn confirm(&self, stream: &Stream, kind: Kind, deadline: Deadline) -> Result<EnteredLink> {
        let (name, metadata) = (self.resources.config.name.clone(), BoundedBytes(self.metadata.clone()));
        let confirm = Confirm { name, metadata, fabric: self.fabric_offer(stream) };
        message_io::send_message(stream, &confirm, deadline)?;
        let answer: LinkAnswer = message_io::receive_message(stream, METADATA_LIMIT, deadline)?;
        if matches!(answer, LinkAnswer::Later { .. }) && kind != Kind::Ensured {
            return Err(Error::new(ErrorKind::LinkFailed, "the peer did not confirm the link"));
        }
        answer.entered()
    }

    /// Returns what the peer on `stream` may read by UCX. `None` if the stream carries descriptors, because the peer
    /// then maps the memory.
    pub(super) fn fabric_offer(&self, stream: &Stream) -> Option<FabricOffer> {
        let fabric = self.resources.fabric.as_ref().ok().filter(|_| !stream.about.carries_descriptors);
        fabric.map(EngineFabric::offer)
    }

    /// Returns what this side can read of the peer on `stream`: the `memory` that was exchanged, or what the peer offers by UCX.
    /// Returns `Err(LinkFailed)` with the reason if UCX is not used although the configuration names it.
    pub(super) fn readable_memory(
        &self,
        stream: &Stream,
        memory: Option<PeerMemory>,
        offer: Option<&FabricOffer>,
    ) -> Result<ReadableMemory> {
        if let Some(memory) = memory {
            return Ok(ReadableMemory::Local(memory));
        }
        let reason = match (&self.resources.fabric, offer) {
            (Err(reason), _) => format!("{NOTHING_SHARED}, and this side does not use UCX: {reason}"),
            (Ok(_), None) => "the peer does not use UCX".into(),
            (Ok(fabric), Some(offer)) => match fabric.take(offer) {
                Ok(fabric) => return Ok(ReadableMemory::Fabric(fabric)),
                Err(error) => error.to_string(),
            },
        };
        if self.resources.fabric.as_ref().is_ok_and(EngineFabric::is_required) {
            let text = format!("this side moves bytes with UCX only, but {reason}");
            let error = Error::new(ErrorKind::LinkFailed, text).with("peer", &stream.about.peer);
            return Err(error.of_option(OptionName::BACKEND));
        }
        Ok(ReadableMemory::None(reason))
    }

    /// Logs, once, that other processes may now read this one.
    pub(super) fn note_readers(&self) {
        if peer_memory::guarded() && !self.opened_to_readers.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "llm_datadist::links",
                "every process of this user can now read the memory of this process (Yama's ptrace_scope is lifted for it, \
                 so that peers of this host can read registered caches); links over TCP only avoid it"
            );
        }
    }

    /// Enters a finished link into the registry and replaces older links of the same peer. If another process
    /// with the same cluster id is linked and its link works, returns `Err`
    /// (`nobody_takes_the_place_of_a_link_that_works`).
    pub(super) fn enroll(self: &Arc<Self>, link: &Arc<Link>) -> Result<()> {
        let peer = &*link.peer;
        for (stale, alive) in self.registry.enroll(link, self.silence_limit())? {
            let again = stale.peer.incarnation == peer.incarnation;
            let why = replaced_because(link, &stale);
            if alive && !again && !stale.control.stream().abandoned() {
                let (before, silent) = (&stale.peer.address, stale.control.silent().as_millis());
                tracing::warn!(
                    target: "llm_datadist::links",
                    "another process took the place of {}: {} instead of {before}, which was silent for \
                     {silent} ms",
                    stale.peer, peer.address
                );
            } else if alive {
                tracing::info!(target: "llm_datadist::links", "a link to {peer} was replaced: {why}");
            }
            stale.break_off(why);
        }
        let (address, transport) = (&link.peer.address, link.control.stream().about.transport);
        tracing::info!(target: "llm_datadist::links", "linked with {peer} at {address} over {transport}: {}", link.view.report());
        Ok(())
    }

    pub(super) fn dialer(&self, address: Address) -> Dialer {
        let transport = self.transports.for_address(&address).clone();
        let config = &self.resources.config.links;
        let (key, accept_remote) = (Key::of(config.token.as_ref()), config.accept_remote);
        Dialer { transport, address, me: self.me.clone(), key, accept_remote, addresses: Arc::default() }
    }
}

/// Refuses the process that answers at `socket`, which the peer named, if it is another one.
fn check_is_same(socket: &Dialer, peer: &Party, other: &Party) -> Result<()> {
    if other.instance == peer.instance {
        return Ok(());
    }
    let text = "another process answers at the local socket that the peer named";
    Err(Error::new(ErrorKind::LinkFailed, text).with("socket", &socket.address))
}

/// Whether another transport does not help: the call was stopped or has too little time ([`Shared::has_answer`]), the peer keeps
/// another link, or one side refuses the other.
fn is_final(error: &Error) -> bool {
    let is_stopped =
        matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::Cancelled | ErrorKind::Closed);
    is_stopped
        || error.is_permanent()
        || matches!(error.kind(), ErrorKind::AlreadyLinked | ErrorKind::Timeout)
        || error.fact(RIVAL_LINK).is_some()
}
