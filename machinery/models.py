"""Loading tokenizers and language models, and checks that a model can be used.

Tags such as (P4) are explained in docs/details.md.
"""

import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from data.tasks import Task
from machinery.cli import InputError
from machinery.data import single_token
from machinery.decoding import Decoder
from machinery.hub import check_weights, has_weights, loading_model
from machinery.packing import Packed, run_plain
from utils import TokenIds, pad_left

KNOWN = "GPT-2, GPT-NeoX (Pythia), Llama, Qwen 2, Mistral, Falcon and similar models work"


class Float32Linear(nn.Linear):
    """A linear layer outside autocast. GPT-2's logits are near -70, where bf16 has steps of 0.5."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., D] of any dtype → [..., V] in fp32."""
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return nn.functional.linear(input.float(), self.weight.float(), bias)


def load_tokenizer(task: Task, new_tokens: int, flag: str = "--base_model") -> tuple[Any, TokenIds]:
    """The tokenizer of `task.base_model` and the token ids of the task; loads no weights.

    `new_tokens` follow each query. The pad id is one past the vocabulary (G2); the tokenizer's own
    pad token is never used. Raises `InputError` if the model cannot be used.
    """
    name = task.base_model
    with loading_model(name, flag):
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    check_config(config, name, flag)
    if not tokenizer.encode("text", add_special_tokens=False):  # transformers makes up an empty one
        raise InputError(f"{flag} {name} has no tokenizer: no tokenizer.json, or an empty one")
    if len(tokenizer) > config.vocab_size:
        raise InputError(
            f"{flag} {name}: the tokenizer has {len(tokenizer)} tokens and the model only "
            f"{config.vocab_size}; resize the model's embeddings first"
        )
    prefix, suffix = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in (task.query_prefix, task.query_suffix)
    )
    length = len(prefix) + task.query_length + len(suffix) + new_tokens
    check_length(
        config, length, f"query_length={task.query_length} with prefix, suffix and response"
    )
    truncate = single_token(tokenizer, task.truncate_token, "--truncate_token")
    if task.eos_task and truncate is None:
        raise InputError("eos_task needs a truncate_token, at which responses end")
    return tokenizer, TokenIds(config.vocab_size, truncate, prefix, suffix, length)


def check_config(config: transformers.PretrainedConfig, name: str, flag: str) -> None:
    """Raise `InputError` for an architecture that cannot be used, before loading its weights."""
    if getattr(config, "vocab_size", None) is None:
        raise InputError(f"{flag} {name} ({config.model_type}) is not a text-only model; {KNOWN}")
    cls: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if cls is None or "position_ids" not in inspect.signature(cls.forward).parameters:
        raise InputError(f"{flag} {name} ({config.model_type}) takes no position_ids; {KNOWN}")
    width = getattr(config, "word_embed_proj_dim", None)
    if width and width != config.hidden_size:  # OPT-350m
        raise InputError(
            f"{flag} {name}: word_embed_proj_dim={width} is not its hidden_size="
            f"{config.hidden_size}, which heads are made for; {KNOWN}"
        )


