"""The native module of ``llm_datadist``: the engine and the argument checks. It is private.

Every function raises ``TypeError`` for a wrong type, ``ValueError`` for an integer outside its width, and
``LLMException`` for all other failures. A ``bool`` is not an integer.
"""

from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar, final

from typing_extensions import Self, TypeAlias

from llm_datadist import native as native_api
from llm_datadist.native import TensorView
from llm_datadist.original.configs import LLMClusterInfo, LLMRole
from llm_datadist.original.data_type import DataType
from llm_datadist.original.kv_cache_manager import KvCache
from llm_datadist.original.layerwise import LayerSynchronizer
from llm_datadist.original.status import LLMException, LLMStatusCode
from llm_datadist.original.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.stats import Stats

__all__ = [
    "CacheCalls",
    "DataDist",
    "KvCaches",
    "LooseCache",
    "ManagedCache",
    "TensorView",
    "TransferTask",
    "__version__",
    "abandon_sockets",
    "check_cache_key",
    "check_dict",
    "check_dimensions",
    "check_inner",
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_layer_range",
    "check_list_int32",
    "check_list_int64",
    "check_list_uint64",
    "check_mem_utilization",
    "check_option",
    "check_positive_or_set_default",
    "check_uint8",
    "check_uint16",
    "check_uint32",
    "check_uint64",
    "close_log",
    "hixl",
    "import_numpy",
    "log_after_fork",
    "native",
    "nearest",
    "open_log",
    "options",
    "register_types",
    "take_log",
    "tensor_bytes",
]

_Value = TypeVar("_Value")
_Class: TypeAlias = type[Any] | list[type[Any]] | tuple[type[Any], ...]

__version__: str

hixl: ModuleType
"""The engine of the module ``hixl``. ``llm_datadist.hixl_engine`` has its names and says what they do."""
native: ModuleType
"""The classes of the native API. ``llm_datadist.native`` has them and says what they do."""

def import_numpy(call: str) -> ModuleType:
    """Return numpy for ``call``.

    Raises:
        ImportError: numpy is not installed. The text names the call and says how to install numpy.
    """

def register_types(load: Callable[[], object]) -> None:
    """Register the function that returns the module with the classes of the original's API.

    It is called when a class is first needed. The numbers of the classes must equal those of the engine. A later call
    replaces the classes of an earlier one.
    """

def abandon_sockets() -> None:
    """Close the sockets that a forked child inherited; called in the child after every fork."""

def open_log() -> int:
    """Return a descriptor that is readable while log lines of the engine are queued. The caller closes it."""

def close_log() -> None:
    """Close the other end of the descriptor of ``open_log``, so that its reader reads end-of-file."""

def take_log() -> tuple[int, list[tuple[int, str, str, str, int, str, float]]]:
    """Remove the queued lines. Return how many lines were dropped, and the queued ones, oldest first.

    A line is ``(level, target, text, file, line, thread, time)``, with the level as in ``logging``.
    """

def log_after_fork() -> None:
    """Replace the queue of lines by an empty one; called in a forked child."""

@final
class DataDist:
    """An open engine.

    Every method raises ``LLM_ENGINE_FINALIZED`` after ``close``, and ``LLM_FAILED`` in a process forked after it
    was opened.
    """

    def __new__(cls, role: LLMRole, cluster_id: int, options: dict[str, str]) -> DataDist:
        """Open an engine with its pools and, if the options name an address, a listener.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: an option is not allowed; ``LLM_OUT_OF_MEMORY``: no memory for a pool.
        """

    @property
    def number(self) -> int:
        """The number of the engine. No other engine of this process has the same number, at any time."""

    def close(self) -> None:
        """Close the engine. Calls in progress end normally. Memory stays mapped as long as a view of it exists."""

    def native_engine(self) -> native_api.Engine:
        """Return the engine of the native API over this engine, always the same object."""

    def native_cache(self, cache: Cache) -> native_api.Cache:
        """Return the cache of the native API that a blocks cache of this engine is."""

    def stats(self) -> Stats:
        """Return every counter of the engine."""

    def listening(self) -> str | None:
        """Return the listen address as ``ip:port`` with the bound port; ``None`` without a listener."""

    def link_clusters(
        self,
        clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...],
        timeout: int,
        needs_local: bool,
        one_local: bool,
    ) -> list[LLMStatusCode]:
        """Link to peers within ``timeout`` milliseconds, and return one code for each.

        With ``needs_local``, the call raises if an entry has no local address. With ``one_local``, an entry that does
        not have exactly one local address gets ``LLM_PARAM_INVALID``.
        """

    def unlink_clusters(
        self,
        clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...],
        timeout: int,
        force: bool | None,
        always_force: bool,
        strict: bool,
    ) -> list[LLMStatusCode]:
        """End links, and return one code for each.

        With ``strict``, the code of a cluster that is not linked is ``LLM_NOT_YET_LINK``.
        """

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Enter a communicator and return its number."""

    def unlink(self, comm_id: int) -> None:
        """Leave a communicator."""

    def comm_status(self, comm_id: int) -> int:
        """Return the state of a communicator, as the number of a ``RegisterMemStatus``."""

    def switch_role(self, role: LLMRole, listen: str | None) -> None:
        """Change the role, and listen at ``listen``; ``None`` stops the listener."""

    def check_link(self, remote_cluster_id: int) -> None:
        """Raise unless the peer answers within ``sync_kv_timeout``."""

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key."""

    def transfer_cache_async(
        self,
        src_cache: Cache | KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[Any] | tuple[Any, ...],
        src_block_indices: list[int] | tuple[int, ...] | None,
        dst_block_indices: list[int] | tuple[int, ...] | None,
        dst_block_memory_size: int | None,
    ) -> TransferTask:
        """Start a layer-wise transfer. The caller reports which layers are ready."""

    def tensor_views(self, cache: Cache) -> list[TensorView]:
        """Return a view of every tensor of a cache."""

    def remap(self) -> None:
        """Raise ``LLM_NOT_YET_LINK`` if there is no link and no ``PREPARING`` communicator."""

    def sync_kv_timeout(self) -> int:
        """Return the limit of one call in milliseconds."""

