//! The copy engine, which runs plans on persistent threads.
//!
//! Copies, swaps, pulls, pushes and layers are plans. `plan` decides which bytes move, `cache` pins the rows,
//! and `validate` checks the request. This module only moves the bytes.

use std::sync::Arc;

use super::copy_threads::CopyThreads;
use super::host_buffers::HostBuffers;
use super::limit::Limit;
use super::progress::{Progress, with_copied_bytes};
use super::route::{PlacedTensors, Route, Staging};
use super::tuner::{Source, Tuner};
use super::unit_job::Work;
use super::workers::Workers;
use super::{reader_threads, staging_ring};
use crate::config::Config;
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, PeerProcess, Probe};
use crate::model::Deadline;
use crate::plan::CopyPlan;
use crate::sync::Mutex;
use crate::threads::EngineNumber;

/// Result of a copy that succeeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyOutcome {
    /// Bytes moved. Each byte counts once.
    pub bytes: u64,
    /// Route that the bytes took.
    pub route: Route,
}

/// Runs plans on persistent worker threads.
#[derive(Debug)]
pub struct CopyEngine {
    devices: DeviceSet,
    workers: Workers,
    readers: reader_threads::Readers,
    tuner: Arc<Tuner>,
    ring: staging_ring::RingOwner,
    host_buffers: Arc<HostBuffers>,
    /// Threads that wait for streams, which copy workers must not do.
    streamers: Workers,
    /// Kept for the engines that open while this one is open.
    _threads: Arc<CopyThreads>,
}

impl CopyEngine {
    /// Creates an engine over `devices` with the workers and kernels that `config` selects, on the threads that all engines of this
    /// process share.
    ///
    /// Returns `Err(NotEnabled)` if this CPU does not have the kernel that `config` forces.
    pub(crate) fn of_process(engine: EngineNumber, config: &Config, devices: DeviceSet) -> Result<Self> {
        Self::on(CopyThreads::of_process(), engine, config, devices)
    }

    /// Creates an engine with threads of its own.
    #[cfg(any(test, feature = "testing"))]
    pub fn new(config: &Config, devices: DeviceSet) -> Result<Self> {
        Self::on(Arc::new(CopyThreads::new()), EngineNumber::next(), config, devices)
    }

    fn on(
        threads: Arc<CopyThreads>,
        engine: EngineNumber,
        config: &Config,
        devices: DeviceSet,
    ) -> Result<Self> {
        let tuner = Tuner::new(config.kernel)?;
        let warned = Arc::default();
        let count = config.copy_workers.unwrap_or(Config::DEFAULT_WORKERS);
        let workers = Workers::new(&threads.copiers, engine, count, Arc::clone(&warned));
        let streams = config.links.max_streams(1 + config.links.addresses.len());
        Ok(CopyEngine {
            devices,
            readers: reader_threads::Readers::new(&threads.readers, engine, workers.count()),
            workers,
            tuner: Arc::new(tuner),
            ring: staging_ring::RingOwner::new(&threads.drainers, engine),
            host_buffers: Arc::default(),
            streamers: Workers::new(&threads.streamers, engine, streams, warned),
            _threads: threads,
        })
    }

    /// Returns the workers that run the parts of a transfer through several streams.
    pub fn streamers(&self) -> &Workers {
        &self.streamers
    }

    /// Sets whether copies, streams and the staging ring behave as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.workers.refuse_threads(refuse);
        self.streamers.refuse_threads(refuse);
        self.ring.refuse_threads(refuse);
    }

    /// Number of threads that copy, including the calling thread.
    pub fn worker_count(&self) -> usize {
        self.workers.count()
    }

    /// Runs units `0..units` of `work`, which is not a copy, on the copy workers and the calling thread.
    /// Returns when no thread touches `work` any more (see [`Workers::run`]).
    pub fn spread(&self, work: Arc<impl Work>, units: usize, limit: impl Into<Limit>) -> Result<()> {
        self.workers.run(work, units, limit)
    }

    /// Returns the threads that read memory of other processes.
    pub(super) fn readers(&self) -> &reader_threads::Readers {
        &self.readers
    }

    /// Returns the threads that copy.
    pub(super) fn copy_workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns the buffers for bytes that a device and a path cannot pass to each other directly.
    pub(super) fn host_buffers(&self) -> &Arc<HostBuffers> {
        &self.host_buffers
    }

    /// Returns the devices whose memory the engine copies.
    pub(super) fn devices(&self) -> &DeviceSet {
        &self.devices
    }

    /// Returns the choice of kernels, which also counts the bytes of all copies.
    pub fn tuner(&self) -> &Arc<Tuner> {
        &self.tuner
    }

    /// Bytes of device memory that the staging ring holds.
    pub fn ring_bytes(&self) -> u64 {
        self.ring.bytes()
    }

    /// Opens process `pid` as [`PeerProcess::open`] does, on a reader thread. Returns `Err` once `deadline`
    /// has passed, even if the memory of that process does not answer.
    pub fn open_process(&self, pid: i32, probe: Probe, deadline: Deadline) -> Result<Arc<PeerProcess>> {
        let opened = Arc::new(Mutex::new(None));
        let result = opened.clone();
        let open = move |_| {
            *result.lock() = Some(PeerProcess::open(pid, probe)?);
            Ok(())
        };
        self.readers.run(pid, Arc::new(open), 1, 1, (deadline, None))?;
        let opened = opened.lock().take();
        opened.ok_or_else(|| Error::new(ErrorKind::System, "the peer's process was not opened"))
    }

    /// Moves every byte of `plan` within this process.
    ///
    /// The caller must hold pins on both ends until this returns. Memory of a peer is read by a [`DataPath`](super::DataPath).
    /// `progress` records which bytes are in place. `limit` decides whether a copy that has begun is finished. An error carries the
    /// fact `copied_bytes`. It counts whole units, so it never exceeds what arrived.
    pub fn run(
        &self,
        plan: CopyPlan,
        src: PlacedTensors<'_>,
        dst: PlacedTensors<'_>,
        staging: Staging,
        limit: impl Into<Limit>,
        progress: &Arc<Progress>,
    ) -> Result<CopyOutcome> {
        let limit = limit.into();
        let route = super::route::choose(&self.devices, src, dst, staging.path)?;
        src.0.check_present(Access::Read)?;
        dst.0.check_present(Access::Write)?;
        let bytes = plan.bytes();
        let device = super::route::device(&self.devices, src, dst);
        let copy = super::run::Copying {
            plan,
            src: src.0.clone(),
            dst: dst.0.clone(),
            copier: device.clone(),
            tuner: self.tuner.clone(),
            source: if route == Route::Ring { Source::Buffer } else { Source::Own },
            progress: progress.clone(),
            // The caller holds the pins.
            held: progress.clone(),
        };
        let ended = match route {
            Route::Direct => copy.direct(&self.workers, limit),
            Route::Ring => self.ring.run(&copy, device.as_ref(), staging.buffer_bytes, limit),
        };
        ended.map_err(|error| with_copied_bytes(error, progress, bytes))?;
        Ok(CopyOutcome { bytes, route })
    }
}
