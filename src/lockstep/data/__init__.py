"""Data sets by name, and the loader that distributes their samples over the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..registry import Registry, import_object

if TYPE_CHECKING:
    from .batch_samplers import LengthBatchSampler, TokenBatchSampler
    from .image_set import ImageSet
    from .iterable import Substreams
    from .loader import Batch, Loader
    from .packing import PackedSequences
    from .sets import cifar10, digits, fashion_mnist, mnist, synthetic
    from .shard_readers import ShardReader
    from .stream import Stream
    from .text_files import TextBlocks, text

__all__ = [
    "DATA",
    "Batch",
    "ImageSet",
    "LengthBatchSampler",
    "Loader",
    "PackedSequences",
    "ShardReader",
    "Stream",
    "Substreams",
    "TextBlocks",
    "TokenBatchSampler",
    "cifar10",
    "digits",
    "fashion_mnist",
    "mnist",
    "synthetic",
    "text",
]

DATA = Registry(
    "data",
    {
        "digits": "lockstep.data.sets:digits",
        "fashion-mnist": "lockstep.data.sets:fashion_mnist",
        "mnist": "lockstep.data.sets:mnist",
        "cifar10": "lockstep.data.sets:cifar10",
        "synthetic": "lockstep.data.sets:synthetic",
        "text": "lockstep.data.text_files:text",
    },
    open_ended=True,
)

_LAZY = {
    "Batch": "lockstep.data.loader:Batch",
    "ImageSet": "lockstep.data.image_set:ImageSet",
    "LengthBatchSampler": "lockstep.data.batch_samplers:LengthBatchSampler",
    "Loader": "lockstep.data.loader:Loader",
    "PackedSequences": "lockstep.data.packing:PackedSequences",
    "ShardReader": "lockstep.data.shard_readers:ShardReader",
    "Stream": "lockstep.data.stream:Stream",
    "Substreams": "lockstep.data.iterable:Substreams",
    "TextBlocks": "lockstep.data.text_files:TextBlocks",
    "TokenBatchSampler": "lockstep.data.batch_samplers:TokenBatchSampler",
    **{target.partition(":")[2]: target for target in DATA.targets.values()},
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_object(name, _LAZY[name])
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
