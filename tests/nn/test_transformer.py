"""fusedops.nn.TransformerEncoderLayer is torch.nn's, alone and in torch's encoder, and calls what somebody changed."""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fusedops
import fusedops.nn.transformer
from fusedops.linear.activations import ACTIVATIONS
from fusedops.nn.transformer import activation_name
from tests.harness.errors import check_error
from tests.harness.tensors import randn


def _id(value):
    """Without addresses, which differ between processes that share the tests."""
    return re.sub(r" of type object at 0x\w+| at 0x\w+", "", str(value))


MODEL, HEADS, FEEDFORWARD, BATCH, LENGTH = 12, 2, 20, 3, 5

OPTIONS = {
    "plain": {},
    "gelu_batch_first": {"activation": "gelu", "batch_first": True},
    "norm_first": {"norm_first": True, "batch_first": True, "layer_norm_eps": 1e-3},
    "no_bias": {"bias": False, "activation": F.silu},
    "norm_first_no_bias": {"norm_first": True, "bias": False, "activation": nn.GELU(approximate="tanh")},
    "any_activation": {"activation": torch.abs, "batch_first": True},
}


def causal(**options):
    return {"src_mask": nn.Transformer.generate_square_subsequent_mask(LENGTH), "is_causal": True, **options}


def padding():
    return torch.arange(LENGTH) >= torch.tensor([5, 2, 4])[:, None]


MASKS = {
    "none": dict,
    "padding": lambda: {"src_key_padding_mask": padding()},
    "bool": lambda: {"src_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(2)},
    "float_by_head": lambda: {"src_mask": randn(BATCH * HEADS, LENGTH, LENGTH)},
    "causal": causal,
    "causal_and_padding": lambda: causal(src_key_padding_mask=padding().float() * -1e9),
}


def make(options, device="cpu", dropout=0.0, **more):
    """(ours, torch's) from the same seed, then with random norms and biases."""
    made = []
    for kind in (fusedops.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer):
        torch.manual_seed(0)
        given = copy.deepcopy({**options, **more})  # each its own activation
        made.append(kind(MODEL, HEADS, FEEDFORWARD, dropout, **given, device=device))
    ours, theirs = made
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def source(layer, device="cpu", dtype=torch.float32):
    shape = (BATCH, LENGTH, MODEL) if layer.self_attn.batch_first else (LENGTH, BATCH, MODEL)
    return randn(*shape, layout="sliced", device=device, dtype=dtype)


def run(layer, x, options):
    x = x.detach().requires_grad_()
    options = {k: v.to(x) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in options.items()}
    with warnings.catch_warnings():  # torch is about to give up a bool and a floating mask together
        warnings.simplefilter("ignore")
        output = layer(x, **options)
    torch.manual_seed(1)
    grad = torch.randn(output.shape).to(output)
    return output, *torch.autograd.grad(output, [x, *layer.parameters()], grad)


def check_against(ours, theirs, x, options):
    results = run(ours, x, options), run(copy.deepcopy(theirs).double(), x.double(), options), run(theirs, x, options)
    for place, (y, right, torchs) in enumerate(zip(*results, strict=True)):
        check_error(y, right, torchs, gradient=place > 0, what=f"gradient {place}" if place else "output")


@pytest.fixture
def torch_backend():
    """The tests of what the layer makes of its arguments need no kernels."""
    with fusedops.backend("torch"):
        yield


@pytest.fixture
def called(monkeypatch):
    """The fused functions that layers call, in order, with their activation and dropout."""
    calls = []

    def record(name, function):
        def recorded(*args, **named):
            activation = args[3] if name == "linear" and len(args) > 3 else None
            calls.append((name, activation, named.get("dropout_p", 0.0)))
            return function(*args, **named)

        monkeypatch.setattr(fusedops.nn.transformer, name, recorded)

    record("linear", fusedops.linear)
    record("add_layer_norm", fusedops.add_layer_norm)
    return calls


# Parameters


@pytest.mark.parametrize("name", OPTIONS)
def test_begins_as_torchs_from_the_same_seed(name):
    made = []
    for kind in (fusedops.nn.TransformerEncoderLayer, nn.TransformerEncoderLayer):
        torch.manual_seed(0)
        made.append(kind(MODEL, HEADS, FEEDFORWARD, dtype=torch.bfloat16, **OPTIONS[name]))
    ours, theirs = made
    assert isinstance(ours, nn.TransformerEncoderLayer)
    assert type(ours.self_attn) is fusedops.nn.MultiheadAttention
    assert type(ours.norm1) is type(ours.norm2) is fusedops.nn.LayerNorm
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("name", ["plain", "norm_first_no_bias"])
def test_copies_and_pickles(torch_backend, name):
    ours, _ = make(OPTIONS[name], dropout=0.5)
    ours.eval()
    x = source(ours)
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(stream, weights_only=False)):
        assert type(twin) is fusedops.nn.TransformerEncoderLayer
        assert torch.equal(twin(x), ours(x))


