"""Prefill with two tensor-parallel ranks, decode with one or four (`python examples/transformer/tensor_parallel.py`).

Each rank is a process with an engine, whose cache has its key-value heads only. The ranks of decode have other heads,
blocks and orders than those of prefill. One pull for each request and rank converts. Compares every token and every
bit of every logit with the same model in one process, and exits with 1 on any difference. Not for: the model (`model`),
layer-wise transfer and swaps (`__main__`).
"""
# ruff: noqa: E402  (the environment must be set before numpy is imported)

from __future__ import annotations

import argparse
import os
import sys

# One thread: with more, BLAS may split a product differently from run to run, and then sum it in another order.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_name] = "1"

import multiprocessing as mp
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from generation import Generation, Workload, differences, in_one_process
from layouts import Paged
from llm_datadist import Engine, KvLayout
from model import Model, Shape, Split

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from model import Array

LIMIT_S = 60.0
"""Time limit of every wait for another process, in seconds."""


class Setup(NamedTuple):
    """One side of the transfer: how many ranks it has, and the blocks and the order of its caches."""

    name: str
    ranks: int
    block_tokens: int
    order: Literal["NHD", "HND"]


PREFILL = Setup("prefill", 2, 16, "NHD")
DECODES = (Setup("decode", 1, 32, "HND"), Setup("decode", 4, 8, "HND"))


def receive(pipe: Connection) -> Any:
    """Wait for a message of another process."""
    if not pipe.poll(LIMIT_S):
        raise TimeoutError(f"no message within {LIMIT_S:g} s")
    return pipe.recv()


