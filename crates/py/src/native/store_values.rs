//! The keys and values of a call of `Store`.

use std::fmt::Display;

use llm_datadist_core::bindings::fallible;
use llm_datadist_core::bindings::keeper::{Tensors, Window};
use llm_datadist_core::{CacheForm, CacheKind, DataType, Placement, Result};
use llm_datadist_keeper::{MAX_KEYS, StoreKey};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyBytes, PyList, PyTuple};

use super::errors::{invalid, raise};
use super::values::{self, index, wrong_type};
use super::{index_arrays, tensors};
use crate::convert::{Any, shown};
use crate::raw;

/// Name of the lists in out-of-memory errors.
const LISTS: &str = "the lists of a call";

/// Reads a list or tuple of keys.
pub(crate) fn keys(given: &Any<'_>) -> PyResult<Vec<StoreKey>> {
    let (py, items) = (given.py(), items(("keys", "a list or tuple"), given)?);
    let mut keys = fallible::with_capacity(LISTS, items.len()).map_err(|error| raise(py, &error))?;
    for (at, item) in items.iter().enumerate() {
        let bytes = item.cast::<PyBytes>().map_err(|_| wrong_type(format!("keys[{at}]"), "bytes", &item))?;
        keys.push(StoreKey::read(at, bytes.as_bytes()).map_err(|error| raise(py, &error))?);
    }
    Ok(keys)
}

/// The memory of the values of a call, each as large as the store has them.
pub(crate) struct StoreValues {
    value: u64,
    memory: ValueMemory,
    /// What keeps that memory.
    _kept: Vec<Py<PyAny>>,
}

/// Where each value is.
enum ValueMemory {
    /// Its `bytes`; `None` if it is the next tensor. There are no tensors if all values are `bytes`.
    Listed(Vec<Option<PyBackedBytes>>, Option<Tensors>),
    /// Which row of the only tensor it is.
    Rows(Vec<u64>, Tensors),
}

impl StoreValues {
    /// Reads the values of `count` keys: rows of one buffer or array if `rows` are given, and otherwise a list or tuple of them, as
    /// [`read`](Self::read) does.
    pub(crate) fn given(
        name: &str,
        given: &Any<'_>,
        rows: Option<&Any<'_>>,
        (count, value): (usize, u64),
        only_read: bool,
    ) -> PyResult<StoreValues> {
        let Some(rows) = rows else { return Self::read(name, given, value, only_read) };
        let py = given.py();
        let (memory, bytes) = tensors::whole(name, given, None)?;
        if !bytes.is_multiple_of(value) {
            let allowed = format!("a multiple of {value} bytes, a value of the store");
            return Err(invalid(py, name, format_args!("{bytes} bytes"), &allowed));
        }
        let rows = self::rows(rows, count, bytes / value)?;
        let tensors = adopted(&[memory.address], bytes).map_err(|error| raise(py, &error))?;
        Ok(StoreValues { value, memory: ValueMemory::Rows(rows, tensors), _kept: vec![memory.kept] })
    }

    /// Reads a list or tuple of buffers or arrays, which must be writable unless they are `only_read`.
    fn read(name: &str, given: &Any<'_>, value: u64, only_read: bool) -> PyResult<StoreValues> {
        let (py, items) = (given.py(), items((name, "a list or tuple, or one buffer with rows=..."), given)?);
        let no_memory = |error| raise(py, &error);
        let mut backed = fallible::with_capacity(LISTS, items.len()).map_err(no_memory)?;
        let mut addresses = fallible::with_capacity(LISTS, items.len()).map_err(no_memory)?;
        let mut kept = fallible::with_capacity(LISTS, items.len()).map_err(no_memory)?;
        for (at, item) in items.iter().enumerate() {
            let name = format!("{name}[{at}]");
            if let Some(bytes) = item.cast::<PyBytes>().ok().filter(|_| only_read) {
                tensors::check_bytes(py, &name, bytes.as_bytes().len() as u64, value)?;
                backed.push(Some(PyBackedBytes::from(bytes.clone())));
            } else {
                let memory = tensors::host_bytes(&name, &item, value, only_read)?;
                addresses.push(memory.address);
                kept.push(memory.kept);
                backed.push(None);
            }
        }
        let tensors =
            (!addresses.is_empty()).then(|| adopted(&addresses, value)).transpose().map_err(no_memory)?;
        Ok(StoreValues { value, memory: ValueMemory::Listed(backed, tensors), _kept: kept })
    }

