//! Transfers between clusters: pulls, pushes and layer-wise transfers in progress.

mod async_call;
mod async_calls;
mod cache_task;
mod call;
mod client_calls;
mod clock;
mod compared;
mod current_call;
mod delivery;
mod executor;
mod grants;
mod group;
mod layer_notice;
mod layer_task;
mod layerwise;
mod local_copy;
mod notify;
mod peer_transfer;
mod pull;
mod push;
mod running_calls;
mod stream;
mod task;
mod task_state;
mod verify;

pub(crate) use async_call::{CallPurpose, Execution, Work};
pub use async_calls::AsyncCalls;
pub use cache_task::CacheTask;
pub use client_calls::ClientCalls;
pub(crate) use current_call::{watched, work_for};
pub use delivery::{Delivery, LayerProgress, LayerSink, Outcome};
#[cfg(feature = "testing")]
pub use executor::ExecutorHandle;
pub(crate) use executor::JobClass;
pub use executor::{ClientCallKind, Executor};
pub use grants::GrantClock;
pub(crate) use group::Group;
pub(crate) use layer_notice::LayerNotice;
pub use layer_task::LayerTask;
pub(crate) use layerwise::LayerPush;
pub(crate) use local_copy::{LocalCopy, run_in_order};
pub(crate) use notify::notify;
pub(crate) use peer_transfer::{PeerTransfer, used_rows};
pub(crate) use running_calls::RunningCalls;
#[cfg(feature = "testing")]
pub use verify::MOVED;

/// Maximum number of bytes of a call that the caller runs while it starts it, if nothing has to be waited for. Handing such a
/// call to a worker takes longer than copying the bytes.
const SHORT_CALL: u64 = 16 << 10;
