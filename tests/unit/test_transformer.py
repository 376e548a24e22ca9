"""The GPT looks back only, knows distances, and writes the same text from the same generator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lockstep
from lockstep.errors import ConfigError
from lockstep.models import GPT, build, continue_text, next_token_loss
from lockstep.models.transformer import rotate, rotations

SMALL = {"context": 12, "layers": 2, "heads": 2, "width": 16}


def small(vocabulary: int = 11, **options: float) -> GPT:
    torch.manual_seed(0)
    return lockstep.models.gpt(vocabulary, **{**SMALL, **options})  # type: ignore[arg-type]


def tokens(n: int, t: int, vocabulary: int = 11) -> torch.Tensor:
    return torch.randint(vocabulary, (n, t), generator=torch.Generator().manual_seed(1))


def test_shapes_and_size() -> None:
    assert small()(tokens(3, 12)).shape == (3, 12, 11)
    assert small()(tokens(2, 5)).shape == (2, 5, 11)
    layers, width, vocabulary = 4, 128, 256
    assert (
        sum(p.numel() for p in lockstep.models.gpt().parameters())
        == vocabulary * width + layers * 12 * width**2
    )


def test_the_command_can_build_it() -> None:
    model = build("gpt", 11, (12,), 11, width=16, heads=2, layers=3)
    assert isinstance(model, GPT) and model.context == 12 and len(model.blocks) == 3
    with pytest.raises(
        ConfigError,
        match=r"^layers: expected nothing, as the model lenet has no such argument, got 3",
    ):
        build("lenet", 10, (1, 28, 28), layers=3)


def test_a_later_token_changes_no_earlier_logit() -> None:
    model, given = small(), tokens(2, 12)
    changed = given.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 11
    before, after = model(given), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.isclose(before[:, 7:], after[:, 7:]).all(dim=-1).any()  # and all later ones


def test_products_of_queries_and_keys_depend_on_distances() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 8)
    rotation = rotations(50, 4, torch.device("cpu"))
    queries, keys = (rotate(x.expand(50, 8), rotation) for x in (query[0], key[0]))
    products = queries @ keys.T
    for distance in (0, 3, 20):
        diagonal = products.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))
    assert products[0, 0] - products[3, 0] > 1e-3 or products[3, 0] - products[0, 0] > 1e-3
    torch.testing.assert_close(queries.norm(dim=-1), query.norm().expand(50))


def test_a_compiled_model_has_no_complex_numbers() -> None:
    """Torch's compiler makes no kernels of them."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model, given = small(), tokens(2, 12)
    compiled = torch.compile(model, backend=keep, fullgraph=True)(given)
    assert "complex" not in graphs[0].code
    torch.testing.assert_close(compiled, model(given))


def test_order_matters() -> None:
    model = small()
    there, back = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[2, 1, 3, 4]])
    assert (model(there) - model(back))[0, -1].abs().max() > 1e-5


def test_the_embedding_is_the_output_layer() -> None:
    model = small()
    names = [name for name, p in model.named_parameters() if 11 in p.shape]
    assert names == ["embedding"] and "embedding" in model.state_dict()
    with torch.no_grad():
        model.embedding[5] = 0  # a token of which no other position sees anything
    assert torch.equal(model(tokens(1, 12))[..., 5], torch.zeros(1, 12))


def test_weights_are_drawn_as_in_gpt_2() -> None:
    torch.manual_seed(0)
    model = lockstep.models.gpt(layers=8)
    scaled = 0.02 / math.sqrt(16)
    for name, p in model.named_parameters():
        std = scaled if name.endswith(("attention.output.weight", "mlp.2.weight")) else 0.02
        assert float(p.detach().std()) == pytest.approx(std, rel=0.05), name
    with torch.no_grad():
        logits = model(tokens(2, 64, 256))
    assert float(next_token_loss(logits, tokens(2, 64, 256).roll(1))[0] / 128) == pytest.approx(
        math.log(256), rel=0.02
    )


