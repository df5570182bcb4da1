//! The threads of an engine: those that are started by name, and pools that start and end threads on demand.

mod pool;
mod running;

pub(crate) use pool::{Closures, JobQueue, PollLimits, ThreadPool};
pub(crate) use running::{CLOSE_WAIT, Threads, guarded};
