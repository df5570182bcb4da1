//! The blocks by which a plan is compared with its source: the pairs of templates.
//!
//! Both sides hash the bytes of a block in the order of the plan, because between layouts they lie in another order on each
//! side. So a request for checksums carries a plan of the pairs that it asks for.

use std::ops::Range;

use smallvec::SmallVec;

use super::copy_plan::CopyPlan;
use super::side::Side;
use super::spans::{PLAN, Piece, Span, common_divisor};
use super::template::Template;
use super::template_list::{MAX_TEMPLATE_SPANS, MAX_TEMPLATES};
use crate::error::Result;
use crate::fallible;
use crate::model::RowSizes;

/// One block of every `SAMPLED` is chosen.
const SAMPLED: u64 = 64;

/// How pieces are cut into blocks: at the rows of the local cache, and after each `most` bytes of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Which side of the plan is the local cache.
    pub local: Side,
    /// Where the rows of the local cache lie.
    pub rows: RowSizes,
    /// Most bytes of a block.
    pub most: u64,
}

/// Limits of the part of a plan that one request compares.
#[derive(Clone, Copy, Debug)]
pub struct PartLimits {
    /// Most bytes in one tensor. A pair that has more is a part of its own.
    pub bytes: u64,
    /// Most pairs.
    pub pairs: usize,
}

impl CopyPlan {
    /// Returns a plan of templates whose pairs are the blocks of this plan. With the random number `sample`, it has one block in
    /// 64, and at least one. A block is a piece that lies in one row of the local cache, and at most `sizes.most` bytes of it.
    /// In a plan that is recognized as one between KV layouts, a block is all pieces of one row.
    pub fn compared(&self, sizes: BlockSizes, sample: Option<u64>) -> Result<CopyPlan> {
        let (mut blocks, mut pieces) = (Vec::new(), Vec::new());
        let between_layouts = self.is_between_layouts();
        for template in self.templates().iter() {
            if is_block(template, sizes) {
                fallible::push(PLAN, &mut blocks, with_pairs(template, 0..template.pairs.len())?)?;
            } else if between_layouts {
                spans_in_rows(template, sizes, &mut blocks, &mut pieces)?;
            } else {
                add_pieces(template.placed_spans(), sizes, &mut pieces)?;
            }
        }
        pieces.sort_unstable_by_key(|piece| (piece.len, piece.src, piece.dst));
        for equal in pieces.chunk_by(|a, b| a.len == b.len) {
            add_template(equal, &mut blocks)?;
        }
        sample.map_or(Ok(()), |random| keep_sample(&mut blocks, random))?;
        self.with_templates(blocks)
    }

    /// Returns whether the plan skips tensors or repeats a template of several pieces, as plans between KV layouts do. A layout
    /// plan that does neither is compared piece by piece.
    fn is_between_layouts(&self) -> bool {
        Side::BOTH.iter().any(|&side| self.tensors(side).step != 1)
            || self.templates().iter().any(|template| template.pairs.len() > 1 && !is_of_one_piece(template))
    }

    /// Cuts a plan of templates into plans that a request may ask for, each of at least one pair.
    pub fn parts(&self, limits: PartLimits) -> impl Iterator<Item = Result<CopyPlan>> + '_ {
        parts(self.templates(), limits).map(|part| self.with_templates(part?))
    }

    /// Returns a plan of some pairs of this one, `templates`, in the same tensors.
    fn with_templates(&self, templates: Vec<Template>) -> Result<CopyPlan> {
        let tensors = (self.tensors(Side::Source), self.tensors(Side::Destination));
        CopyPlan::new(self.num_tensors(), tensors, SmallVec::from_vec(templates).into())
    }
}

fn is_of_one_piece(template: &Template) -> bool {
    matches!(template.spans[..], [Span { count: 1, .. }])
}

/// Returns whether each pair of a template is a block.
fn is_block(template: &Template, sizes: BlockSizes) -> bool {
    let &BlockSizes { local, rows, most } = &sizes;
    if template.pairs.len() < 2 {
        return false;
    }
    if !is_of_one_piece(template) {
        return true;
    }
    let whole = |piece: Piece| rows.offset_in_row(piece.start(local)) + piece.len <= rows.bytes();
    let first = template.first_piece_at((0, 0));
    let even = local.of((template.src_unit, template.dst_unit)).is_multiple_of(rows.stride());
    first.len <= most && if even { whole(first) } else { template.first_pieces().all(whole) }
}

