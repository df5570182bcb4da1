//! The layout of the keys and values in a cache: which token, head and element each byte of a row belongs to.

use std::fmt;
use std::ops::Range;

use super::cache_desc::{DataType, Geometry};
use crate::error::{Error, Result, ensure};

/// The order of the dimensions of a block, outermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenOrder {
    /// `[tokens, heads, head_dim]`.
    Nhd,
    /// `[heads, tokens, head_dim]`.
    Hnd,
}

/// Where the keys and the values of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvPlanes {
    /// In two tensors: tensor `2·l` has the keys of the cache's `l`-th layer, and tensor `2·l + 1` its values.
    Separate,
    /// In one tensor: each row has the keys of its tokens, and then their values.
    KThenV,
    /// In one tensor: each row has one latent vector for each token (MLA), the same in every rank.
    Latent,
}

/// What the rows of a cache mean: each row is a block of tokens. The values may be invalid;
/// [`KvGeometry::new`] checks them.
///
/// The heads and layers are those of the whole model, so that caches of several ranks can be compared.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// Number of tokens in a block.
    pub tokens_per_block: u32,
    /// The key-value heads that the cache holds.
    pub heads: Range<u32>,
    /// Number of key-value heads of the model.
    pub total_heads: u32,
    /// Number of elements of one head of one token.
    pub head_dim: u32,
    /// Order of tokens and heads in a block.
    pub order: TokenOrder,
    /// Where the keys and the values are.
    pub kv: KvPlanes,
    /// The layers of the model that the cache holds.
    pub layers: Range<u32>,
}

impl KvLayout {
    /// Returns `Err` of kind `InvalidArgument` unless every range and count is valid by itself.
    fn check_ranges(&self) -> Result<()> {
        let KvLayout { heads, layers, .. } = self;
        for (name, value) in [
            ("tokens_per_block", self.tokens_per_block),
            ("total_heads", self.total_heads),
            ("head_dim", self.head_dim),
        ] {
            ensure(value > 0, || Error::argument(name, value, "above 0"))?;
        }
        ensure(!heads.is_empty() && heads.end <= self.total_heads, || {
            let required = format_args!("a range of at least one head inside 0..{}", self.total_heads);
            Error::argument("heads", format_args!("{heads:?}"), required)
        })?;
        ensure(self.kv != KvPlanes::Latent || (heads, self.total_heads) == (&(0..1), 1), || {
            let value = format_args!("{heads:?} of {}", self.total_heads);
            Error::argument("heads", value, "0..1 of 1 in a latent layout")
        })?;
        ensure(!layers.is_empty(), || {
            Error::argument("layers", format_args!("{layers:?}"), "a range of at least one layer")
        })
    }

    /// Returns the number of tensors that hold one layer.
    pub fn tensors_per_layer(&self) -> u32 {
        if self.kv == KvPlanes::Separate { 2 } else { 1 }
    }

    /// Returns the number of planes in one row: 2 if a row has keys and values.
    pub fn planes_per_row(&self) -> u32 {
        if self.kv == KvPlanes::KThenV { 2 } else { 1 }
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvLayout { tokens_per_block, heads, total_heads, head_dim, order, kv, layers } = self;
        write!(f, "{tokens_per_block} tokens, heads {heads:?} of {total_heads}, head_dim {head_dim}, ")?;
        write!(f, "{order:?}, {kv:?}, layers {layers:?}")
    }
}

/// A layout that fits its cache, with the sizes that follow. A value exists only for valid sizes: no position
/// inside a tensor reaches 2^63.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    layout: KvLayout,
    rows: u64,
    row_stride: u64,
    element_bytes: u64,
    plane_bytes: u64,
}

impl KvGeometry {
    /// Checks `layout` against the sizes of its cache. Returns `Err` of kind `InvalidArgument` unless a row has
    /// as many bytes as a block, and the cache has the tensors of all layers.
    pub fn new(layout: KvLayout, geometry: &Geometry, data_type: DataType) -> Result<Self> {
        layout.check_ranges()?;
        let tensors = u64::from(layout.tensors_per_layer()) * layout.layers.len() as u64;
        ensure(u64::from(geometry.num_tensors()) == tensors, || {
            let layers = format_args!("{tensors} for layers {:?} ({:?})", layout.layers, layout.kv);
            Error::argument("num_tensors", geometry.num_tensors(), layers)
        })?;
        let plane_bytes = [layout.tokens_per_block, layout.head_dim]
            .into_iter()
            .try_fold(data_type.bytes() * layout.heads.len() as u64, |bytes, factor| {
                bytes.checked_mul(factor.into())
            });
        let row_bytes = plane_bytes.and_then(|bytes| bytes.checked_mul(u64::from(layout.planes_per_row())));
        let (Some(plane_bytes), Some(row_bytes)) = (plane_bytes, row_bytes) else {
            return Err(Error::argument(
                "layout",
                &layout,
                "a layout whose blocks have less than 2^64 bytes",
            ));
        };
        ensure(geometry.row_bytes() == row_bytes, || {
            let required = format_args!("{row_bytes}, the bytes of a block");
            Error::argument("row_bytes", geometry.row_bytes(), required)
                .with("layout", &layout)
                .with("data_type", data_type.name())
        })?;
        let (rows, element_bytes) = (geometry.rows(), data_type.bytes());
        Ok(KvGeometry { layout, rows, row_stride: row_bytes, element_bytes, plane_bytes })
    }

    /// Sets the bytes from the start of one row to the start of the next, for padded pages. Returns `Err` of kind
    /// `InvalidArgument` if rows would overlap or a tensor would have 2^63 bytes or more.
    pub fn with_row_stride(self, row_stride: u64) -> Result<Self> {
        let row_bytes = self.row_bytes();
        ensure(row_stride >= row_bytes, || {
            Error::argument("row_stride", row_stride, format_args!("at least the {row_bytes} bytes of a row"))
        })?;
        let end = row_stride.checked_mul(self.rows).filter(|&end| i64::try_from(end).is_ok());
        ensure(end.is_some(), || {
            let required = format_args!("small enough for {} rows in less than 2^63 bytes", self.rows);
            Error::argument("row_stride", row_stride, required)
        })?;
        Ok(KvGeometry { row_stride, ..self })
    }

    /// Returns the layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the number of blocks in one tensor.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the bytes of one block in one tensor, without padding.
    pub fn row_bytes(&self) -> u64 {
        self.plane_bytes * u64::from(self.layout.planes_per_row())
    }

    /// Returns the bytes from the start of one block to the start of the next.
    pub fn row_stride(&self) -> u64 {
        self.row_stride
    }

    /// Returns the bytes of one element.
    pub fn element_bytes(&self) -> u64 {
        self.element_bytes
    }

    /// Returns the bytes of the keys, or of the values, of one block.
    pub fn plane_bytes(&self) -> u64 {
        self.plane_bytes
    }

    /// Returns the bytes of one head of one token.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.layout.head_dim) * self.element_bytes
    }

    /// Returns the bytes from one token of a block to the next.
    pub fn token_step(&self) -> u64 {
        match self.layout.order {
            TokenOrder::Nhd => self.layout.heads.len() as u64 * self.head_bytes(),
            TokenOrder::Hnd => self.head_bytes(),
        }
    }

    /// Returns the bytes from one head of a block to the next.
    pub fn head_step(&self) -> u64 {
        match self.layout.order {
            TokenOrder::Nhd => self.head_bytes(),
            TokenOrder::Hnd => u64::from(self.layout.tokens_per_block) * self.head_bytes(),
        }
    }
}
