//! A plan: which bytes of each tensor are copied to where.

use std::sync::Arc;

use smallvec::SmallVec;

use super::side::Side;
use super::spans::{Piece, Span};
use super::template::{Template, Templates};
use super::tensor_steps::TensorSteps;
use crate::error::Result;

/// The plans of one call. Most calls have one, which takes no memory of its own.
pub type Plans = SmallVec<[CopyPlan; 1]>;

/// Pieces that may be copied in any order and at the same time: none writes what another reads or writes.
///
/// The pieces are copied in each of `num_tensors` tensors: each tensor of `src` is copied into the tensor of `dst` with the
/// same index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CopyPlan {
    num_tensors: u32,
    src: TensorSteps,
    dst: TensorSteps,
    /// None of them is empty.
    templates: Templates,
    /// Bytes of one tensor.
    tensor_bytes: u64,
}

impl CopyPlan {
    /// Returns the plan of `templates` in the first `num_tensors` tensors of `src` and `dst`. Their bytes in one tensor must not
    /// exceed 64 bits.
    pub(super) fn new(
        num_tensors: u32,
        (src, dst): (TensorSteps, TensorSteps),
        mut templates: Templates,
    ) -> Result<Self> {
        // Copies nothing, because no plan shares them yet.
        let list = Arc::make_mut(&mut templates);
        list.retain(|template| template.num_pieces() > 0);
        list.iter_mut().try_for_each(Template::set_ends)?;
        let tensor_bytes = list.iter().map(Template::tensor_bytes).sum();
        Ok(CopyPlan { num_tensors, src, dst, templates, tensor_bytes })
    }

    /// Returns the same pieces in `num_tensors` other tensors, from tensor `src_tensor` of the source and tensor
    /// `dst_tensor` of the destination on, with the same steps. This cuts a plan by layer without planning again.
    #[must_use]
    pub fn in_tensors(&self, src_tensor: u32, dst_tensor: u32, num_tensors: u32) -> Self {
        let src = TensorSteps { first: src_tensor, ..self.src };
        let dst = TensorSteps { first: dst_tensor, ..self.dst };
        self.in_tensor_steps(src, dst, num_tensors)
    }

    /// Returns the same pieces in the first `num_tensors` tensors of `src` and of `dst`.
    #[must_use]
    pub fn in_tensor_steps(&self, src: TensorSteps, dst: TensorSteps, num_tensors: u32) -> Self {
        CopyPlan { num_tensors, src, dst, ..self.clone() }
    }

    /// Returns a plan that covers this plan and `next`. Returns `None` unless both are the same plan and `next` starts at the
    /// following tensor on both sides.
    #[must_use]
    pub fn followed_by(&self, next: &Self) -> Option<Self> {
        let follows = |this: TensorSteps, next: TensorSteps| {
            this.step == next.step && this.number(self.num_tensors) == next.first
        };
        let same = Arc::ptr_eq(&self.templates, &next.templates);
        let joins = same && follows(self.src, next.src) && follows(self.dst, next.dst);
        let num_tensors = self.num_tensors.checked_add(next.num_tensors).filter(|_| joins)?;
        Some(self.in_tensor_steps(self.src, self.dst, num_tensors))
    }

    /// Returns whether the plan copies nothing.
    pub fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }

    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// Returns the tensors of one side.
    pub fn tensors(&self, side: Side) -> TensorSteps {
        side.of((self.src, self.dst))
    }

    pub fn templates(&self) -> &Templates {
        &self.templates
    }

    /// Returns the number of pairs of all templates.
    pub fn num_pairs(&self) -> usize {
        self.templates.iter().map(|template| template.pairs.len()).sum()
    }

    /// Returns the number of bytes copied in one tensor.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }

    pub fn bytes(&self) -> u64 {
        self.tensor_bytes.saturating_mul(u64::from(self.num_tensors))
    }

    /// Returns the number of pieces in one tensor.
    pub fn num_pieces(&self) -> u64 {
        self.templates.iter().fold(0, |sum, template| template.num_pieces().saturating_add(sum))
    }

    /// Returns the number of spans and pairs of the plan. Its message takes a few bytes for each.
    pub fn num_entries(&self) -> usize {
        self.templates.iter().map(|template| template.pairs.len() + template.spans.len()).sum()
    }

    /// Returns the pieces of bytes `from..to` of the whole plan, each with the index of its tensor in
    /// [`tensors`](Self::tensors). Bytes are counted as in [`spans`](Self::spans).
    pub fn pieces(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Piece)> + '_ {
        let each = |(tensor, span): (usize, Span)| span.pieces().map(move |piece| (tensor, piece));
        self.spans(from, to).flat_map(each)
    }

    /// Returns the same pieces as [`pieces`](Self::pieces), as spans. Bytes are counted along all templates of the first
    /// tensor, then of the next. The first and the last piece may be cut.
    pub fn spans(&self, from: u64, to: u64) -> impl Iterator<Item = (usize, Span)> + '_ {
        let (one, to) = (self.tensor_bytes.max(1), to.min(self.bytes()));
        (from / one..to.div_ceil(one)).flat_map(move |tensor| {
            let start = tensor * one;
            let spans = self.tensor_spans(from.saturating_sub(start), (to - start).min(one));
            spans.map(move |span| (usize::try_from(tensor).unwrap_or(usize::MAX), span))
        })
    }

    /// Returns the spans of bytes `from..to` of one tensor.
    fn tensor_spans(&self, from: u64, to: u64) -> impl Iterator<Item = Span> + '_ {
        let mut start = 0;
        self.templates.iter().flat_map(move |template| {
            let (from, to) = (from.saturating_sub(start), to.saturating_sub(start));
            start += template.tensor_bytes();
            template.spans_between(from, to.min(template.tensor_bytes()))
        })
    }

    /// Returns the pieces of bytes `from..to` of one tensor. The first and the last piece may be cut.
    pub fn tensor_pieces(&self, from: u64, to: u64) -> impl Iterator<Item = Piece> + '_ {
        self.tensor_spans(from, to).flat_map(Span::pieces)
    }
}
