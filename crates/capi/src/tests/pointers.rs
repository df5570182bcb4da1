//! Null, misaligned and unending arguments; what is written, and what a refused call leaves alone.

use std::ffi::c_char;
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};

use llm_datadist_core::StatusCode;

use super::{ALL, Engine, SMALL, cache, desc, initialize, is, no_text, reason};
use crate::abi::{
    LlmDatadistBlocks, LlmDatadistCacheIndex, LlmDatadistCluster, LlmDatadistIp, LlmDatadistOption,
    llm_datadist_allocate_cache, llm_datadist_copy_blocks, llm_datadist_copy_cache, llm_datadist_free,
    llm_datadist_initialize, llm_datadist_link_clusters, llm_datadist_new, llm_datadist_pull_blocks,
    llm_datadist_pull_cache, llm_datadist_push_cache, llm_datadist_register_cache,
};

/// The call was refused as an argument, and says which.
#[track_caller]
fn refused(status: u32, facts: &[&str]) {
    assert_eq!(status, is(StatusCode::ParamInvalid), "{}", reason());
    for fact in facts {
        assert!(reason().contains(fact), "{:?} does not say {fact:?}", reason());
    }
}

#[test]
fn options_are_read_or_refused() {
    let handle = llm_datadist_new(1, 1);
    let latin = [c_char::from_ne_bytes([0xE4]), 0];
    let pair = |key, value| [LlmDatadistOption { key, value }];
    // SAFETY: null, misaligned or without end, which is refused before it is followed; else values that live here.
    unsafe {
        refused(llm_datadist_initialize(handle, null(), 1), &["options is null"]);
        refused(llm_datadist_initialize(handle, without_provenance(1), 1), &["options is not aligned"]);
        refused(llm_datadist_initialize(handle, without_provenance(8), usize::MAX), &["options is too long"]);
        let list = pair(no_text(), c"0".as_ptr());
        refused(llm_datadist_initialize(handle, list.as_ptr(), 1), &["key of an option is null"]);
        let list = pair(c"llm.DeviceId".as_ptr(), no_text());
        refused(llm_datadist_initialize(handle, list.as_ptr(), 1), &["llm.DeviceId is null"]);
        let list = pair(c"llm.DeviceId".as_ptr(), latin.as_ptr());
        refused(llm_datadist_initialize(handle, list.as_ptr(), 1), &["llm.DeviceId is no UTF-8"]);
        refused(llm_datadist_initialize(handle, null(), 0), &["llm.DeviceId is missing"]);
    }
    llm_datadist_free(handle);
}

