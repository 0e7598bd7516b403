"""Make the stores beside this file and `expected.npz`, all from the same arrays, and read every store back.

    python formats/zarr/stores/make.py --zarr2-python OTHER/bin/python

The Python that runs it needs zarr>=3.1, xarray, tensorstore, zarrs, numcodecs, dask, icechunk, kerchunk, fastparquet,
h5py and virtualizarr. OTHER is a virtual environment with zarr==2.18.*, numcodecs<0.16 and xarray<2025; it writes
`zarr2.zarr` alone. README.md lists the stores and the versions that wrote the committed ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
import zarr

HERE = Path(__file__).parent
SIZES = {"time": 23, "level": 3, "lat": 12, "lon": 20}
CHUNKS = {"time": 6, "level": 2, "lat": 7, "lon": 12}  # none divides its size: every last chunk is partial
SHARDS = {"time": 12, "level": 2, "lat": 14, "lon": 24}
GROUP = {"Conventions": "CF-1.8", "title": "tiny reanalysis"}
PACKAGES = "zarr xarray tensorstore zarrs numcodecs dask icechunk kerchunk fastparquet h5py virtualizarr fsspec numpy"
PACKAGES += " pandas"  # fastparquet writes the references with it
WKT = (
    'GEOGCRS["WGS 84",DATUM["World Geodetic System 1984",ELLIPSOID["WGS 84",6378137,298.257223563,'
    'LENGTHUNIT["metre",1]]],PRIMEM["Greenwich",0,ANGLEUNIT["degree",0.0174532925199433]],CS[ellipsoidal,2],'
    'AXIS["geodetic latitude (Lat)",north,ORDER[1],ANGLEUNIT["degree",0.0174532925199433]],'
    'AXIS["geodetic longitude (Lon)",east,ORDER[2],ANGLEUNIT["degree",0.0174532925199433]],ID["EPSG",4326]]'
)


class Variable(NamedTuple):
    """One array as stored: `fill` is the value of missing chunks; None leaves it to the writer or writes null."""

    dims: tuple[str, ...]
    values: np.ndarray
    attributes: dict[str, Any]
    fill: float | int | None = None


def variables() -> dict[str, Variable]:
    """Return the variables of every dimension store, undecoded."""
    rng = np.random.default_rng(23)
    time, level, lat, lon = (np.arange(size) for size in SIZES.values())
    wave = 8 * np.sin(lat / 3)[:, None] + 6 * np.cos(lon / 4)
    t2m = (wave * 100 + 40 * time[:, None, None] + rng.integers(-8, 8, (23, 12, 20))).astype("i2")
    t2m[rng.random(t2m.shape) < 0.01] = -32767
    z = 5000 - 400 * level[:, None, None] + wave + time[:, None, None, None]
    z = (np.round(2 * z + rng.integers(-3, 3, z.shape)) / 2).astype("f4")
    z[rng.random(z.shape) < 0.01] = np.nan
    z[12:18, :2, :7, :12] = np.nan  # one chunk of CHUNKS
    z[:3, 2, :7, :6] = np.nan  # one inner chunk of `python3.zarr`
    count = rng.integers(0, 5, (23, 12, 20)).astype("u1")
    count[:6, 7:, 12:] = 0  # one chunk of CHUNKS
    count[18:, :7] = 0  # two more
    hours = 6 * time + 12 * (time > 14)  # 18 hours lie between elements 14 and 15
    packing = {"units": "K", "scale_factor": 0.01, "add_offset": 280.0}
    dates = {"units": "hours since 2001-01-01", "calendar": "proleptic_gregorian", "standard_name": "time"}
    north, east = {"units": "degrees_north"}, {"units": "degrees_east"}
    return {
        "time": Variable(("time",), hours.astype("i8"), dates),
        "level": Variable(("level",), np.array([500, 850, 1000], "i4"), {"units": "hPa"}),
        "lat": Variable(("lat",), 60.0 - 0.25 * lat, north | {"standard_name": "latitude"}),
        "lon": Variable(("lon",), 5.0 + 0.25 * lon, east | {"standard_name": "longitude"}),
        "t2m": Variable(("time", "lat", "lon"), t2m, packing, -32767),
        "z": Variable(("time", "level", "lat", "lon"), z, {"units": "m2 s-2"}, np.nan),
        "orog": Variable(("lat", "lon"), (rng.integers(0, 4000, (12, 20)) / 4).astype("f4"), {"units": "m"}),
        "run": Variable(("time",), np.repeat([1, 2, 5], [8, 7, 8]).astype("i4"), {"long_name": "forecast run"}),
        "count": Variable(("time", "lat", "lon"), count, {"long_name": "observations"}, 0),
    }


def image() -> np.ndarray:
    """Return level 0 of the image: channels, rows, columns."""
    rng = np.random.default_rng(5)
    rows, columns = np.indices((96, 128))
    smooth = 500 + 400 * np.sin(rows / 15) * np.cos(columns / 20)
    return (np.stack([smooth, smooth[::-1] + 7]) + rng.integers(0, 6, (2, 96, 128))).astype("u2")


def sizes_along(dims: tuple[str, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the sizes of the dimensions, in their order."""
    return tuple(sizes[dim] for dim in dims)


