//! Plans, run one after the other, give the same result as copying pair by pair; neighbours are merged.
//!
//! Not for: memory or workers (`local_copies.rs`).

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};

use llm_datadist_core::Result;
use llm_datadist_core::testing::plan::{
    CacheCount, CopyPlan, MAX_TEMPLATE_SPANS, Moves, Piece, Pieces, Side, Span, Template, TensorSteps,
};
use llm_datadist_core::testing::protocol::WirePlan;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};

use crate::fixtures::{Chance, block_moves, block_plan, listed, plan_of_peer, proptest_cases};

type Pairs = Vec<(u64, u64)>;

/// The plan of a copy between two caches.
fn plan(pairs: &[(u64, u64)], block_bytes: u64) -> CopyPlan {
    CopyPlan::moves(&mut block_moves(pairs, block_bytes, 3)).unwrap()
}

/// The plans of a copy, in order.
fn plans(pairs: &[(u64, u64)], block_bytes: u64, caches: CacheCount) -> Vec<CopyPlan> {
    CopyPlan::moves_in_order(&mut block_moves(pairs, block_bytes, 3), caches).unwrap().into_iter().collect()
}

fn pieces(plan: &CopyPlan) -> Vec<Piece> {
    plan.tensor_pieces(0, plan.tensor_bytes()).collect()
}

/// Two tensors as bytes; with one cache both are the same.
#[derive(Clone, PartialEq, Debug)]
struct Model {
    src: Vec<u8>,
    dst: Vec<u8>,
    caches: CacheCount,
}

impl Model {
    fn new(rows: u64, block_bytes: u64, caches: CacheCount) -> Self {
        let bytes = (rows * block_bytes) as usize;
        Model {
            src: (0..bytes).map(|at| at as u8).collect(),
            dst: (0..bytes).map(|at| !(at as u8)).collect(),
            caches,
        }
    }

    fn get(&self, at: u64) -> u8 {
        if self.caches == CacheCount::One { self.dst[at as usize] } else { self.src[at as usize] }
    }

    fn one_by_one(mut self, pairs: &[(u64, u64)], block_bytes: u64) -> Self {
        for &(src, dst) in pairs {
            for at in 0..block_bytes {
                self.dst[(dst * block_bytes + at) as usize] = self.get(src * block_bytes + at);
            }
        }
        self
    }

    /// Copies piece after piece, those of each plan in the order in which `shuffle` leaves them.
    fn in_order(mut self, plans: &[CopyPlan], mut shuffle: impl FnMut(&mut Vec<Piece>)) -> Self {
        for plan in plans {
            let mut pieces = pieces(plan);
            shuffle(&mut pieces);
            for Piece { src, dst, len } in pieces {
                for at in 0..len {
                    self.dst[(dst + at) as usize] = self.get(src + at);
                }
            }
        }
        self
    }

    /// Makes all reads of a plan before all of its writes.
    fn reads_first(mut self, plans: &[CopyPlan]) -> Self {
        for plan in plans {
            let pieces = pieces(plan);
            let read: Vec<Vec<u8>> = pieces
                .iter()
                .map(|piece| (0..piece.len).map(|at| self.get(piece.src + at)).collect())
                .collect();
            for (piece, bytes) in pieces.iter().zip(read) {
                let at = piece.dst as usize;
                self.dst[at..at + bytes.len()].copy_from_slice(&bytes);
            }
        }
        self
    }
}

/// Returns lists of pairs of every shape that the engine must support, over `rows` blocks.
fn lists(rows: u64) -> impl Strategy<Value = Pairs> {
    let any = prop::collection::vec((0..rows, 0..rows), 0..24);
    let run = (0..rows, 0..rows, 1..rows, 0..4u64, -3..4i64).prop_map(move |(src, dst, count, up, step)| {
        let at = |k: u64| (src + k * up, dst.cast_signed() + k.cast_signed() * step);
        let inside = |(src, dst): (u64, i64)| {
            u64::try_from(dst).ok().filter(|dst| src < rows && *dst < rows).map(|dst| (src, dst))
        };
        (0..count).filter_map(|k| inside(at(k))).collect::<Pairs>()
    });
    let swapped = (0..rows, 0..rows, 0..rows).prop_map(|(a, b, spare)| vec![(a, spare), (b, a), (spare, b)]);
    let chain = prop::collection::vec(0..rows, 2..10)
        .prop_map(|blocks| blocks.windows(2).map(|two| (two[0], two[1])).collect::<Pairs>());
    let fan_out = (0..rows, prop::collection::vec(0..rows, 1..8))
        .prop_map(|(src, all)| all.into_iter().map(|dst| (src, dst)).collect::<Pairs>());
    let fan_in = (0..rows, prop::collection::vec(0..rows, 1..8))
        .prop_map(|(dst, all)| all.into_iter().map(|src| (src, dst)).collect::<Pairs>());
    let onto_itself = (0..rows).prop_map(|block| vec![(block, block)]);
    let part = prop_oneof![4 => any, 4 => run, 1 => swapped, 1 => chain, 1 => fan_out, 1 => fan_in, 1 => onto_itself];
    prop::collection::vec(part, 1..4).prop_map(|parts| parts.concat())
}

/// Dense lists are sorted by a table, others by comparison. The order is visible in the spans of a plan.
#[test]
fn long_lists_are_planned_as_short_ones_are() {
    long_list_is_sorted(0);
    long_list_is_sorted(1 << 30);
}

/// Plans a permutation, with sources that differ by `high` too.
fn long_list_is_sorted(high: u64) {
    let (len, count) = (4096u64, 3000u64);
    let position = |k: u64| (k * 1789) % count + if k.is_multiple_of(7) { high } else { 0 };
    let pairs: Pairs = (0..count).map(|k| (position(k), k * 991 % count)).collect();
    let plan = block_plan(&pairs, len, 1);
    let moved: Vec<(u64, u64, u64)> =
        plan.pieces(0, plan.bytes()).map(|(_, piece)| (piece.src, piece.dst, piece.len)).collect();
    let mut expected: Vec<(u64, u64, u64)> =
        pairs.iter().map(|&(src, dst)| (src * len, dst * len, len)).collect();
    expected.sort_unstable();
    let bytes = |list: &[(u64, u64, u64)]| -> Vec<(u64, u64)> {
        list.iter()
            .flat_map(|&(src, dst, len)| (0..len / 4096).map(move |k| (src + k * 4096, dst + k * 4096)))
            .collect()
    };
    assert_eq!(bytes(&moved), bytes(&expected));
    // One destination occurs twice, so its first piece is left out.
    let mut twice = pairs;
    twice[2999].1 = twice[0].1;
    let plan = block_plan(&twice, len, 1);
    assert_eq!(plan.bytes(), 2999 * len);
    let source = |of: u64| {
        let mut pieces = plan.pieces(0, plan.bytes()).map(|(_, piece)| piece);
        pieces
            .find(|piece| (piece.dst..piece.dst + piece.len).contains(&of))
            .map(|piece| piece.src + (of - piece.dst))
    };
    assert_eq!(source(twice[0].1 * len), Some(twice[2999].0 * len));
}

