//! The blocks by which a plan between layouts is compared with its source: the pairs of its templates.
//!
//! The bytes of a block lie in another order on each side. Both sides hash them in the order of the plan, so a request
//! for checksums carries a plan of the pairs that it asks for. The waves of such a plan write different bytes.

use std::ops::Range;
use std::sync::Arc;

use super::copy_plan::CopyPlan;
use super::final_blocks::{BlockSizes, Sampled, cut};
use super::spans::{PLAN, Piece, Span, common_divisor};
use super::template::Template;
use super::template_list::{MOST_TEMPLATE_SPANS, MOST_TEMPLATES};
use crate::error::Result;
use crate::fallible;

/// Limits of the part of a plan that one request compares.
#[derive(Clone, Copy, Debug)]
pub struct PartLimits {
    /// Most bytes in one tensor. A pair that has more is a part of its own.
    pub bytes: u64,
    /// Most pairs.
    pub pairs: usize,
}

impl CopyPlan {
    /// Returns the blocks of a plan between layouts: templates whose pairs are all of them, or one in 64 and at least one,
    /// chosen by the random number `sample`. A wave of spans is cut where the row of the local cache changes.
    pub fn compared_templates(&self, sizes: BlockSizes, sample: Option<u64>) -> Result<Vec<Template>> {
        let mut blocks = Vec::new();
        for (template, wave) in self.templates()?.into_iter().zip(self.waves()) {
            if wave.template().is_some() || wave.blocks().is_some() {
                fallible::push(PLAN, &mut blocks, template)?;
            } else {
                cut_at_rows(&template, sizes, &mut blocks)?;
            }
        }
        sample.map_or(Ok(()), |random| keep_sample(&mut blocks, random))?;
        Ok(blocks)
    }
}

/// Adds blocks of a wave of spans, which is a template with one pair. Spans in one row of the local cache are a block.
/// Spans that cross rows, for example of neighbouring blocks that were joined, are cut into blocks again.
fn cut_at_rows(wave: &Template, sizes: BlockSizes, blocks: &mut Vec<Template>) -> Result<()> {
    let mut pieces = Vec::new();
    let row = |span: &Span| sizes.rows.row_of(span.start(sizes.local).0);
    for spans in wave.spans.chunk_by(|a, b| row(a) == row(b)) {
        let inside = |span: &Span| {
            span.hull(sizes.local)
                .is_some_and(|range| sizes.rows.row_of(range.start) == sizes.rows.row_of(range.end - 1))
        };
        if matches!(spans, [_, _, ..] | [Span { count: 2.., .. }]) && spans.iter().all(inside) {
            let (spans, pairs) = (fallible::copied(PLAN, spans)?, wave.pairs.clone());
            fallible::push(PLAN, blocks, Template { pairs, spans, ..*wave })?;
            continue;
        }
        for span in spans {
            let piece = |k| {
                let (src, dst) = span.piece(k);
                Piece { src, dst, len: span.len }
            };
            let mut all = (0..span.count).flat_map(|k| cut(piece(k), sizes));
            all.try_for_each(|piece| fallible::push(PLAN, &mut pieces, piece))?;
        }
    }
    pieces.sort_unstable_by_key(|piece| (piece.len, piece.src, piece.dst));
    for equal in pieces.chunk_by(|a, b| a.len == b.len) {
        repeated(equal, blocks)?;
    }
    Ok(())
}

/// Adds a template of which each of `pieces`, which have one length, is a pair; or several if its numbers do not fit 32
/// bits.
fn repeated(pieces: &[Piece], blocks: &mut Vec<Template>) -> Result<()> {
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
        return repeated(low, blocks).and_then(|()| repeated(high, blocks));
    }
    let spans = vec![Span::single(src, dst, first.len)];
    fallible::push(
        PLAN,
        blocks,
        Template { src_unit: units.0, dst_unit: units.1, pairs: Arc::new(pairs), spans },
    )
}

/// Removes the pairs that are not in a sample.
fn keep_sample(blocks: &mut Vec<Template>, random: u64) -> Result<()> {
    let count = blocks.iter().map(|template| template.pairs.len() as u64).sum();
    let (sampled, mut index) = (Sampled::new(count, random), 0);
    for template in blocks.iter_mut() {
        let mut kept = Vec::new();
        for (at, pair) in (index..).zip(&*template.pairs) {
            if sampled.picks(at) {
                fallible::push(PLAN, &mut kept, *pair)?;
            }
        }
        index += template.pairs.len() as u64;
        template.pairs = Arc::new(kept);
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

/// Cuts templates into parts that a request may ask for, each of at least one pair.
pub fn parts(templates: &[Template], limits: PartLimits) -> impl Iterator<Item = Result<Vec<Template>>> {
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
    let all = pairs.len() == template.pairs.len();
    let some = template.pairs.get(pairs).unwrap_or_default();
    let pairs = if all { template.pairs.clone() } else { Arc::new(fallible::copied(PLAN, some)?) };
    Ok(Template { pairs, spans: fallible::copied(PLAN, &template.spans)?, ..*template })
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
        Room { bytes, pairs, templates: MOST_TEMPLATES, spans: MOST_TEMPLATE_SPANS }
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
