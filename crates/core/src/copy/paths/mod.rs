//! The paths on which the bytes of a plan get from the memory of one engine into that of another one, one file each.
//!
//! | path | the engine that reads | the engine that owns the memory |
//! | --- | --- | --- |
//! | [`Mapped`] | the CPU copies a pool of the owner that is mapped here | does nothing |
//! | [`Process`] | the kernel copies other memory of the owner's process | does nothing |
//! | [`Fabric`] | UCX or NIXL reads a pool of the owner | does nothing |
//! | [`Sockets`] | receives the bytes | sends them |
//!
//! No path writes into memory of another process. [`route`](super::route) chooses the path of a transfer. A further way to move
//! bytes is one more file here, and a line in that choice.
//!
//! Staging is no path of its own. Each path may end in memory that it cannot touch, such as that of a device, and then passes
//! host buffers at that end ([`Hops::Two`]): `staged_copier` where this engine reads in place, and `staged_sockets` beside a
//! socket.

mod data_path;
mod fabric;
mod in_place;
mod mapped;
mod path_kind;
mod process;
mod sockets;
mod staged_copier;
mod staged_sockets;

use std::sync::Arc;

pub use data_path::{DataPath, Hops, PathJob, PathOutcome};
pub use fabric::Fabric;
pub use mapped::Mapped;
pub use path_kind::PathKind;
pub use process::Process;
pub use sockets::Sockets;

use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Reach, Tensors};

/// Returns the path on which this engine reads `remote` in place. Returns `Err(System)` if this is no memory of a peer.
pub fn in_place(remote: &Arc<Tensors>) -> Result<Box<dyn DataPath + '_>> {
    Ok(match (remote.reach(), remote.process(), remote.fabric()) {
        (Reach::HostRead, ..) => Box::new(Mapped(remote)),
        (Reach::Process, Some(process), _) => Box::new(Process(remote, process)),
        (Reach::Fabric, _, Some(region)) => Box::new(Fabric(remote, region)),
        (reach, ..) => {
            let text = "only memory of a peer is read in place";
            return Err(Error::new(ErrorKind::System, text).with("memory", format_args!("{reach:?}")));
        }
    })
}
