"""Whether all ranks have the same data set: its length and some of its samples are compared before the first epoch."""

from __future__ import annotations

import datetime
import decimal
import enum
import fractions
import logging
import math
import os
import random
import re
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..activity import Activity
from ..errors import MismatchError
from ..flight_recorder import named
from ..invariance.shards import mix

if TYPE_CHECKING:
    from ..communicator import Communicator

__all__ = [
    "Digest",
    "DigestRequest",
    "SampleDigests",
    "check_same_data",
    "compare_samples",
    "digest_of",
    "places",
    "preserve_own_generators",
    "read_digests",
]

_log = logging.getLogger(__name__)

_PLACES = 32  # samples that are compared
_IN_BLOCKS = 4  # of a data set in blocks, each of which may be a block that is read for it
_BUDGET_S = 0.5  # after which no further sample is read
_READ_TWICE = 4  # samples that are read twice in any case, to find out whether they are random by themselves
_AGAIN, _AGAIN_BUDGET_S = 8, 2.0  # readings of a sample that differs among ranks, and the time for all of them
_FEW = 4  # of fewer samples than this, it is said that they were all
_SHOWN_AS_DIFFERENT = 4  # samples that are read again
_PLACE = 5  # part of the key of the places


# --- Digests of samples -----------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """What is compared of a tensor, an array, or any other value in a sample.

    Attributes:
        kind: type and shape.
        bits: a checksum of the value.
        sketch: projections of its numbers and, last, their norm, where rounding may make them differ; else None.
        tolerance: the difference relative to the norm that rounding may make.
    """

    kind: str
    bits: int
    sketch: tuple[float, ...] | None = None
    tolerance: float = 0.0


Digest = dict[str, Leaf]
"""The leaves of a sample by their place in it, such as "[0]" or "['label']"; "" for a sample that is one leaf."""

_MAX_LEAVES, _MAX_VISITED, _MAX_DEPTH = 64, 2000, 8
_MAX_BYTES = 1 << 28  # of an object that is read as an array
_MAX_VALUES = 1 << 22  # of a larger tensor, so many values at equal distances are compared


def digest_of(sample: Any) -> Digest:
    """Return the digest of a sample: the same in every process for the same values.

    Values are compared by what they are, not where: of objects of any other class the attributes count, and addresses
    in a `repr` do not. Of paths of files only the last part counts, as hosts may keep the files in other folders.
    """
    found: Digest = {}
    rest = 0
    try:
        # an object may lead to all others of the program
        for path, leaf in islice(_leaves(sample, "", 0), _MAX_VISITED):
            if len(found) < _MAX_LEAVES:
                found[path] = leaf
            else:
                rest = mix((rest, zlib.crc32(path.encode(errors="replace")), zlib.crc32(leaf.kind.encode()), leaf.bits))
    except Exception:  # of a class that cannot be looked into; what was found until then is compared
        _log.debug("a sample cannot be compared as a whole", exc_info=True)
    if rest:
        found["…"] = Leaf("further values", rest)
    return found


def _leaves(value: Any, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    leaf = _leaf(value)
    if leaf is not None:
        yield path, leaf
    elif depth == _MAX_DEPTH:
        yield path, Leaf(type(value).__name__, 0)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{path}[{_text(key)}]", depth + 1)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        for name, item in zip(value._fields, value, strict=True):
            yield from _leaves(item, f"{path}.{name}", depth + 1)
    elif isinstance(value, (tuple, list)):
        yield path, Leaf(f"{type(value).__name__} of {len(value)}", 0)
        for number, item in enumerate(value):
            yield from _leaves(item, f"{path}[{number}]", depth + 1)
    elif isinstance(value, AbstractSet):
        # its order differs among processes
        digests = sorted(zlib.crc32(repr(digest_of(item)).encode()) for item in value)
        yield path, Leaf(f"{type(value).__name__} of {len(value)}", mix(digests))
    elif isinstance(value, torch.Tensor):
        yield from _leaves_of_tensor(value, path, depth)
    else:
        yield from _leaves_of_object(value, path, depth)


_PLAIN = (
    *(str, bytes, bytearray, int, bool, type(None), complex, range, slice, type(Ellipsis)),
    *(decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta, uuid.UUID),
    *(torch.dtype, torch.Size, np.dtype),
)


def _leaf(value: Any) -> Leaf | None:
    """Return a value as a leaf; None for one that consists of others, or of which only the class says what it is."""
    if isinstance(value, enum.Enum):
        return Leaf(type(value).__name__, zlib.crc32(value.name.encode()))
    if isinstance(value, os.PathLike):
        return Leaf("path", zlib.crc32(_last_part(os.fsdecode(value)).encode(errors="replace")))
    if type(value) is float:
        return _leaf_of_numbers("float", torch.tensor([value], dtype=torch.float64, device="cpu"))
    if isinstance(value, str):
        return Leaf("str", zlib.crc32(_text(value).encode(errors="replace")))
    if isinstance(value, _PLAIN):
        return Leaf(type(value).__name__, zlib.crc32(repr(value).encode(errors="replace")))
    if type(value) in (list, tuple) and value:
        return _leaf_of_list(value)
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_quantized and not value.is_nested
        return _leaf_of_tensor(value) if strided and value.device.type != "meta" else None
    array = value if isinstance(value, (np.ndarray, np.generic)) else _as_array(value)
    if array is None or (isinstance(array, np.ndarray) and array.dtype.hasobject):
        return None
    return _leaf_of_array(np.asarray(array), "" if array is value else f"{type(value).__name__} ")


def _leaf_of_list(values: Sequence[Any]) -> Leaf | None:
    """Return a list of numbers as one leaf; None for a list of anything else."""
    types = set(map(type, values))
    if types == {int}:
        return Leaf(f"list of {len(values)} int", zlib.crc32(repr(list(values)).encode()))
    if types <= {int, float}:
        numbers = torch.tensor(list(map(float, values)), dtype=torch.float64, device="cpu")
        return _leaf_of_numbers(f"list of {len(values)} float", numbers)
    return None


def _text(value: Any) -> str:
    """Return a value for a comparison: of what looks like the path of a file, only its last part."""
    if isinstance(value, str) and value.startswith(os.sep) and "\n" not in value:
        value = _last_part(value)
    return _without_addresses(repr(value))


def _last_part(path: str) -> str:
    return path.rpartition(os.sep)[2]


def _without_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-fA-F]+", "0x", text)


def _as_array(value: Any) -> np.ndarray[Any, Any] | None:
    """Return what offers itself as an array, such as an image of PIL, or a column of pandas; None for the rest."""
    if isinstance(value, type) or not (hasattr(value, "__array_interface__") or hasattr(value, "__array__")):
        return None
    if getattr(value, "nbytes", 0) > _MAX_BYTES:  # such as a whole file that is not in memory
        return None
    try:
        return np.asarray(value)
    except Exception:  # of any library; its attributes are compared then
        return None


def _leaf_of_array(array: np.ndarray[Any, Any], prefix: str) -> Leaf:
    kind = f"{prefix}array {array.dtype} {list(array.shape)}"
    if array.dtype.kind in "fiubc":
        native = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("="), copy=False)).reshape(-1)
        if native.dtype in (np.float16, np.float32, np.float64, np.uint8):
            # a copy where it cannot be written to, of which torch would warn
            return _leaf_of_numbers(kind, torch.from_numpy(native if native.flags.writeable else native.copy()))
        return Leaf(kind, zlib.crc32(native.view(np.uint8).data))
    return Leaf(kind, zlib.crc32(np.ascontiguousarray(array).tobytes()))


def _leaf_of_tensor(tensor: torch.Tensor) -> Leaf:
    plain = tensor.detach().as_subclass(torch.Tensor)
    kind = f"tensor {str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}"
    plain = plain.resolve_conj().resolve_neg()
    flat = (torch.view_as_real(plain) if plain.is_complex() else plain).reshape(-1)
    return _leaf_of_numbers(kind, flat)


def _leaf_of_numbers(kind: str, flat: torch.Tensor) -> Leaf:
    if flat.numel() > _MAX_VALUES:
        flat = flat[:: -(-flat.numel() // _MAX_VALUES)]
    flat = flat.cpu().contiguous()
    bits = zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
    tolerance = _tolerance(flat)
    return Leaf(kind, bits, _sketch(flat) if tolerance else None, tolerance)


def _tolerance(flat: torch.Tensor) -> float:
    """Return the difference, relative to the norm, that other processors and libraries may make of the same sample."""
    if flat.dtype is torch.uint8:  # decoders of JPEG round differently, by 1 or 2 of 255
        return 0.02 if flat.numel() >= 1024 else 0.0
    if not flat.is_floating_point() or not flat.numel():
        return 0.0
    if flat.element_size() == 8:
        return 1e-9
    if flat.element_size() == 4:
        return 1e-5 if flat.numel() >= 16 else 1e-6
    return 4 * torch.finfo(flat.dtype).eps


_PROJECTIONS, _WIDTH = 8, 1024


@lru_cache(maxsize=1)
def _signs() -> tuple[torch.Tensor, torch.Tensor]:
    """Return random signs: those of the rows into which values are folded, and of the columns in each projection."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 2, (_MAX_VALUES // _WIDTH,), generator=generator, device="cpu") * 2 - 1
    columns = torch.randint(0, 2, (_WIDTH, _PROJECTIONS), generator=generator, device="cpu") * 2 - 1
    return rows.double(), columns.double()


