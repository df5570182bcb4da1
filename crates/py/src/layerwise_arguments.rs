//! Conversion of the arguments of `transfer_cache_async`, in the order of the contract (§8.1).
//!
//! The running transfer is in `task`; rules are in `core::validate`.

use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::bindings::{
    CacheLayout, Destination, End, Geometry, LayerRange, Layers, LayerwiseArgs, Target, Words,
};
use llm_datadist_core::{CacheDesc, CacheKind, ClusterId, Error};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::convert::{self, Any, inner_only_support, int};
use crate::engine::Engine;
use crate::error::{invalid, raise};
use crate::keys::{KeyArg, KeyClass};
use crate::local_cache::{CacheArg, CacheWithHandle};
use crate::pull_push_arguments;
use crate::python_types::PythonTypes;

arguments! {
    /// A `LayerSynchronizer`.
    SynchronizerArg;
    /// A list or tuple of the configs of a layer-wise transfer.
    ConfigsArg;
}

/// The checked arguments of a layer-wise transfer.
pub(crate) struct CheckedArguments {
    /// The source cache.
    pub(crate) from: End,
    /// The rows, and the tensors of a layer.
    pub(crate) args: LayerwiseArgs,
    /// The destinations.
    pub(crate) to: Vec<Destination>,
    /// The longest wait for a layer.
    pub(crate) layer_timeout: Option<Duration>,
}

/// The unchecked arguments.
pub(crate) struct RawArguments<'a, 'py> {
    /// The source.
    pub(crate) src_cache: CacheArg<'a, 'py>,
    /// The object that reports when layers are ready.
    pub(crate) layer_synchronizer: SynchronizerArg<'a, 'py>,
    /// The destinations.
    pub(crate) transfer_configs: ConfigsArg<'a, 'py>,
    /// Blocks read, blocks written, and bytes of a block that is written.
    pub(crate) blocks: (BlocksArg<'a, 'py>, BlocksArg<'a, 'py>, IntArg<'a, 'py>),
}

/// Checks the arguments of `transfer_cache_async`. A config without a layer range gets all layers (row 13).
pub(crate) fn transfer(engine: &Engine, given: &RawArguments<'_, '_>) -> PyResult<CheckedArguments> {
    let py = given.src_cache.py();
    let refused = |error: Error| raise(py, &error);
    let src_cache = given.src_cache;
    src_cache.required("src_cache", engine.mode())?;
    let desc = src_cache.desc()?;
    validate::on_device("src_cache", desc.placement).map_err(refused)?;
    let mut args = lists(given.blocks)?;
    validate::block_lists(&args).map_err(refused)?;
    let layer_timeout = given.layer_synchronizer.read(&mut args)?;
    let configs = given.transfer_configs.configs(engine)?;
    validate::block_bytes_alone(&args).map_err(refused)?;
    let source = LayerSource::new(src_cache, &desc, args.tensors_per_layer)?;
    source.lists(&args)?;
    let one = |config: &Any<'_>| source.destination(config, &args, engine);
    let to = configs.iter().map(one).collect::<PyResult<_>>()?;
    Ok(CheckedArguments { from: source.cache.end(engine)?, args, to, layer_timeout })
}

/// The source of a layer-wise transfer.
struct LayerSource<'a, 'py> {
    cache: CacheWithHandle<'a, 'py>,
    local: CacheLayout,
    layers: u32,
    py: Python<'py>,
}

impl<'a, 'py> LayerSource<'a, 'py> {
    /// Row 12: counts the layers of the cache.
    fn new(cache: CacheArg<'a, 'py>, desc: &CacheDesc, tensors_per_layer: u32) -> PyResult<Self> {
        let py = cache.py();
        let refused = |error: Error| raise(py, &error);
        let geometry = Geometry::new(desc).map_err(refused)?;
        let layers = validate::whole_layers(geometry, tensors_per_layer).map_err(refused)?;
        let cache = cache.local("src_cache")?;
        let local = CacheLayout { geometry, kind: cache.kind()?, placement: desc.placement };
        Ok(LayerSource { cache, local, layers, py })
    }

    /// Checks lists against the cache.
    fn lists(&self, args: &LayerwiseArgs) -> PyResult<()> {
        if args.src_blocks.is_empty() && self.local.kind == CacheKind::Batch {
            self.cache.slots_first()?;
        }
        validate::layerwise(self.local, args).map(drop).map_err(|error| raise(self.py, &error))
    }

    /// Rows 13 and 13a: reads a config.
    fn destination(&self, config: &Any<'_>, args: &LayerwiseArgs, engine: &Engine) -> PyResult<Destination> {
        let to = destination(config, self.layers, engine.one_sided())?;
        validate::destination(self.local, args, &to).map_err(|error| raise(self.py, &error))?;
        Ok(to)
    }
}

