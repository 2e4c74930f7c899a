"""A trained reward model as a reward: `reward=model:<run or folder>`.

The conversation is written by the reward model's own tokenizer and template, as it was when the model was trained; a
model of plain texts is given the answer alone. A model with a scalar head (`novarl rm loss=bt` or `bce`) is read at the
last token, an implicit one (`loss=implicit_*`) is the log-ratio of the last answer to the model that it started from.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from novarl.core.errors import NovaError
from novarl.core.memory import out_of_memory
from novarl.core.types import Rollout, Sequence as TokenSequence
from novarl.data.dataset import as_sequence
from novarl.data.formats import Refused
from novarl.data.pack import microbatches, pack_sequences
from novarl.data.render import render_sft
from novarl.models.files import WHOLE
from novarl.models.heads import VALUE_HEAD, ValueModel, last_positions, load_head, token_values
from novarl.models.implicit import ImplicitModel
from novarl.models.load import Policy, load
from novarl.models.trust import NOTHING, Trust
from novarl.rewards.verdict import Failure, Verdict

SETTINGS = "reward_model.json"
"""The file beside the model's own that says how its conversations are written: `apply_chat_template`, `template_kwargs`
for the template, and `plain` for a model of texts without a prompt. Of an implicit model also `beta` and `reference`:
the folder of the model that it is compared with, relative to its own."""
BUDGET = 16_384
"""The most tokens in one forward pass."""


class ModelReward:
    """The reward of each conversation's last answer. What exceeds the context loses its beginning; what the chat
    template refuses fails alone."""

    time_limit: float | None = None
    """A model computes without waiting: no limit of the caller's could end it."""

    def __init__(
        self,
        policy: Policy,
        model: ValueModel | ImplicitModel,
        *,
        apply_chat_template: bool = True,
        plain: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.policy, self.model = policy, model
        self.apply_chat_template, self.plain = apply_chat_template, plain
        self.template_kwargs = dict(template_kwargs or {})

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[Verdict]:
        rendered = [self._render(rollout) for rollout in rollouts]
        verdicts: list[Verdict] = [one if isinstance(one, Failure) else None for one in rendered]
        sequences = {index: one for index, one in enumerate(rendered) if isinstance(one, TokenSequence)}
        places = list(sequences)
        for part in microbatches([len(sequences[place].tokens) for place in places], BUDGET) if places else []:
            wanted = [places[index] for index in part]
            for place, value in zip(wanted, self._fitting([sequences[place] for place in wanted]), strict=True):
                verdicts[place] = value
        return verdicts

    def _fitting(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """Their scores, by halves where memory does not hold all of them at once."""
        try:
            return self._score(sequences)
        except (MemoryError, OSError, RuntimeError) as error:
            if not out_of_memory(error) or len(sequences) == 1:
                raise
        # Outside the handler, whose traceback keeps the dead pass's tensors alive.
        middle = len(sequences) // 2
        return [*self._fitting(sequences[:middle]), *self._fitting(sequences[middle:])]

    @torch.no_grad()
    def _score(self, sequences: Sequence[TokenSequence]) -> list[float]:
        batch, device = pack_sequences(sequences), next(self.policy.model.parameters()).device
        read = ("tokens", "position_ids", "prev", "cu_seqlens", "mask")
        batch = replace(batch, **{name: getattr(batch, name).to(device) for name in read})
        if isinstance(self.model, ImplicitModel):
            values = self.model.answer_rewards(batch)
        else:
            last, compute_dtype = last_positions(batch), self.policy.compute_dtype
            values = token_values(self.model, batch, positions=last, compute_dtype=compute_dtype)
        found: list[float] = values.double().tolist()
        return found

    def _render(self, rollout: Rollout) -> TokenSequence | Failure:
        if self.plain:
            messages: Sequence[Any] = [{"role": "assistant", "content": rollout.text}]
        else:
            last = max((i for i, turn in enumerate(rollout.messages) if turn["role"] == "assistant"), default=-1)
            messages = rollout.messages[: last + 1]
        if not messages:
            return Failure("the conversation has no answer")
        templated = self.apply_chat_template and not self.plain
        # What the policy's template was fixed to is not for this one.
        row = {name: given for name, given in rollout.prompt.template_kwargs.items() if name != "chat_template"}
        try:
            spans = render_sft(
                self.policy.tokenizer,
                messages,
                context=len(messages) - 1,
                apply_chat_template=templated,
                template_kwargs={**self.template_kwargs, **row},
            )
        except Refused as refused:
            return Failure(f"the reward model cannot read the conversation: {refused.reason}")
        tokens, mask = spans[-1]
        return as_sequence((tokens[-self.policy.context :], mask[-self.policy.context :]))


def load_model_reward(
    place: str, *, device: str = "cpu", where: str | None = None, trust: Trust = NOTHING
) -> ModelReward:
    """The reward model in `place`: a run of novarl rm, a checkpoint or its model folder. NovaError, at `where` (the key
    that named it): it is none, or cannot be read."""
    folder = _folder(place, where or f"reward=model:{place}")
    settings = _settings(folder)
    trust = trust.of_copy(place, str(folder))
    policy = load(str(folder), device=device, trust=trust)
    model: ValueModel | ImplicitModel
    if (folder / VALUE_HEAD).is_file():
        policy.model.requires_grad_(False)
        model = ValueModel(policy.model, load_head(folder, policy.model).requires_grad_(False))
    else:
        model = _implicit(folder, policy, settings, device, trust)
    chat, plain = bool(settings.get("apply_chat_template", True)), bool(settings.get("plain", False))
    template_kwargs = settings.get("template_kwargs") or {}
    if not isinstance(template_kwargs, dict):
        where_settings = str(folder / SETTINGS)
        raise NovaError("template_kwargs is not an object", where=where_settings, fix=WHOLE)
    if chat and not plain and not policy.tokenizer.chat_template:
        what = "the reward model was trained with a chat template, but its tokenizer has none"
        fix = "copy or save the model again, with chat_template.jinja"
        raise NovaError(what, where=where or f"reward=model:{place}", fix=fix)
    return ModelReward(policy, model, apply_chat_template=chat, plain=plain, template_kwargs=template_kwargs)


def load_implicit(place: str, where: str, *, device: str, trust: Trust = NOTHING) -> ModelReward:
    """The implicit reward model in `place`. NovaError, at `where`: there is none."""
    if (_folder(place, where) / VALUE_HEAD).is_file():
        what = "this reward model has a scalar head and does not score single tokens"
        raise NovaError(what, where=where, fix="use a run of novarl rm with loss=implicit_ce (or _dpo, _kto)")
    return load_model_reward(place, device=device, where=where, trust=trust)


def _implicit(folder: Path, policy: Policy, settings: dict[str, Any], device: str, trust: Trust) -> ImplicitModel:
    """The model with its reference. NovaError: the reference is not where the settings say."""
    beta, reference = settings.get("beta"), settings.get("reference")
    if not isinstance(beta, float) or not isinstance(reference, str):
        what = "beta and reference must be a number and a folder"
        raise NovaError(what, where=str(folder / SETTINGS), fix=WHOLE)
    there = folder.resolve() / reference
    if not (there / "config.json").is_file():
        what = f"its reference model is missing: {os.path.normpath(there)}"
        fix = "copy the whole run, not only the model's folder, or train it again"
        raise NovaError(what, where=str(folder), fix=fix)
    base = load(str(there), device=device, trust=trust.of_copy(str(folder), str(there)))
    for model in (policy.model, base.model):
        model.requires_grad_(False)
    return ImplicitModel(policy.model, base.model, beta, policy.compute_dtype)


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / SETTINGS
    try:
        settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise NovaError(f"not a JSON object: {error}", where=str(path), fix=WHOLE) from error
    if not isinstance(settings, dict):
        raise NovaError("not a JSON object", where=str(path), fix=WHOLE)
    return settings


def _folder(place: str, where: str) -> Path:
    """Where the files of the model lie."""
    given = Path(place).expanduser()
    if not place or not given.is_dir():
        fix = "use a run of novarl rm, such as runs/rm, or its model folder"
        raise NovaError("no such folder", where=where, fix=fix)
    inside = (given, given / "model", given / "checkpoints" / "latest" / "model")
    found = next((one for one in inside if (one / VALUE_HEAD).is_file() or "beta" in _settings(one)), None)
    if found is None:
        lacks = f"it has neither {VALUE_HEAD} nor implicit-reward settings in {SETTINGS}"
        raise NovaError(f"the folder is not a reward model: {lacks}", where=where, fix="use a run of novarl rm")
    return found
