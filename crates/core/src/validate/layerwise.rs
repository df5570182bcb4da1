//! The layer-wise asynchronous transfer: arguments → what of each layer moves, and where to (contract §8.1, seed
//! `transfer_cache_async.md`).
//!
//! Not for: waiting for layers (`task`), or what only the peer knows of its caches (`landing`).

use super::{LayerRange, Side};
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::model::{CacheKind, ClusterId, Geometry, Name, Placement};

/// The lists of a transfer, as given; an empty one was not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerwiseArgs {
    /// Blocks read.
    pub src_blocks: Vec<u64>,
    /// Blocks written.
    pub dst_blocks: Vec<u64>,
    /// Bytes of a block that is written, in one tensor.
    pub dst_block_bytes: Option<u64>,
    /// Tensors of one layer.
    pub tensors_per_layer: u32,
}

/// What of each layer moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LayerRows {
    /// The batch slot that the destination names. A blocks cache is one slot of one block here, its first
    /// (contract §17).
    Slot,
    /// Blocks into blocks, pair by pair.
    Blocks {
        /// Read.
        src: Vec<u64>,
        /// Written.
        dst: Vec<u64>,
    },
    /// That batch slot, cut into blocks from its start.
    SlotToBlocks {
        /// Written.
        dst: Vec<u64>,
        /// Bytes of each, in one tensor.
        block_bytes: u64,
    },
}

/// One destination: a config of the public API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Who owns it.
    pub cluster: ClusterId,
    /// What of its memory is written.
    pub target: Target,
    /// Layers read.
    pub src_layers: LayerRange,
    /// The batch slot read.
    pub src_row: u32,
}

/// Memory of a peer that layers go to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Where each tensor starts, in the peer's process: those of the first layer first.
    Addresses(Vec<u64>),
    /// A cache of the peer.
    Cache {
        /// By this name.
        name: Name,
        /// Where the first layer goes; the others follow.
        first_layer: u32,
    },
}

/// What of each layer moves (contract §8.1, rows 2, 6 to 8, 11 and 12, in this order; each is a function of its own
/// besides, for those who have other checks in between).
pub fn layerwise(local: Side, args: &LayerwiseArgs) -> Result<LayerRows> {
    source_placement(local.placement)?;
    block_lists(args)?;
    block_bytes_alone(args)?;
    whole_layers(local.geometry, args.tensors_per_layer)?;
    let copied = |blocks: &[u64]| fallible::copied(crate::plan::REQUEST, blocks);
    let (src, dst) = (copied(&args.src_blocks)?, copied(&args.dst_blocks)?);
    if !src.is_empty() {
        equal_blocks(local.geometry, args.dst_block_bytes)?;
        return Ok(LayerRows::Blocks { src, dst });
    }
    if local.kind == CacheKind::Blocks && !dst.is_empty() {
        let text = "src_cache is a blocks cache, and src_block_indices were not given";
        return Err(Error::new(ErrorKind::InvalidArgument, text));
    }
    match args.dst_block_bytes {
        Some(block_bytes) if !dst.is_empty() => Ok(LayerRows::SlotToBlocks { dst, block_bytes }),
        _ => Ok(LayerRows::Slot),
    }
}

