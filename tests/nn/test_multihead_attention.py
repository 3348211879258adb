"""fusedops.nn.MultiheadAttention is torch.nn's: parameters, masks, results, gradients; except where that gives NaN."""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import fusedops
import fusedops.nn.attention
from tests.harness.errors import check_error
from tests.harness.tensors import randn

EMBED, HEADS, BATCH, QUERIES, KEYS = 12, 3, 2, 5, 7

OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True, "batch_first": True},
    "bias_kv_and_zero_attn": {"add_bias_kv": True, "add_zero_attn": True},
    "kdim_vdim": {"kdim": 6, "vdim": 10, "batch_first": True},
    "kdim_vdim_no_bias": {"kdim": 6, "vdim": 10, "bias": False, "add_bias_kv": True},
}


def hidden(*shape):
    """A bool mask, True where a key is not seen; the third key always is."""
    mask = torch.rand(shape) < 0.3
    mask[..., 2] = False
    return mask


def masks(name, batch=BATCH, queries=QUERIES, keys=KEYS):
    """Arguments of forward. Floating masks may require a gradient."""
    square, heads, padding = (queries, keys), (batch * HEADS, queries, keys), (batch, keys)
    return {
        "none": dict,
        "padding": lambda: {"key_padding_mask": hidden(*padding)},
        "float_padding": lambda: {"key_padding_mask": randn(*padding, requires_grad=True)},
        "bool": lambda: {"attn_mask": hidden(*square)},
        "bool_by_head": lambda: {"attn_mask": hidden(*heads)},
        "float": lambda: {"attn_mask": randn(*square, requires_grad=True)},
        "float_by_head": lambda: {"attn_mask": randn(*heads, requires_grad=True)},
        "bool_and_padding": lambda: {"attn_mask": hidden(*square), "key_padding_mask": hidden(*padding)},
        "by_head_and_padding": lambda: {"attn_mask": hidden(*heads), "key_padding_mask": hidden(*padding)},
        "float_and_padding": lambda: {
            "attn_mask": randn(*square, requires_grad=True),
            "key_padding_mask": hidden(*padding),
        },
        "float_and_float_padding": lambda: {
            "attn_mask": randn(*heads, requires_grad=True),
            "key_padding_mask": randn(*padding, requires_grad=True),
        },
        "causal": lambda: {"attn_mask": causal(queries, keys), "is_causal": True},
        "causal_and_padding": lambda: {
            "attn_mask": causal(queries, keys),
            "is_causal": True,
            "key_padding_mask": hidden(*padding) & (torch.arange(keys) > 0),
        },
    }[name]()


MASKS = [
    *("none", "padding", "float_padding", "bool", "bool_by_head", "float", "float_by_head", "bool_and_padding"),
    *("by_head_and_padding", "float_and_padding", "float_and_float_padding", "causal", "causal_and_padding"),
]

FEW = ["none", "bool_and_padding", "float_by_head", "causal"]


def causal(queries, keys):
    return torch.ones(queries, keys, dtype=torch.bool).triu(1)


