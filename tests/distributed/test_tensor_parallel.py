"""Parallelized modules: as one process by the error rule, with the collectives that are meant and no others."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fusedops
from fusedops import nn
from fusedops.distributed import SequenceParallelNorm, TensorParallel, tensor_parallel_plan
from tests.distributed.meshes import counts, mesh_of, whole
from tests.harness.errors import check_error
from tests.harness.tensors import randn

MODULES = {
    "MLP": lambda: nn.MLP(16, 32),
    "MLP without bias": lambda: nn.MLP(16, 32, 8, bias=False, activation="silu"),
    "GatedMLP": lambda: nn.GatedMLP(16, 32),
    "GatedMLP, packed": lambda: nn.GatedMLP(16, 32, bias=True, packed=True),
    "LayerNormMLP": lambda: nn.LayerNormMLP(16, 32, normalization="RMSNorm", activation="gelu_tanh"),
    "attention": lambda: nn.MultiheadAttention(16, 4, batch_first=True),
    "attention, length first": lambda: nn.MultiheadAttention(16, 4),
    "attention, added keys": lambda: nn.MultiheadAttention(16, 4, add_bias_kv=True, add_zero_attn=True, bias=False),
    "encoder layer": lambda: nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True),
    "encoder layer, norm first": lambda: nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, norm_first=True
    ),
}


def call(part: Any, x: torch.Tensor) -> torch.Tensor:
    return part(x, x, x, need_weights=False)[0] if isinstance(part, nn.MultiheadAttention) else part(x)


def parallelized(part: Any, world: int, sequence: bool, dim: int) -> Any:
    plan = tensor_parallel_plan(part, sequence_parallel=sequence, sequence_dim=dim)
    return parallelize_module(copy.deepcopy(part), mesh_of(world), plan)


def gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    """All of it, where devices have parts or terms."""
    return whole(parameter.grad)


def run(rank, world, part, x, grad, sequence, dim, kernels):
    """[output, gradient of x, gradients of the parameters by name], and the collectives."""
    parallel = parallelized(part, world, sequence, dim)
    own = (lambda t: t.chunk(world, dim)[rank]) if sequence else (lambda t: t)
    leaf = own(x).clone().requires_grad_()
    with fusedops.backend("triton") if kernels else contextlib.nullcontext():
        with CommDebugMode() as forward:
            y = call(parallel, leaf)
        with CommDebugMode() as backward:
            y.backward(own(grad))
    grads = {name: order(parallel, name, gradient(p)) for name, p in parallel.named_parameters()}
    return y.detach(), leaf.grad, grads, counts(forward), counts(backward)


def order(parallel: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient in the order of a state_dict, written out once more."""
    if name.rpartition(".")[2] in ("in_proj_weight", "in_proj_bias"):
        return tensor.view(4, 3, 4, -1).transpose(0, 1).reshape(tensor.shape)
    if name.startswith("gate_up_proj."):
        return tensor.view(32, 2, -1).transpose(0, 1).reshape(tensor.shape)
    return tensor


def single(part, x, grad):
    leaf = x.clone().requires_grad_()
    with fusedops.backend("torch"):
        y = call(part, leaf)
        y.backward(grad)
    return y.detach(), leaf.grad, {name: p.grad for name, p in part.named_parameters()}


def sample(part, x_shape, dim):
    x = randn(*x_shape)
    grad = randn(*call(part, x).shape)
    exact = single(copy.deepcopy(part).double(), x.double(), grad.double())
    return x, grad, exact, single(copy.deepcopy(part), x, grad)


