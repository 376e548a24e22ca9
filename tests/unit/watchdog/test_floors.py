"""The files of the watchdog stand on floors: each imports only those below."""

from __future__ import annotations

from pathlib import Path

import lockstep
from support import layers

# The lowest first. What is on one floor knows nothing of its neighbours, but for the names of
# types.
FLOORS = (
    ("call_sites", "report", "program", "gloo_waits"),
    ("report_text", "signatures", "swaps", "states", "rendezvous", "last_rank", "call_order"),
    ("mismatch", "deadlock", "diagnosis", "shared_state"),
    ("group_peers",),
    ("preflight", "monitor", "cross_host", "delivery", "rounds", "batch_loops"),
    ("monitor_thread", "process_groups"),
    ("session",),
    ("group_creation",),
    ("patches",),
)
PACKAGE = "lockstep.watchdog."


def test_each_file_imports_only_those_of_the_floors_below() -> None:
    modules = layers.read_package(Path(lockstep.__file__).parent)
    own = {
        name.removeprefix(PACKAGE): module
        for name, module in modules.items()
        if name.startswith(PACKAGE)
    }
    floor_of = {name: floor for floor, names in enumerate(FLOORS) for name in names}
    assert own.keys() == floor_of.keys()
    wrong = [
        f"{name} imports {target}"
        for name, module in own.items()
        for used in module.imports
        if used.runtime
        and (target := used.target.removeprefix(PACKAGE).partition(".")[0]) in floor_of
        if used.target.startswith(PACKAGE) and floor_of[target] >= floor_of[name]
    ]
    assert wrong == []
