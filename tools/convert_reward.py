"""A classifier with one label, as TRL's RewardTrainer saves it → a folder for --reward_model.

    python tools/convert_reward.py trl-lib/pythia-1b-deduped-tldr-rm models/tldr/rm

The policy has to have its tokens; tools/classifier.py is for other ones. The model then reads the
policy's token ids, is sharded under FSDP2, and scores as the classifier does.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
import tyro

sys.path.append(str(Path(__file__).parents[1]))
from machinery import cli, models  # noqa: E402
from machinery.sources import find_model  # noqa: E402
from machinery.tokens import bos, read_config  # noqa: E402
from train_reward import RewardConfig, RewardModel  # noqa: E402


@dataclass(frozen=True)
class Args:
    """A classifier with one label, as TRL's RewardTrainer saves it → a folder for --reward_model."""

    name: tyro.conf.Positional[str]
    """folder or hub name of the classifier"""
    out: tyro.conf.Positional[str]
    """folder to write"""


def main(name: str, out: str) -> None:
    """Read the classifier `name`, a folder or a name on the hub; write the folder `out`."""
    kind = transformers.AutoModelForSequenceClassification
    with cli.about(name):
        config = models.disable_dropout(read_config(find_model(name)))
        if config is not config.get_text_config():
            raise cli.InputError(f"{config.model_type} also reads images: use tools/classifier.py")
        classifier = models.load_weights(kind, name, config)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        if config.num_labels != 1 or not hasattr(classifier, "score"):
            raise cli.InputError("is no decoder with one label: use tools/classifier.py")
        if config.pad_token_id is not None and config.pad_token_id == tokenizer.eos_token_id:
            raise cli.InputError("its pad is its end of text, which it skips: tools/classifier.py")
        config = RewardConfig(config, config.vocab_size, begin=bos(tokenizer))
        model = RewardModel(config, classifier.base_model)
        model.head.weight = torch.nn.Parameter(classifier.score.weight)
        model.save_pretrained(Path(out))
        tokenizer.save_pretrained(out)


if __name__ == "__main__":
    cli.run(lambda args: main(args.name, args.out), Args)
