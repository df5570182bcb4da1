"""What the integrations share: the texts of addresses."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from llm_datadist.integrations.addresses import engine_address, host_and_port, listen_address


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("10.0.0.1:7600", ("10.0.0.1", 7600)),
        ("node-7.example:65535", ("node-7.example", 65535)),
        ("localhost:0", ("localhost", 0)),
        ("[::1]:1", ("::1", 1)),
        ("[fd00::2]:7600", ("fd00::2", 7600)),
    ],
)
def test_hosts_and_ports(text: str, split: tuple[str, int]) -> None:
    assert host_and_port("address", text) == split


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":1", "a:", "a:b", "a:1.5", "a:-1", "a:65536", "a:1" + "0" * 5000, "a:\u0661", "a:b:1"),
        *("[]", "[]:1", "[::1", "[::1]1", "[::1]:", "[::1]:x", "[10.0.0.1]:1", "[\0]:1", "[fe80::1%1]:1"),
        *("::1%lo", "::1]:1", "1::2::3", "10.0.0.1", "node-7.example", "::", "::1", "[::1]", "fd00::2:7600"),
    ],
)
def test_texts_that_are_no_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"^listen=.* is not an address: give host:port or \[ipv6\]:port"):
        host_and_port("listen", text)


@pytest.mark.parametrize("value", [None, 7, b"::1"])
def test_addresses_are_texts(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^listen must be a str, not "):
        host_and_port("listen", value)


V4, V6 = (socket.AF_INET, 1, 6, "", ("10.0.0.1", 0)), (socket.AF_INET6, 1, 6, "", ("fd00::2", 0, 0, 0))


@pytest.mark.parametrize(
    ("found", "address"),
    [([V4], "10.0.0.1:7"), ([V6, V4], "10.0.0.1:7"), ([V4, V6], "10.0.0.1:7"), ([V6], "[fd00::2]:7")],
)
def test_a_name_means_the_same_address_on_every_host(
    monkeypatch: pytest.MonkeyPatch, found: list[Any], address: str
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert engine_address("listen", "node-7", 7) == address


def test_ipv6_addresses_get_brackets() -> None:
    assert engine_address("listen", "::1", 7) == "[::1]:7"


def test_a_name_that_cannot_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.raises(ValueError, match=r"^listen: cannot look up the host "):
        engine_address("listen", "a" * 64, 7)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ValueError, match=r"^listen: cannot look up the host 'node-7': Name or service not known$"):
        engine_address("listen", "node-7", 7)


@pytest.mark.parametrize(
    ("host", "found", "warned"),
    [
        ("node1", "127.0.1.1", True),
        ("node1.example", "::1", True),
        ("node1", "10.0.0.1", False),
        ("localhost", "127.0.0.1", False),
        ("localhost.localdomain", "::1", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("::1", "::1", False),
    ],
)
def test_a_name_that_means_the_loopback_interface_is_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, host: str, found: str, *, warned: bool
) -> None:
    """Debian gives its own name the address 127.0.1.1, which no other host reaches."""
    family = socket.AF_INET6 if ":" in found else socket.AF_INET
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(family, 1, 6, "", (found, 0))])
    assert listen_address("local_hostname", host, 7, logging.getLogger("a test")) in (f"{found}:7", f"[{found}]:7")
    text = f"local_hostname={host!r} means {found} here (see /etc/hosts): peers on other hosts cannot reach it; "
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert said == ([("WARNING", text + "give the IP address")] if warned else [])
