//! Controls how fast the merger works, when it rests, and when it stops.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex};

/// Pause after each period of work, as a multiple of it. So the merger uses a tenth of a core and seldom
/// delays a copy.
const PAUSES: u32 = 9;
/// Longest pause. On a busy machine, a kernel call may wait for other cores much longer than it works.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// Shorter periods of work are added up before a pause.
const WORTH_A_PAUSE: Duration = Duration::from_micros(200);
/// How often a thread tries units whose pages are in use, and the pause between.
pub(super) const TRIES: u32 = 8;
pub(super) const BETWEEN_TRIES: Duration = Duration::from_millis(100);
/// Pause before units are tried again after all [`TRIES`] have failed, or after memory was short.
pub(super) const REST: Duration = Duration::from_secs(10);
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

/// When the units that the last pass left are tried again; `None` if it left none.
#[derive(Debug, Default)]
pub(super) struct Again(Mutex<Option<Instant>>);

impl Again {
    pub(super) fn due(&self) -> bool {
        self.0.lock().is_some_and(|at| at <= Instant::now())
    }

    pub(super) fn at_once(&self) {
        *self.0.lock() = Some(Instant::now());
    }

    /// Records that a pass begins.
    pub(super) fn begin(&self) {
        *self.0.lock() = None;
    }

    /// Records that a pass left units, which are to be tried again after `pause`.
    pub(super) fn later(&self, pause: Duration) {
        self.0.lock().get_or_insert(Instant::now() + pause);
    }
}

/// The thread of a merger, and whether it must stop.
#[derive(Debug, Default)]
pub(super) struct Closing {
    pub(super) state: Mutex<State>,
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
        let mut state = self.state.lock();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return !state.closed;
            }
            state = self.signal.wait_timeout(state, left).0;
        }
    }

    /// Wakes the thread after `closed` was set.
    pub(super) fn announce(&self) {
        self.signal.notify_all();
    }
}

/// Limits the share of time that the merger works.
pub(super) struct Throttle<'a> {
    closing: &'a Closing,
    spent: Duration,
}

impl<'a> Throttle<'a> {
    pub(super) fn new(closing: &'a Closing) -> Self {
        Throttle { closing, spent: Duration::ZERO }
    }

    /// Records work that began at `since`, and pauses in proportion to it. Returns `false` if the merger was
    /// closed.
    pub(super) fn keep(&mut self, since: Instant) -> bool {
        self.spent += since.elapsed();
        if self.spent < WORTH_A_PAUSE {
            return true;
        }
        self.closing.sleep((std::mem::take(&mut self.spent) * PAUSES).min(LONGEST_PAUSE))
    }
}
