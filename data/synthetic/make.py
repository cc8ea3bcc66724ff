"""Write the synthetic task: stories from a grammar, a tokenizer of 1000 tokens, a GPT-2 config.

    python data/synthetic/make.py texts [--out DIR]
    python sft.py --task synthetic
    python tools/sample.py models/synthetic/sft --queries 5504 --out samples.jsonl
    python data/synthetic/make.py labels samples.jsonl labels.jsonl

For `synthetic_eos`: `--queries 10496 --samples 2` and `make.py pairs`. Every run of `texts` writes
the same bytes. The samples depend on rounding in the model; those of labels.json and
pairs_eos.jsonl were drawn at commit 2414aa2, with other random numbers.
"""

import argparse
import json
import os
import random
import re
import sys
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread: the same BPE every time

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))
from data.synthetic.judge import GROUPS, best_accuracy, gold_score, human_choice  # noqa: E402

SEED = 1
STORIES, EOS_STORIES = 20_000, 12_000
QUERY_LENGTH, RESPONSE_LENGTH = 64, 24  # tokens of a label
OPENAI_PAD = 50259  # what OpenAI's label files are padded with
SENTENCES = {1: 20, 2: 28, 3: 30, 4: 22}  # number of sentences in a story: weight
MIN_WORDS, MAX_WORDS = 5, 58  # of a story, punctuation marks too: below 64 tokens
KINDS = {"neutral": 30, "feeling": 67, "negated": 3}  # kind of a sentence: weight
MOOD = 0.85  # share of a story's sentences with feelings that follow its mood
COMMENTED = 0.9  # share of the stories of two sentences or more that get a comment
COMMENTS = ["Shame", "Alas", "Well", "Fine", "Hurrah"]  # from worst to best; the judge ignores them
MIN_COMPLETION, MAX_COMPLETION = 4, 40  # tokens
VOCABULARY, POSITIONS = 1000, 128
END = "<|endoftext|>"

