//! What programs and libraries of different ages share: sizes and offsets of the structures, typed in by hand, and the
//! reserved words, which must be 0 today.

use std::mem::offset_of;
use std::ptr::null;

use llm_datadist_core::StatusCode;

use super::{ALL, Engine, cache, desc, initialize, is, reason};
use crate::abi::{
    LLM_DATADIST_ABI_VERSION, LlmDatadistBlocks, LlmDatadistCache, LlmDatadistCacheDesc,
    LlmDatadistCacheIndex, LlmDatadistCluster, LlmDatadistExtParam, LlmDatadistIp, LlmDatadistOption,
    LlmDatadistRegisterCfg, llm_datadist_abi_version, llm_datadist_allocate_cache, llm_datadist_copy_cache,
    llm_datadist_free, llm_datadist_link_clusters, llm_datadist_listening, llm_datadist_new,
    llm_datadist_pull_cache, llm_datadist_push_cache, llm_datadist_register_cache,
};

#[test]
fn structures_have_the_layout_of_version_2() {
    assert_eq!((LLM_DATADIST_ABI_VERSION, llm_datadist_abi_version()), (2, 2));
    let sizes = [
        size_of::<LlmDatadistOption>(),
        size_of::<LlmDatadistBlocks>(),
        size_of::<LlmDatadistCacheDesc>(),
        size_of::<LlmDatadistCache>(),
        size_of::<LlmDatadistCacheIndex>(),
        size_of::<LlmDatadistExtParam>(),
        size_of::<LlmDatadistRegisterCfg>(),
        size_of::<LlmDatadistIp>(),
        size_of::<LlmDatadistCluster>(),
    ];
    assert_eq!(sizes, [16, 16, 56, 112, 56, 56, 128, 48, 72]);
    macro_rules! offsets {
        ($structure:ty: $($field:ident)*) => { [$(offset_of!($structure, $field)),*] };
    }
    let desc = offsets!(LlmDatadistCacheDesc: placement num_tensors data_type num_dims shape reserved);
    assert_eq!(desc, [0, 4, 8, 12, 16, 24]);
    assert_eq!(offsets!(LlmDatadistCache: cache_id addrs num_addrs desc reserved), [0, 8, 16, 24, 80]);
    assert_eq!(offsets!(LlmDatadistCacheIndex: cluster_id cache_id batch_index reserved), [0, 8, 16, 24]);
    let ext =
        offsets!(LlmDatadistExtParam: src_first src_last dst_first dst_last tensor_num_per_layer reserved);
    assert_eq!(ext, [0, 4, 8, 12, 16, 24]);
    assert_eq!(offsets!(LlmDatadistIp: ip port reserved), [0, 8, 16]);
    let cluster = offsets!(LlmDatadistCluster: remote_cluster_id local num_local remote num_remote reserved);
    assert_eq!(cluster, [0, 8, 16, 24, 32, 40]);
    assert_eq!(offsets!(LlmDatadistOption: key value), [0, 8]);
    assert_eq!(offsets!(LlmDatadistBlocks: blocks count), [0, 8]);
}

const LATER: [u64; 4] = [0, 0, 0, 1];

