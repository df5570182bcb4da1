//! Moves between KV layouts give the same result as moving element after element by the definitions of the layouts.
//!
//! Not for: the pieces and the order of plans (`plan.rs`), messages and checksums (`wire`).

mod wire;

use std::collections::BTreeSet;
use std::ops::Range;

use llm_datadist_core::bindings::{Geometry, KvGeometry, Words};
use llm_datadist_core::testing::plan::{CopyPlan, KvPart, KvSequence, Side, assign_owners};
use llm_datadist_core::{CacheDesc, DataType, KvLayout, KvPlanes, Placement, Result, TokenOrder};
use proptest::prelude::*;

use crate::arguments::refused;
use crate::fixtures::{Chance, desc, for_all, kv_layout};

/// A cache and the blocks of one sequence in it.
#[derive(Clone, Debug)]
struct Holder {
    layout: KvLayout,
    data_type: DataType,
    rows: u64,
    row_stride: u64,
    blocks: Vec<u64>,
    tokens: Option<Range<u64>>,
}

impl Holder {
    fn row_bytes(&self) -> u64 {
        row_elements(&self.layout) * self.data_type.bytes()
    }

    fn num_tensors(&self) -> u32 {
        num_tensors(&self.layout)
    }

    fn geometry(&self) -> Result<KvGeometry> {
        let elements = row_elements(&self.layout) as usize;
        let desc = CacheDesc {
            data_type: self.data_type,
            row_stride: Some(self.row_stride),
            ..desc(Placement::Device, self.num_tensors(), self.rows as usize, elements)
        };
        KvGeometry::new(self.layout.clone(), &Geometry::new(&desc)?, self.data_type)
    }

    fn sequence<'a>(&'a self, geometry: &'a KvGeometry, side: Side) -> KvSequence<'a> {
        let Words { src, dst, .. } = &Words::ORIGINAL;
        let words = if side == Side::Source { src } else { dst };
        KvSequence { geometry, blocks: &self.blocks, tokens: self.tokens.clone(), words }
    }

    fn capacity(&self) -> u64 {
        self.blocks.len() as u64 * u64::from(self.layout.tokens_per_block)
    }

    /// Tensor and first byte of an element.
    fn locate(&self, element: Element) -> (u32, u64) {
        let (tensor, block, index) = index_of(&self.layout, element);
        (tensor, self.blocks[block] * self.row_stride + index * self.data_type.bytes())
    }
}

/// One element of a model: layer, plane, token of the sequence of one side, head, and index in the head.
pub type Element = (u32, u32, u64, u32, u32);

/// The tensor of an element, its block in the sequence, and its index in the row, from the definition of the layout: an
/// index into nested arrays.
pub fn index_of(layout: &KvLayout, (layer, plane, token, head, dim): Element) -> (u32, usize, u64) {
    let KvLayout { tokens_per_block, heads, head_dim, order, kv, layers, .. } = layout;
    let (tokens, num_heads) = (u64::from(*tokens_per_block), heads.len() as u64);
    let (block, token) = ((token / tokens) as usize, token % tokens);
    let (layer, head) = (layer - layers.start, u64::from(head - heads.start));
    let (tensor, plane) = match kv {
        KvPlanes::Separate => (2 * layer + plane, 0),
        KvPlanes::KThenV => (layer, u64::from(plane)),
        KvPlanes::Latent | KvPlanes::Single => (layer, 0),
    };
    let index = match order {
        TokenOrder::Nhd => (plane * tokens + token) * num_heads + head,
        TokenOrder::Hnd => (plane * num_heads + head) * tokens + token,
    };
    (tensor, block, index * u64::from(*head_dim) + u64::from(dim))
}

/// The elements of one row.
pub fn row_elements(layout: &KvLayout) -> u64 {
    let planes = if layout.kv == KvPlanes::KThenV { 2 } else { 1 };
    u64::from(planes * layout.tokens_per_block * layout.heads.len() as u32 * layout.head_dim)
}

pub fn num_tensors(layout: &KvLayout) -> u32 {
    layout.layers.len() as u32 * if layout.kv == KvPlanes::Separate { 2 } else { 1 }
}