def chunk_indices(
    shape: tuple[int, ...], chunks: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each chunk's index and its part of the array; the last ones are cut at the array's end."""
    for index in itertools.product(*(range(-(-size // chunk)) for size, chunk in zip(shape, chunks, strict=True))):
        yield index, tuple(slice(i * chunk, (i + 1) * chunk) for i, chunk in zip(index, chunks, strict=True))


def is_fill(part: np.ndarray, fill: float | int | None) -> bool:
    """Say whether every element equals the fill value, so that the chunk need not exist."""
    return fill is not None and np.array_equal(part, np.full_like(part, fill), equal_nan=part.dtype.kind == "f")


def dataset() -> xr.Dataset:
    """Return the variables as an xarray dataset that is not decoded, t2m with its `_FillValue`."""
    out = xr.Dataset(attrs=GROUP)
    for name, (dims, values, attributes, fill) in variables().items():
        packed = {"_FillValue": np.int16(fill)} if name == "t2m" else {}
        out[name] = (dims, values, attributes | packed)
    return out


def encoding(zarr_format: int, sharded: bool = False) -> dict[str, dict[str, Any]]:
    """Return the chunks of the variables with more than one dimension, as xarray takes them."""
    out: dict[str, dict[str, Any]] = {}
    for name, variable in variables().items():
        if len(variable.dims) > 1 or name in ("time", "run"):
            out[name] = {"chunks": sizes_along(variable.dims, CHUNKS)}
    if zarr_format == 3:
        out["z"]["fill_value"] = np.nan
    if sharded:
        out["z"]["shards"] = sizes_along(variables()["z"].dims, SHARDS)
    return out


def write_xarray(path: Path, zarr_format: int, consolidated: bool = True) -> None:
    """Write a store by xarray; z of version 3 in shards."""
    chosen = encoding(zarr_format, sharded=zarr_format == 3)
    dataset().to_zarr(path, mode="w", zarr_format=zarr_format, consolidated=consolidated, encoding=chosen)


def write_zarrs(path: Path) -> None:
    """Write a store of version 3 whose chunks are encoded by the zarrs pipeline."""
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"}):
        write_xarray(path, 3)


def python3_options() -> dict[str, dict[str, Any]]:
    """Return the codecs of each array of `python3.zarr`; inner chunks are much smaller than CHUNKS."""
    from zarr import codecs

    zstd = codecs.BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
    lz4 = codecs.BloscCodec(cname="lz4", clevel=5, shuffle="bitshuffle")
    big, gzip = codecs.BytesCodec(endian="big"), codecs.GzipCodec(level=6)
    checked = [codecs.ZstdCodec(level=3), codecs.Crc32cCodec()]
    shards, dots = {"shape": (6, 2, 7, 12), "index_location": "end"}, {"name": "v2", "separator": "."}
    start = {"shape": (12, 7, 12), "index_location": "start"}
    return {
        "time": {"chunks": (6,), "compressors": gzip},  # its header has the time of writing
        "level": {"chunks": (3,), "compressors": checked},
        "lat": {"chunks": (7,), "serializer": big, "compressors": None},
        "lon": {"chunks": (12,), "compressors": lz4, "chunk_key_encoding": dots},
        "t2m": {"chunks": (6, 7, 12), "compressors": zstd},
        "z": {
            "chunks": (3, 1, 7, 6),
            "shards": shards,
            "filters": codecs.TransposeCodec(order=(3, 2, 1, 0)),
            "compressors": codecs.ZstdCodec(level=3),
        },
        "orog": {
            "chunks": (7, 12),
            "filters": codecs.TransposeCodec(order=(1, 0)),
            "serializer": big,
            "compressors": checked,
        },
        "run": {"chunks": (6,), "serializer": big, "compressors": checked, "chunk_key_encoding": dots},
        "count": {"chunks": (6, 7, 12), "shards": start, "compressors": lz4},
    }


def write_python3(path: Path) -> None:
    """Write a store of version 3 by zarr-python, each array with other codecs; not consolidated."""
    group = zarr.open_group(path, mode="w", zarr_format=3, attributes=GROUP)
    options = python3_options()
    for name, (dims, values, attributes, fill) in variables().items():
        packed = {"_FillValue": fill} if name == "t2m" else {}
        array = group.create_array(
            name,
            shape=values.shape,
            dtype=values.dtype,
            fill_value=0 if fill is None else fill,
            attributes=attributes | packed,
            dimension_names=dims,
            **options[name],
        )
        array[...] = values


def python2_options() -> dict[str, dict[str, Any]]:
    """Return the dtype, codecs, order and separator of each array of `python2_codecs.zarr`."""
    import numcodecs as nc

    return {
        "time": {"chunks": (6,), "filters": [nc.Delta("<i8")], "compressors": nc.LZ4()},
        "level": {"chunks": (3,), "compressors": None},
        "lat": {"chunks": (7,), "dtype": ">f8", "compressors": nc.Zlib(5)},
        "lon": {"chunks": (12,), "filters": [nc.Shuffle(8)], "compressors": nc.BZ2(5)},
        "t2m": {"chunks": (6, 7, 12), "dtype": ">i2", "order": "F", "compressors": nc.Zlib(5)},
        "z": {
            "chunks": (6, 2, 7, 12),
            "dtype": ">f4",
            "filters": [nc.Shuffle(4)],
            "compressors": nc.LZ4(),
            "chunk_key_encoding": {"name": "v2", "separator": "/"},
        },
        "orog": {
            "chunks": (7, 12),
            "order": "F",
            "filters": [nc.FixedScaleOffset(offset=0, scale=4, dtype="<f4", astype="<i4")],  # quarters: exact
            "compressors": nc.BZ2(5),
        },
        "run": {"chunks": (6,), "filters": [nc.Delta("<i4", "<i2")], "compressors": nc.Zstd(3)},
        "count": {"chunks": (6, 7, 12), "order": "F", "compressors": nc.LZMA(preset=1)},
    }


def write_python2_codecs(path: Path) -> None:
    """Write a store of version 2 by zarr-python 3 with numcodecs codecs; not consolidated."""
    group = zarr.open_group(path, mode="w", zarr_format=2, attributes=GROUP)
    options = python2_options()
    for name, (dims, values, attributes, fill) in variables().items():
        array = group.create_array(
            name,
            shape=values.shape,
            fill_value=fill,
            attributes=attributes | {"_ARRAY_DIMENSIONS": list(dims)},
            **{"dtype": values.dtype} | options[name],
        )
        array[...] = values


def write_zarr2(path: Path) -> None:
    """Write a consolidated store by zarr-python 2, which runs in an environment of its own."""
    group = zarr.open_group(str(path), mode="w")
    group.attrs.update(GROUP)
    for name, (dims, values, attributes, fill) in variables().items():
        options = {"chunks": sizes_along(dims, CHUNKS), "dtype": values.dtype, "fill_value": fill}
        array = group.create_dataset(name, shape=values.shape, write_empty_chunks=False, **options)
        array[...] = values
        array.attrs.update(attributes | {"_ARRAY_DIMENSIONS": list(dims)})
    zarr.consolidate_metadata(str(path))


def write_json(path: Path, value: Any) -> None:
    """Write a metadata document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def json_fill(fill: float | int | None) -> Any:
    """Return a fill value as a metadata document names it."""
    return "NaN" if fill is not None and np.isnan(fill) else fill


def tensorstore2_metadata(variable: Variable) -> dict[str, Any]:
    """Return the metadata of an array of version 2 as TensorStore takes it."""
    return {
        "shape": list(variable.values.shape),
        "chunks": sizes_along(variable.dims, CHUNKS),
        "dtype": variable.values.dtype.str,
        "fill_value": json_fill(variable.fill),
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": -1},
    }


def tensorstore3_metadata(name: str, variable: Variable) -> dict[str, Any]:
    """Return the metadata of an array of version 3 as TensorStore takes it: z and count are in shards."""
    chunks = sizes_along(variable.dims, CHUNKS)
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}]
    codecs += [{"name": "zstd", "configuration": {"level": 3}}]
    if name in ("z", "count"):
        index = [codecs[0], {"name": "crc32c"}]
        inner = {"chunk_shape": chunks, "codecs": codecs, "index_codecs": index, "index_location": "end"}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
        chunks = sizes_along(variable.dims, SHARDS)
    packed = {"_FillValue": variable.fill} if name == "t2m" else {}
    return {
        "shape": list(variable.values.shape),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "data_type": variable.values.dtype.name,
        "fill_value": json_fill(0 if variable.fill is None else variable.fill),
        "codecs": codecs,
        "dimension_names": variable.dims,
        "attributes": variable.attributes | packed,
    }