def check(ranks, name, sequence, kernels=False):
    part = MODULES[name]()
    dim = 0 if name in ("attention, length first", "attention, added keys") else 1
    shape = (8, 2, 16) if dim == 0 else (2, 8, 16)
    x, grad, exact, plain = sample(part, shape, dim)
    more = [sample(part, shape, dim)[2:] for _ in range(4)]
    results = ranks.run(run, part, x, grad, sequence, dim, kernels)
    steps = 2 if isinstance(part, nn.TransformerEncoderLayer) else 1
    for found in results:
        meant = {"all_reduce": steps}
        if sequence:
            meant = {"all_gather_into_tensor": steps, "reduce_scatter_tensor": steps}
        assert found[3:] == (meant, meant)
    for place in (0, 1):
        parts = [found[place] for found in results]
        if not sequence:
            assert all(torch.equal(p, parts[0]) for p in parts)
        actual = torch.cat(parts, dim) if sequence else parts[0]
        check_error(actual, exact[place], plain[place], gradient=place == 1, what=f"{name} {place}",
                    more=[(e[place], p[place]) for e, p in more])  # fmt: skip
    for parameter in exact[2]:
        actual = results[0][2][parameter]
        if isinstance(part, nn.TransformerEncoderLayer) and parameter.startswith("norm") and not sequence:
            assert all(torch.equal(actual, found[2][parameter]) for found in results)
        check_error(actual, exact[2][parameter], plain[2][parameter], gradient=True, what=parameter,
                    more=[(e[2][parameter], p[2][parameter]) for e, p in more])  # fmt: skip


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", MODULES)
def test_two_ranks(two_ranks, name, sequence):
    check(two_ranks, name, sequence)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
@pytest.mark.parametrize("name", MODULES)
def test_four_ranks(four_ranks, name, sequence):
    check(four_ranks, name, sequence)


@pytest.mark.interpreter
@pytest.mark.parametrize("name", ["MLP", "GatedMLP, packed", "attention"])
def test_the_kernels(two_ranks, name):
    check(two_ranks, name, False, kernels=True)


def operators(rank, world, part, x):
    """The fused operators that run, each on a device's own part."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fusedops" and type(args[0]) is torch.Tensor:
                seen.append((func._opname, tuple(args[1].shape)))
            elif any(issubclass(t, DTensor) for t in types):
                return NotImplemented  # let the DTensor take it apart
            return func(*args, **(kwargs or {}))

    parallel = parallelized(part, world, False, 1)
    with Watch(), torch.no_grad():
        call(parallel, x)
    return seen


def test_modules_stay_fused(two_ranks):
    x = randn(2, 8, 16)
    for name, wanted in {
        "MLP": [("linear", (16, 16)), ("linear", (16, 16))],
        "GatedMLP, packed": [("gated_linear", (16, 16)), ("linear", (16, 16))],
        "attention": [("linear", (24, 16)), ("attention", (2, 2, 8, 4)), ("linear", (16, 8))],
        "LayerNormMLP": [("norm_linear", None), ("linear", (16, 16))],
    }.items():
        for seen in two_ranks.run(operators, MODULES[name](), x):
            assert [op for op, _ in seen] == [op for op, _ in wanted]
            assert all(shape is None or of == shape for (_, of), (_, shape) in zip(seen, wanted, strict=True))


def checkpoints(rank, world, parts, folder):
    """state_dict, the whole one of torch.distributed.checkpoint, and its files: the usual names, order and shapes."""
    full = StateDictOptions(full_state_dict=True)
    for name, part in parts.items():
        expected = part.state_dict()
        parallel = parallelized(part, world, False, 1)
        state = parallel.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(whole(state[n]), t) for n, t in expected.items())
        # Into another, from plain tensors, from DTensors, and by set_model_state_dict.
        doubled = {n: 2 * t for n, t in expected.items()}
        parallel.load_state_dict(doubled if name != "encoder layer" else {n: 2 * t for n, t in state.items()})
        found = get_model_state_dict(parallel, options=full)
        assert all(torch.equal(whole(found[n]), t) for n, t in doubled.items())
        other = parallelized(part, world, False, 1)
        other.load_state_dict(parallel.state_dict())
        third = parallelized(part, world, False, 1)
        set_model_state_dict(third, dict(doubled), options=full)
        for a, b, c in zip(parallel.parameters(), other.parameters(), third.parameters(), strict=True):
            assert torch.equal(whole(a), whole(b))
            assert torch.equal(whole(a), whole(c))
        # To files, and back into a module that is not parallelized at all.
        path = f"{folder}/{name}"
        dcp.save({"model": parallel.state_dict()}, checkpoint_id=path)
        plain = copy.deepcopy(part)
        loaded = {"model": plain.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        assert all(torch.equal(loaded["model"][n], t) for n, t in doubled.items())
        fresh = parallelized(part, world, False, 1)
        loaded = {"model": fresh.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        fresh.load_state_dict(loaded["model"])
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(fresh.parameters(), third.parameters(), strict=True))
        with pytest.raises(RuntimeError, match="size mismatch"):
            fresh.load_state_dict({n: torch.zeros(t.shape[0] + 3, *t.shape[1:]) for n, t in expected.items()})
        assert all(torch.equal(whole(a), whole(b)) for a, b in zip(fresh.parameters(), third.parameters(), strict=True))


def test_checkpoints(two_ranks, tmp_path):
    parts = {n: MODULES[n]() for n in ("attention", "GatedMLP, packed", "encoder layer")}
    two_ranks.run(checkpoints, parts, str(tmp_path))


def torchs_styles(rank, world, part, norm, linear, x):
    """torch's own styles for our modules."""
    mesh = mesh_of(world)
    results = []
    for parallel in (False, True):
        mlp, normed, gelu = copy.deepcopy(part), copy.deepcopy(norm), copy.deepcopy(linear)
        leaf = x.clone().requires_grad_()
        if parallel:
            plan = {"fc1": ColwiseParallel(input_layouts=Shard(1)), "fc2": RowwiseParallel(output_layouts=Shard(1))}
            parallelize_module(mlp, mesh, plan)
            parallelize_module(normed, mesh, SequenceParallel())
            parallelize_module(gelu, mesh, ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(1)))
            leaf = x.chunk(world, 1)[rank].clone().requires_grad_()
        with CommDebugMode() as mode:
            y = normed(leaf)
            if parallel:
                assert y.placements == (Shard(1),)
                assert not counts(mode)
                y = y.to_local()
        z = gelu(mlp(y))
        z.square().sum().backward()
        if parallel:
            assert normed.weight.grad.placements == (Partial(),)
        grads = [gradient(p) for m in (mlp, normed, gelu) for p in m.parameters()]
        z, of_x = (
            (DTensor.from_local(t.detach(), mesh, [Shard(1)]).full_tensor() if parallel else t.detach())
            for t in (z, leaf.grad)
        )
        results.append([z, of_x, *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16)], ids=["LayerNorm", "RMSNorm"])
