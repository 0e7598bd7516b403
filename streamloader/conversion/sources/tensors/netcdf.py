"""NetCDF files: variables along the samples' dimension are the fields. See formats/netcdf/MAPPING.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamloader.conversion.sources.files import Listing
from streamloader.conversion.sources.needs import need
from streamloader.conversion.sources.tensors.arrays import ArraySource, pick
from streamloader.conversion.sources.tensors.blockfile import BlockFile
from streamloader.conversion.sources.tensors.classicfile import ClassicFile, variable_field
from streamloader.conversion.sources.tensors.dimensions import along, decoded, sample_dimension
from streamloader.conversion.sources.tensors.h5arrays import open_h5
from streamloader.conversion.sources.tensors.h5file import H5File
from streamloader.conversion.sources.tensors.h5groups import child, datasets_in, descend, is_group
from streamloader.conversion.sources.tensors.hdf5 import Scan, finish_scan, opened_ahead, stack_scans
from streamloader.conversion.sources.tensors.netcdf3 import is_classic, read_header
from streamloader.conversion.sources.wish import Wish
from streamloader.errors import SourceError
from streamloader.storage.protocol import ObjectInfo

NAME = "netcdf"
_EXTENSIONS = ("nc", "nc4", "cdf")

# how the netCDF library marks a dimension that has no values of its own
_BARE = b"This is a netCDF dimension but not a netCDF variable"


def matches(listing: Listing) -> bool:
    """Return whether the listing holds a file with an extension of netCDF."""
    return bool(listing.of(*_EXTENSIONS))


def open_source(listing: Listing, wish: Wish) -> ArraySource:
    """Return the source; the files are concatenated along the samples' dimension, sorted by path.

    Raises `SourceError` for a file that cannot be read, for variables that no field holds, and where no dimension is
    that of most variables; `FieldError` for a wished field that is not there; `UsageError` without h5py for netCDF-4.
    """
    files = listing.of(*_EXTENSIONS)
    if not files:
        raise SourceError(f"{listing.url} names no .nc, .nc4 or .cdf", "give a file, a folder of files, or a glob")
    scans = [_scan(listing, info, raw, wish) for info, raw in opened_ahead(listing.store, files)]
    return stack_scans(listing.url, files, scans, wish)


def _scan(listing: Listing, info: ObjectInfo, raw: BlockFile, wish: Wish) -> Scan:
    if is_classic(raw):
        return _scan_classic(listing, info, raw, wish)
    with open_h5(raw) as file:
        group = descend(file, listing.inner, raw.name)
        where = f"{raw.name}::{group.name}" if listing.inner else raw.name
        if not is_group(group):
            raise SourceError(f"{where} is a variable", "give its group, and name it with --fields")
        names, groups = datasets_in(group)
        wanted = pick(names, wish, where).values()
        variables = {name: child(group, name, where) for name in wanted}
        variables = {name: one for name, one in variables.items() if not _is_bare(one)}
        dimensions = {name: _dimensions(one) for name, one in variables.items()}
        axes = [axis for name, own in dimensions.items() for axis in zip(own, variables[name].maxshape, strict=True)]
        endless = {dimension for dimension, longest in axes if longest is None}
        named, said = _chosen(dimensions, wish, where, endless)
        said["passed_over"] += groups
        chosen = {field: variables[name] for field, name in named.items()}
        return finish_scan(H5File(listing.store, info, {}), chosen, wish, said)


def _scan_classic(listing: Listing, info: ObjectInfo, raw: BlockFile, wish: Wish) -> Scan:
    if listing.inner:
        raise SourceError(f"{raw.name} is of a classic format, which has no groups", f"leave ::{listing.inner} away")
    header = read_header(raw, info.size)
    dimensions = {name: variable.dimensions for name, variable in sorted(header.variables.items())}
    named, said = _chosen(dimensions, wish, raw.name, {header.unlimited})
    variables = {field: header.variables[name] for field, name in named.items()}
    for field, name in named.items():
        variable_field(variables[field], f"{raw.name}::/{name}")
    attributes = {field: variable.attributes for field, variable in variables.items()}
    container, more = decoded(ClassicFile(listing.store, info, variables), attributes, wish.raw)
    return Scan(container, {**said, "arrays": named, **more})


def _chosen(
    dimensions: Mapping[str, tuple[str, ...]], wish: Wish, where: str, unlimited: set[str]
) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the variables by field that have the samples for their first dimension, and the notes."""
    named = pick(dimensions, wish, where)
    mine = {name: dimensions[name] for name in named.values()}
    dimension = sample_dimension(mine, where, unlimited)
    kept, others = along(mine, dimension, bool(wish.fields), where)
    notes = {"dimension": dimension, "passed_over": others}
    return {field: name for field, name in named.items() if name in kept}, notes


def _is_bare(variable: Any) -> bool:
    name = variable.attrs.get("NAME", b"") if _is_scale(variable) else b""
    return bool((name.encode() if isinstance(name, str) else bytes(name)).startswith(_BARE))


def _is_scale(variable: Any) -> bool:
    h5ds = need("h5py", "hdf5").h5ds
    return bool(h5ds.is_scale(variable.id))


def _dimensions(variable: Any) -> tuple[str, ...]:
    """Return the paths of a variable's dimensions; a coordinate is its own."""
    name = _shown(variable.name)
    own = [f"{name}[{axis}]" for axis in range(variable.ndim)]
    if _is_scale(variable):
        return (name, *own[1:])
    return tuple(_shown(scales[0].name) if len(scales) else own[axis] for axis, scales in enumerate(variable.dims))


def _shown(path: Any) -> str:
    return str(path).removeprefix("/")