def write_tensorstore(path: Path, zarr_format: int) -> None:
    """Write each array by TensorStore, and by hand what it does not write: the group, and attributes of version 2."""
    import tensorstore as ts

    if zarr_format == 2:
        write_json(path / ".zgroup", {"zarr_format": 2})
        write_json(path / ".zattrs", GROUP)
    else:
        write_json(path / "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": GROUP})
    for name, variable in variables().items():
        spec: dict[str, Any] = {"kvstore": {"driver": "file", "path": str(path / name)}, "create": True}
        if zarr_format == 2:
            spec |= {"driver": "zarr", "metadata": tensorstore2_metadata(variable)}
        else:
            spec |= {"driver": "zarr3", "metadata": tensorstore3_metadata(name, variable)}
        ts.open(spec).result().write(variable.values).result()
        if zarr_format == 2:
            attributes = variable.attributes | {"_ARRAY_DIMENSIONS": list(variable.dims)}
            write_json(path / name / ".zattrs", attributes)


def crs() -> dict[str, Any]:
    """Return the value of GDAL's `_CRS` attribute for EPSG:4326, which may hold PROJJSON as well."""
    return {"wkt": WKT, "url": "http://www.opengis.net/def/crs/EPSG/0/4326"}


def write_gdal_json(path: Path, value: dict[str, Any]) -> None:
    """Write a document with GDAL's spacing and escapes."""
    text = json.dumps(value, indent=2, separators=(",", ":"))
    path.write_text(text.replace("/", "\\/"))


