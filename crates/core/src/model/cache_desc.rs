//! The description of a cache: element type, placement, shape, and the sizes that follow from them, computed
//! once and checked.
//!
//! The addresses are kept in `memory`, and `validate` checks whether a request fits a cache.

use std::fmt;

use super::kv_layout::KvLayout;
use super::row_sizes::RowSizes;
use crate::error::{Error, Result, ensure};

macro_rules! data_types {
    ($($(#[$doc:meta])* $variant:ident = $value:literal, $bytes:literal, $name:literal;)*) => {
        /// Element type of a tensor, with the numbers of the public API (contract §3.2).
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum DataType { $($(#[$doc])* $variant = $value,)* }

        impl DataType {
            /// All types, in the order of the public class.
            pub const ALL: &'static [DataType] = &[$(DataType::$variant,)*];

            /// Returns the bytes of one element.
            pub const fn bytes(self) -> u64 {
                match self { $(DataType::$variant => $bytes,)* }
            }

            /// Returns the public name, `DT_…`.
            pub const fn name(self) -> &'static str {
                match self { $(DataType::$variant => $name,)* }
            }

            /// Returns the type with this number in the public API; `None` if there is none.
            pub const fn from_value(value: i64) -> Option<DataType> {
                match value { $($value => Some(DataType::$variant),)* _ => None }
            }
        }
    };
}

data_types! {
    /// 32-bit float.
    Float = 0, 4, "DT_FLOAT";
    /// 16-bit float.
    Float16 = 1, 2, "DT_FLOAT16";
    /// 16-bit brain float.
    Bf16 = 27, 2, "DT_BF16";
    /// Signed 8-bit integer.
    Int8 = 2, 1, "DT_INT8";
    /// Signed 16-bit integer.
    Int16 = 6, 2, "DT_INT16";
    /// Unsigned 16-bit integer.
    Uint16 = 7, 2, "DT_UINT16";
    /// Unsigned 8-bit integer.
    Uint8 = 4, 1, "DT_UINT8";
    /// Signed 32-bit integer.
    Int32 = 3, 4, "DT_INT32";
    /// Signed 64-bit integer.
    Int64 = 9, 8, "DT_INT64";
    /// Unsigned 32-bit integer.
    Uint32 = 8, 4, "DT_UINT32";
    /// Unsigned 64-bit integer.
    Uint64 = 10, 8, "DT_UINT64";
    /// Boolean, one byte that is 0 or 1.
    Bool = 12, 1, "DT_BOOL";
    /// 64-bit float.
    Double = 11, 8, "DT_DOUBLE";
    /// Two 64-bit words.
    String = 13, 16, "DT_STRING";
}

/// The placement of a cache, which selects its pool. Without a device that has its own memory, both
/// placements are memory that the CPU can address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Host memory.
    Host = 0,
    /// Device memory.
    Device = 1,
}

impl Placement {
    /// Both placements, in the order of their public numbers.
    pub const ALL: [Placement; 2] = [Placement::Host, Placement::Device];
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Placement::Host => "host",
            Placement::Device => "device",
        })
    }
}

/// The meaning of dimension 0: batch slots of a continuous cache, or blocks of a paged cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CacheKind {
    /// Dimension 0 counts batch slots.
    Batch,
    /// Dimension 0 counts blocks.
    Blocks,
}

/// The description of a cache that the caller gave. The values may be invalid; [`Geometry::new`] checks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheDesc {
    /// Number of tensors. All are equal.
    pub num_tensors: u32,
    /// Dimensions of one tensor, outermost first.
    pub shape: Vec<i64>,
    /// Element type.
    pub data_type: DataType,
    /// Placement, which selects the pool.
    pub placement: Placement,
    /// Bytes from the start of one row to the start of the next, for padded pages and packed layers: a multiple of
    /// the element size, and at least the bytes of a row. `None` if rows follow each other without gaps.
    pub row_stride: Option<u64>,
    /// What the rows mean, if the caller said so.
    pub kv_layout: Option<Box<KvLayout>>,
}

/// Sizes, kind and placement of a cache: what a request is checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    /// Sizes of the cache.
    pub geometry: Geometry,
    /// What a row of the cache is.
    pub kind: CacheKind,
    /// Placement of the cache.
    pub placement: Placement,
}

/// The sizes of a cache in bytes, checked against 64-bit overflow. A value exists only for valid sizes.
///
/// A *row* is one step of dimension 0: a batch slot or a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    num_tensors: u32,
    rows: u64,
    row_bytes: u64,
    row_stride: u64,
}