/// Tensor and byte written, then tensor and byte read, of one element.
type Moved = ((u32, u64), (u32, u64));

/// A move of tokens between two sides.
#[derive(Clone, Debug)]
struct Case {
    src: Holder,
    dst: Holder,
    /// Where the elements of a plan are cut in two.
    cut: u64,
}

impl Case {
    /// The first tokens of both sides, and their number.
    fn tokens(&self) -> (u64, u64, u64) {
        let len = |range: &Range<u64>| range.end - range.start;
        let both = self.src.capacity().min(self.dst.capacity());
        let count = self.src.tokens.as_ref().or(self.dst.tokens.as_ref()).map_or(both, len);
        let first = |side: &Holder| side.tokens.as_ref().map_or(0, |range| range.start);
        (first(&self.src), first(&self.dst), count)
    }

    /// Moves element after element.
    fn twin(&self, part: &KvPart) -> Vec<Moved> {
        let (from, to, count) = self.tokens();
        let planes = if matches!(self.src.layout.kv, KvPlanes::Latent | KvPlanes::Single) { 1 } else { 2 };
        let mut moved = Vec::new();
        for layer in part.layers.clone() {
            for plane in 0..planes {
                for token in 0..count {
                    for head in part.heads.clone() {
                        for dim in 0..self.src.layout.head_dim {
                            let at = |first| (layer, plane, first + token, head, dim);
                            moved.push((self.dst.locate(at(to)), self.src.locate(at(from))));
                        }
                    }
                }
            }
        }
        moved.sort_unstable();
        moved
    }

    fn plan(&self, part: &KvPart) -> Result<Vec<CopyPlan>> {
        let (src, dst) = (self.src.geometry()?, self.dst.geometry()?);
        let src = self.src.sequence(&src, Side::Source);
        CopyPlan::between_layouts(&src, &self.dst.sequence(&dst, Side::Destination), part)
    }

    /// What both sides hold.
    fn common(&self) -> KvPart {
        KvPart::common(&self.src.layout, &self.dst.layout).unwrap()
    }

    /// The elements that plans move, in the order of their destination. Every piece has whole elements.
    fn moved(&self, plans: &[CopyPlan]) -> Vec<Moved> {
        let bytes = self.src.data_type.bytes();
        let mut moved = Vec::new();
        for plan in plans {
            let (src, dst) = (plan.tensors(Side::Source), plan.tensors(Side::Destination));
            let cut = self.cut % (plan.bytes() / bytes + 1) * bytes;
            for (index, piece) in plan.pieces(0, cut).chain(plan.pieces(cut, plan.bytes())) {
                assert!(piece.len > 0 && piece.len.is_multiple_of(bytes));
                let tensors = (dst.tensor(index) as u32, src.tensor(index) as u32);
                let element = |at| ((tensors.0, piece.dst + at), (tensors.1, piece.src + at));
                moved.extend((0..piece.len).step_by(bytes as usize).map(element));
            }
        }
        moved.sort_unstable();
        moved
    }

    /// Checks the plan of `part` against the twin.
    fn check(&self, part: &KvPart) -> Result<(), TestCaseError> {
        let layouts = || format!("\n  from: {}\n    to: {}\n", self.src.layout, self.dst.layout);
        let plans = self.plan(part).map_err(|error| TestCaseError::fail(format!("{error}{}", layouts())))?;
        let expected = self.twin(part);
        let moved = self.moved(&plans);
        let bytes: u64 = plans.iter().map(CopyPlan::bytes).sum();
        prop_assert_eq!(bytes, moved.len() as u64 * self.src.data_type.bytes(), "{}", layouts());
        prop_assert!(moved == expected, "the plan moves other elements than the twin{}", layouts());
        let mut rows = (BTreeSet::new(), BTreeSet::new());
        for plan in &plans {
            for (side, of, rows) in
                [(Side::Source, &self.src, &mut rows.0), (Side::Destination, &self.dst, &mut rows.1)]
            {
                plan.check_bounds(side, (of.num_tensors(), of.rows * of.row_stride))
                    .map_err(|error| TestCaseError::fail(format!("{error}{}", layouts())))?;
                rows.extend(plan.touched_rows(side, of.row_stride).unwrap());
            }
            prop_assert_eq!(&wire::received(plan), plan, "in a message, {}", layouts());
        }
        let expected = |side: &Holder, at: fn(&Moved) -> u64| -> BTreeSet<u64> {
            expected.iter().map(|moved| at(moved) / side.row_stride).collect()
        };
        prop_assert_eq!(rows.0, expected(&self.src, |moved| moved.1.1), "{}", layouts());
        prop_assert_eq!(rows.1, expected(&self.dst, |moved| moved.0.1), "{}", layouts());
        Ok(())
    }
}

