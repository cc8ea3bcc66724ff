"""Models that cannot be used are refused; nothing is random in silence, nothing is unpickled."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import peft
import pytest
import tiny
import torch
import transformers
from tiny import make_lm, refuses
from torch.testing import assert_close

import train_reward
from machinery import cli, models, rewards, runs
from machinery.models import load_lm

pytestmark = pytest.mark.usefixtures("accelerator")
RL, SCRIPTS = ("ppo", "rloo"), ("ppo", "rloo", "train_reward", "sft")
SETTINGS = {
    "phimoe": dict(num_local_experts=4, router_jitter_noise=0.5, input_jitter_noise=0.5),
    "gpt_neo": dict(window_size=4),  # columns of a static cache
    "qwen3_next": tiny.QWEN | tiny.MOE | dict(shared_expert_intermediate_size=16),
    "mixtral": dict(output_router_logits=True),
    "bert": {},  # sees later tokens
    "bert-generation": dict(initializer_range=0.02),  # the same, but nearly uniform
    "mamba": dict(state_size=4),  # takes no positions
    "llama4_text": dict(num_local_experts=2, head_dim=8),  # is its own base_model
}
MORE = ("qwen3_next", "mixtral", "gemma2", "phimoe")
ROPE = dict(type="longrope", short_factor=[1.0] * 4, long_factor=[4.0] * 4)
VOCABULARY = dict(vocab_size=tiny.WORDS, eos_token_id=0)
WINDOWS = {  # of 10 tokens; GPT-Neo's is that of local attention, Phi 3's where LongRoPE changes
    "gpt_neo": dict(window_size=10, **VOCABULARY),
    "phi3": dict(original_max_position_embeddings=10, rope_scaling=ROPE, **VOCABULARY),
}
EYES = dict(hidden_size=16, num_attention_heads=2, intermediate_size=16)
GEMMA = tiny.config("gemma3_text", layer_types=["full_attention"] * 2)
WITH_TEXT = {
    "gemma3": (GEMMA, dict(num_hidden_layers=1, image_size=28, patch_size=14)),
    "qwen3_5": (tiny.config("qwen3_5_text"), dict(depth=1, num_heads=2, out_hidden_size=32)),
    "llava": (tiny.config("llama"), dict(model_type="clip_vision_model", num_hidden_layers=1)),
}
PIXTRAL = dict(model_type="pixtral", num_hidden_layers=1, head_dim=8, image_size=32, patch_size=16)
WITH_TEXT["mistral3"] = tiny.config("mistral"), PIXTRAL
LLAMA4 = dict(vision_output_dim=16, projector_input_dim=16, projector_output_dim=16)


def check(kind):
    config = tiny.config(kind, dropout=0.5, **SETTINGS.get(kind, {}))
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(models.disable_dropout(config))
    with cli.about(f"--base_model {kind}"):
        models.check_model(lm)


@pytest.mark.parametrize("kind", (*tiny.KINDS, *tiny.HYBRIDS, *MORE))
def test_check_model_accepts_models_that_give_one_result_in_all_ways(kind):
    """Also with dropout, a soft cap, the router's noise (P4) and its logits in the config."""
    check(kind)


@pytest.mark.parametrize("kind", ["gpt_neo", "bert", "bert-generation", "mamba", "llama4_text"])
def test_check_model_refuses_architectures_by_name(kind):
    refuses(lambda: check(kind), "--base_model", kind)


@pytest.mark.parametrize("kind", WINDOWS)
def test_a_window_is_found_whatever_its_name_if_the_run_has_longer_texts(kind, start, tmp_path):
    """Each script compares at the length of its own texts: 13 tokens, or the labels'."""
    make_lm(kind, **WINDOWS[kind]).save_pretrained(tmp_path / "model")
    folder = str(tiny.write_tokenizer(tmp_path / "model"))
    load_lm(folder)
    refuses(lambda: load_lm(folder, length=12), "--base_model", "shorter sequences")
    for script in SCRIPTS:
        refuses(lambda: start(script, base_model=folder), "--base_model", kind, "nats")
    refuses(lambda: start("train_reward", policy_model=folder), "--policy_model", kind, "nats")


def test_a_reward_model_whose_scores_depend_on_other_texts_is_refused(start, tmp_path):
    """At the length of query and response, not at that of a short probe."""
    config = tiny.config("phi3", **WINDOWS["phi3"])
    torch.manual_seed(0)
    model = train_reward.RewardModel(train_reward.RewardConfig(config, tiny.WORDS))
    model.save_pretrained(tmp_path / "other")
    folder = str(tiny.write_tokenizer(tmp_path / "other"))
    for script in RL:
        refuses(lambda: start(script, reward_model=folder), "--reward_model", "phi3", "texts")
    rewards.choose_unpadding(model, 6)