# One symbol a line, alternatives between bars, {slots} filled recursively. In a slot, ~ stands for the sign of the
# sentence and ! for the opposite one; S, him and his are the hero of the story (name or pronoun), F is the hero's
# companion and weather is the weather of the story. Signed word lists come from judge.py.
GRAMMAR_TEXT = """
neutral: {S} {act}. | {S} {act} {time}. | {Time}, {S} {act}. | {S} {act} and {act}. | {S} {act} while {F} {act}.
    | When {signal}, {S} {act}. | {F} {act} {time}. | {weather}. | {S} {act} while {weather}. | {S} and {F} {act}.
    | {S} stayed {place} because {weather}. | {Time}, {weather}. | After {S} {act}, {F} {act}. | {F} {act} and {act}.
    | {S} {act} before {signal}. | {S} waited {place} until {signal}. | Although {weather}, {S} went to the {goal}.
    | The {pet} {pet_act}. | The {bird} {bird_act}. | {S} {act} while the {pet} {pet_act}. | The {object} was {look}.
    | There was a {look} {object} {place}. | {S} wanted to {plan}. | {S} had to {plan} {time}. | {S} did not {plan}.
    | {F} asked {him} to {plan}. | The {person} {act}. | {S} saw a {pet} that {pet_act}. | {S} never {habit} {time}.
    | {S} met the {person}, who {act}. | {S} put the {object} on the {furniture}. | {F} gave {him} a {look} {object}.
    | The {food} was on the {top}. | {Time}, {S} had some {food} and some {drink}. | The {person} {habit} {time}.
    | The {person} lived in a {size} house near the {landmark}.
feeling: {S} was {degree} {feel~}. | {S} felt {degree} {feel~}. | {S} was {feel~} because {event~}.
    | {S} was {degree} {feel~} when {moment~}. | {S} was {degree} {feel~} because {event~}.
    | {S} felt {feel~}, but {F} was {feel!}. | Although {event!}, {S} was {degree} {feel~}.
    | {Time}, {S} was {degree} {feel~}. | {S} was {feel~} and {feel~}. | {S} was {degree} {feel~} while {weather}.
    | When {moment~}, {S} {react~}. | {S} {react~} because {event~}. | {F} {react~} when {signal}.
    | {S} {attitude~} the {thing}. | {S} {attitude~} the {food}. | The {food} was {degree} {taste~}.
    | The {food} was {degree} {taste~}, but the {drink} was {sip!}. | The {person} was {degree} {manner~}.
    | The {person} at the {spot} was {degree} {manner~}. | It was a {strong} {quality~} {thing}.
    | The {thing} was {degree} {quality~}. | {S} said that the {thing} was {quality~}. | {S} {adverb~} {act}.
    | {F} {adverb~} {act}. | {S} {deed} with {mood~}. | The {pet} was {degree} {pet_feel~}.
    | The {person}, who was {manner~}, {act}. | The {food} that {S} had bought was {degree} {taste~}. | {event~}.
    | {F}, who was {degree} {feel~}, {act}. | {S} had a {strong} {quality~} {day}. | {S} {react~} when {moment~}.
negated: {S} was {not} {feel!}. | {S} was {not} {feel!} because {event~}. | {S} was not {strong} {feel!}.
    | {S} did not {wish!} the {thing}. | {F} did not {wish!} the {food}. | The {food} was not {strong} {taste!}.
    | The {person} was {not} {manner!}. | The {thing} was not {quality!}. | {S} {deed} without {mood!}.
    | There was no {spirit!} in the {land}. | The {pet} was not {pet_feel!}. | {S} did not have a {quality!} {day}.
    | {S} talked to the {person}, who was not {manner!}. | {F} was {not} {feel!}.

degree: | | | | | | | | | | | | very | really | extremely | slightly | a little
strong: | | | very | really
not: not | never | no longer
moment+: {F} praised {him} | {F} thanked {him} | {F} helped {him} | {F} gave {him} a gift
    | {S} won a prize | {S} won the game
moment-: {F} scolded {him} | {S} lost the {object} | {S} lost a {look} {object} | {F} forgot {him}
    | {S} broke the {ware} | {S} hurt {his} {limb} | {S} made a mistake | {F} broke the {ware}
event+: {moment+} | {moment+} | the {food} was {taste+} | the {person} was {manner+} | the {pet} was safe
    | the {thing} was {quality+} | the {thing} was fun
event-: {moment-} | {moment-} | the {food} was {taste-} | the {person} was {manner-} | the {pet} was ill
    | the {thing} was {quality-} | the {object} was stolen | {F} was in trouble
sip+: good | delicious
sip-: bad | bitter
spirit+: joy | hope | laughter
spirit-: fear | anger | trouble
limb: hand | foot

act: {went} to the {goal} | {went} to the {goal} | {went} to the {goal} | came back from the {goal}
    | opened the {opening} | closed the {opening} | read a {text} | wrote a {text} | bought a {look} {object}
    | carried a {look} {object} | bought some {food} | cooked some {dish} | ate some {food} | drank some {drink}
    | waited {place} | sat {place} | slept {place} | looked at the {view} | washed the {cloth} | washed the {dishes}
    | painted the {furniture} | fed the {pet} | cleaned the {room} | talked to the {person} | found a {look} {object}
    | took the {ride} to the {goal} | worked {place} | found a heavy {container}
deed: {went} to the {goal} | opened the {opening} | waited {place} | looked at the {view} | talked to the {person}
habit: {went} to the {goal} | read a {text} | ate some {food} | drank some {drink} | slept {place} | worked {place}
    | cooked some {dish} | waited {place}
plan: walk to the {goal} | go to the {goal} | open the {opening} | read the {text} | buy some {food} | cook some {dish}
    | wait {place} | eat some {food} | sleep {place} | feed the {pet} | clean the {room} | wash the {cloth}
went: walked | went | ran | rode
pet_act: slept {pet_place} | ran to the {landmark} | waited {pet_place} | sat {pet_place} | looked at the {landmark}
    | played {pet_place} | drank some water
bird_act: sat on the {high} | flew over the {landmark} | sang in the tree | flew to the {high} | slept in the tree
signal: the bell rang | the {ride} came | {F} opened the {opening} | {F} called | the door opened | the music began

time: in the morning | in the evening | at noon | at night | after {meal} | before {meal} | that day | the next day
Time: In the morning | In the evening | At noon | At night | After {meal} | Before {meal} | That day | The next day
meal: breakfast | lunch | dinner
day: day | morning | evening | time
rain: it was raining | it was wet and cold | the rain was cold | the sky was dark
sun: the sun was shining | it was warm | the sky was blue | it was hot and dry | the sun was hot
snow: it was snowing | the snow was deep | it was cold | the {landmark} was white | there was snow on the {high}
wind: the wind was strong | the wind was cold | the sky was grey | it was cold and dark | there was a strong wind

place: in the {inside} | in the {inside} | at the {spot} | near the {landmark} | under the tree
inside: garden | kitchen | park | village | forest | library | barn | town | house
spot: market | station | school | shop | farm | beach | harbour | lake
goal: {spot} | {spot} | park | river | village | library | garden
landmark: river | lake | bridge | hill | sea | fire | tower
pet_place: in the garden | in the barn | in the forest | near the {landmark} | under the table | under the tree
room: kitchen | library | house | barn | shop
land: village | town | house
high: roof | wall | tower | hill
opening: window | door | gate
view: map | clock | stars | sea | boats | fire
text: book | letter | story | note
ride: bus | train | boat
furniture: table | chair | shelf | bed | bench
top: table | shelf | plate
object: lamp | box | basket | bag | coat | hat | cup | plate | clock | ball | map | key | blanket | shirt
container: box | basket | bag
cloth: coat | hat | blanket | shirt | bag
ware: cup | plate | lamp | clock
dishes: cup | plate | window
look: red | blue | green | white | black | {size}
size: old | new | small | big
food: bread | soup | cake | cheese | rice | fish | pie | salad | fruit | meat
dish: soup | rice | fish | meat | eggs
drink: tea | milk | coffee | water
pet: dog | cat | horse | puppy | goat | rabbit | pony | cow | duck
bird: bird | owl | crow
thing: party | song | film | game | lesson | trip | music | play
person: baker | farmer | doctor | teacher | sailor | driver | guest | old man | old woman | girl | boy | nurse
relation: mother | father | brother | sister | friend | aunt | uncle
she: Anna | Emma | Lucy | Maria | Nora | Rosa | Clara | Alice
he: Tom | Ben | Jack | Paul | Peter | Henry | David | Leo
"""