def make(options, device="cpu", **more):
    """(ours, torch's) from the same seed, then with random biases too."""
    made = []
    for kind in (fusedops.nn.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(0)
        made.append(kind(EMBED, HEADS, **{**options, **more}, device=device))
    ours, theirs = made
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "bias" in name:
                parameter.normal_()
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(module, device="cpu", dtype=torch.float32):
    """Query, key and value of random layouts."""
    lengths, sizes = (QUERIES, KEYS, KEYS), (EMBED, module.kdim, module.vdim)
    shapes = [(BATCH, n, s) if module.batch_first else (n, BATCH, s) for n, s in zip(lengths, sizes, strict=True)]
    layouts = ("transposed", "contiguous", "sliced")
    return [randn(*s, layout=y, device=device, dtype=dtype) for s, y in zip(shapes, layouts, strict=True)]


def run(module, tensors, options, dtype=None):
    """Output, weights or None, and gradients of inputs, floating masks and parameters."""
    to = {"dtype": dtype} if dtype else {}
    tensors = [t.detach().to(**to).requires_grad_() for t in tensors]
    leaves = {
        k: v.detach().to(**to).requires_grad_() if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in options.items()
    }
    with warnings.catch_warnings():  # torch is about to give up a bool and a floating mask together
        warnings.simplefilter("ignore")
        output, weights = module(*tensors, **leaves)
    torch.manual_seed(1)
    results = [output] if weights is None else [output, weights]
    grads = [torch.randn(y.shape).to(y) for y in results]
    floating = [v for v in leaves.values() if isinstance(v, torch.Tensor) and v.requires_grad]
    wanted = [*tensors, *floating, *module.parameters()]
    # torch does not read the causal mask, nor differentiate it
    found = torch.autograd.grad(results, wanted, grads, allow_unused=True)
    return output, weights, [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]


def check_against(ours, theirs, tensors, options):
    output, weights, grads = run(ours, tensors, options)
    plain, plain_weights, plain_grads = run(theirs, tensors, options)
    exact, exact_weights, exact_grads = run(copy.deepcopy(theirs).double(), tensors, options, torch.float64)
    check_error(output, exact, plain, what="output")
    assert (weights is None) == (plain_weights is None)
    if weights is not None:
        check_error(weights, exact_weights, plain_weights, what="weights")
    for place, (grad, right, torchs) in enumerate(zip(grads, exact_grads, plain_grads, strict=True)):
        check_error(grad, right, torchs, gradient=True, what=f"gradient {place}")


@pytest.fixture
def torch_backend():
    """The tests of what the module makes of its arguments need no kernels."""
    with fusedops.backend("torch"):
        yield


# Parameters


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_begins_as_torchs_from_the_same_seed(name, dtype):
    made = []
    for kind in (fusedops.nn.MultiheadAttention, nn.MultiheadAttention):
        torch.manual_seed(0)
        made.append(kind(EMBED, HEADS, dtype=dtype, **OPTIONS[name]))
    ours, theirs = made
    assert isinstance(ours, nn.MultiheadAttention)
    assert [*ours.state_dict()] == [*theirs.state_dict()]
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert repr(ours) == repr(theirs)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["plain", "kdim_vdim"])
def test_copies_and_pickles(torch_backend, name):
    ours, _ = make(OPTIONS[name], dropout=0.5)
    ours.eval()
    tensors = inputs(ours)
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), torch.load(stream, weights_only=False)):
        assert type(twin) is fusedops.nn.MultiheadAttention
        assert torch.equal(twin(*tensors, need_weights=False)[0], ours(*tensors, need_weights=False)[0])


def test_on_the_meta_device_first(torch_backend):
    module = fusedops.nn.MultiheadAttention(EMBED, HEADS, device="meta")
    x = torch.empty(QUERIES, BATCH, EMBED, device="meta")
    assert module(x, x, x, need_weights=False)[0].shape == x.shape
    module.to_empty(device="cpu")._reset_parameters()
    assert all(p.isfinite().all() for n, p in module.named_parameters() if n != "out_proj.weight")


# Results


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, mask) for name in OPTIONS for mask in (MASKS if name in ("batch_first", "bias_kv_and_zero_attn") else FEW)],
)
def test_equals_torchs_module(torch_backend, name, mask, need_weights):
    ours, theirs = make(OPTIONS[name])
    options = masks(mask)
    if "is_causal" in options and (need_weights or name not in ("plain", "batch_first", "no_bias", "kdim_vdim")):
        # torch asserts that there is a mask and then reads it, but for added keys, which its hint hides.
        del options["is_causal"]
    check_against(ours, theirs, inputs(ours), {**options, "need_weights": need_weights})


@pytest.mark.parametrize("mask", ["none", "float_and_padding"])
def test_weights_of_each_head(torch_backend, mask):
    ours, theirs = make(OPTIONS["bias_kv"])
    options = {**masks(mask), "average_attn_weights": False}
    check_against(ours, theirs, inputs(ours), options)
    assert ours(*inputs(ours), **options)[1].shape == (BATCH, HEADS, QUERIES, KEYS + 1)


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("mask", ["none", "padding", "bool", "float_by_head", "bool_and_padding"])
@pytest.mark.parametrize("name", ["plain", "batch_first", "kdim_vdim_no_bias"])
def test_without_a_batch(torch_backend, name, mask, need_weights):
    ours, theirs = make(OPTIONS[name])
    tensors = [x.select(0 if ours.batch_first else 1, 0) for x in inputs(ours)]
    options = masks(mask, batch=1)
    if "key_padding_mask" in options:
        options["key_padding_mask"] = options["key_padding_mask"][0]
    check_against(ours, theirs, tensors, {**options, "need_weights": need_weights})


