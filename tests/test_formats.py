"""The true forms of the hub's data (`formats.py`): cleaning, the end of a query, labels, labels of
another tokenizer, pairs as people have them, and what a reward model reads. Expected values are
written by hand or are GPT-2's own ids."""

import json
from dataclasses import replace

import datasets
import formats
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from tiny import make_task
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

import train_reward
import utils
from data import clean
from data.tasks import SYNTHETIC
from machinery import data, labels, rewards
from machinery.chat import render
from machinery.cli import InputError
from machinery.labels import Labels, load_labels
from utils import TokenIds


def ids_of(pad: int, truncate: int | None = None) -> TokenIds:
    return TokenIds(pad, truncate, [], [])


def lists(arrays) -> list:
    """Labels' arrays of tokens as lists."""
    return [lists(x) if isinstance(x, list) else x.tolist() for x in arrays]


@pytest.fixture(scope="session")
def gpt2():
    return formats.gpt2_tokenizer()


@pytest.fixture
def hers():
    """The synthetic task's tokenizer: another vocabulary than GPT-2's."""
    return AutoTokenizer.from_pretrained(SYNTHETIC / "model")


@pytest.fixture
def chat(hers):
    hers.chat_template = formats.CHATML
    return hers


# ----------------------------------------------------------------------------------------- cleaning


def test_gpt2s_ids_are_those_that_the_tasks_name(gpt2):
    """13 and 198 are [O]'s truncate tokens; 764 is what the hub's books and articles have for 13."""
    assert len(gpt2) == 50257 and gpt2.eos_token_id == 50256
    found = [gpt2.encode(text) for text in (".", " .", "\n", "\n\nThe")]
    assert found == [[13], [764], [198], [198, 198, 464]]
    assert gpt2.decode([23073, 11, 339, 561]) == "usually, he would"
    books = [gpt2.encode(row["text"]) for row in formats.BOOKS]
    assert all(13 not in tokens and 764 in tokens for tokens in books)


CLEAN = [
    "A baker of 61 has won £1.5million. She said: 'I cried.' Happy: The baker at home . "
    "More at CNN.com",
    "LONDON, England (Reuters) -- A painter gained access to a reported £20 million on Monday. "
    "He won't cast a spell on it.",
    "The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
    "Rain fell on Sunday. It did not stop.",
]
STAMP = "07:03 EST, 2 March 2013 ."
EDGES = {
    f"By . Anna Smith . PUBLISHED: . {STAMP} It rained .": "It rained .",
    f"By . Dr A. Smith, in Rome . UPDATED: . {STAMP} It rained .": "It rained .",
    f"PUBLISHED: . {STAMP} | . UPDATED: . 08:07 BST, 2 May 2013 . It rained .": "It rained .",
    "By . Anna Smith . and Ben Jones . It rained . He left .": "It rained . He left .",
    "By . Anna Smith . It rained . PUBLISHED: . 07:03": "It rained . PUBLISHED: . 07:03",
    "(CNN) -- Rain. (CNN) -- Sun.": "Sun.",  # after the last one, as [O]
    f"Rain (CNN) came. {'x' * 100} (CNN) went.": f"came. {'x' * 100} (CNN) went.",
    f"By . Anna . PUBLISHED: . {STAMP} ": f"By . Anna . PUBLISHED: . {STAMP}",  # nothing else
    "“Rain,” he said: ‘it’s â€™ &amp; so’": "\"Rain,\" he said: 'it's ' & so'",
}
UNCHANGED = [
    f"By now it rained . He said so . PUBLISHED: . {STAMP}",  # no byline
    f"It rained . UPDATED: . {STAMP} He left .",  # not at the start: [O] would empty it
    "It rained. (CNN) --",
    "",
    *CLEAN,
]


def test_articles_lose_what_openai_removed_and_nothing_else():
    assert [clean.clean_article(row["article"]) for row in formats.CNNDM] == CLEAN
    assert {text: clean.clean_article(text) for text in EDGES} == EDGES
    assert [clean.clean_article(text) for text in UNCHANGED] == UNCHANGED


