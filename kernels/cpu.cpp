// The kernels of x86 CPUs with AVX2. kernels/cpu.py builds this file and says what they compute.
//
// No bit of a row's result depends on the other rows, on their number, or on the number of threads.
//
// A tile holds 8 output rows of a weight. Floats lie column by column, and are multiplied in float32.
//
// The codes of int4 and int8 lie in blocks of 32 columns, so that every 32-bit lane of a register belongs to one output row
// and holds 4 neighbouring columns. Activations are rounded to int8 with one scale per row and block. The integer sum of a
// block is exact, and blocks are added up in float32 in the order of the columns, lane by lane.

#include "cpu.h"

#include <bit>
#include <cstring>

namespace {

using namespace eaglet;
// Activation rows that share a loaded weight: as many as fit into the registers. More than CODE_ROWS are MANY.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE_REGISTERS
constexpr bool VNNI = true;
constexpr int FLOAT_ROWS = 8, CODE_ROWS = 8, MANY_ROWS = 6;
#else
constexpr bool VNNI = false;
constexpr int FLOAT_ROWS = 6, CODE_ROWS = 4, MANY_ROWS = 4;
#endif

// Calls call(std::integral_constant<int, count>()), for 1 <= count <= MOST.
template <int MOST, class Call>
void with_constant(int64_t count, Call call) {
  if constexpr (MOST > 0) {
    if (count == MOST) return call(std::integral_constant<int, MOST>());
    with_constant<MOST - 1>(count, call);
  }
}

// One value of each of eight registers: what `both` makes of all its lanes, in one fixed order.
template <class Both>
inline __m256 lanes_of(const __m256 v[8], Both both) {
  auto pairs = [&](__m256 a, __m256 b) { return both(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)); };
  const __m256 a = pairs(pairs(v[0], v[1]), pairs(v[2], v[3])), b = pairs(pairs(v[4], v[5]), pairs(v[6], v[7]));
  return both(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Activations, rounded, in panels of rows that are multiplied at once. Of a panel, the block of all rows comes before the next
// block, and there one kind of number of all rows before the next kind. A block of NaN or infinity gets a scale of NaN, which
// reaches the result.
struct Rows {
  enum { SCALE, SUM, START, KINDS };  // SUM: scale * sum of codes. START: as an integer, what `start_of` needs of that sum
  const int64_t M, blocks, most;       // most: rows of a panel; only the last one may have fewer
  std::unique_ptr<int8_t[]> codes;
  std::unique_ptr<float[]> numbers;
  std::unique_ptr<float[]> halves;  // scale * sum of 16 codes, of both halves of a block, if it is wanted

  Rows(const float* x, int64_t M, int64_t K, int64_t most, bool with_halves)
      : M(M), blocks(K / BLOCK), most(most), codes(new int8_t[M * K]), numbers(new float[M * blocks * KINDS]),
        halves(with_halves ? new float[M * blocks * 2] : nullptr) {
    parallel_for(0, M * blocks, 2048, [&](int64_t first, int64_t last) {
      for (int64_t b = first; b < last; b += 8) round(x, b, std::min<int64_t>(8, last - b));
    });
  }

  // `count` blocks from block `first` on, at most eight, of all rows one behind the other.
  void round(const float* x, int64_t first, int64_t count) {
    const __m256i size = _mm256_set1_epi32(0x7FFFFFFF);  // as integers, sizes of floats have the same order, NaN above infinity
    __m256 largest[8], sums[8];
    __m256i codes_of[8];
    for (int b = 0; b < 8; ++b) {
      const float* from = x + (first + std::min<int64_t>(b, count - 1)) * BLOCK;
      __m256i most = _mm256_setzero_si256();
      for (int i = 0; i < BLOCK; i += 8) most = _mm256_max_epi32(most, _mm256_and_si256(size, _mm256_loadu_si256((const __m256i*)(from + i))));
      largest[b] = _mm256_castsi256_ps(most);
    }
    const auto larger = [](__m256 a, __m256 b) {
      return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(a), _mm256_castps_si256(b)));
    };
    const __m256 none = _mm256_setzero_ps();
    __m256 top = lanes_of(largest, larger);
    top = _mm256_fmadd_ps(top, none, top);  // infinity becomes NaN
    alignas(32) float inverse[8];
    _mm256_store_ps(inverse, _mm256_and_ps(_mm256_cmp_ps(top, none, _CMP_GT_OQ), _mm256_div_ps(_mm256_set1_ps(127.f), top)));
    for (int b = 0; b < count; ++b) {
      const __m256 factor = _mm256_set1_ps(inverse[b]);
      __m256i parts[4];
      for (int i = 0; i < 4; ++i) parts[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + (first + b) * BLOCK + 8 * i), factor));
      __m256i packed =
          _mm256_packs_epi16(_mm256_packs_epi32(parts[0], parts[1]), _mm256_packs_epi32(parts[2], parts[3]));
      codes_of[b] = _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), codes_of[b]);
      sums[b] = _mm256_cvtepi32_ps(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    for (int b = count; b < 8; ++b) sums[b] = none;
    const __m256 scales = _mm256_div_ps(top, _mm256_set1_ps(127.f));
    const __m256 totals = lanes_of(sums, [](__m256 a, __m256 b) { return _mm256_add_ps(a, b); });  // whole numbers
    alignas(32) float found[KINDS][8];
    _mm256_store_ps(found[SCALE], scales);
    _mm256_store_ps(found[SUM], _mm256_mul_ps(scales, totals));
    __m256i integers = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtps_epi32(totals));
    if (!VNNI) {
      integers = _mm256_slli_epi32(integers, 2);
      integers = _mm256_or_si256(_mm256_slli_epi32(integers, 16), _mm256_and_si256(integers, _mm256_set1_epi32(0xFFFF)));
    }
    _mm256_store_si256((__m256i*)found[START], integers);
    int64_t row = first / blocks, block = first % blocks;
    for (int b = 0; b < count; ++b) {
      const int64_t panel = row / most * most, rows = std::min(most, M - panel), at = panel * blocks + block * rows;
      _mm256_storeu_si256((__m256i*)codes.get() + at + row - panel, codes_of[b]);
      for (int kind = 0; kind < KINDS; ++kind) numbers[at * KINDS + kind * rows + row - panel] = found[kind][b];
      if (halves) {
        alignas(32) float four[8];
        _mm256_store_ps(four, sums[b]);
        for (int h = 0; h < 2; ++h)
          halves[2 * at + h * rows + row - panel] =
              found[SCALE][b] * (four[4 * h] + four[4 * h + 1] + four[4 * h + 2] + four[4 * h + 3]);
      }
      if (++block == blocks) block = 0, ++row;
    }
  }
};

inline __m256 load_eight(const void* values, bool half, int64_t at) {
  if (!half) return _mm256_loadu_ps((const float*)values + at);
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)((const uint16_t*)values + at)));
}

// Registers of 512 or 256 bits, which hold LANES tiles side by side, or 8 LANES neighbouring floats.
#ifdef WIDE_REGISTERS
constexpr int LANES = 2;
using Ints = __m512i;
using Floats = __m512;
inline Floats side_by_side(const __m256 parts[]) { return _mm512_insertf32x8(_mm512_castps256_ps512(parts[0]), parts[1], 1); }
inline Ints load_codes(const uint8_t* const at[], int64_t i) {
  const __m256i first = _mm256_loadu_si256((const __m256i*)(at[0] + i));
  return _mm512_inserti64x4(_mm512_castsi256_si512(first), _mm256_loadu_si256((const __m256i*)(at[1] + i)), 1);
}
inline Ints every(int32_t x) { return _mm512_set1_epi32(x); }
inline Floats every(float x) { return _mm512_set1_ps(x); }
inline Ints low_halves(Ints v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Ints high_halves(Ints v) { return low_halves(_mm512_srli_epi16(v, 4)); }
inline Ints both(Ints a, Ints b) { return _mm512_or_si512(a, b); }
inline Ints look_up(Ints table, Ints v) { return _mm512_shuffle_epi8(table, v); }
inline Ints four_times(__m128i v) { return _mm512_broadcast_i32x4(v); }
// Bits BY higher (lower if negative) in every byte, and of them those of `mask`.
template <int BY>
inline Ints moved(Ints v, int mask) {
  const Ints at = BY > 0 ? _mm512_slli_epi16(v, BY > 0 ? BY : 0) : BY < 0 ? _mm512_srli_epi16(v, BY < 0 ? -BY : 0) : v;
  return _mm512_and_si512(at, _mm512_set1_epi8((char)mask));
}
inline void store(uint8_t* at, Ints v) { _mm512_storeu_si512(at, v); }
inline Floats to_floats(Ints v) { return _mm512_cvtepi32_ps(v); }
inline Floats times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, Floats v) { _mm512_storeu_ps(at, v); }
inline __m256 lane(Floats v, int which) { return which ? _mm512_extractf32x8_ps(v, 1) : _mm512_castps512_ps256(v); }

// `exponential` of cpu.h, with the same bits.
inline Floats exponentials(Floats x) {
  x = _mm512_min_ps(every(88.3f), _mm512_max_ps(every(-87.3f), x));
  const Floats n = _mm512_roundscale_ps(times(x, every(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  Floats r = _mm512_fnmadd_ps(n, every(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, every(-2.12194440e-4f), r);
  Floats p = every(1.f / 5040);
  for (float c : {1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, 0.5f, 1.f, 1.f}) p = times_plus(p, r, every(c));
  return times(p, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), every(127)), 23)));
}

