//! Transfers and events: their handles, the order and the descriptor of events, refused calls, and what outlives an engine.
//!
//! `tests/cpp/asynchronous.cpp` covers peers that do not answer, and cancelling.

use std::ptr::{from_ref, null, null_mut, without_provenance};

use llm_datadist_core::StatusCode;

use super::forks::{alone, in_a_child};
use super::{ALL, Engine, INDEX, SMALL, cache, desc, failed, initialize, reason, refused};
use crate::abi::{
    LLM_DATADIST_EVENT_COMPLETED, LlmDatadistBlocks, LlmDatadistEvent, llm_datadist_allocate_cache,
    llm_datadist_copy_blocks_async, llm_datadist_copy_cache_async, llm_datadist_drain,
    llm_datadist_event_descriptor, llm_datadist_finalize, llm_datadist_free, llm_datadist_new,
    llm_datadist_poll, llm_datadist_pull_blocks_async, llm_datadist_transfer_cancel,
    llm_datadist_transfer_cancelled, llm_datadist_transfer_done, llm_datadist_transfer_free,
    llm_datadist_transfer_nanos, llm_datadist_transfer_progress, llm_datadist_transfer_result,
    llm_datadist_transfer_wait,
};
use crate::failure;

pub(super) const LONG: i32 = 60_000;
/// Bytes of a row of the four tensors.
const ROW: u64 = 4 * 64;

/// Allocates cache 1 and returns its engine.
pub(super) fn with_cache(engine: Engine) -> Engine {
    let (mut id, mut addrs) = (0, [0; 4]);
    // SAFETY: everything lives here.
    let status = unsafe {
        llm_datadist_allocate_cache(engine.0, &desc(4), &raw mut id, addrs.as_mut_ptr(), addrs.len())
    };
    assert_eq!((status, id), (0, 1), "{}", reason());
    engine
}

/// Starts to copy row 0 to row `to` of cache 1. Returns the status, and the handle or 0.
fn try_copy(engine: &Engine, to: u32, timeout_ms: i32) -> (u32, u64) {
    let (own, mut transfer) = (cache(), 0);
    let (own, out) = (&raw const own, &raw mut transfer);
    // SAFETY: everything lives here.
    let status = unsafe { llm_datadist_copy_cache_async(engine.0, own, own, 0, to, 0, -1, timeout_ms, out) };
    (status, transfer)
}

fn copy(engine: &Engine, to: u32) -> u64 {
    let (status, transfer) = try_copy(engine, to, LONG);
    assert_eq!(status, 0, "{}", reason());
    transfer
}

/// The status and the events of a call of `llm_datadist_poll`.
pub(super) fn polled(engine: &Engine, most: usize) -> (u32, Vec<LlmDatadistEvent>) {
    let (mut events, mut count) = (vec![EMPTY; most], 77);
    // SAFETY: the list has space for as many events as are asked for.
    let status = unsafe { llm_datadist_poll(engine.0, most, events.as_mut_ptr(), &raw mut count) };
    assert!(count <= most, "{count}");
    events.truncate(count);
    (status, events)
}

fn progress(transfer: u64) -> (u32, u64, u64) {
    let (mut done, mut total) = (7, 7);
    // SAFETY: both live here.
    let status = unsafe { llm_datadist_transfer_progress(transfer, &raw mut done, &raw mut total) };
    (status, done, total)
}

