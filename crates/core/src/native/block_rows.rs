//! Blocks of a cache, and the part of them that moves.

use std::fmt::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use super::cache_names::{OwnCache, PeerCache, RowsCache};
use crate::error::{Error, Result, ensure};

/// Blocks of a cache, in order, and optionally only some layers, tokens or bytes of them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct BlockRows {
    cache: RowsCache,
    /// Shared by all parts of these rows, because a list may be long.
    blocks: Arc<Vec<i64>>,
    part: RowsPart,
}

/// The part of every block that moves. `None` stands for all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct RowsPart {
    /// Layers of the cache, counted from 0.
    pub layers: Option<Range<u64>>,
    /// Tokens of the sequence that the blocks hold in their order.
    pub tokens: Option<Range<u64>>,
    /// Bytes of every block in each tensor.
    pub bytes: Option<Range<u64>>,
}

impl BlockRows {
    /// Returns whole blocks. The calls that use the rows check whether the cache has them.
    pub fn new(cache: RowsCache, blocks: Vec<i64>) -> Self {
        BlockRows { cache, blocks: Arc::new(blocks), part: RowsPart::default() }
    }

    /// Returns the same blocks, of which `part` moves. Returns `Err(InvalidArgument)` if a range of it is empty, and if it has tokens
    /// and bytes.
    pub fn with_part(&self, part: RowsPart) -> Result<Self> {
        let ranges = [
            ("layers", &part.layers, u64::from(u32::MAX)),
            ("tokens", &part.tokens, i64::MAX.cast_unsigned()),
            ("bytes", &part.bytes, i64::MAX.cast_unsigned()),
        ];
        for (name, range, most) in ranges {
            let Some(range) = range else { continue };
            ensure(range.start < range.end && range.end <= most, || {
                let required =
                    format!("a range from 0 or above that is not empty and ends at {most} at most");
                Error::argument(name, format_args!("{range:?}"), required)
            })?;
        }
        if let (Some(tokens), Some(bytes)) = (&part.tokens, &part.bytes) {
            let required = format!("left out beside tokens={tokens:?}");
            return Err(Error::argument("bytes", format_args!("{bytes:?}"), required));
        }
        Ok(BlockRows { cache: self.cache.clone(), blocks: self.blocks.clone(), part })
    }

    /// Returns the cache.
    pub fn cache(&self) -> &RowsCache {
        &self.cache
    }

    /// Returns the blocks.
    pub fn blocks(&self) -> &[i64] {
        &self.blocks
    }

    /// Returns the part of every block that moves.
    pub fn part(&self) -> &RowsPart {
        &self.part
    }
}

impl OwnCache {
    /// Selects blocks. The calls that use the rows check whether the cache has them.
    pub fn rows(self: &Arc<Self>, blocks: impl Into<Vec<i64>>) -> BlockRows {
        BlockRows::new(RowsCache::Own(self.clone()), blocks.into())
    }
}

impl PeerCache {
    /// Selects blocks. The calls that use the rows check whether the cache has them.
    pub fn rows(self: &Arc<Self>, blocks: impl Into<Vec<i64>>) -> BlockRows {
        BlockRows::new(RowsCache::Peer(self.clone()), blocks.into())
    }
}

impl fmt::Display for BlockRows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Number of blocks that are shown of a list.
        const SHOWN: usize = 8;
        let (shown, RowsPart { layers, tokens, bytes }) = (self.blocks.len().min(SHOWN), &self.part);
        write!(f, "<Rows of '{}'", self.cache.name())?;
        f.write_str(if matches!(self.cache, RowsCache::Peer(_)) { " of a peer: " } else { ": " })?;
        if self.blocks.len() > SHOWN {
            write!(f, "{} ", self.blocks.len())?;
        }
        f.write_str("blocks [")?;
        for (at, block) in self.blocks[..shown].iter().enumerate() {
            write!(f, "{}{block}", if at == 0 { "" } else { ", " })?;
        }
        f.write_str(if self.blocks.len() > SHOWN { ", ...]" } else { "]" })?;
        for (name, range) in [("layers", layers), ("tokens", tokens), ("bytes", bytes)] {
            if let Some(range) = range {
                write!(f, ", {name} {} to {}", range.start, range.end - 1)?;
            }
        }
        f.write_char('>')
    }
}
