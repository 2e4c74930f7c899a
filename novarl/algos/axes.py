"""The parts of an algorithm as table records: estimators, surrogates, corrections; and the names on the other axes.

A new estimator or surrogate is its function and one record here. The configuration and its checks, `novarl explain`,
the learner and the documentation read the record. This module imports no torch: a record names its function, which is
looked up in `algos.advantages`, `algos.surrogates` or `algos.off_policy` when a run is put together.

`reads` lists the keys of the configuration that become keywords of the function, with their defaults. A default stands
nowhere else: neither the functions that take bounds nor the configuration repeat it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

Need = Literal["group", "greedy", "reference", "old_logp", "values", "process"]
ValueSource = Literal["critic", "continuations"]
KLType = Literal["loss", "reward", "advantage"]
KLEstimator = Literal["k1", "k2", "k3"]
AggregationName = Literal["token", "sequence", "constant"]
OwnFunction = str
"""A function of the user's own in place of one of ours: `file.py:name`."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """How rewards become advantages.

    `function` is one of `algos.advantages`, `words` describes it for `novarl explain`. `temporal`: it gives every step
    its own advantage, from the values of states. Others compare the rewards of whole answers; `takes` names what they
    want to know of the answers beside their rewards. `needs` is what must be there beside rollouts and rewards (see
    `Algorithm.needs`). `weighted`: the advantage of a token already includes the token's own pi_old / mu, so no
    correction may follow. `returns` is the estimator whose returns a critic learns, where that is another one.
    """

    function: str
    words: str
    reads: Mapping[str, Any] = field(default_factory=dict)
    takes: tuple[Literal["group", "lengths", "greedy", "ema"], ...] = ()
    needs: frozenset[Need] = frozenset()
    temporal: bool = False
    weighted: bool = False
    returns: str | None = None


@dataclass(frozen=True, slots=True)
class Surrogate:
    """What is minimised for each token; `function` is one of `algos.surrogates`.

    `by_sequence`: the function takes the keyword `sequence`, the answer of each token. `scales_groups`: advantages make
    up for groups of equal rewards (`surrogates.gpg_alpha`).
    """

    function: str
    words: str
    reads: Mapping[str, Any] = field(default_factory=dict)
    by_sequence: bool = False
    scales_groups: bool = False


@dataclass(frozen=True, slots=True)
class Correction:
    """An importance weight pi_old / mu; `function` is one of `algos.off_policy`, `by_sequence` as above."""

    function: str
    words: str
    reads: Mapping[str, Any] = field(default_factory=dict)
    by_sequence: bool = False


_GROUP: frozenset[Need] = frozenset({"group"})
_VALUES: frozenset[Need] = frozenset({"values"})
_OLD: frozenset[Need] = frozenset({"values", "old_logp"})
_GAMMA, _LAM, _RHO, _C = {"adv.gamma": 1.0}, {"adv.lam": 1.0}, {"adv.rho_max": 1.0}, {"adv.c_max": 1.0}

ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {
        "none": Estimator("constant_baseline", "nothing"),
        "constant": Estimator("constant_baseline", "{adv.constant:g}", {"adv.constant": 0.0}),
        "mean": Estimator("batch", "the batch mean", takes=("group",)),
        "ema": Estimator("ema_baseline", "a moving average of past rewards", {"adv.ema_beta": 0.9}, ("ema",)),
        "scst": Estimator("scst", "the reward of the greedy response", {}, ("greedy",), frozenset({"greedy"})),
        "group": Estimator("group", "the group mean", {"adv.norm_std": False}, ("group",), _GROUP),
        "leave_one_out": Estimator("leave_one_out", "the mean of the group's other responses", {}, ("group",), _GROUP),
        "reinforce_pp": Estimator("reinforce_pp", "the group mean", {}, ("group",), _GROUP),
        "opo": Estimator("opo", "the length-weighted group mean", {}, ("group", "lengths"), _GROUP),
        "gae": Estimator("gae", "GAE", _GAMMA | _LAM, needs=_VALUES, temporal=True),
        "vtrace": Estimator("vtrace", "V-trace", _GAMMA | _LAM | _RHO | _C, needs=_OLD, temporal=True, weighted=True),
        # Its own returns estimate Q of the token that was chosen, and a critic of states fitted to them would learn the
        # sampler's mean of Q. V-trace has the target for V; on-policy the two are one.
        "retrace": Estimator("retrace", "Retrace", _GAMMA | _LAM | _C, needs=_OLD, temporal=True, returns="vtrace"),
        "td_lambda": Estimator("td_lambda", "TD(lambda)", _GAMMA | _LAM, needs=_VALUES, temporal=True),
        "n_step": Estimator("n_step", "n-step returns", _GAMMA | {"adv.n": 5}, needs=_VALUES, temporal=True),
        "clipped_is": Estimator(
            "clipped_is",
            "clipped importance-sampling returns",
            _GAMMA | _RHO | {"adv.is_level": "decision"},
            needs=_OLD,
            temporal=True,
            weighted=True,
        ),
        "monte_carlo": Estimator("monte_carlo", "Monte Carlo returns", _GAMMA, temporal=True),
        "prime": Estimator(
            "prime",
            "outcome and token-level rewards, minus those of the group's other responses",
            _GAMMA,
            needs=frozenset({"group", "process"}),
        ),
    }
)

_BOUNDS = {"clip.low": 0.2, "clip.high": 0.2}

SURROGATES: Mapping[str, Surrogate] = MappingProxyType(
    {
        "reinforce": Surrogate("reinforce", "advantage times log-probability (REINFORCE)"),
        "ppo_clip": Surrogate("ppo_clip", "clipped ratio (PPO)", _BOUNDS),
        "dual_clip": Surrogate("dual_clip", "dual-clipped ratio", _BOUNDS | {"clip.dual": 3.0}),
        "gspo": Surrogate(
            "gspo", "clipped sequence-level ratio (GSPO)", {"clip.low": 3e-4, "clip.high": 4e-4}, by_sequence=True
        ),
        "cispo": Surrogate(
            "cispo", "log-probability weighted by the truncated ratio (CISPO)", {"clip.low": 1.0, "clip.high": 4.0}
        ),
        "gpg": Surrogate(
            "gpg",
            "advantage times log-probability, rescaled for groups with identical rewards (GPG)",
            scales_groups=True,
        ),
        "sapo": Surrogate("sapo", "softly gated ratio (SAPO)", {"loss.tau_pos": 1.0, "loss.tau_neg": 1.05}),
    }
)

_CAP, _BAND = {"correction.tis_max": 2.0}, {"correction.low": 0.5, "correction.high": 5.0}
_WHOLE = {"correction.geometric": False}
_OUTSIDE = "with pi_old / mu outside [{correction.low:g}, {correction.high:g}] are masked"

CORRECTIONS: Mapping[str, Correction] = MappingProxyType(
    {
        "token": Correction(
            "truncated_weight",
            "each token's loss is weighted by pi_old / mu, truncated at {correction.tis_max:g}",
            _CAP,
        ),
        "sequence": Correction(
            "sequence_truncated_weight",
            "each answer's loss is weighted by its pi_old / mu, truncated at {correction.tis_max:g}",
            _CAP | _WHOLE,
            by_sequence=True,
        ),
        "icepop": Correction("masked_weight", f"tokens {_OUTSIDE}", _BAND),
        "sequence_mask": Correction("sequence_masked_weight", f"answers {_OUTSIDE}", _BAND | _WHOLE, by_sequence=True),
    }
)

if TYPE_CHECKING:
    EstimatorName = str
    SurrogateName = str
    CorrectionName = str
else:  # the configuration accepts the names in the tables
    EstimatorName = Literal[tuple(ESTIMATORS)]
    SurrogateName = Literal[tuple(SURROGATES)]
    CorrectionName = Literal[tuple(CORRECTIONS)]

_OWN_ESTIMATOR, _OWN_SURROGATE = Estimator("", ""), Surrogate("", "", _BOUNDS)


def estimator(name: EstimatorName | OwnFunction) -> Estimator:
    """The record of an estimator; one that needs and reads nothing for a function of the user's own."""
    return ESTIMATORS.get(name, _OWN_ESTIMATOR)


