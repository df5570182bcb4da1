//! The one runner of the transports: whatever connects two engines passes the same cases.
//!
//! Not for: what the frames say (`wire`), or the memory behind windows (`vectored`).

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::memory::{Tensors, Window};
use llm_datadist_core::testing::net::{
    Accepted, Address, Fault, Faults, Faulty, LEAD, Listener, Local, MAX_DESCRIPTORS, Stream, Tcp, Transport,
    Unix,
};
use llm_datadist_core::testing::protocol::{self, HANDSHAKE_LIMIT, HEADER, MESSAGE, MESSAGE_LIMIT, REFUSAL};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::bed::{Buffer, accepted, pattern, skipped};
use crate::heap;

/// Long enough for anything that works, short enough for a test that hangs.
fn soon() -> Deadline {
    Deadline::after(Duration::from_secs(20))
}

fn short() -> Deadline {
    Deadline::after(Duration::from_millis(50)).named("the_limit")
}

/// A transport, and an address of it that is free.
struct Case {
    transport: Arc<dyn Transport>,
    at: Address,
}

fn unique(name: &str) -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn cases() -> Vec<Case> {
    let tcp = |at: &str| Case { transport: Arc::new(Tcp), at: Address::Tcp(at.parse().unwrap()) };
    let mut cases = vec![
        tcp("127.0.0.1:0"),
        Case { transport: Arc::new(Unix), at: Address::Unix(unique("runner")) },
        Case { transport: Arc::new(Local::default()), at: Address::Local(unique("runner")) },
    ];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        cases.push(tcp("[::1]:0"));
    } else {
        skipped("no IPv6 loopback here");
    }
    cases
}

/// Runs `judge` with the listener and both ends of one stream of every transport.
fn each(judge: impl Fn(&Case, &dyn Listener, Stream, Stream)) {
    let cases = cases();
    assert!(cases.len() >= 3);
    for case in cases {
        let listener = case.transport.listen(&case.at).unwrap();
        eprintln!("over {}", listener.address());
        let local = case.transport.dial(&listener.address(), soon()).unwrap();
        let remote = accepted(&*listener).unwrap();
        local.expect_descriptors(true);
        remote.expect_descriptors(true);
        judge(&case, &*listener, local, remote);
    }
}

fn frame(body: &[u8]) -> Vec<u8> {
    let mut frame = b"LD\x05\x01".to_vec();
    frame.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
    frame.extend(body);
    frame
}

fn receive(stream: &Stream) -> Result<Option<(u8, Vec<u8>)>> {
    stream.receive(MESSAGE_LIMIT, Duration::ZERO, soon())
}

fn body(stream: &Stream) -> Vec<u8> {
    let (kind, body) = receive(stream).unwrap().unwrap();
    assert_eq!(kind, MESSAGE);
    body
}

