//! The objects of the C++ class: each has a handle, and an engine while it is initialized.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::bindings::cpp::Options;
use llm_datadist_core::{ClusterId, Error, ErrorKind, Result};

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

impl Object {
    /// Creates an object without an engine.
    pub(crate) fn new(cluster: ClusterId, role: i32) -> Arc<Self> {
        Arc::new(Object { cluster, role: role.into(), open: RwLock::default(), opening: Mutex::default() })
    }

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

    /// Closes the engine. Later calls fail; calls that have begun end normally.
    pub(crate) fn close(&self) {
        drop(self.open.write().unwrap_or_else(PoisonError::into_inner).take());
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
