//! Conversion of the arguments of `begin_layers`. Each destination is checked as `transfer_cache_async` checks its arguments.

use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{End, LayerReceiver, LayerwiseArgs, Words};
use pyo3::intern;
use pyo3::prelude::*;

use crate::arguments::IntArg;
use crate::blocks::BlocksArg;
use crate::convert::{self, Any, inner_only_support, only_support, optional_int};
use crate::engine::Engine;
use crate::error::{invalid, of_item, raise};
use crate::layerwise_arguments::{self, LayerSource};
use crate::local_cache::CacheArg;
use crate::python_types::PythonTypes;

/// Name of the list of destinations.
const DESTINATIONS: &str = "destinations";

arguments! {
    /// A list or tuple of `LayerDestination`.
    DestinationsArg;
}

/// The checked arguments of `begin_layers`.
pub(crate) struct LayerCall {
    /// The source cache.
    pub(crate) from: End,
    /// The destinations.
    pub(crate) to: Vec<LayerReceiver>,
    /// The longest wait for a layer.
    pub(crate) layer_timeout: Option<Duration>,
}

impl LayerCall {
    /// Returns the number of blocks in all lists.
    pub(crate) fn num_blocks(&self) -> usize {
        self.to.iter().map(|to| to.args.src_blocks.len() + to.args.dst_blocks.len()).sum()
    }
}

/// Checks the arguments of `begin_layers`.
pub(crate) fn begin(
    engine: &Engine,
    cache: CacheArg<'_, '_>,
    destinations: DestinationsArg<'_, '_>,
    (layer_timeout_ms, tensor_num_per_layer): (IntArg<'_, '_>, IntArg<'_, '_>),
) -> PyResult<LayerCall> {
    let py = cache.py();
    let desc = layerwise_arguments::on_device("cache", engine, cache)?;
    let layer_timeout = layer_timeout(layer_timeout_ms)?;
    let tensors_per_layer = tensor_num_per_layer.int("tensor_num_per_layer")?;
    let items = destinations.items()?;
    validate::tensors_per_layer(Words::ORIGINAL, tensors_per_layer).map_err(|error| raise(py, &error))?;
    let source = LayerSource::new(cache, &desc, tensors_per_layer)?;
    let mut to = convert::room(py, items.len())?;
    for (index, item) in items.iter().enumerate() {
        let one = receiver(item, &source, tensors_per_layer, engine);
        to.push(one.map_err(|error| of_item(py, DESTINATIONS, index, error))?);
    }
    Ok(LayerCall { from: source.cache.end(engine)?, to, layer_timeout })
}

impl<'py> DestinationsArg<'_, 'py> {
    fn items(self) -> PyResult<Vec<Any<'py>>> {
        let (py, items) = (self.py(), convert::listed(DESTINATIONS, &self.0)?);
        if items.is_empty() {
            return Err(invalid(py, "len(destinations)", 0, "at least 1"));
        }
        let class = &PythonTypes::get(py)?.layer_destination;
        for (at, item) in items.iter().enumerate() {
            if !convert::instance(item, class)? {
                return Err(inner_only_support(DESTINATIONS, at, "['LayerDestination']", item));
            }
        }
        Ok(items)
    }
}

fn receiver(
    item: &Any<'_>,
    source: &LayerSource<'_, '_>,
    tensors_per_layer: u32,
    engine: &Engine,
) -> PyResult<LayerReceiver> {
    let py = item.py();
    let (src, dst) = (item.getattr(intern!(py, "src_blocks"))?, item.getattr(intern!(py, "dst_blocks"))?);
    let dst_block_bytes =
        optional_int("dst_block_memory_size", &item.getattr(intern!(py, "dst_block_memory_size"))?)?;
    let (src, dst) = (BlocksArg::extract(src.as_borrowed())?, BlocksArg::extract(dst.as_borrowed())?);
    let dst_blocks = dst.unsigned("dst_blocks")?;
    let src_blocks = src.unsigned("src_blocks")?;
    let args = LayerwiseArgs { src_blocks, dst_blocks, dst_block_bytes, tensors_per_layer };
    let config = item.getattr(intern!(py, "config"))?;
    validate::block_lists(&args).map_err(|error| raise(py, &error))?;
    let wrong = |allowed: &str| only_support("config of destinations inner type", allowed, &config);
    layerwise_arguments::checked_config(&config, engine, wrong)?;
    source.lists(&args)?;
    let to = source.destination(&config, &args, engine)?;
    Ok(LayerReceiver { to, args })
}

fn layer_timeout(layer_timeout_ms: IntArg<'_, '_>) -> PyResult<Option<Duration>> {
    const NAME: &str = "layer_timeout_ms";
    match layer_timeout_ms.optional::<u32>(NAME)? {
        Some(0) => Err(invalid(layer_timeout_ms.py(), NAME, 0, "None, or 1 to 4294967295, in milliseconds")),
        millis => Ok(millis.map(|millis| Duration::from_millis(millis.into()))),
    }
}