/// The bytes as they are, past every frame.
fn raw(stream: &Stream) -> std::fs::File {
    std::fs::File::from(stream.as_fd().try_clone_to_owned().unwrap())
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn frames_of_every_size_come_back_as_they_went() {
    each(|_, _, local, remote| {
        // None, less than a header, both sides of the first step of a body, and more than any buffer of a socket.
        let sizes = [0, 1, 7, 8, 9, 4096, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 3 << 20];
        let echo = thread::spawn(move || {
            let mut frames = 0;
            while let Some((kind, body)) =
                remote.receive(MESSAGE_LIMIT, Duration::from_micros(60), soon()).unwrap()
            {
                assert_eq!(kind, MESSAGE);
                remote.send(&frame(&body), soon()).unwrap();
                frames += 1;
            }
            frames
        });
        for (seed, size) in sizes.into_iter().enumerate() {
            let sent: Vec<u8> = (0..size).map(|at| pattern(seed as u8, 0, at)).collect();
            local.send(&frame(&sent), soon()).unwrap();
            let patience = Duration::from_micros(60 * (seed as u64 % 2));
            let (_, back) = local.receive(MESSAGE_LIMIT, patience, soon()).unwrap().unwrap();
            assert!(back == sent, "{size} bytes");
        }
        local.close();
        assert_eq!(echo.join().unwrap(), sizes.len());
        local.close();
        assert!(local.is_closed());
    });
}

#[test]
fn several_frames_at_once_are_told_apart() {
    each(|_, _, local, remote| {
        let mut all = frame(b"one");
        all.extend(protocol::refusal(&Error::new(ErrorKind::CacheNotFound, "two")));
        all.extend(frame(b""));
        all.extend(frame(b"four"));
        raw(&local).write_all(&all).unwrap();
        assert_eq!(body(&remote), b"one");
        let (kind, refusal) = receive(&remote).unwrap().unwrap();
        assert_eq!(kind, REFUSAL);
        assert_eq!(protocol::open::<u8>(kind, &refusal).unwrap_err().kind(), ErrorKind::CacheNotFound);
        assert_eq!(body(&remote), b"");
        assert_eq!(body(&remote), b"four");
        drop(local);
        assert!(receive(&remote).unwrap().is_none());
        // The end stays the end.
        assert!(receive(&remote).unwrap().is_none());
    });
}

#[test]
fn a_length_beyond_the_limit_ends_the_stream() {
    for (claimed, limit) in [
        (MESSAGE_LIMIT + 1, MESSAGE_LIMIT),
        (u32::MAX as usize, MESSAGE_LIMIT),
        (HANDSHAKE_LIMIT + 1, HANDSHAKE_LIMIT),
    ] {
        each(|_, _, local, remote| {
            let mut header = b"LD\x05\x01".to_vec();
            header.extend((claimed as u32).to_le_bytes());
            raw(&local).write_all(&header).unwrap();
            let error = remote.receive(limit, Duration::ZERO, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked);
            assert_eq!(error.fact("bytes"), Some(claimed.to_string().as_str()));
            assert_eq!(error.fact("limit"), Some(limit.to_string().as_str()));
            assert_eq!(error.fact("peer"), Some(remote.peer()));
            assert!(remote.is_closed());
            assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
        });
    }
}

#[test]
fn the_longest_frame_passes() {
    let case = &cases()[1];
    let listener = case.transport.listen(&case.at).unwrap();
    let local = case.transport.dial(&case.at, soon()).unwrap();
    let remote = accepted(&*listener).unwrap();
    let longest = frame(&vec![7; MESSAGE_LIMIT]);
    thread::scope(|scope| {
        scope.spawn(|| local.send(&longest, soon()).unwrap());
        assert!(body(&remote) == longest[HEADER..]);
    });
}

#[test]
fn a_length_alone_is_given_no_memory() {
    // 63 MiB are promised and a hundred bytes come: what they are given is bounded by what came.
    each(|_, _, local, remote| {
        let mut header = b"LD\x05\x01".to_vec();
        header.extend((63u32 << 20).to_le_bytes());
        header.extend([0; 100]);
        raw(&local).write_all(&header).unwrap();
        let (result, peak) = heap::peak(|| remote.receive(MESSAGE_LIMIT, Duration::ZERO, short()));
        assert_eq!(kind_of(result), ErrorKind::Timeout);
        assert!(remote.is_closed());
        assert!((100..1 << 20).contains(&peak), "{peak} bytes");
    });
}

#[test]
fn half_a_frame_ends_the_stream() {
    for cut in [1, HEADER - 1, HEADER, HEADER + 1, HEADER + 99] {
        each(|_, _, local, remote| {
            raw(&local).write_all(&frame(&[3; 100])[..cut]).unwrap();
            local.close();
            let error = receive(&remote).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked, "{cut}: {error}");
            assert_eq!(error.fact("bytes_before"), Some(cut.to_string().as_str()));
            assert!(error.to_string().contains(remote.peer()), "{error}");
            assert!(error.to_string().starts_with("the peer closed the connection"), "{error}");
            assert!(remote.is_closed());
            assert_eq!(kind_of(remote.send(&frame(b"late"), soon())), ErrorKind::NotLinked);
        });
        each(|_, _, local, remote| {
            raw(&local).write_all(&frame(&[3; 100])[..cut]).unwrap();
            let error = remote.receive(MESSAGE_LIMIT, Duration::ZERO, short()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{cut}: {error}");
            assert!(remote.is_closed());
        });
    }
}

#[test]
fn silence_lasts_until_the_deadline_and_costs_nothing() {
    each(|_, _, local, remote| {
        let error = remote.receive(MESSAGE_LIMIT, Duration::from_micros(60), short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().starts_with("the_limit passed while waiting"), "{error}");
        assert_eq!(error.fact("peer"), Some(remote.peer()));
        // Nothing of a frame had come: the stream goes on.
        assert!(!remote.is_closed());
        local.send(&frame(b"at last"), soon()).unwrap();
        assert_eq!(body(&remote), b"at last");
        // What is there already is received even when no time is left.
        local.send(&frame(b"late"), soon()).unwrap();
        let none = Deadline::after(Duration::ZERO);
        let until = Instant::now() + Duration::from_secs(20);
        let late = loop {
            match remote.receive(MESSAGE_LIMIT, Duration::from_millis(1), none) {
                Err(error) if error.kind() == ErrorKind::Timeout && Instant::now() < until => {}
                other => break other,
            }
        };
        assert_eq!(late.unwrap().unwrap().1, b"late");
    });
}

#[test]
fn a_full_buffer_waits_until_the_deadline() {
    each(|_, _, local, remote| {
        let much = frame(&vec![1; 60 << 20]);
        let error = local.send(&much, short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let before: usize = error.fact("bytes_before").unwrap().parse().unwrap();
        assert!(before > 0 && before < much.len());
        assert!(local.is_closed());
        assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
    });
    each(|_, _, local, _far| {
        // Full to the brim, the next frame cannot even start: nothing is broken by that.
        fill(&local);
        assert_eq!(kind_of(local.send(&frame(b"more"), short())), ErrorKind::Timeout);
        assert!(!local.is_closed());
    });
}

/// Writes until the socket takes nothing for a while: over TCP room appears again as the kernel moves bytes along.
fn fill(stream: &Stream) {
    let mut socket = std::net::TcpStream::from(stream.as_fd().try_clone_to_owned().unwrap());
    socket.set_nonblocking(true).unwrap();
    let mut quiet = 0;
    while quiet < 10 {
        quiet += 1;
        while socket.write(&[0; 4096]).is_ok() || socket.write(&[0]).is_ok() {
            quiet = 0;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_wait_ends_when_the_caller_is_interrupted() {
    fn always() -> bool {
        true
    }
    each(|_, _, local, remote| {
        let watched = soon().watched(Some(always));
        assert_eq!(kind_of(remote.receive(MESSAGE_LIMIT, Duration::ZERO, watched)), ErrorKind::Interrupted);
        assert!(!remote.is_closed());
        let much = frame(&vec![1; 60 << 20]);
        assert_eq!(kind_of(local.send(&much, watched)), ErrorKind::Interrupted);
        assert!(local.is_closed());
    });
}

#[test]
fn close_wakes_a_waiting_receive() {
    each(|_, _, local, remote| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| remote.receive(MESSAGE_LIMIT, Duration::ZERO, soon()));
            thread::sleep(Duration::from_millis(20));
            remote.close();
            assert!(waiting.join().unwrap().unwrap().is_none());
        });
        assert!(receive(&local).unwrap().is_none());
        let error = remote.send(&frame(b"x"), soon()).unwrap_err();
        assert!(error.to_string().starts_with("this side closed the connection"), "{error}");
        assert_eq!(error.kind(), ErrorKind::NotLinked);
    });
    each(|_, _, local, remote| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| local.send(&frame(&vec![1; 60 << 20]), soon()));
            thread::sleep(Duration::from_millis(20));
            local.close();
            assert_eq!(kind_of(waiting.join().unwrap()), ErrorKind::NotLinked);
        });
        drop(remote);
    });
}

