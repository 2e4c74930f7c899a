"""What a configuration allows of the files of models."""

from __future__ import annotations

from novarl.config.base import Config
from novarl.models.trust import Trust


def trust_of(config: Config, source: str | None = None) -> Trust:
    """By the keys trust_remote_code and trust_pickle. `source`: where the run reads the model's weights from, such as
    its own checkpoint, which is trusted as the model is that it was started with."""
    trust = Trust(config.trust_remote_code, config.trust_pickle)
    return trust if source is None else trust.of_copy(config.model, source)
