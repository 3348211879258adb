"""Facts about devices: made-up ones for offline work, real ones from the driver."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fusedops.runtime import device


def test_the_cpu_is_the_interpreter():
    assert device.device_facts(torch.device("cpu")) is device.INTERPRETER


def test_pretending_ends_with_its_context():
    facts = device.TARGETS["sm_90"]
    with device.pretend(facts):
        assert device.device_facts(torch.device("cpu")) is facts
        assert device.device_facts(torch.device("cuda", 3)) is facts
    assert device.device_facts(torch.device("cpu")) is device.INTERPRETER


def test_every_target_names_itself():
    for name, facts in device.TARGETS.items():
        assert facts.arch == name
        assert (facts.capability > 0) == (facts.vendor == "nvidia")
    assert device.TARGETS["sm_120"].capability == 120


def test_the_driver_is_asked_once(monkeypatch):
    asked = []

    def properties(index):
        asked.append(index)
        return SimpleNamespace(
            name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(device, "_facts", {})
    for _ in range(2):
        facts = device.device_facts(torch.device("cuda", 1))
    assert asked == [1]
    assert facts == device.DeviceFacts("nvidia", "sm_90", "NVIDIA H200", 132, 232448)


def test_an_amd_device(monkeypatch):
    properties = SimpleNamespace(
        name="AMD Instinct MI300X",
        gcnArchName="gfx942:sramecc+:xnack-",
        multi_processor_count=304,
        shared_memory_per_block=65536,
        warp_size=64,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(device, "_facts", {})
    facts = device.device_facts(torch.device("cuda", 0))
    assert (facts.vendor, facts.arch, facts.warp_size, facts.capability) == ("amd", "gfx942", 64, 0)


@pytest.mark.gpu
def test_a_real_device():
    facts = device.device_facts(torch.device("cuda", 0))
    assert facts.multiprocessor_count > 0
    assert facts.shared_memory >= 49152
