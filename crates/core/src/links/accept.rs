//! The accepting side: strangers greet in threads of their own, and become links, streams of links, or nothing.
//!
//! A stranger costs one bounded connection: a thread for the length of a greeting, and frames of at most 4 KiB. Too many
//! at a time, and the oldest has to go, so that silence keeps nobody out. Not for: what a greeting is (`greeting`).

use std::sync::Arc;
use std::time::Duration;

use super::greeting::{self, GREETING_TIME, Greeted};
use super::link::{Kind, Link, Peer};
use super::{Handle, Shared};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ClusterId, Deadline};
use crate::transport::{Listener, Stream};
use crate::wire::{self, Comm, Control, Purpose};

/// How long the listener rests after the system refused it a connection (no descriptors left, say).
const REST: Duration = Duration::from_millis(50);

/// Accepts until the listener is closed or the engine is gone.
pub(super) fn accept(weak: &Handle, listener: &dyn Listener) {
    loop {
        match listener.accept() {
            Ok(Some(stream)) => {
                let Some(shared) = weak.upgrade() else { return };
                let stream = Arc::new(stream);
                shared.state.greet(&stream);
                let (threads, greeter) = (shared.threads.clone(), stream.clone());
                let started = threads.spawn("llm-greet", move || receive(&shared, &greeter));
                if let (Err(error), Some(shared)) = (started, weak.upgrade()) {
                    shared.state.greeted(&stream);
                    stream.close();
                    shared.state.note(error.to_string());
                }
            }
            Ok(None) => return,
            Err(error) => {
                let Some(shared) = weak.upgrade() else { return };
                shared.state.note(format!("a connection could not be accepted: {error}"));
                drop(shared);
                std::thread::sleep(REST);
            }
        }
    }
}

/// One stranger, from the first byte to what becomes of it.
fn receive(shared: &Arc<Shared>, stream: &Arc<Stream>) {
    let deadline = Deadline::after(GREETING_TIME).named("the limit of a greeting");
    let config = &shared.cluster.config.links;
    let greeted = greeting::accept(stream, &shared.me, config, deadline);
    let place = greeted.and_then(|greeted| {
        shared.state.proven(stream);
        admit(shared, stream, &greeted, deadline)
    });
    shared.state.greeted(stream);
    match place {
        Ok(Place::Serve(link)) => shared.serve(&link, stream),
        Ok(Place::Kept) => {}
        Err(error) => {
            shared.state.note(format!("{} was not let in: {error}", stream.peer()));
            let _ = stream.send(&wire::refusal(&error), deadline);
            stream.close();
        }
    }
}

/// What becomes of a stream.
enum Place {
    /// The peer calls on it.
    Serve(Arc<Link>),
    /// It has gone where it belongs.
    Kept,
}

fn admit(
    shared: &Arc<Shared>,
    stream: &Arc<Stream>,
    greeted: &Greeted<'_>,
    deadline: Deadline,
) -> Result<Place> {
    let from = greeted.hello.from;
    let cluster = ClusterId(from.cluster);
    match &greeted.hello.purpose {
        Purpose::Call { link, reverse } => {
            let link = shared.state.by_id(cluster, from.instance, *link).ok_or_else(|| {
                Error::new(ErrorKind::NotLinked, "there is no such link on this side any more; link again")
            })?;
            if *reverse {
                greeted.welcome(&shared.me, None, deadline)?;
                link.lend(stream);
                return Ok(Place::Kept);
            }
            link.serve_on(stream)?;
            greeted.welcome(&shared.me, None, deadline).inspect_err(|_| link.served_on(stream))?;
            Ok(Place::Serve(link))
        }
        Purpose::Link { link, comm, probe_local } => {
            let kind = kind(shared, comm.as_ref())?;
            let near = *probe_local && greeted.hello.host == shared.me.host;
            if let Some(name) = shared.listeners.local_name().filter(|_| near) {
                greeted.welcome(&shared.me, Some(name), deadline)?;
                stream.close();
                return Ok(Place::Kept);
            }
            greeted.welcome(&shared.me, None, deadline)?;
            let reach = shared.reach(stream, deadline)?;
            let transport = if stream.carries_descriptors() { "shm" } else { "tcp" };
            let peer = Peer { cluster, instance: from.instance, address: stream.peer().to_owned() };
            let link = Link::new(*link, kind, peer, transport, reach, stream.clone(), None);
            // The word that this side has its half is the first on the control stream, whoever finds the link meanwhile
            // and wants something of the peer; and only with it may the peer use the link
            // (`members_meet_in_either_order_and_calls_wait_for_it`).
            let first = link.speaker();
            shared.enroll(&link)?;
            if let Kind::Communicator(id) = kind {
                super::communicator::joined(shared, id, cluster);
            }
            link.tell_as(&first, &Control::Pong).inspect_err(|error| {
                shared.lost(&link, &error.to_string());
            })?;
            Ok(Place::Kept)
        }
    }
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
