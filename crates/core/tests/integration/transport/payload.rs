//! Payloads of every transport: windows of memory, padding, and skipped bytes.

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::memory::{Tensors, Window};
use llm_datadist_core::testing::net::{Address, PADDING, Stream};
use llm_datadist_core::{Deadline, ErrorKind};

use super::{body, each, each_way, frame, interrupted, kind_of, raw, short, soon, stopped};
use crate::fixtures::{Buffer, eventually, pattern};

/// Memory of the test in windows of the given sizes, one after the other, with a gap of `gap` bytes between them.
pub(super) struct Cut {
    buffer: Arc<Buffer>,
    tensors: Tensors,
    at: Vec<(usize, usize)>,
}

impl Cut {
    pub(super) fn new(sizes: &[usize], gap: usize, fill: impl Fn(usize) -> u8) -> Cut {
        let total = gap + sizes.iter().map(|size| size + gap).sum::<usize>();
        let buffer = Buffer::new(total.max(1), fill);
        let tensors = Tensors::adopted(buffer.adopt(0, total.max(1)));
        let mut at = gap;
        let layout = |&size: &usize| {
            let here = (at, size);
            at += size + gap;
            here
        };
        let at = sizes.iter().map(layout).collect();
        Cut { buffer, tensors, at }
    }

    pub(super) fn windows(&self) -> Vec<Window<'_>> {
        self.at.iter().map(|&(at, len)| self.tensors.window(0, at as u64, len as u64).unwrap()).collect()
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.at.iter().flat_map(|&(at, len)| self.buffer.read(at, len)).collect()
    }
}

#[test]
fn windows_arrive_in_place_byte_by_byte() {
    let lists: Vec<Vec<usize>> = vec![
        vec![],
        vec![0, 0],
        vec![1],
        vec![0, 1, 0, 4096, 0, 13, 0],
        (0..3000).map(|n| n % 7).collect(),
        (0..2500).map(|n| 1 + n * 37 % 500).collect(),
        vec![5 << 20, 1, 3 << 20],
        vec![0; 1500].into_iter().chain([77]).collect(),
    ];
    each_way(|_, _, local, remote| {
        for (seed, sizes) in lists.iter().enumerate() {
            let source = Cut::new(sizes, 3, |at| pattern(seed as u8, 0, at));
            // The windows at the other end differ, because only their total size is transmitted.
            let total: usize = sizes.iter().sum();
            let others: Vec<usize> = [total / 3, 0, total - total / 3].into();
            for sizes in [sizes, &others] {
                let target = Cut::new(sizes, 5, |_| 0xA5);
                thread::scope(|scope| {
                    scope.spawn(|| local.send_windows(&source.windows(), soon()).unwrap());
                    remote.receive_windows(&target.windows(), soon()).unwrap();
                });
                assert!(target.bytes() == source.bytes(), "list {seed}");
                let gaps =
                    std::iter::once(0..5).chain(target.at.iter().map(|&(at, len)| at + len..at + len + 5));
                for gap in gaps {
                    assert_eq!(target.buffer.read(gap.start, gap.len()), [0xA5; 5], "list {seed}");
                }
                // A frame can follow directly.
                local.send(&frame(b"next"), soon()).unwrap();
                assert_eq!(body(&remote), b"next");
            }
        }
    });
}

#[test]
fn windows_that_get_stuck_end_the_stream() {
    let source = Cut::new(&[40 << 20], 0, |_| 1);
    each_way(|_, _, local, _remote| {
        assert_eq!(kind_of(local.send_windows(&source.windows(), short())), ErrorKind::Timeout);
        assert!(local.is_closed());
    });
}

/// Returns after how many bytes a thread that waits at `stream` is woken.
#[allow(unsafe_code, reason = "an option of the socket that only the C library reads")]
fn woken_at(stream: &Stream) -> i32 {
    use std::os::fd::AsRawFd;
    let (fd, mut value, mut size) = (stream.as_fd().as_raw_fd(), 0i32, size_of::<i32>() as libc::socklen_t);
    let (at, len) = ((&raw mut value).cast(), &raw mut size);
    // SAFETY: both outlive the call.
    let got = unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_RCVLOWAT, at, len) };
    assert_eq!(got, 0);
    value
}

