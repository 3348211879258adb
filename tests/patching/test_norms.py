"""Norms of every class: recognised by what they compute, fused where that is proven, refused where it is not."""

from __future__ import annotations

import copy
import importlib
import itertools
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusedops
from fusedops.patching import norms, probing
from tests.harness.errors import check_error
from tests.patching.vision import load_timm

WIDTH = 12
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Class -> the function that it is to call. transformers' by model, timm's by name.
TRANSFORMERS = {
    **{
        f"{model}.{name}RMSNorm": "rms_norm"
        for model, name in [
            ("llama", "Llama"),
            ("mistral", "Mistral"),
            ("mixtral", "Mixtral"),
            ("qwen2", "Qwen2"),
            ("qwen3", "Qwen3"),
            ("phi3", "Phi3"),
            ("gpt_oss", "GptOss"),
        ]
    },
    **{f"{name.lower()}.{name}RMSNorm": "rms_norm(weight_offset=1.0)" for name in ("Gemma", "Gemma2", "Gemma3")},
    "t5.T5LayerNorm": "rms_norm",
    "llama4.Llama4TextL2Norm": "rms_norm",
    "olmo.OlmoLayerNorm": "layer_norm",
    "cohere.CohereLayerNorm": "layer_norm",
    "convnext.ConvNextLayerNorm": "layer_norm",
    "nemotron.NemotronLayerNorm1P": "layer_norm(weight + 1.0)",
}
TIMM = {
    "LayerNorm": "layer_norm",
    "LayerNormFp32": "layer_norm",
    "LayerNorm2d": "layer_norm (channels first)",
    "LayerNorm2dFp32": "layer_norm (channels first)",
    "RmsNorm": "rms_norm",
    "RmsNormFp32": "rms_norm",
    "RmsNorm2d": "rms_norm (channels first)",
    "RmsNorm2dFp32": "rms_norm (channels first)",
    "GroupNorm1": "group_norm",
}


class ChannelsFirst(nn.Module):
    """As ConvNeXt's code has it, with both of its data formats."""

    def __init__(self, width, eps=1e-6, data_format="channels_first"):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps
        self.data_format = data_format
        self.normalized_shape = (width,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight.view(-1, 1, 1) * x + self.bias.view(-1, 1, 1)


class ChannelsFirstNorm(ChannelsFirst):
    pass


class ScaleNorm(nn.Module):
    """Parameters of other names, eps as a constant, a method of its own, a name for the argument."""

    def __init__(self, width):
        super().__init__()
        self.beta = nn.Parameter(torch.zeros(width))
        self.gamma = nn.Parameter(torch.ones(width))

    def _normalise(self, x, eps=3e-3):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    def forward(self, tokens):
        return self._normalise(tokens.float()).type_as(tokens) * self.gamma + self.beta


class DefaultNorm(nn.LayerNorm):
    """eps is not passed on: torch's default counts, not the attribute."""

    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias)


OWN = {
    ChannelsFirstNorm: "layer_norm (channels first)",
    ScaleNorm: "layer_norm",
    DefaultNorm: "layer_norm",
}


def _class(name):
    if name in TIMM:
        load_timm()
        return getattr(importlib.import_module("timm.layers"), name)
    model, name = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def _build(kind):
    """A norm of this class, or of the class of this name, with random parameters and an eps that shows."""
    kind = _class(kind) if isinstance(kind, str) else kind
    norm = kind(1e-2) if kind.__name__ == "Llama4TextL2Norm" else kind(WIDTH)
    for name in ("eps", "variance_epsilon"):
        if name in vars(norm) and kind is not DefaultNorm:
            setattr(norm, name, 1e-2)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


def _input(calls, rank=4):
    if "channels" in calls or calls == "group_norm":
        return torch.randn(3, WIDTH, 2, 5)[(...,) if rank == 4 else (..., 0)]
    return torch.randn(*(3, 2, 5)[: rank - 1], WIDTH)


def _eps(norm):
    if isinstance(norm, ScaleNorm):
        return 3e-3
    if isinstance(norm, DefaultNorm) or type(norm).__name__.endswith("OlmoLayerNorm"):
        return 1e-5
    return vars(norm).get("variance_epsilon") or norm.eps


