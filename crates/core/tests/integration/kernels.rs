//! Every host copy kernel compared with a byte-by-byte copy: all short lengths and alignments, overlaps, batches, refusals.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::memory::kernels::{Copy, Kernel, copy, copy_all};
use llm_datadist_core::testing::memory::{Region, Tensors, Window, Windows};

use crate::fixtures::{Buffer, Chance, StopOnDrop};

/// Returns the kernels of this CPU: all three on aarch64 and on x86-64 with AVX2, which the CI machine has.
fn kernels() -> &'static [Kernel] {
    #[cfg(target_arch = "x86_64")]
    let striped = std::arch::is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    let striped = cfg!(target_arch = "aarch64");
    let all = Kernel::all();
    let known: Vec<_> = all.iter().map(|kernel| (kernel.name(), kernel.streams())).collect();
    let three = [("plain", false), ("plain, four pages", false), ("streaming, four pages", true)];
    assert_eq!(known, three[..if striped { 3 } else { 1 }]);
    assert_eq!(all[0], Kernel::PLAIN);
    all
}

/// Memory of the caller, aligned to 64 bytes, and the bytes that it holds between copies.
struct Arena {
    buffer: Arc<Buffer>,
    start: usize,
    before: Vec<u8>,
    tensors: Tensors,
}

impl Arena {
    fn new(len: usize, seed: u8) -> Arena {
        let buffer = Buffer::new(len + 64, |at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8);
        let start = (64 - (buffer.addr() % 64) as usize) % 64;
        let tensors = Tensors::adopted(buffer.adopt(start, len));
        assert_eq!(tensors.addrs()[0] % 64, 0);
        Arena { before: buffer.read(start, len), buffer, start, tensors }
    }

    fn window(&self, at: usize, len: usize) -> Window<'_> {
        self.tensors.window(0, at as u64, len as u64).unwrap()
    }

    fn windows(&self, at: usize, len: usize, (count, step): (usize, i64)) -> Windows<'_> {
        self.tensors.windows(0, at as u64, len as u64, (count as u64, step)).unwrap()
    }

    fn read(&self) -> Vec<u8> {
        self.buffer.read(self.start, self.before.len())
    }

    fn is_unchanged(&self) -> bool {
        self.read() == self.before
    }
}

/// Source offset, destination offset and length of a copy.
type Piece = (usize, usize, usize);

/// Copies pieces as one batch, compares the first `room` bytes with a copy byte by byte, and restores the destination.
fn check_batch(from: &Arena, to: &Arena, pieces: &[Piece], room: usize, kernel: Kernel) {
    let batch: Vec<Copy<'_>> =
        pieces.iter().map(|&(src, dst, len)| Copy::one(from.window(src, len), to.window(dst, len))).collect();
    copy_all(&batch, kernel).unwrap();
    check_copied(from, to, pieces, room, kernel);
}

/// Does the same with a copy of one piece.
fn check_one(from: &Arena, to: &Arena, piece: Piece, room: usize, kernel: Kernel) {
    copy(from.window(piece.0, piece.2), to.window(piece.1, piece.2), kernel).unwrap();
    check_copied(from, to, &[piece], room, kernel);
}

fn check_copied(from: &Arena, to: &Arena, pieces: &[Piece], room: usize, kernel: Kernel) {
    let mut expected = to.before[..room].to_vec();
    for &(src, dst, len) in pieces {
        for at in 0..len {
            expected[dst + at] = from.before[src + at];
        }
    }
    assert!(to.buffer.read(to.start, room) == expected, "{} {pieces:?}", kernel.name());
    to.buffer.write(to.start, &to.before[..room]);
}

#[test]
fn every_short_length_at_every_alignment() {
    const ROOM: usize = 64 + 600 + 64;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    for &kernel in kernels() {
        for len in 0..600 {
            for dst in 0..64 {
                // All 64 × 64 alignments for lengths at which the code branches; otherwise each one at least
                // once.
                let all = len < 2 || len % 32 < 2 || len % 32 == 31;
                let one = (dst * 7 + len * 13) % 64;
                for src in if all { 0..64 } else { one..one + 1 } {
                    check_one(&from, &to, (src, dst, len), ROOM, kernel);
                }
            }
        }
        assert!(from.is_unchanged(), "the source was written");
    }
}

