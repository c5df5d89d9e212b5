"""Training of EAGLE heads on a tiny random target, and the training losses in training/losses.py."""

import itertools
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from test_train_drafters import common_options, saved, stopped_after
from tiny import load_config, load_model, one_line

from decoding.params import SamplingParams
from engine import load
from engine.engine import Engine, EngineConfig
from families.config import ModelConfig
from kernels import KernelBackend
from layers.build import build_transformer
from loading import drafting
from quantize import quantize_head
from scripts import train_eagle
from scripts.train_eagle import parse
from support import texts as texts_of
from support.errors import BadFileError
from text.tokenizer import load_tokenizer
from training import data as training_data
from training import drafters, eagle, loop, losses
from training.data import Batch, TokenData, chat_row, read_messages, step_batches
from training.drafters import Evaluation, train
from training.eagle import FEATURE_NOISE, INPUTS, TrainHead
from training.loop import Muon, World
from training.losses import KeptFeatures, TargetRows, loss_eagle, loss_eagle1, soft_loss, target_rows
from weights.head_reader import read_eagle
from weights.heads import save_eagle, save_quantized
from weights.hf import save_hf
from weights.quantized import QuantSpec, lm_head_rows

ROOT = Path(__file__).parent.parent
DEMO = load.DEMO
V = 64
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A target whose next token follows mostly from the last one, and uniform random text."""
    folder = tmp_path_factory.mktemp("train_eagle")
    torch.manual_seed(0)
    target = build_transformer(ModelConfig("llama", 32, 64, 7, 2, 1, 16, V, 256))
    target.lm_head.weight.data *= 6  # random logits are nearly flat: nothing to learn from
    save_hf(target, folder / "target")
    ids = np.random.default_rng(0).integers(0, V, 20000).astype(np.int32)
    TokenData.from_stream(ids).save(folder / "data.npz")
    return folder


def options(files, out, *more, version=1, steps=3, **given):
    more = ["--version", version, "--steps", steps, "--eval-tokens", 24, "--eval-every", 0, *more]
    for name, value in given.items():
        more += [f"--{name.replace('_', '-')}", value]
    return common_options(files, out, *more)


def run(files, out, *more, **given):
    return train(eagle.EagleTraining, parse(options(files, out, *more, **given)))


def tiny_head(files, version=1, inputs=INPUTS[0], draft_vocab=None, seed=3, window=0):
    """An untrained head in float64 whose residual outputs are not zero, and its target."""
    target = load_model(files / "target", dtype=torch.float64)
    more = ["--window", window, *(["--draft-vocab", draft_vocab] if draft_vocab else [])]
    args = parse(options(files, "unused", *more, version=version))
    ids = torch.arange(0, 2 * draft_vocab, 2) if draft_vocab else None
    head = TrainHead(eagle.head_config(target.config, args), target, ids, inputs).double()
    generator = torch.Generator().manual_seed(seed)
    for p in head.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    head.rotary.build("cpu")
    return head, target


def rows_of(head, length, share=1.0):
    """Two sequences of tokens, of which a share counts, and what the target computes for them."""
    tokens = torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, length, generator=torch.Generator().manual_seed(1)) < share
    return Batch(tokens, mask), target_rows(head, tokens)


# ------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def trained(files):
    """version -> (folder of a head after a real short training, its card)."""
    heads = {}
    for version, more in (
        (1, []),
        (3, ["--ttt-steps", "3", "--noise-share", "0.25"]),
        (3.1, "--ttt-steps 3 --norm-before-residual off".split()),
    ):
        out = files / f"head{version}"
        heads[version] = out, run(files, out, "--draft-vocab", "60", *more, version=version, steps=110)
    return heads


@pytest.mark.parametrize("version, tau", [(1, 2.5), (3, 1.5), (3.1, 1.5)])
def test_training_from_scratch_drafts_well(trained, version, tau):
    """A loss, pairing or update that is wrong in any way: tau after 110 steps reaches its floor."""
    out, card = trained[version]
    assert card["tau_greedy"] >= tau
    assert card["tau_t1"] >= 1.5
    assert card["loss_curve"][-1] < 0.7 * card["loss_curve"][0]
    written = json.loads((out / "CARD.json").read_text())
    assert written["tau_greedy"] == card["tau_greedy"] and written["steps"] == 110


@pytest.mark.parametrize("version, more", [(1, []), (3, ["--draft-vocab", "48"])])
def test_accumulation_equals_a_bigger_batch(files, tmp_path, version, more):
    """Micro-batches normalised by their own counts, padding that counts, or noise that depends on how rows are dealt
    out."""
    rng, rows = np.random.default_rng(1), []
    for n in rng.integers(8, 60, 40):
        rows.append((rng.integers(0, V, n).tolist(), (np.arange(n) >= n // 3).tolist()))
    TokenData.from_rows(rows).save(tmp_path / "chats.npz")
    more = [*more, "--data", str(tmp_path / "chats.npz")]
    big = run(files, tmp_path / "a", *more, version=version, batch=6)["loss_curve"]
    small = run(files, tmp_path / "b", *more, version=version, batch=2, accumulate=3)["loss_curve"]
    assert small == pytest.approx(big, rel=1e-4)


def test_a_run_ends_by_time(files, tmp_path, monkeypatch):
    """Hours that end after other steps than fit in, a rate that does not fall with the time, or no step at all where
    reading the data took all of it."""
    rates: list[float] = []
    monkeypatch.setattr(drafters, "update", lambda optims, factor: rates.append(factor) or loop.update(optims, factor))
    for slow, steps in ((0.0, 40), (1000.0, 1)):
        seconds = itertools.count()
        monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda s=seconds: float(next(s))))
        began = iter((0.0, slow))
        monkeypatch.setattr(drafters, "time", SimpleNamespace(perf_counter=lambda b=began: next(b)))
        rates.clear()
        card = run(files, tmp_path / f"{steps}", "--hours", 40 / 3600, steps=7)
        assert card["steps"] == len(card["loss_curve"]) == len(rates) == steps
        if steps > 1:
            assert max(rates) > 0.7 and rates[-1] == pytest.approx(1 / 40 / 0.6, rel=0.01), "each step took a second"


def test_two_processes_equal_one_with_the_doubled_batch(files, tmp_path):
    """Gradients averaged with the wrong weight, or the same rows given to every process."""
    one = run(files, tmp_path / "one", batch=4)["loss_curve"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["scripts.train_eagle", *options(files, tmp_path / "two", batch=2), "--device", "cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[:4000]  # what torchrun adds at the end names no cause
    assert saved(tmp_path / "two")["curve"] == pytest.approx(one, rel=1e-4)
    assert (tmp_path / "two" / "model.safetensors").exists()


def evaluation_of(files, target, *more):
    args = parse(options(files, "unused", *more))
    return Evaluation(target, (), training_data.load_data(args, target, None)[1], args)


def tau_of(directory, files, target, *more):
    """tau of the head in `directory`, on the prompts that training measures on."""
    evaluation = evaluation_of(files, target, *more)
    training = eagle.EagleTraining(evaluation.args, target)
    with KernelBackend().active():
        return evaluation.tau(training, directory)


def chain_tau(out, files, inputs=INPUTS[0], K=5):
    """tau of a greedy chain of K on the target's own greedy texts, computed without the engine by teacher forcing."""
    target = load_model(files / "target", dtype=torch.float32)
    found = read_eagle(out, target.config)
    head = TrainHead(found.config, target, found.tensors.get("draft_ids"), inputs)
    head.load_state_dict(found.floats())
    head.requires_grad_(False).rotary.build("cpu", target.rotary.length)
    evaluation = evaluation_of(files, target)
    engine = Engine(target, config=EngineConfig(len(evaluation.prompts), evaluation.ctx))
    results, emitted = engine.generate_batch(evaluation.prompts, evaluation.params).run(), []
    for prompt, result in zip(evaluation.prompts, results, strict=True):
        text = prompt + result.token_ids
        runs = chain_runs(head, torch.tensor([text]), K)
        position, last = len(prompt), len(text) - 1
        while position < last:
            emitted.append(min(runs[position - 1] + 1, last - position))
            position += emitted[-1]
    return sum(emitted) / len(emitted)


