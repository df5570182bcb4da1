//! The values that a store has reported as wrong. Until the keeper has answered, the store takes them for absent.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::bindings::keeper::Mutex;

use crate::index::Place;

/// The most places that are remembered: a keeper that is behind with more of them has a broken machine.
const MAX_REPORTED: usize = 256;

/// Places whose values the keeper was told not to match their checksums. The keeper may not have read this yet, so it may still have them.
#[derive(Debug, Default)]
pub(crate) struct ReportedPlaces {
    /// So that a look at a key is cheap while there are none.
    any: AtomicBool,
    places: Mutex<VecDeque<Place>>,
}

impl ReportedPlaces {
    /// Adds a place. The oldest one is forgotten if there are too many.
    pub(crate) fn add(&self, place: Place) {
        let mut places = self.places.lock();
        if places.len() == MAX_REPORTED {
            places.pop_front();
        }
        places.push_back(place);
        self.any.store(true, Ordering::Release);
    }

    /// Returns whether this place was reported, and not forgotten.
    pub(crate) fn has(&self, place: &Place) -> bool {
        self.any.load(Ordering::Acquire) && self.places.lock().contains(place)
    }

    /// Forgets a place: the keeper has read the report, and still has the value.
    pub(crate) fn forget(&self, place: &Place) {
        if self.any.load(Ordering::Acquire) {
            let mut places = self.places.lock();
            places.retain(|reported| reported != place);
            self.any.store(!places.is_empty(), Ordering::Release);
        }
    }
}
