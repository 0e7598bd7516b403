"""`streamloader doctor`: checks of the installation, the machine, and the access to a URL, each with a remedy.

A check changes nothing, and waits a few seconds at most. Texts have no secrets: of credentials, only where they are.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import platform
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from streamloader.engine.arena import machine_memory
from streamloader.engine.budget import MACHINE_SHARE
from streamloader.engine.executor import choose_workers
from streamloader.errors import (
    AccessError,
    FormatError,
    NotADatasetError,
    NotFoundError,
    StorageError,
    StreamloaderError,
)
from streamloader.format import opening
from streamloader.format.manifest import Manifest
from streamloader.images.decode import ENCODINGS
from streamloader.loader.world import ranks_on_this_machine
from streamloader.options import RetryPolicy
from streamloader.storage import Store, open_store, references_url
from streamloader.storage.endpoint import Endpoint, ask, endpoint_of
from streamloader.storage.process import affinity, cpu_count, cpu_quota
from streamloader.storage.url import proxies, redact
from streamloader.zarr.metadata import read_group

Status = Literal["ok", "warning", "problem"]
GIB = 1 << 30
LATENCY_READS = 5
S3_SKEW = 15 * 60.0  # seconds by which S3 refuses a signature
SKEW = 60.0  # seconds that are a reason to look after the clock
SLOW_SECONDS = 0.5  # of a small request
LEAST_SHM = GIB  # bytes; Docker's default is 64 MiB
LEAST_FILES = 1024  # open files
LEAST_MEMORY = GIB
TESTED = ((3, 11), (3, 13))  # versions of Python
# no retries: what fails now is what is reported
QUICK = RetryPolicy(outage_seconds=0.0, request_seconds=0.0, first_contact_attempts=1, response_seconds=5.0)
REQUIRED = ("torch", "numpy", "numcodecs", "fsspec", "botocore", "crc32c", "pillow")
# module, package, and the feature that needs it
OPTIONAL = (
    ("simplejpeg", "simplejpeg", "JPEGs decoded two to three times as fast"),
    ("cv2", "opencv-python-headless", "images resized and normalised without the interpreter's lock"),
    ("av", "av", "videos"),
    ("pyarrow", "pyarrow", "Parquet, Arrow, CSV, JSON, Hugging Face datasets"),
    ("h5py", "h5py", "HDF5 and NetCDF"),
    ("google.protobuf", "protobuf", "TFRecord"),
    ("zstandard", "zstandard", "sources compressed by zstd"),
    ("gcsfs", "gcsfs", "gs:// URLs"),
    ("adlfs", "adlfs", "az:// URLs"),
    ("aiohttp", "aiohttp", "https:// URLs and streamloader view"),
    ("obstore", "obstore", "fast reads of gs://, az:// and https:// URLs"),
    ("s3fs", "s3fs", "chained URLs of S3"),
    ("zarr", "zarr", "Zarr of structures or complex numbers in conversions"),
    ("icechunk", "icechunk", "Icechunk repositories"),
    ("xarray", "xarray", "to_xarray()"),
    ("dask", "dask", "to_dask()"),
    ("matplotlib", "matplotlib", "streamloader plan --plot"),
    ("prometheus_client", "prometheus-client", "metrics for Prometheus"),
    ("opentelemetry", "opentelemetry-api", "metrics for OpenTelemetry"),
    ("tensorboard", "tensorboard", "metrics for TensorBoard"),
    ("wandb", "wandb", "metrics for Weights & Biases"),
)
DECODERS = ("simplejpeg", "cv2", "av")  # native code, imported to find out whether it works
ABSENT = "not installed; for "
EXTENSIONS = ("streamloader.format._rows", "streamloader.order._packing")


@dataclass(frozen=True)
class Check:
    """One check: what was `found`, and `advice` for a warning or a problem."""

    name: str
    status: Status
    found: str
    advice: str = ""

    @property
    def absent(self) -> bool:
        """Whether it is of an optional package that is not installed."""
        return self.status == "ok" and self.found.startswith(ABSENT)

    def to_dict(self) -> dict[str, str]:
        """Return the check as JSON values."""
        return asdict(self)


def examine(url: str | os.PathLike[str] | None = None, storage_options: Mapping[str, Any] | None = None) -> list[Check]:
    """Return the checks of the installation and the machine, and of the access to `url` if there is one.

    Raises `UsageError` for a URL or options that cannot be parsed.
    """
    checks = [*check_versions(), *check_packages(), *check_machine(), *check_environment(os.environ)]
    manifests: list[Manifest] = []
    if url is not None:
        checks += check_url(os.fspath(url), storage_options, manifests)
    return [*checks, check_workers(os.fspath(url or ""), manifests)]


# the installation


def check_versions() -> Iterator[Check]:
    """Yield the versions of streamloader, Python and the packages that it needs."""
    yield Check("streamloader", "ok", _version("streamloader") or "not installed as a package")
    running, (first, last) = sys.version_info[:2], TESTED
    found = f"{platform.python_version()} ({platform.python_implementation()}), {platform.platform()}"
    if first <= running <= last:
        yield Check("Python", "ok", found)
    else:
        supported = " to ".join(".".join(map(str, each)) for each in TESTED)
        yield Check("Python", "warning", found, f"streamloader is tested with Python {supported}")
    for package in REQUIRED:
        found = _version(package)
        missing = Check(package, "problem", "not installed", f"pip install {package}")
        yield Check(package, "ok", found) if found else missing


def check_packages() -> Iterator[Check]:
    """Yield the packages that only some features need, what decodes images, and the C extensions."""
    found = {module: _version(package) if _exists(module) else "" for module, package, _ in OPTIONAL}
    broken = {module: problem for module in DECODERS if found[module] and (problem := _import_problem(module))}
    for module, package, feature in OPTIONAL:
        if module in broken:
            advice = f"pip install --force-reinstall {package}"
            yield Check(package, "problem", f"{found[module]}, which cannot be imported: {broken[module]}", advice)
        else:
            missing = f"{ABSENT}{feature}: pip install {package}"
            yield Check(package, "ok", found[module] or missing)
    if _version("opencv-python") and _version("opencv-python-headless"):
        advice = "pip uninstall opencv-python opencv-python-headless, then pip install opencv-python-headless"
        yield Check("OpenCV", "warning", "two packages have the module cv2: one overwrites files of the other", advice)
    works = {module for module in found if found[module] and module not in broken}
    yield _check_decoding("simplejpeg" in works, "cv2" in works)
    absent = [name for name in EXTENSIONS if _import_problem(name)]
    advice = "install a C compiler, then install streamloader again: variable-length fields and packing are faster"
    compiled = Check("C extensions", "ok", "compiled")
    yield Check("C extensions", "warning", f"not compiled: {', '.join(absent)}", advice) if absent else compiled


def _check_decoding(simplejpeg: bool, opencv: bool) -> Check:
    found = "JPEG by simplejpeg, other formats by Pillow" if simplejpeg else "all formats by Pillow"
    found += "; resized by OpenCV" if simplejpeg and opencv else "; resized by Pillow"
    missing = [name for name, there in (("simplejpeg", simplejpeg), ("opencv-python-headless", opencv)) if not there]
    if not missing:
        return Check("images", "ok", found)
    return Check("images", "warning", found, f"pip install {' '.join(missing)}: JPEGs decode 2 to 3 times as fast")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def _import_problem(module: str) -> str:
    """Return why a module cannot be imported, "" if it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - packages that are broken raise anything
        return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ""


