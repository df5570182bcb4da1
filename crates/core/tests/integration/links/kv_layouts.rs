//! Pulls and pushes between KV layouts: every element arrives where its layout has it, and no other byte changes.
//!
//! `crate::kv_layouts` and `tests/native/test_layouts.py` cover layouts that do not fit.

use std::ops::Range;

use llm_datadist_core::bindings::{CallExtras, DataDist, GroupMember, Name, RemoteName, Rows, Side};
use llm_datadist_core::{
    CacheDesc, CacheKind, DataType, ErrorKind, KvLayout, KvPlanes, Result, TokenOrder, Verify,
};

use super::asynchronous::outcome;
use super::{
    Held, Pair, Way, block_rows, device, fails_saying, member, of, pairs, pulling, pushing, request, rounds,
    row, verified,
};
use crate::fixtures::{Chance, kv_layout};
use crate::kv_layouts::{Element, heads_of_rank, index_of, num_tensors, row_elements};

/// The value of an element, different from those around it.
fn value((layer, plane, token, head, dim): Element) -> u8 {
    let number = [layer.into(), plane.into(), token, head.into(), dim.into()]
        .iter()
        .fold(17u64, |sum, part| (sum ^ part).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    (number >> 40) as u8
}

/// The description of a cache of `rows` blocks of elements of one byte, with `gap` bytes between two rows.
pub(super) fn described(layout: &KvLayout, rows: u64, gap: u64) -> CacheDesc {
    let elements = row_elements(layout);
    CacheDesc {
        data_type: DataType::Int8,
        row_stride: Some(elements + gap),
        kv_layout: Some(Box::new(layout.clone())),
        ..device(num_tensors(layout), rows as usize, elements as usize)
    }
}

/// A cache and the blocks of one sequence in it.
pub(super) struct Rank {
    pub(super) held: Held,
    layout: KvLayout,
    pub(super) blocks: Vec<i64>,
    row_stride: u64,
}

impl Rank {
    pub(super) fn new(engine: &DataDist, layout: KvLayout, rows: u64, blocks: Vec<i64>) -> Rank {
        Self::with_gaps(engine, layout, rows, blocks, 0)
    }

    fn with_gaps(engine: &DataDist, layout: KvLayout, rows: u64, blocks: Vec<i64>, gap: u64) -> Rank {
        let held = Held::new(engine, false, &described(&layout, rows, gap), CacheKind::Blocks, &[]);
        Self::of(held, layout, blocks)
    }

    fn of(held: Held, layout: KvLayout, blocks: Vec<i64>) -> Rank {
        let row_stride = held.cache.geometry().row_stride();
        Rank { held, layout, blocks, row_stride }
    }

    /// Tensor and byte of an element.
    fn locate(&self, element: Element) -> (usize, usize) {
        let (tensor, block, index) = index_of(&self.layout, element);
        (tensor as usize, (self.blocks[block] as u64 * self.row_stride + index) as usize)
    }

    /// The elements of the tokens `tokens` of the sequence that the cache holds.
    fn elements(&self, tokens: Range<u64>) -> Vec<Element> {
        let planes = if matches!(self.layout.kv, KvPlanes::Latent | KvPlanes::Single) { 1 } else { 2 };
        let mut all = Vec::new();
        for layer in self.layout.layers.clone() {
            for (plane, token) in
                (0..planes).flat_map(|plane| tokens.clone().map(move |token| (plane, token)))
            {
                for head in self.layout.heads.clone() {
                    all.extend((0..self.layout.head_dim).map(|dim| (layer, plane, token, head, dim)));
                }
            }
        }
        all
    }

    fn capacity(&self) -> u64 {
        self.blocks.len() as u64 * u64::from(self.layout.tokens_per_block)
    }

    /// Writes the value of every element of the sequence.
    pub(super) fn fill(&self) {
        let mut bytes = self.held.fill(9);
        for element in self.elements(0..self.capacity()) {
            let (tensor, at) = self.locate(element);
            bytes[tensor][at] = value(element);
        }
        self.held.write(&bytes);
    }

    /// Fills the cache with other bytes, and returns them.
    pub(super) fn clear(&self) -> Vec<Vec<u8>> {
        self.held.fill(200)
    }

    /// Checks that the elements of `parts` at the tokens from `to` on have the values of those from `from` on, and that
    /// all other bytes are still those of `before`.
    pub(super) fn check(
        &self,
        mut before: Vec<Vec<u8>>,
        (from, to, count): (u64, u64, u64),
        holds: impl Fn(&Element) -> bool,
    ) {
        for element in self.elements(to..to + count).into_iter().filter(holds) {
            let (tensor, at) = self.locate(element);
            let (layer, plane, token, head, dim) = element;
            before[tensor][at] = value((layer, plane, token - to + from, head, dim));
        }
        assert!(self.held.read() == before, "{}", self.layout);
    }
}

/// Where both sides of a round may have their keys and values.
fn planes_of(round: u32) -> &'static [KvPlanes] {
    match round % 6 {
        4 => &[KvPlanes::Single],
        5 => &[KvPlanes::Latent],
        _ => &[KvPlanes::Separate, KvPlanes::KThenV],
    }
}

