"""benchmarks/compiler_options.py: launch options tried on the compiler alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import compiler_options

ROOT = Path(__file__).parents[2]


def test_options_are_read():
    assert compiler_options.parse("maxnreg=168,num_ctas=2") == {"maxnreg": 168, "num_ctas": 2}
    assert compiler_options.parse("HAS_BIAS=false") == {"HAS_BIAS": False}
    for wrong in ("maxnreg", "=3", "1x=3", "", "maxnreg=many"):
        with pytest.raises(ValueError, match=r"NAME=VALUE|invalid literal"):
            compiler_options.parse(wrong)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["norm/no_such_case"], "no case is named norm/no_such_case; there are norm/"),
        (["attention/causal_128_bfloat16_forward", "maxnreg"], "an option is NAME=VALUE"),
        (["no_such_family/case"], "no case is named"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        compiler_options.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_options_change_what_is_compiled():
    """In a process of its own: this one interprets kernels. One option that works, one that does not compile."""
    case = next(name for name in compiler_options.all_cases() if name.startswith("norm/forward"))
    command = [sys.executable, "-m", "benchmarks.compiler_options", case, "-t", "sm_90", "num_warps=1", "num_warps=3"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    plain, fewer, wrong = ({"options": row[2], "registers": row[3], "spilled": row[4]} for row in rows[:3])
    assert (plain["options"], fewer["options"], wrong["options"]) == ("as it is", "num_warps=1", "num_warps=3")
    assert int(plain["registers"]) < int(fewer["registers"])  # the same row in fewer threads
    assert wrong["registers"].startswith("norm_forward")
    assert wrong["spilled"] == "–"
    assert "MLIR" not in done.stderr
