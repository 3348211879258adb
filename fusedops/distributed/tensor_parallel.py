"""Tensor and sequence parallelism of fusedops' modules, as styles for torch's ``parallelize_module``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from fusedops.nn.attention import MultiheadAttention
from fusedops.nn.linear import LayerNormMLP
from fusedops.nn.mlp import MLP, GatedMLP
from fusedops.nn.norm import LayerNorm, RMSNorm
from fusedops.nn.transformer import TransformerEncoderLayer
from fusedops.runtime.checks import wrong_type, wrong_value

_ROWS, _COLUMNS, _WHOLE = Shard(0), Shard(1), Replicate()
_NORMS = (LayerNorm, RMSNorm, torch.nn.LayerNorm, torch.nn.RMSNorm)


class _Order:
    """Rows of parameters that hold several matrices, as they lie here and as they lie in a state_dict.

    There all rows of the first matrix come first; here a row, or the rows of a head, of each matrix lie together, so
    that a device's rows are rows of all. The same on any number of devices.

    Args:
        names: of the parameters, from the module.
        matrices: how many there are in one.
        groups: into how many groups each one's rows are divided.
    """

    def __init__(self, names: Sequence[str], matrices: int, groups: int) -> None:
        self.names = names
        self.matrices = matrices
        self.groups = groups

    def inside(self, tensor: torch.Tensor) -> torch.Tensor:
        """From the order of a state_dict."""
        return self._exchanged(tensor, self.matrices, self.groups)

    def outside(self, tensor: torch.Tensor) -> torch.Tensor:
        """To the order of a state_dict."""
        return self._exchanged(tensor, self.groups, self.matrices)

    @staticmethod
    def _exchanged(tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
        rows = tensor.unflatten(0, (first, second, -1)) if len(tensor) else tensor
        return rows.transpose(0, 1).reshape(tensor.shape) if len(tensor) else tensor

    def save(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        """A hook of state_dict: whole parameters in its order, which all devices gather."""
        for name in self.names:
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                whole = self.outside(value.full_tensor().detach())
                mesh = value.device_mesh
                state[prefix + name] = DTensor.from_local(whole, mesh, [_WHOLE] * mesh.ndim, run_check=False)

    def load(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        """A hook of load_state_dict, for DTensors, and for tensors that all devices have, in the state_dict's order."""
        for name, held in module.named_parameters():
            value, reordered = state.get(prefix + name), name in self.names
            if not isinstance(value, torch.Tensor) or not isinstance(held, DTensor) or value.shape != held.shape:
                continue
            if isinstance(value, DTensor) and not reordered:
                continue
            whole = (value.full_tensor() if isinstance(value, DTensor) else value).to(held.device)
            whole = self.inside(whole) if reordered else whole
            mesh = held.device_mesh
            replicated = DTensor.from_local(whole, mesh, [_WHOLE] * mesh.ndim, run_check=False)
            state[prefix + name] = replicated.redistribute(placements=held.placements)


_AS_IT_IS = _Order((), 1, 1)
_Placed = tuple[dict[str, Placement], _Order]


