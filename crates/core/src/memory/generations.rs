//! One number per place of the cache table, raised when what was there may have changed: shared with peers, who read it.
//!
//! A peer that reads memory one-sidedly compares the number it was told with the one here before it trusts the place,
//! and again after the read (`generations_of_another_process_are_seen_as_they_rise`). Not for: deciding when a number rises (`table`).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use super::memfd::seal;
use super::peer_mapping::refuse_shrinking;
use super::{MapBudget, Reserved, memfd};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// Places with a number: 128 MiB of address space, of which only the pages of used places ever exist.
const PLACES: u32 = 1 << 24;
const BYTES: usize = PLACES as usize * size_of::<u64>();

/// What a place without a number always has: never equal to anything a reader may trust.
const NEVER: u64 = u64::MAX;

/// The numbers of this process.
#[derive(Debug)]
pub struct Generations {
    numbers: Numbers,
    descriptor: OwnedFd,
    sealed: bool,
}

impl Generations {
    /// Bytes of address space that the numbers of one process take, here and at each peer that maps them.
    pub const BYTES: u64 = BYTES as u64;

    /// Numbers that all start at 0.
    pub fn new() -> Result<Generations> {
        let made = || {
            let descriptor = memfd::create("llm_datadist generations", Self::BYTES, MemfdFlags::empty())?;
            let numbers = Numbers::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE)?;
            let sealed = seal(&descriptor);
            Ok(Generations { numbers, descriptor, sealed })
        };
        made().map_err(|errno| memfd::refused("generations of the cache table", Self::BYTES, errno))
    }

    /// The number of `place`; the largest one, which no reader may trust, where there are no numbers any more.
    #[must_use]
    pub fn of(&self, place: u32) -> u64 {
        self.numbers.of(place)
    }

    /// Raises the number of `place`: from now on no reader trusts what it was told before. Whatever this thread writes
    /// afterwards is seen by others only after the new number.
    pub fn bump(&self, place: u32) {
        if let Some(number) = self.numbers.at(place) {
            number.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    /// The descriptor behind them, for peers to map; none where the kernel cannot keep peers from writing.
    #[must_use]
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.sealed.then(|| self.descriptor.as_fd())
    }
}

/// The numbers of a peer, as they are now.
#[derive(Debug)]
pub struct PeerGenerations {
    numbers: Numbers,
    /// Returned after the mapping has gone: fields drop in order.
    reserved: Reserved,
}

impl PeerGenerations {
    /// Maps what [`Generations::descriptor`] gave the peer to send. `Err` if it is anything else, or `budget` is used up at
    /// `deadline`.
    pub fn map(fd: OwnedFd, budget: &Arc<MapBudget>, deadline: Deadline) -> Result<PeerGenerations> {
        refuse_shrinking(&fd, Generations::BYTES)?;
        let reserved = budget.reserve(Generations::BYTES, deadline)?;
        let numbers = Numbers::map(&fd, ProtFlags::READ).map_err(|error| {
            Error::new(ErrorKind::System, "the peer's generations could not be mapped")
                .with("bytes", BYTES)
                .because(std::io::Error::from(error))
        })?;
        // The mapping holds the memory from here on.
        drop(fd);
        Ok(PeerGenerations { numbers, reserved })
    }

    /// Notes that its link has ended, so that it will be unmapped soon.
    pub fn leave(&self) {
        self.reserved.leave();
    }

    /// The number of `place`, to compare before a read.
    #[must_use]
    pub fn of(&self, place: u32) -> u64 {
        self.numbers.of(place)
    }

    /// Whether `place` still has `generation`, asked after a read: if so, nothing read before was already reused.
    #[must_use]
    pub fn still(&self, place: u32, generation: u64) -> bool {
        // The reads before stay before the look at the number.
        fence(Ordering::Acquire);
        generation != NEVER && self.numbers.of(place) == generation
    }
}

/// A mapping of the numbers, given back on drop.
#[derive(Debug)]
struct Numbers(usize);

impl Numbers {
    fn map(descriptor: &OwnedFd, rights: ProtFlags) -> rustix::io::Result<Numbers> {
        // SAFETY: no address is asked for, so the kernel chooses a range nobody uses.
        let at = unsafe { mmap(null_mut(), BYTES, rights, MapFlags::SHARED, descriptor, 0) }?;
        Ok(Numbers(at as usize))
    }

    fn at(&self, place: u32) -> Option<&AtomicU64> {
        let offset = place as usize * size_of::<u64>();
        // SAFETY: inside the mapping, which lives as long as `self`, whose file cannot shrink or is this process's own,
        // aligned, and touched by everybody only as an atomic.
        (place < PLACES).then(|| unsafe { &*((self.0 + offset) as *const AtomicU64) })
    }

    fn of(&self, place: u32) -> u64 {
        let Some(number) = self.at(place) else { return NEVER };
        // A relaxed load is the one that may be done on memory without the right to write; the fence makes it acquire.
        let number = number.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        number
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        // SAFETY: mapped for this value alone; every reference into it borrowed the value.
        let _ = unsafe { munmap(self.0 as *mut std::ffi::c_void, BYTES) };
    }
}
