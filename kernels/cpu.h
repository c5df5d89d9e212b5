// What the C++ files share: vectors of eight floats, and the memory of tensors.

#pragma once

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "records.h"
#include "team.h"

// Makes the function `name` the operator torch.ops.eaglet_cpu.name for tensors that torch dispatches by `key`.
#define EAGLET_OPERATOR(key, name, schema)                               \
  STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) { m.def(#name schema); }  \
  STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, key, m) { m.impl(#name, TORCH_BOX(&name)); }

namespace eaglet {

using torch::stable::Tensor;

// e^x within two units of the last place. NaN stays NaN.
inline __m256 exponential(__m256 x) {
  x = _mm256_min_ps(_mm256_set1_ps(88.3f), _mm256_max_ps(_mm256_set1_ps(-87.3f), x));
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);  // ln 2 in two parts
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  __m256 p = _mm256_set1_ps(1.f / 5040);  // the Taylor series to the seventh power, |r| <= ln(2) / 2
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(c));
  const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(p, _mm256_castsi256_ps(power));
}

// (1 - e) / (1 + e), where e = e^-2x.
inline __m256 hyperbolic_tangent(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.f), e = exponential(_mm256_mul_ps(_mm256_set1_ps(-2.f), x));
  return _mm256_div_ps(_mm256_sub_ps(one, e), _mm256_add_ps(one, e));
}

// The sum of the eight lanes, in one fixed order.
inline float lane_sum(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

inline float largest_lane(__m256 v) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}

// out = x / rms(x) * weight for one row of `size` values, a multiple of 8.
inline void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
  __m256 squares = _mm256_setzero_ps();
  for (int64_t i = 0; i < size; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    squares = _mm256_fmadd_ps(v, v, squares);
  }
  const __m256 inverse = _mm256_set1_ps(1.f / std::sqrt(lane_sum(squares) / size + eps));
  for (int64_t i = 0; i < size; i += 8) {
    const __m256 v = _mm256_mul_ps(_mm256_loadu_ps(x + i), inverse);
    _mm256_storeu_ps(out + i, _mm256_mul_ps(v, _mm256_loadu_ps(weight + i)));
  }
}

// The values of a tensor, whose dtype the callers in Python have checked. A slip there must not read past its end.
template <class T, torch::headeronly::ScalarType TYPE>
T* values_of(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == TYPE, "the C++ kernels got a tensor of another dtype than they take");
  return (T*)t.data_ptr();
}
inline float* floats(const Tensor& t) { return values_of<float, torch::headeronly::ScalarType::Float>(t); }
inline const float* floats(const std::optional<Tensor>& t) { return t ? floats(*t) : nullptr; }
inline int64_t* integers(const Tensor& t) { return values_of<int64_t, torch::headeronly::ScalarType::Long>(t); }
inline bool* booleans(const Tensor& t) { return values_of<bool, torch::headeronly::ScalarType::Bool>(t); }
inline bool is_half(const Tensor& t) { return t.scalar_type() == torch::headeronly::ScalarType::Half; }
inline const float* values_or_null(const Tensor& t) { return t.numel() ? floats(t) : nullptr; }

// The named tensors of a list that `flat` in kernels/records.py made.
template <class Record>
Record record(const std::vector<Tensor>& list) {
  STD_TORCH_CHECK(list.size() == Record::TENSORS, "the C++ kernels got ", list.size(), " tensors instead of ", Record::TENSORS);
  return Record(list.data());
}

// ---- objects that Python keeps ---------------------------------------------------------------------------------------

// Looking at the 600 tensors of a model takes longer than some of its layers do. So it is done once, and Python keeps the
// result as a tensor whose memory is the object. The object begins with its mark. A copy of the tensor lies elsewhere, so it
// has the wrong mark.
template <class T>
int64_t mark_of(const T* object) {
  return T::MARK ^ (int64_t)object;
}

template <class T>
Tensor keep(std::unique_ptr<T> object) {
  const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
  return torch::stable::from_blob(object.release(), {1}, {1}, cpu, torch::headeronly::ScalarType::Long,
                                  +[](void* memory) { delete (T*)memory; });
}

