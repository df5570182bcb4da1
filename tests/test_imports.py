"""What an import of the package opens and loads: no thread, no file, no array library."""

from __future__ import annotations

from memory import run_fresh


def test_importing_opens_nothing_and_loads_no_array_library() -> None:
    run_fresh(
        """
        import os, sys, threading
        before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
        from llm_datadist import *
        import llm_datadist.tensors, llm_datadist_v1, llm_datadist_v1.kv_cache_manager
        import llm_datadist.v2.llm_utils, llm_datadist.v2.config
        import llm_datadist.v2.llm_types, llm_datadist.v2.llm_datadist
        import llm_datadist.data_type as data_type
        LLMConfig().generate_options()
        LLMDataDist(LLMRole.PROMPT, 1)
        TensorDesc(DataType.DT_FLOAT, [1])
        assert not {"numpy", "torch"} & set(sys.modules), "an array library was imported"
        assert threading.active_count() == 1
        if os.path.isdir("/proc/self/task"):
            assert len(os.listdir("/proc/self/task")) == 1, "a native thread was started"
            assert set(os.listdir("/proc/self/fd")) == before, "a file was opened"
        assert len(data_type.dtype_to_np_dtype) == 14
        assert "numpy" in sys.modules, "imported when it is asked for"
        """
    )


def test_an_import_loads_no_large_module_of_the_standard_library() -> None:
    """`typing`, `logging` and `threading` cannot be avoided, so what they import is not counted."""
    run_fresh(
        """
        import atexit, collections.abc, contextlib, enum, functools, io, logging, sys, textwrap, threading, time, typing
        before = set(sys.modules)
        import llm_datadist
        added = set(sys.modules) - before
        assert "llm_datadist.kv_layout" in added, "this test looked at nothing"
        large = {"ast", "asyncio", "dataclasses", "inspect", "json", "numpy", "pathlib", "selectors", "socket", "torch"}
        assert not large & added, large & added
        """
    )


def test_local_calls_need_no_numpy() -> None:
    run_fresh(
        """
        import sys
        from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
        manager = dist.cache_manager
        cache = manager.allocate_blocks_cache(CacheDesc(1, [4, 100], DataType.DT_INT8))
        manager.copy_blocks(cache, {0: [1]})
        manager.tensor_views(cache)[0].__dlpack__()
        dist.finalize()
        assert "numpy" not in sys.modules
        """
    )
