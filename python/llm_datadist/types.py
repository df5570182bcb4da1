"""The value classes of the API: descriptors, keys, cache handles and their enumerations (contract §3.3, §4).

Plain objects, checked when made by the native module; descriptors and keys can be copied and pickled, a cache handle
belongs to its process. Not for: operations on caches (``cache_manager``) or options (``configs``).
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Optional, Union

from llm_datadist import _core
from llm_datadist._core import check_layer_range
from llm_datadist.data_type import DataType
from llm_datadist.status import NamedIntEnum, raise_if_false

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "check_layer_range",
    "int_to_mem_status_dict",
]

_UINT64_MAX = 2**64 - 1


class Placement(NamedIntEnum):
    """Which memory a cache is in."""

    HOST = 0
    DEVICE = 1


class RegisterMemStatus(Enum):
    """How far the memory exchange of a link is."""

    OK = 0
    PREPARING = 1
    FAILED = 2


int_to_mem_status_dict = {status.value: status for status in RegisterMemStatus}


class Memtype(Enum):
    """Kind of memory of a :class:`MemInfo`."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    """How the destination of a push is named."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class CacheDesc:
    """What a cache looks like: ``num_tensors`` equal tensors of ``shape``.

    Args:
        num_tensors: how many tensors (uint32); usually two per layer.
        shape: dimensions of one tensor, outermost first; dimension 0 counts batch slots or blocks. A ``list`` is kept,
            not copied, and may be changed through :meth:`update_dim`.
        data_type: element type.
        placement: which memory.
        batch_dim_index: which dimension counts the batch slots or blocks.
        seq_len_dim_index: which dimension is the sequence length, or -1; without effect.
        kv_tensor_format: name of a layout; without effect.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an integer outside its width.
        LLMException: ``LLM_PARAM_INVALID``, an index outside the dimensions.
    """

    def __init__(
        self,
        num_tensors: int,
        shape: Union[list[int], tuple[int, ...]],
        data_type: DataType,
        placement: Placement = Placement.DEVICE,
        batch_dim_index: int = 0,
        seq_len_dim_index: int = -1,
        kv_tensor_format: Optional[str] = None,
    ) -> None:
        _core.check_uint32("num_tensors", num_tensors)
        _core.check_isinstance("shape", shape, [list, tuple], int)
        _core.check_isinstance("data_type", data_type, DataType)
        _core.check_isinstance("placement", placement, Placement, allow_none=False)
        _core.check_isinstance("batch_dim_index", batch_dim_index, int)
        _core.check_int32("seq_len_dim_index", seq_len_dim_index)
        _core.check_isinstance("kv_tensor_format", kv_tensor_format, str)
        _core.check_dimensions(len(shape), batch_dim_index, seq_len_dim_index)
        _core.check_list_int64("shape", shape)
        self._num_tensors = num_tensors
        self._shape = shape
        self._data_type = data_type
        self._placement = placement
        self._batch_dim_index = batch_dim_index
        self._batch_size = shape[batch_dim_index]
        self._seq_len_dim_index = seq_len_dim_index
        self._kv_tensor_format = kv_tensor_format
        self._size: Optional[int] = None
        # Whether a cache is a blocks cache is said by the call that makes it, never by its descriptor.
        self._is_blocks = False

    @property
    def num_tensors(self) -> int:
        """How many tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Union[list[int], tuple[int, ...]]:
        """Dimensions of one tensor: the object given, not a copy."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Which memory."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Which dimension counts the batch slots or blocks."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """How many batch slots or blocks there were when the descriptor was made."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        """Which dimension is the sequence length, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> Optional[str]:
        """Name of a layout."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor, computed on first use.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a dimension of 0 or less, 2^63 bytes or more, or no data type.
        """
        if self._size is None:
            self._size = _core.tensor_bytes(self._shape, self._data_type)
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change one dimension of a ``list`` shape; a ``tuple`` raises ``TypeError``."""
        self._shape[dim_index] = dim_value  # type: ignore[index]
        self._size = None

    def __repr__(self) -> str:
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim_index}, "
            f"seq_len_dim_index={self._seq_len_dim_index},kv_tensor_format={self._kv_tensor_format})"
        )


def _key_arguments(
    positions: tuple[str, ...], required: tuple[str, ...], args: tuple[int, ...], kwargs: dict[str, int]
) -> dict[str, int]:
    """Return the arguments of a key by name: positions win over keywords, ``cluster_id`` over its older name."""
    limit = len(positions)
    raise_if_false(len(args) + len(kwargs) <= limit, "at most {} arguments are supported", limit)
    given = dict(kwargs)
    if "prompt_cluster_id" in given:
        given.setdefault("cluster_id", given.pop("prompt_cluster_id"))
    given.update(zip(positions, args))
    for name in required:
        raise_if_false(name in given, "{} is required", name)
    unknown = sorted(given.keys() - set(positions))
    raise_if_false(not unknown, "Unsupported arguments: {}", unknown)
    return given


class CacheKey:
    """Names one batch slot of a continuous cache, by the request or by the prefix it holds.

    ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``; ``prompt_cluster_id`` is an older keyword for
    ``cluster_id``. All are uint64. ``req_id = 2**64 - 1`` without a prefix is the placeholder of an unused slot; any
    other ``prefix_id`` makes it the key of a prefix (seed ``deprecated.md``, allocate_cache).

    Raises:
        LLMException: ``LLM_PARAM_INVALID``, arguments missing, unknown or too many.
        TypeError: an argument that is no ``int``.
        ValueError: an integer outside uint64.
    """

    def __init__(self, *args: int, **kwargs: int) -> None:
        positions = ("cluster_id", "req_id", "model_id", "prefix_id")
        given = _key_arguments(positions, ("cluster_id", "req_id"), args, kwargs)
        self._cluster_id = given["cluster_id"]
        self._req_id = given["req_id"]
        self._model_id = given.get("model_id", 0)
        self._prefix_id = given.get("prefix_id", _UINT64_MAX)
        for name in positions:
            _core.check_uint64(name, getattr(self, f"_{name}"))

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache; matters only when pulling."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as :attr:`cluster_id`."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        """The request; 2**64 - 1 for none."""
        return self._req_id

    @property
    def prefix_id(self) -> int:
        """The prefix; 2**64 - 1 for none."""
        return self._prefix_id

    @property
    def model_id(self) -> int:
        """The model; ids of requests and prefixes are per model."""
        return self._model_id

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, "
            f"prefix_id={self._prefix_id}, model_id={self._model_id})"
        )


class BlocksCacheKey:
    """Names the blocks cache of a model.

    ``BlocksCacheKey(cluster_id, model_id=0)``; ``prompt_cluster_id`` is an older keyword for ``cluster_id``. Both are
    uint64 (seed ``deprecated.md``, allocate_blocks_cache).

    Raises:
        LLMException: ``LLM_PARAM_INVALID``, arguments missing, unknown or too many.
        TypeError: an argument that is no ``int``.
        ValueError: an integer outside uint64.
    """

    def __init__(self, *args: int, **kwargs: int) -> None:
        given = _key_arguments(("cluster_id", "model_id"), ("cluster_id",), args, kwargs)
        self._cluster_id = given["cluster_id"]
        self._model_id = given.get("model_id", 0)
        self._older_name = not args and "cluster_id" not in kwargs
        for name, value in (("cluster_id", self._cluster_id), ("model_id", self._model_id)):
            _core.check_isinstance(name, value, int)
            if value is not None:
                _core.check_uint64(name, value)

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache; matters only when pulling."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as :attr:`cluster_id`."""
        return self._cluster_id

    @property
    def model_id(self) -> int:
        """The model."""
        return self._model_id

    def __repr__(self) -> str:
        name = "prompt_cluster_id" if self._older_name else "cluster_id"
        return f"BlocksCacheKey({name}={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex:
    """Names one batch slot by the id of its cache.

    Args:
        cluster_id: the cluster that owns the cache (uint64).
        cache_id: id of the cache there (int64).
        batch_index: batch slot (uint32).

    Raises:
        TypeError: an argument that is no ``int``.
        ValueError: an integer outside its width.
    """

    def __init__(self, cluster_id: int, cache_id: int, batch_index: int = 0) -> None:
        _core.check_uint64("cluster_id", cluster_id)
        _core.check_int64("cache_id", cache_id)
        _core.check_uint32("batch_index", batch_index)
        self._cluster_id = cluster_id
        self._cache_id = cache_id
        self._batch_index = batch_index

    @property
    def cluster_id(self) -> int:
        """The cluster that owns the cache."""
        return self._cluster_id

    @property
    def cache_id(self) -> int:
        """Id of the cache."""
        return self._cache_id

    @property
    def batch_index(self) -> int:
        """Batch slot."""
        return self._batch_index

    def __repr__(self) -> str:
        return (
            f"CacheKeyByIdAndIndex(cluster_id={self._cluster_id}, cache_id={self._cache_id}, "
            f"batch_index={self._batch_index})"
        )


