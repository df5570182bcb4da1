"""The options of the connector: the keys of ``kv_connector_extra_config``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_type_hints

from msgspec import Meta, ValidationError, convert

from llm_datadist.integrations.vllm.addresses import AUTO, check
from llm_datadist.integrations.vllm.allowed_peers import MAX_PORT

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings"]

Port = Annotated[int, Meta(ge=0, le=MAX_PORT)]
Milliseconds = Annotated[int, Meta(ge=1, le=4_294_967_000)]  # the longest time of the engine


@dataclass(frozen=True)
class Settings:
    """The checked options of one vLLM. The how-to page "Use it in vLLM" describes them."""

    prefix = ""  # not an option: `addresses` puts it before the names of options in its errors

    # IP address at which the workers listen. "auto": the one that vLLM has chosen for the host of the worker, if the
    # engine admits other hosts; otherwise 127.0.0.1, because the engine then admits processes of this host only.
    host: str = AUTO
    port: Port = 0  # port of the first worker (``listen_address``); 0 takes free ports
    advertise: str = ""  # IP address that prefill advertises to decode, if the workers listen at another one
    # The peers that decode may connect to, whatever a request names (``AllowedPeers``). ``None``: those of this host.
    allowed_peers: Optional[list[str]] = None
    lease_ms: Milliseconds = 30_000  # how long prefill keeps the blocks of a request while no decode holds it
    # In decode: how long a receive may go without progress (a link, a part that prefill lends, computed layers, a
    # completed pull). In prefill: how long a copy from a device may take.
    timeout_ms: Milliseconds = 10_000
    # Number of layers after which prefill notifies decode, while it computes.
    layers_per_read: Annotated[int, Meta(ge=1, lt=2**31)] = 8
    # Whether prefill hands over layers while it computes them. On a device, vLLM then uses no full CUDA graphs.
    layerwise: bool = True
    host_buffers: bool = False  # whether the KV cache of a CPU goes through host buffers too, as that of a device does
    kv_cache_in_pool: bool = True  # whether vLLM's KV cache lies in the pool of the engine, if its layout allows that
    model_tag: str = ""  # name and version of the model, in place of vLLM's name and revision
    check_compatibility: bool = True  # whether decode refuses a prefill with another model or configuration
    # Options of ``Engine``, except ``name``, ``metadata`` and ``listen``.
    engine_options: dict[str, Any] = field(default_factory=dict)
    spans: bool = False  # whether each receive is a span of OpenTelemetry

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """Check ``kv_connector_extra_config``.

        Raises:
            ValueError: an unknown option, a value of another type, a number out of range, an invalid address, or an
                option of the engine that the connector sets.
        """
        kinds, values = get_type_hints(cls, include_extras=True), {}
        for name, value in given.items():
            if name not in kinds:
                raise ValueError(f"unknown option {name!r} of LlmDatadistConnector; allowed: {', '.join(kinds)}")
            try:
                values[name] = convert(value, kinds[name])
            except ValidationError as error:
                raise ValueError(f"option {name!r} is {value!r}: {error}") from None
        settings = cls(**values)
        check(settings)
        for name in ("name", "metadata", "listen"):
            if name in settings.engine_options:
                raise ValueError(f"option 'engine_options' must not have {name!r}: the connector sets it")
        return settings
