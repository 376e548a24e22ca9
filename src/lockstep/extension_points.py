"""The places where an extension adds to the core: the core knows it by name, and imports it when it
is needed.
"""

from __future__ import annotations

from .registry import Registry

EXTENSION_POINTS = Registry(
    "extension point",
    {
        # () -> None: in each worker of a job with an emulated network, before its program
        "start of a worker on an emulated network": (
            "lockstep.emulation.delayed_groups:install_from_environment"
        ),
        # (step, every) -> Guard: of a Trainer with cross_check=
        "cross-check of a training": "lockstep.proof.cross_check:make_guard",
        # (step, on_spike) -> Guard: of a Trainer with on_spike=
        "spikes of a training": "lockstep.proof.on_spike:make_guard",
        # (run directory, number of the trainer, fingerprint_every) -> RunGuard: of a Trainer that
        # keeps a ledger
        "ledger of a run": "lockstep.proof.recorder:Recorder",
        # (path of the request, number of the trainer or None) -> RunGuard: of a Trainer that only
        # replays
        "replay of a run": "lockstep.proof.replaying:Replay",
        # (folder, network) -> str: in the launcher of such a job, after it; the text is shown
        "summary of an emulated network": "lockstep.emulation.link_clock:emulation_summary",
    },
)
