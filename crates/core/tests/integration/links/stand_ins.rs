//! Links on which a stand-in for UCX reads pools, and on which a test controls the reads of one engine.

#![allow(unsafe_code, reason = "functions of a library that a test loads")]

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use llm_datadist_core::bindings::{Backend, CacheKey, Config, DataDist, FabricConfig, Layers, Name, Rows};
use llm_datadist_core::{CacheKind, Result};

use super::asynchronous::outcome;
use super::{Held, Pair, Way, bytes_by, device, of};

pub(super) const KEY: CacheKey = CacheKey::Blocks { model: 1 };
pub(super) const BLOCKS: i64 = 64;
pub(super) const BLOCK: usize = 4096;
/// The bytes of one cache.
pub(super) const ALL: u64 = 2 * BLOCKS as u64 * BLOCK as u64;

// The tests need the file, but none of its symbols.
use fake_ucp as _;

/// Returns the path of a stand-in.
pub(super) fn library(file: &str) -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name(file);
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Returns a configuration that uses a stand-in, under a name that no other engine has.
pub(crate) fn stand_in(settings: &[(&str, &str)]) -> FabricConfig {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("engine {}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let all = [("FAKE_NAME", name.as_str())].into_iter().chain(settings.iter().copied());
    FabricConfig {
        backend: Backend::Ucx,
        ucx_library: Some(library("libfake_ucp.so")),
        settings: all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
        ..FabricConfig::default()
    }
}

/// Changes a setting of the stand-in for the engine with this configuration.
pub(crate) fn set(config: &FabricConfig, setting: &str, value: i64) {
    type Set = unsafe extern "C" fn(*const c_char, *const c_char, i64) -> bool;
    // SAFETY: the stand-in, which is loaded already.
    let library = unsafe { libloading::Library::new(library("libfake_ucp.so")) }.unwrap();
    // SAFETY: the signature of the function.
    let set = unsafe { library.get::<Set>("fake_ucp_set") }.unwrap();
    let [name, setting] = [&*config.settings[0].1, setting].map(|text| CString::new(text).unwrap());
    // SAFETY: two texts that end with a zero byte.
    assert!(unsafe { set(name.as_ptr(), setting.as_ptr(), value) }, "no engine has this name");
}

/// Cluster 1, whose reads a test controls, and cluster 2, linked by 1; and a cache of each.
pub(super) struct Controlled {
    pub(super) local: DataDist,
    pub(super) remote: DataDist,
    pub(super) local_cache: Held,
    pub(super) remote_cache: Held,
}

impl Controlled {
    pub(super) fn new(change: impl Fn(&mut Config)) -> Controlled {
        let Pair { local, remote } = Pair::with(Way::Fabric, |config| {
            config.remote_accessible = true;
            change(config);
        });
        let shape = device(2, BLOCKS as usize, BLOCK);
        let local_cache = Held::pool(&local, &shape, CacheKind::Blocks);
        let remote_cache = Held::new(&remote, false, &shape, CacheKind::Blocks, &[Some(KEY)]);
        Controlled { local, remote, local_cache, remote_cache }
    }

    /// Changes a setting of the stand-in for cluster 1.
    pub(super) fn set(&self, setting: &str, value: i64) {
        set(&self.local.config().links.fabric, setting, value);
    }

    pub(super) fn pull(&self, limit: Duration) -> Result<()> {
        // Backwards, so that UCX reads each block with a request of its own.
        let rows = Rows::Blocks { remote: (0..BLOCKS).rev().collect(), local: (0..BLOCKS).collect() };
        let (from, to) = (of(2, Name::Key(KEY)), self.local_cache.end());
        let transfer = self.local.pull(from, &to, rows, Layers::ALL).within(limit).start().unwrap();
        outcome(&transfer).map(drop)
    }

    /// Whether a pull has put all blocks of a source in place.
    pub(super) fn arrived(&self, source: &[Vec<u8>]) -> bool {
        let backwards = |tensor: &Vec<u8>| tensor.chunks(BLOCK).rev().flatten().copied().collect::<Vec<u8>>();
        self.local_cache.read() == source.iter().map(backwards).collect::<Vec<_>>()
    }

    /// Returns the bytes that the stand-in and sockets have moved over the link.
    pub(super) fn paths(&self) -> (u64, u64) {
        (bytes_by("fabric", &self.local), bytes_by("sockets", &self.local))
    }
}
