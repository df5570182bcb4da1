//! The plan of a peer against index arithmetic in 128 bits: an accepted plan stays inside its tensors.
#![no_main]

use std::collections::BTreeSet;

use libfuzzer_sys::fuzz_target;
use llm_datadist_core::ErrorKind;
use llm_datadist_core::testing::model::RowSizes;
use llm_datadist_core::testing::plan::{CopyPlan, Side, Span, Template, TensorSteps};
use llm_datadist_core::testing::protocol::{self, WirePlan};
use llm_datadist_fuzz::{decoded, peak, refused_as};

/// Bytes before the plan: tensors (2), bytes of a tensor (3) for each end, and bytes of a row (2).
const SIZES: usize = 12;
/// Plans with more pieces than this are only checked for how they are refused.
const MAX_PIECES: u64 = 1 << 14;

/// One piece of a plan, from its definition.
struct Piece {
    src: i128,
    dst: i128,
    len: i128,
}

/// Pieces of a plan in one tensor, or `None` where there are too many.
fn pieces(plan: &WirePlan) -> Option<Vec<Piece>> {
    let templates = plan.templates.0.as_ref().ok()?;
    let count = |template: &Template| {
        let one = template.spans.iter().fold(0u64, |sum, span| sum.saturating_add(span.count));
        one.saturating_mul(template.pairs.len() as u64)
    };
    let all = templates.iter().map(count).fold(0, u64::saturating_add);
    (all <= MAX_PIECES).then(|| templates.iter().flat_map(template_pieces).collect())
}

/// The pieces of one template.
fn template_pieces(template: &Template) -> Vec<Piece> {
    let at = |unit: u64, number: u32| i128::from(number) * i128::from(unit);
    let pairs = template.pairs.iter();
    let from = pairs.map(|&(src, dst)| (at(template.src_unit, src), at(template.dst_unit, dst)));
    from.flat_map(|from| template.spans.iter().flat_map(move |span| pieces_of(*span, from))).collect()
}

/// The pieces of a span that is read and written `from` bytes later.
fn pieces_of(span: Span, from: (i128, i128)) -> impl Iterator<Item = Piece> {
    (0..i128::from(span.count)).map(move |k| Piece {
        src: from.0 + i128::from(span.src) + k * i128::from(span.src_step),
        dst: from.1 + i128::from(span.dst) + k * i128::from(span.dst_step),
        len: i128::from(span.len),
    })
}

/// Whether some byte is written twice.
fn written_twice(pieces: &[Piece]) -> bool {
    let mut ranges: Vec<_> = pieces.iter().map(|piece| (piece.dst, piece.dst + piece.len)).collect();
    ranges.sort_unstable();
    ranges.windows(2).any(|two| two[1].0 < two[0].1)
}

/// The rows that the ranges touch, one by one.
fn rows(ranges: impl Iterator<Item = (i128, i128)>, stride: u64) -> Vec<u64> {
    let row = i128::from(stride);
    let touched = ranges.flat_map(|(from, len)| from / row..=(from + len - 1) / row);
    let touched: BTreeSet<i128> = touched.collect();
    touched.into_iter().map(|row| u64::try_from(row).expect("a row inside a tensor")).collect()
}

