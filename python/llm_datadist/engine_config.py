"""``EngineConfig`` and ``ClusterConfig``: the description of the cluster in KvCacheManager mode (contract §9.7).

``init`` makes ``llm.ClusterInfo`` from other options, because programs of the original read it afterwards. The
description of the machine that the original writes (``ge.resourceConfigPath``) is not written.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Any, Optional

from llm_datadist import _core, log
from llm_datadist.cluster_info import LLMRole, trans_str_ip
from llm_datadist.option_types import read_json
from llm_datadist.status import raise_if_false

__all__ = ["ClusterConfig", "EngineConfig"]

_CLUSTER_INFO = "llm.ClusterInfo"
_DEVICE = "ge.exec.deviceId"
_LISTEN = "llm.listenIpInfo"


class ClusterConfig:
    """The devices of a cluster, and the address at which it listens for each (contract §9.7).

    Args:
        device_ids: the devices, in the order of their ranks.
        listen_ip_info: ``(ip, port)`` for each device, the address as a little-endian integer; empty without a
            listener.
    """

    def __init__(self, device_ids: list[int], listen_ip_info: list[tuple[int, int]]) -> None:
        self._device_ids = list(device_ids)
        self._listen_ip_info = list(listen_ip_info)

    @property
    def device_ids(self) -> list[int]:
        """The devices, in the order of their ranks."""
        return list(self._device_ids)

    @property
    def listen_ip_info(self) -> list[tuple[int, int]]:
        """Address at which the cluster listens for each device; empty without a listener."""
        return list(self._listen_ip_info)

    @property
    def rank_id_to_device_id(self) -> dict[int, int]:
        """Device of each rank."""
        return dict(enumerate(self._device_ids))

    def __repr__(self) -> str:
        return f"ClusterConfig(device_ids={self._device_ids}, listen_ip_info={self._listen_ip_info})"

    def to_json(self, cluster_id: int) -> str:
        """Return the text of ``llm.ClusterInfo`` for that cluster."""
        info: dict[str, Any] = {
            "cluster_id": cluster_id,
            "logic_device_id": [f"0:0:{device}:0" for device in self._device_ids],
        }
        if self._listen_ip_info:
            info["listen_ip_info"] = [{"ip": ip, "port": port} for ip, port in self._listen_ip_info]
        return json.dumps(info)


class EngineConfig:
    """The part of an engine's options that describes its cluster (contract §9.7).

    Args:
        cluster_config: its devices and listeners.
    """

    def __init__(self, cluster_config: ClusterConfig) -> None:
        self._cluster_config = cluster_config

    @property
    def cluster_config(self) -> ClusterConfig:
        """Its devices and listeners."""
        return self._cluster_config

    @classmethod
    def from_engine_options(cls, is_prompt: bool, options: dict[str, str]) -> EngineConfig:
        """Read ``ge.exec.deviceId`` and, for a prompt cluster that listens, ``llm.listenIpInfo`` (contract §9.7).

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
        listen = options.get(_LISTEN) if is_prompt else None
        _core.check_isinstance(_LISTEN, listen, str)
        listeners = [] if listen is None else [cls.parse_listen_ip_info(entry) for entry in listen.split(";")]
        raise_if_false(
            listen is None or len(listeners) == len(device_ids),
            "{}={} does not give one ip:port for each of {} devices",
            *(_LISTEN, log.shown(listen), len(device_ids)),
        )
        return cls(ClusterConfig(device_ids, listeners))

    @classmethod
    def gen_cluster_info_if_not_exist(cls, cluster_id: int, role: LLMRole, options: dict[str, str]) -> None:
        """Add ``llm.ClusterInfo`` to ``options`` unless it is present (contract §9.7).

        Raises:
            LLMException: as for ``from_engine_options``; so are ``ValueError``, ``RuntimeError`` and
                ``TypeError``.
        """
        if _CLUSTER_INFO not in options:
            config = cls.from_engine_options(role == LLMRole.PROMPT, options)
            options[_CLUSTER_INFO] = config.cluster_config.to_json(cluster_id)

    @staticmethod
    def parse_listen_ip_info(listen_ip_info: str) -> tuple[int, int]:
        """Return the address of ``ip:port`` as a little-endian integer, and the port (contract §9.7).

        Raises:
            LLMException: ``LLM_PARAM_INVALID``: the text is not of that form.
            ValueError: the port is not a uint16.
            RuntimeError: the address is not an IPv4 address.
            TypeError: ``listen_ip_info`` is not a ``str``.
        """
        _core.check_isinstance(_LISTEN, listen_ip_info, str, allow_none=False)
        ip, colon, port = listen_ip_info.partition(":")
        text = log.shown(listen_ip_info)
        raise_if_false(ip and colon and ":" not in port, "{}={} is not of the form ip:port", _LISTEN, text)
        if not (port.isascii() and port.isdigit()):
            raise ValueError(f"{_LISTEN}={text}: the port is not a decimal number")
        _core.check_uint16("listen port", int(port))
        return trans_str_ip(ip), int(port)


def listens_at(cluster_info: str) -> Optional[str]:
    """Return the address in ``llm.ClusterInfo`` at which the cluster listens, as ``ip:port``; ``None`` without one.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``: the text is not such a description.
    """
    try:
        info = read_json(cluster_info)
        listeners = info.get("listen_ip_info") or []
        if not listeners:
            return None
        ip, port = trans_str_ip(listeners[0]["ip"]), int(listeners[0]["port"])
        return f"{socket.inet_ntoa(ip.to_bytes(4, 'little'))}:{port}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise_if_false(False, "{}={} cannot be read: {}", _CLUSTER_INFO, log.shown(cluster_info), error)
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
    raise_if_false(numbers, "{}={} is not a list of device numbers separated by ;", _DEVICE, log.shown(text))
    return [int(entry) for entry in entries]
