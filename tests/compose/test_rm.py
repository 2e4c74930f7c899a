"""`novarl rm`: every loss learns, the model's folder loads again and is a reward, resume is bit-exact."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from novarl.compose.preference_plan import decided, resolve_rm
from novarl.config.load import load
from novarl.config.parts import rewards_by_name
from novarl.config.preference import RMConfig
from novarl.core.errors import NovaError
from novarl.core.types import Prompt, Rollout, Scored
from novarl.data.formats import Columns
from novarl.data.pairs import Reading, load_pairs, pack_pairs
from novarl.distributed.ranks import Ranks
from novarl.loops.evaluate import evaluate
from novarl.loops.evaluate_rewards import evaluate_rewards
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.forward import token_logprobs
from novarl.models.load import load as load_policy
from novarl.observe.reliability import draw_reliability
from novarl.observe.summary import next_steps
from novarl.rewards.model import ModelReward, load_model_reward
from novarl.rewards.registry import find_reward
from novarl.rewards.verdict import Failure
from tests.compose.harness import (
    ON_TASK,
    QUIET,
    RL,
    SFT,
    finished,
    metrics,
    novarl,
    questions,
    summary,
    weights,
    write_rows,
)
from tests.compose.test_dpo import preferences, unpaired_rows
from tests.compose.test_shipped import assert_explained

RM = ("rm", "batch_size=4", "steps=2", "eval.n=4", *QUIET)
LOSSES = {
    "bt": "pairs.jsonl",
    "bce": "labelled.jsonl",
    "implicit_ce": "labelled.jsonl",
    "implicit_dpo": "pairs.jsonl",
    "implicit_kto": "labelled.jsonl",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with pairs, labelled answers and labelled texts in it."""
    write_rows(tmp_path / "pairs.jsonl", preferences())
    write_rows(tmp_path / "labelled.jsonl", unpaired_rows())
    texts = [{"text": f"{i} {'good' if i % 2 else 'dull'}", "label": ("neg", "pos")[i % 2]} for i in range(40)]
    write_rows(tmp_path / "texts.jsonl", texts)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rollout(prompt: str, answer: str) -> Rollout:
    asked = ({"role": "user", "content": prompt},)
    messages = (*asked, {"role": "assistant", "content": answer})
    return Rollout(Prompt("p", (1,), asked), 0, 0, (), messages, answer)


