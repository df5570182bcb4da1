//! Reads of memory of other processes by UCX (<https://openucx.org>), whose library is loaded at run time.
//!
//! Each side maps memory ([`Fabric::map`]), and sends the keys and the address of its fabric to the other one over a channel
//! that the caller provides. The other side connects ([`Fabric::peer`]) and reads ([`Peer::read`]). There is no call that
//! writes into memory of another process, and memory is mapped for remote reads only.
//!
//! A [`Fabric`] has one thread, which makes all calls of the library. It sleeps while nothing is read.
//!
//! UCX cannot cancel a read. But it ends all requests of an endpoint that is closed by force, so each read has an endpoint to
//! itself. When a read returns, also without success, UCX no longer writes to its destinations.

#![allow(unsafe_code, reason = "the library of C")]

mod abi;
mod endpoints;
mod environment;
mod error;
mod fabric;
mod library;
mod mapping;
mod reads;
mod status;
mod thread;
mod worker;

pub use error::{Error, Status};
pub use fabric::{Counts, Fabric, Mapping, Options, Peer, Piece};
pub use library::{Library, Version};
