//! Two rings of bytes in memory that two processes share: each process writes one of them and reads the other.
//!
//! Each process has a file with its own ring, sealed so that the other process can only read it and it cannot shrink. The
//! file also says how far the process has read the ring of the other one, and for what it sleeps. So neither process
//! writes into memory of the other (promise 5). Each checks the numbers of the other whenever it uses them, and copies the
//! bytes out before it looks at them.

use std::ffi::c_void;
use std::hint::spin_loop;
use std::os::fd::OwnedFd;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, fstatfs};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::memfd::{self, seal};
use super::peer_mapping::refuse_shrinking;
use crate::error::{Error, ErrorKind, Result};

/// Bytes of a ring, a power of two. Almost all requests and replies are shorter.
const RING: usize = 64 << 10;
/// Bytes that this side reads before it tells the peer, unless the ring is empty earlier.
const CHUNK: usize = 16 << 10;
/// Bytes before the ring, for the words of its process.
const WORDS: usize = 4096;
/// Bytes of the file of each process.
const BYTES: usize = WORDS + RING;
/// Number of polls of a ring before the thread yields.
const POLLS: u32 = 64;

/// The type of a file system of reserved huge pages (`HUGETLBFS_MAGIC` of Linux).
const HUGETLBFS: rustix::fs::FsWord = 0x9584_58f6;

/// A word of a process, by its offset in the file. Each has a cache line to itself.
#[derive(Clone, Copy, Debug)]
#[repr(usize)]
enum Word {
    /// Bytes that the process has written into its ring.
    Written = 0,
    /// Bytes that it has read from the ring of the other process.
    Read = 64,
    /// 1 while it sleeps until there are bytes to read.
    AwaitsBytes = 128,
    /// 1 while it sleeps until it can write.
    AwaitsRoom = 192,
}

/// What a thread waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingWait {
    /// Bytes to read.
    Bytes,
    /// Room to write.
    Room,
}

impl RingWait {
    fn word(self) -> Word {
        match self {
            RingWait::Bytes => Word::AwaitsBytes,
            RingWait::Room => Word::AwaitsRoom,
        }
    }
}

/// The ring that this process writes, before it has the one of the peer.
#[derive(Debug)]
pub struct OwnRing(File);

impl OwnRing {
    /// Creates an empty ring and the descriptor with which the peer maps it.
    ///
    /// Returns `Err` of kind [`ErrorKind::OutOfMemory`] if memory is short, and of kind [`ErrorKind::System`] if a limit
    /// prevents the ring or the kernel cannot seal it.
    pub fn create() -> Result<(OwnRing, OwnedFd)> {
        let made = || {
            let descriptor = memfd::create("llm_datadist calls", BYTES as u64, MemfdFlags::empty())?;
            let file = File::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE)?;
            Ok((OwnRing(file), descriptor))
        };
        let made: rustix::io::Result<_> = made();
        let made = made.map_err(|errno| memfd::refused("ring of a call stream", BYTES as u64, errno))?;
        if !seal(&made.1) {
            return Err(Error::new(ErrorKind::System, "the kernel cannot seal the ring of a call stream"));
        }
        Ok(made)
    }

    /// Maps the ring that the peer sent. Returns `Err` of kind [`ErrorKind::System`] if the descriptor is anything else,
    /// or cannot be mapped.
    pub fn join(self, peer: &OwnedFd) -> Result<SharedRings> {
        refuse_shrinking(peer, BYTES as u64)?;
        // The kernel maps whole huge pages, and unmaps nothing less.
        if fstatfs(peer).map_or(true, |system| system.f_type == HUGETLBFS) {
            return Err(Error::new(
                ErrorKind::System,
                "the ring of the peer consists of reserved huge pages",
            ));
        }
        let peer = File::map(peer, ProtFlags::READ).map_err(|error| {
            Error::new(ErrorKind::System, "the ring of the peer could not be mapped")
                .with("bytes", BYTES)
                .because(std::io::Error::from(error))
        })?;
        Ok(SharedRings { own: self.0, peer, seen_read: AtomicU64::new(0), read: AtomicU64::new(0) })
    }
}

/// The rings of two processes, as one of them uses them. At most one thread writes and one reads at a time.
#[derive(Debug)]
pub struct SharedRings {
    own: File,
    peer: File,
    /// The last value of the peer's `Read` word that this side loaded. Loading it rarely leaves its cache line with the peer.
    seen_read: AtomicU64,
    /// Position up to which this process has read. It is published when the ring is empty or after [`CHUNK`] bytes.
    read: AtomicU64,
}

