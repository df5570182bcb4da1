//! The clock: a thread that calls what is due at a set time, and ends some time after the last alarm
//! (`alarms_come_in_order_unless_they_are_forgotten`). All engines of a process share it.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, ThreadId, current, guarded};
use crate::threads::{CLOSE_WAIT, EngineNumber, Threads};

/// How long the thread is kept without an alarm.
const IDLE_EXIT: Duration = Duration::from_secs(30);

/// What the clock calls at a set time.
pub(crate) trait Alarmed: Send + Sync {
    /// Called once, at that time or a little later. It must be short.
    fn due(self: Arc<Self>);
}

/// Names a call of the clock at a set time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Alarm {
    /// When it is due, in nanoseconds.
    due: u64,
    /// Its number, which may be that of an alarm for another time.
    number: NonZeroU32,
    engine: EngineNumber,
}

/// The alarms of one engine. They may outlive the engine.
pub(crate) struct Clock {
    thread: Arc<ClockThread>,
    engine: EngineNumber,
    /// Changes under the lock of the thread.
    closed: AtomicBool,
}

/// The thread that calls what is due, and the alarms of all engines that share it.
pub(super) struct ClockThread {
    /// The times of alarms count from here.
    base: Instant,
    state: Mutex<State>,
    /// Notified when there is an earlier alarm and when the clock closes.
    changed: Condvar,
    /// Notified when a call has returned.
    called: Condvar,
    threads: Arc<Threads>,
}

#[derive(Default)]
struct State {
    /// What to call, in the order of time. Alarms for one time are in the order in which they were set.
    alarms: BTreeMap<Alarm, Arc<dyn Alarmed>>,
    /// The number of the last alarm.
    last_number: Option<NonZeroU32>,
    /// Whether the thread runs.
    running: bool,
    /// The engine whose alarm the thread calls now, and the thread.
    calling: Option<(EngineNumber, ThreadId)>,
    /// When the thread wakes by itself; `None` while it is awake, because it then looks at the alarms before it sleeps.
    wakes: Option<u64>,
    closed: bool,
}

impl Clock {
    /// Creates the alarms of an engine that `thread` calls.
    pub(super) fn new(thread: &Arc<ClockThread>, engine: EngineNumber) -> Clock {
        Clock { thread: thread.clone(), engine, closed: AtomicBool::new(false) }
    }

    /// Calls `alarmed` at `when`. It is dropped if the alarm is [forgotten](Self::forget) before, or if the engine closes.
    /// Returns `Err` if the engine has closed or no thread can be started.
    pub(crate) fn at(&self, when: Instant, alarmed: Arc<dyn Alarmed>) -> Result<Alarm> {
        let thread = &self.thread;
        let due = thread.nanos(when);
        let mut state = thread.state.lock();
        if self.closed.load(Ordering::Relaxed) {
            return Err(Error::closed());
        }
        if !state.running {
            let runs = thread.clone();
            let begun = thread.threads.spawn("llm-clock", move || runs.run());
            begun.map_err(|error| no_thread(&error))?;
            state.running = true;
        }
        let number = state.last_number.and_then(|last| last.checked_add(1)).unwrap_or(NonZeroU32::MIN);
        state.last_number = Some(number);
        let alarm = Alarm { due, number, engine: self.engine };
        state.alarms.insert(alarm, alarmed);
        // Otherwise the clock looks at the alarms in time anyway. Waking it for each call that runs alone took a third of
        // the time of starting one.
        let early = state.wakes.is_some_and(|wakes| due < wakes);
        drop(state);
        if early {
            thread.changed.notify_one();
        }
        Ok(alarm)
    }

    /// Cancels an alarm that has not come yet.
    pub(crate) fn forget(&self, alarm: Alarm) {
        let mut state = self.thread.state.lock();
        let forgotten = state.alarms.remove(&alarm);
        drop(state);
        drop(forgotten);
    }

    /// Drops the alarms of the engine, refuses new ones, and waits at most [`CLOSE_WAIT`] for a call that runs. A call that
    /// closes its own engine does not wait for itself.
    pub(super) fn close(&self) {
        let mut state = self.thread.state.lock();
        self.closed.store(true, Ordering::Relaxed);
        let dropped: Vec<_> = state.alarms.extract_if(.., |alarm, _| alarm.engine == self.engine).collect();
        drop(state);
        // Without the lock, because what is dropped may take other locks.
        drop(dropped);
        let until = Instant::now() + CLOSE_WAIT;
        let mut state = self.thread.state.lock();
        while state.calling.is_some_and(|(engine, thread)| engine == self.engine && thread != current().id())
        {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.thread.called.wait_timeout(state, left).0;
        }
    }

