// The small work of a step on x86 CPUs with AVX2, one call each: noise, the choice of a token, the best draft tokens of a
// row, where rows go, accepting a path and committing it. kernels/cpu.py builds this file. What the functions compute is
// said where plain PyTorch computes the same: sampling.py, kernels/draft.py, kernels/kv.py, verify.py and step.py.
//
// A row's result does not depend on the other rows, on their number, or on the number of threads.

#include "cpu.h"

#include <cstring>

namespace {

using namespace eaglet;
using torch::headeronly::ScalarType;
using torch::stable::new_empty;
constexpr float INF = std::numeric_limits<float>::infinity();

// ---- noise -----------------------------------------------------------------------------------------------------------

// A bijection of 32-bit values that `key` selects, of one value and of eight (`sampling._mix`).
constexpr uint32_t MIX_A = 0x7FEB352D, MIX_B = 0x846CA68B;
inline uint32_t mix(uint32_t x, uint32_t key = 0) {
  x = (x ^ x >> 16) * MIX_A;
  x = (x ^ x >> 15 ^ key) * MIX_B;
  return x ^ x >> 16;
}
inline __m256i mix(__m256i x, uint32_t key) {
  x = _mm256_mullo_epi32(_mm256_xor_si256(x, _mm256_srli_epi32(x, 16)), _mm256_set1_epi32(MIX_A));
  x = _mm256_xor_si256(_mm256_xor_si256(x, _mm256_srli_epi32(x, 15)), _mm256_set1_epi32(key));
  x = _mm256_mullo_epi32(x, _mm256_set1_epi32(MIX_B));
  return _mm256_xor_si256(x, _mm256_srli_epi32(x, 16));
}

// ln x of normal positive numbers, within two units of the last place: x = 2^e m with m from sqrt(1/2) to sqrt(2), and
// ln m = 2 atanh(s) = 2 (s + s^3 / 3 + s^5 / 5 + ...) for s = (m - 1) / (m + 1).
inline __m256 logarithm(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x), half = _mm256_set1_epi32(0x3F3504F3);  // sqrt(1/2)
  const __m256i e = _mm256_srai_epi32(_mm256_sub_epi32(bits, half), 23);
  const __m256 m = _mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(e, 23)));
  const __m256 one = _mm256_set1_ps(1.f), below = _mm256_sub_ps(m, one), power = _mm256_cvtepi32_ps(e);
  const __m256 s = _mm256_div_ps(below, _mm256_add_ps(m, one)), square = _mm256_mul_ps(s, s);
  __m256 p = _mm256_set1_ps(2.f / 11);
  for (float c : {2.f / 9, 2.f / 7, 2.f / 5, 2.f / 3}) p = _mm256_fmadd_ps(p, square, _mm256_set1_ps(c));
  // 2 s = below - s below, of which the first part is exact
  const __m256 rest = _mm256_mul_ps(s, _mm256_fmsub_ps(p, square, below));
  const __m256 small = _mm256_add_ps(_mm256_fmadd_ps(power, _mm256_set1_ps(-2.12194440e-4f), rest), below);
  return _mm256_fmadd_ps(power, _mm256_set1_ps(0.693359375f), small);  // ln 2 in two parts
}

// Gumbel noise -ln(-ln(1 - v)) of eight 32-bit words, v = (word + 1/2) / 2^32 (`sampling.gumbel_noise`).
inline __m256 gumbel(__m256i bits) {
  const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(bits, 16));
  const __m256 low = _mm256_cvtepi32_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0xFFFF)));
  const __m256 word = _mm256_fmadd_ps(high, _mm256_set1_ps(65536.f), low), one = _mm256_set1_ps(1.f);
  __m256 v = _mm256_mul_ps(_mm256_add_ps(word, _mm256_set1_ps(0.5f)), _mm256_set1_ps(0x1p-32f));
  v = _mm256_min_ps(v, _mm256_set1_ps(1.f - 0x1p-24f));
  // 1 - v rounds the bits of a small v away. The quotient v / (1 - u) puts them back.
  const __m256 u = _mm256_sub_ps(one, v), lost = _mm256_sub_ps(one, u);
  const __m256 quotient = _mm256_mul_ps(logarithm(u), _mm256_div_ps(v, lost));
  const __m256 tiny = _mm256_cmp_ps(lost, _mm256_setzero_ps(), _CMP_EQ_OQ);
  const __m256 minus = _mm256_set1_ps(-0.f);
  const __m256 w = _mm256_blendv_ps(_mm256_xor_ps(quotient, minus), v, tiny);
  return _mm256_xor_ps(logarithm(w), minus);
}

