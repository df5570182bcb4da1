"""NIXL within one process: an agent that reads from itself, over UCX.

Without its progress thread, which would use a core during the turns of others. Not for: two processes (``between``),
which is its main use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comparison import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed

NOTE = "it reads from itself; the request is made before the clock starts, as it can be used again"


def entries(bed: Bed) -> Iterator[Entry]:
    """One agent, one prepared READ of the whole list."""
    # The wheel itself: `nixl` asks torch which CUDA it was built for, and would want another wheel for that.
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    agent = nixl_agent("bed", nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    for words in {id(words): words for words in (*bed.src_words, *bed.dst_words)}.values():
        agent.register_memory([(words.ctypes.data, words.nbytes, 0, "")], mem_type="DRAM")
    blocks = bed.moves.tolist()
    local = agent.get_xfer_descs([(dst, bed.block, 0) for _, dst in blocks], mem_type="DRAM")
    remote = agent.get_xfer_descs([(src, bed.block, 0) for src, _ in blocks], mem_type="DRAM")
    handle = agent.initialize_xfer("READ", local, remote, "bed")

    def read() -> None:
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        assert state == "DONE", state

    yield Entry("nixl", read, "UCX, to itself, no progress thread", 1, note=NOTE)
