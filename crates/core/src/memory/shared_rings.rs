//! Rings of bytes in memory that two processes share: one pair for messages and one for payload. Each process writes one ring
//! of a pair and reads the other one.
//!
//! Each process has a file with the rings that it writes, sealed so that the other process can only read it and it cannot
//! shrink. The file also says how far the process has read the rings of the other one, for what it sleeps, and whether it has
//! closed the stream. So neither process writes into memory of the other (promise 5). Each checks the numbers of the other
//! whenever it uses them, and copies messages out before it looks at them. Payload is copied between rings and windows and is
//! never interpreted.

use std::hint::spin_loop;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::{MemfdFlags, fstatfs};
use rustix::io::Errno;
use rustix::mm::ProtFlags;

use super::memfd::{self, HUGETLBFS, seal};
use super::peer_mapping::refuse_shrinking;
use super::shared_mapping::SharedMapping;
use super::window::{Reach, Window};
use crate::error::{Error, ErrorKind, Result};

/// The layout of a ring in the file of its process.
#[derive(Clone, Copy, Debug)]
struct RingLayout {
    /// The first of its [`Word`]s.
    words: usize,
    start: usize,
    /// Bytes of the ring, a power of two.
    size: usize,
}

impl RingLayout {
    /// Returns the offset of a word in the file.
    fn word(self, word: Word) -> usize {
        self.words + word as usize
    }

    /// Returns the offset of byte `at` of the ring in its file, and how many of the `len` bytes from there on precede the end of
    /// the ring.
    #[expect(clippy::cast_possible_truncation, reason = "the remainder is less than the bytes of a ring")]
    fn split(self, at: u64, len: usize) -> (usize, usize) {
        let into = (at % self.size as u64) as usize;
        (self.start + into, len.min(self.size - into))
    }

    /// Copies `len` bytes, at most those of the ring, to position `at` of the ring in the file of this process.
    ///
    /// # Safety
    ///
    /// `from` must be valid for reads of `len` bytes, and `file` must be writable.
    unsafe fn put(self, file: &File, at: u64, from: *const u8, len: usize) {
        let (start, first) = self.split(at, len);
        // SAFETY: the part lies inside the ring (`split`), and the source is valid, as the caller promises. No other
        // process writes the ring, because the file is sealed, and one thread writes at a time.
        unsafe { from.copy_to_nonoverlapping(file.byte(start), first) };
        // SAFETY: as above; this is the part after the end of the ring, from its start on.
        unsafe { from.wrapping_add(first).copy_to_nonoverlapping(file.byte(self.start), len - first) };
    }

    /// Copies `len` bytes, at most those of the ring, from position `at` of the ring in the file of the peer. A peer that breaks
    /// the protocol may write them meanwhile; the copy may then have any bytes.
    ///
    /// # Safety
    ///
    /// `to` must be valid for writes of `len` bytes.
    unsafe fn get(self, file: &File, at: u64, to: *mut u8, len: usize) {
        let (start, first) = self.split(at, len);
        // SAFETY: the part lies inside the ring (`split`), which is mapped and cannot shrink (`refuse_shrinking`), and the
        // destination is valid, as the caller promises. The source may change meanwhile; it is read by its address, and no
        // reference to it exists.
        unsafe { file.byte(start).copy_to_nonoverlapping(to, first) };
        // SAFETY: as above; this is the part after the end of the ring, from its start on.
        unsafe { file.byte(self.start).copy_to_nonoverlapping(to.wrapping_add(first), len - first) };
    }
}

