"""Every option of `run`, `train`, `horovodrun` and `submit`: what a command line becomes, here and
on other hosts.

`tests/data/golden/command_lines.txt` has each command line of the table, the values that it sets,
what the launchers of other hosts get, and the errors. UPDATE_GOLDEN=1 writes it anew.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from lockstep import environment, launcher
from lockstep.cli.main import main
from lockstep.launcher import start
from lockstep.launcher.elastic_jobs.elastic_node import JobSpec
from lockstep.launcher.remote_hosts.remote_command import (
    assign_workers,
    host_commands,
    remote_environment,
    requested_variables,
)
from lockstep.launcher.worker_options import WorkerOptions
from lockstep.training import training_run
from support import golden_texts
from support.documented_code import subcommands

SOME_VARIABLES = {"LOCKSTEP_DEBUG": "1", "MINE": "m", "PATH": "p", "PYTHONPATH": "q"}

RUN = """
train.py
train.py --lr 0.1 -- -np 3
-- train.py --lr 0.1
-np 4 train.py
-n 4 train.py
--nproc=4 train.py
--num-proc 4 train.py
-np auto train.py
-m pack.train a b
--module pack.train
-np 2 --threads 3 --restarts 2 --start-method spawn --preload numpy,yaml --grace 7.5 train.py
-np 2 --as-horovod --resume latest train.py
--elastic 2:8 -np 4 train.py
--elastic 3 train.py
-H a:4,b:4 train.py
--hosts me@a,[fe80::1]:2 train.py
--hostfile hosts train.py
-hostfile hosts -np 3 train.py
-H a:2,b --ssh-port 2222 --identity key --remote-python /far/python --start-timeout 9 train.py
-H a:2,b -p 2222 -i key --dry-run train.py
-H a:2,b:3 -x MINE -x OTHER=1=2 --env THIRD= --resume runs/one train.py
-H a:2,b -m -np 3 --threads 2 --restarts 1 --start-method spawn --preload x,y --as-horovod --grace 3 pack.train a
-H a:2,b --network-interface ib0 --metrics-port 9400 --metrics-host 0.0.0.0 --metrics-file job.prom --stall-timeout 7 --strict --timeline records train.py 'a b'
-H a:2,b --no-watchdog --output-dir out --tee --no-prefix --quiet train.py
-H a:2,b:3 --elastic 2:8 -np 4 --threads 2 --timeline records --stall-timeout 60 train.py --lr 1
-H a:2,b:3 --elastic 2:4 -m pack.train
--nnodes 2 --node-rank 1 --master-addr a --master-port 1234 -np 2 train.py
--nodes 2 --master-addr a train.py
--nodes auto train.py
--elastic 2:8 --master-addr a -np 2 train.py
--as-host --nnodes 2 --node-rank 1 -np 2 --elastic 2:8 --elastic-start 4 train.py
-np 4 --heartbeat-timeout 9 --launcher-timeout 60 train.py
-H a:2,b:3 --elastic 2:8 --heartbeat-timeout 9 --launcher-timeout 60 train.py
-H a:2,b:3 --elastic 2:8 --pause-timeout inf --launcher-timeout inf train.py
-np 4 --network '2 hosts, 25Gbit' train.py
-np 4 --output-dir out train.py
-np 4 -q --debug --debug-rank 1 train.py

