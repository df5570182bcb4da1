//! Checks the arguments of a layer-wise transfer, and returns what moves of each layer and to where
//! (contract §8.1).
//!
//! `layer_destination` has the checks that need the peer's description of its caches; `transfer::task` waits
//! for layers. The checks return `Err(InvalidArgument)` if a rule is broken.

use super::cache_rules::{blocks_cache, caller_name, equal_lists, in_range, not_empty, on_device};
use super::layer_ranges::{self, LayerRange};
use crate::error::{Error, Result};
use crate::fallible;
use crate::model::{CacheKind, CacheLayout, ClusterId, Geometry, Name, RemoteCacheName, Words};

/// The lists of a transfer as the caller gave them. An empty list counts as not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerwiseArgs {
    /// Blocks that are read.
    pub src_blocks: Vec<u64>,
    /// Blocks that are written.
    pub dst_blocks: Vec<u64>,
    /// Bytes of a written block in one tensor.
    pub dst_block_bytes: Option<u64>,
    /// Number of tensors in one layer.
    pub tensors_per_layer: u32,
}

/// The rows of a layer that move, from `src` to `dst`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants describe their fields")]
pub enum LayerRows {
    /// The batch slot that the destination names. A blocks cache counts as one slot of one block, its first
    /// (contract §17).
    Slot,
    /// Blocks into blocks, pair by pair.
    Blocks { src: Vec<u64>, dst: Vec<u64> },
    /// The batch slot that the destination names, cut from its start into blocks of `block_bytes` bytes in each tensor.
    SlotToBlocks { dst: Vec<u64>, block_bytes: u64 },
}

/// One destination of a transfer: a config of the public API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Destination {
    /// Cluster that owns the destination.
    pub cluster: ClusterId,
    /// Memory of the peer that is written.
    pub target: Target,
    /// Layers that are read.
    pub src_layers: LayerRange,
    /// Batch slot that is read.
    pub src_row: u32,
}

/// Memory of a peer into which layers are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Address of each tensor in the peer's process, starting with the tensors of the first layer.
    Addresses(Vec<u64>),
    /// A cache of the peer.
    Cache {
        /// Name of the cache.
        name: RemoteCacheName,
        /// Layer into which the first layer is written; the others follow it. `None` is the same layer of the model if both caches
        /// have layouts, and of the same number otherwise.
        first_layer: Option<u32>,
    },
}

/// Returns which rows of each layer move.
///
/// The checks are rows 2, 6 to 8, 11 and 12 of contract §8.1, in this order. Each is also a function of its
/// own, for callers that make other checks in between.
pub fn layerwise(local: CacheLayout, args: &LayerwiseArgs) -> Result<LayerRows> {
    on_device("src_cache", local.placement)?;
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
        return Err(Error::invalid(text).of_argument("src_block_indices"));
    }
    match args.dst_block_bytes {
        Some(block_bytes) if !dst.is_empty() => Ok(LayerRows::SlotToBlocks { dst, block_bytes }),
        _ => Ok(LayerRows::Slot),
    }
}

/// Returns which rows of each layer move in a push of blocks to blocks, in the words of the caller.
pub fn layers_of_blocks(words: &Words, local: CacheLayout, args: &LayerwiseArgs) -> Result<LayerRows> {
    blocks_cache(words.src.cache, local.kind)?;
    let numbers = |blocks: &[u64]| {
        fallible::collect(crate::plan::REQUEST, blocks.iter().map(|block| block.cast_signed()))
    };
    let (src, dst) = (numbers(&args.src_blocks)?, numbers(&args.dst_blocks)?);
    not_empty(words.dst.blocks, &dst)?;
    not_empty(words.src.blocks, &src)?;
    equal_lists(words, &src, &dst)?;
    in_range(words.src.blocks, &src, local.geometry)?;
    let copied = |blocks: &[u64]| fallible::copied(crate::plan::REQUEST, blocks);
    Ok(LayerRows::Blocks { src: copied(&args.src_blocks)?, dst: copied(&args.dst_blocks)? })
}

