//! What `Engine.register` gets as tensors: objects in host memory, or plain addresses.
//!
//! An object is read as a `DLPack` tensor, by numpy's array interface, or as a buffer, whichever it has first. What is kept of
//! it (a capsule, the object, or a view of the buffer) keeps its memory at the same address.

use std::fmt;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{DataType, ElementTypes};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyMemoryView, PyString, PyTuple};

use super::errors::{invalid, raise};
use super::index_arrays::{capsule, device};
use super::values::{self, index, int, wrong_type};
use crate::cache::{dlpack_type, typestr};
use crate::convert::{Any, shown};
use crate::raw;

/// Name of the lists in out-of-memory errors.
const LISTS: &str = "the tensors of a cache";
/// What a tensor may be.
const FORMS: &str = "a writable buffer, an object with __dlpack__ or __array_interface__, or an address";
/// What the memory of a value may be.
const WRITABLE: &str = "a writable buffer, or an object with __dlpack__ or __array_interface__";
/// What the memory of a value that is only read may be.
const READABLE: &str = "a buffer, or an object with __dlpack__ or __array_interface__";

/// The tensors of one call.
pub(crate) enum GivenTensors {
    /// The address of each, above 0.
    Addresses(Vec<u64>),
    /// Equal tensors of objects.
    Objects(HostTensors),
}

/// Equal tensors in host memory that belong to objects.
pub(crate) struct HostTensors {
    /// The address of each.
    pub(crate) addresses: Vec<u64>,
    /// What keeps the memory of each.
    pub(crate) kept: Vec<Py<PyAny>>,
    /// What they have in common.
    pub(crate) form: TensorForm,
}

/// How the elements of a tensor lie.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct TensorForm {
    /// Dimensions, outermost first; at least one.
    pub(crate) shape: Vec<i64>,
    /// Element type; `None` if it is none of the engine's.
    pub(crate) data_type: Option<DataType>,
    /// Bytes of one element.
    pub(crate) item_bytes: u64,
    /// Bytes from one row to the next if there are gaps.
    pub(crate) row_stride: Option<u64>,
}

/// A tensor as an object describes it, which may be unusable.
struct Described {
    address: u64,
    shape: Vec<i64>,
    /// Bytes from one index of each dimension to the next; `None` if there are no gaps.
    strides: Option<Vec<i64>>,
    data_type: Option<DataType>,
    item_bytes: u64,
    read_only: bool,
    kept: Py<PyAny>,
}

/// Reads a list or tuple of tensors: all objects or all addresses, at least one.
pub(crate) fn read(given: &Any<'_>) -> PyResult<GivenTensors> {
    let items = values::items("tensors", "a list or tuple", given)?;
    let py = given.py();
    if items.is_empty() {
        return Err(invalid(py, "tensors", "[]", "a list of at least one tensor"));
    }
    let addresses = addresses(&items)?;
    match addresses.len() {
        0 => objects(&items).map(GivenTensors::Objects),
        count if count == items.len() => Ok(GivenTensors::Addresses(addresses)),
        _ => Err(PyTypeError::new_err("tensors must be all objects or all addresses")),
    }
}

/// Returns the addresses among the items.
fn addresses(items: &Bound<'_, PyTuple>) -> PyResult<Vec<u64>> {
    let py = items.py();
    let mut addresses = fallible::with_capacity(LISTS, items.len()).map_err(|error| raise(py, &error))?;
    for (at, item) in items.iter().enumerate() {
        let class = item.get_type();
        // Arrays of numpy and torch have `__index__` too.
        if class.hasattr(intern!(py, "__index__"))? && !class.hasattr(intern!(py, "__len__"))? {
            let name = format!("tensors[{at}]");
            index(&name, FORMS, &item)?;
            addresses.push(int(&name, &item, 1..=u64::MAX)?);
        }
    }
    Ok(addresses)
}

/// Reads tensors of objects, which must be equal.
fn objects(items: &Bound<'_, PyTuple>) -> PyResult<HostTensors> {
    let py = items.py();
    let no_memory = |error| raise(py, &error);
    let mut addresses = fallible::with_capacity(LISTS, items.len()).map_err(no_memory)?;
    let mut kept = fallible::with_capacity(LISTS, items.len()).map_err(no_memory)?;
    let mut first: Option<TensorForm> = None;
    for (at, item) in items.iter().enumerate() {
        let name = format!("tensors[{at}]");
        let tensor = described((&name, FORMS), &item, None)?;
        let form = tensor.form(py, &name)?;
        match &first {
            None => first = Some(form),
            Some(first) if *first == form => {}
            Some(first) => return Err(invalid(py, &name, form, &format!("like tensors[0]: {first}"))),
        }
        addresses.push(tensor.address);
        kept.push(tensor.kept);
    }
    let form = first.ok_or_else(|| wrong_type("tensors", "a list or tuple", items))?;
    Ok(HostTensors { addresses, kept, form })
}