/// Almost all requests and replies are shorter.
const MESSAGES: RingLayout = RingLayout { words: 0, start: PAGE, size: 64 << 10 };
/// About as long as the private cache of a core. In a shorter ring, the two processes wait for each other more often
/// (benches/results/log.md).
const PAYLOAD: RingLayout = RingLayout { words: PAGE / 2, start: PAGE + MESSAGES.size, size: 1 << 20 };
/// Bytes of the file of each process.
const BYTES: usize = PAYLOAD.start + PAYLOAD.size;
/// The mapping of the file of one process.
type File = SharedMapping<BYTES, PAGE>;
/// Bytes of the words of a file, and the alignment of payload in its ring. Both processes have the same number, whatever the size of
/// their pages of memory: processors compare the last 12 bits of the addresses of a load and a store.
const PAGE: usize = 4096;
/// Bytes that this side reads or writes before it tells the peer, unless the ring is empty or the call ends earlier.
const CHUNK: usize = 16 << 10;
/// Maximum number of bytes that one call copies between a ring and windows, so that its caller can wake the peer.
const STEP: usize = 64 << 10;
/// Number of polls of a ring before the thread yields.
const POLLS: u32 = 64;

/// A word about one pair of rings, by its offset from [`RingLayout::words`]. Each has a cache line to itself.
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
    /// 1 once it has closed the stream. Used only for messages.
    Closed = 256,
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

/// The rings that this process writes, before it has those of the peer.
#[derive(Debug)]
pub struct OwnRings(File);

impl OwnRings {
    /// Creates empty rings and the descriptor with which the peer maps them. They take memory when they are first used.
    ///
    /// Returns `Err` of kind [`ErrorKind::OutOfMemory`] if memory is short, and of kind [`ErrorKind::System`] if a limit
    /// prevents the rings or the kernel cannot seal them.
    pub fn create() -> Result<(OwnRings, OwnedFd)> {
        let made = || {
            let descriptor = memfd::create("llm_datadist calls", BYTES as u64, MemfdFlags::empty())?;
            let file = File::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE)?;
            Ok((OwnRings(file), descriptor))
        };
        let made: rustix::io::Result<_> = made();
        let made =
            made.map_err(|errno| memfd::refused("ring memory of a call stream", BYTES as u64, errno))?;
        if !seal(&made.1) {
            return Err(Error::new(
                ErrorKind::System,
                "the kernel cannot seal the ring memory of a call stream",
            ));
        }
        Ok(made)
    }

    /// Maps the rings that the peer sent. Returns `Err` of kind [`ErrorKind::System`] if the descriptor is anything else,
    /// or cannot be mapped.
    pub fn join(self, peer: &OwnedFd) -> Result<SharedRings> {
        refuse_shrinking(peer, BYTES as u64)?;
        // The kernel maps whole huge pages, and unmaps nothing less.
        if fstatfs(peer).map_or(true, |system| system.f_type == HUGETLBFS) {
            return Err(Error::new(
                ErrorKind::System,
                "the ring memory of the peer consists of reserved huge pages",
            ));
        }
        let peer = File::map(peer, ProtFlags::READ).map_err(|error| {
            Error::new(ErrorKind::System, "the ring memory of the peer could not be mapped")
                .with("bytes", BYTES)
                .because(std::io::Error::from(error))
        })?;
        let (own, peer) = (Arc::new(self.0), Arc::new(peer));
        let pair = |layout| RingPair {
            layout,
            own: own.clone(),
            peer: peer.clone(),
            seen_read: AtomicU64::new(0),
            read: AtomicU64::new(0),
        };
        Ok(SharedRings { messages: pair(MESSAGES), payload: pair(PAYLOAD) })
    }
}

/// The rings of two processes, as one of them uses them.
#[derive(Debug)]
pub struct SharedRings {
    pub messages: RingPair,
    pub payload: RingPair,
}

/// One ring in each direction. At most one thread writes and one reads at a time.
#[derive(Debug)]
pub struct RingPair {
    layout: RingLayout,
    own: Arc<File>,
    peer: Arc<File>,
    /// The last value of the peer's `Read` word that this side loaded. Loading it rarely leaves its cache line with the peer.
    seen_read: AtomicU64,
    /// Position up to which this process has read. It is published when the ring is empty or after [`CHUNK`] bytes.
    read: AtomicU64,
}

