//! The arguments of `allocate` and `register` that describe a cache.

use llm_datadist_core::{CacheDesc, DataType, Geometry, Placement};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};

use super::dtypes;
use super::errors::invalid;
use super::layout::NativeLayout;
use super::tensors::{GivenTensors, TensorForm};
use super::values::{int, wrong_type};
use crate::convert::{Any, shown};

/// An argument that may be missing.
type Given<'a, 'py> = Option<&'a Any<'py>>;

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

/// A described cache.
pub(crate) struct CacheForm {
    /// What the core gets.
    pub(crate) desc: CacheDesc,
    /// Number of tensors in one layer. It divides their number.
    pub(crate) tensors_per_layer: u32,
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
        let tensors = tensor_count(int("tensors", tensors, 1..=Geometry::MAX_TENSORS.into())?);
        let shape = with_blocks(blocks, block_shape(shape)?);
        return given.plain(tensors, shape, dtypes::read("dtype", dtype)?, None);
    };
    if tensors.is_some() {
        return Err(beside_layout("tensors"));
    }
    given.laid_out(layout.get(), blocks, None)
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
    let form = match (given.layout, given.shape, given.dtype) {
        (Some(layout), ..) => {
            given.check_count(layout.get(), count)?;
            given.laid_out(layout.get(), blocks, None)?
        }
        (None, Some(shape), Some(dtype)) => {
            let shape = with_blocks(blocks, block_shape(shape)?);
            given.plain(tensor_count(count as u64), shape, dtypes::read("dtype", dtype)?, None)?
        }
        _ => return Err(needs()),
    };
    let desc = CacheDesc {
        row_stride: stride.map(|stride| row_stride(stride, &form.desc)).transpose()?,
        ..form.desc
    };
    check_ends(given.pool.py(), addresses, &desc)?;
    Ok(CacheForm { desc, ..form })
}

/// Reads `stride`, the bytes from one block to the next.
fn row_stride(given: &Any<'_>, desc: &CacheDesc) -> PyResult<u64> {
    let (row_bytes, element) = (row_bytes(desc), desc.data_type.bytes());
    let stride = int("stride", given, 0..=u64::MAX)?;
    if stride >= row_bytes && stride.is_multiple_of(element) {
        return Ok(stride);
    }
    let allowed =
        format!("at least {row_bytes}, the bytes of a block, and a multiple of the {element} of an element");
    Err(invalid(given.py(), "stride", stride, &allowed))
}

/// Checks that every tensor ends below 2^64. The core refuses tensors that are too large anywhere.
fn check_ends(py: Python<'_>, addresses: &[u64], desc: &CacheDesc) -> PyResult<()> {
    let row_bytes = row_bytes(desc);
    let gaps = desc.row_stride.unwrap_or(row_bytes).saturating_mul(desc.shape[0].unsigned_abs() - 1);
    let bytes = gaps.saturating_add(row_bytes).min(i64::MAX.cast_unsigned());
    let beyond = |(_, address): &(usize, &u64)| address.checked_add(bytes).is_none();
    match addresses.iter().enumerate().find(beyond) {
        None => Ok(()),
        Some((at, address)) => {
            let allowed = format!("low enough for {bytes} bytes below 2^64");
            Err(invalid(py, &format!("tensors[{at}]"), address, &allowed))
        }
    }
}

fn of_objects(
    given: GivenForm<'_, '_>,
    form: &TensorForm,
    count: usize,
    blocks: Given<'_, '_>,
) -> PyResult<CacheForm> {
    let (py, rows) = (given.pool.py(), form.shape[0].unsigned_abs());
    if rows > u32::MAX.into() {
        return Err(invalid(py, "tensors[0]", form, "a tensor of at most 4294967295 blocks"));
    }
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
        let layout = layout.get();
        given.check_count(layout, count)?;
        let laid_out = given.laid_out(layout, rows, form.row_stride)?;
        let (has, needs) = (form.row_bytes(), row_bytes(&laid_out.desc));
        if has != needs {
            let value = format!("{form}, which has {has} bytes in a block,");
            return Err(invalid(py, "tensors[0]", value, &format!("one with {needs}, as layout says")));
        }
        return Ok(laid_out);
    }
    if let Some(shape) = given.shape
        && block_shape(shape)? != form.shape[1..]
    {
        let allowed = format!("{:?}, as the tensors have it", &form.shape[1..]);
        return Err(invalid(py, "shape", shown(shape), &allowed));
    }
    let data_type = match (given.dtype, form.data_type) {
        (Some(dtype), _) => {
            let data_type = dtypes::read("dtype", dtype)?;
            if data_type.bytes() != form.item_bytes {
                let allowed = format!("a type of {} bytes, as the elements of the tensors", form.item_bytes);
                return Err(invalid(py, "dtype", format_args!("\"{}\"", dtypes::name(data_type)), &allowed));
            }
            data_type
        }
        (None, Some(data_type)) => data_type,
        (None, None) => {
            return Err(invalid(py, "tensors[0]", form, "of a known element type; dtype can say which"));
        }
    };
    given.plain(tensor_count(count as u64), form.shape.clone(), data_type, form.row_stride)
}

