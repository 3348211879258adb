"""What a model's ``eager_attention_forward`` computes: found out by running it, not by its name.

Each of transformers' modelling files has such a function, with extras of its own: a cap on the scores, attention
sinks, a position bias, another scale. It is run on small random tensors, and believed to be fusedops' attention only
where both have the same results and gradients, with and without each argument that it knows.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fusedops.attention.functional import attention, scaled_dot_product_attention
from fusedops.patching.undisturbed import undisturbed
from fusedops.runtime.backend import backend

# Parameters of such a function after module, query, key, value and mask.
_KNOWN = {"scaling", "dropout", "softcap", "position_bias", "s_aux", "sliding_window", "kwargs"}
# What it may read from its module.
_READ = {"training", "num_key_value_groups", "head_dim", "sinks"}

_BATCH, _HEADS, _QUERIES, _KEYS, _SIZE, _HEAD_DIM = 2, 4, 3, 5, 8, 11


@dataclass(frozen=True, slots=True)
class Eager:
    """What an eager attention function heeds, beside query, key, value, mask, scaling and dropout.

    Attributes:
        grouped: ``module.num_key_value_groups``.
        sinks: ``module.sinks``.
        head_dim: ``module.head_dim`` where no scaling is given.
        arguments: of ``softcap``, ``position_bias`` and ``s_aux``, those that it takes.
    """

    grouped: bool = False
    sinks: bool = False
    head_dim: bool = False
    arguments: frozenset[str] = frozenset()

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """(batch, queries, heads, head size), contiguous."""
        given = {name: kwargs.get(name) for name in self.arguments}
        mask = attention_mask
        if mask is not None and not mask.is_floating_point():
            mask = mask.to(query.dtype)  # an eager function adds it, whatever it is
        bias = given.get("position_bias")
        if bias is not None:
            mask = bias if mask is None else bias + mask
        if scaling is None and self.head_dim:
            scaling = module.head_dim**-0.5
        softcap, sinks = given.get("softcap"), given.get("s_aux")
        if self.sinks:
            sinks = module.sinks
        dropout = dropout if module.training else 0.0
        if softcap is None and sinks is None:
            grouped = self.grouped and module.num_key_value_groups > 1
            out = scaled_dot_product_attention(
                query, key, value, mask, dropout_p=dropout, scale=scaling, enable_gqa=grouped
            )
        else:
            out = attend_with(
                query, key, value, attn_mask=mask, softcap=softcap, sinks=sinks, scale=scaling, dropout_p=dropout
            )
        return out.transpose(1, 2).contiguous()


def attend_with(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, softcap: float | None, **options: Any
) -> torch.Tensor:
    """:func:`fusedops.attention`, with what it leaves to its callers: batches broadcast, a softcap of 0 is an error."""
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"softcap must be above 0 or None; got {softcap!r}")
    batch = max(query.shape[0], key.shape[0])
    query, key, value = (x if x.shape[0] == batch else x.expand(batch, -1, -1, -1) for x in (query, key, value))
    out = attention(query, key, value, softcap=softcap or 0.0, **options)
    assert isinstance(out, torch.Tensor)
    return out


@functools.cache
def learn(function: Callable[..., Any]) -> Eager | str:
    """What an eager attention function computes; or, in words, why it is not known."""
    name = getattr(function, "__name__", "its eager attention function")
    try:
        parameters = list(inspect.signature(function).parameters.values())[5:]
        unknown = {p.name for p in parameters} - _KNOWN
        if unknown:
            return f"{name} takes {', '.join(sorted(unknown))}"
        if any("kwargs" in str(i.argval) for i in dis.get_instructions(function) if i.opname.startswith("LOAD_FAST")):
            return f"{name} reads further arguments"
        with undisturbed(), backend("torch"):
            return _compare(function, name, {p.name: p.default for p in parameters})
    except Exception as error:  # whatever the function does with what it is given
        return f"{name} could not be tried: {type(error).__name__}: {error}"


class _StandIn:
    """The module, as the function sees it; it notes what is read."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(_values=values, read=set())

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        if name not in self._values:
            raise AttributeError(name)
        return self._values[name]


