"""Generate the tables in docs/algorithms: the overview in README.md, and the row of every page.

python tools/make_algorithm_table.py            # write them, between the markers
python tools/make_algorithm_table.py --check    # exit with 1 if something is not up to date

The rest of each page is written by hand.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

from novarl.algos import preference_losses as preference, reward_modeling
from novarl.algos.axes import estimator, surrogate
from novarl.algos.named import ALGORITHMS, Algorithm
from novarl.config.preference import DPOConfig, RMConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs/algorithms"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
RM_LOSSES: tuple[str, ...] = get_args(RMConfig.model_fields["loss"].annotation)
DPO_LOSSES: tuple[str, ...] = get_args(DPOConfig.model_fields["loss"].annotation)
COLUMNS = (
    "chosen_logp",
    "rejected_logp",
    "ref_chosen_logp",
    "ref_rejected_logp",
    "logp",
    "ref_logp",
    "reward",
    "label",
)
TENSORS = (*COLUMNS, "chosen_reward", "rejected_reward", "chosen_length", "rejected_length", "kl")


def settings(row: Algorithm) -> Iterator[tuple[str, str, Any]]:
    """(axis, key of the configuration, the row's value), those that the row reads."""
    yield "credit", "adv.estimator", row.estimator
    if estimator(row.estimator).temporal:
        yield "credit", "adv.values", row.values
    for key in estimator(row.estimator).reads:
        yield "credit", key, row.options[key]
    yield "credit", "adv.whiten", row.whiten
    yield "surrogate", "loss.surrogate", row.surrogate
    for key in surrogate(row.surrogate).reads:
        yield "surrogate", key, row.options[key]
    yield "correction", "correction.type", None
    yield "regularizer", "kl.type", row.kl_type
    if row.kl_type is not None:
        yield "regularizer", "kl.estimator", row.kl_estimator
        yield "regularizer", "kl.coef", row.kl_coef
    yield "regularizer", "entropy.coef", row.entropy_coef
    yield "aggregation", "loss.agg", row.aggregation
    yield "sampling", "updates_per_rollout", row.updates_per_rollout
    yield "sampling", "dynamic_sampling.enabled", row.dynamic_sampling


def show(value: Any) -> str:
    """As it is written in YAML."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def row_table(row: Algorithm) -> str:
    """The row of one algorithm: each key with its value, by axis."""
    lines = ["| axis | key | value |", "|---|---|---|"]
    for axis, key, value in settings(row):
        shown = f"`{show(value)}`" + (
            f", {_constant(row)}" if key == "loss.agg" and row.aggregation == "constant" else ""
        )
        lines.append(f"| {axis} | `{key}` | {shown} |")
    needs = ", ".join(sorted(row.needs)) or "nothing"
    return "\n".join([*lines, "", f"Requires, besides rollouts and rewards: {needs}."])


def loss_table(command: str, name: str) -> str:
    """What a loss of `novarl dpo` or `novarl rm` reads: its columns and its keywords."""
    function = loss_function(command, name)
    parameters = inspect.signature(function).parameters.values()
    columns = [f"`{one.name}`" for one in parameters if one.name in COLUMNS or one.name.endswith("_reward")]
    if not _has_reference(command, name):
        columns = [one for one in columns if "ref_" not in one]
    options = [f"`{one.name}`" for one in parameters if one.name not in TENSORS]
    lines = [
        "| | |",
        "|---|---|",
        f"| command | `novarl {command} loss={name}` |",
        f"| function | `novarl.algos.{function.__module__.rpartition('.')[2]}.{function.__name__}` |",
        f"| reads | {', '.join(columns)} |",
        f"| keywords | {', '.join(options) or 'none'} |",
        f"| reference | {'yes' if _has_reference(command, name) else 'no'} |",
    ]
    return "\n".join(lines)


def loss_function(command: str, name: str) -> Callable[..., Any]:
    """The function of a loss."""
    if command == "dpo":
        return preference.LOSSES[name].function
    found: Callable[..., Any] = getattr(reward_modeling, name)
    return found


def overview() -> str:
    """The whole family: a row each, the five axes as columns, then the losses."""
    lines = [
        "| `algo=` | credit | surrogate | correction | regularizer | aggregation | updates per rollout |",
        "|---|---|---|---|---|---|--:|",
    ]
    for row in ALGORITHMS.values():
        lines.append(f"| [{row.name}]({row.name}.md) | " + " | ".join(_cells(row)) + " |")
    lines += ["", "| loss | from | reference | |", "|---|---|---|---|"]
    for command, names in (("dpo", DPO_LOSSES), ("rm", RM_LOSSES)):
        for name in names:
            found = loss_function(command, name)
            said = (inspect.getdoc(found) or "").split("\n")[0].split("(https")[0].rstrip(" :.,")
            source = "labels" if "label" in inspect.signature(found).parameters else "pairs"
            source = "labels, or pairs" if name in ("kto", "bce") else source
            reference = "yes" if _has_reference(command, name) else "no"
            lines.append(
                f"| [{command} {name}]({command}_{name}.md) | {source} | {reference} | `{_plain(name, said)}` |"
            )
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """The generated part of every page."""
    found = {PAGES / "README.md": overview()}
    found |= {PAGES / f"{name}.md": row_table(row) for name, row in ALGORITHMS.items()}
    for command, names in (("dpo", DPO_LOSSES), ("rm", RM_LOSSES)):
        found |= {PAGES / f"{command}_{name}.md": loss_table(command, name) for name in names}
    return found


def filled(text: str, table: str) -> str:
    """The page with what stands between its marks replaced. ValueError where they are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def _cells(row: Algorithm) -> list[str]:
    options = row.options
    credit = row.estimator + (" / std" if options.get("adv.norm_std") else "")
    credit += {"critic": " from a critic", "continuations": " from continuations", None: ""}[row.values]
    credit += f", lam {options['adv.lam']:g}" if "adv.lam" in options else ""
    credit += ", whitened" if row.whiten else ""
    bounds = f" {options['clip.low']:g} / {options['clip.high']:g}" if "clip.low" in options else ""
    kl = f"{row.kl_coef:g} KL ({row.kl_estimator}) as {row.kl_type}" if row.kl_type else "none"
    mean = {"constant": f"sum / {_constant(row)}", "token": "mean over tokens", "sequence": "mean over sequences"}
    refilled = ", flat groups replaced" if row.dynamic_sampling else ""
    return [
        credit,
        f"{row.surrogate}{bounds}",
        "from `correction.type`",
        kl,
        mean[row.aggregation],
        f"{row.updates_per_rollout}{refilled}",
    ]


def _constant(row: Algorithm) -> str:
    return "the longest answer allowed" if row.constant == "max_tokens" else "1"


def _has_reference(command: str, name: str) -> bool:
    return preference.LOSSES[name].reference if command == "dpo" else name.startswith("implicit")


def _plain(name: str, said: str) -> str:
    formulas = {
        "kto": "w_d sigma(beta (kl - h)) or w_u sigma(beta (h - kl))",
        "implicit_ce": "bce of r = beta h",
        "implicit_dpo": "bt of r = beta h",
        "implicit_kto": "kto of r = beta h",
    }
    return formulas.get(name, said.split(": ")[0].split(", all")[0].replace("|", "\\|"))


def main(arguments: list[str]) -> int:
    stale = []
    for path, table in pages().items():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text, table)) != text:
            stale.append(path)
            if arguments != ["--check"]:
                path.write_text(new, encoding="utf-8")
    if stale and arguments == ["--check"]:
        names = ", ".join(path.name for path in stale)
        print(f"not what the table says: {names}; run python tools/make_algorithm_table.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
