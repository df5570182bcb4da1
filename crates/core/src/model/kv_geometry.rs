//! The sizes of a cache whose rows have a KV layout: how far apart its tokens, heads and planes are.

use std::fmt;
use std::sync::Arc;

use super::cache_desc::{CacheDesc, DataType, Geometry};
use super::kv_layout::{KvLayout, TokenOrder};
use crate::error::{Error, Result, ensure};

/// A layout that fits its cache, with the sizes that follow. A value exists only for valid sizes: no position
/// inside a tensor reaches 2^63.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    layout: KvLayout,
    geometry: Geometry,
    data_type: DataType,
    plane_bytes: u64,
}

impl KvGeometry {
    /// Checks `layout` against the sizes of its cache. Returns `Err` of kind `InvalidArgument` unless a row has
    /// as many bytes as a block, and the cache has the tensors of all layers.
    pub fn new(layout: KvLayout, geometry: &Geometry, data_type: DataType) -> Result<Self> {
        layout.check_ranges()?;
        let tensors = layout.num_tensors();
        ensure(u64::from(geometry.num_tensors()) == tensors, || {
            let layers = format_args!("{tensors} for layers {:?} (kv {})", layout.layers, layout.kv.name());
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
        Ok(KvGeometry { layout, geometry: *geometry, data_type, plane_bytes })
    }

    /// Returns the layout of a cache with these sizes, if its description has one. Returns `Err` as [`new`](Self::new).
    pub(crate) fn of(desc: &CacheDesc, geometry: &Geometry) -> Result<Option<Arc<KvGeometry>>> {
        let layout = desc.kv_layout.as_deref();
        layout
            .map(|layout| KvGeometry::new(layout.clone(), geometry, desc.data_type).map(Arc::new))
            .transpose()
    }

    /// Returns the layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the sizes of the cache. A row is a block.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Returns the type of the elements.
    pub fn data_type(&self) -> DataType {
        self.data_type
    }

    /// Returns the bytes of the keys, or of the values, of one block.
    pub fn plane_bytes(&self) -> u64 {
        self.plane_bytes
    }

    /// Returns the bytes of one head of one token.
    pub fn head_bytes(&self) -> u64 {
        u64::from(self.layout.head_dim) * self.data_type.bytes()
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

impl fmt::Display for KvGeometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", self.data_type.name(), self.layout)
    }
}
