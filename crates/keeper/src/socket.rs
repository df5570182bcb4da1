//! Local sockets that carry messages and descriptors, and the path at which a keeper listens.

use std::fs::{OpenOptions, Permissions, set_permissions};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use llm_datadist_core::bindings::keeper::{
    above_standard_streams, discard, is_user, peer_credentials, peer_process_descriptor, same_user,
};
use llm_datadist_core::bindings::this_process;
use llm_datadist_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, FlockOperation, Gid, Mode, OFlags, chownat, fchmod, flock, fstat, open};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with, sockopt,
};
use rustix::process::geteuid;

use crate::dropped_on_thread::DroppedOnThread;
use crate::sizes::MESSAGE_BYTES;

/// The most descriptors that are sent with a message.
const MAX_SENT: usize = 3;
/// The most descriptors that the kernel lets another process send with a message. If there were no room for some, the kernel would
/// close them on the thread that receives.
const MAX_RECEIVED: usize = 253;
/// Bytes of the queue of a socket in which the longest message fits. The kernel uses 32 of them itself.
const QUEUE_BYTES: usize = MESSAGE_BYTES + 32;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 64;

/// How long a new keeper waits for one that is ending.
const ENDING: Duration = Duration::from_secs(10);
/// How often it looks whether that one has ended.
const LOOK: Duration = Duration::from_millis(5);

/// Device and number of a file.
pub(crate) type FileNumbers = (u64, u64);

/// A socket that listens at a path. No other keeper takes the path while this value lives, here or in a forked process. The path is
/// removed with it by the process that has opened it.
#[derive(Debug)]
pub(crate) struct ListeningPath {
    pub(crate) socket: OwnedFd,
    /// Locked as long as one of the processes that have it lives. The kernel unlocks it when they have ended.
    pub(crate) lock: OwnedFd,
    path: PathBuf,
    /// Where it listens until it [takes](Self::take) the path over.
    beside: Option<PathBuf>,
    /// The file at which it listens.
    file: FileNumbers,
    process: u32,
}

impl ListeningPath {
    /// Listens at `path`. Takes over a socket that a dead keeper has left, and waits for one that is ending. Returns
    /// `Err(InvalidArgument)` if the path cannot be one of a socket or something else is there, and `Err(System)` with its process if a
    /// living program listens there.
    #[cfg(test)]
    pub(crate) fn open(path: &Path) -> Result<ListeningPath> {
        Self::open_for(path, false, None)
    }

    /// Listens at a path beside `path`, at which another keeper listens, until [`take`](Self::take) is called.
    #[cfg(test)]
    pub(crate) fn open_beside(path: &Path) -> Result<ListeningPath> {
        Self::open_for(path, true, None)
    }

    /// Listens at `path`, or with `beside` at a path beside it, at which another keeper listens, until [`take`](Self::take) is called.
    /// Processes of the user may connect, and those of `group`.
    ///
    /// Takes over a socket that a dead keeper has left at `path`, and waits for one that is ending. Returns `Err(InvalidArgument)` if the
    /// path cannot be one of a socket or something else is there, and `Err(System)` with its process if a living program listens there,
    /// or if this process may not give the group access, for instance because its user is not in it.
    pub(crate) fn open_for(path: &Path, beside: bool, group: Option<u32>) -> Result<ListeningPath> {
        let address = address(path)?;
        let lock = lock_file(path)?;
        if beside {
            let mut name = path.as_os_str().to_owned();
            name.push(format!(".{}", std::process::id()));
            return Self::listen(path, Some(name.into()), lock, group);
        }
        wait_for_lock(path, &lock, ENDING, |listener| listener.is_none_or(|listener| !lives(listener)))?;
        match connected(&address) {
            Err(Errno::CONNREFUSED | Errno::NOENT) => {}
            living => return Err(in_use(path, living.ok().as_ref())),
        }
        Self::listen(path, None, lock, group)
    }

    fn listen(
        path: &Path,
        beside: Option<PathBuf>,
        lock: OwnedFd,
        group: Option<u32>,
    ) -> Result<ListeningPath> {
        let at = beside.as_deref().unwrap_or(path);
        let address = address(at)?;
        remove_socket(at)?;
        let socket = seqpacket().map_err(|errno| refused(path, "create a socket for", errno.into()))?;
        // What the system refuses to this socket, it would refuse to those of clients.
        make_room(&socket, QUEUE_BYTES)?;
        // The file gets this mode when it appears.
        fchmod(&socket, Mode::RUSR | Mode::WUSR)
            .map_err(|errno| refused(at, "set the mode of", errno.into()))?;
        bind(&socket, &address).map_err(|errno| refused(at, "listen at", errno.into()))?;
        let file = BoundFile::at(at).map_err(|error| refused(at, "examine", error))?;
        let (path, numbers, process) = (path.into(), file.numbers, this_process());
        let listening = ListeningPath { socket, lock, path, beside, file: numbers, process };
        // Before anybody can connect.
        if let Some(group) = group {
            let at = listening.beside.as_deref().unwrap_or(&listening.path);
            file.share_with(at, group).map_err(|error| {
                refused(at, "give a group access to", error).of_argument("group").with("gid", group)
            })?;
        }
        listen(&listening.socket, BACKLOG)
            .map_err(|errno| refused(listening.path(), "listen at", errno.into()))?;
        Ok(listening)
    }

