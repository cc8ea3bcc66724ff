"""Numbers recorded from OpenAI's original code, reproduced through the functions that the scripts run.

Everything (settings, sizes, number of updates, expected values) is read from the files in golden/.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel

import packing
import ppo
import rloo
import tasks
import train_reward
import utils

GOLDEN = Path(__file__).parent / "golden"
PPO_RECORDS = sorted(path.stem for path in GOLDEN.glob("ppo_*.json"))


def load(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), dict(np.load(GOLDEN / f"{name}.npz"))


def tensors(arrays: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {k.removeprefix(prefix): torch.from_numpy(np.asarray(v)) for k, v in arrays.items() if k.startswith(prefix)}


def left(tokens: np.ndarray, pad_id: int) -> torch.Tensor:
    return utils.left_align(torch.from_numpy(tokens).long(), pad_id)


def make_lm(hparams: dict, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=hparams["n_vocab"],
        n_positions=hparams["n_ctx"],
        n_embd=hparams["n_embd"],
        n_layer=hparams["n_layer"],
        n_head=hparams["n_head"],
    )
    lm = GPT2LMHeadModel(utils.without_dropout(config))
    missing, unexpected = lm.load_state_dict(
        {k: v for k, v in weights.items() if k.startswith("transformer.")}, strict=False
    )
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    return utils.fuse_gelu(lm).eval()  # as `load_lm` does


def make_policy(hparams: dict, weights: dict[str, torch.Tensor], pad_id: int, temperature: float) -> ppo.PolicyAndValue:
    policy = ppo.PolicyAndValue(make_lm(hparams, weights), pad_id, temperature)
    policy.value_head.load_state_dict(
        {"weight": weights["value_head.weight"][None], "bias": weights["value_head.bias"][None]}
    )
    return policy


def make_reward(hparams: dict, weights: dict[str, torch.Tensor], pad_id: int) -> utils.RewardModel:
    model = utils.RewardModel(utils.RewardConfig(make_lm(hparams, weights).config, pad_id))
    model.backbone.load_state_dict(
        {k.removeprefix("transformer."): v for k, v in weights.items() if k.startswith("transformer.")}
    )
    model.head.load_state_dict(
        {"weight": weights["reward_head.weight"][None], "bias": weights["reward_head.bias"][None]}
    )
    with torch.no_grad():
        model.gain.copy_(weights.get("reward_norm.gain", torch.ones(())))
        model.bias.copy_(weights.get("reward_norm.bias", torch.zeros(())))
    return model.eval()


def golden_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Our parameters under the names and shapes of the recordings."""
    renames = {
        "lm.transformer.": "transformer.",
        "backbone.": "transformer.",
        "head.": "reward_head.",
        "gain": "reward_norm.gain",
        "bias": "reward_norm.bias",
    }
    out = {}
    for name, value in model.named_parameters():
        for ours, theirs in renames.items():
            if name.startswith(ours):
                name = theirs + name.removeprefix(ours)
                break
        out[name] = (
            value.detach().squeeze(0)
            if name.endswith("_head.weight")
            else value.detach().squeeze()
            if name.endswith(("_head.bias", "_norm.gain", "_norm.bias"))
            else value.detach()
        )
    return out


def assert_weights(model: torch.nn.Module, expected: dict[str, torch.Tensor], atol: float) -> None:
    ours = golden_names(model)
    assert set(ours) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def make_task(record: dict, **changes) -> tasks.Task:
    t = record["hparams"]["task"]
    return replace(
        tasks.BOOKS,
        task="golden",
        query_length=t["query_length"],
        response_length=t["response_length"],
        temperature=t["policy"]["temperature"],
        truncate_token=".",
        truncate_after=t["truncate_after"],
        missing_eos_penalty=t["penalty_reward_value"],
        **changes,
    )


# --------------------------------------------------------------------------------------------------------------- A1


