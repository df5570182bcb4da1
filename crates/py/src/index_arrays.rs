//! Block indices in buffers and in `DLPack` tensors of CPU memory, read without a Python list.
//!
//! The original accepts only lists and tuples. An array has native integers of 16, 32 or 64 bits, in any strides. `bytes`,
//! and arrays of 8-bit integers or bools, are refused like any other object that is not a list (contract §7.13). The native API
//! accepts all integers.

use llm_datadist_core::Error;
use pyo3::exceptions::{PyException, PyMemoryError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyString};

use crate::convert::{self, Any, shown};
use crate::error::raise;
use crate::raw::{self, TensorCopy};

/// Which shape an array of a call has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum IndexShape {
    /// One index after the other: `(n,)`.
    Flat,
    /// A source and a destination in each row: `(n, 2)`.
    Pairs,
    /// One index after the other, of 8 bits and in the other byte order too, as the native API has it.
    AnyFlat,
}

/// The numbers of an array, row by row. Unsigned numbers of 64 bits keep their bits.
pub(crate) struct IndexArray {
    pub(crate) words: Vec<i64>,
    pub(crate) signed: bool,
}

/// Creates the Python exception for an error of the core, as an API has it.
type Raise = fn(Python<'_>, &Error) -> PyErr;

/// Reads the argument called `name` of the native API, an array of shape `(n,)` with any integers. Returns `None` if the object
/// is not an array. Integers of another shape, or not in CPU memory, are an argument error, and other elements a `TypeError`.
pub(crate) fn any_flat(name: &str, given: &Any<'_>, raise: Raise) -> PyResult<Option<IndexArray>> {
    read((name, raise), given, IndexShape::AnyFlat)
}

/// Reads the argument called `name`, an array of shape `(n,)`. No index may be negative, or above int64. Returns `None` if
/// the object is not an array.
pub(crate) fn flat(name: &str, given: &Any<'_>) -> PyResult<Option<Vec<i64>>> {
    let Some(IndexArray { words, signed }) = read((name, raise), given, IndexShape::Flat)? else {
        return Ok(None);
    };
    // One pass without a branch. The position is only looked for if it is needed.
    if words.iter().fold(0, |signs, word| signs | word) >= 0 {
        return Ok(Some(words));
    }
    let at = words.iter().position(|&word| word < 0).unwrap_or(0);
    Err(raise(given.py(), &outside(&format!("{name}[{at}]"), words[at], signed, "between 0 and 2^63 - 1")))
}

/// Reads the argument called `name`, an array of shape `(n, 2)`. No number may be above int64; the engine checks which
/// numbers are blocks. Returns `None` if the object is not an array.
pub(crate) fn pairs(name: &str, given: &Any<'_>) -> PyResult<Option<Vec<(i64, i64)>>> {
    let Some(IndexArray { words, signed }) = read((name, raise), given, IndexShape::Pairs)? else {
        return Ok(None);
    };
    let (rows, _) = words.as_chunks::<2>();
    let mut pairs = convert::room(given.py(), rows.len(), raise)?;
    for (row, &[src, dst]) in rows.iter().enumerate() {
        if !signed && (src | dst) < 0 {
            return Err(raise(given.py(), &wide_pair(name, row, [src, dst])));
        }
        pairs.push((src, dst));
    }
    Ok(Some(pairs))
}

/// Creates the error for a row of unsigned numbers of which one is above int64.
#[cold]
pub(crate) fn wide_pair(name: &str, row: usize, pair: [i64; 2]) -> Error {
    let column = usize::from(pair[0] >= 0);
    outside(&format!("{name}[{row}][{column}]"), pair[column], false, "between -2^63 and 2^63 - 1")
}

#[cold]
fn outside(name: &str, word: i64, signed: bool, allowed: &str) -> Error {
    if signed {
        Error::argument(name, word, allowed)
    } else {
        Error::argument(name, word.cast_unsigned(), allowed)
    }
}

/// Whether `given` is a `DLPack` tensor of a device whose memory the CPU does not read.
pub(crate) fn on_other_device(given: &Any<'_>) -> bool {
    device(given).is_ok_and(|device| device.is_some_and(|(kind, _)| !raw::readable_device(kind)))
}

/// Reads the argument with this name, whose errors of the core are raised so.
fn read((name, raise): (&str, Raise), given: &Any<'_>, shape: IndexShape) -> PyResult<Option<IndexArray>> {
    let py = given.py();
    let view = match PyMemoryView::from(given) {
        Ok(view) => view,
        Err(error) if passes_on(py, &error) => return Err(error),
        Err(error) if error.is_instance_of::<PyMemoryError>(py) => {
            return Err(convert::short(py, error, 0, raise));
        }
        Err(_) => return from_dlpack((name, raise), given, shape),
    };
    // Python copies items with gaps one by one, which takes several times as long as reading a tensor. What cannot be
    // exported as a tensor is copied.
    if !view.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
        match from_dlpack((name, raise), given, shape) {
            Ok(Some(found)) => return Ok(Some(found)),
            Err(error) if passes_on(py, &error) => return Err(error),
            Ok(None) | Err(_) => {}
        }
    }
    from_buffer((name, raise), given, &view, shape).map(Some)
}

