"""Enhanced RL2's `compute_advantages_unified` over `novarl.algos.advantages`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from novarl.algos import advantages
from novarl.core.errors import NovaError, nearest

BOOTSTRAPS = ("gae", "td", "mc")
_OFF_POLICY = {"vtrace", "retrace", "clipped_is"}
_KEYWORDS: dict[str, tuple[str, ...]] = {
    "gae": ("gamma", "lamda"),
    "td_lambda": ("gamma", "lamda"),
    "vtrace": ("gamma", "lamda", "rho_bar", "c_bar"),
    "retrace": ("gamma", "lamda"),
    "clipped_is": ("gamma", "clip_ratio"),
    "multistep": ("gamma", "n_steps", "bootstrap_method"),
    "reinforce": ("responses_per_prompt", "norm_var"),
    "zero": (),
}
_ALIASES = {"td": "td_lambda", "n_step": "multistep", "multi_step": "multistep", "zeros": "zero"}
_RENAMED = {"lamda": "lam", "rho_bar": "rho_max", "c_bar": "c_max", "n_steps": "n"}


def compute_advantages_unified(data_list: list[dict[str, Any]], method: str = "gae", **settings: Any) -> list[Any]:
    """Write `advantages` and `returns` into each trajectory, by any of RL2's estimators; returns the list.

    method         settings, with their defaults             reads beside `rewards` and `action_mask`
    "gae"          gamma=1.0, lamda=0.95                     values
    "td_lambda"    gamma=1.0, lamda=0.95                     values
    "vtrace"       gamma=1.0, lamda=1.0, rho_bar=1.0, c_bar=1.0    values, logps, behavior_logps
    "retrace"      gamma=1.0, lamda=1.0                      values, logps, behavior_logps
    "clipped_is"   gamma=1.0, clip_ratio=0.2                 values, logps, behavior_logps
    "multistep"    gamma=1.0, n_steps=5, bootstrap_method="gae"    values; "mc" looks to the end
    "reinforce"    responses_per_prompt=1, norm_var=False    nothing: samples of one prompt are neighbors
    "zero"                                                   nothing

    Each trajectory is a dictionary of tensors [T]. `logps` are of the policy that is trained, `behavior_logps` of the
    one that sampled. `bootstrap` is the value past its last step, 0 where it is not given. Advantages are not
    standardized; `novarl.algos.advantages.whiten` does that over the whole batch.
    """
    method = _ALIASES.get(method, method)
    if method not in _KEYWORDS:
        raise NovaError(f"unknown method {method!r}", where="method", fix=nearest(method, _KEYWORDS))
    for name in settings:
        if name not in _KEYWORDS[method]:
            known = ", ".join(_KEYWORDS[method]) or "none"
            raise NovaError(f"{method} has no setting {name!r}", where="settings", fix=f"its settings: {known}")
    masks = [trajectory["action_mask"].bool() for trajectory in data_list]
    if method == "zero":
        found = [(torch.zeros_like(one["rewards"]), torch.zeros_like(one["rewards"])) for one in data_list]
    elif method == "reinforce":
        found = _reinforce(data_list, masks, **settings)
    else:
        found = _temporal(data_list, masks, method, settings)
    for trajectory, (advantage, returns) in zip(data_list, found, strict=True):
        trajectory["advantages"], trajectory["returns"] = advantage, returns
    return data_list


def _temporal(
    data_list: Sequence[Mapping[str, Any]], masks: list[Tensor], method: str, settings: Mapping[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    def column(name: str) -> Tensor:
        if any(name not in one for one in data_list):
            fix = "record them while sampling; ref_logps are of another policy" if name == "behavior_logps" else None
            raise NovaError(f"a trajectory has no {name!r}", where=f"method={method}", fix=fix)
        return pad_sequence([one[name] for one in data_list], batch_first=True)

    options = {_RENAMED.get(name, name): value for name, value in settings.items()}
    bootstrap = torch.stack([torch.as_tensor(one.get("bootstrap", 0.0)).to(one["rewards"]) for one in data_list])
    if method in _OFF_POLICY:
        options |= {"logp": column("logps"), "behavior_logp": column("behavior_logps")}
    if method == "clipped_is":
        ratio = options.pop("clip_ratio", 0.2)
        options |= {"rho_min": 1.0 - ratio, "rho_max": 1.0 + ratio}
    if method == "multistep":
        how = str(options.pop("bootstrap_method", "gae"))
        if how not in BOOTSTRAPS:
            raise NovaError(f"unknown bootstrap_method {how!r}", where="settings", fix=nearest(how, BOOTSTRAPS))
        options["n"] = max(len(mask) for mask in masks) if how == "mc" else options.get("n", 5)
        method = "n_step"
    advantage, returns = getattr(advantages, method)(
        rewards=column("rewards"),
        values=column("values"),
        mask=pad_sequence(masks, batch_first=True),
        bootstrap=bootstrap,
        **options,
    )
    return [(a[: len(m)], r[: len(m)]) for a, r, m in zip(advantage, returns, masks, strict=True)]


def _reinforce(
    data_list: Sequence[Mapping[str, Any]],
    masks: list[Tensor],
    *,
    responses_per_prompt: int = 1,
    norm_var: bool = False,
) -> list[tuple[Tensor, Tensor]]:
    """Of whole trajectories: the sum of rewards against the group's mean, or the batch's where groups are of one."""
    total = torch.stack([one["rewards"].sum() for one in data_list])
    group = torch.arange(len(data_list)) // responses_per_prompt
    compare = advantages.batch if responses_per_prompt == 1 else advantages.group
    found = compare(total, group, norm_std=norm_var)
    return [(a * m, r * m) for a, r, m in zip(found, total, masks, strict=True)]
