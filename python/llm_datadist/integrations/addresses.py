"""Addresses that users give to the integrations: a host name, an IPv4 or an IPv6 address, and a port.

The engine itself takes ``ip:port`` and ``[ipv6]:port`` only.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging

__all__ = ["engine_address", "host_and_port", "listen_address"]

_MAX_PORT = 65_535


def host_and_port(name: str, text: str) -> tuple[str, int]:
    """Split an address into its host, without brackets, and its port.

    Args:
        name: name of the argument, for error texts.
        text: ``host:port`` or ``[ipv6]:port``. A host is a name or an IPv4 address.

    Raises:
        TypeError: the address is not a ``str``.
        ValueError: the text is not an address.
    """
    if not isinstance(text, str):
        raise TypeError(f"{name} must be a str, not {type(text).__name__}")
    host, _, port = text.rpartition(":")
    brackets = host.startswith("[") and host.endswith("]")
    if brackets:
        host = host[1:-1]
    valid = _is_ipv6(host) if brackets else host and ":" not in host
    if not valid or not _is_port(port):
        raise ValueError(
            f"{name}={text!r} is not an address: give host:port or [ipv6]:port, with a port of 0 to {_MAX_PORT} and an "
            "IPv6 address without a zone"
        )
    return host, int(port)


def engine_address(name: str, host: str, port: int) -> str:
    """Return an address for the engine. A host name is looked up; its first IPv4 address counts before IPv6.

    Args:
        name: name of the argument, for error texts.
        host: a host name or an IP address, without brackets.
        port: the port.

    Returns:
        ``ip:port`` or ``[ipv6]:port``.

    Raises:
        ValueError: the host name cannot be looked up.
    """
    if ":" in host:
        return f"[{host}]:{port}"
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a label that no host name can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{name}: cannot look up the host {host!r}: {reason}") from error
    # The same order on every host, so that a name that has both means the same address to both sides.
    family, *_, socket_address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return f"[{socket_address[0]}]:{port}" if family == socket.AF_INET6 else f"{socket_address[0]}:{port}"


def listen_address(name: str, host: str, port: int, logger: logging.Logger) -> str:
    """Return ``engine_address``, at which this process listens.

    A line at WARNING is logged if only this host can reach the address although the name of a host was given. Debian,
    for example, gives its own name the address 127.0.1.1.
    """
    address = engine_address(name, host, port)
    found = address.rpartition(":")[0].strip("[]")
    if not _is_local(host) and ipaddress.ip_address(found).is_loopback:
        text = "%s=%r means %s here (see /etc/hosts): peers on other hosts cannot reach it; give the IP address"
        logger.warning(text, name, host, found)
    return address


def _is_local(host: str) -> bool:
    """Return whether a host is an IP address, or a name of the host itself that no other host knows it by."""
    try:
        socket.inet_aton(host)
    except OSError:
        return ":" in host or host.casefold().partition(".")[0] in {"localhost", "ip6-localhost"}
    return True


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(_MAX_PORT)) and int(text) <= _MAX_PORT


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):  # ValueError: a NUL, or a character without an encoding
        return False
    return True
