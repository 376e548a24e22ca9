"""The README's program, started as the README says, prints what the README shows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from support import warm_python
from support.command import Here
from support.documented_code import ROOT, read_blocks

FINGERPRINT = re.compile(r"\b[0-9a-f]{8}$")


@pytest.mark.timeout(400)  # ten seconds of a processor, which a busy host has seldom
def test_the_readmes_program_has_the_same_result_on_one_worker_and_on_two(
    here: Here, tmp_path: Path
) -> None:
    blocks = read_blocks("README.md", (ROOT / "README.md").read_text())
    (program,) = [block.text for block in blocks if block.language == "python"]
    (terminal,) = [block.text for block in blocks if block.text.startswith("$ python train.py\n")]
    commands = [line for line in terminal.splitlines() if line.startswith("$")]
    shown = [line for line in terminal.splitlines() if not line.startswith(("$", "…"))]
    assert commands == ["$ python train.py", "$ lockstep run -np 2 train.py"]

    script = tmp_path / "train.py"
    script.write_text(program)
    one = warm_python.run(
        [str(script)], tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, timeout=250.0
    )
    two = here("run", "-np", 2, script)
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    printed = [ended.stdout.splitlines()[-1] for ended in (one, two)]

    assert printed[1] == f"[0] {printed[0]}"
    # the fingerprint depends on the type of the processor, which may not be that of the README
    assert [FINGERPRINT.sub("", line) for line in printed] == [
        FINGERPRINT.sub("", line) for line in shown
    ]
    assert all(map(FINGERPRINT.search, printed + shown)) and shown[1] == f"[0] {shown[0]}"
