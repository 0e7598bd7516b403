"""`StreamingDataset` and `Mixture`: shuffled, sharded datasets on object storage as a torch `IterableDataset`."""

from __future__ import annotations

import difflib
import inspect
from functools import partial
from typing import Any, Self

from torch.utils.data import IterableDataset

from streamloader.errors import UsageError
from streamloader.loader.base import Loader
from streamloader.loader.dataset import NumpyDataset, NumpyMixture
from streamloader.pytorch import device, distributed, tensors

# Arguments of `DataLoader` and other loaders, and what a dataset has for them.
ELSEWHERE = {
    "drop_last": "remainder='drop'",
    "transform_workers": "num_workers=, whose processes run the transform and all other work",
    "prefetch_factor": "memory=",
    "collate_fn": "collate= for the samples of a batch, transform= for each; or batch_size=None and collate_fn=",
    "sampler": "where= to choose samples, weights= to draw them by weight, Mixture to weigh datasets, "
    "shuffle=Shuffle(...) for the order",
    "pin_memory": "device=, which page-locks the loader's own memory and copies from it",
}


# arguments of a dataset, and what a mixture has for them
_OF_SOURCES = {
    **{name: f"Source(url, {name}=) as a key" for name in ("split", "where", "exclude", "replacement", "version")},
    "weights": "Mixture({a: 0.7, b: 0.3}) for those of sources, Source(url, weights=) for those of samples",
}
_SOURCES = "Mixture(..., {}=), whose sources may be parts of one dataset: Source(url, where=), Source(url, weights=)"