// The sum of a block begins with `start`, takes the products of 4 unsigned codes and 4 signed activations in every 32 bits, and
// ends. start_of: what lowers all codes by OFFSET, from minus the sum of the activations.
template <int OFFSET>
inline Ints start_of(const float* minus) {
  if (!OFFSET) return every(0);
  return _mm512_slli_epi32(_mm512_castps_si512(every(*minus)), OFFSET ? __builtin_ctz(OFFSET ? OFFSET : 1) : 0);
}
template <int BITS>
inline Ints dot(Ints acc, Ints w, Ints x) {
  return _mm512_dpbusd_epi32(acc, w, x);
}
template <int BITS>
inline Ints end_sum(Ints acc) {
  return acc;
}
#else
constexpr int LANES = 1;
using Ints = __m256i;
using Floats = __m256;
inline Floats side_by_side(const __m256 parts[]) { return parts[0]; }
inline Ints load_codes(const uint8_t* const at[], int64_t i) { return _mm256_loadu_si256((const __m256i*)(at[0] + i)); }
inline Ints every(int32_t x) { return _mm256_set1_epi32(x); }
inline Floats every(float x) { return _mm256_set1_ps(x); }
inline Ints low_halves(Ints v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline Ints high_halves(Ints v) { return low_halves(_mm256_srli_epi16(v, 4)); }
inline Ints both(Ints a, Ints b) { return _mm256_or_si256(a, b); }
inline Ints look_up(Ints table, Ints v) { return _mm256_shuffle_epi8(table, v); }
inline Ints four_times(__m128i v) { return _mm256_broadcastsi128_si256(v); }
// Bits BY higher (lower if negative) in every byte, and of them those of `mask`.
template <int BY>
inline Ints moved(Ints v, int mask) {
  const Ints at = BY > 0 ? _mm256_slli_epi16(v, BY > 0 ? BY : 0) : BY < 0 ? _mm256_srli_epi16(v, BY < 0 ? -BY : 0) : v;
  return _mm256_and_si256(at, _mm256_set1_epi8((char)mask));
}
inline void store(uint8_t* at, Ints v) { _mm256_storeu_si256((__m256i*)at, v); }
inline Floats to_floats(Ints v) { return _mm256_cvtepi32_ps(v); }
inline Floats times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats plus(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats times_plus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats larger(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, Floats v) { _mm256_storeu_ps(at, v); }
inline __m256 lane(Floats v, int) { return v; }
inline Floats exponentials(Floats x) { return exponential(x); }

// The sum of a block begins with `start`, takes the products of 4 unsigned codes and 4 signed activations in every 32 bits, and
// ends. Of up to 4 bits all products fit into 16 bits: 16 * 15 * 127 is less than 2^15. So does their sum with -4 times the
// total of the block, with which each half of a lane begins so that together they lower the codes by 8: at most
// 16 * 11 * 127 + 4 * 16 * 127, even if the sum passes the bounds on its way. Of 5 and 6 bits the products of a pair fit. The
// codes of int8 are made signed here, so that their offset of 128 is gone (`OFFSET` of `Plain`): pairs of unsigned products
// would overflow.
template <int OFFSET>
inline Ints start_of(const float* total) {
  static_assert(OFFSET == 0 || OFFSET == 8);
  return OFFSET ? _mm256_castps_si256(every(*total)) : every(0);
}
template <int BITS>
inline Ints dot(Ints acc, Ints w, Ints x) {
  if (BITS <= 4) return _mm256_add_epi16(acc, _mm256_maddubs_epi16(w, x));
  if (BITS < 8) return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
  const __m256i s = _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
  const __m256i products = _mm256_maddubs_epi16(_mm256_abs_epi8(s), _mm256_sign_epi8(x, s));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
template <int BITS>
inline Ints end_sum(Ints acc) {
  return BITS <= 4 ? _mm256_madd_epi16(acc, _mm256_set1_epi16(1)) : acc;
}
#endif

inline Ints four_columns(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return every(word);
}

// The codes of a part: LOW bits of every column in the first runs of a block, HIGH more in the runs behind them, as numbers or as
// places in a table of bytes. GROUP columns share their factors.
template <int LOW_, int HIGH_, int GROUP_, bool TABLE_>
struct Codes {
  static constexpr int LOW = LOW_, HIGH = HIGH_, GROUP = GROUP_, GROUPS = BLOCK / GROUP_, BITS = TABLE_ ? 8 : LOW_ + HIGH_;
  static constexpr int64_t BYTES = 32 * (LOW_ + HIGH_);  // of a block of a tile
  static constexpr bool TABLE = TABLE_;
};

// Calls call(the Codes of a part).
template <class Call>
void with_codes(const Part& part, Call call) {
  if (part.table[0]) return call(Codes<4, 0, 32, true>());
  if (part.low == 8) return call(Codes<8, 0, 32, false>());
  if (part.low == 2 && part.high == 0) return call(Codes<2, 0, 16, false>());
  if (part.low == 2) return call(Codes<2, 1, 16, false>());
  if (part.high == 2) return call(Codes<4, 2, 16, false>());
  if (part.high == 1) return call(Codes<4, 1, 32, false>());
  return call(Codes<4, 0, 32, false>());
}

// Calls call(std::integral_constant<int, i>()) for i from 0 to COUNT - 1.
template <int COUNT, class Call>
[[gnu::always_inline]] inline void for_each(Call call) {
  if constexpr (COUNT > 0) {
    for_each<COUNT - 1>(call);
    call(std::integral_constant<int, COUNT - 1>());
  }
}

// Columns 4 j to 4 j + 3 of a block of LANES tiles, for j from 0 to 7.
template <class C>
[[gnu::always_inline]] inline void unpack(const uint8_t* const codes[], int64_t at, Ints table, Ints columns[8]) {
  constexpr int PER = 8 / C::LOW;
  for_each<C::LOW>([&](auto run) __attribute__((always_inline)) {
    const Ints v = load_codes(codes, at + 32 * run);
    for_each<PER>([&](auto i) __attribute__((always_inline)) { columns[run * PER + i] = PER == 1 ? v : moved<-i * C::LOW>(v, (1 << C::LOW) - 1); });
  });
  for_each<C::HIGH>([&](auto run) __attribute__((always_inline)) {
    constexpr int ABOVE = 8 / (C::HIGH ? C::HIGH : 1);
    const Ints v = load_codes(codes, at + 32 * (C::LOW + run));
    for_each<ABOVE>([&](auto i) __attribute__((always_inline)) {
      Ints& column = columns[run * ABOVE + i];
      column = both(column, moved<C::LOW - i * C::HIGH>(v, ((1 << C::HIGH) - 1) << C::LOW));
    });
  });
  if (C::TABLE) for_each<8>([&](auto j) __attribute__((always_inline)) { columns[j] = look_up(table, columns[j]); });
}

// What one code of a tile's rows stands for, and what code 0 does, in the groups of a unit of columns.
struct Factors {
  const Part& part;
  const uint8_t* at;
  __m256 scale, min;

  Factors(const Part& part, int64_t tile, int64_t unit) : part(part) { load(tile, unit); }

  void load(int64_t tile, int64_t unit) {
    at = part.factors + tile * part.tile_factors + unit * part.unit_bytes;
    scale = load_eight(at, true, 0);
    min = part.minima ? load_eight(at, true, 8) : _mm256_setzero_ps();
  }

  template <class C>
  void of_group(int64_t group, __m256& group_scale, __m256& group_min) const {
    group_scale = scale;
    group_min = min;
    if (!part.nested) return;
    const uint8_t* small = at + 16 * (1 + part.minima) + group * part.small_bytes;
    const auto wide = [](__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); };
    const __m128i eight = _mm_loadl_epi64((const __m128i*)small), low = _mm_set1_epi8(15);
    if (C::BITS == 2) {
      group_scale = _mm256_mul_ps(scale, wide(_mm_and_si128(eight, low)));
      group_min = _mm256_mul_ps(min, wide(_mm_and_si128(_mm_srli_epi16(eight, 4), low)));
      return;
    }
    group_scale = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
    if (part.minima) group_min = _mm256_mul_ps(min, wide(_mm_loadl_epi64((const __m128i*)(small + 8))));
  }
};

// LANES tiles of a weight whose blocks share one or no factor each. Its codes are those of a part without high bits.
template <int BITS, bool MINS_>
struct Plain {
  using C = Codes<BITS, 0, BLOCK, false>;
  static constexpr bool MINS = MINS_;  // whether sums of the activations count
  static constexpr int OFFSET = MINS ? 0 : BITS == 4 ? 8 : VNNI ? 128 : 0;
  const Weight& w;
  const int64_t* tiles;
  const int64_t units = w.groups, per_unit = w.blocks / w.groups;  // factors are loaded for units of blocks
  Floats scale, min;

  const uint8_t* codes(int64_t tile) const { return w.codes + tile * w.blocks * C::BYTES; }
  Ints table() const { return every(0); }
  void begin(int64_t unit) {
    __m256 scales[LANES], mins[LANES];
    for (int l = 0; l < LANES; ++l) {
      scales[l] = load_eight(w.scales, w.half, (tiles[l] * w.groups + unit) * TILE);
      if (MINS) mins[l] = load_eight(w.mins, w.half_mins, (tiles[l] * w.groups + unit) * TILE);
    }
    scale = side_by_side(scales);
    if (MINS) min = side_by_side(mins);
  }
  void of_group(int64_t, Floats& scales, Floats& mins) const {
    scales = scale;
    if (MINS) mins = min;
  }
};

// LANES tiles of a part. A min, and what code 0 stands for, multiply the sums of the activations. Bytes lose their offset in the
// integer sum instead, as those of int8 do.
template <class C_>
struct Nested {
  using C = C_;
  static constexpr bool MINS = C::BITS < 8;
  static constexpr int OFFSET = !MINS && VNNI ? 128 : 0;
  const Part& part;
  const int64_t* tiles;
  const int64_t units = part.k / part.unit, per_unit = part.unit / BLOCK;
  Factors factors[2] = {Factors(part, tiles[0], 0), Factors(part, tiles[LANES - 1], 0)};

  const uint8_t* codes(int64_t tile) const { return part.codes + tile * part.tile_codes; }
  Ints table() const { return four_times(_mm_loadu_si128((const __m128i*)part.table)); }
  void begin(int64_t unit) {
    for (int l = 0; l < LANES; ++l) factors[l].load(tiles[l], unit);
  }
  void of_group(int64_t group, Floats& scales, Floats& mins) const {
    __m256 scale[LANES], min[LANES];
    for (int l = 0; l < LANES; ++l) {
      factors[l].template of_group<C>(group, scale[l], min[l]);
      min[l] = _mm256_fnmadd_ps(_mm256_set1_ps(part.offset), scale[l], min[l]);
    }
    scales = side_by_side(scale);
    if (MINS) mins = side_by_side(min);
  }
};

// acc += what R rows of a panel and one group of a block add: `columns` are its codes, four columns in each.
template <class F, int R, int SIDES>
[[gnu::always_inline]] inline void add_group(const Rows& x, const int8_t* codes, int64_t at, int64_t group, const Ints (*columns)[SIDES],
                      const Floats* scales, const Floats* mins, Floats (*acc)[SIDES]) {
  using C = typename F::C;
  const float* numbers = x.numbers.get() + at * Rows::KINDS;
  const float* total = C::GROUPS == 1 ? numbers + Rows::SUM * R : x.halves.get() + 2 * at + group * R;
  Ints sums[R][SIDES];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int s = 0; s < SIDES; ++s) sums[r][s] = start_of<F::OFFSET>(numbers + Rows::START * R + r);
  for_each<C::GROUP / 4>([&](auto j) __attribute__((always_inline)) {
    for_each<R>([&](auto r) __attribute__((always_inline)) {
      const Ints four = four_columns(codes + r * BLOCK + 4 * j);
      for_each<SIDES>([&](auto s) __attribute__((always_inline)) { sums[r][s] = dot<C::BITS>(sums[r][s], columns[j][s], four); });
    });
  });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int s = 0; s < SIDES; ++s) {
      const Floats scaled = times(scales[s], every(numbers[Rows::SCALE * R + r]));
      acc[r][s] = times_plus(to_floats(end_sum<C::BITS>(sums[r][s])), scaled, acc[r][s]);
      if (F::MINS) acc[r][s] = times_plus(mins[s], every(total[r]), acc[r][s]);
    }
}

