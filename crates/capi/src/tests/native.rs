//! Engines, caches and transfers of the native API: their handles, and the ends of transfers.
//!
//! Not for: wrong arguments (`native_arguments`), messages and links (`native_events`), the ends of engines (`native_closing`), and
//! peers that do not answer or die
//! (`tests/c/native.c`).

use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::slice;

use llm_datadist_core::ArrivedRows;

use super::forks::{alone, in_a_child};
use super::{reason, with_options};
use crate::abi::*;

pub(super) const LONG: f64 = 60.0;
/// Blocks of a cache, and bytes of a block in each of its tensors.
pub(super) const BLOCKS: usize = 8;
pub(super) const BLOCK: usize = 64;
pub(super) const TENSORS: usize = 4;

pub(super) const ALL: LlmDatadistRange = LlmDatadistRange { first: 0, end: 0 };
pub(super) const ROWS: LlmDatadistRows = LlmDatadistRows {
    cache: 0,
    peer: 0,
    name: null(),
    blocks: null(),
    num_blocks: 0,
    layers: ALL,
    tokens: ALL,
    bytes: ALL,
    reserved: [0; 2],
};
pub(super) const CALL: LlmDatadistCall = LlmDatadistCall {
    message: null(),
    message_size: 0,
    verify: null(),
    timeout: 0.0,
    flags: 0,
    reserved: [0; 4],
};
static SHAPE: [i64; 1] = [64];

/// Caches of four tensors of eight blocks of 64 bytes.
pub(super) fn form() -> LlmDatadistForm {
    LlmDatadistForm {
        blocks: BLOCKS as u64,
        layout: null(),
        dtype: c"uint8".as_ptr(),
        shape: SHAPE.as_ptr(),
        num_dims: 1,
        tensors: 4,
        tensors_per_layer: 2,
        pool: null(),
        stride: 0,
        flags: 0,
        reserved: [0; 4],
    }
}

/// Opens an engine. Returns the status, and the handle or 0.
pub(super) fn try_open(options: &[(&str, &str)]) -> (u32, u64) {
    let mut engine = 0;
    let status = with_options(options, |options| {
        // SAFETY: the options live until the call returns.
        unsafe { llm_datadist_engine_open(options.as_ptr(), options.len(), &raw mut engine) }
    });
    (status, engine)
}

/// An engine, closed when it drops, and its cache `kv`.
pub(super) struct Node {
    pub(super) engine: u64,
    pub(super) cache: u64,
}

impl Node {
    pub(super) fn new(more: &[(&str, &str)]) -> Node {
        let options: Vec<_> = [("pool", "1MiB"), ("page", "4KiB"), ("listen", "127.0.0.1:0")]
            .iter()
            .chain(more)
            .copied()
            .collect();
        let (status, engine) = try_open(&options);
        assert_eq!(status, 0, "{}", reason());
        let (status, cache) = allocate(engine, &form());
        assert_eq!(status, 0, "{}", reason());
        Node { engine, cache }
    }

    /// Rows of the cache `kv`. The structure points to the list.
    pub(super) fn rows(&self, blocks: &'static [u32]) -> LlmDatadistRows {
        LlmDatadistRows { cache: self.cache, blocks: blocks.as_ptr(), num_blocks: blocks.len(), ..ROWS }
    }

    pub(super) fn fill(&self, seed: u8) {
        for (tensor, bytes) in tensors(self.cache).into_iter().enumerate() {
            bytes.iter_mut().enumerate().for_each(|(at, byte)| *byte = pattern(seed, tensor, at));
        }
    }

    /// Whether a block has the bytes that block `from` has after `fill(seed)`.
    pub(super) fn has(&self, block: usize, seed: u8, from: usize) -> bool {
        let same = |(tensor, bytes): (usize, &mut [u8])| {
            (0..BLOCK).all(|at| bytes[block * BLOCK + at] == pattern(seed, tensor, from * BLOCK + at))
        };
        tensors(self.cache).into_iter().enumerate().all(same)
    }

