//! Request and geometry → [`CopyPlan`]: which bytes of every tensor go where, merged, and in what order they must run.
//!
//! Pure arithmetic: a plan never sees an address. All tensors of a cache are equal, so one list of spans serves them
//! all and a plan of 4,096 blocks in 80 tensors has at most 4,096 spans. Not for: bounds (checked by `check` before
//! and by `mem::Window` again) or who moves the bytes (`engine`).

use hashbrown::HashMap;

use crate::check::{BlockPairs, CopyRange};

/// `count` pieces of `len` bytes in one tensor: piece `k` goes from `src + k·src_step` to `dst + k·dst_step`.
///
/// One span covers a contiguous run (`count` 1), a run written backwards (`dst_step` below 0), every n-th block
/// (steps above `len`) and one block fanned out to many (`src_step` 0).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// Bytes of one piece.
    pub len: u64,
    /// How many pieces.
    pub count: u64,
    /// Bytes from one piece read to the next.
    pub src_step: i64,
    /// Bytes from one piece written to the next.
    pub dst_step: i64,
}

impl Span {
    fn single(src: u64, dst: u64, len: u64) -> Self {
        Span { src, dst, len, count: 1, src_step: 0, dst_step: 0 }
    }

    fn bytes(&self) -> u64 {
        self.len * self.count
    }

    /// Source and destination of piece `k`.
    fn piece(&self, k: u64) -> (u64, u64) {
        // Steps were computed as differences of two offsets in one tensor, so they wrap back into it.
        let at = |start: u64, step: i64| start.wrapping_add_signed(step.wrapping_mul(k.cast_signed()));
        (at(self.src, self.src_step), at(self.dst, self.dst_step))
    }
}

/// One stretch of bytes to copy in one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte read, from the start of the tensor.
    pub src: u64,
    /// First byte written, from the start of the tensor.
    pub dst: u64,
    /// How many bytes.
    pub len: u64,
}

/// Spans that may run in any order and at the same time: none writes what another reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wave {
    spans: Vec<Span>,
    /// Bytes of one tensor in the spans up to and including each: ascending, so a byte position finds its span.
    ends: Vec<u64>,
}

impl Wave {
    fn new(spans: Vec<Span>) -> Self {
        let mut total = 0;
        let ends = spans
            .iter()
            .map(|span| {
                total += span.bytes();
                total
            })
            .collect();
        Wave { spans, ends }
    }

    /// The spans.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Bytes copied in one tensor.
    #[must_use]
    pub fn tensor_bytes(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// The pieces of bytes `from..to`, counted along the spans of one tensor; the first and last may be cut.
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> + '_ {
        let mut at = from;
        let mut index = self.ends.partition_point(|&end| end <= from);
        std::iter::from_fn(move || {
            if at >= to {
                return None;
            }
            let span = self.spans.get(index)?;
            let inside = at - (self.ends[index] - span.bytes());
            let (k, skip) = (inside / span.len, inside % span.len);
            let (src, dst) = span.piece(k);
            let len = (span.len - skip).min(to - at);
            at += len;
            if at == self.ends[index] {
                index += 1;
            }
            Some(Piece { src: src + skip, dst: dst + skip, len })
        })
    }

    /// The pieces of bytes `from..to`, counted along all spans of tensor 0, then of tensor 1, and so on, each with its
    /// tensor.
    pub fn across_tensors(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let one = self.tensor_bytes().max(1);
        (from / one..to.div_ceil(one)).flat_map(move |tensor| {
            let start = tensor * one;
            let pieces = self.pieces(from.saturating_sub(start), (to - start).min(one));
            pieces.map(move |piece| (usize::try_from(tensor).unwrap_or(usize::MAX), piece))
        })
    }
}

/// Waves of spans, each to be finished before the next, the same in each of `num_tensors` tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    num_tensors: u32,
    waves: Vec<Wave>,
}

/// Whether a plan reads and writes the same cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// Source and destination are one cache, so a block may be both.
    OneCache,
    /// They are two.
    TwoCaches,
}

impl CopyPlan {
    /// One range in every tensor. A range onto itself is nothing to do.
    #[must_use]
    pub fn range(range: &CopyRange, ends: Ends) -> Self {
        let onto_itself = ends == Ends::OneCache && range.src_offset == range.dst_offset;
        let spans = if onto_itself {
            vec![]
        } else {
            vec![Span::single(range.src_offset, range.dst_offset, range.bytes)]
        };
        Self::new(range.num_tensors, vec![spans])
    }

