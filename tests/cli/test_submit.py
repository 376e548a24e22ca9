"""``lockstep submit``: when it only prints, when it asks, and what it hands over to a scheduler's
own tool.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.submit.description import check_script_is_shared
from lockstep.submit.options import parse_time
from support.command import Here

SLURM = ("submit", "--to", "slurm")


@pytest.fixture
def project(folder: Path) -> Path:
    """A folder with a program, from which no scheduler can be reached."""
    (folder / "train.py").write_text("")
    return folder


@pytest.fixture(autouse=True)
def tools(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the only schedulers' tools that there are."""
    found = tmp_path_factory.mktemp("tools")
    for name in ("sh", "cat"):
        (found / name).symlink_to(f"/bin/{name}")
    monkeypatch.setenv("PATH", str(found))
    return found


def add_tool(tools: Path, name: str, script: str) -> None:
    (tools / name).write_text(f"#!/bin/sh\n{script}\n")
    (tools / name).chmod(0o755)


def shared(project: Path) -> tuple[str, str]:
    return "--shared-folder", str(project)  # the tests' folder is in /tmp


def test_the_file_is_printed_and_nothing_is_asked_or_submitted(
    here: Here, project: Path, tools: Path
) -> None:
    add_tool(tools, "sbatch", "touch called; exit 1")
    ended = here(*SLURM, *shared(project), "--nodes", "2", "train.py")
    assert ended.returncode == 0
    assert ended.stdout.startswith("#!/bin/bash\n# Made by: lockstep submit --to slurm --nodes 2")
    assert sys.executable in ended.stdout and f"--chdir={project}" in ended.stdout
    assert ended.stderr == (
        "lockstep submit: nothing is submitted. Save it as train.sbatch, and run `sbatch "
        "train.sbatch`, or add --yes.\n"
    )
    assert sorted(path.name for path in project.iterdir()) == ["mine.py", "train.py"]


