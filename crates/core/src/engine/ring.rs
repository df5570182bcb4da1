//! The swap-in pipeline: a ring of block buffers on the device between a filling and a draining stage.
//!
//! As the seed describes it (`deprecated.md`, `swap_blocks`): the calling thread fills buffers from host memory, one
//! thread of the ring drains them into place, and both run at the same time. Buffers and thread are made by the first
//! swap-in that needs them and kept. Swap-ins that share the ring take turns; pieces leave it in the order they entered, so the waves
//! of a plan need no barrier. Not for: deciding whether to go this way (`route`).

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::handover::HandOver;
use super::wave::Copying;
use super::workers::Workers;
use crate::device::{Copy, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::mem::Tensors;
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
        deadline: Deadline,
    ) -> Result<()> {
        if copying.plan.waves().is_empty() {
            return Ok(());
        }
        let loan = self.borrow(device, block_bytes, deadline)?;
        let mut draining = Draining::start(copying, &loan, block_bytes);
        let fed = fill(copying, &loan.buffers, block_bytes, &draining.counts, deadline);
        let outcome = draining.finish().and(fed);
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
            None => state.drainer.insert(Arc::new(Workers::new(Some(1))?)).clone(),
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
    counts: Arc<HandOver>,
    failure: Arc<Mutex<Option<Error>>>,
}

/// What the draining stage works with. Dropped, also by a panic or unused, it lets go of the copy and then says so.
struct Stage {
    copying: Copying,
    buffers: Arc<Tensors>,
    failure: Arc<Mutex<Option<Error>>>,
    // Last, because fields drop in order.
    end: End,
}

struct End(Arc<HandOver>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.end();
    }
}

impl Draining {
    fn start(copying: &Copying, loan: &Loan<'_>, block_bytes: u64) -> Self {
        let counts: Arc<HandOver> = Arc::default();
        let failure: Arc<Mutex<Option<Error>>> = Arc::default();
        let stage = Stage {
            copying: copying.clone(),
            buffers: loan.buffers.clone(),
            failure: failure.clone(),
            end: End(counts.clone()),
        };
        loan.drainer.spawn(move || {
            if let Err(error) = stage.drain(block_bytes) {
                *stage.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            }
        });
        Draining { counts, failure }
    }

    /// Says that nothing follows, waits for the end, and returns the failure.
    fn finish(&mut self) -> Result<()> {
        self.counts.close();
        self.counts.wait_end();
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).take().map_or(Ok(()), Err)
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

/// The buffer of the `count`-th piece.
fn buffer(count: u64) -> usize {
    usize::try_from(count % BUFFERS as u64).unwrap_or(0)
}

/// The filling stage: host memory into the next free buffer.
fn fill(
    copying: &Copying,
    buffers: &Tensors,
    block_bytes: u64,
    counts: &HandOver,
    deadline: Deadline,
) -> Result<()> {
    for (count, (tensor, piece)) in (0..).zip(pieces(copying, block_bytes)) {
        let too_late = || deadline.error("copying through the swap-in ring");
        let free = counts.wait_free(count, BUFFERS as u64, deadline);
        // The limit holds also while buffers come back at once.
        if free.is_none() || deadline.left().is_zero() {
            return Err(too_late());
        }
        if free == Some(false) {
            return Err(ended_early());
        }
        let src = copying.source(tensor, piece)?;
        let dst = buffers.window(buffer(count), 0, piece.len)?;
        // The draining stage reads the buffer next, so it belongs in the caches.
        copying.copier.copy(&[Copy { src, dst }], copying.tuner.cached())?;
        counts.filled();
    }
    Ok(())
}

impl Stage {
    /// The draining stage: buffers into place, each then free again; ends after the first failure.
    fn drain(&self, block_bytes: u64) -> Result<()> {
        let Stage { copying, buffers, end: End(counts), .. } = self;
        let total = copying.plan.bytes();
        // Pieces leave the ring in the order they entered, which is that of the plan.
        let mut at = 0;
        for (count, (tensor, piece)) in (0..).zip(pieces(copying, block_bytes)) {
            if !counts.wait_filled(count) {
                return Ok(());
            }
            let src = buffers.window(buffer(count), 0, piece.len)?;
            let dst = copying.target(tensor, piece)?;
            let kernel = copying.tuner.choose(total, piece.len);
            let started = Instant::now();
            copying.copier.copy(&[Copy { src, dst }], kernel)?;
            copying.tuner.learn(total, piece.len, kernel, piece.len, started.elapsed());
            copying.progress.done(at, at + piece.len);
            at += piece.len;
            counts.drained();
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
