"""The library's functions beside those of rlax, TRL and scikit-learn on the same tensors: `make oracles`."""

from __future__ import annotations

import argparse
import inspect
import math
from typing import Any

import torch

from benchmarks import report
from benchmarks.certificates import planted
from novarl.algos import advantages
from tests.algos.test_hypervolume import worst_error
from tests.oracles.faults import FAULTS
from tests.oracles.ours import CASES, TOLERANCE, recorded

SETS = 500
ABOUT = f"""\
The same tensors go through other libraries' own functions, in float64, and through ours. Their outputs are committed in
`tests/oracles/numbers.json`, which `make test` reads. Losses are compared together with their gradients; credit is
compared step by step, with gaps between steps. They must agree to {TOLERANCE:g}. TRL's losses are those of its
trainers, run on a stand-in with the attributes that they read; no model is trained. Differences of 1e-8 come from
constants that TRL computes in float32: ORPO's log-probabilities, SAPO's temperatures, the k / (k - 1) of its
deviation."""
NOT_COMPARED = """\
Not compared, because TRL computes something else or nothing: `reinforce_pp` (TRL's `scale_rewards=batch` divides by the
deviation of the raw rewards, ours by that of the centred ones), ORPO's likelihood term (TRL's includes the prompt),
`sigmoid` with label smoothing and `dpop` (not in this TRL), sequence weights by the length-th root. scikit-learn has no
ECE, so it is computed from scikit-learn's calibration curve, whose bins include their upper edge; ours include their
lower one."""


def conventions() -> list[list[object]]:
    """Where the two differ unless told otherwise."""
    trl = recorded()["conventions"]["trl"]
    grpo = trl["defaults"]["GRPOConfig"]
    eps = inspect.signature(advantages.group).parameters["eps"].default
    return [
        ["deviation of a group", trl["deviation"], "sample"],
        ["added to the deviation", f"{trl['eps']:g}", f"{eps:g}"],
        ["k3 times the ratio", f"`use_bias_correction_kl={grpo['use_bias_correction_kl']}`", "`kl.corrected`"],
        ["aggregation", f"`loss_type={grpo['loss_type']}`", "`grpo`: sequence; `dapo`: token; `dr_grpo`: constant"],
        ["CISPO's upper bound", "`epsilon_high`", "`1 + clip_high`"],
        ["weights for the sampler", f"`{grpo['vllm_importance_sampling_mode']}`", "any of four, by name"],
    ]


def faults() -> list[dict[str, Any]]:
    found = []
    for fault in FAULTS:
        with planted(fault):
            error = CASES[fault.caught_by].error()
        found.append({"function": fault.where, "fault": fault.name, "case": fault.caught_by, "error": error})
    return found


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)  # nothing here is large enough for two
    versions = recorded()["versions"]
    errors = {name: case.error() for name, case in CASES.items()}
    volume = worst_error(SETS)
    errors_and_volume = [*errors.values(), volume]
    faulty = faults()
    caught = sum(not found["error"] <= TOLERANCE for found in faulty)
    agreeing = sum(error <= TOLERANCE for error in errors_and_volume)
    rows = [
        [case.name, f"`{case.ours}`", f"`{case.theirs}`", f"{errors[name]:.0e}", _yes(errors[name] <= TOLERANCE)]
        for name, case in CASES.items()
    ]
    planted_rows = [
        [f"`{f['function']}`", f["fault"], f["case"], f"{f['error']:.0e}", _yes(not f["error"] <= TOLERANCE)]
        for f in faulty
    ]
    brute = f"brute force, {SETS} random sets, 2 to 5 dimensions"
    rows.append(["hypervolume", "`hypervolume.hypervolume`", brute, f"{volume:.0e}", _yes(volume <= TOLERANCE)])
    body = "\n\n".join(
        [
            ABOUT,
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            f"## {agreeing} of {len(errors_and_volume)} agree",
            report.table(["what", "ours", "theirs", "largest difference", "equal"], rows),
            "## Conventions",
            report.table(["what", f"TRL {versions['trl']}, by default", "NovaRL"], conventions()),
            NOT_COMPARED,
            f"## {caught} of {len(faulty)} planted faults are caught",
            "Each fault is planted in the library's function, and the named case computed again.",
            report.table(["function", "fault", "case", "its difference", "caught"], planted_rows),
        ]
    )
    cases = [
        {"name": name, "ours": case.ours, "theirs": case.theirs, "error": errors[name]} for name, case in CASES.items()
    ]
    data = {
        "tolerance": TOLERANCE,
        "versions": versions,
        "conventions": recorded()["conventions"],
        "cases": cases,
        "hypervolume": {"sets": SETS, "error": volume},
        # JSON has no infinity: another shape is null.
        "faults": [{**f, "error": f["error"] if math.isfinite(f["error"]) else None} for f in faulty],
    }
    report.write("oracles", "Oracles", body, data)
    return 0 if agreeing == len(errors_and_volume) and caught == len(faulty) else 1


def _yes(good: bool) -> str:
    return "yes" if good else "**NO**"


if __name__ == "__main__":
    raise SystemExit(main())
