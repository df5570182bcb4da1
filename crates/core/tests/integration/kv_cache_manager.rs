//! The mode of the `KvCacheManager`: its options, its pool and its rules for copies.
//!
//! `tests/test_kv_mode_peers.py` covers two engines of one cluster id, other Python tests the order of checks.

use std::collections::BTreeMap;

use llm_datadist_core::bindings::{
    Config, CopyArgs, DataDist, End, Layers, Mode, Name, PeerAddress, PoolConfig, RemoteName, Role, Rows,
    Share,
};
use llm_datadist_core::testing::options::config_from_texts;
use llm_datadist_core::testing::plan::{Moves, Piece};
use llm_datadist_core::testing::validate;
use llm_datadist_core::{CacheKind, ClusterId, ErrorKind, Placement};

use crate::arguments::{refused, spec};
use crate::fixtures::{self, LONG, desc};
use CacheKind::{Batch, Blocks};
use ErrorKind::InvalidArgument;
use Placement::{Device, Host};

fn read(options: &[(&str, &str)]) -> llm_datadist_core::Result<Config> {
    let options: BTreeMap<String, String> =
        options.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
    config_from_texts(Role::Prompt, ClusterId(7), &options)
}

fn engine(cluster: u64, mode: Mode) -> DataDist {
    let mut config = Config { cluster: ClusterId(cluster), mode, ..fixtures::pools(1 << 20, 12) };
    config.links.listen = Some("127.0.0.1:0".parse().unwrap());
    DataDist::open(config).unwrap()
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
    // A configured pool replaces the default one.
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
        // With the cache manager, neither option has an effect.
        let config = read(&[(key, bad), ("llm.EnableCacheManager", "1")]).unwrap();
        assert_eq!((config.mode, config.device_pool, config.device_share), (Mode::CacheManager, None, None));
    }
    // Only the cache manager supports one-sided transfers.
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
    // Pools take only address space until they are touched, so many may be open.
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
}

#[test]
fn rows_of_either_kind() {
    let (local, cache) = (spec(2, 10, 128, Batch, Host), spec(2, 20, 128, Batch, Device));
    let first = |moves: llm_datadist_core::Result<Moves>| moves.unwrap().pieces.iter().next().unwrap();
    let block = |src, dst| Piece { src, dst, len: 128 };
    assert_eq!(first(validate::swap_rows(local, cache, &[(9, 19)])), block(9 * 128, 19 * 128));
    let blocks = validate::swap_rows(cache, spec(2, 10, 128, Blocks, Host), &[(19, 9)]);
    assert_eq!(first(blocks), block(19 * 128, 9 * 128));
    for (dst, pairs, fact) in [
        (cache, &[(10, 0)][..], "source block=10"),
        (spec(2, 20, 128, Batch, Host), &[], "placements"),
        (spec(2, 20, 64, Batch, Device), &[], "block sizes"),
        (spec(3, 20, 128, Batch, Device), &[], "num_tensors"),
    ] {
        refused(validate::swap_rows(local, dst, pairs), &[fact]);
    }
    assert_eq!(validate::copy_rows(cache, &[(0, 19)]).unwrap().num_tensors, 2);
    refused(validate::copy_rows(local, &[(0, 1)]), &["cache is in host"]);
    refused(validate::copy_rows(cache, &[(0, 20)]), &["destination block=20"]);
    let args = CopyArgs { dst_batch_index: 0, src_batch_index: 1, offset: 0, size: -1 };
    assert_eq!(first(validate::copy_on_device(cache, cache, args)), block(128, 0));
    for (src, dst, fact) in
        [(local, cache, "src is in host"), (cache, local, "dst is in host"), (local, local, "dst is in host")]
    {
        refused(validate::copy_on_device(src, dst, args), &[fact]);
    }
}

#[test]
fn an_engine_linked_with_itself_pulls_nothing() {
    let engine = engine(3, Mode::KvCacheManager);
    let listening = engine.listening().into_iter().collect();
    let itself = PeerAddress { cluster: ClusterId(3), remote: listening, local: vec![] };
    engine.link_clusters(&[itself], LONG).remove(0).unwrap();
    let cache = engine.allocate(&desc(Device, 2, 2, 64), Batch, &[]).unwrap();
    let from = RemoteName { cluster: ClusterId(3), name: Name::Row { cache: cache.id(), row: 0 } };
    let pulled = engine.pull(from, &End::Managed(cache.id()), Rows::slot(1, -1), Layers::ALL).run();
    refused(pulled, &["another engine than this one"]);
}
