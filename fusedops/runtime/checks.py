"""Checks of arguments, each an error that names the argument, what it got and what it takes.

They run on every call, so each is a few attribute reads; the text is only built when a check fails.
"""

from __future__ import annotations

import numbers
from typing import Any, NoReturn

import torch

_STRIDED = torch.strided
_FLOATING = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


def describe(value: Any) -> str:
    """A value as an error message shows it: a tensor by dtype, shape and device."""
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a {dtype} tensor of shape {tuple(value.shape)} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def wrong_type(function: str, argument: str, takes: str, got: Any) -> NoReturn:
    raise TypeError(f"{function}: {argument} must be {takes}; got {describe(got)}")


def wrong_value(function: str, argument: str, takes: str, got: Any) -> NoReturn:
    raise ValueError(f"{function}: {argument} must be {takes}; got {describe(got)}")


def check_tensor(function: str, argument: str, value: Any) -> None:
    """A strided tensor of float32, float16, bfloat16 or float64."""
    if isinstance(value, torch.Tensor) and value.dtype in _FLOATING and value.layout is _STRIDED:
        return
    if not isinstance(value, torch.Tensor):
        wrong_type(function, argument, "a torch.Tensor", value)
    if value.dtype not in _FLOATING:
        wrong_type(function, argument, "a floating-point tensor (float32, float16, bfloat16 or float64)", value)
    wrong_type(function, argument, f"a strided tensor (its layout is {value.layout})", value)


def check_same_device(function: str, argument: str, value: torch.Tensor, like: str, other: torch.Tensor) -> None:
    if value.device != other.device:
        wrong_value(function, argument, f"on the device of {like} ({other.device})", value)


def check_parameter(
    function: str,
    argument: str,
    value: torch.Tensor | None,
    shape: tuple[int, ...],
    input: torch.Tensor,
    takes: str = "of shape {}",
) -> None:
    """A tensor of a shape on the device of ``input``, or None. ``takes`` is the text of a wrong shape's error."""
    if value is None:
        return
    check_tensor(function, argument, value)
    if value.shape != shape:
        wrong_value(function, argument, takes.format(tuple(shape)), value)
    if value.device != input.device:
        check_same_device(function, argument, value, "input", input)


def check_number(function: str, argument: str, value: Any) -> None:
    """A real number: Python's, numpy's or a symbolic one, but no bool."""
    if type(value) is float:
        return
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        if not isinstance(value, bool):
            return
    elif isinstance(value, numbers.Real):
        return
    wrong_type(function, argument, "a number", value)


def check_bool(function: str, argument: str, value: Any) -> None:
    """True or False."""
    if not isinstance(value, bool):
        wrong_type(function, argument, "a bool", value)


def check_count(function: str, argument: str, value: Any) -> None:
    """An int of at least 0."""
    if not isinstance(value, int) or isinstance(value, bool):
        wrong_type(function, argument, "an int", value)
    if value < 0:
        wrong_value(function, argument, "at least 0", value)


def check_probability(function: str, argument: str, value: Any) -> None:
    """A number from 0 to 1."""
    check_number(function, argument, value)
    if not 0.0 <= value <= 1.0:
        wrong_value(function, argument, "a probability from 0 to 1", value)


def check_dtype(function: str, argument: str, value: Any) -> None:
    """float32, float16, bfloat16 or float64."""
    if not isinstance(value, torch.dtype):
        wrong_type(function, argument, "a torch.dtype", value)
    if value not in _FLOATING:
        wrong_value(function, argument, "a floating dtype (float32, float16, bfloat16 or float64)", value)