    /// Whole blocks, with the result of copying the pairs one after the other in the order given.
    #[must_use]
    pub fn blocks(request: &BlockPairs, ends: Ends) -> Self {
        let mut pairs = request.pairs.clone();
        if ends == Ends::OneCache {
            pairs.retain(|&(src, dst)| src != dst);
        }
        let bytes = request.block_bytes;
        let waves = if order_matters(&pairs, ends) { levels(&pairs, ends) } else { vec![pairs] };
        let merged = waves.into_iter().map(|wave| strided(&contiguous(wave, bytes))).collect();
        Self::new(request.num_tensors, merged)
    }

    fn new(num_tensors: u32, waves: Vec<Vec<Span>>) -> Self {
        let waves = waves.into_iter().filter(|spans| !spans.is_empty()).map(Wave::new).collect();
        CopyPlan { num_tensors, waves }
    }

    /// In how many tensors.
    #[must_use]
    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// The waves, in the order they must run.
    #[must_use]
    pub fn waves(&self) -> &[Wave] {
        &self.waves
    }

    /// Bytes in all tensors and waves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let one: u64 = self.waves.iter().map(Wave::tensor_bytes).sum();
        one.saturating_mul(u64::from(self.num_tensors))
    }
}

/// Whether some pair writes a block that another pair writes, or (in one cache) reads.
fn order_matters(pairs: &[(u64, u64)], ends: Ends) -> bool {
    if pairs.len() < 2 {
        return false;
    }
    let mut written: Vec<u64> = pairs.iter().map(|&(_, dst)| dst).collect();
    written.sort_unstable();
    if written.windows(2).any(|two| two[0] == two[1]) {
        return true;
    }
    ends == Ends::OneCache && pairs.iter().any(|(src, _)| written.binary_search(src).is_ok())
}

/// Splits pairs into waves: each pair runs as early as the pairs before it that touch its blocks allow.
fn levels(pairs: &[(u64, u64)], ends: Ends) -> Vec<Vec<(u64, u64)>> {
    /// The first wave in which a block may be read, and the first in which it may be written.
    #[derive(Default)]
    struct Free {
        read: usize,
        write: usize,
    }
    let mut blocks: HashMap<(bool, u64), Free> = HashMap::with_capacity(2 * pairs.len());
    // In two caches block 3 read and block 3 written are different blocks.
    let apart = ends == Ends::TwoCaches;
    let mut waves: Vec<Vec<(u64, u64)>> = Vec::new();
    for &(src, dst) in pairs {
        let earliest_read = blocks.entry((apart, src)).or_default().read;
        let earliest_write = blocks.entry((false, dst)).or_default().write;
        let level = earliest_read.max(earliest_write);
        if waves.len() <= level {
            waves.resize_with(level + 1, Vec::new);
        }
        waves[level].push((src, dst));
        let source = blocks.entry((apart, src)).or_default();
        source.write = source.write.max(level + 1);
        let target = blocks.entry((false, dst)).or_default();
        (target.read, target.write) = (level + 1, level + 1);
    }
    waves
}

/// Sorts pairs by source and joins neighbours whose source and destination both continue.
fn contiguous(mut pairs: Vec<(u64, u64)>, block_bytes: u64) -> Vec<Span> {
    pairs.sort_unstable();
    let mut runs: Vec<Span> = Vec::with_capacity(pairs.len());
    for (src, dst) in pairs {
        let (src, dst) = (src * block_bytes, dst * block_bytes);
        match runs.last_mut() {
            Some(run) if run.src + run.len == src && run.dst + run.len == dst => run.len += block_bytes,
            _ => runs.push(Span::single(src, dst, block_bytes)),
        }
    }
    runs
}

/// Joins three or more equal runs at a constant distance into one strided span.
fn strided(runs: &[Span]) -> Vec<Span> {
    let step = |a: &Span, b: &Span| {
        let same = a.len == b.len;
        same.then(|| (b.src.wrapping_sub(a.src).cast_signed(), b.dst.wrapping_sub(a.dst).cast_signed()))
    };
    let mut spans = Vec::with_capacity(runs.len());
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
    spans
}
