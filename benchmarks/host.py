"""What a call of each operator costs the host, on a machine with or without a GPU.

    python benchmarks/host.py [--operators layer_norm …] [--repeats 400] [--target sm_90] [--json] [--output FILE.json]

A driver that does nothing takes the place of the GPU's: kernels are compiled and launched through Triton's ordinary
path, and never run. Of each operator it times a forward without gradients, a forward that will be differentiated, and a
backward; then, with the same arguments, the launches alone. What is above the launches is fusedops' and torch's own
share: checks, the look-up of the configuration, the allocation of outputs, the library operator and autograd. torch's
operator of the same name, on tensors of a few elements, stands beside it: on the CPU it does everything but launch.

The look-up itself is timed apart: with a warm memory it must take less than 2 µs in the fastest of 20 rounds.

Exit codes: 0 right, 1 the look-up is over its limit, 2 usage.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # works in a checkout that is not installed

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import fusedops  # noqa: E402
from benchmarks.measure import Run, markdown_table  # noqa: E402
from benchmarks.report import header  # noqa: E402
from fusedops.inspection.offline import Launch, capture_launches, target_facts  # noqa: E402
from fusedops.runtime.device import DeviceFacts, pretend  # noqa: E402

LIMIT_US = 2.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=list(CALLS), default=list(CALLS), help="Default: all.")
    parser.add_argument("--repeats", type=int, default=400, help="Calls a measurement (default: 400).")
    parser.add_argument("--target", default="sm_90", help="The GPU to compile for (default: sm_90).")
    parser.add_argument("--json", action="store_true", help="Print JSON instead of tables.")
    parser.add_argument("--output", type=Path, help="Also writes the JSON to this file.")
    options = parser.parse_args(arguments)
    if options.repeats < 10:
        parser.error("--repeats must be at least 10")
    try:
        facts = target_facts(options.target)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(1)
    report = measure(options.operators, facts, options.repeats)
    text = json.dumps(report, indent=1)
    print(text if options.json else tables(report))
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(text + "\n")
    return 0 if report["ok"] else 1


def measure(operators: list[str], facts: DeviceFacts, repeats: int) -> dict[str, Any]:
    calls = [_operator(name, *CALLS[name](), facts, repeats) for name in operators]
    found = look_up(facts, 50 * repeats)
    return {
        **header({}),
        "target": facts.arch,
        "operators": calls,
        "look_up": found,
        # By the fastest round: what else the machine does only adds to a time.
        "ok": found["least_us"] < LIMIT_US,
    }


Call = Callable[..., torch.Tensor]


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def _layer_norm() -> tuple[list[torch.Tensor], Call, Call]:
    return (
        [_draw(4, 64), _draw(64), _draw(64)],
        lambda x, w, b: fusedops.layer_norm(x, (64,), w, b),
        lambda x, w, b: F.layer_norm(x, (64,), w, b),
    )


def _rms_norm() -> tuple[list[torch.Tensor], Call, Call]:
    return (
        [_draw(4, 64), _draw(64)],
        lambda x, w: fusedops.rms_norm(x, (64,), w),
        lambda x, w: F.rms_norm(x, (64,), w),
    )


def _linear() -> tuple[list[torch.Tensor], Call, Call]:
    return (
        [_draw(32, 64), _draw(64, 64), _draw(64)],
        lambda x, w, b: fusedops.linear(x, w, b, "gelu"),
        lambda x, w, b: F.gelu(F.linear(x, w, b)),
    )


def _gated_linear() -> tuple[list[torch.Tensor], Call, Call]:
    return (
        [_draw(32, 64), _draw(64, 64), _draw(64, 64)],
        lambda x, g, u: fusedops.gated_linear(x, g, u),
        lambda x, g, u: F.silu(F.linear(x, g)) * F.linear(x, u),
    )


def _attention() -> tuple[list[torch.Tensor], Call, Call]:
    return (
        [_draw(1, 2, 16, 64) for _ in range(3)],
        lambda q, k, v: fusedops.attention(q, k, v, causal=True),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    )


CALLS: dict[str, Callable[[], tuple[list[torch.Tensor], Call, Call]]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "linear": _linear,
    "gated_linear": _gated_linear,
    "attention": _attention,
}


def _operator(
    name: str, inputs: list[torch.Tensor], ours: Call, theirs: Call, facts: DeviceFacts, repeats: int
) -> dict[str, Any]:
    """Microseconds a call, medians of interleaved rounds."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    grad = torch.ones_like(theirs(*inputs))

    def differentiated(call: Call) -> Run:
        output = call(*leaves)
        return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)

    def without(call: Call) -> Run:
        def run() -> None:
            with torch.no_grad():
                call(*inputs)

        return run

    with fusedops.backend("triton"), pretend(facts), stub_driver(facts):
        launches = _launches(facts, lambda: ours(*leaves)), _launches(facts, lambda: differentiated(ours)())
        forward, both = launches
        backward = both[len(forward) :]
        runs: dict[str, Run] = {
            "inference": without(ours),
            "forward": lambda: ours(*leaves),
            "backward": differentiated(ours),
            "forward_launches": lambda: _launch(forward),
            "backward_launches": lambda: _launch(backward),
            "torch_inference": without(theirs),
            "torch_forward": lambda: theirs(*leaves),
            "torch_backward": differentiated(theirs),
        }
        medians = _interleaved(runs, repeats)
    return {
        "name": name,
        "kernels": {"forward": [x.name for x in forward], "backward": [x.name for x in backward]},
        **{f"{key}_us": round(value, 2) for key, value in medians.items()},
        "inference_above_us": round(medians["inference"] - medians["forward_launches"], 2),
        "forward_above_us": round(medians["forward"] - medians["forward_launches"], 2),
        "backward_above_us": round(medians["backward"] - medians["backward_launches"], 2),
    }


