//! The cases that every transport must pass: TCP and local sockets.
//!
//! The content of the frames is tested in `protocol`.

mod descriptors;
mod payload;
mod rings;

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use llm_datadist_core::testing::net::{Accepted, Address, Listener, Stream, Tcp, Transport, Unix};
use llm_datadist_core::testing::protocol::{self, HANDSHAKE_LIMIT, HEADER, MESSAGE, MESSAGE_LIMIT, REFUSAL};
use llm_datadist_core::{Deadline, Error, ErrorKind, Result};

use crate::arguments::refused_as;
use crate::counting_allocator;
use crate::fixtures::{accepted, eventually, pattern, share_rings, skipped, soon};

fn short() -> Deadline {
    Deadline::after(Duration::from_millis(50)).named("the_limit")
}

/// A transport, and an address of it that is free. With `rings`, the frames of its streams go through shared memory.
struct Case {
    transport: Arc<dyn Transport>,
    at: Address,
    rings: bool,
}

fn unique(name: &str) -> String {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("{name}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn cases() -> Vec<Case> {
    let tcp =
        |at: &str| Case { transport: Arc::new(Tcp), at: Address::Tcp(at.parse().unwrap()), rings: false };
    let unix = Case { transport: Arc::new(Unix), at: Address::Unix(unique("runner")), rings: false };
    let mut cases = vec![tcp("127.0.0.1:0"), unix];
    if std::net::TcpListener::bind("[::1]:0").is_ok() {
        cases.push(tcp("[::1]:0"));
    } else {
        skipped("no IPv6 loopback here");
    }
    cases
}

/// Runs `judge` with the listener and both ends of one stream of every transport.
fn each(judge: impl Fn(&Case, &dyn Listener, Stream, Stream)) {
    run(cases(), judge);
}

/// Runs `judge` for every transport, and for a local socket whose frames go through rings.
fn each_way(judge: impl Fn(&Case, &dyn Listener, Stream, Stream)) {
    let rings = Case { transport: Arc::new(Unix), at: Address::Unix(unique("runner")), rings: true };
    run(cases().into_iter().chain([rings]), judge);
}

fn run(cases: impl IntoIterator<Item = Case>, judge: impl Fn(&Case, &dyn Listener, Stream, Stream)) {
    for case in cases {
        let (listener, local, remote) = connected(&*case.transport, &case.at);
        eprintln!("over {}{}", listener.address(), if case.rings { ", with rings" } else { "" });
        local.expect_descriptors().unwrap();
        remote.expect_descriptors().unwrap();
        if case.rings {
            share_rings(&local, &remote);
        }
        judge(&case, &*listener, local, remote);
    }
}

fn connected(transport: &dyn Transport, at: &Address) -> (Box<dyn Listener>, Stream, Stream) {
    let listener = transport.listen(at).unwrap();
    let local = transport.dial(&listener.address(), soon()).unwrap();
    let remote = accepted(&*listener).unwrap();
    (listener, local, remote)
}

fn frame(body: &[u8]) -> Vec<u8> {
    [&header(body.len())[..], body].concat()
}

fn header(body_len: usize) -> [u8; HEADER] {
    let [a, b, c, d] = u32::try_from(body_len).unwrap().to_le_bytes();
    [b'L', b'D', 0x12, MESSAGE, a, b, c, d]
}

fn receive(stream: &Stream) -> Result<Option<(u8, Vec<u8>)>> {
    receive_by(stream, soon())
}

fn receive_by(stream: &Stream, deadline: Deadline) -> Result<Option<(u8, Vec<u8>)>> {
    stream.receive(MESSAGE_LIMIT, Duration::ZERO, deadline)
}

fn body(stream: &Stream) -> Vec<u8> {
    let (kind, body) = receive(stream).unwrap().unwrap();
    assert_eq!(kind, MESSAGE);
    body
}

/// Returns the socket itself, past the framing.
fn raw(stream: &Stream) -> std::fs::File {
    std::fs::File::from(stream.as_fd().try_clone_to_owned().unwrap())
}

fn kind_of<T: std::fmt::Debug>(result: Result<T>) -> ErrorKind {
    result.unwrap_err().kind()
}

/// Asserts the kind of the error, and how many bytes had passed before it.
fn stopped<T: std::fmt::Debug>(result: Result<T>, kind: ErrorKind, bytes_before: usize) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert_eq!(error.fact("bytes_before"), Some(bytes_before.to_string().as_str()), "{error}");
}

