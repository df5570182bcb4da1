//! Numbers that one process writes and others read, in memory of a length that is chosen at run time.
//!
//! `crates/keeper` keeps the index of its keys in them. Memory of a fixed length is a `SharedMapping`.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{MapBudget, PeerMapping, Region};
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;

const WORD: u64 = size_of::<u64>() as u64;

/// Numbers of this process, which others can map read-only.
#[derive(Debug)]
pub struct SharedWords {
    region: Region,
    count: u64,
}

impl SharedWords {
    /// Creates `count` numbers that are all 0. `name` appears in errors. Fails as [`Region::shared`] does.
    pub fn new(name: &str, count: u64) -> Result<SharedWords> {
        Ok(SharedWords { region: Region::shared(name, bytes(count)?)?, count })
    }

    /// Returns the number at position `at`.
    ///
    /// # Panics
    /// If there is no such number.
    #[inline]
    pub fn word(&self, at: u64) -> &AtomicU64 {
        assert!(at < self.count, "no such number");
        // SAFETY: the number lies inside the region (checked above), which lives as long as `self` (promise 1), and is aligned,
        // because the region starts at a page. No other value has this region, so its bytes are accessed as atomics only.
        unsafe { &*((self.region.base() + at * WORD) as *const AtomicU64) }
    }

    /// Returns the descriptor, for peers to map read-only; `None` if the kernel cannot prevent them from writing.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.region.descriptor()
    }
}

/// Numbers of another process, mapped read-only.
#[derive(Debug)]
pub struct PeerWords {
    mapping: Arc<PeerMapping>,
    count: u64,
}

impl PeerWords {
    /// Maps `count` numbers of the descriptor that the peer got from [`SharedWords::descriptor`] and sent. Fails as
    /// [`PeerMapping::map`] does.
    pub fn map(fd: OwnedFd, count: u64, budget: &Arc<MapBudget>, deadline: Deadline) -> Result<PeerWords> {
        Ok(PeerWords { mapping: PeerMapping::map(fd, bytes(count)?, budget, deadline)?, count })
    }

    /// Loads the number at position `at`, without order among other loads.
    ///
    /// # Panics
    /// If there is no such number.
    #[inline]
    pub fn load(&self, at: u64) -> u64 {
        assert!(at < self.count, "no such number");
        // SAFETY: the number lies inside the mapping (checked above), which lives as long as `self`, whose file cannot shrink
        // (`PeerMapping::map`) and which is aligned to pages. This process accesses it only here; its owner can only store
        // other numbers. A relaxed load is permitted on read-only memory.
        unsafe { &*((self.mapping.base() + at * WORD) as *const AtomicU64) }.load(Ordering::Relaxed)
    }
}

fn bytes(count: u64) -> Result<u64> {
    let too_many = || Error::new(ErrorKind::OutOfMemory, "the numbers are larger than the address space");
    count.checked_mul(WORD).ok_or_else(|| too_many().with("numbers", count))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn numbers_of_a_peer_are_seen_as_they_change() {
        let (own, budget) = (SharedWords::new("a test", 1000).unwrap(), MapBudget::new(None));
        let descriptor = || own.descriptor().unwrap().try_clone_to_owned().unwrap();
        let soon = Deadline::after(Duration::from_secs(5));
        let peer = PeerWords::map(descriptor(), 1000, &budget, soon).unwrap();
        own.word(999).store(7, Ordering::Relaxed);
        assert_eq!((peer.load(0), peer.load(999)), (0, 7));
        assert!(std::panic::catch_unwind(|| peer.load(1000)).is_err());
        assert!(std::panic::catch_unwind(|| own.word(1000).load(Ordering::Relaxed)).is_err());
        let refused = PeerWords::map(descriptor(), 1 << 20, &budget, soon).unwrap_err();
        assert_eq!(refused.reason(), "the peer's memory is shorter than announced");
        assert_eq!(SharedWords::new("a test", u64::MAX).unwrap_err().kind(), ErrorKind::OutOfMemory);
    }
}