# Results


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", OPTIONS)
def test_equals_torchs_layer(torch_backend, name, mask):
    ours, theirs = make(OPTIONS[name])
    check_against(ours, theirs, source(ours), MASKS[mask]())


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_torchs_layer_in_evaluation(torch_backend, name):
    ours, theirs = (layer.eval() for layer in make(OPTIONS[name], dropout=0.5))
    check_against(ours, theirs, source(ours), MASKS["padding"]())


@pytest.mark.parametrize("name", ["plain", "norm_first"])
def test_without_a_batch(torch_backend, name):
    ours, theirs = make(OPTIONS[name])
    check_against(ours, theirs, randn(LENGTH, MODEL), {"src_key_padding_mask": padding()[1]})


@pytest.mark.parametrize("name", ["gelu_batch_first", "norm_first"])
def test_the_kernels_equal_torchs_layer(kernel_runner, name):
    ours, theirs = make(OPTIONS[name], kernel_runner.device)
    x = source(ours, kernel_runner.device)
    check_against(ours, theirs, x, {"src_key_padding_mask": padding().to(x.device)})
    nodes, seen = [ours(x).grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(type(node).__name__)
        nodes.extend(n for n, _ in node.next_functions if n is not None)
    assert {"LinearBackward", "AttentionBackward", "NormBackward"} <= seen


@pytest.mark.parametrize("name", ["plain", "norm_first"])
def test_bfloat16(torch_backend, name):
    ours, theirs = (layer.bfloat16() for layer in make(OPTIONS[name]))
    check_against(ours, theirs, source(ours, dtype=torch.bfloat16), {})


@pytest.mark.parametrize("options", [{}, {"norm_first": True}, {"activation": torch.abs}], ids=_id)
def test_under_autocast(torch_backend, options):
    ours, theirs = make(options)
    x = source(ours)
    right = run(copy.deepcopy(theirs).double(), x.double(), {})
    with torch.autocast("cpu", torch.bfloat16):
        results = run(ours, x, {}), right, run(theirs, x, {})
    for place, (y, exact, torchs) in enumerate(zip(*results, strict=True)):
        check_error(y, exact, torchs, gradient=place > 0)


# Activations


TORCHS = {
    F.relu: "relu", torch.relu: "relu", nn.ReLU(inplace=True): "relu", F.gelu: "gelu", nn.GELU(): "gelu",
    nn.GELU("tanh"): "gelu_tanh", F.silu: "silu", nn.SiLU(): "silu", torch.sigmoid: "sigmoid", nn.Sigmoid(): "sigmoid",
    torch.tanh: "tanh", nn.Tanh(): "tanh", F.leaky_relu: "leaky_relu", nn.LeakyReLU(): "leaky_relu",
    nn.LeakyReLU(0.2): None, nn.ELU(): "elu", nn.ELU(0.5): None, nn.Hardswish(): "hardswish",
    nn.Hardsigmoid(): "hardsigmoid", nn.Mish(): "mish", nn.Softplus(): "softplus", nn.Softplus(2): None,
    nn.Softplus(1, 5): None, nn.PReLU(): None, nn.RReLU(): None, nn.CELU(): None, nn.Sequential(nn.ReLU()): None,
    torch.abs: None,
}  # fmt: skip


@pytest.mark.parametrize(("activation", "name"), TORCHS.items(), ids=lambda a: getattr(a, "__name__", str(a)))
def test_torchs_activations_have_our_names(activation, name):
    assert activation_name(activation) == name
    if name is not None:  # and they are the same function
        x = torch.linspace(-25, 25, 101)
        torch.testing.assert_close(ACTIVATIONS[name].forward(x), activation(x.clone()))


class Unknown(nn.Module):
    """A module that computes one of our activations, and nobody knows."""

    def __init__(self, name):
        super().__init__()
        self.forward_ = ACTIVATIONS[name].forward

    def forward(self, z):
        return self.forward_(z)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, torch.relu, nn.SiLU()], ids=_id)
