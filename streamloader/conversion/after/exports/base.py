"""The seam between an export and the format that it writes: columns of consecutive samples in, whole files out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from streamloader.format.codecs import Column
from streamloader.format.manifest import Field, FieldLayout
from streamloader.storage.protocol import Buffer

File = tuple[str, Buffer]  # its path below the destination, and its bytes


@dataclass(frozen=True)
class Task:
    """What is to be exported: fields by name, each with its layout in the dataset, and the samples of a piece."""

    layouts: Mapping[str, FieldLayout]
    num_samples: int
    piece: int

    @property
    def fields(self) -> dict[str, Field]:
        """The fields."""
        return {name: layout.field for name, layout in self.layouts.items()}


@dataclass(frozen=True, eq=False)
class Piece:
    """The columns of consecutive samples; `first` is the number of the first, `number` that of the piece."""

    number: int
    first: int
    columns: Mapping[str, Column]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))


class Exporter(Protocol):
    """Turns pieces into files, in any order and from any thread: each piece's files are its own."""

    def files(self, piece: Piece) -> Iterator[File]:
        """Yield the files of one piece."""
        ...

    def last_files(self) -> Iterator[File]:
        """Yield what is written when all pieces are."""
        ...
