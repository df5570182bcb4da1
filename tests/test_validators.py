"""The argument checks of `llm_datadist.utils.utils` (contract §18)."""

from __future__ import annotations

import pytest

from llm_datadist.utils import utils
from memory import TE, raising

INTEGER_CHECKS = {
    "check_uint8": (0, 2**8 - 1),
    "check_uint16": (0, 2**16 - 1),
    "check_uint32": (0, 2**32 - 1),
    "check_uint64": (0, 2**64 - 1),
    "check_int32": (-(2**31), 2**31 - 1),
    "check_int64": (-(2**63), 2**63 - 1),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("name", INTEGER_CHECKS)
def test_check_of_an_integer(name: str) -> None:
    low, high = INTEGER_CHECKS[name]
    validate = getattr(utils, name)
    for good in (low, high, 0):
        assert validate("the_name", good) is None
    for bad in (True, False, None, 1.0, "1"):
        with pytest.raises(TypeError, match="the_name"):
            validate("the_name", bad)
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match="the_name") as caught:
            validate("the_name", bad)
        assert name.removeprefix("check_") in str(caught.value)
        assert str(bad) in str(caught.value)


@pytest.mark.contract("20.20")
def test_check_of_a_class() -> None:
    class Special(dict[str, int]):
        """A subclass is accepted, and returned as it is."""

    value = Special()
    assert utils.check_isinstance("the_name", value, dict) is value
    assert utils.check_isinstance("the_name", value, [list, dict]) is value
    for empty in ([], ()):
        assert utils.check_isinstance("the_name", empty, [list, tuple], int) is empty
    assert utils.check_isinstance("the_name", None, dict) is None
    assert utils.check_isinstance("the_name", True, [bool, int]) is True
    for bad, classes, shown in ((True, [int], "bool"), (5, [str, dict], "int")):
        with pytest.raises(TypeError, match=r"^the prefix .*the_name.*only support") as caught:
            utils.check_isinstance("the_name", bad, classes, extra_fmt="the prefix ")
        assert all(f"'{kind.__name__}'" in str(caught.value) for kind in classes)
        assert shown in str(caught.value)
    with pytest.raises(TypeError, match=r"the_name inner type only support.*'int'.*bool"):
        utils.check_isinstance("the_name", [1, True], [list], int)
    for bad in ({True: 1}, {1: True}):
        with raising(TE):
            utils.check_dict("the_name", bad, int, int)
    with raising(TE):
        utils.check_isinstance("the_name", None, dict, allow_none=False)
