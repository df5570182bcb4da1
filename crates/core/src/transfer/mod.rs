//! Transfers between clusters: pulls, pushes and layer-wise transfers in progress.

mod call;
mod executor;
mod layerwise;
mod pull;
mod push;
mod stream;
mod task;

pub(crate) use call::{Call, Moved};
pub(crate) use executor::Executor;
pub(crate) use layerwise::LayerPush;
pub use task::{Carried, Outcome, Task};
pub(crate) use task::{Carrier, Delivery};
