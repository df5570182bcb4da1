"""The examples of the founding documents, run as written, and their statements about results and limits.

Reads `../shared/seeds` beside the repository. If that folder is absent, the tests are skipped. Only the names that the
examples presuppose (`cache_manager`, `cpu_addrs`, ...) are provided. Not for: the examples of the two C++ pages, which
the tests of the C++ interface complete to programs (`CPLUSPLUS` names these tests).

`STATEMENTS` lists, page by page, every statement of the sections "returns" and "constraints" with the tests that prove
it.
"""

from __future__ import annotations

import re
from typing import Any, Callable, Optional

import pytest
from contract import ROOT, SEEDS, present

from conftest import PAGE, options, pool
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMDataDist, Placement
from memory import UserTensors, contents, desc, fill, same, used
from peers import Ends, equal
from two_modes import KV_CACHE_MANAGER, SUCCESS, Pair, sent

DOCUMENTS = ("deprecated.md", "copy_cache.md", "transfer_cache_async.md", "CopyKvCache.md", "PushKvCache.md")
CPLUSPLUS = {"CopyKvCache.md:CopyKvCache": "19.cpp-copy-kv-cache", "PushKvCache.md:PushKvCache": "19.cpp-push-kv-cache"}
USED: set[str] = set()


def example(*keys: str) -> Callable[[Any], Any]:
    """A test that runs these examples; left out where the documents are absent."""
    USED.update(keys)
    return present


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
    return start(options(pool(16 << 20), pool(16 << 20))).cache_manager


@present
def test_every_page_is_there() -> None:
    assert sorted(path.name for path in SEEDS.glob("*.md")) == sorted(DOCUMENTS)


@present
def test_every_example_is_run_by_a_test() -> None:
    assert len(EXAMPLES) == 14
    assert set(EXAMPLES) == USED | set(CPLUSPLUS)
    assert all(code.strip() for code in EXAMPLES.values())


@pytest.mark.parametrize("key", CPLUSPLUS)
def test_the_examples_of_the_cplusplus_pages_have_their_tests(key: str) -> None:
    page = key.partition(".md:")[0]
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py")}
    proofs = [name for name, text in texts.items() if f'"{CPLUSPLUS[key]}"' in text and page in text]
    assert [name for name in proofs if name != "test_seeds.py"], f"no test compiles the example of {page}.md"


@example(
    "deprecated.md:allocate_cache",
    "deprecated.md:deallocate_blocks_cache",
    "deprecated.md:deallocate_cache",
    "deprecated.md:remove_cache_key",
)
@pytest.mark.contract("19.allocate-cache", "19.double-reference", "19.deallocate-cache", "19.remove-cache-key")
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


@example("deprecated.md:allocate_blocks_cache")
@pytest.mark.contract("19.allocate-blocks-cache", "19.deallocate-blocks-cache")
def test_the_corrected_blocks_release(manager: Any) -> None:
    names = run("deprecated.md:allocate_blocks_cache", cache_manager=manager, cache_desc=desc())
    assert names["blocks_cache"].is_blocks_cache
    manager.deallocate_blocks_cache(names["blocks_cache"])
    assert used(manager)["device"] == 0


@example("deprecated.md:copy_cache", "copy_cache.md:copy_cache")
@pytest.mark.contract("19.copy-cache")
@pytest.mark.parametrize("key", ["deprecated.md:copy_cache", "copy_cache.md:copy_cache"])
def test_copy_cache(manager: Any, key: str) -> None:
    dst, src = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    expected, from_ = fill(dst, 1), fill(src, 2)
    run(key, cache_manager=manager, dst_cache=dst, src_cache=src)
    for target, origin in zip(expected, from_):
        target[0, :128] = origin[1, :128]
    assert same(contents(dst), expected)


@example("deprecated.md:copy_blocks")
@pytest.mark.contract("19.copy-blocks")
def test_copy_blocks(manager: Any) -> None:
    cache = manager.allocate_blocks_cache(desc())
    expected = fill(cache, 1)
    run("deprecated.md:copy_blocks", cache_manager=manager, cache=cache)
    for tensor in expected:
        tensor[2] = tensor[3] = tensor[1]
    assert same(contents(cache), expected)


