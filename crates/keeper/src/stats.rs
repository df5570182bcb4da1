//! What a keeper and a store count. Each field has a row in `python/llm_datadist/stats.py`, from which the page of the documentation
//! is made (`tests/test_stats.py` compares them).

use std::time::Instant;

use serde::{Deserialize, Serialize};

/// The counts of a keeper since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeeperStats {
    /// Slots in its memory.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Values that it has now.
    pub values: u32,
    /// Values that leases hold now.
    pub leased: u32,
    /// Stores that are attached now.
    pub clients: u32,
    /// Observers that are attached now.
    pub observers: u32,
    /// Namespaces that it knows.
    pub namespaces: u32,
    /// Values that it has copied.
    pub stored: u64,
    /// Bytes of these values.
    pub stored_bytes: u64,
    /// Values of keys that had one.
    pub present: u64,
    /// Values without a slot or without a place in the index.
    pub no_room: u64,
    /// Values that were overwritten because all slots were in use.
    pub evicted: u64,
    /// Values that clients dropped.
    pub dropped: u64,
    /// Values that it has dropped because their bytes did not have their checksum.
    pub corrupt: u64,
    /// Values that clients have reported, and whose bytes have their checksum.
    pub wrong_reports: u64,
    /// Values that clients have read or put again, as far as they have said so.
    pub touched: u64,
    /// Leases that it has granted or renewed.
    pub leases: u64,
    /// Keys that it has not leased.
    pub leases_refused: u64,
    /// Requests to copy values.
    pub puts: u64,
    /// Total time of these requests in nanoseconds.
    pub put_nanos: u64,
    /// Clients that it has refused, and told why: because of what they sent, because of a limit, or because of the system.
    pub refused: u64,
    /// Requests that the role of their client does not allow.
    pub forbidden: u64,
}

/// The counts of a store since it was opened, and those of its keeper.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StoreStats {
    /// Values that `get` has copied, and those of views that were right.
    pub hits: u64,
    /// Bytes of these values.
    pub hit_bytes: u64,
    /// Keys of `get` and of views that the keeper did not have.
    pub misses_absent: u64,
    /// Keys of `get` and of views whose value was replaced before it was checked.
    pub misses_changed: u64,
    /// Keys of `get` and of views whose value did not have its checksum.
    pub misses_corrupt: u64,
    /// Keys of `get` and of views while the keeper was away.
    pub misses_away: u64,
    /// Calls of `get`.
    pub gets: u64,
    /// Total time of these calls in nanoseconds.
    pub get_nanos: u64,
    /// Values of `put` that the keeper has copied.
    pub puts_stored: u64,
    /// Bytes of these values.
    pub put_bytes: u64,
    /// Values of `put` whose keys had one.
    pub puts_present: u64,
    /// Values of `put` for which the keeper had no room.
    pub puts_no_room: u64,
    /// Values of `put` that the keeper did not take in time, or while it was away.
    pub puts_away: u64,
    /// Calls of `put`.
    pub puts: u64,
    /// Total time of these calls in nanoseconds.
    pub put_nanos: u64,
    /// How often the store has attached to a keeper.
    pub attached: u64,
    /// Why the store could not attach when it last tried. `None` if it could, or if the keeper was away.
    pub refused: Option<String>,
    /// What the keeper has counted; `None` if it is away.
    pub keeper: Option<KeeperStats>,
}

impl KeeperStats {
    /// Returns the counts as an object of JSON. Every field has its name.
    pub fn to_json(&self) -> String {
        // It fails only for keys that are no texts.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl StoreStats {
    /// Returns the counts as an object of JSON. Every field has its name.
    pub fn to_json(&self) -> String {
        // It fails only for keys that are no texts.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// Returns the time since `begin` in nanoseconds.
pub(crate) fn nanos_since(begin: Instant) -> u64 {
    u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
}
