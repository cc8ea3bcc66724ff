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
THEIRS = {"lm.transformer.": "transformer.", "backbone.": "transformer.", "head.": "reward_head."}
THEIRS |= {"gain": "reward_norm.gain", "bias": "reward_norm.bias"}
QUERY = json.loads((GOLDEN / "query.json").read_text())


def load(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), dict(np.load(GOLDEN / f"{name}.npz"))


def close(ours: torch.Tensor, theirs: np.ndarray | torch.Tensor, atol: float, rtol=0.0, name=""):
    torch.testing.assert_close(
        ours, torch.as_tensor(theirs), atol=atol, rtol=rtol, msg=lambda text: f"{name}: {text}"
    )


def tokens_of(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array).long()


def left(tokens: np.ndarray, pad_id: int) -> torch.Tensor:
    return utils.add_affixes(tokens_of(tokens), utils.TokenIds(pad_id, [], [], []))


def below(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays whose names begin with a prefix, without it."""
    return {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}


def tensors(arrays: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(np.asarray(x)) for key, x in below(prefix, arrays).items()}


def make_lm(hparams: dict, weights: dict[str, torch.Tensor]) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=hparams["n_vocab"],
        n_positions=hparams["n_ctx"],
        n_embd=hparams["n_embd"],
        n_layer=hparams["n_layer"],
        n_head=hparams["n_head"],
    )
    lm = GPT2LMHeadModel(models.disable_dropout(config))
    of_lm = {name: x for name, x in weights.items() if name.startswith("transformer.")}
    missing, unexpected = lm.load_state_dict(of_lm, strict=False)
    assert missing in ([], ["lm_head.weight"]) and not unexpected
    models.choose_kernels(lm)  # as `load_lm` does
    unpadding.set_unpadding(lm.base_model, hparams["n_ctx"])
    return lm.eval()


def load_head(head: torch.nn.Linear, weights: dict[str, torch.Tensor], name: str) -> None:
    head.load_state_dict({key: weights[f"{name}.{key}"][None] for key in ("weight", "bias")})


def make_policy(hparams: dict, weights: dict, pad_id: int, temperature: float):
    policy = ppo.PolicyAndValue(make_lm(hparams, weights), pad_id, temperature)
    load_head(policy.value_head, weights, "value_head")
    return policy


def make_reward(hparams: dict, weights: dict, pad_id: int) -> train_reward.RewardModel:
    lm = make_lm(hparams, weights)
    model = train_reward.RewardModel(RewardConfig(lm.config, pad_id))
    model.backbone.load_state_dict(lm.transformer.state_dict())
    load_head(model.head, weights, "reward_head")
    with torch.no_grad():
        model.gain.copy_(weights.get("reward_norm.gain", torch.ones(())))
        model.bias.copy_(weights.get("reward_norm.bias", torch.zeros(())))
    return model.eval()


def golden_names(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Our parameters under the names of the recordings, which have no first axis of size 1."""
    out = {}
    for name, value in model.named_parameters():
        prefix = next((x for x in THEIRS if name.startswith(x)), "")
        out[THEIRS.get(prefix, "") + name.removeprefix(prefix)] = value.detach()
    return out


def assert_weights(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    ours = golden_names(model)
    assert set(ours) == set(expected)
    for name, value in expected.items():
        close(ours[name].view_as(value), value, atol=2e-5, name=name)


def make_task(record: dict) -> tasks.Task:
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
    init = tensors(arrays, "init/")
    params = {name: torch.nn.Parameter(init[name]) for name in record["shapes"]}
    betas = record["beta1"], record["beta2"]
    settings = dict(lr=record["base_lr"], betas=betas, eps=record["epsilon"])
    optimizer = utils.AdamTF(params.values(), **settings)
    for step in range(record["steps"]):
        for name, param in params.items():
            param.grad = torch.from_numpy(np.array(arrays[f"grad/{name}"][step]))
        optimizer.param_groups[0]["lr"] = float(arrays[f"{schedule}/lr"][step])
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
    weights = tensors(arrays, "weights/")
    key = next(k for k in arrays if k.startswith("policy_analyze_T")).split("/")[0]
    temperature = float(key.removeprefix("policy_analyze_T"))
    policy = make_policy(record["model_hparams"], weights, pad_id, temperature)
    if script is rloo:
        policy = rloo.Policy(policy.lm, pad_id, temperature)
    ours = policy(left(arrays["queries"], pad_id), tokens_of(arrays["responses"]))
    for value, name in zip(ours, ("logprobs", "entropies", "values"), strict=script is ppo):
        close(value, arrays[f"{key}/{name}"], atol=1e-5)


@pytest.mark.parametrize("name", json.loads((GOLDEN / "score_fn.json").read_text())["configs"])
@tiny.both
def test_P5_truncation_and_penalty(script, name):
    record, arrays = load("score_fn")
    config = record["configs"][name]
    pad_id = record["padding_token"]
    model = make_reward(record["model_hparams"], tensors(arrays, "reward_weights/"), pad_id)
    task = replace(tasks.BOOKS, unfinished_score=config["penalty_reward_value"])
    token = config["truncate_token"]
    ends = [] if token is None else [token]
    ids = utils.TokenIds(pad_id, ends, [], [], truncate_after=config["truncate_after"])
    texts = left(arrays["queries"], pad_id), tokens_of(arrays["responses"])
    reward = tiny.fake_reward(tiny.reward_function(model, 50))
    found = script.score_responses(reward, *texts, {}, ids, script.Args(task=task))
    scores, cut, finished, _ = found
    assert torch.equal(cut, tokens_of(arrays[f"{name}/postprocessed"]))
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
        expected = np.array([setting["results"][name] or [pad_id] * length])
        assert torch.equal(utils.pad_left([cut], length, pad_id), left(expected, pad_id)), name


def ppo_args(record: dict, micro_batch_tokens: int) -> ppo.Args:
    p = record["hparams"]["ppo"]
    r = record["hparams"]["rewards"]
    kl = r["adaptive_kl"] or {"target": None, "horizon": 1}
    return ppo.Args(
        task=make_task(record),
        total_episodes=p["total_episodes"],
        batch_size=p["batch_size"],
        num_minibatches=p["nminibatches"],
        num_ppo_epochs=p["noptepochs"],
        lr=p["lr"],
        adam_eps=record["adam"]["epsilon"],
        gamma=p["gamma"],
        lam=p["lam"],
        cliprange=p["cliprange"],
        cliprange_value=p["cliprange_value"],
        vf_coef=p["vf_coef"],
        whiten_rewards=p["whiten_rewards"],
        kl_coef=r["kl_coef"],
        kl_target=kl["target"],
        kl_horizon=kl["horizon"],
        rollout_batch_size=5,
        micro_batch_tokens=micro_batch_tokens,
    )


@pytest.mark.parametrize("micro_batch_tokens", [36, 4096])
@pytest.mark.parametrize("name", PPO_RECORDS)
def test_ppo_reproduces_every_update(name, micro_batch_tokens, accelerator):
    """`main` on recorded queries, responses and permutations makes OpenAI's rollouts, statistics of
    each minibatch, learning rates, KL coefficients, weights and moments (G5, P1, P5-P11, A1)."""
    record, arrays = load(name)
    args = ppo_args(record, micro_batch_tokens)
    pad_id = record["padding_token"]
    temperature = args.task.temperature
    hparams = record["model_hparams"]
    policy = make_policy(hparams, tensors(arrays, "init/policy/"), pad_id, temperature)
    ref = ppo.PolicyAndValue(make_lm(hparams, tensors(arrays, "init/ref/")), pad_id, temperature)
    reward = make_reward(hparams, tensors(arrays, "init/reward/"), pad_id)
    truncate_token = record["hparams"]["task"]["truncate_token"]
    ids = utils.TokenIds(pad_id, [truncate_token], record["prefix_tokens"], record["suffix_tokens"])
    updates = [below(f"u{i}/", arrays) for i in range(record["nupdates"])]
    size = args.batch_size // args.num_minibatches
    epochs = [[[*torch.from_numpy(order).split(size)] for order in u["order"]] for u in updates]
    rollouts = []
    steps = [{}]

    def spy_losses(*arguments):
        *losses, stats = ppo_losses(*arguments)
        for key, value in stats.items():
            steps[-1][key] = steps[-1].get(key, 0) + value
        return *losses, stats

    def check_update(update, metrics):
        if update == len(updates):  # the last evaluation
            return
        u = updates[update]
        kl_coef = metrics["objective/kl_coef"]
        assert kl_coef == pytest.approx(float(u["kl_coef_before"]), abs=1e-7)
        assert metrics["ppo/lr"] == pytest.approx(float(u["lr"]), rel=1e-6)
        check_rollout(rollouts[-1], u, first=update == 0)
        own_steps = steps[-1 - args.num_ppo_epochs * args.num_minibatches : -1]
        for key, expected in below("mb_stats/", u).items():
            ours = key if key in own_steps[0] else f"{key}_avg"
            if ours in own_steps[0]:  # the others are means of `step_stats` below
                close(torch.stack([step[ours] for step in own_steps]), expected, atol=2e-5)
        for key, expected in below("step_stats/", u).items():
            ours = key.replace("objective/score", "objective/scores")
            ours = ours.replace("scores_total", "score_total")
            ours = ours if ours in metrics else f"{ours}_avg"
            if "elapsed" not in key:
                assert metrics[ours] == pytest.approx(float(expected), abs=2e-5), (update, key)
        assert_weights(policy, tensors(u, "weights/"))
        for script in (ppo, rloo):
            following = script.next_kl_coef(kl_coef, metrics["objective/kl"], args)
            assert following == pytest.approx(float(u["kl_coef_after"]), rel=2e-6)

    ppo_losses = ppo.ppo_losses
    step = ppo.AdamTF.step
    spy_step = lambda self, closure=None: (steps.append({}), step(self))  # noqa: E731
    texts = {name: [tokens_of(u[name]) for u in updates] for name in ("queries", "responses")}
    spies = dict(Run=tiny.FakeRun(check_update), Rollout=tiny.keep(ppo.Rollout, rollouts))
    spies |= dict(ppo_losses=spy_losses, AdamTF=type("Spy", (ppo.AdamTF,), {"step": spy_step}))
    models = policy, ref, tiny.reward_function(reward, 70)
    run = tiny.start(ppo, args, *models, epochs=epochs, ids=ids, **texts, **spies)
    assert len(run.metrics) == record["nupdates"] + 1
    state = dict(zip(golden_names(policy), policy.parameters(), strict=True))
    for slot, ours in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
        for key, value in tensors(updates[-1], f"{slot}/").items():
            moment = run.optimizer.state[state[key]][ours]
            close(moment.view_as(value), value, atol=2e-5)


def check_rollout(rollout: ppo.Rollout, u: dict[str, np.ndarray], first: bool) -> None:
    """Compare with the recorded numbers; later, weights that are 2e-5 off are amplified."""
    assert rollout.mask.all() and torch.equal(rollout.responses, tokens_of(u["responses"]))
    assert torch.equal(rollout.cut, tokens_of(u["postprocessed_responses"]))
    numbers = {name: getattr(rollout, name) for name in ("logprobs", "values", "scores", "rewards")}
    numbers["ref_logprobs"] = rollout.logprobs - rollout.kl
    for name, value in numbers.items():
        close(value, u[name], atol=1e-5 if first else 1e-4)


@pytest.mark.parametrize("micro_batch_tokens", [96, 4096])
def test_reward_training_reproduces_every_step(micro_batch_tokens, accelerator):
    """`main` on recorded samples and labels: normalize, train, normalize again (R1-R4, A1, G5)."""
    record, arrays = load("reward")
    h = record["hparams"]
    pad_id = record["padding_token"]
    same = ("batch_size", "lr", "normalize_samples", "rollout_batch_size")
    sizes = {name: h[name] for name in same} | dict(micro_batch_tokens=micro_batch_tokens)
    sizes |= dict(num_labels=h["labels"]["num_train"])
    args = train_reward.Args(task=make_task(record), **sizes)
    model = make_reward(record["model_hparams"], tensors(arrays, "init/reward/"), pad_id)
    strip = lambda tokens: [row[row != pad_id] for row in tokens]  # noqa: E731
    names = sorted(key for key in arrays if key.startswith("labels/sample"))
    responses = [list(row) for row in zip(*(strip(arrays[name]) for name in names), strict=True)]
    labels = Labels(strip(arrays["labels/query"]), responses, arrays["labels/best"])
    norms = {norm["index"]: norm for norm in record["norms"]}
    estimates = [i for i, norm in norms.items() if norm["kind"].startswith("estimate")]
    parts = ("queries", "responses")
    texts = {i: [tokens_of(arrays[f"norm{i}/{part}"]) for part in parts] for i in norms}
    normalize = train_reward.normalize
    events = []

    def check_normalize(model, tokens, max_tokens):
        norm = norms[estimates[len(events)]]
        events.append(norm)
        result = normalize(model, tokens, max_tokens)
        assert result == pytest.approx((norm["mean"], norm["std"]), abs=2e-5)
        found = model.gain.item(), model.bias.item()
        assert found == pytest.approx((norm["gain_set"], norm["bias_set"]), abs=2e-5)
        check_rewards(norm)
        if len(events) == 1:
            assert_weights(model, tensors(arrays, "before_training/"))
        return result

    def check_rewards(after):
        """Of the recorded samples that OpenAI scores right after normalizing."""
        for i, norm in norms.items():
            same_time = norm["after_n_train_steps"] == after["after_n_train_steps"]
            if i not in estimates and same_time and i > after["index"]:
                rewards = model.score(torch.cat(texts[i], 1), 50)
                close(rewards, arrays[f"norm{i}/rewards"], atol=2e-5)

    def check_step(step, metrics):
        if step == len(record["steps"]):
            return
        expected = record["steps"][step]
        assert metrics["lr"] == pytest.approx(expected["lr"], rel=1e-6)
        assert metrics["accuracy"] == pytest.approx(expected["accuracy"])
        for name in ("loss", "gain", "bias"):
            assert metrics[name] == pytest.approx(expected[name], abs=2e-5)
        assert_weights(model, tensors(arrays, f"s{expected['step']}/weights/"))

    ids = utils.TokenIds(pad_id, [13], [], [])
    samples = [torch.cat(texts[i], dim=1) for i in estimates]
    spies = dict(permutation=lambda *a, **k: arrays["order"], sample_policy=lambda *a: samples)
    spies |= dict(normalize=check_normalize, Run=tiny.FakeRun(check_step))
    tiny.start(train_reward, args, model, labels=labels, ids=ids, **spies)
    assert len(events) == 2
    assert_weights(model, tensors(arrays, "final/reward/"))
