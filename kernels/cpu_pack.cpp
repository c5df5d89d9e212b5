// Codes from the rows of a file to the tiles of the kernels (kernels/cpu.py, `put_codes`).

#include "cpu.h"

#include <cstring>

namespace {

using namespace eaglet;

constexpr int64_t COLUMNS = 32, TILE_ROWS = 8;

// One part of every code in the bytes of a block: `bits` bits from byte `at` on. A run of bytes holds the lowest bits of its
// first columns, then higher bits of the next ones.
struct Place {
  int64_t at, bits, run;

  // ORs the bits of `values` codes into codes[values], `shift` bits higher.
  void read(const uint8_t* block, int64_t values, int shift, uint8_t* codes) const {
    const uint8_t mask = (uint8_t)((1 << bits) - 1);
    const int64_t shares = 8 / bits;  // codes in a byte
    const uint8_t* from = block + at;
    for (int64_t first = 0; first < values; first += run * shares, from += run)
      for (int64_t s = 0; s < shares; ++s)
        for (int64_t i = 0; i < run; ++i) codes[first + s * run + i] |= (uint8_t)((from[i] >> (s * bits) & mask) << shift);
  }
};

// Bits of the codes of 32 columns of one row -> its bytes in `bits` runs.
inline void write_runs(const uint32_t words[8], int64_t bits, uint32_t mask, int shift, uint8_t* out) {
  const int64_t shares = 8 / bits;
  for (int64_t j = 0; j < bits; ++j) {
    uint32_t both = 0;
    for (int64_t i = 0; i < shares; ++i) both |= (words[j * shares + i] >> shift & mask) << (bits * i);
    std::memcpy(out + j * COLUMNS, &both, 4);
  }
}

// rows [N, bytes of a row] uint8 -> out [N / 8, bytes of a tile] uint8, in runs of `low` and `high` bits.
// source: values and bytes of a block; byte, bits and run of the low bits and of the high ones (0 bits for none); and bits
// that are turned over.
void put_codes(Tensor rows, Tensor out, std::vector<int64_t> source, int64_t low, int64_t high) {
  const int64_t values = source[0], size = source[1], turned = source[8];
  const Place lower{source[2], source[3], source[4]}, upper{source[5], source[6], source[7]};
  const int64_t blocks = rows.size(1) / size, stride = rows.stride(0), block_bytes = COLUMNS * (low + high);
  const uint8_t* from = (const uint8_t*)rows.data_ptr();
  uint8_t* to = (uint8_t*)out.data_ptr();
  const auto every_byte = [](int64_t bits) { return ((1u << bits) - 1) * 0x01010101u; };
  const uint32_t low_mask = every_byte(low), high_mask = every_byte(high);
  parallel_for(0, rows.size(0) / TILE_ROWS, std::max<int64_t>(1, 65536 / (blocks * values)), [&](int64_t first, int64_t last) {
    alignas(32) uint8_t codes[256];
    for (int64_t tile = first; tile < last; ++tile)
      for (int64_t r = 0; r < TILE_ROWS; ++r)
        for (int64_t b = 0; b < blocks; ++b) {
          const uint8_t* block = from + (tile * TILE_ROWS + r) * stride + b * size;
          std::memset(codes, (int)turned, values);
          if (lower.bits == 8)
            for (int64_t i = 0; i < values; ++i) codes[i] ^= block[lower.at + i];
          else
            lower.read(block, values, 0, codes);
          if (upper.bits) upper.read(block, values, (int)lower.bits, codes);
          for (int64_t c = 0; c < values; c += COLUMNS) {
            uint32_t words[8];
            std::memcpy(words, codes + c, COLUMNS);
            uint8_t* at = to + (tile * blocks * values + b * values + c) / COLUMNS * block_bytes + 4 * r;
            write_runs(words, low, low_mask, 0, at);
            if (high) write_runs(words, high, high_mask, (int)low, at + low * COLUMNS);
          }
        }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) {
  m.def("put_codes(Tensor rows, Tensor(a!) out, int[] source, int low, int high) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CPU, m) { m.impl("put_codes", TORCH_BOX(&put_codes)); }
