"""Files that give a training program to a scheduler: one complete, commented file for each of those in `SCHEDULERS`."""

from __future__ import annotations

from ..registry import Registry
from .description import Job, Scheduler, hand_over

__all__ = ["SCHEDULERS", "Job", "Scheduler", "hand_over"]

SCHEDULERS = Registry(
    "to",
    {
        "slurm": "lockstep.submit.slurm:Slurm",
        "kubernetes": "lockstep.submit.kubernetes:Kubernetes",
        "skypilot": "lockstep.submit.skypilot:SkyPilot",
        "dstack": "lockstep.submit.dstack:Dstack",
    },
)
"""The schedulers that `lockstep submit` writes files for: classes that make a `Scheduler` without arguments."""
