//! The mode of the `KvCacheManager`: its options, its pool, its rules for copies, and two engines of one cluster id.
//!
//! Not for: order of checks and codes (the Python tests), or what is alike in both modes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use llm_datadist_core::testing::memory::{usable_bytes, usable_under};
use llm_datadist_core::testing::validate::{self, Side};
use llm_datadist_core::{
    CacheKey, CacheKind, ClusterId, Config, CopyArgs, DataDist, End, Error, ErrorKind, Geometry, Layers,
    Mode, Name, PeerAddress, Placement, PoolConfig, PullRows, RemoteName, Role, Share,
};

use crate::fixtures::{self, Own, desc};
use CacheKind::{Batch, Blocks};
use ErrorKind::{CacheNotFound, InvalidArgument, NotLinked, OutOfMemory};
use Placement::{Device, Host};

const LONG: Duration = Duration::from_secs(20);

fn read(options: &[(&str, &str)]) -> llm_datadist_core::Result<Config> {
    let options: BTreeMap<String, String> =
        options.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    validate::config(Role::Prompt, ClusterId(7), &options)
}

fn engine(cluster: u64, mode: Mode) -> DataDist {
    let mut config = Config::new(Role::Prompt, ClusterId(cluster));
    config.mode = mode;
    config.device_pool = Some(PoolConfig { memory_size: 1 << 20, page_shift: 12 });
    config.host_pool = config.device_pool;
    config.sync_timeout = LONG;
    config.links.listen = Some("127.0.0.1:0".parse().unwrap());
    DataDist::open(config).unwrap()
}

fn link(local: &DataDist, remote: &DataDist) {
    let listening = remote.listening().into_iter().collect();
    let peer = PeerAddress { cluster: remote.config().cluster, remote: listening, local: vec![] };
    local.link_clusters(&[peer], LONG).remove(0).unwrap();
}

#[test]
fn options_of_the_mode() {
    let kv = |more: &[(&str, &str)]| {
        read(more).map(|config| (config.mode, config.device_pool, config.device_share))
    };
    let page = 1 << 16;
    let pool = |memory_size| Some(PoolConfig { memory_size, page_shift: 16 });
    assert_eq!(kv(&[]).unwrap(), (Mode::KvCacheManager, None, Some(Share::DEFAULT)));
    assert_eq!(kv(&[("llm.EnableCacheManager", "0")]).unwrap().0, Mode::KvCacheManager);
    assert_eq!(
        kv(&[("llm.MemoryUtilization", "0.5")]).unwrap(),
        (Mode::KvCacheManager, None, Some(Share::of(0.5)))
    );
    for (text, bytes) in [
        ("1000000", 15 * page),
        ("65536", page),
        ("65535", page),
        ("0", page),
        ("18446744073709551615", (u64::from(u32::MAX) - 1) << 16),
    ] {
        let given = [("ge.flowGraphMemMaxSize", text), ("llm.MemoryUtilization", "0.1")];
        assert_eq!(kv(&given).unwrap(), (Mode::KvCacheManager, pool(bytes), None), "{text}");
    }
    // A pool that was configured is the pool.
    let both = [("llm.MemPoolConfig", "{\"memory_size\": 131072}"), ("ge.flowGraphMemMaxSize", "1000000")];
    assert_eq!(kv(&both).unwrap(), (Mode::KvCacheManager, pool(131_072), None));
    for (key, bad) in [
        ("ge.flowGraphMemMaxSize", "18446744073709551616"),
        ("ge.flowGraphMemMaxSize", ""),
        ("ge.flowGraphMemMaxSize", "-1"),
        ("llm.MemoryUtilization", "1.1"),
        ("llm.MemoryUtilization", "-0.1"),
        ("llm.MemoryUtilization", "nan"),
        ("llm.MemoryUtilization", "much"),
    ] {
        let error = read(&[(key, bad)]).unwrap_err();
        assert_eq!(error.kind(), InvalidArgument, "{key} = {bad:?}");
        assert!(error.to_string().contains(key), "{error}");
        // With the cache manager neither has any effect.
        let config = read(&[(key, bad), ("llm.EnableCacheManager", "1")]).unwrap();
        assert_eq!((config.mode, config.device_pool, config.device_share), (Mode::CacheManager, None, None));
    }
    // One-sided transfers are the cache manager's.
    let one_sided = ("llm.EnableRemoteCacheAccessible", "1");
    assert!(!read(&[one_sided]).unwrap().remote_accessible);
    assert!(read(&[one_sided, ("llm.EnableCacheManager", "1")]).unwrap().remote_accessible);
}

