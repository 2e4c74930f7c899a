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

J = E[R] is the expected reward; y an answer, L its number of tokens, R its reward; y', L', R' those of another draw; k
the size of a group, B of a batch; pi the policy, mu another that sampled, ref the reference. Where the expected update
is not grad J, the difference is the method's bias."""
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


def main() -> int:
    argparse.ArgumentParser(description=__doc__).parse_args()
    torch.set_num_threads(1)  # nothing here is large enough for two
    sound, faulty = certified(), provoked()
    holding = sum(error <= TOLERANCE for error in sound.values())
    caught = sum(not error <= TOLERANCE for error in faulty)
    claims = [
        [name, f"`{CERTIFICATES[name].claim}`", f"{error:.0e}", "yes" if error <= TOLERANCE else "**NO**"]
        for name, error in sound.items()
    ]
    faults = [
        [f"`{fault.where}`", fault.name, fault.caught_by, f"{error:.0e}", "**NO**" if error <= TOLERANCE else "yes"]
        for fault, error in zip(FAULTS, faulty, strict=True)
    ]
    body = "\n\n".join(
        [
            ABOUT,
            f"## {holding} of {len(sound)} certificates hold",
            report.table(["what", "its expected update is", "largest error", "holds"], claims),
            f"## {caught} of {len(faulty)} planted faults are caught",
            PLANTED,
            report.table(["function", "fault", "certificate", "its error", "caught"], faults),
        ]
    )
    data = {
        "tolerance": TOLERANCE,
        "certificates": [
            {"name": name, "exact": CERTIFICATES[name].claim, "error": error} for name, error in sound.items()
        ],
        "faults": [
            {"function": fault.where, "fault": fault.name, "certificate": fault.caught_by, "error": error}
            for fault, error in zip(FAULTS, faulty, strict=True)
        ],
    }
    report.write("certificates", "Certificates", body, data)
    return 0 if holding == len(sound) and caught == len(faulty) else 1


if __name__ == "__main__":
    raise SystemExit(main())
