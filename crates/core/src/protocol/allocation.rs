//! Lists of messages that are allocated while a message is read.

use std::cell::Cell;

use crate::fallible;

thread_local! {
    /// Number of bytes that could not be allocated for a list of the message being read. Kept here because
    /// errors of postcard carry no data.
    static SHORT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Returns and clears the number of bytes that could not be allocated for a list of the last message, if that
/// is why it could not be read.
pub(super) fn short_of() -> Option<usize> {
    SHORT.take()
}

/// Returns the error for `bytes` bytes that could not be allocated, and records them.
pub(super) fn no_memory<E: serde::de::Error>(bytes: usize) -> E {
    SHORT.set(Some(bytes));
    E::custom("no memory")
}

/// Adds an item. If it cannot be allocated, returns the error of [`no_memory`].
pub(super) fn append<T, E: serde::de::Error>(list: &mut Vec<T>, item: T) -> Result<(), E> {
    if fallible::grow("", list, 1).is_err() {
        return Err(no_memory(2 * list.len().max(1) * size_of::<T>()));
    }
    list.push(item);
    Ok(())
}