/// A random layout of a model with this many heads and layers, without its heads and layers.
fn random_layout(chance: &mut Chance, total_heads: u32, planes: &[KvPlanes]) -> KvLayout {
    let kv = planes[chance.below(planes.len() as u64) as usize];
    KvLayout {
        tokens_per_block: [1, 2, 3, 4, 8, 16][chance.below(6) as usize],
        heads: 0..total_heads,
        total_heads,
        order: [TokenOrder::Nhd, TokenOrder::Hnd][chance.below(2) as usize],
        kv,
        ..good()
    }
}

/// A rank of `layout` with blocks for `tokens` tokens and some more.
fn random_rank(chance: &mut Chance, engine: &DataDist, layout: KvLayout, tokens: u64) -> Rank {
    let count = tokens.div_ceil(layout.tokens_per_block.into()) + chance.below(2);
    let rows = count + chance.below(3);
    let blocks = chance.shuffled(count as usize, rows);
    let gap = chance.below(4).saturating_sub(1);
    Rank::with_gaps(engine, layout, rows, blocks, gap)
}

fn sequence(remote: &Rank, local: &Rank, tokens: Option<(u64, u64, u64)>) -> Rows {
    Rows::Sequence {
        remote: remote.blocks.clone(),
        local: local.blocks.clone(),
        remote_tokens: tokens.map(|(from, _, count)| from..from + count),
        local_tokens: tokens.map(|(_, to, count)| to..to + count),
    }
}

fn owner(remote: &Rank, local: &Rank, rows: Rows) -> GroupMember {
    member(of(2, row(&remote.held, 0)), &local.held, rows)
}

/// Random ranges of tokens that both sides can hold: the first token of each, and their number.
fn random_tokens(chance: &mut Chance, remote: u64, local: u64) -> (u64, u64, u64) {
    let (from, to) = (chance.below(remote), chance.below(local));
    (from, to, 1 + chance.below((remote - from).min(local - to)))
}

