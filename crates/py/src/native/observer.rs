//! `KeeperObserver`, as Python holds it.

use std::time::Duration;

use llm_datadist_core::{Deadline, Result};
use llm_datadist_keeper::{ListedChange, ListedNamespace, ListedValue, Observer};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use super::errors::raise;
use super::store::TIMEOUT;
use super::values;
use crate::convert::Any;
use crate::{engine, stats};

/// The default of `limit`.
const LIMIT: usize = 1000;

/// A read-only client of a keeper: it lists values and namespaces, and reads counters.
///
/// It has no namespace of its own. It does not attach again: after a call that the keeper has not answered, all calls fail. Open another
/// one then. A keeper has at most 8. Several threads may use it. ``with`` calls ``close`` at the end.
///
/// Args:
///     socket: path at which the keeper listens.
///     timeout: seconds after which attaching and each call give up.
///     token: token that gives the observer its role: ``stats`` needs the role ``read``, and the other calls ``admin``. ``None``: that of
///         ``token_file``, or none. Processes of the user of the keeper need no token, and may do everything.
///     token_file: path of a file with the token, of mode 0600 or 0400, in place of ``token``.
///     keeper_user: number of the user whose keeper is meant. ``None``: this user. Another one needs a token.
///
/// Raises:
///     TypeError: an argument has the wrong type.
///     InvalidArgument: an argument is out of range, the version of the keeper differs, or the keeper does not accept the token.
///     PeerLost: no keeper listens there.
///     Timeout: the keeper has not answered in time.
///     Error: the system refuses the connection, a process of another user listens at the socket, or the keeper has 8 observers.
#[pyclass(frozen, weakref, name = "KeeperObserver", module = "llm_datadist.native")]
pub(crate) struct NativeObserver {
    observer: Observer,
    timeout: Duration,
}

impl NativeObserver {
    /// Runs `call` detached from the interpreter, with the deadline of the observer.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Observer, Deadline) -> Result<T> + Send,
    ) -> PyResult<T> {
        let deadline = Deadline::after(self.timeout).named("timeout");
        engine::waiting(py, raise, deadline, |deadline| call(&self.observer, deadline))
    }
}

