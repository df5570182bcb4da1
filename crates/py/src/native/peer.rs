//! Peers, as Python holds them. `peer_methods` has what they do.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use llm_datadist_core::PeerInfo;
use pyo3::prelude::*;

use super::shared::EngineShared;

/// Another engine, as long as it runs. A program that restarts is another peer.
///
/// ``Engine.link`` and the event ``PeerUp`` return it. Two objects are equal if they stand for the same incarnation, also across
/// links. Objects of an ended peer stay readable.
#[pyclass(frozen, mapping, eq, hash, name = "Peer", module = "llm_datadist.native")]
pub(crate) struct NativePeer {
    /// The engine that is linked with it.
    pub(crate) shared: Arc<EngineShared>,
    /// What is known about it.
    pub(crate) info: PeerInfo,
}

impl NativePeer {
    /// Returns the object for a peer.
    pub(crate) fn of(py: Python<'_>, shared: &Arc<EngineShared>, info: &PeerInfo) -> PyResult<Py<Self>> {
        Py::new(py, NativePeer { shared: shared.clone(), info: info.clone() })
    }
}

impl PartialEq for NativePeer {
    fn eq(&self, other: &Self) -> bool {
        self.info.incarnation == other.info.incarnation
    }
}

impl Hash for NativePeer {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.info.incarnation.hash(state);
    }
}
