"""The example code of the founding documents, run as written.

Reads `../shared/seeds` beside the repository; where that folder is absent the tests are skipped and say so. Only the
names that the examples take for granted (`cache_manager`, `cpu_addrs`, ...) are provided. Examples of calls that this
release does not have are not collected.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Callable

import pytest

from conftest import PAGE, options, pool
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMDataDist, Placement
from memory import UserTensors, contents, desc, fill, same, used

SEEDS = Path(__file__).resolve().parents[2] / "shared" / "seeds"
DOCUMENTS = ("deprecated.md", "copy_cache.md")
present = pytest.mark.skipif(not SEEDS.is_dir(), reason="the founding documents are not beside the repository")


def read(text: str) -> dict[str, str]:
    """Section name → Python code of the block that follows its "example of a call" line."""
    found: dict[str, str] = {}
    parts = re.split(r"^```.*$", text, flags=re.MULTILINE)
    section = ""
    for prose, code in zip(parts[::2], parts[1::2]):
        sections = re.findall(r"^#+ ([A-Za-z_]+)$", prose, flags=re.MULTILINE)
        section = sections[-1] if sections else section
        last_heading = re.findall(r"^(?:\*\*|#+ )(.+?)(?:\*\*)?$", prose, flags=re.MULTILINE)[-1:]
        if last_heading == ["调用示例"]:
            found[section] = code
    return found


def examples() -> dict[str, str]:
    """`document:section` → code, from every document that is there."""
    paths = [SEEDS / name for name in DOCUMENTS]
    return {
        f"{path.name}:{section}": code
        for path in paths
        if path.is_file()
        for section, code in read(path.read_text(encoding="utf-8")).items()
    }


EXAMPLES = examples()


def run(key: str, **names: Any) -> dict[str, Any]:
    """Execute one example with the names it needs; return all names afterwards."""
    exec(compile(EXAMPLES[key], key, "exec"), names)  # noqa: S102  (that is the test)
    return names


@pytest.fixture
def manager(start: Callable[..., LLMDataDist]) -> Any:
    """The examples allocate megabytes."""
    return start(options(pool(16 << 20), pool(16 << 20))).cache_manager


@present
def test_every_example_is_found_and_used() -> None:
    used_here = {
        "deprecated.md:allocate_cache",
        "deprecated.md:deallocate_cache",
        "deprecated.md:remove_cache_key",
        "deprecated.md:copy_cache",
        "deprecated.md:allocate_blocks_cache",
        "deprecated.md:deallocate_blocks_cache",
        "deprecated.md:copy_blocks",
        "deprecated.md:swap_blocks",
        "deprecated.md:mem_pool_cfg",
        "deprecated.md:host_mem_pool_cfg",
        "copy_cache.md:copy_cache",
    }
    assert set(EXAMPLES) == used_here


@present
@pytest.mark.parametrize("section", ["allocate_cache", "deallocate_blocks_cache"])
def test_allocate_and_release(manager: Any, section: str) -> None:
    names = run(f"deprecated.md:{section}", cache_manager=manager)
    assert len(names["cache"].tensor_addrs) == 1
    assert used(manager)["device"] == 4 << 20
    run("deprecated.md:deallocate_cache", cache_manager=manager, cache=names["cache"])
    assert used(manager)["device"] == 4 << 20
    run("deprecated.md:remove_cache_key", cache_manager=manager)
    assert used(manager)["device"] == 0
    run("deprecated.md:deallocate_cache", cache_manager=manager, cache=names["cache"])
    run("deprecated.md:remove_cache_key", cache_manager=manager)


@present
def test_the_corrected_blocks_release(manager: Any) -> None:
    names = run("deprecated.md:allocate_blocks_cache", cache_manager=manager, cache_desc=desc())
    assert names["blocks_cache"].is_blocks_cache
    manager.deallocate_blocks_cache(names["blocks_cache"])
    assert used(manager)["device"] == 0


@present
@pytest.mark.parametrize("key", ["deprecated.md:copy_cache", "copy_cache.md:copy_cache"])
def test_copy_cache(manager: Any, key: str) -> None:
    dst, src = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    expected, from_ = fill(dst, 1), fill(src, 2)
    run(key, cache_manager=manager, dst_cache=dst, src_cache=src)
    for target, origin in zip(expected, from_):
        target[0, :128] = origin[1, :128]
    assert same(contents(dst), expected)


@present
def test_copy_blocks(manager: Any) -> None:
    cache = manager.allocate_blocks_cache(desc())
    expected = fill(cache, 1)
    run("deprecated.md:copy_blocks", cache_manager=manager, cache=cache)
    for tensor in expected:
        tensor[2] = tensor[3] = tensor[1]
    assert same(contents(cache), expected)


@present
def test_swap_blocks(manager: Any) -> None:
    user = UserTensors(8, PAGE, 2)
    given = user.snapshot()
    names = run(
        "deprecated.md:swap_blocks",
        cache_manager=manager,
        npu_cache_desc=desc(8, PAGE, 2),
        npu_cache_key=BlocksCacheKey(1, 0),
        cpu_cache_desc=CacheDesc(2, [8, PAGE], DataType.DT_INT8, Placement.HOST),
        cpu_addrs=user.addrs,
    )
    npu = contents(names["npu_cache"])
    for device, host, before in zip(npu, user.arrays, given):
        assert (device[2] == before[1]).all()
        assert (device[4] == before[3]).all()
        assert (host[2] == device[1]).all()
        assert (host[4] == device[3]).all()
        for untouched in (0, 1, 3, 5, 6, 7):
            assert (host[untouched] == before[untouched]).all()


@present
@pytest.mark.parametrize(
    ("name", "option"), [("mem_pool_cfg", "MemPoolConfig"), ("host_mem_pool_cfg", "HostMemPoolConfig")]
)
def test_pool_options_start_an_engine(start: Callable[..., LLMDataDist], name: str, option: str) -> None:
    config = run(f"deprecated.md:{name}")["llm_config"]
    config.enable_cache_manager = True
    made = config.generate_options()
    assert made[f"llm.{option}"] == '{"memory_size": 18737418240, "page_shift": 16}'
    manager = start(made).cache_manager
    placement = Placement.DEVICE if name == "mem_pool_cfg" else Placement.HOST
    cache = manager.allocate_cache(desc(2, 100, 1, placement), [CacheKey(1, 1)])
    manager.copy_cache(cache, cache, 1, 0)
