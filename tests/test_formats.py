"""The true forms of the hub's data (`formats.py`): cleaning, the end of a query, labels of another tokenizer, pairs as people
have them. Expected values are written by hand or are GPT-2's own ids."""

import json
import time

import datasets
import formats
import pytest
import test_errors
import tiny
import torch
from tiny import make_task
from transformers import AutoTokenizer

import tasks
import train_reward
import utils
from data import clean

HERS = tasks.SYNTHETIC / "model"  # the synthetic task's tokenizer: another vocabulary than GPT-2's


@pytest.fixture(scope="session")
def gpt2():
    return formats.gpt2_tokenizer()


@pytest.fixture(scope="session")
def hers():
    return AutoTokenizer.from_pretrained(HERS)


@pytest.fixture
def chat():
    tokenizer = AutoTokenizer.from_pretrained(HERS)
    tokenizer.chat_template = formats.CHATML
    return tokenizer


# ---------------------------------------------------------------------------------------------------------- cleaning


def test_gpt2s_ids_are_those_that_the_tasks_name(gpt2):
    """13 and 198 are [O]'s truncate tokens; 764 is what the hub's books and articles have in place of 13."""
    assert len(gpt2) == 50257 and gpt2.eos_token_id == 50256
    assert [gpt2.encode(text) for text in (".", " .", "\n", "\n\nThe")] == [[13], [764], [198], [198, 198, 464]]
    assert gpt2.decode([23073, 11, 339, 561]) == "usually, he would"
    assert all(13 not in gpt2.encode(row["text"]) and 764 in gpt2.encode(row["text"]) for row in formats.BOOKS)


CLEAN = [
    "A baker of 61 has won £1.5million. She said: 'I cried.' Happy: The baker at home . More at CNN.com",
    "LONDON, England (Reuters) -- A painter gained access to a reported £20 million on Monday. "
    "He won't cast a spell on it.",
    "The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
    "Rain fell on Sunday. It did not stop.",
]


@pytest.mark.parametrize("i", range(4))
def test_articles_lose_what_openai_took_off_and_nothing_else(i):
    assert clean.clean_article(formats.CNNDM[i]["article"]) == CLEAN[i]
    assert clean.clean_article(CLEAN[i]) == CLEAN[i]


@pytest.mark.parametrize(
    ("article", "cleaned"),
    [
        ("By . Anna Smith . PUBLISHED: . 07:03 EST, 2 March 2013 . It rained .", "It rained ."),
        ("By . Dr A. Smith, in Rome . UPDATED: . 17:03 GMT, 12 May 2014 . It rained .", "It rained ."),
        ("PUBLISHED: . 07:03 EST, 2 March 2013 . | . UPDATED: . 08:07 BST, 2 May 2013 . It rained .", "It rained ."),
        ("By . Anna Smith . and Ben Jones . It rained . He left .", "It rained . He left ."),
        ("By . Anna Smith . It rained . PUBLISHED: . 07:03 EST", "It rained . PUBLISHED: . 07:03 EST"),
        ("By now it rained . He said so . PUBLISHED: . 07:03 EST, 2 March 2013 .", None),  # no byline
        ("It rained . UPDATED: . 07:03 EST, 2 March 2013 . He left .", None),  # not at the start: [O] would empty it
        ("(CNN) -- Rain. (CNN) -- Sun.", "Sun."),  # the last one, as [O]
        ("Rain (CNN) came. " + "x" * 100 + " (CNN) went.", "came. " + "x" * 100 + " (CNN) went."),
        ("By . Anna . PUBLISHED: . 07:03 EST, 2 March 2013 . ", "By . Anna . PUBLISHED: . 07:03 EST, 2 March 2013 ."),
        ("It rained. (CNN) --", "It rained. (CNN) --"),
        ("“Rain,” he said: ‘it’s â€™ &amp; so’", "\"Rain,\" he said: 'it's ' & so'"),
        ("", ""),
    ],
)
def test_articles_at_the_edges(article, cleaned):
    assert clean.clean_article(article) == (article if cleaned is None else cleaned)


def test_posts_are_cleaned_as_openai_cleaned_them():
    assert clean.clean_post(formats.TLDR_17[0]["content"]) == "I painted the house.\n\nIt's red now."
    assert clean.clean_post("a\nb\n\nc\n\n\nd\n\n\n\n\ne") == "a\nb\n\nc\n\nd\n\ne"


