"""Addresses of clusters, and the description of a peer that a link call takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional, Union

from llm_datadist import _core
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import NamedIntEnum

if TYPE_CHECKING:
    from typing_extensions import TypeAlias

    Address: TypeAlias = tuple[Union[int, str], int]

__all__ = ["LLMClusterInfo", "LLMRole", "trans_str_ip"]

_IPV4_BITS = 32


class LLMRole(NamedIntEnum):
    """The role of a cluster."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


def trans_str_ip(ip: Union[str, int]) -> int:
    """Return an IPv4 address as a little-endian 32-bit integer; an integer is returned as it is.

    Args:
        ip: an address by the rules of ``inet_aton`` (``"127.1"`` is one), or an integer.

    Raises:
        TypeError: ``ip`` is not a ``str`` or ``int``.
        RuntimeError: the text is not an address.
    """
    if isinstance(ip, int):
        return ip
    import socket  # noqa: PLC0415  (imported when it is needed)

    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a character without an encoding
        text = f"ip={shown(ip)} is not an IPv4 address; host names are not resolved (socket.gethostbyname does)"
        raise RuntimeError(text) from error


class LLMClusterInfo:
    """A peer: its cluster id and the addresses of both ends.

    Link and unlink calls take it. An address is kept as ``(ip, port)``. An IPv4 address is a
    little-endian 32-bit integer. An IPv6 address, which the original does not support, is kept as its shortest text.
    """

    def __init__(self) -> None:
        self._remote_cluster_id: Optional[int] = None
        self._remote_role_type: Union[LLMRole, int, None] = None
        self._local_ip_info_list: list[Address] = []
        self._remote_ip_info_list: list[Address] = []

    @property
    def remote_cluster_id(self) -> Optional[int]:
        """Cluster id of the peer (uint64); ``None`` until set. Link and unlink calls need it.

        Raises:
            TypeError: the value is not an ``int``, or is ``None``.
            ValueError: the value is outside uint64.
        """
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        _core.check_uint64("remote_cluster_id", remote_cluster_id)
        self._remote_cluster_id = remote_cluster_id

    @property
    def remote_role_type(self) -> Union[LLMRole, int, None]:
        """Role of the peer; ``None`` until set. It has no effect.

        Raises:
            TypeError: the value is not an ``LLMRole``, ``int`` or ``None``.
        """
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: Union[LLMRole, int, None]) -> None:
        _core.check_isinstance("remote_role_type", remote_role_type, [LLMRole, int])
        self._remote_role_type = remote_role_type

    @property
    def local_ip_info_list(self) -> list[Address]:
        """Addresses of this side, as ``(ip, port)``."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[Address]:
        """Addresses of the peer, as ``(ip, port)``."""
        return self._remote_ip_info_list

    def append_local_ip_info(self, ip: Union[str, int], port: int) -> None:
        """Add an address of this side. ``link_clusters`` needs exactly one.

        Args:
            ip: an IPv4 address by the rules of ``inet_aton``, an IPv6 address, or a little-endian integer, which is
                kept as it is.
            port: uint16; 0 is allowed. The port of this side has no effect.

        Raises:
            TypeError: ``ip`` is not a ``str`` or ``int``, or ``port`` is not an ``int``. ``None`` is refused for both.
            ValueError: ``port`` is outside uint16.
            RuntimeError: the text is not an address.
        """
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: Union[str, int], port: int) -> None:
        """Add the address where the peer listens.

        Args:
            ip: as for ``append_local_ip_info``.
            port: the port of the peer (uint16).

        Raises:
            TypeError: as for ``append_local_ip_info``.
            ValueError: ``port`` is outside uint16.
            RuntimeError: the text is not an address.
        """
        self._remote_ip_info_list.append(_address(ip, port))

    def __repr__(self) -> str:
        remote = ", ".join(map(_address_text, self._remote_ip_info_list))
        local = ", ".join(map(_address_text, self._local_ip_info_list))
        return f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, remote=[{remote}], local=[{local}])"


def _address(ip: Union[str, int], port: int) -> Address:
    _core.check_isinstance("ip", ip, [str, int], allow_none=False)
    _core.check_uint16("port", port)
    if isinstance(ip, str) and ":" in ip:
        return _ipv6(ip), port
    return trans_str_ip(ip), port


def _ipv6(ip: str) -> str:
    import socket  # noqa: PLC0415  (imported when it is needed)

    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, ip))
    except (OSError, ValueError) as error:  # ValueError: a NUL, or a character without an encoding
        text = f"ip={shown(ip)} is not an IPv6 address; write it without brackets, port and zone, such as '::1'"
        raise RuntimeError(text) from error


def _address_text(address: Address) -> str:
    import socket  # noqa: PLC0415  (imported when it is needed)

    ip, port = address
    if isinstance(ip, str):
        return f"[{ip}]:{port}"
    fits = ip >= 0 and ip.bit_length() <= _IPV4_BITS
    return f"{socket.inet_ntoa(ip.to_bytes(4, 'little')) if fits else ip}:{port}"