    /// Number of alarms that are set.
    #[cfg(feature = "testing")]
    pub(super) fn alarms(&self) -> usize {
        self.thread.state.lock().alarms.len()
    }
}

impl ClockThread {
    /// Creates a clock that starts its thread among `threads`.
    pub(super) fn new(threads: Arc<Threads>) -> Arc<ClockThread> {
        let (state, changed, called) = (Mutex::default(), Condvar::default(), Condvar::default());
        Arc::new(ClockThread { base: Instant::now(), state, changed, called, threads })
    }

    /// Ends the thread. Every engine has closed its alarms.
    pub(super) fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    fn nanos(&self, when: Instant) -> u64 {
        u64::try_from(when.saturating_duration_since(self.base).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Body of the thread: calls what is due, until there has been no alarm for a while.
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.closed {
            let next = state.alarms.first_key_value().map(|(alarm, _)| alarm.due);
            let now = self.nanos(Instant::now());
            if next.is_some_and(|next| next <= now)
                && let Some((Alarm { engine, .. }, alarmed)) = state.alarms.pop_first()
            {
                state.calling = Some((engine, current().id()));
                drop(state);
                let here = engine.on_this_thread();
                guarded("calling an alarm", || alarmed.due());
                drop(here);
                state = self.state.lock();
                state.calling = None;
                self.called.notify_all();
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

    /// Sends 0, blocks until the other end of the gate sends or is dropped, and sends 1.
    struct Blocks(Mutex<Receiver<()>>, Sender<u64>);

    impl Alarmed for Blocks {
        fn due(self: Arc<Self>) {
            let _ = self.1.send(0);
            let _ = self.0.lock().recv();
            let _ = self.1.send(1);
        }
    }

    /// Alarms come in the order of their times, those of one time in the order in which they were set, each once. Those
    /// that were forgotten do not come, and leave no memory behind.
    #[test]
    fn alarms_come_in_order_unless_they_are_forgotten() {
        let thread = ClockThread::new(Threads::new());
        let (clock, base, (sender, numbers)) =
            (Clock::new(&thread, EngineNumber::next()), Instant::now(), channel());
        let later = |millis| base + Duration::from_millis(millis);
        let (free, busy) = channel();
        // Keeps the clock busy.
        clock.at(base, Arc::new(Blocks(Mutex::new(busy), channel().0))).unwrap();
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
            // The busy one may not have come yet.
            assert!(thread.state.lock().alarms.len() <= expected.len() + 1);
        }
        expected.sort_unstable();
        free.send(()).unwrap();
        let all: Vec<_> = expected.iter().map(|_| numbers.recv().unwrap()).collect();
        assert_eq!(all, expected.into_iter().map(|(_, number)| number).collect::<Vec<_>>());
        clock.close();
        assert!(clock.at(base, Arc::new(Sends(sender, 0))).is_err());
        thread.close();
        thread.threads.wait(0);
        assert_eq!(thread.threads.count(), 0);
        assert!(numbers.recv().is_err(), "an alarm came twice");
    }

    #[test]
    fn alarms_of_an_engine_end_with_it_and_those_of_others_come() {
        let (thread, base, (sender, numbers)) = (ClockThread::new(Threads::new()), Instant::now(), channel());
        let [first, second] = [(); 2].map(|()| Clock::new(&thread, EngineNumber::next()));
        let (open, gate) = channel();
        first.at(base, Arc::new(Blocks(Mutex::new(gate), sender.clone()))).unwrap();
        assert_eq!(numbers.recv(), Ok(0));
        let hour = base + Duration::from_secs(3600);
        let dropped = Arc::new(Sends(sender.clone(), 2));
        first.at(hour, dropped.clone()).unwrap();
        second.at(base, Arc::new(Sends(sender.clone(), 3))).unwrap();
        std::thread::scope(|scope| {
            let closes = scope.spawn(|| first.close());
            while Arc::strong_count(&dropped) > 1 {
                std::thread::yield_now();
            }
            assert!(!closes.is_finished(), "its alarm is still being called");
            drop(open);
            closes.join().unwrap();
        });
        assert_eq!([numbers.recv(), numbers.recv()], [Ok(1), Ok(3)]);
        assert!(first.at(base, Arc::new(Sends(sender, 4))).is_err());
        assert_eq!((thread.state.lock().alarms.len(), thread.threads.count()), (0, 1));
        second.close();
        thread.close();
        thread.threads.wait(0);
        drop(dropped);
        assert!(numbers.recv().is_err(), "an alarm came after the end of its engine");
    }
}