@pytest.mark.parametrize("shared", ["qkv", "kv", "qk", "qv", ""])
@pytest.mark.parametrize("name", ["plain", "batch_first", "no_bias"])
def test_inputs_that_are_one_object(torch_backend, monkeypatch, name, shared):
    """One product projects each different input."""
    ours, theirs = make(OPTIONS[name])
    x = randn(BATCH, 6, EMBED)
    tensors = {c: x if c in shared else randn(BATCH, 6, EMBED) for c in "qkv"}

    def call(module, dtype):
        torch.manual_seed(1)
        leaves = {id(t): t.to(dtype).requires_grad_() for t in tensors.values()}
        output, _ = module(*(leaves[id(t)] for t in tensors.values()), need_weights=False)
        grad = torch.randn(output.shape).to(output)
        return output, *torch.autograd.grad(output, [*leaves.values(), *module.parameters()], grad)

    products = []
    plain = fusedops.linear
    monkeypatch.setattr(fusedops.nn.attention, "linear", lambda x, *args: products.append(x) or plain(x, *args))
    results = (
        call(ours, torch.float32),
        call(copy.deepcopy(theirs).double(), torch.float64),
        call(theirs, torch.float32),
    )
    for y, right, torchs in zip(*results, strict=True):
        check_error(y, right, torchs, gradient=True)
    assert len(products) == 1 + {"qkv": 1, "kv": 2, "qk": 2, "qv": 3, "": 3}[shared]


@pytest.mark.parametrize(
    ("name", "mask", "need_weights"),
    [("batch_first", "padding", False), ("kdim_vdim", "float_and_padding", False), ("bias_kv", "bool", True)],
)
def test_the_kernels_equal_torchs_module(kernel_runner, name, mask, need_weights):
    device = kernel_runner.device
    ours, theirs = make(OPTIONS[name], device)
    tensors = inputs(ours, device)
    options = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in masks(mask).items()}
    check_against(ours, theirs, tensors, {**options, "need_weights": need_weights})
    nodes, seen = [ours(*tensors, **options, need_weights=need_weights)[0].grad_fn], set()
    while nodes:
        node = nodes.pop()
        seen.add(type(node).__name__)
        nodes.extend(n for n, _ in node.next_functions if n is not None)
    assert "LinearBackward" in seen
    assert ("AttentionBackward" in seen) == (not need_weights)


def test_bfloat16(runner):
    ours, theirs = (module.bfloat16() for module in make(OPTIONS["batch_first"], runner.device))
    tensors = inputs(ours, runner.device, torch.bfloat16)
    padding = hidden(BATCH, KEYS).to(runner.device)
    check_against(ours, theirs, tensors, {"key_padding_mask": padding, "need_weights": False})


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("name", ["plain", "bias_kv_and_zero_attn"])
def test_under_autocast(torch_backend, name, need_weights):
    ours, theirs = make(OPTIONS[name])
    tensors = inputs(ours)
    options = {**masks("float"), "need_weights": need_weights}
    exact = copy.deepcopy(theirs).double()
    with torch.autocast("cpu", torch.bfloat16):
        output, weights, grads = run(ours, tensors, options)
        plain, plain_weights, plain_grads = run(theirs, tensors, options)
    right, right_weights, right_grads = run(exact, tensors, options, torch.float64)
    check_error(output, right, plain, what="output")
    if need_weights:
        check_error(weights, right_weights, plain_weights, what="weights")
    for grad, torchs, exactly in zip(grads, plain_grads, right_grads, strict=True):
        check_error(grad, exactly, torchs, gradient=True, what="gradient")


# Masks


def attentions_arguments(monkeypatch):
    """What the module gives to fusedops.attention, filled by each call."""
    seen = {}
    plain = fusedops.attention
    monkeypatch.setattr(
        fusedops.nn.attention, "attention", lambda *args, **named: seen.update(named) or plain(*args, **named)
    )
    return seen


