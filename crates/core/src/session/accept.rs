//! The accepting side of a connection: the steps of its handshake, until it becomes a link or a stream of a
//! link, or is refused.
//!
//! The control thread performs each step as soon as its frame has arrived, and never waits. Two steps may
//! take longer: mapping the memory that the peer offers, and entering the link, which may end other links.
//! Server threads perform those, a few at a time ([`LongStep`]). `pending` limits the number of connections and
//! their time.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::call_streams;
use super::handshake::{self, ChallengedPeer};
use super::link::{Kind, Link};
use super::peer_memory::{PeerMemory, TakenMemory};
use super::refusals::{Reason, Refusal};
use super::remote_view::{ReadableMemory, RemoteView};
use super::shared::Shared;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::events::PeerInfo;
use crate::model::{ClusterId, Deadline};
use crate::net::{ReceivedFrame, Stream};
use crate::protocol::{
    self, Attach, Attached, BoundedBytes, Comm, Confirm, EnteredLink, HANDSHAKE_LIMIT, Hello, LinkAnswer,
    METADATA_LIMIT, Purpose, RingOffer,
};

/// A connection that is not yet a link or a stream of a link.
#[derive(Clone)]
pub(super) struct Connection {
    pub(super) stream: Arc<Stream>,
    /// Whether it arrived at the local socket.
    pub(super) local: bool,
    /// The deadline of the handshake.
    pub(super) until: Deadline,
}

/// The message for which a connection waits.
pub(super) enum Step {
    /// The hello, which identifies the peer.
    Hello,
    /// The proof of the peer.
    Proof(ChallengedPeer),
    /// The offer of memory by a peer that makes a link.
    Attach(Making),
    /// The peer's report of which memory of this process it can read.
    Attached(Making, TakenMemory),
    /// The name and the metadata of a peer that makes a link, which may now be entered.
    Confirm(Making, Option<PeerMemory>),
    /// The ring of a peer that opens a call stream.
    Ring(NewCallStream),
}

/// A call stream that is about to join its link.
pub(super) struct NewCallStream {
    link: Arc<Link>,
    /// Whether this side will be the caller.
    reverse: bool,
}

/// A link in the making.
pub(super) struct Making {
    id: u64,
    kind: Kind,
    peer: PeerInfo,
}

/// What follows a step.
pub(super) enum Next {
    /// The connection waits for its next message.
    Wait(Step),
    /// A server thread performs the next step.
    Long(LongStep),
    /// The handshake is finished. If the connection became a link or a stream of a link, that now holds the
    /// stream.
    Done,
}

/// A step that may take long.
pub(super) enum LongStep {
    /// Map the memory that the peer offers.
    Take(Making, Attach, Vec<OwnedFd>),
    /// Enter the link. Such a step must not be interrupted.
    Enter(Making, ReadableMemory),
}

impl Step {
    /// Whether the peer is authenticated.
    pub(super) fn is_proven(&self) -> bool {
        !matches!(self, Step::Hello | Step::Proof(_))
    }

    /// The longest body of the next frame.
    pub(super) fn limit(&self) -> usize {
        if matches!(self, Step::Confirm(..)) { METADATA_LIMIT } else { HANDSHAKE_LIMIT }
    }

    /// Performs the step for which `frame` is the message.
    pub(super) fn advance(
        self,
        shared: &Arc<Shared>,
        connection: &Connection,
        (kind, body, descriptors): ReceivedFrame,
    ) -> Result<Next, Refusal> {
        let stream = &connection.stream;
        if protocol::is_refusal(kind) {
            return Err(given_up(shared, &self, (kind, &body)));
        }
        match self {
            Step::Hello => {
                let (challenged, answer) = greeted(shared, stream, (kind, body))?;
                stream.send_now(&answer, &[])?;
                Ok(Next::Wait(Step::Proof(challenged)))
            }
            Step::Proof(mut challenged) => {
                let proven = challenged.prove(stream, &shared.me, (kind, &body));
                let admitted = proven.and_then(|proven| admit(shared, connection, &challenged, proven));
                admitted.map_err(|refusal| of_member(shared, &challenged.hello, refusal))
            }
            Step::Attach(making) => {
                stream.refuse_descriptors()?;
                let offered: Attach = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                Ok(Next::Long(LongStep::Take(making, offered, descriptors)))
            }
            Step::Ring(call) => {
                stream.refuse_descriptors()?;
                let RingOffer = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                let (link, ringed) = (call.link.clone(), call.link.ringed(!call.reverse));
                let answer = || call_streams::answer_ring_offer(&link, stream, &descriptors, ringed);
                call.enter(shared, stream, answer).map(|()| Next::Done)
            }
            Step::Attached(making, memory) => {
                let seen: Attached = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                shared.note_readers();
                Ok(Next::Wait(Step::Confirm(making, Some(memory.seen_as(seen)))))
            }
            Step::Confirm(mut making, memory) => {
                let confirm: Confirm = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                making.peer.name = confirm.name.into();
                making.peer.metadata = confirm.metadata.0;
                let memory = shared.readable_memory(stream, memory, confirm.fabric.as_ref())?;
                Ok(Next::Long(LongStep::Enter(making, memory)))
            }
        }
    }
}

