//! The environment in which UCX is loaded.

use std::sync::{Mutex, PoisonError};

/// Settings that UCX reads from the environment while it is loaded.
///
/// The first keeps UCX from installing handlers of signals, and the second one from intercepting `mmap` and `munmap` of
/// the whole process.
const ENVIRONMENT: [(&str, &str); 2] = [("UCX_HANDLE_ERRORS", "none"), ("UCX_MEM_EVENTS", "n")];

/// Calls `load`, which loads UCX. Sets variables of the environment for that time, unless the program has set them. Calls of
/// this function take turns.
///
/// # Safety
///
/// No other thread may access the environment through functions of C during the call.
pub(crate) unsafe fn with_ucx_environment<T>(load: impl FnOnce() -> T) -> T {
    static LOADING: Mutex<()> = Mutex::new(());
    let _loading = LOADING.lock().unwrap_or_else(PoisonError::into_inner);
    let unset: Vec<_> =
        ENVIRONMENT.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    for (name, value) in &unset {
        // SAFETY: no other thread uses the environment, as the caller promises.
        unsafe { std::env::set_var(name, value) };
    }
    let loaded = load();
    for (name, _) in &unset {
        // SAFETY: as above.
        unsafe { std::env::remove_var(name) };
    }
    loaded
}
