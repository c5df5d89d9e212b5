"""The RTX 3090 page: its arithmetic done again by other means, its label, and that it is what the script writes."""

import json
import re
from pathlib import Path

import pytest

import kernels
from bench import prediction as predict
from bench import prediction_ranks
from kernels.linear import launch_tile
from model import weight_bytes
from runtime.links import NCCL
from weights.quantized import QuantLinear

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "rtx3090_prediction.md"


@pytest.fixture(scope="module")
def report():
    return json.loads(predict.REPORT.read_text())


def by_hand(hidden, inner, layers, kv_width, vocab):
    """(int4 weights, int8 weights, int4 bytes, int8 bytes) of a target."""
    four = layers * (hidden * (hidden + 2 * kv_width) + hidden * hidden + 3 * hidden * inner)
    return four, hidden * vocab, four / 2 + four / 128 * 2, hidden * vocab + 4 * vocab


def test_plain_decoding_recounts(report):
    """Bytes counted twice or not at all, a share applied in the wrong place: wrong by tens of per cent, and believed."""
    cases = {"llama-2-7b": (4096, 11008, 32, 4096, 32000), "llama-3-8b": (4096, 14336, 32, 1024, 128256)}
    for shape, sizes in cases.items():
        setup = next(s for s in predict.SETUPS if s.shape == shape and not s.head)
        row = predict.predict(setup, report, predict.Gpu(), 512)
        four, eight, four_bytes, eight_bytes = by_hand(*sizes)
        assert row["linear_weights"] == four + eight
        total = four_bytes + eight_bytes + row["partial_bytes"]
        assert row["target_bytes"] == pytest.approx(total, rel=1e-6) and row["partial_bytes"] <= 0.01 * total
        assert row["bound"] == "memory"
        kv = 512 * 2 * sizes[2] * sizes[3] * 2
        memory = (total + kv) / (936e9 * 0.87)
        assert row["step_ms"] == pytest.approx((memory + setup.launches * 0.83e-6) * 1e3, rel=1e-6)
        assert row["tokens_per_second"] == pytest.approx(1e3 / row["step_ms"])


def test_a_wide_tree_pays_for_its_padding_and_instructions(report):
    """26 nodes priced like 16: the kernel pads them to 32 rows. Only products of int4 are summed in fp16."""
    setup = next(s for s in predict.SETUPS if s.tree == "paper25")
    row = predict.predict(setup, report, predict.Gpu())
    assert (row["nodes"], row["draft_forwards"]) == (26, 5)
    four, eight, *_ = by_hand(4096, 11008, 32, 4096, 32000)
    slow = predict.predict(setup, report, predict.Gpu(multiplies_per_second=1e12, half_multiplies_per_second=2e12))
    assert slow["bound"] == "matrix"
    assert slow["target_ms"] == pytest.approx(2 * 32 * (four / 2 + eight) / (1e12 * 0.85) * 1e3)
    parts = row["target_ms"] + row["attention_ms"] + row["gaps_ms"] + row["draft_ms"]
    assert row["step_ms"] == pytest.approx(parts) and row["tokens_per_second"] == pytest.approx(3.62e3 / parts)
    # one draft forward of EAGLE-1: fc 2H x H and one layer in int4, the target's LM head in int8
    H, inner, vocab = 4096, 11008, 32000
    once = (6 * H * H + 3 * H * inner) * (0.5 + 2 / 128) + H * vocab + 4 * vocab + 2 * H  # and the bias of fc
    assert 5 * once <= row["draft_bytes"] * (1 + 1e-6) and row["draft_bytes"] <= 5 * once + row["partial_bytes"]
    starved = predict.predict(setup, report, predict.Gpu(multiplies_per_second=1e18, lanes_per_second=1e12))
    assert starved["bound"] == "issue"
    per_weight, w8 = (predict.instructions(report, bits, 26) for bits in (4, 8))
    assert starved["target_ms"] == pytest.approx((four * per_weight + eight * w8) / (1e12 * 0.75) * 1e3)


