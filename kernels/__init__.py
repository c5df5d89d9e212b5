# ruff: noqa: F401
"""Every operation that has a hand-written Triton kernel, next to its plain-PyTorch reference.

An `Operation` decides which of them, or of the C++ kernels, does a call. Linear layers follow the layout that was chosen
when their weight was packed.
"""

from kernels import block_draft, choice, commit, draft, topk
from kernels.attention import shaped_attention, tree_attention
from kernels.backend import (
    INTERPRETED,
    KernelBackend,
    Operation,
    active_backend,
    define_operator,
    operation,
    round_activations,
    triton,
    use_cpu,
    watched,
)
from kernels.block_draft import Parents, convolve, follow, write_context
from kernels.choice import Settings
from kernels.cpu import BLOCK as CPU_BLOCK
from kernels.cpu import TILE as CPU_TILE
from kernels.cpu import fits as cpu_fits
from kernels.cpu import multiplies_bfloat16, seconds_alone
from kernels.cpu import problem as cpu_problem
from kernels.delta import delta_rule, depth_first, gated_norm, sigmoid
from kernels.draft import place_rows
from kernels.experts import choose_experts, packed_experts, route
from kernels.kv import CPU_DTYPES, KV_SCALE, commit_kv, dequantize_rows, quantize_rows, write_kv
from kernels.linear import GATES, TopK, epilogue, gate, packed_linear, packed_topk, topk_reference
from kernels.memory import next_window
from kernels.norm_rope import rms_norm, rope_write_kv
from kernels.packing import PackedWeight, dequantize, pack_float, pack_half, pack_int4, pack_int8, packed_rows
from kernels.projection import packed_linear_rope
from kernels.tuned import SMALL_M, LinearConfig, linear_config, read_tuned, shape_key, write_tuned
