// Linear layers on x86 CPUs with AVX2. kernels/cpu.py says what they compute.
//
// No bit of a row's result depends on the other rows, on their number, or on the number of threads.
//
// A tile holds 8 output rows of a weight. Floats lie column by column, and are multiplied in float32.
//
// The codes of int4 and int8 lie in blocks of 32 columns, so that every 32-bit lane of a register belongs to one output row
// and holds 4 neighbouring columns. Activations are rounded to int8 with one scale per row and block. The integer sum of a
// block is exact, and blocks are added up in float32 in the order of the columns, lane by lane.

#include "registers.h"

#include <bit>
#include <cstring>

namespace {

using namespace eaglet;

// Activation rows that share a loaded weight: as many as fit into the registers. More than FEW are MANY.
constexpr int FLOAT_ROWS = LANES == 2 ? 8 : 6, CODE_ROWS = LANES == 2 ? 8 : 4, MANY_ROWS = LANES == 2 ? 6 : 4, FEW = 8;
constexpr int SIDES = 2 / LANES;  // registers of a pair of tiles

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

// The sum of a block begins with `start_of`, which lowers all codes by OFFSET, takes the products of 4 codes and 4 activations in
// every 32 bits, and ends. start: of one row and block, `Rows::START`.
#if defined(WIDE_REGISTERS) || defined(__AVXVNNI__)
template <int OFFSET>
inline Ints start_of(const float* start) {
  return OFFSET ? times_power<OFFSET ? __builtin_ctz(OFFSET | 1 << 30) : 0>(same_bits(every(*start))) : every(0);
}
template <int BITS>
constexpr int FIT = 1;
template <int BITS>
inline Ints prepared(Ints w) {
  return w;
}
template <int BITS, int COUNT>
inline Ints add_products(Ints sum, const Ints w[], const Ints x[]) {
  for (int i = 0; i < COUNT; ++i) sum = add_byte_products(sum, w[i], x[i]);
  return sum;
}
template <int BITS>
inline Ints end_sum(Ints sum) {
  return sum;
}
#else
// Without products of bytes that are added up in 32 bits, they are added up in 16 bits as far as they fit. Of up to 4 bits all do:
// 16 * 15 * 127 is less than 2^15. So does their sum with -4 times the total of the block, with which each half of a lane begins
// so that together they lower the codes by 8: at most 16 * 11 * 127 + 4 * 16 * 127, even if the sum passes the bounds on its way.
// Of 5 bits the products of four registers fit, 4 * 2 * 31 * 127, and of 6 bits those of two, 2 * 2 * 63 * 127. The codes of int8
// are made signed here, so that their offset of 128 is gone (`OFFSET` of `Plain`): pairs of unsigned products would overflow.
template <int BITS>
constexpr int FIT = BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // registers of products that are added up before they are widened
template <int OFFSET>
inline Ints start_of(const float* start) {
  static_assert(OFFSET == 0 || OFFSET == 8);
  return OFFSET ? same_bits(every(*start)) : every(0);
}
template <int BITS>
inline Ints prepared(Ints w) {
  return BITS < 8 ? w : _mm256_xor_si256(w, _mm256_set1_epi8((char)128));
}
template <int BITS, int COUNT>
inline Ints add_products(Ints sum, const Ints w[], const Ints x[]) {
  Ints products = BITS < 8 ? _mm256_maddubs_epi16(w[0], x[0]) : _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x[0], w[0]));
  for (int i = 1; i < COUNT; ++i) products = _mm256_add_epi16(products, _mm256_maddubs_epi16(w[i], x[i]));
  return BITS <= 4 ? _mm256_add_epi16(sum, products) : _mm256_add_epi32(sum, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
template <int BITS>
inline Ints end_sum(Ints sum) {
  return BITS <= 4 ? _mm256_madd_epi16(sum, _mm256_set1_epi16(1)) : sum;
}
#endif

inline Ints four_columns(const int8_t* x) {
  int32_t word;
  __builtin_memcpy(&word, x, 4);
  return every(word);
}

// The codes of a part: LOW bits of every column in the first runs of a block, HIGH more in the runs behind them, as numbers or as
// places in a table of bytes. GROUP columns share their factors. CENTERED: four bits of which 8 stands for 0.
template <int LOW_, int HIGH_, int GROUP_, bool TABLE_, bool CENTERED_ = false>
struct Codes {
  static constexpr int LOW = LOW_, HIGH = HIGH_, GROUP = GROUP_, GROUPS = BLOCK / GROUP_;
  static constexpr int BITS = !TABLE_ ? LOW_ + HIGH_ : GROUP_ == BLOCK ? 8 : 5;  // the table of groups of 16 has numbers below 32
  static constexpr int64_t BYTES = 32 * (LOW_ + HIGH_);  // of a block of a tile
  static constexpr bool TABLE = TABLE_;
  // Bytes and centered codes lose their offset in the integer sum. Of others it multiplies the sums of the activations, as a min does.
  static constexpr bool MINS = BITS < 8 && !CENTERED_;
  static constexpr int OFFSET = CENTERED_ ? 8 : !MINS && VNNI ? 128 : 0;
};

// Calls call(the Codes of a part).
template <class Call>
void with_codes(const Part& part, Call call) {
  if (part.table[0] && part.group == 16) return call(Codes<4, 0, 16, true>());
  if (part.table[0]) return call(Codes<4, 0, 32, true>());
  if (part.low == 8) return call(Codes<8, 0, 32, false>());
  if (part.low == 2 && part.high == 0) return call(Codes<2, 0, 16, false>());
  if (part.low == 2) return call(Codes<2, 1, 16, false>());
  if (part.high == 2) return call(Codes<4, 2, 16, false>());
  if (part.high == 1) return call(Codes<4, 1, 32, false>());
  if (!part.nested && !part.minima && part.offset == 8) return call(Codes<4, 0, 32, false, true>());
  return call(Codes<4, 0, 32, false>());
}

// The codes of a block of a pair of tiles, in the order of the columns: J goes from 0 to 7, for all sides.
template <class C>
struct Packed {
  const uint8_t* const* codes;  // of the two tiles
  const int64_t at;
  const Ints table;
  Ints low[SIDES], high[SIDES];

  // Columns 4 J to 4 J + 3 of LANES tiles, as they are stored.
  template <int J>
  [[gnu::always_inline]] Ints stored(int side) {
    constexpr int PER = 8 / C::LOW, ABOVE = C::HIGH ? 8 / (C::HIGH | !C::HIGH) : 1;
    if (J % PER == 0) low[side] = load_codes(codes + side * LANES, at + 32 * (J / PER));
    if (C::HIGH && J % ABOVE == 0) high[side] = load_codes(codes + side * LANES, at + 32 * (C::LOW + J / ABOVE));
    Ints code = PER == 1 ? low[side] : moved<-(J % PER) * C::LOW>(low[side], (1 << C::LOW) - 1);
    if (C::HIGH) code = both(code, moved<C::LOW - J % ABOVE * C::HIGH>(high[side], ((1 << C::HIGH) - 1) << C::LOW));
    return C::TABLE ? look_up(table, code) : code;
  }

  // The same as `add_products` takes them.
  template <int J>
  [[gnu::always_inline]] Ints take(int side) {
    return prepared<C::BITS>(stored<J>(side));
  }
};

// What one code of a tile's rows stands for, and what code 0 does, in the groups of a unit of columns.
struct Factors {
  const Part& part;
  const uint8_t* small;
  __m256 scale, min;

  Factors(const Part& part, int64_t tile, int64_t unit) : part(part) { load(tile, unit); }

  void load(int64_t tile, int64_t unit) {
    const uint8_t* const at = part.scales + tile * part.tile_scales + unit * part.unit_scales;
    small = at + part.unit_scales - part.unit / part.group * part.small_bytes;
    scale = load_eight(at, part.half_scales, 0);
    min = part.minima ? load_eight(part.mins + tile * part.tile_mins + unit * part.unit_mins, part.half_mins, 0) : _mm256_setzero_ps();
  }

  template <class C>
  void of_group(int64_t group, __m256& group_scale, __m256& group_min) const {
    group_scale = scale;
    group_min = min;
    if (!part.nested) return;
    const uint8_t* const own = small + group * part.small_bytes;
    const auto wide = [](__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); };
    const __m128i eight = _mm_loadl_epi64((const __m128i*)own), low = _mm_set1_epi8(15);
    if (part.fp8) {  // the bits of 2^-8 times the number in float16, if none is negative
      group_scale = _mm256_mul_ps(scale, _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(eight), 7)));
      return;
    }
    if (C::BITS == 2) {
      group_scale = _mm256_mul_ps(scale, wide(_mm_and_si128(eight, low)));
      group_min = _mm256_mul_ps(min, wide(_mm_and_si128(_mm_srli_epi16(eight, 4), low)));
      return;
    }
    group_scale = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight)));
    if (part.minima) group_min = _mm256_mul_ps(min, wide(_mm_loadl_epi64((const __m128i*)(own + 8))));
  }
};