SHAPES = {
    "none": None,
    "padding": (BATCH, 1, 1, KEYS),
    "float_padding": (BATCH, 1, 1, KEYS),
    "bool": (QUERIES, KEYS),
    "float": (QUERIES, KEYS),
    "bool_by_head": (BATCH, HEADS, QUERIES, KEYS),
    "bool_and_padding": (BATCH, 1, QUERIES, KEYS),
    "float_and_padding": (BATCH, 1, QUERIES, KEYS),
    "causal": None,
}


@pytest.mark.parametrize("mask", SHAPES)
def test_masks_grow_no_dimension(torch_backend, monkeypatch, mask):
    ours, _ = make(OPTIONS["plain"])
    seen = attentions_arguments(monkeypatch)
    options = masks(mask)
    ours(*inputs(ours), **options, need_weights=False)
    given = seen["attn_mask"]
    assert (None if given is None else tuple(given.shape)) == SHAPES[mask]
    if mask == "float":
        assert given is options["attn_mask"]


def test_the_causal_hint_spares_the_mask(torch_backend, monkeypatch):
    ours, _ = make(OPTIONS["batch_first"])
    tensors = inputs(ours)
    right, _ = ours(*tensors, attn_mask=causal(QUERIES, KEYS), need_weights=False)
    seen = attentions_arguments(monkeypatch)
    unread = torch.full((QUERIES, KEYS), float("nan"))
    hinted, _ = ours(*tensors, attn_mask=unread, is_causal=True, need_weights=False)
    torch.testing.assert_close(hinted, right)
    assert seen["causal"] == "top_left"
    # With padding or weights the mask is read, as torch does.
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    for options in ({"key_padding_mask": padding, "need_weights": False}, {"need_weights": True}):
        assert ours(*tensors, attn_mask=unread, is_causal=True, **options)[0].isnan().any()
        read, _ = ours(*tensors, attn_mask=causal(QUERIES, KEYS), is_causal=True, **options)
        torch.testing.assert_close(read, right)


@pytest.mark.parametrize("name", ["bias_kv", "zero_attn", "bias_kv_and_zero_attn"])
def test_the_causal_hint_does_not_hide_added_keys(torch_backend, name):
    """torch's module hides them from all queries but the last ones, with the hint and without weights only."""
    ours, theirs = make(OPTIONS[name])
    tensors, mask = inputs(ours), causal(QUERIES, KEYS)
    hinted, _ = ours(*tensors, attn_mask=mask, is_causal=True, need_weights=False)
    torch.testing.assert_close(hinted, theirs(*tensors, attn_mask=mask)[0])


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("floating", [False, True], ids=["bool", "float"])
def test_a_query_that_sees_no_key_gets_zeros(runner, floating, need_weights):
    ours, _ = make(OPTIONS["batch_first"], runner.device)
    x = randn(BATCH, QUERIES, EMBED, device=runner.device, requires_grad=True)
    mask = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    mask[1] = True
    padding = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    padding[1] = True
    if floating:
        mask, padding = (torch.zeros(m.shape).masked_fill(m, float("-inf")) for m in (mask, padding))
    mask, padding = mask.to(x.device), padding.to(x.device)
    blind = torch.tensor([[i == 1 for i in range(QUERIES)], [True] * QUERIES], device=x.device)
    output, weights = ours(x, x, x, key_padding_mask=padding, attn_mask=mask, need_weights=need_weights)
    assert output.isfinite().all()
    torch.testing.assert_close(output[blind], ours.out_proj.bias.expand(QUERIES + 1, -1))
    if need_weights:
        assert not weights[blind].any()
        torch.testing.assert_close(weights[~blind].sum(-1), torch.ones(QUERIES - 1, device=x.device))
    grads = torch.autograd.grad(output.sum(), [x, *ours.parameters()])
    assert all(g.isfinite().all() for g in grads)
    assert not grads[0][1].any()


