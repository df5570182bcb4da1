"""Names, numbers and texts of the enumerations and of the status module."""

from __future__ import annotations

import enum
import importlib
import logging
import pickle

import numpy as np
import pytest

from llm_datadist import DataType, LLMException, LLMRole, LLMStatusCode, Memtype, Placement, RegisterMemStatus, Status
from llm_datadist.status import code_2_status, handle_llm_status, raise_if_false, raise_if_true
from llm_datadist.v2.llm_types import CacheDesc, int_to_mem_status_dict

STATUS = {
    "LLM_SUCCESS": 0,
    "LLM_FAILED": 0xFFFFFFFF,
    "LLM_WAIT_PROCESS_TIMEOUT": 0x5010B001,
    "LLM_KV_CACHE_NOT_EXIST": 0x5010B002,
    "LLM_REPEAT_REQUEST": 0x5010B003,
    "LLM_REQUEST_ALREADY_COMPLETED": 0x5010B004,
    "LLM_PARAM_INVALID": 0x5010B005,
    "LLM_ENGINE_FINALIZED": 0x5010B006,
    "LLM_NOT_YET_LINK": 0x5010B007,
    "LLM_ALREADY_LINK": 0x5010B008,
    "LLM_LINK_FAILED": 0x5010B009,
    "LLM_UNLINK_FAILED": 0x5010B00A,
    "LLM_NOTIFY_PROMPT_UNLINK_FAILED": 0x5010B00B,
    "LLM_CLUSTER_NUM_EXCEED_LIMIT": 0x5010B00C,
    "LLM_PROCESSING_LINK": 0x5010B00D,
    "LLM_DEVICE_OUT_OF_MEMORY": 0x5010B00E,
    "LLM_PREFIX_ALREADY_EXIST": 0x5010B00F,
    "LLM_PREFIX_NOT_EXIST": 0x5010B010,
    "LLM_SEQ_LENOVERLIMIT": 0x5010B011,
    "LLM_NO_FREE_BLOCK": 0x5010B012,
    "LLM_BLOCKS_OUT_OF_MEMORY": 0x5010B013,
    "LLM_EXIST_LINK": 0x5010B018,
    "LLM_FEATURE_NOT_ENABLED": 0x5010B019,
    "LLM_TIMEOUT": 0x5010B01A,
    "LLM_LINK_BUSY": 0x5010B01B,
    "LLM_OUT_OF_MEMORY": 0x5010B01C,
    "LLM_GRANT_ENDED": 0x4C440001,
    "LLM_VERIFY_FAILED": 0x4C440002,
    "LLM_DEVICE_MEM_ERROR": 507053,
    "LLM_SUSPECT_REMOTE_ERROR": 507057,
    "LLM_UNKNOWN_ERROR": -1,
}

# name -> (value, bytes of one element, numpy type of the forward map)
DATA_TYPES = {
    "DT_FLOAT": (0, 4, "float32"),
    "DT_FLOAT16": (1, 2, "float16"),
    "DT_BF16": (27, 2, "float16"),
    "DT_INT8": (2, 1, "int8"),
    "DT_INT16": (6, 2, "int16"),
    "DT_UINT16": (7, 2, "uint16"),
    "DT_UINT8": (4, 1, "uint8"),
    "DT_INT32": (3, 4, "int32"),
    "DT_INT64": (9, 8, "int64"),
    "DT_UINT32": (8, 4, "uint32"),
    "DT_UINT64": (10, 8, "uint64"),
    "DT_BOOL": (12, 1, "bool"),
    "DT_DOUBLE": (11, 8, "float64"),
    "DT_STRING": (13, 16, "S"),
}
NUMBERS = {name: row[0] for name, row in DATA_TYPES.items()}


def test_status_codes_are_complete_and_exact() -> None:
    assert {code.name: code.value for code in LLMStatusCode} == STATUS
    assert issubclass(LLMStatusCode, enum.IntEnum)


def test_status_code_text_and_comparison() -> None:
    for name, value in STATUS.items():
        code = LLMStatusCode[name]
        assert str(code) == f"{code}" == "%s" % code == f"LLMStatusCode.{name}"  # noqa: UP031
        assert repr(code) == f"<LLMStatusCode.{name}: {value}>"
        assert [format(code, kind) for kind in "dxXn"] == [format(value, kind) for kind in "dxXn"]
        assert code == value
        assert code != value + 1
        assert pickle.loads(pickle.dumps(code)) is code  # noqa: S301  (our own bytes)


def test_code_2_status_maps_unknown_numbers_to_failed() -> None:
    for name, value in STATUS.items():
        assert code_2_status(value) is LLMStatusCode[name if value != -1 else "LLM_FAILED"]
    for unknown in (1, 0x5010B000, 0x5010B014, 0x5010B017, 0x5010B01D, 2**63):
        assert code_2_status(unknown) is LLMStatusCode.LLM_FAILED


