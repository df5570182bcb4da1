//! Connections between processes of one host: sockets with abstract names, which carry descriptors and
//! disappear with their owner.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, socket_with};

use super::acceptor::ListeningSocket;
use super::stream::About;
use super::{Address, Listener, Stream, Transport, unavailable, unreachable, unsupported_address};
use crate::error::{Error, Result};
use crate::memory::{above_standard_streams, peer_credentials, take_descriptors};
use crate::model::Deadline;

/// Streams between processes of one host.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unix;

impl Transport for Unix {
    fn name(&self) -> &'static str {
        "unix"
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        let Address::Unix(name) = to else { return Err(unsupported_address(self, to)) };
        let refused = |errno| unreachable(to, "connect to", errno);
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(refused)?;
        let socket = open(SocketFlags::empty()).map_err(refused)?;
        loop {
            // The kernel can wait for room in the listener's queue, but it does not report room to `poll`. A
            // limit of zero would mean no limit.
            let limit = deadline.wait_limit().max(Duration::from_millis(1));
            set_socket_timeout(&socket, Timeout::Send, Some(limit)).map_err(refused)?;
            match connect(&socket, &address) {
                Ok(()) => return Ok(stream(socket, to)),
                Err(Errno::AGAIN | Errno::INTR) => {
                    deadline.waiting("connecting").map_err(|late: Error| late.with("address", to))?;
                }
                Err(errno) => return Err(refused(errno)),
            }
        }
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        let Address::Unix(name) = at else { return Err(unsupported_address(self, at)) };
        let bound = || {
            let socket = open(SocketFlags::NONBLOCK)?;
            bind(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes())?)?;
            Ok(socket)
        };
        let socket = bound().map_err(|errno| unavailable(at, "listen at", errno))?;
        Ok(Box::new(ListeningSocket::open(socket, at.clone(), |socket, at| Some(stream(socket, at)))?))
    }
}

/// Creates a socket that receives no descriptors until it is asked to. So do the sockets that a listener
/// accepts.
fn open(flags: SocketFlags) -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    let socket = above_standard_streams(socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?)?;
    take_descriptors(socket.as_fd(), false);
    Ok(socket)
}

fn stream(socket: OwnedFd, address: &Address) -> Stream {
    let credentials = peer_credentials(socket.as_fd());
    let peer = match credentials.and_then(|peer| peer.pid) {
        Some(pid) => format!("process {pid} over {address}"),
        None => address.to_string(),
    };
    Stream::new(
        socket,
        About {
            transport: "shm",
            peer,
            listened_at: None,
            same_host: true,
            carries_descriptors: true,
            credentials,
        },
    )
}
