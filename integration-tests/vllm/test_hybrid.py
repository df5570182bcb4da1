"""A model with a sliding window in some layers, which has several KV cache groups."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from servers import Server, alone, hand_over

from conftest import TOKENS, Start
from model import make_hybrid_model

if TYPE_CHECKING:
    from collections.abc import Iterator

Prompts = dict[str, list[int]]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("hybrid")
    make_hybrid_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def few(prompts: Prompts) -> Prompts:
    return dict(list(prompts.items())[:8])


@pytest.fixture(scope="module")
def expected_of_hybrid(hybrid: str, few: Prompts) -> Prompts:
    server = Server(hybrid).wait()
    found: Prompts = {}
    for name, tokens in few.items():
        found.update(alone(server, {name: tokens}, TOKENS))
    server.stop()
    return found


@pytest.fixture
def start_hybrid(hybrid: str) -> Iterator[Start]:
    servers = Start(hybrid)
    yield servers
    servers.end()


@pytest.mark.parametrize(
    ("connector", "ranks", "extra"),
    [
        ("LlmDatadistConnector", 1, {}),
        ("LlmDatadistConnector", 2, {}),
        ("LlmDatadistConnector", 1, {"host_buffers": True}),
        ("NothingPulled", 1, {}),
        ("NothingPulled", 2, {}),
    ],
)
def test_all_groups_arrive(
    start_hybrid: Start, few: Prompts, expected_of_hybrid: Prompts, connector: str, ranks: int, extra: Any
) -> None:
    """The prompts are shorter and longer than the window. Nothing pulled is the negative control."""
    pair = start_hybrid.pair(decode={"connector": connector, "tensor_parallel_size": ranks}, extra=extra)
    found = {}
    for name, tokens in few.items():
        found.update(hand_over(*pair, {name: tokens}, TOKENS))
    right = [name for name, done in found.items() if done.tokens == expected_of_hybrid[name]]
    assert right == (list(few) if connector == "LlmDatadistConnector" else [])
    time.sleep(1)
    assert [server.stop().usage for server in pair] == [0, 0]
