"""Finding out by experiment what a module of an unknown class computes: layer, RMS or group norm, or something else.

A *probe* is a stand-in for the module: an object of its class with the plain attributes that its forward reads, and
random parameters on the CPU. Its own forward runs on random inputs, and is compared, values and gradients, with what a
norm would give. What holds for the probe holds for every module of that class with the same attributes.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fusedops.norm import reference
from fusedops.patching.undisturbed import undisturbed

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_FLOAT32_EPS = torch.finfo(torch.float32).eps
_MISSING = object()

# What nn.Module itself keeps on every module.
_TORCH_NAMES = frozenset(vars(nn.Module()))

# Sizes between the batch and the normalised dimension, by how many there are.
_BETWEEN: tuple[tuple[int, ...], ...] = ((), (2,), (2, 3), (1, 2, 3))
_FREE_WIDTHS = (24, 40)

# How many sets of attributes of one class are tried, so that one that differs in every layer cannot take minutes.
_MOST_VARIANTS = 32


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A norm that the module may be.

    Attributes:
        kind: "layer", "rms" or "group".
        weight, bias: names of parameters, "" for none.
        offset: added to the weight.
        eps: its value in the experiment. None: the machine epsilon of float32.
        eps_name: the attribute it is read from, "" for a constant.
        groups: how many, for a group norm.
    """

    kind: str
    weight: str
    bias: str
    offset: float = 0.0
    eps: float | None = None
    eps_name: str = ""
    groups: int = 0

    def __call__(self, x: torch.Tensor, dim: int, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        weight, bias = parameters.get(self.weight), parameters.get(self.bias)
        eps = _FLOAT32_EPS if self.eps is None else self.eps
        if self.kind == "group":
            return reference.group_norm(x, weight, bias, self.groups, eps, x.dtype)[0]
        rows = x.movedim(dim, -1)
        result = reference.norm(rows, None, weight, bias, None, 1, eps, self.offset, self.kind, 0.0, x.dtype)[0]
        return result.movedim(-1, dim)

    @property
    def function(self) -> str:
        name = f"{self.kind}_norm"
        if not self.offset:
            return name
        return f"{name}(weight_offset={self.offset})" if self.kind == "rms" else f"{name}(weight + {self.offset})"


@dataclass(frozen=True, slots=True)
class Subject:
    """What the result of a module can depend on besides its input and the values of its parameters.

    Attributes:
        kind: its class.
        attributes: the plain attributes that its forward may read.
        parameters: the size of each 1-D parameter, None where it is absent.
    """

    kind: type[nn.Module]
    attributes: dict[str, Any]
    parameters: dict[str, int | None]

    def probe(
        self, device: str = "cpu", dtype: torch.dtype = torch.float32, changed: dict[str, Any] | None = None
    ) -> nn.Module:
        """A module of the class that has nothing but these attributes, and random parameters."""
        module: Any = object.__new__(self.kind)
        nn.Module.__init__(module)
        for name, value in {**self.attributes, **(changed or {})}.items():
            module.__dict__[name] = list(value) if isinstance(value, list) else value
        generator = torch.Generator("cpu").manual_seed(1)
        for name, size in self.parameters.items():
            parameter = None
            if size is not None:
                if device == "cpu":
                    values = torch.randn(size, generator=generator, device="cpu").to(dtype)
                else:  # for tensors without memory, of a device that need not exist
                    values = torch.empty(size, device=device, dtype=dtype)
                parameter = nn.Parameter(values)
            module._parameters[name] = parameter
        return module

    def same(self, module: Any, but: str = "") -> bool:
        """Whether a module has these attributes and such parameters."""
        for name, value in self.attributes.items():
            if name != but:
                now = getattr(module, name, _MISSING)
                if type(now) is not type(value) or now != value:
                    return False
        for name, size in self.parameters.items():
            parameter: Any = getattr(module, name, None)
            if (parameter is None) != (size is None):
                return False
            if size is not None and (parameter.dim() != 1 or parameter.shape[0] != size):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Proof:
    """What experiments have shown about a subject.

    Attributes:
        index: its place among all proofs.
        argument: the name of the tensor that its forward takes.
        layouts: for each number of dimensions that an input may have, which of them is normalised, and the order of
            the result's memory: "input" (that of the input), "contiguous", or "innermost" (with the normalised
            dimension as the innermost).
        dtypes: the result's dtype by (input's dtype, parameters' dtype), under autocast by (device, autocast's dtype,
            input's, parameters'); None where the module has to run as it is.
        width: the only size that is taken, of a module without parameters; None: any.
    """

    subject: Subject
    norm: Hypothesis
    index: int
    argument: str
    layouts: dict[int, tuple[int, str]]
    dtypes: dict[tuple[Any, ...], torch.dtype | None]
    width: int | None

    @property
    def calls(self) -> str:
        channels = self.norm.kind != "group" and all(dim == 1 for rank, (dim, _) in self.layouts.items() if rank > 2)
        first = " (channels first)" if channels and max(self.layouts) > 2 else ""
        return f"fusedops.{self.norm.function}{first}"

    def holds(self, module: nn.Module) -> bool:
        return self.subject.same(module, but=self.norm.eps_name)


@dataclass(frozen=True, slots=True)
class _Known:
    proofs: list[Proof] = field(default_factory=list)
    refusals: list[tuple[Subject, str]] = field(default_factory=list)


_known: dict[type[nn.Module], _Known] = {}
_proofs: list[Proof] = []


def proofs_of(kind: type[nn.Module]) -> list[Proof]:
    """The proofs about a class, the same list always; experiments add to it."""
    return _known.setdefault(kind, _Known()).proofs


def prove(kind: type[nn.Module], module: nn.Module) -> Proof | str:
    """What a module of this class computes, tried out or remembered; a text that says why it is not known to be a norm.

    Args:
        kind: the module's own class (not the fused one).
    """
    known = _known.setdefault(kind, _Known())
    for proof in known.proofs:
        if proof.holds(module):
            return proof
    for subject, reason in known.refusals:
        if subject.same(module):
            return reason
    if len(known.proofs) + len(known.refusals) >= _MOST_VARIANTS:
        return f"more than {_MOST_VARIANTS} modules of its class that differ in the attributes their forward reads"
    found = subject_of(kind, module)
    if isinstance(found, str):
        return found
    with undisturbed():
        result = _Experiment(found).run()
    if isinstance(result, str):
        known.refusals.append((found, result))
    else:
        known.proofs.append(result)
    return result


def subject_of(kind: type[nn.Module], module: nn.Module) -> Subject | str:
    """What the module's result may depend on; a text if that is more than plain attributes and 1-D parameters."""
    if module._modules:
        return f"it has parts of its own ({', '.join(module._modules)})"
    if module._buffers:
        return f"it has buffers ({', '.join(module._buffers)})"
    parameters: dict[str, int | None] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and nn.parameter.is_lazy(parameter):
            return f"its {name} has no size yet"
        if parameter is not None and parameter.dim() != 1:
            return f"its {name} has {parameter.dim()} dimensions"
        parameters[name] = None if parameter is None else parameter.shape[0]
    sizes = [size for size in parameters.values() if size is not None]
    if len(sizes) > 2 or len(set(sizes)) > 1:
        return f"it has {len(sizes)} parameters of sizes {', '.join(map(str, sizes))}"
    if argument_of(kind) is None:
        return "its forward does not take one tensor"
    attributes = {}
    for name in sorted(read_code(kind).names - _TORCH_NAMES - parameters.keys()):
        value = module.__dict__.get(name, _MISSING)
        own = value is not _MISSING
        if not own:
            value = next((vars(base)[name] for base in _own_bases(kind) if name in vars(base)), _MISSING)
        if _is_plain(value):
            attributes[name] = list(value) if isinstance(value, list) else value
        elif own:
            return f"its forward may read its {name}, a {type(value).__name__}"
    return Subject(kind, attributes, parameters)


def argument_of(kind: type[nn.Module]) -> str | None:
    """Name of the one argument that a class' forward has to be given; None if that is not one."""
    try:
        _, *parameters = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return None
    return first.name if needed in ([first.name], []) else None


@dataclass(frozen=True, slots=True)
class _Code:
    """The names that a forward reads, whether as attributes or as texts, and its floating-point constants."""

    names: frozenset[str]
    floats: frozenset[float]


_codes: dict[type[nn.Module], _Code] = {}


def read_code(kind: type[nn.Module]) -> _Code:
    """Read the forward of a class and the methods of the class that it uses, those of its bases too."""
    if kind not in _codes:
        _codes[kind] = _read_code(kind)
    return _codes[kind]


def _read_code(kind: type[nn.Module]) -> _Code:
    names: set[str] = set()
    floats: set[float] = set()
    seen: set[int] = set()
    todo: list[Any] = [kind.forward]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, CodeType):
            texts = {constant for constant in item.co_consts if isinstance(constant, str)}
            new = (texts | {*item.co_names}) - names
            names |= new
            floats |= {constant for constant in item.co_consts if isinstance(constant, float)}
            todo += [constant for constant in item.co_consts if isinstance(constant, CodeType)]
            todo += [vars(base)[name] for name in new for base in _own_bases(kind) if name in vars(base)]
        elif isinstance(item, FunctionType):
            defaults = [*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
            floats |= {value for value in defaults if isinstance(value, float)}
            todo.append(item.__code__)
            for cell in item.__closure__ or ():
                with contextlib.suppress(ValueError):  # an empty cell
                    todo.append(cell.cell_contents)
            todo.append(getattr(item, "__wrapped__", None))
        elif isinstance(item, (staticmethod, classmethod)):
            todo.append(item.__func__)
        elif isinstance(item, property):
            todo.append(item.fget)
    return _Code(frozenset(names), frozenset(floats))


def _own_bases(kind: type) -> Iterator[type]:
    for base in kind.__mro__:
        if base is nn.Module:
            return
        yield base


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


class _RefusedError(Exception):
    """The module is no norm that fusedops has."""


@dataclass(slots=True)
class _Place:
    """How inputs are shaped: so many dimensions, and which of them is normalised."""

    rank: int
    dim: int

    def shape(self, rows: int, width: int) -> tuple[int, ...]:
        between = _BETWEEN[self.rank - 2]
        return (rows, width, *between) if self.dim == 1 else (rows, *between, width)


_PLACES = [_Place(rank, -1) for rank in (2, 3, 4, 5)] + [_Place(rank, 1) for rank in (4, 3, 5)]
# Layers of (N, C, *): groups of channels.
_GROUP_PLACES = [_Place(rank, 1) for rank in (4, 3, 5, 2)]


class _Experiment:
    """The experiments with one subject."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.present = [name for name, size in subject.parameters.items() if size is not None]
        self.nearest = (math.inf, "")
        self.raised = ""
        self.parameters = dict(subject.probe().named_parameters())

    def run(self) -> Proof | str:
        try:
            for width in self._widths():
                for place in _GROUP_PLACES if issubclass(self.subject.kind, nn.GroupNorm) else _PLACES:
                    norm = self._search(place, width)
                    if norm is not None:
                        return self._prove(norm, place, width)
        except _RefusedError as refused:
            return str(refused)
        except Exception as error:  # whatever a class that is no norm does
            return _raised(error)
        if not self.nearest[1]:
            return self.raised
        distance, function = self.nearest
        kinds = " and ".join(dict.fromkeys(norm.kind for norm in self._hypotheses()))
        return (
            f"it computes no norm that fusedops has: compared with {kinds} norms on random inputs, the nearest is"
            f" {function}, off by {distance:.2g} times the largest value of a row"
        )

    def _widths(self) -> list[int]:
        """Sizes of the normalised dimension to try."""
        if self.present:
            size = self.subject.parameters[self.present[0]]
            return [size] if size else []
        # Without parameters an attribute may hold it, such as normalized_shape = (64,).
        sizes = []
        for value in self.subject.attributes.values():
            value = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
            if type(value) is int and value > 1:
                sizes.append(value)
        return [*sizes, _FREE_WIDTHS[0]]

    def _groups(self) -> list[int]:
        """Numbers of groups that the class may divide channels into; none for one that is no group norm."""
        named = [v for n, v in self.subject.attributes.items() if type(v) is int and v > 0 and "group" in n.lower()]
        return named or [1] * issubclass(self.subject.kind, nn.GroupNorm)

    def _hypotheses(self) -> list[Hypothesis]:
        named = [
            (name, float(value))
            for name, value in self.subject.attributes.items()
            if isinstance(value, float) or ("eps" in name.lower() and type(value) is int)
        ]
        fixed = [("", value) for value in sorted(read_code(self.subject.kind).floats) if 0 <= value < 1]
        # torch's own defaults are nowhere in the class' code.
        epsilons: list[tuple[str, float | None]] = [*named, *fixed, ("", 1e-5), ("", None)]
        roles = [(first, second) for first in self.present for second in self.present if first != second]
        roles = roles or [(name, "") for name in self.present] or [("", "")]
        kinds = [("group", 0.0, groups) for groups in dict.fromkeys(self._groups())]
        if not issubclass(self.subject.kind, nn.GroupNorm):
            kinds += [
                (kind, offset, 0) for kind in ("layer", "rms") for offset in ((0.0, 1.0)[: 1 + bool(self.present)])
            ]
        return [
            Hypothesis(kind, weight, bias, offset, eps, name, groups)
            for kind, offset, groups in kinds
            for weight, bias in roles
            for name, eps in dict.fromkeys(epsilons)
            if eps is not None or kind == "rms"
        ]

    def _search(self, place: _Place, width: int) -> Hypothesis | None:
        """The norm that gives what the probe gives on inputs of very different sizes."""
        hypotheses = self._hypotheses()
        tiny = {norm.eps for norm in hypotheses if norm.eps and 1e-16 < norm.eps < 1e-2}
        # Mean and spread of the rows. Among the tiny ones eps makes the result.
        rows = [(0.0, 1.0), (8.0, 1.0), (0.0, 1e-3), (0.0, 1e3), (0.0, 1e6), (0.0, 0.0)]
        x = _random(place, width, [*rows, *[(0.0, math.sqrt(eps)) for eps in sorted(tiny)[:8]]])
        try:
            y = self._steady(x)
        except _RefusedError:
            raise
        except Exception as error:
            self.raised = self.raised or _raised(error)
            return None
        if y.shape != x.shape or y.dtype != x.dtype:
            self.raised = self.raised or f"its forward made {_told(y)} of {_told(x)}"
            return None
        fits = []
        for norm in hypotheses:
            if norm.kind == "group" and (place.dim != 1 or width % norm.groups):
                continue
            distance, fit = self._compare(norm, place.dim, x, y)
            if fit:
                fits.append(norm)
            elif distance < self.nearest[0]:
                self.nearest = distance, norm.function
        for norm in fits:
            if not norm.eps_name:
                return norm
            # Is it this attribute? Another value of it has to change the result just so.
            other = 0.37 * norm.eps + 1e-4 if norm.eps is not None else None
            changed = Hypothesis(norm.kind, norm.weight, norm.bias, norm.offset, other, norm.eps_name, norm.groups)
            with contextlib.suppress(Exception):
                y = _call(self.subject.probe(changed={norm.eps_name: other}), x)
                if self._compare(changed, place.dim, x, y)[1]:
                    return norm
        return None

    def _compare(self, norm: Hypothesis, dim: int, x: torch.Tensor, y: torch.Tensor) -> tuple[float, bool]:
        """The largest difference, relative to the largest value of its row, and whether rounding explains it."""
        plain = norm(x, dim, {name: p.detach() for name, p in self.parameters.items()})
        distance, _ = _close(y, plain, plain)
        if distance > 0.01:
            return distance, False
        exact = norm(x.double(), dim, {name: p.detach().double() for name, p in self.parameters.items()})
        return _close(y, exact, plain)

    def _prove(self, norm: Hypothesis, place: _Place, width: int) -> Proof:
        layouts: dict[int, tuple[int, str]] = {}
        if norm.kind == "group":
            places = _GROUP_PLACES
        else:
            places = [p for p in _PLACES if p.dim == -1] + [p for p in _PLACES if p.dim == 1]
        twice = set()
        for other in places:
            order = self._order(norm, other, width, needed=other is place)
            if order:
                twice |= {other.rank} & layouts.keys()
                layouts[other.rank] = other.dim, order
        if place.rank not in layouts:
            raise _RefusedError("the order of its result's memory follows no rule known here")
        if place.rank in twice:
            raise _RefusedError("whether it normalises the last dimension or the channels depends on its input's shape")
        for rank in twice:
            del layouts[rank]
        self._check_nan(norm, place, width)
        self._check_gradients(norm, place, width)
        dtypes = self._dtypes(norm, place, width)
        free = not self.present and all(self._agrees(norm, place, size) for size in _FREE_WIDTHS)
        argument = argument_of(self.subject.kind) or ""
        index = len(_proofs)
        only = None if self.present or free else width
        _proofs.append(Proof(self.subject, norm, index, argument, layouts, dtypes, only))
        return _proofs[index]

    def _order(self, norm: Hypothesis, place: _Place, width: int, *, needed: bool) -> str:
        """How the result of such inputs lies in memory, "" where they are not taken or not normalised."""
        x = _random(place, width, _few(norm))
        # Other strides: the first two dimensions exchanged in memory; all of them in reverse.
        turned = x.transpose(0, 1).contiguous().transpose(0, 1)
        backwards = x.permute(*reversed(range(place.rank))).contiguous().permute(*reversed(range(place.rank)))
        orders, first = {"input", "contiguous", "innermost"}, x
        for given in (x, turned, backwards):
            try:
                y = self._steady(given)
            except _RefusedError:
                if needed:
                    raise
                return ""
            except Exception:
                return ""
            if y.shape != x.shape or y.dtype != x.dtype:
                return ""
            if given is x:
                first = y
                if not self._compare(norm, place.dim, x, y)[1]:
                    return ""
            elif _relative(y, first) > 1e-4:
                return ""
            dim = place.dim % place.rank
            orders = {o for o in orders if memory_order(y) == _visible(y, result_order(o, given, dim))}
        return next((order for order in ("input", "contiguous", "innermost") if order in orders), "")

    def _steady(self, x: torch.Tensor) -> torch.Tensor:
        """The result, which has to be the same in training and evaluation, without gradients, and at every call."""
        module = self.subject.probe()
        before, x_before = dict(module.__dict__), x.clone()
        results = []
        for training in (True, True, False):
            module.training = training
            results.append(_call(module, x))
        module.training = True
        with torch.no_grad():
            results.append(_call(module, x))
        if not torch.equal(x, x_before):
            raise _RefusedError("its forward writes to its input")
        if not _same_state(before, module.__dict__):
            raise _RefusedError("its forward changes the module")
        if not torch.equal(results[0], results[1]):
            raise _RefusedError("its forward gives another result at every call")
        if not torch.equal(results[0], results[2]):
            raise _RefusedError("its forward gives another result in training than in evaluation")
        if not torch.equal(results[0], results[3]):
            raise _RefusedError("its forward gives another result where no gradients are wanted")
        return results[0]

    def _agrees(self, norm: Hypothesis, place: _Place, width: int) -> bool:
        x = _random(place, width, _few(norm))
        try:
            return self._compare(norm, place.dim, x, _call(self.subject.probe(), x))[1]
        except Exception:
            return False

    def _check_nan(self, norm: Hypothesis, place: _Place, width: int) -> None:
        for value in (math.nan, math.inf):
            x = _random(place, width, _few(norm))
            x.view(-1)[0] = value
            expected = norm(x, place.dim, {name: p.detach() for name, p in self.parameters.items()})
            if not torch.equal(_call(self.subject.probe(), x).isfinite(), expected.isfinite()):
                raise _RefusedError(f"its forward makes other of {value} than {norm.function} does")

    def _check_gradients(self, norm: Hypothesis, place: _Place, width: int) -> None:
        x = _random(place, width, _few(norm))
        grad = torch.randn(x.shape, generator=torch.Generator("cpu").manual_seed(2), device="cpu")
        module = self.subject.probe()
        names = ["input", *self.present]

        def gradients(dtype: torch.dtype, own: bool) -> tuple[torch.Tensor | None, ...]:
            leaves = [x.to(dtype), *(p.detach().to(dtype) for p in self.parameters.values())]
            leaves = [leaf.clone().requires_grad_() for leaf in leaves]
            if own:
                leaves[1:] = module.parameters()
                y = _call(module, leaves[0])
            else:
                y = norm(leaves[0], place.dim, dict(zip(names[1:], leaves[1:], strict=True)))
            if not y.requires_grad:
                raise _RefusedError("its result has no gradient")
            return torch.autograd.grad(y, leaves, grad.to(dtype), allow_unused=True)

        found = gradients(torch.float32, own=True)
        exact, plain = gradients(torch.float64, own=False), gradients(torch.float32, own=False)
        for name, mine, e, p in zip(names, found, exact, plain, strict=True):
            assert e is not None
            assert p is not None
            if mine is None:
                raise _RefusedError(f"its result has no gradient with respect to its {name}")
            mine, e, p = (t if name == "input" else t[None] for t in (mine, e, p))
            distance, fit = _close(mine, e, p)
            if not fit:
                raise _RefusedError(
                    f"its values are {norm.function}'s, but the gradient of its {name} is off by {distance:.2g} times"
                    " the largest value of a row"
                )

    def _dtypes(self, norm: Hypothesis, place: _Place, width: int) -> dict[tuple[Any, ...], torch.dtype | None]:
        found: dict[tuple[Any, ...], torch.dtype | None] = {}
        x = _random(place, width, [(0.0, 1.0), (0.5, 1.0), (0.0, 2.0)])
        for x_dtype in _DTYPES:
            for dtype in _DTYPES if self.present else (None,):
                module = self.subject.probe(dtype=dtype or torch.float32)
                given = x.to(x_dtype)
                try:
                    y = _call(module, given)
                except Exception:
                    found[x_dtype, dtype] = None
                    continue
                exact = norm(given.double(), place.dim, {n: p.detach().double() for n, p in module.named_parameters()})
                coarsest = max(torch.finfo(d).eps for d in (x_dtype, y.dtype, dtype or x_dtype))
                # Rounded in between as well: some ulp.
                fit = y.dtype in _DTYPES and _relative(y, exact) <= 4 * coarsest
                found[x_dtype, dtype] = y.dtype if fit else None
        return found


def dtype_of(index: int, device: str, autocast: torch.dtype, x: torch.dtype, weight: torch.dtype | None) -> Any:
    """The dtype that a proven module gives under autocast: its forward is run on tensors without memory.

    Args:
        index: of the proof.
        device: type of the device. Nothing runs there; it need not exist.
        autocast: the dtype that autocast casts to.

    Returns:
        The dtype, or None where that is not to be found out.
    """
    proof = _proofs[index]
    key = device, autocast, x, weight
    if key not in proof.dtypes:
        proof.dtypes[key] = _autocast_dtype(proof, *key)
    return proof.dtypes[key]


# While torch.compile traces, it is called, not traced. (torch.compiler.assume_constant_result would import the tracer.)
dtype_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _autocast_dtype(
    proof: Proof, device: str, autocast: torch.dtype, x: torch.dtype, weight: torch.dtype | None
) -> torch.dtype | None:
    rank, (dim, _) = next(iter(proof.layouts.items()))
    sizes = [size for size in proof.subject.parameters.values() if size is not None]
    shape = _Place(rank, dim).shape(2, sizes[0] if sizes else proof.width or _FREE_WIDTHS[0])
    enabled, before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    try:
        with undisturbed(), torch.no_grad(), FakeTensorMode():
            module = proof.subject.probe(device, weight or torch.float32)
            given = torch.empty(shape, dtype=x, device=device)
            # Not torch.autocast, which refuses for devices that this build of torch does not have.
            torch.set_autocast_enabled(device, True)
            torch.set_autocast_dtype(device, autocast)
            result = _call(module, given).dtype
    except Exception:
        return None
    finally:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, before)
    return result if result in _DTYPES else None


def memory_order(x: torch.Tensor) -> list[int]:
    """The dimensions of more than one element, outermost in memory first."""
    return _visible(x, result_order("input", x, 0))


def result_order(order: str, x: torch.Tensor, dim: int) -> list[int]:
    """All dimensions in the order in which a result's memory has them, outermost first; see :class:`Proof`."""
    dims = list(range(x.dim()))
    if order == "input" and not x.is_contiguous():
        strides = x.stride()
        dims.sort(key=lambda d: -strides[d])
    elif order == "innermost":
        dims.append(dims.pop(dim))
    return dims


def _visible(x: torch.Tensor, dims: list[int]) -> list[int]:
    return [d for d in dims if x.shape[d] > 1]


def _few(norm: Hypothesis) -> list[tuple[float, float]]:
    return [(0.5, 1.0), (8.0, 1.0), (0.0, math.sqrt(norm.eps or _FLOAT32_EPS))]


def _random(place: _Place, width: int, rows: list[tuple[float, float]]) -> torch.Tensor:
    """Random numbers; each of the rows has a mean and a spread."""
    generator = torch.Generator("cpu").manual_seed(place.rank)
    x = torch.randn(place.shape(len(rows), width), generator=generator, device="cpu", dtype=torch.float32)
    means, spreads = (torch.tensor(values).view(-1, *[1] * (place.rank - 1)) for values in zip(*rows, strict=True))
    return x * spreads + means


def _call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result = type(module).forward(module, x)
    if not isinstance(result, torch.Tensor):
        raise _RefusedError(f"its forward returns a {type(result).__name__}")
    return result


def _same_state(before: dict[str, Any], after: dict[str, Any]) -> bool:
    return before.keys() == after.keys() and all(after[n] is v or after[n] == v for n, v in before.items())


def _close(found: torch.Tensor, exact: torch.Tensor, plain: torch.Tensor) -> tuple[float, bool]:
    """The largest difference, relative to its row's largest value, and whether all are about as small as plain's."""
    equal = (found == exact) | (found.isnan() & exact.isnan())
    differences = (torch.where(equal, 0.0, t - exact) for t in (found, plain))
    values, error, rounding = (t.flatten(1).abs().amax(1) for t in (exact.nan_to_num(0.0), *differences))
    allowed = 8 * rounding + 8 * _FLOAT32_EPS * values
    # A row of zeros has no size of its own.
    relative = (error / values.clamp_min(0.01 * values.max().item() + 1e-30)).max().item()
    return (relative if math.isfinite(relative) else math.inf), bool((error <= allowed).all())


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).abs().max() / exact.abs().max().clamp_min(1e-30))


def _raised(error: Exception) -> str:
    text = str(error).strip().split("\n")[0][:100]
    return f"its forward raised {type(error).__name__} on a random input: {text}"


def _told(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