#[test]
fn does_what_copying_pair_by_pair_does() {
    let mut runner = TestRunner::new(proptest_cases(3000));
    let cuts = prop::collection::vec(any::<u64>(), 0..6);
    let input = (lists(14), 1..9u64, any::<bool>(), any::<u64>(), cuts);
    let ran = std::cell::Cell::new((0, 0));
    runner
        .run(&input, |(pairs, block_bytes, one_cache, seed, cuts)| {
            let caches = if one_cache { CacheCount::One } else { CacheCount::Two };
            let plans = plans(&pairs, block_bytes, caches);
            let start = Model::new(14, block_bytes, caches);
            let expected = start.clone().one_by_one(&pairs, block_bytes);
            prop_assert_eq!(&start.clone().in_order(&plans, |_| {}), &expected);
            prop_assert_eq!(&start.clone().in_order(&plans, |pieces| pieces.reverse()), &expected);
            let mut chance = Chance(seed);
            let shuffled = start.clone().in_order(&plans, |pieces| chance.shuffle(pieces));
            prop_assert_eq!(&shuffled, &expected);
            prop_assert_eq!(&start.clone().reads_first(&plans), &expected);
            for plan in &plans {
                independent(plan, caches, 14 * block_bytes)?;
                spans_say_what_pieces_say(plan)?;
                cut_anywhere_the_pieces_tile(plan, &cuts)?;
                prop_assert_eq!(plan.bytes(), 3 * plan.tensor_bytes());
            }
            let moved: u64 = plans.iter().map(CopyPlan::tensor_bytes).sum();
            let useful = match caches {
                CacheCount::One => pairs.iter().filter(|(src, dst)| src != dst).count(),
                CacheCount::Two => pairs.iter().map(|(_, dst)| dst).collect::<HashSet<_>>().len(),
            } as u64;
            prop_assert!(one_cache || plans.len() <= 1, "between two caches, nothing waits");
            prop_assert_eq!(moved, useful * block_bytes);
            let (looked_at, in_order) = ran.get();
            ran.set((looked_at + useful, in_order + u64::from(plans.len() > 1)));
            Ok(())
        })
        .unwrap();
    let (looked_at, in_order) = ran.get();
    assert!(looked_at > 1000 && in_order > 50, "{looked_at} pairs, {in_order} copies of several plans");
}

/// Checks that no byte is written twice, none is both written and read, and none is outside the tensors.
fn independent(plan: &CopyPlan, caches: CacheCount, tensor_bytes: u64) -> Result<(), TestCaseError> {
    let mut written = HashSet::new();
    let all = pieces(plan);
    prop_assert!(!all.is_empty());
    for piece in &all {
        prop_assert!(piece.len > 0);
        prop_assert!(piece.src + piece.len <= tensor_bytes && piece.dst + piece.len <= tensor_bytes);
        for at in piece.dst..piece.dst + piece.len {
            prop_assert!(written.insert(at), "byte {} is written twice", at);
        }
    }
    if caches == CacheCount::One {
        for piece in &all {
            for at in piece.src..piece.src + piece.len {
                prop_assert!(!written.contains(&at), "byte {} is read and written", at);
            }
        }
    }
    Ok(())
}

fn spans_say_what_pieces_say(plan: &CopyPlan) -> Result<(), TestCaseError> {
    let by_hand: Vec<Piece> = plan
        .templates()
        .iter()
        .flat_map(Template::placed_spans)
        .flat_map(|span| {
            (0..span.count.cast_signed()).map(move |k| Piece {
                src: (span.src.cast_signed() + k * span.src_step) as u64,
                dst: (span.dst.cast_signed() + k * span.dst_step) as u64,
                len: span.len,
            })
        })
        .collect();
    prop_assert_eq!(by_hand, pieces(plan));
    Ok(())
}

fn cut_anywhere_the_pieces_tile(plan: &CopyPlan, cuts: &[u64]) -> Result<(), TestCaseError> {
    let byte_pairs = |pieces: &[Piece]| -> Vec<(u64, u64)> {
        pieces.iter().flat_map(|piece| (0..piece.len).map(|at| (piece.src + at, piece.dst + at))).collect()
    };
    let total = plan.tensor_bytes();
    let mut cuts: Vec<u64> = cuts.iter().map(|cut| cut % (total + 1)).chain([0, total]).collect();
    cuts.sort_unstable();
    let mut parts = Vec::new();
    for two in cuts.windows(2) {
        let part: Vec<Piece> = plan.tensor_pieces(two[0], two[1]).collect();
        prop_assert_eq!(part.iter().map(|piece| piece.len).sum::<u64>(), two[1] - two[0]);
        prop_assert!(part.iter().all(|piece| piece.len > 0));
        parts.extend(part);
    }
    prop_assert_eq!(byte_pairs(&parts), byte_pairs(&pieces(plan)));
    prop_assert_eq!(plan.tensor_pieces(total, total + 10).count(), 0);
    Ok(())
}

fn spans(pairs: &[(u64, u64)], caches: CacheCount) -> Vec<Vec<Span>> {
    let spans = |plan: &CopyPlan| plan.templates().iter().flat_map(Template::placed_spans).collect();
    plans(pairs, 16, caches).iter().map(spans).collect()
}

/// `count` pieces of `blocks` blocks of 16 bytes.
fn span(src: u64, dst: u64, blocks: u64, count: u64, src_step: i64, dst_step: i64) -> Span {
    Span {
        src: 16 * src,
        dst: 16 * dst,
        len: 16 * blocks,
        count,
        src_step: 16 * src_step,
        dst_step: 16 * dst_step,
    }
}

