"""Names of a model's tensors, without what wrappers such as ``torch.compile`` add to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from ..errors import ConfigError

T = TypeVar("T")


def plain_names(state_dict: Mapping[str, T]) -> dict[str, T]:
    """Return the entries under the names that the unwrapped model gives them, in the same order.

    Removes every ``_orig_mod`` of ``torch.compile``, and a leading ``module`` of
    DistributedDataParallel or DataParallel if all names have it.

    Raises:
        ConfigError: if two entries would have the same name.
    """
    parts = [[part for part in name.split(".") if part != "_orig_mod"] for name in state_dict]
    while parts and all(len(names) > 1 and names[0] == "module" for names in parts):
        parts = [names[1:] for names in parts]
    plain = dict(zip((".".join(names) for names in parts), state_dict.values(), strict=True))
    if len(plain) < len(state_dict):
        raise ConfigError(
            "state_dict",
            "names that differ without 'module.' and '_orig_mod.'",
            found=", ".join(state_dict),
        )
    return plain


def match_names(saved: Iterable[str], ours: Iterable[str]) -> dict[str, str]:
    """Return the names of a model's entries by those under which the same model was saved, wrapped
    in another way.

    Args:
        saved: names of a saved model or of a part of it.
        ours: the names of this model, which may be compiled or in a DataParallel where the saved
            one was not, or the other way round.

    Returns:
        Saved name → our name, without those that are the same; empty if the names differ in more
        than in wrappers.
    """
    saved = list(saved)
    ours = list(ours)
    if set(saved) <= set(ours):
        return {}
    try:
        plain_saved, plain_ours = (
            plain_names({name: name for name in names}) for names in (saved, ours)
        )
    except ConfigError:
        return {}
    if not plain_saved.keys() <= plain_ours.keys():
        return {}
    return {
        name: plain_ours[plain] for plain, name in plain_saved.items() if name != plain_ours[plain]
    }
