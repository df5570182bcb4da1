"""Two ends of a link: one in this process, others in real processes of their own, all spoken to in the same words.

`End` wraps one engine and a handful of named caches; every method takes and returns plain values. A test holds
one `End` itself and drives others through `Peer`, which starts a second interpreter (no fork), sends it one JSON line
per call and waits a bounded time for the answer. What bytes must be is never asked of an engine: `pattern` and numpy
say it. Not for: judging results (that is the tests').
"""

from __future__ import annotations

import atexit
import base64
import json
import os
import random
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Optional, Union

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    _core,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

UINT64_MAX = 2**64 - 1
LIMIT = 60.0  # seconds: the most any wait of a test takes, beside other programs on all cores
GRACE = 5.0  # seconds a call may take beyond its limit: a busy machine runs threads late
POOL = 2 << 20
SOAK = int(os.environ.get("LLM_DATADIST_SOAK", "0") or 0)
THOROUGH = os.environ.get("LLM_DATADIST_THOROUGH", "") not in ("", "0")

OK = "LLM_SUCCESS"
INVALID = "LLM_PARAM_INVALID"
GONE = "LLM_KV_CACHE_NOT_EXIST"
UNLINKED = "LLM_NOT_YET_LINK"
LINK_FAILED = "LLM_LINK_FAILED"
TIMEOUT = "LLM_TIMEOUT"

Key = tuple[Any, ...]
Info = Union[tuple[int, str], tuple[int, None]]
Range = Optional[tuple[int, int]]


def options(*, accessible: Any = False, pool: Any = POOL, listen: Any = None, **extra: Any) -> dict[str, str]:
    """Options of a small engine; `extra` uses `__` for the dot of a key."""
    size = json.dumps({"memory_size": pool, "page_shift": 12})
    made = {
        "llm.EnableCacheManager": "1",
        "ge.exec.deviceId": "0",
        "llm.MemPoolConfig": size,
        "llm.HostMemPoolConfig": size,
        "llm.EnableRemoteCacheAccessible": "1" if accessible else "0",
    }
    if listen is not None:
        made["llm.listenIpInfo"] = listen
    made.update({key.replace("__", "."): str(value) for key, value in extra.items()})
    return made


