//! The sizes of a cache whose tensors may differ, as runs of equal neighbours.
//!
//! All tensors have the same number of rows, so a row number names one row in each of them.

use std::sync::Arc;

use super::cache_desc::{CacheDesc, DataType, Geometry, Placement, TensorDesc};
use crate::error::{Error, Result, ensure};
use crate::fallible;

/// Name of these lists in out-of-memory errors.
const TENSORS: &str = "the tensors of a cache";

impl TensorDesc {
    /// Returns whether the tensors are like those of `other`, which may be more or fewer.
    fn equals(&self, other: &TensorDesc) -> bool {
        (&self.shape, self.data_type, self.row_stride) == (&other.shape, other.data_type, other.row_stride)
    }
}

impl CacheDesc {
    /// Returns the description of a cache with these tensors, in this order. `Err(InvalidArgument)` if there are none, if a
    /// description is of none, or if there are more than [`Geometry::MAX_TENSORS`].
    pub fn of_tensors(tensors: Vec<TensorDesc>, placement: Placement) -> Result<CacheDesc> {
        let count = tensors.iter().map(|tensors| u64::from(tensors.count)).sum::<u64>();
        let allowed = 1..=u64::from(Geometry::MAX_TENSORS);
        let (Some(first), Ok(num_tensors)) = (tensors.first(), u32::try_from(count)) else {
            return Err(too_many(count));
        };
        ensure(allowed.contains(&count), || too_many(count))?;
        ensure(tensors.iter().all(|tensors| tensors.count > 0), || {
            Error::argument("num_tensors", 0, "above 0 in every part")
        })?;
        let TensorDesc { shape, data_type, row_stride, .. } = first.clone();
        // Then it is a cache like any other, and takes the same paths.
        let tensors = if tensors.iter().all(|other| other.equals(first)) { Vec::new() } else { tensors };
        Ok(CacheDesc { num_tensors, shape, data_type, placement, row_stride, kv_layout: None, tensors })
    }
}

fn too_many(count: u64) -> Error {
    Error::out_of_range("num_tensors", count, format_args!("1 to {}", Geometry::MAX_TENSORS))
}

/// Some tensors of a cache: `count` of them from `first` on, each `step` after the one before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorSpan {
    /// Number of the first one.
    pub first: u32,
    /// Distance from one to the next.
    pub step: u32,
    /// How many there are.
    pub count: u32,
}

impl TensorSpan {
    /// Returns one tensor.
    pub fn one(tensor: u32) -> TensorSpan {
        TensorSpan { first: tensor, step: 1, count: 1 }
    }
}

/// Neighbouring tensors of a cache that are equal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EqualTensors {
    /// Number of the first of them.
    pub first: u32,
    /// Their sizes, with the number of tensors of the whole cache.
    pub geometry: Geometry,
    /// The dimensions of one of them, outermost first.
    pub shape: Vec<i64>,
    /// Their element type.
    pub data_type: DataType,
}

/// The checked sizes of a cache whose tensors differ. There is at least one run, and the first one begins with tensor 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixedSizes {
    num_tensors: u32,
    runs: Vec<EqualTensors>,
    bytes: u64,
}

impl MixedSizes {
    /// Maximum number of runs of equal tensors in a cache.
    pub const MAX_RUNS: usize = 4096;

    /// Checks the sizes of `desc`; `None` if it describes equal tensors, which [`Geometry::new`] checks. Returns `Err` of
    /// kind `InvalidArgument` unless every tensor has valid sizes, all have the same number of rows, and there are at
    /// most [`MAX_RUNS`](Self::MAX_RUNS) runs with less than 2^63 bytes in total.
    pub fn of(desc: &CacheDesc) -> Result<Option<Arc<MixedSizes>>> {
        let tensors = &desc.tensors;
        if tensors.is_empty() {
            return Ok(None);
        }
        let count = tensors.iter().map(|tensors| u64::from(tensors.count)).sum::<u64>();
        ensure(count == u64::from(desc.num_tensors), || {
            Error::argument("num_tensors", desc.num_tensors, format_args!("{count}, the tensors described"))
        })?;
        ensure(desc.kv_layout.is_none(), || {
            Error::argument("layout", "a KvLayout", "None, because the tensors of the cache differ")
        })?;
        let mut next = 0;
        let mut before: Option<&TensorDesc> = None;
        let starts = tensors.iter().filter(|described| described.count > 0).filter_map(|described| {
            let (first, joined) = (next, before.is_some_and(|before| before.equals(described)));
            // The sum was compared with a number of 32 bits.
            next += described.count;
            before = Some(described);
            (!joined).then_some((first, described))
        });
        Self::of_runs(desc.num_tensors, starts.map(|(first, tensor)| (first, tensor.clone())))
            .map(|sizes| Some(Arc::new(sizes)))
    }

    /// Returns the sizes of tensor 0 of `desc`, and those of all tensors if they differ. `Err(InvalidArgument)` as
    /// [`Geometry::new`] and [`of`](Self::of).
    pub fn checked(desc: &CacheDesc) -> Result<(Geometry, Option<Arc<MixedSizes>>)> {
        let mixed = Self::of(desc)?;
        let geometry = mixed.as_ref().map_or_else(|| Geometry::new(desc), |mixed| Ok(mixed.first()))?;
        Ok((geometry, mixed))
    }

