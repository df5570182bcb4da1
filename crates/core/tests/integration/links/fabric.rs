//! Links on which a stand-in for UCX reads pools: what it refuses, stalls and loses, and what both sides must agree on.
//!
//! The other tests of links run over it too (`Way::Fabric`). `crates/ucx` tests reads alone, and with the real library.

#![allow(unsafe_code, reason = "functions of a library that a test loads")]

use std::ffi::{CString, c_char};
use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use llm_datadist_core::{
    Backend, CacheKey, CacheKind, CallExtras, Config, DataDist, Error, ErrorKind, GrantUse, Layers, Name,
    PullRows, Result,
};

use llm_datadist_core::testing::protocol::{EnteredLink, FabricOffer, FabricPool, LinkAnswer};

use super::fake_peer::Fake;
use super::{Held, Pair, Way, address, config, device, fake_ucp, link, of, open, push_blocks, row};
use crate::fixtures::eventually;

const KEY: CacheKey = CacheKey::Blocks { model: 1 };
const BLOCKS: i64 = 64;
const BLOCK: usize = 4096;

/// Changes a setting of the stand-in in the engine with this name.
pub(crate) fn set(name: &str, setting: &str, value: i64) {
    type Set = unsafe extern "C" fn(*const c_char, *const c_char, i64) -> bool;
    let file = std::env::current_exe().unwrap().with_file_name("libfake_ucp.so");
    // SAFETY: the stand-in, which is loaded already.
    let library = unsafe { libloading::Library::new(file) }.unwrap();
    // SAFETY: the signature of the function.
    let set = unsafe { library.get::<Set>("fake_ucp_set") }.unwrap();
    let [name, setting] = [name, setting].map(|text| CString::new(text).unwrap());
    // SAFETY: two texts that end with a zero byte.
    assert!(unsafe { set(name.as_ptr(), setting.as_ptr(), value) }, "no context has this name");
}

/// Cluster 1, whose reads a test controls, and cluster 2, linked by 1; and a cache of each.
struct Controlled {
    name: String,
    pair: Pair,
    near: Held,
    far: Held,
}

impl Controlled {
    fn new(change: impl Fn(&mut Config)) -> Controlled {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let name = format!("engine {}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let pair = Pair::with(Way::Fabric, |config| {
            config.remote_accessible = true;
            if config.cluster.0 == 1 {
                let settings = [("FAKE_NAME", name.as_str())];
                config.links.fabric = fake_ucp(&settings);
            }
            change(config);
        });
        let shape = device(2, BLOCKS as usize, BLOCK);
        let near = Held::pool(&pair.local, &shape, CacheKind::Blocks);
        let far = Held::new(&pair.remote, false, &shape, CacheKind::Blocks, &[Some(KEY)]);
        Controlled { name, pair, near, far }
    }

    fn set(&self, setting: &str, value: i64) {
        set(&self.name, setting, value);
    }

    fn pull(&self, limit: Duration) -> Result<()> {
        // Backwards, so that each block is a request of its own.
        let rows = PullRows::Blocks { remote: (0..BLOCKS).rev().collect(), local: (0..BLOCKS).collect() };
        let from = of(2, Name::Key(KEY));
        let transfer =
            self.pair.local.pull_async(from, &self.near.end(), rows, Layers::ALL, Some(limit)).unwrap();
        eventually("the end of a pull", || transfer.outcome().is_some());
        transfer.outcome().unwrap().map(|_| ())
    }

    /// Calls `pull`, has `during` happen while its reads have stalled, and returns how the pull failed.
    fn fails<T: Send + Debug>(
        &self,
        pull: impl FnOnce() -> Result<T> + Send,
        during: impl FnOnce(),
    ) -> Error {
        self.set("STALL", 60);
        thread::scope(|scope| {
            let pulling = scope.spawn(pull);
            thread::sleep(Duration::from_millis(100));
            during();
            pulling.join().unwrap().unwrap_err()
        })
    }

    /// Whether all blocks of a source are in place.
    fn arrived(&self, source: &[Vec<u8>]) -> bool {
        let backwards = |tensor: &Vec<u8>| tensor.chunks(BLOCK).rev().flatten().copied().collect::<Vec<u8>>();
        self.near.read() == source.iter().map(backwards).collect::<Vec<_>>()
    }

    fn paths(&self) -> (u64, u64) {
        let link = self.pair.local.stats().links.remove(0);
        let bytes = |name| link.paths.iter().find(|(path, _)| *path == name).unwrap().1.bytes;
        (bytes("fabric"), bytes("sockets"))
    }
}