impl SharedRings {
    /// Writes as many of `bytes` as there is room for, and returns how many. Returns `Err(AGAIN)` if there is no room, and
    /// `Err(PROTO)` if the numbers of the peer are impossible.
    pub fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let (written, room) = self.room(bytes.len())?;
        let len = bytes.len().min(room);
        // SAFETY: `len` bytes of the borrowed slice, which is no memory of a ring. The own file is mapped writable
        // (`OwnRing::create`), and `room` returns at most the bytes of a ring.
        unsafe { self.own.put(written, bytes.as_ptr(), len) };
        self.own.publish(Word::Written, written + len as u64);
        Ok(len)
    }

    /// Reads into as many of `bytes` as have arrived, and returns how many. Returns `Err(AGAIN)` if none have arrived, and
    /// `Err(PROTO)` if the numbers of the peer are impossible.
    pub fn read(&self, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        let (read, unread) = self.unread()?;
        let len = bytes.len().min(unread);
        // SAFETY: `len` bytes of the slice, which is borrowed exclusively. `unread` returns at most the bytes of a ring.
        unsafe { self.peer.get(read, bytes.as_mut_ptr(), len) };
        self.note_read(read + len as u64, len == unread);
        Ok(len)
    }

    /// Returns whether `awaited` is there. Also returns `true` if the words of the peer are impossible, so that the next
    /// call reports the error.
    pub fn ready(&self, awaited: RingWait) -> bool {
        let found = match awaited {
            RingWait::Bytes => self.unread(),
            RingWait::Room => self.room(RING),
        };
        !matches!(found, Err(Errno::AGAIN))
    }

    /// Polls [`ready`](Self::ready) a limited number of times, for a few microseconds at most.
    pub fn ready_soon(&self, awaited: RingWait) -> bool {
        (0..POLLS).any(|_| {
            spin_loop();
            self.ready(awaited)
        })
    }

    /// Announces that this side is about to sleep. Returns `false` if it must not, because `awaited` is there. Until
    /// [`awake`](Self::awake), [`wakes`](Self::wakes) returns `true` at the other side.
    pub fn fall_asleep(&self, awaited: RingWait) -> bool {
        self.own.word(awaited.word()).store(1, Ordering::Relaxed);
        // Either this side sees what the other one has published, or the other one sees the announcement.
        fence(Ordering::SeqCst);
        if self.ready(awaited) {
            self.awake();
            return false;
        }
        true
    }

    /// Withdraws both announcements.
    pub fn awake(&self) {
        for awaited in [RingWait::Bytes, RingWait::Room] {
            self.own.word(awaited.word()).store(0, Ordering::Relaxed);
        }
    }

    /// Returns whether the other side sleeps until `awaited` is there. Call it after a write or a read.
    pub fn wakes(&self, awaited: RingWait) -> bool {
        fence(Ordering::SeqCst);
        self.peer.word(awaited.word()).load(Ordering::Relaxed) != 0
    }

    /// Returns the position of the next byte to write, and the room. The room may be underestimated, but is at least `wanted`
    /// if that much is free. Returns `Err(AGAIN)` if there is none.
    fn room(&self, wanted: usize) -> rustix::io::Result<(u64, usize)> {
        let written = self.own.number(Word::Written);
        let room = |read: u64| {
            usize::try_from(written.wrapping_sub(read)).ok().and_then(|unread| RING.checked_sub(unread))
        };
        let mut found = room(self.seen_read.load(Ordering::Relaxed));
        if found.is_none_or(|room| room < wanted) {
            let read = self.peer.number(Word::Read);
            self.seen_read.store(read, Ordering::Relaxed);
            found = room(read);
        }
        match found {
            Some(0) => Err(Errno::AGAIN),
            Some(room) => Ok((written, room)),
            None => Err(Errno::PROTO),
        }
    }

    /// Notes that this process has read up to `read`. `all` is whether the ring is now empty.
    fn note_read(&self, read: u64, all: bool) {
        self.read.store(read, Ordering::Relaxed);
        if all || read.wrapping_sub(self.own.number(Word::Read)) >= CHUNK as u64 {
            self.own.publish(Word::Read, read);
        }
    }

    /// Returns how much was read, and how many bytes can be read now. `Err(AGAIN)` if there are none.
    fn unread(&self) -> rustix::io::Result<(u64, usize)> {
        let read = self.read.load(Ordering::Relaxed);
        match usize::try_from(self.peer.number(Word::Written).wrapping_sub(read)) {
            Ok(0) => Err(Errno::AGAIN),
            Ok(unread) if unread <= RING => Ok((read, unread)),
            _ => Err(Errno::PROTO),
        }
    }
}