impl Geometry {
    /// Maximum number of dimensions of a tensor.
    pub const MAX_RANK: usize = 31;
    /// Maximum number of tensors in a cache. Their addresses alone then take 128 MiB.
    pub const MAX_TENSORS: u32 = 1 << 24;

    /// Computes the sizes of `desc`. Returns `Err` of kind `InvalidArgument` unless it has 1 to
    /// 31 dimensions, each above zero, 1 to 2^24 tensors, a row stride that holds whole elements and a whole row, and
    /// less than 2^63 bytes in total.
    pub fn new(desc: &CacheDesc) -> Result<Self> {
        let CacheDesc { num_tensors, ref shape, data_type, row_stride: stride, .. } = *desc;
        if !(1..=Self::MAX_TENSORS).contains(&num_tensors) {
            let range = format_args!("1 to {}", Self::MAX_TENSORS);
            return Err(Error::out_of_range("num_tensors", num_tensors, range));
        }
        let dense_bytes = tensor_bytes(shape, data_type)?;
        let rows = shape[0].unsigned_abs();
        let row_bytes = dense_bytes / rows;
        let row_stride = stride.unwrap_or(row_bytes);
        check_row_stride(row_stride, row_bytes, data_type)?;
        let tensor = row_stride.checked_mul(rows - 1).and_then(|bytes| bytes.checked_add(row_bytes));
        let whole = tensor.and_then(|bytes| bytes.checked_mul(num_tensors.into()));
        if whole.is_none_or(|bytes| i64::try_from(bytes).is_err()) {
            let error = too_large(shape).with("num_tensors", num_tensors);
            return Err(stride.map_or(error.clone(), |stride| error.with("row_stride", stride)));
        }
        Ok(Geometry { num_tensors, rows, row_bytes, row_stride })
    }

    /// Returns the number of tensors.
    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// Returns the number of batch slots or blocks in one tensor.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the bytes of one batch slot or block in one tensor.
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }

    /// Returns the bytes from the start of one row to the start of the next.
    pub fn row_stride(&self) -> u64 {
        self.row_stride
    }

    /// Returns where the rows of a tensor lie.
    pub fn row_sizes(&self) -> RowSizes {
        RowSizes::new(self.row_bytes, self.row_stride)
    }

    /// Returns the first byte of a row of the cache, from the start of the tensor.
    pub fn row_start(&self, row: u64) -> u64 {
        row * self.row_stride
    }

    /// Returns the bytes of one tensor, from the first byte of its first row to the last byte of its last row. Gaps
    /// between the rows count.
    pub fn tensor_bytes(&self) -> u64 {
        (self.rows - 1) * self.row_stride + self.row_bytes
    }

    /// Returns the bytes of all tensors, gaps between rows included.
    pub fn bytes(&self) -> u64 {
        self.tensor_bytes().saturating_mul(u64::from(self.num_tensors()))
    }
}

/// Checks that rows `row_stride` bytes apart do not overlap, and that each begins with a whole element.
fn check_row_stride(row_stride: u64, row_bytes: u64, data_type: DataType) -> Result<()> {
    ensure(row_stride >= row_bytes, || {
        Error::argument("row_stride", row_stride, format_args!("at least the {row_bytes} bytes of a row"))
    })?;
    let element = data_type.bytes();
    ensure(row_stride.is_multiple_of(element), || {
        let required = format_args!("a multiple of the {element} bytes of an element");
        Error::argument("row_stride", row_stride, required).with("data_type", data_type.name())
    })
}

/// Returns the bytes of one tensor of `shape`, without gaps between its rows. Returns `Err` of kind `InvalidArgument` unless it
/// has 1 to 31 dimensions, each above zero, and less than 2^63 bytes in total.
pub fn tensor_bytes(shape: &[i64], data_type: DataType) -> Result<u64> {
    let invalid = |required: &str| Error::argument("shape", format_args!("{shape:?}"), required);
    if shape.is_empty() || shape.len() > Geometry::MAX_RANK {
        return Err(invalid("a list of 1 to 31 dimensions"));
    }
    let mut bytes = data_type.bytes();
    for &dim in shape {
        let Some(dim) = u64::try_from(dim).ok().filter(|&dim| dim > 0) else {
            return Err(invalid("a list of dimensions above 0"));
        };
        bytes = bytes.checked_mul(dim).ok_or_else(|| too_large(shape))?;
    }
    if i64::try_from(bytes).is_err() {
        return Err(too_large(shape));
    }
    Ok(bytes)
}

fn too_large(shape: &[i64]) -> Error {
    Error::argument("shape", format_args!("{shape:?}"), "a shape of less than 2^63 bytes in all tensors")
}
