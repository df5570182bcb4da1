"""The tier without vLLM: stand-ins replace the classes that it extends.

Not for: the links (`test_vllm_p2p_links.py`), and vLLM's own classes (`integration-tests/vllm/test_p2p_tier.py`).
"""

from __future__ import annotations

import importlib
import mmap
import sys
import time
from collections import namedtuple
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Engine, Error
from llm_datadist.integrations.vllm.p2p_messages import decode_contact
from peers import LIMIT
from stand_ins import put

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "llm_datadist.integrations.vllm.p2p_tier"
ROWS, ROW = 8, 4096
OWN = "127.0.0.2"  # vLLM's address of this host
Source = namedtuple("Source", "kv_request_id peer_id")  # noqa: PYI024 - a stand-in


def members(*names: str) -> type:
    """A class of vLLM of which the tier only reads attributes."""
    return type("Members", (), dict.fromkeys(names))


def poll_result(done: list[int], failed: list[int]) -> tuple[list[int], list[int]]:
    """vLLM's `PollResult`."""
    return done, failed


class Transport:
    """vLLM's `DataTransport`."""

    num_blocks = block_len = 0

    def __init__(self, view: memoryview, config_fields: Any = None) -> None:
        self._view, self.config_fields = view, config_fields
        self.num_blocks, self.block_len = view.shape or (0, 0)

    def get_agent_metadata(self) -> bytes:
        return b""

    def add_remote_peer(
        self, peer_id: str, agent_metadata: bytes, base_addr: int, num_blocks: int, block_len: int
    ) -> None: ...

    def remove_remote_peer(self, peer_id: str) -> None: ...

    def write_blocks(self, peer_id: str, local_idxs: list[int], remote_idxs: list[int]) -> int | None: ...

    def poll(self, peer_id: str | None = None) -> Any: ...

    def cancel(self, transfer_ids: Any, mode: str = "immediate") -> list[int]: ...  # type: ignore[empty-body]

    def close(self) -> None: ...


class Nixl:
    """vLLM's own transport."""

    def __init__(self, agent_name: str, view: memoryview, config_fields: Any = None) -> None:
        raise AssertionError(f"{agent_name}: NIXL was made over {view} for {config_fields}")


class Manager:
    """vLLM's `P2PSecondaryTierManager`: sessions, and the jobs that they have ended."""

    bound = True  # whether its control connection can be bound

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str = "p2p",
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> None:
        assert offloading_spec is not None
        self.options = {"host": host, "port": port, **options}
        self.tier_type = tier_type
        self._data = sys.modules["vllm.v1.kv_offload.tiering.p2p"].manager.NixlTransport(
            "engine 1", primary_kv_view, config_fields={"model": "m"}, backends=None, num_threads=4
        )
        if not self.bound:
            raise OSError("the port is in use")
        self._control = SimpleNamespace(_zmq_ctx=SimpleNamespace(linger=-1))
        self._failed_req_ids: set[str] = set()
        self.submitted: list[Any] = []
        self.ended: list[Any] = []
        self.sessions: list[str] = []

    def on_new_request(self, req_context: Any) -> str:
        self._get_or_create_session(req_context.get_state(Source).peer_id)
        return "a context"

    def submit_load(self, job_metadata: Any) -> None:
        self.submitted.append(job_metadata)

    def get_finished_jobs(self) -> list[Any]:
        if self.sessions:  # vLLM polls for each of its peers
            self._data.poll()
        ended, self.ended = self.ended, []
        return ended

    def drain_jobs(self) -> None:
        self._data.poll()

    def _get_or_create_session(self, peer_id: str) -> str:
        self.sessions.append(peer_id)
        return peer_id

    def shutdown(self) -> None:
        self._data.close()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    manager = {"P2PSecondaryTierManager": Manager, "P2PSourceInfo": Source, "NixlTransport": Nixl}
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.utils.network_utils": {"get_ip": lambda: OWN},
        "vllm.envs": {"VLLM_P2P_SIDE_CHANNEL_HOST": "localhost"},
        "vllm.v1.kv_offload.base": {"OffloadingSpec": members("config"), "ReqContext": members("get_state")},
        "vllm.v1.kv_offload.config": {
            "OffloadingConfig": members("parallel"),
            "OffloadingParallelConfig": members("data_parallel_index"),
        },
        "vllm.v1.kv_offload.tiering.base": {
            "JobResult": members("job_id", "success"),
            "TransferJob": members("job_id", "chunk_ids", "req_context"),
        },
        "vllm.v1.kv_offload.tiering.p2p": {},
        "vllm.v1.kv_offload.tiering.p2p.control": {"ZmqTransport": members("_zmq_ctx")},
        "vllm.v1.kv_offload.tiering.p2p.data": {"DataTransport": Transport, "PollResult": poll_result},
        "vllm.v1.kv_offload.tiering.p2p.manager": manager,
    }
    put(monkeypatch, modules)
    monkeypatch.setattr(sys.modules["vllm"], "envs", sys.modules["vllm.envs"], raising=False)
    p2p = "vllm.v1.kv_offload.tiering.p2p"
    monkeypatch.setattr(sys.modules[p2p], "manager", sys.modules[f"{p2p}.manager"], raising=False)
    monkeypatch.setattr("llm_datadist.integrations.vllm.supported.installed", lambda: "0.32.0")
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    assert sys.modules[f"{p2p}.manager"].NixlTransport is Nixl  # type: ignore[attr-defined]
    sys.modules.pop(NAME, None)


