//! Opening streams to one peer: where it is, and what it must say to be the one.
//!
//! Not for: what a greeting is (`greeting`) or what becomes of the stream (`link`).

use std::sync::Arc;

use super::handshake::{self, Key, Me};
use crate::error::Result;
use crate::memory::same_user;
use crate::model::Deadline;
use crate::net::{Address, Stream, Transport};
use crate::protocol::{Purpose, Welcome};

/// The way to one peer.
#[derive(Clone, Debug)]
pub(super) struct Dialer {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: Address,
    pub(super) me: Me,
    pub(super) key: Key,
    /// Whoever answers is believed without a proof (`llm.LinkAcceptRemote`).
    pub(super) accept_remote: bool,
}

impl Dialer {
    /// A stream to whoever answers at the address, greeted for `purpose`. The peer has proved who it is, unless it only
    /// names its local socket.
    pub(super) fn greet(
        &self,
        asked: Option<crate::model::ClusterId>,
        purpose: Purpose,
        deadline: Deadline,
    ) -> Result<(Stream, Welcome)> {
        let stream = self.transport.dial(&self.address, deadline)?;
        let local = stream.carries_descriptors();
        let known = self.key.proves() || self.accept_remote || stream.credentials().is_some_and(same_user);
        if local && !known {
            return Err(handshake::other_user("the process at the local socket", &stream));
        }
        // The peer sends what it offers as soon as it has welcomed this side.
        stream.expect_descriptors(matches!(purpose, Purpose::Link { .. }));
        let welcome = handshake::dial(&stream, &self.me, &self.key, asked, purpose, deadline)?;
        if !known && welcome.local.is_none() {
            return Err(handshake::stranger(&stream));
        }
        Ok((stream, welcome))
    }
}
