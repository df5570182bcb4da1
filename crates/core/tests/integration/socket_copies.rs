//! Sends and receives plans through a stream, as the engines at its two ends do.

use std::ops::Range;
use std::sync::Arc;

use llm_datadist_core::testing::copy::{CopyEngine, DataPath, PathJob, Progress, StreamPath, WindowSum};
use llm_datadist_core::testing::memory::{Reach, Tensors};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::{Deadline, Placement, Result};

use crate::fixtures::soon;

/// Where a receiver records what has arrived.
pub struct Arrived<'a> {
    pub progress: &'a Arc<Progress>,
    pub sum: Option<&'a mut WindowSum>,
}

impl<'a> From<&'a Arc<Progress>> for Arrived<'a> {
    fn from(progress: &'a Arc<Progress>) -> Self {
        Arrived { progress, sum: None }
    }
}

pub trait SocketCopies {
    fn engine(&self) -> &CopyEngine;

    fn send(
        &self,
        plan: &CopyPlan,
        range: Range<u64>,
        src: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
        sum: Option<&mut WindowSum>,
    ) -> Result<()> {
        let job = PathJob { copy_engine: self.engine(), plan, deadline };
        StreamPath { stream, range, sum }.send(job, src, &Progress::default())
    }

    fn receive<'a>(
        &self,
        plan: &CopyPlan,
        range: Range<u64>,
        dst: &Arc<Tensors>,
        stream: &Stream,
        deadline: Deadline,
        arrived: impl Into<Arrived<'a>>,
    ) -> Result<()> {
        let Arrived { progress, sum } = arrived.into();
        let device = dst.reach() == Reach::Device;
        let to = (dst, if device { Placement::Device } else { Placement::Host });
        let job = PathJob { copy_engine: self.engine(), plan, deadline };
        StreamPath { stream, range, sum }.read(job, to, progress, Arc::new(())).map(drop)
    }
}

/// Sends a range of a plan from one engine and memory to others, and returns what either end says. An end that fails
/// closes its stream.
pub fn send_and_receive<'a>(
    plan: &CopyPlan,
    range: &Range<u64>,
    (sender, src, local): (&CopyEngine, &Arc<Tensors>, &Stream),
    (receiver, dst, remote): (&CopyEngine, &Arc<Tensors>, &Stream),
    (sum, arrived): (Option<&mut WindowSum>, impl Into<Arrived<'a>>),
) -> (Result<()>, Result<()>) {
    let closed_by = |stream: &Stream, result: Result<()>| result.inspect_err(|_| stream.close());
    std::thread::scope(|scope| {
        let sent =
            scope.spawn(|| closed_by(local, sender.send(plan, range.clone(), src, local, soon(), sum)));
        let result = receiver.receive(plan, range.clone(), dst, remote, soon(), arrived);
        let result = closed_by(remote, result);
        (sent.join().unwrap(), result)
    })
}

impl SocketCopies for CopyEngine {
    fn engine(&self) -> &CopyEngine {
        self
    }
}
