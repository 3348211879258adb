"""Which methods are chains: read from the source, and nothing is guessed."""

from __future__ import annotations

import linecache

import pytest
from torch import nn

from fusedops.patching.chains import chains_of, straight_line
from tests.patching.models import MLP


class Chains:
    def nested(self, x):
        return self.c(self.b(self.a(x)))

    def statements(self, hidden):
        """A docstring is no statement."""
        hidden = self.a(hidden)
        other = self.b(hidden)
        return self.c(other)

    def annotated(self, x: int) -> int:
        x = self.a(x)
        return self.b(x)

    def twice(self, x):
        return self.a(self.a(x))


@pytest.mark.parametrize(
    ("method", "names"),
    [("nested", "abc"), ("statements", "abc"), ("annotated", "ab"), ("twice", "aa")],
)
def test_chain(method, names):
    assert straight_line(getattr(Chains, method)) == tuple(names)


class NotChains:
    def residual(self, x):
        return x + self.b(self.a(x))

    def scaled(self, x):
        return self.b(self.a(x)) * 2

    def two_uses(self, x):
        y = self.a(x)
        return self.c(self.b(y), y)

    def dropped_call(self, x):
        self.a(x)
        return self.b(x)

    def dropped_result(self, x):
        y = self.a(x)  # noqa: F841
        return self.b(x)

    def condition(self, x):
        if self.training:
            x = self.a(x)
        return self.b(x)

    def loop(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def function(self, x):
        return len(self.a(x))

    def option(self, x):
        return self.b(self.a(x), inplace=True)

    def default(self, x=None):
        return self.b(self.a(x))

    def more(self, x, y):
        return self.b(self.a(x))

    def stars(self, *x):
        return self.b(self.a(*x))

    def deeper(self, x):
        return self.b.c(self.a(x))

    def other_object(self, x):
        return x.b(self.a(x))

    def pair(self, x):
        return self.a(x), None

    def nothing(self, x):
        return x

    def no_return(self, x):
        x = self.a(x)

    def early_return(self, x):
        return self.a(x)
        return self.b(x)

    def rebound(self, x):
        self = x
        return self.a(x)

    def state(self, x):
        x = self.a(x)
        self.last = x
        return self.b(x)

    async def coroutine(self, x):
        return self.a(x)

    def generator(self, x):
        yield self.a(x)

    def closure(self, x):
        return (lambda: self.a(x))()


@pytest.mark.parametrize("method", [name for name in vars(NotChains) if not name.startswith("__")])
def test_not_a_chain(method):
    assert straight_line(getattr(NotChains, method)) is None


def test_a_decorated_method_is_not_a_chain():
    import functools

    def twice(function):
        @functools.wraps(function)
        def wrapper(self, x):
            return function(self, function(self, x))

        return wrapper

    class Decorated(nn.Module):
        @twice
        def forward(self, x):
            return self.b(self.a(x))

    assert chains_of(Decorated) == {}


def test_a_static_method_is_not_a_chain_of_its_class():
    class Static(nn.Module):
        @staticmethod
        def other(self, x):
            return self.b(self.a(x))

    assert chains_of(Static) == {}


def test_the_method_that_runs_counts():
    class Own(MLP):
        def forward(self, x):
            return self.down(self.act(self.up(x))) * 2

    class Inherited(MLP):
        pass

    assert chains_of(Own) == {}
    assert chains_of(Inherited) == {"forward": ("up", "act", "down", "drop")}


def test_without_source_nothing_is_assumed():
    space: dict = {}
    exec("def f(self, x):\n    return self.b(self.a(x))\n", space)
    assert straight_line(space["f"]) is None


def test_a_source_that_is_not_the_codes_is_not_believed(tmp_path):
    path = tmp_path / "code.py"
    text = "def f(self, x):\n    return self.b(self.a(x))\n"
    path.write_text(text)
    space: dict = {}
    exec(compile(text, str(path), "exec"), space)
    assert straight_line(space["f"]) == ("a", "b")
    path.write_text(text.replace("self.b", "self.other"))
    linecache.checkcache(str(path))
    assert straight_line(space["f"]) is None