/// Rows 6 to 8: checks that the lists and the block size can be combined.
pub fn block_lists(args: &LayerwiseArgs) -> Result<()> {
    let refused = |text: String| Err(Error::invalid(text));
    match (args.src_blocks.len(), args.dst_blocks.len()) {
        (0, 0) => Ok(()),
        (0, dst) if args.dst_block_bytes.is_none() => {
            let text = format!(
                "dst_block_memory_size was not given, and dst_block_indices has {dst} entries for a source without blocks"
            );
            Err(Error::invalid(text).of_argument("dst_block_memory_size"))
        }
        (0, _) => Ok(()),
        (src, 0) => refused(format!(
            "transfer from blocks to cache is not supported: src_block_indices has {src} entries, dst_block_indices none"
        )),
        (src, dst) if src == dst => Ok(()),
        (src, dst) => refused(format!("src_block_indices has {src} entries and dst_block_indices {dst}")),
    }
}

/// Row 11: checks that no block size is given without destination blocks; 0 counts as not given.
pub fn block_bytes_alone(args: &LayerwiseArgs) -> Result<()> {
    match args.dst_block_bytes {
        Some(bytes @ 1..) if args.dst_blocks.is_empty() => {
            Err(Error::argument("dst_block_memory_size", bytes, "None or 0 without dst_block_indices"))
        }
        _ => Ok(()),
    }
}

/// Row 12: checks that every tensor belongs to a layer, and returns the number of layers.
pub fn whole_layers(local: Geometry, tensors_per_layer: u32) -> Result<u32> {
    layer_ranges::tensors_per_layer(Words::ORIGINAL, tensors_per_layer)?;
    let tensors = local.num_tensors();
    if tensors.is_multiple_of(tensors_per_layer) {
        return Ok(tensors / tensors_per_layer);
    }
    let allowed = format!("a multiple of tensor_num_per_layer={tensors_per_layer}");
    Err(Error::argument("num_tensors", tensors, allowed))
}

/// Checks that blocks are copied into blocks of the same size (contract §8.1). 0 or no size stands for that
/// size.
fn equal_blocks(local: Geometry, given: Option<u64>) -> Result<()> {
    match given {
        Some(bytes @ 1..) if bytes != local.row_bytes() => {
            let allowed = format!("None, 0 or the size of a block of src_cache, {}", local.row_bytes());
            Err(Error::argument("dst_block_memory_size", bytes, allowed))
        }
        _ => Ok(()),
    }
}

/// Checks that a blocks cache without lists, which is one slot of one block, goes to the first slot or block
/// of the remote cache.
fn one_block(to: &Destination) -> Result<()> {
    match to.target {
        Target::Cache { name: RemoteCacheName::Name(Name::Row { row: row @ 1.., .. }), .. } => {
            let text = format!(
                "batch_index={row} of cache_key must be 0: src_cache is a blocks cache without src_block_indices, \
                 which is one slot of one block"
            );
            Err(Error::invalid(text).of_argument("cache_key").with("cluster", to.cluster))
        }
        _ => Ok(()),
    }
}

/// Rows 13 and 13a: checks what one destination reads, and that it has one address for each tensor.
pub fn destination(local: CacheLayout, args: &LayerwiseArgs, to: &Destination) -> Result<()> {
    if let Target::Cache { name, .. } = &to.target {
        caller_name(name).map_err(|error| error.with("cluster", to.cluster))?;
    }
    let (row, range) = (to.src_row, to.src_layers);
    let blocks = !args.src_blocks.is_empty();
    if (blocks || local.kind == CacheKind::Blocks) && row != 0 {
        let text = format!("src_batch_index {row} != 0 while src is blocks");
        return Err(Error::invalid(text).of_argument("src_batch_index").with("cluster", to.cluster));
    }
    if local.kind == CacheKind::Blocks && !blocks {
        one_block(to)?;
    }
    let layers = whole_layers(local.geometry, args.tensors_per_layer)?;
    if range.end <= range.first || range.end > layers {
        let (value, allowed) = (
            format!("{}..{}", range.first, range.end),
            format!("a range of at least one layer within 0..{layers}"),
        );
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
        return Err(Error::invalid(text).of_argument("src_batch_index").with("cluster", to.cluster));
    }
    Ok(())
}
