"""Candidates are compiled, checked and timed in this process, and one process at a time times on a device."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import multiprocessing
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fusedops.autotune import bench as module
from fusedops.autotune import timing, workers
from fusedops.autotune.bench import LocalBench, device_lock, pin, poisoned_memory
from fusedops.autotune.compiling import CompileReport, _Pool
from fusedops.autotune.modes import only_looks_up
from fusedops.autotune.operator import Operator, operators
from fusedops.autotune.protocol import CandidateFailed, CandidateWrong, CannotSpawn, DeviceBusy, Unmeasurable
from fusedops.autotune.workers import Switching, reference_to, worker_environment
from fusedops.runtime.device import TARGETS
from fusedops.runtime.settings import Settings
from tests.autotune.made_up import DOUBLING, Doubling, DoublingConfig

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture
def bench():
    made = LocalBench(CPU)
    made.open(DOUBLING, Doubling(100))
    yield made
    made.close()


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SETTINGS", Settings(cache_dir=tmp_path))


# ------------------------------------------------------------------------------------------------ check and time


def test_a_right_candidate_passes_and_is_timed(bench):
    fast, slow = DoublingConfig(block=2), DoublingConfig(block=8)
    finished = []
    reports = bench.compile([fast, slow], None, lambda config, report: finished.append(config))
    assert reports == {fast: CompileReport(), slow: CompileReport()}
    assert finished == [fast, slow]
    bench.check(fast)
    bench.check(slow)
    found = bench.time([fast, slow], 3)
    assert [len(found[config]) for config in (fast, slow)] == [3, 3]
    assert 0.002 <= min(found[fast]) < 0.008
    assert min(found[slow]) >= 0.008


def test_a_candidate_that_raises_has_failed(bench):
    with pytest.raises(CandidateFailed, match="ValueError: this configuration raises") as failed:
        bench.check(DoublingConfig("raises"))
    assert not isinstance(failed.value, CandidateWrong)
    bad, good = DoublingConfig("raises"), DoublingConfig(block=1)
    found = bench.time([bad, good], 2)
    assert isinstance(found[bad], CandidateFailed)
    assert len(found[good]) == 2


def test_a_wrong_candidate(bench):
    with pytest.raises(CandidateWrong, match=r"result 0 is off by 0\.01"):
        bench.check(DoublingConfig("wrong"))


def test_what_a_kernel_leaves_out_is_nan(bench):
    with pytest.raises(CandidateWrong, match="nan"):
        bench.check(DoublingConfig("nothing"))


def test_after_a_candidate_that_went_wrong_the_inputs_are_new(bench):
    bench.check(DoublingConfig())
    bench._trial.input.zero_()  # what a wild candidate might do, and its reference is zero as well
    trial = bench._trial
    with pytest.raises(CandidateFailed):
        bench.check(DoublingConfig("raises"))
    bench.check(DoublingConfig())
    assert bench._trial is not trial


def test_no_inputs(bench):
    bench.open(DOUBLING, Doubling(1, "no inputs"))
    with pytest.raises(Unmeasurable, match="nobody can make inputs for it"):
        bench.check(DoublingConfig())


def test_a_reference_that_cannot_be_computed_is_no_candidates_fault(bench, monkeypatch):
    monkeypatch.setattr("tests.autotune.made_up.DoublingTrial.exact", lambda self: [].pop())
    with pytest.raises(Unmeasurable, match="reference cannot be computed: IndexError"):
        bench.check(DoublingConfig())


def test_candidates_run_where_nothing_is_searched(bench, monkeypatch):
    seen = []
    monkeypatch.setattr("tests.autotune.made_up.DoublingTrial.run", lambda self: seen.append(only_looks_up()) or ())
    bench._sample(DoublingConfig())
    assert seen
    assert all(seen)
    assert not only_looks_up()


def test_poisoned_memory_is_full_of_nan_and_the_settings_come_back():
    deterministic = torch.utils.deterministic
    before = deterministic.fill_uninitialized_memory
    with poisoned_memory():
        assert torch.empty(1000).isnan().all()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    assert deterministic.fill_uninitialized_memory == before
    torch.set_deterministic_debug_mode("error")
    try:
        with pytest.raises(KeyError), poisoned_memory():
            raise KeyError
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.set_deterministic_debug_mode("default")


def test_rounds_turn_their_order_round(bench):
    a, b = DoublingConfig(block=1), DoublingConfig(block=2)
    began = [config for config, sample in bench.samples([a, b], [3, 2]) if sample is None]
    assert began == [a, b, b, a, a]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_is_none_is_a_failure(seconds):
    made = LocalBench(CPU, timer=SimpleNamespace(prepare=lambda run: lambda: seconds))
    made.open(DOUBLING, Doubling(1))
    (found,) = made.time([DoublingConfig()], 2).values()
    assert isinstance(found, CandidateFailed)


# ------------------------------------------------------------------------------------------------------------ timers


def test_the_hosts_timer():
    calls = []

    def run():
        calls.append(1)
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        time.sleep(0.2)  # the processor's time, not the clock's

    sample = timing.timer_for(CPU).prepare(run)
    assert len(calls) == 1
    assert 0.01 <= sample() < 0.1
    assert len(calls) == 2
    assert timing.HostTimer().prepare(lambda: None)() > 0


class FakeCuda:
    """As much of torch.cuda as the timer uses. A run takes ``run_s`` seconds of the device's time."""

    def __init__(self, run_s: float, launch_s: float = 0.0, capturable: bool = True) -> None:
        self.now, self.log, self.capturing = 0.0, [], False
        self.run_s, self.launch_s, self.capturable = run_s, launch_s, capturable
        cuda = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = cuda.now

            def synchronize(self) -> None:
                cuda.log.append("wait")

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) * 1e3

        class Graph:
            runs = 0

            def replay(self) -> None:
                cuda.log.append("replay")
                cuda.now += self.runs * cuda.run_s

        class Capture:
            def __init__(self, graph, stream, capture_error_mode) -> None:
                assert stream is cuda.stream_made
                assert capture_error_mode == "thread_local"
                self.graph = graph

            def __enter__(self) -> None:
                cuda.capturing = self.graph

            def __exit__(self, *exception: object) -> None:
                cuda.capturing = False
                cuda.log.append("captured")

        self.Event, self.CUDAGraph, self.graph = Event, Graph, Capture
        self.stream_made = object()

    def Stream(self, device):  # noqa: N802 (torch's name)
        return self.stream_made

    def stream(self, stream):
        assert stream is self.stream_made
        return nullcontext()

    def synchronize(self, device) -> None:
        self.log.append("synchronize")

    def run(self) -> None:
        self.log.append("run")
        if self.capturing:
            if not self.capturable:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.capturing.runs += 1
        else:
            self.now += self.run_s + self.launch_s

    def flush(self) -> None:
        self.log.append("flush")
        self.now += 0.5  # no part of any sample


