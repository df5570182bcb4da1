//! The objects of the C++ class: each has a handle, and an engine while it is initialized.
//!
//! A handle is a number that is used only once in a process. So a handle that was freed or never returned is
//! refused (`invalid_handles_are_refused_by_every_call`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use llm_datadist_core::bindings::cpp::Options;
use llm_datadist_core::{ClusterId, DataDist, Error, ErrorKind, Result};

/// One object of the class.
pub(crate) struct Object {
    /// Its cluster id.
    pub(crate) cluster: ClusterId,
    /// The number of its role, which may be invalid.
    role: AtomicI32,
    open: RwLock<Option<Arc<OpenEngine>>>,
    /// Held while an engine is opened, so that two threads open only one.
    opening: Mutex<()>,
}

/// An open engine.
pub(crate) struct OpenEngine {
    /// The engine.
    pub(crate) engine: DataDist,
    /// The options with which it was opened.
    pub(crate) options: Options,
}

/// The objects of one process, by handle.
#[derive(Default)]
pub(crate) struct Objects(RwLock<BTreeMap<u64, Arc<Object>>>);

/// The last handle that this process, or the one that forked it, has returned.
static LAST: AtomicU64 = AtomicU64::new(0);
/// The last handle that existed when this process was forked.
static INHERITED: AtomicU64 = AtomicU64::new(0);

/// Records, in a forked child, that the handles so far belong to its parent.
pub(crate) fn forked() {
    INHERITED.store(LAST.load(Ordering::Relaxed), Ordering::Relaxed);
}

impl Objects {
    /// Creates an object and returns its handle.
    pub(crate) fn create(&self, cluster: ClusterId, role: i32) -> u64 {
        let object =
            Object { cluster, role: role.into(), open: RwLock::default(), opening: Mutex::default() };
        let handle = LAST.fetch_add(1, Ordering::Relaxed) + 1;
        self.0.write().unwrap_or_else(PoisonError::into_inner).insert(handle, Arc::new(object));
        handle
    }

    /// Removes an object. Its engine is closed.
    pub(crate) fn free(&self, handle: u64) -> Result<()> {
        let object = self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&handle);
        object.map(|object| object.close()).ok_or_else(|| unknown(handle))
    }

    /// Returns the object of a handle.
    pub(crate) fn get(&self, handle: u64) -> Result<Arc<Object>> {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned();
        found.ok_or_else(|| unknown(handle))
    }
}

fn unknown(handle: u64) -> Error {
    let text = if (1..=INHERITED.load(Ordering::Relaxed)).contains(&handle) {
        "there is no such handle in this process, which was forked after the handle was made"
    } else {
        "there is no such handle: it was freed, or never returned"
    };
    Error::new(ErrorKind::Closed, text).with("handle", handle)
}

impl Object {
    /// Opens the engine, unless it is open.
    pub(crate) fn open(&self, open: impl FnOnce() -> Result<OpenEngine>) -> Result<()> {
        let _opening = self.opening.lock().unwrap_or_else(PoisonError::into_inner);
        if self.engine().is_ok() {
            return Ok(());
        }
        let opened = Arc::new(open()?);
        *self.open.write().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    }

    /// Closes the engine, which ends its asynchronous calls. Later calls fail; synchronous calls that have begun end
    /// normally.
    pub(crate) fn close(&self) {
        let open = self.open.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(open) = open {
            // Now, because a call of another thread may keep the engine for a while.
            open.engine.end_transfers();
        }
    }

    /// Returns the number of the role for the next `Initialize`, which may be invalid.
    pub(crate) fn role(&self) -> i32 {
        self.role.load(Ordering::Relaxed)
    }

    /// Sets the role.
    pub(crate) fn set_role(&self, role: i32) {
        self.role.store(role, Ordering::Relaxed);
    }

    /// Returns the engine while it is open.
    pub(crate) fn engine(&self) -> Result<Arc<OpenEngine>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner).clone();
        open.ok_or_else(|| {
            Error::new(ErrorKind::Closed, "Initialize has not succeeded, or Finalize was called")
        })
    }
}