@torch.no_grad()
def chain_runs(head, tokens, K):
    """For each row i of tokens [1, T]: how many of K greedily drafted tokens equal tokens i + 2, i + 3, ...

    Row i sees true features up to i only, and after that its own drafts: the attention of the training-time test.
    """
    feature = head.fuse(target_rows(head, tokens).features[:, :-1])
    memory = []
    unshifted = head.inputs == "feature+unshifted-token"
    newest = tokens[:, 1:]
    shown = tokens[:, :-1] if unshifted else newest
    alive = torch.ones_like(newest, dtype=torch.bool)
    runs = torch.zeros_like(newest)
    for s in range(K):
        feature = head.forward_train(shown, feature, s, memory)
        drafted = head.predict(feature).argmax(-1)
        drafted = drafted if head.draft_ids is None else head.draft_ids[drafted]
        truth = tokens[:, 2 + s :]
        alive &= drafted == torch.nn.functional.pad(truth, (0, newest.shape[1] - truth.shape[1]), value=-1)
        runs += alive
        shown = newest if unshifted else drafted
        newest = drafted
    return runs[0].tolist()


@pytest.mark.parametrize("version", [1, 3, 3.1])
def test_exported_head_drafts_the_same(files, trained, version):
    """An export that loses or permutes a tensor, rounds differently from what was measured, or misses a config key; a
    draft vocabulary of EAGLE-1 that is lost in the file or drafts ids that are not its own; draft rows, positions or
    attention of training that differ from those of drafting."""
    out, card = trained[version]
    target = load_model(files / "target", dtype=torch.float32)
    found, state = read_eagle(out, target.config), saved(out)["module"]
    assert found.notes == [] and set(found.tensors) == set(state)
    head = drafting.build_head(found, target)
    assert head.vocab_size == card["draft_vocab"] == 60
    if version == 1:
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[found.tensors["draft_ids"]])
    for name, tensor in state.items():
        assert torch.equal(found.tensors[name], tensor.to(found.tensors[name].dtype)), name
    again = tau_of(out, files, target)
    assert again == {k: card[f"{k}_greedy"] for k in ("tau", "accepted_by_depth")}
    measured = tau_of(out, files, target, "--tree", "chain:5")["tau"]
    assert measured > 1.2
    assert chain_tau(out, files) == pytest.approx(measured, abs=0.02)


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_eagle_3_1_of_others_drafts_the_same(files, trained, tmp_path, layout):
    """A flag of the layouts of vLLM, SGLang, TorchSpec and NeMo, or of speculators, that is read and then not used: the
    head would draft from the wrong state, and only tau would show it."""
    target, source = load_model(files / "target", dtype=torch.float32), trained[3.1][0]
    wanted = tau_of(source, files, target)
    config, tensors = json.loads((source / "config.json").read_text()), load_file(source / "model.safetensors")
    assert config.pop("eaglet_eagle") and config["fc_norm"] and config["norm_output"]
    if layout == "speculators":
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        flags = ("fc_norm", "norm_output", "norm_before_residual", "draft_vocab_size")
        outer = {"speculators_model_type": "eagle3", "transformer_layer_config": config} | config.pop("eagle_config")
        config = outer | {name: config.pop(name) for name in flags}
    taus = {}
    for fed in (True, False):
        folder = tmp_path / f"{fed}"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config | {"norm_output": fed}))
        taus[fed] = tau_of(folder, files, target)
    assert taus[True] == wanted and taus[False] != wanted


