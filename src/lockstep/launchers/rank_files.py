"""What each rank says, kept in files beside being shown: DIR/rank.N/stdout and DIR/rank.N/stderr."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from typing_extensions import Self

from .lines import Piece

__all__ = ["RankFiles"]

Show = Callable[[int, int, Piece], None]


class RankFiles:
    """Writes the lines of ranks into their files, and passes them on.

    Args:
        folder: made where it is missing.
        show: called with what has been written: rank, 0 or 1 for the stream, and the piece.
    """

    def __init__(self, folder: Path, show: Show) -> None:
        self._folder, self._show = folder, show
        self._files: dict[tuple[int, int], BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def write(self, rank: int, stream: int, piece: Piece) -> None:
        """Take a piece of a rank's; a progress bar is kept as it looks at its end."""
        if piece.ended:
            file = self._file(rank, stream)
            file.write(piece.text + b"\n")
            file.flush()
        self._show(rank, stream, piece)

    def _file(self, rank: int, stream: int) -> BinaryIO:
        if (rank, stream) not in self._files:
            path = self._folder / f"rank.{rank}"
            path.mkdir(exist_ok=True)
            for number, name in enumerate(("stdout", "stderr")):  # both, also of a rank that says nothing to one
                self._files[rank, number] = self._stack.enter_context((path / name).open("wb"))
        return self._files[rank, stream]
