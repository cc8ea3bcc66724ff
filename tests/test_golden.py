"""Numbers recorded from OpenAI's original code, reproduced through the functions that the scripts
run. Settings, sizes, number of updates and expected values are read from the files in golden/."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ppo
import rloo
import train_reward
import utils
from data import tasks
from machinery import models, queries, unpadding
from machinery.labels import Labels
from train_reward import RewardConfig

GOLDEN = Path(__file__).parent / "golden"
PPO_RECORDS = sorted(path.stem for path in GOLDEN.glob("ppo_*.json"))
THEIRS = {  # beginnings of our parameters' names, and those in the recordings
    "lm.transformer.": "transformer.",
    "backbone.": "transformer.",
    "head.": "reward_head.",
    "gain": "reward_norm.gain",
    "bias": "reward_norm.bias",
}
QUERY = json.loads((GOLDEN / "query.json").read_text())


def load(name):
    """A record, and its arrays as tensors; integers are token ids and indices."""
    tensors = {}
    for key, array in np.load(GOLDEN / f"{name}.npz").items():
        x = torch.from_numpy(array)
        tensors[key] = x.long() if x.dtype == torch.int32 else x
    return json.loads((GOLDEN / f"{name}.json").read_text()), tensors


def close(ours, theirs, atol, rtol=0.0):
    torch.testing.assert_close(ours, theirs, atol=atol, rtol=rtol)


def left(tokens, pad_id):
    """Rows of tokens, padded on the left."""
    return utils.add_affixes(tokens, utils.TokenIds(pad_id, [], [], []))


def below(prefix, arrays):
    """The arrays whose names begin with a prefix, without it."""
    return {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}


def make_lm(hparams, weights):
    config = GPT2Config(
        vocab_size=hparams["n_vocab"],
        n_positions=hparams["n_ctx"],
        n_embd=hparams["n_embd"],
        n_layer=hparams["n_layer"],
        n_head=hparams["n_head"],
    )
    lm = GPT2LMHeadModel(models.disable_dropout(config))
    lm.transformer.load_state_dict(below("transformer.", weights))
    models.choose_kernels(lm)  # as `load_lm` does
    unpadding.set_unpadding(lm.base_model, hparams["n_ctx"])
    return lm.eval()


def load_head(head, weights, name):
    weight = weights[f"{name}.weight"]
    bias = weights[f"{name}.bias"]
    head.load_state_dict(dict(weight=weight[None], bias=bias[None]))


def make_policy(hparams, weights, pad_id, temperature):
    policy = ppo.PolicyAndValue(make_lm(hparams, weights), pad_id, temperature)
    load_head(policy.value_head, weights, "value_head")
    return policy


def make_reward(hparams, weights, pad_id):
    lm = make_lm(hparams, weights)
    model = train_reward.RewardModel(RewardConfig(lm.config, pad_id))
    model.backbone.load_state_dict(lm.transformer.state_dict())
    load_head(model.head, weights, "reward_head")
    with torch.no_grad():
        model.gain.copy_(weights.get("reward_norm.gain", torch.ones(())))
        model.bias.copy_(weights.get("reward_norm.bias", torch.zeros(())))
    return model.eval()


def golden_names(model):
    """Our parameters under the names of the recordings."""
    found = {}
    for name, value in model.named_parameters():
        for prefix, theirs in THEIRS.items():
            if name.startswith(prefix):
                name = theirs + name.removeprefix(prefix)
                break
        found[name] = value
    return found


def assert_weights(model, expected):
    """The recordings have no first axis of size 1."""
    ours = golden_names(model)
    assert set(ours) == set(expected)
    for name, value in expected.items():
        close(ours[name].detach().view_as(value), value, atol=2e-5)


def make_task(record):
    t = record["hparams"]["task"]
    return replace(
        tasks.BOOKS,
        task="golden",
        query_length=t["query_length"],
        response_length=t["response_length"],
        truncate_after=t["truncate_after"],
        temperature=t["policy"]["temperature"],
        truncate_token=".",
        unfinished_score=t["penalty_reward_value"],
    )


@pytest.mark.parametrize("schedule", ["const", "anneal"])
def test_A1_adam_follows_tensorflow(schedule):
    record, arrays = load("adam")
    init = below("init/", arrays)
    params = {name: torch.nn.Parameter(init[name]) for name in record["shapes"]}
    optimizer = utils.AdamTF(
        params.values(),
        lr=record["base_lr"],
        betas=(record["beta1"], record["beta2"]),
        eps=record["epsilon"],
    )
    for step in range(record["steps"]):
        for name, param in params.items():
            param.grad = arrays[f"grad/{name}"][step]
        optimizer.param_groups[0]["lr"] = arrays[f"{schedule}/lr"][step].item()
        optimizer.step()
        for name, param in params.items():
            close(param.detach(), arrays[f"{schedule}/params/{name}"][step], atol=2e-6)
            moment = optimizer.state[param]["exp_avg_sq"]
            close(moment, arrays[f"{schedule}/v/{name}"][step], atol=1e-7, rtol=1e-4)


@tiny.both
def test_G3_P1_logprobs_entropies_and_values_of_responses(script):
    """rloo has no values."""
    record, arrays = load("model")
    pad_id = record["padding_token"]
    temperature = 0.7
    key = f"policy_analyze_T{temperature}"
    policy = make_policy(record["model_hparams"], below("weights/", arrays), pad_id, temperature)
    if script is rloo:
        policy = rloo.Policy(policy.lm, pad_id, temperature)
    ours = policy(left(arrays["queries"], pad_id), arrays["responses"])
    for value, name in zip(ours, ("logprobs", "entropies", "values"), strict=script is ppo):
        close(value, arrays[f"{key}/{name}"], atol=1e-5)


@pytest.mark.parametrize("name", json.loads((GOLDEN / "score_fn.json").read_text())["configs"])
def test_P5_truncation_and_penalty(name):
    record, arrays = load("score_fn")
    config = record["configs"][name]
    pad_id = record["padding_token"]
    model = make_reward(record["model_hparams"], below("reward_weights/", arrays), pad_id)
    task = replace(tasks.BOOKS, unfinished_score=config["penalty_reward_value"])
    token = config["truncate_token"]
    ends = [] if token is None else [token]
    ids = utils.TokenIds(pad_id, ends, [], [], truncate_after=config["truncate_after"])
    texts = left(arrays["queries"], pad_id), arrays["responses"]
    reward = tiny.fake_reward(tiny.reward_function(model, 50))
    found = ppo.score_responses(reward, *texts, {}, ids, ppo.Args(task=task))
    scores, cut, finished, _ = found
    assert torch.equal(cut, arrays[f"{name}/postprocessed"])
    assert finished.tolist() == [config["valid"][row] for row in record["row_names"]]
    close(scores, arrays[f"{name}/scores"], atol=1e-5)


@pytest.mark.parametrize("setting", QUERY["outputs"])
def test_P3_queries_start_and_end_where_openais_do(setting):
    length = QUERY["sequence_length"]
    pad_id = QUERY["padding_token"]
    setting = QUERY["outputs"][setting]
    start = setting["start_token"]
    end = setting["end_token"]
    for name, tokens in QUERY["inputs"].items():
        ends = None if end is None else [token == end for token in tokens]
        cut = queries.cut_query(tokens, length, start, ends)
        expected = torch.tensor([setting["results"][name] or [pad_id] * length])
        assert torch.equal(utils.pad_left([cut], length, pad_id), left(expected, pad_id)), name


def same_names(hparams, script):
    """The hyperparameters that have the same names here."""
    return {name: x for name, x in hparams.items() if hasattr(script.Args, name)}


def ppo_args(record, micro_batch_tokens):
    p = record["hparams"]["ppo"]
    r = record["hparams"]["rewards"]
    kl = r["adaptive_kl"] or {"target": None, "horizon": 1}
    return ppo.Args(
        **same_names(p, ppo),
        task=make_task(record),
        num_minibatches=p["nminibatches"],
        num_ppo_epochs=p["noptepochs"],
        adam_eps=record["adam"]["epsilon"],
        kl_coef=r["kl_coef"],
        kl_target=kl["target"],
        kl_horizon=kl["horizon"],
        rollout_batch_size=5,
        micro_batch_tokens=micro_batch_tokens,
    )


@pytest.mark.parametrize("micro_batch_tokens", [36, 4096])
@pytest.mark.parametrize("name", PPO_RECORDS)
def test_ppo_reproduces_every_update(name, micro_batch_tokens, accelerator):
    """`main` on recorded queries, responses and permutations makes OpenAI's rollouts, statistics,
    learning rates, KL coefficients, weights and moments (G5, P1, P5-P11, A1)."""
    record, arrays = load(name)
    args = ppo_args(record, micro_batch_tokens)
    pad_id = record["padding_token"]
    temperature = args.task.temperature
    hparams = record["model_hparams"]
    policy = make_policy(hparams, below("init/policy/", arrays), pad_id, temperature)
    ref = ppo.PolicyAndValue(make_lm(hparams, below("init/ref/", arrays)), pad_id, temperature)
    reward = make_reward(hparams, below("init/reward/", arrays), pad_id)
    truncate_token = record["hparams"]["task"]["truncate_token"]
    ids = utils.TokenIds(pad_id, [truncate_token], record["prefix_tokens"], record["suffix_tokens"])
    updates = [below(f"u{i}/", arrays) for i in range(record["nupdates"])]
    rollouts = []

    def check_update(update, metrics):
        if update == len(updates):  # the last evaluation
            return
        u = updates[update]
        kl_coef = metrics["objective/kl_coef"]
        assert kl_coef == pytest.approx(u["kl_coef_before"].item(), abs=1e-7)
        assert metrics["ppo/lr"] == pytest.approx(u["lr"].item(), rel=1e-6)
        check_rollout(rollouts[-1], u, first=update == 0)
        for key, expected in below("step_stats/", u).items():
            ours = key.replace("score", "scores") if key == "objective/score" else key
            if ours not in metrics:
                ours += "_avg"
            if "elapsed" not in key:
                assert metrics[ours] == pytest.approx(expected.item(), abs=2e-5), (update, key)
        assert_weights(policy, below("weights/", u))
        following = ppo.next_kl_coef(kl_coef, metrics["objective/kl"], args)
        assert following == pytest.approx(u["kl_coef_after"].item(), rel=2e-6)

    run = tiny.start(
        ppo,
        args,
        policy,
        ref,
        tiny.reward_function(reward, 70),
        ids=ids,
        queries=[u["queries"] for u in updates],
        responses=[u["responses"] for u in updates],
        epochs=[u["order"] for u in updates],
        Run=tiny.FakeRun(check_update),
        Rollout=tiny.keep(ppo.Rollout, rollouts),
    )
    assert len(run.metrics) == record["nupdates"] + 1
    state = {name: run.optimizer.state[p] for name, p in golden_names(policy).items()}
    for slot, ours in (("adam_m/", "exp_avg"), ("adam_v/", "exp_avg_sq")):
        for key, value in below(slot, updates[-1]).items():
            close(state[key][ours].view_as(value), value, atol=2e-5)


def check_rollout(rollout, u, first):
    """Compare with the recorded numbers; later, weights that are 2e-5 off are amplified."""
    assert rollout.mask.all()
    assert torch.equal(rollout.responses, u["responses"])
    assert torch.equal(rollout.cut, u["postprocessed_responses"])
    atol = 1e-5 if first else 1e-4
    close(rollout.logprobs, u["logprobs"], atol)
    close(rollout.logprobs - rollout.kl, u["ref_logprobs"], atol)
    close(rollout.values, u["values"], atol)
    close(rollout.scores, u["scores"], atol)
    close(rollout.rewards, u["rewards"], atol)


@pytest.mark.parametrize("micro_batch_tokens", [96, 4096])
def test_reward_training_reproduces_every_step(micro_batch_tokens, accelerator):
    """`main` on recorded samples and labels: normalize, train, normalize again (R1-R4, A1, G5)."""
    record, arrays = load("reward")
    h = record["hparams"]
    pad_id = record["padding_token"]
    args = train_reward.Args(
        **same_names(h, train_reward),
        task=make_task(record),
        num_labels=h["labels"]["num_train"],
        micro_batch_tokens=micro_batch_tokens,
    )
    model = make_reward(record["model_hparams"], below("init/reward/", arrays), pad_id)

    def rows(name):
        """Without padding."""
        array = arrays[f"labels/{name}"].numpy()
        return [row[row != pad_id] for row in array]

    samples = [rows(f"sample{k}") for k in range(4)]
    responses = [list(row) for row in zip(*samples, strict=True)]
    labels = Labels(rows("query"), responses, arrays["labels/best"].numpy())
    texts = []
    for i in range(len(record["norms"])):
        texts.append(torch.cat([arrays[f"norm{i}/queries"], arrays[f"norm{i}/responses"]], dim=1))
    estimates = record["norms"][::2]  # each is followed by other samples, which OpenAI scores then
    normalize = train_reward.normalize
    events = []

    def check_normalize(model, tokens, max_tokens):
        norm = estimates[len(events)]
        events.append(norm)
        result = normalize(model, tokens, max_tokens)
        assert result == pytest.approx((norm["mean"], norm["std"]), abs=2e-5)
        assert model.gain.item() == pytest.approx(norm["gain_set"], abs=2e-5)
        assert model.bias.item() == pytest.approx(norm["bias_set"], abs=2e-5)
        i = norm["index"] + 1
        close(model.score(texts[i], 50), arrays[f"norm{i}/rewards"], atol=2e-5)
        if len(events) == 1:
            assert_weights(model, below("before_training/", arrays))
        return result

    def check_step(step, metrics):
        if step == len(record["steps"]):
            return
        expected = record["steps"][step]
        assert metrics["lr"] == pytest.approx(expected["lr"], rel=1e-6)
        for name in ("accuracy", "loss", "gain", "bias"):
            assert metrics[name] == pytest.approx(expected[name], abs=2e-5)
        assert_weights(model, below(f"s{expected['step']}/weights/", arrays))

    order = arrays["order"].numpy()
    tiny.start(
        train_reward,
        args,
        model,
        labels=labels,
        ids=utils.TokenIds(pad_id, [13], [], []),
        permutation=lambda *a, **k: order,
        sample_policy=lambda *a: [texts[norm["index"]] for norm in estimates],
        normalize=check_normalize,
        Run=tiny.FakeRun(check_step),
    )
    assert len(events) == 2
    assert_weights(model, below("final/reward/", arrays))
