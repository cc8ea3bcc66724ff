"""Loading and checking language models. Tags such as (P4): docs/details.md."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from machinery.cli import InputError, about, say
from machinery.decoding import DecodingBatch
from machinery.sources import find_model
from machinery.tokens import check_length, read_config, read_files, same_tokens
from machinery.unpadding import compute_hidden, set_unpadding
from utils import pad_left

# Names in a checkpoint that also reads images → names in its text model:
TEXT_WEIGHTS = {
    "^language_model.lm_head": "lm_head",
    "^(model.)?language_model.(model.)?(?!lm_head)": "model.",
}
ALIGNMENT = {"cuda": 8}  # an odd vocabulary, such as GPT-2's, takes slower kernels


class Float32Linear(nn.Linear):
    """Linear in fp32: GPT-2's logits are near -70, where bf16 has steps of 0.5."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] of any dtype → [..., V] in fp32."""
        size, weight = len(self.weight), self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            if size == 1:  # on GPUs, the gradient of a matrix-vector product takes 2 ms
                output = (input.float() * weight).sum(dim=-1, keepdim=True)
                return output if bias is None else output + bias
            if more := -size % ALIGNMENT.get(input.device.type, 1):
                weight = nn.functional.pad(weight, (0, 0, 0, more))
                bias = None if bias is None else nn.functional.pad(bias, (0, more))
            return nn.functional.linear(input.float(), weight, bias)[..., :size]


class ScalarHead(Float32Linear):
    """A number for each hidden state of a model: [..., D] → [..., 1] in fp32."""

    def __init__(self, config: transformers.PretrainedConfig):
        width = getattr(config, "word_embed_proj_dim", None)  # OPT-350m's head reads a projection
        super().__init__(width or config.hidden_size, 1)


def store_as_cast(model: nn.Module) -> None:
    """Store the weights of frozen linear layers in bf16: autocast would cast them in each pass.

    In a trained model, only those under adapters, since others may be saved. The head stays fp32.
    From then on the model only works under autocast.
    """
    trained = any(weight.requires_grad for weight in model.parameters())
    for name, module in model.named_modules():
        is_frozen = not trained or name.endswith(".base_layer")
        if is_frozen and type(module) in (nn.Linear, Conv1D):
            module.to(torch.bfloat16)


def load_lm(
    name: str,
    flag: str = "--base_model",
    length: int = 6,
    tokenizer: Any = None,
    allow_random: bool = False,  # for a folder without weights
) -> "transformers.PreTrainedModel":
    """A causal language model in fp32 without dropout (P4), its head outside autocast.

    Raises `InputError` if weights are missing, `length` tokens give wrong results, or tokenizers
    differ. Under FSDP2 all processes have to call this.
    """
    with about(f"{flag} {name}"):
        folder = find_model(name)
        whole = read_config(folder)
        check_files(folder, whole, length, tokenizer)
        config = disable_dropout(whole.get_text_config())
        config.tie_word_embeddings = whole.tie_word_embeddings  # the whole model decides
        cls = transformers.AutoModelForCausalLM
        has_weights = any(Path(folder).glob("*.safetensors")) or any(Path(folder).glob("*.bin"))
        if allow_random and Path(name).is_dir() and not has_weights:
            say(f"{flag} {name} has no model.safetensors: the weights are random")
            lm = cls.from_config(config, dtype=torch.float32)
        elif config is whole:
            lm = load_weights(cls, name, config)
        else:
            lm = load_weights(cls, name, config, key_mapping=TEXT_WEIGHTS)
            lm._weight_conversions = None  # save the text model's names
            tied = lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
            lm.config.tie_word_embeddings = tied  # files of an untied head need not say so
        lm.get_output_embeddings().__class__ = Float32Linear  # keeps names and tied weights
        choose_kernels(lm)
        if reads_weights():
            check_model(lm, length)
        match_first_process(lm.base_model, lm)
    return lm


def check_files(folder: str, config: Any, length: int, tokenizer: Any) -> None:
    """Raise `InputError` for a model that cannot be used, before its weights are read."""
    if tokenizer and not same_tokens(read_files(transformers.AutoTokenizer, folder), tokenizer):
        raise InputError("its tokens differ from those of the policy")
    text = config.get_text_config()
    check_length(text, length, "the run")
    if type(text) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{config.model_type} has no text model; use a text one, such as Qwen3")


def reads_weights() -> bool:
    """Whether this process reads weights: under FSDP2 only the first one."""
    return not dist.is_initialized() or dist.get_rank() == 0 or not AcceleratorState().is_fsdp2


def match_first_process(backbone: Any, lm: Any = None) -> None:
    """Under FSDP2, unpad and tie the head as the first process does."""
    if dist.is_initialized() and AcceleratorState().is_fsdp2:
        tied = lm and lm.get_output_embeddings().weight is lm.get_input_embeddings().weight
        longest, tied = broadcast_object_list([getattr(backbone, "max_unpadded", 0), tied])
        set_unpadding(backbone, longest)
        if tied:
            lm.tie_weights()


