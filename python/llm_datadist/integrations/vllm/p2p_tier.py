"""``LlmDatadistP2PTier``: vLLM's peer-to-peer tier, with the bytes moved by the engine.

vLLM decides which chunks a scheduler fetches from another one, and its control connection carries the requests for
them. Only the half that moves bytes (``DataTransport``) is replaced. vLLM has no option for that, so this is a tier of
its own.
"""

from __future__ import annotations

import logging
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar, Optional

from msgspec import Struct, ValidationError, convert, field

from llm_datadist.integrations.vllm import addresses, interface
from llm_datadist.integrations.vllm.addresses import AUTO
from llm_datadist.integrations.vllm.p2p_links import Links
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.settings import Milliseconds, Port  # noqa: TC001 - annotations need them
from llm_datadist.integrations.vllm.supported import installed, warn_untested

with interface.needed():
    import vllm.envs as vllm_envs
    from vllm.utils.network_utils import get_ip
    from vllm.v1.kv_offload.tiering.p2p import manager as vllm_p2p
    from vllm.v1.kv_offload.tiering.p2p.data import DataTransport, PollResult

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from vllm.v1.kv_offload.tiering.base import JobResult

__all__ = ["LlmDatadistP2PTier", "LlmDatadistTransport", "P2PSettings"]

logger = logging.getLogger("vllm.llm_datadist")

_SLEEP_S = 0.001
_SHARD = Shard(0, 1, 1)  # one engine for each data-parallel replica
# How long a pull may take to end after its time limit: the engine then has ended its link (``silence``, 5 s).
_GRACE_S = 10.0
# vLLM compares the addresses of peers as texts, and its own default is a name. All are compared by IP address here.
_NAME, _IP = "localhost", "127.0.0.1"
# How long vLLM's control connection may try to send its last messages. In 0.32 it tries without end, so that a shutdown
# after the end of a peer never returns; 0.33 has the same limit.
_LINGER_MS = 500