const LONG: Duration = Duration::from_secs(20);
const ALL: u64 = 2 * BLOCKS as u64 * BLOCK as u64;

#[test]
fn a_pull_that_stalls_ends_at_its_deadline_and_writes_nothing_afterwards() {
    let both = Controlled::new(|_| ());
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
    assert_eq!(both.paths(), (4 * ALL, 0));
    let ucx = both.pair.local.stats().ucx;
    assert_eq!((ucx.reads, ucx.bytes, ucx.failures, ucx.forced_closes), (4, 4 * ALL, 4, 4));
    assert!(ucx.version.is_some() && ucx.reason.is_none(), "{ucx:?}");
}

/// The owner releases the cache while it is read. No generations of another host are visible, so the owner is asked.
#[test]
fn a_cache_that_is_released_while_it_is_read_is_never_a_success() {
    let both = Controlled::new(|_| ());
    both.far.fill(1);
    let error = both.fails(
        || both.pull(LONG),
        || {
            both.far.free(&both.pair.remote);
            let shape = device(2, BLOCKS as usize, BLOCK);
            Held::pool(&both.pair.remote, &shape, CacheKind::Blocks).fill(7);
            both.set("STALL", i64::MAX);
        },
    );
    assert_eq!(error.kind(), ErrorKind::CacheNotFound, "{error}");
}

#[test]
fn a_link_that_ends_ends_its_reads() {
    let both = Controlled::new(|_| ());
    both.far.fill(1);
    let local = [address(&both.pair.local)];
    let unlink = || both.pair.remote.unlink_clusters(&local, Duration::from_secs(1), true).remove(0).unwrap();
    let error = both.fails(|| both.pull(LONG), unlink);
    assert_eq!(error.kind(), ErrorKind::NotLinked, "{error}");
    let after = both.near.fill(9);
    both.set("STALL", i64::MAX);
    thread::sleep(Duration::from_millis(100));
    assert!(both.near.read() == after, "bytes came after the end");
}

/// The owner revokes the grant while it is read.
#[test]
fn a_grant_that_ends_while_it_is_read_is_never_a_success() {
    let both = Controlled::new(|_| ());
    both.far.fill(1);
    let all: Vec<i64> = (0..BLOCKS).collect();
    let remote = &both.pair.remote;
    let grant = remote.grant(&both.far.end(), &all, LONG, 1).unwrap();
    let token = remote.grant_token(&grant);
    let rows = PullRows::Blocks { remote: all.iter().rev().copied().collect(), local: all };
    let pull = || {
        let extras = CallExtras { grant: Some(GrantUse { token, done: false }), ..CallExtras::default() };
        both.pair.local.pull_with(of(2, row(&both.far, 0)), &both.near.end(), &rows, Layers::ALL, extras)
    };
    pull().unwrap();
    let revoke = || {
        remote.revoke(&grant, true).unwrap();
        both.set("STALL", i64::MAX);
    };
    let error = both.fails(pull, revoke);
    assert_eq!(error.kind(), ErrorKind::GrantEnded, "{error}");
}

#[test]
fn ucx_is_not_used_without_a_token() {
    let opened = |cluster, backend| {
        let mut config = config(cluster, Way::Fabric);
        config.links.token = None;
        (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
        DataDist::open_over(config, Way::Fabric.devices(), Way::Fabric.transports())
    };
    let error = opened(1, Backend::Ucx).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotEnabled);
    assert!(error.to_string().contains("UCX needs a token"), "{error}");
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
        config.links.fabric = fake_ucp(&[&[("REQUIRE_RDMA", "1")], settings].concat());
        DataDist::open_over(config, Way::Fabric.devices(), Way::Fabric.transports())
    };
    drop(opened(&[]).unwrap());
    let error = opened(&[("TLS", "all")]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
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
        let both = Controlled::new(|config| {
            (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
        });
        let bytes = both.far.fill(1);
        both.set(setting, value);
        let pulled = both.pull(LONG);
        let reason = format!("UCX status {}", if setting == "RESET" { -25 } else { value });
        if backend == Backend::Ucx {
            let error = pulled.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NotEnabled, "{error}");
            assert!(error.to_string().contains(&reason), "{error}");
            assert_eq!(both.paths(), (0, 0));
        } else {
            pulled.unwrap();
            assert!(both.arrived(&bytes));
            assert_eq!(both.paths(), (0, ALL));
            let link = both.pair.local.stats().links.remove(0);
            assert!(link.sockets_reason.unwrap().contains(&reason), "{setting}");
        }
    }
}

