//! Wrong arguments of the native API: null, misaligned and too long pointers, options, structures of later versions, and times.
//! A refused call starts and writes nothing.

use std::ffi::c_char;
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};

use super::native::{
    ALL, CALL, LONG, Node, ROWS, Start, allocate, fails, form, pair, start, started, succeeds, try_open,
};
use super::{reason, text};
use crate::abi::*;

const INVALID: u32 = LLM_DATADIST_INVALID_ARGUMENT;

/// Checks that a call is refused, by its argument and text.
#[track_caller]
fn refused(status: u32, argument: &str, fact: &str) {
    fails(status, INVALID, &[fact]);
    assert_eq!(text(llm_datadist_last_error_argument()), argument, "{}", reason());
}

#[test]
fn options_are_those_of_the_table() {
    for (options, argument, fact) in [
        (&[("pol", "1MiB")] as &[_], "", "did you mean \"pool\"?"),
        (&[("pool", "1 MiB")], "pool", "64MiB"),
        (&[("pool", "1.5")], "pool", "64MiB"),
        (&[("copy_workers", "0")], "copy_workers", "1 to 256"),
        (&[("copy_workers", "two")], "copy_workers", "1 to 256"),
        (&[("timeout", "nan")], "timeout", "seconds"),
        (&[("timeout", "-1")], "timeout", "seconds"),
        (&[("accept_remote", "yes")], "accept_remote", "true or false"),
        (&[("verify", "some")], "verify", "sample"),
        (&[("listen", "here")], "listen", "here"),
        (&[("name", "")], "name", "1 to 128"),
        (&[("token", "short")], "token", ""),
        (&[("pool", "1MiB"), ("pool", "2MiB")], "pool", "pool is given twice"),
    ] {
        let (status, engine) = try_open(options);
        refused(status, argument, fact);
        assert_eq!(engine, 0);
        assert!(!reason().contains("short"), "a token is never shown");
    }
    let good = [
        ("timeout", "0.5"),
        ("accept_remote", "true"),
        ("heartbeat", "2"),
        ("silence", "4.5"),
        ("metadata", "x"),
    ];
    let (status, engine) = try_open(&good);
    assert_eq!(status, 0, "{}", reason());
    assert_eq!(llm_datadist_engine_close(engine, 0.0), 0);
}

