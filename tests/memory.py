"""Reads memory without the engine, and checks the errors and effects of refused calls.

Bytes are read through plain addresses with `ctypes`, never through the engine, so a copy is judged by what is in
memory. Not for: predicting results (that is `oracle.py`).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Cache, CacheDesc, DataType, KvCache, LLMException, LLMStatusCode, Placement
from peers import equal, pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llm_datadist.stats import Stats

UINT32_MAX = 2**32 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1


def at(address: int, length: int) -> np.ndarray:
    """The `length` bytes at `address`, as a writable array over that very memory."""
    return np.frombuffer((ctypes.c_ubyte * length).from_address(address), dtype=np.uint8)


def desc(rows: int = 4, row_bytes: int = 256, tensors: int = 2, placement: Placement = Placement.DEVICE) -> CacheDesc:
    """A descriptor counted in bytes: `rows` slots or blocks of `row_bytes` each."""
    return CacheDesc(tensors, [rows, row_bytes], DataType.DT_INT8, placement)


def tensors(cache: Cache | KvCache) -> list[np.ndarray]:
    """All tensors of a cache of one device as byte arrays shaped (rows, bytes of one row)."""
    size, rows = cache.cache_desc.size, cache.cache_desc.shape[0]
    (addresses,) = cache.per_device_tensor_addrs if isinstance(cache, KvCache) else (cache.tensor_addrs,)
    return [at(address, size).reshape(rows, size // rows) for address in addresses]


def fill(cache: Cache | KvCache, seed: int) -> list[np.ndarray]:
    """Write a pattern that differs in every tensor and row; return a copy of what was written."""
    memory = tensors(cache)
    for tensor, made in zip(memory, pattern(seed, len(memory), *memory[0].shape)):
        tensor[:] = made
    return contents(cache)


def contents(cache: Cache | KvCache) -> list[np.ndarray]:
    """A copy of every tensor's bytes."""
    return [tensor.copy() for tensor in tensors(cache)]


def same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    """Whether two lists of byte arrays hold equal bytes (and at least one byte)."""
    assert all(tensor.size for tensor in left)
    return equal(left, right)


class UserTensors:
    """Caller-owned tensors for CPU caches and registrations; keeps the memory alive."""

    def __init__(self, rows: int = 4, row_bytes: int = 256, count: int = 2, seed: int = 0) -> None:
        self.rows, self.row_bytes, self.count = rows, row_bytes, count
        self.arrays = pattern(seed, count, rows, row_bytes)
        self.addrs = [int(array.ctypes.data) for array in self.arrays]

    def describe(self, placement: Placement = Placement.HOST) -> CacheDesc:
        return desc(self.rows, self.row_bytes, self.count, placement)

    def cpu_cache(self) -> Cache:
        return Cache.create_cpu_cache(self.describe(), self.addrs)

    def snapshot(self) -> list[np.ndarray]:
        return [array.copy() for array in self.arrays]


def stats(manager: Any) -> Stats:
    """The counters of the engine of a manager."""
    return manager._datadist.stats()


def pools(manager: Any) -> dict[str, Any]:
    """Statistics of both pools; None for one that is not configured."""
    facts = stats(manager)["pools"]
    assert set(facts) <= {"device", "host"}
    return {name: facts.get(name) for name in ("device", "host")}


def pool_facts(manager: Any, name: str = "device") -> Any:
    return pools(manager)[name]


def swaps_in(manager: Any) -> dict[str, int]:
    """How often each path of swap-ins was used."""
    counts = stats(manager)["swap_in"]
    assert set(counts) == {"direct", "ring"}
    return counts


def used(manager: Any) -> dict[str, int | None]:
    """Bytes used in each pool; None for a pool that is not configured."""
    return {name: None if facts is None else facts["used_bytes"] for name, facts in pools(manager).items()}


@dataclass(frozen=True)
class Expected:
    """What a refused call must raise: one of `kinds`. An LLMException must have one of `codes` and the types `also`."""

    name: str
    kinds: tuple[type[BaseException], ...]
    codes: tuple[LLMStatusCode, ...] = ()
    also: tuple[type[BaseException], ...] = ()

    def __str__(self) -> str:
        return self.name

    def judge(self, error: BaseException) -> None:
        """Fail unless `error` is what was expected."""
        shown = f"{type(error).__name__}({error}) instead of {self.name}"
        assert isinstance(error, self.kinds), shown
        if isinstance(error, LLMException):
            assert LLMException in self.kinds, shown
            assert error.status_code in self.codes, f"{error.status_code}: {shown}"
            assert all(isinstance(error, kind) for kind in self.also), f"{type(error).__mro__}: {shown}"
        assert str(error).strip(), "the error has no text"


