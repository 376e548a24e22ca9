"""The examples that are one process run, and learn where there is something to learn."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep import compilation

EXAMPLES = Path(__file__).parents[2] / "examples"
TWO = ["cpu", "cpu"]


def load(name: str) -> dict[str, Any]:
    """The functions of an example, in this process: a new one would import everything anew."""
    return runpy.run_path(str(EXAMPLES / name))


def accuracies(output: str) -> list[float]:
    return [
        float(line.split()[-1].removesuffix("%"))
        for line in output.splitlines()
        if "test acc" in line
    ]


def test_from_scratch_learns_the_same_on_any_number_of_devices(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = load("devices_from_scratch.py")["train"]
    reached = []
    for devices in (["cpu"], TWO):
        train(devices, epochs=2)
        reached.append(accuracies(capsys.readouterr().out)[-1])
    assert reached[0] > 85
    assert reached[1] == pytest.approx(reached[0], abs=2)


def test_resnet18_in_short_form(capsys: pytest.CaptureFixture[str]) -> None:
    load("devices_resnet18.py")["train"](TWO, images=24, epochs=1, batch_size=12, tested=20)
    assert len(accuracies(capsys.readouterr().out)) == 1


def test_input_splitting(capsys: pytest.CaptureFixture[str]) -> None:
    load("input_splitting.py")["main"]()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "outside: [17, 2] and [15, 3]"
    assert sorted(lines[1:3]) == [
        "in the model: [8, 2] and [7, 3]",
        "in the model: [9, 2] and [8, 3]",
    ]
    assert lines[3] == "back: [17, 2] and [15, 3], the same: True"


def test_balanced_loss(capsys: pytest.CaptureFixture[str]) -> None:
    load("balanced_loss.py")["main"]()
    off = {
        line[:13].strip(): float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()
    }
    assert max(off["gathered"], off["on each"]) < 1e-5 < off["mean of means"]


def test_cnn_with_adam_is_saved_on_the_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = load("cnn_adam.py")
    program["train"](TWO, tmp_path / "model.safetensors", epochs=1)
    assert accuracies(capsys.readouterr().out)[-1] > 70
    model = program["make_model"]()
    model.load_state_dict(program["load_file"](tmp_path / "model.safetensors"))
    assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


def test_hybrid_against_imperative(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "_ONNX", ("no_such_package",))  # ONNX has a test of its own
    torch.compiler.reset()
    load("hybrid_against_imperative.py")["main"]("eager")
    assert "the same as the model: True" in capsys.readouterr().out


def test_gluon(capsys: pytest.CaptureFixture[str]) -> None:
    program = load("gluon_devices.py")
    torch.manual_seed(0)
    program["train"](program["make_net"](), 2, epochs=2)
    assert accuracies(capsys.readouterr().out)[-1] > 0.6


def test_synchronous_against_asynchronous(capsys: pytest.CaptureFixture[str]) -> None:
    program = load("sync_async.py")
    batch = 512 * 512 * 4 + 512 * 4
    found = [program["train"](6, in_flight) for in_flight in (1, 3, 7)]
    assert len({loss for loss, _ in found}) == 1
    assert [peak <= most * batch for (_, peak), most in zip(found, (1, 3, 6), strict=True)] == [
        True
    ] * 3
    program["main"](2)
    assert [line.split("  ")[0].strip() for line in capsys.readouterr().out.splitlines()] == [
        "each waited for",
        "at most 3 under way",
        "no bound",
    ]


@pytest.mark.parametrize("name", ["copy_overlap.py", "cpu_and_gpu.py"])
def test_computing_beside_something_else(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    load(name)["main"](60)
    assert capsys.readouterr().out.splitlines()[-1].endswith("the same: True")


def test_large_batches(capsys: pytest.CaptureFixture[str]) -> None:
    load("large_batches.py")["main"](2)
    small, same_rate, scaled, warm = accuracies(capsys.readouterr().out)
    assert small > max(same_rate, scaled, warm) > 20