#[test]
fn shares() {
    for (part, bytes) in
        [(0.95, 950), (0.0, 0), (1.0, 1000), (0.5, 500), (7.0, 1000), (-1.0, 0), (f64::NAN, 0)]
    {
        assert_eq!(Share::of(part).of_bytes(1000), bytes, "{part}");
    }
    assert_eq!(Share::of(1.0).of_bytes(u64::MAX), u64::MAX);
    assert_eq!(Share::of(0.95), Share::DEFAULT);
}

#[test]
fn a_pool_unasked() {
    let open = |share| {
        let mut config = Config::new(Role::Prompt, ClusterId(1));
        config.mode = Mode::KvCacheManager;
        config.device_share = Some(share);
        DataDist::open(config).unwrap()
    };
    // Address space until it is touched, so many may be open.
    let engines: Vec<_> = (0..4).map(|_| open(Share::DEFAULT)).collect();
    for engine in &engines {
        let report = engine.stats().device_pool.unwrap();
        assert!(report.pool.capacity_bytes > 1 << 20);
        assert_eq!(engine.config().device_pool.unwrap().memory_size, report.pool.capacity_bytes);
        if report.huge_pages != "reserved" {
            assert_eq!(report.committed_bytes, 0);
        }
        let cache = engine.allocate(&desc(Device, 2, 4, 64), Batch, &[]).unwrap();
        fixtures::fill(&cache, &fixtures::patterned(1, 2, 256));
        assert!(engine.stats().host_pool.is_none());
    }
    // No room is not no pool: it is a pool that has none, which may be waited for.
    let none = open(Share::of(0.0));
    assert_eq!(none.stats().device_pool.unwrap().pool.capacity_bytes, 1 << 16);
    let error = none.allocate(&desc(Device, 2, 4, 1 << 16), Batch, &[]).unwrap_err();
    assert_eq!(error.kind(), OutOfMemory);
}

fn side(num_tensors: u32, rows: usize, row_bytes: usize, kind: CacheKind, placement: Placement) -> Side {
    Side { geometry: Geometry::new(&desc(placement, num_tensors, rows, row_bytes)).unwrap(), kind, placement }
}

fn refused<T: std::fmt::Debug>(result: llm_datadist_core::Result<T>, facts: &[&str]) -> Error {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), InvalidArgument, "{error}");
    assert!(facts.iter().all(|fact| error.to_string().contains(fact)), "{error}: {facts:?}");
    error
}

#[test]
fn rows_of_either_kind() {
    let (local, cache) = (side(2, 10, 128, Batch, Host), side(2, 20, 128, Batch, Device));
    assert_eq!(validate::swap_rows(local, cache, &[(9, 19)]).unwrap().pairs, [(9, 19)]);
    assert_eq!(
        validate::swap_rows(cache, side(2, 10, 128, Blocks, Host), &[(19, 9)]).unwrap().block_bytes,
        128
    );
    refused(validate::swap_rows(local, cache, &[(10, 0)]), &["source block=10", "0 to 9"]);
    refused(validate::swap_rows(cache, cache, &[]), &["placements"]);
    refused(validate::swap_rows(local, side(2, 20, 64, Batch, Device), &[]), &["block sizes"]);
    refused(validate::swap_rows(local, side(3, 20, 128, Batch, Device), &[]), &["num_tensors"]);
    assert_eq!(validate::copy_rows(cache, &[(0, 19)]).unwrap().num_tensors, 2);
    refused(validate::copy_rows(local, &[(0, 1)]), &["cache is in host"]);
    refused(validate::copy_rows(cache, &[(0, 20)]), &["destination block=20"]);
    let args = CopyArgs { dst_batch_index: 0, src_batch_index: 1, offset: 0, size: -1 };
    assert_eq!(validate::copy_on_device(cache, cache, args).unwrap().src_offset, 128);
    refused(validate::copy_on_device(local, cache, args), &["src is in host"]);
    refused(validate::copy_on_device(cache, local, args), &["dst is in host"]);
    refused(validate::copy_on_device(local, local, args), &["dst is in host"]);
}

