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
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

import ppo
import rloo
import train_reward
import utils
from data import tasks
from machinery import models
from machinery.labels import Labels
from machinery.queries import cut_query
from machinery.rewards import RewardConfig, score_in_parts

GOLDEN = Path(__file__).parent / "golden"
PPO_RECORDS = sorted(path.stem for path in GOLDEN.glob("ppo_*.json"))


def load(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), dict(np.load(GOLDEN / f"{name}.npz"))


def tensors(arrays: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {
        k.removeprefix(prefix): torch.from_numpy(np.asarray(v))
        for k, v in arrays.items()
        if k.startswith(prefix)
    }


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
    lm = GPT2LMHeadModel(models.disable_dropout(config))
    missing, unexpected = lm.load_state_dict(
        {k: v for k, v in weights.items() if k.startswith("transformer.")}, strict=False
    )
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    models.use_fused_gelu(lm)  # as `load_lm` does
    return lm.eval()


def make_policy(
    hparams: dict, weights: dict[str, torch.Tensor], pad_id: int, temperature: float
) -> ppo.PolicyAndValue:
    policy = ppo.PolicyAndValue(make_lm(hparams, weights), pad_id, temperature)
    policy.value_head.load_state_dict(
        {"weight": weights["value_head.weight"][None], "bias": weights["value_head.bias"][None]}
    )
    return policy


def make_reward(
    hparams: dict, weights: dict[str, torch.Tensor], pad_id: int
) -> train_reward.RewardModel:
    model = train_reward.RewardModel(RewardConfig(make_lm(hparams, weights).config, pad_id))
    model.backbone.load_state_dict(
        {
            k.removeprefix("transformer."): v
            for k, v in weights.items()
            if k.startswith("transformer.")
        }
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
        torch.testing.assert_close(
            ours[name], value, atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


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
    params = {
        name: torch.nn.Parameter(torch.from_numpy(np.array(arrays[f"init/{name}"])))
        for name in record["shapes"]
    }
    optimizer = script.AdamTF(
        params.values(),
        lr=record["base_lr"],
        betas=(record["beta1"], record["beta2"]),
        eps=record["epsilon"],
    )
    for step in range(record["steps"]):
        for name, param in params.items():
            param.grad = torch.from_numpy(np.array(arrays[f"grad/{name}"][step]))
        optimizer.param_groups[0]["lr"] = float(arrays[f"{schedule}/lr"][step])
        optimizer.step()
        for name, param in params.items():
            torch.testing.assert_close(
                param.detach(),
                torch.as_tensor(arrays[f"{schedule}/params/{name}"][step]),
                atol=2e-6,
                rtol=0,
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
        mask = tokens != pad_id
        inputs = tokens.masked_fill(~mask, 0), mask, mask.cumsum(dim=1) - mask.long()
        hidden = policy.backbone(*inputs)
        for ours, name in (
            (models.compute_logits(policy.lm, hidden), "logits"),
            (hidden, "h"),
            (policy.value_head(hidden).squeeze(-1), "value"),
            (reward.head(reward.run_backbone(*inputs)).squeeze(-1), "reward"),
        ):
            torch.testing.assert_close(
                ours[real], torch.from_numpy(arrays[f"{batch}/{name}"])[real], atol=1e-5, rtol=0
            )


@pytest.mark.parametrize("script", [ppo, rloo])
def test_P1_logprobs_entropies_and_values_of_responses(script):
    """rloo has no values."""
    record, arrays = load("model")
    pad_id, key = (
        record["padding_token"],
        next(k for k in arrays if k.startswith("policy_analyze_T")).split("/")[0],
    )
    policy = make_policy(
        record["model_hparams"],
        tensors(arrays, "weights/"),
        pad_id,
        float(key.removeprefix("policy_analyze_T")),
    )
    if script is rloo:
        policy = rloo.Policy(policy.lm, pad_id, policy.temperature)
    contexts, responses = (
        left(arrays["queries"], pad_id),
        torch.from_numpy(arrays["responses"]).long(),
    )
    ours = policy(contexts, responses)
    names = ("logprobs", "entropies", "values")[: 2 if script is rloo else 3]
    for value, name in zip(ours, names, strict=True):
        torch.testing.assert_close(
            value, torch.from_numpy(arrays[f"{key}/{name}"]), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("batch", ["mid", "mid_trailing"])
def test_R1_the_reward_is_read_at_the_last_real_token(batch):
    record, arrays = load("model")
    pad_id = record["padding_token"]
    model = make_reward(
        record["model_hparams"],
        tensors(arrays, "weights/")
        | tensors({k: v for k, v in arrays.items() if k.startswith("reward_norm")}, ""),
        pad_id,
    )
    tokens = torch.from_numpy(arrays[f"{batch}/tokens"]).long()
    expected = torch.from_numpy(arrays[f"score_fn/{batch}"])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(score_in_parts(model, tokens, 40), expected, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------------------------ P5, P3


@pytest.mark.parametrize("name", json.loads((GOLDEN / "score_fn.json").read_text())["configs"])
@pytest.mark.parametrize("script", [ppo, rloo])
def test_P5_truncation_and_penalty(script, name):
    record, arrays = load("score_fn")
    config, pad_id = record["configs"][name], record["padding_token"]
    model = make_reward(record["model_hparams"], tensors(arrays, "reward_weights/"), pad_id)
    queries, responses = (
        left(arrays["queries"], pad_id),
        torch.from_numpy(arrays["responses"]).long(),
    )
    task = replace(
        tasks.BOOKS,
        truncate_after=config["truncate_after"],
        missing_eos_penalty=config["penalty_reward_value"],
    )
    ids = utils.TokenIds(pad_id, config["truncate_token"], [], [])
    reward = tiny.reward_function(model, max_tokens=50)
    args = script.Args(task=task)
    scores, cut, ended = script.score_responses(reward, queries, responses, {}, ids, args)
    assert torch.equal(cut, torch.from_numpy(arrays[f"{name}/postprocessed"]).long())
    assert ended.tolist() == [config["valid"][row] for row in record["row_names"]]
    expected = torch.from_numpy(arrays[f"{name}/scores"])
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=0)


QUERY = json.loads((GOLDEN / "query.json").read_text())


@pytest.mark.parametrize("setting", QUERY["outputs"])
def test_P3_queries_start_and_end_where_openais_do(setting):
    length, pad_id, setting = (
        QUERY["sequence_length"],
        QUERY["padding_token"],
        QUERY["outputs"][setting],
    )
    for name, tokens in QUERY["inputs"].items():
        ends = (
            [token == setting["end_token"] for token in tokens]
            if setting["end_token"] is not None
            else None
        )
        cut = cut_query(tokens, length, setting["start_token"], ends)
        expected = setting["results"][name]
        if expected is None:
            assert cut is None, name
        else:
            assert torch.equal(
                utils.pad_left([cut], length, pad_id), left(np.array([expected]), pad_id)
            ), name


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
def test_ppo_reproduces_every_update(name, micro_batch_tokens, accelerator):
    """`main` on recorded queries, responses and permutations makes OpenAI's rollouts, statistics of
    each minibatch, learning rates, KL coefficients, weights and moments (G5, P1, P5-P11, A1)."""
    record, arrays = load(name)
    args, pad_id = ppo_args(record, micro_batch_tokens), record["padding_token"]
    temperature, hparams = args.task.temperature, record["model_hparams"]
    policy = make_policy(hparams, tensors(arrays, "init/policy/"), pad_id, temperature)
    ref = ppo.PolicyAndValue(make_lm(hparams, tensors(arrays, "init/ref/")), pad_id, temperature)
    reward = make_reward(hparams, tensors(arrays, "init/reward/"), pad_id)
    truncate_token = record["hparams"]["task"]["truncate_token"]
    ids = utils.TokenIds(pad_id, truncate_token, record["prefix_tokens"], record["suffix_tokens"])
    updates = [update_arrays(arrays, i) for i in range(record["nupdates"])]
    size = args.batch_size // args.num_minibatches
    epochs = [[[*torch.from_numpy(order).split(size)] for order in u["order"]] for u in updates]
    rollouts, steps = [], [{}]

    def spy_losses(*arguments):
        *losses, stats = ppo_losses(*arguments)
        for key, value in stats.items():
            steps[-1][key] = steps[-1].get(key, 0) + value
        return *losses, stats

    def check_update(update, metrics):
        if update == len(updates):  # the last evaluation
            return
        u = updates[update]
        assert metrics["objective/kl_coef"] == pytest.approx(float(u["kl_coef_before"]), abs=1e-7)
        assert metrics["ppo/lr"] == pytest.approx(float(u["lr"]), rel=1e-6)
        check_rollout(rollouts[-1], u, first=update == 0)
        own_steps = steps[-1 - args.num_ppo_epochs * args.num_minibatches : -1]
        for key in (key for key in u if key.startswith("mb_stats/")):
            ours = key.removeprefix("mb_stats/")
            ours = ours if ours in own_steps[0] else f"{ours}_avg"
            if ours in own_steps[0]:  # the others are means of `step_stats` below
                values = torch.stack([step[ours] for step in own_steps])
                torch.testing.assert_close(values, torch.from_numpy(u[key]), atol=2e-5, rtol=0)
        for key in (key for key in u if key.startswith("step_stats/") and "elapsed" not in key):
            ours = key.removeprefix("step_stats/").replace("objective/score", "objective/scores")
            ours = ours.replace("scores_total", "score_total")
            ours = ours if ours in metrics else f"{ours}_avg"
            assert metrics[ours] == pytest.approx(float(u[key]), abs=2e-5), (update, key)
        assert_weights(policy, tensors(u, "weights/"), atol=2e-5)
        kl = metrics["objective/kl"]
        kl_coef = metrics["objective/kl_coef"]
        following = [script.next_kl_coef(kl_coef, kl, args) for script in (ppo, rloo)]
        assert following == pytest.approx([float(u["kl_coef_after"])] * 2, rel=2e-6)

    ppo_losses, step = ppo.ppo_losses, ppo.AdamTF.step
    spy_step = lambda self, closure=None: (steps.append({}), step(self))  # noqa: E731
    run = tiny.run_updates(
        ppo,
        args,
        policy,
        ref,
        tiny.reward_function(reward, 70),
        queries=[torch.from_numpy(u["queries"]).long() for u in updates],
        responses=[torch.from_numpy(u["responses"]).long() for u in updates],
        epochs=epochs,
        after=check_update,
        ids=ids,
        Rollout=tiny.keep(ppo.Rollout, rollouts),
        ppo_losses=spy_losses,
        AdamTF=type("Spy", (ppo.AdamTF,), {"step": spy_step}),
    )
    assert len(run.metrics) == record["nupdates"] + 1
    state = dict(zip(golden_names(policy), policy.parameters(), strict=True))
    for slot, ours in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        for key, value in tensors(updates[-1], f"{slot}/").items():
            moment = run.optimizer.optimizer.state[state[key]][ours]
            torch.testing.assert_close(moment.squeeze(), value.squeeze(), atol=2e-5, rtol=0)


def update_arrays(arrays: dict[str, np.ndarray], update: int) -> dict[str, np.ndarray]:
    """The recorded arrays of one update."""
    prefix = f"u{update}/"
    return {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}


def check_rollout(rollout: ppo.Rollout, u: dict[str, np.ndarray], first: bool) -> None:
    """Compare with the recorded numbers; later, weights that are 2e-5 off are amplified."""
    assert rollout.mask.all()
    assert torch.equal(rollout.responses, torch.from_numpy(u["responses"]).long())
    assert torch.equal(rollout.truncated, torch.from_numpy(u["postprocessed_responses"]).long())
    numbers = {name: getattr(rollout, name) for name in ("logprobs", "values", "scores", "rewards")}
    numbers["ref_logprobs"] = rollout.logprobs - rollout.kl
    for name, value in numbers.items():
        expected = torch.from_numpy(u[name])
        torch.testing.assert_close(value, expected, atol=1e-5 if first else 1e-4, rtol=0)


# ----------------------------------------------------------------------------------------------------- reward training


@pytest.mark.parametrize("micro_batch_tokens", [96, 4096])
def test_reward_training_reproduces_every_step(micro_batch_tokens, accelerator, monkeypatch):
    """`main` on recorded samples and labels: normalize, train, normalize again (R1-R4, A1, G5)."""
    record, arrays = load("reward")
    h, pad_id = record["hparams"], record["padding_token"]
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
    names = sorted(key for key in arrays if key.startswith("labels/sample"))
    strip = lambda tokens: [row[row != pad_id] for row in tokens]  # noqa: E731
    samples = zip(*(strip(arrays[name]) for name in names), strict=True)
    labels = Labels(
        strip(arrays["labels/query"]), [list(k) for k in samples], arrays["labels/best"]
    )
    norms = {norm["index"]: norm for norm in record["norms"]}
    estimates = [i for i, norm in norms.items() if norm["kind"].startswith("estimate")]
    texts = [
        [torch.from_numpy(arrays[f"norm{i}/{k}"]).long() for k in ("queries", "responses")]
        for i in norms
    ]
    normalize, events = train_reward.normalize, []

    def check_normalize(model, tokens, max_tokens):
        norm = norms[estimates[len(events)]]
        events.append(norm)
        result = normalize(model, tokens, max_tokens)
        assert result == pytest.approx((norm["mean"], norm["std"]), abs=2e-5)
        found = model.gain.item(), model.bias.item()
        assert found == pytest.approx((norm["gain_set"], norm["bias_set"]), abs=2e-5)
        check_rewards(norm)
        if len(events) == 1:
            assert_weights(model, tensors(arrays, "before_training/"), atol=2e-5)
        return result

    def check_rewards(after):
        """Of the recorded samples that OpenAI scores right after normalizing."""
        for i, norm in norms.items():
            same_time = norm["after_n_train_steps"] == after["after_n_train_steps"]
            if not norm["kind"].startswith("estimate") and same_time and i > after["index"]:
                rewards = score_in_parts(model, torch.cat(texts[list(norms).index(i)], 1), 50)
                expected = torch.from_numpy(arrays[f"norm{i}/rewards"])
                torch.testing.assert_close(rewards, expected, atol=2e-5, rtol=0)

    def check_step(step, metrics):
        if step == len(record["steps"]):
            return
        expected = record["steps"][step]
        assert metrics["lr"] == pytest.approx(expected["lr"], rel=1e-6)
        assert metrics["loss"] == pytest.approx(expected["loss"], abs=2e-5)
        assert metrics["accuracy"] == pytest.approx(expected["accuracy"])
        gain_and_bias = metrics["gain"], metrics["bias"]
        assert gain_and_bias == pytest.approx((expected["gain"], expected["bias"]), abs=2e-5)
        assert_weights(model, tensors(arrays, f"s{expected['step']}/weights/"), atol=2e-5)

    class Permutation:
        permutation = staticmethod(lambda n: arrays["order"])

    config = model.config.backbone
    ids = utils.TokenIds(pad_id, 13, [], [])
    tokenizer = tiny.Tokenizer()
    samples = [texts[list(norms).index(i)] for i in estimates]
    replaced = {
        "check": lambda *a: None,
        "load_tokenizer": lambda *a, **k: (tokenizer, ids),
        "load_labels": lambda *a: labels,
        "sample_policy": lambda *a: (samples, tokenizer, ids),
        "new_reward_model": lambda *a: model,
        "reward_input": lambda *a: lambda queries, responses: torch.cat([queries, responses], 1),
        "normalize": check_normalize,
        "Run": tiny.FakeRun(check_step),
    }
    for name, value in replaced.items():
        monkeypatch.setattr(train_reward, name, value)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: config)
    monkeypatch.setattr(train_reward.np.random, "default_rng", lambda seed: Permutation)
    train_reward.main(args)
    assert len(events) == 2
    assert_weights(model, tensors(arrays, "final/reward/"), atol=2e-5)
