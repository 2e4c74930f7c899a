"""Print the oldest versions that pyproject.toml allows, as pip's constraints: `python -m tools.oldest`."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def oldest(pyproject: str) -> list[str]:
    """Lines `name==version` for what the text of a pyproject.toml has its users install; developers have the pins."""
    read = tomllib.loads(pyproject)
    project = read["project"]
    extras = (lines for name, lines in project["optional-dependencies"].items() if name != "dev")
    lines = [*read["build-system"]["requires"], *project["dependencies"], *(line for extra in extras for line in extra)]
    found = (re.fullmatch(r"([A-Za-z0-9._-]+)>=([0-9.]+)", line) for line in lines)
    return [f"{match[1]}=={match[2]}" for match in found if match]


def main() -> int:
    print(*oldest((ROOT / "pyproject.toml").read_text(encoding="utf-8")), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
