"""What the adapters of inference servers for a keeper share: namespaces, parts of calls, and log lines."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from llm_datadist.native import Error

if TYPE_CHECKING:
    import logging
    from collections.abc import Mapping, Sequence

    from llm_datadist.native import Store

__all__ = ["MAX_KEYS", "KeeperLog", "namespace", "parts", "started_thread"]

Item = TypeVar("Item")

MAX_KEYS = 4_096  # keys of one call of `Store`
# Servers with another format of the facts or of the keys share nothing. Raise it if either changes.
_FORMAT = 1
_SHOWN = 100  # characters of model and revision at the start of a namespace, for people who list namespaces


def namespace(server: str, model: str, revision: str, facts: Mapping[str, Any]) -> str:
    """Return the namespace of the values of a server: the same text only if all facts are the same.

    Args:
        server: name of the server, such as ``"vllm 0.32"``.
        model: what the server calls the model.
        revision: version of the weights. No server knows it, so its user gives it.
        facts: everything else that gives bytes their meaning: element type, sizes, ranks, layers, layout, hash seed.
            The values are numbers, texts, booleans, and lists and dicts of them.

    Raises:
        ValueError: a fact is unknown (``None`` or ``""``). Sharing could then mix values of different models.
    """
    facts = {"server": server, "model": model, "revision": revision, **facts}
    unknown = [name for name, value in facts.items() if value is None or value == ""]
    if unknown:
        raise ValueError(f"{', '.join(unknown)} must be known to share values: same bytes only under same facts")
    text = json.dumps({**facts, "format": _FORMAT}, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    # The facts may be longer than a namespace. So the digest stands for them, and the rest is for people.
    return ascii(f"{server} {model[:_SHOWN]} {revision[:_SHOWN]}")[1:-1] + f" {digest}"


def parts(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Split a chain into parts for calls of ``Store``, the end of the chain first.

    A keeper replaces first what was used longest ago, and within a call the end of the chain. So the start of the
    chain comes last.
    """
    return [items[at : at + MAX_KEYS] for at in range(0, len(items), MAX_KEYS)][::-1]


def started_thread(name: str) -> ThreadPoolExecutor:
    """Return a pool of one thread, which runs.

    A pool queues its first call before it starts a thread. If no thread starts, the call is refused, and stays queued:
    the next call would run it, long after its failure was reported.

    Raises:
        RuntimeError: the system starts no thread.
    """
    pool = ThreadPoolExecutor(1, name)
    pool.submit(int).result()
    return pool


class KeeperLog:
    """Logs each change of what a keeper does once: it is away, it is back, calls fail. Several threads may use it.

    Args:
        logger: where to log.
        socket: path at which the keeper listens.
    """

    def __init__(self, logger: logging.Logger, socket: str) -> None:
        self._logger, self._socket = logger, socket
        self._away = False
        self._away_counts: Counter[int] = Counter()  # by the identity of the store
        self._error = ""
        self._lock = threading.Lock()

    def noted(self, store: Store, done: Sequence[bool]) -> dict[str, Any]:
        """Take note of a call that finds or stores values, without a message to the keeper and without waiting for it.

        Args:
            store: the store of the call. It outlives this log.
            done: which values were found or stored.

        Returns:
            If some were not, what the store has counted since it was opened (``Store.stats``); otherwise, or if the
            store is closed, an empty dict.
        """
        if all(done):
            self._set(away=False)
            return {}
        try:
            stats: dict[str, Any] = {**store.stats(keeper=False)}
        except Error:
            return {}
        count = stats.get("misses_away", 0) + stats.get("puts_away", 0)
        with self._lock:
            more, self._away_counts[id(store)] = count > self._away_counts[id(store)], count
        if more:
            self._set(away=True, why=stats["refused"])
        elif any(done):
            self._set(away=False)
        return stats

    def error(self, error: Exception) -> None:
        """Log that a call has raised an exception, unless the last one had the same text."""
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            changed, self._error = text != self._error, text
        if changed:
            self._logger.error("a call to the keeper at %s has failed: %s", self._socket, text)

    def _set(self, *, away: bool, why: str | None = None) -> None:
        with self._lock:
            changed, self._away = away != self._away, away
        if changed and away:
            text = "the keeper at %s is away, so nothing is found or stored: %s"
            self._logger.warning(text, self._socket, why or "no process answers there")
        elif changed:
            self._logger.warning("the keeper at %s is back", self._socket)