def graph_timer(monkeypatch, fake: FakeCuda) -> timing.GraphTimer:
    made = []

    def empty(size, dtype, device):
        made.append((size, dtype))
        return SimpleNamespace(zero_=fake.flush)

    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=fake, empty=empty, int8=torch.int8))
    monkeypatch.setattr(timing, "device_facts", lambda device: TARGETS["sm_90"])
    timer = timing.GraphTimer(torch.device("cuda", 0))
    assert made == [(2 * TARGETS["sm_90"].cache, torch.int8)]
    return timer


@pytest.mark.parametrize(("run_s", "runs"), [(30e-6, 34), (3e-3, 1), (1e-9, timing.GraphTimer.MOST_RUNS)])
def test_a_graph_of_a_millisecond_is_replayed_on_a_cold_cache(monkeypatch, run_s, runs):
    fake = FakeCuda(run_s)
    sample = graph_timer(monkeypatch, fake).prepare(fake.run)
    assert fake.log.index("run") < fake.log.index("captured")  # warmed up, and compiled, before the capture
    fake.log.clear()
    assert sample() == pytest.approx(run_s)
    assert fake.log == ["flush", "replay", "wait"]
    before = fake.now
    sample()
    assert fake.now - before == pytest.approx(0.5 + runs * run_s)


def test_what_cannot_be_captured_is_launched_one_by_one(monkeypatch):
    fake = FakeCuda(1.1e-4, capturable=False)
    sample = graph_timer(monkeypatch, fake).prepare(fake.run)
    fake.log.clear()
    assert sample() == pytest.approx(1.1e-4)
    assert fake.log == ["flush", *["run"] * 10, "wait"]


def test_an_error_of_the_run_itself_passes(monkeypatch):
    fake = FakeCuda(1e-4)

    def run():
        raise ValueError("no such configuration")

    with pytest.raises(ValueError, match="no such configuration"):
        graph_timer(monkeypatch, fake).prepare(run)


# ------------------------------------------------------------------------------------------------------------- locks


