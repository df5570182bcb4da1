"""Which vLLM is accepted: a module of the test stands in for it.

Not for: whether the tables name what vLLM has (`integration-tests/vllm/test_interface.py`).
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from llm_datadist.integrations.vllm import interface, register, supported
from llm_datadist.integrations.vllm.interface import check, needed
from llm_datadist.integrations.vllm.supported import warn_untested
from stand_ins import put


@dataclass
class Output:
    finished: set[str]


class Request:
    def __init__(self, name: str) -> None:
        self.request_id = name


def result(job: int, success: bool, nanos: int = 0) -> None: ...


def keywords(first: int, *, second: int = 0) -> None: ...


class Base(ABC):
    @abstractmethod
    def submit(self, job: int, src: Any) -> bool: ...

    def wait(self, jobs: set[int], **kwargs: Any) -> None:  # noqa: B027
        pass

    @classmethod  # noqa: B027
    def build(cls, data: Any = None) -> None:
        pass


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    contents = {"Output": Output, "Request": Request, "result": result, "keywords": keywords, "Base": Base}
    put(monkeypatch, {"vllm.part": contents})
    monkeypatch.setattr(interface, "installed", lambda: "9.9.0")


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Output[]", ("finished",)),
        ("Request[]", ("request_id",)),
        ("[]", ("result", "keywords")),
        ("Request", ("name",)),
        ("Request.__init__", ("name",)),
        ("result", ("job", "success")),
        ("result", ("job", "success", "nanos")),
        ("keywords", ("first",)),
        ("Base.wait", ("jobs",)),
    ],
)
def test_what_vllm_has_is_accepted(name: str, names: tuple[str, ...]) -> None:
    check({f"vllm.part:{name}": names})


@pytest.mark.parametrize(
    ("name", "names", "text"),
    [
        ("Output[]", ("finished", "failed"), "vllm.part:Output has no failed"),
        ("Request[]", ("name",), "vllm.part:Request has no name"),
        ("[]", ("result", "gone"), "vllm.part has no gone"),
        ("Other", (), "vllm.part has no Other"),
        ("Base.begin", (), "vllm.part has no Base.begin"),
        ("result", ("job",), r"vllm.part:result has the parameters (job, success, nanos=0); expected: (job)"),
        ("result", ("success", "job"), "expected: (success, job)"),
        ("result", ("job", "success", "nanos", "more"), "expected: (job, success, nanos, more)"),
    ],
)
def test_what_vllm_lacks_is_refused(name: str, names: tuple[str, ...], text: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        check({f"vllm.part:{name}": names})
    assert text in str(refused.value)
    assert "llm_datadist does not work with vLLM 9.9.0 (tested: 0.32, 0.33): " in str(refused.value)


def test_a_missing_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"vLLM 9\.9\.0 .*No module named 'vllm"):
        check({"vllm.gone:Output[]": ()})
    with pytest.raises(RuntimeError, match=r"vLLM 9\.9\.0 .*cannot import name 'Gone'"), needed():
        from vllm.part import Gone  # noqa: F401, PLC0415


class Fits(Base):
    def submit(self, job: int, src: Any, expedited: bool = False) -> bool:
        return bool(job or src or expedited)

    def wait(self, jobs: set[int], **kwargs: Any) -> None: ...

    @classmethod
    def build(cls, data: Any = None) -> None: ...

    def _own(self, anything: int) -> None: ...


def test_methods_that_fit_are_accepted() -> None:
    check({}, Fits)


class Lacks(Base): ...


class AsksForMore(Fits):
    def submit(self, job: int, src: Any, dst: Any) -> bool:  # type: ignore[override]
        return bool(job or src or dst)


class KnowsLess(Fits):
    def submit(self, job: int) -> bool:  # type: ignore[override]
        return bool(job)


class OtherOrder(Fits):
    def submit(self, src: Any, job: int) -> bool:
        return bool(job or src)


class NoKeywords(Fits):
    def wait(self, jobs: set[int]) -> None: ...


class NobodyCalls(Fits):
    def begin(self) -> None: ...


@pytest.mark.parametrize(
    ("ours", "text"),
    [
        (Lacks, "Lacks lacks submit, which vLLM requires"),
        (AsksForMore, "Fits.submit has the parameters (job, src, expedited=False); expected: (job, src, dst)"),
        (KnowsLess, "Fits.submit has the parameters (job, src, expedited=False); expected: (job)"),
        (OtherOrder, "expected: (src, job)"),
        (NoKeywords, "Fits.wait has the parameters (jobs, **kwargs); expected: (jobs)"),
        (NobodyCalls, "Fits has no begin"),
    ],
    ids=lambda given: given.__name__ if isinstance(given, type) else "",
)
def test_methods_that_do_not_fit_are_refused(ours: type, text: str) -> None:
    with pytest.raises(RuntimeError) as refused:
        check({}, ours)
    assert text in str(refused.value)


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.1.post1", "0.33.0+cpu"])
def test_a_tested_version_causes_no_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_untested.cache_clear()
    warn_untested(version)
    assert not caplog.records


@pytest.mark.parametrize("version", ["0.34.0", "0.3.2", "0.320.0", "unknown"])
def test_an_untested_version_causes_one_warning(version: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_untested.cache_clear()
    warn_untested(version)
    warn_untested(version)
    assert [(record.levelno, version in record.message) for record in caplog.records] == [(logging.WARNING, True)]
    assert "tested: 0.32, 0.33" in caplog.text
    assert supported.TESTED == ("0.32", "0.33")


@pytest.mark.parametrize("factory", [ModuleType("factory"), None], ids=["without the factory", "missing"])
def test_registration_never_keeps_vllm_from_starting(
    factory: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if factory is not None:
        factory.OffloadingSpecFactory = type("OffloadingSpecFactory", (), {})  # without register_spec
    monkeypatch.setitem(sys.modules, "vllm.v1.kv_offload.factory", factory)
    register()
    assert caplog.text.count("llm_datadist cannot register itself with this vLLM: ") == 4
