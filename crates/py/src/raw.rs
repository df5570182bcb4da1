//! Unsafe code of the binding: the caller's addresses, `DLPack` capsules, buffers, numbers of lists, and the descriptor of a
//! socket.

mod dlpack;
mod exporter;
mod items;

pub(crate) use self::dlpack::{
    CachePart, DL_CPU, Element, TensorCopy, capsule, copied_tensor, readable_device, strides_with_gaps,
    tensor_memory,
};
pub(crate) use self::exporter::{ExportsBytes, exporting_class};
pub(crate) use self::items::{dict_lists, dict_numbers, list_numbers, tuple_numbers};

use std::os::fd::{BorrowedFd, OwnedFd};

use llm_datadist_core::{Adopted, CacheDesc, CacheKind, Result};
use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

/// Refuses every interpreter but the first of the process. The classes of this module exist once in a process, so a second
/// interpreter would replace those of the first (`tests/test_subinterpreter.py`).
pub(crate) fn main_interpreter_only() -> PyResult<()> {
    // SAFETY: the caller is attached to an interpreter, because it runs the start of a module.
    let interpreter = unsafe { ffi::PyInterpreterState_Get() };
    // SAFETY: this is the interpreter of this thread, so it lives.
    if unsafe { ffi::PyInterpreterState_GetID(interpreter) } == 0 {
        return Ok(());
    }
    Err(PyImportError::new_err(
        "llm_datadist cannot be imported in a subinterpreter; use it in the main interpreter, or in a process of its own",
    ))
}

/// Returns a second descriptor of a socket of Python.
pub(crate) fn descriptor(socket: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let number = socket.call_method0("fileno")?.extract()?;
    if number < 0 {
        return Err(PyValueError::new_err("the socket is closed"));
    }
    // SAFETY: the caller holds the socket, and is attached to the interpreter, so nobody closes it during this call.
    let open = unsafe { BorrowedFd::borrow_raw(number) };
    Ok(open.try_clone_to_owned()?)
}

/// Adopts `addrs` as the tensors of `desc`. By calling a register function of the public API, the caller promised that they
/// stay valid, readable and writable while the cache is registered or its handle lives.
pub(crate) fn adopt(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Adopted> {
    // SAFETY: the promise cannot be checked here. It is the documented contract of `Engine.register`, `register_cache`,
    // `register_blocks_cache`, `Cache.create_cpu_cache` and `Hixl.register_mem`, the only ways here; numbers alone are checked by
    // `new`.
    unsafe { Adopted::new(desc, kind, addrs) }
}