class _Style(ParallelStyle):
    """A style that spreads a module's parameters, and makes DTensors of its inputs and tensors of its outputs.

    Args:
        given: how an input that is a plain tensor is placed.
        wanted: how inputs are placed for the module.
        output: how its outputs are placed.
        local: whether they are handed on as plain tensors, each device's own part.
    """

    def __init__(self, given: Placement, wanted: Placement, output: Placement, local: bool) -> None:
        super().__init__()
        self.given, self.wanted, self.output, self.local = given, wanted, output, local

    def _placements(self, module: torch.nn.Module, mesh: DeviceMesh) -> _Placed:
        """Of the module's parameters (those not named are replicated), and their order."""
        raise NotImplementedError

    def _inputs(self, module: torch.nn.Module) -> frozenset[int | str]:
        """The arguments that are placed as ``given``; others are replicated."""
        return frozenset(range(2))

    def _apply(self, module: torch.nn.Module, device_mesh: DeviceMesh) -> torch.nn.Module:
        if device_mesh.ndim != 1:
            wrong_value(
                type(self).__name__, "device_mesh", "of one dimension, as mesh['tp'] of a larger one", device_mesh
            )
        placements, order = self._placements(module, device_mesh)
        for name, parameter in list(module.named_parameters()):
            if isinstance(parameter, DTensor):
                wrong_value(type(self).__name__, name, "not a DTensor yet: apply fully_shard afterwards", parameter)
            values = parameter.detach()
            if name in order.names:
                values = order.inside(values)
            values = distribute_tensor(
                values, device_mesh, [placements.get(name, _WHOLE)], src_data_rank=self.src_data_rank
            )  # fmt: skip
            path, _, leaf = name.rpartition(".")
            spread = torch.nn.Parameter(values, parameter.requires_grad)
            module.get_submodule(path).register_parameter(leaf, spread)
        # A partial: torch writes on the hook, which a method does not allow.
        module.register_state_dict_post_hook(functools.partial(order.save))
        module.register_load_state_dict_pre_hook(order.load)
        module.register_forward_pre_hook(self._before(device_mesh), with_kwargs=True)
        module.register_forward_hook(self._after)
        return module

    def _before(self, mesh: DeviceMesh) -> Callable[..., Any]:
        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            places = self._inputs(module)
            seen: dict[int, torch.Tensor] = {}  # what is one object stays one

            def placed(place: int | str, value: Any) -> Any:
                if not isinstance(value, torch.Tensor):
                    return value
                if value.is_nested:
                    wrong_value(type(module).__name__, "input", "no nested tensor where it is parallelized", value)
                if id(value) not in seen:
                    given, wanted = (self.given, self.wanted) if place in places else (_WHOLE, _WHOLE)
                    made = value
                    if not isinstance(value, DTensor):
                        made = DTensor.from_local(value, mesh, [given], run_check=False)
                    assert isinstance(made, DTensor)
                    seen[id(value)] = made.redistribute(placements=[wanted])
                return seen[id(value)]

            return tuple(placed(i, a) for i, a in enumerate(args)), {n: placed(n, a) for n, a in kwargs.items()}

        return before

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(self._after(module, args, value) for value in output)
        if not isinstance(output, DTensor):
            return output
        output = output.redistribute(placements=[self.output])
        return output.to_local() if self.local else output


