//! Caches: the table that finds them by id and key, the references that keep them alive, and the pins on
//! their rows.

#[allow(clippy::module_inception, reason = "the cache, in the folder of caches")]
mod cache;
mod pins;
mod row_pins;
mod shards;
mod table;

pub use cache::{Cache, Origin};
pub use pins::{Pin, pin, pin_reads, pin_reads_for, pin_writes, rows_of_a_pin, unpinned};
pub use table::{Table, TableState};
