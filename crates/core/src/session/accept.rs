//! The accepting side: what a connection says step by step, until it is a link, a stream of one, or refused.
//!
//! The control thread takes each step as soon as a frame is there, and waits for none. Two steps may take longer: mapping
//! what the peer offers, and entering the link, which may end others. Threads of the server do those, a few at a time
//! (`Work`). Not for: which connections there are and how many (`newcomers`), or what a greeting is (`greeting`).

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Shared;
use super::handshake::Guest;
use super::link::{Kind, Link, Peer};
use super::peer_memory::{Offered, Reach};
use super::refusals::{Reason, Refusal};
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::model::{ClusterId, Deadline};
use crate::net::{Received, Stream};
use crate::protocol::{self, Attach, Attached, Comm, Control, Purpose};

/// A connection that is not yet a link or a stream of one, and the step it is at.
#[derive(Debug)]
pub(super) struct Newcomer {
    stream: Arc<Stream>,
    /// It came to the local socket.
    local: bool,
    /// When it must have become something.
    until: Deadline,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// It says who it is.
    Hello,
    /// It proves that.
    Proof(Guest),
    /// It makes a link, and offers its memory.
    Attach(Making),
    /// It says what it can see of this side's memory.
    Attached(Making, Offered),
}

/// A link in the making.
#[derive(Debug)]
struct Making {
    id: u64,
    kind: Kind,
    peer: Peer,
}

/// What becomes of a connection after a step.
pub(super) enum Next {
    /// It is at its next step.
    Wait(Newcomer),
    /// It is at its next step, and has proved who it is.
    Proven(Newcomer),
    /// A thread of the server takes the next step.
    Work(Work),
    /// It has become what it asked to be; if that is a stream, whoever has it keeps it open.
    Done,
}

/// A step that may take a while.
pub(super) struct Work {
    newcomer: Making,
    stream: Arc<Stream>,
    until: Deadline,
    what: What,
}

enum What {
    /// Map what the peer offers.
    Take(Attach, Vec<OwnedFd>),
    /// Enter the link.
    Enter(Option<Reach>),
}

impl Newcomer {
    /// Whether descriptors come with the next frame.
    pub(super) fn expects_descriptors(&self) -> bool {
        matches!(self.step, Step::Attach(_))
    }

    pub(super) fn new(stream: Arc<Stream>, local: bool, until: Deadline) -> Newcomer {
        Newcomer { stream, local, until, step: Step::Hello }
    }

    /// Takes the step that `frame` allows.
    pub(super) fn step(self, shared: &Arc<Shared>, frame: Received) -> Result<Next, Refusal> {
        let Newcomer { stream, local, until, step } = self;
        let (kind, body, descriptors) = frame;
        match step {
            Step::Hello => {
                let config = &shared.cluster.config.links;
                let (guest, answer) = Guest::challenge(&stream, &shared.me, config, (kind, body))?;
                stream.send_now(&answer, &[])?;
                Ok(Next::Wait(Newcomer { stream, local, until, step: Step::Proof(guest) }))
            }
            Step::Proof(mut guest) => {
                let proven = guest.prove(&stream, &shared.me, (kind, &body));
                let proven = proven.inspect_err(|refusal| told_communicator(shared, &guest, refusal))?;
                admit(shared, Newcomer { stream, local, until, step: Step::Hello }, &guest, proven)
            }
            Step::Attach(newcomer) => {
                stream.expect_descriptors(false);
                let offered: Attach = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                Ok(Next::Work(Work { newcomer, stream, until, what: What::Take(offered, descriptors) }))
            }
            Step::Attached(newcomer, offered) => {
                let seen: Attached = protocol::open(kind, &body).map_err(Refusal::unreadable)?;
                let reach = shared.reached(offered, seen);
                Ok(Next::Work(Work { newcomer, stream, until, what: What::Enter(Some(reach)) }))
            }
        }
    }
}

impl Work {
    /// Takes the step, on a thread of the server.
    pub(super) fn run(self, shared: &Arc<Shared>) -> Result<Next, Refusal> {
        let Work { newcomer, stream, until, what } = self;
        match what {
            What::Take(attach, descriptors) => {
                let (offered, told) = Reach::take(&shared.cluster, &attach, descriptors, &stream, until);
                stream.send_now(&protocol::encode(&told)?, &[])?;
                let step = Step::Attached(newcomer, offered);
                Ok(Next::Proven(Newcomer { stream, local: true, until, step }))
            }
            What::Enter(reach) => enter(shared, &stream, newcomer, reach).map(|()| Next::Done),
        }
    }

    /// Whether the connection becomes a link in this step, which nothing may interrupt.
    pub(super) fn enters(&self) -> bool {
        matches!(self.what, What::Enter(_))
    }

    pub(super) fn stream(&self) -> &Arc<Stream> {
        &self.stream
    }
}

