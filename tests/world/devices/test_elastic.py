"""An elastic job on an accelerator played by the toy device goes on after a loss, with the bits of
one on the CPU.
"""

from __future__ import annotations

import os
from pathlib import Path

from support import toy_device, warm_python

SUPPORT = Path(__file__).parents[2] / "support"


def test_a_loss_changes_no_bit(tmp_path: Path, warm: None) -> None:
    variables = {
        **os.environ,
        **toy_device.ONE_EACH,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(SUPPORT.parent),
    }
    said = []
    for device in ("toy", "cpu"):
        program = [SUPPORT / "toy_elastic_program.py", device, tmp_path / device]
        done = warm_python.run(
            ["-m", "lockstep", "run", "--elastic", "1:2", "-np", 2, *program], tmp_path, variables
        )
        assert done.returncode == 0, done.stderr
        assert "rank 1 was lost (killed by SIGKILL); 1 worker goes on" in done.stderr
        said.append((tmp_path / device).read_text())
    assert said[0].startswith("1 worker on toy: ") and said[1] == said[0].replace("toy", "cpu")
