//! The allocator of the Python and C libraries: blocks are disjoint, and the memory that it keeps is bounded and used again.
//!
//! `benches/latency.rs` and `tests/test_threads.py` measure what it gains.
#![allow(unsafe_code, clippy::multiple_unsafe_ops_per_block, reason = "the calls of an allocator")]
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::needless_for_each,
    reason = "a test that fails"
)]

use std::alloc::{GlobalAlloc, Layout};
use std::thread;

use llm_datadist_embed::KeptLists;

const KIB: usize = 1 << 10;

fn layout(size: usize, align: usize) -> Layout {
    Layout::from_size_align(size, align).unwrap()
}

/// A block and the bytes it should hold.
struct Held {
    at: *mut u8,
    layout: Layout,
    seed: u8,
}

impl Held {
    fn new(kept: &KeptLists, layout: Layout, zeroed: bool, seed: u8) -> Held {
        // SAFETY: the layout is not empty.
        let at = unsafe { if zeroed { kept.alloc_zeroed(layout) } else { kept.alloc(layout) } };
        assert!(!at.is_null() && (at as usize).is_multiple_of(layout.align()));
        let held = Held { at, layout, seed };
        assert!(!zeroed || held.bytes().iter().all(|&byte| byte == 0), "{layout:?} is not zero");
        held.fill();
        held
    }

    #[expect(clippy::mut_from_ref, reason = "the memory of the block, not its description")]
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: the block has that many bytes and lives until `free`, which takes `self`.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.layout.size()) }
    }

    fn value(&self, at: usize) -> u8 {
        self.seed.wrapping_add((at / 61) as u8)
    }

    fn fill(&self) {
        let value = |at| self.value(at);
        self.bytes().iter_mut().enumerate().for_each(|(at, byte)| *byte = value(at));
    }

    fn check(&self, len: usize) {
        let wrong = self.bytes()[..len].iter().enumerate().find(|&(at, &byte)| byte != self.value(at));
        assert_eq!(wrong, None, "of {:?}", self.layout);
    }

    fn resize(&mut self, kept: &KeptLists, size: usize) {
        self.check(self.layout.size());
        let before = self.layout.size();
        // SAFETY: a block of this allocator, and a size that is not 0.
        self.at = unsafe { kept.realloc(self.at, self.layout, size) };
        assert!(!self.at.is_null());
        self.layout = layout(size, self.layout.align());
        self.check(before.min(size));
        self.fill();
    }

    fn free(self, kept: &KeptLists) {
        self.check(self.layout.size());
        // SAFETY: a block of this allocator that nobody uses any more.
        unsafe { kept.dealloc(self.at, self.layout) };
    }
}

/// Many blocks of all sizes at once on several threads: only its owner changes a block.
#[test]
fn no_two_owners_share_a_block() {
    let kept = KeptLists::new();
    let sizes = [
        1, 4096, 16_384, 16_385, 32_768, 33_792, 100_000, 131_072, 131_073, 524_288, 2_097_152, 2_097_153,
        3_000_000,
    ];
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let kept = &kept;
            scope.spawn(move || {
                let (mut held, mut state) = (Vec::<Held>::new(), thread * 7919 + 1);
                let mut next = move |bound: usize| {
                    state =
                        state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (state >> 33) as usize % bound
                };
                for round in 0..600 {
                    match next(3) {
                        0 if !held.is_empty() => held.swap_remove(next(held.len())).free(kept),
                        1 if !held.is_empty() => {
                            let which = next(held.len());
                            held[which].resize(kept, sizes[next(sizes.len())]);
                        }
                        _ if held.len() < 12 => {
                            let layout = layout(sizes[next(sizes.len())], [1, 8, 16, 64, 4096][next(5)]);
                            held.push(Held::new(kept, layout, next(2) == 0, round as u8));
                        }
                        _ => held.pop().unwrap().free(kept),
                    }
                }
                held.into_iter().for_each(|held| held.free(kept));
            });
        }
    });
    assert!((1..=KeptLists::MAX_BYTES).contains(&kept.kept_bytes()), "{}", kept.kept_bytes());
}

#[test]
fn what_is_kept_is_used_again_and_bounded() {
    let kept = KeptLists::new();
    let of = |size| Held::new(&kept, layout(size, 8), false, 1);
    let first = of(256 * KIB);
    let at = first.at;
    first.free(&kept);
    assert_eq!(kept.kept_bytes(), 256 * KIB);
    let again = of(200 * KIB);
    assert_eq!(
        (again.at, kept.kept_bytes()),
        (at, 0),
        "a list a little shorter lies where the one before did"
    );
    let other = of(256 * KIB);
    assert_ne!(other.at, at);
    again.free(&kept);
    other.free(&kept);
    // Small blocks, large blocks and those with a special alignment are not kept.
    for (size, align) in [(16 * KIB, 8), (2048 * KIB + 1, 8), (64 * KIB, 4096)] {
        Held::new(&kept, layout(size, align), true, 2).free(&kept);
        assert_eq!(kept.kept_bytes(), 512 * KIB);
    }
    // Twenty of each size: four are kept.
    for size in (0..7).map(|class| (32 * KIB) << class) {
        let many: Vec<_> = (0..20).map(|_| of(size)).collect();
        many.into_iter().for_each(|held| held.free(&kept));
    }
    assert_eq!((kept.kept_bytes(), KeptLists::MAX_BYTES), (KeptLists::MAX_BYTES, 4 * 127 * 32 * KIB));
}
