"""The README's example, the pairs of programs in the guides, and every file in `examples/`, run as a reader would.

Not for: the calls in detail; `examples/transformer` (`tests/test_transformer.py`); the example that needs torch
(`make example-torch`).
"""

from __future__ import annotations

import multiprocessing
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).resolve().parents[3]
GUIDES = ROOT / "docs" / "how-to"
COMPATIBILITY = ROOT / "docs" / "llm-datadist"
ELSEWHERE = {"transformers_torch.py", "native_prefill_decode.py", "lldd_two_processes.py"}
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)
assert len(EXAMPLES) >= 2


def run(arguments: list[str]) -> str:
    """Run Python with `arguments` in a new process and return its output; a failure shows its standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    assert run([str(path)]).strip(), "an example shows something"


def test_prefill_and_decode_survive_an_expired_grant_and_a_killed_peer() -> None:
    output = run([str(ROOT / "examples" / "native_prefill_decode.py")])
    assert re.search(r"^400 requests, \d+ bytes compared, 0 wrong, 1 kill survived, ", output, re.MULTILINE)
    assert re.search(r"repeated: .*\b[1-9]\d* GrantEnded", output)
    assert "prefill: 384 of 384 blocks are free" in output


def test_program_of_the_original_api_runs() -> None:
    assert "pulled 2 blocks of 8 tensors from cluster 1" in run([str(ROOT / "examples" / "lldd_two_processes.py")])


def test_program_of_the_original_api_fails_with_its_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    program = runpy.run_path(str(ROOT / "examples" / "lldd_two_processes.py"))["main"].__globals__
    context = MagicMock()
    context.Pipe.return_value = MagicMock(), MagicMock()
    context.Process.return_value.exitcode = 1
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: context)
    monkeypatch.setitem(program, "decode", lambda _: None)
    with pytest.raises(SystemExit, match="exit code is 1"):
        program["main"]()


def test_readme_example_runs() -> None:
    (block,) = blocks(ROOT / "README.md")
    assert run(["-c", block]).strip() == "[1.5 1.5 1.5]"


def test_guide_two_processes_run() -> None:
    output, _ = run_pair(GUIDES / "two-processes.md", "26000", "press enter to end")
    assert output.strip() == "[1.5 1.5 1.5] shm"


def test_guide_layer_by_layer_runs() -> None:
    output, arrived = run_pair(COMPATIBILITY / "layerwise-guide.md", "26001", "press enter to see what arrived")
    # 16 tokens of one head of 64 values of 2 bytes, in 8 tensors.
    assert f"LLM_SUCCESS [LayerProgress(layers_done=4, num_layers=4, bytes_done={8 * 16 * 64 * 2})] [None]" in output
    assert arrived.strip() == "[1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5]"


def run_pair(page: Path, documented: str, prompt: str) -> tuple[str, str]:
    """Return the outputs of the second and of the first block with that port.

    The first block waits at `prompt` until the second has ended. A free port replaces the documented one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    listens, links = [block.replace(documented, port) for block in blocks(page) if documented in block]
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.read(len(prompt)) == prompt
            output = run(["-c", links])
            rest, _ = process.communicate("\n", timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0
    return output, rest


def blocks(page: Path) -> list[str]:
    """Every Python block of a page."""
    found = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{page.name} shows Python"
    return found