def kv_options(*, pool: Any = POOL, listen: Any = None, **extra: Any) -> dict[str, str]:
    """Options of a small engine without the cache manager, as clients write them."""
    made = {"ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "5000", "ge.flowGraphMemMaxSize": str(pool)}
    if listen is not None:
        made["llm.listenIpInfo"] = listen
    made.update({key.replace("__", "."): str(value) for key, value in extra.items()})
    return made


def by_request(cluster: int, req: int, model: int = 0, prefix: int = UINT64_MAX) -> Key:
    """A request key, or a prefix key."""
    return ("request", cluster, req, model, prefix)


def by_slot(cluster: int, cache: int, index: int = 0) -> Key:
    """A key by cache id and slot."""
    return ("slot", cluster, cache, index)


def by_blocks(cluster: int, model: int = 0) -> Key:
    """The key of a blocks cache."""
    return ("blocks", cluster, model)


def _key(key: Sequence[Any]) -> Any:
    kinds = {"slot": CacheKeyByIdAndIndex, "blocks": BlocksCacheKey}
    if key[0] == "request":
        return CacheKey(key[1], key[2], key[3], key[4])
    return kinds[key[0]](*key[1:])


def pattern(seed: int, tensors: int, rows: int, row_bytes: int) -> list[np.ndarray]:
    """The bytes that `fill(name, seed)` writes: another array for every tensor."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (rows, row_bytes), dtype=np.uint8) for _ in range(tensors)]


def equal(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    """Whether two lists of arrays hold the same bytes, and any."""
    assert left
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right))


class Held:
    """A cache of an `End`: the handle, its geometry, and the arrays behind registered memory."""

    def __init__(self, handle: Any, arrays: list[np.ndarray]) -> None:
        self.handle = handle
        self.arrays = arrays  # over the very memory of the cache


def _addresses(handle: Any) -> list[int]:
    if isinstance(handle, KvCache):
        (addresses,) = handle.per_device_tensor_addrs
        return addresses
    return list(handle.tensor_addrs)


def _over(address: int, rows: int, row_bytes: int) -> np.ndarray:
    import ctypes  # noqa: PLC0415

    raw: Any = (ctypes.c_ubyte * (rows * row_bytes)).from_address(address)
    return np.frombuffer(raw, dtype=np.uint8).reshape(rows, row_bytes)


class End:
    """One engine and its caches, in the process that holds this object."""

    def __init__(self) -> None:
        self.dist: Any = None
        self.held: dict[str, Held] = {}
        self.many: list[Any] = []

    @property
    def manager(self) -> Any:
        """The manager of its mode."""
        return self.dist.cache_manager if self.dist._enable_cache_mgr else self.dist.kv_cache_manager

    # -- life ----------------------------------------------------------------------------------------------------

    def init(self, settings: dict[str, str], cluster: int = 1, role: str = "PROMPT") -> str | None:
        """Open an engine; returns where it listens."""
        if self.dist is None or self.dist.cluster_id != cluster:
            assert LLMDataDist.llm_engine_instance is None, "an engine is open already"
            self.dist = LLMDataDist(LLMRole[role], cluster)
        self.dist.init(settings)
        return self.dist.listen_ip_info

    def finalize(self) -> None:
        """Close the engine and forget its caches."""
        self.held.clear()
        while self.many:
            self.many.pop().close()
        if self.dist is not None:
            self.dist.finalize()

    def reset(self) -> None:
        """Back to a process without an engine."""
        self.finalize()
        self.dist = None

    def listening(self) -> Any:
        """Where peers are listened for."""
        return self.dist.listen_ip_info

    def switch_role(self, role: str, switch: dict[str, str] | None = None) -> None:
        """`switch_role`."""
        self.dist.switch_role(LLMRole[role], switch)

    def stats(self) -> Any:
        """The engine's counters."""
        return self.dist.stats()

    def links(self) -> list[Any]:
        """The links the statistics show."""
        return self.dist.stats()["links"]

    def used(self, pool: str = "device") -> int:
        """Bytes taken from a pool."""
        return self.dist.stats()["pools"][pool]["used_bytes"]

    # -- caches --------------------------------------------------------------------------------------------------

    def allocate(
        self,
        name: str,
        rows: int = 4,
        row_bytes: int = 256,
        tensors: int = 2,
        *,
        host: bool = False,
        blocks: bool = False,
        keys: Sequence[Sequence[Any]] = (),
        seed: int | None = None,
    ) -> int:
        """Allocate a cache under a name; returns its id. `keys`: of a batch cache one a slot, of a blocks cache one."""
        where = Placement.HOST if host else Placement.DEVICE
        desc = CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8, where)
        manager = self.manager
        if blocks:
            handle = manager.allocate_blocks_cache(desc, *map(_key, keys))
        else:
            handle = manager.allocate_cache(desc, [_key(key) for key in keys])
        self.held[name] = Held(handle, [_over(address, rows, row_bytes) for address in _addresses(handle)])
        if seed is not None:
            self.fill(name, seed)
        return handle.cache_id

    def register(
        self,
        name: str,
        rows: int = 4,
        row_bytes: int = 256,
        tensors: int = 2,
        *,
        host: bool = False,
        blocks: bool = False,
        keys: Sequence[Sequence[Any]] = (),
        accessible: bool | None = None,
        seed: int | None = None,
    ) -> int:
        """Register memory of this process under a name; returns its id."""
        where = Placement.HOST if host else Placement.DEVICE
        desc = CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8, where)
        arrays = [np.zeros((rows, row_bytes), dtype=np.uint8) for _ in range(tensors)]
        addrs = [int(array.ctypes.data) for array in arrays]
        manager = self.dist.cache_manager
        if blocks:
            key = _key(keys[0]) if keys else None
            handle = manager.register_blocks_cache(desc, addrs, key, remote_accessible=accessible)
        else:
            given = [_key(key) for key in keys]
            handle = manager.register_cache(desc, addrs, given, remote_accessible=accessible)
        self.held[name] = Held(handle, arrays)
        if seed is not None:
            self.fill(name, seed)
        return handle.cache_id

    def allocate_kv(
        self,
        name: str,
        rows: int = 4,
        row_bytes: int = 256,
        tensors: int = 2,
        *,
        blocks: bool = False,
        keys: Sequence[Sequence[Any]] = (),
        seed: int | None = None,
    ) -> int:
        """`allocate` by the `KvCacheManager` (an engine without `llm.EnableCacheManager`)."""
        desc = CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8)
        manager = self.dist.kv_cache_manager
        if blocks:
            handle = manager.allocate_blocks_cache(desc, *map(_key, keys))
        else:
            handle = manager.allocate_cache(desc, [_key(key) for key in keys])
        (addrs,) = handle.per_device_tensor_addrs
        self.held[name] = Held(handle, [_over(address, rows, row_bytes) for address in addrs])
        if seed is not None:
            self.fill(name, seed)
        return handle.cache_id

    def deallocate_kv(self, name: str) -> None:
        """`deallocate` by the `KvCacheManager`."""
        self.held[name].arrays = []
        self.dist.kv_cache_manager.deallocate_cache(self.held[name].handle)

    def remove_key_kv(self, key: Sequence[Any]) -> None:
        """`remove_key` by the `KvCacheManager`."""
        self.dist.kv_cache_manager.remove_cache_key(_key(key))

    def pull_kv(self, key: Sequence[Any], name: str, batch: int = 0, size: int = -1, **kwargs: Any) -> None:
        """`pull_cache` by the `KvCacheManager`."""
        self.dist.kv_cache_manager.pull_cache(_key(key), self.held[name].handle, batch, size, **_layers(kwargs))

    def held_id(self, name: str) -> int:
        """The id of a cache."""
        return self.held[name].handle.cache_id

    def make(self, name: str, *args: Any, registered: bool = False, **kwargs: Any) -> int:
        """`register` with remote access, or `allocate`."""
        if registered:
            kwargs.setdefault("accessible", True)
            return self.register(name, *args, **kwargs)
        return self.allocate(name, *args, **kwargs)

    def deallocate(self, name: str) -> None:
        """Let go of an allocated cache; the name stays, for calls with what it was."""
        held = self.held[name]
        held.arrays = []
        manager = self.manager
        of_blocks = getattr(held.handle, "is_blocks_cache", False)
        (manager.deallocate_blocks_cache if of_blocks else manager.deallocate_cache)(held.handle)

    def unregister(self, name: str) -> None:
        """Remove a registered cache."""
        self.dist.cache_manager.unregister_cache(self.held[name].handle.cache_id)

    def forget(self, name: str) -> None:
        """Give the arrays behind a registered cache back to the system, as far as Python does."""
        del self.held[name]

    def remove_key(self, key: Sequence[Any]) -> None:
        """Unbind a key."""
        self.manager.remove_cache_key(_key(key))

    def fill(self, name: str, seed: int) -> None:
        """Write `pattern(seed, …)`."""
        arrays = self.held[name].arrays
        for array, made in zip(arrays, pattern(seed, len(arrays), *arrays[0].shape)):
            array[:] = made

    def paint(self, name: str, value: int) -> None:
        """Write one value everywhere."""
        for array in self.held[name].arrays:
            array[:] = value

    def read(self, name: str) -> list[np.ndarray]:
        """A copy of the bytes."""
        return [array.copy() for array in self.held[name].arrays]

    def addresses(self, name: str) -> list[int]:
        """Where the tensors of a cache start."""
        return _addresses(self.held[name].handle)

    def copy_blocks(self, name: str, pairs: Sequence[Sequence[int]]) -> None:
        """`copy_blocks` of one block to one other, pair by pair."""
        self.dist.cache_manager.copy_blocks(self.held[name].handle, {src: [dst] for src, dst in pairs})

    def copy_cache(self, dst: str, src: str, dst_row: int = 0, src_row: int = 0) -> None:
        """`copy_cache` of a slot."""
        self.dist.cache_manager.copy_cache(self.held[dst].handle, self.held[src].handle, dst_row, src_row)

    def swap_blocks(self, src: str, dst: str, pairs: Sequence[Sequence[int]]) -> None:
        """`swap_blocks`, pair by pair."""
        self.dist.cache_manager.swap_blocks(self.held[src].handle, self.held[dst].handle, dict(pairs))

    # -- links ---------------------------------------------------------------------------------------------------

    def link_clusters(self, peers: Sequence[Any], timeout: int = 5000) -> tuple[str, list[str]]:
        """`link_clusters` of `(cluster, "ip:port" or several)`; names of codes."""
        return _names(self.dist.link_clusters([_info(peer) for peer in peers], timeout))

    def unlink_clusters(
        self,
        peers: Sequence[Any],
        timeout: int = 5000,
        force: bool = False,
    ) -> tuple[str, list[str]]:
        """`unlink_clusters`; names of codes."""
        return _names(self.dist.unlink_clusters([_info(peer) for peer in peers], timeout, force))

    def link(self, name: str, ranks: dict[Any, int], table: str) -> int:
        """`link` with a rank table."""
        return self.dist.link(name, {int(cluster): rank for cluster, rank in ranks.items()}, table)

    def unlink(self, comm: int) -> None:
        """`unlink`."""
        self.dist.unlink(comm)

    def status(self, comm: int) -> str:
        """`query_register_mem_status`, by name."""
        return self.dist.query_register_mem_status(comm_id=comm).name

    def settled(self, comm: int, limit: float = LIMIT) -> str:
        """The status, once it is no longer PREPARING."""
        until = time.monotonic() + limit
        while (status := self.status(comm)) == "PREPARING" and time.monotonic() < until:
            time.sleep(0.005)
        return status

    # -- transfers -----------------------------------------------------------------------------------------------

    def pull_cache(self, key: Sequence[Any], name: str, batch: int = 0, size: int = -1, **kwargs: Any) -> None:
        """`pull_cache`; layer ranges as pairs under `src` and `dst`, layers of `n` tensors."""
        manager = self.manager
        manager.pull_cache(_key(key), self.held[name].handle, batch, size, **_layers(kwargs))

    def pull_blocks(
        self, key: Sequence[Any], name: str, src: Sequence[int] = (), dst: Sequence[int] = (), **kwargs: Any
    ) -> None:
        """`pull_blocks`; layer ranges under `src_layers` and `dst_layers`."""
        manager = self.manager
        manager.pull_blocks(_key(key), self.held[name].handle, list(src), list(dst), **_layers(kwargs))

    def push_cache(self, key: Sequence[Any], name: str, batch: int = 0, **kwargs: Any) -> None:
        """`push_cache`."""
        self.dist.cache_manager.push_cache(_key(key), self.held[name].handle, batch, **_layers(kwargs))

    def push_blocks(self, key: Sequence[Any], name: str, src: Sequence[int], dst: Sequence[int], **kwargs: Any) -> None:
        """`push_blocks`."""
        handle = self.held[name].handle
        self.dist.cache_manager.push_blocks(_key(key), handle, list(src), list(dst), **_layers(kwargs))

    def timed(self, call: str, *args: Any, **kwargs: Any) -> tuple[str, float, str]:
        """The outcome of a call, its seconds, and the text of its error."""
        began = time.monotonic()
        code, text = outcome(lambda: getattr(self, call)(*args, **kwargs))
        return code, time.monotonic() - began, text

    def pull_while(self, running: str, pulled: str, cluster: int, name: str, pause: float = 0.002) -> dict[str, Any]:
        """Pull the blocks cache of `cluster` into `name`, again and again, until the file `running` is gone.

        Creates the file `pulled` after the first pull. Returns how many pulls there were, how many brought other bytes
        than the first one, the seconds of the slowest, and how often each outcome came, with the first error's text.
        """
        rows = range(len(self.held[name].arrays[0]))
        right: Optional[list[np.ndarray]] = None
        told: dict[str, Any] = {"pulls": 0, "wrong": 0, "slowest": 0.0, "codes": {}, "text": ""}
        until = time.monotonic() + 6 * LIMIT
        while Path(running).exists() and time.monotonic() < until:
            self.paint(name, 0)
            code, seconds, text = self.timed("pull_blocks", by_blocks(cluster), name, rows, rows)
            if code == OK:
                right = self.read(name) if right is None else right
                told["wrong"] += not equal(right, self.held[name].arrays)
            told["pulls"] += 1
            told["slowest"] = max(told["slowest"], seconds)
            told["codes"][code] = told["codes"].get(code, 0) + 1
            told["text"] = told["text"] or text
            Path(pulled).touch()
            time.sleep(pause)
        return told

    def at_once(self, calls: Sequence[Sequence[Any]], repeat: int = 1) -> list[str]:
        """Every call `[name, args, kwargs]` in a thread of its own, all at once, `repeat` times; the last outcomes."""
        codes = [""] * len(calls)
        gate = threading.Barrier(len(calls))

        def work(number: int) -> None:
            call, args, kwargs = calls[number]
            for _ in range(repeat):
                gate.wait(LIMIT)
                codes[number] = outcome(lambda: getattr(self, call)(*args, **kwargs))[0]

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT)
        assert not any(thread.is_alive() for thread in threads), "a thread never came back"
        return codes

    # -- the process ---------------------------------------------------------------------------------------------

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def open_files(self, count: int) -> str:
        """Open so many files at once, as the application would; the error, or nothing."""
        with ExitStack() as held:
            try:
                for _ in range(count):
                    held.enter_context(Path("/dev/null").open("rb"))
            except OSError as error:
                return str(error)
        return ""

    def become(self, user: int) -> None:
        """Be another user from now on, one that the kernel lets look at its own files in /proc."""
        import ctypes  # noqa: PLC0415
        import encodings.idna  # noqa: F401, PLC0415

        pattern(0, 1, 1, 1)  # numpy imports parts of itself late, from files that the user may not be able to read
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE

    def rest(self, seconds: float) -> float:
        """Do nothing; returns the CPU seconds the process used meanwhile."""
        before = resource.getrusage(resource.RUSAGE_SELF)
        time.sleep(seconds)
        after = resource.getrusage(resource.RUSAGE_SELF)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def limit_memory(self, more: int | None) -> None:
        """Let the process have `more` bytes of address space than now (RLIMIT_AS), or as much as there is."""
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = most
        if more is not None:
            with Path("/proc/self/statm").open() as statm:
                limit = int(statm.read().split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))

    def short_of_memory(self, key: Sequence[Any], name: str, count: int, way: str, rooms: Sequence[int]) -> list[str]:
        """The outcomes of a pull or push of `count` blocks with `rooms` MiB of address space, until one succeeds."""
        order = np.random.default_rng(3).permutation(count)
        src, dst = order.tolist(), order[::-1].tolist()
        codes: list[str] = []
        call = self.manager.push_blocks if way == "push" else self.manager.pull_blocks
        handle, named = self.held[name].handle, _key(key)
        for room in rooms:
            self.limit_memory(room << 20)
            codes.append(code(call, named, handle, src, dst, tensor_num_per_layer=1))
            self.limit_memory(None)
            if codes[-1] == OK:
                break
        return codes

    def resources(self) -> dict[str, int]:
        """Threads, descriptors, mappings and resident bytes of the process."""
        with Path("/proc/self/statm").open() as statm:
            resident = int(statm.read().split()[1]) * 4096
        return {
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "mappings": Path("/proc/self/maps").read_text().count("\n"),
            "resident": resident,
        }

    def engines(self, count: int, first: int, settings: dict[str, str], row_bytes: int) -> list[tuple[int, str]]:
        """Open `count` bare engines, each with a cache under key 1; returns clusters and where they listen."""
        made: list[tuple[int, Any]] = []
        for cluster in range(first, first + count):
            native = _core.DataDist(LLMRole.PROMPT, cluster, {"llm.Role": "Prompt", **settings})
            self.many.append(native)
            desc = CacheDesc(1, [1, row_bytes], DataType.DT_UINT8, Placement.DEVICE)
            (address,) = native.allocate_cache(desc, [CacheKey(cluster, 1)]).tensor_addrs()
            _over(address, 1, row_bytes)[:] = pattern(cluster, 1, 1, row_bytes)[0]
            made.append((cluster, native.listening()))
        return made

    def hatch(self, settings: dict[str, str], cluster: int, rows: int, row_bytes: int) -> tuple[int, str]:
        """Fork a process without an engine and open one there, with caches 1 (batch) and 2 (blocks) of pattern 1.

        Returns its process id and where it listens. It only waits to be killed.
        """
        assert self.dist is None, "a process with an engine is no parent"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                address = self.init(settings, cluster)
                key = by_request(cluster, 1)
                self.allocate("batch", rows, row_bytes, 2, keys=[key], seed=1)
                self.allocate("blocks", rows, row_bytes, 2, blocks=True, keys=[by_blocks(cluster)], seed=2)
                os.write(writing, str(address).encode())
                os.close(writing)
                while True:
                    signal.pause()
            os._exit(1)
        os.close(writing)
        address = os.read(reading, 100).decode()
        os.close(reading)
        assert address, "the hatched process died"
        return child, address

    def linger(self, fork: bool) -> int:
        """Start a child that outlives this process: a fork, or a program that inherits what it can. Its process id."""
        if not fork:
            return subprocess.Popen(["sleep", "30"], close_fds=False).pid  # noqa: S607
        child = os.fork()
        if child == 0:
            for _ in range(300):
                time.sleep(0.1)
            os._exit(0)
        return child

    def fork_and_try(self, call: str, *args: Any) -> tuple[int, str, float]:
        """Fork with the engine open; the child makes the call and leaves by `sys.exit`.

        Returns its exit status, the outcome it saw, and how long it lived.
        """
        reading, writing = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            code, text = outcome(lambda: getattr(self, call)(*args))
            os.write(writing, f"{code}: {text}".encode()[:4000])
            os.close(writing)
            atexit._run_exitfuncs()
            os._exit(7)
        os.close(writing)
        told = b""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until and select.select([reading], [], [], 1)[0]:
            more = os.read(reading, 4096)
            if not more:
                break
            told += more
        os.close(reading)
        status = None
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -1, told.decode(), time.monotonic() - began
        return os.waitstatus_to_exitcode(status), told.decode(), time.monotonic() - began