// The low halves of eight 64-bit integers, `count` of them in memory.
inline __m256i low_halves(const int64_t* at, int64_t count) {
  int64_t all[8] = {};
  if (count < 8) at = (const int64_t*)std::memcpy(all, at, count * sizeof(int64_t));
  const __m256 a = _mm256_loadu_ps((const float*)at), b = _mm256_loadu_ps((const float*)(at + 4));
  return _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)), 0xD8);
}

inline void store(float* at, __m256 v, int64_t count) {
  if (count >= 8) return _mm256_storeu_ps(at, v);
  float all[8];
  _mm256_storeu_ps(all, v);
  std::memcpy(at, all, count * sizeof(float));
}

}  // namespace

void eaglet::noise_row(uint64_t seed, int64_t position, const int64_t* hashes, int64_t count, float* out) {
  const uint32_t low = mix((uint32_t)seed ^ 0x9E3779B9), high = mix((uint32_t)(seed >> 32) ^ low);
  const uint32_t one = mix(mix((uint32_t)position + low) ^ high), two = mix((one + high) ^ low);
  for (int64_t i = 0; i < count; i += 8) {
    const __m256i hash = _mm256_xor_si256(low_halves(hashes + i, count - i), _mm256_set1_epi32(one));
    store(out + i, gumbel(mix(hash, two)), count - i);
  }
}

namespace {

// Noise of the positions n + 1 to n + rows, [B,rows,V].
Tensor noise(const Tensor& seed, const Tensor& n, int64_t rows, const Tensor& hashes) {
  const int64_t B = seed.size(0), V = hashes.size(0), *ids = integers(hashes);
  Tensor out = new_empty(seed, {B, rows, V}, ScalarType::Float);
  float* to = floats(out);
  const int64_t PART = 4096, parts = (V + PART - 1) / PART;  // of a row
  parallel_for(0, B * rows * parts, 2, [&](int64_t first, int64_t last) {
    for (int64_t part = first; part < last; ++part) {
      const int64_t row = part / parts, begin = part % parts * PART, count = std::min(PART, V - begin);
      const int64_t position = integers(n)[row / rows] + 1 + row % rows;
      noise_row(integers(seed)[row / rows], position, ids + begin, count, to + row * V + begin);
    }
  });
  return out;
}

// ---- choosing among the tokens of a row ------------------------------------------------------------------------------

// Eight floats of a row, of which `count` are in memory; the others are -infinity.
inline __m256 load(const float* at, int64_t count) {
  if (count >= 8) return _mm256_loadu_ps(at);
  float all[8];
  std::fill(all, all + 8, -INF);
  std::memcpy(all, at, count * sizeof(float));
  return _mm256_loadu_ps(all);
}

// The place of the largest z + heat g (the first of equals), and whether the row z has no NaN, no +infinity and not
// only -infinity. Without g it is the largest z.
std::pair<int64_t, bool> best_of(const float* z, const float* g, float heat, int64_t V) {
  __m256 best = _mm256_set1_ps(-INF), top = best, strange = _mm256_setzero_ps();
  __m256i here = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), place = here;
  for (int64_t i = 0; i < V; i += 8) {
    const __m256 value = load(z + i, V - i);
    top = _mm256_max_ps(value, top);
    strange = _mm256_or_ps(strange, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    const __m256 key = g ? _mm256_add_ps(value, _mm256_mul_ps(_mm256_set1_ps(heat), load(g + i, V - i))) : value;
    const __m256 more = _mm256_cmp_ps(key, best, _CMP_GT_OQ);
    best = _mm256_blendv_ps(best, key, more);
    place = _mm256_blendv_epi8(place, here, _mm256_castps_si256(more));
    here = _mm256_add_epi32(here, _mm256_set1_epi32(8));
  }
  alignas(32) float values[8];
  alignas(32) int32_t places[8];
  _mm256_store_ps(values, best);
  _mm256_store_si256((__m256i*)places, place);
  int lane = 0;
  for (int l = 1; l < 8; ++l)
    if (values[l] > values[lane] || (values[l] == values[lane] && places[l] < places[lane])) lane = l;
  return {places[lane], !_mm256_movemask_ps(strange) && std::isfinite(largest_lane(top))};
}

// The target's tokens after the logits [B,N,V], and whether these were usable, each [B,N]. noise [B,P,V] has the row
// depth [B,N] for every node, or without depths one row per node.
std::tuple<Tensor, Tensor> choose(const Tensor& logits, const std::optional<Tensor>& noise,
                                  const std::optional<Tensor>& depth, const Tensor& temperature) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2), P = noise ? noise->size(1) : 0;
  STD_TORCH_CHECK(temperature.size(0) == B, "one temperature for each of the ", B, " sequences");
  Tensor ids = new_empty(logits, {B, N}, ScalarType::Long), usable = new_empty(logits, {B, N}, ScalarType::Bool);
  parallel_for(0, B * N, std::max<int64_t>(1, 16384 / V), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t b = row / N, level = depth ? integers(*depth)[row] : P > 1 ? row % N : 0;
      const float* g = noise ? floats(*noise) + (b * P + level) * V : nullptr;
      std::tie(integers(ids)[row], booleans(usable)[row]) = best_of(floats(logits) + row * V, g, floats(temperature)[b], V);
    }
  });
  return {ids, usable};
}

}  // namespace