class Rank:
    """A rank of one side: its engine, its part of the model, and a cache of its heads."""

    def __init__(self, setup: Setup, rank: int, work: Workload, others: list[Connection], transport: str) -> None:
        shape, (name, ranks, block_tokens, order) = work.shape, setup
        heads = range(shape.kv_heads * rank // ranks, shape.kv_heads * (rank + 1) // ranks)
        self.work, self.rank, self._others = work, rank, others
        self.model = Model(shape, work.seed, Split(heads, self._gather))
        self.engine = Engine(
            pool="16MiB",
            listen="127.0.0.1:0",  # 0: any free port
            name=f"{name} {rank}",
            transport=transport,
            timeout=LIMIT_S,
        )
        layout = KvLayout(
            layers=shape.layers,
            block_tokens=block_tokens,
            heads=heads,
            total_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype="float32",
            order=order,
            model=f"{shape} {work.seed}",
        )
        blocks = sum(-(-request.tokens // block_tokens) for request in work.requests)
        self.cache = self.engine.allocate("kv", layout, blocks=blocks)
        tensors: list[Array] = [tensor.numpy() for tensor in self.cache.tensors]
        for tensor in tensors:
            tensor.fill(np.nan)  # a read of a token that was never written gives NaN
        if order == "HND":  # the model writes and reads [blocks, tokens, heads, head_dim]
            tensors = [tensor.transpose(0, 2, 1, 3) for tensor in tensors]
        self.paged = Paged(tensors, seed=blocks + rank)

    def reserve(self, request: int, tokens: int) -> list[int]:
        """Reserve blocks for a request, and return them in the order of its tokens."""
        return self.paged.rows.reserve(request, self.paged.rows_for(tokens))

    def _gather(self, part: Array) -> Array:
        """Exchange the attention of the own heads for that of all heads. Rank 0 is in the middle."""
        if self.rank == 0:
            whole = np.concatenate([part, *[receive(pipe) for pipe in self._others]], axis=1)
            for pipe in self._others:
                pipe.send(whole)
            return whole
        self._others[0].send(part)
        gathered: Array = receive(self._others[0])
        return gathered


def prefill(rank: Rank, pipe: Connection) -> None:
    """Compute all prompts, say where they are, and keep them until the command says that they are no longer needed."""
    made, blocks = Generation(rank.work.requests), {}
    for group in rank.work.groups:
        for number in group:
            blocks[number] = rank.reserve(number, len(rank.work.requests[number].prompt))
        made.take(group, rank.model.forward(made.prompts(group), rank.paged))
    pipe.send((rank.engine.address, blocks, made))
    receive(pipe)


def decode(rank: Rank, pipe: Connection) -> None:
    """Pull the prompts of all ranks of prefill, and generate the remaining tokens."""
    owners = receive(pipe)
    caches = [rank.engine.link(address).result()["kv"] for address, _, _ in owners]
    for number, request in enumerate(rank.work.requests):
        to = rank.cache[rank.reserve(number, request.tokens)].part(tokens=range(len(request.prompt)))
        # The heads, the blocks and the order of the two sides differ; the layouts of the caches say how.
        pairs = [(to, cache[blocks[number]]) for cache, (_, blocks, _) in zip(caches, owners)]
        rank.engine.pull(pairs, verify="full").result()
    made = owners[0][2]  # with the first token of each request
    for group in rank.work.groups:
        while batch := made.step(group):
            made.take([chunk.request for chunk in batch], rank.model.forward(batch, rank.paged))
    pipe.send(made)


def run(setup: Setup, number: int, work: Workload, pipes: list[Connection], transport: str) -> None:
    """Run the process of a rank. The first pipe is that to the command."""
    pipe, *others = pipes
    rank = Rank(setup, number, work, others, transport)
    with rank.engine:
        (prefill if setup == PREFILL else decode)(rank, pipe)


class Side:
    """The processes of one side, and a pipe to each. A context manager that kills what is left."""

    def __init__(self, setup: Setup, work: Workload, transport: str) -> None:
        context = mp.get_context("spawn")  # an engine does not survive a fork
        between = [context.Pipe() for _ in range(setup.ranks - 1)]
        self._ranks, self.pipes = [], []
        for number in range(setup.ranks):
            ours, theirs = context.Pipe()
            others = [rank_0_end for rank_0_end, _ in between] if number == 0 else [between[number - 1][1]]
            arguments = (setup, number, work, [theirs, *others], transport)
            self._ranks.append(context.Process(target=run, args=arguments, name=f"{setup.name} {number}", daemon=True))
            self._ranks[-1].start()
            self.pipes.append(ours)
            theirs.close()
        for rank_0_end, other_end in between:
            rank_0_end.close()
            other_end.close()

    def results(self) -> list[Any]:
        """Wait for a message of each rank."""
        return [receive(pipe) for pipe in self.pipes]

    def __enter__(self) -> Side:  # noqa: PYI034  (Python 3.9 has no Self)
        """Return the side."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
            rank.join()


def main() -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto", help="how the links move bytes")
    transport = parser.parse_args().transport
    shape = Shape(layers=4, hidden=64, heads=8, kv_heads=4, inner=160, vocabulary=96, tokens=160)
    work = Workload.make(shape, groups=2)
    alone = in_one_process(work)
    tokens = sum(request.new_tokens for request in work.requests)
    print(f"{shape}, {len(work.requests)} requests")
    print(f"prefill: {PREFILL.ranks} ranks, blocks of {PREFILL.block_tokens} tokens, {PREFILL.order}")
    good = True
    with ExitStack() as sides:
        prompts = sides.enter_context(Side(PREFILL, work, transport))
        computed = prompts.results()
        for setup in DECODES:
            with Side(setup, work, transport) as ranks:
                for pipe in ranks.pipes:
                    pipe.send(computed)
                wrong = [line for made in ranks.results() for line in differences(work, alone, made)]
            for line in wrong:
                print(f"  DIFFERENT: {line}")
            verdict = (
                "DIFFERENT" if wrong else f"{tokens} tokens identical, {tokens * shape.vocabulary:,} logits bit for bit"
            )
            ranks_of = "1 rank" if setup.ranks == 1 else f"{setup.ranks} ranks"
            print(f"decode: {ranks_of}, blocks of {setup.block_tokens} tokens, {setup.order}: {verdict}")
            good = good and not wrong
        for pipe in prompts.pipes:
            pipe.send("done")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
