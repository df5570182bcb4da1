//! Links on which a stand-in for NIXL reads pools: what it refuses and stalls, and what both sides must agree on.
//!
//! The other tests of links run over it too (`Way::Nixl`). `crates/nixl` tests reads alone, and with the real library.

#![allow(unsafe_code, reason = "functions of a library that a test loads")]

use std::ffi::{CString, c_char};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use llm_datadist_core::{
    Backend, CacheKey, CacheKind, Config, DataDist, Error, ErrorKind, FabricConfig, Layers, Name, PullRows,
    Result,
};

use super::{Held, Way, config, device, fake_ucp, link, of, open, push_blocks, row};
use crate::fixtures::eventually;

const KEY: CacheKey = CacheKey::Blocks { model: 1 };
const BLOCKS: i64 = 64;
const BLOCK: usize = 4096;
const ALL: u64 = 2 * BLOCKS as u64 * BLOCK as u64;
const LONG: Duration = Duration::from_secs(20);

// The tests need the file, and no symbol of it.
use fake_nixl as _;

fn library() -> PathBuf {
    let library = std::env::current_exe().unwrap().with_file_name("libfake_nixl.so");
    assert!(library.exists(), "{} was not built", library.display());
    library
}

/// Has an engine use the stand-in, with settings that no other engine has.
pub(super) fn fake_nixl(settings: &[(&str, &str)]) -> FabricConfig {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let name = format!("engine {}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let all = settings.iter().copied().chain([("FAKE_NAME", name.as_str())]);
    let settings = all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
    FabricConfig {
        backend: Backend::Nixl,
        nixl_library: Some(library()),
        settings,
        ..FabricConfig::default()
    }
}

fn with(cluster: u64, fabric: FabricConfig) -> Config {
    let mut config = config(cluster, Way::Nixl);
    config.links.fabric = fabric;
    config.remote_accessible = true;
    config
}

fn opened(config: Config) -> Result<DataDist> {
    DataDist::open_over(config, Way::Nixl.devices(), Way::Nixl.transports())
}

/// Cluster 1, whose reads a test controls, and cluster 2, linked by 1; and a cache of each.
struct Both {
    name: String,
    local: DataDist,
    remote: DataDist,
    near: Held,
    far: Held,
}

impl Both {
    fn new() -> Both {
        let near = fake_nixl(&[]);
        let name = near.settings[0].1.clone();
        let local = open(with(1, near), Way::Nixl);
        let remote = open(with(2, fake_nixl(&[])), Way::Nixl);
        link(&local, &remote).unwrap();
        let shape = device(2, BLOCKS as usize, BLOCK);
        let near = Held::pool(&local, &shape, CacheKind::Blocks);
        let far = Held::new(&remote, false, &shape, CacheKind::Blocks, &[Some(KEY)]);
        Both { name, local, remote, near, far }
    }

    /// Changes a setting of the stand-in for cluster 1.
    fn set(&self, setting: &str, value: i64) {
        type Set = unsafe extern "C" fn(*const c_char, *const c_char, i64) -> bool;
        // SAFETY: the stand-in, which is loaded already.
        let library = unsafe { libloading::Library::new(library()) }.unwrap();
        // SAFETY: the signature of the function.
        let set = unsafe { library.get::<Set>("fake_nixl_set") }.unwrap();
        let [name, setting] = [self.name.as_str(), setting].map(|text| CString::new(text).unwrap());
        // SAFETY: two texts that end with a zero byte.
        assert!(unsafe { set(name.as_ptr(), setting.as_ptr(), value) }, "no group has this name");
    }

    fn pull(&self, limit: Duration) -> Result<()> {
        let rows = PullRows::Blocks { remote: (0..BLOCKS).rev().collect(), local: (0..BLOCKS).collect() };
        let from = of(2, Name::Key(KEY));
        let transfer = self.local.pull_async(from, &self.near.end(), rows, Layers::ALL, Some(limit)).unwrap();
        eventually("the end of a pull", || transfer.outcome().is_some());
        transfer.outcome().unwrap().map(|_| ())
    }

    /// Whether all blocks of a source are in place.
    fn arrived(&self, source: &[Vec<u8>]) -> bool {
        let backwards = |tensor: &Vec<u8>| tensor.chunks(BLOCK).rev().flatten().copied().collect::<Vec<u8>>();
        self.near.read() == source.iter().map(backwards).collect::<Vec<_>>()
    }
}

/// Returns the bytes that NIXL and sockets have moved over the link of an engine.
fn paths(engine: &DataDist) -> (u64, u64) {
    let link = engine.stats().links.remove(0);
    let bytes = |name| link.paths.iter().find(|(path, _)| *path == name).unwrap().1.bytes;
    (bytes("fabric"), bytes("sockets"))
}

#[test]
fn pulls_and_pushes_use_nixl() {
    let both = Both::new();
    let bytes = both.far.fill(1);
    both.pull(LONG).unwrap();
    assert!(both.arrived(&bytes));
    assert_eq!(paths(&both.local), (ALL, 0));
    let (source, all) = (both.near.fill(3), (0..BLOCKS).collect::<Vec<i64>>());
    push_blocks(&both.local, &both.near, &all, of(2, row(&both.far, 0)), &all).unwrap();
    assert!(both.far.read() == source);
    let stats = both.local.stats();
    assert_eq!((stats.nixl.version.as_deref(), stats.nixl.reason), (Some("1.5.1"), None));
    assert_eq!((stats.nixl.reads, stats.nixl.bytes, stats.nixl.failures), (1, ALL, 0));
    assert_eq!((stats.ucx.version, stats.ucx.reason.as_deref()), (None, Some("llm.TransferBackend=nixl")));
    // The peer has read what was pushed.
    let stats = both.remote.stats().nixl;
    assert_eq!((stats.reads, stats.bytes), (1, ALL));
    assert_eq!(paths(&both.local), (2 * ALL, 0));
}

#[test]
fn a_pull_that_stalls_ends_at_its_deadline_and_writes_nothing_afterwards() {
    let both = Both::new();
    let bytes = both.far.fill(1);
    for end in [0, 1, 50, 127] {
        both.set("STALL", end);
        let error = both.pull(Duration::from_millis(60)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
        let after = both.near.fill(9);
        both.set("STALL", i64::MAX);
        thread::sleep(Duration::from_millis(100));
        assert!(both.near.read() == after, "bytes came after the end");
        both.pull(LONG).unwrap();
        assert!(both.arrived(&bytes));
    }
    let nixl = both.local.stats().nixl;
    assert_eq!((nixl.reads, nixl.bytes, nixl.failures, nixl.forced_closes), (4, 4 * ALL, 4, 4));
}

#[test]
fn a_failure_of_nixl_fails_the_call() {
    let both = Both::new();
    both.set("RESET", 1);
    let error = both.pull(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
    assert!(error.to_string().contains("the peer has disconnected (NIXL status -13)"), "{error}");
    // Cluster 1 reads what cluster 2 pushes.
    let all: Vec<i64> = (0..BLOCKS).collect();
    let pushed = push_blocks(&both.remote, &both.far, &all, of(1, row(&both.near, 0)), &all);
    let error = pushed.unwrap_err().to_string();
    assert!(error.contains("the peer cannot read by NIXL, and reports: the peer cannot be read"), "{error}");
    assert_eq!(paths(&both.local), (0, 0));
}

#[test]
fn an_engine_that_cannot_use_nixl_says_why() {
    let mut without_token = with(1, fake_nixl(&[]));
    without_token.links.token = None;
    let mut missing = with(1, fake_nixl(&[]));
    missing.links.fabric.nixl_library = Some("/nowhere/libnixl_capi.so".into());
    let refuses = with(1, fake_nixl(&[("REFUSE_nixl_capi_create_backend", "-2")]));
    let wants_rdma = with(1, fake_nixl(&[("REQUIRE_RDMA", "1"), ("TLS", "tcp")]));
    let pinned = with(1, fake_nixl(&[("REFUSE_nixl_capi_register_mem", "-2")]));
    for (config, reasons) in [
        (without_token, ["NIXL needs a token", "llm.LinkToken"]),
        (missing, ["NIXL cannot be used: /nowhere/libnixl_capi.so: cannot open shared", ""]),
        (refuses, ["NIXL cannot be used: nixl_capi_create_backend failed: the backend", "(NIXL status -2)"]),
        (wants_rdma, ["standard error output", "UCX_TLS chooses the transports (ib if it is not set)"]),
        (pinned, ["NIXL cannot map a pool: nixl_capi_register_mem failed", "ulimit -l"]),
    ] {
        let error = opened(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
        assert!(reasons.iter().all(|reason| error.to_string().contains(reason)), "{error}");
    }
    // The engine allows RDMA alone unless the program chooses.
    drop(opened(with(1, fake_nixl(&[("REQUIRE_RDMA", "1")]))).unwrap());
}

#[test]
fn nothing_but_its_name_chooses_nixl() {
    for backend in [Backend::Auto, Backend::Sockets] {
        let fabric = FabricConfig {
            backend,
            assume_device: true,
            ucx_library: Some("/nowhere/libucp.so.0".into()),
            ..fake_nixl(&[])
        };
        let [local, remote] = [1, 2].map(|cluster| open(with(cluster, fabric.clone()), Way::Nixl));
        link(&local, &remote).unwrap();
        super::check_pull(&local, &remote);
        let stats = local.stats();
        assert_eq!(stats.nixl.version, None);
        assert_eq!(stats.nixl.reason.as_deref(), Some("llm.TransferBackend is not nixl"));
        assert!(stats.links[0].sockets_reason.is_some());
    }
}

/// Returns the error of a link between two engines with these libraries.
fn refused(near: FabricConfig, far: FabricConfig) -> Error {
    let (local, remote) = (open(with(1, near), Way::Nixl), open(with(2, far), Way::Nixl));
    link(&local, &remote).unwrap_err()
}

#[test]
fn both_sides_must_use_nixl_in_equal_versions() {
    let mark = b"NIXL version: \0";
    let mut bytes = std::fs::read(library()).unwrap();
    let at = bytes.windows(mark.len()).position(|window| window == mark).unwrap() + mark.len();
    bytes[at..at + 5].copy_from_slice(b"1.4.0");
    let older = std::env::temp_dir().join(format!("libfake_nixl_older-{}.so", std::process::id()));
    std::fs::write(&older, bytes).unwrap();
    let older_nixl = FabricConfig { nixl_library: Some(older.clone()), ..fake_nixl(&[]) };
    let sockets = FabricConfig { backend: Backend::Sockets, ..FabricConfig::default() };
    for (far, reason) in [
        // The side that was dialled takes the offer first.
        (older_nixl, "llm.TransferBackend=nixl, but the peer uses NIXL 1.5.1, and this side 1.4.0"),
        (fake_ucp(&[]), "llm.TransferBackend=ucx, but the peer uses NIXL 1.5.1, and this side UCX 1.13.0"),
        (sockets, "llm.TransferBackend=nixl, but the peer does not use NIXL"),
    ] {
        let error = refused(fake_nixl(&[]), far);
        assert_eq!(error.kind(), ErrorKind::LinkFailed, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    std::fs::remove_file(older).unwrap();
    let error = refused(fake_ucp(&[]), fake_nixl(&[]));
    assert!(error.to_string().contains("the peer uses UCX 1.13.0, and this side NIXL 1.5.1"), "{error}");
}
