//! A stand-in for `libucp` in tests. It reads memory of processes of this host, and fails on request.
//!
//! Settings of a context (`ucp_config_modify`) and the function `fake_ucp_set` choose what goes wrong:
//!
//! | name | effect |
//! | --- | --- |
//! | `FAKE_NAME` | the name of the context, for `fake_ucp_set` |
//! | `STALL` | number of requests that still end; further ones wait |
//! | `HOLD` | requests for remote addresses below this one wait |
//! | `RESET` | 1: all requests end with -25, and the error handler is called |
//! | `REQUESTS` | maximum number of requests in flight; a further one is refused with -2 |
//! | `REORDER` | 1: the latest request ends first |
//! | `LATE` | 1: the bytes of requests that a forced close has ended arrive all the same: a fault of the library |
//! | `STUCK` | 1: requests do not end by a forced close |
//! | `REQUIRE_RDMA` | 1: no context is opened unless `TLS` names the transports of RDMA |
//! | `REFUSE_…` | the status that this function returns, for example `REFUSE_ucp_mem_map` |

#![allow(unsafe_code, reason = "the interface of a library of C")]
#![allow(clippy::missing_safety_doc, reason = "as in UCX")]
#![allow(missing_docs, reason = "the functions are those of UCX")]
#![allow(unreachable_pub, reason = "exported by name")]

mod functions;
mod model;

/// The version. A test that needs another version changes it in a copy of the file. It is not exported: otherwise a copy would use
/// that of a program that exports its symbols, as those with the address sanitizer do.
#[used]
static FAKE_UCP_VERSION: [u8; 20] = *b"UCX version: \x001.13.0";
