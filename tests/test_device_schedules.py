"""The hand-over of batches to a device, under random schedules of its streams, on a double without a GPU."""

import gc
import math
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from amounts import examples
from device_double import Device, Stream, Violation
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import streamloader as sl
from streamloader.errors import StreamloaderError, TransformError
from streamloader.pytorch import device as device_module
from streamloader.pytorch.device import Transfers, to_cast_tensors

SCHEDULES = 10_000
CAST = {"a": torch.float64}
AFFINE = {"c": (np.full(1, 2, np.float32), np.full(1, 1, np.float32))}


class OnDouble(Transfers):
    """Transfers whose runtime is a double, which also queues what is computed of memory of the device."""

    def receive(self, sent: Any) -> Any:
        with self._runtime:
            return super().receive(sent)


class SourceError(Exception):
    """An error of the source, at a batch."""


class Training:
    """A loop that gets batches on streams that change, uses and keeps them, and allocates memory of its own."""

    def __init__(self, seed: int, transfers: type[Transfers] = OnDouble, **options: Any) -> None:
        self.rng = rng = Random(seed)
        self.device = Device(rng)
        chosen = {
            "ahead": rng.randint(1, 3),
            "affine": AFFINE if rng.random() < 0.3 else None,
            "cast": CAST if rng.random() < 0.3 else None,
            "graph": rng.random() < 0.2,
        } | options
        self.affine, self.cast, self.graph = chosen["affine"], chosen["cast"], chosen["graph"]
        self.transfers = transfers("cpu", iterable=self, runtime=self.device, **chosen)
        self.streams = [self.device.current, *(self.device.new_stream() for _ in range(rng.choice((0, 0, 1, 2))))]
        self.keeps = 0.0 if self.graph else rng.choice((0.0, 0.3))
        self.kept: list[tuple[str, torch.Tensor, bytes, Stream]] = []
        self.addresses: set[tuple[int, ...]] = set()

    def run(self) -> None:
        try:
            for epoch in range(self.rng.randint(1, 3)):
                self.run_epoch(epoch)
            self.kept.clear()
            self.transfers.close()
            for stream in self.streams:  # which may get memory that was let go
                with self.device.stream(stream):
                    self.device.fill(self.device.empty(2), bytes(16))
            self.device.finish()
        finally:  # what a violation leaves there would be waited for
            self.transfers._held.clear()
            self.transfers._lent.clear()
        held = self.device.lent, self.device.host_lent
        if held != (0, 0):
            raise Violation(f"{held} device blocks and host buffers are held after the end")
        if self.device.streams != 1:
            raise Violation(f"{self.device.streams} streams for copies: torch keeps memory for each of them")
        if len(self.addresses) > 1:
            raise Violation("batches for graphs have several addresses")

    def run_epoch(self, epoch: int) -> None:
        """Get the batches of an epoch, or some of them."""
        rng, count = self.rng, self.rng.randint(0, 7)
        fails = rng.randint(0, count) if rng.random() < 0.2 else None
        asked = rng.randint(0, count) if rng.random() < 0.3 else count + 1
        self.epoch = epoch, count, fails
        batches, stream = iter(self.transfers), rng.choice(self.streams)
        for number in range(asked):
            if rng.random() < 0.2:
                stream = rng.choice(self.streams)
            with self.device.stream(stream):
                if not self.step(batches, number):
                    break
            self.use_kept()

    def step(self, batches: Iterator[Any], number: int) -> bool:
        """Get a batch and use it on the current stream; return False at the end of the epoch."""
        epoch, count, fails = self.epoch
        name = f"batch {number} of epoch {epoch}"
        try:
            batch = next(batches, None)
        except SourceError as error:
            if error.args != (fails,) or number != fails or next(batches, None) is not None:
                raise Violation(f"{error!r} in the place of {name}") from None
            return False
        except KeyboardInterrupt:
            return False
        if fails == number or (batch is None) != (number == count):
            raise Violation(f"{batch and batch['number']} in the place of {name}")
        if batch is None:
            return False
        if batch["number"] != (epoch, number):
            raise Violation(f"{batch['number']} in the place of {name}")
        if self.graph:
            self.addresses.add(tuple(batch[column].data_ptr() for column in "abc"))
        self.use(name, batch, number)
        return True

    def use(self, name: str, batch: dict[str, Any], number: int) -> None:
        stream = self.device.current_stream()
        for column in "abc":
            value = content(self.epoch[0], number, column)
            if column == "a" and self.cast:
                value = np.frombuffer(value, np.int64).astype(np.float64).tobytes()
            if column == "c" and self.affine:
                value = (np.frombuffer(value, np.uint8) * 2.0 + 1).astype(np.float32).tobytes()
            self.device.check(batch[column], value, name)
            if self.rng.random() < self.keeps:
                self.kept.append((name, batch[column], value, stream))
        if self.rng.random() < 0.3:
            own, value = self.device.empty(2), content(self.epoch[0], number, "own")
            self.device.fill(own, value)
            self.kept.append(("memory of the consumer", own, value, stream))

    def use_kept(self) -> None:
        """Use what was kept, on its stream or on another one that waits for it and that it waits for, and drop some."""
        for name, tensor, value, stream in self.kept:
            user = self.rng.choice(self.streams)
            if user != stream:
                user.wait_stream(stream)
            with self.device.stream(user):
                self.device.check(tensor, value, name)
            if user != stream:
                stream.wait_stream(user)
        self.kept = [each for each in self.kept if self.rng.random() < 0.6]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of an epoch, and raise its error."""
        epoch, count, fails = self.epoch
        for number in range(count + 1):
            if number == fails:
                raise SourceError(number)
            if number < count:
                yield self.batch(epoch, number)

    def batch(self, epoch: int, number: int) -> dict[str, Any]:
        """Return a batch in page-locked memory, two columns of which share a buffer."""
        a, b, c = (content(epoch, number, column) for column in "abc")
        together = self.device.host(a + b)
        columns = {"a": together[:2], "b": together[2:], "c": self.device.host(c).view(torch.uint8)}
        return {"number": (epoch, number), **columns}


def content(epoch: int, number: int, column: str) -> bytes:
    """Return the bytes of a column of a batch, which no other has."""
    value = 1 + 10 * (10 * epoch + number) + ("a", "b", "c", "own").index(column)
    return struct.pack("<2q", value, ~value)


@pytest.mark.quick(1)
@pytest.mark.parametrize("first", range(0, SCHEDULES, SCHEDULES // 10))
def test_no_schedule_breaks_a_batch(first):
    for seed in range(first, first + SCHEDULES // 10):
        try:
            Training(seed).run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


def without_waits(method: str) -> type[Transfers]:
    """Return transfers with a method that lets no stream wait for an event."""

    def call(self: Any, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Stream, "wait_event", lambda *_: None)
            return getattr(OnDouble, method)(self, *args)

    return type("WithoutWaits", (OnDouble,), {method: call})


class ReleasesEarly(OnDouble):
    def send(self, *args: Any) -> Any:
        self._held.clear()
        return super().send(*args)


class LosesErrors(OnDouble):
    """Gives the batch before again, where the source raises."""

    def __iter__(self) -> Iterator[Any]:
        batch = None
        try:
            for batch in super().__iter__():
                yield batch
        except SourceError:
            yield batch


class TakesFirstStream(OnDouble):
    """Takes the stream that was current first for the consumer's."""

    def __init__(self, *args: Any, runtime: Device, **given: Any) -> None:
        first = runtime.current_stream()
        runtime.current_stream = lambda: first
        super().__init__(*args, runtime=runtime, **given)