fn readable(descriptor: i32) -> bool {
    let mut asked = libc::pollfd { fd: descriptor, events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which lives here.
    unsafe { libc::poll(&raw mut asked, 1, 0) == 1 }
}

pub(super) fn descriptor(engine: &Engine) -> i32 {
    let mut descriptor = -1;
    // SAFETY: it lives here.
    assert_eq!(unsafe { llm_datadist_event_descriptor(engine.0, &raw mut descriptor) }, 0, "{}", reason());
    descriptor
}

/// Whether every function refuses a handle, with these facts, as far as it can.
fn every_function_refuses(transfer: u64, facts: &[&str]) -> bool {
    let failures = [
        llm_datadist_transfer_wait(transfer, LONG),
        llm_datadist_transfer_result(transfer),
        progress(transfer).0,
        llm_datadist_transfer_free(transfer),
    ];
    failures == [failure::status(StatusCode::Failed); 4]
        && facts.iter().all(|fact| reason().contains(fact))
        && progress(transfer).1 == 7
        && llm_datadist_transfer_done(transfer)
        && !llm_datadist_transfer_cancel(transfer)
        && !llm_datadist_transfer_cancelled(transfer)
        && llm_datadist_transfer_nanos(transfer) == 0
}

#[test]
fn invalid_transfers_are_refused_by_every_call() {
    let engine = with_cache(Engine::new());
    let freed = copy(&engine, 1);
    assert_eq!(llm_datadist_transfer_wait(freed, LONG), 0);
    assert_eq!(llm_datadist_transfer_free(freed), 0);
    for transfer in [0, freed, engine.0 << 40, u64::MAX] {
        let number = transfer.to_string();
        assert!(every_function_refuses(transfer, &["no such transfer", &number]), "{}", reason());
    }
    // The functions that cannot fail keep the reason of the last failure.
    refused(try_copy(&engine, 9, 0).0, &["dst_batch_index=9"]);
    assert!(llm_datadist_transfer_done(freed) && !llm_datadist_transfer_cancel(freed));
    assert!(reason().contains("dst_batch_index=9"));
}

#[test]
fn child_has_no_transfers_of_its_parent_and_may_start_its_own() {
    alone("tests::asynchronous::child_has_no_transfers_of_its_parent_and_may_start_its_own", || {
        let engine = with_cache(Engine::new());
        let transfer = copy(&engine, 1);
        assert_eq!(llm_datadist_transfer_wait(transfer, LONG), 0);
        in_a_child(|| {
            let refused = every_function_refuses(transfer, &["forked"]);
            let own = with_cache(Engine::new());
            let copied = copy(&own, 1);
            let works = copied != transfer && llm_datadist_transfer_wait(copied, LONG) == 0;
            refused && works && llm_datadist_finalize(own.0) == 0
        });
        assert_eq!(llm_datadist_transfer_result(transfer), 0, "{}", reason());
    });
}

#[test]
fn refused_calls_start_nothing_and_write_nothing() {
    let engine = with_cache(Engine::new());
    let (own, mut transfer, mut count) = (cache(), 5, 77);
    let (own, out, block) = (&raw const own, &raw mut transfer, 0);
    let blocks = LlmDatadistBlocks { blocks: &raw const block, count: 1 };
    let none = LlmDatadistBlocks { blocks: null(), count: 0 };
    let mut events = vec![EMPTY];
    let (index, events) = (&raw const INDEX, events.as_mut_ptr());
    // SAFETY: null is refused; the other pointers lead to values that live here.
    unsafe {
        let copy = |timeout_ms, transfer| {
            llm_datadist_copy_cache_async(engine.0, own, own, 0, 1, 0, -1, timeout_ms, transfer)
        };
        refused(copy(0, null_mut()), &["transfer is null"]);
        refused(copy(-1, out), &["timeout_ms=-1 is out of range (0 to 2147483647)"]);
        let pull =
            |src, dst, ext| llm_datadist_pull_blocks_async(engine.0, src, own, blocks, dst, ext, 0, out);
        refused(pull(null(), blocks, from_ref(&ALL)), &["src_cache_index is null"]);
        refused(pull(index, blocks, null()), &["ext_param is null"]);
        refused(pull(index, none, from_ref(&ALL)), &["dst_blocks=[]"]);
        let lists = llm_datadist_copy_blocks_async(engine.0, own, own, blocks, null(), 0, 0, out);
        refused(lists, &["dst_blocks_list=[]"]);
        refused(llm_datadist_poll(engine.0, 1, null_mut(), &raw mut count), &["events is null"]);
        refused(llm_datadist_poll(engine.0, 1, events, null_mut()), &["num_events is null"]);
        refused(llm_datadist_event_descriptor(engine.0, null_mut()), &["descriptor is null"]);
        refused(llm_datadist_transfer_progress(1, null_mut(), out), &["done is null"]);
    }
    refused(llm_datadist_drain(engine.0, -1), &["timeout_ms=-1"]);
    assert_eq!((transfer, count), (5, 0));
    assert_eq!(llm_datadist_drain(engine.0, 0), 0, "nothing has started");
    assert!(matches!(polled(&engine, 9), (0, events) if events.is_empty()));
    let copied = copy(&engine, 1);
    refused(llm_datadist_transfer_wait(copied, -1), &["timeout_ms=-1"]);
    assert_eq!(llm_datadist_drain(engine.0, LONG), 0);
    // SAFETY: null is refused, before an event is taken.
    refused(unsafe { llm_datadist_poll(engine.0, 1, null_mut(), &raw mut count) }, &["events is null"]);
    assert_eq!(polled(&engine, 9).1.len(), 1);
}

/// Space for an event. The library writes every field.
const EMPTY: LlmDatadistEvent = LlmDatadistEvent {
    kind: 0,
    status: 0,
    transfer: 0,
    bytes: 0,
    nanos: 0,
    cluster_id: 7,
    payload: without_provenance(7),
    payload_size: 7,
    incarnation: 7,
    address: without_provenance(7),
    transport: without_provenance(7),
    reason: without_provenance(7),
    unacknowledged: 7,
    reserved: [7; 4],
};

/// Events come in order, each once, and the descriptor is readable exactly while there are any.
#[test]
fn events_and_their_descriptor() {
    let engine = with_cache(Engine::new());
    let early = descriptor(&engine);
    assert!(!readable(early));
    // Each ends before the next one begins.
    let ended = |_| {
        let transfer = copy(&engine, 2);
        assert_eq!(llm_datadist_drain(engine.0, LONG), 0);
        transfer
    };
    let transfers: Vec<u64> = (0..4).map(ended).collect();
    assert!(readable(early) && descriptor(&engine) == early);
    assert!(transfers.iter().all(|&transfer| llm_datadist_transfer_done(transfer)), "takes no outcome");
    assert!(matches!(polled(&engine, 0), (0, events) if events.is_empty()));
    // An outcome that was taken is no event any more.
    assert_eq!(llm_datadist_transfer_result(transfers[1]), 0);
    assert_eq!(llm_datadist_transfer_free(transfers[2]), 0);
    let (status, events) = polled(&engine, 2);
    let numbers: Vec<u64> = events.iter().map(|event| event.transfer).collect();
    assert_eq!((status, numbers), (0, vec![transfers[0], transfers[2]]), "{}", reason());
    for event in &events {
        assert_eq!((event.kind, event.status, event.bytes), (LLM_DATADIST_EVENT_COMPLETED, 0, ROW));
        assert_eq!((event.cluster_id, event.incarnation, event.unacknowledged), (0, 0, 0));
        assert!(event.payload.is_null() && event.payload_size == 0 && event.reason.is_null());
        assert!(event.address.is_null() && event.transport.is_null() && event.reserved == [0; 4]);
    }
    assert_eq!(events[0].nanos, llm_datadist_transfer_nanos(transfers[0]));
    assert!(readable(early));
    assert_eq!(polled(&engine, 9).1.len(), 1);
    assert!(!readable(early) && polled(&engine, 9).1.is_empty());
    assert_eq!(progress(transfers[0]), (0, ROW, ROW));
    assert_eq!(llm_datadist_transfer_result(transfers[0]), 0, "the transfer keeps its outcome");
}

/// A failure has the same status in the event and in the result, which also sets the reason.
#[test]
fn failures_are_outcomes_with_a_reason() {
    let engine = with_cache(Engine::new());
    let (own, mut transfer, block) = (cache(), 0, 0);
    let blocks = LlmDatadistBlocks { blocks: &raw const block, count: 1 };
    let (own, index, all, out) = (&raw const own, &raw const INDEX, from_ref(&ALL), &raw mut transfer);
    // SAFETY: everything lives here.
    let started =
        unsafe { llm_datadist_pull_blocks_async(engine.0, index, own, blocks, blocks, all, 0, out) };
    assert_eq!(started, 0, "{}", reason());
    assert_eq!(llm_datadist_drain(engine.0, LONG), 0);
    let (_, events) = polled(&engine, 9);
    assert_eq!((events.len(), events[0].transfer, events[0].bytes), (1, transfer, 0));
    failed(events[0].status, StatusCode::NotYetLink, &[]);
    for _ in 0..2 {
        refused(try_copy(&engine, 9, 0).0, &[]);
        failed(llm_datadist_transfer_result(transfer), StatusCode::NotYetLink, &["cluster 2"]);
    }
    failed(llm_datadist_transfer_wait(transfer, 0), StatusCode::NotYetLink, &["cluster 2"]);
    assert!(!llm_datadist_transfer_cancel(transfer) && !llm_datadist_transfer_cancelled(transfer));
}

#[test]
fn full_queue_refuses_transfers() {
    let engine = Engine(llm_datadist_new(1, 1));
    assert_eq!(initialize(engine.0, &[SMALL[0], SMALL[1], ("llm.MaxTransfers", "2")]), 0, "{}", reason());
    let engine = with_cache(engine);
    let transfers = [copy(&engine, 1), copy(&engine, 2)];
    let (status, transfer) = try_copy(&engine, 3, 0);
    failed(status, StatusCode::LinkBusy, &["limit=2"]);
    assert_eq!(transfer, 0);
    // Freeing a handle takes no outcome.
    assert_eq!(llm_datadist_transfer_free(transfers[0]), 0);
    assert_eq!(llm_datadist_drain(engine.0, LONG), 0);
    assert_eq!(try_copy(&engine, 3, 0).0, failure::status(StatusCode::LinkBusy));
    assert_eq!(llm_datadist_transfer_result(transfers[1]), 0);
    copy(&engine, 3);
    assert_eq!(llm_datadist_drain(engine.0, LONG), 0);
    assert_eq!(polled(&engine, 9).1.len(), 2);
}

/// The end of an engine ends its transfers. Their handles answer until they are freed.
#[test]
fn transfers_outlive_their_engine() {
    for free in [false, true] {
        let engine = with_cache(Engine::new());
        let ended = copy(&engine, 1);
        assert_eq!(llm_datadist_transfer_wait(ended, LONG), 0);
        let running: Vec<u64> = (0..200).map(|_| copy(&engine, 2)).collect();
        let status = if free { llm_datadist_free(engine.0) } else { llm_datadist_finalize(engine.0) };
        assert_eq!(status, 0);
        failed(polled_status(&engine), StatusCode::Failed, &[]);
        failed(try_copy(&engine, 1, 0).0, StatusCode::Failed, &[]);
        for transfer in running {
            assert!(llm_datadist_transfer_done(transfer), "nothing runs after the end");
            let status = llm_datadist_transfer_result(transfer);
            if status != 0 {
                failed(status, StatusCode::Failed, &["finalized"]);
            }
            assert!(!llm_datadist_transfer_cancel(transfer));
            assert_eq!(llm_datadist_transfer_free(transfer), 0);
        }
        assert_eq!(llm_datadist_transfer_result(ended), 0);
        assert_eq!(progress(ended), (0, ROW, ROW));
        assert_eq!(llm_datadist_transfer_free(ended), 0);
        if !free {
            assert_eq!(initialize(engine.0, &SMALL), 0, "{}", reason());
            assert!(matches!(polled(&engine, 9), (0, events) if events.is_empty()), "a queue of its own");
        }
    }
}

fn polled_status(engine: &Engine) -> u32 {
    let (mut event, mut count) = (EMPTY, 0);
    // SAFETY: both live here.
    unsafe { llm_datadist_poll(engine.0, 1, &raw mut event, &raw mut count) }
}