def read_grammar(text):
    """Return {symbol: [alternative, ...]} of the grammar's text, completed by the judge's signed word lists."""
    blocks = (block.split(":", 1) for block in re.split(r"\n+(?=\S)", text.strip()))
    grammar = {
        symbol: [" ".join(part.split()) for part in body.split("|")] for symbol, body in blocks
    }
    for symbol, words in GROUPS.items():
        grammar[symbol + "+"] = [word for word, valence in words.items() if valence > 0]
        grammar[symbol + "-"] = [word for word, valence in words.items() if valence < 0]
    return grammar


GRAMMAR = read_grammar(GRAMMAR_TEXT)
PRONOUNS = {
    "she": {"S": "she", "him": "her", "his": "her"},
    "he": {"S": "he", "him": "him", "his": "his"},
}
EXTREMES = (  # take no degree
    "delighted|thrilled|miserable|furious|wonderful|great|terrible|awful|delicious|rotten|cruel"
)


class Story:
    """One story being told: who it is about, what the weather is, and which phrases are used up."""

    def __init__(self, rng):
        self.rng = rng
        gender, other = rng.sample(["she", "he"], 2)
        self.pronouns, self.name = PRONOUNS[gender], rng.choice(GRAMMAR[gender])
        # A companion of the other gender can have a name without making the pronouns ambiguous.
        named = rng.random() < 0.3
        self.companion = (
            rng.choice(GRAMMAR[other]) if named else "{his} " + rng.choice(GRAMMAR["relation"])
        )
        self.weather = rng.choice(["rain", "sun", "snow", "wind"])
        self.mood = rng.choice("+-")
        self.used = set()
        self.introduced = False

    def sentence(self):
        """Return the next sentence."""
        # A language model that wants to guess the next feeling has to know the mood so far.
        sign = self.mood if self.rng.random() < MOOD else "+-"[self.mood == "+"]
        self.signs = {"~": sign, "!": "+-"[sign == "+"]}
        self.named = False  # once the hero has appeared in the sentence, only pronouns follow
        text = self.slot(self.rng.choices(list(KINDS), list(KINDS.values()))[0])
        return tidy(text)

    def slot(self, symbol):
        """Return the text for one slot of a template."""
        if symbol in self.pronouns:
            return self.hero(symbol)
        if symbol == "F":
            return self.fill(self.companion)
        if symbol == "weather":
            symbol = self.weather
        if symbol[-1] in self.signs:
            symbol = symbol[:-1] + self.signs[symbol[-1]]
        alternatives = [text for text in GRAMMAR[symbol] if text not in self.used]
        alternatives = alternatives or GRAMMAR[symbol]
        choice = self.rng.choice(alternatives)
        if len(choice.split()) > 1 or symbol[-1] in "+-":  # no phrase or feeling twice in a story
            self.used.add(choice)
        return self.fill(choice)

    def fill(self, template):
        """Return the template with all its slots filled, from left to right."""
        return re.sub(r"\{(.*?)\}", lambda match: self.slot(match[1]), template)

    def hero(self, case):
        """Return the hero's name at the first mention and sometimes later, else the pronoun."""
        pronoun = self.named or (self.introduced and self.rng.random() < 0.75)
        self.named = self.introduced = True
        return self.pronouns[case] if pronoun else self.name + ("'s" if case == "his" else "")


