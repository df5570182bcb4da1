//! The values that a store has reported as wrong. Until the keeper has answered, the store takes them for absent.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use llm_datadist_core::bindings::keeper::Mutex;

use crate::index::Location;

/// Maximum number of locations that are remembered. A keeper that is further behind runs on a broken machine.
const MAX_REPORTED: usize = 256;

/// Locations whose values the keeper was told not to match their checksums. The keeper may not have read this yet, so it may still have them.
#[derive(Debug, Default)]
pub(crate) struct ReportedLocations {
    /// So that a look at a key is cheap while there are none.
    any: AtomicBool,
    locations: Mutex<VecDeque<Location>>,
}

impl ReportedLocations {
    /// Adds a location. The oldest one is forgotten if there are too many.
    pub(crate) fn add(&self, location: Location) {
        let mut locations = self.locations.lock();
        if locations.len() == MAX_REPORTED {
            locations.pop_front();
        }
        locations.push_back(location);
        self.any.store(true, Ordering::Release);
    }

    /// Returns whether this location was reported, and not forgotten.
    pub(crate) fn has(&self, location: &Location) -> bool {
        self.any.load(Ordering::Acquire) && self.locations.lock().contains(location)
    }

    /// Forgets a location: the keeper has read the report, and still has the value.
    pub(crate) fn forget(&self, location: &Location) {
        if self.any.load(Ordering::Acquire) {
            let mut locations = self.locations.lock();
            locations.retain(|reported| reported != location);
            self.any.store(!locations.is_empty(), Ordering::Release);
        }
    }
}
