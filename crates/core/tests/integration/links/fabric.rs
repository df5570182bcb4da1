//! Links on which a stand-in for UCX reads pools: what it refuses, stalls and loses, and what both sides must agree on.
//!
//! The other tests of links run over it too (`Way::Fabric`). `crates/ucx` tests reads alone, and with the real library.

use std::fmt::Debug;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use llm_datadist_core::bindings::{Backend, Config, DataDist, FabricConfig, Rows};
use llm_datadist_core::testing::protocol::{BoundedBytes, EnteredLink, FabricOffer, FabricPool, LinkAnswer};
use llm_datadist_core::{CacheKind, Deadline, Error, ErrorKind, Result};

use super::fake_peer::Fake;
use super::stand_ins::{ALL, BLOCK, BLOCKS, Controlled, library, stand_in};

use super::{
    Held, LONG, Way, address, bytes_by, config, device, fails_saying, fails_with, link, of, open, pulling,
    push_blocks, row, under,
};
use crate::fixtures::skipped;

/// Calls `pull`, has `during` happen while its reads have stalled, and returns how the pull failed.
fn fails<T: Send + Debug>(
    pair: &Controlled,
    pull: impl FnOnce() -> Result<T> + Send,
    during: impl FnOnce(),
) -> Error {
    pair.set("STALL", 60);
    thread::scope(|scope| {
        let pulling = scope.spawn(pull);
        thread::sleep(Duration::from_millis(100));
        during();
        pulling.join().unwrap().unwrap_err()
    })
}

/// A configuration with this backend, on a host that has a device.
fn backed(cluster: u64, backend: Backend) -> Config {
    let mut config = config(cluster, Way::Fabric);
    assumes_device(backend)(&mut config);
    config
}

fn assumes_device(backend: Backend) -> impl Fn(&mut Config) {
    move |config| (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true)
}

fn try_open(config: Config) -> Result<DataDist> {
    DataDist::open_over(config, Way::Fabric.devices(), Way::Fabric.transports())
}

#[test]
fn a_pull_that_stalls_ends_at_its_deadline_and_writes_nothing_afterwards() {
    let pair = Controlled::new(|_| ());
    let bytes = pair.remote_cache.fill(1);
    for end in [0, 1, 50, 127] {
        pair.set("STALL", end);
        fails_with(pair.pull(Duration::from_millis(60)), ErrorKind::Timeout);
        let after = pair.local_cache.fill(9);
        pair.set("STALL", i64::MAX);
        thread::sleep(Duration::from_millis(100));
        assert!(pair.local_cache.read() == after, "bytes came after the end");
        pair.pull(LONG).unwrap();
        assert!(pair.arrived(&bytes));
    }
    assert_eq!(pair.paths(), (4 * ALL, 0));
    let ucx = pair.local.stats().ucx;
    assert_eq!((ucx.reads, ucx.bytes), (4, 4 * ALL));
    // On a busy machine, the time of a pull may be over before its read begins.
    assert!(ucx.forced_closes <= ucx.failures && ucx.failures <= 4, "{ucx:?}");
    assert!(ucx.version.is_some() && ucx.reason.is_none(), "{ucx:?}");
}

/// The owner releases the cache while it is read. No generations of another host are visible, so the owner is asked.
#[test]
fn a_cache_that_is_released_while_it_is_read_is_never_a_success() {
    let pair = Controlled::new(|_| ());
    pair.remote_cache.fill(1);
    let error = fails(
        &pair,
        || pair.pull(LONG),
        || {
            pair.remote_cache.free(&pair.remote);
            let shape = device(2, BLOCKS as usize, BLOCK);
            Held::pool(&pair.remote, &shape, CacheKind::Blocks).fill(7);
            pair.set("STALL", i64::MAX);
        },
    );
    assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{error}");
}

#[test]
fn a_link_that_ends_ends_its_reads() {
    let pair = Controlled::new(|_| ());
    pair.remote_cache.fill(1);
    let local = [address(&pair.local)];
    let unlink = || pair.remote.unlink_clusters(&local, Duration::from_secs(1), true).remove(0).unwrap();
    let error = fails(&pair, || pair.pull(LONG), unlink);
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    let after = pair.local_cache.fill(9);
    pair.set("STALL", i64::MAX);
    thread::sleep(Duration::from_millis(100));
    assert!(pair.local_cache.read() == after, "bytes came after the end");
}