#[test]
fn copies_follow_the_mode() {
    for mode in [Mode::CacheManager, Mode::KvCacheManager] {
        let engine = engine(1, mode);
        let device = engine.allocate(&desc(Device, 2, 4, 64), Batch, &[]).unwrap();
        let host = engine.allocate(&desc(Host, 2, 4, 64), Batch, &[]).unwrap();
        let own = Own::loose(&desc(Host, 2, 4, 64), Blocks);
        let bytes = fixtures::patterned(3, 2, 256);
        fixtures::fill(&device, &bytes);
        fixtures::fill(&host, &bytes);
        let args = CopyArgs { dst_batch_index: 0, src_batch_index: 1, offset: 0, size: -1 };
        let end = |cache: &llm_datadist_core::Cache| End::Managed(cache.id());
        let first = mode == Mode::KvCacheManager;
        assert_eq!(engine.copy_cache(&end(&device), &end(&host), args).is_err(), first);
        assert_eq!(engine.copy_cache(&end(&host), &end(&device), args).is_err(), first);
        assert!(engine.copy_cache(&end(&device), &end(&device), args).is_ok());
        assert_eq!(engine.copy_blocks(&end(&device), &[(1, 3)]).is_ok(), first);
        assert_eq!(
            engine.swap_blocks(&end(&device), &End::Loose(own.cache.clone()), &[(2, 1)]).is_ok(),
            first
        );
        let mut expected = bytes.clone();
        for (tensor, all) in expected.iter_mut().enumerate() {
            all[..64].copy_from_slice(&bytes[tensor][64..128]);
            if first {
                all[192..].copy_from_slice(&bytes[tensor][64..128]);
            }
        }
        assert!(fixtures::contents(&device) == expected, "{mode:?}");
        if first {
            for (tensor, all) in own.read().iter().enumerate() {
                assert_eq!(all[64..128], bytes[tensor][128..192]);
            }
        }
    }
}

/// Clients of the old mode call prefill and decode both cluster 0.
#[test]
fn two_engines_of_one_id() {
    for mode in [Mode::KvCacheManager, Mode::CacheManager] {
        let (local, remote) = (engine(0, mode), engine(0, mode));
        let key = CacheKey::Request { model: 0, id: 5 };
        let theirs = remote.allocate(&desc(Device, 2, 2, 64), Batch, &[Some(key)]).unwrap();
        let ours = local.allocate(&desc(Device, 2, 2, 64), Batch, &[]).unwrap();
        let bytes = fixtures::patterned(9, 2, 128);
        fixtures::fill(&theirs, &bytes);
        let pull = |engine: &DataDist, rows: &PullRows| {
            let from = RemoteName { cluster: ClusterId(0), name: Name::Key(key) };
            engine.pull(from, &End::Managed(ours.id()), rows, Layers::ALL)
        };
        let slot = PullRows::Slot { local: 1, size: -1 };
        let unlinked = pull(&local, &slot).unwrap_err().kind();
        assert_eq!(unlinked, if mode == Mode::KvCacheManager { NotLinked } else { InvalidArgument });
        link(&local, &remote);
        if mode == Mode::CacheManager {
            assert_eq!(pull(&local, &slot).unwrap_err().kind(), InvalidArgument, "the own id stays refused");
            continue;
        }
        pull(&local, &PullRows::Part { local: 1, remote_offset: 10, local_offset: 30, size: 20 }).unwrap();
        let got = fixtures::contents(&ours);
        for tensor in 0..2 {
            assert_eq!(got[tensor][94..114], bytes[tensor][10..30]);
            assert_eq!(got[tensor][..94], [0; 94]);
            assert_eq!(got[tensor][114..], [0; 14]);
        }
        // That was a pull of the key, and the link is one of both sides.
        assert_eq!(pull(&local, &slot).unwrap_err().kind(), CacheNotFound);
        let mine = local.allocate(&desc(Device, 2, 2, 64), Batch, &[Some(key)]).unwrap();
        let bytes = fixtures::patterned(4, 2, 128);
        fixtures::fill(&mine, &bytes);
        let from = RemoteName { cluster: ClusterId(0), name: Name::Row { cache: mine.id(), row: 0 } };
        let whole = PullRows::Slot { local: 0, size: -1 };
        remote.pull(from, &End::Managed(theirs.id()), &whole, Layers::ALL).unwrap();
        assert_eq!(fixtures::contents(&theirs)[1][..64], bytes[1][..64]);
    }
}

#[test]
fn an_engine_linked_with_itself_pulls_nothing() {
    let engine = engine(3, Mode::KvCacheManager);
    link(&engine, &engine);
    let cache = engine.allocate(&desc(Device, 2, 2, 64), Batch, &[]).unwrap();
    let from = RemoteName { cluster: ClusterId(3), name: Name::Row { cache: cache.id(), row: 0 } };
    let pulled =
        engine.pull(from, &End::Managed(cache.id()), &PullRows::Slot { local: 1, size: -1 }, Layers::ALL);
    refused(pulled, &["cluster_id=3", "another cluster"]);
}
