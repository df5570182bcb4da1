//! Opening streams to one peer: where it is, and what it must say to be the one.
//!
//! Not for: what a greeting is (`greeting`) or what becomes of the stream (`link`).

use std::sync::Arc;

use super::handshake::{self, Key, Me};
use super::link::Link;
use crate::error::{Error, ErrorKind, Result};
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

    /// One more stream of `link`; with `reverse` the peer will call on it.
    pub(super) fn call(&self, link: &Link, reverse: bool, deadline: Deadline) -> Result<Stream> {
        let greet = || {
            let purpose = Purpose::Call { link: link.id, reverse };
            self.greet(Some(link.peer().cluster), purpose, deadline)
        };
        // A listener full of strangers sends away the oldest, who may be this one: once more.
        let greeted = match greet() {
            Err(error) if error.kind() == ErrorKind::NotLinked && link.alive() => greet(),
            greeted => greeted,
        };
        let (stream, welcome) = greeted?;
        if welcome.from.instance == link.peer().instance {
            return Ok(stream);
        }
        let text = "another process answers at the address of the peer: it was restarted; link again";
        Err(Error::new(ErrorKind::NotLinked, text))
    }
}
