"""Property tests draw the same examples every time, and a busy machine fails none; no test needs a C++ compiler."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def no_test_gives_up_programs_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from novarl.kernels import products

    monkeypatch.setattr(products, "_given_up", [])


@pytest.fixture(autouse=True)
def no_test_flushes_denormals_for_another() -> Iterator[None]:
    yield
    import torch

    torch.set_flush_denormal(False)  # a run sets it for its process, which here goes on


@pytest.fixture
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile up to its last stage: graphs are traced, differentiated and guarded, and run without a compiler.
    Those of earlier tests are forgotten."""
    from functools import partialmethod

    import torch._dynamo
    from torch import nn

    from novarl.models import compiled

    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    monkeypatch.setattr(compiled, "_check_compiler", lambda device: None)
    torch._dynamo.reset()