-np 0 train.py
-np two train.py
-np2 train.py
--num-proc two train.py
-n 1.5 train.py
-np
--threads 0 train.py
--restarts -1 train.py
--restarts=-1 train.py
--grace soon train.py
--grace -1 train.py
--grace=-1 train.py
--start-timeout nan train.py
--heartbeat-timeout 0 train.py
--launcher-timeout never train.py
--pause-timeout 60 train.py
--elastic 2:8 --pause-timeout 0 train.py
--start-method fork train.py
--elastic 4:2 train.py
--elastic 0:2 train.py
--elastic 2:8 -np 9 train.py
--elastic 2:8 --restarts 1 train.py
--elastic 2:8 --no-watchdog train.py
--elastic 2:8 --debug-rank 0 train.py
--elastic 2:8 --output-dir out train.py
-H a:0 train.py
--hosts a,a train.py
-H a --hostfile hosts train.py
--hostfile nowhere train.py
-H a..b:2 train.py
-H a --nnodes 2 train.py
-H a --nodes auto train.py
-H a:2,b:1 -np 4 train.py
-H a -i nowhere train.py
-H a -p 70000 train.py
--nnodes 0 train.py
--nnodes few train.py
--nnodes 2 --master-addr a..b train.py
--nnodes 2 train.py
--nnodes 2 --node-rank 2 --master-addr a train.py
--node-rank 1 train.py
--nodes auto --node-rank 1 train.py
--nodes auto --master-addr a train.py
--master-port 0 train.py
--dry-run train.py
--network fast train.py
--network '2 hosts, 25Gbit' -H a train.py
--network '2 hosts, 25Gbit' --elastic 2:4 train.py
--network '2 hosts, 25Gbit' --nnodes 2 --master-addr a train.py
--stall-timeout 0 train.py
--no-watchdog --strict train.py
--no-watchdog --stall-timeout 3 train.py
--no-watchdog --timeline records train.py
--timeline train.py train.py
--output-dir train.py train.py
--tee train.py
--debug-rank x train.py
--fast train.py
"""

HOROVODRUN = """
-np 2 python train.py
--num-proc 2 python -m pack.train a
-np 3 -H a:2,b python train.py --lr 1
-np 3 --hosts a:2,b:1 -p 2222 -i key python train.py
-np 3 -hostfile hosts --ssh-identity-file key --ssh-port 22 train.py
-np 2 --output-filename out --start-timeout 9 python train.py
-np 2 --verbose --network-interfaces eth0,ib0 --network-interface lo python train.py
-np 2 --network-interfaces eth0 -H a:2,b:2 python train.py
-np 4 --min-np 2 --max-np 8 python train.py
--min-num-proc 2 --max-num-proc 8 python train.py
-np 4 --min-np 2 -H a:2,b:2 python train.py
-np 2 --min-np 1 --output-filename out python train.py
-np 2 --metrics-port 0 --metrics-host ::1 --metrics-file job.prom --timeline-filename t.json --timeline-mark-cycles python train.py
-np 2 --timeline-filename t.json --no-timeline-mark-cycles python train.py
-np 2 --no-stall-check python train.py
-np 2 --stall-check python train.py
-np 2 --stall-check-warning-time-seconds 7 --stall-check-shutdown-time-seconds 60 python train.py
-np 2 --stall-check-shutdown-time-seconds 0 python train.py
-np 2 --autotune --fusion-threshold-mb 32 --verbose python train.py
-np 2 bash -c ls

-np 0 python train.py
-np auto python train.py
--num-proc two python train.py
-np 2
-np 2 --max-np 1 python train.py
--min-np 0 python train.py
-np 2 --slots none python train.py
-np 2 --elastic-timeout soon python train.py
-np 2 --stall-check-warning-time-seconds 0 python train.py
-np 2 --stall-check-shutdown-time-seconds x python train.py
-np 2 --start-timeout x python train.py
-np 2 -hostfile nowhere python train.py
-np 2 -H a -hostfile hosts python train.py
-np 2 -H a:1 python train.py
-np 2 -H a:2 --ssh-port 0 python train.py
-np 2 --network-interface a -H a:2 --slot-per-host 3 python train.py
"""

SUBMIT = """
--to slurm train.py
--to slurm -y train.py
--to slurm --output job.sh train.py
--to slurm --nodes 2 --gpus 4 --time 4h train.py --lr 0.1
--to slurm -np 2 -m pack.train a
--to slurm --module --num-proc 2 pack.train
--to slurm --threads 3 --restarts 2 --start-method spawn --preload numpy --as-horovod --grace 90 train.py
--to slurm --elastic 4:8 --nodes 4 -np 2 --resume runs/one train.py
--to slurm -x A=b -x HOME --env C=d --network-interface ib0 --start-timeout 30 train.py
--to slurm --metrics-port 9400 --metrics-host 0.0.0.0 --metrics-file job.prom --stall-timeout 60 --strict --timeline records train.py
--to slurm --heartbeat-timeout 9 --launcher-timeout 60 train.py
--to slurm --elastic 2:8 --pause-timeout 60 train.py
--to slurm --no-watchdog --output-dir out --tee --no-prefix -q train.py
--to slurm --gpu-type H100 --gpus 2 --cpus 6 --memory 64G --retries 0 train.py
--to slurm --name big --folder . --python /far/python --setup 'module load cuda' --setup ls train.py
--to slurm --partition p --account a --qos q --constraint c --log-dir d train.py
--to kubernetes --image i --nodes 2 --gpus 2 --volume runs:/runs --shm 16 --namespace ml train.py
--to kubernetes --image i --kind jobset --start-timeout 30 --retries 5 train.py
--to slurm --shared-folder / train.py