#[test]
fn invalid_pointers_are_refused() {
    let node = Node::new(&[]);
    let (engine, mut number, mut events) = (node.engine, 5, Vec::<LlmDatadistEvent>::with_capacity(1));
    let out = &raw mut number;
    let (form, own) = (form(), pair(node.rows(&[1]), node.rows(&[0])));
    let option = LlmDatadistOption { key: null(), value: null() };
    let (mut count, latin) = (77, [c_char::from_ne_bytes([0xE4]), 0]);
    // SAFETY: invalid pointers are refused before they are followed; the others lead to values that live here.
    unsafe {
        refused(llm_datadist_engine_open(null(), 1, out), "options", "options is null");
        refused(llm_datadist_engine_open(without_provenance(8), usize::MAX, out), "options", "too long");
        refused(llm_datadist_engine_open(&raw const option, 1, out), "", "the key of an option is null");
        refused(llm_datadist_engine_open(null(), 0, null_mut()), "engine", "engine is null");
        let allocate = |name, form, out| llm_datadist_allocate(engine, name, form, out);
        refused(allocate(null(), &raw const form, out), "name", "name is null");
        refused(allocate(latin.as_ptr(), &raw const form, out), "name", "not valid UTF-8");
        refused(allocate(c"x".as_ptr(), null(), out), "form", "form is null");
        refused(allocate(c"x".as_ptr(), without_provenance(4), out), "form", "not aligned");
        refused(allocate(c"x".as_ptr(), &raw const form, null_mut()), "cache", "cache is null");
        let copy = |pairs, count, call, out| llm_datadist_copy(engine, pairs, count, call, out);
        refused(copy(null(), 1, null(), out), "pairs", "pairs is null");
        refused(copy(null(), 0, null(), out), "num_pairs", "at least 1");
        refused(copy(&raw const own, usize::MAX / 2 + 1, null(), out), "pairs", "too long");
        refused(copy(&raw const own, 1, without_provenance(4), out), "call", "not aligned");
        refused(copy(&raw const own, 1, null(), null_mut()), "transfer", "transfer is null");
        let lists = [
            (null(), 1, "null"),
            (without_provenance(2), 1, "not aligned"),
            (without_provenance(4), usize::MAX, "too long"),
        ];
        for (blocks, num_blocks, fact) in lists {
            let wrong = pair(node.rows(&[1]), LlmDatadistRows { blocks, num_blocks, ..node.rows(&[]) });
            refused(copy(&raw const wrong, 1, null(), out), "src", fact);
        }
        refused(llm_datadist_link(engine, null(), null(), 0.0, out), "address", "null");
        refused(llm_datadist_send(engine, 1, null(), 1), "message", "null");
        refused(llm_datadist_send(engine, 1, without_provenance(64), 65537), "message", "len(message)=65537");
        refused(llm_datadist_lend(engine, null(), 1.0, 1, without_provenance_mut(8)), "rows", "null");
        refused(llm_datadist_lend(engine, &raw const own.src, 1.0, 1, null_mut()), "token", "null");
        refused(llm_datadist_renew(engine, null(), 1.0), "token", "null");
        refused(llm_datadist_events(engine, 1, null_mut(), &raw mut count), "events", "null");
        refused(llm_datadist_events(engine, 1, events.as_mut_ptr(), null_mut()), "num_events", "null");
        refused(llm_datadist_event_descriptor(engine, null_mut()), "descriptor", "null");
        refused(llm_datadist_engine_address(engine, null_mut(), 64), "address", "null");
        refused(llm_datadist_engine_address(engine, without_provenance_mut(1), 3), "size", "at least");
        refused(llm_datadist_cache_tensors(node.cache, null_mut(), 4), "tensors", "null");
        refused(
            llm_datadist_cache_tensors(node.cache, without_provenance_mut(8), 3),
            "num_tensors",
            "at least 4",
        );
    }
    assert_eq!((number, count), (5, 77), "a refused call writes nothing");
}

#[test]
fn structures_of_later_versions_are_refused() {
    let node = Node::new(&[]);
    let rows = node.rows(&[0]);
    let (late_rows, late_pair) = (
        pair(LlmDatadistRows { reserved: [0, 1], ..rows }, rows),
        LlmDatadistPair { reserved: [0, 1], ..pair(rows, rows) },
    );
    let late_call = LlmDatadistCall { reserved: [0, 0, 0, 1], ..CALL };
    let late_form = LlmDatadistForm { reserved: [1, 0, 0, 0], ..form() };
    let fact = "reserved words";
    let copy = |pair, call| start(llm_datadist_copy, node.engine, &[pair], call).0;
    refused(copy(late_rows, null()), "dst", fact);
    refused(copy(late_pair, null()), "pairs", fact);
    refused(copy(pair(rows, rows), &raw const late_call), "call", fact);
    refused(allocate(node.engine, &late_form).0, "form", fact);
}