#[test]
fn closed_listener_accepts_nobody_and_frees_its_name() {
    for case in cases() {
        let listener = case.transport.listen(&case.at).unwrap();
        let at = listener.address();
        assert!(matches!(listener.accept().unwrap(), Accepted::Nobody), "asking does not wait");
        listener.close();
        assert!(matches!(listener.accept().unwrap(), Accepted::Closed), "{at}");
        listener.close();
        // Closed is closed for those who dial, and the name is free once the listener is gone.
        let error = case.transport.dial(&at, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LinkFailed, "{error}");
        drop(listener);
        let again = case.transport.listen(&at).unwrap();
        assert_eq!(again.address(), at);
        case.transport.dial(&at, soon()).unwrap();
        assert!(accepted(&*again).is_some());
    }
}

#[test]
fn nobody_there_is_refused_at_once_with_address_and_errno() {
    for case in cases() {
        let listener = case.transport.listen(&case.at).unwrap();
        let at = listener.address();
        drop(listener);
        let error = case.transport.dial(&at, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LinkFailed);
        assert!(error.to_string().contains(&at.to_string()), "{error}");
        assert_eq!(error.fact("errno"), Some("111"), "{error}");
    }
}

#[test]
fn an_address_that_is_taken_cannot_be_listened_at() {
    for case in cases() {
        let listener = case.transport.listen(&case.at).unwrap();
        let at = listener.address();
        let error = case.transport.listen(&at).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System);
        assert_eq!(error.fact("errno"), Some("98"), "{error}");
        assert!(error.to_string().contains(&at.to_string()), "{error}");
    }
}

