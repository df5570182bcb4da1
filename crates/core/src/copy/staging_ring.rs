//! The swap-in pipeline: a ring of block buffers on the device between a filling stage and a draining stage.
//!
//! It follows the original's documentation (`deprecated.md`, `swap_blocks`): the calling thread fills buffers
//! from host memory, while a thread of the ring drains them into place. The first swap-in that needs the
//! buffers creates them; later ones reuse them. Swap-ins that share the ring take turns.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Instant;

use super::Limit;
use super::run::Copying;
use super::workers::{WorkerThreads, Workers};
use crate::device::{Copy, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Tensors;
use crate::model::Deadline;
use crate::plan::Piece;
use crate::sync::{Condvar, Mutex, OnDrop};
use crate::threads::EngineNumber;

/// Number of buffers in the ring.
const BUFFERS: usize = 4;

/// Keeps the ring between swap-ins and gives it to one swap-in at a time.
#[derive(Debug)]
pub(super) struct RingOwner {
    state: Mutex<State>,
    returned: Condvar,
    /// Has a thread for each ring that is in use, so no other copy can delay a swap-in.
    drainer: Workers,
}

#[derive(Debug, Default)]
struct State {
    in_use: bool,
    kept: Option<Arc<Tensors>>,
    bytes: u64,
}

impl RingOwner {
    /// Creates the ring of an engine, which a thread of `drainers` drains.
    pub(super) fn new(drainers: &Arc<WorkerThreads>, engine: EngineNumber) -> RingOwner {
        // One swap-in uses the ring at a time, so there are no more threads than rings.
        let drainer = Workers::new(drainers, engine, usize::MAX, Arc::default());
        RingOwner { state: Mutex::default(), returned: Condvar::new(), drainer }
    }

    /// Sets whether the ring behaves as if its thread could not be started.
    #[cfg(feature = "testing")]
    pub(super) fn refuse_threads(&self, refuse: bool) {
        self.drainer.refuse_threads(refuse);
    }

    /// Bytes of device memory that the ring holds.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Moves a copy through the ring, in pieces of at most `block_bytes` bytes.
    pub(super) fn run(
        &self,
        copying: &Copying,
        device: &dyn Device,
        block_bytes: u64,
        limit: Limit,
    ) -> Result<()> {
        if copying.plan.is_empty() {
            return Ok(());
        }
        let (_returning, buffers) = self.borrow(device, block_bytes, limit.deadline())?;
        limit.begin()?;
        let mut draining = Draining::start(copying, (&buffers, &self.drainer), block_bytes)?;
        let fed = fill(copying, &buffers, block_bytes, &draining, limit);
        let drained = draining.finish();
        // The error of the draining stage explains more than the fact that it ended.
        let outcome = drained.and(fed);
        // A draining stage that panicked leaves no error, so the bytes that were counted as in place decide.
        let missing = copying.plan.bytes().saturating_sub(copying.progress.bytes());
        if outcome.is_ok() && missing > 0 { Err(ended_early()) } else { outcome }
    }

    /// Waits for the ring, and returns its buffers with the guard that returns them when it is dropped.
    fn borrow(
        &self,
        device: &dyn Device,
        block_bytes: u64,
        deadline: Deadline,
    ) -> Result<(impl Drop, Arc<Tensors>)> {
        let mut state = self.state.lock();
        while state.in_use {
            let left = deadline.left();
            if left.is_zero() {
                return Err(deadline.error("waiting for the swap-in ring"));
            }
            (state, _) = self.returned.wait_timeout(state, left);
        }
        let buffers = match &state.kept {
            Some(kept) if kept.tensor_bytes() >= block_bytes => kept.clone(),
            _ => {
                let bytes = block_bytes.saturating_mul(BUFFERS as u64);
                let region = Arc::new(device.allocate("llm_datadist swap-in ring", bytes)?);
                let offsets = (0..BUFFERS as u64).map(|buffer| buffer * block_bytes);
                let made = Arc::new(Tensors::carved(region, offsets, block_bytes, ())?);
                state.bytes = bytes;
                state.kept.insert(made).clone()
            }
        };
        state.in_use = true;
        let returning = OnDrop(|| {
            self.state.lock().in_use = false;
            self.returned.notify_one();
        });
        Ok((returning, buffers))
    }
}

/// The draining stage as the filling stage sees it. After drop, even during a panic, the stage has ended and
/// holds nothing.
struct Draining {
    /// Sends filled buffers in the order of the pieces; `None` once no buffer follows.
    full: Option<SyncSender<usize>>,
    /// Receives free buffers, or the error after which there are none. Closed once the stage has released the
    /// copy.
    free: Receiver<Result<usize>>,
}

/// What the draining stage works with. Drop, even during a panic or before the stage ran, releases the copy
/// and then closes `free`.
struct Stage {
    copying: Copying,
    buffers: Arc<Tensors>,
    full: Receiver<usize>,
    // Last, because fields are dropped in order.
    free: SyncSender<Result<usize>>,
}

impl Draining {
    fn start(
        copying: &Copying,
        (buffers, drainer): (&Arc<Tensors>, &Workers),
        block_bytes: u64,
    ) -> Result<Self> {
        let (to_stage, full) = sync_channel(BUFFERS);
        // Room for every buffer and one error, so the draining stage never blocks when it sends.
        let (to_fill, free) = sync_channel(BUFFERS + 1);
        for buffer in 0..BUFFERS {
            let _ = to_fill.send(Ok(buffer));
        }
        let stage = Stage { copying: copying.clone(), buffers: buffers.clone(), full, free: to_fill };
        let begun = drainer.spawn(move || {
            if let Err(error) = stage.drain(block_bytes) {
                let _ = stage.free.send(Err(error));
            }
        });
        begun.map_err(|error| Error::no_thread("the thread of the swap-in ring", error))?;
        Ok(Draining { full: Some(to_stage), free })
    }

    /// Returns the next free buffer. A limit on the whole copy is checked even if buffers return at once.
    fn free(&self, limit: Limit) -> Result<usize> {
        let doing = "copying through the swap-in ring";
        limit.check(doing)?;
        let free = match limit {
            Limit::Start(_) => self.free.recv().map_err(|_| ended_early()),
            Limit::Whole(deadline) => self.free.recv_timeout(deadline.left()).map_err(|end| match end {
                RecvTimeoutError::Timeout => deadline.error(doing),
                RecvTimeoutError::Disconnected => ended_early(),
            }),
        };
        free?
    }

    /// Passes a filled buffer to the draining stage.
    fn filled(&self, buffer: usize) -> Result<()> {
        let sent = self.full.as_ref().map(|full| full.send(buffer));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(ended_early()) }
    }

    /// Closes the input, waits until the stage has ended, and returns its error if that was not returned yet.
    fn finish(&mut self) -> Result<()> {
        self.full = None;
        let mut outcome = Ok(());
        // The loop ends once the stage has released the copy, not when it reports an error.
        for free in &self.free {
            outcome = outcome.and(free.map(drop));
        }
        outcome
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// Returns the pieces in the order in which they pass the ring: each with its tensor, and of at most
/// `block_bytes` bytes.
fn pieces(copying: &Copying, block_bytes: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
    let whole = copying.plan.pieces(0, copying.plan.bytes());
    whole.flat_map(move |(tensor, whole)| blocks_of(whole, block_bytes).map(move |piece| (tensor, piece)))
}

/// The filling stage: copies host memory into the next free buffer.
fn fill(
    copying: &Copying,
    buffers: &Tensors,
    block_bytes: u64,
    draining: &Draining,
    limit: Limit,
) -> Result<()> {
    for (tensor, piece) in pieces(copying, block_bytes) {
        let buffer = draining.free(limit)?;
        let src = copying.read_window(tensor, piece)?;
        let dst = buffers.window(buffer, 0, piece.len)?;
        // The draining stage reads the buffer next, so its bytes should stay in the CPU caches.
        copying.copier.copy(&[Copy::one(src, dst)], copying.tuner.cached())?;
        draining.filled(buffer)?;
    }
    Ok(())
}

impl Stage {
    /// The draining stage: copies buffers into place and frees them. It ends after the first failure.
    fn drain(&self, block_bytes: u64) -> Result<()> {
        let Stage { copying, buffers, full, free } = self;
        let total = copying.plan.bytes();
        // Pieces leave the ring in the order in which they entered it, which is the order of the plan.
        let mut at = 0;
        for ((tensor, piece), buffer) in pieces(copying, block_bytes).zip(full) {
            let src = buffers.window(buffer, 0, piece.len)?;
            let dst = copying.write_window(tensor, piece)?;
            let kernel = copying.tuner.choose(copying.source, total, piece.len);
            let started = Instant::now();
            copying.copier.copy(&[Copy::one(src, dst)], kernel)?;
            let took = started.elapsed();
            copying.tuner.learn(copying.source, total, piece.len, kernel, piece.len, took);
            copying.progress.done(at, at + piece.len);
            at += piece.len;
            // Fails if the filling stage has given up.
            let _ = free.send(Ok(buffer));
        }
        Ok(())
    }
}

fn ended_early() -> Error {
    Error::new(ErrorKind::System, "the draining stage of the swap-in ring ended early")
}

fn blocks_of(whole: Piece, block_bytes: u64) -> impl Iterator<Item = Piece> {
    (0..whole.len.div_ceil(block_bytes)).map(move |index| {
        let skip = index * block_bytes;
        Piece { src: whole.src + skip, dst: whole.dst + skip, len: (whole.len - skip).min(block_bytes) }
    })
}
