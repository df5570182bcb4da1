//! Parts that the Python and C libraries share, because both are loaded into programs that they do not
//! control.
//!
//! - [`KeptLists`] is the allocator for their own memory. The allocator of the program stays as it is.
//! - [`install_log`] turns the engine's `tracing` events into lines and passes them to a [`Sink`].
//!
//! A Rust program that uses `llm_datadist_core` needs neither: it has its own allocator and its own `tracing`
//! subscriber.

#[expect(unsafe_code, reason = "an allocator")]
mod list_allocator;
mod log;

pub use list_allocator::KeptLists;
pub use log::{Level, Line, Sink, install as install_log};
