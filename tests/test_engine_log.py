"""Log lines of the engine's threads, passed to the logging of Python.

The engine logs a WARNING when a cache is registered under the key of a live one. Most tests use this line, because a
program can cause it at any time. Not for: levels and layout of the package's own lines (`test_logging.py`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import pytest

from llm_datadist import BlocksCacheKey, LLMDataDist, LLMException, _core, engine_log
from memory import UserTensors, desc, run_fresh
from peers import Ends, eventually, options

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 20.0


class Collector(logging.Handler):
    """A handler that keeps records, and runs code of a test inside the handler at the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        self.first: Callable[[], Any] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        if len(self.records) == 1:
            self.first()

    def texts(self) -> list[str]:
        return [record.getMessage() for record in self.records]

    def wait_for(self, *words: str, count: int = 1) -> list[logging.LogRecord]:
        """Wait until there are `count` records whose text has all `words`, and return them."""

        def found() -> list[logging.LogRecord]:
            return [of for of in self.records if all(word in of.getMessage() for word in words)]

        eventually(lambda: len(found()) >= count, LIMIT, f"{count} lines with {words}")
        return found()


@pytest.fixture
def collector() -> Iterator[Collector]:
    logger, collector = logging.getLogger("LLM_DATADIST"), Collector()
    level = logger.level
    logger.addHandler(collector)
    logger.setLevel(logging.WARNING)
    yield collector
    logger.removeHandler(collector)
    logger.setLevel(level)


OWN = UserTensors()


def register_twice(dist: LLMDataDist, times: int = 2) -> tuple[int, int]:
    """Register caches under one key. Return the ids of the last two."""
    register = dist.cache_manager.register_blocks_cache
    ids = [register(desc(), OWN.addrs, BlocksCacheKey(1, 5)).cache_id for _ in range(times)]
    return ids[-2], ids[-1]


def test_a_line_comes_without_another_call(dist: LLMDataDist, collector: Collector) -> None:
    before = time.time()
    old, new = register_twice(dist)
    (record,) = collector.wait_for("registered under")
    assert (record.levelname, record.name, record.process) == ("WARNING", "LLM_DATADIST", os.getpid())
    assert f"cache_id={new}" in record.getMessage()
    assert f"replaced_cache_id={old}" in record.getMessage()
    assert (record.funcName, record.filename) == ("llm_datadist.table", "table.rs")
    assert record.lineno > 0
    assert before - 0.01 <= record.created <= time.time() + 0.01
    assert 0 <= record.msecs < 1000
    assert "%" not in record.getMessage()
    register_twice(dist)
    assert len(collector.wait_for("registered under", count=3)) == 3, "one for the third, one for the fourth"


def test_a_failed_copy_leaves_queued_lines_to_their_thread(dist: LLMDataDist, collector: Collector) -> None:
    """Only pulls and pushes pass the queued lines on before they return."""
    cache = dist.cache_manager.allocate_blocks_cache(desc())
    with engine_log._lock:  # the thread `llm-log` cannot take the line meanwhile
        register_twice(dist)
        with pytest.raises(LLMException):
            dist.cache_manager.copy_blocks(cache, {10**6: [0]})
        assert not [text for text in collector.texts() if "registered under" in text]
    collector.wait_for("registered under")


def test_lines_of_links_come_with_the_call_and_between_calls(collector: Collector) -> None:
    logging.getLogger("LLM_DATADIST").setLevel(logging.INFO)
    with Ends() as ends:
        remote = ends.peer(options())
        local = ends.local(options(llm__LinkHeartbeat=50, llm__LinkSilence=200))
        assert local.link_clusters([remote.at])[0] == "LLM_SUCCESS"
        lines = [of.getMessage() for of in collector.records if of.funcName == "llm_datadist.links"]
        assert any("cluster 2" in line for line in lines), "the lines about a call are there when it returns"
        remote.kill()
        (record, *_) = collector.wait_for(f"the link to cluster {remote.cluster} broke")
        assert record.threadName.startswith("llm-")
        assert record.threadName != "llm-log", "the thread that emitted it, not the one that handed it over"


REGISTER_TWICE = """
import array, logging, os, sys, threading, warnings
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMRole
own = array.array("b", bytes(400))
def opened():
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init({"llm.EnableCacheManager": "1"})
    return dist
def twice(dist):
    for _ in range(2):
        dist.cache_manager.register_blocks_cache(
            CacheDesc(1, [4, 100], DataType.DT_INT8), [own.buffer_info()[0]], BlocksCacheKey(1, 5))
"""


