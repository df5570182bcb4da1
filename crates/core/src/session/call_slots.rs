//! Limits how many calls of one peer are answered at a time, so that no peer occupies all threads.
//!
//! Each link has one slot of its own. [`SHARED`] more belong to all links, and one link may use half of those
//! (`one_link_gets_its_own_slot_and_half_of_the_shared`). Jobs that find no slot wait here.
//!
//! A write over several streams pins its rows until all of its parts have arrived. If a part waited for slots in which other
//! requests wait for these rows, none of them would go on. So each link has [`FOR_PARTS`] slots for parts, in which no request waits for
//! rows. The kind of a request is known only after it was read. So any job that may be a part takes such a slot, and
//! [exchanges](Slots::exchange) it if its request may wait for rows.

use std::collections::VecDeque;
use std::hash::Hash;

use hashbrown::HashMap;

/// Slots beyond the own slot of each link.
const SHARED: usize = 32;
/// Maximum number of shared slots that one link may use.
const SHARED_BY_ONE: usize = SHARED / 2;
/// Slots of each link for parts of its writes over several streams.
const FOR_PARTS: usize = 16;

/// The kind of slot in which a call is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallSlot {
    /// The own slot of the link.
    Own,
    /// A slot that all links share.
    Shared,
    /// A slot of the link for parts of its writes over several streams.
    Parts,
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

/// The slots in use and the waiting jobs of one link. Removed when there are none.
#[derive(Debug)]
struct OfLink<Job> {
    own: usize,
    shared: usize,
    for_parts: usize,
    queue: VecDeque<WaitingJob<Job>>,
}

#[derive(Debug)]
struct WaitingJob<Job> {
    job: Job,
    may_be_part: bool,
}

impl<Job> OfLink<Job> {
    fn new() -> Self {
        OfLink { own: 0, shared: 0, for_parts: 0, queue: VecDeque::new() }
    }

    fn may_share(&self) -> bool {
        self.shared < SHARED_BY_ONE
    }

    fn used(&mut self, slot: CallSlot) -> &mut usize {
        match slot {
            CallSlot::Own => &mut self.own,
            CallSlot::Shared => &mut self.shared,
            CallSlot::Parts => &mut self.for_parts,
        }
    }

    /// Returns the index of the waiting job that is the next to take `slot`.
    fn next(&self, slot: CallSlot) -> Option<usize> {
        self.queue.iter().position(|waiting| waiting.may_be_part || slot != CallSlot::Parts)
    }
}

impl<Link, Job> Default for Slots<Link, Job> {
    fn default() -> Self {
        Slots { links: HashMap::new(), waiting: VecDeque::new(), shared: 0 }
    }
}

impl<Link: Eq + Hash + Copy, Job> Slots<Link, Job> {
    /// Takes a slot for a job of `link` and returns both. If there is none, queues the job and returns `None`. A job that `may_be_part`
    /// also takes a slot for parts.
    pub(super) fn enter(&mut self, link: Link, job: Job, may_be_part: bool) -> Option<(Job, CallSlot)> {
        if let Some(slot) = self.take(link, may_be_part) {
            return Some((job, slot));
        }
        self.queue(link, usize::MAX, WaitingJob { job, may_be_part });
        None
    }

    /// Releases a slot of `link`, and returns the waiting job that takes it. The own slot passes to a job of the same link, and a slot
    /// for parts to one that may be a part. A shared slot passes to the link that has waited longest among those that may use one more.
    pub(super) fn leave(&mut self, link: Link, slot: CallSlot) -> Option<(Job, CallSlot)> {
        let of_link = self.links.get_mut(&link)?;
        // `Server::fail` may have removed the slots of this link while the job ran, and the link may have entered new jobs since.
        *of_link.used(slot) = of_link.used(slot).checked_sub(1)?;
        self.shared -= usize::from(slot == CallSlot::Shared);
        let next = if slot == CallSlot::Shared { self.sharer() } else { Some(link) };
        let job = next.and_then(|next| self.take_waiting(next, slot));
        if next != Some(link) || job.is_none() {
            self.forget(link);
        }
        job
    }