/// What becomes of a stream whose peer has greeted. `proven` is false if it may only learn the local socket's name.
fn admit(
    shared: &Arc<Shared>,
    Newcomer { stream, local, until, .. }: Newcomer,
    guest: &Guest,
    proven: bool,
) -> Result<Next, Refusal> {
    let from = guest.hello.from;
    let cluster = ClusterId(from.cluster);
    let welcome = |local, secret| guest.welcome(&shared.me, local, secret);
    match &guest.hello.purpose {
        Purpose::Call { link, reverse } => admit_call(shared, &stream, guest, *link, *reverse),
        Purpose::Meet => {
            // A peer of another user may be admitted; the secret is for this one's only.
            let own = stream.credentials().is_some_and(crate::memory::same_user);
            stream.send_now(&welcome(None, own)?, &[])?;
            stream.close();
            Ok(Next::Done)
        }
        Purpose::Knock { comm } => {
            stream.send_now(&welcome(None, false)?, &[])?;
            stream.close();
            shared.state.knocked(comm);
            Ok(Next::Done)
        }
        Purpose::Link { link, comm, probe_local } => {
            let kind = kind(shared, comm.as_ref())?;
            let same_host = *probe_local && guest.hello.host == shared.me.host;
            if let Some(name) = shared.listeners.local_name().filter(|_| same_host) {
                stream.send_now(&welcome(Some(name), false)?, &[])?;
                stream.close();
                return Ok(Next::Done);
            }
            if !proven {
                return Err(Refusal::new(Reason::Stranger, super::handshake::stranger(&stream)));
            }
            if local && shared.cluster.config.links.transport == TransportChoice::Tcp {
                let text = "llm.LinkTransport = tcp on this side: it makes links over TCP only";
                return Err(Refusal::new(Reason::Other, Error::new(ErrorKind::LinkFailed, text)));
            }
            shared.state.room_for_incoming(cluster)?;
            // What it offers comes after the welcome.
            stream.expect_descriptors(true);
            stream.send_now(&welcome(None, false)?, &[])?;
            let peer = Peer { cluster, instance: from.instance, address: stream.peer().to_owned() };
            let newcomer = Making { id: *link, kind, peer };
            if !stream.carries_descriptors() {
                return Ok(Next::Work(Work { newcomer, stream, until, what: What::Enter(None) }));
            }
            Reach::offer(&shared.cluster, |frame, descriptors| stream.send_now(frame, descriptors))?;
            Ok(Next::Proven(Newcomer { stream, local, until, step: Step::Attach(newcomer) }))
        }
    }
}

/// What becomes of one more stream of a link; with `reverse` this side calls on it.
fn admit_call(
    shared: &Arc<Shared>,
    stream: &Arc<Stream>,
    guest: &Guest,
    link: u64,
    reverse: bool,
) -> Result<Next, Refusal> {
    let from = guest.hello.from;
    let link = shared.state.by_id(ClusterId(from.cluster), from.instance, link).ok_or_else(no_such_link)?;
    let welcome = guest.welcome(&shared.me, None, false)?;
    if reverse {
        stream.send_now(&welcome, &[])?;
        link.lend(stream);
    } else {
        shared.server.admit(&link, stream)?;
        stream.send_now(&welcome, &[]).inspect_err(|_| link.served_on(stream))?;
        shared.server.watch(shared, &link, stream)?;
    }
    Ok(Next::Done)
}

/// Makes the link of a peer that has greeted, and says so.
fn enter(
    shared: &Arc<Shared>,
    stream: &Arc<Stream>,
    newcomer: Making,
    reach: Option<Reach>,
) -> Result<(), Refusal> {
    let Making { id, kind, peer } = newcomer;
    let cluster = peer.cluster;
    if stream.is_closed() {
        let text = "the connection was dropped before its link was complete";
        return Err(Error::new(ErrorKind::NotLinked, text).into());
    }
    let transport = if stream.carries_descriptors() { "shm" } else { "tcp" };
    let link = Link::new(id, kind, peer, transport, reach, stream.clone(), None, shared.server.budget());
    // The first control message confirms that this side has entered the link. The stream is held until it is sent, so that
    // another thread that finds the link cannot send before it; the peer uses the link only after this message
    // (`members_meet_in_either_order_and_calls_wait_for_it`).
    let first = link.speaker();
    shared.enroll(&link)?;
    if let Kind::Communicator(id) = kind {
        super::communicator::joined(shared, id, cluster);
    }
    let told = link.tell_as(&first, &Control::Pong);
    drop(first);
    told.inspect_err(|error| {
        shared.lost(&link, &error.to_string());
    })?;
    Ok(())
}

/// What kind of link a peer makes; one of a communicator only if this side has entered it too.
fn kind(shared: &Arc<Shared>, comm: Option<&Comm>) -> Result<Kind> {
    let Some(comm) = comm else { return Ok(Kind::Incoming) };
    let known = shared.state.comm(comm).ok_or_else(|| {
        let (cluster, name) = (shared.me.party.cluster, &comm.name);
        let text = format!("cluster {cluster} has not called link({name:?}) with these members (yet)");
        Error::new(ErrorKind::NotLinked, text)
    })?;
    Ok(Kind::Communicator(known.id()))
}

/// A member whose mode is another one can never be met: the communicator has failed.
fn told_communicator(shared: &Arc<Shared>, guest: &Guest, refusal: &Refusal) {
    let Purpose::Link { comm: Some(comm), .. } = &guest.hello.purpose else { return };
    if refusal.reason == Reason::Mode
        && let Some(known) = shared.state.comm(comm)
    {
        known.fail(ClusterId(guest.hello.from.cluster), &refusal.error.to_string());
        shared.state.announce();
    }
}

#[cold]
fn no_such_link() -> Error {
    Error::new(ErrorKind::NotLinked, "there is no such link on this side any more; link again")
}
