"""Trials of the linear family launch what they are told, compute what they should, and notice what is wrong."""

from __future__ import annotations

import importlib.util
import itertools
import random
from dataclasses import replace

import pytest
import torch

import fusedops
from fusedops.autotune.operator import operator_named
from fusedops.autotune.resolve import collecting, forget, using
from fusedops.autotune.trial import make_trial
from fusedops.linear import trials, trials_common, trials_gated, trials_grouped, trials_quantized
from fusedops.linear.trials_common import sampled_rows
from fusedops.linear.tuning import LINEAR, TORCH, LinearConfig, LinearProblem
from fusedops.linear.tuning_gated import GATED_LINEAR, GatedProblem
from fusedops.linear.tuning_grouped import GROUPED_LINEAR, GroupedProblem
from fusedops.linear.tuning_quantized import FP8_LINEAR, QUANTIZED_LINEAR, Fp8Problem, QuantizedProblem
from fusedops.runtime.device import INTERPRETER, TARGETS, device_facts, pretend

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CPU = torch.device("cpu")
BF16, F16, F32 = "bfloat16", "float16", "float32"


def linear(product, *sizes, **more):
    return LINEAR, LinearProblem.of(product, *sizes, **more)


def gated(*sizes, **more):
    return GATED_LINEAR, GatedProblem.of(*sizes, **more)


def grouped(product, *sizes, **more):
    return GROUPED_LINEAR, GroupedProblem.of(product, *sizes, **more)


def quantized(*sizes, **more):
    return QUANTIZED_LINEAR, QuantizedProblem.of(*sizes, **more)


def fp8(*sizes, **more):
    return FP8_LINEAR, Fp8Problem.of(*sizes, **more)


# As a device with tensor descriptors, such as the interpreter, has them: a problem says where they can be used.
PROBLEMS = {
    "forward": linear("forward", 48, 32, 64, descriptors=True),
    "forward_everything": linear(
        "forward", 40, 48, 32, dtype=F16, activation="gelu", bias=True, keeps=True, residual=True, dropout=True,
        descriptors=True,
    ),
    "forward_keeps_its_output": linear(
        "forward", 17, 32, 32, activation="tanh", keeps=True, out_dtype=F32, torch_serves=False, descriptors=True
    ),
    "forward_one_row": linear("forward", 1, 64, 256, bias=True, activation="silu", descriptors=True),
    "forward_transposed": linear("forward", 32, 48, 16, layout="rc", descriptors=True),
    "forward_columns": linear("forward", 64, 32, 16, layout="cr", descriptors=True),
    "forward_unaligned": linear("forward", 9, 21, 19, dtype=F32, aligned=False),
    "forward_unaligned_though_even": linear("forward", 32, 32, 64, aligned=False),
    "forward_between": linear("forward", 32, 32, 40, aligned=False, descriptors=True),
    "forward_aligned_rows_odd_result": linear("forward", 32, 33, 32),
    "forward_full_precision_asked": linear("forward", 32, 32, 32, dtype=F32, precision="tf32x3", torch_serves=False,
                                           descriptors=True),
    "grad_input": linear("grad_input", 48, 64, 32),
    "grad_input_derives": linear("grad_input", 33, 48, 32, dtype=F16, activation="gelu"),
    "grad_input_of_pairs": linear("grad_input", 32, 48, 64, pairs=2),
    "grad_input_unaligned_columns": linear("grad_input", 32, 19, 21, dtype=F32, layout="cr", aligned=False),
    "grad_weight": linear("grad_weight", 48, 32, 64, bias=True),
    "grad_weight_derives": linear("grad_weight", 32, 48, 33, activation="relu", bias=True),
    "grad_weight_accumulates": linear(
        "grad_weight", 32, 64, 48, out_dtype=F32, accumulate=True, torch_serves=False, bias=True
    ),
    "grad_weight_unaligned": linear("grad_weight", 21, 19, 17, dtype=F32, aligned=False),
    "gated": gated(33, 48, 32, bias=True, keeps=True),
    "gated_packed": gated(16, 32, 64, dtype=F16, packed=True, activation="gelu"),
    "gated_packed_transposed": gated(16, 32, 32, packed=True, layout="rc", out_dtype=F32, torch_serves=False),
    "gated_unaligned": gated(9, 21, 19, dtype=F32, aligned=False, bias=True, packed=True),
    "rows": grouped("rows", 3, 16, 48, 32, activation="gelu", bias=True, keeps=True),
    "rows_transposed": grouped("rows", 3, 32, 32, 48, layout="rc", dtype=F16),
    "rows_equal_unaligned": grouped("rows", 2, 17, 21, 19, equal=True, aligned=False, dtype=F32),
    "weights": grouped("weights", 3, 32, 48, 16, bias=True),
    "weights_equal": grouped("weights", 2, 32, 32, 33, equal=True, dtype=F16),
    "weights_bias_alone": grouped("weights", 3, 32, 1, 16, bias=True),
    "int4": quantized(17, 64, 128, group=32, bits=4, bias=True, activation="silu"),
    "int8_one_row": quantized(1, 64, 256, group=0, bits=8, dtype=F16),
    "int8_unaligned": quantized(20, 33, 63, group=0, bits=8, dtype=F32, aligned=False),
    "int4_padded": quantized(16, 32, 48, group=16, bits=4, out_dtype=F32),
    "fp8": fp8(33, 48, 64, row_scales="both", bias=True),
    "fp8_unaligned": fp8(16, 32, 63, aligned=False, weight_dtype="float8_e5m2", out_dtype=F32, activation="relu"),
}  # fmt: skip
EVERY = pytest.mark.parametrize(("operator", "problem"), PROBLEMS.values(), ids=PROBLEMS)


