//! The merger: what pools have touched goes into huge pages, in the background and slowly.
//!
//! Copies get faster by it, reads of other processes through the kernel twice as fast, and a peer that maps a pool has one
//! page to map where it had 512. It looks for work when much was moved or a link was made, on a thread that ends when there
//! is nothing left, so that an idle engine has none (`the_merger_ends_when_there_is_nothing_left`). Only memory that is
//! touched anyway is merged: a unit of which less than `ENOUGH` is in use stays as it is
//! (`what_nobody_touched_stays_uncommitted`). What is to be
//! committed ahead is committed and merged at once. Not for: registered memory, which is its owner's.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use crate::engine::{CopyEngine, Work};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::mem::{Refusal, Region, usable_under};

/// Bytes moved, or allocated, after which it looks whether there is work.
const LOOK_AFTER: u64 = 64 << 20;
/// Of a unit, what must be touched: merging commits the rest, so at most a seventh more than is in use.
const ENOUGH: u64 = Region::UNIT_BYTES / 8 * 7;
/// For each moment of work it pauses so many: it takes a tenth of a core, and holds up a copy seldom.
const PAUSES: u32 = 9;
/// Work shorter than this is added up before it pauses.
const WORTH_A_PAUSE: Duration = Duration::from_micros(200);
/// How often a unit whose pages are in use is tried.
const TRIES: u8 = 8;
/// Before units that were in use are tried again.
const BETWEEN_TRIES: Duration = Duration::from_millis(100);
/// No huge page was free, memory is short, or pages stayed in use: how long it leaves the region alone.
const REST: Duration = Duration::from_secs(60);
/// Memory that must be free, to merge at all.
const SPARE: u64 = 256 << 20;
/// How many units are merged between two looks at what is free.
const UNITS_A_LOOK: u64 = 64;
/// How many units a worker commits at once.
const UNITS_OF_A_PART: u64 = 16;
/// A unit that is not looked at any more: merged, or refused for good.
const DONE: u8 = u8::MAX;

/// Merges the regions of one engine. Dropped, its thread has ended.
#[derive(Debug, Default)]
pub struct Merger {
    shared: Arc<Shared>,
}

/// What was merged of one region, and what keeps it from going on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Merged {
    /// Bytes.
    pub bytes: u64,
    /// The kernel's error number, if it merges nothing.
    pub errno: Option<i32>,
}

#[derive(Debug, Default)]
struct Shared {
    regions: Vec<Arc<Merging>>,
    /// Since it last looked.
    moved: AtomicU64,
    state: Mutex<State>,
    /// It is closed.
    closing: Condvar,
}

#[derive(Debug, Default)]
struct State {
    thread: Option<JoinHandle<()>>,
    running: bool,
    closed: bool,
}

/// One region and how far it is.
#[derive(Debug)]
struct Merging {
    region: Arc<Region>,
    /// Bytes that were committed when it was last gone through, and those that merging committed since.
    seen: AtomicU64,
    merged: AtomicU64,
    refusal: OnceLock<i32>,
    /// How often each unit was tried, or [`DONE`]; as far as something was touched. Of one thread at a time.
    units: Mutex<Vec<u8>>,
    made: Instant,
    /// Milliseconds after `made` before which it rests ([`REST`]).
    rests: AtomicU64,
}

/// How one walk through a region ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Walk {
    /// Nothing is left.
    Whole,
    /// Some units were in use.
    Some,
    /// The merger was closed.
    Closed,
}

impl Merger {
    /// A merger of `regions`. It has no thread until there is work.
    #[must_use]
    pub fn new(regions: impl IntoIterator<Item = Arc<Region>>) -> Self {
        let regions = regions.into_iter().map(|region| Arc::new(Merging::new(region))).collect();
        Merger { shared: Arc::new(Shared { regions, ..Shared::default() }) }
    }

