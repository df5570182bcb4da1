"""One engine and its caches. Arguments and results are plain values, so that other processes can make the calls."""

from __future__ import annotations

import mmap
import re
import time
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import llm_datadist  # `llm_datadist.native` by name, because packages that `make differential` compares with lack it
from llm_datadist import (
    Cache,
    CacheDesc,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)

from .process import Process, _over
from .sockets import split
from .values import GRACE, LIMIT, OK, by_blocks, cache_key, equal, outcome, pattern, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .values import Key

_Event = TypeVar("_Event")
POISON = 0xA5  # in gaps between rows


@dataclass
class Held:
    """A cache of an `End`: the handle, and arrays over the memory of the cache."""

    handle: Any
    arrays: list[np.ndarray]


def _addresses(handle: Any) -> list[int]:
    if isinstance(handle, KvCache):
        (addresses,) = handle.per_device_tensor_addrs
        return addresses
    return list(handle.tensor_addrs)


def _names(result: tuple[LLMStatusCode, list[LLMStatusCode]]) -> tuple[str, list[str]]:
    return result[0].name, [code.name for code in result[1]]


def _info(peer: Sequence[Any]) -> LLMClusterInfo:
    info = LLMClusterInfo()
    cluster, addresses = peer
    info.remote_cluster_id = cluster
    info.append_local_ip_info("127.0.0.1", 0)
    for address in [addresses] if isinstance(addresses, str) else addresses or []:
        info.append_remote_ip_info(*split(address))
    return info


def _cluster(peer: Any) -> int:
    """The cluster, which engines of `LLMDataDist` and hostile peers have in their names; -1 for another name."""
    found = re.fullmatch(r"cluster (\d+)", peer.name)
    return int(found[1]) if found else -1


def _layers(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"src_layers": "src_layer_range", "dst_layers": "dst_layer_range", "n": "tensor_num_per_layer"}
    made = {names.get(name, name): value for name, value in kwargs.items()}
    return {name: range(*value) if name.endswith("_range") and value else value for name, value in made.items()}


def _mapped(rows: int, row_bytes: int) -> np.ndarray:
    """An array of zeros with a mapping of its own."""
    return np.frombuffer(mmap.mmap(-1, rows * row_bytes, mmap.MAP_PRIVATE), np.uint8).reshape(rows, row_bytes)


def _desc(rows: int, row_bytes: int, tensors: int, host: bool) -> CacheDesc:
    return CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8, Placement.HOST if host else Placement.DEVICE)


