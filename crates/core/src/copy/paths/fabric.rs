//! Reads a pool of a peer, perhaps on another host, through UCX.

use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob, PathOutcome};
use super::in_place_read::{InPlaceRead, hops_into};
use super::path_kind::PathKind;
use crate::copy::progress::Progress;
use crate::copy::route::PlacedTensors;
use crate::copy::run::KeptAlive;
use crate::device::{FabricReader, HostReach};
use crate::error::Result;
use crate::memory::{FabricRegion, Reach, Tensors};
use crate::plan::Side;

/// A pool of a peer that UCX reads.
#[derive(Debug)]
pub struct FabricPath<'a>(pub &'a Arc<Tensors>, pub &'a Arc<FabricRegion>);

impl DataPath for FabricPath<'_> {
    fn kind(&self) -> PathKind {
        PathKind::Fabric
    }

    fn hops(&self, end: Side, memory: Reach, _: HostReach) -> Option<Hops> {
        hops_into(end, memory, Hops::Two)
    }

    /// Reads on the calling thread, because copy workers must not wait for a network.
    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: KeptAlive,
    ) -> Result<PathOutcome> {
        let (region, silence) = (self.1, arrived.silence);
        InPlaceRead { job, src: self.0, dst, arrived, held }.run(
            self,
            |_| Arc::new(FabricReader::new(region.clone(), job.deadline, silence)),
            |_, copy| copy.alone(job.deadline.into()),
        )
    }
}
