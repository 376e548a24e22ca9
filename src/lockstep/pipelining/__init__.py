"""One model cut by layers into stages, one for each worker, through which a batch passes in parts."""

from __future__ import annotations

from .make import pipeline
from .pipe import Pipeline

__all__ = ["Pipeline", "pipeline"]
