//! Plans, run one after the other, give the same result as copying pair by pair; neighbours are merged.
//!
//! Not for: memory or workers (`local_copies.rs`).

use std::collections::{BTreeSet, HashSet};

use llm_datadist_core::Result;
use llm_datadist_core::testing::plan::{
    CacheCount, CopyPlan, MAX_TEMPLATE_SPANS, Moves, Piece, Pieces, Side, Span, Template, TensorSteps,
};
use llm_datadist_core::testing::protocol::WirePlan;
use proptest::prelude::*;
use proptest::test_runner::{TestCaseResult, TestRunner};

use crate::fixtures::{Chance, Tally, block_moves, block_plan, listed, plan_of_peer, proptest_cases};

type Pairs = Vec<(u64, u64)>;

/// The plans of a copy, in order.
fn plans(pairs: &[(u64, u64)], block_bytes: u64, caches: CacheCount) -> Vec<CopyPlan> {
    CopyPlan::moves_in_order(&mut block_moves(pairs, block_bytes, 3), caches).unwrap().into_iter().collect()
}

fn pieces(plan: &CopyPlan) -> Vec<Piece> {
    plan.tensor_pieces(0, plan.tensor_bytes()).collect()
}

/// Bytes of the tensors of a case at most.
const BYTES: u64 = 20 + 320 * 9;

/// Copies piece after piece, byte by byte. Returns, for each byte, the position from which it was copied. The destination starts
/// `apart` bytes after the source, or 0 bytes in one cache.
fn copied(pieces: impl IntoIterator<Item = Piece>, apart: u64) -> Vec<u64> {
    let mut memory: Vec<u64> = (0..2 * BYTES).collect();
    for Piece { src, dst, len } in pieces {
        for at in 0..len {
            memory[(apart + dst + at) as usize] = memory[(src + at) as usize];
        }
    }
    memory
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
    let fan = || (0..rows, prop::collection::vec(0..rows, 1..8));
    let fan_out = fan().prop_map(|(src, all)| all.into_iter().map(|dst| (src, dst)).collect::<Pairs>());
    let fan_in = fan().prop_map(|(dst, all)| all.into_iter().map(|src| (src, dst)).collect::<Pairs>());
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
    let mut pairs: Pairs = (0..count).map(|k| (position(k), k * 991 % count)).collect();
    let sorted = |pairs: &[(u64, u64)]| -> Pairs {
        pairs.iter().copied().collect::<BTreeSet<_>>().into_iter().collect()
    };
    let planned = |pairs: &[(u64, u64)]| -> Pairs {
        let blocks =
            |Piece { src, dst, len: bytes }| (0..bytes / len).map(move |k| (src / len + k, dst / len + k));
        pieces(&block_plan(pairs, len, 1)).into_iter().flat_map(blocks).collect()
    };
    assert_eq!(planned(&pairs), sorted(&pairs));
    // One destination occurs twice, so its first piece is left out.
    pairs[2999].1 = pairs[0].1;
    assert_eq!(planned(&pairs), sorted(&pairs[1..]));
}

/// Hundreds of pairs, mostly too scattered to be spans.
fn scattered() -> impl Strategy<Value = Pairs> {
    let shuffled = |count: u64| Just((0..count).collect::<Vec<u64>>()).prop_shuffle();
    let lists = (64..200u64)
        .prop_flat_map(move |count| (shuffled(count + 40), shuffled(count + 40), Just(count as usize)));
    // A few destinations twice; a run or two that joins.
    let touch = prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..3);
    (lists, touch, 0..30usize).prop_map(|((src, dst, count), touch, run)| {
        let mut pairs: Pairs = src.into_iter().zip(dst).take(count).collect();
        for (from, to) in touch {
            pairs[from.index(count)].1 = pairs[to.index(count)].1;
        }
        (0..).zip(&mut pairs[..run]).for_each(|(k, pair)| *pair = (k, k + 250));
        pairs
    })
}

