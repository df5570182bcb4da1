//! Caches: the table that finds them by id and key, the references that keep them alive, and the pins on
//! their rows.

#[allow(clippy::module_inception, reason = "the cache, in the folder of caches")]
mod cache;
mod pins;
mod row_turns;
mod shards;
mod table;
mod turn;

pub use cache::{Cache, Origin};
pub use pins::{CallRows, Pin, WaitingCall, rows_of_a_pin, unpinned};
pub use row_turns::RowUse;
pub use table::{Resolved, Table, TableState};
pub use turn::OnOpened;