def _sketch(flat: torch.Tensor) -> tuple[float, ...]:
    """Return random projections of values, and their norm: the distance of two sketches is about that of the values.

    Source: Johnson and Lindenstrauss, "Extensions of Lipschitz mappings into a Hilbert space", 1984.
    """
    rows, columns = _signs()
    width = min(_WIDTH, flat.numel())
    whole = flat.numel() // width * width
    dtype = torch.float64 if flat.element_size() == 8 or flat.numel() < 4096 else torch.float32
    values = torch.nan_to_num(flat.to(dtype), nan=700.0, posinf=1000.0, neginf=-1000.0)
    # sums and not products of matrices, whose libraries have threads that a loader process does not inherit
    folded = (values[:whole].view(-1, width) * rows[: whole // width].to(dtype)[:, None]).sum(0)
    if whole < flat.numel():
        folded[: flat.numel() - whole] += values[whole:] * rows[whole // width].to(dtype)
    projections = (folded.double()[:, None] * columns[:width]).sum(0) / math.sqrt(_PROJECTIONS)
    return (*projections.tolist(), float(values.square().sum().sqrt()))


def _leaves_of_tensor(tensor: torch.Tensor, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    """Yield the leaves of a tensor that is not dense, or has no values."""
    kind = f"{str(tensor.layout).removeprefix('torch.')} tensor {tensor.dtype} {_shape(tensor)}"
    try:
        if tensor.is_nested:
            parts: Any = list(tensor.detach().unbind())
        elif tensor.is_quantized:
            parts = [tensor.detach().int_repr()]
        elif tensor.layout is torch.sparse_coo:
            coalesced = tensor.detach().coalesce()
            parts = [coalesced.indices(), coalesced.values()]
        elif tensor.device.type == "meta":
            parts = []
        else:
            parts = [tensor.detach().to_dense()]
    except (RuntimeError, NotImplementedError):  # of a layout that torch cannot convert
        parts = []
    yield path, Leaf(kind, 0)
    yield from _leaves(parts, path, depth + 1)


def _shape(tensor: torch.Tensor) -> str:
    try:
        return str(list(tensor.shape))
    except RuntimeError:  # of a nested tensor
        return ""


def _leaves_of_object(value: Any, path: str, depth: int) -> Iterator[tuple[str, Leaf]]:
    kind = type(value).__qualname__
    if isinstance(value, np.ndarray):
        yield from _leaves(value.tolist(), path, depth + 1)
        return
    if is_dataclass(value) and not isinstance(value, type):
        attributes = {each.name: getattr(value, each.name, None) for each in fields(value)}
    elif callable(value):  # a function, or a class
        yield path, Leaf(kind, zlib.crc32(getattr(value, "__qualname__", kind).encode()))
        return
    else:
        attributes = dict(getattr(value, "__dict__", {}))
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            names = (slots,) if isinstance(slots, str) else slots
            attributes |= {name: getattr(value, name, None) for name in names if not name.startswith("__")}
    if attributes:
        yield path, Leaf(kind, 0)
        for name in sorted(attributes):
            yield from _leaves(attributes[name], f"{path}.{name}", depth + 1)
        return
    try:
        text = _without_addresses(repr(value))
    except Exception:  # of any class
        text = ""
    yield path, Leaf(kind, zlib.crc32(text.encode(errors="replace")))


def _alike(one: Leaf, other: Leaf) -> bool:
    """Return whether two leaves have the same values, up to rounding."""
    return one.kind == other.kind and (one.bits == other.bits or _rounded(one, other))


def _rounded(one: Leaf, other: Leaf) -> bool:
    if one.sketch is None or other.sketch is None:
        return False
    distance = math.dist(one.sketch[:-1], other.sketch[:-1])
    return distance <= one.tolerance * max(one.sketch[-1], other.sketch[-1])


# --- Reading, in the process that loads -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Asks for the digests of samples.

    Attributes:
        key: key of the epoch's random draws.
        indices: the samples.
        times: number of times that each of them is read.
        budget_s: seconds after which no further one is read.
    """

    key: int
    indices: tuple[int, ...]
    times: tuple[int, ...]
    budget_s: float


@dataclass(frozen=True, slots=True)
class SampleDigests:
    """What a `DigestRequest` has found.

    Attributes:
        samples: the digests of each sample, one for each time that it was read; none of one that raised an exception.
        seconds: how long it took.
    """

    samples: dict[int, list[Digest]]
    seconds: float


def read_digests(request: DigestRequest, read: Callable[[int], Any]) -> SampleDigests:
    """Read samples with `read`; an exception is left to the training, which may not need the sample."""
    began = time.monotonic()
    found: dict[int, list[Digest]] = {}
    for index, times in zip(request.indices, request.times, strict=True):
        digests: list[Digest] = []
        for number in range(times):
            if (found or number) and time.monotonic() - began > request.budget_s:
                break
            try:
                digests.append(digest_of(read(index)))
            except Exception:  # of the data set
                digests = []
                break
        found[index] = digests
        if time.monotonic() - began > request.budget_s:
            break
    return SampleDigests(found, time.monotonic() - began)


@contextmanager
def preserve_own_generators(dataset: Any) -> Iterator[None]:
    """Restore the random generators that a data set has as attributes, or its parts have, after a `with` block."""
    restore = [each() for each in _savers(dataset)]
    try:
        yield
    finally:
        for call in restore:
            call()


_MAX_OBJECTS, _MAX_ITEMS = 2000, 64


def _savers(dataset: Any) -> Iterator[Callable[[], Callable[[], None]]]:
    """Yield for each random generator within a data set a function that saves its state and returns one to restore."""
    seen: set[int] = set()
    pending = [dataset]
    while pending and len(seen) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, torch.Tensor, np.ndarray, type)):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.Generator, np.random.RandomState)):
            yield _saver(value.get_state, value.set_state)
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            yield _saver(lambda bits=bits: bits.state, lambda state, bits=bits: setattr(bits, "state", state))  # type: ignore[misc]
        elif type(value) is random.Random:
            yield _saver(value.getstate, value.setstate)
        elif isinstance(value, Mapping):
            pending += [item for _, item in zip(range(_MAX_ITEMS), _values(value), strict=False)]
        elif isinstance(value, (list, tuple)):
            pending += value[:_MAX_ITEMS]
        else:
            pending += list(getattr(value, "__dict__", {}).values())


def _values(mapping: Mapping[Any, Any]) -> Iterator[Any]:
    # only of a plain dict: another mapping may read a file for each value
    return iter(mapping.values() if isinstance(mapping, dict) else ())


def _saver(get: Callable[[], Any], put: Callable[[Any], Any]) -> Callable[[], Callable[[], None]]:
    def save() -> Callable[[], None]:
        state = get()
        return lambda: put(state)

    return save


# --- Comparison among the ranks ---------------------------------------------------------------------------------------


def places(length: int, in_blocks: bool) -> tuple[int, ...]:
    """Return the samples of a data set of `length` that are compared: the first, the last, and some between them."""
    count = min(length, _IN_BLOCKS if in_blocks else _PLACES)
    if count == length:
        return tuple(range(length))
    found = dict.fromkeys((0, length - 1))
    number = 0
    while len(found) < count:
        found[mix((_PLACE, length, number)) % length] = None
        number += 1
    return tuple(found)


def check_same_data(
    comm: Communicator,
    what: str,
    settings: Mapping[str, Any],
    length: int,
    key: int,
    read: Callable[[DigestRequest], SampleDigests],
    in_blocks: bool = False,
) -> None:
    """Check that all ranks of a communicator have the same data set; called by every rank.

    Each rank reads the same few samples. A sample that is read again where it differs, and is another one then, is
    random by itself: rank 0 says so, and what is random in it is not compared. What differs by rounding only is said.

    Args:
        comm: of the ranks; with a process group.
        what: the data set, for messages.
        settings: what must be the same as well, by name.
        length: samples in this rank's data set.
        key: key of the epoch's random draws.
        read: reads samples where the training reads them.
        in_blocks: whether a sample may cost a block of samples.

    Raises:
        MismatchError: on every rank, if the data sets differ; says how, and on which ranks.
    """
    chosen = places(length, in_blocks)
    times = tuple(2 if number < _READ_TWICE and not in_blocks else 1 for number in range(len(chosen)))
    with Activity(f"lockstep: comparing {what} of the workers"):
        own = read(DigestRequest(key, chosen, times, _BUDGET_S))
        comparison = _Comparison(comm, what, own)
        with named("comparison of the data"):
            heads = comm.allgather_object((length, dict(settings), comparison.total))
        for rank, (there, _, _) in enumerate(heads):
            if there != heads[0][0]:
                lengths = f"rank 0 has {heads[0][0]} samples, rank {rank} has {there}"
                raise MismatchError(f"{what} differs among the workers: {lengths}. {_HINT_LENGTH}")
        for rank, (_, theirs, _) in enumerate(heads):
            for name, value in heads[0][1].items():
                if theirs.get(name) != value:
                    raise MismatchError(
                        f"{name} of the loader of {what} is {value!r} on rank 0 and {theirs.get(name)!r} on rank "
                        f"{rank}: all workers need the same one, as they divide each global batch"
                    )
        if len({total for *_, total in heads}) > 1:
            comparison.compare(key, read)
    comparison.say()
    if len(own.samples) < min(_FEW, len(chosen)) and comm.rank == 0:
        _log.warning(
            "%s: only %d of %d samples were compared among the workers, because reading them took %.1f s",
            *(what, len(own.samples), len(chosen), own.seconds),
        )


_HINT_LENGTH = (
    "Each worker makes the whole data set, and Lockstep divides each global batch: leave out what divides it by rank, "
    "give what splits or shuffles it a seed, and sort what lists files"
)
_HINT_SAMPLES = (
    "The data set must be the same on every worker: give what splits, shuffles or draws it a seed, and sort what lists "
    "files"
)


class _Comparison:
    """Compares the digests of the samples that each rank has read.

    Args:
        comm: of the ranks.
        what: the data set, for messages.
        own: what this rank has read.
    """

    def __init__(self, comm: Communicator, what: str, own: SampleDigests) -> None:
        self._comm, self._what = comm, what
        self._own = {index: digests[0] for index, digests in own.samples.items() if digests}
        self._random = _random_leaves(own.samples, self._own)
        self._rounded: tuple[int, int] | None = None  # a sample that differs by rounding, and the rank

    @property
    def total(self) -> int:
        """A digest of all that is compared."""
        texts = [
            repr((index, path, leaf.kind, leaf.bits))
            for index, digest in self._own.items()
            for path, leaf in digest.items()
            if path not in self._random
        ]
        return mix(zlib.crc32(text.encode()) for text in texts)

    def compare(self, key: int, read: Callable[[DigestRequest], SampleDigests]) -> None:
        """Find out what differs, and whether that is random by itself.

        Raises:
            MismatchError: on every rank, if samples differ.
        """
        differing = self._differing()
        if not differing:
            return
        chosen = _covering(differing)
        again = read(DigestRequest(key, chosen, (_AGAIN,) * len(chosen), _AGAIN_BUDGET_S))
        self._random |= _random_leaves(again.samples, self._own)
        differing = [each for each in self._differing() if each[0] in chosen]
        if not differing:
            return
        index, path, rank = differing[0]
        where = f", in its element {path}," if path else ""
        raise MismatchError(f"{self._what}: sample {index} differs{where} on ranks 0 and {rank}. {_HINT_SAMPLES}")

    def _differing(self) -> list[tuple[int, str, int]]:
        """Return (sample, leaf, rank) of what differs from rank 0, on every rank the same."""
        with named("comparison of the samples"):
            gathered = self._comm.allgather_object((self._own, self._random))
        self._random = set().union(*(each for _, each in gathered))
        first, differing = gathered[0][0], []
        for rank, (theirs, _) in enumerate(gathered):
            for index in first.keys() & theirs.keys():
                for path in sorted(first[index].keys() | theirs[index].keys()):
                    one, other = first[index].get(path), theirs[index].get(path)
                    if path in self._random or one == other:
                        continue
                    if one is None or other is None or not _alike(one, other):
                        differing.append((index, path, rank))
                    else:
                        self._rounded = self._rounded or (index, rank)
        return sorted(differing, key=lambda each: (each[2], each[0]))

    def say(self) -> None:
        """Log on rank 0 what is random by itself, and what differs by rounding."""
        if self._comm.rank != 0:
            return
        if self._random:
            _say_once(
                f"{self._what}: samples are random by themselves{_listed(self._random)}: read again with the same "
                "seeds, they are others. They are not compared among the workers, and depend on which worker reads "
                "them. Draw from the global generators of torch, Python or NumPy, which are seeded for each sample."
            )
        if self._rounded is not None:
            index, rank = self._rounded
            _say_once(
                f"{self._what}: sample {index} on rank {rank} differs from that of rank 0 by rounding, as other "
                "processors or versions of libraries cause it."
            )


def _listed(paths: set[str]) -> str:
    shown = ", ".join(sorted(path for path in paths if path)[:3])
    return f" ({shown})" if shown else ""


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        _log.warning("%s", text)


def _random_leaves(samples: Mapping[int, Sequence[Digest]], first: Mapping[int, Digest]) -> set[str]:
    """Return the leaves that differ when a sample is read again."""
    found: set[str] = set()
    for index, digests in samples.items():
        before = first.get(index)
        if before is None:
            continue
        for digest in digests:
            for path in before.keys() | digest.keys():
                one, other = before.get(path), digest.get(path)
                if one is None or other is None or not _alike(one, other):
                    found.add(path)
    return found


def _covering(differing: Sequence[tuple[int, str, int]]) -> tuple[int, ...]:
    """Return a few samples among those that differ, if possible one for each leaf that differs."""
    by_leaf: dict[str, int] = {}
    for index, path, _ in differing:
        by_leaf.setdefault(path, index)
    found = dict.fromkeys([*by_leaf.values(), *(index for index, *_ in differing)])
    return tuple(found)[:_SHOWN_AS_DIFFERENT]


# --- Samples of an iterable data set ----------------------------------------------------------------------------------


def compare_samples(first: Mapping[int, Digest], other: Mapping[int, Digest]) -> int | None:
    """Return the first sample that two ranks have read differently, by more than rounding; None if there is none."""
    for number in sorted(first.keys() & other.keys()):
        one, two = first[number], other[number]
        if one.keys() != two.keys() or any(not _alike(one[path], two[path]) for path in one):
            return number
    return None
