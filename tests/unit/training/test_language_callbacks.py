"""What the callbacks of language models show, and that they change nothing in the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import lockstep
from lockstep.callbacks import Callback, TextSamples, TokenColumns
from lockstep.models import next_token_loss
from lockstep.parallel.fingerprints import fingerprint
from lockstep.training.trainer import Trainer

BLOCKS = torch.randint(11, (24, 9), generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(BLOCKS[:, :-1], BLOCKS[:, 1:])


def fit(*callbacks: Callback, run_dir: Path | None = None) -> Trainer:
    torch.manual_seed(0)
    model = lockstep.models.gpt(11, 8, layers=1, heads=2, width=8, dropout=0.3)
    made = Trainer(
        model,
        torch.optim.AdamW(model.parameters()),
        next_token_loss,
        8,
        callbacks=list(callbacks),
        run_dir=run_dir,
    )
    made.fit(DATA, 2, validate=DATA)
    return made


def samples(**options: bool | int | float) -> TextSamples:
    prompts = [[1, 2, 3], [4, 5, 6]]
    return TextSamples(prompts, lambda tokens: "".join(map(str, tokens)), 8, length=5, **options)  # type: ignore[arg-type]


def test_samples_change_no_bit_and_are_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    without, first = fit(), fit(samples())
    shown = capsys.readouterr().out
    second = fit(samples())
    assert capsys.readouterr().out == shown
    prints = {fingerprint(made.model, made.optimizer) for made in (without, first, second)}
    assert len(prints) == 1
    assert all(layer.training for layer in first.model.modules())
    fit(samples(seed=1))
    assert capsys.readouterr().out != shown


def test_samples_are_printed_as_lines_that_are_safe(capsys: pytest.CaptureFixture[str]) -> None:
    fit(TextSamples([[1] * 8], lambda tokens: "\x1b[31m\n" + "ab\tc" * len(tokens), 8, length=90))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(
        line.isprintable() and len(line) <= 80 and "▸" in line for line in lines
    )
    fit(samples(show=False))
    assert capsys.readouterr().out == ""


def test_the_columns(tmp_path: Path) -> None:
    history = fit(TokenColumns(8)).history
    for row in history:
        assert row["val_perplexity"] == pytest.approx(torch.tensor(row["val_loss"]).exp().item())
        assert row["tokens_per_second"] == 8 * row["samples_per_second"]


def test_a_huge_loss_is_no_overflow() -> None:
    results = {"loss": 1e4}
    TokenColumns(8).on_validation_end(None, results)  # type: ignore[arg-type]
    assert results["perplexity"] == float("inf")
