//! A set of numbers, with one bit for each number up to a limit.

use crate::error::Result;
use crate::fallible;

/// Numbers from 0 up to a limit. Higher ones are ignored.
pub(super) struct BitSet(Vec<u64>);

impl BitSet {
    /// Returns the number of words of 8 bytes that a set for numbers up to `most` takes.
    pub(super) fn words(most: u64) -> usize {
        usize::try_from(most / 64 + 1).unwrap_or(usize::MAX)
    }

    /// Returns an empty set for numbers up to `most`. `name` names the set in out-of-memory errors.
    pub(super) fn new(name: &'static str, most: u64) -> Result<BitSet> {
        fallible::filled(name, 0, Self::words(most)).map(BitSet)
    }

    /// Adds a number. Returns `false` if the set already contains it.
    #[inline]
    pub(super) fn add(&mut self, number: u64) -> bool {
        self.add_mask(number / 64, 1 << (number % 64))
    }

    /// Adds the numbers from `first` to `last`. Returns `false` if the set already contains one of them.
    pub(super) fn add_all(&mut self, first: u64, last: u64) -> bool {
        let (mut next, mut new) = (first, true);
        while next <= last {
            let bit = next % 64;
            let count = (64 - bit).min(last - next + 1);
            new &= self.add_mask(next / 64, (u64::MAX >> (64 - count)) << bit);
            next += count;
        }
        new
    }

    #[inline]
    fn add_mask(&mut self, word: u64, mask: u64) -> bool {
        let Some(word) = usize::try_from(word).ok().and_then(|at| self.0.get_mut(at)) else { return true };
        let new = *word & mask == 0;
        *word |= mask;
        new
    }

    pub(super) fn has(&self, number: u64) -> bool {
        let word = usize::try_from(number / 64).ok().and_then(|at| self.0.get(at));
        word.is_some_and(|word| word & (1 << (number % 64)) != 0)
    }

    /// Returns the numbers in ascending order.
    pub(super) fn into_list(self, name: &'static str) -> Result<Vec<u64>> {
        let count = self.0.iter().map(|word| word.count_ones() as usize).sum();
        let mut list = fallible::with_capacity(name, count)?;
        for (at, mut word) in (0u64..).step_by(64).zip(self.0) {
            while word != 0 {
                list.push(at + u64::from(word.trailing_zeros()));
                word &= word - 1;
            }
        }
        Ok(list)
    }
}