fn from_buffer(
    (name, raise): (&str, Raise),
    given: &Any<'_>,
    view: &Bound<'_, PyMemoryView>,
    shape: IndexShape,
) -> PyResult<IndexArray> {
    let py = given.py();
    let format = view.getattr(intern!(py, "format"))?.cast_into::<PyString>()?;
    let format = format.to_string_lossy();
    let item_bytes: usize = view.getattr(intern!(py, "itemsize"))?.extract()?;
    let dims: Vec<i64> = view.getattr(intern!(py, "shape"))?.extract()?;
    let found = || format!("a buffer of format '{format}' and shape {dims:?}");
    let (Some((signed, swapped)), 1 | 2 | 4 | 8) = (integers(&format), item_bytes) else {
        return Err(shape.refused(name, given, found()));
    };
    if shape != IndexShape::AnyFlat && (swapped || item_bytes == 1) {
        return Err(shape.refused(name, given, found()));
    }
    if !shape.fits(&dims) {
        return Err(shape.other((name, raise), given, found()));
    }
    // The copy puts the items in order, whatever their strides are, and no other thread can change it.
    let bytes = view.call_method0(intern!(py, "tobytes"));
    let asked = dims.iter().fold(item_bytes, |asked, &dim| asked.saturating_mul(dim.try_into().unwrap_or(0)));
    let bytes = bytes.map_err(|error| convert::short(py, error, asked, raise))?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    let mut words = convert::room(py, bytes.len() / item_bytes, raise)?;
    /// Appends the items, which are of type `$int`.
    macro_rules! widen {
        ($int:ty, $widened:expr) => {
            words.extend(items(bytes).map(|&item| {
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
    Ok(IndexArray { words, signed })
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
fn from_dlpack(
    (name, raise): (&str, Raise),
    given: &Any<'_>,
    shape: IndexShape,
) -> PyResult<Option<IndexArray>> {
    let py = given.py();
    let of_this = |error| shape.not_exported((name, raise), given, error);
    match device(given).map_err(of_this)? {
        None => return Ok(None),
        Some((kind, _)) if raw::readable_device(kind) => {}
        Some(device) => {
            let found = format_args!("a tensor on the DLPack device {device:?}");
            return Err(shape.other((name, raise), given, found));
        }
    }
    let capsule = capsule(given).map_err(of_this)?;
    let tensor = raw::copied_tensor(&capsule, |dims| shape.fits(dims)).map_err(|error| raise(py, &error))?;
    match tensor {
        None => Err(shape.refused(name, given, "an object without a tensor of DLPack 1 or before")),
        Some(TensorCopy { integers: Some((words, signed)), element, .. })
            if element.bits > 8 || shape == IndexShape::AnyFlat =>
        {
            Ok(Some(IndexArray { words, signed }))
        }
        Some(TensorCopy { shape: dims, element, .. }) => {
            let found = format_args!("a tensor of {element} and shape {dims:?}");
            let of_shape = element.is_integer() && !shape.fits(&dims);
            Err(if of_shape {
                shape.other((name, raise), given, found)
            } else {
                shape.refused(name, given, found)
            })
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
    let words = PyDict::new(py);
    words.set_item(intern!(py, "max_version"), (1, 0))?;
    match given.call_method(intern!(py, "__dlpack__"), (), Some(&words)) {
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

impl IndexShape {
    fn fits(self, dims: &[i64]) -> bool {
        match (self, dims) {
            (IndexShape::Flat | IndexShape::AnyFlat, [rows]) | (IndexShape::Pairs, [rows, 2]) => *rows >= 0,
            _ => false,
        }
    }

    /// Creates the `TypeError` for the argument called `name`, which is `found`.
    #[cold]
    fn refused(self, name: &str, given: &Any<'_>, found: impl std::fmt::Display) -> PyErr {
        let allowed = match self {
            IndexShape::Flat => "(n,)",
            IndexShape::Pairs => "(n, 2)",
            IndexShape::AnyFlat => {
                return PyTypeError::new_err(format!("{name} must be an array of integers, not {found}"));
            }
        };
        PyTypeError::new_err(format!(
            "{name} only support arrays of native 16-, 32- or 64-bit integers in CPU memory with shape {allowed}, \
             not {found}: the actual type is {}",
            shown(&given.get_type())
        ))
    }

    /// Creates the error for integers of another shape, or in memory of a device. In the native API, the type is right then.
    #[cold]
    fn other(self, (name, raise): (&str, Raise), given: &Any<'_>, found: impl std::fmt::Display) -> PyErr {
        match self {
            IndexShape::Flat | IndexShape::Pairs => self.refused(name, given, found),
            IndexShape::AnyFlat => {
                raise(given.py(), &Error::argument(name, found, "an array of one dimension in CPU memory"))
            }
        }
    }

    /// Creates the error for an object whose `DLPack` methods raised `error`.
    #[cold]
    fn not_exported(self, (name, raise): (&str, Raise), given: &Any<'_>, error: PyErr) -> PyErr {
        let py = given.py();
        if passes_on(py, &error) {
            return error;
        }
        if error.is_instance_of::<PyMemoryError>(py) {
            return convert::short(py, error, 0, raise);
        }
        let refused =
            self.refused(name, given, format_args!("what DLPack cannot export ({})", shown(error.value(py))));
        refused.set_cause(py, Some(error));
        refused
    }
}
