//! The blocks in `cache[blocks]`.

use llm_datadist_core::bindings::fallible;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyInt, PyList, PyRange, PySlice, PyTuple};

use super::errors::{invalid, raise};
use super::index_arrays;
use super::values::{index, wrong_type};
use crate::convert::{Any, shown};
use crate::numpy::import_numpy;
use crate::raw;

/// What the index of a cache may be.
const FORMS: &str = "an int, a slice or integers";
/// Name of the list in out-of-memory errors.
const LIST: &str = "a list of blocks";

/// Reads the index of a cache of `count` blocks; `None` if the number is not known. A slice or range must end inside the
/// cache, because its numbers are listed here. The calls that use the blocks check the others.
pub(crate) fn read(given: &Any<'_>, count: Option<u64>) -> PyResult<Vec<i64>> {
    let py = given.py();
    if let Ok(list) = given.cast::<PyList>() {
        let numbers = raw::list_numbers(list).map_err(|error| raise(py, &error))?;
        numbers.map_or_else(
            || one_by_one(py, list.len(), list.iter(), count),
            |numbers| checked(py, numbers, count),
        )
    } else if let Ok(tuple) = given.cast::<PyTuple>() {
        let numbers = raw::tuple_numbers(tuple).map_err(|error| raise(py, &error))?;
        numbers.map_or_else(
            || one_by_one(py, tuple.len(), tuple.iter(), count),
            |numbers| checked(py, numbers, count),
        )
    } else if given.is_instance_of::<PyInt>() {
        one(given, count)
    } else if given.is_instance_of::<PySlice>() {
        slice(given, count)
    } else if given.is_instance_of::<PyRange>() {
        let end = |which| given.getattr(which).and_then(|end| number("blocks", &end));
        let ends = (end(intern!(py, "start"))?, end(intern!(py, "stop"))?);
        counted(given, ends, end(intern!(py, "step"))?, count)
    } else if is_scalar(given)? {
        one(given, count)
    } else {
        array(given, count)
    }
}

/// Reads an array. `bytes` are texts, although they export integers.
fn array(given: &Any<'_>, count: Option<u64>) -> PyResult<Vec<i64>> {
    let py = given.py();
    let wrong = || wrong_type("blocks", FORMS, given);
    if given.is_instance_of::<PyBytes>() || given.is_instance_of::<PyByteArray>() {
        return Err(wrong());
    }
    let array = match index_arrays::read("blocks", given)? {
        None if given.hasattr(intern!(py, "__array_interface__"))? => {
            let numpy = import_numpy(py, "an array as blocks")?;
            let copy = numpy.call_method1(intern!(py, "array"), (given,))?;
            index_arrays::read("blocks", &copy)?
        }
        read => read,
    };
    // An unsigned number above 2^63 appears as a negative one, and is refused as well.
    checked(py, array.ok_or_else(wrong)?, count)
}

/// Whether an object has no items, but may be an integer, as numbers of numpy are. Arrays of numpy and torch have `__index__`
/// too.
fn is_scalar(given: &Any<'_>) -> PyResult<bool> {
    let (py, class) = (given.py(), given.get_type());
    Ok(class.hasattr(intern!(py, "__index__"))? && !class.hasattr(intern!(py, "__len__"))?)
}

/// Reads one block.
fn one(given: &Any<'_>, count: Option<u64>) -> PyResult<Vec<i64>> {
    let py = given.py();
    let mut list = fallible::with_capacity(LIST, 1).map_err(|error| raise(py, &error))?;
    list.push(block("blocks", given, count)?);
    Ok(list)
}

/// Reads a block, which is called `name` in errors.
fn block(name: &str, given: &Any<'_>, count: Option<u64>) -> PyResult<i64> {
    let number = index(name, FORMS, given)?;
    match number.extract::<u32>() {
        Ok(block) => Ok(block.into()),
        Err(_) => Err(invalid(given.py(), name, shown(&number), &format!("0 to {}", last(count)))),
    }
}