fuzz_target!(|input: &[u8]| {
    let Some((sizes, body)) = input.split_first_chunk::<SIZES>() else { return };
    let number =
        |at: std::ops::Range<usize>| sizes[at].iter().fold(0u64, |sum, &byte| sum << 8 | u64::from(byte));
    let (src_tensors, src_bytes) = (number(0..2) as u32, number(2..5));
    let (dst_tensors, dst_bytes) = (number(5..7) as u32, number(7..10));
    let row_bytes = number(10..12).max(1);
    let Some(wire) = decoded::<WirePlan>(body) else { return };
    let again = || decoded::<WirePlan>(body).expect("a plan that was decoded");
    let (plan, most) = peak(|| CopyPlan::try_from(again()));
    // The bound that docs/security.md states: the memory that the check for repeated destinations may always
    // use, the spans of templates, and the plan.
    assert!(most < 3 * body.len() + (20 << 20), "{most} bytes of memory for a plan of {}", body.len());
    let plan = match plan {
        Ok(plan) => plan,
        Err(error) => return refused_as(&error, &[ErrorKind::InvalidArgument, ErrorKind::NotLinked]),
    };
    let fits = plan
        .check_bounds(Side::Source, (src_tensors, src_bytes))
        .and_then(|()| plan.check_bounds(Side::Destination, (dst_tensors, dst_bytes)));
    if let Err(error) = &fits {
        refused_as(error, &[ErrorKind::InvalidArgument]);
    }
    let Some(pieces) = pieces(&wire) else { return };
    let inside = |at: i128, len: i128, bytes: u64| at >= 0 && len > 0 && at + len <= i128::from(bytes);
    let end = |TensorSteps { first, step }: TensorSteps| {
        u64::from(first) + u64::from(wire.num_tensors).saturating_sub(1) * u64::from(step) + 1
    };
    let all_inside = end(wire.src) <= u64::from(src_tensors)
        && end(wire.dst) <= u64::from(dst_tensors)
        && pieces
            .iter()
            .all(|piece| inside(piece.src, piece.len, src_bytes) && inside(piece.dst, piece.len, dst_bytes));
    if fits.is_ok() {
        assert!(all_inside, "accepted, and outside: {wire:?}");
        assert!(!written_twice(&pieces), "accepted, and writes one place twice: {wire:?}");
        // Some inputs have rows with gaps.
        let sizes = RowSizes::new(row_bytes, row_bytes + 8 * u64::from(sizes[4] % 3));
        let (row, stride) = (i128::from(sizes.bytes()), i128::from(sizes.stride()));
        let in_a_row = |at: i128, len: i128| row == stride || at % stride + len <= row;
        let checked =
            plan.check_rows(Side::Source, sizes).and_then(|()| plan.check_rows(Side::Destination, sizes));
        let outside = pieces.iter().find(|p| !(in_a_row(p.src, p.len) && in_a_row(p.dst, p.len)));
        assert_eq!(checked.is_err(), outside.is_some(), "{wire:?} in {sizes:?}");
        if let Err(error) = &checked {
            refused_as(error, &[ErrorKind::InvalidArgument]);
        } else {
            let expected = rows(pieces.iter().map(|p| (p.src, p.len)), sizes.stride());
            assert_eq!(plan.touched_rows(Side::Source, sizes).expect("memory"), expected);
            let expected = rows(pieces.iter().map(|p| (p.dst, p.len)), sizes.stride());
            assert_eq!(plan.touched_rows(Side::Destination, sizes).expect("memory"), expected);
        }
        same_bytes(&plan, &pieces);
    } else {
        assert!(!all_inside || written_twice(&pieces), "refused, and sound: {wire:?}");
    }
    // The encoded plan equals the planned one.
    let again = WirePlan::try_from(&plan).expect("a plan that was received fits a message");
    let frame = protocol::encode(&again).expect("a plan that was received can be sent");
    let read: WirePlan = protocol::decode(&frame[protocol::HEADER..]).expect("and read");
    let read = CopyPlan::try_from(read).expect("and accepted");
    same_bytes(&read, &pieces);
    assert_eq!(
        (read.tensors(Side::Source), read.tensors(Side::Destination)),
        (plan.tensors(Side::Source), plan.tensors(Side::Destination))
    );
});

/// An accepted plan moves exactly the pieces that the message names.
fn same_bytes(plan: &CopyPlan, pieces: &[Piece]) {
    let wide = |number: u64| i128::from(number);
    let mut planned: Vec<_> = (plan.templates().iter())
        .flat_map(Template::pieces)
        .map(|piece| (wide(piece.src), wide(piece.dst), wide(piece.len)))
        .collect();
    let mut named: Vec<_> = pieces.iter().map(|piece| (piece.src, piece.dst, piece.len)).collect();
    planned.sort_unstable();
    named.sort_unstable();
    assert_eq!(planned, named);
}
