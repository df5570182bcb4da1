//! Integers in buffers and in `DLPack` tensors of CPU memory, read without a Python list.

use llm_datadist_core::Error;
use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyString};

use super::errors::raise;
use crate::convert::{self, Any, shown};
use crate::raw::{self, TensorCopy};

/// Reads the argument called `name`, an array of shape `(n,)` with any integers, in any strides. Unsigned numbers of 64 bits keep
/// their bits. Returns `None` if the object is not an array. Integers of another shape, or not in CPU memory, are an argument
/// error, and other elements a `TypeError`.
pub(crate) fn read(name: &str, given: &Any<'_>) -> PyResult<Option<Vec<i64>>> {
    let py = given.py();
    let view = match PyMemoryView::from(given) {
        Ok(view) => view,
        Err(error) if passes_on(py, &error) => return Err(error),
        Err(error) if error.is_instance_of::<PyMemoryError>(py) => {
            return Err(convert::short(py, error, 0, raise));
        }
        Err(_) => return from_dlpack(name, given),
    };
    // Python copies items with gaps one by one, which takes several times as long as reading a tensor. What cannot be
    // exported as a tensor is copied.
    if !view.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
        match from_dlpack(name, given) {
            Ok(Some(found)) => return Ok(Some(found)),
            Err(error) if passes_on(py, &error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    from_buffer(name, given, &view).map(Some)
}

fn from_buffer(name: &str, given: &Any<'_>, view: &Bound<'_, PyMemoryView>) -> PyResult<Vec<i64>> {
    let py = given.py();
    let format = view.getattr(intern!(py, "format"))?.cast_into::<PyString>()?;
    let format = format.to_string_lossy();
    let item_bytes: usize = view.getattr(intern!(py, "itemsize"))?.extract()?;
    let dims: Vec<i64> = view.getattr(intern!(py, "shape"))?.extract()?;
    let found = || format!("a buffer of format '{format}' and shape {dims:?}");
    let (Some((signed, swapped)), 1 | 2 | 4 | 8) = (integers(&format), item_bytes) else {
        return Err(refused(name, found()));
    };
    if dims.len() != 1 {
        return Err(misplaced(py, name, found()));
    }
    // The copy puts the items in order, whatever their strides are, and no other thread can change it.
    let bytes = view.call_method0(intern!(py, "tobytes"));
    let asked = dims.iter().fold(item_bytes, |asked, &dim| asked.saturating_mul(dim.try_into().unwrap_or(0)));
    let bytes = bytes.map_err(|error| convert::short(py, error, asked, raise))?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    let mut numbers = convert::room(py, bytes.len() / item_bytes, raise)?;
    /// Appends the items, which are of type `$int`.
    macro_rules! widen {
        ($int:ty, $widened:expr) => {
            numbers.extend(items(bytes).map(|&item| {
                let number = <$int>::from_ne_bytes(item);
                $widened(if swapped { number.swap_bytes() } else { number })
            }))
        };
    }
    match (item_bytes, signed) {
        (1, true) => widen!(i8, i64::from),
        (1, false) => widen!(u8, i64::from),
        (2, true) => widen!(i16, i64::from),
        (2, false) => widen!(u16, i64::from),
        (4, true) => widen!(i32, i64::from),
        (4, false) => widen!(u32, i64::from),
        _ => widen!(i64, std::convert::identity),
    }
    Ok(numbers)
}

fn items<const N: usize>(bytes: &[u8]) -> std::slice::Iter<'_, [u8; N]> {
    bytes.as_chunks::<N>().0.iter()
}

/// Returns whether the integers of a buffer with this format are signed, and whether they have the other byte order. `None` if
/// it has no integers. The size of an item is not read from the format, because the formats of `ctypes` state a wrong one.
fn integers(format: &str) -> Option<(bool, bool)> {
    const LITTLE: &[char] = &['@', '=', '<'];
    const BIG: &[char] = &['>', '!'];
    let big = format.strip_prefix(BIG);
    let signed = match big.or(format.strip_prefix(LITTLE)).unwrap_or(format) {
        "b" | "h" | "i" | "l" | "q" | "n" => true,
        "B" | "H" | "I" | "L" | "Q" | "N" => false,
        _ => return None,
    };
    Some((signed, big.is_some()))
}

/// Reads a `DLPack` tensor. Returns `None` if the object is not one.
fn from_dlpack(name: &str, given: &Any<'_>) -> PyResult<Option<Vec<i64>>> {
    let py = given.py();
    let of_this = |error| not_exported(py, name, error);
    match device(given).map_err(of_this)? {
        None => return Ok(None),
        Some((kind, _)) if raw::readable_device(kind) => {}
        Some(device) => {
            let found = format_args!("a tensor on the DLPack device {device:?}");
            return Err(misplaced(py, name, found));
        }
    }
    let capsule = capsule(given).map_err(of_this)?;
    let tensor = raw::copied_tensor(&capsule).map_err(|error| raise(py, &error))?;
    match tensor {
        None => Err(refused(name, "an object without a tensor of DLPack 1 or before")),
        Some(TensorCopy { integers: Some(numbers), .. }) => Ok(Some(numbers)),
        Some(TensorCopy { shape, element, .. }) => {
            let found = format_args!("a tensor of {element} and shape {shape:?}");
            let of_shape = element.is_integer() && !matches!(shape[..], [rows] if rows >= 0);
            Err(if of_shape { misplaced(py, name, found) } else { refused(name, found) })
        }
    }
}

/// Returns the type and number of the device of a `DLPack` tensor; `None` for any other object.
pub(crate) fn device(given: &Any<'_>) -> PyResult<Option<(i32, i32)>> {
    let py = given.py();
    if given.getattr_opt(intern!(py, "__dlpack__"))?.is_none() {
        return Ok(None);
    }
    let Some(device) = given.getattr_opt(intern!(py, "__dlpack_device__"))? else { return Ok(None) };
    device.call0()?.extract().map(Some)
}

/// Returns a capsule of version 1 or, if the producer does not know versions, of the layout before.
pub(crate) fn capsule<'py>(given: &Any<'py>) -> PyResult<Any<'py>> {
    let py = given.py();
    let numbers = PyDict::new(py);
    numbers.set_item(intern!(py, "max_version"), (1, 0))?;
    match given.call_method(intern!(py, "__dlpack__"), (), Some(&numbers)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            given.call_method0(intern!(py, "__dlpack__"))
        }
        made => made,
    }
}

/// Whether an error is not about the object, such as `KeyboardInterrupt`.
fn passes_on(py: Python<'_>, error: &PyErr) -> bool {
    !error.is_instance_of::<PyException>(py)
}

/// Creates the `TypeError` for the argument called `name`, which is `found`.
#[cold]
fn refused(name: &str, found: impl std::fmt::Display) -> PyErr {
    PyTypeError::new_err(format!("{name} must be an array of integers, not {found}"))
}

/// Creates the error for integers of another shape, or in memory of a device. The type is right then.
#[cold]
fn misplaced(py: Python<'_>, name: &str, found: impl std::fmt::Display) -> PyErr {
    raise(py, &Error::argument(name, found, "an array of one dimension in CPU memory"))
}

/// Creates the error for an object whose `DLPack` methods raised `error`.
#[cold]
fn not_exported(py: Python<'_>, name: &str, error: PyErr) -> PyErr {
    if passes_on(py, &error) {
        return error;
    }
    if error.is_instance_of::<PyMemoryError>(py) {
        return convert::short(py, error, 0, raise);
    }
    let refused = refused(name, format_args!("what DLPack cannot export ({})", shown(error.value(py))));
    refused.set_cause(py, Some(error));
    refused
}
