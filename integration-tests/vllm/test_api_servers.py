"""The example `examples/vllm`: two API servers of vLLM and a proxy, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from servers import ENVIRONMENT, REQUEST_S

from conftest import TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PORT = 18_350
Prompts = dict[str, list[int]]


@pytest.fixture(params=["after prefill", "layerwise"])
def url(model: str, request: pytest.FixtureRequest) -> Iterator[str]:
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--no-enable-prefix-caching"]
    options += ["--layerwise"] if request.param == "layerwise" else []
    command = [sys.executable, str(ROOT / "examples/vllm"), model, "--port", str(PORT), "--block-size", "32", *options]
    environment = {**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)  # noqa: S603
    assert process.stdout is not None
    try:
        assert any(line.startswith("ready: ") for line in process.stdout), "the servers did not start"
        yield f"http://127.0.0.1:{PORT}"
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ask(address: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=REQUEST_S) as response:  # noqa: S310
        return json.load(response)


def completion(url: str, model: str, prompt: Any, **options: Any) -> list[list[int]]:
    """The tokens of each completion. Only the most probable token is ever sampled."""
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "top_k": 1, "ignore_eos": True, **options}
    found = ask(f"{url}/v1/completions", {**body, "return_token_ids": True})
    return [list(choice["token_ids"]) for choice in found["choices"]]


def received(port: int) -> float:
    """The number of receives that vLLM's metrics of a server count."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=REQUEST_S) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:llm_datadist_receive_bytes_count"))


def test_the_tokens_are_those_of_one_vllm(url: str, model: str, prompts: Prompts, expected: Prompts) -> None:
    some = dict(list(prompts.items())[:16])
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(some, threads.map(lambda tokens: completion(url, model, tokens), some.values())))
    assert [name for name, tokens in found.items() if tokens != [expected[name]]] == []
    # Decode has received all of them, and computed none.
    assert received(PORT + 2) == 16
    assert received(PORT + 1) == 0
    # Several completions are several requests in decode, and several prompts too.
    assert completion(url, model, prompts["r3"], n=3) == [expected["r3"]] * 3
    assert received(PORT + 2) > 16
    assert completion(url, model, [prompts["r0"], prompts["r1"]]) == [expected["r0"], expected["r1"]]