train.py
--to slrm train.py
--to slurm --image i train.py
--to kubernetes --image i --partition p train.py
--to slurm --yes --dry-run train.py
--to slurm --nodes 0 train.py
--to slurm --nodes two train.py
--to slurm --gpus -1 train.py
--to slurm --gpus=-1 train.py
--to slurm --gpus 2 -np 4 train.py
--to slurm --cpus 0 train.py
--to slurm --memory lots train.py
--to slurm --time 4 train.py
--to slurm --time 2m train.py
--to slurm --retries x train.py
--to slurm --name My_Job train.py
--to slurm --partition '' train.py
--to slurm -x 1=2 train.py
--to slurm -np two train.py
--to slurm --elastic 4:2 train.py
--to slurm --tee train.py
--to slurm --stall-timeout 0 train.py
--to kubernetes train.py
--to kubernetes --image i --shm 0 train.py
--to kubernetes --image i --kind pod train.py
--to kubernetes --image i --volume runs train.py
--to slurm nowhere.py
--to slurm -H a train.py
"""

TRAIN = """
--workers 1
--workers 3 --model mlp --data synthetic --device cpu --strategy sharded --global-batch-size 100 --lr 2.5e-2
--workers 1 --optimizer adamw --momentum 0.5 --weight-decay 0.01 --beta1 0.8 --beta2 0.95 --max-grad-norm 2
--workers 1 --param-groups fc*:lr=0.1 --gradient-accumulation-steps 4 --precision bf16 --channels-last
--workers 1 --compile --compile-mode reduce-overhead --no-channels-last --epochs 7 --schedule step
--workers 1 --warmup-epochs 0.5 --base-batch-size 50 --seed 11 --checkpoint-every 20steps --async-save
--workers 1 --replica-check 7 --keep-checkpoints 5 --run-dir somewhere --log tensorboard --loader-workers 2 --quiet
--workers 1 --virtual-workers 12 --threads 3 --allow-different-hardware --sync-batchnorm --shard-optimizer
--workers 1 --strategy replicas --devices cpu,cpu --max-steps-in-flight 4
--workers 1 --virtual-workers 4 --on-spike skip --cross-check 10
--workers 1 --model gpt --data text:book.txt --context 64 --layers 2 --heads 2 --width 32 --dropout 0.1
--workers 1 --data-dir folder --tokenizer t.json --data text:book.txt
--workers 1 --metrics-port 9400 --metrics-host 0.0.0.0 --metrics-file job.prom
--config a.yaml
--config a.yaml --lr 0.5 --workers 1

