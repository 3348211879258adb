"""Offline compilation for the tests: cases, and a worker process that compiles them.

Kernels are interpreted in pytest's own process, so another one, without ``TRITON_INTERPRET``, compiles them. It is
started on first use, one in each pytest-xdist worker, and speaks JSON, a line a message. Its Triton cache stays between
runs (``FUSEDOPS_TEST_CACHE`` names the folder): a kernel whose source is unchanged is not compiled again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusedops.inspection.remembered import remembered, use_folder
from fusedops.runtime.device import TARGETS

if TYPE_CHECKING:
    from fusedops.inspection.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]

# bfloat16 does not exist on sm_75, where the operators refuse it: cases with it are for these targets.
BFLOAT16_TARGETS = frozenset(TARGETS) - {"sm_75"}

# One target of each table of default configurations, where a family's tables are by architecture.
TABLES = frozenset({"sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "gfx942", "gfx1100"})
# One target of each kind of matrix instruction: those before and since Hopper, and AMD's.
KINDS = frozenset({"sm_80", "sm_90", "gfx942"})


@dataclass(frozen=True)
class Case:
    """One call of a launcher, compiled for each target.

    Attributes:
        id: unique in its module; reads aloud.
        make: returns a call without arguments that runs the launcher on CPU tensors of the right dtypes and shapes
            (few rows: only their strides and dtypes count). Imports of kernel modules belong inside: the list of cases
            is read where Triton may be missing.
        targets: keys of ``fusedops.runtime.device.TARGETS``; None: all of them.
    """

    id: str
    make: Callable[[], Callable[[], object]]
    targets: frozenset[str] | None = None


def all_cases() -> dict[str, Case]:
    """Every case of every ``tests/compile/cases_<family>.py``, by ``<family>/<id>``."""
    import tests.compile as package

    found: dict[str, Case] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("cases_")):
        for case in importlib.import_module(f"tests.compile.{module}").CASES:
            name = f"{module.removeprefix('cases_')}/{case.id}"
            if name in found:
                raise ValueError(f"two cases are named {name}")
            found[name] = case
    return found


def cache_folder() -> Path:
    """Where compiled kernels stay between runs."""
    named = os.environ.get("FUSEDOPS_TEST_CACHE")
    if named:
        return Path(named).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("fusedops-tests", appauthor=False))


def compiling_environment() -> dict[str, str]:
    """The environment of a process that compiles kernels: none that interprets them, and the cache that stays.

    The default configurations are compiled; those that are shipped or stored have tests of their own.
    """
    left_out = ("TRITON_INTERPRET", "FUSEDOPS_BACKEND")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    here = {"TRITON_CACHE_DIR": str(cache_folder() / "triton"), "OMP_NUM_THREADS": "1", "FUSEDOPS_AUTOTUNE": "off"}
    return {**environment, **here}


@dataclass(frozen=True)
class KernelTraffic:
    """What one launch of a case loads and stores; ``constants`` are the kernel's compile-time arguments."""

    name: str
    constants: dict[str, Any]
    traffic: Traffic


