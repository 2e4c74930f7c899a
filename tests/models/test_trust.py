"""Nothing that lies in a model's folder runs, unless the user has named that folder."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from novarl import cli
from novarl.core.errors import NovaError
from novarl.data.columnar import from_hub
from novarl.models.byte_tokenizer import ByteTokenizer
from novarl.models.load import load
from novarl.models.trust import Trust
from tests.compose.harness import questions, write_rows

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

with open({mark!r}, "a") as file:
    file.write("ran ")

class OddConfig(LlamaConfig):
    model_type = "odd"

class OddModel(LlamaForCausalLM):
    config_class = OddConfig

class OddTokenizer(PreTrainedTokenizerFast):
    pass
"""


def make(folder: Path, **changes: Any) -> str:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        eos_token_id=257,
        bos_token_id=None,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    edit(folder / "config.json", **changes)
    return str(folder)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), encoding="utf-8")


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Where the code of a model says that it ran."""
    return tmp_path / "ran"


@pytest.fixture
def odd(tmp_path: Path, mark: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with code of its own, on a terminal where somebody might answer "y"."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "input", lambda *_: pytest.fail("it asks"))
    folder = tmp_path / "odd"
    auto = {"AutoConfig": "code.OddConfig", "AutoModelForCausalLM": "code.OddModel"}
    name = make(folder, model_type="odd", auto_map={place: f"odd_{what}" for place, what in auto.items()})
    (folder / "odd_code.py").write_text(CODE.format(mark=str(mark)))
    return name


def test_a_models_code_does_not_run_and_nobody_is_asked(odd: str, mark: Path) -> None:
    with pytest.raises(NovaError) as raised:
        load(odd)
    assert str(raised.value) == (
        f"{odd}: the model contains custom Python code, which is not run by default "
        f"(review the code, and if you trust it, set trust_remote_code={odd})"
    )
    assert not mark.exists()


def test_a_tokenizers_code_does_not_run(odd: str, mark: Path) -> None:
    path = Path(odd, "config.json")
    edit(path, model_type="llama")
    path.write_text(
        json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "auto_map"})
    )
    edit(
        Path(odd, "tokenizer_config.json"),
        tokenizer_class="OddTokenizer",
        auto_map={"AutoTokenizer": ["odd_code.OddTokenizer", None]},
    )
    with pytest.raises(NovaError, match=r"which is not run by default \(review the code"):
        load(odd)
    assert not mark.exists()


def test_another_folder_that_is_trusted_trusts_not_this_one(odd: str, mark: Path, tmp_path: Path) -> None:
    with pytest.raises(NovaError, match="which is not run"):
        load(odd, trust=Trust(code=(str(tmp_path),), pickles=(odd,)))
    assert not mark.exists()


def test_a_run_on_a_trusted_model_trains_resumes_and_says_what_to_trust(
    odd: str, mark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", questions(9))
    words = ["sft", "model=odd", f"data={rows}", "prompt_key=prompt", "completion_key=answer", "run_dir=run"]
    words += ["batch_size=2", "log.console=false", "log.tensorboard=false"]
    assert cli.main([*words, "steps=1"]) == 2
    assert "set trust_remote_code=odd)" in capsys.readouterr().err and not mark.exists()
    trusted = [*words, f"trust_remote_code={odd}"]  # by another path to the same folder
    assert cli.main([*trusted, "steps=1"]) == 0 and mark.exists()
    assert cli.main([*trusted, "steps=2", "resume=auto"]) == 0, "its own checkpoint is a copy of what is trusted"
    saved = tmp_path / "run" / "checkpoints" / "latest" / "model"
    assert json.loads((saved / "config.json").read_text())["model_type"] == "odd"


def test_trust_names_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain", "rl", "task=sort", "trust_remote_code=true"]) == 2
    assert "trust_remote_code: must list the models, by directory or hub id" in capsys.readouterr().err


@pytest.fixture
def pickled(tmp_path: Path) -> str:
    name = make(tmp_path / "pickled")
    whole = Path(name, "model.safetensors")
    torch.save(load_file(whole), Path(name, "pytorch_model.bin"))
    whole.unlink()
    return name


def test_pickled_weights_are_read_only_where_the_user_says_so(pickled: str) -> None:
    with pytest.raises(NovaError) as raised:
        load(pickled)
    assert str(raised.value) == (
        f"{pickled}: the weights are in a pickle file (pytorch_model.bin), which can contain code "
        f"(save the model as safetensors, or if you trust its author, set trust_pickle={pickled})"
    )
    ours = load(pickled, trust=Trust(pickles=(pickled,)))
    wanted = torch.load(Path(pickled, "pytorch_model.bin"), weights_only=True)
    assert torch.equal(dict(ours.model.named_parameters())["lm_head.weight"], wanted["lm_head.weight"])


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_torchs_advice_to_run_a_pickle_reaches_nobody(pickled: str, mark: Path) -> None:
    for content in ({"lm_head.weight": Evil(mark)}, Evil(mark)):
        torch.save(content, Path(pickled, "pytorch_model.bin"))
        with pytest.raises(NovaError) as raised:
            load(pickled, trust=Trust(pickles=(pickled,)))
        said = str(raised.value)
        assert "a pickle file contains something other than tensors or is damaged, so it is not read" in said
        assert "weights_only" not in said and not mark.exists()


def test_both_files_are_there_and_the_safe_one_is_read(pickled: str, mark: Path, tmp_path: Path) -> None:
    safe = make(tmp_path / "safe")
    torch.save(Evil(mark), Path(safe, "pytorch_model.bin"))
    assert load(safe).name == safe and not mark.exists()


def test_a_script_in_a_folder_of_data_does_not_run(tmp_path: Path, mark: Path) -> None:
    (folder := tmp_path / "rows").mkdir()
    (folder / "rows.py").write_text(f"open({str(mark)!r}, 'w')\nimport datasets\n")
    with pytest.raises(NovaError, match="could not be loaded as a dataset"):
        list(from_hub(str(folder), None, "train"))
    assert not mark.exists()