def write_gdal2(path: Path) -> None:
    """Write a store of version 2 by hand, laid out as by GDAL's Zarr driver with CREATE_ZMETADATA=NO."""
    path.mkdir(parents=True)
    write_gdal_json(path / ".zgroup", {"zarr_format": 2})
    write_gdal_json(path / ".zattrs", GROUP)
    for name, (dims, values, attributes, fill) in variables().items():
        folder, chunks, spatial = path / name, sizes_along(dims, CHUNKS), dims[-2:] == ("lat", "lon")
        nodata = None if name == "count" else fill
        compressed = len(dims) > 1 and name != "orog"
        folder.mkdir()
        document = {
            "chunks": chunks,
            "compressor": {"id": "zlib", "level": 6} if compressed else None,
            "dtype": values.dtype.str if values.dtype.itemsize > 1 else "|u1",
            "fill_value": json_fill(nodata),
            "filters": None,
            "order": "C",
            "shape": values.shape,
            "zarr_format": 2,
        }
        write_gdal_json(folder / ".zarray", document)
        first = {"_CRS": crs()} if spatial else {}
        write_gdal_json(folder / ".zattrs", first | attributes | {"_ARRAY_DIMENSIONS": dims})
        for index, at in chunk_indices(values.shape, chunks):
            if is_fill(values[at], nodata):
                continue
            block = np.zeros(chunks, values.dtype) if nodata is None else np.full(chunks, nodata, values.dtype)
            block[tuple(slice(size) for size in values[at].shape)] = values[at]
            data = zlib.compress(block.tobytes(), 6) if compressed else block.tobytes()
            (folder / ".".join(map(str, index))).write_bytes(data)


