//! The C interface as C calls it: the native API, `hixl`, invalid handles and pointers, panics, forks and reserved words; and its header.
//!
//! Part of the crate, because Rust cannot link a library for C. Not for: bytes that calls move, and peers that do not answer
//! (`tests/test_cpp.py`, `tests/test_c.py`, `tests/test_hixl_cpp.py`).

mod forks;
mod handles;
mod header;
mod hixl;
mod layout;
mod log;
mod native;
mod native_arguments;
mod native_closing;
mod native_events;
mod pointers;

use std::ffi::{CStr, CString, c_char};

use llm_datadist_core::bindings::StatusCode;

use crate::abi::*;
use crate::failure;

/// Why the last call of this thread failed.
fn reason() -> String {
    text(llm_datadist_last_error())
}

/// A text of the library.
fn text(text: *const c_char) -> String {
    // SAFETY: it ends in a null byte, and the test reads it before the call that ends it.
    unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned()
}

/// Checks that a call failed with this code, and that its reason contains `facts`.
#[track_caller]
fn failed(status: u32, code: StatusCode, facts: &[&str]) {
    assert_eq!(status, failure::status(code), "{}", reason());
    assert!(facts.iter().all(|fact| reason().contains(fact)), "{:?} lacks one of {facts:?}", reason());
}

#[track_caller]
fn refused(status: u32, facts: &[&str]) {
    failed(status, StatusCode::ParamInvalid, facts);
}

const SMALL: [(&str, &str); 2] =
    [("llm.DeviceId", "0"), ("llm.MemPoolConfig", r#"{"memory_size": 1048576, "page_shift": 12}"#)];

/// An initialized object, freed when it drops.
struct Engine(u64);

impl Engine {
    fn new() -> Engine {
        let engine = Engine(llm_datadist_new(1, 1));
        assert_eq!(initialize(engine.0, &SMALL), 0, "{}", reason());
        engine
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        llm_datadist_free(self.0);
    }
}

fn initialize(handle: u64, options: &[(&str, &str)]) -> u32 {
    with_options(options, |options| {
        // SAFETY: the options live until the call returns.
        unsafe { llm_datadist_initialize(handle, options.as_ptr(), options.len()) }
    })
}

/// Makes a call with options, whose texts live until it returns.
fn with_options(options: &[(&str, &str)], call: impl FnOnce(&[LlmDatadistOption]) -> u32) -> u32 {
    let text = |text: &str| CString::new(text).unwrap();
    let texts: Vec<_> = options.iter().map(|(key, value)| (text(key), text(value))).collect();
    let option =
        |(key, value): &(CString, CString)| LlmDatadistOption { key: key.as_ptr(), value: value.as_ptr() };
    call(&texts.iter().map(option).collect::<Vec<_>>())
}

const SHAPE: [i64; 2] = [4, 16];

fn desc(num_tensors: u32) -> LlmDatadistCacheDesc {
    let shape = SHAPE.as_ptr();
    LlmDatadistCacheDesc { placement: 1, num_tensors, data_type: 3, num_dims: 2, shape, reserved: [0; 4] }
}

/// Cache 1 of this engine, named by its id and a descriptor of four tensors.
fn cache() -> LlmDatadistCache {
    LlmDatadistCache { cache_id: 1, addrs: [].as_ptr(), num_addrs: 0, desc: desc(4), reserved: [0; 4] }
}

static INDEX: LlmDatadistCacheIndex =
    LlmDatadistCacheIndex { cluster_id: 2, cache_id: 1, batch_index: 0, reserved: [0; 4] };

const ALL: LlmDatadistExtParam = LlmDatadistExtParam {
    src_first: -1,
    src_last: -1,
    dst_first: -1,
    dst_last: -1,
    tensor_num_per_layer: 2,
    reserved: [0; 4],
};

const LOCAL: LlmDatadistIp = LlmDatadistIp { ip: c"127.0.0.1".as_ptr(), port: 1, reserved: [0; 4] };

/// A cluster with one local and one remote address, which must outlive it.
fn peer(remote_cluster_id: u64, address: &LlmDatadistIp) -> LlmDatadistCluster {
    LlmDatadistCluster {
        remote_cluster_id,
        local: address,
        num_local: 1,
        remote: address,
        num_remote: 1,
        reserved: [0; 4],
    }
}