/// The owner revokes the grant while it is read.
#[test]
fn a_grant_that_ends_while_it_is_read_is_never_a_success() {
    let pair = Controlled::new(|_| ());
    pair.remote_cache.fill(1);
    let all: Vec<i64> = (0..BLOCKS).collect();
    let remote = &pair.remote;
    let grant = remote.grant(&pair.remote_cache.end(), &all, LONG, 1).unwrap();
    let token = remote.grant_token(&grant);
    let rows = Rows::Blocks { remote: all.iter().rev().copied().collect(), local: all };
    let from = of(2, row(&pair.remote_cache, 0));
    let pull = || pulling(&pair.local, from, &pair.local_cache, rows.clone(), under(token)).run();
    pull().unwrap();
    let revoke = || {
        remote.start_revoke(&grant, None).unwrap().join(Deadline::after(LONG)).unwrap();
        pair.set("STALL", i64::MAX);
    };
    let error = fails(&pair, pull, revoke);
    assert_eq!(error.kind(), ErrorKind::GrantEnded, "{error}");
}

#[test]
fn ucx_is_not_used_without_a_token() {
    let opened = |cluster, backend| {
        let mut config = backed(cluster, backend);
        config.links.token = None;
        try_open(config)
    };
    fails_saying(opened(1, Backend::Ucx), ErrorKind::NotEnabled, "UCX needs a token");
    let [local, remote] = [1, 2].map(|cluster| opened(cluster, Backend::Auto).unwrap());
    link(&local, &remote).unwrap();
    super::check_pull(&local, &remote);
    let reason = local.stats().links.remove(0).sockets_reason.unwrap();
    assert!(reason.starts_with("the link uses TCP") && reason.contains("UCX needs a token"), "{reason}");
}

/// UCX listens on all networks if it may use TCP.
#[test]
fn the_engine_allows_rdma_alone_unless_the_program_chooses() {
    let opened = |settings: &[(&str, &str)]| {
        let mut config = config(1, Way::Fabric);
        config.links.fabric = stand_in(&[&[("REQUIRE_RDMA", "1")], settings].concat());
        try_open(config)
    };
    drop(opened(&[]).unwrap());
    fails_with(opened(&[("TLS", "all")]), ErrorKind::NotEnabled);
}

#[test]
fn a_failure_of_ucx_fails_the_call_if_it_is_named_and_uses_sockets_otherwise() {
    for (backend, setting, value) in [
        (Backend::Ucx, "RESET", 1),
        (Backend::Auto, "RESET", 1),
        (Backend::Ucx, "REFUSE_ucp_ep_rkey_unpack", -5),
        (Backend::Auto, "REFUSE_ucp_ep_rkey_unpack", -5),
        (Backend::Auto, "REFUSE_ucp_ep_create", -6),
        (Backend::Auto, "REFUSE_ucp_get_nbx", -4),
    ] {
        let pair = Controlled::new(assumes_device(backend));
        let bytes = pair.remote_cache.fill(1);
        pair.set(setting, value);
        let pulled = pair.pull(LONG);
        let reason = format!("UCX status {}", if setting == "RESET" { -25 } else { value });
        if backend == Backend::Ucx {
            fails_saying(pulled, ErrorKind::NotEnabled, &reason);
            assert_eq!(pair.paths(), (0, 0));
        } else {
            pulled.unwrap();
            assert!(pair.arrived(&bytes));
            assert_eq!(pair.paths(), (0, ALL));
            let link = pair.local.stats().links.remove(0);
            assert!(link.sockets_reason.unwrap().contains(&reason), "{setting}");
        }
    }
}

/// A push is a read by the peer, so it fails where the peer cannot read.
#[test]
fn a_push_uses_sockets_if_the_peer_cannot_read() {
    for backend in [Backend::Ucx, Backend::Auto] {
        let pair = Controlled::new(assumes_device(backend));
        pair.set("RESET", 1);
        let source = pair.remote_cache.fill(3);
        let all: Vec<i64> = (0..BLOCKS).collect();
        // Cluster 1 reads.
        let pushed =
            push_blocks(&pair.remote, &pair.remote_cache, &all, of(1, row(&pair.local_cache, 0)), &all);
        if backend == Backend::Ucx {
            assert_eq!(pushed.unwrap_err().kind(), ErrorKind::NotEnabled);
        } else {
            pushed.unwrap();
            assert!(pair.local_cache.read() == source);
        }
    }
}

