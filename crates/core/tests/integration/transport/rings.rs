//! Streams with rings: frames, payload and wake-ups, and bytes that a peer must not send on the socket.

use std::io::Write;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use llm_datadist_core::testing::net::{Address, Stream, Unix};
use llm_datadist_core::testing::protocol::{HEADER, MESSAGE_LIMIT};
use llm_datadist_core::{Error, ErrorKind};
use llm_datadist_testing::{Fault, Faults, Faulty};

use super::payload::Cut;
use super::{
    body, connected, frame, kind_of, raw, receive, receive_by, share_rings, short, soon, stopped, unique,
};
use crate::fixtures::{pattern, skipped};

fn pair() -> (Stream, Stream) {
    let (_, local, remote) = connected(&Unix, &Address::Unix(unique("rings")));
    share_rings(&local, &remote);
    (local, remote)
}

/// A process that dies leaves the part of a frame that it has written.
#[test]
fn half_a_frame_before_the_end_is_no_frame() {
    for cut in [1, HEADER - 1, HEADER, HEADER + 1, HEADER + 99] {
        let stall = move |_| Faults { sending: Some(Fault::Stall(cut as u64)), ..Faults::default() };
        let transport = Faulty::new(Arc::new(Unix), stall);
        let (_, local, remote) = connected(&transport, &Address::Unix(unique("rings")));
        share_rings(&local, &remote);
        assert_eq!(kind_of(local.send(&frame(&[3; 100]), short())), ErrorKind::Timeout, "{cut}");
        drop(local);
        let error = receive(&remote).unwrap_err();
        assert!(error.to_string().starts_with("the peer closed the connection"), "{error}");
        stopped::<()>(Err(error), ErrorKind::NotLinked, cut);
        assert!(remote.is_closed());
        assert_eq!(kind_of(remote.send(&frame(b"late"), soon())), ErrorKind::NotLinked, "{cut}");
    }
}

#[test]
fn a_frame_larger_than_the_ring_passes_between_sides_that_sleep() {
    let (local, remote) = pair();
    let long = frame(&vec![7; 3 << 20]);
    thread::scope(|scope| {
        scope.spawn(|| local.send(&long, soon()).unwrap());
        // Longer than a side polls, so the sender has to sleep.
        thread::sleep(Duration::from_millis(5));
        assert!(body(&remote) == long[8..]);
        let receiving = scope.spawn(|| body(&local));
        thread::sleep(Duration::from_millis(5));
        remote.send(&frame(b"got it"), soon()).unwrap();
        assert_eq!(receiving.join().unwrap(), b"got it");
    });
}

#[test]
fn zeros_on_the_socket_carry_no_data() {
    let (local, remote) = pair();
    raw(&local).write_all(&[0; 10_000]).unwrap();
    assert_eq!(kind_of(receive_by(&remote, short())), ErrorKind::Timeout);
    assert!(!remote.wake_up(), "nothing has arrived");
    local.send(&frame(b"a frame"), soon()).unwrap();
    assert!(remote.wake_up());
    assert_eq!(body(&remote), b"a frame");
}

#[test]
fn other_bytes_without_a_frame_end_the_stream() {
    for byte in [1, 2, 0xFF] {
        let (local, remote) = pair();
        raw(&local).write_all(&[0, 0, byte]).unwrap();
        assert!(receive(&remote).unwrap().is_none(), "{byte}");
        assert_eq!(kind_of(remote.send(&frame(b"more"), soon())), ErrorKind::NotLinked, "{byte}");
    }
}

/// Frames and payload in turn, while the receiver sleeps or polls, with and without needless zeros between them.
#[test]
fn payload_arrives_between_frames() {
    const ROUNDS: usize = 400;
    let (local, remote) = pair();
    // The last one is longer than the ring.
    let length =
        |round: usize| if round % 40 == 39 { (3 << 20) + 5 } else { [1, 64, 4096, 100_000][round % 4] };
    thread::scope(|scope| {
        scope.spawn(|| {
            for round in 0..ROUNDS {
                let source = Cut::new(&[length(round)], 0, |at| pattern((round % 251) as u8, 0, at));
                if round % 3 == 0 {
                    thread::sleep(Duration::from_micros(200));
                }
                if round % 5 == 0 {
                    raw(&local).write_all(&[0; 3]).unwrap();
                }
                local.send(&frame(&round.to_le_bytes()), soon()).unwrap();
                local.send_padding(soon()).unwrap();
                local.send_windows(&source.windows(), soon()).unwrap();
                if round % 7 == 0 {
                    assert_eq!(body(&local), round.to_le_bytes());
                }
            }
        });
        for round in 0..ROUNDS {
            assert_eq!(body(&remote), round.to_le_bytes());
            let target = Cut::new(&[length(round)], 0, |_| 0);
            remote.receive_padding(soon()).unwrap();
            remote.receive_windows(&target.windows(), soon()).unwrap();
            let source = Cut::new(&[length(round)], 0, |at| pattern((round % 251) as u8, 0, at));
            assert!(target.bytes() == source.bytes(), "round {round}");
            if round % 7 == 0 {
                remote.send(&frame(&round.to_le_bytes()), soon()).unwrap();
            }
        }
    });
}