def test_check_model_refuses_randomness_that_is_left_in_training_mode(monkeypatch):
    """Of PhiMoE's router without P4: the gradient would be of another loss."""
    monkeypatch.setattr(models, "disable_dropout", lambda config: config)
    refuses(lambda: check("phimoe"), "phimoe", "in training")


@pytest.mark.parametrize("script", RL)
def test_a_model_whose_head_computes_the_unknown_is_refused_at_start(script, start, monkeypatch):
    forward = transformers.GPT2LMHeadModel.forward

    @functools.wraps(forward)
    def changed(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = 2 * output.logits
        return output

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", changed)
    refuses(lambda: start(script), "gpt2", "--base_model", "nats")
    assert not Path("runs").exists()


@pytest.mark.parametrize("kind", WITH_TEXT)
def test_the_text_model_of_a_checkpoint_that_reads_images_is_loaded_and_saved(kind, tmp_path):
    text, eyes = WITH_TEXT[kind]
    config = transformers.AutoConfig.for_model(
        kind, text_config=text.to_dict(), vision_config={**EYES, **eyes}
    )
    torch.manual_seed(0)
    whole = transformers.AutoModelForImageTextToText.from_config(config).eval()
    whole.save_pretrained(tmp_path / "whole")
    lm = load_lm(str(tmp_path / "whole"))
    tokenizer = SimpleNamespace(save_pretrained=str)
    runs.save_model(lm, tokenizer, tmp_path / "text", lm.state_dict(), {})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "text").eval()
    tokens = torch.arange(9)[None]
    for model in (lm, again):
        assert_close(model(tokens).logits, whole(tokens).logits, atol=1e-5, rtol=1e-5)


def test_the_head_of_llama_4_is_found_and_its_transformer_refused(tmp_path):
    """Published names begin with `language_model.`, the head's, too."""
    text = tiny.config("llama4_text", **SETTINGS["llama4_text"]).to_dict()
    eyes = EYES | LLAMA4 | dict(num_hidden_layers=1, image_size=28, patch_size=14)
    config = transformers.AutoConfig.for_model("llama4", text_config=text, vision_config=eyes)
    whole = transformers.AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path)
    refuses(lambda: load_lm(str(tmp_path)), "--base_model", "llama4_text", "GPT-2")


FORMS = [("quantized", "bf16"), ("code", "not run"), ("bin", "save_pretrained")]


@pytest.mark.parametrize(("form", "expected"), FORMS)
def test_a_checkpoint_in_a_form_that_is_not_read_says_what_to_do(form, expected, start, tmp_path):
    """Before a package for quantized weights is asked for, and without flags that do not exist."""
    folder = tiny.write_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    if form == "quantized":
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    if form == "code":
        config |= dict(model_type="own", auto_map={"AutoConfig": "own.Config"})
    if form == "bin":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(config))
    message = refuses(lambda: start("ppo", base_model=str(folder)), f"{folder}: ", expected)
    assert len(message) < 300 and "trust_remote_code" not in message


def test_a_model_without_a_text_model_of_its_own_is_refused_by_name(tmp_path):
    """Not with the library's list of 200 others."""
    transformers.Qwen2VLConfig().save_pretrained(tmp_path)
    message = refuses(lambda: load_lm(str(tmp_path)), "--base_model", "qwen2_vl", "Qwen3")
    assert len(message) < 300


def test_heads_read_what_OPT_350m_projects():
    """Its transformer ends with a projection to another width than config.hidden_size."""
    size = dict(word_embed_proj_dim=16, do_layer_norm_before=False)
    policy, reward = tiny.make_policy("opt", **size), tiny.make_reward("opt", **size)
    contexts, responses = tiny.make_contexts([8, 3], 8), tiny.make_responses(2, 5)
    _, _, values = policy(contexts, responses)
    for row, found in enumerate(values):
        _, _, expected = tiny.run_alone(policy, contexts[row], responses[row])
        assert_close(found, expected, atol=1e-5, rtol=1e-4)
    hidden = reward.backbone(responses).last_hidden_state[:, -1]
    expected = reward.gain * reward.head(hidden).squeeze(1) + reward.bias
    assert_close(reward(responses), expected, atol=1e-5, rtol=1e-4)


