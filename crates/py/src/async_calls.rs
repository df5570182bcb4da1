//! The asynchronous calls of `CacheManager`, and the events of an engine.
//!
//! Arguments are those of the synchronous calls, and are checked in the same order. A call neither waits nor detaches from
//! the interpreter, unless its lists are long.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::Duration;

use llm_datadist_core::bindings::validate;
use llm_datadist_core::{
    CallOptions, ClusterId, DataDist as CoreDataDist, EnsureOptions, Grant, Result, Transfer,
};
use pyo3::prelude::*;

use crate::arguments::{FlagArg, IntArg, TextArg};
use crate::blocks::BlocksArg;
use crate::call_extras::{self, GivenExtras, GrantArg, VerifyArg};
use crate::copy_arguments;
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error::{self, raise};
use crate::grants;
use crate::groups::PartsArg;
use crate::keys::KeyArg;
use crate::layer_task::LayerTaskHandle;
use crate::layer_task_arguments::{self, DestinationsArg};
use crate::links;
use crate::local_cache::CacheArg;
use crate::notify::NotifyArg;
use crate::owners::{self, BlockListsArg, OwnersArg};
use crate::pull_push_arguments::{self, BlocksOptions, LayersArg};
use crate::selection::Selection;
use crate::sub_rows::SubRowArg;
use crate::token_ranges::{RawArg, TokensArg};
use crate::transfer::TransferHandle;

/// Calls with more blocks detach from the interpreter while they start.
const MANY_BLOCKS: usize = 4096;

/// The asynchronous calls of an engine.
#[pyclass(frozen, name = "AsyncCalls", module = "llm_datadist._core")]
pub(crate) struct AsyncMethods {
    native: Py<DataDist>,
}

