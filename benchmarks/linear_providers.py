"""What ``linear.py`` compares: the matrix products of four models' layers, as fusedops and other libraries offer them.

A library is imported when it is asked for, and left out with the reason where it is not installed.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

import fusedops
from benchmarks import compare
from benchmarks.measure import Run, linear_flops
from benchmarks.report import OURS
from fusedops.linear import tuning, tuning_gated
from fusedops.linear.tuning_skinny import skinny_config
from fusedops.runtime.device import DeviceFacts, device_facts

Operator = Literal["linear", "gated_linear", "mlp"]
DIRECTIONS = ("forward", "both")
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}

# (x, residual or None, weight, bias or None, second weight or None, second bias or None) -> y
Function = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of one or more models.

    Attributes:
        operator: ``linear``: activation(x Wᵀ + b) + residual; ``gated_linear``: activation(x Wᵀ + b) (x W₂ᵀ + b₂);
            ``mlp``: activation(x Wᵀ + b) W₂ᵀ + b₂, ``inputs`` being its output's size too.
        inputs, outputs: sizes of x and of the (first) product.
        bias, residual: whether there are any.
    """

    operator: Operator
    inputs: int
    outputs: int
    activation: str | None = None
    bias: bool = True
    residual: bool = False

    def products(self) -> list[tuple[int, int]]:
        """(inputs, outputs) of each matrix product; a gated layer's are one, of both weights."""
        if self.operator == "gated_linear":
            return [(self.inputs, 2 * self.outputs)]
        second = [(self.outputs, self.inputs)] if self.operator == "mlp" else []
        return [(self.inputs, self.outputs), *second]

    def tiny(self) -> Layer:
        """The same for a dry run on a CPU."""
        return replace(self, inputs=24, outputs=40)


# Where models share a shape, it has the name of the first. Sizes and activations: the models' configurations.
LAYERS: dict[str, Layer] = {
    "gpt2.qkv": Layer("linear", 768, 2304),  # GPT-2 small, as BERT base's three in one
    "gpt2.attention_output": Layer("linear", 768, 768, residual=True),  # as BERT base's
    "gpt2.fc1": Layer("linear", 768, 3072, "gelu_tanh"),
    "gpt2.fc2": Layer("linear", 3072, 768, residual=True),  # as BERT base's
    "gpt2.mlp": Layer("mlp", 768, 3072, "gelu_tanh"),
    "bert.fc1": Layer("linear", 768, 3072, "gelu"),  # BERT base
    "vit_l.qkv": Layer("linear", 1024, 3072),
    "vit_l.attention_output": Layer("linear", 1024, 1024, residual=True),
    "vit_l.fc1": Layer("linear", 1024, 4096, "gelu"),
    "vit_l.fc2": Layer("linear", 4096, 1024, residual=True),
    "llama3_8b.qkv": Layer("linear", 4096, 6144, bias=False),  # 32 heads of queries, 8 of keys, 8 of values
    "llama3_8b.attention_output": Layer("linear", 4096, 4096, bias=False, residual=True),
    "llama3_8b.gate_up": Layer("gated_linear", 4096, 14336, "silu", bias=False),
    "llama3_8b.down": Layer("linear", 14336, 4096, bias=False, residual=True),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A layer at one number of rows."""

    name: str
    layer: Layer
    rows: int
    dtype: torch.dtype

    def flops(self, direction: str) -> int:
        """Of the matrix products alone, as is the custom."""
        directions = (False, True) if direction == "both" else (False,)
        return sum(linear_flops(self.rows, *sizes, back) for sizes in self.layer.products() for back in directions)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Tensors of a problem in the order of :data:`Function`, and the gradient that arrives at its output."""

    tensors: tuple[torch.Tensor | None, ...]
    gradient: torch.Tensor

    @classmethod
    def of(cls, problem: Problem, device: torch.device) -> Inputs:
        """Fresh random numbers; weights of a deviation that leaves the output's near 1."""

        def make(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).to(problem.dtype)

        layer, rows = problem.layer, problem.rows
        K, N = layer.inputs, layer.outputs
        last = K if layer.operator == "mlp" else N
        second = second_bias = None
        if layer.operator == "gated_linear":
            # Both in one tensor, as models pack them, and no library has to copy.
            weight, second = make(2 * N, K, scale=K**-0.5).chunk(2)
        else:
            weight = make(N, K, scale=K**-0.5)
            second = make(K, N, scale=N**-0.5) if layer.operator == "mlp" else None
        bias = make(N) if layer.bias else None
        if layer.bias and second is not None:
            second_bias = make(len(second))
        residual = make(rows, last) if layer.residual else None
        return cls((make(rows, K), residual, weight, bias, second, second_bias), make(rows, last))


@dataclass(frozen=True, slots=True)
class Provider:
    """How a library computes layers.

    Attributes:
        offer: a problem's function; None where the library has none.
        kernel: which of fusedops' candidate kernels it is, as of :func:`launching`.
    """

    offer: Callable[[Problem], Function | None]
    kernel: str | None = None

    def within(self) -> contextlib.AbstractContextManager[Any]:
        """What the function and its backward run in."""
        return contextlib.nullcontext() if self.kernel is None else launching(self.kernel)


Found = dict[str, Provider]


def run_in(direction: str, provider: Provider, problem: Problem, inputs: Inputs) -> Run:
    """What to time: the forward without a graph (as in inference), or a forward and a backward (as in training)."""
    function = provider.offer(problem)
    assert function is not None
    if direction == "forward":

        def forward() -> object:
            with provider.within(), torch.no_grad():
                return function(*inputs.tensors)

        return forward
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs.tensors]
    wanted = [leaf for leaf in leaves if leaf is not None]

    def both() -> object:
        with provider.within():
            return torch.autograd.grad(function(*leaves), wanted, inputs.gradient)

    return both


