"""Adapts a pretrained language model with LoRA: only the adapters are trained, summed over workers
and saved.

python examples/lora.py
lockstep run -np 2 examples/lora.py
"""

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep

WORDS = 64
LENGTH = 24


class Counting(torch.utils.data.Dataset):
    """Sentences in which each token is the one before plus a step."""

    def __init__(self, steps):
        self.steps = steps

    def __len__(self):
        return 256

    def __getitem__(self, index):
        step = self.steps[index % len(self.steps)]
        tokens = (index + step * torch.arange(LENGTH)) % WORDS
        return {"input_ids": tokens, "labels": tokens}


def pretrained():
    """Return a model that counts by one and two; in real life
    GPT2LMHeadModel.from_pretrained(NAME).
    """
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, **ends)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    lockstep.Trainer(model, optimizer, global_batch_size=32, virtual_workers=4, callbacks=[]).fit(
        Counting([1, 2]), 8
    )
    return model


def main():
    comm = lockstep.init()
    base = pretrained()
    everything = sum(parameter.numel() for parameter in base.parameters())
    config = LoraConfig(
        r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base, config)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    trainer = lockstep.Trainer(
        model, optimizer, global_batch_size=32, virtual_workers=4, run_dir="runs/lora"
    )
    before = trainer.evaluate(Counting([3]))["loss"]
    trainer.fit(Counting([3]), epochs=8)
    after = trainer.evaluate(Counting([3]))["loss"]
    if comm.rank == 0:
        saved = trainer.run_dir / "pretrained"
        PeftModel.from_pretrained(GPT2LMHeadModel(base.config), saved)
        share = 100 * sum(parameter.numel() for parameter in adapters) / everything
        print(
            f"loss {before:.3f} -> {after:.3f} with {share:.0f} % of the parameters, which are in "
            f"{saved}"
        )
        print(lockstep.fingerprint(model, optimizer))


if __name__ == "__main__":
    main()
