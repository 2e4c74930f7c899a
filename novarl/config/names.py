"""Translates the names in a configuration to NovaRL's own: resolves aliases and refuses unknown names with a hint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from novarl.config.base import Config
from novarl.config.foreign.aliases import (
    ADAPTERS,
    DIRECTIONS,
    KL_PLACES,
    OBJECTIVE_NAMES,
    READ_TOGETHER,
    RUN_NAMES,
    VALUES,
)
from novarl.config.foreign.rows import NULL_COUNTS, SEVERAL, Alias, Fixed, Hint, Ignored, Row
from novarl.config.foreign.tables import rows as all_rows
from novarl.config.keys import is_key, keys, nearest, sections, upwards
from novarl.config.parts import rewards_by_name
from novarl.config.tree import TREES
from novarl.core.errors import NovaError, NovaErrors

Kind = TypeVar("Kind", Alias, Fixed, Hint)

_REFERS = re.compile(r"\$\{\w+(\.\w+)+\}")
"""OmegaConf's syntax for a reference to another key."""
_OBJECTIVES, _WEIGHTS = "multi_objective.objectives", "multi_objective.objective_weights"


@dataclass(frozen=True, slots=True)
class Entry:
    """One value of the user's: its key, the name it was given under, and its source."""

    path: str
    value: Any
    given: str
    source: str
    line: int | None = None

    @property
    def place(self) -> str:
        """The place shown in an error: `configs/x.yaml:3 kl_coef (NovaRL: kl.coef)`."""
        line = f":{self.line}" if self.line else ""
        name = self.given if self.given == self.path else f"{self.given} (NovaRL: {self.path})"
        return f"{self.source}{line} {name[:120]}"


@cache
def meanings(tree: type[Config]) -> dict[str, tuple[Row, ...]]:
    """The rows of one kind of run by name: one, or one per project if the name has several meanings."""
    own = keys(tree)
    found: dict[str, tuple[Row, ...]] = {}
    for row in all_rows():
        leads = all(is_key(new, tree) for new in row.new) if isinstance(row, Alias) else True
        if row.old not in own and leads and (not row.commands or tree.kind in row.commands):
            found[row.old] = (*found.get(row.old, ()), row)
    return found


@cache
def single(tree: type[Config], kind: type[Kind]) -> dict[str, Kind]:
    """The names of one kind of run whose single meaning is a row of this kind."""
    return {old: rows[0] for old, rows in meanings(tree).items() if len(rows) == 1 and isinstance(rows[0], kind)}


def rows_of(name: str, tree: type[Config]) -> tuple[Row, ...]:
    """The rows about a name: its own, or the hint about a section that contains it. None for NovaRL's own names."""
    if name in keys(tree):
        return ()
    known = meanings(tree)
    around = (known[path] for path in upwards(name) if path in known)
    found = next(around, ())
    return found if name in known or isinstance(next(iter(found), None), Hint) else ()


def meant(entry: Entry, tree: type[Config], projects: Iterable[str]) -> Row | None:
    """The row of an entry; None for unknown names and our own. NovaError for a name that several projects share."""
    rows = rows_of(entry.path, tree)
    fitting = [row for row in rows if row.source in projects] if len(rows) > 1 else rows
    if len(rows) > 1 and len(fitting) != 1:
        what, fix = ("; ".join(f"{row.source}: {explained(row)[part]}" for row in rows) for part in (0, 1))
        raise NovaError(f"this name is ambiguous: {what}", where=entry.place, fix=fix)
    return fitting[0] if fitting else None


def explained(row: Row) -> tuple[str, str]:
    """The meaning of a name according to a row, and what to write instead."""
    if isinstance(row, Alias):
        return row.means, f"set {', '.join(row.new)}"
    return (row.what, row.fix) if isinstance(row, Hint) else (row.reason, "remove this key")


def projects_of(entries: Iterable[Entry], tree: type[Config]) -> frozenset[str]:
    """The projects identified by names that no other project and no NovaRL command uses."""
    found = {READ_TOGETHER.get(entry.path) for entry in entries if entry.path not in keys(tree)}
    found |= {rows[0].source for entry in entries if len(rows := rows_of(entry.path, tree)) == 1}
    return frozenset(name for name in found if name and name != SEVERAL)


