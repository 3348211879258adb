"""How tensors are read as rows: where they lie if three strides describe them, else through a copy."""

from __future__ import annotations

import pytest
import torch

from fusedops.norm.rows import as_rows


def address(view, tensor, row):
    """Offset of a row's first element behind the storage's beginning, by the formula that the kernels use."""
    c = row % view.sizes[1] if view.split else row
    rest = row // view.sizes[1] if view.split else 0
    a, b = rest // view.sizes[0], rest % view.sizes[0]
    strides = view.strides[tensor]
    return view.tensors[tensor].storage_offset() + a * strides[0] + b * strides[1] + c * strides[2]


def check(tensors, dims=1):
    """Every row, read by the formula, is the row that indexing gives."""
    view = as_rows(tensors, dims)
    for i, tensor in enumerate(tensors):
        if tensor is None:
            assert view.tensors[i] is None
            continue
        flat = view.tensors[i].as_strided((view.tensors[i].untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        expected = tensor.reshape(view.rows, view.width)
        for row in range(view.rows):
            at = address(view, i, row)
            assert torch.equal(flat[at : at + view.width], expected[row])
    return view


def numbered(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


VIEWS = {
    "contiguous": (lambda: numbered(3, 4, 8), False),
    "one row": (lambda: numbered(8), False),
    "rows apart": (lambda: numbered(6, 20)[:, 3:11], False),
    "rows expanded": (lambda: numbered(8).expand(5, 8), False),
    "heads of a projection": (lambda: numbered(2, 5, 3 * 8).view(2, 5, 3, 8).transpose(1, 2), True),
    "queries of a packed projection": (lambda: numbered(2, 5, 3, 4, 8)[:, :, 1].transpose(1, 2), True),
    "a batch of one": (lambda: numbered(1, 5, 3, 4, 8)[:, :, 1].transpose(1, 2), True),
    "sizes of one between": (lambda: numbered(4, 1, 3, 1, 8).transpose(0, 2), True),
    "every second of two dimensions": (lambda: numbered(4, 6, 8)[::2, ::2], True),
    "expanded before and behind": (lambda: numbered(3, 8)[None, :, None].expand(2, 3, 4, 8), True),
}


@pytest.mark.parametrize("name", VIEWS)
def test_read_where_they_lie(name):
    make, split = VIEWS[name]
    tensor = make()
    view = check([tensor])
    assert view.tensors[0] is tensor, "copied"
    assert view.split is split


@pytest.mark.parametrize("name", VIEWS)
def test_beside_a_contiguous_one_and_an_absent_one(name):
    tensor = VIEWS[name][0]()
    check([None, tensor, tensor.contiguous()])


def test_four_strides_are_copied():
    tensor = numbered(2, 3, 4, 5, 8).transpose(0, 3).transpose(1, 2)
    view = check([tensor])
    assert not view.split
    assert view.tensors[0].is_contiguous()


def test_columns_apart_are_copied():
    view = check([numbered(8, 3, 4).movedim(0, -1), numbered(3, 4, 8)])
    assert view.tensors[0].is_contiguous()


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_normalised_over_several_dimensions(dims):
    check([numbered(2, 3, 4, 5), numbered(2, 3, 4, 10)[..., ::2], numbered(2, 9, 4, 5)[:, 3:6]], dims)


@pytest.mark.parametrize(
    ("shape", "unit"),
    [((3, 64), 1), ((3, 72), 8), ((3, 8), 8), ((3, 1000), 8), ((3, 20), 4), ((3, 4), 4), ((3, 7), 1), ((3, 6), 1)],
)
def test_units_tell_the_compiler_what_widths_are_multiples_of(shape, unit):
    """1 where Triton finds out by itself: all are multiples of 16."""
    view = as_rows([numbered(*shape)], 1)
    counted_in, width, strides = view.counted()
    assert counted_in == view.unit == unit
    assert width * unit == view.width
    assert [[stride * unit for stride in s] for s in strides] == [list(s) for s in view.strides]


def test_units_divide_every_stride():
    heads = numbered(2, 5, 3, 4, 72)[:, :, 1].transpose(1, 2)
    assert as_rows([heads, heads.contiguous()], 1).unit == 8
    assert as_rows([numbered(6, 80)[:, :72]], 1).unit == 8
    assert as_rows([numbered(6, 84)[:, :72]], 1).unit == 4
    assert as_rows([numbered(6, 81)[:, :72]], 1).unit == 1