template <class T>
const T& object_of(const Tensor& tensor) {
  const int64_t* mark = integers(tensor);
  STD_TORCH_CHECK(tensor.numel() == 1 && *mark == mark_of((const T*)mark), "this tensor does not hold ", T::NAME);
  return *(const T*)mark;
}

// ---- layers ----------------------------------------------------------------------------------------------------------

constexpr int64_t BLOCK = 32;  // columns that share a scale of the activations
constexpr int64_t TILE = 8;    // output rows of a tile

enum Kind { CODES, BF16, FP16, FP32 };

// Rows of a weight of codes in one format: some rows of a file (kernels/blocks.py), or int4 or int8, whose scales and mins lie
// apart. Factors are those of a unit of columns. Where they are nested, each group of columns has small ones besides.
struct Part {
  int64_t n, k, low, high, group, unit, offset;  // code `offset` stands for 0, or for the min
  bool nested = false, fp8 = false, minima;      // fp8: the small factors are float8_e4m3fn
  bool half_scales = true, half_mins = true;     // fp16, or else float
  uint8_t table[16] = {};                        // all zeros: none
  const uint8_t *codes, *scales, *mins;          // codes [tiles, blocks, 32 (low + high)]
  int64_t tile_codes, tile_scales, tile_mins, unit_scales, unit_mins, small_bytes = 0;  // bytes of a tile, of a unit or group of 8 rows

  Part(const int64_t* number, const uint8_t* bytes);
  Part(const Tensor& codes, const Tensor& scales, const Tensor* mins);
  const uint8_t* end() const { return scales + n / 8 * tile_scales; }  // of rows of a file
};

// A linear layer. Floats have no scales.
struct Linear {
  std::vector<Part> parts;
  const uint8_t* values;  // of floats [tiles, columns, 8]
  const float* bias;
  Kind kind;
  int64_t n, k;

  Linear(const Tensor& codes, const Tensor* scales, const Tensor* mins, const float* bias);
  explicit Linear(const tensors::LinearWeights& t);

  // x [M, k] -> out [M, n], or [M, n / 2] if gated, by a number of GATES in kernels/linear.py. round: the activations of int4 and int8 weights.
  void operator()(const float* x, int64_t M, const float* residual, int64_t gated, bool round, float* out) const;
  void row(int64_t id, float* out) const;  // one row of the weight as floats [k]
};

void norm_rows(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* out);

// How a cache holds the hd values of a row: as floats, in float16 or bfloat16, or as bytes with a float behind them, their scale
// (`quantize_rows` in kernels/kv.py).
enum class Stored { FLOAT, HALF, BRAIN, BYTES };

// The keys and values of one layer, [2,B,kv_heads,S,row], or [2,1,kv_heads,S,row], which all sequences share.
struct Cache {
  Stored as;
  int64_t hd, row, values;  // row: its bytes; values: bytes from the keys to the values
  int64_t apart;            // heads from one sequence to the next
  char* at;

  explicit Cache(const Tensor& kv) : Cache(kv, kv.dim() - 5) {}
  Cache layer(int64_t i) const {  // of a cache of several layers
    Cache c = *this;
    c.at += i * 2 * values;
    return c;
  }

 private:
  Cache(const Tensor& kv, int64_t first) {
    using torch::headeronly::ScalarType;
    const ScalarType type = kv.scalar_type();
    as = type == ScalarType::Float      ? Stored::FLOAT
         : type == ScalarType::Half     ? Stored::HALF
         : type == ScalarType::BFloat16 ? Stored::BRAIN
                                        : Stored::BYTES;
    STD_TORCH_CHECK(as != Stored::BYTES || type == ScalarType::Char, "the C++ kernels got a cache of another dtype than they take");
    const int64_t size = as == Stored::FLOAT ? 4 : as == Stored::BYTES ? 1 : 2;
    row = kv.size(first + 4) * size;
    hd = as == Stored::BYTES ? row - 4 : row / size;
    values = kv.stride(first) * size;
    apart = kv.size(first + 1) > 1 ? kv.size(first + 2) : 0;
    at = (char*)kv.data_ptr();
  }
};