/// Writes all of `bytes`, even if the socket does not take them at once.
fn write_all(to: &Stream, mut bytes: &[u8]) {
    let until = Instant::now() + Duration::from_secs(10);
    while !bytes.is_empty() {
        match raw(to).write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) => {
                assert!(error.kind() == std::io::ErrorKind::WouldBlock && Instant::now() < until, "{error}");
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

/// Over a network, the receiver of a large list is woken for 256 KiB at a time, and byte by byte at the end. Within one
/// host, the same happens after enough failed polls for the next bytes. The socket is left as it was.
#[test]
fn many_bytes_are_waited_for_together() {
    const BYTES: usize = 1 << 20;
    let source = Cut::new(&[BYTES], 0, |at| pattern(7, 0, at));
    each(|case, _, local, remote| {
        let together = if matches!(case.at, Address::Tcp(_)) { 256 << 10 } else { 1 };
        let agreed = |expected: i32| eventually("another wait", || woken_at(&remote) == expected);
        let target = Cut::new(&[BYTES], 0, |_| 0);
        thread::scope(|scope| {
            let receiving = scope.spawn(|| remote.receive_windows(&target.windows(), soon()));
            // Each byte is sent after a poll for it. Occasionally the receiver may not have polled yet.
            let mut sent = 0;
            while woken_at(&remote) != together && sent < 2000 {
                raw(&local).write_all(&source.bytes()[sent..=sent]).unwrap();
                sent += 1;
                thread::sleep(Duration::from_millis(1));
            }
            assert!(together == 1 || sent >= 8, "it gave up after {sent}");
            agreed(together);
            write_all(&local, &source.bytes()[sent..BYTES - 1]);
            agreed(1);
            raw(&local).write_all(&source.bytes()[BYTES - 1..]).unwrap();
            receiving.join().unwrap().unwrap();
        });
        assert!(target.bytes() == source.bytes());
        assert_eq!(woken_at(&remote), 1);
        assert_eq!(kind_of(remote.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        assert_eq!((woken_at(&remote), remote.is_closed()), (1, false));
        // Fewer bytes than the receiver waits for, and then the end of the stream.
        raw(&local).write_all(&[5; 999]).unwrap();
        local.close();
        stopped(remote.receive_windows(&target.windows(), soon()), ErrorKind::NotLinked, 999);
    });
}

/// Padding consists of zeros, and is not part of the bytes after it.
#[test]
fn padding_is_removed() {
    let source = Cut::new(&[1000, 70_000], 3, |at| pattern(9, 0, at) | 1);
    each(|_, _, local, remote| {
        let target = Cut::new(&[71_000], 0, |_| 0);
        local.send_padding(soon()).unwrap();
        local.send_windows(&source.windows(), soon()).unwrap();
        remote.receive_padding(soon()).unwrap();
        remote.receive_windows(&target.windows(), soon()).unwrap();
        assert!(target.bytes() == source.bytes());
        local.send_padding(soon()).unwrap();
        local.send(&frame(b"behind"), soon()).unwrap();
        let mut raw_padding = [1; PADDING];
        raw(&remote).read_exact(&mut raw_padding).unwrap();
        assert_eq!((raw_padding, body(&remote).as_slice()), ([0; PADDING], &b"behind"[..]));
        // Half of one.
        raw(&local).write_all(&[0; PADDING - 1]).unwrap();
        stopped(remote.receive_padding(short()), ErrorKind::Timeout, PADDING - 1);
        assert!(remote.is_closed());
    });
    each(|_, _, local, remote| {
        let mut none = [0; PADDING];
        none[PADDING - 1] = 1;
        raw(&local).write_all(&none).unwrap();
        let error = remote.receive_padding(soon()).unwrap_err();
        assert_eq!(
            (error.kind(), error.fact("peer")),
            (ErrorKind::NotLinked, Some(&*remote.about.peer)),
            "{error}"
        );
        assert!(error.to_string().contains("is not zero") && remote.is_closed(), "{error}");
    });
}

/// Payload bytes that arrive after a frame and are not wanted are not taken for the next frame.
#[test]
fn skipped_bytes_are_not_taken_for_a_frame() {
    let source = Cut::new(&[9, 8182, 1], 3, |at| pattern(7, 0, at));
    each(|_, _, local, remote| {
        local.send_before(&frame(b"before"), soon()).unwrap();
        local.send_windows(&source.windows(), soon()).unwrap();
        local.send(&frame(b"behind"), soon()).unwrap();
        assert_eq!(body(&remote), b"before");
        remote.discard_payload(8192, soon()).unwrap();
        assert_eq!(body(&remote), b"behind");
        remote.discard_payload(0, soon()).unwrap();
        assert_eq!(kind_of(remote.discard_payload(1, short())), ErrorKind::Timeout);
        assert!(!remote.is_closed(), "nothing was read");
        raw(&local).write_all(&[5; 999]).unwrap();
        local.close();
        stopped(remote.discard_payload(1000, soon()), ErrorKind::NotLinked, 999);
    });
}

/// Bytes that move without a wait count for the pace, so the next transmission, which waits, times out instead of failing as
/// too slow.
#[test]
fn bytes_that_move_without_a_wait_keep_the_pace() {
    let source = Cut::new(&[64 << 10], 0, |_| 1);
    each_way(|_, _, local, remote| {
        let limit = Duration::from_secs(2);
        remote.demand_pace(limit);
        thread::sleep(limit);
        local.send_windows(&source.windows(), soon()).unwrap();
        let target = Cut::new(&[64 << 10], 0, |_| 0);
        remote.receive_windows(&target.windows(), soon()).unwrap();
        assert_eq!(kind_of(remote.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
    });
}

#[test]
fn interrupt_ends_a_send_that_never_waits() {
    // Far more than can be sent within the time limit, so that only a check between the writes ends it.
    let source = Cut::new(&[1 << 20], 0, |_| 1);
    let much = vec![source.windows()[0]; 1 << 20];
    each_way(|_, _, local, remote| {
        thread::scope(|scope| {
            scope.spawn(move || remote.discard_payload(u64::MAX, soon()).unwrap_err());
            let watched = Deadline::after(Duration::from_secs(3600)).watched(Some(interrupted));
            assert_eq!(kind_of(local.send_windows(&much, watched)), ErrorKind::Interrupted);
            assert!(local.is_closed());
        });
    });
}