def test_tldrs_prompts_can_be_given_the_form_of_its_preferences():
    (row,), (pair,) = formats.TLDR, formats.TLDR_PREFERENCE
    assert row["prompt"] != pair["prompt"]
    assert clean.clean_tldr(row["prompt"]) == pair["prompt"] == clean.clean_tldr(pair["prompt"])
    assert clean.clean_tldr("no post\n\nat all") == "no post\n\nat all"


# ----------------------------------------------------------------------------------------------------- end of a query


def query(text, tokenizer, length, end="."):
    ids = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    cut = utils.cut_query(ids["input_ids"], length, None, utils.ends_of(text, ids["offset_mapping"], end))
    return None if cut is None else tokenizer.decode(cut, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", ["gpt2", "hers"])
@pytest.mark.parametrize(
    ("text", "cut"),
    [
        ("It won £1.5million. More at CNN.com", "It won £1.5million."),  # 13, and 13 within words
        ("It rained. Happy: the baker . More at", "It rained. Happy: the baker ."),  # 764
        ("It rained . He", "It rained ."),
        ("It rained.", "It rained."),
        ("It rained . ", "It rained ."),
        ("1.5 at CNN.com", None),
        ("", None),
    ],
)
def test_P3_a_query_ends_with_its_last_sentence_with_and_without_a_space_before_the_stop(text, cut, name, request):
    assert query(text, request.getfixturevalue(name), 500) == cut


def test_P3_the_last_sentence_inside_the_length_counts(gpt2):
    text = "It was hot. He left . She"
    assert [gpt2.decode([i]) for i in gpt2.encode(text)] == ["It", " was", " hot", ".", " He", " left", " .", " She"]
    cuts = [query(text, gpt2, n) for n in (3, 4, 6, 7, 8)]
    assert cuts == [None, "It was hot.", "It was hot.", "It was hot. He left .", "It was hot. He left ."]
    assert query("One.\n\nTwo", gpt2, 9, "\n") == "One.\n\n" and query("One.\nTwo\n", gpt2, 3, "\n") == "One.\n"


def test_P3_every_article_gives_a_query_that_ends_a_sentence(gpt2):
    ends = [query(clean.clean_article(row["article"]), gpt2, 500) for row in formats.CNNDM]
    assert ends == [CLEAN[0].removesuffix(" More at CNN.com"), *CLEAN[1:]]


# ------------------------------------------------------------------------------------------------- other tokenizers


def test_29_a_tokenizer_reads_anothers_ids_if_it_has_them_all(gpt2, hers):
    more = formats.gpt2_tokenizer()
    more.add_special_tokens({"pad_token": "[PAD]"})  # as many fine-tuned GPT-2s have it
    assert utils.reads_ids_of(gpt2, formats.gpt2_tokenizer()) and utils.reads_ids_of(more, gpt2)
    assert not utils.reads_ids_of(gpt2, more)  # [PAD] is no text to it
    assert not utils.reads_ids_of(hers, gpt2) and not utils.reads_ids_of(gpt2, hers)
    begin = time.perf_counter()
    utils.reads_ids_of(more, gpt2)
    assert time.perf_counter() - begin < 1


def test_29_ids_become_the_same_texts_without_pads_and_with_their_end(gpt2, hers):
    rows = torch.tensor([[50257, 50257, 1026, 764, 50256], [50257, 314, 1101, 764, 198], [50257] * 5])
    texts = ["It .<|endoftext|>", " I'm .\n", ""]
    expected = [hers.encode(text) for text in texts]
    assert expected[0][-1] == hers.eos_token_id == 0
    assert utils.retokenise(rows, gpt2, 50257, hers) == expected


def test_29_the_end_of_text_is_the_other_tokenizers_own(gpt2, chat):
    chat.add_special_tokens({"eos_token": "<|im_end|>"})
    (ids,) = utils.retokenise(torch.tensor([[1026, 50256]]), gpt2, 50257, chat)
    assert ids == [*chat.encode("It"), chat.convert_tokens_to_ids("<|im_end|>")]


def test_29_ids_beyond_the_tokenizer_are_no_text(gpt2, hers):
    """A model's vocabulary may be larger than its tokenizer (Pythia's 50,304), so such ids can be sampled."""
    rows = torch.tensor([[1026, 50300, 764, 50304]])
    assert utils.retokenise(rows, gpt2, 50304, hers) == [hers.encode("It .")]
    assert utils.retokenise(rows[:, [0, 2, 2]], gpt2, 764, hers) == [hers.encode("It")]  # a pad is none


def test_X13_a_reward_model_reads_the_policys_texts(gpt2, hers):
    q = torch.tensor([[50257, 1026], [40, 1101]])  # "It", "I'm"
    r = torch.tensor([[764, 198, 50257], [764, 50256, 50257]])  # " .\n", " .<|endoftext|>"
    sides = [hers.encode("It") + hers.encode(" .\n"), hers.encode("I'm") + hers.encode(" .<|endoftext|>")]
    width = max(map(len, sides))
    for longest in (64, 2):  # a text that is too long loses its beginning
        model = tiny.make_reward(pad_id=1000, positions=longest)
        tokens = utils.reward_reader(model, hers, gpt2, 50257)(q, r)
        rows = [side[-longest:] for side in sides]
        assert tokens.tolist() == [[1000] * (min(width, longest) - len(row)) + row for row in rows]


def test_X13_scores_by_text_are_the_reward_models_own(gpt2, hers):
    model = tiny.make_reward(pad_id=1000)
    texts = [("It rained", " ."), ("Ben saw the cat", " and left .")]
    rows = [hers.encode(q) + hers.encode(r) for q, r in texts]
    alone = [model(torch.tensor([row])).item() for row in rows]
    q, r = (utils.pad_rows([gpt2.encode(pair[i]) for pair in texts], 8, 50257) for i in (0, 1))
    assert model(utils.reward_reader(model, hers, gpt2, 50257)(q, r)).tolist() == pytest.approx(alone, abs=1e-5)


def test_X13_models_of_one_tokenizer_may_be_padded_to_other_sizes(hers):
    rows = torch.tensor([[61, 61, 3, 60], [4, 58, 57, 61]])
    for pad, expected in ((58, [[58, 58, 3, 58], [4, 58, 57, 58]]), (70, [[70, 70, 3, 60], [4, 58, 57, 70]])):
        read = utils.reward_reader(tiny.make_reward(pad_id=pad), hers, hers, 61)
        assert read(rows[:, :2], rows[:, 2:]).tolist() == expected  # of 58, the ids 58 … 60 are no text


# ------------------------------------------------------------------------------------------------------------ labels


@pytest.fixture
def label_file(gpt2, tmp_path):
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(formats.oai_labels(gpt2)))
    return path


