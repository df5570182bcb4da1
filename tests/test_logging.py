"""The package's logger: name, level, layout, and which calls log what."""

from __future__ import annotations

import inspect
import logging
import re
import threading
from typing import Any

import pytest

from llm_datadist import CacheKey, KvCacheManager, LLMClusterInfo, LLMDataDist, LLMException, LLMStatusCode
from llm_datadist.cache_manager import CacheManager
from llm_datadist.log import logged
from llm_datadist.utils import log
from memory import desc, run_fresh

LINE = re.compile(
    r"^\[(?P<level>[A-Z]+)\] LLM_DATADIST\((?P<pid>\d+),(?P<process>\w+)\):"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    r"\[(?P<file>[^\]:]+):(?P<line>\d+)\](?P<thread>\d+) (?P<function>\S+): (?P<message>.*)$"
)

ENGINE = """
from llm_datadist import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole
from llm_datadist import LayerSynchronizer
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
manager = dist.cache_manager
desc = CacheDesc(1, [4, 100], DataType.DT_INT8)
"""


def lines(code: str, **environment: str) -> list[dict[str, str]]:
    """The log lines a fresh process printed, each parsed; every line must have the stated layout."""
    parsed = []
    for line in run_fresh(ENGINE + code, **environment).splitlines():
        match = LINE.match(line)
        assert match, line
        parsed.append(match.groupdict())
    return parsed


def test_logger_is_the_standard_one_and_cached() -> None:
    logger = log.get_logger()
    assert logger is log.get_logger()
    assert logger is logging.getLogger("LLM_DATADIST")
    assert logger.name == "LLM_DATADIST"
    assert logger.propagate is True
    assert isinstance(log.LOG_FORMAT, str)


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