def test_posts_are_cleaned_as_openai_cleaned_them():
    post = formats.TLDR_17[0]["content"]
    assert clean.clean_post(post) == "I painted the house.\n\nIt's red now."
    assert clean.clean_post("a\nb\n\nc\n\n\nd\n\n\n\n\ne") == "a\nb\n\nc\n\nd\n\ne"


def test_tldrs_prompts_can_be_given_the_form_of_its_preferences():
    (row,), (pair,) = formats.TLDR, formats.TLDR_PREFERENCE
    assert row["prompt"] != pair["prompt"]
    assert clean.clean_tldr(row["prompt"]) == pair["prompt"] == clean.clean_tldr(pair["prompt"])
    assert clean.clean_tldr("no post\n\nat all") == "no post\n\nat all"


# ----------------------------------------------------------------------------------- end of a query


def query(text, tokenizer, length, end="."):
    ids = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = data.ends_word(text, ids["offset_mapping"], end)
    cut = data.cut_query(ids["input_ids"], length, None, ends)
    return None if cut is None else tokenizer.decode(cut, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", ["gpt2", "hers"])
def test_P3_a_query_ends_with_its_last_sentence_with_and_without_a_space_before_the_stop(
    name, request
):
    tokenizer = request.getfixturevalue(name)
    cuts = {
        "It won £1.5million. More at CNN.com": "It won £1.5million.",  # 13, and 13 within words
        "It rained. Happy: the baker . More at": "It rained. Happy: the baker .",  # 764
        "It rained . He": "It rained .",
        "It rained.": "It rained.",
        "It rained . ": "It rained .",
        "1.5 at CNN.com": None,
        "": None,
    }
    assert {text: query(text, tokenizer, 500) for text in cuts} == cuts
    articles = [clean.clean_article(row["article"]) for row in formats.CNNDM]
    expected = [CLEAN[0].removesuffix(" More at CNN.com"), *CLEAN[1:]]
    assert [query(article, tokenizer, 500) for article in articles] == expected


def test_P3_the_last_sentence_inside_the_length_counts(gpt2):
    text = "It was hot. He left . She"
    assert len(gpt2.encode(text)) == 8
    cuts = [query(text, gpt2, n) for n in (3, 4, 6, 7, 8)]
    assert cuts == [None, "It was hot.", "It was hot.", *["It was hot. He left ."] * 2]
    assert query("One.\n\nTwo", gpt2, 9, "\n") == "One.\n\n"
    assert query("One.\nTwo\n", gpt2, 3, "\n") == "One.\n"


# -------------------------------------------------------------------------- what a reward model reads


def test_29_a_tokenizer_reads_anothers_ids_if_it_has_them_all(gpt2, hers):
    more = formats.gpt2_tokenizer()
    more.add_special_tokens({"pad_token": "[PAD]"})  # as many fine-tuned GPT-2s have it
    same = rewards.same_tokens
    assert same(gpt2, formats.gpt2_tokenizer()) and same(more, gpt2)
    assert same(gpt2, more)  # no text has a [PAD]
    assert not same(hers, gpt2) and not same(gpt2, hers)


def test_29_ids_become_the_same_texts_without_padding_and_with_the_others_own_end(gpt2, chat):
    tokens = [[50257, 50257, 1026, 764, 50256], [50257, 314, 1101, 764, 198], [50257] * 5]
    expected = [chat.encode(text) for text in ("It .<|endoftext|>", " I'm .\n", "")]
    assert rewards.translate(torch.tensor(tokens), gpt2, 50257, chat) == expected
    chat.add_special_tokens({"eos_token": "<|im_end|>"})
    (ids,) = rewards.translate(torch.tensor([[1026, 50256]]), gpt2, 50257, chat)
    expected = [*chat.encode("It"), chat.convert_tokens_to_ids("<|im_end|>")]
    assert ids == expected
    chat.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", ids[-1])]
    )
    assert chat.encode("It")[0] == ids[-1]  # it begins every text with that, as Llama's does
    (ids,) = rewards.translate(torch.tensor([[1026, 50256]]), gpt2, 50257, chat)
    assert ids == expected


def test_29_ids_beyond_the_tokenizer_are_no_text(gpt2, hers):
    """A model's vocabulary may be larger than its tokenizer (Pythia's 50,304): they can be sampled."""
    tokens = torch.tensor([[1026, 50300, 764, 50304]])
    assert rewards.translate(tokens, gpt2, 50304, hers) == [hers.encode("It .")]
    assert rewards.translate(tokens[:, [0, 2, 2]], gpt2, 764, hers) == [hers.encode("It")]


