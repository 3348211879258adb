"""What do a norm and the linear layer behind it keep for the backward, in bytes an element of the input?

    python benchmarks/norm_memory.py [--width 4096] [--out-features 4096] [--output FILE.json]

Counts the distinct storages that autograd saves, for torch's composition, fusedops' two functions, with and without
``recompute``, and fusedops' one function; with a residual sum before the norm too. Parameters are left out: each call
is counted for two numbers of rows, and the difference is taken. Nothing is computed and no GPU is needed: the tensors
are fake ones, of any size. Prints a table and JSON.

Exit codes: 0 right, 1 Triton is missing, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels' path, which takes fake tensors too

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

import fusedops  # noqa: E402
from benchmarks.measure import markdown_table  # noqa: E402
from fusedops.runtime import backend  # noqa: E402


@dataclass(frozen=True, slots=True)
class Kept:
    """What one way of computing keeps.

    Attributes:
        setting: dtypes of the tensors.
        way: the call.
        per_element: bytes an element of the input.
        beside_input: the same less the input's own storage, for where that is kept anyway.
    """

    setting: str
    way: str
    per_element: float
    beside_input: float


@dataclass(frozen=True, slots=True)
class Tensors:
    """The arguments of every way."""

    x: torch.Tensor
    residual: torch.Tensor
    norm_weight: torch.Tensor
    norm_bias: torch.Tensor
    weight: torch.Tensor

    @classmethod
    def make(cls, rows: int, width: int, out_features: int, dtype: torch.dtype, device: str) -> Tensors:
        sizes = ((rows, width), (rows, width), (width,), (width,), (out_features, width))
        return cls(*(torch.empty(size, dtype=dtype, device=device, requires_grad=True) for size in sizes))

    @property
    def norm(self) -> tuple[int, torch.Tensor, torch.Tensor]:
        return self.x.shape[-1], self.norm_weight, self.norm_bias


def torchs(t: Tensors) -> Any:
    with fusedops.backend("torch"):
        return F.linear(F.layer_norm(t.x, t.x.shape[-1:], t.norm_weight, t.norm_bias), t.weight)


def recomputed(t: Tensors, out_dtype: torch.dtype | None = None) -> Any:
    return fusedops.linear(fusedops.layer_norm(t.x, *t.norm, out_dtype=out_dtype, recompute=True), t.weight)


def added(t: Tensors, recompute: bool) -> Any:
    output, stream = fusedops.add_layer_norm(t.x, t.residual, *t.norm, recompute=recompute)
    return fusedops.linear(output, t.weight), stream


WAYS: dict[str, Callable[[Tensors], Any]] = {
    "F.linear(F.layer_norm(x))": torchs,
    "linear(layer_norm(x))": lambda t: fusedops.linear(fusedops.layer_norm(t.x, *t.norm), t.weight),
    "linear(layer_norm(x, recompute=True))": recomputed,
    # Under autocast the one above gives float32, and linear makes itself a 16-bit copy.
    "linear(layer_norm(x, recompute=True, out_dtype=bfloat16))": lambda t: recomputed(t, torch.bfloat16),
    "layer_norm_linear(x)": lambda t: fusedops.layer_norm_linear(t.x, t.norm_weight, t.norm_bias, t.weight),
    "linear(add_layer_norm(x, r)[0])": lambda t: added(t, False),
    "linear(add_layer_norm(x, r, recompute=True)[0])": lambda t: added(t, True),
    "layer_norm_linear(x + r)": lambda t: fusedops.layer_norm_linear(
        t.x + t.residual, t.norm_weight, t.norm_bias, t.weight
    ),
}
SETTINGS: dict[str, tuple[torch.dtype, bool]] = {
    "bfloat16": (torch.bfloat16, False),
    "float32, bfloat16 autocast": (torch.float32, True),
}


def kept_storages(call: Callable[[], Any]) -> dict[int, int]:
    """Sizes in bytes of the distinct storages that autograd saves while ``call`` runs, by an identity."""
    alive, sizes = [], {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # or another storage could get its identity
        sizes[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(call())
    return sizes


def kept_bytes(call: Callable[[], Any]) -> int:
    """Bytes of the distinct storages that autograd saves while ``call`` runs."""
    return sum(kept_storages(call).values())


def measure(width: int = 4096, out_features: int = 4096, device: str = DEVICE) -> list[Kept]:
    """Every way in every setting."""
    results = []
    for setting, (dtype, autocast) in SETTINGS.items():
        for way, function in WAYS.items():
            kept, beside = (
                (second - first) / (1024 * width)
                for first, second in zip(
                    *(_bytes(function, rows, width, out_features, dtype, autocast, device) for rows in (1024, 2048)),
                    strict=True,
                )
            )
            results.append(Kept(setting, way, kept, beside))
    return results


def _bytes(
    function: Callable[[Tensors], Any],
    rows: int,
    width: int,
    out_features: int,
    dtype: torch.dtype,
    autocast: bool,
    device: str,
) -> tuple[int, int]:
    """Bytes kept, and the same without the input's storage."""
    context = torch.autocast(device, dtype=torch.bfloat16) if autocast else contextlib.nullcontext()
    with FakeTensorMode(), fusedops.backend("triton"), context:
        tensors = Tensors.make(rows, width, out_features, dtype, device)
        sizes = kept_storages(lambda: function(tensors))
        total = sum(sizes.values())
        return total, total - sizes.get(tensors.x.untyped_storage()._cdata, 0)


def table(results: list[Kept]) -> str:
    """A row a way; for each setting what is kept, and what of it besides x."""
    settings = list(SETTINGS)
    columns = [text for setting in settings for text in (setting, "besides x")]
    found = {(r.way, r.setting): (f"{r.per_element:.2f}", f"{r.beside_input:.2f}") for r in results}
    rows = [(f"`{way}`", *(cell for setting in settings for cell in found[way, setting])) for way in WAYS]
    return markdown_table(("bytes kept an element", *columns), rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096, help="The input's last size (default: 4096).")
    parser.add_argument("--out-features", type=int, default=4096, help="The output's (default: 4096).")
    parser.add_argument("--output", type=Path, help="Also writes the JSON to this file.")
    options = parser.parse_args(arguments)
    if min(options.width, options.out_features) < 1:
        parser.error("--width and --out-features must be at least 1")
    backend.interpreter_knows_bfloat16 = True  # fake tensors have no values that it could get wrong
    try:
        results = measure(options.width, options.out_features)
    except fusedops.BackendError as error:
        print(error, file=sys.stderr)
        return 1
    report = {"torch": torch.__version__, "results": [asdict(result) for result in results]}
    text = json.dumps(report, indent=1)
    print(table(results), text, sep="\n\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
