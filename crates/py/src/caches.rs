//! The calls of `CacheManager`: types and order of checks (contract §7).
//!
//! A call that moves bytes is one method, which waits for it or starts it. Both check the arguments in the same order. A call that
//! is started neither waits nor detaches from the interpreter, unless its lists are long.

use std::time::Duration;

use llm_datadist_core::{CacheId, CacheKind, CallExtras, DataDist as CoreDataDist, Operation};
use pyo3::prelude::*;

use crate::arguments::{AddressesArg, DescArg, FlagArg, IntArg};
use crate::blocks::BlocksArg;
use crate::cache::ManagedCache;
use crate::call_extras::{self, GrantArg, VerifyArg};
use crate::copy_arguments;
use crate::datadist::DataDist;
use crate::engine::Engine;
use crate::error;
use crate::groups::PartsArg;
use crate::keys::{KeyArg, KeysArg};
use crate::local_cache::CacheArg;
use crate::log;
use crate::notify::NotifyArg;
use crate::owners::{self, BlockListsArg, OwnersArg};
use crate::pull_push_arguments::{self, BlocksOptions, LayersArg, Pull, Push};
use crate::selection::Selection;
use crate::sub_rows::SubRowArg;
use crate::token_ranges::{RawArg, TokensArg};
use crate::transfer::TransferHandle;

/// The caches of an engine as a `CacheManager` names them.
#[pyclass(frozen, module = "llm_datadist._core")]
pub(crate) struct CacheCalls {
    native: Py<DataDist>,
    /// Whether its calls that move bytes are started. Otherwise they return once the bytes are in place.
    starts: bool,
}

#[pymethods]
impl CacheCalls {
    #[new]
    fn new(native: Py<DataDist>, starts: bool) -> Self {
        CacheCalls { native, starts }
    }

