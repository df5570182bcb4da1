"""``EngineConfig`` and ``ClusterConfig``: what an engine without the cache manager works out of its options itself.

That is ``llm.ClusterInfo``, a description of the cluster that programs of the original look for after ``init``
(contract §9.7). The original's description of the machine, ``ge.resourceConfigPath``, means nothing here and is
not written. Not for: reading options for the engine; the engine does that.
"""

from __future__ import annotations

import json
import re
import socket
from typing import Any, Optional

from llm_datadist import _core, log
from llm_datadist.configs import LLMRole, read_json, trans_str_ip
from llm_datadist.status import raise_if_false

__all__ = ["ClusterConfig", "EngineConfig"]

_CLUSTER_INFO = "llm.ClusterInfo"
_DEVICE = "ge.exec.deviceId"
_LISTEN = "llm.listenIpInfo"


class ClusterConfig:
    """The devices of a cluster and where it listens for each.

    Args:
        device_ids: the devices, in the order of their ranks.
        listen_ip_info: ``(ip as a little-endian integer, port)`` for each, or nothing.
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
        """Where the cluster listens for each device; empty if it does not."""
        return list(self._listen_ip_info)

    @property
    def rank_id_to_device_id(self) -> dict[int, int]:
        """Rank → device."""
        return dict(enumerate(self._device_ids))

    def to_json(self, cluster_id: int) -> str:
        """Return the text of ``llm.ClusterInfo``."""
        info: dict[str, Any] = {
            "cluster_id": cluster_id,
            "logic_device_id": [f"0:0:{device}:0" for device in self._device_ids],
        }
        if self._listen_ip_info:
            info["listen_ip_info"] = [{"ip": ip, "port": port} for ip, port in self._listen_ip_info]
        return json.dumps(info)


class EngineConfig:
    """What the options of an engine say of its cluster.

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
        """Read ``ge.exec.deviceId`` and, for a prompt cluster that listens, ``llm.listenIpInfo``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, no devices, ids that are no numbers, or not one ``ip:port`` for each.
            ValueError: a port that is no uint16.
            RuntimeError: an address that is none.
            TypeError: an option that is no text.
        """
        device_ids = _device_ids(options.get(_DEVICE))
        listen = options.get(_LISTEN) if is_prompt else None
        _core.check_isinstance(_LISTEN, listen, str)
        listeners = [] if listen is None else [cls.parse_listen_ip_info(entry) for entry in listen.split(";")]
        raise_if_false(
            listen is None or len(listeners) == len(device_ids),
            "{} = {} is not allowed: one ip:port for each of {} devices",
            *(_LISTEN, log.shown(listen), len(device_ids)),
        )
        return cls(ClusterConfig(device_ids, listeners))

    @classmethod
    def gen_cluster_info_if_not_exist(cls, cluster_id: int, role: LLMRole, options: dict[str, str]) -> None:
        """Add ``llm.ClusterInfo`` to ``options`` unless it is there; errors as for :meth:`from_engine_options`."""
        if _CLUSTER_INFO not in options:
            config = cls.from_engine_options(role == LLMRole.PROMPT, options)
            options[_CLUSTER_INFO] = config.cluster_config.to_json(cluster_id)

    @staticmethod
    def parse_listen_ip_info(listen_ip_info: str) -> tuple[int, int]:
        """Return ``ip:port`` as a little-endian integer and a port; errors as for :meth:`from_engine_options`."""
        _core.check_isinstance(_LISTEN, listen_ip_info, str, allow_none=False)
        ip, colon, port = listen_ip_info.partition(":")
        text = log.shown(listen_ip_info)
        raise_if_false(ip and colon and ":" not in port, "{} = {} is not allowed: ip:port", _LISTEN, text)
        if not (port.isascii() and port.isdigit()):
            raise ValueError(f"{_LISTEN} = {text}: the port is not decimal digits")
        _core.check_uint16("listen port", int(port))
        return trans_str_ip(ip), int(port)


def listens_at(cluster_info: str) -> Optional[str]:
    """Return where ``llm.ClusterInfo`` says that the cluster listens, as ``ip:port``; ``None`` if it does not say.

    Raises:
        LLMException: ``LLM_PARAM_INVALID``, a text that is no such description.
    """
    try:
        info = read_json(cluster_info)
        listeners = info.get("listen_ip_info") or []
        if not listeners:
            return None
        ip, port = trans_str_ip(listeners[0]["ip"]), int(listeners[0]["port"])
        return f"{socket.inet_ntoa(ip.to_bytes(4, 'little'))}:{port}"
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise_if_false(False, "{} = {} is not allowed: {}", _CLUSTER_INFO, log.shown(cluster_info), error)
        raise  # never reached


def _device_ids(text: Optional[str]) -> list[int]:
    raise_if_false(text, "{} is needed: the device of this cluster", _DEVICE)
    _core.check_isinstance(_DEVICE, text, str)
    entries = (text or "").split(";")
    numbers = all(re.fullmatch("[0-9]{1,10}", entry) for entry in entries)
    raise_if_false(numbers, "{} = {} is not allowed: device numbers separated by ;", _DEVICE, log.shown(text))
    return [int(entry) for entry in entries]
