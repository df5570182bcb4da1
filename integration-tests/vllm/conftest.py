"""A model, prompts, and the tokens of one vLLM without a connector."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from servers import Server, alone

from llm_datadist.integrations.vllm.supported import installed
from model import FIRST_WORD, VOCABULARY, make_model

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTHS = (40, 130, 300, 700, 1500, 33, 32, 64)
TOKENS = 16


def pytest_report_header() -> str:
    return f"vLLM {installed()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--subset", action="store_true", help="only the tests for CI")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "subset: part of the short version for CI")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--subset"):
        return
    left_out = [item for item in items if item.get_closest_marker("subset") is None]
    items[:] = [item for item in items if item.get_closest_marker("subset") is not None]
    config.hook.pytest_deselected(items=left_out)
    for item in left_out:
        print("not in the subset:", item.name)  # noqa: T201 - nothing is left out silently


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small model."""
    folder: Path = tmp_path_factory.mktemp("model")
    make_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def parallel_state(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """vLLM's configuration, in which this process is the only rank."""
    # Not all tests need vLLM in their own process.
    from halves import become_the_only_rank, configuration  # noqa: PLC0415
    from vllm.config import set_current_vllm_config  # noqa: PLC0415

    config = configuration(model)
    with set_current_vllm_config(config):
        become_the_only_rank(tmp_path_factory.mktemp("store") / "file")
        yield config


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[int]]:
    """48 prompts of 8 lengths. The first 8 have all of them."""
    rng = random.Random(1)  # noqa: S311 - not a secret
    return {
        f"r{index}": [rng.randrange(FIRST_WORD, VOCABULARY - 8) for _ in range(length)]
        for index, length in enumerate(LENGTHS * 6)
    }


@pytest.fixture(scope="session")
def expected(model: str, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    """The tokens of one vLLM, one request at a time."""
    server = Server(model).wait()
    found: dict[str, list[int]] = {}
    for name, tokens in prompts.items():
        found.update(alone(server, {name: tokens}, TOKENS))
    server.stop()
    return found


class Start:
    """Starts servers, and kills at the end those that still run."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._servers: list[Server] = []

    def __call__(self, role: str, name: str = "", connector: str = "LlmDatadistConnector", **options: Any) -> Server:
        """Start a server.

        Args:
            role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
            name: its engine id; ``role`` by default.
            connector: the name of the connector, or of a class in ``broken_connectors``.
            **options: arguments of ``EngineArgs``; ``extra`` has the options of the connector, and ``policy`` is
                what happens with a request that was not received.
        """
        kv = {
            "kv_connector": connector,
            "kv_role": role,
            "engine_id": name or role,
            "kv_load_failure_policy": options.pop("policy", "fail"),
            "kv_connector_extra_config": options.pop("extra", {}),
        }
        if connector != "LlmDatadistConnector":
            kv["kv_connector_module_path"] = "broken_connectors"
        return self.configured(kv, **options)

    def configured(self, kv: dict[str, Any], **options: Any) -> Server:
        """Start a server with a ``KVTransferConfig``, and arguments of ``EngineArgs``."""
        self._servers.append(Server(self._model, kv, **options))
        return self._servers[-1]

    def pair(self, prefill: Any = (), decode: Any = (), **both: Any) -> tuple[Server, Server]:
        """Start prefill and decode, and wait until both serve."""
        pair = self("kv_producer", **{**both, **dict(prefill)}), self("kv_consumer", **{**both, **dict(decode)})
        return pair[0].wait(), pair[1].wait()

    def end(self) -> None:
        """Kill the servers that run."""
        for server in self._servers:
            server.kill()


@pytest.fixture
def start(model: str) -> Iterator[Start]:
    """Starts servers."""
    servers = Start(model)
    yield servers
    servers.end()
