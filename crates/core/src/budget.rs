//! The memory that peers may make this process hold. All links share one budget.
//!
//! A [`BudgetShare`] is what one request, reply or notification of a peer takes of it. It is charged before memory is allocated: for
//! a frame when its header has arrived, and for the lists of `fallible` that are allocated while [`BudgetShare::charged`] runs.
//! Dropping the share returns all of it. docs/security.md has the numbers (`tests/test_hostile_memory.py`).

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::sync::{Condvar, Mutex, OnDrop};

/// Bytes for which all links compete.
const COMMON: u64 = 288 << 20;
/// Bytes of [`COMMON`] that notifications may take.
const NOTIFICATIONS: u64 = 96 << 20;
/// A link may take at most this many times as much of [`COMMON`] as it leaves free: three quarters of what other links leave.
const TIMES_FREE: u64 = 3;
/// Bytes that are divided equally among the links that peers may make, for each [`MemoryUse`]. A link can always use its part,
/// whatever the other links hold.
const RESERVED: [u64; 2] = [64 << 20, 32 << 20];
/// The largest part of one link in [`RESERVED`].
const LARGEST_PART: u64 = 1 << 20;
/// Bytes of a call that are not charged. The number of call streams bounds how many calls there are. What is kept for later calls is
/// charged ([`BudgetShare::keep`]).
const FREE: u64 = 16 << 10;

/// What memory is for. The values are the positions in lists of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryUse {
    /// A request or a reply: its frame, what it contains, and what answering it takes.
    Call,
    /// A notification that waits to be polled.
    Notification,
}

/// The memory that all peers together use.
#[derive(Debug)]
pub struct Budget {
    /// The part of each link in [`RESERVED`].
    part: [u64; 2],
    used: Mutex<Used>,
    freed: Condvar,
}

/// The bytes that a peer holds for one purpose.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// Bytes of [`RESERVED`]: at most the part of one link.
    reserved: u64,
    /// Bytes of [`COMMON`].
    common: u64,
}

#[derive(Debug, Default)]
struct Used {
    common: u64,
    /// The part of `common` that notifications take.
    notifications: u64,
    reserved: [u64; 2],
}

/// The memory that one peer uses.
#[derive(Debug)]
pub struct PeerBudget {
    all: Arc<Budget>,
    /// Bytes for each purpose. They change only under the lock of [`Budget::used`].
    held: Mutex<[Held; 2]>,
}

/// A part of the budget, returned when dropped.
#[derive(Debug)]
pub struct BudgetShare {
    peer: Arc<PeerBudget>,
    purpose: MemoryUse,
    /// Bytes that were allocated.
    used: AtomicU64,
    /// Bytes that were taken from the budget: at least `used`, unless that is at most [`FREE`] and not kept.
    held: AtomicU64,
    /// Whether what was allocated is kept for later calls, so that all of it is charged.
    kept: AtomicBool,
}

thread_local! {
    /// The share to which this thread charges what it allocates.
    static CHARGED: RefCell<Option<Arc<BudgetShare>>> = const { RefCell::new(None) };
}

/// Charges `bytes` bytes to the share that is in effect on this thread. Returns `Err(OutOfMemory)` if the budget does not
/// allow them. Without a share, this has no effect.
#[inline]
pub(crate) fn charge(bytes: usize) -> Result<()> {
    let charged = |share: &RefCell<Option<Arc<BudgetShare>>>| match &*share.borrow() {
        Some(share) => share.grow(bytes as u64),
        None => Ok(()),
    };
    // A thread that ends has no share.
    CHARGED.try_with(charged).unwrap_or(Ok(()))
}

/// Runs `work`, which has freed all that it allocated when it returns, and returns to the budget what it has charged.
pub(crate) fn temporary<T>(work: impl FnOnce() -> T) -> T {
    let share = CHARGED.try_with(|share| share.borrow().clone()).ok().flatten();
    let before = share.as_ref().map(|share| (share.used(), share.held.load(Ordering::Relaxed)));
    let result = work();
    if let (Some(share), Some((used, held))) = (share, before) {
        share.used.store(used, Ordering::Relaxed);
        share.give_back_to(held.max(share.needed(used)));
    }
    result
}