@example("deprecated.md:swap_blocks")
@pytest.mark.contract("19.swap-blocks")
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
        untouched = [0, 1, 3, 5, 6, 7]
        assert (host[untouched] == before[untouched]).all()


@example("deprecated.md:mem_pool_cfg", "deprecated.md:host_mem_pool_cfg")
@pytest.mark.contract("19.mem-pool-cfg", "19.host-mem-pool-cfg")
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


# Corrections without which Python cannot run the example. Each text occurs exactly once.
REPAIRS = (
    ("assert(len(decoder_addrs) = 2*num_layers)", "assert(len(decoder_addrs) == 2*num_layers)"),  # not valid Python
    ("decoder_addrs = ...\n", "decoder_addrs = decoder_kv_addrs\n"),  # "need register decoder kv addr here"
)
LAYERS = 40


def transfer_example() -> str:
    """The example with its corrections."""
    text = EXAMPLES["transfer_cache_async.md:transfer_cache_async"]
    for written, repaired in REPAIRS:
        assert text.count(written) == 1, written
        text = text.replace(written, repaired)
    return text


@example("transfer_cache_async.md:transfer_cache_async")
@pytest.mark.contract("19.transfer-cache-async")
def test_transfer_cache_async(ends: Ends) -> None:
    kv_pair = Pair(KV_CACHE_MANAGER, ends)
    with pytest.raises(SyntaxError):
        compile(EXAMPLES["transfer_cache_async.md:transfer_cache_async"], "as written", "exec")
    kv_cache, decoder_addrs = kv_pair.caches(rows=2, row_bytes=1024, tensors=2 * LAYERS)
    names = {
        "kv_cache_manager": kv_pair.manager,
        "kv_cache": kv_cache,
        "decoder_kv_addrs": decoder_addrs,
        "Optional": Optional,  # the page imports nothing for its annotation
    }
    exec(compile(transfer_example(), "transfer_cache_async.md", "exec"), names)  # noqa: S102  (that is the test)
    assert (names["num_layers"], names["dst_cluster_id"]) == (LAYERS, 2)
    task = names["cache_task"]
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS]
    assert equal(kv_pair.remote.read("f"), sent({0: 0}, 2 * LAYERS, 2, 1024)), (
        "slot 0 of every tensor, and nothing else"
    )


