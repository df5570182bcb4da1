//! Calls of the C++ class that differ from the Python ones: blocks of caches that have no kind, layer ranges
//! with both ends inclusive, and links that name a local address.
//!
//! `CopyKvCache` and `CopyKvBlocks` are in `copies`.

use std::time::Duration;

use super::links::{each, link_failed};
use super::operation::Operation;
use super::{DataDist, End, RemoteName};
use crate::config::Role;
use crate::error::Result;
use crate::model::{CacheId, ClusterId, Name};
use crate::session::PeerAddress;
use crate::stats::Op;
use crate::validate::{self, ExtParam, Rows};

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

/// A method checks what only the class forbids, and its [`Operation`] the rest.
impl DataDist {
    /// Pulls one batch slot of a peer's cache (contract, C++ §4, `PullKvCache`).
    pub fn pull_kv_cache(
        &self,
        src: CacheIndex,
        dst: CacheId,
        batch_index: u32,
        size: i64,
        ext: ExtParam,
    ) -> Result<Operation<'_>> {
        validate::copy_size(size)?;
        self.pull_kv(src, dst, Rows::slot(batch_index, size), ext)
    }

    /// Pulls blocks of a peer's cache, pair by pair (contract, C++ §4, `PullKvBlocks`).
    pub fn pull_kv_blocks(
        &self,
        src: CacheIndex,
        dst: CacheId,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
    ) -> Result<Operation<'_>> {
        validate::cpp::no_slot("src_cache_index.batch_index", src.row)?;
        let remote = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = Rows::AnyKind { remote, local: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        self.pull_kv(src, dst, rows, ext)
    }

    fn pull_kv(&self, src: CacheIndex, dst: CacheId, rows: Rows, ext: ExtParam) -> Result<Operation<'_>> {
        validate::ext_alone(ext)?;
        self.other(src.cluster)?;
        let local = self.resources.table.find(dst)?;
        let layers = validate::pull_kv_layers(local.layout().geometry, ext)?;
        Ok(self.pull(src.name(), &End::Managed(dst), rows, layers))
    }

    /// Pushes blocks into a peer's cache, pair by pair (contract, C++ §4, `PushKvBlocks`).
    pub fn push_kv_blocks(
        &self,
        src: CacheId,
        dst: CacheIndex,
        (src_blocks, dst_blocks): (&[u64], &[u64]),
        ext: ExtParam,
    ) -> Result<Operation<'_>> {
        validate::cpp::no_slot("dst_cache_index.batch_index", dst.row)?;
        let local = validate::cpp::blocks("src_blocks", src_blocks)?;
        let rows = Rows::AnyKind { local, remote: validate::cpp::blocks("dst_blocks", dst_blocks)? };
        validate::equally_many(("src_blocks", src_blocks.len()), ("dst_blocks", dst_blocks.len()))?;
        validate::push_kv_alone("PushKvBlocks", self.pushing_role(), -1, ext)?;
        self.other(dst.cluster)?;
        let cache = self.resources.table.find(src)?;
        let layers = validate::push_kv_blocks(cache.layout(), ext)?;
        Ok(self.push(&End::Managed(src), dst.name(), rows, layers))
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
    ) -> Result<Operation<'_>> {
        validate::push_kv_alone("PushKvCache", self.pushing_role(), size, ext)?;
        self.other(dst.cluster)?;
        let local = self.resources.table.find(src)?;
        let layers = validate::push_kv_cache(local.layout(), ext)?;
        let rows = Rows::slot(src_batch_index, -1);
        Ok(self.push(&End::Managed(src), dst.name(), rows, layers))
    }

    /// Does the same as [`link_clusters`](Self::link_clusters), but every peer must name exactly one local
    /// address (contract §6.8).
    pub fn link_clusters_from(&self, peers: &[PeerAddress], timeout: Duration) -> Vec<Result<()>> {
        let deadline = self.limit(timeout, "timeout_in_millis");
        each(peers, deadline, |peer, deadline| {
            let linked = self.timed(Op::Link, || {
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