@final
class CacheCalls:
    """The caches of an engine in CacheManager mode. Calls return once the bytes are in place."""

    def __new__(cls, datadist: DataDist) -> Self:
        """Make the object for the engine ``datadist``."""

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...]) -> ManagedCache:
        """Allocate a continuous cache."""

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None) -> ManagedCache:
        """Allocate a blocks cache."""

    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the reference by id of a continuous cache."""

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Release a blocks cache."""

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: list[CacheKey] | tuple[CacheKey, ...],
        remote_accessible: bool | None,
    ) -> ManagedCache:
        """Register memory of the caller as a continuous cache."""

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None,
        remote_accessible: bool | None,
    ) -> ManagedCache:
        """Register memory of the caller as a blocks cache."""

    def unregister_cache(self, cache_id: int) -> None:
        """Remove a registered cache."""

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int,
        size: int,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> None:
        """Read a batch slot of a peer into a local slot."""

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: list[int] | tuple[int, ...],
        dst_blocks: list[int] | tuple[int, ...],
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> None:
        """Read blocks of a peer into local blocks."""

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        size: int,
        tensor_num_per_layer: int,
    ) -> None:
        """Write a batch slot to a peer."""

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: list[int] | tuple[int, ...],
        dst_blocks: list[int] | tuple[int, ...],
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> None:
        """Write blocks to a peer."""

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int,
        src_batch_index: int,
        offset: int,
        size: int,
        req_id: int | None,
    ) -> None:
        """Copy ``size`` bytes of one batch slot in every tensor; -1 copies the rest of the slot."""

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one cache."""

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between host and device."""

@final
class TransferTask:
    """A layer-wise transfer. Dropping this handle ends the configs that wait for a layer."""

    def layers(self) -> list[int]:
        """Return the layers that at least one config needs, in ascending order."""

    def wanted(self, layer: int) -> bool:
        """Return whether an unfinished config needs the layer. If so, the time limit of the layer starts now."""

    def ready(self, layer: int) -> None:
        """Report that this layer is ready. Returns at once."""

    def not_ready(self, layer: int) -> None:
        """Report that neither this layer nor any after it will be ready. Returns at once."""

    def broken(self, layer: int, why: str) -> None:
        """Report that it stays unknown whether this layer and all after it are ready; configs get the timeout code."""

    def cancel(self) -> bool:
        """End the unfinished configs; return whether there were any."""

    def done(self) -> bool:
        """Return whether the transfer has ended."""

    def wait(self, timeout_in_millis: int | None) -> bool:
        """Wait until the transfer has ended or the limit has passed. Return whether it has ended."""

    def results(self) -> list[LLMStatusCode | None]:
        """Return the code of each config; ``None`` for one without a result."""

    def errors(self) -> list[LLMException | None]:
        """Return why each config is unfinished; ``None`` for one that ended with success or was never reached."""

    def progress(self) -> list[tuple[int, int, int]]:
        """Return for each config the layers in place, all of its layers, and the bytes in place."""

    @property
    def timeout_in_millis(self) -> int | None:
        """Time limit for one layer in milliseconds, or ``None``."""

    @property
    def timeout_code(self) -> LLMStatusCode:
        """The code of a wait whose time limit passed."""

@final
class ManagedCache:
    """The reference that a public handle has to a cache of an engine. It does not keep the cache alive."""

    @property
    def cache_id(self) -> int:
        """Its id in the engine that made it."""

    def tensor_addrs(self) -> list[int]:
        """Return the address of each tensor, as a new list."""

@final
class LooseCache:
    """A CPU cache: host memory of the caller, which must stay valid as long as this object exists."""

    def __new__(cls, cache_desc: CacheDesc, addrs: list[int]) -> LooseCache:
        """Check sizes and addresses.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: not one address for each tensor, an address of 0, or an invalid shape.
        """

    def views(self) -> list[TensorView]:
        """Return a view of every tensor.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: the memory is not mapped readable and writable.
        """

