"""Watch a TRL run with NovaRL: one line, `trainer.add_callback(NovaCallback("runs/trl"))`.

    python examples/trl_integration.py [RUN_DIR]

A real GRPO run of TRL on a CPU, in about a minute: a tiny model, made here, learns to write many a's. Nothing is
downloaded.
"""

import sys
import tempfile

import novarl
from novarl.integrations.trl import NovaCallback

MISSING = """\
This example needs TRL, which NovaRL itself does not use. Install it and run the example again:
    pip install "trl==1.16.*"
"""


def tiny_tokenizer():
    """One token for each letter, and an end."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(32, 127)]
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<end>", "<unknown>", *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", padding_side="left"
    )


def save_tiny_model(tokenizer, folder):
    """Two layers with random weights."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def many_a(completions, **columns):
    """The share of a's."""
    return [completion.count("a") / 16 for completion in completions]


def main():
    run = sys.argv[1] if len(sys.argv) > 1 else "runs/trl"
    try:
        from datasets import Dataset
        from trl import GRPOConfig, GRPOTrainer
    except ImportError:
        sys.exit(MISSING)
    folder = tempfile.mkdtemp()
    tokenizer = tiny_tokenizer()
    save_tiny_model(tokenizer, f"{folder}/model")
    settings = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=20,
        logging_steps=1,  # one line of metrics for each update
        per_device_train_batch_size=8,
        num_generations=8,
        max_completion_length=16,
        learning_rate=1e-2,
        beta=0.04,
    )
    trainer = GRPOTrainer(
        model=f"{folder}/model",
        reward_funcs=many_a,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["write: ", "say: ", "more: ", "again: "] * 10}),
        processing_class=tokenizer,
    )
    callback = NovaCallback(run)
    trainer.add_callback(callback)
    trainer.train()

    written = novarl.load_run(callback.path)
    rewards = written.metrics.series("reward_mean")
    print(f"wrote {written.path}: {len(written.metrics)} lines of metrics, answers of {len(written.steps())} steps")
    print(f"reward: {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    best = max(written.rollouts(written.steps()[-1]), key=lambda row: row.reward)
    print(f"best last answer: {best.text!r}, reward {best.reward:.2f}, advantage {best.advantage:.2f}")


if __name__ == "__main__":
    main()