def tidy(text):
    """Return the sentence with its spaces, articles, degrees and capitals put right.

    >>> tidy(" it was a very awful day, and Tom did not buy  some bread .")
    'It was an awful day, and Tom did not buy any bread.'
    """
    text = re.sub(r" (?=[.,])", "", " ".join(text.split()))
    text = re.sub(rf"\b(?:very|extremely|slightly|a little) ({EXTREMES})\b", r"\1", text)
    text = re.sub(r"\b(did not \w+|never \w+) some\b", r"\1 any", text)
    text = re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)
    return text[0].upper() + text[1:] + "." * (text[-1] != ".")


def count_words(text):
    """Return the number of words and punctuation marks."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def tell(rng, count):
    """Return a new story of so many sentences, as a list. Most longer ones end with the narrator's comment, one more."""
    story = Story(rng)
    sentences = [story.sentence() for _ in range(count)]
    if count > 1 and rng.random() < COMMENTED:
        sentences.append(comment(gold_score([""], [" ".join(sentences)])[0]))
    return sentences


def comment(score):
    """Return the narrator's word on a story of this true score. To guess it a language model has to follow the feelings,
    with negation and degree: that is what the reward model starts from.

    >>> comment(0.1), comment(-2.9)
    ('Well.', 'Shame.')
    """
    return COMMENTS[2 + max(-2, min(2, round(score / 1.5)))] + "."


def make_stories(rng, count):
    """Return `count` different stories, one string each."""
    stories = {}  # a dict, because it keeps its order
    while len(stories) < count:
        length = rng.choices(list(SENTENCES), list(SENTENCES.values()))[0]
        text = " ".join(tell(rng, length))
        if MIN_WORDS <= count_words(text) <= MAX_WORDS:
            stories[text] = None
    return list(stories)


def make_pairs(rng, count, tokenizer):
    """Return `count` different stories, cut into a prompt of one or two sentences and a completion of one to three."""
    pairs = {}
    while len(pairs) < count:
        start, length = rng.choice([1, 1, 2]), rng.choice([1, 1, 2, 2, 2, 3])
        story = tell(rng, start + length)
        prompt, completion = " ".join(story[:start]), " " + " ".join(story[start:])
        if MIN_COMPLETION <= len(tokenizer.encode(completion).ids) <= MAX_COMPLETION:
            pairs[prompt, completion] = None
    return [{"prompt": prompt, "completion": completion} for prompt, completion in pairs]


