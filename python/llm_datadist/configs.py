"""Roles, cluster addresses and the options of an engine (contract §3.3, §4.1, §5).

Options are held, checked one by one when set, and rendered as texts. Not for: reading those texts; ``init`` does that.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any, Callable, Generic, Optional, TypeVar, Union, overload

from llm_datadist import _core, log
from llm_datadist.status import NamedIntEnum, raise_if_false

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]


class LLMRole(NamedIntEnum):
    """What a cluster does for others."""

    PROMPT = 1
    DECODER = 2
    MIX = 3


def trans_str_ip(ip: Union[str, int]) -> int:
    """Return an address as a little-endian 32-bit integer; integers are returned untouched.

    Args:
        ip: a dotted address by the rules of ``inet_aton`` (``"127.1"`` is legal), or an integer.

    Raises:
        RuntimeError: a text that is no address.
    """
    if isinstance(ip, int):
        return ip
    try:
        return int.from_bytes(socket.inet_aton(ip), "little")
    except (OSError, ValueError) as error:  # ValueError: a NUL, or what no encoding holds
        raise RuntimeError(f"ip = {log.shown(ip)} is not an IPv4 address") from error


# How deep JSON may be nested: the engine has the same bound (contract §17).
_DEEPEST_JSON = 64


def read_json(text: str) -> Any:
    """Return what a JSON text says.

    Raises:
        json.JSONDecodeError: no JSON, or nested deeper than 64 levels.
    """
    too_deep = f"nested deeper than {_DEEPEST_JSON} levels"
    try:
        value = json.loads(text)
    except RecursionError:
        raise json.JSONDecodeError(too_deep, text[:_DEEPEST_JSON], 0) from None
    level, depth = [value], 0
    while level:
        nested = [of for of in level if isinstance(of, (dict, list))]
        depth += bool(nested)
        if depth > _DEEPEST_JSON:
            raise json.JSONDecodeError(too_deep, text[:_DEEPEST_JSON], 0)
        level = [item for of in nested for item in (of.values() if isinstance(of, dict) else of)]
    return value


class LLMClusterInfo:
    """A peer: its cluster id and the addresses of both ends (contract §4.1).

    Addresses are kept as ``(ip, port)``; an IPv4 address as a little-endian 32-bit integer, an IPv6 address, which the
    contract does not know, as its shortest text.
    """

    def __init__(self) -> None:
        self._remote_cluster_id: Optional[int] = None
        self._remote_role_type: Union[LLMRole, int, None] = None
        self._local_ip_info_list: list[tuple[Union[int, str], int]] = []
        self._remote_ip_info_list: list[tuple[Union[int, str], int]] = []

    @property
    def remote_cluster_id(self) -> Optional[int]:
        """Cluster id of the peer (uint64); ``None`` until set, and without it no link is made."""
        return self._remote_cluster_id

    @remote_cluster_id.setter
    def remote_cluster_id(self, remote_cluster_id: int) -> None:
        _core.check_uint64("remote_cluster_id", remote_cluster_id)
        self._remote_cluster_id = remote_cluster_id

    @property
    def remote_role_type(self) -> Union[LLMRole, int, None]:
        """Role of the peer; without effect."""
        return self._remote_role_type

    @remote_role_type.setter
    def remote_role_type(self, remote_role_type: Union[LLMRole, int, None]) -> None:
        _core.check_isinstance("remote_role_type", remote_role_type, [LLMRole, int])
        self._remote_role_type = remote_role_type

    @property
    def local_ip_info_list(self) -> list[tuple[Union[int, str], int]]:
        """Own addresses as ``(ip, port)``."""
        return self._local_ip_info_list

    @property
    def remote_ip_info_list(self) -> list[tuple[Union[int, str], int]]:
        """Addresses of the peer as ``(ip, port)``."""
        return self._remote_ip_info_list

    def append_local_ip_info(self, ip: Union[str, int], port: int) -> None:
        """Add an own address.

        Args:
            ip: dotted text, the text of an IPv6 address, or a little-endian integer.
            port: uint16; 0 for none.

        Raises:
            TypeError: an argument of the wrong type.
            ValueError: a port outside uint16.
            RuntimeError: a text that is no address.
        """
        self._local_ip_info_list.append(_address(ip, port))

    def append_remote_ip_info(self, ip: Union[str, int], port: int) -> None:
        """Add an address of the peer; arguments and errors as for :meth:`append_local_ip_info`."""
        self._remote_ip_info_list.append(_address(ip, port))

    def __repr__(self) -> str:
        remote = ", ".join(map(_address_text, self._remote_ip_info_list))
        local = ", ".join(map(_address_text, self._local_ip_info_list))
        return f"LLMClusterInfo(remote_cluster_id={self._remote_cluster_id}, remote=[{remote}], local=[{local}])"


def _address(ip: Union[str, int], port: int) -> tuple[Union[int, str], int]:
    _core.check_isinstance("ip", ip, [str, int], allow_none=False)
    _core.check_uint16("port", port)
    if isinstance(ip, str) and ":" in ip:
        return _ipv6(ip), port
    return trans_str_ip(ip), port


def _ipv6(ip: str) -> str:
    try:
        return socket.inet_ntop(socket.AF_INET6, socket.inet_pton(socket.AF_INET6, ip))
    except (OSError, ValueError) as error:  # ValueError: a NUL, or what no encoding holds
        raise RuntimeError(f"ip = {log.shown(ip)} is not an IPv6 address") from error


def _address_text(address: tuple[Union[int, str], int]) -> str:
    ip, port = address
    if isinstance(ip, str):
        return f"[{ip}]:{port}"
    known = ip.bit_length() <= 32 and ip >= 0  # noqa: PLR2004  (an IPv4 address)
    return f"{socket.inet_ntoa(ip.to_bytes(4, 'little')) if known else ip}:{port}"


class _Secret(str):
    """A text that does not show where a dict of options is printed or logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'(not shown)'"


