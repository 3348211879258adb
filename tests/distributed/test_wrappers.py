"""FSDP2, DDP, and FSDP2 with tensor parallelism, around fusedops' modules: as torch's modules in the same wrapper."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fusedops
from fusedops import nn
from fusedops.distributed import tensor_parallel_plan
from tests.distributed.meshes import mesh_of, whole
from tests.harness.errors import check_error
from tests.harness.tensors import randn

WIDTH = 16


class Model(torch.nn.Module):
    """The same model of fusedops' modules, or of torch's."""

    def __init__(self, ours: bool, recompute: bool = False, layers: int = 2) -> None:
        super().__init__()
        kinds: Any = nn if ours else torch.nn
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = torch.nn.ModuleList(
            kinds.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, **options) for _ in range(layers)
        )
        self.norm = kinds.RMSNorm(WIDTH, eps=1e-5)
        self.head = kinds.Linear(WIDTH, 8)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(self.norm(x))


def wrapped(model: Model, kind: str, world: int) -> Any:
    if kind.startswith("fsdp"):
        policy = MixedPrecisionPolicy()
        if "mixed" in kind:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for layer in model.layers:
            fully_shard(layer, mesh=mesh_of(world), mp_policy=policy)
        return fully_shard(model, mesh=mesh_of(world), mp_policy=policy)
    return DistributedDataParallel(model, gradient_as_bucket_view="view" in kind, static_graph="static" in kind)


def step(parallel, x, grad):
    """The output and all gradients."""
    parallel.zero_grad()
    out = parallel(x)
    out.backward(grad.to(out.dtype))
    return out.detach(), {n.replace("module.", ""): whole(p.grad).clone() for n, p in parallel.named_parameters()}


def run(rank, world, kind, state, x, grad, kernels, alone, layers):
    """For torch's modules, and ours unless torch's are to be alone: this rank's output and all gradients."""
    results = []
    for ours in (False,) if alone else (False, True):
        model = Model(ours, "checkpointed" in kind, layers)
        model.load_state_dict(state)
        parallel = wrapped(model, kind, world)
        with fusedops.backend("triton") if kernels and ours else contextlib.nullcontext():
            for _ in range(2 if "static" in kind else 1):  # a static graph is known after the first backward
                result = step(parallel, x.chunk(world)[rank], grad.chunk(world)[rank])
        results.append(result)
    return results


def exact(state, x, grad, world, layers):
    model = Model(True, layers=layers).double()
    model.load_state_dict(state)
    with fusedops.backend("torch"):
        out = model(x.double())
        out.backward(grad.double() / world)  # the wrappers take the mean of the ranks
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def check(ranks, kind, kernels=False):
    world, layers = ranks.world, 1 if kernels else 2
    samples = []
    for number in range(3):  # few numbers: their errors are a matter of luck
        state = Model(False, layers=layers).state_dict()
        x, grad = randn(4, 6, WIDTH), randn(4, 6, 8)
        found = ranks.run(run, kind, state, x, grad, kernels, number > 0, layers)
        samples.append((exact(state, x, grad, world, layers), found))
    (out, grads), found = samples[0]
    for rank, ((base, theirs), (actual, ours)) in enumerate(found):
        shard = out.chunk(world)[rank]
        more = [(o.chunk(world)[rank], f[rank][0][0]) for (o, _), f in samples[1:]]
        check_error(actual, shard, base, what="output", more=more)
        assert set(ours) == set(theirs) == set(grads)
        for name, reference in grads.items():
            more = [(g[name], f[rank][0][1][name]) for (_, g), f in samples[1:]]
            check_error(ours[name], reference, theirs[name], gradient=True, what=name, more=more)


KINDS = ["fsdp", "fsdp mixed", "fsdp mixed checkpointed", "ddp view static", "ddp checkpointed"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(two_ranks, kind):
    check(two_ranks, kind)


@pytest.mark.parametrize("kind", ["fsdp mixed checkpointed", "ddp view static"])
def test_four_ranks(four_ranks, kind):
    check(four_ranks, kind)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["fsdp mixed", "ddp view"])
def test_the_kernels(two_ranks, kind):
    check(two_ranks, kind, kernels=True)


def compiled(rank, world, state, x, grad):
    model = Model(True, layers=1)
    model.load_state_dict(state)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    x, grad = x.chunk(world)[rank], grad.chunk(world)[rank]
    eager = step(parallel, x, grad)
    traced = torch.compile(parallel, backend="aot_eager")
    out, grads = step(traced, x, grad)
    assert torch.equal(out, eager[0])
    assert all(torch.equal(g, eager[1][n.replace("_orig_mod.", "")]) for n, g in grads.items())


def test_compiled_ddp(two_ranks):
    """To the bit, in the graphs that torch cuts at its buckets."""
    two_ranks.run(compiled, Model(False, layers=1).state_dict(), randn(4, 6, WIDTH), randn(4, 6, 8))


def two_dimensions(rank, world, state, x, steps):
    """Data parallel by FSDP2 in one dimension of the mesh, tensor and sequence parallel in the other."""
    mesh = mesh_of(2, 2)
    model = torch.nn.Sequential(*(Block() for _ in range(2)))
    model.load_state_dict(state)
    parallelize_module(model, mesh["tp"], tensor_parallel_plan(model, sequence_parallel=True))
    for layer in model:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = x.chunk(2)[mesh.get_local_rank("dp")].chunk(2, 1)[mesh.get_local_rank("tp")]
    for _ in range(steps):
        optimizer.zero_grad()
        model(own).square().sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    before = {name: whole(t) for name, t in model.state_dict().items()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(whole(full[name]), t) for name, t in before.items())
    # Loaded again, each device has what it had.
    held = [p.to_local().clone() for p in model.parameters()]
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(saved)
    assert all(torch.equal(p.to_local(), t) for p, t in zip(model.parameters(), held, strict=True))
    return before, whole(norm)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm2 = nn.AddRMSNorm(WIDTH)
        self.mlp = nn.GatedMLP(WIDTH, 2 * WIDTH, bias=True, packed=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        y, x = self.norm2(self.attention(y, y, y, need_weights=False)[0], x)
        return x + self.mlp(y)


def test_fsdp_and_tensor_parallel(four_ranks):
    model, x = torch.nn.Sequential(*(Block() for _ in range(2))), randn(4, 6, WIDTH)
    state = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with fusedops.backend("torch"):
        for _ in range(3):
            optimizer.zero_grad()
            (model(x).square().sum() / 2).backward()  # the mean of two data-parallel ranks
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    for found, their_norm in four_ranks.run(two_dimensions, state, x, 3):
        torch.testing.assert_close(their_norm, norm, rtol=1e-4, atol=1e-5)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)
            assert not torch.equal(tensor, state[name])