#[test]
fn a_port_with_lingering_connections_is_listened_at_again() {
    let at = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let listener = Tcp.listen(&at).unwrap();
    let at = listener.address();
    assert!(matches!(at, Address::Tcp(at) if at.port() != 0));
    let local = Tcp.dial(&at, soon()).unwrap();
    let remote = accepted(&*listener).unwrap();
    // The side that ends first lingers.
    drop(remote);
    assert!(receive(&local).unwrap().is_none());
    drop((local, listener));
    Tcp.listen(&at).unwrap();
}

#[test]
fn a_dial_that_nobody_answers_ends_at_the_deadline() {
    // A listener whose queue is full answers no more: the next connection stays in the making.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Address::Tcp(listener.local_addr().unwrap());
    let mut queue = Vec::new();
    let error = loop {
        match Tcp.dial(&at, Deadline::after(Duration::from_millis(200)).named("the_limit")) {
            Ok(stream) => queue.push(stream),
            Err(error) => break error,
        }
        assert!(queue.len() < 100_000);
    };
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().starts_with("the_limit passed while connecting"), "{error}");
    assert_eq!(error.fact("address"), Some(at.to_string().as_str()));
}

#[test]
fn a_full_local_queue_refuses_or_waits() {
    let name = unique("full");
    for (transport, at) in [
        (Arc::new(Unix) as Arc<dyn Transport>, Address::Unix(name.clone())),
        (Arc::new(Local::default()), Address::Local(name)),
    ] {
        let listener = transport.listen(&at).unwrap();
        let mut queue = Vec::new();
        let error = loop {
            match transport.dial(&at, short()) {
                Ok(stream) => queue.push(stream),
                Err(error) => break error,
            }
            assert!(queue.len() < 100_000);
        };
        assert!(queue.len() > 1);
        let expected = if transport.name() == "unix" { ErrorKind::Timeout } else { ErrorKind::LinkFailed };
        assert_eq!(error.kind(), expected, "{error}");
        // Room again.
        accepted(&*listener).unwrap();
        transport.dial(&at, soon()).unwrap();
    }
}

#[test]
fn every_transport_knows_its_own_addresses_only() {
    let cases = cases();
    for case in &cases {
        for other in cases.iter().filter(|other| other.transport.name() != case.transport.name()) {
            for error in [
                case.transport.dial(&other.at, soon()).unwrap_err(),
                case.transport.listen(&other.at).map(drop).unwrap_err(),
            ] {
                assert_eq!(error.kind(), ErrorKind::LinkFailed);
                assert!(error.to_string().contains("another transport"), "{error}");
            }
        }
    }
}

#[test]
fn what_is_known_of_the_peer() {
    each(|case, listener, local, remote| {
        for (stream, name) in [(&local, "near"), (&remote, "far")] {
            assert!(stream.same_host(), "{name}");
            let over_tcp = case.transport.name() == "tcp";
            assert_eq!(stream.carries_descriptors(), !over_tcp);
            let pid = std::process::id() as i32;
            assert_eq!(stream.peer_pid(), (!over_tcp).then_some(pid), "{name}");
            if !over_tcp {
                assert!(stream.peer().contains(&listener.address().to_string()), "{}", stream.peer());
            }
        }
        if let Address::Tcp(at) = listener.address() {
            assert_eq!(local.peer(), at.to_string());
            assert!(remote.peer().starts_with(&at.ip().to_string()) || at.is_ipv6());
        }
    });
}

