//! Conversions between the engine's caches and the records that describe them to peers.

use std::sync::Arc;

use super::messages::{EntryVersion, WireCache, WireLayout, WireLocation, WireSizes};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{
    CacheDesc, CacheId, CacheKind, CacheLayout, DataType, EqualTensors, Geometry, KvGeometry, KvLayout,
    KvPlanes, MixedSizes, Placement, TensorDesc, TokenOrder,
};

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
            mixed: Vec::new(),
            granted: Vec::new(),
        }
    }

    /// Returns the sizes of all tensors of the remote cache if they differ. `Err(NotLinked)` if they are invalid.
    pub fn mixed_sizes(&self) -> Result<Option<Arc<MixedSizes>>> {
        let [first, ..] = &self.mixed[..] else { return Ok(None) };
        let rows = i64::try_from(self.rows).map_err(|_| self.invalid("invalid sizes"))?;
        // Layouts describe equal tensors.
        let equal = (first.row_bytes, first.row_stride) == (self.row_bytes, self.row_stride);
        if !equal || self.layout.is_some() {
            return Err(self.invalid("tensors that differ, and other sizes or a layout"));
        }
        let runs = self.mixed.iter().map(|run| {
            let row_bytes = i64::try_from(run.row_bytes).unwrap_or(0);
            let (shape, row_stride) = (vec![rows, row_bytes], Some(run.row_stride));
            (run.first, TensorDesc { count: 1, shape, data_type: DataType::Uint8, row_stride })
        });
        let sizes = MixedSizes::of_runs(self.num_tensors, runs);
        sizes.map(|sizes| Some(Arc::new(sizes))).map_err(|error| self.invalid("invalid sizes").because(error))
    }

    /// Returns the KV layout of the remote cache, whose sizes are `geometry`. `Err(NotLinked)` if it is invalid.
    pub fn kv_geometry(&self, geometry: &Geometry) -> Result<Option<KvGeometry>> {
        let Some(layout) = &self.layout else { return Ok(None) };
        let invalid = || self.invalid("an invalid layout");
        let data_type = DataType::from_value(layout.data_type.into()).ok_or_else(invalid)?;
        let layout = KvLayout::try_from(layout).map_err(|()| invalid())?;
        let checked = KvGeometry::new(layout, geometry, data_type);
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
            tensors: Vec::new(),
        };
        let geometry = Geometry::new(&desc).map_err(|error| invalid("invalid sizes").because(error))?;
        let kind = if self.blocks { CacheKind::Blocks } else { CacheKind::Batch };
        Ok(CacheLayout { geometry, kind, placement })
    }
}

impl WireSizes {
    /// Returns the runs of tensors that differ. `Err(OutOfMemory)` if the list cannot be allocated.
    pub fn list(sizes: &MixedSizes) -> Result<Vec<WireSizes>> {
        let run = |run: &EqualTensors| {
            let (first, sizes) = (run.first, run.geometry);
            WireSizes { first, row_bytes: sizes.row_bytes(), row_stride: sizes.row_stride() }
        };
        fallible::collect("the sizes of tensors", sizes.runs().iter().map(run))
    }
}

impl From<&KvGeometry> for WireLayout {
    fn from(geometry: &KvGeometry) -> Self {
        let layout = geometry.layout();
        WireLayout {
            data_type: geometry.data_type() as u8,
            tokens_per_block: layout.tokens_per_block,
            heads: layout.heads.clone(),
            total_heads: layout.total_heads,
            head_dim: layout.head_dim,
            order: layout.order as u8,
            planes: layout.kv as u8,
            layers: layout.layers.clone(),
            model: layout.model.clone(),
        }
    }
}

impl TryFrom<&WireLayout> for KvLayout {
    /// An unknown number.
    type Error = ();

    fn try_from(wire: &WireLayout) -> Result<Self, ()> {
        Ok(KvLayout {
            tokens_per_block: wire.tokens_per_block,
            heads: wire.heads.clone(),
            total_heads: wire.total_heads,
            head_dim: wire.head_dim,
            order: *TokenOrder::ALL.get(usize::from(wire.order)).ok_or(())?,
            kv: *KvPlanes::ALL.get(usize::from(wire.planes)).ok_or(())?,
            layers: wire.layers.clone(),
            model: wire.model.clone(),
        })
    }
}