#[test]
fn both_sides_must_use_ucx() {
    let opened =
        |local, remote| [(1, local), (2, remote)].map(|(id, backend)| open(backed(id, backend), Way::Fabric));
    let [local, remote] = opened(Backend::Ucx, Backend::Sockets);
    let error = link(&local, &remote).unwrap_err().to_string();
    assert!(error.contains("this side moves bytes with UCX only, but the peer does not use UCX"), "{error}");
    for (local, remote) in [(Backend::Auto, Backend::Sockets), (Backend::Sockets, Backend::Auto)] {
        let [local, remote] = opened(local, remote);
        assert!(moved_by_ucx(&local, &remote).iter().all(|(by_ucx, _)| !by_ucx));
    }
}

/// Pulls from the other engine in both directions. Returns whether UCX has moved the bytes, and why not, for each engine.
fn moved_by_ucx(local: &DataDist, remote: &DataDist) -> [(bool, Option<String>); 2] {
    link(local, remote).unwrap();
    super::check_pull(local, remote);
    super::check_pull(remote, local);
    [local, remote]
        .map(|engine| (bytes_by("fabric", engine) > 0, engine.stats().links.remove(0).sockets_reason))
}

/// Whether this host itself has a device, so that no engine behaves as without one.
fn host_has_device() -> bool {
    std::fs::read_dir("/sys/class/infiniband").is_ok_and(|mut devices| devices.next().is_some())
}

#[test]
fn auto_uses_ucx_if_both_hosts_have_a_device() {
    const OWN: &str = "this host has no RDMA device";
    const PEER: &str = "the peer does not use UCX";
    for (devices, expected) in [
        ([true, true], [None, None]),
        ([true, false], [Some(PEER), Some(OWN)]),
        ([false, true], [Some(OWN), Some(PEER)]),
        ([false, false], [Some(OWN), Some(OWN)]),
    ] {
        if devices != [true, true] && host_has_device() {
            skipped("this host has an RDMA device");
            continue;
        }
        let [local, remote] = [(1, devices[0]), (2, devices[1])].map(|(cluster, device)| {
            let mut config = backed(cluster, Backend::Auto);
            config.links.fabric.assume_device = device;
            open(config, Way::Fabric)
        });
        for ((by_ucx, reason), expected) in moved_by_ucx(&local, &remote).into_iter().zip(expected) {
            assert_eq!(by_ucx, expected.is_none(), "{devices:?}: {reason:?}");
            assert!(expected.is_none_or(|why| reason.unwrap().contains(why)), "{devices:?}");
        }
    }
}

/// Returns a copy of the stand-in with another version.
fn other_version(version: [u8; 6]) -> PathBuf {
    let mark = b"UCX version: \0";
    let mut bytes = std::fs::read(library("libfake_ucp.so")).unwrap();
    let at = bytes.windows(mark.len()).position(|window| window == mark).unwrap() + mark.len();
    bytes[at..at + version.len()].copy_from_slice(&version);
    let file = std::env::temp_dir().join(format!("libfake_ucp_other-{}.so", std::process::id()));
    std::fs::write(&file, bytes).unwrap();
    file
}

