//! A connection to a keeper: sends requests, and receives the replies.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use llm_datadist_core::bindings::keeper::{CloseOnFork, Token, random};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{Shutdown, shutdown};
use rustix::process::geteuid;

use crate::messages::{
    KeeperRefusal, KeeperReply, KeeperRequest, RefusalKind, SharedGeometry, VERSION, decoded, encoded,
};
use crate::roles::{ClientRole, Greeting};
use crate::sizes::MESSAGE_BYTES;
use crate::socket::{PeerFile, connect_to, receive, send};

/// The fact that an error has if the keeper has answered with it.
pub(crate) const REPORTED_BY: &str = "reported_by";
/// How often a client tries to connect while the queue of the socket is full.
const CROWDED: Duration = Duration::from_millis(1);

/// The token of a client, and the user whose keeper it trusts. By default, that is the same user, whose keeper needs no token.
#[derive(Clone, Debug, Default)]
pub struct KeeperAccess {
    /// The token that gives the client its role. Without one, only a process of the user of the keeper may attach.
    pub token: Option<Token>,
    /// The number of the user whose keeper is trusted with the values of this process; `None` for that of this process.
    pub keeper_user: Option<u32>,
}

impl KeeperAccess {
    /// Returns `Err(InvalidArgument)` if a keeper of this user needs a token, and there is none.
    fn check(&self) -> Result<()> {
        match self.keeper_user {
            Some(user) if self.token.is_none() && user != geteuid().as_raw() => {
                let text = format!("keeper_user={user} is another user, whose keeper needs a token");
                Err(Error::new(ErrorKind::InvalidArgument, text).of_argument("keeper_user"))
            }
            _ => Ok(()),
        }
    }

    /// Returns how many messages the keeper answers until it has attached this client.
    pub(crate) fn round_trips(&self) -> u32 {
        if self.token.is_some() { 3 } else { 1 }
    }
}

/// A connection on which the keeper has attached this process.
#[derive(Debug)]
pub(crate) struct KeeperConnection {
    /// Declared before the socket, so that it drops first.
    _forked: CloseOnFork,
    socket: OwnedFd,
    role: ClientRole,
}

impl KeeperConnection {
    /// Connects, and sends the first message. Returns the sizes of the memory of the keeper, and the descriptors that it shares.
    pub(crate) fn open(
        path: &Path,
        access: &KeeperAccess,
        request: &KeeperRequest,
        memory: &[BorrowedFd<'_>],
        deadline: Deadline,
    ) -> Result<(KeeperConnection, SharedGeometry, Vec<PeerFile>)> {
        access.check()?;
        let socket = connected(path, access, deadline)?;
        let forked = CloseOnFork::new(&socket);
        let role = match &access.token {
            Some(token) => prove(&socket, token, deadline)?,
            None => ClientRole::Admin,
        };
        send(&socket, &encoded(request)?, memory).map_err(ended)?;
        let (reply, files) = received(&socket, deadline)?;
        match reply {
            KeeperReply::Attached(geometry) => {
                Ok((KeeperConnection { _forked: forked, socket, role }, geometry, files))
            }
            KeeperReply::Refused(refusal) => Err(refused(refusal)),
            _ => Err(unexpected()),
        }
    }

    /// Returns the reason if the role of this client does not allow what needs the role `needed`.
    pub(crate) fn check(&self, needed: ClientRole) -> Result<()> {
        self.role.check(needed)
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
            KeeperReply::Forbidden(role, needed) => {
                role.check(needed)?;
                Err(unexpected())
            }
            reply => Ok(reply),
        }
    }

    /// Sends a request without a reply, unless the queue of the keeper is full. Returns whether it was sent: the sender does not need
    /// it to arrive.
    pub(crate) fn send_if_room(&self, request: &KeeperRequest) -> bool {
        encoded(request).is_ok_and(|message| send(&self.socket, &message, &[]).is_ok())
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

/// Connects. Waits for a place in the queue of the socket, which others may have filled.
fn connected(path: &Path, access: &KeeperAccess, deadline: Deadline) -> Result<OwnedFd> {
    loop {
        match connect_to(path, access.keeper_user) {
            Err(error) if error.raw_os_error() == Some(Errno::AGAIN.raw_os_error()) => {
                deadline.waiting("waiting for the keeper")?;
                sleep(CROWDED);
            }
            other => return other,
        }
    }
}

/// Proves a token, and has the keeper prove it. Returns the role that the keeper gives this client for it.
fn prove(socket: &OwnedFd, token: &Token, deadline: Deadline) -> Result<ClientRole> {
    let nonce = random()?;
    let asked = |request: &KeeperRequest| {
        send(socket, &encoded(request)?, &[]).map_err(ended)?;
        match received(socket, deadline)?.0 {
            KeeperReply::Refused(refusal) => Err(refused(refusal)),
            reply => Ok(reply),
        }
    };
    let unproved = || {
        let text = "what listens at the socket has not proved that it has the token";
        Error::new(ErrorKind::System, text).of_argument("token")
    };
    let KeeperReply::Challenge(other) = asked(&KeeperRequest::Greet(VERSION, nonce))? else {
        return Err(unproved());
    };
    let greeting = Greeting::of(nonce, other);
    let proof = greeting.client_proof(token)?.bytes();
    match asked(&KeeperRequest::Prove(proof))? {
        KeeperReply::Proved(role, answer) if greeting.keeper_proof(token)?.is(&answer) => Ok(role),
        _ => Err(unproved()),
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
    let error = Error::new(kind, reason).with(REPORTED_BY, "the keeper");
    if argument.is_empty() { error } else { error.of_argument(&argument) }
}

pub(crate) fn unexpected() -> Error {
    Error::new(ErrorKind::NotLinked, "the keeper has sent a reply that does not fit")
}
