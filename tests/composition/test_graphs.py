"""CUDA graphs: nothing waits for the device, nothing is searched while capturing, and fusedops.graphed."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

import fusedops
from fusedops.runtime import graphs
from tests.attention.launches import launching, nothing
from tests.harness.operators import MODULES, OPERATORS

# What reads a tensor's numbers on the host.
_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")


@contextlib.contextmanager
def no_reads(monkeypatch):
    def refuse(name):
        def read(self, *args, **kwargs):
            raise AssertionError(f"Tensor.{name} waits for the device")

        return read

    with monkeypatch.context() as patches:
        for name in _READS:
            patches.setattr(torch.Tensor, name, refuse(name))
        yield


@pytest.mark.interpreter
@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_no_operator_waits_for_the_device(monkeypatch, operator):
    """Forward and backward with the launches left out, which are all that may read what tensors hold."""
    with fusedops.backend("triton"):
        tensors = operator.inputs("cpu", length=3)
        if operator.name == "attention:document_ids":  # its lists of blocks are made once, before a capture
            mask = fusedops.BlockMask.from_document_ids(tensors[3])
            call, tensors = (lambda q, k, v, _: fusedops.attention(q, k, v, block_mask=mask)), [*tensors[:3], None]
            call(*tensors)
        elif operator.name == "attention_varlen":  # the numbers are checked on the CPU alone
            call = operator.function
            monkeypatch.setattr(sys.modules["fusedops.attention.functional"], "check_sequences", lambda *_: None)
        else:
            call = operator.function
        with launching(monkeypatch, nothing), no_reads(monkeypatch):
            results = call(*tensors)
            results = results if isinstance(results, tuple) else (results,)
            leaves = [tensors[place] for place in operator.differentiable]
            outputs = [r for r in results if r.requires_grad]
            if leaves:
                torch.autograd.grad(outputs, leaves, [torch.ones_like(r) for r in outputs])


def test_a_dropout_seed_is_a_tensor_of_the_devices_generator(monkeypatch):
    """Drawn by torch on the device: a captured graph advances it at every replay, as torch's own dropout."""
    from fusedops.runtime.dropout import draw_seed

    asked = []
    randint = torch.randint

    def drawn(*args, **kwargs):
        asked.append(kwargs["device"])
        return randint(*args, **kwargs)

    monkeypatch.setattr(torch, "randint", drawn)
    with no_reads(monkeypatch):
        seeds = [draw_seed(torch.ones(2)) for _ in range(2)]
    assert asked == [torch.device("cpu")] * 2
    assert not torch.equal(*seeds)
    assert all(seed.dtype == torch.int64 and seed.shape == (1,) for seed in seeds)


# ---- graphed ---------------------------------------------------------------------------------------------------------


def test_on_the_cpu_it_is_the_module():
    model = fusedops.nn.MLP(16, 32).eval()
    assert fusedops.graphed(model, torch.ones(2, 16)) is model


class Replays:
    """Stands for make_graphed_callables: runs once, then computes anew where the first inputs and results lie."""

    def __init__(self):
        self.warm, self.static = 0, None

    def __call__(self, run, samples, num_warmup_iters):
        assert not torch.is_grad_enabled()
        for _ in range(num_warmup_iters):
            run(*samples)
            self.warm += 1
        self.static = samples
        results = run(*samples)

        def replay(*inputs):
            for place, given in zip(samples, inputs, strict=True):
                place.copy_(given)
            for place, new in zip(results, run(*samples), strict=True):
                place.copy_(new)
            return results

        return replay


@pytest.fixture
def replays(monkeypatch):
    double = Replays()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", double)
    # The CPU's tensors say that they are a GPU's.
    real = graphs.graphed

    def on_a_gpu(module, sample_inputs, **options):
        names, tensors = graphs._inputs(sample_inputs)
        made = {"static_outputs": False, "num_warmup_iters": 3} | options
        return graphs.Graphed(module, names, tensors, made["static_outputs"], made["num_warmup_iters"])

    monkeypatch.setattr(double, "graphed", on_a_gpu, raising=False)
    assert real is fusedops.graphed
    return double


class Several(torch.nn.Module):
    def forward(self, x, y=None):
        return {"sum": x + (0 if y is None else y), "rest": [x * 2, "text", None]}


def test_results_are_those_of_the_module_and_survive_the_next_call(replays):
    model = fusedops.nn.MLP(16, 32).eval()
    sample = torch.zeros(2, 16)
    fast = replays.graphed(model, sample)
    inputs = [torch.randn(2, 16) for _ in range(2)]
    found = [fast(x) for x in inputs]
    for x, y in zip(inputs, found, strict=True):
        assert torch.equal(y, model(x))
        assert not y.requires_grad
    assert not sample.any()  # the caller's own is not what the graph reads
    assert replays.warm == 3
    assert model(inputs[0]).requires_grad  # and the module is as it was
    shared = replays.graphed(model, sample, static_outputs=True)
    assert shared(inputs[0]).data_ptr() == shared(inputs[1]).data_ptr()


