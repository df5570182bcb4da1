//! Plans calls on caches whose tensors differ: one plan for each run of tensors that are equal on both sides.

use std::sync::Arc;

use smallvec::smallvec;

use super::cache_rules::RemoteCache;
use super::conversion::LocalCache;
use super::copy::CopyArgs;
use super::layer_ranges::TensorRun;
use super::layerwise::{LayerRows, LayerwiseArgs};
use crate::error::{Error, Result, ensure};
use crate::fallible;
use crate::model::{CacheLayout, Geometry, MixedSizes, RowList};
use crate::plan::{CacheCount, CopyPlan, Moves, Plans, REQUEST};

/// Maximum number of pairs of different sizes, of a tensor here and one there, in a call. Each has a plan of its own, with
/// a list of all blocks, and the descriptions of peers decide how many there are.
const MAX_SIZES: usize = 64;

/// The sizes of one side of a call.
#[derive(Clone, Copy)]
pub struct SideSizes<'a> {
    /// Kind and placement, with the sizes of tensor 0.
    layout: CacheLayout,
    mixed: Option<&'a MixedSizes>,
}

impl<'a> SideSizes<'a> {
    /// Returns the sizes of a cache whose `layout` has the sizes of tensor 0; `mixed` has all sizes if its tensors differ.
    pub fn new(layout: CacheLayout, mixed: Option<&'a Arc<MixedSizes>>) -> Self {
        SideSizes { layout, mixed: mixed.map(|mixed| &**mixed) }
    }

    /// Returns the sizes of a tensor.
    fn of(self, tensor: u32) -> Geometry {
        self.mixed.map_or(self.layout.geometry, |mixed| mixed.run(tensor).geometry)
    }

    /// Returns the number of the tensor after the last one that equals `tensor` and follows it.
    fn run_end(self, tensor: u32) -> u32 {
        self.mixed.map_or(self.layout.geometry.num_tensors(), |mixed| mixed.run_end(tensor))
    }

    /// Returns the layout that the cache would have if all its tensors were like `tensor`.
    fn layout_of(self, tensor: u32) -> CacheLayout {
        CacheLayout { geometry: self.of(tensor), ..self.layout }
    }
}

impl<'a> From<&'a LocalCache> for SideSizes<'a> {
    fn from(cache: &'a LocalCache) -> Self {
        SideSizes::new(cache.layout, cache.mixed.as_ref())
    }
}

impl<'a> From<&'a RemoteCache> for SideSizes<'a> {
    fn from(cache: &'a RemoteCache) -> Self {
        SideSizes::new(cache.layout, cache.mixed.as_ref())
    }
}

/// What moves between two caches of which one or both have tensors that differ.
#[derive(Debug, Default)]
pub struct PlannedRuns {
    /// The plans. Those of different tensors may run in any order; within one cache, those of the same tensors run one after
    /// the other ([`CopyPlan::moves_in_order`]).
    pub plans: Vec<CopyPlan>,
    /// Rows of the source cache that are read, if the check of a run returned them.
    pub src_rows: RowList,
    /// Rows of the destination cache that are written, if the check of a run returned them.
    pub dst_rows: RowList,
}

/// Plans with `plan` what `moves` returns for each run of `tensors` that are equal on both sides, given the layouts that the
/// caches would have if all their tensors were like those of the run. An error names the first tensor of the run in the source.
pub(super) fn planned(
    tensors: TensorRun,
    (src, dst): (SideSizes<'_>, SideSizes<'_>),
    mut moves: impl FnMut(CacheLayout, CacheLayout) -> Result<Moves>,
    plan: impl Fn(&mut Moves) -> Result<Plans>,
) -> Result<PlannedRuns> {
    let mut planned = PlannedRuns::default();
    let mut known: Vec<((Geometry, Geometry), Plans)> = Vec::new();
    let mut done = 0;
    while done < tensors.count {
        let at = |first: u64| u32::try_from(first + u64::from(done)).unwrap_or(u32::MAX);
        let (from, to) = (at(tensors.src), at(tensors.dst));
        let room = (src.run_end(from).saturating_sub(from)).min(dst.run_end(to).saturating_sub(to));
        let count = room.clamp(1, tensors.count - done);
        let sizes = (src.of(from), dst.of(to));
        if !known.iter().any(|(known, _)| *known == sizes) {
            ensure(known.len() < MAX_SIZES, || {
                Error::invalid(format!("the tensors of a call have more than {MAX_SIZES} different sizes"))
            })?;
            let named = |error: Error| error.with("tensor", from);
            let mut moves = moves(src.layout_of(from), dst.layout_of(to)).map_err(named)?;
            let plans = plan(&mut moves).map_err(named)?;
            (planned.src_rows, planned.dst_rows) = (moves.src_rows, moves.dst_rows);
            fallible::push(REQUEST, &mut known, (sizes, plans))?;
        }
        let plans = known.iter().filter(|(known, _)| *known == sizes).flat_map(|(_, plans)| plans.iter());
        for plan in plans.filter(|plan| !plan.is_empty()) {
            fallible::push(REQUEST, &mut planned.plans, plan.in_tensors(from, to, count))?;
        }
        done += count;
    }
    Ok(planned)
}

