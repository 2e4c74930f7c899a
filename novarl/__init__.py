"""NovaRL: reinforcement learning for language models that people can trust, read and run."""

__version__ = "0.1.0"
