"""The load of the machine: CPU, memory, and NVIDIA GPUs."""

from __future__ import annotations

from contextlib import suppress


def load() -> dict[str, float]:
    """Percentages and megabytes by name. What cannot be measured is absent."""
    import psutil

    memory, own = psutil.virtual_memory(), psutil.Process()
    found = {
        "cpu_percent": psutil.cpu_percent(),
        "memory_percent": memory.percent,
        "process_memory_mb": own.memory_info().rss / 2**20,
        "process_cpu_percent": own.cpu_percent(),
    }
    with suppress(Exception):  # no driver, or no card: there is nothing to measure
        found |= _gpus()
    return {name: float(value) for name, value in found.items()}


def _gpus() -> dict[str, float]:
    import pynvml

    pynvml.nvmlInit()
    try:
        found: dict[str, float] = {}
        for number in range(pynvml.nvmlDeviceGetCount()):
            card = pynvml.nvmlDeviceGetHandleByIndex(number)
            memory = pynvml.nvmlDeviceGetMemoryInfo(card)
            found[f"gpu_{number}_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(card).gpu)
            found[f"gpu_{number}_memory_mb"] = memory.used / 2**20
        return found
    finally:
        pynvml.nvmlShutdown()
