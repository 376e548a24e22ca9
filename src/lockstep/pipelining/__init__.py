"""Pipeline parallelism: a model split by layers into stages, one for each worker, that process
micro-batches.
"""

from __future__ import annotations

from .partition import pipeline
from .pipe import Pipeline

__all__ = ["Pipeline", "pipeline"]