#[test]
fn descriptors_travel_where_they_can() {
    each(|case, _, local, remote| {
        let file = tempfile(b"what the descriptor leads to");
        let (one, two) = (file.as_fd(), std::io::stdin());
        let fds = [one, two.as_fd(), one];
        let with = frame(b"with three");
        if case.transport.name() == "tcp" {
            let error = local.send_with(&with, &fds, soon()).unwrap_err();
            assert_eq!((error.kind(), error.fact("limit")), (ErrorKind::System, Some("0")));
            assert!(error.to_string().contains(local.peer()), "{error}");
            assert!(!local.is_closed());
            local.send_with(&with, &[], soon()).unwrap();
            let (_, body, got) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
            assert_eq!((body.as_slice(), got.len()), (&with[HEADER..], 0));
            return;
        }
        local.send(&frame(b"before"), soon()).unwrap();
        local.send_with(&with, &fds, soon()).unwrap();
        local.send(&frame(b"after"), soon()).unwrap();
        let (kind, before, none) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((kind, before.as_slice(), none.len()), (MESSAGE, &b"before"[..], 0));
        let (_, body, mut got) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((body.as_slice(), got.len()), (&b"with three"[..], 3));
        for fd in &got {
            assert!(closes_on_exec(fd));
        }
        let mut text = String::new();
        std::fs::File::from(got.remove(2)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "what the descriptor leads to");
        let (_, after, none) = remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((after.as_slice(), none.len()), (&b"after"[..], 0));
        let many = vec![one; MAX_DESCRIPTORS + 1];
        assert_eq!(local.send_with(&with, &many, soon()).unwrap_err().fact("limit"), Some("8"));
        local.send_with(&with, &many[1..], soon()).unwrap();
        assert_eq!(remote.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap().2.len(), MAX_DESCRIPTORS);
    });
}

#[test]
fn descriptors_nobody_asked_for_are_closed() {
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

fn tempfile(bytes: &[u8]) -> OwnedFd {
    let (read, mut write) = std::io::pipe().unwrap();
    write.write_all(bytes).unwrap();
    read.into()
}

fn closes_on_exec(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", fd.as_raw_fd())).unwrap();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
    u32::from_str_radix(flags, 8).unwrap() & 0o2_000_000 != 0
}

#[test]
fn many_threads_dial_and_talk() {
    each(|case, listener, local, remote| {
        drop((local, remote));
        const CALLERS: usize = 16;
        let at = listener.address();
        thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..CALLERS {
                    let stream = accepted(listener).unwrap();
                    scope.spawn(move || {
                        while let Some((_, body)) = receive(&stream).unwrap() {
                            stream.send(&frame(&body), soon()).unwrap();
                        }
                    });
                }
            });
            for caller in 0..CALLERS {
                let at = &at;
                scope.spawn(move || {
                    let stream = case.transport.dial(at, soon()).unwrap();
                    for turn in 0..50 {
                        let said = vec![caller as u8; turn * 97];
                        stream.send(&frame(&said), soon()).unwrap();
                        assert_eq!(body(&stream), said);
                    }
                });
            }
        });
    });
}

#[test]
fn one_sends_while_another_receives_on_the_same_stream() {
    each(|_, _, local, remote| {
        thread::scope(|scope| {
            for (from, to) in [(&local, &remote), (&remote, &local)] {
                scope.spawn(move || {
                    (0..200).for_each(|n| from.send(&frame(&vec![9; n * 31]), soon()).unwrap());
                });
                scope.spawn(move || (0..200).for_each(|n| assert_eq!(body(to).len(), n * 31)));
            }
        });
    });
}

/// Memory of the test in windows of the given sizes, one after the other, with a gap of `gap` bytes between them.
struct Cut {
    buffer: Arc<Buffer>,
    tensors: Tensors,
    at: Vec<(usize, usize)>,
}

