"""Write requirements.txt from the dependencies of pyproject.toml, for those who install with `pip install -r`.

python tools/make_requirements.py            # write it
python tools/make_requirements.py --check    # exit with 1 if it is not what would be written
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """\
# Generated from pyproject.toml by tools/make_requirements.py (`make requirements`); do not edit.
# The exact versions that the tests ran with: pip install -r requirements.txt -c constraints.txt
"""


def requirements(pyproject: str) -> str:
    """The text of requirements.txt for the text of a pyproject.toml."""
    return HEADER + "".join(f"{line}\n" for line in tomllib.loads(pyproject)["project"]["dependencies"])


def main(arguments: list[str]) -> int:
    target = ROOT / "requirements.txt"
    text = requirements((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if arguments == ["--check"]:
        if target.exists() and target.read_text(encoding="utf-8") == text:
            return 0
        print("requirements.txt is not what pyproject.toml says: run make requirements", file=sys.stderr)
        return 1
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
