//! Sends and receives messages over a stream, one frame each.
//!
//! The bytes of caches that follow some messages are moved by `copy`.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::budget::BudgetShare;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::net::Stream;
use crate::protocol::{self, Reply};

/// Sends one message.
pub(crate) fn send_message<T: Serialize>(stream: &Stream, message: &T, deadline: Deadline) -> Result<()> {
    stream.send(&protocol::encode(message)?, deadline)
}

/// Sends one message, immediately followed by cache bytes.
pub(crate) fn send_message_before<T: Serialize>(
    stream: &Stream,
    message: &T,
    deadline: Deadline,
) -> Result<()> {
    stream.send_before(&protocol::encode(message)?, deadline)
}

/// Receives one message of at most `limit` bytes. Returns `Err` with the error of the peer if a refusal arrives instead, and with
/// `NotLinked` if the stream has ended.
pub(crate) fn receive_message<T: DeserializeOwned>(
    stream: &Stream,
    limit: usize,
    deadline: Deadline,
) -> Result<T> {
    receive_message_with(stream, limit, deadline).map(|(message, _)| message)
}

/// Receives a reply of at most `limit` bytes as [`receive_message`] does. Also returns the memory that it takes, which `admit`
/// returns for the length of the frame, with the deadline of its body.
pub(super) fn receive_reply(
    stream: &Stream,
    (limit, poll_time): (usize, Duration),
    deadline: Deadline,
    admit: impl FnOnce(usize) -> Result<(Arc<BudgetShare>, Deadline)>,
) -> Result<(Reply, Arc<BudgetShare>)> {
    let frame = stream.receive_admitted(limit, poll_time, deadline, admit)?;
    let (kind, body, share) = frame.ok_or_else(|| ended(stream))?;
    let reply = share.charged(|| protocol::open(kind, &body))?;
    share.freed(body.len() as u64);
    drop(body);
    share.trim();
    Ok((reply, share))
}

/// Receives one message as [`receive_message`] does, with the memory files that arrived with it and that this side expects.
pub(crate) fn receive_message_with<T: DeserializeOwned>(
    stream: &Stream,
    limit: usize,
    deadline: Deadline,
) -> Result<(T, Vec<OwnedFd>)> {
    let (kind, body, descriptors) = stream.receive_with(limit, deadline)?.ok_or_else(|| ended(stream))?;
    Ok((protocol::open(kind, &body)?, descriptors))
}

fn ended(stream: &Stream) -> Error {
    Error::new(ErrorKind::NotLinked, "the peer closed the connection").with("peer", &stream.about.peer)
}
