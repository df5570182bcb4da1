//! Invalid handles of the C++ class: freed, never returned, or of another process. Also panics in a call, and failure reasons by
//! thread.

use std::collections::HashSet;
use std::ffi::CStr;
use std::ptr::{from_ref, null};

use llm_datadist_core::bindings::StatusCode;
use llm_datadist_core::{Error, ErrorKind};

use super::forks::{alone, in_a_child};
use super::{ALL, Engine, INDEX, SMALL, cache, desc, failed, initialize, reason};
use crate::abi::*;
use crate::failure;

/// The status of every call but `initialize` on `handle`, with valid arguments.
fn every_call(handle: u64) -> [u32; 13] {
    let (mut id, mut addrs, mut ret, mut count) = (0, [0; 4], 0, 0);
    let (id, addrs, ret, count) = (&raw mut id, addrs.as_mut_ptr(), &raw mut ret, &raw mut count);
    let (shape, own) = (desc(4), cache());
    let (shape, own, index, all) = (&raw const shape, &raw const own, &raw const INDEX, from_ref(&ALL));
    let block = 0;
    let blocks = LlmDatadistBlocks { blocks: &raw const block, count: 1 };
    // SAFETY: every pointer is null where that is an empty list, or leads to a value above.
    unsafe {
        [
            llm_datadist_set_role(handle, 1, null(), 0),
            llm_datadist_link_clusters(handle, null(), 0, 1, ret, count),
            llm_datadist_unlink_clusters(handle, null(), 0, 1, false, ret, count),
            llm_datadist_allocate_cache(handle, shape, id, addrs, 4),
            llm_datadist_deallocate_cache(handle, 99),
            llm_datadist_register_cache(handle, shape, addrs, 4, null(), id),
            llm_datadist_unregister_cache(handle, 99),
            llm_datadist_pull_cache(handle, index, own, 0, -1, all),
            llm_datadist_pull_blocks(handle, index, own, blocks, blocks, all),
            llm_datadist_push_cache(handle, own, index, 0, -1, all),
            llm_datadist_push_blocks(handle, own, index, blocks, blocks, all),
            llm_datadist_copy_cache(handle, own, own, 0, 1, 0, -1),
            llm_datadist_copy_blocks(handle, own, own, blocks, &raw const blocks, 1),
        ]
    }
}

fn every_call_fails(handle: u64) -> bool {
    every_call(handle) == [failure::status(StatusCode::Failed); 13]
}

fn no_call_fails(handle: u64) -> bool {
    !every_call(handle).contains(&failure::status(StatusCode::Failed))
}

#[test]
fn invalid_handles_are_refused_by_every_call() {
    let freed = llm_datadist_new(1, 1);
    assert_eq!(llm_datadist_free(freed), 0);
    for handle in [0, freed, u64::MAX - 1, u64::MAX] {
        let facts = ["handle", &handle.to_string()];
        for status in every_call(handle) {
            failed(status, StatusCode::Failed, &facts);
        }
        failed(llm_datadist_free(handle), StatusCode::Failed, &facts);
        failed(llm_datadist_finalize(handle), StatusCode::Failed, &facts);
        failed(initialize(handle, &SMALL), StatusCode::Failed, &facts);
        assert_eq!(llm_datadist_listening(handle), 0);
    }
}

#[test]
fn every_call_fails_before_initialize_and_after_finalize() {
    let handle = llm_datadist_new(1, 1);
    for _ in 0..2 {
        for status in every_call(handle) {
            failed(status, StatusCode::Failed, &["Initialize"]);
        }
        assert_eq!(llm_datadist_finalize(handle), 0, "allowed before initialize");
        assert_eq!(initialize(handle, &SMALL), 0, "{}", reason());
        assert_eq!(initialize(handle, &[]), 0, "the options of a second call are ignored");
        assert!(no_call_fails(handle));
        assert_eq!(llm_datadist_finalize(handle), 0);
    }
    assert_eq!(llm_datadist_free(handle), 0);
}

#[test]
fn handles_are_never_reused() {
    let first = llm_datadist_new(1, 1);
    llm_datadist_free(first);
    let later: HashSet<u64> = (0..100).map(|_| llm_datadist_new(1, 1)).collect();
    assert!(later.len() == 100 && !later.contains(&first) && !later.contains(&0));
    assert!(later.into_iter().all(|handle| llm_datadist_free(handle) == 0));
}

#[test]
fn no_panic_leaves_the_library() {
    struct PanicsOnDrop;
    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            panic!("while the first panic is dropped");
        }
    }
    // The hook keeps the panics of this test out of the output.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let statuses = [
        failure::guarded(|| panic!("a reason {}", 7)),
        failure::guarded(|| panic!("plain")),
        failure::guarded(|| std::panic::resume_unwind(Box::new(PanicsOnDrop))),
        failure::guarded(|| std::panic::panic_any(7_u8)),
    ];
    std::panic::set_hook(before);
    assert_eq!(statuses, [failure::status(StatusCode::Failed); 4]);
    assert_eq!(reason(), "the engine panicked: no reason given");
}

#[test]
fn reason_belongs_to_its_thread_and_outlives_successes() {
    let fail = |text: &'static str| failure::guarded(|| Err(Error::new(ErrorKind::NotLinked, text)));
    failed(fail("one\0two"), StatusCode::NotYetLink, &["one\u{fffd}two"]);
    let kept = llm_datadist_last_error();
    std::thread::spawn(move || {
        assert_eq!(reason(), "", "nothing failed in this thread");
        failed(fail("elsewhere"), StatusCode::NotYetLink, &["elsewhere"]);
    })
    .join()
    .unwrap();
    assert_eq!(failure::guarded(|| Ok(())), 0);
    // SAFETY: nothing has failed in this thread since.
    assert_eq!(unsafe { CStr::from_ptr(kept) }.to_str().unwrap(), "one\u{fffd}two");
}

#[test]
fn child_has_no_handles_of_its_parent_and_may_create_its_own() {
    alone("tests::handles::child_has_no_handles_of_its_parent_and_may_create_its_own", || {
        let engine = Engine::new();
        in_a_child(|| {
            let refused = every_call_fails(engine.0) && reason().contains("forked");
            let own = llm_datadist_new(1, 1);
            let works = initialize(own, &SMALL) == 0 && own != engine.0;
            let freed = llm_datadist_free(engine.0) == failure::status(StatusCode::Failed);
            refused && works && freed && llm_datadist_free(own) == 0
        });
        assert!(no_call_fails(engine.0), "{}", reason());
    });
}

/// Every process of a chain of forks has handles of its own.
#[test]
fn forks_within_forks_do_not_run_out() {
    alone("tests::handles::forks_within_forks_do_not_run_out", || {
        let engine = Engine::new();
        in_a_child(|| {
            (0..70).all(|_| {
                let own = llm_datadist_new(1, 1);
                let works = initialize(own, &SMALL) == 0 && no_call_fails(own);
                process::forked();
                works && every_call_fails(own) && every_call_fails(engine.0) && reason().contains("forked")
            })
        });
        assert!(no_call_fails(engine.0), "{}", reason());
    });
}