#[test]
fn long_copies() {
    const ROOM: usize = (9 << 20) + 200;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let whole =
        [(0, 0, 4096), (3, 61, 65_537), (64, 1, 1 << 20), (63, 0, (2 << 20) + 127), (31, 33, 9 << 20)];
    // Lengths around the one from which a piece is cut into stripes, and around one at which a stripe gets one more step.
    let edges = (16_384 - 130..16_384 + 130).chain(16_896 - 3..16_896 + 3).chain(33_000..33_009);
    let edges = edges.map(|len| (len * 7 % 64, len * 13 % 64, len));
    for piece in whole.into_iter().chain(edges) {
        // Compare the whole buffer, or enough of it to find a byte that was written beside the copy.
        let room = if piece.2 < 1 << 16 { piece.2 + 300 } else { ROOM };
        for &kernel in kernels() {
            check_one(&from, &to, piece, room, kernel);
        }
    }
}

/// Lengths on both sides of every branch: none, a line, a step, a page, and a piece that is cut into stripes.
const LENGTHS: [usize; 20] = [
    0, 1, 63, 64, 127, 128, 129, 255, 512, 1000, 1152, 2048, 4095, 4096, 4097, 8192, 16_383, 16_384, 16_385,
    20_001,
];

#[test]
fn many_pieces_at_once() {
    const ROOM: usize = 300_000;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let (mut dice, mut alike, mut mixed) = (Chance(1), 0, 0);
    for &kernel in kernels() {
        for round in 0..600 {
            let count = 1 + dice.index(13);
            // Every other batch has equal lengths, and half of those are equally aligned, as blocks of a cache are.
            let (even, len) = (round % 2 == 0, LENGTHS[dice.index(LENGTHS.len())]);
            let line = (round % 4 == 0).then(|| dice.index(64));
            let mut pieces: Vec<Piece> = Vec::new();
            let mut end = 0;
            for _ in 0..count {
                let len = if even { len } else { LENGTHS[dice.index(LENGTHS.len())] };
                let dst = line.map_or(end + dice.index(130), |line| end.next_multiple_of(64) + line);
                if dst + len > ROOM {
                    break;
                }
                // Sources may share bytes, and begin and end anywhere.
                pieces.push((dice.index(ROOM - len + 1), dst, len));
                end = dst + len;
            }
            // Destinations in any order, each apart from the others.
            dice.shuffle(&mut pieces);
            check_batch(&from, &to, &pieces, ROOM, kernel);
            let four = pieces.len() >= 4 && (128..16_384).contains(&len);
            alike += usize::from(even && line.is_some() && four);
            mixed += usize::from(!even && pieces.len() >= 4);
        }
        assert!(from.is_unchanged(), "the source was written");
    }
    assert!(alike >= 50 * kernels().len() && mixed >= 150 * kernels().len(), "{alike} {mixed}");
}

