//! Joins neighbouring pieces, so that a plan has few spans.

use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Lists with fewer blocks than this become spans if any block joins its neighbour or continues a stride.
const SHORT_LIST: usize = 64;
/// A longer list stays blocks if fewer than one block in this many does so.
const JOINED: usize = 8;

/// Returns the spans of pieces that are sorted by source.
pub(super) fn joined(pieces: impl ExactSizeIterator<Item = Piece>) -> Result<Vec<Span>> {
    strided(contiguous(pieces)?)
}

/// Returns whether joining neighbours would leave nearly as many spans as there are blocks.
pub(super) fn scattered(pairs: &[(u32, u32)]) -> bool {
    let step = |a: (u32, u32), b: (u32, u32)| (b.0.wrapping_sub(a.0), b.1.wrapping_sub(a.1));
    if pairs.len() < SHORT_LIST {
        let joins = |pairs: &[(u32, u32)]| step(pairs[0], pairs[1]) == (1, 1);
        let continues = |pairs: &[(u32, u32)]| step(pairs[0], pairs[1]) == step(pairs[1], pairs[2]);
        return !pairs.windows(2).any(joins) && !pairs.windows(3).any(continues);
    }
    let (first, second, third) = (&pairs[..pairs.len() - 2], &pairs[1..], &pairs[2..]);
    // A step of one on both sides is a join; three blocks at one distance are a stride.
    let counted = first.iter().zip(second).zip(third).fold(0u32, |joined, ((&a, &b), &c)| {
        let (one, two) = (step(a, b), step(b, c));
        joined + u32::from(one == (1, 1) || one == two)
    });
    (counted as usize) < pairs.len() / JOINED
}

/// Joins neighbours whose source and destination are both contiguous.
fn contiguous(pieces: impl ExactSizeIterator<Item = Piece>) -> Result<Vec<Span>> {
    let mut runs: Vec<Span> = fallible::with_capacity(PLAN, pieces.len())?;
    for Piece { src, dst, len } in pieces {
        match runs.last_mut() {
            Some(run) if run.src + run.len == src && run.dst + run.len == dst => run.len += len,
            _ => runs.push(Span::single(src, dst, len)),
        }
    }
    Ok(runs)
}

/// Joins three or more equal runs at a constant distance into one strided span.
fn strided(runs: Vec<Span>) -> Result<Vec<Span>> {
    let step = |a: &Span, b: &Span| {
        let same = a.len == b.len;
        same.then(|| (b.src.wrapping_sub(a.src).cast_signed(), b.dst.wrapping_sub(a.dst).cast_signed()))
    };
    let even = |three: &[Span]| {
        let first = step(&three[0], &three[1]);
        first.is_some() && first == step(&three[1], &three[2])
    };
    // Shuffled blocks have no strides and stay as they are.
    if !runs.windows(3).any(even) {
        return Ok(runs);
    }
    let mut spans = fallible::with_capacity(PLAN, runs.len())?;
    let mut at = 0;
    while at < runs.len() {
        let mut last = at;
        if let Some(steps) = runs.get(at + 1).and_then(|next| step(&runs[at], next)) {
            while last + 1 < runs.len() && step(&runs[last], &runs[last + 1]) == Some(steps) {
                last += 1;
            }
            if last >= at + 2 {
                let count = (last - at + 1) as u64;
                spans.push(Span { count, src_step: steps.0, dst_step: steps.1, ..runs[at] });
                at = last + 1;
                continue;
            }
        }
        spans.push(runs[at]);
        at += 1;
    }
    Ok(spans)
}
