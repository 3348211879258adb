"""Linear layers followed by an activation in a graph, and gated pairs of them.

An activation that is written out is recognised by its values: the part of the graph that depends on the layer's result
alone, and consists of nothing but smooth functions and constants, is computed in float64 and compared with every
activation's definition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fusedops.dynamo.graph import (
    FLOATS,
    Left,
    binary,
    call_of,
    dtype_of,
    is_border,
    is_cast,
    number,
    operands,
    value_of,
)
from fusedops.dynamo.rewriting import Made, Match, Rewriter
from fusedops.linear.activations import ACTIVATIONS
from fusedops.linear.functional import linear
from fusedops.linear.functional_gated import gated_linear

_ELEMENTWISE = frozenset(
    (
        "add", "sub", "mul", "div", "pow", "square", "neg", "exp", "erf", "tanh", "sigmoid", "relu", "silu", "mish",
        "hardswish", "hardsigmoid", "gelu", "elu", "leaky_relu", "softplus",
    )
)  # fmt: skip
# The longest activation that is written out, tanh-GELU with its casts, has about ten.
_LONGEST = 16


@dataclass
class Layer:
    """A linear layer that was found in a graph; ``root`` computes its result."""

    root: Node
    x: Node
    weight: Any
    bias: Any
    inside: list[Node] = field(default_factory=list)
    shaping: list[Node] = field(default_factory=list)

    @property
    def result(self) -> Node:
        """The result in its last shape."""
        return self.shaping[-1] if self.shaping else self.root


def replace_linears(rewriter: Rewriter) -> None:
    """Replace gated pairs of linear layers, and linear layers that an activation follows."""
    for node in rewriter.nodes():
        layer = _layer(node)
        if layer is None:
            continue
        for match in _matches(layer):
            try:
                rewriter.replace(match)
            except Left as reason:
                rewriter.leave(match.what, f"fusedops.{match.function.__name__}", node, str(reason))
            else:
                break


def _matches(layer: Layer) -> Iterator[Match]:
    """What the layer may be a part of, the larger first."""
    packed = _packed(layer)
    if packed is not None:
        yield packed
    found = _activation(layer.result)
    if found is None:
        return
    name, root, inside = found
    if not layer.shaping:
        gated = _gated(layer, name, root, inside)
        if gated is not None:
            yield gated
    own = [layer.root, *layer.inside, *inside]
    # Elementwise: a change of shape before it may as well come after it.
    own += layer.shaping
    args = (layer.x, layer.weight, layer.bias, name)
    yield Match(f"linear, {name}", linear, args, {}, (root,), own, after=layer.shaping)


def _layer(node: Node) -> Layer | None:
    call = call_of(node)
    # The kernels do not take float64: it is looked at for the report.
    if call is None or dtype_of(node) not in (*FLOATS, torch.float64):
        return None
    a = call.args
    layer = None
    if call.name == "linear":
        layer = Layer(node, a["input"], a["weight"], a.get("bias"))
    elif call.name == "addmm" and a.get("beta", 1) == 1 and a.get("alpha", 1) == 1:
        if _dims(a["input"]) == 1:
            layer = Layer(node, a["mat1"], _transposed(a["mat2"]), a["input"])
    elif call.name == "matmul" and _dims(a["other"]) == 2 and (_dims(a["input"]) or 0) >= 2:
        layer = Layer(node, a["input"], _transposed(a["other"]), None)
        users = list(node.users)
        if len(users) == 1:
            for product, bias in operands(users[0], "add"):
                if product is node and _dims(bias) == 1 and dtype_of(users[0]) == dtype_of(node):
                    layer = Layer(users[0], layer.x, layer.weight, bias, [node])
    if layer is None or not isinstance(layer.x, Node):
        return None
    while len(layer.result.users) == 1:
        (user,) = layer.result.users
        if not (user.op == "call_method" and user.target in ("view", "reshape") and user.args[0] is layer.result):
            break
        if not _plain(user.args[1:]):
            break
        layer.shaping.append(user)
    return layer


def _plain(sizes: Any) -> bool:
    """Whether sizes, numbers or nodes, are not a dtype: ``view`` takes that, too."""
    if isinstance(sizes, (tuple, list)):
        return all(map(_plain, sizes))
    return type(sizes) is int or isinstance(sizes, Node)


def _dims(node: Any) -> int | None:
    value = value_of(node)
    return None if value is None else value.dim()


def _transposed(node: Node) -> Any:
    """The transpose of a matrix: what it is the transpose of, where it is one."""
    call = call_of(node)
    if call is not None and _dims(call.args.get("input")) == 2:
        a = call.args
        swaps = call.name == "transpose" and {a.get("dim0"), a.get("dim1")} in ({0, 1}, {-1, -2}, {0, -1}, {-2, 1})
        if call.name == "t" or swaps or (call.name == "getattr" and a.get("name") in ("T", "mT")):
            return a["input"]
    return Made(torch.t, (node,))


def _activation(start: Node) -> tuple[str, Node, list[Node]] | None:
    """(name, root, nodes inside) of the activation whose only input is ``start``."""
    cone = _cone(start)
    for root in reversed(cone):
        inside = [node for node in cone if node is not root and _reaches(node, root)]
        own = {*inside, root}
        if all(user in own for node in (start, *inside) for user in node.users):
            if dtype_of(root) != dtype_of(start):
                continue
            name = _recognised(start, inside, root)
            if name is not None:
                return name, root, inside
    return None


def _cone(start: Node) -> list[Node]:
    """The elementwise nodes that depend on ``start`` and constants alone, in the graph's order."""
    cone: dict[Node, None] = {start: None}
    waiting = list(start.users)
    while waiting and len(cone) <= _LONGEST:
        node = min(waiting)
        waiting.remove(node)
        if node in cone or not all(source in cone for source in node.all_input_nodes):
            continue
        call = call_of(node)
        if is_cast(node):
            if dtype_of(node) not in FLOATS or len(node.all_input_nodes) != 1:
                continue
        elif call is None or call.name not in _ELEMENTWISE or not _smooth(call.name, call.args):
            continue
        if any(source.users.keys() != {node} for source in node.all_input_nodes) and is_border(node):
            continue  # it writes what others read
        cone[node] = None
        waiting += node.users
    del cone[start]
    return sorted(cone)


