//! `Store`, as Python holds it.

use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{Deadline, Result};
use llm_datadist_keeper::{Store, StoreOptions, StoreView, Stored};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::errors::raise;
use super::store_values::{StoreValues, keys};
use super::values;
use super::view::NativeView;
use crate::convert::Any;
use crate::{engine, stats};

/// The default of `timeout`.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(5);

/// A client of a keeper: values by key, shared with other processes of this host, which outlive this one.
///
/// A key is 28 bytes: a digest of everything that decides the bytes of the value, such as ``hashlib.sha224``. If the keeper is away,
/// every key is a miss and nothing raises; the store attaches again by itself. Several threads may use a store.
/// A call has at most 4,096 keys. ``with`` calls ``close`` at the end.
///
/// Args:
///     socket: path at which the keeper listens. The keeper need not be there yet.
///     namespace: text of 1 to 4,096 bytes that stands for everything that gives values their meaning: model, revision, element type,
///         layout, ranks, versions. Stores with other texts share nothing.
///     value: bytes of each value, as a number or a text such as ``"64KiB"``. All stores of a namespace have the same.
///     timeout: seconds after which ``put``, ``drop`` and ``stats`` give up, if they have no ``timeout`` of their own.
///
/// Raises:
///     TypeError: an argument has the wrong type.
///     InvalidArgument: an argument is out of range, or the keeper refuses it: its values are smaller, the namespace has values of
///         another size, or its version differs.
///     Error: the system refuses the connection, a process of another user listens at the socket, or the keeper has
///         reached a limit.
#[pyclass(frozen, weakref, name = "Store", module = "llm_datadist.native")]
pub(crate) struct NativeStore {
    store: Arc<Store>,
    timeout: Duration,
}

impl NativeStore {
    /// Runs `call` detached from the interpreter, with the deadline of `timeout` or of the store.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<&Any<'_>>,
        call: impl FnOnce(&Arc<Store>, Deadline) -> Result<T> + Send,
    ) -> PyResult<T> {
        let limit = timeout.map_or(Ok(self.timeout), |given| values::seconds("timeout", given))?;
        let deadline = Deadline::after(limit).named("timeout");
        engine::waiting(py, raise, deadline, |deadline| call(&self.store, deadline))
    }
}

