//! Unsafe code of the binding: `DLPack` capsules, addresses that the caller promises to be valid, numbers of lists.
//!
//! A capsule owns its tensor until a consumer renames it; then the consumer calls the deleter. Either way the deleter
//! runs exactly once and releases one [`ProcessOwned`] cache, which needs no interpreter (tests: `tests/test_views.py`).

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::{Adopted, Cache, CacheDesc, CacheKind, Result};
use pyo3::Borrowed;
use pyo3::exceptions::PyImportError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::engine::ProcessOwned;

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

/// Adopts `addrs` as the tensors of `desc`. By calling a register function of the public API, the caller promised that they
/// stay valid, readable and writable while the cache is registered or its handle lives.
pub(crate) fn adopt(desc: &CacheDesc, kind: CacheKind, addrs: &[u64]) -> Result<Adopted> {
    // SAFETY: the promise cannot be checked here. It is the documented contract of `register_cache`,
    // `register_blocks_cache` and `Cache.create_cpu_cache`, the only ways here; numbers alone are checked by `new`.
    unsafe { Adopted::new(desc, kind, addrs) }
}

/// Name of these lists in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// The device type of CPU memory in `DLPack`, and its only device number.
pub(crate) const DL_CPU: (i32, i32) = (1, 0);

/// Element type (`DLDataType`).
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Element {
    /// Kind of number.
    pub(crate) code: u8,
    /// Bits of one value.
    pub(crate) bits: u8,
    /// Values in one element.
    pub(crate) lanes: u16,
}

/// `DLDevice`.
#[repr(C)]
struct DlDevice {
    kind: i32,
    id: i32,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: DlDevice,
    ndim: i32,
    element: Element,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Legacy {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A managed tensor with everything that its pointers refer to. The managed part is the first field, so that a pointer to
/// it is a pointer to the whole.
#[repr(C)]
struct Owned<M> {
    managed: M,
    shape: Vec<i64>,
    strides: Vec<i64>,
    cache: ProcessOwned<Cache>,
}

/// One of the two layouts of a managed tensor.
trait Managed: Sized {
    /// Name of a capsule that owns its tensor.
    const NAME: &'static CStr;
    /// Creates the managed tensor around `tensor`.
    fn around(tensor: Tensor) -> Self;
}

impl Managed for Legacy {
    const NAME: &'static CStr = c"dltensor";

    fn around(tensor: Tensor) -> Self {
        Legacy { tensor, context: ptr::null_mut(), deleter: Some(delete::<Self>) }
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn around(tensor: Tensor) -> Self {
        let deleter: Option<unsafe extern "C" fn(*mut Self)> = Some(delete::<Self>);
        Versioned { major: 1, minor: 0, context: ptr::null_mut(), deleter, flags: 0, tensor }
    }
}

/// Creates a capsule around tensor `index` of `cache`, in the layout of `DLPack` 1 or in the one before.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    cache: &Arc<Cache>,
    index: usize,
    element: Element,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    if versioned {
        wrapped::<Versioned>(py, cache, index, element)
    } else {
        wrapped::<Legacy>(py, cache, index, element)
    }
}

fn wrapped<'py, M: Managed>(
    py: Python<'py>,
    cache: &Arc<Cache>,
    index: usize,
    element: Element,
) -> PyResult<Bound<'py, PyAny>> {
    let mut shape = cache.shape().to_vec();
    let mut strides = row_major(&shape);
    let tensor = Tensor {
        // The address passes through a C interface as a number; only the consumer dereferences it.
        data: ptr::with_exposed_provenance_mut(usize::try_from(cache.addrs()[index])?),
        device: DlDevice { kind: DL_CPU.0, id: DL_CPU.1 },
        ndim: i32::try_from(shape.len())?,
        element,
        shape: shape.as_mut_ptr(),
        strides: strides.as_mut_ptr(),
        byte_offset: 0,
    };
    // The vectors move into the box, but the memory that the tensor refers to is on the heap and does not move.
    let owned = Owned { managed: M::around(tensor), shape, strides, cache: ProcessOwned::new(cache.clone()) };
    let managed = Box::into_raw(Box::new(owned));
    // SAFETY: this thread is attached to the interpreter (`py`), the pointer is live and not null, and the name is static.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), M::NAME.as_ptr(), Some(destroy::<M>)) };
    // SAFETY: the call above gave a new reference, or null with the exception set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: no capsule was made, so nothing else owns the box.
        drop(unsafe { Box::from_raw(managed) });
    }
    capsule
}

/// Returns the strides of each dimension, in elements.
fn row_major(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim];
    }
    strides
}

/// The deleter of tensors of both layouts.
///
/// # Safety
/// `managed` must come from `wrapped::<M>` and must not be used again.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    // SAFETY: `wrapped` leaked a box of `Owned<M>` whose first field is `managed` (`repr(C)`); DLPack calls a deleter
    // at most once, and `destroy` calls it only while nobody has taken the tensor over.
    drop(unsafe { Box::from_raw(managed.cast::<Owned<M>>()) });
}