class Tier:
    """A tier over a primary tier of its own."""

    def __init__(self, module: Any, replica: int = 0, **options: Any) -> None:
        self.memory = mmap.mmap(-1, ROWS * ROW)
        self.view = memoryview(self.memory).cast("b", shape=[ROWS, ROW])
        self.rows = np.frombuffer(self.memory, np.int8).reshape(ROWS, ROW)
        spec = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(data_parallel_index=replica)))
        self.tier = module.LlmDatadistP2PTier(spec, self.view, **options)
        self.data = self.tier._data

    def load(self, job: int, *rows: int, peer: str = "peer", request: str = "r") -> None:
        source = Source(request, peer)
        context = SimpleNamespace(get_state=lambda kind: source if kind is Source else None)
        self.tier.submit_load(SimpleNamespace(job_id=job, chunk_ids=np.array(rows, np.int32), req_context=context))

    def end(self, job: int, success: bool) -> list[tuple[int, bool]]:
        self.tier.ended.append(SimpleNamespace(job_id=job, success=success))
        return self.finished()

    def finished(self) -> list[tuple[int, bool]]:
        return [(result.job_id, result.success) for result in self.tier.get_finished_jobs()]


@pytest.fixture
def pair(module: Any) -> Iterator[tuple[Tier, Tier]]:
    """Two tiers that know each other as "peer"."""
    both = (Tier(module), Tier(module))
    for one, other in (both, both[::-1]):
        one.tier.sessions.append("peer")
        one.data.add_remote_peer("peer", other.data.get_agent_metadata(), 0, ROWS, ROW)
    yield both
    for one in both:
        one.tier.shutdown()


def until(tier: Tier, other: Tier, count: int) -> list[tuple[int, bool]]:
    """What a tier reports, until it has reported as many jobs."""
    found: list[tuple[int, bool]] = []
    end = time.monotonic() + LIMIT
    while len(found) < count:
        assert time.monotonic() < end
        found += tier.finished()
        other.data.poll()
    return found


def moved(owner: Tier, reader: Tier, number: int) -> tuple[list[int], list[int]]:
    """Let both go on until a write has ended."""
    end = time.monotonic() + LIMIT
    while True:
        assert time.monotonic() < end
        reader.data.poll("peer")
        done, failed = owner.data.poll("peer")
        if number in done + failed:
            return done, failed


