//! The data classes: memory, operations, arguments and notifications.
//!
//! Their numbers are atomic, so that a list of thousands of operations is read without a check of borrows for each.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use llm_datadist_hixl::{MemRange, Notice, OpDesc};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBoolMethods, PyString};

use super::values::integer;
use crate::convert::Any;
use crate::native::wrong_type;

/// Reads a truth value.
fn flag(name: &str, value: &Any<'_>) -> PyResult<bool> {
    value.cast::<PyBool>().map(PyBoolMethods::is_true).map_err(|_| wrong_type(name, "a bool", value))
}

/// A range of memory to register.
#[pyclass(frozen, module = "hixl")]
pub(crate) struct MemDesc {
    addr: AtomicU64,
    len: AtomicU64,
    local_only: AtomicBool,
}

impl MemDesc {
    pub(super) fn range(&self) -> MemRange {
        MemRange { addr: self.addr(), len: self.len(), local_only: self.local_only() }
    }
}

#[pymethods]
impl MemDesc {
    #[new]
    fn new(addr: &Any<'_>, len: &Any<'_>) -> PyResult<Self> {
        let (addr, len) = (integer::<u64>("addr", addr)?, integer::<u64>("len", len)?);
        Ok(MemDesc { addr: addr.into(), len: len.into(), local_only: false.into() })
    }