/// Reads the items of a list or tuple one after the other.
fn one_by_one<'py>(
    py: Python<'py>,
    count: usize,
    items: impl Iterator<Item = Any<'py>>,
    of_cache: Option<u64>,
) -> PyResult<Vec<i64>> {
    let mut list = fallible::with_capacity(LIST, count).map_err(|error| raise(py, &error))?;
    for (at, item) in items.enumerate() {
        let block = match item.extract::<u32>() {
            Ok(block) if item.is_exact_instance_of::<PyInt>() => block.into(),
            _ => block(&format!("blocks[{at}]"), &item, of_cache)?,
        };
        // Python code of an item may have made the list longer.
        fallible::push(LIST, &mut list, block).map_err(|error| raise(py, &error))?;
    }
    Ok(list)
}

/// Checks that every number can be that of a block.
fn checked(py: Python<'_>, numbers: Vec<i64>, count: Option<u64>) -> PyResult<Vec<i64>> {
    // One pass without a branch. The position is only looked for if it is needed.
    let bits = numbers.iter().fold(0, |bits, number| bits | number);
    if u32::try_from(bits).is_ok() {
        return Ok(numbers);
    }
    let wrong = numbers.iter().enumerate().find(|(_, number)| u32::try_from(**number).is_err());
    match wrong {
        Some((at, number)) => {
            let allowed = format!("0 to {}", last(count));
            Err(invalid(py, &format!("blocks[{at}]"), number, &allowed))
        }
        None => Ok(numbers),
    }
}

/// Reads a slice. Its ends are not negative, and not cut to the size of the cache.
fn slice(given: &Any<'_>, count: Option<u64>) -> PyResult<Vec<i64>> {
    let py = given.py();
    let end = |which, open: Option<i64>| {
        let end = given.getattr(which)?;
        if !end.is_none() {
            return number("blocks", &end);
        }
        let allowed = "a slice with an end, because the number of blocks is not known here";
        open.ok_or_else(|| invalid(py, "blocks", shown(given), allowed))
    };
    let step = end(intern!(py, "step"), Some(1))?;
    if step < 1 {
        return Err(invalid(py, "blocks", shown(given), "a slice of a step above 0"));
    }
    let open = count.map(|count| i64::try_from(count).unwrap_or(i64::MAX));
    let ends = (end(intern!(py, "start"), Some(0))?, end(intern!(py, "stop"), open)?);
    counted(given, ends, step, count)
}

/// Reads an end or the step of a slice or range. What does not fit 64 bits becomes the nearest number, which is no block.
fn number(name: &str, given: &Any<'_>) -> PyResult<i64> {
    let number = index(name, FORMS, given)?;
    let below = || number.lt(0).map(|below| if below { i64::MIN } else { i64::MAX });
    number.extract().or_else(|_| below())
}

/// Lists the numbers from `first` to before `end`, as `given` says.
fn counted(given: &Any<'_>, (first, end): (i64, i64), step: i64, count: Option<u64>) -> PyResult<Vec<i64>> {
    let py = given.py();
    // The sizes are computed in 128 bits, where nothing overflows. `range` has no step of 0.
    let (from, to, by) = (i128::from(first), i128::from(end), i128::from(step));
    let steps = if by > 0 { (to - from + by - 1) / by } else { (from - to - by - 1) / -by };
    if steps <= 0 {
        return check_ends(given, first.min(end).min(0), count).map(|()| Vec::new());
    }
    let last = from + (steps - 1) * by;
    check_ends(given, i64::try_from(from.min(last)).unwrap_or(i64::MIN), count)?;
    check_ends(given, i64::try_from(from.max(last)).unwrap_or(i64::MAX), count)?;
    // Both ends are blocks, so there are at most 2^32 numbers.
    let steps = i64::try_from(steps).unwrap_or(i64::MAX);
    let room = usize::try_from(steps).unwrap_or(usize::MAX);
    let mut blocks = fallible::with_capacity(LIST, room).map_err(|error| raise(py, &error))?;
    blocks.extend((0..steps).map(|at| first + at * step));
    Ok(blocks)
}

/// Returns the last block of a cache of `count` blocks, or the last that any cache can have.
fn last(count: Option<u64>) -> u64 {
    count.map_or(u32::MAX.into(), |count| count.saturating_sub(1))
}

/// Checks that a number in a slice or range can be that of a block.
fn check_ends(given: &Any<'_>, block: i64, count: Option<u64>) -> PyResult<()> {
    let most = last(count);
    match u64::try_from(block) {
        Ok(block) if block <= most => Ok(()),
        _ => Err(invalid(given.py(), "blocks", shown(given), &format!("blocks from 0 to {most}"))),
    }
}
