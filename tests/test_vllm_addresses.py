"""At which addresses the workers of vLLM listen, which ones prefill tells decode, and to which ones decode connects."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from llm_datadist.integrations.vllm.addresses import advertised, allowed_peers, listen_address
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.settings import Settings

OWN = "10.0.0.5"
TOKEN = "0123456789abcdef"  # noqa: S105 - not a secret
VARIABLES = ("LLM_DATADIST_TOKEN", "LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_ACCEPT_REMOTE")


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def listens(worker: int = 0, replica: int = 0, own: str = OWN, **given: Any) -> str:
    """The address of a worker of a vLLM with two stages of three ranks."""
    return listen_address(Settings.parse(given), Shard(worker % 3, 3, 3, worker // 3, 2), replica, lambda: own)


def test_the_workers_of_one_host_have_ports_of_their_own() -> None:
    """Four data-parallel ranks with six workers each, in order."""
    ports = [
        int(listens(worker, replica, port=26_000)[10:]) for replica, worker in itertools.product(range(4), range(6))
    ]
    assert ports == list(range(26_000, 26_024))
    assert listens(5, 3) == "127.0.0.1:0"


@pytest.mark.parametrize("worker", [0, 5])
def test_ports_that_do_not_exist_are_refused(worker: int) -> None:
    """Each worker of a data-parallel rank names all of its ports, also if its own one exists."""
    assert listens(5, 1, port=65_524) == "127.0.0.1:65535"
    text = (
        r"^option 'port' is 65525: the workers of data-parallel rank 1 would listen at ports 65531 to 65536 "
        r"\(port \+ 6 \* data-parallel rank \+ worker\), but 65535 is the largest$"
    )
    with pytest.raises(ValueError, match=text):
        listens(worker, 1, port=65_525)


def test_nobody_else_is_admitted_so_workers_listen_on_loopback() -> None:
    assert listens() == "127.0.0.1:0"
    assert listens(engine_options={"accept_remote": False}) == "127.0.0.1:0"


@pytest.mark.parametrize(("option", "value"), [("token", TOKEN), ("token_file", "/token"), ("accept_remote", True)])
def test_workers_listen_where_vllm_has_chosen_if_other_hosts_are_admitted(option: str, value: Any) -> None:
    assert listens(engine_options={option: value}) == "10.0.0.5:0"
    assert listens(own="2001:db8::5", port=26_000, engine_options={option: value}) == "[2001:db8::5]:26000"
    assert listens(host="10.9.9.9", engine_options={option: value}) == "10.9.9.9:0"


@pytest.mark.parametrize("name", VARIABLES)
def test_a_token_in_the_environment_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, address in [("1", "10.0.0.5:0"), ("0", "127.0.0.1:0"), ("", "127.0.0.1:0")]:
        monkeypatch.setenv(name, value)
        assert listens() == address


def test_the_option_decides_and_not_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_ACCEPT_REMOTE", "1")
    assert listens(engine_options={"accept_remote": False}) == "127.0.0.1:0"
    assert listens(engine_options={"accept_remote": False, "token": TOKEN}) == "10.0.0.5:0"
    assert listens(engine_options={"accept_remote": None}) == "10.0.0.5:0"


@pytest.mark.parametrize("own", ["0.0.0.0", "::", "node1", "", "fe80::1%eth0"])  # noqa: S104
def test_an_address_that_vllm_has_not_found_is_refused(own: str) -> None:
    """vLLM returns 0.0.0.0 then, which would be all interfaces."""
    text = (
        f"vLLM's address of this host is '{own}', to which no peer can connect; set VLLM_HOST_IP or the option 'host'"
    )
    with pytest.raises(ValueError, match=text):
        listens(own=own, engine_options={"token": TOKEN})


@pytest.mark.parametrize(
    ("given", "listening", "told"),
    [
        ({}, "127.0.0.1:7", "127.0.0.1:7"),
        ({}, "[::1]:7", "[::1]:7"),
        ({"host": "0.0.0.0"}, "0.0.0.0:7", "10.0.0.5:7"),  # noqa: S104
        ({"host": "::"}, "[::]:7", "10.0.0.5:7"),
        ({"host": "0.0.0.0", "advertise": "192.0.2.1"}, "0.0.0.0:7", "192.0.2.1:7"),  # noqa: S104
        ({"host": "10.0.0.1", "advertise": "2001:db8::1"}, "10.0.0.1:7", "[2001:db8::1]:7"),
    ],
)
def test_prefill_tells_an_address_that_peers_can_reach(given: Any, listening: str, told: str) -> None:
    assert advertised(Settings.parse(given), listening, lambda: OWN) == told


def test_a_worker_that_listens_everywhere_needs_an_address_to_tell() -> None:
    with pytest.raises(ValueError, match=r"vLLM's address of this host is '0\.0\.0\.0', .* the option 'advertise'"):
        advertised(Settings.parse({"host": "::"}), "[::]:7", lambda: "0.0.0.0")  # noqa: S104


@pytest.mark.parametrize(
    ("given", "own", "yes", "no"),
    [
        ({}, OWN, ["127.0.0.1:1", "[::1]:1", "10.0.0.5:1"], ["10.0.0.6:1"]),
        ({}, "0.0.0.0", ["127.0.0.1:1"], ["0.0.0.0:1", "10.0.0.5:1"]),  # noqa: S104
        ({}, "node1", ["127.0.0.1:1"], ["10.0.0.5:1"]),
        ({"allowed_peers": ["10.0.0.6"]}, OWN, ["10.0.0.6:1"], ["127.0.0.1:1", "10.0.0.5:1"]),
        ({"allowed_peers": []}, OWN, [], ["127.0.0.1:1", "10.0.0.5:1"]),
    ],
)
def test_decode_connects_to_its_own_host_by_default(given: Any, own: str, yes: list[str], no: list[str]) -> None:
    allowed = allowed_peers(Settings.parse(given), lambda: own)
    assert [allowed.checked(address) for address in yes] == yes
    for address in no:
        with pytest.raises(ValueError, match="is not one of allowed_peers"):
            allowed.checked(address)
