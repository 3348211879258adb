"""Activation checkpointing, selective policies that name our operators, saved tensors that are moved elsewhere."""

from __future__ import annotations

import gc
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fusedops
from tests.harness.operators import OPERATORS

DIFFERENTIABLE = [operator for operator in OPERATORS if operator.differentiable]


def leaves_of(operator, tensors):
    return [tensors[place] for place in operator.differentiable]


def total(results):
    results = results if isinstance(results, tuple) else (results,)
    return sum((r * torch.linspace(0.5, 1.5, r.numel(), device=r.device).view(r.shape)).sum() for r in results)


def gradients(operator, tensors, run=lambda function, *tensors: function(*tensors)):
    torch.manual_seed(3)
    loss = total(run(operator.function, *tensors))
    return loss.detach(), torch.autograd.grad(loss, leaves_of(operator, tensors))


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_checkpoints(runner, operator):
    """Of both kinds: the same bits, with dropout too, whose mask is drawn again."""
    tensors = operator.inputs(runner.device, length=3)
    loss, expected = gradients(operator, tensors)
    for reentrant in (False, True):
        torch.manual_seed(3)
        again = total(checkpoint(operator.function, *tensors, use_reentrant=reentrant))
        assert torch.equal(again.detach(), loss)
        leaves = leaves_of(operator, tensors)
        for leaf in leaves:
            leaf.grad = None
        again.backward()
        for leaf, gradient in zip(leaves, expected, strict=True):
            assert torch.equal(leaf.grad, gradient)


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_everything_that_is_kept_can_be_moved_and_given_back(runner, operator, tmp_path):
    """To the CPU; through a file, with the tensors that were saved gone; nothing is kept beside what autograd saves."""
    tensors = operator.inputs(runner.device, length=3)
    _, expected = gradients(operator, tensors)

    def offloaded(function, *tensors):
        with torch.autograd.graph.save_on_cpu():
            return function(*tensors)

    paths = []

    def pack(tensor):
        paths.append(tmp_path / f"{len(paths)}.pt")
        torch.save(tensor.detach(), paths[-1])
        return paths[-1]

    def stored(function, *tensors):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.load):
            return function(*tensors)

    for run in (offloaded, stored):
        _, found = gradients(operator, tensors, run)
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)
    assert paths


@pytest.mark.parametrize("operator", DIFFERENTIABLE, ids=str)
def test_no_node_keeps_a_tensor_of_its_own(kernel_runner, operator):
    """A tensor among a context's attributes would escape hooks, offloading and memory reports."""
    tensors = operator.inputs(kernel_runner.device, length=3)
    results = operator.function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    nodes, seen = [r.grad_fn for r in results if r.grad_fn is not None], set()
    ours = 0
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [following for following, _ in node.next_functions]
        if hasattr(node, "saved_tensors"):  # a node of an autograd.Function
            ours += 1
            held = [v for v in gc.get_referents(vars(node)) if isinstance(v, torch.Tensor)]
            held += [
                t for v in vars(node).values() if isinstance(v, (list, tuple)) for t in v if isinstance(t, torch.Tensor)
            ]
            assert not held, node
    assert ours


# ---- selective checkpointing ----------------------------------------------------------------------------------------


class Counts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedops":
            self.calls[function._opname] += 1
        return function(*args, **(kwargs or {}))


def block(device):
    torch.manual_seed(0)
    layer = fusedops.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return layer.to(device).train()


def policies():
    """What is kept rather than computed again, and how often each operator then runs in forward and backward."""
    ops = torch.ops.fusedops
    costly = {ops.attention.default, ops.linear.default}
    return {
        "nothing": (set(), {"attention": 2, "linear": 8, "norm": 4}),
        "attention": ({ops.attention.default}, {"attention": 1, "linear": 8, "norm": 4}),
        "all but the norms": (costly, {"attention": 1, "linear": 4, "norm": 4}),
    }


@pytest.mark.parametrize("name", ["nothing", "attention", "all but the norms"])
def test_policies_that_name_our_operators(kernel_runner, name):
    kept, expected = policies()[name]
    layer = block(kernel_runner.device)
    x = torch.randn(2, 5, 16, device=kernel_runner.device, requires_grad=True)
    with Counts() as plain:
        layer(x).sum().backward()
    gradient, x.grad = x.grad, None

    def policy(context, function, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    with Counts() as counts:
        checkpoint(
            layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        ).sum().backward()
    assert torch.equal(x.grad, gradient)
    forward = {op: n for op, n in counts.calls.items() if "backward" not in op}
    once = {op: n for op, n in plain.calls.items() if "backward" not in op}
    assert {op: forward[op] for op in once} == expected
    backward = {op: n for op, n in counts.calls.items() if "backward" in op}
    assert backward == {op: n for op, n in plain.calls.items() if "backward" in op}


def test_policies_under_compile(kernel_runner):
    """What the policy keeps is not in the backward's graph."""
    torch._dynamo.reset()
    kept = {torch.ops.fusedops.attention.default, torch.ops.fusedops.linear.default}
    layer = block(kernel_runner.device)
    x = torch.randn(2, 5, 16, device=kernel_runner.device, requires_grad=True)
    layer(x).sum().backward()
    gradient, x.grad = x.grad, None
    graphs = []

    def policy(context, function, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    def context():
        return create_selective_checkpoint_contexts(policy)

    def keep(graph, _):
        graphs.append(Counter(node.target._opname for node in graph.graph.nodes if "fusedops." in str(node.target)))
        return graph

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    backend = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(
        lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=context), fullgraph=True, backend=backend
    )
    compiled(x).sum().backward()
    assert torch.equal(x.grad, gradient)
    forward, backward = graphs
    assert forward["attention"] == 1
    assert backward["attention"] == backward["linear"] == 0
    assert backward["norm"] >= 1
    assert backward["attention_backward"] == 1
