"""What an import of the package opens and loads: no thread, no file, no array library, and only the native API."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import llm_datadist
from llm_datadist import CacheDesc, CacheKey, DataType, LLMStatusCode, PeerLost, Placement
from llm_datadist import KvLayout as NativeLayout
from memory import run_engine, run_fresh


def test_importing_opens_nothing_and_loads_no_array_library() -> None:
    run_fresh(
        """
        import os, sys, threading
        # An emulator has a native thread of its own.
        files, tasks = (set(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task"))
        from llm_datadist import *
        import llm_datadist.original.tensors, llm_datadist_v1, llm_datadist_v1.kv_cache_manager
        import llm_datadist.v2.llm_utils, llm_datadist.v2.config
        import llm_datadist.v2.llm_types, llm_datadist.v2.llm_datadist
        import llm_datadist.data_type as data_type
        LLMConfig().generate_options()
        LLMDataDist(LLMRole.PROMPT, 1)
        TensorDesc(DataType.DT_FLOAT, [1])
        assert not {"numpy", "torch"} & set(sys.modules), "an array library was imported"
        assert threading.active_count() == 1
        assert set(os.listdir("/proc/self/task")) == tasks, "a native thread was started"
        assert set(os.listdir("/proc/self/fd")) == files, "a file was opened"
        assert len(data_type.dtype_to_np_dtype) == 14
        assert "numpy" in sys.modules, "imported when it is asked for"
        """
    )


def test_an_import_loads_the_native_api_only() -> None:
    """Without `site`, because what is installed beside the package may load modules when Python starts."""
    code = """if True:
        import os, sys
        before = set(sys.modules)
        sys.path.insert(0, sys.argv[1])
        from llm_datadist import Engine, PeerLost
        import llm_datadist.native
        print(*sorted(set(sys.modules) - before))
    """
    command = [sys.executable, "-S", "-W", "error", "-c", code, str(Path(llm_datadist.__file__).parents[1])]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)  # noqa: S603
    added = set(done.stdout.split())
    assert {"llm_datadist", "llm_datadist._core", "llm_datadist.errors"} <= added, added
    assert len(added) <= 12, added
    slow = {"ast", "asyncio", "collections.abc", "contextlib", "dataclasses", "enum", "functools", "inspect", "json"}
    slow |= {"logging", "numpy", "pathlib", "re", "selectors", "socket", "threading", "torch", "typing"}
    assert not slow & added, slow & added


def test_the_native_api_needs_neither_numpy_nor_the_original() -> None:
    """Also not its log lines, errors, coroutines, forked children and exit with an open engine."""
    out = run_fresh(
        """
        import sys
        sys.modules["numpy"] = None
        from llm_datadist import Engine, InvalidArgument
        engine = Engine(pool="1MiB", listen="127.0.0.1:0")
        kv = engine.allocate("kv", blocks=8, tensors=2, shape=(16,), dtype="float32", contiguous=True)
        view = memoryview(kv.buffer)
        view[64:128] = bytes(range(64))
        engine.copy(kv[[3]], kv[[1]]).result()
        engine.copy([(kv[6:8], kv[(1, 3)])]).result()
        for block in (3, 6, 7):
            assert view[64 * block : 64 * block + 64] == bytes(range(64)), block
        own = [bytearray(512), bytearray(512)]
        registered = engine.register("own", [memoryview(one).cast("B", (8, 64)) for one in own])
        engine.copy(registered[[5]], registered[[4]]).result()
        kv.tensors[0].__dlpack__()
        try:
            engine.allocate("kv", blocks=8, tensors=2, shape=(16,), dtype="float32")
        except InvalidArgument as error:
            assert error.argument == "name"
        else:
            raise AssertionError("a name was used twice")

        import asyncio, os, warnings
        async def linked():
            with Engine() as other:
                peer = await other.link(engine.address)
                assert peer.name == engine.name
        asyncio.run(linked())
        warnings.simplefilter("ignore")  # newer versions of Python warn of a fork with threads
        child = os.fork()
        if not child:
            with Engine(pool="1MiB") as own:
                own.allocate("kv", blocks=8, tensors=2, shape=(16,), dtype="float32")
            os._exit(7 if engine.closed else 8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        loaded = {name for name in sys.modules if name.startswith("llm_datadist")}
        assert "llm_datadist.engine_log" in loaded, loaded
        assert not {name for name in loaded if name.startswith("llm_datadist.original")}, loaded
        print("exits")
        """
    )
    assert out == "exits\n"


def test_calls_that_need_numpy_say_how_to_install_it() -> None:
    run_fresh(
        """
        import sys
        sys.modules["numpy"] = None
        from llm_datadist import DataType, Engine, Tensor, data_type
        from llm_datadist.original.tensors import create_npu_tensors
        class Indices:
            __array_interface__ = {"version": 3, "shape": (1,), "typestr": "<i8", "data": (8, False)}
        engine = Engine(pool="1MiB")
        kv = engine.allocate("kv", blocks=8, tensors=1, shape=(16,), dtype="float32", contiguous=True)
        for name, call in {
            "TensorView.numpy()": kv.tensors[0].numpy,
            "CacheBuffer.numpy()": kv.buffer.numpy,
            "an array as blocks": lambda: kv[Indices()],
            "Tensor": lambda: Tensor([1.0]),
            "dtype='float32'": lambda: create_npu_tensors([1], "float32", [kv.tensors[0].address]),
            "llm_datadist.data_type.valid_np_dtypes": lambda: data_type.valid_np_dtypes,
        }.items():
            try:
                call()
            except ImportError as error:
                assert str(error) == f"{name} needs numpy: pip install llm-datadist[numpy]", error
            else:
                raise AssertionError(name)
        """
    )


def test_a_numpy_that_does_not_load_gives_its_own_reason(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import no_such_library")
    run_fresh(
        """
        from llm_datadist import Engine
        engine = Engine(pool="1MiB")
        kv = engine.allocate("kv", blocks=8, tensors=1, shape=(16,), dtype="float32")
        try:
            kv.tensors[0].numpy()
        except ModuleNotFoundError as error:
            assert error.name == "no_such_library"
        else:
            raise AssertionError("an array without numpy")
        """,
        PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]),
    )


@pytest.mark.parametrize(
    "first",
    ["from llm_datadist.original.types import *", "import llm_datadist.configs", "import llm_datadist.v2.llm_types"],
)
def test_any_module_of_the_original_may_be_imported_first(first: str) -> None:
    run_fresh(
        f"""
        {first}
        from llm_datadist.original.types import CacheDesc
        from llm_datadist.data_type import DataType
        try:
            CacheDesc(1, [4, 100], DataType.DT_INT8, batch_dim_index=2)
        except RuntimeError as error:
            from llm_datadist import LLMException, LLMStatusCode
            assert type(error) is LLMException
            assert error.status_code is LLMStatusCode.LLM_PARAM_INVALID
        else:
            raise AssertionError("a dimension that the shape does not have")
        """
    )


def test_names_of_the_original_are_attributes_from_the_start() -> None:
    run_fresh(
        """
        import sys, llm_datadist
        names = dir(llm_datadist)
        assert "llm_datadist.original.names" not in sys.modules
        public = {*llm_datadist.__all__, "CacheManager", "configs", "data_type", "status"}
        assert public | {"Engine", "KvLayout", "__version__", "v2_list"} <= set(names)
        assert names == sorted(set(names))
        for name in ("configs", "data_type", "status"):
            assert getattr(llm_datadist, name) is sys.modules[f"llm_datadist.{name}"]
        assert not hasattr(llm_datadist, "original_name")
        assert "llm_datadist.original.names" not in sys.modules
        assert llm_datadist.LLMDataDist is llm_datadist.LLMDataDist
        import pydoc
        text = pydoc.plain(pydoc.render_doc(llm_datadist))
        assert "class LLMDataDist" in text and "class CacheDesc" in text
        """
    )


def test_pickled_values_are_loaded_before_any_other_import() -> None:
    layout = NativeLayout(layers=2, block_tokens=4, heads=4, head_dim=8, dtype="float16")
    desc = CacheDesc(2, [4, 100], DataType.DT_FLOAT16)
    values = [desc, CacheKey(1, 2), Placement.HOST, LLMStatusCode.LLM_TIMEOUT, layout, PeerLost("gone", code="lost")]
    for value in values:
        shown = f"{type(value)} {copy.copy(value)!r}"
        pickled = pickle.dumps(value)
        out = run_fresh(f"import pickle; value = pickle.loads({pickled!r}); print(type(value), repr(value))")
        assert out == f"{shown}\n"


def test_local_calls_need_no_numpy() -> None:
    run_engine(
        """
        sys.modules["numpy"] = None
        dist, cache = engine()
        blocks = dist.cache_manager.allocate_blocks_cache(DESC)
        dist.cache_manager.copy_blocks(blocks, {0: [1]})
        dist.cache_manager.tensor_views(cache)[0].__dlpack__()
        dist.finalize()
        """
    )