class TensorParallel(_Style):
    """Tensor parallelism of one of fusedops.nn's MLP, GatedMLP, LayerNormMLP and MultiheadAttention, as a whole.

    The layers into the module are sharded by their rows (hidden features, or heads), the one out of it by its columns
    (Shoeybi et al. 2019, "Megatron-LM", section 3): one sum over the devices in the forward and one in the backward.
    The operators stay fused. Parameters become DTensors; those that hold several matrices (``in_proj_weight``,
    ``gate_up_proj.weight``) are reordered, so that each device has its part of all: optimizers see them so.
    ``state_dict()``, on all devices at once, gives those whole and in their usual order, and ``load_state_dict`` takes
    them so; it also takes plain tensors, if all devices have them. (An optimizer's state of them is in this order: it
    can be loaded on another number of devices, but not into a module that is not parallelized.)

    For :func:`torch.distributed.tensor.parallel.parallelize_module`; :func:`tensor_parallel_plan` lists the styles of
    a model. The single linear layers (and fusedops.nn.Linear) take torch's ColwiseParallel and RowwiseParallel.

    Args:
        input_layouts: how a plain tensor given to the module is placed: Replicate(), or with sequence parallelism
            Shard of the sequence's dimension; it is then gathered.
        output_layouts: how the output is placed: Replicate(), summed; or Shard of the sequence's dimension: the sum
            is scattered.
        use_local_output: give a plain tensor, each device's part, rather than a DTensor.

    Raises:
        TypeError: the module is none of these.
        ValueError: its heads or hidden features cannot be divided among the devices.

    Examples:
        >>> import torch, fusedops
        >>> import torch.distributed as dist
        >>> from torch.distributed.tensor.parallel import parallelize_module
        >>> from fusedops.distributed import TensorParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mlp = fusedops.nn.MLP(8, 32)
        >>> mlp = parallelize_module(mlp, dist.init_device_mesh("cpu", (1,)), TensorParallel())
        >>> mlp(torch.randn(2, 8)).shape, mlp.fc1.weight.placements
        (torch.Size([2, 8]), (Shard(dim=0),))
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        given, output = (_WHOLE if p is None else p for p in (input_layouts, output_layouts))
        for name, value in (("input_layouts", given), ("output_layouts", output)):
            if not isinstance(value, (Shard, Replicate)):
                wrong_type("TensorParallel", name, "Replicate(), Shard(dim) or None", value)
        super().__init__(given, _WHOLE, output, use_local_output)

    def _placements(self, module: torch.nn.Module, mesh: DeviceMesh) -> _Placed:
        for kind, placements in _PLACEMENTS.items():
            if isinstance(module, kind):
                return placements(module, mesh.size())
        names = ", ".join(kind.__name__ for kind in _PLACEMENTS)
        return wrong_type("TensorParallel", "module", f"one of fusedops.nn's {names}", module)

    def _inputs(self, module: torch.nn.Module) -> frozenset[int | str]:
        if isinstance(module, MultiheadAttention):
            return frozenset((0, 1, 2, "query", "key", "value"))
        return frozenset((0, "input"))


def _check_divides(module: torch.nn.Module, what: str, number: int, devices: int) -> None:
    if number % devices:
        wrong_value("TensorParallel", "module", f"of a number of {what} that {devices} devices divide", number)


def _mlp(module: Any, devices: int) -> _Placed:
    _check_divides(module, "hidden features", module.hidden_features, devices)
    return {"fc1.weight": _ROWS, "fc1.bias": _ROWS, "fc2.weight": _COLUMNS}, _AS_IT_IS


def _layer_norm_mlp(module: Any, devices: int) -> _Placed:
    _check_divides(module, "hidden features", module.ffn_hidden_size, devices)
    return {"fc1_weight": _ROWS, "fc1_bias": _ROWS, "fc2_weight": _COLUMNS}, _AS_IT_IS


def _gated_mlp(module: Any, devices: int) -> _Placed:
    _check_divides(module, "hidden features", module.hidden_features, devices)
    layers = ("gate_up_proj",) if module.packed else ("gate_proj", "up_proj")
    placements: dict[str, Placement] = {f"{layer}.{name}": _ROWS for layer in layers for name in ("weight", "bias")}
    placements["down_proj.weight"] = _COLUMNS
    if not module.packed:
        return placements, _AS_IT_IS
    module.interleaved = True
    names = [name for name, _ in module.named_parameters() if name.startswith("gate_up_proj.")]
    return placements, _Order(names, 2, module.hidden_features)


def _attention(module: Any, devices: int) -> _Placed:
    if hasattr(module, "fused_original"):
        takes = "fusedops.nn's own (a patched one would be left with reordered parameters by unpatch)"
        wrong_value("TensorParallel", "module", takes, module)
    _check_divides(module, "heads", module.num_heads, devices)
    module.by_head = True
    names = ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight")
    placements: dict[str, Placement] = dict.fromkeys(names, _ROWS)
    placements |= {"bias_k": Shard(2), "bias_v": Shard(2), "out_proj.weight": _COLUMNS}
    packed = [name for name, _ in module.named_parameters() if name in names[:2]]
    return placements, _Order(packed, 3, module.num_heads)


_PLACEMENTS: dict[type, Callable[[Any, int], _Placed]] = {
    MLP: _mlp,
    GatedMLP: _gated_mlp,
    LayerNormMLP: _layer_norm_mlp,
    MultiheadAttention: _attention,
}


class SequenceParallelNorm(_Style):
    """Sequence parallelism of a norm: each device normalises its part of the sequence, without communication.

    As torch's :class:`~torch.distributed.tensor.parallel.SequenceParallel`, which fusedops.nn's norms of one input take
    too, also for AddLayerNorm and AddRMSNorm. The parameters are replicated; each device's gradient of them is its
    term of the sum, Partial, as with torch's style.

    Args:
        sequence_dim: the dimension of the inputs that is sharded.
        use_local_output: give plain tensors, each device's part, rather than DTensors.

    Raises:
        TypeError: an argument has the wrong type; or the style is applied to what is no norm.

    Examples:
        >>> from fusedops.distributed import SequenceParallelNorm
        >>> plan = {"norm": SequenceParallelNorm()}  # for parallelize_module(model, mesh, plan)
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        if not isinstance(sequence_dim, int) or isinstance(sequence_dim, bool):
            wrong_type("SequenceParallelNorm", "sequence_dim", "an int", sequence_dim)
        shard = Shard(sequence_dim)
        super().__init__(shard, shard, shard, use_local_output)

    def _placements(self, module: torch.nn.Module, mesh: DeviceMesh) -> _Placed:
        if not isinstance(module, _NORMS):
            wrong_type("SequenceParallelNorm", "module", "a layer norm or an RMS norm", module)
        return {}, _AS_IT_IS

    def _inputs(self, module: torch.nn.Module) -> frozenset[int | str]:
        return frozenset((0, 1, "input", "x", "residual"))


