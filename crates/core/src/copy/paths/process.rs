//! Reads memory of another process on this host that is not in a mapped pool, through the kernel.

use std::sync::Arc;

use super::data_path::{DataPath, Hops, PathJob, PathOutcome};
use super::in_place_read::{InPlaceRead, hops_into};
use super::path_kind::PathKind;
use crate::copy::progress::Progress;
use crate::copy::route::PlacedTensors;
use crate::copy::run::KeptAlive;
use crate::device::{HostReach, ProcessReader};
use crate::error::Result;
use crate::memory::{PeerProcess, Reach, Tensors};
use crate::plan::Side;

/// Memory of a peer's process.
#[derive(Debug)]
pub struct ProcessPath<'a>(pub &'a Arc<Tensors>, pub &'a Arc<PeerProcess>);

impl DataPath for ProcessPath<'_> {
    fn kind(&self) -> PathKind {
        PathKind::Process
    }

    fn hops(&self, end: Side, memory: Reach, _: HostReach) -> Option<Hops> {
        hops_into(end, memory, Hops::Two)
    }

    /// Reads on the reader threads, because a kernel call cannot be interrupted while the memory does not respond.
    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: KeptAlive,
    ) -> Result<PathOutcome> {
        let process = self.1;
        InPlaceRead { job, src: self.0, dst, arrived, held }.run(
            self,
            |_| Arc::new(ProcessReader::new(process.clone())),
            |engine, copy| copy.read(engine.readers(), process.pid(), engine.workers(), job.deadline),
        )
    }
}
