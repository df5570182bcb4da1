//! Both ends of the rings in one process, and peers that break their rules.

use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::*;

fn rings() -> (SharedRings, SharedRings) {
    let ((one, of_one), (other, of_other)) = (OwnRings::create().unwrap(), OwnRings::create().unwrap());
    (one.join(&of_other).unwrap(), other.join(&of_one).unwrap())
}

/// Both ends of the rings for messages, and of those for payload.
fn pairs() -> [(RingPair, RingPair); 2] {
    let (one, other) = rings();
    [(one.messages, other.messages), (one.payload, other.payload)]
}

fn pair() -> (RingPair, RingPair) {
    let (one, other) = rings();
    (one.messages, other.messages)
}

/// Returns `len` bytes that differ at every position from those of the next seed.
fn bytes(seed: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (seed.wrapping_mul(31) ^ at.wrapping_mul(7)).to_le_bytes()[0]).collect()
}

#[test]
fn bytes_arrive_in_order_over_the_end_of_the_ring() {
    for (one, other) in pairs() {
        let ring = one.layout.size;
        let mut sizes = [1, 7, ring, CHUNK + 1, ring - 3, 64].into_iter().cycle();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for round in 0..32 {
            let message = bytes(round, sizes.next().unwrap());
            assert_eq!(one.write(&message), Ok(message.len()));
            sent.extend(message);
            let mut part = vec![0; ring];
            let len = other.read(&mut part).unwrap();
            got.extend_from_slice(&part[..len]);
        }
        assert!(got == sent, "{} bytes sent, {} received", sent.len(), got.len());
        assert_eq!(other.read(&mut [0]), Err(Errno::AGAIN));
    }
}

#[test]
fn a_full_ring_takes_what_was_read() {
    for (one, other) in pairs() {
        let ring = one.layout.size;
        assert_eq!(one.write(&vec![1; ring + 5]), Ok(ring));
        assert_eq!(one.write(&[2]), Err(Errno::AGAIN));
        let full = one.write_windows(&[window(&mut [2])], 0).unwrap_err();
        assert_eq!(full.kind(), io::ErrorKind::WouldBlock);
        assert!(!one.ready(RingWait::Room) && other.ready(RingWait::Bytes));
        assert_eq!(other.read(&mut vec![0; CHUNK]), Ok(CHUNK));
        assert_eq!(one.write_windows(&[window(&mut vec![2; CHUNK + 1])], 0).unwrap(), CHUNK);
    }
}

fn window(bytes: &mut [u8]) -> Window<'_> {
    Window::inside(bytes.as_mut_ptr() as u64, bytes.len() as u64, Reach::Host)
}

#[test]
fn messages_and_payload_use_separate_rings() {
    let (one, other) = rings();
    one.messages.write(b"a message").unwrap();
    assert!(!other.payload.ready(RingWait::Bytes));
    one.payload.write_windows(&[window(&mut [7; 5])], 0).unwrap();
    let (mut message, mut payload) = ([0; 32], [0; 32]);
    assert_eq!((other.messages.read(&mut message), &message[..9]), (Ok(9), &b"a message"[..]));
    assert_eq!((other.payload.read(&mut payload), payload[..6].to_vec()), (Ok(5), vec![7, 7, 7, 7, 7, 0]));
    assert!(other.payload.fall_asleep(RingWait::Bytes));
    assert!(one.payload.wakes(RingWait::Bytes) && !one.messages.wakes(RingWait::Bytes));
}