@pytest.mark.parametrize("version, rounded", [(1, False), (3, True)])
def test_training_goes_on_from_a_head(files, trained, tmp_path, version, rounded):
    """Training that forgets the head it starts from, gives it another draft vocabulary, or cannot read an int8 one. An LM
    head of a target in half precision that is given the outputs of a head in another dtype."""
    path, card = trained[version]
    more = ["--ttt-steps", str(card["ttt_steps"])]
    if not rounded:
        more += ["--dtype", "bfloat16", "--autocast", "off"]
    else:
        target = load_config(files / "target")
        config, tensors, _ = quantize_head(path, target, QuantSpec("int8"))
        save_quantized(config, tensors, QuantSpec("int8"), tmp_path / "int8")
        path = tmp_path / "int8"
    went_on = run(files, tmp_path / "next", "--start", str(path), *more, version=version, steps=2, lr=1e-6)
    first = card["loss_curve"]
    assert abs(went_on["loss_curve"][0] - first[-1]) < (first[0] - first[-1]) / 10
    assert went_on["draft_vocab"] == card["draft_vocab"] and went_on["started_from"]["head"] == path.name
    assert rounded or went_on["started_from"]["steps"] == 110
    ids = [read_eagle(p, load_config(files / "target")).tensors.get("draft_ids") for p in (path, tmp_path / "next")]
    assert ids == [None, None] or torch.equal(*ids)


def test_a_start_may_get_more_tokens_to_draft(files, trained, tmp_path):
    """Rows of the LM head that move to other tokens, or old tokens that are lost."""
    path, card = trained[3]
    config = load_config(files / "target")
    more = ["--start", str(path), "--draft-vocab", "62", "--ttt-steps", str(card["ttt_steps"])]
    wider = run(files, tmp_path / "wider", *more, version=3, steps=1, lr=1e-9)
    assert wider["draft_vocab"] == 62 > card["draft_vocab"]
    before, after = (read_eagle(p, config).tensors for p in (path, tmp_path / "wider"))
    kept = torch.isin(after["draft_ids"], before["draft_ids"])
    assert len(after["draft_ids"]) == 62 and kept.sum() == card["draft_vocab"]
    assert torch.allclose(after["lm_head.weight"][kept], before["lm_head.weight"], atol=1e-2)


@pytest.mark.parametrize("known, noise, most", [(4, 0.2, 1.1), (60, 0.2, 1.1), (31, 0, 0.5)])
def test_new_rows_of_an_lm_head_are_moved_like_the_known_ones(files, known, noise, most):
    """New rows that stay where the target's are, and a map that is fitted to few known tokens, and throws the new rows
    far away."""
    head, _ = tiny_head(files, version=3, draft_vocab=31)
    head.draft_ids = None
    plain = lm_head_rows(head.target)
    generator = torch.Generator().manual_seed(known)
    moved = plain * 1.3 + 0.5 * (noise == 0) + noise * plain.std() * torch.randn(plain.shape, generator=generator)
    ids = torch.randperm(V, generator=generator)[:known].sort().values
    rows = eagle.widened({"draft_ids": ids, "lm_head.weight": moved[ids]}, head)["lm_head.weight"]
    new = ~torch.isin(torch.arange(V), ids)
    assert torch.equal(rows[ids], moved[ids])
    assert (rows - moved)[new].norm() < most * (plain - moved)[new].norm()


def test_a_head_is_averaged_with_its_start(files, trained, tmp_path):
    """An average that weighs the wrong side, leaves a tensor out, averages token ids, or needs the training again."""
    path, card = trained[3]
    config = load_config(files / "target")
    more = ["--start", str(path), "--ttt-steps", str(card["ttt_steps"]), "--work", str(tmp_path / "work")]
    heads = [read_eagle(path, config).tensors]
    for share in ("0", "0.25"):  # the second run finds the state of the first
        out = tmp_path / share
        averaged = run(files, out, *more, "--average", share, version=3, steps=4, lr=1.0)
        heads.append(read_eagle(out, config).tensors)
    assert averaged["average"] == 0.25 and len(averaged["loss_curve"]) == 4
    start, end, mean = heads
    assert any(not torch.equal(start[name], end[name]) for name in start)
    for name, tensor in mean.items():
        expected = end[name] if name == "draft_ids" else 0.25 * start[name].float() + 0.75 * end[name].float()
        torch.testing.assert_close(tensor.float(), expected.float(), atol=1e-2, rtol=1e-2)
    moved = [(heads[i]["fc.weight"] - end["fc.weight"]).float().norm().item() for i in (0, 2)]
    assert moved[1] / moved[0] == pytest.approx(0.25, abs=0.03)
    save_eagle(read_eagle(path, config).config, end, tmp_path / "start")
    more[1] = str(tmp_path / "start")
    run(files, tmp_path / "again", *more[:4], "--work", str(tmp_path / "other"), version=3, steps=1)
    save_eagle(read_eagle(path, config).config, mean, tmp_path / "start")
    with pytest.raises(ValueError, match="another run .weights of --start"):  # and not an average with another head
        run(files, tmp_path / "again", *more[:4], "--work", str(tmp_path / "other"), version=3, steps=1)


