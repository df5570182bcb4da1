//! What peers do.

use llm_datadist_core::bindings::DataDist;
use llm_datadist_core::{PeerCache, PeerInfo};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::errors::raise;
use super::peer::NativePeer;
use super::remote_cache::NativeRemoteCache;
use super::transfer::NativeTransfer;
use super::values;
use crate::convert::{self, Any};

#[pymethods]
impl NativePeer {
    /// The name that the peer's program has given to its engine.
    #[getter]
    fn name(&self) -> &str {
        &self.info.name
    }

    /// The random number that the engine of the peer drew when it opened.
    #[getter]
    fn incarnation(&self) -> u64 {
        self.info.incarnation
    }

    /// The address of the peer: where it listens, or where its connection comes from if it does not listen.
    #[getter]
    fn address(&self) -> &str {
        &self.info.address
    }

    /// How bytes move: ``"shm"`` (memory of the same host) or ``"tcp"``.
    #[getter]
    fn transport(&self) -> &str {
        self.info.transport
    }

    /// The ``metadata`` of the peer's engine, at most 16 KiB.
    #[getter]
    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        convert::bytes(py, &self.info.metadata, raise)
    }

    /// Whether a link to this incarnation exists now.
    ///
    /// It is false once its ``PeerDown`` can be taken, or the engine is closed.
    #[getter]
    fn alive(&self, py: Python<'_>) -> PyResult<bool> {
        if self.shared.engine.closed() {
            return Ok(false);
        }
        let peers = self.shared.engine.attached(py, |engine| Ok(engine.peers()))?;
        Ok(peers.iter().any(|peer| peer.incarnation == self.info.incarnation))
    }

    /// Name a cache of the peer. Nothing is sent.
    ///
    /// Raises:
    ///     TypeError: ``cache`` is not a text.
    ///     InvalidArgument: the name is empty or longer than 128 bytes of UTF-8.
    fn __getitem__(slf: &Bound<'_, Self>, cache: &Any<'_>) -> PyResult<NativeRemoteCache> {
        let text = values::text("cache", cache)?;
        let NativePeer { shared, info } = slf.get();
        let cache = PeerCache::new(&shared.name, info.cluster, &text);
        let cache = cache.map_err(|error| raise(slf.py(), &error))?;
        Ok(NativeRemoteCache::new(slf, cache))
    }

    /// Send a message to the peer's program, which gets it as the event ``Message``. The call never waits.
    ///
    /// Messages of one peer arrive in order, each at most once. When the link ends, ``PeerDown.unconfirmed`` counts those whose
    /// arrival the peer has not confirmed.
    ///
    /// Args:
    ///     message: ``bytes`` or ``bytearray``, at most 64 KiB.
    ///
    /// Raises:
    ///     TypeError: ``message`` has the wrong type.
    ///     InvalidArgument: the message is too long.
    ///     Busy: the peer's program has not taken 1,024 messages or 4 MiB with ``events``. Nothing was sent.
    ///     PeerLost: there is no link to this incarnation.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (message, /))]
    fn send(&self, message: &Any<'_>) -> PyResult<()> {
        let py = message.py();
        let bytes = values::bytes("message", message)?;
        self.shared.engine.enter(py, |engine| engine.notify(self.info.cluster, bytes))
    }

    /// Start to end the link.
    ///
    /// Transfers of this engine that run over it are finished first; new ones fail with ``PeerLost``. Both ends get
    /// ``PeerDown``. The peer is notified, and may link again. Closing a peer that is not linked ends at once.
    ///
    /// Args:
    ///     timeout: seconds to wait until running transfers have ended and the peer has confirmed. ``None``:
    ///         ``Engine.timeout``. This end has dropped the link when the transfer ends, whatever its outcome.
    ///
    /// Raises:
    ///     TypeError: ``timeout`` has the wrong type.
    ///     InvalidArgument: ``timeout`` is not above 0 or not finite.
    ///     Busy: ``max_transfers`` transfers run or have an outcome that was not taken.
    ///     Closed: the engine is closed.
    #[pyo3(signature = (timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<&Any<'_>>) -> PyResult<Py<NativeTransfer>> {
        let limit = timeout.map(|limit| values::seconds("timeout", limit)).transpose()?;
        let unlink = |engine: &DataDist| engine.start_unlink(self.info.cluster, false, limit);
        let transfer = self.shared.engine.attached(py, unlink)?;
        NativeTransfer::started(py, &self.shared, &transfer)
    }

    fn __repr__(&self) -> String {
        let PeerInfo { incarnation, name, address, transport, .. } = &self.info;
        format!(
            "Peer(name='{name}', incarnation={incarnation}, address='{address}', transport='{transport}')"
        )
    }
}
