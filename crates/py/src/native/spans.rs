//! Ranges of layers, tokens or bytes: a `range`, a `slice`, or a pair of its two ends.

use std::ops::Range;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyRange, PySlice, PyTuple};

use super::errors::invalid;
use super::values::{index, wrong_type};
use crate::convert::{Any, shown};

/// What a span may be.
const FORMS: &str = "a range, a slice or a pair of int";

/// Reads the argument called `name`: a range of step 1. `end` is where an open slice ends, if that is known.
pub(crate) fn read(name: &str, value: &Any<'_>, end: Option<u64>) -> PyResult<Range<u64>> {
    let py = value.py();
    let (first, last) = ends(name, value)?;
    let first = if first.is_none() { Some(0) } else { number(name, &first)? };
    let last = if last.is_none() {
        let unknown = || invalid(py, name, shown(value), "a slice with an end, which is not known here");
        Some(end.ok_or_else(unknown)?)
    } else {
        number(name, &last)?
    };
    match (first, last) {
        (Some(first), Some(last)) => Ok(first..last),
        _ => Err(invalid(py, name, shown(value), "a range from 0 or above that is not empty")),
    }
}

/// Returns the two ends, which are `None` where a slice is open. Checks that the step is 1.
fn ends<'py>(name: &str, value: &Any<'py>) -> PyResult<(Any<'py>, Any<'py>)> {
    let py = value.py();
    if value.is_instance_of::<PyRange>() || value.is_instance_of::<PySlice>() {
        let step = value.getattr(intern!(py, "step"))?;
        if !step.is_none() && number(name, &step)? != Some(1) {
            return Err(invalid(py, name, shown(value), "a range of step 1"));
        }
        return Ok((value.getattr(intern!(py, "start"))?, value.getattr(intern!(py, "stop"))?));
    }
    let pair = value.cast::<PyTuple>().ok().filter(|pair| pair.len() == 2);
    let pair = pair.ok_or_else(|| wrong_type(name, FORMS, value))?;
    let ends = (pair.get_item(0)?, pair.get_item(1)?);
    for end in [&ends.0, &ends.1] {
        index(name, FORMS, end)?;
    }
    Ok(ends)
}

/// Returns an integer from 0 to 2^63 - 1; `None` if it is outside.
fn number(name: &str, value: &Any<'_>) -> PyResult<Option<u64>> {
    let number = index(name, "a range of int", value)?.extract::<i64>().ok();
    Ok(number.and_then(|number| u64::try_from(number).ok()))
}
