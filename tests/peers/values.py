"""Helpers for tests of links: options, keys, patterns of bytes, outcomes of calls, and waits."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

UINT64_MAX = 2**64 - 1
LIMIT = 60.0  # seconds: the limit of every wait of a test, even while other programs use all cores
GRACE = 5.0  # seconds that a call may exceed its limit, because a busy machine schedules threads late
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


def options(*, accessible: Any = False, pool: Any = POOL, listen: Any = None, **extra: Any) -> dict[str, str]:
    """Options of a small engine; `extra` uses `__` for the dot of a key."""
    size = json.dumps({"memory_size": pool, "page_shift": 12})
    made = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", "llm.MemPoolConfig": size}
    made |= {"llm.HostMemPoolConfig": size, "llm.EnableRemoteCacheAccessible": "1" if accessible else "0"}
    made |= {"llm.SyncKvCacheWaitTime": "5000"}  # the default of 1 s is short beside other programs
    return made | _more(listen, extra)


def kv_options(*, pool: Any = POOL, listen: Any = None, **extra: Any) -> dict[str, str]:
    """Options of a small engine without the cache manager, as clients write them."""
    made = {"ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "5000", "ge.flowGraphMemMaxSize": str(pool)}
    return made | _more(listen, extra)


def _more(listen: Any, extra: dict[str, Any]) -> dict[str, str]:
    made = {} if listen is None else {"llm.listenIpInfo": listen}
    return made | {key.replace("__", "."): str(value) for key, value in extra.items()}


def by_request(cluster: int, req: int, model: int = 0, prefix: int = UINT64_MAX) -> Key:
    """A request key, or a prefix key."""
    return ("request", cluster, req, model, prefix)


def by_slot(cluster: int, cache: int, index: int = 0) -> Key:
    """A key by cache id and slot."""
    return ("slot", cluster, cache, index)


def by_blocks(cluster: int, model: int = 0) -> Key:
    """The key of a blocks cache."""
    return ("blocks", cluster, model)


def cache_key(key: Sequence[Any]) -> Any:
    """The key object for what `by_request`, `by_slot` or `by_blocks` made."""
    kind, *fields = key
    return {"request": CacheKey, "slot": CacheKeyByIdAndIndex, "blocks": BlocksCacheKey}[kind](*fields)


def one_server(ip: str = "127.0.0.1", members: int = 2) -> str:
    """A rank table whose members, with ranks from 0 on, are on one server."""
    devices = [{"device_id": str(number), "rank_id": str(number)} for number in range(members)]
    return json.dumps({"server_count": "1", "server_list": [{"server_id": ip, "device": devices}]})


def pattern(seed: int, tensors: int, rows: int, row_bytes: int) -> list[np.ndarray]:
    """Return the bytes that `fill(name, seed)` writes. They differ in every tensor."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, 256, (rows, row_bytes), dtype=np.uint8) for _ in range(tensors)]


def equal(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    """Whether two lists of arrays have equal bytes, and at least one byte."""
    assert left
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right))


class Refused(Exception):  # noqa: N818
    """The exception that a call of a peer raised."""

    def __init__(self, kind: str, code: str, text: str, where: str) -> None:
        super().__init__(f"{kind} {code}: {text}\n{where}")
        self.kind, self.code, self.text = kind, code, text


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Make a call. Return the name of its status code, or of the class of another exception, and the text."""
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
    """The first of `outcome`."""
    return outcome(lambda: call(*args, **kwargs))[0]


def eventually(holds: Callable[[], Any], limit: float = LIMIT, what: str = "it") -> Any:
    """Wait until `holds()` is true; fail after the limit."""
    until = time.monotonic() + limit
    while True:
        if value := holds():
            return value
        assert time.monotonic() < until, f"{what} did not come true in {limit} s"
        time.sleep(0.005)


def stop_process(pid: int) -> None:
    """Send SIGSTOP, and wait until every thread of the process stands still, which takes a moment."""
    os.kill(pid, signal.SIGSTOP)

    def stands_still() -> bool:
        threads = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return bool(threads) and all(text.rsplit(")", 1)[1].split()[0] == "T" for text in threads)

    eventually(stands_still, what="the stop")


@contextmanager
def _threads(works: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Run each of `works` in its own thread, and join them after the block. Raises the first exception of a thread."""
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (raised below)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in threads), "a thread never came back"
    if errors:
        raise errors[0]


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work(0)` to `work(count - 1)` at once, each in its own thread, and return their results."""
    gate = threading.Barrier(count)
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        gate.wait(LIMIT)
        results[number] = work(number)

    with _threads([partial(run, number) for number in range(count)]):
        pass
    return results


@contextmanager
def meanwhile(*works: Callable[[], Any]) -> Iterator[None]:
    """Call each of `works` repeatedly, in its own thread, while the block runs. Raises the first exception of one."""
    stop = threading.Event()

    def repeat(work: Callable[[], Any]) -> None:
        while not stop.is_set():
            work()

    with _threads([partial(repeat, work) for work in works]):
        try:
            yield
        finally:
            stop.set()


def another_thread_runs(prepare: Callable[[], Callable[[], Any]], attempts: int = 50) -> bool:
    """Whether another thread has a turn while a call that `prepare` returns runs, so the call releases the GIL.

    The switch interval is so long that only a release of the GIL lets another thread run. It may not get a core at
    once, hence several attempts.
    """
    iterations = 0

    def other() -> None:
        nonlocal iterations
        iterations += 1
        time.sleep(0.0005)

    def ran() -> bool:
        call, before = prepare(), iterations
        call()
        return iterations != before

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        with meanwhile(other):
            eventually(lambda: iterations, what="the other thread")
            return any(ran() for _ in range(attempts))
    finally:
        sys.setswitchinterval(interval)