/// The heads of one rank of a tensor-parallel group. If there are fewer heads than ranks, several ranks hold the
/// same head.
pub fn heads_of_rank(total: u32, ranks: u32, rank: u32) -> Range<u32> {
    let start = rank * total / ranks;
    start..((rank + 1) * total / ranks).max(start + 1)
}

/// Numbers for one side of a case; see [`side`].
#[derive(Clone, Debug)]
struct Numbers {
    tokens_per_block: u32,
    order: TokenOrder,
    separate: bool,
    ranks: u32,
    replica: u32,
    layers: (u32, u32),
    padding: u64,
    skip: u64,
    spare: (u64, u64),
    seed: u64,
    whole: bool,
}

prop_compose! {
    fn numbers()(
        tokens_per_block in prop_oneof![4 => 1..=8u32, 1 => 1..=64u32],
        order in prop_oneof![Just(TokenOrder::Nhd), Just(TokenOrder::Hnd)],
        separate: bool,
        ranks in 1..=16u32,
        replica in 0..16u32,
        layers in (0..3u32, 0..3u32),
        padding in prop_oneof![2 => Just(0), 1 => 0..9u64],
        skip in prop_oneof![1 => Just(0), 1 => 0..80u64],
        spare in (0..2u64, 0..3u64),
        seed: u64,
        whole: bool,
    ) -> Numbers {
        let skip = skip % (2 * u64::from(tokens_per_block));
        Numbers { tokens_per_block, order, separate, ranks, replica, layers, padding, skip, spare, seed, whole }
    }
}

/// What both sides have in common.
#[derive(Clone, Debug)]
struct Model {
    total_heads: u32,
    head_dim: u32,
    /// Where the keys and values are in both sides, or `None` if each side chooses.
    kv: Option<KvPlanes>,
    data_type: DataType,
    /// A head and a layer that both sides hold.
    head: u32,
    layer: u32,
    tokens: u64,
}

prop_compose! {
    fn model()(
        heads in prop_oneof![3 => 1..=4u32, 1 => 1..=16u32],
        head_dim in 1..=4u32,
        kv in 0..8usize,
        data_type in prop_oneof![
            3 => Just(DataType::Int8),
            2 => Just(DataType::Float16),
            1 => Just(DataType::Float),
            1 => Just(DataType::String),
        ],
        head in 0..16u32,
        layer in 0..3u32,
        tokens in prop_oneof![8 => 0..13u64, 1 => 0..140u64],
    ) -> Model {
        let kv = [KvPlanes::Latent, KvPlanes::Single].get(kv).copied();
        let total_heads = if kv == Some(KvPlanes::Latent) { 1 } else { heads };
        Model { total_heads, head_dim, kv, data_type, head: head % total_heads, layer, tokens }
    }
}

