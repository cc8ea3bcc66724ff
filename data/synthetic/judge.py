"""The judge of the synthetic task: a true sentiment score and a noisy labeller who sees it.

The lexicon below is the only place that knows what words are worth. `generate.py` builds its sentences from the
same groups, so every feeling word of the data is a word that the judge understands. No dependencies.
"""

import math
import re

# Valences run from -2 to 2. The groups differ in where a sentence can use the word.
FEELINGS = {  # Anna was happy
    "happy": 1.5, "glad": 1.2, "cheerful": 1.5, "proud": 1.2, "calm": 0.7, "excited": 1.2, "delighted": 2.0,
    "grateful": 1.3, "hopeful": 1.0, "pleased": 1.2, "brave": 1.0, "thrilled": 2.0,
    "sad": -1.5, "angry": -1.5, "afraid": -1.2, "lonely": -1.3, "worried": -1.2, "upset": -1.3, "bored": -0.7,
    "miserable": -2.0, "nervous": -1.0, "ashamed": -1.2, "gloomy": -1.2, "furious": -2.0,
}
PET_FEELINGS = {  # the dog was safe
    "safe": 0.7, "gentle": 1.0, "clever": 0.8, "happy": 1.5, "ill": -0.9, "afraid": -1.2, "lonely": -1.3, "dirty": -0.8,
}
QUALITIES = {  # the party was nice
    "good": 1.0, "nice": 1.0, "lovely": 1.4, "wonderful": 2.0, "beautiful": 1.5, "pleasant": 1.0, "great": 1.8,
    "bad": -1.0, "terrible": -2.0, "awful": -2.0, "ugly": -1.4, "boring": -1.0, "dull": -0.8, "unpleasant": -1.0,
}
TASTES = {  # the soup was delicious
    "good": 1.0, "delicious": 2.0, "tasty": 1.2, "fresh": 0.6, "bad": -1.0, "rotten": -1.8, "bitter": -0.8,
    "sour": -0.7,
}
MANNERS = {  # the baker was kind
    "kind": 1.3, "friendly": 1.3, "funny": 1.0, "polite": 0.9, "gentle": 1.0, "honest": 0.9,
    "rude": -1.3, "cruel": -2.0, "mean": -1.2, "selfish": -1.2, "nasty": -1.5,
}
REACTIONS = {  # Anna smiled
    "smiled": 1.0, "laughed": 1.2, "cheered": 1.2, "cried": -1.3, "sighed": -0.7, "complained": -1.0, "frowned": -0.8,
}
ATTITUDES = {"loved": 1.6, "liked": 0.9, "enjoyed": 1.2, "hated": -1.7, "disliked": -1.0}  # Anna loved the song
WISHES = {"love": 1.6, "like": 0.9, "enjoy": 1.2, "hate": -1.7, "dislike": -1.0}  # Anna did not love the song
ADVERBS = {"happily": 1.3, "gladly": 1.0, "proudly": 1.0, "sadly": -1.3, "angrily": -1.3, "nervously": -0.9}
MOODS = {"joy": 1.5, "hope": 1.0, "pleasure": 1.2, "fear": -1.1, "anger": -1.3, "sorrow": -1.3}  # with joy, no fear
EVENTS = {  # words of the small events that make people glad or sad
    "praised": 1.2, "thanked": 0.9, "hugged": 1.1, "helped": 0.8, "gift": 0.8, "won": 1.1, "prize": 0.7, "fun": 1.2,
    "laughter": 1.2, "scolded": -1.1, "lost": -0.9, "broke": -0.8, "stolen": -1.2, "forgot": -0.8, "hurt": -1.0,
    "mistake": -0.8, "trouble": -1.0,
}
GROUPS = {
    "feel": FEELINGS, "pet_feel": PET_FEELINGS, "quality": QUALITIES, "taste": TASTES, "manner": MANNERS,
    "react": REACTIONS, "attitude": ATTITUDES, "wish": WISHES, "adverb": ADVERBS, "mood": MOODS, "event_word": EVENTS,
}
LEXICON = {word: valence for group in GROUPS.values() for word, valence in group.items()}

INTENSITY = {"very": 1.5, "really": 1.4, "extremely": 1.8, "so": 1.3, "quite": 1.2, "slightly": 0.5, "little": 0.5}
NEGATORS = {"not", "never", "no", "without", "nobody", "nothing", "neither", "hardly"}
REOPENERS = {"or", "nor"}  # "not sad or angry": the second word is negated too
CLAUSE_ENDS = {
    ".", ",", ";", ":", "!", "?", "and", "but", "because", "when", "although", "while", "who", "which", "that", "until",
}
KNOWN = {*LEXICON, *INTENSITY, *NEGATORS, *REOPENERS, *CLAUSE_ENDS}

SCOPE = 4  # a negation reaches at most this many words ahead, and never past the end of its clause
FLIP = -0.7  # "not happy" is a little weaker than the opposite of "happy"
REPEAT = 0.5  # the n-th use of the same word counts REPEAT ** (n - 1): all repeats together at most double it
LIMIT = 3.0  # scores lie between -LIMIT and LIMIT

NOISE = 0.4  # temperature of the labeller, in units of score; the larger, the more random the labels


def gold_score(queries, responses):
    """Return the true sentiment of every response, read as the continuation of its query.

    Only words of the response count, but the query may hold the negation or the degree that applies to them.
    A word cut in two by the border counts if its two halves make a word that the judge knows.

    >>> def show(queries, responses):
    ...     return [round(score, 2) for score in gold_score(queries, responses)]
    >>> show(["Anna was", "Anna was", "Anna was not", "Anna was happy"], [" happy.", "", " happy.", " again."])
    [1.39, 0.0, -1.01, 0.0]
    >>> show([""] * 5, ["never sad", "not very happy", "very happy", "a little sad", "not sad or angry"])
    [1.01, -0.46, 1.91, -0.73, 1.81]
    >>> show([""] * 3, ["happy happy", "happy happy happy happy happy", "very very very happy"])
    [1.91, 2.24, 1.91]
    >>> show(["He was no", "He was cheer", "I qz"], [" longer afraid", "ful", "\\x00 #s."])
    [0.82, 1.39, 0.0]
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
    negated = spent = False  # is a negation waiting for its feeling word; has this clause's negation found one
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
    """Return the probability softmax(scores / NOISE) that the labeller prefers each candidate.

    >>> choice_probabilities([1.0, 1.0])
    [0.5, 0.5]
    """
    top = max(scores)
    weights = [math.exp((score - top) / NOISE) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]


def human_choice(scores, rng):
    """Return the index of the candidate that the noisy labeller prefers.

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
    """Return the expected accuracy of a perfect predictor of the labeller, given one list of scores a comparison.

    The labeller is random, so even one who knows the true scores and the noise can do no better than to name the
    candidate most likely to be chosen, and is right with the probability of that choice. The mean of this largest
    probability over the comparisons is therefore a ceiling for every reward model.

    >>> best_accuracy([[0.0, 0.0], [1000.0, 0.0]])
    0.75
    """
    return sum(max(choice_probabilities(row)) for row in scores) / len(scores)
