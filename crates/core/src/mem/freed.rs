//! How much freed memory the allocator keeps for the next call.
//!
//! A call of many blocks makes lists of megabytes and frees them. The allocator of the C library gives a freed block of
//! 128 KiB and more back to the kernel at once, and the next call waits for every page of it again: half of the time of
//! 32,768 blocks was that. It stops once the program has freed a larger block, and no setting of the user's is
//! overruled by that. Not for: pools and mappings, which never come from the allocator.

use std::hint::black_box;

/// Blocks of up to this many bytes are kept when freed, twice as much in all.
const KEPT_BYTES: usize = 8 << 20;

/// Has the allocator keep what is freed, up to twice 8 MiB in each of its arenas. Where it has no such rule, nothing
/// happens.
pub fn keep_freed_memory() {
    // Never touched, so it takes no memory; black_box, or allocation and release would cancel out.
    drop(black_box(Vec::<u8>::with_capacity(black_box(KEPT_BYTES))));
}