#[test]
fn several_owners_fill_any_other_layout() {
    rounds((3, 60), false, |pair, chance, round| {
        let planes = planes_of(round);
        let total = if planes == [KvPlanes::Latent] { 1 } else { 1 + chance.below(8) as u32 };
        let (src, dst) = (random_layout(chance, total, planes), random_layout(chance, total, planes));
        let (ranks, stages) = (1 + chance.below(5) as u32, 1 + chance.below(2) as u32);
        let mut owners = Vec::new();
        for (rank, stage) in (0..ranks).flat_map(|rank| (0..stages).map(move |stage| (rank, stage))) {
            let (heads, layers) = (heads_of_rank(total, ranks, rank), heads_of_rank(4, stages, stage));
            let layout = KvLayout { heads, layers, ..src.clone() };
            let owner = random_rank(chance, &pair.remote, layout, 20);
            owner.fill();
            owners.push(owner);
        }
        let (readers, reader) = (1 + chance.below(5) as u32, chance.below(5) as u32);
        let layout = KvLayout { heads: heads_of_rank(total, readers, reader % readers), ..dst };
        let into = random_rank(chance, &pair.local, layout, 20);
        let before = into.clear();
        let least = owners.iter().map(Rank::capacity).min().unwrap();
        let tokens = random_tokens(chance, least, into.capacity());
        let members =
            owners.iter().map(|remote| owner(remote, &into, sequence(remote, &into, Some(tokens)))).collect();
        let extras = verified(Verify::Full);
        outcome(&pair.local.transfer_group(Side::Destination, members, true, extras, None).unwrap()).unwrap();
        into.check(before, tokens, |_| true);
        owners.iter().for_each(|owner| owner.held.free(&pair.remote));
        into.held.free(&pair.local);
    });
}

#[test]
fn one_owner_is_pulled_and_pushed_in_any_other_layout() {
    rounds((4, 40), true, |pair, chance, round| {
        let planes = planes_of(round);
        let total = if planes == [KvPlanes::Latent] { 1 } else { 1 + chance.below(8) as u32 };
        let [wide, narrow] = [0, 1].map(|_| random_layout(chance, total, planes));
        let rank = chance.below(3) as u32;
        let part = KvLayout { heads: heads_of_rank(total, 3, rank), layers: 1..3, ..narrow };
        // A pull takes a part of what the owner has; a push writes a part of what the owner has.
        let near = random_rank(chance, &pair.local, part.clone(), 20);
        let far = random_rank(chance, &pair.remote, wide, 20);
        let all = (0, 0, near.capacity().min(far.capacity()));
        far.fill();
        let before = near.clear();
        let (remote, local) = (far.blocks.clone(), near.blocks.clone());
        let rows = Rows::Sequence { remote, local, local_tokens: Some(0..all.2), remote_tokens: None };
        let name = of(2, row(&far.held, 0));
        pulling(&pair.local, name, &near.held, rows, verified(Verify::Full)).run().unwrap();
        near.check(before, all, |_| true);

        near.fill();
        let before = far.clear();
        let (from, to, count) = random_tokens(chance, near.capacity(), far.capacity());
        let rows = Rows::Sequence {
            local: near.blocks.clone(),
            remote: far.blocks.clone(),
            local_tokens: Some(from..from + count),
            remote_tokens: Some(to..to + count),
        };
        pushing(&pair.local, &near.held, name, rows, verified(Verify::Full)).run().unwrap();
        let holds =
            |(layer, _, _, head, _): &Element| part.layers.contains(layer) && part.heads.contains(head);
        far.check(before, (from, to, count), holds);
        pair.free(&near.held, &far.held);
    });
}

/// Pulls `rows` of `far` into `near`.
fn pull(pair: &Pair, far: &Rank, near: &Rank, rows: Rows) -> Result<()> {
    pulling(&pair.local, of(2, row(&far.held, 0)), &near.held, rows, CallExtras::default()).run()
}

pub(super) fn good() -> KvLayout {
    KvLayout { model: "m".into(), ..kv_layout(4, 4, 5, 4) }
}

#[test]
fn rows_move_only_if_both_caches_or_neither_have_a_layout() {
    for pair in pairs() {
        let plain = |engine| {
            let desc = CacheDesc { kv_layout: None, ..described(&good(), 3, 0) };
            let held = Held::new(engine, false, &desc, CacheKind::Blocks, &[]);
            Rank::of(held, good(), vec![1, 2])
        };
        let with = |engine| Rank::new(engine, good(), 3, vec![1, 2]);
        for (near, far, which) in [
            (plain(&pair.local), with(&pair.remote), "only the remote cache has a KV layout"),
            (with(&pair.local), plain(&pair.remote), "only the local cache has a KV layout"),
        ] {
            far.fill();
            let before = near.clear();
            let rows = block_rows(&far.blocks, &near.blocks);
            fails_saying(pull(&pair, &far, &near, rows), ErrorKind::InvalidArgument, which);
            assert!(near.held.read() == before);
        }
        let (near, far) = (plain(&pair.local), plain(&pair.remote));
        let error = pull(&pair, &far, &near, sequence(&far, &near, Some((0, 0, 3)))).unwrap_err();
        assert!(error.to_string().contains("a range of tokens needs caches with KV layouts"), "{error}");
    }
}