// A pair of tiles of a part.
template <class C>
struct Pair {
  const Part& part;
  const int64_t* tiles;
  const int64_t units = part.k / part.unit, per_unit = part.unit / BLOCK;
  Factors factors[2] = {Factors(part, tiles[0], 0), Factors(part, tiles[1], 0)};
  Floats scale[SIDES], min[SIDES];

  const uint8_t* codes(int64_t tile) const { return part.codes + tile * part.tile_codes; }
  Ints table() const { return four_times(_mm_loadu_si128((const __m128i*)part.table)); }
  void begin(int64_t unit) {
    for (int t = 0; t < 2; ++t) factors[t].load(tiles[t], unit);
    if (!part.nested) join(0);
  }
  void of_group(int64_t group, Floats scales[SIDES], Floats mins[SIDES]) {
    if (part.nested) join(group);
    std::copy_n(scale, SIDES, scales);
    if (C::MINS) std::copy_n(min, SIDES, mins);
  }
  void join(int64_t group) {
    __m256 scales[2], mins[2];
    for (int t = 0; t < 2; ++t) {
      factors[t].template of_group<C>(group, scales[t], mins[t]);
      mins[t] = _mm256_fnmadd_ps(_mm256_set1_ps(part.offset), scales[t], mins[t]);
    }
    for (int s = 0; s < SIDES; ++s) {
      scale[s] = side_by_side(scales + s * LANES);
      if (C::MINS) min[s] = side_by_side(mins + s * LANES);
    }
  }
};