#[pymethods]
impl NativeObserver {
    #[new]
    #[pyo3(
        signature = (socket, /, *, timeout=None, token=None, token_file=None, keeper_user=None),
        text_signature = "(socket, /, *, timeout=5.0, token=None, token_file=None, keeper_user=None)"
    )]
    fn new(
        py: Python<'_>,
        socket: &Any<'_>,
        timeout: Option<&Any<'_>>,
        token: Option<&Any<'_>>,
        token_file: Option<&Any<'_>>,
        keeper_user: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let access = values::keeper_access(token, token_file, keeper_user)?;
        let socket = values::path("socket", socket)?;
        let timeout = timeout.map_or(Ok(TIMEOUT), |given| values::seconds("timeout", given))?;
        let deadline = Deadline::after(timeout).named("timeout");
        let observer = engine::waiting(py, raise, deadline, |deadline| {
            Observer::with_access(&socket, &access, deadline)
        })?;
        Ok(NativeObserver { observer, timeout })
    }

    /// Return the counters of the keeper.
    ///
    /// Raises:
    ///     PeerLost: the keeper has ended, or has not answered an earlier call.
    ///     Timeout: the keeper has not answered in time, or calls of other threads took the time.
    ///     Closed: the observer is closed, or belongs to the parent of this process.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        stats::dict(py, &self.run(py, Observer::stats)?.to_json())
    }

    /// Return the namespaces that the keeper knows, in the order of their numbers.
    ///
    /// A text occurs more than once while only readers with different settings use it.
    ///
    /// Raises:
    ///     Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used further.
    ///     PeerLost: the keeper has ended, or has not answered an earlier call.
    ///     Timeout: the keeper has not answered in time, or calls of other threads took the time.
    ///     Closed: the observer is closed, or belongs to the parent of this process.
    fn namespaces<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let listed = self.run(py, Observer::namespaces)?;
        listed.iter().map(|namespace| namespace_dict(py, namespace)).collect()
    }

    /// Return values that the keeper has, the most recently used ones first.
    ///
    /// They are not all of the same moment, because the keeper serves others meanwhile. A value that stays meanwhile is there exactly
    /// once, whatever is used. A key that is dropped and put again meanwhile may be missing, or be there twice with different slots.
    ///
    /// Args:
    ///     namespace: number of a namespace. ``None``: the values of all.
    ///     limit: most values to return.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: an argument is out of range.
    ///     Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used further.
    ///     PeerLost: the keeper has ended, or has not answered an earlier call.
    ///     Timeout: the keeper has not answered in time, or calls of other threads took the time.
    ///     Closed: the observer is closed, or belongs to the parent of this process.
    #[pyo3(signature = (namespace=None, /, *, limit=None), text_signature = "($self, namespace=None, /, *, limit=1000)")]
    fn values<'py>(
        &self,
        py: Python<'py>,
        namespace: Option<&Any<'py>>,
        limit: Option<&Any<'py>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let namespace = namespace.map(|given| values::int32("namespace", given, 0)).transpose()?;
        let limit = limit.map(|given| values::int32("limit", given, 1)).transpose()?;
        let limit = limit.map_or(LIMIT, |limit| limit as usize);
        let listed = self.run(py, |observer, deadline| observer.values(namespace, limit, deadline))?;
        listed.iter().map(|value| value_dict(py, value)).collect()
    }

    /// Return which values were stored and removed since the last call, in this order.
    ///
    /// The first call returns none: call it before ``values`` to follow the keeper from then on without a gap. The keeper remembers the
    /// last 65,536 changes. If there were more since the last call, ``missed`` is the number of those that are not returned; call
    /// ``values`` again then. Each change is returned once, to one of the threads.
    ///
    /// Raises:
    ///     Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The observer can be used further.
    ///     PeerLost: the keeper has ended, or has not answered an earlier call.
    ///     Timeout: the keeper has not answered in time, or calls of other threads took the time.
    ///     Closed: the observer is closed, or belongs to the parent of this process.
    fn changes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let new = self.run(py, Observer::changes)?;
        let changes: PyResult<Vec<_>> = new.changes.iter().map(|change| change_dict(py, change)).collect();
        let dict = PyDict::new(py);
        dict.set_item("changes", changes?)?;
        dict.set_item("missed", new.missed)?;
        Ok(dict)
    }

    /// End the connection to the keeper. Closing again does nothing.
    ///
    /// Calls of other threads that wait for the keeper end.
    fn close(&self, py: Python<'_>) {
        engine::allow_threads(py, || self.observer.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __exit__(&self, py: Python<'_>, kind: &Any<'_>, error: &Any<'_>, trace: &Any<'_>) {
        self.close(py);
    }
}

fn namespace_dict<'py>(py: Python<'py>, namespace: &ListedNamespace) -> PyResult<Bound<'py, PyDict>> {
    let ListedNamespace { number, text, value, checksums, values } = namespace;
    let dict = PyDict::new(py);
    dict.set_item("number", number)?;
    dict.set_item("text", text)?;
    dict.set_item("value", value)?;
    dict.set_item("checksums", checksums)?;
    dict.set_item("values", values)?;
    Ok(dict)
}

fn change_dict<'py>(py: Python<'py>, change: &ListedChange) -> PyResult<Bound<'py, PyDict>> {
    let ListedChange { namespace, key, stored } = change;
    let dict = PyDict::new(py);
    dict.set_item("namespace", namespace)?;
    dict.set_item("key", PyBytes::new(py, key.bytes()))?;
    dict.set_item("stored", stored)?;
    Ok(dict)
}

fn value_dict<'py>(py: Python<'py>, value: &ListedValue) -> PyResult<Bound<'py, PyDict>> {
    let ListedValue { namespace, key, slot, used, leased } = value;
    let dict = PyDict::new(py);
    dict.set_item("namespace", namespace)?;
    dict.set_item("key", PyBytes::new(py, key.bytes()))?;
    dict.set_item("slot", slot)?;
    dict.set_item("used", used)?;
    dict.set_item("leased", leased)?;
    Ok(dict)
}
