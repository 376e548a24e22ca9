"""Commands and Python code in the documentation are run or checked, and each check can fail."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lockstep
from support.documented_code import (
    PAGES,
    ROOT,
    Block,
    check_block,
    check_command,
    check_inline,
    is_program,
    read_blocks,
    read_inline,
    subcommands,
)

BLOCKS = [
    block
    for page in PAGES
    for block in read_blocks(page.relative_to(ROOT).as_posix(), page.read_text())
]
PROGRAMS = {
    block.text: f"{block.page}:{block.line}"
    for block in reversed(BLOCKS)  # of equal programs, the name of the first
    if block.language == "python" and not block.not_run and is_program(block.text)
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_and_code_fit_the_package(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    problems = [(block.line, check_block(block)) for block in BLOCKS if block.page == name]
    assert [f"{name}:{line}: {problem}" for line, found in problems for problem in found] == []
    assert [
        problem for code in read_inline(page.read_text()) for problem in check_inline(code)
    ] == []


def test_examples_in_help_texts_fit_the_options() -> None:
    texts = {name: parser.format_help() for name, parser in subcommands().items()}
    lines = [line.strip() for text in texts.values() for line in text.splitlines()]
    # a remark follows after several spaces
    examples = [
        re.split(r" {2,}", line)[0] for line in lines if re.match(r"(?:lockstep|srun) ", line)
    ]
    assert len(examples) >= 30 and {example.split()[1] for example in examples} > {*texts}
    assert [
        problem for example in examples for problem in check_command(example.partition(" | ")[0])
    ] == []


@pytest.mark.leaks("matplotlib keeps its fonts open")
@pytest.mark.parametrize("text", PROGRAMS, ids=PROGRAMS.values())
def test_whole_programs_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "digits",
        "fashion_mnist",
    ):  # images of the same shape, without a download and in less time
        monkeypatch.setattr(lockstep.data, name, lambda: lockstep.data.synthetic(train=64, test=16))
    exec(compile(text, "<documentation>", "exec"), {"__name__": "__main__"})


def test_whole_programs_are_found() -> None:
    assert "README.md" in " ".join(PROGRAMS.values()) and len(PROGRAMS) >= 3
    assert is_program("import lockstep\nfor x in range(3):\n    print(x)\n")
    assert not is_program("import lockstep\nlockstep.evaluate(model)\n")


@pytest.mark.parametrize(
    ("language", "text", "problem"),
    [
        ("console", "lockstep run -np 2 --fast train.py", "--fast train.py: option: expected one that"),
        ("console", "$ lockstep train --batch 3\nsome output", "--batch"),
        ("console", "lockstep fly", "command: expected one of"),
        ("console", "lockstep run -np many train.py", "workers: expected"),
        ("console", "lockstep train --epochs few", "epochs: expected"),
        ("console", "lockstep run examples/none.py", "no file examples/none.py"),
        ("console", "python benchmarks/none.py", "no file benchmarks/none.py"),
        ("console", "torchrun --workers 2 train.py", "unrecognized arguments"),
        ("console", "srun -n 2 lockstep run --fast train.py", "--fast"),
        ("console", "LOCKSTEP_FAST=1 python train.py", "no variable LOCKSTEP_FAST"),
        ("console", "make coffee", "no target coffee"),
        ("console", "pip install 'lockstep-train[gold]'", "no extra gold"),
        ("console", "kubectl apply", "nothing checks this program"),
        ("bash", "lockstep run train.py", "a block of bash"),
        ("yaml", "run: python -m lockstep run --fast train.py", "--fast"),
        ("yaml", "run: [", "while parsing"),
        ("", "lockstep run train.py", "a block of no language"),
        ("text", "$ lockstep run train.py", "a command or code in a text block"),
        ("python", "lockstep.trainer", "lockstep has no attribute 'trainer'"),
        ("python", "from lockstep.data import cifar100", "has no attribute 'cifar100'"),
        ("python", "import lockstep.fast", "No module named 'lockstep.fast'"),
        ("python", "lockstep.Loader(data, 8, shards=2)", "unexpected keyword argument 'shards'"),
        ("python", "lockstep.Loader(data)", "missing a required argument: 'global_batch_size'"),
        ("python", "c = lockstep.init()\nif c.rank:\n    c.first()", "Communicator has no attribute 'first'"),
        ("python", "with comm.split(color=1, kye=2) as half:\n    pass", "unexpected keyword argument 'kye'"),
        ("python", "with comm.split(1) as half:\n    half.scater(x)", "Communicator has no attribute 'scater'"),
        ("python", "def f(x):\n    return use(lambda: comm.reduce(x, opp='sum'))", "unexpected keyword argument 'opp'"),
        ("python", "train(", "was never closed"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_fit_is_found(language: str, text: str, problem: str) -> None:
    (found,) = check_block(Block("page.md", 1, language, text))
    assert problem in found


def test_a_marked_block_needs_no_check_of_its_commands() -> None:
    text = (
        "Text.\n<!-- not run: needs a cluster -->\n```console\nkubectl "
        "apply\n```\n\n```console\nkubectl get\n```\n"
    )
    marked, other = read_blocks("page.md", text)
    assert (marked.not_run, marked.line, other.line) == ("needs a cluster", 4, 8)
    assert check_block(marked) == [] and len(check_block(other)) == 1
    python = Block("page.md", 1, "python", "lockstep.trainer", not_run="needs a GPU")
    assert len(check_block(python)) == 1


def test_a_mark_needs_a_reason_directly_above() -> None:
    for text in (
        "<!-- not run: -->\n```console\nls\n```\n",
        "<!-- not run: x -->\n\n```console\nls\n```\n",
    ):
        (block,) = read_blocks("page.md", text)
        assert block.not_run == ""


def test_inline_code_is_checked() -> None:
    text = (
        "Use `lockstep run --fast`.\n\n| Other | Ours |\n|---|---|\n| `Trainer(..., x=1)` | "
        "`Trainer(..., out=1)` |\n"
    )
    assert [problem for code in read_inline(text) for problem in check_inline(code)] == [
        "lockstep run --fast: no option --fast",
        "line 1: Trainer(): got an unexpected keyword argument 'out'",
    ]
    assert check_inline("lockstep.evaluat(model)") == [
        "line 1: lockstep has no attribute 'evaluat'"
    ]
    assert check_inline("lockstep run --restarts N") == check_inline("some words") == []
