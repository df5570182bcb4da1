"""The package's logger: name, level, layout, and which calls log what."""

from __future__ import annotations

import logging
import logging.config
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from llm_datadist import CacheKey, LLMDataDist, LLMException, LLMStatusCode
from llm_datadist.original.logged_calls import logged
from llm_datadist.utils import log
from memory import TE, desc, run_fresh
from mistakes import fails, info
from peers import together

LINE = re.compile(
    r"^\[(?P<level>[A-Z]+)\] LLM_DATADIST\((?P<pid>\d+),(?P<process>\w+)\):"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    r"\[(?P<file>[^\]:]+):(?P<line>\d+)\](?P<thread>\d+) (?P<function>\S+): (?P<message>.*)$"
)


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """The lines of the package's logger from INFO on."""
    caplog.set_level(logging.INFO, logger="LLM_DATADIST")
    return caplog


def test_logger_is_the_standard_one_and_made_once() -> None:
    assert log.get_logger() is log.get_logger() is logging.getLogger("LLM_DATADIST")
    assert log.get_logger().propagate is True
    assert isinstance(log.LOG_FORMAT, str)
    out = run_fresh(
        """
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier
        from llm_datadist.utils.log import get_logger
        barrier = Barrier(16)
        with ThreadPoolExecutor(16) as pool:
            for _ in range(16):
                pool.submit(lambda: barrier.wait() or get_logger())
        print(len(get_logger().handlers))
        """
    )
    assert out.strip() == "1"


# What a program does before or after the first use of the package, and which of three lines are then shown by the
# package's own handler and by the program's.
BASIC, LOGGER = (
    "logging.basicConfig(stream=sys.stdout, format='program %(message)s')",
    "logging.getLogger('LLM_DATADIST')",
)
CONFIGURED: dict[str, tuple[str, str, str, str]] = {
    "nothing": ("", "", "error", ""),
    "basicConfig before": (BASIC, "", "", "error"),
    "basicConfig after": ("", BASIC, "", "error"),
    "a level before": (f"{LOGGER}.setLevel(logging.INFO)", "", "info warning error", ""),
    "a level and basicConfig before": (f"{LOGGER}.setLevel(logging.WARNING); {BASIC}", "", "", "warning error"),
    "a level after": ("", f"{LOGGER}.setLevel(logging.WARNING)", "warning error", ""),
    "a handler of the logger before": (f"{LOGGER}.addHandler(handler)", "", "", "error"),
    "a handler of the logger after": ("", f"{LOGGER}.addHandler(handler)", "", "error"),
    "no propagation": (f"{BASIC}; {LOGGER}.propagate = False", "", "error", ""),
}


@pytest.mark.parametrize("configured", CONFIGURED)
@pytest.mark.parametrize("first_use", ["log.get_logger()", "refused()"])
def test_what_the_program_configured_is_respected_and_no_line_comes_twice(configured: str, first_use: str) -> None:
    before, after, own, program = CONFIGURED[configured]
    out = run_fresh(
        f"""
import logging, sys
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("program %(message)s"))
def refused():
    from llm_datadist import LLMConfig, LLMException
    try:
        LLMConfig().copy_workers = 1000
    except LLMException:
        pass
    print("first use")
{before}
from llm_datadist.utils import log
{first_use}
{after}
print("now")
log.info("info")
log.warn("warning")
log.error("error")
        """
    )
    shown: dict[str, list[str]] = {"own": [], "program": []}
    for line in out.split("now\n")[1].splitlines():
        match = LINE.match(line)
        shown["own" if match else "program"].append(match["message"] if match else line.split("program ")[1])
    assert shown == {"own": own.split(), "program": program.split()}


@pytest.mark.parametrize(
    ("text", "level"),
    [
        *[("0", logging.DEBUG), ("1", logging.INFO), ("2", logging.WARNING)],
        *[(text, logging.ERROR) for text in ("3", "4", "-1", "", "INFO", "nan")],
    ],
)
def test_level_comes_from_the_environment_once_unless_it_was_set(text: str, level: int) -> None:
    code = """
    import logging, os
    from llm_datadist.utils.log import get_logger
    print(get_logger().level)
    os.environ["ASCEND_GLOBAL_LOG_LEVEL"] = "0" if get_logger().level != logging.DEBUG else "3"
    print(get_logger().level)
    """
    assert run_fresh(code, ASCEND_GLOBAL_LOG_LEVEL=text).split() == [str(level)] * 2
    set_before = "import logging; logging.getLogger('LLM_DATADIST').setLevel(25)"
    assert run_fresh(set_before + code.replace("\n    ", "\n"), ASCEND_GLOBAL_LOG_LEVEL=text).split() == ["25"] * 2