def test_muon_takes_nearly_the_same_step_in_half_precision():
    """Momentum or weights that are kept in bfloat16, or an update that half precision spoils."""
    gradients = [torch.randn(48, 80, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    steps = []
    for half in (False, True):
        weight = torch.nn.Parameter(torch.zeros(48, 80))
        optim = Muon([weight], lr=0.1, weight_decay=0.0, half=half)
        for weight.grad in gradients:
            optim.step()
        assert weight.dtype == optim.state[weight]["momentum"].dtype == torch.float32
        steps.append(weight.detach().flatten())
    assert torch.cosine_similarity(*steps, dim=0) > 0.999
    assert torch.linalg.svdvals(steps[0].view(48, 80) / 0.1).max() < 3 * 1.3, "three nearly orthogonal steps"


# --------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    ("version", "steps", "draft_vocab", "chunk", "share"),
    [(1, 1, None, 5, 1.0), (1, 3, None, 4, 1.0), (1, 3, None, 1000, 1.0),
     (3, 3, None, 5, 1.0), (3, 3, 20, 4, 1.0), (3, 3, 20, 1000, 0.6)],
)  # fmt: skip
def test_losses_are_those_of_the_papers(files, version, steps, draft_vocab, chunk, share, monkeypatch):
    """Target feature, mask, noise, steps, weights or shifts changed, own outputs not fed back, a draft vocabulary that
    does not restrict EAGLE-3, rows that are lost or counted twice where a chunk ends, or a share of the rows that does
    not stand for all of them."""
    head, target = tiny_head(files, version, draft_vocab=draft_vocab)
    monkeypatch.setattr(losses, "CHUNK", chunk * head.vocab_size)
    monkeypatch.setattr(losses, "BLOCK", 3 * head.vocab_size)
    ids, T = head.draft_ids if draft_vocab else torch.arange(V), 11
    batch, rows = rows_of(head, T, 0.6)
    (tokens, mask), states = batch[:2], rows.hidden_states
    noise = torch.rand(2, T, 32, dtype=torch.float64) * 2 - 1 if version == 1 else None
    generator, again = (torch.Generator().manual_seed(2) for _ in range(2))
    count = int(mask[:, 1:].sum())
    of_rows = loss_eagle1 if version == 1 else soft_loss
    loss, hits = loss_eagle(head, batch, rows, steps, count, of_rows, noise, share, generator)
    logits, judged = target.logits(states), mask.clone()
    if share < 1:
        judged[:, 1:][mask[:, 1:]] = torch.rand(count, generator=again) < share
    out = rows.features + noise if version == 1 else head.fuse(rows.features)
    out, memory, total, agreed = out[:, :-1], [] if steps > 1 else None, 0.0, [0] * steps
    for s in range(steps):
        out = head.forward_train(F.pad(tokens[:, 1 + s :], (0, s)), out, s, memory)
        for b in range(2):
            for i in range(T - 1 - s):
                j = i + 1 + s
                if judged[b, j] and logits[b, j].argmax() in ids:
                    p = logits[b, j][ids].softmax(-1)
                    q = (target.logits if version == 1 else head.predict)(out[b, i]).log_softmax(-1)
                    part = -(p * q).sum()
                    if version == 1:
                        distance = (out[b, i] - states[b, j]).abs()
                        part = torch.where(distance < 1, distance**2 / 2, distance - 0.5).mean() + 0.1 * part
                    total += 0.8**s * part
                    agreed[s] += int(p.argmax() == q.argmax())
    count = count * share
    assert loss.item() == pytest.approx((total / count).item(), rel=1e-9)
    assert hits.tolist() == pytest.approx([a / count for a in agreed])
    parameters = dict(head.named_parameters())
    got, wanted = (torch.autograd.grad(x, [*parameters.values()]) for x in (loss, total / count))
    for name, *pair in zip(parameters, got, wanted, strict=True):
        torch.testing.assert_close(*pair, msg=lambda text, name=name: f"{name}: {text}")


def test_what_is_drafted_does_not_depend_on_what_is_known(files):
    """Rows of an LM head whose logits are not multiplied or capped as the target's are."""
    head, target = tiny_head(files, 3, draft_vocab=20)
    target.config = replace(target.config, logits_multiplier=0.5, logits_cap=2.0)
    hidden_states = torch.randn(9, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = losses.draft_targets(head, hidden_states, None)
    known = losses.draft_targets(head, hidden_states, target.logits(hidden_states).argmax(-1))
    torch.testing.assert_close(known, wanted, rtol=1e-5, atol=1e-6, check_dtype=False)


def test_a_batch_in_which_no_row_counts_has_no_loss(files):
    """A training run that ends at conversations whose answers are cut off, at a draw of no row at all, or at a batch of
    fewer tokens than steps."""
    head, _ = tiny_head(files, 3)
    loss, hits = loss_eagle(head, *rows_of(head, 8, 0.0), 2, 1.0, soft_loss, None, 0.5)
    loss.backward()
    assert loss.item() == 0 and hits.tolist() == [0, 0]
    assert loss_eagle(head, *rows_of(head, 3), 5, 1.0, soft_loss)[1].tolist()[2:] == [0, 0, 0]


def test_noise_loss_is_about_shared_noise():
    """Noise of the wrong sign or scale, noise that the draft does not see, or a weight that changes nothing."""
    logits = torch.tensor([1.0, 0.0, -1.0, -8.0], dtype=torch.float64).repeat(50_000, 1)
    p = logits.softmax(-1)

    def loss(z: torch.Tensor) -> float:
        draws = losses.gumbel_draws(p, torch.Generator().manual_seed(3))
        return (losses.noise_loss(losses.Rows(None, z, None, p, None, *draws)) / len(p)).item()

    uniform = torch.empty_like(logits).uniform_(1e-12, 1, generator=torch.Generator().manual_seed(3))
    noise = -(-uniform.log()).log()
    drawn = (p.log() + noise).argmax(-1)
    shares = (drawn.bincount(minlength=4) / len(p)).double()
    assert torch.allclose(shares, p[0], atol=0.01)  # which is what sampling gives
    assert loss(logits) == pytest.approx(F.cross_entropy(logits + noise, drawn).item(), rel=1e-12)
    entropy = -(p[0] * p[0].log()).sum().item()
    assert loss(logits) < 0.6 * entropy and loss(logits) < loss(logits * 0.3) < loss(-logits)  # the noise says the rest


def test_noise_share_weighs_two_losses(files):
    """A share that is not used, or that takes the place of the paper's loss."""
    head, _ = tiny_head(files, 3)

    def loss(share: float) -> float:
        args = parse(options(files, "unused", "--noise-share", share, "--ttt-steps", 2, version=3))
        batch, rows = rows_of(head, 8)
        return eagle.head_loss(head, batch._replace(numbers=(0,)), rows, 14.0, args)[0].item()

    assert loss(0.25) == pytest.approx(0.75 * loss(0.0) + 0.25 * loss(1.0), rel=1e-9)
    assert loss(1.0) != pytest.approx(loss(0.0), rel=1e-3)


@pytest.mark.parametrize("window", [0, 6])
@pytest.mark.parametrize("version", [1, 3])
def test_training_time_attention_equals_an_explicit_mask(files, version, window):
    """Step s seeing other rows of steps 1..s, not seeing its own, with positions not moved on, or with step 0's window.
    A draft s tokens behind row i of step 0 sees the rows from position i + s - window + 1 on, and its own."""
    head, _ = tiny_head(files, version, window=window)
    attention, T, steps = head.layer.attention, 9, 4
    assert attention.window == window
    generator = torch.Generator().manual_seed(5)
    memory, keys, values = [], [], []
    for s in range(steps):
        wide = 2 if version == 3 else 1
        x = torch.randn(1, T, 32 * wide, dtype=torch.float64, generator=generator)
        cos, sin = head.rotary(torch.arange(T)[None] + s)
        got = head._attend_own_rows(x, cos, sin, memory)
        q, k, v = attention.project(x, cos, sin)
        keys.append(k.repeat_interleave(attention.heads // attention.kv_heads, 1))
        values.append(v.repeat_interleave(attention.heads // attention.kv_heads, 1))
        near = torch.ones(T, T).tril().triu(s - window + 1 if window else -T)
        visible = torch.cat((near, *[torch.eye(T)] * s), 1).bool()
        mixed = F.scaled_dot_product_attention(q, torch.cat(keys, 2), torch.cat(values, 2), visible)
        torch.testing.assert_close(got, attention.o(mixed.transpose(1, 2).flatten(2)))


def test_a_window_of_training_is_that_of_decoding(files, tmp_path):
    """A window that is not written, that --start loses or cannot change, or that decoding does not go by."""
    target = load_model(files / "target").config
    for name, more, window in (("a", ("--window", 20), 20), ("b", (), 20), ("c", ("--window", 0), 0)):
        started = ("--start", tmp_path / "a") if name != "a" else ()
        run(files, tmp_path / name, *more, *started, steps=2)
        assert read_eagle(tmp_path / name, target).config.layer.windows == (window,)
        engine = load.load(files / "target", eagle=str(tmp_path / name), ctx=64, device="cpu")
        assert (engine.options.window, engine.drafter.window) == (window, window)


@pytest.mark.parametrize("inputs, token, feature", list(zip(INPUTS, (4, 5, None, 4), (5, 5, 5, None), strict=True)))
def test_input_ablation_sees_what_its_name_says(files, inputs, token, feature):
    """An ablation that leaks the input it is meant to leave out, or shifts the wrong way."""
    head, target = tiny_head(files, inputs=inputs)
    tokens = torch.arange(12)[None]
    features = torch.randn(1, 12, head.feature_size, dtype=torch.float64)

    def first_change(tokens, features):
        out = head.forward_train(head.shown(tokens)[:, 1:], head.fuse(features)[:, :-1])
        return next((row for row, changed in enumerate((out != base).any(-1)[0]) if changed), None)

    base = head.forward_train(head.shown(tokens)[:, 1:], features[:, :-1])
    other_tokens, other_features = tokens.clone(), features.clone()
    other_tokens[0, 5] = 60
    other_features[0, 5] += 1
    assert first_change(other_tokens, features) == token
    assert first_change(tokens, other_features) == feature


def test_input_ablation_drafts_in_the_engine_as_it_was_trained(files, trained, tmp_path):
    """An ablated head that drafts with an input it never saw, or with a token one place off; an ablation's drafting that
    leaks the right token; the marker of an unshifted head lost on disk; a floor of the accuracy that a head reaches whose
    features are paired with the wrong tokens."""
    best_tau = chain_tau(trained[1][0], files)
    prompt, params = list(range(4, 14)), SamplingParams(max_new_tokens=20)
    plain = load.load(files / "target", ctx=64).generate(prompt, params).run()[0].token_ids
    for inputs in INPUTS[1:]:
        out = tmp_path / inputs
        card = run(files, out, "--tree", "chain:5", steps=50, inputs=inputs)
        assert json.loads((out / "CARD.json").read_text())["inputs"] == inputs
        assert card["tau_greedy"] == pytest.approx(chain_tau(out, files, inputs), rel=0.02)  # the engine's
        assert card["tau_greedy"] < best_tau
        if inputs != "token":  # a token says nearly all about this target's next state
            assert card["tau_greedy"] - 1 < (best_tau - 1) / 2
        engine = load.load(files / "target", eagle=str(out), tree="paper25", ctx=64, eagle_always=True)
        assert engine.drafter.head.config.unshifted == (inputs == INPUTS[1])
        assert engine.generate(prompt, params).run()[0].token_ids == plain


# ----------------------------------------------------------------------------------------------------- data


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    """Byte-level tokens with a ChatML template, and a target of their vocabulary."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("chat") / "target"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    rust = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    torch.manual_seed(0)
    config = ModelConfig("llama", 32, 64, 7, 2, 1, 16, 264, 512, eos_token_ids=(259,))
    save_hf(build_transformer(config), folder)
    rust.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


SAID = [("gpt", "dropped"), ("human", "hi"), ("gpt", "hello"), ("human", "<|im_end|>?"), ("gpt", "no!")]
SHAREGPT = {"conversations": [{"from": who, "value": text} for who, text in (*SAID, ("human", "unanswered"))]}
OPENAI = {
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "hello", "name": "x"},
        {"role": "user", "content": "<|im_end|>?"},
        {"role": "assistant", "content": "no!"},
    ]
}


def test_only_the_answers_count(tokenizer_files):
    """A loss mask off by the template's tags, without the end-of-turn token, or on the user's words; the space behind
    `ASSISTANT:` of a built-in template counted or lost."""
    tokenizer = load_tokenizer(tokenizer_files)
    chatml = "hello<|im_end|>no!<|im_end|>"
    for record, said in ((SHAREGPT, chatml), (OPENAI, chatml), (SHAREGPT, " hello</s> no!</s>")):
        if said != chatml:
            tokenizer.use_template("vicuna")
        ids, mask = chat_row(tokenizer, read_messages(record))
        counted = [i for i, m in zip(ids, mask, strict=True) if m]
        assert tokenizer.decode(counted, skip_special=False) == said
        assert tokenizer.decode(ids).count("<|im_end|>") == 1  # the user's, still text


def test_bad_conversations_are_named_and_left_out(tokenizer_files, tmp_path, capsys):
    """One bad row of a large file ending the run, or dropped without a word."""
    bad = {"messages": [{"role": role, "content": "a"} for role in ("user", "user", "assistant")]}
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, [SHAREGPT, bad, OPENAI, {"x": 1}, {"messages": [{"role": "tool"}]}])))
    conversations, texts, left_out = training_data.read_records(str(path))
    assert len(conversations) == 2 and texts == [] and [r[:6] for r in left_out] == ["row 2:", "row 4:", "row 5:"]
    path.write_text('{"messages": ')
    one_line(lambda: training_data.read_records(str(path)), "line 1: not valid JSON")


def test_a_text_is_tokenised_once(tokenizer_files, tmp_path):
    """The work done again at every start, or an earlier text used in place of one that has changed."""
    path, work = tmp_path / "d.jsonl", tmp_path / "work"
    work.mkdir()
    path.write_text("\n".join([json.dumps(SHAREGPT)] * 20))
    argv = ["--checkpoint", str(tokenizer_files), "--data", str(path), "--version", "1", "--out", str(tmp_path / "o")]
    args = parse([*argv, "--work", str(work)])
    target, tokenizer = load_model(tokenizer_files), load_tokenizer(tokenizer_files)
    first = training_data.load_data(args, target, tokenizer)
    (cache,) = work.glob("data-*.npz")
    stamp = cache.stat().st_mtime_ns
    again = training_data.load_data(args, target, tokenizer)
    assert cache.stat().st_mtime_ns == stamp
    assert all((a.ids == b.ids).all() and (a.mask == b.mask).all() for a, b in zip(first, again, strict=True))
    path.write_text(path.read_text() + "\n" + json.dumps(OPENAI))
    training_data.load_data(args, target, tokenizer)
    assert len([*work.glob("data-*.npz")]) == 2


def test_the_card_knows_who_wrote_the_text(tmp_path, monkeypatch):
    """written_by_models counts the chats of a model, and the docstring questions are the same each time and apart from
    those held out.

    Catches: chats that a model wrote counted as text of others, and the other way round.
    """
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in (OPENAI, OPENAI | {"temperature": 0.0})))
    assert training_data.written_by_models(str(path)) == 1 and training_data.written_by_models("docstrings") == 0
    some = [files[:40] for files in texts_of.stdlib_files()]  # all of them take seconds to parse
    monkeypatch.setattr(texts_of, "stdlib_files", lambda: some)
    conversations, texts, left_out = training_data.read_records("docstrings")
    assert len(conversations) > 100 and not texts and not left_out
    asked = [messages[0]["content"] for messages in conversations]
    again, held_out = (training_data.read_records("docstrings", held)[0] for held in (False, True))
    assert len(set(asked)) == len(asked) and asked == [messages[0]["content"] for messages in again]
    assert held_out and not set(asked) & {messages[0]["content"] for messages in held_out}


def test_draft_vocabulary_is_the_most_frequent_answer_tokens():
    """Frequencies of the prompts counted, ids unsorted, or too few ids when little data is at hand."""
    data = TokenData.from_rows([([5, 9, 9, 2, 2, 7, 7, 7], [False, True, True, True, True, False, False, True])])
    assert eagle.frequent_tokens(data, 3, 12).tolist() == [2, 7, 9]
    assert eagle.frequent_tokens(data, 5, 12).tolist() == [0, 1, 2, 7, 9]
    assert eagle.frequent_tokens(data, 12, 12) is None


def test_every_row_is_dealt_out_once_per_epoch():
    """Rows repeated or skipped within an epoch, the same order in every epoch, two processes or micro-batches that train
    on the same rows, or a count that is not the whole step's."""
    data = TokenData.from_rows([([k] * (k + 3), [False] + [True] * (k + 2)) for k in range(8)])
    args = SimpleNamespace(batch=2, accumulate=2, seed=0, length=8)
    order = []
    for epoch in range(2):
        seen: dict[int, int] = {}  # number in the series -> row
        for rank in range(2):
            batches, count = step_batches(data, epoch, World(rank, 2, torch.device("cpu")), args)
            assert count == sum(min(k + 2, 7) for k in range(8))
            for batch in batches:
                seen |= dict(zip(batch.numbers, batch.tokens[:, 0].tolist(), strict=True))
        assert sorted(seen.values()) == list(range(8))
        order.append([row for _, row in sorted(seen.items())])
    assert order[0] != order[1]


def test_processes_share_the_tokens():
    """A process with all long rows, for which the others wait, and short rows padded to the length of a long one."""
    lengths = [40, 9, 9, 9, 9, 8, 8, 8]
    data = TokenData.from_rows([([1] * length, [True] * length) for length in lengths])
    args = SimpleNamespace(batch=2, accumulate=2, seed=0, length=64)
    loads = []
    for rank in range(2):
        batches = step_batches(data, 0, World(rank, 2, torch.device("cpu")), args)[0]
        loads.append(sum(sum(batch.lengths) for batch in batches))
        for batch in batches:
            assert len(batch.lengths) <= 2 and min(batch.lengths) >= 0.75 * batch.tokens.shape[1]
    assert sum(loads) == sum(lengths) and max(loads) <= 54, loads


def test_noise_belongs_to_the_row():
    """Noise that changes with the batch a row is in (resume and accumulation would differ), or beyond its width."""
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    places = slice(0, 16), slice(16, 24)
    both = eagle.feature_noise(Batch(tokens, tokens, [4, 7], places), 6, FEATURE_NOISE, 0)
    alone = eagle.feature_noise(Batch(tokens[:1, :8], tokens, [7], places[1:]), 6, FEATURE_NOISE, 0)
    torch.testing.assert_close(both[1, :8], alone[0])
    half = FEATURE_NOISE / 2 * 512 / 16
    assert both[0].abs().max() <= half and both[0].std() == pytest.approx(half / math.sqrt(3), rel=0.2)
    assert not both[1, 8:].any()


@pytest.mark.parametrize("version, draft_vocab", [(1, None), (3, 20)])
def test_kept_features_are_the_targets(files, tmp_path, monkeypatch, version, draft_vocab):
    """Features of another row or token, a wrong most likely token, or a target that runs again after one epoch; training
    on damaged features, such as those of a row that was half written at a kill."""
    head, target = tiny_head(files, version, draft_vocab=draft_vocab)
    rng = np.random.default_rng(2)
    rows = [(rng.integers(0, V, n).tolist(), [False] * 3 + [True] * (n - 3)) for n in rng.integers(8, 30, 12)]
    dialogues = TokenData.from_rows(rows)
    args = parse(options(files, tmp_path / "head", "--batch", "5", version=version))
    one = World(0, 1, torch.device("cpu"))
    batches = [batch for step in range(12) for batch in step_batches(dialogues, step, one, args)[0]]
    seen: set[int] = set()
    news = [len(seen) < len(seen := seen | {place.start for place in batch.places}) for batch in batches]
    calls, values = [], []
    monkeypatch.setattr(losses, "target_rows", lambda *args: calls.append(1) or target_rows(*args))
    for _ in range(2):  # the second one finds the files of the first
        kept = KeptFeatures(tmp_path / "kept.bin", dialogues, 32, 32 * len(head.config.taps))
        for batch in batches:
            rows, wanted = kept.of(batch, head), target_rows(head, batch.tokens)
            for b, place in enumerate(batch.places):
                n = place.stop - place.start
                torch.testing.assert_close(rows.features[b, :n], wanted.features[b, :n].float(), atol=0.02, rtol=0.01)
                assert rows.hidden_states.dtype == target.dtype  # its LM head reads them
                assert torch.equal(rows.best[b, :n], target.logits(wanted.hidden_states[b, :n]).argmax(-1))
            wanted = TargetRows(rows.hidden_states.double(), rows.features.double())
            known = TargetRows(*wanted[:2], rows.best)
            values += [eagle.head_loss(head, batch, r, 1.0, args)[0].item() for r in (wanted, known)]
    assert len(calls) == sum(news) < len(batches) / 3, "12 rows: one epoch"
    good, path = rows.features, tmp_path / "kept.bin"
    del kept
    damaged = bytearray(path.read_bytes())
    damaged[batch.places[0].start * 64 * (1 + len(head.config.taps)) + 9] ^= 4
    path.write_bytes(damaged)
    again = KeptFeatures(path, dialogues, 32, 32 * len(head.config.taps)).of(batch, head)
    assert torch.equal(again.features, good) and len(calls) == sum(news) + 1
    assert values[::2] == pytest.approx(values[1::2], rel=0.01), "bfloat16 may change a few most likely tokens"


def test_kept_features_grow_with_the_data(files, tmp_path, monkeypatch):
    """A target that runs again for rows that it has read, or features of other tokens at the same place."""
    head, _ = tiny_head(files, 3, draft_vocab=20)
    rows = [([2 + i] * 9, [True] * 9) for i in range(4)]
    changed = [*rows[:1], ([11] * 9, [True] * 9), *rows[2:]]
    calls = []
    monkeypatch.setattr(losses, "target_rows", lambda *args: calls.append(1) or target_rows(*args))
    for data, runs in ((rows[:2], 2), (rows, 2), (changed, 1), (changed, 0)):
        data = TokenData.from_rows(data)
        kept = KeptFeatures(tmp_path / "kept.bin", data, 32, 32 * len(head.config.taps))
        calls.clear()
        for k in range(data.rows):
            place = data.place(k, 9)
            batch = Batch(torch.from_numpy(data.ids[place]).long()[None], torch.ones(1, 9), [k], [place])
            torch.testing.assert_close(
                kept.of(batch, head)[1], target_rows(head, batch.tokens)[1].float(), atol=0.02, rtol=0.01
            )
        assert len(calls) == runs


# ------------------------------------------------------------------------------------------------ command line


def one_error(capsys) -> str:
    """The one line that the command said, without what it said before about its work."""
    found = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error  ")]
    assert len(found) == 1
    return found[0]


UNUSABLE = [
    (1, "--noise-share 0.5", "--noise-share is for --version 3"), (3, "--noise 0", "--noise is for --version 1"),
    (3, "--inputs token", "--inputs is for --version 1"),
    (3.1, "--start {head}", "is an EAGLE-3 head"),
    (3, "--noise-share 1.5", "allowed: 0 to 1"),
    (3, "--row-share 0", "allowed: 0 to 1"), (3, "--average 2", "allowed: 0 to 1"), (3, "--average 0.5", "add --start"),
    (1, "--recipe paper --side-lr 1", "--side-lr does not go with --recipe paper"),
    (3, "--recipe paper --side-lr 1", "--side-lr does not go with --recipe paper"), (3, "--taps 2,3,3", "distinct"),
    (3, "--draft-vocab 9999", "allowed are 8 to 64"), (3, "--data nowhere.txt", "tokenizer"),
    (3, "--length 4096", "256 positions"), (1, "--keep-features", "needs conversations"), (1, "--device tpu", "tpu"),
    (1, "--start {head}", "is an EAGLE-3 head"), (3, "--start {head} --draft-vocab 8", "can only get more"),
    (3, "--start {head} --taps 1,2,3", "--taps does not go with --start"),
]  # fmt: skip


@pytest.mark.parametrize(("version", "more", "words"), UNUSABLE)
def test_unusable_options_are_one_line(files, trained, tmp_path, capsys, version, more, words):
    """A traceback, or an hour of training, instead of one line that says what is allowed: a loss that falls for ever, an
    average with nothing, a file of features that are never read again, an option that does nothing, and stands in the
    card as if it had, or one that the head to start from would silently override."""
    more = more.format(head=trained[3][0]).split()
    try:
        code = train_eagle.main(options(files, tmp_path / "o", *more, version=version))
    except SystemExit as usage:  # of the parser
        code = usage.code
    said = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and len(said) == 1 and words in said[0]


def test_the_card_says_who_can_read_the_head(files, trained, tmp_path, capsys):
    """A head labelled as SafeAILab's whose residual and layers SafeAILab's own code would take for others, and cards of
    the demo that were written before the label was right."""
    assert json.loads((trained[1][0] / "CARD.json").read_text())["format"] == "EAGLE-1 (SafeAILab layout)"
    said = json.loads((trained[3][0] / "CARD.json").read_text())["format"]
    assert "norm_before_residual = true" in said and "aux" not in said and "own code does not" in said
    args = ["--recipe", "paper"]
    for taps, plain in (("2,3,4", True), ("1,3,5", False)):
        card = run(files, tmp_path / taps, *args, "--taps", taps, version=3, steps=1)
        config = json.loads((tmp_path / taps / "config.json").read_text())
        assert config["norm_before_residual"] is False and card["norm_before_residual"] is False
        assert (card["format"] == "EAGLE-3 (SafeAILab layout)") == plain
        assert ("aux layers 1, 3, 5 in config.json" in card["format"]) != plain
        assert ("note: EAGLE-3, SafeAILab tensor names" in capsys.readouterr().err) != plain
    for name in ("eagle1", "eagle3"):
        card, target = json.loads((DEMO / name / "CARD.json").read_text()), load_config(DEMO)
        assert card["format"] == read_eagle(DEMO / name, target).config.layout(target.num_hidden_layers)


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_damaged_token_data_is_one_line(tmp_path):
    """Arrays of other kinds or sizes than those of tokenised data (tests/test_fuzz.py damages the file itself)."""
    data = tmp_path / "data.npz"
    arrays = {"ids": np.arange(9), "mask": np.ones(9, bool), "starts": np.array([0, 4, 9]), "stream": np.array(False)}
    wrong = [
        {"ids": arrays["ids"].astype(float)}, {"ids": arrays["ids"][:8]}, {"mask": np.ones((3, 3), bool)},
        {"starts": np.array([0, 9, 4, 9])}, {"starts": np.array([1, 9])}, {"starts": np.array([0])},
        {"ids": np.array([object()] * 9)}, {"stream": np.zeros(3)},
    ]  # fmt: skip
    for change in wrong:
        np.savez(data, **(arrays | change))
        one_line(lambda: TokenData.load(data), "data.npz", kind=BadFileError)


def test_a_device_or_folder_that_is_not_there_is_one_line(files, tmp_path, capsys):
    """--device cuda without a GPU and a --work that cannot be made, each with a traceback of torch; a folder of other
    things that a head is written into."""
    if not torch.cuda.is_available():
        assert train_eagle.main([*options(files, tmp_path / "o"), "--device", "cuda"]) == 2
        assert "--device cpu" in one_error(capsys)
    (tmp_path / "file").touch()
    assert train_eagle.main(options(files, tmp_path / "o", work=tmp_path / "file" / "work")) == 3
    assert str(tmp_path / "file") in one_error(capsys)
    assert train_eagle.main(options(files, tmp_path, work=tmp_path / "work")) == 2
    assert "cannot be compared" in one_error(capsys)


def test_a_full_disk_is_one_line_and_keeps_the_older_state(files, tmp_path, capsys):
    """A full disk: torch's own message with a traceback, and the state of the last hours gone."""
    resource = pytest.importorskip("resource")
    with stopped_after(1):
        run(files, tmp_path / "a", steps=3)
    state = tmp_path / "a-work" / "train_state.pt"
    good, (soft, hard) = state.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(good) // 2, hard))
    try:
        code = train_eagle.main(options(files, tmp_path / "a", steps=3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 3 and one_error(capsys) == f"error  {state}: File too large"
    assert state.read_bytes() == good and not [*state.parent.glob("*.part")]
