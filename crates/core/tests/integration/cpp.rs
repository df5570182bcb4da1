//! The rules that only the C++ class has (`validate::cpp` and `options::cpp`), without engines.
//!
//! Not for: pointers (`crates/capi/src/tests`), or calls (`tests/test_cpp.py`).

use std::collections::BTreeMap;
use std::time::Duration;

use llm_datadist_core::ClusterId;
use llm_datadist_core::bindings::Role;
use llm_datadist_core::testing::options::cpp as options;
use llm_datadist_core::testing::validate::cpp;

use crate::arguments::refused;
use crate::log;

#[test]
fn unknown_options_are_logged_with_the_nearest_name() {
    log::collect();
    let names = [
        "llm.DeviceId",
        "llm.LinkStreems",
        "llm.NothingLikeIt",
        "llm.RdmaServiceLevel",
        "ge.exec.rankId",
        "llm.OutputMaxSize",
    ];
    let given: BTreeMap<_, _> = names.iter().map(|&name| (name.to_owned(), "7".to_owned())).collect();
    options::options(Role::Mix, ClusterId(1), &given).unwrap();
    let lines = |name| log::errors(&["unknown option", name]);
    assert_eq!(
        lines("llm.LinkStreems"),
        [r#"unknown option "llm.LinkStreems" is ignored; did you mean "llm.LinkStreams"?"#]
    );
    assert_eq!(
        lines("llm.NothingLikeIt"),
        [r#"unknown option "llm.NothingLikeIt" is ignored; docs/options.md lists every option"#]
    );
    assert!(
        ["llm.RdmaServiceLevel", "ge.exec.rankId", "llm.OutputMaxSize"]
            .iter()
            .all(|name| lines(name).is_empty())
    );
}

#[test]
fn options_of_the_class_become_a_configuration() {
    let options = |pairs: &[(&str, &str)]| {
        let given = pairs.iter().chain(&[("llm.DeviceId", "3")]);
        let given: BTreeMap<_, _> = given.map(|&(key, value)| (key.to_owned(), value.to_owned())).collect();
        options::options(Role::Mix, ClusterId(1), &given).unwrap()
    };
    let plain = options(&[]);
    assert_eq!((plain.config.device_id, plain.config.remote_accessible), (3, true));
    assert!(plain.config.device_share.is_some() && plain.config.device_pool.is_none());
    assert!(plain.may_switch && plain.one_local);
    let all = options(&[
        ("llm.MemPoolConfig", r#"{"memory_size": 65536}"#),
        ("llm.BufPoolCfg", r#"{"buf_pool_size": 1048576}"#),
        ("llm.EnableSwitchRole", "0"),
        ("llm.LocalCommRes", "{}"),
        ("llm.SyncKvCacheWaitTime", "70"),
        ("llm.ListenIpInfo", "[::1]:5"),
        ("llm.EnableRemoteCacheAccessible", "0"),
    ]);
    assert_eq!(all.config.device_pool.unwrap().memory_size, 65536, "the pool's own option comes first");
    assert!(!all.may_switch && !all.one_local && all.config.remote_accessible);
    assert_eq!(all.config.sync_timeout, Duration::from_millis(70));
    assert_eq!(all.config.links.listen, Some("[::1]:5".parse().unwrap()));
    assert!(options(&[("llm.LocalCommRes", "")]).one_local, "empty counts as missing");
}

#[test]
fn buffer_pool_is_checked_and_gives_a_size() {
    const MIB: u64 = 1 << 20;
    let classes = |list: &str| format!(r#"{{"buf_cfg": [{list}]}}"#);
    let class = |total: u64, block: u64, most: u64| {
        format!(r#"{{"total_size": {total}, "blk_size": {block}, "max_buf_size": {most}}}"#)
    };
    let two = format!("{}, {}", class(4 * MIB, 256, 512), class(2 * MIB, MIB, MIB));
    assert_eq!(options::buffer_pool(&classes(&two)).unwrap(), 6 * MIB);
    assert_eq!(options::buffer_pool(r#"{"buf_pool_size": 7, "buf_cfg": []}"#).unwrap(), 7);
    for (text, fact) in [
        ("[]", "object"),
        ("{", "JSON"),
        ("{}", "neither"),
        (r#"{"buf_pool_size": 0}"#, "buf_pool_size=0"),
        (r#"{"buf_pool_size": -1}"#, "buf_pool_size=-1"),
        (r#"{"buf_cfg": 5}"#, "list"),
    ] {
        refused(options::buffer_pool(text), &[fact]);
    }
    let same = class(2 * MIB, 256, 512);
    for (list, fact) in [
        ("5".into(), "entry"),
        (r#"{"total_size": 2097152, "blk_size": 1}"#.into(), "max_buf_size=(missing)"),
        (class(3 * MIB, 256, 512), "multiple of 2 MiB"),
        (class(4096 * MIB, 256, 512), "below 4 GiB"),
        (class(6 * MIB, 3 * MIB, 4 * MIB), "power of two"),
        (class(8 * MIB, 4 * MIB, 5 * MIB), "at most 2 MiB"),
        (class(4 * MIB, 512, 256), "at most max_buf_size"),
        (class(2 * MIB, 256, 2 * MIB), "below total_size"),
        (format!("{same}, {same}"), "grows"),
    ] {
        refused(options::buffer_pool(&classes(&list)), &[fact]);
    }
}

#[test]
fn every_element_type_of_whole_bytes_has_its_size() {
    // The sizes in the C++ header, by the number of the type. Types with 0 are refused.
    let sizes: [u64; 42] = [
        4, 2, 1, 4, 1, 0, 2, 2, 4, 8, 8, 8, 1, 16, 0, 0, 8, 16, 1, 2, 4, 1, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0,
        4, 1, 1, 1, 1, 0, 0, 0, 0,
    ];
    let bytes = |number| cpp::desc(1, 1, number, &[1]).map(|desc| desc.data_type.bytes());
    for (number, size) in (0..).zip(sizes) {
        match size {
            0 => drop(refused(bytes(number), &[&format!("data_type={number}")])),
            size => assert_eq!(bytes(number).unwrap(), size, "{number}"),
        }
    }
    for number in [-1, 42, i32::MAX, i32::MIN] {
        refused(bytes(number), &["data_type"]);
    }
}
