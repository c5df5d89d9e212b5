// The kernels of x86 CPUs with AVX2. kernels/cpu.py builds this file and says what they compute.
//
// No bit of a row's result depends on the other rows, on their number, or on the number of threads.
//
// Products with int4 and int8 weights: a tile holds 8 output rows. Its codes are stored by blocks of 32 columns, so that
// every 32-bit lane of a register belongs to one output row and holds 4 neighbouring columns. Activations are rounded to
// int8 with one scale per row and block. The integer sum of a block is exact, and blocks are added up in float32 in the
// order of the columns, lane by lane.

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <vector>

namespace {

using torch::stable::Tensor;
constexpr int64_t BLOCK = 32;  // columns that share a scale of the activations
constexpr int64_t TILE = 8;    // output rows
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

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

// The sum of the eight lanes, in one fixed order.
inline float lane_sum(__m256 v) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}

// Activations, rounded. A block of NaN or infinity gets a scale of NaN, which reaches the result.
struct Rows {
  std::vector<int8_t> codes;    // [M, K]
  std::vector<float> scale;     // [M, blocks]
  std::vector<float> sum;       // [M, blocks], scale * sum of codes
  std::vector<int32_t> total;   // [M, blocks], sum of codes

  Rows(const float* x, int64_t M, int64_t K)
      : codes(M * K), scale(M * K / BLOCK), sum(scale.size()), total(scale.size()) {
    const __m256 sign = _mm256_set1_ps(-0.f);
    for (size_t b = 0; b < scale.size(); ++b) {
      const float* p = x + b * BLOCK;
      __m256 largest = _mm256_setzero_ps(), zero = _mm256_setzero_ps();
      for (int i = 0; i < BLOCK; i += 8) {
        const __m256 v = _mm256_loadu_ps(p + i);
        largest = _mm256_max_ps(largest, _mm256_andnot_ps(sign, v));
        zero = _mm256_fmadd_ps(v, _mm256_setzero_ps(), zero);  // NaN unless all values are finite
      }
      alignas(32) float lanes[8], zeros[8];
      _mm256_store_ps(lanes, largest);
      _mm256_store_ps(zeros, zero);
      float most = 0.f;
      for (int i = 0; i < 8; ++i) most = std::max(most, lanes[i]) + zeros[i];
      const __m256 inverse = _mm256_set1_ps(most > 0.f ? 127.f / most : 0.f);
      __m256i parts[4];
      for (int i = 0; i < 4; ++i)
        parts[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(p + 8 * i), inverse));
      __m256i packed =
          _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
      packed = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      _mm256_storeu_si256((__m256i*)(codes.data() + b * BLOCK), packed);
      int32_t count = 0;
      for (int i = 0; i < BLOCK; ++i) count += codes[b * BLOCK + i];
      scale[b] = most / 127.f;
      total[b] = count;
      sum[b] = scale[b] * count;
    }
  }
};

struct Weight {
  const uint8_t* codes;   // [tiles, blocks, 128 or 256]
  const void* scales;     // [tiles, groups, 8], fp16 or float
  bool half;              // whether scales are fp16
  const float* mins;      // [tiles, groups, 8], or null: code 8 (int4) or 128 (int8) stands for 0
  int64_t blocks, groups;
};

inline __m256 load_scales(const Weight& w, int64_t at) {
  if (!w.half) return _mm256_loadu_ps((const float*)w.scales + at);
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)w.scales + at)));
}

// acc + the products of 4 unsigned codes and 4 signed activations in every lane. Without VNNI the codes of int8 are made
// signed here, so that their offset of 128 is gone (`OFFSET` in `multiply`).
template <int BITS>
inline __m256i dot(__m256i acc, __m256i w, __m256i x) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
  return _mm256_dpbusd_epi32(acc, w, x);
#else
  if (BITS == 8) {  // pairs of unsigned products would overflow 16 bits
    const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
    w = _mm256_abs_epi8(s);
    x = _mm256_sign_epi8(x, s);
  }
  return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
#endif
}

