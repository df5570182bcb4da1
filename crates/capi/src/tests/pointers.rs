//! Null, misaligned and too long arguments, wrong options, and what a refused call leaves unchanged.

use std::ffi::c_char;
use std::ptr::{from_ref, null, null_mut, without_provenance, without_provenance_mut};

use llm_datadist_core::bindings::StatusCode;

use super::{ALL, Engine, INDEX, LOCAL, SMALL, cache, desc, failed, initialize, peer, reason, refused};
use crate::abi::*;
use crate::failure;

#[test]
fn invalid_pointers_to_options_are_refused() {
    let handle = llm_datadist_new(1, 1);
    let (key, latin) = (c"llm.DeviceId".as_ptr(), [c_char::from_ne_bytes([0xE4]), 0]);
    // SAFETY: invalid pointers are refused before they are followed; the others lead to values that live here.
    unsafe {
        let list = |list, count| llm_datadist_initialize(handle, list, count);
        refused(list(null(), 1), &["options is null"]);
        refused(list(without_provenance(1), 1), &["options is not aligned"]);
        refused(list(without_provenance(8), usize::MAX), &["options is too long"]);
        let option = |key, value| list(&LlmDatadistOption { key, value }, 1);
        refused(option(null(), c"0".as_ptr()), &["key of an option is null"]);
        refused(option(key, null()), &["llm.DeviceId is null"]);
        refused(option(key, latin.as_ptr()), &["llm.DeviceId is not valid UTF-8"]);
        refused(list(null(), 0), &["llm.DeviceId is missing"]);
    }
    llm_datadist_free(handle);
}