    /// Starts to copy a block to another one. Returns the status, and the handle or 0.
    pub(super) fn try_copy(&self, dst: usize, src: usize) -> (u32, u64) {
        let pair = pair(self.rows(one(dst)), self.rows(one(src)));
        start(llm_datadist_copy, self.engine, &[pair], null())
    }

    pub(super) fn copy(&self, dst: usize, src: usize) -> u64 {
        let (status, transfer) = self.try_copy(dst, src);
        assert_eq!(status, 0, "{}", reason());
        transfer
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        llm_datadist_engine_close(self.engine, 0.0);
    }
}

/// A list of one block.
fn one(block: usize) -> &'static [u32] {
    static ALL: [u32; 10] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9];
    &ALL[block..=block]
}

fn pattern(seed: u8, tensor: usize, at: usize) -> u8 {
    (usize::from(seed) * 50 + tensor * 17 + at).to_le_bytes()[0]
}

pub(super) fn pair(dst: LlmDatadistRows, src: LlmDatadistRows) -> LlmDatadistPair {
    LlmDatadistPair { dst, src, token: null(), reserved: [0; 2] }
}

/// Allocates the cache `kv`. Returns the status, and the handle or 0.
pub(super) fn allocate(engine: u64, form: &LlmDatadistForm) -> (u32, u64) {
    let mut cache = 0;
    // SAFETY: everything lives here.
    let status = unsafe { llm_datadist_allocate(engine, c"kv".as_ptr(), form, &raw mut cache) };
    (status, cache)
}

/// The bytes of each tensor of a cache, which no test uses while a transfer does.
fn tensors(cache: u64) -> Vec<&'static mut [u8]> {
    let mut addresses = [null_mut::<c_void>(); TENSORS];
    // SAFETY: there is space for all of them.
    let status = unsafe { llm_datadist_cache_tensors(cache, addresses.as_mut_ptr(), TENSORS) };
    assert_eq!(status, 0, "{}", reason());
    let bytes = |address: &*mut c_void| {
        // SAFETY: each tensor has this many bytes, as long as its cache.
        unsafe { slice::from_raw_parts_mut(address.cast(), BLOCKS * BLOCK) }
    };
    addresses.iter().map(bytes).collect()
}

/// Runs a call that starts a transfer. Returns the status, and the handle or 0.
pub(super) fn started(call: impl FnOnce(*mut u64) -> u32) -> (u32, u64) {
    let mut transfer = 0;
    let status = call(&raw mut transfer);
    assert_eq!(transfer != 0, status == 0, "a handle is handed out exactly on success");
    (status, transfer)
}

pub(super) type Start =
    unsafe extern "C" fn(u64, *const LlmDatadistPair, usize, *const LlmDatadistCall, *mut u64) -> u32;

/// Starts a copy, a pull or a push. Returns the status, and the handle or 0.
pub(super) fn start(
    kind: Start,
    engine: u64,
    pairs: &[LlmDatadistPair],
    call: *const LlmDatadistCall,
) -> (u32, u64) {
    // SAFETY: everything lives in the caller.
    started(|out| unsafe { kind(engine, pairs.as_ptr(), pairs.len(), call, out) })
}

/// Waits for a transfer, and frees its handle.
#[track_caller]
pub(super) fn succeeds((status, transfer): (u32, u64)) {
    assert_eq!(status, 0, "{}", reason());
    assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0, "{}", reason());
    assert_eq!(llm_datadist_transfer_free(transfer), 0);
}

/// Checks that a text of the native API has no words of the original's API.
#[track_caller]
pub(super) fn has_native_words(text: &str) {
    for word in ["cluster", "llm.", "LLMDataDist", "inaliz", "polled", "notif", "sync_kv", "link_"] {
        assert!(!text.contains(word), "{word:?} in {text:?}");
    }
}

/// Checks the status of a call that failed, and that its reason has native words and contains `facts`.
#[track_caller]
pub(super) fn fails(status: u32, expected: u32, facts: &[&str]) {
    assert_eq!(status, expected, "{}", reason());
    has_native_words(&reason());
    assert!(facts.iter().all(|fact| reason().contains(fact)), "{:?} lacks one of {facts:?}", reason());
}

