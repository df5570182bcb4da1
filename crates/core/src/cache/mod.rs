//! Caches: the table that finds them by id and key, the references that keep them alive, and the pins on
//! their rows.

#[allow(clippy::module_inception, reason = "the cache, in the folder of caches")]
mod cache;
mod call_pins;
mod pending_pins;
mod pins;
mod row_pins;
mod shards;
mod table;

pub use cache::{Cache, Origin};
pub use call_pins::{Pin, Pins, RowsOfCall};
pub use pending_pins::{PendingPins, pin_when_free};
pub use pins::{pin, pin_reads, pin_for_peer, pin_writes, rows_of_a_pin, unpinned};
pub use row_pins::RowUse;
pub use table::{Table, TableState};