/// Rows 3 to 5.
fn lists(
    (src, dst, dst_bytes): (BlocksArg<'_, '_>, BlocksArg<'_, '_>, IntArg<'_, '_>),
) -> PyResult<LayerwiseArgs> {
    let dst_blocks = dst.unsigned("dst_block_indices")?;
    let src_blocks = src.unsigned("src_block_indices")?;
    let dst_block_bytes = dst_bytes.optional("dst_block_memory_size")?;
    Ok(LayerwiseArgs { src_blocks, dst_blocks, dst_block_bytes, tensors_per_layer: 0 })
}

impl SynchronizerArg<'_, '_> {
    /// Checks row 9, and reads the attributes: the tensors of a layer, into `args`, and the time limit of a layer.
    fn read(self, args: &mut LayerwiseArgs) -> PyResult<Option<Duration>> {
        let py = self.py();
        let class = &PythonTypes::get(py)?.layer_synchronizer;
        convert::required("layer_synchronizer", &self.0, class, "LayerSynchronizer")?;
        let name = "tensor_num_per_layer";
        args.tensors_per_layer = int(name, &self.0.getattr(intern!(py, "tensor_num_per_layer"))?)?;
        validate::tensors_per_layer(Words::ORIGINAL, args.tensors_per_layer)
            .map_err(|error| raise(py, &error))?;
        let name = "timeout_in_millis";
        match convert::optional_int::<u32>(name, &self.0.getattr(intern!(py, "timeout_in_millis"))?)? {
            Some(0) => Err(invalid(py, name, 0, "None, or above 0, in milliseconds")),
            millis => Ok(millis.map(|millis| Duration::from_millis(millis.into()))),
        }
    }
}

impl<'py> ConfigsArg<'_, 'py> {
    /// Row 10: the configs, each of the class of the engine's mode.
    fn configs(self, engine: &Engine) -> PyResult<Vec<Any<'py>>> {
        let configs = convert::listed("transfer_configs", &self.0, raise)?;
        let types = PythonTypes::get(self.py())?;
        let (class, allowed) = if engine.one_sided() {
            (&types.transfer_key_config, "['TransferWithCacheKeyConfig']")
        } else {
            (&types.transfer_config, "['TransferConfig']")
        };
        for (at, config) in configs.iter().enumerate() {
            if !convert::instance(config, class)? {
                return Err(inner_only_support("transfer_configs", at, allowed, config));
            }
        }
        Ok(configs)
    }
}

/// Reads a config.
fn destination(config: &Any<'_>, layers: u32, keyed: bool) -> PyResult<Destination> {
    let py = config.py();
    let range = intern!(py, "_src_layer_range");
    if config.getattr(range)?.is_none() {
        config.setattr(range, PyRange::new(py, 0, layers.try_into()?)?)?;
    }
    let src_layers = pull_push_arguments::push_range("src_layer_range", &config.getattr(range)?)?;
    let src_row = int("src_batch_index", &config.getattr(intern!(py, "_src_batch_index"))?)?;
    let (cluster, target) = if keyed { keyed_target(config, src_layers)? } else { addresses(config)? };
    Ok(Destination { cluster, target, src_layers, src_row })
}

/// Reads a `TransferConfig`.
fn addresses(config: &Any<'_>) -> PyResult<(ClusterId, Target)> {
    let py = config.py();
    let cluster = int("dst_cluster_id", &config.getattr(intern!(py, "_dst_cluster_id"))?)?;
    let addrs = convert::numbers("dst_addrs", &config.getattr(intern!(py, "_dst_addrs"))?)?;
    Ok((ClusterId(cluster), Target::Addresses(addrs)))
}

/// Reads a `TransferWithCacheKeyConfig`, which writes as many layers as it reads.
fn keyed_target(config: &Any<'_>, src: LayerRange) -> PyResult<(ClusterId, Target)> {
    let py = config.py();
    let range = config.getattr(intern!(py, "_dst_layer_range"))?;
    if range.is_none() {
        return Err(invalid(py, "dst_layer_range", "None", "as many layers as src_layer_range"));
    }
    let dst = pull_push_arguments::push_range("dst_layer_range", &range)?;
    let both = Layers { src: Some(src), dst: Some(dst), tensors_per_layer: 1 };
    validate::push_spans(Words::ORIGINAL, both).map_err(|error| raise(py, &error))?;
    let key = config.getattr(intern!(py, "_cache_key"))?;
    let key: KeyArg<'_, '_> = key.extract()?;
    let to = key.of("cache_key", &[KeyClass::Blocks, KeyClass::Row])?.name()?;
    Ok((to.cluster, Target::Cache { name: to.name.into(), first_layer: Some(dst.first) }))
}
