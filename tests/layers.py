"""For tests of layer-wise transfers: a synchronizer that the test controls, and destinations with a numpy twin."""

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
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import LIMIT, OK, by_blocks, equal, eventually, linked, options, pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from peers import End, Ends, Peer

FINALIZED = "LLM_ENGINE_FINALIZED"
FAILED = "LLM_FAILED"
FOREVER = 10**9
WAIT = int(LIMIT * 1000)  # milliseconds: the limit of a task that must end


class Steps(LayerSynchronizer):
    """A synchronizer that records its calls. For an allowed layer, it returns or raises `answers[layer]`, else True."""

    def __init__(self, allowed: int = FOREVER, answers: Optional[dict[int, Any]] = None, **attributes: Any) -> None:
        self.asked: list[tuple[int, Any]] = []
        self.threads: set[threading.Thread] = set()
        self.answers = answers or {}
        self._allowed = allowed
        self._changed = threading.Condition()
        for name, value in attributes.items():
            setattr(self, name, value)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        with self._changed:
            self.asked.append((layer_index, timeout_in_millis))
            self.threads.add(threading.current_thread())
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._allowed > layer_index, 2 * LIMIT), "the test did not allow it"
        answer = self.answers.get(layer_index, True)
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def allow(self, layers: int = FOREVER) -> None:
        """Let the calls for layers below this number return."""
        with self._changed:
            self._allowed = layers
            self._changed.notify_all()

    def reached(self, layer: int) -> None:
        """Wait until `synchronize_layer` was called for this layer."""
        with self._changed:
            assert self._changed.wait_for(lambda: layer in self.layers, LIMIT), f"never asked for {layer}: {self.asked}"

    @property
    def layers(self) -> list[int]:
        return [layer for layer, _ in self.asked]


def launch(local: End, name: str, to: Sequence[Any], steps: Any = None, **kwargs: Any) -> Any:
    """Start a transfer of a cache of this process; `src`, `dst` and `size` are the blocks and their bytes."""
    names = {"src": "src_block_indices", "dst": "dst_block_indices", "size": "dst_block_memory_size"}
    given = {names[key]: value for key, value in kwargs.items()}
    steps = Steps() if steps is None else steps
    return local.dist.cache_manager.transfer_cache_async(local.held[name].handle, steps, list(to), **given)


def results(task: Any, limit: Optional[int] = WAIT) -> list[Optional[str]]:
    """The codes of all configs by name, once the task has ended."""
    return [None if code is None else code.name for code in task.get_results(limit)]


class Remote:
    """A cache of a peer, and its twin: the bytes that it must contain."""

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
        """Return the config that sends layers `src` of slot `row` to slot `slot`, starting at layer `dst`."""
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
        """Copy slot `row` of the source to slot `slot` of the twin."""
        for tensor, mine in self._pairs(source, src, dst):
            mine[slot, : tensor.shape[1]] = tensor[row]

    def blocks(self, source: Sequence[np.ndarray], src: range, dst: int, pairs: Any) -> None:
        """Copy blocks of the source to blocks of the twin, for each (source, destination)."""
        for tensor, mine in self._pairs(source, src, dst):
            for left, right in pairs:
                mine[right] = tensor[left]

    def pieces(self, source: Sequence[np.ndarray], src: range, dst: int, row: int, to: Sequence[int]) -> None:
        """Copy slot `row` of the source to the blocks `to` of the twin, in pieces; the last one may be short."""
        for tensor, mine in self._pairs(source, src, dst):
            for number, block in enumerate(to):
                piece = tensor[row][number * self.row_bytes : (number + 1) * self.row_bytes]
                mine[block, : len(piece)] = piece

    def check(self, why: Any = "") -> None:
        """Compare every byte of the cache with the twin."""
        got = self.peer.read(self.name)
        if not equal(got, self.twin):
            wrong = [(n, (a != b).any(axis=1).nonzero()[0].tolist()) for n, (a, b) in enumerate(zip(got, self.twin))]
            raise AssertionError(f"{why}: wrong rows by tensor: {[each for each in wrong if each[1]][:20]}")