def test_a_load_is_reported_once_and_with_its_bytes(pair: tuple[Tier, Tier]) -> None:
    owner, reader = pair
    owner.rows[:] = np.arange(ROWS, dtype=np.int8)[:, None]
    reader.load(5, 1, 2)
    number = owner.data.write_blocks("peer", [6, 7], [2, 1])
    assert moved(owner, reader, number) == ([number], [])
    reader.tier.ended.append(SimpleNamespace(job_id=5, success=True))
    assert until(reader, owner, 1) == [(5, True)]
    assert reader.finished() == []
    assert reader.rows[[1, 2, 3]].tolist() == [[7] * ROW, [6] * ROW, [0] * ROW]
    assert reader.tier._failed_req_ids == set()
    assert [job.job_id for job in reader.tier.submitted] == [5]


def test_a_success_without_the_bytes_becomes_a_failure(pair: tuple[Tier, Tier]) -> None:
    _, reader = pair
    reader.load(5, 1, 2, request="r5")
    assert reader.end(5, success=True) == [(5, False)]
    assert reader.tier._failed_req_ids == {"r5"}, "lookups of the request would find the chunks for ever"


def test_a_load_is_held_while_a_pull_writes(pair: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    _, reader = pair
    answers: list[Any] = [None, None, False]
    monkeypatch.setattr(reader.data.links.reads, "finish", lambda job, success: answers.pop(0) if job == 5 else success)
    reader.load(5, 1)
    assert reader.end(5, success=False) == []
    assert reader.end(6, success=True) == [(6, True)]
    assert reader.finished() == [(5, False)]
    assert reader.finished() == []


def test_a_held_load_ends_without_peers(pair: tuple[Tier, Tier]) -> None:
    """The session of its peer has ended, so vLLM does not poll, and the pull still ends."""
    owner, reader = pair
    reader.load(5, 1)
    number = owner.data.write_blocks("peer", [6], [1])
    assert moved(owner, reader, number) == ([number], [])
    (load,) = reader.data.links.reads._loads.values()
    transfer = reader.data.links._engine.link(owner.data.links.address)  # a transfer that has not been seen to end
    load.running.add(transfer)
    reader.data.links.reads._running[transfer] = SimpleNamespace(load=load)
    reader.tier.sessions.clear()
    reader.tier.ended.append(SimpleNamespace(job_id=5, success=True))
    assert until(reader, owner, 1) == [(5, True)]


def test_drain_waits_for_the_pulls_and_keeps_the_results(
    pair: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, reader = pair
    answers: list[Any] = [None, None, False]
    monkeypatch.setattr(reader.data.links.reads, "finish", lambda job, success: answers.pop(0) if job == 5 else success)
    reader.load(5, 1)
    reader.tier.ended += [SimpleNamespace(job_id=job, success=True) for job in (4, 5)]
    reader.tier.drain_jobs()
    assert answers == []
    assert reader.finished() == [(4, True), (5, False)]
    assert reader.finished() == []


def test_drain_does_not_wait_without_end(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not return either: a pull still writes into the rows."""
    monkeypatch.setattr(module, "_GRACE_S", 0.02)
    tier = Tier(module, timeout_ms=30)
    answers: list[Any] = []
    monkeypatch.setattr(tier.data.links.reads, "finish", lambda _job, _success: answers[0] if answers else None)
    tier.load(5, 1)
    tier.tier.ended.append(SimpleNamespace(job_id=5, success=True))
    with pytest.raises(RuntimeError, match=r"the pulls of 1 loads .* within 0\.05 s \(timeout_ms=30, and 0\.02 s\)"):
        tier.tier.drain_jobs()
    answers.append(False)
    tier.tier.drain_jobs()
    assert tier.finished() == [(5, False)]
    tier.tier.shutdown()


def test_a_request_without_a_peer_is_left_to_vllm(pair: tuple[Tier, Tier]) -> None:
    _, reader = pair
    context = SimpleNamespace(get_state=lambda _kind: None)
    reader.tier.submit_load(SimpleNamespace(job_id=5, chunk_ids=np.array([1]), req_context=context))
    assert len(reader.tier.submitted) == 1
    assert reader.end(5, success=False) == [(5, False)]


def test_the_transport_raises_nothing(pair: tuple[Tier, Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    owner, reader = pair
    assert owner.data.write_blocks("nobody", [1], [1]) is None
    assert owner.data.write_blocks("peer", [1], []) is None
    assert owner.data.write_blocks("peer", [99], [1]) is None
    assert owner.data.cancel([5], mode="wait") == []
    owner.data.remove_remote_peer("nobody")
    with monkeypatch.context() as patch:

        def fail() -> None:
            raise RuntimeError("a fault")

        patch.setattr(owner.data.links._outbox, "resend", fail)
        assert owner.data.poll("peer") == ([], [])
    number = owner.data.write_blocks("peer", [1], [1])
    owner.data.cancel([number])
    reader.data.remove_remote_peer("peer")
    assert reader.data.write_blocks("peer", [1], [1]) is None
    owner.tier.shutdown()
    assert owner.data.write_blocks("peer", [1], [1]) is None
    assert owner.data.poll() == ([], [])
    assert owner.finished() == []


def test_peers_of_requests_must_be_allowed(module: Any, caplog: pytest.LogCaptureFixture) -> None:
    tier = Tier(module, allowed_peers=["127.0.0.1:5000-5999", "10.0.0.0/24"])
    for peer in "127.0.0.1:5710", "10.0.0.9:80":
        assert tier.tier._get_or_create_session(peer) == peer
    assert tier.tier._get_or_create_session("localhost:5710") == "127.0.0.1:5710"
    for peer in "127.0.0.1:80", "localhost:80", "10.0.1.9:80", "example.com:80", "localhost", "":
        assert tier.tier._get_or_create_session(peer) is None
    assert len(tier.tier.sessions) == 3
    assert "127.0.0.1:80 is not one of allowed_peers" in caplog.text
    tier.tier.shutdown()


@pytest.mark.parametrize(
    ("owner", "name", "text"),
    [
        (Manager, "_get_or_create_session", r"has no P2PSecondaryTierManager\._get_or_create_session"),
        (Manager, "submit_load", "Manager has no submit_load"),
        (Transport, "write_blocks", "Transport has no write_blocks"),
    ],
)
def test_a_vllm_with_other_methods_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, text: str
) -> None:
    """Also without the private method whose override checks the peers of requests: it would never be called."""
    monkeypatch.delattr(owner, name)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(RuntimeError, match=text):
        importlib.import_module(module.__name__)


def test_a_peer_has_one_name(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks the session of a request up by the name of its peer, and names itself by its own address."""
    source = SimpleNamespace(kv_request_id="r", peer_id="localhost:5710")
    request = SimpleNamespace(get_state=lambda kind: source if kind is Source else None)
    for given, address in ((None, "127.0.0.1"), ("localhost", "127.0.0.1"), ("10.0.0.1", "10.0.0.1")):
        tier = Tier(module, host=given)
        assert tier.tier.options["host"] == address
        assert tier.tier.on_new_request(request) == "a context"
        assert tier.tier.sessions == [source.peer_id] == ["127.0.0.1:5710"]
        tier.tier.shutdown()
    monkeypatch.setattr(sys.modules["vllm.envs"], "VLLM_P2P_SIDE_CHANNEL_HOST", "10.0.0.2")
    tier = Tier(module)
    assert tier.tier.options["host"] is None
    source.peer_id = "example.com:5710"
    tier.tier.on_new_request(request)
    assert (tier.tier.sessions, source.peer_id) == ([], "example.com:5710")
    tier.tier.shutdown()


def test_vllm_gets_what_is_its_own(module: Any) -> None:
    tier = Tier(module, host="127.0.0.1", port=5710, locality="REMOTE", unbound_store_timeout_s=5)
    assert tier.tier.options == {
        "host": "127.0.0.1",
        "port": 5710,
        "locality": "REMOTE",
        "unbound_store_timeout_s": 5,
        "backpressure_detector": None,
    }
    assert tier.tier._control._zmq_ctx.linger == 500
    assert tier.data.config_fields == {"model": "m"}
    contact = decode_contact(tier.data.get_agent_metadata())
    assert contact.engine == "engine 1"
    assert contact.address.startswith("127.0.0.1:")
    tier.tier.shutdown()


def test_the_engine_listens_where_peers_reach_it(module: Any) -> None:
    """As in the connector (`test_vllm_addresses.py`)."""

    def at(**options: Any) -> tuple[str, str]:
        tier = Tier(module, **options)
        listens, told = tier.data.links.address, decode_contact(tier.data.get_agent_metadata()).address
        tier.tier.shutdown()
        return listens.rpartition(":")[0], told.rpartition(":")[0]

    token = {"token": "0123456789abcdef"}
    assert at() == ("127.0.0.1", "127.0.0.1")
    assert at(engine_options=token) == (OWN, OWN)
    assert at(engine_options=token, link_host="0.0.0.0") == ("0.0.0.0", OWN)  # noqa: S104
    assert at(link_host="127.0.0.3", link_advertise="10.0.0.1") == ("127.0.0.3", "10.0.0.1")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"backends": ["UCX"]}, "unknown field `backends`; allowed: link_host, link_port, link_advertise"),
        ({"timeout_ms": "1"}, "Expected `int`, got `str` - at `\\$.timeout_ms`"),
        ({"timeout_ms": 0}, "Expected `int` >= 1"),
        ({"link_port": 65_536}, "Expected `int` <= 65535"),
        ({"allowed_peers": ["example.com"]}, "'allowed_peers' has 'example.com'"),
        ({"engine_options": {"listen": "0.0.0.0:1"}}, "must not have 'listen'"),
        (
            {"link_host": "::1", "link_port": 1, "replica": 65_535},
            "option 'link_port' is 1: .* data-parallel rank 65535",
        ),
        ({"link_host": "example.com"}, "option 'link_host' is 'example.com': must be 'auto' or an IP address"),
        ({"link_advertise": "0.0.0.0"}, "option 'link_advertise' is '0.0.0.0': must be an IP address of one host"),  # noqa: S104
    ],
)
def test_wrong_options_are_refused(module: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Tier(module, **options)


def test_untested_versions_run_with_a_warning(
    module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "installed", lambda: "0.1.0")
    Tier(module).tier.shutdown()
    assert "llm_datadist was not tested with vLLM 0.1.0" in caplog.text


def test_a_start_that_fails_leaves_no_engine(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []

    def engine(**options: Any) -> Engine:
        engines.append(Engine(**options))
        return engines[-1]

    monkeypatch.setattr("llm_datadist.integrations.vllm.p2p_links.Engine", engine)
    monkeypatch.setattr(Manager, "bound", False)
    with pytest.raises(OSError, match="in use"):
        Tier(module)
    monkeypatch.setattr(Manager, "bound", True)

    def init(self: Manager, *_given: Any, **_options: Any) -> None:
        self._data = SimpleNamespace(close=list)

    monkeypatch.setattr(Manager, "__init__", init)
    with pytest.raises(RuntimeError, match="makes the transport of its peer-to-peer tier in another way"):
        Tier(module)
    assert [one.closed for one in engines] == [True]


def test_an_engine_that_cannot_be_opened_fails_the_start(module: Any) -> None:
    with pytest.raises(Error, match=r"192\.0\.2\.1"):
        Tier(module, link_host="192.0.2.1")
