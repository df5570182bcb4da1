//! Every host copy kernel against a byte-by-byte twin: all short lengths, all alignments, overlaps, many pieces at once,
//! and what it refuses.

use std::sync::Arc;

use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::memory::kernels::{Copy, Kernel, copy, copy_all};
use llm_datadist_core::testing::memory::{Region, Tensors};

use crate::fixtures::Buffer;

/// Those of this CPU. At least the plain one; the CI machine has all.
fn kernels() -> &'static [Kernel] {
    let all = Kernel::all();
    let known: Vec<_> = all.iter().map(|kernel| (kernel.name(), kernel.streams())).collect();
    let four = [
        ("plain", false),
        ("plain, four pages", false),
        ("streaming", true),
        ("streaming, four pages", true),
    ];
    assert!(known == four[..1] || known == four, "{known:?}");
    assert_eq!(all[0], Kernel::PLAIN);
    all
}

/// A buffer as the caller's memory, aligned to 64.
struct Arena {
    buffer: Arc<Buffer>,
    start: usize,
    len: usize,
    tensors: Tensors,
}

impl Arena {
    fn new(len: usize, seed: u8) -> Arena {
        let buffer = Buffer::new(len + 64, |at| (at as u8).wrapping_mul(seed) ^ (at >> 8) as u8);
        let start = (64 - (buffer.addr() % 64) as usize) % 64;
        let tensors = Tensors::adopted(buffer.adopt(start, len));
        Arena { buffer, start, len, tensors }
    }

    fn read(&self) -> Vec<u8> {
        self.buffer.read(self.start, self.len)
    }

    fn write(&self, bytes: &[u8]) {
        self.buffer.write(self.start, bytes);
    }
}

fn run(from: &Arena, src: usize, to: &Arena, dst: usize, len: usize, kernel: Kernel) {
    let window = |arena: &Arena, at: usize| {
        assert_eq!(arena.tensors.addrs()[0] % 64, 0);
        arena.tensors.window(0, at as u64, len as u64).map(|window| window.addr()).unwrap()
    };
    assert_eq!((window(from, src) % 64, window(to, dst) % 64), (src as u64 % 64, dst as u64 % 64));
    let read = from.tensors.window(0, src as u64, len as u64).unwrap();
    let write = to.tensors.window(0, dst as u64, len as u64).unwrap();
    copy(read, write, kernel).unwrap();
}

#[test]
fn every_short_length_at_every_alignment() {
    const ROOM: usize = 64 + 600 + 64;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let source = from.read();
    let background = to.read();
    let mut copies = 0;
    for &kernel in kernels() {
        for len in 0..600 {
            for dst in 0..64 {
                // All 64 × 64 alignments where the code branches, else each of both at least once.
                let all = len < 2 || len % 32 < 2 || len % 32 == 31;
                let sources =
                    if all { 0..64 } else { (dst * 7 + len * 13) % 64..(dst * 7 + len * 13) % 64 + 1 };
                for src in sources {
                    run(&from, src, &to, dst, len, kernel);
                    let got = to.read();
                    let mut expected = background.clone();
                    // Byte by byte: this is the twin.
                    for at in 0..len {
                        expected[dst + at] = source[src + at];
                    }
                    assert!(got == expected, "{} {len} bytes, {src} → {dst}", kernel.name());
                    to.write(&background);
                    copies += 1;
                }
            }
        }
        assert!(from.read() == source, "the source was written");
    }
    assert!(copies >= 250_000 * kernels().len(), "{copies}");
}