def _launches(facts: DeviceFacts, call: Run) -> list[Launch]:
    with capture_launches(facts) as launches:
        call()
    return list(launches)


def _launch(launches: list[Launch]) -> None:
    for launch in launches:
        launch.kernel.run(*launch.args, grid=launch.grid, warmup=False, **launch.kwargs)


def _interleaved(runs: dict[str, Run], repeats: int) -> dict[str, float]:
    """Medians over rounds, in microseconds."""
    return {name: statistics.median(values) for name, values in _rounds(runs, repeats).items()}


def _rounds(runs: dict[str, Run], repeats: int, rounds: int = 20) -> dict[str, list[float]]:
    """The mean of each round, in microseconds: a clock's own cost vanishes in a round."""
    each = max(1, repeats // rounds)
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(3):
            run()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.perf_counter()
                for _ in range(each):
                    run()
                samples[name].append((time.perf_counter() - start) / each * 1e6)
    finally:
        gc.enable()
    return samples


def look_up(facts: DeviceFacts, repeats: int) -> dict[str, Any]:
    """A warm look-up: what a launcher does, the making of the key included; and what it leaves allocated."""
    from fusedops.attention.tuning import ATTENTION, AttentionProblem
    from fusedops.autotune.resolve import resolve

    device = torch.device("cuda", 0)

    def once() -> None:
        problem = AttentionProblem("forward", 128, 128, 4096, 4096, 64, 4, "bfloat16", "ieee", True, False, "", True)
        resolve(ATTENTION, problem, device)

    with pretend(facts):
        (rounds,) = _rounds({"look_up": once}, repeats).values()
        tracemalloc.start()
        once()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(1000):
            once()
        left = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    return {
        "median_us": round(statistics.median(rounds), 3),
        "least_us": round(min(rounds), 3),
        "limit_us": LIMIT_US,
        "bytes_left_by_1000": left,
    }


class _Driver:
    """What Triton's launch path asks of a driver; loading and launching do nothing."""

    def __init__(self, facts: DeviceFacts) -> None:
        from triton.backends.compiler import GPUTarget

        self.utils = self
        self._facts = facts
        kind = ("hip", facts.arch) if facts.vendor == "amd" else ("cuda", facts.capability)
        self._target = GPUTarget(*kind, facts.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": self._facts.shared_memory, "multiprocessor_count": self._facts.multiprocessor_count}

    def load_binary(self, *_: Any) -> tuple[int, int, int, int, int]:
        return 0, 0, 32, 0, 1024  # module, function, registers, spilled bytes, threads

    def unload_module(self, module: int) -> None:
        pass

    @staticmethod
    def launcher_cls(source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *arguments: None


@contextlib.contextmanager
def stub_driver(facts: DeviceFacts) -> Iterator[None]:
    """Within the context kernels are compiled for a device and launched on none."""
    from triton.runtime.driver import driver

    # The public getter would start the real driver, or fail where there is none.
    name = "_active" if hasattr(driver, "_active") else "active"
    before = getattr(driver, name)
    driver.set_active(_Driver(facts))
    try:
        yield
    finally:
        setattr(driver, name, before)


def tables(report: dict[str, Any]) -> str:
    rows = [
        (
            entry["name"],
            *(
                f"{entry[f'{direction}_us']:.1f} - {entry[f'{launched}_launches_us']:.1f} = "
                f"{entry[f'{direction}_above_us']:.1f}"
                for direction, launched in (("inference", "forward"), ("forward", "forward"), ("backward", "backward"))
            ),
            f"{entry['torch_inference_us']:.1f}",
            f"{entry['torch_forward_us']:.1f}",
            f"{entry['torch_backward_us']:.1f}",
        )
        for entry in report["operators"]
    ]
    found = report["look_up"]
    looked_up = (
        f"A warm look-up: {found['least_us']:.2f} µs, median {found['median_us']:.2f} (limit {found['limit_us']:g})"
    )
    return "\n\n".join(
        [
            "Microseconds of the host a call, the launches of its kernels, and the difference:",
            markdown_table(
                ("operator", "inference", "forward", "backward", "torch inference", "forward", "backward"), rows
            ),
            f"{looked_up}, {found['bytes_left_by_1000']} bytes left by a thousand.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