    /// Returns the path at which clients attach.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns where it listens until it takes the path over.
    #[cfg(test)]
    pub(crate) fn beside(&self) -> Option<&Path> {
        self.beside.as_deref()
    }

    /// Returns the socket that is at the path now.
    pub(crate) fn found(&self) -> Option<FileNumbers> {
        identity(&self.path).ok()
    }

    /// Takes the path over, once the keeper whose socket is `replaced` has ended. Returns `Err(System)` if it does not end within `time`,
    /// or if another keeper takes the path first, with its process.
    pub(crate) fn take(&self, replaced: Option<FileNumbers>, time: Duration) -> Result<()> {
        let Some(beside) = &self.beside else { return Ok(()) };
        let another = || self.found().is_some_and(|found| Some(found) != replaced);
        wait_for_lock(&self.path, &self.lock, time, |_| !another())?;
        // A process of another container may have the same id, and so the same path.
        if identity(beside).ok() != Some(self.file) {
            let error = std::io::Error::other("another process has removed the socket beside it");
            return Err(refused(&self.path, "take over", error).with("beside", beside.display()));
        }
        std::fs::rename(beside, &self.path).map_err(|error| refused(&self.path, "take over", error))
    }

    /// Accepts a connection. `None` if there is none.
    pub(crate) fn accept(&self) -> rustix::io::Result<Option<OwnedFd>> {
        match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(socket) => {
                make_room(&socket, QUEUE_BYTES).map_err(|_| Errno::NOBUFS)?;
                above_standard_streams(socket).map(Some)
            }
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
        if self.process != this_process() {
            return;
        }
        for path in self.beside.iter().chain([&self.path]) {
            // Another keeper may have taken the path over.
            if identity(path).is_ok_and(|file| file == self.file) {
                // If it fails, the next keeper takes the path over.
                let _ = std::fs::remove_file(path);
            }
        }
    }
}

/// The file of a socket that was bound, however the path changes.
#[derive(Debug)]
struct BoundFile {
    descriptor: OwnedFd,
    numbers: FileNumbers,
}

impl BoundFile {
    /// Finds the socket of this user that was bound at a path. Follows no link.
    fn at(path: &Path) -> std::io::Result<BoundFile> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let descriptor = above_standard_streams(open(path, flags, Mode::empty())?)?;
        let found = fstat(&descriptor)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::Socket || found.st_uid != geteuid().as_raw() {
            return Err(std::io::Error::other("another process has replaced the socket"));
        }
        Ok(BoundFile { descriptor, numbers: (found.st_dev, found.st_ino) })
    }

    /// Lets processes of a group connect to the socket, if it is still at the path.
    fn share_with(&self, path: &Path, group: u32) -> std::io::Result<()> {
        if identity(path)? != self.numbers {
            return Err(std::io::Error::other("another process has replaced the socket"));
        }
        chownat(&self.descriptor, "", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
        // A descriptor of a path alone has no call that changes the mode before Linux 6.6.
        let opened = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        set_permissions(opened, Permissions::from_mode(0o660))
    }
}

/// A descriptor that another process has sent, or a socket to which it may have sent some. Closing it may take as long as that process
/// chose, for instance if it is a socket that lingers. So another thread closes it.
#[derive(Debug)]
pub(crate) struct PeerFile(DroppedOnThread<OwnedFd>);

impl PeerFile {
    pub(crate) fn new(file: OwnedFd) -> PeerFile {
        PeerFile(DroppedOnThread::new(file, discard))
    }

    /// Returns a second descriptor of the file, with a number above those of the standard streams. As long as this value lives, closing
    /// it does not wait.
    pub(crate) fn duplicate(&self) -> Result<OwnedFd> {
        let failed = |errno| Error::new(ErrorKind::System, "cannot duplicate a descriptor").errno(errno);
        fcntl_dupfd_cloexec(&*self.0, 3).map_err(failed)
    }
}

impl AsFd for PeerFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Connects to a keeper of the user with the number `user`, by default that of this process. Returns `Err(NotLinked)` if nobody listens
/// at the path, or too many wait there (`EAGAIN`), and `Err(System)` if the system refuses it or another user listens there, who must not get values.
pub(crate) fn connect_to(path: &Path, user: Option<u32>) -> Result<OwnedFd> {
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
    make_room(&socket, QUEUE_BYTES)?;
    let trusted = |listener| user.map_or_else(|| same_user(listener), |user| is_user(listener, user));
    match peer_credentials(socket.as_fd()) {
        Some(listener) if trusted(listener) => Ok(socket),
        listener => {
            let text = "a process of another user listens at the socket of the keeper; keeper_user names the user \
                        whose keeper is trusted";
            let error = Error::new(ErrorKind::System, text).of_argument("socket");
            let error = error.with("socket", path.display());
            Err(listener.map_or(error.clone(), |listener| error.with("uid", listener.uid)))
        }
    }
}

