// Attention on x86 CPUs with AVX2, and what writes the cache. kernels/cpu.py says what they compute.

#include "pairs.h"

#include <cstring>

namespace {

using namespace eaglet;

// A row of the cache from its hd values.
void store_row(const Cache& cache, const float* x, char* row) {
  if (cache.as == Stored::FLOAT) std::copy_n(x, cache.hd, (float*)row);
  if (cache.as == Stored::HALF)
    for (int64_t i = 0; i < cache.hd; i += 8)
      _mm_storeu_si128((__m128i*)(row + 2 * i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT));
  if (cache.as == Stored::BRAIN)
    for (int64_t i = 0; i < cache.hd; ++i) ((torch::headeronly::BFloat16*)row)[i] = x[i];
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

constexpr int64_t CHUNK = 128;        // positions that are attended to at once
constexpr int64_t DEPTH = 64;         // columns of a head, or pairs of them, that are worked on at once
// Rows and registers of a product that are worked on at once.
constexpr int PRODUCT_ROWS = LANES == 2 ? 6 : 4, PRODUCT_SPAN = LANES == 2 ? 4 : 2;
constexpr int NARROW = 3;  // so many queries read keys and values as they lie

// Neighbouring values of a row of the cache from column `at` on: eight, and a register of them. Bytes are multiplied by the scale
// of their row.
template <Stored AS>
inline __m256 eight_stored(const char* row, int64_t at, int64_t hd) {
  if (AS == Stored::FLOAT) return _mm256_loadu_ps((const float*)row + at);
  if (AS == Stored::HALF) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(row + 2 * at)));
  if (AS == Stored::BRAIN) {
    const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(row + 2 * at)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(high, 16));
  }
  float scale;
  std::memcpy(&scale, row + hd, 4);
  return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(row + at)))), _mm256_set1_ps(scale));
}
template <Stored AS>
inline Floats load_stored(const char* row, int64_t at, int64_t hd) {
#ifdef WIDE_REGISTERS
  if (AS == Stored::HALF) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(row + 2 * at)));
#endif
  const __m256 parts[2] = {eight_stored<AS>(row, at, hd), LANES == 2 ? eight_stored<AS>(row, at + 8, hd) : _mm256_setzero_ps()};
  return side_by_side(parts);
}

// Asks for `count` values of a row from column `at` on. Where it is not inlined, GCC takes it for a function without effect.
template <Stored AS>
[[gnu::always_inline]] inline void ask_for(const char* row, int64_t at, int64_t count) {
  constexpr int64_t SIZE = AS == Stored::FLOAT ? 4 : AS == Stored::BYTES ? 1 : 2;
  for (int64_t i = 0; i < count * SIZE; i += 64) _mm_prefetch(row + at * SIZE + i, _MM_HINT_T1);
}

// The columns of a square of registers as its rows.
inline void transpose(Floats v[WIDTH]) {
  Floats parts[WIDTH];  // [4 rows, column % 4]: of these rows the columns 4 l + column % 4, for each quarter or half l
  for (int64_t i = 0; i < WIDTH; i += 4) {
    const auto low = [](Floats a, Floats b) { return INTRINSIC(castps_pd)(INTRINSIC(unpacklo_ps)(a, b)); };
    const auto high = [](Floats a, Floats b) { return INTRINSIC(castps_pd)(INTRINSIC(unpackhi_ps)(a, b)); };
    const auto first = [](auto a, auto b) { return INTRINSIC(castpd_ps)(INTRINSIC(unpacklo_pd)(a, b)); };
    const auto second = [](auto a, auto b) { return INTRINSIC(castpd_ps)(INTRINSIC(unpackhi_pd)(a, b)); };
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
  Floats operator()(int64_t row, int64_t at) const { return eaglet::load(rows + row * stride + at); }
  [[gnu::always_inline]] void ask_ahead(int64_t, int64_t) const {}
};

// Rows of a cache, from column `first` on.
template <Stored AS>
struct CacheRows {
  const Cache& cache;
  const char* from;
  const int64_t* rows;
  int64_t first;
  Floats operator()(int64_t row, int64_t at) const { return load_stored<AS>(from + rows[row] * cache.row, first + at, cache.hd); }
  __m256 eight(int64_t row, int64_t at) const { return eight_stored<AS>(from + rows[row] * cache.row, first + at, cache.hd); }
  [[gnu::always_inline]] void ask_ahead(int64_t row, int64_t count) const { ask_for<AS>(from + (rows[row] + CHUNK) * cache.row, first, count); }
};

// `columns` columns of `count` rows -> out [count][DEPTH].
template <class Source>
void as_floats(const Source& source, int64_t count, int64_t columns, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    source.ask_ahead(i, columns);
    for (int64_t d = 0; d < columns; d += WIDTH) store(out + i * DEPTH + d, source(i, d));
  }
}