    /// Checks runs of equal tensors, each given by the number of its first tensor; the counts of the descriptions have no
    /// effect. The numbers must begin with 0, ascend,
    /// and be below `num_tensors`. Otherwise like [`of`](Self::of).
    pub fn of_runs(num_tensors: u32, runs: impl Iterator<Item = (u32, TensorDesc)>) -> Result<MixedSizes> {
        ensure((1..=Geometry::MAX_TENSORS).contains(&num_tensors), || too_many(num_tensors.into()))?;
        let mut checked: Vec<EqualTensors> = Vec::new();
        for (first, tensor) in runs {
            ensure(checked.len() < Self::MAX_RUNS, || {
                let required = format_args!("a list of at most {} runs of equal neighbours", Self::MAX_RUNS);
                Error::argument("tensors", "a longer list", required)
            })?;
            let ascends = checked.last().map_or(first == 0, |last| last.first < first) && first < num_tensors;
            ensure(ascends, || {
                Error::out_of_range(
                    "first tensor of a run",
                    first,
                    format_args!("ascending from 0, below {num_tensors}"),
                )
            })?;
            let of_tensor = |error: Error| error.with("tensor", first);
            let geometry = Geometry::of_tensor(&tensor, num_tensors).map_err(of_tensor)?;
            same_rows(checked.first(), geometry.rows()).map_err(of_tensor)?;
            let TensorDesc { shape, data_type, .. } = tensor;
            let run = EqualTensors { first, geometry, shape, data_type };
            fallible::push(TENSORS, &mut checked, run)?;
        }
        ensure(!checked.is_empty(), || too_many(0))?;
        let mut sizes = MixedSizes { num_tensors, runs: checked, bytes: 0 };
        sizes.bytes = sizes.total_bytes()?;
        Ok(sizes)
    }

    fn total_bytes(&self) -> Result<u64> {
        let mut total = 0u64;
        for (run, count) in self.counted() {
            let bytes = run.geometry.tensor_bytes().checked_mul(count.into());
            let sum = bytes.and_then(|bytes| total.checked_add(bytes));
            total = sum.filter(|&sum| i64::try_from(sum).is_ok()).ok_or_else(|| {
                Error::argument("tensors", "too large", "tensors of less than 2^63 bytes in total")
                    .with("tensor", run.first)
            })?;
        }
        Ok(total)
    }

    /// Returns the runs, each with the number of its tensors.
    pub fn counted(&self) -> impl Iterator<Item = (&EqualTensors, u32)> {
        let ends = self.runs.iter().skip(1).map(|run| run.first).chain([self.num_tensors]);
        self.runs.iter().zip(ends).map(|(run, end)| (run, end - run.first))
    }

    /// Returns the number of tensors.
    pub fn num_tensors(&self) -> u32 {
        self.num_tensors
    }

    /// Returns the runs in the order of their tensors.
    pub fn runs(&self) -> &[EqualTensors] {
        &self.runs
    }

    /// Returns the sizes of tensor 0, with the number of tensors of the whole cache.
    pub fn first(&self) -> Geometry {
        self.run(0).geometry
    }

    /// Returns the bytes of all tensors, gaps between rows included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of the smallest tensor.
    pub fn smallest_tensor(&self) -> u64 {
        self.runs.iter().map(|run| run.geometry.tensor_bytes()).min().unwrap_or(0)
    }

    /// Returns the run of a tensor; the last run if there is no such tensor.
    pub fn run(&self, tensor: u32) -> &EqualTensors {
        &self.runs[self.index(tensor)]
    }

    /// Returns the number of the tensor after the last one of the run of `tensor`.
    pub fn run_end(&self, tensor: u32) -> u32 {
        self.runs.get(self.index(tensor) + 1).map_or(self.num_tensors, |next| next.first)
    }

    /// Returns the sizes that some tensors have in common. `Err(InvalidArgument)` if their rows differ. A peer may ask for
    /// any tensors. If the first one does not exist, the result is the sizes of the last tensor; others are ignored.
    pub fn common(&self, TensorSpan { first, step, count }: TensorSpan) -> Result<Geometry> {
        let geometry = self.run(first).geometry;
        let last = u64::from(first) + u64::from(step) * u64::from(count.saturating_sub(1));
        let mut tensor = u64::from(first);
        while tensor <= last && tensor < u64::from(self.num_tensors) {
            #[expect(clippy::cast_possible_truncation, reason = "below a number of 32 bits")]
            let at = tensor as u32;
            let run = self.run(at);
            ensure(run.geometry == geometry, || {
                Error::invalid("the tensors of a copy plan have different rows")
                    .with("tensors", format_args!("{first} and {at}"))
                    .with(
                        "row_bytes",
                        format_args!("{} and {}", geometry.row_bytes(), run.geometry.row_bytes()),
                    )
            })?;
            // The first of the tensors that lies beyond this run.
            let steps = (u64::from(self.run_end(at)) - tensor).div_ceil(u64::from(step.max(1)));
            tensor += steps * u64::from(step.max(1));
        }
        Ok(geometry)
    }

    fn index(&self, tensor: u32) -> usize {
        self.runs.partition_point(|run| run.first <= tensor).saturating_sub(1)
    }
}

/// Checks that a tensor has as many rows as the first one.
fn same_rows(first: Option<&EqualTensors>, rows: u64) -> Result<()> {
    let expected = first.map_or(rows, |first| first.geometry.rows());
    ensure(rows == expected, || {
        Error::argument("dimension 0", rows, format_args!("{expected}, the number of rows of tensor 0"))
    })
}
