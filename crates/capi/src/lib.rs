//! `libllm_datadist`: the engine for C and C++.
//!
//! Each function converts its arguments, finds the engine of its handle, makes one call, and keeps the reason of a failure.
//! It decides nothing: `core::native`, `core::validate` and the crate `hixl` have the rules. `include/llm_datadist/llm_datadist_c.h` is the generated
//! C header, with the native API and what the C++ classes need. `llm_datadist.h`, `hixl.h` and `adxl_engine.h` are these classes, with
//! their names and defaults.

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

#[expect(unsafe_code, reason = "pointers from C, and the functions that C calls")]
pub mod abi;
mod calls;
mod failure;
mod handles;
mod hixl_lists;
mod log;
mod native;
mod objects;
mod polled_events;

use llm_datadist_embed::KeptLists;

/// The allocator of this library alone. The program's `malloc` is not changed.
#[global_allocator]
static LISTS: KeptLists = KeptLists::new();

#[cfg(test)]
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
