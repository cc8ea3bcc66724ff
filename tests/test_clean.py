"""How OpenAI cleaned its texts."""

import formats

from data import clean

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