_Value = TypeVar("_Value")


class _Option(property, Generic[_Value]):
    """One property of :class:`LlmConfig`: its type, its option key and when that key is written.

    The value lives in the attribute of the same name with an underscore; ``None`` there means unset.

    Args:
        key: the option's key.
        allowed: class or classes of a value.
        initial: what the getter answers while the option is unset.
        doc: docstring of the property.
        none: whether ``None`` may be assigned, which unsets the option.
        empty: whether an empty text is written.
    """

    def __init__(
        self, key: str, allowed: Any, initial: _Value, doc: str, *, none: bool = True, empty: bool = False
    ) -> None:
        super().__init__()
        self.__doc__ = doc
        self.key = key
        self._allowed = allowed
        self._initial = initial
        self._none = none
        self._empty = empty

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name
        self._attribute = f"_{name}"

    @overload
    def __get__(self, config: None, owner: Optional[type] = None) -> _Option[_Value]: ...
    @overload
    def __get__(self, config: LlmConfig, owner: Optional[type] = None) -> _Value: ...
    def __get__(self, config: Optional[LlmConfig], owner: Optional[type] = None) -> Union[_Option[_Value], _Value]:
        if config is None:
            return self
        value: Optional[_Value] = getattr(config, self._attribute)
        return self._initial if value is None else value

    def __set__(self, config: LlmConfig, value: Optional[_Value]) -> None:
        _core.check_isinstance(self._name, value, self._allowed, allow_none=self._none)
        self.check(value)
        setattr(config, self._attribute, value)

    def check(self, value: Any) -> None:
        """Raise if a value of the right type means nothing."""

    def entries(self, config: LlmConfig) -> Iterator[tuple[str, str]]:
        """Yield the keys and texts to write."""
        value = getattr(config, self._attribute)
        if value is not None and (self._empty or value != ""):
            yield self.key, self.text(value)

    def text(self, value: Any) -> str:
        """Return the text of a value."""
        return str(value)


class _Flag(_Option[bool]):
    """An option written as ``"1"`` or ``"0"``."""

    def __init__(self, key: str, doc: str) -> None:
        super().__init__(key, bool, initial=False, doc=doc)

    def text(self, value: Any) -> str:
        return "1" if value else "0"


