//! The layer-wise asynchronous transfer: arguments → what of each layer moves, and where to (python-api.md §8.1, seed
//! `transfer_cache_async.md`).
//!
//! Not for: waiting for layers (`task`), or what only the peer knows of its caches (`landing`).

use super::LayerRange;
use crate::id::ClusterId;
use crate::keys::Name;

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
    /// The batch slot that the destination names.
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

/// STUB
pub fn layerwise(_near: super::Side, args: &LayerwiseArgs) -> crate::error::Result<LayerRows> {
    Ok(match (args.src_blocks.is_empty(), args.dst_blocks.is_empty()) {
        (_, true) => LayerRows::Slot,
        (true, false) => LayerRows::SlotToBlocks {
            dst: args.dst_blocks.clone(),
            block_bytes: args.dst_block_bytes.unwrap_or(0),
        },
        (false, false) => LayerRows::Blocks { src: args.src_blocks.clone(), dst: args.dst_blocks.clone() },
    })
}
/// STUB
pub fn destination(_near: super::Side, _args: &LayerwiseArgs, _to: &Destination) -> crate::error::Result<()> {
    Ok(())
}
