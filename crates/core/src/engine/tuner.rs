//! Chooses the copy kernel by what was measured on this machine, while it copies.
//!
//! Small copies use ordinary stores: they fit the caches, and whoever asked will read them soon. For large ones no rule
//! holds on every CPU, so each class of piece size keeps the recent speed of both kernels, uses the faster, and now and
//! then tries the other. Not for: correctness; both kernels copy the same bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config::KernelChoice;
use crate::error::{Error, ErrorKind, Result};
use crate::mem::kernel::Kernel;

/// Copies below this many bytes in all stay in the caches.
const LARGE: u64 = 4 << 20;
/// Units that alternate before the first verdict.
const FIRST_LOOK: u64 = 16;
/// One unit in this many tries the kernel that looks slower.
const LOOK_AGAIN: u64 = 128;
/// A piece of this many bytes, and of four times as many, and so on, starts a class of its own.
const CLASSES: [u64; 4] = [32 << 10, 128 << 10, 512 << 10, 2 << 20];

/// Learns which kernel is faster for which size.
#[derive(Debug)]
pub struct Tuner {
    forced: Option<Kernel>,
    streaming: Option<Kernel>,
    classes: [Class; CLASSES.len() + 1],
    counted: Arc<Counted>,
}

/// Bytes copied by each kernel.
#[derive(Debug, Default)]
struct Counted {
    plain: AtomicU64,
    streaming: AtomicU64,
}

/// Picoseconds per KiB of each kernel in its recent best unit; 0 is unknown.
#[derive(Debug, Default)]
struct Class {
    units: AtomicU64,
    plain: AtomicU64,
    streaming: AtomicU64,
}

impl Tuner {
    /// Learns, or always uses the kernel that is forced. `Err` if this CPU does not have it.
    pub fn new(choice: KernelChoice) -> Result<Self> {
        let streaming = Kernel::streaming();
        let missing = || {
            Error::new(ErrorKind::NotEnabled, "llm.CopyKernel = streaming, but this CPU has no such stores")
        };
        let forced = match choice {
            KernelChoice::Auto => None,
            KernelChoice::Plain => Some(Kernel::PLAIN),
            KernelChoice::Streaming => Some(streaming.ok_or_else(missing)?),
        };
        Ok(Tuner { forced, streaming, classes: Default::default(), counted: Arc::default() })
    }

    /// One that learns for itself, of memory whose speed tells nothing about other memory, and counts into the same sums.
    #[must_use]
    pub fn beside(&self) -> Self {
        let classes = Default::default();
        Tuner { forced: self.forced, streaming: self.streaming, classes, counted: self.counted.clone() }
    }

    /// The kernel for the next unit of a copy of `total` bytes in pieces of about `piece` bytes.
    #[must_use]
    pub fn choose(&self, total: u64, piece: u64) -> Kernel {
        match (self.forced, self.streaming) {
            (Some(kernel), _) => kernel,
            (None, Some(streaming)) if total >= LARGE => {
                if self.class(piece).prefers_streaming() {
                    streaming
                } else {
                    Kernel::PLAIN
                }
            }
            _ => Kernel::PLAIN,
        }
    }

    /// Counts bytes a kernel copies.
    pub fn count(&self, kernel: Kernel, bytes: u64) {
        let counter = if kernel == Kernel::PLAIN { &self.counted.plain } else { &self.counted.streaming };
        counter.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Counts the bytes of a unit and learns from the time it took.
    pub fn learn(&self, total: u64, piece: u64, kernel: Kernel, bytes: u64, took: Duration) {
        self.count(kernel, bytes);
        if total >= LARGE && bytes > 0 {
            let picos_per_kib =
                u64::try_from(took.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1 << 20) / bytes;
            let class = self.class(piece);
            let speed = if kernel == Kernel::PLAIN { &class.plain } else { &class.streaming };
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
    fn prefers_streaming(&self) -> bool {
        let unit = self.units.fetch_add(1, Ordering::Relaxed);
        let (plain, streaming) = (self.plain.load(Ordering::Relaxed), self.streaming.load(Ordering::Relaxed));
        if unit < FIRST_LOOK || plain == 0 || streaming == 0 {
            return unit.is_multiple_of(2);
        }
        let faster = streaming <= plain;
        if unit.is_multiple_of(LOOK_AGAIN) { !faster } else { faster }
    }
}
