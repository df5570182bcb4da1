//! The integration tests of the core, one binary. `fixtures` has memory and devices for all of them.
//!
//! `cargo test -p llm-datadist-core --test integration`; `PROPTEST_CASES=5000` runs more cases.
#![cfg(not(loom))]
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

mod allocation_failures;
mod arguments;
mod async_copies;
mod cache_table;
mod checksums;
mod child_process;
mod contiguous;
mod copies;
mod copy_deadlines;
mod copy_faults;
mod counting_allocator;
mod cpp;
mod data_paths;
mod described_layouts;
mod emulation;
mod engine;
mod errors;
mod fixtures;
mod grants;
mod huge_pages;
mod kernels;
mod kv_cache_manager;
mod kv_geometry;
mod kv_layouts;
mod layer_destination;
mod layer_sinks;
mod layer_task;
mod layerwise_arguments;
mod links;
mod local_copies;
mod local_verify;
mod log;
mod memory_limits;
mod moved;
mod option_values;
mod options;
mod peer_memory;
mod plan;
mod pool;
mod progress;
mod protocol;
mod rank_table;
mod reader_threads;
mod region;
mod registered_pages;
mod remote_table;
mod row_pins;
mod row_queues;
mod row_strides;
mod short_windows;
mod small_page_hint;
mod socket_copies;
mod staged_streams;
mod stats;
mod swap_ring;
mod task;
mod token_file;
mod transfer;
mod transport;
mod words;
