//! Events as Python holds them: messages of peers and news about links. `transfer` has the end of a call.

use llm_datadist_core::{LinkEnd, Notification, PeerInfo};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::convert;

/// The other end of a link.
#[pyclass(frozen, eq, name = "Peer", module = "llm_datadist.events")]
#[derive(PartialEq, Eq)]
pub(crate) struct PeerHandle(PeerInfo);

/// A message of a peer.
#[pyclass(frozen, name = "Notification", module = "llm_datadist.events")]
pub(crate) struct NotificationEvent {
    #[pyo3(get)]
    cluster_id: u64,
    #[pyo3(get)]
    payload: Py<PyBytes>,
}

/// A link was made.
#[pyclass(frozen, name = "LinkUp", module = "llm_datadist.events")]
pub(crate) struct LinkUpEvent {
    #[pyo3(get)]
    peer: Py<PeerHandle>,
}

/// A link has ended.
#[pyclass(frozen, name = "LinkDown", module = "llm_datadist.events")]
pub(crate) struct LinkDownEvent {
    #[pyo3(get)]
    peer: Py<PeerHandle>,
    #[pyo3(get)]
    reason: String,
    #[pyo3(get)]
    unacknowledged: u64,
}

impl PeerHandle {
    /// Returns the object for a peer.
    pub(crate) fn of(py: Python<'_>, peer: &PeerInfo) -> PyResult<Py<Self>> {
        Py::new(py, PeerHandle(peer.clone()))
    }
}

/// Returns the text of a peer, with the length of its metadata.
pub(crate) fn shown(peer: &PeerInfo) -> String {
    let PeerInfo { cluster, incarnation, address, transport, metadata, .. } = peer;
    let ids = format!("cluster_id={cluster}, incarnation={incarnation}");
    let metadata =
        if metadata.is_empty() { String::new() } else { format!(", metadata=<{} bytes>", metadata.len()) };
    format!("Peer({ids}, address='{address}', transport='{transport}'{metadata})")
}

/// Returns the event of a message.
pub(crate) fn notification(py: Python<'_>, message: &Notification) -> PyResult<Py<PyAny>> {
    let payload = convert::bytes(py, &message.payload)?;
    let event = NotificationEvent { cluster_id: message.peer.cluster.0, payload: payload.unbind() };
    Ok(Py::new(py, event)?.into_any())
}

/// Returns the event that a link was made.
pub(crate) fn link_up(py: Python<'_>, peer: &PeerInfo) -> PyResult<Py<PyAny>> {
    Ok(Py::new(py, LinkUpEvent { peer: PeerHandle::of(py, peer)? })?.into_any())
}

/// Returns the event that a link has ended.
pub(crate) fn link_down(py: Python<'_>, end: &LinkEnd) -> PyResult<Py<PyAny>> {
    let peer = PeerHandle::of(py, &end.peer)?;
    let event = LinkDownEvent { peer, reason: end.reason.clone(), unacknowledged: end.unacknowledged };
    Ok(Py::new(py, event)?.into_any())
}

#[pymethods]
impl PeerHandle {
    #[getter]
    fn cluster_id(&self) -> u64 {
        self.0.cluster.0
    }

    #[getter]
    fn incarnation(&self) -> u64 {
        self.0.incarnation
    }

    #[getter]
    fn address(&self) -> &str {
        &self.0.address
    }

    #[getter]
    fn transport(&self) -> &str {
        self.0.transport
    }

    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        convert::bytes(py, &self.0.metadata)
    }

    fn __hash__(&self) -> u64 {
        self.0.incarnation
    }

    fn __repr__(&self) -> String {
        shown(&self.0)
    }
}

#[pymethods]
impl NotificationEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str) {
        ("cluster_id", "payload")
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!("Notification({}, {})", self.cluster_id, self.payload.bind(py).repr()?))
    }
}

#[pymethods]
impl LinkUpEvent {
    #[classattr]
    fn __match_args__() -> (&'static str,) {
        ("peer",)
    }

    fn __repr__(&self) -> String {
        format!("LinkUp({})", self.peer.get().__repr__())
    }
}

#[pymethods]
impl LinkDownEvent {
    #[classattr]
    fn __match_args__() -> (&'static str, &'static str, &'static str) {
        ("peer", "reason", "unacknowledged")
    }

    fn __repr__(&self) -> String {
        let LinkDownEvent { peer, reason, unacknowledged } = self;
        format!("LinkDown({}, '{reason}', unacknowledged={unacknowledged})", peer.get().__repr__())
    }
}
