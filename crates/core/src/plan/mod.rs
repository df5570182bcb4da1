//! Plans copies: turns a checked request into a [`CopyPlan`], the spans of every tensor and the order in
//! which they run.
//!
//! Planning is pure arithmetic and never sees an address. All tensors of a cache are equal, so one list of
//! spans serves all of them: a plan of 4,096 blocks in 80 tensors has at most 4,096 spans, or as many pairs
//! of block numbers. Between caches of different layouts (`layouts`), each block takes several pieces, which a
//! template stores once for all blocks. `validate` checks the bounds of local requests, `untrusted` those of a
//! peer's plan, and `memory::Window` checks both again.

mod block_waves;
mod blocks;
mod compared_pairs;
mod conflicts;
mod copy_plan;
mod final_blocks;
mod layouts;
mod order;
mod packed_spans;
mod range_list;
mod request;
mod side;
mod span_limits;
mod spans;
mod template;
mod template_list;
mod tensor_steps;
mod touched_rows;
mod untrusted;
mod waves;

pub use blocks::Blocks;
pub use compared_pairs::{PartLimits, parts};
pub use copy_plan::{CopyPlan, PlannedSpan};
pub use final_blocks::BlockSizes;
pub use layouts::{KvPart, KvSequence, LayoutPlan, assign_owners, check_same_model, moved_tokens};
pub use order::CacheCount;
pub use packed_spans::{ReceivedSpans, SpanList, read_list};
pub(crate) use range_list::RangeList;
pub use request::{Moves, Pieces};
pub(crate) use request::{REQUEST, total_bytes};
pub use side::Side;
pub use spans::{Piece, Span};
pub use template::Template;
pub use template_list::check_counts;
#[cfg(feature = "testing")]
pub use template_list::{MOST_TEMPLATE_SPANS, MOST_TEMPLATES};
pub use tensor_steps::TensorSteps;
pub use untrusted::MOST_WAVES;
pub use waves::Wave;