class _SwitchRole(_Flag):
    def entries(self, config: LlmConfig) -> Iterator[tuple[str, str]]:
        return (entry for entry in super().entries(config) if entry[1] == "1")


class _Uint32(_Option[Optional[int]]):
    def check(self, value: Any) -> None:
        _core.check_uint32(self._name, value)


class _DeviceId(_Option[Union[int, list[int], tuple[int, ...], None]]):
    def check(self, value: Any) -> None:
        raise_if_false(len(self._ids(value)), "device_id={} names no device; name one", value)
        for device_id in self._ids(value):
            _core.check_device_id(device_id)

    def entries(self, config: LlmConfig) -> Iterator[tuple[str, str]]:
        value = config._device_id  # noqa: SLF001
        if value is not None:
            self.check(value)  # a list may have changed since it was set
            ids = self._ids(value)
            yield self.key, ";".join(str(device_id) for device_id in ids)
            yield "ge.session_device_id", str(ids[0])

    @staticmethod
    def _ids(value: Any) -> Union[list[int], tuple[int, ...]]:
        return value if isinstance(value, (list, tuple)) else (value,)


class _SyncTimeout(_Option[Union[int, str, None]]):
    def check(self, value: Any) -> None:
        if isinstance(value, str):
            digits = value.isascii() and value.isdigit()
            text = log.shown(value)
            raise_if_false(digits, "sync_kv_timeout = {} is not allowed: decimal digits, in milliseconds", text)
            value = int(value)
        _core.check_sync_kv_timeout(value)


class _LinkTotalTime(_Option[int]):
    def check(self, value: Any) -> None:
        _core.check_link_total_time(value)


class _LinkRetryCount(_Option[int]):
    def check(self, value: Any) -> None:
        _core.check_link_retry_count(value)


class _ClusterInfo(_Option[str]):
    def __set__(self, config: LlmConfig, value: Optional[str]) -> None:
        _core.check_isinstance(self._name, value, str, allow_none=False)
        description = read_json(value or "")
        _core.check_isinstance("cluster_info", description, dict, allow_none=False)
        addresses = description.get("listen_ip_info", [])
        _core.check_isinstance("cluster_info listen_ip_info", addresses, list, dict, allow_none=False)
        for info in addresses:
            if "ip" in info:
                _core.check_isinstance("cluster_info listen_ip_info ip", info["ip"], [str, int], allow_none=False)
                info["ip"] = trans_str_ip(info["ip"])
        super().__set__(config, json.dumps(description))


class _Own(_Option[Optional[_Value]]):
    """An option that only this engine has: unset until assigned, and checked by the engine."""

    def __init__(self, key: str, allowed: type[_Value], check: Callable[[_Value], None], doc: str) -> None:
        super().__init__(key, allowed, None, doc)
        self._check = check

    def check(self, value: Any) -> None:
        if value is not None:
            self._check(value)


class _Token(_Own[str]):
    def text(self, value: Any) -> str:
        return _Secret(value)


class _MemUtilization(_Option[float]):
    def check(self, value: Any) -> None:
        _core.check_mem_utilization(value)