// The layer's cache and what the rows of one forward share (model.Nodes).
struct Nodes {
  int64_t B, T, heads, kv_heads, hd, S, R, window;  // heads: of the queries
  const float *cos, *sin;
  int64_t turn;  // from a row's cos to that of the next one
  Cache cache;
  const int64_t *slots, *start, *positions;
  const bool* visible;
  float eps;
  const int64_t* segments = nullptr;  // [B,2], as of model.Nodes
  bool shares = false;                // whether the rows have queries alone, for keys that another layer wrote
  bool ring = false;                  // whether position p lies in slot p mod (S - 1)

  // The row of the cache in which slot 0 of a head of sequence b lies, and the slot that takes every write past the end.
  int64_t first(int64_t b, int64_t head) const { return (b * cache.apart + head) * S + (segments ? segments[2 * b] : 0); }
  int64_t trash(int64_t b) const { return segments ? segments[2 * b + 1] : S - 1; }
  int64_t slot(int64_t b, int64_t at) const { return ring ? at % (S - 1) : std::min(at, trash(b)); }
};

// qkv [B,T,heads,hd] -> rotated q [B,T,Hq,hd]. Rotated keys, and values, go to their slots. norms: of q, k and v, or null.
void rotate_and_write(const Nodes& n, const float* qkv, const float* const norms[3], float* q);

// out [B,T,Hq,hd]: the attention of q, with the scores' scale and cap, and a score for each head without a value, or null.
void attend(const Nodes& n, const float* q, float scale, float cap, const float* sinks, float* out);

// The weights of a decoder layer. Norms are null where the layer has none.
struct Layer {
  const float *input_norm, *attention_norm, *post_norm, *mlp_norm, *q_norm, *k_norm;
  Linear qkv, o, gate_up, down;
  int64_t gate = 1;
  float cap = 0;  // of the attention's scores

  explicit Layer(const tensors::LayerWeights& t);
  int64_t widest() const { return std::max({qkv.k, qkv.n, o.n, gate_up.n / 2}); }

  // Attention behind a norm, then a gated MLP behind a norm, x [M,in] -> out [M,H], through three buffers of [M,widest], in
  // two halves. The first writes the rows' keys and values into the cache, and their queries into the last buffer, from where
  // the second reads them. The attention adds to `residual`.
  void write(const Nodes& n, const float* x, bool round, float* const buffer[3]) const;
  void finish(const Nodes& n, const float* residual, float scale, bool round, float* const buffer[3], float* out) const;
};

// ---- small work of a step (cpu_step.cpp) -----------------------------------------------------------------------------

// Gumbel noise of the token at `position`, for the tokens with these hashes (`sampling.gumbel_noise`).
void noise_row(uint64_t seed, int64_t position, const int64_t* hashes, int64_t count, float* out);

// Draft logits of one row, and how `draft_topk` ranks them.
struct DraftRow {
  const float* logits;
  int64_t size;
  const float* noise;   // of the target's tokens, or null
  const int64_t* ids;   // the target's token for each place, or null if they are the same
  float temperature;
  bool noisy;           // whether scores are those of the noisy logits
};

// The places of the `count` largest keys, and their scores.
void best_drafts(const DraftRow& row, int64_t count, int64_t* places, float* scores);

// The row of `position` of the rotary tables [length,half]. The last row serves all later positions.
inline void rotary_row(const float* cos, const float* sin, int64_t length, int64_t half, int64_t position, float* cos_out,
                       float* sin_out) {
  const int64_t at = std::min(position, length - 1) * half;
  std::copy_n(cos + at, half, cos_out);
  std::copy_n(sin + at, half, sin_out);
}

// One row of an EAGLE head's input (`join_rows`): residual [H], and joined [2 H], the embedding beside the feature.
void join_row(const float* embedding, const float* feature, int64_t H, const float* token_norm, const float* feature_norm,
              float eps, bool keep_normed, float* residual, float* joined);

}  // namespace eaglet
