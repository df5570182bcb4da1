//! Plans of short pieces through a stream, which pass a buffer of the engine, compared with a model that moves byte by
//! byte.

use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;

use llm_datadist_core::bindings::Name;
use llm_datadist_core::testing::checksums::Checksums;
use llm_datadist_core::testing::copy::{Progress, WindowSum};
use llm_datadist_core::testing::memory;
use llm_datadist_core::testing::net::Stream;
use llm_datadist_core::testing::plan::{CopyPlan, Span, Template, TensorSteps};
use llm_datadist_core::{CacheId, Error, ErrorKind};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use crate::fixtures::{
    copied_bytes, copy_engine, listed, local_streams, pattern, plan_of_peer, proptest_cases, ringed_streams,
    soon, tensors_over,
};
use crate::socket_copies::{Arrived, SocketCopies as _, send_and_receive};

const TENSORS: usize = 2;
/// Bytes of a tensor.
const BYTES: usize = 1 << 20;

/// The bytes of all destination tensors after the plan, moved byte by byte.
fn model(spans: &[Span]) -> Vec<u8> {
    let mut bytes = vec![0xEE; TENSORS * BYTES];
    for Span { src, dst, len, count, src_step, dst_step } in spans {
        for (k, at) in (0..*count as i64).flat_map(|k| (0..*len as i64).map(move |at| (k, at))) {
            let from = *src as i64 + k * src_step + at;
            let to = *dst as i64 + k * dst_step + at;
            for tensor in 0..TENSORS {
                bytes[tensor * BYTES + to as usize] = pattern(4, tensor, from as usize);
            }
        }
    }
    bytes
}

/// Spans that write different bytes. They divide the destination; each piece has room for `step`
/// bytes there, and for `step` or `len` bytes in the source, which is read from the end if `reversed`.
fn spans() -> impl Strategy<Value = Vec<Span>> {
    let lens = prop::sample::select(vec![1_u64, 7, 64, 100, 128, 256, 1000, 4096, 8191, 8192, 20_000]);
    let span = (lens, 0..400_u64, 1..400_u64, any::<(bool, bool, bool)>());
    prop::collection::vec(span, 1..12).prop_map(|parts| {
        let room = BYTES as u64 / parts.len() as u64;
        let span = |(index, (len, gap, count, (reversed, packed, together))): (u64, (u64, u64, u64, _))| {
            let (start, step) = (index * room, len + if together { 0 } else { gap });
            let count = (room / step).min(count);
            let src_step = if packed { len } else { step };
            let (src, src_step) = if reversed {
                (start + (count.max(1) - 1) * src_step, -(src_step as i64))
            } else {
                (start, src_step as i64)
            };
            Span { src, dst: start, len, count, src_step, dst_step: step as i64 }
        };
        (0..).zip(parts).map(span).filter(|span| span.count > 0).collect()
    })
}

fn bound() -> Checksums {
    Checksums::bound_to(Name::Row { cache: CacheId(3), row: 1 }, CacheId(3), 7, 0).unwrap()
}

fn sum() -> WindowSum {
    WindowSum::new(bound()).unwrap()
}

/// The checksum of a range of a plan, byte by byte.
fn sum_of(plan: &CopyPlan, range: std::ops::Range<u64>) -> u64 {
    let mut block = bound().block();
    for (tensor, piece) in plan.pieces(range.start, range.end) {
        let bytes: Vec<u8> =
            (piece.src..piece.src + piece.len).map(|at| pattern(4, tensor, at as usize)).collect();
        block.add(&bytes);
    }
    block.value()
}

/// A plan with a template for each span.
fn plan_of_templates(spans: &[Span]) -> Result<CopyPlan, Error> {
    let one = |span: &Span| Template::new((0, 0), vec![(0, 0)], vec![*span]);
    let first = TensorSteps::consecutive(0);
    CopyPlan::from_templates(TENSORS as u32, first, first, listed(spans.iter().map(one).collect()))
}