namespace eaglet {

void best_drafts(const DraftRow& row, int64_t count, int64_t* best, float* scores) {
  const int64_t K = row.size;
  const float *z = row.logits, heat = row.temperature;
  std::vector<float> values(count), perturbed(row.noise ? K : 0);
  for (int64_t i = 0; i < (row.noise ? K : 0); ++i)
    perturbed[i] = (std::isnan(z[i]) ? -INF : z[i]) + heat * row.noise[row.ids ? row.ids[i] : i];
  const float* ranked = row.noise ? perturbed.data() : z;
  auto keys = [&](const float* at, int64_t i) { return _mm256_max_ps(load(at + i, K - i), _mm256_set1_ps(-INF)); };  // NaN is -infinity
  __m256 high = _mm256_set1_ps(-INF);
  int64_t found = 0;
  for (int64_t i = 0; i < K; i += 8) {
    high = _mm256_max_ps(high, keys(z, i));
    const __m256 key = keys(ranked, i), least = _mm256_set1_ps(found < count ? -INF : values[count - 1]);
    for (int mask = _mm256_movemask_ps(_mm256_cmp_ps(key, least, _CMP_GE_OQ)); mask; mask &= mask - 1) {
      const int64_t at = i + __builtin_ctz(mask);
      const float value = std::isnan(ranked[std::min(at, K - 1)]) ? -INF : ranked[std::min(at, K - 1)];
      if (at >= K || (found == count && !(value > values[count - 1]))) continue;
      int64_t j = found < count ? found++ : count - 1;
      for (; j > 0 && value > values[j - 1]; --j) {
        values[j] = values[j - 1];
        best[j] = best[j - 1];
      }
      values[j] = value;
      best[j] = at;
    }
  }
  // scores: the logarithm of the softmax of the keys, noisy ones divided by the temperature, which is at least 1/2
  const bool divide = row.noise && row.noisy;
  const float over = divide && heat > 0 ? 1.f / std::max(heat, 0.5f) : 1.f;
  const float* scored = divide ? ranked : z;
  const float top = divide ? values[0] : largest_lane(high);
  __m256 total = _mm256_setzero_ps();
  for (int64_t i = 0; i < K; i += 8) {
    const __m256 below = _mm256_sub_ps(keys(scored, i), _mm256_set1_ps(top));
    total = _mm256_add_ps(total, exponential(_mm256_mul_ps(below, _mm256_set1_ps(over))));
  }
  const float whole = std::log(lane_sum(total));
  for (int64_t j = 0; j < count; ++j) {
    const float score = (scored[best[j]] - top) * over - whole;
    scores[j] = std::isnan(score) || std::isnan(z[best[j]]) ? -INF : score;
  }
}

void join_row(const float* embedding, const float* feature, int64_t H, const float* token_norm, const float* feature_norm,
              float eps, bool keep_normed, float* residual, float* joined) {
  auto put = [&](const float* from, const float* norm, float* to) {
    norm ? norm_row(from, norm, H, eps, to) : (void)std::copy_n(from, H, to);
  };
  put(embedding, token_norm, joined);
  put(feature, feature_norm, joined + H);
  std::copy_n(keep_normed ? joined + H : feature, H, residual);
}

}  // namespace eaglet