#[test]
fn does_what_copying_pair_by_pair_does() {
    let pairs = prop_oneof![8 => lists(14), 1 => scattered()];
    let cuts = prop::collection::vec(any::<u64>(), 0..6);
    let input = (pairs, 1..9u64, (0..20u64, 0..20u64), any::<bool>(), 1..4u32, cuts);
    let seen = Tally::default();
    TestRunner::new(proptest_cases(3000))
        .run(&input, |(pairs, len, first, one_cache, num_tensors, cuts)| {
            let (caches, apart) = if one_cache { (CacheCount::One, 0) } else { (CacheCount::Two, BYTES) };
            // In one cache, a block has one place.
            let (src, dst) = (first.0, if one_cache { first.0 } else { first.1 });
            let given = Pieces::rows(Piece { src, dst, len }, (len, len), pairs.iter().copied()).unwrap();
            let one_by_one =
                pairs.iter().map(|&(s, d)| Piece { src: src + s * len, dst: dst + d * len, len });
            prop_assert!(given.iter().eq(one_by_one.clone()));
            let mut moves = Moves { pieces: given, num_tensors, ..Moves::default() };
            let plans = CopyPlan::moves_in_order(&mut moves, caches).unwrap();
            prop_assert_eq!(copied(plans.iter().flat_map(pieces), apart), copied(one_by_one, apart));
            for plan in &plans {
                independent(plan, caches)?;
                cut_anywhere_the_pieces_tile(plan, &cuts)?;
                bounds_and_rows_are_those_of_the_pieces(plan, len)?;
                prop_assert_eq!(plan.bytes(), u64::from(num_tensors) * plan.tensor_bytes());
            }
            // Only the last piece that writes a block is copied.
            let written = pairs.iter().map(|(_, dst)| dst).collect::<HashSet<_>>().len();
            let useful =
                if one_cache { pairs.iter().filter(|(src, dst)| src != dst).count() } else { written };
            prop_assert!(one_cache || plans.len() <= 1, "between two caches, nothing waits");
            let bytes: u64 = plans.iter().map(CopyPlan::tensor_bytes).sum();
            prop_assert_eq!(bytes, useful as u64 * len);
            let long = pairs.len() >= 64;
            seen.add("several plans", usize::from(plans.len() > 1));
            seen.add("blocks, not spans", usize::from(long && plans.iter().any(is_repeated)));
            seen.add("a block written twice", usize::from(long && written < pairs.len()));
            Ok(())
        })
        .unwrap();
    seen.check(3, 51);
}

/// Checks that no byte is written twice, and none is both written and read. So the order of the pieces does not matter.
fn independent(plan: &CopyPlan, caches: CacheCount) -> TestCaseResult {
    let mut written = HashSet::new();
    let all = pieces(plan);
    prop_assert!(!all.is_empty() && all.iter().all(|piece| piece.len > 0));
    for byte in all.iter().flat_map(|piece| piece.dst..piece.dst + piece.len) {
        prop_assert!(written.insert(byte), "byte {} is written twice", byte);
    }
    let mut read = all.iter().flat_map(|piece| piece.src..piece.src + piece.len);
    let clash = read.find(|byte| caches == CacheCount::One && written.contains(byte));
    prop_assert_eq!(clash, None, "a byte that is read and written");
    Ok(())
}

fn bounds_and_rows_are_those_of_the_pieces(plan: &CopyPlan, len: u64) -> TestCaseResult {
    let (all, tensors) = (pieces(plan), plan.num_tensors());
    for side in Side::BOTH {
        let at = |piece: &Piece| (side.of((piece.src, piece.dst)), piece.len);
        let end = all.iter().map(at).map(|(start, len)| start + len).max().unwrap();
        prop_assert!(plan.check_bounds(side, (tensors, end - 1)).is_err());
        // A destination is not smaller than what is written to it.
        let least = side.of((end, end.max(plan.tensor_bytes())));
        plan.check_bounds(side, (tensors, least)).unwrap();
        for row_bytes in [1, len, len * 2, len + 1] {
            let rows = rows_of(all.iter().map(at), row_bytes);
            prop_assert_eq!(plan.touched_rows(side, row_bytes).unwrap(), rows);
        }
    }
    Ok(())
}