/// A push is a read by the peer, so it fails where the peer cannot read.
#[test]
fn a_push_uses_sockets_if_the_peer_cannot_read() {
    for backend in [Backend::Ucx, Backend::Auto] {
        let both = Controlled::new(|config| {
            (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
        });
        both.set("RESET", 1);
        let source = both.far.fill(3);
        let all: Vec<i64> = (0..BLOCKS).collect();
        // Cluster 1 reads.
        let pushed = push_blocks(&both.pair.remote, &both.far, &all, of(1, row(&both.near, 0)), &all);
        if backend == Backend::Ucx {
            assert_eq!(pushed.unwrap_err().kind(), ErrorKind::NotEnabled);
        } else {
            pushed.unwrap();
            assert!(both.near.read() == source);
        }
    }
}

#[test]
fn both_sides_must_use_ucx() {
    let cases = [
        (Backend::Ucx, Backend::Sockets, Some("llm.TransferBackend=ucx, but the peer does not use UCX")),
        (Backend::Auto, Backend::Sockets, None),
        (Backend::Sockets, Backend::Auto, None),
        (Backend::Auto, Backend::Auto, None),
    ];
    for (near, far, refused) in cases {
        let made = |cluster, backend| {
            let mut config = config(cluster, Way::Fabric);
            (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
            open(config, Way::Fabric)
        };
        let (local, remote) = (made(1, near), made(2, far));
        match (link(&local, &remote), refused) {
            (Err(error), Some(reason)) => assert!(error.to_string().contains(reason), "{error}"),
            (linked, _) => {
                linked.unwrap();
                super::check_pull(&local, &remote);
                let link = local.stats().links.remove(0);
                let fabric = link.paths.iter().any(|(name, path)| *name == "fabric" && path.bytes > 0);
                assert_eq!(fabric, (near, far) == (Backend::Auto, Backend::Auto));
            }
        }
    }
}

#[test]
fn an_offer_that_cannot_be_used_fails_the_link_if_ucx_is_named() {
    let pool = |base, len| [Some(FabricPool { base, len, key: vec![1].into() }), None];
    let offer =
        |version: &str, pools| FabricOffer { version: version.into(), address: vec![1].into(), pools };
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
        let mut config = config(1, Way::Fabric);
        (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
        let engine = open(config, Way::Fabric);
        let mut fake = Fake::new(2, 5);
        fake.token = super::TOKEN.into();
        let answer =
            LinkAnswer::Entered(EnteredLink { fabric: Some(offer.clone()), ..EnteredLink::default() });
        let (linked, _stream) = fake.linked_by(&engine, || fake.answers_link(&answer));
        if backend == Backend::Ucx {
            let error = linked.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::LinkFailed, "{error}");
            assert!(error.to_string().contains(reason), "{error}");
        } else {
            linked.unwrap();
        }
    }
}

#[test]
fn an_engine_that_cannot_use_ucx_says_why() {
    let opened = |backend, change: &dyn Fn(&mut Config)| {
        let mut config = config(1, Way::Fabric);
        (config.links.fabric.backend, config.links.fabric.assume_device) = (backend, true);
        change(&mut config);
        DataDist::open_over(config, Way::Fabric.devices(), Way::Fabric.transports())
    };
    let missing = |config: &mut Config| config.links.fabric.ucx_library = Some("/nowhere/libucp.so.0".into());
    let error = opened(Backend::Ucx, &missing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotEnabled);
    assert!(error.to_string().contains("/nowhere/libucp.so.0"), "{error}");
    let without_device = |config: &mut Config| config.links.fabric.assume_device = false;
    for (backend, change, reason) in [
        (Backend::Auto, &missing as &dyn Fn(&mut Config), "/nowhere/libucp.so.0"),
        (Backend::Auto, &without_device, "no RDMA device"),
        (Backend::Sockets, &missing, "llm.TransferBackend=sockets"),
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
            config.links.fabric = llm_datadist_core::FabricConfig {
                backend: config.links.fabric.backend,
                ..fake_ucp(&[(&format!("REFUSE_{call}"), "-4")])
            };
        };
        let error = opened(Backend::Ucx, &refuses).unwrap_err().to_string();
        assert!(error.contains(&format!("{call} failed: out of memory (UCX status -4)")), "{error}");
    }
    assert!(address(&opened(Backend::Auto, &missing).unwrap()).remote.len() == 1);
}