    fn allocate_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        contiguous: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let keys = cache_keys.keys()?;
        self.engine().allocate(cache_desc, CacheKind::Batch, &keys, contiguous.required("contiguous")?)
    }

    fn allocate_blocks_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        blocks_cache_key: KeyArg<'_, '_>,
        contiguous: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let key = blocks_cache_key.blocks_cache_key()?.map(Some);
        let contiguous = contiguous.required("contiguous")?;
        self.engine().allocate(cache_desc, CacheKind::Blocks, key.as_slice(), contiguous)
    }

    fn deallocate_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.batch("cache")?.id(self.engine())?;
        self.engine().deallocate(cache.py(), id)
    }

    fn deallocate_blocks_cache(&self, cache: CacheArg<'_, '_>) -> PyResult<()> {
        cache.typed("cache")?;
        let id = cache.blocks("cache")?.id(self.engine())?;
        self.engine().deallocate(cache.py(), id)
    }

    fn register_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        addrs: AddressesArg<'_, '_>,
        cache_keys: KeysArg<'_, '_>,
        remote_accessible: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let addrs = addrs.addresses("addrs")?;
        let keys = cache_keys.keys()?;
        let access = remote_accessible.optional("remote_accessible")?;
        self.engine().register(cache_desc, CacheKind::Batch, &addrs, &keys, access)
    }

    fn register_blocks_cache(
        &self,
        cache_desc: DescArg<'_, '_>,
        addrs: AddressesArg<'_, '_>,
        blocks_cache_key: KeyArg<'_, '_>,
        remote_accessible: FlagArg<'_, '_>,
    ) -> PyResult<ManagedCache> {
        cache_desc.typed()?;
        let addrs = addrs.addresses("addrs")?;
        let key = blocks_cache_key.blocks_cache_key()?;
        let access = remote_accessible.optional("remote_accessible")?;
        self.engine().register(cache_desc, CacheKind::Blocks, &addrs, key.map(Some).as_slice(), access)
    }

    fn unregister_cache(&self, cache_id: IntArg<'_, '_>) -> PyResult<()> {
        let id = CacheId(cache_id.int("cache_id")?);
        self.engine().enter(cache_id.py(), |engine| engine.unregister(id))
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_cache(
        &self,
        cache_key: KeyArg<'_, '_>,
        cache: CacheArg<'_, '_>,
        batch_index: IntArg<'_, '_>,
        size: IntArg<'_, '_>,
        src_layer_range: LayersArg<'_, '_>,
        dst_layer_range: LayersArg<'_, '_>,
        tensor_num_per_layer: IntArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let (ends, slot) = ((cache_key, cache), (batch_index, size));
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let extras = (notify, verify, layout);
        let pull = pull_push_arguments::pull_cache(self.engine(), ends, slot, layers, extras)?;
        self.pull(cache.py(), pull, timeout_ms)
    }

    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_blocks(
        &self,
        src_cache_key: KeyArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_blocks: BlocksArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
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
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let options = BlocksOptions {
            layers: (src_layer_range, dst_layer_range, tensor_num_per_layer),
            extras: (notify, verify, layout),
            grant: Some((grant, grant_done)),
            selected: (src_tokens, dst_tokens, part),
        };
        let (ends, blocks) = ((src_cache_key, dst_cache), (src_blocks, dst_blocks));
        let pull = pull_push_arguments::pull_blocks(self.engine(), ends, blocks, options)?;
        self.pull(dst_cache.py(), pull, timeout_ms)
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
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, slot) = ((dst_cache_key, src_cache), (src_batch_index, size));
        let push = pull_push_arguments::push_cache(self.engine(), ends, slot, layers)?;
        self.push(src_cache.py(), push, call_extras::limited(timeout_ms, (notify, verify, layout))?)
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
        part: SubRowArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_key, src_cache), (src_blocks, dst_blocks));
        let selected = Selection::of((src_tokens, dst_tokens, part))?;
        let push = pull_push_arguments::push_blocks(self.engine(), ends, blocks, layers, selected)?;
        self.push(src_cache.py(), push, call_extras::limited(timeout_ms, (notify, verify, layout))?)
    }

    /// Pulls one sequence from several owners.
    #[expect(clippy::too_many_arguments, reason = "the parameters of the public method, in its order")]
    fn pull_owners(
        &self,
        src_cache_keys: OwnersArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_blocks: BlockListsArg<'_, '_>,
        dst_blocks: BlocksArg<'_, '_>,
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
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let options = BlocksOptions {
            layers: (src_layer_range, dst_layer_range, tensor_num_per_layer),
            extras: (notify, verify, layout),
            grant: None,
            selected: (src_tokens, dst_tokens, part),
        };
        let (ends, blocks) = ((src_cache_keys, dst_cache), (src_blocks, dst_blocks));
        let pull = owners::pull(self.engine(), ends, blocks, (grant, grant_done), options)?;
        let limit = call_extras::limit(timeout_ms)?;
        self.end(dst_cache.py(), usize::MAX, limit, |engine| engine.pull_owners(pull.parts, pull.extras))
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
        part: SubRowArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let layers = (src_layer_range, dst_layer_range, tensor_num_per_layer);
        let (ends, blocks) = ((dst_cache_keys, src_cache), (src_blocks, dst_blocks));
        let selected = Selection::of((src_tokens, dst_tokens, part))?;
        let pushes = owners::push(self.engine(), ends, blocks, layers, &selected)?;
        let (limit, extras) = call_extras::limited(timeout_ms, (notify, verify, layout))?;
        self.end(src_cache.py(), usize::MAX, limit, |engine| engine.push_owners(pushes, extras))
    }

    fn pull_group(
        &self,
        parts: PartsArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        grants_done: FlagArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let pulls = parts.pulls(self.engine(), grants_done.required("grants_done")?)?;
        let (limit, extras) = call_extras::limited(timeout_ms, (notify, verify, layout))?;
        self.end(parts.py(), usize::MAX, limit, |engine| engine.pull_group(pulls, extras))
    }

    fn push_group(
        &self,
        parts: PartsArg<'_, '_>,
        notify: NotifyArg<'_, '_>,
        verify: VerifyArg<'_, '_>,
        layout: RawArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let pushes = parts.pushes(self.engine())?;
        let (limit, extras) = call_extras::limited(timeout_ms, (notify, verify, layout))?;
        self.end(parts.py(), usize::MAX, limit, |engine| engine.push_group(pushes, extras))
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
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let numbers = (dst_batch_index, src_batch_index, offset, size);
        let ((to, from), args) = copy_arguments::copy_cache_args(self.engine(), (dst, src), numbers, req_id)?;
        let (request, limit) = (req_id.optional::<u64>("req_id")?, call_extras::limit(timeout_ms)?);
        self.end(src.py(), 1, limit, |engine| engine.copy_cache(&to, &from, args).with("req_id", request))
    }

    fn copy_blocks(
        &self,
        cache: CacheArg<'_, '_>,
        copy_block_info: BlocksArg<'_, '_>,
        part: SubRowArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let (end, pairs) = copy_arguments::copy_blocks_args(self.engine(), cache, copy_block_info)?;
        let (limit, part) = (call_extras::limit(timeout_ms)?, part.part()?);
        self.end(cache.py(), pairs.len(), limit, |engine| engine.copy_sub_rows(&end, &pairs, part))
    }

    /// Every argument error of a swap is a `ValueError` as well.
    fn swap_blocks(
        &self,
        src_cache: CacheArg<'_, '_>,
        dst_cache: CacheArg<'_, '_>,
        src_to_dst: BlocksArg<'_, '_>,
        part: SubRowArg<'_, '_>,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let args = copy_arguments::swap_args(self.engine(), src_cache, dst_cache, src_to_dst);
        let swapped = args.and_then(|(src, dst, pairs)| {
            let (limit, part) = (call_extras::limit(timeout_ms)?, part.part()?);
            self.end(src_cache.py(), pairs.len(), limit, |engine| {
                engine.swap_sub_rows(&src, &dst, &pairs, part)
            })
        });
        swapped.map_err(|error| error::mismatch(src_cache.py(), error))
    }
}

