"""Pairs and labelled answers: formats, refusals, cuts, and the batches they become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from novarl.core.errors import NovaError
from novarl.data.formats import Columns
from novarl.data.pair_formats import detect_pairs, labelled_example, pair_example
from novarl.data.pairs import Pair, Reading, load_labelled, load_pairs, pack_labelled, pack_pairs
from novarl.data.sources import RawRow
from novarl.models.byte_tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
Q = {"role": "user", "content": "q"}
GOOD, BAD = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
SEPARATE = Columns(chosen="chosen", rejected="rejected", prompt="prompt")
TOGETHER = Columns(chosen="chosen", rejected="rejected")


def rows(*values: Any) -> list[RawRow]:
    return [RawRow(index, f"f.jsonl:{index + 1}", value) for index, value in enumerate(values)]


def found(value: Any, *, labels: bool = False, **keys: str) -> Columns:
    return detect_pairs(rows(value), keys=Columns(**keys), where="f.jsonl", labels=labels)


def reading(max_length: int = 1000, **options: Any) -> Reading:
    return Reading(TOKENIZER, max_length, **{"max_bad_rows": 0.9, **options})


def pair(value: Any, max_length: int = 1000, **options: Any) -> Pair:
    """The only pair of a row."""
    ((only,), _) = load_pairs(rows(value), reading(max_length, **options))
    return only


def refusal(value: Any, max_length: int = 1000, **options: Any) -> str:
    """Why the only row of a file is refused: its field and the reason."""
    with pytest.raises(NovaError) as caught:
        load_pairs(rows(value), reading(max_length, **options))
    return str(caught.value).split("f.jsonl:1 ")[-1].split(" (fix")[0]


def said(sequence: Any, *, trained: bool) -> str:
    tokens = [token for token, chosen in zip(sequence.tokens, sequence.mask, strict=True) if chosen or not trained]
    return TOKENIZER.decode(tokens)


def test_formats_are_detected() -> None:
    sides = {"chosen": "a", "rejected": "b"}
    assert found(sides) == TOGETHER
    assert found(sides | {"prompt": "q"}) == SEPARATE
    assert found(sides | {"messages": [Q]}) == Columns(chosen="chosen", rejected="rejected", messages="messages")
    assert found(sides | {"margin": 1.0}).margin == "margin"
    assert found({"w": "a", "l": "b", "p": "q"}, chosen="w", rejected="l", prompt="p") == Columns(
        chosen="w", rejected="l", prompt="p"
    )
    unpaired = {"prompt": "q", "completion": "a", "label": True}
    assert found(unpaired, labels=True) == Columns(prompt="prompt", completion="completion", label="label")
    assert found({"text": "a", "label": "positive"}, labels=True) == Columns(text="text", label="label")
    assert found({"t": "a", "l": 1}, labels=True, text="t", label="l") == Columns(text="t", label="l")
    assert found(sides, labels=True) == TOGETHER


@pytest.mark.parametrize(
    ("value", "keys", "words"),
    [
        ({"a": 1}, {}, "no known format matches the columns: a"),
        ({"chosen": "a", "prompt": "q"}, {}, "set chosen_key and rejected_key"),
        ({"chosen": "a", "rejected": "b", "prompt": "q", "messages": [Q]}, {}, "more than one format"),
        ({"text": "a", "label": 1}, {}, "rows with a label need loss kto, bce"),
        ({"chosen": "a", "rejected": "b"}, {"chosen": "chose"}, "chosen_key=chose.*did you mean 'chosen'"),
        ({"a": "q", "b": [Q]}, {"prompt": "a", "messages": "b"}, "cannot both be set"),
    ],
)
def test_formats_that_cannot_be_told_are_refused(value: Any, keys: dict[str, str], words: str) -> None:
    with pytest.raises(NovaError, match=words):
        found(value, **keys)


def test_two_labelled_formats_are_one_too_many() -> None:
    with pytest.raises(NovaError, match="more than one format"):
        found({"text": "t", "prompt": "q", "completion": "a", "label": 1}, labels=True)
    with pytest.raises(NovaError, match="more than one format"):
        found({"text": "t", "chosen": "a", "rejected": "b", "label": 1}, labels=True)


SPELT: dict[str, Any] = {
    "prompt and sides as text": {"prompt": "q", "chosen": "good", "rejected": "bad"},
    "prompt and sides as messages": {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]},
    "prompt repeated in the sides": {"prompt": "q", "chosen": [Q, GOOD], "rejected": [Q, BAD]},
    "messages and sides as text": {"messages": [Q], "chosen": "good", "rejected": "bad"},
    "sides as whole conversations": {"chosen": [Q, GOOD], "rejected": [Q, BAD]},
    "transcripts": {
        "chosen": "\n\nHuman: q\n\nAssistant: good",
        "rejected": "\n\nHuman: q \n\nAssistant: bad\n",
    },
}


@pytest.mark.parametrize("value", SPELT.values(), ids=SPELT)
def test_every_way_to_write_a_pair_gives_the_same_tokens(value: Any) -> None:
    made = pair(value)
    assert said(made.chosen, trained=False) == "<|user|>q<eos><|assistant|>good<eos>"
    assert (said(made.chosen, trained=True), said(made.rejected, trained=True)) == ("good<eos>", "bad<eos>")
    assert (made.id, made.margin) == ("f.jsonl:1", None)


def test_texts_that_begin_alike_part_at_a_whole_word() -> None:
    example = pair_example(rows({"chosen": "The sky is blue.", "rejected": "The sky is black."})[0], TOGETHER)
    assert [turn["content"] for turn in example.chosen] == ["The sky is", " blue."]
    assert [turn["content"] for turn in example.rejected] == ["The sky is", " black."]
    example = pair_example(rows({"chosen": "a b", "rejected": "a b c"})[0], TOGETHER)
    assert [turn["content"] for turn in (*example.chosen, *example.rejected)] == ["a", " b", "a", " b c"]
    plain = pair({"chosen": "The sky is blue.", "rejected": "The sky is black."}, apply_chat_template=False)
    assert said(plain.chosen, trained=False) == "The sky is blue.<eos>"


def test_conversations_part_at_the_first_answer_that_differs() -> None:
    again = {"role": "user", "content": "sure?"}
    value = {"chosen": [Q, GOOD, again, GOOD], "rejected": [Q, GOOD, again, BAD]}
    made = pair(value)
    assert said(made.chosen, trained=True) == "good<eos>"
    value = {"chosen": [Q, GOOD, again, GOOD], "rejected": [Q, BAD, again, BAD]}
    assert said(pair(value).rejected, trained=True) == "bad<eos>bad<eos>"
    transcript = "\n\nHuman: q\n\nAssistant: good\n\nHuman: sure?\n\nAssistant: "
    assert said(pair({"chosen": transcript + "yes", "rejected": transcript + "no"}).rejected, trained=True) == "no<eos>"


REFUSED: list[tuple[Any, str]] = [
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "rejected: is equal to chosen"),
    ({"prompt": "q", "chosen": "a", "rejected": "a "}, "rejected: is equal to chosen"),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "rejected: is empty"),
    ({"prompt": "q", "chosen": "", "rejected": "b"}, "chosen: is empty"),
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, "prompt: is empty"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "prompt: must be a string or a list of messages, not a number"),
    ({"prompt": [GOOD], "chosen": "a", "rejected": "b"}, "chosen: the conversation begins with an assistant turn"),
    ({"prompt": [Q, GOOD], "chosen": "a", "rejected": "b"}, "chosen: the prompt ends with an assistant turn"),
    ({"prompt": "q", "chosen": [Q], "rejected": [BAD]}, "chosen: has no assistant turn after the prompt"),
    ({"prompt": "q", "chosen": [GOOD, Q], "rejected": [BAD]}, "chosen: does not end with an assistant turn"),
    ({"chosen": "same", "rejected": "same"}, "rejected: is equal to chosen"),
    ({"chosen": [Q, GOOD], "rejected": [Q, GOOD]}, "rejected: is equal to chosen"),
    ({"chosen": "one text", "rejected": "another"}, "rejected: shares no prompt with the chosen side"),
    ({"chosen": [Q, GOOD], "rejected": [BAD]}, "rejected: shares no prompt with the chosen side"),
    ({"chosen": [Q, GOOD], "rejected": "bad"}, "rejected: is a string, but chosen is a list"),
    ({"chosen": [Q, GOOD], "rejected": [Q, Q]}, "rejected: has no assistant turn after the prompt"),
    (
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: r\n\nAssistant: bad"},
        "rejected: has a different prompt than chosen",
    ),
    (
        {"chosen": "\n\nHuman: q\n\nAssistant: ", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        "chosen: the answer is empty",
    ),
    (
        {"chosen": "\n\nHuman: \n\nAssistant: good", "rejected": "\n\nHuman: \n\nAssistant: bad"},
        "chosen: turn 1 is empty",
    ),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": -1}, "margin: must be a number of at least 0, not -1"),
    ({"prompt": "q", "chosen": "a", "rejected": "b", "margin": "x"}, "margin: must be a number of at least 0, not 'x'"),
    (
        {"prompt": "q", "chosen": "a", "rejected": "b", "margin": True},
        "margin: must be a number of at least 0, not True",
    ),
]


@pytest.mark.parametrize(("value", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_rows_that_say_nothing_are_refused(value: Any, words: str) -> None:
    assert refusal(value).startswith(words)


@pytest.mark.parametrize(
    ("label", "value"),
    [(True, 1.0), (False, 0.0), (1, 1.0), (0.0, 0.0), ("Positive", 1.0), (" neg ", 0.0), ("1", 1.0), ("false", 0.0)],
)
def test_labels(label: Any, value: float) -> None:
    columns = Columns(text="text", label="label")
    assert labelled_example(rows({"text": "fine", "label": label})[0], columns).label == value


@pytest.mark.parametrize("label", [2, 0.5, "maybe", float("nan"), [1], {"a": 1}, ""])
def test_what_is_no_label_is_refused(label: Any) -> None:
    with pytest.raises(NovaError, match="label: must be true or false, 1 or 0, positive or negative, not"):
        load_labelled(rows({"text": "fine", "label": label}), reading())


def test_labelled_answers_texts_and_pairs() -> None:
    answers, _ = load_labelled(rows({"prompt": "q", "completion": "good", "label": True}), reading())
    (((only,),)) = answers
    assert said(only.sequence, trained=True) == "good<eos>" and only.label == 1.0 and not only.plain
    (((text,),), _) = load_labelled(rows({"text": "fine film", "label": "positive"}), reading())
    assert text.sequence.mask == (False, *[True] * 9) and said(text.sequence, trained=False) == "fine film<eos>"
    assert text.plain
    ((split,), counts) = load_labelled(rows({"prompt": "q", "chosen": "good", "rejected": "bad"}), reading())
    assert [(row.id, row.label, said(row.sequence, trained=True)) for row in split] == [
        ("f.jsonl:1:chosen", 1.0, "good<eos>"),
        ("f.jsonl:1:rejected", 0.0, "bad<eos>"),
    ]
    assert (counts.read, counts.used) == (1, 1)


def test_what_is_too_long_is_cut_where_it_matters_least() -> None:
    value = {"prompt": "x" * 40 + "y" * 10, "chosen": "good", "rejected": "bad"}  # 53 tokens before the answer, then 5
    made = pair(value, max_length=30)
    assert said(made.chosen, trained=True) == "good<eos>" and len(made.chosen.tokens) == 30
    assert said(made.rejected, trained=True) == "bad<eos>"
    assert said(made.chosen, trained=False)[:22] == said(made.rejected, trained=False)[:22], "one prompt for both"
    long = {"prompt": "q", "chosen": "a" * 50, "rejected": "b" * 50}
    made = pair(long, max_length=20)
    assert said(made.chosen, trained=False) == "<|user|>q<eos><|assistant|>" + "a" * 16
    both = {"prompt": "p" * 50, "chosen": "a" * 50, "rejected": "b" * 9}
    made = pair(both, max_length=20)
    assert said(made.chosen, trained=False) == "p" * 8 + "<eos><|assistant|>" + "a" * 10
    assert said(made.rejected, trained=True) == "b" * 9 + "<eos>"
    _, counts = load_pairs(rows(both, {"prompt": "q", "chosen": "a", "rejected": "b"}), reading(20))
    assert (counts.read, counts.used, counts.truncated, counts.refused) == (2, 2, 1, 0)


def test_sides_that_are_equal_once_cut_are_refused_and_so_is_what_may_not_be_cut() -> None:
    value = {"prompt": "q", "chosen": "a" * 50 + "1", "rejected": "a" * 50 + "2"}
    assert refusal(value, 20) == "rejected: is equal to chosen within max_length=20"
    words = "rejected: the row has 56 tokens, more than max_length=20"
    assert refusal(value, 20, on_long="refuse") == words
    assert "no tokens of the answer within max_length=1" in refusal(value, 1)
    with pytest.raises(NovaError, match="text: no tokens to train on within max_length=1"):
        load_labelled(rows({"text": "fine", "label": 1}), reading(1))


def test_a_text_that_is_cut_still_ends_with_its_end_token() -> None:
    (((text,),), counts) = load_labelled(rows({"text": "a" * 50, "label": 1}), reading(10))
    assert said(text.sequence, trained=False) == "a" * 9 + "<eos>" and counts.truncated == 1


def test_a_text_may_keep_its_end_instead_and_an_answer_is_cut_as_ever() -> None:
    (((text,),), counts) = load_labelled(rows({"text": "a" * 50 + "end", "label": 1}), reading(10, on_long="keep_end"))
    assert said(text.sequence, trained=False) == "a" * 6 + "end<eos>" and counts.truncated == 1
    assert text.sequence.mask == (False,) + (True,) * 9
    asked = {"prompt": "q", "completion": "a" * 50 + "end", "label": 1}
    cut = [load_labelled(rows(asked), reading(20, on_long=how))[0][0][0].sequence for how in ("keep_end", "truncate")]
    assert cut[0] == cut[1]


def test_a_batch_of_pairs() -> None:
    pairs = [
        pair({"prompt": "q", "chosen": "good", "rejected": "bad", "margin": 2}),
        pair({"prompt": "q", "chosen": "a", "rejected": "b"}),
    ]
    batch = pack_pairs(pairs)
    assert batch.traj.tolist() == [0, 0, 1, 1] and batch.group.tolist() == [0, 1]
    assert batch.reward.tolist() == [2.0, 0.0] and batch.rewards.shape == (2, 0)
    assert batch.truncated.shape == batch.baseline.shape == (2,)
    sides = [side for one in pairs for side in (one.chosen, one.rejected)]
    assert batch.tokens.tolist() == [token for side in sides for token in side.tokens]
    assert batch.mask.tolist() == [chosen for side in sides for chosen in side.mask]


def test_a_batch_of_labelled_answers() -> None:
    answers, _ = load_labelled(rows({"text": "a", "label": 1}, {"text": "bb", "label": 0}), reading())
    batch = pack_labelled([row for of_row in answers for row in of_row])
    assert batch.reward.tolist() == [1.0, 0.0] and batch.traj.tolist() == batch.group.tolist() == [0, 1]
    assert batch.cu_seqlens.tolist() == [0, 2, 5]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@given(prompt=TEXT, chosen=TEXT, rejected=TEXT, max_length=st.integers(2, 40))
def test_both_sides_of_any_pair_share_their_prompt_and_fit(
    prompt: str, chosen: str, rejected: str, max_length: int
) -> None:
    try:
        made = pair({"prompt": prompt, "chosen": chosen, "rejected": rejected}, max_length)
    except NovaError:
        return
    begins = [side.mask.index(True) for side in (made.chosen, made.rejected)]
    assert made.chosen.tokens[: begins[0]] == made.rejected.tokens[: begins[1]]
    for side in (made.chosen, made.rejected):
        assert 2 <= len(side.tokens) <= max_length and not side.mask[0] and all(side.mask[begins[0] :])