def products(direction: str, problem: Problem, device: torch.device) -> Run:
    """The yardstick: torch's bare products (cuBLAS, hipBLASLt) of a layer, nothing before, between or behind them."""
    operands = []
    for K, N in problem.layer.products():
        shapes = ((problem.rows, K), (N, K), (problem.rows, N))
        operands.append([torch.randn(shape, device=device, dtype=problem.dtype) for shape in shapes])

    def run() -> object:
        results = []
        for x, weight, dy in operands:
            results.append(torch.mm(x, weight.t()))
            if direction == "both":
                results += [torch.mm(dy, weight), torch.mm(dy.t(), x)]
        return results

    return run


def distance(problem: Problem, provider: Provider, inputs: Inputs) -> float:
    """Largest relative distance of a provider's output and gradients from float64's. NaN counts as infinite."""
    function = provider.offer(problem)
    assert function is not None
    exact = _torch_function(problem)
    by_row = (True, True, False, False, False, False)
    at_once = max(1, _CHUNK // max(sum(sizes) for sizes in problem.layer.products()))
    with provider.within():
        return compare.distance(
            lambda *tensors: (function(*tensors),), lambda *tensors: (exact(*tensors),),
            inputs.tensors, by_row, (inputs.gradient,), at_once,
        )  # fmt: skip


# Elements of float64 of a row that the reference holds at once.
_CHUNK = 1 << 26


# --- fusedops, and each of its candidate kernels ---------------------------------------------------------------------


def _fusedops_function(problem: Problem) -> Function:
    activation = problem.layer.activation
    if problem.layer.operator == "gated_linear":
        return lambda x, r, w, b, w2, b2: fusedops.gated_linear(x, w, w2, b, b2, activation)
    if problem.layer.operator == "mlp":
        return lambda x, r, w, b, w2, b2: fusedops.linear(fusedops.linear(x, w, b, activation), w2, b2)
    return lambda x, r, w, b, w2, b2: fusedops.linear(x, w, b, activation, residual=r)


KERNELS = ("tiled", "skinny", "persistent", "torch")


def _candidate(kernel: str, problem: Any, facts: DeviceFacts) -> Any:
    """The configuration with which a kernel serves a product; None: it does not, or not with the default tile."""
    family: Any = tuning_gated if isinstance(problem, tuning_gated.GatedProblem) else tuning
    if kernel == "torch":
        return family.TORCH if problem.torch_serves else None
    if kernel == "tiled":
        return family.tiled_config(problem, facts)
    if family is tuning_gated or problem.product != "forward":
        return None
    if kernel == "skinny":
        return skinny_config(problem, facts) if problem.rows <= tuning.SKINNY_ROWS else None
    config = replace(tuning.tiled_config(problem, facts), kernel="persistent", splits=1)
    return None if tuning.prune(config, problem, facts) else config


@contextlib.contextmanager
def launching(kernel: str | None = None) -> Iterator[dict[str, None]]:
    """Within it the linear family takes a candidate ``kernel`` wherever that serves a product; None: its own choice.

    Gives what was taken, such as ``forward torch``, in the order of the first launches.
    """
    from fusedops.linear import kernels_common, kernels_gated

    taken: dict[str, None] = {}
    modules: tuple[Any, ...] = (kernels_common, kernels_gated)
    genuine = kernels_common.resolve

    def resolve(operator: Any, problem: Any, device: torch.device) -> Any:
        config = _candidate(kernel, problem, device_facts(device)) if kernel is not None else None
        if config is None:
            config = genuine(operator, problem, device)
        taken[f"{getattr(problem, 'product', 'gated')} {config.kernel}"] = None
        return config

    for module in modules:
        module.resolve = resolve
    try:
        yield taken
    finally:
        for module in modules:
            module.resolve = genuine


def _fusedops() -> Provider:
    return Provider(_fusedops_function)


def _fusedops_with(kernel: str) -> Callable[[], Provider]:
    return lambda: Provider(_fusedops_function, kernel)


def serves(problem: Problem, provider: Provider, inputs: Inputs) -> bool:
    """Whether a candidate kernel serves any product of the problem; else it would be the default once more."""
    if provider.kernel is None:
        return True
    with launching(provider.kernel) as taken:
        run_in("both", replace(provider, kernel=None), problem, inputs)()
    return any(name.endswith(f" {provider.kernel}") for name in taken)


def choices(problem: Problem, direction: str, inputs: Inputs) -> str:
    """Which kernels fusedops takes by default, such as ``forward torch, grad_input tiled``."""
    run = run_in(direction, _fusedops(), problem, inputs)
    with launching() as taken:
        run()
    return ", ".join(taken)


# --- other libraries -------------------------------------------------------------------------------------------------


def _activate(activation: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    return ACTIVATIONS[activation] if activation else lambda z: z


def _of_parts(
    problem: Problem,
    linear: Callable[..., torch.Tensor],
    activate: Callable[[torch.Tensor], torch.Tensor],
    gate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> Function:
    """A layer of a library's linear layer and activation, and torch for the rest."""
    if problem.layer.operator == "gated_linear":
        multiply = gate or (lambda g, u: activate(g) * u)
        return lambda x, r, w, b, w2, b2: multiply(linear(x, w, b), linear(x, w2, b2))
    if problem.layer.operator == "mlp":
        return lambda x, r, w, b, w2, b2: linear(activate(linear(x, w, b)), w2, b2)

    def layer(
        x: torch.Tensor, r: torch.Tensor | None, w: torch.Tensor, b: torch.Tensor | None, *_: Any
    ) -> torch.Tensor:
        y = activate(linear(x, w, b))
        return y if r is None else y + r

    return layer


def _torch_function(problem: Problem) -> Function:
    return _of_parts(problem, F.linear, _activate(problem.layer.activation))


def _torch() -> Provider:
    return Provider(_torch_function)


def _torch_compile() -> Provider:
    # Without graphs, which save the host's time: that is not measured here, and they copy the inputs.
    return Provider(lambda problem: compare.compiled(_torch_function(problem), "max-autotune-no-cudagraphs"))


def _liger() -> Provider:
    from liger_kernel.ops.geglu import LigerGELUMulFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    gates = {"silu": LigerSiLUMulFunction.apply, "gelu_tanh": LigerGELUMulFunction.apply}

    def offer(problem: Problem) -> Function | None:
        gate = gates.get(problem.layer.activation or "")
        if problem.layer.operator != "gated_linear" or gate is None:
            return None
        return _of_parts(problem, F.linear, F.silu, gate)

    return Provider(offer)


def _flash_attn() -> Provider:
    dense = importlib.import_module("flash_attn.ops.fused_dense")
    names = {"gelu_tanh": "gelu_approx", "relu": "relu"}

    def offer(problem: Problem) -> Function | None:
        layer = problem.layer
        if layer.operator == "linear" and layer.activation is None:
            return _of_parts(problem, dense.fused_dense_func, _activate(None))
        if layer.operator != "mlp" or layer.activation not in names:
            return None
        name = names[layer.activation]
        # As its module's heuristic="auto" chooses: no fusion on sm_90.
        unfused = name == "gelu_approx" and torch.cuda.get_device_capability() == (9, 0)
        options = {"activation": name, "heuristic": -1 if unfused else 0}

        def mlp(x: torch.Tensor, r: None, w: torch.Tensor, b: Any, w2: torch.Tensor, b2: Any) -> torch.Tensor:
            result: torch.Tensor = dense.fused_mlp_func(
                x, w, w2, b, b2, save_pre_act=torch.is_grad_enabled(), **options
            )  # fmt: skip
            return result

        return mlp

    return Provider(offer)


def _apex() -> Provider:
    dense = importlib.import_module("apex.fused_dense.fused_dense")
    mlp = importlib.import_module("apex.mlp.mlp").mlp_function

    def offer(problem: Problem) -> Function | None:
        layer = problem.layer
        if layer.operator == "mlp" and layer.activation == "gelu_tanh" and layer.bias:
            return lambda x, r, w, b, w2, b2: dense.fused_dense_gelu_dense_function(x, w, b, w2, b2)
        if layer.operator != "linear" or not layer.bias:
            return None
        if layer.activation is None:
            return _of_parts(problem, dense.fused_dense_function, _activate(None))
        if layer.activation == "relu":  # its MLP ends every layer with the activation
            return _of_parts(problem, lambda x, w, b: mlp(True, 1, x, w, b), _activate(None))
        return None

    return Provider(offer)


def _transformer_engine() -> Provider:
    te = importlib.import_module("transformer_engine.pytorch")
    activations = {None: None, "gelu_tanh": te.ops.GELU, "relu": te.ops.ReLU}

    def offer(problem: Problem) -> Function | None:
        layer = problem.layer
        if layer.operator == "gated_linear" or layer.activation not in activations:
            return None
        modules = {
            sizes: te.Linear(*sizes, bias=layer.bias, params_dtype=problem.dtype) for sizes in layer.products()
        }  # fmt: skip

        def linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
            parameters = {"weight": w} if b is None else {"weight": w, "bias": b}
            result: torch.Tensor = torch.func.functional_call(modules[w.shape[1], w.shape[0]], parameters, (x,))
            return result

        kind = activations[layer.activation]
        return _of_parts(problem, linear, _activate(None) if kind is None else kind())

    return Provider(offer)


PROVIDERS: dict[str, Callable[[], Provider]] = {
    OURS: _fusedops,
    **{f"{OURS}, {kernel}": _fusedops_with(kernel) for kernel in KERNELS},
    "torch": _torch,
    "torch.compile": _torch_compile,
    "liger": _liger,
    "flash-attn": _flash_attn,
    "apex": _apex,
    "transformer-engine": _transformer_engine,
}