    /// Exchanges the slot for parts of a `job` that may wait for rows. Returns the job with its new slot. If none is free, queues the job
    /// after those that were read before, and returns the job that takes the slot for parts, if any.
    pub(super) fn exchange(&mut self, link: Link, job: Job) -> Option<(Job, CallSlot)> {
        // Once its jobs were taken from the server, the link has no slots. It has ended, and so the job ends at once.
        if !self.links.contains_key(&link) {
            return Some((job, CallSlot::Own));
        }
        if let Some(slot) = self.take(link, false) {
            // No job of the link waits, so no job takes the slot for parts.
            self.leave(link, CallSlot::Parts);
            return Some((job, slot));
        }
        let unread = self.links.get(&link).and_then(|of_link| of_link.next(CallSlot::Parts));
        self.queue(link, unread.unwrap_or(usize::MAX), WaitingJob { job, may_be_part: false });
        self.leave(link, CallSlot::Parts)
    }

    /// Whether a waiting job could use this slot of `link`.
    pub(super) fn wanted(&self, link: Link, slot: CallSlot) -> bool {
        let by_own = self.links.get(&link).is_some_and(|of_link| of_link.next(slot).is_some());
        by_own || (slot == CallSlot::Shared && self.sharer().is_some())
    }

    /// Returns the first waiting link that may use one more shared slot. At most two links can have reached their limit.
    fn sharer(&self) -> Option<Link> {
        let may_share = |waits: &&Link| self.links.get(*waits).is_some_and(OfLink::may_share);
        self.waiting.iter().find(may_share).copied()
    }

    /// Takes a free slot for a job of `link`.
    fn take(&mut self, link: Link, may_be_part: bool) -> Option<CallSlot> {
        let of_link = self.links.entry(link).or_insert_with(OfLink::new);
        let slot = if of_link.own == 0 {
            CallSlot::Own
        } else if self.shared < SHARED && of_link.may_share() {
            CallSlot::Shared
        } else if may_be_part && of_link.for_parts < FOR_PARTS {
            CallSlot::Parts
        } else {
            return None;
        };
        *of_link.used(slot) += 1;
        self.shared += usize::from(slot == CallSlot::Shared);
        Some(slot)
    }

    /// Queues a job of `link` at the index `at`, or at the end if there are fewer.
    fn queue(&mut self, link: Link, at: usize, job: WaitingJob<Job>) {
        let queue = &mut self.links.entry(link).or_insert_with(OfLink::new).queue;
        queue.insert(at.min(queue.len()), job);
        if queue.len() == 1 {
            self.waiting.push_back(link);
        }
    }

    /// Removes the waiting job of `link` that is the next to take `slot`, and gives it the slot.
    fn take_waiting(&mut self, link: Link, slot: CallSlot) -> Option<(Job, CallSlot)> {
        let of_link = self.links.get_mut(&link)?;
        let WaitingJob { job, .. } = of_link.next(slot).and_then(|at| of_link.queue.remove(at))?;
        *of_link.used(slot) += 1;
        self.shared += usize::from(slot == CallSlot::Shared);
        let (waits, moves) = (!of_link.queue.is_empty(), slot != CallSlot::Parts);
        if moves || !waits {
            self.waiting.retain(|waits| *waits != link);
        }
        if moves && waits {
            self.waiting.push_back(link);
        }
        Some((job, slot))
    }

