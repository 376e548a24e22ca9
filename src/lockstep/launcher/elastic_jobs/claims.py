"""The next view of an elastic job's hosts as a file on storage that all of them share.

Who creates the file of view n + 1 has decided it, and the file holds the view, see `election`. So
one host alone may go on, while a vote needs more than half of them.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from ... import messages
from .election import HostView


def claim(folder: Path, view: HostView) -> HostView:
    """Create the file of a view, unless another host has created one of this number; returns the
    view that it holds.

    Raises:
        OSError: the storage does not answer, or has no hard links.
        ValueError: what is there is damaged.
    """
    path = folder / f"view-{view.number}.json"
    draft = folder / f"{path.name}.{socket.gethostname()}-{os.getpid()}-{threading.get_ident()}"
    draft.write_text(messages.encode(view))
    try:
        os.link(draft, path)  # atomic, on NFS as well
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    winner = messages.decode(path.read_text(), HostView)
    if winner.number != view.number:
        raise ValueError(f"expected view {view.number} in {path}, got {winner.number}")
    return winner


class SharedFolder:
    """A folder in that of the run, in which views are claimed once all hosts see it.

    Attributes:
        path: the folder; "" as long as there is none.
        seen_by: the hosts that see it.
        decided: the views that were claimed, by this host or others.
    """

    def __init__(self) -> None:
        self.path = ""
        self.seen_by: set[int] = set()
        self.decided: deque[HostView] = deque()
        self._claiming: set[int] = set()  # the numbers of views

    def make(self, run: Path, existing: str) -> None:
        """Make the folder, or use the `existing` one, and ask anew who sees it."""
        self.seen_by.clear()
        self.path = (
            self.path or existing or str(run / ".hosts" / f"job-{os.getpid()}-{time.time_ns():x}")
        )
        with suppress(OSError):
            Path(self.path).mkdir(parents=True, exist_ok=True)

    def claim(self, folder: str, view: HostView) -> None:
        """Claim a view in a thread, as a server may not answer; another claim of that view waits
        for this one.
        """
        if view.number in self._claiming:
            return
        self._claiming.add(view.number)

        def run() -> None:
            with suppress(OSError, ValueError):
                self.decided.append(claim(Path(folder), view))
            self._claiming.discard(view.number)

        threading.Thread(target=run, name="lockstep claim", daemon=True).start()

    def leave(self, other: str, removes: bool) -> None:
        """At the end of the job, remove the folder and the `other` one that was used before."""
        for folder in {self.path, other} - {""}:
            if removes:
                shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # there is that of another job
                Path(folder).parent.rmdir()