/// Bytes in host memory that belong to an object, without gaps.
pub(crate) struct HostBytes {
    /// The address of the first one.
    pub(crate) address: u64,
    /// What keeps the memory.
    pub(crate) kept: Py<PyAny>,
}

/// Refuses memory that has not the bytes of a value of the store.
pub(crate) fn check_bytes(py: Python<'_>, name: &str, bytes: u64, value: u64) -> PyResult<()> {
    let allowed = || format!("{value} bytes, a value of the store");
    if bytes == value { Ok(()) } else { Err(invalid(py, name, format_args!("{bytes} bytes"), &allowed())) }
}

/// Reads an object of `bytes` bytes without gaps, which must be writable unless it is `only_read`.
pub(crate) fn host_bytes(name: &str, given: &Any<'_>, bytes: u64, only_read: bool) -> PyResult<HostBytes> {
    let (found, has) = whole(name, given, only_read.then_some(bytes))?;
    check_bytes(given.py(), name, has, bytes).map(|()| found)
}

/// Reads one object without gaps, and returns how many bytes it has. It must be writable unless `only_read` is given: the bytes
/// that a read-only buffer must have, which are then copied.
pub(crate) fn whole(name: &str, given: &Any<'_>, only_read: Option<u64>) -> PyResult<(HostBytes, u64)> {
    let forms = if only_read.is_some() { READABLE } else { WRITABLE };
    let tensor = described((name, forms), given, only_read)?;
    let form = tensor.form(given.py(), name)?;
    if form.row_stride.is_some() {
        return Err(invalid(given.py(), name, form, "an array without gaps"));
    }
    let bytes = form.row_bytes().saturating_mul(form.shape[0].unsigned_abs());
    Ok((HostBytes { address: tensor.address, kept: tensor.kept }, bytes))
}

/// Reads one object, one of `forms`, which must be writable unless it is `only_read`: then a read-only buffer is copied, if it has so
/// many bytes.
fn described((name, forms): (&str, &str), given: &Any<'_>, only_read: Option<u64>) -> PyResult<Described> {
    let py = given.py();
    if given.is_instance_of::<PyString>() {
        return Err(wrong_type(name, forms, given));
    }
    let mut refusal = None;
    if let Some((kind, _)) = device(given)? {
        if !raw::readable_device(kind) {
            return Err(on_device(name, given));
        }
        match from_dlpack(given) {
            Ok(Some(tensor)) => return tensor.permitted(name, given, only_read.is_some()),
            Ok(None) => {}
            // numpy exports no tensor of read-only memory or of some types, and these objects have another form as well.
            Err(error) if error.is_instance_of::<PyException>(py) => refusal = Some(error),
            Err(error) => return Err(error),
        }
    }
    if let Some(interface) = given.getattr_opt(intern!(py, "__array_interface__"))? {
        return from_interface(name, given, &interface)?.permitted(name, given, only_read.is_some());
    }
    match PyMemoryView::from(given) {
        Ok(view) => from_buffer(name, given, &view, only_read),
        Err(error) if !error.is_instance_of::<PyException>(py) => Err(error),
        Err(_) if given.hasattr(intern!(py, "__cuda_array_interface__"))? => Err(on_device(name, given)),
        Err(_) => {
            let wrong = wrong_type(name, forms, given);
            wrong.set_cause(py, refusal);
            Err(wrong)
        }
    }
}

fn from_dlpack(given: &Any<'_>) -> PyResult<Option<Described>> {
    let py = given.py();
    let capsule = capsule(given)?;
    let Some(memory) = raw::tensor_memory(&capsule).map_err(|error| raise(py, &error))? else {
        return Ok(None);
    };
    let bits = u64::from(memory.element.bits) * u64::from(memory.element.lanes);
    let same = |of: &&DataType| dlpack_type(**of).is_ok_and(|element| element == memory.element);
    if !bits.is_multiple_of(8) {
        return Ok(None);
    }
    let item_bytes = bits / 8;
    let in_bytes =
        |steps: Vec<i64>| steps.iter().map(|step| step.saturating_mul(item_bytes.cast_signed())).collect();
    Ok(Some(Described {
        address: memory.address,
        shape: memory.shape,
        strides: memory.strides.map(in_bytes),
        data_type: DataType::ALL.iter().find(same).copied(),
        item_bytes,
        read_only: memory.read_only,
        kept: capsule.unbind(),
    }))
}

