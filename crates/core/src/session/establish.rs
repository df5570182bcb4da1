//! Makes links as the dialing side, and enters finished links into the registry for both sides.
//!
//! The messages of the handshake are in `handshake`, the accepting side is in `accept`.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::dial::Dialer;
use super::handshake::Key;
use super::link::{Kind, Link, Peer};
use super::message_io;
use super::peer_memory::{self, PeerMemory};
use super::registry::RIVAL_LINK;
use super::registry::replaced_because;
use super::shared::Shared;
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::random;
use crate::model::{ClusterId, Deadline};
use crate::net::{Address, Stream};
use crate::protocol::{Comm, Control, HANDSHAKE_LIMIT, Party, Purpose, Welcome};

impl Shared {
    /// Returns `Err` with `AlreadyLinked` if `cluster` is linked. A link that the peer made counts unless both
    /// sides may link to each other (`both_ways`). A link whose peer does not answer a ping is
    /// broken instead, which makes room for a new one (`a_silent_link_is_replaced`).
    pub(super) fn unless_linked(self: &Arc<Self>, cluster: ClusterId, deadline: Deadline) -> Result<()> {
        let both_ways = self.resources.config.links.both_ways;
        let counts = |kind| kind == Kind::Outgoing || (kind == Kind::Incoming && !both_ways);
        while let Some(link) =
            self.registry.links_to(cluster).into_iter().find(|link| link.alive() && counts(link.kind))
        {
            if link.answers((self.silence_limit() / 2).min(deadline.left() / 2)) {
                let text = format!("cluster {cluster} is linked already");
                return Err(Error::new(ErrorKind::AlreadyLinked, text).with("peer", &link.peer.address));
            }
            self.registry.lost(&link, "the peer did not answer a ping before relinking");
        }
        Ok(())
    }

    /// Makes a link to the cluster `asked` at `address`. If both sides are on one host, it uses the local
    /// socket that the peer names, provided that the same process answers there
    /// (`another_process_at_the_local_socket_is_not_the_peer`).
    pub(super) fn connect(
        self: &Arc<Self>,
        address: &Address,
        asked: ClusterId,
        comm: Option<&Comm>,
        kind: Kind,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        let choice = self.resources.config.links.transport;
        let token = self.resources.config.links.token.is_some();
        let link = u64::from_le_bytes(random()?);
        let purpose = |probe_local| Purpose::Link { link, comm: comm.cloned(), probe_local };
        // Without a token, the two sides first connect at the local socket, even if they use TCP afterwards.
        let meet = matches!(address, Address::Tcp(_)) && (choice != TransportChoice::Tcp || !token);
        let dialer = self.dialer(address.clone());
        let (stream, welcome) = dialer.handshake(Some(asked), purpose(meet), deadline)?;
        let Some(name) = welcome.local.filter(|_| meet) else {
            return self.establish(dialer, stream, &welcome.from, kind, link, None, deadline);
        };
        drop(stream);
        let socket = self.dialer(Address::Unix(name));
        let is_same = |answer: &Welcome| {
            if answer.from.instance == welcome.from.instance {
                return Ok(());
            }
            let text = "another process answers at the local socket that the peer named";
            Err(Error::new(ErrorKind::LinkFailed, text).with("socket", &socket.address))
        };
        if choice != TransportChoice::Tcp {
            let shown = Some(address.to_string());
            let answer =
                socket.handshake(Some(asked), purpose(false), deadline).and_then(|(stream, answer)| {
                    is_same(&answer)?;
                    self.establish(socket.clone(), stream, &answer.from, kind, link, shown, deadline)
                });
            let Err(why) = answer else { return answer };
            let over =
                why.kind() == ErrorKind::Interrupted || deadline.passed() || why.fact(RIVAL_LINK).is_some();
            if choice == TransportChoice::Shm || over {
                return Err(why);
            }
            tracing::warn!(
                target: "llm_datadist::links",
                "cluster {asked} is on this host, but the link uses TCP only: {why}"
            );
        }
        let mut dialer = dialer;
        if !dialer.key.proves() {
            let answer = socket.handshake(Some(asked), Purpose::Meet, deadline);
            let secret = answer.and_then(|(_, answer)| is_same(&answer).map(|()| answer.secret));
            // With `accept_remote`, a peer needs no proof, so a failure to get its secret is ignored.
            let secret = if dialer.accept_remote { secret.ok().flatten() } else { secret? };
            dialer.key = secret.map_or(Key::Empty, Key::Secret);
        }
        let (stream, welcome) = dialer.handshake(Some(asked), purpose(false), deadline)?;
        self.establish(dialer, stream, &welcome.from, kind, link, None, deadline)
    }

