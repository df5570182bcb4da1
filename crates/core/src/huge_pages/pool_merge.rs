//! Merges one region of a pool into huge pages: which units are done, and which are left for later.
//!
//! The thread that does this belongs to `merger`; registered memory is merged by `registered`.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::throttle::{Again, Merged, REST, SPARE, Throttle, UNITS_PER_CHECK};
use crate::error::Result;
use crate::memory::{MergeRefusal, Region, usable_under};
use crate::sync::Mutex;

/// Bytes of a unit that must be touched before it is merged. Merging commits the rest of the unit, so it adds
/// at most a seventh of what is in use.
const ENOUGH: u64 = Region::UNIT_BYTES / 8 * 7;

/// Number of units that a worker commits in one part of the work.
pub(super) const UNITS_OF_A_PART: u64 = 16;

/// One region and its progress.
#[derive(Debug)]
pub(super) struct Merging {
    pub(super) region: Arc<Region>,
    /// Bytes that were committed at the start of the last pass, plus those that merging has committed since.
    seen: AtomicU64,
    merged: AtomicU64,
    refusal: OnceLock<i32>,
    /// Which units, up to the last touched one, need no more attention: they were merged, or refused
    /// permanently. Only one thread at a time uses it.
    units: Mutex<Vec<bool>>,
    again: Again,
}

impl Merging {
    pub(super) fn new(region: Arc<Region>) -> Merging {
        let (refusal, units) = (OnceLock::new(), Mutex::default());
        Merging { region, seen: 0.into(), merged: 0.into(), refusal, units, again: Again::default() }
    }

    /// Returns whether a pass is worthwhile: enough for one unit was touched since the last one, or units that
    /// it left are to be tried again. This takes one system call.
    pub(super) fn due(&self) -> bool {
        let able = self.region.merges() && self.refusal.get().is_none();
        let touched = || self.region.committed_bytes() >= self.seen.load(Ordering::Relaxed) + ENOUGH;
        able && (touched() || self.again.due())
    }

    /// Merges the units that are touched. Returns whether some were in use, which are due again after `retry`.
    pub(super) fn walk(&self, throttle: &mut Throttle<'_>, retry: Duration) -> bool {
        self.again.begin();
        self.seen.store(self.region.committed_bytes(), Ordering::Relaxed);
        let mut units = std::mem::take(&mut *self.units.lock());
        let busy = self.walk_over(&mut units, throttle);
        *self.units.lock() = units;
        if busy {
            self.again.later(retry);
        }
        busy
    }

    /// Returns whether some units were in use.
    fn walk_over(&self, units: &mut Vec<bool>, throttle: &mut Throttle<'_>) -> bool {
        let (mut next, mut tried, mut busy) = (0, 0, false);
        loop {
            let since = Instant::now();
            let Some(index) = self.open_unit(units, next) else { return busy };
            next = index + 1;
            let touched = self.region.touched_bytes(index as u64);
            if touched >= ENOUGH {
                if tried % UNITS_PER_CHECK == 0 && usable_under(Path::new("/")) < SPARE {
                    self.again.later(REST);
                    return busy;
                }
                tried += 1;
                match self.region.merge(index as u64) {
                    Ok(()) => self.done(&mut units[index], touched),
                    Err(MergeRefusal::Busy) => busy = true,
                    Err(MergeRefusal::NoMemory) => {
                        self.again.later(REST);
                        return busy;
                    }
                    Err(refusal) => {
                        units[index] = true;
                        if self.refused(refusal) {
                            return false;
                        }
                    }
                }
            }
            if !throttle.keep(since) {
                return busy;
            }
        }
    }

    /// Returns whether `refusal` applies to the whole region permanently, and records it if so. The kernel
    /// does not support or does not permit merging if this is its answer before anything of the region was
    /// merged.
    fn refused(&self, refusal: MergeRefusal) -> bool {
        match refusal {
            MergeRefusal::Unable(errno) if self.merged.load(Ordering::Relaxed) == 0 => {
                let _ = self.refusal.set(errno);
                true
            }
            _ => false,
        }
    }

