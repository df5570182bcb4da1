//! Handles that were freed, were never given, or belong to another process; panics; reasons by thread.

use std::ffi::CStr;

use llm_datadist_core::{Error, ErrorKind, StatusCode};

use super::{ALL, Engine, SMALL, cache, desc, initialize, is, reason};
use crate::abi::{
    LlmDatadistBlocks, LlmDatadistCacheIndex, llm_datadist_allocate_cache, llm_datadist_copy_blocks,
    llm_datadist_copy_cache, llm_datadist_deallocate_cache, llm_datadist_finalize, llm_datadist_free,
    llm_datadist_last_error, llm_datadist_link_clusters, llm_datadist_listening, llm_datadist_new,
    llm_datadist_pull_blocks, llm_datadist_pull_cache, llm_datadist_push_blocks, llm_datadist_push_cache,
    llm_datadist_register_cache, llm_datadist_set_role, llm_datadist_unlink_clusters,
    llm_datadist_unregister_cache,
};
use crate::door;

/// The status of every call but `initialize` on `handle`, with arguments that are whole.
fn every_call(handle: u64) -> Vec<(&'static str, u32)> {
    let (mut id, mut addrs, mut rets, mut count) = (0, [0; 4], [0; 1], 0_usize);
    let whole = cache(1, &[], 4);
    let index = LlmDatadistCacheIndex { cluster_id: 2, cache_id: 1, batch_index: 0, reserved: [0; 4] };
    let block = 0_u64;
    let blocks = LlmDatadistBlocks { blocks: &raw const block, count: 1 };
    let none = std::ptr::null();
    let shape = desc(4);
    // SAFETY: every pointer is null where that is a list of none, or leads to a value above.
    unsafe {
        vec![
            ("set_role", llm_datadist_set_role(handle, 1, none, 0)),
            (
                "link",
                llm_datadist_link_clusters(handle, std::ptr::null(), 0, 1, &raw mut rets[0], &raw mut count),
            ),
            (
                "unlink",
                llm_datadist_unlink_clusters(
                    handle,
                    std::ptr::null(),
                    0,
                    1,
                    false,
                    &raw mut rets[0],
                    &raw mut count,
                ),
            ),
            (
                "allocate",
                llm_datadist_allocate_cache(handle, &raw const shape, &raw mut id, addrs.as_mut_ptr(), 4),
            ),
            ("deallocate", llm_datadist_deallocate_cache(handle, 99)),
            (
                "register",
                llm_datadist_register_cache(
                    handle,
                    &raw const shape,
                    addrs.as_ptr(),
                    4,
                    std::ptr::null(),
                    &raw mut id,
                ),
            ),
            ("unregister", llm_datadist_unregister_cache(handle, 99)),
            (
                "pull",
                llm_datadist_pull_cache(handle, &raw const index, &raw const whole, 0, -1, &raw const ALL),
            ),
            (
                "pull blocks",
                llm_datadist_pull_blocks(
                    handle,
                    &raw const index,
                    &raw const whole,
                    blocks,
                    blocks,
                    &raw const ALL,
                ),
            ),
            (
                "push",
                llm_datadist_push_cache(handle, &raw const whole, &raw const index, 0, -1, &raw const ALL),
            ),
            (
                "push blocks",
                llm_datadist_push_blocks(
                    handle,
                    &raw const whole,
                    &raw const index,
                    blocks,
                    blocks,
                    &raw const ALL,
                ),
            ),
            ("copy", llm_datadist_copy_cache(handle, &raw const whole, &raw const whole, 0, 1, 0, -1)),
            (
                "copy blocks",
                llm_datadist_copy_blocks(
                    handle,
                    &raw const whole,
                    &raw const whole,
                    blocks,
                    &raw const blocks,
                    1,
                ),
            ),
        ]
    }
}

#[test]
fn handles_that_lead_nowhere_are_refused_by_every_call() {
    let freed = llm_datadist_new(1, 1);
    assert_eq!(llm_datadist_free(freed), 0);
    for handle in [0, 1, freed, u64::MAX] {
        for (name, status) in every_call(handle) {
            assert_eq!(status, is(StatusCode::Failed), "{name}");
            assert!(
                reason().contains("handle") && reason().contains(&handle.to_string()),
                "{name}: {}",
                reason()
            );
        }
        assert_eq!(llm_datadist_free(handle), is(StatusCode::Failed), "freed twice");
        assert_eq!(llm_datadist_finalize(handle), is(StatusCode::Failed));
        assert_eq!(initialize(handle, &SMALL), is(StatusCode::Failed));
        assert_eq!(llm_datadist_listening(handle), 0);
    }
}

