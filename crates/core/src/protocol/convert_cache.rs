//! Conversions between the engine's caches and the records that describe them to peers.

use super::messages::{EntryVersion, WireCache, WireLayout, WireLocation};
use crate::error::{Error, ErrorKind, Result};
use crate::model::{CacheDesc, CacheId, CacheKind, CacheLayout, DataType, Geometry, KvGeometry, Placement};

impl WireCache {
    /// Returns a record of row `row` of a cache with these sizes. Its location is hidden, and peers may not
    /// use it yet.
    pub fn new(at: EntryVersion, cache: CacheId, row: u32, layout: CacheLayout) -> WireCache {
        WireCache {
            at,
            cache,
            row,
            num_tensors: layout.geometry.num_tensors(),
            rows: layout.geometry.rows(),
            row_bytes: layout.geometry.row_bytes(),
            row_stride: layout.geometry.row_stride(),
            blocks: layout.kind == CacheKind::Blocks,
            placement: layout.placement as u8,
            allocated: false,
            accessible: false,
            location: WireLocation::Hidden,
            layout: None,
            granted: Vec::new(),
        }
    }

    /// Returns the KV layout of the remote cache, whose sizes are `geometry`. `Err(NotLinked)` if it is invalid.
    pub fn kv_geometry(&self, geometry: &Geometry) -> Result<Option<KvGeometry>> {
        let Some(WireLayout { data_type, layout }) = &self.layout else { return Ok(None) };
        let invalid = || self.invalid("an invalid layout");
        let data_type = DataType::from_value((*data_type).into()).ok_or_else(invalid)?;
        let checked = KvGeometry::new(layout.clone(), geometry, data_type);
        checked.map(Some).map_err(|error| invalid().because(error))
    }

    fn invalid(&self, what: &str) -> Error {
        let text = format!("the peer described cache {} with {what}", self.cache);
        Error::new(ErrorKind::NotLinked, text)
    }

    /// Returns sizes, kind and placement of the remote cache. `Err(NotLinked)` if they are invalid.
    pub fn layout(&self) -> Result<CacheLayout> {
        let invalid = |what| self.invalid(what);
        let placement = Placement::ALL.into_iter().find(|&known| known as u8 == self.placement);
        let placement = placement.ok_or_else(|| invalid("an unknown placement"))?;
        let dim = |number: u64| i64::try_from(number).map_err(|_| invalid("invalid sizes"));
        let desc = CacheDesc {
            num_tensors: self.num_tensors,
            shape: vec![dim(self.rows)?, dim(self.row_bytes)?],
            data_type: DataType::Uint8,
            placement,
            row_stride: Some(self.row_stride),
            kv_layout: None,
        };
        let geometry = Geometry::new(&desc).map_err(|error| invalid("invalid sizes").because(error))?;
        let kind = if self.blocks { CacheKind::Blocks } else { CacheKind::Batch };
        Ok(CacheLayout { geometry, kind, placement })
    }
}

impl From<&KvGeometry> for WireLayout {
    fn from(geometry: &KvGeometry) -> Self {
        WireLayout { data_type: geometry.data_type() as u8, layout: geometry.layout().clone() }
    }
}
