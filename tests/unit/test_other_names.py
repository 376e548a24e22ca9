"""Names of arguments in other libraries: the error says what they are here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep import arguments, other_names, other_options
from lockstep.cli.main import _parser
from lockstep.launcher.worker_process import worker
from lockstep.training.step.step_arguments import StepOptions

DATA = TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))


def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def trainer(**options: Any) -> lockstep.Trainer:
    return lockstep.Trainer(*parts(), nn.CrossEntropyLoss(), 8, **options)


def step(**options: Any) -> lockstep.TrainStep:
    return lockstep.TrainStep(*parts(), nn.CrossEntropyLoss(), **options)


def loader(**options: Any) -> lockstep.Loader:
    return lockstep.Loader(DATA, 8, **options)


def fit(**options: Any) -> Any:
    return trainer(callbacks=[]).fit(DATA, 1, **options)


def launch(**options: Any) -> Any:
    return lockstep.launch(lambda: 3, **options)


def said(call: Any, name: str) -> str:
    """The error of a call with an argument of this name, after the words of Python."""
    with pytest.raises(TypeError) as caught:
        call(**{name: 1})
    text = str(caught.value)
    assert f"() got an unexpected keyword argument '{name}'" in text
    return text.partition(f"'{name}'")[2]


@pytest.mark.parametrize(
    ("call", "name", "here"),
    [
        (trainer, "max_epochs", "fit(..., epochs=)"),  # Lightning
        (trainer, "gradient_clip_val", "Trainer(..., max_grad_norm=)"),
        (trainer, "device", "lockstep.init(device)"),
        (trainer, "accelerator", "lockstep.init(device)"),
        (trainer, "compile", "compile_model=True"),
        (trainer, "accumulate_grad_batches", "gradient_accumulation_steps="),
        (trainer, "num_nodes", "lockstep run -H a:4,b:4"),
        (trainer, "default_root_dir", "run_dir="),
        (trainer, "enable_progress_bar", "Progress()"),
        (trainer, "val_check_interval", "validate_every="),
        (trainer, "limit_train_batches", "Subset"),
        (trainer, "num_train_epochs", "fit(..., epochs=)"),  # Transformers
        (trainer, "per_device_train_batch_size", "global_batch_size="),
        (trainer, "output_dir", "run_dir="),
        (trainer, "learning_rate", "torch.optim"),
        (trainer, "lr_scheduler_type", "scheduler="),
        (trainer, "bf16", 'Trainer(..., precision="bf16")'),
        (trainer, "fp16", 'precision="fp16"'),
        (trainer, "eval_dataset", "validate="),
        (trainer, "train_dataset", "first argument"),
        (trainer, "compute_metrics", "metrics={name: function}"),
        (trainer, "data_collator", "collate_fn="),
        (trainer, "torch_compile", "compile_model=True"),
        (trainer, "resume_from_checkpoint", "fit(..., resume=)"),
        (trainer, "save_total_limit", "keep_checkpoints="),
        (trainer, "load_best_model_at_end", "best="),
        (trainer, "mixed_precision", 'Trainer(..., precision="bf16")'),  # Accelerate
        (trainer, "num_processes", "lockstep run -np N"),
        (trainer, "epochs", "it belongs to fit()"),
        (trainer, "shuffle", "lockstep.Loader(...)"),
        (trainer, "max_grad_nrom", "did you mean max_grad_norm?"),
        (fit, "ckpt_path", "fit(..., resume=)"),
        (fit, "val_dataloaders", "fit(..., validate=)"),
        (fit, "run_dir", "it belongs to Trainer(...)"),
        (fit, "epoch", "fit(..., epochs=)"),
        (fit, "max_step", "did you mean max_steps?"),
        (step, "gradient_clip_val", "TrainStep(..., max_grad_norm=)"),
        (step, "run_dir", "lockstep.Trainer"),
        (step, "epochs", "fit() of a lockstep.Trainer"),
        (step, "global_batch_size", "lockstep.Loader(...)"),
        (step, "precison", "did you mean precision?"),
        (loader, "batch_size", "global_batch_size="),
        (loader, "sampler", "batch_sampler="),
        (loader, "prefetch_factor", "prefetch="),
        (loader, "pin_memory", "not needed"),
        (loader, "generator", "seed="),
        (loader, "shufle", "did you mean shuffle?"),
        (lockstep.prepare, "mixed_precision", 'prepare(..., precision="bf16")'),
        (lockstep.prepare, "gradient_accumulation_steps", "after every Nth batch"),
        (lockstep.prepare, "model", "without names"),
        (lockstep.prepare, "epochs", "the loop is yours"),
        (lockstep.prepare, "virtual_worker", "did you mean virtual_workers?"),
        (lockstep.init, "backend", "transport="),
        (lockstep.init, "rank", "lockstep run -np N"),
        (lockstep.init, "init_method", "MASTER_ADDR"),
        (lockstep.init, "timeuot", "did you mean timeout?"),
        (launch, "nprocs", "workers="),
        (launch, "num_processes", "workers="),
        (launch, "args", "launch(fn, a, b)"),
    ],
)
def test_an_argument_of_another_library_is_told_what_it_is_here(
    call: Any, name: str, here: str
) -> None:
    assert here in said(call, name)


def test_a_name_that_nothing_resembles_gets_no_suggestion() -> None:
    assert (
        said(trainer, "zzz")
        == said(step, "zzz")
        == said(loader, "zzz")
        == said(lockstep.prepare, "zzz")
        == ""
    )


def test_launch_gives_its_function_what_the_function_has() -> None:
    from lockstep.launcher import _check_names

    _check_names(lambda nprocs, args: None, {"nprocs": 3, "args": 1})
    _check_names(lambda **options: None, {"nprocs": 3})
    _check_names(lambda other: None, {"other": 3})
    _check_names(int, {"nprocs": 3})  # it may have a signature, or none: written in C


def own_arguments() -> dict[str, set[str]]:
    step_options = set(StepOptions.__annotations__)
    return {
        "Trainer": set(arguments.keyword_names(lockstep.Trainer)) | step_options,
        "TrainStep": set(arguments.keyword_names(lockstep.TrainStep)),
        "fit": set(arguments.keyword_names(lockstep.Trainer.fit)),
        "prepare": set(arguments.keyword_names(lockstep.prepare)),
        "prepare_model": set(arguments.keyword_names(lockstep.prepare_model)),
        "launch": set(arguments.keyword_names(lockstep.launch)),
        "init": set(arguments.keyword_names(lockstep.init)),
    }


def test_the_arguments_that_the_texts_name_exist() -> None:
    own, found = own_arguments(), 0
    tables = (
        other_names._TRAINING,
        other_names._PREPARE,
        other_names._TRAIN_STEP,
        other_names.INIT,
    )
    texts = {text for table in tables for text in table.values()}
    for text in texts:
        for step_owner in ("Trainer", "TrainStep", "prepare"):
            written = text.format(step=step_owner)
            for function, given in re.findall(
                r"\b(\w+)\(((?:\.\.\.|\w+), [^()]*=[^()]*)\)", written
            ):
                for name in re.findall(r"(\w+)=", given):
                    if function in own and (step_owner, function) != ("prepare", "Trainer"):
                        assert name in own[function], (written, function, name)
                        found += 1
    assert found > 40


@pytest.mark.parametrize("owner", ["TrainStep", "prepare"])
def test_no_row_is_for_an_argument_that_there_is(owner: str) -> None:
    table = other_names._TRAIN_STEP if owner == "TrainStep" else other_names._PREPARE
    assert not table.keys() & own_arguments()[owner]


def test_the_trainers_own_arguments_are_known_to_the_other_two() -> None:
    own = own_arguments()
    of_trainer = own["Trainer"] | own["fit"] - {"self"}
    for owner in ("TrainStep", "prepare"):
        unknown = {
            name for name in of_trainer - own[owner] if other_names.in_training(name, owner) is None
        }
        assert not unknown, owner


def test_loaders_rows_are_no_arguments_of_a_loader() -> None:
    assert not other_names._LOADER_NAMES.keys() & set(arguments.keyword_names(lockstep.Loader))


@pytest.mark.parametrize(
    ("command", "table"), [("run", other_options.RUN_FLAGS), ("train", other_options.TRAIN_FLAGS)]
)
def test_the_flags_that_the_texts_name_exist(command: str, table: dict[str, str]) -> None:
    parser = _parser()._subparsers._group_actions[0].choices[command]  # type: ignore[union-attr, index, call-overload]
    flags = {flag for action in parser._actions for flag in action.option_strings}
    for given, text in table.items():
        assert given not in flags
        if "lockstep run" not in text:
            for flag in re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", text):
                assert flag in flags | {"--version"}, (given, flag)


def test_values_of_other_libraries_are_told_what_they_are_here() -> None:
    for value, here in (
        ("bf16-mixed", "bf16"),
        ("16-mixed", "fp16"),
        (32, "fp32"),
        (torch.bfloat16, "bf16"),
    ):
        with pytest.raises(
            lockstep.ConfigError,
            match=rf"precision: expected .*(Its name here is '{here}'\.|Did you mean {here})",
        ):
            trainer(precision=value)
    for value, here in (
        ("ddp", "distributed"),
        ("fsdp", "sharded"),
        ("dp", "replicas"),
        ("auto", "distributed"),
    ):
        with pytest.raises(
            lockstep.ConfigError, match=rf"strategy: expected .*Its name here is '{here}'\."
        ):
            trainer(strategy=value)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("rank", "comm = lockstep.init(), then comm.rank"),
        ("broadcast_parameters", "lockstep.compat.horovod.torch as hvd"),
        ("gather_for_metrics", "lockstep.evaluate("),
        ("load_state", "Resume from a checkpoint"),
    ],
)
def test_names_of_accelerate_and_horovod_in_the_package(name: str, here: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': ") as caught:
        getattr(lockstep, name)
    assert here in str(caught.value)
    assert not hasattr(lockstep, name)


def test_no_hint_is_about_a_name_that_the_package_has() -> None:
    assert not set(other_names.PACKAGE_NAMES) & set(dir(lockstep))


def test_a_program_for_horovod_is_told_how_it_is_started() -> None:
    missing = ModuleNotFoundError("No module named 'horovod'", name="horovod")
    assert "lockstep run --as-horovod" in worker._message(missing)
    other = ModuleNotFoundError("No module named 'keras'", name="keras")
    assert worker._message(other) == str(other)
