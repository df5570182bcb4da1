//! The swap-in pipeline: a ring of block buffers on the device between a filling and a draining stage.
//!
//! As the seed describes it (`deprecated.md`, `swap_blocks`): the calling thread fills buffers from host memory, one
//! thread of the ring drains them into place, and both run at the same time. Buffers and thread are made by the first
//! swap-in that needs them and kept. Swap-ins that share the ring take turns; pieces leave it in the order they entered, so the waves
//! of a plan need no barrier. Not for: deciding whether to go this way (`route`).

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::wave::Copying;
use super::workers::Workers;
use crate::device::{Copy, Device};
use crate::error::{Error, ErrorKind, Result};
use crate::id::Deadline;
use crate::mem::Tensors;
use crate::mem::kernel::Kernel;
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

/// What the draining stage is told: which buffer, and where its bytes belong.
struct Filled {
    buffer: usize,
    tensor: usize,
    piece: Piece,
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
        let mut draining = Draining::start(copying, &loan);
        let fed = fill(copying, &loan.buffers, block_bytes, &draining, deadline);
        let outcome = draining.finish().and(fed);
        // A draining stage that died leaves no message: only bytes that were counted in place are in place.
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
    /// Gone once nothing follows.
    filled: Option<Sender<Filled>>,
    free: Receiver<Result<usize>>,
}

impl Draining {
    fn start(copying: &Copying, loan: &Loan<'_>) -> Self {
        let (filled, to_drain) = channel();
        let (drained, free) = channel();
        for buffer in 0..BUFFERS {
            // The receiver is right here, so it cannot be gone.
            let _ = drained.send(Ok(buffer));
        }
        let (stage, buffers) = (copying.clone(), loan.buffers.clone());
        loan.drainer.spawn(move || {
            drain(&stage, &buffers, &to_drain, &drained);
            // The sender goes last: its end says that nothing of the copy is held here any more.
            drop((stage, buffers));
            drop(drained);
        });
        Draining { filled: Some(filled), free }
    }

    /// A buffer to fill. The limit holds also while buffers come back at once.
    fn next_free(&self, deadline: Deadline) -> Result<usize> {
        let left = deadline.left();
        let too_late = || deadline.error("copying through the swap-in ring");
        match self.free.recv_timeout(left) {
            Ok(Ok(_)) if left.is_zero() => Err(too_late()),
            Ok(buffer) => buffer,
            Err(RecvTimeoutError::Timeout) => Err(too_late()),
            Err(RecvTimeoutError::Disconnected) => Err(ended_early()),
        }
    }

    fn send(&self, filled: Filled) {
        if let Some(sender) = &self.filled {
            // Fails only if the draining stage is gone; then the next `next_free` says so.
            let _ = sender.send(filled);
        }
    }

    /// Says that nothing follows, waits for the end, and returns the first failure.
    fn finish(&mut self) -> Result<()> {
        self.filled = None;
        let mut outcome = Ok(());
        while let Ok(drained) = self.free.recv() {
            outcome = outcome.and(drained.map(|_| ()));
        }
        outcome
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        let _ = self.finish();
    }
}

/// The filling stage: host memory into the next free buffer.
fn fill(
    copying: &Copying,
    buffers: &Tensors,
    block_bytes: u64,
    draining: &Draining,
    deadline: Deadline,
) -> Result<()> {
    for wave in copying.plan.waves() {
        let bytes = wave.tensor_bytes().saturating_mul(u64::from(copying.plan.num_tensors()));
        for (tensor, whole) in wave.across_tensors(0, bytes) {
            for piece in blocks_of(whole, block_bytes) {
                let buffer = draining.next_free(deadline)?;
                let src = copying.source(tensor, piece)?;
                let dst = buffers.window(buffer, 0, piece.len)?;
                // The draining stage reads the buffer next, so it belongs in the caches.
                copying.copier.copy(&[Copy { src, dst }], Kernel::PLAIN)?;
                draining.send(Filled { buffer, tensor, piece });
            }
        }
    }
    Ok(())
}

/// The draining stage: buffers into place, each then free again; ends after the first failure.
fn drain(copying: &Copying, buffers: &Tensors, to_drain: &Receiver<Filled>, drained: &Sender<Result<usize>>) {
    let total = copying.plan.bytes();
    // Pieces leave the ring in the order they entered, which is that of the plan.
    let mut at = 0;
    for Filled { buffer, tensor, piece } in to_drain {
        let place = || {
            let src = buffers.window(buffer, 0, piece.len)?;
            let dst = copying.target(tensor, piece)?;
            let kernel = copying.tuner.choose(total, piece.len);
            copying.tuner.count(kernel, piece.len);
            copying.copier.copy(&[Copy { src, dst }], kernel)
        };
        let placed = place();
        let failed = placed.is_err();
        if !failed {
            copying.progress.done(at, at + piece.len);
            at += piece.len;
        }
        if drained.send(placed.map(|()| buffer)).is_err() || failed {
            return;
        }
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