/// Adds blocks of a template of a plan between layouts whose spans are not repeated. Spans in one row of the local cache are a
/// block. Spans that cross rows, for example of neighbouring blocks that were joined, are cut into pieces.
fn spans_in_rows(
    template: &Template,
    sizes: BlockSizes,
    blocks: &mut Vec<Template>,
    pieces: &mut Vec<Piece>,
) -> Result<()> {
    let spans = fallible::collect_growing(PLAN, template.num_spans(), template.placed_spans())?;
    let row = |span: &Span| sizes.rows.row_of(span.start(sizes.local).0);
    for spans in spans.chunk_by(|a, b| row(a) == row(b)) {
        let inside = |span: &Span| {
            span.hull(sizes.local)
                .is_some_and(|range| sizes.rows.row_of(range.start) == sizes.rows.row_of(range.end - 1))
        };
        if matches!(spans, [_, _, ..] | [Span { count: 2.., .. }]) && spans.iter().all(inside) {
            let block = Template::of_spans(fallible::copied(PLAN, spans)?);
            fallible::push(PLAN, blocks, block)?;
        } else {
            add_pieces(spans.iter().copied(), sizes, pieces)?;
        }
    }
    Ok(())
}

/// Adds the pieces of spans, cut into blocks.
fn add_pieces(spans: impl Iterator<Item = Span>, sizes: BlockSizes, pieces: &mut Vec<Piece>) -> Result<()> {
    let mut all = spans.flat_map(Span::pieces).flat_map(|piece| cut(piece, sizes));
    all.try_for_each(|piece| fallible::push(PLAN, pieces, piece))
}

/// Cuts a piece into blocks.
fn cut(piece: Piece, sizes: BlockSizes) -> impl Iterator<Item = Piece> {
    let mut done = 0;
    std::iter::from_fn(move || {
        let left = piece.len.checked_sub(done).filter(|&left| left > 0)?;
        let in_row = sizes.rows.offset_in_row(piece.start(sizes.local) + done);
        let most = sizes.most.max(1);
        let room = (sizes.rows.bytes() - in_row).min(most - in_row % most);
        let block = Piece { src: piece.src + done, dst: piece.dst + done, len: left.min(room) };
        done += block.len;
        Some(block)
    })
}

/// Adds a template of which each of `pieces`, which have one length, is a pair; or several if its numbers do not fit 32
/// bits.
fn add_template(pieces: &[Piece], blocks: &mut Vec<Template>) -> Result<()> {
    let Some(&first) = pieces.first() else { return Ok(()) };
    let lowest = |of: fn(&Piece) -> u64| pieces.iter().map(of).min().unwrap_or(0);
    let (src, dst) = (lowest(|piece| piece.src), lowest(|piece| piece.dst));
    let units = pieces.iter().fold((0, 0), |(src_unit, dst_unit), piece| {
        (common_divisor(src_unit, piece.src - src), common_divisor(dst_unit, piece.dst - dst))
    });
    let number = |from: u64, unit: u64| u32::try_from(from / unit.max(1)).ok();
    let mut pairs = fallible::with_capacity(PLAN, pieces.len())?;
    pairs.extend(
        pieces
            .iter()
            .map_while(|piece| number(piece.src - src, units.0).zip(number(piece.dst - dst, units.1))),
    );
    if pairs.len() < pieces.len() && pieces.len() > 1 {
        let (low, high) = pieces.split_at(pieces.len() / 2);
        return add_template(low, blocks).and_then(|()| add_template(high, blocks));
    }
    fallible::push(PLAN, blocks, Template::new(units, pairs, [Span::single(src, dst, first.len)]))
}

