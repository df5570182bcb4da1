//! Chooses the copy kernel by what was measured on this machine, while it copies.
//!
//! Small copies use ordinary stores: they fit the caches, and whoever asked will read them soon. For large ones no rule
//! holds on every CPU, so each class of piece size keeps the recent speed of every kernel, uses the fastest, and now and
//! then tries another. Not for: correctness; all kernels copy the same bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::KernelChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::kernels::Kernel;

/// Copies below this many bytes in all stay in the caches.
const LARGE: u64 = 4 << 20;
/// Units of each kernel before the first verdict.
const FIRST_LOOK: u64 = 8;
/// One unit in this many tries a kernel that looks slower.
const LOOK_AGAIN: u64 = 128;
/// A piece of this many bytes, and of four times as many, and so on, starts a class of its own.
const CLASSES: [u64; 6] = [2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20];
/// Which of the kernels copies what stays in the caches: with ordinary stores and four pages under way. Measured, it beats
/// the C library's by a tenth to a half where the source is not cached, and loses less where it is.
const SMALL: usize = 1;
/// Kernels there are at most.
const KERNELS: usize = 4;

/// Learns which kernel is fastest for which size.
#[derive(Debug)]
pub struct Tuner {
    /// What it chooses from; at least one.
    kernels: Box<[Kernel]>,
    classes: [Class; CLASSES.len() + 1],
    counted: Arc<Counted>,
}

/// Bytes copied with each kind of stores.
#[derive(Debug, Default)]
struct Counted {
    plain: AtomicU64,
    streaming: AtomicU64,
}

/// Picoseconds per KiB of each kernel in its recent good units; 0 is unknown.
#[derive(Debug, Default)]
struct Class {
    units: AtomicU64,
    speeds: [AtomicU64; KERNELS],
}

impl Tuner {
    /// Learns, or always uses the stores that are forced. `Err` if this CPU does not have them.
    pub fn new(choice: KernelChoice) -> Result<Self> {
        let missing = || {
            Error::new(ErrorKind::NotEnabled, "llm.CopyKernel = streaming, but this CPU has no such stores")
        };
        let chosen = |kernel: &Kernel| match choice {
            KernelChoice::Auto => true,
            KernelChoice::Plain => !kernel.streams(),
            KernelChoice::Streaming => kernel.streams(),
        };
        let kernels: Box<[Kernel]> = Kernel::all().iter().copied().filter(chosen).take(KERNELS).collect();
        if kernels.is_empty() {
            return Err(missing());
        }
        Ok(Tuner { kernels, classes: Default::default(), counted: Arc::default() })
    }

    /// One that learns for itself, of memory whose speed tells nothing about other memory, and counts into the same sums.
    #[must_use]
    pub fn beside(&self) -> Self {
        Tuner { kernels: self.kernels.clone(), classes: Default::default(), counted: self.counted.clone() }
    }

    /// The kernel for the next unit of a copy of `total` bytes in pieces of about `piece` bytes.
    #[must_use]
    pub fn choose(&self, total: u64, piece: u64) -> Kernel {
        let count = self.kernels.len();
        let index =
            if count > 1 && total >= LARGE { self.class(piece).choose(count) } else { SMALL.min(count - 1) };
        self.kernels.get(index).copied().unwrap_or(Kernel::PLAIN)
    }

    /// The kernel for bytes that are read again at once, and so belong in the caches.
    #[must_use]
    pub fn cached(&self) -> Kernel {
        self.kernels.iter().copied().rfind(|kernel| !kernel.streams()).unwrap_or(Kernel::PLAIN)
    }

    /// Counts bytes a kernel copies.
    pub fn count(&self, kernel: Kernel, bytes: u64) {
        let counter = if kernel.streams() { &self.counted.streaming } else { &self.counted.plain };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts the bytes of a unit and learns from the time it took.
    pub fn learn(&self, total: u64, piece: u64, kernel: Kernel, bytes: u64, took: Duration) {
        self.count(kernel, bytes);
        let Some(index) = self.kernels.iter().position(|&known| known == kernel) else { return };
        if total >= LARGE && bytes > 0 {
            let picos_per_kib =
                u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1 << 20) / bytes;
            let speed = &self.class(piece).speeds[index];
            let known = speed.load(Ordering::Relaxed);
            // Interruptions only ever make a unit slower, so the fastest of about the last sixteen tells more than their
            // mean: one bad sample cannot turn the verdict. A lost update between two workers costs one sample.
            let next = if known == 0 { picos_per_kib } else { picos_per_kib.min(known + known / 16) };
            speed.store(next.max(1), Ordering::Relaxed);
        }
    }

    /// Whether a copy of `total` bytes in all teaches anything.
    #[must_use]
    pub fn learns(&self, total: u64) -> bool {
        total >= LARGE
    }

    /// Bytes copied with ordinary and with streaming stores.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        (self.counted.plain.load(Ordering::Relaxed), self.counted.streaming.load(Ordering::Relaxed))
    }

    fn class(&self, piece: u64) -> &Class {
        &self.classes[CLASSES.partition_point(|&from| from <= piece)]
    }
}

impl Class {
    /// Which of the first `count` kernels runs the next unit.
    fn choose(&self, count: usize) -> usize {
        let unit = self.units.fetch_add(1, Ordering::Relaxed);
        let in_turn = |turn: u64| usize::try_from(turn % count as u64).unwrap_or(0);
        let speed = |index: usize| self.speeds[index].load(Ordering::Relaxed);
        if unit < FIRST_LOOK * count as u64 || (0..count).any(|index| speed(index) == 0) {
            return in_turn(unit);
        }
        if unit.is_multiple_of(LOOK_AGAIN) {
            return in_turn(unit / LOOK_AGAIN);
        }
        (0..count).min_by_key(|&index| speed(index)).unwrap_or(0)
    }
}
