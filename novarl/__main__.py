"""`python -m novarl`: the same as the `novarl` script, and what `torchrun -m novarl` starts on every rank."""

from novarl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
