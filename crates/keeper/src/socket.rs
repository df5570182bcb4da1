//! Local sockets that carry messages and descriptors, and the path at which a keeper listens.

use std::fs::{File, OpenOptions, Permissions, set_permissions};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use llm_datadist_core::bindings::keeper::{
    CloseOnFork, above_standard_streams, discard, peer_credentials, same_user,
};
use llm_datadist_core::{Error, ErrorKind, Result};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

/// The most descriptors that are sent with a message.
const MAX_SENT: usize = 3;
/// The most descriptors that the kernel lets another process send with a message. If there were no room for some, the kernel would
/// close them on the thread that receives.
const MAX_RECEIVED: usize = 253;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// A socket that listens at a path. No other keeper takes the path while this value lives; the path is removed with it.
#[derive(Debug)]
pub(crate) struct ListeningPath {
    /// Declared before the descriptors, so that they drop first.
    _forked: [CloseOnFork; 2],
    socket: OwnedFd,
    path: PathBuf,
    /// Locked as long as the keeper lives. The kernel unlocks it when the process ends.
    _lock: OwnedFd,
}

impl ListeningPath {
    /// Listens at `path`. Takes over a socket that a dead keeper has left. Returns `Err(InvalidArgument)` if the path cannot be one of
    /// a socket or something else is there, and `Err(System)` with its process if a living program listens there.
    pub(crate) fn open(path: &Path) -> Result<ListeningPath> {
        let address = address(path)?;
        let lock = locked(path)?;
        let found = std::fs::symlink_metadata(path).ok();
        if found.as_ref().is_some_and(|found| !found.file_type().is_socket()) {
            return Err(Error::argument("socket", path.display(), "the path of a socket, or of nothing"));
        }
        if found.is_some() {
            match connected(&address) {
                Err(Errno::CONNREFUSED) => {}
                living => return Err(in_use(path, living.ok().as_ref())),
            }
            std::fs::remove_file(path)
                .map_err(|error| refused(path, "remove the socket of a dead keeper at", error))?;
        }
        let socket = seqpacket().map_err(|errno| refused(path, "create a socket for", errno.into()))?;
        let failed = |errno: Errno| refused(path, "listen at", errno.into());
        bind(&socket, &address).map_err(failed)?;
        // Before anybody can connect.
        set_permissions(path, Permissions::from_mode(0o600))
            .map_err(|error| refused(path, "set the mode of", error))?;
        listen(&socket, BACKLOG).map_err(failed)?;
        let forked = [CloseOnFork::new(&socket), CloseOnFork::new(&lock)];
        Ok(ListeningPath { _forked: forked, socket, path: path.into(), _lock: lock })
    }

    /// Accepts a connection. `None` if there is none.
    pub(crate) fn accept(&self) -> rustix::io::Result<Option<OwnedFd>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => above_standard_streams(socket).map(Some),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
            Err(errno) => Err(errno),
        }
    }
}