@final
class KvCaches:
    """The calls of a ``KvCacheManager``.

    The errors are those of ``DataDist``.
    """

    def __new__(cls, datadist: DataDist) -> KvCaches:
        """Make the object for the engine ``datadist``."""

    def allocate_cache(
        self, desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...], may_name: bool
    ) -> ManagedCache:
        """Allocate a continuous cache. Keys are refused unless ``may_name``."""

    def allocate_blocks_cache(self, desc: CacheDesc, key: BlocksCacheKey | None, may_name: bool) -> ManagedCache:
        """Allocate a blocks cache. A key is refused unless ``may_name``."""

    def deallocate_cache(self, cache: KvCache) -> None:
        """Drop the reference by id of a cache."""

    def release(self, cache: KvCache) -> None:
        """Do the same as ``deallocate_cache`` without checks, for a handle whose class is known."""

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int,
        size: int,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        src_cache_offset: int | None,
        dst_cache_offset: int | None,
    ) -> None:
        """Read a batch slot of a peer into a local slot."""

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> None:
        """Read blocks of a peer into local blocks."""

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int,
        src_batch_index: int,
        offset: int,
        size: int,
        req_id: int | None,
    ) -> None:
        """Copy ``size`` bytes of one batch slot in every tensor; -1 copies the rest of the slot."""

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one cache."""

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between host and device."""

    def tensor_view(self, cache: KvCache, tensor_index: int) -> TensorView:
        """Return a view of one tensor of a cache."""

def check_isinstance(
    arg_name: str,
    arg_value: _Value,
    classes: _Class,
    inner_class: _Class | None = None,
    extra_fmt: str = "",
    allow_none: bool = True,
) -> _Value:
    """Return ``arg_value`` if it is an instance of ``classes``, and its elements of ``inner_class``."""

def check_inner(arg_name: str, arg_value: Iterable[object], inner_class: _Class) -> None:
    """Raise unless every element is an instance of ``inner_class``."""

def check_dict(
    arg_name: str,
    arg_value: Mapping[Any, Any],
    k_class: _Class,
    v_class: _Class,
    v_inner_class: _Class | None = None,
) -> None:
    """Raise unless keys, values and, with ``v_inner_class``, elements of values have these classes."""

def check_uint8(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from 0 to 2^8 - 1."""

def check_uint16(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from 0 to 2^16 - 1."""

def check_uint32(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from 0 to 2^32 - 1."""

def check_uint64(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from 0 to 2^64 - 1."""

def check_int32(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from -2^31 to 2^31 - 1."""

def check_int64(arg_name: str, arg_value: int) -> None:
    """Raise unless the value is an integer from -2^63 to 2^63 - 1."""

def check_list_int32(arg_name: str, arg_values: Iterable[int]) -> None:
    """Raise unless every element is an integer from -2^31 to 2^31 - 1."""

def check_list_int64(arg_name: str, arg_values: Iterable[int]) -> None:
    """Raise unless every element is an integer from -2^63 to 2^63 - 1."""

def check_list_uint64(arg_name: str, arg_values: Iterable[int]) -> None:
    """Raise unless every element is an integer from 0 to 2^64 - 1."""

def check_positive_or_set_default(arg_name: str, arg_value: int | None, default: int = -1) -> int:
    """Return ``default`` for ``None``, else the value, which must be an integer from 0 to 2^63 - 1."""

def check_dimensions(rank: int, batch_dim_index: int, seq_len_dim_index: int) -> None:
    """Raise ``LLM_PARAM_INVALID`` unless the indices are valid for a shape of ``rank`` dimensions."""

def tensor_bytes(shape: list[int] | tuple[int, ...], data_type: DataType) -> int:
    """Return the size of one tensor in bytes.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: not 1 to 31 dimensions above 0, or 2^63 bytes or more.
    """

def options() -> list[tuple[str, str, list[str], str, str, bool, str, str, str]]:
    """Return every option of an engine, with the fields of ``option_table.Row``."""

def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to ``name`` and at most two edits away. Case matters least."""

def check_option(name: str, arg_value: int | str) -> None:
    """Raise unless the property ``name`` of an ``LlmConfig`` may have the value.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: a number is out of range (in the unit of the property), or a text breaks
            its rule. The error for a token or its file does not show the value.
        ValueError: the value is outside int32, for a property that is an int32 in the original.
    """

def check_cache_key(cache_key: CacheKey) -> None:
    """Raise ``LLM_PARAM_INVALID`` unless exactly one of ``req_id`` and ``prefix_id`` is given."""

def check_layer_range(name: str, layer_range: range | None, allow_none: bool = True) -> None:
    """Raise unless the value is a ``range`` of step 1 with ``0 <= start < stop``.

    ``None`` is accepted with ``allow_none``.

    Raises:
        TypeError: the value is not a ``range``.
        LLMException: ``LLM_PARAM_INVALID``: another step, a start below 0, or an empty range.
    """

def check_mem_utilization(arg_value: float) -> None:
    """Raise ``LLM_PARAM_INVALID`` unless the value is from 0.0 to 1.0."""