@pytest.mark.parametrize(("loss", "data"), LOSSES.items(), ids=LOSSES)
def test_every_loss_learns(loss: str, data: str, folder: Path) -> None:
    words = ("optim.lr=1e-3", "batch_size=16", "steps=14", "save_every=null")
    finished(*RM, f"loss={loss}", f"data={data}", *words, "run_dir=run")
    records = metrics(folder / "run")
    gap = [record["reward_chosen_mean"] - record["reward_rejected_mean"] for record in records]
    assert gap[-1] > gap[0] + 1e-3, gap
    assert_explained(folder / "run")
    found = summary(folder / "run")
    assert (found["status"], found["command"], found["loss"]) == ("done", "rm", loss)
    assert found["after"]["interval"][0] <= found["after"]["score"] <= found["after"]["interval"][1]
    assert {"auroc", "ece", "brier"} <= found["after"].keys()
    assert (folder / "run" / "figures" / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert (folder / "run" / "reference").exists() == loss.startswith("implicit")


@pytest.mark.parametrize("loss", ["bce", "implicit_ce", "implicit_kto"])
def test_labelled_losses_take_pairs_as_two_answers(loss: str, folder: Path) -> None:
    finished(*RM, f"loss={loss}", "data=pairs.jsonl", "run_dir=run")
    assert summary(folder / "run")["rows"]["read"] == 40


def test_a_language_model_of_the_texts_may_come_first(folder: Path) -> None:
    finished("sft", "data=texts.jsonl", "batch_size=4", "steps=2", *QUIET, "run_dir=lm")
    model = folder / "lm/checkpoints/latest/model"
    finished(*RM, "loss=bce", "data=texts.jsonl", f"model={model}", "max_length=6", "on_long=keep_end", "run_dir=run")
    assert summary(folder / "run")["rows"]["truncated"] == 40
    shown = (folder / "run/samples.md").read_text()
    assert "good<eos>" in shown and "dull<eos>" in shown, "the ends are read"


@pytest.mark.parametrize("loss", ["bt", "implicit_dpo"])
def test_paired_losses_refuse_labels_and_say_which_take_them(loss: str) -> None:
    ended = novarl(*RM, f"loss={loss}", "data=labelled.jsonl")
    assert ended.code == 2 and "rows with a label need loss kto, bce" in ended.err


@pytest.mark.parametrize("loss", LOSSES)
def test_a_resumed_run_ends_with_the_same_bits(loss: str, folder: Path) -> None:
    words = (*RM, f"loss={loss}", f"data={LOSSES[loss]}", "optim.lr=1e-3", "save_every=1")
    finished(*words, "run_dir=whole", "steps=3")
    finished(*words, "run_dir=run", "steps=1")
    finished(*words, "run_dir=run", "steps=3", "resume=auto")
    one, two = weights(folder / "whole"), weights(folder / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)
    if resolve_rm(load(RMConfig, overrides=["data=x", f"loss={loss}"])).head:
        heads = [
            load_file(folder / run / "checkpoints/latest/model/value_head.safetensors") for run in ("whole", "run")
        ]
        assert heads[0]["weight"].abs().sum() > 0
        assert all(torch.equal(heads[0][name], heads[1][name]) for name in heads[0])


KEYS = [
    ("bt", "centring=5"),
    ("bt", "margin=3"),
    ("bt", "label_smoothing=0.3"),
    ("bce", "label_smoothing=0.3"),
    ("implicit_dpo", "beta=2"),
    ("implicit_dpo", "margin=3"),
    ("implicit_ce", "beta=2"),
    ("implicit_kto", "beta=2"),
]


@pytest.mark.parametrize(("loss", "words"), KEYS, ids=[" ".join(case) for case in KEYS])
def test_every_key_of_a_loss_changes_what_is_learnt(loss: str, words: str, folder: Path) -> None:
    base = (*RM, f"loss={loss}", f"data={LOSSES[loss]}", "optim.eps=1e-3", "optim.lr=1e-2", "steps=3")
    finished(*base, "run_dir=plain")
    finished(*base, words, "run_dir=changed")
    one, two = weights(folder / "plain"), weights(folder / "changed")
    assert max(float((one[name] - two[name]).abs().max()) for name in one) > 1e-7


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ("bt", "beta=1"),
        ("bce", "margin=1"),
        ("bce", "centring=1"),
        ("implicit_dpo", "centring=1"),
        ("implicit_kto", "label_smoothing=0.1"),
        ("implicit_kto", "margin=1"),
    ],
)
def test_a_key_that_the_loss_does_not_read_is_refused(loss: str, key: str) -> None:
    with pytest.raises(NovaError, match=f"loss={loss} does not use it"):
        load(RMConfig, overrides=["data=x", f"loss={loss}", key])


def test_what_a_loss_decides() -> None:
    assert decided(load(RMConfig, overrides=["data=x"])) == {"optim.lr": 3e-4}
    assert decided(load(RMConfig, overrides=["data=x", "loss=implicit_ce"])) == {"optim.lr": 3e-4, "beta": 0.05}


def test_margins_of_rows_come_before_the_configurations(folder: Path) -> None:
    """A margin column of the value that the key would give changes nothing; another one does."""
    for name, margin in (("same", 3.0), ("other", 0.5)):
        write_rows(folder / f"{name}.jsonl", [row | {"margin": margin} for row in preferences()])
    base = (*RM, "loss=bt", "optim.eps=1e-3", "optim.lr=1e-2", "steps=3")
    for name, words in {
        "key": ("data=pairs.jsonl", "margin=3"),
        "same": ("data=same.jsonl", "margin=1"),
        "other": ("data=other.jsonl", "margin=3"),
    }.items():
        finished(*base, *words, f"run_dir={name}")
    key, same, other = (weights(folder / name) for name in ("key", "same", "other"))
    assert all(torch.equal(key[name], same[name]) for name in key)
    assert not all(torch.equal(key[name], other[name]) for name in key)


