"""MPI's verbs over one process group: `Communicator`, and `init()`, which finds the one of all workers."""

from .communicator import Communicator
from .joining import init, pick_device
from .operations import Op
from .requests import Request, wait_all

__all__ = ["Communicator", "Op", "Request", "init", "pick_device", "wait_all"]
