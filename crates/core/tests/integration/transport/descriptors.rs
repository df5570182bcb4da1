//! File descriptors that travel with a frame.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::net::{Address, MAX_DESCRIPTORS, Stream, Tcp, Unix};
use llm_datadist_core::testing::protocol::{MESSAGE, MESSAGE_LIMIT};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::sockopt::set_socket_linger;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::{body, connected, each, frame, soon, unique};
use crate::child_process::{self, report};

/// Number of open descriptors that peers sent in place of memory, from which on no more are received.
const MAX_UNWANTED: usize = 32;
/// Longer than a test takes.
const LINGER: Duration = Duration::from_secs(60);

#[test]
fn descriptors_travel_over_local_sockets_only() {
    each(|case, _, local, remote| {
        let (one, two) = (file(b"content of the descriptor"), file(b""));
        let one = one.as_fd();
        let fds = [one, two.as_fd(), one];
        let with = frame(b"with three");
        let expect = |text: &[u8], count: usize| {
            let (kind, body, got) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
            assert_eq!((kind, body.as_slice(), got.len()), (MESSAGE, text, count));
            got
        };
        if case.transport.name() == "tcp" {
            let error = local.send_with(&with, &fds, soon()).unwrap_err();
            assert_eq!((error.kind(), error.fact("limit")), (ErrorKind::System, Some("0")));
            assert!(error.to_string().contains(&local.about.peer), "{error}");
            assert!(!local.is_closed());
            local.send_with(&with, &[], soon()).unwrap();
            expect(b"with three", 0);
            return;
        }
        local.send(&frame(b"before"), soon()).unwrap();
        local.send_with(&with, &fds, soon()).unwrap();
        local.send(&frame(b"after"), soon()).unwrap();
        expect(b"before", 0);
        let got = expect(b"with three", 3);
        assert!(got.iter().all(closes_on_exec));
        let mut text = [0; 64];
        let read = std::fs::File::from(got[2].try_clone().unwrap()).read_at(&mut text, 0).unwrap();
        assert_eq!(text[..read], *b"content of the descriptor");
        expect(b"after", 0);
        let many = vec![one; MAX_DESCRIPTORS + 1];
        assert_eq!(local.send_with(&with, &many, soon()).unwrap_err().fact("limit"), Some("8"));
        local.send_with(&with, &many[1..], soon()).unwrap();
        expect(b"with three", MAX_DESCRIPTORS);
    });
}

#[test]
fn unrequested_descriptors_are_closed() {
    each(|case, _, local, remote| {
        if case.transport.name() == "tcp" {
            return;
        }
        let (mut read, write) = std::io::pipe().unwrap();
        local.send_with(&frame(b"take this"), &[write.as_fd()], soon()).unwrap();
        drop(write);
        assert_eq!(body(&remote), b"take this");
        // The pipe ends because no copy of its writing end is left.
        let mut rest = Vec::new();
        assert_eq!(read.read_to_end(&mut rest).unwrap(), 0);
        local.send(&frame(b"and on"), soon()).unwrap();
        assert_eq!(body(&remote), b"and on");
    });
}

#[test]
fn descriptors_that_are_no_memory_are_closed() {
    each(|case, _, local, remote| {
        if case.transport.name() == "tcp" {
            return;
        }
        let (mut read, write) = std::io::pipe().unwrap();
        let file = file(b"memory");
        local.send_with(&frame(b"both"), &[write.as_fd(), file.as_fd()], soon()).unwrap();
        drop(write);
        let (_, _, got) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!(got.len(), 1);
        // The pipe ends because no copy of its writing end is left.
        assert_eq!(read.read_to_end(&mut Vec::new()).unwrap(), 0);
    });
}