def check_length(config: transformers.PretrainedConfig, needed: int, what: str) -> None:
    """Raise `InputError` if a model has fewer positions than tokens to read."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and needed > longest:
        raise InputError(
            f"{what} needs {needed} tokens; {config.model_type} reads at most {longest}"
        )


def load_lm(
    name: str, flag: str = "--base_model", allow_random: bool = False, length: int = 6
) -> "transformers.PreTrainedModel":
    """A causal language model in fp32 without dropout (P4), its head outside autocast.

    Only safetensors are read. A folder without weights gives a random model if `allow_random`, and
    otherwise an `InputError`, as does a model whose results for `length` tokens would be wrong.
    """
    with loading_model(name, flag):
        config = disable_dropout(transformers.AutoConfig.from_pretrained(name))
    path = Path(name)
    if path.is_dir() and not has_weights(path):
        if not allow_random or any(path.glob("*.bin")):
            check_weights(path, flag)
        lm = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        options = dict(dtype=torch.float32, use_safetensors=True, output_loading_info=True)
        with loading_model(name, flag):
            load: Any = transformers.AutoModelForCausalLM.from_pretrained
            lm, info = load(name, config=config, **options)
        if info["missing_keys"]:  # they would be random
            missing = sorted(info["missing_keys"])[0]
            raise InputError(f"{flag} {name} is not a language model: {missing} is missing")
    head = lm.get_output_embeddings()
    head.__class__ = Float32Linear  # the same module, so names and tied weights stay
    use_fused_gelu(lm)
    check_model(lm, name, flag, length)
    return lm


def probe_inputs(
    length: int, vocab_size: int
) -> tuple[list[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """A sequence of `length` tokens and one of 3: each alone as [1, T], and a batch of three.

    The batch, where the long one is there twice, is padded on the left: input_ids, attention_mask
    and position_ids [3, length].
    """
    alone = [torch.arange(1, length + 1)[None] % vocab_size, torch.arange(7, 10)[None] % vocab_size]
    tokens = pad_left([alone[i][0].tolist() for i in (0, 0, 1)], length, -1)
    mask = tokens >= 0
    return alone, (tokens.clamp(min=0), mask, mask.cumsum(dim=1) - mask.long())


@torch.no_grad()
def check_model(lm: "transformers.PreTrainedModel", name: str, flag: str, length: int = 6) -> None:
    """Raise `InputError` if our ways to call a model give other results than `lm(...)` itself.

    The last tokens of two sequences, alone, are compared with the same two padded, packed and
    sampled token by token. One is as long as the run's, so that no window of the model is missed.
    The other one is also compared in training mode, which must not be random.
    """
    who = f"{flag} {name} ({lm.config.model_type})"
    length = max(length, 6)
    sequences, batch = probe_inputs(length, lm.config.vocab_size)
    input_ids, mask, position_ids = (x[1:] for x in batch)
    seen = mask[:, -6:]
    lm.eval()
    try:
        alone = torch.cat([lm(tokens, logits_to_keep=6).logits[0] for tokens in sequences])
        hidden = Packed(lm.base_model)(*batch, prompt_length=length // 2)[1:, -6:]
        results = {"with padding": compute_logits(lm, hidden)[seen]}
        results["token by token"] = decode_step_by_step(lm, input_ids, mask, position_ids)[
            seen[:, -3:]
        ]
        lm.train()
        hidden = run_plain(lm.base_model, *(x[2:, -6:] for x in batch))
        results["in training mode"] = compute_logits(lm, hidden)[seen[1:]]
    except Exception as error:  # of any kind, from an unsupported architecture
        raise InputError(f"{who} cannot be used: {error!r:.200}. {KNOWN}") from error
    finally:
        lm.eval()
    if not alone.isfinite().all():
        raise InputError(f"{who} has weights that are not finite")
    expected = {"token by token": alone[3:], "in training mode": alone[6:]}
    for how, logits in results.items():
        right = expected.get(how, alone)
        gap = (logits.log_softmax(dim=-1) - right.log_softmax(dim=-1)).abs().max().item()
        if not gap < 0.01:
            raise InputError(f"{who} cannot be used: {how} it differs by {gap:.2g} nats. {KNOWN}")


def decode_step_by_step(
    lm: "transformers.PreTrainedModel",
    input_ids: Tensor,
    attention_mask: Tensor,
    position_ids: Tensor,
) -> Tensor:
    """The last 3 logits [B, 3, V] as `Decoder` computes them: of a prompt, then one at a time."""
    start = input_ids.shape[1] - 2
    decoder = Decoder(lm, 2)
    output: Any = decoder(input_ids[:, :start], attention_mask[:, :start], position_ids[:, :start])
    logits = [output.logits]
    for end in range(start + 1, input_ids.shape[1] + 1):
        new = input_ids[:, end - 1 : end], attention_mask[:, :end], position_ids[:, end - 1 : end]
        output = decoder(*new, output.past_key_values)
        logits.append(output.logits)
    return torch.cat(logits, dim=1)


def disable_dropout(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Set every source of randomness in training mode to 0: dropout and router noise (P4)."""
    for key, value in config.to_dict().items():
        if ("drop" in key or "jitter" in key) and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def set_residual_dropout(lm: "transformers.PreTrainedModel", p: float) -> None:
    """Dropout in training of what attention and MLP add to the hidden states, GPT-2's resid_pdrop.

    Raises `InputError` for a model without it. The configuration keeps its 0.
    """
    attention = "resid_dropout", "post_attention_dropout", "resid_attn_dropout"
    mlp = "mlp.dropout", "post_mlp_dropout", "resid_mlp_dropout"
    found = [m for name, m in lm.named_modules() if name.endswith((*attention, *mlp))]
    if p and not found:
        raise InputError(
            f"--resid_dropout {p}: {lm.config.model_type} has no residual dropout; GPT-2, GPT-NeoX "
            "(Pythia), GPT-J and Phi have it"
        )
    for module in found:
        module.p = p


def use_fused_gelu(model: nn.Module) -> None:
    """Replace GPT-2's `gelu_new` by the same function as one kernel; the config keeps its name."""
    from transformers.activations import NewGELUActivation  # takes two seconds to import

    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


def compute_logits(lm: "transformers.PreTrainedModel", hidden: Tensor) -> Tensor:
    """The language model's head on its last hidden states: [..., D] → [..., V]."""
    logits = lm.get_output_embeddings()(hidden)
    if scale := getattr(lm.config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(lm.config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(lm.config, "final_logit_softcapping", None):  # Gemma 2
        logits = cap * torch.tanh(logits / cap)
    return logits


def new_backbone(config: transformers.PretrainedConfig) -> Any:
    """The transformer of a configuration, with random weights in fp32 and without dropout."""
    backbone = transformers.AutoModel.from_config(disable_dropout(config), dtype=torch.float32)
    use_fused_gelu(backbone)
    return backbone


def enable_gradient_checkpointing(model: "transformers.PreTrainedModel") -> None:
    """Recompute activations in the backward pass instead of keeping them."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
