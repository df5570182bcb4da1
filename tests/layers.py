"""What the tests of layer-wise transfers share: synchronizers a test can hold back, and destinations with a numpy twin.

A `Steps` answers layer by layer as the test allows. A `Far` is a cache of a peer that knows its config in either mode
(by address or by key) and what bytes it must hold. Nothing here reads the engine to say what is right. Not for:
judging results (that is the tests').
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMException,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import INVALID, LIMIT, by_blocks, equal, eventually, options, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from peers import End, Ends, Peer

FINALIZED = "LLM_ENGINE_FINALIZED"
FAILED = "LLM_FAILED"
FOREVER = 10**9
WAIT = int(LIMIT * 1000)  # milliseconds: the limit of a task that must end


class Steps(LayerSynchronizer):
    """Notes what it is asked; answers `answers[layer]` (an exception is raised), True for others, once allowed."""

    def __init__(self, allowed: int = FOREVER, answers: Optional[dict[int, Any]] = None, **attributes: Any) -> None:
        self.asked: list[tuple[int, Any]] = []
        self.threads: set[int] = set()
        self.answers = answers or {}
        self._allowed = allowed
        self._changed = threading.Condition()
        for name, value in attributes.items():
            setattr(self, name, value)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        with self._changed:
            self.asked.append((layer_index, timeout_in_millis))
            self.threads.add(threading.get_ident())
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > layer_index, 2 * LIMIT), "the test left it waiting"
        answer = self.answers.get(layer_index, True)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def allow(self, layers: int = FOREVER) -> None:
        """Layers below this number are ready."""
        with self._changed:
            self._allowed = layers
            self._changed.notify_all()

    def reached(self, layer: int) -> None:
        """Wait until it is asked for a layer."""
        with self._changed:
            assert self._changed.wait_for(lambda: layer in self.layers, LIMIT), f"never asked for {layer}: {self.asked}"

    @property
    def layers(self) -> list[int]:
        """The layers it was asked for."""
        return [layer for layer, _ in self.asked]


def launch(near: End, name: str, to: Sequence[Any], steps: Any = None, **kwargs: Any) -> Any:
    """Start a transfer of a cache of this process; `src`, `dst` and `size` are the blocks and their bytes."""
    names = {"src": "src_block_indices", "dst": "dst_block_indices", "size": "dst_block_memory_size"}
    given = {names[key]: value for key, value in kwargs.items()}
    steps = Steps() if steps is None else steps
    return near.dist.cache_manager.transfer_cache_async(near.held[name].handle, steps, list(to), **given)


def results(task: Any, limit: Optional[int] = WAIT) -> list[Optional[str]]:
    """The codes of all configs by name, once the task has ended."""
    return [None if code is None else code.name for code in task.get_results(limit)]


def send(near: End, name: str, to: Sequence[Any], steps: Any = None, **kwargs: Any) -> list[Optional[str]]:
    """`launch`, and the results."""
    return results(launch(near, name, to, steps, **kwargs))


class Far:
    """A cache of a peer that layers are sent to, and the bytes it must hold."""

    def __init__(
        self,
        peer: Peer,
        accessible: bool,
        name: str = "f",
        rows: int = 4,
        row_bytes: int = 256,
        layers: int = 2,
        *,
        per: int = 2,
        blocks: bool = False,
        model: int = 0,
        seed: int = 0,
        **how: Any,
    ) -> None:
        tensors = layers * per
        keys = [by_blocks(peer.cluster, model)] if blocks else []
        self.cache = peer.make(name, rows, row_bytes, tensors, blocks=blocks, keys=keys, seed=seed, **how)
        self.peer, self.accessible, self.name, self.model = peer, accessible, name, model
        self.row_bytes, self.per, self.is_blocks = row_bytes, per, blocks
        self.bases = peer.addresses(name)
        self.twin = pattern(seed, tensors, rows, row_bytes)

    def to(self, src: range, dst: int = 0, *, row: int = 0, slot: int = 0, by_id: bool = False) -> Any:
        """The config that sends layers `src` of slot `row` to layers `dst` and on, of slot `slot`."""
        cluster = self.peer.cluster
        if not self.accessible:
            bases = self.bases[dst * self.per : (dst + len(src)) * self.per]
            return TransferConfig(cluster, [base + slot * self.row_bytes for base in bases], src, row)
        key: Any = BlocksCacheKey(cluster, self.model)
        if by_id or not self.is_blocks:
            key = CacheKeyByIdAndIndex(cluster, self.cache, slot)
        return TransferWithCacheKeyConfig(key, src, range(dst, dst + len(src)), row)

    def _pairs(self, source: Sequence[np.ndarray], src: range, dst: int) -> Any:
        count = len(src) * self.per
        return zip(source[src.start * self.per :][:count], self.twin[dst * self.per :][:count])

    def slot(self, source: Sequence[np.ndarray], src: range, dst: int = 0, *, row: int = 0, slot: int = 0) -> None:
        """Slot `row` of the source comes to lie in slot `slot`."""
        for tensor, mine in self._pairs(source, src, dst):
            mine[slot, : tensor.shape[1]] = tensor[row]

    def blocks(self, source: Sequence[np.ndarray], src: range, dst: int, pairs: Any) -> None:
        """Blocks of the source come to lie in blocks here."""
        for tensor, mine in self._pairs(source, src, dst):
            for left, right in pairs:
                mine[right] = tensor[left]

    def pieces(self, source: Sequence[np.ndarray], src: range, dst: int, row: int, to: Sequence[int]) -> None:
        """Slot `row` of the source, cut, comes to lie in blocks here; the last piece may be short."""
        for tensor, mine in self._pairs(source, src, dst):
            for number, block in enumerate(to):
                piece = tensor[row][number * self.row_bytes : (number + 1) * self.row_bytes]
                mine[block, : len(piece)] = piece

    def check(self, why: Any = "") -> None:
        """Every byte of the peer's cache is what it must be."""
        got = self.peer.read(self.name)
        if not equal(got, self.twin):
            wrong = [(n, (a != b).any(axis=1).nonzero()[0].tolist()) for n, (a, b) in enumerate(zip(got, self.twin))]
            raise AssertionError(f"{why}: wrong rows by tensor: {[each for each in wrong if each[1]][:20]}")