inline __m256i four_columns(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// R activation rows from `row` on times one tile -> out[R][8].
template <int BITS, int R, bool MINS>
void multiply(const Weight& w, const Rows& x, int64_t row, int64_t tile, float (*out)[TILE]) {
  constexpr int64_t BYTES = BLOCK * TILE * BITS / 8, AHEAD = 4096;
  constexpr int OFFSET = MINS ? 0 : BITS == 4 ? 8 : VNNI ? 128 : 0;
  const __m256i low = _mm256_set1_epi8(15);
  const int64_t per_group = w.blocks / w.groups, K = w.blocks * BLOCK;
  __m256 acc[R], scales = _mm256_setzero_ps(), mins = scales;
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < w.blocks; ++b) {
    if (b % per_group == 0) {
      const int64_t at = (tile * w.groups + b / per_group) * TILE;
      scales = load_scales(w, at);
      if (MINS) mins = _mm256_loadu_ps(w.mins + at);
    }
    __m256i sums[R];
    for (int r = 0; r < R; ++r) sums[r] = _mm256_set1_epi32(-OFFSET * x.total[(row + r) * w.blocks + b]);
    const int8_t* columns = x.codes.data() + row * K + b * BLOCK;
    const uint8_t* codes = w.codes + (tile * w.blocks + b) * BYTES;
#pragma GCC unroll 8
    for (int i = 0; i < BYTES / 32; ++i) {
      _mm_prefetch((const char*)codes + 32 * i + AHEAD, _MM_HINT_T0);  // the tiles lie one behind the other
      const __m256i v = _mm256_loadu_si256((const __m256i*)codes + i);
      const __m256i first = BITS == 4 ? _mm256_and_si256(v, low) : v;
      const __m256i second = BITS == 4 ? _mm256_and_si256(_mm256_srli_epi16(v, 4), low) : v;
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const int8_t* at = columns + r * K + i * (BITS == 4 ? 8 : 4);
        sums[r] = dot<BITS>(sums[r], first, four_columns(at));
        if (BITS == 4) sums[r] = dot<BITS>(sums[r], second, four_columns(at + 4));
      }
    }
    for (int r = 0; r < R; ++r) {
      const int64_t at = (row + r) * w.blocks + b;
      acc[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sums[r]), _mm256_mul_ps(scales, _mm256_set1_ps(x.scale[at])), acc[r]);
      if (MINS) acc[r] = _mm256_fmadd_ps(mins, _mm256_set1_ps(x.sum[at]), acc[r]);
    }
  }
  for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[r], acc[r]);
}

struct Epilogue {
  const float *bias, *residual;
  float* out;
  int64_t n;  // columns of out
  bool gated;
  int64_t M;

  // Finishes 8 columns of one row, from column `first` on. up: the second half of a gated product.
  void finish(int64_t row, int64_t first, const float* y, const float* up) const {
    __m256 value = _mm256_loadu_ps(y);
    if (bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + first));
    if (gated) {
      __m256 other = _mm256_loadu_ps(up);
      if (bias) other = _mm256_add_ps(other, _mm256_loadu_ps(bias + n + first));
      const __m256 one = _mm256_set1_ps(1.f), negative = _mm256_sub_ps(_mm256_setzero_ps(), value);
      value = _mm256_mul_ps(_mm256_div_ps(value, _mm256_add_ps(one, exponential(negative))), other);
    }
    const int64_t at = row * n + first;
    if (residual) value = _mm256_add_ps(value, _mm256_loadu_ps(residual + at));
    _mm256_storeu_ps(out + at, value);
  }
};

// All activation rows times one tile, and times its second half if gated. The codes stay in the first cache level.
template <int BITS, bool MINS>
void run_tile(const Weight& w, const Rows& x, const Epilogue& end, int64_t tile) {
  for (int64_t row = 0; row < end.M; row += 4) {
    float y[4][TILE], up[4][TILE];
    const int64_t count = std::min<int64_t>(4, end.M - row);
    auto both = [&](auto rows) {
      multiply<BITS, decltype(rows)::value, MINS>(w, x, row, tile, y);
      if (end.gated) multiply<BITS, decltype(rows)::value, MINS>(w, x, row, tile + end.n / TILE, up);
    };
    if (count == 4) both(std::integral_constant<int, 4>());
    if (count == 3) both(std::integral_constant<int, 3>());
    if (count == 2) both(std::integral_constant<int, 2>());
    if (count == 1) both(std::integral_constant<int, 1>());
    for (int64_t r = 0; r < count; ++r) end.finish(row + r, tile * TILE, y[r], up[r]);
  }
}

template <int BITS, bool MINS>
void run(const Weight& w, const Rows& x, const Epilogue& end) {
  const int64_t work = w.blocks * BLOCK * TILE * end.M * (1 + end.gated);  // products of a tile
  torch::stable::parallel_for(0, end.n / TILE, std::max<int64_t>(1, 100000 / work), [&](int64_t a, int64_t b) {
    for (int64_t tile = a; tile < b; ++tile) run_tile<BITS, MINS>(w, x, end, tile);
  });
}

