//! The listeners of an engine: at the configured address, at the local socket beside it, and at the addresses
//! of communicators.
//!
//! The lock is held from the look-up until the listener is open, so that no two callers open the same address
//! (`communicators_share_a_listener`). Only system calls that do not wait for a peer run under it.

use std::net::SocketAddr;
use std::sync::Arc;

use hashbrown::HashMap;

use super::control_poller::ControlPoller;
use super::dial::Transports;
use crate::config::{LinkConfig, TransportChoice};
use crate::error::{Error, ErrorKind, OptionName, Result};
use crate::net::{Address, Listener};
use crate::protocol::MAX_ADDRESSES;
use crate::resources::Resources;
use crate::sync::{Mutex, MutexGuard};

// The main listener and the further ones.
const _: () = assert!(MAX_ADDRESSES == 1 + LinkConfig::MAX_ADDRESSES);

/// The listeners of one engine.
pub(super) struct Listeners {
    resources: Arc<Resources>,
    /// The number that distinguishes this engine from others; the local socket is named after it.
    instance: u64,
    control: Arc<ControlPoller>,
    transports: Transports,
    open: Mutex<Listening>,
}

#[derive(Default)]
struct Listening {
    closed: bool,
    main: Option<OpenListener>,
    /// At the other addresses of `link_addresses`, with the port of the main listener.
    further: Vec<OpenListener>,
    local: Option<(String, OpenListener)>,
    /// Listeners of communicators, by the requested address, and the number of communicators that use each.
    others: HashMap<Address, (OpenListener, usize)>,
}

/// A listener that the control thread watches.
struct OpenListener {
    number: u64,
    address: Address,
}

impl OpenListener {
    fn port(&self) -> Option<SocketAddr> {
        if let Address::Tcp(address) = self.address { Some(address) } else { None }
    }

    /// Closes the listener. Its address is free when this returns.
    fn close(self, control: &ControlPoller) {
        control.leave(self.number);
    }
}

impl Listeners {
    pub(super) fn new(
        resources: Arc<Resources>,
        instance: u64,
        control: Arc<ControlPoller>,
        transports: Transports,
    ) -> Listeners {
        Listeners { resources, instance, control, transports, open: Mutex::default() }
    }

    /// Returns the address of the main listener, if there is one.
    pub(super) fn listening(&self) -> Option<SocketAddr> {
        self.open.lock().main.as_ref()?.port()
    }

    /// Returns the abstract name of the local socket.
    pub(super) fn local_name(&self) -> Option<String> {
        self.open.lock().local.as_ref().map(|(name, _)| name.clone())
    }

    /// Moves the main listener to `asked`, or closes it. If the new address is not available, returns `Err`
    /// and keeps the old one (`a_listener_moves_between_addresses_of_one_port`). Between two addresses of one
    /// port the old one has to be closed first; if it cannot be opened again, the engine logs that and listens
    /// at neither.
    pub(super) fn change(&self, asked: Option<SocketAddr>) -> Result<()> {
        let mut open = self.unclosed()?;
        let now = open.main.as_ref().and_then(OpenListener::port);
        match (asked, now) {
            (None, _) => {
                self.close_main(&mut open);
                return Ok(());
            }
            (Some(asked), Some(now))
                if asked.ip() == now.ip() && (asked.port() == now.port() || asked.port() == 0) =>
            {
                return Ok(());
            }
            (Some(asked), Some(now)) if asked.port() == now.port() => {
                // Two listeners cannot share a port if one of them listens on all addresses, so close the old
                // ones first.
                self.close_ports(&mut open);
                let opened = self.open_ports(asked);
                if opened.is_err()
                    && let Ok(before) = self.open_ports(now).inspect_err(log_error)
                {
                    (open.main, open.further) = (Some(before.0), before.1);
                }
                let opened = opened?;
                (open.main, open.further) = (Some(opened.0), opened.1);
            }
            (Some(asked), _) => {
                let opened = self.open_ports(asked)?;
                self.close_ports(&mut open);
                (open.main, open.further) = (Some(opened.0), opened.1);
            }
        }
        for listener in open.main.iter().chain(&open.further) {
            self.warn_without_token(listener.port());
        }
        self.open_local(&mut open);
        Ok(())
    }

    /// Returns the addresses for the streams of peers: those of `link_addresses`, and that of the main listener unless it
    /// listens at all addresses. Empty without `link_addresses`.
    pub(super) fn announced(&self) -> Vec<SocketAddr> {
        let open = self.open.lock();
        let addresses = &self.resources.config.links.addresses;
        let Some(main) = open.main.as_ref().and_then(OpenListener::port).filter(|_| !addresses.is_empty())
        else {
            return Vec::new();
        };
        let first = (!main.ip().is_unspecified()).then_some(main);
        let further = addresses.iter().map(|ip| SocketAddr::new(*ip, main.port()));
        first.into_iter().chain(further.filter(|at| Some(*at) != first)).collect()
    }

