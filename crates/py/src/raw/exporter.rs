//! Classes whose instances export bytes through the buffer protocol.
//!
//! The limited API has this protocol since Python 3.11, and the extension is built for 3.9. But `CPython` accepts the slot
//! in type specifications since 3.9, and the layout of `Py_buffer` is the same in every version of Python 3. So this module
//! declares both, and makes the class as a subclass of one that `PyO3` made.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;

use llm_datadist_core::Result;
use pyo3::PyClass;
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use pyo3::types::{PyTuple, PyType};

/// The format of an exported element: an unsigned byte.
const BYTE: &CStr = c"B";

/// What a consumer asks for: to write, and what it wants to be filled in.
const WANTS_TO_WRITE: c_int = 0x0001;
const WANTS_FORMAT: c_int = 0x0004;
const WANTS_SHAPE: c_int = 0x0008;
const WANTS_STRIDES: c_int = 0x0010;

/// `Py_buffer`.
#[repr(C)]
struct BufferFields {
    buf: *mut c_void,
    /// A counted reference to the exporter.
    obj: *mut ffi::PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

/// A class whose instances keep bytes mapped as long as they live.
pub(crate) trait ExportsBytes: PyClass<Frozen = True> + Sync {
    /// Whether consumers may write the bytes.
    const WRITABLE: bool;

    /// Returns the address of the bytes, and how many there are.
    fn exported(&self) -> Result<(u64, u64)>;
}

/// Creates a subclass of `T` called `name`, with its module, that exports the bytes.
pub(crate) fn exporting_class<'py, T: ExportsBytes>(
    py: Python<'py>,
    name: &'static CStr,
) -> PyResult<Bound<'py, PyType>> {
    let get_buffer: unsafe extern "C" fn(*mut ffi::PyObject, *mut BufferFields, c_int) -> c_int =
        get_buffer::<T>;
    let mut slots = [
        ffi::PyType_Slot { slot: ffi::Py_bf_getbuffer, pfunc: get_buffer as *mut c_void },
        ffi::PyType_Slot { slot: 0, pfunc: ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        basicsize: 0, // that of the base
        itemsize: 0,
        flags: u32::try_from(ffi::Py_TPFLAGS_DEFAULT)?,
        slots: slots.as_mut_ptr(),
    };
    let bases = PyTuple::new(py, [py.get_type::<T>()])?;
    // SAFETY: `py` proves attachment. The specification and its slots live through the call, and the name is static.
    let class = unsafe { ffi::PyType_FromSpecWithBases(&raw mut spec, bases.as_ptr()) };
    // SAFETY: the call above gave a new reference, or null with the exception set.
    let class = unsafe { Bound::from_owned_ptr_or_err(py, class) }?;
    Ok(class.cast_into::<PyType>()?)
}

impl BufferFields {
    /// Describes nothing, as after a refusal.
    const EMPTY: BufferFields = BufferFields {
        buf: ptr::null_mut(),
        obj: ptr::null_mut(),
        len: 0,
        itemsize: 1,
        readonly: 0,
        ndim: 1,
        format: ptr::null_mut(),
        shape: ptr::null_mut(),
        strides: ptr::null_mut(),
        suboffsets: ptr::null_mut(),
        internal: ptr::null_mut(),
    };
}

/// Fills in `view`, or sets an exception and returns -1. There is nothing to release but the reference to the exporter,
/// which Python drops.
///
/// # Safety
/// Called by Python, attached, with an instance of a class that [`exporting_class`] made, and with a `view` that is null
/// or valid for writes.
unsafe extern "C" fn get_buffer<T: ExportsBytes>(
    exporter: *mut ffi::PyObject,
    view: *mut BufferFields,
    flags: c_int,
) -> c_int {
    // SAFETY: the caller is attached to the interpreter.
    let py = unsafe { Python::assume_attached() };
    if view.is_null() {
        PyBufferError::new_err("the buffer protocol requires a view to fill in").restore(py);
        return -1;
    }
    // SAFETY: the caller promises a live object, which outlives this call.
    let object = unsafe { Borrowed::from_ptr(py, exporter) };
    let (fields, result) = match bytes_of::<T>(object, flags) {
        Ok((address, len)) => {
            // SAFETY: the object is alive. The view owns this reference, and Python drops it with the view.
            unsafe { ffi::Py_IncRef(exporter) };
            let fields = filled(exporter, (address, len), view, flags);
            (BufferFields { readonly: (!T::WRITABLE).into(), ..fields }, 0)
        }
        Err(error) => {
            error.restore(py);
            (BufferFields::EMPTY, -1)
        }
    };
    // SAFETY: the caller promises that a view which is not null is valid for writes. What it held before is not read.
    unsafe { view.write(fields) };
    result
}

/// Returns what describes `len` bytes at `address`. The shape and the stride are fields of `view` itself, where
/// the result will be stored.
fn filled(
    exporter: *mut ffi::PyObject,
    (address, len): (usize, ffi::Py_ssize_t),
    view: *mut BufferFields,
    flags: c_int,
) -> BufferFields {
    let field = |at: usize| view.wrapping_byte_add(at).cast::<ffi::Py_ssize_t>();
    let wanted = |flag: c_int| flags & flag != 0;
    BufferFields {
        // The address passes through a C interface as a number; only the consumer dereferences it.
        buf: ptr::with_exposed_provenance_mut(address),
        obj: exporter,
        len,
        format: if wanted(WANTS_FORMAT) { BYTE.as_ptr().cast_mut() } else { ptr::null_mut() },
        shape: if wanted(WANTS_SHAPE) { field(offset_of!(BufferFields, len)) } else { ptr::null_mut() },
        strides: if wanted(WANTS_STRIDES) {
            field(offset_of!(BufferFields, itemsize))
        } else {
            ptr::null_mut()
        },
        ..BufferFields::EMPTY
    }
}

/// Returns the address and length of the bytes that `object` exports, unless `flags` asks to write what must not be written.
fn bytes_of<T: ExportsBytes>(
    object: Borrowed<'_, '_, PyAny>,
    flags: c_int,
) -> PyResult<(usize, ffi::Py_ssize_t)> {
    if !T::WRITABLE && flags & WANTS_TO_WRITE != 0 {
        return Err(PyBufferError::new_err("the memory is read-only"));
    }
    let exporter = object.cast::<T>()?;
    let (address, bytes) =
        exporter.get().exported().map_err(|error| PyBufferError::new_err(error.to_string()))?;
    Ok((address.try_into()?, bytes.try_into()?))
}
