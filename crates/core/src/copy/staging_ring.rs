//! The staging ring of swap-ins: block buffers on the device, which the calling thread fills while copy workers empty others.
//!
//! It follows the original's documentation (`deprecated.md`, `swap_blocks`): each byte is copied from host memory into a buffer, and from
//! there into place. The first swap-in that needs the buffers creates them; later ones reuse them. Swap-ins that share the ring
//! take turns.

use std::collections::VecDeque;
use std::sync::Arc;

use super::Limit;
use super::run::Copying;
use super::workers::{SharedJob, Workers};
use crate::device::{Copy, Device};
use crate::error::Result;
use crate::memory::Tensors;
use crate::memory::kernels::Kernel;
use crate::model::Deadline;
use crate::plan::{CopyPlan, Piece, Side};
use crate::sync::{Condvar, Mutex, OnDrop};

/// Number of buffers in the ring.
const BUFFERS: usize = 4;

/// Keeps the ring between swap-ins and gives it to one swap-in at a time.
#[derive(Debug, Default)]
pub(super) struct RingOwner {
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct State {
    in_use: bool,
    kept: Option<Arc<Tensors>>,
    bytes: u64,
}

impl RingOwner {
    /// Bytes of device memory that the ring holds.
    pub(super) fn bytes(&self) -> u64 {
        self.state.lock().bytes
    }

    /// Moves a copy through the ring, in pieces of at most `block_bytes` bytes.
    pub(super) fn run(
        &self,
        copying: Copying,
        (device, workers): (&dyn Device, &Workers),
        block_bytes: u64,
        limit: Limit,
    ) -> Result<()> {
        if copying.plan.is_empty() {
            return Ok(());
        }
        let (_returning, buffers) = self.borrow(device, block_bytes, limit.deadline())?;
        limit.begin()?;
        let (stages, plan) = (Arc::new(Stages { buffers, copying: copying.clone() }), copying.plan);
        // The jobs that empty buffers, oldest first. Their drop waits for them, so they end before the ring is returned.
        let mut emptying: VecDeque<SharedJob> = VecDeque::with_capacity(BUFFERS);
        let mut at = 0;
        for (index, (tensor, piece)) in pieces(&plan, block_bytes).enumerate() {
            limit.check("copying through the swap-in ring")?;
            let (buffer, position) = (index % BUFFERS, at);
            if emptying.len() == BUFFERS {
                emptying.pop_front().map_or(Ok(()), SharedJob::finish)?;
            }
            stages.fill(buffer, tensor, piece)?;
            let stages = stages.clone();
            let empty = move |_| stages.empty(buffer, tensor, piece, position);
            emptying.push_back(workers.start(Arc::new(empty), 1, usize::from(workers.count() > 1)));
            at += piece.len;
        }
        emptying.into_iter().try_for_each(SharedJob::finish)
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

/// The copies into the buffers, and out of them.
struct Stages {
    buffers: Arc<Tensors>,
    copying: Copying,
}

impl Stages {
    /// Copies a piece from host memory into a buffer.
    fn fill(&self, buffer: usize, tensor: usize, piece: Piece) -> Result<()> {
        let Copying { plan, src, copier, .. } = &self.copying;
        let src = src.window(plan.tensors(Side::Source).tensor(tensor), piece.src, piece.len)?;
        let dst = self.buffers.window(buffer, 0, piece.len)?;
        // The buffer is read next, so its bytes should stay in the CPU caches.
        copier.copy(&[Copy::one(src, dst)], Kernel::cached())
    }

    /// Copies a piece, which starts at position `at` of the plan, from a buffer into place.
    fn empty(&self, buffer: usize, tensor: usize, piece: Piece, at: u64) -> Result<()> {
        let Copying { plan, dst, copier, counted, progress, .. } = &self.copying;
        let src = self.buffers.window(buffer, 0, piece.len)?;
        let dst = dst.window(plan.tensors(Side::Destination).tensor(tensor), piece.dst, piece.len)?;
        let kernel = Kernel::for_bytes(plan.bytes());
        copier.copy(&[Copy::one(src, dst)], kernel)?;
        counted.add(kernel, piece.len);
        progress.done(at, at + piece.len);
        Ok(())
    }
}

/// Returns the pieces that pass the ring, in the order of the plan: each with its tensor, and of at most `block_bytes` bytes.
fn pieces(plan: &CopyPlan, block_bytes: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
    plan.pieces(0, plan.bytes()).flat_map(move |(tensor, whole)| {
        (0..whole.len.div_ceil(block_bytes)).map(move |index| {
            let skip = index * block_bytes;
            let len = (whole.len - skip).min(block_bytes);
            (tensor, Piece { src: whole.src + skip, dst: whole.dst + skip, len })
        })
    })
}