// Scores of R queries q [R][stride] with `count` rows of keys are added to out [R][Attention::STRIDE], in fours. Both ways to
// compute them add up a score in the same order: the columns l, l + 8, l + 16 and so on for each l, and then these eight sums,
// neighbours first.
template <int R, class Source>
[[gnu::noinline]] void add_scores(const float* q, int64_t stride, const Source& keys, int64_t count, int64_t columns, float* out, int64_t stride_out) {
  for (int64_t i = 0; i < count; i += 4) {
    __m256 sums[R][4];
    for_each<R>([&](auto r) { for_each<4>([&](auto k) { sums[r][k] = _mm256_setzero_ps(); }); });
    for (int64_t k = i; k < i + 4; ++k) keys.ask_ahead(k, columns);
    for (int64_t d = 0; d < columns; d += 8) {
      __m256 query[R];
      for_each<R>([&](auto r) { query[r] = _mm256_loadu_ps(q + r * stride + d); });
      for_each<4>([&](auto k) {
        const __m256 key = keys.eight(i + k, d);
        for_each<R>([&](auto r) { sums[r][k] = _mm256_fmadd_ps(query[r], key, sums[r][k]); });
      });
    }
    for_each<R>([&](auto r) {
      const auto pairs = [](__m256 a, __m256 b) { return _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)); };
      const __m256 halves = pairs(pairs(sums[r][0], sums[r][1]), pairs(sums[r][2], sums[r][3]));
      const __m128 four = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
      float* const to = out + r * stride_out + i;
      _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to), four));
    });
  }
}

// The same with the columns of the keys [columns][CHUNK], for R queries and W registers of rows.
template <int R, int W>
[[gnu::noinline]] void add_many_scores(const float* q, int64_t stride, const float* keys, int64_t columns, float* out, int64_t stride_out) {
  Floats held[4][R][W];  // the sums of 1, 2, 4 and 8 chains
  for (int64_t l = 0; l < 8; ++l) {
    Floats sums[R][W];
    for_each<R>([&](auto r) { for_each<W>([&](auto w) { sums[r][w] = every(0.f); }); });
    for (int64_t d = l; d < columns; d += 8) {
      Floats key[W];
      for_each<W>([&](auto w) { key[w] = load(keys + d * CHUNK + w * WIDTH); });
      for_each<R>([&](auto r) {
        const Floats query = every(q[r * stride + d]);
        for_each<W>([&](auto w) { sums[r][w] = times_plus(query, key[w], sums[r][w]); });
      });
    }
    int level = 0;
    for (; l >> level & 1; ++level)
      for_each<R>([&](auto r) { for_each<W>([&](auto w) { sums[r][w] = plus(held[level][r][w], sums[r][w]); }); });
    for_each<R>([&](auto r) { for_each<W>([&](auto w) { held[level][r][w] = sums[r][w]; }); });
  }
  for_each<R>([&](auto r) {
    for_each<W>([&](auto w) {
      float* const to = out + r * stride_out + w * WIDTH;
      store(to, plus(load(to), held[3][r][w]));
    });
  });
}

