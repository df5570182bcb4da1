//! `Store`, as Python holds it.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::{Deadline, Result};
use llm_datadist_keeper::{Store, StoreJob, StoreKey, StoreOptions, StoreView, Stored};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::errors::raise;
use super::optional_arg::OptionalArg;
use super::owner::{TransferOwner, raise_of_store};
use super::store_shared::{StoreShared, ValuesOfCall};
use super::store_values::{StoreValues, keys};
use super::transfer::NativeTransfer;
use super::view::NativeView;
use super::{events, values};
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
/// ``start_get`` and ``start_put`` return a ``Transfer`` at once. Wait for it, ``await`` it, or take what has ended from ``events`` when
/// ``fileno`` is readable. At most 4,096 transfers of a store run or have an outcome that was not taken. The store releases
/// the buffers of a transfer when the program learns of its end, or with the next call of ``start_get``, ``start_put`` or ``events``.
///
/// Args:
///     socket: path at which the keeper listens. The keeper need not be there yet.
///     namespace: text of 1 to 4,096 bytes that stands for everything that gives values their meaning: model, revision, element type,
///         layout, ranks, versions. Stores with other texts share nothing.
///     value: bytes of each value, as a number or a text such as ``"64KiB"``. All stores of a namespace have the same.
///     timeout: time limit in seconds of opening the store, and of each call that has no ``timeout`` of its own.
///     queue: largest number of bytes of values of started calls that have not ended, as a number or a text. A further call raises
///         ``Busy``.
///     checksums: whether ``put`` gives each value a checksum (XXH3, 64 bits), and ``get`` compares it with the bytes that it has copied. A
///         value that differs is a miss, and the keeper drops it. All stores of a namespace have the same.
///     token: token that gives the store its role: ``put`` needs the role ``write``, ``drop`` and ``clear`` need ``admin``, and the other
///         calls ``read``. ``None``: that of ``token_file``, or none. Processes of the user of the keeper need no token, and may do
///         everything.
///     token_file: path of a file with the token, of mode 0600 or 0400, in place of ``token``.
///     keeper_user: number of the user whose keeper is trusted with the values. ``None``: this user. Another
///         one needs a token.
///
/// Raises:
///     TypeError: an argument has the wrong type.
///     InvalidArgument: an argument is out of range, or the keeper refuses it: its values are smaller, the namespace has values of
///         another size or other ``checksums``, the keeper does not know the token, or its version differs.
///     Error: the system refuses the connection, a process of another user listens at the socket, or the keeper has
///         reached a limit.
#[pyclass(frozen, weakref, name = "Store", module = "llm_datadist.native")]
pub(crate) struct NativeStore {
    shared: Arc<StoreShared>,
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
        let (deadline, store) = (self.deadline(timeout)?, &self.shared.store);
        engine::waiting(py, raise, deadline, |deadline| call(store, deadline))
    }

    fn deadline(&self, timeout: Option<&Any<'_>>) -> PyResult<Deadline> {
        let limit = timeout.map_or(Ok(self.timeout), |given| values::seconds("timeout", given))?;
        Ok(Deadline::after(limit).named("timeout"))
    }

    /// Starts a call, and returns its handle.
    fn start(
        &self,
        py: Python<'_>,
        (keys, values): (Vec<StoreKey>, StoreValues),
        deadline: Deadline,
        call: impl FnOnce(&Arc<Store>, Vec<StoreKey>, ValuesOfCall, Deadline) -> Result<StoreJob>,
    ) -> PyResult<Py<NativeTransfer>> {
        let (shared, values) = (&self.shared, Arc::new(values));
        shared.release_unused();
        let held = ValuesOfCall(values.clone());
        let job = engine::attached(py, raise_of_store, || call(&shared.store, keys, held, deadline))?;
        let transfer = job.transfer.clone();
        shared.memory.insert(transfer.number(), values);
        NativeTransfer::started_by(py, &TransferOwner::Store(shared.clone(), Some(job)), &transfer)
    }

    /// Reads keys, and their values as [`StoreValues::given`] does.
    fn keys_and(
        &self,
        given_keys: &Any<'_>,
        (name, values): (&str, &Any<'_>),
        rows: Option<&Any<'_>>,
        only_read: bool,
    ) -> PyResult<(Vec<StoreKey>, StoreValues)> {
        let keys = keys(given_keys)?;
        let sizes = (keys.len(), self.shared.store.value_bytes());
        let values = StoreValues::given(name, values, rows, sizes, only_read)?;
        Ok((keys, values))
    }
}

