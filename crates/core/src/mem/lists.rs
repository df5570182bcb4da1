//! The memory of lists between calls: kept by the allocator of the C library, instead of given back and faulted in again.
//!
//! Not for: memory of caches (`region`).

/// Lists up to this size are served from memory that was used before; of what is free at the end of a heap, twice as
/// much is kept. A list of 262,144 numbers.
const KEPT: usize = 2 << 20;

/// Has the allocator keep the memory of lists, as it does once a program has freed a block of that size: it takes such a
/// block for a sign that more will come. Limits that were set for it stay as they are (`limits_that_were_set_stay`), other
/// allocators do not mind, and where there is no such block nothing happens.
/// Pages that are faulted in for each call were half of what planning 32,768 blocks took
/// (`lists_are_made_of_memory_that_was_used_before`).
pub fn keep_lists() {
    let mut list = Vec::<u8>::new();
    // An address space may be limited to less: then lists are faulted in, as they were.
    let _ = list.try_reserve_exact(KEPT);
    drop(std::hint::black_box(list));
}
