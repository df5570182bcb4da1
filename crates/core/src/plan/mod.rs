//! Plans copies: turns a checked request into a [`CopyPlan`], the pieces of every tensor, which may be copied in any order.
//! Only a copy within one cache may need plans that run in a fixed order.
//!
//! Planning is pure arithmetic and never sees an address. All tensors of a cache are equal, so one list of pieces serves all
//! of them: a plan of 4,096 blocks in 80 tensors has at most 4,096 pairs of block numbers. Between caches of different
//! layouts (`layouts`), each block takes several pieces, which a template stores once for all blocks. `validate` checks the
//! bounds of local requests, `untrusted` those of a peer's plan, and `memory::Window` checks both again.

mod bit_set;
mod byte_pieces;
mod compared;
mod conflicts;
mod copy_plan;
mod joining;
mod layouts;
mod moves;
mod order;
mod range_list;
mod request;
mod side;
mod sorting;
mod span_limits;
mod spans;
mod template;
mod template_list;
mod tensor_steps;
mod touched_rows;
mod untrusted;

pub use compared::{BlockSizes, PartLimits};
pub use copy_plan::{CopyPlan, Plans};
pub use layouts::{KvPart, KvSequence, assign_owners, check_same_model, moved_tokens, no_block_left_over};
pub use order::CacheCount;
pub(crate) use range_list::RangeList;
pub use request::{Moves, Pieces};
pub(crate) use request::{REQUEST, total_bytes};
pub use side::Side;
pub use spans::{Piece, Span};
pub use template::{Pairs, Template, Templates};
pub use template_list::check_counts;
#[cfg(feature = "testing")]
pub use template_list::{MAX_TEMPLATE_SPANS, MAX_TEMPLATES};
pub use tensor_steps::TensorSteps;
