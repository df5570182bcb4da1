//! Where peers arrive: the configured address, the local socket beside it, and the addresses of communicators.
//!
//! One lock is held from looking to listening, so that no two callers open the same door
//! (`communicators_entered_at_once_share_a_listener`); only system calls that do not
//! wait for a peer happen under it. Not for: who comes in (`accept`).

use std::net::SocketAddr;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hashbrown::HashMap;

use super::{Shared, Transports, accept};
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::transport::{Address, Listener};

/// How long closing waits for the thread that accepts, which holds the name of a local socket until it has ended.
const CLOSING: Duration = Duration::from_millis(200);

#[derive(Default)]
pub(super) struct Listeners {
    open: Mutex<Open>,
}

#[derive(Default)]
struct Open {
    closed: bool,
    main: Option<Door>,
    local: Option<(String, Door)>,
    /// Those of communicators by the address that was asked for, and how many communicators use each.
    others: HashMap<Address, (Door, usize)>,
}

/// A listener, with a thread that accepts.
struct Door {
    listener: Arc<dyn Listener>,
    /// Ends with the thread.
    ended: Receiver<()>,
}

impl Door {
    fn port(&self) -> Option<SocketAddr> {
        match self.listener.address() {
            Address::Tcp(address) => Some(address),
            _ => None,
        }
    }

    /// Closes it; its address is free when this returns.
    fn close(self) {
        let Door { listener, ended } = self;
        listener.close();
        drop(listener);
        // Nothing is ever sent: this is the end of the thread, or of the patience.
        let _ = ended.recv_timeout(CLOSING);
    }
}

impl Listeners {
    /// Where peers are listened for.
    pub(super) fn listening(&self) -> Option<SocketAddr> {
        self.locked().main.as_ref()?.port()
    }

    /// The abstract name of the local socket.
    pub(super) fn local_name(&self) -> Option<String> {
        self.locked().local.as_ref().map(|(name, _)| name.clone())
    }

    /// Listens at `asked` from now on, or nowhere. Where that cannot be had, all stays as it was
    /// (`a_listener_moves_between_addresses_of_one_port`).
    pub(super) fn change(&self, shared: &Arc<Shared>, asked: Option<SocketAddr>) -> Result<()> {
        let mut open = self.unclosed()?;
        let now = open.main.as_ref().and_then(Door::port);
        match (asked, now) {
            (None, _) => {
                open.main.take().into_iter().for_each(Door::close);
                open.local.take().into_iter().for_each(|(_, door)| door.close());
                return Ok(());
            }
            (Some(asked), Some(now))
                if asked.ip() == now.ip() && (asked.port() == now.port() || asked.port() == 0) =>
            {
                return Ok(());
            }
            (Some(asked), Some(now)) if asked.port() == now.port() => {
                // Two listeners cannot have one port, if one of them is at every address.
                open.main.take().into_iter().for_each(Door::close);
                let opened = Self::open(shared, &Address::Tcp(asked));
                if opened.is_err() {
                    let before = Self::open(shared, &Address::Tcp(now));
                    open.main = before.inspect_err(|lost| shared.state.note(lost.to_string())).ok();
                }
                open.main = Some(opened?);
            }
            (Some(asked), _) => {
                let opened = Self::open(shared, &Address::Tcp(asked))?;
                open.main.replace(opened).into_iter().for_each(Door::close);
            }
        }
        shared.note_open_door(open.main.as_ref().and_then(Door::port));
        Self::open_local(&mut open, shared);
        Ok(())
    }

    /// The local socket that peers of this host are sent to; once.
    fn open_local(open: &mut Open, shared: &Arc<Shared>) {
        if shared.cluster.config.links.transport == TransportChoice::Tcp || open.local.is_some() {
            return;
        }
        let name = format!("llm_datadist.{:016x}", shared.me.party.instance);
        match Self::open(shared, &Address::Unix(name.clone())) {
            Ok(door) => open.local = Some((name, door)),
            // Peers of this host come through the other listener and use sockets, as those of other hosts do.
            Err(error) => {
                shared.state.note(format!("no local socket, peers of this host use sockets: {error}"));
            }
        }
    }

    /// Listens for a communicator that asked for `asked`, at the first of `places` that can be had; with others that
    /// asked for the same. Every call that succeeds is paired with one of [`leave`](Self::leave).
    pub(super) fn join(
        &self,
        shared: &Arc<Shared>,
        asked: &Address,
        places: impl IntoIterator<Item = Address>,
    ) -> Result<()> {
        let mut open = self.unclosed()?;
        if let Some((_, users)) = open.others.get_mut(asked) {
            *users += 1;
            return Ok(());
        }
        let mut refused = None;
        for place in places {
            match Self::open(shared, &place) {
                Ok(door) => {
                    shared.note_open_door(door.port());
                    open.others.insert(asked.clone(), (door, 1));
                    return Ok(());
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "there is no port to listen at")))
    }

    /// A communicator no longer listens; with the last of them the listener goes.
    pub(super) fn leave(&self, asked: &Address) {
        let mut open = self.locked();
        let Some((_, users)) = open.others.get_mut(asked) else { return };
        *users -= 1;
        if *users == 0
            && let Some((door, _)) = open.others.remove(asked)
        {
            door.close();
        }
    }

    /// Ends everything; nothing is opened any more.
    pub(super) fn close(&self) {
        let mut open = self.locked();
        open.closed = true;
        let Open { main, local, others, .. } = &mut *open;
        let local = local.take().map(|(_, door)| door);
        for door in main.take().into_iter().chain(local).chain(others.drain().map(|(_, (door, _))| door)) {
            // Whoever closes the engine waits for all threads at once.
            door.listener.close();
        }
    }

    /// Listens at `address`, with a thread that accepts.
    fn open(shared: &Arc<Shared>, address: &Address) -> Result<Door> {
        let Transports { tcp, unix } = &shared.transports;
        let transport = if matches!(address, Address::Unix(_)) { unix } else { tcp };
        let listener: Arc<dyn Listener> = transport.listen(address)?.into();
        let (weak, accepting) = (Arc::downgrade(shared), listener.clone());
        let (ending, ended) = channel();
        shared.threads.spawn("llm-listen", move || {
            accept::accept(&weak, accepting.as_ref());
            drop(accepting);
            drop(ending);
        })?;
        Ok(Door { listener, ended })
    }

    fn unclosed(&self) -> Result<MutexGuard<'_, Open>> {
        let open = self.locked();
        if open.closed { Err(Error::new(ErrorKind::Closed, "the engine was finalized")) } else { Ok(open) }
    }

    fn locked(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Says who may come in where no token is asked for.
    fn note_open_door(&self, at: Option<SocketAddr>) {
        let config = &self.cluster.config.links;
        let Some(at) = at.filter(|at| config.token.is_none() && !at.ip().is_loopback()) else { return };
        let who = if config.accept_remote {
            "peers of any host (llm.LinkAcceptRemote)"
        } else {
            "peers of this host only"
        };
        self.state.note(format!("listening on {at} without a token: {who} are accepted"));
    }
}