// out [R][stride_out] += a [R][stride_a] times `count` rows of b, W registers of them from column `at` on, in the order of these
// rows.
template <int R, int W, class Source>
[[gnu::noinline]] void add_product(const float* a, int64_t stride_a, const Source& b, int64_t at, int64_t count, float* out,
                                   int64_t stride_out) {
  Floats sum[R][W];
  for_each<R>([&](auto r) { for_each<W>([&](auto w) { sum[r][w] = load(out + r * stride_out + w * WIDTH); }); });
  for (int64_t i = 0; i < count; ++i) {
    if (at == 0) b.ask_ahead(i, DEPTH);
    Floats value[R];
    for_each<R>([&](auto r) { value[r] = every(a[r * stride_a + i]); });
    for_each<W>([&](auto w) {
      const Floats row = b(i, at + w * WIDTH);
      for_each<R>([&](auto r) { sum[r][w] = times_plus(value[r], row, sum[r][w]); });
    });
  }
  for_each<R>([&](auto r) { for_each<W>([&](auto w) { store(out + r * stride_out + w * WIDTH, sum[r][w]); }); });
}

// The largest of some scores. With a cap, a score becomes cap tanh(score / cap). The memory goes on to a multiple of WIDTH.
float largest_of(float* scores, int64_t count, float cap) {
  const int64_t whole = (count + WIDTH - 1) / WIDTH * WIDTH;
  const __m256 limit = _mm256_set1_ps(cap);
  if (cap)
    for (int64_t i = 0; i < whole; i += 8)
      _mm256_storeu_ps(scores + i, _mm256_mul_ps(limit, hyperbolic_tangent(_mm256_div_ps(_mm256_loadu_ps(scores + i), limit))));
  std::fill(scores + count, scores + whole, -INFINITY);
  Floats largest = every(-INFINITY);
  for (int64_t i = 0; i < whole; i += WIDTH) largest = larger(load(scores + i), largest);  // leaves NaN out, but the total has it
  return largest_lane(_mm256_max_ps(lane(largest, 0), lane(largest, LANES - 1)));
}

inline float total_of(Floats v) { return lane_sum(LANES == 1 ? lane(v, 0) : _mm256_add_ps(lane(v, 0), lane(v, 1))); }

// scores -> weights e^(score - top), where `top` is the largest. Returns their sum, and top. Weights behind the end are too small to
// change the sum.
std::pair<float, float> weights_of(float* scores, int64_t count, float cap) {
  const float top = largest_of(scores, count, cap);
  Floats total = every(0.f);
  for (int64_t i = 0; i < count; i += WIDTH) {
    const Floats weights = exponentials(plus(load(scores + i), every(-top)));
    store(scores + i, weights);
    total = plus(total, weights);
  }
  return {total_of(total), top};
}