impl Budget {
    /// Creates the budget of a process in which peers may make `links` links.
    pub fn new(links: usize) -> Arc<Budget> {
        let part = RESERVED.map(|bytes| (bytes / links.max(1) as u64).min(LARGEST_PART));
        Arc::new(Budget { part, used: Mutex::default(), freed: Condvar::new() })
    }

    /// Returns the bytes in use.
    #[cfg(all(test, not(loom)))]
    fn used(&self) -> u64 {
        let used = self.used.lock();
        used.common + used.reserved.iter().sum::<u64>()
    }
}

impl PeerBudget {
    /// Creates the account of the peer of one link.
    pub fn new(all: &Arc<Budget>) -> Arc<PeerBudget> {
        Arc::new(PeerBudget { all: all.clone(), held: Mutex::default() })
    }

    /// Takes `bytes` bytes for a call, and `ahead` more for what will be allocated soon. Waits at most `limit` until they fit;
    /// then returns `Err(OutOfMemory)`. The calling thread must hold no share, so that no two threads wait for each other.
    /// Requests that wait for a thread hold theirs. Only if these fill the budget of the link, the threads wait for them, until `limit`.
    pub fn admit(self: &Arc<Self>, bytes: u64, ahead: u64, limit: Duration) -> Result<Arc<BudgetShare>> {
        let share = self.share(MemoryUse::Call, bytes);
        let needed = share.needed(bytes + ahead);
        if needed > 0 {
            let since = Instant::now();
            let mut used = self.all.used.lock();
            while let Err(refused) = self.take(&mut used, MemoryUse::Call, needed) {
                let left = limit.saturating_sub(since.elapsed());
                if left.is_zero() {
                    return Err(refused);
                }
                used = self.all.freed.wait_timeout(used, left).0;
            }
            share.held.store(needed, Ordering::Relaxed);
        }
        Ok(Arc::new(share))
    }

    /// Takes `bytes` bytes for a notification. Returns `Err(OutOfMemory)` if they do not fit.
    pub fn notification(self: &Arc<Self>, bytes: u64) -> Result<BudgetShare> {
        self.take(&mut self.all.used.lock(), MemoryUse::Notification, bytes)?;
        let share = self.share(MemoryUse::Notification, bytes);
        share.held.store(bytes, Ordering::Relaxed);
        Ok(share)
    }

    fn share(self: &Arc<Self>, purpose: MemoryUse, used: u64) -> BudgetShare {
        BudgetShare {
            peer: self.clone(),
            purpose,
            used: AtomicU64::new(used),
            held: AtomicU64::new(0),
            kept: AtomicBool::new(false),
        }
    }

    fn take(&self, used: &mut Used, purpose: MemoryUse, bytes: u64) -> Result<()> {
        let mut held = self.held.lock();
        // More links than planned may have used up what is reserved. The rest is common.
        let part_left = self.all.part[purpose as usize].saturating_sub(held[purpose as usize].reserved);
        let reserved = bytes.min(part_left).min(RESERVED[purpose as usize] - used.reserved[purpose as usize]);
        let common = bytes - reserved;
        let own_common = held.iter().map(|held| held.common).sum::<u64>().saturating_add(common);
        let is_notification = purpose == MemoryUse::Notification;
        let fits = common == 0
            || (COMMON.checked_sub(used.common.saturating_add(common)))
                .is_some_and(|left| own_common <= TIMES_FREE * left)
                && (!is_notification || used.notifications + common <= NOTIFICATIONS);
        if !fits {
            return Err(refusal(bytes, held.iter().map(|held| held.reserved + held.common).sum(), used));
        }
        held[purpose as usize].reserved += reserved;
        held[purpose as usize].common += common;
        used.reserved[purpose as usize] += reserved;
        used.common += common;
        used.notifications += if is_notification { common } else { 0 };
        Ok(())
    }

    fn give_back(&self, purpose: MemoryUse, bytes: u64) {
        let mut used = self.all.used.lock();
        let mut held = self.held.lock();
        let own = &mut held[purpose as usize];
        let common = bytes.min(own.common);
        let reserved = (bytes - common).min(own.reserved);
        own.common -= common;
        own.reserved -= reserved;
        used.reserved[purpose as usize] -= reserved;
        used.common -= common;
        used.notifications -= if purpose == MemoryUse::Notification { common } else { 0 };
        drop(held);
        drop(used);
        self.all.freed.notify_all();
    }
}

