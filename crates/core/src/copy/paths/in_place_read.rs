//! The shared part of the paths on which this engine reads memory of the peer itself.

use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob, PathOutcome};
use super::staged_copier::StagedCopier;
use crate::copy::engine::CopyEngine;
use crate::copy::progress::{Progress, with_copied_bytes};
use crate::copy::route::{self, PlacedTensors};
use crate::copy::run::{Copying, KeptAlive};
use crate::copy::tuner::Source;
use crate::device::Copier;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, Reach, Tensors};
use crate::plan::Side;

/// Returns how a path that reads a peer reaches memory of this engine, which is the destination. `device` is the answer for
/// memory of a device.
pub(super) fn hops_into(end: Side, memory: Reach, device: Hops) -> Option<Hops> {
    match (end, memory) {
        (Side::Destination, Reach::Host) => Some(Hops::One),
        (Side::Destination, Reach::Device) => Some(device),
        _ => None,
    }
}

/// A read of a peer's memory that is about to begin.
pub(super) struct InPlaceRead<'a> {
    pub(super) job: PathJob<'a>,
    pub(super) src: &'a Arc<Tensors>,
    pub(super) dst: PlacedTensors<'a>,
    pub(super) arrived: &'a Arc<Progress>,
    pub(super) held: KeptAlive,
}

impl InPlaceRead<'_> {
    /// Reads on `path`. `reader` returns the copier from the source into host memory. `run` runs the copy on threads that may wait
    /// for this source.
    pub(super) fn run(
        self,
        path: &dyn DataPath,
        reader: impl FnOnce(&CopyEngine) -> Arc<dyn Copier>,
        run: impl FnOnce(&CopyEngine, Copying) -> Result<()>,
    ) -> Result<PathOutcome> {
        let InPlaceRead { job, src, dst, arrived, held } = self;
        let device = job.engine.devices().at(dst.1).host_reach();
        let Some(hops) = path.hops(Side::Destination, dst.0.reach(), device) else {
            return Err(Error::new(ErrorKind::System, "cannot write to memory of another process"));
        };
        dst.0.check_mapped(Access::Write)?;
        let copy = Copying {
            plan: job.plan.clone(),
            src: src.clone(),
            dst: dst.0.clone(),
            copier: copier(job.engine, (src, dst), hops, reader),
            tuner: job.engine.tuner().clone(),
            source: Source::Peer,
            progress: arrived.clone(),
            held,
        };
        let bytes = copy.plan.bytes();
        run(job.engine, copy).map_err(|error| with_copied_bytes(error, arrived, bytes))?;
        Ok(PathOutcome { bytes, hops })
    }
}

/// Returns what copies from the source to the destination.
fn copier(
    engine: &CopyEngine,
    (src, dst): (&Arc<Tensors>, PlacedTensors<'_>),
    hops: Hops,
    reader: impl FnOnce(&CopyEngine) -> Arc<dyn Copier>,
) -> Arc<dyn Copier> {
    match hops {
        Hops::One if dst.0.host_addressable() => reader(engine),
        // The device reads the source itself.
        Hops::One => route::device(engine.devices(), (src, dst.1), dst).clone(),
        Hops::Two => Arc::new(StagedCopier {
            first: reader(engine),
            second: engine.devices().at(dst.1).clone(),
            buffers: engine.host_buffers().clone(),
        }),
    }
}
