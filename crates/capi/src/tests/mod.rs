//! The C interface as C calls it: wrong handles, null pointers, panics, texts; and the header that describes it.
//!
//! Part of the crate, because a library for C has nothing that Rust could link with. Not for: what the calls do with
//! bytes (`tests/test_cpp.py`).

mod handles;
mod header;
mod layout;
mod log;
mod pointers;

use std::ffi::{CStr, CString, c_char};

use llm_datadist_core::StatusCode;

use crate::abi::{LlmDatadistCache, LlmDatadistCacheDesc, LlmDatadistExtParam, LlmDatadistOption};
use crate::abi::{llm_datadist_free, llm_datadist_initialize, llm_datadist_last_error, llm_datadist_new};
use crate::door;

/// A status by its code.
fn is(code: StatusCode) -> u32 {
    door::status(code)
}

/// Why the last call of this thread failed.
fn reason() -> String {
    // SAFETY: the text ends in a null byte and stays until the next failure of this thread.
    unsafe { CStr::from_ptr(llm_datadist_last_error()) }.to_str().unwrap().to_owned()
}

/// Options, and the texts they point into.
struct Options {
    _texts: Vec<CString>,
    list: Vec<LlmDatadistOption>,
}

impl Options {
    fn new(pairs: &[(&str, &str)]) -> Options {
        let text = |text: &str| CString::new(text).unwrap();
        let texts: Vec<CString> = pairs.iter().flat_map(|(key, value)| [text(key), text(value)]).collect();
        let pair = |pair: &[CString]| LlmDatadistOption { key: pair[0].as_ptr(), value: pair[1].as_ptr() };
        Options { list: texts.chunks(2).map(pair).collect(), _texts: texts }
    }

    fn as_ptr(&self) -> *const LlmDatadistOption {
        self.list.as_ptr()
    }
}

const SMALL: [(&str, &str); 2] =
    [("llm.DeviceId", "0"), ("llm.MemPoolConfig", r#"{"memory_size": 1048576, "page_shift": 12}"#)];

/// An initialised object, freed when it drops.
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
    let options = Options::new(options);
    // SAFETY: the options and their texts live until the call returns.
    unsafe { llm_datadist_initialize(handle, options.as_ptr(), options.list.len()) }
}

const SHAPE: [i64; 2] = [4, 16];

fn desc(num_tensors: u32) -> LlmDatadistCacheDesc {
    LlmDatadistCacheDesc {
        placement: 1,
        num_tensors,
        data_type: 3,
        num_dims: 2,
        shape: SHAPE.as_ptr(),
        reserved: [0; 4],
    }
}

fn cache(id: i64, addrs: &[u64], num_tensors: u32) -> LlmDatadistCache {
    LlmDatadistCache {
        cache_id: id,
        addrs: addrs.as_ptr(),
        num_addrs: addrs.len(),
        desc: desc(num_tensors),
        reserved: [0; 4],
    }
}

static ALL: LlmDatadistExtParam = LlmDatadistExtParam {
    src_first: -1,
    src_last: -1,
    dst_first: -1,
    dst_last: -1,
    tensor_num_per_layer: 2,
    reserved: [0; 4],
};

fn no_text() -> *const c_char {
    std::ptr::null()
}
