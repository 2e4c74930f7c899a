"""The classes of the RLHF Systems Kit: its document's code with another import, and a step that really learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from novarl.compat import PolicyModel, PPOTrainer, ToyRewardModel, set_seed
from novarl.core.errors import NovaError

WORDS = "the film was good great bad sad long short and we saw it again today"
PROMPTS = ["the film was", "we saw the film", "today it was", "it was short and"]


@pytest.fixture(autouse=True)
def tiny_gpt2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GPT-2 as tiny as the document's, untrained, in a directory that has its name."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    known = {word: place for place, word in enumerate(["<|endoftext|>", *WORDS.split()])}
    words = Words(WordLevel(known, unk_token="<|endoftext|>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<|endoftext|>", unk_token="<|endoftext|>")
    folder = tmp_path / "sshleifer" / "tiny-gpt2"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(known)}
    GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    return folder


def the_prompts(policy: PolicyModel) -> Tensor:
    return torch.tensor([policy.tokenizer.encode("the film was"), policy.tokenizer.encode("we saw it")])


def test_the_documents_code_runs_with_another_import_and_the_reward_rises() -> None:
    set_seed(42)
    # Create policy model
    policy = PolicyModel(model_name="sshleifer/tiny-gpt2", device="cpu")
    prompt_ids = the_prompts(policy)

    # Sample text
    sequences, logprobs = policy.sample(prompt_ids, max_new_tokens=20)
    assert sequences.shape[0] == 2 and logprobs.shape == (2, sequences.shape[1] - 3)
    input_ids = sequences

    # Get log probabilities
    logprobs = policy.get_logprobs(input_ids)
    assert logprobs.shape == (2, input_ids.shape[1] - 1) and bool((logprobs < 0).all())

    # Create reward model
    reward_model = ToyRewardModel(device="cpu")

    # Compute rewards
    rewards = reward_model.compute_reward(sequences, reward_type="sentiment")
    assert rewards.shape == (2,)

    reference, prompts = PolicyModel(model_name="sshleifer/tiny-gpt2", device="cpu"), PROMPTS
    # Create trainer
    trainer = PPOTrainer(
        policy_model=policy,
        reference_model=reference,
        reward_model=reward_model,
        device="cpu"
    )  # fmt: skip

    # Training step
    metrics = trainer.train_step(prompts, max_new_tokens=20)
    promised = "total_loss policy_loss kl_loss reward_mean reward_std kl_mean kl_std clip_fraction"
    assert set(promised.split()) <= set(metrics)
    assert metrics["total_loss"] == pytest.approx(metrics["policy_loss"] + metrics["kl_loss"], abs=1e-6)
    rewards_seen = [metrics["reward_mean"]]
    rewards_seen += [trainer.train_step(prompts, max_new_tokens=20)["reward_mean"] for _ in range(11)]
    assert sum(rewards_seen[-3:]) / 3 > sum(rewards_seen[:3]) / 3 + 0.5, rewards_seen

    # Save checkpoint
    trainer.save_checkpoint("checkpoint.pt")

    # Load checkpoint
    trainer.load_checkpoint("checkpoint.pt")


def test_sampled_log_probabilities_are_those_of_the_policy() -> None:
    policy = PolicyModel()
    prompts = the_prompts(policy)
    sequences, logprobs = policy.sample(prompts, max_new_tokens=6)
    again = policy.get_logprobs(sequences)[:, prompts.shape[1] - 1 :]
    torch.testing.assert_close(again[logprobs != 0], logprobs[logprobs != 0], atol=1e-5, rtol=1e-5)


def test_padded_prompts_are_answered_as_they_are_alone() -> None:
    policy = PolicyModel()
    long, short = policy.tokenizer.encode("the film was good"), policy.tokenizer.encode("it was")
    padded = torch.tensor([long, [0, 0, *short]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    both, _ = policy.sample(padded, 4, temperature=0.0, attention_mask=mask)
    alone, _ = policy.sample(torch.tensor([short]), 4, temperature=0.0)
    assert both[1, : alone.shape[1]].tolist() == alone[0].tolist()
    torch.testing.assert_close(policy.get_logprobs(padded, mask)[1, :1], policy.get_logprobs(torch.tensor([short]))[0])


def test_log_probabilities_have_a_gradient_and_kl_grows_with_the_distance() -> None:
    policy, reference = PolicyModel(), PolicyModel()
    prompts = the_prompts(policy)
    assert policy.get_kl_divergence(prompts, reference).tolist() == [0.0, 0.0]
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    (-policy.get_logprobs(prompts).mean()).backward()
    optimizer.step()
    assert bool((policy.get_kl_divergence(prompts, reference) > 1e-4).all())
    policy.save_checkpoint("policy.pt")
    reference.load_checkpoint("policy.pt")
    assert policy.get_kl_divergence(prompts, reference).tolist() == [0.0, 0.0]


def test_a_seed_repeats_a_run_and_another_does_not() -> None:
    def run(seed: int) -> list[float]:
        set_seed(seed)
        policy = PolicyModel()
        sequences, _ = policy.sample(the_prompts(policy), max_new_tokens=8)
        trainer = PPOTrainer(policy, PolicyModel(), ToyRewardModel())
        found = trainer.train_step(PROMPTS[:2], max_new_tokens=8)
        return [*sequences.flatten().tolist(), *found.values(), float(np.random.rand())]

    first = run(42)
    assert run(42) == first
    assert run(43) != first


def test_two_calls_sample_different_texts() -> None:
    set_seed(1)
    policy = PolicyModel()
    prompts = the_prompts(policy)
    assert policy.sample(prompts)[0].tolist() != policy.sample(prompts)[0].tolist()


def test_a_trainer_from_a_checkpoint_goes_on_bit_by_bit() -> None:
    def made() -> PPOTrainer:
        return PPOTrainer(PolicyModel(), PolicyModel(), ToyRewardModel(), seed=3)

    one = made()
    one.train_step(PROMPTS, max_new_tokens=8)
    one.save_checkpoint("checkpoint.pt")
    other = made()
    other.load_checkpoint("checkpoint.pt")
    assert one.train_step(PROMPTS, max_new_tokens=8) == other.train_step(PROMPTS, max_new_tokens=8)
    pairs = zip(one.policy_model.parameters(), other.policy_model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_built_in_model_trains_too_and_the_reference_stays_as_it_is() -> None:
    policy, reference = PolicyModel("tiny"), PolicyModel("tiny")
    before = [parameter.clone() for parameter in reference.parameters()]
    trainer = PPOTrainer(policy, reference, ToyRewardModel("tiny"), reward_type="length", responses_per_prompt=4)
    trainer.train_step(["Review the film."], max_new_tokens=30)
    trainer.train_step(["Review the film."], max_new_tokens=30)
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))


def test_rewards_are_the_documents() -> None:
    rewards = ToyRewardModel()
    texts = ["a wonderful great film", "horrible", "plain words"]
    assert rewards.compute_reward(texts).tolist() == [3.0, -1.5, 0.0]
    assert rewards.compute_reward(["we say thank you"], "preference").tolist() == [3.0]
    assert rewards.compute_reward(["one two three four five"], reward_type="length").tolist() == [1.0]
    with pytest.raises(NovaError, match="did you mean sentiment"):
        rewards.compute_reward(texts, reward_type="sentimental")


def test_a_policy_is_no_reference_of_itself() -> None:
    policy = PolicyModel()
    with pytest.raises(NovaError, match="its own reference"):
        PPOTrainer(policy, policy, ToyRewardModel())


def test_the_example_of_the_page_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt").write_bytes(b"weights")
    page = (Path(__file__).parents[2] / "docs/compat.md").read_text(encoding="utf-8")
    for block in page.split("```python\n")[1:]:
        exec(compile(block.partition("```")[0], "docs/compat.md", "exec"), {})
    assert len(capsys.readouterr().out.split()) == 3