impl LongStep {
    /// Performs the step, on a server thread.
    pub(super) fn run(
        self,
        shared: &Arc<Shared>,
        Connection { stream, until, .. }: &Connection,
    ) -> Result<Next, Refusal> {
        match self {
            LongStep::Take(making, attach, descriptors) => {
                let memory = TakenMemory::take(&shared.resources, &attach, descriptors, stream, *until);
                stream.send_now(&protocol::encode(&memory.report())?, &[])?;
                Ok(Next::Wait(Step::Attached(making, memory)))
            }
            LongStep::Enter(making, memory) => enter(shared, stream, making, memory).map(|()| Next::Done),
        }
    }
}

/// Reads the hello of a peer. Returns the peer, and the challenge to send to it.
fn greeted(
    shared: &Arc<Shared>,
    stream: &Stream,
    (kind, body): (u8, Vec<u8>),
) -> Result<(ChallengedPeer, Vec<u8>), Refusal> {
    let hello: Hello = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
    let keys = handshake::accepted_keys(stream, &shared.me, &shared.resources.config.links, &hello);
    let keys = keys.map_err(|refusal| of_member(shared, &hello, refusal))?;
    ChallengedPeer::challenge(keys, (hello, body))
}

/// Returns the refusal of this side by a peer that dialed.
fn given_up(shared: &Arc<Shared>, step: &Step, (kind, body): (u8, &[u8])) -> Refusal {
    let error = protocol::open::<()>(kind, body).err().unwrap_or_else(Error::closed);
    let refusal = Refusal::new(Reason::ByPeer, error);
    match step {
        Step::Proof(challenged) => of_member(shared, &challenged.hello, refusal),
        _ => refusal,
    }
}

/// Handles a stream according to its purpose, once the proof was checked. If `proven` is false, the peer may
/// only learn the name of the local socket.
fn admit(
    shared: &Arc<Shared>,
    Connection { stream, local, .. }: &Connection,
    challenged: &ChallengedPeer,
    proven: bool,
) -> Result<Next, Refusal> {
    let cluster = ClusterId(challenged.hello.from.cluster);
    let welcome = |local, secret| challenged.welcome(&shared.me, local, secret);
    match &challenged.hello.purpose {
        Purpose::Call { link, reverse, rings } => {
            admit_call(shared, stream, challenged, (*link, *reverse, *rings))
        }
        Purpose::Meet => {
            // With `llm.LinkAcceptRemote` a peer of another user may be admitted; the secret is only for
            // peers of this user.
            let own = stream.about.credentials.is_some_and(crate::memory::same_user);
            stream.send_now(&welcome(None, own)?, &[])?;
            stream.close();
            Ok(Next::Done)
        }
        Purpose::Announce { comm } => {
            stream.send_now(&welcome(None, false)?, &[])?;
            stream.close();
            shared.registry.member_listens(comm);
            Ok(Next::Done)
        }
        Purpose::Link { link, comm, probe_local, ensure } => {
            let kind = kind(shared, comm.as_ref(), *ensure)?;
            let same_host = *probe_local && challenged.hello.host == shared.me.host;
            if let Some(name) = shared.listeners.local_name().filter(|_| same_host) {
                stream.send_now(&welcome(Some(name), false)?, &[])?;
                stream.close();
                return Ok(Next::Done);
            }
            if !proven {
                return Err(challenged.unproven(stream, &shared.me));
            }
            if *local && shared.resources.config.links.transport == TransportChoice::Tcp {
                let error = Error::new(ErrorKind::LinkFailed, "this side links over TCP only");
                return Err(Refusal::new(Reason::Other, error.of_option(OptionName::TRANSPORT)));
            }
            shared.registry.room_for_incoming(cluster)?;
            // The peer sends its offer right after it has received the welcome.
            stream.expect_descriptors()?;
            stream.send_now(&welcome(None, false)?, &[])?;
            let (name, address, transport) = ("".into(), stream.about.peer.clone(), stream.about.transport);
            let (incarnation, metadata) = (challenged.hello.from.instance, Arc::default());
            let peer = PeerInfo { cluster, incarnation, name, address, transport, metadata };
            let making = Making { id: *link, kind, peer };
            if !stream.about.carries_descriptors {
                return Ok(Next::Wait(Step::Confirm(making, None)));
            }
            PeerMemory::offer(&shared.resources, |frame, descriptors| stream.send_now(frame, descriptors))?;
            Ok(Next::Wait(Step::Attach(making)))
        }
    }
}