impl BudgetShare {
    /// Runs `work`. What it allocates on this thread with `fallible` is charged to this share, and fails with `OutOfMemory` if
    /// the budget does not allow it.
    pub fn charged<T>(self: &Arc<Self>, work: impl FnOnce() -> T) -> T {
        let before = CHARGED.try_with(|share| share.replace(Some(self.clone())));
        let mut before = before.ok().flatten();
        let _restore = OnDrop(move || {
            let before = before.take();
            let _ = CHARGED.try_with(|share| share.replace(before));
        });
        work()
    }

    /// Returns the bytes that were allocated.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    /// Notes that only `used` bytes are still allocated, and returns the rest to the budget.
    pub fn shrink_to(&self, used: u64) {
        self.used.fetch_min(used, Ordering::Relaxed);
        self.give_back_to(self.needed(self.used()));
    }

    /// Notes that `bytes` bytes were freed. What was taken from the budget stays taken until [`trim`](Self::trim), because
    /// more will be allocated.
    pub fn freed(&self, bytes: u64) {
        self.used.store(self.used().saturating_sub(bytes), Ordering::Relaxed);
    }

    /// Returns to the budget what was taken and is not allocated.
    pub fn trim(&self) {
        self.shrink_to(u64::MAX);
    }

    /// Charges all that was allocated and `more` bytes, however few they are, because they are kept for later calls. Returns
    /// `Err(OutOfMemory)` if the budget does not allow them; then they must not be kept.
    pub fn keep(&self, more: u64) -> Result<()> {
        self.kept.store(true, Ordering::Relaxed);
        self.grow(more).inspect_err(|_| self.kept.store(false, Ordering::Relaxed))
    }

