"""``benchmarks/decode.py`` without a device: its caches, its providers, its timed path, its report."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import fusedops
from benchmarks import compare, decode, decode_providers
from benchmarks.compare import CLOSE
from benchmarks.decode_providers import KINDS, Inputs, Problem, Provider
from benchmarks.measure import Sample
from benchmarks.report import OURS

CPU = torch.device("cpu")
PROVIDERS = compare.load(decode_providers.PROVIDERS, [OURS, "SDPA"])[0]


def problem(kind: str = "contiguous", dtype: torch.dtype = torch.bfloat16) -> Problem:
    found = Problem.of(kind, 3, 32, 8, 64, 4096, dtype)
    assert found is not None
    return found.tiny()


# --- caches and providers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_attention_of_the_numbers_that_are_stored(kind: str) -> None:
    inputs = Inputs.of(problem(kind), CPU)
    case = inputs.problem
    for b, length in enumerate(case.lengths):
        for head in range(case.heads):
            keys, values = (_token_by_token(inputs, number, b, head // case.group, length) for number in (0, 1))
            scores = keys @ inputs.q[b, head, 0].double() / math.sqrt(case.size)
            torch.testing.assert_close(inputs.exact[b, head, 0], scores.softmax(0) @ values, rtol=1e-9, atol=1e-12)


def _token_by_token(inputs: Inputs, number: int, b: int, head: int, length: int) -> torch.Tensor:
    """A head's keys (0) or values (1), (length, size) float64, from what a cache is described to be."""
    cache = (inputs.keys, inputs.values)[number]
    rows = []
    for token in range(length):
        at: tuple[int, ...] = (b, head, token)
        if inputs.table is not None:
            page = inputs.problem.page
            at = (int(inputs.table[b, token // page]), head, token % page)
        row = cache[at].double()
        if inputs.scales is not None:
            scales = inputs.scales[number]
            row = row * (scales[at] if scales.dim() == 3 else scales[head]).double()
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_right_steps_are_close_and_slightly_wrong_ones_are_not(kind: str) -> None:
    inputs = Inputs.of(problem(kind), CPU)
    for provider in PROVIDERS.values():
        step = provider.offer(inputs)
        assert step is not None
        assert decode_providers.distance(step, provider, inputs) <= CLOSE[torch.bfloat16]
        assert decode_providers.distance(lambda step=step: step() * 1.03, provider, inputs) > CLOSE[torch.bfloat16]
        nan = decode_providers.distance(lambda step=step: step() * float("nan"), provider, inputs)
        assert nan == float("inf")
    with pytest.raises(ValueError, match="shape"):
        decode_providers.distance(lambda: step()[:1], provider, inputs)


def test_a_cache_that_a_library_does_not_take_is_left_out() -> None:
    flex = decode_providers.PROVIDERS["FlexAttention"]()
    assert [kind for kind in KINDS if flex.offer(Inputs.of(problem(kind), CPU)) is not None] == ["contiguous"]


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_tokens_that_are_seen(kind: str) -> None:
    inputs = Inputs.of(problem(kind), CPU)
    case = inputs.problem
    tensors = [inputs.keys, inputs.values, *(inputs.scales or ())]
    all_bytes = sum(t.nbytes for t in tensors if t.dim() > 1)  # one scale a head is nothing
    room = inputs.keys.shape[0] * inputs.keys.shape[2]
    assert case.cache_bytes() == pytest.approx(all_bytes * sum(case.lengths) / room)


def test_lengths_are_the_ones_asked_for() -> None:
    assert Problem.of("unequal", 1, 32, 8, 128, 4096, torch.bfloat16) is None
    case = Problem.of("unequal", 16, 32, 8, 128, 4096, torch.bfloat16)
    assert case is not None
    assert len(set(case.lengths)) > 8
    assert case.length == pytest.approx(4096, rel=0.01)


class Recording:
    """Stands for a library: notes how it is called, and answers by fusedops."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs, self.called = inputs, {}

    def answer(self) -> torch.Tensor:
        step = PROVIDERS[OURS].offer(self.inputs)
        assert step is not None
        return step()


def test_flash_attention_gets_its_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.of(problem("paged"), CPU)
    library = Recording(inputs)

    def flash_attn_with_kvcache(q: Any, k: Any, v: Any, **options: Any) -> Any:
        library.called = {"q": q, "k": k, **options}
        return library.answer().transpose(1, 2)

    library.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    monkeypatch.setattr(decode_providers.importlib, "import_module", lambda name: library)
    provider = decode_providers.PROVIDERS["flash-attn 2"]()
    step = provider.offer(inputs)
    assert step is not None
    assert decode_providers.distance(step, provider, inputs) <= CLOSE[torch.bfloat16]
    assert library.called["q"].shape == (2, 1, 4, 64)
    assert library.called["k"].shape == (inputs.keys.shape[0], 16, 1, 64)
    assert library.called["block_table"] is inputs.table
    assert provider.offer(Inputs.of(problem("int8"), CPU)) is None


@pytest.mark.parametrize("kind", ["contiguous", "unequal"])
def test_flashinfer_gets_its_pages(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.of(problem(kind), CPU)
    library = Recording(inputs)

    class Wrapper:
        def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
            assert (layout, use_tensor_cores) == ("HND", True)

        def plan(self, *arguments: Any, **options: Any) -> None:
            library.called = {"plan": arguments, **options}

        def run(self, q: Any, cache: Any, **options: Any) -> Any:
            assert not options
            return library.answer()[:, :, 0]

    library.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setattr(decode_providers.importlib, "import_module", lambda name: library)
    provider = decode_providers.PROVIDERS["FlashInfer"]()
    step = provider.offer(inputs)
    assert step is not None
    assert decode_providers.distance(step, provider, inputs) <= CLOSE[torch.bfloat16]
    starts, indices, last, heads, kv_heads, size, page = library.called["plan"]
    assert (heads, kv_heads, size) == (4, 1, 64)
    for b, length in enumerate(inputs.problem.lengths):
        pages = indices[starts[b] : starts[b + 1]]
        assert (len(pages) - 1) * page + last[b] == length
        expected = torch.tensor([b]) if inputs.table is None else inputs.table[b, : len(pages)]
        assert torch.equal(pages, expected.int())


# --- timed -----------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decode.main(["--quick"]) == 1
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--lengths", "0"], ["--heads", "32"], ["--heads", "8/3"], ["--heads", "8/0"], ["--kinds", "ring"], ["--static"]],
    ids=" ".join,
)
def test_wrong_usage(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        decode.main(arguments)
    assert ended.value.code == 2


def test_quick_is_smaller_and_no_cache_is_larger_than_most_gpus() -> None:
    whole, quick = (decode._options(arguments) for arguments in ([], ["--quick"]))
    assert len(decode._problems(quick)) < len(decode._problems(whole))
    assert set(whole.providers) - set(quick.providers) == {"torch.compile", "FlexAttention"}
    found = decode._problems(whole).values()
    assert {case.kind for case in found} == set(KINDS)
    assert {case.length for case in found if not KINDS[case.kind].unequal} == set(decode.LENGTHS)
    assert max(case.cache_bytes() for case in found) <= decode.MOST_BYTES


def test_a_dry_run_compares_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["--dry-run", "--providers", "SDPA", "FlashInfer"]) == 0
    printed = capsys.readouterr()
    for kind in KINDS:
        for heads in ("32/8", "32/32"):
            assert f"{kind} {heads}: {OURS}: agrees with float64" in printed.out
            assert f"{kind} {heads}: SDPA: agrees with float64" in printed.out
    assert "left out: FlashInfer" in printed.err


def test_a_dry_run_finds_a_wrong_operator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    genuine = fusedops.attention_decode

    def one_less(*args: Any, cache_seqlens: torch.Tensor, **options: Any) -> Any:
        return genuine(*args, cache_seqlens=cache_seqlens - 1, **options)

    monkeypatch.setattr(fusedops, "attention_decode", one_less)
    assert decode.main(["--dry-run", "--kinds", "paged", "--providers", "SDPA"]) == 1
    assert "paged 32/8: fusedops: WRONG" in capsys.readouterr().out


@pytest.mark.interpreter
def test_from_timing_to_files(
    pretended_gpu: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = problem("int8", torch.float16)
    monkeypatch.setattr(decode, "_problems", lambda asked: {"one": case})
    asked = decode._options(["--dtype", "float16", "--seconds", "0", "--output", str(tmp_path)])
    providers = {
        **PROVIDERS,
        "broken": Provider(lambda inputs: lambda: inputs.q * 2),
        "failing": Provider(lambda inputs: 1 / 0),  # type: ignore[arg-type,return-value]
        "narrow": Provider(lambda inputs: None),  # does not take such a cache
    }
    assert decode.timed(providers, {"xformers": "xformers is not installed"}, pretended_gpu, asked) == 0
    assert "int8 cache of int8, 4 heads on 1 of 64" in capsys.readouterr().out
    report = json.loads((tmp_path / "decode-triton-interpreter.json").read_text())
    assert report["left_out"] == {"xformers": "xformers is not installed"}
    results = report["results"]
    assert [result["provider"] for result in results] == [OURS, "SDPA", "broken", "failing"]
    for result in results:
        assert result["cache_bytes"] == case.cache_bytes()
        if result["provider"] in PROVIDERS:
            assert result["error"] is None
            rate = result["cache_bytes"] / result["seconds_median"] / 1e9
            assert result["gigabytes_per_second"] == pytest.approx(rate)
            percent = 100 * result["copy_seconds"] / result["seconds_median"]
            assert result["percent_of_copy"] == pytest.approx(percent)
        else:
            assert result["error"].startswith("WRONG" if result["provider"] == "broken" else "ZeroDivisionError")
            assert result["seconds_median"] is None
    with (tmp_path / "decode-triton-interpreter.csv").open() as file:
        assert [line["provider"] for line in csv.DictReader(file)] == [result["provider"] for result in results]
    assert (tmp_path / "decode-triton-interpreter.png").stat().st_size > 5000


def test_the_table_tells_rates() -> None:
    names: dict[str, Any] = {"kind": "paged", "batch": 8, "heads": 32, "kv_heads": 8, "size": 128, "length": 4096}
    names |= {"stored": "bfloat16", "dtype": "bfloat16", "cache_bytes": 1 << 30, "distance": 1e-3}
    timed = {"sample": Sample.of([5e-4]), "copy": Sample.of([4e-4])}
    failed = decode.Result(provider="x", **names, error="E")
    table = decode.table([decode.Result(provider=OURS, **names, **timed), failed])
    assert "paged cache of bfloat16, 32 heads on 8 of 128" in table
    assert "| 8 x 4096 | 1024 MiB | 500 µs, 2147, 80% | E |" in table