#ifdef PAIR_PRODUCTS
// The same for weights in pairs [CHUNK / 2], zero behind the end, in the memory of the scores. A power of two with a polynomial
// whose error, 3e-6, is small beside that of bfloat16.
std::pair<float, float> pairs_of(float* scores, int64_t count, float cap) {
  const float top = largest_of(scores, count, cap);
  const Floats factor = every(1.44269504f), shift = every(top * 1.44269504f);
  Floats total = every(0.f);
  const auto weights = [&](const float* at) {
    const Floats y = larger(every(-126.f), _mm512_fmsub_ps(load(at), factor, shift));
    const Floats n = _mm512_roundscale_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), f = _mm512_sub_ps(y, n);
    Floats p = every(0.00957009f);
    for (float c : {0.05591786f, 0.24024746f, 0.69312179f, 0.99999928f}) p = times_plus(p, f, every(c));
    p = _mm512_scalef_ps(p, n);
    total = plus(total, p);
    return p;
  };
  uint32_t* const to = (uint32_t*)scores;
  for (int64_t i = 0; i < CHUNK; i += 32) {
    const int64_t live = std::clamp<int64_t>(count - i, 0, 32);
    if (!live) {
      _mm512_storeu_si512(to + i / 2, every(0));
      continue;
    }
    const Floats first = weights(scores + i), second = live > WIDTH ? weights(scores + i + WIDTH) : every(0.f);
    _mm512_storeu_si512(to + i / 2, pair_up(first, second, live));
  }
  return {total_of(total), top};
}
#else
constexpr auto pairs_of = weights_of;
#endif

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
  const bool pairs = AS == Stored::BRAIN && PAIRS && n.hd % 32 == 0;  // whether products are those of bfloat16
  int64_t chunks = 1;                       // of a sequence at most, from the first one that its tokens see on
  std::vector<int64_t> first, last, slots;  // a token's first position, one past its last, and the slots of its nodes
  std::vector<int64_t> origin;              // of each sequence the first chunk that its tokens see

  Attention(const Nodes& n, const float* q, float scale, float cap, const float* sinks, float* out)
      : n(n), q(q), scale(scale), cap(cap), sinks(sinks), out(out), group(n.heads / n.kv_heads), padded((group + 7) / 8 * 8),
        tokens(std::min(n.T, std::max<int64_t>(1, QUERIES / group))), blocks((n.T + tokens - 1) / tokens), first(n.B * n.T),
        last(n.B * n.T), slots(n.B * n.T * n.R), origin(n.B, std::numeric_limits<int64_t>::max()) {
    std::vector<int64_t> ends(n.B);
    for (int64_t t = 0; t < n.B * n.T; ++t) {
      const int64_t start = n.start[t / n.T];
      first[t] = n.window > 0 ? std::max<int64_t>(0, n.positions[t] - n.window + 1) : 0;
      last[t] = std::max(start, first[t]);
      for (int64_t r = 0, count = 0; r < n.R; ++r)
        if (n.visible[t * n.R + r]) {
          slots[t * n.R + count++] = n.slot(t / n.T, start + r);
          ++last[t];
        }
      origin[t / n.T] = std::min(origin[t / n.T], first[t] / CHUNK);
      ends[t / n.T] = std::max(ends[t / n.T], (last[t] + CHUNK - 1) / CHUNK);
    }
    for (int64_t b = 0; b < n.B; ++b) chunks = std::max(chunks, ends[b] - origin[b]);
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

  // The rows of memory for so many queries: of tile registers whole squares are written, where there is more than one.
  static int64_t rounded(int64_t queries) { return queries > 16 ? (queries + 15) / 16 * 16 : queries; }

  int64_t floats_of_sums() const { return 2 * tokens * padded + rounded(tokens * group) * n.hd; }
  Sums sums_in(float* memory) const { return {memory, memory + tokens * padded, memory + 2 * tokens * padded}; }

  // What a thread needs to attend to a chunk.
  struct Desk {
#ifdef PAIR_PRODUCTS
    Pairs products;
#endif
    alignas(64) float tile[CHUNK * DEPTH];  // keys or values
    std::unique_ptr<float[]> queries, weights;
    std::unique_ptr<uint32_t[]> columns;  // of the first 16 queries, in pairs
    int64_t token = -1, head = -1;  // of the piece whose queries, scaled, lie here

    explicit Desk(const Attention& a)
        : queries(new float[rounded(a.tokens * a.group) * a.n.hd]), weights(new float[rounded(a.tokens * a.group) * STRIDE]),
          columns(new uint32_t[a.pairs ? 8 * a.n.hd : 0]()) {}
  };

  // How many positions of a chunk token t sees.
  int64_t seen(int64_t t, int64_t chunk) const {
    return std::max<int64_t>(0, std::min(last[t], (chunk + 1) * CHUNK) - std::max(first[t], chunk * CHUNK));
  }

  // The cache rows of these positions, and behind them the first one again: loops run on up to a multiple of STEP, and a row
  // that the token does not see could hold anything.
  int64_t rows_seen(int64_t t, int64_t chunk, int64_t rows[CHUNK + STEP]) const {
    const int64_t count = seen(t, chunk), begin = std::max(first[t], chunk * CHUNK);
    const int64_t nodes = std::max(n.start[t / n.T], first[t]), old = std::clamp<int64_t>(nodes - begin, 0, count);
    const int64_t wrap = n.ring ? n.S - 1 : std::numeric_limits<int64_t>::max();
    for (int64_t i = 0, at = begin % wrap; i < old; ++i, at = at + 1 == wrap ? 0 : at + 1) rows[i] = at;
    for (int64_t i = old; i < count; ++i) rows[i] = slots[t * n.R + begin + i - nodes];
    if (count) std::fill_n(rows + count, STEP, rows[0]);
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
#ifdef PAIR_PRODUCTS
      const float* const floats = &desk.queries[i * n.hd];
      uint32_t* const pair = (uint32_t*)floats;
      for (int64_t d = 0; d < n.hd && pairs; d += 32)
        _mm512_storeu_si512(pair + d / 2, pair_up(load(floats + d), load(floats + d + WIDTH), 32));
      for (int64_t d = 0; d < n.hd / 2 && pairs && i < 16; ++d) desk.columns[d * 16 + i] = pair[d];
#endif
    }
  }

  // Which rows of a chunk the tokens of a piece see.
  struct Sight {
    int64_t rows[CHUNK + STEP], count;  // those of the token that sees the most
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
      int64_t own[CHUNK + STEP];
      const int64_t count = rows_seen(t, chunk, own), same = std::mismatch(own, own + count, found.rows).first - own;
      found.shared = std::min(found.shared, same);
      found.nested = found.nested && same == count;
    }
    return found;
  }

  // Rows of the cache for some queries of a piece, and their place in the chunk.
  struct Some {
    int64_t query, number;
    const int64_t* rows;
    int64_t count, place;
  };

  // The sums of a piece over one chunk. Rows that all tokens see come first, and then those of each token.
  void attend(const Piece& p, int64_t chunk, Desk& desk, const Sums& sums) const {
    const int64_t queries = p.count * group;
    take(p, desk);
    const Sight rows = rows_of(p, chunk);
    const char* const keys = n.cache.at + n.first(p.token / n.T, p.head) * n.cache.row;
    const auto each = [&](int64_t shared, auto work) {
      if (shared) work(Some{0, pairs && has_tiles() ? rounded(queries) : queries, rows.rows, shared, 0});
      for (int64_t i = 0; i < p.count; ++i)
        if (const int64_t more = seen(p.token + i, chunk) - shared; more > 0) {
          int64_t own[CHUNK + STEP];
          rows_seen(p.token + i, chunk, own);
          work(Some{i * group, group, own + shared, more, shared});
        }
    };
    const int64_t first = rows.nested ? rows.count : pairs ? rows.shared / STEP * STEP : rows.shared;
    each(first, [&](const Some& some) { pairs ? score_pairs(some, keys, desk) : score(some, keys, desk); });
    std::fill_n(sums.tops, 2 * tokens * padded, 0.f);
    for (int64_t i = 0; i < queries; ++i) {
      const int64_t at = i / group * padded + i % group, count = seen(p.token + i / group, chunk);
      std::tie(sums.totals[at], sums.tops[at]) = (pairs ? pairs_of : weights_of)(&desk.weights[i * STRIDE], count, cap);
    }
    if (!pairs) {  // rows that some tokens do not see are left out, since they could hold anything
      std::fill_n(sums.values, queries * n.hd, 0.f);
      return each(rows.shared, [&](const Some& some) { add_values(some, keys + n.cache.values, desk, sums); });
    }
    each(first, [&](const Some& some) {  // they have the weight 0, and what is not finite is left out
      for (int64_t row : add_pairs_of_values(some, keys + n.cache.values, desk, sums))
        for (int64_t i = some.query; i < std::min(queries, some.query + some.number); ++i)
          if (seen(p.token + i / group, chunk) > row) sums.totals[i / group * padded + i % group] = NAN;
    });
  }

  void score(const Some& some, const char* keys, Desk& desk) const {
    float* const scores = &desk.weights[some.query * STRIDE + some.place];
    for (int64_t i = 0; i < some.number; ++i) std::fill_n(scores + i * STRIDE, (some.count + WIDTH - 1) / WIDTH * WIDTH, 0.f);
    for (int64_t d = 0; d < n.hd; d += DEPTH) {
      const int64_t width = std::min(DEPTH, n.hd - d);
      const float* const from = &desk.queries[some.query * n.hd + d];
      if (some.number <= NARROW) {
        const CacheRows<AS> stored{n.cache, keys, some.rows, d};
        with_constant<NARROW>(some.number, [&](auto R) { add_scores<R>(from, n.hd, stored, some.count, width, scores, STRIDE); });
        continue;
      }
      columns_of<AS>(n.cache, keys, some.rows, some.count, d, width, desk.tile);
      in_tiles<PRODUCT_ROWS, PRODUCT_SPAN>(some.number, some.count, [&](auto R, int64_t r, auto W, int64_t i) {
        add_many_scores<R, W>(from + r * n.hd, n.hd, desk.tile + i, width, scores + r * STRIDE + i, STRIDE);
      });
    }
  }

  void add_values(const Some& some, const char* values, Desk& desk, const Sums& sums) const {
    for (int64_t d = 0; d < n.hd; d += DEPTH) {
      const int64_t width = std::min(DEPTH, n.hd - d);
      const auto add = [&](const auto& rows) {
        const auto product = [&](auto R, int64_t r, auto W, int64_t at) {
          add_product<R, W>(&desk.weights[(some.query + r) * STRIDE + some.place], STRIDE, rows, at, some.count,
                            sums.values + (some.query + r) * n.hd + d + at, n.hd);
        };
        some.number <= NARROW ? in_tiles<NARROW, 4>(some.number, width, product) : in_tiles<PRODUCT_ROWS, PRODUCT_SPAN>(some.number, width, product);
      };
      const CacheRows<AS> stored{n.cache, values, some.rows, d};
      if (some.number <= PRODUCT_ROWS) {  // each row is needed once
        add(stored);
        continue;
      }
      as_floats(stored, some.count, width, desk.tile);
      add(Floated{desk.tile, DEPTH});
    }
  }

