"""Trains a model of Hugging Face as it is: batches as dicts, padding to the longest, the loss that
the model computes.

python examples/finetune_transformers.py
lockstep run -np 2 examples/finetune_transformers.py
"""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

import lockstep

PRAISE = ["good", "brilliant", "moving", "fresh"]
BLAME = ["bad", "dull", "clumsy", "stale"]
REST = ["the", "plot", "cast", "music", "was", "and", "very", "rather", "scene", "after", "with"]


def reviews(count, seed):
    """Return short reviews of films, with 1 for praise and 0 for blame."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        label = draw.randrange(2)
        words = draw.choices(REST, k=draw.randrange(3, 20)) + draw.choices(
            [BLAME, PRAISE][label], k=2
        )
        draw.shuffle(words)
        found.append((" ".join(words), label))
    return found


def make_tokenizer(texts):
    """Train a small tokenizer; of a pretrained model it is AutoTokenizer.from_pretrained(NAME)."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"])
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def accuracy(output, labels):
    return (output["logits"].argmax(-1) == labels).float().mean()


def main():
    lockstep.init()
    torch.manual_seed(0)
    train = reviews(600, seed=1)
    test = reviews(200, seed=2)
    tokenizer = make_tokenizer(text for text, _ in train)
    pad = DataCollatorWithPadding(tokenizer)

    def loader(part):
        encoded = [{**tokenizer(text), "labels": label} for text, label in part]
        return DataLoader(encoded, batch_size=32, shuffle=part is train, collate_fn=pad)

    # With pretrained weights: AutoModelForSequenceClassification.from_pretrained(NAME,
    # num_labels=2)
    size = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    model = BertForSequenceClassification(
        BertConfig(vocab_size=len(tokenizer), num_labels=2, **size)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = lockstep.Trainer(
        model,
        optimizer,  # no loss_fn: the model computes it from "labels"
        global_batch_size=32,
        virtual_workers=4,  # the same bits on 1 to 4 workers
        metrics={"accuracy": accuracy},
    )
    trainer.fit(loader(train), epochs=3, validate=loader(test))
    if trainer.comm.rank == 0:
        print(f"accuracy {100 * trainer.history[-1]['val_accuracy']:.1f}%")
        print(lockstep.fingerprint(model, optimizer))


if __name__ == "__main__":
    main()