def test_the_loss_is_that_of_torch() -> None:
    logits, targets = torch.randn(2, 5, 7), tokens(2, 5, 7)
    targets[0, 3:] = -100
    total, count = next_token_loss(logits, targets)
    assert int(count) == 8
    torch.testing.assert_close(total / count, F.cross_entropy(logits.transpose(1, 2), targets))


def test_it_learns_to_count() -> None:
    model = small(dropout=0.0)
    given = (torch.arange(13) + torch.arange(11)[:, None]) % 11
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        total, count = next_token_loss(model(given[:, :-1]), given[:, 1:])
        (total / count).backward()
        optimizer.step()
    assert model.generate(given[:, :2], 6, temperature=0).tolist() == given[:, :8].tolist()


def test_texts_are_those_of_the_generator() -> None:
    model = small()

    def drawn(seed: int, **options: float) -> torch.Tensor:
        return model.generate(
            tokens(3, 2), 20, generator=torch.Generator().manual_seed(seed), **options
        )  # type: ignore[arg-type]

    state = torch.get_rng_state()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.equal(drawn(0), drawn(1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(drawn(0)[:, :2], tokens(3, 2)) and drawn(0).shape == (3, 22)
    assert torch.equal(drawn(0, temperature=0), drawn(1, temperature=0))
    assert torch.equal(drawn(0, top_k=1), drawn(1, temperature=0))
    assert torch.equal(drawn(0, temperature=1e-4), drawn(1, temperature=0))


def test_only_the_most_probable_tokens_are_drawn() -> None:
    class Fixed(nn.Module):
        def forward(self, given: torch.Tensor) -> torch.Tensor:
            return torch.tensor([0.0, 2.0, 1.0, 1.9]).expand(*given.shape, 4)

    draw = {"generator": torch.Generator().manual_seed(0)}
    beginning = torch.zeros(1, 1, dtype=torch.int64)
    assert set(continue_text(Fixed(), beginning, 100, 4, top_k=2, **draw)[0, 1:].tolist()) == {1, 3}
    assert set(continue_text(Fixed(), beginning, 200, 4, top_k=9, **draw)[0, 1:].tolist()) == {
        0,
        1,
        2,
        3,
    }


def test_a_long_text_is_cropped_to_the_context() -> None:
    class Lengths(nn.Module):
        seen: ClassVar[list[int]] = []

        def forward(self, given: torch.Tensor) -> torch.Tensor:
            self.seen.append(given.shape[1])
            return torch.zeros(*given.shape, 3)

    continue_text(Lengths(), tokens(1, 3, 3), 5, 4, temperature=0)
    assert Lengths.seen == [3, 4, 4, 4, 4]


def test_precision_and_dropout() -> None:
    model, given = small(dropout=0.5), tokens(2, 12)
    assert not torch.equal(model(given), model(given))
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = model(given)
    assert low.dtype == torch.bfloat16
    assert torch.equal(model(given), model(given))
    torch.testing.assert_close(low.float(), model(given), atol=0.01, rtol=0.1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"width": 18}, "width: expected a multiple of 4, twice the number of heads, got 18"),
        ({"layers": 0}, "layers: expected a whole number of at least 1, got 0"),
        ({"context": 0}, "context: expected"),
        ({"dropout": 1.0}, "dropout: expected a probability from 0 to below 1, got 1.0"),
    ],
)
def test_sizes_that_do_not_fit(options: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        small(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": torch.zeros(3, dtype=torch.int64)}, "tokens: expected torch.int64 of shape"),
        ({"tokens": torch.zeros(1, 0, dtype=torch.int64)}, "tokens: expected torch.int64 of shape"),
        ({"tokens": torch.zeros(1, 2)}, "tokens: expected torch.int64 of shape"),
        ({"count": -1}, "count: expected"),
        ({"temperature": -0.1}, "temperature: expected"),
        ({"temperature": math.nan}, "temperature: expected"),
        ({"top_k": 0}, "top_k: expected"),
    ],
)
def test_texts_that_cannot_be_drawn(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        small().generate(**{"tokens": tokens(1, 2), "count": 1, **options})  # type: ignore[arg-type]
