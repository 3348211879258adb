"""Problems as a person writes them on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_type_hints

from fusedops.autotune.operator import Operator


def short(key: str) -> str:
    """A problem's line without what it does not have; what it has by its name alone.

    Examples:
        >>> short("width=64 rows=8 dropout=no kind=rms weight=yes activation=none")
        'width=64 rows=8 kind=rms weight'
    """
    words = (word.partition("=") for word in key.split(" "))
    return " ".join(
        name if value == "yes" else f"{name}={value}" for name, _, value in words if value not in ("no", "none", "")
    )


def has(key: str, word: str) -> bool:
    """Whether a problem's line has a word, written in full or as :func:`short` has it."""
    words = key.split(" ")
    return word in words or f"{word}=yes" in words


_WORDS = {"none": None, "yes": True, "true": True, "no": False, "false": False}


def problem_of_words(operator: Operator, words: Iterable[str]) -> Any:
    """The problem of ``name=value`` words, as :meth:`Operator.key` prints them; what is left out is as usual.

    Raises:
        ValueError: a word is none, or no problem has these fields; the message says what is taken.
    """
    kind = operator.problem
    values: dict[str, Any] = {}
    for word in (part for text in words for part in text.split()):
        name, equals, value = word.partition("=")
        flag = not equals and get_type_hints(kind).get(name) is bool
        value = "yes" if flag else value
        if not (equals or flag) or name not in kind._fields:
            raise ValueError(
                f"a problem of {operator.name} is name=value with names of {', '.join(kind._fields)}; got {word!r}"
            )
        values[name] = _value(value)
    try:
        problem = kind(**values)
    except TypeError as error:
        # Where the type has no defaults, what makes its problems has.
        make = getattr(kind, "of", None)
        missing = str(error).partition("argument")[2].lstrip("s: ")
        if make is None or kind._field_defaults:
            raise ValueError(f"a problem of {operator.name} needs {missing}") from None
        try:
            problem = make(**values)
        except TypeError as other:
            missing = str(other).partition("argument")[2].lstrip("s: ")
            raise ValueError(f"a problem of {operator.name} needs {missing or other}") from None
        except KeyError as other:
            raise ValueError(f"a problem of {operator.name}: {other} is no name of a dtype") from None
    return operator.problem_from_json(operator.problem_json(problem))


def values_of_words(words: Iterable[str]) -> dict[str, Any]:
    """The values of ``name=value`` words; ``name`` alone is a flag. Commas, as in ``window=128,0``, make a tuple.

    Raises:
        ValueError: a word has no name.

    Examples:
        >>> values_of_words(["rows=8 kind=rms", "causal", "window=128,none"])
        {'rows': 8, 'kind': 'rms', 'causal': True, 'window': (128, None)}
    """
    values: dict[str, Any] = {}
    for word in (part for text in words for part in text.split()):
        name, equals, value = word.partition("=")
        if not name.isidentifier() or (equals and not value):
            raise ValueError(f"sizes are name=value, or name for a flag; got {word!r}")
        parts = value.split(",")
        values[name] = tuple(map(_value, parts)) if len(parts) > 1 else _value(value if equals else "yes")
    return values


def _value(text: str) -> Any:
    if text.removeprefix("-").isdecimal():
        return int(text)
    return _WORDS.get(text, text)
