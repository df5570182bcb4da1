//! Connections between hosts: TCP over IPv4 and IPv6.
//!
//! Between hosts, the kernel chooses the buffer sizes, because it grows them with the connection beyond what
//! a process may request.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, socket_with, sockopt};
use rustix::net::{getpeername, getsockname};

use super::acceptor::ListeningSocket;
use super::step::timespec;
use super::stream::About;
use super::{Address, Listener, Stream, Transport, unavailable, unreachable, unsupported_address};
use crate::error::{Error, Result};
use crate::memory::above_standard_streams;
use crate::model::Deadline;

/// Sizes in bytes of the receive buffer and the send buffer of a connection within one host
/// (benches/results/log.md).
const LOOPBACK_RECEIVES: usize = 1 << 20;
const LOOPBACK_SENDS: usize = 256 << 10;

/// Streams between hosts.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn dial(&self, to: &Address, deadline: Deadline) -> Result<Stream> {
        let Address::Tcp(address) = to else { return Err(unsupported_address(self, to)) };
        let refused = |errno| unreachable(to, "connect to", errno);
        let socket = open(*address).map_err(refused)?;
        match connect(&socket, address) {
            Ok(()) => {}
            // An interrupted call continues in the background.
            Err(Errno::INPROGRESS | Errno::INTR) => finish(&socket, to, deadline)?,
            Err(errno) => return Err(refused(errno)),
        }
        let (local, remote) = addresses(&socket).map_err(refused)?;
        if local == remote {
            // There is no listener: the kernel gave that port to this end, and connected the socket to
            // itself.
            return Err(refused(Errno::CONNREFUSED));
        }
        stream(socket, (local, remote), remote).map_err(refused)
    }

    fn listen(&self, at: &Address) -> Result<Box<dyn Listener>> {
        let Address::Tcp(address) = at else { return Err(unsupported_address(self, at)) };
        let bound = || {
            let socket = open(*address)?;
            // Allows a port on which old connections still linger, but not one that has a listener.
            sockopt::set_socket_reuseaddr(&socket, true)?;
            bind(&socket, address)?;
            let local = SocketAddr::try_from(getsockname(&socket)?)?;
            Ok((socket, local))
        };
        let (socket, local) = bound().map_err(|errno| unavailable(at, "listen at", errno))?;
        let welcome = |socket: OwnedFd, _: &Address| {
            let (local, remote) = addresses(&socket).ok()?;
            stream(socket, (local, remote), local).ok()
        };
        Ok(Box::new(ListeningSocket::open(socket, Address::Tcp(local), welcome)?))
    }
}

fn open(address: SocketAddr) -> rustix::io::Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    above_standard_streams(socket_with(family, SocketType::STREAM, flags, None)?)
}

/// Waits until a pending connection is established.
fn finish(socket: &OwnedFd, to: &Address, deadline: Deadline) -> Result<()> {
    let refused = |errno| unreachable(to, "connect to", errno);
    loop {
        let mut sources = [PollFd::new(socket, PollFlags::OUT)];
        match poll(&mut sources, Some(&timespec(deadline.wait_limit()))) {
            Ok(0) | Err(Errno::INTR) => {
                deadline.waiting("connecting").map_err(|late: Error| late.with("address", to))?;
            }
            Ok(_) => return sockopt::socket_error(socket).and_then(|result| result).map_err(refused),
            Err(errno) => return Err(refused(errno)),
        }
    }
}

fn addresses(socket: &OwnedFd) -> rustix::io::Result<(SocketAddr, SocketAddr)> {
    let remote = getpeername(socket)?.ok_or(Errno::NOTCONN)?;
    Ok((getsockname(socket)?.try_into()?, remote.try_into()?))
}

fn stream(
    socket: OwnedFd,
    (local, remote): (SocketAddr, SocketAddr),
    listened_at: SocketAddr,
) -> rustix::io::Result<Stream> {
    // Frames are written whole, so waiting for more bytes to send with them would only delay them.
    sockopt::set_tcp_nodelay(&socket, true)?;
    let same_host = same_host(local.ip(), remote.ip());
    if same_host {
        // Over loopback, the kernel's own buffers grow until neither side finds the bytes in a CPU cache, and
        // packets are dropped. Between hosts, the kernel's choice is best.
        sockopt::set_socket_recv_buffer_size(&socket, LOOPBACK_RECEIVES)?;
        sockopt::set_socket_send_buffer_size(&socket, LOOPBACK_SENDS)?;
    }
    let about = About {
        transport: "tcp",
        peer: Address::Tcp(remote).to_string(),
        listened_at: Some(listened_at.ip().to_canonical()),
        same_host,
        carries_descriptors: false,
        credentials: None,
    };
    Ok(Stream::new(socket, about))
}

/// Whether both ends of a connection are on one host: the remote address is a loopback address, or both are
/// equal.
fn same_host(local: IpAddr, remote: IpAddr) -> bool {
    let (local, remote) = (local.to_canonical(), remote.to_canonical());
    remote.is_loopback() || local == remote
}
