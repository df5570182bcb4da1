//! One-sided reads and writes by address with the calls of `hixl`, over the native engine.
//!
//! Python's module `hixl` and the C++ class `hixl::Hixl` convert arguments and call [`Hixl`]; every rule is here. A registered range is a
//! cache of one block, a READ a pull of bytes, a WRITE a push, which the engine of the target reads. No program at the target takes
//! part: a thread of each engine answers what its peers ask (`service`).
//!
//! | file | what it has |
//! | --- | --- |
//! | `status`, `states` | status numbers, and states of requests and connections |
//! | `address`, `options`, `comm_res` | the arguments of `initialize` |
//! | `messages` | what engines send to each other |
//! | `regions`, `remote_regions` | registered memory, here and at a peer |
//! | `replies` | the answers of peers that calls wait for |
//! | `inbox`, `outbox` | notifications that the program has not read, and messages that wait for room |
//! | `connection`, `connections` | connections that this engine has made, above links that both directions share |
//! | `connect`, `moves`, `requests`, `notify` | the calls about peers |
//! | `tasks` | asynchronous connections |
//! | `service` | the thread that reads the events of the engine |
//! | `open_engine`, `hixl` | the open engine of an object, and the object |

#![allow(unreachable_pub, reason = "the modules are private")]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic))]

mod address;
mod comm_res;
mod connect;
mod connection;
mod connections;
mod hixl;
mod inbox;
mod messages;
mod moves;
mod notify;
mod open_engine;
mod options;
mod outbox;
mod regions;
mod remote_regions;
mod replies;
mod requests;
mod service;
mod states;
mod status;
mod sync;
mod tasks;

pub use address::{MAX_TEXT, NO_TEXT};
pub use hixl::Hixl;
pub use inbox::Notice;
pub use moves::{Direction, OpDesc};
pub use options::{OPTIONS, OptionKey};
pub use regions::{MemKind, MemRange};
pub use requests::RequestResult;
pub use states::{ConnectState, TransferState};
pub use status::{Outcome, Status};
