//! `Engine`, as Python holds it. `engine_methods` has what it does.

use std::sync::Arc;

use pyo3::prelude::*;

use super::shared::EngineShared;
use crate::engine::Engine;

/// An open engine: pools, caches, links to peers, and threads.
///
/// A process may have several engines, also linked with each other. They share one set of threads. ``with`` and ``async
/// with`` call ``close`` at the end. Dropping the last reference closes the engine too.
///
/// Peers know an engine by its incarnation, a random number that is drawn when it opens. So a program that restarts is
/// another peer, even at the same address and with the same name.
///
/// Args:
///     pool: size of the device pool, from which ``allocate`` takes memory by default. ``None``: there is none. A size
///         is a number of bytes, or a text of digits and a unit, such as ``"64MiB"`` (KiB, MiB, GiB or TiB, without a
///         space or a decimal point). It is rounded down to whole pages and must hold one page. Both pools are in host
///         memory so far; a program keeps active blocks in the device pool and idle blocks in the host pool.
///     host_pool: size of the host pool, in the same form. ``None``: there is none.
///     page: size of a page of both pools: a power of two from 1 KiB to 1 GiB. Every tensor takes whole pages.
///     listen: address at which peers can link to this engine: ``"ip:port"`` or ``"[ipv6]:port"``. Port 0 takes a free
///         port; ``address`` returns it. ``None``: no peer can link to this engine, but it can link to others.
///     name: name that peers (``Peer.name``), log lines and statistics show: 1 to 128 bytes of UTF-8, printable. By
///         default ``"<host name>/<process id>/<number>"``. Names need not be unique.
///     metadata: bytes that peers read as ``Peer.metadata``, at most 16 KiB.
///     token: secret that both ends of a link must have, at least 16 characters. ``None``: that of ``token_file`` or
///         of the environment variable ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN``, if one is set. Without a
///         token, only processes of the same user on the same host can link.
///     token_file: absolute path of a file with the token, of mode 0600 or 0400, in place of ``token``.
///     accept_remote: whether an engine without a token links with every peer that reaches it, of any user and host.
///         Both ends of a link need it.
///     timeout: seconds after which a call that has no ``timeout`` of its own fails with ``Timeout`` (finite, above 0).
///     verify: how transfers compare the bytes that have moved with their source: ``"off"``, ``"sample"`` (one block in
///         64, at least one) or ``"full"``.
///     **options: further options by name, such as ``copy_workers=8``. ``llm-datadist options`` lists them. Times are
///         seconds and sizes have the form of ``pool``.
///
/// Raises:
///     TypeError: an argument has the wrong type, or an option is unknown. The text names the most similar option.
///     InvalidArgument: a value is out of range or has the wrong form; ``token`` and ``token_file`` are both given; the
///         token file cannot be read or others may read it.
///     OutOfMemory: the pools do not fit into the address space, or into memory with ``huge_pages="eager"``.
///     Error: the address cannot be bound, or a thread cannot be started.
#[pyclass(frozen, weakref, name = "Engine", module = "llm_datadist.native")]
pub(crate) struct NativeEngine {
    /// What its caches, peers, transfers and grants hold as well.
    pub(crate) shared: Arc<EngineShared>,
    /// Whether the engine ends with this object. That of an `LLMDataDist` ends with the latter.
    pub(crate) ends: bool,
}

impl NativeEngine {
    /// Returns the native object of an engine that the original's API has opened.
    pub(crate) fn of_original(py: Python<'_>, engine: &Engine) -> PyResult<Py<Self>> {
        let shared = EngineShared::of_original(py, engine)?;
        let native = Bound::new(py, NativeEngine { shared, ends: false })?;
        native.get().shared.set_python(native.as_any())?;
        Ok(native.unbind())
    }
}

/// Without the Python object, nobody can close the engine.
impl Drop for NativeEngine {
    fn drop(&mut self) {
        if self.ends {
            Python::try_attach(|py| self.shared.end(py));
        }
    }
}
