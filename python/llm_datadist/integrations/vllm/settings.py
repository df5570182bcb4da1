"""The options of the connector: the keys of ``kv_connector_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings"]

MAX_PORT = 65_535
MAX_MS = 4_294_967_000  # the longest time of the engine
MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class Settings:
    """The checked options of one vLLM. The how-to page "vLLM" describes them."""

    host: str = "127.0.0.1"  # IP address at which the workers listen, and at which peers reach them
    port: int = 0  # port of rank 0; rank n uses ``port + n``; 0 takes free ports
    lease_ms: int = 60_000  # how long prefill keeps the blocks of a request for decode
    # In decode: how long a receive may go without progress (a link, a part that prefill lends, computed layers, a
    # completed pull). In prefill: how long decode may wait for blocks that prefill does not lend yet.
    timeout_ms: int = 10_000
    layers_per_read: int = 8  # number of layers after which prefill notifies decode, while it computes
    kv_cache_in_pool: bool = True  # whether vLLM's KV cache lies in the pool of the engine, if its layout allows that
    model_tag: str = ""  # name or version of the model, the same on both sides
    engine_options: dict[str, Any] = field(default_factory=dict)  # options of ``Engine``, except ``name``
    spans: bool = False  # whether each receive is a span of OpenTelemetry
    allow_untested_vllm: bool = False  # whether a vLLM that was not tested is accepted

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """Check ``kv_connector_extra_config``.

        Raises:
            ValueError: an unknown option, a value of another type, a number out of range, or a name of the engine.
        """
        defaults = {option.name: getattr(cls(), option.name) for option in fields(cls)}
        for name, value in given.items():
            if name not in defaults:
                raise ValueError(f"unknown option {name!r} of LlmDatadistConnector; allowed: {', '.join(defaults)}")
            wanted = type(defaults[name])
            # A bool is an int for isinstance, but not here.
            if type(value) is not wanted:
                raise ValueError(f"option {name!r} must be of type {wanted.__name__}, not {value!r}")
        settings = cls(**given)
        _in_range("port", settings.port, 0, MAX_PORT)
        _in_range("lease_ms", settings.lease_ms, 1, MAX_MS)
        _in_range("timeout_ms", settings.timeout_ms, 1, MAX_MS)
        _in_range("layers_per_read", settings.layers_per_read, 1, MAX_INT32)
        if not settings.host:
            raise ValueError("option 'host' must not be empty")
        if "name" in settings.engine_options:
            raise ValueError("option 'engine_options' must not have 'name': the connector names the engines")
        return settings

    def listen_address(self, rank: int) -> str:
        """Return the address at which the worker of a rank listens.

        Raises:
            ValueError: the port of the rank is too large.
        """
        port = self.port + rank if self.port else 0
        _in_range(f"port of rank {rank}", port, 0, MAX_PORT)
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{port}"


def _in_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range ({low} to {high})")
