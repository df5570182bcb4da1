//! What a path is, what it is given, and what it returns.

use std::sync::Arc;

use super::path_kind::PathKind;
use crate::copy::engine::CopyEngine;
use crate::copy::progress::Progress;
use crate::copy::route::PlacedTensors;
use crate::copy::run::KeptAlive;
use crate::device::HostReach;
use crate::error::Result;
use crate::memory::{Reach, Tensors};
use crate::model::Deadline;
use crate::plan::{CopyPlan, LocalEnd};

/// How the bytes get between a path and memory at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hops {
    /// The path reads or writes the memory itself.
    One,
    /// The bytes pass a host buffer, and the device copies between the buffer and its memory.
    Two,
}

/// What a path is to move, with which engine, and until when.
#[derive(Clone, Copy, Debug)]
pub struct PathJob<'a> {
    pub engine: &'a CopyEngine,
    pub plan: &'a Arc<CopyPlan>,
    pub deadline: Deadline,
}

/// Result of a read that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathOutcome {
    /// Bytes moved. Each byte counts once.
    pub bytes: u64,
    /// How they got to the destination.
    pub hops: Hops,
}

/// A path for the bytes of one plan, seen from one end.
pub trait DataPath {
    /// Returns which path it is.
    fn kind(&self) -> PathKind;

    /// Returns how the path gets at memory of this engine at `end` of a plan, beside a device that reads host memory like this.
    /// Returns `None` if it cannot.
    fn hops(&self, end: LocalEnd, memory: Reach, device: HostReach) -> Option<Hops>;

    /// Moves the bytes into `dst`, and records in `arrived` what is in place. The caller pins the rows of both ends.
    ///
    /// Returns `Err(Timeout)` at the deadline. When it returns, nothing touches `dst` any more, with one exception: after an error
    /// with the fact [`STILL_READING`](crate::copy::STILL_READING), the kernel may still write there, and keeps `held` until it has ended.
    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: KeptAlive,
    ) -> Result<PathOutcome>;

    /// Moves the bytes out of `src`, at the engine that owns them. Paths on which the other engine reads them in place need
    /// nothing from the owner.
    fn serve(&mut self, _job: PathJob<'_>, _src: &Arc<Tensors>) -> Result<()> {
        Ok(())
    }
}