def write_netcdf(path: Path) -> None:
    """Write the variables to HDF5 as netCDF-4 lays them out; chunks that equal the fill value do not exist."""
    import h5py

    pressed = {"compression": "gzip", "compression_opts": 6}
    storage: dict[str, dict[str, Any]] = {
        "time": {"chunks": (23,)} | pressed,
        "t2m": {"chunks": (6, 7, 12), "shuffle": True} | pressed,
        "z": {"chunks": (6, 2, 7, 12)} | pressed,
        "run": {"dtype": ">i4"},
        "count": {"chunks": (6, 7, 12)},
    }
    with h5py.File(path, "w", track_order=True) as file:
        file.attrs.update(GROUP)
        for name, (dims, values, attributes, fill) in variables().items():
            options = {"dtype": values.dtype, "fillvalue": fill} | storage.get(name, {})
            made = file.create_dataset(name, shape=values.shape, track_order=True, **options)
            made.attrs.update(attributes)
            if name in ("t2m", "z"):
                made.attrs["_FillValue"] = np.array([fill], values.dtype)
            for _, at in chunk_indices(values.shape, made.chunks or values.shape):
                if not is_fill(values[at], fill):
                    made[at] = values[at]
            if dims == (name,):
                made.make_scale(name)
                made.attrs["_Netcdf4Dimid"] = np.int32(list(SIZES).index(name))
        for name, variable in variables().items():
            for axis, dim in enumerate(variable.dims):
                if dim != name:
                    file[name].dims[axis].attach_scale(file[dim])


def write_kerchunk(path: Path) -> None:
    """Write kerchunk's references to `packed.nc`: as JSON with a template for the URL, as Parquet with a plain path."""
    from kerchunk.df import refs_to_dataframe
    from kerchunk.hdf import SingleHdf5ToZarr

    with (path / "packed.nc").open("rb") as file:
        made = SingleHdf5ToZarr(file, url="{{u}}", inline_threshold=200).translate()
    document = {"version": made["version"], "templates": {"u": "packed.nc"}, "refs": made["refs"]}
    write_json(path / "kerchunk.json", document)
    plain = json.loads(json.dumps(made).replace("{{u}}", "packed.nc"))
    # fsspec cannot read a missing chunk from a categorical column: 15 keeps those to the files without missing chunks
    refs_to_dataframe(plain, str(path / "kerchunk.parquet"), record_size=16, categorical_threshold=15)


def write_virtualizarr(path: Path) -> None:
    """Write VirtualiZarr's references to `packed.nc`; its absolute path is replaced by a relative one."""
    from obspec_utils.registry import ObjectStoreRegistry
    from obstore.store import LocalStore
    from virtualizarr import open_virtual_dataset
    from virtualizarr.parsers import HDFParser

    source = (path / "packed.nc").resolve()
    registry = ObjectStoreRegistry({"file://": LocalStore()})
    with open_virtual_dataset(source.as_uri(), registry, HDFParser(), decode_times=False) as virtual:
        made = virtual.vz.to_kerchunk(format="dict")
    text = json.dumps(made, indent=2)
    assert f'"{source}"' in text
    (path / "virtualizarr.json").write_text(text.replace(f'"{source}"', '"packed.nc"') + "\n")


def write_icechunk(path: Path) -> None:
    """Commit the variables to branch main of an Icechunk repository; most chunks are files of their own."""
    import icechunk

    config = icechunk.RepositoryConfig.default()
    config.inline_chunk_threshold_bytes = 100  # the default, 512, would put nearly all of these in the manifest
    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)), config)
    session = repository.writable_session("main")
    dataset().to_zarr(session.store, zarr_format=3, consolidated=False, mode="w-", encoding=encoding(3))
    session.commit("add the variables")


def multiscales(version: str) -> dict[str, Any]:
    """Return the `multiscales` attribute of the image with its three levels."""
    axes: list[dict[str, str]] = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    levels = [
        {"path": str(n), "coordinateTransformations": [{"type": "scale", "scale": [1.0, 0.5 * 2**n, 0.5 * 2**n]}]}
        for n in range(3)
    ]
    named = {"version": version} if version == "0.4" else {}  # 0.5 has its version beside `multiscales`
    return {"multiscales": [named | {"name": "image", "axes": axes, "datasets": levels}]}