class ForgetsEpochs(OnDouble):
    """Lets go of what is being copied, where an epoch begins."""

    def __iter__(self) -> Iterator[Any]:
        self._held.clear()
        return super().__iter__()


class StreamPerEpoch(OnDouble):
    def __iter__(self) -> Iterator[Any]:
        self._copies = self._runtime.Stream()
        return super().__iter__()


PLANTED = {
    "missing wait of the consumer": without_waits("receive"),
    "missing wait of the copy": without_waits("send"),
    "early release": ReleasesEarly,
    "lost error": LosesErrors,
    "wrong stream": TakesFirstStream,
    "reuse across epochs": ForgetsEpochs,
    "a stream for each epoch": StreamPerEpoch,
}


@pytest.mark.parametrize("bug", PLANTED)
def test_each_planted_bug_is_found(bug):
    with pytest.raises(Violation):
        for seed in range(50):
            Training(seed).run()  # what is not changed passes
            Training(seed, PLANTED[bug]).run()


@pytest.mark.long
def test_no_interrupted_copy_writes_to_memory_that_others_got():
    for seed in range(300):
        training = Training(seed)
        training.device.interrupts = 0.1
        try:
            training.run()
        except Violation as error:
            raise AssertionError(f"schedule {seed}: {error}") from error


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_a_loop_holds_few_batches_and_all_its_epochs_share_a_stream_and_blocks(ahead):
    training = Training(0, ahead=ahead, affine=None, cast=None, graph=False)
    device, transfers = training.device, training.transfers
    for epoch in range(20):
        training.epoch, batches = (epoch, 8, None), iter(transfers)
        for number in range(3 if epoch % 2 else 8):  # leaves some epochs early
            batch = next(batches)
            for column in "abc":
                device.check(batch[column], content(epoch, number, column), f"batch {number} of epoch {epoch}")
    most = 2 * (ahead + 1)  # two columns of a batch are copied together, one by itself
    assert device.most_lent <= most
    assert device.most_host_lent <= most
    assert len(device.memories) <= 2 * most, "memory of earlier epochs is used again"
    assert device.streams == 1
    del batch, batches
    transfers.close()
    device.finish()
    assert (device.lent, device.host_lent) == (0, 0)