/// Returns a field of an array interface; `None` if it is missing or `None`.
fn field<'py>(fields: &Bound<'py, PyDict>, key: &str) -> PyResult<Option<Any<'py>>> {
    Ok(fields.get_item(key)?.filter(|value| !value.is_none()))
}

fn from_interface(name: &str, given: &Any<'_>, interface: &Any<'_>) -> PyResult<Described> {
    let py = given.py();
    let wrong = || wrong_type(name, "an object with a complete __array_interface__", given);
    let fields = interface.cast::<PyDict>().map_err(|_| wrong())?;
    let required = |key| field(fields, key)?.ok_or_else(wrong);
    let (address, read_only): (u64, bool) = required("data")?.extract().map_err(|_| wrong())?;
    let type_text: String = required("typestr")?.extract().map_err(|_| wrong())?;
    let digits = type_text.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    // numpy has no bfloat16: memory of 16-bit unsigned integers stays what it is, unless the call says another type.
    let same = |of: &&DataType| **of != DataType::Bf16 && typestr(**of).is_ok_and(|text| text == type_text);
    Ok(Described {
        address,
        shape: required("shape")?.extract().map_err(|_| wrong())?,
        strides: field(fields, "strides")?
            .map(|strides| strides.extract())
            .transpose()
            .map_err(|_| wrong())?,
        data_type: DataType::ALL.iter().find(same).copied(),
        item_bytes: digits.parse().map_err(|_| wrong())?,
        read_only,
        // The interface may own what the address belongs to.
        kept: (given, interface).into_pyobject(py)?.into_any().unbind(),
    })
}

/// `c_char.from_buffer` and `addressof` of ctypes. They are looked up at the first buffer.
static CTYPES: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();

/// Reads an object that only has the buffer protocol, and no gaps.
fn from_buffer(
    name: &str,
    given: &Any<'_>,
    view: &Bound<'_, PyMemoryView>,
    only_read: Option<u64>,
) -> PyResult<Described> {
    let py = given.py();
    let constant = view.getattr(intern!(py, "readonly"))?.is_truthy()?;
    if constant && only_read.is_none() {
        return Err(read_only(name, given));
    }
    if !view.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
        return Err(invalid(py, name, "a buffer with gaps", "a buffer without gaps, or an array"));
    }
    let format: String = view.getattr(intern!(py, "format"))?.extract()?;
    let item_bytes: u64 = view.getattr(intern!(py, "itemsize"))?.extract()?;
    let shape: Vec<i64> = view.getattr(intern!(py, "shape"))?.extract()?;
    if shape.contains(&0) {
        return Err(invalid(
            py,
            name,
            format_args!("a buffer of shape {shape:?}"),
            "a buffer that is not empty",
        ));
    }
    let data_type = native_type(&format, item_bytes);
    // Before version 3.11, the limited API has no function for the address. For a read-only buffer, nothing else has it either: its
    // bytes are copied.
    if let (true, Some(value)) = (constant, only_read) {
        check_bytes(py, name, view.getattr(intern!(py, "nbytes"))?.extract()?, value)?;
        let bytes = view.call_method0(intern!(py, "tobytes"))?.cast_into::<PyBytes>()?;
        let address = bytes.as_bytes().as_ptr() as u64;
        let kept = bytes.into_any().unbind();
        return Ok(Described { address, shape, strides: None, data_type, item_bytes, read_only: true, kept });
    }
    // The object of ctypes keeps the buffer exported, so that it does not move.
    let (from_buffer, address_of) = CTYPES.get_or_try_init(py, || -> PyResult<_> {
        let ctypes = py.import("ctypes")?;
        let from_buffer = ctypes.getattr("c_char")?.getattr("from_buffer")?;
        Ok((from_buffer.unbind(), ctypes.getattr("addressof")?.unbind()))
    })?;
    let first = from_buffer.bind(py).call1((view,))?;
    let address = address_of.bind(py).call1((&first,))?.extract()?;
    let kept = first.unbind();
    Ok(Described { address, shape, strides: None, data_type, item_bytes, read_only: false, kept })
}

