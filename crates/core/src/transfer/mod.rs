//! Layer-wise transfers under way, and the threads that carry layers.

mod executor;
mod task;

pub(crate) use executor::Lanes;
pub use task::{Carried, Outcome, Task};
pub(crate) use task::{Carrier, Leg};