def write_multiscale(path: Path, zarr_format: int) -> None:
    """Write the image as OME-Zarr 0.4 (Zarr 2) or 0.5 (Zarr 3)."""
    if zarr_format == 2:
        import numcodecs

        attributes = multiscales("0.4")
        options: dict[str, Any] = {"compressors": numcodecs.Blosc(cname="lz4", clevel=5, shuffle=1)}
        options["chunk_key_encoding"] = {"name": "v2", "separator": "/"}
    else:
        attributes = {"ome": {"version": "0.5"} | multiscales("0.5")}
        options = {"compressors": zarr.codecs.BloscCodec(cname="zstd"), "dimension_names": ("c", "y", "x")}
    group = zarr.open_group(path, mode="w", zarr_format=zarr_format, attributes=attributes)
    for n in range(3):
        level = image()[:, :: 2**n, :: 2**n]
        array = group.create_array(str(n), shape=level.shape, dtype=level.dtype, chunks=(1, 32, 32), **options)
        array[...] = level


def decoded() -> dict[str, np.ndarray]:
    """Return the values as xarray decodes them, computed without xarray.

    `count_masked` is what xarray makes of `count` where its fill value 0 is in metadata of version 2.
    """
    out = {name: variable.values for name, variable in variables().items()}
    packed = out["t2m"]
    out["t2m"] = np.where(packed == -32767, np.nan, packed * 0.01 + 280.0)
    out["count_masked"] = np.where(out["count"] == 0, np.float32("nan"), out["count"].astype("f4"))
    return out | {f"image{n}": image()[:, :: 2**n, :: 2**n] for n in range(3)}


def reference_store(path: Path) -> Any:
    """Open a kerchunk reference whose paths are relative to the folder it is in."""
    from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
    from fsspec.implementations.dirfs import DirFileSystem
    from fsspec.implementations.local import LocalFileSystem
    from fsspec.implementations.reference import ReferenceFileSystem

    local = AsyncFileSystemWrapper(LocalFileSystem(), asynchronous=True)
    beside = DirFileSystem(str(path.parent), local, asynchronous=True)
    opened = ReferenceFileSystem(str(path), fs=beside, asynchronous=True)
    return zarr.storage.FsspecStore(opened, read_only=True, path="")


def icechunk_store(path: Path) -> Any:
    """Open branch main of an Icechunk repository for reading."""
    import icechunk

    repository = icechunk.Repository.open(icechunk.local_filesystem_storage(str(path)))
    return repository.readonly_session(branch="main").store


def same(name: str, found: np.ndarray, wanted: np.ndarray) -> None:
    """Raise where values, or dtypes but for the byte order, differ."""
    np.testing.assert_array_equal(found, wanted, err_msg=name)
    assert found.dtype.newbyteorder("=") == wanted.dtype, f"{name}: {found.dtype} is not {wanted.dtype}"


def as_xarray(name: str, array: zarr.Array, expected: dict[str, np.ndarray]) -> np.ndarray:
    """Return what xarray makes of an array: a fill value of version 2 masks it, so integers become floats."""
    values = expected[name]
    if array.metadata.zarr_format == 3 or array.fill_value is None or values.dtype.kind == "f":
        return values
    if name == "count":
        return expected["count_masked"]
    return values.astype("f4" if values.itemsize < 4 else "f8")  # the fill value, 0, is none of these values


def check(store: Any, label: str, expected: dict[str, np.ndarray]) -> None:
    """Compare a store with what is expected, read by xarray and, undecoded, by zarr-python."""
    group, masked = zarr.open_group(store, mode="r"), []
    for name, variable in variables().items():
        same(f"{label}: {name} undecoded", group[name][...], variable.values)
    with xr.open_zarr(store, decode_times=False, consolidated=None if isinstance(store, Path) else False) as opened:
        for name, variable in variables().items():
            assert opened[name].dims == variable.dims, f"{label}: {name} has dimensions {opened[name].dims}"
            same(f"{label}: {name}", opened[name].values, as_xarray(name, group[name], expected))
            masked += [name] if opened[name].dtype.kind == "f" and variable.values.dtype.kind != "f" else []
    masked.remove("t2m")
    print(f"{label}: zarr_format {group.metadata.zarr_format}, masked integers: {', '.join(masked) or 'none'}")