pub(super) fn progress(transfer: u64) -> (u32, u64, u64) {
    let (mut done, mut total) = (7, 7);
    // SAFETY: both live here.
    let status = unsafe { llm_datadist_transfer_progress(transfer, &raw mut done, &raw mut total) };
    (status, done, total)
}

/// The status, and the ranges that have arrived as `(tensor, first, end)`. The number is that of all ranges.
pub(super) fn arrived(transfer: u64) -> (u32, usize, Vec<(u32, u64, u64)>) {
    let (mut ranges, mut count) = (Vec::<LlmDatadistArrived>::with_capacity(9), 7);
    // SAFETY: there is space for them.
    let status = unsafe { llm_datadist_transfer_arrived(transfer, 9, ranges.as_mut_ptr(), &raw mut count) };
    if status == 0 {
        // SAFETY: the function has written as many.
        unsafe { ranges.set_len(count.min(9)) };
    }
    (status, count, ranges.iter().map(|of| (of.tensor, of.blocks.first, of.blocks.end)).collect())
}

#[test]
fn stats_are_a_text_that_the_thread_keeps() {
    let node = Node::new(&[]);
    succeeds((0, node.copy(1, 0)));
    let stats = |engine| {
        let mut json = null();
        // SAFETY: the pointer lives here.
        assert_eq!(unsafe { llm_datadist_stats(engine, &raw mut json) }, 0, "{}", reason());
        super::text(json)
    };
    let text = stats(node.engine);
    assert!(text.starts_with("{\"pools\":{\"device\":{\"capacity_bytes\":1048576,"), "{text}");
    assert!(text.contains("\"copy_blocks\":{\"calls\":1,") && text.ends_with('}'), "{text}");
    // SAFETY: null is refused.
    fails(unsafe { llm_datadist_stats(node.engine, null_mut()) }, LLM_DATADIST_INVALID_ARGUMENT, &["json"]);
}

#[test]
#[expect(clippy::single_range_in_vec_init, reason = "a list of ranges")]
fn arrived_blocks_are_ranges_of_tensors() {
    let arrived = |tensor, rows| ArrivedRows { tensor, rows };
    let arrived = [arrived(1, vec![0..2, 5..6]), arrived(3, vec![4..5])];
    let ranges =
        ranges_of(&arrived).map(|of| (of.tensor, of.blocks.first, of.blocks.end)).collect::<Vec<_>>();
    assert_eq!(ranges, [(1, 0, 2), (1, 5, 6), (3, 4, 5)]);
}

#[test]
fn copies_move_bytes_within_an_engine() {
    let node = Node::new(&[]);
    node.fill(1);
    let pairs = [
        pair(node.rows(&[4, 5]), node.rows(&[0, 1])),
        pair(
            node.rows(&[6]),
            LlmDatadistRows { bytes: LlmDatadistRange { first: 0, end: 64 }, ..node.rows(&[2]) },
        ),
    ];
    succeeds(start(llm_datadist_copy, node.engine, &pairs, null()));
    assert!([(4, 0), (5, 1), (6, 2), (7, 7)].iter().all(|&(block, from)| node.has(block, 1, from)));
    let transfer = node.copy(7, 0);
    assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0, "{}", reason());
    let bytes = (TENSORS * BLOCK) as u64;
    assert_eq!(progress(transfer), (0, bytes, bytes));
    assert_eq!(arrived(transfer), (0, 0, vec![]));
    assert!(llm_datadist_transfer_done(transfer) && llm_datadist_transfer_nanos(transfer) > 0);
    assert!(!llm_datadist_transfer_cancel(transfer), "its outcome can no longer change");
}

