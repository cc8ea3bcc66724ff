"""A sequence classifier with one label, such as TRL's RewardTrainer saves, as a reward function.

    # my_reward.py
    from tools.classifier import Classifier
    score = Classifier("my_classifier")  # a folder, or a name on the hub

    python ppo.py --task tldr --reward_fn my_reward.py:score

It reads query, response and `end` by its own tokenizer. If the data set has a column `messages`, its
own chat template writes these and the response. Aim for scores with a standard deviation near 1.
"""

from functools import cached_property
from typing import Any

import torch
import transformers
from accelerate.state import PartialState

from machinery.sources import find_model


class Classifier:
    """Scores texts as `AutoModelForSequenceClassification` does, by its own tokenizer."""

    def __init__(self, name: str, end: str | None = None, batch_size: int = 32):
        self.name, self.end, self.batch_size = name, end, batch_size  # end: None is its EOS
        find_model(name)  # a resumed run reads the same commit

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """Its tokenizer and its model, on this process's device."""
        cls, name = transformers.AutoModelForSequenceClassification, find_model(self.name, True)
        model, info = cls.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
        if info["missing_keys"] or model.config.num_labels != 1:
            labels, missing = model.config.num_labels, sorted(info["missing_keys"])
            raise ValueError(f"{name} has {labels} labels, not one, or lacks weights: {missing}")
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return tokenizer, model.to(PartialState().device).eval()

    @torch.no_grad()
    def __call__(
        self, queries: list[str], responses: list[str], messages: list | None = None
    ) -> list[float]:
        """Scores of responses; `messages` are the queries as lists of messages."""
        tokenizer, model = self.loaded
        if messages is None:
            end = (tokenizer.eos_token or "") if self.end is None else self.end
            texts = [x + y + end for x, y in zip(queries, responses, strict=True)]
        else:
            answers = [[{"role": "assistant", "content": x}] for x in responses]
            chats = [x + y for x, y in zip(messages, answers, strict=True)]
            texts = tokenizer.apply_chat_template(chats, tokenize=False)
        scores: list[float] = []
        for i in range(0, len(texts), self.batch_size):
            options = dict(padding=True, padding_side="right", return_tensors="pt")
            part = texts[i : i + self.batch_size]
            inputs = tokenizer(part, add_special_tokens=messages is None, **options)
            longest = getattr(model.config, "max_position_embeddings", None)
            if longest and inputs["input_ids"].shape[1] > longest:
                raise ValueError(f"a text has over {longest} tokens, more than {self.name} reads")
            with torch.autocast(model.device.type, torch.bfloat16, model.device.type == "cuda"):
                scores += model(**inputs.to(model.device)).logits[:, 0].float().tolist()
        return scores
