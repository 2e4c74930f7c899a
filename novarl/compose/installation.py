"""`novarl check`: versions, device, one forward pass."""

from __future__ import annotations

from typing import Any

import torch

from novarl.core.rundir import environment
from novarl.models.forward import hidden_states
from novarl.models.load import load
from novarl.run.machine import pick_device


def run_check() -> dict[str, Any]:
    """Print versions and device, and run a model once."""
    about = environment()
    device = pick_device("auto")
    policy = load("tiny", device=device)
    tokens = torch.tensor(policy.tokenizer.encode("Does it run?"), device=device)
    bounds = torch.tensor([0, tokens.numel()], device=device)
    hidden = hidden_states(policy.model, tokens, torch.arange(tokens.numel(), device=device), bounds)
    if not bool(torch.isfinite(hidden).all()):
        raise RuntimeError(f"the forward pass of the tiny model gave non-finite numbers on {device}")
    parameters = sum(parameter.numel() for parameter in policy.model.parameters())
    rows = {"novarl": about["novarl"], "python": about["python"], **about["packages"], "processor": about["processor"]}
    rows |= {"device": device, "threads": torch.get_num_threads(), "MKL_CBWR": about["variables"]["MKL_CBWR"]}
    for name, value in rows.items():
        print(f"{name:<14}{value}")
    print(f"{'forward pass':<14}OK: {tokens.numel()} tokens through the tiny model ({parameters:,} parameters)")
    return {"status": "done", "device": str(device)}
