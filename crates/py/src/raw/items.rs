//! Numbers of lists, tuples and dicts, read without counting references.

use std::ptr;

use llm_datadist_core::Result;
use llm_datadist_core::bindings::fallible;
use pyo3::Borrowed;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

/// Name of these lists in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// Returns the value of an `int` that fits 64 bits. Returns `None` for anything else, including a `bool` or a subclass.
///
/// # Safety
/// Attached to the interpreter, with a live object.
unsafe fn number(item: *mut ffi::PyObject) -> Option<i64> {
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
pub(crate) fn list_numbers(list: &Bound<'_, PyList>) -> Result<Option<Vec<i64>>> {
    let mut numbers = fallible::with_capacity(LISTS, list.len())?;
    let plain = push_numbers(list, |number| numbers.push(number));
    Ok(plain.map(|()| numbers))
}

fn push_numbers(list: &Bound<'_, PyList>, mut push: impl FnMut(i64)) -> Option<()> {
    for at in 0..isize::try_from(list.len()).ok()? {
        // SAFETY: `list` proves attachment. The index is within the length, which has not changed since it was read.
        let item = unsafe { ffi::PyList_GetItem(list.as_ptr(), at) };
        // SAFETY: the list keeps this item alive.
        push(unsafe { number(item) }?);
    }
    Some(())
}

/// Returns the items of a tuple, as [`list_numbers`] does.
pub(crate) fn tuple_numbers(tuple: &Bound<'_, PyTuple>) -> Result<Option<Vec<i64>>> {
    let mut numbers = fallible::with_capacity(LISTS, tuple.len())?;
    for at in 0..tuple.len().cast_signed() {
        // SAFETY: `tuple` proves attachment. The index is within the length, which never changes.
        let item = unsafe { ffi::PyTuple_GetItem(tuple.as_ptr(), at) };
        // SAFETY: the tuple keeps this item alive.
        let Some(number) = (unsafe { number(item) }) else { return Ok(None) };
        numbers.push(number);
    }
    Ok(Some(numbers))
}

/// Returns the items of a dict in its order if all are plain integers that fit 64 bits.
pub(crate) fn dict_numbers(dict: &Bound<'_, PyDict>) -> Result<Option<Vec<(i64, i64)>>> {
    let mut numbers = fallible::with_capacity(LISTS, dict.len())?;
    let plain = each_item(dict, |src, dst| {
        // SAFETY: the dict keeps this item alive, and nothing that runs in between can change the dict.
        numbers.push((src, unsafe { number(dst.as_ptr()) }?));
        Some(())
    });
    Ok(plain.map(|()| numbers))
}

/// Returns the items of a dict whose values are lists, one pair for each element.
pub(crate) fn dict_lists(dict: &Bound<'_, PyDict>) -> Result<Option<Vec<(i64, i64)>>> {
    let (mut numbers, mut short) = (fallible::with_capacity(LISTS, dict.len())?, None);
    let plain = each_item(dict, |src, value| {
        let list = value.cast::<PyList>().ok()?;
        if let Err(error) = fallible::grow(LISTS, &mut numbers, list.len()) {
            short = Some(error);
            return None;
        }
        push_numbers(&list, |dst| numbers.push((src, dst)))
    });
    short.map_or(Ok(plain.map(|()| numbers)), Err)
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
        let src = unsafe { number(key) }?;
        // SAFETY: the dict keeps this value alive, and it is read before anything can change the dict.
        each(src, unsafe { Borrowed::from_ptr(dict.py(), value) })?;
    }
    Some(())
}