def save_gpt2(gpt2, folder):
    gpt2.save_pretrained(folder)
    return str(folder)


def test_29_labels_of_gpt2_are_read_as_they_stand_with_gpt2s_tokenizer(gpt2, label_file, tmp_path):
    """Also where the model's vocabulary is larger, so that 50259 could be a token of it."""
    task = make_task(
        label_dataset=str(label_file),
        query_length=64,
        response_length=24,
        label_tokenizer=save_gpt2(gpt2, tmp_path / "g"),
    )
    assert train_reward.load_label_tokenizer(task, gpt2) is None
    labels = train_reward.load_labels(task, gpt2, 50257)
    assert labels.query.shape == (3, 64) and labels.responses.shape == (3, 4, 24) and labels.best.tolist() == [2, 0, 3]
    first = gpt2.encode("He opened the door and looked out.")
    assert labels.query[0].tolist() == [50257] * (64 - len(first)) + first  # they stood on the left of their pads
    assert 50256 in labels.responses[0, 1].tolist() and (labels.responses[0, 3, 3:] == 50257).all()


def test_29_labels_of_gpt2_are_encoded_again_for_another_tokenizer(gpt2, hers, label_file, tmp_path):
    """Queries and responses get longer with 1,000 tokens than with 50,257: nothing of them is cut."""
    task = make_task(label_dataset=str(label_file), query_length=8, label_tokenizer=save_gpt2(gpt2, tmp_path / "g"))
    labels = train_reward.load_labels(task, hers, 1000)
    q, r = labels.query[1].tolist(), labels.responses[2, 1].tolist()
    real = hers.encode("“Go,” she said.\n\nNobody went.")
    assert labels.query.shape[1] == max(len(real), len(hers.encode("He opened the door and looked out.")))
    assert q == [1000] * (len(q) - len(real)) + real
    real = hers.encode(" There was nobody.<|endoftext|>The")
    assert r == real + [1000] * (len(r) - len(real)) and 0 in real
    assert labels.best.tolist() == [2, 0, 3]