/// A mapping of the file of one process; unmapped on drop.
#[derive(Debug)]
struct File(usize);

impl File {
    fn map(descriptor: &OwnedFd, rights: ProtFlags) -> rustix::io::Result<File> {
        // SAFETY: no address is requested, so the kernel chooses an unused range.
        let at = unsafe { mmap(null_mut(), BYTES, rights, MapFlags::SHARED, descriptor, 0) }?;
        Ok(File(at as usize))
    }

    fn word(&self, word: Word) -> &AtomicU64 {
        // SAFETY: the word lies inside the mapping, which lives as long as `self`. Its file cannot shrink
        // (`refuse_shrinking` checks that of a peer). The word is aligned, and is accessed only as an atomic.
        unsafe { &*((self.0 + word as usize) as *const AtomicU64) }
    }

    fn number(&self, word: Word) -> u64 {
        // Only a relaxed load is permitted on read-only memory; the fence makes it an acquire load.
        let number = self.word(word).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        number
    }

    /// Stores a word of this process. A peer that loads it sees every earlier write (release).
    fn publish(&self, word: Word, number: u64) {
        self.word(word).store(number, Ordering::Release);
    }

    /// Copies `len` bytes, at most [`RING`], to position `at` of the ring of this process.
    ///
    /// # Safety
    ///
    /// `from` must be valid for reads of `len` bytes, and this mapping must be writable.
    unsafe fn put(&self, at: u64, from: *const u8, len: usize) {
        let (start, first) = split(at, len);
        // SAFETY: the part lies inside the ring (`split`), and the source is valid, as the caller promises. Nobody else
        // writes the ring: the file is sealed, and one thread writes at a time.
        unsafe { from.copy_to_nonoverlapping(self.ring(start), first) };
        // SAFETY: as above; this is the part after the end of the ring, from its start on.
        unsafe { from.wrapping_add(first).copy_to_nonoverlapping(self.ring(0), len - first) };
    }

    /// Copies `len` bytes, at most [`RING`], from position `at` of the ring of the peer. A peer that breaks the protocol
    /// may write them meanwhile; the copy may then have any bytes.
    ///
    /// # Safety
    ///
    /// `to` must be valid for writes of `len` bytes.
    unsafe fn get(&self, at: u64, to: *mut u8, len: usize) {
        let (start, first) = split(at, len);
        // SAFETY: the part lies inside the ring (`split`), which is mapped and cannot shrink (`refuse_shrinking`), and the
        // destination is valid, as the caller promises. The source may change meanwhile; it is read by its address, and no
        // reference to it exists.
        unsafe { self.ring(start).copy_to_nonoverlapping(to, first) };
        // SAFETY: as above; this is the part after the end of the ring, from its start on.
        unsafe { self.ring(0).copy_to_nonoverlapping(to.wrapping_add(first), len - first) };
    }

    /// Returns the address of a byte of the ring.
    fn ring(&self, at: usize) -> *mut u8 {
        (self.0 + WORDS + at) as *mut u8
    }
}

