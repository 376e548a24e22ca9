"""Callbacks of language models: perplexity, tokens per second, and texts that the model writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import arguments, flight_recorder
from ...errors import ConfigError
from ...models import continue_text
from ...parallel.shards import mix
from ...system import atomic_files
from ...system.terminal_text import plain
from ..modes import evaluating
from .base import Callback, Row, TrainingContext
from .writing import WriteGuard

_PRINTED = 76  # columns of a printed sample


class TokenColumns(Callback):
    """Adds the columns `val_perplexity`, which is exp(val_loss), and `tokens_per_second` to the
    rows of the history.

    Pass it before callbacks that show or write rows. It is for losses that are the mean
    cross-entropy of a token.

    Args:
        tokens: the number of tokens in a sample.

    Raises:
        ConfigError: for anything but a number above 0.
    """

    every_rank = True
    adds_columns = ("val_perplexity", "tokens_per_second")

    def __init__(self, tokens: int) -> None:
        self._tokens = arguments.number("tokens", tokens, above=0)

    def on_train_start(self, trainer: TrainingContext) -> None:
        """Let the launcher count tokens as well."""
        flight_recorder.current.tokens_per_sample = float(self._tokens)

    def on_validation_end(self, trainer: TrainingContext, results: dict[str, float]) -> None:
        """Add the perplexity to the results of a validation."""
        # of a loss that no float can hold the exponential of, the run has diverged
        results["perplexity"] = math.exp(results["loss"]) if results["loss"] < 700 else math.inf

    def on_row(self, trainer: TrainingContext, row: Row) -> None:
        """Add the speed."""
        row["tokens_per_second"] = row["samples_per_second"] * self._tokens


class TextSamples(Callback):
    """Lets the model continue some texts after each epoch; prints them, and appends them to
    `samples.txt`.

    The model is put into evaluation mode meanwhile. Numbers are drawn from a generator of its own,
    keyed by seed and epoch, so that the training is the same with and without this callback.
    `samples.txt` is in the run directory; a run without one only prints.

    Args:
        prompts: the beginnings of the texts as tokens, all of one length.
        decode: returns the text of tokens.
        context: number of last tokens that the model sees.
        length: number of tokens to add.
        temperature: see `lockstep.models.continue_text`, as for `top_k`.
        top_k: see there.
        seed: the seed of the draws.
        show: whether to print the texts.

    Raises:
        ConfigError: for an invalid argument.
    """

    # Rank 0 writes; a sharded model can only be used by all workers together.
    every_rank = True

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        context: int,
        *,
        length: int = 200,
        temperature: float = 0.8,
        top_k: int | None = 50,
        seed: int = 0,
        show: bool = True,
    ) -> None:
        self._decode = arguments.function(
            "decode", decode, "a function from tokens to their text", takes=1
        )
        self._context = arguments.whole("context", context, least=1)
        self._length = arguments.whole("length", length, least=0)
        self._temperature = arguments.number("temperature", temperature, least=0)
        self._top_k = None if top_k is None else arguments.whole("top_k", top_k, least=1)
        self._seed = arguments.whole("seed", seed)
        self._show = arguments.flag("show", show)
        self._prompts = _as_tokens(prompts)
        self._write_guard = WriteGuard()
        self._size = 0  # of what is in the file, so that a resumed run writes no text twice

    def state_dict(self) -> dict[str, Any]:
        """Return the size of the file in bytes."""
        return {"size": self._size} if self._size else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load it."""
        self._size = int(state["size"])

    def on_train_epoch_end(self, trainer: TrainingContext, row: Row) -> None:
        """Continue the texts, print and write them."""
        if trainer.comm.rank and not trainer.step.strategy.collective_forward:
            return
        epoch = int(row["epoch"])
        written = self._texts(trainer, epoch)
        if trainer.comm.rank:
            return
        prompts = [self._decode(prompt) for prompt in self._prompts.tolist()]
        if self._show:
            for prompt, text in zip(prompts, written, strict=True):
                print(_line(prompt, text), flush=True)
        if trainer.run_dir is not None:
            path = trainer.run_dir / "samples.txt"
            with self._write_guard.to(path):
                earlier = path.read_bytes()[: self._size] if self._size and path.exists() else b""
                section = _section(epoch, int(row["step"]), prompts, written).encode()
                atomic_files.write_bytes(path, earlier + section)
                self._size = len(earlier + section)

    def _texts(self, trainer: TrainingContext, epoch: int) -> list[str]:
        """Return what the model adds to each prompt."""
        generator = torch.Generator().manual_seed(mix((self._seed, epoch)))
        # each length would be another program to compile
        eager = torch.compiler.set_stance("force_eager")
        with evaluating(trainer.model), eager, trainer.step.precision.autocast():
            tokens = continue_text(
                trainer.model,
                self._prompts.to(trainer.comm.device),
                self._length,
                self._context,
                temperature=self._temperature,
                top_k=self._top_k,
                generator=generator,
            )
        return [self._decode(added) for added in tokens[:, self._prompts.shape[1] :].tolist()]


def _as_tokens(prompts: Any) -> torch.Tensor:
    """Return the tokens of the prompts: int64, shape (prompts, tokens of each)."""
    try:
        tokens = torch.as_tensor(prompts)
    except (TypeError, ValueError, RuntimeError):
        tokens = torch.zeros(0)
    if tokens.dim() != 2 or tokens.shape[1] < 1 or tokens.dtype != torch.int64:
        expected = "the tokens of each text, whole numbers in lists of one length"
        raise ConfigError(
            "prompts", expected, prompts, "A tokenizer's encode() makes them of a text."
        )
    return tokens


def _line(prompt: str, text: str) -> str:
    """Return the end of a prompt and the beginning of what follows it, as one line."""
    end_of_prompt = plain(prompt)[-24:]
    return f"  {end_of_prompt}▸{plain(text)}"[:_PRINTED]


def _section(epoch: int, step: int, prompts: Sequence[str], texts: Sequence[str]) -> str:
    head = f"=== epoch {epoch}, step {step}: the text given, ▸ and what the model wrote\n"
    pairs = enumerate(zip(prompts, texts, strict=True), start=1)
    return (
        head
        + "".join(f"--- {number}\n{prompt}▸{text}\n" for number, (prompt, text) in pairs)
        + "\n"
    )
