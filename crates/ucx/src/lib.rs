//! Reads of memory of other processes by UCX (<https://openucx.org>), whose library is loaded at run time.
//!
//! A [`Fabric`] has one thread, which makes all calls of the library. It sleeps while nothing is read.
//!
//! UCX cannot cancel a read. But it ends all requests of an endpoint that is closed by force, so each read has an endpoint to
//! itself. Memory is mapped for remote reads only.

#![allow(unsafe_code, reason = "the library of C")]

mod abi;
mod endpoints;
mod error;
mod fabric;
mod library;
mod mapping;
mod reads;
mod thread;
mod worker;

pub use fabric::{Fabric, Options};
pub use library::Library;