/// The status of every call that needs an engine.
fn every_call(engine: u64) -> Vec<u32> {
    let (form, rows, pair) = (form(), ROWS, pair(ROWS, ROWS));
    let (mut number, mut count, mut address, mut token) = (0, 0, [0; 64], [0; 48]);
    let (number, token) = (&raw mut number, token.as_mut_ptr());
    let (mut events, mut tensor, mut json) = (Vec::<LlmDatadistEvent>::with_capacity(1), null_mut(), null());
    // SAFETY: every pointer leads to a value above, or is null where that is an empty message or list.
    unsafe {
        vec![
            llm_datadist_engine_address(engine, address.as_mut_ptr(), 64),
            llm_datadist_event_descriptor(engine, number.cast()),
            llm_datadist_allocate(engine, c"x".as_ptr(), &raw const form, number),
            llm_datadist_register(engine, c"x".as_ptr(), &raw mut tensor, 1, &raw const form, number),
            llm_datadist_copy(engine, &raw const pair, 1, null(), number),
            llm_datadist_pull(engine, &raw const pair, 1, null(), number),
            llm_datadist_push(engine, &raw const pair, 1, null(), number),
            llm_datadist_link(engine, c"127.0.0.1:1".as_ptr(), null(), 0.0, number),
            llm_datadist_peer_close(engine, 1, 0.0, number),
            llm_datadist_send(engine, 1, null(), 0),
            llm_datadist_lend(engine, &raw const rows, 1.0, 1, token),
            llm_datadist_renew(engine, token, 1.0),
            llm_datadist_revoke(engine, token, number),
            llm_datadist_events(engine, 1, events.as_mut_ptr(), &raw mut count),
            llm_datadist_peers(engine, 0, null_mut(), &raw mut count),
            llm_datadist_stats(engine, &raw mut json),
            llm_datadist_engine_close(engine, 0.0),
        ]
    }
}

/// Whether every function refuses the handle of a transfer, as far as it can.
fn every_function_refuses(transfer: u64, facts: &[&str]) -> bool {
    let mut peer = 0;
    let failures = [
        llm_datadist_transfer_wait(transfer, LONG),
        llm_datadist_transfer_result(transfer),
        llm_datadist_transfer_ready(transfer, 0),
        // SAFETY: it lives here.
        unsafe { llm_datadist_transfer_peer(transfer, &raw mut peer) },
        progress(transfer).0,
        arrived(transfer).0,
        llm_datadist_transfer_free(transfer),
    ];
    failures == [LLM_DATADIST_CLOSED; 7]
        && facts.iter().all(|fact| reason().contains(fact))
        && progress(transfer).1 == 7
        && llm_datadist_transfer_done(transfer)
        && !llm_datadist_transfer_cancel(transfer)
        && llm_datadist_transfer_nanos(transfer) == 0
}

#[test]
fn handles_that_are_not_valid_are_refused_by_every_call() {
    let node = Node::new(&[]);
    let (other, transfer) = (Node::new(&[]), node.copy(1, 0));
    assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0);
    assert_eq!(llm_datadist_transfer_free(transfer), 0);
    let closed = other.engine;
    assert_eq!(llm_datadist_engine_close(closed, 0.0), 0);
    for engine in [0, 1, closed, node.cache, transfer, u64::MAX] {
        for status in every_call(engine) {
            fails(status, LLM_DATADIST_CLOSED, &["no such engine", &engine.to_string()]);
        }
    }
    for handle in [0, transfer, node.engine, node.cache, u64::MAX] {
        assert!(every_function_refuses(handle, &["no such transfer", &handle.to_string()]), "{}", reason());
    }
    let mut addresses = [null_mut(); TENSORS];
    for cache in [0, other.cache, node.engine, u64::MAX] {
        // SAFETY: there is space for all of them.
        let status = unsafe { llm_datadist_cache_tensors(cache, addresses.as_mut_ptr(), TENSORS) };
        fails(status, LLM_DATADIST_NOT_FOUND, &["no such cache"]);
        // SAFETY: a handle lives in `started`.
        let (status, _) = started(|out| unsafe { llm_datadist_cache_free(cache, out) });
        fails(status, LLM_DATADIST_NOT_FOUND, &["no such cache"]);
    }
    // The functions that cannot fail keep the last failure.
    assert!(llm_datadist_transfer_done(transfer) && !llm_datadist_transfer_cancel(transfer));
    assert!(reason().contains("no such cache"));
}