// A panel of R rows from `row` on times LANES tiles -> out[LANES][R][8]. left: tiles that the thread reads from here on, which lie
// one behind the other; 0 if they are in the cache already.
template <class F, int R>
[[gnu::noinline]] void multiply(F f, const Rows& x, int64_t row, int64_t left, float (*out)[CODE_ROWS][TILE]) {
  using C = typename F::C;
  // Few rows wait for memory. The second cache level has room for more requests than the first one. (Measured on Zen 4.)
  constexpr bool FAR = R <= 4;
  constexpr int64_t AHEAD = FAR ? 8192 : 4096;
  const int64_t last = left * x.blocks * C::BYTES;
  const Ints table = f.table();
  const uint8_t* codes[LANES];
  for (int l = 0; l < LANES; ++l) codes[l] = f.codes(f.tiles[l]);
  Floats acc[R][1];
  for (int r = 0; r < R; ++r) acc[r][0] = every(0.f);
  for (int64_t b = 0, unit = 0, i = f.per_unit; b < x.blocks; ++b, ++i) {
    const int64_t at = b * C::BYTES, place = row * x.blocks + b * R;
    if (i == f.per_unit) {
      f.begin(unit++);
      i = 0;
    }
    for (int64_t line = 0; line < C::BYTES; line += 64)
      if (!FAR || at + line + AHEAD < last)
        for (int l = 0; l < LANES; ++l) _mm_prefetch((const char*)codes[l] + at + line + AHEAD, FAR ? _MM_HINT_T1 : _MM_HINT_T0);
    Ints columns[8];
    unpack<C>(codes, at, table, columns);
    for_each<C::GROUPS>([&](auto g) __attribute__((always_inline)) {
      Ints some[C::GROUP / 4][1];
      for_each<C::GROUP / 4>([&](auto j) __attribute__((always_inline)) { some[j][0] = columns[g * C::GROUP / 4 + j]; });
      Floats scales, mins;
      f.of_group(i * C::GROUPS + g, scales, mins);
      add_group<F, R, 1>(x, x.codes.get() + place * BLOCK + g * C::GROUP, place, g, some, &scales, &mins, acc);
    });
  }
  for (int l = 0; l < LANES; ++l)
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[l][r], lane(acc[r][0], l));
}

// Two registers of tiles with a byte for every code, and all their factors as floats: for many rows.
template <class F>
struct Expanded {
  using C = typename F::C;
  const std::unique_ptr<Ints[][2]> columns;            // [blocks, 8]
  const std::unique_ptr<Floats[][2]> scales, mins;  // [blocks, GROUPS]

  explicit Expanded(int64_t blocks)
      : columns(new Ints[blocks * 8][2]), scales(new Floats[blocks * C::GROUPS][2]),
        mins(new Floats[F::MINS ? blocks * C::GROUPS : 0][2]) {}

  // Expands LANES tiles. The thread's next tiles lie right behind them, and are asked for already.
  void fill(F f, int side) {
    const int64_t next = LANES * f.units * f.per_unit * C::BYTES;
    const Ints table = f.table();
    const uint8_t* codes[LANES];
    for (int l = 0; l < LANES; ++l) codes[l] = f.codes(f.tiles[l]);
    for (int64_t unit = 0, b = 0; unit < f.units; ++unit) {
      f.begin(unit);
      for (int64_t i = 0; i < f.per_unit; ++i, ++b) {
        for (int64_t line = 0; line < C::BYTES; line += 64)
          for (int l = 0; l < LANES; ++l) _mm_prefetch((const char*)codes[l] + b * C::BYTES + line + next, _MM_HINT_T1);
        Ints found[8];
        unpack<C>(codes, b * C::BYTES, table, found);
        for (int j = 0; j < 8; ++j) columns[b * 8 + j][side] = found[j];
        for (int g = 0; g < C::GROUPS; ++g) {
          Floats scale, min;
          f.of_group(i * C::GROUPS + g, scale, min);
          scales[b * C::GROUPS + g][side] = scale;
          if (F::MINS) mins[b * C::GROUPS + g][side] = min;
        }
      }
    }
  }

  // A panel of R rows from `row` on -> out[2 LANES][R][8].
  template <int R>
  void multiply(const Rows& x, int64_t row, float (*out)[MANY_ROWS][TILE]) const {
    Floats acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = every(0.f);
    for (int64_t b = 0; b < x.blocks; ++b) {
      const int64_t at = row * x.blocks + b * R;
#pragma GCC unroll 2
      for (int g = 0; g < C::GROUPS; ++g) {
        const int64_t group = b * C::GROUPS + g;
        add_group<F, R, 2>(x, x.codes.get() + at * BLOCK + g * C::GROUP, at, g, &columns[b * 8 + g * C::GROUP / 4], scales[group],
                           F::MINS ? mins[group] : nullptr, acc);
      }
    }
    for (int t = 0; t < 2 * LANES; ++t)
      for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[t][r], lane(acc[r][t / LANES], t % LANES));
  }
};

// The values of one block of a tile -> out[column][row]. Products are exact, so a value is rounded once, with its min.
template <class C>
[[gnu::noinline]] void decode_block(const Part& part, int64_t tile, int64_t block, float (*out)[TILE]) {
  const int64_t per_unit = part.unit / BLOCK;
  const Factors factors(part, tile, block / per_unit);
  const uint8_t* codes[LANES];
  for (int l = 0; l < LANES; ++l) codes[l] = part.codes + tile * part.tile_codes;
  Ints columns[8];
  unpack<C>(codes, block * C::BYTES, four_times(_mm_loadu_si128((const __m128i*)part.table)), columns);
  const __m256 offset = _mm256_set1_ps(part.offset);
  for (int j = 0; j < 8; ++j) {
    alignas(64) uint8_t lanes[LANES * 32];
    __m256 scale, min;
    store(lanes, columns[j]);
    factors.of_group<C>(block % per_unit * C::GROUPS + j * 4 / C::GROUP, scale, min);
    const __m256i four = _mm256_load_si256((const __m256i*)lanes);
    for (int c = 0; c < 4; ++c) {
      const __m256i code = _mm256_and_si256(_mm256_srli_epi32(four, 8 * c), _mm256_set1_epi32(255));
      const __m256 level = _mm256_sub_ps(_mm256_cvtepi32_ps(code), offset);
      _mm256_storeu_ps(out[4 * j + c], part.minima ? _mm256_fmadd_ps(level, scale, min) : _mm256_mul_ps(level, scale));
    }
  }
}

// R activation rows x [R][K], which are not rounded, times one tile of a part -> out[R][8].
template <int R>
[[gnu::noinline]] void multiply_part_exact(const Part& part, const float* x, int64_t tile, float (*out)[TILE]) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < part.k / BLOCK; ++b) {
    float values[BLOCK][TILE];
    with_codes(part, [&](auto codes) { decode_block<decltype(codes)>(part, tile, b, values); });
    for (int64_t k = 0; k < BLOCK; ++k)
      for (int r = 0; r < R; ++r)
        acc[r] = _mm256_fmadd_ps(_mm256_loadu_ps(values[k]), _mm256_set1_ps(x[r * part.k + b * BLOCK + k]), acc[r]);
  }
  for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[r], acc[r]);
}

template <Kind KIND>
inline __m256 eight_floats(const uint8_t* codes, int64_t at) {
  if (KIND == FP32) return _mm256_loadu_ps((const float*)codes + at);
  const __m128i v = _mm_loadu_si128((const __m128i*)((const uint16_t*)codes + at));
  return KIND == FP16 ? _mm256_cvtph_ps(v) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}

// R activation rows x [R][K] times tiles a and b of a float weight, added up in the order of the columns.
template <Kind KIND, int R>
void multiply_floats(const uint8_t* a, const uint8_t* b, const float* x, int64_t K, float (*out)[FLOAT_ROWS][TILE]) {
  __m256 sum_a[R], sum_b[R];
  for (int r = 0; r < R; ++r) sum_a[r] = sum_b[r] = _mm256_setzero_ps();
  constexpr int64_t BYTES = TILE * (KIND == FP32 ? 4 : 2), AHEAD = 4096;
  for (int64_t k = 0; k < K; ++k) {
    if (k * BYTES % 64 == 0) {  // the tiles of a thread lie one behind the other
      _mm_prefetch((const char*)a + k * BYTES + AHEAD, _MM_HINT_T0);
      _mm_prefetch((const char*)b + k * BYTES + AHEAD, _MM_HINT_T0);
    }
    const __m256 wa = eight_floats<KIND>(a, k * TILE), wb = eight_floats<KIND>(b, k * TILE);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r * K + k]);
      sum_a[r] = _mm256_fmadd_ps(wa, value, sum_a[r]);
      sum_b[r] = _mm256_fmadd_ps(wb, value, sum_b[r]);
    }
  }
  for (int r = 0; r < R; ++r) {
    _mm256_storeu_ps(out[0][r], sum_a[r]);
    _mm256_storeu_ps(out[1][r], sum_b[r]);
  }
}

// The same for codes, with activations that are not rounded: R rows x [R][K] times one tile -> out[R][8].
template <int BITS, int R, bool MINS>
void multiply_exact(const Weight& w, const float* x, int64_t tile, float (*out)[TILE]) {
  constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
  const __m256 offset = _mm256_set1_ps(MINS ? 0 : BITS == 4 ? 8 : 128);
  const __m256i low = _mm256_set1_epi32(BITS == 4 ? 15 : 255);
  const int64_t K = w.blocks * BLOCK, per_group = w.blocks / w.groups;
  __m256 scales, mins, acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < w.blocks; ++b) {
    if (b % per_group == 0) {
      const int64_t at = (tile * w.groups + b / per_group) * TILE;
      scales = load_eight(w.scales, w.half, at);
      if (MINS) mins = load_eight(w.mins, w.half_mins, at);
    }
    const uint8_t* codes = w.codes + (tile * w.blocks + b) * BYTES;
    for (int i = 0; i < BYTES / 32; ++i) {
      const __m256i v = _mm256_loadu_si256((const __m256i*)codes + i);
      for (int part = 0; part < 8 / BITS; ++part)  // the low halves hold 4 columns, the high halves the next 4
        for (int j = 0; j < 4; ++j) {
          const __m256i code = _mm256_and_si256(_mm256_srli_epi32(v, 8 * j + 4 * part), low);
          const __m256 level = _mm256_sub_ps(_mm256_cvtepi32_ps(code), offset);
          const __m256 value = MINS ? _mm256_fmadd_ps(level, scales, mins) : _mm256_mul_ps(level, scales);
          const int64_t k = b * BLOCK + (i * 8 / BITS + part) * 4 + j;
          for (int r = 0; r < R; ++r) acc[r] = _mm256_fmadd_ps(value, _mm256_set1_ps(x[r * K + k]), acc[r]);
        }
    }
  }
  for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[r], acc[r]);
}

