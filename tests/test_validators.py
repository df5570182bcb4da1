"""The argument checks of `llm_datadist.utils.utils` (contract §18)."""

from __future__ import annotations

import pytest

from llm_datadist.utils import utils
from memory import TE, raising
from mistakes import NO_INTEGER, outside

BOUNDS = {
    **{f"uint{bits}": (0, 2**bits - 1) for bits in (8, 16, 32, 64)},
    **{f"int{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (32, 64)},
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("kind", BOUNDS)
def test_checks_of_an_integer_and_of_a_list(kind: str) -> None:
    """There are lists of three kinds only."""
    low, high = BOUNDS[kind]
    checks = [(getattr(utils, f"check_{kind}"), lambda value: value)]
    if kind in ("int32", "int64", "uint64"):
        check = getattr(utils, f"check_list_{kind}")
        checks.append((check, lambda value: (0, value)))
        given = [low, 0, high]
        assert check("the_name", given) is None
        assert given == [low, 0, high]
        for good in ([], (), (1, 2), {3}, range(3)):
            assert check("the_name", good) is None
    for check, put in checks:
        for good in (low, high, 0):
            assert check("the_name", put(good)) is None
        for bad in (None, *NO_INTEGER):
            with pytest.raises(TypeError, match="the_name"):
                check("the_name", put(bad))
        for bad in outside(low, high):
            with pytest.raises(ValueError, match=rf"the_name.*{bad}.*{kind}|the_name.*{kind}.*{bad}"):
                check("the_name", put(bad))


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
    with raising(TE):
        utils.check_isinstance("the_name", None, dict, allow_none=False)


@pytest.mark.contract("20.20")
def test_check_dict() -> None:
    assert utils.check_inner("the_arg", (1, 2), int) is None
    for bad in ([1, "2"], [True], [None], (1.0,)):
        with pytest.raises(TypeError, match="the_arg inner type only support"):
            utils.check_inner("the_arg", bad, int)
    for good in (({}, int, int), ({1: "x"}, int, str), ({1: [1], 2: []}, int, list, int), ({True: True}, bool, bool)):
        assert utils.check_dict("d", *good) is None
    for value, v_class, match in (
        *[({bad: 1}, int, "d dict key only support") for bad in ("1", True)],
        *[({1: bad}, int, "d dict value only support") for bad in ("1", False)],
        ({1: (1,)}, list, "d dict value only support"),
        *[({1: bad}, list, r"dict value.*inner type only support") for bad in ([1, "2"], [True])],
    ):
        with pytest.raises(TypeError, match=match):
            utils.check_dict("d", value, int, v_class, int)


@pytest.mark.contract("20.20")
def test_check_positive_or_set_default() -> None:
    check = utils.check_positive_or_set_default
    assert check("the_arg", None) == -1
    assert check("the_arg", None, 7) == 7
    for good in (0, 1, 2**63 - 1):
        assert check("the_arg", good, 7) == good
    for bad in NO_INTEGER:
        with pytest.raises(TypeError, match="the_arg"):
            check("the_arg", bad)
    for bad in (*outside(0, 2**63 - 1), -(2**63)):
        with pytest.raises(ValueError, match="the_arg"):
            check("the_arg", bad)
