//! Sends and receives plans through a stream, as the engines at its two ends do.

use std::ops::Range;
use std::sync::Arc;

use llm_datadist_core::testing::copy::{CopyEngine, DataPath, PathJob, Progress, StreamPath, WindowSum};
use llm_datadist_core::testing::memory::{Reach, Tensors};
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::CopyPlan;
use llm_datadist_core::{Deadline, Placement, Result};

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

impl SocketCopies for CopyEngine {
    fn engine(&self) -> &CopyEngine {
        self
    }
}
