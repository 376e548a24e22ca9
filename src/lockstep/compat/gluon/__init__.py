"""Gluon's interface for training on a list of devices: programs for MXNet run after a change of
their imports.

``from lockstep.compat import gluon`` and ``from lockstep.compat.gluon import autograd, init, loss
as gloss, nd, nn, utils as gutils, cpu, gpu``. Arrays are torch tensors. docs/replicas.md lists the
supported names.
"""

from __future__ import annotations

from . import autograd, init, loss, nd, nn, sym, utils
from .block import Block, HybridBlock
from .context import Context, cpu, gpu
from .parameter import Parameter, ParameterDict
from .trainer import Trainer

__all__ = [
    "Block",
    "Context",
    "HybridBlock",
    "Parameter",
    "ParameterDict",
    "Trainer",
    "autograd",
    "cpu",
    "gpu",
    "init",
    "loss",
    "nd",
    "nn",
    "sym",
    "utils",
]
