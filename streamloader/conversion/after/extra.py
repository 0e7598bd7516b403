"""Objects below a dataset's URL that its manifest does not promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamloader.conversion.after.subject import Subject
from streamloader.conversion.destination import FILES, RECORD
from streamloader.conversion.refused import QUARANTINE
from streamloader.format.destination import BAD, OURS, PARTS
from streamloader.format.extend import APPEND
from streamloader.format.opening import JOB, RECEIPTS, ROOT
from streamloader.format.publish import CLAIM

_LEFTOVERS = (JOB, FILES, CLAIM, *(f"{folder}/" for folder in (PARTS, RECEIPTS, BAD, APPEND)))


@dataclass(frozen=True)
class Extra:
    """Objects that no manifest promises: those where only the dataset's own belong, and how many others there are."""

    objects: tuple[str, ...] = ()
    leftovers: int = 0
    others: int = 0

    @classmethod
    def of(cls, subjects: list[Subject], names: tuple[str, ...], sizes: Mapping[str, int] | None) -> Extra:
        """Look at every object that is listed, but for those of splits that are not verified."""
        if sizes is None or not (subjects or names):
            return cls()
        by_split = {subject.split: subject for subject in subjects}
        objects: list[str] = []
        leftovers = others = 0
        for path in sizes:
            first, _, below = path.partition("/")
            split, inner = (first, below) if first in names else ("", path)
            subject = by_split.get(split)
            fields = {OURS, *(subject.manifest.fields if subject else ())}
            quarantined = inner.startswith(QUARANTINE.removesuffix(".jsonl"))
            if inner in (ROOT, RECORD) or quarantined or (split and not subject):
                continue
            if subject and (subject.promises(inner) or subject.keeps(inner)):
                continue
            if inner.startswith(_LEFTOVERS) or (subject and subject.appending and inner.partition("/")[0] in fields):
                leftovers += 1
            elif inner.partition("/")[0] in fields:
                objects.append(path)
            else:
                others += 1
        return cls(tuple(sorted(objects)), leftovers, others)