// One of GATES in kernels/linear.py of eight values, times `up`.
inline __m256 gate_eight(int64_t kind, __m256 value, __m256 up) {
  const __m256 one = _mm256_set1_ps(1.f), limit = _mm256_set1_ps(7.f);
  __m256 factor = one;
  if (kind == 2) {  // GELU: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)
    const __m256 square = _mm256_mul_ps(value, value);
    factor = _mm256_mul_ps(_mm256_set1_ps(1.59576912f), _mm256_fmadd_ps(square, _mm256_set1_ps(0.044715f), one));
  }
  if (kind == 3) {  // clamped; a NaN is the second operand, and stays
    value = _mm256_min_ps(limit, value);
    up = _mm256_add_ps(_mm256_max_ps(_mm256_set1_ps(-7.f), _mm256_min_ps(limit, up)), one);
    factor = _mm256_set1_ps(1.702f);
  }
  const __m256 negative = _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(value, factor));
  return _mm256_mul_ps(_mm256_div_ps(value, _mm256_add_ps(one, exponential(negative))), up);
}

struct Epilogue {
  const float *bias, *residual;
  float* out;
  int64_t n;  // columns of out
  int64_t gated;
  int64_t M;
  int64_t tiles = n / TILE;  // that are multiplied; fewer than there are columns where `out` is one part of the outputs

  // Finishes 8 columns of one row, from column `first` on. up: the second half of a gated product.
  void finish(int64_t row, int64_t first, const float* y, const float* up) const {
    __m256 value = _mm256_loadu_ps(y);
    if (bias) value = _mm256_add_ps(value, _mm256_loadu_ps(bias + first));
    if (gated) {
      __m256 other = _mm256_loadu_ps(up);
      if (bias) other = _mm256_add_ps(other, _mm256_loadu_ps(bias + n + first));
      value = gate_eight(gated, value, other);
    }
    const int64_t at = row * n + first;
    if (residual) value = _mm256_add_ps(value, _mm256_loadu_ps(residual + at));
    _mm256_storeu_ps(out + at, value);
  }

  int64_t pairs() const { return gated ? tiles : (tiles + 1) / 2; }

  // `count` rows from `row` on of two tiles, one of each half; of the last one alone.
  template <int ROWS>
  void finish_pair(int64_t row, int64_t count, const int64_t* pair, const float (*y)[ROWS][TILE]) const {
    for (int64_t r = 0; r < count; ++r) {
      finish(row + r, pair[0] * TILE, y[0][r], y[1][r]);
      if (!gated && pair[1] > pair[0]) finish(row + r, pair[1] * TILE, y[1][r], nullptr);
    }
  }
};

// Rows of a pass, so that passes of at most MOST rows are about equally large.
int64_t rows_at_once(int64_t M, int64_t most) {
  const int64_t passes = (M + most - 1) / most;
  return (M + passes - 1) / passes;
}

// All activation rows times all tiles, two tiles at a time, one of each half (the last one may be alone). So a thread reads
// two streams without gaps, which the processor fetches ahead. multiply(R, row, tiles, left, out) computes R rows from `row`
// on, at most ROWS. The two tiles stay in the first cache level until all rows are done.
template <int ROWS, class Multiply>
void run_pairs(int64_t K, const Epilogue& end, Multiply multiply) {
  const int64_t pairs = end.pairs(), all = end.gated ? 2 * end.tiles : end.tiles, work = 2 * K * TILE * end.M, most = rows_at_once(end.M, ROWS);
  parallel_for(0, pairs, std::max<int64_t>(1, 100000 / work), [&](int64_t first, int64_t last) {
    for (int64_t pair = first; pair < last; ++pair) {
      const int64_t both[2] = {pair, pair + pairs < all ? pair + pairs : pair};
      for (int64_t row = 0; row < end.M; row += most) {
        float y[2][ROWS][TILE];
        const int64_t count = std::min(most, end.M - row);
        with_constant<ROWS>(count, [&](auto rows) { multiply(rows, row, both, row == 0 ? last - pair : 0, y); });
        end.finish_pair(row, count, both, y);
      }
    }
  });
}

template <Kind KIND>
void run_floats(const uint8_t* codes, const float* x, int64_t K, const Epilogue& end) {
  const int64_t bytes = K * TILE * (KIND == FP32 ? 4 : 2);
  run_pairs<FLOAT_ROWS>(K, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t, auto y) {
    multiply_floats<KIND, decltype(rows)::value>(codes + tiles[0] * bytes, codes + tiles[1] * bytes, x + row * K, K, y);
  });
}

// Rows of a panel of rounded activations.
int64_t panel_rows(int64_t M) { return M <= CODE_ROWS ? M : rows_at_once(M, MANY_ROWS); }

// Rows times all tiles of a weight. Few rows read its codes as they are stored, many share codes that are expanded once.
template <class F, class Source>
void run_rounded(const Source& source, const Rows& x, const Epilogue& end) {
  if (end.M <= CODE_ROWS)
    return run_pairs<CODE_ROWS>(x.blocks * BLOCK, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t left, auto y) {
      for (int l = 0; l < 2; l += LANES) multiply<F, decltype(rows)::value>(F{source, tiles + l}, x, row, left, y + l);
    });
  const int64_t pairs = end.pairs(), all = end.gated ? 2 * end.tiles : end.tiles;
  parallel_for(0, (pairs + LANES - 1) / LANES, 1, [&](int64_t first, int64_t last) {
    Expanded<F> expanded(x.blocks);
    for (int64_t pair = first * LANES; pair < std::min(pairs, last * LANES); pair += LANES) {
      int64_t tiles[2 * LANES];
      for (int i = 0; i < LANES; ++i) {
        tiles[2 * i] = std::min(pair + i, pairs - 1);
        tiles[2 * i + 1] = tiles[2 * i] + pairs < all ? tiles[2 * i] + pairs : tiles[2 * i];
      }
      for (int side = 0; side < 2; ++side) expanded.fill(F{source, tiles + side * LANES}, side);
      for (int64_t row = 0; row < end.M; row += x.most) {
        float y[2 * LANES][MANY_ROWS][TILE];
        const int64_t count = std::min(x.most, end.M - row);
        with_constant<MANY_ROWS>(count, [&](auto rows) { expanded.template multiply<decltype(rows)::value>(x, row, y); });
        for (int i = 0; i < LANES && pair + i < pairs; ++i) end.finish_pair(row, count, tiles + 2 * i, y + 2 * i);
      }
    }
  });
}

// rounded: the activations as codes, or null to compute with `x` as it is.
template <int BITS, bool MINS>
void run_codes(const Weight& w, const Rows* rounded, const float* x, const Epilogue& end) {
  if (rounded) return run_rounded<Plain<BITS, MINS>>(w, *rounded, end);
  const int64_t K = w.blocks * BLOCK;
  run_pairs<CODE_ROWS>(K, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t, auto y) {
    for (int l = 0; l < 2; ++l) multiply_exact<BITS, decltype(rows)::value, MINS>(w, x + row * K, tiles[l], y[l]);
  });
}

void run_part(const Part& part, const Rows* rounded, const float* x, const Epilogue& end) {
  if (rounded) return with_codes(part, [&](auto codes) { run_rounded<Nested<decltype(codes)>>(part, *rounded, end); });
  run_pairs<CODE_ROWS>(part.k, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t, auto y) {
    for (int l = 0; l < 2; ++l) multiply_part_exact<decltype(rows)::value>(part, x + row * part.k, tiles[l], y[l]);
  });
}

// The parts of a weight that kernels/blocks.py packed, from their bytes and their table.
std::vector<Part> parts_of(const Tensor& codes, const Tensor& table) {
  std::vector<Part> parts;
  const uint8_t* at = (const uint8_t*)codes.data_ptr();
  const uint8_t* const end = at + codes.numel();
  for (int64_t i = 0; i < table.size(0); ++i) {
    parts.emplace_back(integers(table) + i * table.size(1), at);
    const Part& part = parts.back();
    STD_TORCH_CHECK(!part.minima || (part.low < 8 && !part.table[0]), "the C++ kernels know no bytes with minima");
    at = part.end();
  }
  STD_TORCH_CHECK(at == end, "the parts of a weight do not fill its bytes");
  return parts;
}

int64_t rows_of(const std::vector<Part>& parts) {
  int64_t rows = 0;
  for (const Part& part : parts) rows += part.n;
  return rows;
}

Kind kind_of(const Tensor& codes) {
  using torch::headeronly::ScalarType;
  const ScalarType type = codes.scalar_type();
  if (codes.dim() == 1) return PARTS;
  if (type == ScalarType::Byte) return codes.size(2) == BLOCK * TILE / 2 ? INT4 : INT8;
  return type == ScalarType::Half ? FP16 : type == ScalarType::BFloat16 ? BF16 : FP32;
}

// One row of a weight of codes -> out[K]. A code times a scale of 16 bits is exact in a float, so a value is rounded once.
template <int BITS, bool MINS>
void decode_row(const Weight& w, int64_t row, float* out) {
  constexpr int64_t BYTES = BLOCK * TILE * BITS / 8;
  const int64_t tile = row / TILE, lane = row % TILE, per_group = w.blocks / w.groups;
  alignas(32) float scales[TILE], mins[TILE];
  for (int64_t b = 0; b < w.blocks; ++b) {
    if (b % per_group == 0) {
      const int64_t at = (tile * w.groups + b / per_group) * TILE;
      _mm256_store_ps(scales, load_eight(w.scales, w.half, at));
      if (MINS) _mm256_store_ps(mins, load_eight(w.mins, w.half_mins, at));
    }
    const uint8_t* codes = w.codes + (tile * w.blocks + b) * BYTES + lane * 4;
    for (int i = 0; i < BYTES / 32; ++i)
      for (int part = 0; part < 8 / BITS; ++part)
        for (int j = 0; j < 4; ++j) {
          const int code = codes[i * 32 + j] >> (4 * part) & (BITS == 4 ? 15 : 255);
          *out++ = MINS ? code * scales[lane] + mins[lane] : (code - (BITS == 4 ? 8 : 128)) * scales[lane];
        }
  }
}

const Tensor* given(const Tensor& t) { return t.numel() ? &t : nullptr; }

}  // namespace