#[test]
fn forms_are_checked() {
    let layout = LlmDatadistKvLayout {
        layers: LlmDatadistRange { first: 0, end: 2 },
        heads: ALL,
        total_heads: 2,
        block_tokens: 4,
        head_dim: 8,
        order: null(),
        kv: null(),
        model: null(),
        reserved: [0; 4],
    };
    let no_shape = LlmDatadistForm { shape: null(), num_dims: 0, tensors: 0, tensors_per_layer: 0, ..form() };
    let laid_out = |layout: &LlmDatadistKvLayout| LlmDatadistForm { layout: &raw const *layout, ..no_shape };
    let zero = [0_i64];
    let node = Node::new(&[]);
    // SAFETY: a handle lives in `started`.
    succeeds(started(|out| unsafe { llm_datadist_cache_free(node.cache, out) }));
    for (form, argument, fact) in [
        (LlmDatadistForm { blocks: 0, ..form() }, "blocks", "1 to 4294967295"),
        (LlmDatadistForm { blocks: 1 << 63, ..form() }, "blocks", "1 to 4294967295"),
        (LlmDatadistForm { dtype: null(), ..form() }, "dtype", "null"),
        (LlmDatadistForm { dtype: c"float17".as_ptr(), ..form() }, "dtype", "\"float16\""),
        (LlmDatadistForm { pool: c"disk".as_ptr(), ..form() }, "pool", "\"device\" or \"host\""),
        (LlmDatadistForm { pool: c"host".as_ptr(), ..form() }, "pool", "the option host_pool"),
        (LlmDatadistForm { tensors: 0, ..form() }, "tensors", "1 to"),
        (LlmDatadistForm { tensors_per_layer: 3, ..form() }, "tensors_per_layer", "a divisor of 4"),
        (LlmDatadistForm { shape: zero.as_ptr(), ..form() }, "shape", "at least 1"),
        (LlmDatadistForm { num_dims: 1 << 61, ..form() }, "shape", "too long"),
        (LlmDatadistForm { stride: 64, ..form() }, "stride", "allocated"),
        (LlmDatadistForm { flags: LLM_DATADIST_NOT_SHARED, ..form() }, "flags", "0"),
        (LlmDatadistForm { tensors: 1, ..laid_out(&layout) }, "tensors", "beside a layout"),
        (laid_out(&LlmDatadistKvLayout { head_dim: 0, ..layout }), "head_dim", "above 0"),
        (laid_out(&LlmDatadistKvLayout { order: c"DNH".as_ptr(), ..layout }), "order", "\"NHD\""),
        (laid_out(&LlmDatadistKvLayout { kv: c"both".as_ptr(), ..layout }), "kv", "\"separate\""),
        (laid_out(&LlmDatadistKvLayout { layers: ALL, ..layout }), "layers", "at least one layer"),
        (
            laid_out(&LlmDatadistKvLayout { heads: LlmDatadistRange { first: 1, end: 3 }, ..layout }),
            "heads",
            "0..2",
        ),
    ] {
        refused(allocate(node.engine, &form).0, argument, fact);
    }
    assert_eq!(allocate(node.engine, &laid_out(&layout)).0, 0, "{}", reason());
}

#[test]
fn rows_and_calls_are_checked() {
    let node = Node::new(&[]);
    let (one, two) = (node.rows(&[1]), node.rows(&[0]));
    let remote = LlmDatadistRows { cache: 0, peer: 5, name: c"kv".as_ptr(), ..two };
    let call = |kind: Start, pair, call| start(kind, node.engine, &[pair], &raw const call).0;
    let range = |first, end| LlmDatadistRange { first, end };
    let token = [0_u8; LLM_DATADIST_TOKEN_SIZE];
    for (rows, argument, fact) in [
        (LlmDatadistRows { peer: 5, ..two }, "src", "either cache, or peer and name"),
        (LlmDatadistRows { cache: 0, ..two }, "src", "either cache, or peer and name"),
        (LlmDatadistRows { name: c"".as_ptr(), ..remote }, "name", "1 to 128"),
        (LlmDatadistRows { bytes: range(4, 4), ..two }, "bytes", "4..4"),
        (LlmDatadistRows { layers: range(0, 1 << 33), ..two }, "layers", "4294967295"),
        (LlmDatadistRows { bytes: range(0, 1 << 63), ..two }, "bytes", "9223372036854775807"),
        (LlmDatadistRows { bytes: range(0, 1), tokens: range(0, 1), ..two }, "bytes", "beside tokens"),
        (LlmDatadistRows { layers: range(0, 1), ..two }, "src", "without layers and tokens"),
        (node.rows(&[0, 1]), "dst", "as many as src"),
        (node.rows(&[8]), "src", "8"),
        (remote, "src", "a cache of this engine"),
    ] {
        refused(call(llm_datadist_copy, pair(one, rows), CALL), argument, fact);
    }
    refused(call(llm_datadist_pull, pair(one, two), CALL), "src", "must be rows of a cache of a peer");
    assert!(reason().ends_with("a cache of a peer"), "{}: no words of one language", reason());
    let push = LlmDatadistPair { token: token.as_ptr(), ..pair(remote, one) };
    refused(call(llm_datadist_push, push, CALL), "token", "only for pulls");
    let pull = LlmDatadistPair { token: token.as_ptr(), ..pair(one, remote) };
    fails(call(llm_datadist_pull, pull, CALL), INVALID, &["token"]);
    refused(call(llm_datadist_pull, pair(remote, one), CALL), "dst", "a cache of this engine");
    let own = pair(one, two);
    for (change, argument, fact) in [
        (LlmDatadistCall { timeout: -1.0, ..CALL }, "timeout", "0 to 4294967 seconds"),
        (LlmDatadistCall { timeout: f64::NAN, ..CALL }, "timeout", "seconds"),
        (LlmDatadistCall { timeout: f64::INFINITY, ..CALL }, "timeout", "seconds"),
        (LlmDatadistCall { verify: c"maybe".as_ptr(), ..CALL }, "verify", "sample"),
        (LlmDatadistCall { flags: 4, ..CALL }, "flags", "4"),
        (LlmDatadistCall { flags: LLM_DATADIST_LAYERWISE, ..CALL }, "flags", "1"),
        (
            LlmDatadistCall { message: token.as_ptr(), message_size: 1, ..CALL },
            "message",
            "only for pulls and pushes",
        ),
    ] {
        refused(call(llm_datadist_copy, own, change), argument, fact);
    }
    let large = LlmDatadistCall { message: without_provenance(64), message_size: 65537, ..CALL };
    refused(call(llm_datadist_pull, pair(one, remote), large), "message", "len(message)=65537");
    assert_eq!(
        call(llm_datadist_copy, own, LlmDatadistCall { timeout: LONG, verify: c"full".as_ptr(), ..CALL }),
        0
    );
}

