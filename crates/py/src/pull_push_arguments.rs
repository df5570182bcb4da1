//! Conversion of the arguments of pulls and pushes, in the order of the contract (§7.12 to §7.15).
//!
//! Rules that need a cache or a peer are in `core::validate`.

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{End, LayerRange, Layers, Mode, RemoteName, Rows, Words};
use llm_datadist_core::{Error, ErrorKind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyRangeMethods, PyString};

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::convert::{Any, int, only_support, shown};
use crate::engine::Engine;
use crate::error::{invalid, raise};
use crate::keys::{KeyArg, KeyClass};
use crate::local_cache::CacheArg;

arguments! {
    /// A range of layers, or `None`.
    LayersArg;
}

/// The checked arguments of a pull or push.
pub(crate) struct PeerRows {
    /// The cache of the peer.
    pub(crate) remote: RemoteName,
    /// The cache of this engine.
    pub(crate) local: End,
    /// The rows of both.
    pub(crate) rows: Rows,
    /// The layers of both.
    pub(crate) layers: Layers,
}

/// The unchecked arguments of a call that choose layers: of the source, of the destination, and tensors per layer.
pub(crate) type GivenLayers<'a, 'py> = (LayersArg<'a, 'py>, LayersArg<'a, 'py>, IntArg<'a, 'py>);

