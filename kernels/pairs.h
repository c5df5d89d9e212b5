// Products of bfloat16 on processors that have them. A word of 32 bits holds a pair: two neighbours of a row of the left matrix,
// or two neighbours of a column of the right one.

#pragma once

#include "registers.h"

#if defined(WIDE_REGISTERS) && defined(__AVX512BF16__)
#define PAIR_PRODUCTS
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_REGISTERS
#endif
#endif

namespace eaglet {

constexpr int64_t STEP = 32;  // what the terms of a product, and its columns, are multiples of

// Whether this process has tile registers. Linux gives them to one that asks for them.
inline bool has_tiles() {
#ifdef TILE_REGISTERS
  static const bool given = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
  return given;
#else
  return false;
#endif
}

#ifdef PAIR_PRODUCTS
constexpr bool PAIRS = true;

// The floats of two registers as bfloat16, rounded to nearest, 0 from number `live` on.
inline Ints pair_up(Floats first, Floats second, int64_t live) {
  return _mm512_maskz_mov_epi16((__mmask32)(((uint64_t)1 << live) - 1), (__m512i)_mm512_cvtne2ps_pbh(second, first));
}

// Rows x and y of `size` values side by side: a row of pairs. `largest` keeps the largest bits of a size seen so far.
inline void interleave(const char* x, const char* y, int64_t size, uint32_t* to, Ints& largest) {
  const Ints first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
  for (int64_t i = 0; i < size; i += 32) {
    const Ints a = _mm512_loadu_si512(x + 2 * i), b = _mm512_loadu_si512(y + 2 * i), bits = _mm512_set1_epi16(0x7FFF);
    largest = _mm512_max_epu16(largest, _mm512_max_epu16(common(a, bits), common(b, bits)));
    const Ints low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);  // of every quarter
    _mm512_storeu_si512(to + i, _mm512_permutex2var_epi64(low, first, high));
    _mm512_storeu_si512(to + i + 16, _mm512_permutex2var_epi64(low, second, high));
  }
}

inline bool not_finite(Ints largest) { return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(0x7F80)); }

// out [R][stride_out] += a [R][stride_a] times b [pairs][stride_b], W registers of columns. fresh: out holds nothing yet.
template <int R, int W>
[[gnu::noinline]] void add_pairs(const uint32_t* a, int64_t stride_a, const uint32_t* b, int64_t stride_b, int64_t pairs, bool fresh,
                                 float* out, int64_t stride_out) {
  Floats sum[R][W];
  for_each<R>([&](auto r) {
    for_each<W>([&](auto w) { sum[r][w] = fresh ? every(0.f) : load(out + r * stride_out + w * WIDTH); });
  });
  for (int64_t i = 0; i < pairs; ++i) {
    Ints columns[W];
    for_each<W>([&](auto w) { columns[w] = _mm512_loadu_si512(b + i * stride_b + w * WIDTH); });
    for_each<R>([&](auto r) {
      const Ints value = every((int32_t)a[r * stride_a + i]);
      for_each<W>([&](auto w) { sum[r][w] = _mm512_dpbf16_ps(sum[r][w], (__m512bh)value, (__m512bh)columns[w]); });
    });
  }
  for_each<R>([&](auto r) { for_each<W>([&](auto w) { store(out + r * stride_out + w * WIDTH, sum[r][w]); }); });
}