/// Several windows in one entry, short and long, at steps that keep or change the alignment, forwards and backwards.
#[test]
fn many_windows_in_one_entry() {
    const ROOM: usize = 300_000;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let (mut dice, mut short, mut others) = (Chance(3), 0, 0);
    for &kernel in kernels() {
        for round in 0..500 {
            // Every other batch has only short pieces that are whole steps.
            let whole_steps = round % 2 == 0;
            let len =
                if whole_steps { 128 * (1 + dice.index(4)) } else { LENGTHS[dice.index(LENGTHS.len())] };
            let (mut batch, mut pieces): (Vec<Copy<'_>>, Vec<Piece>) = (Vec::new(), Vec::new());
            let mut end = 0;
            for _ in 0..=dice.index(5) {
                let count = 1 + dice.index(12);
                let dst_step = if whole_steps { len + 64 * dice.index(3) } else { len + dice.index(130) };
                let dst = if whole_steps { end } else { end + dice.index(70) };
                let room = dst_step * (count - 1) + len;
                if dst + room > ROOM {
                    break;
                }
                end = (dst + room).next_multiple_of(64);
                // Sources may share bytes.
                let src_step = dice.index((ROOM - len) / count);
                let src = dice.index(ROOM - len - src_step * (count - 1) + 1);
                let backwards = dice.index(2) == 0;
                let locate = |start: usize, step: usize, k: usize| {
                    start + step * if backwards { count - 1 - k } else { k }
                };
                let signed = |step: usize| if backwards { -(step as i64) } else { step as i64 };
                let (first_src, first_dst) = (locate(src, src_step, 0), locate(dst, dst_step, 0));
                batch.push(Copy {
                    src: from.windows(first_src, len, (count, signed(src_step))),
                    dst: to.windows(first_dst, len, (count, signed(dst_step))),
                });
                pieces.extend((0..count).map(|k| (locate(src, src_step, k), locate(dst, dst_step, k), len)));
            }
            copy_all(&batch, kernel).unwrap();
            check_copied(&from, &to, &pieces, ROOM, kernel);
            short += usize::from(whole_steps && batch.len() > 1);
            others += usize::from(!whole_steps && batch.len() > 1);
        }
        assert!(from.is_unchanged(), "the source was written");
    }
    assert!(short >= 100 * kernels().len() && others >= 100 * kernels().len(), "{short} {others}");
}

/// Windows in one entry whose sources and destinations lie between each other.
#[test]
fn windows_between_each_other() {
    let arena = Arena::new(9000, 11);
    for &kernel in kernels() {
        for len in [1, 100, 128, 256, 512] {
            let step = 2 * len as i64;
            let windows = |at| arena.windows(at, len, (8, step));
            copy_all(&[Copy { src: windows(0), dst: windows(len) }], kernel).unwrap();
            let pieces: Vec<Piece> = (0..8).map(|k| (2 * k * len, (2 * k + 1) * len, len)).collect();
            check_copied(&arena, &arena, &pieces, 9000, kernel);
        }
    }
}

#[test]
fn pieces_onto_themselves_beside_others() {
    const ZONE: usize = 24 << 10;
    const ZONES: usize = 9;
    let arena = Arena::new(ZONE * ZONES, 11);
    let (mut dice, mut overlapping, mut apart) = (Chance(2), 0, 0);
    for &kernel in kernels() {
        for _ in 0..400 {
            // Each piece in a zone of its own; in some, source and destination share bytes.
            let lens = [dice.index(3000), 2048, 4096, 128 + dice.index(300)];
            let len = lens[dice.index(4)];
            let mut piece = |zone| {
                let len = if dice.index(4) == 0 { dice.index(18_000) } else { len };
                let src = dice.index(ZONE / 2 - len / 2);
                let near = src + dice.index(1 + len.min(400));
                let dst = if dice.index(3) == 0 { near.min(ZONE - len) } else { ZONE - len };
                overlapping += usize::from(src.abs_diff(dst) < len);
                apart += usize::from(src.abs_diff(dst) >= len && len > 128);
                (zone * ZONE + src, zone * ZONE + dst, len)
            };
            let pieces: Vec<Piece> = (0..ZONES).map(&mut piece).collect();
            check_batch(&arena, &arena, &pieces, ZONE * ZONES, kernel);
        }
    }
    assert!(overlapping > 500 && apart > 500, "{overlapping} {apart}");
}

#[test]
fn overlapping_windows_are_copied_as_through_a_buffer() {
    let arena = Arena::new(5000, 11);
    for &kernel in kernels() {
        for len in [1, 31, 32, 33, 64, 127, 128, 129, 500, 1500, 3000] {
            for shift in [-999, -129, -128, -64, -33, -1, 0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 999] {
                check_one(&arena, &arena, (999, (999 + shift) as usize, len), 5000, kernel);
            }
        }
    }
}

#[test]
fn a_batch_with_one_refused_pair_copies_nothing() {
    let (from, to) = (Arena::new(200, 3), Arena::new(200, 5));
    let sound = Copy::one(from.window(0, 10), to.window(0, 10));
    let unequal = Copy::one(from.window(20, 10), to.window(20, 11));
    for &kernel in kernels() {
        for batch in [[sound, unequal], [unequal, sound]] {
            let error = copy_all(&batch, kernel).unwrap_err();
            assert_eq!((error.kind(), error.fact("dst_bytes")), (ErrorKind::System, Some("11")));
            assert!(to.is_unchanged());
        }
        copy_all(&[], kernel).unwrap();
    }
}

#[test]
fn refuses_unequal_lengths_and_addresses_of_a_device() {
    let arena = Arena::new(100, 3);
    let opaque = Arc::new(Region::opaque(0xDEAD_0000_0000_0000, 100));
    let device = Tensors::carved(opaque, [0], 100, ()).unwrap();
    let (host, remote) = (arena.window(0, 10), device.window(0, 0, 10).unwrap());
    assert!(host.host_addressable() && !remote.host_addressable());
    for (src, dst) in [(host, arena.window(0, 11)), (host, remote), (remote, host), (remote, remote)] {
        for &kernel in kernels() {
            let error = copy(src, dst, kernel).unwrap_err();
            assert_eq!((error.kind(), error.fact("src_bytes")), (ErrorKind::System, Some("10")));
        }
    }
    assert!(arena.is_unchanged());
}

#[test]
fn windows_are_inside_their_tensor() {
    let arena = Arena::new(100, 3);
    let refused = [
        (0, 0, 101),
        (0, 100, 1),
        (0, 101, 0),
        (1, 0, 1),
        (0, u64::MAX, 1),
        (0, 1, u64::MAX),
        (usize::MAX, 0, 0),
    ];
    for (tensor, offset, len) in refused {
        let error = arena.tensors.window(tensor, offset, len).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{tensor} {offset} {len}");
        assert_eq!((error.fact("tensors"), error.fact("tensor_bytes")), (Some("1"), Some("100")));
    }
    assert!(arena.tensors.window(0, 100, 0).unwrap().is_empty());
    // The first and the last of several windows must be inside, also with negative steps.
    let several = |offset, len, count, step| arena.tensors.windows(0, offset, len, (count, step));
    for (offset, len, count, step, inside) in [
        (0, 10, 10, 10, true),
        (90, 10, 10, -10, true),
        (50, 10, u64::MAX, 0, false),
        (50, 10, 1 << 40, 0, true),
        (0, 10, 11, 10, false),
        (1, 10, 10, 10, false),
        (89, 10, 10, -10, false),
        (0, 10, 0, 10, false),
        (0, 10, 2, i64::MIN, false),
        (0, 10, 2, i64::MAX, false),
        (0, 10, 1 << 40, 1 << 40, false),
        (0, 101, 1, 0, false),
        (100, 0, 2, -100, true),
    ] {
        assert_eq!(several(offset, len, count, step).is_ok(), inside, "{offset} {len} {count} {step}");
    }
    let starts: Vec<u64> = several(90, 10, 3, -20)
        .unwrap()
        .iter()
        .map(|window| window.addr() - arena.tensors.addrs()[0])
        .collect();
    assert_eq!(starts, [90, 70, 50]);
    assert!(several(0, 5, 3, 10).unwrap().overlaps(&several(24, 5, 3, -2).unwrap()));
    assert!(!several(0, 5, 3, 10).unwrap().overlaps(&several(25, 5, 3, 10).unwrap()));
    let window = |offset, len| arena.window(offset, len);
    assert!(window(0, 10).overlaps(&window(9, 1)) && !window(0, 10).overlaps(&window(10, 1)));
    assert!(!window(5, 0).overlaps(&window(5, 0)), "no byte in common");
}

#[test]
fn tensors_outside_their_region_are_refused() {
    let region = Arc::new(Region::shared("test", 1 << 20).unwrap());
    for (offset, bytes) in [((1 << 20) - 9, 10), (0, (1 << 20) + 1), (u64::MAX, 2), (1, u64::MAX)] {
        let error = Tensors::carved(region.clone(), [offset], bytes, ()).unwrap_err();
        assert_eq!((error.kind(), error.fact("region_bytes")), (ErrorKind::System, Some("1048576")));
    }
    assert!(Tensors::carved(region, [(1 << 20) - 10], 10, ()).is_ok());
}

/// While regions are made and dropped, other threads map and unmap memory, as every allocator does. A region must not
/// take their addresses, nor those of another region.
#[test]
fn regions_take_only_free_addresses() {
    const LARGE: usize = 40 << 20;
    const BYTES: usize = 1 << 20;
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stopping = StopOnDrop(&stop);
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut own = vec![0u8; LARGE];
                    (0..LARGE).step_by(4 << 20).for_each(|at| own[at] = 7);
                    thread::yield_now();
                    assert!((0..LARGE).step_by(4 << 20).all(|at| own[at] == 7));
                }
            });
        }
        let makers = [3, 5].map(|seed| {
            scope.spawn(move || {
                let (own, back) = (Arena::new(BYTES, seed), Arena::new(BYTES, 1));
                for _ in 0..150 {
                    let region = Arc::new(Region::shared("test", BYTES as u64).unwrap());
                    let tensors = Tensors::carved(region, [0], BYTES as u64, ()).unwrap();
                    let window = || tensors.window(0, 0, BYTES as u64).unwrap();
                    copy(own.window(0, BYTES), window(), Kernel::PLAIN).unwrap();
                    copy(window(), back.window(0, BYTES), Kernel::PLAIN).unwrap();
                    assert!(back.read() == own.before);
                }
            })
        });
        for _ in 0..20_000 {
            drop(Region::shared("test", 64 << 20).unwrap());
        }
        makers.into_iter().for_each(|maker| maker.join().unwrap());
    });
}
