//! The one runner of the transports: whatever connects two engines passes the same cases.
//!
//! Not for: what the frames say (`wire`), or the memory behind windows (`vectored`).

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::mem::{Tensors, Window};
use llm_datadist_core::transport::{
    Accepted, Address, Fault, Faults, Faulty, LEAD, Listener, Local, MAX_DESCRIPTORS, Stream, Tcp, Transport,
    Unix,
};
use llm_datadist_core::wire::{self, GREETING_LIMIT, HEADER, MESSAGE, MESSAGE_LIMIT, REFUSAL};
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
        let near = case.transport.dial(&listener.address(), soon()).unwrap();
        let far = accepted(&*listener).unwrap();
        near.expect_descriptors(true);
        far.expect_descriptors(true);
        judge(&case, &*listener, near, far);
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
    each(|_, _, near, far| {
        // None, less than a header, both sides of the first step of a body, and more than any buffer of a socket.
        let sizes = [0, 1, 7, 8, 9, 4096, (64 << 10) - 1, 64 << 10, (64 << 10) + 1, 3 << 20];
        let echo = thread::spawn(move || {
            let mut frames = 0;
            while let Some((kind, body)) =
                far.receive(MESSAGE_LIMIT, Duration::from_micros(60), soon()).unwrap()
            {
                assert_eq!(kind, MESSAGE);
                far.send(&frame(&body), soon()).unwrap();
                frames += 1;
            }
            frames
        });
        for (seed, size) in sizes.into_iter().enumerate() {
            let sent: Vec<u8> = (0..size).map(|at| pattern(seed as u8, 0, at)).collect();
            near.send(&frame(&sent), soon()).unwrap();
            let patience = Duration::from_micros(60 * (seed as u64 % 2));
            let (_, back) = near.receive(MESSAGE_LIMIT, patience, soon()).unwrap().unwrap();
            assert!(back == sent, "{size} bytes");
        }
        near.close();
        assert_eq!(echo.join().unwrap(), sizes.len());
        near.close();
        assert!(near.is_closed());
    });
}

#[test]
fn several_frames_at_once_are_told_apart() {
    each(|_, _, near, far| {
        let mut all = frame(b"one");
        all.extend(wire::refusal(&Error::new(ErrorKind::CacheNotFound, "two")));
        all.extend(frame(b""));
        all.extend(frame(b"four"));
        raw(&near).write_all(&all).unwrap();
        assert_eq!(body(&far), b"one");
        let (kind, refusal) = receive(&far).unwrap().unwrap();
        assert_eq!(kind, REFUSAL);
        assert_eq!(wire::open::<u8>(kind, &refusal).unwrap_err().kind(), ErrorKind::CacheNotFound);
        assert_eq!(body(&far), b"");
        assert_eq!(body(&far), b"four");
        drop(near);
        assert!(receive(&far).unwrap().is_none());
        // The end stays the end.
        assert!(receive(&far).unwrap().is_none());
    });
}

#[test]
fn a_length_beyond_the_limit_ends_the_stream() {
    for (claimed, limit) in [
        (MESSAGE_LIMIT + 1, MESSAGE_LIMIT),
        (u32::MAX as usize, MESSAGE_LIMIT),
        (GREETING_LIMIT + 1, GREETING_LIMIT),
    ] {
        each(|_, _, near, far| {
            let mut header = b"LD\x05\x01".to_vec();
            header.extend((claimed as u32).to_le_bytes());
            raw(&near).write_all(&header).unwrap();
            let error = far.receive(limit, Duration::ZERO, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked);
            assert_eq!(error.fact("bytes"), Some(claimed.to_string().as_str()));
            assert_eq!(error.fact("limit"), Some(limit.to_string().as_str()));
            assert_eq!(error.fact("peer"), Some(far.peer()));
            assert!(far.is_closed());
            assert_eq!(kind_of(receive(&far)), ErrorKind::NotLinked);
        });
    }
}

