//! Joins neighbouring pieces, so that a plan has few spans.

use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Lists with fewer blocks than this become spans if any block joins its neighbour or continues a stride.
const SHORT_LIST: usize = 64;
/// A longer list stays blocks if fewer than one block in this many does so.
const MIN_JOINED: usize = 8;

/// Returns the spans of pieces that are sorted by source: neighbours whose source and destination are both contiguous are one
/// run, and three or more equal runs at a constant distance are one strided span. `None` if there are more than `most` spans.
pub(super) fn joined(pieces: impl Iterator<Item = Piece>, most: usize) -> Result<Option<Vec<Span>>> {
    let (mut spans, mut run): (Vec<Span>, Option<Span>) = (Vec::new(), None);
    for Piece { src, dst, len } in pieces {
        match &mut run {
            Some(run) if run.src + run.len == src && run.dst + run.len == dst => run.len += len,
            _ => run.replace(Span::single(src, dst, len)).map_or(Ok(()), |run| add_run(&mut spans, run))?,
        }
        if spans.len() > most {
            return Ok(None);
        }
    }
    run.map_or(Ok(()), |run| add_run(&mut spans, run))?;
    Ok(Some(spans).filter(|spans| spans.len() <= most))
}

/// Adds a run. If it continues the last span, or if the last two runs are at the same distance, they become one span.
fn add_run(spans: &mut Vec<Span>, run: Span) -> Result<()> {
    let step = |a: &Span, b: &Span| {
        let same = a.len == b.len;
        same.then(|| (b.src.wrapping_sub(a.src).cast_signed(), b.dst.wrapping_sub(a.dst).cast_signed()))
    };
    match &mut spans[..] {
        [.., last]
            if last.count > 1 && last.len == run.len && last.piece(last.count) == (run.src, run.dst) =>
        {
            last.count += 1;
            return Ok(());
        }
        [.., first, second] if first.count == 1 && second.count == 1 => {
            if let Some((src_step, dst_step)) = step(first, second)
                && step(second, &run) == Some((src_step, dst_step))
            {
                *first = Span { count: 3, src_step, dst_step, ..*first };
                spans.pop();
                return Ok(());
            }
        }
        _ => {}
    }
    fallible::push(PLAN, spans, run)
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
    (counted as usize) < pairs.len() / MIN_JOINED
}
