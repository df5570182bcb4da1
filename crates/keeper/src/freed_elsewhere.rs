//! Values that another thread frees, because that may take long and the caller must not wait.

use std::ops::Deref;
use std::sync::Arc;
use std::thread::Builder;

use llm_datadist_core::bindings::this_process;

/// Name of the thread.
const THREAD: &str = "llm-keeper-free";

/// A shared value that is dropped on a thread of its own, whoever drops the last copy. The memory of a keeper is freed when the last process
/// unmaps it, which takes the longer the more there is.
#[derive(Debug)]
pub(crate) struct FreedElsewhere<T: Send + Sync + 'static> {
    /// Declared before the last copy, so that it drops first.
    value: Arc<T>,
    last: LastReference<T>,
}

/// A reference to the value, and the process that has created it.
#[derive(Debug)]
struct LastReference<T: Send + Sync + 'static>(Option<Arc<T>>, u32);

impl<T: Send + Sync + 'static> FreedElsewhere<T> {
    pub(crate) fn new(value: T) -> Self {
        let value = Arc::new(value);
        FreedElsewhere { last: LastReference(Some(value.clone()), this_process()), value }
    }
}

impl<T: Send + Sync + 'static> Clone for FreedElsewhere<T> {
    fn clone(&self) -> Self {
        let LastReference(value, process) = &self.last;
        FreedElsewhere { value: self.value.clone(), last: LastReference(value.clone(), *process) }
    }
}

impl<T: Send + Sync + 'static> Deref for FreedElsewhere<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + Sync + 'static> Drop for LastReference<T> {
    fn drop(&mut self) {
        let Some(value) = self.0.take().and_then(Arc::into_inner) else { return };
        // A forked child frees nothing that its parent has, and should start no thread.
        if self.1 == this_process() {
            // Without a thread, it is dropped at once.
            let _ = Builder::new().name(THREAD.into()).spawn(move || drop(value));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use super::*;

    /// Reports on which thread it is dropped.
    struct Dropped(Sender<Option<String>>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.send(std::thread::current().name().map(Into::into)).unwrap();
        }
    }

    #[test]
    fn the_last_copy_is_dropped_once_on_another_thread() {
        let (sender, dropped) = channel();
        let first = FreedElsewhere::new(Dropped(sender));
        let second = first.clone();
        drop(first);
        assert!(dropped.try_recv().is_err());
        drop(second);
        assert_eq!(dropped.recv_timeout(Duration::from_secs(30)).unwrap().as_deref(), Some(THREAD));
        assert!(dropped.recv().is_err(), "once");
    }
}
