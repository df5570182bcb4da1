//! The copy engine, which runs plans on persistent threads.
//!
//! Copies, swaps, pulls, pushes and layers are plans. `plan` decides which bytes move, `cache` pins the rows,
//! and `validate` checks the request. This module only moves the bytes.

use std::sync::Arc;

use super::copy_threads::CopyThreads;
use super::counted_bytes::CountedBytes;
use super::host_buffers::HostBuffers;
use super::limit::Limit;
use super::progress::{Progress, with_copied_bytes};
use super::reader_threads::Readers;
use super::route::{PlacedTensors, Route, Staging};
use super::staging_ring::RingOwner;
use super::workers::Workers;
use crate::config::Config;
use crate::device::DeviceSet;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::{Access, PeerProcess, Probe};
use crate::model::Deadline;
use crate::plan::CopyPlan;
use crate::sync::Mutex;
use crate::threads::EngineNumber;

/// Runs plans on persistent worker threads.
#[derive(Debug)]
pub struct CopyEngine {
    pub(super) devices: DeviceSet,
    workers: Workers,
    pub(super) readers: Readers,
    counted: Arc<CountedBytes>,
    ring: RingOwner,
    /// For bytes that a device and a path cannot pass to each other directly.
    pub(super) host_buffers: Arc<HostBuffers>,
    /// Threads that wait for streams, which copy workers must not do.
    streamers: Workers,
    /// Kept for the engines that open while this one is open.
    _threads: Arc<CopyThreads>,
}

impl CopyEngine {
    /// Creates an engine over `devices` with the workers that `config` selects, on the threads that all engines of this process
    /// share.
    pub(crate) fn of_process(engine: EngineNumber, config: &Config, devices: DeviceSet) -> Self {
        Self::with_threads(CopyThreads::of_process(), engine, config, devices)
    }

    /// Creates an engine with threads of its own.
    #[cfg(any(test, feature = "testing"))]
    pub fn new(config: &Config, devices: DeviceSet) -> Self {
        Self::with_threads(Arc::new(CopyThreads::new()), EngineNumber::next(), config, devices)
    }

    fn with_threads(
        threads: Arc<CopyThreads>,
        engine: EngineNumber,
        config: &Config,
        devices: DeviceSet,
    ) -> Self {
        let warned = Arc::default();
        let count = config.copy_workers.unwrap_or(Config::DEFAULT_WORKERS);
        let workers = Workers::new(&threads.copiers, engine, count, Arc::clone(&warned));
        let streams = config.links.max_streams(1 + config.links.addresses.len());
        CopyEngine {
            devices,
            readers: Readers::new(&threads.readers, engine, workers.count()),
            workers,
            counted: Arc::default(),
            ring: RingOwner::default(),
            host_buffers: Arc::default(),
            streamers: Workers::new(&threads.streamers, engine, streams, warned),
            _threads: threads,
        }
    }

    /// Returns the workers that run the parts of a transfer through several streams.
    pub fn streamers(&self) -> &Workers {
        &self.streamers
    }

    /// Sets whether copies and streams behave as if no thread could be started.
    #[cfg(feature = "testing")]
    pub fn refuse_threads(&self, refuse: bool) {
        self.workers.refuse_threads(refuse);
        self.streamers.refuse_threads(refuse);
    }

    /// Returns the number of idle host buffers.
    #[cfg(feature = "testing")]
    pub fn idle_host_buffers(&self) -> usize {
        self.host_buffers.idle()
    }

    /// Returns the threads that copy, including the calling thread.
    pub fn workers(&self) -> &Workers {
        &self.workers
    }

    /// Returns the bytes of all copies.
    pub fn counted(&self) -> &Arc<CountedBytes> {
        &self.counted
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

    /// Moves every byte of `plan` within this process, and returns the route that the bytes took.
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
    ) -> Result<Route> {
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
            counted: self.counted.clone(),
            progress: progress.clone(),
            // The caller holds the pins.
            held: progress.clone(),
        };
        let ended = match route {
            Route::Direct => copy.direct(&self.workers, limit),
            Route::Ring => self.ring.run(copy, (device.as_ref(), &self.workers), staging.buffer_bytes, limit),
        };
        ended.map_err(|error| with_copied_bytes(error, progress, bytes))?;
        Ok(route)
    }
}