def test_a_trained_model_is_a_reward_that_says_what_training_measured(folder: Path) -> None:
    words = ("optim.lr=1e-3", "batch_size=16", "steps=14", "loss=bt")
    finished(*RM, "data=pairs.jsonl", *words, "run_dir=run")
    asked = [rollout(row["prompt"], row[side]) for row in preferences() for side in ("chosen", "rejected")]
    for place in ("run", "run/checkpoints/latest", "run/checkpoints/latest/model"):
        reward = find_reward(f"model:{place}")
        found = asyncio.run(reward(asked))
        assert all(isinstance(value, float) for value in found)
    pairs, _ = load_pairs("pairs.jsonl", Reading(ByteTokenizer(), 4096))
    model = load_model_reward("run", device="cpu")
    from novarl.models.heads import last_positions, token_values

    batch = pack_pairs(pairs)
    with torch.no_grad():
        expected = token_values(model.model, batch, positions=last_positions(batch))
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)
    right = sum(a > b for a, b in zip(found[0::2], found[1::2], strict=True))
    assert right >= 24, "it learnt something"


@pytest.mark.parametrize("loss", [loss for loss in LOSSES if loss.startswith("implicit")])
@pytest.mark.parametrize("lora", [(), ("lora.rank=2",)], ids=["full", "lora"])
def test_an_implicit_model_is_a_reward_too(folder: Path, loss: str, lora: tuple[str, ...]) -> None:
    """beta (log model - log reference) of the answer, the reference being the model that training started from."""
    words = (f"data={LOSSES[loss]}", f"loss={loss}", "beta=0.2", "optim.lr=1e-2", "batch_size=16", "steps=4", *lora)
    finished(*RM, *words, "run_dir=run")
    asked = [rollout(row["prompt"], row[side]) for row in preferences()[:6] for side in ("chosen", "rejected")]
    found = [
        asyncio.run(find_reward(f"model:{place}")(asked))
        for place in ("run", "run/checkpoints/latest", "run/checkpoints/latest/model")
    ]
    assert found[0] == found[1] == found[2] and len(set(found[0])) == 12
    pairs, _ = load_pairs("pairs.jsonl", Reading(ByteTokenizer(), 4096))
    batch = pack_pairs(pairs[:6])
    trained = load_policy("run/checkpoints/latest/model").model
    with torch.no_grad():
        now, before = (token_logprobs(model, batch)[0] for model in (trained, load_policy("tiny").model))
    ratio = torch.where(batch.mask, 0.2 * (now - before), 0.0)
    bounds = zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
    torch.testing.assert_close(
        torch.tensor(found[0]), torch.stack([ratio[a:b].sum() for a, b in bounds]), atol=1e-4, rtol=0
    )


def test_reinforcement_learning_on_an_implicit_reward(folder: Path) -> None:
    finished(*RM, "data=labelled.jsonl", "loss=implicit_ce", "optim.lr=1e-2", "run_dir=rm")
    shutil.move("rm", "elsewhere")  # a run may be moved
    data = write_rows(folder / "rows.jsonl", questions())
    finished("rl", *RL, f"data={data}", "reward=model:elsewhere", "run_dir=run")
    assert metrics(folder / "run")[0]["rewards/model_mean"] != 0.0


def test_a_model_of_plain_texts_reads_the_answer_alone(folder: Path) -> None:
    finished(*RM, "data=texts.jsonl", "loss=bce", "steps=3", "run_dir=run")
    settings = json.loads((folder / "run/checkpoints/latest/model/reward_model.json").read_text())
    assert settings["plain"] is True and settings["loss"] == "bce"
    reward = load_model_reward("run", device="cpu")
    one, two, three = asyncio.run(reward([rollout("a", "0 dull"), rollout("b", "0 dull"), rollout("b", "1 good")]))
    assert one == pytest.approx(two, abs=1e-6) and one != pytest.approx(three, abs=1e-6)
    assert isinstance(asyncio.run(reward([rollout("a", "")]))[0], float), "an empty answer is an answer too"


