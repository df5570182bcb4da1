//! The store behind a Python object, with the handles and the memory of its transfers.

use std::sync::Arc;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::keeper::Window;
use llm_datadist_keeper::{JobMemory, Store};
use pyo3::prelude::*;

use super::store_values::StoreValues;
use crate::engine;
use crate::handles::Handles;

/// What a store and its transfers share.
pub(crate) struct StoreShared {
    pub(crate) store: Arc<Store>,
    /// The handles of transfers whose outcome was not taken, by number.
    pub(crate) transfers: Handles<u64, Py<PyAny>>,
    /// The memory of transfers until somebody knows of their end, by number: it is let go where the interpreter is attached.
    pub(crate) memory: Handles<u64, Arc<StoreValues>>,
}

impl StoreShared {
    pub(crate) fn new(store: Store) -> Self {
        StoreShared { store: Arc::new(store), transfers: Handles::default(), memory: Handles::default() }
    }

    /// Lets go of the memory of transfers that do not use it any more, although nobody has asked whether they have ended.
    pub(crate) fn release_unused(&self) {
        drop(self.memory.remove_where(|values| Arc::strong_count(values) == 1));
    }

    /// Closes the store, while the interpreter is detached. Then lets go of what its transfers have used.
    pub(crate) fn close(&self, py: Python<'_>) {
        engine::allow_threads(py, || self.store.close());
        // In a forked child, another thread may hold these locks for ever.
        if self.store.check_process().is_ok() {
            self.memory.clear();
            self.transfers.clear();
        }
    }
}

/// The values of a call that runs. Another reference, which is dropped later, lets go of the objects.
pub(crate) struct ValuesOfCall(pub(crate) Arc<StoreValues>);

impl JobMemory for ValuesOfCall {
    fn windows(&self) -> Result<Vec<Window<'_>>> {
        self.0.windows()
    }
}