#ifdef PAIR_PRODUCTS
  // The same with products of bfloat16, whose order of terms follows the places in the chunk as well.
  void score_pairs(const Some& some, const char* keys, Desk& desk) const {
    const int64_t hd = n.hd;
    float* const scores = &desk.weights[some.query * STRIDE + some.place];
    uint32_t* const tile = (uint32_t*)desk.tile;
    if (some.number <= 16 && some.query == 0 && some.count == CHUNK && some.rows[CHUNK - 1] == some.rows[0] + CHUNK - 1 &&
        desk.products.score(keys + some.rows[0] * n.cache.row, n.cache.row, desk.columns.get(), hd, CHUNK, some.number, tile)) {
      for (int64_t i = 0; i < CHUNK; i += WIDTH) {
        Floats square[WIDTH];
        for (int64_t j = 0; j < WIDTH; ++j) square[j] = load(desk.tile + (i + j) * WIDTH);
        transpose(square);
        for (int64_t j = 0; j < some.number; ++j) store(scores + j * STRIDE + i, square[j]);
      }
      return;
    }
    for (int64_t d = 0; d < hd; d += 2 * DEPTH) {
      const int64_t width = std::min(2 * DEPTH, hd - d);  // two columns are as long as a float
      columns_of<Stored::FLOAT>(n.cache, keys, some.rows, some.count, d / 2, width / 2, desk.tile);
      desk.products.add((const uint32_t*)&desk.queries[some.query * hd] + d / 2, hd, tile, CHUNK, some.number,
                        (some.count + STEP - 1) / STEP * STEP, width, d == 0, scores, STRIDE);
    }
  }

  // Returns the places of the rows that are not finite.
  std::vector<int64_t> add_pairs_of_values(const Some& some, const char* values, Desk& desk, const Sums& sums) const {
    const int64_t terms = (some.count + STEP - 1) / STEP * STEP;
    const auto* const weights = (const uint32_t*)&desk.weights[some.query * STRIDE] + some.place / 2;
    uint32_t* const tile = (uint32_t*)desk.tile;
    std::vector<int64_t> found;
    for (int64_t d = 0; d < n.hd; d += 2 * DEPTH) {
      const int64_t width = std::min(2 * DEPTH, n.hd - d);
      Ints largest = every(0);
      for (int64_t i = 0; i < terms; i += 2) {
        const char *const x = values + some.rows[i] * n.cache.row + 2 * d, *const y = values + some.rows[i + 1] * n.cache.row + 2 * d;
        ask_for<AS>(x + CHUNK * n.cache.row, 0, width);
        ask_for<AS>(y + CHUNK * n.cache.row, 0, width);
        interleave(x, y, width, tile + i * DEPTH, largest);
      }
      for (int64_t i = 0; i < terms && not_finite(largest); ++i) {
        uint16_t* const row = (uint16_t*)tile + i / 2 * 4 * DEPTH + i % 2;
        bool finite = true;
        for (int64_t j = 0; j < width; ++j) finite = finite && (row[2 * j] & 0x7F80) != 0x7F80;
        for (int64_t j = 0; j < width && !finite; ++j) row[2 * j] = 0;
        if (!finite) found.push_back(some.place + i);
      }
      desk.products.add(weights, STRIDE, tile, 2 * DEPTH, some.number, width, terms, some.place == 0, sums.values + some.query * n.hd + d, n.hd);
    }
    return found;
  }
