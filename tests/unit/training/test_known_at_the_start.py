"""What `fit` can know before the first step is said before the first step: names of columns, files,
other arguments.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.callbacks import (
    Callback,
    Checkpoints,
    CSVLog,
    Curve,
    EarlyStopping,
    Progress,
    TensorBoard,
    defaults,
)
from lockstep.communicator import Communicator
from lockstep.errors import ConfigError
from lockstep.topology import World
from lockstep.training.callbacks.columns import is_higher_better
from lockstep.training.callbacks.group import CallbackGroup
from lockstep.training.loaders import TrainerLoaders
from lockstep.training.options import TrainOptions
from lockstep.training.run.epoch_totals import COLUMNS
from lockstep.training.training_run import make_callbacks

DATA = TensorDataset(torch.randn(20, 4), torch.randint(0, 3, (20,)))


class Steps(Callback):
    """Counts the steps of a run."""

    count = 0

    def on_train_step_end(self, trainer: Any, result: Any) -> None:
        self.count += 1


def make(*callbacks: Callback, **options: Any) -> lockstep.Trainer:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return lockstep.Trainer(
        model, optimizer, nn.CrossEntropyLoss(), 8, callbacks=list(callbacks), **options
    )


def refused(*callbacks: Callback, validate: Any = None, **options: Any) -> str:
    """The error of a run, which has done no step."""
    steps = Steps()
    with pytest.raises(ConfigError) as caught:
        make(*callbacks, steps, **options).fit(DATA, 1, validate=validate)
    assert steps.count == 0
    return str(caught.value)


# --- columns
# --------------------------------------------------------------------------------------------------


def test_a_metric_that_is_not_measured_is_named_before_the_first_step() -> None:
    said = refused(EarlyStopping("val_acc"), validate=DATA)
    columns = "epoch, step, train_loss, lr, seconds, samples_per_second, val_loss, val_accuracy"
    assert said == (
        f"callbacks.EarlyStopping: expected one of {columns}, got 'val_acc'. Did you mean "
        "val_accuracy?"
    )


def test_a_best_of_what_is_not_measured_leaves_no_run_directory(tmp_path: Path) -> None:
    said = refused(Checkpoints(best="accuracy"), validate=DATA, run_dir=tmp_path / "run")
    assert (
        said.startswith("callbacks.Checkpoints: expected one of epoch")
        and "Pass validate=" not in said
    )
    assert not (tmp_path / "run").exists()


def test_without_validation_the_error_says_how_to_have_one() -> None:
    assert refused(EarlyStopping()).endswith(
        "got 'val_loss'. Pass validate= to fit() for those of a validation."
    )


class Plateau(Callback):
    needs_columns = ("val_loss",)


def test_a_callback_of_ones_own_may_say_what_it_reads() -> None:
    assert refused(Plateau()).startswith("callbacks.Plateau: expected one of epoch")
    make(Plateau()).fit(DATA, 1, validate=DATA)


class Score(Callback):
    every_rank = True
    adds_columns = ("val_score",)

    def on_row(self, trainer: Any, row: Any) -> None:
        row["val_score"] = 1.0


def test_a_column_that_a_callback_adds_may_be_read() -> None:
    make(Score(), EarlyStopping("val_score", higher_is_better=True)).fit(DATA, 1)
    assert "names it in adds_columns" in refused(
        EarlyStopping("val_score", higher_is_better=True), validate=DATA
    )


class Several:
    """A metric with several results, as torchmetrics' collections have them."""

    def reset(self) -> None: ...

    def update(self, output: Any, target: Any) -> None: ...

    def compute(self) -> dict[str, float]:
        return {"low": 0.0, "high": 1.0}


def test_a_metric_with_several_results_is_known_after_its_first() -> None:
    stopping = EarlyStopping("val_both_low", higher_is_better=False)
    make(stopping, metrics={"both": Several()}).fit(DATA, 1, validate=DATA)
    missing = make(
        EarlyStopping("val_both_mid", higher_is_better=True), metrics={"both": Several()}
    )
    with pytest.raises(ConfigError, match="val_both_low, val_both_high, got 'val_both_mid'"):
        missing.fit(DATA, 1, validate=DATA)