@EVERY
def test_a_trial_is_right_and_notices_what_is_not(kernel_runner, operator, problem):
    trial = make_trial(operator, problem, kernel_runner.device)
    results = trial.run()
    assert trial.wrong(results) is None
    for broken in (*_broken(results), [results[0][..., :-1], *results[1:]]):
        assert trial.wrong(broken) is not None


@EVERY
def test_some_rows_of_a_large_result_are_compared(kernel_runner, monkeypatch, operator, problem):
    monkeypatch.setattr(trials_common, "_COMPARED", 1)
    trial = make_trial(operator, problem, kernel_runner.device)
    assert trial.at is not None
    assert trial.at.numel() < 10  # a sixteenth of the rows, and the last
    results = trial.run()
    assert trial.wrong(results) is None
    for broken in _broken(results):
        assert trial.wrong(broken) is not None


def _broken(results):
    """Each result without a tile that some program should have written, and with a NaN."""
    for index, result in enumerate(results):
        for harm in (lambda t: t[..., -16:, :16].zero_(), lambda t: t.view(-1)[-1:].fill_(float("nan"))):
            copy = result.clone(memory_format=torch.contiguous_format)
            harm(copy[None] if copy.ndim == 1 else copy)
            yield [*results[:index], copy, *results[index + 1 :]]


@EVERY
def test_a_trial_asks_for_exactly_its_problem(kernel_runner, operator, problem):
    trial = make_trial(operator, problem, kernel_runner.device)
    with collecting() as met:
        trial.run()
    assert met[0] == (operator, problem)
    asked = [other for found, other in met if found is operator]
    assert asked[:1] == [problem]
    assert operator.problem_from_json(operator.problem_json(problem)) == problem


@EVERY
def test_the_configuration_in_use_is_the_one_that_is_launched(kernel_runner, monkeypatch, operator, problem):
    """Two of them differ in what the grid or the compile-time arguments are."""
    trial = make_trial(operator, problem, kernel_runner.device)
    facts = device_facts(kernel_runner.device)
    own = operator.default(problem, facts)
    if own.rows == 0:
        own = LinearConfig(16, 32, 16, 1, 4)
    tiles = [replace(own, rows=16, cols=32, depth=32, num_stages=1), replace(own, rows=32, cols=64, depth=32)]
    seen = []
    for config in tiles:
        with recorded_launches(monkeypatch) as launches, using(operator, problem, config):
            trial.run()
        found = {value for launch in launches for name, value in launch.items() if name.startswith("BLOCK")}
        assert {config.rows, config.cols} <= found, launches
        seen.append(launches)
    assert seen[0] != seen[1]