def test_bytes_are_those_of_the_engine_s_cost_function():
    """A prediction that counts bytes its own way drifts from what the engine reports."""
    for shape in ("llama-2-7b", "llama-3-8b"):
        model = predict.target(shape)
        norms = sum(p.numel() * 2 for name, p in model.named_parameters() if "norm" in name)
        linears = sum(m.weight_bytes_read(1) for m in model.modules() if isinstance(m, QuantLinear))
        assert linears == pytest.approx(weight_bytes(model) - norms, rel=1e-6)


@pytest.mark.skipif(kernels.triton is None, reason="needs triton")
def test_rows_are_padded_as_the_kernel_pads_them():
    """The kernel's tile for 24 or 26 rows changing under a prediction that still assumes the old one."""
    for rows in (1, 8, 16, 24, 26, 32, 60, 64):
        tile = next(t for t in (16, 32, 64) if rows <= t)
        assert launch_tile(kernels.LinearConfig(128, 1, 4, 4), rows, False)[1] == tile


@pytest.mark.skipif(kernels.triton is None or kernels.INTERPRETED, reason="needs triton's compiler")
def test_the_instruction_counts_are_those_of_today_s_kernel(report):
    """A faster or slower kernel under a page that still shows the old one's figures."""
    from bench import kernel_variants
    from scripts import kernel_report

    main = kernel_report.inspect(kernel_variants.linear(4, "fp16", 16, "fp16-acc"), 86)
    assert predict.instructions(report, 4, 16) == pytest.approx(main["instructions_per_weight"], rel=0.15), (
        "run: python -m scripts.kernel_report --json docs/kernel_report_triton39.json, then scripts.predict"
    )


def test_the_page_is_what_the_script_writes_and_says_what_it_is(report):
    """Edited figures; a prediction that reads like a measurement; a tau without a source."""
    text = PAGE.read_text()
    assert text == predict.page(report, predict.Gpu()), (
        "run: python -m scripts.predict --write docs/rtx3090_prediction.md"
    )
    assert text.startswith("# PREDICTION") and "Nothing on this page was measured on a GPU." in text
    rows = [line for line in text.splitlines() if line.startswith("| llama")]
    assert len(rows) == len(predict.SETUPS)
    for line in rows:
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        tau, source, step, rate = float(cells[3]), cells[4], float(cells[11]), float(cells[14])
        assert rate == pytest.approx(tau / step * 1e3, rel=0.01) and source
        assert step == pytest.approx(sum(float(cells[i]) for i in (7, 8, 9, 10)), abs=0.03)
    assert len(re.findall(r"^\d\. ", text, re.M)) == 9


def test_a_report_of_other_kernels_is_refused(report):
    """A renamed kernel silently predicted from nothing."""
    with pytest.raises(ValueError, match="has no 'linear w4 fp16 M<=16 g128 fp16-acc' for sm_86"):
        predict.instructions({"rows": [row for row in report["rows"] if "fp16-acc" not in row["kernel"]]}, 4, 16)


def test_two_gpus_recount_and_their_page_is_what_the_script_writes(report):
    """Exchanges or halves that are counted twice, edited figures, and a prediction that reads like a measurement."""
    plain, slow = prediction_ranks.SETUPS[0], NCCL
    row = prediction_ranks.predict(plain, slow, report, predict.Gpu())
    _, _, four_bytes, eight_bytes = by_hand(8192, 28672, 80, 1024, 32000)
    kv = 512 * 80 * 2 * 1024 * 2
    assert row["bytes"] == pytest.approx((four_bytes + eight_bytes + kv) / 2, rel=0.01)
    assert row["count"] == 2 * 80 + 1
    exchanged = 160 * 8192 * 2 + 16000 * 2
    assert row["exchanges"] == pytest.approx((161 * 39e-6 + exchanged / 10e9) * 1e3)
    text = (ROOT / "docs" / "two_gpus_prediction.md").read_text()
    assert text == prediction_ranks.page(report, predict.Gpu()), (
        "run: python -m scripts.predict --two-gpus --write docs/two_gpus_prediction.md"
    )
    assert text.startswith("# PREDICTION") and "Nothing on this page was measured on a GPU." in text
