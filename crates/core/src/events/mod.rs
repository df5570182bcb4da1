//! What a program that never blocks polls for: the outcomes of its asynchronous calls, in the order in which they
//! ended.
//!
//! A [`Transfer`] records one asynchronous call. [`EventQueue`] holds the outcomes that nobody has taken yet.

mod await_queue;
mod queue;
mod readable;
mod transfer;

pub use await_queue::AwaitQueue;
pub use queue::{Event, EventQueue};
pub use transfer::{Transfer, TransferProgress};
