"""Passes the log lines of the engine to the logger of the package.

Threads of the engine put lines into a queue and never call Python. Each line begins with the name of its engine. While
an engine is open, of either API, the daemon thread ``llm-log`` passes the queued lines of all engines to ``logging``.
Calls of the original's API that make or end links, and calls that fail, also pass them before they return. Levels,
layout and handlers are those of ``log``.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Optional

from llm_datadist import _core, log
from llm_datadist.threads import name_this_thread

__all__ = ["drain", "start", "stop"]

# Seconds that `drain` waits for another thread that is passing lines, and that `stop` waits for the thread `llm-log`.
# Both waits take microseconds, unless a handler of the program waits for the calling thread.
_TIMEOUT_S = 1.0

_lock = threading.RLock()  # re-entrant, for handlers and signal handlers that call the engine
_thread: Optional[threading.Thread] = None
_descriptor: Optional[int] = None
_engines = 0  # those for which `start` was called and `stop` was not


def drain() -> None:
    """Pass the queued lines to ``logging``, or wait up to a second for another thread that is doing so."""
    lock = _lock  # a handler may fork, and `_after_fork` gives the child a new lock
    if not lock.acquire(timeout=_TIMEOUT_S):
        return
    try:
        dropped, lines = _core.take_log()
        if dropped:
            log.warn("%s lines of the engine's log were dropped because the queue was full", dropped)
        for line in lines:
            _hand_over(*line)
    finally:
        lock.release()


def _hand_over(level: int, target: str, text: str, file: str, line: int, thread: str, time: float) -> None:
    logger = log.get_logger()
    if not logger.isEnabledFor(level):
        return
    record = logger.makeRecord(logger.name, level, file, line, text, (), None, func=target.replace("::", "."))
    # The time and the thread at which the engine emitted the line, not those at which it is passed on.
    record.relativeCreated += (time - record.created) * 1000
    record.created, record.msecs, record.threadName = time, time % 1 * 1000 // 1, thread
    logger.handle(record)


def start() -> None:
    """Start the thread ``llm-log`` for an engine, unless it is running.

    If that fails, log lines are passed during calls of the original's API only.
    """
    global _thread, _descriptor, _engines  # noqa: PLW0603  (the state of the module)
    with _lock:
        _engines += 1
        if _thread is not None:
            return
        try:
            descriptor = _core.open_log()
        except OSError as error:
            log.warn("engine log lines are delivered only during calls: %s", error)
            return
        thread = threading.Thread(target=_read, args=(descriptor,), name="llm-log", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads, or the interpreter is going down
            _core.close_log()
            os.close(descriptor)
            log.warn("engine log lines are delivered only during calls: %s", error)
            return
        _thread, _descriptor = thread, descriptor


def stop() -> None:
    """Pass the queued lines on, and end the thread ``llm-log`` with the last engine."""
    global _thread, _descriptor, _engines  # noqa: PLW0603  (the state of the module)
    with _lock:
        _engines = max(_engines - 1, 0)
        thread = None
        if not _engines:
            thread, _thread, _descriptor = _thread, None, None
            _core.close_log()
    # Join without the lock, which the thread needs for its last lines. A handler may call `stop` on that thread.
    if thread is not None and thread is not threading.current_thread():
        thread.join(_TIMEOUT_S)
    drain()


def _read(descriptor: int) -> None:
    name_this_thread()
    try:
        # The thread waits in a system call, not in the extension, because a daemon thread may be killed at any time.
        while os.read(descriptor, 64):
            # A handler of the program that raises must not end the thread.
            with contextlib.suppress(Exception):
                drain()
    finally:
        os.close(descriptor)


def _after_fork() -> None:
    """Reset the state in a forked child, which has neither the thread nor the queue of its parent."""
    global _lock, _thread, _descriptor, _engines  # noqa: PLW0603  (another thread of the parent may hold the old lock)
    _lock = threading.RLock()
    _engines = 0
    descriptor, _thread, _descriptor = _descriptor, None, None
    _core.log_after_fork()
    if descriptor is not None:
        os.close(descriptor)


os.register_at_fork(after_in_child=_after_fork)
