"""The addresses at which engines listen, those that they advertise to peers, and those that they may connect to.

An engine listens at an address of its own host, and vLLM already chooses one for each host (``VLLM_HOST_IP``). So one
setting serves all workers and tiers, even if they run on several nodes.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Any, Protocol

from llm_datadist.integrations.vllm.allowed_peers import LOOPBACK, MAX_PORT, AllowedPeers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llm_datadist.integrations.vllm.ranks import Shard

__all__ = ["AUTO", "Settings", "advertised", "allowed_peers", "check", "listen_address"]

AUTO = "auto"
# The options and variables of the engine that admit processes of other hosts.
_TOKEN_OPTIONS = ("token", "token_file")
_TOKEN_VARIABLES = ("LLM_DATADIST_TOKEN", "LLM_DATADIST_TOKEN_FILE")
_ACCEPT_REMOTE = "LLM_DATADIST_ACCEPT_REMOTE"


class Settings(Protocol):
    """The options about addresses, of the connector or of the peer-to-peer tier."""

    @property
    def prefix(self) -> str:
        """Prefix of the option names of ``host``, ``port`` and ``advertise``, for error messages."""

    @property
    def host(self) -> str:
        """IP address at which engines listen, or ``AUTO``."""

    @property
    def port(self) -> int:
        """Port of the first engine; 0 takes free ports."""

    @property
    def advertise(self) -> str:
        """IP address to advertise to peers, if engines listen at another one."""

    @property
    def allowed_peers(self) -> list[str] | None:
        """The peers to connect to. ``None``: those of this host."""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of ``Engine``."""


def check(settings: Settings) -> None:
    """Check the addresses.

    Raises:
        ValueError: one of them is invalid.
    """
    AllowedPeers(settings.allowed_peers or [])
    host, advertise = settings.host, settings.advertise
    if host != AUTO and not _is_ip(host):
        name = f"{settings.prefix}host"
        raise ValueError(f"option {name!r} is {host!r}: must be {AUTO!r} or an IP address without a zone")
    if advertise and not _specific_ip(advertise):
        raise ValueError(f"option '{settings.prefix}advertise' is {advertise!r}: must be an IP address of one host")


def listen_address(settings: Settings, shard: Shard, replica: int, own: Callable[[], str]) -> str:
    """Return the address at which a worker listens.

    Each data-parallel rank has the ports of all its workers, in order, so the ranks of one host never share one.

    Args:
        settings: the options.
        shard: the part of the model that the worker holds.
        replica: the data-parallel rank of its vLLM.
        own: returns the address of this host that vLLM has chosen.

    Raises:
        ValueError: the port of a worker is too large, or vLLM has found no address.
    """
    first = settings.port + replica * shard.workers
    last = first + shard.workers - 1
    if settings.port and last > MAX_PORT:
        raise ValueError(
            f"option '{settings.prefix}port' is {settings.port}: the workers of data-parallel rank {replica} would "
            f"listen at ports {first} to {last} (port + {shard.workers} * data-parallel rank + worker), but {MAX_PORT} "
            "is the largest"
        )
    host = settings.host
    if host == AUTO:
        host = _chosen(own, f"{settings.prefix}host") if _admits_other_hosts(settings.engine_options) else "127.0.0.1"
    return _joined(host, first + shard.worker if settings.port else 0)


def advertised(settings: Settings, listening: str, own: Callable[[], str]) -> str:
    """Return the address to advertise to peers, for an engine that listens at ``listening``.

    Raises:
        ValueError: the engine listens at all addresses, and vLLM has found none for this host.
    """
    host, _, port = listening.rpartition(":")
    host = settings.advertise or host.strip("[]")
    if ipaddress.ip_address(host).is_unspecified:
        host = _chosen(own, f"{settings.prefix}advertise")
    return _joined(host, int(port))


def allowed_peers(settings: Settings, own: Callable[[], str]) -> AllowedPeers:
    """Return the peers that an engine may connect to: by default, those of its own host."""
    if settings.allowed_peers is not None:
        return AllowedPeers(settings.allowed_peers)
    chosen = _specific_ip(own())
    return AllowedPeers([*LOOPBACK, *([chosen] if chosen else [])])


def _specific_ip(text: str) -> str:
    """Return an IP address to which a peer can connect, or an empty text."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return ""
    # The engine has no zones.
    return "" if ip.is_unspecified or ip.is_multicast or "%" in text else str(ip)


def _is_ip(text: str) -> bool:
    try:
        return "%" not in str(ipaddress.ip_address(text))
    except ValueError:
        return False


def _chosen(own: Callable[[], str], option: str) -> str:
    found = own()
    chosen = _specific_ip(found)
    if not chosen:
        text = f"vLLM's address of this host is {found!r}, to which no peer can connect"
        raise ValueError(f"{text}; set VLLM_HOST_IP or the option {option!r} to an IP address")
    return chosen


def _admits_other_hosts(options: Mapping[str, Any]) -> bool:
    accept = options.get("accept_remote")
    variables = (_ACCEPT_REMOTE, *_TOKEN_VARIABLES) if accept is None else _TOKEN_VARIABLES
    given = any(os.environ.get(name, "") not in ("", "0") for name in variables)
    return given or bool(accept) or any(options.get(name) for name in _TOKEN_OPTIONS)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
