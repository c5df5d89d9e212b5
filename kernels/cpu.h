// What cpu.cpp and cpu_step.cpp share: vectors of eight floats, and the memory of tensors.

#pragma once

#include <immintrin.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

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

}  // namespace eaglet