#[test]
fn grants_links_and_waits_are_checked() {
    let node = Node::new(&[]);
    let (rows, mut token) = (node.rows(&[0, 3]), [0_u8; LLM_DATADIST_TOKEN_SIZE]);
    let mut lend = |rows: &LlmDatadistRows, ttl, readers| {
        // SAFETY: everything lives here.
        unsafe { llm_datadist_lend(node.engine, rows, ttl, readers, token.as_mut_ptr()) }
    };
    for ttl in [0.0, -1.0, f64::NAN, 1e10] {
        refused(lend(&rows, ttl, 1), "ttl", "ttl");
    }
    refused(lend(&rows, 1.0, 0), "readers", "1 to 4096");
    refused(lend(&LlmDatadistRows { num_blocks: 0, ..rows }, 1.0, 1), "rows", "rows");
    refused(
        lend(&LlmDatadistRows { bytes: LlmDatadistRange { first: 0, end: 1 }, ..rows }, 1.0, 1),
        "rows",
        "whole blocks",
    );
    let remote = LlmDatadistRows { cache: 0, peer: 5, name: c"kv".as_ptr(), ..ROWS };
    refused(lend(&remote, 1.0, 1), "rows", "a cache of this engine");
    assert_eq!(token, [0; LLM_DATADIST_TOKEN_SIZE]);
    // SAFETY: everything lives here.
    let status = unsafe { llm_datadist_lend(node.engine, &raw const rows, 1e-12, 1, token.as_mut_ptr()) };
    assert_eq!(status, 0, "a time above 0 stays above 0: {}", reason());
    for (address, fact) in [(c"here", "here"), (c"127.0.0.1", "port"), (c"127.0.0.1:0", "port")] {
        // SAFETY: everything lives here.
        let (status, _) =
            started(|out| unsafe { llm_datadist_link(node.engine, address.as_ptr(), null(), 0.0, out) });
        refused(status, "address", fact);
    }
    let copied = node.copy(1, 0);
    refused(llm_datadist_transfer_wait(copied, -1.0), "timeout", "0 to 4294967 seconds");
    fails(llm_datadist_transfer_ready(copied, 0), INVALID, &["LLM_DATADIST_LAYERWISE"]);
    let mut peer = 7;
    // SAFETY: it lives here.
    refused(unsafe { llm_datadist_transfer_peer(copied, &raw mut peer) }, "transfer", "llm_datadist_link");
    refused(llm_datadist_engine_close(node.engine, f64::NAN), "timeout", "seconds");
    assert_eq!((peer, llm_datadist_transfer_wait(copied, LONG)), (7, 0), "the engine is still open");
}