WRONG_TYPES = "test_bad_input.py::test_bad_argument"
IN_TIME = "test_seed_contract.py::test_sync_kv_timeout_ends_the_wait_of_a_copy"
NEVER_LATE = "test_seed_contract.py::test_sync_kv_timeout_refuses_no_call_without_copying"
OWN_PLACEMENT = "test_allocate.py::test_a_pool_serves_its_own_placement_only"
RETURNS = "test_seed_contract.py::test_what_calls_return"
ALLOCATE_RETURNS = [
    RETURNS,
    WRONG_TYPES,
    "test_allocate.py::test_a_bound_key_cannot_be_bound_again_before_its_release",
    NEVER_LATE,
]
ALLOCATE_LIMITS = [
    "test_seed_contract.py::test_each_slot_has_its_key",
    "test_allocate.py::test_placeholders_bind_nothing",
    "test_keys_remote.py::test_the_last_of_equal_keys_names_its_slot",
    OWN_PLACEMENT,
]
POOL_RETURNS = [
    "test_seed_contract.py::test_pool_texts_are_kept",
    "test_config.py::test_setter_refuses_and_keeps_what_was",
]
MISSING = "test_allocate.py::test_releasing_twice_or_something_unknown_is_no_operation"
# (page, section) → a test for each statement of "returns", and for each of "constraints", in their order.
COPIES = "test_cpp.py::test_what_a_copy_refuses"
SWAPS = "test_swap.py::test_mismatch_is_both_exceptions_and_moves_nothing"
TRANSFERS = "test_cpp.py::test_what_a_transfer_refuses"
STATEMENTS: dict[str, tuple[list[str], list[str]]] = {
    "deprecated.md:allocate_cache": (ALLOCATE_RETURNS, ALLOCATE_LIMITS),
    "deprecated.md:deallocate_cache": ([RETURNS, WRONG_TYPES, NEVER_LATE], [MISSING]),
    "deprecated.md:remove_cache_key": ([RETURNS, WRONG_TYPES, NEVER_LATE], [MISSING]),
    "deprecated.md:copy_cache": ([RETURNS, WRONG_TYPES, IN_TIME], [WRONG_TYPES]),
    "deprecated.md:allocate_blocks_cache": ([RETURNS, WRONG_TYPES, NEVER_LATE], [OWN_PLACEMENT]),
    # The page has the text of allocate_cache here; its own words are those of the corrected manual (17.6).
    "deprecated.md:deallocate_blocks_cache": (ALLOCATE_RETURNS, ALLOCATE_LIMITS),
    "deprecated.md:copy_blocks": ([RETURNS, WRONG_TYPES, IN_TIME], []),
    "deprecated.md:swap_blocks": ([RETURNS, SWAPS, WRONG_TYPES], [SWAPS]),
    "deprecated.md:mem_pool_cfg": (POOL_RETURNS, []),
    "deprecated.md:host_mem_pool_cfg": (POOL_RETURNS, ["test_lifecycle.py::test_host_pool_has_a_limit"]),
    "copy_cache.md:copy_cache": ([RETURNS, WRONG_TYPES, IN_TIME], [WRONG_TYPES]),
    "CopyKvCache.md:CopyKvCache": (["test_cpp.py::test_the_example_of_copy_kv_cache", COPIES, COPIES], [COPIES]),
    "PushKvCache.md:PushKvCache": (
        [
            "test_cpp.py::test_the_example_of_push_kv_cache_in_two_processes",
            TRANSFERS,
            TRANSFERS,
            "test_peer_wires.py::test_a_push_that_breaks_ends_in_time",
            TRANSFERS,
            TRANSFERS,
        ],
        ["test_cpp.py::test_the_class_links_pulls_from_and_pushes_to_a_python_process"],
    ),
    "transfer_cache_async.md:transfer_cache_async": (
        [
            "test_transfer_results.py::test_polling_and_waiting_with_limits",
            *["test_layerwise_arguments.py::test_every_mistake_is_named_in_order"] * 2,
        ],
        [
            "test_seed_contract.py::test_transfer_of_blocks",
            "test_seed_contract.py::test_a_transfer_and_pulls_on_one_link",
            "test_seed_contract.py::test_transfers_at_once",
            "test_seed_contract.py::test_one_device_alone",
        ],
    ),
}


def statements(text: str) -> dict[str, dict[str, list[str]]]:
    """Section → "returns" and "constraints" → the statements of each; "none" is no statement."""
    found: dict[str, dict[str, list[str]]] = {}
    section, kind = "", ""
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        if heading := re.fullmatch(r"(?:#+ |\*\*)(.+?)(?:\*\*)?", line.strip()):
            title = heading.group(1)
            section = title if re.fullmatch("[A-Za-z_]+", title) else section
            kind = {"返回值": "returns", "约束说明": "constraints"}.get(title, "")
        elif kind and line.strip() not in ("", "无"):
            found.setdefault(section, {}).setdefault(kind, []).append(line.strip())
    return found


@present
@pytest.mark.parametrize("page", DOCUMENTS)
def test_every_statement_has_a_test(page: str) -> None:
    found = statements((SEEDS / page).read_text(encoding="utf-8"))
    assert found
    for section, kinds in found.items():
        returns, constraints = STATEMENTS[f"{page}:{section}"]
        assert len(kinds.get("returns", [])) == len(returns), (section, kinds)
        assert len(kinds.get("constraints", [])) == len(constraints), (section, kinds)
    assert len([key for key in STATEMENTS if key.startswith(f"{page}:")]) == len(found)


def test_the_tests_of_the_statements_exist() -> None:
    for returns, constraints in STATEMENTS.values():
        for name in [*returns, *constraints]:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name
