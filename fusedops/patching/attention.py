"""Attention of Hugging Face models, through transformers' own registry of attention functions.

Such an attention module asks its config for the name of an attention function and calls what the registry holds under
it. A fused attention module sees its config through :class:`FusedConfig`, which names ours; the config itself, which
the model's masks, its saving and other models read, is never changed. No list of models is needed: what a module's
forward does with the registry is read from its code, and what the model's own eager function computes is tried.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, ClassVar

import torch
from torch import nn

from fusedops.attention.functional import scaled_dot_product_attention
from fusedops.patching import source
from fusedops.patching.attention_eager import Eager, attend_with, learn
from fusedops.patching.classes import Body, Fused, original_class
from fusedops.patching.findings import Finding, forward_is_replaced, full_name

# Our attention functions in transformers' registries, by the implementation that each stands for.
REGISTERED = {"sdpa": "fusedops_sdpa", "eager": "fusedops_eager"}
# What fusedops.integrations.transformers registers for everybody.
PUBLIC = "fusedops"

_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
_NAME = "_attn_implementation"


class FusedConfig:
    """A config as a fused attention module sees it: the config itself, but for the name of the attention function."""

    def __init__(self, config: Any, implementation: str) -> None:
        self.__dict__.update(_config=config, _attn_implementation=implementation)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __eq__(self, other: object) -> bool:
        return bool(self._config == (other._config if isinstance(other, FusedConfig) else other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self._config)

    def __reduce__(self) -> Any:
        # A copy or pickle outside its module is the config.
        return _itself, (self._config,)


def _itself(config: Any) -> Any:
    return config


class FusedAttention(Fused):
    """It sees its config through FusedConfig.

    Attributes:
        fused_sdpa: the functions registered as "sdpa" that ours stands for; none: it is not replaced.
        fused_eager: what stands for its eager function; None: it is not replaced.
        fused_registry: where its forward looks the functions up.
    """

    fused_sdpa: ClassVar[tuple[Callable[..., Any], ...]]
    fused_eager: ClassVar[Eager | None]
    fused_registry: ClassVar[Any]

    @property
    def config(self: Any) -> Any:
        config = self.__dict__["config"]
        implementation = config._attn_implementation
        if implementation == "sdpa":
            if self.fused_registry["sdpa"] in self.fused_sdpa:
                return FusedConfig(config, REGISTERED["sdpa"])
        elif (
            implementation == "eager"
            and self.fused_eager is not None
            and not eager_reasons(self)
            and not forward_is_replaced(self)
        ):
            return FusedConfig(config, REGISTERED["eager"])
        return config

    @config.setter
    def config(self: Any, value: Any) -> None:
        self.__dict__["config"] = value


def eager_reasons(module: nn.Module) -> list[str]:
    """What keeps an eager attention module from being fused, at present."""
    reasons = []
    # Eager attention returns its weights, which the fused operator never has. Whoever wants them reads them with a
    # hook, or around a forward set on the instance; transformers' output_attentions with hooks that stay for good.
    if module._forward_hooks and not all(map(_is_transformers, module._forward_hooks.values())):
        reasons.append("it has forward hooks, which may read its attention weights")
    if _weights_are_wanted():
        reasons.append("output_attentions asks for its attention weights")
    if module.__dict__.get("reorder_and_upcast_attn"):
        reasons.append("its eager attention computes the scores in float32 (reorder_and_upcast_attn)")
    return reasons


_CAPTURING = "transformers.utils.output_capturing"


def _collector() -> Any:
    """What says which outputs transformers' hooks collect in the forward that runs now."""
    return getattr(sys.modules.get(_CAPTURING), "_active_collector", None)


def _is_transformers(hook: Any) -> bool:
    """Whether this is a hook of transformers', which collects nothing unless the collector says so."""
    return getattr(hook, "__module__", None) == _CAPTURING and _collector() is not None


def _weights_are_wanted() -> bool:
    collector = _collector()
    return collector is not None and any("attentions" in key for key in collector.get() or ())


def weights_are_hooked(kind: type[nn.Module]) -> bool:
    """Whether transformers records the attention weights of a class by hooks, when they are asked for.

    By hooks of its own modules, or (T5) of those that hold them and pass the weights on.
    """
    names = {base.__name__ for base in kind.__mro__}
    for base in kind.__mro__:
        classes = vars(sys.modules.get(base.__module__, object))
        for model in [*classes.values()]:
            specs = getattr(model, "_can_record_outputs", None) if isinstance(model, type) else None
            recorded = specs.items() if isinstance(specs, dict) else ()
            for spec in (spec for key, spec in recorded if "attentions" in key):
                for one in spec if isinstance(spec, list) else [spec]:
                    target = getattr(one, "target_class", one)
                    name = getattr(target, "__name__", target)
                    if name in names:
                        return True
                    holder = getattr(getattr(classes.get(str(name)), "__init__", None), "__code__", None)
                    if holder is not None and _collector() is not None and names & set(holder.co_names):
                        return True
    return False


