//! Merges one region of a pool into huge pages: which units were tried, which are left, and when it rests.
//!
//! The thread that does this belongs to `merger`; registered memory is merged by `registered`.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use super::pace::{Merged, Pace, REST, SPARE, TRIES, UNITS_PER_CHECK, Walk};
use crate::memory::{Refusal, Region, usable_under};

/// Bytes of a unit that must be touched before it is merged. Merging commits the rest of the unit, so it adds
/// at most a seventh of what is in use.
const ENOUGH: u64 = Region::UNIT_BYTES / 8 * 7;
/// Marks a unit that needs no more attention: it was merged, or refused permanently.
const DONE: u8 = u8::MAX;

/// One region and its progress.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) region: Arc<Region>,
    /// Bytes that were committed at the start of the last pass, plus those that merging has committed since.
    seen: AtomicU64,
    merged: AtomicU64,
    refusal: OnceLock<i32>,
    /// Number of attempts for each unit up to the last touched one, or [`DONE`]. Only one thread at a time
    /// uses it.
    units: Mutex<Vec<u8>>,
    made: Instant,
    /// Milliseconds after `made` until which the region rests ([`REST`]).
    rests: AtomicU64,
}

impl Merging {
    pub(super) fn new(region: Arc<Region>) -> Merging {
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

    /// Returns whether the pages can be merged, as far as is known.
    pub(super) fn able(&self) -> bool {
        self.region.merges() && self.refusal.get().is_none()
    }

    /// Returns whether enough for one unit was touched since the last pass. This takes one system call.
    pub(super) fn due(&self) -> bool {
        self.able()
            && self.rested()
            && self.region.committed_bytes() >= self.seen.load(Ordering::Relaxed) + ENOUGH
    }

    /// Returns whether the region is not resting.
    pub(super) fn rested(&self) -> bool {
        self.made.elapsed() >= Duration::from_millis(self.rests.load(Ordering::Relaxed))
    }

    /// Merges the units that are touched.
    pub(super) fn walk(&self, pace: &mut Pace<'_>) -> Walk {
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
                if tried % UNITS_PER_CHECK == 0 && usable_under(Path::new("/")) < SPARE {
                    self.rest();
                    return ended;
                }
                tried += 1;
                match self.region.merge(index as u64) {
                    Ok(()) => self.done(&mut units[index], touched),
                    Err(Refusal::Busy) if units[index] + 1 < TRIES => {
                        units[index] += 1;
                        ended = Walk::Busy;
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

    /// Returns whether `refusal` applies to the whole region permanently, and records it if so. The kernel
    /// does not support or does not permit merging if this is its answer before anything of the region was
    /// merged.
    pub(super) fn refused(&self, refusal: Refusal) -> bool {
        match refusal {
            Refusal::Unable(errno) if self.merged.load(Ordering::Relaxed) == 0 => {
                let _ = self.refusal.set(errno);
                true
            }
            _ => false,
        }
    }

    /// Records that all of `unit` was committed in one huge page.
    pub(super) fn committed(&self, unit: u64) {
        let index = usize::try_from(unit).unwrap_or(usize::MAX);
        let mut units = self.units.lock().unwrap_or_else(PoisonError::into_inner);
        if units.len() <= index {
            units.resize(index + 1, 0);
        }
        self.done(&mut units[index], Region::UNIT_BYTES);
    }

    /// Returns what was merged of the region.
    pub(super) fn report(&self) -> Merged {
        Merged { bytes: self.merged.load(Ordering::Relaxed), errno: self.refusal.get().copied() }
    }

    fn done(&self, unit: &mut u8, touched: u64) {
        *unit = DONE;
        self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
        self.seen.fetch_add(Region::UNIT_BYTES - touched, Ordering::Relaxed);
    }

    /// Returns the next unit, from `next` on, of which any page was touched and that is not done.
    fn open_unit(&self, units: &mut Vec<u8>, mut next: usize) -> Option<usize> {
        loop {
            let touched = usize::try_from(self.region.touched_unit(next as u64)?).ok()?;
            if touched >= units.len() {
                units.resize(touched + 1, 0);
            }
            // Units that are done are often adjacent, and are skipped without a system call for each.
            match units[touched..].iter().position(|&tried| tried != DONE) {
                Some(0) => return Some(touched),
                Some(open) => next = touched + open,
                None => next = units.len(),
            }
        }
    }

    /// Leaves the region alone for a while. Then there is another pass, even if nothing was touched
    /// meanwhile.
    fn rest(&self) {
        self.seen.store(0, Ordering::Relaxed);
        let until = u64::try_from((self.made.elapsed() + REST).as_millis()).unwrap_or(u64::MAX);
        self.rests.store(until, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{SpliceFlags, pipe, splice};

    use super::*;
    use crate::copy::Work;
    use crate::huge_pages::commit::Commit;
    use crate::huge_pages::merger::Shared;
    use crate::huge_pages::pace::Closing;
    use crate::memory::Tensors;
    use crate::memory::kernels::{Kernel, copy};

    const UNITS: usize = 3;

    /// A region of `UNITS` units, all touched.
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
        merging.walk(&mut Pace::new(&Closing::default()))
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
        let shared = Shared::of(vec![merging.clone()], None);
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
        // Pages in a pipe are in use until the pipe is read.
        let (reader, writer) = pipe().unwrap();
        let (mut from, file) = (Region::UNIT_BYTES, region.descriptor().unwrap());
        assert_eq!(splice(file, Some(&mut from), writer, None, 4096, SpliceFlags::empty()), Ok(4096));
        let merging = Merging::new(region.clone());
        for _ in 1..TRIES {
            if walked(&merging) != Walk::Busy {
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
