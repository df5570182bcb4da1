//! Chooses the copy kernel by speeds that are measured on this machine while it copies.
//!
//! Small copies use ordinary stores: they fit into the CPU caches, and the caller will soon read them. For
//! large copies no rule holds on every CPU. So each class of sources and piece sizes keeps the recent speed of
//! every kernel, uses the fastest, and occasionally tries another. All kernels copy the same bytes, so the
//! choice affects only speed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::KernelChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::kernels::Kernel;

/// Copies of fewer bytes in total stay in the CPU caches.
const LARGE: u64 = 4 << 20;
/// Units that each kernel copies before the first decision.
const FIRST_UNITS: u64 = 8;
/// One unit in this many tries the kernels in turn, even those that seem slower.
const RETRY_EVERY: u64 = 128;
/// Piece sizes in bytes at which a new class starts.
const CLASSES: [u64; 6] = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20];
/// Index of the kernel for copies that stay in the CPU caches: ordinary stores, with four pages in flight. In
/// measurements, it was 10 to 50 % faster than the C library's copy if the source was not cached. If the
/// source was cached, it was slower, but by less than that.
const SMALL: usize = 1;
/// Maximum number of kernels.
const KERNELS: usize = 4;

/// The memory that a copy reads. The speed of one says nothing about the speed of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Memory of this process.
    Own,
    /// Memory of another process, which has its own page tables.
    Peer,
    /// A buffer of the engine, which stays in the CPU caches.
    Buffer,
}

/// Learns which kernel is fastest for which source and size.
#[derive(Debug)]
pub struct Tuner {
    /// Kernels to choose from; at least one.
    kernels: Box<[Kernel]>,
    /// Indexed by source, then by piece size.
    classes: [[Class; CLASSES.len() + 1]; 3],
    /// Bytes copied with ordinary stores, and with streaming stores.
    counted: [AtomicU64; 2],
}

/// Speed of each kernel in its recent fast units, in picoseconds per KiB; 0 means unknown.
#[derive(Debug, Default)]
struct Class {
    units: AtomicU64,
    speeds: [AtomicU64; KERNELS],
}

impl Tuner {
    /// Creates a tuner that learns, or one that always uses the stores that `choice` forces. Returns
    /// `Err(NotEnabled)` if this CPU does not have them.
    pub fn new(choice: KernelChoice) -> Result<Self> {
        let missing =
            || Error::new(ErrorKind::NotEnabled, "llm.CopyKernel=streaming is not supported by this CPU");
        let chosen = |kernel: &Kernel| match choice {
            KernelChoice::Auto => true,
            KernelChoice::Plain => !kernel.streams(),
            KernelChoice::Streaming => kernel.streams(),
        };
        let kernels: Box<[Kernel]> = Kernel::all().iter().copied().filter(chosen).take(KERNELS).collect();
        if kernels.is_empty() {
            return Err(missing());
        }
        Ok(Tuner { kernels, classes: Default::default(), counted: Default::default() })
    }

    /// Returns the kernel for the next unit of a copy of `total` bytes in pieces of about `piece` bytes.
    pub fn choose(&self, source: Source, total: u64, piece: u64) -> Kernel {
        let count = self.kernels.len();
        let learned = count > 1 && Self::learns(total);
        let index = if learned { self.class(source, piece).choose(count) } else { SMALL.min(count - 1) };
        self.kernels.get(index).copied().unwrap_or(Kernel::PLAIN)
    }

    /// Returns the kernel for bytes that are read again at once, and so should stay in the CPU caches.
    pub fn cached(&self) -> Kernel {
        self.kernels.iter().copied().rfind(|kernel| !kernel.streams()).unwrap_or(Kernel::PLAIN)
    }

    /// Counts `bytes` bytes that `kernel` has copied.
    pub fn count(&self, kernel: Kernel, bytes: u64) {
        self.counted[usize::from(kernel.streams())].fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts the bytes of a unit, and learns from the time that it took.
    pub fn learn(&self, source: Source, total: u64, piece: u64, kernel: Kernel, bytes: u64, took: Duration) {
        self.count(kernel, bytes);
        let Some(index) = self.kernels.iter().position(|&known| known == kernel) else { return };
        if Self::learns(total) && bytes > 0 {
            let picos_per_kib =
                u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1 << 20) / bytes;
            let speed = &self.class(source, piece).speeds[index];
            let known = speed.load(Ordering::Relaxed);
            // Interruptions only make a unit slower, so the fastest of about the last sixteen says more than
            // their mean: one bad sample cannot change the decision. A lost update between two workers costs
            // one sample.
            let next = if known == 0 { picos_per_kib } else { picos_per_kib.min(known + known / 16) };
            speed.store(next.max(1), Ordering::Relaxed);
        }
    }

    /// Whether a copy of `total` bytes is large enough to learn from.
    pub fn learns(total: u64) -> bool {
        total >= LARGE
    }

    /// Returns the bytes copied with ordinary stores and with streaming stores.
    pub fn bytes(&self) -> (u64, u64) {
        let [plain, streaming] = &self.counted;
        (plain.load(Ordering::Relaxed), streaming.load(Ordering::Relaxed))
    }

    fn class(&self, source: Source, piece: u64) -> &Class {
        &self.classes[source as usize][CLASSES.partition_point(|&from| from <= piece)]
    }
}

impl Class {
    /// Returns the index, among the first `count` kernels, of the kernel for the next unit.
    fn choose(&self, count: usize) -> usize {
        let unit = self.units.fetch_add(1, Ordering::Relaxed);
        let in_turn = |round: u64| usize::try_from(round % count as u64).unwrap_or(0);
        let speed = |index: usize| self.speeds[index].load(Ordering::Relaxed);
        if unit < FIRST_UNITS * count as u64 || (0..count).any(|index| speed(index) == 0) {
            return in_turn(unit);
        }
        if unit.is_multiple_of(RETRY_EVERY) {
            return in_turn(unit / RETRY_EVERY);
        }
        (0..count).min_by_key(|&index| speed(index)).unwrap_or(0)
    }
}