@pytest.mark.parametrize("schedule", ["const", "anneal"])
@pytest.mark.parametrize("script", [ppo, rloo, train_reward])
def test_A1_adam_follows_tensorflow(script, schedule):
    record, arrays = load("adam")
    params = {name: torch.nn.Parameter(torch.from_numpy(np.array(arrays[f"init/{name}"]))) for name in record["shapes"]}
    optimizer = script.AdamTF(
        params.values(), lr=record["base_lr"], betas=(record["beta1"], record["beta2"]), eps=record["epsilon"]
    )
    for step in range(record["steps"]):
        for name, param in params.items():
            param.grad = torch.from_numpy(np.array(arrays[f"grad/{name}"][step]))
        lr = record["base_lr"] if schedule == "const" else script.anneal(record["base_lr"], step, record["steps"])
        assert lr == pytest.approx(float(arrays[f"{schedule}/lr"][step]), rel=1e-6)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        for name, param in params.items():
            torch.testing.assert_close(
                param.detach(), torch.as_tensor(arrays[f"{schedule}/params/{name}"][step]), atol=2e-6, rtol=0
            )
            torch.testing.assert_close(
                optimizer.state[param]["exp_avg_sq"],
                torch.as_tensor(arrays[f"{schedule}/v/{name}"][step]),
                atol=1e-7,
                rtol=1e-4,
            )


# ---------------------------------------------------------------------------------------------------- G1, G3, R1, P1


@pytest.mark.parametrize("batch", ["mid", "mid_trailing", "nopad", "left"])
def test_G3_logits_values_and_rewards_under_any_padding(batch):
    record, arrays = load("model")
    weights, pad_id = tensors(arrays, "weights/"), record["padding_token"]
    policy, reward = (
        make_policy(record["model_hparams"], weights, pad_id, 1.0),
        make_reward(record["model_hparams"], weights, pad_id),
    )
    tokens = torch.from_numpy(arrays[f"{batch}/tokens"]).long()
    real = torch.from_numpy(arrays[f"{batch}/nonpad"])
    assert torch.equal(real, tokens != pad_id)
    with torch.no_grad():
        inputs = packing.model_inputs(tokens, pad_id)
        logits = policy.lm(**inputs, use_cache=False).logits
        hidden = policy.lm.base_model(**inputs, use_cache=False).last_hidden_state
        for ours, name in (
            (logits, "logits"),
            (hidden, "h"),
            (policy.value_head(hidden).squeeze(-1), "value"),
            (reward.token_rewards(tokens).squeeze(-1), "reward"),
        ):
            torch.testing.assert_close(ours[real], torch.from_numpy(arrays[f"{batch}/{name}"])[real], atol=1e-5, rtol=0)