def _compare(function: Callable[..., Any], name: str, defaults: dict[str, Any]) -> Eager | str:
    arguments = frozenset(defaults) & {"softcap", "position_bias", "s_aux"}
    tensors = _tensors()
    module = _stand_in(tensors)
    _run(function, module, tensors, "mask", {"scaling": 0.37})
    no_scaling = "scaling" in defaults and defaults["scaling"] is None
    if no_scaling:
        _run(function, module, tensors, "mask", {})
    if module.read - _READ:
        return f"{name} reads {', '.join(sorted(module.read - _READ))} of its module"
    eager = Eager(
        "num_key_value_groups" in module.read, "sinks" in module.read, "head_dim" in module.read, arguments
    )  # fmt: skip
    for what, made, mask, kwargs in _cases(eager, tensors, no_scaling):
        try:
            expected = _run(function, made, tensors, mask, kwargs)
        except (TypeError, AttributeError):
            if mask is None or made.sinks is None:  # it cannot do without: then it will not be asked to
                continue
            raise
        actual = _run(lambda *args, **options: (eager(*args, **options), None), made, tensors, mask, kwargs)
        if not all(a.shape == e.shape and torch.allclose(a, e, 1e-4, 1e-5) for a, e in zip(actual, expected)):  # noqa: B905
            return f"{name} computes something else {what}"
    made = _stand_in(tensors, training=True)
    if _run(function, made, tensors, "mask", {"scaling": 0.37, "dropout": 1.0})[0].any():
        return f"{name} does not drop attention weights"
    return eager


def _cases(
    eager: Eager, tensors: dict[str, torch.Tensor], no_scaling: bool
) -> Iterator[tuple[str, _StandIn, str | None, dict[str, Any]]]:
    """(what in words, module, name of the mask, arguments)"""
    values: dict[str, Any] = {"softcap": 1.3, "position_bias": tensors["position_bias"], "s_aux": tensors["s_aux"]}
    known = {name: values[name] for name in sorted(eager.arguments)}
    extras: list[dict[str, Any]] = [{}, *({name: value} for name, value in known.items())]
    if len(known) > 1:
        extras.append(known)
    for mask, groups, sinks, extra in itertools.product(
        ("mask", None), (1, 2) if eager.grouped else (1,), (True, False) if eager.sinks else (True,), extras
    ):
        made = _stand_in(tensors, groups, sinks)
        what = " ".join(
            ["with a mask" if mask else "without a mask"]
            + [f"and {name}" for name in extra]
            + ["and grouped heads"] * (groups > 1)
        )
        # What transformers passes to all of them, and dropout outside of training, which is none.
        yield what, made, mask, {"scaling": 0.37, "sliding_window": 2, "dropout": 0.5, "is_causal": True, **extra}
    if no_scaling:
        yield "without a scaling", _stand_in(tensors), "mask", {}


def _stand_in(
    tensors: dict[str, torch.Tensor], groups: int = 1, sinks: bool = True, training: bool = False
) -> _StandIn:
    return _StandIn(
        training=training,
        num_key_value_groups=groups,
        head_dim=_HEAD_DIM,
        sinks=tensors["sinks"] if sinks else None,
    )


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    shape = (_BATCH, _HEADS, _QUERIES, _KEYS)
    seen = draw(_BATCH, 1, _QUERIES, _KEYS) > -0.5
    seen[..., 0] = True
    return {
        "query": 2 * draw(_BATCH, _HEADS, _QUERIES, _SIZE),
        "key": draw(_BATCH, _HEADS, _KEYS, _SIZE),
        "value": draw(_BATCH, _HEADS, _KEYS, _SIZE),
        "mask": torch.where(seen, draw(_BATCH, 1, _QUERIES, _KEYS), torch.finfo(torch.float32).min),
        "position_bias": draw(1, *shape[1:]),
        "sinks": draw(_HEADS),
        "s_aux": draw(_HEADS),
    }


def _run(
    function: Callable[..., Any], module: _StandIn, tensors: dict[str, torch.Tensor], mask: str | None, kwargs: Any
) -> list[torch.Tensor]:
    """The output, and the gradients of all that it depends on."""
    heads = _HEADS // module._values["num_key_value_groups"]
    leaves = {name: x.detach().clone().requires_grad_(name != "mask") for name, x in tensors.items()}
    leaves["key"], leaves["value"] = (leaves[name][:, :heads].detach().requires_grad_() for name in ("key", "value"))
    values = dict(module._values)
    if values["sinks"] is not None:
        values["sinks"] = leaves["sinks"]
    made = _StandIn(**values)
    made.__dict__["read"] = module.read
    kwargs = {name: leaves.get(name, value) for name, value in kwargs.items()}
    q, k, v = leaves["query"], leaves["key"], leaves["value"]
    out = function(made, q, k, v, None if mask is None else leaves[mask], **kwargs)[0]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float32, device="cpu").view(out.shape)
    grads = torch.autograd.grad((out * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]