namespace eaglet {

Part::Part(const int64_t* number, const uint8_t* bytes)
    : n(number[0]), k(number[1]), low(number[2]), high(number[3]), group(number[4]), unit(number[5]), offset(number[6]),
      nested(number[7]), minima(number[8]), codes(bytes), tile_codes(k * (low + high)) {
  std::copy_n((const uint8_t*)(number + 9), 16, table);
  factors = codes + n / TILE * tile_codes;
  small_bytes = !nested ? 0 : minima && low + high > 2 ? 2 * TILE : TILE;
  unit_bytes = 2 * TILE * (1 + minima) + small_bytes * unit / group;
  tile_factors = k / unit * unit_bytes;
}

Linear::Linear(const Tensor& codes, const Tensor* scales, const Tensor* mins, const float* bias) : bias(bias), kind(kind_of(codes)) {
  if (kind == PARTS) {
    STD_TORCH_CHECK(scales && scales->size(1) == 11, "parts of a weight need their table");
    parts = parts_of(codes, *scales);
    n = rows_of(parts);
    k = parts[0].k;
    return;
  }
  weight = {(const uint8_t*)codes.data_ptr(), scales ? scales->data_ptr() : nullptr, scales && is_half(*scales),
            mins ? mins->data_ptr() : nullptr, mins && is_half(*mins), codes.size(1), scales ? scales->size(1) : 0};
  n = codes.size(0) * TILE;
  k = codes.size(1) * (scales ? BLOCK : 1);
}

Linear::Linear(const tensors::LinearWeights& t) : Linear(t.codes, given(t.scales), given(t.mins), values_or_null(t.bias)) {}

void Linear::operator()(const float* x, int64_t M, const float* residual, int64_t gated, bool round, float* out) const {
  if (kind == PARTS) return multiply_parts(x, M, residual, gated, round, out);
  const Epilogue end{bias, residual, out, gated ? n / 2 : n, gated, M};
  if (kind == FP32) return run_floats<FP32>(weight.codes, x, k, end);
  if (kind == BF16) return run_floats<BF16>(weight.codes, x, k, end);
  if (kind == FP16) return run_floats<FP16>(weight.codes, x, k, end);
  std::optional<Rows> rounded;
  if (round) rounded.emplace(x, M, k, panel_rows(M), false);
  const Rows* rows = round ? &*rounded : nullptr;
  if (kind == INT8) return run_codes<8, false>(weight, rows, x, end);
  return weight.mins ? run_codes<4, true>(weight, rows, x, end) : run_codes<4, false>(weight, rows, x, end);
}

// One product for every part, which writes its own columns. Only where all rows share a format is the gate in the product.
void Linear::multiply_parts(const float* x, int64_t M, const float* residual, int64_t gated, bool round, float* out) const {
  std::optional<Rows> rounded;
  if (round) rounded.emplace(x, M, k, panel_rows(M), std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.group == 16; }));
  const Rows* rows = round ? &*rounded : nullptr;
  const bool apart = gated && parts.size() > 1;
  const Epilogue whole{bias, residual, out, gated ? n / 2 : n, gated, M};
  if (parts.size() == 1) return run_part(parts[0], rows, x, whole);
  const std::unique_ptr<float[]> memory(apart ? new float[M * n] : nullptr);
  int64_t first = 0;
  for (const Part& part : parts) {
    Epilogue end{bias && !apart ? bias + first : nullptr, residual && !apart ? residual + first : nullptr,
                 (apart ? memory.get() : out) + first, n, false, M};
    end.tiles = part.n / TILE;
    run_part(part, rows, x, end);
    first += part.n;
  }
  if (!apart) return;
  parallel_for(0, M, std::max<int64_t>(1, 16384 / n), [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row)
      for (int64_t at = 0; at < n / 2; at += TILE) whole.finish(row, at, &memory[row * n + at], &memory[row * n + n / 2 + at]);
  });
}

void Linear::row(int64_t id, float* out) const {
  STD_TORCH_CHECK(0 <= id && id < n, "row ", id, " of a weight with ", n);
  for (const Part& part : parts) {
    if (id >= part.n) {
      id -= part.n;
      continue;
    }
    return with_codes(part, [&](auto codes) {
      float values[BLOCK][TILE];
      for (int64_t b = 0; b < part.k / BLOCK; ++b) {
        decode_block<decltype(codes)>(part, id / TILE, b, values);
        for (int64_t i = 0; i < BLOCK; ++i) out[b * BLOCK + i] = values[i][id % TILE];
      }
    });
  }
  if (kind == INT4) return weight.mins ? decode_row<4, true>(weight, id, out) : decode_row<4, false>(weight, id, out);
  if (kind == INT8) return decode_row<8, false>(weight, id, out);
  const int64_t first = id / TILE * k * TILE + id % TILE;  // floats lie column by column
  const uint16_t* half = (const uint16_t*)weight.codes + first;
  const float* whole = (const float*)weight.codes + first;
  for (int64_t i = 0; i < k; ++i)
    out[i] = kind == FP32 ? whole[i * TILE]
           : kind == FP16 ? _cvtsh_ss(half[i * TILE])
                          : std::bit_cast<float>((uint32_t)half[i * TILE] << 16);
}

void norm_rows(const float* x, const float* weight, int64_t rows, int64_t size, float eps, float* out) {
  parallel_for(0, rows, std::max<int64_t>(1, 65536 / size), [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row) norm_row(x + row * size, weight, size, eps, out + row * size);
  });
}

}  // namespace eaglet

namespace {

Tensor linear(const Tensor& x, const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& mins,
              const std::optional<Tensor>& bias, const std::optional<Tensor>& residual, int64_t gated, bool round) {
  const Linear layer(codes, scales ? &*scales : nullptr, mins ? &*mins : nullptr, floats(bias));
  Tensor out = torch::stable::new_empty(x, {x.size(0), gated ? layer.n / 2 : layer.n});
  layer(floats(x), x.size(0), floats(residual), gated, round, floats(out));
  return out;
}

// y [M, 2 I] -> [M, I]: the gate of the first half times the second half.
Tensor gate(const Tensor& y, int64_t kind) {
  const int64_t M = y.size(0), I = y.size(1) / 2;
  Tensor out = torch::stable::new_empty(y, {M, I});
  const float* const from = floats(y);
  float* const to = floats(out);
  parallel_for(0, M, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, I)), [&](int64_t a, int64_t b) {
    for (int64_t row = a; row < b; ++row)
      for (int64_t at = 0; at < I; at += 8) {
        alignas(32) float values[3][8] = {};
        const int64_t count = std::min<int64_t>(8, I - at);
        std::copy_n(from + row * 2 * I + at, count, values[0]);
        std::copy_n(from + row * 2 * I + I + at, count, values[1]);
        _mm256_store_ps(values[2], gate_eight(kind, _mm256_load_ps(values[0]), _mm256_load_ps(values[1])));
        std::copy_n(values[2], count, to + row * I + at);
      }
  });
  return out;
}

// Rows ids[count] of a weight, as floats [count, K]: of a tied LM head, whose rows are the embedding.
Tensor rows(const Tensor& ids, const Tensor& codes, const std::optional<Tensor>& scales, const std::optional<Tensor>& mins) {
  const Linear layer(codes, scales ? &*scales : nullptr, mins ? &*mins : nullptr, nullptr);
  Tensor out = torch::stable::new_empty(ids, {ids.size(0), layer.k}, torch::headeronly::ScalarType::Float);
  for (int64_t i = 0; i < ids.size(0); ++i) layer.row(integers(ids)[i], floats(out) + i * layer.k);
  return out;
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = torch::stable::empty_like(x);
  const int64_t size = weight.size(0);
  norm_rows(floats(x), floats(weight), x.numel() / size, size, (float)eps, floats(out));
  return out;
}

// A row of the cache from its hd values.
void store_row(const Cache& cache, const float* x, char* row) {
  if (cache.as == Stored::FLOAT) std::copy_n(x, cache.hd, (float*)row);
  if (cache.as == Stored::HALF)
    for (int64_t i = 0; i < cache.hd; i += 8)
      _mm_storeu_si128((__m128i*)(row + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  if (cache.as != Stored::BYTES) return;
  float largest = 0;
  for (int64_t i = 0; i < cache.hd; ++i) largest = std::abs(x[i]) > largest || std::isnan(x[i]) ? std::abs(x[i]) : largest;
  const float scale = largest / 127;
  for (int64_t i = 0; i < cache.hd; ++i) {
    const float level = std::floor(x[i] / (scale == 0 ? 1 : scale) + 0.5f);
    row[i] = std::abs(level) < 128 ? (char)level : 0;
  }
  std::memcpy(row + cache.hd, &scale, 4);
}

// qkv [B,T,heads,hd] -> rotated q [B,T,Hq,hd]. Rotated keys, and values, go to their slots. norms: of q, k and v, or null.
void rotate_and_write(const Nodes& n, const float* qkv, const float* const norms[3], float* q) {
  const int64_t half = n.hd / 2, all = n.heads + (n.shares ? 0 : 2 * n.kv_heads), rows = n.B * n.T;
  parallel_for(0, rows, std::max<int64_t>(1, 32768 / (all * n.hd)), [&](int64_t first, int64_t last) {
    std::vector<float> normed(n.hd), turned(n.hd);
    for (int64_t row = first; row < last; ++row) {
      for (int64_t h = 0; h < all; ++h) {
        const float* x = qkv + (row * all + h) * n.hd;
        const int64_t which = h < n.heads ? 0 : h < n.heads + n.kv_heads ? 1 : 2;  // q, k or v
        const int64_t at = (row / n.T * n.cache.apart + (h - n.heads) % n.kv_heads) * n.S + n.slots[row];
        char* const place = n.cache.at + (which == 2) * n.cache.values + at * n.cache.row;
        if (norms[which]) {
          norm_row(x, norms[which], n.hd, n.eps, normed.data());
          x = normed.data();
        }
        if (which == 2) {
          store_row(n.cache, x, place);
          continue;
        }
        float* const to = which == 0 ? q + (row * n.heads + h) * n.hd : turned.data();
        for (int64_t i = 0; i < half; i += 8) {
          const __m256 low = _mm256_loadu_ps(x + i), high = _mm256_loadu_ps(x + half + i);
          const __m256 co = _mm256_loadu_ps(n.cos + row * n.turn + i), si = _mm256_loadu_ps(n.sin + row * n.turn + i);
          _mm256_storeu_ps(to + i, _mm256_fnmadd_ps(high, si, _mm256_mul_ps(low, co)));
          _mm256_storeu_ps(to + half + i, _mm256_fmadd_ps(low, si, _mm256_mul_ps(high, co)));
        }
        if (which == 1) store_row(n.cache, to, place);
      }
    }
  });
}

constexpr int64_t WIDTH = 8 * LANES;  // floats of a register
constexpr int64_t CHUNK = 64;         // positions that are attended to at once
constexpr int64_t DEPTH = 64;         // columns of a head that are worked on at once
// Rows and registers of a product that are worked on at once.
constexpr int PRODUCT_ROWS = LANES == 2 ? 6 : 4, PRODUCT_SPAN = LANES == 2 ? 4 : 2;

// Neighbouring values of a row of the cache from column `at` on. Bytes are multiplied by the scale of their row.
template <Stored AS>
inline Floats load_stored(const char* row, int64_t at, int64_t hd) {
  if (AS == Stored::FLOAT) return load((const float*)row + at);
#ifdef WIDE_REGISTERS
  if (AS == Stored::HALF) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(row + 2 * at)));
  const Floats codes = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(row + at))));
#else
  if (AS == Stored::HALF) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(row + 2 * at)));
  const Floats codes = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(row + at))));
#endif
  float scale;
  std::memcpy(&scale, row + hd, 4);
  return times(codes, every(scale));
}

