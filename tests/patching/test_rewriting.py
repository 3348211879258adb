"""What is found in the methods of a class: read from their source, and nothing is guessed."""

from __future__ import annotations

import functools
import linecache
import traceback

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

import fusedops
from fusedops.patching import source
from fusedops.patching.activations import activation_name
from fusedops.patching.linears import rewritten
from fusedops.patching.rewriting import Gate
from tests.patching.models import twin


class Base(nn.Module):
    """Parts by the names that the methods below use."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.both = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        self.act, self.norm, self.drop = nn.SiLU(), nn.LayerNorm(8), nn.Dropout(0.5)
        self.function, self.flag = F.relu, True


class Chains(Base):
    def nested(self, x):
        return self.fc2(self.drop(self.act(self.fc1(x))))

    def statements(self, hidden):
        """A docstring is no statement."""
        hidden = self.norm(hidden)
        hidden = self.fc1(hidden)
        hidden = self.act(hidden)
        return self.fc2(hidden)

    def other_names(self, x):
        y = self.fc1(x)
        z = self.act(y)
        return z + x

    def inside_an_expression(self, x):
        return x + self.act(self.fc1(x)) * 0.5

    def functional(self, x):
        return F.gelu(self.fc1(x), approximate="tanh")

    def method(self, x):
        return self.fc1(x).relu()

    def function_of_the_instance(self, x):
        return self.function(self.fc1(x))

    def of_an_expression(self, x):
        y = self.fc1(torch.cat([x, x], -1)[..., :8] + 1)
        return self.act(y)

    def in_a_branch(self, x, flag=True):
        if flag:
            x = self.fc1(x)
            x = self.act(x)
        return x

    def in_a_loop(self, x):
        for _ in range(2):
            x = self.fc1(x)
            x = self.act(x)
        return x


NAMES = {
    "nested": "silu",
    "statements": "silu",
    "other_names": "silu",
    "inside_an_expression": "silu",
    "functional": "gelu_tanh",
    "method": "relu",
    "function_of_the_instance": "relu",
    "of_an_expression": "silu",
    "in_a_branch": "silu",
    "in_a_loop": "silu",
}


class Gates(Base):
    def nested(self, x):
        return self.fc2(self.act(self.fc1(x)) * self.fc2(x))

    def turned(self, x):
        return self.fc2(x) * self.act(self.fc1(x))

    def statements(self, x):
        gate = self.act(self.fc1(x))
        up = self.fc2(x)
        x = gate * up
        return self.drop(x)

    def same_name(self, x):
        gate = self.fc1(x)
        x = self.fc2(x)
        x = self.act(gate) * x
        return x  # noqa: RET504

    def functional(self, x):
        return F.silu(self.fc1(x)) * self.fc2(x)

    def halves(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.fc1(self.act(gate) * up)

    def halves_of_a_variable(self, x):
        up = self.both(x)
        gate, up = up.chunk(2, -1)
        up = up * self.act(gate)
        return self.fc1(up)

    def second_half(self, x):
        up, gate = torch.chunk(self.both(x), chunks=2, dim=-1)
        return self.act(gate) * up


def _with(kind, method):
    """A model whose forward is one of the methods."""

    class Model(kind):
        def forward(self, x):
            return getattr(self, method)(x)

    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("method", NAMES)
def test_a_linear_layer_and_its_activation(method, calls):
    plain = _with(Chains, method)
    plain.train(method != "nested")
    patched = twin(plain)
    report = fusedops.patch(patched, exclude="norm")
    assert f'fusedops.linear(activation="{NAMES[method]}")' in {entry.calls for entry in report.replaced}
    _same(plain, patched)
    assert calls["linear"] == (2 if method == "in_a_loop" else 1)


GATES = {
    "nested": Gate("fc1", "act", "fc2", "gau"),
    "turned": Gate("fc1", "act", "fc2", "uga"),
    "statements": Gate("fc1", "act", "fc2", "gau"),
    "same_name": Gate("fc1", "act", "fc2", "gua"),
    "halves": Gate("both", "act", None, "ga"),
    "halves_of_a_variable": Gate("both", "act", None, "ga"),
    "second_half": Gate("both", "act", None, "ag"),
}


@pytest.mark.parametrize("method", [name for name in vars(Gates) if not name.startswith("__")])
def test_a_gated_pair(method, calls):
    plain = _with(Gates, method).eval()
    if method in GATES:
        assert rewritten(Gates)[method].gates == (GATES[method],)
    patched = twin(plain)
    report = fusedops.patch(patched)
    assert 'fusedops.gated_linear(activation="silu")' in {entry.calls for entry in report.replaced}
    _same(plain, patched)
    assert calls["gated_linear"] == 1


def test_a_gate_of_two_inputs_is_a_linear_layer_with_its_activation(calls):
    class Model(Base):
        def forward(self, x):
            return self.act(self.fc1(x + 1)) * self.fc2(x)

    plain = Model()
    patched = twin(plain)
    fusedops.patch(patched)
    _same(plain, patched)
    assert (calls["linear"], calls["gated_linear"]) == (1, 0)


class Other(Base):
    """Nothing here may be fused, for what lies between is used or is not what it seems."""

    def used_twice(self, x):
        y = self.fc1(x)
        return self.act(y) + y

    def used_later(self, x):
        y = self.fc1(x)
        z = self.act(y)
        x = self.norm(z)
        return x + y

    def something_between(self, x):
        y = self.fc1(x)
        y = y * 2
        return self.act(y)

    def changed_between(self, x):
        y = self.fc1(x)
        x = x + 1
        return self.act(y) + x

    def called_before(self, x):
        y = self.fc1(x)
        return self.drop(x) + self.act(y)

    def more_arguments(self, x):
        return F.gelu(self.fc1(x), approximate=self.kind())

    def kind(self):
        return "tanh"

    def keyword(self, x):
        return self.act(input=self.fc1(x))

    def three(self, x):
        a, b, c = torch.cat([self.both(x), x], -1).chunk(3, dim=-1)
        return self.act(a) * b + c

    def other_dimension(self, x):
        a, b = self.both(x).chunk(2, dim=0)
        return self.act(a) * b

    def lazily(self, x):
        y = self.fc1(x)
        return self.act(y) if self.flag else x

    def lambda_(self, x):
        return (lambda y: self.fc2(y))(self.fc1(x))

    def comprehension(self, x):
        return torch.stack([self.fc2(self.norm(y)) for y in x])


@pytest.mark.parametrize("method", [name for name in vars(Other) if not name.startswith("__") and name != "kind"])
def test_what_is_no_such_form_runs_as_it_was_written(method, calls):
    plain = _with(Other, method).eval()
    patched = twin(plain)
    fusedops.patch(patched)
    _same(plain, patched)
    assert calls["linear"] == calls["gated_linear"] == 0


def _same(plain, patched):
    x = torch.randn(2, 3, 8)
    results = []
    for model in (plain, patched):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    torch.testing.assert_close(*results, rtol=2e-5, atol=2e-5)


# --- The parts as they are at the time of the call -------------------------------------------------------------------


def test_what_is_exchanged_hooked_or_switched_afterwards_counts(calls):
    model = _with(Gates, "nested").eval()
    fusedops.patch(model)
    x = torch.randn(3, 8)

    def expected():
        return model.fc2(model.act(model.fc1(x)) * model.fc2(x))

    torch.testing.assert_close(model(x), expected())
    assert calls["gated_linear"] == 1
    model.act = nn.Softsign()
    torch.testing.assert_close(model(x), expected())
    model.act = nn.SiLU()
    model.fc1 = nn.Linear(8, 8)
    torch.testing.assert_close(model(x), expected())
    assert calls["gated_linear"] == 1
    model = _with(Gates, "nested").eval()
    fusedops.patch(model)
    seen = []
    handle = model.fc2.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(model(x), expected())
    assert len(seen) == 4
    assert calls["gated_linear"] == 1
    handle.remove()
    model(x)
    assert calls["gated_linear"] == 2


def test_dropped_weights_follow_the_same_random_numbers():
    plain = _with(Chains, "nested").train()
    patched = twin(plain)
    fusedops.patch(patched)
    _same(plain, patched)


def test_excluded_parts_run_as_they_were(calls):
    model = _with(Chains, "nested").eval()
    report = fusedops.patch(model, exclude="fc1")
    assert {entry.path for entry in report.replaced} == {"norm"}
    model(torch.randn(2, 8))
    assert calls["linear"] == 0
    report = fusedops.patch(model)
    assert {entry.path for entry in report.replaced} == {"fc1"}
    model(torch.randn(2, 8))
    assert calls["linear"] == 1


# --- torch's functions -----------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self, fused=True):
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.fused = fused

    def forward(self, x):
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.mT / 2).masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
            x = scores.softmax(-1) @ v
        return F.layer_norm(x.transpose(1, 2).flatten(2), (8,))


def test_torchs_functions_in_a_users_attention(calls):
    plain = Attention()
    patched = twin(plain)
    report = fusedops.patch(patched, strict=True)
    assert {entry.calls for entry in report.replaced} == {
        "fusedops.scaled_dot_product_attention",
        "fusedops.layer_norm",
    }
    _same(plain, patched)
    assert calls["F.scaled_dot_product_attention"] == calls["F.layer_norm"] == 1
    assert F.scaled_dot_product_attention.__module__ != "fusedops"
    fusedops.unpatch(patched)
    assert type(patched) is Attention


class Branches(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.fused = fused

    def forward(self, x):
        if not self.fused:
            return F.layer_norm(x, (8,))
        return x


@pytest.mark.parametrize("fused", [True, False])
def test_a_branch_that_is_not_taken_is_named(fused):
    report = fusedops.plan(Branches(fused))
    if fused:
        assert report.left[0].reason == "its forward does not call F.layer_norm while its fused is True"
    assert len(report.replaced) == (not fused)
    report = fusedops.plan(Attention(fused))
    assert len(report.replaced) == 1 + fused


def test_a_function_that_somebody_exchanges_is_called(monkeypatch):
    model = Attention()
    fusedops.patch(model)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: q * 0)
    assert torch.equal(model(torch.randn(1, 3, 8)), torch.zeros(1, 3, 8))


# --- Source ----------------------------------------------------------------------------------------------------------


def doubled(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return 2 * function(self, *args, **kwargs)

    return wrapper


class Decorated(Base):
    @doubled
    def forward(self, x, *, scale: float = 3.0):
        return self.act(self.fc1(x)) * scale


class WithSuper(Base):
    def extra_repr(self):
        return super().extra_repr()

    def forward(self, x):
        if super().extra_repr():
            raise ValueError
        x = self.fc1(x)
        return self.act(x)


@pytest.mark.parametrize("kind", [Decorated, WithSuper])
def test_decorators_defaults_and_super_are_kept(kind, calls):
    torch.manual_seed(0)
    plain = kind()
    patched = twin(plain)
    fusedops.patch(patched)
    _same(plain, patched)
    assert calls["linear"] == 1
    if kind is Decorated:
        x = torch.randn(2, 8)
        torch.testing.assert_close(patched(x, scale=1.0), plain(x, scale=1.0))
        assert type(patched).forward.__wrapped__.__kwdefaults__ == {"scale": 3.0}


class Fails(Base):
    def forward(self, x):
        x = self.act(self.fc1(x))
        raise KeyError("on the next line but one of its source")


def test_tracebacks_show_the_lines_that_were_written():
    model = Fails()
    fusedops.patch(model)
    with pytest.raises(KeyError) as caught:
        model(torch.randn(1, 8))
    assert 'raise KeyError("on the next line' in "".join(traceback.format_exception(caught.value))


def test_a_source_that_is_not_the_codes_is_not_believed(tmp_path):
    path = tmp_path / "made.py"
    text = "def forward(self, x):\n    return self.act(self.fc1(x))\n"
    path.write_text(text)
    space = {}
    exec(compile(text, str(path), "exec"), space)
    assert source.read(space["forward"]) is not None
    path.write_text(text.replace("fc1", "fc2"))
    linecache.checkcache(str(path))
    assert source.read(space["forward"]) is None
    path.unlink()
    linecache.checkcache(str(path))
    assert source.read(space["forward"]) is None


def test_generators_and_lambdas_are_not_read():
    def generator(self, x):
        yield self.act(self.fc1(x))

    assert source.read(generator) is None
    assert source.read(lambda self, x: self.act(self.fc1(x))) is None


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (lambda x: x * torch.sigmoid(x), "silu"),
        (lambda x: x * torch.sigmoid(1.7 * x), ""),
        (lambda x: x.softmax(-1), ""),
        (lambda x: F.relu(x).float(), ""),
        (torch.sin, ""),
        (nn.LeakyReLU(0.2), ""),
        (nn.Softplus(beta=2), ""),
        (nn.Dropout(0.1), ""),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.Identity(), ""),
        ("relu", ""),
        (nn.ReLU, ""),
    ],
)
def test_an_activation_is_what_it_computes(activation, name):
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert activation_name(activation) == name
    assert torch.equal(torch.get_rng_state(), state)


class Noisy(nn.Module):
    def forward(self, x):
        return F.relu(x) if self.training else F.relu(x) + 1e-3


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return F.relu(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class StraightThrough(nn.Module):
    def forward(self, x):
        return Wrong.apply(x)


@pytest.mark.parametrize("kind", [Noisy, StraightThrough])
def test_an_activation_with_other_values_in_evaluation_or_another_gradient_is_another(kind):
    assert activation_name(kind()) == ""


# --- What a method may do with its variables -------------------------------------------------------------------------


class Variables(Base):
    """Methods in which an assignment may not go away although the next statement uses its value."""

    def __init__(self):
        super().__init__()
        self.bn, self.seen = nn.BatchNorm1d(8), []

    def thrown_away_but_read(self, x):
        x = self.norm(x)
        h = self.act(self.fc1(x * 1.0))
        h = self.fc2(h)
        return h  # noqa: RET504

    def deleted(self, x):
        h = self.fc1(x)
        y = self.act(h)
        del h
        return self.fc2(y)

    def added_to(self, x):
        h = self.fc1(x)
        y = self.act(h)
        h += 1
        return self.fc2(y) + h

    def result_not_read(self, x):
        h = self.fc1(x)
        _ = self.bn(h)
        return self.act(h)

    def read_by_a_function_inside(self, x):
        def inside():
            return h

        h = self.fc1(x)
        y = self.act(h)
        return y + inside()

    def kept_by_a_function(self, x):
        self.seen[:] = [lambda: h]
        h = self.fc1(x)
        return self.act(h)

    def read_from_the_frame(self, x):
        h = self.fc1(x)
        y = self.act(h)
        return y + locals()["h"]

    def read_when_something_is_raised(self, x):
        try:
            h = self.fc1(x)
            h = self.act(h)
            h = self.wrong(h)
        except ZeroDivisionError:
            return h
        return h

    def wrong(self, h):
        raise ZeroDivisionError

    def dropout_whose_result_is_not_read(self, x):
        h = self.fc1(x)
        _ = self.drop(h)
        h = self.act(h)
        return self.drop(h)


@pytest.mark.parametrize("method", [n for n in vars(Variables) if not n.startswith("__") and n != "wrong"])
def test_an_assignment_that_somebody_needs_stays(method):
    torch.manual_seed(0)
    plain = _with(Variables, method)
    patched = twin(plain)
    fusedops.patch(patched)
    results = []
    for model in (plain, patched):
        torch.manual_seed(1)
        results.append((model(torch.ones(4, 8)), model.bn.running_mean, *(f() for f in model.seen)))
    torch.testing.assert_close(*results)


class Order(Base):
    def written(self, x):
        gate = self.fc1(x)
        up = self.fc2(x)
        return self.act(gate) * up

    def turned(self, x):
        return self.fc2(x) * self.act(self.fc1(x))

    def nested(self, x):
        return self.act(self.fc1(x)) * self.fc2(x)


@pytest.mark.parametrize("method", ["written", "turned", "nested"])
def test_parts_that_are_hooked_are_called_in_the_order_that_was_written(method):
    plain = _with(Order, method)
    patched = twin(plain)
    fusedops.patch(patched)
    orders = []
    for model in (plain, patched):
        order = []
        for name in ("fc1", "fc2", "act"):
            getattr(model, name).register_forward_hook(lambda *_, name=name, order=order: order.append(name))
        model(torch.ones(1, 8))
        orders.append(order)
    assert orders[0] == orders[1]


# --- Parts that are not what they seem -------------------------------------------------------------------------------


class Odd(Base):
    """Its parts are a property that fails, a module that is not registered, and an object that cannot be hashed."""

    def __init__(self):
        super().__init__()
        self.__dict__["hidden"] = nn.Linear(8, 8)
        self.call = Call()

    @property
    def failing(self):
        raise RuntimeError("not ready")

    def other(self, x):
        return self.act(self.failing(x)) if self.failing else F.layer_norm(x, (8,))

    def forward(self, x):
        return self.act(self.hidden(x)) + self.call(self.fc1(x))


class Call:
    __hash__ = None

    def __call__(self, x):
        return x * 2


def test_parts_are_only_what_is_registered():
    plain = Odd()
    patched = twin(plain)
    fusedops.patch(patched)
    x = torch.randn(2, 8)
    assert torch.equal(patched(x), plain(x))


class Swish(nn.Module):
    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


CALLED = []


class Counting(nn.Module):
    def forward(self, x):
        CALLED.append(1)
        return F.relu(x)


class Clip(nn.Module):
    def forward(self, x):
        return x.clamp(0, 64)


class CountsItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(1)
        return F.relu(x)


@pytest.mark.parametrize("kind", [Swish, Counting, Clip, CountsItself])
def test_an_activation_that_may_change_or_does_more_is_called(kind, calls):
    model = nn.Sequential(nn.Linear(8, 8), kind())
    report = fusedops.patch(model)
    assert not report.replaced
    assert not CALLED
    assert not getattr(model[1], "calls", ())


def test_a_class_that_got_another_forward_is_looked_at_again(calls):
    class Own(Base):
        def forward(self, x):
            return self.act(self.fc1(x))

    model = Own()
    fusedops.patch(model)
    fusedops.unpatch(model)
    Own.forward = lambda self, x: self.fc1(x) * 0
    fusedops.patch(model)
    assert torch.equal(model(torch.ones(1, 8)), torch.zeros(1, 8))


def test_functions_by_other_names_and_by_keyword_are_found(calls):
    class Own(nn.Module):
        def forward(self, x):
            return sdpa(query=x, key=x, value=x)

    model = Own()
    x = torch.randn(1, 2, 3, 8)
    expected = model(x)
    assert [entry.calls for entry in fusedops.patch(model).replaced] == ["fusedops.scaled_dot_product_attention"]
    torch.testing.assert_close(model(x), expected)
    assert calls["F.scaled_dot_product_attention"] == 1


def test_attention_that_is_written_out_is_named():
    class Own(nn.Module):
        def forward(self, q, k, v):
            return (q @ k.mT).softmax(-1) @ v

    (left,) = fusedops.plan(Own()).left
    assert "written out" in left.reason


def test_a_source_that_is_not_at_hand_is_named():
    space = {"nn": nn, "F": F}
    text = """
class Made(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 8)

    def forward(self, x):
        return F.gelu(self.fc1(x))
"""
    exec(compile(text, "<nowhere>", "exec"), space)
    (left,) = fusedops.plan(space["Made"]()).left
    assert "source of its forward is not at hand" in left.reason
