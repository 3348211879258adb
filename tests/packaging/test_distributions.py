"""The wheel and the source distribution: what they hold, what they ask for, and that an installed one works alone."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

import fusedops
from tests.docs.pages import ROOT

# Copies of what git has: a build writes into the folder it builds from, and would pick up what lies about there.
EVERYTHING = ("fusedops", "README.md", "LICENSE", "pyproject.toml", "MANIFEST.in", "CHANGELOG.md", "CONTRIBUTING.md",
              "Makefile", "constraints.txt", "mkdocs.yml", "benchmarks", "docs", "examples", "scripts", "tests",
              "tutorials")  # fmt: skip


def _run(*command, **options):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name in EVERYTHING:
        _run("cp", "-r", ROOT / name, folder / name)
    for cache in folder.rglob("__pycache__"):
        _run("rm", "-r", cache)
    return folder


@pytest.fixture(scope="module")
def sdist(sources, tmp_path_factory):
    """Built without isolation: this environment has what builds, and no network is needed."""
    folder = tmp_path_factory.mktemp("sdist")
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, cwd=sources)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """From the source distribution, as pip would."""
    unpacked, folder = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (source,) = unpacked.iterdir()
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, cwd=source)
    (path,) = folder.iterdir()
    return path


def _metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name)


# --- what they hold --------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_package_alone(wheel):
    assert wheel.name == f"fusedops-{fusedops.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = {name for name in held if not name.startswith(f"fusedops-{fusedops.__version__}.dist-info/")}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "fusedops").rglob("*")
        if path.suffix in (".py", ".json", ".typed") or path.name == "py.typed"
    }
    assert package == expected
    assert {"fusedops/py.typed", "fusedops/configs/h100.json", "fusedops/cli/app.py"} <= package
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_source_distribution_holds_what_its_makefile_needs(sdist):
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert {"Makefile", "constraints.txt", "mkdocs.yml", "tests/conftest.py", "benchmarks/static_baseline.json",
            "docs/api/norm.md", "tutorials/README.md", "scripts/site.py", "examples/generate_gpt2.py",
            "tests/compile/cases_norm.py", "CHANGELOG.md"} <= held  # fmt: skip
    assert not [name for name in held if "__pycache__" in name or name.startswith(("site/", ".venv"))]


# --- what they ask for -----------------------------------------------------------------------------------------------


def test_the_metadata_is_right(wheel):
    metadata = Metadata.from_email(_metadata(wheel), validate=True)
    assert metadata.name == "fusedops"
    assert str(metadata.version) == fusedops.__version__
    assert metadata.license_expression == "Apache-2.0"
    assert "Typing :: Typed" in metadata.classifiers
    assert metadata.description_content_type == "text/markdown"
    assert metadata.description.startswith("# fusedops")


def test_it_goes_with_every_build_of_torch(wheel):
    """CUDA's, ROCm's and the CPU's, on systems without Triton too: no other torch is pulled in, and no Triton."""
    text = email.message_from_bytes(_metadata(wheel))
    requirements = [Requirement(line) for line in text.get_all("Requires-Dist")]
    needed = {each.name: each for each in requirements if each.marker is None or "extra" not in str(each.marker)}
    assert str(needed["torch"].specifier) == ">=2.7"  # no upper bound, no build
    assert all(each.url is None for each in requirements)
    assert {"triton", "pytorch-triton", "transformers", "matplotlib", "numpy"}.isdisjoint(needed)
    assert not [each.name for each in requirements if each.name.startswith(("nvidia", "triton"))]
    extras = set(text.get_all("Provides-Extra"))
    named = {extra for each in requirements if each.name == "fusedops" for extra in each.extras}
    assert named <= extras >= {"demo", "models", "tutorials", "docs", "test", "bench", "dev"}


# --- installed -------------------------------------------------------------------------------------------------------

SMOKE = """
import sys
{block}
import torch
import fusedops
assert fusedops.__file__.startswith({venv!r}), fusedops.__file__
x = torch.randn(4, 64, requires_grad=True)
fusedops.rms_norm(x, 64).sum().backward()
assert x.grad.shape == x.shape
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU())
before = model(x)
report = fusedops.patch(model)
assert len(report.replaced) == 2, report
torch.testing.assert_close(model(x), before)
q = torch.randn(1, 2, 8, 16)
assert fusedops.attention(q, q, q, causal=True).shape == q.shape
from fusedops.autotune.lookup import look_up
from fusedops.norm.tuning import NORM, NormProblem
from fusedops.runtime.device import TARGETS
problem = NormProblem(4096, 2, "forward", rows=8192, kind="rms")
print(look_up(NORM, problem, TARGETS["sm_90"]).config is not None, fusedops.explain(fusedops.rms_norm, x, 64).backend)
"""


@pytest.fixture(scope="module")
def venv(wheel, tmp_path_factory):
    """An environment with the wheel, beside this one's torch and other packages but without the repository."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    _run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # This environment's packages are found by their path; its .pth files, as of an editable install, are not read.
    purelib = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    purelib.mkdir(parents=True, exist_ok=True)
    (purelib / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    _run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel)
    return folder, python


def _environment(folder):
    left = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "TRITON_INTERPRET")}
    return {**left, "FUSEDOPS_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("triton", [True, False], ids=["as_it_is", "without_triton"])
def test_an_installed_wheel_works(venv, tmp_path, triton):
    folder, python = venv
    block = "" if triton else "sys.modules['triton'] = None  # as if it were not installed"
    code = SMOKE.format(block=block, venv=str(folder))
    out = _run(python, "-W", "error::UserWarning", "-c", code, cwd=tmp_path, env=_environment(tmp_path))
    assert out.split() == ["True", "torch"]


def test_the_installed_command_works(venv, tmp_path):
    _, python = venv
    command = python.with_name("fusedops")
    environment = _environment(tmp_path)
    assert "inspect" in _run(command, "--help", cwd=tmp_path, env=environment)
    report = json.loads(_run(command, "doctor", "--json", cwd=tmp_path, env=environment))
    assert report["versions"]["fusedops"] == fusedops.__version__
    if importlib.util.find_spec("triton") is not None:
        sizes = ["norm", "rows=64", "width=256", "--only", "forward", "-t", "sm_90", "--json"]
        kernels = json.loads(_run(command, "inspect", *sizes, cwd=tmp_path, env=environment))["kernels"]
        assert kernels[0]["figures"]["spill_bytes"] == 0
    # torch.compile(model, backend="fusedops") finds it by its entry point.
    code = "import torch; print('fusedops' in torch._dynamo.list_backends())"
    assert _run(python, "-c", code, cwd=tmp_path, env=environment).strip() == "True"
