"""How OpenAI cleaned its texts, for their form on the hub: text → text, for `--clean_fn`."""

import re

import ftfy

STAMP = r"\d\d:\d\d \w+, \d{1,2} \w+ \d{4} \. ?"
BYLINE = re.compile(
    rf"(?:By \. .{{,300}}?)?(?:PUBLISHED|UPDATED): \. {STAMP}(?:\| \. UPDATED: \. {STAMP})?"
    r"|By \. [^.]{,100} \. (?:and [^.]{,100} \. )?"  # no date: the name alone
)


def clean_article(text: str) -> str:
    """A row of `abisee/cnn_dailymail` → what OpenAI's `clean_up_start` and ftfy leave of it.

    No byline, no dates, nothing before (CNN), straight quotes. OpenAI's rules are for lines; the
    hub's rows are one line, so the byline is known by its words. An article of which nothing would
    be left keeps its beginning.
    """
    body = text[match.end() :] if (match := BYLINE.match(text)) else text
    body = re.split(r"\(CNN\) +--", body)[-1]
    body = re.split(r"\(CNN\)", body[:100])[-1] + body[100:]
    return ftfy.fix_text(body).strip() or ftfy.fix_text(text).strip()  # ftfy straightens the quotes


def clean_post(text: str) -> str:
    """A post of TL;DR-17 as OpenAI cleaned it: ftfy, one blank line between paragraphs."""
    return re.sub(r"\n{3,}", "\n\n", ftfy.fix_text(text)).strip()


def clean_tldr(prompt: str) -> str:
    """A prompt of `trl-lib/tldr` as in `trl-lib/tldr-preference`: one newline between paragraphs."""
    post = re.compile(r"(?<=\n\nPOST: ).*(?=\n\nTL;DR:)", re.DOTALL)
    return post.sub(lambda match: re.sub(r"\n+", "\n", match[0]), prompt)
