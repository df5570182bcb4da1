//! The swap-in pipeline: a ring of block buffers on the device between a filling and a draining stage.
//!
//! As the seed describes it (`deprecated.md`, `swap_blocks`): the calling thread fills buffers from host memory, one
//! thread of the ring drains them into place, and both run at the same time. Buffers and thread are made by the first
//! swap-in that needs them and kept. Swap-ins that share the ring take turns; pieces leave it in the order they entered, so the waves
//! of a plan need no barrier. Not for: deciding whether to go this way (`route`).

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::Limit;
use super::run::Copying;
use super::workers::Workers;
use crate::device::{Copy, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Tensors;
use crate::model::Deadline;
use crate::plan::Piece;

/// Buffers in the ring.
const BUFFERS: usize = 4;

/// Keeps the ring between swap-ins and lends it to one at a time.
#[derive(Debug, Default)]
pub(super) struct RingOwner {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    lent: bool,
    kept: Option<Arc<Tensors>>,
    bytes: u64,
    /// The thread that drains. Its own, so that no other copy can keep a swap-in waiting for it.
    drainer: Option<Arc<Workers>>,
}

impl RingOwner {
    /// Bytes of device memory held.
    pub(super) fn bytes(&self) -> u64 {
        self.locked().bytes
    }

    /// Moves a copy through the ring, in pieces of at most `block_bytes`.
    pub(super) fn run(
        &self,
        copying: &Copying,
        device: &dyn Device,
        block_bytes: u64,
        limit: Limit,
    ) -> Result<()> {
        if copying.plan.waves().is_empty() {
            return Ok(());
        }
        let loan = self.borrow(device, block_bytes, limit.to_wait())?;
        limit.begin()?;
        let mut draining = Draining::start(copying, &loan, block_bytes);
        let fed = fill(copying, &loan.buffers, block_bytes, &draining, limit);
        let drained = draining.finish();
        // The reason that the draining stage gives tells more than that it ended.
        let outcome = drained.and(fed);
        // A draining stage that died leaves no failure: only bytes that were counted in place are in place.
        let missing = copying.plan.bytes().saturating_sub(copying.progress.bytes());
        if outcome.is_ok() && missing > 0 { Err(ended_early()) } else { outcome }
    }

    fn borrow(&self, device: &dyn Device, block_bytes: u64, deadline: Deadline) -> Result<Loan<'_>> {
        let mut state = self.locked();
        while state.lent {
            let left = deadline.left();
            if left.is_zero() {
                return Err(deadline.error("waiting for the swap-in ring"));
            }
            (state, _) = self.returned.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner);
        }
        let buffers = match &state.kept {
            Some(kept) if kept.tensor_bytes() >= block_bytes => kept.clone(),
            _ => {
                let bytes = block_bytes.saturating_mul(BUFFERS as u64);
                let region = Arc::new(device.allocate("llm_datadist swap-in ring", bytes)?);
                let offsets = (0..BUFFERS as u64).map(|buffer| buffer * block_bytes);
                let made = Arc::new(Tensors::carved(region, offsets, block_bytes, Box::new(()))?);
                state.bytes = bytes;
                state.kept.insert(made).clone()
            }
        };
        let drainer = match &state.drainer {
            Some(drainer) => drainer.clone(),
            None => state.drainer.insert(Arc::new(Workers::new("llm-ring", Some(1))?)).clone(),
        };
        state.lent = true;
        Ok(Loan { owner: self, buffers, drainer })
    }

    fn locked(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The ring, lent to one swap-in; returned on drop.
struct Loan<'a> {
    owner: &'a RingOwner,
    buffers: Arc<Tensors>,
    drainer: Arc<Workers>,
}

impl Drop for Loan<'_> {
    fn drop(&mut self) {
        self.owner.locked().lent = false;
        self.owner.returned.notify_one();
    }
}

/// The draining stage, as the filling stage sees it. Dropped, also by a panic, it has ended and holds nothing.
struct Draining {
    /// Buffers that were filled, in the order of the pieces; `None` once nothing follows.
    full: Option<SyncSender<usize>>,
    /// Buffers that are free, or why there will be no more. Closed once the stage has let go of the copy.
    free: Receiver<Result<usize>>,
}

/// What the draining stage works with. Dropped, also by a panic or unused, it lets go of the copy and then says so.
struct Stage {
    copying: Copying,
    buffers: Arc<Tensors>,
    full: Receiver<usize>,
    // Last, because fields drop in order.
    free: SyncSender<Result<usize>>,
}