class LlmConfig:
    """The options of an engine, as properties; :meth:`generate_options` renders them for ``LLMDataDist.init``.

    A setter raises ``TypeError`` for the wrong type, ``ValueError`` outside a machine width, and ``LLMException`` with
    ``LLM_PARAM_INVALID`` for a value without meaning. Content of texts is checked by ``init``. Assigning ``None`` where
    that is allowed unsets an option; a key once written stays in the dict.
    """

    # In the order in which they are written; a later key wins over the same one in ge_options.
    device_id = _DeviceId(
        "ge.exec.deviceId",
        [int, list, tuple],
        None,
        "Device number (int32, 0 or above), or a list of them.",
        none=False,
    )
    sync_kv_timeout = _SyncTimeout(
        "llm.SyncKvCacheWaitTime",
        [int, str],
        None,
        "Limit of a call that moves bytes, in milliseconds (above 0, int32), as int or text; 1000 by default.",
        none=False,
    )
    deploy_res_path = _Option("llm.deployResPath", str, "", "Path of a deployment description; without effect.")
    buf_pool_cfg = _Option("llm.BufPoolCfg", str, "", "Buffer tiers as JSON; without effect.")
    mem_pool_cfg = _Option(
        "llm.MemPoolConfig",
        str,
        "",
        'The device pool as a JSON object, ``{"memory_size": bytes, "page_shift": 10 to 30, default 16}``'
        " (seed ``deprecated.md``, mem_pool_cfg).",
    )
    host_mem_pool_cfg = _Option(
        "llm.HostMemPoolConfig",
        str,
        "",
        "The host pool, in the same format, of at most 20 GiB (seed ``deprecated.md``, host_mem_pool_cfg).",
    )
    enable_cache_manager = _Flag("llm.EnableCacheManager", "Whether ``LLMDataDist.cache_manager`` is used.")
    enable_remote_cache_accessible = _Flag("llm.EnableRemoteCacheAccessible", "Whether peers reach caches one-sidedly.")
    listen_ip_info = _Option(
        "llm.listenIpInfo",
        str,
        "",
        "Where to listen: ``ip:port``, or ``[ipv6]:port`` (own addition); port 0 for any free one, which "
        "``LLMDataDist.listen_ip_info`` names.",
    )
    link_total_time = _LinkTotalTime(
        "llm.LinkTotalTime", int, 0, "Limit of link set-up in seconds (0 to 2^32 - 1); 0 for the default.", none=False
    )
    link_retry_count = _LinkRetryCount(
        "llm.LinkRetryCount",
        int,
        1,
        "Tries of a rank-table link within its limit, of which one may take its share (1 to 100).",
        none=False,
    )
    rdma_traffic_class = _Uint32("llm.RdmaTrafficClass", int, None, "RDMA traffic class (uint32).", none=False)
    rdma_service_level = _Uint32("llm.RdmaServiceLevel", int, None, "RDMA service level (uint32).", none=False)
    local_comm_res = _Option(
        "llm.LocalCommRes",
        str,
        "",
        "Own communication resources as JSON, or empty to find them. Setting it at all turns the cache manager and "
        "remote access on by default.",
        empty=True,
    )
    transfer_backend = _Option("llm.TransferBackend", str, "", 'Name of a backend: ``"hixl"``.', empty=True)
    global_resource_config = _Option("llm.GlobalResourceConfig", str, "", "Handed through to the backend.", empty=True)
    copy_workers = _Own(
        "llm.CopyWorkers",
        int,
        _core.check_copy_workers,
        "Threads that copy, 1 to 256, the calling one among them (own option).",
    )
    swap_in_path = _Own(
        "llm.SwapInPath",
        str,
        _core.check_swap_in_path,
        'How swap-ins travel: ``"auto"``, ``"direct"`` or ``"ring"`` (own option).',
    )
    copy_kernel = _Own(
        "llm.CopyKernel",
        str,
        _core.check_copy_kernel,
        'Which copy runs: ``"auto"``, ``"plain"`` or ``"streaming"`` (own option).',
    )
    huge_pages = _Own(
        "llm.HugePages",
        str,
        _core.check_huge_pages,
        'Whether memory is put into huge pages (own option). ``"auto"``, the default: only what the kernel gives by '
        "itself; no call is delayed, and one hint is logged if peers read registered memory at half speed because of "
        'small pages. ``"off"``: the same without the hint. ``"merge"``: pool memory in use is merged in the '
        "background; calls that meet a page being merged wait up to some milliseconds. "
        '``"merge_registered"``: also registered memory that peers read by process id. ``"eager"``: ``init`` commits '
        "and merges the pools whole, and registering merges registered memory.",
    )
    link_token = _Token(
        "llm.LinkToken",
        str,
        _core.check_link_token,
        "What both ends of a link must know, at least 16 characters; never shown (own option). Without it and "
        "``link_token_file``, the environment counts: ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN``.",
    )
    link_token_file = _Own(
        "llm.LinkTokenFile",
        str,
        _core.check_link_token_file,
        "Absolute path of a file that holds the token, in place of ``link_token`` (own option). ``init`` reads it: a "
        "regular file, or a link to one, of this user or root, that nobody else may access (mode 0600 or 0400), of at "
        "most 4096 bytes. One line break at its end does not count.",
    )
    link_accept_remote = _Flag(
        "llm.LinkAcceptRemote",
        "Whether peers are admitted without any proof where no token is set: everybody who can reach a listener, any "
        "user on any host. Both sides need it (own option); or the environment variable "
        "``LLM_DATADIST_ACCEPT_REMOTE``.",
    )
    link_heartbeat = _Own(
        "llm.LinkHeartbeat",
        int,
        _core.check_link_heartbeat,
        "Milliseconds between two signs of life of a silent link; 1000 (own option).",
    )
    link_silence = _Own(
        "llm.LinkSilence",
        int,
        _core.check_link_silence,
        "Milliseconds without a sign of life after which a link is broken, at least two heartbeats; 5000 (own option).",
    )
    link_pin_limit = _Own(
        "llm.LinkPinLimit",
        int,
        _core.check_link_pin_limit,
        "Milliseconds, at most, for which a peer may keep rows of this process pinned for one transfer, whatever "
        "deadline it announces, 1 to 86400000; 600000 (own option).",
    )
    link_transport = _Own(
        "llm.LinkTransport",
        str,
        _core.check_link_transport,
        'How bytes travel: ``"auto"``, ``"shm"`` (shared memory, or no link) or ``"tcp"`` (own option).',
    )
    link_streams = _Own(
        "llm.LinkStreams",
        int,
        _core.check_link_streams,
        "Connections that share one large transfer between hosts, 1 to 16 (own option).",
    )
    link_remote_memory = _Own(
        "llm.LinkRemoteMemory",
        int,
        _core.check_link_remote_memory,
        "Bytes of address space that the memory of all peers may take in this process, half of it for one link; what "
        "does not fit is read through sockets. Four times the memory of the machine (own option).",
    )
    rank_port = _Own(
        "llm.RankPort",
        int,
        _core.check_rank_port,
        "Port of device 0 for ``LLMDataDist.link``, 1 to 65535; device ``n`` has the ``n``-th after it (own option); "
        "or ``LLM_DATADIST_RANK_PORT``.",
    )
    rank_hosts = _Own(
        "llm.RankHosts",
        str,
        _core.check_rank_hosts,
        "Where ends of ``LLMDataDist.link`` really are: a JSON object from ``device_ip`` or cluster id to ``ip:port`` "
        "(own option). Or ``LLM_DATADIST_RANK_HOSTS``.",
    )
    cluster_info = _ClusterInfo("llm.ClusterInfo", str, "", "Description of the cluster as JSON.", none=False)
    output_max_size = _Option[Optional[int]]("llm.OutputMaxSize", int, None, "Largest output; without effect.")
    enable_switch_role = _SwitchRole("llm.EnableSwitchRole", "Whether the role may be switched.")
    mem_utilization = _MemUtilization(
        "llm.MemoryUtilization", float, 0.95, "Share of device memory, 0.0 to 1.0, a ``float``.", none=False
    )

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}
        self._options: dict[str, str] = {}
        self._device_id: Union[int, list[int], tuple[int, ...], None] = None
        for option in _OPTIONS:
            setattr(self, option._attribute, None)  # noqa: SLF001
        self._mem_utilization = 0.95

    @property
    def ge_options(self) -> dict[str, str]:
        """Options merged verbatim before all others: the live dict, which may be written in place."""
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        _core.check_dict("ge_options", ge_options, str, str)
        self._ge_options = ge_options

    @property
    def options(self) -> dict[str, str]:
        """The same as :meth:`generate_options`."""
        return self.generate_options()

    def generate_options(self) -> dict[str, str]:
        """Write the options into one dict, the same object on every call, and return it."""
        self._options.update(self._ge_options)
        for option in _OPTIONS:
            self._options.update(option.entries(self))
        return self._options

    def gen_options(self) -> dict[str, str]:
        """Return :meth:`generate_options`."""
        return self.generate_options()


_OPTIONS: tuple[_Option[Any], ...] = tuple(option for option in vars(LlmConfig).values() if isinstance(option, _Option))

LLMConfig = LlmConfig
