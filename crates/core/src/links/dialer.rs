//! Opening streams to one peer: where it is, and what it must say to be the one.
//!
//! Not for: what a greeting is (`greeting`) or what becomes of the stream (`link`).

use std::sync::Arc;

use super::greeting::{self, Me};
use super::link::Link;
use crate::config::Token;
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::transport::{Address, Stream, Transport};
use crate::wire::{Purpose, Welcome};

/// The way to one peer.
#[derive(Debug)]
pub(super) struct Dialer {
    pub(super) transport: Arc<dyn Transport>,
    pub(super) address: Address,
    pub(super) me: Me,
    pub(super) token: Option<Token>,
}

impl Dialer {
    /// A stream to whoever answers at the address, greeted for `purpose`.
    pub(super) fn greet(
        &self,
        asked: Option<crate::id::ClusterId>,
        purpose: Purpose,
        deadline: Deadline,
    ) -> Result<(Stream, Welcome)> {
        let stream = self.transport.dial(&self.address, deadline)?;
        let welcome = greeting::dial(&stream, &self.me, self.token.as_ref(), asked, purpose, deadline)?;
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
