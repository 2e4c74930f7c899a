"""TRL's side of `make bench`, as a user would write it: a trainer, a reward function, callbacks. For `.venv-peers`.

    python run_trl.py settings.json       {"what": "grpo" | "sft" | "dpo", "model", "data", "out", "trainer": {...}}

It imports nothing of ours. Each step appends a line to `<out>/steps.jsonl`; what ran is in `<out>/about.json`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

COMMON: dict[str, Any] = {
    "bf16": False,
    "gradient_checkpointing": False,
    "lr_scheduler_type": "constant",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class Diary(TrainerCallback):
    """Writes a line when training begins and after every step; `parts` and `lengths` are filled in by others."""

    def __init__(self, out: Path) -> None:
        self.file = (out / "steps.jsonl").open("a")
        self.parts: dict[str, float] = {}
        self.lengths: list[int] = []
        self.paused = 0.0

    def write(self, **line: Any) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.write(step=0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_initialized():
            self.parts["device_mb"] = torch.cuda.max_memory_allocated() / 2**20
        self.write(step=state.global_step, paused=self.paused, lengths=self.lengths, **self.parts)
        self.parts, self.lengths = {}, []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "num_tokens" in logs:
            self.write(num_tokens=logs["num_tokens"])


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    out = Path(settings["out"])
    diary = Diary(out)
    trainer = {"grpo": grpo, "sft": sft, "dpo": dpo}[settings["what"]](settings, diary)
    trainer.add_callback(diary)
    about = {name: importlib.metadata.version(name) for name in ("trl", "transformers", "torch")}
    (out / "about.json").write_text(json.dumps({"version": about, "settings": settings["trainer"]}))
    trainer.train()


def model_of(settings: dict[str, Any]) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=torch.float32, attn_implementation=settings.get("attention", "sdpa")
    )


def rows_of(settings: dict[str, Any]) -> Any:
    return load_dataset("json", data_files=settings["data"], split="train", cache_dir=settings["out"])


def grpo(settings: dict[str, Any], diary: Diary) -> Any:
    import reward as rewards
    from trl import GRPOConfig, GRPOTrainer

    judge = getattr(rewards, settings["reward"])

    def reward(*, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        began = time.perf_counter()
        scores: list[float] = judge(**columns)
        diary.parts["reward"] = diary.parts.get("reward", 0.0) + time.perf_counter() - began
        diary.lengths += [len(ids) for ids in completion_ids]
        return scores

    class Timed(GRPOTrainer):
        """The same trainer with a clock around its sampling."""

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            diary.parts["generation"] = diary.parts.get("generation", 0.0) + time.perf_counter() - began
            return found

    trainer = Timed(
        model=model_of(settings),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=reward,
        args=GRPOConfig(output_dir=settings["out"], **(COMMON | settings["trainer"])),
        train_dataset=rows_of(settings),
    )
    if "held_out" in settings:
        trainer.add_callback(UntilGood(settings, trainer, diary))
    return trainer


class UntilGood(TrainerCallback):
    """Measures greedy accuracy on held-out rows every few steps, off the clock; ends training where it is enough."""

    def __init__(self, settings: dict[str, Any], trainer: Any, diary: Diary) -> None:
        self.settings, self.trainer, self.diary = settings, trainer, diary
        self.rows = [json.loads(line) for line in Path(settings["held_out"]).read_text().splitlines()]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % self.settings["every"]:
            return
        began = time.perf_counter()
        score = self.score()
        self.diary.paused += time.perf_counter() - began
        self.diary.write(score=score, at=state.global_step)
        control.should_training_stop |= score >= self.settings["enough"]

    @torch.no_grad()
    def score(self) -> float:
        tokenizer, model = self.trainer.processing_class, self.trainer.model
        tokenizer.padding_side = "left"
        prompts = [row["prompt"] for row in self.rows]
        inputs = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        inputs.pop("token_type_ids", None)
        inputs = inputs.to(model.device)
        model.eval()
        longest = self.settings["trainer"]["max_completion_length"]
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=longest, pad_token_id=tokenizer.pad_token_id)
        model.train()
        texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        right = [text.strip() == row["answer"] for text, row in zip(texts, self.rows, strict=True)]
        return sum(right) / len(right)


def sft(settings: dict[str, Any], diary: Diary) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=model_of(settings),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        args=SFTConfig(output_dir=settings["out"], **(COMMON | settings["trainer"])),
        train_dataset=rows_of(settings),
    )


def dpo(settings: dict[str, Any], diary: Diary) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=model_of(settings),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        args=DPOConfig(output_dir=settings["out"], **(COMMON | settings["trainer"])),
        train_dataset=rows_of(settings),
    )


if __name__ == "__main__":
    main()
