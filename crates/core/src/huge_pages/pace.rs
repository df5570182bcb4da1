//! Controls how fast the merger works, when it rests, and when it stops.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause after each period of work, as a multiple of it. So the merger uses a tenth of a core and seldom
/// delays a copy.
const PAUSES: u32 = 9;
/// Shorter periods of work are added up before a pause.
const WORTH_A_PAUSE: Duration = Duration::from_micros(200);
/// Number of attempts for a unit whose pages are in use.
pub(super) const TRIES: u8 = 8;
/// How long a region is left alone after no huge page was free, memory was short, or pages stayed in use.
pub(super) const REST: Duration = Duration::from_secs(60);
/// Bytes that must be free; otherwise nothing is merged.
pub(super) const SPARE: u64 = 256 << 20;
/// Number of units that are merged between two checks of the free memory.
pub(super) const UNITS_PER_CHECK: u64 = 64;

/// What was merged of one region, and the error that prevents more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Bytes that were merged.
    pub bytes: u64,
    /// The kernel's error number, if the kernel merges nothing.
    pub errno: Option<i32>,
}

/// How one pass over a region ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Walk {
    /// Nothing is left for now.
    Whole,
    /// At least one unit was in use.
    Busy,
    /// The merger was closed.
    Closed,
}

/// The thread of a merger, and whether it must stop.
#[derive(Debug, Default)]
pub(super) struct Closing {
    state: Mutex<State>,
    signal: Condvar,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) thread: Option<JoinHandle<()>>,
    pub(super) running: bool,
    pub(super) closed: bool,
}

impl Closing {
    /// Sleeps for `time`, or until the merger is closed. Returns `false` if it was closed.
    pub(super) fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.locked();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return !state.closed;
            }
            state = self.signal.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(super) fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread after `closed` was set.
    pub(super) fn announce(&self) {
        self.signal.notify_all();
    }
}

/// Limits the share of time that the merger works.
pub(super) struct Pace<'a> {
    closing: &'a Closing,
    spent: Duration,
}

impl<'a> Pace<'a> {
    pub(super) fn new(closing: &'a Closing) -> Self {
        Pace { closing, spent: Duration::ZERO }
    }

    /// Records work that began at `since`, and pauses in proportion to it. Returns `false` if the merger was
    /// closed.
    pub(super) fn keep(&mut self, since: Instant) -> bool {
        self.spent += since.elapsed();
        if self.spent < WORTH_A_PAUSE {
            return true;
        }
        self.closing.sleep(std::mem::take(&mut self.spent) * PAUSES)
    }
}