# the machine


def check_machine() -> Iterator[Check]:
    """Yield processors, memory, shared memory and limits."""
    quota = cpu_quota()
    limit = "no quota" if quota is None else f"a quota of {quota:g}"
    found = f"{cpu_count()} of {os.cpu_count()}: {affinity()} by affinity, {limit}"
    few = Check("processors", "warning", found, "give the container more processors: training shares this one")
    yield few if cpu_count() == 1 else Check("processors", "ok", found)
    yield _check_memory(machine_memory(), memory_available())
    with suppress(OSError):
        size = shutil.disk_usage("/dev/shm").total
        found, advice = f"{size / GIB:.1f} GiB", "only workers of a torch DataLoader need it: docker run --shm-size=8g"
        yield Check("/dev/shm", "ok", found) if size >= LEAST_SHM else Check("/dev/shm", "warning", found, advice)
    if (files := _open_files()) is not None:
        advice = f"raise the limit: ulimit -n {LEAST_FILES}"
        few = Check("open files", "warning", f"{files:,}", advice)
        yield few if files < LEAST_FILES else Check("open files", "ok", f"{files:,}")
    yield _check_memfd()


def _check_memory(limit: int, free: int | None) -> Check:
    shown = "" if free is None else f", {free / GIB:.1f} GiB of it free"
    found = f"{limit / GIB:.1f} GiB{shown}; the loader takes up to {MACHINE_SHARE:.0%} for all ranks"
    if free is not None and free < LEAST_MEMORY:
        return Check("memory", "warning", found, "free some, or limit the loader by memory=")
    return Check("memory", "ok", found)