def test_every_row_has_the_columns_that_are_known() -> None:
    (row,) = make().fit(DATA, 1, validate=DATA)
    assert tuple(row) == (*COLUMNS, "val_loss", "val_accuracy")


@pytest.mark.parametrize(
    ("column", "higher"),
    [
        ("val_loss", False),
        ("val_error", False),
        ("val_accuracy", True),
        ("val_f1", True),
        ("val_auc", True),
    ],
)
def test_which_values_are_better_follows_from_the_name_or_is_said(
    column: str, higher: bool
) -> None:
    assert is_higher_better(column, None) == higher
    assert is_higher_better(column, not higher) != higher
    rows = [{column: 1.0}, {column: 2.0}]
    assert EarlyStopping(column).rows_since_best(rows) == (0 if higher else 1)


@pytest.mark.parametrize("kind", [EarlyStopping, lambda name: Checkpoints(best=name)])
def test_a_name_that_does_not_say_which_values_are_better_is_refused(kind: Any) -> None:
    expected = r"higher_is_better: expected True or False, got neither, and the name of the column val_mae "
    with pytest.raises(ConfigError, match=expected):
        kind("val_mae")


# --- metrics
# --------------------------------------------------------------------------------------------------


def of_outputs_only(output: Any) -> float:
    return 0.0


@pytest.mark.parametrize("metric", [of_outputs_only, lockstep.whole_set(of_outputs_only)])  # type: ignore[arg-type]
def test_a_metric_that_takes_no_target_is_refused_when_it_is_given(metric: Any) -> None:
    expected = r"metrics: expected a function \(output, target\) -> value as 'f1', got of_outputs_only\(output"
    with pytest.raises(ConfigError, match=expected):
        make(metrics={"f1": metric})


def test_the_class_of_a_metric_is_not_its_instance() -> None:
    with pytest.raises(ConfigError, match=r"got the class Several. Create an instance: Several\("):
        make(metrics={"both": Several})


def test_an_evaluation_before_the_training_tries_the_metrics_and_changes_no_bit() -> None:
    def bits(tries: bool) -> str:
        made = make(
            metrics={"accuracy": lambda output, target: (output.argmax(1) == target).float()}
        )
        if tries:
            made.evaluate(torch.utils.data.Subset(DATA, range(8)))
        made.fit(DATA, 2, validate=DATA)
        return lockstep.fingerprint(made.model, made.optimizer)

    assert bits(tries=True) == bits(tries=False)


# --- files
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [TensorBoard, CSVLog, Curve, Checkpoints])
def test_a_callback_that_writes_needs_a_run_directory(kind: type[Callback]) -> None:
    expected = (
        f"callbacks.{kind.__name__}: expected Trainer(run_dir=...), where it writes, got none"
    )
    assert refused(kind()) == expected


