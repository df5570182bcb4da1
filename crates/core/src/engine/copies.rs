//! Copies and swaps between caches of this engine.

use std::sync::Arc;

use super::operation::{Operation, Prepared};
use super::{DataDist, End};
use crate::cache::Cache;
use crate::config::Mode;
use crate::copy::Staging;
use crate::error::Result;
use crate::memory;
use crate::model::{Placement, SubRow, Verify, Words};
use crate::plan::Moves;
use crate::stats::Op;
use crate::transfer::LocalCopy;
use crate::validate::{self, CopyArgs};

/// Calls with fewer blocks skip the check whether there is memory for their lists.
const MANY_BLOCKS: usize = 1 << 20;
/// Bytes per block that the lists of a call take while it runs: the request, the plan and the rows to pin
/// (`lists_of_a_call_take_what_is_asked_for`).
const BYTES_OF_A_BLOCK: u64 = 112;

impl DataDist {
    /// Copies one range of one batch slot, the same range in every tensor (contract §7.9).
    pub fn copy_cache(&self, dst: &End, src: &End, args: CopyArgs) -> Operation<'_> {
        Operation::new(self, Op::CopyCache, || {
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let moves = match self.mode() {
                Mode::CacheManager => validate::copy_cache(src.layout(), dst.layout(), args),
                Mode::KvCacheManager => validate::copy_on_device(src.layout(), dst.layout(), args),
            }?;
            self.prepared(Op::CopyCache, (src, dst), moves, Staging::DEFAULT)
        })
    }

    /// Does `CopyKvCache` of the original's documentation (`CopyKvCache.md`): as
    /// [`copy_cache`](Self::copy_cache), but only from device to device or host, and with the source as the
    /// first argument.
    pub fn copy_kv_cache(&self, src: &End, dst: &End, args: CopyArgs) -> Operation<'_> {
        Operation::new(self, Op::CopyCache, || {
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let moves = validate::copy_kv_cache(src.layout(), dst.layout(), args)?;
            self.prepared(Op::CopyCache, (src, dst), moves, Staging::DEFAULT)
        })
    }

    /// Copies blocks within one cache, with the result of copying the pairs in the given order (contract
    /// §7.10). Without pairs, it does nothing.
    pub fn copy_blocks(&self, cache: &End, pairs: &[(i64, i64)]) -> Operation<'_> {
        Operation::new(self, Op::CopyBlocks, || {
            room_for_lists(pairs.len())?;
            let src = self.resolve(cache)?;
            let moves = match self.mode() {
                Mode::CacheManager => validate::copy_blocks(src.layout(), pairs),
                Mode::KvCacheManager => validate::copy_rows(src.layout(), pairs),
            }?;
            self.prepared(Op::CopyBlocks, (src.clone(), src), moves, Staging::DEFAULT)
        })
    }

    /// Copies every block of `src_blocks` to its counterpart in each list of `dst_blocks_list` (contract, C++
    /// §4, `CopyKvBlocks`).
    pub fn copy_kv_blocks(
        &self,
        src: &End,
        dst: &End,
        src_blocks: &[u64],
        dst_blocks_list: &[&[u64]],
    ) -> Operation<'_> {
        Operation::new(self, Op::CopyBlocks, || {
            room_for_lists(src_blocks.len().saturating_mul(dst_blocks_list.len()))?;
            let pairs = validate::cpp::block_lists(src_blocks, dst_blocks_list)?;
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let moves = validate::copy_kv_blocks(src.layout(), dst.layout(), &pairs)?;
            self.prepared(Op::CopyBlocks, (src, dst), moves, Staging::DEFAULT)
        })
    }

    /// Copies blocks between a host cache and a device cache; the placements give the direction (contract
    /// §7.11). Without pairs, it does nothing.
    pub fn swap_blocks(&self, src: &End, dst: &End, pairs: &[(i64, i64)]) -> Operation<'_> {
        let (src, dst) = (self.resolve(src), self.resolve(dst));
        // A call that names an unknown cache is counted as well, by the end that is known.
        let into_device = match (&src, &dst) {
            (Ok(src), _) => src.placement() == Placement::Host,
            (Err(_), Ok(dst)) => dst.placement() == Placement::Device,
            (Err(_), Err(_)) => false,
        };
        let op = if into_device { Op::SwapIn } else { Op::SwapOut };
        Operation::new(self, op, || {
            let (src, dst) = (src?, dst?);
            room_for_lists(pairs.len())?;
            let moves = match self.mode() {
                Mode::CacheManager => validate::swap_blocks(src.layout(), dst.layout(), pairs),
                Mode::KvCacheManager => validate::swap_rows(src.layout(), dst.layout(), pairs),
            }?;
            let staging = self.swap_staging(&src);
            self.prepared(op, (src, dst), moves, staging)
        })
    }

    /// Copies rows of `src` to rows of `dst`, pair by pair (source, destination); of every row, the bytes of `part`. The caches
    /// may be the same one, and may lie in any memory. Within one cache the result is that of copying the pairs in the given
    /// order; between two, the last pair that writes a row wins. Without pairs, it does nothing. `verify` stands for the
    /// configured one.
    ///
    /// Fails with `InvalidArgument` if the caches have different numbers of tensors or, without a part, different sizes of
    /// rows.
    pub fn copy(
        &self,
        dst: &End,
        src: &End,
        pairs: &[(i64, i64)],
        part: SubRow,
        verify: Option<Verify>,
    ) -> Operation<'_> {
        let (dst, src) = (self.resolve(dst), self.resolve(src));
        let op = match (&dst, &src) {
            (Ok(dst), Ok(src)) => op_between(dst, src),
            _ => Op::CopyBlocks,
        };
        Operation::new(self, op, || self.checked_copy(dst?, src?, pairs, part, verify).map(Prepared::Copy))
    }

    /// Checks a [`copy`](Self::copy).
    pub(super) fn checked_copy(
        &self,
        dst: Arc<Cache>,
        src: Arc<Cache>,
        pairs: &[(i64, i64)],
        part: SubRow,
        verify: Option<Verify>,
    ) -> Result<LocalCopy> {
        room_for_lists(pairs.len())?;
        let moves = if Arc::ptr_eq(&src, &dst) {
            validate::copy_within(Words::NATIVE, src.layout(), pairs, part)
        } else {
            validate::copy_between(Words::NATIVE, src.layout(), dst.layout(), pairs, part)
        }?;
        check_rows(&src, &dst, &moves)?;
        let op = op_between(&dst, &src);
        let staging = if op == Op::CopyBlocks { Staging::DEFAULT } else { self.swap_staging(&src) };
        let verify = verify.unwrap_or(self.resources.config.verify);
        Ok(LocalCopy { op, src, dst, moves, staging, verify })
    }

    /// Returns a copy of the original's API.
    fn prepared(
        &self,
        op: Op,
        (src, dst): (Arc<Cache>, Arc<Cache>),
        moves: Moves,
        staging: Staging,
    ) -> Result<Prepared> {
        check_rows(&src, &dst, &moves)?;
        let verify = self.resources.config.verify;
        Ok(Prepared::Copy(LocalCopy { op, src, dst, moves, staging, verify }))
    }

    /// Returns how bytes pass between host and device memory.
    fn swap_staging(&self, src: &Cache) -> Staging {
        Staging { path: self.resources.config.swap_in, buffer_bytes: src.geometry().row_bytes() }
    }

    pub(super) fn resolve(&self, end: &End) -> Result<Arc<Cache>> {
        match end {
            End::Managed(id) => self.resources.table.find(*id),
            End::Loose(cache) => Ok(cache.clone()),
        }
    }
}

/// Checks that a copy keeps the meaning of the rows, and that a plan can name them.
fn check_rows(src: &Cache, dst: &Cache, moves: &Moves) -> Result<()> {
    validate::local_rows_alike(src.kv().map(|kv| &**kv), dst.kv().map(|kv| &**kv))?;
    moves.pieces.check_numbers()
}

/// Returns as what a copy between two caches is counted.
fn op_between(dst: &Cache, src: &Cache) -> Op {
    match (src.placement(), dst.placement()) {
        (Placement::Host, Placement::Device) => Op::SwapIn,
        (Placement::Device, Placement::Host) => Op::SwapOut,
        _ => Op::CopyBlocks,
    }
}

/// Returns `Err(OutOfMemory)` if the lists of a call with this many blocks need more memory than this process
/// may use now. Calls with few blocks skip the check, because it takes longer than copying them.
pub(super) fn room_for_lists(blocks: usize) -> Result<()> {
    if blocks < MANY_BLOCKS {
        return Ok(());
    }
    memory::refuse_beyond_room("the lists of this call", (blocks as u64).saturating_mul(BYTES_OF_A_BLOCK))
}
