"""The example `examples/vllm`: API servers of vLLM and a proxy, over HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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


@contextmanager
def serving(model: str, *given: str) -> Iterator[str]:
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--no-enable-prefix-caching", *given]
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


def metric(port: int, name: str) -> list[float]:
    """The values of one of vLLM's metrics of a server, one for each of its data-parallel ranks."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=REQUEST_S) as response:
        lines = response.read().decode().splitlines()
    return [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]


def received(port: int) -> float:
    """The number of receives of a server."""
    return sum(metric(port, "vllm:llm_datadist_receive_bytes_count"))


def wrong(url: str, model: str, some: Prompts, expected: Prompts) -> list[str]:
    """Ask for completions, eight at a time, and return the names of those with other tokens than expected."""
    with ThreadPoolExecutor(8) as threads:
        found = dict(zip(some, threads.map(lambda tokens: completion(url, model, tokens), some.values())))
    return [name for name, tokens in found.items() if tokens != [expected[name]]]


@pytest.mark.parametrize("options", [(), ("--layerwise",)], ids=["after prefill", "layerwise"])
def test_the_tokens_are_those_of_one_vllm(
    options: tuple[str, ...], model: str, prompts: Prompts, expected: Prompts
) -> None:
    with serving(model, *options) as url:
        check(url, model, prompts, expected)


def check(url: str, model: str, prompts: Prompts, expected: Prompts) -> None:
    assert wrong(url, model, dict(list(prompts.items())[:16]), expected) == []
    # Decode has received all of them, and computed none.
    assert received(PORT + 2) == 16
    assert received(PORT + 1) == 0
    # Several completions are several requests in decode, and several prompts too.
    assert completion(url, model, prompts["r3"], n=3) == [expected["r3"]] * 3
    assert received(PORT + 2) > 16
    assert completion(url, model, [prompts["r0"], prompts["r1"]]) == [expected["r0"], expected["r1"]]


def test_data_parallel_ranks(model: str, prompts: Prompts, expected: Prompts) -> None:
    """Each of the two ranks of prefill hands over to each of the two of decode.

    The first two requests are received after prefill, and the others while it computes.
    """
    with serving(model, "--layerwise", "--data-parallel-size", "2") as url:
        assert wrong(url, model, dict(list(prompts.items())[:24]), expected) == []
        prompts_of = metric(PORT + 1, "vllm:prompt_tokens_total")
        assert (len(prompts_of), min(prompts_of) > 0) == (2, True)
        counts = metric(PORT + 2, "vllm:llm_datadist_receive_bytes_count")
        assert (len(counts), sum(counts), min(counts) > 0) == (2, 24, True)
        # The completions of one request are computed by one rank.
        assert completion(url, model, prompts["r3"], n=3) == [expected["r3"]] * 3


def test_several_servers(model: str, prompts: Prompts, expected: Prompts) -> None:
    with serving(model, "--prefills", "2", "--decodes", "2") as url:
        assert wrong(url, model, dict(list(prompts.items())[:16]), expected) == []
        assert [received(PORT + number) for number in range(1, 5)] == [0, 0, 8, 8]