namespace {

// The `count` largest keys of each row of draft logits [B,W,K], their places and scores, each [B,W,count]. noise
// [B,1 or W,V] is looked up at `ids` [K]. With `noisy` the scores are those of the noisy logits.
std::tuple<Tensor, Tensor> draft_topk(const Tensor& logits, const std::optional<Tensor>& noise, const std::optional<Tensor>& ids,
                                      const Tensor& temperature, bool noisy, int64_t count) {
  const int64_t B = logits.size(0), W = logits.size(1), K = logits.size(2), V = noise ? noise->size(2) : 0;
  STD_TORCH_CHECK(temperature.size(0) == B, "one temperature for each of the ", B, " sequences");
  Tensor places = new_empty(logits, {B, W, count}, ScalarType::Long), scores = new_empty(logits, {B, W, count});
  parallel_for(0, B * W, std::max<int64_t>(1, 16384 / K), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const float* g = noise ? floats(*noise) + (noise->size(1) == 1 ? row / W : row) * V : nullptr;
      const DraftRow drafts{floats(logits) + row * K, K, g, ids ? integers(*ids) : nullptr, floats(temperature)[row / W], noisy};
      best_drafts(drafts, count, integers(places) + row * count, floats(scores) + row * count);
    }
  });
  return {places, scores};
}

// ---- where rows go ---------------------------------------------------------------------------------------------------

// Positions, slots, cos, sin and the tokens of `fed` rows that are fed again and of those at `depth` [B or 1,T].
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> place_rows(
    const Tensor& n, const Tensor& depth, std::vector<Tensor> tables, int64_t slots, int64_t fed,
    const std::optional<Tensor>& count, const std::optional<Tensor>& tokens, int64_t lead, const std::optional<Tensor>& segments,
    bool ring) {
  const auto [cos, sin] = record<tensors::Rotary>(tables);
  const int64_t B = n.size(0), T = depth.size(1), R = fed + T, half = cos.size(1), S = tokens ? tokens->size(1) : 0;
  Tensor positions = new_empty(n, {B, R}), places = new_empty(n, {B, R}), again = new_empty(n, {B, fed});
  Tensor cosines = new_empty(cos, {B, R, half}), sines = new_empty(cos, {B, R, half});
  for (int64_t row = 0; row < B * R; ++row) {
    const int64_t b = row / R, r = row % R, base = integers(n)[b] + lead - (r < fed ? integers(*count)[b] : 0);
    const int64_t place = r < fed ? r : r - fed;
    const int64_t position = base + (r < fed ? r : integers(depth)[(depth.size(0) > 1 ? b * T : 0) + place]);
    if (r < fed) integers(again)[b * fed + r] = integers(*tokens)[b * S + std::min(base - lead + 1 + r, S - 1)];
    integers(positions)[row] = position;
    const int64_t* segment = segments ? integers(*segments) + 2 * b : nullptr;
    integers(places)[row] = segment ? segment[0] + std::min(base + place, segment[1])
                            : ring  ? (base + place) % (slots - 1)
                                    : std::min(base + place, slots - 1);
    rotary_row(floats(cos), floats(sin), cos.size(0), half, position, floats(cosines) + row * half, floats(sines) + row * half);
  }
  return {positions, places, cosines, sines, again};
}

// (residual [B,W,H], embeddings beside features [B,W,2H]) of an EAGLE head (`EagleHead.joined`). source [B,W]: rows of
// the features [B,R,H]. The norms' weights are absent in EAGLE-1.
std::tuple<Tensor, Tensor> join_rows(const Tensor& embedding, const Tensor& features, const std::optional<Tensor>& source,
                                     const std::optional<Tensor>& table_norm, const std::optional<Tensor>& feature_norm,
                                     double eps, bool keep_normed) {
  const int64_t B = embedding.size(0), W = embedding.size(1), H = embedding.size(2), R = features.size(1);
  Tensor residual = new_empty(embedding, {B, W, H}), joined = new_empty(embedding, {B, W, 2 * H});
  for (int64_t row = 0; row < B * W; ++row) {
    const float* feature = floats(features) + (row / W * R + (source ? integers(*source)[row] : row % W)) * H;
    join_row(floats(embedding) + row * H, feature, H, floats(table_norm), floats(feature_norm), (float)eps, keep_normed,
             floats(residual) + row * H, floats(joined) + row * 2 * H);
  }
  return {residual, joined};
}