def test_a_semantic_refusal_is_logged_as_an_error_with_its_text_and_a_wrong_type_is_not(
    manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = manager.allocate_cache(desc())
    for bad in (5, "x"):
        fails(lambda bad=bad: manager.allocate_cache(bad), TE)
    assert caplog.records == []
    with pytest.raises(LLMException) as caught:
        manager.copy_cache(cache, cache, 0, 0, 0, 0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(caught.value) in caplog.records[0].getMessage()


def test_a_call_that_failed_for_a_cluster_is_not_logged_as_a_success(
    dist: LLMDataDist, shown: pytest.LogCaptureFixture
) -> None:
    code, _ = dist.link_clusters([info()], timeout=1000)
    assert code != LLMStatusCode.LLM_SUCCESS
    assert [text for text in shown.messages if text.startswith("[link_clusters]")][1:] == [
        f"[link_clusters] {code.name}"
    ]


def test_manager_calls_log_their_start_and_success() -> None:
    out = run_fresh(
        """
        from llm_datadist import CacheDesc, CacheKey, DataType, LayerSynchronizer, LLMDataDist, LLMRole
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
        manager, desc = dist.cache_manager, CacheDesc(1, [4, 100], DataType.DT_INT8)
        cache = manager.allocate_cache(desc, [CacheKey(1, 1)])
        blocks = manager.allocate_blocks_cache(desc)
        manager.copy_cache(cache, cache, 1, 0)
        manager.copy_blocks(blocks, {0: [1]})
        class Ready(LayerSynchronizer):
            tensor_num_per_layer = 1
            def synchronize_layer(self, layer_index, timeout_in_millis): return True
        manager.transfer_cache_async(cache, Ready(), [])
        manager.remove_cache_key(CacheKey(1, 1))
        manager.deallocate_cache(cache)
        manager.deallocate_blocks_cache(blocks)
        """,
        ASCEND_GLOBAL_LOG_LEVEL="1",
    )
    matches = [LINE.match(line) for line in out.splitlines()]
    assert all(matches), out
    found = [match.groupdict() for match in matches if match]
    called = "allocate_cache allocate_blocks_cache copy_cache copy_blocks transfer_cache_async remove_cache_key"
    for method in [*called.split(), "deallocate_cache", "deallocate_blocks_cache"]:
        for step in ("start", "success"):
            assert any(line["message"].startswith(f"[{method}] {step}") for line in found), (method, step)
    assert {line["level"] for line in found} == {"INFO"}
    assert {(line["file"], line["function"]) for line in found} == {("<string>", "<module>")}


def test_lines_name_the_place_that_logged(shown: pytest.LogCaptureFixture) -> None:
    log.info("one %s", 1)
    log.warn("two")
    log.error("three")
    found = [(record.levelname, record.getMessage()) for record in shown.records]
    assert found == [("INFO", "one 1"), ("WARNING", "two"), ("ERROR", "three")]
    here = ("test_logging.py", "test_lines_name_the_place_that_logged")
    assert {(record.filename, record.funcName) for record in shown.records} == {here}
    # The outermost function of a thread has no caller.
    with ThreadPoolExecutor() as pool:
        assert len(pool.submit(log._find_caller).result()) == 4
    thread = threading.Thread(target=log._find_caller)
    thread.start()
    thread.join()


@pytest.mark.contract("19.copy-cache-range")
def test_the_request_id_is_in_the_log_of_this_process_too(manager: Any, shown: pytest.LogCaptureFixture) -> None:
    cache = manager.allocate_cache(desc())
    manager.copy_cache(cache, cache, 1, 0, req_id=424242)
    manager.copy_cache(cache, cache, 1, 0)
    with pytest.raises(LLMException, match="req_id=424243"):
        manager.copy_cache(cache, cache, 99, 0, req_id=424243)
    lines = shown.messages
    assert [line.startswith("[copy_cache]") for line in lines if "424242" in line] == [True, True], lines
    assert len([line for line in lines if "424243" in line]) == 2, "its start and its error"
    assert lines.count("[copy_cache] success") == 1, "no request, no req_id"


class Unspeakable(list):
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __iter__ = __repr__  # type: ignore[assignment]


def test_arguments_are_shown_shortly_and_their_text_fails_no_call(
    manager: Any, shown: pytest.LogCaptureFixture
) -> None:
    made_of, key = desc(), CacheKey(1, 2)
    manager.allocate_cache(made_of, [key])
    assert f"cache_desc = {made_of}, cache_keys = [{key}]" in shown.records[0].getMessage()
    blocks = manager.allocate_blocks_cache(desc())
    manager.copy_blocks(blocks, {0: Unspeakable([1])})
    assert shown.messages[-1] == "[copy_blocks] success"
    long = [{key: [1] for key in range(100_000)}, {0: list(range(100_000))}, [[[[0] * 100_000]]], "x" * 10**6]
    counted = len(shown.records)
    for value in [*long, 10**5000, {0: [10**5000]}]:
        before = len(shown.records)
        with pytest.raises((LLMException, TypeError)):
            manager.copy_blocks(blocks, value)
        assert shown.records[before].getMessage().startswith("[copy_blocks] start")
    assert "100000 in all" in shown.messages[counted]
    assert all(len(record.getMessage()) < 1000 for record in shown.records)


@pytest.mark.parametrize(
    ("level", "above", "disabled", "count"),
    [
        (logging.ERROR, logging.DEBUG, logging.NOTSET, 0),
        (logging.INFO, logging.ERROR, logging.NOTSET, 2),
        (logging.DEBUG, logging.ERROR, logging.INFO, 0),
        (logging.NOTSET, logging.ERROR, logging.NOTSET, 0),
        (logging.NOTSET, logging.INFO, logging.NOTSET, 2),
    ],
)
def test_the_level_may_change_at_any_time_and_by_any_logger_above(
    manager: Any, caplog: pytest.LogCaptureFixture, level: int, above: int, disabled: int, count: int
) -> None:
    manager.remove_cache_key(CacheKey(1, 2))
    caplog.clear()
    with caplog.at_level(above), caplog.at_level(level, logger="LLM_DATADIST"):
        logging.disable(disabled)
        manager.remove_cache_key(CacheKey(1, 2))
        logging.disable(logging.NOTSET)
    assert len(caplog.records) == count


class Example:
    """A class with a logged method of every kind of parameter that the package uses."""

    @logged
    def call(self, first: Any, second: Any = 2, *, third: Any = 3, fourth: Any = 4, **rest: Any) -> Any:
        return first, second, third, fourth, rest

    @logged
    def strict(self, first: Any, *, third: Any = 3) -> Any:
        return first, third


@pytest.mark.parametrize("level", [logging.ERROR, logging.INFO])
def test_a_logged_method_gets_its_arguments(level: int, caplog: pytest.LogCaptureFixture) -> None:
    example = Example()
    with caplog.at_level(level, logger="LLM_DATADIST"):
        assert example.call(1) == (1, 2, 3, 4, {})
        assert example.call(second=7, first=8) == (8, 7, 3, 4, {})
        assert example.call(1, 5, fourth=6) == (1, 5, 3, 6, {})
        assert example.call(1, third=None, other=9) == (1, 2, None, 4, {"other": 9})
        assert (example.strict(1), example.strict(1, third=2)) == ((1, 3), (1, 2))
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'thrid'"):
            example.strict(1, thrid=2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="positional argument"):
            example.strict(1, 2)  # type: ignore[misc]


def test_the_class_holds_the_method_itself_while_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for level, wrapped in [
        (logging.ERROR, False),
        (logging.INFO, True),
        (logging.NOTSET, True),
        (logging.WARNING, False),
    ]:
        with caplog.at_level(level, logger="LLM_DATADIST"):
            assert hasattr(Example.call, "__wrapped__") == wrapped, level


def test_a_method_that_the_program_has_replaced_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Example, "call", lambda *_: "replaced")
    for level in (logging.INFO, logging.ERROR):
        caplog.set_level(level, logger="LLM_DATADIST")
        assert Example().call(1) == "replaced"


def test_the_level_may_be_set_while_logging_is_configured() -> None:
    """`dictConfig` holds the lock of `logging` while it sets levels. No thread may wait for the other one."""
    configuration = {"version": 1, "disable_existing_loggers": False, "loggers": {"LLM_DATADIST": {"level": "ERROR"}}}
    log.get_logger()

    def configure() -> None:
        for _ in range(200):
            logging.config.dictConfig(configuration)

    def set_level() -> None:
        for number in range(20_000):
            log.get_logger().setLevel((logging.ERROR, logging.INFO)[number % 2])

    level = log.get_logger().level
    together(2, lambda number: (configure, set_level)[number]())
    log.get_logger().setLevel(level)