#[test]
fn the_longest_frame_passes() {
    let case = &cases()[1];
    let listener = case.transport.listen(&case.at).unwrap();
    let near = case.transport.dial(&case.at, soon()).unwrap();
    let far = accepted(&*listener).unwrap();
    let longest = frame(&vec![7; MESSAGE_LIMIT]);
    thread::scope(|scope| {
        scope.spawn(|| near.send(&longest, soon()).unwrap());
        assert!(body(&far) == longest[HEADER..]);
    });
}

#[test]
fn a_length_alone_is_given_no_memory() {
    // 63 MiB are promised and a hundred bytes come: what they are given is bounded by what came.
    each(|_, _, near, far| {
        let mut header = b"LD\x05\x01".to_vec();
        header.extend((63u32 << 20).to_le_bytes());
        header.extend([0; 100]);
        raw(&near).write_all(&header).unwrap();
        let (result, peak) = heap::peak(|| far.receive(MESSAGE_LIMIT, Duration::ZERO, short()));
        assert_eq!(kind_of(result), ErrorKind::Timeout);
        assert!(far.is_closed());
        assert!((100..1 << 20).contains(&peak), "{peak} bytes");
    });
}

#[test]
fn half_a_frame_ends_the_stream() {
    for cut in [1, HEADER - 1, HEADER, HEADER + 1, HEADER + 99] {
        each(|_, _, near, far| {
            raw(&near).write_all(&frame(&[3; 100])[..cut]).unwrap();
            near.close();
            let error = receive(&far).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked, "{cut}: {error}");
            assert_eq!(error.fact("bytes_before"), Some(cut.to_string().as_str()));
            assert!(error.to_string().contains(far.peer()), "{error}");
            assert!(error.to_string().starts_with("the peer closed the connection"), "{error}");
            assert!(far.is_closed());
            assert_eq!(kind_of(far.send(&frame(b"late"), soon())), ErrorKind::NotLinked);
        });
        each(|_, _, near, far| {
            raw(&near).write_all(&frame(&[3; 100])[..cut]).unwrap();
            let error = far.receive(MESSAGE_LIMIT, Duration::ZERO, short()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{cut}: {error}");
            assert!(far.is_closed());
        });
    }
}

#[test]
fn silence_lasts_until_the_deadline_and_costs_nothing() {
    each(|_, _, near, far| {
        let error = far.receive(MESSAGE_LIMIT, Duration::from_micros(60), short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().starts_with("the_limit passed while waiting"), "{error}");
        assert_eq!(error.fact("peer"), Some(far.peer()));
        // Nothing of a frame had come: the stream goes on.
        assert!(!far.is_closed());
        near.send(&frame(b"at last"), soon()).unwrap();
        assert_eq!(body(&far), b"at last");
        // What is there already is received even when no time is left.
        near.send(&frame(b"late"), soon()).unwrap();
        let none = Deadline::after(Duration::ZERO);
        let until = Instant::now() + Duration::from_secs(20);
        let late = loop {
            match far.receive(MESSAGE_LIMIT, Duration::from_millis(1), none) {
                Err(error) if error.kind() == ErrorKind::Timeout && Instant::now() < until => {}
                other => break other,
            }
        };
        assert_eq!(late.unwrap().unwrap().1, b"late");
    });
}