class CompileWorker:
    """The process that compiles. It is started by the first request and again after it died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the worker)
        self._traffic: dict[tuple[str, str], list[KernelTraffic]] = {}

    def compile(self, case: str, target: str) -> list[dict[str, Any]]:
        """What each launch of a case compiles to: the fields of ``fusedops.inspection.offline.Compiled`` less asm.

        Raises:
            AssertionError: a kernel does not compile; the message is the compiler's, shortened.
        """
        return self._ask({"case": case, "target": target, "want": "resources"})

    def traffic(self, case: str, target: str) -> list[KernelTraffic]:
        """What each launch of a case loads from memory and stores there; errors as of :meth:`compile`.

        Several tests ask it of one case: the answers are kept.
        """
        from fusedops.inspection.accesses import Access
        from fusedops.inspection.traffic import Traffic

        if (case, target) not in self._traffic:
            self._traffic[case, target] = [
                KernelTraffic(
                    kernel["name"],
                    kernel["constants"],
                    Traffic(kernel["threads"], tuple(Access(**access) for access in kernel["accesses"])),
                )
                for kernel in self._ask({"case": case, "target": target, "want": "traffic"})
            ]
        return self._traffic[case, target]

    def figures(self, case: str, target: str) -> list[dict[str, Any]]:
        """What each launch of a case consists of: the fields of ``fusedops.inspection.figures.Figures``, and its tile.

        The tile is the kernel's compile-time arguments whose names begin with ``BLOCK``. Errors as of :meth:`compile`.
        """
        return self._ask({"case": case, "target": target, "want": "figures"})

    def kernels(self, case: str, target: str) -> list[str]:
        """Names of the kernels that a case launches; nothing is compiled."""
        return self._ask({"case": case, "target": target, "want": "names"})

    def call(self, function: str, *arguments: Any) -> Any:
        """What a function returns in the process that compiles: ``package.module:name``, arguments and result JSON.

        Raises:
            AssertionError: it raised; the message is the error's.
        """
        return self._ask({"function": function, "arguments": arguments})

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # it holds nothing: Triton's cache is written file by file
            self._process.communicate()
            self._process = None
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> Any:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            self._process = None
            self._errors.seek(0)
            raise AssertionError(f"the compiler died ({code}) on {request}: {self._errors.read()[-2000:]}")
        answer = json.loads(line)
        if "error" in answer:
            raise AssertionError(answer["error"])
        return answer["result"]

    def _start(self) -> subprocess.Popen[str]:
        self._errors.seek(0)
        self._errors.truncate()
        return subprocess.Popen(
            [sys.executable, "-m", "tests.harness.compile"],
            cwd=ROOT,
            env=compiling_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )


def _serve() -> None:
    """The worker's side: answer requests until the pipe closes."""
    # The compiler's libraries print to the process's standard output; the answers get a pipe of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    use_folder(cache_folder())
    cases = all_cases()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"result": _call(**request) if "function" in request else _compile(cases, **request)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=str), file=answers, flush=True)


def _call(function: str, arguments: list[Any]) -> Any:
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)


def _compile(cases: dict[str, Case], case: str, target: str, want: str) -> list[Any]:
    from fusedops.inspection.offline import capture_launches, compile_launch

    call = cases[case].make()
    with capture_launches(target) as launches:
        call()
    if want == "names":
        return [launch.name for launch in launches]
    plain = {"resources": _plain, "traffic": _plain_traffic, "figures": plain_figures}[want]
    return [plain(compile_launch(launch, target)) for launch in launches]


def _plain(compiled: Any) -> dict[str, Any]:
    names = ("name", "target", "registers", "spill_bytes", "shared", "num_warps", "seconds")
    return {name: getattr(compiled, name) for name in names}


def _plain_traffic(compiled: Any) -> dict[str, Any]:
    from fusedops.inspection.traffic import memory_traffic

    return {"name": compiled.name, "constants": dict(compiled.constants), **asdict(memory_traffic(compiled))}


def plain_figures(compiled: Any) -> dict[str, Any]:
    from fusedops.inspection.figures import figures

    # Reading a large kernel's code takes as long as all else that is asked of one that is compiled: what was read of
    # the same code, by the same modules, is remembered.
    given = hashlib.sha256(_inspection() + repr(replace(compiled, seconds=0.0)).encode())
    for name in ("ptx", "cubin", "llir", "amdgcn"):
        stage = compiled.asm.get(name, b"")
        given.update(stage if isinstance(stage, bytes) else stage.encode())
    found = json.loads(remembered("figures", given.digest(), lambda: json.dumps(asdict(figures(compiled)))))
    tile = {name: size for name, size in compiled.constants.items() if name.startswith("BLOCK")}
    return {**found, "tile": tile}


@functools.cache
def _inspection() -> bytes:
    """A hash of all that reads figures from code, and of what it knows of the devices."""
    import triton

    given = hashlib.sha256(triton.__version__.encode())
    others = ("autotune/roofline.py", "runtime/device.py", "runtime/launch.py")
    for path in (*sorted(ROOT.glob("fusedops/inspection/*.py")), *(ROOT / "fusedops" / other for other in others)):
        given.update(path.read_bytes())
    return given.digest()


if __name__ == "__main__":
    _serve()