def test_numbers_as_low_as_half_precision_allows_hide_keys(torch_backend):
    """In float16 a mask of float32's lowest number is -inf: rows of it are blind, not NaN."""
    ours, _ = make(OPTIONS["batch_first"])
    ours.half()
    x = randn(BATCH, QUERIES, EMBED, dtype=torch.float16)
    mask = torch.full((QUERIES, QUERIES), torch.finfo(torch.float32).min).triu(0)
    output, weights = ours(x, x, x, attn_mask=mask)
    assert output.isfinite().all()
    assert not weights[:, 0].any()


# Dropout


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_dropout_in_training_mode_only(runner, need_weights):
    ours, plain = (make(OPTIONS["batch_first"], runner.device, dropout=p)[0] for p in (0.5, 0.0))
    x = randn(BATCH, QUERIES, EMBED, device=runner.device)

    def output(module):
        return module(x, x, x, need_weights=need_weights)[0]

    assert torch.equal(output(ours.eval()), output(plain))
    ours.train()
    torch.manual_seed(0)
    first = output(ours)
    assert not torch.equal(output(ours), first)
    torch.manual_seed(0)
    assert torch.equal(output(ours), first)
    ours.dropout = 1.0
    torch.testing.assert_close(output(ours), ours.out_proj.bias.expand(BATCH, QUERIES, -1))


