"""The machine code of the Triton kernels, compiled ahead of time for four GPU architectures without a GPU."""

import re
from pathlib import Path

import pytest

import kernels

if kernels.triton is None or kernels.INTERPRETED:
    pytest.skip("compiles Triton kernels for a GPU", allow_module_level=True)

import kernel_gate
import kernel_variants


def assert_gates_hold(arch: int, quick: bool) -> None:
    """No kernel variant fails a gate on sm_`arch`, and linears add up in fp32."""
    rows = [kernel_gate.inspect(variant, arch) for variant in kernel_variants.variants(quick, arch)]
    assert not {row["kernel"]: row["failures"] for row in rows if row["failures"]}
    linears = [row for row in rows if row["kernel"].startswith(("linear", "experts"))]
    for row in [row for row in linears if "fp16-acc" not in row["kernel"]]:
        assert row["matrix"] and all(op.startswith(("HMMA.16816.F32", "HGMMA")) for op in row["matrix"]), row


@pytest.mark.parametrize("arch", kernel_variants.QUICK_ARCHITECTURES)
def test_the_kernels_at_risk_pass_the_gates(arch):
    """No spill, no decoded weight through shared memory, no wgmma without a fence, and at most 2.7 instructions per int4
    weight at 16 rows in the kernels that have been too large before."""
    assert_gates_hold(arch, quick=True)


@pytest.mark.slow
@pytest.mark.parametrize("arch", kernel_variants.ARCHITECTURES)
def test_all_kernels_pass_the_gates(arch):
    """The same for every kernel variant; run it with --slow after a change of a kernel or of Triton."""
    assert_gates_hold(arch, quick=False)


def test_the_gates_compile_every_kernel_that_is_launched():
    """A kernel that no gate compiles, so that only a first run on a GPU would find it broken."""
    root = Path(kernels.__file__).parent
    files = [path for path in root.parent.rglob("*.py") if ".venv" not in path.parts and path.parts[-2] != "tests"]
    launched = {name for path in files for name in re.findall(r"^    +(\w+_kernel)\[", path.read_text(), re.MULTILINE)}
    compiled = {variant.kernel.__name__ for variant in kernel_variants.variants()}
    assert len(launched) >= 18 and launched == compiled


def test_every_group_of_wgmma_needs_a_fence_of_its_own():
    """A gate that is content with one fence somewhere: an early one said nothing about the products behind it."""
    fence = "fence.proxy.async.shared::cta;\n"
    group = "wgmma.mma_async.sync.aligned\nwgmma.commit_group.sync.aligned;\n"
    assert kernel_gate.unfenced(2 * (fence + group)) == 0
    assert kernel_gate.unfenced(fence + 2 * group) == 1 and kernel_gate.unfenced(group + fence) == 1


def sums(code):
    """Where Triton puts the operands of every matrix product and of every reduction of floats, in program
    order. Two kernels with the same list add the same numbers in the same order."""
    layouts = sorted(re.findall(r"^(#\w+) = (.*)$", code, re.MULTILINE), reverse=True)
    found = re.findall(r"(?:\}\) : \(|(?:tt\.dot|warp_group_dot)\b.*? : )(tensor<[^)\n]*xf(?:16|32), .*)", code)
    for i, text in enumerate(found):
        for name, layout in layouts:
            text = re.sub(rf"{name}\b", lambda _, layout=layout: layout, text)
        found[i] = text.split(" loc(")[0]
    return found


@pytest.mark.parametrize("arch", [86, 90])
def test_attention_adds_up_alike_for_one_node_for_many_and_in_prompts(arch):
    """Verification, plain decoding and prompts must use the same matrix instructions, and their threads must add in
    the same order, also where programs take several splits. No interpreter would show a difference."""
    seen = []
    one = dict(T=1, R=1)  # what Triton makes of arguments equal to 1
    for how, fixed in ((dict(), one), (dict(), {}), (dict(chain=True), {}), (dict(long=True), {})):
        variant = kernel_variants.attention("fp16", **how)
        variant = variant._replace(constants=variant.constants | fixed)
        seen.append(sums(kernel_gate.lower(variant, arch)))
    assert len(seen[0]) >= 8 and all(other == seen[0] for other in seen[1:])
