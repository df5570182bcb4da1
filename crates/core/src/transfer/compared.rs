//! The blocks of a cache of this engine that are compared with their source, the result, and the error that names those that differ.

use crate::cache::Cache;
use crate::error::{Error, ErrorKind, Result};
use crate::fallible;
use crate::memory::random;
use crate::model::{CacheKind, Verify};
use crate::plan::{BlockSizes, Piece, Side};

/// Most bytes of a slot that have one checksum. Caches of blocks have one for each block.
const SLOT_PIECE: u64 = 64 << 10;
/// Most blocks that an error lists.
const SHOWN: usize = 8;

/// Name of these lists in out-of-memory errors.
pub(super) const BLOCKS: &str = "the blocks that are compared";

/// Result of a comparison.
#[derive(Default)]
pub(super) struct Compared {
    /// Number of blocks that were compared.
    pub(super) checked: usize,
    /// The blocks that differ.
    pub(super) different: Vec<Piece>,
}

impl Compared {
    /// Adds blocks, and whether both sides have the same bytes of each.
    pub(super) fn add(&mut self, blocks: impl Iterator<Item = Piece>, equal: &[bool]) -> Result<()> {
        self.checked += equal.len();
        for (block, _) in blocks.zip(equal).filter(|&(_, equal)| !equal) {
            fallible::push(BLOCKS, &mut self.different, block)?;
        }
        Ok(())
    }
}

/// Returns how pieces are cut into blocks of `cache`, which is the end `local` of a plan.
pub(super) fn block_sizes(cache: &Cache, local: Side) -> BlockSizes {
    let rows = cache.geometry().row_sizes();
    let most = if cache.kind() == CacheKind::Blocks { rows.bytes() } else { SLOT_PIECE };
    BlockSizes { local, rows, most }
}

/// Returns the random number of a sample; `None` if all blocks are compared.
pub(super) fn sample(verify: Verify) -> Result<Option<u64>> {
    if verify == Verify::Sample { Ok(Some(u64::from_ne_bytes(random()?))) } else { Ok(None) }
}

/// Returns the error for the blocks `different` among `checked` ones. It names the first ones by their position in `cache`,
/// which is the end `local` of the plan.
pub(super) fn differ(cache: &Cache, local: Side, checked: usize, different: &[Piece]) -> Error {
    let rows = cache.geometry().row_sizes();
    let of_blocks = cache.kind() == CacheKind::Blocks;
    let mut first: Vec<(u64, u64)> = Vec::with_capacity(SHOWN + 1);
    for block in different {
        let position = (block.start(local), block.len);
        first.insert(first.partition_point(|known| *known < position), position);
        first.truncate(SHOWN);
    }
    let shown = first.iter().map(|&(start, len)| {
        let (row, at) = (rows.row_of(start), rows.offset_in_row(start));
        if of_blocks { row.to_string() } else { format!("{row}[{at}..{}]", at + len) }
    });
    let mut listed = shown.collect::<Vec<_>>().join(", ");
    if different.len() > SHOWN {
        listed += ", …";
    }
    let text = format!("{} of {checked} checked blocks differ from their source", different.len());
    Error::new(ErrorKind::VerifyFailed, text)
        .with("cache_id", cache.id())
        .with(if of_blocks { "blocks" } else { "slots" }, listed)
        .with("different", different.len())
}
