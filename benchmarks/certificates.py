"""Every estimator, surrogate, correction and regularizer against exact enumeration: `make certificates`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from textwrap import fill

import torch

from benchmarks import report
from tests.certificates import credit_moments, surrogate_moments, temporal_moments
from tests.certificates.cases import CERTIFICATES, PARTS, Part
from tests.certificates.certificate import TOLERANCE
from tests.certificates.faults import FAULTS, Fault

ABOUT = f"""\
The expected update is computed in float64 for a language model so small that all its answers can be enumerated (3
tokens, one of which ends an answer; linear, so that states share parameters). The library's side sums the gradient of
its loss over every possible minibatch, weighted by probability. The exact side is derived from probabilities alone, in
the files `*exact.py` of `tests/certificates`, none of which imports the library. They must agree to {TOLERANCE:g}.

J = E[R] is the expected reward; y an answer, L its number of tokens, R its reward; y', L', R' those of another sample;
k the size of a group, B of a batch; pi the policy, mu another policy that sampled, ref the reference. Where the
expected update is not grad J, the difference is the method's bias."""
PLANTED = """\
Each fault is injected into the library's function, and the certificate that must detect it is computed again. The
number is the smallest error that any fault of the function causes. (A wrong baseline that still ignores the sample
stays unbiased, so no expectation can detect it; the golden numbers in `tests/algos` do.) The JSON file beside this page
lists every fault with its certificate."""

MOMENTS = {
    "Baselines": (
        credit_moments,
        "g is the direction that a group of three answers gives. The group's mean holds the answer's own reward, which "
        "shortens the step to two thirds and does not turn it; deviations and lengths turn it.",
    ),
    "Corrections": (surrogate_moments, "g is the direction that one answer gives, without a baseline."),
    "Credit over time": (temporal_moments, "g is the direction that one answer gives."),
}
MEASURED = """\
Of the direction g of an update, by enumeration in the same world: bias is |E g - grad J| / |grad J|, variance
E|g - E g|^2 / |grad J|^2 unless the column says otherwise. States are visited as the sampler visits them; only weights
of whole answers mend that."""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The library with one fault in it."""
    sound = getattr(fault.module, fault.function)
    setattr(fault.module, fault.function, fault.plant(sound))
    try:
        yield
    finally:
        setattr(fault.module, fault.function, sound)


def certified() -> dict[str, float]:
    """The error of every certificate."""
    return {name: case.error() for name, case in CERTIFICATES.items()}


def provoked() -> list[float]:
    """The error, for every fault, of the certificate that must catch it."""
    errors = []
    for fault in FAULTS:
        with planted(fault):
            errors.append(CERTIFICATES[fault.caught_by].error())
    return errors


def claims(part: Part, sound: Mapping[str, float]) -> str:
    """The certificates of one subject."""
    rows = [
        [case.name, f"`{case.claim}`", f"{sound[case.name]:.0e}", verdict(sound[case.name] <= TOLERANCE)]
        for case in part.cases
    ]
    about = fill(part.about, 120, break_long_words=False, break_on_hyphens=False)
    return f"### {part.title}\n\n{about}\n\n" + table(
        ["what", "its expected update or value is", "largest error", "holds"], rows
    )


def faults(faulty: Sequence[float]) -> str:
    """The faults, gathered by the function they were planted in."""
    gathered: dict[str, list[tuple[str, float]]] = {}
    for fault, error in zip(FAULTS, faulty, strict=True):
        gathered.setdefault(fault.where, []).append((fault.name, error))
    rows = [
        [
            f"`{where}`",
            ", ".join(dict.fromkeys(name for name, _ in found)),
            f"{min(error for _, error in found):.0e}",
            verdict(all(not error <= TOLERANCE for _, error in found)),
        ]
        for where, found in gathered.items()
    ]
    return table(["function", "faults", "error, at least", "all caught"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose cells may hold bars."""
    return report.table(header, [[cell.replace("|", "\\|") for cell in row] for row in rows])


def verdict(good: bool) -> str:
    return "yes" if good else "**NO**"


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)  # nothing here is large enough for two
    sound, faulty = certified(), provoked()
    holding = sum(error <= TOLERANCE for error in sound.values())
    caught = sum(not error <= TOLERANCE for error in faulty)
    measured = {title: part.rows() for title, (part, _) in MOMENTS.items()}
    body = "\n\n".join(
        [
            ABOUT,
            f"## {holding} of {len(sound)} certificates hold",
            *[claims(part, sound) for part in PARTS],
            f"## {caught} of {len(faulty)} planted faults are caught",
            PLANTED,
            faults(faulty),
            "## Bias and variance",
            MEASURED,
            *[
                f"### {title}\n\n{fill(about, 120)}\n\n{table(part.HEADER, measured[title])}"
                for title, (part, about) in MOMENTS.items()
            ],
        ]
    )
    data = {
        "tolerance": TOLERANCE,
        "certificates": [
            {"part": part.title, "name": case.name, "exact": case.claim, "error": sound[case.name]}
            for part in PARTS
            for case in part.cases
        ],
        "faults": [
            {"function": fault.where, "fault": fault.name, "certificate": fault.caught_by, "error": error}
            for fault, error in zip(FAULTS, faulty, strict=True)
        ],
        "moments": {
            title: [dict(zip(part.HEADER, row, strict=True)) for row in measured[title]]
            for title, (part, _) in MOMENTS.items()
        },
    }
    report.write("certificates", "Certificates", body, data)
    return 0 if holding == len(sound) and caught == len(faulty) else 1


if __name__ == "__main__":
    raise SystemExit(main())
