//! Stalls reads of memory by process id, as if it were behind userfaultfd, without the privileges
//! that userfaultfd needs.

use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use llm_datadist_core::testing::memory::BEFORE_READ;

static STALLED: Mutex<Stalls> = Mutex::new(Stalls { ranges: Vec::new(), last: 0, waiting: Vec::new() });
static CHANGED: Condvar = Condvar::new();

struct Stalls {
    ranges: Vec<(u64, Range<u64>)>,
    last: u64,
    /// Addresses at which a read waits now.
    waiting: Vec<u64>,
}

/// A range of addresses, in any process, at which reads by process id wait until this value drops.
#[derive(Debug)]
pub struct Stall(u64, Range<u64>);

impl Stall {
    /// Makes reads of `addresses` wait from now on.
    #[must_use]
    pub fn new(addresses: Range<u64>) -> Stall {
        // The same hook each time, so it does not matter who sets it.
        let _ = BEFORE_READ.set(pass);
        let mut stalls = locked();
        stalls.last += 1;
        let number = stalls.last;
        stalls.ranges.push((number, addresses.clone()));
        Stall(number, addresses)
    }

    /// Returns the number of reads that wait at these addresses.
    pub fn waiting(&self) -> usize {
        locked().waiting.iter().filter(|at| self.1.contains(at)).count()
    }
}

impl Drop for Stall {
    fn drop(&mut self) {
        locked().ranges.retain(|(number, _)| *number != self.0);
        CHANGED.notify_all();
    }
}

/// Waits as long as one of `addresses` lies in a stalled range.
fn pass(addresses: &[u64]) {
    let mut stalls = locked();
    let stalled = |stalls: &Stalls| {
        addresses.iter().copied().find(|at| stalls.ranges.iter().any(|(_, range)| range.contains(at)))
    };
    while let Some(at) = stalled(&stalls) {
        stalls.waiting.push(at);
        CHANGED.notify_all();
        stalls = CHANGED.wait(stalls).unwrap_or_else(PoisonError::into_inner);
        if let Some(index) = stalls.waiting.iter().position(|waiting| *waiting == at) {
            stalls.waiting.swap_remove(index);
        }
    }
}

fn locked() -> MutexGuard<'static, Stalls> {
    STALLED.lock().unwrap_or_else(PoisonError::into_inner)
}