#[test]
fn merges_to_the_fewest_spans() {
    use CacheCount::{One, Two};
    let map = |count: u64, f: &dyn Fn(u64) -> (u64, u64)| (0..count).map(f).collect::<Pairs>();
    let up = map(10, &|k| (k + 5, k + 20));
    let mut given_backwards = up.clone();
    given_backwards.reverse();
    let mut given_shuffled = up.clone();
    given_shuffled.swap(0, 7);
    given_shuffled.swap(3, 9);
    let groups = |n: u64| map(4 * n, &|k| (k / 4 * 8 + k % 4, k / 4 * 8 + k % 4 + 100));
    let one = |src, dst| span(src, dst, 1, 1, 0, 0);
    let two_runs: Pairs = vec![(1, 5), (2, 6), (8, 3), (9, 4), (10, 5)];
    let cases: Vec<(&str, Pairs, CacheCount, Vec<Vec<Span>>)> = vec![
        ("nothing", vec![], Two, vec![]),
        ("one", vec![(3, 4)], Two, vec![vec![one(3, 4)]]),
        ("ascending", up, Two, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("given backwards", given_backwards, Two, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("given shuffled", given_shuffled, One, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("identity, two caches", map(9, &|k| (k, k)), Two, vec![vec![span(0, 0, 9, 1, 0, 0)]]),
        ("identity, one cache", map(9, &|k| (k, k)), One, vec![]),
        ("descending", map(10, &|k| (k, 9 - k)), Two, vec![vec![span(0, 9, 1, 10, 1, -1)]]),
        ("both strided", map(10, &|k| (2 * k, 3 * k + 1)), Two, vec![vec![span(0, 1, 1, 10, 2, 3)]]),
        ("scattered", map(10, &|k| (k, 4 * k)), Two, vec![vec![span(0, 0, 1, 10, 1, 4)]]),
        ("gathered", map(10, &|k| (4 * k, k)), Two, vec![vec![span(0, 0, 1, 10, 4, 1)]]),
        ("fan-out", map(10, &|k| (0, k + 1)), One, vec![vec![span(0, 1, 1, 10, 0, 1)]]),
        ("three equal runs", groups(3), Two, vec![vec![span(0, 100, 4, 3, 8, 8)]]),
        ("two equal runs", groups(2), Two, vec![vec![span(0, 100, 4, 1, 0, 0), span(8, 108, 4, 1, 0, 0)]]),
        (
            "the example of the contract: the last wins",
            two_runs,
            Two,
            // 1→5 is left out, because 10→5 comes after it.
            vec![vec![one(2, 6), span(8, 3, 3, 1, 0, 0)]],
        ),
        (
            "the same in one cache: the last wins",
            vec![(1, 25), (2, 26), (10, 25)],
            One,
            vec![vec![span(1, 25, 2, 1, 0, 0)], vec![one(10, 25)]],
        ),
        ("a chain {0:[1],1:[2]}", vec![(0, 1), (1, 2)], One, vec![vec![one(0, 1)], vec![one(1, 2)]]),
        (
            "two exchanged through a third",
            vec![(0, 2), (1, 0), (2, 1)],
            One,
            vec![vec![one(0, 2)], vec![one(1, 0)], vec![one(2, 1)]],
        ),
        ("read, then overwritten", vec![(1, 2), (0, 1)], One, vec![vec![one(1, 2)], vec![one(0, 1)]]),
        // Every block that is read has the number 0, or one that is beyond all that are written.
        ("0 is overwritten", vec![(0, 1), (64, 0)], One, vec![vec![one(0, 1)], vec![one(64, 0)]]),
    ];
    assert!(cases.len() > 15);
    for (name, pairs, caches, expected) in cases {
        assert_eq!(spans(&pairs, caches), expected, "{name}");
    }
}

#[test]
fn a_range_is_one_span_and_onto_itself_nothing() {
    let range = |src, dst, caches| {
        let first = Piece { src: 0, dst: 0, len: 7 };
        let pieces = Pieces::rows(first, (1, 1), [(src, dst)].into_iter()).unwrap();
        let mut moves = Moves { pieces, num_tensors: 5, ..Moves::default() };
        CopyPlan::moves_in_order(&mut moves, caches).unwrap().into_iter().collect::<Vec<_>>()
    };
    let plans = range(3, 9, CacheCount::One);
    let [plan] = &plans[..] else { panic!("{plans:?}") };
    let spans: Vec<Span> = plan.templates().iter().flat_map(Template::placed_spans).collect();
    assert_eq!(spans, [Span { src: 3, dst: 9, len: 7, count: 1, src_step: 0, dst_step: 0 }]);
    assert_eq!((plan.bytes(), plan.num_tensors()), (35, 5));
    assert_eq!(range(3, 3, CacheCount::Two)[0].bytes(), 35);
    assert!(range(3, 3, CacheCount::One).is_empty());
}

#[test]
fn offsets_near_two_to_the_63_do_not_overflow() {
    let block_bytes = 1u64 << 40;
    let last = (1u64 << 23) - 1;
    let all = pieces(&plan(&[(last, 0), (last - 1, 1), (0, last)], block_bytes));
    assert_eq!(all.len(), 3);
    for (src, dst) in [(last, 0), (last - 1, 1), (0, last)] {
        assert!(all.contains(&Piece { src: src * block_bytes, dst: dst * block_bytes, len: block_bytes }));
    }
}

/// Spans as a peer may send them: small numbers that nearly fit, and the largest numbers.
fn foreign_spans() -> impl Strategy<Value = Span> {
    let number = || prop_oneof![12 => 0..24u64, 1 => Just(u64::MAX), 1 => Just(1 << 63), 1 => any::<u64>()];
    let step = || prop_oneof![12 => -12..12i64, 1 => Just(i64::MIN), 1 => Just(i64::MAX), 1 => any::<i64>()];
    let count = prop_oneof![12 => 0..5u64, 1 => Just(u64::MAX), 1 => any::<u64>()];
    (number(), number(), prop_oneof![12 => 0..6u64, 1 => any::<u64>()], count, step(), step()).prop_map(
        |(src, dst, len, count, src_step, dst_step)| Span { src, dst, len, count, src_step, dst_step },
    )
}

/// Source, destination and length of each piece, in numbers that cannot overflow.
type Walked = Vec<[i128; 3]>;

/// The pieces of a span, one by one; `None` if they are too many or empty.
fn one_by_one(span: &Span) -> Option<Walked> {
    let Span { src, dst, len, count, src_step, dst_step } = *span;
    let at = |start: u64, step: i64, k: u64| i128::from(start) + i128::from(step) * i128::from(k);
    let piece = |k| [at(src, src_step, k), at(dst, dst_step, k), i128::from(len)];
    ((1..=1 << 20).contains(&count) && len > 0).then(|| (0..count).map(piece).collect())
}

/// The rows that contain a byte of `len` bytes from any of the starts on.
fn rows_of(starts: impl Iterator<Item = (u64, u64)>, row_bytes: u64) -> Vec<u64> {
    let bytes = starts.flat_map(|(start, len)| start..start + len);
    bytes.map(|byte| byte / row_bytes).collect::<BTreeSet<u64>>().into_iter().collect()
}

/// How many plans were made, and how many of these fit into tensors of a few bytes.
#[derive(Default)]
struct Seen(Cell<(u32, u32)>);

/// What a peer may send: tensors, the first source and the first destination, and bytes of tensors and rows.
type Given = ([u32; 3], [u64; 3]);

fn given() -> impl Strategy<Value = Given> {
    let tensors = || prop_oneof![8 => 0..4u32, 1 => Just(u32::MAX)];
    let tensors = [tensors(), tensors(), tensors()];
    (tensors, prop_oneof![[1..40u64, 1..40u64, 1..9u64], [1..1500u64, 1..1500u64, 1..90u64]])
}

impl Seen {
    /// Checks that a plan is refused, or all its pieces lie inside the tensors and touch the named rows.
    fn check(&self, made: &Result<CopyPlan>, given: Given, walked: Option<&Walked>) -> TestCaseResult {
        let ([count, src, dst], [src_bytes, dst_bytes, row_bytes]) = given;
        let inside = |piece: &[i128; 3], ends: [u64; 2]| {
            (0..2).all(|end| piece[end] >= 0 && piece[end] + piece[2] <= i128::from(ends[end]))
        };
        let apart = |a: &[i128; 3], b: &[i128; 3]| a[1] + a[2] <= b[1] || b[1] + b[2] <= a[1];
        let once = |all: &Walked| (0..all.len()).all(|at| all[at + 1..].iter().all(|b| apart(&all[at], b)));
        let bytes = walked.map_or(0, |walked| walked.iter().map(|piece| piece[2]).sum::<i128>());
        let all = bytes * i128::from(count);
        let sound = count > 0
            && src.checked_add(count).is_some()
            && dst.checked_add(count).is_some()
            && all < 1 << 63
            && walked.is_some_and(|walked| {
                walked.iter().all(|piece| inside(piece, [u64::MAX; 2])) && once(walked)
            });
        prop_assert_eq!(made.is_ok(), sound, "{:?}", made);
        let (Ok(plan), Some(walked)) = (made, walked) else { return Ok(()) };
        prop_assert_eq!(
            (plan.num_tensors(), plan.tensors(Side::Source).first, plan.tensors(Side::Destination).first),
            (count, src, dst)
        );
        prop_assert_eq!(i128::from(plan.bytes()), all);
        let fits = walked.iter().all(|piece| inside(piece, [src_bytes, dst_bytes]))
            && bytes <= i128::from(dst_bytes)
            && src + count <= 4
            && dst + count <= 4;
        let checked = plan
            .check_bounds(Side::Source, (4, src_bytes))
            .and_then(|()| plan.check_bounds(Side::Destination, (4, dst_bytes)));
        prop_assert_eq!(checked.is_ok(), fits, "{:?}", checked);
        self.0.set((self.0.get().0 + 1, self.0.get().1 + u32::from(fits)));
        if fits {
            let pieces = || walked.iter().map(|piece| piece.map(|number| number as u64));
            let read = rows_of(pieces().map(|[src, _, len]| (src, len)), row_bytes);
            let written = rows_of(pieces().map(|[_, dst, len]| (dst, len)), row_bytes);
            prop_assert_eq!(
                (
                    plan.touched_rows(Side::Source, row_bytes).unwrap(),
                    plan.touched_rows(Side::Destination, row_bytes).unwrap()
                ),
                (read, written)
            );
            let walked: u64 = plan.pieces(0, u64::MAX).map(|(_, piece)| piece.len).sum();
            prop_assert_eq!(walked, plan.bytes());
        }
        Ok(())
    }

    fn enough(&self) {
        let (made, fit) = self.0.get();
        assert!(made > 100 && fit > 50 && made - fit > 50, "{made} made, {fit} fit");
    }
}

#[test]
fn spans_of_peers() {
    let seen = Seen::default();
    TestRunner::new(proptest_cases(6000))
        .run(&(given(), prop::collection::vec(foreign_spans(), 0..4)), |(given, spans)| {
            let ([count, src, dst], _) = given;
            let walked: Option<Vec<Walked>> = spans.iter().map(one_by_one).collect();
            let made = plan_of_peer(count, src, dst, spans);
            seen.check(&made, given, walked.map(|pieces| pieces.concat()).as_ref())
        })
        .unwrap();
    seen.enough();
}

#[test]
fn blocks_of_peers() {
    let number = || prop_oneof![12 => 0..24u64, 1 => Just(u64::MAX), 1 => Just(1 << 63), 1 => any::<u64>()];
    let small = || prop_oneof![12 => 0..24u32, 1 => Just(u32::MAX), 1 => any::<u32>()];
    let blocks = ([number(), number(), number()], prop::collection::vec((small(), small()), 0..6));
    let seen = Seen::default();
    TestRunner::new(proptest_cases(6000))
        .run(&(given(), blocks), |(given, ([len, src, dst], pairs))| {
            let ([count, src_tensor, dst_tensor], _) = given;
            let blocks = blocks_of(len, (src, dst), pairs);
            let walked = walk_template(&blocks);
            let first = |tensor| TensorSteps::consecutive(tensor);
            let made =
                CopyPlan::from_templates(count, first(src_tensor), first(dst_tensor), listed(vec![blocks]));
            seen.check(&made, given, walked.as_ref())
        })
        .unwrap();
    seen.enough();
}

fn blocks_of(len: u64, (src, dst): (u64, u64), pairs: Vec<(u32, u32)>) -> Template {
    let spans = vec![Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }];
    Template::new((len, len), pairs, spans)
}

/// Every piece of a template, one by one; `None` if it has none, or a span is not valid where it stands.
fn walk_template(template: &Template) -> Option<Walked> {
    let Template { src_unit, dst_unit, pairs, spans, .. } = template;
    let one: Walked = spans.iter().map(one_by_one).collect::<Option<Vec<_>>>()?.concat();
    let inside =
        |piece: &[i128; 3]| piece[..2].iter().all(|&at| at >= 0 && at + piece[2] <= i128::from(u64::MAX));
    let at = |unit: &u64, number: u32| i128::from(*unit) * i128::from(number);
    (!pairs.is_empty() && !one.is_empty() && one.iter().all(inside)).then(|| {
        let position = |&(s, d): &(u32, u32)| {
            one.iter().map(move |&[src, dst, len]| [src + at(src_unit, s), dst + at(dst_unit, d), len])
        };
        pairs.iter().flat_map(position).collect()
    })
}

#[test]
fn templates_of_peers() {
    let unit = || prop_oneof![12 => 0..12u64, 1 => Just(u64::MAX), 1 => any::<u64>()];
    let small = || prop_oneof![30 => 0..8u32, 1 => Just(u32::MAX), 1 => any::<u32>()];
    let pairs =
        (0..8usize).prop_flat_map(move |count| prop::collection::vec((small(), small()), count.div_ceil(3)));
    let tame = (0..6u64, 0..6u64, 1..3u64, 1..4u64, -3..9i64, 2..9i64).prop_map(
        |(src, dst, len, count, src_step, dst_step)| Span { src, dst, len, count, src_step, dst_step },
    );
    let spans = prop::collection::vec(prop_oneof![12 => tame, 1 => foreign_spans()], 0..4);
    let template = (unit(), unit(), pairs, spans)
        .prop_map(|(src_unit, dst_unit, pairs, spans)| Template::new((src_unit, dst_unit), pairs, spans));
    let templates = (1..5usize)
        .prop_flat_map(move |count| prop::collection::vec(template.clone(), count.saturating_sub(2).max(1)));
    let seen = Seen::default();
    TestRunner::new(proptest_cases(20_000))
        .run(&(given(), templates), |(given, templates)| {
            let ([count, src, dst], _) = given;
            let walked: Option<Vec<Walked>> = templates.iter().map(walk_template).collect();
            let (src, dst) = (TensorSteps::consecutive(src), TensorSteps::consecutive(dst));
            let made = CopyPlan::from_templates(count, src, dst, listed(templates));
            seen.check(&made, given, walked.map(|pieces| pieces.concat()).as_ref())
        })
        .unwrap();
    seen.enough();
}

/// A part of a template, cut anywhere, is the same part of the list of its bytes.
#[test]
fn spans_of_a_range_of_a_template_are_its_bytes() {
    let span = (12..18u64, 0..3u64, 1..4u64, 1..5u64, -3..9i64, 4..6i64).prop_map(
        |(src, dst, len, count, src_step, dst_step)| Span { src, dst, len, count, src_step, dst_step },
    );
    let spans = prop::collection::vec(span, 1..4).prop_map(|mut spans| {
        spans.iter_mut().zip(0..).for_each(|(span, at): (&mut Span, u64)| span.dst += 32 * at);
        spans
    });
    let pairs =
        prop::collection::vec(0..5u32, 1..5).prop_map(|src| src.into_iter().zip(0..).collect::<Vec<_>>());
    let (whole, cut) = (Cell::new(0), Cell::new(0));
    TestRunner::new(proptest_cases(2000))
        .run(&(spans, pairs, any::<(u64, u64)>()), |(spans, pairs, ends)| {
            let template = Template::new((7, 100), pairs, spans);
            let walked = walk_template(&template).unwrap();
            let bytes = |tensor: usize, [src, dst, len]: [i128; 3]| {
                (0..len).map(move |at| (tensor, src + at, dst + at))
            };
            let all: Vec<_> = (0..3)
                .flat_map(|tensor| walked.iter().flat_map(move |&piece| bytes(tensor, piece)))
                .collect();
            let first = TensorSteps::consecutive(0);
            let plan = CopyPlan::from_templates(3, first, first, listed(vec![template])).unwrap();
            let total = all.len() as u64 + 1;
            let (from, to) = ((ends.0 % total).min(ends.1 % total), (ends.0 % total).max(ends.1 % total));
            let mut part = Vec::new();
            for (tensor, span) in plan.spans(from, to) {
                prop_assert!(span.len > 0 && span.count > 0);
                let pieces = one_by_one(&span).unwrap();
                whole.set(whole.get() + u32::from(span.count > 1));
                cut.set(cut.get() + u32::from(pieces.len() == 1));
                part.extend(pieces.into_iter().flat_map(|piece| bytes(tensor, piece)));
            }
            prop_assert_eq!(&part[..], &all[from as usize..to as usize]);
            let pieces = plan.pieces(from, to);
            let piece = |Piece { src, dst, len }: Piece| [src.into(), dst.into(), len.into()];
            let part: Vec<_> = pieces.flat_map(|(tensor, one)| bytes(tensor, piece(one))).collect();
            prop_assert_eq!(&part[..], &all[from as usize..to as usize]);
            Ok(())
        })
        .unwrap();
    assert!(whole.get() > 0 && cut.get() > 0, "{whole:?} {cut:?}");
}

/// A plan may touch every n-th tensor; its bounds are those of the last one.
#[test]
fn plans_step_over_tensors() {
    let span = Span { src: 0, dst: 0, len: 1, count: 1, src_step: 0, dst_step: 0 };
    let template = Template::new((1, 1), vec![(0, 0)], vec![span]);
    let plan = |count, src: (u32, u32), dst: (u32, u32)| {
        let steps = |(first, step)| TensorSteps { first, step };
        CopyPlan::from_templates(count, steps(src), steps(dst), listed(vec![template.clone()]))
    };
    let every_second = plan(3, (1, 2), (4, 1)).unwrap();
    assert_eq!([0, 1, 2].map(|index| every_second.tensors(Side::Source).tensor(index)), [1, 3, 5]);
    assert_eq!([0, 1, 2].map(|index| every_second.tensors(Side::Destination).tensor(index)), [4, 5, 6]);
    every_second.check_bounds(Side::Source, (6, 1)).unwrap();
    every_second.check_bounds(Side::Destination, (7, 1)).unwrap();
    every_second.check_bounds(Side::Source, (5, 1)).unwrap_err();
    every_second.check_bounds(Side::Destination, (6, 1)).unwrap_err();
    // A cut by layer keeps the steps.
    let cut = every_second.in_tensors(3, 5, 2);
    assert_eq!(
        [0, 1].map(|index| (
            cut.tensors(Side::Source).tensor(index),
            cut.tensors(Side::Destination).tensor(index)
        )),
        [(3, 5), (5, 6)]
    );
    plan(1 << 31, (1, 2), (0, 1)).unwrap_err();
    plan(2, (0, u32::MAX), (0, 1)).unwrap_err();
    plan(2, (0, 1), (0, 0)).unwrap_err();
    plan(0, (0, 1), (0, 1)).unwrap_err();
    // A message carries the steps.
    for plan in [every_second, cut, plan(3, (1, 1), (4, 1)).unwrap()] {
        let sent = CopyPlan::try_from(WirePlan::try_from(&plan).unwrap()).unwrap();
        let all =
            |plan: &CopyPlan| (Side::BOTH.map(|side| plan.tensors(side)), plan.num_tensors(), pieces(plan));
        assert_eq!(all(&sent), all(&plan));
    }
}

#[test]
fn what_a_plan_of_a_peer_may_not_say() {
    let span = Span { src: 0, dst: 0, len: 1, count: 1, src_step: 0, dst_step: 0 };
    let plan = |spans: Vec<Span>| plan_of_peer(1, 0, 0, spans);
    assert!(plan(vec![]).unwrap().is_empty() && !plan(vec![span]).unwrap().is_empty());
    for (bad, why) in [
        (Span { len: 0, ..span }, "no bytes"),
        (Span { count: 0, ..span }, "no pieces"),
        (Span { count: 2, ..span }, "written twice"),
        (Span { count: 3, len: 4, dst_step: -3, ..span }, "overlapping"),
        (Span { count: 2, dst_step: -1, ..span }, "before the start"),
        (Span { count: 2, dst_step: 1, src_step: -1, ..span }, "read before the start"),
        (Span { len: 1 << 63, ..span }, "2^63 bytes"),
        (Span { count: (1 << 24) + 1, dst_step: 1, ..span }, "too many pieces"),
        (Span { src: u64::MAX, ..span }, "beyond 64 bits"),
        (Span { count: u64::MAX, len: u64::MAX, dst_step: i64::MIN, ..span }, "everything at once"),
    ] {
        let error = plan(vec![Span { dst: 1 << 62, ..span }, bad]).expect_err(why);
        assert_eq!(error.kind(), llm_datadist_core::ErrorKind::InvalidArgument, "{why}");
        assert!(error.to_string().contains("the plan is not valid"), "{error}");
    }
    for (tensors, src, dst) in [(0, 0, 0), (1, u32::MAX, 0), (u32::MAX, 0, 1)] {
        plan_of_peer(tensors, src, dst, vec![span]).unwrap_err();
    }
    // A large count costs nothing: positions and rows are computed, not enumerated.
    let wide = Span { src: 5, len: 1, count: 1 << 24, src_step: 0, dst_step: 1 << 20, ..span };
    let plan = plan(vec![wide]).unwrap();
    let error = plan
        .check_bounds(Side::Destination, (1, 1 << 44))
        .map(|()| plan.touched_rows(Side::Source, 4).unwrap())
        .unwrap();
    assert_eq!(error, [1]);
    let error = plan.check_bounds(Side::Destination, (1, (1 << 44) - (1 << 20))).unwrap_err();
    assert_eq!((error.fact("which"), error.fact("tensor_bytes")), (Some("written"), Some("17592184995840")));
    let error = plan.check_bounds(Side::Source, (1, 5)).unwrap_err();
    assert_eq!(error.fact("which"), Some("read"));
    let error = plan.check_bounds(Side::Source, (0, 6)).unwrap_err();
    assert_eq!((error.fact("which"), error.fact("num_tensors")), (Some("read"), Some("0")));
}

/// Byte positions count along all templates of a tensor, then along the next tensor.
#[test]
fn positions_across_templates_and_tensors() {
    let first = TensorSteps::consecutive(0);
    let templates =
        vec![blocks_of(5, (0, 0), vec![(0, 1), (3, 2)]), blocks_of(3, (40, 20), vec![(1, 0), (0, 1)])];
    let plan = CopyPlan::from_templates(3, first, first, listed(templates)).unwrap();
    assert_eq!((plan.templates().len(), plan.bytes()), (2, 3 * 16));
    let piece = |src, dst, len| Piece { src, dst, len };
    let one = [piece(0, 5, 5), piece(15, 10, 5), piece(43, 20, 3), piece(40, 23, 3)];
    let expected: Vec<_> = (0..3).flat_map(|tensor| one.map(|piece| (tensor, piece))).collect();
    let all: Vec<_> = plan.pieces(0, plan.bytes()).collect();
    assert_eq!(all, expected);
    let bytes = |list: Vec<(usize, Piece)>| -> Vec<(usize, u64, u64)> {
        let byte = |(tensor, piece): (usize, Piece)| {
            (0..piece.len).map(move |k| (tensor, piece.src + k, piece.dst + k))
        };
        list.into_iter().flat_map(byte).collect()
    };
    let all = bytes(all);
    for from in 0..=48 {
        for to in from..=49 {
            let part = bytes(plan.pieces(from as u64, to as u64).collect());
            assert_eq!(part, all[from..to.min(48)], "{from} to {to}");
        }
    }
}

/// Hundreds of equal blocks, mostly too scattered to be spans: `len`, offsets of block 0, and the pairs.
fn scattered() -> impl Strategy<Value = (u64, (u64, u64), Vec<(u32, u32)>)> {
    let shuffled = |count: u32| Just((0..count).collect::<Vec<u32>>()).prop_shuffle();
    let lists =
        (64..200u32).prop_flat_map(move |count| (shuffled(count + 40), shuffled(count + 40), Just(count)));
    let firsts = (0..20u64, 0..20u64);
    // A few destinations twice; a run or two that joins.
    let touch = prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3);
    (lists, 1..5u64, firsts, touch, 0..30usize).prop_map(|((src, dst, count), len, first, touch, run)| {
        let mut pairs: Vec<(u32, u32)> = src.into_iter().zip(dst).take(count as usize).collect();
        for (from, to) in touch {
            let at = (from.index(pairs.len()), to.index(pairs.len()));
            pairs[at.0].1 = pairs[at.1].1;
        }
        for (k, pair) in (0..run as u32).zip(&mut pairs) {
            *pair = (k, k + 250);
        }
        (len, first, pairs)
    })
}

/// Blocks by number give the same result and rows as the same pieces one by one, wherever they are cut.
#[test]
fn scattered_blocks_do_what_copying_one_by_one_does() {
    let (in_blocks, repeated) = (Cell::new(0), Cell::new(0));
    let cut = prop::collection::vec(any::<u64>(), 0..6);
    TestRunner::new(proptest_cases(400))
        .run(&(scattered(), cut, 1..4u32), |((len, first, pairs), cuts, tensors)| {
            let naive: Vec<Piece> = pairs
                .iter()
                .map(|&(s, d)| Piece {
                    src: first.0 + u64::from(s) * len,
                    dst: first.1 + u64::from(d) * len,
                    len,
                })
                .collect();
            let position = Piece { src: first.0, dst: first.1, len };
            let numbers = pairs.iter().map(|&(src, dst)| (src.into(), dst.into()));
            let pieces = Pieces::rows(position, (len, len), numbers).unwrap();
            prop_assert_eq!(pieces.iter().collect::<Vec<_>>(), naive.clone());
            let plan =
                CopyPlan::moves(&mut Moves { pieces, num_tensors: tensors, ..Moves::default() }).unwrap();
            let bytes = 20 + 320 * len;
            let mut expected: Vec<Option<u64>> = vec![None; bytes as usize];
            for piece in &naive {
                (0..len).for_each(|k| expected[(piece.dst + k) as usize] = Some(piece.src + k));
            }
            let mut got = vec![None; bytes as usize];
            independent(&plan, CacheCount::Two, bytes)?;
            spans_say_what_pieces_say(&plan)?;
            let total = plan.tensor_bytes();
            let mut cuts: Vec<u64> = cuts.iter().map(|cut| cut % (total + 1)).chain([0, total]).collect();
            cuts.sort_unstable();
            let parts = cuts.windows(2).rev().flat_map(|two| plan.tensor_pieces(two[0], two[1]));
            let mut walked = 0;
            for piece in parts {
                prop_assert!(piece.len > 0);
                walked += piece.len;
                (0..piece.len).for_each(|k| got[(piece.dst + k) as usize] = Some(piece.src + k));
            }
            prop_assert_eq!(walked, total);
            prop_assert_eq!(plan.tensor_pieces(total, total + 10).count(), 0);
            let across = plan.pieces(total / 2, total * u64::from(tensors));
            prop_assert_eq!(
                across.map(|(_, piece)| piece.len).sum::<u64>(),
                total * u64::from(tensors) - total / 2
            );
            prop_assert_eq!(got, expected);
            // Only the last piece that writes a block is copied.
            let last: HashMap<u64, Piece> = naive.iter().map(|piece| (piece.dst, *piece)).collect();
            repeated.set(repeated.get() + usize::from(last.len() < naive.len()));
            let naive: Vec<Piece> = last.into_values().collect();
            prop_assert_eq!(plan.bytes(), naive.len() as u64 * len * u64::from(tensors));
            for row_bytes in [1, len, len * 2, len + 1] {
                let rows = |start: fn(&Piece) -> u64| {
                    rows_of(naive.iter().map(|piece| (start(piece), len)), row_bytes)
                };
                prop_assert_eq!(plan.touched_rows(Side::Source, row_bytes).unwrap(), rows(|piece| piece.src));
                prop_assert_eq!(
                    plan.touched_rows(Side::Destination, row_bytes).unwrap(),
                    rows(|piece| piece.dst)
                );
            }
            let ends = |start: fn(&Piece) -> u64| naive.iter().map(|piece| start(piece) + len).max().unwrap();
            let (read, written) =
                (ends(|piece| piece.src), ends(|piece| piece.dst).max(naive.len() as u64 * len));
            plan.check_bounds(Side::Source, (tensors, read)).unwrap();
            plan.check_bounds(Side::Destination, (tensors, written)).unwrap();
            prop_assert!(plan.check_bounds(Side::Source, (tensors, read - 1)).is_err());
            let last = ends(|piece| piece.dst);
            prop_assert!(plan.check_bounds(Side::Destination, (tensors, last - 1)).is_err());
            in_blocks.set(in_blocks.get() + usize::from(is_repeated(&plan)));
            Ok(())
        })
        .unwrap();
    assert!(
        in_blocks.get() > 100 && repeated.get() > 50,
        "{in_blocks:?} plans of blocks, {repeated:?} lists that repeat a block"
    );
}

/// Whether a plan has equal blocks instead of spans.
fn is_repeated(plan: &CopyPlan) -> bool {
    plan.templates().iter().any(|template| template.src_unit > 0)
}

/// A list becomes spans if its blocks join or have a constant stride. In a list of fewer than 64 blocks one such block
/// suffices; in a longer list one in eight is needed.
#[test]
fn joining_blocks_become_spans() {
    let form = |pairs: &[(u64, u64)]| is_repeated(&plan(pairs, 16));
    let scattered = |count: u64| (0..count).map(|k| (k, (k * k * 7 + k) % 1009)).collect::<Pairs>();
    for count in [1, 2, 63, 64, 500] {
        assert!(form(&scattered(count)), "{count}");
    }
    let joined_at = |count: u64, at: u64| {
        let mut pairs = scattered(count);
        let next = pairs[at as usize].1 + 1;
        pairs[at as usize + 1].1 = next;
        pairs
    };
    assert!(!form(&joined_at(2, 0)) && !form(&joined_at(63, 40)) && form(&joined_at(64, 40)), "one join");
    assert!(!form(&[(0, 0), (2, 3), (4, 6)]) && form(&[(0, 0), (2, 3), (4, 7)]), "a short stride");
    assert!(!form(&(0..500).map(|k| (k, k + 9)).collect::<Pairs>()), "one run");
    assert!(!form(&(0..500).map(|k| (2 * k, 3 * k)).collect::<Pairs>()), "one stride");
    let runs: Pairs = scattered(100)
        .iter()
        .flat_map(|&(src, dst)| (0..4).map(move |k| (4 * src + k, 4 * dst + k)))
        .collect();
    assert!(!form(&runs) && plan(&runs, 16).num_pieces() <= 100, "runs of four");
    // A message has a limited number of spans. A list that would have more stays pairs.
    let many: Pairs = (0..3 * 70_000).map(|k| (k / 3 * 4 + k % 3, ((k / 3) ^ 1) * 4 + k % 3)).collect();
    assert!(form(&many) && !form(&many[..3 * 60_000]), "runs of three");
    // A copy within this engine sends no message.
    assert!(!is_repeated(&plans(&many, 16, CacheCount::Two)[0]), "a local copy");
    // The short last piece of a slot is a span, and the rest of a block that it cuts another one.
    let slot = |count: usize, last: u64| {
        let short = Piece { src: 1 << 40, dst: last * 16, len: 5 };
        let pieces = Pieces::blocks(16, many[..3 * count].iter().copied()).unwrap().with_last(Some(short));
        CopyPlan::moves(&mut Moves { pieces, num_tensors: 1, ..Moves::default() }).unwrap()
    };
    for (count, last, repeated) in [
        (MAX_TEMPLATE_SPANS, 1 << 30, true),
        (MAX_TEMPLATE_SPANS - 1, 1 << 30, false),
        (MAX_TEMPLATE_SPANS - 1, 4, true),
        (MAX_TEMPLATE_SPANS - 2, 4, false),
    ] {
        let plan = slot(count, last);
        assert_eq!(is_repeated(&plan), repeated, "{count} runs and block {last}");
        WirePlan::try_from(&plan).unwrap();
    }
}

/// Distant rows are sorted, close ones are marked in a bitmap. Each row is listed once either way.
#[test]
fn rows_of_blocks_are_ascending_each_once() {
    let first = TensorSteps::consecutive(0);
    let plan = |blocks: Template| CopyPlan::from_templates(1, first, first, listed(vec![blocks]));
    for remote in [1u32, 1000, 1 << 20] {
        let pairs: Vec<(u32, u32)> = (0..100u32).map(|k| (k * 37 % 50 * remote, (99 - k) * remote)).collect();
        let plan = plan(blocks_of(8, (16, 24), pairs)).unwrap();
        let rows =
            |first: u64, count: u64| (0..count).map(|k| first + k * u64::from(remote)).collect::<Vec<_>>();
        assert_eq!(plan.touched_rows(Side::Source, 8).unwrap(), rows(2, 50));
        assert_eq!(plan.touched_rows(Side::Destination, 8).unwrap(), rows(3, 100));
    }
    let pieces = Span { src: 0, dst: 0, len: 1, count: 1 << 24, src_step: 1, dst_step: 1 };
    let pairs: Vec<(u32, u32)> = (0..5).map(|position| (0, position)).collect();
    let many = Template::new((0, 1 << 24), pairs, vec![pieces]);
    let error = plan(many).unwrap_err();
    assert!(error.to_string().contains("the plan is not valid"), "{error}");
}

/// A long list of spans of a peer is refused if two of its pieces write the same byte.
#[test]
fn long_lists_of_spans_are_checked() {
    let mut chance = Chance(1);
    let mut below = |most| chance.below(most);
    let (mut taken, mut refused) = (0, 0);
    // How far positions are apart, how irregular they are, and how many pieces write to the position of another.
    for (scale, odd, again) in [
        (8, 1, 0),
        (8, 8, 0),
        (4096, 1, 0),
        (4096, 1, 1),
        (1 << 20, 1 << 19, 0),
        (1 << 20, 1 << 19, 1),
        (8, 1, 1),
    ] {
        let mut positions: Vec<u64> = (0..5130).collect();
        (1..positions.len()).rev().for_each(|at| positions.swap(at, below(at as u64 + 1) as usize));
        let span = |position: u64| {
            // Two pieces of at most an eighth of the position each, half of it apart.
            let (comb, len) = (below(2) == 0, 1 + below(scale / 8));
            let dst = position * scale + below(odd).min(scale / 4);
            let (count, dst_step) = if comb { (2, (scale / 2).cast_signed()) } else { (1, 0) };
            let src_step = if comb { 3 } else { 0 };
            Span { src: below(1 << 30), dst, len, count, src_step, dst_step }
        };
        let mut spans: Vec<Span> = positions.into_iter().map(span).collect();
        for _ in 0..again {
            let (from, to) = (below(3000) as usize, below(2000) as usize + 3000);
            spans[from].dst = spans[to].dst + spans[to].len - 1;
        }
        let plan = plan_of_peer(3, 1, 2, spans.clone());
        let mut pieces: Vec<(u64, u64)> = spans
            .iter()
            .flat_map(|span| (0..span.count).map(|k| (span.dst + k * span.dst_step as u64, span.len)))
            .collect();
        pieces.sort_unstable();
        let sound = pieces.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0);
        assert_eq!(plan.is_ok(), sound, "{scale} {odd} {again}");
        let Ok(plan) = plan else {
            refused += 1;
            continue;
        };
        taken += 1;
        let one: Vec<u64> = spans.iter().flat_map(|span| vec![span.len; span.count as usize]).collect();
        assert_eq!(plan.bytes(), 3 * one.iter().sum::<u64>());
        // A part of the bytes begins inside any span.
        for _ in 0..5 {
            let at = below(plan.tensor_bytes());
            let skipped: u64 = plan.tensor_pieces(0, at).map(|piece| piece.len).sum();
            let rest: Vec<_> = plan.tensor_pieces(at, plan.tensor_bytes()).collect();
            assert_eq!(
                (skipped, rest.iter().map(|piece| piece.len).sum::<u64>()),
                (at, plan.tensor_bytes() - at)
            );
            let last = spans[spans.len() - 1].dst + (spans[spans.len() - 1].count - 1) * (scale / 2);
            assert!(rest.last().is_some_and(|piece| piece.dst >= last));
        }
        let rows: BTreeSet<u64> =
            pieces.iter().flat_map(|(dst, len)| dst / 100..=(dst + len - 1) / 100).collect();
        assert_eq!(plan.touched_rows(Side::Destination, 100).unwrap(), Vec::from_iter(rows));
        let reach = spans.iter().map(|span| span.dst + scale / 2 + scale / 8).max().unwrap();
        plan.check_bounds(Side::Destination, (5, reach + scale)).unwrap();
        plan.check_bounds(Side::Destination, (5, reach / 2)).unwrap_err();
        plan.check_bounds(Side::Destination, (4, reach + scale)).unwrap_err();
    }
    assert!(taken >= 4 && refused >= 2, "{taken} taken, {refused} refused");
    let span = Span { src: 0, dst: 0, len: 1, count: 1, src_step: 0, dst_step: 0 };
    let bad = (0..5000).map(|k| Span { dst: k, len: u64::from(k != 4321), ..span }).collect();
    let error = plan_of_peer(1, 0, 0, bad).unwrap_err();
    assert!(error.to_string().contains("the plan is not valid"), "{error}");
}