def test_what_is_copied_is_held_after_its_loader_was_dropped():
    for seed in range(50):
        training = Training(seed)
        training.epoch, device = (0, 5, None), training.device
        batches = iter(training.transfers)
        next(batches)
        training.transfers = None
        del batches  # a thread waits for the copies, and lets go of the memory
        limit = time.monotonic() + 60
        while (device.lent, device.host_lent) != (0, 0):
            assert time.monotonic() < limit
            time.sleep(0.001)
        device.finish()


@pytest.mark.parametrize("asked", [2, 3, 4])
def test_an_error_of_a_later_batch_holds_no_memory_of_the_device(url, asked):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == 25:
            raise ValueError("label 25")
        return sample

    device, options = Device(Random(0)), {"batch_size": 8, "shuffle": False, "num_workers": 0}
    dataset = sl.StreamingDataset(url, **options, device="cpu", transform=transform)
    dataset._transfers = OnDouble("cpu", 4, runtime=device)
    batches = iter(dataset)
    gc.disable()
    try:
        with suppress(TransformError):
            for _ in range(asked):
                next(batches)
                time.sleep(0.1)  # until others, and the error, are finished
        dataset.close()
        del batches
        device.finish()
        assert device.lent == 0
    finally:
        gc.enable()


def test_nothing_is_let_go_before_its_copy_ended_while_another_thread_closes():
    class Copied:
        ended = False

        def query(self) -> bool:
            return self.ended

        def synchronize(self) -> None:
            while other_thread:
                other_thread.pop()()
            self.ended = True

    items = [(Copied(), None) for _ in range(3)]
    held = deque(items)
    other_thread = [lambda: device_module._release(held, 3)]
    device_module._release(held, 3)
    assert list(held) == items[1:]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("schedules"))
    fields = {"x": "float32[64]", "label": "int64"}
    layout = sl.Layout(chunk_size=1 << 12, block_size=1 << 12, samples_per_shard=64)
    with sl.Writer(folder, fields, layout=layout, num_samples=200) as out:
        for number in range(200):
            out.write({"x": np.full(64, number, np.float32), "label": number})
    return folder


def follow(dataset: Any, plan: list[tuple[str, int]], use: Callable[[dict[str, Any]], None]) -> list[Any]:
    """Do with a loader what a plan says; return the states after its batches, and the errors."""
    seen, batches = list[Any](), iter(dataset)
    for action, value in plan:
        try:
            if action == "next":
                for _ in range(value):
                    use(next(batches))
                    seen.append(dataset.state_dict())
            else:
                if action == "set_epoch":
                    dataset.set_epoch(value)
                elif action == "load":
                    dataset.load_state_dict(dataset.state_dict())
                batches = iter(dataset)
        except (StopIteration, StreamloaderError, SourceError) as error:
            seen.append(f"{type(error).__name__}: {error}")
    return seen


def options_of(seed: int) -> dict[str, Any]:
    """Return options of a loader, of which those that fail do so at the same batches each time."""
    rng = Random(seed)
    bad, fails, calls = rng.choice((None, rng.randrange(200))), rng.choice((None, rng.randrange(20))), count()

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["label"] == bad:
            raise ValueError(bad)
        return sample

    def on_batch(_: Any) -> None:
        if next(calls) == fails:
            raise SourceError(fails)

    return {
        **{"batch_size": rng.choice((4, 8, 16, 50)), "seed": seed, "num_workers": 0, "on_batch": on_batch},
        "steps_per_epoch": rng.choice((None, None, rng.randint(1, 30))),
        "transform": None if bad is None else transform,
        "on_error": "raise" if bad is None else rng.choice(("raise", "mask", "replace")),
    }


