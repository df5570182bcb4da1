//! Steps of copies for `aarch64`: four loads and four stores of pairs of 16 bytes.
//!
//! Every aarch64 CPU has these instructions. They are written in assembly, because Rust has no function for a pair with a
//! non-temporal hint. Their speed has not been measured on hardware.

use std::arch::asm;

use super::plain::RawCopy;

/// Bytes of one step: two cache lines, copied by four loads and four stores of pairs.
pub(super) const STEP: usize = 128;

/// Makes the stores visible to other threads before later stores of this thread. Does nothing here: on aarch64, release stores and
/// fences order stores with a non-temporal hint like any others.
#[inline]
pub(super) fn publish() {}

/// Prefetches two cache lines from `from` on, which are used once. Both lie inside a window.
#[inline]
pub(super) fn prefetch(from: *const u8) {
    // SAFETY: a prefetch is a hint and never faults.
    unsafe {
        asm!(
            "prfm pldl1strm, [{from}]",
            "prfm pldl1strm, [{from}, #64]",
            from = in(reg) from,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Copies step `step` of a piece: [`STEP`] bytes.
///
/// # Safety
///
/// `(step + 1) * STEP` bytes are readable at the source and writable at the destination, and the two do not overlap.
#[inline]
pub(super) unsafe fn copy_step<const STREAM: bool>(piece: RawCopy, step: usize) {
    // SAFETY: as promised by the caller.
    let source = unsafe { piece.from.add(step * STEP) };
    // SAFETY: as promised by the caller.
    let target = unsafe { piece.to.add(step * STEP) };
    macro_rules! step {
        ($load:literal, $store:literal) => {
            // SAFETY: as promised by the caller. No other memory is accessed.
            unsafe {
                asm!(
                    concat!($load, " {a:q}, {b:q}, [{from}]"),
                    concat!($load, " {c:q}, {d:q}, [{from}, #32]"),
                    concat!($load, " {e:q}, {f:q}, [{from}, #64]"),
                    concat!($load, " {g:q}, {h:q}, [{from}, #96]"),
                    concat!($store, " {a:q}, {b:q}, [{to}]"),
                    concat!($store, " {c:q}, {d:q}, [{to}, #32]"),
                    concat!($store, " {e:q}, {f:q}, [{to}, #64]"),
                    concat!($store, " {g:q}, {h:q}, [{to}, #96]"),
                    from = in(reg) source,
                    to = in(reg) target,
                    a = out(vreg) _,
                    b = out(vreg) _,
                    c = out(vreg) _,
                    d = out(vreg) _,
                    e = out(vreg) _,
                    f = out(vreg) _,
                    g = out(vreg) _,
                    h = out(vreg) _,
                    options(nostack, preserves_flags),
                );
            }
        };
    }
    // The loads have no hint. With one, the CPU could run them before the earlier load that provides their address.
    if STREAM {
        step!("ldp", "stnp");
    } else {
        step!("ldp", "stp");
    }
}