/// Handles a stream for calls over an existing link.
fn admit_call(
    shared: &Arc<Shared>,
    stream: &Arc<Stream>,
    challenged: &ChallengedPeer,
    (link, reverse, rings): (u64, bool, bool),
) -> Result<Next, Refusal> {
    let from = challenged.hello.from;
    let gone = || Error::new(ErrorKind::NotLinked, "this side no longer has that link; link again");
    let link = shared.registry.by_id(ClusterId(from.cluster), from.instance, link).ok_or_else(gone)?;
    let call = NewCallStream { link, reverse };
    let welcome = challenged.welcome(&shared.me, None, false)?;
    if !rings || !stream.about.carries_descriptors {
        return call.enter(shared, stream, || stream.send_now(&welcome, &[])).map(|()| Next::Done);
    }
    // The peer sends its ring right after it has received the welcome.
    stream.expect_descriptors()?;
    stream.send_now(&welcome, &[])?;
    Ok(Next::Wait(Step::Ring(call)))
}

impl NewCallStream {
    /// Adds the stream to its link, and answers the last message of the peer with `answer`.
    fn enter(
        self,
        shared: &Arc<Shared>,
        stream: &Arc<Stream>,
        answer: impl FnOnce() -> Result<()>,
    ) -> Result<(), Refusal> {
        let NewCallStream { link, reverse } = self;
        if reverse {
            answer()?;
            link.calls.add(stream);
            return Ok(());
        }
        shared.server.admit(&link, stream)?;
        answer().inspect_err(|_| link.served.remove(stream))?;
        Ok(shared.server.watch(&link, stream)?)
    }
}

/// Enters the link of an authenticated peer and confirms it to the peer.
fn enter(
    shared: &Arc<Shared>,
    stream: &Arc<Stream>,
    Making { id, kind, peer }: Making,
    memory: ReadableMemory,
) -> Result<(), Refusal> {
    let cluster = peer.cluster;
    if stream.is_closed() {
        let text = "the connection was dropped before its link was complete";
        return Err(Error::new(ErrorKind::NotLinked, text).into());
    }
    let view = RemoteView::new(memory, shared.pushes.to((cluster, peer.incarnation)));
    let bounds = (shared.server.budget(), &shared.resources.config.links);
    let link = Link::new(id, kind, peer, view, stream.clone(), None, bounds);
    // Held until the answer is sent: another thread may find the link, and must not send before the answer.
    // The peer uses the link only after it (`test_either_side_comes_seconds_later`).
    let first = link.control.lock();
    match shared.enroll(&link) {
        Err(error) if kind == Kind::Ensured && error.kind() == ErrorKind::AlreadyLinked => {
            let sent = link.send_control_with(&first, &LinkAnswer::Later { reason: error.to_string() });
            stream.close();
            return Ok(sent?);
        }
        enrolled => enrolled?,
    }
    if let Kind::Communicator(id) = kind {
        shared.registry.joined(id, cluster);
    }
    let answer = LinkAnswer::Entered(EnteredLink {
        name: shared.resources.config.name.clone(),
        metadata: BoundedBytes(shared.metadata.clone()),
        fabric: shared.fabric_offer(stream),
        addresses: shared.listeners.announced(),
    });
    let sent = link.send_control_with(&first, &answer);
    drop(first);
    sent.inspect_err(|error| {
        shared.registry.lost(&link, error.clone());
    })?;
    Ok(())
}

/// Returns the kind of the link that a peer makes. A link of a communicator is refused unless this side has
/// entered the communicator.
fn kind(shared: &Arc<Shared>, comm: Option<&Comm>, ensure: bool) -> Result<Kind> {
    let Some(comm) = comm else { return Ok(if ensure { Kind::Ensured } else { Kind::Incoming }) };
    let known = shared.registry.comm(comm).ok_or_else(|| {
        let (cluster, name) = (shared.me.party.cluster, &comm.name);
        let text = format!("cluster {cluster} has not called link({name:?}) with these members (yet)");
        Error::new(ErrorKind::NotLinked, text)
    })?;
    Ok(Kind::Communicator(known.id))
}

/// Returns the refusal of the peer that sent `hello`. If it is a member of a communicator that this side has entered, and only
/// another configuration can change the refusal, the peer learns by the kind `InvalidArgument` that further attempts are useless.
/// The communicator fails here only if the peer is authenticated. Otherwise it keeps the reason for its report.
fn of_member(shared: &Arc<Shared>, hello: &Hello, mut refusal: Refusal) -> Refusal {
    let Purpose::Link { comm: Some(comm), .. } = &hello.purpose else { return refusal };
    let cluster = ClusterId(hello.from.cluster);
    let other_host = hello.host != shared.me.host;
    match refusal.reason {
        Reason::Mode => {
            if let Some(known) = shared.registry.comm(comm) {
                known.fail(cluster, &refusal.error.original().to_string());
                shared.registry.announce();
            }
        }
        // A peer of this host may hold the secret of an engine that was here before. It gets the new one when it dials again.
        Reason::Unproven if !other_host => {}
        Reason::User | Reason::Token | Reason::Unproven | Reason::ByPeer => {
            if let Some(known) = shared.registry.comm(comm) {
                // Whoever dialed is not known to be the member. So a permanent reason of this side's own attempt is kept or replaces
                // this one, whatever the peer claims.
                known.note(cluster, &Error::new(ErrorKind::LinkFailed, refusal.error.to_string()));
                refusal.error = refusal.error.of_kind(ErrorKind::InvalidArgument).permanent();
            }
        }
        _ => {}
    }
    refusal
}
