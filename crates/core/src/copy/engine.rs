//! The copy engine: the only thing that moves bytes. Copies, swaps, pulls, pushes and layers are plans it runs.
//!
//! Not for: which bytes (`plan`), who may touch them (`table::pin`), or whether a request makes sense (`check`).

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::kernel_choice::Tuner;
use super::limit::Limit;
use super::progress::{Progress, with_copied_bytes};
use super::route::{End, Route, Staging};
use super::run::Held;
use super::workers::{Work, Workers};
use super::{reader_threads, staging_ring};
use crate::config::Config;
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, PeerProcess, Probe};
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
    peer_tuner: Arc<Tuner>,
    /// Buffers of the ring lie in the caches.
    ring_tuner: Arc<Tuner>,
    ring: staging_ring::RingOwner,
    /// Wait for sockets, which those that copy must not; started by the first transfer that has use for them.
    streamers: OnceLock<Workers>,
    streams: usize,
}

impl CopyEngine {
    /// An engine with the workers and choices of `config`, over `devices`.
    pub fn new(config: &Config, devices: DeviceSet) -> Result<Self> {
        let tuner = Tuner::new(config.kernel)?;
        let workers = Workers::new("llm-copy", config.copy_workers)?;
        Ok(CopyEngine {
            devices,
            readers: reader_threads::Readers::new(workers.count()),
            workers,
            peer_tuner: Arc::new(tuner.beside()),
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

    /// Opens process `pid`, as [`PeerProcess::open`] does. `Err` once `deadline` has passed, also if its memory does not
    /// answer.
    pub fn open_process(&self, pid: i32, probe: Probe, deadline: Deadline) -> Result<Arc<PeerProcess>> {
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
        let route = super::route::choose(&self.devices, src, dst, staging.path)?;
        src.0.check_mapped(Access::Read)?;
        dst.0.check_mapped(Access::Write)?;
        let plan = plan.into();
        let bytes = plan.bytes();
        let tuner = match route {
            Route::Ring => &self.ring_tuner,
            Route::Direct if src.0.reach().foreign() => &self.peer_tuner,
            Route::Direct => &self.tuner,
        };
        let copy = super::run::Copying {
            plan,
            src: src.0.clone(),
            dst: dst.0.clone(),
            copier: super::route::copier(&self.devices, src, dst),
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
                let device = super::route::device(&self.devices, src, dst).as_ref();
                self.ring.run(&copy, device, staging.buffer_bytes, limit)
            }
        };
        ended.map_err(|error| with_copied_bytes(error, progress, bytes))?;
        Ok(Outcome { bytes, route })
    }
}

/// Another process being opened.
struct Opening {
    pid: i32,
    probe: Probe,
    opened: Mutex<Option<Result<Arc<PeerProcess>>>>,
}

impl Work for Opening {
    fn unit(&self, _: usize) -> Result<()> {
        let opened = PeerProcess::open(self.pid, self.probe);
        *self.opened.lock().unwrap_or_else(PoisonError::into_inner) = Some(opened);
        Ok(())
    }
}
