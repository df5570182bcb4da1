//! Shared values that another thread drops, because that may take long and the caller must not wait.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use llm_datadist_core::bindings::this_process;

/// Name of the threads.
const THREAD: &str = "llm-keeper-free";
/// The most threads that [`drop_on_thread`] has at the same time.
const MAX_THREADS: usize = 16;
/// How many it has now. In a forked child, those of its parent count as well.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// A shared value. The thread that drops the last copy passes the value to a function, which lets another thread drop it.
#[derive(Debug)]
pub(crate) struct DroppedOnThread<T> {
    /// Declared before the last copy, so that it drops first.
    value: Arc<T>,
    last: LastCopy<T>,
}

#[derive(Debug)]
struct LastCopy<T> {
    value: Option<Arc<T>>,
    /// The process that has created the value.
    process: u32,
    discard: fn(T),
}

impl<T> DroppedOnThread<T> {
    /// `discard` is called once, with the value, and does not wait.
    pub(crate) fn new(value: T, discard: fn(T)) -> Self {
        let value = Arc::new(value);
        let last = LastCopy { value: Some(value.clone()), process: this_process(), discard };
        DroppedOnThread { value, last }
    }
}

impl<T> Clone for DroppedOnThread<T> {
    fn clone(&self) -> Self {
        let LastCopy { value, process, discard } = &self.last;
        let last = LastCopy { value: value.clone(), process: *process, discard: *discard };
        DroppedOnThread { value: self.value.clone(), last }
    }
}

impl<T> Deref for DroppedOnThread<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for LastCopy<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take().and_then(Arc::into_inner) else { return };
        // A forked child frees nothing that its parent has, and should start no thread.
        if self.process == this_process() {
            (self.discard)(value);
        }
    }
}

/// Drops a value on a thread of its own. If there are [`MAX_THREADS`], or none can be started, drops it at once.
pub(crate) fn drop_on_thread<T: Send + 'static>(value: T) {
    drop_on_one_of(&THREADS, value);
}

fn drop_on_one_of<T: Send + 'static>(threads: &'static AtomicUsize, value: T) {
    let one_more = |count| (count < MAX_THREADS).then_some(count + 1);
    if threads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
        return;
    }
    let permit = ThreadPermit(threads);
    // Without a thread, both are dropped at once.
    let _ = Builder::new().name(THREAD.into()).spawn(move || {
        let _permit = permit;
        drop(value);
    });
}

/// The right to have one of the threads.
struct ThreadPermit(&'static AtomicUsize);

impl Drop for ThreadPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Duration;

    use super::*;

    /// Reports on which thread it is dropped. The drop then waits until the other end of `gate` is dropped.
    struct Dropped(Sender<Option<String>>, Option<Receiver<()>>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.send(std::thread::current().name().map(Into::into)).unwrap();
            self.1.take().map(|gate| gate.recv());
        }
    }

    fn next(dropped: &Receiver<Option<String>>) -> Option<String> {
        dropped.recv_timeout(Duration::from_secs(30)).unwrap()
    }

    #[test]
    fn the_last_copy_is_dropped_once_on_another_thread() {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        let (sender, dropped) = channel();
        let first = DroppedOnThread::new(Dropped(sender, None), |value| drop_on_one_of(&THREADS, value));
        let second = first.clone();
        drop(first);
        assert!(dropped.try_recv().is_err());
        drop(second);
        assert_eq!(next(&dropped).as_deref(), Some(THREAD));
        assert!(dropped.recv().is_err(), "once");
    }

    #[test]
    fn beyond_the_most_threads_the_caller_drops_the_value() {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        let (sender, dropped) = channel();
        let own = std::thread::current().name().map(Into::into);
        let gates: Vec<_> = (0..MAX_THREADS)
            .map(|_| {
                let (gate, waits) = channel();
                drop_on_one_of(&THREADS, Dropped(sender.clone(), Some(waits)));
                assert_eq!(next(&dropped).as_deref(), Some(THREAD));
                gate
            })
            .collect();
        drop_on_one_of(&THREADS, Dropped(sender.clone(), None));
        assert_eq!(dropped.try_recv(), Ok(own));
        drop(gates);
        while THREADS.load(Ordering::Relaxed) > 0 {
            std::thread::yield_now();
        }
        drop_on_one_of(&THREADS, Dropped(sender, None));
        assert_eq!(next(&dropped).as_deref(), Some(THREAD));
    }
}
