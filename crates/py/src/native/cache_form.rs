//! The arguments of `allocate` and `register` that describe a cache.

use llm_datadist_core::{CacheForm, DataType, ElementTypes, Placement, pool_named};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use super::dtypes;
use super::errors::{invalid, raise};
use super::layout::NativeLayout;
use super::tensors::{GivenTensors, TensorForm};
use super::values::{int, int32, items, text};
use crate::convert::{Any, shown};

/// An argument that may be missing.
pub(crate) type Given<'a, 'py> = Option<&'a Any<'py>>;

/// The unchecked arguments that describe the blocks of a cache.
#[derive(Clone, Copy)]
pub(crate) struct GivenForm<'a, 'py> {
    /// `layout`, which takes the place of the others.
    pub(crate) layout: Option<&'a Bound<'py, NativeLayout>>,
    /// `shape` of one block of one tensor.
    pub(crate) shape: Given<'a, 'py>,
    /// `dtype`.
    pub(crate) dtype: Given<'a, 'py>,
    /// `tensors_per_layer`.
    pub(crate) tensors_per_layer: Given<'a, 'py>,
    /// `pool`.
    pub(crate) pool: &'a Any<'py>,
}

/// Reads the arguments of `allocate`.
pub(crate) fn allocated(
    given: GivenForm<'_, '_>,
    blocks: &Any<'_>,
    tensors: Given<'_, '_>,
) -> PyResult<CacheForm> {
    let blocks = block_count(blocks)?;
    let Some(layout) = given.layout else {
        let all = (tensors, given.shape, given.dtype);
        let (Some(tensors), Some(shape), Some(dtype)) = all else {
            return Err(PyTypeError::new_err("allocate() needs a layout, or tensors, shape and dtype"));
        };
        let tensors = int("tensors", tensors, CacheForm::TENSORS)?;
        return given.plain(tensors, blocks, &block_shape(shape)?, dtypes::read("dtype", dtype)?);
    };
    if tensors.is_some() {
        return Err(beside_layout("tensors"));
    }
    given.laid_out(layout.get(), blocks)
}

/// Reads the arguments of `register`, whose tensors were read.
pub(crate) fn registered(
    given: GivenForm<'_, '_>,
    tensors: &GivenTensors,
    blocks: Given<'_, '_>,
    stride: Given<'_, '_>,
) -> PyResult<CacheForm> {
    match tensors {
        GivenTensors::Addresses(addresses) => of_addresses(given, addresses, blocks, stride),
        GivenTensors::Objects(objects) => {
            if stride.is_some() {
                return Err(PyTypeError::new_err("stride is only for addresses; a tensor has its own"));
            }
            of_objects(given, &objects.form, objects.addresses.len(), blocks)
        }
    }
}

fn of_addresses(
    given: GivenForm<'_, '_>,
    addresses: &[u64],
    blocks: Given<'_, '_>,
    stride: Given<'_, '_>,
) -> PyResult<CacheForm> {
    let needs = || PyTypeError::new_err("addresses need blocks, and a layout or shape and dtype");
    let (blocks, count) = (block_count(blocks.ok_or_else(needs)?)?, addresses.len());
    let py = given.pool.py();
    let form = match (given.layout, given.shape, given.dtype) {
        (Some(layout), ..) => {
            let form = given.laid_out(layout.get(), blocks)?;
            form.check_count(count).map(|()| form)
        }
        (None, Some(shape), Some(dtype)) => {
            Ok(given.plain(count as u64, blocks, &block_shape(shape)?, dtypes::read("dtype", dtype)?)?)
        }
        _ => return Err(needs()),
    };
    let stride = stride.map(|stride| int("stride", stride, 0..=u64::MAX)).transpose()?;
    let form = form.and_then(|form| stride.map_or(Ok(form.clone()), |stride| form.with_stride(stride)));
    let checked = form.and_then(|form| form.check_addresses(addresses).map(|()| form));
    checked.map_err(|error| raise(py, &error))
}