impl GivenForm<'_, '_> {
    /// Describes a cache with a layout.
    fn laid_out(self, layout: &NativeLayout, blocks: u64, row_stride: Option<u64>) -> PyResult<CacheForm> {
        let given =
            [("shape", self.shape), ("dtype", self.dtype), ("tensors_per_layer", self.tensors_per_layer)];
        if let Some((name, _)) = given.iter().find(|(_, value)| value.is_some()) {
            return Err(beside_layout(name));
        }
        let desc = CacheDesc {
            num_tensors: tensor_count(layout.num_tensors()),
            shape: layout.shape_of(blocks),
            data_type: layout.data_type(),
            placement: placement(self.pool)?,
            row_stride,
            kv_layout: Some(Box::new(layout.layout().clone())),
            tensors: Vec::new(),
        };
        Ok(CacheForm { desc, tensors_per_layer: layout.layout().tensors_per_layer() })
    }

    /// Describes a cache without a layout.
    fn plain(
        self,
        num_tensors: u32,
        shape: Vec<i64>,
        data_type: DataType,
        row_stride: Option<u64>,
    ) -> PyResult<CacheForm> {
        let tensors_per_layer = match self.tensors_per_layer {
            Some(given) => {
                let count = tensor_count(int("tensors_per_layer", given, 1..=num_tensors.into())?);
                if !num_tensors.is_multiple_of(count) {
                    let allowed = format!("a divisor of {num_tensors}, the number of tensors");
                    return Err(invalid(given.py(), "tensors_per_layer", count, &allowed));
                }
                count
            }
            None => 1,
        };
        let placement = placement(self.pool)?;
        let desc = CacheDesc {
            num_tensors,
            shape,
            data_type,
            placement,
            row_stride,
            kv_layout: None,
            tensors: Vec::new(),
        };
        Ok(CacheForm { desc, tensors_per_layer })
    }

    /// Checks that there are as many tensors as the layout has.
    fn check_count(self, layout: &NativeLayout, count: usize) -> PyResult<()> {
        let needed = layout.num_tensors();
        if count as u64 == needed {
            return Ok(());
        }
        let value = format!("{count} tensors");
        Err(invalid(self.pool.py(), "tensors", value, &format!("{needed}, as layout has layers")))
    }
}

/// Reads the number of blocks.
fn block_count(given: &Any<'_>) -> PyResult<u64> {
    int("blocks", given, 1..=u32::MAX.into())
}

/// Returns a number of tensors. One that is too large stays too large.
fn tensor_count(count: u64) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

/// Reads the shape of a block.
fn block_shape(given: &Any<'_>) -> PyResult<Vec<i64>> {
    let dim = |(at, dim): (usize, Any<'_>)| {
        let dim = int(&format!("shape[{at}]"), &dim, 1..=i64::MAX.cast_unsigned())?;
        Ok(dim.cast_signed())
    };
    let dims = match (given.cast::<PyTuple>(), given.cast::<PyList>()) {
        (Ok(tuple), _) => tuple.clone(),
        (_, Ok(list)) => list.to_tuple(),
        _ => return Err(wrong_type("shape", "a list or tuple", given)),
    };
    if dims.len() >= Geometry::MAX_RANK {
        let allowed = format!("at most {}", Geometry::MAX_RANK - 1);
        return Err(invalid(given.py(), "len(shape)", dims.len(), &allowed));
    }
    dims.iter().enumerate().map(dim).collect()
}

fn with_blocks(blocks: u64, mut shape: Vec<i64>) -> Vec<i64> {
    shape.insert(0, blocks.cast_signed());
    shape
}

/// Returns the bytes of one block in one tensor, without gaps. The core refuses sizes that do not fit 64 bits.
fn row_bytes(desc: &CacheDesc) -> u64 {
    desc.shape[1..].iter().fold(desc.data_type.bytes(), |bytes, dim| bytes.saturating_mul(dim.unsigned_abs()))
}

/// Reads the pool.
fn placement(given: &Any<'_>) -> PyResult<Placement> {
    let word = given.extract::<String>().map_err(|_| wrong_type("pool", "a str", given))?;
    let found = Placement::ALL.into_iter().find(|placement| placement.to_string() == word);
    found.ok_or_else(|| invalid(given.py(), "pool", format_args!("{word:?}"), "\"device\" or \"host\""))
}

#[cold]
fn beside_layout(name: &str) -> PyErr {
    PyTypeError::new_err(format!("{name} must not be given beside a layout, which says it"))
}