impl Cut {
    fn new(sizes: &[usize], gap: usize, fill: impl Fn(usize) -> u8) -> Cut {
        let total = gap + sizes.iter().map(|size| size + gap).sum::<usize>();
        let buffer = Buffer::new(total.max(1), fill);
        let tensors = Tensors::adopted(buffer.adopt(0, total.max(1)));
        let mut at = gap;
        let place = |&size: &usize| {
            let here = (at, size);
            at += size + gap;
            here
        };
        let at = sizes.iter().map(place).collect();
        Cut { buffer, tensors, at }
    }

    fn windows(&self) -> Vec<Window<'_>> {
        self.at.iter().map(|&(at, len)| self.tensors.window(0, at as u64, len as u64).unwrap()).collect()
    }

    fn bytes(&self) -> Vec<u8> {
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
    each(|_, _, local, remote| {
        for (seed, sizes) in lists.iter().enumerate() {
            let source = Cut::new(sizes, 3, |at| pattern(seed as u8, 0, at));
            // Other windows at the other end, as many bytes: ends of windows mean nothing on the way.
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
                // Frames go on right behind.
                local.send(&frame(b"next"), soon()).unwrap();
                assert_eq!(body(&remote), b"next");
            }
        }
    });
}

#[test]
fn windows_that_get_stuck_end_the_stream() {
    let (source, target) = (Cut::new(&[40 << 20], 0, |_| 1), Cut::new(&[1000], 0, |_| 0));
    each(|_, _, local, remote| {
        let error = local.send_windows(&source.windows(), short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(local.is_closed());
        drop(remote);
    });
    each(|_, _, local, remote| {
        assert_eq!(kind_of(remote.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        assert!(!remote.is_closed(), "nothing had come");
        raw(&local).write_all(&[5; 999]).unwrap();
        local.close();
        let error = remote.receive_windows(&target.windows(), soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("999")));
    });
}

/// After how many bytes somebody who waits at `stream` is woken.
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

/// A large list over a network wakes its receiver for 256 KiB at a time, its end byte by byte, and leaves nothing behind;
/// inside one host it does so once the next bytes were looked for in vain often enough.
#[test]
fn many_bytes_are_waited_for_together() {
    const BYTES: usize = 1 << 20;
    let source = Cut::new(&[BYTES], 0, |at| pattern(7, 0, at));
    each(|case, _, local, remote| {
        let together = if matches!(case.at, Address::Tcp(_)) { 256 << 10 } else { 1 };
        let settled = |expected: i32| {
            let until = Instant::now() + Duration::from_secs(10);
            while woken_at(&remote) != expected && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(woken_at(&remote), expected);
        };
        let target = Cut::new(&[BYTES], 0, |_| 0);
        thread::scope(|scope| {
            let receiving = scope.spawn(|| remote.receive_windows(&target.windows(), soon()));
            // Each byte comes after a look for it; now and then the receiver may not have looked yet.
            let mut sent = 0;
            while woken_at(&remote) != together && sent < 2000 {
                raw(&local).write_all(&source.bytes()[sent..=sent]).unwrap();
                sent += 1;
                thread::sleep(Duration::from_millis(1));
            }
            assert!(together == 1 || sent >= 8, "it gave up after {sent}");
            settled(together);
            raw(&local).write_all(&source.bytes()[sent..BYTES - 1]).unwrap();
            settled(1);
            raw(&local).write_all(&source.bytes()[BYTES - 1..]).unwrap();
            receiving.join().unwrap().unwrap();
        });
        assert!(target.bytes() == source.bytes());
        assert_eq!(woken_at(&remote), 1);
        assert_eq!(kind_of(remote.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        assert_eq!((woken_at(&remote), remote.is_closed()), (1, false));
        // Fewer than are waited for, and the end of the stream.
        raw(&local).write_all(&[5; 999]).unwrap();
        local.close();
        let error = remote.receive_windows(&target.windows(), soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("999")));
    });
}

/// A lead is zeros, and no part of what stands behind it.
#[test]
fn a_lead_is_taken_away() {
    let source = Cut::new(&[1000, 70_000], 3, |at| pattern(9, 0, at) | 1);
    each(|_, _, local, remote| {
        let target = Cut::new(&[71_000], 0, |_| 0);
        local.send_lead(soon()).unwrap();
        local.send_windows(&source.windows(), soon()).unwrap();
        remote.receive_lead(soon()).unwrap();
        remote.receive_windows(&target.windows(), soon()).unwrap();
        assert!(target.bytes() == source.bytes());
        local.send_lead(soon()).unwrap();
        local.send(&frame(b"behind"), soon()).unwrap();
        let mut raw_lead = [1; LEAD];
        raw(&remote).read_exact(&mut raw_lead).unwrap();
        assert_eq!((raw_lead, body(&remote).as_slice()), ([0; LEAD], &b"behind"[..]));
        // Half of one.
        raw(&local).write_all(&[0; LEAD - 1]).unwrap();
        let error = remote.receive_lead(short()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::Timeout, Some("63")));
        assert!(remote.is_closed());
    });
    each(|_, _, local, remote| {
        let mut none = [0; LEAD];
        none[LEAD - 1] = 1;
        raw(&local).write_all(&none).unwrap();
        let error = remote.receive_lead(soon()).unwrap_err();
        assert_eq!(
            (error.kind(), error.fact("peer")),
            (ErrorKind::NotLinked, Some(remote.peer())),
            "{error}"
        );
        assert!(error.to_string().contains("zeros") && remote.is_closed(), "{error}");
    });
}

/// Bytes that came along with a frame, and that nobody wants, are not taken for the next.
#[test]
fn what_nobody_wants_is_passed_over() {
    let source = Cut::new(&[9, 8182, 1], 3, |at| pattern(7, 0, at));
    each(|_, _, local, remote| {
        local.send_before(&frame(b"before"), soon()).unwrap();
        local.send_windows(&source.windows(), soon()).unwrap();
        local.send(&frame(b"behind"), soon()).unwrap();
        assert_eq!(body(&remote), b"before");
        remote.pass_over(8192, soon()).unwrap();
        assert_eq!(body(&remote), b"behind");
        remote.pass_over(0, soon()).unwrap();
        assert_eq!(kind_of(remote.pass_over(1, short())), ErrorKind::Timeout);
        assert!(!remote.is_closed(), "nothing was read");
        raw(&local).write_all(&[5; 999]).unwrap();
        local.close();
        let error = remote.pass_over(1000, soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("999")));
    });
}

#[test]
fn a_peer_that_has_gone_is_seen_behind_what_it_left() {
    each(|_, _, local, remote| {
        assert!(!remote.abandoned());
        local.send(&frame(&vec![7; 40_000]), soon()).unwrap();
        assert!(!remote.abandoned() && !local.abandoned());
        local.close();
        let until = Instant::now() + Duration::from_secs(20);
        while !remote.abandoned() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(remote.abandoned() && local.abandoned());
        assert!(body(&remote) == vec![7; 40_000], "what it left is there all the same");
    });
}

#[test]
fn a_peer_that_closed_its_end_is_not_waited_for() {
    // Nothing is left to arrive at the peer, so that no answer of its kernel shows that it has gone.
    each(|_, _, near, far| {
        let buffer = vec![7; 1 << 20];
        let sink = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            rustix::net::shutdown(&far, rustix::net::Shutdown::Write).unwrap();
            far
        });
        let error = loop {
            if let Err(error) = near.send(&frame(&buffer), soon()) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
        drop(sink.join().unwrap());
    });
}