class TorchLoader(Loader, IterableDataset[dict[str, Any]]):
    """A loader of tensors, for torch's `DataLoader` and `torch.distributed`."""

    _tensors = tensors.__name__
    _convert = staticmethod(tensors.to_tensors)
    _split = staticmethod(tensors.split_tensor)
    _new_epochs = staticmethod(distributed.shared_epochs)
    _resolve_world = staticmethod(distributed.resolve_world)
    _worker_info = staticmethod(distributed.worker)

    def __new__(cls, *args: Any, **given: Any) -> Self:
        """Raise `TypeError` for wrong arguments, naming what replaces one that `DataLoader` has, or a similar name."""
        if issubclass(cls, NumpyMixture):
            elsewhere = ELSEWHERE | _OF_SOURCES
        else:
            elsewhere = ELSEWHERE | {name: _SOURCES.format(name) for name in ("schedule", "schedule_by")}
        for name in given.keys() & elsewhere.keys():
            raise TypeError(f"{cls.__name__}() got an unexpected keyword argument {name!r}: use {elsewhere[name]}")
        if args or given:  # a copy or a pickled one is made without
            signature = inspect.signature(cls.__init__)
            try:
                signature.bind(None, *args, **given)
            except TypeError as error:
                unknown = next((name for name in given if name not in signature.parameters), "")
                similar = difflib.get_close_matches(unknown, signature.parameters, 1)
                hint = f": did you mean {similar[0]!r}?" if similar else ""
                raise TypeError(f"{cls.__name__}() {error}{hint}") from None
        return super().__new__(cls)

    def __len__(self) -> int:
        """Return the number of batches of this rank in the next epoch (of samples with `batch_size=None`).

        For a DataLoader with workers, which act as ranks, it is the total of all workers.
        """
        loader = distributed.loader_asking_for_length()
        if loader is None or self._options.steps_per_epoch is not None:
            return super().__len__()
        counts = self._lengths(max(1, loader.num_workers))
        if loader.batch_size is None:
            return sum(counts)
        # each worker fills its own batches; the DataLoader divides this length by its batch size
        size = loader.batch_size if loader.num_workers > 1 else 1
        return sum(count // size * size if loader.drop_last else -(-count // size) * size for count in counts)

    def _check_caller(self) -> None:
        distributed.check_loader(self._options.batch_size, self._rank.size)

    def _choose_config(self, given: Any, memory: int | None) -> Any:
        self._cast = device.choose_cast(given.cast)
        config = super()._choose_config(given, memory)
        if given.device is not None:
            device.check_device(given.device)
        device.check_normalized(self._cast, self._affine)
        return config

    def _choose_format(self, given: Any, *, mixed: bool) -> Any:
        chosen = super()._choose_format(given, mixed=mixed)
        on_host = self._cast is not None and given.device is None and not self._affine
        return chosen._replace(convert=partial(device.to_cast_tensors, self._cast)) if on_host else chosen

    def _page_lock(self) -> Any:
        return None if self._options.device is None else device.page_lock_of(self._options.device)

    def _open_transfers(self) -> Any:
        given = self._options
        if given.device is not None and self._in_worker:
            problem = f"device={given.device!r:.60} in a worker of a DataLoader"
            raise UsageError(problem, "give num_workers= to the dataset, or sl.to_device(DataLoader(...), device)")
        if given.device is None and not self._affine:
            return None
        if self._transfers is None:
            options: dict[str, Any] = {"affine": self._affine, "cast": self._cast, "graph": given.graph_buffers}
            options["borrowed"] = [name for name, _ in self._first.decoders]
            self._transfers = device.Transfers(given.device or "cpu", given.ahead, **options)
        self._transfers.counters = self._engine().counters
        return self._transfers


class StreamingDataset(NumpyDataset, TorchLoader):
    """Yields batches of a streamloader dataset, in an order that depends only on the seed and the epoch.

    Iterate it, or pass it to `DataLoader(ds, batch_size=None)`. A batch is a dict: a tensor (batch, ...) for each field
    of fixed shape, a list for bytes and text, `name` and `name_offsets` for ragged fields, `valid` (bool, False for
    rows that pad the last batch) with `remainder="pad"`, and `index` (int64) with `with_index`. A complete pass
    advances the epoch.

    What to read. `url`: a dataset, or a `Join` of two. `split`: the split of a dataset that has splits. `version`: a
    version of a dataset that was changed, by default the last; a state opens its own. `fields`: names of the fields to
    fetch, by default all. `storage_options`: options of the store, by their fsspec names. `cache`: a `Cache` on local
    disk, which later epochs and runs read from, and the ranks of a machine share.

    Which samples. `where`: a condition on fields with one number or text per sample (`"label == 'cat' and width >=
    256"`), a slice, also as text (`"0:800"`), a mask, or sample numbers. `exclude`: samples to leave out of these:
    sample numbers, or the path or URL of a file with a number, or JSON with "sample", in each line; "folder/": of all
    its *.jsonl. `weights`: how often samples are drawn: `"balanced:label"` draws all classes equally often, `{"label":
    {"cat": 2, "dog": 1}}` these two at 2 to 1; the name of a field with a number per sample, a number for each sample
    of the dataset, or the path or URL of a file of them (.npy, or text) draw by sample. An epoch has as many draws as
    samples are selected. `replacement`: False draws each sample at most once in an epoch, which ends when a class ends.
    `clips`: how videos are cut into samples, `{"video": Clips(16, stride=2)}`: a batch has `video` (uint8, (batch,
    frames, height, width, 3)), `video_start` (the first frame of each clip), `video_times` (the seconds of each frame)
    and the other fields.

    The order and the steps. `shuffle`: True, False, or `Shuffle(window=, lanes=, block=)`. `seed`: below 2^64.
    `batch_size`: samples in a batch of one rank; None yields single samples, for `DataLoader(ds, batch_size=64)`.
    `remainder`: what happens to the last, incomplete step: "pad", "drop" or "uneven". `steps_per_epoch`: batches of
    each iteration; the next one continues there. `skip_steps`: steps to skip, by epoch: `{0: range(100, 120)}`.
    `world`: (rank, size), a process group, or a `DeviceMesh` with the names of its data-parallel dimensions, `(mesh,
    "dp")`; by default that of torch.distributed, else of the launcher's environment. `bucket_by`: a field of variable
    length, or a function of the lengths by field, by which batches get samples of similar length. `bucket_steps`: the
    steps among which samples are exchanged for that. `max_tokens`: with `bucket_by`, a batch has as many samples, up to
    `batch_size`, as have at most so many elements with their padding.

    What a batch is made of. `decode`: how encoded images become tensors: True, a backend's name, a `Decode`, or a dict
    of these by field. `transform(sample[, rng])`: called with each sample, a dict of numpy arrays, bytes and str; `rng`
    is seeded by seed, epoch and position. `collate`: how values of different sizes form a batch: "pad" or a `Pad`,
    "list", "nested", a dict of these by field, or a function of the list of samples. `pack`: ragged fields whose
    documents are packed into rows. With `{"tokens": Pack(2049, fit="best")}` rows are the samples: batches have the
    shape (batch_size, 2049), and `tokens_documents`, `tokens_positions` and `tokens_cu_seqlens`; `{"tokens": 2049}`
    packs each batch, in rows whose number varies. `with_index`: adds the sample numbers as `index`.

    Resources. `num_workers`: worker processes that read, decode and transform; 0: threads of this process; "auto": one
    less than this rank's cores, from 4 cores on. `memory`: the most bytes that this rank's loader may use, without
    Python and torch, also as "2GiB"; by default what the shuffle window and 16 requests need.

    Errors and reports. `on_error`: "raise", or what replaces a sample that is damaged or undecodable, or for which the
    transform raises: "mask" gives zeros, False in `valid` and True in `error`; "replace" another sample of the batch,
    True in `replaced`. `max_bad`: how many samples may be bad, a number or a share. `error_log`: a file, or the URL of
    a folder, that gets a line of JSON for each bad sample. `stall_seconds`: a longer wait for a batch is logged, with
    its cause. `on_batch(report)`: called with a `BatchReport` for each batch.

    On a device. `device`: batches are returned on this device, "cuda" or "cuda:1", copied ahead from page-locked memory
    on a stream of the loader; by default that of `Decode(device=)`, if given. Images are copied as uint8 and normalised
    there. The current stream of the thread that iterates can use a batch at once. `ahead`: while training has a batch,
    `ahead` - 1 others are copied. `cast`: the dtype of floating-point columns, such as "bfloat16", or a dict by column.
    `graph_buffers`: batches are copied to the same tensors each time, for CUDA graphs.

    Arrays of any Zarr store, in place. `sample_axis`: the dimension whose elements are samples, by name or number.
    `windows`: a `Window` of several of its elements. `patches`: a `Patch` of other dimensions. `channels`: arrays that
    are stacked into one tensor, `Channels(...)` or a dict of these by name. `decode_cf`: unpack values by the CF
    conventions; in a dict of bools by array, other arrays are True. `strict`: True: a missing chunk is an error; None:
    only if a field has none; False: its elements have the fill value. `zarr_format`: 2 or 3, by default what is found.
    `normalize`: (mean, std) by name of an array or a channel, for (x - mean) / std as floats; the path or URL of the
    file that `streamloader stats` writes; or True for what it saved in the dataset. With a number for each channel, the
    last axis, or "imagenet" for uint8, batches are normalised, on the device if there is one.

    `where` then selects elements of the sample axis, also by times, `slice("2001-01", None)`. Windows, patches,
    channels and `normalize` also take the fields of fixed shape of a streamloader dataset, without `sample_axis`.

    Raises a `StreamloaderError`: the constructor for invalid arguments, iteration at the batch that an error belongs
    to.
    """


class Mixture(NumpyMixture, TorchLoader):
    """Yields batches of several datasets with the same fields, in exact proportions: `Mixture({a: 0.7, b: 0.3}, ...)`.

    A key is a URL, a `Source`, a `Join`, or another mixture, whose sources divide its weight in their own proportions.
    Sources take turns of `unit` samples, spread so evenly that the count of each source in any window is off by less
    than two turns; `unit` is 8, or the largest divisor of 8 that divides the global batch.
    `weigh="tokens"`: the weights count the elements of this variable-length field, and not samples; see `shares`.
    `batches="homogeneous"`: each global batch comes from one source. `schedule`: other weights from a step on,
    `{10_000: {a: 0.5, b: 0.5}}`; a source that is not listed has the weight 0. `schedule_by`: what its keys count:
    "steps", "samples" of all ranks, or the elements of a field of variable length, as "tokens", by mean lengths.
    `set_weights` changes the weights of a run that has begun.

    Each source has its own epochs, each with its own order. An epoch of the mixture ends when the first source
    (`stop="first"`) or the last one (`stop="last"`) completes an epoch; the others continue where they are. The last
    step is padded with the samples that follow, False in `valid` (`remainder="pad"`), or dropped ("drop").

    `with_index=True` adds `source`, the index in `sources`, and `index`, the sample's number within the source.
    Everything else is as in `StreamingDataset`: the same global batches at every world size, exact resume. A mixture
    with more sources or other weights may load a state, and uses them from there on.
    """
