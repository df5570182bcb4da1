//! Memory of a peer that this engine reads itself. The owner does nothing.

use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob};
use super::path_kind::PathKind;
use super::staged_copier::StagedCopier;
use crate::copy::progress::{Progress, with_copied_bytes};
use crate::copy::route::{self, PlacedTensors};
use crate::copy::run::{Copying, HeldPins};
use crate::device::{Copier, FabricReader, HostReach, ProcessReader};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, FabricRegion, PeerProcess, Reach, Tensors};
use crate::model::Placement;
use crate::plan::Side;

/// Tensors of a peer, by the path on which they are read.
#[derive(Clone, Debug)]
pub enum PeerTensors {
    /// In a pool that is mapped here. The CPU copies from it; so does a device that reads host memory in place.
    Mapped(Arc<Tensors>),
    /// Elsewhere in the process of the peer. The kernel copies from it.
    Process(Arc<Tensors>, Arc<PeerProcess>),
    /// In a pool that UCX reads, perhaps on another host.
    Fabric(Arc<Tensors>, Arc<FabricRegion>),
}

impl PeerTensors {
    fn tensors(&self) -> &Arc<Tensors> {
        let (Self::Mapped(tensors) | Self::Process(tensors, _) | Self::Fabric(tensors, _)) = self;
        tensors
    }

    /// Returns what copies from this memory into host memory.
    fn reader(&self, job: PathJob<'_>, arrived: &Progress) -> Arc<dyn Copier> {
        match self {
            PeerTensors::Mapped(_) => job.copy_engine.devices.at(Placement::Host).clone(),
            PeerTensors::Process(_, process) => Arc::new(ProcessReader::new(process.clone())),
            PeerTensors::Fabric(_, region) => {
                Arc::new(FabricReader::new(region.clone(), job.deadline, arrived.silence))
            }
        }
    }

    /// Returns what copies from this memory to `dst`.
    fn copier(
        &self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        hops: Hops,
        arrived: &Progress,
    ) -> Arc<dyn Copier> {
        let devices = &job.copy_engine.devices;
        match hops {
            Hops::One if dst.0.host_addressable() => self.reader(job, arrived),
            // The device reads the source itself.
            Hops::One => route::device(devices, (self.tensors(), dst.1), dst).clone(),
            Hops::Two => Arc::new(StagedCopier {
                first: self.reader(job, arrived),
                second: devices.at(dst.1).clone(),
                buffers: job.copy_engine.host_buffers.clone(),
            }),
        }
    }
}

impl DataPath for &PeerTensors {
    fn kind(&self) -> PathKind {
        match self {
            PeerTensors::Mapped(_) => PathKind::Mapped,
            PeerTensors::Process(..) => PathKind::Process,
            PeerTensors::Fabric(..) => PathKind::Fabric,
        }
    }

    fn hops(&self, end: Side, memory: Reach, device: HostReach) -> Option<Hops> {
        let in_place = matches!(self, PeerTensors::Mapped(_)) && device == HostReach::Direct;
        match (end, memory) {
            (Side::Destination, Reach::Host) => Some(Hops::One),
            (Side::Destination, Reach::Device) => Some(if in_place { Hops::One } else { Hops::Two }),
            _ => None,
        }
    }

    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: HeldPins,
    ) -> Result<Hops> {
        let copy_engine = job.copy_engine;
        let device = copy_engine.devices.at(dst.1).host_reach();
        let Some(hops) = self.hops(Side::Destination, dst.0.reach(), device) else {
            return Err(Error::new(ErrorKind::System, "cannot write to memory of another process"));
        };
        dst.0.check_present(Access::Write)?;
        let copy = Copying {
            plan: job.plan.clone(),
            src: self.tensors().clone(),
            dst: dst.0.clone(),
            copier: self.copier(job, dst, hops, arrived),
            counted: copy_engine.counted().clone(),
            progress: arrived.clone(),
            held,
        };
        let bytes = copy.plan.bytes();
        let read = match self {
            PeerTensors::Mapped(_) => copy.direct(copy_engine.workers(), job.deadline.into()),
            // On the reader threads, because a kernel call cannot be interrupted while the memory does not respond.
            PeerTensors::Process(_, process) => {
                copy.read(&copy_engine.readers, process.pid(), copy_engine.workers().count(), job.deadline)
            }
            // On the calling thread, because copy workers must not wait for a network.
            PeerTensors::Fabric(..) => copy.run_inline(job.deadline.into()),
        };
        read.map_err(|error| with_copied_bytes(error, arrived, bytes))?;
        Ok(hops)
    }
}
