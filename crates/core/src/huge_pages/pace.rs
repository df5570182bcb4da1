//! How fast the merger works, when it rests, and how it is told to stop.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// For each moment of work it pauses so many: it takes a tenth of a core, and holds up a copy seldom.
const PAUSES: u32 = 9;
/// Work shorter than this is added up before it pauses.
const WORTH_A_PAUSE: Duration = Duration::from_micros(200);
/// How often a unit whose pages are in use is tried.
pub(super) const TRIES: u8 = 8;
/// No huge page was free, memory is short, or pages stayed in use: how long it leaves the region alone.
pub(super) const REST: Duration = Duration::from_secs(60);
/// Memory that must be free, to merge at all.
pub(super) const SPARE: u64 = 256 << 20;
/// How many units are merged between two looks at what is free.
pub(super) const UNITS_A_LOOK: u64 = 64;

/// What was merged of one region, and what keeps it from going on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Bytes.
    pub bytes: u64,
    /// The kernel's error number, if it merges nothing.
    pub errno: Option<i32>,
}

/// How one walk through a region ended.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Walk {
    /// Nothing is left.
    Whole,
    /// Some units were in use.
    Some,
    /// The merger was closed.
    Closed,
}

/// The thread of a merger, and whether it is to stop.
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
    /// Sleeps; `false` if it was closed.
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

/// Keeps the share of work small.
pub(super) struct Pace<'a> {
    closing: &'a Closing,
    spent: Duration,
}

impl<'a> Pace<'a> {
    pub(super) fn new(closing: &'a Closing) -> Self {
        Pace { closing, spent: Duration::ZERO }
    }

    /// Notes work that began at `since`, and pauses for it; `false` if the merger was closed.
    pub(super) fn keep(&mut self, since: Instant) -> bool {
        self.spent += since.elapsed();
        if self.spent < WORTH_A_PAUSE {
            return true;
        }
        self.closing.sleep(std::mem::take(&mut self.spent) * PAUSES)
    }
}
