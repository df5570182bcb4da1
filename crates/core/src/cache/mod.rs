//! Caches: the table that finds them by id and key, the references that keep them alive, and the pins on
//! their rows.

#[allow(clippy::module_inception, reason = "the cache, in the folder of caches")]
mod cache;
mod pins;
mod readiness;
mod row_queues;
mod shards;
mod table;

pub use cache::{Cache, Origin};
pub use pins::{CallRows, Pin, WaitingCall, all_rows, rows_of_a_pin, unpinned};
pub use readiness::OnReady;
pub use row_queues::RowUse;
pub use table::{Resolved, Table, TableState};