def test_activations_are_fused_by_name(torch_backend, called, activation):
    layer = fusedops.nn.TransformerEncoderLayer(MODEL, HEADS, FEEDFORWARD, 0.0, activation)
    x = source(layer)
    y = layer(x)
    name = activation if isinstance(activation, str) else activation_name(activation)
    norm = ("add_layer_norm", None, 0.0)
    assert called == [norm, ("linear", name, 0.0), ("linear", None, 0.0), norm]
    layer.activation = Unknown(name)
    called.clear()
    torch.testing.assert_close(layer(x), y)
    assert called == [norm, ("linear", None, 0.0), ("linear", None, 0.0), norm]


def test_an_activation_with_parameters(torch_backend):
    ours, theirs = make({"activation": nn.PReLU()})
    assert "activation.weight" in ours.state_dict()
    check_against(ours, theirs, source(ours), {})


# Dropout


@pytest.mark.parametrize("name", ["plain", "norm_first", "any_activation"])
def test_dropout_in_training_mode_only(torch_backend, called, name):
    ours, _ = make(OPTIONS[name], dropout=0.25)
    x = source(ours)
    torch.testing.assert_close(ours.eval()(x), make(OPTIONS[name])[0](x))
    called.clear()
    ours.train()
    torch.manual_seed(0)
    first = ours(x)
    expected = {
        "plain": [0.25, 0.25, 0.0, 0.25],  # add_layer_norm, linear1, linear2, add_layer_norm
        "norm_first": [0.25, 0.25, 0.25],  # add_layer_norm, linear1, linear2 with the residual
        "any_activation": [0.25, 0.0, 0.0, 0.25],  # dropout after the activation is torch's
    }
    assert [c[2] for c in called] == expected[name]
    assert not torch.equal(ours(x), first)
    torch.manual_seed(0)
    assert torch.equal(ours(x), first)
    ours.self_attn.dropout = 0.0
    ours.dropout1.p = ours.dropout.p = ours.dropout2.p = 1.0
    if ours.norm_first:
        assert torch.equal(ours(x), x)
    else:
        torch.testing.assert_close(ours(x), ours.norm2(ours.norm1(x)))


# Parts that are hooked, exchanged or overridden are called


PARTS = ["self_attn", "linear1", "linear2", "norm1", "norm2", "dropout", "dropout1", "dropout2", "activation"]


@pytest.mark.parametrize("name", ["gelu_batch_first", "norm_first"])
@pytest.mark.parametrize("part", PARTS)
def test_hooked_parts_are_called(torch_backend, part, name):
    ours, theirs = make({**OPTIONS[name], "activation": nn.GELU()})
    x = source(ours)
    seen = []
    for layer in (ours, theirs):
        layer.get_submodule(part).register_forward_hook(lambda module, args, y: seen.append(part))
    check_error(ours(x), copy.deepcopy(theirs).double()(x.double()), theirs(x))
    assert len(seen) == 3
    if part != "self_attn":
        for layer in (ours, theirs):  # what a hook returns counts
            layer.get_submodule(part).register_forward_hook(lambda module, args, y: 2 * y)
        check_error(ours(x), copy.deepcopy(theirs).double()(x.double()), theirs(x))


@pytest.mark.parametrize("name", ["gelu_batch_first", "norm_first"])
def test_exchanged_parts_are_called(torch_backend, name):
    ours, theirs = make(OPTIONS[name])
    norms, linear = [nn.RMSNorm(MODEL), nn.BatchNorm1d(LENGTH)], nn.Sequential(nn.Linear(MODEL, MODEL), nn.Tanh())
    for layer in (ours, theirs):
        layer.norm1, layer.norm2 = norms
        layer.linear2 = nn.Sequential(layer.linear2, linear)
        layer.dropout1, layer.dropout2 = nn.Identity(), nn.Hardtanh()
    x = source(ours)
    check_error(ours(x), copy.deepcopy(theirs).double()(x.double()), theirs(x))


