"""Which workers of prefill a worker of decode reads.

vLLM gives each tensor-parallel rank an equal share of the KV heads. With more ranks than heads, several consecutive
ranks hold the same head. A latent cache (MLA) counts as one head. With pipeline parallelism, each stage holds some
layers, and a stage of decode reads the same stage of prefill.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Shard", "Source", "engine_name", "heads_of", "unique_id", "vllm_of"]


@dataclass(frozen=True)
class Source:
    """What a rank of decode has to do with one rank of prefill."""

    rank: int  # the rank of prefill
    readers: int  # number of decode ranks that read it, or that report for it
    reads: bool  # whether this rank reads blocks of it; otherwise it only reports that prefill may free them


@dataclass(frozen=True)
class Shard:
    """The part of the KV cache that one worker holds."""

    rank: int  # the tensor-parallel rank of the worker
    ranks: int  # the tensor-parallel size
    total_heads: int  # number of KV heads of the model
    stage: int = 0  # the pipeline-parallel rank
    stages: int = 1  # the pipeline-parallel size

    @property
    def worker(self) -> int:
        """The number of the worker in its vLLM."""
        return self.stage * self.ranks + self.rank

    @property
    def workers(self) -> int:
        """The number of workers of its vLLM."""
        return self.stages * self.ranks

    @property
    def heads(self) -> range:
        """The KV heads that the worker holds."""
        return heads_of(self.rank, self.ranks, self.total_heads)

    def sources(self, remote_ranks: int) -> list[Source]:
        """Return the ranks of a stage of prefill, ``remote_ranks`` in all, that this worker reads or only frees.

        Each rank of prefill gets at least one reader, so that its blocks are freed. Readers are spread over the ranks
        that hold copies of one head.
        """
        reads = [_reads(Shard(reader, self.ranks, self.total_heads), remote_ranks) for reader in range(self.ranks)]
        found = []
        for remote in range(remote_ranks):
            readers = sum(remote in read for read in reads)
            if remote in reads[self.rank]:
                found.append(Source(remote, readers, reads=True))
            elif not readers and remote % self.ranks == self.rank:
                found.append(Source(remote, 1, reads=False))
        return found


def engine_name(engine_id: str, worker: int) -> str:
    """Return the name of the engine of a worker. Decode links to no engine with another name."""
    return f"{engine_id}/{worker}"


def vllm_of(name: str) -> str:
    """Return the engine id of the vLLM of a worker, from the name of its engine."""
    return name.rpartition("/")[0]


def unique_id(engine_id: str, replica: int) -> str:
    """Return an engine id that differs for each data-parallel rank.

    vLLM appends the rank itself, except if the engine runs in the process of the program.
    """
    ending = f"_dp{replica}"
    return engine_id if not replica or engine_id.endswith(ending) else engine_id + ending


def heads_of(rank: int, ranks: int, total_heads: int) -> range:
    """Return the KV heads that a rank holds.

    Raises:
        ValueError: neither number divides the other.
    """
    if total_heads % ranks == 0:
        share = total_heads // ranks
        return range(rank * share, (rank + 1) * share)
    if ranks % total_heads == 0:
        head = rank // (ranks // total_heads)
        return range(head, head + 1)
    raise ValueError(f"{total_heads} KV heads cannot be split over {ranks} ranks")


def _reads(shard: Shard, remote_ranks: int) -> set[int]:
    """Return the ranks of prefill that hold the heads of a shard, one for each head."""
    total_heads = shard.total_heads
    copies = max(1, remote_ranks // total_heads)
    read = set()
    for head in shard.heads:
        holders = [remote for remote in range(remote_ranks) if head in heads_of(remote, remote_ranks, total_heads)]
        read.add(holders[shard.rank % copies])
    return read
