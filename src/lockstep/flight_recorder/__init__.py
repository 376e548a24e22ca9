"""The flight recorder: each rank records its collectives in shared memory that other processes of
its host can read.
"""

from . import layout
from .log import LogFile, RecordLog, read_log, read_log_header
from .reader import RankState, RawRecord, Record, RecorderReader, decode_batch, describe, open_job
from .writer import (
    CallSignature,
    FlightRecorder,
    activity,
    current,
    in_method,
    named,
    note_batch,
    note_data_wait,
    note_samples,
    note_step,
    recorded_collectives,
    recorded_exchanges,
    solo_section,
)

__all__ = [
    "CallSignature",
    "FlightRecorder",
    "LogFile",
    "RankState",
    "RawRecord",
    "Record",
    "RecordLog",
    "RecorderReader",
    "activity",
    "current",
    "decode_batch",
    "describe",
    "in_method",
    "layout",
    "named",
    "note_batch",
    "note_data_wait",
    "note_samples",
    "note_step",
    "open_job",
    "read_log",
    "read_log_header",
    "recorded_collectives",
    "recorded_exchanges",
    "solo_section",
]
