//! File descriptors that travel with a frame.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::net::MAX_DESCRIPTORS;
use llm_datadist_core::testing::protocol::{MESSAGE, MESSAGE_LIMIT};

use super::{body, each, frame, soon};

#[test]
fn descriptors_travel_over_local_sockets_only() {
    each(|case, _, local, remote| {
        let (file, mut write) = std::io::pipe().unwrap();
        write.write_all(b"content of the descriptor").unwrap();
        drop(write);
        let (one, two) = (file.as_fd(), std::io::stdin());
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
        let mut text = String::new();
        std::fs::File::from(got[2].try_clone().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "content of the descriptor");
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

fn closes_on_exec(fd: &OwnedFd) -> bool {
    rustix::io::fcntl_getfd(fd).unwrap().contains(rustix::io::FdFlags::CLOEXEC)
}
