//! Parts that the Python and C libraries share, because both are loaded into programs that they do not
//! control.
//!
//! [`install_log`] turns the engine's `tracing` events into lines and passes them to a [`Sink`]. A Rust program that uses
//! `llm_datadist_core` has its own `tracing` subscriber instead.

mod log;

pub use log::{Level, Line, Sink, install as install_log};