// Asks for `count` values of a row from column `at` on.
template <Stored AS>
inline void ask_for(const char* row, int64_t at, int64_t count) {
  constexpr int64_t SIZE = AS == Stored::FLOAT ? 4 : AS == Stored::HALF ? 2 : 1;
  for (int64_t i = 0; i < count * SIZE; i += 64) _mm_prefetch(row + at * SIZE + i, _MM_HINT_T1);
}

// The columns of a square of registers as its rows.
inline void transpose(Floats v[WIDTH]) {
  Floats parts[WIDTH];  // [4 rows, column % 4]: of these rows the columns 4 l + column % 4, for each quarter or half l
  for (int64_t i = 0; i < WIDTH; i += 4) {
#ifdef WIDE_REGISTERS
    const auto low = [](Floats a, Floats b) { return _mm512_castps_pd(_mm512_unpacklo_ps(a, b)); };
    const auto high = [](Floats a, Floats b) { return _mm512_castps_pd(_mm512_unpackhi_ps(a, b)); };
    const auto first = [](__m512d a, __m512d b) { return _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)); };
    const auto second = [](__m512d a, __m512d b) { return _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)); };
#else
    const auto low = [](Floats a, Floats b) { return _mm256_castps_pd(_mm256_unpacklo_ps(a, b)); };
    const auto high = [](Floats a, Floats b) { return _mm256_castps_pd(_mm256_unpackhi_ps(a, b)); };
    const auto first = [](__m256d a, __m256d b) { return _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)); };
    const auto second = [](__m256d a, __m256d b) { return _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)); };
#endif
    const auto a = low(v[i], v[i + 1]), b = low(v[i + 2], v[i + 3]), c = high(v[i], v[i + 1]), d = high(v[i + 2], v[i + 3]);
    parts[i] = first(a, b);
    parts[i + 1] = second(a, b);
    parts[i + 2] = first(c, d);
    parts[i + 3] = second(c, d);
  }
  for (int64_t j = 0; j < 4; ++j) {
#ifdef WIDE_REGISTERS
    const Floats a = _mm512_shuffle_f32x4(parts[j], parts[4 + j], 0x44), b = _mm512_shuffle_f32x4(parts[8 + j], parts[12 + j], 0x44);
    const Floats c = _mm512_shuffle_f32x4(parts[j], parts[4 + j], 0xEE), d = _mm512_shuffle_f32x4(parts[8 + j], parts[12 + j], 0xEE);
    v[j] = _mm512_shuffle_f32x4(a, b, 0x88);
    v[4 + j] = _mm512_shuffle_f32x4(a, b, 0xDD);
    v[8 + j] = _mm512_shuffle_f32x4(c, d, 0x88);
    v[12 + j] = _mm512_shuffle_f32x4(c, d, 0xDD);
#else
    v[j] = _mm256_permute2f128_ps(parts[j], parts[4 + j], 0x20);
    v[4 + j] = _mm256_permute2f128_ps(parts[j], parts[4 + j], 0x31);
#endif
  }
}

// `columns` columns of the rows of a cache from `at` on -> out [columns][CHUNK], for `count` rows rounded up to WIDTH.
template <Stored AS>
void columns_of(const Cache& cache, const char* from, const int64_t* rows, int64_t count, int64_t at, int64_t columns, float* out) {
  for (int64_t i = 0; i < count; i += WIDTH)
    for (int64_t d = 0; d < columns; d += WIDTH) {
      Floats square[WIDTH];
#pragma GCC unroll 16
      for (int64_t j = 0; j < WIDTH; ++j) {
        const char* const row = from + rows[i + j] * cache.row;
        if (d == 0) ask_for<AS>(row + CHUNK * cache.row, at, columns);
        square[j] = load_stored<AS>(row, at + d, cache.hd);
      }
      transpose(square);
#pragma GCC unroll 16
      for (int64_t j = 0; j < WIDTH; ++j) store(out + (d + j) * CHUNK + i, square[j]);
    }
}

// Rows of floats, from column 0 on.
struct Floated {
  const float* rows;
  int64_t stride;
  Floats operator()(int64_t row, int64_t at) const { return ::load(rows + row * stride + at); }
  void ask_ahead(int64_t, int64_t) const {}
};

// Rows of a cache, from column `first` on.
template <Stored AS>
struct CacheRows {
  const Cache& cache;
  const char* from;
  const int64_t* rows;
  int64_t first;
  Floats operator()(int64_t row, int64_t at) const { return load_stored<AS>(from + rows[row] * cache.row, first + at, cache.hd); }
  void ask_ahead(int64_t row, int64_t count) const { ask_for<AS>(from + (rows[row] + CHUNK) * cache.row, first, count); }
};

// `columns` columns of `count` rows -> out [count][DEPTH].
template <class Source>
void as_floats(const Source& source, int64_t count, int64_t columns, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    source.ask_ahead(i, columns);
    for (int64_t d = 0; d < columns; d += WIDTH) store(out + i * DEPTH + d, source(i, d));
  }
}

// out [R][stride_out] += a [R][stride_a] times `count` rows of b, W registers of them from column `at` on, in the order of these
// rows.
template <int R, int W, class Source>
[[gnu::noinline]] void add_product(const float* a, int64_t stride_a, const Source& b, int64_t at, int64_t count, float* out,
                                   int64_t stride_out) {
  Floats sum[R][W];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) sum[r][w] = load(out + r * stride_out + w * WIDTH);
  for (int64_t i = 0; i < count; ++i) {
    if (at == 0) b.ask_ahead(i, DEPTH);
    Floats row[W];
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) row[w] = b(i, at + w * WIDTH);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats value = every(a[r * stride_a + i]);
#pragma GCC unroll 8
      for (int w = 0; w < W; ++w) sum[r][w] = times_plus(value, row[w], sum[r][w]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int w = 0; w < W; ++w) store(out + r * stride_out + w * WIDTH, sum[r][w]);
}

// The same for `rows` rows of a and `columns` columns, rounded up to WIDTH.
template <class Source>
void add_products(int64_t rows, int64_t columns, const float* a, int64_t stride_a, const Source& b, int64_t count, float* out,
                  int64_t stride_out) {
  for (int64_t r = 0; r < rows; r += PRODUCT_ROWS)
    with_constant<PRODUCT_ROWS>(std::min<int64_t>(PRODUCT_ROWS, rows - r), [&](auto some) {
      for (int64_t d = 0; d < columns; d += PRODUCT_SPAN * WIDTH)
        with_constant<PRODUCT_SPAN>(std::min<int64_t>(PRODUCT_SPAN, (columns - d + WIDTH - 1) / WIDTH), [&](auto width) {
          add_product<some, width>(a + r * stride_a, stride_a, b, d, count, out + r * stride_out + d, stride_out);
        });
    });
}

// scores -> weights e^(score - top), where `top` is the largest. Returns their sum, and top. With a cap, the score is
// cap tanh(score / cap). The memory goes on to a multiple of WIDTH; weights behind the end are too small to change the sum.
std::pair<float, float> weights_of(float* scores, int64_t count, float cap) {
  const int64_t whole = (count + WIDTH - 1) / WIDTH * WIDTH;
  const __m256 limit = _mm256_set1_ps(cap);
  if (cap)
    for (int64_t i = 0; i < whole; i += 8)
      _mm256_storeu_ps(scores + i, _mm256_mul_ps(limit, hyperbolic_tangent(_mm256_div_ps(_mm256_loadu_ps(scores + i), limit))));
  std::fill(scores + count, scores + whole, -INFINITY);
  Floats largest = every(-INFINITY), total = every(0.f);
  for (int64_t i = 0; i < whole; i += WIDTH) largest = larger(load(scores + i), largest);  // leaves NaN out, but the total has it
  const float top = largest_lane(_mm256_max_ps(lane(largest, 0), lane(largest, LANES - 1)));
  for (int64_t i = 0; i < whole; i += WIDTH) {
    const Floats weights = exponentials(plus(load(scores + i), every(-top)));
    store(scores + i, weights);
    total = plus(total, weights);
  }
  return {lane_sum(LANES == 1 ? lane(total, 0) : _mm256_add_ps(lane(total, 0), lane(total, 1))), top};
}

// Attention of the queries q [B,T,Hq,hd] goes through the positions in chunks, which begin at multiples of CHUNK. A chunk has
// weights relative to its own best score, and sums of values with these weights. Then the chunks are added up in order, weighed
// against each other. All of it follows the positions that a token sees, not their slots, and every sum has one order of its
// terms. So a token has the same bits whether its ancestors are history already or nodes of the same tree, and whichever tokens
// and threads it shares a chunk with.
template <Stored AS>
struct Attention {
  static constexpr int64_t QUERIES = 96;  // of a piece, where one token has fewer: keys become floats once for all of them
  static constexpr int64_t STRIDE = CHUNK + WIDTH;  // floats from a query's weights to those of the next one
  const Nodes& n;
  const float *q, scale, cap, *sinks;  // of each query head the score of a key without a value, or null
  float* out;
  const int64_t group, padded;  // queries of a token that share a head of the cache; rounded up to 8
  const int64_t tokens, blocks;  // of a piece; pieces of a sequence and a head
  int64_t chunks = 1;
  std::vector<int64_t> first, last, slots;  // a token's first position, one past its last, and the slots of its nodes

  Attention(const Nodes& n, const float* q, float scale, float cap, const float* sinks, float* out)
      : n(n), q(q), scale(scale), cap(cap), sinks(sinks), out(out), group(n.heads / n.kv_heads), padded((group + 7) / 8 * 8),
        tokens(std::min(n.T, std::max<int64_t>(1, QUERIES / group))), blocks((n.T + tokens - 1) / tokens), first(n.B * n.T),
        last(n.B * n.T), slots(n.B * n.T * n.R) {
    for (int64_t t = 0; t < n.B * n.T; ++t) {
      const int64_t start = n.start[t / n.T];
      first[t] = n.window > 0 ? std::max<int64_t>(0, n.positions[t] - n.window + 1) : 0;
      last[t] = std::max(start, first[t]);
      for (int64_t r = 0, count = 0; r < n.R; ++r)
        if (n.visible[t * n.R + r]) {
          slots[t * n.R + count++] = std::min(start + r, n.trash(t / n.T));
          ++last[t];
        }
      chunks = std::max(chunks, (last[t] + CHUNK - 1) / CHUNK);
    }
  }

  // Some tokens of a sequence and a head of the cache.
  struct Piece {
    int64_t token, count, head;
  };

  Piece piece(int64_t number) const {
    const int64_t block = number % blocks, row = number / blocks / n.kv_heads;
    return {row * n.T + block * tokens, std::min(tokens, n.T - block * tokens), number / blocks % n.kv_heads};
  }

  // Of the queries of a piece the best score, the sum of the weights, and the sums of the values with these weights.
  struct Sums {
    float *tops, *totals, *values;  // [tokens,padded], the same, [tokens,group,hd]
  };

  int64_t floats_of_sums() const { return tokens * (2 * padded + group * n.hd); }
  Sums sums_in(float* memory) const { return {memory, memory + tokens * padded, memory + 2 * tokens * padded}; }