#[test]
fn a_peer_that_always_takes_more_does_not_hide_the_caller() {
    fn always() -> bool {
        true
    }
    // Far more than fits into the time it may take: only a check in between ends it.
    let source = Cut::new(&[1 << 20], 0, |_| 1);
    let much = vec![source.windows()[0]; 1 << 20];
    each(|_, _, local, remote| {
        thread::scope(|scope| {
            scope.spawn(move || std::io::copy(&mut raw(&remote), &mut std::io::sink()));
            let watched = Deadline::after(Duration::from_secs(3600)).watched(Some(always));
            assert_eq!(kind_of(local.send_windows(&much, watched)), ErrorKind::Interrupted);
            assert!(local.is_closed());
        });
    });
}

#[test]
fn a_refusal_answers_another_version() {
    each(|_, _, local, remote| {
        let mut refusal = protocol::refusal(&Error::new(ErrorKind::LinkFailed, "too old"));
        refusal[2] = 7;
        let mut message = frame(b"x");
        message[2] = 7;
        raw(&local).write_all(&[refusal, message].concat()).unwrap();
        let (kind, body) = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(protocol::open::<u8>(kind, &body).unwrap_err().to_string().ends_with("too old"));
        let error = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LinkFailed);
        assert!(error.to_string().contains("version 7"), "{error}");
        // What is left of that message is never taken for a frame, but the peer can be told why.
        assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
    });
    each(|_, _, local, remote| {
        let mut message = frame(b"x");
        message[2] = 7;
        raw(&local).write_all(&message).unwrap();
        let error = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert!(remote.is_closed());
        remote.send(&protocol::refusal(&error), soon()).unwrap();
        drop(remote);
        let (kind, body) = local.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(protocol::open::<u8>(kind, &body).unwrap_err().to_string().contains("version 7"));
    });
}

