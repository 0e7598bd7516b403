"""HDF5 files: the datasets of a group are the fields, their first axis the samples. See formats/hdf5/MAPPING.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamloader.conversion.sources.base import READ_THREADS
from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.tensors.arrays import ArraySource, Container, one_length, pick, stack
from streamloader.conversion.sources.tensors.blockfile import BlockFile
from streamloader.conversion.sources.tensors.dimensions import ATTRIBUTES, check_packing, decoded
from streamloader.conversion.sources.tensors.h5arrays import describe, open_h5
from streamloader.conversion.sources.tensors.h5file import H5File
from streamloader.conversion.sources.tensors.h5groups import child, datasets_in, descend, is_dataset
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.format.threads import run_all
from streamloader.storage.protocol import ObjectInfo, Store

NAME = "hdf5"
_EXTENSIONS = ("h5", "hdf5")


def matches(listing: Listing) -> bool:
    """Return whether the listing holds a file with the extension of HDF5."""
    return bool(listing.of(*_EXTENSIONS))


def open_source(listing: Listing, wish: Wish) -> ArraySource:
    """Return the source; the files are concatenated, sorted by path.

    Raises `SourceError` for a file, group or dataset that cannot be read or that no field holds, and for datasets of
    unequal lengths; `FieldError` for a wished field that is not there; `UsageError` without h5py.
    """
    files = listing.of(*_EXTENSIONS)
    if not files:
        raise SourceError(f"{listing.url} names no .h5 or .hdf5", "give a file, a folder of files, or a glob")
    need("h5py", "hdf5")
    scans = [
        scan_group(raw, listing.store, info, listing.inner, wish) for info, raw in opened_ahead(listing.store, files)
    ]
    return stack_scans(listing.url, files, scans, wish)


def opened_ahead(store: Store, files: Sequence[ObjectInfo]) -> Iterator[tuple[ObjectInfo, BlockFile]]:
    """Yield every file with its first MiB read, which mostly holds all that describes it: several at once."""
    for first in range(0, len(files), READ_THREADS):
        some = files[first : first + READ_THREADS]
        yield from zip(some, run_all(lambda info: BlockFile(store, info).warm(), some, READ_THREADS), strict=True)


@dataclass(frozen=True)
class Scan:
    """What a file holds, and what its provenance tells."""

    file: Container
    notes: Mapping[str, Any]


def stack_scans(url: str, files: Sequence[ObjectInfo], scans: Sequence[Scan], wish: Wish) -> ArraySource:
    """Return the source of all files. Raises `SourceError` where their fields, or raw values, are not of one kind."""
    if wish.raw:
        check_packing([(scan.file, scan.notes) for scan in scans])
    return stack(url, files, [scan.file for scan in scans], scans[0].notes)


def scan_group(raw: BlockFile, store: Store, info: ObjectInfo, inner: str, wish: Wish) -> Scan:
    """Return the datasets right in a group of a file, or the one at `inner`. Raises as `open_source`."""
    with open_h5(raw) as file:
        node = descend(file, inner, raw.name)
        where = f"{raw.name}::{node.name}" if inner else raw.name
        if is_dataset(node):
            named = pick([node.name.rpartition("/")[2]], wish, where)
            return finish_scan(H5File(store, info, {}), dict.fromkeys(named, node), wish, {}, _is_netcdf(file, [node]))
        names, others = datasets_in(node)
        named = pick(names, wish, where)
        if not named:
            held = f"no dataset, but the groups {', '.join(others[:10])}" if others else "no dataset"
            raise SourceError(f"{where} holds {held}", "name the group that holds them, as in file.h5::/group")
        datasets = {field: child(node, name, where) for field, name in named.items()}
        notes = {"passed_over": others} if others else {}
        netcdf = _is_netcdf(file, datasets.values())
        return finish_scan(H5File(store, info, {}), datasets, wish, notes, netcdf)


def _is_netcdf(file: Any, datasets: Iterable[Any]) -> bool:
    """Return whether a netCDF library wrote the file: only there do attributes such as `scale_factor` have a meaning
    that everybody shares.
    """
    scales = {"DIMENSION_LIST", "CLASS", "_Netcdf4Dimid"}
    return "_NCProperties" in file.attrs or any(not scales.isdisjoint(dataset.attrs) for dataset in datasets)


def finish_scan(
    file: H5File, datasets: Mapping[str, Any], wish: Wish, notes: Mapping[str, Any], netcdf: bool = True
) -> Scan:
    """Return what the h5py datasets of these fields are, with their names and attributes in the notes.

    Packed values of `netcdf` are decoded, unless the user wants them as stored.
    """
    arrays = {
        field: describe(dataset, f"{file.where}::{dataset.name}", file.info.size, wish.fields.get(field))
        for field, dataset in datasets.items()
    }
    one_length({array.path: array.length for array in arrays.values()}, file.where)
    names = {field: dataset.name.rpartition("/")[2] for field, dataset in datasets.items()}
    attributes = {field: _attributes(dataset) for field, dataset in datasets.items()}
    raw = wish.raw or not netcdf
    container, said = decoded(H5File(file.store, file.info, arrays), attributes, raw)
    return Scan(container, {"arrays": names, **said, **notes})


def _attributes(dataset: Any) -> dict[str, Any]:
    """Return the attributes that are told; others may be of types that nothing reads."""
    names = set(dataset.attrs)
    return {name: dataset.attrs[name] for name in ATTRIBUTES if name in names}