@dataclass(frozen=True, slots=True)
class Reading:
    """What the code of an attention class does with transformers' registry.

    Attributes:
        registry: the object that its forward looks functions up in.
        eager: what its eager function heeds; None: eager attention stays as it is.
        always, of_sdpa, of_eager: every reason to leave it alone: with either implementation, or with this one.
    """

    registry: Any
    eager: Eager | None
    always: tuple[str, ...]
    of_sdpa: tuple[str, ...]
    of_eager: tuple[str, ...]


@functools.cache
def _read(forward: FunctionType, kind: type[nn.Module]) -> Reading:
    code, name = forward.__code__, full_name(kind)
    registry = forward.__globals__.get(_REGISTRY)
    always = []
    if not _is_registry(registry):
        always.append(f"{name} looks its attention function up in a registry of its own")
    if not _reads_own_config(code):
        always.append(f"{name} reads the name of its attention function elsewhere than in self.config")
    names = _names_compared(kind)
    of_sdpa = [f"{name} asks whether its attention is 'sdpa'"] if "sdpa" in names else []
    of_eager = []
    # GPT-2 asks so in order to take its way of reorder_and_upcast_attn, which eager_reasons knows.
    if "eager" in names and "reorder_and_upcast_attn" not in code.co_names:
        of_eager.append(f"{name} asks whether its attention is 'eager'")
    if not _passes_weights_on(forward):
        of_eager.append(f"the forward of {name} uses the attention weights")
    found = [n for n in code.co_names if n.endswith("eager_attention_forward")]
    function = forward.__globals__.get(found[0]) if len(found) == 1 else None
    learned: Eager | str = "no eager_attention_forward is found" if function is None else learn(function)
    if isinstance(learned, str):
        of_eager.append(learned)
    eager = None if of_eager or isinstance(learned, str) else learned
    return Reading(registry, eager, tuple(always), tuple(of_sdpa), tuple(of_eager))


def _is_registry(registry: Any) -> bool:
    from transformers import AttentionInterface

    return isinstance(registry, AttentionInterface)


def _reads_own_config(code: CodeType) -> bool:
    """Whether the name is always read as ``self.config._attn_implementation``."""
    steps = [(i.opname, i.argval) for i in dis.get_instructions(code) if i.opname not in ("CACHE", "NOP")]
    for at, (operation, argument) in enumerate(steps):
        if argument == _NAME and not operation.startswith("LOAD_CONST"):
            if at < 2 or steps[at - 1][1] != "config" or not steps[at - 2][0].startswith(("LOAD_FAST", "LOAD_DEREF")):
                return False
            loaded = steps[at - 2][1]
            if (loaded[-1] if isinstance(loaded, tuple) else loaded) != code.co_varnames[0]:
                return False
    return True


def _names_compared(kind: type[nn.Module]) -> set[str]:
    """Names of attention functions that stand in the methods of a class that read the config's name."""
    names: set[str] = set()
    for method in dir(kind):
        function = inspect.unwrap(getattr(kind, method)) if callable(getattr(kind, method, None)) else None
        code = getattr(function, "__code__", None)
        if code is not None and _NAME in code.co_names:
            names |= _strings(code.co_consts)
    return names


def _strings(constants: Any) -> set[str]:
    found: set[str] = set()
    for constant in constants:
        if isinstance(constant, str):
            found.add(constant)
        elif isinstance(constant, (tuple, frozenset)):
            found |= _strings(constant)
        elif isinstance(constant, CodeType):
            found |= _strings(constant.co_consts)
    return found


def _passes_weights_on(forward: FunctionType) -> bool:
    """Whether a forward does no more with the attention weights than return them."""
    readable = source.read(forward)
    if readable is None:
        return False
    tree = readable[1]
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    functions, weights = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(part, ast.Name) and part.id == _REGISTRY for part in ast.walk(node.value)):
                functions |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions):
            continue
        match parents[node]:
            case ast.Assign(targets=[ast.Tuple(elts=[_, ast.Name(id=name)])]):
                weights.add(name)
            case ast.Subscript(slice=ast.Constant(value=0)):
                pass
            case _:
                return False
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in weights and isinstance(node.ctx, ast.Load):
            above = parents[node]
            above = parents[above] if isinstance(above, ast.Tuple) else above
            if not isinstance(above, ast.Return):
                return False
    return bool(functions)


def reading(kind: type[nn.Module]) -> Reading | None:
    """Of a class whose forward looks its attention function up in transformers' registry; None for any other."""
    forward = inspect.unwrap(kind.forward)
    code = getattr(forward, "__code__", None)
    if code is None or not {_REGISTRY, _NAME} <= set(code.co_names) or not transformers_loaded():
        return None
    return _read(forward, kind)  # type: ignore[arg-type]


