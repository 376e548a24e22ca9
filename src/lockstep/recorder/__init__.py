"""What every rank is doing now and has done last, readable by any process of the same user on the same machine."""

from . import places
from .current import alone, current, named, note_batch, note_samples
from .log import Log, log_header, read_log
from .reader import RankState, Raw, Record, Recording, batch_of, open_job
from .writer import Call, Recorder

__all__ = [
    "Call",
    "Log",
    "RankState",
    "Raw",
    "Record",
    "Recorder",
    "Recording",
    "alone",
    "batch_of",
    "current",
    "log_header",
    "named",
    "note_batch",
    "note_samples",
    "open_job",
    "places",
    "read_log",
]
