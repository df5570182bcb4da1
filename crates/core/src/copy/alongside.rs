//! A task that a copy worker runs while the calling thread does something else.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use super::workers::Workers;
use crate::error::{Error, ErrorKind, Result};
use crate::sync::Mutex;

type Task<T> = Box<dyn FnOnce() -> T + Send>;

/// A task in progress. Drop waits until it has ended.
pub(super) struct Alongside<T> {
    /// `None` once a thread has taken it.
    task: Arc<Mutex<Option<Task<T>>>>,
    result: Receiver<T>,
    ended: bool,
}

impl<T: Send + 'static> Alongside<T> {
    /// Starts `task` on a worker, or leaves it to [`finish`](Self::finish) if there are none.
    pub(super) fn start(workers: Option<&Workers>, task: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, result) = sync_channel(1);
        let task: Arc<Mutex<Option<Task<T>>>> = Arc::new(Mutex::new(Some(Box::new(task))));
        if let Some(workers) = workers {
            let taken = task.clone();
            workers.spawn(move || {
                let task = taken.lock().take();
                if let Some(task) = task {
                    let _ = sender.send(task());
                }
            });
        }
        Alongside { task, result, ended: false }
    }

    /// Returns the result. If no worker has begun the task yet, runs it on this thread.
    ///
    /// Returns `Err(System)` if the task has panicked.
    pub(super) fn finish(mut self) -> Result<T> {
        self.ended = true;
        let task = self.task.lock().take();
        match task {
            Some(task) => Ok(task()),
            None => {
                self.result.recv().map_err(|_| Error::new(ErrorKind::System, "a task of a copy panicked"))
            }
        }
    }
}

impl<T> Drop for Alongside<T> {
    fn drop(&mut self) {
        // If a worker has the task, the result or the end of the sender says that it has ended.
        if !self.ended && self.task.lock().take().is_none() {
            let _ = self.result.recv();
        }
    }
}
