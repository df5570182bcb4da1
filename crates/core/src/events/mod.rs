//! What a program that never blocks polls for: the outcomes of its asynchronous calls, messages of peers, and news about
//! links and grants, in the order in which they happened.
//!
//! A [`Transfer`] records one asynchronous call. [`EventQueue`] holds the outcomes that nobody has taken yet.

mod await_queue;
mod link_ends;
mod notification;
mod queue;
mod transfer;
mod transfer_future;

pub use await_queue::AwaitQueue;
pub(crate) use link_ends::{CallsOfPeers, HeldEnd, MAX_HELD};
pub(crate) use notification::NotificationSource;
pub use notification::{LinkEnd, Notification, PeerInfo};
pub use queue::{Event, EventQueue};
pub(crate) use transfer::Stops;
pub use transfer::{Transfer, TransferProgress};
pub use transfer_future::TransferFuture;
