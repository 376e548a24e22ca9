"""MPI-style operations over one process group: `Communicator`, and `init()`, which joins the job of
all workers.
"""

from .collectives import Op
from .communicator import Communicator
from .initialization import init, pick_device
from .requests import Request, synchronize, wait_all

__all__ = ["Communicator", "Op", "Request", "init", "pick_device", "synchronize", "wait_all"]