/// Moves bytes from windows of some lengths into windows of others, in steps of either side, and compares them.
#[test]
fn windows_of_other_lengths_are_filled_in_order() {
    let lengths: [&[usize]; 4] =
        [&[3 * STEP + 1], &[1, CHUNK, 0, 5 * CHUNK - 7, 64], &[7; 1000], &[PAGE; 200]];
    for (one, other) in pairs() {
        for (seed, from) in lengths.iter().enumerate() {
            let all: usize = from.iter().sum();
            let to = [all / 3, 0, 1, all - all / 3 - 1];
            let (sent, mut got) = (bytes(seed, all), vec![0; all]);
            let mut source = sent.clone();
            let cut = |bytes: &mut [u8], lengths: &[usize]| -> Vec<(u64, u64)> {
                let mut at = bytes.as_mut_ptr() as u64;
                let next = |len: &usize| {
                    at += *len as u64;
                    (at - *len as u64, *len as u64)
                };
                lengths.iter().map(next).collect()
            };
            let (source, target) = (cut(&mut source, from), cut(&mut got, &to));
            let windows = |cuts: &[(u64, u64)]| -> Vec<Window<'static>> {
                cuts.iter().map(|&(at, len)| Window::inside(at, len, Reach::Host)).collect()
            };
            let (source, target) = (windows(&source), windows(&target));
            let (mut written, mut read) = (0, 0);
            while read < all as u64 {
                if written < all as u64 {
                    let step = one.write_windows(&source, written).unwrap();
                    assert!(step <= STEP, "{step}");
                    written += step as u64;
                }
                read += other.read_windows(&target, read).unwrap() as u64;
                assert!(read <= written);
            }
            assert!(got == sent, "lengths {seed}");
        }
    }
}

#[test]
fn windows_that_the_cpu_cannot_use_are_refused() {
    let (one, other) = pair();
    let invalid = |result: io::Result<usize>| result.unwrap_err().kind() == io::ErrorKind::InvalidInput;
    let mut bytes = [0_u8; 8];
    let at = bytes.as_mut_ptr() as u64;
    let of = |reach| Window::inside(at, 8, reach);
    one.write(b"abc").unwrap();
    for reach in [Reach::Process, Reach::Fabric, Reach::Device] {
        assert!(invalid(one.write_windows(&[of(Reach::Host), of(reach)], 0)), "{reach:?}");
        assert!(invalid(other.read_windows(&[of(reach)], 0)), "{reach:?}");
    }
    assert!(invalid(other.read_windows(&[of(Reach::HostRead)], 0)), "it belongs to another process");
    assert!(invalid(one.write_windows(&[of(Reach::HostRead)], 8)), "nothing is left");
    assert!(invalid(other.read_windows(&[of(Reach::Host)], 8)), "nothing is left");
    assert_eq!(other.read_windows(&[of(Reach::Host)], 6).unwrap(), 2, "the bytes are still there");
}

#[test]
fn both_sides_agree_on_the_next_page() {
    for (one, other) in pairs() {
        for len in [1, PAGE - 1, PAGE, PAGE + 1, 64] {
            assert_eq!(one.write(&vec![0; len]), Ok(len));
            assert_eq!(other.read(&mut vec![0; len]), Ok(len));
            assert_eq!(one.unwritten_of_page(), other.unread_of_page(), "after {len} bytes");
        }
        // 3 pages and 65 bytes.
        assert_eq!(one.unwritten_of_page(), PAGE - 65);
        one.write(&vec![0; PAGE - 65]).unwrap();
        assert_eq!(one.unwritten_of_page(), 0);
    }
}

#[test]
fn only_the_side_that_announces_is_woken() {
    let (one, other) = pair();
    assert!(!one.wakes(RingWait::Bytes) && !one.wakes(RingWait::Room));
    assert!(other.fall_asleep(RingWait::Bytes));
    assert!(one.wakes(RingWait::Bytes) && !one.wakes(RingWait::Room));
    assert!(!other.wakes(RingWait::Bytes), "the other side does not sleep");
    other.awake();
    assert!(!one.wakes(RingWait::Bytes));
    one.write(b"x").unwrap();
    assert!(!other.fall_asleep(RingWait::Bytes), "the byte has arrived");
    assert!(!one.wakes(RingWait::Bytes));
}

#[test]
fn only_the_other_side_sees_that_one_has_closed() {
    for (one, other) in pairs() {
        one.write(b"fourteen bytes").unwrap();
        one.close();
        assert!(other.peer_closed() && !one.peer_closed());
        assert_eq!(other.read(&mut [0; 32]), Ok(14), "what it has written is still there");
    }
}

