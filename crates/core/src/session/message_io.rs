//! Messages over a stream: one frame each.
//!
//! Not for: bytes of caches, which follow some of them (`engine`).

use std::os::fd::OwnedFd;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::Stream;
use crate::protocol;

/// Sends one message.
pub(crate) fn say<T: Serialize>(stream: &Stream, message: &T, deadline: Deadline) -> Result<()> {
    stream.send(&protocol::encode(message)?, deadline)
}

/// Sends one message behind which bytes of a cache follow at once.
pub(crate) fn say_before<T: Serialize>(stream: &Stream, message: &T, deadline: Deadline) -> Result<()> {
    stream.send_before(&protocol::encode(message)?, deadline)
}

/// Receives one message of at most `limit` bytes; a refusal in its place is the error it carries. Watches the stream for
/// `patience` before it sleeps.
pub(crate) fn hear<T: DeserializeOwned>(
    stream: &Stream,
    limit: usize,
    patience: Duration,
    deadline: Deadline,
) -> Result<T> {
    let (kind, body) = stream.receive(limit, patience, deadline)?.ok_or_else(|| ended(stream))?;
    protocol::open(kind, &body)
}

/// As [`hear`], with the descriptors that came with the message.
pub(crate) fn hear_with<T: DeserializeOwned>(
    stream: &Stream,
    limit: usize,
    deadline: Deadline,
) -> Result<(T, Vec<OwnedFd>)> {
    let (kind, body, descriptors) = stream.receive_with(limit, deadline)?.ok_or_else(|| ended(stream))?;
    Ok((protocol::open(kind, &body)?, descriptors))
}

#[cold]
fn ended(stream: &Stream) -> Error {
    Error::new(ErrorKind::NotLinked, "the peer closed the connection").with("peer", stream.peer())
}
