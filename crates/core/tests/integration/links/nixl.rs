//! Links on which a stand-in for NIXL reads pools: what it refuses, and what both sides must agree on.
//!
//! The other tests of links run over it too (`Way::Nixl`). `crates/nixl` tests reads alone, and with the real library.

use llm_datadist_core::{Backend, Config, DataDist, Error, ErrorKind, FabricConfig, Result};

use super::stand_ins::{ALL, BLOCKS, Controlled, library, stand_in};
use super::{LONG, Way, config, link, of, open, push_blocks, row};

fn with(cluster: u64, fabric: FabricConfig) -> Config {
    let mut config = config(cluster, Way::Nixl);
    config.links.fabric = fabric;
    config.remote_accessible = true;
    config
}

fn opened(config: Config) -> Result<DataDist> {
    DataDist::open_over(config, Way::Nixl.devices(), Way::Nixl.transports())
}

#[test]
fn pulls_and_pushes_use_nixl() {
    let pair = Controlled::new(Way::Nixl, |_| ());
    let bytes = pair.remote_cache.fill(1);
    pair.pull(LONG).unwrap();
    assert!(pair.arrived(&bytes));
    assert_eq!(pair.paths(), (ALL, 0));
    let (source, all) = (pair.local_cache.fill(3), (0..BLOCKS).collect::<Vec<i64>>());
    push_blocks(&pair.local, &pair.local_cache, &all, of(2, row(&pair.remote_cache, 0)), &all).unwrap();
    assert!(pair.remote_cache.read() == source);
    let stats = pair.local.stats();
    assert_eq!((stats.nixl.version.as_deref(), stats.nixl.reason), (Some("1.5.1"), None));
    assert_eq!((stats.nixl.reads, stats.nixl.bytes, stats.nixl.failures), (1, ALL, 0));
    assert_eq!((stats.ucx.version, stats.ucx.reason.as_deref()), (None, Some("llm.TransferBackend=nixl")));
    // The peer has read what was pushed.
    let stats = pair.remote.stats().nixl;
    assert_eq!((stats.reads, stats.bytes), (1, ALL));
    assert_eq!(pair.paths(), (2 * ALL, 0));
}

#[test]
fn a_failure_of_nixl_fails_the_call() {
    let pair = Controlled::new(Way::Nixl, |_| ());
    pair.set("RESET", 1);
    let error = pair.pull(LONG).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
    assert!(error.to_string().contains("the peer has disconnected (NIXL status -13)"), "{error}");
    // Cluster 1 reads what cluster 2 pushes.
    let all: Vec<i64> = (0..BLOCKS).collect();
    let pushed = push_blocks(&pair.remote, &pair.remote_cache, &all, of(1, row(&pair.local_cache, 0)), &all);
    let error = pushed.unwrap_err().to_string();
    assert!(
        error.contains("the peer reports that it cannot read through NIXL: the peer cannot be read"),
        "{error}"
    );
    assert_eq!(pair.paths(), (0, 0));
}

#[test]
fn an_engine_that_cannot_use_nixl_says_why() {
    let mut without_token = with(1, stand_in(Backend::Nixl, &[]));
    without_token.links.token = None;
    let mut missing = with(1, stand_in(Backend::Nixl, &[]));
    missing.links.fabric.nixl_library = Some("/nowhere/libnixl_capi.so".into());
    let refuses = with(1, stand_in(Backend::Nixl, &[("REFUSE_nixl_capi_create_backend", "-2")]));
    let wants_rdma = with(1, stand_in(Backend::Nixl, &[("REQUIRE_RDMA", "1"), ("TLS", "tcp")]));
    let pinned = with(1, stand_in(Backend::Nixl, &[("REFUSE_nixl_capi_register_mem", "-2")]));
    for (config, reasons) in [
        (without_token, ["NIXL needs a token", "llm.LinkToken"]),
        (missing, ["NIXL cannot be used: /nowhere/libnixl_capi.so: cannot open shared", ""]),
        (refuses, ["NIXL cannot be used: nixl_capi_create_backend failed: the backend", "(NIXL status -2)"]),
        (wants_rdma, ["standard error", "UCX_TLS chooses the transports (ib if it is not set)"]),
        (pinned, ["NIXL cannot map a pool: nixl_capi_register_mem failed", "ulimit -l"]),
    ] {
        let error = opened(config).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
        assert!(reasons.iter().all(|reason| error.to_string().contains(reason)), "{error}");
    }
    // The engine allows RDMA alone unless the program chooses.
    drop(opened(with(1, stand_in(Backend::Nixl, &[("REQUIRE_RDMA", "1")]))).unwrap());
}

#[test]
fn nixl_is_used_only_if_the_configuration_names_it() {
    for backend in [Backend::Auto, Backend::Sockets] {
        let fabric = FabricConfig {
            backend,
            assume_device: true,
            ucx_library: Some("/nowhere/libucp.so.0".into()),
            ..stand_in(Backend::Nixl, &[])
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
fn refused(local: FabricConfig, remote: FabricConfig) -> Error {
    let (local, remote) = (open(with(1, local), Way::Nixl), open(with(2, remote), Way::Nixl));
    link(&local, &remote).unwrap_err()
}

#[test]
fn both_sides_must_use_nixl_in_equal_versions() {
    let mark = b"NIXL version: \0";
    let mut bytes = std::fs::read(library("libfake_nixl.so")).unwrap();
    let at = bytes.windows(mark.len()).position(|window| window == mark).unwrap() + mark.len();
    bytes[at..at + 5].copy_from_slice(b"1.4.0");
    let older = std::env::temp_dir().join(format!("libfake_nixl_older-{}.so", std::process::id()));
    std::fs::write(&older, bytes).unwrap();
    let older_nixl = FabricConfig { nixl_library: Some(older.clone()), ..stand_in(Backend::Nixl, &[]) };
    let sockets = FabricConfig { backend: Backend::Sockets, ..FabricConfig::default() };
    for (remote, reason) in [
        // The side that was dialled takes the offer first.
        (older_nixl, "llm.TransferBackend=nixl, but the peer uses NIXL 1.5.1, and this side 1.4.0"),
        (
            stand_in(Backend::Ucx, &[]),
            "llm.TransferBackend=ucx, but the peer uses NIXL 1.5.1, and this side UCX 1.13.0",
        ),
        (sockets, "llm.TransferBackend=nixl, but the peer does not use NIXL"),
    ] {
        let error = refused(stand_in(Backend::Nixl, &[]), remote);
        assert_eq!(error.kind(), ErrorKind::LinkFailed, "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
    std::fs::remove_file(older).unwrap();
    let error = refused(stand_in(Backend::Ucx, &[]), stand_in(Backend::Nixl, &[]));
    assert!(error.to_string().contains("the peer uses UCX 1.13.0, and this side NIXL 1.5.1"), "{error}");
}