def ignored(entries: Iterable[Entry], tree: type[Config]) -> list[str]:
    """A note for each name that is accepted and ignored."""
    found: dict[str, str] = {}
    for entry in entries:
        for row in () if entry.value is None else rows_of(entry.path, tree):
            if isinstance(row, Ignored):
                found[entry.path] = f"{entry.path} is ignored: {row.reason}"
    return list(found.values())


def canonical(entries: list[Entry], tree: type[Config]) -> dict[str, Entry]:
    """The entries under NovaRL's own names; the later source wins. NovaError for all mistakes at once."""
    found: dict[str, Entry] = {}
    implied: dict[str, tuple[Alias, Entry]] = {}
    needed: list[tuple[Alias, Entry]] = []
    beside: list[tuple[Ignored, Entry]] = []
    refused: list[NovaError] = []
    projects = projects_of(entries, tree)
    for entry in join(entries, tree):
        try:
            if _is_unset(entry, tree):
                continue
            row = meant(entry, tree, projects)
            translated = translate(entry, row, tree)
        except NovaError as error:
            refused.append(error)
            continue
        for path, value in translated.items():
            _add(found, replace(entry, path=path, value=value))
            # This value may not imply what an earlier one did.
            implied = {to: (by, old) for to, (by, old) in implied.items() if path not in by.new or by.still(to, value)}
        if isinstance(row, Alias):
            needed += [(row, entry)] if row.needs and any(translated.values()) else []
            for path, value in row.implied(entry.value).items():
                implied[path] = (row, replace(entry, path=path, value=value))
        if isinstance(row, Ignored) and row.beside:
            beside.append((row, entry))
    whole = {**{path: entry for path, (_, entry) in implied.items() if path not in found}, **found}
    refused += [
        NovaError(row.otherwise, where=entry.place, fix=f"remove this key, or set {path}={values[0]}")
        for row, entry in needed
        for path, values in row.needs.items()
        if (whole[path].value if path in whole else None) not in values
    ]
    refused += [
        NovaError(row.reason, where=entry.place, fix=row.fix) for row, entry in beside if row.beside not in whole
    ]
    if refused:
        raise refused[0] if len(refused) == 1 else NovaErrors(refused)
    return whole


def _is_unset(entry: Entry, tree: type[Config]) -> bool:
    """Whether the value is the project's way to leave the setting unset, as in a dump of all its settings."""
    rows = rows_of(entry.path, tree)
    if not rows or entry.value is not None:
        return bool(rows) and all(isinstance(row, Alias) and entry.value in row.unset for row in rows)
    takes_null = isinstance(rows[0], Alias) and keys(tree)[rows[0].new[0]].values.endswith("or null")
    return len(rows) > 1 or rows[0].source not in NULL_COUNTS or not takes_null


def translate(entry: Entry, row: Row | None, tree: type[Config]) -> dict[str, Any]:
    """What an entry sets, under NovaRL's own names. NovaError for refused and unknown names."""
    name, value = entry.path, entry.value
    if isinstance(row, Ignored):
        return {}
    if isinstance(value, str) and (refers := _REFERS.search(value)):
        what = f"{refers[0]:.60} refers to another key, which is not supported"
        raise NovaError(what, where=entry.place, fix="write the value itself")
    if isinstance(row, Fixed):
        return _accept(entry, row)
    if isinstance(row, Hint):
        raise NovaError(row.what, where=entry.place, fix=row.fix)
    if isinstance(row, Alias):
        return {new: _value(new, part) for new, part in _partners(entry, row).items()}
    if name in sections(tree):
        if isinstance(value, bool) and is_key(f"{name}.enabled", tree):
            return {f"{name}.enabled": value}
        if value not in (None, {}):
            raise NovaError("this is a section, not a key", where=entry.place, fix=f"set {name}.KEY")
        return {}
    if not is_key(name, tree):
        raise _unknown(entry, tree)
    return {name: _value(name, value)}


