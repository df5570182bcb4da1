"""The package in a subinterpreter: the import is refused there, and the main interpreter is not affected.

Each test runs in its own process, because a failed import cannot be undone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memory import run_fresh

if TYPE_CHECKING:
    from pathlib import Path

SUBINTERPRETER = """
try:
    import _interpreters as interpreters                # Python 3.13 and later
except ImportError:
    try:
        import _xxsubinterpreters as interpreters       # Python 3.8 to 3.12
    except ImportError:
        interpreters = None

CODE = '''
import sys
try:
    import llm_datadist
except ImportError as error:
    said = str(error)
else:
    said = "imported"
left = [name for name in sys.modules if name.startswith("llm_datadist")]
with open({path!r}, "a") as file:
    file.write(said + "; left: " + repr(left) + chr(10))
'''

def in_subinterpreter(path):
    # The kind that shares the main interpreter's lock: in the other, Python itself refuses the module.
    try:
        other = interpreters.create("legacy")
    except TypeError:
        other = interpreters.create()
    failed = interpreters.run_string(other, CODE.format(path=path))
    assert failed is None, failed
    interpreters.destroy(other)

def works():
    from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMRole
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
    cache = dist.cache_manager.allocate_blocks_cache(CacheDesc(1, [4, 100], DataType.DT_INT8))
    dist.cache_manager.copy_blocks(cache, {0: [1]})
    try:
        dist.cache_manager.copy_blocks(cache, {0: [4]})
    except LLMException as error:
        assert "4" in str(error)
    else:
        raise AssertionError("a block that is not there was copied")
    dist.finalize()
"""


@pytest.mark.parametrize("order", ["main first", "subinterpreter first", "between engines"])
def test_import_in_subinterpreter_is_refused_and_main_goes_on(order: str, tmp_path: Path) -> None:
    path = str(tmp_path / "said")
    steps = {
        "main first": "import llm_datadist; in_subinterpreter(path); in_subinterpreter(path); works()",
        "subinterpreter first": "in_subinterpreter(path); in_subinterpreter(path); works()",
        "between engines": "works(); in_subinterpreter(path); works(); in_subinterpreter(path); works()",
    }[order]
    out = run_fresh(
        SUBINTERPRETER
        + f"path = {path!r}\n"
        + "if interpreters is None:\n    print('none')\nelse:\n    "
        + steps.replace("; ", "\n    ")
        + "\n    print('fine')\n"
    )
    if out.strip() == "none":
        pytest.skip("this Python cannot create subinterpreters")
    assert out.strip().splitlines()[-1] == "fine"
    said = (tmp_path / "said").read_text(encoding="utf-8").splitlines()
    assert len(said) == 2
    for line in said:
        assert "llm_datadist cannot be imported in a subinterpreter" in line
        assert line.endswith("left: []"), "a half-imported package stays behind"