def test_X13_a_reward_model_reads_and_scores_the_policys_texts(gpt2, hers):
    pairs = [("It", " .\n"), ("I'm", " .<|endoftext|>"), ("Ben saw the cat", " and left .")]
    q = utils.pad_left([gpt2.encode(q) for q, _ in pairs], 6, 50257)
    r = utils.pad_right([gpt2.encode(r) for _, r in pairs], 50257)
    texts = [hers.encode(q + r) for q, r in pairs]
    for longest in (64, 2):  # a text that is too long loses its beginning
        model = tiny.make_reward(pad_id=1000, positions=longest)
        read = rewards.reward_input(model, hers, gpt2, 50257)
        rows = [tokens[-longest:] for tokens in texts]
        assert read(q, r).tolist() == utils.pad_left(rows, max(map(len, rows)), 1000).tolist()
        alone = [model(torch.tensor([row])).item() for row in rows]
        assert model(read(q, r)).tolist() == pytest.approx(alone, abs=1e-5)


def test_X13_query_and_response_are_decoded_together(hers):
    """Llama 2's decoder strips the first space of a text: decoded alone, the response would lose it,
    and the reward model would read "happy.Maria"."""
    policy = formats.llama2_tokenizer(["Anna", "was", "happy", "Maria"])
    q, r = (policy.convert_tokens_to_ids(t.split()) for t in ("▁Anna ▁was ▁happy .", "▁Maria ▁was"))
    assert policy.decode(r) == "Maria was" and policy.decode(q + r) == "Anna was happy. Maria was"
    pad = len(policy)
    read = rewards.reward_input(tiny.make_reward(pad_id=1000), hers, policy, pad)
    tokens = read(torch.tensor([[pad, *q]]), torch.tensor([[*r, pad]]))
    assert tokens.tolist() == [hers.encode("Anna was happy. Maria was")]


def test_X13_models_of_one_tokenizer_may_be_padded_to_other_sizes(hers):
    rows = torch.tensor([[61, 61, 3, 60], [4, 58, 57, 61]])
    for pad, expected in (
        (58, [[58, 58, 3, 58], [4, 58, 57, 58]]),  # the ids 58 … 60 are no text to it
        (70, [[70, 70, 3, 60], [4, 58, 57, 70]]),
    ):
        read = rewards.reward_input(tiny.make_reward(pad_id=pad), hers, hers, 61)
        assert read(rows[:, :2], rows[:, 2:]).tolist() == expected


# ---------------------------------------------------------------------------------- OpenAI's labels


def label_task(path, rows, **changes):
    """A task whose labels are these rows in a file."""
    text = json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows))
    path.write_text(text)
    return make_task(label_dataset=str(path), **changes)


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_R4_openais_labels_load_from_an_array_and_from_lines_without_their_padding(
    suffix, tmp_path
):
    """In a batch queries are padded on the left and responses on the right, with the model's pad."""
    p = 50259
    responses = [[[1, p, p], [2, 3, p], [4, 5, 6], [9, 9, 9]], [[5, p, p], [6, p, p], [7], [0]]]
    rows = [
        {"query": query, **{f"sample{k}": ids for k, ids in enumerate(samples)}, "best": best}
        for query, samples, best in zip([[7, 8, p, p], [1, 2, 3]], responses, [2, 0], strict=True)
    ]
    found = load_labels(label_task(tmp_path / f"labels.{suffix}", rows), None, ids_of(100))
    assert lists(found.queries) == [[7, 8], [1, 2, 3]] and found.best.tolist() == [2, 0]
    assert lists(found.responses) == [[[1], [2, 3], [4, 5, 6], [9, 9, 9]], [[5], [6], [7], [0]]]
    tokens, best = train_reward.candidate_tokens(found, np.array([1, 0]), 100, "cpu")
    assert tokens.shape == (2, 4, 6) and best.tolist() == [0, 2]
    assert tokens[0, 3].tolist() == [1, 2, 3, 0, 100, 100]
    assert tokens[1, :2].tolist() == [[100, 7, 8, 1, 100, 100], [100, 7, 8, 2, 3, 100]]


