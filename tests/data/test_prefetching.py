"""Batches on their way to a GPU: pinned, on a stream of their own, in order; on the CPU as they are."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from fusedops.data import pack_sequences, prefetch, prefetching
from fusedops.data.nested import map_tensors, tensors_within

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Batch:
    tensor: torch.Tensor
    name: str

    def __post_init__(self):
        if self.name == "copied":
            raise ValueError


class Movable:
    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, non_blocking=False):
        return Movable(self.tensor.to(device, non_blocking=non_blocking))


# ---- what a batch may be made of ------------------------------------------------------------------------------------


def test_every_kind_of_container_keeps_its_type():
    x = torch.ones(2)
    special = Batch(x, "first")
    object.__setattr__(special, "name", "copied")
    batch = {
        "list": [x, 1, None, "text"],
        "tuple": (x, {"inner": x}),
        "named": Pair(x, second=(x,)),
        "ordered": OrderedDict(a=x),
        "default": defaultdict(list, a=x),
        "user": UserDict(a=x),
        "frozen": MappingProxyType({"a": x}),
        "dataclass": special,
        "object": Movable(x),
        "sequence": pack_sequence([x]),
        "numbers": range(3),
    }
    moved = map_tensors(batch, lambda leaf: leaf.to("meta"))
    for name, value in batch.items():
        assert type(moved[name]) is (dict if name == "frozen" else type(value)), name
    assert moved["default"].default_factory is list
    assert moved["list"][1:] == [1, None, "text"]
    assert moved["dataclass"].name == "copied"
    assert moved["sequence"].data.device.type == "meta"
    assert moved["sequence"].batch_sizes.device.type == "cpu"
    tensors = list(tensors_within({name: value for name, value in moved.items() if name != "sequence"}))
    assert {t.device.type for t in tensors} == {"meta"}
    assert all(t.device.type == "cpu" for t in tensors_within(batch))
    # One tensor of the batch is one tensor of the copy; an object's is its own affair.
    assert len(tensors) == 2
    assert moved["list"][0] is moved["named"].second[0]


# ---- the CPU, and devices without streams ---------------------------------------------------------------------------


def test_the_cpu_gets_the_loaders_own_batches():
    batches = [{"x": torch.ones(1)}, [torch.zeros(1)]]
    read = []

    class Loader:
        def __iter__(self):
            for batch in batches:
                read.append(batch)
                yield batch

    iterator = iter(prefetch(Loader(), "cpu", depth=2))
    assert next(iterator) is batches[0]
    assert len(read) == 1
    assert list(iterator) == batches[1:]


def test_a_loader_is_iterable_anew_and_has_its_length():
    loader = torch.utils.data.DataLoader(torch.arange(6.0), batch_size=2)
    ahead = prefetch(loader, "cpu")
    assert len(ahead) == 3
    assert ahead.loader is loader
    for _ in range(2):
        assert torch.equal(torch.cat(list(ahead)), torch.arange(6.0))
    with pytest.raises(TypeError, match="prefetch: the loader has no length"):
        len(prefetch(iter([1]), "cpu"))


def test_other_devices_get_moved_batches():
    (batch,) = prefetch([{"x": torch.ones(2), "n": 3}], "meta")
    assert batch["x"].device.type == "meta"
    assert batch["n"] == 3


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((3, "cpu"), TypeError, "loader must be an iterable of batches"),
        (([], None), TypeError, "device must be a torch.device"),
        (([], True), TypeError, "device must be a torch.device"),
        (([], "gpu:0"), ValueError, "device must name a device; got 'gpu:0'"),
        (([], "cpu", 0), ValueError, "depth must be at least 1"),
        (([], "cpu", 1.5), TypeError, "depth must be an int"),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=f"prefetch: {text}"):
        prefetch(*arguments)


# ---- a GPU, played by a double --------------------------------------------------------------------------------------


class Gpu:
    """Writes down what is asked of the GPU; its tensors are of the CPU."""

    def __init__(self, monkeypatch):
        self.log, self.streams, self.current = [], 0, "main"
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.make_stream())
        monkeypatch.setattr(torch.cuda, "stream", self.entered)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, self.current))
        monkeypatch.setattr(prefetching, "torch", _Torch(torch))
        self.plain = lambda: {"x": Sent(self, 0)}

    def make_stream(self):
        self.streams += 1
        return Stream(self, f"copies{self.streams}")

    @contextlib.contextmanager
    def entered(self, stream):
        before, self.current = self.current, stream.name
        yield
        self.current = before


class _Torch:
    """torch, with tensors' devices told by what they are sent to."""

    def __init__(self, torch):
        self.torch = torch

    def __getattr__(self, name):
        return Sent if name == "Tensor" else getattr(self.torch, name)