#[test]
fn long_copies() {
    const ROOM: usize = (9 << 20) + 200;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let source = from.read();
    let mut copies = 0;
    for &kernel in kernels() {
        let whole =
            [(4096, 0, 0), (65_537, 3, 61), (1 << 20, 64, 1), ((2 << 20) + 127, 63, 0), (9 << 20, 31, 33)];
        // Around the length from which one piece is cut into lanes, and where a lane gets one step more.
        let edges = (16_384 - 130..16_384 + 130).chain(16_896 - 3..16_896 + 3).chain(33_000..33_009);
        let edges = edges.map(|len| (len, len * 7 % 64, len * 13 % 64));
        for (len, src, dst) in whole.into_iter().chain(edges) {
            // All of it, or as much as shows a byte beside the copy.
            let room = if len < 1 << 16 { len + 300 } else { ROOM };
            let mut expected = to.buffer.read(to.start, room);
            run(&from, src, &to, dst, len, kernel);
            for at in 0..len {
                expected[dst + at] = source[src + at];
            }
            assert!(to.buffer.read(to.start, room) == expected, "{} {len} bytes", kernel.name());
            to.write(&vec![0x5A; room]);
            copies += 1;
        }
    }
    assert!(copies >= 5 + 260);
}

/// A small generator, so that a failure can be run again.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }
}

/// Lengths on both sides of every branch: nothing, a line, a step, a page, what is cut into lanes.
const LENGTHS: [usize; 20] = [
    0, 1, 63, 64, 127, 128, 129, 255, 512, 1000, 1152, 2048, 4095, 4096, 4097, 8192, 16_383, 16_384, 16_385,
    20_001,
];

#[test]
fn many_pieces_at_once() {
    const ROOM: usize = 300_000;
    let (from, to) = (Arena::new(ROOM, 7), Arena::new(ROOM, 13));
    let (source, background) = (from.read(), to.read());
    let (mut dice, mut alike, mut mixed) = (Dice(1), 0, 0);
    for &kernel in kernels() {
        for round in 0..600 {
            let count = 1 + dice.below(13);
            // Every other batch is of equal lengths, half of those equally aligned: what blocks of a cache are.
            let (even, len) = (round % 2 == 0, LENGTHS[dice.below(LENGTHS.len())]);
            let line = (round % 4 == 0).then(|| dice.below(64));
            let mut pieces: Vec<(usize, usize, usize)> = Vec::new();
            let mut end = 0;
            for _ in 0..count {
                let len = if even { len } else { LENGTHS[dice.below(LENGTHS.len())] };
                let dst = line.map_or(end + dice.below(130), |line| end.next_multiple_of(64) + line);
                if dst + len > ROOM {
                    break;
                }
                // Sources may share bytes, and begin and end anywhere.
                pieces.push((dice.below(ROOM - len + 1), dst, len));
                end = dst + len;
            }
            // Destinations in any order, each apart from the others.
            for at in (1..pieces.len()).rev() {
                pieces.swap(at, dice.below(at + 1));
            }
            let batch: Vec<Copy<'_>> = pieces
                .iter()
                .map(|&(src, dst, len)| Copy {
                    src: from.tensors.window(0, src as u64, len as u64).unwrap(),
                    dst: to.tensors.window(0, dst as u64, len as u64).unwrap(),
                })
                .collect();
            copy_all(&batch, kernel).unwrap();
            let mut expected = background.clone();
            for &(src, dst, len) in &pieces {
                for at in 0..len {
                    expected[dst + at] = source[src + at];
                }
            }
            assert!(to.read() == expected, "{} {pieces:?}", kernel.name());
            to.write(&background[..end]);
            let four = pieces.len() >= 4 && (128..16_384).contains(&len);
            alike += usize::from(even && line.is_some() && four);
            mixed += usize::from(!even && pieces.len() >= 4);
        }
        assert!(from.read() == source, "the source was written");
    }
    assert!(alike >= 50 * kernels().len() && mixed >= 150 * kernels().len(), "{alike} {mixed}");
}