impl Draining {
    fn start(copying: &Copying, loan: &Loan<'_>, block_bytes: u64) -> Self {
        let (to_stage, full) = sync_channel(BUFFERS);
        // Room for every buffer and a failure: the draining stage never waits to say something.
        let (to_fill, free) = sync_channel(BUFFERS + 1);
        for buffer in 0..BUFFERS {
            let _ = to_fill.send(Ok(buffer));
        }
        let stage = Stage { copying: copying.clone(), buffers: loan.buffers.clone(), full, free: to_fill };
        loan.drainer.spawn(move || {
            if let Err(error) = stage.drain(block_bytes) {
                let _ = stage.free.send(Err(error));
            }
        });
        Draining { full: Some(to_stage), free }
    }

    /// The next free buffer. A limit on the whole copy holds also while buffers come back at once.
    fn free(&self, limit: Limit) -> Result<usize> {
        let doing = "copying through the swap-in ring";
        limit.go_on(doing)?;
        let free = match limit {
            Limit::Start(_) => self.free.recv().map_err(|_| ended_early()),
            Limit::Whole(deadline) => self.free.recv_timeout(deadline.left()).map_err(|end| match end {
                RecvTimeoutError::Timeout => deadline.error(doing),
                RecvTimeoutError::Disconnected => ended_early(),
            }),
        };
        free?
    }

    /// Hands a buffer over.
    fn filled(&self, buffer: usize) -> Result<()> {
        let sent = self.full.as_ref().map(|full| full.send(buffer));
        if matches!(sent, Some(Ok(()))) { Ok(()) } else { Err(ended_early()) }
    }

    /// Says that nothing follows, waits for the end, and returns the failure that was not returned yet.
    fn finish(&mut self) -> Result<()> {
        self.full = None;
        let mut outcome = Ok(());
        // Ends once the stage has let go of the copy, not at its failure.
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

/// The pieces that go through the ring, in its order: each with its tensor, none above `block_bytes`.
fn pieces(copying: &Copying, block_bytes: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
    let whole = copying.plan.pieces(0, copying.plan.bytes());
    whole.flat_map(move |(tensor, whole)| blocks_of(whole, block_bytes).map(move |piece| (tensor, piece)))
}

/// The filling stage: host memory into the next free buffer.
fn fill(
    copying: &Copying,
    buffers: &Tensors,
    block_bytes: u64,
    draining: &Draining,
    limit: Limit,
) -> Result<()> {
    for (tensor, piece) in pieces(copying, block_bytes) {
        let buffer = draining.free(limit)?;
        let src = copying.source(tensor, piece)?;
        let dst = buffers.window(buffer, 0, piece.len)?;
        // The draining stage reads the buffer next, so it belongs in the caches.
        copying.copier.copy(&[Copy { src, dst }], copying.tuner.cached())?;
        draining.filled(buffer)?;
    }
    Ok(())
}

impl Stage {
    /// The draining stage: buffers into place, each then free again; ends after the first failure.
    fn drain(&self, block_bytes: u64) -> Result<()> {
        let Stage { copying, buffers, full, free } = self;
        let total = copying.plan.bytes();
        // Pieces leave the ring in the order they entered, which is that of the plan.
        let mut at = 0;
        for ((tensor, piece), buffer) in pieces(copying, block_bytes).zip(full) {
            let src = buffers.window(buffer, 0, piece.len)?;
            let dst = copying.target(tensor, piece)?;
            let kernel = copying.tuner.choose(total, piece.len);
            let started = Instant::now();
            copying.copier.copy(&[Copy { src, dst }], kernel)?;
            copying.tuner.learn(total, piece.len, kernel, piece.len, started.elapsed());
            copying.progress.done(at, at + piece.len);
            at += piece.len;
            // Whoever fills may have given up.
            let _ = free.send(Ok(buffer));
        }
        Ok(())
    }
}

#[cold]
fn ended_early() -> Error {
    Error::new(ErrorKind::System, "the draining stage of the swap-in ring ended early")
}

fn blocks_of(whole: Piece, block_bytes: u64) -> impl Iterator<Item = Piece> {
    (0..whole.len.div_ceil(block_bytes)).map(move |index| {
        let skip = index * block_bytes;
        Piece { src: whole.src + skip, dst: whole.dst + skip, len: (whole.len - skip).min(block_bytes) }
    })
}