#[test]
fn short_pieces_arrive_as_the_model_says() {
    let engine = copy_engine();
    let (_kept, src) = tensors_over(TENSORS, 1, BYTES, |tensor, at| pattern(4, tensor, at));
    let input = (spans(), prop::collection::vec(0..1000_u64, 0..3), any::<(bool, bool)>());
    let outcome = TestRunner::new(proptest_cases(60)).run(&input, |(spans, cuts, (rings, several))| {
        let plan = if several {
            plan_of_templates(&spans)
        } else {
            plan_of_peer(TENSORS as u32, 0, 0, spans.clone())
        };
        let plan = plan.unwrap();
        let (buffer, dst) = tensors_over(TENSORS, 1, BYTES, |_, _| 0xEE);
        let streams = if rings { ringed_streams } else { local_streams };
        let (local, remote) = streams("short_windows");
        let mut cuts: Vec<u64> = cuts.iter().map(|cut| plan.bytes() * cut / 1000).collect();
        cuts.extend([0, plan.bytes()]);
        cuts.sort_unstable();
        let progress = Arc::new(Progress::default());
        for range in cuts.windows(2).map(|two| two[0]..two[1]) {
            let (mut sent, mut placed) = (sum(), sum());
            let arrived = Arrived { progress: &progress, sum: Some(&mut placed) };
            let (from, to) = ((&engine, &src, &local), (&engine, &dst, &remote));
            let ends = send_and_receive(&plan, &range, from, to, (Some(&mut sent), arrived));
            prop_assert!(matches!(ends, (Ok(()), Ok(()))), "{:?}", ends);
            let (sent, placed) = (sent.value(), placed.value());
            prop_assert_eq!(sent, sum_of(&plan, range), "the bytes in the order of the plan");
            prop_assert_eq!(sent, placed);
        }
        prop_assert_eq!(progress.bytes(), plan.bytes());
        prop_assert!(buffer.read(0, TENSORS * BYTES) == model(&spans));
        Ok(())
    });
    if let Err(error) = outcome {
        panic!("{error}");
    }
}

#[test]
fn whole_pieces_before_a_break_are_in_place() {
    let (buffer, dst) = tensors_over(1, 1, BYTES, |_, _| 0xEE);
    let (local, remote) = local_streams("short_windows_break");
    let sent: Vec<u8> = (0..1234).map(|at| pattern(4, 0, at)).collect();
    let mut socket = std::fs::File::from(local.as_fd().try_clone_to_owned().unwrap());
    socket.write_all(&sent).unwrap();
    drop((socket, local));
    // Shorter pieces follow, of which the rest of the bytes would fill some.
    let long = Span { src: 0, dst: 0, len: 100, count: 100, src_step: 100, dst_step: 200 };
    let short = Span { src: 0, dst: 20_000, len: 10, count: 100, src_step: 10, dst_step: 20 };
    let plan = plan_of_peer(1, 0, 0, vec![long, short]).unwrap();
    let (engine, progress) = (copy_engine(), Arc::new(Progress::default()));
    let error = engine.receive(&plan, 0..plan.bytes(), &dst, &remote, soon(), &progress).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotLinked);
    assert_eq!(copied_bytes(&error), (1200, 11_000), "{error}");
    assert_eq!(progress.bytes(), 1200);
    let mut expected = vec![0xEE; BYTES];
    for piece in 0..12 {
        expected[piece * 200..piece * 200 + 100].copy_from_slice(&sent[piece * 100..piece * 100 + 100]);
    }
    assert!(buffer.read(0, BYTES) == expected);
}

/// Bytes of a transmission from which on windows of 512 bytes and more go through a buffer.
const LARGE: u64 = 16 << 20;

/// The bytes of a plan that the sender gathered and the receiver scattered in a buffer, over `streams`.
fn through_buffers(streams: fn(&str) -> (Stream, Stream), spans: &[Span]) -> (u64, u64) {
    let end = |at: u64, step: i64, span: &Span| at + (span.count - 1) * step.unsigned_abs() + span.len;
    let bytes = |ends: &dyn Fn(&Span) -> u64| spans.iter().map(ends).max().unwrap() as usize;
    let tensor = bytes(&|span| end(span.src, span.src_step, span))
        .max(bytes(&|span| end(span.dst, span.dst_step, span)));
    let (_source, src) = tensors_over(1, 1, tensor, |_, at| at as u8);
    let (_buffer, dst) = tensors_over(1, 1, tensor, |_, _| 0xEE);
    let (local, remote) = streams("short_windows_count");
    let (sender, receiver) = (copy_engine(), copy_engine());
    let plan = plan_of_peer(1, 0, 0, spans.to_vec()).unwrap();
    let (from, to) = ((&sender, &src, &local), (&receiver, &dst, &remote));
    let ends = send_and_receive(&plan, &(0..plan.bytes()), from, to, (None, &Arc::default()));
    assert!(matches!(ends, (Ok(()), Ok(()))), "{ends:?}");
    let copied = |(plain, streaming): (u64, u64)| plain + streaming;
    (copied(sender.counted().bytes()), copied(receiver.counted().bytes()))
}

fn span(len: u64, count: u64, gaps: (u64, u64)) -> Span {
    let (src_step, dst_step) = ((len + gaps.0) as i64, (len + gaps.1) as i64);
    Span { src: 0, dst: 0, len, count, src_step, dst_step }
}