#[test]
fn pieces_onto_themselves_beside_others() {
    const ZONE: usize = 24 << 10;
    const ZONES: usize = 9;
    let arena = Arena::new(ZONE * ZONES, 11);
    let background = arena.read();
    let (mut dice, mut overlapping, mut apart) = (Dice(2), 0, 0);
    for &kernel in kernels() {
        for _ in 0..400 {
            // Each piece in a zone of its own; in some, source and destination share bytes.
            let lens = [dice.below(3000), 2048, 4096, 128 + dice.below(300)];
            let len = lens[dice.below(4)];
            let pieces: Vec<(usize, usize, usize)> = (0..ZONES)
                .map(|zone| {
                    let len = if dice.below(4) == 0 { dice.below(18_000) } else { len };
                    let local = 1 + len.min(400);
                    let src = dice.below(ZONE / 2 - len / 2);
                    let dst = if dice.below(3) == 0 { src + dice.below(local) } else { ZONE - len };
                    (zone * ZONE + src, zone * ZONE + dst.min(ZONE - len), len)
                })
                .collect();
            let window = |at: usize, len: usize| arena.tensors.window(0, at as u64, len as u64).unwrap();
            let batch: Vec<Copy<'_>> = pieces
                .iter()
                .map(|&(src, dst, len)| Copy { src: window(src, len), dst: window(dst, len) })
                .collect();
            copy_all(&batch, kernel).unwrap();
            let mut expected = background.clone();
            for &(src, dst, len) in &pieces {
                let through: Vec<u8> = (0..len).map(|at| background[src + at]).collect();
                for (at, byte) in through.into_iter().enumerate() {
                    expected[dst + at] = byte;
                }
                let shared = src.abs_diff(dst) < len;
                overlapping += usize::from(shared);
                apart += usize::from(!shared && len > 128);
            }
            assert!(arena.read() == expected, "{} {pieces:?}", kernel.name());
            arena.write(&background);
        }
    }
    assert!(overlapping > 500 && apart > 500, "{overlapping} {apart}");
}

#[test]
fn a_batch_with_one_refused_pair_copies_nothing() {
    let (from, to) = (Arena::new(200, 3), Arena::new(200, 5));
    let background = to.read();
    let window = |arena: &'static str, at: u64, len: u64| {
        let arena = if arena == "from" { &from } else { &to };
        arena.tensors.window(0, at, len).unwrap()
    };
    let sound = Copy { src: window("from", 0, 10), dst: window("to", 0, 10) };
    let unequal = Copy { src: window("from", 20, 10), dst: window("to", 20, 11) };
    for &kernel in kernels() {
        for batch in [[sound, unequal], [unequal, sound]] {
            let error = copy_all(&batch, kernel).unwrap_err();
            assert_eq!((error.kind(), error.fact("dst_bytes")), (ErrorKind::System, Some("11")));
            assert_eq!(to.read(), background);
        }
        copy_all(&[], kernel).unwrap();
    }
}

#[test]
fn overlapping_windows_are_copied_as_through_a_buffer() {
    let arena = Arena::new(5000, 11);
    let background = arena.read();
    let mut overlapping = 0;
    for &kernel in kernels() {
        for len in [1, 31, 32, 33, 64, 127, 128, 129, 500, 1500, 4000] {
            for shift in [-999i64, -129, -128, -64, -33, -1, 0, 1, 2, 31, 32, 33, 64, 127, 128, 129, 999] {
                let (src, dst) = (999usize, (999 + shift) as usize);
                if src.max(dst) + len > 5000 {
                    continue;
                }
                run(&arena, src, &arena, dst, len, kernel);
                let mut expected = background.clone();
                let through = background[src..src + len].to_vec();
                expected[dst..dst + len].copy_from_slice(&through);
                assert!(arena.read() == expected, "{} {len} bytes, shift {shift}", kernel.name());
                arena.write(&background);
                overlapping += usize::from(shift.unsigned_abs() < len as u64);
            }
        }
    }
    assert!(overlapping > 80, "{overlapping}");
}