/// Returns the type of a buffer with native elements of this format. The sizes of integers depend on the platform.
fn native_type(format: &str, item_bytes: u64) -> Option<DataType> {
    let signed = match format.trim_start_matches(['@', '=', '<']) {
        "e" => return Some(DataType::Float16),
        "f" => return Some(DataType::Float),
        "d" => return Some(DataType::Double),
        "?" => return Some(DataType::Bool),
        "b" | "h" | "i" | "l" | "q" | "n" => true,
        "B" | "H" | "I" | "L" | "Q" | "N" | "c" => false,
        _ => return None,
    };
    match (signed, item_bytes) {
        (true, 1) => Some(DataType::Int8),
        (true, 2) => Some(DataType::Int16),
        (true, 4) => Some(DataType::Int32),
        (true, 8) => Some(DataType::Int64),
        (false, 1) => Some(DataType::Uint8),
        (false, 2) => Some(DataType::Uint16),
        (false, 4) => Some(DataType::Uint32),
        (false, 8) => Some(DataType::Uint64),
        _ => None,
    }
}

impl Described {
    /// Refuses memory that must not be written, unless it is `only_read`. What an older `DLPack` capsule does not say, a buffer of the
    /// object says.
    fn permitted(self, name: &str, given: &Any<'_>, only_read: bool) -> PyResult<Self> {
        let py = given.py();
        if only_read {
            return Ok(self);
        }
        let forbidden = |view: Bound<'_, PyMemoryView>| view.getattr(intern!(py, "readonly"))?.is_truthy();
        if self.read_only || PyMemoryView::from(given).ok().map_or(Ok(false), forbidden)? {
            return Err(read_only(name, given));
        }
        Ok(self)
    }

    /// Returns how its elements lie. Inside a row there must be no gaps.
    fn form(&self, py: Python<'_>, name: &str) -> PyResult<TensorForm> {
        let Described { shape, strides, data_type, item_bytes, .. } = self;
        let wrong = |required: &str| {
            let value = match strides {
                Some(strides) => format!("a tensor of shape {shape:?} and strides {strides:?} bytes"),
                None => format!("a tensor of shape {shape:?}"),
            };
            Err(invalid(py, name, value, required))
        };
        if shape.is_empty() || shape.iter().any(|&dim| dim < 1) {
            return wrong("a tensor with blocks as its first dimension, and no dimension of 0");
        }
        let mut dense = item_bytes.cast_signed();
        let steps = strides.as_deref().unwrap_or_default();
        if !steps.is_empty() && steps.len() != shape.len() {
            return wrong("a tensor with one stride for each dimension");
        }
        for (dim, step) in shape.iter().zip(steps).skip(1).rev() {
            if *dim > 1 && *step != dense {
                return wrong("a tensor without gaps inside a block");
            }
            dense = dense.saturating_mul(*dim);
        }
        let row_stride = match steps.first() {
            Some(&step) if shape[0] > 1 && step != dense => Some(step),
            _ => None,
        };
        let row_stride = match row_stride.map(u64::try_from) {
            Some(Ok(step)) if step > dense.cast_unsigned() => Some(step),
            None => None,
            Some(_) => return wrong("a tensor whose blocks do not overlap and follow each other upwards"),
        };
        Ok(TensorForm { shape: shape.clone(), data_type: *data_type, item_bytes: *item_bytes, row_stride })
    }
}

impl TensorForm {
    /// Returns the bytes of one block, without gaps.
    pub(crate) fn row_bytes(&self) -> u64 {
        self.shape[1..].iter().fold(self.item_bytes, |bytes, dim| bytes.saturating_mul(dim.unsigned_abs()))
    }
}

impl fmt::Display for TensorForm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a tensor of shape {:?}", self.shape)?;
        match self.data_type {
            Some(data_type) => write!(f, " and {}", ElementTypes::name(data_type))?,
            None => write!(f, " with elements of {} bytes", self.item_bytes)?,
        }
        self.row_stride.map_or(Ok(()), |stride| write!(f, ", with blocks {stride} bytes apart"))
    }
}

#[cold]
fn read_only(name: &str, given: &Any<'_>) -> PyErr {
    let value = format!("a read-only {}", shown(&given.get_type()));
    invalid(given.py(), name, value, "writable memory")
}

#[cold]
fn on_device(name: &str, given: &Any<'_>) -> PyErr {
    let value = format!("a {} in memory of a device", shown(&given.get_type()));
    invalid(
        given.py(),
        name,
        value,
        "in host memory, which the CPU reads and writes; copy it to the host first",
    )
}