def join(entries: list[Entry], tree: type[Config]) -> list[Entry]:
    """Resolve names that are read together: TRL's reward functions and their weights, its `use_peft`, `epochs` and
    `steps_per_epoch`, RL2's two KL estimators, its list of objectives and their weights, the names of a run."""
    if "run_dir" in keys(tree):
        entries = _join_run_dir(entries, tree)
    if "reward" in keys(tree):
        entries = _join_rewards(entries)
    if "lora.rank" in keys(tree):
        entries = _join_adapters(entries, tree)
    if "algo" not in keys(tree):
        return entries
    last = {entry.path: entry for entry in entries}
    epochs, per_epoch = last.get("epochs"), last.get("steps_per_epoch")
    if (only := epochs or per_epoch) is not None:
        if epochs is None or per_epoch is None:
            fix = "set both, or set steps"
            raise NovaError("epochs and steps_per_epoch must be set together", where=only.place, fix=fix)
        for entry in (epochs, per_epoch):
            if type(entry.value) is not int or entry.value < 1:
                raise NovaError(
                    f"must be a whole number of at least 1, got {entry.value!r:.60}",
                    where=entry.place,
                    fix="for example epochs=3 steps_per_epoch=8",
                )
        product = replace(per_epoch, path="steps", given="epochs", value=epochs.value * per_epoch.value)
        entries = [
            product if e is per_epoch else e
            for e in entries
            if e.path not in ("epochs", "steps_per_epoch") or e is per_epoch
        ]
    return _join_objectives(_join_kl(entries))


def _join_run_dir(entries: list[Entry], tree: type[Config]) -> list[Entry]:
    """Project and experiment name as the run directory `runs/PROJECT/EXPERIMENT`, unless run_dir is set."""
    named = {RUN_NAMES[e.path]: e for e in entries if e.path in RUN_NAMES and e.value is not None}
    entries = [entry for entry in entries if entry.path not in RUN_NAMES]
    aliases = single(tree, Alias)
    if not named or any("run_dir" in (e.path, *(aliases[e.path].new if e.path in aliases else ())) for e in entries):
        return entries
    if "experiment" not in named:
        fix = "set trainer.experiment_name too, or set run_dir"
        raise NovaError("the experiment name is missing", where=named["project"].place, fix=fix)
    for entry in named.values():
        if not isinstance(entry.value, str) or _REFERS.search(entry.value):
            raise NovaError(f"must be text, got {entry.value!r:.60}", where=entry.place, fix="write a name")
    parts = [named[part].value for part in ("project", "experiment") if part in named]
    return [*entries, replace(named["experiment"], path="run_dir", value="/".join(["runs", *parts]))]


def _join_rewards(entries: list[Entry]) -> list[Entry]:
    """`reward_funcs: [a.py:x, b.py:y]` and `reward_weights: [1, 0.5]`, in the same order, as rewards by name. They take
    the place of the later of the two."""
    last = {entry.path: entry for entry in entries}
    listed, weights = last.get("reward_funcs"), last.get("reward_weights")
    if weights is None and (listed is None or not isinstance(listed.value, list)):
        return entries
    if listed is None:
        fix = "set reward.NAME.weight=0.5"
        raise NovaError("reward_weights needs reward_funcs", where=last["reward_weights"].place, fix=fix)
    sources = listed.value if isinstance(listed.value, list) else [listed.value]
    named = [name for source in sources if isinstance(source, str) for name in rewards_by_name(source)]
    if not sources or len(set(named)) < len(sources):
        raise NovaError(
            f"must be functions with different names, got {listed.value!r:.60}",
            where=listed.place,
            fix="set reward.a.source=a.py:x reward.b.source=b.py:y reward.b.weight=0.5",
        )
    joined = [replace(listed, path="reward", value={})]
    joined += [
        replace(listed, path=f"reward.{name}.source", value=source) for name, source in zip(named, sources, strict=True)
    ]
    if weights is not None:
        if not isinstance(weights.value, list) or len(weights.value) != len(named):
            what = f"must be a list with one weight per function in reward_funcs, got {weights.value!r:.60}"
            raise NovaError(what, where=weights.place, fix=f"for example {[1.0] * len(named)}")
        weighed = zip(named, weights.value, strict=True)
        joined += [replace(weights, path=f"reward.{name}.weight", value=weight) for name, weight in weighed]
    end = max(at for at, entry in enumerate(entries) if entry is listed or entry is weights)
    for at, entry in enumerate(entries):
        whole = entry.path == "reward" or (entry.path.startswith("reward.") and at < end)
        if whole and entry.source == listed.source:
            what = f"{entry.given} and reward_funcs both set the rewards"
            raise NovaError(what, where=listed.place, fix="remove one of them")
    pair = ("reward_funcs", "reward_weights")
    before, after = ([e for e in part if e.path not in pair] for part in (entries[:end], entries[end:]))
    return [*before, *joined, *after]