IN_TF32 = {
    "torch's setting": linear("forward", 64, 64, 64, dtype=F32, precision="tf32", descriptors=True),
    "an argument": linear(
        "forward", 64, 64, 64, dtype=F32, precision="tf32", torch_serves=False, descriptors=True, bias=True
    ),
    "all but the call": linear("forward", 64, 64, 64, dtype=F32, torch_serves=False, descriptors=True),
    "dX": linear("grad_input", 64, 64, 64, dtype=F32, precision="tf32", activation="gelu"),
    "dW": linear("grad_weight", 64, 64, 64, dtype=F32, precision="tf32", torch_serves=False),
    "a gate": gated(64, 64, 64, dtype=F32, precision="tf32"),
    "groups": grouped("rows", 2, 64, 64, 64, dtype=F32, precision="tf32"),
    "int8": quantized(64, 64, 64, group=0, bits=8, dtype=F32, precision="tf32"),
}
OFFLINE = {**PROBLEMS, **IN_TF32}


@pytest.mark.parametrize(("operator", "problem"), OFFLINE.values(), ids=OFFLINE)
def test_an_empty_trial_launches_the_configuration_in_use_for_an_absent_device(compiler, operator, problem):
    """B200: the one that has tensor descriptors and exact sums of float8, as the interpreter."""
    facts = TARGETS["sm_100"]
    own = operator.default(problem, facts)
    plain = operator.config.__name__ == "LinearConfig" and own.kernel != "tiled"
    own = LinearConfig(16, 32, 16, 2, 4) if plain or own.rows == 0 else replace(own, num_stages=2)
    for config in (replace(own, rows=16, cols=32, depth=32), replace(own, rows=32, cols=64, depth=32)):
        arguments = operator.name, operator.problem_json(problem), config.to_json(), "sm_100"
        launches = compiler.call("tests.autotune.test_linear_trials:launched", *arguments)
        found = {value for launch in launches for name, value in launch.items() if name.startswith("BLOCK")}
        assert {config.rows, config.cols} <= found, launches
        if problem.dtype == F32:
            precisions = {launch["PRECISION"] for launch in launches if "PRECISION" in launch}
            tf32 = problem.tf32 if operator is QUANTIZED_LINEAR else problem.precision
            assert precisions == {{False: "ieee", True: "tf32"}.get(tf32, tf32)}


@pytest.mark.parametrize(
    ("operator", "problem"),
    [pytest.param(*found, id=name) for name, found in OFFLINE.items() if found[0] in (LINEAR, GATED_LINEAR)],
)
def test_torchs_product_computes_nothing_in_an_empty_trial(compiler, operator, problem):
    torchs = next(c for c in operator.space(problem) if c.kernel == "torch")
    if operator.unfit(torchs, problem, TARGETS["sm_100"]) is not None:
        assert not problem.torch_serves
        return
    arguments = operator.name, operator.problem_json(problem), torchs.to_json(), "sm_100"
    launches = compiler.call("tests.autotune.test_linear_trials:launched", *arguments)
    # Elementwise kernels and, behind a pass of its own, a product with its own configuration.
    inner = getattr(problem, "derives", False)
    assert inner or not any("PRECISION" in launch for launch in launches)


def launched(name, problem, config, target):
    """The keyword arguments that are plain numbers and words of what an empty trial launches; without interpreter."""
    from fusedops.inspection.offline import capture_launches

    operator = operator_named(name)
    asked, chosen = operator.problem_from_json(problem), operator.config.from_json(config)
    trial = make_trial(operator, asked, CPU, empty=True)
    with using(operator, asked, chosen), capture_launches(target) as launches:
        trial.run()
    return [{k: v for k, v in launch.kwargs.items() if isinstance(v, (int, str))} for launch in launches]


