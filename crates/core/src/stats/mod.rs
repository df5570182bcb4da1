//! Counters and latency histograms of an engine, read as one structure.
//!
//! Counting costs a few relaxed additions and takes no lock. The state of pools, table and links is not
//! counted here; it is read from its owner when a [`Snapshot`] is made.

mod counters;
mod link;

#[cfg(feature = "testing")]
pub use counters::BUCKETS;
pub use counters::{Counters, OpState};
pub use link::{LinkStats, PathState};

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use crate::cache::TableState;
use crate::copy::Route;
use crate::error::Result;
use crate::model::{ClusterId, named_enum};
use crate::pool::PoolState;

named_enum! {
    /// The kinds of calls that are counted.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Op {
        /// `allocate_cache` and `allocate_blocks_cache`.
        Allocate = "allocate",
        /// `deallocate_cache` and `deallocate_blocks_cache`.
        Deallocate = "deallocate",
        RemoveKey = "remove_key",
        /// `register_cache`, `register_blocks_cache` and `unregister_cache`.
        Register = "register",
        /// `copy_cache`, and `CopyKvCache` of the C++ class.
        CopyCache = "copy_cache",
        CopyBlocks = "copy_blocks",
        /// `swap_blocks` from host to device.
        SwapIn = "swap_in",
        /// `swap_blocks` from device to host.
        SwapOut = "swap_out",
        /// `link_clusters`; each cluster of the list counts as one call.
        Link = "link",
        /// `unlink_clusters`; each cluster of the list counts as one call.
        Unlink = "unlink",
        Pull = "pull",
        /// `push_cache` and `push_blocks`, and `PushKvCache` of the C++ class.
        Push = "push",
        /// One layer of `transfer_cache_async`, sent to one destination.
        Layer = "transfer_layer",
        /// Requests of peers that were served. The bytes are those that passed through this process.
        Served = "served",
    }
}

/// All counters of one engine.
#[derive(Debug, Default)]
pub struct Stats {
    ops: [Counters; Op::ALL.len()],
    direct: AtomicU64,
    ring: AtomicU64,
    verified: AtomicU64,
    mismatched: AtomicU64,
}

/// All counters of one engine and the state of its pools, table and links, as they were when read.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The device pool, if there is one.
    pub device_pool: Option<PoolReport>,
    /// The host pool, if there is one.
    pub host_pool: Option<PoolReport>,
    /// Caches and keys.
    pub table: TableState,
    /// The counters of each kind of call, with its name.
    pub ops: Vec<(&'static str, OpState)>,
    /// Number of swap-ins that were copied straight to their blocks.
    pub swap_in_direct: u64,
    /// Number of swap-ins that were copied through the staging ring.
    pub swap_in_ring: u64,
    /// Number of blocks that this engine has compared with their source.
    pub verified_blocks: u64,
    /// Number of those that differed.
    pub mismatched_blocks: u64,
    /// Bytes of device memory that the staging ring holds.
    pub ring_bytes: u64,
    /// Bytes copied with ordinary stores.
    pub plain_bytes: u64,
    /// Bytes copied with streaming stores.
    pub streaming_bytes: u64,
    /// Number of threads that copy, including the calling thread.
    pub copy_workers: u64,
    /// UCX of this engine.
    pub ucx: FabricState,
    /// All live links.
    pub links: Vec<LinkState>,
}

impl Snapshot {
    /// Returns the snapshot as an object of JSON. Every field has its name; a pool that was not configured is absent.
    pub fn to_json(&self) -> String {
        // It fails only for keys that are no texts.
        serde_json::to_string(self).unwrap_or_default()
    }
}

impl Serialize for Snapshot {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(None)?;
        let pools = [("device", &self.device_pool), ("host", &self.host_pool)].into_iter();
        let pools: Vec<_> = pools.filter_map(|(name, pool)| Some((name, pool.as_ref()?))).collect();
        map.serialize_entry("pools", &Named(&pools))?;
        map.serialize_entry("table", &self.table)?;
        map.serialize_entry("ops", &Named(&self.ops))?;
        let swap_in = [("direct", self.swap_in_direct), ("ring", self.swap_in_ring)];
        map.serialize_entry("swap_in", &Named(&swap_in))?;
        let verify = [("blocks", self.verified_blocks), ("mismatches", self.mismatched_blocks)];
        map.serialize_entry("verify", &Named(&verify))?;
        map.serialize_entry("links", &self.links)?;
        map.serialize_entry("ucx", &self.ucx)?;
        map.serialize_entry("ring_bytes", &self.ring_bytes)?;
        map.serialize_entry("plain_bytes", &self.plain_bytes)?;
        map.serialize_entry("streaming_bytes", &self.streaming_bytes)?;
        map.serialize_entry("copy_workers", &self.copy_workers)?;
        map.end()
    }
}

