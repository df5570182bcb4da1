"""The addresses at which the workers listen, those that prefill tells decode, and those that decode may connect to.

A worker listens at an address of its own host, and vLLM already chooses one for each host (``VLLM_HOST_IP``). So one
setting serves all workers, also if they run on several nodes.
"""

from __future__ import annotations

import ipaddress
import os
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.allowed_peers import LOOPBACK, MAX_PORT, AllowedPeers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llm_datadist.integrations.vllm.ranks import Shard
    from llm_datadist.integrations.vllm.settings import Settings

__all__ = ["AUTO", "advertised", "allowed_peers", "listen_address", "specific_ip"]

AUTO = "auto"
# The options and variables of the engine that admit processes of other hosts.
_ADMITTING_OPTIONS = ("token", "token_file", "accept_remote")
_ADMITTING_VARIABLES = ("LLM_DATADIST_TOKEN", "LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_ACCEPT_REMOTE")


def listen_address(settings: Settings, shard: Shard, replica: int, own: Callable[[], str]) -> str:
    """Return the address at which a worker listens.

    Each data-parallel rank has the ports of all its workers, in order, so the ranks of one host never share one.

    Args:
        settings: the options of the connector.
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
            f"option 'port' is {settings.port}: the workers of data-parallel rank {replica} would listen at ports "
            f"{first} to {last} (port + {shard.workers} * data-parallel rank + worker), but {MAX_PORT} is the largest"
        )
    host = settings.host
    if host == AUTO:
        host = _chosen(own, "host") if _admits_other_hosts(settings.engine_options) else "127.0.0.1"
    return _joined(host, first + shard.worker if settings.port else 0)


def advertised(settings: Settings, listening: str, own: Callable[[], str]) -> str:
    """Return the address that prefill tells decode, for a worker that listens at ``listening``.

    Raises:
        ValueError: the worker listens at all addresses, and vLLM has found none for this host.
    """
    host, _, port = listening.rpartition(":")
    host = settings.advertise or host.strip("[]")
    if ipaddress.ip_address(host).is_unspecified:
        host = _chosen(own, "advertise")
    return _joined(host, int(port))


def allowed_peers(settings: Settings, own: Callable[[], str]) -> AllowedPeers:
    """Return the peers that decode may connect to: by default, those of its own host."""
    if settings.allowed_peers is not None:
        return AllowedPeers(settings.allowed_peers)
    chosen = specific_ip(own())
    return AllowedPeers([*LOOPBACK, *([chosen] if chosen else [])])


def specific_ip(text: str) -> str:
    """Return an IP address to which a peer can connect, or an empty text."""
    try:
        ip = ipaddress.ip_address(text)
    except ValueError:
        return ""
    # The engine has no zones.
    return "" if ip.is_unspecified or ip.is_multicast or "%" in text else str(ip)


def _chosen(own: Callable[[], str], option: str) -> str:
    found = own()
    chosen = specific_ip(found)
    if not chosen:
        text = f"vLLM's address of this host is {found!r}, to which no peer can connect"
        raise ValueError(f"{text}; set VLLM_HOST_IP or the option {option!r} of LlmDatadistConnector to an IP address")
    return chosen


def _admits_other_hosts(options: Mapping[str, Any]) -> bool:
    variables = (os.environ.get(name, "") for name in _ADMITTING_VARIABLES)
    return any(options.get(name) for name in _ADMITTING_OPTIONS) or any(value not in ("", "0") for value in variables)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