def _join_adapters(entries: list[Entry], tree: type[Config]) -> list[Entry]:
    """TRL's `use_peft`: true sets its rank and alpha unless they are given; false trains all weights, whatever adapter
    settings the same source or an earlier one has."""
    given = next((entry for entry in reversed(entries) if entry.path == "use_peft" and entry.value is not None), None)
    if given is None:
        return [entry for entry in entries if entry.path != "use_peft"]
    if not isinstance(given.value, bool):
        raise NovaError(f"must be true or false, got {given.value!r:.60}", where=given.place, fix="write true or false")
    at, aliases = entries.index(given), single(tree, Alias)
    named = [(entry, aliases[entry.path].new[0] if entry.path in aliases else entry.path) for entry in entries]
    if given.value:
        settled = {new for entry, new in named if entry.value is not None}
        defaults = {path: value for path, value in ADAPTERS.items() if path not in settled}
    else:
        defaults = {"lora.rank": 0}
        named = [
            (entry, new)
            for index, (entry, new) in enumerate(named)
            if not new.startswith("lora.") or (index > at and entry.source != given.source)
        ]
    kept = [entry for entry, new in named if new != "use_peft"]
    return [*(replace(given, path=path, value=value) for path, value in defaults.items()), *kept]


def _join_kl(entries: list[Entry]) -> list[Entry]:
    """RL2's KL estimator for the place set by `kl.type`. Without `kl.type`, a single estimator also sets the place."""

    def place(entry: Entry) -> str | None:
        parent, _, name = entry.path.rpartition(".")
        return KL_PLACES.get(name) if parent in ("kl", "actor.kl") else None

    named = {where: entry for entry in entries if (where := place(entry))}
    stated = [entry.value for entry in entries if entry.path in ("kl.type", "actor.kl.type")]
    alone = next(iter(named.items())) if len(named) == 1 else None
    if alone and stated and stated[-1] not in (None, alone[0]):
        raise NovaError(f"kl.type={stated[-1]} does not use it", where=alone[1].place, fix="write kl.estimator instead")
    kept = [entry for entry in entries if not place(entry)]
    if alone and not stated:
        kept.append(replace(alone[1], path="kl.type", value=alone[0]))
    chosen = str(stated[-1]) if stated else alone and alone[0]
    return [*kept, replace(named[chosen], path="kl.estimator")] if chosen in named else kept


def _join_objectives(entries: list[Entry]) -> list[Entry]:
    """`objectives: [reward, kl_penalty]` and `objective_weights: {reward: 1, kl_penalty: -0.1}` as objectives by name.
    Within a source the weights are applied last, since they refer to the list."""
    if not any(entry.path.startswith("multi_objective.") for entry in entries):
        return entries
    order = list(dict.fromkeys(entry.source for entry in entries))
    found: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (order.index(entry.source), entry.path.startswith(_WEIGHTS))):
        if entry.path == _OBJECTIVES and isinstance(entry.value, list):
            found += _listed(entry)
        elif entry.path.startswith(f"{_OBJECTIVES}."):
            name, dot, rest = entry.path.removeprefix(f"{_OBJECTIVES}.").partition(".")
            found.append(replace(entry, path=f"{_OBJECTIVES}.{OBJECTIVE_NAMES.get(name, name)}{dot}{rest}"))
        elif entry.path.startswith(f"{_WEIGHTS}."):
            found.append(_weight(entry))
        else:
            found.append(entry)
    return found


def _listed(entry: Entry) -> list[Entry]:
    """A list of names as objectives with their known directions."""
    found = [replace(entry, value={})]
    for given in entry.value:
        name = OBJECTIVE_NAMES.get(given, given) if isinstance(given, str) else None
        if name not in DIRECTIONS:
            raise NovaError(
                f"the direction of objective {given!r:.60} is unknown",
                where=entry.place,
                fix=f"set {_OBJECTIVES}: {{name: {{direction: max}}}}, or min",
            )
        found.append(replace(entry, path=f"{_OBJECTIVES}.{name}.direction", value=DIRECTIONS[name]))
    return found