// A thread's products. Of tile registers, which have 16 rows of 64 bytes, it sets the layout, and at its end the former one
// comes back.
class Pairs {
 public:
  // out [rows][stride_out] += a [rows][terms] times b [terms][columns], both in pairs.
  void add(const uint32_t* a, int64_t stride_a, const uint32_t* b, int64_t stride_b, int64_t rows, int64_t columns, int64_t terms,
           bool fresh, float* out, int64_t stride_out) {
#ifdef TILE_REGISTERS
    if (has_tiles())
      for (int64_t r = 0; r < rows; r += 32) {
        set_rows(rows - r);
        for (int64_t c = 0; c < columns; c += 32)
          add_tiles(a + r * stride_a, stride_a * 4, b + c, stride_b * 4, terms / 2, rows - r > 16, fresh, out + r * stride_out + c, stride_out);
      }
    else
#endif
      in_tiles<6, 4>(rows, columns, [&](auto R, int64_t r, auto W, int64_t c) {
        add_pairs<R, W>(a + r * stride_a, stride_a, b + c, stride_b, terms / 2, fresh, out + r * stride_out + c, stride_out);
      });
  }

  // out [rows][queries] = a [rows][terms] times b [terms][queries], in rows of 16, for a multiple of 32 rows that lie as they do and
  // at most 16 queries. False if there are no tile registers: then this is no quick way. Terms have the order of `add`.
  bool score(const char* a, int64_t bytes_a, const uint32_t* b, int64_t terms, int64_t rows, int64_t queries, uint32_t* out) {
#ifdef TILE_REGISTERS
    if (!has_tiles()) return false;
    set_rows(queries);  // the layout for the values, where 2, 3, 5, 6 and 7 have 16 rows
    for (int64_t r = 0; r < rows; r += 32, a += 32 * bytes_a, out += 32 * 16) {
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t i = 0; i < terms; i += 32) {
        _tile_loadd(5, a + 2 * i, bytes_a);
        _tile_loadd(7, a + 16 * bytes_a + 2 * i, bytes_a);
        _tile_loadd(6, b + 8 * i, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 7, 6);
      }
      _tile_stored(2, out, 64);
      _tile_stored(3, out + 256, 64);
    }
    return true;
#else
    return false;
#endif
  }

#ifdef TILE_REGISTERS
  Pairs() {
    if (has_tiles()) _tile_storeconfig(former_);
  }
  ~Pairs() {
    if (rows_) _tile_loadconfig(former_);
  }

 private:
  // The registers 0 to 3 for the sums of two times two squares, 4 and 5 for rows, and 6 and 7 for columns. Another layout takes
  // longer to set than several products.
  void set_rows(int64_t left) {
    const int64_t first = std::min<int64_t>(16, left), second = left > 16 ? std::min<int64_t>(16, left - 16) : 16, rows = 16 * first + second;
    if (rows == rows_) return;
    rows_ = rows;
    alignas(64) uint8_t layout[64] = {1};
    for (int i = 0; i < 8; ++i) {
      layout[16 + 2 * i] = 64;
      layout[48 + i] = i > 5 ? 16 : i == 2 || i == 3 || i == 5 ? second : first;
    }
    _tile_loadconfig(layout);
  }

  [[gnu::noinline]] void add_tiles(const uint32_t* a, int64_t bytes_a, const uint32_t* b, int64_t bytes_b, int64_t pairs, bool two, bool fresh,
                                   float* out, int64_t stride) {
    const int64_t bytes = stride * 4;
    float* const below = out + 16 * stride;
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, out, bytes);
      _tile_loadd(1, out + 16, bytes);
    }
    if (two && !fresh) {
      _tile_loadd(2, below, bytes);
      _tile_loadd(3, below + 16, bytes);
    }
    for (int64_t i = 0; i < pairs; i += 16, a += 16, b += 4 * bytes_b) {
      _tile_loadd(4, a, bytes_a);
      _tile_loadd(6, b, bytes_b);
      _tile_loadd(7, b + 16, bytes_b);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      if (!two) continue;
      _tile_loadd(5, a + 4 * bytes_a, bytes_a);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, out, bytes);
    _tile_stored(1, out + 16, bytes);
    if (!two) return;
    _tile_stored(2, below, bytes);
    _tile_stored(3, below + 16, bytes);
  }

  alignas(64) uint8_t former_[64];
  int64_t rows_ = 0;
#endif
};
#else
constexpr bool PAIRS = false;
#endif

}  // namespace eaglet
