//! Calls of the C++ class that differ from the Python ones: blocks of caches that have no kind, layer ranges
//! with both ends inclusive, and links that name a local address.
//!
//! `CopyKvCache` is in `mod`, because the original's documentation describes it.

use std::sync::Arc;
use std::time::Duration;

use super::asynchronous::CallOptions;
use super::links::{each, link_failed};
use super::{DataDist, End, RemoteName};
use crate::config::Role;
use crate::copy::Staging;
use crate::error::Result;
use crate::events::Transfer;
use crate::model::{CacheId, ClusterId, Name};
use crate::session::PeerAddress;
use crate::stats::Op;
use crate::validate::{self, CopyArgs, ExtParam, PullRows, PushRows};

/// One batch slot of a peer's cache: `CacheIndex` of the original's documentation (`PushKvCache.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheIndex {
    /// The cluster that owns it.
    pub cluster: ClusterId,
    /// Its cache id at the owner.
    pub cache: CacheId,
    /// The batch slot.
    pub row: u32,
}

impl DataDist {
    /// Pulls one batch slot of a peer's cache (contract, C++ §4, `PullKvCache`).
    pub fn pull_kv_cache(
        &self,
        src: CacheIndex,
        dst: CacheId,
        batch_index: u32,
        size: i64,
        ext: ExtParam,
    ) -> Result<()> {
        validate::copy_size(size)?;
        validate::ext_alone(ext)?;
        self.other(src.cluster)?;
        let local = self.resources.table.find(dst)?;
        let layers = validate::pull_kv_layers(local.layout()?.geometry, ext)?;
        self.pull(src.name(), &End::Managed(dst), &PullRows::slot(batch_index, size), layers)
    }

    /// Pulls blocks of a peer's cache, pair by pair (contract, C++ §4, `PullKvBlocks`).
    pub fn pull_kv_blocks(
        &self,
        src: CacheIndex,
        dst: CacheId,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
    ) -> Result<()> {
        validate::cpp::no_slot("src_cache_index.batch_index", src.row)?;
        let remote = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = PullRows::Rows { remote, local: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        validate::ext_alone(ext)?;
        self.other(src.cluster)?;
        let local = self.resources.table.find(dst)?;
        let layers = validate::pull_kv_layers(local.layout()?.geometry, ext)?;
        self.pull(src.name(), &End::Managed(dst), &rows, layers)
    }

    /// Pushes blocks into a peer's cache, pair by pair (contract, C++ §4, `PushKvBlocks`).
    pub fn push_kv_blocks(
        &self,
        src: CacheId,
        dst: CacheIndex,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
    ) -> Result<()> {
        validate::cpp::no_slot("dst_cache_index.batch_index", dst.row)?;
        let local = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = PushRows::Rows { local, remote: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        validate::push_kv_alone("PushKvBlocks", self.pushing_role(), -1, ext)?;
        self.other(dst.cluster)?;
        let cache = self.resources.table.find(src)?;
        let layers = validate::push_kv_blocks(cache.layout()?, ext)?;
        self.push(&End::Managed(src), dst.name(), &rows, layers)
    }

    /// Does `PushKvCache` of the original's documentation: not in the decoder role, only whole slots, and
    /// layer ranges with both ends inclusive.
    pub fn push_kv_cache(
        &self,
        src: CacheId,
        dst: CacheIndex,
        src_batch_index: u32,
        size: i64,
        ext: ExtParam,
    ) -> Result<()> {
        validate::push_kv_alone("PushKvCache", self.pushing_role(), size, ext)?;
        self.other(dst.cluster)?;
        let local = self.resources.table.find(src)?;
        let layers = validate::push_kv_cache(local.layout()?, ext)?;
        self.push(&End::Managed(src), dst.name(), &PushRows::Slot { local: src_batch_index }, layers)
    }

    /// Copies every block of `src_blocks` to its counterpart in each list of `dst_blocks_list` (contract, C++
    /// §4, `CopyKvBlocks`).
    pub fn copy_kv_blocks(
        &self,
        src: &End,
        dst: &End,
        src_blocks: &[u64],
        dst_blocks_list: &[&[u64]],
    ) -> Result<()> {
        self.resources.stats.timed(Op::CopyBlocks, || {
            let deadline = self.deadline();
            super::room_for_lists(src_blocks.len().saturating_mul(dst_blocks_list.len()))?;
            let pairs = validate::cpp::block_lists(src_blocks, dst_blocks_list)?;
            let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
            let moves = validate::copy_kv_blocks(src.layout()?, dst.layout()?, &pairs)?;
            self.run(Op::CopyBlocks, (src, dst), moves, Staging::DEFAULT, deadline)
        })
    }

    /// Does the same as [`link_clusters`](Self::link_clusters), but every peer must name exactly one local
    /// address (contract §6.8).
    pub fn link_clusters_from(&self, peers: &[PeerAddress], timeout: Duration) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout_in_millis");
        each(peers, deadline, |peer, deadline| {
            let linked = self.resources.stats.timed(Op::Link, || {
                validate::one_address("len(local_ip_infos)", peer.local.len(), "local")?;
                self.links.link(peer, deadline)
            });
            linked.map_err(|error| link_failed(error).with("cluster", peer.cluster))
        })
    }

    /// Returns the role by which pushes are checked. If links work in both directions, the role is only a
    /// label (contract, C++ §7).
    pub(super) fn pushing_role(&self) -> Role {
        if self.resources.config.links.both_ways { Role::Mix } else { self.role() }
    }
}

impl CacheIndex {
    /// Returns the same slot as a [`RemoteName`].
    pub fn name(self) -> RemoteName {
        RemoteName { cluster: self.cluster, name: Name::Row { cache: self.cache, row: self.row } }
    }
}

/// Asynchronous calls for the C++ class. Each has the rules of its synchronous twin, and what the arguments and the
/// local caches decide is an error of the call. Otherwise they are like [`pull_async`](DataDist::pull_async).
impl DataDist {
    /// Starts a [`pull_kv_cache`](Self::pull_kv_cache), which ends within the limit of `options`.
    pub fn pull_kv_cache_async(
        &self,
        src: CacheIndex,
        dst: CacheId,
        batch_index: u32,
        size: i64,
        ext: ExtParam,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        validate::copy_size(size)?;
        validate::ext_alone(ext)?;
        self.other(src.cluster)?;
        let local = self.resources.table.find(dst)?;
        let layers = validate::pull_kv_layers(local.layout()?.geometry, ext)?;
        self.pull_async(src.name(), &End::Managed(dst), PullRows::slot(batch_index, size), layers, options)
    }