    /// Commits the units of one part of the region, in huge pages as far as the kernel permits.
    pub(super) fn commit_part(&self, part: usize) -> Result<()> {
        let first = part as u64 * UNITS_OF_A_PART;
        for unit in first..(first + UNITS_OF_A_PART).min(self.region.units()) {
            match self.region.commit(unit)? {
                Ok(()) => self.committed(unit),
                // A region of reserved huge pages needs no merging, so only a region of ordinary pages
                // records the refusal.
                Err(refusal) if self.region.merges() => {
                    self.refused(refusal);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Records that all of `unit` was committed in one huge page.
    fn committed(&self, unit: u64) {
        let index = usize::try_from(unit).unwrap_or(usize::MAX);
        let mut units = self.units.lock();
        if units.len() <= index {
            units.resize(index + 1, false);
        }
        self.done(&mut units[index], Region::UNIT_BYTES);
    }

    /// Returns what was merged of the region.
    pub(super) fn report(&self) -> Merged {
        Merged { bytes: self.merged.load(Ordering::Relaxed), errno: self.refusal.get().copied() }
    }

    fn done(&self, unit: &mut bool, touched: u64) {
        *unit = true;
        self.merged.fetch_add(Region::UNIT_BYTES, Ordering::Relaxed);
        self.seen.fetch_add(Region::UNIT_BYTES - touched, Ordering::Relaxed);
    }

    /// Returns the next unit, from `next` on, of which any page was touched and that is not done.
    fn open_unit(&self, units: &mut Vec<bool>, mut next: usize) -> Option<usize> {
        loop {
            let touched = usize::try_from(self.region.touched_unit(next as u64)?).ok()?;
            if touched >= units.len() {
                units.resize(touched + 1, false);
            }
            // Units that are done are often adjacent, and are skipped without a system call for each.
            match units[touched..].iter().position(|&done| !done) {
                Some(0) => return Some(touched),
                Some(open) => next = touched + open,
                None => next = units.len(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::pipe::{SpliceFlags, pipe, splice};

    use super::*;
    use crate::huge_pages::throttle::Closing;
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

    fn walk(merging: &Merging) {
        merging.walk(&mut Throttle::new(&Closing::default()), REST);
    }

    #[test]
    fn units_in_use_are_tried_again_later() {
        let region = touched();
        // Pages in a pipe are in use until the pipe is read.
        let (reader, writer) = pipe().unwrap();
        let (mut from, file) = (Region::UNIT_BYTES, region.descriptor().unwrap());
        assert_eq!(splice(file, Some(&mut from), writer, None, 4096, SpliceFlags::empty()), Ok(4096));
        let merging = Merging::new(region.clone());
        assert!(merging.due());
        walk(&merging);
        assert!(!merging.due(), "it is left alone for a while");
        let merged = || merging.report().bytes / Region::UNIT_BYTES;
        if merging.report().errno.is_some() {
            assert_eq!(merged(), 0, "this kernel never merges");
            return;
        }
        assert_eq!(merged(), UNITS as u64 - 1);
        drop(reader);
        // The kernel may keep a reference to the page for a moment.
        for _ in 0..100 {
            merging.again.at_once();
            assert!(merging.due());
            walk(&merging);
            if merged() == UNITS as u64 {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        assert_eq!(merged(), UNITS as u64);
        merging.again.at_once();
        walk(&merging);
        assert!(!merging.due() && !merging.again.due(), "nothing is left");
    }

    #[test]
    fn memory_that_is_reserved_is_committed_and_no_refusal() {
        let region =
            Arc::new(Region::shared("test", 4 * Region::UNIT_BYTES).unwrap().made_of_reserved_pages());
        assert!(!region.merges());
        let merging = Arc::new(Merging::new(region.clone()));
        merging.commit_part(0).unwrap();
        assert_eq!(region.committed_bytes(), 4 * Region::UNIT_BYTES);
        assert_eq!((merging.refusal.get(), merging.merged.load(Ordering::Relaxed)), (None, 0));
    }
}
