//! The threads that copy, which all engines of a process share.

use std::sync::Arc;

use super::reader_threads::ReaderThreads;
use super::workers::WorkerThreads;
use crate::threads::PerProcess;

/// The threads that copy. Each set ends with the last engine that uses it.
#[derive(Debug)]
pub(super) struct CopyThreads {
    pub(super) copiers: Arc<WorkerThreads>,
    /// They wait for streams, which copiers must not do.
    pub(super) streamers: Arc<WorkerThreads>,
    pub(super) readers: Arc<ReaderThreads>,
}

impl CopyThreads {
    /// Creates the sets without any thread.
    pub(super) fn new() -> Self {
        CopyThreads {
            copiers: Arc::new(WorkerThreads::new("llm-copy")),
            streamers: Arc::new(WorkerThreads::new("llm-stream")),
            readers: Arc::new(ReaderThreads::new()),
        }
    }

    /// Returns the threads that the engines of this process share.
    pub(super) fn of_process() -> Arc<Self> {
        static SHARED: PerProcess<CopyThreads> = PerProcess::new();
        SHARED.get(CopyThreads::new)
    }
}
