//! The functions of `hixl`: invalid pointers, lengths, numbers and handles, forks, and the numbers in its C++ header.
//!
//! Not for: what calls do with valid arguments (`tests/test_hixl_cpp.py`).

use std::path::Path;
use std::ptr::{null, null_mut, without_provenance, without_provenance_mut};

use llm_datadist_hixl::{OPTIONS, Status};

use super::forks::{alone, in_a_child};
use super::reason;
use crate::abi::*;

/// Checks that a call was refused, and that the reason contains `fact`.
#[track_caller]
fn refused(status: u32, fact: &str) {
    assert_eq!(status, Status::ParamInvalid.code(), "{}", reason());
    assert!(reason().contains(fact), "{:?} lacks {fact:?}", reason());
}

fn text(text: &str) -> LlmDatadistText {
    LlmDatadistText { bytes: text.as_ptr().cast(), size: text.len() }
}

const EMPTY: LlmDatadistText = LlmDatadistText { bytes: null(), size: 0 };

/// An initialized engine without a listener, freed when it drops.
struct Client(u64);

impl Client {
    fn new() -> Client {
        let client = Client(llm_datadist_hixl_new());
        // SAFETY: the text lives until the call returns.
        assert_eq!(unsafe { llm_datadist_hixl_initialize(client.0, text("127.0.0.1:0"), null(), 0) }, 0);
        client
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        assert_eq!(llm_datadist_hixl_free(self.0), 0);
    }
}

/// The statuses of every call with a handle, with arguments that no check of a pointer refuses.
fn every_call(handle: u64) -> [u32; 17] {
    let (mut number, mut word) = (0_u64, 0_u32);
    let (mut connections, mut results, mut notices, mut count) = (null(), null(), null(), 0);
    let count = &raw mut count;
    let notice = LlmDatadistHixlNotice { name: EMPTY, message: EMPTY };
    // SAFETY: every pointer is null where that is an empty list, or leads to a value above.
    unsafe {
        [
            llm_datadist_hixl_initialize(handle, EMPTY, null(), 0),
            llm_datadist_hixl_register_mem(handle, 0, 0, false, 0, &raw mut number),
            llm_datadist_hixl_deregister_mem(handle, 0),
            llm_datadist_hixl_connect(handle, EMPTY, 1),
            llm_datadist_hixl_disconnect(handle, EMPTY, 1),
            llm_datadist_hixl_connect_async(handle, EMPTY, 1),
            llm_datadist_hixl_disconnect_async(handle, EMPTY, 1),
            llm_datadist_hixl_connect_state(handle, EMPTY, &raw mut word),
            llm_datadist_hixl_connect_states(handle, &raw mut connections, count),
            llm_datadist_hixl_transfer_sync(handle, EMPTY, 0, null(), 0, 1),
            llm_datadist_hixl_transfer_async(handle, EMPTY, 0, null(), 0, 0, &raw mut number),
            llm_datadist_hixl_transfer_state(handle, 1, &raw mut word),
            llm_datadist_hixl_transfer_states(handle, 1, false, &raw mut results, count),
            llm_datadist_hixl_send_notify(handle, EMPTY, notice, 1),
            llm_datadist_hixl_notifies(handle, &raw mut notices, count),
            llm_datadist_hixl_finalize(handle),
            llm_datadist_hixl_free(handle),
        ]
    }
}

#[test]
fn invalid_handles_are_refused_by_every_call() {
    let freed = llm_datadist_hixl_new();
    assert_eq!(llm_datadist_hixl_free(freed), 0);
    let of_another_kind = llm_datadist_new(1, 1);
    for handle in [0, freed, of_another_kind, u64::MAX - 1, u64::MAX] {
        assert_eq!(every_call(handle), [Status::Failed.code(); 17]);
        assert!(reason().contains(&handle.to_string()), "{}", reason());
    }
    assert_eq!(llm_datadist_free(of_another_kind), 0);
}