/// The destructor of a capsule: runs the deleter if no consumer took the tensor over, which renames the capsule.
///
/// # Safety
/// Called by Python, with a capsule made by `wrapped::<M>`.
unsafe extern "C" fn destroy<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the live capsule to its destructor. The check sets no exception.
    let unconsumed = unsafe { ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) } == 1;
    if unconsumed {
        // SAFETY: the capsule is valid under this name, so the pointer is the one `wrapped` put in.
        let managed = unsafe { ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()) };
        // SAFETY: the name says that the capsule still owns the tensor, and the capsule ends here.
        unsafe { delete::<M>(managed.cast()) };
    }
}

/// Returns the value of an `int` that fits 64 bits. Returns `None` for anything else, including a `bool` or a subclass.
///
/// # Safety
/// Attached to the interpreter, with a live object.
unsafe fn word(item: *mut ffi::PyObject) -> Option<i64> {
    // SAFETY: the caller promises a live object. This reads its type.
    if unsafe { ffi::PyLong_CheckExact(item) } == 0 {
        return None;
    }
    let mut overflow = 0;
    // SAFETY: the object is exactly an `int`, so no Python code runs. Values beyond 64 bits set `overflow`.
    let value = unsafe { ffi::PyLong_AsLongLongAndOverflow(item, &raw mut overflow) };
    (overflow == 0).then_some(value)
}

/// Returns the items of a list if all are plain integers that fit 64 bits, and otherwise `None`. References are not counted:
/// no Python code runs below, so the list keeps its items (`tests/test_bad_input.py`). The same holds for dicts. It requires
/// the module to be `gil_used = true`, because without the GIL another thread could change the list meanwhile.
pub(crate) fn list_words(list: &Bound<'_, PyList>) -> Result<Option<Vec<i64>>> {
    let mut words = fallible::with_capacity(LISTS, list.len())?;
    let plain = push_words(list, |word| words.push(word));
    Ok(plain.map(|()| words))
}

fn push_words(list: &Bound<'_, PyList>, mut push: impl FnMut(i64)) -> Option<()> {
    for at in 0..isize::try_from(list.len()).ok()? {
        // SAFETY: `list` proves attachment. The index is within the length, which has not changed since it was read.
        let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), at) };
        // SAFETY: the list keeps this item alive.
        push(unsafe { word(item) }?);
    }
    Some(())
}

/// Returns the items of a tuple, as [`list_words`] does.
pub(crate) fn tuple_words(tuple: &Bound<'_, PyTuple>) -> Result<Option<Vec<i64>>> {
    let mut words = fallible::with_capacity(LISTS, tuple.len())?;
    for at in 0..tuple.len().cast_signed() {
        // SAFETY: `tuple` proves attachment. The index is within the length, which never changes.
        let item = unsafe { ffi::PyTuple_GetItem(tuple.as_ptr(), at) };
        // SAFETY: the tuple keeps this item alive.
        let Some(word) = (unsafe { word(item) }) else { return Ok(None) };
        words.push(word);
    }
    Ok(Some(words))
}

/// Returns the items of a dict in its order if all are plain integers that fit 64 bits.
pub(crate) fn dict_words(dict: &Bound<'_, PyDict>) -> Result<Option<Vec<(i64, i64)>>> {
    let mut words = fallible::with_capacity(LISTS, dict.len())?;
    let plain = each_item(dict, |src, dst| {
        // SAFETY: the dict keeps this item alive, and nothing that runs in between can change the dict.
        words.push((src, unsafe { word(dst.as_ptr()) }?));
        Some(())
    });
    Ok(plain.map(|()| words))
}

/// Returns the items of a dict whose values are lists, one pair for each element.
pub(crate) fn dict_lists(dict: &Bound<'_, PyDict>) -> Result<Option<Vec<(i64, i64)>>> {
    let (mut words, mut short) = (fallible::with_capacity(LISTS, dict.len())?, None);
    let plain = each_item(dict, |src, value| {
        let list = value.cast::<PyList>().ok()?;
        if let Err(error) = fallible::grow(LISTS, &mut words, list.len()) {
            short = Some(error);
            return None;
        }
        push_words(&list, |dst| words.push((src, dst)))
    });
    short.map_or(Ok(plain.map(|()| words)), Err)
}

/// Calls `each` with every plain key of `dict` and its value until it returns `None`. It must run no Python code.
fn each_item<'py>(
    dict: &Bound<'py, PyDict>,
    mut each: impl FnMut(i64, Borrowed<'_, 'py, PyAny>) -> Option<()>,
) -> Option<()> {
    let mut at = 0;
    let (mut key, mut value) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: `dict` proves attachment, and nothing changes it meanwhile. On success the pointers are set.
    while unsafe { ffi::PyDict_Next(dict.as_ptr(), &raw mut at, &raw mut key, &raw mut value) } != 0 {
        // SAFETY: the dict keeps this key alive.
        let src = unsafe { word(key) }?;
        // SAFETY: the dict keeps this value alive, and it is read before anything can change the dict.
        each(src, unsafe { Borrowed::from_ptr(dict.py(), value) })?;
    }
    Some(())
}