def _names(result: tuple[LLMStatusCode, list[LLMStatusCode]]) -> tuple[str, list[str]]:
    return result[0].name, [code.name for code in result[1]]


def split(address: str) -> tuple[str, int]:
    """Host and port of `"1.2.3.4:5"` or `"[::1]:5"`."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


def _info(peer: Sequence[Any]) -> LLMClusterInfo:
    info = LLMClusterInfo()
    cluster, addresses = peer
    info.remote_cluster_id = cluster
    info.append_local_ip_info("127.0.0.1", 0)
    for address in [addresses] if isinstance(addresses, str) else addresses or []:
        info.append_remote_ip_info(*split(address))
    return info


def _layers(kwargs: dict[str, Any]) -> dict[str, Any]:
    names = {"src_layers": "src_layer_range", "dst_layers": "dst_layer_range", "n": "tensor_num_per_layer"}
    made = {names.get(name, name): value for name, value in kwargs.items()}
    for name in ("src_layer_range", "dst_layer_range"):
        if made.get(name) is not None:
            made[name] = range(*made[name])
    return made


class Refused(Exception):  # noqa: N818
    """What a call of a peer raised."""

    def __init__(self, kind: str, code: str, text: str, where: str) -> None:
        super().__init__(f"{kind} {code}: {text}\n{where}")
        self.kind, self.code, self.text = kind, code, text


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """The name of the status code a call ends with, or of another exception's class, and the text."""
    try:
        call()
    except LLMException as error:
        return error.status_code.name, str(error)
    except Refused as error:
        return error.code or error.kind, error.text
    except Exception as error:  # noqa: BLE001
        return type(error).__name__, str(error)
    return OK, ""


