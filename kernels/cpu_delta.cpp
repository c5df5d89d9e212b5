// The gated delta rule of recurrent layers on x86 CPUs with AVX2. kernels/cpu.py builds this file, and kernels/delta.py
// says what the functions compute.
//
// The columns of a head's memory do not depend on each other, so a thread takes a block of them through all tokens of a
// sequence. From one token to the next the block is read and written once: the next key and query read what is written.
// What a query reads behind its own token follows from what it reads before: q (d S + k c) = d (q S) + (q k) c. So the
// leaf of a tree writes nothing. A memory that the walk comes back to is kept: what is behind it is written elsewhere.
//
// A row's bits do not depend on the other rows, on their number, on the threads, or on the width of the registers.

#include "cpu.h"

namespace {

using namespace eaglet;
using torch::stable::new_empty;
constexpr float TINY = 1e-6f;  // as in delta.py
constexpr int64_t WIDTH = 4;   // rows under the convolution, CPU_WIDTH in delta.py

template <class V> V every(float x);
template <class V> V load(const float* at);
template <> inline __m256 every(float x) { return _mm256_set1_ps(x); }
template <> inline __m256 load(const float* at) { return _mm256_loadu_ps(at); }
inline void store(float* at, __m256 v) { _mm256_storeu_ps(at, v); }
inline __m256 times(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
inline __m256 fused(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
#ifdef __AVX512F__
template <> inline __m512 every(float x) { return _mm512_set1_ps(x); }
template <> inline __m512 load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, __m512 v) { _mm512_storeu_ps(at, v); }
inline __m512 times(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
inline __m512 fused(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
using Wide = __m512;
#else
using Wide = __m256;
#endif
constexpr int64_t REGISTERS = 8, COLUMNS = REGISTERS * sizeof(Wide) / sizeof(float);  // of a block

inline void prefetch(const float* at) { _mm_prefetch((const char*)at, _MM_HINT_T0); }

inline __m256 silu(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.f);
  return _mm256_div_ps(x, _mm256_add_ps(one, exponential(_mm256_sub_ps(_mm256_setzero_ps(), x))));
}

inline float dot(const float* a, const float* b, int64_t size) {
  __m256 sum = _mm256_setzero_ps();
  for (int64_t i = 0; i < size; i += 8) sum = fused(load<__m256>(a + i), load<__m256>(b + i), sum);
  return lane_sum(sum);
}

constexpr int64_t MEMORY = -1, NOWHERE = -2;  // besides the numbers of buffers

struct Token {
  const float* window[WIDTH];  // the rows under the convolution, the oldest first
  int64_t row;                 // of the output, or below 0: a row of the path
  int64_t from, to;            // where the memory lies that it finds, and where it writes the one behind it
};

struct Sizes {
  int64_t B, T, R, P, C, heads, dk, dv, key_heads;
};

// The tokens of one sequence in their order: its path unless it is frozen, then the tree or the rows of a text to keep.
void add_tokens(const Sizes& s, const float* path, int64_t apart, int64_t pending, bool frozen, const float* rows,
                int64_t keep, const int64_t* walk, std::vector<Token>& tokens) {
  std::vector<const float*> text;
  const auto add = [&](int64_t first, int64_t row, int64_t from, int64_t to) {
    tokens.push_back({{}, row, from, to});
    std::copy_n(text.begin() + first, WIDTH, tokens.back().window);
  };
  for (int64_t i = 0; i < WIDTH - 1 + pending; ++i) text.push_back(path + i * apart);
  for (int64_t i = 0; i < keep; ++i) text.push_back(rows + i * s.R);
  const int64_t begin = frozen ? pending : 0, end = (int64_t)text.size() - (WIDTH - 1);
  for (int64_t i = begin; i < end; ++i) add(i, i - pending, i == begin ? MEMORY : 0, i == end - 1 ? MEMORY : 0);
  if (!walk) return;
  text.resize(text.size() + s.P, rows);  // behind the path by depth
  std::vector<int64_t> place(s.P, MEMORY);
  const auto depth_at = [&](int64_t i) { return i < s.T ? std::min(walk[3 * i + 1], s.P - 1) : 0; };
  for (int64_t i = 0; i < s.T; ++i) {
    const int64_t node = walk[3 * i], depth = depth_at(i), from = depth ? place[depth - 1] : MEMORY;
    STD_TORCH_CHECK(node >= 0 && node < s.T && depth >= 0, "the walk of a tree leaves it");
    text[pending + WIDTH - 1 + depth] = rows + node * s.R;
    const bool only_child = from != MEMORY && tokens.back().to == from && !walk[3 * i - 1];
    const int64_t to = depth_at(i + 1) != depth + 1 ? NOWHERE : only_child ? from : depth;
    if (to != NOWHERE) place[depth] = to;
    add(pending + depth, node, from, to);
  }
}

struct Numbers {
  float decay, beta, match;  // match: query times key
};

// What the tokens write and read, by head and then by token.
struct Inputs {
  const Sizes& s;
  const std::vector<Token>& tokens;
  const int64_t count = tokens.size();
  std::unique_ptr<float[]> keys{new float[s.key_heads * count * 2 * s.dk]};  // each behind its query
  std::unique_ptr<float[]> values{new float[s.heads * count * s.dv]};
  std::unique_ptr<Numbers[]> numbers{new Numbers[s.heads * count]};

  // The convolution of `size` channels from `channel` on and its silu.
  void mix(const float* conv, int64_t channel, int64_t size, int64_t first, int64_t last, float* out, int64_t apart) {
    for (const int64_t end = channel + size; channel < end; channel += 8, out += 8) {
      __m256 a[4], b[4];  // The weights of eight channels are turned. At last b[j] has those of row j.
      for (int j = 0; j < 4; ++j) a[j] = load<__m256>(conv + channel * WIDTH + 8 * j);
      for (int j = 0; j < 4; j += 2) b[j] = _mm256_permute2f128_ps(a[j / 2], a[j / 2 + 2], 0x20);
      for (int j = 0; j < 4; j += 2) b[j + 1] = _mm256_permute2f128_ps(a[j / 2], a[j / 2 + 2], 0x31);
      for (int j = 0; j < 4; j += 2) a[j] = _mm256_unpacklo_ps(b[j], b[j + 1]);
      for (int j = 0; j < 4; j += 2) a[j + 1] = _mm256_unpackhi_ps(b[j], b[j + 1]);
      for (int j = 0; j < 4; j += 2) b[j] = _mm256_shuffle_ps(a[j / 2], a[j / 2 + 2], 0x44);
      for (int j = 0; j < 4; j += 2) b[j + 1] = _mm256_shuffle_ps(a[j / 2], a[j / 2 + 2], 0xEE);
      for (int64_t t = first; t < last; ++t) {
        const float* const* window = tokens[t].window;
        __m256 sum = times(b[0], load<__m256>(window[0] + channel));
        for (int j = 1; j < WIDTH; ++j) sum = fused(b[j], load<__m256>(window[j] + channel), sum);
        prefetch(window[WIDTH - 1] + channel + 64);
        store(out + t * apart, silu(sum));
      }
    }
  }

  // Those of a key head and its value heads, for tokens first to last.
  void fill(int64_t key_head, int64_t first, int64_t last, const float* conv, const float* a_log, const float* bias) {
    const int64_t dk = s.dk, shared = s.heads / s.key_heads;
    float* both = &keys[key_head * count * 2 * dk];
    mix(conv, key_head * dk, dk, first, last, both, 2 * dk);
    mix(conv, (s.key_heads + key_head) * dk, dk, first, last, both + dk, 2 * dk);
    for (int64_t i = 2 * first; i < 2 * last; ++i) {
      float* x = both + i * dk;
      const float length = std::sqrt(dot(x, x, dk) + TINY);
      const __m256 scale = every<__m256>(1.f / (i % 2 ? length : length * std::sqrt((float)dk)));
      for (int64_t c = 0; c < dk; c += 8) store(x + c, times(load<__m256>(x + c), scale));
    }
    for (int64_t head = key_head * shared; head < (key_head + 1) * shared; ++head) {
      mix(conv, 2 * s.key_heads * dk + head * s.dv, s.dv, first, last, &values[head * count * s.dv], s.dv);
      for (int64_t t = first; t < last; ++t) {
        const float *own = tokens[t].window[WIDTH - 1] + s.C + head, *query = both + 2 * t * dk;
        const float a = own[s.heads] + bias[head], soft = a > 20 ? a : std::log1p(std::exp(a));
        const float decay = std::exp(-std::exp(a_log[head]) * soft), beta = 1 / (1 + std::exp(-own[0]));
        numbers[head * count + t] = {decay, beta, dot(query, query + dk, dk)};
      }
    }
  }
};

struct alignas(64) Line {
  float values[16];
};

// Walk tokens first to last with N registers of columns from `column` on. out: these columns of row 0.
template <class V, int64_t N>
void walk_block(const Inputs& in, int64_t head, int64_t column, int64_t first, int64_t last, float* memory,
                float* buffers, float* out) {
  constexpr int64_t SIZE = sizeof(V) / sizeof(float);
  const auto [B, T, R, P, C, heads, dk, dv, key_heads] = in.s;
  const float* keys = &in.keys[head / (heads / key_heads) * in.count * 2 * dk];
  const auto at = [&](int64_t place) { return place == MEMORY ? memory : buffers + place * dk * COLUMNS; };
  const auto apart = [&](int64_t place) { return place == MEMORY ? dv : COLUMNS; };
  V by_key[N], by_query[N], change[N];  // what the next key and query read, and what a token adds to the columns
  for (int64_t t = first; t < last; ++t) {
    const auto [window, row, from, to] = in.tokens[t];
    const float *query = keys + 2 * t * dk, *key = query + dk, *source = at(from);
    if (t == first || in.tokens[t - 1].to == NOWHERE) {
      for (int64_t i = 0; i < N; ++i) by_key[i] = by_query[i] = every<V>(0);
      for (int64_t r = 0; r < dk; ++r, source += apart(from)) {
        const V k = every<V>(key[r]), q = every<V>(query[r]);
        for (int64_t i = 0; i < N * SIZE; i += 16) prefetch(source + 12 * apart(from) + i);
        for (int64_t i = 0; i < N; ++i) {
          by_key[i] = fused(k, load<V>(source + i * SIZE), by_key[i]);
          by_query[i] = fused(q, load<V>(source + i * SIZE), by_query[i]);
        }
      }
    }
    const Numbers n = in.numbers[head * in.count + t];
    const float* value = &in.values[(head * in.count + t) * dv + column];
    const V decay = every<V>(n.decay);
    for (int64_t i = 0; i < N; ++i) {
      const V missing = fused(every<V>(-n.decay), by_key[i], load<V>(value + i * SIZE));
      change[i] = times(every<V>(n.beta), missing);
      const V result = fused(every<V>(n.match), change[i], times(decay, by_query[i]));
      if (row >= 0) store(out + row * heads * dv + i * SIZE, result);
    }
    if (to == NOWHERE) continue;
    const float *next = t + 1 < last ? query + 2 * dk : query, *next_key = next + dk;
    float* target = at(to);
    source = at(from);
    for (int64_t i = 0; i < N; ++i) by_key[i] = by_query[i] = every<V>(0);
    for (int64_t r = 0; r < dk; ++r, source += apart(from), target += apart(to)) {
      const V old = every<V>(key[r]), k = every<V>(next_key[r]), q = every<V>(next[r]);
      for (int64_t i = 0; i < N; ++i) {
        const V now = fused(old, change[i], times(decay, load<V>(source + i * SIZE)));
        store(target + i * SIZE, now);
        by_key[i] = fused(k, now, by_key[i]);
        by_query[i] = fused(q, now, by_query[i]);
      }
    }
  }
}

Tensor delta_rule(const Tensor& rows, const Tensor& conv, const Tensor& a_log, const Tensor& dt_bias,
                  std::vector<Tensor> state, const std::optional<Tensor>& walk) {
  const auto layer = record<tensors::Memory>(state);
  const Tensor &memory = layer.memory, &path = layer.path;
  Sizes s{rows.size(0), rows.size(1), rows.size(2), path.size(1) - WIDTH + 1, conv.size(0), memory.size(1),
          memory.size(2), memory.size(3)};
  s.key_heads = (s.C - s.heads * s.dv) / (2 * s.dk);
  Tensor out = new_empty(rows, {s.B, s.T, s.heads, s.dv});
  std::vector<Token> tokens;
  std::vector<int64_t> first(1, 0);
  int64_t buffers = 0;
  for (int64_t b = 0; b < s.B; ++b) {
    const int64_t pending = integers(layer.pending)[b], keep = walk ? 0 : integers(layer.keep)[b], row = s.heads * s.dv;
    STD_TORCH_CHECK(pending <= s.P && keep <= s.T, "a path or a text has fewer rows than are to be read");
    add_tokens(s, floats(path) + b * path.stride(0), path.stride(1), pending, booleans(layer.frozen)[b],
               floats(rows) + b * s.T * s.R, keep, walk ? integers(*walk) + b * s.T * 3 : nullptr, tokens);
    first.push_back(tokens.size());
    if (!walk) std::fill_n(floats(out) + (b * s.T + keep) * row, (s.T - keep) * row, 0.f);
  }
  for (const Token& token : tokens) buffers = std::max(buffers, token.to + 1);
  Inputs in{s, tokens};
  const int64_t PART = 16, parts = (in.count + PART - 1) / PART;  // of the tokens
  parallel_for(0, parts * s.key_heads, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t from = i / s.key_heads * PART, to = std::min(from + PART, in.count);
      in.fill(i % s.key_heads, from, to, floats(conv), floats(a_log), floats(dt_bias));
    }
  });
  const int64_t whole = s.dv / COLUMNS, blocks = whole + s.dv % COLUMNS / 8;  // The last columns are blocks of eight.
  parallel_for(0, s.B * s.heads * blocks, 1, [&](int64_t begin, int64_t end) {
    std::unique_ptr<Line[]> own(new Line[buffers * s.dk * COLUMNS / 16]);
    for (int64_t item = begin; item < end; ++item) {
      const int64_t i = item % blocks, head = item / blocks % s.heads, b = item / blocks / s.heads;
      const int64_t column = std::min(i, whole) * COLUMNS + std::max<int64_t>(i - whole, 0) * 8;
      const auto walk_them = i < whole ? &walk_block<Wide, REGISTERS> : &walk_block<__m256, 1>;
      walk_them(in, head, column, first[b], first[b + 1],
                floats(memory) + b * memory.stride(0) + head * s.dk * s.dv + column, own[0].values,
                floats(out) + (b * s.T * s.heads + head) * s.dv + column);
    }
  });
  return out;
}

// x [...,Hv,dv] and a gate as rows [M,Hv dv] -> [M,Hv dv].
Tensor gated_norm(const Tensor& x, const Tensor& gate, const Tensor& weight, double eps) {
  const int64_t M = gate.size(0), dv = weight.size(0), heads = gate.size(1) / dv;
  Tensor out = new_empty(gate, {M, gate.size(1)});
  parallel_for(0, M * heads, std::max<int64_t>(1, 4096 / dv), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* by = floats(gate) + row / heads * gate.stride(0) + row % heads * dv;
      float* to = floats(out) + row * dv;
      norm_row(floats(x) + row * dv, floats(weight), dv, (float)eps, to);
      for (int64_t i = 0; i < dv; i += 8) store(to + i, times(load<__m256>(to + i), silu(load<__m256>(by + i))));
    }
  });
  return out;
}

}  // namespace

EAGLET_OPERATOR(CPU, delta_rule, "(Tensor rows, Tensor conv, Tensor a_log, Tensor dt_bias, Tensor(a!)[] layer, Tensor? walk) -> Tensor");
EAGLET_OPERATOR(CPU, gated_norm, "(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor");