#[test]
fn child_has_nothing_of_its_parent_and_may_open_its_own() {
    alone("tests::native::child_has_nothing_of_its_parent_and_may_open_its_own", || {
        let node = Node::new(&[]);
        let transfer = node.copy(1, 0);
        assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0);
        in_a_child(|| {
            let refused = every_call(node.engine).iter().all(|&status| status == LLM_DATADIST_CLOSED)
                && reason().contains("forked")
                && every_function_refuses(transfer, &["forked"]);
            let own = Node::new(&[]);
            let copied = own.copy(1, 0);
            refused && copied != transfer && llm_datadist_transfer_wait(copied, LONG) == 0
        });
        assert_eq!(llm_datadist_transfer_result(transfer), 0, "{}", reason());
    });
}

/// A cache of another engine is refused, and never mistaken for one of the same id.
#[test]
fn rows_of_another_engine_are_refused() {
    let (one, two) = (Node::new(&[("name", "one")]), Node::new(&[("name", "two")]));
    let pair = pair(one.rows(&[1]), two.rows(&[0]));
    let (status, _) = start(llm_datadist_copy, one.engine, &[pair], null());
    fails(status, LLM_DATADIST_INVALID_ARGUMENT, &["src=rows of engine 'two'", "engine 'one'"]);
}

#[test]
fn names_and_handles_of_freed_caches() {
    let node = Node::new(&[]);
    fails(allocate(node.engine, &form()).0, LLM_DATADIST_INVALID_ARGUMENT, &["kv"]);
    assert_eq!(super::text(llm_datadist_last_error_code()), "name_taken");
    assert_eq!(super::text(llm_datadist_last_error_argument()), "name");
    // SAFETY: a handle lives in `started`.
    succeeds(started(|out| unsafe { llm_datadist_cache_free(node.cache, out) }));
    fails(node.try_copy(1, 0).0, LLM_DATADIST_NOT_FOUND, &["no such cache"]);
    let (status, cache) = allocate(node.engine, &form());
    assert!(status == 0 && cache != node.cache, "{}", reason());
}

#[test]
fn registered_memory_is_copied_in_place() {
    let node = Node::new(&[]);
    node.fill(3);
    let mut memory = vec![0_u8; BLOCKS * 96 * TENSORS];
    let base = memory.as_mut_ptr();
    // SAFETY: inside the memory.
    let mut addresses: Vec<*mut c_void> =
        (0..TENSORS).map(|tensor| unsafe { base.add(tensor * BLOCKS * 96) }.cast()).collect();
    let (form, mut cache) = (LlmDatadistForm { stride: 96, tensors: 0, ..form() }, 0);
    // SAFETY: the memory lives until the cache is freed.
    let status = unsafe {
        llm_datadist_register(
            node.engine,
            c"own".as_ptr(),
            addresses.as_mut_ptr(),
            TENSORS,
            &raw const form,
            &raw mut cache,
        )
    };
    assert_eq!(status, 0, "{}", reason());
    let rows = LlmDatadistRows { cache, ..node.rows(&[2]) };
    succeeds(start(llm_datadist_copy, node.engine, &[pair(rows, node.rows(&[5]))], null()));
    // SAFETY: a handle lives in `started`.
    succeeds(started(|out| unsafe { llm_datadist_cache_free(cache, out) }));
    for tensor in 0..TENSORS {
        let block = &memory[tensor * BLOCKS * 96 + 2 * 96..];
        assert!((0..BLOCK).all(|at| block[at] == pattern(3, tensor, 5 * BLOCK + at)));
        assert!(block[BLOCK..96].iter().all(|&byte| byte == 0), "the gap stays as it is");
    }
}

#[test]
fn full_queue_refuses_transfers() {
    let node = Node::new(&[("max_transfers", "2")]);
    let transfers = [node.copy(1, 0), node.copy(2, 0)];
    fails(node.try_copy(3, 0).0, LLM_DATADIST_BUSY, &["limit=2"]);
    // Freeing a handle takes no outcome.
    assert_eq!(llm_datadist_transfer_free(transfers[0]), 0);
    fails(node.try_copy(3, 0).0, LLM_DATADIST_BUSY, &[]);
    assert_eq!(llm_datadist_transfer_wait(transfers[1], LONG), 0);
    node.copy(3, 0);
}