def refused(near: End, name: str, to: list[Any], **kwargs: Any) -> bool:
    """Whether a transfer is PARAM_INVALID, at once or as the result of every config: the contract allows both."""
    try:
        task = launch(near, name, to, **kwargs)
    except LLMException as error:
        return error.status_code.name == INVALID
    return results(task) == [INVALID] * len(to)


def names(error: Any, **facts: int) -> bool:
    """Whether the text of an error says `fact 7` or `fact=7` for every fact."""
    return all(re.search(rf"{what}[ =]{value}\b", str(error)) for what, value in facts.items())


def ended(near: End, cluster: int) -> None:
    """Wait until the link is no more."""
    eventually(lambda: cluster not in {link["cluster"] for link in near.links()}, what="the end of the link")


def layers_done(task: Any) -> list[int]:
    """How many layers each config has behind it."""
    return [one.layers_done for one in task.progress()]


PROGRAM = """
import os, sys, threading, time, signal
from peers import End, options
from layers import Steps, launch, results
from llm_datadist import (CacheKeyByIdAndIndex, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig)

address, accessible, transport, cache, *addresses = sys.argv[1:]
end = End()
end.init(options(accessible=accessible == "True", llm__LinkTransport=transport), 2)
assert end.link_clusters([(1, address)])[0] == "LLM_SUCCESS"
end.allocate("n", 1, 6400, 20, seed=1)
if accessible == "True":
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, int(cache)), range(10), range(10))
else:
    config = TransferConfig(1, [int(each) for each in addresses])

class Model(LayerSynchronizer):
    def __init__(self, pause=0.005, ends=None):
        self.pause, self.ends = pause, ends
    def synchronize_layer(self, layer_index, timeout_in_millis):
        time.sleep(self.pause)
        if layer_index == 3 and self.ends:
            return self.ends()
        return True

def go(steps):
    return launch(end, "n", [config], steps)
"""


class Decoder:
    """This process as a decoder, for prefill programs that come to their end."""

    def __init__(self, ends: Ends, way: dict[str, Any]) -> None:
        """Open it; further options count for this end alone."""
        self.way = way
        self.near = ends.near(options(listen="127.0.0.1:0", **way))
        self.cache = self.near.allocate("f", 1, 6400, 20, seed=2)
        self.good = pattern(1, 20, 1, 6400)

    def start(self, text: str) -> subprocess.Popen[str]:
        """Start a program."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "LLM_DATADIST_"))}
        given = [self.near.listening(), str(self.way["accessible"]), self.way["llm__LinkTransport"], str(self.cache)]
        return subprocess.Popen(  # noqa: S603
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                PROGRAM + textwrap.dedent(text),
                *given,
                *map(str, self.near.addresses("f")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": str(Path(__file__).parent)},
        )

    def run(self, text: str) -> tuple[int, str, str]:
        """Run a program to its end, which must come in time; status, output, errors."""
        program = self.start(text)
        try:
            out, err = program.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            program.kill()
            out, err = program.communicate()
            raise AssertionError(f"the program never ended\n{out}\n{err}") from None
        return program.returncode, out, err

    def whole(self) -> bool:
        """Whether every byte of the transfer is here."""
        return equal(self.near.read("f"), self.good)