def check_missing(path: Path) -> None:
    """Print how many chunk objects of z and count a folder has, of how many the array has."""
    group, files = zarr.open_group(path, mode="r"), {}
    for name in ("z", "count"):
        array, folder = group[name], path / name
        found = sum(p.is_file() and p.name not in ("zarr.json", ".zarray", ".zattrs") for p in folder.rglob("*"))
        outer = array.shards or array.chunks
        files[name] = f"{found} of {len(list(chunk_indices(array.shape, outer)))}"
    print(f"{path.name}: objects of z {files['z']}, of count {files['count']}")


STORES: dict[str, Callable[[Path], None]] = {
    "xarray2.zarr": lambda path: write_xarray(path, 2),
    "xarray3.zarr": lambda path: write_xarray(path, 3),
    "xarray2_unconsolidated.zarr": lambda path: write_xarray(path, 2, consolidated=False),
    "v2_in_v3.zarr-v3": lambda path: write_xarray(path, 2),
    "python3.zarr": write_python3,
    "python2_codecs.zarr": write_python2_codecs,
    "tensorstore2.zarr": lambda path: write_tensorstore(path, 2),
    "tensorstore3.zarr": lambda path: write_tensorstore(path, 3),
    "zarrs3.zarr": write_zarrs,
    "gdal2.zarr": write_gdal2,
}
REFERENCES = ("kerchunk.json", "kerchunk.parquet", "virtualizarr.json")
IMAGES = {"multiscale.zarr": 2, "multiscale3.zarr": 3}


def write_all(other: str) -> None:
    """Remove what an earlier run wrote and write every store."""
    for name in (*STORES, *IMAGES, *REFERENCES, "zarr2.zarr", "packed.nc", "icechunk"):
        path = HERE / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name, write in STORES.items():
        write(HERE / name)
    for name, zarr_format in IMAGES.items():
        write_multiscale(HERE / name, zarr_format)
    subprocess.run([other, str(Path(__file__).resolve()), "--only-zarr2"], check=True)
    write_netcdf(HERE / "packed.nc")
    write_kerchunk(HERE)
    write_virtualizarr(HERE)
    write_icechunk(HERE / "icechunk")
    np.savez_compressed(HERE / "expected.npz", **decoded())


def check_all() -> None:
    """Read every store back and compare it with `expected.npz`."""
    with np.load(HERE / "expected.npz") as file:
        expected = dict(file)
    for name in (*STORES, "zarr2.zarr"):
        check(HERE / name, name, expected)
        check_missing(HERE / name)
    for name in REFERENCES:
        check(reference_store(HERE / name), name, expected)
    check(icechunk_store(HERE / "icechunk"), "icechunk", expected)
    for name in IMAGES:
        group = zarr.open_group(HERE / name, mode="r")
        for n in range(3):
            same(f"{name}/{n}", group[str(n)][...], expected[f"image{n}"])
    size = sum(path.stat().st_size for path in HERE.rglob("*") if path.is_file())
    print(f"all stores hold the same values; {size / 1e6:.2f} MB")


def main() -> None:
    """Write and check the stores, or with --only-zarr2 write the one of zarr-python 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zarr2-python", default=sys.executable, help="the Python that has zarr==2.18.*")
    parser.add_argument("--only-zarr2", action="store_true", help="write zarr2.zarr, in the Python that has zarr 2")
    parser.add_argument("--only-check", action="store_true", help="read the stores without writing them")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # zarr-python warns of numcodecs codecs, and xarray of missing consolidation
    if options.only_zarr2:
        assert zarr.__version__.startswith("2."), f"--zarr2-python has zarr {zarr.__version__}, not 2.18"
        write_zarr2(HERE / "zarr2.zarr")
        return
    if not options.only_check:
        write_all(options.zarr2_python)
    check_all()
    print(", ".join(f"{name} {version(name)}" for name in PACKAGES.split()))


if __name__ == "__main__":
    main()
