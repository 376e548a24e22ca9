"""The files of `lockstep submit` are those in golden/, and the schedulers' own schemas accept them.

After an intended change: GOLDEN=write pytest tests/unit/submit, and read the difference.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lockstep.cli.submit import make_job
from lockstep.errors import ConfigError
from lockstep.submit import SCHEDULERS, Job, Scheduler
from support.documented_code import read_blocks

command_line = importlib.import_module("lockstep.cli.main")

GOLDEN = Path(__file__).parent / "golden"
PLACE = "--folder /shared/project --python /shared/venv/bin/python"

COMMANDS = {
    "slurm.sbatch": f"--to slurm {PLACE} --nodes 2 --gpus 4 --time 4h --partition gpu train.py --lr 0.1",
    "slurm-elastic.sbatch": f"--to slurm {PLACE} --nodes 4 -np 2 --elastic 4:8 --time 2d --memory 64G --account lab "
    "--setup 'module load cuda' -x DATA='/data/two words' -x HF_TOKEN --network-interface ib0 "
    "-m pack.lenet",
    "slurm-small.sbatch": f"--to slurm {PLACE} train.py",
    "kubernetes.yaml": "--to kubernetes --nodes 2 --gpus 8 --image registry/train:1 --volume runs:/runs --time "
    "4h --folder /app --memory 256 -x HF_TOKEN -x MODE=fast train.py --out /runs/a",
    "kubernetes-jobset.yaml": "--to kubernetes --kind jobset --nodes 4 -np 2 --image registry/train:1 --namespace ml "
    "--elastic 4:8 --setup 'pip install -e .' --retries 5 train.py",
}


def described(command: str) -> tuple[Scheduler, Job]:
    options = argparse.Namespace()
    command_line._parse(["submit", *shlex.split(command)], "lockstep submit", options)
    scheduler = SCHEDULERS.load(options.to)()
    return scheduler, make_job(vars(options), scheduler)


def text_of(command: str) -> str:
    scheduler, job = described(command)
    return scheduler.write(job)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_file_is_the_golden_one(name: str) -> None:
    scheduler, job = described(COMMANDS[name])
    text = scheduler.write(job)
    if os.environ.get("GOLDEN") == "write":
        (GOLDEN / name).write_text(text)
    assert name.endswith(scheduler.suffix)
    assert text == (GOLDEN / name).read_text()
    assert max(len(line) for line in text.splitlines() if "Made by" not in line) <= 150


def test_the_folder_holds_no_other_files() -> None:
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_in_its_head_makes_the_same_file(name: str) -> None:
    text = text_of(COMMANDS[name])
    made = next(
        line.removeprefix("# Made by: lockstep submit ")
        for line in text.splitlines()
        if "Made by" in line
    )
    assert text_of(made) == text


# --- Schemas
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in COMMANDS if name.endswith(".sbatch")])
def test_bash_reads_the_script(name: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=text_of(COMMANDS[name]), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def pods_of(name: str) -> dict[str, Any]:
    """The Job in a manifest, that of a JobSet with what its own API adds: the kind."""
    *_, last = yaml.safe_load_all(text_of(COMMANDS[name]))
    if last["kind"] == "Job":
        return dict(last)
    (node,) = last["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "node"},
        **node["template"],
    }


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("name", [name for name in COMMANDS if name.startswith("kubernetes")])
def test_kubernetes_schemas_accept_the_manifest(name: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for document in yaml.safe_load_all(text_of(COMMANDS[name])):
        if document["kind"] != "JobSet":
            validator.validate(document, version, strict=True)
    validator.validate(pods_of(name), version, strict=True)


def test_the_schemas_refuse_what_they_do_not_know() -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    job = pods_of("kubernetes.yaml")
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validator.ValidationError):
        validator.validate(job, "1.33", strict=True)


# The fields that these files use, with the limits of the definition of the custom resource:
# jobset_types.go of sigs.k8s.io/jobset, api/jobset/v1alpha2 (JobSetSpec, Network, FailurePolicy,
# FailurePolicyRule, ReplicatedJob).
JOBSET: dict[str, Any] = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": dict,
    "spec": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "failurePolicy": {
            "maxRestarts": int,
            "rules": [{"name": str, "action": ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                       "onJobFailureReasons": [("BackoffLimitExceeded", "DeadlineExceeded", "PodFailurePolicy")]}],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": dict}],
    },
}  # fmt: skip


def fits(found: Any, schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(found, dict) and all(
            key in schema and fits(found[key], schema[key]) for key in found
        )
    if isinstance(schema, list):
        return isinstance(found, list) and all(fits(each, schema[0]) for each in found)
    if isinstance(schema, type):
        return type(found) is schema
    return found in schema if isinstance(schema, tuple) else found == schema


def test_a_jobset_has_the_fields_of_its_api() -> None:
    (document,) = yaml.safe_load_all(text_of(COMMANDS["kubernetes-jobset.yaml"]))
    assert fits(document, JOBSET)
    document["spec"]["network"]["enableDnsHostnames"] = True
    assert not fits(document, JOBSET)


def documented(key: str) -> Any:
    """The task in the documentation that has this key."""
    page = (Path(__file__).parents[3] / "docs" / "clusters.md").read_text()
    tasks = [
        yaml.safe_load(block.text)
        for block in read_blocks("clusters.md", page)
        if block.language == "yaml"
    ]
    (task,) = [task for task in tasks if key in task]
    return task


def test_skypilots_schema_accepts_the_documented_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    jsonschema = pytest.importorskip("jsonschema")
    task = documented("num_nodes")
    jsonschema.Draft202012Validator(schemas.get_task_schema()).validate(task)
    jsonschema.Draft202012Validator(schemas.get_resources_schema()).validate(task["resources"])


def test_dstacks_models_accept_the_documented_task() -> None:
    models = pytest.importorskip(
        "dstack._internal.core.models.configurations", reason="pip install dstack"
    )
    models.parse_apply_configuration(documented("max_duration"))


def test_the_documented_tasks_leave_time_to_save_and_resume() -> None:
    """150 s are the default of --grace and 30 s for the launcher, as in the files of `lockstep
    submit`.
    """
    lead = described(COMMANDS["slurm-small.sbatch"])[1].lead
    sky, dstack = documented("num_nodes"), documented("max_duration")
    assert f"--kill-after={lead} {4 * 3600 - lead} " in sky["run"]
    assert dstack["stop_duration"] == f"{lead}s" and dstack["max_duration"] == f"{4 * 3600 - lead}s"
    for text in (sky["run"], dstack["commands"][0]):
        assert "exec " in text and "--nodes auto" in text and "--resume latest" in text


@pytest.mark.parametrize("name", COMMANDS)
def test_every_file_says_when_to_save_and_resumes(name: str) -> None:
    text = text_of(COMMANDS[name])
    says_when = ("--signal=TERM@150", "terminationGracePeriodSeconds: 150")
    assert any(words in text for words in says_when)
    assert re.search(r'--resume(?:"\s+- "| )latest', text)


# --- What cannot be
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "argument", "said"),
    [
        ("--to slurm --time 2m t.py", "time", "more than 150 s: workers are told to save"),
        (
            "--to slurm --time 4 t.py",
            "time",
            "a time limit of at least a minute, such as 90m, 4h, 2d or 1-12:00:00",
        ),
        ("--to slurm --time 1:99:00 t.py", "time", "a time limit of at least a minute"),
        ("--to slurm --nodes 0 t.py", "--nodes|nodes", "a whole number"),
        ("--to slurm --gpus 2 -np 4 t.py", "workers", "at most 2, the GPUs of a node, got 4"),
        ("--to slurm --memory lots t.py", "memory", "gigabytes on each node, such as 64G"),
        ("--to slurm --name My_Job t.py", "name", "up to 40 lower-case letters"),
        ("--to slurm --partition 'a\nb' t.py", "partition", "a word without control characters"),
        ("--to slurm -x 1=2 t.py", "env", "NAME or NAME=VALUE"),
        ("--to slurm -np 2 --elastic 4:8 t.py", "workers", "a number from 4 to 8"),
        (
            "--to kubernetes t.py",
            "image",
            "the name of a container image .*, which Kubernetes needs, got nothing",
        ),
        ("--to kubernetes --image i --kind pod t.py", "kind", "job or jobset"),
        ("--to kubernetes --image i --volume runs t.py", "volume", "CLAIM:/PATH"),
    ],
)
def test_what_is_wrong_is_named(command: str, argument: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"^({argument}): expected {said}"):
        text_of(command)


def test_names_of_programs_become_names_of_jobs() -> None:
    assert described("--to slurm 'my dir/Train_2.py'")[1].name == "train-2"
    assert described("--to slurm -m package.train_all")[1].name == "train-all"
    assert described("--to slurm ___.py")[1].name == "train"


def test_cores_are_asked_for() -> None:
    assert described("--to slurm -np 6 t.py")[1].cpus == 6
    assert described("--to slurm --gpus 2 t.py")[1].cpus == 8
    assert described("--to slurm --gpus 2 --cpus 3 t.py")[1].cpus == 3


def test_a_job_whose_nodes_all_start_again_counts_each_of_them() -> None:
    scheduler, job = described(COMMANDS["kubernetes.yaml"])
    assert "backoffLimit: 6 " in scheduler.write(job)
    assert "backoffLimit: 3 " in scheduler.write(replace(job, elastic=True))


@pytest.mark.skipif(
    shutil.which("sbatch") is None, reason="Slurm is not installed: apt-get install slurm-client"
)
def test_sbatch_knows_every_option_of_the_scripts() -> None:
    """It reads the options before it looks for a controller; `tests/cluster` lets a real one check
    whole scripts.
    """
    for name in (name for name in COMMANDS if name.endswith(".sbatch")):
        text = text_of(COMMANDS[name])
        done = subprocess.run(
            ["sbatch", "--test-only"], input=text, capture_output=True, text=True, timeout=60
        )
        assert "unrecognized option" not in done.stderr and "invalid option" not in done.stderr, (
            done.stderr
        )
        assert "nvalid --" not in done.stderr, done.stderr
