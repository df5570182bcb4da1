//! Which tensors of a cache a plan touches.

use serde::{Deserialize, Serialize};

/// Tensors at a constant distance: the plan's tensor `t` is tensor `first + t·step` of the cache.
///
/// The step is 1 in most plans. It is 2 if a plan touches only the keys, or only the values, of a cache that
/// has them in alternating tensors. In a message, the fields are encoded in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSteps {
    /// The plan's tensor 0.
    pub first: u32,
    /// Distance of two tensors of the plan, above 0.
    pub step: u32,
}

impl TensorSteps {
    /// Returns the tensors from `first` on, without gaps.
    pub fn consecutive(first: u32) -> TensorSteps {
        TensorSteps { first, step: 1 }
    }

    /// Returns the number of the plan's tensor `index` in its cache, or the highest number if it exceeds that.
    pub fn tensor(self, index: usize) -> usize {
        index.saturating_mul(self.step as usize).saturating_add(self.first as usize)
    }

    /// Returns the number of the plan's tensor `index` in its cache, or the highest number if it exceeds that.
    pub fn number(self, index: u32) -> u32 {
        index.saturating_mul(self.step).saturating_add(self.first)
    }

    /// Returns the number after the last of `count` tensors, `first` if there are none; `None` if it exceeds 32 bits.
    pub(super) fn end(self, count: u32) -> Option<u32> {
        let Some(last) = count.checked_sub(1) else { return Some(self.first) };
        last.checked_mul(self.step)?.checked_add(self.first)?.checked_add(1)
    }
}
