//! Reads a pool of another process on this host, which is mapped here.

use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob, PathOutcome};
use super::in_place_read::{InPlaceRead, hops_into};
use super::path_kind::PathKind;
use crate::copy::progress::Progress;
use crate::copy::route::PlacedTensors;
use crate::copy::run::KeptAlive;
use crate::device::HostReach;
use crate::error::Result;
use crate::memory::{Reach, Tensors};
use crate::model::Placement;
use crate::plan::Side;

/// A pool of a peer, mapped read-only. The CPU copies from it; so does a device that reads host memory in place.
#[derive(Debug)]
pub struct MappedPath<'a>(pub &'a Arc<Tensors>);

impl DataPath for MappedPath<'_> {
    fn kind(&self) -> PathKind {
        PathKind::Mapped
    }

    fn hops(&self, end: Side, memory: Reach, device: HostReach) -> Option<Hops> {
        hops_into(end, memory, if device == HostReach::Direct { Hops::One } else { Hops::Two })
    }

    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: KeptAlive,
    ) -> Result<PathOutcome> {
        InPlaceRead { job, src: self.0, dst, arrived, held }.run(
            self,
            |engine| engine.devices().at(Placement::Host).clone(),
            |engine, copy| copy.direct(engine.copy_workers(), job.deadline.into()),
        )
    }
}
