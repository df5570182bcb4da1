//! The path on which memory of a peer is read in place.

use std::sync::Arc;

use super::data_path::DataPath;
use super::fabric::FabricPath;
use super::mapped::MappedPath;
use super::process::ProcessPath;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Reach, Tensors};

/// Returns the path on which this engine reads `remote` in place. Returns `Err(System)` if this is no memory of a peer.
pub fn in_place(remote: &Arc<Tensors>) -> Result<Box<dyn DataPath + '_>> {
    Ok(match (remote.reach(), remote.process(), remote.fabric()) {
        (Reach::HostRead, ..) => Box::new(MappedPath(remote)),
        (Reach::Process, Some(process), _) => Box::new(ProcessPath(remote, process)),
        (Reach::Fabric, _, Some(region)) => Box::new(FabricPath(remote, region)),
        (reach, ..) => {
            let text = "only memory of a peer is read in place";
            return Err(Error::new(ErrorKind::System, text).with("memory", format_args!("{reach:?}")));
        }
    })
}
