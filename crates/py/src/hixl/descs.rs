//! The data classes: memory, operations, arguments and notifications.
//!
//! Their numbers are atomic, so that a list of thousands of operations is read without a check of borrows for each.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use llm_datadist_hixl::{MemRange, Notice, OpDesc};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::values::{bounded, flag, integer};
use crate::convert::Any;
use crate::native::wrong_type;

/// Defines a class with attributes that Python can read and write. Each attribute has a name, a setter, the type of its value, the
/// atomic type that stores it, and the function that reads it. The other methods follow, because PyO3 allows one block of methods.
macro_rules! data_class {
    (
        $(#[$of_class:meta])*
        $class:ident { $($(#[$of_attribute:meta])* $name:ident, $set:ident: $type:ty, $atomic:ty, $read:ident;)* }
        $($methods:tt)*
    ) => {
        $(#[$of_class])*
        #[pyclass(frozen, module = "hixl")]
        pub(crate) struct $class {
            $($name: $atomic,)*
        }

        #[pymethods]
        impl $class {
            $(
                $(#[$of_attribute])*
                #[getter]
                pub(super) fn $name(&self) -> $type {
                    self.$name.load(Ordering::Relaxed)
                }

                #[setter]
                fn $set(&self, value: &Any<'_>) -> PyResult<()> {
                    self.$name.store($read(stringify!($name), value)?, Ordering::Relaxed);
                    Ok(())
                }
            )*

            $($methods)*
        }
    };
}

data_class! {
    /// A range of memory to register.
    MemDesc {
        /// Address of the first byte.
        addr, set_addr: u64, AtomicU64, integer;
        /// Number of bytes.
        len, set_len: u64, AtomicU64, integer;
        /// Whether peers are denied access to the range.
        local_only, set_local_only: bool, AtomicBool, flag;
    }

    #[new]
    fn new(addr: &Any<'_>, len: &Any<'_>) -> PyResult<Self> {
        let (addr, len) = (integer::<u64>("addr", addr)?, integer::<u64>("len", len)?);
        Ok(MemDesc { addr: addr.into(), len: len.into(), local_only: false.into() })
    }

    fn __repr__(&self) -> String {
        format!("MemDesc(addr={:#x}, len={})", self.addr(), self.len())
    }
}

impl MemDesc {
    pub(super) fn range(&self) -> MemRange {
        MemRange { addr: self.addr(), len: self.len(), local_only: self.local_only() }
    }
}

data_class! {
    /// One operation of a transfer.
    TransferOpDesc {
        /// Address in this process.
        local_addr, set_local_addr: u64, AtomicU64, integer;
        /// Address at the other engine.
        remote_addr, set_remote_addr: u64, AtomicU64, integer;
        /// Number of bytes.
        len, set_len: u64, AtomicU64, integer;
    }

    #[new]
    fn new(local_addr: &Any<'_>, remote_addr: &Any<'_>, len: &Any<'_>) -> PyResult<Self> {
        let local: u64 = integer("local_addr", local_addr)?;
        let remote: u64 = integer("remote_addr", remote_addr)?;
        let len: u64 = integer("len", len)?;
        Ok(TransferOpDesc { local_addr: local.into(), remote_addr: remote.into(), len: len.into() })
    }

    fn __repr__(&self) -> String {
        let OpDesc { local, remote, len } = self.desc();
        format!("TransferOpDesc(local_addr={local:#x}, remote_addr={remote:#x}, len={len})")
    }
}

impl TransferOpDesc {
    pub(super) fn desc(&self) -> OpDesc {
        OpDesc { local: self.local_addr(), remote: self.remote_addr(), len: self.len() }
    }
}

data_class! {
    /// Arguments of an asynchronous transfer.
    #[derive(Default)]
    TransferArgs {
        /// A number of the program, which the results of the transfer contain.
        user_data, set_user_data: u64, AtomicU64, integer;
    }

    #[new]
    fn new() -> Self {
        Self::default()
    }

    fn __repr__(&self) -> String {
        format!("<TransferArgs: user_data {}>", self.user_data())
    }
}

data_class! {
    /// Which transfers `get_all_transfer_status` returns.
    GetTransferStatusArgs {
        /// Maximum number of results.
        max_query_count, set_max_query_count: u32, AtomicU32, integer;
        /// Whether to leave out transfers that are still running.
        skip_waiting, set_skip_waiting: bool, AtomicBool, flag;
    }

    #[new]
    #[pyo3(signature = (max_query_count = None, skip_waiting = None), text_signature = "(max_query_count=4294967295, skip_waiting=False)")]
    fn new(max_query_count: Option<&Any<'_>>, skip_waiting: Option<&Any<'_>>) -> PyResult<Self> {
        let most = max_query_count.map_or(Ok(u32::MAX), |most| integer("max_query_count", most))?;
        let skip = skip_waiting.map_or(Ok(false), |skip| flag("skip_waiting", skip))?;
        Ok(GetTransferStatusArgs { max_query_count: most.into(), skip_waiting: skip.into() })
    }

    fn __repr__(&self) -> String {
        let (most, skip) = (self.max_query_count(), if self.skip_waiting() { "True" } else { "False" });
        format!("GetTransferStatusArgs(max_query_count={most}, skip_waiting={skip})")
    }
}

/// A notification: its name and its message.
#[pyclass(frozen, module = "hixl")]
pub(crate) struct NotifyDesc(Mutex<[Py<PyString>; 2]>);

fn python_text(name: &str, value: &Any<'_>) -> PyResult<Py<PyString>> {
    value.cast::<PyString>().map(|text| text.clone().unbind()).map_err(|_| wrong_type(name, "a str", value))
}

impl NotifyDesc {
    pub(super) fn of(py: Python<'_>, notice: &Notice) -> Self {
        NotifyDesc(Mutex::new([&notice.name, &notice.text].map(|text| PyString::new(py, text).unbind())))
    }

    /// Returns both texts. `None` if one of them is not valid Unicode, or longer than any limit.
    pub(super) fn texts(&self, py: Python<'_>) -> Option<(String, String)> {
        let [name, text] = &*self.lock();
        Some((bounded(name.bind(py), Notice::MAX_TEXT)?, bounded(text.bind(py), Notice::MAX_TEXT)?))
    }

    fn lock(&self) -> MutexGuard<'_, [Py<PyString>; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, at: usize, text: Py<PyString>) {
        let old = std::mem::replace(&mut self.lock()[at], text);
        // Without the lock.
        drop(old);
    }
}

#[pymethods]
impl NotifyDesc {
    #[new]
    fn new(name: &Any<'_>, notify_msg: &Any<'_>) -> PyResult<Self> {
        Ok(NotifyDesc(Mutex::new([python_text("name", name)?, python_text("notify_msg", notify_msg)?])))
    }

    /// The name, of at most 1,024 bytes of UTF-8.
    #[getter]
    fn name(&self, py: Python<'_>) -> Py<PyString> {
        self.lock()[0].clone_ref(py)
    }

    #[setter]
    fn set_name(&self, name: &Any<'_>) -> PyResult<()> {
        python_text("name", name).map(|text| self.set(0, text))
    }

    /// The message, of at most 1,024 bytes of UTF-8.
    #[getter]
    fn notify_msg(&self, py: Python<'_>) -> Py<PyString> {
        self.lock()[1].clone_ref(py)
    }

    #[setter]
    fn set_notify_msg(&self, notify_msg: &Any<'_>) -> PyResult<()> {
        python_text("notify_msg", notify_msg).map(|text| self.set(1, text))
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let [name, text] = [self.name(py), self.notify_msg(py)];
        Ok(format!("NotifyDesc(name={}, notify_msg={})", name.bind(py).repr()?, text.bind(py).repr()?))
    }
}
