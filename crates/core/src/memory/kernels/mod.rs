//! Host copy kernels, with ordinary stores and with streaming stores that bypass the caches.
//!
//! A streaming store does not read the destination line before overwriting it. This saves a third of the
//! memory traffic, and leaves the caches to the model. Ordinary stores are faster where the copy fits the
//! caches. A core falls short of the speed of its memory mainly because it waits at the first lines of every
//! page. So the kernels in `striped` process four pages at once, and prefetch.
//!
//! [`Kernel::for_bytes`] is the rule that chooses. Each kernel is tested against a byte-by-byte twin in
//! `tests/integration/kernels.rs`.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;
mod plain;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod striped;

pub use plain::Copy;
use plain::{RawCopies, plain};

use super::Reach;
use crate::error::{Error, ErrorKind, Result};

/// Copies of fewer bytes in total use ordinary stores: about a core's share of the last-level cache (1.4 to 5 MiB on servers).
///
/// A machine reports the size of the whole cache, but other cores and other virtual machines use it too. So this number is the same
/// everywhere, and counts the bytes of one call, however many threads copy them.
///
/// Measured (`benches/results/log.md`, "Small totals"): with the destination read once after the copy, ordinary stores were faster
/// below 1 to 4 MiB in blocks of 64 KiB and more, and below 4 to 16 MiB in smaller ones. In calls of 128 MiB, streaming stores
/// were faster by 20 to 50 % for every size of block ("The tuner against fixed kernels").
const STREAM_FROM: u64 = 4 << 20;

/// A copy kernel that this CPU supports. All kernels except [`Kernel::PLAIN`] can be obtained only from
/// [`Kernel::all`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Stores);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Plain,
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    PlainStriped,
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    StreamingStriped,
}

impl Kernel {
    /// The kernel with ordinary stores, as in the C library. Every CPU has it.
    pub const PLAIN: Kernel = Kernel(Stores::Plain);

    /// Returns every kernel that this CPU supports.
    ///
    /// On `x86_64` with AVX2 and on `aarch64` there are three: [`PLAIN`](Self::PLAIN); ordinary stores to four pages in turn,
    /// which belong to one piece or to four; and streaming stores to four pages in turn. Elsewhere only `PLAIN` exists.
    pub fn all() -> &'static [Kernel] {
        #[cfg(target_arch = "x86_64")]
        let striped = std::arch::is_x86_feature_detected!("avx2");
        #[cfg(target_arch = "aarch64")]
        let striped = true;
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        if striped {
            return &[Kernel::PLAIN, Kernel(Stores::PlainStriped), Kernel(Stores::StreamingStriped)];
        }
        &[Kernel::PLAIN]
    }

    /// Returns the kernel for a copy of `total` bytes, of which each call of [`copy_all`] may copy a part. From `STREAM_FROM` bytes
    /// on, it uses streaming stores, because the CPU caches would not keep the bytes until somebody reads them.
    pub fn for_bytes(total: u64) -> Kernel {
        Self::all()
            .iter()
            .copied()
            .rfind(|kernel| total >= STREAM_FROM || !kernel.streams())
            .unwrap_or(Self::PLAIN)
    }

    /// Returns the kernel for bytes that are read again at once, and so should stay in the CPU caches.
    pub fn cached() -> Kernel {
        Self::for_bytes(0)
    }

    /// Returns whether the stores of this kernel bypass the caches.
    pub fn streams(self) -> bool {
        match self.0 {
            Stores::Plain => false,
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Stores::PlainStriped => false,
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Stores::StreamingStriped => true,
        }
    }

    /// Returns the name used in reports.
    #[cfg(feature = "testing")]
    pub fn name(self) -> &'static str {
        match self.0 {
            Stores::Plain => "plain",
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Stores::PlainStriped => "plain, four pages",
            #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
            Stores::StreamingStriped => "streaming, four pages",
        }
    }
}

/// Copies `src` to `dst`, in the same way as [`copy_all`].
#[cfg(feature = "testing")]
pub fn copy(src: super::Window<'_>, dst: super::Window<'_>, kernel: Kernel) -> Result<()> {
    copy_all(&[Copy::one(src, dst)], kernel)
}

/// Copies every source of `batch` to its destination, in any order.
///
/// The two windows of a copy must have equal lengths, the CPU must be able to read the source, and the
/// destination must be writable host memory. If one pair violates this, returns `Err` of kind
/// [`ErrorKind::System`] and copies nothing.
///
/// A source that overlaps its own destination is copied as if through a buffer. Bytes that another thread
/// writes at the same time may be old, new or mixed; the pins of `cache` prevent this between the calls of
/// one engine. When this function has returned, any thread that synchronizes with this one sees all bytes.
pub fn copy_all(batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
    if let Some(copy) = batch.iter().find(|copy| !sound(copy)) {
        return Err(refused(copy));
    }
    match kernel.0 {
        // SAFETY: every copy is between windows of one sound entry, as checked above. They have equal lengths, lie
        // inside live tensors (promise 3), and the CPU can read the first and write the second.
        Stores::Plain => RawCopies::of(batch).for_each(|copy| unsafe { plain(copy) }),
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        // SAFETY: every entry is sound, as checked above. An x86 CPU has AVX2, because only `Kernel::all` creates
        // this value, after it has detected AVX2.
        Stores::PlainStriped => unsafe { striped::copy::<false>(batch) },
        #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
        // SAFETY: as above.
        Stores::StreamingStriped => unsafe { striped::copy::<true>(batch) },
    }
    Ok(())
}

/// Returns whether the CPU can read the sources and write the destinations, and both are equally many and have the
/// same length, which fits `usize`.
fn sound(copy: &Copy<'_>) -> bool {
    let (src, dst) = (copy.src.first(), copy.dst.first());
    let equal = src.len() == dst.len() && copy.src.count() == copy.dst.count();
    equal && usize::try_from(src.len()).is_ok() && src.host_addressable() && dst.reach() == Reach::Host
}

fn refused(copy: &Copy<'_>) -> Error {
    let (src, dst) = (copy.src.first(), copy.dst.first());
    Error::new(
        ErrorKind::System,
        "the host kernel needs two windows of equal length in host-addressable memory, the second writable",
    )
    .with("src_bytes", src.len())
    .with("dst_bytes", dst.len())
    .with("src_windows", copy.src.count())
    .with("dst_windows", copy.dst.count())
    .with("src", format_args!("{:?}", src.reach()))
    .with("dst", format_args!("{:?}", dst.reach()))
}