@pytest.mark.parametrize("script", [ppo, rloo])
def test_P1_logprobs_entropies_and_values_of_responses(script):
    """rloo has no values."""
    record, arrays = load("model")
    pad_id, key = record["padding_token"], next(k for k in arrays if k.startswith("policy_analyze_T")).split("/")[0]
    policy = make_policy(
        record["model_hparams"], tensors(arrays, "weights/"), pad_id, float(key.removeprefix("policy_analyze_T"))
    )
    if script is rloo:
        policy = rloo.Policy(policy.lm, pad_id, policy.temperature)
    contexts, responses = left(arrays["queries"], pad_id), torch.from_numpy(arrays["responses"]).long()
    with torch.no_grad():
        ours = policy(contexts, responses)
        sizes = packing.row_sizes(torch.cat([contexts, responses], dim=1), pad_id)
        ref = script.logprobs_of(policy, contexts, responses, sizes, size=40)
    names = ("logprobs", "logprobs", "entropies", "values")[: 3 if script is rloo else 4]
    for value, name in zip((ref, *ours), names, strict=True):
        torch.testing.assert_close(value, torch.from_numpy(arrays[f"{key}/{name}"]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("batch", ["mid", "mid_trailing"])
def test_R1_the_reward_is_read_at_the_last_real_token(batch):
    record, arrays = load("model")
    pad_id, query_length = record["padding_token"], arrays["queries"].shape[1]
    model = make_reward(
        record["model_hparams"],
        tensors(arrays, "weights/") | tensors({k: v for k, v in arrays.items() if k.startswith("reward_norm")}, ""),
        pad_id,
    )
    tokens = torch.from_numpy(arrays[f"{batch}/tokens"]).long()
    expected = torch.from_numpy(arrays[f"score_fn/{batch}"])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=0)
    ours = model.score(tokens[:, :query_length], tokens[:, query_length:], size=40)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------------ P5, P3


@pytest.mark.parametrize("name", json.loads((GOLDEN / "score_fn.json").read_text())["configs"])
@pytest.mark.parametrize("script", [ppo, rloo])
def test_P5_truncation_and_penalty(script, name):
    record, arrays = load("score_fn")
    config, pad_id = record["configs"][name], record["padding_token"]
    model = make_reward(record["model_hparams"], tensors(arrays, "reward_weights/"), pad_id)
    queries, responses = left(arrays["queries"], pad_id), torch.from_numpy(arrays["responses"]).long()
    task = replace(
        tasks.BOOKS, truncate_after=config["truncate_after"], missing_eos_penalty=config["penalty_reward_value"]
    )
    ids = utils.Ids(pad_id, config["truncate_token"], [], [])
    score = script.score_responses(lambda q, r: model.score(q, r, size=50), queries, responses, task, ids)
    assert torch.equal(score.cut, torch.from_numpy(arrays[f"{name}/postprocessed"]).long())
    assert score.ended.tolist() == [config["valid"][row] for row in record["row_names"]]
    torch.testing.assert_close(score.scores, torch.from_numpy(arrays[f"{name}/scores"]), atol=1e-5, rtol=0)


QUERY = json.loads((GOLDEN / "query.json").read_text())


@pytest.mark.parametrize("setting", QUERY["outputs"])
def test_P3_queries_start_and_end_where_openais_do(setting):
    length, pad_id, setting = QUERY["sequence_length"], QUERY["padding_token"], QUERY["outputs"][setting]
    for name, tokens in QUERY["inputs"].items():
        ends = [token == setting["end_token"] for token in tokens] if setting["end_token"] is not None else None
        cut = utils.cut_query(tokens, length, setting["start_token"], ends)
        expected = setting["results"][name]
        if expected is None:
            assert cut is None, name
        else:
            assert torch.equal(utils.pad_rows([cut], length, pad_id), left(np.array([expected]), pad_id)), name


# ---------------------------------------------------------------------------------------------------------- ppo runs


def ppo_args(record: dict, micro_batch_tokens: int) -> ppo.Args:
    p, r = record["hparams"]["ppo"], record["hparams"]["rewards"]
    kl = r["adaptive_kl"] or {"target": None, "horizon": 1}
    return ppo.Args(
        task=make_task(record),
        total_episodes=p["total_episodes"],
        batch_size=p["batch_size"],
        num_minibatches=p["nminibatches"],
        num_ppo_epochs=p["noptepochs"],
        micro_batch_tokens=micro_batch_tokens,
        rollout_batch_size=5,
        lr=p["lr"],
        adam_eps=record["adam"]["epsilon"],
        kl_coef=r["kl_coef"],
        kl_target=kl["target"],
        kl_horizon=kl["horizon"],
        gamma=p["gamma"],
        lam=p["lam"],
        cliprange=p["cliprange"],
        cliprange_value=p["cliprange_value"],
        vf_coef=p["vf_coef"],
        whiten_rewards=p["whiten_rewards"],
    )


@pytest.mark.parametrize("micro_batch_tokens", [36, 4096])
@pytest.mark.parametrize("name", PPO_RECORDS)
def test_ppo_reproduces_every_update(name, micro_batch_tokens):
    """G5, P1, P5–P11, A1: recorded responses in; weights, statistics of each minibatch, β, lr out, update by update."""
    record, arrays = load(name)
    args, pad_id, accelerator = ppo_args(record, micro_batch_tokens), record["padding_token"], Accelerator(cpu=True)
    temperature = args.task.temperature
    policy = make_policy(record["model_hparams"], tensors(arrays, "init/policy/"), pad_id, temperature)
    ref = ppo.PolicyAndValue(make_lm(record["model_hparams"], tensors(arrays, "init/ref/")), pad_id, temperature)
    reward = make_reward(record["model_hparams"], tensors(arrays, "init/reward/"), pad_id)
    ids = utils.Ids(
        pad_id, record["hparams"]["task"]["truncate_token"], record["prefix_tokens"], record["suffix_tokens"]
    )
    models = ppo.Models(policy, ref, lambda q, r: reward.score(q, r, size=70), ids)
    optimizer = ppo.AdamTF(policy.parameters(), lr=args.lr, eps=args.adam_eps)
    num_updates = ppo.math.ceil(args.total_episodes / args.batch_size)
    assert num_updates == record["nupdates"]
    kl_coef = args.kl_coef
    for update in range(num_updates):
        u = {k.removeprefix(f"u{update}/"): v for k, v in arrays.items() if k.startswith(f"u{update}/")}
        queries, responses = left(u["queries"], pad_id), torch.from_numpy(u["responses"]).long()
        assert kl_coef == pytest.approx(float(u["kl_coef_before"]), abs=1e-7)
        rollout, score = ppo.make_rollout(models, queries, responses, u["order"][0], kl_coef, args)
        assert rollout.mask.all() and torch.equal(rollout.responses, responses)
        assert torch.equal(score.cut, torch.from_numpy(u["postprocessed_responses"]).long())
        atol = 1e-5 if update == 0 else 1e-4  # later, weights that are 2e-5 off are amplified by the network
        for ours in ("logprobs", "values", "ref_logprobs", "scores", "rewards"):
            torch.testing.assert_close(
                getattr(rollout, ours), torch.from_numpy(u[ours]), atol=atol, rtol=0, msg=lambda m, n=ours: f"{n}: {m}"
            )

        lr = ppo.anneal(args.lr, update, num_updates)
        assert lr == pytest.approx(float(u["lr"]), rel=1e-6)
        optimizer.param_groups[0]["lr"] = lr
        steps = tiny.update(ppo, policy, optimizer, rollout, list(u["order"]), args, accelerator)
        each = [ppo.summarise(rollout, score, [step], kl_coef, pad_id, args) for step in steps]  # of one minibatch
        for key in (k for k in u if k.startswith("mb_stats/")):
            theirs = f"ppo/{key.removeprefix('mb_stats/')}"
            theirs = theirs if theirs in each[0] else f"{theirs}_avg"
            ours = torch.stack([metrics[theirs] for metrics in each])
            torch.testing.assert_close(
                ours, torch.from_numpy(u[key]), atol=2e-5, rtol=0, msg=lambda m, k=key: f"u{update} {k}: {m}"
            )
        assert_weights(policy, tensors(u, "weights/"), atol=2e-5)

        metrics = ppo.summarise(rollout, score, steps, kl_coef, pad_id, args)
        for key in (k for k in u if k.startswith("step_stats/") and "elapsed" not in k):
            theirs = (
                key.removeprefix("step_stats/")
                .replace("objective/score", "objective/scores")
                .replace("scores_total", "score_total")
            )
            ours = metrics[theirs] if theirs in metrics else metrics[f"{theirs}_avg"]
            assert float(ours) == pytest.approx(float(u[key]), abs=2e-5), (update, key)
        following = [script.next_kl_coef(kl_coef, float(metrics["objective/kl"]), args) for script in (ppo, rloo)]
        assert following == pytest.approx([float(u["kl_coef_after"])] * 2, rel=2e-6)  # from the KL, in fp32
        kl_coef = following[0]
    optimizer_state = {
        name: optimizer.state[p] for name, p in zip(golden_names(policy), policy.parameters(), strict=True)
    }
    for slot, ours in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        for key, value in tensors(u, f"{slot}/").items():
            torch.testing.assert_close(optimizer_state[key][ours].squeeze(), value.squeeze(), atol=2e-5, rtol=0)


# ----------------------------------------------------------------------------------------------------- reward training


@pytest.mark.parametrize("micro_batch_tokens", [96, 4096])
def test_reward_training_reproduces_every_step(micro_batch_tokens):
    """R1–R4, A1, G5: normalise, train, normalise again on the recorded samples and labels."""
    record, arrays = load("reward")
    h, pad_id, accelerator = record["hparams"], record["padding_token"], Accelerator(cpu=True)
    args = train_reward.Args(
        task=make_task(record),
        num_labels=h["labels"]["num_train"],
        batch_size=h["batch_size"],
        lr=h["lr"],
        micro_batch_tokens=micro_batch_tokens,
        normalize_samples=h["normalize_samples"],
        rollout_batch_size=h["rollout_batch_size"],
    )
    model = make_reward(record["model_hparams"], tensors(arrays, "init/reward/"), pad_id)
    optimizer = train_reward.AdamTF(model.parameters(), lr=args.lr)

    def normalise(norm: dict) -> None:
        queries, responses = (
            torch.from_numpy(arrays[f"norm{norm['index']}/{k}"]).long() for k in ("queries", "responses")
        )
        if norm["kind"].startswith("estimate"):
            mean, std = train_reward.normalise(model, utils.left_align(queries, pad_id), responses, size=5)
            assert (float(mean), float(std)) == pytest.approx((norm["mean"], norm["std"]), abs=2e-5)
            assert (model.gain.item(), model.bias.item()) == pytest.approx(
                (norm["gain_set"], norm["bias_set"]), abs=2e-5
            )
        else:
            rewards = model.score(queries, responses, size=50)
            torch.testing.assert_close(
                rewards, torch.from_numpy(arrays[f"norm{norm['index']}/rewards"]), atol=2e-5, rtol=0
            )

    norms = record["norms"]
    for norm in (n for n in norms if n["after_n_train_steps"] == 0):
        normalise(norm)
    assert_weights(model, tensors(arrays, "before_training/"), atol=2e-5)
    names = sorted(k.removeprefix("labels/") for k in arrays if k.startswith("labels/sample"))
    labels = train_reward.Labels(
        left(arrays["labels/query"], pad_id),
        torch.stack([torch.from_numpy(arrays[f"labels/{n}"]).long() for n in names], 1),
        torch.from_numpy(arrays["labels/best"]).long(),
    )
    order = arrays["order"]
    for step, start in zip(record["steps"], range(0, args.num_labels, args.batch_size), strict=True):
        rows = order[start : start + args.batch_size]
        assert np.array_equal(rows, arrays[f"s{step['step']}/indices"])
        rewards = train_reward.predict(model, labels.rows(rows), pad_id, args)
        torch.testing.assert_close(
            rewards, torch.from_numpy(arrays[f"s{step['step']}/logits_before_step"]), atol=2e-5, rtol=0
        )
        optimizer.param_groups[0]["lr"] = lr = train_reward.anneal(args.lr, start, args.num_labels)
        assert lr == pytest.approx(step["lr"], rel=1e-6)
        stats = train_reward.train_step(model, optimizer, labels.rows(rows), pad_id, args, accelerator)
        assert float(stats["loss"]) == pytest.approx(step["loss"], abs=2e-5)
        assert float(stats["accuracy"]) == pytest.approx(step["accuracy"])
        assert (model.gain.item(), model.bias.item()) == pytest.approx((step["gain"], step["bias"]), abs=2e-5)
        assert_weights(model, tensors(arrays, f"s{step['step']}/weights/"), atol=2e-5)
    for norm in (n for n in norms if n["after_n_train_steps"] > 0):
        normalise(norm)
    assert_weights(model, tensors(arrays, "final/reward/"), atol=2e-5)
