//! Cuts a range of tokens at the block borders of both sides.

use std::ops::Range;

use super::super::spans::PLAN;
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{Argument, KvGeometry, SideWords};

/// The blocks of one sequence in a cache, in the order of its tokens.
#[derive(Clone, Debug)]
pub struct KvSequence<'a> {
    /// The layout and the sizes of the cache.
    pub geometry: &'a KvGeometry,
    /// Numbers of the blocks. The first one has tokens 0 to `tokens_per_block`, and so on.
    pub blocks: &'a [u64],
    /// The tokens to move. `None` starts at token 0; the number of tokens is then that of the other side or, if
    /// that is `None` too, of all tokens that both lists can hold.
    pub tokens: Option<Range<u64>>,
    /// How the caller calls the blocks and the tokens.
    pub words: &'a SideWords,
}

impl KvSequence<'_> {
    /// Returns the number of tokens that the blocks can hold.
    fn capacity(&self) -> u64 {
        (self.blocks.len() as u64).saturating_mul(self.tokens_per_block())
    }

    fn tokens_per_block(&self) -> u64 {
        self.geometry.layout().tokens_per_block.into()
    }

    /// Returns `Err(InvalidArgument)` unless every block is a row of the cache.
    fn check_blocks(&self) -> Result<()> {
        let rows = self.geometry.geometry().rows();
        let outside = self.blocks.iter().position(|&block| block >= rows);
        let error = |at: usize| {
            let range = format_args!("0 to {}", rows - 1);
            self.words.blocks.entry_out_of_range(at, self.blocks[at], range)
        };
        outside.map_or(Ok(()), |at| Err(error(at)))
    }

    /// Returns `Err(InvalidArgument)` unless each block has at least one of the first `tokens` tokens. Otherwise a block would silently
    /// keep what it had.
    fn check_used(&self, tokens: u64) -> Result<()> {
        ensure(self.capacity() - tokens < self.tokens_per_block(), || {
            let (blocks, each) = (self.blocks.len(), self.tokens_per_block());
            let required = format_args!(
                "as many as {tokens} tokens need, or given with a range of tokens: each has {each}"
            );
            self.words.blocks.whole().must_be(format_args!("{blocks} blocks"), required)
        })
    }

    /// Returns `Err(InvalidArgument)` unless `tokens` is a range of tokens that the blocks can hold.
    fn check_tokens(&self, tokens: &Range<u64>) -> Result<()> {
        ensure(tokens.start <= tokens.end && tokens.end <= self.capacity(), || {
            let (blocks, each) = (self.blocks.len(), self.tokens_per_block());
            let required =
                format_args!("a range inside 0..{}: {blocks} blocks of {each} tokens", self.capacity());
            self.words.tokens.must_be(format_args!("{tokens:?}"), required)
        })
    }
}

/// A run of tokens that lies in one block on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TokenRun {
    pub(super) tokens: u64,
    /// Position of the first token in a source tensor: of its first head, in the first plane.
    pub(super) src: u64,
    /// The same position in a destination tensor.
    pub(super) dst: u64,
}

/// Returns the runs of a move, those of equal length side by side and, among these, in the order of the source.
/// `Err(InvalidArgument)` for block lists or token ranges that are invalid or do not fit each other.
pub(super) fn token_runs(src: &KvSequence<'_>, dst: &KvSequence<'_>) -> Result<Vec<TokenRun>> {
    src.check_blocks()?;
    dst.check_blocks()?;
    check_repeats(dst.words.blocks, dst.blocks)?;
    let (src_tokens, dst_tokens) = token_ranges(src, dst)?;
    let blocks_of = |side: &KvSequence<'_>| 2 + (src_tokens.end - src_tokens.start) / side.tokens_per_block();
    let most = usize::try_from(blocks_of(src).saturating_add(blocks_of(dst))).unwrap_or(usize::MAX);
    let mut runs = fallible::with_capacity(PLAN, most)?;
    let mut left = src_tokens.end - src_tokens.start;
    let (mut from, mut to) = (Cursor::at(src, src_tokens.start), Cursor::at(dst, dst_tokens.start));
    while left > 0 {
        let tokens = left.min(from.left).min(to.left);
        runs.push(TokenRun { tokens, src: from.position, dst: to.position });
        left -= tokens;
        from.advance(tokens);
        to.advance(tokens);
    }
    if !runs.is_sorted() {
        runs.sort_unstable();
    }
    Ok(runs)
}

