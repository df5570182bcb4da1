//! What happens to a local cache between a move and its comparison.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use llm_datadist_core::bindings::Cache;
use llm_datadist_core::testing::transfer::MOVED;

use crate::fixtures;

type Act = Box<dyn FnOnce(&Cache) + Send>;

/// What happens to a local cache, by the address of its first tensor, between the next move and its comparison.
static ACTS: Mutex<Option<HashMap<u64, Act>>> = Mutex::new(None);

/// Runs `act` after the next move into or out of `cache`, before the comparison.
pub fn after_the_move(cache: &Cache, act: impl FnOnce(&Cache) + Send + 'static) {
    let _ = MOVED.set(|cache| {
        let mut acts = ACTS.lock().unwrap_or_else(PoisonError::into_inner);
        let act = acts.as_mut().and_then(|acts| acts.remove(&cache.addrs()[0]));
        drop(acts);
        let changed = act.is_some();
        if let Some(act) = act {
            act(cache);
        }
        changed
    });
    let mut acts = ACTS.lock().unwrap_or_else(PoisonError::into_inner);
    acts.get_or_insert_default().insert(cache.addrs()[0], Box::new(act));
}

/// Changes bit `bit` of a tensor.
pub fn flip(cache: &Cache, tensor: usize, bit: u64) {
    let mut bytes = fixtures::contents(cache);
    bytes[tensor][usize::try_from(bit / 8).unwrap()] ^= 1 << (bit % 8);
    fixtures::fill(cache, &bytes);
}