  // What a thread needs to attend to a chunk.
  struct Desk {
    alignas(64) float tile[CHUNK * DEPTH];  // keys or values
    std::unique_ptr<float[]> queries, weights;
    int64_t token = -1, head = -1;  // of the piece whose queries, scaled, lie here

    explicit Desk(const Attention& a)
        : queries(new float[a.tokens * a.group * a.n.hd]), weights(new float[a.tokens * a.group * STRIDE]) {}
  };

  // How many positions of a chunk token t sees.
  int64_t seen(int64_t t, int64_t chunk) const {
    return std::max<int64_t>(0, std::min(last[t], (chunk + 1) * CHUNK) - std::max(first[t], chunk * CHUNK));
  }

  // The cache rows of these positions, and behind them the first one again: loops run on up to a multiple of WIDTH, and a row
  // that the token does not see could hold anything.
  int64_t rows_seen(int64_t t, int64_t chunk, int64_t rows[CHUNK + WIDTH]) const {
    const int64_t count = seen(t, chunk), begin = std::max(first[t], chunk * CHUNK);
    const int64_t nodes = std::max(n.start[t / n.T], first[t]), old = std::clamp<int64_t>(nodes - begin, 0, count);
    for (int64_t i = 0; i < old; ++i) rows[i] = begin + i;
    for (int64_t i = old; i < count; ++i) rows[i] = slots[t * n.R + begin + i - nodes];
    if (count) std::fill_n(rows + count, WIDTH, rows[0]);
    return count;
  }

  // Puts the queries of a piece on the desk.
  void take(const Piece& p, Desk& desk) const {
    if (desk.token == p.token && desk.head == p.head) return;
    desk.token = p.token;
    desk.head = p.head;
    for (int64_t i = 0; i < p.count * group; ++i) {
      const float* from = q + ((p.token + i / group) * n.heads + p.head * group + i % group) * n.hd;
      for (int64_t d = 0; d < n.hd; d += WIDTH) store(&desk.queries[i * n.hd + d], times(load(from + d), every(scale)));
    }
  }

  // Which rows of a chunk the tokens of a piece see.
  struct Sight {
    int64_t rows[CHUNK + WIDTH], count;  // those of the token that sees the most
    int64_t shared;                      // of them, how many all tokens see first
    bool nested = true;                  // no token sees another row
  };

  Sight rows_of(const Piece& p, int64_t chunk) const {
    Sight found;
    int64_t most = p.token;
    for (int64_t t = p.token; t < p.token + p.count; ++t)
      if (seen(t, chunk) > seen(most, chunk)) most = t;
    found.shared = found.count = rows_seen(most, chunk, found.rows);
    for (int64_t t = p.token; t < p.token + p.count; ++t) {
      const bool history = (chunk + 1) * CHUNK <= n.start[t / n.T] && first[t] <= chunk * CHUNK;
      if (t == most || (history && found.count == CHUNK)) continue;
      int64_t own[CHUNK + WIDTH];
      const int64_t count = rows_seen(t, chunk, own), same = std::mismatch(own, own + count, found.rows).first - own;
      found.shared = std::min(found.shared, same);
      found.nested = found.nested && same == count;
    }
    return found;
  }

  // The sums of a piece over one chunk. Rows that all tokens see come first, and then those of each token.
  void attend(const Piece& p, int64_t chunk, Desk& desk, const Sums& sums) const {
    const int64_t hd = n.hd, queries = p.count * group;
    float *const asked = desk.queries.get(), *const weights = desk.weights.get(), *const tile = desk.tile;
    take(p, desk);
    const Sight rows = rows_of(p, chunk);
    const char* const keys = n.cache.at + n.first(p.token / n.T, p.head) * n.cache.row;
    int64_t own[CHUNK + WIDTH];
    // work(first query, rows) for every token that sees more rows. They lie behind the shared ones: in `own`, or if all are
    // nested in `rows`.
    const auto others = [&](auto work) {
      for (int64_t i = 0; i < p.count; ++i)
        if (const int64_t more = seen(p.token + i, chunk) - rows.shared; more > 0) {
          if (!rows.nested) rows_seen(p.token + i, chunk, own);
          work(i * group, more);
        }
    };
    // Scores of some queries with rows of the cache, which lie from `place` on in the chunk.
    const auto score = [&](int64_t query, int64_t number, const int64_t* some, int64_t count, int64_t place) {
      float* const scores = weights + query * STRIDE + place;
      for (int64_t i = 0; i < number; ++i) std::fill_n(scores + i * STRIDE, (count + WIDTH - 1) / WIDTH * WIDTH, 0.f);
      for (int64_t d = 0; d < hd; d += DEPTH) {
        const int64_t width = std::min(DEPTH, hd - d);
        columns_of<AS>(n.cache, keys, some, count, d, width, tile);
        add_products(number, count, asked + query * hd + d, hd, Floated{tile, CHUNK}, width, scores, STRIDE);
      }
    };
    score(0, queries, rows.rows, rows.nested ? rows.count : rows.shared, 0);
    if (!rows.nested) others([&](int64_t query, int64_t count) { score(query, group, own + rows.shared, count, rows.shared); });

    std::fill_n(sums.tops, 2 * tokens * padded + queries * hd, 0.f);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t at = i / group * padded + i % group;
      std::tie(sums.totals[at], sums.tops[at]) = weights_of(weights + i * STRIDE, seen(p.token + i / group, chunk), cap);
    }
    for (int64_t d = 0; d < hd; d += DEPTH) {
      const int64_t width = std::min(DEPTH, hd - d);
      // Adds rows of values, which lie from `place` on in the chunk, to the sums of some queries.
      const auto add_values = [&](int64_t query, int64_t number, const auto& some, int64_t place, int64_t count) {
        add_products(number, width, weights + query * STRIDE + place, STRIDE, some, count, sums.values + query * hd + d, hd);
      };
      const CacheRows<AS> stored{n.cache, keys + n.cache.values, rows.rows, d};
      if (queries <= PRODUCT_ROWS && rows.nested && rows.shared == rows.count) {  // each row is needed once
        add_values(0, queries, stored, 0, rows.shared);
        continue;
      }
      as_floats(stored, rows.nested ? rows.count : rows.shared, width, tile);
      add_values(0, queries, Floated{tile, DEPTH}, 0, rows.shared);
      others([&](int64_t query, int64_t count) {
        if (rows.nested) return add_values(query, group, Floated{tile + rows.shared * DEPTH, DEPTH}, rows.shared, count);
        add_values(query, group, CacheRows<AS>{n.cache, stored.from, own + rows.shared, d}, rows.shared, count);
      });
    }
  }

  // Adds the sums of a chunk to those of the chunks before it.
  void add(const Piece& p, int64_t chunk, const Sums& more, const Sums& sums) const {
    for (int64_t i = 0; i < p.count; ++i) {
      if (!seen(p.token + i, chunk)) continue;
      for (int64_t at = i * padded, g = 0; g < group; g += 8, at += 8) {
        const __m256 old_top = _mm256_loadu_ps(sums.tops + at), new_top = _mm256_loadu_ps(more.tops + at);
        const __m256 top = _mm256_max_ps(old_top, new_top);
        const __m256 before = exponential(_mm256_sub_ps(old_top, top)), now = exponential(_mm256_sub_ps(new_top, top));
        const __m256 total = _mm256_mul_ps(_mm256_loadu_ps(sums.totals + at), before);
        _mm256_storeu_ps(sums.totals + at, _mm256_fmadd_ps(_mm256_loadu_ps(more.totals + at), now, total));
        _mm256_storeu_ps(sums.tops + at, top);
        alignas(32) float factors[2][8];
        _mm256_store_ps(factors[0], before);
        _mm256_store_ps(factors[1], now);
        for (int64_t k = 0; k < std::min<int64_t>(8, group - g); ++k)
          for (int64_t d = 0, place = (i * group + g + k) * n.hd; d < n.hd; d += WIDTH) {
            const Floats value = times(load(sums.values + place + d), every(factors[0][k]));
            store(sums.values + place + d, times_plus(load(more.values + place + d), every(factors[1][k]), value));
          }
      }
    }
  }

  // The output of a piece; each(chunk) has the sums of one chunk.
  template <class Each>
  void add_up(const Piece& p, const Sums& sums, Each each) const {
    for (int64_t i = 0; i < p.count; ++i)
      for (int64_t g = 0; g < padded; ++g) {
        const bool sink = sinks && g < group;
        sums.tops[i * padded + g] = sink ? sinks[p.head * group + g] : std::numeric_limits<float>::lowest();
        sums.totals[i * padded + g] = sink;
      }
    std::fill_n(sums.values, p.count * group * n.hd, 0.f);
    int64_t begin = chunks, end = 0;
    for (int64_t t = p.token; t < p.token + p.count; ++t) {
      begin = std::min(begin, first[t] / CHUNK);
      end = std::max(end, (last[t] + CHUNK - 1) / CHUNK);
    }
    for (int64_t c = begin; c < end; ++c) add(p, c, each(c), sums);
    for (int64_t i = 0; i < p.count * group; ++i) {
      const Floats share = every(1.f / sums.totals[i / group * padded + i % group]);
      float* to = out + ((p.token + i / group) * n.heads + p.head * group + i % group) * n.hd;
      for (int64_t d = 0; d < n.hd; d += WIDTH) store(to + d, times(load(sums.values + i * n.hd + d), share));
    }
  }

  // Threads share the pieces, and where these are few also the chunks. That needs the sums of all chunks at once, of which MOST
  // floats are not too many.
  void operator()() const {
    constexpr int64_t MOST = 1 << 22;
    const int64_t pieces = blocks * n.B * n.kv_heads, size = floats_of_sums();
    const int64_t work = 2 * CHUNK * n.hd * group * tokens;  // of a chunk
    const auto grain = [](int64_t cost) { return std::max<int64_t>(1, 80000 / cost); };
    const bool few = pieces < 4 * (int64_t)torch::stable::get_num_threads() && pieces * chunks * size <= MOST;
    const std::unique_ptr<float[]> memory(new float[few ? pieces * chunks * size : 0]);
    const auto sums_of = [&](int64_t i) { return sums_in(memory.get() + i * size); };
    if (few)
      parallel_for(0, pieces * chunks, grain(work), [&](int64_t begin, int64_t end) {
        Desk desk(*this);
        for (int64_t i = begin; i < end; ++i) attend(piece(i / chunks), i % chunks, desk, sums_of(i));
      });
    parallel_for(0, pieces, grain(few ? work * chunks / CHUNK : work * chunks), [&](int64_t begin, int64_t end) {
      Desk desk(*this);
      const std::unique_ptr<float[]> own(new float[2 * size]);
      for (int64_t i = begin; i < end; ++i) {
        const Piece p = piece(i);
        add_up(p, sums_in(own.get()), [&](int64_t chunk) {
          if (few) return sums_of(i * chunks + chunk);
          attend(p, chunk, desk, sums_in(own.get() + size));
          return sums_in(own.get() + size);
        });
      }
    });
  }
};