def train_tokenizer(texts):
    """Return a byte-level BPE tokenizer trained on the texts, with GPT-2's way of cutting them into words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_model(tokenizer, folder):
    """Write the tokenizer and the config of a GPT-2 of about one million parameters, for `from_pretrained`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
    }
    end = tokenizer.token_to_id(END)
    model_config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": VOCABULARY,
        "n_positions": POSITIONS,
        "n_embd": 128,
        "n_layer": 4,
        "n_head": 4,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    for name, config in {
        "tokenizer_config.json": tokenizer_config,
        "config.json": model_config,
    }.items():
        (folder / name).write_text(json.dumps(config, indent=2) + "\n")


def print_lengths(name, tokenizer, texts):
    """Print the quantiles of the texts' lengths in tokens."""
    lengths = sorted(len(encoding.ids) for encoding in tokenizer.encode_batch(texts))
    marks = {"min": 0, "5%": 0.05, "50%": 0.5, "95%": 0.95, "max": 1}
    table = ", ".join(
        f"{mark} {lengths[round(share * (len(lengths) - 1))]}" for mark, share in marks.items()
    )
    print(f"{name}: {len(texts)} rows, tokens: {table}")


def write_texts(out):
    """Write the stories, the prompts with completions, and the model folder."""
    stories = make_stories(random.Random(SEED), STORIES)
    tokenizer = train_tokenizer(stories)
    pairs = make_pairs(random.Random(SEED + 1), EOS_STORIES, tokenizer)

    save_model(tokenizer, out / "model")
    (out / "stories.txt").write_text("\n".join(stories) + "\n")
    (out / "stories_eos.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))

    words = {word for story in stories for word in re.findall(r"[a-z]+", story.lower())}
    print(f"{len(words)} different words")
    print_lengths("stories.txt", tokenizer, stories)
    print_lengths("stories_eos.jsonl, prompt", tokenizer, [pair["prompt"] for pair in pairs])
    print_lengths(
        "stories_eos.jsonl, completion", tokenizer, [pair["completion"] for pair in pairs]
    )


def judge_samples(samples, out, write_label, seed=SEED):
    """Read samples as tools/sample.py writes them; write a label for each line, and print a summary."""
    rng = random.Random(seed)
    all_scores = []
    with open(samples) as rows, open(out, "w") as labels:
        for line in rows:
            row = json.loads(line)
            scores = gold_score([row["query_text"]] * len(row["texts"]), row["texts"])
            all_scores.append(scores)
            label = write_label(row, human_choice(scores, rng))
            if label is not None:
                labels.write(json.dumps(label) + "\n")
    print(f"{len(all_scores)} labels; best possible accuracy {best_accuracy(all_scores):.3f}")


def best_of(row, best):
    """A label in OpenAI's form: token ids, padded on the right with its pad id."""
    label = {"query": pad(row["query"], QUERY_LENGTH)}
    for j in range(len(row["texts"])):
        label[f"sample{j}"] = pad(row[f"sample{j}"], RESPONSE_LENGTH)
    return label | {"best": best}


def pad(tokens, length):
    """Token ids, padded on the right as OpenAI's label files are."""
    return tokens + [OPENAI_PAD] * (length - len(tokens))


def pair(row, best):
    """A pair of texts, or None if one of them is empty."""
    chosen, rejected = row["texts"][best], row["texts"][1 - best]
    if not chosen.strip() or not rejected.strip():
        return None
    return {"prompt": row["query_text"], "chosen": chosen, "rejected": rejected}


def main():
    """Run the sub-command named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    texts = commands.add_parser("texts", help="stories, tokenizer and model config")
    texts.add_argument("--out", type=Path, default=HERE, help="folder to write into")
    texts.set_defaults(run=lambda args: write_texts(args.out))
    labels = commands.add_parser("labels", help="best-of-4 labels of samples of the sft model")
    labels.set_defaults(run=lambda args: judge_samples(args.samples, args.out, best_of))
    pairs = commands.add_parser("pairs", help="pairs of samples of the sft model of synthetic_eos")
    pairs.set_defaults(run=lambda args: judge_samples(args.samples, args.out, pair))
    for command in (labels, pairs):
        command.add_argument("samples", help="file that tools/sample.py wrote")
        command.add_argument("out", help="file to write")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
