"""The position of one worker among all workers of a job; data only."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["World"]


@dataclass(frozen=True, slots=True)
class World:
    """The position of one worker in its job: rank, world size, local rank, node and device.

    Attributes:
        rank: 0 ≤ rank < world_size, unique in the job.
        world_size: number of workers in the job.
        local_rank: 0 ≤ local_rank < local_world_size, unique on the node.
        local_world_size: number of workers on this node.
        node: 0 ≤ node < nodes, the number of this host.
        nodes: number of hosts in the job.
        source: the launcher from whose variables it was read ("alone", "torchrun", "lockstep", …).
        device: the device on which this worker computes, e.g. "cpu" or "cuda:3"; `lockstep.init()`
            sets it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    nodes: int = 1
    source: str = "alone"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for index, size in (
            ("rank", "world_size"),
            ("local_rank", "local_world_size"),
            ("node", "nodes"),
        ):
            i = getattr(self, index)
            n = getattr(self, size)
            if n < 1 or not 0 <= i < n:
                raise ValueError(
                    f"{index}: expected 0 <= {index} < {size} = {n}, got {i} (from {self.source})"
                )

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0 of the job."""
        return self.rank == 0
