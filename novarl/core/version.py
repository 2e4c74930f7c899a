"""The version of this package, and where it is installed."""

from pathlib import Path

VERSION = "0.1.0"
PACKAGE = Path(__file__).parents[1]
"""The folder `novarl`."""
