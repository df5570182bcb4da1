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

pub use owners::assign_owners;
pub use part::{KvPart, check_same_model};
pub use tokens::{KvSequence, moved_tokens, no_block_left_over};
