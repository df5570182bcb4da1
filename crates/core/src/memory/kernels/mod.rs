//! The host copy kernels: with ordinary stores, and with stores that bypass the caches.
//!
//! Streaming stores save reading each destination line before it is overwritten, a third of the traffic, and leave the
//! caches to the model; ordinary stores win where the copy fits the caches. What keeps a core from the speed of its memory
//! is waiting at the first lines of every page, so the kernels of `avx2` read ahead into the next piece, or have
//! four pages under way at once. Which one runs is the engine's choice (`copy::kernel_choice`). Each is tested against a
//! byte-by-byte twin in `tests/integration/kernel.rs`.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod plain;

pub use plain::Copy;
use plain::plain;

use super::{Reach, Window};
use crate::error::{Error, ErrorKind, Result};

/// A kernel that exists on this CPU: all but [`Kernel::PLAIN`] can only be had from [`Kernel::all`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel(Stores);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stores {
    Plain,
    #[cfg(target_arch = "x86_64")]
    PlainLanes,
    #[cfg(target_arch = "x86_64")]
    Streaming,
    #[cfg(target_arch = "x86_64")]
    StreamingLanes,
}

impl Kernel {
    /// Ordinary stores, as the C library copies. Everywhere.
    pub const PLAIN: Kernel = Kernel(Stores::Plain);

    /// Every kernel of this CPU. On `x86_64` with AVX2 [`PLAIN`](Self::PLAIN); ordinary stores to four pages in turn, of
    /// one piece or of four; streaming stores, piece after piece, reading ahead; and streaming stores to four pages in
    /// turn. Elsewhere the first alone.
    #[must_use]
    pub fn all() -> &'static [Kernel] {
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") {
            const AVX2: [Kernel; 4] = [
                Kernel::PLAIN,
                Kernel(Stores::PlainLanes),
                Kernel(Stores::Streaming),
                Kernel(Stores::StreamingLanes),
            ];
            return &AVX2;
        }
        &[Kernel::PLAIN]
    }

    /// Whether its stores bypass the caches.
    #[must_use]
    pub fn streams(self) -> bool {
        match self.0 {
            Stores::Plain => false,
            #[cfg(target_arch = "x86_64")]
            Stores::PlainLanes => false,
            #[cfg(target_arch = "x86_64")]
            Stores::Streaming | Stores::StreamingLanes => true,
        }
    }

    /// For reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self.0 {
            Stores::Plain => "plain",
            #[cfg(target_arch = "x86_64")]
            Stores::PlainLanes => "plain, four pages",
            #[cfg(target_arch = "x86_64")]
            Stores::Streaming => "streaming",
            #[cfg(target_arch = "x86_64")]
            Stores::StreamingLanes => "streaming, four pages",
        }
    }
}

/// Copies `src` to `dst`, as [`copy_all`] does.
pub fn copy(src: Window<'_>, dst: Window<'_>, kernel: Kernel) -> Result<()> {
    copy_all(&[Copy { src, dst }], kernel)
}

/// Copies every source to its destination, windows of equal length over memory the CPU can address, in any order. If one
/// pair is refused nothing is copied. A source that overlaps its own destination is copied as if through a buffer. Bytes
/// that another thread writes at the same time come out old, new or mixed; the pins of `table` keep that from happening
/// between calls of one engine. When this returns, whoever is told of it sees all bytes.
pub fn copy_all(batch: &[Copy<'_>], kernel: Kernel) -> Result<()> {
    if let Some(copy) = batch.iter().find(|copy| !sound(copy)) {
        return Err(refused(copy.src, copy.dst));
    }
    match kernel.0 {
        Stores::Plain => batch.iter().for_each(plain),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: every pair is sound, see above; the value proves that the CPU has AVX2, because only `Kernel::all` makes
        // it.
        Stores::PlainLanes => unsafe { avx2::four::<false>(batch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Stores::Streaming => unsafe { avx2::one(batch) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: as above.
        Stores::StreamingLanes => unsafe { avx2::four::<true>(batch) },
    }
    Ok(())
}

/// Whether the CPU can read one window and write the other, and both are equally long, in bytes it can count.
fn sound(copy: &Copy<'_>) -> bool {
    let equal = copy.src.len() == copy.dst.len() && usize::try_from(copy.src.len()).is_ok();
    equal && copy.src.host_addressable() && copy.dst.reach() == Reach::Host
}

#[cold]
fn refused(src: Window<'_>, dst: Window<'_>) -> Error {
    Error::new(
        ErrorKind::System,
        "the host kernel needs two windows of equal length in host-addressable memory, the second writable",
    )
    .with("src_bytes", src.len())
    .with("dst_bytes", dst.len())
    .with("src", format_args!("{:?}", src.reach()))
    .with("dst", format_args!("{:?}", dst.reach()))
}
