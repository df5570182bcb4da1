"""What `llm-datadist doctor` says about NIXL, with the stand-in of `crates/fake-nixl` in place of the library.

Not for: the rest of the report (`test_doctor.py`), or other measurements (`test_doctor_link.py`).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import pytest

from conftest import options
from llm_datadist import LLMException, LLMStatusCode, _core
from llm_datadist.__main__ import main
from llm_datadist.doctor import fabrics, kernel_calls, libraries, limits, measure, paths
from llm_datadist.doctor.finding import NOTE, OK
from llm_datadist.doctor.kernel_calls import KernelCalls
from test_doctor import TOKEN, WORKS, Ucx, named, rdma
from test_doctor_link import check_measured, rows_of, secret, serving, to

if TYPE_CHECKING:
    from llm_datadist import LLMDataDist
    from llm_datadist.doctor.finding import Finding

ROOT = Path(__file__).resolve().parents[1]
CARGO = shutil.which("cargo")
MARK = b"NIXL version: \0"
NO_UCX = Ucx(None, "UCX cannot be loaded: no such file")

pytestmark = pytest.mark.skipif(CARGO is None, reason="no cargo, which builds the stand-in for NIXL")


class Nixl(fabrics.NixlLibrary):
    """A stand-in for a library that was loaded, or not."""

    def __init__(self, version: tuple[int, int, int] | None, reason: str | None, path: str = "") -> None:
        self.name, self.version, self.reason = path or fabrics.NIXL_LIBRARY, version, reason


USABLE = Nixl((1, 5, 1), None, "/opt/libnixl_capi.so")
MISSING = Nixl(None, "NIXL cannot be loaded: no such file")


@pytest.fixture(scope="session")
def fake() -> Path:
    """Build the stand-in, and return its file."""
    assert CARGO is not None
    words = "build --locked --quiet -p llm-datadist-fake-nixl --message-format json"
    built = subprocess.run([CARGO, *words.split()], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)  # noqa: S603
    assert built.returncode == 0, built.stderr
    messages = [json.loads(line) for line in built.stdout.splitlines()]
    files = [file for message in messages for file in message.get("filenames", ()) if file.endswith("libfake_nixl.so")]
    assert files, built.stdout
    return Path(files[0])


@pytest.fixture
def copy(fake: Path, tmp_path: Path) -> Callable[..., str]:
    """A function that returns the path of a copy of the stand-in, with this version and a function that fails."""

    def make(version: bytes = b"1.5.1", refuses: bytes | None = None) -> str:
        data = fake.read_bytes()
        assert data.count(MARK + b"1.5.1") == 1
        file = tmp_path / "libnixl_capi.so"
        file.write_bytes(data.replace(MARK + b"1.5.1", MARK + version.ljust(5, b"\0")))
        if refuses is not None:
            ctypes.CDLL(str(file)).fake_nixl_refuse(refuses, -6)
        return str(file)

    return make


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({}, None),
        ({"version": b"1.0.0"}, None),
        ({"version": b"0.9.9"}, "NIXL 0.9.9 cannot be used: 1.0 or a later 1.x is needed"),
        ({"version": b"2.0.0"}, "NIXL 2.0.0 cannot be used: 1.0 or a later 1.x is needed"),
        ({"version": b"?"}, "NIXL cannot be used: its version is unknown"),
        ({"refuses": b"nixl_capi_is_stub"}, "stub"),
        ({"refuses": b"nixl_capi_get_plugin_params"}, "its plugin for UCX cannot be loaded (NIXL status -6)"),
        (
            {"refuses": b"nixl_capi_create_configured_agent"},
            "nixl_capi_create_configured_agent failed (NIXL status -6)",
        ),
        ("/nowhere/libnixl_capi.so", "NIXL cannot be loaded: /nowhere/libnixl_capi.so"),
        (_core.__file__, "NIXL cannot be loaded: "),
    ],
)
def test_doctor_accepts_the_libraries_of_nixl_that_the_engine_accepts(
    copy: Callable[..., str], start: Callable[..., LLMDataDist], given: Any, reason: str | None
) -> None:
    path = given if isinstance(given, str) else copy(**given)
    found = fabrics.NixlLibrary(path)
    assert (found.reason is None) == (reason is None)
    assert (reason or "") in (found.reason or "")
    links = {"llm__listenIpInfo": "127.0.0.1:0", "llm__LinkToken": "a token of this test, long enough"}
    settings = options(**links, llm__TransferBackend="nixl", llm__NixlLibrary=path)
    if reason is None:
        assert start(settings).stats()["nixl"]["version"] == found.shown()
        return
    with pytest.raises(LLMException) as caught:
        start(settings)
    assert caught.value.status_code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    assert "NIXL cannot be used: " in str(caught.value)


def test_doctor_leaves_no_handle_of_nixl_open(copy: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_HANDLE_ERRORS", raising=False)
    path = copy()
    assert fabrics.NixlLibrary(path).version == (1, 5, 1)
    assert ctypes.CDLL(path).fake_nixl_open_handles(False) == 0
    assert "UCX_HANDLE_ERRORS" not in os.environ


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with an RDMA device."""
    rdma(tmp_path)
    return tmp_path