#[test]
fn a_poller_is_woken_by_the_first_byte_and_by_the_end() {
    let readable = |stream: &Stream| {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
        poll(&mut [PollFd::new(stream, PollFlags::IN)], Some(&limit)).unwrap() == 1
    };
    let (local, remote) = pair();
    for round in 0..100 {
        assert!(remote.fall_asleep(), "nothing has arrived in round {round}");
        local.send(&frame(b"again"), soon()).unwrap();
        assert!(readable(&remote) && remote.wake_up(), "round {round}");
        assert_eq!(body(&remote), b"again");
    }
    local.send(&frame(b"early"), soon()).unwrap();
    assert!(!remote.fall_asleep(), "a frame arrived before this side announced its sleep");
    assert_eq!(body(&remote), b"early");
    assert!(remote.fall_asleep());
    local.close();
    assert!(readable(&remote) && remote.wake_up(), "the end is something to receive");
    assert!(remote.receive(MESSAGE_LIMIT, Duration::ZERO, soon()).unwrap().is_none());
    assert!(!remote.fall_asleep(), "the end has arrived already");
}

/// Fills the ring of `local`, whose peer has sent a frame that stays unread, while `meanwhile` runs. Returns the error of the
/// sender, which has a long deadline.
fn stuck(local: &Stream, remote: &Stream, meanwhile: impl FnOnce() + Send) -> Error {
    remote.send(&frame(b"unread"), soon()).unwrap();
    thread::scope(|scope| {
        let sending = scope.spawn(|| local.send(&frame(&vec![1; 1 << 20]), soon()).unwrap_err());
        thread::sleep(Duration::from_millis(5));
        meanwhile();
        sending.join().unwrap()
    })
}

#[test]
fn sender_without_room_notices_the_end() {
    let (local, remote) = pair();
    let error = stuck(&local, &remote, || remote.close());
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    let (local, remote) = pair();
    let error = stuck(&local, &remote, || local.close());
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    assert!(error.to_string().contains("this side closed the connection"), "{error}");
    let (local, remote) = pair();
    let error = stuck(&local, &remote, || raw(&remote).write_all(&[1]).unwrap());
    assert_eq!(error.kind(), ErrorKind::NotLinked, "only zeros wake: {error}");
}

/// The ring has room and bytes, so no thread sleeps and sees the closed socket. The stream must check that it is closed. The
/// peer can still receive what was sent.
#[test]
fn closed_stream_with_rings_moves_nothing() {
    let ours = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
        error.to_string()
    };
    let source = Cut::new(&[1000], 0, |_| 1);
    let (local, remote) = pair();
    local.send_windows(&source.windows(), soon()).unwrap();
    local.close();
    let error = ours(local.send_windows(&source.windows(), soon()).unwrap_err());
    assert!(error.contains("this side closed the connection"), "{error}");
    ours(local.send(&frame(b"late"), soon()).unwrap_err());
    remote.close();
    ours(remote.receive_windows(&source.windows(), soon()).unwrap_err());
    let (local, remote) = pair();
    local.send_windows(&source.windows(), soon()).unwrap();
    local.close();
    remote.receive_windows(&source.windows(), soon()).unwrap();
}

#[test]
fn endless_zeros_do_not_outlast_a_deadline() {
    let (local, remote) = pair();
    local.send(&frame(b"a payload follows"), soon()).unwrap();
    assert_eq!(body(&remote), b"a payload follows");
    thread::scope(|scope| {
        let flood = scope.spawn(|| while raw(&local).write_all(&[0; 4096]).is_ok() {});
        let target = Cut::new(&[10], 0, |_| 0);
        assert_eq!(kind_of(remote.receive_windows(&target.windows(), short())), ErrorKind::Timeout);
        remote.close();
        flood.join().unwrap();
    });
}

#[test]
fn an_urgent_byte_ends_the_stream() {
    let (local, remote) = pair();
    assert!(remote.fall_asleep());
    if rustix::net::send(&local, b"x", rustix::net::SendFlags::OOB).is_err() {
        return skipped("this kernel has no urgent bytes for local sockets");
    }
    assert!(remote.wake_up(), "the end is something to receive");
    assert!(receive(&remote).unwrap().is_none());
}
