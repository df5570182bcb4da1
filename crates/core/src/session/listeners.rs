//! Where peers arrive: the configured address, the local socket beside it, and the addresses of communicators.
//!
//! One lock is held from looking to listening, so that no two callers open the same door
//! (`communicators_entered_at_once_share_a_listener`); only system calls that do not
//! wait for a peer happen under it. Not for: who comes in (`accept`).

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hashbrown::HashMap;

use super::{Shared, Transports};
use crate::config::TransportChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::net::{Address, Listener};

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

/// A listener that the control thread watches.
struct Door {
    number: u64,
    address: Address,
}

impl Door {
    fn port(&self) -> Option<SocketAddr> {
        match self.address {
            Address::Tcp(address) => Some(address),
            _ => None,
        }
    }

    /// Closes it; its address is free when this returns.
    fn close(self, shared: &Shared) {
        shared.control.leave(self.number);
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
                open.main.take().into_iter().for_each(|door| door.close(shared));
                open.local.take().into_iter().for_each(|(_, door)| door.close(shared));
                return Ok(());
            }
            (Some(asked), Some(now))
                if asked.ip() == now.ip() && (asked.port() == now.port() || asked.port() == 0) =>
            {
                return Ok(());
            }
            (Some(asked), Some(now)) if asked.port() == now.port() => {
                // Two listeners cannot have one port, if one of them is at every address.
                open.main.take().into_iter().for_each(|door| door.close(shared));
                let opened = Self::open(shared, &Address::Tcp(asked));
                if opened.is_err() {
                    let before = Self::open(shared, &Address::Tcp(now));
                    open.main = before.inspect_err(log_error).ok();
                }
                open.main = Some(opened?);
            }
            (Some(asked), _) => {
                let opened = Self::open(shared, &Address::Tcp(asked))?;
                open.main.replace(opened).into_iter().for_each(|door| door.close(shared));
            }
        }
        shared.note_open_door(open.main.as_ref().and_then(Door::port));
        Self::open_local(&mut open, shared);
        Ok(())
    }

    /// The local socket that peers of this host are sent to; once. Without a token they meet this engine there even if
    /// they then talk over TCP.
    fn open_local(open: &mut Open, shared: &Arc<Shared>) {
        let config = &shared.cluster.config.links;
        let unused = config.transport == TransportChoice::Tcp && config.token.is_some();
        if unused || open.local.is_some() {
            return;
        }
        let name = format!("llm_datadist.{:016x}", shared.me.party.instance);
        match Self::open(shared, &Address::Unix(name.clone())) {
            Ok(door) => open.local = Some((name, door)),
            // With a token, peers of this host come through the other listener, as those of other hosts do.
            Err(error) => {
                tracing::error!(
                    target: "llm_datadist::links",
                    "no local socket: peers of this host need a token, and use TCP: {error}"
                );
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
        Self::open_local(&mut open, shared);
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
    pub(super) fn leave(&self, shared: &Shared, asked: &Address) {
        let mut open = self.locked();
        let Some((_, users)) = open.others.get_mut(asked) else { return };
        *users -= 1;
        if *users == 0
            && let Some((door, _)) = open.others.remove(asked)
        {
            door.close(shared);
        }
    }

    /// Ends everything; nothing is opened any more.
    pub(super) fn close(&self, shared: &Shared) {
        let mut open = self.locked();
        open.closed = true;
        let Open { main, local, others, .. } = &mut *open;
        let local = local.take().map(|(_, door)| door);
        for door in main.take().into_iter().chain(local).chain(others.drain().map(|(_, (door, _))| door)) {
            door.close(shared);
        }
    }

    /// Listens at `address`; the control thread accepts.
    fn open(shared: &Arc<Shared>, address: &Address) -> Result<Door> {
        let Transports { tcp, unix } = &shared.transports;
        let transport = if matches!(address, Address::Unix(_)) { unix } else { tcp };
        let listener: Arc<dyn Listener> = transport.listen(address)?.into();
        let address = listener.address();
        shared.control.start(shared)?;
        Ok(Door { number: shared.control.listen(listener)?, address })
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
        let Some(at) = at.filter(|_| config.token.is_none()) else { return };
        if config.accept_remote {
            tracing::warn!(
                target: "llm_datadist::links",
                "listening on {at} without a token: everybody who can reach it is admitted (llm.LinkAcceptRemote)"
            );
        } else if !at.ip().is_loopback() {
            tracing::info!(
                target: "llm_datadist::links",
                "listening on {at} without a token: only processes of this host and this user are admitted"
            );
        }
    }
}

fn log_error(error: &Error) {
    tracing::error!(target: "llm_datadist::links", "{error}");
}