/// A plan that no list of blocks produces, and whose check would need more memory than the plan takes, is refused.
#[test]
fn what_cannot_be_checked_is_refused() {
    // Sixteen million pieces of a byte from two spans, on no grid and in no order.
    let comb = |dst: u64| Span { src: 0, dst, len: 1, count: 1 << 23, src_step: 0, dst_step: 1_000_003 };
    let error = plan_of_peer(1, 0, 0, vec![comb(1), comb(0)]).unwrap_err();
    assert!(error.to_string().contains("too irregular"), "{error}");
    // In order, they need no memory: the receiver accepts them, and the sender sends them.
    let ordered = plan_of_peer(1, 0, 0, vec![comb(0), comb((1 << 23) * 1_000_003 + 1)]).unwrap();
    WirePlan::try_from(&ordered).unwrap();
    // The same number of pieces on a grid is checked with a bit for each; a few pieces on no grid are sorted.
    let sparse = [1 << 30, 0, (1 << 30) + 1].map(|dst| Span { len: 2, count: 1, ..comb(dst) });
    let even = |dst: u64| Span { len: 512, dst_step: 2048, dst: dst * 1024, ..comb(0) };
    plan_of_peer(1, 0, 0, vec![even(1), even(0)]).unwrap();
    for twice in [vec![even(1), even(3)], sparse.to_vec()] {
        let error = plan_of_peer(1, 0, 0, twice).unwrap_err();
        assert!(error.to_string().contains("twice"), "{error}");
    }
}
