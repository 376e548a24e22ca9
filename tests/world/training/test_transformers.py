"""Models of Hugging Face train as they are, with the same bits at any number of workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import lockstep
from support.pool import Pool

pytest.importorskip("transformers")

WORDS = 37
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Tokens of sentences of different lengths, a part of which does not count."""

    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            1, WORDS, (3 + index * 5 % 9,), generator=torch.Generator().manual_seed(index)
        )
        labels = ids.clone()
        labels[: index % 3] = -100
        return {"input_ids": ids, "labels": labels}


class Pictures(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 21

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        pixels = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(index))
        return {"pixel_values": pixels, "labels": torch.tensor(index % 3)}


def padded(samples: list[dict[str, torch.Tensor]]) -> Any:
    """Pad to the longest, as the collators of Transformers do."""
    from transformers import BatchEncoding

    longest = max(len(sample["input_ids"]) for sample in samples)

    def stack(name: str, value: int) -> torch.Tensor:
        return torch.stack(
            [nn.functional.pad(s[name], (0, longest - len(s[name])), value=value) for s in samples]
        )

    ids = stack("input_ids", 0)
    return BatchEncoding(
        {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": stack("labels", -100)}
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=16, n_embd=16, n_layer=1, n_head=2, **ends)
    )


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(vocab_size=WORDS, max_position_embeddings=16, **SMALL))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    size = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **size))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **SMALL))


MODELS = {"gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit}


def train(name: str, dropout: bool = True, **options: Any) -> Any:
    """Train for two epochs; returns the fingerprint, and the rows without times."""
    torch.manual_seed(0)
    model = MODELS[name]()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout) and not dropout:
            layer.p = 0.0
    data = DataLoader(
        Pictures() if name == "vit" else Sentences(),
        8,
        shuffle=True,
        collate_fn=None if name == "vit" else padded,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    trainer = lockstep.Trainer(model, optimizer, global_batch_size=8, callbacks=[], **options)
    trainer.fit(data, epochs=2, validate=data)
    columns = ("step", "train_loss", "val_loss")
    return lockstep.fingerprint(model, optimizer), [
        [row[column] for column in columns] for row in trainer.history
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_bits_are_equal_at_any_number_of_workers(pool: Pool, name: str) -> None:
    found = [pool.run(train, name, virtual_workers=4, workers=workers)[0] for workers in (1, 2, 3)]
    assert found[0] == found[1] == found[2]


class Texts(Sentences):
    """Token ids without labels."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index)["input_ids"].tolist()


def test_sequences_in_one_row_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model, texts = gpt2().eval(), [torch.tensor(Texts()[index]) for index in range(len(Texts()))]
    with torch.no_grad():
        losses = [
            float(model(input_ids=text[None], labels=text[None]).loss) * (len(text) - 1)
            for text in texts
        ]
    expected = sum(losses) / sum(len(text) - 1 for text in texts)
    rows = lockstep.data.PackedSequences(Texts(), 16)
    assert len(rows) < len(texts)
    trainer = lockstep.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), global_batch_size=4)
    assert trainer.evaluate(rows)["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_padding_and_the_number_of_workers_change_no_loss(pool: Pool, name: str) -> None:
    """As for one worker with the whole batch, whose loss is the model's own."""
    alone = pool.run(train, name, dropout=False, workers=1)[0][1]
    for workers, passes in ((2, 1), (3, 1), (1, 3)):
        found = pool.run(
            train, name, dropout=False, gradient_accumulation_steps=passes, workers=workers
        )[0][1]
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
