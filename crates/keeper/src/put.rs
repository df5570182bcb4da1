//! The put of a store: the values of the keys that the keeper does not have.

use llm_datadist_core::bindings::keeper::Window;
use llm_datadist_core::{Deadline, Result};

use crate::attachment::Attachment;
use crate::key::StoreKey;
use crate::messages::Stored;

/// Has the keeper copy the value of each key that it does not have, the end of a chain first, and writes to `results` what became of
/// each. At most one thread may call this at a time. After an error, the attachment must not be used any more.
pub(crate) fn put_missing(
    attachment: &Attachment,
    keys: &[StoreKey],
    values: &[Window<'_>],
    deadline: Deadline,
    results: &mut [Stored],
) -> Result<()> {
    let mut missing = Vec::with_capacity(keys.len());
    for (at, key) in keys.iter().enumerate() {
        match attachment.place(key) {
            Some(_) => results[at] = Stored::Present,
            None => missing.push(at),
        }
    }
    let touch_known = || {
        let slots = keys.iter().filter_map(|key| attachment.place(key)).map(|place| place.slot);
        attachment.touch(&slots.collect::<Vec<_>>());
    };
    // So that the new values do not replace those of this call.
    let some_known = missing.len() < keys.len();
    if some_known && !missing.is_empty() {
        touch_known();
    }
    let pairs: Vec<_> = missing.iter().map(|&at| (keys[at], values[at])).collect();
    let mut stored = vec![Stored::Away; missing.len()];
    let put = attachment.put(&pairs, &mut stored, deadline);
    missing.iter().zip(stored).for_each(|(&at, stored)| results[at] = stored);
    put?;
    // In the order of the chain.
    if some_known {
        touch_known();
    }
    Ok(())
}
