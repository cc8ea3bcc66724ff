"""The judge of the synthetic task: a true sentiment score and a noisy labeler who sees it.

The lexicon below is the only place that knows what words are worth. `data/synthetic/make.py` builds its sentences from the
same groups, so every feeling word of the data is a word that the judge understands. No dependencies.
"""

import math
import re

# A word is worth -2, -1, 1 or 2. The groups differ in where a sentence can use the word.
FEELINGS = {  # Anna was happy
    "happy": 1,
    "glad": 1,
    "proud": 1,
    "calm": 1,
    "cheerful": 1,
    "delighted": 2,
    "thrilled": 2,
    "sad": -1,
    "angry": -1,
    "afraid": -1,
    "lonely": -1,
    "worried": -1,
    "miserable": -2,
    "furious": -2,
}
PET_FEELINGS = {"safe": 1, "happy": 1, "ill": -1, "afraid": -1}  # the dog was safe
QUALITIES = {  # the party was nice
    "good": 1,
    "nice": 1,
    "lovely": 1,
    "wonderful": 2,
    "great": 2,
    "bad": -1,
    "boring": -1,
    "dull": -1,
    "terrible": -2,
    "awful": -2,
}
# The soup was tasty. The baker was kind. Anna smiled.
TASTES = {"good": 1, "tasty": 1, "delicious": 2, "bad": -1, "bitter": -1, "rotten": -2}
MANNERS = {"kind": 1, "friendly": 1, "funny": 1, "rude": -1, "mean": -1, "cruel": -2}
REACTIONS = {
    **{"smiled": 1, "laughed": 1, "cheered": 1},
    **{"cried": -1, "sighed": -1, "complained": -1},
}
ATTITUDES = {"loved": 2, "liked": 1, "hated": -2, "disliked": -1}  # Anna loved the song
WISHES = {"love": 2, "like": 1, "hate": -2, "dislike": -1}  # Anna did not love the song
ADVERBS = {"happily": 1, "proudly": 1, "sadly": -1, "angrily": -1}  # Anna happily read a book
MOODS = {"joy": 1, "hope": 1, "fear": -1, "anger": -1}  # with joy, no fear
EVENTS = {  # words of the small events that make people glad or sad
    "praised": 1,
    "thanked": 1,
    "helped": 1,
    "gift": 1,
    "won": 1,
    "prize": 1,
    "fun": 1,
    "laughter": 1,
    "scolded": -1,
    "lost": -1,
    "broke": -1,
    "stolen": -1,
    "forgot": -1,
    "hurt": -1,
    "mistake": -1,
    "trouble": -1,
}
GROUPS = {
    "feel": FEELINGS,
    "pet_feel": PET_FEELINGS,
    "quality": QUALITIES,
    "taste": TASTES,
    "manner": MANNERS,
    "react": REACTIONS,
    "attitude": ATTITUDES,
    "wish": WISHES,
    "adverb": ADVERBS,
    "mood": MOODS,
    "event_word": EVENTS,
}
LEXICON = {word: valence for group in GROUPS.values() for word, valence in group.items()}

INTENSITY = {"very": 1.5, "really": 1.5, "extremely": 2.0, "slightly": 0.5, "little": 0.5}
NEGATORS = {"not", "never", "no", "without", "nobody", "nothing", "neither", "hardly"}
REOPENERS = {"or", "nor"}  # "not sad or angry": the second word is negated too
CLAUSE_ENDS = {
    ".",
    ",",
    ";",
    ":",
    "!",
    "?",
    "and",
    "but",
    "because",
    "when",
    "although",
    "while",
    "who",
    "which",
    "that",
    "until",
}
KNOWN = {*LEXICON, *INTENSITY, *NEGATORS, *REOPENERS, *CLAUSE_ENDS}

SCOPE = 4  # a negation reaches at most this many words ahead, and never past the end of its clause
FLIP = -0.7  # "not happy" is a little weaker than the opposite of "happy"
REPEAT = 0.5  # the n-th use of the same word counts REPEAT ** (n - 1): all repeats together at most double it
LIMIT = 6.0  # scores lie between -LIMIT and LIMIT

NOISE = 1.0  # temperature of the labeler, in units of score; the larger, the more random the labels