def test_every_manager_call_logs_its_start_and_success() -> None:
    shown = lines(
        """
cache = manager.allocate_cache(desc, [CacheKey(1, 1)])
blocks = manager.allocate_blocks_cache(desc)
manager.copy_cache(cache, cache, 1, 0, req_id=987654321)
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
    messages = [line["message"] for line in shown]
    called = "allocate_cache allocate_blocks_cache copy_cache copy_blocks transfer_cache_async remove_cache_key"
    for method in [*called.split(), "deallocate_cache", "deallocate_blocks_cache"]:
        for step in ("start", "success"):
            assert any(text.startswith(f"[{method}] {step}") for text in messages), (method, step)
    starts = [text for text in messages if text.startswith("[copy_cache] start")]
    assert len(starts) == 2
    assert "987654321" in starts[0]
    assert "None" in starts[1]
    assert {line["level"] for line in shown} == {"INFO"}
    assert not any(line["file"].endswith("log.py") for line in shown)


def test_a_semantic_refusal_is_logged_as_an_error_with_its_text_and_a_wrong_type_is_not(
    manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = manager.allocate_cache(desc())
    for bad in (5, "x"):
        with pytest.raises(TypeError):
            manager.allocate_cache(bad)
    assert caplog.records == []
    with pytest.raises(LLMException) as caught:
        manager.copy_cache(cache, cache, 0, 0, 0, 0)
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert str(caught.value) in caplog.records[0].getMessage()


def test_find_caller_names_the_caller_and_survives_the_top_of_a_thread() -> None:
    name, number, function, stack = log._find_caller()
    assert (type(name), type(number), type(function), stack) == (str, int, str, None)
    results: list[tuple[Any, ...]] = []
    for target in (lambda: results.append(log._find_caller(False, 1)), log._find_caller):
        thread = threading.Thread(target=target)
        thread.start()
        thread.join()
    assert [len(found) for found in results] == [4]


def test_lines_name_the_place_that_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        log.info("one %s", 1)
        log.warn("two")
        log.error("three")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "one 1"),
        ("WARNING", "two"),
        ("ERROR", "three"),
    ]
    for record in caplog.records:
        assert record.filename == "test_logging.py"
        assert record.funcName == "test_lines_name_the_place_that_logged"


@pytest.mark.contract("19.copy-cache-range")
def test_the_request_id_is_in_the_log_of_this_process_too(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = manager.allocate_cache(desc())
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        manager.copy_cache(cache, cache, 1, 0, req_id=424242)
        manager.copy_cache(cache, cache, 1, 0)
        with pytest.raises(LLMException, match="req_id=424243"):
            manager.copy_cache(cache, cache, 99, 0, req_id=424243)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.startswith("[copy_cache]") for line in lines if "424242" in line] == [True, True], lines
    assert len([line for line in lines if "424243" in line]) == 2, "its start and its error"
    assert lines.count("[copy_cache] success") == 1, "no request, no req_id"


def test_a_call_that_failed_for_a_cluster_is_not_logged_as_a_success(
    dist: LLMDataDist, caplog: pytest.LogCaptureFixture
) -> None:
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 7
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info("127.0.0.1", 1)
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        code, _ = dist.link_clusters([peer], timeout=1000)
    assert code != LLMStatusCode.LLM_SUCCESS
    ends = [text for text in caplog.messages if text.startswith("[link_clusters]")][1:]
    assert ends == [f"[link_clusters] {code.name}"]


def test_logger_is_made_once_by_many_threads() -> None:
    out = run_fresh(
        """
        import threading
        from llm_datadist.utils.log import get_logger
        barrier = threading.Barrier(16)
        def go():
            barrier.wait()
            get_logger()
        threads = [threading.Thread(target=go) for _ in range(16)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(get_logger().handlers))
        """
    )
    assert out.strip() == "1"


class Unspeakable(list):
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    __iter__ = __repr__  # type: ignore[assignment]


def test_a_value_that_cannot_be_shown_breaks_no_call(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    blocks = manager.allocate_blocks_cache(desc())
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        manager.copy_blocks(blocks, {0: Unspeakable([1])})
        for bad in (10**5000, {0: [10**5000]}):
            with pytest.raises((LLMException, TypeError)):
                manager.copy_blocks(blocks, bad)
    texts = [record.getMessage() for record in caplog.records]
    assert "[copy_blocks] success" in texts
    assert all(len(text) < 500 for text in texts)


def test_long_arguments_are_one_short_text(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    blocks = manager.allocate_blocks_cache(desc())
    long: list[Any] = [
        {key: [1] for key in range(100_000)},
        {0: list(range(100_000))},
        [[[[0] * 100_000]]],
        "x" * 10**6,
        10**4000,
    ]
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        for value in long:
            with pytest.raises((LLMException, TypeError)):
                manager.copy_blocks(blocks, value)
    starts = [record.getMessage() for record in caplog.records if "start" in record.getMessage()]
    assert len(starts) == len(long)
    assert all(len(text) < 1000 for text in starts)
    assert "100000 in all" in starts[0]


def test_descriptors_and_keys_are_shown_in_their_own_words(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    made_of, key = desc(), CacheKey(1, 2)
    with caplog.at_level(logging.INFO, logger="LLM_DATADIST"):
        manager.allocate_cache(made_of, [key])
    assert f"cache_desc = {made_of}, cache_keys = [{key}]" in caplog.records[0].getMessage()


def test_the_level_may_change_at_any_time_and_by_any_logger_above(
    manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    logger, root = log.get_logger(), logging.getLogger()
    levels = logger.level, root.level

    def lines_of(level: int, above: int, disabled: int = logging.NOTSET) -> int:
        caplog.clear()
        logger.setLevel(level)
        root.setLevel(above)
        logging.disable(disabled)
        manager.remove_cache_key(CacheKey(1, 2))
        return len(caplog.records)

    try:
        assert lines_of(logging.ERROR, logging.DEBUG) == 0
        assert lines_of(logging.INFO, logging.ERROR) == 2
        assert lines_of(logging.DEBUG, logging.ERROR, logging.INFO) == 0
        assert lines_of(logging.NOTSET, logging.ERROR) == 0
        assert lines_of(logging.NOTSET, logging.INFO) == 2
    finally:
        logging.disable(logging.NOTSET)
        logger.setLevel(levels[0])
        root.setLevel(levels[1])


def test_a_logged_method_has_the_parameters_of_its_own(manager: Any) -> None:
    for owner in (CacheManager, KvCacheManager, LLMDataDist):
        seen = 0
        for name, method in vars(owner).items():
            told = getattr(method, "__wrapped__", None)
            if told is not None and inspect.isfunction(method):
                made = inspect.signature(method, follow_wrapped=False).parameters
                own = inspect.signature(told).parameters
                assert [(of.name, of.kind) for of in made.values()] == [(of.name, of.kind) for of in own.values()]
                assert (method.__defaults__, method.__kwdefaults__) == (told.__defaults__, told.__kwdefaults__)
                assert (method.__doc__, method.__qualname__) == (told.__doc__, f"{owner.__name__}.{name}")
                seen += 1
        assert seen > 0, owner
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cache_key'"):
        manager.remove_cache_key()
    with pytest.raises(TypeError, match="unexpected keyword argument 'size_of'"):
        manager.push_cache(None, None, size_of=3)


def test_parameters_that_would_be_lost_are_refused() -> None:
    def named(self: Any, key: int, *, size: int = 1) -> None: ...

    def any_number(self: Any, *keys: int) -> None: ...

    def by_place(self: Any, key: int, /) -> None: ...

    for method in (named, any_number, by_place):
        with pytest.raises(
            TypeError,
            match=f"{method.__name__} cannot be logged: each parameter must be allowed both by position and by name",
        ):
            logged(method)