fn cut_anywhere_the_pieces_tile(plan: &CopyPlan, cuts: &[u64]) -> TestCaseResult {
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
    let across = plan.pieces(total / 2, plan.bytes()).map(|(_, piece)| piece.len);
    prop_assert_eq!(across.sum::<u64>(), plan.bytes() - total / 2);
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
    let up = |k| (k + 5, k + 20);
    let groups = |n: u64| map(4 * n, &|k| (k / 4 * 8 + k % 4, k / 4 * 8 + k % 4 + 100));
    let one = |src, dst| span(src, dst, 1, 1, 0, 0);
    let two_runs: Pairs = vec![(1, 5), (2, 6), (8, 3), (9, 4), (10, 5)];
    let cases: Vec<(&str, Pairs, CacheCount, Vec<Vec<Span>>)> = vec![
        ("nothing", vec![], Two, vec![]),
        ("one", vec![(3, 4)], Two, vec![vec![one(3, 4)]]),
        ("ascending", map(10, &up), Two, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("given backwards", map(10, &|k| up(9 - k)), Two, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("given shuffled", map(10, &|k| up(k * 7 % 10)), One, vec![vec![span(5, 20, 10, 1, 0, 0)]]),
        ("identity, two caches", map(9, &|k| (k, k)), Two, vec![vec![span(0, 0, 9, 1, 0, 0)]]),
        ("identity, one cache", map(9, &|k| (k, k)), One, vec![]),
        ("descending", map(10, &|k| (k, 9 - k)), Two, vec![vec![span(0, 9, 1, 10, 1, -1)]]),
        ("both strided", map(10, &|k| (2 * k, 3 * k + 1)), Two, vec![vec![span(0, 1, 1, 10, 2, 3)]]),
        ("scattered", map(10, &|k| (k, 4 * k)), Two, vec![vec![span(0, 0, 1, 10, 1, 4)]]),
        ("gathered", map(10, &|k| (4 * k, k)), Two, vec![vec![span(0, 0, 1, 10, 4, 1)]]),
        ("fan-out", map(10, &|k| (0, k + 1)), One, vec![vec![span(0, 1, 1, 10, 0, 1)]]),
        ("three equal runs", groups(3), Two, vec![vec![span(0, 100, 4, 3, 8, 8)]]),
        ("two equal runs", groups(2), Two, vec![vec![span(0, 100, 4, 1, 0, 0), span(8, 108, 4, 1, 0, 0)]]),
        // The example of the contract: 1→5 is left out, because 10→5 comes after it.
        ("the last wins", two_runs, Two, vec![vec![one(2, 6), span(8, 3, 3, 1, 0, 0)]]),
        (
            "in one cache",
            vec![(1, 25), (2, 26), (10, 25)],
            One,
            vec![vec![span(1, 25, 2, 1, 0, 0)], vec![one(10, 25)]],
        ),
    ];
    for (name, pairs, caches, expected) in cases {
        assert_eq!(spans(&pairs, caches), expected, "{name}");
    }
    let ordered: [(&str, &[(u64, u64)]); 4] = [
        ("a chain {0:[1],1:[2]}", &[(0, 1), (1, 2)]),
        ("two exchanged through a third", &[(0, 2), (1, 0), (2, 1)]),
        ("read, then overwritten", &[(1, 2), (0, 1)]),
        // Every block that is read has the number 0, or one that is beyond all that are written.
        ("0 is overwritten", &[(0, 1), (64, 0)]),
    ];
    for (name, pairs) in ordered {
        let each: Vec<_> = pairs.iter().map(|&(src, dst)| vec![one(src, dst)]).collect();
        assert_eq!(spans(pairs, One), each, "{name}");
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
    assert_eq!(spans, [Span { src: 3, dst: 9, len: 7, ..ONE }]);
    assert_eq!((plan.bytes(), plan.num_tensors()), (35, 5));
    assert_eq!(range(3, 3, CacheCount::Two)[0].bytes(), 35);
    assert!(range(3, 3, CacheCount::One).is_empty());
}

#[test]
fn offsets_near_two_to_the_63_do_not_overflow() {
    let block_bytes = 1u64 << 40;
    let last = (1u64 << 23) - 1;
    let pairs = [(0, last), (last - 1, 1), (last, 0)];
    let piece = |(src, dst)| Piece { src: src * block_bytes, dst: dst * block_bytes, len: block_bytes };
    assert_eq!(pieces(&block_plan(&pairs, block_bytes, 3)), pairs.map(piece));
}

/// Source, destination, length, count, and both steps.
fn span_of((src, dst, len, count, src_step, dst_step): (u64, u64, u64, u64, i64, i64)) -> Span {
    Span { src, dst, len, count, src_step, dst_step }
}

/// A piece of one byte.
const ONE: Span = Span { src: 0, dst: 0, len: 1, count: 1, src_step: 0, dst_step: 0 };

/// Mostly small numbers that nearly fit, and the largest numbers.
fn foreign_number() -> impl Strategy<Value = u64> {
    prop_oneof![12 => 0..24u64, 1 => Just(u64::MAX), 1 => Just(1 << 63), 1 => any::<u64>()]
}

/// Spans as a peer may send them.
fn foreign_spans() -> impl Strategy<Value = Span> {
    let step = || prop_oneof![12 => -12..12i64, 1 => Just(i64::MIN), 1 => Just(i64::MAX), 1 => any::<i64>()];
    let count = prop_oneof![12 => 0..5u64, 1 => Just(u64::MAX), 1 => any::<u64>()];
    let len = prop_oneof![12 => 0..6u64, 1 => any::<u64>()];
    (foreign_number(), foreign_number(), len, count, step(), step()).prop_map(span_of)
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

/// What a peer may send: tensors, the first source and the first destination, and bytes of tensors and rows.
type Given = ([u32; 3], [u64; 3]);

fn given() -> impl Strategy<Value = Given> {
    let tensors = || prop_oneof![8 => 0..4u32, 1 => Just(u32::MAX)];
    let tensors = [tensors(), tensors(), tensors()];
    (tensors, prop_oneof![[1..40u64, 1..40u64, 1..9u64], [1..1500u64, 1..1500u64, 1..90u64]])
}

/// Checks that a plan is refused, or all its pieces lie inside the tensors and touch the named rows. Counts the plans that were made,
/// and whether they fit into tensors of a few bytes.
fn check(seen: &Tally, made: &Result<CopyPlan>, given: Given, walked: Option<&Walked>) -> TestCaseResult {
    let ([count, src, dst], [src_bytes, dst_bytes, row_bytes]) = given;
    let inside = |piece: &[i128; 3], ends: [u64; 2]| {
        (0..2).all(|end| piece[end] >= 0 && piece[end] + piece[2] <= i128::from(ends[end]))
    };
    let apart = |a: &[i128; 3], b: &[i128; 3]| a[1] + a[2] <= b[1] || b[1] + b[2] <= a[1];
    let once = |all: &Walked| (0..all.len()).all(|at| all[at + 1..].iter().all(|b| apart(&all[at], b)));
    let bytes = walked.map_or(0, |walked| walked.iter().map(|piece| piece[2]).sum::<i128>());
    let all = bytes * i128::from(count);
    let sound = count > 0
        && [src, dst].iter().all(|first| first.checked_add(count).is_some())
        && all < 1 << 63
        && walked.is_some_and(|all| all.iter().all(|piece| inside(piece, [u64::MAX; 2])) && once(all));
    prop_assert_eq!(made.is_ok(), sound, "{:?}", made);
    let (Ok(plan), Some(walked)) = (made, walked) else { return Ok(()) };
    let firsts = Side::BOTH.map(|side| plan.tensors(side).first);
    prop_assert_eq!((plan.num_tensors(), firsts), (count, [src, dst]));
    prop_assert_eq!(i128::from(plan.bytes()), all);
    let fits = walked.iter().all(|piece| inside(piece, [src_bytes, dst_bytes]))
        && bytes <= i128::from(dst_bytes)
        && [src, dst].iter().all(|first| first + count <= 4);
    let bounds = |side: Side| plan.check_bounds(side, (4, side.of((src_bytes, dst_bytes))));
    prop_assert_eq!(Side::BOTH.iter().all(|&side| bounds(side).is_ok()), fits);
    if fits {
        for side in Side::BOTH {
            let at = |piece: &[i128; 3]| (piece[side.of((0, 1))] as u64, piece[2] as u64);
            let rows = rows_of(walked.iter().map(at), row_bytes);
            prop_assert_eq!(plan.touched_rows(side, row_bytes).unwrap(), rows);
        }
        let walked: u64 = plan.pieces(0, u64::MAX).map(|(_, piece)| piece.len).sum();
        prop_assert_eq!(walked, plan.bytes());
    }
    seen.count(if fits { "fits" } else { "beyond" });
    Ok(())
}

/// Checks plans of `templates`, as a peer may send them.
fn check_plans_of_peers(cases: u32, templates: impl Strategy<Value = Vec<Template>>) {
    let seen = Tally::default();
    TestRunner::new(proptest_cases(cases))
        .run(&(given(), templates), |(given, templates)| {
            let ([count, src, dst], _) = given;
            let walked: Option<Vec<Walked>> = templates.iter().map(walk_template).collect();
            let [src, dst] = [src, dst].map(TensorSteps::consecutive);
            let made = CopyPlan::from_templates(count, src, dst, listed(templates));
            check(&seen, &made, given, walked.map(|pieces| pieces.concat()).as_ref())
        })
        .unwrap();
    seen.check(2, 51);
}

#[test]
fn spans_of_peers() {
    let spans = prop::collection::vec(foreign_spans(), 0..4);
    let all = |spans: Vec<Span>| (!spans.is_empty()).then(|| Template::new((0, 0), vec![(0, 0)], spans));
    check_plans_of_peers(6000, spans.prop_map(move |spans| all(spans).into_iter().collect()));
}

#[test]
fn blocks_of_peers() {
    let small = || prop_oneof![12 => 0..24u32, 1 => Just(u32::MAX), 1 => any::<u32>()];
    let pairs = prop::collection::vec((small(), small()), 0..6);
    let blocks = (foreign_number(), (foreign_number(), foreign_number()), pairs);
    check_plans_of_peers(6000, blocks.prop_map(|(len, first, pairs)| vec![blocks_of(len, first, pairs)]));
}

fn blocks_of(len: u64, (src, dst): (u64, u64), pairs: Vec<(u32, u32)>) -> Template {
    Template::new((len, len), pairs, vec![Span { src, dst, len, ..ONE }])
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
    let tame = (0..6u64, 0..6u64, 1..3u64, 1..4u64, -3..9i64, 2..9i64).prop_map(span_of);
    let spans = prop::collection::vec(prop_oneof![12 => tame, 1 => foreign_spans()], 0..4);
    let template = (unit(), unit(), pairs, spans)
        .prop_map(|(src_unit, dst_unit, pairs, spans)| Template::new((src_unit, dst_unit), pairs, spans));
    let templates = (1..5usize)
        .prop_flat_map(move |count| prop::collection::vec(template.clone(), count.saturating_sub(2).max(1)));
    check_plans_of_peers(20_000, templates);
}

/// A part of a plan, cut anywhere, is the same part of the list of its bytes: those of all templates of a tensor, then those of the
/// next tensor.
#[test]
fn spans_of_a_range_of_a_plan_are_its_bytes() {
    let span = (12..18u64, 0..3u64, 1..4u64, 1..5u64, -3..9i64, 4..6i64).prop_map(span_of);
    let spans = prop::collection::vec(span, 1..4).prop_map(|mut spans| {
        spans.iter_mut().zip(0..).for_each(|(span, at): (&mut Span, u64)| span.dst += 32 * at);
        spans
    });
    let pairs =
        prop::collection::vec(0..5u32, 1..5).prop_map(|src| src.into_iter().zip(0..).collect::<Vec<_>>());
    let templates = prop::collection::vec((spans, pairs), 1..4);
    let seen = Tally::default();
    TestRunner::new(proptest_cases(2000))
        .run(&(templates, any::<(u64, u64)>()), |(parts, ends)| {
            let template = |(at, (mut spans, pairs)): (u64, (Vec<Span>, Vec<(u32, u32)>))| {
                spans.iter_mut().for_each(|span| span.dst += 1000 * at);
                Template::new((7, 100), pairs, spans)
            };
            let templates: Vec<Template> = (0..).zip(parts).map(template).collect();
            let walked = templates.iter().flat_map(|template| walk_template(template).unwrap());
            let walked: Walked = walked.collect();
            let bytes = |tensor: usize, [src, dst, len]: [i128; 3]| {
                (0..len).map(move |at| (tensor, src + at, dst + at))
            };
            let all: Vec<_> = (0..3)
                .flat_map(|tensor| walked.iter().flat_map(move |&piece| bytes(tensor, piece)))
                .collect();
            let first = TensorSteps::consecutive(0);
            let plan = CopyPlan::from_templates(3, first, first, listed(templates)).unwrap();
            prop_assert_eq!(plan.bytes(), all.len() as u64);
            let total = all.len() as u64 + 1;
            let (from, to) = ((ends.0 % total).min(ends.1 % total), (ends.0 % total).max(ends.1 % total));
            let mut part = Vec::new();
            for (tensor, span) in plan.spans(from, to) {
                prop_assert!(span.len > 0 && span.count > 0);
                let pieces = one_by_one(&span).unwrap();
                seen.count(if span.count > 1 { "several pieces" } else { "one piece" });
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
    seen.check(2, 1);
}

/// A plan may touch every n-th tensor; its bounds are those of the last one.
#[test]
fn plans_step_over_tensors() {
    let template = Template::new((1, 1), vec![(0, 0)], vec![ONE]);
    let plan = |count, src: (u32, u32), dst: (u32, u32)| {
        let steps = |(first, step)| TensorSteps { first, step };
        CopyPlan::from_templates(count, steps(src), steps(dst), listed(vec![template.clone()]))
    };
    let every_second = plan(3, (1, 2), (4, 1)).unwrap();
    let tensors = |plan: &CopyPlan, index| Side::BOTH.map(|side| plan.tensors(side).tensor(index));
    assert_eq!([0, 1, 2].map(|index| tensors(&every_second, index)), [[1, 4], [3, 5], [5, 6]]);
    for (side, tensors) in [(Side::Source, 6), (Side::Destination, 7)] {
        every_second.check_bounds(side, (tensors, 1)).unwrap();
        every_second.check_bounds(side, (tensors - 1, 1)).unwrap_err();
    }
    // A cut by layer keeps the steps.
    let cut = every_second.in_tensors(3, 5, 2);
    assert_eq!([0, 1].map(|index| tensors(&cut, index)), [[3, 5], [5, 6]]);
    plan(1 << 31, (1, 2), (0, 1)).unwrap_err();
    plan(2, (0, u32::MAX), (0, 1)).unwrap_err();
    plan(2, (0, 1), (0, 0)).unwrap_err();
    plan(0, (0, 1), (0, 1)).unwrap_err();
    // A message carries the steps.
    for plan in [every_second, cut, plan(3, (1, 1), (4, 1)).unwrap()] {
        let sent = CopyPlan::try_from(WirePlan::try_from(&plan).unwrap()).unwrap();
        assert_eq!(sent, plan);
    }
}

/// A large count costs nothing: positions and rows are computed, not enumerated.
#[test]
fn bounds_of_a_large_count_are_computed() {
    assert!(plan_of_peer(1, 0, 0, vec![]).unwrap().is_empty());
    let wide = Span { src: 5, count: 1 << 24, dst_step: 1 << 20, ..ONE };
    let plan = plan_of_peer(1, 0, 0, vec![wide]).unwrap();
    assert!(!plan.is_empty());
    plan.check_bounds(Side::Destination, (1, 1 << 44)).unwrap();
    assert_eq!(plan.touched_rows(Side::Source, 4).unwrap(), [1]);
    let error = plan.check_bounds(Side::Destination, (1, (1 << 44) - (1 << 20))).unwrap_err();
    assert_eq!((error.fact("which"), error.fact("tensor_bytes")), (Some("written"), Some("17592184995840")));
    let error = plan.check_bounds(Side::Source, (1, 5)).unwrap_err();
    assert_eq!(error.fact("which"), Some("read"));
    let error = plan.check_bounds(Side::Source, (0, 6)).unwrap_err();
    assert_eq!((error.fact("which"), error.fact("num_tensors")), (Some("read"), Some("0")));
}

/// Whether a plan has equal blocks instead of spans.
fn is_repeated(plan: &CopyPlan) -> bool {
    plan.templates().iter().any(|template| template.src_unit > 0)
}

/// A list becomes spans if its blocks join or have a constant stride. In a list of fewer than 64 blocks one such block
/// suffices; in a longer list one in eight is needed.
#[test]
fn joining_blocks_become_spans() {
    let form = |pairs: &[(u64, u64)]| is_repeated(&block_plan(pairs, 16, 3));
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
    assert!(!form(&runs) && block_plan(&runs, 16, 3).num_pieces() <= 100, "runs of four");
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
}

/// A long list of spans of a peer is refused if two of its pieces write the same byte.
#[test]
fn long_lists_of_spans_check_plans_of_peers() {
    let mut chance = Chance(1);
    // How far positions are apart, how irregular they are, and how many pieces write to the position of another.
    let spreads = [(8, 1), (8, 8), (4096, 1), (1 << 20, 1 << 19)];
    for ((scale, odd), again) in spreads.into_iter().flat_map(|spread| [(spread, 0), (spread, 1)]) {
        let positions = chance.shuffled(5130, 5130);
        let mut below = |most| chance.below(most);
        let span = |position: i64| {
            let position = position.cast_unsigned();
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
        assert_eq!((plan.is_ok(), sound), (again == 0, again == 0), "{scale} {odd} {again}");
        let Ok(plan) = plan else { continue };
        let bytes = plan.tensor_bytes();
        assert_eq!(bytes, pieces.iter().map(|(_, len)| len).sum::<u64>());
        // A part of the bytes begins inside any span.
        for at in [0; 5].map(|_| below(bytes)) {
            let part = |from, to| plan.tensor_pieces(from, to).map(|piece| piece.len).sum::<u64>();
            assert_eq!((part(0, at), part(at, bytes)), (at, bytes - at));
            let last = spans[spans.len() - 1].dst + (spans[spans.len() - 1].count - 1) * (scale / 2);
            assert!(plan.tensor_pieces(at, bytes).last().is_some_and(|piece| piece.dst >= last));
        }
        let rows: BTreeSet<u64> =
            pieces.iter().flat_map(|(dst, len)| dst / 100..=(dst + len - 1) / 100).collect();
        assert_eq!(plan.touched_rows(Side::Destination, 100).unwrap(), Vec::from_iter(rows));
        let reach = spans.iter().map(|span| span.dst + scale / 2 + scale / 8).max().unwrap();
        plan.check_bounds(Side::Destination, (5, reach + scale)).unwrap();
        plan.check_bounds(Side::Destination, (5, reach / 2)).unwrap_err();
        plan.check_bounds(Side::Destination, (4, reach + scale)).unwrap_err();
    }
    let bad = (0..5000).map(|k| Span { dst: k, len: u64::from(k != 4321), ..ONE }).collect();
    let error = plan_of_peer(1, 0, 0, bad).unwrap_err();
    assert!(error.to_string().contains("the plan is not valid"), "{error}");
}

/// A plan that no list of blocks produces, and whose check would need more memory than the plan takes, is refused.
#[test]
fn what_cannot_be_checked_is_refused() {
    // Sixteen million pieces of a byte from two spans, on no grid and in no order.
    let comb = |dst: u64| Span { dst, count: 1 << 23, dst_step: 1_000_003, ..ONE };
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