/// Removes the pairs that are not in a sample.
fn keep_sample(blocks: &mut Vec<Template>, random: u64) -> Result<()> {
    let count = blocks.iter().map(|template| template.pairs.len() as u64).sum();
    let (sampled, mut index) = (Sampled::new(count, random), 0);
    for template in blocks.iter_mut() {
        let mut kept = Vec::new();
        for (at, pair) in (index..).zip(&template.pairs) {
            if sampled.picks(at) {
                fallible::push(PLAN, &mut kept, *pair)?;
            }
        }
        index += template.pairs.len() as u64;
        template.pairs = kept.into();
    }
    blocks.retain(|template| !template.pairs.is_empty());
    Ok(())
}

impl Template {
    /// Returns the block of each pair, to name it in an error: where it starts on both sides, and its number of bytes.
    pub fn pair_blocks(&self) -> impl Iterator<Item = Piece> + '_ {
        let (src, dst) = self.hulls().map_or((0, 0), |(src, dst)| (src.start, dst.start));
        let len = self.pair_bytes().unwrap_or(u64::MAX);
        let at =
            |first: u64, unit: u64, number: u32| first.saturating_add(unit.saturating_mul(number.into()));
        self.pairs.iter().map(move |&(from, to)| Piece {
            src: at(src, self.src_unit, from),
            dst: at(dst, self.dst_unit, to),
            len,
        })
    }
}

fn parts(templates: &[Template], limits: PartLimits) -> impl Iterator<Item = Result<Vec<Template>>> {
    let (mut at, mut pair) = (0, 0);
    std::iter::from_fn(move || {
        let (mut part, mut left) = (Vec::new(), Room::new(limits));
        while let Some(template) = templates.get(at) {
            let rest = template.pairs.len() - pair;
            let count = left.take(template, rest, part.is_empty());
            if count == 0 {
                break;
            }
            let some = with_pairs(template, pair..pair + count);
            match some.and_then(|some| fallible::push(PLAN, &mut part, some)) {
                Ok(()) => pair += count,
                Err(error) => return Some(Err(error)),
            }
            if count == rest {
                (at, pair) = (at + 1, 0);
            }
        }
        (!part.is_empty()).then_some(Ok(part))
    })
}

/// Returns the template with some of its pairs.
fn with_pairs(template: &Template, pairs: Range<usize>) -> Result<Template> {
    template.at_pairs(fallible::copied(PLAN, template.pairs.get(pairs).unwrap_or_default())?)
}

/// What a part may still take.
struct Room {
    bytes: u64,
    pairs: usize,
    templates: usize,
    spans: usize,
}

impl Room {
    fn new(PartLimits { bytes, pairs }: PartLimits) -> Room {
        Room { bytes, pairs, templates: MAX_TEMPLATES, spans: MAX_TEMPLATE_SPANS }
    }

    /// Takes room for up to `most` pairs of a template, and for at least one if the part is empty. Returns their number.
    fn take(&mut self, template: &Template, most: usize, empty: bool) -> usize {
        let one = template.pair_bytes().unwrap_or(u64::MAX).max(1);
        let fits = usize::try_from(self.bytes / one).unwrap_or(usize::MAX).min(self.pairs).min(most);
        let full = self.templates == 0 || template.spans.len() > self.spans;
        let count = if full { 0 } else { fits }.max(usize::from(empty && most > 0));
        if count > 0 {
            self.bytes = self.bytes.saturating_sub(one.saturating_mul(count as u64));
            self.pairs = self.pairs.saturating_sub(count);
            self.templates = self.templates.saturating_sub(1);
            self.spans = self.spans.saturating_sub(template.spans.len());
        }
        count
    }
}

/// Chooses one of every 64 blocks, and at least one.
struct Sampled {
    random: u64,
    /// Blocks of a group from which one is chosen.
    of: u64,
}

impl Sampled {
    fn new(count: u64, random: u64) -> Sampled {
        // Each block of a last group that is not full is chosen with probability 1/64, as in a full group. If this group is
        // the only one, one of its blocks is always chosen.
        Sampled { random, of: count.clamp(1, SAMPLED) }
    }

    /// Returns whether the block with this index is in the sample.
    fn picks(&self, index: u64) -> bool {
        index % SAMPLED == scrambled(self.random.wrapping_add(index / SAMPLED)) % self.of
    }
}

/// Returns a number whose bits all depend on all bits of `number` (`SplitMix64`).
fn scrambled(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