def _names(norm):
    """Of weight and bias, those that the norm has."""
    roles = ("gamma", "beta") if isinstance(norm, ScaleNorm) else ("weight", "bias")
    return [name for name in roles if norm._parameters.get(name) is not None]


def _exact(norm, calls, x):
    """The formula in float64, and its leaves: the input and the parameters."""
    leaves = [t.detach().double().requires_grad_() for t in (x, *map(norm.get_parameter, _names(norm)))]
    x, weight, bias = (*leaves, None, None)[:3]
    dims = (1,) if "channels" in calls else (1, 2, 3) if calls == "group_norm" else (-1,)
    y = x if calls.startswith("rms") else x - x.mean(dims, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(dims, keepdim=True) + _eps(norm))
    shape = (-1, 1, 1) if dims[0] == 1 else (-1,)
    if weight is not None:
        y = y * (weight.view(shape) + (1.0 if "1.0" in calls else 0.0))
    if bias is not None:
        y = y + bias.view(shape)
    return y, leaves


def _layer_norm_gradients(norm, calls, x, grad):
    """The exact gradients, and those of torch's layer norm in 16 bits; none in float32."""
    dtypes = {x.dtype, *(p.dtype for p in norm.parameters())}
    if len(dtypes) > 1 or torch.float32 in dtypes:
        return []
    dim = 1 if "channels" in calls else -1
    leaves = [x, *map(norm.get_parameter, _names(norm))]
    weight, bias = (*leaves[1:], None, None)[:2]
    weight = weight + 1 if "1.0" in calls else weight
    y = F.layer_norm(x.movedim(dim, -1), (WIDTH,), weight, bias, _eps(norm)).movedim(-1, dim)
    exact, exact_leaves = _exact(norm, calls, x)
    plain = torch.autograd.grad(y, leaves, grad)
    return list(zip(torch.autograd.grad(exact, exact_leaves, grad.double()), plain, strict=True))


def _patched(plain):
    patched = copy.deepcopy(plain)
    report = fusedops.patch(patched)
    return patched, report


@pytest.fixture
def fused(monkeypatch):
    """Counts the calls of fused norms."""
    count = []
    for name in ("layer_norm", "rms_norm", "group_norm"):
        function = getattr(norms, name)

        def counted(*args, function=function, **kwargs):
            count.append(function.__name__)
            return function(*args, **kwargs)

        monkeypatch.setattr(norms, name, counted)
    return count


ALL = {**TRANSFORMERS, **TIMM, **OWN}
_IDS = [kind if isinstance(kind, str) else kind.__name__ for kind in ALL]


@pytest.mark.parametrize("kind", ALL, ids=_IDS)
def test_values_gradients_and_dtypes(kind, fused):
    """For every pair of dtypes, whether the pair is fused or not."""
    calls = ALL[kind]
    norm = _build(kind)
    x = _input(calls)
    for x_dtype, dtype in itertools.product(DTYPES, DTYPES):
        plain = copy.deepcopy(norm).to(dtype)
        patched, report = _patched(plain)
        assert [entry.calls for entry in report.replaced] == [f"fusedops.{calls}"]
        given = x.to(x_dtype).requires_grad_()
        try:
            expected = plain(given)
        except RuntimeError:  # dtypes that it does not take
            with pytest.raises(RuntimeError):
                patched(given)
            continue
        fused.clear()
        actual = patched(given)
        assert len(fused) == 1 or (x_dtype, dtype) not in ((torch.float32,) * 2, (torch.bfloat16,) * 2)
        assert actual.dtype == expected.dtype
        assert actual.stride() == expected.stride()
        exact, leaves = _exact(plain, calls, given)
        names = _names(plain)
        check_error(actual, exact.detach(), expected, what=f"{x_dtype}, {dtype}")
        grad = torch.randn_like(expected)
        results = [
            torch.autograd.grad(y, of, grad.to(y.dtype))
            for y, of in (
                (actual, [given, *(patched.get_parameter(name) for name in names)]),
                (exact, leaves),
                (expected, [given, *(plain.get_parameter(name) for name in names)]),
            )
        ]
        # On the CPU torch adds up the gradients of a layer norm in 16 bits, which a class' own code may not do.
        more = _layer_norm_gradients(plain, calls, given, grad) if calls.startswith("layer") else []
        for i, (name, a, e, b) in enumerate(zip(["input", *names], *results, strict=True)):
            check_error(a, e, b, gradient=True, what=f"gradient of {name}, {x_dtype}, {dtype}", more=more[i : i + 1])


