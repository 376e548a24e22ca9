"""Programs of the documentation that promise the same at any number of workers keep that
promise.
"""

from __future__ import annotations

from typing import Any

import lockstep
from support.documented_code import ROOT, is_program, read_blocks
from support.pool import Pool


def programs_of(page: str) -> list[str]:
    blocks = read_blocks(page, (ROOT / page).read_text())
    return [block.text for block in blocks if block.language == "python" and is_program(block.text)]


def trained(program: str) -> str:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "<documentation>", "exec"), names)
    return lockstep.fingerprint(names["model"], names["optimizer"])


def test_the_language_model_has_the_same_bits_on_one_worker_and_on_two(pool: Pool) -> None:
    (program,) = programs_of("docs/language-models.md")
    assert "virtual_workers=4" in program
    (alone,) = pool.run(trained, program, workers=1)
    assert pool.run(trained, program, workers=2) == [alone, alone]


def test_without_virtual_workers_its_bits_depend_on_their_number(pool: Pool) -> None:
    (program,) = programs_of("docs/language-models.md")
    program = program.replace("virtual_workers=4", "virtual_workers=None")
    assert pool.run(trained, program, workers=2)[0] != pool.run(trained, program, workers=1)[0]