def test_handle_llm_status() -> None:
    assert handle_llm_status(0, "copy", "nothing") is None
    with pytest.raises(LLMException) as caught:
        handle_llm_status(0x5010B01A, "pull_cache", "cluster 7")
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    for fragment in ("pull_cache", "failed", "LLMStatusCode.LLM_TIMEOUT", "cluster 7"):
        assert fragment in str(caught.value)
    with pytest.raises(LLMException) as caught:
        handle_llm_status(12345, "f", "")
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED


def test_raise_if_false_and_true(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="LLM_DATADIST")
    assert raise_if_false(True, "never {}", 1) is None
    assert raise_if_true(0, "never {}", 1) is None
    assert not caplog.records
    with pytest.raises(LLMException) as caught:
        raise_if_false(0, "{} is not {name}", 5, name="six")
    assert str(caught.value) == "5 is not six"
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException) as caught:
        raise_if_true([1], "full", status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_BUSY
    logged = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert logged == [("ERROR", "5 is not six"), ("ERROR", "full")]


@pytest.mark.contract("19.llm-exception")
@pytest.mark.parametrize("passed", [LLMStatusCode.LLM_TIMEOUT, 5, None, "anything"])
def test_exception_returns_exactly_the_code_it_was_given(passed: object) -> None:
    error = LLMException("text", status_code=passed)
    assert error.status_code is passed
    assert str(error) == "text"
    assert isinstance(error, RuntimeError)
    with pytest.raises(AttributeError):
        error.status_code = LLMStatusCode.LLM_SUCCESS
    assert LLMException("text").status_code is LLMException().status_code is LLMStatusCode.LLM_SUCCESS
    assert LLMException("a", "b").args == ("a", "b")


def test_status_object() -> None:
    assert Status(LLMStatusCode.LLM_SUCCESS).is_ok() is True
    failed = Status(LLMStatusCode.LLM_FAILED)
    assert failed.is_ok() is False
    assert failed.status_code is LLMStatusCode.LLM_FAILED


@pytest.mark.contract("20.1")
@pytest.mark.parametrize(
    ("kind", "base", "members"),
    [
        (LLMRole, enum.IntEnum, {"PROMPT": 1, "DECODER": 2, "MIX": 3}),
        (Placement, enum.IntEnum, {"HOST": 0, "DEVICE": 1}),
        (RegisterMemStatus, enum.Enum, {"OK": 0, "PREPARING": 1, "FAILED": 2}),
        (Memtype, enum.Enum, {"MEM_TYPE_DEVICE": 0, "MEM_TYPE_HOST": 1}),
    ],
)
def test_other_enums(kind: type[enum.Enum], base: type, members: dict[str, int]) -> None:
    assert {member.name: member.value for member in kind} == members
    assert issubclass(kind, base)
    assert issubclass(kind, int) == (base is enum.IntEnum)
    for member in kind:
        assert str(member) == f"{member}" == f"{kind.__name__}.{member.name}"


@pytest.mark.contract("20.20")
def test_memory_status_by_number() -> None:
    assert int_to_mem_status_dict == {status.value: status for status in RegisterMemStatus}


@pytest.mark.contract("19.float16")
def test_data_type_members_in_order_and_their_sizes() -> None:
    assert [(member.name, member.value) for member in DataType] == list(NUMBERS.items())
    assert not issubclass(DataType, int)
    for name, (_, size, _) in DATA_TYPES.items():
        assert CacheDesc(1, [2, 3], DataType[name]).size == 6 * size, name


def test_data_type_tables() -> None:
    module = importlib.import_module("llm_datadist.data_type")
    wrapper = importlib.import_module("llm_datadist.metadef_wrapper")
    forward = module.python_dtype_2_dwrapper_dtype
    backward = module._dwrapper_dtype_to_python_dtype
    assert {kind.name: int(number) for kind, number in forward.items()} == NUMBERS
    assert {int(number): kind.name for number, kind in backward.items()} == {NUMBERS[name]: name for name in NUMBERS}
    assert {name: int(getattr(wrapper, name)) for name in NUMBERS} == NUMBERS
    for name, number in NUMBERS.items():
        assert module.get_python_dtype_from_wrapper_dtype(number) is DataType[name]
    for unknown in (5, -1, 28, 2**40):
        with pytest.raises(ValueError, match=str(unknown)):
            module.get_python_dtype_from_wrapper_dtype(unknown)


def test_numpy_tables() -> None:
    module = importlib.import_module("llm_datadist.data_type")
    made = {DataType[name]: np.dtype(row[2]) for name, row in DATA_TYPES.items()}
    assert {kind: np.dtype(of_numpy) for kind, of_numpy in module.dtype_to_np_dtype.items()} == made
    assert list(module.valid_np_dtypes) == list(module.dtype_to_np_dtype.values())
    del made[DataType.DT_BF16]
    assert module.np_dtype_to_dtype == {of_numpy: kind for kind, of_numpy in made.items()}
    assert len(module.np_dtype_to_dtype) == 13
    with pytest.raises(AttributeError, match="no_such_table"):
        _ = module.no_such_table
