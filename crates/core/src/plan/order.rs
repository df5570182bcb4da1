//! Decides which pieces must wait for others, and joins those that need not wait.
//!
//! Within one cache, pieces that touch the same bytes keep the order in which the request names them. Between two caches,
//! no byte is both read and written, so only the last piece that writes a byte is copied, and nothing has to wait.

use hashbrown::{HashMap, HashSet};

use super::spans::{PLAN, Piece, Span};
use crate::error::Result;
use crate::fallible;

/// Whether a plan reads and writes the same cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheCount {
    /// Source and destination are one cache, so a block may be both read and written.
    One,
    Two,
}

/// Something that is read in one place and written in another. Two places are either equal or do not overlap.
pub(super) trait Pair: Copy {
    /// Returns the numbers that name the place read and the place written.
    fn places(&self) -> (u64, u64);
}

impl Pair for Piece {
    fn places(&self) -> (u64, u64) {
        (self.src, self.dst)
    }
}

/// Returns whether a pair writes a block that another pair writes or, if the ends are one cache, that any
/// pair reads.
pub(super) fn order_matters<T: Pair>(pairs: &[T], caches: CacheCount) -> Result<bool> {
    if pairs.len() < 2 {
        return Ok(false);
    }
    let mut written = PlaceSet::of(pairs)?;
    if pairs.iter().any(|pair| !written.add(pair.places().1)) {
        return Ok(true);
    }
    Ok(caches == CacheCount::One && pairs.iter().any(|pair| written.has(pair.places().0)))
}

/// Keeps, of the pairs that write one place, only the last one. All pairs must have the same length. The order of the rest is
/// undefined.
pub(super) fn keep_last<T: Pair>(pairs: &mut Vec<T>) -> Result<()> {
    let mut written = PlaceSet::of(pairs)?;
    pairs.reverse();
    pairs.retain(|pair| written.add(pair.places().1));
    Ok(())
}

/// Keeps of each piece only the bytes that no later piece writes. The order of the rest is undefined.
pub(super) fn keep_last_bytes(pieces: &mut Vec<Piece>) -> Result<()> {
    // The length of the longest piece so far, by the place that it writes.
    let mut written: HashMap<u64, u64> = fallible::map(PLAN, pieces.len())?;
    pieces.reverse();
    pieces.retain_mut(|piece| {
        let longest = written.entry(piece.dst).or_default();
        let covered = piece.len.min(*longest);
        *longest = piece.len.max(*longest);
        *piece = Piece { src: piece.src + covered, dst: piece.dst + covered, len: piece.len - covered };
        piece.len > 0
    });
    Ok(())
}

/// A set of places: a bitmap if they are dense, as blocks of a cache are, else a hash set.
enum PlaceSet {
    Dense { unit: u32, bits: Vec<u64> },
    Sparse(HashSet<u64>),
}

impl PlaceSet {
    /// Returns an empty set for the places that `pairs` may write.
    fn of<T: Pair>(pairs: &[T]) -> Result<PlaceSet> {
        let (any, most) =
            pairs.iter().fold((0, 0), |(any, most), pair| (any | pair.places().1, pair.places().1.max(most)));
        let unit = any.trailing_zeros().min(63);
        // A bit is much cheaper than a hash entry. Up to one word for each place, the bitmap is also smaller.
        let words = (most >> unit) / 64 + 1;
        Ok(match usize::try_from(words) {
            Ok(words) if words <= pairs.len() => {
                PlaceSet::Dense { unit, bits: fallible::filled(PLAN, 0, words)? }
            }
            _ => {
                let mut set = HashSet::new();
                let room = set.try_reserve(pairs.len());
                room.map_err(|_| fallible::out_of_memory(PLAN, 2 * size_of_val(pairs)))?;
                PlaceSet::Sparse(set)
            }
        })
    }

    /// Adds a place. Returns `false` if the set already contains it.
    fn add(&mut self, place: u64) -> bool {
        match self {
            PlaceSet::Sparse(set) => set.insert(place),
            PlaceSet::Dense { unit, bits } => {
                let (word, bit) = Self::at(place, *unit);
                let Some(word) = bits.get_mut(word) else { return true };
                let new = *word & bit == 0;
                *word |= bit;
                new
            }
        }
    }

