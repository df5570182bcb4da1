//! Limits how many calls of one peer are answered at a time, so that no peer occupies all threads.
//!
//! Each link has one slot of its own. [`SHARED`] more belong to all links, and one link may use half of those
//! (`one_link_gets_its_own_slot_and_half_of_the_shared`). Jobs that find no slot wait here.

use std::collections::VecDeque;
use std::hash::Hash;

use hashbrown::HashMap;

/// Slots beyond the own slot of each link.
const SHARED: usize = 32;
/// Maximum number of shared slots that one link may use.
const SHARED_BY_ONE: usize = SHARED / 2;
/// Maximum number of extra slots of one link. The rows of a write over several streams are pinned until all of its parts have
/// arrived, so these must not wait for slots in which other calls wait for the rows.
const EXTRA: usize = 16;

/// The kind of slot in which a call is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallSlot {
    /// The own slot of the link.
    Own,
    /// A slot that all links share.
    Shared,
    /// A slot for a link whose writes over several streams wait for parts.
    Extra,
}

/// The slots in use, and the jobs that wait for one. `Link` identifies a link.
#[derive(Debug)]
pub(super) struct Slots<Link, Job> {
    links: HashMap<Link, OfLink<Job>>,
    /// Links with waiting jobs, each once. When a link gets a slot for a waiting job, it moves to the end.
    waiting: VecDeque<Link>,
    /// Number of shared slots in use.
    shared: usize,
}

/// The slots and waiting jobs of one link. Removed when there are none.
#[derive(Debug)]
struct OfLink<Job> {
    own: bool,
    shared: usize,
    extra: usize,
    queue: VecDeque<Job>,
}

impl<Job> OfLink<Job> {
    fn may_share(&self) -> bool {
        self.shared < SHARED_BY_ONE
    }
}

impl<Link, Job> Default for Slots<Link, Job> {
    fn default() -> Self {
        Slots { links: HashMap::new(), waiting: VecDeque::new(), shared: 0 }
    }
}

impl<Link: Eq + Hash + Copy, Job> Slots<Link, Job> {
    /// Takes a slot for a job of `link` and returns both. If there is none, queues the job and returns
    /// `None`. `extra` is whether writes of the link over several streams wait for parts.
    pub(super) fn enter(&mut self, link: Link, job: Job, extra: bool) -> Option<(Job, CallSlot)> {
        let empty = || OfLink { own: false, shared: 0, extra: 0, queue: VecDeque::new() };
        let of_link = self.links.entry(link).or_insert_with(empty);
        if !of_link.own {
            of_link.own = true;
            return Some((job, CallSlot::Own));
        }
        if self.shared < SHARED && of_link.may_share() {
            of_link.shared += 1;
            self.shared += 1;
            return Some((job, CallSlot::Shared));
        }
        if extra && of_link.extra < EXTRA {
            of_link.extra += 1;
            return Some((job, CallSlot::Extra));
        }
        of_link.queue.push_back(job);
        if of_link.queue.len() == 1 {
            self.waiting.push_back(link);
        }
        None
    }

    /// Releases a slot of `link`, and returns the waiting job that takes it. The own slot passes to a job of the same link,
    /// and an extra slot to nobody. A shared slot passes to the link that has waited longest among those that may use one more.
    pub(super) fn leave(&mut self, link: Link, slot: CallSlot) -> Option<(Job, CallSlot)> {
        let of_link = self.links.get_mut(&link)?;
        match slot {
            CallSlot::Own => of_link.own = false,
            CallSlot::Shared => {
                of_link.shared -= 1;
                self.shared -= 1;
            }
            CallSlot::Extra => of_link.extra -= 1,
        }
        let next = match slot {
            CallSlot::Extra => None,
            CallSlot::Own if of_link.queue.is_empty() => None,
            CallSlot::Own => self.waiting.iter().position(|waits| *waits == link),
            CallSlot::Shared => self.sharer(),
        };
        let Some(next) = next.and_then(|at| self.waiting.remove(at)) else {
            self.forget(link);
            return None;
        };
        let of_next = self.links.get_mut(&next)?;
        let job = of_next.queue.pop_front()?;
        match slot {
            CallSlot::Own => of_next.own = true,
            CallSlot::Shared => {
                of_next.shared += 1;
                self.shared += 1;
            }
            CallSlot::Extra => {}
        }
        if !of_next.queue.is_empty() {
            self.waiting.push_back(next);
        }
        if next != link {
            self.forget(link);
        }
        Some((job, slot))
    }

