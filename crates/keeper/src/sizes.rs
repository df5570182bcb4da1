//! Sizes: of values, of slots, and of what a client and the keeper share.

use std::time::Duration;

use llm_datadist_core::bindings::keeper::Generations;
use llm_datadist_core::{Error, Result};

/// The most keys of one call.
pub const MAX_KEYS: usize = 4096;
/// The largest value in bytes.
pub const MAX_VALUE: u64 = 64 << 20;
/// The longest text of a namespace in bytes.
pub const MAX_NAMESPACE: usize = 4096;
/// The longest time of a lease.
pub const MAX_LEASE: Duration = Duration::from_secs(10);
/// The most clients of a keeper.
pub(crate) const MAX_CLIENTS: usize = 64;
/// The most observers of a keeper. They do not count as clients.
pub(crate) const MAX_OBSERVERS: usize = 8;
/// How many of the places for clients, and of those for observers, only the role `admin` may take. So others cannot keep the user of
/// the keeper out.
pub(crate) const RESERVED_CLIENTS: usize = 8;
pub(crate) const RESERVED_OBSERVERS: usize = 2;
/// The most connections of a keeper that have not attached. Beyond it, the oldest one is closed.
pub(crate) const MAX_PENDING: usize = 16;
/// The most namespaces of a keeper.
pub(crate) const MAX_NAMESPACES: usize = 4096;
/// The most keys of one message, so that a message always fits the queue of a socket.
pub(crate) const MESSAGE_KEYS: usize = 1024;
/// The longest message in bytes: the keys, with a few bytes around them.
pub(crate) const MESSAGE_BYTES: usize = 48 << 10;
/// The most values of a page of a list, so that it fits a message.
pub(crate) const PAGE_VALUES: usize = 960;
/// The most slots that the keeper looks at for a page, so that other clients do not wait for long.
pub(crate) const PAGE_SLOTS: u32 = 1 << 16;
/// The most namespaces of a page, so that it fits a message.
pub(crate) const PAGE_NAMESPACES: usize = 11;
/// Bytes of the memory of a client from which the keeper copies, unless one value is larger.
const STAGING_BYTES: u64 = 4 << 20;
/// Slots start at a multiple of this, a cache line.
const SLOT_STEP: u64 = 64;

/// Checks the bytes of a value.
pub(crate) fn check_value(value: u64) -> Result<()> {
    let range = format!("1 to {MAX_VALUE}");
    if (1..=MAX_VALUE).contains(&value) { Ok(()) } else { Err(Error::out_of_range("value", value, range)) }
}

/// Checks the text of a namespace.
pub(crate) fn check_namespace(text: &str) -> Result<()> {
    let allowed = format!("1 to {MAX_NAMESPACE} bytes of UTF-8");
    match text.len() {
        1..=MAX_NAMESPACE => Ok(()),
        bytes => Err(Error::argument("namespace", format_args!("{bytes} bytes"), allowed)),
    }
}

/// Checks the number of keys of a call.
pub(crate) fn check_keys(count: usize) -> Result<()> {
    let allowed = format!("at most {MAX_KEYS}");
    if count <= MAX_KEYS { Ok(()) } else { Err(Error::argument("len(keys)", count, allowed)) }
}

/// Checks the time of a lease.
pub(crate) fn check_lease(time: Duration) -> Result<()> {
    let allowed = format!("above 0 and at most {} seconds", MAX_LEASE.as_secs());
    let fits = !time.is_zero() && time <= MAX_LEASE;
    if fits { Ok(()) } else { Err(Error::argument("ttl", time.as_secs_f64(), allowed)) }
}

/// Returns the bytes of a slot for values of at most `value` bytes.
pub(crate) fn slot_bytes(value: u64) -> u64 {
    value.next_multiple_of(SLOT_STEP)
}

/// Returns the number of slots of `memory` bytes for values of at most `value` bytes.
pub(crate) fn slots(memory: u64, value: u64) -> Result<u32> {
    let slot = slot_bytes(value);
    match u32::try_from(memory / slot) {
        Ok(0) => Err(Error::argument(
            "memory",
            memory,
            format_args!("at least {slot} bytes, the slot of one value"),
        )),
        Ok(slots) if slots <= Generations::CACHES => Ok(slots),
        _ => {
            let most = u64::from(Generations::CACHES) * slot;
            Err(Error::argument("memory", memory, format_args!("at most {most} for values of {value} bytes")))
        }
    }
}

/// Returns how many values of `value` bytes a client gives to the keeper at a time.
pub(crate) fn staged_values(value: u64) -> usize {
    usize::try_from(STAGING_BYTES / value).unwrap_or(MESSAGE_KEYS).clamp(1, MESSAGE_KEYS)
}

/// Returns the bytes of the memory from which the keeper copies values of `value` bytes.
pub(crate) fn staging_bytes(value: u64) -> u64 {
    staged_values(value) as u64 * value
}

/// Returns the most bytes that the keeper maps of one client.
pub(crate) fn most_staging_bytes(slot_bytes: u64) -> u64 {
    STAGING_BYTES.max(slot_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_has_whole_slots() {
        assert_eq!(slots(1000, 100).unwrap(), 7);
        assert_eq!(slots(128, 128).unwrap(), 1);
        assert_eq!(
            slots(127, 128).unwrap_err().reason(),
            "memory=127 must be at least 128 bytes, the slot of one value"
        );
        assert!(slots(1 << 40, 64).unwrap_err().reason().contains("at most"));
        assert_eq!((staged_values(1), staged_values(64 << 10), staged_values(MAX_VALUE)), (1024, 64, 1));
        assert!(
            check_value(0).is_err() && check_value(MAX_VALUE).is_ok() && check_value(MAX_VALUE + 1).is_err()
        );
        assert!(check_keys(MAX_KEYS).is_ok());
        assert_eq!(check_keys(4097).unwrap_err().reason(), "len(keys)=4097 must be at most 4096");
    }
}