/// Builds one side: a rank that holds the head and the layer of the model, with blocks for its tokens.
fn side(model: &Model, numbers: &Numbers, is_src: bool) -> Holder {
    let ranks = if model.kv == Some(KvPlanes::Latent) { 1 } else { numbers.ranks };
    let holders: Vec<Range<u32>> = (0..ranks)
        .map(|rank| heads_of_rank(model.total_heads, ranks, rank))
        .filter(|heads| heads.contains(&model.head))
        .collect();
    let layout = KvLayout {
        tokens_per_block: numbers.tokens_per_block,
        heads: holders[numbers.replica as usize % holders.len()].clone(),
        total_heads: model.total_heads,
        head_dim: model.head_dim,
        order: numbers.order,
        kv: model.kv.unwrap_or(if numbers.separate { KvPlanes::Separate } else { KvPlanes::KThenV }),
        layers: model.layer.saturating_sub(numbers.layers.0)..model.layer + 1 + numbers.layers.1,
        model: String::new(),
    };
    let needed = numbers.skip + model.tokens;
    let count = needed.div_ceil(numbers.tokens_per_block.into()) + numbers.spare.0;
    let rows = (count + numbers.spare.1).max(1);
    let blocks = block_list(count as usize, rows, numbers.seed, is_src);
    let tokens = Some(numbers.skip..needed).filter(|_| numbers.skip > 0 || !numbers.whole);
    let mut side = Holder { layout, data_type: model.data_type, rows, row_stride: 0, blocks, tokens };
    side.row_stride = side.row_bytes() + numbers.padding * side.data_type.bytes();
    side
}

/// `count` of `rows` blocks: ascending, shuffled or, in a source, repeated.
fn block_list(count: usize, rows: u64, seed: u64, is_src: bool) -> Vec<u64> {
    let mut chance = Chance(seed);
    match seed % 8 {
        0 | 1 => (0..count as u64).collect(),
        2 if is_src => (0..count).map(|_| chance.below(rows)).collect(),
        _ => {
            let mut all: Vec<u64> = (0..rows).collect();
            chance.shuffle(&mut all);
            all.truncate(count);
            all
        }
    }
}

prop_compose! {
    fn cases()(model in model(), src in numbers(), dst in numbers(), cut: u64) -> Case {
        Case { src: side(&model, &src, true), dst: side(&model, &dst, false), cut }
    }
}

/// Any two layouts, block lists and token ranges. `make thorough` runs 10 million.
#[test]
fn a_plan_between_any_two_layouts_moves_what_the_twin_moves() {
    let seen = std::cell::Cell::new([0u32; 5]);
    for_all(100_000, &cases(), |case| {
        let part = case.common();
        let common =
            |src: &Range<u32>, dst: &Range<u32>| src.clone().filter(|one| dst.contains(one)).collect();
        let expected: [Vec<u32>; 2] = [
            common(&case.src.layout.layers, &case.dst.layout.layers),
            common(&case.src.layout.heads, &case.dst.layout.heads),
        ];
        prop_assert_eq!([part.layers.clone().collect::<Vec<_>>(), part.heads.clone().collect()], expected);
        case.check(&part)?;
        let (src, dst) = (&case.src.layout, &case.dst.layout);
        let [all, orders, planes, blocks, repeated] = seen.get();
        let repeats = case.plan(&part).unwrap().iter().any(wire::repeats);
        seen.set([
            all + u32::from(case.tokens().2 > 0),
            orders + u32::from(src.order != dst.order),
            planes + u32::from(src.kv != dst.kv),
            blocks + u32::from(!src.tokens_per_block.is_multiple_of(dst.tokens_per_block)),
            repeated + u32::from(repeats),
        ]);
        Ok(())
    });
    let [all, ..] = seen.get();
    assert!(all < 1000 || seen.get().into_iter().all(|count| count >= all / 4), "{seen:?}");
}

/// A group of owners and one reader: tensor-parallel ranks, each for some of the layers.
#[derive(Clone, Debug)]
struct Group {
    model: Model,
    /// Numbers of the owners; those of the ranks count.
    src: Numbers,
    dst: Numbers,
    /// Layers of the model, and the first layer of the second stage of the owners.
    layers: (u32, u32),
    ranks: (u32, u32),
    reader: u32,
}

prop_compose! {
    fn groups()(
        model in model(),
        src in numbers(),
        dst in numbers(),
        (layers, stage) in (1..=4u32, 0..4u32),
        ranks in (1..=16u32, 1..=16u32),
        reader in 0..16u32,
    ) -> Group {
        Group { model, src, dst, layers: (layers, stage % layers), ranks, reader: reader % ranks.1 }
    }
}

