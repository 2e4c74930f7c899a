"""Ask the other libraries: writes numbers.json beside this file. The first half of `make oracles`.

Run in an environment that has them (requirements.txt beside this file); it needs no NovaRL, and imports none.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.oracles import rlax_numbers, sklearn_numbers, trl_policy_numbers, trl_preference_numbers

NUMBERS = Path(__file__).with_name("numbers.json")


def main() -> None:
    parts = (rlax_numbers, trl_policy_numbers, trl_preference_numbers, sklearn_numbers)
    numbers: dict[str, Any] = {}
    for part in parts:
        found = part.numbers()
        assert not numbers.keys() & found.keys(), "two cases of one name"
        numbers |= found
    assert not any(name.split(".")[0] == "novarl" for name in sys.modules)
    versions = rlax_numbers.versions() | trl_policy_numbers.versions() | sklearn_numbers.versions()
    cases = ",\n".join(f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in numbers.items())
    NUMBERS.write_text(
        f'{{\n "versions": {json.dumps(versions)},\n'
        f' "conventions": {{"trl": {json.dumps(trl_policy_numbers.conventions())}}},\n'
        f' "numbers": {{\n{cases}\n }}\n}}\n'
    )
    print(f"{len(numbers)} cases from {', '.join(f'{name} {version}' for name, version in versions.items())}")


if __name__ == "__main__":
    main()
