"""The way of a call past torch's dispatcher: taken where nobody watches, and by nobody else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from fusedops.runtime import library

CALLS: list[str] = []


class Twice(torch.autograd.Function):
    """x + x; its gradient is computed by an op as well."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, more: list[torch.Tensor], compute: Callable[..., Any]) -> torch.Tensor:
        ctx.save_for_backward(x)
        return compute(x, more)

    @staticmethod
    @library.first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return twice_backward(grad), None, None


def _twice(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
    CALLS.append("kernel")
    return x + x


def _twice_backward(grad: torch.Tensor) -> torch.Tensor:
    return grad + grad


twice = library.register(
    "test_twice(Tensor x, Tensor[] more) -> Tensor",
    kernel=_twice,
    fake=lambda x, more: torch.empty_like(x),
    function=Twice,
)
twice_backward = library.register(
    "test_twice_backward(Tensor grad) -> Tensor", kernel=_twice_backward, fake=torch.empty_like
)


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is put in here by each call that asks the dispatcher."""
    met: list[str] = []
    survey = library._survey

    def surveyed(tensors: Any) -> int:
        found = survey(tensors)
        if not found:
            met.append("not plain")
        return found

    monkeypatch.setattr(library, "_survey", surveyed)
    watched = library._watched

    def asked() -> bool:
        if watched():
            met.append("watched")
            return True
        return False

    monkeypatch.setattr(library, "_watched", asked)
    CALLS.clear()
    return met


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "gradient"])
@pytest.mark.parametrize("kind", ["tensor", "parameter", "made_in_inference_mode"])
def test_a_plain_call_leaves_the_dispatcher_out(dispatched, kind, requires_grad):
    if kind == "made_in_inference_mode":
        with torch.inference_mode():
            x = torch.ones(3)
            assert torch.equal(twice(x, [x]), 2 * x)
    else:
        x = torch.ones(3, requires_grad=requires_grad)
        x = torch.nn.Parameter(x.detach(), requires_grad) if kind == "parameter" else x
        y = twice(x, [torch.ones(2)])
        assert y.requires_grad == requires_grad
        if requires_grad:
            assert type(y.grad_fn).__name__ == "TwiceBackward"
            y.sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert dispatched == []
    assert CALLS == ["kernel"]


def test_without_gradients_a_plain_call_makes_no_node(dispatched):
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not twice(x, []).requires_grad
    assert dispatched == []


class _Dispatch(TorchDispatchMode):
    def __init__(self, met: list[str]) -> None:
        super().__init__()
        self.met = met

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.met.append(str(function))
        return function(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self, met: list[str]) -> None:
        super().__init__()
        self.met = met

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.met.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Dispatch, _Functions])
@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "gradient"])
def test_a_mode_sees_the_op(mode, requires_grad):
    met: list[str] = []
    x = torch.ones(3, requires_grad=requires_grad)
    with mode(met):
        y = twice(x, [])
        if requires_grad:
            torch.autograd.grad(y.sum(), x)
    assert "fusedops.test_twice.default" in met
    # torch takes a function mode off within torch.autograd.grad, which the mode has seen.
    assert ("fusedops.test_twice_backward.default" in met) == (requires_grad and mode is _Dispatch)


def test_a_profile_names_the_op():
    x = torch.ones(3, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        twice(x, []).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"fusedops::test_twice", "fusedops::test_twice_backward"} <= names


def test_flops_are_counted_by_the_op():
    counter = FlopCounterMode(display=False, custom_mapping={twice.overload.overloadpacket: lambda *_, **__: 7})
    with counter:
        twice(torch.ones(3), [])
    assert counter.get_total_flops() == 7


def test_a_graph_has_the_op():
    x = torch.ones(3, requires_grad=True)
    graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x: twice(x, []))(x)
    assert any(node.target is twice.overload for node in graph.graph.nodes)
    exported = torch.export.export(_Module(), (torch.ones(3),), strict=False)
    assert any(node.target is twice.overload for node in exported.graph.nodes)
    found = []

    def backend(graph, _):
        found.extend(node.target for node in graph.graph.nodes)
        return graph

    torch._dynamo.reset()
    assert torch.equal(torch.compile(_Module(), backend=backend, fullgraph=True)(x), 2 * x)
    assert twice.overload in found


class _Module(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return twice(x, [])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_trace_has_the_op():
    traced = torch.jit.trace(lambda x: twice(x, []), torch.ones(3))
    assert "fusedops::test_twice" in str(traced.inlined_graph)


def test_selective_checkpointing_can_keep_the_op():
    x = torch.ones(3, requires_grad=True)
    policy = partial(create_selective_checkpoint_contexts, [twice.overload])
    CALLS.clear()
    y = checkpoint(lambda x: twice(x.sin(), []).cos(), x, use_reentrant=False, context_fn=policy)
    y.sum().backward()
    assert CALLS == ["kernel"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing(use_reentrant):
    x = torch.ones(3, requires_grad=True)
    wanted = torch.autograd.grad((2 * x.sin()).cos().sum(), x)[0]
    checkpoint(lambda x: twice(x.sin(), []).cos(), x, use_reentrant=use_reentrant).sum().backward()
    assert torch.allclose(x.grad, wanted)


def test_saved_tensor_hooks_see_what_is_saved(dispatched):
    x = torch.ones(3, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        twice(x, [])
    assert dispatched == []
    assert len(packed) == 1


class _Subclass(torch.Tensor):
    pass


def _negated() -> torch.Tensor:
    return torch.imag(torch.complex(torch.ones(3), -torch.ones(3)).conj())


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).as_subclass(_Subclass),
        _negated,
        lambda: torch._efficientzerotensor((3,)),
        lambda: torch._to_functional_tensor(torch.ones(3)),
        lambda: torch.ones(3, device="meta"),
    ],
    ids=["subclass", "negated", "zero", "functional", "meta"],
)
@pytest.mark.parametrize("place", ["argument", "in_a_list"])
def test_what_only_stands_for_a_tensor_goes_by_the_dispatcher(dispatched, make, place):
    value = make()
    with contextlib.suppress(RuntimeError, NotImplementedError):  # what the dispatcher says of mixed devices
        twice(*((value, []) if place == "argument" else (torch.ones(3), [value])))
    assert dispatched[0] == "not plain"


def test_a_negated_tensor_is_computed_right():
    assert torch.equal(twice(_negated(), []), torch.full((3,), 2.0))


def test_batched_gradients_go_by_the_dispatcher():
    """torch's older vmap wraps them in tensors of the ordinary type."""
    x = torch.ones(3, requires_grad=True)
    y = twice(x, [])
    met = []
    survey = library._survey
    with _patched("_survey", lambda tensors: met.append(survey(tensors)) or met[-1]):
        (grads,) = torch.autograd.grad(y, x, torch.eye(3), is_grads_batched=True)
    assert torch.equal(grads, 2 * torch.eye(3))
    assert met
    assert not any(met)


@contextlib.contextmanager
def _patched(name: str, value: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(library, name, value)
        yield


def test_transforms_and_forward_mode_are_watched(dispatched):
    x = torch.ones(3)
    vmapped = torch.func.vmap(lambda x, _: twice(x, []), in_dims=(None, 0), out_dims=None)
    assert torch.equal(vmapped(x, torch.ones(2)), 2 * x)
    with pytest.raises(RuntimeError, match="no derivative under"):
        torch.func.grad(lambda x: twice(x, []).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(RuntimeError, match="no forward-mode derivative"):
            twice(dual, [])
    assert dispatched == ["watched"] * 3


def test_a_second_derivative_is_an_error_all_the_same():
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(twice(x, []).sum(), x, create_graph=True)


def test_without_a_name_of_torchs_every_call_is_the_ops(monkeypatch, dispatched):
    monkeypatch.setattr(library, "_watched", lambda: True)
    x = torch.ones(3, requires_grad=True)
    y = twice(x, [])
    assert type(y.grad_fn).__name__ == "TwiceBackward"
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3,), 2.0))
