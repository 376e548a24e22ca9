"""A kernel of Jupyter, as a notebook starts it, without the notebook."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import KernelManager

from support.documented_code import ROOT

pytestmark = pytest.mark.leaks("the client of the kernel keeps sockets and threads")

CELL = """
import torch, lockstep

def train():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    model = torch.nn.Linear(4, 2)
    trainer = lockstep.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.CrossEntropyLoss(), 16)
    trainer.fit(data, 2)
    print("rank", trainer.comm.rank, "of", trainer.comm.size)
    return lockstep.fingerprint(model)

"""


@pytest.fixture(scope="module")
def kernel() -> Iterator[Any]:
    manager = KernelManager()
    manager.start_kernel()
    client = manager.client()
    client.start_channels()
    client.wait_for_ready(timeout=60)
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    manager.cleanup_resources()


def outputs(kernel: Any, code: str) -> list[tuple[str, Any]]:
    """What a cell with `code` shows: (kind of message, its content)."""
    request, found = kernel.execute(code), []
    while True:
        message = kernel.get_iopub_msg(timeout=100)
        if message["parent_header"].get("msg_id") != request:
            continue
        kind, content = message["msg_type"], message["content"]
        if kind == "status" and content["execution_state"] == "idle":
            return found
        found.append((kind, content))


@pytest.mark.parametrize(
    ("call", "ranks"),
    [
        ("print(train())", ["rank 0 of 1"]),
        ("print(lockstep.launch(train, workers=2))", ["rank 0 of 2", "rank 1 of 2"]),
    ],
    ids=["in the kernel", "launched"],
)
def test_a_cell_shows_one_output_that_updates_and_what_is_printed(
    kernel: Any, call: str, ranks: list[str]
) -> None:
    shown = outputs(kernel, CELL + call)
    assert "error" not in [kind for kind, _ in shown], shown
    displays = [content for kind, content in shown if kind == "display_data"]
    updates = [content for kind, content in shown if kind == "update_display_data"]
    assert len(displays) == 1 and updates
    (own,) = {content["transient"]["display_id"] for content in [*displays, *updates]}
    assert own and "epoch 2/2" in updates[-1]["data"]["text/plain"]
    assert updates[-1]["data"]["text/html"].count("<tr>") == 3  # a heading and two epochs
    printed = "".join(
        content["text"]
        for kind, content in shown
        if kind == "stream" and content["name"] == "stdout"
    )
    *lines, fingerprint = printed.splitlines()
    assert sorted(lines) == ranks and len(fingerprint) == 64
    assert "\x1b" not in str(shown)


def test_the_notebook_of_the_examples_runs_from_top_to_bottom(kernel: Any) -> None:
    cells = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]
    printed = ""
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        shown = outputs(kernel, "".join(cell["source"]))
        assert "error" not in [kind for kind, _ in shown], shown
        stored = {output["output_type"] for output in cell["outputs"]}
        assert stored == {kind for kind, _ in shown} & {"stream", "display_data"}
        printed += "".join(content["text"] for kind, content in shown if kind == "stream")
    assert "the weights are equal in every bit: True" in printed
