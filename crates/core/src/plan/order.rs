//! Decides which pieces must wait for others.
//!
//! Between two caches, no byte is both read and written, so only the last piece that writes a byte is copied, and nothing
//! has to wait. Within one cache, a piece that writes bytes which another piece reads or writes keeps its place in the order of
//! the request.

use hashbrown::{HashMap, HashSet};

use super::spans::{PLAN, Piece};
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

impl Pair for (u32, u32) {
    fn places(&self) -> (u64, u64) {
        (self.0.into(), self.1.into())
    }
}

/// Returns whether a pair writes a place that another pair writes or, if the caches are one, that any pair reads.
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
    if order_matters(pairs, CacheCount::Two)? {
        let mut written = PlaceSet::of(pairs)?;
        pairs.reverse();
        pairs.retain(|pair| written.add(pair.places().1));
    }
    Ok(())
}

/// Keeps of each piece only the bytes that no later piece writes. The order of the rest is undefined.
pub(super) fn keep_last_bytes(pieces: &mut Vec<Piece>) -> Result<()> {
    if !order_matters(pieces, CacheCount::Two)? {
        return Ok(());
    }
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

/// Splits pairs within one cache, whose [order matters](order_matters), into groups, which must be copied one after the other.
/// Each pair joins the first group that the earlier pairs at its places allow. No group is empty.
pub(super) fn groups<T: Pair>(pairs: Vec<T>) -> Result<Vec<Vec<T>>> {
    /// The first group in which a block may be read, and the first in which it may be written.
    #[derive(Default)]
    struct Free {
        read: usize,
        write: usize,
    }
    let mut groups: Vec<Vec<T>> = Vec::new();
    let mut blocks: HashMap<u64, Free> = fallible::map(PLAN, 2 * pairs.len())?;
    for pair in pairs {
        let (src, dst) = pair.places();
        let earliest_read = blocks.entry(src).or_default().read;
        let earliest_write = blocks.entry(dst).or_default().write;
        let level = earliest_read.max(earliest_write);
        if groups.len() <= level {
            // At most one group is missing, because every group before it has a pair for which this one waits.
            fallible::push(PLAN, &mut groups, Vec::new())?;
        }
        fallible::push(PLAN, &mut groups[level], pair)?;
        let source = blocks.entry(src).or_default();
        source.write = source.write.max(level + 1);
        let target = blocks.entry(dst).or_default();
        (target.read, target.write) = (level + 1, level + 1);
    }
    Ok(groups)
}