    fn grow(&self, bytes: u64) -> Result<()> {
        let used = self.used().saturating_add(bytes);
        let more = self.needed(used).saturating_sub(self.held.load(Ordering::Relaxed));
        if more > 0 {
            self.peer.take(&mut self.peer.all.used.lock(), self.purpose, more)?;
            self.held.fetch_add(more, Ordering::Relaxed);
        }
        self.used.store(used, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the bytes to take from the budget for a share of `used` bytes.
    fn needed(&self, used: u64) -> u64 {
        let free = self.purpose == MemoryUse::Call && used <= FREE && !self.kept.load(Ordering::Relaxed);
        if free { 0 } else { used }
    }

    fn give_back_to(&self, held: u64) {
        let before = self.held.fetch_min(held, Ordering::Relaxed);
        if before > held {
            self.peer.give_back(self.purpose, before - held);
        }
    }
}

impl Drop for BudgetShare {
    fn drop(&mut self) {
        self.give_back_to(0);
    }
}

#[cold]
fn refusal(bytes: u64, held: u64, used: &Used) -> Error {
    let text = "the memory for peers is in use: try again later, or with a smaller request";
    Error::new(ErrorKind::OutOfMemory, text)
        .with("asked_bytes", bytes)
        .with("used_by_peer", held)
        .with("used_by_all", used.common + used.reserved.iter().sum::<u64>())
        .with("limit_of_all", COMMON + RESERVED.iter().sum::<u64>())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: Duration = Duration::ZERO;

    fn peers(links: usize, count: usize) -> (Arc<Budget>, Vec<Arc<PeerBudget>>) {
        let all = Budget::new(links);
        let peers = (0..count).map(|_| PeerBudget::new(&all)).collect();
        (all, peers)
    }

    #[test]
    fn small_calls_are_free_and_larger_ones_return_what_they_took() {
        let (all, peers) = peers(64, 1);
        let small = peers[0].admit(FREE, 0, NOW).unwrap();
        assert_eq!(all.used(), 0);
        let large = peers[0].admit(2 * MIB, 4 * MIB, NOW).unwrap();
        assert_eq!(all.used(), 6 * MIB);
        // What was taken ahead is used first.
        large.charged(|| charge(3 << 20)).unwrap();
        assert_eq!(all.used(), 6 * MIB);
        large.charged(|| charge(3 << 20)).unwrap();
        assert_eq!(all.used(), 8 * MIB);
        large.charged(|| temporary(|| charge(5 << 20))).unwrap();
        assert_eq!(all.used(), 8 * MIB);
        large.freed(2 * MIB);
        assert_eq!(all.used(), 8 * MIB);
        large.trim();
        assert_eq!(all.used(), 6 * MIB);
        large.shrink_to(MIB);
        assert_eq!(all.used(), MIB);
        // The small call is charged as a whole once it is not small any more.
        small.charged(|| charge(1)).unwrap();
        assert_eq!(all.used(), MIB + FREE + 1);
        charge(1 << 40).unwrap();
        drop((small, large));
        assert_eq!(all.used(), 0);
    }

    #[test]
    fn one_link_leaves_a_quarter_and_no_link_can_take_the_part_of_another() {
        let (all, peers) = peers(64, 64);
        let part = RESERVED[0] / 64;
        assert!(peers[0].admit(COMMON * 3 / 4 + part + 4, 0, NOW).is_err());
        let mut held = vec![peers[0].admit(COMMON * 3 / 4 + part, 0, NOW).unwrap()];
        // Many greedy links, one after the other.
        for peer in &peers[1..60] {
            while let Ok(share) = peer.admit(MIB / 4, 0, NOW) {
                held.push(share);
            }
        }
        assert!(all.used() <= COMMON + RESERVED[0]);
        for peer in &peers[60..] {
            let share = peer.admit(part, 0, NOW).unwrap();
            let error = share.charged(|| charge(40 << 20)).unwrap_err();
            assert_eq!(
                (error.kind(), error.fact("limit_of_all")),
                (ErrorKind::OutOfMemory, Some("402653184"))
            );
            held.push(share);
        }
        // More links than planned may get no part.
        let late = PeerBudget::new(&all);
        for peer in &peers[1..60] {
            held.extend(peer.admit(part, 0, NOW));
        }
        assert!(late.admit(part, 0, NOW).is_err());
        drop(held);
        assert_eq!(all.used(), 0);
    }

    #[test]
    fn links_beyond_those_planned_use_common_memory() {
        let (all, peers) = peers(64, 65);
        let part = RESERVED[0] / 64;
        let common = || all.used.lock().common;
        let mut held: Vec<_> = peers[..64].iter().map(|peer| peer.admit(part, 0, NOW).unwrap()).collect();
        assert_eq!(common(), 0);
        held.push(peers[64].admit(part, 0, NOW).unwrap());
        assert_eq!((common(), all.used()), (part, RESERVED[0] + part));
        // What is returned is common first.
        held.push(peers[0].admit(part, 0, NOW).unwrap());
        held.remove(0);
        assert_eq!((common(), all.used()), (part, RESERVED[0] + part));
        drop(held);
        assert_eq!((common(), all.used()), (0, 0));
    }

    #[test]
    fn what_is_kept_is_charged_as_a_whole() {
        let (all, peers) = peers(64, 1);
        let share = peers[0].admit(100, 0, NOW).unwrap();
        share.shrink_to(40);
        assert_eq!(all.used(), 0);
        share.keep(2).unwrap();
        assert_eq!((share.used(), all.used()), (42, 42));
        share.trim();
        assert_eq!(all.used(), 42);
        let other = peers[0].admit(1, 0, NOW).unwrap();
        assert!(other.keep(1 << 40).is_err());
        assert_eq!((other.used(), all.used()), (1, 42), "what is not kept is not charged");
        drop((share, other));
        assert_eq!(all.used(), 0);
    }

    #[test]
    fn notifications_leave_memory_for_calls() {
        let (all, peers) = peers(64, 64);
        let mut held = Vec::new();
        for peer in &peers[1..] {
            while let Ok(share) = peer.notification(MIB / 8) {
                held.push(share);
            }
        }
        assert!(all.used.lock().notifications <= NOTIFICATIONS);
        assert!(all.used() <= NOTIFICATIONS + RESERVED[1]);
        // A link that has none always has room for some.
        peers[0].notification(RESERVED[1] / 64).unwrap();
        peers[0].admit(128 * MIB, 0, NOW).unwrap();
    }

    #[test]
    fn a_call_waits_for_memory() {
        let (_, peers) = peers(64, 2);
        let share = peers[0].admit(COMMON / 2, 0, NOW).unwrap();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| peers[1].admit(COMMON / 2, 0, Duration::from_secs(600)));
            drop(share);
            waiting.join().unwrap().unwrap();
        });
    }
}