#else
  void score_pairs(const Some&, const char*, Desk&) const {}
  std::vector<int64_t> add_pairs_of_values(const Some&, const char*, Desk&, const Sums&) const { return {}; }
#endif

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
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
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
        for (int64_t i = begin; i < end; ++i) {
          const Piece p = piece(i / chunks);
          attend(p, origin[p.token / n.T] + i % chunks, desk, sums_of(i));
        }
      });
    parallel_for(0, pieces, grain(few ? work * chunks / CHUNK : work * chunks), [&](int64_t begin, int64_t end) {
      Desk desk(*this);
      const std::unique_ptr<float[]> own(new float[2 * size]);
      for (int64_t i = begin; i < end; ++i) {
        const Piece p = piece(i);
        add_up(p, sums_in(own.get()), [&](int64_t chunk) {
          if (few) return sums_of(i * chunks + chunk - origin[p.token / n.T]);
          attend(p, chunk, desk, sums_in(own.get() + size));
          return sums_in(own.get() + size);
        });
      }
    });
  }
};

}  // namespace

void eaglet::rotate_and_write(const Nodes& n, const float* qkv, const float* const norms[3], float* q) {
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

void eaglet::attend(const Nodes& n, const float* q, float scale, float cap, const float* sinks, float* out) {
  if (n.cache.as == Stored::FLOAT) return Attention<Stored::FLOAT>(n, q, scale, cap, sinks, out)();
  if (n.cache.as == Stored::HALF) return Attention<Stored::HALF>(n, q, scale, cap, sinks, out)();
  if (n.cache.as == Stored::BRAIN) return Attention<Stored::BRAIN>(n, q, scale, cap, sinks, out)();
  Attention<Stored::BYTES>(n, q, scale, cap, sinks, out)();
}