#[test]
fn runs_of_short_windows_go_through_a_buffer() {
    let large = |len: u64| LARGE / len + 1;
    let buffered = |len: u64, count: u64, gaps| {
        let (sent, received) = through_buffers(local_streams, &[span(len, count, gaps)]);
        // The few windows at the end of an interval of the padding may be moved by themselves.
        [sent, received].map(|bytes| bytes * 10 > count * len * 9)
    };
    for (len, count) in [(100, 16), (100, 96), (511, 96)] {
        // Pieces without gaps are one window.
        assert_eq!(buffered(len, count, (0, 64)), [false, true], "{count} of {len}");
        assert_eq!(buffered(len, count, (64, 0)), [true, false], "{count} of {len}");
        assert_eq!(buffered(len, count, (64, 64)), [true, true], "{count} of {len}");
    }
    for len in [512, 8191] {
        assert_eq!(buffered(len, large(len), (64, 64)), [true, true], "{len}");
    }
    // Not tiny in a small transmission, too long in a large one, too few, or neighbours.
    for spans in [
        span(512, 96, (64, 64)),
        span(4096, LARGE / 4096 - 1, (64, 64)),
        span(8192, large(8192), (64, 64)),
        span(100, 15, (64, 64)),
        span(100, 100, (0, 0)),
    ] {
        assert_eq!(through_buffers(local_streams, &[spans]), (0, 0), "{spans:?}");
    }
    // Rings need no buffer.
    assert_eq!(through_buffers(ringed_streams, &[span(100, 96, (64, 64))]), (0, 0));
    // One piece is read many times.
    let repeated = Span { src_step: 0, ..span(100, 100, (0, 50)) };
    assert_eq!(through_buffers(local_streams, &[repeated]), (10_000, 10_000));
}

#[test]
fn single_windows_among_runs_count_on_average() {
    let through_buffers = |spans: &[Span]| through_buffers(local_streams, spans);
    let at = |at: u64, span: Span| Span { src: at, dst: at, ..span };
    let singles = |count: u64| (0..count).map(|index| at(1000 + index * (300 + index), span(100, 1, (0, 0))));
    assert_eq!(through_buffers(&singles(100).collect::<Vec<_>>()), (0, 0));
    // In all, 8 runs with fewer than 64 windows, or with 64.
    let run = |count| at(100_000, span(100, count, (50, 50)));
    let with_singles = |count| through_buffers(&singles(7).chain([run(count)]).collect::<Vec<_>>());
    assert_eq!(with_singles(56), (0, 0));
    assert_eq!(with_singles(57), (6400, 6400));
    // Long pieces among short ones do not keep those from the buffer.
    let long = at(1 << 20, span(300_000, 1, (0, 0)));
    let (after, before) = (at(0, span(100, 50, (50, 50))), at(1_500_000, span(100, 50, (50, 50))));
    assert_eq!(through_buffers(&[before, long, after]), (5000, 5000));
}

#[test]
fn a_buffer_gives_windows_only_inside_itself() {
    let buffer = memory::BounceBuffer::new(100).unwrap();
    assert_eq!(buffer.bytes(), 128, "whole cache lines");
    let windows = buffer.windows(8, 40, 3).unwrap();
    assert_eq!((windows.count(), windows.step(), windows.bytes()), (3, 40, 120));
    assert_eq!((windows.first().addr() - 8) % 64, 0, "it starts with a cache line");
    for (at, len, count) in [(9, 40, 3), (129, 0, 1), (0, u64::MAX, 2), (u64::MAX, 1, 1), (0, 1, 0)] {
        let error = buffer.windows(at, len, count).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::System, "{at}, {len}, {count}");
    }
}

#[test]
fn windows_are_joined_only_if_they_are_neighbours() {
    let buffer = memory::BounceBuffer::new(1000).unwrap();
    let one = |at, len| buffer.windows(at, len, 1).unwrap();
    let shape = |windows: memory::Windows<'_>| {
        (windows.first().addr() - one(0, 1).first().addr(), windows.first().len(), windows.count())
    };
    assert_eq!(shape(buffer.windows(10, 20, 5).unwrap().joined()), (10, 100, 1));
    assert_eq!(one(10, 20).followed_by(&one(30, 5)).map(shape), Some((10, 25, 1)));
    for next in [one(29, 5), one(31, 5), one(5, 5), buffer.windows(30, 5, 2).unwrap()] {
        assert_eq!(one(10, 20).followed_by(&next).map(shape), None);
    }
    let (_kept, tensors) = tensors_over(1, 1, 1000, |_, _| 0);
    let apart = tensors.windows(0, 10, 20, (5, 30)).unwrap();
    let backwards = tensors.windows(0, 90, 20, (5, -20)).unwrap();
    for windows in [apart, backwards] {
        let joined = windows.joined();
        assert_eq!((joined.first().addr(), joined.count()), (windows.first().addr(), 5));
    }
    let first = |count| apart.first_of(count).count();
    assert_eq!([0, 1, 3, 5, 9].map(first), [1, 1, 3, 5, 5]);
}
