"""The value classes of the API: descriptors, keys, the handle of a cache, and enumerations.

The native module checks the arguments of constructors. Descriptors and keys can be copied and pickled; a handle belongs
to its process.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Optional, Union

from llm_datadist import _core
from llm_datadist._core import check_layer_range
from llm_datadist.original.arguments import refuse_none
from llm_datadist.original.caches import CacheHandle
from llm_datadist.original.data_type import DataType
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import LLMException, LLMStatusCode, NamedIntEnum, raise_if_false

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.native import Cache as NativeCache
    from llm_datadist.original.cache_manager import CacheManager

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
    """The memory that holds a cache. In this package both are host memory, in pools of their own."""

    HOST = 0
    DEVICE = 1


class RegisterMemStatus(Enum):
    """State of a communicator."""

    OK = 0
    PREPARING = 1
    FAILED = 2


int_to_mem_status_dict = {status.value: status for status in RegisterMemStatus}


class Memtype(Enum):
    """Kind of memory of a ``MemInfo``."""

    MEM_TYPE_DEVICE = 0
    MEM_TYPE_HOST = 1


class PushType(Enum):
    """The kind of key that names the destination of a push. No call uses it."""

    NO_CACHE_KEY = 0
    BLOCKS_CACHE_KEY = 1
    CACHE_KEY_BY_ID = 2


class CacheDesc:
    """The descriptor of a cache: ``num_tensors`` equal tensors of ``shape``.

    Args:
        num_tensors: number of tensors (uint32); usually two for each layer.
        shape: dimensions of one tensor (int64 each), outermost first. Dimension 0 is the number of batch slots or
            blocks. A ``list`` is kept, not copied, and ``update_dim`` may change it.
        data_type: element type. ``None`` is accepted, but fails when the size is needed.
        placement: the memory that holds the cache.
        batch_dim_index: index of the dimension of batch slots or blocks. Calls that use slots need 0.
        seq_len_dim_index: index of the dimension of the sequence length, or -1 (int32). It has no effect.
        kv_tensor_format: name of a layout. It has no effect.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an integer is outside its width.
        LLMException: ``LLM_PARAM_INVALID``: an index is outside the dimensions.
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
        # Contract §18.2: the call decides whether a cache is a blocks cache, and no call changes this attribute.
        self._is_blocks = False

    @property
    def num_tensors(self) -> int:
        """Number of tensors."""
        return self._num_tensors

    @property
    def shape(self) -> Union[list[int], tuple[int, ...]]:
        """Dimensions of one tensor: the object that was passed, not a copy."""
        return self._shape

    @property
    def data_type(self) -> DataType:
        """Element type."""
        return self._data_type

    @property
    def placement(self) -> Placement:
        """Memory of the cache."""
        return self._placement

    @property
    def batch_dim(self) -> int:
        """Index of the dimension of batch slots or blocks."""
        return self._batch_dim_index

    @property
    def batch_size(self) -> int:
        """Number of batch slots or blocks when the descriptor was made."""
        return self._batch_size

    @property
    def seq_len_dim_index(self) -> int:
        """Index of the dimension of the sequence length, or -1."""
        return self._seq_len_dim_index

    @property
    def kv_tensor_format(self) -> Optional[str]:
        """Name of a layout."""
        return self._kv_tensor_format

    @property
    def size(self) -> int:
        """Bytes of one tensor, computed on first access.

        Raises:
            ValueError: a dimension is outside int64, because the shape was changed.
            LLMException: ``LLM_PARAM_INVALID``: a dimension of 0 or less, more than 31 dimensions, 2^63 bytes or more,
                or no data type.
        """
        if self._size is None:
            self._size = _core.tensor_bytes(self._shape, self._data_type)
        return self._size

    def update_dim(self, dim_index: int, dim_value: int) -> None:
        """Change one dimension of a ``list`` shape, and discard the computed ``size``.

        Args:
            dim_index: index of the dimension.
            dim_value: its new value.

        Raises:
            TypeError: the shape is a ``tuple``.
            IndexError: there is no such dimension.
        """
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
    """Return the arguments of a key by name.

    A positional argument overrides a keyword, and ``cluster_id`` overrides ``prompt_cluster_id``.
    """
    limit = len(positions)
    count = len(args) + len(kwargs)
    raise_if_false(count <= limit, "at most {} arguments are supported (got {})", limit, count)
    given = dict(kwargs)
    if "prompt_cluster_id" in given:
        given.setdefault("cluster_id", given.pop("prompt_cluster_id"))
    given.update(zip(positions, args))
    unknown = sorted(given.keys() - set(positions))
    known = ", ".join(positions)
    for name in required:
        if name not in given:
            text = f"{name} is required"
            text += f" (got {shown(unknown)}; the keywords are {known})" if unknown else ""
            raise_if_false(False, "{}", text)
    raise_if_false(not unknown, "Unsupported arguments: {}; the keywords are {}", unknown, known)
    return given