#[pymethods]
impl NativeStore {
    #[new]
    #[pyo3(
        signature = (
            socket, /, *, namespace, value=None, timeout=None, queue=None, checksums=None, token=None, token_file=None,
            keeper_user=None
        ),
        text_signature = "(socket, /, *, namespace, value='64KiB', timeout=5.0, queue='16GiB', checksums=False, \
                          token=None, token_file=None, keeper_user=None)"
    )]
    #[expect(clippy::too_many_arguments, reason = "the keywords of the constructor")]
    fn new(
        py: Python<'_>,
        socket: &Any<'_>,
        namespace: &Any<'_>,
        value: Option<&Any<'_>>,
        timeout: Option<&Any<'_>>,
        queue: Option<&Any<'_>>,
        checksums: Option<&Any<'_>>,
        token: Option<&Any<'_>>,
        token_file: Option<&Any<'_>>,
        keeper_user: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let access = values::keeper_access(token, token_file, keeper_user)?;
        let checksums = checksums.map_or(Ok(false), |given| values::truth("checksums", given))?;
        let namespace = values::text("namespace", namespace);
        let (socket, value) = (values::path("socket", socket)?, values::value_size(value)?);
        let timeout = timeout.map_or(Ok(TIMEOUT), |given| values::seconds("timeout", given))?;
        let options = StoreOptions { socket, namespace: namespace?, value, checksums, access };
        let deadline = Deadline::after(timeout).named("timeout");
        let queue = queue.map(|given| values::size("queue", given)).transpose()?;
        let store = engine::waiting(py, raise, deadline, |deadline| Store::open(options, deadline))?;
        let store = match queue {
            Some(bytes) => store.with_queue(bytes),
            None => store,
        };
        Ok(NativeStore { shared: Arc::new(StoreShared::new(store)), timeout })
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
        let (keys, store) = (self::keys(keys)?, &self.shared.store);
        if store.answers_at_once() {
            return engine::attached(py, raise, || store.exists(&keys));
        }
        self.run(py, None, |store, _| store.exists(&keys))
    }

    /// Copy the values of keys out of the memory of the keeper, without a message to it.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     into: list of writable buffers or arrays in host memory, one for each key, each with the bytes of a value. They must not
    ///         overlap.
    ///     rows: if given, for each key the row of ``into`` that the value goes to. Then ``into`` is one writable buffer or array, with a multiple
    ///         of the bytes of a value. A list or an array of integers.
    ///
    /// Returns:
    ///     For each key whether its buffer has the value, complete and right, and with its checksum if the store has checksums. Other buffers may have any bytes.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or a buffer has another size or overlaps another one.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, into, /, *, rows=None))]
    fn get(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        into: &Any<'_>,
        rows: Option<&Any<'_>>,
    ) -> PyResult<Vec<bool>> {
        let (keys, into) = self.keys_and(keys, ("into", into), rows, false)?;
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
        let (keys, ttl) = (self::keys(keys)?, values::lease_seconds(ttl)?);
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
    ///     rows: if given, for each key the row of ``values`` that has the value. Then ``values`` is one writable buffer or array, with a multiple
    ///         of the bytes of a value. A list or an array of integers.
    ///     timeout: time limit in seconds. ``None``: that of the store.
    ///
    /// Returns:
    ///     For each key whether the keeper has a value now. If the keeper is away or does not answer in time, no value that it has not
    ///     confirmed.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: a key does not have 28 bytes, there are too many, or a value has another size.
    ///     Error: the role of the token is ``read``; ``code`` is ``"not_enabled"``. The store can be used further.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, values, /, *, rows=None, timeout=None))]
    fn put(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        values: &Any<'_>,
        rows: Option<&Any<'_>>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Vec<bool>> {
        let (keys, given) = self.keys_and(keys, ("values", values), rows, true)?;
        let put = |store: &Arc<Store>, deadline| store.put(&keys, &given.windows()?, deadline);
        let has = |stored| matches!(stored, Stored::Stored | Stored::Present);
        Ok(self.run(py, timeout, put)?.into_iter().map(has).collect())
    }

    /// Start a ``get``, and return at once.
    ///
    /// The result of the transfer is the list that ``get`` returns, and its ``bytes`` are those that were found. Its buffers are held until
    /// it has ended: nobody may use them before ``done``, and nothing is written into them afterwards. Gets do not wait for puts.
    /// A cancelled get finishes its current batch first: at most 64 values or about 64 MiB.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     into: as for ``get``.
    ///     rows: as for ``get``.
    ///     timeout: seconds from now. The transfer ends then with ``Timeout``, whether it has begun or not. ``None``: that of the store.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: an argument is out of range, as for ``get``, or the values have more bytes than ``queue``.
    ///     Busy: 4,096 transfers run or have an outcome that was not taken, or those that run use ``queue`` bytes of values.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, into, /, *, rows=None, timeout=None))]
    fn start_get(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        into: &Any<'_>,
        rows: Option<&Any<'_>>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Py<NativeTransfer>> {
        let (given, deadline) = (self.keys_and(keys, ("into", into), rows, false)?, self.deadline(timeout)?);
        self.start(py, given, deadline, Store::start_get)
    }

    /// Start a ``put``, and return at once.
    ///
    /// The result of the transfer is the list that ``put`` returns, and its ``bytes`` are those that the keeper has. Its values are held
    /// until it has ended: nobody may write them before ``done``. Puts of a store run one after the other, in the order in which they were
    /// started. A put that is cancelled gives the keeper no further values, and ends within 100 ms if it waits for the keeper. The store
    /// attaches again afterwards.
    ///
    /// Args:
    ///     keys: list of keys, at most 4,096.
    ///     values: as for ``put``.
    ///     rows: as for ``put``.
    ///     timeout: seconds from now. If the transfer has not begun then, it ends with ``Timeout``. If it has, what the keeper has not
    ///         confirmed is not stored. ``None``: that of the store.
    ///
    /// Raises:
    ///     TypeError: an argument has the wrong type.
    ///     InvalidArgument: an argument is out of range, as for ``put``, or the values have more bytes than ``queue``.
    ///     Busy: 4,096 transfers run or have an outcome that was not taken, or those that run use ``queue`` bytes of values.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (keys, values, /, *, rows=None, timeout=None))]
    fn start_put(
        &self,
        py: Python<'_>,
        keys: &Any<'_>,
        values: &Any<'_>,
        rows: Option<&Any<'_>>,
        timeout: Option<&Any<'_>>,
    ) -> PyResult<Py<NativeTransfer>> {
        let (given, deadline) =
            (self.keys_and(keys, ("values", values), rows, true)?, self.deadline(timeout)?);
        self.start(py, given, deadline, Store::start_put)
    }

    /// Return the transfers that have ended since the last call, in the order of their ends. The call never waits.
    ///
    /// A transfer whose outcome was taken by ``result`` or ``await`` has no event. ``result`` and ``await`` still give the outcome of a
    /// transfer whose ``Completed`` was taken.
    ///
    /// Args:
    ///     limit: largest number of events, from 1 to 2**32 - 1. The others stay for the next call.
    ///
    /// Raises:
    ///     TypeError: ``limit`` is not an integer.
    ///     InvalidArgument: ``limit`` is out of range.
    ///     OutOfMemory: there is no memory for the list. The events stay.
    ///     Closed: the store is closed, or belongs to the parent of this process.
    #[pyo3(signature = (limit=OptionalArg::Missing), text_signature = "($self, limit=1024)")]
    fn events(&self, py: Python<'_>, limit: OptionalArg<'_, '_>) -> PyResult<Vec<Py<PyAny>>> {
        let limit = limit.given().map_or(Ok(1024), |limit| values::int32("limit", &limit, 1))?;
        let most = usize::try_from(limit).unwrap_or(usize::MAX);
        self.shared.release_unused();
        let poll = || {
            let queue = self.shared.store.events()?;
            Ok((queue, queue.poll(most)?))
        };
        let (queue, taken) = engine::attached(py, raise_of_store, poll)?;
        events::delivered(py, &TransferOwner::Store(self.shared.clone(), None), queue, taken)
    }

    /// Return a descriptor that is readable while ``events`` has something to return.
    ///
    /// Use it with ``select``, ``selectors`` or ``epoll``, which also accept the store itself. It belongs to the store: do not read,
    /// write or close it.
    ///
    /// Raises:
    ///     Closed: the store is closed, or belongs to the parent of this process.
    ///     Error: no descriptor is left.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        let descriptor = || Ok(self.shared.store.events()?.descriptor()?.as_fd().as_raw_fd());
        engine::attached(py, raise_of_store, descriptor)
    }

    /// Have the keeper not replace the values of keys for a while.
    ///
    /// A lease makes a hit likelier, and promises nothing: the keeper may end, and another store may drop the value. It ends with its
    /// time, with the store, or with the process. All leases of a store hold at most a quarter of the slots of the keeper, and those of all
    /// stores half. Leasing a value again lets its lease last longer. A store has one lease on a value: it also ends when a view of this
    /// store on the key ends, unless another view has the key.
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
        let (keys, ttl) = (self::keys(keys)?, values::lease_seconds(ttl)?);
        self.run(py, timeout, |store, deadline| store.lease(&keys, ttl, deadline))
    }

    /// End the leases of this store on the values of keys, without waiting for a reply.
    ///
    /// Leases of its views end, too: their values stay readable, and are likelier to become invalid. If the keeper takes no message for
    /// the time limit, the leases end with their time.
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
    ///     Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The store can be used further.
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
    ///     Error: the role of the token is not ``admin``; ``code`` is ``"not_enabled"``. The store can be used further.
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
        signature = (*, keeper=OptionalArg::Missing, timeout=None),
        text_signature = "($self, *, keeper=True, timeout=None)"
    )]
    fn stats<'py>(
        &self,
        py: Python<'py>,
        keeper: OptionalArg<'_, 'py>,
        timeout: Option<&Any<'py>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let counts = if values::truth_or(true, "keeper", keeper)? {
            self.run(py, timeout, |store, deadline| store.stats(deadline))?
        } else {
            self.deadline(timeout)?;
            engine::attached(py, raise, || self.shared.store.own_stats())?
        };
        stats::dict(py, &counts.to_json())
    }

    /// End the connection to the keeper, which keeps the values. Closing again does nothing.
    ///
    /// Calls of other threads that wait for the keeper end. Transfers end with ``Closed``: this waits for the copies that run, at most 10 s.
    /// Handles of ended transfers keep their outcomes, and no event comes any more.
    fn close(&self, py: Python<'_>) {
        self.shared.close(py);
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
        format!("Store(value={})", self.shared.store.value_bytes())
    }
}

/// The mapped memory of the keeper, which may be huge, is unmapped while detached from the interpreter.
impl Drop for NativeStore {
    fn drop(&mut self) {
        Python::try_attach(|py| self.close(py));
    }
}