    /// Completes the dialing side of a link: exchanges memory with the peer, waits until the peer confirms
    /// that it has entered the link, and enters it here.
    #[expect(clippy::too_many_arguments, reason = "what a link is made of")]
    fn establish(
        self: &Arc<Self>,
        dialer: Dialer,
        stream: Stream,
        from: &Party,
        kind: Kind,
        id: u64,
        shown: Option<String>,
        deadline: Deadline,
    ) -> Result<Arc<Link>> {
        // Memory is exchanged with descriptors, so only over a stream that carries them.
        let mut memory = None;
        if stream.carries_descriptors() {
            memory = Some(PeerMemory::exchange(&self.resources, &stream, deadline)?);
            self.note_readers();
        }
        if memory.is_none() && self.resources.config.links.transport == TransportChoice::Shm {
            let text = "llm.LinkTransport=shm, but the peer is reachable only over TCP";
            return Err(Error::new(ErrorKind::LinkFailed, text).with("peer", stream.peer()));
        }
        let up: Control = message_io::receive_message(&stream, HANDSHAKE_LIMIT, Duration::ZERO, deadline)?;
        if up != Control::Pong {
            return Err(Error::new(ErrorKind::LinkFailed, "the peer did not confirm the link"));
        }
        let address = shown.unwrap_or_else(|| dialer.address.to_string());
        let peer = Peer { cluster: ClusterId(from.cluster), instance: from.instance, address };
        let budget = self.server.budget();
        let link = Link::new(id, kind, peer, memory, Arc::new(stream), Some(dialer), budget);
        self.enroll(&link)?;
        Ok(link)
    }

    /// Logs, once, that other processes may now read this one.
    pub(super) fn note_readers(&self) {
        if peer_memory::guarded() && !self.opened_to_readers.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                target: "llm_datadist::links",
                "every process of this user can now read the memory of this process (Yama's ptrace_scope is lifted for it, \
                 so that peers of this host can read registered caches); llm.LinkTransport=tcp avoids it"
            );
        }
    }

    /// Enters a finished link into the registry and replaces older links of the same peer. If another process
    /// with the same cluster id is linked and its link works, returns `Err`
    /// (`nobody_takes_the_place_of_a_link_that_works`).
    pub(super) fn enroll(self: &Arc<Self>, link: &Arc<Link>) -> Result<()> {
        let Peer { cluster, instance, .. } = &link.peer;
        for (stale, alive) in self.registry.enroll(link, self.silence_limit())? {
            let again = stale.peer.instance == *instance;
            let why = replaced_because(link, &stale);
            if alive && !again && !stale.control.abandoned() {
                let (before, silent) = (&stale.peer.address, stale.silent().as_millis());
                tracing::warn!(
                    target: "llm_datadist::links",
                    "another process took the place of cluster {cluster}: {} instead of {before}, which was silent for \
                     {silent} ms",
                    link.peer.address
                );
            } else if alive {
                tracing::info!(target: "llm_datadist::links", "a link to cluster {cluster} was replaced: {why}");
            }
            stale.break_off(why);
        }
        tracing::info!(target: "llm_datadist::links", "{}", link.report());
        Ok(())
    }

    pub(super) fn dialer(&self, address: Address) -> Dialer {
        let transport = self.transports.for_address(&address).clone();
        let config = &self.resources.config.links;
        let (key, accept_remote) = (Key::of(config.token.as_ref()), config.accept_remote);
        Dialer { transport, address, me: self.me.clone(), key, accept_remote }
    }
}

impl Link {
    /// Returns the log line that describes the link.
    fn report(&self) -> String {
        let transport = self.control.transport();
        let way = match self.peer_memory() {
            Some(memory) => {
                let pools = match memory.unmapped() {
                    Some(why) => &format!("pools by sockets ({why}), "),
                    None if memory.pooled() => "pools mapped, ",
                    None => "",
                };
                let why = memory.refusal().map_or("process id".into(), |why| format!("sockets ({why})"));
                format!("{transport}: {pools}registered memory by {why}")
            }
            None => format!("{transport}: sockets"),
        };
        let Peer { cluster, address, .. } = &self.peer;
        format!("linked with cluster {cluster} at {address} over {way}")
    }
}
