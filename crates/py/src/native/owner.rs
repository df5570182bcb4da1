//! What a transfer belongs to: an engine, or a store.

use std::sync::Arc;

use llm_datadist_core::{Error, ErrorKind, Transfer};
use llm_datadist_keeper::StoreJob;
use pyo3::prelude::*;

use super::errors::raise;
use super::peer::NativePeer;
use super::shared::EngineShared;
use super::store_shared::StoreShared;
use crate::engine;
use crate::handles::Handles;

/// What a transfer belongs to, and where its result is.
#[derive(Clone)]
pub(crate) enum TransferOwner {
    Engine(Arc<EngineShared>),
    /// The store, and the job that it has started.
    Store(Arc<StoreShared>, Option<StoreJob>),
}

impl TransferOwner {
    /// Returns the handles of the transfers whose outcome was not taken.
    pub(crate) fn transfers(&self) -> &Handles<u64, Py<PyAny>> {
        match self {
            TransferOwner::Engine(shared) => &shared.transfers,
            TransferOwner::Store(shared, _) => &shared.transfers,
        }
    }

    /// Raises in a forked child, where the locks of its copy may be held for ever.
    pub(crate) fn check_process(&self, py: Python<'_>) -> PyResult<()> {
        match self {
            TransferOwner::Engine(shared) if shared.engine.is_inherited() => {
                Err(raise(py, &engine::forked()))
            }
            TransferOwner::Engine(_) => Ok(()),
            TransferOwner::Store(shared, _) => {
                shared.store.check_process().map_err(|error| raise(py, &error))
            }
        }
    }

    /// Lets go of the memory of a transfer that has ended.
    pub(crate) fn ended(&self, transfer: &Transfer) {
        if let TransferOwner::Store(shared, _) = self {
            drop(shared.memory.remove(&transfer.number()));
        }
    }

    /// Returns the result of a transfer that has succeeded.
    pub(crate) fn result(&self, py: Python<'_>, transfer: &Transfer) -> PyResult<Py<PyAny>> {
        match self {
            TransferOwner::Engine(shared) => match transfer.peer() {
                Some(peer) => Ok(NativePeer::of(py, shared, peer)?.into_any()),
                None => Ok(py.None()),
            },
            TransferOwner::Store(_, job) => {
                let results = job.as_ref().and_then(StoreJob::results).unwrap_or_default();
                Ok(results.to_vec().into_pyobject(py)?.into_any().unbind())
            }
        }
    }

    /// Returns the exception for the error of a transfer.
    pub(crate) fn raise(&self, py: Python<'_>, error: &Error) -> PyErr {
        match self {
            TransferOwner::Store(..) => raise_of_store(py, error),
            TransferOwner::Engine(_) => raise(py, error),
        }
    }

    /// Returns the nanoseconds of a transfer: of a store, those since a thread has begun it.
    pub(crate) fn nanos(&self, transfer: &Transfer) -> u64 {
        match self {
            TransferOwner::Store(_, Some(job)) => job.nanos(),
            _ => transfer.nanos(),
        }
    }
}

/// Creates the exception for an error of a store. The core only knows engines that are closed.
pub(crate) fn raise_of_store(py: Python<'_>, error: &Error) -> PyErr {
    match error.kind() {
        ErrorKind::Closed => raise(py, &Error::new(ErrorKind::Closed, "the store was closed")),
        _ => raise(py, error),
    }
}