def _weight(entry: Entry) -> Entry:
    """A weight without the sign that the objective's direction already implies."""
    given = entry.path.removeprefix(f"{_WEIGHTS}.")
    name, value = OBJECTIVE_NAMES.get(given, given), entry.value
    if DIRECTIONS.get(name) == "min" and isinstance(value, int | float) and not isinstance(value, bool):
        value = abs(value)
    return replace(entry, path=f"{_OBJECTIVES}.{name}.weight", value=value)


def _add(found: dict[str, Entry], entry: Entry) -> None:
    """Add an entry; it replaces entries within its path and around it."""
    earlier = found.get(entry.path)
    if earlier and earlier.source == entry.source and earlier.given != entry.given and earlier.value != entry.value:
        raise NovaError(
            f"{earlier.given} and {entry.given} are both names of {entry.path} but have different values",
            where=entry.place,
            fix="remove one of them",
        )
    for path in list(found):
        if path.startswith(f"{entry.path}.") or entry.path.startswith(f"{path}."):
            del found[path]
    found[entry.path] = entry


def _value(path: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return VALUES.get(path, {}).get(value, value)


def _partners(entry: Entry, alias: Alias) -> dict[str, Any]:
    """The NovaRL values of an alias, by key."""
    if not alias.each:
        return dict.fromkeys(alias.new, _partner(entry, alias))
    if not isinstance(entry.value, list) or len(entry.value) != len(alias.new):
        what = f"must be {len(alias.new)} values, got {entry.value!r:.60}"
        raise NovaError(what, where=entry.place, fix=f"for example {alias.old}={alias.example}")
    return dict(zip(alias.new, entry.value, strict=True))


def _partner(entry: Entry, alias: Alias) -> Any:
    """The NovaRL value of an alias."""
    if alias.convert:
        return alias.convert(entry.value)
    if not alias.values:
        return entry.value
    for old, new in alias.values.items():
        if type(old) is type(entry.value) and old == entry.value:
            return new
    if isinstance(entry.value, str) and entry.value in alias.elsewhere:
        what, fix = alias.elsewhere[entry.value]
        raise NovaError(what, where=entry.place, fix=fix)
    raise NovaError(f"{entry.value!r:.60} is not supported", where=entry.place, fix=alias.otherwise)


def _accept(entry: Entry, row: Fixed) -> dict[str, Any]:
    if isinstance(entry.value, bool) == isinstance(row.values[0], bool) and entry.value in row.values:
        return {}
    given = str(entry.value).lower() if isinstance(entry.value, bool) else f"{entry.value!r:.60}"
    fix = f"remove this key, or set {entry.path}={str(row.values[0]).lower()}"
    raise NovaError(f"{given} is not supported: {row.reason}", where=entry.place, fix=fix)


def _unknown(entry: Entry, tree: type[Config]) -> NovaError:
    name = entry.path
    around = next((path for path in keys(tree) if name.startswith(f"{path}.")), None)
    if around:
        return NovaError(f"{around} is a single value and has no keys", where=entry.place, fix=f"set {around}: value")
    within = nearest(name, [path for path in keys(tree) if path.endswith(f".{name}")])
    if within:
        return NovaError("unknown key", where=entry.place, fix=f"did you mean {within}?")
    if elsewhere := [kind for kind, other in TREES.items() if name in keys(other) or _has_alias(name, other)]:
        fix = f"only novarl {', '.join(elsewhere)} has it: remove it"
        return NovaError("unknown key", where=entry.place, fix=fix)
    near = nearest(name, [*keys(tree), *sections(tree)]) or nearest(name, [*single(tree, Alias), *single(tree, Fixed)])
    fix = f"did you mean {near}?" if near else "docs/names.md lists all keys"
    return NovaError("unknown key", where=entry.place, fix=fix)


def _has_alias(name: str, tree: type[Config]) -> bool:
    return any(isinstance(row, Alias) for row in meanings(tree).get(name, ()))
