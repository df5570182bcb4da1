//! Transfers between clusters: pulls, pushes and layer-wise transfers in progress.

mod call;
mod executor;
mod layerwise;
mod pull;
mod push;
mod running_tasks;
mod stream;
mod task;

pub(crate) use call::{Call, Moved};
pub use executor::Executor;
#[cfg(feature = "testing")]
pub use executor::ExecutorHandle;
pub(crate) use layerwise::LayerPush;
pub use running_tasks::RunningTasks;
pub use task::{Carried, Carrier, Delivery, Outcome, Task};
