//! Engines, caches and their bytes, and the kernel's figures about this process.
//!
//! Not for: measuring.

use std::time::{Duration, Instant};

use llm_datadist_core::bindings::{
    CacheKey, Config, DataDist, End, Name, PeerAddress, PoolConfig, RemoteName, Role, TransportChoice,
};
use llm_datadist_core::{CacheDesc, CacheKind, ClusterId, DataType, Placement};

/// A time limit for links that is never reached.
pub const LIMIT: Duration = Duration::from_secs(20);
/// The cluster of an owner whose caches others pull.
pub const OWNER: ClusterId = ClusterId(2);
/// The blocks cache that others pull from.
pub const SHARED: CacheKey = CacheKey::Blocks { model: 7 };

/// Host and device pool of `mib` MiB each, pages of `1 << page_shift` bytes, and a listener.
pub fn config(cluster: u64, transport: &str, mib: u64, page_shift: u32) -> Config {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    let pool = (mib > 0).then_some(PoolConfig { memory_size: mib << 20, page_shift });
    config.device_pool = pool;
    config.remote_accessible = true;
    config.sync_timeout = Duration::from_secs(60);
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    config.links.transport = if transport == "tcp" { TransportChoice::Tcp } else { TransportChoice::Shm };
    config
}

pub fn desc(rows: u64, bytes: u64, num_tensors: u32, placement: Placement) -> CacheDesc {
    let shape = vec![rows as i64, bytes as i64];
    CacheDesc { num_tensors, shape, data_type: DataType::Uint8, placement, row_stride: None, kv_layout: None }
}

pub fn address(cluster: ClusterId, port: u16) -> PeerAddress {
    PeerAddress { cluster, remote: vec![([127, 0, 0, 1], port).into()], local: vec![] }
}

pub fn shared() -> RemoteName {
    RemoteName { cluster: OWNER, name: Name::Key(SHARED) }
}

/// One tensor of blocks in the pool of an engine.
pub struct Blocks {
    pub end: End,
    base: u64,
    words: u64,
    rows: u64,
}

impl Blocks {
    pub fn new(
        engine: &DataDist,
        rows: u64,
        bytes: u64,
        placement: Placement,
        key: Option<CacheKey>,
    ) -> Blocks {
        let keys = key.map(Some);
        let cache =
            engine.allocate(&desc(rows, bytes, 1, placement), CacheKind::Blocks, keys.as_slice()).unwrap();
        Blocks { end: End::Managed(cache.id()), base: cache.addrs()[0], words: bytes / 8, rows }
    }

    /// Writes a different value to every word.
    pub fn fill(&self) {
        for at in 0..self.rows * self.words {
            // SAFETY: inside the tensor, which nothing else uses now.
            unsafe { *((self.base + at * 8) as *mut u64) = word(at) };
        }
    }

    pub fn poison(&self) {
        // SAFETY: as in `fill`.
        unsafe { (self.base as *mut u8).write_bytes(0xEE, (self.rows * self.words * 8) as usize) };
    }

    /// Stops the benchmark unless block `to` is what block `from` of filled memory is, for every pair.
    pub fn verify(&self, from: &[i64], to: &[i64]) {
        for (&from, &to) in from.iter().zip(to) {
            for at in 0..self.words {
                // SAFETY: as in `fill`.
                let got = unsafe { *((self.base + (to as u64 * self.words + at) * 8) as *const u64) };
                assert_eq!(got, word(from as u64 * self.words + at), "block {from} arrived wrong in {to}");
            }
        }
    }
}

/// A small generator, so that every run visits the same things in the same order.
pub struct Shuffle(pub u64);

impl Shuffle {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn order(&mut self, count: u64) -> Vec<i64> {
        let mut list: Vec<i64> = (0..count as i64).collect();
        for at in (1..list.len()).rev() {
            list.swap(at, (self.next() % (at as u64 + 1)) as usize);
        }
        list
    }
}

fn word(at: u64) -> u64 {
    at.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Nanoseconds of `call`.
pub fn nanos(call: impl FnOnce()) -> f64 {
    let started = Instant::now();
    call();
    started.elapsed().as_nanos() as f64
}

/// A number of `/proc/self/status`.
pub fn status(name: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(name)).unwrap();
    line.split_whitespace().next().unwrap().parse().unwrap()
}

/// Descriptors and mappings of this process.
pub fn descriptors() -> u64 {
    std::fs::read_dir("/proc/self/fd").unwrap().count() as u64
}

pub fn mappings() -> u64 {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().count() as u64
}

/// Nanoseconds that this process has been on a CPU, threads that have ended included.
pub fn on_cpu() -> u64 {
    let spent = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    spent.tv_sec as u64 * 1_000_000_000 + spent.tv_nsec as u64
}