class Transfer:
    """A filled cache "n" of this process, and a cache of the same shape at each of some linked peers."""

    def __init__(
        self,
        ends: Ends,
        way: Optional[dict[str, Any]] = None,
        rows: int = 1,
        row_bytes: int = 64,
        layers: int = 4,
        *,
        blocks: bool = False,
        peers: int = 1,
        **settings: Any,
    ) -> None:
        way = way or {"accessible": False}
        self.given = options(**way, **settings)
        self.peers = [ends.peer(self.given, 2 + number) for number in range(peers)]
        self.local = ends.local(self.given)
        linked(self.local, *self.peers)
        self.accessible, self.shape, self.layers = way["accessible"], (rows, row_bytes, layers), layers
        self.local.allocate("n", rows, row_bytes, 2 * layers, blocks=blocks, seed=1)
        self.source = pattern(1, 2 * layers, rows, row_bytes)
        self.all = [self.remote("f", peer, blocks=blocks) for peer in self.peers]
        self.peer, self.to = self.peers[0], self.all[0]

    def remote(self, name: str, peer: Optional[Peer] = None, shape: tuple[int, ...] = (), **how: Any) -> Remote:
        """Return another destination. By default, it has the same shape."""
        return Remote(peer or self.peer, self.accessible, name, *(shape or self.shape), **{"seed": 2, **how})

    def start(self, steps: Any = None, to: Optional[Sequence[Any]] = None, **lists: Any) -> Any:
        every = [remote.to(range(self.layers)) for remote in self.all]
        return launch(self.local, "n", every if to is None else to, steps, **lists)

    def send(self, steps: Any = None, to: Optional[Sequence[Any]] = None, **lists: Any) -> list[Optional[str]]:
        return results(self.start(steps, to, **lists))

    def begun(self, layers: int, to: Optional[Sequence[Any]] = None, **lists: Any) -> tuple[Steps, Any]:
        """Start a transfer, wait until this many layers have arrived, and hold back the others."""
        steps = Steps(allowed=layers)
        task = self.start(steps, to, **lists)
        eventually(lambda: set(layers_done(task)) == {layers}, what=f"{layers} layers")
        return steps, task

    def arrived(self, layers: Optional[int] = None) -> None:
        """Check that slot 0 of the first `layers` layers (default: all) has arrived everywhere, and nothing else."""
        for remote in self.all:
            remote.slot(self.source, range(self.layers if layers is None else layers))
            remote.check()

    def again(self) -> None:
        assert set(self.send()) == {OK}
        self.arrived()


def names(error: Any, **facts: int) -> bool:
    """Whether the text of an error contains `fact 7` or `fact=7` for every fact."""
    return all(re.search(rf"{what}[ =]{value}\b", str(error)) for what, value in facts.items())


def unlinked(local: End, cluster: int) -> None:
    """Wait until the link has ended."""
    eventually(lambda: cluster not in {link["cluster"] for link in local.links()}, what="the end of the link")


def layers_done(task: Any) -> list[int]:
    return [one.layers_done for one in task.progress()]


def layer_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "llm-layers"]


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
    """This process as a decoder, and prefill programs in processes of their own."""

    def __init__(self, ends: Ends, way: Optional[dict[str, Any]] = None, **settings: Any) -> None:
        self.way = way or {"accessible": False, "llm__LinkTransport": "auto"}
        self.local = ends.local(options(listen="127.0.0.1:0", **self.way, **settings))
        self.cache = self.local.allocate("f", 1, 6400, 20, seed=2)
        self.good = pattern(1, 20, 1, 6400)

    def start(self, text: str, *, until: str = "") -> subprocess.Popen[str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "LLM_DATADIST_"))}
        given = [self.local.listening(), self.way["accessible"], self.way["llm__LinkTransport"], self.cache]
        program = subprocess.Popen(  # noqa: S603
            [sys.executable, "-W", "error", "-c", PROGRAM + textwrap.dedent(text)]
            + [str(each) for each in (*given, *self.local.addresses("f"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": str(Path(__file__).parent)},
        )
        assert program.stdout is not None
        assert not until or program.stdout.readline() == f"{until}\n"
        return program

    def run(self, text: str) -> tuple[int, str, str]:
        return finish(self.start(text))

    def output(self, text: str) -> str:
        """Run a program that must end with status 0."""
        status, out, err = self.run(text)
        assert status == 0, out + err
        return out

    def whole(self) -> bool:
        return equal(self.local.read("f"), self.good)


def finish(program: subprocess.Popen[str], line: Optional[str] = None) -> tuple[int, str, str]:
    """Write a line to a program and wait until it ends, at most `LIMIT`. Return status, output and errors."""
    try:
        out, err = program.communicate(line, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        program.kill()
        out, err = program.communicate()
        raise AssertionError(f"the program does not end\n{out}\n{err}") from None
    return program.returncode, out, err
