//! The order in which slots were used: a linked list of slot numbers, the least recently used one first.

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;

/// Name of the list in out-of-memory errors.
const LIST: &str = "the order of slots";

/// A list of slots, each at most once.
#[derive(Debug)]
pub(crate) struct Recency {
    /// For each slot, those before and after it. The last entry is the two ends of the list, which is a ring.
    neighbours: Vec<(u32, u32)>,
}

impl Recency {
    /// Creates an empty list for slots below `slots`. Returns `Err(OutOfMemory)` if there is no memory for it.
    pub(crate) fn new(slots: u32) -> Result<Recency> {
        let entries = slots + 1;
        let neighbours = fallible::collect(LIST, (0..entries).map(|slot| (slot, slot)))?;
        Ok(Recency { neighbours })
    }

    /// Makes `slot` the most recently used one, whether it is in the list or not.
    pub(crate) fn touch(&mut self, slot: u32) {
        self.remove(slot);
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
            let (mut recency, mut model) = (Recency::new(6).unwrap(), Vec::new());
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
            while let Some(oldest) = recency.oldest() {
                prop_assert_eq!(oldest, model.remove(0));
                recency.remove(oldest);
            }
            prop_assert!(model.is_empty());
        }
    }
}