class CacheKey:
    """The name of one batch slot of a continuous cache, by its request or by its prefix.

    The signature is ``CacheKey(cluster_id, req_id, model_id=0, prefix_id=2**64 - 1)``. ``prompt_cluster_id`` is an
    older keyword for ``cluster_id``. All are uint64. A ``prefix_id`` other than ``2**64 - 1`` makes it a prefix key,
    else it is a request key. A key whose ``req_id`` and ``prefix_id`` are both ``2**64 - 1`` is a placeholder for a
    slot without a key. Keys compare and hash by identity.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: an argument is missing or unknown, or there are more than 4.
        TypeError: an argument is not an ``int``.
        ValueError: an integer is outside uint64.
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
        """The cluster that owns the cache. It matters only for pulls, pushes and layer-wise transfers."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as ``cluster_id``."""
        return self._cluster_id

    @property
    def req_id(self) -> int:
        """Id of the request; ``2**64 - 1`` for none."""
        return self._req_id

    @property
    def prefix_id(self) -> int:
        """Id of the prefix; ``2**64 - 1`` for none."""
        return self._prefix_id

    @property
    def model_id(self) -> int:
        """Id of the model. Request ids and prefix ids are separate for each model."""
        return self._model_id

    def __repr__(self) -> str:
        return (
            f"CacheKey(cluster_id={self._cluster_id}, req_id={self._req_id}, "
            f"prefix_id={self._prefix_id}, model_id={self._model_id})"
        )


