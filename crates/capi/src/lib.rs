//! `libllm_datadist`: the engine for C and C++. Convert, enter, call, keep the reason; nothing is decided here.
//!
//! `include/llm_datadist/llm_datadist.h` is the C++ class over it, `llm_datadist_c.h` the generated C header. Not for:
//! what arguments mean (`core::validate`), or names and defaults of the public class (the C++ header).

// Tests of the library may panic; the library may not.
#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::expect_used,
        clippy::panic,
        unsafe_code,
        reason = "tests of the library"
    )
)]

#[expect(unsafe_code, reason = "what C hands over, and the functions that C calls")]
pub mod abi;
mod calls;
mod door;
mod log;

use llm_datadist_core::bindings::KeptLists;

/// Memory of this library alone: the program's `malloc` is not touched.
#[global_allocator]
static LISTS: KeptLists = KeptLists::new();

#[cfg(test)]
#[path = "../../../crates/capi/src/tests/mod.rs"]
#[allow(
    unsafe_code,
    clippy::multiple_unsafe_ops_per_block,
    reason = "calls as C makes them, a table of them at a time"
)]
#[allow(
    clippy::type_complexity,
    clippy::items_after_statements,
    reason = "tables of tuples, next to their only use"
)]
mod tests;