/// A stream whose dialled end has `faults`, and its other end.
fn faulty(case: &Case, faults: Faults) -> (Stream, Stream) {
    let transport = Faulty::new(case.transport.clone(), move |_| faults);
    let listener = transport.listen(&case.at).unwrap();
    let local = transport.dial(&listener.address(), soon()).unwrap();
    (local, accepted(&*listener).unwrap())
}

#[test]
fn faults_look_like_the_peer_or_the_network() {
    let sending = |fault| Faults { sending: Some(fault), ..Faults::default() };
    let receiving = |fault| Faults { receiving: Some(fault), ..Faults::default() };
    for case in cases() {
        let (local, remote) = faulty(&case, sending(Fault::Cut(20)));
        local.send(&frame(b"whole"), soon()).unwrap();
        assert_eq!(kind_of(local.send(&frame(b"not so"), soon())), ErrorKind::NotLinked);
        assert_eq!(body(&remote), b"whole");
        assert_eq!(receive(&remote).unwrap_err().fact("bytes_before"), Some("7"));

        let (local, remote) = faulty(&case, receiving(Fault::Cut(20)));
        remote.send(&frame(b"whole"), soon()).unwrap();
        remote.send(&frame(b"not so"), soon()).unwrap();
        assert_eq!(body(&local), b"whole");
        assert_eq!(kind_of(receive(&local)), ErrorKind::NotLinked);

        for fault in [sending(Fault::Stall(3)), receiving(Fault::Stall(3))] {
            let (local, remote) = faulty(&case, fault);
            if fault.sending.is_some() {
                assert_eq!(kind_of(local.send(&frame(b"stuck"), short())), ErrorKind::Timeout);
            } else {
                remote.send(&frame(b"stuck"), soon()).unwrap();
                assert_eq!(
                    kind_of(local.receive(MESSAGE_LIMIT, Duration::ZERO, short())),
                    ErrorKind::Timeout
                );
            }
        }

        let (local, remote) = faulty(&case, sending(Fault::Garble(HEADER as u64 + 1)));
        local.send(&frame(b"abc"), soon()).unwrap();
        assert_eq!(body(&remote), [b'a', !b'b', b'c']);
        let (local, remote) = faulty(&case, receiving(Fault::Garble(0)));
        remote.send(&frame(b"abc"), soon()).unwrap();
        assert_eq!(kind_of(receive(&local)), ErrorKind::LinkFailed);

        let (source, target) = (Cut::new(&[100; 10], 0, |at| at as u8), Cut::new(&[1000], 0, |_| 0));
        let (local, remote) = faulty(&case, sending(Fault::Cut(555)));
        let error = local.send_windows(&source.windows(), soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("500")));
        let error = remote.receive_windows(&target.windows(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked);

        let refusing =
            Faulty::new(case.transport.clone(), |dial| Faults { refuse: dial == 0, ..Faults::default() });
        let listener = refusing.listen(&case.at).unwrap();
        assert_eq!(kind_of(refusing.dial(&listener.address(), soon())), ErrorKind::LinkFailed);
        refusing.dial(&listener.address(), soon()).unwrap();
    }
}