    /// Returns a window of each value.
    pub(crate) fn windows(&self) -> Result<Vec<Window<'_>>> {
        let (backed, tensors) = match &self.memory {
            ValueMemory::Listed(backed, tensors) => (backed, tensors),
            ValueMemory::Rows(rows, tensors) => {
                let windows = rows.iter().map(|row| tensors.window(0, row * self.value, self.value));
                return fallible::try_collect(LISTS, windows);
            }
        };
        let mut windows = fallible::with_capacity(LISTS, backed.len())?;
        let mut tensor = 0..;
        for bytes in backed {
            windows.push(match (bytes, tensors) {
                (None, Some(tensors)) => tensors.window(tensor.next().unwrap_or_default(), 0, self.value)?,
                (bytes, _) => Window::of_slice(bytes.as_deref().unwrap_or_default()),
            });
        }
        Ok(windows)
    }
}

/// Reads the rows of `keys` values: a list, tuple or array of integers below `count`.
fn rows(given: &Any<'_>, keys: usize, count: u64) -> PyResult<Vec<u64>> {
    let py = given.py();
    let no_memory = |error| raise(py, &error);
    let check = |rows: usize| {
        let wrong = || invalid(py, "len(rows)", rows, &format!("{keys}, one for each key"));
        if rows == keys { Ok(()) } else { Err(wrong()) }
    };
    let numbers = if let Ok(list) = given.cast::<PyList>() {
        check(list.len())?;
        raw::list_numbers(list)
            .map_err(no_memory)?
            .map_or_else(|| one_by_one(list.iter(), keys, count), Ok)?
    } else if let Ok(tuple) = given.cast::<PyTuple>() {
        check(tuple.len())?;
        raw::tuple_numbers(tuple)
            .map_err(no_memory)?
            .map_or_else(|| one_by_one(tuple.iter(), keys, count), Ok)?
    } else {
        let text = given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyByteArray>();
        let array = if text { None } else { index_arrays::read("rows", given)? };
        array.ok_or_else(|| wrong_type("rows", "a list or an array of integers", given))?
    };
    check(numbers.len())?;
    let mut rows = fallible::with_capacity(LISTS, numbers.len()).map_err(no_memory)?;
    for (at, number) in numbers.into_iter().enumerate() {
        let row = u64::try_from(number).ok().filter(|&row| row < count);
        rows.push(row.ok_or_else(|| no_row(py, at, number, count))?);
    }
    Ok(rows)
}

/// Reads the items of a list or tuple of `keys` items, of which some are no plain integers of 64 bits.
fn one_by_one<'py>(items: impl Iterator<Item = Any<'py>>, keys: usize, count: u64) -> PyResult<Vec<i64>> {
    let mut numbers = Vec::new();
    for (at, item) in items.enumerate() {
        let (py, int) = (item.py(), index(format_args!("rows[{at}]"), "an int", &item)?);
        let number = int.extract::<i64>().map_err(|_| no_row(py, at, shown(&int), count))?;
        if numbers.is_empty() {
            numbers = fallible::with_capacity(LISTS, keys).map_err(|error| raise(py, &error))?;
        }
        // Python code of an item may have made the list longer.
        fallible::push(LISTS, &mut numbers, number).map_err(|error| raise(py, &error))?;
    }
    Ok(numbers)
}

fn no_row(py: Python<'_>, at: usize, row: impl Display, count: u64) -> PyErr {
    invalid(py, &format!("rows[{at}]"), row, &format!("0 to {}", count.saturating_sub(1)))
}

/// Adopts memory of the caller: a value at each address.
fn adopted(addresses: &[u64], value: u64) -> Result<Tensors> {
    let count = addresses.len() as u64;
    let shape = [i64::try_from(value).unwrap_or(i64::MAX)];
    let form = CacheForm::plain(count, 1, &shape, DataType::Uint8, Placement::Host, None)?;
    raw::adopt(form.desc(), CacheKind::Blocks, addresses).map(Tensors::adopted)
}

fn items<'py>((name, forms): (&str, &str), given: &Any<'py>) -> PyResult<Bound<'py, PyTuple>> {
    let items = values::items(name, forms, given)?;
    let too_many =
        || invalid(given.py(), &format!("len({name})"), items.len(), &format!("at most {MAX_KEYS}"));
    if items.len() <= MAX_KEYS { Ok(items) } else { Err(too_many()) }
}
