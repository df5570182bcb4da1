//! What the keeper has of each connection, and why a connection ends.

use std::os::fd::OwnedFd;

use llm_datadist_core::Error;
use llm_datadist_core::bindings::keeper::{CloseOnFork, Tensors};

use crate::leases::ClientLeases;
use crate::messages::{KeeperRefusal, KeeperReply, RefusalKind, ValueTerms, encoded};
use crate::roles::{ClientRole, Greeting};
use crate::socket::{PeerFile, send};

/// A connection.
#[derive(Debug)]
pub(crate) struct Client {
    /// Declared before the socket, so that it drops first.
    pub(crate) _forked: CloseOnFork,
    pub(crate) socket: PeerFile,
    /// Readable once its process has ended, which may be before the end of the socket: a child of that process may have a copy of the
    /// socket. `None` if the kernel does not tell.
    pub(crate) process: Option<OwnedFd>,
    /// The number of its user; `None` if the kernel does not tell.
    pub(crate) user: Option<u32>,
    /// What it is authenticated with.
    pub(crate) standing: Standing,
    /// `None` until it has attached.
    pub(crate) attached: Option<AttachedClient>,
}

/// How far a client has authenticated.
#[derive(Debug)]
pub(crate) enum Standing {
    /// It has shown no token. Its user decides.
    User,
    /// It has been sent a random number, and may prove a token.
    Greeted(Greeting),
    /// It has proved a token with this role.
    Proved(ClientRole),
}

/// What a client has said when it attached.
#[derive(Debug)]
pub(crate) struct AttachedClient {
    /// The number of its namespace; that of none if it is an observer.
    pub(crate) namespace: u32,
    pub(crate) role: ClientRole,
    /// `None` if it is an observer.
    pub(crate) memory: Option<ClientMemory>,
    pub(crate) leases: ClientLeases,
}

/// The memory of a client from which values are copied.
#[derive(Debug)]
pub(crate) struct ClientMemory {
    pub(crate) terms: ValueTerms,
    pub(crate) staging: Tensors,
    /// Its descriptor. Declared after the memory, so that unmapping it is never what frees a file of the client, which may be huge.
    pub(crate) _file: PeerFile,
}

/// Why a connection ends.
#[derive(Debug)]
pub(crate) enum Goodbye {
    /// The client has closed it, or it does not take replies.
    Left,
    /// The client is refused, and told why.
    Refused(KeeperRefusal),
}

impl From<Error> for Goodbye {
    fn from(error: Error) -> Self {
        Goodbye::at_limit(error.to_string())
    }
}

impl Goodbye {
    /// The end of a client that has sent what is refused.
    pub(crate) fn refused(argument: &str, reason: &str) -> Goodbye {
        let (kind, argument, reason) = (RefusalKind::Argument, argument.into(), reason.into());
        Goodbye::Refused(KeeperRefusal { kind, argument, reason })
    }

    /// The end of a client that the keeper or its system has no room for.
    pub(crate) fn at_limit(reason: String) -> Goodbye {
        Goodbye::Refused(KeeperRefusal { kind: RefusalKind::System, argument: String::new(), reason })
    }

    /// The end of a client that has not attached.
    pub(crate) fn unattached() -> Goodbye {
        Goodbye::refused("", "the first message must be an attach request")
    }
}

/// Sends a reply to a client, which leaves if it does not take it.
pub(crate) fn send_reply(socket: &PeerFile, reply: &KeeperReply) -> Result<(), Goodbye> {
    send(socket, &encoded(reply)?, &[]).map_err(|_| Goodbye::Left)
}
