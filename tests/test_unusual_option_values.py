"""Every option with values of unusual types and sizes: only documented exceptions, and the engine still opens.

Not for: which of the exceptions each of them gets (`test_config.py`, `test_lifecycle.py`).
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from llm_datadist import DataType, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.original.option_properties import OPTIONS
from memory import LE, VE, run_fresh
from mistakes import fails

INVALID = LLMStatusCode.LLM_PARAM_INVALID
DEEP = 100_000


class Text(str):
    __slots__ = ()


class Number(int):
    """A subclass of `int`."""


NESTED: list[Any] = []
for _ in range(DEEP):
    NESTED = [NESTED]
CIRCULAR: list[Any] = [1]
CIRCULAR.append(CIRCULAR)
NUMBERS: list[Any] = [0, -1, 1, 2**31, 2**63, 2**64, 10**5000, -(10**5000), 0.5, float("nan"), float("inf"), -0.0, 1j]
NUMBERS += [None, True, False, Number(3), np.int64(3), np.float32(0.5), np.float64(0.5), np.bool_(True)]
TEXTS: list[Any] = ["", " ", "\0", "x", "1", "-1", "1" * 5000, "\u0661", "\u00b2", "\ud800", "nan"]
TEXTS += [Text("0"), Text("x"), b"", b"1", bytearray(b"1")]
LISTS: list[Any] = [[], (), [[]], [0], (0,), [0, [1]], [True], [None], ["0"], [0.0], [2**31], [-1], [10**5000]]
LISTS += [{}, {"a": 1}, {1: "a"}, set(), range(3), np.array([1]), np.array([]), NESTED, CIRCULAR]
JSON = ["[]", "null", "NaN", '{"memory_size": 1e400}', '{"a": ' + "1" * 5000 + "}", '{"listen_ip_info": 5}']
JSON += ['{"listen_ip_info": [[]]}', '{"listen_ip_info": null}', '{"listen_ip_info": [{"ip": 1e400}]}']
CLOSED = "[" * DEEP + "]" * DEEP
DEEP_JSON = ["[" * DEEP, '{"a":' * DEEP, CLOSED, f'{{"listen_ip_info": [{CLOSED}]}}']
OTHERS: list[Any] = [object(), int, lambda: 1, DataType.DT_INT8, LLMRole.PROMPT, INVALID]
ODD = [*NUMBERS, *TEXTS, *LISTS, *JSON, *DEEP_JSON, *OTHERS]

PROPERTIES = [option.name for option in OPTIONS]
KEYS = [option.key for option in OPTIONS]
KEYS += ["llm.Role", "llm.ListenIpInfo", "llm.ListenIp", "llm.ListenPort", "env.HCCL_CONNECT_TIMEOUT"]
KEYS += ["ge.flowGraphMemMaxSize"]


def small(mode: str) -> dict[str, Any]:
    """Options of an engine that opens fast."""
    return {"llm.EnableCacheManager": mode, "ge.flowGraphMemMaxSize": "1048576", "ge.exec.deviceId": "0"}


def survive(call: Callable[[], Any], where: Any) -> bool:
    """Return whether the call succeeded. Otherwise check that its exception is documented and its text is short."""
    try:
        call()
    except (LLMException, TypeError, ValueError) as error:
        raised = error
    else:
        return True
    # The engine may be unable to listen at a valid address.
    argument = getattr(raised, "status_code", INVALID) is INVALID or "listen" in str(raised)
    assert argument and not isinstance(raised, UnicodeDecodeError), (where, raised)  # noqa: PT018
    assert len(str(raised)) < 5000, where
    return False


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_takes_a_value_or_raises_what_is_documented(name: str) -> None:
    passed = 0
    for odd in ODD:
        config = LLMConfig()
        if survive(lambda: setattr(config, name, odd), (name, type(odd))):  # noqa: B023  (called at once)
            passed += 1
            if survive(config.generate_options, (name, type(odd))):
                assert all(isinstance(text, str) for text in config.generate_options().values())
    assert 0 < passed < len(ODD)


@pytest.mark.parametrize("mode", ["1", "0"])
@pytest.mark.parametrize("key", KEYS)
def test_init_takes_an_option_or_raises_what_is_documented(start: Any, key: str, mode: str) -> None:
    for odd in ODD:
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        survive(lambda: dist.init({**small(mode), key: odd}), (key, type(odd)))  # noqa: B023  (called at once)
        dist.finalize()
    assert LLMDataDist.llm_engine_instance is None
    start(small(mode))


@pytest.mark.parametrize("text", DEEP_JSON, ids=range(len(DEEP_JSON)))
def test_deep_json_is_an_argument_without_meaning(start: Any, text: str) -> None:
    """`init` raises `LLM_PARAM_INVALID`; a setter raises the error of malformed JSON."""
    deep = "nested deeper than 64 levels"
    for key, mode in [("MemPoolConfig", "1"), ("HostMemPoolConfig", "1"), ("RankHosts", "1"), ("ClusterInfo", "0")]:
        given = {**small(mode), f"llm.{key}": text}
        fails(lambda given=given: LLMDataDist(LLMRole.PROMPT, 1).init(given), LE, deep)
    fails(lambda: setattr(LLMConfig(), "rank_hosts", text), LE, deep)
    fails(lambda: setattr(LLMConfig(), "cluster_info", text), VE, deep)
    dist = start(small("1"))
    fails(lambda: dist.link("deep", {1: 0, 2: 1}, text), LE, deep)


def test_a_deep_text_does_not_end_the_process_on_a_small_stack() -> None:
    out = run_fresh(
        f"""
        import threading
        from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole
        def read():
            try:
                given = {{"llm.EnableCacheManager": "1", "llm.MemPoolConfig": "[" * {DEEP}}}
                LLMDataDist(LLMRole.PROMPT, 1).init(given)
            except LLMException as error:
                print(error.status_code.name)
            try:
                LLMConfig().cluster_info = "[" * {DEEP}
            except ValueError:
                print("ValueError")
        threading.stack_size(256 * 1024)
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        """
    )
    assert out.split()[-2:] == ["LLM_PARAM_INVALID", "ValueError"]
