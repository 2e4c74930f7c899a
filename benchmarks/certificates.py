"""Every estimator, surrogate, correction and regularizer against exact enumeration: `make certificates`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks import report
from tests.certificates.cases import CERTIFICATES
from tests.certificates.certificate import TOLERANCE
from tests.certificates.faults import FAULTS, Fault

ABOUT = f"""\
A language model so small that all its answers can be listed (3 tokens, one of which ends an answer; linear, so that its
states share parameters) is asked what the expected update is, in float64: the library's side sums the gradient of its
loss over every minibatch that can be drawn, weighted by its probability; the exact side is written from probabilities
alone, in `tests/certificates/exact.py`, which does not import the library. They must agree to {TOLERANCE:g}.

J = E[R] is the expected reward, y an answer, |y| its number of tokens, k the size of a group, B of a batch, pi the
policy, mu another that sampled, ref the reference. Where the exact side is not grad J, the difference is the method's
bias."""
PLANTED = """\
Each fault is planted in the library's function, and the named certificate computed again. (A wrong baseline that still
ignores the sample stays unbiased, so no expectation can tell it; the golden numbers in `tests/algos` do.)"""


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The library with one fault in it."""
    sound = getattr(fault.module, fault.function)
    setattr(fault.module, fault.function, fault.plant(sound))
    try:
        yield
    finally:
        setattr(fault.module, fault.function, sound)


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)  # nothing here is large enough for two
    certified, caught = [], []
    for name, case in CERTIFICATES.items():
        error = case.error()
        certified.append({"name": name, "exact": case.claim, "error": error, "holds": error <= TOLERANCE})
    for fault in FAULTS:
        with planted(fault):
            error = CERTIFICATES[fault.caught_by].error()
        caught.append(
            {
                "function": fault.where,
                "fault": fault.name,
                "certificate": fault.caught_by,
                "error": error,
                "caught": not error <= TOLERANCE,
            }
        )
    holding, found = sum(row["holds"] for row in certified), sum(row["caught"] for row in caught)
    body = "\n\n".join(
        [
            ABOUT,
            f"## {holding} of {len(certified)} certificates hold",
            report.table(
                ["what", "its expected update is", "largest error", "holds"],
                [[row["name"], f"`{row['exact']}`", f"{row['error']:.0e}", yes(row["holds"])] for row in certified],
            ),
            f"## {found} of {len(caught)} planted faults are caught",
            PLANTED,
            report.table(
                ["function", "fault", "caught by", "error", "caught"],
                [
                    [
                        f"`{row['function']}`",
                        row["fault"],
                        row["certificate"],
                        f"{row['error']:.0e}",
                        yes(row["caught"]),
                    ]
                    for row in caught
                ],
            ),
        ]
    )
    report.write("certificates", "Certificates", body, {"certificates": certified, "faults": caught})
    return 0 if holding == len(certified) and found == len(caught) else 1


def yes(fact: bool) -> str:
    return "yes" if fact else "**NO**"


if __name__ == "__main__":
    raise SystemExit(main())