impl RingPair {
    /// Writes as many of `bytes` as there is room for, and returns how many. Returns `Err(AGAIN)` if there is no room, and
    /// `Err(PROTO)` if the numbers of the peer are impossible.
    pub fn write(&self, bytes: &[u8]) -> rustix::io::Result<usize> {
        let (written, room) = self.room(bytes.len())?;
        let len = bytes.len().min(room);
        // SAFETY: `len` bytes of the borrowed slice, which is no memory of a ring. The own file is mapped writable
        // (`OwnRings::create`), and `room` returns at most the bytes of the ring.
        unsafe { self.layout.put(&self.own, written, bytes.as_ptr(), len) };
        self.publish(Word::Written, written + len as u64);
        Ok(len)
    }

    /// Reads into as many of `bytes` as have arrived, and returns how many. Returns `Err(AGAIN)` if none have arrived, and
    /// `Err(PROTO)` if the numbers of the peer are impossible.
    pub fn read(&self, bytes: &mut [u8]) -> rustix::io::Result<usize> {
        let (read, unread) = self.unread()?;
        let len = bytes.len().min(unread);
        // SAFETY: `len` bytes of the slice, which is borrowed exclusively. `unread` returns at most the bytes of the ring.
        unsafe { self.layout.get(&self.peer, read, bytes.as_mut_ptr(), len) };
        self.note_read(read + len as u64, len == unread);
        Ok(len)
    }

    /// Writes the bytes of `windows` that follow the first `skip` bytes, as many as there is room for, and at most [`STEP`].
    /// Returns the number of bytes written.
    ///
    /// Fails as [`write`](Self::write) does, and with `InvalidInput` if the CPU cannot read one of the windows, or if no byte is
    /// left to write.
    pub fn write_windows(&self, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
        if windows.iter().any(|window| !window.host_addressable()) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a window that the CPU cannot read"));
        }
        let (written, room) = self.room(STEP)?;
        let (mut done, mut unpublished) = (0, 0);
        for (addr, len) in parts(windows, skip, room.min(STEP)) {
            // SAFETY: a part of a window of live tensors (promise 3) that the CPU can read (checked above), and no memory of a
            // ring. The own file is mapped writable (`OwnRings::create`). All parts together have at most as many bytes as
            // `room` returned.
            unsafe { self.layout.put(&self.own, written + done as u64, addr as *const u8, len) };
            (done, unpublished) = (done + len, unpublished + len);
            if unpublished >= CHUNK {
                self.publish(Word::Written, written + done as u64);
                unpublished = 0;
            }
        }
        self.publish(Word::Written, written + done as u64);
        some_bytes(done, "nothing is left to write")
    }

    /// Reads into the bytes of `windows` that follow the first `skip` bytes, as many as have arrived, and at most [`STEP`].
    /// Returns the number of bytes read.
    ///
    /// Fails as [`read`](Self::read) does, and with `InvalidInput` if the CPU cannot write one of the windows, or if no byte is
    /// left to read.
    pub fn read_windows(&self, windows: &[Window<'_>], skip: u64) -> io::Result<usize> {
        if windows.iter().any(|window| window.reach() != Reach::Host) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a window that the CPU cannot write"));
        }
        let (read, unread) = self.unread()?;
        let mut done = 0;
        for (addr, len) in parts(windows, skip, unread.min(STEP)) {
            // SAFETY: a part of a window of live tensors (promise 3) that the CPU can write (checked above). All parts together
            // have at most as many bytes as `unread` returned.
            unsafe { self.layout.get(&self.peer, read + done as u64, addr as *mut u8, len) };
            done += len;
            self.note_read(read + done as u64, done == unread);
        }
        some_bytes(done, "nothing is left to read")
    }

    /// Returns the bytes from the next one to write to the next page of the ring.
    pub fn unwritten_of_page(&self) -> usize {
        to_page(self.number(Word::Written))
    }

    /// Returns the bytes from the next one to read to the next page of the ring.
    pub fn unread_of_page(&self) -> usize {
        to_page(self.read.load(Ordering::Relaxed))
    }

    /// Returns whether `awaited` is there. Also returns `true` if the words of the peer are impossible, so that the next
    /// call reports the error.
    pub fn ready(&self, awaited: RingWait) -> bool {
        let found = match awaited {
            RingWait::Bytes => self.unread(),
            RingWait::Room => self.room(self.layout.size),
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
        self.own.word(self.layout.word(awaited.word())).store(1, Ordering::Relaxed);
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
            self.own.word(self.layout.word(awaited.word())).store(0, Ordering::Relaxed);
        }
    }

    /// Returns whether the other side sleeps until `awaited` is there. Call it after a write or a read.
    pub fn wakes(&self, awaited: RingWait) -> bool {
        fence(Ordering::SeqCst);
        self.peer.word(self.layout.word(awaited.word())).load(Ordering::Relaxed) != 0
    }

    /// Tells the other side that this one has closed the stream.
    pub fn close(&self) {
        self.publish(Word::Closed, 1);
    }

    /// Returns whether the other side has closed the stream. Returns `false` if its process was killed.
    pub fn peer_closed(&self) -> bool {
        self.peer.load(self.layout.word(Word::Closed)) != 0
    }

    /// Returns the position of the next byte to write, and the room. The room may be underestimated, but is at least `wanted`
    /// if that much is free. Returns `Err(AGAIN)` if there is none.
    fn room(&self, wanted: usize) -> rustix::io::Result<(u64, usize)> {
        let written = self.number(Word::Written);
        let room = |read: u64| {
            let unread = usize::try_from(written.wrapping_sub(read)).ok();
            unread.and_then(|unread| self.layout.size.checked_sub(unread))
        };
        let mut found = room(self.seen_read.load(Ordering::Relaxed));
        if found.is_none_or(|room| room < wanted) {
            let read = self.peer.load(self.layout.word(Word::Read));
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
        if all || read.wrapping_sub(self.number(Word::Read)) >= CHUNK as u64 {
            self.publish(Word::Read, read);
        }
    }

    /// Loads a word of this process.
    fn number(&self, word: Word) -> u64 {
        self.own.load(self.layout.word(word))
    }

    /// Stores a word of this process. A peer that loads it sees every earlier write (release).
    fn publish(&self, word: Word, number: u64) {
        self.own.word(self.layout.word(word)).store(number, Ordering::Release);
    }

    /// Returns how much was read, and how many bytes can be read now. `Err(AGAIN)` if there are none.
    fn unread(&self) -> rustix::io::Result<(u64, usize)> {
        let read = self.read.load(Ordering::Relaxed);
        match usize::try_from(self.peer.load(self.layout.word(Word::Written)).wrapping_sub(read)) {
            Ok(0) => Err(Errno::AGAIN),
            Ok(unread) if unread <= self.layout.size => Ok((read, unread)),
            _ => Err(Errno::PROTO),
        }
    }
}

