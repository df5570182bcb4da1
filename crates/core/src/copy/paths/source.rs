//! Memory of a peer that this engine can read in place, with what reads it.

use std::sync::Arc;

use super::data_path::DataPath;
use super::fabric::FabricPath;
use super::mapped::MappedPath;
use super::process::ProcessPath;
use crate::memory::{FabricRegion, PeerProcess, Tensors};

/// Tensors of a peer, by the path on which they are read.
#[derive(Clone, Debug)]
pub enum PeerTensors {
    /// In a pool that is mapped here.
    Mapped(Arc<Tensors>),
    /// Elsewhere in the process of the peer.
    Process(Arc<Tensors>, Arc<PeerProcess>),
    /// In a pool that UCX reads.
    Fabric(Arc<Tensors>, Arc<FabricRegion>),
}

impl PeerTensors {
    /// Returns the path on which they are read.
    pub fn path(&self) -> Box<dyn DataPath + '_> {
        match self {
            PeerTensors::Mapped(tensors) => Box::new(MappedPath(tensors)),
            PeerTensors::Process(tensors, process) => Box::new(ProcessPath(tensors, process)),
            PeerTensors::Fabric(tensors, region) => Box::new(FabricPath(tensors, region)),
        }
    }
}
