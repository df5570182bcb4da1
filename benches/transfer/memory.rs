//! Memory of the benchmark in both processes: its content, and whether the bytes arrived.
//!
//! Not for: moving it.

use llm_datadist_core::bindings::{CacheKey, Config, DataDist, End, PoolConfig, Role, TransportChoice};
use llm_datadist_core::{Adopted, CacheDesc, CacheKind, ClusterId, DataType, Placement};
use std::time::Duration;

/// The blocks cache both sides use.
pub const KEY: CacheKey = CacheKey::Blocks { model: 7 };

/// One tensor of blocks, in a pool or in memory of this program that is registered with an engine.
#[derive(Clone)]
pub struct Blocks {
    pub end: End,
    pub base: u64,
    pub rows: u64,
    pub len: u64,
}

/// The configuration with which both engines are opened.
pub fn config(cluster: u64, transport: &str, one_sided: bool, mib: u64, streams: usize) -> Config {
    let mut config = Config::new(Role::Mix, ClusterId(cluster));
    config.device_pool = (mib > 0).then_some(PoolConfig { memory_size: mib << 20, page_shift: 12 });
    config.remote_accessible = one_sided;
    config.sync_timeout = Duration::from_secs(60);
    config.links.listen = Some(([127, 0, 0, 1], 0).into());
    config.links.transport = if transport == "tcp" { TransportChoice::Tcp } else { TransportChoice::Shm };
    config.links.streams = streams;
    config
}

pub fn desc(rows: u64, len: u64) -> CacheDesc {
    let shape = vec![rows as i64, len as i64];
    CacheDesc {
        num_tensors: 1,
        shape,
        data_type: DataType::Uint8,
        placement: Placement::Device,
        row_stride: None,
        kv_layout: None,
    }
}

impl Blocks {
    /// From the pool of `engine`.
    pub fn pool(engine: &DataDist, rows: u64, len: u64, key: bool) -> Blocks {
        let keys = if key { vec![Some(KEY)] } else { vec![] };
        let cache = engine.allocate(&desc(rows, len), CacheKind::Blocks, &keys).unwrap();
        Blocks { end: End::Managed(cache.id()), base: cache.addrs()[0], rows, len }
    }

    /// Memory of this program, registered with `engine` and never freed.
    pub fn own(engine: &DataDist, base: u64, rows: u64, len: u64, key: bool) -> Blocks {
        let keys = if key { vec![Some(KEY)] } else { vec![] };
        // SAFETY: `base` comes from `mapped`, which nobody unmaps, with at least `rows * len` bytes.
        let adopted = unsafe { Adopted::new(&desc(rows, len), CacheKind::Blocks, &[base]) }.unwrap();
        let cache = engine.register(adopted, &keys, Some(true)).unwrap();
        Blocks { end: End::Managed(cache.id()), base, rows, len }
    }

    pub fn at(&self, row: i64) -> u64 {
        self.base + row as u64 * self.len
    }

    pub fn bytes(&self) -> u64 {
        self.rows * self.len
    }

    /// Gives every 8-byte word a value of its own.
    pub fn fill(&self, seed: u64) {
        for at in 0..self.bytes() / 8 {
            // SAFETY: inside memory of this program that nothing else uses now.
            unsafe { *((self.base + at * 8) as *mut u64) = word(seed, at) };
        }
    }

    /// Overwrites the memory, so that a missing block is detected.
    pub fn poison(&self) {
        // SAFETY: as in `fill`.
        unsafe { (self.base as *mut u8).write_bytes(0xEE, self.bytes() as usize) };
    }

    /// Stops the benchmark unless block `to` is what block `from` of memory filled with `seed` is, for every pair.
    pub fn verify(&self, seed: u64, from: &[i64], to: &[i64]) {
        let words = self.len / 8;
        for (&from, &to) in from.iter().zip(to) {
            let first = from as u64 * words;
            for at in 0..words {
                // SAFETY: as in `fill`.
                let got = unsafe { *((self.at(to) + at * 8) as *const u64) };
                assert_eq!(got, word(seed, first + at), "block {from} arrived wrong in {to}");
            }
        }
    }
}

/// A value that differs for each seed and word.
pub fn word(seed: u64, at: u64) -> u64 {
    (seed << 56) ^ at.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// Memory of this program, touched.
pub fn mapped(bytes: u64) -> u64 {
    let (protection, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping.
    let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes as usize, protection, kind, -1, 0) };
    assert_ne!(base, libc::MAP_FAILED);
    // SAFETY: the mapping just made.
    unsafe { base.cast::<u8>().write_bytes(0, bytes as usize) };
    base as u64
}
