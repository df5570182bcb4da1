//! The ids of the caches of a peer that calls have asked for by name.

use std::sync::Arc;

use hashbrown::HashMap;

use crate::model::CacheId;

/// Maximum number of names that a link stores.
const MAX_NAMES: usize = 1024;

/// The ids of named caches, as the peer reported them. Their owner may have released them since.
#[derive(Debug, Default)]
pub(super) struct KnownNames(HashMap<Arc<str>, CacheId>);

impl KnownNames {
    pub(super) fn get(&self, name: &str) -> Option<CacheId> {
        self.0.get(name).copied()
    }

    /// Stores an id if there is memory. If there are [`MAX_NAMES`] others, first discards an arbitrary half of them. Each
    /// discarded one costs a request when it is next needed.
    pub(super) fn insert(&mut self, name: &Arc<str>, cache: CacheId) {
        if self.0.len() >= MAX_NAMES && !self.0.contains_key(name) {
            let mut kept = true;
            self.0.retain(|_, _| {
                kept = !kept;
                kept
            });
        }
        if self.0.try_reserve(1).is_ok() {
            self.0.insert(name.clone(), cache);
        }
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn at_most_1024_names_are_kept() {
        let name = |number: i64| -> Arc<str> { number.to_string().into() };
        let mut names = KnownNames::default();
        let most = i64::try_from(MAX_NAMES).unwrap();
        for number in 0..3 * most {
            names.insert(&name(number), CacheId(number));
            assert_eq!(names.get(&name(number)), Some(CacheId(number)));
            assert!(names.0.len() <= MAX_NAMES);
        }
        assert!(names.0.len() > MAX_NAMES / 2, "only as many are discarded as needed");
        // A name that is stored already takes no further room.
        let mut full = KnownNames::default();
        (0..most).for_each(|number| full.insert(&name(number), CacheId(number)));
        full.insert(&name(7), CacheId(-7));
        assert_eq!(
            (full.0.len(), full.get("7"), full.get("8")),
            (MAX_NAMES, Some(CacheId(-7)), Some(CacheId(8)))
        );
        full.remove("7");
        assert_eq!(full.get("7"), None);
    }
}