class BlocksCacheKey:
    """The name of the blocks cache of a model.

    The signature is ``BlocksCacheKey(cluster_id, model_id=0)``. ``prompt_cluster_id`` is an older keyword for
    ``cluster_id``. Both are uint64. Keys compare and hash by identity.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: an argument is missing or unknown, or there are more than 2.
        TypeError: an argument is not an ``int`` or ``None``.
        ValueError: an integer is outside uint64.
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
        """The cluster that owns the cache. It matters only for pulls."""
        return self._cluster_id

    @property
    def prompt_cluster_id(self) -> int:
        """The same as ``cluster_id``."""
        return self._cluster_id

    @property
    def model_id(self) -> int:
        """Id of the model."""
        return self._model_id

    def __repr__(self) -> str:
        name = "prompt_cluster_id" if self._older_name else "cluster_id"
        return f"BlocksCacheKey({name}={self._cluster_id}, model_id={self._model_id})"


class CacheKeyByIdAndIndex:
    """The name of one batch slot, by the id of its cache.

    Args:
        cluster_id: the cluster that owns the cache (uint64).
        cache_id: id of the cache at its owner (int64). In remote-accessible mode, 0 or less means the cache of request
            key 0 of model 0.
        batch_index: batch slot (uint32).

    Raises:
        TypeError: an argument is not an ``int``.
        ValueError: an integer is outside its width.
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
    """A range of memory, for ``remap_registered_memory``.

    Args:
        mem_type: kind of memory.
        addr: address of the first byte.
        size: size in bytes.

    Raises:
        TypeError: an argument has the wrong type; ``None`` is allowed.
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
        """Address of the first byte."""
        return self._addr

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self._size

    def __repr__(self) -> str:
        return f"MemInfo(mem_type={self._mem_type}, addr={self._addr}, size={self._size})"


class Cache(CacheHandle):
    """The handle of a cache in CacheManager mode.

    A ``CacheManager`` or ``create_cpu_cache`` makes it. Dropping a handle frees nothing. A handle is a context
    manager: ``with manager.allocate_blocks_cache(...) as cache:`` releases the cache at the end of the block. It
    deallocates an allocated cache, and unregisters a registered one.

    Args:
        cache_id: 1 or more for a cache of an engine, -1 for a CPU cache (int64).
        cache_desc: the descriptor.
        tensor_addrs: address of each tensor.
        cache_manager: the manager that made it, or ``None``.
        is_registered: whether the memory belongs to the caller.
        is_blocks_cache: whether dimension 0 is the number of blocks.

    Raises:
        TypeError: ``cache_id`` is not an ``int``.
        ValueError: ``cache_id`` is outside int64.
    """

    _cache_manager: Optional[CacheManager]

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        tensor_addrs: Sequence[int],
        cache_manager: Optional[CacheManager],
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
        self, handle: _core.ManagedCache, desc: CacheDesc, manager: CacheManager, registered: bool, blocks: bool
    ) -> Cache:
        """Initialize the handle of a cache of an engine, in place of ``__init__``, and return it."""
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
        # Computed on first access, because programs use most caches through their keys only.
        return self._handle.tensor_addrs() if isinstance(self._handle, _core.ManagedCache) else []

    def _invalidate(self) -> None:
        """Note that the cache was deallocated."""
        self._valid = False
        self._tensor_addrs = []

    def _release(self) -> None:
        manager = self._cache_manager
        if manager is None or not self._valid:
            return
        if self._is_registered:
            manager.unregister_cache(self._cache_id)
        elif self._is_blocks_cache:
            manager.deallocate_blocks_cache(self)
        else:
            manager.deallocate_cache(self)

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: list[int]) -> Cache:
        """Make a blocks cache over host memory of the caller, for ``CacheManager.swap_blocks``.

        The memory must stay valid, readable and writable while the handle is used.

        Args:
            cache_desc: tensors of shape ``[blocks, ...]`` with the placement ``HOST``.
            addrs: address of each tensor (uint64), none 0.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            ValueError: an address is outside uint64.
            LLMException: ``LLM_PARAM_INVALID``: another placement, not one address for each tensor, an address of 0,
                or an invalid shape.
        """
        _core.check_isinstance("cache_desc", cache_desc, CacheDesc)
        _core.check_isinstance("addrs", addrs, list, int, allow_none=False)
        refuse_none("cache_desc", cache_desc)
        placement = cache_desc.placement
        raise_if_false(placement == Placement.HOST, "placement={} is not Placement.HOST", placement)
        handle = _core.LooseCache(cache_desc, addrs)
        cache = cls(-1, cache_desc, list(addrs), None, is_registered=False, is_blocks_cache=True)
        cache._handle = handle
        return cache

    @property
    def native(self) -> NativeCache:
        """The cache of the native API (``llm_datadist.native.Cache``) over the same memory, for ``LLMDataDist.engine``.

        It has no layout, and one tensor in each layer. Its name is for people: peers cannot find it by that name. Each
        use makes a new object; none of them keeps the cache. The original does not have this property.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: this is not a blocks cache; ``LLM_KV_CACHE_NOT_EXIST``: the cache was
                released, or belongs to no engine; ``LLM_ENGINE_FINALIZED``: the engine was finalized.
        """
        if self._cache_manager is None:
            text = f"{self} belongs to no engine, so there is no native cache"
            raise LLMException(text, status_code=LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
        return self._cache_manager._datadist.native_cache(self)  # noqa: SLF001  (the engine of this manager)

    @property
    def tensor_addrs(self) -> Sequence[int]:
        """Address of each tensor; empty after a deallocation."""
        return self._tensor_addrs

    @property
    def is_blocks_cache(self) -> bool:
        """Whether dimension 0 is the number of blocks; else it is the number of batch slots."""
        return self._is_blocks_cache

    def __repr__(self) -> str:
        return (
            f"Cache(cache_id = {self._cache_id}, device_tensor_addrs = {len(self._tensor_addrs)}, "
            f"is_blocks_cache = {self._is_blocks_cache})"
        )


def made_cache(
    handle: _core.ManagedCache, desc: CacheDesc, manager: CacheManager, registered: bool = False, blocks: bool = False
) -> Cache:
    """Return the public handle of a cache of an engine."""
    return Cache.__new__(Cache)._made(handle, desc, manager, registered, blocks)  # noqa: SLF001  (like `__init__`)
