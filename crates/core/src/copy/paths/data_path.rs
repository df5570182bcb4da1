//! The trait of data paths, with its input and its result, and the step before each batch of a stream.

use std::ops::Range;
use std::sync::Arc;

use super::path_kind::PathKind;
use crate::copy::engine::CopyEngine;
use crate::copy::progress::Progress;
use crate::copy::route::PlacedTensors;
use crate::copy::run::HeldPins;
use crate::device::HostReach;
use crate::error::Result;
use crate::memory::Reach;
use crate::model::Deadline;
use crate::net::padding_at;
use crate::plan::{CopyPlan, Side};

/// How many copies lie between a path and the memory at one end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hops {
    /// The path reads or writes the memory itself.
    One,
    /// The bytes pass through a host buffer, and the device copies between the buffer and its memory.
    Two,
}

/// The plan that a path moves, the copy engine that moves it, and the deadline.
#[derive(Clone, Copy, Debug)]
pub struct PathJob<'a> {
    pub copy_engine: &'a CopyEngine,
    pub plan: &'a CopyPlan,
    pub deadline: Deadline,
}

/// A path for the bytes of one plan, seen from the engine that receives them.
pub trait DataPath {
    /// Returns the kind of the path.
    fn kind(&self) -> PathKind;

    /// Returns how the path reaches `memory` of this engine at `end` of a plan, or `None` if it cannot. `device` is how the
    /// engine's device reaches host memory.
    fn hops(&self, end: Side, memory: Reach, device: HostReach) -> Option<Hops>;

    /// Moves the bytes into `dst`, records in `arrived` which are in place, and returns how they reached `dst`.
    ///
    /// The caller holds the pins of the rows of `dst`. The owner pins its own rows if it sends them. No one pins rows
    /// that are read in place; the caller checks afterwards that they were unchanged (`session::peer_snapshot`).
    ///
    /// Returns `Err(Timeout)` at the deadline. When it returns, nothing touches `dst` any more, with one exception: after an error
    /// with the fact [`STILL_READING`](crate::copy::STILL_READING), the kernel may still write there, and a reader thread keeps
    /// `held` until the kernel has returned.
    fn read(
        &mut self,
        job: PathJob<'_>,
        dst: PlacedTensors<'_>,
        arrived: &Arc<Progress>,
        held: HeldPins,
    ) -> Result<Hops>;
}

/// Prepares a stream for the batch at `at` of `range`: checks the deadline, except before the first batch, and moves padding if
/// the batch needs it.
pub(super) fn before_batch(
    range: &Range<u64>,
    at: u64,
    deadline: Deadline,
    padding: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let into = at - range.start;
    if into > 0 {
        // A stream that always has bytes, or room for them, never waits. So the deadline is checked here.
        deadline.waiting("moving bytes through a stream")?;
    }
    if padding_at(into, range.end - at) { padding() } else { Ok(()) }
}