def gold_score(queries, responses):
    """Return the true sentiment of every response, read as the continuation of its query.

    Only words of the response count, but the query may hold the negation or the degree that applies to them.
    A word cut in two by the border counts if its two halves make a word that the judge knows.

    >>> def show(queries, responses):
    ...     return [round(score, 2) for score in gold_score(queries, responses)]
    >>> show(["Anna was", "Anna was", "Anna was not", "Anna was happy"], [" happy.", "", " happy.", " again."])
    [0.99, 0.0, -0.7, 0.0]
    >>> show([""] * 5, ["never sad", "not very happy", "very happy", "a little sad", "not sad or angry"])
    [0.7, -0.31, 1.47, -0.5, 1.38]
    >>> show([""] * 3, ["happy happy", "happy happy happy happy happy", "very very very happy"])
    [1.47, 1.87, 1.47]
    >>> show(["He was no", "He was cheer", "I qz"], [" longer afraid", "ful", "\\x00 #s."])
    [0.7, 0.99, 0.0]
    """
    return [_score(query, response) for query, response in zip(queries, responses, strict=True)]


def _words(text):
    return re.findall(r"[a-z]+|[.,;:!?]", text.lower().replace("n't", " not "))


def _score(query, response):
    context, words = _words(query), _words(response)
    # A token border can lie inside a word: "cheer" + "ful". Unknown joins, "not" + "happy", stay two words.
    touching = query[-1:].isalpha() and response[:1].isalpha() and context and words
    if touching and context[-1] + words[0] in KNOWN:
        words[0] = context.pop() + words[0]

    total, uses = 0.0, {}
    negated = False  # a negation waits for its feeling word
    spent = False  # this clause's negation has found one
    reach, degree, previous = 0, 1.0, ""
    for position, word in enumerate(context + words):
        if word in CLAUSE_ENDS:
            negated = spent = False
        elif word in NEGATORS:
            negated, reach = not negated, SCOPE
        elif word in REOPENERS:
            negated, reach = negated or spent, SCOPE
        elif word in LEXICON:
            if position >= len(context):
                uses[word] = uses.get(word, 0) + 1
                total += _value(word, negated, degree) * REPEAT ** (uses[word] - 1)
            negated, spent = False, negated
        elif word not in INTENSITY and negated:
            reach -= 1
            negated = reach > 0
        # A degree touches only the next word, and the last one wins: "very very very" is no more than "very".
        is_degree = word in INTENSITY and (word != "little" or previous == "a")
        degree = INTENSITY[word] if is_degree else 1.0
        previous = word
    return LIMIT * math.tanh(total / LIMIT)


def _value(word, negated, degree):
    # "not very happy" denies the degree more than the feeling, hence a strong degree weakens the flip.
    return LEXICON[word] * (FLIP / max(degree, 1.0) ** 2 if negated else degree)


def choice_probabilities(scores):
    """Return the probability softmax(scores / NOISE) that the labeler prefers each candidate.

    >>> choice_probabilities([1.0, 1.0])
    [0.5, 0.5]
    """
    top = max(scores)
    weights = [math.exp((score - top) / NOISE) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def human_choice(scores, rng):
    """Return the index of the candidate that the noisy labeler prefers.

    `rng` is anything whose `random()` is uniform on [0, 1): a `random.Random` or a numpy Generator.

    >>> import random
    >>> human_choice([-30.0, 30.0, 0.0], random.Random(0))
    1
    """
    draw = rng.random()
    for index, probability in enumerate(choice_probabilities(scores)):
        draw -= probability
        if draw < 0:
            return index
    return len(scores) - 1  # rounding can leave the sum of the probabilities a hair below one


def best_accuracy(scores):
    """Return the expected accuracy of a perfect predictor of the labeler, given one list of scores a comparison.

    The labeler is random, so even one who knows the true scores and the noise can do no better than to name the
    candidate most likely to be chosen, and is right with the probability of that choice. The mean of this largest
    probability over the comparisons is therefore a ceiling for every reward model.

    >>> best_accuracy([[0.0, 0.0], [1000.0, 0.0]])
    0.75
    """
    return sum(max(choice_probabilities(row)) for row in scores) / len(scores)
