"""torch's own checks of library operators, on the calls that the public functions make of them."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fusedops
from tests.harness.operators import OPERATORS


class Record(TorchDispatchMode):
    """Keeps each call of an operator of fusedops, with detached copies of its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "fusedops":
            copies = tree_map_only(torch.Tensor, lambda t: t.detach().clone(), (args, kwargs or {}))
            self.calls.append((function, *copies))
        return function(*args, **kwargs or {})


def recorded():
    """The calls that the table's operators make, forward and backward, by the operator's name."""
    calls = {}
    for operator in OPERATORS:
        tensors = operator.inputs("cpu", length=3)
        with Record() as record:
            out = operator.function(*tensors)
            outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]
            if outs:
                torch.autograd.backward(outs, [torch.randn_like(o) for o in outs])
        for function, args, kwargs in record.calls:
            calls.setdefault(function.name().removeprefix("fusedops::"), []).append((operator.name, args, kwargs))
    return calls


def accumulated():
    """The one operator that a public function calls where a parameter has a ``main_grad``."""
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(12, 16, requires_grad=True)
    weight.main_grad = torch.zeros(12, 16)
    y = fusedops.linear(x, weight, fuse_wgrad_accumulation=True)
    with Record() as record:
        y.sum().backward()
    return [("linear:main_grad", args, kwargs) for _, args, kwargs in record.calls]


def appended():
    """The one operator that writes what it is given: into a cache."""
    caches = torch.zeros(2, 2, 4, 8), torch.zeros(2, 2, 4, 8)
    with Record() as record:
        new = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1, 8)
        fusedops.append_kv(*new, *caches, cache_seqlens=torch.tensor([1, 3]))
    return [("append_kv", args, kwargs) for _, args, kwargs in record.calls]


def registered():
    names = (name.split("::") for name in torch._C._dispatch_get_all_op_names())
    return {name.partition(".")[0] for space, name in names if space == "fusedops" and not name.startswith("test_")}


def requiring_gradients(args, kwargs):
    def leaf(tensor):
        return tensor.clone().requires_grad_(tensor.is_floating_point() and tensor.element_size() > 1)

    return tree_map_only(torch.Tensor, leaf, (args, kwargs))


@pytest.fixture(scope="module")
def calls():
    with fusedops.backend("triton"):
        return recorded() | {"linear_backward_accumulate": accumulated(), "append_kv": appended()}


@pytest.mark.interpreter
def test_every_registered_operator_is_met(calls):
    """Where this fails, an operator is missing in tests/harness/operators.py."""
    assert calls.keys() == registered()


@pytest.mark.interpreter
@pytest.mark.parametrize("name", sorted(registered()))
def test_opcheck(calls, name):
    """Schema, shapes of the fake, autograd's registration; tracing, forward and backward, of the first call."""
    op = getattr(torch.ops.fusedops, name).default
    with fusedops.backend("triton"):
        for number, (_, args, kwargs) in enumerate(calls[name][:3]):
            checks = ["test_faketensor", "test_autograd_registration"]
            if number == 0 and name != "fp8_linear":  # torch's check multiplies float8 tensors, which torch cannot
                checks.append("test_schema")
            torch.library.opcheck(op, args, kwargs, test_utils=checks)
        _, args, kwargs = calls[name][0]
        if not any(word in name for word in ("backward", "fp8", "quantized", "decode", "append")):
            args, kwargs = requiring_gradients(args, kwargs)
        if not op._schema.is_mutable:
            torch.library.opcheck(op, args, kwargs, test_utils="test_aot_dispatch_dynamic")
