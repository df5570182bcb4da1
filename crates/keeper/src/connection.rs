//! A connection to a keeper: sends requests, and receives the replies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use llm_datadist_core::bindings::keeper::CloseOnFork;
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};

use crate::messages::{
    KeeperRefusal, KeeperReply, KeeperRequest, RefusalKind, SharedGeometry, decoded, encoded,
};
use crate::sizes::MESSAGE_BYTES;
use crate::socket::{PeerFile, connect_to, receive, send};

/// A connection on which the keeper has attached this process.
#[derive(Debug)]
pub(crate) struct KeeperConnection {
    /// Declared before the socket, so that it drops first.
    _forked: CloseOnFork,
    socket: OwnedFd,
}

impl KeeperConnection {
    /// Connects, and sends the first message. Returns the sizes of the memory of the keeper, and the descriptors that it shares.
    pub(crate) fn open(
        path: &Path,
        request: &KeeperRequest,
        memory: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(KeeperConnection, SharedGeometry, Vec<PeerFile>)> {
        let socket = connect_to(path)?;
        let forked = CloseOnFork::new(&socket);
        send(&socket, &encoded(request)?, memory).map_err(ended)?;
        let (reply, files) = received(&socket, deadline)?;
        match reply {
            KeeperReply::Attached(geometry) => {
                Ok((KeeperConnection { _forked: forked, socket }, geometry, files))
            }
            KeeperReply::Refused(refusal) => Err(refused(refusal)),
            _ => Err(unexpected()),
        }
    }

    /// Returns whether the keeper has not ended the connection.
    pub(crate) fn alive(&self) -> bool {
        let mut watched = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        loop {
            match poll(&mut watched, Some(&now)) {
                Err(Errno::INTR) => {}
                other => return other == Ok(0),
            }
        }
    }

    /// Sends a request, and returns the reply. At most one thread may call this at a time. After an error, the reply may still come, so
    /// the connection must not be used any more.
    pub(crate) fn ask(&self, request: &KeeperRequest, deadline: Deadline) -> Result<KeeperReply> {
        self.send(request, deadline)?;
        self.reply(deadline)
    }

    pub(crate) fn send(&self, request: &KeeperRequest, deadline: Deadline) -> Result<()> {
        let message = encoded(request)?;
        loop {
            match send(&self.socket, &message, &[]) {
                Ok(()) => return Ok(()),
                Err(Errno::AGAIN) => wait(&self.socket, PollFlags::OUT, deadline)?,
                Err(errno) => return Err(ended(errno)),
            }
        }
    }

    pub(crate) fn reply(&self, deadline: Deadline) -> Result<KeeperReply> {
        match received(&self.socket, deadline)?.0 {
            KeeperReply::Refused(refusal) => Err(refused(refusal)),
            reply => Ok(reply),
        }
    }

    /// Sends a request without a reply, unless the queue of the keeper is full.
    pub(crate) fn send_if_room(&self, request: &KeeperRequest) {
        if let Ok(message) = encoded(request) {
            // The sender does not need it to arrive.
            let _ = send(&self.socket, &message, &[]);
        }
    }

    /// Ends the connection, and returns the reply that the keeper has sent before, if there is one. The keeper can send none from now on.
    pub(crate) fn last_reply(&self) -> Option<KeeperReply> {
        self.end();
        let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
        receive(&self.socket, &mut buffer, &mut files)
            .ok()
            .flatten()
            .and_then(|message| decoded(message).ok())
    }

    /// Ends the connection. Calls that wait for a reply fail at once.
    pub(crate) fn end(&self) {
        // Fails only if the keeper has ended it.
        let _ = shutdown(&self.socket, Shutdown::Both);
    }
}

/// Waits for the next message of the keeper.
fn received(socket: &OwnedFd, deadline: Deadline) -> Result<(KeeperReply, Vec<PeerFile>)> {
    let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
    loop {
        match receive(socket, &mut buffer, &mut files) {
            Ok(Some(message)) => return Ok((decoded(message)?, files)),
            Ok(None) => return Err(ended(Errno::PIPE)),
            Err(Errno::AGAIN) => wait(socket, PollFlags::IN, deadline)?,
            Err(errno) => return Err(ended(errno)),
        }
    }
}

/// Waits until the socket is ready, or the keeper has ended the connection.
fn wait(socket: impl AsFd, flags: PollFlags, deadline: Deadline) -> Result<()> {
    loop {
        let limit = Timespec::try_from(deadline.wait_limit()).ok();
        match poll(&mut [PollFd::new(&socket, flags)], limit.as_ref()) {
            Ok(0) | Err(Errno::INTR) => deadline.waiting("waiting for the keeper")?,
            Ok(_) => return Ok(()),
            Err(errno) => return Err(Error::new(ErrorKind::System, "poll failed").errno(errno)),
        }
    }
}

pub(crate) fn ended(errno: Errno) -> Error {
    Error::new(ErrorKind::NotLinked, "the keeper has ended the connection").errno(errno)
}

fn refused(refusal: KeeperRefusal) -> Error {
    let KeeperRefusal { kind, argument, reason } = refusal;
    let kind = match kind {
        RefusalKind::Argument => ErrorKind::InvalidArgument,
        RefusalKind::System => ErrorKind::System,
    };
    let error = Error::new(kind, reason).with("reported_by", "the keeper");
    if argument.is_empty() { error } else { error.of_argument(&argument) }
}

pub(crate) fn unexpected() -> Error {
    Error::new(ErrorKind::NotLinked, "the keeper has sent a reply that does not fit")
}
