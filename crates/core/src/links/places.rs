//! At how many places the calls of one peer may be answered at a time, so that it takes none from others.
//!
//! Each link has one place of its own. [`SHARED`] more belong to all links; one of them may have half of those
//! (`peer_that_stalls_loses_its_rows_and_keeps_no_other_waiting`). Not for: what waits for a place (`server`).

use std::hash::Hash;

use hashbrown::{HashMap, HashSet};

/// Calls that may be answered at a time beyond one for each link.
const SHARED: usize = 32;
/// How many of them may be of one link.
const SHARED_BY_ONE: usize = SHARED / 2;

/// Where a call is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// The one that its link has.
    Own,
    /// One of those that belong to all.
    Shared,
}

/// The places that are taken, by what names a link.
#[derive(Debug)]
pub(super) struct Places<Link> {
    own: HashSet<Link>,
    /// How many each link has; none without any.
    shared: HashMap<Link, usize>,
    /// The sum of those.
    taken: usize,
}

impl<Link> Default for Places<Link> {
    fn default() -> Self {
        Places { own: HashSet::new(), shared: HashMap::new(), taken: 0 }
    }
}

impl<Link: Eq + Hash + Copy> Places<Link> {
    /// A place that `link` may take now.
    pub(super) fn free(&self, link: Link) -> Option<Place> {
        if !self.own.contains(&link) {
            return Some(Place::Own);
        }
        let has = self.shared.get(&link).copied().unwrap_or(0);
        (self.taken < SHARED && has < SHARED_BY_ONE).then_some(Place::Shared)
    }

    /// Takes a place that is [free](Self::free).
    pub(super) fn take(&mut self, link: Link, place: Place) {
        match place {
            Place::Own => drop(self.own.insert(link)),
            Place::Shared => {
                *self.shared.entry(link).or_default() += 1;
                self.taken += 1;
            }
        }
    }

    /// Leaves a place that `link` has taken.
    pub(super) fn leave(&mut self, link: Link, place: Place) {
        if place == Place::Own {
            self.own.remove(&link);
        } else if let Some(has) = self.shared.get_mut(&link) {
            *has -= 1;
            self.taken -= 1;
            if *has == 0 {
                self.shared.remove(&link);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes places for `link` until there is none; says how many.
    fn fill(places: &mut Places<u32>, link: u32) -> usize {
        let take = |_: &usize| match places.free(link) {
            Some(place) => {
                places.take(link, place);
                true
            }
            None => false,
        };
        (0..usize::MAX).take_while(take).count()
    }

    #[test]
    fn one_link_gets_its_own_place_and_half_of_the_shared() {
        let mut places = Places::default();
        assert_eq!(fill(&mut places, 1), 1 + 16);
        assert_eq!(fill(&mut places, 2), 1 + 16);
        for other in 3..100 {
            assert_eq!(fill(&mut places, other), 1, "its own place is always there");
        }
        places.leave(1, Place::Shared);
        assert_eq!(places.free(3), Some(Place::Shared), "what one leaves is for any");
        assert_eq!(fill(&mut places, 3), 1);
        places.leave(3, Place::Own);
        assert_eq!((places.free(1), places.free(3)), (None, Some(Place::Own)));
    }

    #[test]
    fn nothing_is_left_of_links_that_have_gone() {
        let mut places = Places::default();
        for link in 0..10 {
            places.take(link, Place::Own);
            places.take(link, Place::Shared);
        }
        for link in 0..10 {
            places.leave(link, Place::Own);
            places.leave(link, Place::Shared);
        }
        assert_eq!((places.own.len(), places.shared.len(), places.taken), (0, 0, 0));
    }
}