#[test]
fn a_full_buffer_waits_until_the_deadline() {
    each(|_, _, near, far| {
        let much = frame(&vec![1; 60 << 20]);
        let error = near.send(&much, short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let before: usize = error.fact("bytes_before").unwrap().parse().unwrap();
        assert!(before > 0 && before < much.len());
        assert!(near.is_closed());
        assert_eq!(kind_of(receive(&far)), ErrorKind::NotLinked);
    });
    each(|_, _, near, _far| {
        // Full to the brim, the next frame cannot even start: nothing is broken by that.
        fill(&near);
        assert_eq!(kind_of(near.send(&frame(b"more"), short())), ErrorKind::Timeout);
        assert!(!near.is_closed());
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
    each(|_, _, near, far| {
        let watched = soon().watched(Some(always));
        assert_eq!(kind_of(far.receive(MESSAGE_LIMIT, Duration::ZERO, watched)), ErrorKind::Interrupted);
        assert!(!far.is_closed());
        let much = frame(&vec![1; 60 << 20]);
        assert_eq!(kind_of(near.send(&much, watched)), ErrorKind::Interrupted);
        assert!(near.is_closed());
    });
}

#[test]
fn close_wakes_a_waiting_receive() {
    each(|_, _, near, far| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| far.receive(MESSAGE_LIMIT, Duration::ZERO, soon()));
            thread::sleep(Duration::from_millis(20));
            far.close();
            assert!(waiting.join().unwrap().unwrap().is_none());
        });
        assert!(receive(&near).unwrap().is_none());
        let error = far.send(&frame(b"x"), soon()).unwrap_err();
        assert!(error.to_string().starts_with("this side closed the connection"), "{error}");
        assert_eq!(error.kind(), ErrorKind::NotLinked);
    });
    each(|_, _, near, far| {
        thread::scope(|scope| {
            let waiting = scope.spawn(|| near.send(&frame(&vec![1; 60 << 20]), soon()));
            thread::sleep(Duration::from_millis(20));
            near.close();
            assert_eq!(kind_of(waiting.join().unwrap()), ErrorKind::NotLinked);
        });
        drop(far);
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
    let near = Tcp.dial(&at, soon()).unwrap();
    let far = accepted(&*listener).unwrap();
    // The side that ends first lingers.
    drop(far);
    assert!(receive(&near).unwrap().is_none());
    drop((near, listener));
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
    each(|case, listener, near, far| {
        for (stream, name) in [(&near, "near"), (&far, "far")] {
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
            assert_eq!(near.peer(), at.to_string());
            assert!(far.peer().starts_with(&at.ip().to_string()) || at.is_ipv6());
        }
    });
}

#[test]
fn descriptors_travel_where_they_can() {
    each(|case, _, near, far| {
        let file = tempfile(b"what the descriptor leads to");
        let (one, two) = (file.as_fd(), std::io::stdin());
        let fds = [one, two.as_fd(), one];
        let with = frame(b"with three");
        if case.transport.name() == "tcp" {
            let error = near.send_with(&with, &fds, soon()).unwrap_err();
            assert_eq!((error.kind(), error.fact("limit")), (ErrorKind::System, Some("0")));
            assert!(error.to_string().contains(near.peer()), "{error}");
            assert!(!near.is_closed());
            near.send_with(&with, &[], soon()).unwrap();
            let (_, body, got) = far.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
            assert_eq!((body.as_slice(), got.len()), (&with[HEADER..], 0));
            return;
        }
        near.send(&frame(b"before"), soon()).unwrap();
        near.send_with(&with, &fds, soon()).unwrap();
        near.send(&frame(b"after"), soon()).unwrap();
        let (kind, before, none) = far.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((kind, before.as_slice(), none.len()), (MESSAGE, &b"before"[..], 0));
        let (_, body, mut got) = far.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((body.as_slice(), got.len()), (&b"with three"[..], 3));
        for fd in &got {
            assert!(closes_on_exec(fd));
        }
        let mut text = String::new();
        std::fs::File::from(got.remove(2)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "what the descriptor leads to");
        let (_, after, none) = far.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap();
        assert_eq!((after.as_slice(), none.len()), (&b"after"[..], 0));
        let many = vec![one; MAX_DESCRIPTORS + 1];
        assert_eq!(near.send_with(&with, &many, soon()).unwrap_err().fact("limit"), Some("8"));
        near.send_with(&with, &many[1..], soon()).unwrap();
        assert_eq!(far.receive_with(MESSAGE_LIMIT, soon()).unwrap().unwrap().2.len(), MAX_DESCRIPTORS);
    });
}

#[test]
fn descriptors_nobody_asked_for_are_closed() {
    each(|case, _, near, far| {
        if case.transport.name() == "tcp" {
            return;
        }
        let (mut read, write) = std::io::pipe().unwrap();
        near.send_with(&frame(b"take this"), &[write.as_fd()], soon()).unwrap();
        drop(write);
        assert_eq!(body(&far), b"take this");
        // The pipe ends because no copy of its writing end is left.
        let mut rest = Vec::new();
        assert_eq!(read.read_to_end(&mut rest).unwrap(), 0);
        near.send(&frame(b"and on"), soon()).unwrap();
        assert_eq!(body(&far), b"and on");
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
    each(|case, listener, near, far| {
        drop((near, far));
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
    each(|_, _, near, far| {
        thread::scope(|scope| {
            for (from, to) in [(&near, &far), (&far, &near)] {
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
    each(|_, _, near, far| {
        for (seed, sizes) in lists.iter().enumerate() {
            let source = Cut::new(sizes, 3, |at| pattern(seed as u8, 0, at));
            // Other windows at the other end, as many bytes: ends of windows mean nothing on the way.
            let total: usize = sizes.iter().sum();
            let others: Vec<usize> = [total / 3, 0, total - total / 3].into();
            for sizes in [sizes, &others] {
                let target = Cut::new(sizes, 5, |_| 0xA5);
                thread::scope(|scope| {
                    scope.spawn(|| near.send_windows(&source.windows(), soon()).unwrap());
                    far.receive_windows(&target.windows(), soon()).unwrap();
                });
                assert!(target.bytes() == source.bytes(), "list {seed}");
                let gaps =
                    std::iter::once(0..5).chain(target.at.iter().map(|&(at, len)| at + len..at + len + 5));
                for gap in gaps {
                    assert_eq!(target.buffer.read(gap.start, gap.len()), [0xA5; 5], "list {seed}");
                }
                // Frames go on right behind.
                near.send(&frame(b"next"), soon()).unwrap();
                assert_eq!(body(&far), b"next");
            }
        }
    });
}

#[test]
fn windows_that_get_stuck_end_the_stream() {
    let (source, target) = (Cut::new(&[40 << 20], 0, |_| 1), Cut::new(&[1000], 0, |_| 0));
    each(|_, _, near, far| {
        let error = near.send_windows(&source.windows(), short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(near.is_closed());
        drop(far);
    });
    each(|_, _, near, far| {
        assert_eq!(kind_of(far.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        assert!(!far.is_closed(), "nothing had come");
        raw(&near).write_all(&[5; 999]).unwrap();
        near.close();
        let error = far.receive_windows(&target.windows(), soon()).unwrap_err();
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
    each(|case, _, near, far| {
        let together = if matches!(case.at, Address::Tcp(_)) { 256 << 10 } else { 1 };
        let settled = |expected: i32| {
            let until = Instant::now() + Duration::from_secs(10);
            while woken_at(&far) != expected && Instant::now() < until {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(woken_at(&far), expected);
        };
        let target = Cut::new(&[BYTES], 0, |_| 0);
        thread::scope(|scope| {
            let receiving = scope.spawn(|| far.receive_windows(&target.windows(), soon()));
            // Each byte comes after a look for it; now and then the receiver may not have looked yet.
            let mut sent = 0;
            while woken_at(&far) != together && sent < 2000 {
                raw(&near).write_all(&source.bytes()[sent..=sent]).unwrap();
                sent += 1;
                thread::sleep(Duration::from_millis(1));
            }
            assert!(together == 1 || sent >= 8, "it gave up after {sent}");
            settled(together);
            raw(&near).write_all(&source.bytes()[sent..BYTES - 1]).unwrap();
            settled(1);
            raw(&near).write_all(&source.bytes()[BYTES - 1..]).unwrap();
            receiving.join().unwrap().unwrap();
        });
        assert!(target.bytes() == source.bytes());
        assert_eq!(woken_at(&far), 1);
        assert_eq!(kind_of(far.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        assert_eq!((woken_at(&far), far.is_closed()), (1, false));
        // Fewer than are waited for, and the end of the stream.
        raw(&near).write_all(&[5; 999]).unwrap();
        near.close();
        let error = far.receive_windows(&target.windows(), soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("999")));
    });
}

/// A lead is zeros, and no part of what stands behind it.
#[test]
fn a_lead_is_taken_away() {
    let source = Cut::new(&[1000, 70_000], 3, |at| pattern(9, 0, at) | 1);
    each(|_, _, near, far| {
        let target = Cut::new(&[71_000], 0, |_| 0);
        near.send_lead(soon()).unwrap();
        near.send_windows(&source.windows(), soon()).unwrap();
        far.receive_lead(soon()).unwrap();
        far.receive_windows(&target.windows(), soon()).unwrap();
        assert!(target.bytes() == source.bytes());
        near.send_lead(soon()).unwrap();
        near.send(&frame(b"behind"), soon()).unwrap();
        let mut raw_lead = [1; LEAD];
        raw(&far).read_exact(&mut raw_lead).unwrap();
        assert_eq!((raw_lead, body(&far).as_slice()), ([0; LEAD], &b"behind"[..]));
        // Half of one.
        raw(&near).write_all(&[0; LEAD - 1]).unwrap();
        let error = far.receive_lead(short()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::Timeout, Some("63")));
        assert!(far.is_closed());
    });
    each(|_, _, near, far| {
        let mut none = [0; LEAD];
        none[LEAD - 1] = 1;
        raw(&near).write_all(&none).unwrap();
        let error = far.receive_lead(soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("peer")), (ErrorKind::NotLinked, Some(far.peer())), "{error}");
        assert!(error.to_string().contains("zeros") && far.is_closed(), "{error}");
    });
}

/// Bytes that came along with a frame, and that nobody wants, are not taken for the next.
#[test]
fn what_nobody_wants_is_passed_over() {
    let source = Cut::new(&[9, 8182, 1], 3, |at| pattern(7, 0, at));
    each(|_, _, near, far| {
        near.send_before(&frame(b"before"), soon()).unwrap();
        near.send_windows(&source.windows(), soon()).unwrap();
        near.send(&frame(b"behind"), soon()).unwrap();
        assert_eq!(body(&far), b"before");
        far.pass_over(8192, soon()).unwrap();
        assert_eq!(body(&far), b"behind");
        far.pass_over(0, soon()).unwrap();
        assert_eq!(kind_of(far.pass_over(1, short())), ErrorKind::Timeout);
        assert!(!far.is_closed(), "nothing was read");
        raw(&near).write_all(&[5; 999]).unwrap();
        near.close();
        let error = far.pass_over(1000, soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("999")));
    });
}

#[test]
fn a_peer_that_has_gone_is_seen_behind_what_it_left() {
    each(|_, _, near, far| {
        assert!(!far.abandoned());
        near.send(&frame(&vec![7; 40_000]), soon()).unwrap();
        assert!(!far.abandoned() && !near.abandoned());
        near.close();
        let until = Instant::now() + Duration::from_secs(20);
        while !far.abandoned() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(far.abandoned() && near.abandoned());
        assert!(body(&far) == vec![7; 40_000], "what it left is there all the same");
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
    // Far more than goes through in the time it may take: only asking in between ends it.
    let source = Cut::new(&[1 << 20], 0, |_| 1);
    let much = vec![source.windows()[0]; 1 << 20];
    each(|_, _, near, far| {
        thread::scope(|scope| {
            scope.spawn(move || std::io::copy(&mut raw(&far), &mut std::io::sink()));
            let watched = Deadline::after(Duration::from_secs(3600)).watched(Some(always));
            assert_eq!(kind_of(near.send_windows(&much, watched)), ErrorKind::Interrupted);
            assert!(near.is_closed());
        });
    });
}

#[test]
fn a_refusal_answers_another_version() {
    each(|_, _, near, far| {
        let mut refusal = wire::refusal(&Error::new(ErrorKind::LinkFailed, "too old"));
        refusal[2] = 7;
        let mut message = frame(b"x");
        message[2] = 7;
        raw(&near).write_all(&[refusal, message].concat()).unwrap();
        let (kind, body) = far.receive(GREETING_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(wire::open::<u8>(kind, &body).unwrap_err().to_string().ends_with("too old"));
        let error = far.receive(GREETING_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LinkFailed);
        assert!(error.to_string().contains("version 7"), "{error}");
        // What is left of that message is never taken for a frame, but the peer can be told why.
        assert_eq!(kind_of(receive(&far)), ErrorKind::NotLinked);
    });
    each(|_, _, near, far| {
        let mut message = frame(b"x");
        message[2] = 7;
        raw(&near).write_all(&message).unwrap();
        let error = far.receive(GREETING_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert!(far.is_closed());
        far.send(&wire::refusal(&error), soon()).unwrap();
        drop(far);
        let (kind, body) = near.receive(GREETING_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(wire::open::<u8>(kind, &body).unwrap_err().to_string().contains("version 7"));
    });
}

/// A stream whose dialled end has `faults`, and its other end.
fn faulty(case: &Case, faults: Faults) -> (Stream, Stream) {
    let transport = Faulty::new(case.transport.clone(), move |_| faults);
    let listener = transport.listen(&case.at).unwrap();
    let near = transport.dial(&listener.address(), soon()).unwrap();
    (near, accepted(&*listener).unwrap())
}

#[test]
fn faults_look_like_the_peer_or_the_network() {
    let sending = |fault| Faults { sending: Some(fault), ..Faults::default() };
    let receiving = |fault| Faults { receiving: Some(fault), ..Faults::default() };
    for case in cases() {
        let (near, far) = faulty(&case, sending(Fault::Cut(20)));
        near.send(&frame(b"whole"), soon()).unwrap();
        assert_eq!(kind_of(near.send(&frame(b"not so"), soon())), ErrorKind::NotLinked);
        assert_eq!(body(&far), b"whole");
        assert_eq!(receive(&far).unwrap_err().fact("bytes_before"), Some("7"));

        let (near, far) = faulty(&case, receiving(Fault::Cut(20)));
        far.send(&frame(b"whole"), soon()).unwrap();
        far.send(&frame(b"not so"), soon()).unwrap();
        assert_eq!(body(&near), b"whole");
        assert_eq!(kind_of(receive(&near)), ErrorKind::NotLinked);

        for fault in [sending(Fault::Stall(3)), receiving(Fault::Stall(3))] {
            let (near, far) = faulty(&case, fault);
            if fault.sending.is_some() {
                assert_eq!(kind_of(near.send(&frame(b"stuck"), short())), ErrorKind::Timeout);
            } else {
                far.send(&frame(b"stuck"), soon()).unwrap();
                assert_eq!(kind_of(near.receive(MESSAGE_LIMIT, Duration::ZERO, short())), ErrorKind::Timeout);
            }
        }

        let (near, far) = faulty(&case, sending(Fault::Garble(HEADER as u64 + 1)));
        near.send(&frame(b"abc"), soon()).unwrap();
        assert_eq!(body(&far), [b'a', !b'b', b'c']);
        let (near, far) = faulty(&case, receiving(Fault::Garble(0)));
        far.send(&frame(b"abc"), soon()).unwrap();
        assert_eq!(kind_of(receive(&near)), ErrorKind::LinkFailed);

        let (source, target) = (Cut::new(&[100; 10], 0, |at| at as u8), Cut::new(&[1000], 0, |_| 0));
        let (near, far) = faulty(&case, sending(Fault::Cut(555)));
        let error = near.send_windows(&source.windows(), soon()).unwrap_err();
        assert_eq!((error.kind(), error.fact("bytes_before")), (ErrorKind::NotLinked, Some("500")));
        let error = far.receive_windows(&target.windows(), soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotLinked);

        let refusing =
            Faulty::new(case.transport.clone(), |dial| Faults { refuse: dial == 0, ..Faults::default() });
        let listener = refusing.listen(&case.at).unwrap();
        assert_eq!(kind_of(refusing.dial(&listener.address(), soon())), ErrorKind::LinkFailed);
        refusing.dial(&listener.address(), soon()).unwrap();
    }
}