class P2PSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The checked options of the tier, beside those of vLLM. The how-to page "Offloading in vLLM" has them."""

    prefix: ClassVar[str] = "link_"  # `host` and `port` are options of vLLM's tier

    host: str = field(default=AUTO, name="link_host")
    port: Port = field(default=0, name="link_port")
    advertise: str = field(default="", name="link_advertise")
    allowed_peers: Optional[list[str]] = None
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
            allowed = ", ".join(cls.__struct_encode_fields__)
            raise ValueError(f"options of LlmDatadistP2PTier: {error}; allowed: {allowed}") from None
        addresses.check(settings)
        for name in ("name", "listen", "timeout"):
            if name in settings.engine_options:
                raise ValueError(f"option 'engine_options' must not have {name!r}: the tier sets it")
        return settings


class LlmDatadistTransport(DataTransport):  # type: ignore[misc]
    """Moves chunks between the primary tiers of schedulers.

    A write of vLLM lends the local rows and offers them to the peer, whose engine pulls them. So only the scheduler
    that owns rows writes into them. The methods are those of vLLM's ``DataTransport``, and raise only what
    their docstrings list.

    Args:
        name: name of the engine, which no other one has.
        view: the primary tier.
        config_fields: what both schedulers must have in common.
        settings: the options of the tier.
        replica: the data-parallel replica.

    Attributes:
        links: the engine of the tier, and its links.
    """

    def __init__(
        self, name: str, view: memoryview, config_fields: dict[str, Any] | None, settings: P2PSettings, replica: int
    ) -> None:
        super().__init__(view, config_fields=config_fields)
        allowed, timeout_s = addresses.allowed_peers(settings, get_ip), settings.timeout_ms / 1000
        listen = addresses.listen_address(settings, _SHARD, replica, get_ip)
        self.links = Links(name, view, listen, allowed, timeout_s, settings.engine_options)
        self._address = addresses.advertised(settings, self.links.address, get_ip)
        text = "llm_datadist listens at %s as %s: %d chunks of %d bytes"
        logger.info(text, self.links.address, name, self.num_blocks, self.block_len)

    def get_agent_metadata(self) -> bytes:
        """Return the address and the name of the engine."""
        return self.links.contact(self._address)

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
        self.links.add(peer_id, agent_metadata, block_len)

    def remove_remote_peer(self, peer_id: str) -> None:
        """End the link to a peer."""
        self.links.remove(peer_id)

    def write_blocks(self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]) -> int | None:
        """Offer rows to a peer. Return the number of the write, or ``None`` if it did not begin."""
        try:
            return self.links.write(peer_id, local_idxs, remote_idxs)
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            logger.warning("cannot offer %d chunks to %s: %s", len(local_idxs), peer_id, error)
            return None

    def poll(self, peer_id: str | None = None) -> PollResult:
        """Advance all transfers, and return the writes that have ended since the last call."""
        self.links.advance()
        return PollResult(*self.links.writes.take(peer_id))

    def cancel(self, transfer_ids: Iterable[int], mode: str = "immediate") -> list[int]:  # noqa: ARG002
        """End writes, in both modes. None is left after the call: no pull under a revoked grant succeeds."""
        self.links.writes.cancel(transfer_ids)
        return []

    def close(self) -> None:
        """Close the engine. Nothing touches the primary tier any more."""
        self.links.close()


class LlmDatadistP2PTier(vllm_p2p.P2PSecondaryTierManager):  # type: ignore[misc]
    """vLLM's ``P2PSecondaryTierManager`` over ``LlmDatadistTransport``.

    A load is reported when nothing writes into its rows any more, and as a success only if this scheduler has read all
    of them.

    Args:
        offloading_spec: as for vLLM's class, like the next five.
        primary_kv_view: the primary tier.
        tier_type: the name of the tier.
        host: address of vLLM's control connection.
        port: port of that connection.
        unbound_store_timeout_s: how long chunks wait to be fetched, in seconds.
        backpressure_detector: refused by vLLM.
        locality: an option of vLLM's class.
        options: ``P2PSettings``.

    Raises:
        ValueError: an option is unknown or has a wrong value.
        RuntimeError: this vLLM does not make its transport where the tier replaces it.
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
        self._allowed_peers = addresses.allowed_peers(settings, get_ip)
        self._timeout_s = settings.timeout_ms / 1000
        self._loading: dict[int, str] = {}  # loads that run: vLLM's job, and the id that its peer knows
        self._held: list[JobResult] = []  # loads that vLLM has ended while a pull still writes
        self._reportable: list[JobResult] = []  # all others, until vLLM takes them
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
                    host=_IP if (host or vllm_envs.VLLM_P2P_SIDE_CHANNEL_HOST) == _NAME else host,
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

    def on_new_request(self, req_context: Any) -> Any:
        """Take a request, and give its peer the name by which the session with it is known."""
        found = super().on_new_request(req_context)
        source = req_context.get_state(vllm_p2p.P2PSourceInfo)
        if source is not None:
            with suppress(ValueError):  # not allowed, so the request has failed already
                source.peer_id = self._checked(source.peer_id)
        return found

    def submit_load(self, job_metadata: Any) -> None:
        """Let the peer of a request offer its chunks, and have vLLM ask for them."""
        source = job_metadata.req_context.get_state(vllm_p2p.P2PSourceInfo)
        if source is not None:
            self._loading[job_metadata.job_id] = source.kv_request_id
            self._data.links.reads.expect(job_metadata.job_id, source.peer_id, job_metadata.chunk_ids.tolist())
        super().submit_load(job_metadata)

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call, except loads into whose rows a pull still writes."""
        self._collect_ended()
        finished, self._reportable = self._reportable, []
        return finished

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier.

        Raises:
            RuntimeError: a pull still writes, long after its time limit. vLLM must not use the rows again.
        """
        super().drain_jobs()
        self._collect_ended()
        limit_s = self._timeout_s + _GRACE_S
        deadline = time.monotonic() + limit_s
        while self._held:
            if time.monotonic() > deadline:
                text = f"the pulls of {len(self._held)} loads into the primary tier have not ended within {limit_s:g} s"
                raise RuntimeError(f"{text} (timeout_ms={self._timeout_s * 1000:g}, and {_GRACE_S:g} s)")
            time.sleep(_SLEEP_S)
            self._collect_ended()

    def _collect_ended(self) -> None:
        """Take what vLLM reports, and hold back the loads into whose rows a pull still writes."""
        ended = self._held + list(super().get_finished_jobs())
        if self._held:
            self._data.links.advance()  # vLLM polls for peers only, and theirs may be gone
        self._held = []
        for result in ended:
            success = self._data.links.reads.finish(result.job_id, result.success)
            if success is None:
                self._held.append(result)
                continue
            request = self._loading.pop(result.job_id, None)
            if result.success and not success:
                logger.warning("load %d of %s has not received all of its chunks", result.job_id, request)
                self._failed_req_ids.add(request)
                result.success = False
            self._reportable.append(result)

    def _get_or_create_session(self, peer_id: str) -> Any:
        """Make vLLM's control connection to a peer, unless the request names one that is not allowed."""
        try:
            checked = self._checked(peer_id)
        except ValueError as error:
            logger.warning("a request is computed without its peer: %s", error)
            return None
        return super()._get_or_create_session(checked)

    def _checked(self, peer_id: str) -> str:
        """Return the name of an allowed peer by IP address, so that no peer has two.

        Raises:
            ValueError: the peer is not allowed, or is named in another way.
        """
        return self._allowed_peers.checked(peer_id.replace(f"{_NAME}:", f"{_IP}:", 1))


@contextmanager
def _in_place_of_nixl(transport: Callable[..., Any]) -> Iterator[None]:
    """Have vLLM's constructor make another transport than that of NIXL, which it names by a global variable."""
    nixl, vllm_p2p.NixlTransport = vllm_p2p.NixlTransport, transport
    try:
        yield
    finally:
        vllm_p2p.NixlTransport = nixl


interface.check(interface.P2P, LlmDatadistTransport, LlmDatadistP2PTier)