def test_29_labels_whose_tokenizer_is_not_to_be_had_are_refused(hers, label_file, tmp_path):
    task = make_task(label_dataset=str(label_file), label_tokenizer="./nowhere")
    with pytest.raises(utils.InputError, match="--label_tokenizer=./nowhere does not exist"):
        train_reward.load_labels(task, hers, 1000)


def test_29_a_label_tokenizer_out_of_reach_names_the_next_command(hers, label_file, tmp_path, monkeypatch):
    """A hub that refuses connections, and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(utils.huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(utils.huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(utils.huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    task = make_task(label_dataset=str(label_file), label_tokenizer="gpt2")
    test_errors.refuses(
        lambda: train_reward.load_labels(task, hers, 1000),
        f"--label_dataset={label_file} holds ids of gpt2's tokenizer",
        "hf download gpt2 config.json tokenizer.json tokenizer_config.json --local-dir gpt2",
        "--label_tokenizer gpt2",
        f"--label_tokenizer {task.base_model}",
    )


def test_the_first_bad_row_of_several_is_named(tmp_path):
    rows = tiny.label_rows(16, 8, 5)
    rows[3]["query"], rows[5]["query"], rows[9]["query"] = None, [1] * 9, [2.5] * 8
    for first, words in ((3, "is not a list"), (5, "has 9 ids, not 8"), (9, "is not a list")):
        data = datasets.Dataset.from_list(rows)
        with pytest.raises(utils.InputError, match=f"row {first}: query.*{words}"):
            train_reward.label_columns(data, 8, 5, 1000, "--label_dataset=x")
        rows[first]["query"] = [1] * 8


def test_a_selection_of_rows_is_read_as_a_selection():
    rows = datasets.Dataset.from_list(tiny.label_rows(6, 8, 5)).select([4, 1])
    labels = train_reward.label_columns(rows, 8, 5, 1000, "x")
    assert labels.best.tolist() == [rows[0]["best"], rows[1]["best"]] and len(labels.query) == 2


def test_parquets_lists_of_a_fixed_length_are_read_too():
    features = {"query": datasets.List(datasets.Value("int32"), length=2), "best": datasets.Value("int8")}
    features |= {f"sample{k}": datasets.List(datasets.Value("int64")) for k in range(2)}
    row = {"query": [7, 50259], "sample0": [1], "sample1": [2], "best": 1}
    rows = datasets.Dataset.from_list([row] * 2, features=datasets.Features(features))
    labels = train_reward.label_columns(rows, 2, 1, 100, "x")
    assert labels.query.tolist() == [[100, 7]] * 2 and labels.responses.tolist() == [[[1], [2]]] * 2


def test_heldout_labels_share_no_query_with_the_training_labels():
    queries = torch.tensor([[1, 2], [3, 4], [1, 2], [5, 6], [3, 4], [5, 6], [2, 1]])
    assert train_reward.heldout_rows(queries, 2).tolist() == [3, 5, 6]
    assert train_reward.heldout_rows(queries, 7).tolist() == [] == train_reward.heldout_rows(queries[:3], 2).tolist()
    rows = train_reward.heldout_rows(queries, 2)
    assert queries[rows].tolist() == [[5, 6], [5, 6], [2, 1]] and rows.dtype.kind == "i"


# ------------------------------------------------------------------------------------------------------------- pairs

SKY = (
    "<|im_start|>user\nWhat color is the sky?<|im_end|>\n<|im_start|>assistant\n",
    "It is blue.<|im_end|>",
    "It is green.<|im_end|>",
)
PAIRS = {
    "strings": (formats.TLDR_PREFERENCE[0], tuple(formats.TLDR_PREFERENCE[0].values())),
    "hh-rlhf": (
        formats.HH_RLHF[0],
        (
            "\n\nHuman: How do I bake bread?\n\nAssistant: Do you have flour?\n\nHuman: Yes.\n\nAssistant:",
            " Then mix it with water.",
            " Then buy bread.",
        ),
    ),
    "hh-rlhf without an answer": (formats.HH_RLHF[1], ("\n\nHuman: Hello.\n\nAssistant:", " Hello!", "")),
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
    "prompt string, answers as messages": (
        {"prompt": "What color is the sky?", "chosen": [formats.BLUE], "rejected": [formats.GREEN]},
        SKY,
    ),
    "prompt list that is repeated": (formats.MESSAGES[0] | formats.MESSAGES_WITHOUT_PROMPT[0], SKY),
}


@pytest.mark.parametrize("name", PAIRS)
def test_R4_pairs_as_people_have_them(name, chat):
    row, expected = PAIRS[name]
    (row,) = datasets.Dataset.from_list([row])  # messages as a data set gives them back
    assert train_reward.split_pair(row, chat) == expected


def test_R4_identical_answers_keep_their_prompt(chat):
    row = {"chosen": [formats.USER, formats.BLUE], "rejected": [formats.USER, formats.BLUE]}
    assert train_reward.split_pair(row, chat) == (SKY[0], SKY[1], SKY[1])


def test_R4_what_is_no_pair_is_refused(hers, chat):
    for row, tokenizer, words in (
        (formats.MESSAGES[0], hers, "chat template"),
        ({"chosen": [formats.BLUE], "rejected": [formats.GREEN]}, chat, "in common"),
        ({"chosen": "a", "rejected": None}, chat, "two texts"),
        ({"chosen": "a", "rejected": [formats.BLUE]}, chat, "two texts"),
    ):
        with pytest.raises(utils.InputError, match=words):
            train_reward.split_pair(row, tokenizer)
    chat.chat_template = "{{ messages | length }} turns"
    with pytest.raises(utils.InputError, match="does not go on"):
        train_reward.split_pair(formats.MESSAGES[0], chat)


def eos_task(rows, tmp_path, **changes):
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = dict(label_dataset=str(tmp_path / "pairs.jsonl"), query_length=128, truncate_token="<|endoftext|>")
    return make_task(**(values | changes))


@pytest.mark.parametrize("rows", [formats.TLDR_PREFERENCE, formats.OAI_PREPROCESSED], ids=["trl-lib", "vwxyzjn"])
def test_R4_every_candidate_has_exactly_one_end(rows, hers, tmp_path):
    labels = train_reward.load_pairs(datasets.Dataset.from_list(rows), eos_task(rows, tmp_path), hers, 1000)
    (pair,) = formats.TLDR_PREFERENCE
    for k, name in enumerate(("chosen", "rejected")):
        real = hers.encode(pair[name])
        assert labels.responses[0, k].tolist()[: len(real) + 1] == [*real, 0]
        assert set(labels.responses[0, k].tolist()[len(real) + 1 :]) <= {1000}


def test_R4_dialogues_become_labels_and_an_empty_answer_is_one(hers, tmp_path):
    task = eos_task(formats.HH_RLHF, tmp_path)
    labels = train_reward.load_labels(task, hers, 1000)
    assert labels.responses.shape[:2] == (2, 2) and labels.best.tolist() == [0, 0]
    assert hers.decode([t for t in labels.query[1].tolist() if t != 1000]) == "\n\nHuman: Hello.\n\nAssistant:"
    assert labels.responses[1, 1].tolist() == [0] + [1000] * (labels.responses.shape[2] - 1)


def test_R4_a_bad_pair_is_named_by_its_row(hers, tmp_path):
    rows = [{"chosen": "The sky is blue.", "rejected": "The sky is red."}, {"chosen": "yes", "rejected": "no"}]
    with pytest.raises(utils.InputError, match="row 1: prompt, chosen or rejected is blank"):
        train_reward.load_labels(eos_task(rows, tmp_path), hers, 1000)
    with pytest.raises(utils.InputError, match=r"pairs.jsonl row 0: .*chat template"):
        train_reward.load_labels(eos_task(formats.TRL_STYLE, tmp_path), hers, 1000)
