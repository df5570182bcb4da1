//! Limits the address space that mappings of peers' memory take in this process, over all links.
//!
//! A peer chooses how much memory it offers. Without a limit, one offer could take all addresses of this
//! process, and its next allocation would then abort it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::process::{Resource, getrlimit};

use super::limits;
use crate::error::{Error, ErrorKind, Result};
use crate::model::Deadline;
use crate::sync::{Condvar, Mutex};

/// Default limit, as a multiple of the memory of the machine.
const TIMES_RAM: u64 = 4;

/// The limit for mappings, and the bytes that are reserved.
#[derive(Debug)]
pub struct MapBudget {
    limit: u64,
    counts: Mutex<Counts>,
    /// Signals that a reservation was returned.
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Counts {
    reserved: u64,
    /// The part of `reserved` that will be returned soon.
    releasing: u64,
}

/// A reservation; returned to the budget on drop.
#[derive(Debug)]
pub struct Reservation {
    budget: Arc<MapBudget>,
    bytes: u64,
    releasing: AtomicBool,
}

impl MapBudget {
    /// Creates a budget of `limit` bytes. The default is four times the memory of this machine.
    pub fn new(limit: Option<u64>) -> Arc<MapBudget> {
        let limit = limit.unwrap_or_else(|| limits::machine_bytes().saturating_mul(TIMES_RAM));
        Arc::new(MapBudget { limit, counts: Mutex::default(), returned: Condvar::new() })
    }

    /// Returns the limit in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the bytes that are reserved now.
    #[cfg(feature = "testing")]
    pub fn used(&self) -> u64 {
        self.counts.lock().reserved
    }

    /// Reserves `bytes` bytes.
    ///
    /// If they do not fit, waits until `deadline` at most, as long as memory of ended links is being
    /// unmapped. Then returns `Err` of kind [`ErrorKind::System`], with the limit and the bytes in use. A
    /// limited address space is filled by half at most: a larger request is also refused, because this
    /// process could then allocate little more itself.
    pub fn reserve(self: &Arc<Self>, bytes: u64, deadline: Deadline) -> Result<Reservation> {
        let mut counts = self.counts.lock();
        loop {
            let Err(refused) = self.fits(bytes, counts.reserved) else { break };
            if counts.releasing == 0 || deadline.passed() {
                return Err(refused);
            }
            counts = self.returned.wait_timeout(counts, deadline.wait_limit()).0;
        }
        counts.reserved += bytes;
        Ok(Reservation { budget: self.clone(), bytes, releasing: AtomicBool::new(false) })
    }

    fn fits(&self, bytes: u64, reserved: u64) -> Result<()> {
        if reserved.checked_add(bytes).is_none_or(|sum| sum > self.limit) {
            let text = "mapping this memory would exceed the limit for all peers";
            return Err(Error::new(ErrorKind::System, text)
                .with("bytes", bytes)
                .with("mapped_bytes", reserved)
                .with("limit_bytes", self.limit));
        }
        match limits::address_space_left() {
            Some(left) if bytes > left / 2 => Err(Error::new(
                ErrorKind::System,
                "this process has too little address space left to map the memory of a peer",
            )
            .with("bytes", bytes)
            .with("left_bytes", left)
            .with("limit_as_bytes", getrlimit(Resource::As).current.unwrap_or(u64::MAX))),
            _ => Ok(()),
        }
    }
}

impl Reservation {
    /// Announces that this reservation will be returned soon, because its link has ended. Other requests then
    /// wait for it.
    pub fn release_soon(&self) {
        if !self.releasing.swap(true, Ordering::Relaxed) {
            self.budget.counts.lock().releasing += self.bytes;
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut counts = self.budget.counts.lock();
        counts.reserved -= self.bytes;
        if *self.releasing.get_mut() {
            counts.releasing -= self.bytes;
        }
        drop(counts);
        self.budget.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Duration;

    use super::*;

    fn soon() -> Deadline {
        Deadline::after(Duration::from_millis(1))
    }

    #[test]
    fn memory_that_is_being_unmapped_is_waited_for() {
        let budget = MapBudget::new(Some(100));
        let (kept, ended) = (budget.reserve(60, soon()).unwrap(), budget.reserve(40, soon()).unwrap());
        ended.release_soon();
        ended.release_soon();
        let minute = Deadline::after(Duration::from_secs(60));
        thread::scope(|scope| {
            let newcomer = scope.spawn(|| budget.reserve(40, minute));
            let late = budget.reserve(40, soon()).unwrap_err();
            assert_eq!(late.fact("mapped_bytes"), Some("100"));
            drop(ended);
            drop(newcomer.join().unwrap().unwrap());
        });
        // No reservation is about to be returned any more, so the request is refused at once.
        let hour = Deadline::after(Duration::from_secs(3600));
        assert_eq!(budget.reserve(41, hour).unwrap_err().fact("mapped_bytes"), Some("60"));
        drop(kept);
        assert_eq!((budget.used(), budget.counts.lock().releasing), (0, 0));
    }
}
