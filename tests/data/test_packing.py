"""Packing sequences into batches of a token budget."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fusedops
from fusedops.data import pack_sequences
from tests.harness.tensors import randn

LENGTHS = st.lists(st.integers(0, 12), max_size=20)


def sequences_of(lengths):
    return [torch.arange(length) + 100 * index for index, length in enumerate(lengths)]


@given(LENGTHS, st.integers(0, 4), st.none() | st.integers(1, 3), st.booleans())
def test_every_sequence_once_and_whole_within_the_budget(lengths, lookahead, most, pad):
    sequences = sequences_of(lengths)
    options = {"lookahead": lookahead, "max_sequences": most, "pad": pad, "padding_value": -7}
    batches = list(pack_sequences(sequences, 12, **options))
    found = {}
    for batch in batches:
        assert batch.data.shape == batch.position_ids.shape
        assert batch.cu_seqlens.dtype == torch.int32
        ends = batch.cu_seqlens.tolist()
        assert ends[0] == 0
        assert ends[-1] <= 12
        assert 1 <= len(batch) <= (most or len(batch))
        assert batch.max_seqlen == max(lengths[index] for index in batch.indices)
        if pad:
            assert batch.data.shape == (12,)
            assert (batch.data[ends[-1] :] == -7).all()
            assert not batch.position_ids[ends[-1] :].any()
            assert len(ends) == (most or len(batch)) + 1
        else:
            assert batch.data.shape == (ends[-1],)
        places = batch.unpack(batch.position_ids)
        for index, part, place in zip(batch.indices, batch.unpack(batch.data), places, strict=True):
            assert torch.equal(part, sequences[index])
            assert torch.equal(place, torch.arange(lengths[index]))
            assert index not in found
            found[index] = part
    assert len(found) == len(lengths)


@given(LENGTHS)
def test_without_lookahead_the_order_is_kept_and_batches_are_full(lengths):
    batches = list(pack_sequences(sequences_of(lengths), 12))
    assert [index for batch in batches for index in batch.indices] == list(range(len(lengths)))
    for batch, following in itertools.pairwise(batches):
        assert int(batch.cu_seqlens[-1]) + lengths[following.indices[0]] > 12


def test_lookahead_fills_batches_and_lets_none_wait():
    lengths = [7, 9, 3, 2, 10, 3]
    plain = [batch.indices for batch in pack_sequences(sequences_of(lengths), 10)]
    ahead = [batch.indices for batch in pack_sequences(sequences_of(lengths), 10, lookahead=3)]
    assert plain == [(0,), (1,), (2, 3), (4,), (5,)]
    assert ahead == [(0, 2), (1,), (3, 5), (4,)]
    starts = [batch[0] for batch in ahead]
    assert starts == sorted(starts)  # the one that has waited longest begins


def test_an_endless_stream_is_read_no_further_than_needed():
    read = []

    def endless():
        for index in itertools.count():
            read.append(index)
            yield [index] * 4

    batches = pack_sequences(endless(), 10, lookahead=2)
    next(batches)
    assert len(read) <= 6
    assert next(batches).indices == (2, 3)


def test_attention_of_packed_sequences_is_each_ones_own():
    lengths = [5, 0, 3, 4]
    sequences = [{"q": randn(n, 2, 8), "kv": randn(n, 1, 8)} for n in lengths]
    for options in ({}, {"pad": True, "max_sequences": 6}):
        (batch,) = pack_sequences(sequences, 16, **options)
        q, kv = batch.data["q"], batch.data["kv"]
        out = fusedops.attention_varlen(q, kv, kv, **batch.attention_arguments(), causal=True)
        assert not out[sum(lengths) :].any()
        for part, sequence in zip(batch.unpack(out), sequences, strict=True):
            one, two = (sequence[name].transpose(0, 1)[None] for name in ("q", "kv"))
            expected = fusedops.attention(one, two, two, causal=True)[0].transpose(0, 1)
            torch.testing.assert_close(part, expected)


@pytest.mark.parametrize(
    ("too_long", "indices", "lengths"),
    [("truncate", (0, 1, 2), [2, 5, 1]), ("split", (0, 1, 1, 1, 2), [2, 5, 5, 2, 1]), ("skip", (0, 2), [2, 1])],
)
def test_sequences_over_the_budget(too_long, indices, lengths):
    batches = list(pack_sequences(sequences_of([2, 12, 1]), 5, too_long=too_long))
    assert tuple(index for batch in batches for index in batch.indices) == indices
    parts = [part for batch in batches for part in batch.unpack(batch.data)]
    assert [len(part) for part in parts] == lengths
    if too_long == "split":
        assert torch.equal(torch.cat(parts[1:4]), torch.arange(12) + 100)
    with pytest.raises(ValueError, match=r'sequences\[1\] has 12 tokens, more than max_tokens \(5\).*too_long="trunc'):
        list(pack_sequences(sequences_of([2, 12, 1]), 5))


def test_the_last_batch_is_left_out_unless_it_is_full():
    def count(*lengths, **options):
        return len(list(pack_sequences(sequences_of(lengths), 6, drop_last=True, **options)))

    assert count(3, 3, 2) == 1
    assert count(3, 3, 6) == 2
    assert count(1, 1, 1, 1, max_sequences=2) == 2
    assert count(1, 1, 1, max_sequences=2) == 1
    assert count() == 0


def test_mappings_of_lists_and_padding_by_name():
    texts = [{"input_ids": [1, 2], "labels": [3, 4]}, {"input_ids": [], "labels": []}]
    (batch,) = pack_sequences(texts, 4, pad=True, padding_value={"labels": -100})
    assert batch.data["input_ids"].tolist() == [1, 2, 0, 0]
    assert batch.data["labels"].tolist() == [3, 4, -100, -100]
    assert batch.cu_seqlens.tolist() == [0, 2, 2]
    assert len(batch) == 2


def test_moving_a_batch_makes_another():
    (batch,) = pack_sequences([{"ids": [1, 2]}], 4)
    moved = batch.to("meta")
    assert {moved.data["ids"].device.type, moved.cu_seqlens.device.type, moved.position_ids.device.type} == {"meta"}
    assert (moved.indices, moved.max_seqlen) == (batch.indices, batch.max_seqlen)
    assert batch.data["ids"].device.type == "cpu"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("text", 4), TypeError, "sequences must be an iterable of sequences"),
        ((5, 4), TypeError, "sequences must be an iterable"),
        (([], 0), ValueError, "max_tokens must be at least 1"),
        (([], 2**31), ValueError, "max_tokens must be .* below 2³¹"),
        (([], 4.0), TypeError, "max_tokens must be an int"),
        (([], 4, {"max_sequences": 0}), ValueError, "max_sequences must be at least 1"),
        (([], 4, {"lookahead": -1}), ValueError, "lookahead must be at least 0"),
        (([], 4, {"too_long": "drop"}), ValueError, "too_long must be one of 'error'"),
        (([], 4, {"pad": 1}), TypeError, "pad must be a bool"),
        (([], 4, {"drop_last": None}), TypeError, "drop_last must be a bool"),
    ],
)
def test_wrong_arguments_are_errors_of_the_call(arguments, error, text):
    *positional, options = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(error, match=f"pack_sequences: {text}"):
        pack_sequences(*positional, **options)


@pytest.mark.parametrize(
    ("sequences", "error", "text"),
    [
        (["text"], TypeError, r"sequences\[0\] must be a tensor"),
        ([3], TypeError, r"sequences\[0\] must be a tensor"),
        ([["a"]], TypeError, r"sequences\[0\] must be a tensor .*list of numbers"),
        ([torch.ones(())], ValueError, r"sequences\[0\] must be of at least one dimension"),
        ([{}], ValueError, r"sequences\[0\] must be a mapping that is not empty"),
        ([{"a": [1], "b": [1, 2]}], ValueError, r"sequences\[0\] must be tensors of one length; got {'a': 1, 'b': 2}"),
        ([[1], {"a": [1]}], ValueError, r"sequences\[1\] must be as sequences\[0\] is: a tensor; got a mapping of 'a'"),
        ([{"a": [1]}, {"a": [1.0]}], ValueError, r"sequences\[1\]\['a'\] must be as that of sequences\[0\] is"),
        ([torch.ones(2, 3), torch.ones(2, 4)], ValueError, r"sequences\[1\] must be as that of sequences\[0\] is"),
    ],
)
def test_wrong_sequences_are_named(sequences, error, text):
    with pytest.raises(error, match=f"pack_sequences: {text}"):
        list(pack_sequences(sequences, 8))


def test_unpack_checks_what_it_splits():
    (batch,) = pack_sequences([[1, 2]], 4)
    with pytest.raises(ValueError, match=r"unpack: tokens must be of shape \(2, ...\)"):
        batch.unpack(torch.ones(3))
    with pytest.raises(TypeError, match=r"unpack: tokens must be a torch\.Tensor"):
        batch.unpack([1, 2])
