//! Plans pieces of any length and position, for caches whose calls name bytes in place of blocks.

use std::collections::BinaryHeap;

use smallvec::{SmallVec, smallvec};

use super::copy_plan::CopyPlan;
use super::joining::joined;
use super::spans::{PLAN, Piece};
use super::template::Template;
use super::template_list::MAX_TEMPLATE_SPANS;
use super::tensor_steps::TensorSteps;
use crate::error::{Error, Result};
use crate::fallible;

impl CopyPlan {
    /// Plans `pieces` between two caches, with the same result as moving one after the other in the order given: bytes that a
    /// later piece writes again are left out. No piece may be empty or end above 2^63. The pieces move in each of `num_tensors`
    /// tensors, from tensor `first.0` of the source to tensor `first.1` of the destination on.
    ///
    /// `Err(InvalidArgument)` if a message could not carry the plan: it would have more than 65,536 spans.
    pub fn of_pieces(pieces: &[Piece], first: (u32, u32), num_tensors: u32) -> Result<CopyPlan> {
        let mut sorted = fallible::copied(PLAN, pieces)?;
        sorted.sort_unstable_by_key(|piece| piece.dst);
        if sorted.windows(2).any(|two| two[0].dst + two[0].len > two[1].dst) {
            sorted = written_last(pieces)?;
        }
        if !sorted.is_sorted_by_key(|piece| piece.src) {
            sorted.sort_unstable_by_key(|piece| piece.src);
        }
        let spans = joined(sorted.into_iter(), MAX_TEMPLATE_SPANS)?.ok_or_else(|| {
            let text = format!(
                "the pieces are more than {MAX_TEMPLATE_SPANS} runs of bytes: move fewer in one call"
            );
            Error::invalid(text).with("pieces", pieces.len())
        })?;
        let [src, dst] = [first.0, first.1].map(TensorSteps::consecutive);
        let templates: SmallVec<[Template; 1]> = smallvec![Template::of_spans(spans)];
        CopyPlan::new(num_tensors, (src, dst), templates.into())
    }
}

/// Returns the parts of `pieces` that no later piece writes again, by ascending destination. They are at most twice as many.
fn written_last(pieces: &[Piece]) -> Result<Vec<Piece>> {
    let mut order = fallible::collect(PLAN, 0..pieces.len())?;
    order.sort_unstable_by_key(|&index| pieces[index].dst);
    let mut kept: Vec<Piece> = fallible::with_capacity(PLAN, 2 * pieces.len())?;
    // The pieces that have begun at or before `at`, with their ends. The last one of the list is on top.
    let mut begun = BinaryHeap::new();
    begun.try_reserve(pieces.len()).map_err(|_| fallible::out_of_memory(PLAN, pieces.len()))?;
    let (mut next, mut at) = (0, 0);
    loop {
        while begun.peek().is_some_and(|&(_, end)| end <= at) {
            begun.pop();
        }
        let following = order.get(next).map(|&index| pieces[index].dst);
        match (begun.peek(), following) {
            (None, None) => return Ok(kept),
            (None, Some(start)) => at = start,
            (Some(&(index, end)), following) => {
                let stop = following.map_or(end, |start| start.clamp(at, end));
                let Piece { src, dst, .. } = pieces[index];
                if stop > at {
                    kept.push(Piece { src: src + (at - dst), dst: at, len: stop - at });
                    at = stop;
                }
            }
        }
        while let Some(&index) = order.get(next).filter(|&&index| pieces[index].dst <= at) {
            begun.push((index, pieces[index].dst + pieces[index].len));
            next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{CopyPlan, Piece};

    /// Returns what the plan of `pieces` makes of `size` bytes, beside what moving one piece after the other makes of them.
    fn moved(pieces: &[Piece], size: usize) -> [Vec<usize>; 2] {
        let plan = CopyPlan::of_pieces(pieces, (0, 0), 1).unwrap();
        let mut writes = vec![0; size];
        let mut results = [vec![usize::MAX; size], vec![usize::MAX; size]];
        let index = |at: u64| usize::try_from(at).unwrap();
        let copy = |Piece { src, dst, len }: Piece, to: &mut [usize]| {
            (0..len).for_each(|k| to[index(dst + k)] = index(src + k));
        };
        for piece in plan.tensor_pieces(0, u64::MAX) {
            (piece.dst..piece.dst + piece.len).for_each(|at| writes[index(at)] += 1);
            copy(piece, &mut results[0]);
        }
        assert!(writes.iter().all(|&count| count <= 1), "{pieces:?} write a byte twice: {writes:?}");
        for &piece in pieces {
            copy(piece, &mut results[1]);
        }
        results
    }

    #[test]
    fn later_pieces_overwrite_earlier_ones() {
        let mut random = 7u64;
        let mut draw = |below: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (random >> 33) % below
        };
        for _ in 0..2000 {
            let count = 1 + draw(12);
            let pieces: Vec<_> =
                (0..count).map(|_| Piece { src: draw(60), dst: draw(60), len: 1 + draw(20) }).collect();
            let [planned, expected] = moved(&pieces, 80);
            assert_eq!(planned, expected, "{pieces:?}");
        }
    }

    #[test]
    fn pieces_that_follow_each_other_are_one_span() {
        let pieces: Vec<_> =
            (0..100).rev().map(|k| Piece { src: 8 * k, dst: 1000 + 8 * k, len: 8 }).collect();
        let plan = CopyPlan::of_pieces(&pieces, (0, 0), 1).unwrap();
        assert_eq!((plan.num_entries(), plan.bytes()), (2, 800));
    }

    #[test]
    fn too_many_runs_are_refused() {
        let far = |k: u64| Piece { src: 100 * k * k, dst: 100 * (k * k + k), len: 1 };
        let pieces: Vec<_> = (0..70_000).map(far).collect();
        let error = CopyPlan::of_pieces(&pieces, (0, 0), 1).unwrap_err();
        assert!(error.to_string().contains("65536"), "{error}");
    }
}