    /// Starts a [`pull_kv_blocks`](Self::pull_kv_blocks), which ends within the limit of `options`.
    pub fn pull_kv_blocks_async(
        &self,
        src: CacheIndex,
        dst: CacheId,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        validate::cpp::no_slot("src_cache_index.batch_index", src.row)?;
        let remote = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = PullRows::Rows { remote, local: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        validate::ext_alone(ext)?;
        self.other(src.cluster)?;
        let local = self.resources.table.find(dst)?;
        let layers = validate::pull_kv_layers(local.layout()?.geometry, ext)?;
        self.pull_async(src.name(), &End::Managed(dst), rows, layers, options)
    }

    /// Starts a [`push_kv_blocks`](Self::push_kv_blocks), which ends within the limit of `options`.
    pub fn push_kv_blocks_async(
        &self,
        src: CacheId,
        dst: CacheIndex,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        validate::cpp::no_slot("dst_cache_index.batch_index", dst.row)?;
        let local = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = PushRows::Rows { local, remote: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        validate::push_kv_alone("PushKvBlocks", self.pushing_role(), -1, ext)?;
        self.other(dst.cluster)?;
        let cache = self.resources.table.find(src)?;
        let layers = validate::push_kv_blocks(cache.layout()?, ext)?;
        self.push_async(&End::Managed(src), dst.name(), rows, layers, options)
    }

    /// Starts a [`push_kv_cache`](Self::push_kv_cache), which ends within the limit of `options`.
    pub fn push_kv_cache_async(
        &self,
        src: CacheId,
        dst: CacheIndex,
        src_batch_index: u32,
        size: i64,
        ext: ExtParam,
        options: impl Into<CallOptions>,
    ) -> Result<Arc<Transfer>> {
        validate::push_kv_alone("PushKvCache", self.pushing_role(), size, ext)?;
        self.other(dst.cluster)?;
        let local = self.resources.table.find(src)?;
        let layers = validate::push_kv_cache(local.layout()?, ext)?;
        let rows = PushRows::Slot { local: src_batch_index };
        self.push_async(&End::Managed(src), dst.name(), rows, layers, options)
    }

    /// Starts a [`copy_kv_cache`](Self::copy_kv_cache), which ends within `limit`, by default `sync_kv_timeout`.
    pub fn copy_kv_cache_async(
        &self,
        src: &End,
        dst: &End,
        args: CopyArgs,
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(limit);
        let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
        let moves = validate::copy_kv_cache(src.layout()?, dst.layout()?, args)?;
        self.start_copy(Op::CopyCache, (src, dst), moves, Staging::DEFAULT, deadline)
    }

    /// Starts a [`copy_kv_blocks`](Self::copy_kv_blocks), which ends within `limit`, by default `sync_kv_timeout`.
    pub fn copy_kv_blocks_async(
        &self,
        src: &End,
        dst: &End,
        src_blocks: &[u64],
        dst_blocks_list: &[&[u64]],
        limit: Option<Duration>,
    ) -> Result<Arc<Transfer>> {
        let deadline = self.limited(limit);
        super::room_for_lists(src_blocks.len().saturating_mul(dst_blocks_list.len()))?;
        let pairs = validate::cpp::block_lists(src_blocks, dst_blocks_list)?;
        let (src, dst) = (self.resolve(src)?, self.resolve(dst)?);
        let moves = validate::copy_kv_blocks(src.layout()?, dst.layout()?, &pairs)?;
        self.start_copy(Op::CopyBlocks, (src, dst), moves, Staging::DEFAULT, deadline)
    }
}