/// Returns whether a descriptor can be read now, or its other end is closed.
pub(crate) fn is_readable(descriptor: &OwnedFd) -> bool {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut [PollFd::new(descriptor, PollFlags::IN)], Some(&now)) == Ok(1)
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

/// Opens the file beside a socket whose lock says whether its keeper lives.
fn lock_file(path: &Path) -> Result<OwnedFd> {
    let mut name = path.as_os_str().to_owned();
    name.push(".lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&name);
    let file = file.map_err(|error| {
        let text = "cannot create the lock file beside the socket; its folder must exist, and this user must be able to \
                    write the folder and the lock file";
        Error::new(ErrorKind::System, text).of_argument("socket").with("socket", path.display()).because(error)
    })?;
    above_standard_streams(file.into()).map_err(|errno| refused(path, "lock", errno.into()))
}

/// Locks the file of `path`. Waits at most `time`, as long as `ending` says of the socket of the keeper that has it locked, if it still
/// listens.
fn wait_for_lock(
    path: &Path,
    lock: &OwnedFd,
    time: Duration,
    ending: impl Fn(Option<&OwnedFd>) -> bool,
) -> Result<()> {
    let end = Instant::now() + time;
    loop {
        match flock(lock, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK) => {
                let listener = connected(&address(path)?).ok();
                if !ending(listener.as_ref()) || end <= Instant::now() {
                    return Err(in_use(path, listener.as_ref()));
                }
                sleep(LOOK);
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(refused(path, "lock", errno.into())),
        }
    }
}

/// Returns whether the process that listens at the other end of a connection lives. Its children may listen although it does not.
fn lives(listener: &OwnedFd) -> bool {
    peer_process_descriptor(listener.as_fd()).is_some_and(|process| !is_readable(&process))
}

/// Removes the socket that a dead keeper has left at `path`.
fn remove_socket(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path)
            .map_err(|error| refused(path, "remove the socket of a dead keeper at", error)),
        Ok(_) => Err(Error::argument("socket", path.display(), "the path of a socket, or of nothing")),
        Err(_) => Ok(()),
    }
}

/// Returns the device and the number of the file at `path`.
fn identity(path: &Path) -> std::io::Result<FileNumbers> {
    std::fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Gives a socket a queue of at least `bytes` bytes, whatever the default of the system is. A longer message could never be sent.
fn make_room(socket: &OwnedFd, bytes: usize) -> Result<()> {
    let failed = |errno| Error::new(ErrorKind::System, "cannot size the queue of a socket").errno(errno);
    if sockopt::socket_send_buffer_size(socket).map_err(failed)? < bytes {
        sockopt::set_socket_send_buffer_size(socket, bytes).map_err(failed)?;
    }
    match sockopt::socket_send_buffer_size(socket).map_err(failed)? {
        has if has < bytes => {
            let text = "the system limits the queues of sockets to less than a message of a keeper; raise net.core.wmem_max";
            Err(Error::new(ErrorKind::System, text).with("limit_bytes", has).with("message_bytes", bytes))
        }
        _ => Ok(()),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_replaced_socket_is_not_shared_and_no_link_is_followed() {
        let folder = std::env::temp_dir().join(format!("llm-datadist-shared-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let (path, victim) = (folder.join("keeper"), folder.join("victim"));
        std::fs::write(&victim, "").unwrap();
        set_permissions(&victim, Permissions::from_mode(0o600)).unwrap();
        let socket = seqpacket().unwrap();
        bind(&socket, &address(&path).unwrap()).unwrap();
        let (bound, group) = (BoundFile::at(&path).unwrap(), rustix::process::getegid().as_raw());
        bound.share_with(&path, group).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        std::fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        let replaced = [bound.share_with(&path, group), BoundFile::at(&path).map(drop)];
        for error in replaced.map(Result::unwrap_err) {
            assert!(error.to_string().contains("has replaced the socket"), "{error}");
        }
        assert_eq!(std::fs::metadata(&victim).unwrap().mode() & 0o777, 0o600);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn the_longest_message_fits_whatever_the_default_is() {
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .unwrap();
        let longest = vec![7; MESSAGE_BYTES];
        sockopt::set_socket_send_buffer_size(&one, 0).unwrap();
        assert_eq!(send(&one, &longest, &[]), Err(Errno::MSGSIZE));
        make_room(&one, QUEUE_BYTES).unwrap();
        send(&one, &longest, &[]).unwrap();
        let (mut buffer, mut files) = (vec![0; MESSAGE_BYTES], Vec::new());
        assert_eq!(receive(&other, &mut buffer, &mut files), Ok(Some(&longest[..])));
        let refused = make_room(&one, 1 << 30).unwrap_err();
        assert!(refused.reason().contains("net.core.wmem_max"), "{refused}");
        assert_eq!(refused.fact("message_bytes"), Some("1073741824"));
    }
}
