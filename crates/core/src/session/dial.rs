//! Opens authenticated streams to one peer.
//!
//! The messages of the handshake are in `handshake`.

use std::sync::Arc;
use std::time::Duration;

use super::handshake::{self, Identity, Key};
use super::peer_addresses::{FurtherAddress, PeerAddresses};
use crate::error::Result;
use crate::memory::same_user;
use crate::model::Deadline;
use crate::net::{Address, Stream, Tcp, Transport, Unix};
use crate::protocol::{Purpose, Welcome};

/// How long connecting to a further address of a peer may take.
const FURTHER_TIME: Duration = Duration::from_secs(2);

/// Name of the error fact with the cluster that answered, if this side refuses it.
pub(super) const ANSWERED_AS: &str = "peer_cluster";

/// The transports over which streams reach peers.
#[derive(Clone, Debug)]
pub struct Transports {
    /// For peers on other hosts, and for peers that are linked by TCP only.
    pub tcp: Arc<dyn Transport>,
    /// For peers on this host.
    pub unix: Arc<dyn Transport>,
}

impl Default for Transports {
    fn default() -> Self {
        Transports { tcp: Arc::new(Tcp), unix: Arc::new(Unix) }
    }
}

impl Transports {
    /// Returns the transport for `address`.
    pub(super) fn for_address(&self, address: &Address) -> &Arc<dyn Transport> {
        if matches!(address, Address::Unix(_)) { &self.unix } else { &self.tcp }
    }
}

/// The address of one peer, and what is needed to authenticate it.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: Address,
    pub(super) me: Identity,
    pub(super) key: Key,
    /// Whether the process that answers is accepted without proof (`llm.LinkAcceptRemote`).
    pub(super) accept_remote: bool,
    /// The addresses of the peer.
    pub(super) addresses: Arc<PeerAddresses>,
}

impl Dialer {
    /// Returns a dialer for a further address of the peer, and how long it may take: at most half of the time that is left,
    /// so that the main address can still be tried. The last value is whether that is less than usual.
    pub(super) fn to(&self, at: &FurtherAddress, deadline: Deadline) -> (Dialer, Deadline, bool) {
        let half = deadline.left() / 2;
        let dialer = Dialer { address: at.address(), ..self.clone() };
        let limit = deadline.at_most(FURTHER_TIME.min(half)).named("the limit of a further address");
        (dialer, limit, half < FURTHER_TIME)
    }

    /// Opens a stream to the address and runs the handshake for `purpose`. Afterwards the peer is
    /// authenticated, unless it only names its local socket or `accept_remote` is set. Returns `Err` with
    /// `LinkFailed` if the peer does not prove its identity.
    pub(super) fn handshake(
        &self,
        asked: Option<crate::model::ClusterId>,
        purpose: Purpose,
        deadline: Deadline,
    ) -> Result<(Stream, Welcome)> {
        let stream = self.transport.dial(&self.address, deadline)?;
        let local = stream.about.carries_descriptors;
        let known =
            self.key.proves() || self.accept_remote || stream.about.credentials.is_some_and(same_user);
        if local && !known {
            let error = handshake::other_user("the process at the local socket", &stream).permanent();
            let links = matches!(purpose, Purpose::Link { .. });
            handshake::decline(&stream, links.then_some((&self.me, asked, purpose)), &error);
            return Err(error);
        }
        // The peer sends its offer of memory right after its welcome, and its ring when it has that of this side.
        if matches!(purpose, Purpose::Link { .. } | Purpose::Call { rings: true, .. }) {
            stream.expect_descriptors()?;
        }
        let welcome = handshake::dial(&stream, &self.me, &self.key, asked, purpose, deadline)?;
        if !known && welcome.local.is_none() {
            let error = handshake::unproven(&stream, [&self.me.host; 2]).permanent();
            let error = error.with(ANSWERED_AS, welcome.from.cluster);
            handshake::decline(&stream, None, &error);
            return Err(error);
        }
        Ok((stream, welcome))
    }
}