fn interrupted() -> bool {
    true
}

#[test]
fn frames_of_every_size_round_trip() {
    each_way(|_, _, local, remote| {
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
            let spin = Duration::from_micros(60 * (seed as u64 % 2));
            let (_, back) = local.receive(MESSAGE_LIMIT, spin, soon()).unwrap().unwrap();
            assert!(back == sent, "{size} bytes");
        }
        local.close();
        assert_eq!(echo.join().unwrap(), sizes.len());
        local.close();
        assert!(local.is_closed());
    });
}

#[test]
fn frames_in_one_write_are_separated() {
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
        // The end of a stream is permanent.
        assert!(receive(&remote).unwrap().is_none());
    });
}

#[test]
fn length_over_the_limit_ends_the_stream() {
    for (claimed, limit) in [
        (MESSAGE_LIMIT + 1, MESSAGE_LIMIT),
        (u32::MAX as usize, MESSAGE_LIMIT),
        (HANDSHAKE_LIMIT + 1, HANDSHAKE_LIMIT),
    ] {
        each(|_, _, local, remote| {
            raw(&local).write_all(&header(claimed)).unwrap();
            let error = remote.receive(limit, Duration::ZERO, soon()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotLinked);
            assert_eq!(error.fact("bytes"), Some(claimed.to_string().as_str()));
            assert_eq!(error.fact("limit"), Some(limit.to_string().as_str()));
            assert_eq!(error.fact("peer"), Some(&*remote.about.peer));
            assert!(remote.is_closed());
            assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
        });
    }
}

#[test]
fn longest_frame_passes() {
    let (_listener, local, remote) = connected(&Unix, &Address::Unix(unique("longest")));
    let longest = frame(&vec![7; MESSAGE_LIMIT]);
    thread::scope(|scope| {
        scope.spawn(|| local.send(&longest, soon()).unwrap());
        assert!(body(&remote) == longest[HEADER..]);
    });
}

#[test]
fn claimed_length_allocates_no_memory() {
    // A frame announces 63 MiB, and a hundred bytes arrive. The memory is bounded by what arrived.
    each(|_, _, local, remote| {
        raw(&local).write_all(&[&header(63 << 20)[..], &[0; 100]].concat()).unwrap();
        let (result, peak) = counting_allocator::peak(|| receive_by(&remote, short()));
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
            assert!(error.to_string().contains(&remote.about.peer), "{error}");
            assert!(error.to_string().starts_with("the peer closed the connection"), "{error}");
            stopped::<()>(Err(error), ErrorKind::NotLinked, cut);
            assert!(remote.is_closed());
            assert_eq!(kind_of(remote.send(&frame(b"late"), soon())), ErrorKind::NotLinked);
        });
        each(|_, _, local, remote| {
            raw(&local).write_all(&frame(&[3; 100])[..cut]).unwrap();
            assert_eq!(kind_of(receive_by(&remote, short())), ErrorKind::Timeout, "{cut}");
            assert!(remote.is_closed());
        });
    }
}