#[test]
fn reason_of_a_status_is_its_name() {
    let client = Client::new();
    // SAFETY: an empty text.
    assert_eq!(unsafe { llm_datadist_hixl_disconnect(client.0, EMPTY, 1) }, Status::NotConnected.code());
    assert!(reason().contains("103902 (NOT_CONNECTED)"), "{}", reason());
}

#[test]
fn invalid_texts_and_lists_are_refused() {
    let client = Client::new();
    let text_at = |bytes, size| LlmDatadistText { bytes, size };
    // SAFETY: invalid pointers are refused before they are followed; the others lead to values that live here.
    unsafe {
        for (bad, fact) in [
            (text_at(null(), 1), "null"),
            (text_at(without_provenance(8), usize::MAX), "too long to be a list"),
        ] {
            let of_remote = format!("remote_engine is {fact}");
            refused(llm_datadist_hixl_connect(client.0, bad, 1), &of_remote);
            refused(llm_datadist_hixl_disconnect(client.0, bad, 1), &of_remote);
            refused(llm_datadist_hixl_connect_async(client.0, bad, 1), &of_remote);
            refused(llm_datadist_hixl_disconnect_async(client.0, bad, 1), &of_remote);
            let mut state = 7;
            refused(llm_datadist_hixl_connect_state(client.0, bad, &raw mut state), &of_remote);
            assert_eq!(state, 7);
            refused(llm_datadist_hixl_transfer_sync(client.0, bad, 0, null(), 0, 1), &of_remote);
            let notify = |name, message| {
                llm_datadist_hixl_send_notify(client.0, EMPTY, LlmDatadistHixlNotice { name, message }, 1)
            };
            refused(notify(bad, EMPTY), &format!("name is {fact}"));
            refused(notify(EMPTY, bad), &format!("message is {fact}"));
            let second = llm_datadist_hixl_new();
            let open =
                |options, count| llm_datadist_hixl_initialize(second, text("127.0.0.1"), options, count);
            refused(llm_datadist_hixl_initialize(second, bad, null(), 0), &format!("local_engine is {fact}"));
            let option = LlmDatadistHixlOption { key: bad, value: EMPTY };
            refused(open(&raw const option, 1), &format!("the key of an option is {fact}"));
            let option = LlmDatadistHixlOption { key: text("AutoConnect"), value: bad };
            refused(open(&raw const option, 1), &format!("the value of an option is {fact}"));
            refused(open(null(), 1), "options is null");
            refused(open(without_provenance(1), 1), "options is not aligned");
            refused(open(without_provenance(8), usize::MAX), "options is too long");
            assert_eq!(open(null(), 0), 0, "{}", reason());
            assert_eq!(llm_datadist_hixl_free(second), 0);
        }
        let mut request = 7;
        for (ops, count, fact) in [
            (null(), 1, "ops is null"),
            (without_provenance(1), 1, "ops is not aligned"),
            (without_provenance(8), usize::MAX, "ops is too long"),
        ] {
            refused(llm_datadist_hixl_transfer_sync(client.0, EMPTY, 0, ops, count, 1), fact);
            let start = llm_datadist_hixl_transfer_async(client.0, EMPTY, 0, ops, count, 0, &raw mut request);
            refused(start, fact);
        }
        assert_eq!(request, 7);
    }
}