#[test]
fn a_head_that_nobody_owns_is_named_before_any_byte_moves() {
    for pair in pairs() {
        let near = Rank::new(&pair.local, good(), 3, vec![0, 1]);
        let before = near.clear();
        let part = |heads| {
            let far = Rank::new(&pair.remote, KvLayout { heads, ..good() }, 3, vec![1, 2]);
            far.fill();
            far
        };
        let owners = [part(0..2), part(3..4)];
        let pull = |owners: &[Rank]| {
            let members = owners.iter().map(|far| owner(far, &near, sequence(far, &near, None))).collect();
            let extras = CallExtras::default();
            outcome(&pair.local.transfer_group(Side::Destination, members, true, extras, None).unwrap())
        };
        fails_saying(pull(&owners), ErrorKind::InvalidArgument, "no owner holds head 2 of layer 0");
        // The blocks of the last owner do not fit.
        let mut owners = [part(0..2), part(2..4)];
        owners[1].blocks[1] = 3;
        let error = pull(&owners).unwrap_err();
        assert!(error.to_string().contains("src_blocks[1]=3"), "{error}");
        assert_eq!(error.fact("part"), Some("1"), "{error}");
        assert!(near.held.read() == before);
        owners[1].blocks[1] = 2;
        pull(&owners).unwrap();
        near.check(before, (0, 0, 8), |_| true);
    }
}

/// A slot of a continuous cache is one block of its layout.
#[test]
fn a_slot_is_converted_and_its_key_is_used_up_by_a_pull_of_everything() {
    for pair in pairs() {
        let slot = KvLayout { tokens_per_block: 12, order: TokenOrder::Hnd, ..good() };
        let keys = [None, Some(request(1))];
        let held = Held::new(&pair.remote, false, &described(&slot, 2, 7), CacheKind::Batch, &keys);
        let far = Rank::of(held, slot, vec![1]);
        far.fill();
        let from: RemoteName = of(2, Name::Key(request(1)));
        let half = Rank::new(&pair.local, KvLayout { heads: 1..3, ..good() }, 5, vec![4, 0, 2]);
        let whole = Rank::new(&pair.local, good(), 5, vec![3, 1, 0]);
        for (near, keys_left) in [(&half, 1), (&whole, 0)] {
            let before = near.clear();
            let rows = Rows::SlotToBlocks { local: near.blocks.clone() };
            pulling(&pair.local, from, &near.held, rows, verified(Verify::Full)).run().unwrap();
            near.check(before, (0, 0, 12), |_| true);
            assert_eq!(pair.remote.stats().table.keys, keys_left);
        }
    }
}

/// A part of a slot has no known tokens in another layout.
#[test]
fn a_part_of_a_slot_is_not_converted() {
    let pair = Pair::new(Way::Shm);
    let [far, near] =
        [(&pair.remote, TokenOrder::Hnd), (&pair.local, TokenOrder::Nhd)].map(|(engine, order)| {
            let layout = KvLayout { order, ..good() };
            let held = Held::new(engine, false, &described(&layout, 2, 0), CacheKind::Batch, &[]);
            Rank::of(held, layout, vec![0])
        });
    far.fill();
    let before = near.clear();
    let error = pull(&pair, &far, &near, Rows::slot(0, 20)).unwrap_err();
    assert!(error.to_string().contains("size must be -1 and both offsets 0 (size=20"), "{error}");
    pull(&pair, &far, &near, Rows::slot(0, -1)).unwrap();
    near.check(before, (0, 0, 4), |_| true);
}