def test_the_file_is_written_where_it_is_told(here: Here, project: Path) -> None:
    ended = here(*SLURM, *shared(project), "--output", "job.sh", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "It is in job.sh, and run `sbatch job.sh`" in ended.stderr
    text = (project / "job.sh").read_text()
    assert here(*SLURM, *shared(project), "train.py").stdout == text
    assert (
        here(*SLURM, *shared(project), "--output", "job.sh", "train.py").returncode == 0
    )  # its own file
    ended = here(*SLURM, *shared(project), "--output", "train.py", "train.py")
    assert (
        ended.returncode == 2
        and "--output: expected a file that lockstep submit has made" in ended.stderr
    )
    assert (project / "train.py").read_text() == ""


def test_with_yes_the_tool_checks_and_gets_the_file(here: Here, project: Path, tools: Path) -> None:
    add_tool(tools, "sbatch", 'echo "$@" >> calls; echo Submitted batch job 7')
    ended = here(*SLURM, *shared(project), "--yes", "--name", "big", "train.py")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Submitted batch job 7\n", "")
    assert (project / "calls").read_text() == "--test-only big.sbatch\nbig.sbatch\n"
    assert (project / "logs").is_dir()
    assert (project / "big.sbatch").read_text().startswith("#!/bin/bash")


def test_what_the_tool_refuses_is_one_line(here: Here, project: Path, tools: Path) -> None:
    add_tool(
        tools, "sbatch", 'echo "sbatch: error: allocation failure: Invalid account" >&2; exit 1'
    )
    ended = here(*SLURM, *shared(project), "--yes", "--account", "x", "train.py")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == (
        "lockstep submit: error: Slurm would not run this job: Invalid account. `sinfo` shows "
        "what there is. The file is train.sbatch.\n"
    )
    add_tool(tools, "kubectl", 'echo "no matches for kind \\"JobSet\\"" >&2; exit 1')
    ended = here(
        "submit", "--to", "kubernetes", "--kind", "jobset", "--image", "i", "--yes", "train.py"
    )
    assert ended.returncode == 1
    assert (
        'Kubernetes would not run this job: no matches for kind "JobSet". `kubectl config'
        in ended.stderr
    )


def test_kubernetes_checks_and_gets_the_manifest(here: Here, project: Path, tools: Path) -> None:
    add_tool(tools, "kubectl", 'echo "$@" >> calls; echo done')
    ended = here("submit", "--to", "kubernetes", "--yes", "--image", "i", "-x", "TOKEN", "train.py")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert (project / "calls").read_text().splitlines() == [
        "apply -f train.yaml --dry-run=server",
        "apply -f train.yaml",
    ]


@pytest.mark.parametrize(("answer", "submits"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_it_asks(
    here: Here,
    project: Path,
    tools: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    submits: bool,
) -> None:
    add_tool(tools, "sbatch", "echo called >> calls")
    questions: list[str] = []
    monkeypatch.setattr("builtins.input", lambda text: questions.append(text) or answer)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True, raising=False)
    assert here(*SLURM, *shared(project), "train.py").returncode == 0
    assert questions == ["\nWrite train.sbatch, and run `sbatch train.sbatch`? [y/N] "]
    assert (project / "calls").exists() == submits
    assert here(*SLURM, *shared(project), "--dry-run", "train.py").returncode == 0
    (tools / "sbatch").unlink()
    assert here(*SLURM, *shared(project), "train.py").returncode == 0
    assert len(questions) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train.py", "--to: expected a scheduler: slurm, kubernetes, got nothing"),
        ("--to slrm train.py", "--to: expected one of kubernetes, slurm, got 'slrm'. Did you mean"),
        (
            "--to slurm --image x train.py",
            "--image: expected not to be given for Slurm, which has --partition,",
        ),
        (
            "--to slurm --yes --dry-run train.py",
            "--dry-run: expected either --yes or --dry-run, got both",
        ),
        ("--to slurm nothere.py", "script: expected an existing Python file, got "),
        ("--to slurm train.py", "script: expected a file on a folder that all nodes share, got "),
        (
            "--to slurm --shared-folder /home train.py",
            "script: expected a file in the shared folder /home, got ",
        ),
        (
            "--to slurm --fast train.py",
            "option: expected one that `lockstep submit --help` lists, got '--fast'",
        ),
        ("--to slurm", "script: expected a Python file or, with -m, a module, got none"),
        (
            "--to kubernetes --yes --image i train.py",
            "--to: expected a scheduler that can be reached from here: Kubernetes is by "
            "`kubectl`, got no kubectl on the PATH. Run it where jobs are submitted from; "
            "--dry-run prints the file anywhere.",
        ),
    ],
)
def test_bad_input_is_one_line(here: Here, project: Path, words: str, said: str) -> None:
    ended = here("submit", *words.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert said in ended.stderr
    assert not list(project.glob("*.sbatch"))


# --- Pure
# --------------------------------------------------------------------------------------------------

MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
tmpfs /scratch tmpfs rw 0 0
nas:/home /home nfs4 rw 0 0
nas:/w /my\\040work nfs4 rw 0 0
"""


def test_a_folder_of_one_host_alone_is_refused() -> None:
    def check(path: str, shared: str = "") -> None:
        check_script_is_shared(Path(path), Path(path).parent, shared, MOUNTS)

    check("/home/me/train.py")
    check("/my work/train.py")
    check("/srv/train.py")  # the host may be the one that exports it
    check("/tmp/x/train.py", shared="/tmp/x")
    for path, reason in (("/tmp/train.py", "/tmp"), ("/scratch/a/train.py", "tmpfs")):
        with pytest.raises(
            ConfigError,
            match=rf"where each host has a folder of its own \({reason}\)\. Move it there",
        ):
            check(path)
    with pytest.raises(ConfigError, match="in the shared folder /home, got /srv"):
        check("/srv/train.py", shared="/home")


def test_times() -> None:
    times = {
        "90m": 5400,
        "4h": 14400,
        "2d12h": 216000,
        "4:00:00": 14400,
        "1-12:30:15": 131415,
        "1h30m": 5400,
    }
    assert {text: parse_time("time", text) for text in times} == times
    for text in ("", "4", "0m", "00:00:30", "4x", "99:99:99", "-1h", "9999d"):
        with pytest.raises(ConfigError, match="time limit"):
            parse_time("time", text)


def test_nodes_of_a_partition_are_added_up(here: Here, project: Path, tools: Path) -> None:
    lines = "gpu*|2|1-00:00:00\ngpu*|3|1-00:00:00\ncpu|10|infinite\nshort|4|30:00\n"
    add_tool(tools, "sinfo", f"cat <<'END'\n{lines}END")
    place = shared(project)
    assert here(*SLURM, *place, "--nodes", "5", "--time", "1d", "train.py").returncode == 0
    assert (
        "at most 5, the nodes of partition gpu"
        in here(*SLURM, *place, "--nodes", "6", "train.py").stderr
    )
    assert (
        here(
            *SLURM, *place, "--partition", "cpu", "--nodes", "10", "--time", "9d", "train.py"
        ).returncode
        == 0
    )
    assert "at most 30:00, the limit of partition short, got 00:31:00" in (
        here(*SLURM, *place, "--partition", "short", "--time", "31m", "train.py").stderr
    )
    assert (
        "one of gpu, cpu, short, got 'gpus'"
        in here(*SLURM, *place, "--partition", "gpus", "train.py").stderr
    )
