"""A model with latent attention (MLA).

vLLM's CPU kernels round differently for a prompt and for a single token, and decode computes the last token of a prompt
as a single one. So the tokens differ from those of one vLLM, and are compared with those of vLLM's NIXL connector. With
several ranks, one vLLM gives other tokens than with one rank, so nothing can be compared.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest
from servers import Server, hand_over, start_both, where
from test_prefill_decode import wrong

from conftest import TOKENS, Start
from model import FIRST_WORD, VOCABULARY, make_latent_model

if TYPE_CHECKING:
    from collections.abc import Iterator

Prompts = dict[str, list[int]]
LENGTHS = (32, 33, 40, 130, 300, 700, 1500)
OPTIONS = {"dtype": "bfloat16", "enable_prefix_caching": False}


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("latent")
    make_latent_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def latent_prompts() -> Prompts:
    rng = random.Random(5)  # noqa: S311 - not a secret
    return {f"l{length}": [rng.randrange(FIRST_WORD, VOCABULARY - 8) for _ in range(length)] for length in LENGTHS}


@pytest.fixture(scope="module")
def expected_of_latent(latent: str, latent_prompts: Prompts) -> Prompts:
    pytest.importorskip("nixl", reason="the tokens are compared with those of NIXL")
    servers = [
        Server(
            latent,
            {"kv_connector": "NixlConnector", "kv_role": role, "engine_id": role},
            environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
            **OPTIONS,
        ).wait()
        for role, port in (("kv_producer", 5750), ("kv_consumer", 5760))
    ]
    found = {}
    for name, tokens in latent_prompts.items():
        found.update(hand_over(*servers, {name: tokens}, TOKENS))
    for server in servers:
        server.stop(check=False)
    return {name: done.tokens for name, done in found.items()}


@pytest.fixture
def start_latent(latent: str) -> Iterator[Start]:
    servers = Start(latent)
    yield servers
    servers.end()


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("connector", ["LlmDatadistConnector", "NothingPulled"])
def test_latent_vectors_arrive(
    start_latent: Start, latent_prompts: Prompts, expected_of_latent: Prompts, connector: str, layerwise: bool
) -> None:
    """Nothing pulled is the negative control."""
    prefill, decode = start_latent.pair(decode={"connector": connector}, extra={"layers_per_read": 1}, **OPTIONS)
    transfer_params = where(prefill, decode, latent_prompts["l40"])
    found = {}
    for name, tokens in latent_prompts.items():
        if layerwise:
            start_both(prefill, decode, {name: tokens}, TOKENS, transfer_params)
            found.update([decode.result()])
            prefill.result()
        else:
            found.update(hand_over(prefill, decode, {name: tokens}, TOKENS))
    assert wrong(found, expected_of_latent) == (list(latent_prompts) if connector == "NothingPulled" else [])
    time.sleep(1)
    assert [server.stop().usage for server in (prefill, decode)] == [0, 0]
