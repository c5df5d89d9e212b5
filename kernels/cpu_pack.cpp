// Codes from the rows of a file to the tiles of the kernels (kernels/cpu.py, `put_codes`).

#include "cpu.h"

#include <cstring>
#include <stdexcept>

namespace {

using namespace eaglet;

constexpr int64_t COLUMNS = 32, TILE_ROWS = 8;

// Where a block has some bits of its codes, and how those of 32 columns from `column` on are read, one in a byte.
struct Place {
  int64_t at;
  __m256i (*read)(const uint8_t* from, int64_t column);
};

// A run of bytes holds the lowest bits of its first columns, then higher bits of the next ones.
template <int BITS, int RUN>
__m256i read_codes(const uint8_t* from, int64_t column) {
  constexpr int SHARES = 8 / BITS;  // codes in a byte
  const __m256i mask = _mm256_set1_epi8((char)((1 << BITS) - 1));
  if constexpr (RUN >= 32) {
    const __m256i bytes = _mm256_loadu_si256((const __m256i*)(from + column / (RUN * SHARES) * RUN + column % RUN));
    return _mm256_and_si256(_mm256_srli_epi16(bytes, column / RUN % SHARES * BITS), mask);
  } else if constexpr (RUN == 16) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)(from + column / 2));
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), mask);
  } else {  // one bit
    int32_t word;
    std::memcpy(&word, from + column / 8, 4);
    const __m256i spread = _mm256_set_epi64x(0x0303030303030303, 0x0202020202020202, 0x0101010101010101, 0);
    const __m256i own = _mm256_set1_epi64x(0x8040201008040201);
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(word), spread), own);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bits, own), mask);
  }
}

Place place_of(const int64_t numbers[3]) {
  switch (100 * numbers[1] + numbers[2]) {
    case 1: return {0, nullptr};
    case 101: return {numbers[0], read_codes<1, 1>};
    case 132: return {numbers[0], read_codes<1, 32>};
    case 232: return {numbers[0], read_codes<2, 32>};
    case 416: return {numbers[0], read_codes<4, 16>};
    case 432: return {numbers[0], read_codes<4, 32>};
    case 464: return {numbers[0], read_codes<4, 64>};
    case 832: return {numbers[0], read_codes<8, 32>};
  }
  throw std::runtime_error("put_codes: runs of this kind are not implemented");
}

// The lowest BITS bits of the codes of 32 columns of one row -> its bytes in BITS runs.
template <int BITS>
inline void write_runs(__m256i codes, uint8_t* out) {
  if constexpr (BITS > 0) {
    __m256i v = _mm256_and_si256(codes, _mm256_set1_epi8((char)((1 << BITS) - 1)));
    if constexpr (BITS < 8) v = _mm256_or_si256(v, _mm256_srli_epi64(v, 32 - BITS));  // four columns and the next four
    if constexpr (BITS < 4) v = _mm256_or_si256(v, _mm256_slli_epi32(_mm256_srli_si256(v, 8), 2 * BITS));
    if constexpr (BITS < 2) v = _mm256_or_si256(v, _mm256_slli_epi32(_mm256_permute2x128_si256(v, v, 1), 4));
    alignas(32) uint8_t words[32];
    _mm256_store_si256((__m256i*)words, v);
    for (int run = 0; run < BITS; ++run) std::memcpy(out + run * COLUMNS, words + run * (32 / BITS), 4);
  }
}

struct Source {
  int64_t values, size;  // of a block
  Place low, high;
  int64_t turned;
};

// Tiles [first, last) of rows that have `stride` bytes each, of which there are `blocks` blocks.
template <int LOW, int HIGH>
void put(const Source& source, const uint8_t* rows, int64_t stride, int64_t blocks, int64_t first, int64_t last, uint8_t* out) {
  const int64_t columns = blocks * source.values;
  const __m256i turned = _mm256_set1_epi8((char)source.turned);
  for (int64_t row = first * TILE_ROWS; row < last * TILE_ROWS; ++row) {
    uint8_t* to = out + row / TILE_ROWS * TILE_ROWS * columns * (LOW + HIGH) / 8 + row % TILE_ROWS * 4;
    for (int64_t b = 0; b < blocks; ++b) {
      const uint8_t* block = rows + row * stride + b * source.size;
      for (int64_t c = 0; c < source.values; c += COLUMNS, to += COLUMNS * (LOW + HIGH)) {
        const __m256i low = _mm256_xor_si256(source.low.read(block + source.low.at, c), turned);
        write_runs<LOW>(low, to);
        if (HIGH) {
          const bool apart = source.high.read != nullptr;
          const __m256i high = apart ? source.high.read(block + source.high.at, c) : _mm256_srli_epi16(low, LOW);
          write_runs<HIGH>(high, to + LOW * COLUMNS);
        }
      }
    }
  }
}

decltype(&put<8, 0>) put_of(int64_t low, int64_t high) {
  switch (10 * low + high) {
    case 20: return put<2, 0>;
    case 21: return put<2, 1>;
    case 40: return put<4, 0>;
    case 41: return put<4, 1>;
    case 42: return put<4, 2>;
    case 80: return put<8, 0>;
  }
  throw std::runtime_error("put_codes: tiles of this kind are not implemented");
}

// rows [N, bytes of a row] uint8 -> out [N / 8, bytes of a tile] uint8, in runs of `low` and `high` bits.
// source: values and bytes of a block; byte, bits and run of the low bits and of the high ones (0 bits where the low ones are
// all there are); and bits that are the other way round.
void put_codes(Tensor rows, Tensor out, std::vector<int64_t> source, int64_t low, int64_t high) {
  const auto put = put_of(low, high);
  const Source from{source[0], source[1], place_of(&source[2]), place_of(&source[5]), source[8]};
  const int64_t blocks = rows.size(1) / from.size, stride = rows.stride(0);
  parallel_for(0, rows.size(0) / TILE_ROWS, std::max<int64_t>(1, 8192 / (blocks * from.values)), [&](int64_t a, int64_t b) {
    put(from, (const uint8_t*)rows.data_ptr(), stride, blocks, a, b, (uint8_t*)out.data_ptr());
  });
}

}  // namespace

EAGLET_OPERATOR(CPU, put_codes, "(Tensor rows, Tensor(a!) out, int[] source, int low, int high) -> ()");
