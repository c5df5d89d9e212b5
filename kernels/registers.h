// Registers of 512 or 256 bits, which hold LANES tiles side by side, or 8 LANES neighbouring floats.

#pragma once

#include "cpu.h"

namespace eaglet {

// Calls call(std::integral_constant<int, count>()), for 1 <= count <= MOST.
template <int MOST, class Call>
void with_constant(int64_t count, Call call) {
  if constexpr (MOST > 0) {
    if (count == MOST) return call(std::integral_constant<int, MOST>());
    with_constant<MOST - 1>(count, call);
  }
}

// Calls call(std::integral_constant<int, i>()) for i from 0 to COUNT - 1.
template <int COUNT, class Call>
[[gnu::always_inline]] inline void for_each(Call call) {
  [&]<int... I>(std::integer_sequence<int, I...>) __attribute__((always_inline)) {
    (call(std::integral_constant<int, I>()), ...);
  }(std::make_integer_sequence<int, COUNT>());
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE_REGISTERS
#endif
#if defined(WIDE_REGISTERS) || defined(__AVXVNNI__)
constexpr bool VNNI = true;  // products of bytes are added up in 32 bits
#else
constexpr bool VNNI = false;
#endif

// INTRINSIC(mul_ps) is the intrinsic of this name for these registers.
#ifdef WIDE_REGISTERS
constexpr int LANES = 2;
using Ints = __m512i;
using Floats = __m512;
#define INTRINSIC(name) _mm512_##name
inline Floats side_by_side(const __m256 parts[]) { return _mm512_insertf32x8(_mm512_castps256_ps512(parts[0]), parts[1], 1); }
inline Ints load_codes(const uint8_t* const at[], int64_t i) {
  const __m256i first = _mm256_loadu_si256((const __m256i*)(at[0] + i));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256((const __m256i*)(at[1] + i)), 1);
}
inline void store(uint8_t* at, Ints v) { _mm512_storeu_si512(at, v); }
inline Ints four_times(__m128i v) { return _mm512_broadcast_i32x4(v); }
inline Ints same_bits(Floats v) { return _mm512_castps_si512(v); }
inline Ints both(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints common(Ints a, Ints b) { return _mm512_and_si512(a, b); }
inline __m256 lane(Floats v, int which) { return which ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v); }
#else
constexpr int LANES = 1;
using Ints = __m256i;
using Floats = __m256;
#define INTRINSIC(name) _mm256_##name
inline Floats side_by_side(const __m256 parts[]) { return parts[0]; }
inline Ints load_codes(const uint8_t* const at[], int64_t i) { return _mm256_loadu_si256((const __m256i*)(at[0] + i)); }
inline void store(uint8_t* at, Ints v) { _mm256_storeu_si256((__m256i*)at, v); }
inline Ints four_times(__m128i v) { return _mm256_broadcastsi128_si256(v); }
inline Ints same_bits(Floats v) { return _mm256_castps_si256(v); }
inline Ints both(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints common(Ints a, Ints b) { return _mm256_and_si256(a, b); }
inline __m256 lane(Floats v, int) { return v; }
#endif
constexpr int64_t WIDTH = 8 * LANES;  // floats of a register
inline Ints every(int32_t x) { return INTRINSIC(set1_epi32)(x); }
inline Floats every(float x) { return INTRINSIC(set1_ps)(x); }
inline Ints look_up(Ints table, Ints v) { return INTRINSIC(shuffle_epi8)(table, v); }
// Bits BY higher (lower if negative) in every byte, and of them those of `mask`.
template <int BY>
inline Ints moved(Ints v, int mask) {
  const Ints at = BY > 0 ? INTRINSIC(slli_epi16)(v, BY > 0 ? BY : 0) : BY < 0 ? INTRINSIC(srli_epi16)(v, BY < 0 ? -BY : 0) : v;
  return common(at, INTRINSIC(set1_epi8)((char)mask));
}
template <int POWER>
inline Ints times_power(Ints v) { return INTRINSIC(slli_epi32)(v, POWER); }
inline Floats to_floats(Ints v) { return INTRINSIC(cvtepi32_ps)(v); }
inline Floats times(Floats a, Floats b) { return INTRINSIC(mul_ps)(a, b); }
inline Floats plus(Floats a, Floats b) { return INTRINSIC(add_ps)(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return INTRINSIC(fmadd_ps)(a, b, c); }
inline Floats larger(Floats a, Floats b) { return INTRINSIC(max_ps)(a, b); }
inline Floats load(const float* at) { return INTRINSIC(loadu_ps)(at); }
inline void store(float* at, Floats v) { INTRINSIC(storeu_ps)(at, v); }

#ifdef WIDE_REGISTERS
inline Ints add_byte_products(Ints sum, Ints w, Ints x) { return _mm512_dpbusd_epi32(sum, w, x); }

// `exponential` of cpu.h, with the same bits.
inline Floats exponentials(Floats x) {
  x = _mm512_min_ps(every(88.3f), larger(every(-87.3f), x));
  const Floats n = _mm512_roundscale_ps(times(x, every(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = _mm512_fnmadd_ps(n, every(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, every(-2.12194440e-4f), r);
  Floats p = every(1.f / 5040);
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = times_plus(p, r, every(c));
  return _mm512_scalef_ps(p, n);
}
#else
#ifdef __AVXVNNI__
inline Ints add_byte_products(Ints sum, Ints w, Ints x) { return _mm256_dpbusd_avx_epi32(sum, w, x); }
#endif
inline Floats exponentials(Floats x) { return exponential(x); }
#endif

// Calls call(R, row, W, column) with constants R and W for tiles that cover `rows` rows and `columns` columns.
template <int ROWS, int SPAN, class Call>
void in_tiles(int64_t rows, int64_t columns, Call call) {
  for (int64_t r = 0; r < rows; r += ROWS)
    with_constant<ROWS>(std::min<int64_t>(ROWS, rows - r), [&](auto some) {
      for (int64_t d = 0; d < columns; d += SPAN * WIDTH)
        with_constant<SPAN>(std::min<int64_t>(SPAN, (columns - d + WIDTH - 1) / WIDTH), [&](auto width) { call(some, r, width, d); });
    });
}

}  // namespace eaglet