#[test]
fn impossible_numbers_of_the_peer_are_refused() {
    for (one, other) in pairs() {
        let ring = one.layout.size;
        let mut bytes = [0; 8];
        let refused = |result: io::Result<usize>| {
            assert_eq!(Errno::from_io_error(&result.unwrap_err()), Some(Errno::PROTO));
        };
        one.write(b"abc").unwrap();
        one.publish(Word::Written, ring as u64 + 1);
        assert_eq!(other.read(&mut [0; 8]), Err(Errno::PROTO));
        refused(other.read_windows(&[window(&mut bytes)], 0));
        other.read.store(3, Ordering::Relaxed);
        one.publish(Word::Written, 2);
        assert_eq!(other.read(&mut [0; 8]), Err(Errno::PROTO), "fewer than were read");
        refused(other.read_windows(&[window(&mut bytes)], 0));
        one.publish(Word::Read, ring as u64 + 1);
        assert_eq!(other.write(&vec![0; ring]), Ok(ring));
        assert_eq!(other.write(b"x"), Err(Errno::PROTO), "more was read than written");
        refused(other.write_windows(&[window(&mut bytes)], 0));
        assert!(other.ready(RingWait::Bytes) && other.ready(RingWait::Room), "the next call reports it");
    }
}

#[test]
fn other_descriptors_are_refused() {
    let refused =
        |descriptor: &OwnedFd| OwnRings::create().unwrap().0.join(descriptor).unwrap_err().to_string();
    let file = memfd_create("a test", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, BYTES as u64 - 1).unwrap();
    assert!(refused(&file).contains("not sealed"), "{}", refused(&file));
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::FUTURE_WRITE).unwrap();
    assert!(refused(&file).contains("shorter"), "{}", refused(&file));
    let huge = memfd::create("a test", 2 << 20, memfd::HUGE_2MB).unwrap();
    assert!(seal(&huge));
    assert!(refused(&huge).contains("reserved huge pages"), "{}", refused(&huge));
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    assert!(refused(&null).contains("not memory"), "{}", refused(&null));
}

#[test]
fn the_peer_cannot_map_a_ring_for_writing() {
    let (_ring, descriptor) = OwnRings::create().unwrap();
    assert_eq!(File::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE).unwrap_err(), Errno::PERM);
    assert!(File::map(&descriptor, ProtFlags::READ).is_ok());
}

/// Waits for `awaited`, asleep whenever the protocol allows it.
fn wait(rings: &RingPair, awaited: RingWait) {
    const LOST: Duration = Duration::from_secs(20);
    let since = Instant::now();
    while rings.fall_asleep(awaited) {
        thread::park_timeout(LOST);
        rings.awake();
        assert!(since.elapsed() < LOST, "a wake-up for {awaited:?} was lost");
    }
}

/// Waits for 8 bytes, and returns them as a number.
fn hear(rings: &RingPair) -> u64 {
    wait(rings, RingWait::Bytes);
    let mut number = [0; 8];
    assert_eq!(rings.read(&mut number), Ok(8));
    u64::from_le_bytes(number)
}

fn say(rings: &RingPair, number: u64, to: &Thread) {
    assert_eq!(rings.write(&number.to_le_bytes()), Ok(8));
    if rings.wakes(RingWait::Bytes) {
        to.unpark();
    }
}

#[test]
fn sleeping_side_is_woken_for_every_message() {
    const ROUNDS: u64 = 20_000;
    let (one, other) = pair();
    let first = thread::current();
    let second = thread::spawn(move || {
        for _ in 0..ROUNDS {
            say(&other, hear(&other) + 1, &first);
        }
    });
    for round in 0..ROUNDS {
        say(&one, round, second.thread());
        assert_eq!(hear(&one), round + 1);
    }
    second.join().unwrap();
}

#[test]
fn sleeping_sender_is_woken_for_room() {
    const ALL: usize = 400 * MESSAGES.size;
    let (one, other) = pair();
    let first = thread::current();
    let second = thread::spawn(move || {
        let (mut got, mut part) = (0, vec![0; CHUNK + 7]);
        while got < ALL {
            wait(&other, RingWait::Bytes);
            let len = other.read(&mut part).unwrap();
            assert!(part[..len].iter().zip(got..).all(|(byte, at)| *byte == at.to_le_bytes()[0]));
            got += len;
            if other.wakes(RingWait::Room) {
                first.unpark();
            }
        }
    });
    let message: Vec<u8> = (0..MESSAGES.size).map(|at| at.to_le_bytes()[0]).collect();
    let mut sent = 0;
    while sent < ALL {
        wait(&one, RingWait::Room);
        sent += one.write(&message[sent % MESSAGES.size..]).unwrap();
        if one.wakes(RingWait::Bytes) {
            second.thread().unpark();
        }
    }
    second.join().unwrap();
}
