//! A value that the engines of a process share.

use std::process;
use std::sync::{Arc, Mutex, PoisonError, TryLockError, Weak};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// How long a forked child waits for the lock, which a thread that the child does not have may hold.
const LOCK_WAIT: Duration = Duration::from_secs(1);

/// Shares one value among all engines of a process. The first engine makes it, and the last one drops it. A forked child makes
/// its own, because it does not have the threads of its parent.
pub(crate) struct PerProcess<T>(Mutex<Shared<T>>);

/// The value, and the process that made it.
struct Shared<T> {
    process: u32,
    value: Weak<T>,
}

impl<T> PerProcess<T> {
    /// Holds no value yet.
    pub(crate) const fn new() -> Self {
        PerProcess(Mutex::new(Shared { process: 0, value: Weak::new() }))
    }

    /// Returns the value of this process. Calls `make` if there is none.
    pub(crate) fn get(&self, make: impl FnOnce() -> T) -> Arc<T> {
        let until = Instant::now() + LOCK_WAIT;
        let mut shared = loop {
            match self.0.try_lock() {
                Ok(shared) => break shared,
                Err(TryLockError::Poisoned(poisoned)) => break PoisonError::into_inner(poisoned),
                // The lock is never released if the parent forked while one of its threads held it.
                Err(TryLockError::WouldBlock) if Instant::now() >= until => return Arc::new(make()),
                Err(TryLockError::WouldBlock) => sleep(Duration::from_millis(1)),
            }
        };
        let process = process::id();
        if shared.process == process
            && let Some(value) = shared.value.upgrade()
        {
            return value;
        }
        let value = Arc::new(make());
        *shared = Shared { process, value: Arc::downgrade(&value) };
        value
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_shared_until_its_last_user_drops_it() {
        let shared = PerProcess::new();
        let (first, second) = (shared.get(|| 1), shared.get(|| 2));
        assert!(Arc::ptr_eq(&first, &second) && *second == 1);
        drop(first);
        assert_eq!(*shared.get(|| 3), 1);
        drop(second);
        assert_eq!(*shared.get(|| 4), 4);
    }

    #[test]
    fn a_child_makes_its_own_value() {
        let shared = PerProcess::new();
        let parents = shared.get(|| 1);
        // As a child finds it.
        shared.0.lock().unwrap().process += 1;
        let childs = shared.get(|| 2);
        assert_eq!((*parents, *childs), (1, 2));
        assert!(Arc::ptr_eq(&childs, &shared.get(|| 3)));
    }

    #[test]
    fn a_lock_that_is_never_released_costs_only_the_sharing() {
        let shared = PerProcess::new();
        let _held = shared.0.lock().unwrap();
        assert_eq!((*shared.get(|| 1), *shared.get(|| 2)), (1, 2));
    }
}