def test_torchs_styles(two_ranks, norm):
    two_ranks.run(torchs_styles, nn.MLP(16, 32), norm, nn.Linear(16, 8, activation="gelu"), randn(2, 8, 16))


class Block(torch.nn.Module):
    """A transformer block that adds in its norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(16)
        self.attention = nn.MultiheadAttention(16, 4, bias=False, batch_first=True)
        self.norm2 = nn.AddRMSNorm(16)
        self.mlp = nn.GatedMLP(16, 32, packed=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        y, x = self.norm2(self.attention(y, y, y, need_weights=False)[0], x)
        return x + self.mlp(y)


def block(rank, world, model, x, steps):
    """Parameters after steps of an optimizer, in state_dict's order, and the block's own collectives."""
    parallel = parallelize_module(
        copy.deepcopy(model), mesh_of(world), tensor_parallel_plan(model, sequence_parallel=True)
    )
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    own = x.chunk(world, 1)[rank]
    for _ in range(steps):
        optimizer.zero_grad()
        with CommDebugMode() as mode:
            loss = parallel(own).square().sum()
            loss.backward()
        optimizer.step()
    return {name: whole(t) for name, t in parallel.state_dict().items()}, counts(mode)


def test_a_block_with_sequence_parallelism_trains(two_ranks):
    model, x = Block(), randn(2, 8, 16)
    single_model = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(single_model.parameters(), lr=1e-3)
    with fusedops.backend("torch"):
        for _ in range(3):
            optimizer.zero_grad()
            single_model(x).square().sum().backward()
            optimizer.step()
    for found, seen in two_ranks.run(block, model, x, 3):
        # Two gathers and two scatters forward, as many backward.
        assert seen == {"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4}
        for name, tensor in single_model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def masks_and_dropout(rank, world, part, x, y, padding, mask):
    """Masks of every kind, other keys than queries, weights."""
    results = []
    for parallel in (False, True):
        attention = parallelized(part, world, False, 1) if parallel else part
        results.append([
            attention(x, x, x, key_padding_mask=padding, need_weights=False, attn_mask=mask)[0],
            attention(x, y, y, need_weights=False)[0],
            attention(query=y, key=y, value=x[:, :5] * 2, need_weights=False)[0],
            *attention(x, x, x, key_padding_mask=padding),
        ])  # fmt: skip
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    nested = torch.nested.nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(ValueError, match="no nested tensor"):
        attention(nested, nested, nested, need_weights=False)
    mlp = parallelize_module(nn.MLP(16, 32, dropout=0.5), mesh_of(world), TensorParallel())
    torch.manual_seed(3)
    with CommDebugMode() as mode:
        out = mlp(x)
    assert counts(mode) == {"all_reduce": 1}
    return out.detach()


def test_masks_and_dropout(two_ranks):
    x, y = randn(2, 8, 16), randn(2, 5, 16)
    padding = torch.tensor([[False] * 8, [False] * 5 + [True] * 3])
    mask = torch.randn(8, 8, 8)
    part = nn.MultiheadAttention(16, 4, batch_first=True)
    first, second = two_ranks.run(masks_and_dropout, part, x, y, padding, mask)
    assert torch.equal(first, second)
    assert 0.3 < (first == 0).double().mean() < 0.7


def errors(rank, world):
    mesh = mesh_of(world)
    for made, what in (
        (nn.MLP(16, 33), "hidden features"),
        (nn.LayerNormMLP(16, 33), "hidden features"),
        (nn.GatedMLP(16, 33), "hidden features"),
        (nn.MultiheadAttention(15, 3), "heads"),
    ):
        with pytest.raises(ValueError, match=f"number of {what} that 2 devices divide"):
            parallelize_module(made, mesh, TensorParallel())
    with pytest.raises(TypeError, match=r"module must be one of fusedops\.nn's MLP"):
        parallelize_module(torch.nn.Linear(4, 4), mesh, TensorParallel())
    with pytest.raises(TypeError, match="module must be a layer norm"):
        parallelize_module(torch.nn.Linear(4, 4), mesh, SequenceParallelNorm())
    patched = torch.nn.Sequential(torch.nn.MultiheadAttention(16, 4, batch_first=True))
    fusedops.patch(patched)
    with pytest.raises(ValueError, match="left with reordered parameters by unpatch"):
        parallelize_module(patched, mesh, tensor_parallel_plan(patched))
    twice = parallelize_module(nn.MLP(16, 32), mesh, TensorParallel())
    with pytest.raises(ValueError, match="not a DTensor yet"):
        parallelize_module(twice, mesh, TensorParallel())
    # Rows of both matrices: the first device would have the gate alone.
    packed = parallelize_module(nn.GatedMLP(16, 32, packed=True), mesh, {"gate_up_proj": ColwiseParallel()})
    with pytest.raises(ValueError, match="tensor_parallel_plan"):
        packed(torch.randn(2, 16))


def test_errors(two_ranks):
    two_ranks.run(errors)
    for options in ({"input_layouts": "Shard"}, {"output_layouts": Partial()}):
        with pytest.raises(TypeError, match=next(iter(options))):
            TensorParallel(**options)
    with pytest.raises(TypeError, match="sequence_dim"):
        SequenceParallelNorm(sequence_dim="1")
    with pytest.raises(TypeError, match="module"):
        tensor_parallel_plan("model")
    with pytest.raises(ValueError, match=r"modules of fusedops\.nn"):
        tensor_parallel_plan(torch.nn.Linear(4, 4))


def llama(rank, world, patch_first, x):
    """A patched model of Hugging Face's with the plan that its configuration names."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    reference = model(x, labels=x)
    reference.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    plan = {f"model.{name}": styles[style]() for name, style in config.base_model_tp_plan.items() if style in styles}
    assert len(plan) == 7
    if patch_first:
        report = fusedops.patch(model)
    parallelize_module(model, mesh_of(world), plan)
    if not patch_first:
        report = fusedops.patch(model)
    assert report
    with CommDebugMode() as mode:
        result = model(x, labels=x)
    assert counts(mode) == {"all_reduce": 4}  # two a layer
    result.loss.backward()
    torch.testing.assert_close(result.logits, reference.logits, rtol=1e-4, atol=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient(parameter), expected[name], rtol=1e-3, atol=1e-4)
    return len(report.replaced) if hasattr(report, "replaced") else str(report)


@pytest.mark.parametrize("patch_first", [True, False], ids=["patched first", "parallelized first"])
def test_a_patched_llama(two_ranks, patch_first):
    pytest.importorskip("transformers")
    two_ranks.run(llama, patch_first, torch.randint(0, 64, (2, 8)))