#[test]
fn initialize_says_what_is_wrong_with_an_option() {
    let json = r#"{"buf_pool_size": 4194304, "buf_cfg": [{"total_size": 2097152, "blk_size": 3, "max_buf_size": 9}]}"#;
    let cases: &[(i32, &[(&str, &str)], StatusCode, &[&str])] = &[
        (0, &[("llm.DeviceId", "0")], StatusCode::ParamInvalid, &["role=0", "kPrompt"]),
        (4, &[("llm.DeviceId", "0")], StatusCode::ParamInvalid, &["role=4"]),
        (1, &[("llm.DeviceId", "")], StatusCode::ParamInvalid, &["llm.DeviceId=\"\""]),
        (1, &[("llm.DeviceId", "-1")], StatusCode::ParamInvalid, &["\"-1\""]),
        (1, &[("llm.DeviceId", "a")], StatusCode::ParamInvalid, &["\"a\""]),
        (1, &[("llm.DeviceId", "4294967296")], StatusCode::ParamInvalid, &["2147483647"]),
        (1, &[("llm.DeviceId", "0;1")], StatusCode::FeatureNotEnabled, &["2 devices"]),
        (1, &[("llm.DeviceId", "0;")], StatusCode::ParamInvalid, &["\"\""]),
        (
            1,
            &[("llm.DeviceId", "0"), ("llm.ListenIpInfo", "127.0.0.1")],
            StatusCode::ParamInvalid,
            &["ip:port"],
        ),
        (1, &[("llm.DeviceId", "0"), ("llm.BufPoolCfg", "[")], StatusCode::ParamInvalid, &["not JSON"]),
        (
            1,
            &[("llm.DeviceId", "0"), ("llm.BufPoolCfg", json)],
            StatusCode::ParamInvalid,
            &["blk_size 3", "multiple"],
        ),
        (
            1,
            &[("llm.DeviceId", "0"), ("llm.TransferBackend", "hixl")],
            StatusCode::ParamInvalid,
            &["ListenIpInfo"],
        ),
        (
            1,
            &[("llm.DeviceId", "0"), ("llm.SyncKvCacheWaitTime", "0")],
            StatusCode::ParamInvalid,
            &["sync_kv_timeout"],
        ),
        (
            1,
            &[("llm.DeviceId", "0"), ("llm.MemPoolConfig", r#"{"memory_size": 140737488355328}"#)],
            StatusCode::OutOfMemory,
            &["no memory"],
        ),
    ];
    for (role, options, code, facts) in cases {
        let handle = llm_datadist_new(1, *role);
        assert_eq!(initialize(handle, options), is(*code), "{options:?}: {}", reason());
        assert!(facts.iter().all(|fact| reason().contains(fact)), "{options:?}: {}", reason());
        if *role == 1 {
            assert_eq!(initialize(handle, &SMALL), 0, "may be repeated: {}", reason());
        }
        llm_datadist_free(handle);
    }
}

#[test]
fn a_refused_allocation_writes_nothing_and_takes_nothing() {
    let engine = Engine::new();
    let (mut id, mut addrs) = (-5, [7_u64; 4]);
    let (whole, room) = (desc(4), addrs.as_mut_ptr());
    let with = |change: fn(&mut crate::abi::LlmDatadistCacheDesc)| {
        let mut desc = desc(4);
        change(&mut desc);
        desc
    };
    // SAFETY: null or misaligned, which is refused, or values that live here.
    unsafe {
        let mut allocate =
            |desc: *const _, count| llm_datadist_allocate_cache(engine.0, desc, &raw mut id, room, count);
        refused(allocate(null(), 4), &["cache_desc is null"]);
        refused(allocate(&raw const whole, 3), &["num_addrs=3", "at least 4"]);
        refused(allocate(&with(|desc| desc.placement = 0), 4), &["kDevice"]);
        refused(allocate(&with(|desc| desc.placement = 2), 4), &["placement=2"]);
        refused(allocate(&with(|desc| desc.num_tensors = 0), 4), &["num_tensors=0"]);
        refused(allocate(&with(|desc| desc.data_type = 28), 4), &["data_type=28"]);
        refused(allocate(&with(|desc| desc.num_dims = 0), 4), &["shape=[]"]);
        refused(allocate(&with(|desc| desc.shape = null()), 4), &["shape is null"]);
        let out = |id, room| llm_datadist_allocate_cache(engine.0, &raw const whole, id, room, 4);
        refused(out(null_mut(), room), &["cache_id is null"]);
        refused(out(without_provenance_mut(4), room), &["cache_id is not aligned"]);
        refused(out(&raw mut id, null_mut()), &["addrs is null"]);
        assert_eq!((id, addrs), (-5, [7; 4]));
        // 1 MiB in all: 255 tensors of a page and one more do, one more again does not.
        let mut many = [0_u64; 257];
        let wide = desc(257);
        let status =
            llm_datadist_allocate_cache(engine.0, &raw const wide, &raw mut id, many.as_mut_ptr(), 257);
        assert_eq!((status, id), (is(StatusCode::DeviceOutOfMemory), -5), "{}", reason());
        let all = desc(256);
        let status =
            llm_datadist_allocate_cache(engine.0, &raw const all, &raw mut id, many.as_mut_ptr(), 256);
        assert_eq!(status, 0, "the refused calls took something: {}", reason());
        assert!(id == 1 && many[..256].iter().all(|addr| *addr > 0 && addr % 512 == 0) && many[256] == 0);
    }
}

#[test]
fn null_where_a_structure_is_needed_is_refused() {
    let engine = Engine::new();
    let whole = cache(1, &[], 4);
    let index = LlmDatadistCacheIndex { cluster_id: 2, cache_id: 1, batch_index: 0, reserved: [0; 4] };
    let blocks = LlmDatadistBlocks { blocks: null(), count: 1 };
    let none = LlmDatadistBlocks { blocks: null(), count: 0 };
    let (mut id, addrs) = (0, [0_u64; 4]);
    let (whole, index, shape) = (&raw const whole, &raw const index, desc(4));
    // SAFETY: null, which is refused, or values that live here.
    unsafe {
        let mut room = [0; 4];
        let made = llm_datadist_allocate_cache(engine.0, &raw const shape, &raw mut id, room.as_mut_ptr(), 4);
        assert_eq!((made, id), (0, 1));
        let all = &raw const ALL;
        refused(llm_datadist_pull_cache(engine.0, null(), whole, 0, -1, all), &["src_cache_index is null"]);
        refused(llm_datadist_pull_cache(engine.0, index, null(), 0, -1, all), &["dst_cache is null"]);
        refused(llm_datadist_pull_cache(engine.0, index, whole, 0, -1, null()), &["ext_param is null"]);
        refused(llm_datadist_pull_blocks(engine.0, index, whole, blocks, none, all), &["src_blocks is null"]);
        refused(llm_datadist_pull_blocks(engine.0, index, whole, none, none, all), &["src_blocks=[]"]);
        refused(llm_datadist_push_cache(engine.0, null(), index, 0, -1, all), &["src_cache is null"]);
        refused(llm_datadist_push_cache(engine.0, whole, null(), 0, -1, all), &["dst_cache_index is null"]);
        refused(llm_datadist_copy_cache(engine.0, null(), whole, 0, 0, 0, -1), &["src_cache is null"]);
        refused(llm_datadist_copy_blocks(engine.0, whole, null(), none, null(), 0), &["dst_cache is null"]);
        refused(
            llm_datadist_register_cache(engine.0, &raw const shape, null(), 4, null(), &raw mut id),
            &["addrs is null"],
        );
        refused(
            llm_datadist_register_cache(engine.0, &raw const shape, null(), 0, null(), &raw mut id),
            &["addrs=[]"],
        );
        let zero = addrs.as_ptr();
        refused(
            llm_datadist_register_cache(engine.0, &raw const shape, zero, 4, null(), &raw mut id),
            &["addrs[0]=0"],
        );
        refused(
            llm_datadist_register_cache(engine.0, &raw const shape, zero, 3, null(), &raw mut id),
            &["num_tensors=4"],
        );
    }
    assert_eq!(id, 1);
}

#[test]
fn link_arguments_fail_the_whole_call_and_clear_the_count() {
    let engine = Engine::new();
    let ip = |ip: *const c_char| LlmDatadistIp { ip, port: 1, reserved: [0; 4] };
    let (good, empty, six, name) =
        (ip(c"127.0.0.1".as_ptr()), ip(c"".as_ptr()), ip(c"::1".as_ptr()), ip(c"here".as_ptr()));
    let nothing = ip(no_text());
    let peer = |remote: &LlmDatadistIp| LlmDatadistCluster {
        remote_cluster_id: 2,
        local: &raw const good,
        num_local: 1,
        remote,
        num_remote: 1,
        reserved: [0; 4],
    };
    let mut rets = [9_u32; 2];
    let mut link = |peers: &[LlmDatadistCluster], millis: i32, facts: &[&str]| {
        let mut count = 77;
        // SAFETY: everything lives in this test, or is null and refused.
        let status = unsafe {
            llm_datadist_link_clusters(
                engine.0,
                peers.as_ptr(),
                peers.len(),
                millis,
                rets.as_mut_ptr(),
                &raw mut count,
            )
        };
        refused(status, facts);
        assert_eq!((count, rets), (0, [9; 2]));
    };
    link(&[], 1000, &["clusters=[]"]);
    link(&[peer(&good)], 0, &["timeout_in_millis=0"]);
    link(&[peer(&good)], -5, &["timeout_in_millis=-5"]);
    link(&[peer(&good), peer(&empty)], 1000, &["ip=\"\""]);
    link(&[peer(&six)], 1000, &["::1", "IPv4"]);
    link(&[peer(&name)], 1000, &["\"here\""]);
    link(&[peer(&nothing)], 1000, &["ip is null"]);
    let whole = [peer(&good)];
    // SAFETY: null, which is refused.
    let status =
        unsafe { llm_datadist_link_clusters(engine.0, whole.as_ptr(), 1, 1, null_mut(), null_mut()) };
    refused(status, &["num_rets is null"]);
}

#[test]
fn each_cluster_has_a_status_of_its_own_and_the_reason_names_all() {
    let engine = Engine::new();
    let port = LlmDatadistIp { ip: c"127.0.0.1".as_ptr(), port: 1, reserved: [0; 4] };
    let peer = |id, num_local, num_remote| LlmDatadistCluster {
        remote_cluster_id: id,
        local: &raw const port,
        num_local,
        remote: &raw const port,
        num_remote,
        reserved: [0; 4],
    };
    let peers = [peer(5, 1, 1), peer(6, 0, 1), peer(7, 1, 0)];
    let (mut rets, mut count) = ([9_u32; 3], 0);
    // SAFETY: everything lives here.
    let whole = unsafe {
        llm_datadist_link_clusters(engine.0, peers.as_ptr(), 3, 2000, rets.as_mut_ptr(), &raw mut count)
    };
    let (failed, wrong) = (is(StatusCode::LinkFailed), is(StatusCode::ParamInvalid));
    assert_eq!((whole, count, rets), (wrong, 3, [failed, wrong, wrong]));
    for fact in ["cluster=5", "cluster=6", "cluster=7", "local_ip_infos", "remote_ip_info_list"] {
        assert!(reason().contains(fact), "{fact}: {}", reason());
    }
}