def memory_available(proc: str = "/proc/meminfo", group: str = "/sys/fs/cgroup") -> int | None:
    """Return the bytes of memory that are free, on the machine or in the control group; None if unknown."""
    free: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(proc).read_text("ascii").splitlines()
        free.append(next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")))
    for most, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # absent, or "max"
            free.append(max(0, int(Path(group, most).read_text("ascii")) - int(Path(group, used).read_text("ascii"))))
    return min(free, default=None)


def _open_files() -> int | None:
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _check_memfd() -> Check:
    advice = "threads of one process do the work of workers on this system"
    if not hasattr(os, "memfd_create"):
        return Check("anonymous shared memory", "warning", "this system has none (memfd_create)", advice)
    try:
        os.close(os.memfd_create("streamloader-doctor"))
    except OSError as error:
        return Check(
            "anonymous shared memory", "problem", f"memfd_create fails: {error.strerror}", f"allow it: {advice}"
        )
    return Check("anonymous shared memory", "ok", "memfd_create works")


def check_environment(env: Mapping[str, str]) -> Iterator[Check]:
    """Yield proxies, threads of libraries, and how processes are started."""
    named = ", ".join(f"{name}={proxy}" for name, proxy in proxies().items())
    yield Check("proxies", "ok", named or "none")
    ranks, threads = ranks_on_this_machine(), env.get("OMP_NUM_THREADS", "")
    found = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set"
    share = max(1, cpu_count() // ranks)
    too_many = (ranks > 1 and not threads) or (threads.isdecimal() and int(threads) > share)
    advice = f"set OMP_NUM_THREADS to at most {share}: each of {ranks} ranks on {cpu_count()} processors starts as many"
    yield Check("OpenMP threads", "warning", found, advice) if too_many else Check("OpenMP threads", "ok", found)
    method = (
        multiprocessing.get_start_method(allow_none=True) or f"{multiprocessing.get_all_start_methods()[0]}, default"
    )
    yield Check("start method", "ok", method)


def check_workers(url: str, manifests: list[Manifest]) -> Check:
    """Return how many workers num_workers="auto" starts for each rank, and why."""
    ranks = ranks_on_this_machine()
    fields = [layout for manifest in manifests for layout in manifest.fields.values()]
    computes = any(each.codec != "none" or each.field.encoding in ENCODINGS for each in fields) or not fields
    workers, reason = choose_workers("auto", max(1, cpu_count() // ranks), [url], computes=computes)
    rank = "the rank" if ranks == 1 else f"each of {ranks} ranks"
    return Check('num_workers="auto"', "ok", f"{workers} worker processes for {rank}: {reason}")


# the URL


def check_url(url: str, options: Mapping[str, Any] | None, manifests: list[Manifest]) -> Iterator[Check]:
    """Yield who reads a URL, with which credentials, whether its endpoint responds, and what is there.

    Adds the manifests of a dataset to `manifests`. Ends with the first problem that explains all later ones.
    """
    try:
        store = open_store(references_url(url), {**(options or {}), "retry": QUICK})
        location = store.location
        yield Check("URL", "ok", store.url)
        endpoint = endpoint_of(location)
    except StorageError as error:
        yield _problem("access", error, redact)
        return
    if endpoint is not None:
        yield _check_credentials(endpoint)
        region = f", region {endpoint.region}" if endpoint.region else ""
        yield Check("endpoint", "ok", f"{location.redact(endpoint.url)}{region}")
        responds = list(_check_answer(endpoint, store))
        yield from responds
        if responds[0].status == "problem":
            return
    try:
        reader = store.reader()
    except StreamloaderError as error:
        yield _problem("client", error, location.redact)
        return
    yield _check_client(reader.kind, location.redact(reader.reason))
    found = _check_content(store, manifests)
    yield found
    if found.status == "ok":
        yield _check_latency(store)
    # after a problem a failure has the same cause
    yield from (check for check in _check_listing(store) if check.status == "ok" or found.status != "problem")


def _problem(name: str, error: StreamloaderError, clean: Callable[[str], str]) -> Check:
    return Check(name, "problem", clean(error.problem), clean(error.remedy))


def _check_credentials(endpoint: Endpoint) -> Check:
    if endpoint.credentials:
        return Check("credentials", "ok", endpoint.credentials)
    return Check("credentials", "ok", "none found: requests are not signed")


def _check_answer(endpoint: Endpoint, store: Store) -> Iterator[Check]:
    """Yield whether the endpoint responds, and how far the clocks differ."""
    try:
        answer = ask(endpoint, store.location)
    except StorageError as error:
        yield _problem("connection", error, store.location.redact)
        return
    secure = "https, its certificate is trusted" if endpoint.url.startswith("https:") else "http, not encrypted"
    first, rest = answer.seconds[0], statistics.median(answer.seconds)
    yield Check("connection", "ok", f"{secure}; {1e3 * rest:.0f} ms for a request, {1e3 * first:.0f} ms for the first")
    if answer.skew is None:
        yield Check("clock", "ok", "the server states no time")
        return
    found = f"{abs(answer.skew):.0f} s {'ahead of' if answer.skew > 0 else 'behind'} the server's"
    signed = store.location.protocol == "s3"
    refused = signed and abs(answer.skew) > S3_SKEW
    if abs(answer.skew) <= SKEW:
        yield Check("clock", "ok", f"{abs(answer.skew):.0f} s from the server's")
    else:
        why = "S3 refuses requests by more than 15 minutes" if signed else "certificates and tokens depend on it"
        yield Check("clock", "problem" if refused else "warning", found, f"set the clock of this machine: {why}")


def _check_client(kind: str, reason: str) -> Check:
    if kind == "obstore":
        advice = "processes that are forked read more slowly: DataLoader(multiprocessing_context='forkserver')"
        forks = multiprocessing.get_all_start_methods()[0] == "fork"
        return Check("client", "warning" if forks else "ok", f"{kind}: {reason}", advice if forks else "")
    return Check("client", "ok", f"{kind}: {reason}")


def _check_content(store: Store, manifests: list[Manifest]) -> Check:
    """Return what is at the URL: a dataset, which is opened, or Zarr that others wrote."""
    try:
        document = opening.read_root(store)
        if opening.manifest_json(document) is None:
            return _check_arrays(store)
        names = opening.split_names(document)
        opened = {name: opening.open_document(store, document, name or None).manifest for name in names or ("",)}
    except (StorageError, FormatError) as error:
        if isinstance(error, NotADatasetError):
            with suppress(StreamloaderError):
                return _check_arrays(store)
        return _problem("dataset", error, store.location.redact)
    manifests += opened.values()
    number = max(manifest.generation for manifest in manifests)
    samples = f"{sum(manifest.num_remaining for manifest in manifests):,} samples"
    splits = ", ".join(f"{name} {manifest.num_remaining:,}" for name, manifest in opened.items() if name)
    return Check("dataset", "ok", f"version {number}, {samples}{f' ({splits})' if splits else ''}")


def _check_arrays(store: Store) -> Check:
    count = len(read_group(store).arrays)
    arrays = f"{count} array{'' if count == 1 else 's'}"
    return Check("dataset", "ok", f"Zarr that others wrote, {arrays}: read it in place with sample_axis=")


def _check_latency(store: Store) -> Check:
    """Return how long small reads of the root document take."""
    reader, seconds = store.reader(), list[float]()
    try:
        for _ in range(LATENCY_READS):
            begin = time.perf_counter()
            reader.read(opening.ROOT, 0, 1)
            seconds.append(time.perf_counter() - begin)
    except StorageError as error:
        return _problem("latency", error, store.location.redact)
    median = statistics.median(seconds)
    found = f"{1e3 * median:.1f} ms for a read of one byte, the median of {LATENCY_READS}"
    advice = "train near the bucket, or keep data on local disk with cache=sl.Cache(path)"
    return Check("latency", "ok", found) if median < SLOW_SECONDS else Check("latency", "warning", found, advice)


def _check_listing(store: Store) -> Iterator[Check]:
    """Yield whether the folders at the URL can be listed, unless there is nothing."""
    advice = "training does not need it; convert, append, verify, ls and cp do"
    try:
        yield Check("listing", "ok", f"{len(store.children())} folders")
    except NotFoundError:
        return
    except StorageError as error:
        allow = "allow to list the bucket: " if isinstance(error, AccessError) else ""
        yield Check("listing", "warning", store.location.redact(error.problem), f"{allow}{advice}")