def attention_body(original: type[nn.Module]) -> Body | None:
    read = reading(original)
    if read is None or read.always:
        return None
    eager = read.eager if weights_are_hooked(original) else None
    if read.of_sdpa and eager is None:
        return None
    sdpa = () if read.of_sdpa else (_sdpa(),)
    return FusedAttention, {"fused_sdpa": sdpa, "fused_eager": eager, "fused_registry": read.registry}


@functools.cache
def _sdpa() -> Callable[..., Any]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


@functools.cache
def register() -> None:
    """Add our attention functions, and their masks, to transformers' registries. Nothing there is replaced."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask, sdpa_mask

    AttentionInterface.register(REGISTERED["sdpa"], attend)
    AttentionInterface.register(REGISTERED["eager"], attend_eager)
    AttentionMaskInterface.register(REGISTERED["sdpa"], sdpa_mask)
    AttentionMaskInterface.register(REGISTERED["eager"], eager_mask)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """In place of transformers' ``sdpa``, with its rules. What that ignores is ignored.

    Args:
        module: the attention module; ``is_causal`` and ``num_key_value_groups`` are read from it.
        query: (batch, heads, queries, head size).
        key, value: (batch, key heads, keys, head size).
        attention_mask: broadcastable to (batch, heads, queries, keys), True = attend or added to the scores. None:
            causal (query i sees keys up to i) if ``is_causal`` and there is more than one query.
        position_bias: added to the scores, (batch or 1, heads or 1, queries or 1, keys).

    Returns:
        (batch, queries, heads, head size), contiguous, and None: the weights are never computed.

    Raises:
        ValueError: there is a ``softcap``, which transformers' function refuses.
    """
    if kwargs.get("softcap") is not None:
        return _sdpa()(module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **kwargs)
    causal = False
    queries = query.shape[2]
    if attention_mask is None and queries > 1:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        # Keys past the queries: the room of a static cache, which no query may see.
        if causal and key.shape[2] > queries:
            key, value = key[:, :, :queries], value[:, :, :queries]
            position_bias = None if position_bias is None else position_bias[..., :queries]
    if position_bias is not None:
        attention_mask = with_bias(attention_mask, position_bias, key)
        if causal:  # the kernel takes a bias and causality together; torch's function does not
            out = attend_with(
                query, key, value, softcap=None, causal=True, attn_mask=attention_mask, scale=scaling, dropout_p=dropout
            )  # fmt: skip
            return out.transpose(1, 2).contiguous(), None
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=is_grouped(module),
    )
    return output.transpose(1, 2).contiguous(), None


def with_bias(mask: torch.Tensor | None, position_bias: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """One mask that is added to the scores, of a mask (bool or added) and a bias: transformers' rule."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, torch.finfo(key.dtype).min)
    return position_bias + mask


def is_grouped(module: Any) -> bool:
    # Not getattr alone: on a module that lacks the name it costs as much as all the rest of attend.
    groups = module.__dict__.get("num_key_value_groups")
    if groups is None:
        groups = module.num_key_value_groups if hasattr(type(module), "num_key_value_groups") else 1
    return bool(groups > 1)


def attend_eager(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """In place of a model's eager attention, which knows no causality but its mask's; arguments as :func:`attend`."""
    return module.fused_eager(module, query, *args, **kwargs), None


def transformers_loaded() -> bool:
    return "transformers" in sys.modules


def find_attention(module: nn.Module) -> Iterator[Finding]:
    kind = original_class(type(module))
    config = module.__dict__.get("config")
    implementation = getattr(config, _NAME, None)
    read = None if implementation is None else reading(kind)
    if read is None:
        return
    if implementation == PUBLIC:
        yield Running("", kind.__name__, f"fusedops.attention (for {PUBLIC!r})", (), ())
        return
    reasons = [*read.always]
    called = "scaled_dot_product_attention"
    if implementation == "sdpa":
        reasons += read.of_sdpa
        if _is_registry(read.registry) and read.registry["sdpa"] is not _sdpa():
            reasons.append("another function is registered as 'sdpa'")
    elif implementation == "eager":
        reasons += [*read.of_eager, *eager_reasons(module)]
        if not weights_are_hooked(kind):
            reasons.append("this version of transformers takes its eager attention weights from every call")
        if read.eager is not None and (read.eager.sinks or read.eager.arguments & {"softcap", "s_aux"}):
            called = "attention"
    else:
        reasons.append(f"it runs {implementation!r}; 'sdpa' and 'eager' are replaced")
    if forward_is_replaced(module):
        reasons.append("its forward was replaced on the instance")
    calls = f"fusedops.{called} (for {implementation!r})"
    yield Finding("", kind.__name__, calls, ((module, "attention"),), tuple(reasons))


class Running(Finding):
    """Attention that the model's config already gives to fusedops: there is nothing to change."""

    __slots__ = ()

    @property
    def done(self) -> bool:
        return True
