"""The peers that decode may connect to. The parameters of a request name addresses, and clients may choose those."""

from __future__ import annotations

import ipaddress
import re
from typing import TYPE_CHECKING, Union

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LOOPBACK", "AllowedPeers"]

# By default, decode connects to its own host only, where prefill listens by default.
LOOPBACK = ["127.0.0.0/8", "::1"]
MAX_PORT = 65_535
FORMS = '"10.0.0.0/24", "10.0.0.1:26000", "10.0.0.0/24:26000-26007" or "[2001:db8::/32]:26000"'

_Rule = tuple[Union[ipaddress.IPv4Network, ipaddress.IPv6Network], range]  # a network, and its ports
# Brackets surround an IPv6 address, or network, that has ports.
_WITH_PORTS = re.compile(r"(?:\[([^\[\]]*:[^\[\]]*)\]|([^\[\]:]*)):([0-9]{1,5}(?:-[0-9]{1,5})?)")


class AllowedPeers:
    """The addresses, networks and ports of the option ``allowed_peers``.

    Args:
        rules: texts such as ``"10.0.0.0/24:26000-26007"``. A rule without ports allows all of them.

    Raises:
        ValueError: a rule has another form.
    """

    def __init__(self, rules: Sequence[str]) -> None:
        self._text = ", ".join(rules) or "empty"
        self._rules = [_rule(text) for text in rules]

    def checked(self, address: str) -> str:
        """Return an address ``ip:port`` in its usual form, so that no other program reads it differently.

        Raises:
            ValueError: it is not an address, or no rule allows it.
        """
        host, number = _split(address)
        try:
            ip, port = ipaddress.ip_address(host), int(number)
        except ValueError:
            raise ValueError(f"{address!r} is not an address of the form ip:port") from None
        # The kernel connects to this IPv4 address.
        ip = getattr(ip, "ipv4_mapped", None) or ip
        if not any(port in ports and ip in network for network, ports in self._rules):
            raise ValueError(f"{address} is not one of allowed_peers ({self._text})")
        return f"{ip}:{port}" if ip.version == 4 else f"[{ip}]:{port}"  # noqa: PLR2004


def _split(text: str) -> tuple[str, str]:
    """Return the host and the ports of a text. The ports may be missing."""
    found = _WITH_PORTS.fullmatch(text)
    return (found[1] or found[2], found[3]) if found else (text, "")


def _rule(text: str) -> _Rule:
    host, ports = _split(text)
    first, _, last = (ports or f"1-{MAX_PORT}").partition("-")
    allowed = range(int(first), int(last or first) + 1)
    try:
        network = ipaddress.ip_network(host)
    except ValueError as error:
        raise ValueError(f"option 'allowed_peers' has {text!r}: {error}; a peer has the form {FORMS}") from None
    if not allowed or allowed.start < 1 or allowed.stop - 1 > MAX_PORT:
        raise ValueError(f"option 'allowed_peers' has {text!r}: ports are 1 to {MAX_PORT}, the smaller one first")
    return network, allowed
