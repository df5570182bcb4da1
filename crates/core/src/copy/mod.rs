//! The copy engine: the only thing that moves bytes. Copies, swaps, pulls, pushes and layers are plans it runs.
//!
//! Not for: which bytes (`plan`), who may touch them (`table::pin`), or whether a request makes sense (`check`).

mod kernel_choice;
mod limit;
mod peer_read;
mod progress;
mod reader_threads;
mod route;
mod run;
mod socket;
mod staging_ring;
mod workers;

pub use kernel_choice::Tuner;
pub use limit::Limit;
pub use peer_read::STILL_READING;
pub use progress::{Arrived, Progress, arrived};
pub use route::Route;
pub use workers::{Work, Workers};

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::config::{Config, SwapInPath};
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, ForeignProcess, Probe, Tensors};
use crate::model::Deadline;
use crate::plan::CopyPlan;

/// What a copy did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Bytes moved, each counted once.
    pub bytes: u64,
    /// The way they took.
    pub route: Route,
}

/// Runs plans on persistent workers.
#[derive(Debug)]
pub struct CopyEngine {
    devices: DeviceSet,
    workers: Workers,
    readers: reader_threads::Readers,
    tuner: Arc<Tuner>,
    /// Memory of other processes has page tables, and so speeds, of its own.
    foreign_tuner: Arc<Tuner>,
    /// Buffers of the ring lie in the caches.
    ring_tuner: Arc<Tuner>,
    ring: staging_ring::RingOwner,
    /// Wait for sockets, which those that copy must not; started by the first transfer that has use for them.
    streamers: OnceLock<Workers>,
    streams: usize,
}

/// How a copy from host to device may be staged.
#[derive(Clone, Copy, Debug)]
pub struct Staging {
    /// The way that is forced, if any.
    pub path: SwapInPath,
    /// Bytes of one ring buffer, should the copy go through the ring.
    pub buffer_bytes: u64,
}

/// What must stay as long as the bytes of a copy may be touched: the pins of its rows.
pub type Held = Arc<dyn std::any::Any + Send + Sync>;

/// Memory at one end of a copy, and where it is placed.
pub type End<'a> = (&'a Arc<Tensors>, crate::model::Placement);

impl CopyEngine {
    /// An engine with the workers and choices of `config`, over `devices`.
    pub fn new(config: &Config, devices: DeviceSet) -> Result<Self> {
        let tuner = Tuner::new(config.kernel)?;
        let workers = Workers::new("llm-copy", config.copy_workers)?;
        Ok(CopyEngine {
            devices,
            readers: reader_threads::Readers::new(workers.count()),
            workers,
            foreign_tuner: Arc::new(tuner.beside()),
            ring_tuner: Arc::new(tuner.beside()),
            tuner: Arc::new(tuner),
            ring: staging_ring::RingOwner::default(),
            streamers: OnceLock::new(),
            streams: config.links.streams,
        })
    }

    /// Workers for the parts of one transfer through several streams.
    pub fn streamers(&self) -> Result<&Workers> {
        if let Some(workers) = self.streamers.get() {
            return Ok(workers);
        }
        let made = Workers::new("llm-stream", Some(self.streams))?;
        Ok(self.streamers.get_or_init(|| made))
    }

    /// Workers that copy, the calling thread among them.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.count()
    }

    /// Has the workers do `units` pieces of other work, the calling thread among them; returns when all are done.
    pub fn spread(&self, work: Arc<impl Work>, units: usize, limit: impl Into<Limit>) -> Result<()> {
        self.workers.run(work, units, limit)
    }

    /// Bytes each kernel has copied, and what was learned of it in this process's memory.
    #[must_use]
    pub fn tuner(&self) -> &Tuner {
        &self.tuner
    }

    /// Bytes of device memory the swap-in ring holds.
    #[must_use]
    pub fn ring_bytes(&self) -> u64 {
        self.ring.bytes()
    }

    /// Opens process `pid`, as [`ForeignProcess::open`] does. `Err` once `deadline` has passed, also if its memory does not
    /// answer.
    pub fn open_process(&self, pid: i32, probe: Probe, deadline: Deadline) -> Result<Arc<ForeignProcess>> {
        let opening = Arc::new(Opening { pid, probe, opened: Mutex::default() });
        self.readers.run(pid, opening.clone(), 1, 1, (deadline, None))?;
        let opened = opening.opened.lock().unwrap_or_else(PoisonError::into_inner).take();
        opened.unwrap_or_else(|| Err(Error::new(ErrorKind::System, "the peer's process was not opened")))
    }

    /// Moves every byte of `plan`, wave after wave, or says how far it got (`copied_bytes`, counted by whole units, so
    /// never more than arrived); `progress` says which bytes, `limit` whether a copy that has begun is finished. The caller
    /// holds pins on both ends until this returns. The source may be another process's memory, the destination never.
    pub fn run(
        &self,
        plan: impl Into<Arc<CopyPlan>>,
        src: End<'_>,
        dst: End<'_>,
        staging: Staging,
        limit: impl Into<Limit>,
        progress: &Arc<Progress>,
    ) -> Result<Outcome> {
        self.run_holding(plan, src, dst, staging, limit, progress, Arc::new(()))
    }

    /// As [`run`](Self::run), and keeps `held` as long as any byte may still be touched: beyond the end of the call if its
    /// error carries [`STILL_READING`].
    #[expect(clippy::too_many_arguments, reason = "what a copy is made of")]
    pub fn run_holding(
        &self,
        plan: impl Into<Arc<CopyPlan>>,
        src: End<'_>,
        dst: End<'_>,
        staging: Staging,
        limit: impl Into<Limit>,
        progress: &Arc<Progress>,
        held: Held,
    ) -> Result<Outcome> {
        let limit = limit.into();
        let route = route::choose(&self.devices, src, dst, staging.path)?;
        src.0.check_mapped(Access::Read)?;
        dst.0.check_mapped(Access::Write)?;
        let plan = plan.into();
        let bytes = plan.bytes();
        let tuner = match route {
            Route::Ring => &self.ring_tuner,
            Route::Direct if src.0.reach().foreign() => &self.foreign_tuner,
            Route::Direct => &self.tuner,
        };
        let copy = run::Copying {
            plan,
            src: src.0.clone(),
            dst: dst.0.clone(),
            copier: route::copier(&self.devices, src, dst),
            tuner: tuner.clone(),
            progress: progress.clone(),
            held,
        };
        let ended = match route {
            Route::Direct => match src.0.process() {
                Some(process) => {
                    copy.read(&self.readers, process.pid(), self.workers.count(), limit.to_wait())
                }
                None => copy.direct(&self.workers, limit),
            },
            Route::Ring => {
                let device = route::device(&self.devices, src, dst).as_ref();
                self.ring.run(&copy, device, staging.buffer_bytes, limit)
            }
        };
        ended.map_err(|error| so_far(error, progress, bytes))?;
        Ok(Outcome { bytes, route })
    }
}

/// Another process being opened.
struct Opening {
    pid: i32,
    probe: Probe,
    opened: Mutex<Option<Result<Arc<ForeignProcess>>>>,
}

impl Work for Opening {
    fn unit(&self, _: usize) -> Result<()> {
        let opened = ForeignProcess::open(self.pid, self.probe);
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    }
}

/// The error of a transfer that ended early, with how far it got.
fn so_far(error: Error, progress: &Progress, of_bytes: u64) -> Error {
    error.with("copied_bytes", progress.bytes()).with("of_bytes", of_bytes)
}