/// Row 2: layers are sent from device memory.
pub fn source_placement(placement: Placement) -> Result<()> {
    if placement == Placement::Device {
        return Ok(());
    }
    let text = "src_cache is in host memory; layers are sent from device memory only";
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Rows 6 to 8: which of the lists go together, and with a block size.
pub fn block_lists(args: &LayerwiseArgs) -> Result<()> {
    let refused = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
    match (args.src_blocks.len(), args.dst_blocks.len()) {
        (0, 0) => Ok(()),
        (0, dst) if args.dst_block_bytes.is_none() => refused(format!(
            "dst_block_memory_size was not given, and dst_block_indices has {dst} entries for a source without blocks"
        )),
        (0, _) => Ok(()),
        (src, 0) => refused(format!(
            "transfer from blocks to cache is not supported: src_block_indices has {src} entries, dst_block_indices none"
        )),
        (src, dst) if src == dst => Ok(()),
        (src, dst) => refused(format!("src_block_indices has {src} entries and dst_block_indices {dst}")),
    }
}

/// Row 11: a block size says nothing without blocks; 0 is none (seed `transfer_cache_async.md`).
pub fn block_bytes_alone(args: &LayerwiseArgs) -> Result<()> {
    match args.dst_block_bytes {
        Some(bytes @ 1..) if args.dst_blocks.is_empty() => {
            Err(Error::argument("dst_block_memory_size", bytes, "None or 0 without dst_block_indices"))
        }
        _ => Ok(()),
    }
}

/// Row 12: every tensor belongs to a layer. How many layers that are.
pub fn whole_layers(local: Geometry, tensors_per_layer: u32) -> Result<u32> {
    super::tensors_per_layer(tensors_per_layer)?;
    let tensors = local.num_tensors();
    if tensors.is_multiple_of(tensors_per_layer) {
        return Ok(tensors / tensors_per_layer);
    }
    let allowed = format!("a multiple of tensor_num_per_layer, {tensors_per_layer}");
    Err(Error::argument("num_tensors", tensors, allowed))
}

/// §8.2: blocks go into blocks of their own size; 0 or nothing stands for it.
fn equal_blocks(local: Geometry, given: Option<u64>) -> Result<()> {
    match given {
        Some(bytes @ 1..) if bytes != local.row_bytes() => {
            let allowed = format!("None, 0 or the size of a block of src_cache, {}", local.row_bytes());
            Err(Error::argument("dst_block_memory_size", bytes, allowed))
        }
        _ => Ok(()),
    }
}

/// A blocks cache without lists is one slot of one block, and goes to the first slot or block of the remote cache.
fn one_block(to: &Destination) -> Result<()> {
    match to.target {
        Target::Cache { name: Name::Row { row: row @ 1.., .. }, .. } => {
            let text = format!(
                "batch_index={row} of cache_key must be 0: src_cache is a blocks cache without src_block_indices, \
                 which is one slot of one block"
            );
            Err(Error::new(ErrorKind::InvalidArgument, text).with("cluster", to.cluster))
        }
        _ => Ok(()),
    }
}

/// Rows 13 and 13a: what one destination reads, and whether there are as many addresses as tensors.
pub fn destination(local: Side, args: &LayerwiseArgs, to: &Destination) -> Result<()> {
    let (row, range) = (to.src_row, to.src_layers);
    let blocks = !args.src_blocks.is_empty();
    if (blocks || local.kind == CacheKind::Blocks) && row != 0 {
        let text = format!("src_batch_index {row} != 0 while src is blocks");
        return Err(Error::new(ErrorKind::InvalidArgument, text).with("cluster", to.cluster));
    }
    if local.kind == CacheKind::Blocks && !blocks {
        one_block(to)?;
    }
    let layers = whole_layers(local.geometry, args.tensors_per_layer)?;
    if range.end <= range.first || range.end > layers {
        let (value, allowed) =
            (format!("{}..{}", range.first, range.end), format!("within 0..{layers}, at least one layer"));
        return Err(Error::argument("src_layer_range", value, allowed).with("cluster", to.cluster));
    }
    if let Target::Addresses(addrs) = &to.target {
        let needed = u64::from(range.end - range.first) * u64::from(args.tensors_per_layer);
        if addrs.len() as u64 != needed {
            let allowed = format!("{needed}, for {} layers of src_layer_range", range.end - range.first);
            return Err(Error::argument("len(dst_addrs)", addrs.len(), allowed).with("cluster", to.cluster));
        }
    }
    let rows = local.geometry.rows();
    if !blocks && u64::from(row) >= rows {
        let text = format!("src_batch_index {row} out of range: [0, {rows})");
        return Err(Error::new(ErrorKind::InvalidArgument, text).with("cluster", to.cluster));
    }
    Ok(())
}