#[test]
fn auto_uses_sockets_if_versions_of_ucx_differ() {
    let file = other_version(*b"1.14.2");
    let made = |cluster, backend, library: Option<&PathBuf>| {
        let mut config = backed(cluster, backend);
        config.links.fabric.ucx_library = library.or(config.links.fabric.ucx_library.as_ref()).cloned();
        open(config, Way::Fabric)
    };
    let (local, remote) = (made(1, Backend::Auto, None), made(2, Backend::Auto, Some(&file)));
    let reasons =
        ["the peer uses UCX 1.14.2, and this side 1.13.0", "the peer uses UCX 1.13.0, and this side 1.14.2"];
    for ((by_ucx, reason), expected) in moved_by_ucx(&local, &remote).into_iter().zip(reasons) {
        assert!(!by_ucx && reason.as_ref().is_some_and(|reason| reason.contains(expected)), "{reason:?}");
    }
    // Equal versions that are not the default.
    let (local, remote) = (made(3, Backend::Auto, Some(&file)), made(4, Backend::Auto, Some(&file)));
    assert!(moved_by_ucx(&local, &remote).iter().all(|(by_ucx, _)| *by_ucx));
    // Either side may be the one that requires UCX.
    for [dialling, listening] in [[Backend::Ucx, Backend::Auto], [Backend::Auto, Backend::Ucx]] {
        let (local, remote) = (made(5, dialling, None), made(6, listening, Some(&file)));
        let error = fails_with(link(&local, &remote), ErrorKind::LinkFailed);
        assert!(
            error.to_string().contains("this side moves bytes with UCX only, but the peer uses UCX"),
            "{error}"
        );
    }
    std::fs::remove_file(file).unwrap();
}

#[test]
fn an_offer_that_cannot_be_used_fails_the_link_if_ucx_is_named() {
    let pool = |base, len| [Some(FabricPool { base, len, key: BoundedBytes(vec![1]) }), None];
    let offer =
        |version: &str, pools| FabricOffer { version: version.into(), address: BoundedBytes(vec![1]), pools };
    let cases = [
        (offer("9.9.9", [None, None]), "the peer uses UCX 9.9.9, and this side 1.13.0"),
        // An error contains no control characters of a peer.
        (offer("1\n2", [None, None]), "the peer uses UCX 1 2, and this side 1.13.0"),
        (offer("1.13.0", pool(u64::MAX, 2)), "address"),
    ];
    for (backend, (offer, reason)) in [Backend::Ucx, Backend::Auto]
        .into_iter()
        .flat_map(|backend| cases.iter().map(move |case| (backend, case)))
    {
        let engine = open(backed(1, backend), Way::Fabric);
        let mut fake = Fake::new(2, 5);
        fake.token = super::TOKEN.into();
        let answer =
            LinkAnswer::Entered(EnteredLink { fabric: Some(offer.clone()), ..EnteredLink::default() });
        let (linked, _stream) = fake.linked_by(&engine, || fake.answers_link(&answer));
        if backend == Backend::Ucx {
            fails_saying(linked, ErrorKind::LinkFailed, reason);
        } else {
            linked.unwrap();
        }
    }
}

#[test]
fn an_engine_that_cannot_use_ucx_says_why() {
    let opened = |backend, change: &dyn Fn(&mut Config)| {
        let mut config = backed(1, backend);
        change(&mut config);
        try_open(config)
    };
    let missing = |config: &mut Config| config.links.fabric.ucx_library = Some("/nowhere/libucp.so.0".into());
    fails_saying(opened(Backend::Ucx, &missing), ErrorKind::NotEnabled, "/nowhere/libucp.so.0");
    let no_device = |config: &mut Config| config.links.fabric.assume_device = false;
    // A host with a device of its own uses it.
    let without_device: (&dyn Fn(&mut Config), &str) =
        if host_has_device() { (&missing, "/nowhere") } else { (&no_device, "no RDMA device") };
    for (backend, change, reason) in [
        (Backend::Auto, &missing as &dyn Fn(&mut Config), "/nowhere/libucp.so.0"),
        (Backend::Auto, without_device.0, without_device.1),
        (Backend::Sockets, &missing, "the configuration chooses sockets"),
    ] {
        let ucx = opened(backend, change).unwrap().stats().ucx;
        assert!(
            ucx.version.is_none() && ucx.reason.as_ref().is_some_and(|said| said.contains(reason)),
            "{ucx:?}"
        );
    }
    for call in
        ["ucp_init_version", "ucp_worker_create", "ucp_worker_get_address", "ucp_mem_map", "ucp_rkey_pack"]
    {
        let refuses = |config: &mut Config| {
            config.links.fabric = FabricConfig {
                backend: config.links.fabric.backend,
                ..stand_in(&[(&format!("REFUSE_{call}"), "-4")])
            };
        };
        let error = opened(Backend::Ucx, &refuses).unwrap_err().to_string();
        assert!(error.contains(&format!("{call} failed: out of memory (UCX status -4)")), "{error}");
    }
    assert!(address(&opened(Backend::Auto, &missing).unwrap()).remote.len() == 1);
}
