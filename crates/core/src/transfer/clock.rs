//! The clock of one engine: a thread that calls what is due at a set time, and ends some time after the last alarm
//! (`alarms_come_in_order_unless_they_are_forgotten`).
//!
//! Most alarms are forgotten before they are due. The entry of a forgotten alarm stays in the heap. When more than half of
//! the entries are of forgotten alarms, the clock removes them all, which takes a few nanoseconds for each entry. So the
//! cost for each alarm is constant.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::slot_map::{SlotKey, SlotMap};
use crate::error::{Error, Result};
use crate::fallible;
use crate::sync::{Condvar, Mutex};
use crate::threads::{Threads, guarded};

/// How long the thread is kept without an alarm.
const IDLE_EXIT: Duration = Duration::from_secs(30);
/// Number of forgotten alarms that are never worth removing from the order.
const MIN_FORGOTTEN: usize = 64;
/// Name of these lists in out-of-memory errors.
const ALARMS: &str = "the alarms of an engine";

/// What the clock calls at a set time.
pub(crate) trait Alarmed: Send + Sync {
    /// Called once, at that time or a little later. It must be short.
    fn due(self: Arc<Self>);
}

/// Names a call of the clock at a set time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alarm(SlotKey);

/// The clock of one engine. It may outlive the engine.
#[derive(Clone)]
pub(crate) struct Clock(Arc<Shared>);

struct Shared {
    /// The times of alarms count from here.
    base: Instant,
    state: Mutex<State>,
    /// Notified when there is an earlier alarm and when the clock closes.
    changed: Condvar,
    threads: Arc<Threads>,
}

#[derive(Default)]
struct State {
    alarms: SlotMap<Arc<dyn Alarmed>>,
    /// When each of them is due, in nanoseconds, and where it is; also of alarms that were forgotten.
    order: BinaryHeap<Reverse<(u64, SlotKey)>>,
    /// Whether the thread runs.
    running: bool,
    /// When the thread wakes by itself; `None` while it is awake, because it then looks at the alarms before it sleeps.
    wakes: Option<u64>,
    closed: bool,
}

impl State {
    /// Adds an alarm that calls nothing yet, and returns it.
    fn add(&mut self, when: u64) -> Result<SlotKey> {
        let room = self.order.try_reserve(1);
        room.map_err(|_| fallible::out_of_memory(ALARMS, self.order.len() * size_of::<(u64, SlotKey)>()))?;
        let key = self.alarms.reserve(ALARMS)?;
        self.order.push(Reverse((when, key)));
        Ok(key)
    }

    /// Returns when the next alarm is due.
    fn next(&mut self) -> Option<u64> {
        while let Some(&Reverse((when, key))) = self.order.peek() {
            if self.alarms.contains(key) {
                return Some(when);
            }
            self.order.pop();
        }
        None
    }

    fn remove(&mut self, key: SlotKey) -> Option<Arc<dyn Alarmed>> {
        let removed = self.alarms.remove(key);
        if self.alarms.is_empty() {
            self.order = BinaryHeap::new();
        } else if self.order.len() > 2 * self.alarms.len() + MIN_FORGOTTEN {
            let State { alarms, order, .. } = self;
            order.retain(|Reverse((_, key))| alarms.contains(*key));
        }
        removed
    }
}

impl Clock {
    /// Creates a clock that starts its thread among `threads`.
    pub(super) fn new(threads: Arc<Threads>) -> Clock {
        let (state, changed) = (Mutex::default(), Condvar::default());
        Clock(Arc::new(Shared { base: Instant::now(), state, changed, threads }))
    }

    /// Calls `alarmed` at `when`. It is dropped if the alarm is [forgotten](Self::forget) before, or if the clock closes.
    /// Returns `Err` if the clock has closed or no thread can be started.
    pub(crate) fn at(&self, when: Instant, alarmed: Arc<dyn Alarmed>) -> Result<Alarm> {
        let when = self.0.nanos(when);
        let mut state = self.0.state.lock();
        if state.closed {
            return Err(Error::closed());
        }
        if !state.running {
            let shared = self.0.clone();
            let begun = self.0.threads.spawn("llm-clock", move || shared.run());
            begun.map_err(|error| no_thread(&error))?;
            state.running = true;
        }
        let key = state.add(when)?;
        state.alarms.fill(key, alarmed);
        // Otherwise the clock looks at the alarms in time anyway. Waking it for each call that runs alone took a third of
        // the time of starting one.
        let early = state.wakes.is_some_and(|wakes| when < wakes);
        drop(state);
        if early {
            self.0.changed.notify_one();
        }
        Ok(Alarm(key))
    }