/// Checks the arguments of `pull_cache` (contract §7.12).
pub(crate) fn pull_cache(
    engine: &Engine,
    (cache_key, cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (batch_index, size): (IntArg<'_, '_>, IntArg<'_, '_>),
    given: GivenLayers<'_, '_>,
) -> PyResult<PeerRows> {
    let allowed: &[KeyClass] =
        if engine.one_sided() { &[KeyClass::Row] } else { &[KeyClass::Cache, KeyClass::Row] };
    let key = cache_key.of("cache_key", allowed)?;
    cache.typed("cache")?;
    let (row, size) = (batch_index.int("batch_index")?, size.int("size")?);
    let local = cache.slots("cache")?;
    validate::copy_size(size).map_err(|error| raise(cache.py(), &error))?;
    let per_layer = per_layer(given.2)?;
    key.check_ids()?;
    let layers = pull_layers(given, per_layer)?;
    Ok(PeerRows { remote: key.name()?, local: local.end(engine)?, rows: Rows::slot(row, size), layers })
}

/// Checks the arguments of `pull_blocks` (contract §7.13).
pub(crate) fn pull_blocks(
    engine: &Engine,
    (src_cache_key, dst_cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (src_blocks, dst_blocks): (BlocksArg<'_, '_>, BlocksArg<'_, '_>),
    given: GivenLayers<'_, '_>,
) -> PyResult<PeerRows> {
    let allowed = [KeyClass::Blocks, KeyClass::Cache, KeyClass::Row];
    let key = src_cache_key.of("src_cache_key", &allowed)?;
    dst_cache.typed("dst_cache")?;
    let remote = src_blocks.listed_or_none("src_blocks")?;
    let local = dst_blocks.listed_or_none("dst_blocks")?;
    let cache = dst_cache.blocks("dst_cache")?;
    let local = at_least_one("dst_blocks", local, dst_blocks)?;
    let per_layer = per_layer(given.2)?;
    let rows = if key.is(KeyClass::Blocks) {
        Rows::Blocks { remote: at_least_one("src_blocks", remote, src_blocks)?, local }
    } else {
        no_blocks(remote, src_blocks)?;
        key.check_ids()?;
        Rows::SlotToBlocks { local }
    };
    let layers = pull_layers(given, per_layer)?;
    Ok(PeerRows { remote: key.name()?, local: cache.end(engine)?, rows, layers })
}

/// Checks the arguments of `push_cache` (contract §7.14).
pub(crate) fn push_cache(
    engine: &Engine,
    (dst_cache_key, src_cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (src_batch_index, size): (IntArg<'_, '_>, IntArg<'_, '_>),
    layers: GivenLayers<'_, '_>,
) -> PyResult<PeerRows> {
    one_sided(src_cache.py(), engine, "push_cache")?;
    let key = dst_cache_key.required("dst_cache_key", &[KeyClass::Row])?;
    src_cache.required("src_cache", Mode::CacheManager)?;
    let rows = Rows::slot(src_batch_index.int("src_batch_index")?, -1);
    let local = src_cache.slots("src_cache")?;
    let layers = push_layers(layers)?;
    validate::push_size(size.int("size")?).map_err(|error| raise(src_cache.py(), &error))?;
    Ok(PeerRows { local: local.end(engine)?, remote: key.name()?, rows, layers })
}

/// Checks the arguments of `push_blocks` (contract §7.15).
pub(crate) fn push_blocks(
    engine: &Engine,
    (dst_cache_key, src_cache): (KeyArg<'_, '_>, CacheArg<'_, '_>),
    (src_blocks, dst_blocks): (BlocksArg<'_, '_>, BlocksArg<'_, '_>),
    layers: GivenLayers<'_, '_>,
) -> PyResult<PeerRows> {
    one_sided(src_cache.py(), engine, "push_blocks")?;
    let key = dst_cache_key.of("dst_cache_key", &[KeyClass::Blocks])?;
    src_cache.typed("src_cache")?;
    let local = src_blocks.listed_or_none("src_blocks")?;
    let remote = dst_blocks.listed_or_none("dst_blocks")?;
    let cache = src_cache.blocks("src_cache")?;
    let remote = at_least_one("dst_blocks", remote, dst_blocks)?;
    let layers = push_layers(layers)?;
    let name = key.name()?;
    let rows = Rows::Blocks { remote, local: listed("src_blocks", local, src_blocks)? };
    Ok(PeerRows { local: cache.end(engine)?, remote: name, rows, layers })
}

/// Refuses a push unless transfers are one-sided.
fn one_sided(py: Python<'_>, engine: &Engine, call: &str) -> PyResult<()> {
    if engine.one_sided() {
        return Ok(());
    }
    let text = format!("{call} needs llm.EnableRemoteCacheAccessible=1");
    Err(raise(py, &Error::new(ErrorKind::InvalidArgument, text)))
}

/// Returns the list, which must not be `None`.
fn listed(name: &str, blocks: Option<Vec<i64>>, value: BlocksArg<'_, '_>) -> PyResult<Vec<i64>> {
    blocks.ok_or_else(|| value.not_listed(name))
}

fn at_least_one(name: &str, blocks: Option<Vec<i64>>, value: BlocksArg<'_, '_>) -> PyResult<Vec<i64>> {
    let blocks = listed(name, blocks, value)?;
    validate::not_empty(name, &blocks).map_err(|error| raise(value.py(), &error))?;
    Ok(blocks)
}

/// A key that names a batch slot allows no remote blocks.
fn no_blocks(blocks: Option<Vec<i64>>, value: BlocksArg<'_, '_>) -> PyResult<()> {
    match listed("src_blocks", blocks, value)?.len() {
        0 => Ok(()),
        count => Err(invalid(value.py(), "len(src_blocks)", count, "0 unless the key is a BlocksCacheKey")),
    }
}

/// Returns the layers of a pull. An empty range means all layers.
pub(crate) fn pull_layers((src, dst, _): GivenLayers<'_, '_>, tensors_per_layer: u32) -> PyResult<Layers> {
    let (src, dst) = (src.pulled("src_layer_range")?, dst.pulled("dst_layer_range")?);
    Ok(Layers { src, dst, tensors_per_layer })
}

/// Returns the layers of a push: both ranges or none, of the same length, and not empty.
fn push_layers((src, dst, given): GivenLayers<'_, '_>) -> PyResult<Layers> {
    let tensors_per_layer = per_layer(given)?;
    let (src, dst) = (src.pushed("src_layer_range")?, dst.pushed("dst_layer_range")?);
    let layers = Layers { src, dst, tensors_per_layer };
    validate::push_spans(Words::ORIGINAL, layers).map_err(|error| raise(given.py(), &error))?;
    Ok(layers)
}

/// Reads how many tensors a layer has.
pub(crate) fn per_layer(given: IntArg<'_, '_>) -> PyResult<u32> {
    let count = given.int("tensor_num_per_layer")?;
    validate::tensors_per_layer(Words::ORIGINAL, count).map_err(|error| raise(given.py(), &error))?;
    Ok(count)
}

impl LayersArg<'_, '_> {
    /// The layers of a pull, or `None`.
    fn pulled(self, name: &str) -> PyResult<Option<LayerRange>> {
        if self.0.is_none() { Ok(None) } else { pull_range(name, &self.0).map(Some) }
    }

    /// The layers of a push, or `None`.
    fn pushed(self, name: &str) -> PyResult<Option<LayerRange>> {
        if self.0.is_none() { Ok(None) } else { push_range(name, &self.0).map(Some) }
    }
}

/// Returns the ends of a `range` of step 1 if they fit 32 bits: the usual case, which needs no more checks.
fn ends(range: &Bound<'_, PyRange>) -> Option<LayerRange> {
    if range.step().ok()? != 1 {
        return None;
    }
    let (first, end) = (range.start().ok()?, range.stop().ok()?);
    Some(LayerRange { first: u32::try_from(first).ok()?, end: u32::try_from(end).ok()? })
}

fn as_range<'a, 'py>(name: &str, value: &'a Any<'py>) -> PyResult<&'a Bound<'py, PyRange>> {
    value.cast::<PyRange>().map_err(|_| only_support(name, "['range']", value))
}

/// Checks that the range has step 1 and starts at 0 or above.
fn check_range(name: &str, range: &Bound<'_, PyRange>) -> PyResult<()> {
    let py = range.py();
    // A step that does not fit 64 bits is not 1. Of the start, only the sign counts here.
    if range.step().ok() != Some(1) {
        return Err(invalid(py, name, shown(range), "a range of step 1"));
    }
    if range.getattr(intern!(py, "start"))?.lt(0)? {
        return Err(invalid(py, name, shown(range), "a range from 0 or above"));
    }
    Ok(())
}

/// Reads the layers of a pull (contract §7.12): both ends must fit 32 bits, and the range may be empty.
fn pull_range(name: &str, value: &Any<'_>) -> PyResult<LayerRange> {
    let range = as_range(name, value)?;
    if let Some(layers) = ends(range) {
        return Ok(layers);
    }
    check_range(name, range)?;
    let end = |which: &Bound<'_, PyString>| int(name, &range.getattr(which)?);
    Ok(LayerRange { first: end(intern!(value.py(), "start"))?, end: end(intern!(value.py(), "stop"))? })
}

/// Reads the layers of a push (contract §4.10): at least one.
pub(crate) fn push_range(name: &str, value: &Any<'_>) -> PyResult<LayerRange> {
    let range = as_range(name, value)?;
    match ends(range) {
        Some(layers) if layers.end > layers.first => Ok(layers),
        _ => {
            check_layers(name, range)?;
            Err(invalid(value.py(), name, shown(value), "layers below 2^32"))
        }
    }
}

/// Checks the range as [`check_range`] does, and that it has a layer.
fn check_layers(name: &str, range: &Bound<'_, PyRange>) -> PyResult<()> {
    check_range(name, range)?;
    if range.is_truthy()? {
        Ok(())
    } else {
        Err(invalid(range.py(), name, shown(range), "a range of at least one layer"))
    }
}

/// Checks a range of layers, or `None` where that is allowed (contract §4.10).
pub(crate) fn check_layer_range(name: &str, value: &Any<'_>, allow_none: bool) -> PyResult<()> {
    if value.is_none() && allow_none { Ok(()) } else { check_layers(name, as_range(name, value)?) }
}