def test_reinforcement_learning_on_a_trained_reward(folder: Path) -> None:
    finished(*RM, "data=pairs.jsonl", "run_dir=rm")
    data = write_rows(folder / "rows.jsonl", questions())
    finished("rl", *RL, f"data={data}", "reward=model:rm", "run_dir=run")
    assert "rewards/model_mean" in metrics(folder / "run")[0]


def test_a_rollout_that_the_model_cannot_read_fails_alone(folder: Path) -> None:
    finished(*RM, "data=pairs.jsonl", "run_dir=run")
    reward = load_model_reward("run", device="cpu")
    odd = rollout("a", "b")
    odd = type(odd)(odd.prompt, 0, 0, (), ({"role": "critic", "content": "x"}, *odd.messages), "b")
    silent = type(odd)(odd.prompt, 0, 0, (), ({"role": "user", "content": "x"},), "")
    good, bad, none = asyncio.run(reward([rollout("a", "b"), odd, silent]))
    assert isinstance(good, float) and isinstance(bad, Failure) and "cannot read the conversation" in bad.reason
    assert isinstance(none, Failure) and asyncio.run(reward([])) == []


def test_what_is_longer_than_the_context_loses_its_beginning(folder: Path) -> None:
    finished(*RM, "data=pairs.jsonl", "optim.lr=1e-2", "run_dir=run")
    reward = load_model_reward("run", device="cpu")
    asked = [rollout("x" * 5000, "b"), rollout("x" * 6000, "b"), rollout("x" * 5000, "c")]
    long, longer, other = asyncio.run(reward(asked))
    assert long == pytest.approx(longer, abs=1e-5) and long != pytest.approx(other, abs=1e-5)


def test_where_memory_runs_out_the_model_judges_by_halves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished(*RM, "data=pairs.jsonl", "optim.lr=1e-2", "run_dir=run")
    reward, score, sizes = load_model_reward("run", device="cpu"), ModelReward._score, []
    asked = [rollout("a", f"{number}") for number in range(5)]
    whole = asyncio.run(reward(asked))

    def tight(self: ModelReward, sequences: Any) -> list[float]:
        sizes.append(len(sequences))
        if len(sequences) > 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return score(self, sequences)

    monkeypatch.setattr(ModelReward, "_score", tight)
    assert asyncio.run(reward(asked)) == pytest.approx(whole, abs=1e-6) and len(set(whole)) == 5
    assert sizes == [5, 2, 3, 1, 2]


def test_a_reward_model_is_no_policy(folder: Path) -> None:
    finished(*RM, "data=pairs.jsonl", "run_dir=judge")
    model = "model=judge/checkpoints/latest/model"
    for words in (("rl", *ON_TASK), ("sft", *SFT, "task=sort"), ("eval", "task=sort"), ("sample", "prompt=x")):
        ended = novarl(*words, model)
        assert ended.code == 2 and f"{model}: the directory contains a reward model" in ended.err, ended.err
    finished(*RM, "data=pairs.jsonl", model, "run_dir=again")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("model:nowhere", "no such folder"),
        ("model:", "no such folder"),
        ("model:policy", "the folder is not a reward model"),
        ("model:lone", "its reference model is missing: "),
    ],
)
def test_what_is_no_reward_model_is_refused(source: str, words: str, folder: Path) -> None:
    finished("sft", *SFT, "task=sort", "steps=1", "run_dir=policy")
    finished(*RM, "data=pairs.jsonl", "loss=implicit_dpo", "steps=1", "run_dir=implicit")
    shutil.copytree("implicit/checkpoints/latest/model", "lone")
    ended = novarl("rl", *RL, "task=sort", f"reward={source}")
    assert ended.code == 2 and words in ended.err and ended.err.count("\n") == 1