def _hold(folder, seconds, ready) -> None:
    module.SETTINGS = Settings(cache_dir=folder)
    with device_lock(CPU):
        ready.set()
        time.sleep(seconds)


def test_one_process_at_a_time(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, 30, ready))
    other.start()
    try:
        assert ready.wait(20)
        with (
            pytest.raises(DeviceBusy, match="another process has been timing on this device for 0 s"),
            device_lock(CPU, wait_s=0.2),
        ):
            pass
    finally:
        other.terminate()
        other.join()
    with device_lock(CPU, wait_s=5):  # released by its holder's end
        assert (tmp_path / "locks" / "cpu.lock").exists()


def test_without_a_folder_there_is_no_lock(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(module, "SETTINGS", Settings(cache_dir=file))
    with device_lock(CPU):
        pass


# ----------------------------------------------------------------------------------------------- another process


@pytest.fixture
def gpus(monkeypatch):
    """Four GPUs, of which properties and visibility can be told."""

    def tell(uuid="0f3a", name="NVIDIA H100", hip=None):
        monkeypatch.setattr(torch.version, "hip", hip)
        properties = SimpleNamespace(name=name, **({} if uuid is None else {"uuid": uuid}))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        return torch.device("cuda", 2)

    return tell


@pytest.mark.parametrize(
    ("told", "environment", "pinned"),
    [
        ({}, {}, {"CUDA_VISIBLE_DEVICES": "GPU-0f3a"}),
        ({"uuid": "GPU-0f3a"}, {}, {"CUDA_VISIBLE_DEVICES": "GPU-0f3a"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "7,5,3"}, {"CUDA_VISIBLE_DEVICES": "GPU-0f3a"}),
        ({"uuid": None}, {"CUDA_VISIBLE_DEVICES": "7,5,3"}, {"CUDA_VISIBLE_DEVICES": "3"}),
        ({"uuid": None}, {}, {"CUDA_VISIBLE_DEVICES": "2"}),
        ({}, {"CUDA_VISIBLE_DEVICES": "MIG-a, MIG-b, MIG-c"}, {"CUDA_VISIBLE_DEVICES": "MIG-c"}),
        ({"name": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}, {}, {"CUDA_VISIBLE_DEVICES": "MIG-0f3a"}),
        ({"hip": "6.4"}, {}, {"HIP_VISIBLE_DEVICES": "2"}),
        ({"hip": "6.4"}, {"HIP_VISIBLE_DEVICES": "4,5,6"}, {"HIP_VISIBLE_DEVICES": "6"}),
        ({"hip": "6.4"}, {"CUDA_VISIBLE_DEVICES": "4,5,6"}, {"CUDA_VISIBLE_DEVICES": "6"}),
    ],
)
def test_a_worker_sees_one_device(gpus, told, environment, pinned):
    assert pin(gpus(**told), environment) == pinned
    assert pin(CPU, environment) == {}


def test_a_worker_neither_searches_nor_records_nor_falls_back(monkeypatch, gpus):
    for name, value in {
        "FUSEDOPS_AUTOTUNE": "record", "FUSEDOPS_RECORD_FILE": "x", "FUSEDOPS_BACKEND": "torch",
        "TRITON_INTERPRET": "1", "HOME": "/home/me",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    environment = worker_environment(gpus())
    assert environment["FUSEDOPS_AUTOTUNE"] == "cached"
    assert environment["HOME"] == "/home/me"
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-0f3a"
    assert not {"FUSEDOPS_RECORD_FILE", "FUSEDOPS_BACKEND", "TRITON_INTERPRET"} & set(environment)
    assert worker_environment(CPU)["TRITON_INTERPRET"] == "1"


def test_what_is_no_string_in_the_search_path_is_passed_over(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", ["somewhere", tmp_path])
    assert worker_environment(CPU)["PYTHONPATH"] == "somewhere"


def test_where_no_process_can_be_started_this_one_measures(monkeypatch):
    monkeypatch.setattr(sys, "executable", None)
    with contextlib.closing(Switching(CPU)) as switching:
        assert "executable" in switching.note
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/at/all")
    with contextlib.closing(Switching(CPU)) as switching:
        assert "no process can be started" in switching.note


def test_ctrl_c_while_a_worker_starts_leaves_none(monkeypatch):
    started = []

    def interrupted(worker, limit_s):
        started.append(worker._process)
        raise KeyboardInterrupt

    monkeypatch.setattr(workers.Worker, "receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Switching(CPU)
    (process,) = started
    assert process.poll() is not None


def test_another_process_finds_operators():
    for operator in operators().values():
        where, _, name = reference_to(operator).partition(":")
        assert getattr(importlib.import_module(where), name) is operator
    assert reference_to(DOUBLING) == "tests.autotune.made_up:DOUBLING"
    lost = Operator(**{name: getattr(DOUBLING, name) for name in DOUBLING.__dataclass_fields__} | {"name": "lost"})
    with pytest.raises(CannotSpawn, match="lost lies in no module"):
        reference_to(lost)


def test_where_there_can_be_no_worker_this_process_measures(monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/nonexistent/python")
    bench = Switching(CPU)
    assert "no process can be started" in bench.note
    bench.open(DOUBLING, Doubling(10))
    assert list(bench.compile([DoublingConfig()])) == [DoublingConfig()]
    bench.check(DoublingConfig())
    assert len(bench.time([DoublingConfig(block=1)], 2)[DoublingConfig(block=1)]) == 2
    with pytest.raises(CandidateWrong):
        bench.check(DoublingConfig("wrong"))
    bench.close()
    with pytest.raises(RuntimeError, match="open"):
        bench.check(DoublingConfig())


# --------------------------------------------------------------------------------------------------------- compiling


def test_a_pool_works_in_parallel_and_in_order():
    began, together = [], threading.Barrier(2, timeout=10)

    def work(job):
        together.wait()
        return -job

    pool = _Pool([1, 2, 3, 4], work, began.append, None, 60.0)
    assert sorted(pool.results(2)) == [(1, -1), (2, -2), (3, -3), (4, -4)]
    assert began == [1, 2, 3, 4]


def test_a_pool_gives_up_what_takes_too_long_and_goes_on():
    released = threading.Event()

    def work(job):
        if job == "stuck":
            released.wait(20)
        return job

    try:
        found = dict(_Pool(["a", "stuck", "b", "c"], work, lambda job: None, None, 0.3).results(1))
    finally:
        released.set()
    assert found == {"a": "a", "stuck": None, "b": "b", "c": "c"}


def test_a_pool_begins_nothing_after_its_time_but_the_first():
    assert dict(_Pool([1, 2, 3], lambda job: job, lambda job: None, 0.0, 60.0).results(1)) == {1: 1}
    assert dict(_Pool([], lambda job: job, lambda job: None, None, 60.0).results(4)) == {}


def test_an_error_in_a_pool_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        list(_Pool([1, 0], lambda job: 1 // job, lambda job: None, None, 60.0).results(2))


def test_a_report_as_json():
    report = CompileReport(1, 2, 3, ("slow",), None)
    assert CompileReport.from_json(json.loads(json.dumps(report.to_json()))) == report
    failed = CompileReport(error="no", timed_out=True)
    assert CompileReport.from_json(json.loads(json.dumps(failed.to_json()))) == failed


@pytest.fixture(scope="module")
def compiled(compiler):
    return compiler.call("tests.autotune.compile_probes:find")


@needs_triton
def test_candidates_compile_for_any_device(compiled):
    small, large, broken, uncompilable, spilling = compiled["reports"]
    assert small["error"] is large["error"] is spilling["error"] is None
    assert 64 * 64 * 2 <= small["shared"] < large["shared"]
    assert small["spill_bytes"] == 0 < small["registers"]
    assert spilling["spill_bytes"] > 0
    assert spilling["registers"] == 32
    assert broken["error"] == "ValueError: the launcher refuses it"
    assert uncompilable["error"].startswith("squares_kernel for sm_80: ")
    assert compiled["kernels"] == [["squares_kernel"]] * 2 + [[], []] + [["squares_kernel"]]
    assert compiled["targets"] == "sm_80"
    assert compiled["as one"]
    assert compiled["began"] == compiled["finished"] == [0, 1, 2, 3, 4]


@needs_triton
def test_other_threads_notice_nothing_of_a_compilation(compiled):
    assert compiled["elsewhere"] == ["interpreter"]
    assert compiled["as before"]


@needs_triton
def test_compiling_keeps_to_its_time(compiled):
    assert compiled["in no time"] == 1
    assert compiled["too slow"]["timed_out"]
    assert compiled["too slow"]["error"] == "did not compile within 0.2 s"


@needs_triton
def test_serialised_matrix_instructions_are_told(compiled):
    assert compiled["serialised"] == [["squares_kernel: the assembler serialises wgmma (C7510)"], []]


@needs_triton
def test_a_launch_finds_what_was_compiled(compiled):
    assert compiled["cache hits"] == [True, False]
