//! The rules of what only the C++ class says (`core::validate::cpp`), and its calls among three engines of one process.
//!
//! Not for: pointers (`crates/capi/src/tests`), or programs (`tests/test_cpp.py`).

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::testing::validate::cpp::{self, Options};
use llm_datadist_core::{
    CacheDesc, CacheId, CacheIndex, CacheKind, ClusterId, Config, DataDist, DataType, Error, ErrorKind,
    ExtParam, PeerAddress, Placement, PoolConfig, Role,
};

const ALL: ExtParam =
    ExtParam { src_layer_range: (-1, -1), dst_layer_range: (-1, -1), tensor_num_per_layer: 2 };

fn options(pairs: &[(&str, &str)]) -> Result<Options, Error> {
    let mut given = BTreeMap::from([("llm.DeviceId".to_owned(), "3".to_owned())]);
    given.extend(pairs.iter().map(|&(key, value)| (key.to_owned(), value.to_owned())));
    cpp::options(Role::Mix, ClusterId(1), &given)
}

#[test]
fn options_of_the_class_become_a_configuration() {
    let plain = options(&[]).unwrap();
    assert_eq!((plain.config.device_id, plain.config.remote_accessible), (3, true));
    assert!(plain.config.device_share.is_some() && plain.config.device_pool.is_none());
    assert!(plain.may_switch && plain.one_local);
    let more = options(&[
        ("llm.MemPoolConfig", r#"{"memory_size": 65536}"#),
        ("llm.BufPoolCfg", r#"{"buf_pool_size": 1048576}"#),
        ("llm.EnableSwitchRole", "0"),
        ("llm.LocalCommRes", "{}"),
        ("llm.SyncKvCacheWaitTime", "70"),
        ("llm.ListenIpInfo", "[::1]:5"),
        ("llm.EnableRemoteCacheAccessible", "0"),
    ])
    .unwrap();
    assert_eq!(more.config.device_pool.unwrap().memory_size, 65536, "the pool's own option comes first");
    assert!(!more.may_switch && !more.one_local && more.config.remote_accessible);
    assert_eq!(more.config.sync_timeout, Duration::from_millis(70));
    assert_eq!(more.config.links.listen, Some("[::1]:5".parse().unwrap()));
    assert!(options(&[("llm.LocalCommRes", "")]).unwrap().one_local, "empty is as good as missing");
}

#[test]
fn buffers_are_checked_and_give_a_size() {
    let classes = |list: &str| format!(r#"{{"buf_cfg": [{list}]}}"#);
    let class = |total: u64, block: u64, most: u64| {
        format!(r#"{{"total_size": {total}, "blk_size": {block}, "max_buf_size": {most}}}"#)
    };
    const MIB: u64 = 1 << 20;
    let two = format!("{}, {}", class(4 * MIB, 256, 512), class(2 * MIB, MIB, MIB));
    assert_eq!(cpp::buffer_pool(&classes(&two)).unwrap(), 6 * MIB);
    assert_eq!(cpp::buffer_pool(r#"{"buf_pool_size": 7, "buf_cfg": []}"#).unwrap(), 7);
    let refused = [
        ("[]".to_owned(), "object"),
        ("{".to_owned(), "JSON"),
        ("{}".to_owned(), "neither"),
        (r#"{"buf_pool_size": 0}"#.to_owned(), "buf_pool_size=0"),
        (r#"{"buf_pool_size": -1}"#.to_owned(), "buf_pool_size=-1"),
        (r#"{"buf_cfg": 5}"#.to_owned(), "list"),
        (classes("5"), "entry"),
        (classes(r#"{"total_size": 2097152, "blk_size": 1}"#), "max_buf_size=(missing)"),
        (classes(&class(3 * MIB, 256, 512)), "multiple of 2 MiB"),
        (classes(&class(4096 * MIB, 256, 512)), "below 4 GiB"),
        (classes(&class(6 * MIB, 3 * MIB, 4 * MIB)), "power of two"),
        (classes(&class(8 * MIB, 4 * MIB, 5 * MIB)), "at most 2 MiB"),
        (classes(&class(4 * MIB, 512, 256)), "at most max_buf_size"),
        (classes(&class(2 * MIB, 256, 2 * MIB)), "below total_size"),
        (classes(&format!("{}, {}", class(2 * MIB, 256, 512), class(2 * MIB, 256, 512))), "grows"),
    ];
    for (text, fact) in refused {
        let error = cpp::buffer_pool(&text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert!(error.to_string().contains(fact), "{text}: {error}");
    }
}

#[test]
fn every_element_type_of_whole_bytes_has_its_size() {
    // Numbers and sizes of the C++ header; 0 is refused.
    let sizes: [(i32, u64); 37] = [
        (0, 4),
        (1, 2),
        (2, 1),
        (3, 4),
        (4, 1),
        (6, 2),
        (7, 2),
        (8, 4),
        (9, 8),
        (10, 8),
        (11, 8),
        (12, 1),
        (13, 16),
        (16, 8),
        (17, 16),
        (18, 1),
        (19, 2),
        (20, 4),
        (21, 1),
        (22, 2),
        (23, 0),
        (26, 0),
        (27, 2),
        (28, 0),
        (29, 0),
        (30, 0),
        (31, 0),
        (32, 0),
        (33, 4),
        (34, 1),
        (35, 1),
        (36, 1),
        (37, 1),
        (38, 0),
        (39, 0),
        (40, 0),
        (41, 0),
    ];
    for (number, bytes) in sizes {
        match cpp::desc(1, 1, number, &[1]) {
            Ok(desc) => assert_eq!(desc.data_type.bytes(), bytes, "{number}"),
            Err(error) => {
                assert_eq!(bytes, 0, "{number}");
                assert!(error.to_string().contains(&format!("data_type={number}")), "{error}");
            }
        }
    }
    for number in [-1, 5, 42, i32::MAX, i32::MIN] {
        cpp::desc(1, 1, number, &[1]).unwrap_err();
    }
}

fn engine(role: Role, cluster: u64, both_ways: bool) -> DataDist {
    let mut config = Config::new(role, ClusterId(cluster));
    config.device_pool = Some(PoolConfig { memory_size: 1 << 20, page_shift: 12 });
    config.remote_accessible = true;
    config.links.listen = Some("127.0.0.1:0".parse().unwrap());
    config.links.both_ways = both_ways;
    DataDist::open(config).unwrap()
}

fn peer(of: &DataDist, local: usize) -> PeerAddress {
    let at = of.listening().unwrap();
    PeerAddress { cluster: of.config().cluster, remote: vec![at], local: vec![at; local] }
}

#[test]
fn a_link_from_needs_one_address_of_this_side() {
    let (local, remote, other) =
        (engine(Role::Mix, 1, false), engine(Role::Mix, 2, false), engine(Role::Mix, 3, false));
    let linked = local
        .link_clusters_from(&[peer(&remote, 0), peer(&remote, 2), peer(&other, 1)], Duration::from_secs(5));
    let kinds: Vec<_> = linked.iter().map(|link| link.as_ref().map_err(Error::kind)).collect();
    assert_eq!(kinds, [Err(ErrorKind::InvalidArgument), Err(ErrorKind::InvalidArgument), Ok(&())]);
    assert_eq!(linked[1].as_ref().unwrap_err().fact("cluster"), Some("2"));
    let links: Vec<_> = local.stats().links.iter().map(|link| link.cluster).collect();
    assert_eq!(links, [ClusterId(3)]);
}

#[test]
fn a_decoder_pushes_where_links_go_both_ways() {
    for both_ways in [false, true] {
        let (local, remote) = (engine(Role::Decoder, 1, both_ways), engine(Role::Prompt, 2, both_ways));
        let desc = CacheDesc {
            num_tensors: 2,
            shape: vec![2, 8],
            data_type: DataType::Uint8,
            placement: Placement::Device,
        };
        let [ours, theirs] =
            [&local, &remote].map(|engine| engine.allocate(&desc, CacheKind::Batch, &[]).unwrap().id());
        local.link_clusters_from(&[peer(&remote, 1)], Duration::from_secs(5)).remove(0).unwrap();
        let to = CacheIndex { cluster: ClusterId(2), cache: theirs, row: 0 };
        let pushed =
            [local.push_kv_cache(ours, to, 0, -1, ALL), local.push_kv_blocks(ours, to, (&[0], &[1]), ALL)];
        for pushed in pushed {
            let kind = pushed.map_err(|error| error.kind());
            assert_eq!(kind, if both_ways { Ok(()) } else { Err(ErrorKind::InvalidArgument) });
        }
        assert_eq!(
            local.pull_kv_cache(to, CacheId(99), 0, -1, ALL).unwrap_err().kind(),
            ErrorKind::CacheNotFound
        );
    }
}
