"""Files that give a training program to a scheduler: one complete, commented file for each of those
in `SCHEDULERS`.

A further scheduler is a class as `Scheduler` describes it, a line here, and a group of options in
`SubmitOptions`.
"""

from __future__ import annotations

from ..registry import Registry
from .description import Job, Scheduler, hand_over
from .options import SubmitOptions

__all__ = ["SCHEDULERS", "Job", "Scheduler", "SubmitOptions", "hand_over"]

SCHEDULERS = Registry(
    "to",
    {"slurm": "lockstep.submit.slurm:Slurm", "kubernetes": "lockstep.submit.kubernetes:Kubernetes"},
)
"""The schedulers that `lockstep submit` writes files for: classes that make a `Scheduler` without
arguments.
"""