def test_damaged_settings_are_refused(folder: Path) -> None:
    finished(*RM, "data=pairs.jsonl", "steps=1", "run_dir=run")
    file = folder / "run/checkpoints/latest/model/reward_model.json"
    for text in ("{", "[1]"):
        file.write_text(text)
        with pytest.raises(NovaError, match="not a JSON object"):
            load_model_reward("run", device="cpu")


def test_its_name_among_rewards_holds_no_path() -> None:
    assert rewards_by_name("model:runs/rm.v2") == {"model": {"source": "model:runs/rm.v2"}}


def evaluated(chosen: list[float], rejected: list[float]) -> Any:
    """The evaluation of pairs with these rewards."""
    rows = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(len(chosen))]
    from novarl.data.sources import RawRow

    raw = [RawRow(i, f"f:{i}", row) for i, row in enumerate(rows)]
    pairs, _ = load_pairs(raw, Reading(ByteTokenizer(), 100, keys=Columns()))
    given = iter([value for pair in zip(chosen, rejected, strict=True) for value in pair])
    return evaluate_rewards(pairs, lambda batch: torch.tensor([next(given) for _ in batch.traj]), batch_size=3)


def test_what_is_measured_of_pairs_by_hand() -> None:
    found = evaluated([1.0, 0.0, 2.0, 5.0], [0.0, 0.0, 3.0, 1.0])
    assert found.score == 2.5 / 4 and found.n == 4
    # Of 16 comparisons of a chosen with a rejected reward: 1 beats two and ties one, 0 ties two, 2 beats three, 5 all.
    assert found.auroc == pytest.approx((2.5 + 1.0 + 3.0 + 4.0) / 16)
    sigma = torch.sigmoid(torch.tensor([1.0, 0.0, -1.0, 4.0], dtype=torch.float64))
    assert found.brier == pytest.approx(float((1 - sigma).square().mean()))
    assert sum(rows for rows, _, _ in found.bins) == 8
    assert evaluated([0.0, 0.0], [0.0, 0.0]).score == 0.5


def test_what_is_measured_does_not_depend_on_the_level_of_rewards_of_a_pair() -> None:
    low, high = evaluated([1.0, 0.0, 2.0], [0.0, 1.0, 0.5]), evaluated([6.0, 5.0, 7.0], [5.0, 6.0, 5.5])
    assert (low.score, low.ece, low.brier) == pytest.approx((high.score, high.ece, high.brier))


def test_the_diagram_is_drawn_also_of_empty_bins(tmp_path: Path) -> None:
    draw_reliability(tmp_path / "a.png", [(0, 0.0, 0.0)] * 9 + [(3, 0.95, 1.0)], "one bin")
    draw_reliability(tmp_path / "b.png", [], "nothing")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_what_to_try_next() -> None:
    found = {"command": "rm", "loss": "bt", "paths": {"run_dir": "runs/rm", "model": "m"}, "task": "sort"}
    assert [command for command, _ in next_steps(found)] == ["novarl rl task=sort reward=model:runs/rm"]
    assert next_steps(found | {"loss": "implicit_ce"}) == []


