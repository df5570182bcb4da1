"""``LlmDatadistP2PTier``: vLLM's peer-to-peer tier, with the bytes moved by the engine.

vLLM decides which chunks a scheduler fetches from another one, and its control connection carries who wants what. Only
the half that moves bytes (``DataTransport``) is replaced. vLLM has no option for that, so this is another tier.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert, field

from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.allowed_peers import LOOPBACK, MAX_PORT, AllowedPeers
from llm_datadist.integrations.vllm.p2p_links import Links
from llm_datadist.integrations.vllm.settings import Milliseconds, Port  # noqa: TC001 - annotations need them
from llm_datadist.integrations.vllm.supported import installed, warn_untested

with interface.needed():
    from vllm.v1.kv_offload.tiering.p2p import manager as vllm_p2p
    from vllm.v1.kv_offload.tiering.p2p.data import DataTransport, PollResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.v1.kv_offload.tiering.base import JobResult

__all__ = ["LlmDatadistP2PTier", "LlmDatadistTransport", "P2PSettings"]

logger = logging.getLogger("vllm.llm_datadist")

_SLEEP_S = 0.001
# How long vLLM's control connection may try to send its last messages. In 0.32 it tries without end, so that a shutdown
# after the end of a peer never returns; 0.33 has the same limit.
_LINGER_MS = 500


class P2PSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The checked options of the tier, beside those of vLLM. The how-to page "vLLM" describes them."""

    link_host: Annotated[str, Meta(min_length=1)] = "127.0.0.1"
    link_port: Port = 0
    allowed_peers: list[str] = field(default_factory=LOOPBACK.copy)
    timeout_ms: Milliseconds = 10_000
    engine_options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: dict[str, Any]) -> P2PSettings:
        """Check the options.

        Raises:
            ValueError: an unknown option, a value of another type, a number out of range, or an option of the engine
                that the tier sets.
        """
        try:
            settings = convert(given, cls)
        except ValidationError as error:
            raise ValueError(
                f"options of LlmDatadistP2PTier: {error}; allowed: {', '.join(cls.__struct_fields__)}"
            ) from None
        AllowedPeers(settings.allowed_peers)
        for name in ("name", "listen", "timeout"):
            if name in settings.engine_options:
                raise ValueError(f"option 'engine_options' must not have {name!r}: the tier sets it")
        return settings

    def listen_address(self, replica: int) -> str:
        """Return the address at which the engine of a data-parallel replica listens.

        Raises:
            ValueError: the port of the replica is too large.
        """
        port = self.link_port + replica if self.link_port else 0
        if port > MAX_PORT:
            raise ValueError(f"port of replica {replica}={port} is out of range (0 to {MAX_PORT})")
        host = f"[{self.link_host}]" if ":" in self.link_host else self.link_host
        return f"{host}:{port}"


class LlmDatadistTransport(DataTransport):  # type: ignore[misc]
    """Moves chunks between the primary tiers of schedulers.

    A write of vLLM lends the local rows and offers them to the peer, whose engine pulls them. So only the scheduler
    that owns rows writes into them. The methods are those of vLLM's ``DataTransport``, and raise nothing that they do
    not document.

    Args:
        name: name of the engine, which no other one has.
        view: the primary tier.
        config_fields: what both schedulers must have in common.
        settings: the options of the tier.
        replica: the data-parallel replica.
    """

    def __init__(
        self, name: str, view: memoryview, config_fields: dict[str, Any] | None, settings: P2PSettings, replica: int
    ) -> None:
        super().__init__(view, config_fields=config_fields)
        allowed, timeout_s = AllowedPeers(settings.allowed_peers), settings.timeout_ms / 1000
        listen = settings.listen_address(replica)
        self._links = Links(name, view, listen, allowed, timeout_s, settings.engine_options)
        text = "llm_datadist listens at %s as %s: %d chunks of %d bytes"
        logger.info(text, self._links.address, name, self.num_blocks, self.block_len)

    def get_agent_metadata(self) -> bytes:
        """Return the address and the name of the engine."""
        return self._links.contact()

    def add_remote_peer(
        self,
        peer_id: str,
        agent_metadata: bytes,
        base_addr: int,  # noqa: ARG002 - no peer needs addresses
        num_blocks: int,  # noqa: ARG002 - the engine of the peer knows it
        block_len: int,
    ) -> None:
        """Admit a peer, and start to link with it.

        Raises:
            ValueError: the peer is not allowed, or does not fit. vLLM rejects it then.
        """
        self._links.add(peer_id, agent_metadata, block_len)

    def remove_remote_peer(self, peer_id: str) -> None:
        """End the link to a peer."""
        self._links.remove(peer_id)

    def write_blocks(self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]) -> int | None:
        """Offer rows to a peer. Return the number of the write, or ``None`` if it did not begin."""
        try:
            return self._links.write(peer_id, local_idxs, remote_idxs)
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            logger.warning("cannot offer %d chunks to %s: %s", len(local_idxs), peer_id, error)
            return None

    def poll(self, peer_id: str | None = None) -> PollResult:
        """Return the writes that have ended since the last call, and let all others go on."""
        self.advance()
        return PollResult(*self._links.writes.take(peer_id))

    def cancel(self, transfer_ids: Iterable[int], mode: str = "immediate") -> list[int]:  # noqa: ARG002
        """End writes, in both modes. None is left after the call: no pull under a revoked grant succeeds."""
        self._links.writes.cancel(transfer_ids)
        return []

    def close(self) -> None:
        """Close the engine. Nothing touches the primary tier any more."""
        self._links.close()

    def advance(self) -> None:
        """Let links, writes and loads go on."""
        try:
            self._links.advance()
        except Exception:
            # The scheduler would end. The time limits end what does not go on.
            logger.exception("the links of the peer-to-peer tier cannot go on")

    def expect(self, job: int, peer_id: str, rows: Iterable[int]) -> None:
        """Let a peer write into rows, for a load that begins (``Reads.expect``)."""
        self._links.reads.expect(job, peer_id, rows)

    def settle(self, job: int, success: bool) -> bool | None:
        """End a load (``Reads.settle``)."""
        return self._links.reads.settle(job, success)