#[test]
fn what_a_later_version_would_say_is_refused() {
    let engine = Engine::new();
    let refused = |name: &str, status: u32| {
        assert_eq!(status, is(StatusCode::ParamInvalid), "{name}: {}", reason());
        assert!(reason().contains("reserved words") && reason().contains(name), "{name}: {}", reason());
    };
    let (mut id, mut addrs, memory) = (0, [0_u64; 4], [0_i32; 64]);
    let (mut later, plain) = (desc(4), desc(4));
    later.reserved = LATER;
    let index = LlmDatadistCacheIndex { cluster_id: 2, cache_id: 1, batch_index: 0, reserved: [0; 4] };
    let (whole, late_index) = (cache(1, &[], 4), LlmDatadistCacheIndex { reserved: LATER, ..index });
    let late_cache = LlmDatadistCache { reserved: LATER, ..whole };
    let late_desc = LlmDatadistCache { desc: later, ..whole };
    let late_ext = LlmDatadistExtParam { reserved: LATER, ..ALL };
    let mut cfg = LlmDatadistRegisterCfg { reserved: [0; 16] };
    let own = [memory.as_ptr().expose_provenance() as u64; 1];
    let one = desc(1);
    // SAFETY: everything lives here.
    unsafe {
        let made =
            llm_datadist_allocate_cache(engine.0, &raw const later, &raw mut id, addrs.as_mut_ptr(), 4);
        refused("cache_desc", made);
        let made =
            llm_datadist_allocate_cache(engine.0, &raw const plain, &raw mut id, addrs.as_mut_ptr(), 4);
        assert_eq!((made, id), (0, 1), "{}", reason());
        let (index, late_index) = (&raw const index, &raw const late_index);
        let (whole, late_cache, late_desc) = (&raw const whole, &raw const late_cache, &raw const late_desc);
        let (all, late_ext) = (&raw const ALL, &raw const late_ext);
        refused("src_cache_index", llm_datadist_pull_cache(engine.0, late_index, whole, 0, -1, all));
        refused("ext_param", llm_datadist_pull_cache(engine.0, index, whole, 0, -1, late_ext));
        refused("dst_cache", llm_datadist_pull_cache(engine.0, index, late_cache, 0, -1, all));
        refused("src_cache", llm_datadist_push_cache(engine.0, late_desc, index, 0, -1, all));
        refused("src_cache", llm_datadist_copy_cache(engine.0, late_cache, whole, 0, 0, 0, -1));
        refused("dst_cache", llm_datadist_copy_cache(engine.0, whole, late_desc, 0, 0, 0, -1));
        cfg.reserved[15] = 1;
        let register =
            |cfg, id| llm_datadist_register_cache(engine.0, &raw const one, own.as_ptr(), own.len(), cfg, id);
        refused("cfg", register(&raw const cfg, &raw mut id));
        cfg.reserved[15] = 0;
        assert_eq!(register(&raw const cfg, &raw mut id), 0, "{}", reason());
        assert_eq!(register(null(), &raw mut id), 0, "null is the defaults: {}", reason());
        let ip = LlmDatadistIp { ip: c"127.0.0.1".as_ptr(), port: 1, reserved: [0; 4] };
        let late_ip = LlmDatadistIp { reserved: LATER, ..ip };
        let peer = |remote, reserved| LlmDatadistCluster {
            remote_cluster_id: 2,
            local: &raw const ip,
            num_local: 1,
            remote,
            num_remote: 1,
            reserved,
        };
        let (mut rets, mut count) = ([0; 2], 0);
        for (name, late) in
            [("clusters", peer(&raw const ip, LATER)), ("remote_ip_infos", peer(&raw const late_ip, [0; 4]))]
        {
            let both = [peer(&raw const ip, [0; 4]), late];
            let (rets, count) = (rets.as_mut_ptr(), &raw mut count);
            refused(name, llm_datadist_link_clusters(engine.0, both.as_ptr(), 2, 1000, rets, count));
        }
    }
}

/// Programs ask for the port before they ask for the reason.
#[test]
fn asking_for_the_port_leaves_the_reason_alone() {
    let handle = llm_datadist_new(1, 1);
    assert_eq!(initialize(handle, &[("llm.DeviceId", "x")]), is(StatusCode::ParamInvalid));
    let why = reason();
    assert!(why.contains("\"x\""), "{why}");
    assert_eq!(llm_datadist_listening(handle), 0);
    assert_eq!(reason(), why);
    llm_datadist_free(handle);
    assert_eq!(llm_datadist_listening(handle), 0, "nor of a handle that is not there");
    assert_eq!(reason(), why);
}
