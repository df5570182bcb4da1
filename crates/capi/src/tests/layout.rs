//! What programs and libraries of different versions share: layouts of structures, and reserved words.

use std::mem::offset_of;
use std::ptr::{from_ref, null};

use super::{ALL, Engine, INDEX, LOCAL, cache, desc, peer, reason, refused};
use crate::abi::*;

#[test]
fn structures_have_the_layout_of_version_5() {
    assert_eq!((LLM_DATADIST_ABI_VERSION, llm_datadist_abi_version()), (5, 5));
    macro_rules! layout {
        ($structure:ident, $size:literal: $($field:ident $offset:literal),*) => {
            assert_eq!(size_of::<$structure>(), $size);
            assert_eq!([$(offset_of!($structure, $field)),*], [$($offset),*]);
        };
    }
    layout!(LlmDatadistOption, 16: key 0, value 8);
    layout!(LlmDatadistBlocks, 16: blocks 0, count 8);
    layout!(LlmDatadistCacheDesc, 56: placement 0, num_tensors 4, data_type 8, num_dims 12, shape 16, reserved 24);
    layout!(LlmDatadistCache, 112: cache_id 0, addrs 8, num_addrs 16, desc 24, reserved 80);
    layout!(LlmDatadistCacheIndex, 56: cluster_id 0, cache_id 8, batch_index 16, reserved 24);
    layout!(LlmDatadistExtParam, 56: src_first 0, src_last 4, dst_first 8, dst_last 12, tensor_num_per_layer 16, reserved 24);
    layout!(LlmDatadistRegisterCfg, 128: reserved 0);
    layout!(LlmDatadistIp, 48: ip 0, port 8, reserved 16);
    layout!(LlmDatadistCluster, 72: remote_cluster_id 0, local 8, num_local 16, remote 24, num_remote 32, reserved 40);
    layout!(LlmDatadistRange, 16: first 0, end 8);
    layout!(LlmDatadistKvLayout, 104: layers 0, heads 16, total_heads 32, block_tokens 36, head_dim 40, order 48, kv 56);
    layout!(LlmDatadistKvLayout, 104: model 64, reserved 72);
    layout!(LlmDatadistForm, 104: blocks 0, layout 8, dtype 16, shape 24, num_dims 32, tensors 40, tensors_per_layer 44);
    layout!(LlmDatadistForm, 104: pool 48, stride 56, flags 64, reserved 72);
    layout!(LlmDatadistRows, 104: cache 0, peer 8, name 16, blocks 24, num_blocks 32, layers 40, tokens 56, bytes 72, reserved 88);
    layout!(LlmDatadistPair, 232: dst 0, src 104, token 208, reserved 216);
    layout!(LlmDatadistCall, 72: message 0, message_size 8, verify 16, timeout 24, flags 32, reserved 40);
    layout!(LlmDatadistArrived, 24: tensor 0, reserved 4, blocks 8);
    layout!(LlmDatadistPeer, 64: peer 0, name 8, address 16, transport 24, metadata 32, metadata_size 40, reserved 48);
    layout!(LlmDatadistEvent, 192: kind 0, status 4, transfer 8, peer 16, message 80, message_size 88, reason 96);
    layout!(LlmDatadistEvent, 192: unconfirmed 104, token 112, reserved 160);
    layout!(LlmDatadistText, 16: bytes 0, size 8);
    layout!(LlmDatadistHixlOption, 32: key 0, value 16);
    layout!(LlmDatadistHixlOp, 24: local_addr 0, remote_addr 8, len 16);
    layout!(LlmDatadistHixlConnection, 24: remote_engine 0, state 16);
    layout!(LlmDatadistHixlResult, 24: request 0, user_data 8, state 16);
    layout!(LlmDatadistHixlNotice, 32: name 0, message 16);
}

#[test]
fn reserved_words_must_be_zero() {
    const LATER: [u64; 4] = [0, 0, 0, 1];
    let engine = Engine::new();
    let refused = |name: &str, status: u32| refused(status, &["reserved words", name]);
    let (whole, memory, mut addrs, mut id) = (cache(), [0_i32; 64], [0_u64; 4], 0);
    let late_index = LlmDatadistCacheIndex { reserved: LATER, ..INDEX };
    let late_cache = LlmDatadistCache { reserved: LATER, ..whole };
    let late_desc =
        LlmDatadistCache { desc: LlmDatadistCacheDesc { reserved: LATER, ..whole.desc }, ..whole };
    let late_ext = LlmDatadistExtParam { reserved: LATER, ..ALL };
    // SAFETY: everything lives here.
    unsafe {
        let mut allocate = |desc: &LlmDatadistCacheDesc| {
            llm_datadist_allocate_cache(engine.0, desc, &raw mut id, addrs.as_mut_ptr(), 4)
        };
        refused("cache_desc", allocate(&late_desc.desc));
        assert_eq!(allocate(&whole.desc), 0, "{}", reason());
        let pull =
            |index: &_, cache: &_, ext: &_| llm_datadist_pull_cache(engine.0, index, cache, 0, -1, ext);
        refused("src_cache_index", pull(&late_index, &whole, &ALL));
        refused("ext_param", pull(&INDEX, &whole, &late_ext));
        refused("dst_cache", pull(&INDEX, &late_cache, &ALL));
        let push =
            |cache: &_| llm_datadist_push_cache(engine.0, cache, &raw const INDEX, 0, -1, from_ref(&ALL));
        refused("src_cache", push(&late_desc));
        let copy = |src: &_, dst: &_| llm_datadist_copy_cache(engine.0, src, dst, 0, 0, 0, -1);
        refused("src_cache", copy(&late_cache, &whole));
        refused("dst_cache", copy(&whole, &late_desc));

        let own = memory.as_ptr().expose_provenance() as u64;
        let mut register =
            |cfg| llm_datadist_register_cache(engine.0, &desc(1), &raw const own, 1, cfg, &raw mut id);
        let mut cfg = LlmDatadistRegisterCfg { reserved: [0; 16] };
        cfg.reserved[15] = 1;
        refused("cfg", register(&raw const cfg));
        cfg.reserved[15] = 0;
        assert_eq!(register(&raw const cfg), 0, "{}", reason());
        assert_eq!(register(null()), 0, "null means the defaults: {}", reason());

        let late_ip = LlmDatadistIp { reserved: LATER, ..LOCAL };
        let late_peer = LlmDatadistCluster { reserved: LATER, ..peer(2, &LOCAL) };
        let link = |late| {
            let (peers, mut rets, mut count) = ([peer(2, &LOCAL), late], [0; 2], 0);
            llm_datadist_link_clusters(engine.0, peers.as_ptr(), 2, 1000, rets.as_mut_ptr(), &raw mut count)
        };
        refused("clusters", link(late_peer));
        refused(
            "remote_ip_infos",
            link(LlmDatadistCluster { remote: &raw const late_ip, ..peer(2, &LOCAL) }),
        );
    }
}
