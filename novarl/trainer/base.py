"""What every trainer does: an iterator over updates, with evaluation, generation and saving beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from novarl.core.errors import NovaError
from novarl.core.processor import settle_products, settle_threads
from novarl.core.types import Update

if TYPE_CHECKING:
    from novarl.loops.evaluate import Evaluation
    from novarl.observe.run import LoadedRun, Rollouts
    from novarl.run.lifecycle import Run, Training


DATA = ("data", "prompts", "train_dataset")
"""Names of the training rows."""


class Trainer:
    """A training run in Python. Keyword arguments are the keys of the configuration (docs/names.md), with every alias
    of the command line: nested, `kl={"coef": 0.02}`, or under an alias, `learning_rate=1e-4`.

        trainer = novarl.RL(model="tiny", prompts=rows, reward=my_function, steps=40, run_dir="runs/x")
        for record in trainer:      # one record per update, of a warm-up too: record["phase"] tells
            print(record["step"], record.get("reward_mean"))
        trainer.save("out")

    `run()` goes to the end in one call. A run that is left early can be continued by iterating again; `close()`, or the
    end of a `with` block, saves it, so that `resume="auto"` with the same run_dir goes on later.
    """

    kind: ClassVar[str]
    names: ClassVar[Mapping[str, str]] = {}
    """Arguments that have another name than their key."""

    def __init__(self, *positional: Any, **settings: Any) -> None:
        if positional:
            what = f"all arguments have names, got {positional[0]!r:.60}"
            raise NovaError(what, where=f"novarl.{type(self).__name__}", fix="for example model='tiny'")
        settle_products()
        settle_threads(settings.get("threads"))
        from novarl import compose

        where = f"novarl.{type(self).__name__}"
        given = self._renamed(settings, where)
        if given.get("resume") is True:
            given["resume"] = "auto"
        self._name_task(given)
        self._config = compose.configuration(self.kind, given, where)
        self._run: Run = compose.train(self._config)
        self._closed = False

    def _renamed(self, settings: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Settings by the names that the configuration knows. NovaError if two arguments mean the same key."""
        given: dict[str, Any] = {}
        chosen: dict[str, str] = {}
        for name, value in settings.items():
            key = self.names.get(name, name)
            meaning = "data" if key in DATA else key
            if (other := chosen.setdefault(meaning, name)) != name:
                what = f"{other} and {name} are two names of the same argument"
                raise NovaError(what, where=where, fix="give one of them")
            given[key] = value
        return given

    def _name_task(self, settings: dict[str, Any]) -> None:
        """Make `data`, or `prompts`, a task where it is the name of one."""
        from novarl.tasks.registry import TASKS

        name = "prompts" if self.kind == "rl" and "data" not in settings else "data"
        data = settings.get(name)
        if isinstance(data, str):
            settings["task" if data in TASKS and "task" not in settings else "data"] = settings.pop(name)
        elif isinstance(data, bool | int | float):
            fix = "give a task, a file, a datasets.Dataset, or a list of dictionaries or strings"
            raise NovaError(f"{data!r} holds no rows", where=name, fix=fix)

    def __iter__(self) -> Iterator[Update]:
        return self

    def __next__(self) -> Update:
        self._check_open()
        try:
            return next(self._run)
        except StopIteration:
            self._check_end()
            raise

    def run(self) -> dict[str, Any]:
        """Train to the end; returns what summary.json holds. KeyboardInterrupt after Ctrl-C, once all is saved."""
        self._check_open()
        self._run.finish()
        return self._check_end()

    def _check_end(self) -> dict[str, Any]:
        from novarl.run.report import check_end

        assert self._run.summary is not None
        return check_end(self._run.summary)

    @property
    def summary(self) -> dict[str, Any] | None:
        """What summary.json holds; None while the run goes on."""
        return self._run.summary

    @property
    def run_dir(self) -> Path:
        """The directory that the run writes."""
        self._run.prepare()
        return self._run.rundir.path

    @property
    def model(self) -> Any:
        """The model that is trained, as it is now: the object that was given, where one was."""
        model = self._training().policy.model
        return model if self._config.object("model") is None else self._config.object("model")

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self._training().policy.tokenizer

    def evaluate(self) -> Evaluation:
        """Measure the model as it is now on the held-out rows. NovaError where there are none."""
        training = self._training()
        judge = training.evaluate or self._judge_training_rows(training)
        if judge is None:
            what, fix = "there are no held-out rows", "give eval={'data': ...}, or ten rows or more"
            raise NovaError(what, where="evaluate", fix=fix)
        return judge()

    def _judge_training_rows(self, training: Any) -> Callable[[], Evaluation] | None:
        """What measures the model where no rows are held out."""
        return None

    def generate(
        self, prompts: str | Sequence[str | Sequence[Mapping[str, Any]]], *, n: int = 1, **sampling: Any
    ) -> list[str] | list[list[str]]:
        """Answers of the model as it is now to prompts (strings, or lists of messages): one each, or `n` each.

        `sampling`: temperature (0, greedy, unless given), top_k, top_p, min_p, max_tokens, stop, seed.
        """
        from novarl.run.answers import answers

        training = self._training()
        training.publish()
        asked = [prompts] if isinstance(prompts, str) else list(prompts)
        found = answers(
            training.policy,
            training.engine,
            self._run.loop,
            asked,
            n=n,
            apply_chat_template=self._config.apply_chat_template,
            sampling={"max_tokens": training.longest, "seed": self._config.seed, **sampling},
        )
        return [one[0] for one in found] if n == 1 else found

    def save(self, folder: str | Path) -> Path:
        """Write the model as it is now, for `model=` here and for transformers; returns the folder."""
        folder = Path(folder).expanduser()
        if folder.exists() and not folder.is_dir():
            raise NovaError("this is a file", where=f"save {folder}", fix="give a directory")
        self._training().write_model(folder)
        return folder

    def rollouts(self, step: int | None = None) -> Rollouts:
        """The rollouts of a step from the run's log (`log.rollouts_every`); None: of the last one."""
        return self.log.rollouts(step)

    @property
    def log(self) -> LoadedRun:
        """The run directory, as `novarl.load_run` reads it."""
        from novarl.observe.run import load_run

        return load_run(self.run_dir)

    def close(self) -> None:
        """Save a run that was left early, and end its processes. It can be resumed, but not iterated further."""
        self._closed = True
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        training, config, summary = self._run.training, self._config, self._run.summary or {}
        told: dict[str, Any] = {"algo": config.algo} if hasattr(config, "algo") else {}
        told |= {"model": config.model, "step": training.loop_state.step if training else summary.get("steps", 0)}
        told["run_dir"] = str(self._run.rundir.path) if training else config.run_dir
        return f"novarl.{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def _check_open(self) -> None:
        if self._closed:
            what = "this trainer is closed"
            raise NovaError(what, where=f"novarl.{type(self).__name__}", fix="make another, with resume='auto'")

    def _training(self) -> Training:
        self._check_open()
        training, _ = self._run.prepare()
        if training is None:
            what = "this run was finished before, so its model is not loaded"
            raise NovaError(what, where=f"run_dir={self._config.run_dir}", fix="give it more steps, or load its model")
        return training