Tensor linear(const Tensor& x, const Tensor& codes, const Tensor& scales, const std::optional<Tensor>& mins,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t n, bool gated) {
  const int64_t M = x.size(0), K = x.size(1), blocks = codes.size(1);
  const Rows rows((const float*)x.data_ptr(), M, K);
  const Weight weight{(const uint8_t*)codes.data_ptr(), scales.data_ptr(),
                      scales.scalar_type() == torch::headeronly::ScalarType::Half,
                      mins ? (const float*)mins->data_ptr() : nullptr, blocks, scales.size(1)};
  Tensor out = torch::stable::new_empty(x, {M, gated ? n / 2 : n});
  const Epilogue end{bias ? (const float*)bias->data_ptr() : nullptr,
                     residual ? (const float*)residual->data_ptr() : nullptr,
                     (float*)out.data_ptr(), gated ? n / 2 : n, gated, M};
  const bool four = codes.size(2) == BLOCK * TILE / 2;
  if (four && mins) run<4, true>(weight, rows, end);
  if (four && !mins) run<4, false>(weight, rows, end);
  if (!four) run<8, false>(weight, rows, end);
  return out;
}

// out = x / rms(x) * weight for one row of `size` values, a multiple of 8.
void norm_row(const float* x, const float* weight, int64_t size, float eps, float* out) {
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

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = torch::stable::empty_like(x);
  const int64_t size = weight.size(0);
  const float *in = (const float*)x.data_ptr(), *w = (const float*)weight.data_ptr();
  float* to = (float*)out.data_ptr();
  torch::stable::parallel_for(0, x.numel() / size, std::max<int64_t>(1, 65536 / size), [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row) norm_row(in + row * size, w, size, (float)eps, to + row * size);
  });
  return out;
}

// qkv [B,T,heads,hd] -> rotated q [B,Hq,T,hd]. Rotated keys and plain values go to the slots of kv [2,B,Hkv,S,hd].
Tensor rope_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, Tensor kv, const Tensor& slots,
                     const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps) {
  const int64_t B = qkv.size(0), T = qkv.size(1), heads = qkv.size(2), hd = qkv.size(3), half = hd / 2;
  const int64_t kv_heads = kv.size(2), S = kv.size(3), q_heads = heads - 2 * kv_heads;
  Tensor q = torch::stable::new_empty(qkv, {B, q_heads, T, hd});
  const float *in = (const float*)qkv.data_ptr(), *c = (const float*)cos.data_ptr(), *s = (const float*)sin.data_ptr();
  const float* norms[2] = {q_weight ? (const float*)q_weight->data_ptr() : nullptr,
                           k_weight ? (const float*)k_weight->data_ptr() : nullptr};
  float *cache = (float*)kv.data_ptr(), *out = (float*)q.data_ptr();
  const int64_t values = kv.stride(0);  // where the values begin
  const int64_t* slot = (const int64_t*)slots.data_ptr();
  torch::stable::parallel_for(0, B * T, std::max<int64_t>(1, 32768 / (heads * hd)), [&](int64_t first, int64_t last) {
    std::vector<float> normed(hd);
    for (int64_t row = first; row < last; ++row) {
      const int64_t b = row / T, t = row % T;
      for (int64_t h = 0; h < heads; ++h) {
        const float* x = in + (row * heads + h) * hd;
        const int64_t which = h < q_heads ? 0 : h < q_heads + kv_heads ? 1 : 2;  // q, k or v
        const int64_t at = ((b * kv_heads + (h - q_heads) % kv_heads) * S + slot[row]) * hd;
        float* to = which == 0 ? out + ((b * q_heads + h) * T + t) * hd : cache + (which == 2) * values + at;
        if (which == 2) {
          std::copy(x, x + hd, to);
          continue;
        }
        if (norms[which]) {
          norm_row(x, norms[which], hd, (float)eps, normed.data());
          x = normed.data();
        }
        for (int64_t i = 0; i < half; i += 8) {
          const __m256 low = _mm256_loadu_ps(x + i), high = _mm256_loadu_ps(x + half + i);
          const __m256 co = _mm256_loadu_ps(c + row * half + i), si = _mm256_loadu_ps(s + row * half + i);
          _mm256_storeu_ps(to + i, _mm256_fnmadd_ps(high, si, _mm256_mul_ps(low, co)));
          _mm256_storeu_ps(to + half + i, _mm256_fmadd_ps(low, si, _mm256_mul_ps(high, co)));
        }
      }
    }
  });
  return q;
}

