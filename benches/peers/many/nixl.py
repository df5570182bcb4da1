"""NIXL: registering many pieces of memory.

Not for: sending the agent's metadata to a peer, which must have it before it can use the memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comparison import Entry
from many.scene import REACH, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

NOTE = (
    "a linked peer has to be sent the agent's metadata again before it can use them: told is with that, in one process"
)


def entries(scene: Scene) -> Iterator[Entry]:
    """``register_memory`` for each piece, or once with the list of all. Deregistration is included."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: PLC0415

    quiet = nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    agent, peer = nixl_agent("many", quiet), nixl_agent("peer", quiet)
    pieces = scene.pieces()
    lists = [[(int(piece.ctypes.data), scene.size, 0, "")] for piece in pieces]
    scene.ends.append(lambda: pieces.fill(0))  # held until the end

    def each() -> None:
        for known in [agent.register_memory(one, mem_type="DRAM") for one in lists]:
            agent.deregister_memory(known)

    def together() -> None:
        agent.deregister_memory(agent.register_memory([one[0] for one in lists], mem_type="DRAM"))

    def told() -> None:
        known = agent.register_memory([one[0] for one in lists], mem_type="DRAM")
        peer.add_remote_agent(agent.get_agent_metadata())
        peer.remove_remote_agent("many")
        agent.deregister_memory(known)

    if scene.op == REACH:
        yield Entry("nixl", each, "register_memory", note=NOTE)
    else:
        yield Entry("nixl", together, "register_memory, a list", note=NOTE)
        yield Entry("nixl", told, "register_memory, a list, and a peer told", note=NOTE)
