//! A stand-in for `libnixl_capi` in tests. It reads memory of processes of this host, and fails on request.
//!
//! Agents belong to a group. The setting `FAKE_NAME` of UCX (`engine_config`) names it. Further settings of its first agent,
//! and the function `fake_nixl_set`, choose what goes wrong in the group:
//!
//! | name | effect |
//! | --- | --- |
//! | `STALL` | number of pieces that still arrive; further ones wait |
//! | `RESET` | 1: requests end with -13 |
//! | `LATE` | 1: the bytes of an agent that is destroyed arrive all the same: a fault of the library |
//! | `SLOW_POST` | milliseconds that posting a request takes |
//! | `AT_ONCE` | 1: requests end while they are posted |
//! | `REQUIRE_RDMA` | 1: no backend is created unless `TLS` names the transports of RDMA |
//! | `REFUSE_…` | the status that this function returns, for example `REFUSE_nixl_capi_register_mem` |
//!
//! `fake_nixl_refuse` has a function refuse the calls of this thread, also those without an agent.
//!
//! As in NIXL, releasing an unfinished request does not stop its bytes: they arrive when the group no longer stalls.

#![allow(unsafe_code, reason = "the interface of a library of C")]
#![allow(clippy::missing_safety_doc, reason = "as in NIXL")]
#![allow(missing_docs, reason = "the functions are those of NIXL")]
#![allow(unreachable_pub, reason = "exported by name")]

mod functions;
mod lists;
mod model;

/// The version, where the files of NIXL have it. A test that needs another version changes it in a copy of the file.
#[used]
#[unsafe(no_mangle)]
pub static FAKE_NIXL_VERSION: [u8; 21] = *b"NIXL version: \x001.5.1\0";
