"""The storage of SGLang (0.5.23): its own threads and host pools, on a CPU. No server and no model run here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hicache import LIMIT, PAGE, PAGES, PIECE, Server, options, prompt
from sglang.srt import runtime_context

from conftest import kill, serving
from llm_datadist import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = f"{PIECE >> 10}KiB"


@pytest.fixture
def keeper(socket: Path) -> Iterator[Any]:
    with serving(socket, VALUE) as made:
        yield made


@pytest.fixture
def server(socket: Path) -> Iterator[Server]:
    made = Server(options(str(socket)))
    yield made
    made.detach()


def written(server: Server, seed: int, pages: int = PAGES) -> bytes:
    """Have the server store the pages of a prompt, and return their bytes. The host pool has other ones then."""
    rows = server.pool.alloc(pages * PAGE)
    server.fill(rows, seed)
    content = server.bytes(rows)
    assert server.write(rows, prompt(seed, pages)) == pages * PAGE
    server.fill(rows, seed + 1000)
    server.pool.free(rows)
    return content


def other_process(socket: Path, revision: str, seed: int) -> Any:
    command = [sys.executable, str(Path(__file__).with_name("hicache.py")), str(socket), revision, str(seed)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)  # noqa: S603
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.usefixtures("keeper")
def test_evicted_pages_come_back(server: Server) -> None:
    content = written(server, 1)
    rows = server.prefetch(prompt(1))
    assert len(rows) == PAGES * PAGE
    assert server.bytes(rows) == content


@pytest.mark.usefixtures("keeper")
def test_another_process_finds_them_unless_its_revision_differs(server: Server, socket: Path) -> None:
    content = written(server, 2)
    found = other_process(socket, "r", 2)
    assert found == {"tokens": PAGES * PAGE, "digest": hashlib.sha256(content).hexdigest()}
    assert other_process(socket, "another", 2)["tokens"] == 0


@pytest.mark.usefixtures("keeper")
def test_the_common_prefix_of_two_prompts_is_found(server: Server) -> None:
    content = written(server, 3, 20)
    tokens = prompt(3, 20)[: 12 * PAGE] + prompt(4, 8)
    rows = server.prefetch(tokens)
    assert len(rows) == 12 * PAGE
    half = len(content) // 2  # keys of all pages, then values
    expected = b"".join(content[at : at + half][: half * 12 // 20] for at in (0, half))
    assert server.bytes(rows) == expected


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("pool", [{"layout": "page_first_direct"}, {"layout": "layer_first"}, {"dtype": torch.float16}])
def test_pools_of_another_form_have_pages_of_their_own(server: Server, socket: Path, pool: dict[str, Any]) -> None:
    written(server, 5, 10)
    other = Server(options(str(socket)), **pool)
    try:
        assert len(other.prefetch(prompt(5, 10))) == 0
        rows = other.pool.alloc(10 * PAGE)
        assert other.write(rows, prompt(5, 10)) == 10 * PAGE
        assert len(other.prefetch(prompt(5, 10))) == 10 * PAGE
    finally:
        other.detach()


def test_a_killed_keeper_costs_hits_only_and_a_new_one_is_used(server: Server, socket: Path) -> None:
    with serving(socket, VALUE) as first:
        end = time.monotonic() + LIMIT
        rows = server.pool.alloc(PAGE)
        while not server.write(rows, prompt(6, 1)):
            assert time.monotonic() < end
        content = written(server, 7, 50)
        assert server.bytes(server.prefetch(prompt(7, 50))) == content
        kill(first, socket)
        assert len(server.prefetch(prompt(7, 50))) == 0
        rows = server.pool.alloc(50 * PAGE)
        assert server.write(rows, prompt(7, 50)) == 0
    with serving(socket, VALUE):
        end = time.monotonic() + LIMIT
        while not server.write(rows, prompt(7, 50)):
            assert time.monotonic() < end
        assert len(server.prefetch(prompt(7, 50))) == 50 * PAGE


@pytest.mark.usefixtures("keeper")
def test_the_storage_is_attached_again_while_the_server_runs(server: Server, socket: Path) -> None:
    content = written(server, 8, 10)
    server.detach()
    server.attach(options(str(socket)))
    assert server.bytes(server.prefetch(prompt(8, 10))) == content
    assert server.controller.clear_storage_backend()
    assert len(server.prefetch(prompt(8, 10))) == 0
    server.detach()
    server.attach(options(str(socket)))
    assert server.bytes(server.prefetch(prompt(8, 10))) == content


def test_a_wrong_configuration_fails_the_attach(socket: Path) -> None:
    for extra, text in [({"sockets": "k"}, "unknown field `sockets`"), ({"interface_v1": 0}, "interface_v1=0")]:
        with pytest.raises(ValueError, match=text):
            Server(options(str(socket), **extra))
    with serving(socket, "4KiB"), pytest.raises(InvalidArgument, match=str(PIECE)):
        Server(options(str(socket)))


@pytest.mark.usefixtures("keeper")
def test_kinds_of_8_bit_floats_share_nothing(socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang has all of them as bytes in its host pool, and its option says which."""
    with pytest.raises(ValueError, match="dtype must be known"):
        Server(options(str(socket)), dtype=torch.uint8)
    assert runtime_context.get_model
    for kind, found in [("fp8_e4m3", 0), ("fp8_e5m2", 0), ("fp8_e4m3", 10)]:
        monkeypatch.setattr(runtime_context, "get_model", lambda kind=kind: SimpleNamespace(kv_cache_dtype=kind))
        server = Server(options(str(socket)), dtype=torch.uint8)
        assert len(server.prefetch(prompt(9, 10))) == found * PAGE
        written(server, 9, 10)
        server.detach()