#[test]
fn invalid_pointers_to_results_are_refused_and_lose_nothing() {
    let client = Client::new();
    let memory = [0_u64; 8];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let (mut count, mut results, mut notices, mut connections) = (7, null(), null(), null());
    // SAFETY: invalid pointers are refused before they are followed; the others lead to values that live here.
    unsafe {
        for (bad, fact) in [(null_mut(), "null"), (without_provenance_mut::<u64>(1), "not aligned")] {
            let register = llm_datadist_hixl_register_mem(client.0, addr, 64, false, 1, bad);
            refused(register, &format!("mem_handle is {fact}"));
            let start = llm_datadist_hixl_transfer_async(client.0, EMPTY, 0, null(), 0, 0, bad);
            refused(start, &format!("request is {fact}"));
            let of_state = format!("state is {fact}");
            refused(llm_datadist_hixl_transfer_state(client.0, 1, bad.cast()), &of_state);
            refused(llm_datadist_hixl_connect_state(client.0, EMPTY, bad.cast()), &of_state);
            refused(llm_datadist_hixl_capability(0, bad.cast()), &format!("value is {fact}"));
            let states = llm_datadist_hixl_connect_states;
            refused(states(client.0, bad.cast(), &raw mut count), &format!("connections is {fact}"));
            refused(
                states(client.0, &raw mut connections, bad.cast()),
                &format!("num_connections is {fact}"),
            );
            let all = |results, count| llm_datadist_hixl_transfer_states(client.0, 9, false, results, count);
            refused(all(bad.cast(), &raw mut count), &format!("results is {fact}"));
            refused(all(&raw mut results, bad.cast()), &format!("num_results is {fact}"));
            let notifies = llm_datadist_hixl_notifies;
            refused(notifies(client.0, bad.cast(), &raw mut count), &format!("notices is {fact}"));
            refused(notifies(client.0, &raw mut notices, bad.cast()), &format!("num_notices is {fact}"));
        }
        assert!(count == 7 && results.is_null() && notices.is_null() && connections.is_null());
        // The refused call has registered nothing.
        let mut handle = 0;
        let inside = llm_datadist_hixl_register_mem(client.0, addr + 8, 8, false, 1, &raw mut handle);
        assert_eq!((inside, handle != 0), (0, true), "{}", reason());
    }
}

#[test]
fn invalid_numbers_are_refused() {
    let client = Client::new();
    let memory = [0_u64; 8];
    let addr = memory.as_ptr().expose_provenance() as u64;
    let op = LlmDatadistHixlOp { local_addr: addr, remote_addr: addr, len: 8 };
    let (mut handle, mut value) = (7, 7);
    for number in [-1, 2, i32::MAX, i32::MIN] {
        // SAFETY: everything lives here.
        unsafe {
            let register = llm_datadist_hixl_register_mem(client.0, addr, 64, false, number, &raw mut handle);
            assert_eq!((register, handle), (Status::ParamInvalid.code(), 7));
            let remote = text("127.0.0.1:1");
            let moved = llm_datadist_hixl_transfer_sync(client.0, remote, number, &raw const op, 1, 1000);
            assert_eq!(moved, Status::ParamInvalid.code());
            let asked = llm_datadist_hixl_capability(number, &raw mut value);
            let expected = if number < 0 { (Status::ParamInvalid.code(), 7) } else { (0, 0) };
            assert_eq!((asked, value), expected);
            value = 7;
        }
    }
}

#[test]
fn forked_child_has_no_engine_of_its_parent_and_may_open_its_own() {
    alone("tests::hixl::forked_child_has_no_engine_of_its_parent_and_may_open_its_own", || {
        let client = Client::new();
        in_a_child(|| {
            let inherited = every_call(client.0) == [Status::Failed.code(); 17];
            inherited && reason().contains("forked") && {
                drop(Client::new());
                true
            }
        });
    });
}

#[test]
fn header_has_the_numbers_and_keys_of_the_crate() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/hixl/hixl_types.h");
    let header = std::fs::read_to_string(path).unwrap();
    for (name, status) in Status::ALL {
        let line = format!("constexpr Status {name} = {}U;\n", status.code());
        assert!(header.contains(&line), "no {line}");
    }
    assert_eq!(header.matches("constexpr Status ").count(), Status::ALL.len());
    for (name, key) in OPTIONS {
        let line = format!("constexpr const char {name}[] = \"{key}\";\n");
        assert!(header.contains(&line), "no {line}");
    }
    assert_eq!(header.matches("constexpr const char ").count(), OPTIONS.len());
}