    /// Address of the first byte.
    #[getter]
    fn addr(&self) -> u64 {
        self.addr.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_addr(&self, addr: &Any<'_>) -> PyResult<()> {
        self.addr.store(integer("addr", addr)?, Ordering::Relaxed);
        Ok(())
    }

    /// Number of bytes.
    #[getter]
    fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_len(&self, len: &Any<'_>) -> PyResult<()> {
        self.len.store(integer("len", len)?, Ordering::Relaxed);
        Ok(())
    }

    /// Whether peers cannot use the range.
    #[getter]
    fn local_only(&self) -> bool {
        self.local_only.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_local_only(&self, local_only: &Any<'_>) -> PyResult<()> {
        self.local_only.store(flag("local_only", local_only)?, Ordering::Relaxed);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("MemDesc(addr={:#x}, len={})", self.addr(), self.len())
    }
}

/// One operation of a transfer.
#[pyclass(frozen, module = "hixl")]
pub(crate) struct TransferOpDesc {
    local_addr: AtomicU64,
    remote_addr: AtomicU64,
    len: AtomicU64,
}

impl TransferOpDesc {
    pub(super) fn desc(&self) -> OpDesc {
        OpDesc { local: self.local_addr(), remote: self.remote_addr(), len: self.len() }
    }
}

#[pymethods]
impl TransferOpDesc {
    #[new]
    fn new(local_addr: &Any<'_>, remote_addr: &Any<'_>, len: &Any<'_>) -> PyResult<Self> {
        let local: u64 = integer("local_addr", local_addr)?;
        let remote: u64 = integer("remote_addr", remote_addr)?;
        let len: u64 = integer("len", len)?;
        Ok(TransferOpDesc { local_addr: local.into(), remote_addr: remote.into(), len: len.into() })
    }

    /// Address in this process.
    #[getter]
    fn local_addr(&self) -> u64 {
        self.local_addr.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_local_addr(&self, local_addr: &Any<'_>) -> PyResult<()> {
        self.local_addr.store(integer("local_addr", local_addr)?, Ordering::Relaxed);
        Ok(())
    }

    /// Address at the other engine.
    #[getter]
    fn remote_addr(&self) -> u64 {
        self.remote_addr.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_remote_addr(&self, remote_addr: &Any<'_>) -> PyResult<()> {
        self.remote_addr.store(integer("remote_addr", remote_addr)?, Ordering::Relaxed);
        Ok(())
    }

    /// Number of bytes.
    #[getter]
    fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_len(&self, len: &Any<'_>) -> PyResult<()> {
        self.len.store(integer("len", len)?, Ordering::Relaxed);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let OpDesc { local, remote, len } = self.desc();
        format!("TransferOpDesc(local_addr={local:#x}, remote_addr={remote:#x}, len={len})")
    }
}

/// What an asynchronous transfer is given beside its operations.
#[pyclass(frozen, module = "hixl")]
#[derive(Default)]
pub(crate) struct TransferArgs {
    user_data: AtomicU64,
}

#[pymethods]
impl TransferArgs {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// A number that the results of the transfer have.
    #[getter]
    pub(super) fn user_data(&self) -> u64 {
        self.user_data.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_user_data(&self, user_data: &Any<'_>) -> PyResult<()> {
        self.user_data.store(integer("user_data", user_data)?, Ordering::Relaxed);
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("<TransferArgs: user_data {}>", self.user_data())
    }
}

/// Which transfers `get_all_transfer_status` returns.
#[pyclass(frozen, module = "hixl")]
pub(crate) struct GetTransferStatusArgs {
    max_query_count: AtomicU32,
    skip_waiting: AtomicBool,
}

#[pymethods]
impl GetTransferStatusArgs {
    #[new]
    #[pyo3(signature = (max_query_count = None, skip_waiting = None), text_signature = "(max_query_count=4294967295, skip_waiting=False)")]
    fn new(max_query_count: Option<&Any<'_>>, skip_waiting: Option<&Any<'_>>) -> PyResult<Self> {
        let most = max_query_count.map_or(Ok(u32::MAX), |most| integer("max_query_count", most))?;
        let skip = skip_waiting.map_or(Ok(false), |skip| flag("skip_waiting", skip))?;
        Ok(GetTransferStatusArgs { max_query_count: most.into(), skip_waiting: skip.into() })
    }

    /// Most results.
    #[getter]
    pub(super) fn max_query_count(&self) -> u32 {
        self.max_query_count.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_max_query_count(&self, max_query_count: &Any<'_>) -> PyResult<()> {
        self.max_query_count.store(integer("max_query_count", max_query_count)?, Ordering::Relaxed);
        Ok(())
    }

    /// Whether to leave out transfers that run.
    #[getter]
    pub(super) fn skip_waiting(&self) -> bool {
        self.skip_waiting.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_skip_waiting(&self, skip_waiting: &Any<'_>) -> PyResult<()> {
        self.skip_waiting.store(flag("skip_waiting", skip_waiting)?, Ordering::Relaxed);
        Ok(())
    }

    fn __repr__(&self) -> String {
        let (most, skip) = (self.max_query_count(), if self.skip_waiting() { "True" } else { "False" });
        format!("GetTransferStatusArgs(max_query_count={most}, skip_waiting={skip})")
    }
}

/// A notification.
#[pyclass(frozen, module = "hixl")]
pub(crate) struct NotifyDesc(Mutex<(Py<PyString>, Py<PyString>)>);

fn python_text(name: &str, value: &Any<'_>) -> PyResult<Py<PyString>> {
    value.cast::<PyString>().map(|text| text.clone().unbind()).map_err(|_| wrong_type(name, "a str", value))
}

impl NotifyDesc {
    pub(super) fn of(py: Python<'_>, name: &str, text: &str) -> Self {
        NotifyDesc(Mutex::new((PyString::new(py, name).unbind(), PyString::new(py, text).unbind())))
    }

    /// Returns both texts. `None` if one of them is no Unicode, or longer than any that is allowed.
    pub(super) fn texts(&self, py: Python<'_>) -> Option<(String, String)> {
        let read = |text: &Py<PyString>| {
            let short = text.bind(py).len().is_ok_and(|count| count <= Notice::MAX_TEXT);
            if short { text.bind(py).extract::<String>().ok() } else { None }
        };
        let (name, text) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner);
        Some((read(name)?, read(text)?))
    }
}

#[pymethods]
impl NotifyDesc {
    #[new]
    fn new(name: &Any<'_>, notify_msg: &Any<'_>) -> PyResult<Self> {
        Ok(NotifyDesc(Mutex::new((python_text("name", name)?, python_text("notify_msg", notify_msg)?))))
    }

    /// The name, of at most 1,024 bytes of UTF-8.
    #[getter]
    fn name(&self, py: Python<'_>) -> Py<PyString> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).0.clone_ref(py)
    }

    #[setter]
    fn set_name(&self, name: &Any<'_>) -> PyResult<()> {
        let name = python_text("name", name)?;
        let old = std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).0, name);
        drop(old);
        Ok(())
    }

    /// The message, of at most 1,024 bytes of UTF-8.
    #[getter]
    fn notify_msg(&self, py: Python<'_>) -> Py<PyString> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).1.clone_ref(py)
    }

    #[setter]
    fn set_notify_msg(&self, notify_msg: &Any<'_>) -> PyResult<()> {
        let text = python_text("notify_msg", notify_msg)?;
        let old = std::mem::replace(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).1, text);
        drop(old);
        Ok(())
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        Ok(format!(
            "NotifyDesc(name={}, notify_msg={})",
            self.name(py).bind(py).repr()?,
            self.notify_msg(py).bind(py).repr()?
        ))
    }
}