class LlmDatadistP2PTier(vllm_p2p.P2PSecondaryTierManager):  # type: ignore[misc]
    """vLLM's ``P2PSecondaryTierManager`` over ``LlmDatadistTransport``.

    A load is reported when nothing writes into its rows any more, and as a success only if this scheduler has read all
    of them.

    Args:
        offloading_spec: as for vLLM's class, like the next five.
        primary_kv_view: the primary tier.
        tier_type: the name of the tier.
        host: address of vLLM's control connection.
        port: its port.
        unbound_store_timeout_s: seconds for which chunks wait to be fetched.
        backpressure_detector: refused by vLLM.
        locality: of vLLM.
        options: ``P2PSettings``.

    Raises:
        ValueError: an option is unknown or has a wrong value.
        RuntimeError: this vLLM makes its transport in another way.
        Error: the engine cannot be opened.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str = "LlmDatadistP2PTier",
        host: str | None = None,
        port: int | None = None,
        unbound_store_timeout_s: float = 60.0,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        settings = P2PSettings.parse(options)
        warn_untested(installed())
        self._allowed_peers = AllowedPeers(settings.allowed_peers)
        self._loading: dict[int, str] = {}  # loads that run: vLLM's job, and the id that its peer knows
        self._held: list[JobResult] = []  # loads that vLLM has ended while a pull still writes
        self._settled: list[JobResult] = []  # all others, until vLLM takes them
        made: list[LlmDatadistTransport] = []

        def transport(agent_name: str, view: memoryview, config_fields: Any = None, **_nixl: Any) -> Any:
            replica = offloading_spec.config.parallel.data_parallel_index
            made.append(LlmDatadistTransport(agent_name, view, config_fields, settings, replica))
            return made[-1]

        try:
            with _in_place_of_nixl(transport):
                super().__init__(
                    offloading_spec,
                    primary_kv_view,
                    tier_type,
                    host=host,
                    port=port,
                    unbound_store_timeout_s=unbound_store_timeout_s,
                    backpressure_detector=backpressure_detector,
                    locality=locality,
                )
        except BaseException:
            for each in made:
                each.close()
            raise
        if self._data not in made:
            super().shutdown()
            raise RuntimeError(f"vLLM {installed()} makes the transport of its peer-to-peer tier in another way")
        self._control._zmq_ctx.linger = _LINGER_MS  # noqa: SLF001 - vLLM has no option for it

    def submit_load(self, job_metadata: Any) -> None:
        """Let the peer of a request offer its chunks, and have vLLM ask for them."""
        source = job_metadata.req_context.get_state(vllm_p2p.P2PSourceInfo)
        if source is not None:
            self._loading[job_metadata.job_id] = source.kv_request_id
            self._data.expect(job_metadata.job_id, source.peer_id, job_metadata.chunk_ids.tolist())
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call, except loads into whose rows a pull still writes."""
        self._settle()
        settled, self._settled = self._settled, []
        return settled

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier. The time limits of the engine bound what vLLM does not."""
        super().drain_jobs()
        self._settle()
        while self._held:
            time.sleep(_SLEEP_S)
            self._settle()

    def _settle(self) -> None:
        """Take what vLLM reports, and hold back the loads into whose rows a pull still writes."""
        ended = self._held + list(super().get_finished_jobs())
        if self._held:
            self._data.advance()  # vLLM polls for peers only, and theirs may be gone
        self._held = []
        for result in ended:
            success = self._data.settle(result.job_id, result.success)
            if success is None:
                self._held.append(result)
                continue
            request = self._loading.pop(result.job_id, None)
            if result.success and not success:
                logger.warning("load %d of %s has not received all of its chunks", result.job_id, request)
                self._failed_req_ids.add(request)
                result.success = False
            self._settled.append(result)

    def _get_or_create_session(self, peer_id: str) -> Any:
        """Make vLLM's control connection to a peer, unless the request names one that is not allowed."""
        try:
            # vLLM's own default is a name.
            self._allowed_peers.checked(peer_id.replace("localhost:", "127.0.0.1:", 1))
        except ValueError as error:
            logger.warning("a request is computed without its peer: %s", error)
            return None
        return super()._get_or_create_session(peer_id)


@contextmanager
def _in_place_of_nixl(transport: Callable[..., Any]) -> Iterator[None]:
    """Have vLLM's constructor make another transport than that of NIXL, which it names by a global variable."""
    nixl, vllm_p2p.NixlTransport = vllm_p2p.NixlTransport, transport
    try:
        yield
    finally:
        vllm_p2p.NixlTransport = nixl


interface.check({}, LlmDatadistP2PTier)