def test_a_missing_package_is_named_in_the_words_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    what = re.escape("needs the package tensorboard: pip install 'lockstep-train[tensorboard]'")
    with pytest.raises(ConfigError, match=rf"^TensorBoard\(\) {what}$"):
        TensorBoard()
    with pytest.raises(ConfigError, match=f"^log {what}$"):
        make_callbacks(TrainOptions(log="csv,tensorboard"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([Steps()], "the run has no checkpoints at intervals, no metrics.csv, no curve.png"),
        ([Steps(), CSVLog()], "the run has no checkpoints at intervals, no curve.png. To add"),
        ([], None),
        ([Steps(), Checkpoints("0")], None),
        ([*defaults(True), Steps()], None),
    ],
)
def test_callbacks_that_replace_the_default_ones_are_reported(
    given: list[Callback], said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(*given, run_dir=tmp_path)
    assert [said in record.getMessage() for record in caplog.records] == (
        [] if said is None else [True]
    )


def test_only_rank_0_reports_it_and_only_with_a_run_directory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    CallbackGroup([Steps()], 1).warn_of_missing()
    make(Steps())
    assert not caplog.records


# --- a run that is done
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "said"),
    [({"epochs": 2}, "2 of 2 epochs are done"), ({"max_steps": 4}, "4 of 4 steps are done")],
)
def test_a_finished_run_that_resumes_says_so(
    length: dict[str, int], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(Checkpoints(), run_dir=tmp_path).fit(DATA, **length)  # type: ignore[arg-type]
    assert not caplog.records
    make(Checkpoints(), run_dir=tmp_path).fit(DATA, **length, resume="latest")  # type: ignore[arg-type]
    (record,) = caplog.records
    assert record.getMessage().startswith(
        f"nothing is left to train: {said} already. The number of"
    )


# --- arguments that belong elsewhere
# ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "collate_fn",
            "it belongs to a DataLoader or lockstep.Loader(...), which fit() and validate= take "
            "as data",
        ),
        ("metrics", "it belongs to Trainer(...)"),
        ("max_grad_norm", "it belongs to Trainer(...)"),
        ("batch_size", "a step has the samples of Trainer(..., global_batch_size=)"),
    ],
)
def test_an_argument_that_fit_does_not_have_says_where_it_belongs(name: str, said: str) -> None:
    expected = f"fit() got an unexpected keyword argument '{name}': {said}"
    with pytest.raises(TypeError, match=re.escape(expected)):
        make().fit(DATA, 1, **{name: None})


def test_an_argument_that_the_trainer_does_not_have_says_where_it_belongs() -> None:
    with pytest.raises(
        TypeError,
        match=r"Trainer\(\) got an unexpected keyword argument 'validate': it belongs to fit",
    ):
        make(validate=DATA)
    with pytest.raises(
        TypeError, match=r"Trainer\(\) got an unexpected keyword argument 'validat'$"
    ):
        make(validat=DATA)


def test_init_says_where_the_backend_is_chosen() -> None:
    with pytest.raises(
        TypeError,
        match=r"init\(\) got an unexpected keyword argument 'backend': transport= chooses",
    ):
        lockstep.init(backend="gloo")  # type: ignore[call-arg]


def test_attributes_under_the_names_of_torch_distributed_are_named() -> None:
    comm = lockstep.init()
    with pytest.raises(
        AttributeError, match=r"has no attribute 'world_size'; its name here is 'size'"
    ):
        comm.world_size  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'colour'$"):
        comm.colour  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(comm, "world_size")


# --- what of a DataLoader is not used
# ---------------------------------------------------------------------------------


def test_a_batch_size_that_is_not_used_is_reported_once_for_each_loader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, held_out = make(Progress()), DataLoader(DATA, 5)
    made.fit(DataLoader(DATA, 4, shuffle=True), 1, validate=held_out)
    made.fit(DataLoader(DATA, 4, shuffle=True), 2, validate=held_out)
    made.evaluate(held_out)
    made.evaluate(held_out)
    samples = "has the 8 samples of global_batch_size, over all workers"
    assert [record.getMessage() for record in caplog.records] == [
        f"batch_size=4 of the DataLoader of the training data is not used: a step {samples}",
        "batch_size=5 of the DataLoader of validate= is not used: a batch of an evaluation "
        f"{samples}",
        f"batch_size=5 of the DataLoader is not used: a batch of an evaluation {samples}",
    ]


def test_other_ranks_do_not_report_it(caplog: pytest.LogCaptureFixture) -> None:
    comm = Communicator.at(
        World(rank=1, world_size=2, local_rank=1, local_world_size=2), torch.device("cpu")
    )
    loaders = TrainerLoaders(comm, 8, seed=0, num_workers=0, virtual_workers=None)
    loaders.make(DataLoader(DATA, 4, worker_init_fn=print), "train").close()
    assert not caplog.records
