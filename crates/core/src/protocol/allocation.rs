//! Memory that is allocated while a message is read or written.

use std::cell::Cell;

use crate::error::Error;
use crate::fallible;

/// Name of these lists in out-of-memory errors.
pub(super) const MESSAGE: &str = "a message of a peer";

thread_local! {
    /// Why memory for the message being read or written could not be allocated. Kept here because errors of postcard carry
    /// no data.
    static SHORT: Cell<Option<Error>> = const { Cell::new(None) };
}

/// Returns and clears the error of an allocation that failed, if that is why the last message could not be read or written.
pub(super) fn short_of() -> Option<Error> {
    SHORT.take()
}

/// Records why a list could not be allocated, and returns the error for the reader of the message.
pub(super) fn no_memory<E: serde::de::Error>(error: Error) -> E {
    record(error);
    E::custom("no memory")
}

/// Records why memory for the message being read or written could not be allocated.
pub(super) fn record(error: Error) {
    SHORT.set(Some(error));
}

/// Adds an item. If it cannot be allocated, returns the error of [`no_memory`].
pub(super) fn append<T, E: serde::de::Error>(list: &mut Vec<T>, item: T) -> Result<(), E> {
    fallible::push(MESSAGE, list, item).map_err(no_memory)
}