class recorded_launches:  # noqa: N801
    """The keyword arguments of each launch of an interpreted kernel."""

    def __init__(self, monkeypatch):
        from triton.runtime import interpreter, jit

        self.kind = interpreter.InterpretedFunction if fusedops.runtime.settings.SETTINGS.interpret else jit.JITFunction
        self.monkeypatch, self.launches = monkeypatch, []

    def __enter__(self):
        run = self.kind.run

        def record(kernel, *args, **kwargs):
            self.launches.append({name: value for name, value in kwargs.items() if isinstance(value, int)})
            return run(kernel, *args, **kwargs)

        self.monkeypatch.setattr(self.kind, "run", record)
        return self.launches

    def __exit__(self, *exception):
        self.monkeypatch.undo()


SAMPLED = ["forward_everything", "forward_one_row", "grad_input_derives", "grad_weight_accumulates", "gated", "rows",
           "weights", "int4", "fp8"]  # fmt: skip


@pytest.mark.parametrize("name", SAMPLED)
def test_any_configuration_that_may_be_searched_gives_the_result(kernel_runner, name):
    operator, problem = PROBLEMS[name]
    trial, facts = make_trial(operator, problem, kernel_runner.device), device_facts(kernel_runner.device)
    fitting = [c for c in operator.space(problem) if operator.unfit(c, problem, TARGETS["sm_90"]) is None]
    assert len(set(fitting)) == len(fitting)
    fitting = [c for c in fitting if operator.unfit(c, problem, facts) is None]
    chosen = random.Random(name).sample(fitting, min(3, len(fitting)))
    for kernel in {getattr(c, "kernel", "") for c in fitting} - {getattr(c, "kernel", "") for c in chosen}:
        chosen.append(next(c for c in fitting if getattr(c, "kernel", "") == kernel))
    for config in chosen:
        with using(operator, problem, config):
            assert trial.wrong(trial.run()) is None, config


@EVERY
def test_an_empty_trial_has_no_memory(operator, problem):
    tensors = list(_tensors(make_trial(operator, problem, CPU, empty=True).tensors))
    assert tensors
    assert all(tensor.is_meta for tensor in tensors)


def test_an_empty_trial_of_any_size_is_made():
    _, problem = linear("forward", 1 << 30, 1 << 17, 1 << 17, descriptors=True)
    assert trials.trial_of(problem, CPU, empty=True).tensors["w"].shape == (1 << 17, 1 << 17)


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, dict)):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _tensors(member)


IMPOSSIBLE = {
    "keeps nothing": linear("forward", 16, 16, 16, keeps=True, descriptors=True),
    "16 rows are not aligned across": linear("forward", 8, 16, 16, layout="cr"),
    "a bias of a gradient's product": linear("grad_input", 16, 16, 16, bias=True),
    "pairs of a forward": linear("forward", 16, 16, 16, pairs=2, descriptors=True),
    "torch serves another dtype": linear("forward", 16, 16, 16, out_dtype=F32, descriptors=True),
    "a CPU in TF32": linear("forward", 16, 16, 16, dtype=F32, precision="tf32", descriptors=True),
    "an unknown activation": linear("forward", 16, 16, 16, activation="unheard_of", descriptors=True),
    "no bucket": (LINEAR, LinearProblem.of("forward", 16, 16, 16, descriptors=True)._replace(rows=17)),
    "a derivative of two pairs": linear("grad_input", 16, 16, 32, pairs=2, activation="relu"),
    "an activation of dW": grouped("weights", 2, 16, 16, 16, activation="relu"),
    "a group that is no multiple of 16": quantized(16, 16, 48, group=24, bits=8),
    "an odd number of aligned float8": fp8(16, 16, 33),
    "one row with a scale a row": fp8(1, 16, 32, row_scales="input"),
    "exact where sums are": fp8(16, 16, 32, out_dtype=F32, exact=True),
    "float8 without a device": fp8(16, 16, 32, dtype="float8_e4m3fnuz"),
}


