//! The tasks of one engine, which end with it.

use std::sync::{Arc, Weak};

use super::task::Task;
use crate::sync::Mutex;

/// Tasks that may still run.
#[derive(Debug, Default)]
pub struct RunningTasks(Mutex<Vec<Weak<Task>>>);

impl RunningTasks {
    pub fn add(&self, task: &Arc<Task>) {
        let mut tasks = self.0.lock();
        tasks.retain(|task| task.strong_count() > 0);
        tasks.push(Arc::downgrade(task));
    }

    /// Ends the tasks.
    pub fn close(&self) {
        let tasks = std::mem::take(&mut *self.0.lock());
        for task in tasks.iter().filter_map(Weak::upgrade) {
            task.close();
        }
    }
}
