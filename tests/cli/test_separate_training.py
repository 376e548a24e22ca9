"""Workers that train without exchanging anything are told so: nobody has prepared the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.command import Here

PROGRAM = """
import torch
import lockstep

comm = lockstep.init()
{exchange}
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""

MESSAGE = "comm.send(torch.ones(1), 1) if comm.rank == 0 else comm.recv(torch.ones(1), 0)"


@pytest.mark.parametrize(
    ("exchange", "workers", "is_said"),
    [("", 2, True), ("comm.barrier()", 2, False), (MESSAGE, 2, False), ("", 1, False)],
    ids=["nothing", "a collective", "a message", "one worker"],
)
def test_a_first_update_without_any_exchange(
    exchange: str, workers: int, is_said: bool, tmp_path: Path, here: Here
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(exchange=exchange))
    ended = here("run", "-np", workers, program)
    assert ended.returncode == 0, ended.stderr
    said = "the 2 workers have exchanged nothing: each trains a model of its own"
    assert (ended.stdout + ended.stderr).count(said) == is_said
