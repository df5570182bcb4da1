//! What belongs to one process: its handles and its log callback. A forked child starts with none.
//!
//! The threads of the parent do not exist in the child, so a lock that one of them held is never released there.
//! Therefore the child leaves the parent's state alone, and makes its own when it first needs it
//! (`child_has_no_handles_of_its_parent_and_may_create_its_own`).

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, RwLock};

use llm_datadist_core::Result;
use llm_datadist_hixl::Hixl;

use crate::handles::{self, CACHES, ENGINES, HIXL_ENGINES, HandleTable, OBJECTS, TRANSFERS};
use crate::log::Recipient;
use crate::native::{HeldCache, HeldEngine, HeldTransfer};
use crate::objects::Object;

/// The state of one process.
pub(crate) struct Process {
    pub(crate) objects: HandleTable<Arc<Object>>,
    pub(crate) engines: HandleTable<Arc<HeldEngine>>,
    pub(crate) caches: HandleTable<Arc<HeldCache>>,
    pub(crate) transfers: HandleTable<HeldTransfer>,
    pub(crate) hixl: HandleTable<Arc<Hixl>>,
    pub(crate) log: RwLock<Option<Recipient>>,
}

impl Process {
    fn new() -> Self {
        Process {
            objects: HandleTable::new(&OBJECTS),
            engines: HandleTable::new(&ENGINES),
            caches: HandleTable::new(&CACHES),
            transfers: HandleTable::new(&TRANSFERS),
            hixl: HandleTable::new(&HIXL_ENGINES),
            log: RwLock::new(None),
        }
    }

    /// Returns a handle for a cache. Frees those of caches that are gone.
    pub(crate) fn add_cache(&self, cache: Arc<HeldCache>) -> u64 {
        self.caches.retain(|cache| !cache.is_gone());
        self.caches.add(cache)
    }

    /// Returns the cache of a handle, unless it is gone.
    pub(crate) fn cache(&self, handle: u64) -> Result<Arc<HeldCache>> {
        let cache = self.caches.get(handle)?;
        if !cache.is_gone() {
            return Ok(cache);
        }
        self.caches.retain(|cache| !cache.is_gone());
        self.caches.get(handle)
    }
}

/// Null until this process needs it.
static CURRENT: AtomicPtr<Process> = AtomicPtr::new(null_mut());

/// Returns the state of this process.
pub(crate) fn current() -> &'static Process {
    let found = CURRENT.load(Ordering::Acquire);
    if !found.is_null() {
        // SAFETY: a box that was leaked below. It is changed only behind its locks, and never freed.
        return unsafe { &*found };
    }
    watch_forks();
    let made = Box::into_raw(Box::new(Process::new()));
    match CURRENT.compare_exchange(null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above.
        Ok(_) => unsafe { &*made },
        Err(other) => {
            // SAFETY: the box made above, which nothing else has seen.
            drop(unsafe { Box::from_raw(made) });
            // SAFETY: as above, leaked by another thread.
            unsafe { &*other }
        }
    }
}

/// Runs in a forked child before anything else.
pub(crate) fn forked() {
    CURRENT.store(null_mut(), Ordering::Release);
    handles::forked();
    llm_datadist_core::bindings::abandon_sockets();
}

/// Registers [`forked`], unless that is done.
fn watch_forks() {
    /// Not a `Once`, for which a child would wait forever if it was forked while another thread was in it. Threads that
    /// come here at the same time may each register the handler, which may run several times.
    static WATCHED: AtomicBool = AtomicBool::new(false);
    extern "C" fn child() {
        forked();
    }
    if WATCHED.load(Ordering::Acquire) {
        return;
    }
    // SAFETY: the handler lives forever. In a child of several threads it does only what is allowed there: it stores to
    // atomics, and closes descriptors under a lock that it tries and never waits for.
    let registered = unsafe { libc::pthread_atfork(None, None, Some(child)) };
    debug_assert_eq!(registered, 0, "it fails only without memory");
    WATCHED.store(true, Ordering::Release);
}
