"""Checks the site that `make docs` has built: what a reader searches for is found, every page leads
to the next one, and the reference shows each argument.
"""

from __future__ import annotations

import html
import inspect
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import lockstep
from lockstep.training.step.step_arguments import StepOptions

ROOT = Path(__file__).resolve().parent.parent
SITE = ROOT / "site"

# What people type → the page that answers; it is the first result.
SEARCHES = {
    "OOM": "training.html#out-of-memory-oom",
    "out of memory": "training.html#out-of-memory-oom",
    "freeze": "training.html#freezing-layers",
    "pin_memory": "data.html#pin_memory-and-copies-to-the-device",
    "gather_for_metrics": "coming-from/accelerate.html",
    "bf16": "training.html#mixed-precision-bf16-and-fp16",
    "mixed precision": "training.html#mixed-precision-bf16-and-fp16",
    "EMA": "recipes/ema.html",
    "class weights": "training.html#class-weights",
    "learning rate finder": "recipes/learning-rate-finder.html",
    "seed": "training.html#seed-of-a-run",
    "F1": "recipes/f1-auc.html",
    "AUC": "recipes/f1-auc.html",
    "Dice": "recipes/segmentation.html",
    "contrastive": "recipes/contrastive.html",
    "checkpoint": "recipes/checkpoints.html",
    "resume": "recipes/checkpoints.html",
    "save_state": "coming-from/accelerate.html",
    "tqdm": "coming-from/accelerate.html#progress-bars-tqdm-and-trackers-wandb",
    "wandb": "coming-from/accelerate.html#progress-bars-tqdm-and-trackers-wandb",
    "gradient accumulation": "coming-from/accelerate.html#gradient-accumulation",
    "warm-up": "training.html#warm-up-of-the-learning-rate-warmup",
    "warmup": "training.html#warm-up-of-the-learning-rate-warmup",
    "scheduler": "training.html#schedulers-of-the-learning-rate",
    "progress bar": "training.html#progress-bars",
    "notebook": "notebook.html",
    "GPU": "gpus.html",
}


def main() -> int:
    """Print what is wrong with the site; 1 if anything is."""
    problems = [*_searches(), *_pages(), *_trainer()]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _searches() -> list[str]:
    node = shutil.which("node")
    if node is None:
        print("The search was not tried: node is not installed.")
        return []
    command = [node, str(ROOT / "packaging/search_worker.js"), str(SITE), *SEARCHES]
    answered = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    problems = []
    for (query, page), line in zip(SEARCHES.items(), answered.splitlines(), strict=True):
        found = json.loads(line)
        if not found or found[0] != page:
            shown = ", ".join(found[:3]) or "nothing"
            problems.append(f"the search for {query!r}: expected {page} first, found {shown}")
    return problems


def _pages() -> list[str]:
    problems = []
    for path in sorted(SITE.rglob("*.html")):
        name = path.relative_to(SITE).as_posix()
        text = path.read_text()
        is_in_navigation = not name.startswith("programs/") and name != "404.html"
        if is_in_navigation and "md-footer__link--" not in text:
            problems.append(f"{name}: no link to a previous or next page")
        if name.startswith("api/"):
            shown = html.unescape(re.sub(r"<[^>]+>", "", text))
            problems += [
                f"{name}: {mark!r} is of the source, not for readers"
                for mark in ("::", "Unpack[", "Never")
                if mark in shown
            ]
    return problems


def _trainer() -> list[str]:
    """Each option of a `Trainer` stands on its page with its default."""
    text = html.unescape(re.sub(r"<[^>]+>", "", (SITE / "api/training.html").read_text()))
    (section,) = re.findall(r"Trains a model on all workers.*?Raises:", text, re.DOTALL)
    arguments = inspect.signature(lockstep.Trainer).parameters
    of_step = inspect.signature(lockstep.TrainStep).parameters
    options = {name: of_step[name] for name in StepOptions.__annotations__}
    problems = []
    for name, parameter in {**arguments, **options}.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        shown = re.search(rf"{name}\s*\((.*?)\)\s*–", section, re.DOTALL)
        has_default = parameter.default is not inspect.Parameter.empty
        if shown is None or (
            has_default and f"default:{parameter.default!r}" not in _squeezed(shown[1])
        ):
            problems.append(f"api/training.html: {name} of Trainer, or its default, is missing")
    return problems


def _squeezed(text: str) -> str:
    return re.sub(r"\s+", "", text)


if __name__ == "__main__":
    sys.exit(main())
