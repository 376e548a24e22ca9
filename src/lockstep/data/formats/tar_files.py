"""Tar files as of WebDataset: files that follow each other and have one name up to the first dot
are a sample.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ..shard_readers import Blocks, Runs, read_range

_TAR_UNIT = 512  # bytes; headers and data begin at multiples of it


class Tar:
    """Reads ``.tar`` files: consecutive files with the same name up to the first dot are one
    sample, as in WebDataset.

    A sample is a dict: ``"__key__"`` is that name with its folder, and each ending, such as
    ``"jpg"`` or ``"seg.png"``, has the bytes of its file.
    """

    index_name = "tar 100"

    def blocks(self, path: Path) -> Blocks:
        """Return the blocks: runs of 100 samples, or of 4 MiB."""
        runs = Runs(100)
        key = None
        end = 0
        with path.open("rb") as file:
            for member in _members(file):
                key_of_member = _split_name(member.name)[0]
                if key is not None and key_of_member != key:
                    runs.add(end)
                key = key_of_member
                # the data of a file are padded to whole units
                end = member.offset_data + -(-member.size // _TAR_UNIT) * _TAR_UNIT
            # A damaged header in the middle looks to `tarfile` like the end of the archive.
            if file.read(_TAR_UNIT) != bytes(_TAR_UNIT):
                raise ValueError(
                    f"cut off or damaged after byte {end}: it has no mark of its end there"
                )
        if key is not None:
            runs.add(end)
        runs.end(end)
        return runs.sizes, runs.places

    def read(self, path: Path, place: tuple[int, ...]) -> Sequence[Any]:
        """Return the samples of the block."""
        data = read_range(path, *place)
        samples: list[dict[str, Any]] = []
        for member in _members(io.BytesIO(data)):
            key, ending = _split_name(member.name)
            if not samples or samples[-1]["__key__"] != key:
                samples.append({"__key__": key})
            if ending in samples[-1]:
                raise ValueError(f"it has two files {member.name}")
            samples[-1][ending] = data[member.offset_data : member.offset_data + member.size]
        return samples


def _members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """Iterate over the files in a tar file, without folders and links; leave `file` behind the last
    entry.
    """
    try:
        archive = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115 - the caller closes the file
    except tarfile.ReadError as error:
        raise ValueError(f"not a tar file without compression: {error}") from None
    while (member := archive.next()) is not None:
        archive.members = []  # type: ignore[attr-defined] # it would keep all of them
        if member.issparse():
            raise ValueError(f"{member.name} is a sparse file, which is not read")
        if member.isreg():
            yield member
    file.seek(archive.offset)


def _split_name(name: str) -> tuple[str, str]:
    """Return the key of a file in a tar file, and its ending in lower case."""
    folder, slash, last = name.rpartition("/")
    stem, _, ending = last.partition(".")
    return folder + slash + stem, ending.lower()