/// Returns the place of byte `at` in a ring, and how many of the `len` bytes from there on precede its end.
#[expect(clippy::cast_possible_truncation, reason = "the remainder is less than the bytes of a ring")]
fn split(at: u64, len: usize) -> (usize, usize) {
    let start = (at % RING as u64) as usize;
    (start, len.min(RING - start))
}

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: the range was mapped for this value alone, and every reference into it borrowed the value.
        let _ = unsafe { munmap(self.0 as *mut c_void, BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::thread::{self, Thread};
    use std::time::{Duration, Instant};

    use rustix::fs::{SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    use super::*;

    fn pair() -> (SharedRings, SharedRings) {
        let ((one, of_one), (other, of_other)) = (OwnRing::create().unwrap(), OwnRing::create().unwrap());
        (one.join(&of_other).unwrap(), other.join(&of_one).unwrap())
    }

    /// Returns `len` bytes that differ at every position from those of the next seed.
    fn bytes(seed: usize, len: usize) -> Vec<u8> {
        (0..len).map(|at| (seed.wrapping_mul(31) ^ at.wrapping_mul(7)).to_le_bytes()[0]).collect()
    }

    #[test]
    fn bytes_arrive_in_order_over_the_end_of_the_ring() {
        let (one, other) = pair();
        let mut sizes = [1, 7, RING, CHUNK + 1, RING - 3, 64].into_iter().cycle();
        let (mut sent, mut got) = (Vec::new(), Vec::new());
        for round in 0..64 {
            let message = bytes(round, sizes.next().unwrap());
            assert_eq!(one.write(&message), Ok(message.len()));
            sent.extend(message);
            let mut part = vec![0; RING];
            let len = other.read(&mut part).unwrap();
            got.extend_from_slice(&part[..len]);
        }
        assert!(got == sent, "{} bytes sent, {} received", sent.len(), got.len());
        assert_eq!(other.read(&mut [0]), Err(Errno::AGAIN));
    }

    #[test]
    fn a_full_ring_takes_what_was_read() {
        let (one, other) = pair();
        assert_eq!(one.write(&vec![1; RING + 5]), Ok(RING));
        assert_eq!(one.write(&[2]), Err(Errno::AGAIN));
        assert!(!one.ready(RingWait::Room) && other.ready(RingWait::Bytes));
        assert_eq!(other.read(&mut vec![0; CHUNK]), Ok(CHUNK));
        assert_eq!(one.write(&vec![2; CHUNK + 1]), Ok(CHUNK));
    }

    #[test]
    fn only_the_side_that_announces_is_woken() {
        let (one, other) = pair();
        assert!(!one.wakes(RingWait::Bytes) && !one.wakes(RingWait::Room));
        assert!(other.fall_asleep(RingWait::Bytes));
        assert!(one.wakes(RingWait::Bytes) && !one.wakes(RingWait::Room));
        assert!(!other.wakes(RingWait::Bytes), "nobody sleeps at the other side");
        other.awake();
        assert!(!one.wakes(RingWait::Bytes));
        one.write(b"x").unwrap();
        assert!(!other.fall_asleep(RingWait::Bytes), "the byte has arrived");
        assert!(!one.wakes(RingWait::Bytes));
    }

    #[test]
    fn impossible_numbers_of_the_peer_are_refused() {
        let (one, other) = pair();
        one.write(b"abc").unwrap();
        let forge = |word, number| one.own.publish(word, number);
        forge(Word::Written, RING as u64 + 1);
        assert_eq!(other.read(&mut [0; 8]), Err(Errno::PROTO));
        other.read.store(3, Ordering::Relaxed);
        forge(Word::Written, 2);
        assert_eq!(other.read(&mut [0; 8]), Err(Errno::PROTO), "fewer than were read");
        forge(Word::Read, RING as u64 + 1);
        assert_eq!(other.write(&vec![0; RING]), Ok(RING));
        assert_eq!(other.write(b"x"), Err(Errno::PROTO), "more was read than written");
        assert!(other.ready(RingWait::Bytes) && other.ready(RingWait::Room), "the next call reports it");
    }

    #[test]
    fn other_descriptors_are_refused() {
        let refused =
            |descriptor: &OwnedFd| OwnRing::create().unwrap().0.join(descriptor).unwrap_err().to_string();
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
        let (_ring, descriptor) = OwnRing::create().unwrap();
        assert_eq!(File::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE).unwrap_err(), Errno::PERM);
        assert!(File::map(&descriptor, ProtFlags::READ).is_ok());
    }

    /// Waits for `awaited`, asleep whenever the protocol allows it.
    fn wait(rings: &SharedRings, awaited: RingWait) {
        const LOST: Duration = Duration::from_secs(20);
        let since = Instant::now();
        while rings.fall_asleep(awaited) {
            thread::park_timeout(LOST);
            rings.awake();
            assert!(since.elapsed() < LOST, "a wake-up for {awaited:?} was lost");
        }
    }

    /// Waits for 8 bytes, and returns them as a number.
    fn hear(rings: &SharedRings) -> u64 {
        wait(rings, RingWait::Bytes);
        let mut number = [0; 8];
        assert_eq!(rings.read(&mut number), Ok(8));
        u64::from_le_bytes(number)
    }

    fn say(rings: &SharedRings, number: u64, to: &Thread) {
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
        const ALL: usize = 400 * RING;
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
        let message: Vec<u8> = (0..RING).map(|at| at.to_le_bytes()[0]).collect();
        let mut sent = 0;
        while sent < ALL {
            wait(&one, RingWait::Room);
            sent += one.write(&message[sent % RING..]).unwrap();
            if one.wakes(RingWait::Bytes) {
                second.thread().unpark();
            }
        }
        second.join().unwrap();
    }
}
