//! The integration tests of the core, one binary. `fixtures` holds memory and devices for all of them.
//!
//! `cargo test -p llm-datadist-core --test integration`; `PROPTEST_CASES=5000` runs more cases. With `RUSTFLAGS="--cfg loom"` only
//! the loom model is built, in its own target folder.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test that finds nothing fails")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_possible_wrap,
    reason = "small sizes"
)]
#![allow(
    clippy::items_after_statements,
    clippy::too_many_lines,
    reason = "a table of cases next to its only use"
)]
#![allow(clippy::type_complexity, clippy::needless_for_each, reason = "tables of tuples, walked in one line")]
#![allow(clippy::manual_memcpy, reason = "the twin copies byte by byte")]
#![allow(clippy::print_stderr, reason = "shown with a failure: in which set-up")]
#![allow(unreachable_pub, reason = "one binary")]

#[cfg(not(loom))]
mod allocation_failures;
#[cfg(not(loom))]
mod arguments;
#[cfg(not(loom))]
mod cache_table;
#[cfg(not(loom))]
mod child_process;
#[cfg(not(loom))]
mod copy_deadlines;
#[cfg(not(loom))]
mod copy_faults;
#[cfg(not(loom))]
mod counting_allocator;
#[cfg(not(loom))]
mod cpp;
#[cfg(not(loom))]
mod errors;
#[cfg(not(loom))]
mod fixtures;
#[cfg(not(loom))]
mod kernels;
#[cfg(not(loom))]
mod kv_cache_manager;
#[cfg(not(loom))]
mod layer_destination;
#[cfg(not(loom))]
mod layerwise_arguments;
#[cfg(not(loom))]
mod links;
#[cfg(not(loom))]
mod list_allocator;
#[cfg(not(loom))]
mod local_copies;
#[cfg(not(loom))]
mod log;
#[cfg(loom)]
mod loom_pin;
#[cfg(not(loom))]
mod memory_limits;
#[cfg(not(loom))]
mod merger;
#[cfg(not(loom))]
mod options;
#[cfg(not(loom))]
mod peer_memory;
#[cfg(not(loom))]
mod plan;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod progress;
#[cfg(not(loom))]
mod protocol;
#[cfg(not(loom))]
mod rank_table;
#[cfg(not(loom))]
mod reader_threads;
#[cfg(not(loom))]
mod region;
#[cfg(not(loom))]
mod registered_pages;
#[cfg(not(loom))]
mod remote_table;
#[cfg(not(loom))]
mod row_pins;
#[cfg(not(loom))]
mod small_page_hint;
#[cfg(not(loom))]
mod stats;
#[cfg(not(loom))]
mod swap_ring;
#[cfg(not(loom))]
mod token_file;
#[cfg(not(loom))]
mod transfer;
#[cfg(not(loom))]
mod transport;
#[cfg(not(loom))]
mod tuner;
