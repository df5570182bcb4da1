"""``EngineConfig`` and ``ClusterConfig``: the description of the cluster in KvCacheManager mode.

``init`` makes ``llm.ClusterInfo`` from other options, because programs of the original read it afterwards. It does not
write the description of the machine that the original writes (``ge.resourceConfigPath``).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Optional

from llm_datadist import _core
from llm_datadist.original.cluster_info import LLMRole, trans_str_ip
from llm_datadist.original.init_options import LISTEN, listen_address
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.option_types import read_json
from llm_datadist.original.status import raise_if_false

__all__ = ["ClusterConfig", "EngineConfig"]

_CLUSTER_INFO = "llm.ClusterInfo"
_DEVICE = "ge.exec.deviceId"


class ClusterConfig(NamedTuple):
    """The devices of a cluster, and the address at which it listens for each."""

    device_ids: list[int]
    """Ids of the devices, in the order of their ranks."""
    listen_ip_info: list[tuple[int, int]]
    """``(ip, port)`` for each device, the address as a little-endian integer; empty without a listener."""

    @property
    def rank_id_to_device_id(self) -> dict[int, int]:
        """Rank to device id."""
        return dict(enumerate(self.device_ids))

    def to_json(self, cluster_id: int) -> str:
        """Return the text of ``llm.ClusterInfo`` for the cluster with this id."""
        import json  # noqa: PLC0415  (imported when it is needed)

        info: dict[str, Any] = {
            "cluster_id": cluster_id,
            "logic_device_id": [f"0:0:{device}:0" for device in self.device_ids],
        }
        if self.listen_ip_info:
            info["listen_ip_info"] = [{"ip": ip, "port": port} for ip, port in self.listen_ip_info]
        return json.dumps(info)


class EngineConfig(NamedTuple):
    """The part of an engine's options that describes its cluster."""

    cluster_config: ClusterConfig
    """The devices and listeners of the cluster."""

    @classmethod
    def from_engine_options(cls, is_prompt: bool, options: dict[str, str]) -> EngineConfig:
        """Read ``ge.exec.deviceId`` and, for a prompt cluster that listens, ``llm.listenIpInfo``.

        Args:
            is_prompt: whether the role is ``LLMRole.PROMPT``.
            options: the options of the engine.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: there is no device, an id is not a number, or there is not one
                ``ip:port`` for each device.
            ValueError: a port is not a uint16.
            RuntimeError: an address is not an IPv4 address.
            TypeError: an option is not a ``str``.
        """
        device_ids = _device_ids(options.get(_DEVICE))
        listen = options.get(LISTEN) if is_prompt else None
        _core.check_isinstance(LISTEN, listen, str)
        listeners = [] if listen is None else [cls.parse_listen_ip_info(entry) for entry in listen.split(";")]
        raise_if_false(
            listen is None or len(listeners) == len(device_ids),
            "{}={} does not give one ip:port for each of {} devices",
            *(LISTEN, shown(listen), len(device_ids)),
        )
        return cls(ClusterConfig(device_ids, listeners))

    @classmethod
    def gen_cluster_info_if_not_exist(cls, cluster_id: int, role: LLMRole, options: dict[str, str]) -> None:
        """Add ``llm.ClusterInfo`` to ``options`` unless it is present.

        Args:
            cluster_id: id of the cluster (uint64).
            role: its role. Only ``LLMRole.PROMPT`` gets a listen address.
            options: the options of the engine, which are changed.

        Raises:
            LLMException, ValueError, RuntimeError, TypeError: as for ``from_engine_options``.
        """
        if _CLUSTER_INFO not in options:
            config = cls.from_engine_options(role == LLMRole.PROMPT, options)
            options[_CLUSTER_INFO] = config.cluster_config.to_json(cluster_id)

    @staticmethod
    def parse_listen_ip_info(listen_ip_info: str) -> tuple[int, int]:
        """Return the address in ``ip:port`` as a little-endian integer, and the port.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: the text is not of that form.
            ValueError: the port is not a uint16.
            RuntimeError: the address is not an IPv4 address.
            TypeError: ``listen_ip_info`` is not a ``str``.
        """
        ip, port = listen_address(listen_ip_info)
        return trans_str_ip(ip), int(port)


def listens_at(cluster_info: str) -> Optional[str]:
    """Return the listen address in ``llm.ClusterInfo`` as ``ip:port``; ``None`` without one.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: the text is not a description of a cluster.
    """
    import socket  # noqa: PLC0415  (imported when it is needed)

    try:
        info = read_json(cluster_info)
        listeners = info.get("listen_ip_info") or []
        if not listeners:
            return None
        ip, port = trans_str_ip(listeners[0]["ip"]), int(listeners[0]["port"])
        return f"{socket.inet_ntoa(ip.to_bytes(4, 'little'))}:{port}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise_if_false(False, "{}={} cannot be read: {}", _CLUSTER_INFO, shown(cluster_info), error)
        raise  # never reached


def _device_ids(text: Optional[str]) -> list[int]:
    raise_if_false(
        text,
        "{} is missing: set LLMConfig.device_id, for example to 0 (KvCacheManager mode needs it), or set "
        "LLMConfig.enable_cache_manager to True for a CacheManager",
        _DEVICE,
    )
    _core.check_isinstance(_DEVICE, text, str)
    entries = (text or "").split(";")
    numbers = all(re.fullmatch("[0-9]{1,10}", entry) for entry in entries)
    raise_if_false(numbers, "{}={} is not a list of device numbers separated by ;", _DEVICE, shown(text))
    return [int(entry) for entry in entries]