def finding(root: Path, nixl: Nixl) -> Finding:
    return named(libraries.findings(root, NO_UCX, nixl, {}), "NIXL")


def test_nixl_is_noted_only_if_the_user_chose_it_or_installed_its_package(
    root: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path_factory.mktemp("no device")
    monkeypatch.setattr(libraries, "_NIXL_WHEELS", ("nixl-of-tests",))
    usable = finding(bare, USABLE)
    assert (usable.verdict, usable.value) == (
        OK,
        '1.5.1 (/opt/libnixl_capi.so); used only with transfer_backend="nixl"',
    )
    assert (finding(bare, MISSING).verdict, finding(root, MISSING).verdict) == (OK, OK)
    assert finding(root, MISSING).value == 'not usable; needed only with transfer_backend="nixl"'
    chosen = finding(bare, Nixl((2, 0, 0), "NIXL 2.0.0 cannot be used", "/opt/libnixl_capi.so"))
    assert (chosen.verdict, chosen.value) == (NOTE, "2.0.0")
    assert chosen.meaning == 'NIXL 2.0.0 cannot be used; with transfer_backend="nixl", init fails'
    assert chosen.remedy == "install NIXL 1.0 or a later 1.x, if you want NIXL"
    install(bare, monkeypatch)
    library = bare / ".nixl.mesonpy.libs/libnixl_capi.so"
    assert finding(root, MISSING).remedy == f'set nixl_library="{library}", if you want NIXL'
    assert finding(bare, MISSING).verdict == OK


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find a package of NIXL in a folder."""
    info = folder / "nixl_of_tests-1.5.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: nixl-of-tests\nVersion: 1.5.1\n", encoding="utf-8")
    files = ("nixl/__init__.py", ".nixl.mesonpy.libs/libnixl_capi.so")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def test_usable_nixl_is_named_where_sockets_are_used_in_place_of_ucx(root: Path) -> None:
    hint = 'NIXL 1.5.1, which is usable, is used only with transfer_backend="nixl" on both sides'
    other = paths.paths(root, WORKS, NO_UCX, USABLE, TOKEN)[2]
    assert (other.path, other.reasons) == ("sockets", (NO_UCX.reason, hint))
    assert paths.paths(root, WORKS, Ucx(), USABLE, TOKEN)[2].reasons == ()
    assert paths.paths(root, WORKS, NO_UCX, MISSING, TOKEN)[2].reasons == (NO_UCX.reason,)
    (root / "dev/infiniband/uverbs0").unlink()
    assert hint not in paths.paths(root, KernelCalls(), NO_UCX, USABLE, TOKEN)[2].reasons


def test_report_names_the_library_of_the_option(copy: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    path = copy()
    main(["doctor", "--nixl-library", path, "--json", "-"])
    found = json.loads(capsys.readouterr().out)["findings"]
    values = [finding["value"] for finding in found if finding["name"] == "NIXL"]
    assert values == [f'1.5.1 ({path}); used only with transfer_backend="nixl"']


def test_nixl_is_measured_if_its_library_is_named(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if limits.no_process_reads(Path("/"), kernel_calls.try_all()) is not None:
        pytest.skip("the stand-in reads another process by its id, which this host refuses")
    monkeypatch.setenv("UCX_TLS", "tcp")  # as if there were a device
    given = ["--token-file", secret(tmp_path / "token", "a token of this test"), "--nixl-library", str(fake)]
    with serving(*given, "--transfer-backend", "nixl") as other:
        rows = rows_of(to(f"127.0.0.1:{other.port}", *given))
    assert list(rows)[-2:] == [measure.UCX, measure.NIXL]
    check_measured(rows[measure.NIXL], "fabric", "tcp")
    with serving(*given[:2]) as other:
        rows = rows_of(to(f"127.0.0.1:{other.port}", *given))
        assert "the peer does not use NIXL" in rows[measure.NIXL]["unusable"]
        assert measure.NIXL not in rows_of(to(f"127.0.0.1:{other.port}", *given[:2]))