/// A process that receives descriptors which cannot be closed, while its other ends of them exist.
#[test]
#[ignore = "started by the test below"]
fn stuck() {
    if child_process::role().is_none() {
        return;
    }
    let pair = || connected(&Unix, &Address::Unix(unique("stuck")));
    let early: Vec<_> = (0..8).map(|_| pair()).collect();
    early.iter().for_each(|(_, _, remote)| remote.expect_descriptors().unwrap());
    let (mut others, before, begun) = (Vec::new(), open_files(), Instant::now());
    let mut send = |local: &Stream| {
        let (fds, mut ends): (Vec<_>, Vec<_>) = (0..MAX_DESCRIPTORS).map(|_| lingering()).unzip();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        local.send_with(&frame(b"these"), &fds, soon()).unwrap();
        others.append(&mut ends);
    };
    let mut streams = 0;
    let refusal = loop {
        let (_, local, remote) = pair();
        if let Err(error) = remote.expect_descriptors() {
            break error;
        }
        send(&local);
        // The sender has closed its copies, so that the receiver closes the last ones.
        let received = remote.receive_with(MESSAGE_LIMIT, soon());
        streams += 1;
        if streams < MAX_UNWANTED / MAX_DESCRIPTORS {
            assert_eq!(received.unwrap().unwrap().2.len(), 0);
        } else {
            // The body could bring more.
            assert!(received.unwrap_err().to_string().contains("not received or closed yet"));
        }
    };
    assert_eq!(streams, MAX_UNWANTED / MAX_DESCRIPTORS);
    assert_eq!(refusal.kind(), ErrorKind::System);
    assert!(refusal.to_string().contains("not received or closed yet"), "{refusal}");
    // Those that may still send them end, and what they have sent is not received.
    for (_, local, remote) in early {
        send(&local);
        let error = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked);
        assert!(error.to_string().contains("not received or closed yet"), "{error}");
        assert!(remote.is_closed());
    }
    // Streams on which none are expected go on.
    let tcp = Address::Tcp("127.0.0.1:0".parse().unwrap());
    for (_, local, remote) in [connected(&Tcp, &tcp), pair()] {
        local.send(&frame(b"without"), soon()).unwrap();
        assert_eq!(remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap().1, b"without");
    }
    // The receiver has a descriptor for each of these sockets, in place of one for each descriptor in it.
    let received = open_files() - before - others.len();
    assert!(received <= MAX_UNWANTED + 9, "{received} descriptors are open");
    assert!(begun.elapsed() < LINGER / 2, "the thread that receives has closed a descriptor");
    drop(others);
    let (_, local, remote) = pair();
    let limit = soon();
    while remote.expect_descriptors().is_err() {
        assert!(!limit.passed(), "the descriptors are not closed");
        std::thread::sleep(Duration::from_millis(5));
    }
    local.send_with(&frame(b"memory"), &[file(b"text").as_fd()], soon()).unwrap();
    assert_eq!(remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap().2.len(), 1);
    report("done");
}

#[test]
fn descriptors_that_never_close_are_bounded() {
    assert_eq!(child_process::run("transport::descriptors::stuck", "stuck"), ["done"]);
}

/// Neither the thread that receives nor the one that drops a stream closes what the peer has sent.
#[test]
fn descriptors_behind_a_frame_hold_nobody_up() {
    let begun = Instant::now();
    let (_, local, remote) = connected(&Unix, &Address::Unix(unique("behind")));
    remote.expect_descriptors().unwrap();
    local.send(&frame(b"permitted"), soon()).unwrap();
    let (fd, behind) = lingering();
    local.send_with(&frame(b"behind"), &[fd.as_fd()], soon()).unwrap();
    drop(fd);
    let (_, text, _) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
    assert_eq!(text, b"permitted");
    let refused = remote.refuse_descriptors().unwrap_err();
    assert!(refused.to_string().contains("not asked for"), "{refused}");
    assert!(remote.is_closed());
    drop(remote);

    // More than a frame may carry.
    let (_, local, remote) = connected(&Unix, &Address::Unix(unique("many")));
    remote.expect_descriptors().unwrap();
    let (fd, many) = lingering();
    let fds = [fd.as_fd(); MAX_DESCRIPTORS + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS + 1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(&local, &[IoSlice::new(&frame(b"many"))], &mut control, SendFlags::empty()).unwrap();
    drop(fd);
    assert!(remote.receive_with(MESSAGE_LIMIT, soon()).is_ok_and(|frame| frame.unwrap().2.is_empty()));
    drop(remote);
    assert!(begun.elapsed() < LINGER / 2, "this thread has closed a descriptor");
    drop((behind, many));
}

/// Returns a socket whose last `close` waits until the other end is closed, and that end, which reads nothing of what was sent.
fn lingering() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut made = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (other, _) = listener.accept().unwrap();
    set_socket_linger(&made, Some(LINGER)).unwrap();
    made.set_nonblocking(true).unwrap();
    let bytes = vec![0; 1 << 16];
    while made.write(&bytes).is_ok() {}
    (made.into(), other)
}

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Returns memory that contains `text`.
fn file(text: &[u8]) -> OwnedFd {
    let made = memfd_create("sent", MemfdFlags::CLOEXEC).unwrap();
    std::fs::File::from(made.try_clone().unwrap()).write_all(text).unwrap();
    made
}

fn closes_on_exec(fd: &OwnedFd) -> bool {
    rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC)
}