#[pymethods]
impl AsyncMethods {
    #[new]
    fn new(native: Py<DataDist>) -> Self {
        AsyncMethods { native }
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_cache(
        &self,
        cache_key: KeyArg<'_, '_>,
        cache: CacheArg<'_, '_>,
        batch_index: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let (slot, engine) = ((batch_index, size), self.engine());
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let extras = (notify, verify, layout);
        let pull = pull_push_arguments::pull_cache(engine, (cache_key, cache), slot, layers, extras)?;
        let call = CallOptions { limit: limit(timeout_ms)?, extras: pull.extras, quiet: false };
        self.start(cache.py(), 1, |engine| {
            engine.pull_async(pull.from, &pull.to, pull.rows, pull.layers, call)
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_blocks(
        &self,
        src_cache_key: KeyArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        grant: GrantArg<'_, '_>,
        grant_done: FlagArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let (blocks, engine) = ((src_blocks, dst_blocks), self.engine());
        let options = BlocksOptions {
            layers: (src_layer_range, dst_layer_range, tensor_num_per_layer),
            extras: (notify, verify, layout),
            grant: Some((grant, grant_done)),
            selected: (src_tokens, dst_tokens, part),
        };
        let pull = pull_push_arguments::pull_blocks(engine, (src_cache_key, dst_cache), blocks, options)?;
        let call = CallOptions { limit: limit(timeout_ms)?, extras: pull.extras, quiet: false };
        let count = pull.rows.num_blocks();
        self.start(dst_cache.py(), count, |engine| {
            engine.pull_async(pull.from, &pull.to, pull.rows, pull.layers, call)
        })
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn push_cache(
        &self,
        dst_cache_key: KeyArg<'_, '_>,
        src_cache: CacheArg<'_, '_>,
        src_batch_index: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        size: IntArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let slot = (src_batch_index, size);
        let push = pull_push_arguments::push_cache(self.engine(), (dst_cache_key, src_cache), slot, layers)?;
        let call = options(limit(timeout_ms)?, (notify, verify, layout), false)?;
        let start =
            |engine: &CoreDataDist| engine.push_async(&push.from, push.to, push.rows, push.layers, call);
        self.start(src_cache.py(), 1, start)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn push_blocks(
        &self,
        dst_cache_key: KeyArg<'_, '_>,
        src_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_key, src_cache), (src_blocks, dst_blocks));
        let selected = Selection::of((src_tokens, dst_tokens, part))?;
        let push = pull_push_arguments::push_blocks(self.engine(), ends, blocks, layers, selected)?;
        let call = options(limit(timeout_ms)?, (notify, verify, layout), false)?;
        let count = push.rows.num_blocks();
        let start =
            |engine: &CoreDataDist| engine.push_async(&push.from, push.to, push.rows, push.layers, call);
        self.start(src_cache.py(), count, start)
    }

    /// Pulls one sequence from several owners.
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_owners(
        &self,
        src_cache_keys: OwnersArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_blocks: BlockListsArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        quiet: bool,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        grant: GrantArg<'_, '_>,
        grant_done: FlagArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let options = BlocksOptions {
            layers: (src_layer_range, dst_layer_range, tensor_num_per_layer),
            extras: (notify, verify, layout),
            grant: None,
            selected: (src_tokens, dst_tokens, part),
        };
        let (ends, blocks) = ((src_cache_keys, dst_cache), (src_blocks, dst_blocks));
        let pull = owners::pull(self.engine(), ends, blocks, (grant, grant_done), options)?;
        let call = CallOptions { limit: limit(timeout_ms)?, extras: pull.extras, quiet };
        self.start(dst_cache.py(), usize::MAX, |engine| engine.pull_owners_async(pull.parts, call))
    }

    /// Pushes one sequence to several owners.
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn push_owners(
        &self,
        dst_cache_keys: OwnersArg<'_, '_>,
        src_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlockListsArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        src_tokens: TokensArg<'_, '_>,
        dst_tokens: TokensArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        quiet: bool,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_keys, src_cache), (src_blocks, dst_blocks));
        let selected = Selection::of((src_tokens, dst_tokens, part))?;
        let pushes = owners::push(self.engine(), ends, blocks, layers, &selected)?;
        let call = options(limit(timeout_ms)?, (notify, verify, layout), quiet)?;
        self.start(src_cache.py(), usize::MAX, |engine| engine.push_owners_async(pushes, call))
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_group(
        &self,
        parts: PartsArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        grants_done: FlagArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        quiet: bool,
    ) -> PyResult<Py<TransferHandle>> {
        let pulls = parts.pulls(self.engine(), grants_done.required("grants_done")?)?;
        let call = options(limit(timeout_ms)?, (notify, verify, layout), quiet)?;
        self.start(parts.py(), usize::MAX, |engine| engine.pull_group_async(pulls, call))
    }

    fn push_group(
        &self,
        parts: PartsArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        quiet: bool,
    ) -> PyResult<Py<TransferHandle>> {
        let pushes = parts.pushes(self.engine())?;
        let call = options(limit(timeout_ms)?, (notify, verify, layout), quiet)?;
        self.start(parts.py(), usize::MAX, |engine| engine.push_group_async(pushes, call))
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn copy_cache(
        &self,
        dst: CacheArg<'_, '_>,
        src: CacheArg<'_, '_>,
        dst_batch_index: IntArg<'_, '_>,
        src_batch_index: IntArg<'_, '_>,
        offset: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        req_id: IntArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let numbers = (dst_batch_index, src_batch_index, offset, size);
        let ((to, from), args) = copy_arguments::copy_cache_args(self.engine(), (dst, src), numbers, req_id)?;
        let limit = limit(timeout_ms)?;
        self.start(src.py(), 1, |engine| engine.copy_cache_async(&to, &from, args, limit))
    }

    fn copy_blocks(
        &self,
        cache: CacheArg<'_, '_>,
        copy_block_info: BlocksArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let (end, pairs) = copy_arguments::copy_blocks_args(self.engine(), cache, copy_block_info)?;
        let (limit, part) = (limit(timeout_ms)?, part.part()?);
        self.start(cache.py(), pairs.len(), |engine| engine.copy_sub_rows_async(&end, &pairs, part, limit))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(
        &self,
        src_cache: CacheArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_to_dst: BlocksArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
        part: SubRowArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let engine = self.engine();
        let args = copy_arguments::swap_args(engine, src_cache, dst_cache, src_to_dst);
        let started = args.and_then(|(src, dst, pairs)| {
            let (limit, part) = (limit(timeout_ms)?, part.part()?);
            let start = |engine: &CoreDataDist| engine.swap_sub_rows_async((&src, &dst), &pairs, part, limit);
            self.start(src_cache.py(), pairs.len(), start)
        });
        started.map_err(|error| error::mismatch(src_cache.py(), error))
    }

    fn ensure_link(
        &self,
        address: TextArg<'_, '_>,
        metadata: NotifyArg<'_, '_>,
        cluster_id: IntArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Py<TransferHandle>> {
        let py = address.py();
        let at = links::address(address)?;
        let metadata = metadata.bytes("metadata")?;
        let cluster = cluster_id.optional("cluster_id")?.map(ClusterId);
        let limit = validate::timeout_ms(timeout_ms.int("timeout_ms")?).map_err(|error| raise(py, &error))?;
        let options = EnsureOptions { cluster, metadata };
        self.start(py, 1, |engine| engine.ensure_link(at, limit, options))
    }

    fn begin_layers(
        &self,
        cache: CacheArg<'_, '_>,
        destinations: DestinationsArg<'_, '_>,
        layer_timeout_ms: IntArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
    ) -> PyResult<LayerTaskHandle> {
        let (py, engine) = (cache.py(), self.engine());
        let numbers = (layer_timeout_ms, tensor_num_per_layer);
        let call = layer_task_arguments::begin(engine, cache, destinations, numbers)?;
        let many = call.num_blocks() + call.to.len() > MANY_BLOCKS;
        let begin = |engine: &CoreDataDist| engine.begin_layers(&call.from, call.to, call.patience);
        let task = if many { engine.enter(py, begin) } else { engine.attached(py, begin) };
        LayerTaskHandle::new(py, task?, self.native.get().transfers(), engine.codes())
    }

    /// Returns at most `max_events` events. If that fails, they stay in the queue.
    fn poll(&self, max_events: IntArg<'_, '_>) -> PyResult<Vec<Py<PyAny>>> {
        let (py, most) = (max_events.py(), max_events.int::<u32>("max_events")?);
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let (queue, events) =
            self.engine().attached(py, |engine| Ok((engine.events().clone(), engine.poll(most)?)))?;
        let grant_ended = |grant: &Arc<Grant>, why| grants::ended(py, &self.native, grant, why);
        let handles = self.native.get().transfers();
        let made = handles.events(py, &events, self.engine().codes(), &grant_ended);
        if made.is_err() {
            queue.put_back(events.into_iter());
        }
        made
    }

    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.engine().attached(py, |engine| Ok(engine.events().descriptor()?.as_raw_fd()))
    }

    /// Waits until no asynchronous call runs. Returns whether that is so.
    fn drain(&self, timeout_ms: IntArg<'_, '_>) -> PyResult<bool> {
        let limit = timeout_ms.optional::<u32>("timeout_ms")?;
        let limit = limit.map_or(Duration::MAX, |millis| Duration::from_millis(millis.into()));
        self.engine().enter(timeout_ms.py(), |engine| engine.drain(limit))
    }
}

impl AsyncMethods {
    fn engine(&self) -> &Engine {
        self.native.get().engine()
    }

    fn start(
        &self,
        py: Python<'_>,
        blocks: usize,
        call: impl FnOnce(&CoreDataDist) -> Result<Arc<Transfer>> + Send,
    ) -> PyResult<Py<TransferHandle>> {
        let engine = self.engine();
        let started = if blocks > MANY_BLOCKS { engine.enter(py, call) } else { engine.attached(py, call) };
        let transfer = started?;
        let handle = self.native.get().transfers().of(py, &transfer, engine.codes());
        if handle.is_err() {
            transfer.cancel();
        }
        handle
    }
}

/// Returns the options of a call without a grant of its own.
fn options(limit: Option<Duration>, given: GivenExtras<'_, '_>, quiet: bool) -> PyResult<CallOptions> {
    Ok(CallOptions { limit, extras: call_extras::without_grant(given)?, quiet })
}

/// Returns the time limit of a call in milliseconds; `None` for `sync_kv_timeout`.
fn limit(timeout_ms: IntArg<'_, '_>) -> PyResult<Option<Duration>> {
    let limit = timeout_ms.optional::<u32>("timeout_ms")?;
    let checked =
        limit.map(|millis| validate::timeout_ms(millis).map_err(|error| raise(timeout_ms.py(), &error)));
    checked.transpose()
}