/// Values with their names, as one object.
struct Named<'a, T>(&'a [(&'static str, T)]);

impl<T: Serialize> Serialize for Named<'_, T> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

fn named<T: Serialize, S: Serializer>(
    values: &[(&'static str, T)],
    to: S,
) -> std::result::Result<S::Ok, S::Error> {
    Named(values).serialize(to)
}

/// UCX: whether an engine uses it, and what it has done.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct FabricState {
    /// Version of UCX, if it is used.
    pub version: Option<String>,
    /// The reason why it is not used.
    pub reason: Option<String>,
    /// Number of reads that succeeded.
    pub reads: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Number of reads that failed or were given up.
    pub failures: u64,
    /// Number of connections that were closed by force to end a read.
    pub forced_closes: u64,
    /// Number of workers of UCX that were replaced.
    pub renewals: u64,
}

/// The state of a link when it was read.
#[derive(Clone, Debug, Serialize)]
pub struct LinkState {
    /// Cluster id of the peer.
    pub cluster: ClusterId,
    /// Address of the peer.
    pub address: String,
    /// How messages travel: `shm`, `tcp` or `local`.
    pub transport: &'static str,
    /// How the memory of the peer's pools is read: `mapped` or `stream`; `none` if the peer has no pool that
    /// could be mapped.
    pub pools: &'static str,
    /// How the peer's registered memory is read: `process` or `stream`.
    pub registered: &'static str,
    /// The reason why pools are not mapped, else the reason why registered memory is not read by process id.
    /// Only between processes of one host.
    pub refusal: Option<String>,
    /// Whether this process made the link.
    pub outgoing: bool,
    /// Number of call streams, in both directions, whose messages go through rings in shared memory.
    pub call_rings: usize,
    /// The reason why the last attempt to give a call stream rings failed; `None` if it succeeded, or if there was none.
    pub call_rings_refusal: Option<String>,
    /// Milliseconds since the last control message of the peer.
    pub silent_ms: u64,
    /// Requests sent to the peer: calls, failures, bytes and times.
    pub requests: OpState,
    /// Pulls from and pushes to the peer: calls, failures, bytes and times.
    pub transfers: OpState,
    /// The pulls and pushes that succeeded, by the path on which their bytes moved.
    #[serde(serialize_with = "named")]
    pub paths: Vec<(&'static str, PathState)>,
    /// Bytes of them that passed a host buffer of this engine, because no path reaches the memory of a device.
    pub staged_bytes: u64,
    /// Why the owner most recently had to send the bytes of a pull or push; `None` if it never had to.
    pub sockets_reason: Option<String>,
}

/// A pool and the memory under it.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct PoolReport {
    /// Sizes and counters of the pool.
    #[serde(flatten)]
    pub pool: PoolState,
    /// Bytes of released caches that arrays, views or calls still use, without rounding to pages.
    pub released_bytes: u64,
    /// How the engine asked the kernel for huge pages.
    pub huge_pages: &'static str,
    /// Bytes that the engine committed by touching them.
    pub committed_bytes: u64,
    /// Bytes that the engine had the kernel put into huge pages.
    pub merged_bytes: u64,
    /// The error number with which the kernel refused to put memory into huge pages, because it is too old or
    /// does not permit it; `None` if it never refused.
    pub merge_errno: Option<i32>,
}

impl Stats {
    /// Runs a call, and counts it with its duration.
    pub fn timed<T>(&self, op: Op, call: impl FnOnce() -> Result<T>) -> Result<T> {
        let started = Instant::now();
        let result = call();
        self.ops[op as usize].count(started.elapsed(), result.is_ok());
        result
    }

    /// Counts a call that ended after `took`; `ok` is whether it succeeded.
    pub fn counted(&self, op: Op, took: Duration, ok: bool) {
        self.ops[op as usize].count(took, ok);
    }

    /// Counts one request that did the work of `count` calls (see [`Counters::count_each`]).
    pub fn counted_each(&self, op: Op, count: u32, took: Duration, ok: bool) {
        self.ops[op as usize].count_each(count, took, ok);
    }

    /// Counts bytes that a call moved over a link.
    pub fn add_bytes(&self, op: Op, bytes: u64) {
        self.ops[op as usize].add_bytes(bytes);
    }

    /// Counts the bytes that a copy moved and, for a swap-in, its route.
    pub fn count_copy(&self, op: Op, bytes: u64, route: Route) {
        self.ops[op as usize].add_bytes(bytes);
        if op == Op::SwapIn {
            let way = if route == Route::Ring { &self.ring } else { &self.direct };
            way.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Returns the number of swap-ins that were copied straight to their blocks, and through the staging
    /// ring.
    pub fn swap_ins(&self) -> (u64, u64) {
        (self.direct.load(Ordering::Relaxed), self.ring.load(Ordering::Relaxed))
    }

    /// Counts blocks that were compared with their source, and those of them that differed.
    pub fn count_verified(&self, blocks: usize, mismatched: usize) {
        self.verified.fetch_add(blocks as u64, Ordering::Relaxed);
        self.mismatched.fetch_add(mismatched as u64, Ordering::Relaxed);
    }

    /// Returns the number of blocks that were compared with their source, and of those that differed.
    pub fn verified(&self) -> (u64, u64) {
        (self.verified.load(Ordering::Relaxed), self.mismatched.load(Ordering::Relaxed))
    }

    /// Returns the current counters of every kind of call, with its name.
    pub fn ops(&self) -> Vec<(&'static str, OpState)> {
        Op::ALL.iter().map(|&op| (op.name(), self.ops[op as usize].state())).collect()
    }
}
