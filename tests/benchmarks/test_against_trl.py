"""benchmarks/against_trl.py: our side, without TRL; and what its CSV says."""

import json

import pytest
import torch
from test_docs import pick
from transformers import AutoModelForCausalLM, AutoTokenizer

import rloo
import sft
from benchmarks import against_trl


def test_recorded_steps_are_those_of_a_naive_loop(here, monkeypatch):
    """SFT: the mean over response tokens. RLOO: the first ratio is 1, the second is not."""
    for script, name in ((sft, "normalize"), (rloo, "normalize"), (rloo, "sample_in_batches")):
        monkeypatch.setattr(script, name, getattr(script, name, None), raising=False)
    against_trl.make(here)
    rows = (row for row in against_trl.ROWS if row.name in ("SFT", "RLOO"))
    of_sft, of_rloo = map(against_trl.ours, rows)
    lm = AutoModelForCausalLM.from_pretrained("llama/policy")
    tokenizer = AutoTokenizer.from_pretrained("llama/policy")
    losses = []
    for row in map(json.loads, (here / "rows.jsonl").read_text().splitlines()):
        ids = [tokenizer(row[x])["input_ids"] for x in ("prompt", "completion")]
        tokens = torch.tensor([*ids[0], *ids[1], against_trl.END])
        logprobs = lm(tokens[None]).logits[0, :-1].log_softmax(dim=-1)
        losses.append(-logprobs[range(len(tokens) - 1), tokens[1:]][len(ids[0]) - 1 :])
    loss = torch.cat(losses).mean()
    loss.backward()
    (found,) = of_sft
    assert found.pop("loss") == pytest.approx(loss.item(), abs=1e-5)
    for name, weight in lm.named_parameters():
        torch.testing.assert_close(found.pop(name), weight.grad, atol=1e-5, rtol=1e-4)
    assert not found
    assert [abs(x["loss"]) > 0.01 for x in of_rloo] == [False, True]


@pytest.mark.parametrize("row", against_trl.ROWS, ids=lambda row: row.name)
def test_a_row_of_the_csv_is_equal_or_one_that_is_said_to_differ(row):
    differs = row.reward == "of_some" or row.model == "gpt2"
    for of, limit in (("loss", 1e-6), ("gradient", 3e-5)):
        (difference,) = pick("against_trl", f"{of} difference", algorithm=row.name)
        assert (difference > 0.01) if differs else (difference < limit)
