"""`examples/transformer`: the model against a naive twin, its layouts against each other, and the command itself.

Not for: the transfer itself (`test_layerwise.py`), or how fast it is (the command prints it, nothing here asserts it).
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parent.parent / "examples" / "transformer"
sys.path.insert(0, str(EXAMPLE))

from generation import Generation, Request, Workload, differences, in_one_process  # noqa: E402
from layouts import Contiguous, Paged, Plain, Rows  # noqa: E402
from model import Chunk, Layer, Model, Shape  # noqa: E402

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")
SHAPES = [
    Shape(layers=2, hidden=24, heads=6, kv_heads=3, inner=40, vocabulary=50, tokens=32),
    Shape(layers=3, hidden=16, heads=4, kv_heads=1, inner=20, vocabulary=30, tokens=32),
    Shape(layers=1, hidden=32, heads=4, kv_heads=4, inner=16, vocabulary=20, tokens=32),
]


def twin(model, tokens):
    """The logits after the last token, by loops over positions and heads, in double precision; no cache, no batch."""
    stream = [model.embedding[token].astype(float) for token in tokens]
    for layer in model.layers:
        rows = [twin_norm(row, layer.attention_norm) for row in stream]
        stream = [row + twin_attention(model.shape, layer, rows, here) for here, row in enumerate(stream)]
        stream = [row + twin_mlp(layer, twin_norm(row, layer.mlp_norm)) for row in stream]
    return twin_norm(stream[-1], model.final_norm) @ model.unembedding


def twin_attention(shape, layer, rows, here):
    """Each head of a position looks at every earlier position; heads share keys and values in groups."""
    size, group = shape.head_dim, shape.heads // shape.kv_heads
    mixed = []
    for head in range(shape.heads):
        own, shared = (slice(at * size, (at + 1) * size) for at in (head, head // group))
        query = turned((rows[here] @ layer.query)[own], here)
        keys = [turned((row @ layer.key)[shared], there) for there, row in enumerate(rows[: here + 1])]
        scores = np.array([np.exp(query @ key / np.sqrt(size)) for key in keys])
        mixed += list(sum(score * (row @ layer.value)[shared] for score, row in zip(scores, rows)) / sum(scores))
    return np.array(mixed) @ layer.output


def turned(head, position):
    """Rotary positions: pair `i` of a head is a complex number, turned by position / 10000^(i / pairs)."""
    half = len(head) // 2
    pairs = head[:half] + 1j * head[half:]
    moved = [pair * np.exp(1j * position / 10000 ** (i / half)) for i, pair in enumerate(pairs)]
    return np.concatenate([np.real(moved), np.imag(moved)])


def twin_norm(row, weight):
    return row / np.sqrt(np.mean(row * row) + 1e-5) * weight


def twin_mlp(layer, row):
    gate = row @ layer.gate
    return (gate / (1 + np.exp(-gate)) * (row @ layer.up)) @ layer.down


every_shape = pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.heads} heads, {shape.kv_heads} for KV"
)


@every_shape
def test_model_against_naive_twin(shape):
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


def test_the_twin_is_not_easily_pleased():
    """Logits are far apart in units of the tolerance above, and every part of the model matters to them."""
    shape = SHAPES[0]
    model, tokens = Model(shape, 3), [5, 8, 13, 21]
    right = twin(model, tokens)
    assert right.std() > 0.3
    for number, name in enumerate(Layer._fields):
        changed = Model(shape, 3)
        part = np.roll(changed.layers[0][number], 1)
        changed.layers[0] = changed.layers[0]._replace(**{name: part})
        assert np.abs(twin(changed, tokens) - right).max() > 0.01, name
    assert np.abs(twin(model, [8, 5, 13, 21]) - right).max() > 0.01, "positions"


def tensors(shape, rows, tokens):
    """Memory nobody wrote to: whatever is read from it unwritten spoils the result."""
    size = rows, tokens, shape.kv_heads, shape.head_dim
    return [np.full(size, np.nan, np.float32) for _ in range(2 * shape.layers)]


def generated(work, cache, spoil=None):
    """As `in_one_process`, on another cache; rows are reserved when a group begins and released at its end."""
    model, made = work.model(), Generation(work.requests)
    for group in work.groups:
        for number in group:
            table = cache.rows.reserve(number, cache.rows_for(work.requests[number].tokens))
        made.take(group, model.forward(made.prompts(group), cache))
        if spoil:
            spoil(table)
        while batch := made.step(group):
            made.take([chunk.request for chunk in batch], model.forward(batch, cache))
        for number in group:
            cache.rows.release(number)
    return made


@every_shape
def test_layouts_are_bit_identical(shape):
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


def test_blocks_of_a_request_lie_scattered():
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
def test_one_wrong_value_in_a_cache_shows(tensor):
    """One bit of one value of the KV of one token: no layer, key or value goes unread."""
    work = Workload(SHAPES[0], 1, [Request([3, 1, 4, 1, 5, 9], 4)], [[0]], block_tokens=4)
    memory = tensors(SHAPES[0], 6, 4)

    def spoil(table):
        memory[tensor].view(np.uint32)[table[0], 1, 2, 3] ^= 1 << 20

    assert differences(work, in_one_process(work), generated(work, Paged(memory, 1), spoil)) != []


def test_differences_are_found():
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


def run(*arguments, **variables):
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_command_shows_what_it_claims(transport):
    """`--prove` makes the order of events certain: unless a layer arrives before compute ends, the command fails."""
    done = run(str(EXAMPLE), "--small", "--prove", "--transport", transport)
    assert (done.returncode, done.stderr) == (0, "")
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


def run_patched(patch, *arguments, **variables):
    """The command with the lines of `patch` run before it, after `import generation`."""
    start = f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLE)!r})\nimport generation\n"
    end = f"\nsys.argv = {['transformer', *arguments]!r}\nrunpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    return run("-c", start + textwrap.dedent(patch) + end, **variables)


def test_the_command_fails_on_one_wrong_bit_of_one_logit():
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
def test_the_command_ends_when_a_process_dies(victim, delay):
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