@pytest.fixture
def autocast():
    """Sets autocast; torch.autocast itself refuses where there is no such device."""
    before = {d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")}

    def set_to(device, dtype):
        torch.set_autocast_enabled(device, True)
        torch.set_autocast_dtype(device, dtype)

    yield set_to
    for device, (enabled, dtype) in before.items():
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


@pytest.mark.parametrize("kind", ALL, ids=_IDS)
def test_dtypes_under_autocast(kind, autocast, fused):
    norm = _build(kind)
    x = _input(ALL[kind])
    for cast in (torch.bfloat16, torch.float16):
        autocast("cpu", cast)
        for x_dtype, dtype in itertools.product((torch.float32, cast), repeat=2):
            plain = copy.deepcopy(norm).to(dtype)
            patched, _ = _patched(plain)
            try:
                expected = plain(x.to(x_dtype))
            except RuntimeError:
                continue
            fused.clear()
            actual = patched(x.to(x_dtype))
            assert fused
            assert actual.dtype == expected.dtype
            assert (actual - expected).abs().max() < 0.1


@pytest.mark.parametrize("kind", ALL, ids=_IDS)
def test_dtypes_under_autocast_of_a_gpu(kind, autocast):
    """Where the dtypes are found out with tensors without memory, no GPU is needed."""
    norm = _build(kind)
    proof = probing.prove(type(norm), norm)
    for cast in (torch.bfloat16, torch.float16):
        for x_dtype, dtype in itertools.product((torch.float32, cast), repeat=2):
            found = probing.dtype_of(proof.index, "cuda", cast, x_dtype, dtype if _names(norm) else None)
            with torch.no_grad(), FakeTensorMode():
                plain = type(norm).__new__(type(norm))
                plain.__dict__.update(copy.copy(norm.__dict__), _parameters={})
                for name, p in norm._parameters.items():
                    empty = None if p is None else nn.Parameter(torch.empty(p.shape, dtype=dtype, device="cuda"))
                    plain.register_parameter(name, empty)
                autocast("cuda", cast)
                try:
                    expected = plain(torch.empty(_input(ALL[kind]).shape, dtype=x_dtype, device="cuda")).dtype
                except RuntimeError:
                    expected = None
            assert found == expected
            assert found is not None or x_dtype != dtype


class Rms(nn.Module):
    """What the near misses below change one thing of."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = 1e-5

    def forward(self, x):
        return self.finish(self.normalise(x) * self.scale())

    def normalise(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def scale(self):
        return self.weight

    def finish(self, x):
        return x


def _variant(name, **changed):
    return type(name, (Rms,), changed)


def _rms(x, dim=-1, eps=1e-5):
    return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + eps)


def _in_place(self, x):
    return x.mul_(torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)) * self.weight


def _counting(self, x):
    self.steps = getattr(self, "steps", 0) + 1
    return _rms(x) * self.weight


def _by_shape(self, x):
    if x.dim() == 4 and x.shape[1] == self.weight.shape[0]:
        return _rms(x, 1) * self.weight[:, None, None]
    return _rms(x) * self.weight


OFF = r"it computes no norm that fusedops has: compared with layer and rms norms on random inputs, the nearest is "
NEAR_MISSES = {
    "another eps": (lambda self, x: _rms(x, eps=2 * self.eps) * self.weight, OFF + r"rms_norm, off by 0\.\d+ times"),
    "eps outside the root": (
        lambda self, x: x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * self.weight,
        OFF + "rms_norm, off by",
    ),
    "an offset of one half": (lambda self, x: _rms(x) * (self.weight + 0.5), OFF),
    "another axis": (lambda self, x: _rms(x, -2) * self.weight, OFF),
    "all axes": (lambda self, x: _rms(x, (-2, -1)) * self.weight, OFF),
    "tanh": (lambda self, x: (_rms(x) * self.weight).tanh(), OFF),
    "mean taken off after": (lambda self, x: (_rms(x) - _rms(x).mean(-1, keepdim=True)) * self.weight, OFF),
    "unbiased variance": (
        lambda self, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt() * self.weight,
        OFF + "layer_norm, off by",
    ),
    "unit length": (lambda self, x: F.normalize(x, dim=-1) * self.weight, OFF),
    "clamped": (lambda self, x: _rms(x.clamp(-1e4, 1e4)) * self.weight, OFF),
    "NaN made zero": (
        lambda self, x: _rms(x.nan_to_num(0.0)) * self.weight,
        "its forward makes other of nan than rms_norm does",
    ),
    "noise in training": (
        lambda self, x: _rms(x) * self.weight + self.training * 1e-3 * torch.randn_like(x),
        "its forward gives another result at every call",
    ),
    "dropout": (
        lambda self, x: F.dropout(_rms(x) * self.weight, 0.1, self.training),
        "its forward gives another result at every call",
    ),
    "scaled in training": (
        lambda self, x: _rms(x) * self.weight * (1.0 if self.training else 2.0),
        "its forward gives another result in training than in evaluation",
    ),
    "a counter": (_counting, "its forward changes the module"),
    "in place": (_in_place, "its forward writes to its input"),
    "no gradient of the statistics": (
        lambda self, x: x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + self.eps) * self.weight,
        r"its values are rms_norm's, but the gradient of its input is off by \d",
    ),
    "no gradient of the weight": (
        lambda self, x: _rms(x) * self.weight.detach(),
        "its result has no gradient with respect to its weight",
    ),
    "no gradient": (torch.no_grad()(lambda self, x: _rms(x) * self.weight), "its result has no gradient"),
    "a tuple": (lambda self, x: (_rms(x), x), "its forward returns a tuple"),
    "another dtype": (lambda self, x: _rms(x).double(), "its forward made float64 (7, 12) of float32 (7, 12)"),
    "something that is missing": (
        lambda self, x: _rms(x) * self.gain,
        "its forward raised AttributeError on a random input: 'RMSNorm' object has no attribute 'gain'",
    ),
    "two inputs": (lambda self, x, condition: _rms(x) * condition, "its forward does not take one tensor"),
}


@pytest.mark.parametrize(("forward", "reason"), NEAR_MISSES.values(), ids=NEAR_MISSES)
def test_near_misses_are_refused(forward, reason):
    model = _variant("RMSNorm", forward=forward)()
    before = type(model)
    report = fusedops.patch(model)
    assert not report.replaced
    (left,) = report.left
    assert re.match(reason, left.reason) or left.reason == reason
    assert type(model) is before


def _buffer(norm):
    norm.register_buffer("mean", torch.zeros(WIDTH))


def _two_dimensions(norm):
    norm.weight = nn.Parameter(torch.ones(2, WIDTH))


def _integer(norm):
    norm.weight = nn.Parameter(torch.ones(WIDTH, dtype=torch.int8), requires_grad=False)


def _no_parameter(norm):
    del norm.weight
    norm.weight = 1.0


STRUCTURES = {
    "buffers": (_buffer, "it has buffers (mean)"),
    "a weight of two dimensions": (_two_dimensions, "its weight has 2 dimensions"),
    "a tensor that it reads": (lambda norm: setattr(norm, "eps", torch.tensor(1e-5)), "may read its eps, a Tensor"),
    "an integer weight": (_integer, "its weight has dtype int8"),
    "a weight that is no parameter": (_no_parameter, "its weight is not a parameter"),
}


@pytest.mark.parametrize(("change", "reason"), STRUCTURES.values(), ids=STRUCTURES)
def test_what_the_modules_are_made_of(change, reason):
    model = _variant("RMSNorm")()
    change(model)
    report = fusedops.patch(model)
    assert not report.replaced
    assert reason in report.left[0].reason


def test_the_shape_may_not_tell_what_is_normalised(fused):
    model = _variant("RMSNorm", forward=_by_shape)()
    plain = copy.deepcopy(model)
    (entry,) = fusedops.patch(model).replaced
    assert entry.calls == "fusedops.rms_norm"
    for shape, count in (((3, WIDTH), 1), ((2, WIDTH, 3, 4), 0), ((2, 3, 4, WIDTH), 0), ((2, WIDTH, 3, WIDTH), 0)):
        fused.clear()
        x = torch.randn(shape)
        torch.testing.assert_close(model(x), plain(x))
        assert len(fused) == count


def test_a_class_named_nothing_like_a_norm_is_not_tried():
    called = []
    model = _variant("Scale", forward=lambda self, x: called.append(x) or _rms(x) * self.weight)()
    report = fusedops.patch(model)
    assert not called
    assert not report.replaced
    assert not report.left


@pytest.mark.parametrize(
    "model",
    [nn.BatchNorm2d(4), nn.InstanceNorm1d(4), nn.LocalResponseNorm(2), fusedops.nn.RMSNorm(4)],
    ids=lambda model: type(model).__name__,
)
def test_other_norms_of_torch_and_ours_are_not_mentioned(model):
    report = fusedops.patch(model)
    assert not report.replaced
    assert not report.left


def test_a_block_with_a_norms_name_is_not_mentioned():
    class AdaLayerNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
            self.linear = nn.Linear(4, 2 * WIDTH)

        def forward(self, x, condition):
            scale, shift = self.linear(condition).chunk(2, -1)
            return self.norm(x) * (1 + scale) + shift

    report = fusedops.patch(AdaLayerNorm())
    assert [entry.path for entry in report.replaced] == ["norm"]
    assert not report.left


# ---- what a fused norm leaves to the original -----------------------------------------------------------------------


class GatedRMSNorm(Rms):
    def forward(self, hidden, gate=None, *, scale=1.0):
        y = super().forward(hidden)
        return (y if gate is None else y * torch.sigmoid(gate)) * scale


def test_other_arguments_are_passed_on(fused):
    plain = GatedRMSNorm()
    patched, report = _patched(plain)
    assert report.replaced
    x, gate = torch.randn(2, 3, WIDTH), torch.randn(2, 3, WIDTH)
    for args, kwargs, count in (
        ((x,), {}, 1),
        ((), {"hidden": x}, 1),
        ((x, gate), {}, 0),
        ((x,), {"gate": gate}, 0),
        ((x,), {"scale": 2.0}, 0),
        ((), {"hidden": x, "gate": None}, 0),
    ):
        fused.clear()
        torch.testing.assert_close(patched(*args, **kwargs), plain(*args, **kwargs))
        assert len(fused) == count
    for args, kwargs in (((), {}), ((x, x, x), {}), ((x,), {"no": 1})):
        with pytest.raises(TypeError):
            patched(*args, **kwargs)


def test_inputs_that_were_not_tried_take_the_way_they_took_before(fused):
    plain = _variant("RMSNorm")()
    patched, _ = _patched(plain)
    inputs = [
        torch.randn(WIDTH),
        torch.randn(1, 1, 1, 2, 1, WIDTH),
        torch.randn(2, WIDTH, dtype=torch.float64),
        torch.randn(2, 1),  # the weight is broadcast
    ]
    for x in inputs:
        assert torch.equal(patched(x), plain(x))
    jagged = torch.nested.nested_tensor([torch.randn(2, WIDTH), torch.randn(3, WIDTH)], layout=torch.jagged)
    linear = nn.LayerNorm(WIDTH)
    own = type("OwnLayerNorm", (nn.LayerNorm,), {"forward": lambda self, x: nn.LayerNorm.forward(self, x)})(WIDTH)
    assert fusedops.patch(own).replaced
    for a, b in zip(own(jagged).unbind(), linear(jagged).unbind(), strict=True):
        assert torch.equal(a, b)
    assert not fused
    assert patched(torch.randn(0, WIDTH)).shape == (0, WIDTH)
    assert fused


def test_a_dtype_with_other_values_is_left_to_the_original(fused):
    def forward(self, x):
        y = _rms(x.float()) * self.weight.float()
        return (y if x.dtype != torch.float16 else y.clamp(-1, 1)).to(x.dtype)

    plain = _variant("RMSNorm", forward=forward)()
    patched, report = _patched(plain)
    assert report.replaced
    x = torch.randn(3, WIDTH)
    for dtype, count in ((torch.float32, 1), (torch.bfloat16, 1), (torch.float16, 0)):
        fused.clear()
        torch.testing.assert_close(patched(x.to(dtype)), plain(x.to(dtype)))
        assert len(fused) == count


def test_eps_and_other_attributes_are_read_at_every_call(fused):
    plain = ChannelsFirstNorm(WIDTH)
    patched, _ = _patched(plain)
    x = torch.randn(2, WIDTH, 3, 3)
    for name, value, y in (
        ("eps", 0.5, x),
        ("data_format", "channels_last", x.movedim(1, -1)),
        ("eps", 1e-4, x.movedim(1, -1)),
        ("data_format", "channels_first", x),
    ):
        for model in (plain, patched):
            setattr(model, name, value)
        fused.clear()
        torch.testing.assert_close(patched(y), plain(y))
        assert len(fused) == 1


def test_two_attributes_of_one_value_are_told_apart(fused):
    class PairNorm(Rms):
        def __init__(self):
            super().__init__()
            self.a_eps = self.eps
            self.limit = self.eps

        def forward(self, x):
            return _rms(x, eps=self.eps) * self.weight if self.a_eps >= 0 and self.limit else x

    plain = PairNorm()
    patched, _ = _patched(plain)
    plain.eps = patched.eps = 0.3
    x = torch.randn(2, WIDTH)
    torch.testing.assert_close(patched(x), plain(x))
    assert fused
    plain.limit = patched.limit = 0.0
    assert torch.equal(patched(x), x)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::3])
@pytest.mark.parametrize("kind", ["llama.LlamaRMSNorm", "LayerNorm", "LayerNorm2d", "RmsNorm2d", ChannelsFirstNorm])
def test_results_lie_in_memory_as_they_did(kind, order, fused):
    """A view of the result, as of heads, works where it worked before."""
    plain = _build(kind)
    patched, _ = _patched(plain)
    x = _input(ALL[kind])
    x = x.permute(order).contiguous().permute([order.index(d) for d in range(4)])
    for given in (x, x[1:], x[:, :, 1:], x[:1]):
        if plain._get_name() == "RmsNorm2d" and given is not x:
            given = given.clone(memory_format=torch.preserve_format)
        expected, actual = plain(given), patched(given)
        torch.testing.assert_close(actual, expected)
        shown = [d for d in range(4) if given.shape[d] > 1]
        assert [actual.stride(d) for d in shown] == [expected.stride(d) for d in shown]
    assert len(fused) == 4


# ---- what trying costs and touches ----------------------------------------------------------------------------------


def _watched(name="WatchedRMSNorm"):
    count = []

    def forward(self, x):
        count.append(x.device)
        return _rms(x) * self.weight

    return _variant(name, forward=forward), count


def test_a_class_is_tried_once():
    kind, count = _watched()
    model = nn.ModuleList([kind() for _ in range(50)])
    fusedops.plan(model[0])
    tried = len(count)
    assert 0 < tried < 100
    for i, norm in enumerate(model):
        norm.layer = i
    assert len(fusedops.patch(model).replaced) == 50
    assert len(count) == tried
    model.extend([kind(width=WIDTH + 1) for _ in range(50)])
    assert len(fusedops.patch(model).replaced) == 50
    assert len(count) == 2 * tried


def test_attributes_that_differ_in_every_layer_are_tried_a_limited_number_of_times():
    count = []

    def forward(self, x):
        count.append(None)
        return _rms(x) * self.weight + 0 * self.layer

    kind = _variant("LayeredRMSNorm", forward=forward)
    model = nn.ModuleList([kind() for _ in range(40)])
    for i, norm in enumerate(model):
        norm.layer = i
    report = fusedops.patch(model)
    assert len(report.replaced) == 32
    assert {entry.reason[:20] for entry in report.left} == {"more than 32 modules"}


@pytest.mark.parametrize("place", ["cpu", "meta", "cpu, under a default device"])
def test_the_module_and_the_random_state_are_untouched(place):
    kind, count = _watched()
    norm = kind().to(place.split(",")[0])
    versions = {name: (p, p._version) for name, p in norm.named_parameters()}
    state, attributes = torch.get_rng_state(), dict(norm.__dict__)
    with torch.device("meta" if "default" in place else "cpu"), torch.no_grad(), torch.autocast("cpu"):
        report = fusedops.patch(norm)
    assert report.replaced
    assert {str(device) for device in count} == {"cpu"}
    assert torch.equal(torch.get_rng_state(), state)
    assert norm.__dict__ == attributes
    assert all(norm.get_parameter(name) is p and p._version == v for name, (p, v) in versions.items())
    assert all(p.grad is None for p in norm.parameters())
    with torch.inference_mode():
        assert fusedops.patch(kind(WIDTH + 2)).replaced


def test_what_is_found_does_not_depend_on_the_modules_numbers():
    norm = _variant("RMSNorm")()
    with torch.no_grad():
        norm.weight.zero_()
    assert fusedops.patch(norm).replaced
    other = _variant("RMSNorm", scale=lambda self: self.weight.abs())()
    with torch.no_grad():
        other.weight.fill_(2.0)
    assert not fusedops.patch(other).replaced


class PickledRMSNorm(Rms):
    pass


class PickledOtherRMSNorm(Rms):
    def scale(self):
        return self.weight if self.eps > 0 else 2 * self.weight


@pytest.mark.parametrize("kind", [PickledRMSNorm, PickledOtherRMSNorm])
def test_pickles_and_copies_find_out_again(kind, fused, monkeypatch):
    norm = kind()
    nn.init.normal_(norm.weight)
    x = torch.randn(2, WIDTH)
    expected = norm(x)
    fusedops.patch(norm)
    data = pickle.dumps(norm)
    # As in another process, that has tried nothing.
    for entry in list(probing._known):
        probing.proofs_of(entry).clear()
    for other in (pickle.loads(data), copy.deepcopy(norm)):
        assert type(other) is type(norm)
        fused.clear()
        torch.testing.assert_close(other(x), expected)
        assert fused == ["rms_norm"]
    assert fusedops.unpatch(norm) == 1
    assert type(norm) is kind


def test_compiled_and_exported(fused):
    norm = _build("gemma2.Gemma2RMSNorm")
    fusedops.patch(norm)
    x = torch.randn(2, 3, WIDTH)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16):
            return norm(x.bfloat16()), norm(x)

    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for actual, expected in zip(compiled(x), run(x), strict=True):
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected)
    fused.clear()
    again = torch.compile(lambda x: norm(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(again(x), norm(x))
    assert len(fused) == 2  # traced, and called
    norm.eps = 2.0
    torch.testing.assert_close(again(x), norm(x))
    program = torch.export.export(nn.Sequential(norm), (x,))
    torch.testing.assert_close(program.module()(x), norm(x))


@pytest.mark.parametrize("kind", ["llama.LlamaRMSNorm", "gemma.GemmaRMSNorm", "LayerNorm2d", ScaleNorm])
def test_kernels(kind, kernel_runner):
    calls = ALL[kind]
    plain = _build(kind).to(kernel_runner.device)
    patched, _ = _patched(plain)
    given = _input(calls).to(kernel_runner.device).requires_grad_()
    exact, leaves = _exact(plain, calls, given)
    actual, expected = patched(given), plain(given)
    check_error(actual, exact.detach(), expected)
    grad = torch.randn_like(expected)
    results = [
        torch.autograd.grad(actual, [given, *patched.parameters()], grad),
        torch.autograd.grad(
            exact, [leaves[0], *dict(zip(_names(plain), leaves[1:], strict=True)).values()], grad.double()
        ),
        torch.autograd.grad(expected, [given, *plain.parameters()], grad),
    ]
    for a, e, b in zip(*results, strict=True):
        check_error(a, e, b, gradient=True)


def test_group_norm(fused):
    plain = nn.GroupNorm(3, WIDTH, eps=1e-3)
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    patched, report = _patched(plain)
    assert [entry.calls for entry in report.replaced] == ["fusedops.group_norm"]
    for x in (torch.randn(2, WIDTH), torch.randn(2, WIDTH, 5), torch.randn(2, WIDTH, 3, 4)):
        given = [x.clone().requires_grad_() for _ in range(2)]
        results = [model(g) for model, g in zip((plain, patched), given, strict=True)]
        torch.testing.assert_close(*results)
        grad = torch.randn_like(x)
        gradients = [
            torch.autograd.grad(y, [g, *m.parameters()], grad)
            for y, g, m in zip(results, given, (plain, patched), strict=True)
        ]
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)
    assert fused == ["group_norm"] * 3
    affine = nn.GroupNorm(3, WIDTH, affine=False)
    assert fusedops.patch(affine).replaced
    channels_last = torch.randn(2, WIDTH, 3, 4).to(memory_format=torch.channels_last)
    expected = F.group_norm(channels_last, 3)
    torch.testing.assert_close(affine(channels_last), expected)
    assert affine(channels_last).stride() == expected.stride()