#[test]
fn silence_times_out_and_keeps_the_stream() {
    each_way(|_, _, local, remote| {
        let error = remote.receive(MESSAGE_LIMIT, Duration::from_micros(60), short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.to_string().starts_with("the_limit passed while waiting"), "{error}");
        assert_eq!(error.fact("peer"), Some(&*remote.about.peer));
        // Nothing of a frame had arrived, so the stream remains usable.
        assert!(!remote.is_closed());
        local.send(&frame(b"at last"), soon()).unwrap();
        assert_eq!(body(&remote), b"at last");
        // Bytes that have arrived are received even if no time is left.
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
fn full_buffer_times_out() {
    each_way(|_, _, local, remote| {
        let much = frame(&vec![1; 60 << 20]);
        let error = local.send(&much, short()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let before: usize = error.fact("bytes_before").unwrap().parse().unwrap();
        assert!(before > 0 && before < much.len());
        assert!(local.is_closed());
        assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
    });
    each(|_, _, local, _far| {
        // The socket is completely full, so the next frame cannot even start. The stream remains usable.
        fill(&local);
        assert_eq!(kind_of(local.send(&frame(b"more"), short())), ErrorKind::Timeout);
        assert!(!local.is_closed());
    });
}

/// Writes until the socket accepts nothing for a while. Over TCP, room appears again as the kernel moves bytes.
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
fn interrupted_wait_ends() {
    each_way(|_, _, local, remote| {
        let watched = soon().watched(Some(interrupted));
        assert_eq!(kind_of(receive_by(&remote, watched)), ErrorKind::Interrupted);
        assert!(!remote.is_closed());
        assert_eq!(kind_of(local.send(&frame(&vec![1; 60 << 20]), watched)), ErrorKind::Interrupted);
        assert!(local.is_closed());
    });
}

#[test]
fn close_wakes_a_waiting_receive() {
    each_way(|_, _, local, remote| {
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
    each_way(|_, _, local, remote| {
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
fn listener_owns_its_address_until_it_is_dropped() {
    for case in cases() {
        let listener = case.transport.listen(&case.at).unwrap();
        let at = listener.address();
        let failed = |error: Error, kind, errno| {
            assert_eq!((error.kind(), error.fact("errno")), (kind, Some(errno)), "{error}");
            assert!(error.to_string().contains(&at.to_string()), "{error}");
        };
        assert!(matches!(listener.accept().unwrap(), Accepted::Nobody), "accept does not wait");
        failed(case.transport.listen(&at).unwrap_err(), ErrorKind::System, "98");
        listener.close();
        assert!(matches!(listener.accept().unwrap(), Accepted::Closed), "{at}");
        listener.close();
        assert_eq!(kind_of(case.transport.dial(&at, soon())), ErrorKind::LinkFailed);
        drop(listener);
        failed(case.transport.dial(&at, soon()).unwrap_err(), ErrorKind::LinkFailed, "111");
        let (again, _local, _remote) = connected(&*case.transport, &at);
        assert_eq!(again.address(), at);
    }
}

#[test]
fn port_with_lingering_connections_is_reused() {
    let (listener, local, remote) = connected(&Tcp, &Address::Tcp("127.0.0.1:0".parse().unwrap()));
    let at = listener.address();
    assert!(matches!(at, Address::Tcp(at) if at.port() != 0));
    // The side that ends first lingers.
    drop(remote);
    assert!(receive(&local).unwrap().is_none());
    drop((local, listener));
    Tcp.listen(&at).unwrap();
}

/// Dials until it fails; returns the streams before that.
fn fill_queue(transport: &dyn Transport, at: &Address) -> (Vec<Stream>, Error) {
    let mut queue = Vec::new();
    loop {
        match transport.dial(at, Deadline::after(Duration::from_millis(200)).named("the_limit")) {
            Ok(stream) => queue.push(stream),
            Err(error) => return (queue, error),
        }
        assert!(queue.len() < 100_000);
    }
}

#[test]
fn full_tcp_queue_times_out() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Address::Tcp(listener.local_addr().unwrap());
    let (_queue, error) = fill_queue(&Tcp, &at);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    assert!(error.to_string().starts_with("the_limit passed while connecting"), "{error}");
    assert_eq!(error.fact("address"), Some(at.to_string().as_str()));
}

#[test]
fn full_local_queue_times_out_until_there_is_room() {
    let at = Address::Unix(unique("queue"));
    let listener = Unix.listen(&at).unwrap();
    let (queue, error) = fill_queue(&Unix, &at);
    assert!(queue.len() > 1);
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    accepted(&*listener).unwrap();
    Unix.dial(&at, soon()).unwrap();
}

#[test]
fn addresses_of_other_transports_are_refused() {
    let cases = cases();
    for case in &cases {
        for other in cases.iter().filter(|other| other.transport.name() != case.transport.name()) {
            let refused = |what| refused_as(ErrorKind::LinkFailed, what, &["another transport"]);
            refused(case.transport.dial(&other.at, soon()).map(drop));
            refused(case.transport.listen(&other.at).map(drop));
        }
    }
}

#[test]
fn peer_is_described() {
    each_way(|case, listener, local, remote| {
        for (stream, name) in [(&local, "local"), (&remote, "remote")] {
            assert!(stream.about.same_host, "{name}");
            let over_tcp = case.transport.name() == "tcp";
            assert_eq!(stream.about.carries_descriptors, !over_tcp);
            let pid = std::process::id() as i32;
            assert_eq!(
                stream.about.credentials.and_then(|peer| peer.pid),
                (!over_tcp).then_some(pid),
                "{name}"
            );
            if !over_tcp {
                assert!(stream.about.peer.contains(&listener.address().to_string()), "{}", stream.about.peer);
            }
        }
        if let Address::Tcp(at) = listener.address() {
            assert_eq!(local.about.peer, at.to_string());
            assert!(remote.about.peer.starts_with(&at.ip().to_string()) || at.is_ipv6());
        }
    });
}

/// Control streams do this. Call streams, which alone have rings, are used by one thread at a time.
#[test]
fn stream_sends_and_receives_at_once() {
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

#[test]
fn a_peer_that_has_gone_is_seen_behind_what_it_left() {
    each_way(|_, _, local, remote| {
        assert!(!remote.abandoned());
        local.send(&frame(&vec![7; 40_000]), soon()).unwrap();
        assert!(!remote.abandoned() && !local.abandoned());
        local.close();
        eventually("the end of the peer", || remote.abandoned());
        assert!(local.abandoned());
        assert!(body(&remote) == vec![7; 40_000], "what it left is there all the same");
    });
}

#[test]
fn send_to_peer_that_closed_its_end_fails() {
    // Nothing is left to arrive at the peer, so that no answer of its kernel shows that it has gone.
    each_way(|_, _, local, remote| {
        let buffer = vec![7; 1 << 20];
        let sink = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            rustix::net::shutdown(&remote, rustix::net::Shutdown::Write).unwrap();
            remote
        });
        let error = loop {
            if let Err(error) = local.send(&frame(&buffer), soon()) {
                break error;
            }
        };
        assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
        drop(sink.join().unwrap());
    });
}

#[test]
fn a_refusal_answers_another_version() {
    each(|_, _, local, remote| {
        let mut refusal = protocol::refusal(&Error::new(ErrorKind::LinkFailed, "too old"));
        refusal[2] = 99;
        let mut message = frame(b"x");
        message[2] = 99;
        raw(&local).write_all(&[refusal, message].concat()).unwrap();
        let (kind, body) = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(protocol::open::<u8>(kind, &body).unwrap_err().to_string().ends_with("too old"));
        let error = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::LinkFailed);
        assert!(error.to_string().contains("version 99"), "{error}");
        // The rest of that message is never taken for a frame, but the reason can be sent to the peer.
        assert_eq!(kind_of(receive(&remote)), ErrorKind::NotLinked);
    });
    each(|_, _, local, remote| {
        let mut message = frame(b"x");
        message[2] = 99;
        raw(&local).write_all(&message).unwrap();
        let error = remote.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap_err();
        assert!(remote.is_closed());
        remote.send(&protocol::refusal(&error), soon()).unwrap();
        drop(remote);
        let (kind, body) = local.receive(HANDSHAKE_LIMIT, Duration::ZERO, soon()).unwrap().unwrap();
        assert!(protocol::open::<u8>(kind, &body).unwrap_err().to_string().contains("version 99"));
    });
}
