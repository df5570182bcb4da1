//! `Keeper`, as Python holds it.

use llm_datadist_keeper::Keeper;
use pyo3::prelude::*;

use super::errors::raise;
use super::values;
use crate::convert::Any;
use crate::engine;

/// A store of values that outlives the processes that use it, here in a thread of this process.
///
/// ``llm-datadist serve`` runs one in a process of its own. Processes of the same user use it with a ``Store``, and others with a token. When its memory is full,
/// the value that was not used for the longest time is replaced. ``with`` calls ``close`` at the end.
///
/// Args:
///     memory: bytes for values, as a number or a text such as ``"8GiB"``. It is used as values arrive, and not before.
///     socket: path at which stores attach, of at most 108 bytes. A socket that a dead keeper has left there is taken over. The file
///         ``<socket>.lock`` beside it stays.
///     value: bytes of the largest value, at most 64 MiB, in the same form. Each value takes so much memory.
///     tokens: path of a file with tokens, of mode 0600 or 0400. Each line has a role (``read``, ``write`` or ``admin``) and a token of
///         at least 16 characters. ``None``: only processes of this user attach.
///     group: number of a group of this user. Its processes may connect to the socket, too, which then has mode 0660. Those of other
///         users need a token, so ``tokens`` must be given.
///
/// Raises:
///     TypeError: an argument has the wrong type.
///     InvalidArgument: a size is out of range, ``memory`` does not hold one value, the path cannot be one of a socket, the file of
///         tokens cannot be read, can be read by others or has a wrong line, or ``group`` is given without ``tokens``.
///     OutOfMemory: ``memory`` is more than this process may use: the free memory of the machine or of its control group.
///     Error: another program listens at the path; the error has its process as the fact ``pid``. Or the system refuses a file, a
///         socket, the group or a thread.
#[pyclass(frozen, weakref, name = "Keeper", module = "llm_datadist.native")]
pub(crate) struct NativeKeeper {
    keeper: Keeper,
}

#[pymethods]
impl NativeKeeper {
    #[new]
    #[pyo3(
        signature = (*, memory, socket, value=None, tokens=None, group=None),
        text_signature = "(*, memory, socket, value='64KiB', tokens=None, group=None)"
    )]
    fn new(
        py: Python<'_>,
        memory: &Any<'_>,
        socket: &Any<'_>,
        value: Option<&Any<'_>>,
        tokens: Option<&Any<'_>>,
        group: Option<&Any<'_>>,
    ) -> PyResult<Self> {
        let options = values::keeper_options(memory, socket, value, tokens, group)?;
        let keeper = engine::allow_threads(py, || Keeper::open(&options));
        Ok(NativeKeeper { keeper: keeper.map_err(|error| raise(py, &error))? })
    }

    /// How many values fit into the memory.
    #[getter]
    fn slots(&self) -> u32 {
        self.keeper.slots()
    }

    /// Whether it serves nobody. This property never raises.
    ///
    /// ``close`` was called, another keeper has taken over, its thread has ended, or this process is a forked child.
    #[getter]
    fn closed(&self) -> bool {
        !self.keeper.running()
    }

    /// Forget all values and remove the socket. Stores then find nothing. Closing again does nothing.
    fn close(&self, py: Python<'_>) {
        engine::allow_threads(py, || self.keeper.close());
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
        let closed = if self.closed() { "True" } else { "False" };
        format!("Keeper(slots={}, closed={closed})", self.slots())
    }
}

/// Without the Python object, nobody can close the keeper. Its memory is unmapped while detached from the interpreter.
impl Drop for NativeKeeper {
    fn drop(&mut self) {
        Python::try_attach(|py| self.close(py));
    }
}