// ---- accepting and committing ----------------------------------------------------------------------------------------

// The fields of `verify.Accepted`. All tables are [B,N], ancestors [B,N,N].
std::tuple<Tensor, Tensor, Tensor, Tensor> accept(const Tensor& tokens, const Tensor& parent, const Tensor& depth,
                                                  const Tensor& ancestors, const Tensor& valid, const Tensor& choice, int64_t D) {
  const int64_t B = tokens.size(0), N = tokens.size(1);
  Tensor path = new_empty(tokens, {B, D + 1}), emitted = new_empty(tokens, {B, D + 1});
  Tensor count = new_empty(tokens, {B}), bonus = new_empty(tokens, {B});
  std::vector<char> match(N);
  for (int64_t b = 0; b < B; ++b) {
    const int64_t *token = integers(tokens) + b * N, *chosen = integers(choice) + b * N, *deep = integers(depth) + b * N;
    for (int64_t i = 0; i < N; ++i)
      match[i] = i == 0 || (booleans(valid)[b * N + i] && token[i] == chosen[integers(parent)[b * N + i]]);
    int64_t last = 0;  // the deepest node whose ancestors all match, the lowest of equals
    for (int64_t i = 0; i < N; ++i) {
      const bool* sees = booleans(ancestors) + (b * N + i) * N;
      bool all = true;
      for (int64_t j = 0; j < N; ++j) all &= !sees[j] || match[j];
      if (all && deep[i] > deep[last]) last = i;
    }
    int64_t *way = integers(path) + b * (D + 1), *out = integers(emitted) + b * (D + 1);
    std::fill(way, way + D + 1, last);
    for (int64_t i = 0; i < N; ++i)
      if (booleans(ancestors)[(b * N + last) * N + i]) way[deep[i]] = i;
    for (int64_t level = 0; level <= D; ++level) out[level] = chosen[way[level]];
    integers(count)[b] = deep[last] + 1;
    integers(bonus)[b] = chosen[last];
  }
  return {path, count, bonus, emitted};
}

// `step._write`: everything but the KV cache. (count [B], finite [B,P], source [B,P], target [B,P]).
std::tuple<Tensor, Tensor, Tensor, Tensor> commit(std::vector<Tensor> walk, const Tensor& usable, const Tensor& features,
                                                  std::vector<Tensor> state) {
  const auto accepted = record<tensors::Accepted>(walk);
  const auto buffers = record<tensors::StepBuffers>(state);
  const Tensor& path = accepted.path;
  const int64_t B = path.size(0), P = path.size(1), N = features.size(1), F = features.size(2), S = buffers.tokens.size(1);
  const int64_t stops = buffers.stop_ids.size(1), width = buffers.ring.size(2), history = buffers.history.size(1) - 1;
  const int64_t step = integers(buffers.step)[0]++ % buffers.ring.size(0);
  Tensor count = new_empty(path, {B}), finite = new_empty(path, {B, P}, ScalarType::Bool);
  Tensor source = new_empty(path, {B, P}), target = new_empty(path, {B, P});
  for (int64_t b = 0; b < B; ++b) {
    bool& finished = booleans(buffers.done)[b];
    const bool live = !finished;
    const int64_t *segment = integers(buffers.segments) + 2 * b, start = integers(buffers.n)[b], many = live ? integers(accepted.count)[b] : 0;
    int64_t* row = integers(buffers.ring) + step * buffers.ring.stride(0) + b * width;
    for (int64_t level = 0; level < P; ++level) {
      const int64_t at = b * P + level, node = integers(path)[at], token = integers(accepted.emitted)[at];
      const bool is_new = level < many, good = booleans(usable)[b * N + node] || !is_new;
      const float* feature = floats(features) + (b * N + node) * F;
      integers(source)[at] = segment[0] + std::min(start + node, segment[1]);
      integers(target)[at] = is_new ? segment[0] + start + level : integers(source)[at];
      booleans(finite)[at] = good;
      row[2 + 2 * level] = token;
      row[3 + 2 * level] = good;
      if (live) std::copy_n(feature, F, floats(buffers.features) + (b * buffers.features.size(1) + level) * F);
      if (!is_new) continue;
      integers(buffers.tokens)[b * S + start + 1 + level] = token;
      const int64_t* stop = integers(buffers.stop_ids) + b * stops;
      finished |= std::find(stop, stop + stops, token) != stop + stops;
      if (history > 0)  // one more row takes what nobody reads
        std::copy_n(feature, F, floats(buffers.history) + (b * (history + 1) + (start + level) % history) * F);
    }
    integers(buffers.n)[b] += many;
    integers(buffers.produced)[b] += many;
    if (live) {
      integers(buffers.root)[b] = integers(accepted.bonus)[b];
      integers(buffers.count)[b] = many;
    }
    finished |= integers(buffers.produced)[b] >= integers(buffers.limit)[b];
    integers(count)[b] = row[0] = many;
    row[1] = finished;
  }
  return {count, finite, source, target};
}