def test_encoders_and_adapters_are_refused_with_what_to_do(start, tmp_path):
    config = tiny.config("bert", num_labels=1)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    refuses(lambda: start("ppo", reward_model=f"{tmp_path}/bert"), "--reward_model", "--reward_fn")
    tiny.write_model(tmp_path / "both")  # transformers would load the adapter on its own base
    for name in ("adapter", "both"):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text("{}")
        refuses(lambda: start("sft", base_model=str(folder)), "--base_model", "merge")
    adapter = str(tmp_path / "adapter")
    refuses(lambda: start("ppo", reward_model=adapter), "--reward_model", "merge")


def test_an_adapter_on_the_hub_is_refused(hub):
    """The library would load it, and freeze the weights."""
    folder = hub.commit("models", "owner/model")
    make_lm("llama").save_pretrained(folder)
    lm = transformers.AutoModelForCausalLM.from_pretrained(folder)
    peft.get_peft_model(lm, peft.LoraConfig(target_modules=["q_proj"])).save_pretrained(folder)
    refuses(lambda: load_lm("owner/model"), "--base_model owner/model: ", "adapter")


def test_a_text_may_be_as_long_as_the_model_reads(tmp_path):
    make_lm("llama", positions=16).save_pretrained(tmp_path)
    load_lm(str(tmp_path), length=16)
    refuses(lambda: load_lm(str(tmp_path), length=17), "llama", "needs 17", "reads 16")


def test_weights_that_are_missing_or_not_finite_are_refused(tmp_path):
    """They are not replaced by random ones."""
    lm = make_lm()
    lm.transformer.h[1].mlp.c_fc.weight.data[3, 4] = torch.inf
    lm.save_pretrained(tmp_path / "infinite")
    refuses(lambda: load_lm(str(tmp_path / "infinite")), "--base_model", "nan nats")
    classifier = transformers.AutoModelForSequenceClassification.from_config(tiny.config("llama"))
    classifier.save_pretrained(tmp_path / "classifier")
    refuses(lambda: load_lm(str(tmp_path / "classifier")), "--base_model", "lm_head.weight")


def test_weights_that_are_not_used_or_random_are_said(tmp_path, capsys):
    """A run turns the library's report off. Layers that the configuration lacks are left out."""
    lm, file = make_lm("llama"), tmp_path / "model.safetensors"
    lm.save_pretrained(tmp_path)
    load_lm(str(tmp_path))
    assert capsys.readouterr().out == ""
    lm.config.num_hidden_layers = 1
    lm.config.save_pretrained(tmp_path)
    load_lm(str(tmp_path))
    unused = [name for name in lm.state_dict() if ".layers.1." in name]
    assert f"{len(unused)} weights are not used, such as {min(unused)}" in capsys.readouterr().out
    file.rename(tmp_path / "model.gguf")
    load_lm(str(tmp_path), allow_random=True)
    assert f"--base_model {tmp_path} has no" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_model_without_tokenizer_files_says_so(kind, start, no_weights, tmp_path):
    """transformers makes up a tokenizer of one or two tokens for it, or of none."""
    make_lm(kind).save_pretrained(tmp_path / "bare")
    refuses(lambda: start("ppo", base_model=str(tmp_path / "bare")), "/bare", "tokenizer")


def test_soft_caps_of_attention_are_computed():
    """The library's `sdpa` leaves them out, in transformers 5.19 without a word."""
    config = tiny.config("gemma2")
    config._attn_implementation = "sdpa"
    assert models.new_backbone(config).config._attn_implementation == "eager"


@pytest.mark.parametrize("bias", [False, True])
def test_a_head_of_odd_size_is_the_plain_product_also_where_its_rows_are_aligned(monkeypatch, bias):
    """On GPUs; here, a CPU stands in."""
    monkeypatch.setitem(models.ALIGNMENT, "cpu", 8)
    head = models.Float32Linear(16, 21, bias=bias)
    hidden = torch.randn(2, 5, 16, requires_grad=True)
    logits = head(hidden)
    expected = torch.nn.functional.linear(hidden, head.weight, head.bias)
    assert_close(logits, expected)
    assert logits.stride(1) == 24  # a view of three aligned blocks
    noise = torch.randn(2, 5, 21)
    inputs = (hidden, *head.parameters())
    found = torch.autograd.grad((logits * noise).sum(), inputs)
    right = torch.autograd.grad((expected * noise).sum(), inputs)
    assert_close(found, right)
