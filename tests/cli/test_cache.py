"""``fusedops cache``: every command on a store of the test's own."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from fusedops.autotune import lookup
from fusedops.autotune.entries import Candidate
from fusedops.autotune.identity import Identity
from fusedops.cli.app import app
from fusedops.norm.tuning import NORM, NormConfig
from tests.autotune.test_resolve import CONFIG, H100, PROBLEM, entry, put, settings  # noqa: F401 (a fixture)

WORDS = NORM.key(PROBLEM).split()


@pytest.fixture(autouse=True)
def own_store(settings, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lookup, "shipped_files", lambda: ())
    return settings


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["cache", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def run_json(*arguments: str, code: int = 0):
    return json.loads(run(*arguments, "--json", code=code))


def test_an_empty_store_says_what_fills_it():
    assert "fusedops autotune fills it" in run("list")
    assert run_json("list")["entries"] == []


def test_list_shows_configuration_time_and_gain():
    put(entry())
    (found,) = run_json("list")["entries"]
    assert found["key"] == NORM.key(PROBLEM)
    assert found["config"] == CONFIG.to_json()
    assert (found["gain"], found["stale"]) == (2.0, [])
    text = " ".join(run("list").split())
    assert "H100" in text
    assert "2.00 times" in text


def test_list_can_be_narrowed():
    put(entry())
    assert run_json("list", "--op", "linear")["entries"] == []
    assert run_json("list", "--device", "h100", "--op", "norm")["entries"]
    assert run_json("list", "--device", "A100")["entries"] == []
    assert run_json("list", "--stale")["entries"] == []
    put(entry(versions={**entry().versions, "kernels": "0" * 16}, date="2027-01-01T00:00:00Z"))
    assert run_json("list", "--stale")["entries"]
    run("list", "--op", "nonsense", code=2)


def test_show_tells_what_was_tried():
    tried = (
        Candidate(CONFIG.to_json(), "timed", 1e-5, 1e-7),
        Candidate(replace(CONFIG, num_warps=32).to_json(), "wrong", reason="result 0 is off by 3"),
    )
    put(entry(candidates=tried))
    text = " ".join(run("show", "norm", "width=4096").split())
    assert "off by 3" in text
    assert len(run_json("show", "norm")["entries"][0]["candidates"]) == 2
    assert run_json("show", "norm", "weight", "direction=forward")["entries"]


def test_show_is_short_unless_asked_for_all():
    tried = tuple(Candidate(replace(CONFIG, block_m=2**i).to_json(), "timed", 1e-5 * (i + 1), 1e-7) for i in range(12))
    put(entry(candidates=tried))
    assert "2 more: --all" in run("show", "norm")
    assert "more: --all" not in run("show", "norm", "--all")


def test_explain_says_that_another_architecture_is_one():
    put(entry())
    found = run_json("explain", "norm", *WORDS, "--target", "NVIDIA A100-SXM4-80GB")
    (other,) = (other for other in found["others"] if other["source"] == "your store")
    assert other["differences"] == ["another architecture: sm_90"]
    assert "no entry has norm width=1" in run("show", "norm", "width=1", code=1)


def test_path_is_the_stores_folder():
    assert run("path").splitlines()[0] == str(lookup.store().folder)
    assert run_json("path")["files"] == 0


def test_explain_names_the_source():
    put(entry())
    found = run_json("explain", "norm", *WORDS, "--target", "H100")
    assert found["source"] == "default"  # of the shipped H100's memory and cache: another than the store's
    assert any("GPU's cache" in difference for other in found["others"] for difference in other["differences"])


def test_explain_says_field_by_field_why_an_entry_does_not_serve(monkeypatch):
    from fusedops.cli import cache

    monkeypatch.setattr(cache, "facts_named", lambda name: H100)
    put(entry())
    assert run_json("explain", "norm", *WORDS)["source"] == "your store"
    other = [word for word in WORDS if not word.startswith("width=")]
    found = run_json("explain", "norm", *other, "width=2048")
    assert found["source"] == "default"
    assert found["others"][0]["differences"] == ["width: 4096 there, 2048 asked"]
    text = " ".join(run("explain", "norm", *other, "width=2048").split())
    assert "width: 4096 there, 2048 asked" in text
    assert "default answers" in text


def test_explain_fills_in_what_is_usual(monkeypatch):
    from fusedops.cli import cache

    monkeypatch.setattr(cache, "facts_named", lambda name: H100)
    found = run_json("explain", "norm", "width=64", "itemsize=2", "direction=forward")
    assert found["problem"]["kind"] == "layer"
    found = run_json("explain", "linear", "product=forward", "rows=8", "cols=64", "depth=64", "activation=gelu")
    assert found["problem"]["activation"] == "gelu"
    found = run_json("explain", "norm", "width=64 itemsize=2 direction=forward dropout", "rows=8")  # as tables have it
    assert found["problem"]["dropout"] is True


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["norm", "widht=64"], 1, "name=value with names of width, itemsize"),
        (["norm", "64"], 1, "name=value"),
        (["norm", "width=64"], 1, "needs"),
        (["norm", "width=wide", "itemsize=2", "direction=forward"], 1, "NormProblem.width: 'wide' is not int"),
        (
            ["norm", "width=64", "itemsize=0", "direction=forward", "--target", "H100"],
            1,
            "no call meets such a problem",
        ),
        (["norm", *WORDS, "--target", "H1000"], 1, "target must be one of"),
        (["nonsense", *WORDS], 2, "op must be one of"),
    ],
)
def test_explain_refuses_what_is_no_problem(arguments, code, message):
    assert message in " ".join(run("explain", *arguments, code=code).replace("│", " ").split())


def test_export_import_on_another_machine(tmp_path, own_store):
    put(entry())
    file = tmp_path / "team.json"
    assert "1 entries of 1 GPUs written" in " ".join(run("export", str(file)).split())
    own_store(cache_dir=tmp_path / "another machine")
    assert run_json("list")["entries"] == []
    run("import", str(file))
    assert lookup.look_up(NORM, PROBLEM, H100).tuned
    assert run_json("diff", str(file))["different"] == []


def test_import_refuses_what_cannot_serve(tmp_path, own_store):
    put(entry(), entry(PROBLEM._replace(rows=8)))
    file = tmp_path / "team.json"
    run("export", str(file))
    file.write_text(file.read_text().replace('"block_n": 4096', '"block_n": 64', 1))
    own_store(cache_dir=tmp_path / "another machine")
    told = " ".join(run("import", str(file), code=1).split())
    assert "narrower than the row" in told
    assert "1 added, 0 improved, 0 left as they were, 1 refused" in told
    assert len(run_json("list")["entries"]) == 1
    assert run_json("verify")["wrong"] == []


def test_an_empty_store_is_not_exported(tmp_path):
    assert "nothing is stored" in run("export", str(tmp_path / "team.json"), code=1)
    assert not (tmp_path / "team.json").exists()


def test_a_pipe_gets_whole_lines():
    put(entry())
    lines = run("list").splitlines()
    assert any("width=4096" in line and "rows=1024" in line for line in lines)
    assert any("block_n=4096" in line and "2.00 times" in line for line in lines)


def test_diff_shows_what_differs(tmp_path):
    put(entry())
    run("export", str(tmp_path / "a.json"))
    put(entry(config=NormConfig(2, 4096, False, 8), date="2027-01-01T00:00:00Z"), entry(PROBLEM._replace(rows=8)))
    found = run_json("diff", str(tmp_path / "a.json"))
    assert found["same"] == 0
    assert [row["first"] is None for row in found["different"]] == [False, True]
    assert "2 differ, 0 are the same" in run("diff", str(tmp_path / "a.json"), "store")


def test_merge_keeps_the_better(tmp_path):
    put(entry())
    run("export", str(tmp_path / "a.json"))
    newer = entry(config=NormConfig(2, 4096, False, 8), date="2027-01-01T00:00:00Z")
    lookup.store().clear()
    put(newer)
    run("export", str(tmp_path / "b.json"))
    run("merge", str(tmp_path / "c.json"), str(tmp_path / "a.json"), str(tmp_path / "b.json"))
    assert run_json("diff", str(tmp_path / "c.json"), str(tmp_path / "b.json"))["different"] == []


def test_verify_finds_what_is_wrong(tmp_path):
    put(entry())
    assert run_json("verify") == {"checked": 1, "wrong": []}
    path = lookup.store().path(Identity.of(H100), "norm")
    value = json.loads(path.read_text())
    value["entries"][NORM.key(PROBLEM)]["config"]["block_n"] = "wide"
    path.write_text(json.dumps(value))
    assert len(run_json("verify", code=1)["wrong"]) == 1
    bad = tmp_path / "bad.json"
    bad.write_text("[]")
    assert run_json("verify", str(bad), code=1)["wrong"][0]["path"] == str(bad)


def test_verify_finds_what_a_look_up_would_refuse(tmp_path):
    put(entry(config=replace(CONFIG, num_warps=64)))
    (wrong,) = run_json("verify", code=1)["wrong"]
    assert wrong["what"] == "more than 1024 threads a program"
    path = tmp_path / "all.json"
    run("export", str(path))
    (wrong,) = run_json("verify", str(path), code=1)["wrong"]
    assert wrong["what"] == "more than 1024 threads a program"


def test_verify_finds_what_reading_leaves_out(tmp_path):
    put(entry(), entry(PROBLEM._replace(rows=8)))
    path = tmp_path / "all.json"
    run("export", str(path))
    value = json.loads(path.read_text())
    value["devices"][0]["operators"]["norm"][NORM.key(PROBLEM)]["median"] = -1
    value["devices"].append({"device": 5, "operators": {}})
    path.write_text(json.dumps(value))
    found = run_json("verify", str(path), code=1)
    assert found["checked"] == 1
    assert [item["what"].rpartition(": ")[2] for item in found["wrong"]] == [
        "-1 is not positive",
        "expected an object with Identity's fields; got int",
    ]


def test_prune_removes_what_no_longer_holds():
    put(entry(versions={**entry().versions, "kernels": "0" * 16}), entry(PROBLEM._replace(rows=8)))
    assert "1 entries would be removed" in run("prune", "--dry-run")
    (removed,) = run_json("prune")["removed"]
    assert "kernels' code" in removed["why"]
    assert len(run_json("list")["entries"]) == 1
    assert len(run_json("prune", "--older-than", "1d")["removed"]) == 1
    run("prune", "--older-than", "soon", code=2)


def test_clear_asks_first():
    put(entry())
    assert CliRunner().invoke(app, ["cache", "clear"], input="n\n").exit_code == 1
    assert run_json("list")["entries"]
    run("clear", "--device", "A100", "--yes")
    assert run_json("list")["entries"]
    run("clear", "--yes")
    assert run_json("list")["entries"] == []


@pytest.mark.parametrize("command", ["import", "diff", "verify"])
def test_a_missing_file_is_an_error(command, tmp_path):
    assert "missing.json" in run(command, str(tmp_path / "missing.json"), code=1).replace("\n", "")


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path):
    put(entry())
    (tmp_path / "file").write_text("")
    assert "error:" in run("export", str(tmp_path / "file" / "x.json"), code=1)