def test_any_structure_of_results_and_names_of_inputs(replays):
    model = Several().eval()
    x, y = torch.ones(2), torch.full((2,), 3.0)
    for fast, call in (
        (replays.graphed(model, (x, y)), lambda f: f(x, y)),
        (replays.graphed(model, {"x": x, "y": y}), lambda f: f(y=y, x=x)),
        (replays.graphed(model, {"x": x, "y": y}), lambda f: f(x, y)),
        (replays.graphed(model, {"x": x, "y": y}), lambda f: f(x, y=y)),
    ):
        result = call(fast)
        assert result["sum"].tolist() == [4.0, 4.0]
        assert result["rest"][0].tolist() == [2.0, 2.0]
        assert result["rest"][1:] == ["text", None]


def test_weights_written_in_place_are_seen(replays):
    model = fusedops.nn.Linear(4, 4).eval()
    fast = replays.graphed(model, torch.zeros(1, 4))
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.zero_()
    assert fast(torch.ones(1, 4)).tolist() == [[4.0] * 4]


def test_a_call_that_differs_is_an_error_that_says_how(replays):
    fast = replays.graphed(fusedops.nn.MLP(16, 32).eval(), torch.zeros(2, 16))
    for inputs, error, text in (
        (
            (torch.zeros(3, 16),),
            ValueError,
            r"input 0 must be .* of shape \(2, 16\) on cpu; got a float32 tensor of shape",
        ),
        ((torch.zeros(2, 16).half(),), ValueError, "input 0 must be as it was recorded, a float32 tensor"),
        ((1.0,), TypeError, "input 0 must be a tensor"),
        ((), TypeError, "takes the inputs it was recorded with .0.; got none"),
        ((torch.zeros(2, 16), torch.zeros(2)), TypeError, "takes the inputs it was recorded with .0.; got 0, 1"),
        ((torch.zeros(2, 16, requires_grad=True),), ValueError, "input 0 must be one that requires no gradient"),
    ):
        with pytest.raises(error, match=f"graphed module: {text}"):
            fast(*inputs)


def test_it_cannot_be_trained_or_moved(replays):
    fast = replays.graphed(fusedops.nn.MLP(16, 32).eval(), torch.zeros(2, 16))
    with pytest.raises(RuntimeError, match="the graph is for inference"):
        fast.train()
    with pytest.raises(RuntimeError, match="cannot be moved or converted"):
        fast.half()
    assert fast.eval() is fast
    assert list(fast.state_dict()) == [f"module.{name}" for name in fast.module.state_dict()]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((lambda x: x, torch.ones(1)), TypeError, r"module must be a torch\.nn\.Module"),
        ((Several().eval(), 3), TypeError, "sample_inputs must be a tensor, a tuple"),
        ((Several().eval(), ()), ValueError, "sample_inputs must be a tensor, .* at least one"),
        ((Several().eval(), (torch.ones(1), 2)), TypeError, r"sample_inputs\[1\] must be a tensor"),
        ((Several(), torch.ones(1)), ValueError, r"module must be in eval\(\) mode"),
        (
            (Several().eval(), torch.ones(1, device="meta")),
            ValueError,
            "sample_inputs must be on a CUDA or ROCm device",
        ),
        (
            (Several().eval(), (torch.ones(1), torch.ones(1, device="meta"))),
            ValueError,
            r"sample_inputs\[1\] must be on",
        ),
    ],
)
def test_wrong_arguments(arguments, error, text):
    with pytest.raises(error, match=f"graphed: {text}"):
        fusedops.graphed(*arguments)


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("operator", [o for o in OPERATORS if o.name != "attention:document_ids"], ids=str)
def test_captured_forward_and_backward(operator):
    tensors = operator.inputs("cuda", length=16)
    leaves = [tensors[place] for place in operator.differentiable]

    def step():
        results = operator.function(*tensors)
        results = results if isinstance(results, tuple) else (results,)
        outputs = [r for r in results if r.requires_grad]
        grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(r) for r in outputs]) if leaves else ()
        return [*results, *grads]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = step()
    replays = []
    for _ in range(2):
        with torch.no_grad():
            for tensor, fresh in zip(tensors, operator.make("cuda", torch.float32, 16), strict=True):
                if tensor.is_floating_point() and not operator.random:
                    tensor.copy_(fresh)
        graph.replay()
        replays.append([r.clone() for r in static])
        if not operator.random:
            for a, b in zip(replays[-1], step(), strict=True):
                assert torch.equal(a, b)
    if operator.random:
        assert not torch.equal(replays[0][0], replays[1][0])


@pytest.mark.gpu
@pytest.mark.parametrize("module", MODULES, ids=str)
def test_graphed_modules(module):
    model = module.build("cuda").eval()
    fast = fusedops.graphed(lambda_free(model, module.call), module.make("cuda", torch.float32, 16))
    for _ in range(2):
        inputs = module.make("cuda", torch.float32, 16)
        found, expected = fast(*inputs), model(*inputs, **module.call)
        for a, b in zip(*([r] if torch.is_tensor(r) else r for r in (found, expected)), strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def lambda_free(model, call):
    class Called(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, *inputs):
            return self.model(*inputs, **call)

    return Called().eval()