// acc += what R rows of a panel and group G of a block add. take(j, s): the codes of columns 4 j to 4 j + 3 of a register of tiles.
template <class C, int R, int S, int G, class Take>
[[gnu::always_inline]] inline void add_group(const Rows& x, int64_t place, Take take, const Floats* scales, const Floats* mins,
                                             Floats (*acc)[S]) {
  constexpr int SPAN = R > 2 ? std::min(FIT<C::BITS>, 2) : FIT<C::BITS>;  // as many as there are registers for
  const int8_t* codes = x.codes.get() + place * BLOCK;
  const float* numbers = x.numbers.get() + place * Rows::KINDS;
  const float* total = C::GROUPS == 1 ? numbers + Rows::SUM * R : x.halves.get() + 2 * place + G * R;
  Ints sums[R][S];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) sums[r][s] = start_of<C::OFFSET>(numbers + Rows::START * R + r);
  for_each<C::GROUP / 4 / SPAN>([&](auto span) __attribute__((always_inline)) {
    constexpr int FIRST = G * C::GROUP / 4 + span * SPAN;
    Ints columns[S][SPAN];
    for_each<SPAN>([&](auto i) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) columns[s][i] = take(std::integral_constant<int, FIRST + i>(), s);
    });
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Ints four[SPAN];
#pragma GCC unroll 4
      for (int i = 0; i < SPAN; ++i) four[i] = four_columns(codes + r * BLOCK + 4 * (FIRST + i));