@pytest.mark.parametrize("form", ["prompts apart", "in both"])
def test_the_rows_are_named_where_they_have_prompts_of_their_own(form: str, folder: Path) -> None:
    pairs = [
        {
            side: [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            for side in SIDES
        }
        for row in preferences()
    ]
    data = write_rows(folder / "mine.jsonl", preferences() if form == "prompts apart" else pairs)
    finished(*RM, "loss=bt", f"data={data}", "steps=1", "run_dir=rm")
    words = f"data={data if form == 'prompts apart' else 'rows.jsonl'} model=tiny reward=model:rm"
    assert f"novarl rl {words}" in [command for command, _ in next_steps(summary(folder / "rm"))]
    more = ("prompts_per_rollout=2", "responses_per_prompt=2", "rollout.max_tokens=4", "steps=1", "run_dir=rl")
    ended = novarl("rl", f"data={data}", "model=tiny", "reward=model:rm", *more)
    assert (ended.code == 0) == (form == "prompts apart"), ended.err


SIDES = ("chosen", "rejected")


@pytest.mark.parametrize("frozen", [True, False])
def test_prime_starts_from_an_implicit_model(folder: Path, frozen: bool) -> None:
    """From the first step on its tokens have rewards; frozen it learns nothing; resuming is exact."""
    words = ("data=labelled.jsonl", "loss=implicit_ce", "optim.lr=1e-2", "beta=0.2", "steps=3")
    finished(*RM, *words, "run_dir=rm")
    data = write_rows(folder / "rows.jsonl", questions())
    rl = ("rl", *RL, f"data={data}", "reward=length", "algo=prime", "prime.model=rm", *(("prime.lr=0",) * frozen))
    finished(*rl, "steps=2", "run_dir=whole")
    first = metrics(folder / "whole")[0]
    assert first["process_reward_std"] > 0.0 and ("process_loss" in first) is not frozen
    finished(*rl, "steps=1", "run_dir=parts")
    finished(*rl, "steps=2", "run_dir=parts", "resume=auto")
    whole, parts = weights(folder / "whole"), weights(folder / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("prime.model=nowhere",), "prime.model=nowhere: no such folder"),
        (("prime.model=head",), "prime.model=head: this reward model has a scalar head"),
        (("prime.lr=0",), "prime.lr: a fixed copy of the reference gives"),
    ],
)
def test_what_prime_cannot_start_from_is_refused(folder: Path, words: tuple[str, ...], said: str) -> None:
    finished(*RM, "data=pairs.jsonl", "steps=1", "run_dir=head")
    ended = novarl("rl", *ON_TASK, "algo=prime", *words)
    assert ended.code == 2 and said in ended.err and ended.err.count("\n") == 1


def test_best_of_n_by_an_implicit_model(folder: Path) -> None:
    """Of a row's samples the one counts that the reward model likes most; its own reward has weight 0 here."""
    finished(*RM, "data=labelled.jsonl", "loss=implicit_ce", "optim.lr=1e-2", "run_dir=rm")
    data = write_rows(folder / "rows.jsonl", questions())
    words = ("eval", "model=tiny", f"data={data}", "eval.n=3", "eval.k=4", "rollout.max_tokens=6")
    both = "reward={rm: {source: 'model:rm', weight: 0}, lexical: lexical}"
    finished(*words, both, "best_of=rm", "run_dir=best")
    found = json.loads((folder / "best/summary.json").read_text())["after"]
    low, high = found["best_of_interval"]
    assert low <= found["best_of"] <= high
    finished(*words, "reward=model:rm", "eval.temperature=1", "best_of=model", "run_dir=same")
    finished(*words, "reward=model:rm", "run_dir=none")
    same = json.loads((folder / "same/summary.json").read_text())["after"]
    assert "best_of" not in json.loads((folder / "none/summary.json").read_text())["after"]
    assert same["best_of"] != same["score"]
    for wrong, said in (
        ("best_of=other", "there is no reward named 'other'"),
        ("eval.k=0", "needs at least 2 samples per row"),
    ):
        ended = novarl(*words, both, "best_of=rm", wrong, "run_dir=no")
        assert ended.code == 2 and said in ended.err


def test_best_of_picks_what_the_named_reward_likes_most() -> None:
    liked = iter([0.0, 1.0, 3.0, 2.0, 5.0, 4.0, 4.5, 0.0])  # greedy twice, then three samples of each of two rows
    prompts = [Prompt("a", (1,), ()), Prompt("b", (1,), ())]

    def sample(asked: Any, samples: int, temperature: float) -> list[Rollout]:
        return [Rollout(prompt, group, i, (), (), "") for group, prompt in asked for i in range(samples)]

    def score(rollouts: list[Rollout]) -> list[Scored]:
        return [Scored(one, {"rm": (like := next(liked)), "x": -like}, 10 * like + one.index) for one in rollouts]

    found = evaluate(prompts, sample, score, ranks=Ranks(), k=3, best_of="rm")
    assert found.best is not None and found.best[0] == ((10 * 5.0 + 2) + (10 * 4.5 + 1)) / 2
