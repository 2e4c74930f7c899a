"""The certificates: what the library's gradient is in expectation, and what it should be.

Each compares two vectors (or two numbers) that were computed in different ways; they must agree to 1e-8 in float64.
"""

from __future__ import annotations

from tests.certificates import credit_cases, loss_cases

CERTIFICATES = {
    case.name: case
    for part in (
        credit_cases.baselines(),
        credit_cases.deviations(),
        credit_cases.aggregations(),
        loss_cases.surrogates(),
        loss_cases.regularizers(),
        loss_cases.rows(),
    )
    for case in part
}