impl Group {
    /// One side of a move with these heads and layers. The block size, order and planes of owners differ by `variant`.
    fn side(&self, numbers: &Numbers, heads: Range<u32>, layers: Range<u32>, variant: u32) -> Holder {
        let order = if variant.is_multiple_of(2) { TokenOrder::Nhd } else { TokenOrder::Hnd };
        let tokens_per_block = (numbers.tokens_per_block + variant) % 64 + 1;
        let skip = numbers.skip % u64::from(tokens_per_block);
        let seed = numbers.seed.wrapping_add(variant.into());
        let separate = numbers.separate ^ variant.is_multiple_of(3);
        let numbers = Numbers { tokens_per_block, order, separate, skip, seed, ..numbers.clone() };
        let mut side = side(&self.model, &numbers, variant > 0);
        (side.layout.heads, side.layout.layers) = (heads, layers);
        side.tokens = Some(skip..skip + self.model.tokens);
        side.row_stride = side.row_bytes() + numbers.padding * side.data_type.bytes();
        side
    }

    fn owners(&self) -> Vec<Holder> {
        let (all, second) = self.layers;
        let stages = [0..second, second..all];
        let ranks = |layers: Range<u32>| {
            let ranks = self.ranks.0;
            (0..ranks).map(move |rank| (layers.clone(), heads_of_rank(self.model.total_heads, ranks, rank)))
        };
        let holders = stages.into_iter().filter(|layers| !layers.is_empty()).flat_map(ranks);
        (1..).zip(holders).map(|(at, (layers, heads))| self.side(&self.src, heads, layers, at)).collect()
    }
}

/// Several owners together write each element of the destination once, with the right source.
#[test]
fn plans_of_all_owners_write_each_element_once() {
    let seen = std::cell::Cell::new((0, 0));
    for_all(10_000, &groups(), |group| {
        let owners = group.owners();
        let heads = heads_of_rank(group.model.total_heads, group.ranks.1, group.reader);
        let dst = group.side(&group.dst, heads, 0..group.layers.0, 0);
        let layouts: Vec<&KvLayout> = owners.iter().map(|owner| &owner.layout).collect();
        let wanted = KvPart::of(&dst.layout);
        let parts = assign_owners(&wanted, &layouts, group.reader as usize).unwrap();
        let (mut written, mut read_from) = (Vec::new(), 0);
        for (owner, parts) in owners.into_iter().zip(parts) {
            let case = Case { src: owner, dst: dst.clone(), cut: 0 };
            read_from += u32::from(!parts.is_empty());
            for part in parts {
                case.check(&part)?;
                written.extend(case.moved(&case.plan(&part).unwrap()).into_iter().map(|moved| moved.0));
            }
        }
        written.sort_unstable();
        let case = Case { src: dst.clone(), dst, cut: 0 };
        let all: Vec<(u32, u64)> = case.twin(&wanted).into_iter().map(|moved| moved.0).collect();
        prop_assert!(written == all, "{} elements of {} are written", written.len(), all.len());
        seen.set((seen.get().0 + 1, seen.get().1 + u32::from(read_from > 1)));
        Ok(())
    });
    let (all, several) = seen.get();
    assert!(all < 1000 || several >= all / 4, "{several} of {all} read several owners");
}

/// A layout of 16 tokens, with all heads of one rank of a group of `ranks`, and 4 layers.
fn rank(total_heads: u32, ranks: u32, rank: u32) -> KvLayout {
    KvLayout { heads: heads_of_rank(total_heads, ranks, rank), ..kv_layout(16, total_heads, 8, 4) }
}

/// The first `blocks` blocks of a cache.
fn whole(layout: KvLayout, blocks: u64) -> Holder {
    let mut side = Holder {
        layout,
        data_type: DataType::Float16,
        rows: blocks,
        row_stride: 0,
        blocks: (0..blocks).collect(),
        tokens: None,
    };
    side.row_stride = side.row_bytes();
    side
}

fn between(src: Holder, dst: Holder) -> Case {
    Case { src, dst, cut: 0 }
}

