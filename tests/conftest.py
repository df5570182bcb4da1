"""Fixtures shared by the Python tests.

Only one `LLMDataDist` may be initialized in a process, so every engine comes from `start` or `ends`, which close what
they opened when the test ends. Not for: expectations about results (they belong to the tests) and reading memory
(`memory.py`).
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import ExitStack
from functools import cache
from typing import TYPE_CHECKING, Any, Callable

import contract
import pytest
from hypothesis import HealthCheck, Phase, settings

import cpp_programs
import hixl_ends
from ids import short
from llm_datadist import Keeper, LLMDataDist, LLMRole
from peers import Ends

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from peers import End, Peer


PAGE_SHIFT = 12
PAGE = 1 << PAGE_SHIFT
POOL = 2 << 20
THOROUGH = os.environ.get("LLM_DATADIST_THOROUGH", "") not in ("", "0")

# A shell without job control starts background jobs with SIGINT ignored, and the child processes of tests inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "short",
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes; the thorough profile does it
    suppress_health_check=list(HealthCheck),
)
settings.register_profile("thorough", max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("thorough" if THOROUGH else "short")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-contract", action="store_true", help="write docs/llm-datadist/conformance.md from this run"
    )
    parser.addoption("--show-contract", action="store_true", help="print which test proves which item")


def pytest_configure(config: pytest.Config) -> None:
    """Make warnings errors, also when pytest runs without the settings of the project. Record the marked tests."""
    config.addinivalue_line("filterwarnings", "error")
    config.pluginmanager.register(contract.Witness(), "contract")


def pytest_report_header() -> list[str]:
    there = contract.SHARED.is_dir()
    return [] if there else ["no documents beside the checkout: the tests that compare with them are left out"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that compare with documents beside the checkout, if there are none."""
    absent = [item for item in items if not contract.SHARED.is_dir() and item.get_closest_marker("shared_documents")]
    if absent:
        config.hook.pytest_deselected(items=absent)
        items[:] = [item for item in items if item not in absent]


def pytest_sessionfinish(session: pytest.Session) -> None:
    witness: Any = session.config.pluginmanager.get_plugin("contract")
    if session.config.getoption("--show-contract"):
        print(f"\ncontract: {witness.proofs}")  # noqa: T201  (the option asks for it)
    if session.config.getoption("--write-contract"):
        contract.TABLE.write_text(witness.table(), encoding="utf-8")


def pool(memory_size: Any = POOL, page_shift: Any = PAGE_SHIFT) -> str:
    return json.dumps({"memory_size": memory_size, "page_shift": page_shift})


def options(device: str | None = pool(), host: str | None = pool(), **extra: str) -> dict[str, str]:
    """The options of a cache-manager engine with small pools; `extra` uses `__` for the dot of a key."""
    pools = {"llm.MemPoolConfig": device, "llm.HostMemPoolConfig": host}
    given = {key: text for key, text in pools.items() if text is not None}
    more = {key.replace("__", "."): value for key, value in extra.items()}
    return {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", **given, **more}


@pytest.fixture
def start() -> Iterator[Callable[..., LLMDataDist]]:
    """A function that initializes an engine; everything it started is finalized afterwards."""
    opened: list[LLMDataDist] = []

    def begin(settings_: Any = None, cluster_id: int = 1, role: LLMRole = LLMRole.PROMPT) -> LLMDataDist:
        dist = LLMDataDist(role, cluster_id)
        opened.append(dist)
        dist.init(options() if settings_ is None else settings_)
        return dist

    assert LLMDataDist.llm_engine_instance is None, "an earlier test left an engine open"
    yield begin
    for dist in opened:
        dist.finalize()
    assert LLMDataDist.llm_engine_instance is None


@pytest.fixture
def dist(start: Callable[..., LLMDataDist]) -> LLMDataDist:
    return start()


@pytest.fixture
def manager(dist: LLMDataDist) -> Any:
    return dist.cache_manager


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Engines here and in other processes, all closed afterwards."""
    with Ends() as made:
        yield made


@pytest.fixture(params=[(False, "auto"), (False, "tcp"), (True, "auto"), (True, "tcp")], ids=short)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Mode and transport."""
    accessible, transport = request.param
    return {"accessible": accessible, "llm__LinkTransport": transport}


@pytest.fixture
def pair(ends: Ends, way: dict[str, Any]) -> tuple[End, Peer]:
    """Two linked ends, in every mode, over every transport."""
    return ends.pair(**way)


@pytest.fixture(params=hixl_ends.WAYS)
def hixl_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the bytes of all engines of the module `hixl` take one way, and return its name."""
    way = str(request.param)
    if way == "tcp":
        monkeypatch.setenv("LLM_DATADIST_TRANSPORT", "tcp")
    monkeypatch.setattr(hixl_ends.padding, "is_on", way == "process")
    return way


@pytest.fixture(params=["auto", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def served(ends: Ends, transport: str) -> tuple[End, Peer]:
    """Two linked ends, not in remote-accessible mode."""
    return ends.pair(llm__LinkTransport=transport)


@pytest.fixture
def one_sided(ends: Ends, transport: str) -> tuple[End, Peer]:
    """Two linked ends in remote-accessible mode."""
    return ends.pair(accessible=True, llm__LinkTransport=transport)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """Return the path of the keeper's socket."""
    return tmp_path / "keeper"


@pytest.fixture
def keeper(socket: Path) -> Iterator[Keeper]:
    with Keeper(memory="1MiB", value="4KiB", socket=socket) as opened:
        yield opened


@pytest.fixture
def held() -> Iterator[ExitStack]:
    """A stack for resources of a test, which are closed when the test ends."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that compiles a program, once for the whole run."""
    folder = tmp_path_factory.mktemp("cpp")

    @cache
    def program(name: str, compiler: str = cpp_programs.COMPILERS[0], *more: str) -> Path:
        sources = [cpp_programs.SOURCES / f"{part}.cpp" for part in (name, *more)]
        return cpp_programs.build(compiler, folder / "-".join([name, compiler.replace("/", "-"), *more]), sources)

    return program