    fn forget(&mut self, link: Link) {
        let unused = |of_link: &OfLink<Job>| {
            of_link.own + of_link.shared + of_link.for_parts == 0 && of_link.queue.is_empty()
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
    fn parts_find_a_slot_however_many_other_jobs_wait() {
        let mut slots = Slots::default();
        assert_eq!(fill(&mut slots, 1, 40), 1 + 16);
        assert!(!slots.wanted(1, CallSlot::Parts), "of the waiting jobs, none may be a part");
        for job in 100..116 {
            assert_eq!(slots.enter(1, job, true), Some((job, CallSlot::Parts)));
        }
        assert!((116..120).all(|job| slots.enter(1, job, true).is_none()));
        assert!(slots.wanted(1, CallSlot::Parts));
        // Jobs that wait for rows are queued in the order in which they were read.
        for (job, next) in (100..104).zip(116..120) {
            assert_eq!(slots.exchange(1, job), Some((next, CallSlot::Parts)));
        }
        assert_eq!(slots.exchange(1, 104), None, "no job takes the slot");
        assert_eq!(slots.enter(1, 200, true), Some((200, CallSlot::Parts)));
        assert_eq!(slots.leave(1, CallSlot::Parts), None, "jobs that are no parts do not take it");
        for expected in (17..40).chain(100..105) {
            assert_eq!(slots.leave(1, CallSlot::Own), Some((expected, CallSlot::Own)), "in their order");
        }
        assert_eq!(slots.leave(1, CallSlot::Own), None);
        assert_eq!(slots.exchange(1, 105), Some((105, CallSlot::Own)));
        let mut closed = Slots::default();
        assert_eq!(closed.exchange(1, 106), Some((106, CallSlot::Own)));
        assert_eq!(closed.leave(1, CallSlot::Own), None);
    }

    #[test]
    fn job_that_was_read_precedes_those_that_were_not() {
        let mut slots = Slots::default();
        assert_eq!(fill(&mut slots, 1, 17), 1 + 16);
        assert_eq!((100..120).filter_map(|job| slots.enter(1, job, true)).count(), 16);
        assert_eq!(slots.exchange(1, 100), Some((116, CallSlot::Parts)));
        for expected in [100, 117, 118, 119] {
            assert_eq!(slots.leave(1, CallSlot::Own), Some((expected, CallSlot::Own)));
        }
    }

    #[test]
    fn slot_for_parts_costs_a_link_no_place_among_those_that_wait() {
        let mut slots = Slots::default();
        assert_eq!((fill(&mut slots, 3, 17), fill(&mut slots, 4, 17)), (17, 17), "all shared slots");
        assert_eq!((0..19).filter_map(|job| slots.enter(1, job, true)).count(), 1 + 16);
        assert_eq!(fill(&mut slots, 2, 2), 1);
        assert_eq!(slots.leave(1, CallSlot::Parts), Some((17, CallSlot::Parts)));
        assert_eq!(slots.leave(3, CallSlot::Shared), Some((18, CallSlot::Shared)), "of link 1");
        assert_eq!(slots.leave(4, CallSlot::Shared), Some((1, CallSlot::Shared)), "of link 2");
    }

    #[test]
    fn slot_that_was_taken_before_the_server_lost_its_jobs_is_not_counted() {
        let mut slots = Slots::default();
        assert_eq!(slots.enter(1, 1, false), Some((1, CallSlot::Own)));
        assert_eq!(slots.leave(1, CallSlot::Shared), None);
        assert_eq!(slots.leave(1, CallSlot::Own), None);
        assert!(slots.links.is_empty());
    }

    #[test]
    fn every_job_gets_a_slot_and_nothing_is_left() {
        let (mut slots, mut taken, mut had) = (Slots::default(), VecDeque::new(), 0);
        for job in 0..1000_u32 {
            let link = job % 7 * (job % 3);
            taken.extend(slots.enter(link, (link, job), job % 5 == 0));
        }
        while let Some(((link, job), slot)) = taken.pop_front() {
            let is_part = slot == CallSlot::Parts && job % 10 == 0;
            if slot == CallSlot::Parts && !is_part {
                taken.extend(slots.exchange(link, (link, job)));
            } else {
                had += 1;
                taken.extend(slots.leave(link, slot));
            }
        }
        assert_eq!(had, 1000);
        assert_eq!((slots.links.len(), slots.waiting.len(), slots.shared), (0, 0, 0));
    }
}