class Stream:
    def __init__(self, gpu, name):
        self.gpu, self.name = gpu, name

    def record_event(self):
        self.gpu.log.append(("record", self.name))
        return f"event{sum(kind == 'record' for kind, *_ in self.gpu.log)}"

    def wait_event(self, event):
        self.gpu.log.append(("wait", self.name, event))


class Sent(torch.Tensor):
    """Stands for batch number ``number``."""

    @staticmethod
    def __new__(cls, gpu, number, place="cpu", pinned=False):
        self = torch.Tensor._make_subclass(cls, torch.zeros(1))
        self.gpu, self.number, self.place, self.pinned = gpu, number, place, pinned
        return self

    @property
    def device(self):
        return torch.device(self.place)

    @property
    def layout(self):
        return torch.strided

    def is_pinned(self):
        return self.pinned

    def pin_memory(self):
        self.gpu.log.append(("pin", self.number))
        return Sent(self.gpu, self.number, pinned=True)

    def to(self, device, non_blocking=False):
        assert non_blocking
        if self.place == str(device):
            return self
        assert self.pinned
        self.gpu.log.append(("copy", self.number, self.gpu.current))
        return Sent(self.gpu, self.number, str(device))

    def record_stream(self, stream):
        self.gpu.log.append(("used", self.number, stream.name))


@pytest.fixture
def gpu(monkeypatch):
    return Gpu(monkeypatch)


def test_copies_run_ahead_on_a_stream_of_their_own(gpu):
    iterator = iter(prefetch([{"x": Sent(gpu, i)} for i in range(4)], "cuda", depth=1))
    batch = next(iterator)
    first = gpu.log[:]
    assert first == [
        ("pin", 0), ("copy", 0, "copies1"), ("record", "copies1"),
        ("pin", 1), ("copy", 1, "copies1"), ("record", "copies1"),
        ("wait", "main", "event1"), ("used", 0, "main"),
    ]  # fmt: skip
    assert str(batch["x"].device) == "cuda:0"
    gpu.log.clear()
    assert next(iterator)["x"].number == 1
    assert gpu.log[:3] == [("pin", 2), ("copy", 2, "copies1"), ("record", "copies1")]
    assert gpu.log[-1] == ("used", 1, "main")
    assert [batch["x"].number for batch in iterator] == [2, 3]
    assert gpu.current == "main"


def test_what_is_pinned_or_there_already_is_left(gpu):
    batch = {"pinned": Sent(gpu, 0, pinned=True), "there": Sent(gpu, 1, "cuda:0"), "twice": None}
    batch["twice"] = batch["pinned"]
    (moved,) = prefetch([batch], torch.device("cuda", 0))
    assert [entry for entry in gpu.log if entry[0] in ("pin", "copy")] == [("copy", 0, "copies1")]
    assert moved["there"] is batch["there"]
    assert moved["twice"] is moved["pinned"]
    assert str(batch["pinned"].device) == "cpu"  # the loader's own batch is as it was


def test_each_batch_waits_for_its_own_copy_alone(gpu):
    iterator = iter(prefetch([[Sent(gpu, i)] for i in range(5)], 0, depth=3))
    for number in range(5):
        assert next(iterator)[0].number == number
    waits = [entry[2] for entry in gpu.log if entry[0] == "wait"]
    assert len(set(waits)) == 5
    with pytest.raises(StopIteration):
        next(iterator)


def test_a_loaders_error_comes_in_its_place(gpu):
    def loader():
        yield [Sent(gpu, 0)]
        yield [Sent(gpu, 1)]
        raise OSError("disk")

    batches = iter(prefetch(loader(), "cuda:0", depth=4))
    assert [next(batches)[0].number for _ in range(2)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_batches_of_nothing_and_no_batches(gpu):
    assert list(prefetch([], "cuda")) == []
    assert list(prefetch([{}, None, ["text"]], "cuda")) == [{}, None, ["text"]]


@pytest.mark.gpu
def test_on_a_gpu():
    loader = torch.utils.data.DataLoader(torch.arange(64.0), batch_size=8)
    total = torch.zeros((), device="cuda")
    for batch in prefetch(loader, "cuda"):
        assert batch.device.type == "cuda"
        torch.cuda._sleep(100_000)
        total += batch.sum()
    assert total.item() == sum(range(64))
    (packed,) = prefetch(pack_sequences([[1, 2], [3]], 8), "cuda")
    assert packed.cu_seqlens.tolist() == [0, 2, 3]
    assert packed.cu_seqlens.is_cuda
