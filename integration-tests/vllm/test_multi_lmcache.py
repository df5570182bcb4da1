"""A real vLLM with `MultiConnector`: our connector beside that of LMCache, whose server is a process of its own.

LMCache's connector without a server stores nothing on a CPU ("No supported cpu connector found").
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from test_multi_servers import both
from test_prefill_decode import first, one_by_one, pass_on, prefilled, wrong

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Start

Prompts = dict[str, list[int]]
pytest.importorskip("lmcache")
LIMIT_S = 60


@pytest.fixture
def lmcache() -> Iterator[dict[str, Any]]:
    """The connector of an LMCache server that runs."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {"host": "127.0.0.1", "port": port, "chunk-size": 32, "l1-size-gb": 0.5, "eviction-policy": "LRU"}
    # A CPU has no memory that the server could open, so vLLM's worker copies.
    options["supported-transfer-mode"] = "auto"
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server"]
    command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with subprocess.Popen(command, env={**os.environ, "LMCACHE_TRACK_USAGE": "false"}) as server:  # noqa: S603
        try:
            end = time.monotonic() + LIMIT_S
            while socket.socket().connect_ex(("127.0.0.1", port)):
                assert server.poll() is None
                assert time.monotonic() < end
                time.sleep(0.05)
            yield {
                "kv_connector": "LMCacheMPConnector",
                "kv_connector_module_path": "lmcache_connector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
            }
        finally:
            server.kill()


def test_lmcache_beside_the_connector(
    start: Start, prompts: Prompts, expected: Prompts, lmcache: dict[str, Any]
) -> None:
    """Prompts that were computed once come back from LMCache, and are handed over like others."""
    prefill, decode = both(start, True, lmcache)
    some = first(prompts, 8)
    assert wrong(one_by_one(prefill, decode, some), expected) == []
    responses = prefilled(prefill, some)
    whole = sum(len(tokens) // 32 * 32 for tokens in some.values())
    assert sum(done.cached for done in responses.values()) > 0.8 * whole
    pass_on(decode, some, responses)
    assert wrong(dict(decode.result() for _ in some), expected) == []
    time.sleep(1)
    assert (prefill.usage(), decode.usage()) == (0, 0)
