//! Grants: blocks that are lent to readers for a limited time.
//!
//! A grant adds a check to pulls and changes nothing else: it neither locks the blocks nor gives access to them. Its end
//! raises a generation that readers on the same host see, so they need not ask (`memory::Generations`). The owner checks
//! reads that it serves itself.

mod row_ranges;
mod table;

pub use row_ranges::RowRanges;
pub use table::{Grant, GrantObserver, GrantedRead, Grants, ended};