def load_weights(cls: Any, name: str, config: Any, **options: Any) -> Any:
    """A model of an Auto class in fp32, without random weights."""
    if not reads_weights():
        with no_init_weights():  # memory that is never written takes no room
            return cls.from_config(config, dtype=torch.float32)
    folder = find_model(name, weights=True)
    if not any(Path(folder).glob("model*.safetensors")):
        kind = cls.__name__
        use = f"write them with {kind}.from_pretrained({name!r}).save_pretrained(FOLDER)"
        raise InputError(f"has no weights in model.safetensors; {use}")
    options.update(config=config, dtype=torch.float32, output_loading_info=True)
    model, info = cls.from_pretrained(folder, **options)
    if info["missing_keys"]:
        raise InputError(f"has no {sorted(info['missing_keys'])[0]}, which would be random")
    if unused := sorted(info["unexpected_keys"]):  # the library's report is turned off
        say(f"{name}: {len(unused)} weights are not used, such as {unused[0]}")
    return model


@torch.no_grad()
@torch.autocast("cpu", enabled=False)  # a caller may have turned it on
def check_model(lm: "transformers.PreTrainedModel", length: int = 6) -> None:
    """Choose how to unpad. Raise `InputError` if a result differs from that of `lm(...)` itself.

    Compares, on the CPU and in fp32, log-probabilities of the last 3 tokens of three texts, two of
    them equal: each alone, all in a batch without padding in training mode, and token by token as
    in sampling. Two are as long as the run's, so that no attention window is missed.
    """
    kind = lm.config.model_type
    backbone = lm.base_model
    use = "shorter sequences, GPT-2, Llama or Qwen"  # LongRoPE changes with the length
    if backbone is lm:
        raise InputError(f"{kind} has no transformer without a head; use {use}")
    length = max(length, 6)
    texts = [[i % lm.config.vocab_size for i in range(n)] for n in (length, length, 3)]
    tokens = pad_left(texts, length, -1)
    mask = tokens >= 0
    position_ids = mask.cumsum(dim=1) - mask.long()
    lm.eval()
    first = lm(torch.tensor(texts[:1]), logits_to_keep=3).logits
    last = lm(torch.tensor(texts[2:]), logits_to_keep=3).logits
    expected = torch.cat([first, first, last]).log_softmax(dim=-1)  # [3, 3, V]
    limit = 0.01 * expected.std(dim=-1).mean().clamp(max=1).item()  # less if nearly uniform

    for longest in (length, 0):  # 0: a model that needs its padding keeps it
        set_unpadding(backbone, longest)
        lm.train()
        inputs = tokens.clamp(min=0), mask, position_ids
        hidden = compute_hidden(backbone, *inputs, prompt_length=length // 2)
        lm.eval()
        found = compute_logits(lm, hidden[:, -3:]).log_softmax(dim=-1)
        gap = (found - expected).abs().max()
        if gap < limit:
            break
    if not gap < limit:  # also if it is not a number
        raise InputError(f"{kind} is wrong by {gap:.2g} nats in training mode; use {use}")

    sampling = DecodingBatch(lm, tokens[:, :-2], mask[:, :-2], max_new_tokens=2)
    steps = [sampling.next_logits()]
    for t in (-2, -1):
        sampling.append(tokens[:, t])
        steps.append(sampling.next_logits())
    found = torch.stack(steps, dim=1).log_softmax(dim=-1)
    gap = (found - expected).abs().max()
    if not gap < limit:
        raise InputError(f"{kind} is wrong by {gap:.2g} nats in sampling; use {use}")


def disable_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Set all randomness of training mode to 0: dropout and router noise (P4)."""
    for key, value in config.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    if getattr(config, "output_router_logits", False):  # for a loss that is not computed here
        config.output_router_logits = False
    if getattr(config, "attn_logit_softcapping", None):  # Gemma 2; 5.19's sdpa forgets it
        config._attn_implementation = "eager"
    return config


def choose_kernels(model: nn.Module) -> None:
    """Compute GPT-2's `gelu_new` as one kernel."""
    from transformers.activations import NewGELUActivation  # slow to import

    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def compute_logits(lm: "transformers.PreTrainedModel", hidden: Tensor) -> Tensor:
    """The language model's head: hidden states [..., D] → logits [..., V]."""
    logits = lm.get_output_embeddings()(hidden)
    if scale := getattr(lm.config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(lm.config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(lm.config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


def new_backbone(config: transformers.PretrainedConfig) -> Any:
    """A transformer with random weights in fp32 and without dropout."""
    backbone = transformers.AutoModel.from_config(disable_dropout(config), dtype=torch.float32)
    choose_kernels(backbone)
    return backbone