def make_labels(queries: list[list[int]], responses: list[list[list[int]]]) -> Labels:
    arrays = [labels.to_arrays(samples) for samples in responses]
    return Labels(labels.to_arrays(queries), arrays, np.zeros(len(queries), dtype=int))


def test_a_single_long_answer_does_not_widen_the_batches_without_it():
    found = make_labels([[1], [2, 3], [4] * 50], [[[5], [6, 7]], [[8], [9]], [[1] * 500, [2]]])
    shapes = [[x.shape for x in found.batch(np.array(rows), 0)[:2]] for rows in ([0, 1], [0, 2])]
    assert shapes == [[(2, 2), (2, 2, 2)], [(2, 50), (2, 2, 500)]]
    assert (
        found.longest() == 550 and make_labels([[1] * 9, [2]], [[[3]], [[4] * 5]]).longest() == 10
    )


def test_heldout_labels_share_no_query_with_the_training_labels():
    queries = [[1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [5, 6], [2, 1], [1], [3, 4, 5]]
    found = make_labels(queries, [[[1], [2]]] * len(queries))
    assert found.held_out(2).tolist() == [3, 5, 6, 7, 8] and found.held_out(2).dtype.kind == "i"
    assert found.held_out(len(queries)).tolist() == []


@pytest.mark.parametrize(
    ("pad_id", "query", "expected"),
    [
        (50257, [50256, 50259], [50256]),  # GPT-2: the files' 50259 is padding
        (50259, [7, 50259], [7]),
        (50260, [7, 50259], [7, 50259]),  # in a vocabulary of more ids it is a token; the padding
        (60_000, [50259, 60_000], [50259]),  # of such a file is the model's own pad id
    ],
)
def test_R4_openais_padding_is_50259_or_the_models_pad_id(pad_id, query, expected, tmp_path):
    rows = [{"query": query, "sample0": query, "sample1": [1, 2], "best": 1}]
    found = load_labels(label_task(tmp_path / "l.json", rows), None, ids_of(pad_id))
    assert lists(found.queries) == [expected] and lists(found.responses) == [[expected, [1, 2]]]


@pytest.mark.parametrize("vocabulary", [50257, 50400])
def test_29_labels_of_gpt2_are_read_as_they_are_with_gpt2s_tokenizer(vocabulary, gpt2, tmp_path):
    """Also by a larger vocabulary of the same tokens, such as GPT-J's, where 50259 could be one."""
    gpt2.save_pretrained(tmp_path / "g")
    rows = formats.oai_labels(gpt2)
    task = label_task(tmp_path / "l.json", rows, label_tokenizer=str(tmp_path / "g"))
    found = load_labels(task, gpt2, ids_of(vocabulary))
    assert len(found) == 3 and found.best.tolist() == [2, 0, 3]
    assert found.queries[0].tolist() == gpt2.encode("He opened the door and looked out.")
    assert 50256 in found.responses[0][1] and len(found.responses[0][3]) == 2


def test_29_labels_of_gpt2_are_encoded_again_for_another_tokenizer(gpt2, hers, tmp_path):
    """They are longer with 1,000 tokens than with 50,257: nothing of them is cut."""
    gpt2.save_pretrained(tmp_path / "g")
    task = label_task(
        tmp_path / "l.json",
        formats.oai_labels(gpt2),
        query_length=8,
        label_tokenizer=str(tmp_path / "g"),
    )
    found = load_labels(task, hers, ids_of(1000))
    assert found.queries[1].tolist() == hers.encode("“Go,” she said.\n\nNobody went.")
    assert found.responses[2][1].tolist() == hers.encode(" There was nobody.<|endoftext|>The")
    assert found.best.tolist() == [2, 0, 3] and len(found.queries[1]) > 8


def test_29_a_label_tokenizer_out_of_reach_is_refused_with_the_next_command(
    hers, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    task = label_task(tmp_path / "l.json", tiny.label_rows(3, 8, 5), label_tokenizer="./nowhere")
    with pytest.raises(InputError, match="--label_tokenizer ./nowhere"):
        load_labels(task, hers, ids_of(1000))
    with pytest.raises(InputError) as caught:
        load_labels(replace(task, label_tokenizer="gpt2"), hers, ids_of(1000))
    files = "config.json tokenizer.json tokenizer_config.json"
    for words in (
        f"--label_dataset {task.label_dataset}",
        f"hf download gpt2 {files} --local-dir gpt2",
        "--label_tokenizer gpt2",
        f"--label_tokenizer {task.base_model}",
    ):
        assert words in str(caught.value)


def test_lists_of_a_fixed_length_and_selections_of_rows_are_read_too():
    features = {"query": datasets.List(datasets.Value("int32"), length=2)}
    features |= {f"sample{k}": datasets.List(datasets.Value("int64")) for k in range(2)}
    features = datasets.Features(features | {"best": datasets.Value("int8")})
    rows = [{"query": [i, 50259], "sample0": [1], "sample1": [2], "best": i} for i in (0, 1)]
    table = datasets.Dataset.from_list(rows * 2, features=features).select([3, 0])
    found = labels.load_best_of_k(table, 100, "x")
    assert lists(found.queries) == [[1], [0]] and found.best.tolist() == [1, 0]


def test_the_first_bad_row_of_several_is_named():
    rows = tiny.label_rows(16, 8, 5)
    rows[3]["query"], rows[9]["query"] = None, [2.5] * 8
    for first in (3, 9):
        with pytest.raises(InputError, match=f"row {first}: query"):
            labels.load_best_of_k(datasets.Dataset.from_list(rows), 1000, "x")
        rows[first]["query"] = [1] * 8


# -------------------------------------------------------------------------------------------- pairs

SKY = (
    "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
    "It is blue.<|im_end|>",
    "It is green.<|im_end|>",
)
BAKE = (
    "\n\nHuman: How do I bake bread?\n\nAssistant: Do you have flour?\n\nHuman: Yes.\n\nAssistant:"
)
PAIRS = {
    "strings": (formats.TLDR_PREFERENCE[0], tuple(formats.TLDR_PREFERENCE[0].values())),
    "hh-rlhf": (formats.HH_RLHF[0], (BAKE, " Then mix it with water.", " Then buy bread.")),
    "hh-rlhf without an answer": (
        formats.HH_RLHF[1],
        ("\n\nHuman: Hello.\n\nAssistant:", " Hello!", ""),
    ),
    "hh-rlhf that part early": (
        {
            "chosen": "\n\nHuman: A?\n\nAssistant: B.\n\nHuman: C?\n\nAssistant: D.",
            "rejected": "\n\nHuman: A?\n\nAssistant: E.",
        },
        ("\n\nHuman: A?\n\nAssistant:", " B.\n\nHuman: C?\n\nAssistant: D.", " E."),
    ),
    "implicit prompt": (
        {"chosen": "The sky is blue.", "rejected": "The sky is black."},
        ("The sky is", " blue.", " black."),
    ),
    "messages": (formats.MESSAGES[0], SKY),
    "messages without a prompt": (formats.MESSAGES_WITHOUT_PROMPT[0], SKY),
    "trl-style": (formats.TRL_STYLE[0], SKY),
    "ultrafeedback_binarized": (formats.ULTRAFEEDBACK_BINARIZED[0], SKY),
    "HuggingFaceH4/ultrafeedback_binarized": (formats.ULTRAFEEDBACK_BINARIZED_H4[0], SKY),
    "prompt string, answers as messages": (
        {
            "prompt": "What color is the sky?",
            "chosen": [formats.BLUE],
            "rejected": [formats.GREEN],
        },
        SKY,
    ),
    "prompt list that is repeated": (
        formats.MESSAGES[0] | formats.MESSAGES_WITHOUT_PROMPT[0],
        SKY,
    ),
    "messages that part early": (
        {
            "chosen": [formats.USER, formats.BLUE, formats.USER, formats.BLUE],
            "rejected": [formats.USER, formats.GREEN],
        },
        (SKY[0], f"{SKY[1]}\n{SKY[0]}{SKY[1]}", SKY[2]),
    ),
    "identical answers": (
        dict.fromkeys(("chosen", "rejected"), [formats.USER, formats.BLUE]),
        (SKY[0], SKY[1], SKY[1]),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_R4_pairs_as_people_have_them(name, chat):
    row, expected = PAIRS[name]
    (row,) = datasets.Dataset.from_list([row])  # messages as a dataset gives them back
    prompt, *answers = labels.split_pair(row, chat)
    if isinstance(prompt, list):
        prompt = render(prompt, chat, prompt=True)
    assert (prompt, *answers) == expected


def test_R4_what_is_no_pair_is_refused(hers, tmp_path):
    chat = AutoTokenizer.from_pretrained(SYNTHETIC / "model", chat_template=formats.CHATML)
    counts = AutoTokenizer.from_pretrained(SYNTHETIC / "model")
    counts.chat_template = "{{ messages | length }} turns"
    for row, tokenizer, words in (
        (formats.MESSAGES[0], hers, "chat template"),
        (formats.MESSAGES[0], counts, "chat template"),
        ({"chosen": [formats.BLUE], "rejected": [formats.GREEN]}, chat, "in common"),
        ({"chosen": "a", "rejected": None}, chat, "two texts"),
        ({"chosen": "a", "rejected": [formats.BLUE]}, chat, "two texts"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, chat, "prompt=None"),
    ):
        with pytest.raises(InputError, match=words):
            labels.split_pair(row, tokenizer)
    task = label_task(tmp_path / "pairs.jsonl", [*formats.TRL_STYLE] * 2)
    with pytest.raises(InputError, match=r"--label_dataset .*pairs.jsonl row 0: .*chat template"):
        load_labels(task, hers, ids_of(1000, 0))


@pytest.mark.parametrize("name", ["TLDR_PREFERENCE", "OAI_PREPROCESSED"])
def test_R4_the_first_candidate_was_chosen_and_each_has_exactly_one_end(name, hers, tmp_path):
    task = label_task(tmp_path / "p.jsonl", getattr(formats, name), query_length=128)
    found = load_labels(task, hers, ids_of(1000, 0))
    prompt, *sides = formats.TLDR_PREFERENCE[0].values()
    assert lists(found.queries) == [hers.encode(prompt)] and found.best.tolist() == [0]
    assert lists(found.responses) == [[[*hers.encode(side), 0] for side in sides]]


def test_R4_blank_rows_are_skipped_and_counted(hers, tmp_path, capsys):
    """An empty answer is blank where nothing ends it; with its end it is an answer (hh-rlhf)."""
    sides = [(" ", " no"), ("Hi:", ""), ("So:", " no")]
    rows = [{"prompt": prompt, "chosen": " yes", "rejected": no} for prompt, no in sides]
    task = label_task(tmp_path / "p.jsonl", rows)
    for end, queries, skipped in ((None, ["So:"], 2), (0, ["Hi:", "So:"], 1)):
        found = load_labels(task, hers, ids_of(1000, end))
        assert lists(found.queries) == [hers.encode(text) for text in queries]
        assert len(found.responses) == len(found.best) == len(queries)
        assert f"skipped {skipped} of 3" in capsys.readouterr().out
    assert found.responses[0][1].tolist() == [0]
    with pytest.raises(InputError, match="--label_dataset .* 1 "):
        load_labels(label_task(tmp_path / "p.jsonl", rows[:1]), hers, ids_of(1000, 0))


LONG = {  # rows, the first prompt, and whether it keeps its end
    "a dialogue without a prompt": (formats.HH_RLHF, BAKE, True),
    "a text": (formats.TLDR_PREFERENCE, formats.TLDR_PREFERENCE[0]["prompt"], False),
}


@pytest.mark.parametrize("name", LONG)
def test_R4_a_dialogue_that_is_too_long_keeps_its_end_and_a_text_its_beginning(
    name, chat, tmp_path, capsys
):
    rows, prompt, keeps_end = LONG[name]
    hello = chat.encode("\n\nHuman: Hello.\n\nAssistant:")  # the second row of hh-rlhf just fits
    n, full = len(hello), chat.encode(prompt)
    found = load_labels(
        label_task(tmp_path / "p.jsonl", rows, query_length=n), chat, ids_of(1000, 0)
    )
    assert lists(found.queries) == [full[-n:] if keeps_end else full[:n], hello][: len(rows)]
    assert len(full) > n and f"cut 1 of {len(rows)}" in capsys.readouterr().out