#pragma GCC unroll 2
      for (int s = 0; s < S; ++s) sums[r][s] = add_products<C::BITS, SPAN>(sums[r][s], columns[s], four);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int s = 0; s < S; ++s) {
      const Floats scaled = times(scales[s], every(numbers[Rows::SCALE * R + r]));
      acc[r][s] = times_plus(to_floats(end_sum<C::BITS>(sums[r][s])), scaled, acc[r][s]);
      if (C::MINS) acc[r][s] = times_plus(mins[s], every(total[r]), acc[r][s]);
    }
}

// A panel of R rows from `row` on times a pair of tiles -> out[2][R][8]. left: tiles from here to the end of the half,
// which lie one behind the other; 0 if they are in the cache already.
template <class C, int R>
[[gnu::noinline]] void multiply(Pair<C> f, const Rows& x, int64_t row, int64_t left, float (*out)[CODE_ROWS][TILE]) {
  // Few rows wait for memory. The second cache level has room for more requests than the first one. (Measured on Zen 4.)
  constexpr bool FAR = R <= 4;
  constexpr int64_t AHEAD = FAR ? 8192 : 4096;
  const int64_t last = left * x.blocks * C::BYTES - AHEAD;
  const Ints table = f.table();
  const uint8_t* const codes[2] = {f.codes(f.tiles[0]), f.codes(f.tiles[1])};
  Floats acc[R][SIDES];
  for (int r = 0; r < R; ++r)
    for (int s = 0; s < SIDES; ++s) acc[r][s] = every(0.f);
  for (int64_t b = 0, unit = 0; b < x.blocks; ++unit) {
    f.begin(unit);
    for (int64_t i = 0; i < f.per_unit; ++i, ++b) {
      const int64_t at = b * C::BYTES, place = row * x.blocks + b * R, ahead = !FAR || at < last ? AHEAD : 0;
      for (int64_t line = 0; line < C::BYTES; line += 64)
        for (int t = 0; t < 2; ++t) _mm_prefetch((const char*)codes[t] + at + line + ahead, FAR ? _MM_HINT_T1 : _MM_HINT_T0);
      Packed<C> packed{codes, at, table};
      for_each<C::GROUPS>([&](auto g) __attribute__((always_inline)) {
        Floats scales[SIDES], mins[SIDES];
        f.of_group(i * C::GROUPS + g, scales, mins);
        const auto take = [&](auto j, int s) __attribute__((always_inline)) { return packed.template take<j>(s); };
        add_group<C, R, SIDES, g>(x, place, take, scales, mins, acc);
      });
    }
  }
  for (int t = 0; t < 2; ++t)
    for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[t][r], lane(acc[r][t / LANES], t % LANES));
}

// Two registers of tiles with a byte for every code, and all their factors as floats: for many rows.
template <class C>
struct Expanded {
  const std::unique_ptr<Ints[][2]> columns;         // [blocks, 8]
  const std::unique_ptr<Floats[][2]> scales, mins;  // [blocks, GROUPS]

  explicit Expanded(int64_t blocks)
      : columns(new Ints[blocks * 8][2]), scales(new Floats[blocks * C::GROUPS][2]),
        mins(new Floats[C::MINS ? blocks * C::GROUPS : 0][2]) {}