    /// Cancels an alarm that has not come yet.
    pub(crate) fn forget(&self, alarm: Alarm) {
        let mut state = self.0.state.lock();
        let forgotten = state.remove(alarm.0);
        drop(state);
        drop(forgotten);
    }

    /// Drops all alarms, and refuses new ones.
    pub(super) fn close(&self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        let dropped = (std::mem::take(&mut state.alarms), std::mem::take(&mut state.order));
        drop(state);
        self.0.changed.notify_all();
        drop(dropped);
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub(super) fn alarms(&self) -> usize {
        self.0.state.lock().alarms.len()
    }
}

impl Shared {
    fn nanos(&self, when: Instant) -> u64 {
        u64::try_from(when.saturating_duration_since(self.base).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Body of the thread: calls what is due, until there has been no alarm for a while.
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.closed {
            let (next, now) = (state.next(), self.nanos(Instant::now()));
            if next.is_some_and(|next| next <= now) {
                let due = state.order.pop().and_then(|Reverse((_, key))| state.remove(key));
                drop(state);
                if let Some(alarmed) = due {
                    guarded("calling an alarm", || alarmed.due());
                }
                state = self.state.lock();
                continue;
            }
            // At most `IDLE_EXIT`, so that the thread ends some time after the last alarm was forgotten.
            let sleep = next.map_or(IDLE_EXIT, |next| Duration::from_nanos(next - now)).min(IDLE_EXIT);
            state.wakes = Some(self.nanos(Instant::now() + sleep));
            let (woken, waited) = self.changed.wait_timeout(state, sleep);
            state = woken;
            state.wakes = None;
            if waited && next.is_none() && state.alarms.is_empty() {
                break;
            }
        }
        state.running = false;
    }
}

/// Returns the error for a thread that could not be started.
pub(super) fn no_thread(error: &io::Error) -> Error {
    // Each refused job gets its own error.
    let error = error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error);
    Error::no_thread("a thread for a transfer", error)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    struct Sends(Sender<u64>, u64);

    impl Alarmed for Sends {
        fn due(self: Arc<Self>) {
            let _ = self.0.send(self.1);
        }
    }

    /// Keeps the clock busy until something arrives.
    struct Busy(Mutex<Receiver<()>>);

    impl Alarmed for Busy {
        fn due(self: Arc<Self>) {
            let _ = self.0.lock().recv();
        }
    }

    /// Alarms come in the order of their times, those of one time in the order in which they were set, each once. Those
    /// that were forgotten do not come, and leave no memory behind.
    #[test]
    fn alarms_come_in_order_unless_they_are_forgotten() {
        let (clock, base, (sender, numbers)) = (Clock::new(Threads::new()), Instant::now(), channel());
        let later = |millis| base + Duration::from_millis(millis);
        let (free, busy) = channel();
        clock.at(base, Arc::new(Busy(Mutex::new(busy)))).unwrap();
        let mut expected = Vec::new();
        for number in 0..5000_u64 {
            let millis = 1 + number * 7 % 50;
            let alarm = clock.at(later(millis), Arc::new(Sends(sender.clone(), number))).unwrap();
            if number % 5 == 0 {
                expected.push((millis, number));
            } else {
                clock.forget(alarm);
                clock.forget(alarm);
            }
            let state = clock.0.state.lock();
            assert!(state.order.len() <= 2 * state.alarms.len() + MIN_FORGOTTEN);
        }
        expected.sort_unstable();
        free.send(()).unwrap();
        let all: Vec<_> = expected.iter().map(|_| numbers.recv().unwrap()).collect();
        assert_eq!(all, expected.into_iter().map(|(_, number)| number).collect::<Vec<_>>());
        clock.close();
        assert!(clock.at(base, Arc::new(Sends(sender, 0))).is_err());
        clock.0.threads.wait(0);
        assert_eq!(clock.0.threads.count(), 0);
        assert!(numbers.recv().is_err(), "an alarm came twice");
    }
}
