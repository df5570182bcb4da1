//! What other threads do while an engine closes or starts transfers, and while a handle is freed; and what outlives an engine.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::native::{BLOCK, LONG, Node, TENSORS, fails, progress};
use super::native_events::{Linked, descriptor, events, readable};
use super::reason;
use crate::abi::{process, *};
use crate::native::HeldEngine;

/// Whether the engine refuses calls, because it closes or is closed.
fn refuses(engine: u64) -> bool {
    let mut descriptor = 0;
    // SAFETY: it lives here.
    unsafe { llm_datadist_event_descriptor(engine, &raw mut descriptor) == LLM_DATADIST_CLOSED }
}

/// The end of an engine ends its transfers. Their handles answer until they are freed.
#[test]
fn transfers_outlive_their_engine() {
    let linked = Linked::new();
    let ended = linked.one.copy(1, 0);
    assert_eq!(llm_datadist_transfer_wait(ended, LONG), 0);
    // It cannot end before, because its layers are not reported.
    let running = linked.layerwise_push();
    assert_eq!(llm_datadist_transfer_result(running), LLM_DATADIST_RUNNING);
    assert_eq!(llm_datadist_engine_close(linked.one.engine, 0.0), 0, "{}", reason());
    assert!(llm_datadist_transfer_done(running), "nothing runs after the end");
    fails(llm_datadist_transfer_result(running), LLM_DATADIST_CLOSED, &["the engine was closed"]);
    assert_eq!(llm_datadist_transfer_result(ended), 0);
    assert_eq!(progress(ended).1, (TENSORS * BLOCK) as u64);
    for transfer in [running, ended] {
        assert_eq!(llm_datadist_transfer_free(transfer), 0);
    }
}

/// With time, an engine waits for its transfers.
#[test]
fn closing_with_a_limit_waits_for_transfers() {
    let linked = Linked::new();
    let (engine, push) = (linked.one.engine, linked.layerwise_push());
    thread::scope(|scope| {
        scope.spawn(move || {
            while !refuses(engine) {
                thread::yield_now();
            }
            // The engine closes now, and nobody else reports the layers.
            for layer in [0, 1] {
                assert_eq!(llm_datadist_transfer_ready(push, layer), 0, "{}", reason());
            }
        });
        assert_eq!(llm_datadist_engine_close(engine, LONG), 0, "{}", reason());
        assert_eq!(llm_datadist_transfer_result(push), 0, "{}", reason());
    });
}

/// The engine serves peers until it is dropped, which must not happen in another thread after the close.
#[test]
fn close_waits_for_calls_that_have_begun() {
    let options = [("pool", "1MiB"), ("page", "4KiB")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    let held = HeldEngine::open(BTreeMap::from(options)).unwrap();
    let (closed, left) = (AtomicBool::new(false), AtomicBool::new(false));
    let (begun, begins) = mpsc::channel();
    thread::scope(|scope| {
        scope.spawn(|| {
            let called = held.engine.run(|_| {
                begun.send(()).unwrap();
                // Time for a close that does not wait.
                thread::sleep(Duration::from_millis(100));
                let still_open = !closed.load(Ordering::SeqCst);
                left.store(true, Ordering::SeqCst);
                Ok(still_open)
            });
            assert!(called.unwrap(), "the close has returned during the call");
        });
        begins.recv().unwrap();
        held.engine.close(Duration::ZERO);
        closed.store(true, Ordering::SeqCst);
        assert!(left.load(Ordering::SeqCst));
    });
    assert!(held.engine.address().is_err() && held.engine.run_until_closed(|_| Ok(())).is_err());
}

/// Short copies end, with their event, inside the call that starts them.
#[test]
fn handle_exists_before_the_event_is_returned() {
    const COPIES: usize = 3000;
    let node = Node::new(&[]);
    thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..COPIES {
                node.copy(1, 0);
            }
        });
        let mut ended = 0;
        while ended < COPIES {
            for event in events(&node, 9) {
                assert_eq!(llm_datadist_transfer_result(event.transfer), 0, "{}", reason());
                assert_eq!(llm_datadist_transfer_free(event.transfer), 0, "{}", reason());
                ended += 1;
            }
        }
    });
}

/// The start of a transfer has posted its event, and its handle comes later.
#[test]
fn events_wait_for_the_handles_of_transfers_that_have_started() {
    let node = Node::new(&[]);
    let held = process::current().engines.get(node.engine).unwrap();
    node.copy(1, 0);
    let (made, (begun, begins)) = (AtomicBool::new(false), mpsc::channel());
    thread::scope(|scope| {
        scope.spawn(|| {
            let _starting = held.starting();
            begun.send(()).unwrap();
            // Time for a call that does not wait.
            thread::sleep(Duration::from_millis(100));
            made.store(true, Ordering::SeqCst);
        });
        begins.recv().unwrap();
        events(&node, 9);
        assert!(made.load(Ordering::SeqCst), "the event came before the handle");
    });
}

/// An event that a call has taken from the engine is returned by it, also if the engine is closed meanwhile.
#[test]
fn polled_events_are_returned_by_a_call_during_which_the_engine_closes() {
    let node = Node::new(&[]);
    let held = process::current().engines.get(node.engine).unwrap();
    let copy = node.copy(1, 0);
    let descriptor = descriptor(&node);
    assert!(readable(descriptor, 60_000));
    thread::scope(|scope| {
        let starting = held.starting();
        let polls = scope.spawn(|| events(&node, 9).iter().map(|event| event.transfer).collect::<Vec<_>>());
        while readable(descriptor, 0) {
            thread::yield_now();
        }
        held.engine.close(Duration::ZERO);
        drop(starting);
        assert_eq!(polls.join().unwrap(), [copy]);
    });
}

/// A thread that waits for a layer-wise push does not keep it.
#[test]
fn freeing_the_handle_cancels_a_layerwise_push_for_which_another_thread_waits() {
    let linked = Linked::new();
    let push = linked.layerwise_push();
    let status = thread::scope(|scope| {
        let waits = scope.spawn(move || llm_datadist_transfer_wait(push, 10.0));
        // Time to wait. A thread that is later finds no transfer.
        thread::sleep(Duration::from_millis(100));
        assert_eq!(llm_datadist_transfer_free(push), 0);
        waits.join().unwrap()
    });
    assert!([LLM_DATADIST_CANCELLED, LLM_DATADIST_CLOSED].contains(&status), "{status}");
}
