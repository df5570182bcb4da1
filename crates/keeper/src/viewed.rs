//! Which keys the views of an attached store have, so that one view does not end the leases of another.

use std::collections::HashMap;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::Mutex;

use crate::key::StoreKey;

/// For each key, in how many views it is.
#[derive(Debug, Default)]
pub(crate) struct ViewedKeys(Mutex<HashMap<StoreKey, u32>>);

impl ViewedKeys {
    /// Counts the keys of a view, before it leases them. Returns `Err(OutOfMemory)` if memory is short.
    pub(crate) fn add(&self, keys: &[StoreKey]) -> Result<()> {
        let mut views = self.0.lock();
        let bytes = keys.len() * size_of::<(StoreKey, u32)>();
        let no_memory = |_| fallible::out_of_memory("the keys of a view", bytes);
        views.try_reserve(keys.len()).map_err(no_memory)?;
        for key in keys {
            *views.entry(*key).or_default() += 1;
        }
        Ok(())
    }

    /// Counts the keys of a view no more, and calls `end` with those that are in no view now. A view that is made meanwhile waits until
    /// `end` returns, so that its leases come later.
    pub(crate) fn remove(&self, keys: &[StoreKey], end: impl FnOnce(&[StoreKey])) {
        let mut views = self.0.lock();
        let mut last = Vec::with_capacity(keys.len());
        for key in keys {
            let Some(count) = views.get_mut(key) else { continue };
            *count -= 1;
            if *count == 0 {
                views.remove(key);
                last.push(*key);
            }
        }
        end(&last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_ends_with_its_last_view() {
        let key = |number: u8| StoreKey::read(0, &[number; 28]).unwrap();
        let viewed = ViewedKeys::default();
        let removed = |keys: &[StoreKey]| {
            let mut ended = Vec::new();
            viewed.remove(keys, |last| ended = last.into());
            ended
        };
        viewed.add(&[key(1), key(2), key(2)]).unwrap();
        viewed.add(&[key(2), key(3)]).unwrap();
        assert_eq!(removed(&[key(1), key(2), key(2)]), [key(1)]);
        assert_eq!(removed(&[key(2), key(3)]), [key(2), key(3)]);
        assert_eq!(removed(&[key(2)]), []);
        assert!(viewed.0.lock().is_empty());
    }
}