fn of_objects(
    given: GivenForm<'_, '_>,
    form: &TensorForm,
    count: usize,
    blocks: Given<'_, '_>,
) -> PyResult<CacheForm> {
    let (py, rows) = (given.pool.py(), form.shape[0].unsigned_abs());
    if let Some(blocks) = blocks
        && block_count(blocks)? != rows
    {
        return Err(invalid(
            py,
            "blocks",
            shown(blocks),
            &format!("{rows}, the first dimension of the tensors"),
        ));
    }
    if let Some(layout) = given.layout {
        let laid_out = given.laid_out(layout.get(), rows)?;
        laid_out.check_count(count).map_err(|error| raise(py, &error))?;
        let (has, needs) = (form.row_bytes(), laid_out.row_bytes());
        if has != needs {
            let value = format!("{form}, which has {has} bytes in a block,");
            return Err(invalid(py, "tensors[0]", value, &format!("one with {needs}, as layout says")));
        }
        return strided(py, laid_out, form);
    }
    if let Some(shape) = given.shape
        && block_shape(shape)? != form.shape[1..]
    {
        let allowed = format!("{:?}, as the tensors have it", &form.shape[1..]);
        return Err(invalid(py, "shape", shown(shape), &allowed));
    }
    let data_type = given.data_type_of(form)?;
    strided(py, given.plain(count as u64, rows, &form.shape[1..], data_type)?, form)
}

/// Returns the form with the bytes from one block of the tensors to the next, if there are gaps.
fn strided(py: Python<'_>, of: CacheForm, form: &TensorForm) -> PyResult<CacheForm> {
    let Some(stride) = form.row_stride else { return Ok(of) };
    of.with_stride(stride).map_err(|error| raise(py, &error))
}

impl GivenForm<'_, '_> {
    /// Describes a cache with a layout.
    fn laid_out(self, layout: &NativeLayout, blocks: u64) -> PyResult<CacheForm> {
        let given =
            [("shape", self.shape), ("dtype", self.dtype), ("tensors_per_layer", self.tensors_per_layer)];
        if let Some((name, _)) = given.iter().find(|(_, value)| value.is_some()) {
            return Err(beside_layout(name));
        }
        let form = CacheForm::laid_out(layout.layout(), layout.data_type(), blocks, placement(self.pool)?);
        form.map_err(|error| raise(self.pool.py(), &error))
    }

    /// Returns the element type of tensor objects: that of `dtype`, or their own.
    fn data_type_of(self, form: &TensorForm) -> PyResult<DataType> {
        let py = self.pool.py();
        let Some(dtype) = self.dtype else {
            let unknown = || invalid(py, "tensors[0]", form, "of a known element type; dtype can say which");
            return form.data_type.ok_or_else(unknown);
        };
        let data_type = dtypes::read("dtype", dtype)?;
        if data_type.bytes() != form.item_bytes {
            let (name, bytes) = (ElementTypes::name(data_type), form.item_bytes);
            let allowed = format!("a type of {bytes} bytes, as the elements of the tensors");
            return Err(invalid(py, "dtype", format_args!("\"{name}\""), &allowed));
        }
        Ok(data_type)
    }

    /// Describes a cache without a layout.
    fn plain(self, tensors: u64, blocks: u64, shape: &[i64], data_type: DataType) -> PyResult<CacheForm> {
        let per_layer =
            self.tensors_per_layer.map(|given| int32("tensors_per_layer", given, 1)).transpose()?;
        let form = CacheForm::plain(tensors, blocks, shape, data_type, placement(self.pool)?, per_layer);
        form.map_err(|error| raise(self.pool.py(), &error))
    }
}

/// Reads the number of blocks.
fn block_count(given: &Any<'_>) -> PyResult<u64> {
    int("blocks", given, CacheForm::BLOCKS)
}

/// Reads the shape of a block.
fn block_shape(given: &Any<'_>) -> PyResult<Vec<i64>> {
    let dim = |(at, dim): (usize, Any<'_>)| {
        let dim = int(&format!("shape[{at}]"), &dim, 1..=i64::MAX.cast_unsigned())?;
        Ok(dim.cast_signed())
    };
    items("shape", "a list or tuple", given)?.iter().enumerate().map(dim).collect()
}

/// Reads the pool.
fn placement(given: &Any<'_>) -> PyResult<Placement> {
    let word = text("pool", given)?;
    pool_named(&word).map_err(|error| raise(given.py(), &error))
}

#[cold]
fn beside_layout(name: &str) -> PyErr {
    PyTypeError::new_err(format!("{name} must not be given beside a layout, which says it"))
}