// out [B,T,Hq,hd]: the attention of q, with the scores' scale and cap, and a score for each head without a value, or null.
void attend(const Nodes& n, const float* q, float scale, float cap, const float* sinks, float* out) {
  if (n.cache.as == Stored::FLOAT) return Attention<Stored::FLOAT>(n, q, scale, cap, sinks, out)();
  if (n.cache.as == Stored::HALF) return Attention<Stored::HALF>(n, q, scale, cap, sinks, out)();
  Attention<Stored::BYTES>(n, q, scale, cap, sinks, out)();
}

Nodes nodes_of(int64_t B, int64_t T, int64_t heads, const Tensor& kv) {
  const Cache cache(kv);
  return {B, T, heads, kv.size(2), cache.hd, kv.size(3), 0, 0, nullptr, nullptr, 0, cache};
}

void place(Nodes& n, const Tensor& cos, const Tensor& sin, const Tensor& slots, double eps) {
  n.cos = floats(cos);
  n.sin = floats(sin);
  n.turn = cos.size(2);
  n.slots = integers(slots);
  n.eps = (float)eps;
}

Tensor rope_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, Tensor kv, const Tensor& slots,
                     const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
                     bool value_norm, bool shares) {
  Nodes n = nodes_of(qkv.size(0), qkv.size(1), qkv.size(2) - (shares ? 0 : 2 * kv.size(2)), kv);
  place(n, cos, sin, slots, eps);
  n.shares = shares;
  const std::vector<float> ones(value_norm ? n.hd : 0, 1.0f);  // the weights of the norm of values
  const float* const norms[3] = {floats(q_weight), floats(k_weight), value_norm ? ones.data() : nullptr};
  Tensor q = torch::stable::new_empty(qkv, {n.B, n.T, n.heads, n.hd});
  rotate_and_write(n, floats(qkv), norms, floats(q));
  return q;
}

void show(Nodes& n, const Tensor& start, const Tensor& visible, const Tensor& positions, int64_t window) {
  n.start = integers(start);
  n.visible = booleans(visible);
  n.positions = integers(positions);
  n.R = visible.size(2);
  n.window = window;
}

Tensor tree_attention(const Tensor& q, const Tensor& kv, const Tensor& start, const Tensor& visible,
                      const Tensor& positions, int64_t window, double scale, double cap,
                      const std::optional<Tensor>& sinks, const std::optional<Tensor>& segments) {
  Nodes n = nodes_of(q.size(0), q.size(1), q.size(2), kv);
  STD_TORCH_CHECK(visible.size(0) == n.B && visible.size(1) == n.T, "every query needs to know which nodes it sees");
  show(n, start, visible, positions, window);
  if (segments) n.segments = integers(*segments);
  Tensor out = torch::stable::empty_like(q);
  attend(n, floats(q), (float)scale, (float)cap, floats(sinks), floats(out));
  return out;
}

}  // namespace

namespace eaglet {

Layer::Layer(const tensors::LayerWeights& t)
    : input_norm(values_or_null(t.input_norm)), attention_norm(values_or_null(t.attention_norm)),
      post_norm(values_or_null(t.post_norm)), mlp_norm(values_or_null(t.mlp_norm)), q_norm(values_or_null(t.q_norm)),
      k_norm(values_or_null(t.k_norm)), qkv(t.qkv), o(t.o), gate_up(t.gate_up), down(t.down) {}

void Layer::write(const Nodes& n, const float* x, bool round, float* const buffer[3]) const {
  const int64_t M = n.B * n.T;
  const float* const norms[3] = {q_norm, k_norm, nullptr};
  if (input_norm) norm_rows(x, input_norm, M, qkv.k, n.eps, buffer[0]);
  qkv(input_norm ? buffer[0] : x, M, nullptr, false, round, buffer[1]);
  rotate_and_write(n, buffer[1], norms, buffer[2]);
}

// out = x + y, all [size].
void add(const float* x, const float* y, int64_t size, float* out) {
  parallel_for(0, size / TILE, 16384 / TILE, [&](int64_t first, int64_t last) {
    for (int64_t i = first * TILE; i < last * TILE; i += TILE)
      _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
  });
}

void Layer::finish(const Nodes& n, const float* residual, float scale, bool round, float* const buffer[3], float* out) const {
  const int64_t M = n.B * n.T, H = o.n;
  float *a = buffer[0], *b = buffer[1], *c = buffer[2];
  attend(n, c, scale, cap, nullptr, a);
  o(a, M, attention_norm ? nullptr : residual, 0, round, b);
  if (attention_norm) {
    norm_rows(b, attention_norm, M, H, n.eps, a);
    add(residual, a, M * H, b);
  }
  if (post_norm) norm_rows(b, post_norm, M, H, n.eps, a);
  gate_up(post_norm ? a : b, M, nullptr, gate, round, c);
  if (!mlp_norm) return down(c, M, b, 0, round, out);
  down(c, M, nullptr, 0, round, a);
  norm_rows(a, mlp_norm, M, H, n.eps, c);
  add(b, c, M * H, out);
}

}  // namespace eaglet

namespace {

// Decoder layers that `layers` runs one after another.
struct Stack {
  static constexpr int64_t MARK = 0x65616C6574537461;
  static constexpr char NAME[] = "layers";
  const int64_t mark = mark_of(this);
  std::vector<Tensor> weights;
  std::vector<Layer> layers;
  std::optional<Tensor> norm;            // after the last layer
  std::vector<int64_t> windows, angles;  // of each layer: its window or 0, and the column of its angles
  float eps, scale;
  int64_t widest = 0;
};

Tensor stack_layers(std::vector<Tensor> weights, std::optional<Tensor> norm, std::vector<int64_t> windows,
                    std::vector<int64_t> angles, int64_t gate, double eps, double scale, double cap) {
  auto stack = std::make_unique<Stack>();
  stack->weights = std::move(weights);
  stack->norm = std::move(norm);
  stack->windows = std::move(windows);
  stack->angles = std::move(angles);
  stack->eps = (float)eps;
  stack->scale = (float)scale;
  constexpr size_t TENSORS = tensors::LayerWeights::TENSORS;
  STD_TORCH_CHECK(stack->weights.size() == stack->windows.size() * TENSORS, "a layer has ", TENSORS, " tensors");
  for (size_t i = 0; i < stack->windows.size(); ++i) {
    Layer& layer = stack->layers.emplace_back(tensors::LayerWeights(&stack->weights[i * TENSORS]));
    layer.gate = gate;
    layer.cap = (float)cap;
    stack->widest = std::max(stack->widest, stack->layers[i].widest());
  }
  return keep(std::move(stack));
}

// x [B,T,in] -> ([B,T,H], the inputs of the layers `taps` side by side [B,T,taps H]). kv [L,2,B,Hkv,S,hd]. nodes: what the
// layers share, as `tensors::Nodes`. residual: as for `Layer`, of a single one.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& stacked,
                                  std::vector<Tensor> nodes, Tensor kv, bool round, std::vector<int64_t> taps) {
  const Stack& stack = object_of<Stack>(stacked);
  const auto shared = record<tensors::Nodes>(nodes);
  const std::vector<Layer>& all = stack.layers;
  const int64_t L = all.size(), B = x.size(0), T = x.size(1), M = B * T, kv_heads = kv.size(3);
  const Cache cache(kv);
  const int64_t hd = cache.hd;
  const int64_t widest = stack.widest;
  const int64_t H = all[0].o.n, W = taps.size();
  Nodes n{B, T, all[0].qkv.n / hd - 2 * kv_heads, kv_heads, hd, kv.size(4), 0, 0, nullptr, nullptr, 0, cache};
  place(n, shared.cos, shared.sin, shared.slots, stack.eps);
  if (shared.segments.numel()) n.segments = integers(shared.segments);
  Tensor out = torch::stable::new_empty(x, {B, T, H}), tapped = torch::stable::new_empty(x, {B, T, W * H});
  const std::unique_ptr<float[]> memory(new float[M * (3 * widest + H)]);
  float* const buffer[3] = {memory.get(), memory.get() + M * widest, memory.get() + 2 * M * widest};
  float* const outputs[2] = {floats(out), memory.get() + 3 * M * widest};  // taken in turn, so that the last is `out`
  const float* rows = floats(x);
  for (int64_t i = 0; i <= L; ++i) {
    for (int64_t k = 0; k < W; ++k)
      if (taps[k] == i)
        for (int64_t m = 0; m < M; ++m) std::copy_n(rows + m * H, H, floats(tapped) + (m * W + k) * H);
    if (i == L) break;
    show(n, shared.start, stack.windows[i] ? shared.visible_window : shared.visible, shared.positions, stack.windows[i]);
    n.cache = cache.layer(i);
    n.cos = floats(shared.cos) + stack.angles[i];
    n.sin = floats(shared.sin) + stack.angles[i];
    float* to = outputs[(L - 1 - i) % 2];
    all[i].write(n, rows, round, buffer);
    all[i].finish(n, residual ? floats(residual) : rows, stack.scale, round, buffer, to);
    rows = to;
  }
  if (stack.norm) norm_rows(rows, floats(*stack.norm), M, H, stack.eps, floats(out));
  return {out, tapped};
}

double seconds_alone() { return Team::of_process().seconds_alone(); }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) {
  m.def("linear(Tensor x, Tensor codes, Tensor? scales, Tensor? mins, Tensor? bias, Tensor? residual, int gated, "
        "bool round) -> Tensor");
  m.def("gate(Tensor y, int kind) -> Tensor");
  m.def("rows(Tensor ids, Tensor codes, Tensor? scales, Tensor? mins) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rope_write_kv(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv, Tensor slots, Tensor? q_weight, "
        "Tensor? k_weight, float eps, bool value_norm, bool shares) -> Tensor");
  m.def("tree_attention(Tensor q, Tensor kv, Tensor start, Tensor visible, Tensor positions, int window, float scale, float cap, "
        "Tensor? sinks, Tensor? segments) -> Tensor");
  m.def("stack_layers(Tensor[] weights, Tensor? norm, int[] windows, int[] angles, int gate, float eps, float scale, "
        "float cap) -> Tensor");
  m.def("layers(Tensor x, Tensor? residual, Tensor stacked, Tensor[] nodes, Tensor(a!) kv, bool round, int[] taps) "
        "-> (Tensor, Tensor)");
  m.def("seconds_alone() -> float");
}

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CompositeExplicitAutograd, m) { m.impl("seconds_alone", TORCH_BOX(&seconds_alone)); }

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CPU, m) {
  m.impl("linear", TORCH_BOX(&linear));
  m.impl("gate", TORCH_BOX(&gate));
  m.impl("rows", TORCH_BOX(&rows));
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rope_write_kv", TORCH_BOX(&rope_write_kv));
  m.impl("tree_attention", TORCH_BOX(&tree_attention));
  m.impl("stack_layers", TORCH_BOX(&stack_layers));
  m.impl("layers", TORCH_BOX(&layers));
}
