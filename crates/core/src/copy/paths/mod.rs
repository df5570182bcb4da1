//! The paths on which the bytes of a plan get from the memory of one engine into that of another one, one file each.
//!
//! | path | the engine that reads | the engine that owns the memory |
//! | --- | --- | --- |
//! | `mapped` | the CPU copies a pool of the owner that is mapped here | does nothing |
//! | `process` | the kernel copies other memory of the owner's process | does nothing |
//! | `fabric` | UCX or NIXL reads a pool of the owner | does nothing |
//! | `sockets` | receives the bytes | sends them |
//!
//! No path writes into memory of another process. [`route`](super::route) chooses the path of a transfer. A further way to move
//! bytes is one more file here, and a line in that choice.
//!
//! Staging is no path of its own. Each path may end in memory that it cannot touch, such as that of a device, and then passes
//! host buffers at that end ([`Hops::Two`]): `staged_copier` where this engine reads in place, and `staged_sockets` beside a
//! socket.

mod data_path;
mod fabric;
mod in_place_read;
mod mapped;
mod of_peer;
mod path_kind;
mod process;
mod sockets;
mod staged_copier;
mod staged_sockets;

pub use data_path::{DataPath, Hops, PathJob, PathOutcome};
pub use of_peer::in_place;
pub use path_kind::PathKind;
pub use sockets::SocketPath;
