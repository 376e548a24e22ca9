"""`lockstep train --model gpt --data text:FILE`: a language model on a text file."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep.cli import main

pytestmark = pytest.mark.usefixtures("folder")

LINES = [
    f"{name} {verb} the {thing}.\n"
    for name in ("Ann", "Bob")
    for verb in ("sees", "has")
    for thing in ("sea", "cat")
]
SMALL = [
    "--model",
    "gpt",
    "--workers",
    "1",
    "--context",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--width",
    "16",
]
SMALL += ["--epochs", "2"]


@pytest.fixture(autouse=True)
def story(folder: Path) -> Path:
    path = folder / "my story.txt"
    path.write_text("".join(LINES) * 20)
    return path


def train(*arguments: str) -> int:
    return main(["train", "--data", "text:my story.txt", *SMALL, *arguments])


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_run_on_a_text_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--lr", "0.01") == 0
    shown = capsys.readouterr().out
    (made,) = (folder / "runs").iterdir()
    assert made.name[16:-5] == "gpt-my-story"
    rows = list(csv.DictReader((made / "metrics.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    for row in rows:
        assert float(row["val_perplexity"]) == pytest.approx(
            math.exp(float(row["val_loss"])), rel=1e-6
        )
        assert float(row["tokens_per_second"]) == pytest.approx(
            16 * float(row["samples_per_second"]), rel=1e-6
        )
    assert float(rows[1]["val_perplexity"]) < float(rows[0]["val_perplexity"]) < 256
    result = json.loads((made / "result.json").read_text())
    assert result["val_perplexity"] == pytest.approx(float(rows[1]["val_perplexity"]), rel=1e-6)
    assert result["tokens_per_second"] > result["samples_per_second"]
    assert (
        f"perplexity {result['val_perplexity']:.4g}" in shown
        and "tokens/s" in shown
        and "samples/s" not in shown
    )
    assert (
        f"perplexity     {result['val_perplexity']:.4g} on the text held out, after 2 epochs"
        in shown
    )
    samples = (made / "samples.txt").read_text()
    assert samples.count("=== epoch") == 2 and samples.count("▸") == 2 + 6
    assert shown.count("▸") == 6

    options = json.loads((made / "config.json").read_text())
    names = ("context", "layers", "heads", "width", "dropout")
    model = lockstep.models.gpt(256, **{name: options[name] for name in names})
    model.load_state_dict(load_file(made / "model.safetensors"))
    _, test = lockstep.data.text("my story.txt", 16)
    assert test is not None
    measured = lockstep.evaluate(
        model, lockstep.Loader(test, 32, shuffle=False), lockstep.models.next_token_loss
    )
    assert measured["loss"] == pytest.approx(result["val_loss"], rel=1e-5)


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_a_resumed_run_writes_no_sample_twice(folder: Path) -> None:
    straight = ["--schedule", "constant", "--quiet", "--dropout", "0.1"]
    assert train("--run-dir", "whole", *straight) == 0
    assert train("--run-dir", "part", *straight, "--epochs", "1") == 0
    written = (folder / "part/samples.txt").read_text()
    # what a run has written after its checkpoint, before it was killed
    (folder / "part/samples.txt").write_text(written + "=== epoch 2, step 18\n--- 1\nlost\n")
    assert main(["train", "--resume", "part", "--epochs", "2", "--quiet"]) == 0
    assert (folder / "part/samples.txt").read_text() == (folder / "whole/samples.txt").read_text()
    results = [
        json.loads((folder / name / "result.json").read_text()) for name in ("whole", "part")
    ]
    assert results[0]["fingerprint"] == results[1]["fingerprint"]


MODULE = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, vocabulary, context):
        super().__init__()
        self.table = nn.Embedding(vocabulary, vocabulary)
    def forward(self, tokens): return self.table(tokens)
def wide(vocabulary): return nn.Embedding(vocabulary, vocabulary + 1)
class Pairs(torch.utils.data.Dataset):
    vocabulary = 5
    def __len__(self): return 40
    def __getitem__(self, index): return torch.arange(index, index + 8) % 5, torch.arange(index + 1, index + 9) % 5
"""


@pytest.mark.leaks("matplotlib keeps its fonts open")
def test_models_and_tokens_of_the_users(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(MODULE)
    base = ["train", "--workers", "1", "--epochs", "1"]
    assert (
        main(
            [
                *base,
                "--model",
                "mine:Own",
                "--data",
                "text:my story.txt",
                "--context",
                "8",
                "--run-dir",
                "own",
            ]
        )
        == 0
    )
    assert "tokens/s" in capsys.readouterr().out and (folder / "own/samples.txt").exists()
    assert (
        main(
            [*base, "--model", "gpt", "--width", "8", "--data", "mine:Pairs", "--run-dir", "pairs"]
        )
        == 0
    )
    assert "tokens/s" in capsys.readouterr().out and not (folder / "pairs/samples.txt").exists()
    assert (
        main([*base, "--model", "mine:wide", "--data", "text:my story.txt", "--context", "8"]) == 2
    )
    assert (
        "--model: expected a model (n, t) → (n, t, 256), for tokens of shape [2, 8], got"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--data text:none.txt", "none.txt: expected a text file, got no such file"),
        ("--data text:", "--data: expected text:FILE, the path of a text file, got 'text:'"),
        ("--data text", "--data: expected text:FILE, the path of a text file, got 'text'"),
        ("--data digits", "--context: expected nothing, as the data digits is no text, got 16"),
        ("--context 5000", "expected at least 5001 tokens for training"),
        ("--context 0", "--context: expected a whole number of at least 1, got '0'"),
        ("--layers 0", "--layers: expected a whole number of at least 1, got '0'"),
        ("--width 15", "--width: expected a multiple of 4, twice the number of heads, got 15"),
        ("--dropout 1", "--dropout: expected a probability from 0 to below 1, got '1'"),
        ("--tokenizer none.json", "none.json: expected a tokenizer, got no such file"),
        ("--model lenet", "--model: expected gpt, or a model of your own, for text, got 'lenet'"),
    ],
)
def test_bad_input_gets_one_line_and_leaves_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    before = sorted(path.name for path in folder.iterdir())
    assert train("--quiet", *arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert said in printed.err and printed.err.startswith("lockstep train: error: ")
    assert sorted(path.name for path in folder.iterdir()) == before


def test_gpt_needs_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "--model", "gpt", "--data", "synthetic", "--workers", "1", "--quiet"]) == 2
    )
    assert "--data: expected text:FILE for the model gpt" in capsys.readouterr().err


def test_defaults_for_text() -> None:
    from lockstep.training.options import TrainOptions

    options = TrainOptions(model="gpt", data="text:a/b.txt")
    assert (options.optimizer, options.lr, options.global_batch_size, options.context) == (
        "adamw",
        0.001,
        32,
        256,
    )
    model = lockstep.models.gpt(256, options.context, **options.model_options())
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in lockstep.models.gpt().named_parameters()
    }
    assert TrainOptions().optimizer == "sgd" and torch.is_tensor(model.embedding)