def test_weights_are_those_after_dropout(torch_backend):
    ours, _ = make(OPTIONS["batch_first"], dropout=0.25)
    x = randn(8, 20, EMBED)
    dropped = ours(x, x, x, average_attn_weights=False)[1]
    kept = ours.eval()(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(dropped, torch.where(dropped == 0, 0.0, kept / 0.75))
    # 9,600 draws: their mean is within 4.5 standard deviations of a quarter.
    assert abs((dropped == 0).double().mean() - 0.25) < 4.5 * (0.25 * 0.75 / 9600) ** 0.5


def test_the_mean_over_dropout_is_the_output_without(torch_backend):
    """The fused way drops weights, and scales those that it keeps."""
    ours, _ = make(OPTIONS["batch_first"], dropout=0.25)
    x = randn(1, QUERIES, EMBED).expand(2000, -1, -1)
    sample = ours(x, x, x, need_weights=False)[0]
    right = ours.eval()(x[:1], x[:1], x[:1], need_weights=False)[0]
    deviation = sample.std(0) / 2000**0.5
    assert ((sample.mean(0) - right[0]).abs() < 4.5 * deviation).all()


# Sizes, nested tensors


@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("sizes", [(0, 5, 7), (2, 0, 7), (2, 5, 0)], ids=["batch", "queries", "keys"])
@pytest.mark.parametrize("name", ["plain", "bias_kv_and_zero_attn"])
def test_empty_inputs(torch_backend, name, sizes, need_weights):
    ours, _ = make(OPTIONS[name])
    batch, queries, keys = sizes
    query = torch.randn(queries, batch, EMBED, requires_grad=True)
    key = torch.randn(keys, batch, EMBED, requires_grad=True)
    for options in ({}, masks("bool_and_padding", batch, queries, keys) if keys else {}):
        output, weights = ours(query, key, key, **options, need_weights=need_weights)
        assert output.shape == query.shape
        if need_weights:
            assert weights.shape == (batch, queries, keys + ours.add_zero_attn + (ours.bias_k is not None))
        if not keys and name == "plain":
            torch.testing.assert_close(output, ours.out_proj.bias.expand_as(output))
        grads = torch.autograd.grad(output.sum(), [query, key, *ours.parameters()])
        assert all(g.isfinite().all() for g in grads)


LENGTHS = (3, 1, 5)


def nested(sequences, layout):
    with warnings.catch_warnings():  # torch calls nested tensors a prototype
        warnings.simplefilter("ignore")
        return torch.nested.as_nested_tensor([*sequences], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("name", ["plain", "batch_first", "bias_kv_and_zero_attn", "kdim_vdim"])
@pytest.mark.parametrize("need_weights", [False, True], ids=["output", "weights"])
def test_nested_tensors_are_sequences_by_themselves(torch_backend, name, layout, need_weights):
    ours, _ = make(OPTIONS[name])
    keys = [randn(n, ours.kdim, requires_grad=True) for n in LENGTHS]
    values = keys if name != "kdim_vdim" else [randn(n, ours.vdim, requires_grad=True) for n in LENGTHS]
    queries = keys if name == "plain" else [randn(n, EMBED, requires_grad=True) for n in (2, 4, 1)]
    leaves = [*keys, *(values if values is not keys else ()), *(queries if queries is not keys else ())]
    key = nested(keys, layout)
    value = key if values is keys else nested(values, layout)
    query = key if queries is keys else nested(queries, layout)
    output, weights = ours(query, key, value, need_weights=need_weights)
    assert output.is_nested
    assert output.layout is layout
    right = [ours(q, k, v, need_weights=need_weights) for q, k, v in zip(queries, keys, values, strict=True)]
    for place, (a, (b, w)) in enumerate(zip(output.unbind(), right, strict=True)):
        torch.testing.assert_close(a, b)
        if need_weights:
            inside = weights[place, : b.shape[0], : keys[place].shape[0]]
            torch.testing.assert_close(inside, w[:, : keys[place].shape[0]])
            assert not weights[place, b.shape[0] :].any()
    wanted = [*leaves, *ours.parameters()]
    found = torch.autograd.grad(sum((a * a).sum() for a in output.unbind()), wanted)
    for a, b in zip(found, torch.autograd.grad(sum((b * b).sum() for b, _ in right), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_kernels_take_nested_tensors(kernel_runner):
    ours, theirs = make(OPTIONS["batch_first"], kernel_runner.device)
    sequences = [randn(n, EMBED, device=kernel_runner.device) for n in LENGTHS]
    x = nested(sequences, torch.jagged)
    output, _ = ours(x, x, x, need_weights=False)
    for y, s in zip(output.unbind(), sequences, strict=True):
        exact = copy.deepcopy(theirs).double()(*[s.double()] * 3)[0]
        check_error(y, exact, theirs(s, s, s)[0])


def test_nested_tensors_with_dropout(torch_backend):
    ours, _ = make(OPTIONS["batch_first"], dropout=0.5)
    x = nested([randn(n, EMBED) for n in LENGTHS], torch.strided)
    outputs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outputs.append(torch.cat(ours(x, x, x, need_weights=False)[0].unbind()))
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


# torch's other ways to run a module


@pytest.mark.parametrize(
    ("name", "mask", "need_weights"),
    [("batch_first", "causal", False), ("bias_kv_and_zero_attn", "bool_and_padding", True)],
)
def test_compiled_equals_eager(torch_backend, name, mask, need_weights):
    ours, _ = make(OPTIONS[name])
    query, key, _ = inputs(ours)
    options = masks(mask)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    results = [call(query, key, key, **options, need_weights=need_weights) for call in (ours, compiled)]
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)
    (eager, _), (traced, _) = results
    wanted = [*ours.parameters()]
    for a, b in zip(*(torch.autograd.grad(y.sum(), wanted) for y in (eager, traced)), strict=True):
        torch.testing.assert_close(a, b)


def test_compiled_with_dropout(torch_backend):
    ours, _ = make(OPTIONS["batch_first"], dropout=0.5)
    x = randn(BATCH, QUERIES, EMBED)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    outputs = [compiled(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert not torch.equal(*outputs)


# Errors

X, PADDING = torch.ones(QUERIES, BATCH, EMBED), torch.zeros(BATCH, QUERIES, dtype=torch.bool)

WRONG = {
    "query of one dimension": (ValueError, r"query must be of shape \(length, 12\) or \(length, ba", (X[0, 0], X, X)),
    "query of another size": (ValueError, r"query must be of shape \(length, batch, 12\); got", (X[..., :8], X, X)),
    "key without a batch": (ValueError, r"key must be of shape \(length, batch, 12\)", (X, X[:, 0], X)),
    "another batch": (ValueError, r"key must be of a batch of 2, as query is", (X, X[:, :1], X[:, :1])),
    "fewer values": (ValueError, r"value must be of shape \(5, 2, 12\), as key has keys", (X, X, X[:3])),
    "integers": (TypeError, r"query must be a floating-point tensor", (X.long(), X, X)),
    "no tensor": (TypeError, r"query must be a torch.Tensor; got None", (None, X, X)),
    "another dtype": (TypeError, r"value must be of the dtype of query \(torch.float32\)", (X, X, X.double())),
}  # fmt: skip
WRONG_MASKS = {
    "padding of another shape": (ValueError, r"key_padding_mask must be of shape \(2, 5\)", {"key_padding_mask": X[0]}),
    "padding of bytes": (TypeError, "key_padding_mask must be a bool or", {"key_padding_mask": PADDING.byte()}),
    "mask of another shape": (ValueError, r"attn_mask must be of shape \(5, 5\) or", {"attn_mask": X[0]}),
    "mask of another batch": (ValueError, r"attn_mask must be of .*\(6, 5, 5\)", {"attn_mask": torch.ones(2, 5, 5)}),
    "mask of integers": (TypeError, "attn_mask must be a bool or floating", {"attn_mask": torch.ones(5, 5).int()}),
    "list": (TypeError, "attn_mask must be a bool or floating", {"attn_mask": [[0.0]]}),
    "hint alone": (ValueError, "attn_mask must be the causal mask where is_causal", {"is_causal": True}),
    "hint alone, output only": (ValueError, "attn_mask must be the causal", {"is_causal": True, "need_weights": False}),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_wrong_masks_are_named(torch_backend, case):
    error, message, options = WRONG_MASKS[case]
    with pytest.raises(error, match=f"^MultiheadAttention: {message}"):
        fusedops.nn.MultiheadAttention(EMBED, HEADS)(X, X, X, **options)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_named(torch_backend, case):
    error, message, args = WRONG[case]
    with pytest.raises(error, match=f"^MultiheadAttention: {message}"):
        fusedops.nn.MultiheadAttention(EMBED, HEADS)(*args)


NESTED = nested([X[:3, 0], X[:2, 0]], torch.jagged)
NARROW, SINGLE = nested([X[0, :, :8]] * 2, torch.strided), nested([X[0]], torch.jagged)
FOUR = nested([X[None]], torch.strided)

WRONG_NESTED = {
    "mixed": (TypeError, "key must be nested, as the other inputs are", (NESTED, X, X), {}),
    "padding": (ValueError, "key_padding_mask must be None with nested", (NESTED,) * 3, {"key_padding_mask": PADDING}),
    "mask": (ValueError, "attn_mask must be None with nested", (NESTED,) * 3, {"attn_mask": torch.ones(5, 5)}),
    "hint": (ValueError, "is_causal must be False with nested", (NESTED,) * 3, {"is_causal": True}),
    "another size": (ValueError, "query must be of 12 features", (NARROW, NESTED, NESTED), {}),
    "another batch": (ValueError, "key must be of 12 features and query's batch", (SINGLE, NESTED, NESTED), {}),
    "four dimensions": (ValueError, "query must be a tensor, or a nested tensor of shape", (FOUR, FOUR, FOUR), {}),
}


@pytest.mark.parametrize("case", WRONG_NESTED)
def test_wrong_nested_tensors_are_named(torch_backend, case):
    error, message, args, options = WRONG_NESTED[case]
    with pytest.raises(error, match=f"^MultiheadAttention: {message}"):
        fusedops.nn.MultiheadAttention(EMBED, HEADS)(*args, **options)


WRONG_CONSTRUCTION = {
    "heads": (ValueError, r"embed_dim must be a multiple of num_heads \(5\); got 12", (12, 5), {}),
    "no heads": (ValueError, "num_heads must be 1 or more; got 0", (12, 0), {}),
    "fraction": (TypeError, "embed_dim must be an int; got 12.0", (12.0, 3), {}),
    "dropout": (ValueError, "dropout must be a probability from 0 to 1; got 1.5", (12, 3, 1.5), {}),
    "bias": (TypeError, "bias must be a bool", (12, 3), {"bias": "gelu"}),
    "kdim": (ValueError, "kdim must be 1 or more; got 0", (12, 3), {"kdim": 0}),
    "batch_first": (TypeError, "batch_first must be a bool", (12, 3), {"batch_first": "yes"}),
}


@pytest.mark.parametrize("case", WRONG_CONSTRUCTION)
def test_wrong_construction_is_named(case):
    error, message, args, options = WRONG_CONSTRUCTION[case]
    with pytest.raises(error, match=f"^MultiheadAttention: {message}"):
        fusedops.nn.MultiheadAttention(*args, **options)