class Mixing(nn.Module):
    """Stands for attention of somebody else's: it knows no more of torch's than the call."""

    def forward(self, query, key, value, *, attn_mask, key_padding_mask, need_weights, is_causal):
        return query.mean(0, keepdim=True).expand_as(query), None


def test_attention_may_be_exchanged(torch_backend):
    ours, theirs = make({})
    ours.self_attn = theirs.self_attn = Mixing()
    check_against(ours, theirs, randn(LENGTH, BATCH, MODEL), {})


def test_parametrized_parts_are_called(torch_backend):
    ours, theirs = make(OPTIONS["plain"])
    for layer in (ours, theirs):
        nn.utils.parametrizations.weight_norm(layer.linear1)
    x = source(ours)
    check_error(ours(x), copy.deepcopy(theirs).double()(x.double()), theirs(x))


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_subclass_may_override_the_blocks(torch_backend, norm_first):
    class Ours(fusedops.nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return -super()._ff_block(x)

    class Theirs(nn.TransformerEncoderLayer):
        def _ff_block(self, x):
            return -super()._ff_block(x)

    ours, theirs = (kind(MODEL, HEADS, FEEDFORWARD, 0.0, norm_first=norm_first) for kind in (Ours, Theirs))
    ours.load_state_dict(theirs.state_dict())
    check_against(ours, theirs, source(ours), {})


def test_patching_leaves_the_layer_fused(torch_backend, called):
    ours, _ = make({"activation": nn.GELU()})
    x = source(ours)
    y = ours(x)
    before = called.copy()
    called.clear()
    fusedops.patch(ours)
    assert torch.equal(ours(x), y)
    assert called == before


# In torch's encoder


@pytest.fixture
def no_fast_path(monkeypatch):
    """torch's fast path would not go unseen."""

    def taken(*args, **named):
        raise AssertionError("torch's fast path was taken")

    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", taken)
    monkeypatch.setattr(torch, "_native_multi_head_attention", taken)


def encoders(options, **more):
    """torch's encoder of our layers, and of its own."""
    made = []
    for layer in make(options, **more):
        encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(MODEL), enable_nested_tensor=True)
        made.append(encoder)
    return made


