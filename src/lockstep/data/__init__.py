"""Data sets by name, and the loader that deals them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry import Registry, import_object

if TYPE_CHECKING:
    from .images import ImageSet
    from .loader import Batch, Loader
    from .sources import cifar10, digits, fashion_mnist, mnist, synthetic

__all__ = ["DATA", "Batch", "ImageSet", "Loader", "cifar10", "digits", "fashion_mnist", "mnist", "synthetic"]

DATA = Registry(
    "data",
    {
        "digits": "lockstep.data.sources:digits",
        "fashion-mnist": "lockstep.data.sources:fashion_mnist",
        "mnist": "lockstep.data.sources:mnist",
        "cifar10": "lockstep.data.sources:cifar10",
        "synthetic": "lockstep.data.sources:synthetic",
    },
    open_ended=True,
)

_ELSEWHERE = {
    "Batch": "lockstep.data.loader:Batch",
    "ImageSet": "lockstep.data.images:ImageSet",
    "Loader": "lockstep.data.loader:Loader",
    **{target.partition(":")[2]: target for target in DATA.targets.values()},
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return import_object(name, _ELSEWHERE[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