--metrics-port x
--metrics-host a..b --metrics-port 9400
--metrics-file job.txt
--workers 0
--workers two
--model lenett
--data nothing
--data text: --model gpt
--context 3
--global-batch-size 0
--epochs
--epochs x
--epochs 1.5
--epochs=
--lr -1
--lr=-1
--lr=inf
--optimizer adamm
--momentum nan
--beta1 1
--dropout 2
--param-groups fc*
--max-grad-norm 0
--gradient-accumulation-steps 65
--precision half
--compile-mode reduce-overhead
--compile=yes
--warmup-epochs 15
--seed=-1
--checkpoint-every often
--log paper
--replica-check x
--run-dir=
--devices cpu
--strategy replicas --virtual-workers 2
--strategy replicas --compile
--threads 2
--virtual-workers 2 --workers 3
--virtual-workers 2 --gradient-accumulation-steps 2
--resume nowhere
--config nowhere.yaml
--config bad.yaml
--config worse.yaml
--config unknown.yaml
--batch-size 8
"""

TABLE = {"run": RUN, "horovodrun": HOROVODRUN, "submit": SUBMIT, "train": TRAIN}

TRIED_ELSEWHERE = (
    "help",
    "debug",
    "ignored",
    "show_version",
    "check_build",
    "host_discovery_script",
)


@pytest.fixture(autouse=True)
def project(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the command lines name."""
    (folder / "train.py").write_text("")
    (folder / "key").write_text("")
    (folder / "hosts").write_text("a slots=2\nb\n")
    (folder / "a.yaml").write_text(
        "workers: 1\nlr: 1e-3\nglobal-batch-size: 32\ncompile: true\nmax_grad_norm: null\n"
    )
    (folder / "bad.yaml").write_text("weight-decay: -1\n")
    (folder / "worse.yaml").write_text("epochs: three\n")
    (folder / "unknown.yaml").write_text("epoch: 3\n")
    monkeypatch.setattr(
        "lockstep.launcher.remote_hosts.remote_command.is_this_host", lambda host: False
    )
    monkeypatch.setattr("lockstep.cli.horovodrun.is_this_host", lambda host: False)
    monkeypatch.setattr("lockstep.submit.description._OWN_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    for name in os.environ:
        if name.startswith(("HOROVOD_", "LOCKSTEP_STALL")):
            monkeypatch.delenv(name)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What would be started: the options of a job or of a training."""
    found: list[Any] = []
    monkeypatch.setattr(start, "start", lambda config, listed: found.append(config))
    monkeypatch.setattr(training_run, "run", lambda options: found.append(options) or {})

    def run_on_workers(of_workers: WorkerOptions, _: object, options: Any) -> dict[str, Any]:
        metrics = of_workers.watch.metrics
        found.extend([options] if metrics is None else [options, metrics])
        return {}

    monkeypatch.setattr(launcher, "run_on_workers", run_on_workers)
    monkeypatch.setattr("lockstep.cli.train._print_summary", lambda run_dir, result: None)
    yield found


def settings(options: Any) -> Iterator[str]:
    """The values that are not the defaults."""
    normal = type(options)() if hasattr(options, "model_options") else None
    for option in fields(options):
        value = getattr(options, option.name)
        default = option.default if normal is None else getattr(normal, option.name)
        if default is MISSING or value != default:
            yield f"{option.name} = {value!r}"


def elsewhere(options: Any) -> Iterator[str]:
    """What the launchers of other hosts get, and what a host that joins gets."""
    here = environment.variables()
    variables = SOME_VARIABLES | {name: here[name] for name in here if name.startswith("HOROVOD_")}
    requested = requested_variables(options, variables)
    if requested:
        yield f"variables of the workers: {requested}"
    if options.hosts:
        for command in host_commands(options, assign_workers(options)):
            ssh = [word for word in command[:-1] if "=" not in word and word != "-o"]
            words = shlex.split(command[-1])
            begin = words.index("lockstep") - 2
            yield f"{shlex.join(ssh)}: {shlex.join(words[begin:])}"
        yield f"with {remote_environment(options, variables)}"
    if options.elastic is not None:
        spec = JobSpec.of(options)
        yield f"who joins: {shlex.join(spec.program)} with {dict(sorted(spec.options.items()))}"


def launcher_words(script: str) -> Iterator[str]:
    """The line of a scheduler's file that starts the launchers."""
    text = script.replace(" \\\n", " ")
    for line in text.splitlines():
        if "-m lockstep" in line:
            yield " ".join(line.split())
    words = re.findall(r'^    - "(.*)"$', text, re.MULTILINE)
    if words:
        yield " ".join(words)


def outcome(
    command: str, line: str, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> Iterator[str]:
    """What comes of a command line, in lines."""
    started.clear()
    before = environment.variables()
    code = main([command, *shlex.split(line)])
    printed = capsys.readouterr()
    if code:
        yield f"exit code {code}"
    yield from printed.err.splitlines()
    for options in started:
        yield from settings(options)
        if command in ("run", "horovodrun"):
            yield from elsewhere(options)
    if command == "submit":
        yield from launcher_words(printed.out)
    after = environment.variables()
    for name in sorted(after):
        if before.get(name) != after[name]:
            yield f"{name}={after[name]} in the environment"


def test_what_every_command_line_becomes(
    project: Path,
    started: list[Any],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocks = []
    clean = dict(os.environ)
    for command, lines in TABLE.items():
        for line in filter(None, lines.splitlines()):
            found = list(outcome(command, line, started, capsys))
            for name in set(os.environ) - set(clean):
                del os.environ[name]
            blocks.append("\n  ".join([f"lockstep {command} {line}", *found]))
    text = "\n\n".join(blocks)
    text = text.replace(str(project), "FOLDER").replace(sys.executable, "PYTHON")
    text = re.sub(r"runs/\d{8}-\d{6}-([\w-]+)-[0-9a-f]{4}", r"runs/TIME-\1-XXXX", text)
    golden_texts.compare(golden_texts.GOLDEN / "command_lines.txt", text.splitlines())


@pytest.mark.parametrize("command", TABLE)
def test_every_option_is_in_the_table(command: str) -> None:
    """Each flag of the command is typed above at least once."""
    typed = {
        word.partition("=")[0]
        for word in shlex.split(TABLE[command].replace("'", ""))
        if word.startswith("-")
    }
    missing = [flags for flags in flags_of(command) if not typed & set(flags)]
    assert missing == []


def flags_of(command: str) -> Iterator[tuple[str, ...]]:
    for action in subcommands()[command]._actions:
        flags = tuple(action.option_strings)
        if flags and action.dest not in (
            "help",
            "debug",
            "ignored",
            "show_version",
            "check_build",
            "host_discovery_script",
        ):
            yield flags
