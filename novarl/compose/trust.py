"""Which model files a configuration trusts."""

from __future__ import annotations

from novarl.config.base import Config
from novarl.models.trust import Trust


def trust_of(config: Config, source: str | None = None) -> Trust:
    """The keys trust_remote_code and trust_pickle. `source`: where the run reads the model's weights, such as its own
    checkpoint, which is trusted like the model it was started with."""
    trust = Trust(config.trust_remote_code, config.trust_pickle)
    return trust if source is None else trust.of_copy(config.model, source)