def torchs_result(encoder, x, options):
    """In float64 and float32, by torch's ordinary path."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        right = copy.deepcopy(encoder).double()(
            x.double(),
            **{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()},
        )
        return right, encoder(x, **options)
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("mode", ["train", "eval", "inference"])
@pytest.mark.parametrize("mask", ["none", "padding", "bool", "causal", "causal_and_padding"])
@pytest.mark.parametrize("name", ["plain", "gelu_batch_first", "norm_first"])
def test_in_torchs_encoder(torch_backend, no_fast_path, name, mask, mode):
    ours, theirs = (encoder.train(mode == "train") for encoder in encoders(OPTIONS[name]))
    assert all(type(layer) is fusedops.nn.TransformerEncoderLayer for layer in ours.layers)
    options = MASKS[mask]()
    options["mask"] = options.pop("src_mask", None)
    x = source(ours.layers[0])
    with torch.inference_mode(mode == "inference"):
        y = ours(x, **options)
        right, plain = torchs_result(theirs, x, options)
    if "src_key_padding_mask" in options:  # nothing is said of padding's own rows
        used = (~padding()) if ours.layers[0].self_attn.batch_first else (~padding()).t()
        y, right, plain = y[used], right[used], plain[used]
    check_error(y, right, plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torchs_encoder_packs_a_padded_batch(torch_backend, no_fast_path):
    """It gives our layers a nested tensor; no row of padding is computed."""
    encoder = encoders(OPTIONS["gelu_batch_first"])[0].eval()
    encoder.norm = None
    rows = []
    for layer in encoder.layers:
        layer.linear1.register_forward_hook(lambda module, args, y: rows.append(tuple(args[0].shape)))
    x = source(encoder.layers[0])
    with torch.no_grad():
        y = encoder(x, src_key_padding_mask=padding())
    assert rows == [(11, MODEL), (11, MODEL)]
    assert not y.is_nested
    assert not y[padding()].any()
    hidden = encoder.layers[1](encoder.layers[0](x[1:2, :2]))
    torch.testing.assert_close(y[1:2, :2], hidden)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=_id)
@pytest.mark.parametrize("name", ["gelu_batch_first", "norm_first", "plain"])
def test_nested_tensors_are_sequences_by_themselves(torch_backend, name, layout):
    ours, _ = make(OPTIONS[name])
    sequences = [randn(n, MODEL, requires_grad=True) for n in (3, 1, 4)]
    with warnings.catch_warnings():  # torch calls nested tensors a prototype
        warnings.simplefilter("ignore")
        x = torch.nested.as_nested_tensor(sequences, layout=layout)
    output = ours(x)
    assert output.layout is layout
    right = [ours(s) for s in sequences]
    for a, b in zip(output.unbind(), right, strict=True):
        torch.testing.assert_close(a, b)
    wanted = [*sequences, *ours.parameters()]
    found = torch.autograd.grad(sum((a * a).sum() for a in output.unbind()), wanted)
    for a, b in zip(found, torch.autograd.grad(sum((b * b).sum() for b in right), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


# torch's other ways to run a module


def test_compiled_equals_eager(torch_backend):
    ours, _ = make(OPTIONS["norm_first"], activation="gelu")
    x = source(ours)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    results = run(ours, x, MASKS["padding"]()), run(compiled, x, MASKS["padding"]())
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpointed_with_dropout(torch_backend):
    ours, _ = make(OPTIONS["norm_first"], dropout=0.5)
    x = source(ours).requires_grad_()
    results = []
    for layer in (ours, lambda x: torch.utils.checkpoint.checkpoint(ours, x, use_reentrant=False)):
        torch.manual_seed(0)
        results.append(torch.autograd.grad(layer(x).square().sum(), [x, *ours.parameters()]))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


# Errors


WRONG = {
    "d_model": (ValueError, r"d_model must be a multiple of nhead \(5\); got 12", (12, 5), {}),
    "dim_feedforward": (TypeError, "dim_feedforward must be an int; got 2.5", (12, 3, 2.5), {}),
    "dropout": (ValueError, "dropout must be a probability from 0 to 1", (12, 3, 8, 2.0), {}),
    "activation": (ValueError, "activation must be None or one of .*; got 'swish'", (12, 3), {"activation": "swish"}),
    "no activation": (TypeError, "activation must be the name of one, or a function", (12, 3), {"activation": None}),
    "layer_norm_eps": (TypeError, "layer_norm_eps must be a number", (12, 3), {"layer_norm_eps": "small"}),
    "norm_first": (TypeError, "norm_first must be a bool", (12, 3), {"norm_first": 1}),
    "bias": (TypeError, "bias must be a bool", (12, 3), {"bias": "relu"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_construction_is_named(case):
    error, message, args, options = WRONG[case]
    with pytest.raises(error, match=f"^TransformerEncoderLayer: {message}"):
        fusedops.nn.TransformerEncoderLayer(*args, **options)


WRONG_CALLS = {
    "integers": (TypeError, "src must be a floating-point tensor", (torch.ones(5, 2, MODEL).long(),), {}),
    "size": (ValueError, r"src must be of shape \(length, batch, 12\)", (torch.ones(5, 2, 8),), {}),
    "mask": (ValueError, "src_mask must be of shape", (torch.ones(5, 2, MODEL), torch.ones(4, 4)), {}),
    "bytes": (TypeError, "src_mask must be a bool or", (torch.ones(5, 2, MODEL), torch.ones(5, 5).byte()), {}),
    "padding": (ValueError, "src_key_padding_mask must be of", (torch.ones(5, 2, MODEL), None, torch.ones(5, 2)), {}),
    "hint": (ValueError, "src_mask must be the causal mask", (torch.ones(5, 2, MODEL),), {"is_causal": True}),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_wrong_arguments_are_named(torch_backend, case):
    error, message, args, options = WRONG_CALLS[case]
    with pytest.raises(error, match=f"^TransformerEncoderLayer: {message}"):
        fusedops.nn.TransformerEncoderLayer(MODEL, HEADS)(*args, **options)