def train(url: str, seed: int, transfers: type[Transfers] = OnDouble) -> None:
    """Check that a loader gives the same on a device as without one: batches, states and errors."""
    rng = Random(seed)
    device, ahead, expected = Device(rng), rng.randint(1, 4), deque[dict[str, Any]]()
    streams = [device.current, device.new_stream()]
    kinds = ("next", 8), ("next", 40), ("next", 3), ("iter", 0), ("load", 0), ("set_epoch", 3)
    plan = [(kind, rng.randint(0, most)) for kind, most in rng.choices(kinds, k=rng.randint(1, 8))]

    def check(batch: dict[str, Any]) -> None:
        for name, column in expected.popleft().items():
            device.check(batch[name], column.numpy().tobytes(), f"{name} of a batch")
        device.current = streams[rng.random() < 0.2]

    dataset = sl.StreamingDataset(url, **options_of(seed), device="cpu", ahead=ahead)
    dataset._transfers = transfers("cpu", ahead, runtime=device)
    seen = follow(sl.StreamingDataset(url, **options_of(seed)), plan, expected.append)
    try:
        assert follow(dataset, plan, check) == seen
        dataset.close()
        device.finish()
    finally:
        dataset._transfers._held.clear()
        dataset._transfers._lent.clear()
    assert (device.lent, device.streams) == (0, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:epoch .* begins anew")
def test_a_loader_gives_the_same_on_a_device_under_each_schedule(url):
    for seed in range(40):
        train(url, seed)


@pytest.mark.filterwarnings("ignore:epoch .* begins anew")
def test_a_batch_of_a_loader_breaks_if_its_buffer_is_released_early(url):
    with pytest.raises(Violation, match="of a batch"):
        for seed in range(20):
            train(url, seed, ReleasesEarly)


class Pair(NamedTuple):
    image: Any
    label: Any


TENSORS = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from((torch.uint8, torch.int64, torch.float32, torch.bfloat16, torch.bool)),
    st.lists(st.integers(0, 3), max_size=3),
)
OTHERS = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.binary(max_size=3), st.builds(object))


def containers(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy for containers of values."""
    return st.one_of(
        st.lists(values, max_size=3),
        st.lists(values, max_size=3).map(tuple),
        st.builds(Pair, values, values),
        st.dictionaries(st.text(max_size=3), values, max_size=3),
        st.dictionaries(st.text(max_size=3), values, max_size=3).map(OrderedDict),
    )


def same(got: Any, given: Any) -> bool:
    """Return whether two values have the same structure, types, order and tensors, and else the same objects."""
    if isinstance(given, torch.Tensor):
        return got.dtype == given.dtype and got.shape == given.shape and torch.equal(got, given)
    if type(got) is not type(given):
        return False
    if isinstance(given, dict):
        return list(got) == list(given) and same(list(got.values()), list(given.values()))
    if isinstance(given, list | tuple):
        return len(got) == len(given) and all(map(same, got, given))
    return got is given


def test_nested_tensors_keep_their_lengths_and_their_ragged_dimension():
    values, offsets = torch.arange(12.0), torch.tensor([0, 5, 12])
    with_holes = torch.nested.nested_tensor_from_jagged(values, offsets, lengths=torch.tensor([3, 2]))
    transposed = torch.nested.nested_tensor_from_jagged(values[:, None], offsets).transpose(1, 2)
    for nested in (with_holes, transposed):
        (got,) = sl.to_device([nested], "cpu")
        assert got.dim() == nested.dim()
        assert all(map(same, got.unbind(), nested.unbind()))
        cast = to_cast_tensors({"x": torch.bfloat16}, {"x": nested})["x"]
        assert cast.dtype == torch.bfloat16
        assert all(map(same, cast.unbind(), nested.to(torch.bfloat16).unbind()))


@pytest.mark.parametrize("graph", [False, True])
def test_training_can_use_batches_that_were_sent_in_inference_mode(graph):
    batches = iter(Transfers("cpu", 2, iterable=(torch.ones(3) for _ in range(3)), graph=graph))
    with torch.inference_mode():
        next(batches)
    weight = torch.ones(3, requires_grad=True)
    for batch in batches:
        (weight * batch).sum().backward()
    assert weight.grad.tolist() == [2.0] * 3


def test_tensors_that_are_copied_together_are_changed_by_themselves():
    parts = list(torch.unsafe_split_with_sizes(torch.ones(5), [2, 3]))
    ((first, second),) = sl.to_device([parts], "cpu")
    weight = torch.ones(2, requires_grad=True)
    loss = (weight * first).sum()
    second.zero_()  # autograd would refuse it if both were views of one tensor
    loss.backward()
    assert weight.grad.tolist() == [1.0, 1.0]


def test_the_batch_sizes_of_packed_sequences_stay_on_the_cpu():
    packed = pack_sequence([torch.arange(2), torch.arange(3)], enforce_sorted=False)
    (got,) = sl.to_device([packed], "cpu")
    assert type(got) is PackedSequence
    assert got.batch_sizes is packed.batch_sizes
    for name in ("data", "sorted_indices", "unsorted_indices"):
        assert torch.equal(getattr(got, name), getattr(packed, name))
        assert getattr(got, name).data_ptr() != getattr(packed, name).data_ptr()


@settings(max_examples=examples(100))
@given(batches=st.lists(st.recursive(TENSORS | OTHERS, containers, max_leaves=6), max_size=5), ahead=st.integers(1, 3))
def test_to_device_keeps_structures_order_and_other_values(batches, ahead):
    got = list(sl.to_device(iter(batches), "cpu", ahead=ahead))
    assert len(got) == len(batches) and all(map(same, got, batches))