    /// Commits all of its regions now, in huge pages as far as the kernel gives them, on the workers of `engine`. `Err`,
    /// before anything is committed, if there is not that much memory.
    pub fn commit(&self, engine: &CopyEngine) -> Result<()> {
        let bytes = |region: &Arc<Merging>| region.region.units() * Region::UNIT_BYTES;
        // What is reserved for them is there.
        let wanted: u64 = self.shared.regions.iter().filter(|region| region.region.merges()).map(bytes).sum();
        let usable = usable_under(Path::new("/"));
        if wanted > usable {
            let text = "huge_pages = \"eager\" commits the pools at once, and there is not that much memory";
            let error = Error::new(ErrorKind::OutOfMemory, text).with("pool_bytes", wanted);
            return Err(error.with("usable_bytes", usable));
        }
        for region in &self.shared.regions {
            let parts =
                usize::try_from(region.region.units().div_ceil(UNITS_OF_A_PART)).unwrap_or(usize::MAX);
            // Work, not a wait: it takes as long as the memory is large.
            engine.spread(Arc::new(Commit(region.clone())), parts, Deadline::after(Duration::MAX))?;
        }
        Ok(())
    }

    /// Notes that `bytes` were moved or allocated; looks for work once it is much.
    pub fn moved(&self, bytes: u64) {
        let before = self.shared.moved.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) >= LOOK_AFTER {
            self.look();
        }
    }

    /// Looks for work, and starts on it. Never waits for any to be done.
    #[cold]
    pub fn look(&self) {
        self.shared.moved.store(0, Ordering::Relaxed);
        let mut state = self.shared.locked();
        if state.closed || state.running || !self.shared.regions.iter().any(|region| region.due()) {
            return;
        }
        // The one before has said that it ends, and does nothing else any more.
        if let Some(ended) = state.thread.take() {
            let _ = ended.join();
        }
        let shared = self.shared.clone();
        // Without a thread nothing is merged, and the next look tries again.
        state.thread = Builder::new().name("llm-merge".into()).spawn(move || shared.work()).ok();
        state.running = state.thread.is_some();
    }

    /// What was merged of `region`.
    #[must_use]
    pub fn merged(&self, region: &Region) -> Merged {
        let of = |work: &&Arc<Merging>| std::ptr::eq(&raw const *work.region, region);
        let work = self.shared.regions.iter().find(of);
        work.map_or_else(Merged::default, |work| Merged {
            bytes: work.merged.load(Ordering::Relaxed),
            errno: work.refusal.get().copied(),
        })
    }

    /// Whether its thread is at work.
    #[must_use]
    pub fn running(&self) -> bool {
        self.shared.locked().running
    }

    /// Ends its thread, and starts none any more.
    pub fn close(&self) {
        let thread = {
            let mut state = self.shared.locked();
            state.closed = true;
            state.thread.take()
        };
        self.shared.closing.notify_all();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for Merger {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// The thread: merges until nothing is left, or the engine closes.
    fn work(&self) {
        let mut pace = Pace { shared: self, spent: Duration::ZERO };
        loop {
            let mut left = false;
            for region in self.regions.iter().filter(|region| region.able() && region.rested()) {
                left |= region.walk(&mut pace) == Walk::Some;
            }
            if left && self.sleep(BETWEEN_TRIES) {
                continue;
            }
            // Under the lock: who looks sees it running, or starts another.
            let mut state = self.locked();
            if state.closed || !self.regions.iter().any(|region| region.due()) {
                state.running = false;
                return;
            }
        }
    }

    /// Sleeps; `false` if it was closed.
    fn sleep(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut state = self.locked();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if state.closed || left.is_zero() {
                return !state.closed;
            }
            state = self.closing.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps the share of work small.
struct Pace<'a> {
    shared: &'a Shared,
    spent: Duration,
}

impl Pace<'_> {
    /// Notes work that began at `since`, and pauses for it; `false` if the merger was closed.
    fn keep(&mut self, since: Instant) -> bool {
        self.spent += since.elapsed();
        if self.spent < WORTH_A_PAUSE {
            return true;
        }
        self.shared.sleep(std::mem::take(&mut self.spent) * PAUSES)
    }
}

impl Merging {
    fn new(region: Arc<Region>) -> Merging {
        Merging {
            region,
            seen: AtomicU64::new(0),
            merged: AtomicU64::new(0),
            refusal: OnceLock::new(),
            units: Mutex::default(),
            made: Instant::now(),
            rests: AtomicU64::new(0),
        }
    }

    /// Whether its pages can be merged, as far as is known.
    fn able(&self) -> bool {
        self.region.merges() && self.refusal.get().is_none()
    }

    /// Whether a unit's worth was touched since the last walk. Asks the kernel one question.
    fn due(&self) -> bool {
        self.able()
            && self.rested()
            && self.region.committed_bytes() >= self.seen.load(Ordering::Relaxed) + ENOUGH
    }

    /// Whether it is not left alone just now.
    fn rested(&self) -> bool {
        self.made.elapsed() >= Duration::from_millis(self.rests.load(Ordering::Relaxed))
    }

    /// Merges what is touched.
    fn walk(&self, pace: &mut Pace<'_>) -> Walk {
        let locked = || self.units.lock().unwrap_or_else(PoisonError::into_inner);
        self.seen.store(self.region.committed_bytes(), Ordering::Relaxed);
        let mut units = std::mem::take(&mut *locked());
        let ended = self.walk_over(&mut units, pace);
        *locked() = units;
        ended
    }

    fn walk_over(&self, units: &mut Vec<u8>, pace: &mut Pace<'_>) -> Walk {
        let (mut next, mut tried, mut ended) = (0, 0, Walk::Whole);
        loop {
            let since = Instant::now();
            let Some(index) = self.open_unit(units, next) else { return ended };
            next = index + 1;
            let touched = self.region.touched_bytes(index as u64);
            if touched >= ENOUGH {
                if tried % UNITS_A_LOOK == 0 && usable_under(Path::new("/")) < SPARE {
                    self.rest();
                    return ended;
                }
                tried += 1;
                match self.region.merge(index as u64) {
                    Ok(()) => self.done(&mut units[index], touched),
                    Err(Refusal::Busy) if units[index] + 1 < TRIES => {
                        units[index] += 1;
                        ended = Walk::Some;
                    }
                    Err(Refusal::Busy) => {
                        units[index] = 0;
                        self.rest();
                    }
                    Err(Refusal::NoMemory) => {
                        self.rest();
                        return ended;
                    }
                    Err(refusal) => {
                        units[index] = DONE;
                        if self.refused(refusal) {
                            return Walk::Whole;
                        }
                    }
                }
            }
            if !pace.keep(since) {
                return Walk::Closed;
            }
        }
    }

    /// Whether a refusal is for good and for all: the kernel cannot, or may not, if that holds for the first it was asked.
    fn refused(&self, refusal: Refusal) -> bool {
        match refusal {
            Refusal::Unable(errno) if self.merged.load(Ordering::Relaxed) == 0 => {
                let _ = self.refusal.set(errno);
                true
            }
            _ => false,
        }
    }

    fn done(&self, unit: &mut u8, touched: u64) {
        *unit = DONE;
        self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
        self.seen.fetch_add(Region::UNIT_BYTES - touched, Ordering::Relaxed);
    }

    /// The next unit, from `next` on, of which something was touched and that is not done.
    fn open_unit(&self, units: &mut Vec<u8>, mut next: usize) -> Option<usize> {
        loop {
            let touched = usize::try_from(self.region.touched_unit(next as u64)?).ok()?;
            if touched >= units.len() {
                units.resize(touched + 1, 0);
            }
            // Those that are done lie together: passed over without a question to the kernel for each.
            match units[touched..].iter().position(|&tried| tried != DONE) {
                Some(0) => return Some(touched),
                Some(open) => next = touched + open,
                None => next = units.len(),
            }
        }
    }

    /// Leaves it alone for a while. Then it is gone through again, also if nothing was touched meanwhile.
    fn rest(&self) {
        self.seen.store(0, Ordering::Relaxed);
        let until = u64::try_from((self.made.elapsed() + REST).as_millis()).unwrap_or(u64::MAX);
        self.rests.store(until, Ordering::Relaxed);
    }
}

/// All of a region, to be committed.
struct Commit(Arc<Merging>);

impl Work for Commit {
    fn unit(&self, part: usize) -> Result<()> {
        let Commit(merging) = self;
        let first = part as u64 * UNITS_OF_A_PART;
        for unit in first..(first + UNITS_OF_A_PART).min(merging.region.units()) {
            match merging.region.commit(unit)? {
                Ok(()) => {
                    let index = usize::try_from(unit).unwrap_or(usize::MAX);
                    let mut units = merging.units.lock().unwrap_or_else(PoisonError::into_inner);
                    if units.len() <= index {
                        units.resize(index + 1, 0);
                    }
                    merging.done(&mut units[index], Region::UNIT_BYTES);
                }
                // What is reserved for it lies in huge pages as it is.
                Err(refusal) if merging.region.merges() => {
                    merging.refused(refusal);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{SpliceFlags, pipe, splice};

    use super::*;
    use crate::mem::Tensors;
    use crate::mem::kernel::{Kernel, copy};

    const UNITS: usize = 3;

    /// Units of which all is touched.
    fn touched() -> Arc<Region> {
        let bytes = UNITS as u64 * Region::UNIT_BYTES;
        let [from, to] = [(); 2].map(|()| Arc::new(Region::shared("test", bytes).unwrap()));
        let [nothing, touched] =
            [from, to.clone()].map(|region| Tensors::carved(region, [0], bytes, Box::new(())).unwrap());
        let [nothing, touched] = [&nothing, &touched].map(|tensors| tensors.window(0, 0, bytes).unwrap());
        copy(nothing, touched, Kernel::PLAIN).unwrap();
        to
    }

    fn walked(merging: &Merging) -> Walk {
        let shared = Shared::default();
        merging.walk(&mut Pace { shared: &shared, spent: Duration::ZERO })
    }

    #[test]
    fn what_rested_is_gone_through_again_though_nothing_was_touched_meanwhile() {
        let region = touched();
        let merging = Merging::new(region.clone());
        assert!(merging.due());
        merging.seen.store(region.committed_bytes(), Ordering::Relaxed);
        assert!(!merging.due(), "nothing is new");
        merging.rest();
        assert!(!merging.due() && !merging.rested(), "it is left alone");
        merging.rests.store(0, Ordering::Relaxed);
        assert!(merging.due() && merging.rested());
    }

    #[test]
    fn a_thread_leaves_alone_what_rests() {
        let merging = Arc::new(Merging::new(touched()));
        merging.rest();
        let shared = Shared { regions: vec![merging.clone()], ..Shared::default() };
        shared.work();
        assert_eq!(merging.merged.load(Ordering::Relaxed), 0);
        assert!(
            merging.refusal.get().is_none() && merging.units.lock().unwrap().is_empty(),
            "not even looked at"
        );
    }

    #[test]
    fn units_whose_pages_stay_in_use_are_tried_again_later() {
        let region = touched();
        // Pages that lie in a pipe are in use until it is read.
        let (reader, writer) = pipe().unwrap();
        let (mut from, file) = (Region::UNIT_BYTES, region.descriptor().unwrap());
        assert_eq!(splice(file, Some(&mut from), writer, None, 4096, SpliceFlags::empty()), Ok(4096));
        let merging = Merging::new(region.clone());
        for _ in 1..TRIES {
            if walked(&merging) != Walk::Some {
                assert!(merging.refusal.get().is_some(), "only where this kernel never merges");
                return;
            }
        }
        assert!(merging.rested());
        assert!(walked(&merging) == Walk::Whole && !merging.rested(), "enough for now");
        assert_eq!(merging.merged.load(Ordering::Relaxed), (UNITS as u64 - 1) * Region::UNIT_BYTES);
        drop(reader);
        merging.rests.store(0, Ordering::Relaxed);
        assert!(merging.due());
        assert!(walked(&merging) == Walk::Whole && merging.rested());
        assert_eq!(merging.merged.load(Ordering::Relaxed), UNITS as u64 * Region::UNIT_BYTES);
    }

    #[test]
    fn memory_that_is_reserved_is_committed_and_no_refusal() {
        let region =
            Arc::new(Region::shared("test", 4 * Region::UNIT_BYTES).unwrap().made_of_reserved_pages());
        assert!(!region.merges());
        let merging = Arc::new(Merging::new(region.clone()));
        Commit(merging.clone()).unit(0).unwrap();
        assert_eq!(region.committed_bytes(), 4 * Region::UNIT_BYTES);
        assert_eq!((merging.refusal.get(), merging.merged.load(Ordering::Relaxed)), (None, 0));
    }
}
