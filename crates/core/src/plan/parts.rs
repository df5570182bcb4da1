//! Plans that come from a peer: numbers that mean nothing until they were checked, and the rows a plan touches.
//!
//! Nothing here takes longer for a larger count in a span: positions are checked in closed form. Not for: what the
//! bytes of a message mean (`wire`).

use std::ops::Range;

use super::CopyPlan;
use super::order::sort_by_number;
use super::wave::{Span, Wave};
use crate::error::{Error, ErrorKind, Result};

/// Most waves a plan from a peer may have: as many as a list of blocks that all go to one place becomes.
const MOST_WAVES: usize = 1 << 16;
/// Most pieces a plan from a peer may have in one tensor: more than any list of blocks a message can carry becomes.
const MOST_PIECES: u64 = 1 << 24;

impl CopyPlan {
    /// The plan of a peer. Refused: spans without bytes or pieces, pieces of one span that are written over each other,
    /// positions beyond 64 bits, 2^63 bytes or more in all, more than 2^24 pieces. Whether it fits a cache, and its
    /// waves do not exceed a tensor, is for [`check_ends`](Self::check_ends).
    pub fn from_parts(
        num_tensors: u32,
        src_tensor: u32,
        dst_tensor: u32,
        waves: Vec<Vec<Span>>,
    ) -> Result<CopyPlan> {
        let ends = [src_tensor.checked_add(num_tensors), dst_tensor.checked_add(num_tensors)];
        if num_tensors == 0 || ends.contains(&None) {
            let text = format!(
                "{num_tensors} tensors, read from tensor {src_tensor} and written from tensor {dst_tensor}"
            );
            return Err(refused(&text));
        }
        if waves.len() > MOST_WAVES {
            return Err(refused(&format!("{} waves, more than {MOST_WAVES},", waves.len())));
        }
        let (mut pieces, mut bytes) = (0u64, 0u64);
        for span in waves.iter().flatten() {
            let sound = sound(span).then_some(());
            let sums = sound.and_then(|()| {
                let all = bytes.checked_add(span.len.checked_mul(span.count)?)?;
                Some((pieces.checked_add(span.count)?, all))
            });
            (pieces, bytes) = sums.ok_or_else(|| refused(&format!("{span:?}")))?;
            if pieces > MOST_PIECES {
                return Err(refused(&format!("more than {MOST_PIECES} pieces in one tensor")));
            }
        }
        let total = bytes.checked_mul(u64::from(num_tensors));
        if total.is_none_or(|total| i64::try_from(total).is_err()) {
            return Err(refused(&format!(
                "{bytes} bytes in each of {num_tensors} tensors, 2^63 or more in all"
            )));
        }
        Ok(CopyPlan { src_tensor, dst_tensor, ..CopyPlan::new(num_tensors, waves) })
    }

    /// Whether every piece of every span lies inside the tensors read and written: how many there are, and the bytes
    /// of each. `None` for an end that somebody else checks.
    pub fn check_ends(&self, src: Option<(u32, u64)>, dst: Option<(u32, u64)>) -> Result<()> {
        let ends = [("read", src, self.src_tensor), ("written", dst, self.dst_tensor)];
        for (what, end, first) in ends {
            let Some((tensors, tensor_bytes)) = end else { continue };
            if u64::from(first) + u64::from(self.num_tensors) > u64::from(tensors) {
                let text = format!("{} tensors from tensor {first} are not in a cache", self.num_tensors);
                return Err(Error::new(ErrorKind::InvalidArgument, text)
                    .with("which", what)
                    .with("num_tensors", tensors));
            }
            for wave in self.waves.iter() {
                // Nothing in a wave is written twice, so a wave that writes more than the tensor holds is not one.
                if what == "written" && wave.tensor_bytes() > tensor_bytes {
                    return Err(outside(what, tensor_bytes).with("wave_bytes", wave.tensor_bytes()));
                }
                let reach = |span: &Span| if what == "read" { span.reads() } else { span.writes() };
                let beyond = |span: &&Span| reach(span).is_none_or(|range| range.end > tensor_bytes);
                if let Some(span) = wave.spans().iter().find(beyond) {
                    return Err(outside(what, tensor_bytes).with("span", format_args!("{span:?}")));
                }
            }
        }
        Ok(())
    }

    /// The rows of `row_bytes` bytes that are read, ascending, each once. A plan of a peer must have passed
    /// [`check_ends`](Self::check_ends): then there are no more than the cache has.
    #[must_use]
    pub fn src_rows(&self, row_bytes: u64) -> Vec<u64> {
        rows(&self.waves, row_bytes, |span| (span.src, span.src_step))
    }

    /// The rows of `row_bytes` bytes that are written, as [`src_rows`](Self::src_rows).
    #[must_use]
    pub fn dst_rows(&self, row_bytes: u64) -> Vec<u64> {
        rows(&self.waves, row_bytes, |span| (span.dst, span.dst_step))
    }
}

impl Span {
    /// From the first byte read by any piece to the last; `None` beyond 64 bits.
    fn reads(&self) -> Option<Range<u64>> {
        hull(self.src, self.src_step, self.count, self.len)
    }

    /// From the first byte written by any piece to the last; `None` beyond 64 bits.
    fn writes(&self) -> Option<Range<u64>> {
        hull(self.dst, self.dst_step, self.count, self.len)
    }
}

fn hull(start: u64, step: i64, count: u64, len: u64) -> Option<Range<u64>> {
    // Positions are linear in the piece, so the outermost are those of the first and the last.
    let last = i128::from(start) + i128::from(step) * i128::from(count - 1);
    let last = u64::try_from(last).ok()?;
    Some(start.min(last)..start.max(last).checked_add(len)?)
}

fn sound(span: &Span) -> bool {
    let apart = span.count == 1 || span.dst_step.unsigned_abs() >= span.len;
    span.len > 0 && span.count > 0 && apart && span.reads().is_some() && span.writes().is_some()
}

#[cold]
fn refused(what: &str) -> Error {
    Error::new(ErrorKind::InvalidArgument, format!("a plan with {what} makes no sense"))
}

#[cold]
fn outside(what: &'static str, tensor_bytes: u64) -> Error {
    Error::new(ErrorKind::InvalidArgument, "a plan reaches beyond its tensors")
        .with("which", what)
        .with("tensor_bytes", tensor_bytes)
}

fn rows(waves: &[Wave], row_bytes: u64, end: impl Fn(&Span) -> (u64, i64)) -> Vec<u64> {
    let row_bytes = row_bytes.max(1);
    let mut touched: Vec<(u64, u64)> = Vec::new();
    for span in waves.iter().flat_map(Wave::spans) {
        let (start, step) = end(span);
        let mut add = |start: u64, bytes: u64| {
            touched.push((start / row_bytes, (start + (bytes - 1)) / row_bytes));
        };
        // Steps of at most a row leave out no row on the way.
        if step.unsigned_abs() <= row_bytes {
            if let Some(range) = hull(start, step, span.count, span.len) {
                add(range.start, range.end - range.start);
            }
        } else {
            (0..span.count).for_each(|k| add(at(start, step, k), span.len));
        }
    }
    sort_by_number(&mut touched, |&(first, _)| first);
    let mut rows = Vec::new();
    let mut next = 0;
    for (first, last) in touched {
        rows.extend(first.max(next)..=last);
        next = next.max(last + 1);
    }
    rows
}

/// Where piece `k` starts; plans keep this inside 64 bits.
fn at(start: u64, step: i64, k: u64) -> u64 {
    start.wrapping_add_signed(step.wrapping_mul(k.cast_signed()))
}