impl AsFd for ListeningPath {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ListeningPath {
    fn drop(&mut self) {
        // If it fails, the next keeper takes the path over.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// A descriptor that another process has sent, or a socket to which it may have sent some. Closing it may take as long as that process
/// chose, for instance if it is a socket that lingers. So another thread closes it.
#[derive(Debug)]
pub(crate) struct PeerFile {
    /// Declared before the last copy, so that it drops first.
    file: Arc<OwnedFd>,
    _last: LastCopy,
}

#[derive(Debug)]
struct LastCopy(Option<Arc<OwnedFd>>);

impl PeerFile {
    pub(crate) fn new(file: OwnedFd) -> PeerFile {
        let file = Arc::new(file);
        PeerFile { _last: LastCopy(Some(file.clone())), file }
    }

    /// Returns a second descriptor of the file, with a number above those of the standard streams. As long as this value lives, closing
    /// it does not wait.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd> {
        let failed = |errno| Error::new(ErrorKind::System, "cannot duplicate a descriptor").errno(errno);
        fcntl_dupfd_cloexec(&self.file, 3).map_err(failed)
    }
}

impl AsFd for PeerFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl Drop for LastCopy {
    fn drop(&mut self) {
        if let Some(file) = self.0.take().and_then(Arc::into_inner) {
            discard(file);
        }
    }
}

/// Connects to a keeper of the same user. Returns `Err(NotLinked)` if nobody listens at the path, or too many wait there, and
/// `Err(System)` if the system refuses it or another user listens there, who must not get values.
pub(crate) fn connect_to(path: &Path) -> Result<OwnedFd> {
    let failed = |errno| {
        let (kind, text) = match errno {
            Errno::CONNREFUSED | Errno::NOENT | Errno::AGAIN => {
                (ErrorKind::NotLinked, "no keeper listens at the socket")
            }
            _ => (ErrorKind::System, "cannot connect to the socket of the keeper"),
        };
        Error::new(kind, text).of_argument("socket").with("socket", path.display()).errno(errno)
    };
    let socket = connected(&address(path)?).map_err(failed)?;
    match peer_credentials(socket.as_fd()) {
        Some(listener) if same_user(listener) => Ok(socket),
        listener => {
            let text = "a process of another user listens at the socket of the keeper";
            let error = Error::new(ErrorKind::System, text).of_argument("socket");
            let error = error.with("socket", path.display());
            Err(listener.map_or(error.clone(), |listener| error.with("uid", listener.uid)))
        }
    }
}

/// Checks that a socket can have this path.
pub(crate) fn address(path: &Path) -> Result<SocketAddrUnix> {
    let allowed = "a path of 1 to 108 bytes";
    SocketAddrUnix::new(path).map_err(|_| Error::argument("socket", path.display(), allowed))
}

/// Sends one message. Fails with `AGAIN` if the queue of the other end is full. Never waits.
pub(crate) fn send(
    socket: impl AsFd,
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SENT))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Errno::MSGSIZE);
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    loop {
        match sendmsg(&socket, &[IoSlice::new(message)], &mut control, flags) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop),
        }
    }
}

/// Receives one message into `buffer`, and its descriptors. Returns its bytes, or `None` if the other end has closed the socket.
/// Fails with `AGAIN` if there is none, and with `MSGSIZE` if it is longer than the buffer. Never waits.
pub(crate) fn receive<'a>(
    socket: impl AsFd,
    buffer: &'a mut [u8],
    descriptors: &mut Vec<PeerFile>,
) -> rustix::io::Result<Option<&'a [u8]>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_RECEIVED))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let message = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(buffer)], &mut control, flags) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = part {
            descriptors.extend(more.map(PeerFile::new));
        }
    }
    if message.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    Ok(Some(&buffer[..message.bytes]).filter(|bytes| !bytes.is_empty()))
}

/// Locks the file beside a socket that says whether its keeper lives.
fn locked(path: &Path) -> Result<OwnedFd> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&name);
    let file = file.map_err(|error| refused(path, "create the lock file of", error))?;
    let file =
        File::from(above_standard_streams(file.into()).map_err(|errno| refused(path, "lock", errno.into()))?);
    match file.try_lock() {
        Ok(()) => Ok(file.into()),
        Err(std::fs::TryLockError::WouldBlock) => Err(in_use(path, connected(&address(path)?).ok().as_ref())),
        Err(std::fs::TryLockError::Error(error)) => Err(refused(path, "lock", error)),
    }
}

fn connected(address: &SocketAddrUnix) -> rustix::io::Result<OwnedFd> {
    let socket = seqpacket()?;
    loop {
        match connect(&socket, address) {
            Err(Errno::INTR) => {}
            done => return done.map(|()| socket),
        }
    }
}

fn seqpacket() -> rustix::io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    above_standard_streams(socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?)
}

fn in_use(path: &Path, listener: Option<&OwnedFd>) -> Error {
    let process = listener.and_then(|socket| peer_credentials(socket.as_fd())?.pid);
    let error = Error::new(ErrorKind::System, "another program listens at the socket").of_argument("socket");
    let error = error.with("socket", path.display());
    process.map_or(error.clone(), |process| error.with("pid", process))
}

fn refused(path: &Path, what: &str, error: std::io::Error) -> Error {
    let text = format!("cannot {what} the path of the keeper");
    Error::new(ErrorKind::System, text).with("socket", path.display()).because(error)
}
