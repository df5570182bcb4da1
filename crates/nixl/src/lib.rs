//! Reads of memory of other processes by NIXL (<https://github.com/ai-dynamo/nixl>), whose library is loaded at run time.
//!
//! NIXL cannot end a read safely: after an unfinished request is released, its bytes still arrive. Only the end of an agent
//! ends its requests. So reads have agents of their own, and giving a read up destroys its agent before the caller returns, unless
//! all of its requests end within a short time.
//! Another agent serves peers, as long as the fabric lives.
//!
//! There is no call for writing into memory of a peer.

#![allow(unsafe_code, reason = "the library of C")]

mod abi;
mod agent;
mod fabric;
mod library;
mod limits;
mod read;
mod readers;
mod request;
mod status;

pub use fabric::{Fabric, Options};
pub use library::Library;