    fn has(&self, place: u64) -> bool {
        match self {
            PlaceSet::Sparse(set) => set.contains(&place),
            PlaceSet::Dense { unit, bits } => {
                let (word, bit) = Self::at(place, *unit);
                // A place between two units was never added.
                place.trailing_zeros() >= *unit && bits.get(word).is_some_and(|word| word & bit != 0)
            }
        }
    }

    fn at(place: u64, unit: u32) -> (usize, u64) {
        let index = place >> unit;
        (usize::try_from(index / 64).unwrap_or(usize::MAX), 1 << (index % 64))
    }
}

/// Sorts pairs by the place they read, and pairs that read the same place by the place they write.
pub(super) fn by_source<T: Pair>(pairs: &mut Vec<T>) -> Result<()> {
    sort_by_number(pairs, |pair| pair.places().0)?;
    for fan in pairs.chunk_by_mut(|a, b| a.places().0 == b.places().0) {
        fan.sort_unstable_by_key(|pair| pair.places().1);
    }
    Ok(())
}

/// Sorts by a number, stably.
///
/// Lists of blocks are long and their numbers differ in few bits. So long lists are sorted by radix, in a
/// fraction of the time of a comparison sort (`tests/integration/plan.rs` compares the results).
fn sort_by_number<T: Copy>(items: &mut Vec<T>, number: impl Fn(&T) -> u64) -> Result<()> {
    const FEW: usize = 512;
    if items.is_sorted_by_key(&number) {
        return Ok(());
    }
    if items.len() < FEW {
        items.sort_by_key(number);
        return Ok(());
    }
    let (all, any) =
        items.iter().fold((u64::MAX, 0), |(all, any), item| (all & number(item), any | number(item)));
    let differing = all ^ any;
    let (low, high) = (differing.trailing_zeros(), u64::BITS - differing.leading_zeros());
    // As few digits as possible, but no more values of a digit than there are items (at least 8 bits, at most
    // 16).
    let most = items.len().ilog2().clamp(8, 16);
    let digits = (high - low).div_ceil(most);
    let width = (high - low).div_ceil(digits.max(1));
    let mut dealt = fallible::copied(PLAN, items)?;
    let mut next = fallible::filled(PLAN, 0usize, 1 << width)?;
    for turn in 0..digits {
        let shift = low + turn * width;
        let digit = |item: &T| usize::try_from((number(item) >> shift) & ((1 << width) - 1)).unwrap_or(0);
        next.fill(0);
        for item in items.iter() {
            next[digit(item)] += 1;
        }
        let mut start = 0;
        for place in &mut next {
            start += std::mem::replace(place, start);
        }
        for item in items.iter() {
            let place = &mut next[digit(item)];
            dealt[*place] = *item;
            *place += 1;
        }
        std::mem::swap(items, &mut dealt);
    }
    Ok(())
}

/// Splits pairs within one cache into waves. Each pair runs as early as the pairs before it that touch its blocks allow.
pub(super) fn waves<T: Pair>(pairs: &[T]) -> Result<Vec<Vec<T>>> {
    /// The first wave in which a block may be read, and the first in which it may be written.
    #[derive(Default)]
    struct Free {
        read: usize,
        write: usize,
    }
    let mut blocks: HashMap<u64, Free> = fallible::map(PLAN, 2 * pairs.len())?;
    let mut waves: Vec<Vec<T>> = Vec::new();
    for &pair in pairs {
        let (src, dst) = pair.places();
        let earliest_read = blocks.entry(src).or_default().read;
        let earliest_write = blocks.entry(dst).or_default().write;
        let level = earliest_read.max(earliest_write);
        if waves.len() <= level {
            // At most one wave is missing, because every wave before it has a pair for which this one waits.
            fallible::push(PLAN, &mut waves, Vec::new())?;
        }
        fallible::push(PLAN, &mut waves[level], pair)?;
        let source = blocks.entry(src).or_default();
        source.write = source.write.max(level + 1);
        let target = blocks.entry(dst).or_default();
        (target.read, target.write) = (level + 1, level + 1);
    }
    Ok(waves)
}

/// Joins neighbours whose source and destination are both contiguous.
pub(super) fn contiguous(pieces: impl ExactSizeIterator<Item = Piece>) -> Result<Vec<Span>> {
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
pub(super) fn strided(runs: Vec<Span>) -> Result<Vec<Span>> {
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
