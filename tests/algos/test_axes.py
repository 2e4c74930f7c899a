"""The tables of estimators, surrogates and corrections agree with the functions and the configuration they name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from types import ModuleType
from typing import get_args

import pytest

from novarl.algos import advantages, axes, off_policy, surrogates
from novarl.algos.axes import CORRECTIONS, ESTIMATORS, SURROGATES, Correction, Estimator, Surrogate, keywords
from novarl.config.tree import RLConfig

Row = Estimator | Surrogate | Correction
ROWS: list[tuple[ModuleType, str, Row]] = [
    *((advantages, name, row) for name, row in ESTIMATORS.items()),
    *((surrogates, name, row) for name, row in SURROGATES.items()),
    *((off_policy, name, row) for name, row in CORRECTIONS.items()),
]
EVERY = pytest.mark.parametrize(("module", "name", "row"), ROWS, ids=[f"{row[0].__name__}.{row[1]}" for row in ROWS])


@EVERY
def test_the_function_takes_what_the_row_reads_and_nothing_else_is_required(
    module: ModuleType, name: str, row: Row
) -> None:
    parameters = inspect.signature(getattr(module, row.function)).parameters
    taken = keywords(row.reads, row.reads)
    assert taken.keys() <= parameters.keys(), name
    if isinstance(row, Estimator):
        assert set(row.takes) <= parameters.keys()
        return
    assert ("sequence" in parameters) == row.by_sequence
    assert not any(
        parameters[key].default not in (inspect.Parameter.empty, row.reads.get("correction.geometric")) for key in taken
    )
    needed = {key for key, one in parameters.items() if one.kind is one.KEYWORD_ONLY and one.default is one.empty}
    assert needed <= taken.keys()


@EVERY
def test_the_configuration_has_every_key_that_a_row_reads(module: ModuleType, name: str, row: Row) -> None:
    config = RLConfig(task="sort")
    for key, default in row.reads.items():
        section, _, field = key.partition(".")
        assert getattr(getattr(config, section), field) in (None, default), f"{name}: {key}"


def test_the_configuration_takes_the_names_of_the_tables() -> None:
    assert get_args(axes.EstimatorName) == tuple(ESTIMATORS)
    assert get_args(axes.SurrogateName) == tuple(SURROGATES)
    assert get_args(axes.CorrectionName) == tuple(CORRECTIONS)


def test_no_key_has_two_defaults_where_the_configuration_has_one() -> None:
    """Bounds of pi / pi_old differ from surrogate to surrogate; every other key has one default for all its readers."""
    for table in (ESTIMATORS, SURROGATES, CORRECTIONS):
        for row in table.values():
            for key, value in row.reads.items():
                assert key in ("clip.low", "clip.high") or value == axes.default(key), key


def test_the_tables_load_without_torch() -> None:
    code = "import sys, novarl.algos.axes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
