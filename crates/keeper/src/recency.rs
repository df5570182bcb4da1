//! The order in which slots were used: a linked list of slot numbers, the least recently used one first.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::SharedWords;

/// Name of the list in out-of-memory errors.
const LIST: &str = "the order of slots";

/// A list of slots, each at most once.
#[derive(Debug)]
pub(crate) struct Recency {
    /// For each slot, those before and after it. The last entry is the two ends of the list, which is a ring.
    neighbours: Vec<(u32, u32)>,
    /// For each slot, the number of uses of all slots when it was used last. The memory outlives the process.
    used: Arc<SharedWords>,
    /// The uses of all slots.
    uses: u64,
}

impl Recency {
    /// Creates an empty list for slots below `slots`, over the last uses of slots. Returns `Err(OutOfMemory)` if there is no memory for
    /// it.
    pub(crate) fn over(used: Arc<SharedWords>, slots: u32) -> Result<Recency> {
        let entries = slots + 1;
        let neighbours = fallible::collect(LIST, (0..entries).map(|slot| (slot, slot)))?;
        Ok(Recency { neighbours, used, uses: 0 })
    }

    /// Makes `slot` the most recently used one, whether it is in the list or not.
    pub(crate) fn touch(&mut self, slot: u32) {
        self.remove(slot);
        self.uses += 1;
        self.used.word(slot.into()).store(self.uses, Ordering::Relaxed);
        let end = self.end();
        let (last, _) = self.neighbours[end as usize];
        self.neighbours[slot as usize] = (last, end);
        self.neighbours[last as usize].1 = slot;
        self.neighbours[end as usize].0 = slot;
    }

    /// Removes `slot`, if it is in the list.
    pub(crate) fn remove(&mut self, slot: u32) {
        let (before, after) = self.neighbours[slot as usize];
        self.neighbours[before as usize].1 = after;
        self.neighbours[after as usize].0 = before;
        self.neighbours[slot as usize] = (slot, slot);
    }

    /// Returns a number that is larger for a slot that was used later, whether the slot is in the list or not.
    pub(crate) fn used(&self, slot: u32) -> u64 {
        self.used.word(slot.into()).load(Ordering::Relaxed)
    }

    /// Returns the least recently used slot.
    pub(crate) fn oldest(&self) -> Option<u32> {
        let (_, first) = self.neighbours[self.end() as usize];
        (first != self.end()).then_some(first)
    }

    /// Returns the entry of the two ends, whose number is behind that of the last slot.
    fn end(&self) -> u32 {
        u32::try_from(self.neighbours.len() - 1).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_oldest_is_that_of_a_list(calls in prop::collection::vec((any::<bool>(), 0u32..6), 0..60)) {
            let used = Arc::new(SharedWords::new("a test", 6).unwrap());
            let (mut recency, mut model) = (Recency::over(used, 6).unwrap(), Vec::new());
            for (touch, slot) in calls {
                model.retain(|&other| other != slot);
                if touch {
                    recency.touch(slot);
                    model.push(slot);
                } else {
                    recency.remove(slot);
                }
                prop_assert_eq!(recency.oldest(), model.first().copied());
            }
            let used: Vec<u64> = model.iter().map(|&slot| recency.used(slot)).collect();
            prop_assert!(used.is_sorted_by(|earlier, later| earlier < later));
            while let Some(oldest) = recency.oldest() {
                prop_assert_eq!(oldest, model.remove(0));
                recency.remove(oldest);
            }
            prop_assert!(model.is_empty());
        }
    }
}