INVALID = LLMStatusCode.LLM_PARAM_INVALID
TE = Expected("TypeError", (TypeError,))
VE = Expected("ValueError", (ValueError,))
AE = Expected("AttributeError", (AttributeError,))
LE = Expected("LLMException(PARAM_INVALID)", (LLMException,), (INVALID,))
OOM = Expected("LLMException(OUT_OF_MEMORY)", (LLMException,), (LLMStatusCode.LLM_OUT_OF_MEMORY,))
GONE = Expected("LLMException(KV_CACHE_NOT_EXIST)", (LLMException,), (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST,))
MISMATCH = Expected("LLMException(PARAM_INVALID) that is a ValueError", (LLMException,), (INVALID,), (ValueError,))
# For an integer outside every machine width, where the contract only states a range, either error is correct.
WIDE = Expected("ValueError or LLMException(PARAM_INVALID)", (ValueError, LLMException), (INVALID,))


@contextmanager
def raising(expected: Expected) -> Iterator[None]:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (judged below)
        yield
    if isinstance(caught.value, (KeyboardInterrupt, SystemExit)):
        raise caught.value
    expected.judge(caught.value)


@contextmanager
def refused(
    manager: Any, expected: Expected, caches: Iterable[Cache] = (), users: Iterable[UserTensors] = ()
) -> Iterator[None]:
    """The block must raise `expected` and leave the pools and the bytes of `caches` and `users` as they were."""
    caches, users = list(caches), list(users)

    def memory() -> list[list[np.ndarray]]:
        return [contents(cache) for cache in caches] + [user.snapshot() for user in users]

    pools_before, bytes_before = used(manager), memory()
    with raising(expected):
        yield
    assert used(manager) == pools_before, "a refused call changed a pool"
    assert all(map(same, bytes_before, memory())), "a refused call changed bytes"


def in_fresh_process(code: str, timeout: float = 300.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a new interpreter, so that a crash cannot end the tests. Warnings are errors."""
    clean = {key: value for key, value in os.environ.items() if key != "ASCEND_GLOBAL_LOG_LEVEL"}
    command, env = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], {**clean, **environment}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=timeout, env=env)  # noqa: S603


def run_command(*arguments: str, **given: Any) -> subprocess.CompletedProcess[str]:
    """Run `python -m llm_datadist`, with both output streams in pipes unless `given` says otherwise."""
    command = [sys.executable, "-m", "llm_datadist", *arguments]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, check=False, text=True, timeout=60, **{**streams, **given})  # noqa: S603


# Code for a fresh process: `start` prints whether an engine with these options could be initialized.
STARTS = """
from llm_datadist import LLMDataDist, LLMException, LLMRole
def start(**extra):
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        dist.init({"llm.EnableCacheManager": "1", **{"llm." + key: text for key, text in extra.items()}})
    except LLMException as error:
        print(error.status_code.name, error)
    else:
        print("started")
        dist.finalize()
"""


def run_fresh(code: str, **environment: str) -> str:
    """Like `in_fresh_process`, but require status 0 and an empty standard error, and return the output."""
    done = in_fresh_process(code, **environment)
    assert done.returncode == 0, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.stderr == "", done.stderr
    return done.stdout


# The head of a program: `engine` opens an engine with one cache, whose slot 0 has a key.
ENGINE = """
import ctypes, os, signal, sys, warnings
from llm_datadist import *
warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)  # in a process with threads
OPTIONS = {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'}
DESC = CacheDesc(1, [4, 100], DataType.DT_INT8)
def engine(**more):
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init({**OPTIONS, **{"llm." + key: text for key, text in more.items()}})
    cache = dist.cache_manager.allocate_cache(DESC, [CacheKey(1, 1)])
    dist.cache_manager.copy_cache(cache, cache, 1, 0)
    return dist, cache
def ended(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def run_engine(code: str, **environment: str) -> str:
    """Run a program with the names of `ENGINE` in a new process. Return its output, with lines of the log."""
    return run_fresh(ENGINE + textwrap.dedent(code), **environment).strip()