def tensor_parallel_plan(
    module: torch.nn.Module, *, sequence_parallel: bool = False, sequence_dim: int = 1
) -> dict[str, ParallelStyle]:
    """The styles of all parts of a model that are fusedops' own, for ``parallelize_module(module, mesh, plan)``.

    :class:`TensorParallel` for MLP, GatedMLP, LayerNormMLP and MultiheadAttention; of a TransformerEncoderLayer also
    ColwiseParallel and RowwiseParallel for its two linear layers. All take and give plain tensors, between which the
    model's own sums and norms stay as they are. Other modules are not named: add them to the dictionary.

    Args:
        module: the model; its parts are named from it, itself is "".
        sequence_parallel: between those parts each device has its part of the sequence: their inputs are gathered and
            their outputs scattered, and norms (:class:`torch.nn.LayerNorm`, RMSNorm and fusedops.nn's) have
            :class:`SequenceParallelNorm`. The model's input must be sharded so.
        sequence_dim: the sequence's dimension.

    Returns:
        A style for each part, by its name: an ordinary dictionary, to be changed or added to.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: it has no such parts.

    Examples:
        >>> import torch, fusedops
        >>> from fusedops.distributed import tensor_parallel_plan
        >>> block = torch.nn.Sequential(fusedops.nn.RMSNorm(8), fusedops.nn.GatedMLP(8, 32))
        >>> list(tensor_parallel_plan(block)), list(tensor_parallel_plan(block, sequence_parallel=True))
        (['1'], ['0', '1'])
    """
    if not isinstance(module, torch.nn.Module):
        wrong_type("tensor_parallel_plan", "module", "a torch.nn.Module", module)
    layout = Shard(sequence_dim) if sequence_parallel else _WHOLE
    plan: dict[str, ParallelStyle] = {}
    for name, part in module.named_modules():
        if any(name.startswith(f"{path}." if path else "") for path in plan):
            continue
        if isinstance(part, tuple(_PLACEMENTS)):
            plan[name] = TensorParallel(input_layouts=layout, output_layouts=layout)
        elif sequence_parallel and isinstance(part, _NORMS):
            plan[name] = SequenceParallelNorm(sequence_dim=sequence_dim)
        if isinstance(part, TransformerEncoderLayer):
            at = f"{name}." if name else ""
            plan[f"{at}linear1"] = ColwiseParallel(input_layouts=layout)
            plan[f"{at}linear2"] = RowwiseParallel(output_layouts=layout)
    if not plan:
        known = ", ".join(sorted(kind.__name__ for kind in (*_PLACEMENTS, TransformerEncoderLayer)))
        raise ValueError(
            f"tensor_parallel_plan: module must have parts that are modules of fusedops.nn ({known}); got a"
            f" {type(module).__name__} without any. (For other modules, patched ones too, write a plan of torch's"
            " ColwiseParallel and RowwiseParallel, or take the model's own.)"
        )
    return plan