/// Returns the bytes from position `at` to the next page of a ring.
#[expect(clippy::cast_possible_truncation, reason = "the remainder is less than the bytes of a page")]
fn to_page(at: u64) -> usize {
    (at.wrapping_neg() % PAGE as u64) as usize
}

/// Returns the addresses and lengths of parts of `windows`: at most `most` bytes that follow the first `skip` ones. No part has
/// more than [`CHUNK`] bytes.
fn parts(windows: &[Window<'_>], mut skip: u64, mut most: usize) -> impl Iterator<Item = (u64, usize)> {
    let left = windows.iter().map(move |window| {
        let passed = skip.min(window.len());
        skip -= passed;
        (window.addr() + passed, window.len() - passed)
    });
    let chunks = left.flat_map(|(addr, len)| {
        let chunk = move |at| (addr + at, usize::try_from(len - at).map_or(CHUNK, |len| len.min(CHUNK)));
        (0..len).step_by(CHUNK).map(chunk)
    });
    chunks.map_while(move |(addr, len)| {
        let len = len.min(most);
        most -= len;
        (len > 0).then_some((addr, len))
    })
}

/// Returns `bytes`, or an error of kind `InvalidInput` if it is 0, because callers take 0 for the end of the stream.
fn some_bytes(bytes: usize, otherwise: &'static str) -> io::Result<usize> {
    if bytes > 0 { Ok(bytes) } else { Err(io::Error::new(io::ErrorKind::InvalidInput, otherwise)) }
}

#[cfg(test)]
mod tests;
