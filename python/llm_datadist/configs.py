"""The options of an engine, as properties of one object (contract §5).

Setters check one value each; ``LLMDataDist.init`` reads the texts that ``LlmConfig.generate_options`` writes.
"""

from __future__ import annotations

from typing import Any, Optional, Union

from llm_datadist import log
from llm_datadist.arguments import check_dict
from llm_datadist.cluster_info import LLMClusterInfo, LLMRole, trans_str_ip
from llm_datadist.option_types import (
    Checked,
    ClusterInfo,
    DeviceId,
    Flag,
    MemUtilization,
    Option,
    OwnOption,
    Secret,
    SwitchRole,
    SyncTimeout,
    Token,
    Uint32,
)
from llm_datadist.spelling import LISTED, closest, refusal, report_unknown, resembles

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]


class LlmConfig:
    """The options of an engine (contract §5). ``generate_options`` writes them for ``LLMDataDist.init``.

    A setter keeps the old value if it raises. ``init`` checks the content of a text. Where ``None`` is allowed, it
    unsets the option, but a key that was written stays in the dict. Assigning an attribute that does not exist has no
    effect, and is logged at ERROR with the nearest name of an option.

    Raises:
        AttributeError: the assigned attribute does not exist, and its name resembles that of an option which the
            original does not have, such as ``verify`` or ``link_token`` (contract §5.2).
        TypeError: a setter was given a value of a wrong type.
        ValueError: a setter was given an integer outside its width, or ``cluster_info`` a text that is not JSON.
        RuntimeError: ``cluster_info`` was given an invalid address.
        LLMException: ``LLM_PARAM_INVALID``: a setter was given a value that is not allowed.
    """

    # Options are written in this order. `ge_options` is written first, so a property wins over the same key in it.
    device_id = DeviceId(
        "ge.exec.deviceId",
        [int, list, tuple],
        None,
        "0 in CacheManager mode; KvCacheManager mode needs it",
        "Number of the device (int32, 0 or above), or a list of them. An engine has one device: ``init`` refuses a "
        "longer list.",
        none=False,
    )
    sync_kv_timeout = SyncTimeout(
        "llm.SyncKvCacheWaitTime",
        [int, str],
        None,
        "1000 ms",
        "Time limit of a call that moves bytes, in milliseconds (int32, above 0), as a number or as a text of digits.",
        none=False,
    )
    deploy_res_path = Option(
        "llm.deployResPath", str, "", "none", "Path of a deployment description. It has no effect."
    )
    buf_pool_cfg = Option(
        "llm.BufPoolCfg", str, "", "none", "Sizes of buffers as JSON. It has no effect in Python (contract §5.3)."
    )
    mem_pool_cfg = Option(
        "llm.MemPoolConfig",
        str,
        "",
        "no device pool",
        'The device pool as a JSON object: ``{"memory_size": bytes, "page_shift": 10 to 30}``. ``memory_size`` may '
        'also be a text with a unit: ``"64MiB"`` (KiB, MiB, GiB, TiB). A page has ``1 << page_shift`` bytes; '
        "``page_shift`` is 16 by default (contract §5.1).",
    )
    host_mem_pool_cfg = Option(
        "llm.HostMemPoolConfig",
        str,
        "",
        "no host pool",
        "The host pool, in the format of ``mem_pool_cfg``; at most 20 GiB (contract §5.1).",
    )
    enable_cache_manager = Flag(
        "llm.EnableCacheManager",
        "Whether the engine has a ``CacheManager`` (``True``) or a ``KvCacheManager`` (``False``) (contract §0).",
    )
    enable_remote_cache_accessible = Flag(
        "llm.EnableRemoteCacheAccessible",
        "Whether transfers are one-sided: remote-accessible mode (contract §12.4). Both sides of a link need the same "
        "value.",
    )
    listen_ip_info = Option(
        "llm.listenIpInfo",
        str,
        "",
        "no listener",
        "Address at which the engine listens for peers: ``ip:port``, or ``[ipv6]:port``, which the original does not "
        "have. Host names and zones (``%eth0``) are not supported. Port 0 takes a free port, which "
        "``LLMDataDist.listen_ip_info`` returns.",
    )
    link_total_time = Checked(
        "llm.LinkTotalTime",
        int,
        0,
        "0",
        "Time limit of a link that ``LLMDataDist.link`` makes, in seconds (0 to 2^32 - 1). 0 means "
        "``HCCL_CONNECT_TIMEOUT``, or 120 s if that is not set.",
        none=False,
    )
    link_retry_count = Checked(
        "llm.LinkRetryCount",
        int,
        1,
        "1",
        "Number of attempts of ``LLMDataDist.link`` within ``link_total_time`` (1 to 100). One attempt takes at most "
        "its share of that time.",
        none=False,
    )
    rdma_traffic_class = Uint32(
        "llm.RdmaTrafficClass", int, None, "none", "RDMA traffic class (uint32). It has no effect.", none=False
    )
    rdma_service_level = Uint32(
        "llm.RdmaServiceLevel", int, None, "none", "RDMA service level (uint32). It has no effect.", none=False
    )
    local_comm_res = Option(
        "llm.LocalCommRes",
        str,
        "",
        "none",
        "Communication resources of this side as JSON; the text is not read. Setting it, even to an empty text, makes "
        '``"1"`` the default of ``llm.EnableCacheManager`` and ``llm.EnableRemoteCacheAccessible``. With a text '
        "that is not empty, link calls need no local address (contract §6.2, §6.8).",
        empty=True,
    )
    transfer_backend = Option(
        "llm.TransferBackend",
        str,
        "",
        "none",
        'What moves bytes between hosts: ``"sockets"``; ``"ucx"``, which fails if UCX cannot be used; or ``"auto"`` '
        '(default): UCX if both ends have a token, an RDMA device and equal, usable versions of it. ``"hixl"`` is '
        '``"auto"`` with the rules of contract §6.12.',
        empty=True,
    )
    global_resource_config = Option(
        "llm.GlobalResourceConfig", str, "", "none", "Settings of the backend. It has no effect.", empty=True
    )
    copy_workers = OwnOption(
        "llm.CopyWorkers",
        int,
        "4",
        "Number of threads that copy, the calling thread included (1 to 256).",
    )
    max_transfers = OwnOption(
        "llm.MaxTransfers",
        int,
        "4096",
        "Maximum number of asynchronous calls that run or whose outcome was not taken (1 to 1048576).",
    )
    transfer_poll_us = OwnOption(
        "llm.TransferPollUs",
        int,
        "50 µs",
        "How long a thread that has run an asynchronous call polls for the next one before it sleeps, in microseconds "
        "(0 to 10000). Starting a call or reporting a layer is faster while a thread polls. No thread polls if the "
        "thread that calls ``init`` may use only one CPU.",
    )
    swap_in_path = OwnOption(
        "llm.SwapInPath",
        str,
        '`"auto"`',
        'Path of swap-ins: ``"direct"`` is one copy, ``"ring"`` copies through a staging ring, ``"auto"`` chooses.',
    )
    verify = OwnOption(
        "llm.Verify",
        str,
        '`"off"`',
        "How thoroughly pulls, pushes, layer-wise transfers, copies and swaps compare the moved bytes with their "
        'source: ``"off"``, ``"sample"`` (one block in 64), ``"full"`` (every block). The argument ``verify`` of a '
        "pull, push or group overrides it.",
    )
    copy_kernel = OwnOption(
        "llm.CopyKernel",
        str,
        '`"auto"`',
        'How bytes are copied: ``"plain"`` uses ordinary stores, ``"streaming"`` uses stores that bypass the caches of '
        'the CPU, ``"auto"`` chooses.',
    )
    huge_pages = OwnOption(
        "llm.HugePages",
        str,
        '`"auto"`',
        'Whether memory is put into huge pages. ``"auto"``: the kernel decides; one hint is logged if peers read '
        'registered memory from small pages, which takes twice as long. ``"off"``: the same without the hint. '
        '``"eager"``: ``init`` commits and merges the pools, and ``register_*`` merges its memory.',
    )
    link_token = Token(
        "llm.LinkToken",
        str,
        "`LLM_DATADIST_TOKEN_FILE` or `LLM_DATADIST_TOKEN`",
        "Secret that both ends of a link must have, at least 16 characters. It is never shown.",
    )
    link_token_file = OwnOption(
        "llm.LinkTokenFile",
        str,
        "as `link_token`",
        "Absolute path of a file with the token, in place of ``link_token``. ``init`` reads it. It must be a regular "
        "file, or a link to one, of this user or root, without access for others (mode 0600 or 0400), of at most 4096 "
        "bytes. One line break at the end is not part of the token.",
    )
    link_accept_remote = Flag(
        "llm.LinkAcceptRemote",
        "Whether an engine without a token admits every peer that reaches its listener, of any user on any host. Both "
        "sides of a link need it.",
        default="`LLM_DATADIST_ACCEPT_REMOTE`, or `False`",
        own=True,
    )
    link_heartbeat = OwnOption(
        "llm.LinkHeartbeat",
        int,
        "1000 ms",
        "Interval of the heartbeats of an idle link, in milliseconds (1 to 3600000).",
    )
    link_silence = OwnOption(
        "llm.LinkSilence",
        int,
        "5000 ms",
        "Time in milliseconds after which a link to a silent peer breaks (2 to 86400000); at least two heartbeats.",
    )
    link_pin_limit = OwnOption(
        "llm.LinkPinLimit",
        int,
        "600000 ms",
        "Longest time in milliseconds for which a peer may keep rows of this process pinned for one transfer, whatever "
        "deadline it announces (1 to 86400000).",
    )
    link_transport = OwnOption(
        "llm.LinkTransport",
        str,
        '`"auto"`',
        'How bytes travel: ``"shm"`` is shared memory, or no link; ``"tcp"`` is TCP, on one host as well; ``"auto"`` '
        "uses shared memory inside a host and TCP otherwise.",
    )
    ucx_library = OwnOption(
        "llm.UcxLibrary",
        str,
        "`libucp.so.0`, which the system finds",
        "Absolute path of the library of UCX.",
    )
    link_streams = OwnOption(
        "llm.LinkStreams",
        int,
        "0",
        "Number of TCP connections that share one large pull or push, 1 to 16; each carries at least 8 MiB. 0 means "
        "4, or the number of addresses of the peer if that is larger.",
    )
    link_addresses = OwnOption(
        "llm.LinkAddresses",
        str,
        "none",
        "IP addresses of this host, separated by commas, over which peers spread the connections of large pulls and "
        "pushes, beside the address of `listen_ip_info` (at most 15).",
    )
    link_remote_memory = OwnOption(
        "llm.LinkRemoteMemory",
        int,
        "4 times the memory of the host",
        "Bytes of address space of this process in which the memory of all peers may be mapped. One link may use half "
        "of it. Memory that does not fit is sent by its owner.",
    )
    rank_port = OwnOption(
        "llm.RankPort",
        int,
        "`LLM_DATADIST_RANK_PORT`, or 16666",
        "Port of device 0 for ``LLMDataDist.link`` (1 to 65535). Device ``n`` uses ``rank_port + n``.",
    )
    rank_hosts = OwnOption(
        "llm.RankHosts",
        str,
        "`LLM_DATADIST_RANK_HOSTS`",
        "Addresses at which members of ``LLMDataDist.link`` can be reached: a JSON object from ``device_ip`` or "
        "cluster id to ``ip:port``.",
    )
    cluster_info = ClusterInfo(
        "llm.ClusterInfo",
        str,
        "",
        "made by `init` in KvCacheManager mode",
        "Description of the cluster as JSON, for KvCacheManager mode (contract §9.7).",
        none=False,
    )
    output_max_size = Option[Optional[int]](
        "llm.OutputMaxSize", int, None, "none", "Largest size of an output. It has no effect."
    )
    enable_switch_role = SwitchRole(
        "llm.EnableSwitchRole", "Whether ``switch_role`` is allowed in KvCacheManager mode (contract §6.9)."
    )
    mem_utilization = MemUtilization(
        "llm.MemoryUtilization",
        float,
        0.95,
        "0.95",
        "Share of the memory that the process may use, for the pool of KvCacheManager mode (``float``, 0.0 to 1.0; "
        "contract §9.7).",
        none=False,
    )

    def __init__(self) -> None:
        self._ge_options: dict[str, str] = {}
        self._options: dict[str, str] = {}
        self._device_id: Union[int, list[int], tuple[int, ...], None] = None
        for option in _OPTIONS:
            setattr(self, option.attribute, None)
        self._mem_utilization = 0.95

    def __setattr__(self, name: str, value: Any) -> None:
        # A name with an underscore in front is an attribute of the class itself, or of a subclass.
        if not name.startswith("_") and not hasattr(type(self), name):
            if resembles(name, _NAMES, _OWN_NAMES):
                raise AttributeError(f"LLMConfig has no attribute {refusal(name, _NAMES, LISTED)}")
            report_unknown("attribute of LLMConfig", [name], _NAMES, LISTED)
        super().__setattr__(name, value)

    @property
    def ge_options(self) -> dict[str, str]:
        """Further keys and texts, which are written before all others (contract §5).

        The getter returns the live dict. ``init`` ignores keys that it does not know (contract §5.2).

        Raises:
            AttributeError: the value is ``None``.
            TypeError: the value is not a dict, or a key or value is not a ``str``.
        """
        return self._ge_options

    @ge_options.setter
    def ge_options(self, ge_options: dict[str, str]) -> None:
        check_dict("ge_options", ge_options, str, str)
        self._ge_options = ge_options

    @property
    def options(self) -> dict[str, str]:
        """The result of ``generate_options``, with the same errors (contract §5)."""
        return self.generate_options()

    def generate_options(self) -> dict[str, str]:
        """Write the options into one dict and return it: the same dict on every call (contract §5).

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: the list in ``device_id`` was emptied after it was set.
            TypeError: an element of that list is no longer an ``int``.
        """
        self._options.update(self._ge_options)
        for option in _OPTIONS:
            self._options.update(option.entries(self))
        return self._options

    def gen_options(self) -> dict[str, str]:
        """Return the result of ``generate_options``, with the same errors (contract §5)."""
        return self.generate_options()

    def __repr__(self) -> str:
        given: dict[str, Any] = {option.name: getattr(self, option.attribute) for option in _OPTIONS}
        shown = [
            f"{name}={_NOT_SHOWN!r}" if name == "link_token" else f"{name}={log.shown(value)}"
            for name, value in given.items()
            if value is not None and (name, value) != ("mem_utilization", 0.95)
        ]
        if self._ge_options:
            hidden = {key: _NOT_SHOWN if _is_secret(key) else value for key, value in self._ge_options.items()}
            shown.append(f"ge_options={log.shown(hidden)}")
        return f"LLMConfig({', '.join(shown)})"


_NOT_SHOWN = Secret()


def _is_secret(key: object) -> bool:
    """Return whether the value of an option must not be shown. A misspelt key of the token counts as secret too."""
    if key == LlmConfig.link_token_file.key:
        return False
    return "token" in str(key).lower() or closest(str(key), [LlmConfig.link_token.key]) is not None


_OPTIONS: tuple[Option[Any], ...] = tuple(option for option in vars(LlmConfig).values() if isinstance(option, Option))
_NAMES = frozenset([*(option.name for option in _OPTIONS), "ge_options"])
_OWN_NAMES = frozenset(option.name for option in _OPTIONS if option.own)

LLMConfig = LlmConfig