    /// Whether a waiting job could use this slot of `link`.
    pub(super) fn wanted(&self, link: Link, slot: CallSlot) -> bool {
        let own_waits = self.links.get(&link).is_some_and(|of_link| !of_link.queue.is_empty());
        (own_waits && slot != CallSlot::Extra) || (slot == CallSlot::Shared && self.sharer().is_some())
    }

    /// Finds the first waiting link that may use one more shared slot. At most two links can have reached
    /// their limit.
    fn sharer(&self) -> Option<usize> {
        self.waiting.iter().position(|waits| self.links.get(waits).is_some_and(OfLink::may_share))
    }

    fn forget(&mut self, link: Link) {
        let unused = |of_link: &OfLink<Job>| {
            !of_link.own && of_link.shared + of_link.extra == 0 && of_link.queue.is_empty()
        };
        if self.links.get(&link).is_some_and(unused) {
            self.links.remove(&link);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Enters `count` jobs of `link`, and returns how many got a slot.
    fn fill(slots: &mut Slots<u32, u32>, link: u32, count: u32) -> usize {
        (0..count).filter_map(|job| slots.enter(link, job, false)).count()
    }

    #[test]
    fn one_link_gets_its_own_slot_and_half_of_the_shared() {
        let mut slots = Slots::default();
        assert_eq!(fill(&mut slots, 1, 40), 1 + 16);
        assert!(!slots.wanted(2, CallSlot::Shared), "who has all of its share waits for nothing of others");
        assert_eq!(fill(&mut slots, 2, 40), 1 + 16);
        for other in 3..100 {
            assert_eq!(fill(&mut slots, other, 2), 1, "its own slot is always there");
        }
        assert!(slots.wanted(3, CallSlot::Own) && slots.wanted(2, CallSlot::Shared));
        // A shared slot passes to the link that has waited longest among those that may use it, then to the
        // others in turn.
        assert_eq!(slots.leave(1, CallSlot::Shared), Some((17, CallSlot::Shared)), "of link 1");
        assert_eq!(slots.leave(2, CallSlot::Own), Some((17, CallSlot::Own)), "of link 2");
        assert_eq!(slots.leave(2, CallSlot::Shared), Some((1, CallSlot::Shared)), "of link 3");
        assert_eq!(slots.leave(3, CallSlot::Own), None);
        assert!(!slots.wanted(3, CallSlot::Own) && slots.wanted(3, CallSlot::Shared));
    }

    #[test]
    fn parts_of_writes_find_a_slot_beside_those_of_waiting_calls() {
        let mut slots = Slots::default();
        assert_eq!(fill(&mut slots, 1, 40), 1 + 16);
        let extra = (100..140).filter_map(|job| slots.enter(1, job, true)).collect::<Vec<_>>();
        assert_eq!(extra.len(), 16);
        assert!(extra.iter().all(|(_, slot)| *slot == CallSlot::Extra));
        assert!(!slots.wanted(1, CallSlot::Extra));
        assert_eq!(slots.leave(1, CallSlot::Extra), None, "it passes to nobody");
        assert_eq!(slots.enter(1, 200, true), Some((200, CallSlot::Extra)));
    }

    #[test]
    fn every_job_gets_a_slot_and_nothing_is_left() {
        let (mut slots, mut taken, mut had) = (Slots::default(), VecDeque::new(), 0);
        for job in 0..1000_u32 {
            let link = job % 7 * (job % 3);
            taken.extend(slots.enter(link, (link, job), job % 5 == 0));
        }
        while let Some(((link, _), slot)) = taken.pop_front() {
            had += 1;
            taken.extend(slots.leave(link, slot));
        }
        assert_eq!(had, 1000);
        assert_eq!((slots.links.len(), slots.waiting.len(), slots.shared), (0, 0, 0));
    }
}