def _smooth(name: str, args: dict[str, Any]) -> bool:
    # A root of a negative number, or a power of a constant, is none of ours.
    return name != "pow" or number(args.get("exponent")) in (2.0, 3.0)


def _reaches(node: Node, root: Node) -> bool:
    seen, waiting = set(), [root]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source is node:
                return True
            if source not in seen and node < source:
                seen.add(source)
                waiting.append(source)
    return False


def _recognised(start: Node, inside: list[Node], root: Node) -> str | None:
    """The activation that has the values of this part of the graph."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), unset_fake_temporarily(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        far = torch.tensor([-60.0, -35.0, 35.0, 60.0], dtype=torch.float64, device="cpu")
        z = torch.cat((torch.linspace(-12, 12, 601, dtype=torch.float64, device="cpu"), far))
        values: dict[Node, torch.Tensor] = {start: z}
        for node in (*inside, root):
            if is_cast(node):
                values[node] = values[node.args[0]]  # type: ignore[index]
                continue
            args = map_arg(node.args, lambda n: values[n].clone())
            kwargs = map_arg(node.kwargs, lambda n: values[n].clone())
            function: Any = getattr(torch.Tensor, str(node.target)) if node.op == "call_method" else node.target
            values[node] = function(*args, **kwargs)
        result = values[root]
        for name, activation in ACTIVATIONS.items():
            # Constants are often written with eight digits.
            if torch.allclose(result, activation.forward(z), rtol=1e-7, atol=1e-8):
                return name
    return None


def _gated(layer: Layer, name: str, root: Node, inside: list[Node]) -> Match | None:
    """``activation(layer(x)) * other(x)``."""
    if len(root.users) != 1:
        return None
    (product,) = root.users
    for activated, other in operands(product, "mul"):
        up = _layer_of(other)
        if activated is not root or up is None or up.shaping or up.root is layer.root or up.x is not layer.x:
            continue
        own = [layer.root, *layer.inside, *inside, root, up.root, *up.inside]
        args = (layer.x, layer.weight, up.weight, layer.bias, up.bias, name)
        return Match(f"gated linear, {name}", gated_linear, args, {}, (product,), own)
    return None


def _layer_of(node: Any) -> Layer | None:
    """The layer whose result a node is."""
    if not isinstance(node, Node):
        return None
    found = _layer(node)
    if found is None and binary(node, "add") is not None:
        for product, _ in operands(node, "add"):
            found = found or (_layer(product) if isinstance(product, Node) else None)
    return found if found is not None and found.result is node else None


def _packed(layer: Layer) -> Match | None:
    """``gate, up = layer(x).chunk(2, -1)``, then ``activation(gate) * up``."""
    if layer.shaping or len(layer.root.users) != 1:
        return None
    (chunk,) = layer.root.users
    call = call_of(chunk)
    dims = _dims(layer.root)
    if call is None or call.name != "chunk" or call.args.get("chunks") != 2 or dims is None:
        return None
    if call.args.get("dim", 0) not in (-1, dims - 1):
        return None
    halves = {h.args[1]: h for h in chunk.users if (c := call_of(h)) is not None and c.name == "getitem"}
    if halves.keys() != {0, 1} or len(chunk.users) != 2:
        return None
    found = _activation(halves[0])
    if found is None or len(found[1].users) != 1:
        return None
    name, root, inside = found
    (product,) = root.users
    factors = binary(product, "mul")
    if factors is None or {*factors} != {root, halves[1]}:
        return None
    own = [layer.root, *layer.inside, chunk, *halves.values(), *inside, root]
    args = (layer.x, layer.weight, None, layer.bias, None, name)
    return Match(f"packed gated linear, {name}", gated_linear, args, {}, (product,), own)