def surrogate(name: SurrogateName | OwnFunction) -> Surrogate:
    """The record of a surrogate; one with the bounds of ppo_clip for a function of the user's own."""
    return SURROGATES.get(name, _OWN_SURROGATE)


_RECORDS: tuple[tuple[str, Estimator | Surrogate | Correction], ...] = (
    *ESTIMATORS.items(),
    *SURROGATES.items(),
    *CORRECTIONS.items(),
)


def readers(key: str) -> list[str]:
    """The estimators, surrogates or corrections that read a key of the configuration, in the order of the tables."""
    return [name for name, record in _RECORDS if key in record.reads]


def default(key: str) -> Any:
    """The default of a key of the configuration, in the first record that reads it."""
    return next(record.reads[key] for _, record in _RECORDS if key in record.reads)


_KEYWORDS = {
    "adv.constant": "value",
    "adv.ema_beta": "beta",
    "adv.is_level": "level",
    "clip.low": "clip_low",
    "clip.high": "clip_high",
    "clip.dual": "clip_dual",
    "correction.tis_max": "maximum",
}
"""What a function calls a key, where that is not the key's last part."""


def keywords(keys: Iterable[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of some keys, by the keywords of the function that reads them."""
    return {_KEYWORDS.get(key, key.rpartition(".")[2]): values[key] for key in keys}