  // Expands pair number `pair`. The thread's next tiles lie right behind it, and are asked for already.
  void fill(Pair<C> f, int pair) {
    const int64_t next = LANES * f.units * f.per_unit * C::BYTES;
    const Ints table = f.table();
    const uint8_t* const codes[2] = {f.codes(f.tiles[0]), f.codes(f.tiles[1])};
    for (int64_t unit = 0, b = 0; unit < f.units; ++unit) {
      f.begin(unit);
      for (int64_t i = 0; i < f.per_unit; ++i, ++b) {
        for (int64_t line = 0; line < C::BYTES; line += 64)
          for (int t = 0; t < 2; ++t) _mm_prefetch((const char*)codes[t] + b * C::BYTES + line + next, _MM_HINT_T1);
        Packed<C> packed{codes, b * C::BYTES, table};
        for_each<8>([&](auto j) __attribute__((always_inline)) {
          for (int s = 0; s < SIDES; ++s) columns[b * 8 + j][pair * SIDES + s] = packed.template take<j>(s);
        });
        for (int g = 0; g < C::GROUPS; ++g) {
          Floats scale[SIDES], min[SIDES];
          f.of_group(i * C::GROUPS + g, scale, min);
          std::copy_n(scale, SIDES, scales[b * C::GROUPS + g] + pair * SIDES);
          if (C::MINS) std::copy_n(min, SIDES, mins[b * C::GROUPS + g] + pair * SIDES);
        }
      }
    }
  }

  // A panel of R rows from `row` on -> out[2 LANES][R][8].
  template <int R>
  void multiply(const Rows& x, int64_t row, float (*out)[MANY_ROWS][TILE]) const {
    Floats acc[R][2];
    for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = every(0.f);
    for (int64_t b = 0; b < x.blocks; ++b)
      for_each<C::GROUPS>([&](auto g) __attribute__((always_inline)) {
        const Ints(*const from)[2] = &columns[b * 8];
        const int64_t group = b * C::GROUPS + g;
        add_group<C, R, 2, g>(x, row * x.blocks + b * R, [&](auto j, int s) __attribute__((always_inline)) { return from[j][s]; },
                              scales[group], C::MINS ? mins[group] : nullptr, acc);
      });
    // The tiles of a pair lie side by side, or one register behind the other.
    for (int t = 0; t < 2 * LANES; ++t)
      for (int r = 0; r < R; ++r) _mm256_storeu_ps(out[t][r], lane(acc[r][t / LANES], t % LANES));
  }
};

// The values of one block of a tile -> out[column][row]. Products are exact, so a value is rounded once, with its min.
template <class C>
[[gnu::noinline]] void decode_block(const Part& part, int64_t tile, int64_t block, float (*out)[TILE]) {
  const int64_t per_unit = part.unit / BLOCK;
  const Factors factors(part, tile, block / per_unit);
  const uint8_t* const codes[2] = {part.codes + tile * part.tile_codes, part.codes + tile * part.tile_codes};
  Packed<C> packed{codes, block * C::BYTES, four_times(_mm_loadu_si128((const __m128i*)part.table))};
  const __m256 offset = _mm256_set1_ps(part.offset);
  for_each<8>([&](auto j) {
    alignas(64) uint8_t lanes[LANES * 32];
    __m256 scale, min;
    store(lanes, packed.template stored<j>(0));
    factors.of_group<C>(block % per_unit * C::GROUPS + j * 4 / C::GROUP, scale, min);
    const __m256i four = _mm256_load_si256((const __m256i*)lanes);
    for (int c = 0; c < 4; ++c) {
      const __m256i code = _mm256_and_si256(_mm256_srli_epi32(four, 8 * c), _mm256_set1_epi32(255));
      const __m256 level = _mm256_sub_ps(_mm256_cvtepi32_ps(code), offset);
      _mm256_storeu_ps(out[4 * j + c], part.minima ? _mm256_fmadd_ps(level, scale, min) : _mm256_mul_ps(level, scale));
    }
  });
}