#[test]
fn initialize_names_the_wrong_option_and_may_be_repeated() {
    use StatusCode::{FeatureNotEnabled, OutOfMemory, ParamInvalid};
    let (id, zero) = ("llm.DeviceId", ("llm.DeviceId", "0"));
    let no_memory = [zero, ("llm.MemPoolConfig", r#"{"memory_size": 140737488355328}"#)];
    let cases: [(i32, &[(&str, &str)], StatusCode, &str); 10] = [
        (0, &[zero], ParamInvalid, "role=0 must be kPrompt"),
        (4, &[zero], ParamInvalid, "role=4"),
        (1, &[(id, "")], ParamInvalid, "llm.DeviceId=\"\""),
        (1, &[(id, "-1")], ParamInvalid, "\"-1\""),
        (1, &[(id, "a")], ParamInvalid, "\"a\""),
        (1, &[(id, "4294967296")], ParamInvalid, "2147483647"),
        (1, &[(id, "0;1")], FeatureNotEnabled, "2 devices"),
        (1, &[(id, "0;")], ParamInvalid, "\"\""),
        (1, &[zero, ("llm.TransferBackend", "hixl")], ParamInvalid, "ListenIpInfo"),
        (1, &no_memory, OutOfMemory, "no memory"),
    ];
    for (role, options, code, fact) in cases {
        let handle = llm_datadist_new(1, role);
        failed(initialize(handle, options), code, &[fact]);
        assert_eq!(initialize(handle, &SMALL) == 0, role == 1, "{}", reason());
        llm_datadist_free(handle);
    }
}

#[test]
fn refused_allocation_writes_and_takes_nothing() {
    let engine = Engine::new();
    let (mut id, mut addrs) = (-5, [7_u64; 257]);
    let (out, room) = (&raw mut id, addrs.as_mut_ptr());
    let with = |change: fn(&mut LlmDatadistCacheDesc)| {
        let mut desc = desc(4);
        change(&mut desc);
        desc
    };
    // SAFETY: invalid pointers are refused before they are followed; the others lead to values that live here.
    unsafe {
        let call = |desc, id, addrs| llm_datadist_allocate_cache(engine.0, desc, id, addrs, 4);
        let allocate = |desc, count| llm_datadist_allocate_cache(engine.0, &raw const desc, out, room, count);
        refused(call(null(), out, room), &["cache_desc is null"]);
        refused(call(&desc(4), null_mut(), room), &["cache_id is null"]);
        refused(call(&desc(4), without_provenance_mut(4), room), &["cache_id is not aligned"]);
        refused(call(&desc(4), out, null_mut()), &["addrs is null"]);
        refused(allocate(desc(4), 3), &["num_addrs=3", "at least 4"]);
        refused(allocate(with(|desc| desc.placement = 0), 4), &["kDevice"]);
        refused(allocate(with(|desc| desc.placement = 2), 4), &["placement=2"]);
        refused(allocate(with(|desc| desc.num_tensors = 0), 4), &["num_tensors=0"]);
        refused(allocate(with(|desc| desc.data_type = 28), 4), &["data_type=28"]);
        refused(allocate(with(|desc| desc.num_dims = 0), 4), &["shape=[]"]);
        refused(allocate(with(|desc| desc.shape = null()), 4), &["shape is null"]);
        // The pool has 256 pages, one for each tensor.
        failed(allocate(desc(257), 257), StatusCode::DeviceOutOfMemory, &[]);
        assert_eq!((id, addrs), (-5, [7; 257]));
        assert_eq!(allocate(desc(256), 256), 0, "a refused call took memory: {}", reason());
    }
    assert!(id == 1 && addrs[..256].iter().all(|addr| *addr > 7 && addr % 512 == 0) && addrs[256] == 7);
}

#[test]
fn null_and_empty_arguments_are_refused() {
    let engine = Engine::new();
    let blocks = LlmDatadistBlocks { blocks: null(), count: 1 };
    let none = LlmDatadistBlocks { blocks: null(), count: 0 };
    let (engine, shape, own, mut id, mut addrs) = (engine.0, desc(4), cache(), 0, [0; 4]);
    let (shape, own, index, all) = (&raw const shape, &raw const own, &raw const INDEX, from_ref(&ALL));
    // SAFETY: null is refused; the other pointers lead to values that live here.
    unsafe {
        assert_eq!(llm_datadist_allocate_cache(engine, shape, &raw mut id, addrs.as_mut_ptr(), 4), 0);
        refused(llm_datadist_pull_cache(engine, null(), own, 0, -1, all), &["src_cache_index is null"]);
        refused(llm_datadist_pull_cache(engine, index, null(), 0, -1, all), &["dst_cache is null"]);
        refused(llm_datadist_pull_cache(engine, index, own, 0, -1, null()), &["ext_param is null"]);
        refused(llm_datadist_pull_blocks(engine, index, own, blocks, none, all), &["src_blocks is null"]);
        refused(llm_datadist_pull_blocks(engine, index, own, none, none, all), &["src_blocks=[]"]);
        refused(llm_datadist_push_cache(engine, null(), index, 0, -1, all), &["src_cache is null"]);
        refused(llm_datadist_push_cache(engine, own, null(), 0, -1, all), &["dst_cache_index is null"]);
        refused(llm_datadist_copy_cache(engine, null(), own, 0, 0, 0, -1), &["src_cache is null"]);
        refused(llm_datadist_copy_blocks(engine, own, null(), none, null(), 0), &["dst_cache is null"]);
        let (zeros, mut unset) = ([0; 4], -5);
        let mut register =
            |addrs, count| llm_datadist_register_cache(engine, shape, addrs, count, null(), &raw mut unset);
        refused(register(null(), 4), &["addrs is null"]);
        refused(register(null(), 0), &["addrs=[]"]);
        refused(register(zeros.as_ptr(), 4), &["addrs[0]=0"]);
        refused(register(zeros.as_ptr(), 3), &["num_tensors=4"]);
        assert_eq!((id, unset), (1, -5));
    }
}

#[test]
fn invalid_link_arguments_fail_the_whole_call() {
    let engine = Engine::new();
    let ip = |ip: *const c_char| LlmDatadistIp { ip, ..LOCAL };
    let [empty, six, name, nothing] = [c"".as_ptr(), c"::1".as_ptr(), c"here".as_ptr(), null()].map(ip);
    let cases: [(&[LlmDatadistCluster], i32, &[&str]); 7] = [
        (&[], 1000, &["clusters=[]"]),
        (&[peer(2, &LOCAL)], 0, &["timeout_in_millis=0"]),
        (&[peer(2, &LOCAL)], -5, &["timeout_in_millis=-5"]),
        (&[peer(2, &LOCAL), peer(2, &empty)], 1000, &["ip=\"\""]),
        (&[peer(2, &six)], 1000, &["::1", "IPv4"]),
        (&[peer(2, &name)], 1000, &["\"here\""]),
        (&[peer(2, &nothing)], 1000, &["ip is null"]),
    ];
    let link = |peers: &[LlmDatadistCluster], millis, rets, count| {
        // SAFETY: the pointers lead to values that live in this test, or are null and refused.
        unsafe { llm_datadist_link_clusters(engine.0, peers.as_ptr(), peers.len(), millis, rets, count) }
    };
    for (peers, millis, facts) in cases {
        let (mut rets, mut count) = ([9; 2], 77);
        refused(link(peers, millis, rets.as_mut_ptr(), &raw mut count), facts);
        assert_eq!((count, rets), (0, [9; 2]));
    }
    refused(link(&[peer(2, &LOCAL)], 1, null_mut(), null_mut()), &["num_rets is null"]);
}

#[test]
fn each_cluster_has_its_own_status_and_the_reason_names_all() {
    let engine = Engine::new();
    let no_local = LlmDatadistCluster { num_local: 0, ..peer(6, &LOCAL) };
    let no_remote = LlmDatadistCluster { num_remote: 0, ..peer(7, &LOCAL) };
    let (two, mut rets, mut count) = ([LOCAL; 2], [9; 4], 0);
    let two_local = LlmDatadistCluster { local: two.as_ptr(), num_local: 2, ..peer(8, &LOCAL) };
    let peers = [peer(5, &LOCAL), no_local, no_remote, two_local];
    // SAFETY: everything lives here.
    let status = unsafe {
        llm_datadist_link_clusters(engine.0, peers.as_ptr(), 4, 2000, rets.as_mut_ptr(), &raw mut count)
    };
    refused(status, &["cluster=5", "cluster=6", "cluster=7", "cluster=8"]);
    refused(status, &["local_ip_infos", "remote_ip_info_list"]);
    let [failed, wrong] = [StatusCode::LinkFailed, StatusCode::ParamInvalid].map(failure::status);
    assert_eq!((count, rets), (4, [failed, wrong, wrong, wrong]));
}
