"""What scikit-learn says of the same scores and probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles.inputs import BINS, judgements, preferences


def numbers() -> dict[str, dict[str, Any]]:
    from sklearn.calibration import calibration_curve
    from sklearn.metrics import accuracy_score, brier_score_loss, log_loss, roc_auc_score

    given = judgements()
    score, probability, label = (column.numpy() for column in (given.score, given.probability, given.label))
    frequency, confidence = calibration_curve(label, probability, n_bins=BINS)
    counts, _ = np.histogram(probability, bins=BINS, range=(0.0, 1.0))
    filled = counts[counts > 0]
    rows = preferences()
    odds = 1.0 / (1.0 + np.exp(-rows.reward.numpy()))
    return {
        "auroc": {"value": float(roc_auc_score(label, score))},
        "accuracy": {"value": float(accuracy_score(label, probability > 0.5))},
        "brier": {"value": float(brier_score_loss(label, probability))},
        "reliability": {
            "rows": filled.tolist(),
            "confidence": confidence.tolist(),
            "frequency": frequency.tolist(),
        },
        # scikit-learn has no ECE: the mean gap of its calibration curve, weighted by numpy's histogram.
        "ece": {"value": float(np.abs(confidence - frequency) @ filled / len(label))},
        "bce": {"value": float(log_loss(rows.label.numpy(), odds))},
    }


def versions() -> dict[str, str]:
    import sklearn

    return {"scikit-learn": sklearn.__version__}