class End(Process):
    """One engine and its caches by name, in the process that has this object.

    Methods without a docstring make the engine call of the same name. In transfers, `src_layers` and `dst_layers` are
    layer ranges as pairs, and `n` is the number of tensors of one layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dist: Any = None
        self.held: dict[str, Held] = {}
        self.granted: dict[bytes, Any] = {}
        self.opened: list[llm_datadist.native.Engine] = []
        self.poisoned: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # memory with gaps, and which bytes are in a row

    @property
    def manager(self) -> Any:
        return self.dist.cache_manager if self.dist._enable_cache_mgr else self.dist.kv_cache_manager

    def init(self, settings: dict[str, str], cluster: int = 1, role: str = "PROMPT") -> str | None:
        """Open an engine; returns where it listens."""
        if self.dist is None or self.dist.cluster_id != cluster:
            assert LLMDataDist.llm_engine_instance is None, "an engine is open already"
            self.dist = LLMDataDist(LLMRole[role], cluster)
        self.dist.init(settings)
        return self.dist.listen_ip_info

    def finalize(self) -> None:
        self.held.clear()
        self.granted.clear()
        while self.opened:
            self.opened.pop().close()
        if self.dist is not None:
            self.dist.finalize()

    def reset(self) -> None:
        self.finalize()
        self.dist = None

    def listening(self) -> Any:
        return self.dist.listen_ip_info

    def switch_role(self, role: str, switch: dict[str, str] | None = None) -> None:
        self.dist.switch_role(LLMRole[role], switch)

    def stats(self) -> Any:
        return self.dist.stats()

    @property
    def engine(self) -> Any:
        """The engine of the native API."""
        return self.dist.engine

    def notify(self, cluster: int, payload: bytes) -> None:
        """Send a message to the program of a peer."""
        self.peer_of(cluster).send(payload)

    def peer_of(self, cluster: int) -> Any:
        return next(peer for peer in self.engine.peers if _cluster(peer) == cluster)

    def peers(self) -> list[tuple[int, int, bytes]]:
        """Returns the cluster, the incarnation and the metadata of each peer."""
        return [(_cluster(peer), peer.incarnation, peer.metadata) for peer in self.engine.peers]

    def _events(self, kind: type[_Event]) -> list[_Event]:
        """Returns the events of this kind, and drops the others."""
        return [event for event in self.engine.events(10_000) if isinstance(event, kind)]

    def downs(self) -> list[tuple[int, str]]:
        """Returns the cluster and the reason of each link that has ended, and drops other events."""
        return [(_cluster(event.peer), event.reason) for event in self._events(llm_datadist.native.PeerDown)]

    def polled(self, first: int | None = None) -> list[tuple[int, bytes]]:
        """Returns the cluster and the bytes of each message, and drops other events.

        With `first`, returns only that many bytes of each message. Few whole messages exist at a time then, so that the
        heap of Python stays small: it rarely shrinks, which tests of the memory of the engine would see.
        """
        got: list[tuple[int, bytes]] = []
        while events := self.engine.events(10_000 if first is None else 32):
            got += [
                (_cluster(event.peer), event.data[:first])
                for event in events
                if isinstance(event, llm_datadist.native.Message)
            ]
        return got

    def grant(self, name: str, blocks: list[int], ttl: float = 60.0, readers: int = 1) -> bytes:
        """Lend blocks. Returns the token, by which the other methods name the grant."""
        grant = self.engine.lend(self._native(name)[blocks], ttl=ttl, readers=readers)
        self.granted[grant.token] = grant
        return bytes(grant.token)

    def revoke(self, token: bytes, *, wait: bool = True) -> None:
        ended = self.granted[token].revoke()
        if wait:
            ended.result(LIMIT)

    def grant_ended(self, token: bytes) -> str | None:
        return self.granted[token].ended

    def _native(self, name: str) -> Any:
        handle = self.held[name].handle
        return handle.native if isinstance(handle, Cache) else handle

    def open_engine(self, **given: Any) -> str | None:
        """Open an engine of the native API beside this one. Returns where it listens."""
        made = llm_datadist.native.Engine(**given)
        self.opened.append(made)
        return made.address

    def native_pull(self, cluster: int, cache: str, name: str, src: list[int], dst: list[int], **given: Any) -> None:
        """Pull blocks of the cache that is called `cache` at a peer."""
        rows = self.peer_of(cluster)[cache][src]
        self.engine.pull(self._native(name)[dst], rows, **given).result(LIMIT)

    def native_allocate(self, name: str, rows: int = 4, row_bytes: int = 256, tensors: int = 2, seed: int = 0) -> None:
        """Allocate a cache that peers find by its name."""
        made = self.engine.allocate(name, blocks=rows, tensors=tensors, shape=(row_bytes,), dtype="uint8")
        self._hold(name, made, [tensor.numpy() for tensor in made.tensors], seed)

    def native_register(
        self, name: str, rows: int, row_bytes: int, stride: int, tensors: int, *, seed: int
    ) -> list[int]:
        """Register tensors whose rows alternate in one range of memory, with poison before, between and after them.

        Return the address of each tensor.
        """
        memory, in_row = np.full(128 + rows * stride, POISON, np.uint8), np.zeros(128 + rows * stride, bool)
        firsts = range(64, 64 + tensors * row_bytes, row_bytes)
        arrays = [np.lib.stride_tricks.as_strided(memory[at:], (rows, row_bytes), (stride, 1)) for at in firsts]
        for at in firsts:
            np.lib.stride_tricks.as_strided(in_row[at:], (rows, row_bytes), (stride, 1))[:] = True
        self.poisoned[name] = memory, in_row
        self._hold(name, self.engine.register(name, arrays), arrays, seed)
        return [int(array.ctypes.data) for array in arrays]

    def check_gaps(self, name: str) -> None:
        """Raise if a byte of a gap has changed."""
        memory, in_row = self.poisoned[name]
        wrong = np.flatnonzero((memory != POISON) & ~in_row)
        assert not len(wrong), f"{name}: bytes {wrong[:8]} of {len(memory)} changed"

    def links(self) -> list[Any]:
        return self.dist.stats()["links"]

    def used(self, pool: str = "device") -> int:
        return self.dist.stats()["pools"][pool]["used_bytes"]

    def allocate(self, name, rows=4, row_bytes=256, tensors=2, *, host=False, blocks=False, keys=(), seed=None) -> int:
        """Allocate a cache under a name and return its id. `keys`: one for each slot, or one for a blocks cache."""
        desc, given = _desc(rows, row_bytes, tensors, host), [cache_key(key) for key in keys]
        if blocks:
            handle = self.manager.allocate_blocks_cache(desc, *given)
        else:
            handle = self.manager.allocate_cache(desc, given)
        return self._hold(name, handle, [_over(address, rows, row_bytes) for address in _addresses(handle)], seed)

    def write(self, name: str, tensors: Sequence[np.ndarray]) -> None:
        """Set the bytes of a cache."""
        for array, made in zip(self.held[name].arrays, tensors):
            array[:] = made

    def register(
        self, name, rows=4, row_bytes=256, tensors=2, *,
        host=False, blocks=False, keys=(), accessible=None, seed=None, mapped=False,
    ) -> int:  # fmt: skip
        """Register memory of this process under a name and return its id. `mapped`: each tensor has its own mmap."""
        arrays = [_mapped(rows, row_bytes) if mapped else np.zeros((rows, row_bytes), np.uint8) for _ in range(tensors)]
        memory = _desc(rows, row_bytes, tensors, host), [int(array.ctypes.data) for array in arrays]
        given: Any = [cache_key(key) for key in keys]
        if blocks:
            handle = self.manager.register_blocks_cache(*memory, *(given or [None]), remote_accessible=accessible)
        else:
            handle = self.manager.register_cache(*memory, given, remote_accessible=accessible)
        return self._hold(name, handle, arrays, seed)

    def _hold(self, name: str, handle: Any, arrays: list[np.ndarray], seed: int | None) -> int:
        self.held[name] = Held(handle, arrays)
        if seed is not None:
            self.fill(name, seed)
        return handle.cache_id if isinstance(handle, (Cache, KvCache)) else 0

    def make(self, name: str, *args: Any, registered: bool = False, **kwargs: Any) -> int:
        """`register` with remote access, or `allocate`."""
        if registered:
            return self.register(name, *args, **{"accessible": True, **kwargs})
        return self.allocate(name, *args, **kwargs)

    def held_id(self, name: str) -> int:
        return self.held[name].handle.cache_id

    def deallocate(self, name: str) -> None:
        """Deallocate a cache. Its name stays valid, for calls with the released handle."""
        held = self.held[name]
        held.arrays = []
        of_blocks = getattr(held.handle, "is_blocks_cache", False)
        (self.manager.deallocate_blocks_cache if of_blocks else self.manager.deallocate_cache)(held.handle)

    def unregister(self, name: str) -> None:
        self.manager.unregister_cache(self.held_id(name))

    def release(self, name: str) -> None:
        """`unregister` or `deallocate`."""
        self.held[name].handle._release()
        self.held[name].arrays = []

    def forget(self, name: str) -> None:
        """Drop the arrays of a registered cache, so that Python can free their memory."""
        del self.held[name]

    def remove_key(self, key: Key) -> None:
        self.manager.remove_cache_key(cache_key(key))

    def fill(self, name: str, seed: int) -> None:
        """Write `pattern(seed, …)`."""
        arrays = self.held[name].arrays
        for array, made in zip(arrays, pattern(seed, len(arrays), *arrays[0].shape)):
            array[:] = made

    def paint(self, name: str, value: int) -> None:
        for array in self.held[name].arrays:
            array[:] = value

    def read(self, name: str) -> list[np.ndarray]:
        return [array.copy() for array in self.held[name].arrays]

    def addresses(self, name: str) -> list[int]:
        """Return the address of each tensor of a cache."""
        return _addresses(self.held[name].handle)

    def copy_blocks(self, name: str, pairs: Sequence[Sequence[int]]) -> None:
        """`copy_blocks` with one destination for each source block."""
        self.manager.copy_blocks(self.held[name].handle, {src: [dst] for src, dst in pairs})

    def copy_cache(self, dst: str, src: str, dst_row: int = 0, src_row: int = 0) -> None:
        self.manager.copy_cache(self.held[dst].handle, self.held[src].handle, dst_row, src_row)

    def swap_blocks(self, src: str, dst: str, pairs: Sequence[Sequence[int]]) -> None:
        self.manager.swap_blocks(self.held[src].handle, self.held[dst].handle, dict(pairs))

    def link_clusters(self, peers: Sequence[Any], timeout: int = 5000) -> tuple[str, list[str]]:
        """`link_clusters` with `(cluster, "ip:port" or several)`. Returns the names of the codes."""
        return _names(self.dist.link_clusters([_info(peer) for peer in peers], timeout))

    def unlink_clusters(self, peers: Sequence[Any], timeout: int = 5000, force: bool = False) -> tuple[str, list[str]]:
        """`unlink_clusters`. Returns the names of the codes."""
        return _names(self.dist.unlink_clusters([_info(peer) for peer in peers], timeout, force))

    def link(self, name: str, ranks: dict[int, int], table: str) -> int:
        return self.dist.link(name, ranks, table)

    def unlink(self, comm: int) -> None:
        self.dist.unlink(comm)

    def status(self, comm: int) -> str:
        """`query_register_mem_status`, by name."""
        return self.dist.query_register_mem_status(comm_id=comm).name

    def final_state(self, comm: int, limit: float = LIMIT) -> str:
        """The status, once it is no longer PREPARING."""
        until = time.monotonic() + limit
        while (status := self.status(comm)) == "PREPARING" and time.monotonic() < until:
            time.sleep(0.005)
        return status

    def pull_cache(self, key: Key, name: str, batch: int = 0, size: int = -1, **kwargs: Any) -> None:
        self.manager.pull_cache(cache_key(key), self.held[name].handle, batch, size, **_layers(kwargs))

    def pull_blocks(self, key: Key, name: str, src: Sequence[int] = (), dst: Sequence[int] = (), **kwargs: Any) -> None:
        self.manager.pull_blocks(cache_key(key), self.held[name].handle, list(src), list(dst), **_layers(kwargs))

    def push_cache(self, key: Key, name: str, batch: int = 0, **kwargs: Any) -> None:
        self.manager.push_cache(cache_key(key), self.held[name].handle, batch, **_layers(kwargs))

    def push_blocks(self, key: Key, name: str, src: Sequence[int], dst: Sequence[int], **kwargs: Any) -> None:
        self.manager.push_blocks(cache_key(key), self.held[name].handle, list(src), list(dst), **_layers(kwargs))

    def recorded(self, method: str, *args: Any, **kwargs: Any) -> tuple[str, str, list[Any]]:
        """Call a method of the cache manager. Return its code, text and arrived rows.

        `"$name"` stands for a cache, what `by_blocks` and the like make for a key, and a pair for a layer range.
        """
        given = [self._given(value) for value in args]
        named = {
            name: range(*value) if name.endswith("_range") else self._given(value) for name, value in kwargs.items()
        }
        arrived: list[Any] = []

        def noted() -> None:
            try:
                getattr(self.manager, method)(*given, **named)
            except LLMException as error:
                arrived.extend(error.arrived)
                raise

        return *outcome(noted), arrived

    def _given(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("$"):
            return self.held[value[1:]].handle
        if isinstance(value, tuple) and value[:1] in (("request",), ("slot",), ("blocks",)):
            return cache_key(value)
        return value

    def sums(self) -> dict[str, int]:
        """Return a checksum of the bytes of each cache that is held."""
        return {name: self._sum(held.arrays) for name, held in self.held.items() if held.arrays}

    @staticmethod
    def _sum(arrays: list[np.ndarray]) -> int:
        total = 0
        for array in arrays:
            total = zlib.crc32(np.ascontiguousarray(array), total)
        return total

    def timed(self, call: str, *args: Any, **kwargs: Any) -> tuple[str, float, str]:
        """Return the outcome of a call, its seconds, and the text of its error."""
        began = time.monotonic()
        code, text = outcome(lambda: getattr(self, call)(*args, **kwargs))
        return code, time.monotonic() - began, text

    def within(self, limit: float, call: str, *args: Any, **kwargs: Any) -> tuple[str, str]:
        """Return the outcome of a call and the text of its error. It must end within its limit in seconds."""
        code, seconds, text = self.timed(call, *args, **kwargs)
        assert seconds < limit + GRACE, f"{call} took {seconds} s: {code}, {text}"
        return code, text

    def pull_while(self, running: str, pulled: str, cluster: int, name: str, pause: float = 0.002) -> dict[str, Any]:
        """Pull the blocks cache of `cluster` into `name`, again and again, until the file `running` is gone.

        Creates the file `pulled` after the first pull. Returns the number of pulls, how many of them got other bytes
        than the first one, the seconds of the slowest, the number of each outcome, and the text of the first error.
        """
        rows, right = range(len(self.held[name].arrays[0])), None
        seen: dict[str, Any] = {"pulls": 0, "wrong": 0, "slowest": 0.0, "codes": Counter(), "text": ""}
        until = time.monotonic() + 6 * LIMIT
        while Path(running).exists() and time.monotonic() < until:
            self.paint(name, 0)
            code, seconds, text = self.timed("pull_blocks", by_blocks(cluster), name, rows, rows)
            if code == OK:
                right = right or self.read(name)
                seen["wrong"] += not equal(right, self.held[name].arrays)
            seen["pulls"] += 1
            seen["slowest"] = max(seen["slowest"], seconds)
            seen["text"] = seen["text"] or text
            seen["codes"][code] += 1
            Path(pulled).touch()
            time.sleep(pause)
        return seen

    def at_once(self, calls: Sequence[Sequence[Any]], repeat: int = 1) -> list[str]:
        """Make calls `[name, args, kwargs]` at once, each in its own thread, `repeat` times. Return last outcomes."""

        def one(number: int) -> str:
            call, args, kwargs = calls[number]
            return outcome(lambda: getattr(self, call)(*args, **kwargs))[0]

        return [together(len(calls), one) for _ in range(repeat)][-1]
