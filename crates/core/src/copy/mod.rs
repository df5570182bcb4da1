//! The copy engine: the only module that moves the bytes of caches. Copies, swaps, pulls, pushes and layers
//! are plans that it runs.

mod block_sums;
mod copy_threads;
mod counted_bytes;
mod engine;
mod host_buffers;
mod limit;
mod paths;
mod progress;
mod reader_threads;
mod route;
mod run;
mod short_windows;
mod staging_ring;
mod unit_job;
mod window_batch;
mod window_sum;
mod workers;

pub use engine::CopyEngine;
pub use limit::Limit;
pub use paths::{DataPath, Hops, PathJob, PathKind, PeerTensors, StreamPath};
pub(crate) use progress::with_copied_bytes;
pub use progress::{Progress, with_arrived_rows};
pub use route::{ReadAccess, Route, Rule, Staging, takes_rings};
pub use run::HeldPins;
pub use unit_job::STILL_READING;
#[cfg(feature = "testing")]
pub use unit_job::Work;
pub use window_sum::{WindowSum, window_sums};