impl CacheCalls {
    fn engine(&self) -> &Engine {
        self.native.get().engine()
    }

    fn pull(
        &self,
        py: Python<'_>,
        pull: Pull,
        timeout_ms: IntArg<'_, '_>,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let (limit, blocks) = (call_extras::limit(timeout_ms)?, pull.rows.num_blocks());
        let Pull { from, to, rows, layers, extras } = pull;
        let ended = self.end(py, blocks, limit, |engine| engine.pull_with(from, &to, rows, layers, extras));
        self.reported(py, ended)
    }

    fn push(
        &self,
        py: Python<'_>,
        push: Push,
        (limit, extras): (Option<Duration>, CallExtras),
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let Push { from, to, rows, layers } = push;
        let blocks = rows.num_blocks();
        let ended = self.end(py, blocks, limit, |engine| engine.push_with(&from, to, rows, layers, extras));
        self.reported(py, ended)
    }

    /// Passes the engine's log lines to Python if a pull or push has failed that was waited for.
    fn reported<T>(&self, py: Python<'_>, ended: PyResult<T>) -> PyResult<T> {
        if self.starts { ended } else { log::after_transfer(py, ended) }
    }

    /// Runs the operation, which moves `blocks` blocks, or starts it and returns its handle.
    fn end(
        &self,
        py: Python<'_>,
        blocks: usize,
        limit: Option<Duration>,
        operation: impl FnOnce(&CoreDataDist) -> Operation<'_> + Send,
    ) -> PyResult<Option<Py<TransferHandle>>> {
        let engine = self.engine();
        if !self.starts {
            return engine.run(py, |engine| operation(engine).within(limit)).map(|()| None);
        }
        let started = engine.start(py, blocks, |engine| operation(engine).within(limit).start())?;
        self.native.get().transfers().started(py, &started, engine.codes()).map(Some)
    }
}