#[pymethods]
impl NativeStore {
    #[new]
    #[pyo3(
        signature = (socket, /, *, namespace, value=None, timeout=None),
        text_signature = "(socket, /, *, namespace, value='64KiB', timeout=5.0)"
    )]
    fn new(
        py: Python<'_>,
        socket: &Any<'_>,
        namespace: &Any<'_>,
        value: Option<&Any<'_>>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let namespace: Result<String, _> =
            namespace.extract().map_err(|_| values::wrong_type("namespace", "a str", namespace));
        let (socket, value) = (values::path("socket", socket)?, values::value_size(value)?);
        let timeout = timeout.map_or(Ok(TIMEOUT), |given| values::seconds("timeout", given))?;
        let options = StoreOptions { socket, namespace: namespace?, value };
        let deadline = Deadline::after(timeout).named("timeout");
        let store = engine::waiting(py, raise, deadline, |deadline| Store::open(options, deadline))?;
        Ok(NativeStore { store: Arc::new(store), timeout })
    }

    /// Say which keys the keeper has, without a message to it.
    ///
    /// A value may be replaced right afterwards, so only ``get`` says whether it could be read.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///
    /// Returns:
    ///     For each key whether the keeper has it.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, or there are too many.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, /))]
    fn exists(&self, py: Python<'_>, keys: &Any<'_>) -> PyResult<Vec<bool>> {
        let keys = self::keys(keys)?;
        self.run(py, None, |store, _| store.exists(&keys))
    }

    /// Copy the values of keys out of the memory of the keeper, without a message to it.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     into: list of writable buffers or arrays in host memory, one for each key, each with the bytes of a value. They must not
    ///         overlap.
    ///
    /// Returns:
    ///     For each key whether its buffer has the value, complete and right. Other buffers may have any bytes.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or a buffer has another size or overlaps another one.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, into, /))]
    fn get(&self, py: Python<'_>, keys: &Any<'_>, into: &Any<'_>) -> PyResult<Vec<bool>> {
        let (keys, into) =
            (self::keys(keys)?, StoreValues::read("into", into, self.store.value_bytes(), false)?);
        self.run(py, None, |store, _| store.get(&keys, &into.windows()?))
    }

    /// Give the values of keys where they lie in the memory of the keeper, without a copy, with leases on them.
    ///
    /// Use the view in a ``with`` statement, and call its ``valid`` in it after the last use: the bytes may change at any time, with a
    /// lease as well. What was computed from a value counts only if ``valid`` says that the value was right.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     ttl: seconds for which the values are leased, above 0 and at most 10. The end of the ``with`` statement ends the leases of this
    ///         store on the keys, also those of ``lease``, unless another view has them.
    ///     timeout: time limit of the call in seconds. ``None``: that of the store. A value without a lease is there all the same.
    ///
    /// Returns:
    ///     The view. If the keeper is away, it has no values.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or ``ttl`` is out of range.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, /, *, ttl, timeout=None))]
    fn view(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        ttl: &Any<'_>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<NativeView> {
        let (keys, ttl) = (self::keys(keys)?, values::seconds("ttl", ttl)?);
        let open = |store: &Arc<Store>, deadline| StoreView::open(store, keys, ttl, deadline);
        self.run(py, timeout, open).map(NativeView::new)
    }

    /// Have the keeper copy values. It keeps the value that it has of a key.
    ///
    /// Give the keys of a chain in its order: the end of a chain is replaced before its start.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     values: list of ``bytes``, buffers or arrays in host memory, one for each key, each with the bytes of a value. No other
    ///         thread may write them during the call. A read-only buffer that is neither ``bytes`` nor an array is copied first.
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     For each key whether the keeper has a value now. If the keeper is away or does not answer in time, no value that it has not
    ///     confirmed.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or a value has another size.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, values, /, *, timeout=None))]
    fn put(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        values: &Any<'_>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Vec<bool>> {
        let (keys, given) =
            (self::keys(keys)?, StoreValues::read("values", values, self.store.value_bytes(), true)?);
        let put = |store: &Arc<Store>, deadline| store.put(&keys, &given.windows()?, deadline);
        let has = |stored| matches!(stored, Stored::Stored | Stored::Present);
        Ok(self.run(py, timeout, put)?.into_iter().map(has).collect())
    }

    /// Have the keeper not replace the values of keys for a while.
    ///
    /// A lease makes a hit likelier, and promises nothing: the keeper may end, and another store may drop the value. It ends with its
    /// time, with the store, or with the process. All leases of a store hold at most a quarter of the slots of the keeper, and those of all
    /// stores half. Leasing a value again lets its lease last longer.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     ttl: seconds, above 0 and at most 10.
    ///     timeout: time limit of the call in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     For each key whether the store has a lease on its value now.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or ``ttl`` is out of range.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, /, *, ttl, timeout=None))]
    fn lease(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        ttl: &Any<'_>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Vec<bool>> {
        let (keys, ttl) = (self::keys(keys)?, values::seconds("ttl", ttl)?);
        self.run(py, timeout, |store, deadline| store.lease(&keys, ttl, deadline))
    }

    /// End the leases of this store on the values of keys, without waiting for a reply.
    ///
    /// If the keeper takes no message for the time limit, the leases end with their time.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, or there are too many.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, /, *, timeout=None))]
    fn unlease(&self, py: Python<'_>, keys: &Any<'_>, timeout: Option<&Any<'_>>) -> PyResult<()> {
        let keys = self::keys(keys)?;
        self.run(py, timeout, |store, deadline| store.unlease(&keys, deadline))
    }

    /// Have the keeper drop the values of keys.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     How many of the keys had a value.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, or there are too many.
    ///     PeerLost: the keeper is away.
    ///     Timeout: the keeper has not answered in time.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, /, *, timeout=None))]
    fn drop(&self, py: Python<'_>, keys: &Any<'_>, timeout: Option<&Any<'_>>) -> PyResult<u64> {
        let keys = self::keys(keys)?;
        self.run(py, timeout, |store, deadline| store.drop_values(&keys, deadline))
    }

    /// Have the keeper drop all values of the namespace. Those that are put meanwhile may stay.
    ///
    /// An error of a call that has dropped some says how many: ``dropped=...`` in its text.
    ///
    /// Args:
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     How many values there were.
    ///
    /// Raises:
    ///     TypeError, InvalidArgument: ``timeout`` has the wrong type or is out of range.
    ///     PeerLost: the keeper is away.
    ///     Timeout: the keeper has not answered in time.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (*, timeout=None))]
    fn clear(&self, py: Python<'_>, timeout: Option<&Any<'_>>) -> PyResult<u64> {
        self.run(py, timeout, |store, deadline| store.clear(deadline))
    }

    /// Return the counts of this store, and those of the keeper.
    ///
    /// Args:
    ///     keeper: whether to ask the keeper for its counters. ``False`` sends no message, so a keeper that hangs does not matter.
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     A dict: ``llm_datadist.stats.StoreStats`` has its fields. The counters of the keeper are ``None`` if it is away or was not
    ///     asked. They are also ``None`` if it does not answer in time: then the store attaches again, as after a ``put``.
    ///
    /// Raises:
    ///     TypeError, InvalidArgument: an argument has the wrong type or is out of range.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(
        signature = (*, keeper=true, timeout=None),
        text_signature = "($self, *, keeper=True, timeout=None)"
    )]
    fn stats<'py>(
        &self,
        py: Python<'py>,
        keeper: bool,
        timeout: Option<&Any<'py>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let counted =
            |store: &Arc<Store>, deadline| if keeper { store.stats(deadline) } else { store.own_stats() };
        stats::dict(py, &self.run(py, timeout, counted)?.to_json())
    }

    /// End the connection to the keeper, which keeps the values. Closing again does nothing.
    ///
    /// Calls of other threads that wait for the keeper end.
    fn close(&self, py: Python<'_>) {
        engine::allow_threads(py, || self.store.close());
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (kind, error, trace, /))]
    #[expect(unused_variables, reason = "the parameters of the protocol")]
    fn __exit__(&self, py: Python<'_>, kind: &Any<'_>, error: &Any<'_>, trace: &Any<'_>) {
        self.close(py);
    }

    fn __repr__(&self) -> String {
        format!("Store(value={})", self.store.value_bytes())
    }
}

/// The mapped memory of the keeper, which may be huge, is unmapped while detached from the interpreter.
impl Drop for NativeStore {
    fn drop(&mut self) {
        Python::try_attach(|py| self.close(py));
    }
}