/// For all tensor-parallel sizes, replicas of a head are read by equally many readers, or one more.
#[test]
fn readers_are_spread_over_replicas() {
    let mut with_replicas = 0;
    for (heads, ranks, readers) in
        (1..=16u32).flat_map(|h| (1..=16u32).flat_map(move |m| (1..=16u32).map(move |n| (h, m, n))))
    {
        let owners: Vec<KvLayout> = (0..ranks).map(|at| rank(heads, ranks, at)).collect();
        let owners: Vec<&KvLayout> = owners.iter().collect();
        // How many readers read each head from each owner.
        let mut reads = vec![vec![0u32; owners.len()]; heads as usize];
        for reader in 0..readers {
            let wanted = KvPart::of(&rank(heads, readers, reader));
            let parts = assign_owners(&wanted, &owners, reader as usize).unwrap();
            assert_eq!(parts.len(), owners.len());
            for (owner, parts) in parts.iter().enumerate() {
                for part in parts {
                    assert_eq!(part.layers, 0..4, "equal heads of adjacent layers are one part");
                    part.heads.clone().for_each(|head| reads[head as usize][owner] += 1);
                }
            }
        }
        for (head, reads) in (0..).zip(&reads) {
            let replicas = || (0..owners.len()).filter(|&at| owners[at].heads.contains(&head));
            let (least, most) = (replicas().map(|at| reads[at]).min(), replicas().map(|at| reads[at]).max());
            assert!(most.unwrap() - least.unwrap() <= 1, "head {head} of {heads}, TP {ranks} to {readers}");
            with_replicas += u32::from(replicas().count() > 1);
        }
    }
    assert!(with_replicas > 1000);
}

#[test]
fn a_head_without_owner_is_named() {
    let owners = [rank(8, 4, 0), rank(8, 4, 2), KvLayout { layers: 0..2, ..rank(8, 4, 3) }];
    let owners: Vec<&KvLayout> = owners.iter().collect();
    let wanted = |layers, heads| KvPart { layers, heads };
    let error = assign_owners(&wanted(0..4, 0..6), &owners, 0).unwrap_err();
    assert!(error.to_string().contains("no owner holds head 2 of layer 0"), "{error}");
    let error = assign_owners(&wanted(0..4, 4..8), &owners, 0).unwrap_err();
    assert!(error.to_string().contains("no owner holds head 6 of layer 2"), "{error}");
    let parts = assign_owners(&wanted(0..2, 4..8), &owners, 7).unwrap();
    assert_eq!(parts, [vec![], vec![wanted(0..2, 4..6)], vec![wanted(0..2, 6..8)]]);
    assign_owners(&wanted(0..1, 0..1), &[], 0).unwrap_err();
}

/// What a plan of one template stores: spans, and pairs of positions.
fn stored(plan: &CopyPlan) -> (usize, usize) {
    let [template] = &plan.templates()[..] else { panic!("{} templates", plan.templates().len()) };
    (template.spans.len(), template.pairs.len())
}