class MemInfo:
    """A piece of memory.

    Args:
        mem_type: kind of memory.
        addr: first address.
        size: bytes.

    Raises:
        TypeError: an argument of the wrong type.
    """

    def __init__(self, mem_type: Memtype, addr: int, size: int) -> None:
        self._mem_type = _core.check_isinstance("mem_type", mem_type, Memtype)
        self._addr = _core.check_isinstance("addr", addr, int)
        self._size = _core.check_isinstance("size", size, int)

    @property
    def mem_type(self) -> Memtype:
        """Kind of memory."""
        return self._mem_type

    @property
    def addr(self) -> int:
        """First address."""
        return self._addr

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self._mem_type}, addr={self._addr}, size={self._size})"


class Cache:
    """A handle on a cache; made by a ``CacheManager`` or :meth:`create_cpu_cache`. Dropping it frees nothing.

    Args:
        cache_id: 1 or above for a cache of an engine, -1 for a CPU cache (int64).
        cache_desc: what it looks like.
        tensor_addrs: address of every tensor.
        cache_manager: the manager that made it.
        is_registered: whether the memory is the caller's.
        is_blocks_cache: whether dimension 0 counts blocks.
    """

    # What the engine knows it by; none of a cache put together by hand, which is found by its id.
    _handle: Union[_core.LooseCache, _core.ManagedCache, None] = None

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: Sequence[int],
        cache_manager: object,
        is_registered: bool,
        is_blocks_cache: bool,
    ) -> None:
        _core.check_int64("cache_id", cache_id)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._tensor_addrs = tensor_addrs
        self._cache_manager = cache_manager
        self._is_registered = is_registered
        self._is_blocks_cache = is_blocks_cache
        self._valid = True

    def _made(
        self, handle: _core.ManagedCache, desc: CacheDesc, manager: object, registered: bool, blocks: bool
    ) -> Cache:
        """Return the same, as the cache that an engine made: in place of ``__init__``."""
        self._handle = handle
        self._cache_id = handle.cache_id
        self._cache_desc = desc
        self._cache_manager = manager
        self._is_registered = registered
        self._is_blocks_cache = blocks
        self._valid = True
        return self

    @cached_property
    def _tensor_addrs(self) -> Sequence[int]:
        # Only of a cache that an engine made, and made when they are asked for: most caches are used by their keys.
        return self._handle.tensor_addrs() if isinstance(self._handle, _core.ManagedCache) else []

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Make a blocks cache over host memory of the caller, for ``CacheManager.swap_blocks``.

        The memory must stay valid, readable and writable while the handle lives (seed ``deprecated.md``, swap_blocks).

        Args:
            cache_desc: what the memory holds; its placement must be ``HOST``.
            addrs: address of every tensor.

        Raises:
            TypeError: an argument of the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``, not ``HOST``, not one address per tensor, or sizes without meaning.
        """
        _core.check_isinstance("cache_desc", cache_desc, CacheDesc)
        _core.check_isinstance("addrs", addrs, list, int, allow_none=False)
        placement = cache_desc.placement
        raise_if_false(placement == Placement.HOST, "placement = {} is not allowed: Placement.HOST", placement)
        handle = _core.LooseCache(cache_desc, addrs)
        cache = cls(-1, cache_desc, list(addrs), None, is_registered=False, is_blocks_cache=True)
        cache._handle = handle
        return cache

    @property
    def cache_id(self) -> int:
        """Id in its engine, or -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What it looks like."""
        return self._cache_desc

    @property
    def tensor_addrs(self) -> Sequence[int]:
        """Address of every tensor; empty once deallocated."""
        return self._tensor_addrs

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dimension 0 counts blocks."""
        return self._is_blocks_cache

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._tensor_addrs)}, "
            f"is_blocks_cache = {self._is_blocks_cache})"
        )


def made_cache(
    handle: _core.ManagedCache, desc: CacheDesc, manager: object, registered: bool = False, blocks: bool = False
) -> Cache:
    """Return the public handle of a cache that an engine made."""
    return Cache.__new__(Cache)._made(handle, desc, manager, registered, blocks)  # noqa: SLF001  (as `__init__` would)