// `kernels.commit_kv` of a cache [L,2,B,Hkv,S,row], or [L,2,1,Hkv,S,row]: rows move from source to target [B,P]. A row
// whose target is the last slot goes nowhere, because nobody reads that slot. The cache may be the first rows of a larger one.
void commit_kv(Tensor kv, const Tensor& source, const Tensor& target) {
  const int64_t B = source.size(0), heads = kv.size(3), S = kv.size(4), P = source.size(1);
  const Cache cache(kv);
  std::vector<std::pair<int64_t, int64_t>> moves;
  std::vector<char> rows;
  for (int64_t b = 0; b < B; ++b) {
    moves.clear();
    for (int64_t p = b * P; p < (b + 1) * P; ++p)
      if (integers(target)[p] != integers(source)[p] && integers(target)[p] < S - 1)
        moves.emplace_back(integers(source)[p] * cache.row, integers(target)[p] * cache.row);
    rows.resize(moves.size() * cache.row);
    for (int64_t i = 0; i < kv.size(0) * 2 * heads && !moves.empty(); ++i) {
      char* head = cache.at + i / heads * cache.values + (b * cache.apart + i % heads) * S * cache.row;
      for (size_t m = 0; m < moves.size(); ++m) std::memcpy(&rows[m * cache.row], head + moves[m].first, cache.row);
      for (size_t m = 0; m < moves.size(); ++m) std::memcpy(head + moves[m].second, &rows[m * cache.row], cache.row);
    }
  }
}

}  // namespace

EAGLET_OPERATOR(CPU, noise, "(Tensor seed, Tensor n, int rows, Tensor hashes) -> Tensor");
EAGLET_OPERATOR(CPU, choose, "(Tensor logits, Tensor? noise, Tensor? depth, Tensor temperature) -> (Tensor, Tensor)");
EAGLET_OPERATOR(CPU, draft_topk, "(Tensor logits, Tensor? noise, Tensor? ids, Tensor temperature, bool noisy, int count) "
                "-> (Tensor, Tensor)");
EAGLET_OPERATOR(CPU, place_rows, "(Tensor n, Tensor depth, Tensor[] rotary, int slots, int fed, Tensor? count, Tensor? tokens, "
                "int lead, Tensor? segments, bool ring) -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
EAGLET_OPERATOR(CPU, join_rows, "(Tensor embedding, Tensor features, Tensor? source, Tensor? table_norm, Tensor? feature_norm, "
                "float eps, bool keep_normed) -> (Tensor, Tensor)");
EAGLET_OPERATOR(CPU, accept, "(Tensor tokens, Tensor parent, Tensor depth, Tensor ancestors, Tensor valid, Tensor choice, int D) "
                "-> (Tensor, Tensor, Tensor, Tensor)");
EAGLET_OPERATOR(CPU, commit, "(Tensor[] walk, Tensor usable, Tensor features, Tensor(a!)[] state) -> (Tensor, Tensor, Tensor, Tensor)");
EAGLET_OPERATOR(CPU, commit_kv, "(Tensor(a!) kv, Tensor source, Tensor target) -> ()");
