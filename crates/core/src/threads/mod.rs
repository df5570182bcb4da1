//! The threads of engines: those that are started by name, and pools that start and end threads on demand. Several engines of a
//! process may share a pool.

mod engine_number;
mod per_process;
mod pool;
mod running;

pub use engine_number::engine_of_thread;
pub(crate) use engine_number::{EngineNumber, KnownEngine};
pub(crate) use per_process::PerProcess;
pub(crate) use pool::{Closures, JobQueue, PollLimits, ThreadPool};
pub(crate) use running::{CLOSE_WAIT, Threads};