def code(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The name of the status code a call ends with, or of another exception's class."""
    return outcome(lambda: call(*args, **kwargs))[0]


def eventually(holds: Callable[[], Any], limit: float = LIMIT, what: str = "it") -> Any:
    """Wait until `holds()` is true; fail after the limit."""
    until = time.monotonic() + limit
    while True:
        if value := holds():
            return value
        assert time.monotonic() < until, f"{what} did not come true in {limit} s"
        time.sleep(0.005)


# -- the other process ---------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {"bytes": base64.b64encode(value.tobytes()).decode(), "shape": value.shape}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value


def _rich(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"bytes", "shape"}:
        return np.frombuffer(base64.b64decode(value["bytes"]), dtype=np.uint8).reshape(value["shape"])
    if isinstance(value, dict) and set(value) == {"tuple"}:
        return tuple(_rich(one) for one in value["tuple"])
    if isinstance(value, list):
        return [_rich(one) for one in value]
    return value


class Answer:
    """A call under way in a peer."""

    def __init__(self, peer: Peer, call: str) -> None:
        self.peer, self.call = peer, call

    def result(self, limit: float = LIMIT) -> Any:
        """What the call returned; raises `Refused` for what it raised."""
        told = self.peer._receive(self.call, limit)
        if "error" in told:
            raise Refused(told["error"], told.get("code", ""), told["text"], told["where"])
        return _rich(told["value"])


class Peer:
    """An `End` in a process of its own. Calls it does not know itself are the other's."""

    def __init__(self, *prefix: str, environment: dict[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "LLM_DATADIST_"))}
        self.process = subprocess.Popen(  # noqa: S603
            [*prefix, sys.executable, "-W", "error", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**clean, **(environment or {})},
            start_new_session=True,
        )
        self.spoiled = bool(prefix or environment)  # not to be used by another test
        self.address = ""
        self.cluster = -1
        self._rest = b""

    def open(self, settings: dict[str, str] | None = None, cluster: int = 2, role: str = "PROMPT") -> Peer:
        """Initialise its engine; it listens at a free port of 127.0.0.1 unless the options say otherwise."""
        chosen = options() if settings is None else settings
        self.address = self.begin("init", {"llm.listenIpInfo": "127.0.0.1:0", **chosen}, cluster, role).result() or ""
        self.cluster = cluster
        return self

    @property
    def at(self) -> tuple[int, str]:
        """What `link_clusters` takes."""
        return self.cluster, self.address

    def begin(self, call: str, *args: Any, **kwargs: Any) -> Answer:
        """Start a call without waiting for its end."""
        line = json.dumps([call, args, kwargs], default=list) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"{call}: the peer is gone\n{self.said()}") from None
        return Answer(self, call)

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if call.startswith("_") or not hasattr(End, call):
            raise AttributeError(call)
        return lambda *args, **kwargs: self.begin(call, *args, **kwargs).result()

    def _receive(self, call: str, limit: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        until = time.monotonic() + limit
        while b"\n" not in self._rest:
            left = until - time.monotonic()
            # `select` knows no descriptor above 1,023, and a test may hold more.
            poll = select.poll()
            poll.register(self.process.stdout, select.POLLIN)
            if left <= 0 or not poll.poll(1000 * left):
                self.spoiled = True
                raise AssertionError(f"{call}: no answer within {limit} s\n{self.said()}")
            more = os.read(self.process.stdout.fileno(), 1 << 20)
            if not more:
                self.spoiled = True
                raise AssertionError(f"{call}: the peer died with {self.process.wait(LIMIT)}\n{self.said()}")
            self._rest += more
        line, self._rest = self._rest.split(b"\n", 1)
        told: dict[str, Any] = json.loads(line)
        return told

    def said(self) -> str:
        """What it wrote to its standard output and error."""
        # Not by seek and read: the process shares the position, and would write over what it wrote before.
        log = self.log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")[-20000:]

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Stop it (SIGSTOP), and wait until it is."""
        self.spoiled = True
        self.signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        eventually(lambda: state.read_text().rsplit(")", 1)[1].split()[0] == "T", what="the stop")

    def go_on(self) -> None:
        """Let it run again."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without warning, and reap it."""
        self.spoiled = True
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()

    def close(self) -> None:
        """Kill it and forget what it said."""
        self.kill()
        self.log.close()

    def __enter__(self) -> Peer:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ends:
    """The ends one test uses: at most one engine here, any number of peers. All are put away afterwards.

    A peer that comes through a test unharmed serves the next one: starting an interpreter is slow.
    """

    idle: ClassVar[list[Peer]] = []

    def __init__(self) -> None:
        self.here = End()
        self.busy: list[Peer] = []

    def near(self, settings: dict[str, str] | None = None, cluster: int = 1, role: str = "DECODER") -> End:
        """The end in this process, initialised."""
        self.here.init(options() if settings is None else settings, cluster, role)
        return self.here

    def spare(self) -> Peer:
        """A process without an engine."""
        self.busy.append(Ends.idle.pop() if Ends.idle else Peer())
        return self.busy[-1]

    def adopt(self, peer: Peer) -> Peer:
        """See to the end of a peer that was started specially."""
        self.busy.append(peer)
        return peer

    def peer(self, settings: dict[str, str] | None = None, cluster: int = 2, role: str = "PROMPT") -> Peer:
        """Another process with an engine that listens."""
        return self.spare().open(settings, cluster, role)

    def pair(self, **given: Any) -> tuple[End, Peer]:
        """Clusters 1, here, and 2, a peer, with equal options; 1 has linked to 2."""
        peer, near = self.peer(options(**given)), self.near(options(**given))
        linked(near, peer)
        return near, peer

    def __enter__(self) -> Ends:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.busy:
            if peer.spoiled:
                peer.close()
        self.here.reset()
        try:
            for peer in [peer for peer in self.busy if not peer.spoiled]:
                peer.reset()
                Ends.idle.append(peer)
        finally:
            for peer in self.busy:
                if peer not in Ends.idle and not peer.log.closed:
                    peer.close()


@atexit.register
def _send_home() -> None:
    while Ends.idle:
        Ends.idle.pop().close()


def linked(near: Any, *far: Peer) -> None:
    """Link `near` to peers; all must succeed."""
    result = near.link_clusters([peer.at for peer in far])
    assert result[0] == OK, result


class Stranger:
    """A listener that is no engine: it accepts and never says a word, or says `words` and closes."""

    def __init__(self, words: bytes | None = None, port: int = 0) -> None:
        self.door = socket.create_server(("127.0.0.1", port))
        self.words = words
        self.held: list[socket.socket] = []
        self.at = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self.door.accept()
            except OSError:
                return
            self.held.append(caller)
            if self.words is not None:
                with suppress(OSError):
                    caller.sendall(self.words)
                caller.close()

    def __enter__(self) -> Stranger:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.door.shutdown(socket.SHUT_RDWR)
        self.door.close()
        self.thread.join(5)
        for caller in self.held:
            caller.close()


class Proxy:
    """A wire between two ends that can be slow, deaf or cut. Only for links over sockets."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.door = socket.create_server(("127.0.0.1", 0))
        self.at = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.left: dict[str, float] = {"up": float("inf"), "down": float("inf")}  # bytes that still pass
        self.cut = False  # what to do then: cut, or say nothing more
        self.sockets: list[socket.socket] = []
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    def allow(self, way: str, count: float, *, cut: bool = False) -> None:
        """Let `count` more bytes pass `"up"` to the listener, or `"down"` from it."""
        self.cut, self.left[way] = cut, count

    def deafen(self) -> None:
        """Let nothing pass any more, and close nothing."""
        self.left.update(up=0, down=0)

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self.door.accept()
            except OSError:
                return
            callee = socket.create_connection(split(self.to), timeout=LIMIT)
            callee.settimeout(None)
            self.sockets += [caller, callee]
            for way, source, target in (("up", caller, callee), ("down", callee, caller)):
                thread = threading.Thread(target=self._carry, args=(way, source, target), daemon=True)
                self.threads.append(thread)
                thread.start()

    def _carry(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed = data[: int(min(self.left[way], len(data)))]
                self.left[way] -= len(passed)
                target.sendall(passed)
                if len(passed) < len(data) and self.cut:
                    break
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for each in [self.door, *self.sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(5)
        for each in [self.door, *self.sockets]:
            each.close()


def free_ports(count: int = 12) -> int:
    """The first of `count` ports in a row that nobody listens at just now, and that the system gives to nobody."""
    chance = random.Random(time.time_ns() ^ os.getpid())  # noqa: S311
    while True:
        first = chance.randrange(12_000, 30_000)
        with ExitStack() as doors:
            try:
                for port in range(first, first + count):
                    doors.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
            return first


def free_port() -> int:
    """A port nobody listens at just now."""
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def _serve() -> None:
    """The loop of a peer: one JSON line per call, one per answer."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    end = End()
    while True:
        try:
            line = sys.stdin.readline()
            if not line:
                break
            call, args, kwargs = json.loads(line)
            told: dict[str, Any] = {"value": _plain(getattr(end, call)(*args, **kwargs))}
        except KeyboardInterrupt as error:
            told = {"error": "KeyboardInterrupt", "text": str(error), "where": traceback.format_exc()}
        except Exception as error:  # noqa: BLE001
            told = {"error": type(error).__name__, "text": str(error), "where": traceback.format_exc()}
            if isinstance(error, LLMException):
                told["code"] = error.status_code.name
        answers.write(json.dumps(told) + "\n")
        answers.flush()
    end.finalize()


if __name__ == "__main__":
    _serve()