#[test]
fn refuses_unequal_lengths_and_addresses_of_a_device() {
    let arena = Arena::new(100, 3);
    let background = arena.read();
    let device =
        Tensors::carved(Arc::new(Region::opaque(0xDEAD_0000_0000_0000, 100)), [0], 100, Box::new(()))
            .unwrap();
    let host = |len| arena.tensors.window(0, 0, len).unwrap();
    let remote = |len| device.window(0, 0, len).unwrap();
    assert!(host(1).host_addressable() && !remote(1).host_addressable());
    for (src, dst) in
        [(host(10), host(11)), (host(10), remote(10)), (remote(10), host(10)), (remote(10), remote(10))]
    {
        for &kernel in kernels() {
            let error = copy(src, dst, kernel).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::System);
            assert_eq!(error.fact("src_bytes"), Some(src.len().to_string().as_str()));
        }
    }
    assert_eq!(arena.read(), background);
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
    let window = |offset, len| arena.tensors.window(0, offset, len).unwrap();
    assert!(window(0, 10).overlaps(&window(9, 1)) && !window(0, 10).overlaps(&window(10, 1)));
    assert!(!window(5, 0).overlaps(&window(5, 0)), "no byte in common");
}

#[test]
fn tensors_outside_their_region_are_refused() {
    let region = Arc::new(Region::shared("test", 1 << 20).unwrap());
    for (offset, bytes) in [((1 << 20) - 9, 10), (0, (1 << 20) + 1), (u64::MAX, 2), (1, u64::MAX)] {
        let error = Tensors::carved(region.clone(), [offset], bytes, Box::new(())).unwrap_err();
        assert_eq!((error.kind(), error.fact("region_bytes")), (ErrorKind::System, Some("1048576")));
    }
    assert!(Tensors::carved(region, [(1 << 20) - 10], 10, Box::new(())).is_ok());
}

#[test]
fn regions_that_threads_make_and_drop_stay_their_own() {
    // A region that is made or dropped must not take away the addresses of another one.
    const BYTES: usize = 1 << 20;
    let rounds: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4u8)
            .map(|seed| {
                scope.spawn(move || {
                    let (own, back) = (Arena::new(BYTES, 2 * seed + 3), Arena::new(BYTES, 1));
                    let mut kept = Vec::new();
                    for round in 0..150 {
                        let region = Arc::new(Region::shared("test", BYTES as u64).unwrap());
                        assert_eq!(region.base() % (2 << 20), 0);
                        let tensors = Tensors::carved(region, [0], BYTES as u64, Box::new(())).unwrap();
                        let window = |tensors| Tensors::window(tensors, 0, 0, BYTES as u64).unwrap();
                        copy(window(&own.tensors), window(&tensors), Kernel::PLAIN).unwrap();
                        copy(window(&tensors), window(&back.tensors), Kernel::PLAIN).unwrap();
                        assert!(back.read() == own.read());
                        kept.push(tensors);
                        if round % 3 == 0 {
                            kept.clear();
                        }
                    }
                    150
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!(rounds, 600);
}

#[test]
fn a_region_in_the_making_takes_nobodys_addresses() {
    // While regions are made and dropped, other threads map and unmap memory of their own, as every allocator does. An
    // address range that is given up and mapped again by a region would be theirs in between.
    const LARGE: usize = 40 << 20;
    let stop = std::sync::atomic::AtomicBool::new(false);
    let looked_at: usize = std::thread::scope(|scope| {
        let stop = &stop;
        let others: Vec<_> = (0..3u8)
            .map(|_| {
                scope.spawn(move || {
                    let mut looked_at = 0;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let mut own = vec![0u8; LARGE];
                        (0..LARGE).step_by(4 << 20).for_each(|at| own[at] = 7);
                        std::thread::yield_now();
                        assert!((0..LARGE).step_by(4 << 20).all(|at| own[at] == 7));
                        looked_at += 1;
                    }
                    looked_at
                })
            })
            .collect();
        for _ in 0..20_000 {
            drop(Region::shared("test", 64 << 20).unwrap());
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        others.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert!(looked_at > 30, "{looked_at}");
}
