"""The command `examples/transformer`: its output, and the conditions under which it fails.

Not for: the transfer itself (`test_layerwise.py`), or its speed (the command prints it; no test asserts it).
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from emulation import emulated

EXAMPLE = Path(__file__).parent.parent / "examples" / "transformer"
sys.path.insert(0, str(EXAMPLE))

from generation import Workload  # noqa: E402
from model import Shape  # noqa: E402

ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"), "1")

# Under emulation, the processes of the command may take longer than its own limit.
SMALL = ("--small", *(("--limit", "600") if emulated() else ()))


def run(*arguments, **variables):
    command = [sys.executable, "-W", "error", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_the_command_shows_what_it_claims(transport):
    """With `--prove`, the command fails unless a layer arrives before compute ends."""
    done = run(str(EXAMPLE), *SMALL, "--prove", "--transport", transport)
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
    """Run the command with the lines of `patch` inserted after `import generation`."""
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
    # This program loads numpy before the command can limit it to one thread. Two threads sum in another order.
    done = run_patched(patch, *SMALL, **ONE_THREAD)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("DIFFERENT: request 4: logits of new token 2") == 2


@pytest.mark.parametrize("delay", [0, 0.6])
@pytest.mark.parametrize("victim", ["prefill", "decode"])
def test_the_command_ends_when_a_process_dies(victim, delay):
    """A process is killed at its start, or at about the time when it is linked and working."""
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


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_tensor_parallel_ranks_with_other_layouts(transport):
    """Two ranks of prefill, and one or four of decode with other blocks and another order, as one process."""
    done = run(str(EXAMPLE / "tensor_parallel.py"), "--transport", transport)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    found = re.findall(
        r"^decode: (\d) ranks?, blocks of (\d+) tokens, (\w+): (\d+) tokens identical", done.stdout, re.MULTILINE
    )
    assert [(ranks, blocks, order) for ranks, blocks, order, _ in found] == [("1", "32", "HND"), ("4", "8", "HND")]
    assert all(int(tokens) > 0 for *_, tokens in found)
    assert "prefill: 2 ranks, blocks of 16 tokens, NHD" in done.stdout.splitlines()


def test_tensor_parallel_ranks_fail_on_one_wrong_bit():
    code = f"""
    import sys
    sys.path.insert(0, {str(EXAMPLE)!r})
    import tensor_parallel
    right = tensor_parallel.in_one_process
    def wrong(work):
        made = right(work)
        made.logits[4][2].view("u4")[9] ^= 1
        return made
    tensor_parallel.in_one_process = wrong
    sys.exit(tensor_parallel.main())
    """
    done = run("-c", textwrap.dedent(code))
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("DIFFERENT: request 4: logits of new token 2") == 1 + 4, "each rank is compared"