// R activation rows x [R][K], which are not rounded, times one tile of a part -> out[R][8].
template <class C, int R>
[[gnu::noinline]] void multiply_exact(const Part& part, const float* x, int64_t tile, float (*out)[TILE]) {
  __m256 acc[R];
  for (int r = 0; r < R; ++r) acc[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < part.k / BLOCK; ++b) {
    float values[BLOCK][TILE];
    decode_block<C>(part, tile, b, values);
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
        with_constant<ROWS>(count, [&](auto rows) { multiply(rows, row, both, row == 0 ? pairs - pair : 0, y); });
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
int64_t panel_rows(int64_t M) { return rows_at_once(M, M <= FEW ? CODE_ROWS : MANY_ROWS); }

// Rows times all tiles of a part. Few rows read its codes as they are stored, many share codes that are expanded once.
template <class C>
void run_rounded(const Part& part, const Rows& x, const Epilogue& end) {
  if (end.M <= FEW)
    return run_pairs<CODE_ROWS>(part.k, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t left, auto y) {
      multiply<C, decltype(rows)::value>(Pair<C>{part, tiles}, x, row, left, y);
    });
  const int64_t pairs = end.pairs(), all = end.gated ? 2 * end.tiles : end.tiles;
  parallel_for(0, (pairs + LANES - 1) / LANES, 1, [&](int64_t first, int64_t last) {
    Expanded<C> expanded(x.blocks);
    for (int64_t pair = first * LANES; pair < std::min(pairs, last * LANES); pair += LANES) {
      int64_t tiles[2 * LANES];
      for (int i = 0; i < LANES; ++i) {
        tiles[2 * i] = std::min(pair + i, pairs - 1);
        tiles[2 * i + 1] = tiles[2 * i] + pairs < all ? tiles[2 * i] + pairs : tiles[2 * i];
      }
      for (int i = 0; i < LANES; ++i) expanded.fill(Pair<C>{part, tiles + 2 * i}, i);
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
void run_part(const Part& part, const Rows* rounded, const float* x, const Epilogue& end) {
  with_codes(part, [&](auto codes) {
    using C = decltype(codes);
    if (rounded) return run_rounded<C>(part, *rounded, end);
    run_pairs<CODE_ROWS>(part.k, end, [&](auto rows, int64_t row, const int64_t* tiles, int64_t, auto y) {
      for (int l = 0; l < 2; ++l) multiply_exact<C, decltype(rows)::value>(part, x + row * part.k, tiles[l], y[l]);
    });
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
    STD_TORCH_CHECK(part.group == (part.low == 2 || part.high == 2 || part.fp8 ? 16 : 32), "the C++ kernels know no such groups of these bits");
    at = part.end();
  }
  STD_TORCH_CHECK(at == end, "the parts of a weight do not fill its bytes");
  return parts;
}

Kind kind_of(const Tensor& codes) {
  using torch::headeronly::ScalarType;
  const ScalarType type = codes.scalar_type();
  return type == ScalarType::Byte ? CODES : type == ScalarType::Half ? FP16 : type == ScalarType::BFloat16 ? BF16 : FP32;
}

const Tensor* given(const Tensor& t) { return t.numel() ? &t : nullptr; }

}  // namespace

namespace eaglet {

Part::Part(const int64_t* number, const uint8_t* bytes)
    : n(number[0]), k(number[1]), low(number[2]), high(number[3]), group(number[4]), unit(number[5]), offset(number[6]),
      nested(number[7]), fp8(number[7] == 2), minima(number[8]), half_scales(!fp8), codes(bytes), scales(codes + n * k * (low + high) / 8),
      mins(scales + 2 * TILE), tile_codes(k * (low + high)), small_bytes(!nested ? 0 : minima && low + high > 2 ? 2 * TILE : TILE) {
  std::copy_n((const uint8_t*)(number + 9), 16, table);
  unit_scales = unit_mins = (fp8 ? 4 : 2) * TILE * (1 + minima) + small_bytes * unit / group;
  tile_scales = tile_mins = k / unit * unit_scales;
}

Part::Part(const Tensor& codes, const Tensor& scales, const Tensor* mins)
    : n(codes.size(0) * TILE), k(codes.size(1) * BLOCK), low(codes.size(2) / BLOCK), high(0), group(BLOCK), unit(k / scales.size(1)),
      offset(mins ? 0 : low == 4 ? 8 : 128), minima(mins), half_scales(is_half(scales)), half_mins(mins && is_half(*mins)),
      codes((const uint8_t*)codes.data_ptr()), scales((const uint8_t*)scales.data_ptr()),
      mins(mins ? (const uint8_t*)mins->data_ptr() : nullptr), tile_codes(k * low), unit_scales((half_scales ? 2 : 4) * TILE),
      unit_mins((half_mins ? 2 : 4) * TILE) {
  tile_scales = k / unit * unit_scales;
  tile_mins = k / unit * unit_mins;
}

Linear::Linear(const Tensor& codes, const Tensor* scales, const Tensor* mins, const float* bias)
    : values((const uint8_t*)codes.data_ptr()), bias(bias), kind(kind_of(codes)), n(0) {
  if (kind == CODES) {
    STD_TORCH_CHECK(scales && (codes.dim() > 1 || scales->size(1) == 11), "codes need their scales, and parts of a weight their table");
    if (codes.dim() == 1) parts = parts_of(codes, *scales);
    else parts.emplace_back(codes, *scales, mins);
    for (const Part& part : parts) n += part.n;
    k = parts[0].k;
    return;
  }
  n = codes.size(0) * TILE;
  k = codes.size(1);
}

Linear::Linear(const tensors::LinearWeights& t) : Linear(t.codes, given(t.scales), given(t.mins), values_or_null(t.bias)) {}

// One product for every part, which writes its own columns. Only where all rows share a format is the gate in the product.
void Linear::operator()(const float* x, int64_t M, const float* residual, int64_t gated, bool round, float* out) const {
  const Epilogue whole{bias, residual, out, gated ? n / 2 : n, gated, M};
  if (kind == FP32) return run_floats<FP32>(values, x, k, whole);
  if (kind == BF16) return run_floats<BF16>(values, x, k, whole);
  if (kind == FP16) return run_floats<FP16>(values, x, k, whole);
  std::optional<Rows> rounded;
  if (round) rounded.emplace(x, M, k, panel_rows(M), std::any_of(parts.begin(), parts.end(), [](const Part& part) { return part.group == 16; }));
  const Rows* rows = round ? &*rounded : nullptr;
  const bool apart = gated && parts.size() > 1;
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
      float block[BLOCK][TILE];
      for (int64_t b = 0; b < k / BLOCK; ++b) {
        decode_block<decltype(codes)>(part, id / TILE, b, block);
        for (int64_t i = 0; i < BLOCK; ++i) out[b * BLOCK + i] = block[i][id % TILE];
      }
    });
  }
  const int64_t first = id / TILE * k * TILE + id % TILE;  // floats lie column by column
  const uint16_t* half = (const uint16_t*)values + first;
  const float* whole = (const float*)values + first;
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
  if (x.size(0) > 0) layer(floats(x), x.size(0), floats(residual), gated, round, floats(out));
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

}  // namespace

EAGLET_OPERATOR(CPU, linear, "(Tensor x, Tensor codes, Tensor? scales, Tensor? mins, Tensor? bias, Tensor? residual, int gated, "
                "bool round) -> Tensor");
EAGLET_OPERATOR(CPU, gate, "(Tensor y, int kind) -> Tensor");
EAGLET_OPERATOR(CPU, rows, "(Tensor ids, Tensor codes, Tensor? scales, Tensor? mins) -> Tensor");
