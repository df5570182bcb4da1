//! Generation numbers of the cache table: one for each entry, raised when its cache may have changed, and
//! shared with peers. Grants have generations in the same memory, raised when they end.
//!
//! A peer that reads memory one-sidedly compares this number with the one that it was sent with the entry's
//! index, before the read and again after it. Only if both are equal does it accept the bytes
//! (`generations_of_a_peer_are_seen_as_they_rise`). The table in `cache` decides when a number rises.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use rustix::fs::MemfdFlags;
use rustix::mm::ProtFlags;

use super::memfd::seal;
use super::peer_mapping::refuse_shrinking;
use super::shared_mapping::SharedMapping;
use super::{MapBudget, Reservation, memfd};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

/// Number of entries that have a generation. They take 128 MiB of address space, of which only pages with
/// used entries use memory.
const ENTRIES: u32 = 1 << 24;
/// Number of those that belong to grants; the others belong to entries of the cache table.
const GRANTS: u32 = 1 << 16;
const BYTES: usize = ENTRIES as usize * size_of::<u64>();

/// The generation of every entry without a number. A reader never accepts it.
const NEVER: u64 = u64::MAX;

/// The generations of this process.
#[derive(Debug)]
pub struct Generations {
    numbers: Numbers,
    descriptor: OwnedFd,
    sealed: bool,
}

impl Generations {
    /// Bytes of address space that the generations take, in their own process and in each peer that maps
    /// them.
    pub const BYTES: u64 = BYTES as u64;
    /// Number of entries for caches.
    pub const CACHES: u32 = ENTRIES - GRANTS;
    /// Number of entries for grants.
    pub const GRANTS: u32 = GRANTS;

    /// Creates generations that are all 0. Returns `Err` of kind [`ErrorKind::OutOfMemory`] if memory is
    /// short, and of kind [`ErrorKind::System`] if a limit of the process or the system prevents it.
    pub fn new() -> Result<Generations> {
        let made = || {
            let descriptor = memfd::create("llm_datadist generations", Self::BYTES, MemfdFlags::empty())?;
            let numbers = Numbers(SharedMapping::map(&descriptor, ProtFlags::READ | ProtFlags::WRITE)?);
            let sealed = seal(&descriptor);
            Ok(Generations { numbers, descriptor, sealed })
        };
        made().map_err(|errno| memfd::refused("generations of the cache table", Self::BYTES, errno))
    }

    /// Returns the generation of the entry `index`. Entries without a number have the largest value, which no
    /// reader accepts.
    pub fn of(&self, index: u32) -> u64 {
        self.numbers.number(cache_offset(index))
    }

    /// Raises the generation of the entry `index`. From then on no reader accepts what it learned about the
    /// entry before. Other threads and processes see the new number before anything that this thread writes
    /// afterwards.
    pub fn bump(&self, index: u32) {
        self.numbers.raise(cache_offset(index));
    }

    /// Returns the generation of the grant in place `slot`.
    pub fn of_grant(&self, slot: u32) -> u64 {
        self.numbers.number(grant_offset(slot))
    }

    /// Raises the generation of the grant in place `slot`, with the guarantees of [`bump`](Self::bump).
    pub fn bump_grant(&self, slot: u32) {
        self.numbers.raise(grant_offset(slot));
    }

    /// Returns the descriptor, for peers to map read-only; `None` if the kernel cannot prevent peers from
    /// writing.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.sealed.then(|| self.descriptor.as_fd())
    }
}

/// A live, read-only view of a peer's generations.
#[derive(Debug)]
pub struct PeerGenerations {
    numbers: Numbers,
    /// Returned to the budget after the memory is unmapped, because fields drop in order.
    reserved: Reservation,
}

impl PeerGenerations {
    /// Maps the descriptor that the peer got from [`Generations::descriptor`] and sent.
    ///
    /// Returns `Err` of kind [`ErrorKind::System`] if the descriptor is anything else or cannot be mapped, or
    /// if `budget` has too few bytes left at `deadline`.
    pub fn map(fd: OwnedFd, budget: &Arc<MapBudget>, deadline: Deadline) -> Result<PeerGenerations> {
        refuse_shrinking(&fd, Generations::BYTES)?;
        let reserved = budget.reserve(Generations::BYTES, deadline)?;
        let numbers = SharedMapping::map(&fd, ProtFlags::READ).map_err(|error| {
            Error::new(ErrorKind::System, "the peer's generations could not be mapped")
                .with("bytes", BYTES)
                .because(std::io::Error::from(error))
        })?;
        // From here on the mapping keeps the memory alive.
        drop(fd);
        Ok(PeerGenerations { numbers: Numbers(numbers), reserved })
    }

    /// Announces that this mapping will be removed soon, because its link has ended.
    pub fn release_soon(&self) {
        self.reserved.release_soon();
    }

    /// Returns whether the entry `index` still has `generation`. After a read, `true` means that the memory
    /// had not been reused when it was read.
    pub fn still(&self, index: u32, generation: u64) -> bool {
        self.numbers.still(cache_offset(index), generation)
    }

    /// Returns whether the grant in place `slot` still has `generation`, with the guarantees of
    /// [`still`](Self::still).
    pub fn grant_still(&self, slot: u32, generation: u64) -> bool {
        self.numbers.still(grant_offset(slot), generation)
    }
}

/// Returns the offset of the generation of an entry of the cache table.
fn cache_offset(index: u32) -> Option<usize> {
    (index < ENTRIES - GRANTS).then_some(index as usize * size_of::<u64>())
}

/// Returns the offset of the generation of a grant.
fn grant_offset(slot: u32) -> Option<usize> {
    (slot < GRANTS).then(|| (ENTRIES - GRANTS + slot) as usize * size_of::<u64>())
}

/// Generation numbers, by their offset. `None` is the offset of what has no number.
#[derive(Debug)]
struct Numbers(SharedMapping<BYTES, BYTES>);

impl Numbers {
    fn number(&self, offset: Option<usize>) -> u64 {
        offset.map_or(NEVER, |offset| self.0.load(offset))
    }

    fn raise(&self, offset: Option<usize>) {
        if let Some(offset) = offset {
            self.0.word(offset).fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
        }
    }

    fn still(&self, offset: Option<usize>, generation: u64) -> bool {
        // Keeps the reads of the data before the read of the number.
        fence(Ordering::Acquire);
        generation != NEVER && self.number(offset) == generation
    }
}