@pytest.mark.interpreter
@pytest.mark.parametrize(("operator", "problem"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_no_tensors_can_be_is_said(operator, problem):
    with pytest.raises(NotImplementedError, match=r"\w+"):
        make_trial(operator, problem, CPU)


def test_rows_of_every_tile_are_compared():
    at = sampled_rows(50257, 4096, CPU)
    assert at[-1] == 50256
    assert at.diff().max() <= 16
    assert at.numel() * 4096 < 1 << 25
    assert sampled_rows(4096, 4096, CPU) is None


# Which problems a call meets


def _parameters(out_features, in_features, dtype, transposed=False, groups=()):
    shape = (*groups, out_features, in_features)
    weight = torch.randn(*groups, in_features, out_features).transpose(-1, -2) if transposed else torch.randn(shape)
    return weight.to(dtype).requires_grad_()


def _call_linear(
    rows, in_features, out_features, dtype=BF16, parameter_dtype=None, out_dtype=None, activation=None, bias=True,
    residual=False, dropout=False, training=True, input_gradient=True, main_grad=None, recompute=False,
    transposed=False, fp32_precision=None,
):  # fmt: skip
    kind, of_parameter = getattr(torch, dtype), getattr(torch, parameter_dtype or dtype)
    result = getattr(torch, out_dtype or dtype)
    x = torch.randn(rows, in_features, dtype=kind).requires_grad_(input_gradient)
    weight = _parameters(out_features, in_features, of_parameter, transposed)
    b = torch.randn(out_features, dtype=of_parameter).requires_grad_() if bias else None
    if main_grad is not None:
        weight.main_grad = torch.zeros(weight.shape, dtype=getattr(torch, main_grad))
    with torch.set_grad_enabled(training):
        y = fusedops.linear(
            x, weight, b, activation, residual=torch.randn(rows, out_features, dtype=result) if residual else None,
            dropout_p=0.1 if dropout else 0.0, out_dtype=None if out_dtype is None else result, recompute=recompute,
            fp32_precision=fp32_precision, fuse_wgrad_accumulation=main_grad is not None,
        )  # fmt: skip
    if training:
        y.backward(torch.randn(y.shape, dtype=y.dtype))


def _call_gated(
    rows, in_features, out_features, dtype=BF16, parameter_dtype=None, out_dtype=None, activation="silu", bias=False,
    packed=False, training=True, input_gradient=True, recompute=False, transposed=False,
):  # fmt: skip
    kind, of_parameter = getattr(torch, dtype), getattr(torch, parameter_dtype or dtype)
    x = torch.randn(rows, in_features, dtype=kind).requires_grad_(input_gradient)
    sizes = (2 * out_features,) if packed else (out_features, out_features)
    weights = [_parameters(size, in_features, of_parameter, transposed) for size in sizes]
    biases = [torch.randn(size, dtype=of_parameter).requires_grad_() if bias else None for size in sizes]
    weights, biases = ([*found, None][:2] for found in (weights, biases))
    result = None if out_dtype is None else getattr(torch, out_dtype)
    with torch.set_grad_enabled(training):
        y = fusedops.gated_linear(x, *weights, *biases, activation, out_dtype=result, recompute=recompute)
    if training:
        y.backward(torch.randn(y.shape, dtype=y.dtype))


def _call_grouped(
    groups, rows, in_features, out_features, dtype=BF16, activation=None, bias=False, equal=False, training=True,
    input_gradient=True, transposed=False,
):  # fmt: skip
    kind = getattr(torch, dtype)
    x = torch.randn(*((groups,) if equal else ()), rows, in_features, dtype=kind).requires_grad_(input_gradient)
    weight = _parameters(out_features, in_features, kind, transposed, (groups,))
    b = torch.randn(groups, out_features, dtype=kind).requires_grad_() if bias else None
    offsets = torch.linspace(0, rows, groups + 1)[1:].int()
    with torch.set_grad_enabled(training):
        if equal:
            y = fusedops.batched_linear(x, weight, b, activation)
        else:
            y = fusedops.grouped_linear(x, weight, offsets, b, activation)
    if training:
        y.backward(torch.randn(y.shape, dtype=y.dtype))


def _call_quantized(rows, in_features, out_features, bits=4, group_size=None, dtype=BF16, out_dtype=None,
                    activation=None, bias=False):  # fmt: skip
    weight, scales = fusedops.quantize_weight(torch.randn(out_features, in_features), bits, group_size)
    x = torch.randn(rows, in_features, dtype=getattr(torch, dtype))
    b = torch.randn(out_features) if bias else None
    result = None if out_dtype is None else getattr(torch, out_dtype)
    fusedops.quantized_linear(x, weight, scales, b, activation, group_size=group_size, out_dtype=result)


def _call_fp8(rows, in_features, out_features, dtype="float8_e4m3fn", weight_dtype=None, out_dtype=BF16,
              row_scales="no", activation=None, bias=False):  # fmt: skip
    x = fusedops.quantize_fp8(torch.randn(rows, in_features), getattr(torch, dtype), row_scales in ("input", "both"))
    w = fusedops.quantize_fp8(
        torch.randn(out_features, in_features), getattr(torch, weight_dtype or dtype), row_scales in ("weight", "both")
    )
    b = torch.randn(out_features) if bias else None
    fusedops.fp8_linear(x[0], w[0], x[1], w[1], b, activation, out_dtype=getattr(torch, out_dtype))


SIZES = {"rows": 35, "in_features": 32, "out_features": 48}
ODD = {"rows": 7, "in_features": 21, "out_features": 19}
CALLS = {
    "linear": [
        {},
        {"activation": "gelu"},
        {"activation": "gelu", "bias": False, "input_gradient": False},
        {"activation": "tanh", "residual": True},
        {"activation": "silu", "recompute": True},
        {"activation": "silu", "recompute": True, "training": False},
        {"dropout": True, "residual": True},
        {"out_dtype": F32},
        {"activation": "relu", "out_dtype": F32},
        {"parameter_dtype": F32, "transposed": True},
        {"main_grad": F32},
        {"dtype": F32, "fp32_precision": "tf32x3", "activation": "gelu"},
        {"training": False, "activation": "gelu", "rows": 3},
        {**ODD, "activation": "gelu", "transposed": True},
        {"rows": 3, "in_features": 40, "out_features": 24},
    ],
    "gated_linear": [
        {},
        {"packed": True, "bias": True},
        {"recompute": True, "parameter_dtype": F32},
        {"training": False, "transposed": True},
        {**ODD, "dtype": F32},
        {**ODD, "packed": True, "activation": None},
        {"out_dtype": F32, "input_gradient": False},
    ],
    "grouped_linear": [
        {"groups": 3, "activation": "gelu", "bias": True},
        {"groups": 3, "activation": "relu", "transposed": True},
        {"groups": 2, "equal": True, "bias": True, **ODD},
        {"groups": 2, "equal": True, "training": False, "activation": "gelu"},
        {"groups": 3, "input_gradient": False, "dtype": F32, **ODD},
    ],
    "quantized_linear": [
        {"group_size": 16},
        {"bits": 8, "activation": "silu", "bias": True, "dtype": F16, "out_dtype": F32},
        {"group_size": 32, "rows": 1},
        {"bits": 8, **ODD},
        {"in_features": 48, "group_size": 16},
    ],
    "fp8_linear": [
        {},
        {"row_scales": "both", "out_dtype": F32, "bias": True},
        {"row_scales": "input", "rows": 1, "weight_dtype": "float8_e5m2", "activation": "gelu"},
        {**ODD, "row_scales": "weight"},
    ],
}
MEETS = {
    "linear": (_call_linear, trials.problems_of),
    "gated_linear": (_call_gated, trials_gated.problems_of),
    "grouped_linear": (_call_grouped, trials_grouped.problems_of),
    "quantized_linear": (_call_quantized, trials_quantized.problems_of),
    "fp8_linear": (_call_fp8, trials_quantized.fp8_problems_of),
}


def test_a_call_in_float8_meets_what_the_device_multiplies():
    sizes = {"rows": 64, "in_features": 64, "out_features": 64}

    def met(target, **more):
        found = trials_quantized.fp8_problems_of(**sizes, facts=TARGETS[target], **more)
        return [(problem.dtype, problem.weight_dtype) for _, problem in found]

    assert met("sm_90") == met("gfx950") == [("float8_e4m3fn", "float8_e4m3fn")]
    assert met("gfx942") == [("float8_e4m3fnuz", "float8_e4m3fnuz")]
    assert met("gfx942", weight_dtype="float8_e5m2fnuz") == [("float8_e4m3fnuz", "float8_e5m2fnuz")]
    # Torch's operators serve the rest.
    assert met("sm_80") == met("gfx90a") == met("gfx942", dtype="float8_e4m3fn") == []
    assert met("sm_90", weight_dtype="float8_e4m3fnuz") == []


@pytest.mark.interpreter
@pytest.mark.parametrize("facts", [INTERPRETER, TARGETS["sm_90"]], ids=lambda facts: facts.arch)
@pytest.mark.parametrize(
    ("name", "call"),
    [
        pytest.param(name, call, id=f"{name}-{index}")
        for name, calls in CALLS.items()
        for index, call in enumerate(calls)
    ],
)
def test_the_problems_that_a_call_meets_are_told(facts, name, call):
    function, problems_of = MEETS[name]
    call = {**SIZES, **call}
    told = problems_of(**call, facts=facts)
    with fusedops.backend("triton"), pretend(facts), collecting() as met:
        function(**call)
    forget()
    assert told == list(dict.fromkeys(met))
    assert len(set(told)) == len(told)


@pytest.mark.interpreter
def test_every_problem_that_a_call_meets_has_a_trial():
    for name, calls in CALLS.items():
        for call in calls:
            for operator, problem in MEETS[name][1](**{**SIZES, **call}, facts=INTERPRETER):
                make_trial(operator, problem, CPU)


def test_nothing_is_met_by_nothing():
    for name, (_, problems_of) in MEETS.items():
        more = {"groups": 2} if name == "grouped_linear" else {}
        assert problems_of(**{**SIZES, "rows": 0}, **more, facts=INTERPRETER) == []


# What it costs


def test_work_counts_the_products_and_the_bytes():
    facts = TARGETS["sm_90"]
    operator, problem = linear("forward", 4096, 4096, 4096)
    tile = LinearConfig(128, 256, 64, 3, 8)
    work = operator.work(tile, problem, facts)
    assert work.product == 2 * 4096**3
    assert work.memory == 3 * 4096 * 4096 * 2
    assert work.programs == 32 * 16
    assert work.cached == 32 * 16 * 4096 * (128 + 256) * 2 + 4096 * 4096 * 2
    assert (work.unit, work.launches, work.in_flight) == ("half", 1, 2 * 64 * (128 + 256) * 2)
    split = operator.work(replace(tile, splits=4), problem, facts)
    assert (split.programs, split.launches, split.product) == (4 * work.programs, 2, work.product)
    assert split.memory == work.memory + 2 * 4 * 4 * 4096 * 4096  # too much for the cache
    torchs = operator.work(TORCH, problem, facts)
    assert torchs.product == pytest.approx(work.product / 1.15)
    assert (torchs.launches, torchs.memory) == (1, work.memory)


def test_work_counts_what_follows_and_what_comes_before():
    facts = TARGETS["sm_90"]
    bare, full = (linear("forward", 8192, 4096, 4096, activation=a, keeps=a is not None)[1] for a in (None, "gelu"))
    own = [LINEAR.work(LinearConfig(128, 256, 64, 3, 8), p, facts) for p in (bare, full)]
    assert own[0].special == 0 < own[1].special
    assert own[1].memory - own[0].memory == 8192 * 4096 * 2
    torchs = [LINEAR.work(TORCH, p, facts) for p in (bare, full)]
    assert torchs[1].launches == torchs[0].launches + 1
    assert torchs[1].memory - torchs[0].memory == 2 * 8192 * 4096 * 2  # reads Z, writes Y
    derived = linear("grad_input", 8192, 4096, 4096, activation="gelu")[1]
    before, inside = (
        LINEAR.work(LinearConfig(128, 128, 64, 3, 8, prologue=prologue), derived, facts) for prologue in (False, True)
    )
    assert before.launches > inside.launches
    assert before.scalar < inside.scalar  # which every block column repeats


def test_work_counts_padding_and_half_empty_tiles():
    facts = TARGETS["sm_90"]
    few, many = (linear("forward", rows, 4096, 4096)[1] for rows in (4, 64))
    tile = LinearConfig(64, 64, 64, 3, 4)
    assert LINEAR.work(tile, few, facts).product == LINEAR.work(tile, many, facts).product
    config = GROUPED_LINEAR.default(grouped("rows", 8, 512, 4096, 4096)[1], facts)
    ragged, equal = (
        GROUPED_LINEAR.work(config, grouped("rows", 8, 512, 4096, 4096, equal=equal)[1], facts)
        for equal in (False, True)
    )
    assert ragged.product > equal.product == 8 * 2 * 512 * 4096 * 4096


def test_a_narrow_weight_is_less_to_read():
    facts = TARGETS["sm_90"]
    bytes_read = []
    for bits in (4, 8):
        problem = quantized(1, 4096, 4096, group=128, bits=bits)[1]
        bytes_read.append(QUANTIZED_LINEAR.work(QUANTIZED_LINEAR.default(problem, facts), problem, facts).memory)
    assert bytes_read[1] - bytes_read[0] == 4096 * 4096 / 2
    problem = fp8(4096, 4096, 4096)[1]
    assert FP8_LINEAR.work(FP8_LINEAR.default(problem, facts), problem, facts).unit == "fp8"


def test_work_is_finite_for_every_default_and_every_device():
    for facts, (operator, problem) in itertools.product((*TARGETS.values(), INTERPRETER), OFFLINE.values()):
        config = operator.default(problem, facts)
        work = operator.work(config, problem, facts)
        assert work.programs >= 1
        assert work.launches >= 1
        assert all(0 <= value < float("inf") for value in work if not isinstance(value, str)), (problem, work)


@pytest.mark.parametrize("name", ["linear", "gated_linear", "grouped_linear", "quantized_linear", "fp8_linear"])
def test_a_search_finds_enough_to_try(name):
    operator = operator_named(name)
    facts = TARGETS["sm_90"]
    large = {
        "linear": linear("forward", 4096, 4096, 4096, descriptors=True),
        "gated_linear": gated(4096, 4096, 4096),
        "grouped_linear": grouped("rows", 8, 512, 4096, 4096),
        "quantized_linear": quantized(16, 4096, 4096, group=128, bits=4),
        "fp8_linear": fp8(4096, 4096, 4096),
    }[name][1]
    fitting = [c for c in operator.space(large) if operator.unfit(c, large, facts) is None]
    assert len(fitting) > 100
    assert operator.unfit(operator.default(large, facts), large, facts) is None
    assert all(operator.config.from_json(c.to_json()) == c for c in fitting[:: len(fitting) // 20])


def test_work_tells_what_a_step_costs():
    facts, problem = TARGETS["sm_90"], linear("forward", 4096, 4096, 4096)[1]
    shallow, deep = (LINEAR.work(LinearConfig(128, 256, depth, 3, 8), problem, facts) for depth in (16, 64))
    assert shallow.waits == 4 * deep.waits
    # Two groups of four warps read all columns each, and a row is read once: of each step's 64.
    assert deep.operands == deep.programs * 4096 * 2 * (128 + 2 * 256)
    assert deep.registers == 128
    plain = linear("forward", 4096, 4096, 4096, dtype=F32)[1]
    assert LINEAR.work(LinearConfig(64, 64, 16, 3, 4), plain, facts).operands == 0  # no matrix instruction