#[test]
fn plans_are_as_small_as_the_layouts_allow() {
    let plans = |src: Holder, dst: Holder| {
        let case = between(src, dst);
        let part = case.common();
        case.check(&part).unwrap();
        case.plan(&part).unwrap()
    };
    let one = |src: Holder, dst: Holder| {
        let plans = plans(src, dst);
        assert_eq!(plans.len(), 1);
        (stored(&plans[0]), plans[0].num_pieces())
    };
    let nhd = |ranks, at, blocks| whole(rank(8, ranks, at), blocks);
    // 512 blocks, TP 2 to 4: one span for all blocks, and a pair for each block.
    assert_eq!(one(nhd(2, 0, 512), nhd(4, 1, 512)), ((1, 512), 512 * 16));
    // The same with keys and values in one row: they continue one another.
    let fused = |ranks, at| whole(KvLayout { kv: KvPlanes::KThenV, ..rank(8, ranks, at) }, 512);
    assert_eq!(one(fused(2, 0), fused(4, 1)), ((1, 512), 512 * 32));
    // With the heads outside, the heads of a rank are one piece, and neighbouring blocks are one span.
    let hnd = |ranks, at| whole(KvLayout { order: TokenOrder::Hnd, ..rank(8, ranks, at) }, 512);
    assert_eq!(one(hnd(2, 0), hnd(4, 1)), ((1, 1), 512));
    // The other order: a span for each token, so that the source is read in order; or for each of few heads.
    assert_eq!(one(nhd(1, 0, 512), hnd(1, 0)), ((16, 512), 512 * 128));
    assert_eq!(one(hnd(1, 0), nhd(1, 0, 512)), ((8, 512), 512 * 128));
    assert_eq!(one(nhd(2, 0, 512), hnd(2, 0)), ((4, 512), 512 * 64));
    assert_eq!(one(hnd(2, 0), nhd(2, 0, 512)), ((4, 512), 512 * 64));
    // Blocks of so many tokens that a span for each would take more memory: a span for each head.
    let long = |order| whole(KvLayout { tokens_per_block: 2048, order, ..rank(8, 1, 0) }, 3);
    assert_eq!(one(long(TokenOrder::Nhd), long(TokenOrder::Hnd)), ((8, 3), 3 * 8 * 2048));
    // Equal layouts, and blocks that divide each other: all is one piece.
    assert_eq!(one(nhd(2, 0, 512), nhd(2, 0, 512)), ((1, 1), 1));
    let larger = whole(KvLayout { tokens_per_block: 64, ..rank(8, 2, 0) }, 128);
    assert_eq!(one(nhd(2, 0, 512), larger), ((1, 1), 1));
    // Keys and values apart on one side only: a plan for each.
    let apart = plans(nhd(2, 0, 512), fused(2, 0));
    let steps =
        |plan: &CopyPlan| (plan.tensors(Side::Source), plan.tensors(Side::Destination), plan.num_tensors());
    let named: Vec<_> =
        apart.iter().map(steps).map(|(src, dst, n)| (src.first, src.step, dst.step, n)).collect();
    assert_eq!(named, [(0, 2, 1, 4), (1, 2, 1, 4)]);
    assert!(apart.iter().all(|plan| stored(plan) == (1, 1)));
}

/// Between the orders of heads and tokens, the pieces of a block are read one after the other.
#[test]
fn the_source_is_read_in_order() {
    let hnd = KvLayout { order: TokenOrder::Hnd, ..rank(8, 1, 0) };
    let sides = [whole(rank(8, 1, 0), 4), whole(hnd, 4)];
    for (src, dst) in [(0, 1), (1, 0)] {
        let case = between(sides[src].clone(), sides[dst].clone());
        let part = case.common();
        let plans = case.plan(&part).unwrap();
        let [plan] = &plans[..] else { panic!("{} plans", plans.len()) };
        let mut read = 0;
        for piece in plan.tensor_pieces(0, plan.tensor_bytes()) {
            assert_eq!(piece.src, read);
            read += piece.len;
        }
        assert_eq!(read, plan.tensor_bytes());
    }
}

/// An unaligned range has a few templates: one for each length of its runs of tokens.
#[test]
fn an_unaligned_range_has_few_templates() {
    let mut case = between(whole(rank(8, 2, 0), 512), whole(rank(8, 4, 0), 512));
    (case.src.tokens, case.dst.tokens) = (Some(5..8000), Some(3..7998));
    let part = case.common();
    case.check(&part).unwrap();
    let plans = case.plan(&part).unwrap();
    let sizes: Vec<_> =
        plans[0].templates().iter().map(|template| (template.num_spans(), template.num_pieces())).collect();
    assert!(sizes.len() <= 4 && sizes.iter().map(|size| size.0).sum::<usize>() <= 1001, "{sizes:?}");
}

/// Numbers of positions that do not fit 32 bits become spans.
#[test]
fn large_tensors_with_uneven_strides_are_planned_as_spans() {
    let mut case = between(whole(rank(8, 2, 0), 8), whole(rank(8, 4, 0), 8));
    case.src.row_stride = (1 << 40) + 2;
    case.dst.layout.tokens_per_block = 8;
    case.dst.row_stride = case.dst.row_bytes();
    case.src.blocks.reverse();
    let part = case.common();
    case.check(&part).unwrap();
    let plan = case.plan(&part).unwrap();
    assert_eq!(stored(&plan[0]).1, 1);
}