#[test]
fn every_call_fails_before_initialize_and_after_finalize() {
    let handle = llm_datadist_new(1, 1);
    let mut looked_at = 0;
    for round in 0..2 {
        for (name, status) in every_call(handle) {
            assert_eq!(status, is(StatusCode::Failed), "{name}");
            assert!(reason().contains("Initialize"), "{name}: {}", reason());
            looked_at += 1;
        }
        assert_eq!(llm_datadist_finalize(handle), 0, "safe when not initialised");
        assert_eq!(initialize(handle, &SMALL), 0, "round {round}: {}", reason());
        assert_eq!(initialize(handle, &[]), 0, "initialised already: nothing is looked at");
        let failed = every_call(handle).into_iter().filter(|&(_, status)| status == is(StatusCode::Failed));
        assert_eq!(failed.collect::<Vec<_>>(), []);
        assert_eq!(llm_datadist_finalize(handle), 0);
    }
    assert_eq!(looked_at, 26);
    assert_eq!(llm_datadist_free(handle), 0);
}

#[test]
fn handles_are_never_used_again() {
    let first = llm_datadist_new(1, 1);
    llm_datadist_free(first);
    let more: Vec<u64> = (0..100).map(|_| llm_datadist_new(1, 1)).collect();
    assert!(!more.contains(&first) && !more.contains(&0));
    let mut unique = more.clone();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), 100);
    assert!(more.into_iter().all(|handle| llm_datadist_free(handle) == 0));
}

#[test]
fn no_panic_leaves_the_library() {
    // Quiet while this thread panics on purpose.
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let statuses = [
        door::guarded(|| panic!("a reason {}", 7)),
        door::guarded(|| panic!("plain")),
        door::guarded(|| std::panic::panic_any(7_u8)),
    ];
    std::panic::set_hook(before);
    assert_eq!(statuses, [is(StatusCode::Failed); 3]);
    assert_eq!(reason(), "the engine panicked: no reason given");
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("once more");
        }
    }
    assert_eq!(door::guarded(|| std::panic::resume_unwind(Box::new(Bomb))), is(StatusCode::Failed));
}

#[test]
fn a_reason_is_kept_for_its_thread_until_the_next() {
    let failing = |text: &str| {
        let text = text.to_owned();
        door::guarded(|| Err(Error::new(ErrorKind::NotLinked, text)))
    };
    assert_eq!(failing("one\0two"), is(StatusCode::NotYetLink));
    let kept = llm_datadist_last_error();
    std::thread::spawn(move || {
        assert_eq!(reason(), "", "nothing failed in this thread");
        failing("elsewhere");
        assert_eq!(reason(), "elsewhere");
    })
    .join()
    .unwrap();
    assert_eq!(door::guarded(|| Ok(())), 0, "a success keeps the reason");
    // SAFETY: nothing has failed in this thread since.
    assert_eq!(unsafe { CStr::from_ptr(kept) }.to_str().unwrap(), "one\u{fffd}two");
}

#[test]
fn a_child_has_no_handles_of_its_parent_and_may_make_its_own() {
    let engine = Engine::new();
    // SAFETY: the child only uses the library, which is made for that, writes nothing and leaves without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = every_call(engine.0).into_iter().all(|(_, status)| status == is(StatusCode::Failed));
        let said = reason().contains("forked");
        let own = llm_datadist_new(1, 1);
        let works = initialize(own, &SMALL) == 0 && own != engine.0;
        let left = llm_datadist_free(engine.0) == is(StatusCode::Failed) && llm_datadist_free(own) == 0;
        // SAFETY: nothing of the parent's is to be unwound.
        unsafe { libc::_exit(i32::from(!(refused && said && works && left))) };
    }
    let mut status = -1;
    // SAFETY: the child is this test's, and the status has a place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
    let failed = every_call(engine.0).into_iter().filter(|&(_, status)| status == is(StatusCode::Failed));
    assert_eq!(failed.count(), 0, "the parent goes on");
}

/// The library never serves a process from what an ancestor left in an unknown state.
#[test]
fn after_too_many_forks_every_call_fails() {
    let engine = Engine::new();
    // SAFETY: the child only uses the library, which is made for that, writes nothing and leaves without unwinding.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // The handler ran once for the fork itself.
        (0..62).for_each(|_| door::forked());
        let last = llm_datadist_new(1, 1);
        let served = initialize(last, &SMALL) == 0;
        let mut refused = true;
        for _ in 0..70 {
            door::forked();
            refused &= llm_datadist_new(1, 1) == 0 && reason().contains("64 generations");
            for handle in [last, engine.0] {
                refused &= every_call(handle).into_iter().all(|(_, status)| status == is(StatusCode::Failed));
                refused &= llm_datadist_free(handle) == is(StatusCode::Failed);
            }
        }
        // SAFETY: nothing of the parent's is to be unwound.
        unsafe { libc::_exit(i32::from(!(served && refused))) };
    }
    let mut status = -1;
    // SAFETY: the child is this test's, and the status has a place.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0);
}