    /// Listens at `asked`, and at the further addresses with the same port, or at none of them.
    fn open_ports(&self, asked: SocketAddr) -> Result<(OpenListener, Vec<OpenListener>)> {
        let main = self.open(&Address::Tcp(asked))?;
        let mut further = Vec::new();
        match main.port().map_or(Ok(()), |at| self.open_further(at, &mut further)) {
            Ok(()) => Ok((main, further)),
            Err(error) => {
                for listener in further.into_iter().chain([main]) {
                    listener.close(&self.control);
                }
                Err(error.of_option(OptionName::ADDRESSES))
            }
        }
    }

    /// Listens at the further addresses that the main listener does not cover. Of the others, it checks only that this host
    /// has them.
    fn open_further(&self, main: SocketAddr, further: &mut Vec<OpenListener>) -> Result<()> {
        for ip in &self.resources.config.links.addresses {
            let covered = main.ip().is_unspecified() && (main.is_ipv6() || ip.is_ipv4());
            let at = SocketAddr::new(*ip, if covered { 0 } else { main.port() });
            if at == main {
                continue;
            }
            let listener = self.open(&Address::Tcp(at))?;
            if covered {
                listener.close(&self.control);
            } else {
                further.push(listener);
            }
        }
        Ok(())
    }

    /// Closes the main listener and the further ones.
    fn close_ports(&self, open: &mut Listening) {
        let further = std::mem::take(&mut open.further);
        open.main.take().into_iter().chain(further).for_each(|listener| listener.close(&self.control));
    }

    /// Opens the local socket to which peers on this host are directed, unless it is open. Without a token
    /// they connect there first, even if they use TCP afterwards.
    fn open_local(&self, open: &mut Listening) {
        let config = &self.resources.config.links;
        let unused = config.transport == TransportChoice::Tcp && config.token.is_some();
        if unused || open.local.is_some() {
            return;
        }
        let name = format!("llm_datadist.{:016x}", self.instance);
        match self.open(&Address::Unix(name.clone())) {
            Ok(listener) => open.local = Some((name, listener)),
            // With a token, peers on this host use the TCP listener, as peers on other hosts do.
            Err(error) => {
                tracing::error!(
                    target: "llm_datadist::links",
                    "no local socket: peers of this host need a token, and use TCP: {error}"
                );
            }
        }
    }

    /// Listens for a communicator that requested `asked`, at the first of `addresses` that is available.
    /// Communicators that requested the same address share a listener. Each successful call is paired with a
    /// call of [`leave`](Self::leave).
    pub(super) fn join(&self, asked: &Address, addresses: impl IntoIterator<Item = Address>) -> Result<()> {
        let mut open = self.unclosed()?;
        if let Some((_, users)) = open.others.get_mut(asked) {
            *users += 1;
            return Ok(());
        }
        self.open_local(&mut open);
        let mut refused = None;
        for address in addresses {
            match self.open(&address) {
                Ok(listener) => {
                    self.warn_without_token(listener.port());
                    open.others.insert(asked.clone(), (listener, 1));
                    return Ok(());
                }
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        Err(refused.unwrap_or_else(|| Error::new(ErrorKind::LinkFailed, "there is no port to listen at")))
    }

    /// Ends the use of a listener by a communicator. The last one closes it.
    pub(super) fn leave(&self, asked: &Address) {
        let mut open = self.open.lock();
        let Some((_, users)) = open.others.get_mut(asked) else { return };
        *users -= 1;
        if *users == 0
            && let Some((listener, _)) = open.others.remove(asked)
        {
            listener.close(&self.control);
        }
    }

    /// Closes all listeners, and opens no new ones.
    pub(super) fn close(&self) {
        let mut open = self.open.lock();
        self.close_main(&mut open);
        for (_, (listener, _)) in open.others.drain() {
            listener.close(&self.control);
        }
        open.closed = true;
    }

    /// Closes the main listener, the further ones, and the local socket.
    fn close_main(&self, open: &mut Listening) {
        self.close_ports(open);
        open.local.take().into_iter().for_each(|(_, listener)| listener.close(&self.control));
    }

    /// Listens at `address`. The control thread accepts the connections.
    fn open(&self, address: &Address) -> Result<OpenListener> {
        let listener: Arc<dyn Listener> = self.transports.for_address(address).listen(address)?.into();
        let address = listener.address();
        Ok(OpenListener { number: self.control.listen(listener)?, address })
    }

    fn unclosed(&self) -> Result<MutexGuard<'_, Listening>> {
        let open = self.open.lock();
        if open.closed { Err(Error::closed()) } else { Ok(open) }
    }

    /// Logs who is admitted if no token is set.
    fn warn_without_token(&self, at: Option<SocketAddr>) {
        let config = &self.resources.config.links;
        let Some(at) = at.filter(|_| config.token.is_none()) else { return };
        if config.accept_remote {
            tracing::warn!(
                target: "llm_datadist::links",
                "listening on {at} without a token: every peer that can reach it may link, as the configuration allows"
            );
        } else if !at.ip().is_loopback() {
            tracing::info!(
                target: "llm_datadist::links",
                "listening on {at} without a token: only processes of this user on this host may link"
            );
        }
    }
}

fn log_error(error: &Error) {
    tracing::error!(target: "llm_datadist::links", "{error}");
}