/// Returns `Err(InvalidArgument)` if neither side names tokens, and a block of one side would take no part in the move.
pub fn no_block_left_over(src: &KvSequence<'_>, dst: &KvSequence<'_>) -> Result<()> {
    if src.tokens.is_some() || dst.tokens.is_some() {
        return Ok(());
    }
    let both = src.capacity().min(dst.capacity());
    src.check_used(both)?;
    dst.check_used(both)
}

/// Returns how many tokens a move copies. `Err(InvalidArgument)` for token ranges that do not fit the lists or each other.
pub fn moved_tokens(src: &KvSequence<'_>, dst: &KvSequence<'_>) -> Result<u64> {
    let (src_tokens, _) = token_ranges(src, dst)?;
    Ok(src_tokens.end - src_tokens.start)
}

fn token_ranges(src: &KvSequence<'_>, dst: &KvSequence<'_>) -> Result<(Range<u64>, Range<u64>)> {
    let of_length = |range: &Range<u64>| 0..range.end.saturating_sub(range.start);
    let both = 0..src.capacity().min(dst.capacity());
    let src_tokens =
        src.tokens.clone().unwrap_or_else(|| dst.tokens.as_ref().map_or(both.clone(), of_length));
    let dst_tokens = dst.tokens.clone().unwrap_or_else(|| src.tokens.as_ref().map_or(both, of_length));
    // The range that the caller gave comes first, because the other one follows from it.
    if src.tokens.is_none() {
        dst.check_tokens(&dst_tokens)?;
    }
    src.check_tokens(&src_tokens)?;
    dst.check_tokens(&dst_tokens)?;
    ensure(of_length(&src_tokens) == of_length(&dst_tokens), || {
        let other = dst.words.tokens.elsewhere(format_args!("{dst_tokens:?}"));
        let required = format_args!("as many tokens as {other}");
        src.words.tokens.must_be(format_args!("{src_tokens:?}"), required)
    })?;
    Ok((src_tokens, dst_tokens))
}

/// Returns `Err(InvalidArgument)` if a block occurs twice in a list of destinations.
fn check_repeats(list: Argument<'_>, blocks: &[u64]) -> Result<()> {
    if blocks.is_sorted_by(|a, b| a < b) {
        return Ok(());
    }
    let mut sorted = fallible::copied(PLAN, blocks)?;
    sorted.sort_unstable();
    let twice = sorted.windows(2).find(|two| two[0] == two[1]);
    twice.map_or(Ok(()), |two| {
        let text = format!("{list} contains block {} twice", two[0]);
        Err(Error::invalid(text).of_argument(list.parameter()))
    })
}

/// A token of a sequence, and where it is.
struct Cursor<'a> {
    side: &'a KvSequence<'a>,
    /// Index of its block in the list.
    block: usize,
    /// Its position in a tensor.
    position: u64,
    /// Tokens from here to the end of the block. 0 after the last block.
    left: u64,
}

impl<'a> Cursor<'a> {
    fn at(side: &'a KvSequence<'a>, token: u64) -> Self {
        let each = side.tokens_per_block();
        let block = usize::try_from(token / each).unwrap_or(usize::MAX);
        let mut cursor = Cursor { side, block, position: 0, left: 0 };
        cursor.enter();
        if cursor.left > 0 {
            cursor.step(token % each);
        }
        cursor
    }

    /// Goes to the first token of the block.
    fn enter(&mut self) {
        if let Some(&block) = self.side.blocks.get(self.block) {
            // Below 2^63, because the block is a row of the cache.
            self.position = block * self.side.geometry.geometry().row_stride();
            self.left = self.side.tokens_per_block();
        }
    }

    fn step(&mut self, tokens: u64) {
        self.position += tokens * self.side.geometry.token_step();
        self.left -= tokens;
    }

    /// Goes `tokens` tokens on, at most to the start of the next block.
    fn advance(&mut self, tokens: u64) {
        self.step(tokens);
        if self.left == 0 {
            self.block += 1;
            self.enter();
        }
    }
}
