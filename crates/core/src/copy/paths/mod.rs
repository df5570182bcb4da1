//! The data paths: ways to move the bytes of a plan from the memory of one engine to that of another.
//!
//! | path | the engine that reads | the engine that owns the memory |
//! | --- | --- | --- |
//! | mapped | the CPU copies a pool of the owner that is mapped here | does nothing |
//! | process | the kernel copies other memory of the owner's process | does nothing |
//! | fabric | UCX reads a pool of the owner | does nothing |
//! | stream | receives the bytes, through rings in shared memory or through a socket | sends them |
//!
//! No path writes into memory of another process. [`route`](super::route) has the rules for the path of a transfer. Another way to move
//! bytes takes a [`PathKind`], a rule there, and a file here; if this engine reads in place, a variant of
//! [`PeerTensors`] instead of a file, and a [`Reach`](crate::memory::Reach) if nothing else can read that memory.
//!
//! Staging is no path of its own. If a path cannot touch the memory at one end, such as that of a device, the bytes pass through
//! host buffers there ([`Hops::Two`]): `staged_copier` where this engine reads in place, and `staged_stream` beside a stream.

mod data_path;
mod path_kind;
mod peer_tensors;
mod staged_copier;
mod staged_stream;
mod stream;

pub use data_path::{DataPath, Hops, PathJob};
pub use path_kind::PathKind;
pub use peer_tensors::PeerTensors;
pub use stream::StreamPath;