// A query reads the keys that it sees in the order of their slots, which is the order of their positions. So a token has
// the same bits whether its ancestors are history already or nodes of the same tree.
Tensor tree_attention(const Tensor& q, const Tensor& kv, const Tensor& start, const Tensor& visible,
                      const Tensor& positions, int64_t window, double scale) {
  const int64_t B = q.size(0), heads = q.size(1), T = q.size(2), hd = q.size(3), R = visible.size(2);
  const int64_t kv_heads = kv.size(2), S = kv.size(3), values = kv.stride(0);
  Tensor result = torch::stable::new_empty(q, {B, heads, T, hd});
  const float *queries = (const float*)q.data_ptr(), *keys = (const float*)kv.data_ptr();
  const int64_t *starts = (const int64_t*)start.data_ptr(), *position = (const int64_t*)positions.data_ptr();
  const bool* sees = (const bool*)visible.data_ptr();
  float* out = (float*)result.data_ptr();
  int64_t most = R;
  for (int64_t b = 0; b < B; ++b) most = std::max(most, starts[b] + R);
  torch::stable::parallel_for(0, B * heads * T, std::max<int64_t>(1, 20000 / (most * hd)), [&](int64_t first, int64_t last) {
    std::vector<float> score(most + 8);
    std::vector<int64_t> row(most);
    for (int64_t item = first; item < last; ++item) {
      const int64_t t = item % T, h = item / T % heads, b = item / T / heads, n = starts[b];
      const float *query = queries + item * hd, *cache = keys + (b * kv_heads + h / (heads / kv_heads)) * S * hd;
      int64_t count = 0;
      const int64_t low = window > 0 ? std::max<int64_t>(0, position[b * T + t] - window + 1) : 0;
      for (int64_t j = low; j < n; ++j) row[count++] = j;
      for (int64_t r = 0; r < R; ++r)
        if (sees[(b * T + t) * R + r]) row[count++] = std::min(n + r, S - 1);
      float largest = -INFINITY;
      for (int64_t i = 0; i < count; ++i) {
        const float* key = cache + row[i] * hd;
        __m256 sum = _mm256_setzero_ps();
        for (int64_t d = 0; d < hd; d += 8) sum = _mm256_fmadd_ps(_mm256_loadu_ps(query + d), _mm256_loadu_ps(key + d), sum);
        score[i] = lane_sum(sum) * (float)scale;
        largest = score[i] > largest || score[i] != score[i] ? score[i] : largest;  // NaN stays
      }
      std::fill(score.begin() + count, score.begin() + count + 8, -INFINITY);
      __m256 total = _mm256_setzero_ps();
      for (int64_t i = 0; i < count; i += 8) {
        const __m256 p = exponential(_mm256_sub_ps(_mm256_loadu_ps(score.data() + i), _mm256_set1_ps(largest)));
        _mm256_storeu_ps(score.data() + i, p);
      }
      std::fill(score.begin() + count, score.begin() + count + 8, 0.f);
      for (int64_t i = 0; i < count; i += 8) total = _mm256_add_ps(total, _mm256_loadu_ps(score.data() + i));
      const __m256 share = _mm256_set1_ps(1.f / lane_sum(total));
      auto add_values = [&](auto width, int64_t d) {  // `width` registers of the output, from column d on
        __m256 sum[width];
        for (auto& part : sum) part = _mm256_setzero_ps();
        for (int64_t i = 0; i < count; ++i)
          for (int k = 0; k < width; ++k) {
            const __m256 value = _mm256_loadu_ps(cache + values + row[i] * hd + d + 8 * k);
            sum[k] = _mm256_fmadd_ps(_mm256_set1_ps(score[i]), value, sum[k]);
          }
        for (int k = 0; k < width; ++k) _mm256_storeu_ps(out + item * hd + d + 8 * k, _mm256_mul_ps(sum[k], share));
      };
      int64_t d = 0;
      for (; d + 32 <= hd; d += 32) add_values(std::integral_constant<int, 4>(), d);
      for (; d < hd; d += 8) add_values(std::integral_constant<int, 1>(), d);
    }
  });
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) {
  m.def("linear(Tensor x, Tensor codes, Tensor scales, Tensor? mins, Tensor? bias, Tensor? residual, int n, "
        "bool gated) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rope_write_kv(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv, Tensor slots, Tensor? q_weight, "
        "Tensor? k_weight, float eps) -> Tensor");
  m.def("tree_attention(Tensor q, Tensor kv, Tensor start, Tensor visible, Tensor positions, int window, float scale) "
        "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rope_write_kv", TORCH_BOX(&rope_write_kv));
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
}
