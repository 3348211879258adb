"""One ``pytest`` runs what this machine can run: torch and interpreter tests on a CPU, torch and gpu tests on a GPU.

``TRITON_INTERPRET=1`` must be set before triton is imported, and decides what the kernels take in this process (CPU
tensors) for good. It is set here where no GPU is found; on a GPU machine set it yourself to run the interpreter tests.
"""

from __future__ import annotations

import os

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores; a thread pool each would only get in the way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import atexit
import importlib.util
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import hypothesis
import pytest
import torch

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_HAS_GPU = torch.cuda.is_available()
if not _HAS_GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What this machine's user has stored must not decide what tests see. Processes that a test starts inherit it.
_CACHE = tempfile.mkdtemp(prefix="fusedops-tests-")
atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)
os.environ["FUSEDOPS_CACHE_DIR"] = _CACHE
for _name in ("FUSEDOPS_AUTOTUNE", "FUSEDOPS_CONFIG_PATH", "FUSEDOPS_RECORD_FILE", "FUSEDOPS_STRICT"):
    os.environ.pop(_name, None)

import fusedops  # noqa: E402
from fusedops.runtime.settings import SETTINGS  # noqa: E402

if SETTINGS.interpret and _HAS_TRITON:
    from tests.harness.interpreter import install

    install()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

# Derandomised: the same examples in every run; a failing one is found again without a database.
hypothesis.settings.register_profile("fusedops", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("fusedops")

if TYPE_CHECKING:
    from tests.harness.compile import CompileWorker

_AVAILABLE = {
    "interpreter": SETTINGS.interpret and _HAS_TRITON,
    "gpu": _HAS_GPU and _HAS_TRITON and not SETTINGS.interpret,
}


@dataclass(frozen=True, slots=True)
class Runner:
    """What executes fusedops' functions in a test.

    Attributes:
        name: ``torch``, ``interpreter`` or ``gpu``.
        device: where the test's tensors belong.
        kernels: our kernels run (and refuse what they cannot serve), rather than torch's operators.
    """

    name: str
    device: torch.device

    @property
    def kernels(self) -> bool:
        return self.name != "torch"


def pytest_configure(config: pytest.Config) -> None:
    # Not in pyproject.toml: pytest imports a filter's category from there before this file is read.
    config.addinivalue_line("filterwarnings", "error::fusedops.FallbackWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [name for name, available in _AVAILABLE.items() if not available]
    left_out = [item for item in items if any(item.get_closest_marker(name) for name in missing)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    from tests.harness.static_gate import summarise

    summarise(terminalreporter)


_INTERPRETER = pytest.param("interpreter", marks=pytest.mark.interpreter)
_GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["torch", _INTERPRETER, _GPU])
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """The test runs once a backend; fusedops is held to that backend while it runs."""
    yield from _run(request.param)


@pytest.fixture(params=[_INTERPRETER, _GPU])
def kernel_runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """As ``runner``, for tests of the kernels alone."""
    yield from _run(request.param)


def _run(name: str) -> Iterator[Runner]:
    device = torch.device("cuda" if name == "gpu" else "cpu")
    runner = Runner(name, device)
    with fusedops.backend("triton" if runner.kernels else "torch"):
        if not runner.kernels:
            yield runner
            return
        # Fills what torch.empty returns with NaN: an output that no kernel wrote shows. Tests may use operators that
        # have no deterministic form, hence a warning rather than an error.
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        fill = torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield runner
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
            torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture(scope="session")
def compiler() -> Iterator[CompileWorker]:
    """A process that compiles kernels: one for all tests, for it takes seconds to start."""
    from tests.harness.compile import CompileWorker

    worker = CompileWorker()
    yield worker
    worker.close()


@pytest.fixture(autouse=True)
def seed(request: pytest.FixtureRequest) -> int:
    """Seed torch's generators from the test's own name: fresh numbers in each test, the same in each run.

    ``FUSEDOPS_TEST_SEED`` (an integer) gives other numbers.
    """
    number = zlib.crc32(request.node.nodeid.encode()) ^ int(os.environ.get("FUSEDOPS_TEST_SEED", "0"))
    torch.manual_seed(number)
    return number