/// Plans a copy or swap between caches of this engine of which one or both have tensors that differ. `check` returns what
/// moves between caches with these layouts. Otherwise like its callers in `copy`.
pub fn local_runs(
    src: SideSizes<'_>,
    dst: SideSizes<'_>,
    caches: CacheCount,
    check: impl FnMut(CacheLayout, CacheLayout) -> Result<Moves>,
) -> Result<PlannedRuns> {
    let count = src.layout.geometry.num_tensors();
    let plan = |moves: &mut Moves| CopyPlan::moves_in_order(moves, caches);
    planned(TensorRun { src: 0, dst: 0, count }, (src, dst), check, plan)
}

/// Plans what a layer-wise transfer moves: `count` tensors, from tensor `src` of the local cache into tensor `dst` of the
/// remote one. One or both caches have tensors that differ. `check` returns what moves between caches with these layouts.
pub fn layer_runs(
    (src, dst, count): (u32, u32, u32),
    (local, remote): (SideSizes<'_>, SideSizes<'_>),
    mut check: impl FnMut(CacheLayout, CacheLayout) -> Result<Moves>,
) -> Result<PlannedRuns> {
    let tensors = TensorRun { src: src.into(), dst: dst.into(), count };
    let moves = |src: CacheLayout, dst: CacheLayout| {
        equal_rows(src.geometry, dst.geometry)?;
        check(src, dst)
    };
    planned(tensors, (local, remote), moves, between_engines)
}

/// Plans moves between caches of two engines.
pub(super) fn between_engines(moves: &mut Moves) -> Result<Plans> {
    Ok(smallvec![CopyPlan::moves(moves)?])
}

/// Checks that blocks that go to an address inside a tensor of a cache whose tensors differ have the size of its blocks.
/// They could otherwise overwrite blocks that the call does not name.
pub fn blocks_of_tensor(rows: &LayerRows, src: Geometry, dst: Geometry) -> Result<()> {
    if let LayerRows::Blocks { .. } = rows { equal_rows(src, dst) } else { Ok(()) }
}

/// Checks that no size of a block was given for a cache whose tensors differ, because it can only be that of one tensor.
pub fn no_block_bytes(args: &LayerwiseArgs) -> Result<()> {
    let given = args.dst_block_bytes.unwrap_or(0);
    ensure(given == 0, || {
        let required = "None or 0 for a source whose tensors differ";
        Error::argument("dst_block_memory_size", given, required)
    })
}

/// Checks that a copy between slots of caches whose rows differ copies whole slots of equal sizes, because an offset or a
/// size would mean something else in each tensor.
pub fn whole_slots(src: CacheLayout, dst: CacheLayout, args: CopyArgs) -> Result<()> {
    ensure((args.offset, args.size) == (0, -1), || part_of_mixed(args.size).with("offset", args.offset))?;
    equal_rows(src.geometry, dst.geometry)
}

/// Checks that rows of a tensor have as many bytes in the source as in the destination.
pub(super) fn equal_rows(src: Geometry, dst: Geometry) -> Result<()> {
    ensure(src.row_bytes() == dst.row_bytes(), || {
        Error::invalid(format!(
            "a row of the tensor has {} bytes in the source cache and {} in the destination cache",
            src.row_bytes(),
            dst.row_bytes()
        ))
    })
}

/// Returns the error for a part of a slot of a cache whose tensors differ.
pub(super) fn part_of_mixed(size: i64) -> Error {
    let text = "caches whose tensors differ move whole slots: size must be -1, and offsets 0";
    Error::invalid(text).with("size", size)
}
