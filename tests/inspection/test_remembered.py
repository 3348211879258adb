"""NVIDIA's binary tools are asked once of each content, whatever becomes of the folder."""

from __future__ import annotations

import os

import pytest

from fusedops.inspection import remembered as module
from fusedops.inspection import resources
from fusedops.inspection.remembered import remembered, use_folder


@pytest.fixture(autouse=True)
def folder(tmp_path):
    use_folder(tmp_path / "kept")
    yield tmp_path / "kept"
    use_folder(None)


@pytest.fixture
def asked(monkeypatch):
    """What the tools were asked, a command each; the answer is its number."""
    commands = []
    monkeypatch.setattr(resources, "_run", lambda *command: commands.append(command) or f"answer {len(commands)}")
    monkeypatch.setattr(resources, "_tool", lambda name: f"/bin/{name}")
    monkeypatch.setattr(resources, "_assembler", lambda capability: f"/bin/ptxas{capability >= 100}")
    monkeypatch.setattr(resources, "_is_tritons", lambda tool: True)
    return commands


def test_a_disassembler_is_asked_once_of_the_same_code(asked):
    contents = (b"A", b"B", b"A")
    assert [resources.disassembly("nvdisasm", "-c", cubin=c) for c in contents] == ["answer 1", "answer 2", "answer 1"]
    assert resources.disassembly("nvdisasm", "-g", cubin=b"A") == "answer 3"
    assert resources.disassembly("cuobjdump", "-c", cubin=b"A") == "answer 4"


def test_the_assembler_is_asked_once_of_the_same_program_and_device(asked, monkeypatch):
    programs = [".target sm_90a\n", ".target sm_90a\nret;"]
    said = [resources.ptxas_report(programs[n], 90) for n in (0, 1, 0)]
    assert said == ["answer 1", "answer 2", "answer 1"]
    assert resources.ptxas_report(programs[0], 100) == "answer 3"
    monkeypatch.setattr(resources, "_is_tritons", lambda tool: False)  # one of the user's own
    assert resources.ptxas_report(programs[0], 90) == "answer 4"


def test_a_failure_is_not_kept(folder):
    def fail():
        raise resources.ToolError("no")

    with pytest.raises(resources.ToolError):
        remembered("tools", b"x", fail)
    assert remembered("tools", b"x", lambda: "yes") == "yes"
    assert [path.read_text() for path in folder.rglob("*") if path.is_file()] == ["yes"]


def test_where_nothing_can_be_written_the_tool_answers_every_time(tmp_path):
    (tmp_path / "file").touch()
    use_folder(tmp_path / "file")  # a folder cannot be made there
    assert [remembered("tools", b"x", lambda n=n: f"{n}") for n in range(2)] == ["0", "1"]


def test_a_full_disk_leaves_nothing(folder, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module.Path, "replace", full)
    assert remembered("tools", b"x", lambda: "said") == "said"
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_what_is_no_text_is_asked_again(folder):
    remembered("tools", b"x", lambda: "said")
    (path,) = (path for path in folder.rglob("*") if path.is_file())
    path.write_bytes(b"\xff\xfe")
    assert remembered("tools", b"x", lambda: "again") == "again"
    assert path.read_text() == "again"


def test_it_lies_in_the_cache_folder(tmp_path, monkeypatch):
    use_folder(None)
    monkeypatch.setattr(type(module.SETTINGS), "cache_path", lambda self: tmp_path / "of the user")
    remembered("tools", b"x", lambda: "said")
    assert len(os.listdir(tmp_path / "of the user" / "inspection" / "tools")) == 1
