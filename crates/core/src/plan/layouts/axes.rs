//! The pieces that a run of tokens takes, as few and as long as the layouts of both sides allow.

use std::cmp::Reverse;

use super::super::spans::{PLAN, Span};
use crate::error::Result;
use crate::fallible;

/// Maximum number of spans of a run of tokens in the fastest order. Above it, the longest dimension becomes the span count,
/// which gives the fewest spans.
const MAX_SPANS: u64 = 1024;
/// A dimension of fewer indices becomes the innermost one only if all dimensions have fewer: handling each span would cost
/// more than reading in order saves.
const MIN_INNERMOST: u64 = 8;

/// One dimension of a run of tokens: its planes, tokens or heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Axis {
    pub(super) count: u64,
    /// Bytes from one index to the next in the source.
    pub(super) src_step: u64,
    /// Bytes from one index to the next in the destination.
    pub(super) dst_step: u64,
}

impl Axis {
    /// Returns whether one index of this dimension is exactly all of `inner`, on both sides.
    fn continues(&self, inner: &Axis) -> bool {
        let whole = |step: u64| step.checked_mul(inner.count);
        whole(inner.src_step) == Some(self.src_step) && whole(inner.dst_step) == Some(self.dst_step)
    }
}

/// Returns the spans that copy `len` bytes for every combination of indices of `axes`. Reads start at byte `src` and
/// writes at byte `dst`.
///
/// The order is that of the fastest copy: the source is read in the order of its bytes, unless that needs many short
/// spans (benches/results/log.md).
pub(super) fn spans(len: u64, axes: &[Axis], (src, dst): (u64, u64)) -> Result<Vec<Span>> {
    let (len, mut axes) = joined(len, axes);
    axes.sort_unstable_by_key(|axis| (axis.count < MIN_INNERMOST, axis.src_step, axis.count));
    let outer = |axes: &[Axis]| axes.iter().skip(1).map(|axis| axis.count).product::<u64>();
    if outer(&axes) > MAX_SPANS {
        axes.sort_unstable_by_key(|axis| Reverse(axis.count));
    }
    let outer = outer(&axes);
    let mut axes = axes.into_iter();
    let Axis { count, src_step, dst_step } =
        axes.next().unwrap_or(Axis { count: 1, src_step: 0, dst_step: 0 });
    let start = |mut index: u64| {
        let (mut src, mut dst) = (src, dst);
        for axis in axes.clone() {
            let at = index % axis.count;
            index /= axis.count;
            (src, dst) = (src + at * axis.src_step, dst + at * axis.dst_step);
        }
        let (src_step, dst_step) = (src_step.cast_signed(), dst_step.cast_signed());
        Span { src, dst, len, count, src_step, dst_step }
    };
    let count = usize::try_from(outer).unwrap_or(usize::MAX);
    fallible::collect_growing(PLAN, count, (0..outer).map(start))
}

/// Joins dimensions that are contiguous with the pieces or with each other on both sides. Returns the length of the
/// pieces and the dimensions that remain.
fn joined(mut len: u64, axes: &[Axis]) -> (u64, Vec<Axis>) {
    let mut axes: Vec<Axis> = axes.iter().copied().filter(|axis| axis.count > 1).collect();
    while let Some(at) = axes.iter().position(|axis| (axis.src_step, axis.dst_step) == (len, len)) {
        len *= axes.swap_remove(at).count;
    }
    let pair = |axes: &[Axis]| {
        let all = || 0..axes.len();
        all().flat_map(|a| all().map(move |b| (a, b))).find(|&(a, b)| a != b && axes[a].continues(&axes[b]))
    };
    while let Some((outer, inner)) = pair(&axes) {
        axes[inner].count *= axes[outer].count;
        axes.swap_remove(outer);
    }
    (len, axes)
}
