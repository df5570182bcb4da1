//! Plans moves between caches of different KV layouts: other heads, layers, block sizes, orders or planes.
//!
//! A move copies some layers and heads of a range of tokens (`part`). Where several owners hold them, `owners` decides
//! which owner is asked for what. `tokens` cuts the range at the block borders of both sides, `axes` says which
//! pieces a run of tokens takes, and `planner` makes plans of both.

mod axes;
mod owners;
mod part;
mod planner;
mod tokens;

#[cfg(feature = "testing")]
pub use owners::assign_owners;
#[cfg(feature = "testing")]
pub use part::KvPart;
#[cfg(feature = "testing")]
pub use planner::LayoutPlan;
#[cfg(feature = "testing")]
pub use tokens::KvSequence;
