"""`examples/transformer`: the model against a naive twin, its layouts against each other, and the command itself.

Not for: the transfer itself (`test_layerwise.py`), or how fast it is (the command prints it, nothing here asserts it).
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "transformer"
sys.path.insert(0, str(EXAMPLE))

from generation import Generation, Request, Workload, differences, in_one_process  # noqa: E402
from layouts import Contiguous, Paged, Plain, Rows  # noqa: E402
from model import Chunk, Layer, Model, Shape  # noqa: E402

LIMIT_S = 300.0
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
SHAPES = [
    Shape(layers=2, hidden=24, heads=6, kv_heads=3, inner=40, vocabulary=50, tokens=32),
    Shape(layers=3, hidden=16, heads=4, kv_heads=1, inner=20, vocabulary=30, tokens=32),
    Shape(layers=1, hidden=32, heads=4, kv_heads=4, inner=16, vocabulary=20, tokens=32),
]


def twin(model: Model, tokens: list[int]) -> list[float]:
    """The logits after the last token, by plain loops over positions, heads and values; no cache, no batch."""
    shape, last = model.shape, len(tokens) - 1
    stream = [[float(value) for value in model.embedding[token]] for token in tokens]
    for layer in model.layers:
        attended = twin_attention(shape, layer, [twin_norm(row, layer.attention_norm) for row in stream])
        stream = [added(row, more) for row, more in zip(stream, attended)]
        stream = [added(row, twin_mlp(layer, twin_norm(row, layer.mlp_norm))) for row in stream]
    return times(twin_norm(stream[last], model.final_norm), model.unembedding)


def twin_attention(shape: Shape, layer: Layer, rows: list[list[float]]) -> list[list[float]]:
    """Each head of each position looks at every earlier position; heads share keys and values in groups."""
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    queries = [times(row, layer.query) for row in rows]
    keys = [times(row, layer.key) for row in rows]
    values = [times(row, layer.value) for row in rows]
    result = []
    for here in range(len(rows)):
        mixed: list[float] = []
        for head in range(shape.heads):
            query = turned(queries[here][head * size : (head + 1) * size], here)
            low = head // group * size
            scores = []
            for there in range(here + 1):
                key = turned(keys[there][low : low + size], there)
                scores.append(math.exp(sum(a * b for a, b in zip(query, key)) / math.sqrt(size)))
            mixed += [
                sum(score * values[there][place] for there, score in enumerate(scores)) / sum(scores)
                for place in range(low, low + size)
            ]
        result.append(times(mixed, layer.output))
    return result


def turned(head: list[float], position: int) -> list[float]:
    """Rotary positions: pair `i` of a head is a complex number, turned by position / 10000^(i / pairs)."""
    half = len(head) // 2
    pairs = [complex(head[i], head[i + half]) for i in range(half)]
    angles = [position / 10000 ** (i / half) for i in range(half)]
    moved = [pair * complex(math.cos(angle), math.sin(angle)) for pair, angle in zip(pairs, angles)]
    return [pair.real for pair in moved] + [pair.imag for pair in moved]


def twin_norm(row: list[float], weight: np.ndarray) -> list[float]:
    mean = sum(value * value for value in row) / len(row)
    return [value / math.sqrt(mean + 1e-5) * float(scale) for value, scale in zip(row, weight)]


def twin_mlp(layer: Layer, row: list[float]) -> list[float]:
    gate, up = times(row, layer.gate), times(row, layer.up)
    return times([g / (1 + math.exp(-g)) * u for g, u in zip(gate, up)], layer.down)


def times(row: list[float], matrix: np.ndarray) -> list[float]:
    return [sum(value * float(weight) for value, weight in zip(row, column)) for column in matrix.T]


def added(left: list[float], right: list[float]) -> list[float]:
    return [a + b for a, b in zip(left, right)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.heads} heads, {shape.kv_heads} for KV")
def test_model_against_naive_twin(shape: Shape) -> None:
    model, dice = Model(shape, 3), np.random.default_rng(4)
    sequences = [dice.integers(shape.vocabulary, size=length).tolist() for length in (9, 1, 6)]
    expected = [twin(model, sequence) for sequence in sequences]
    at_once = model.forward([Chunk(n, 0, tokens) for n, tokens in enumerate(sequences)], Plain(shape))
    np.testing.assert_allclose(at_once, expected, rtol=1e-3, atol=2e-4)

    cache = Plain(shape)  # the same, token by token and in pieces
    for place in range(5):
        model.forward([Chunk(0, place, sequences[0][place : place + 1])], cache)
    in_pieces = model.forward([Chunk(0, 5, sequences[0][5:])], cache)
    np.testing.assert_allclose(in_pieces[0], expected[0], rtol=1e-3, atol=2e-4)


def test_the_twin_is_not_easily_pleased() -> None:
    """Logits are far apart in units of the tolerance above, and every part of the model matters to them."""
    shape = SHAPES[0]
    model, tokens = Model(shape, 3), [5, 8, 13, 21]
    right = np.array(twin(model, tokens))
    assert right.std() > 0.3
    for number, name in enumerate(Layer._fields):
        changed = Model(shape, 3)
        part = np.roll(changed.layers[0][number], 1)
        changed.layers[0] = changed.layers[0]._replace(**{name: part})
        assert np.abs(np.array(twin(changed, tokens)) - right).max() > 0.01, name
    assert np.abs(np.array(twin(model, [8, 5, 13, 21])) - right).max() > 0.01, "positions"


def tensors(shape: Shape, rows: int, tokens: int) -> list[Any]:
    """Memory nobody wrote to: whatever is read from it unwritten spoils the result."""
    return [
        np.full((rows, tokens, shape.kv_heads, shape.head_dim), np.nan, np.float32) for _ in range(2 * shape.layers)
    ]


def generated(work: Workload, cache: Any) -> Generation:
    """As `in_one_process`, on another cache; rows are reserved when a group begins and released at its end."""
    model, made = work.model(), Generation(work.requests)
    for group in work.groups:
        for number in group:
            cache.rows.reserve(number, cache.rows_for(work.requests[number].tokens))
        made.take(group, model.forward(made.prompts(group), cache))
        while batch := made.step(group):
            made.take([chunk.request for chunk in batch], model.forward(batch, cache))
        for number in group:
            cache.rows.release(number)
    return made


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape.heads} heads, {shape.kv_heads} for KV")
def test_layouts_are_bit_identical(shape: Shape) -> None:
    dice = np.random.default_rng(2)
    lengths = [1, 4, 5, 16, 19, 24]  # at, below and above the end of a block of 4
    requests = [Request(dice.integers(shape.vocabulary, size=length).tolist(), 3 + length % 3) for length in lengths]
    work = Workload(shape, 1, requests, [[0, 1, 2], [3], [4, 5]], block_tokens=4)
    expected = in_one_process(work)
    assert [len(tokens) for tokens in expected.tokens] == [request.new_tokens for request in requests]
    slots = Contiguous(tensors(shape, 3, shape.tokens), seed=5)
    assert differences(work, expected, generated(work, slots)) == []
    for seed in range(3):
        blocks = Paged(tensors(shape, 15, 4), seed)
        assert differences(work, expected, generated(work, blocks)) == []


def test_blocks_of_a_request_lie_scattered() -> None:
    rows = Rows(40, seed=1)
    table = rows.reserve(7, 20)
    assert table != sorted(table)
    other = rows.reserve(8, 20)
    assert sorted(table + other) == list(range(40)), "no row belongs to two requests"
    with pytest.raises(MemoryError, match="request 9 needs 1 rows, 0 are free"):
        rows.reserve(9, 1)
    rows.release(7)
    assert sorted(rows.reserve(9, 20)) == sorted(table)


@pytest.mark.parametrize("tensor", range(4))
def test_one_wrong_value_in_a_cache_shows(tensor: int) -> None:
    """One bit of one value of the KV of one token: no layer, key or value goes unread."""
    shape = SHAPES[0]
    work = Workload(shape, 1, [Request([3, 1, 4, 1, 5, 9], 4)], [[0]], block_tokens=4)
    expected, made, model = in_one_process(work), Generation(work.requests), work.model()
    memory = tensors(shape, 6, 4)
    cache = Paged(memory, 1)
    (block, *_) = cache.rows.reserve(0, 3)
    made.take([0], model.forward(made.prompts([0]), cache))
    memory[tensor].view(np.uint32)[block, 1, 2, 3] ^= 1 << 20
    while batch := made.step([0]):
        made.take([0], model.forward(batch, cache))
    assert differences(work, expected, made) != []


def test_differences_are_found() -> None:
    work = Workload(SHAPES[0], 1, [Request([3, 1, 4], 3), Request([1, 5], 2)], [[0, 1]])
    left, right = in_one_process(work), in_one_process(work)
    assert differences(work, left, right) == []
    right.logits[1][1].view(np.uint32)[7] ^= 1
    assert differences(work, left, right) == ["request 1: logits of new token 1"]
    right.tokens[0][2] ^= 1
    found = differences(work, left, right)
    assert len(found) == 2
    assert found[0].startswith("request 0: tokens [")
    del right.tokens[0][2]
    assert differences(work, left, right)[0] == "request 0: 3 tokens were asked for, [3, 3, 2, 3] are there"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  (this interpreter, our own files)
        [sys.executable, "-W", "error", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_command_shows_what_it_claims(transport: str) -> None:
    """`--prove` makes the order of events certain: unless a layer arrives before compute ends, the command fails."""
    done = run(str(EXAMPLE), "--small", "--prove", "--transport", transport)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    shape = Shape(layers=6, hidden=64, heads=4, kv_heads=2, inner=160, vocabulary=96, tokens=160)
    work = Workload.make(shape, groups=3)
    assert str(shape) in done.stdout
    count = sum(request.new_tokens for request in work.requests)
    for layout in ("contiguous", "paged"):
        words = f"  {layout}: {count} tokens identical, {count * shape.vocabulary:,} logits identical bit for bit"
        assert words in done.stdout.splitlines()
    groups = re.findall(r"^ +\d+ +\d+\.\d .* \d+% +(.*)$", done.stdout, re.MULTILINE)
    assert len(groups) == len(("contiguous", "paged")) * len(work.groups)
    for line in groups:
        arrived = [int(number) for number in line.split()]
        assert len(arrived) == shape.layers
        assert arrived == sorted(arrived)
        assert all(before <= layer for layer, before in enumerate(arrived)), "no layer arrived before it was computed"
        assert arrived[-1] >= 1, "layers arrived before compute ended"
    swaps = dict(re.findall(r"^(\w+): (\d+) requests swapped out", done.stdout, re.MULTILINE))
    assert swaps["contiguous"] == "0"
    assert int(swaps["paged"]) > len(work.requests)


def run_patched(patch: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The command with the lines of `patch` run before it, after `import generation`."""
    start = f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport generation\n"
    end = f"\nsys.argv = {['transformer', *arguments]!r}\nrunpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    return run("-c", start + textwrap.dedent(patch) + end, **variables)


def test_the_command_fails_on_one_wrong_bit_of_one_logit() -> None:
    patch = """
    import numpy
    right = generation.in_one_process
    def wrong(work):
        made = right(work)
        made.logits[4][2].view(numpy.uint32)[9] ^= 1
        return made
    generation.in_one_process = wrong
    """
    # This program loads numpy before the command can limit it to one thread, and two sum in another order.
    done = run_patched(patch, "--small", **ONE_THREAD)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("DIFFERENT: request 4: logits of new token 2") == 2


@pytest.mark.parametrize("delay", [0, 0.6])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_command_ends_when_a_process_dies(victim: str, delay: float) -> None:
    """Killed at its start, or about when it is linked and works."""
    patch = f"""
    import multiprocessing.connection, time
    generation.in_one_process = lambda work: generation.Generation(work.requests)  # not needed here
    wait = multiprocessing.connection.wait
    def kill_first(*args):
        time.sleep({delay})
        for child in multiprocessing.active_children():
            if child.name == {victim!r}:
                child.kill()
        return wait(*args)
    multiprocessing.connection.wait = kill_first
    """
    done = run_patched(patch)
    assert done.returncode == 1
    assert "ended without a result" in done.stderr