def test_by_default_warnings_are_hidden_and_asked_for_shown() -> None:
    code = REGISTER_TWICE + "twice(opened())"
    assert run_fresh(code) == ""
    shown = run_fresh(code, ASCEND_GLOBAL_LOG_LEVEL="2")
    # The line is logged even if the process ends at once, without `finalize`.
    assert shown.startswith("[WARNING] LLM_DATADIST("), shown
    assert shown.count("\n") == 1
    assert "replaced_cache_id=1" in shown


def log_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "llm-log"]


def test_the_thread_lives_as_long_as_the_engine(start: Callable[..., LLMDataDist]) -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        eventually(lambda: not log_threads(), what="the end of the thread")
        dist = start()
        (thread,) = log_threads()
        assert thread.daemon
        dist.finalize()
    with pytest.raises(LLMException):
        start({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": "x"})
    eventually(lambda: not log_threads(), what="the end of the thread")
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    engine_log.stop()
    engine_log.drain()
    assert _core.take_log() == (0, [])


def test_log_that_nobody_reads_is_bounded(dist: LLMDataDist, collector: Collector) -> None:
    waiting = 1024  # lines that the queue holds
    entered, go_on = threading.Event(), threading.Event()
    collector.first = lambda: (entered.set(), go_on.wait(LIMIT))
    register_twice(dist)
    assert entered.wait(LIMIT)
    # While the handler blocks, the engine continues, and calls that pass log lines return as well.
    register_twice(dist, 3001)
    dist.stats()
    assert len(collector.records) == 1
    go_on.set()
    (dropped,) = collector.wait_for("lines of the engine's log were dropped")
    assert int(dropped.getMessage().split()[0]) == 3001 - waiting
    assert len(collector.wait_for("registered under", count=1 + waiting)) == 1 + waiting
    assert collector.texts()[-1].endswith(f"cache_id={3003}, replaced_cache_id={3002}"), "the newest are kept"


def test_a_handler_may_call_the_engine_and_may_fail(dist: LLMDataDist, collector: Collector) -> None:
    seen: list[Any] = []

    def failing() -> None:
        seen.append(dist.stats()["table"]["caches"])
        register_twice(dist)
        raise ValueError("a handler of the program")

    collector.first = failing
    register_twice(dist)
    collector.wait_for("registered under", count=3)
    assert seen == [2]
    register_twice(dist)
    collector.wait_for("registered under", count=5)


def test_finalize_in_a_handler_returns(start: Callable[..., LLMDataDist], collector: Collector) -> None:
    dist, done = start(), threading.Event()
    collector.first = lambda: (dist.finalize(), done.set())
    register_twice(dist)
    assert done.wait(LIMIT)
    register_twice(start())
    collector.wait_for("registered under", count=2)


def test_forked_child_logs_and_exits() -> None:
    """A child has no threads of its parent. The parent's lock, here held by a waiting handler, stays locked forever."""
    code = """
warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads, which is what is tried
entered, go_on = threading.Event(), threading.Event()
class Stuck(logging.Handler):
    def emit(self, record):
        if os.getpid() == parent:
            entered.set()
            assert go_on.wait(20)
        else:
            seen.append(record.getMessage())
            came.set()
parent, seen, came = os.getpid(), [], threading.Event()
logger = logging.getLogger("LLM_DATADIST")
logger.setLevel(logging.WARNING)
logger.propagate = False
logger.addHandler(Stuck())
dist = opened()
twice(dist)
assert entered.wait(20)
child = os.fork()
if child == 0:
    logger.handlers[0].createLock()  # the handler's own lock is logging's business
    status = 1
    try:
        assert not [thread for thread in threading.enumerate() if thread.name == "llm-log"]
        dist.finalize()
        other = opened()
        twice(other)
        assert came.wait(20)
        assert len(seen) == 1 and "replaced_cache_id=1" in seen[0], seen
        other.finalize()
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
go_on.set()
twice(dist)
dist.finalize()
assert not [thread for thread in threading.enumerate() if thread.name == "llm-log"]
print("both")
"""
    assert run_fresh(REGISTER_TWICE + code).strip() == "both"