#[test]
fn moves_that_do_not_fit_are_refused() {
    let good = || between(whole(rank(8, 2, 0), 4), whole(rank(8, 4, 0), 4));
    let cases: [(fn(&mut Case), &str); 15] = [
        (
            |case| case.dst.layout.head_dim = 4,
            "head_dim differs (src=DT_FLOAT16, 16 tokens, heads 0..4 of 8, head_dim 8",
        ),
        (|case| case.dst.layout.total_heads = 16, "total_heads differs (src=DT_FLOAT16, 16 tokens"),
        (|case| case.dst.data_type = DataType::Float, "data_type differs (src=DT_FLOAT16"),
        (
            |case| {
                let layout = &mut case.dst.layout;
                (layout.heads, layout.total_heads, layout.kv) = (0..1, 1, KvPlanes::Latent);
            },
            "kv differs (src=DT_FLOAT16",
        ),
        (
            |case| case.dst.layout.heads = 4..8,
            "heads=0..2 must be a range that source and destination hold (src=0..4",
        ),
        (
            |case| case.src.layout.layers = 1..2,
            "layers=0..4 must be a range that source and destination hold (src=1",
        ),
        (
            |case| case.src.tokens = Some(0..65),
            "src_tokens=0..65 must be a range inside 0..64: 4 blocks of 16 tokens",
        ),
        (|case| case.dst.tokens = Some(60..65), "dst_tokens=60..65 must be a range inside 0..64"),
        (
            |case| case.src.tokens = Some(Range { start: 3, end: 2 }),
            "src_tokens=3..2 must be a range inside 0..64",
        ),
        (
            |case| case.dst.tokens = Some(Range { start: 3, end: 2 }),
            "dst_tokens=3..2 must be a range inside 0..64",
        ),
        (
            |case| (case.src.tokens, case.dst.tokens) = (Some(0..3), Some(0..4)),
            "src_tokens=0..3 must be as many tokens as dst_tokens=0..4",
        ),
        (|case| case.dst.blocks = vec![3, 1, 2, 1], "dst_blocks contains block 1 twice"),
        (|case| case.dst.blocks = vec![0, 1, 4], "dst_blocks[2]=4 is out of range (0 to 3)"),
        (
            |case| case.src.blocks = vec![u64::MAX],
            "src_blocks[0]=18446744073709551615 is out of range (0 to 3)",
        ),
        (
            |case| (case.src.blocks, case.src.tokens) = (vec![], Some(0..1)),
            "src_tokens=0..1 must be a range inside 0..0",
        ),
    ];
    let part = KvPart { layers: 0..4, heads: 0..2 };
    good().check(&part).unwrap();
    for (change, text) in cases {
        let mut case = good();
        change(&mut case);
        for side in [&mut case.src, &mut case.dst] {
            side.row_stride = side.row_bytes();
        }
        refused(case.plan(&part), &[text]);
    }
    for heads in [0..0, 0..3, 3..4] {
        good().plan(&KvPart { layers: 0..4, heads }).unwrap_err();
    }
    good().plan(&KvPart { layers: 0..5, heads: 0..2 }).unwrap_err();
    let common = |change: fn(&mut KvLayout)| {
        let mut layout = rank(8, 2, 1);
        change(&mut layout);
        KvPart::common(&rank(8, 2, 0), &layout).unwrap_err().to_string()
    };
    assert!(common(|_| ()).contains("no key-value head in common (src=0..4, dst=4..8)"));
    assert!(common(|layout| layout.layers = 4..6).contains("no layer in common (src=0..4, dst=4..6)"));
}

#[test]
fn no_tokens_are_no_plan() {
    for tokens in [None, Some(0..0)] {
        let mut case = between(whole(rank(8, 2, 0), 4), whole(rank(8, 4, 0), 4));
        if tokens.is_none() {
            case.src.blocks.clear();
        }
        case.dst.tokens = tokens;
        let plan = case.plan(&KvPart { layers: 0..4, heads: 0..2 }).unwrap();
        assert!(plan.is_empty());
    }
}
