// Draft trees on x86 CPUs with AVX2. kernels/cpu.py builds this file. Static trees of an EAGLE head take one call with all
// forwards of the head: what it computes is said in plain PyTorch in drafters/trees.py and eagle_draft.py, and has the
// same bits. Pruning and repeated text are only here. The tree of a block head takes one call behind its forward (block_draft.py).

#include "cpu.h"

#include <map>

namespace {

using namespace eaglet;
using torch::headeronly::ScalarType;
using torch::stable::new_empty;

// One draft forward (`kernels.records.Level`).
struct Level {
  int64_t width;
  const int64_t *source, *place;  // [B,width]: a node's parent in the level above, and its candidate among those of that level
  const bool* visible;            // [B,width,rows of the tree so far]
  const int64_t* node;            // [B,width]
  const bool* valid;              // [B,width]
};

// An EAGLE head with its tree.
struct TreeDraft {
  static constexpr int64_t MARK = 0x6561676C65547265;
  static constexpr char NAME[] = "a head and its tree";
  const int64_t mark = mark_of(this);
  std::vector<std::vector<Tensor>> memory;  // the tensors of head, tree and levels, which the pointers point into
  const Layer layer;
  const Linear fc, lm_head;
  std::optional<Linear> embedding;  // a packed one; else `table` [V,H]
  const float *table = nullptr, *token_norm, *feature_norm, *output_norm, *fc_norms, *cos, *sin;
  const int64_t *draft_ids, *hashes;  // of the draft vocabulary
  const int64_t H, tapped, half, positions, children;  // tapped: the width of a row of fc_norms
  const float eps, scale;
  const bool keep_normed, noisy;  // noisy: scores are those of the noisy logits (`TreeDrafter.scoring`)
  const bool feeds_normed;        // the next level reads the output behind its norm
  const int64_t N, *candidate, *parent, *depth;  // [B,N]; candidate: where a node's token is found among those of all rows
  const bool* valid;                             // [B,N]
  std::vector<Level> levels;

  TreeDraft(const tensors::HeadWeights& head, const tensors::TreeNodes& tree, int64_t children, double eps, double scale,
            bool keep_normed, bool feeds_normed, bool noisy)
      : layer(head.layer), fc(head.fc), lm_head(head.lm_head), token_norm(values_or_null(head.token_norm)),
        feature_norm(values_or_null(head.feature_norm)), output_norm(values_or_null(head.output_norm)),
        fc_norms(values_or_null(head.fc_norms)), cos(floats(head.rotary.cos)), sin(floats(head.rotary.sin)),
        draft_ids(head.draft_ids.numel() ? integers(head.draft_ids) : nullptr),
        hashes(integers(head.hashes)), H(layer.o.n), tapped(fc_norms ? head.fc_norms.size(1) : 0),
        half(head.rotary.cos.size(1)), positions(head.rotary.cos.size(0)), children(children),
        eps((float)eps), scale((float)scale), keep_normed(keep_normed), noisy(noisy), feeds_normed(feeds_normed),
        N(tree.parent.size(1)),
        candidate(integers(tree.candidate)), parent(integers(tree.parent)), depth(integers(tree.depth)),
        valid(booleans(tree.valid)) {
    if (head.embedding.codes.dim() == 2) table = floats(head.embedding.codes);
    else embedding.emplace(head.embedding);
  }
};

Tensor tree_draft(std::vector<Tensor> head, std::vector<Tensor> tree, std::vector<Tensor> levels, int64_t children, double eps,
                  double scale, bool keep_normed, bool feeds_normed, bool noisy) {
  auto draft = std::make_unique<TreeDraft>(record<tensors::HeadWeights>(head), record<tensors::TreeNodes>(tree), children, eps,
                                           scale, keep_normed, feeds_normed, noisy);
  for (size_t at = 0; at < levels.size(); at += tensors::Level::TENSORS) {
    const tensors::Level t(&levels[at]);
    draft->levels.push_back({t.node.size(1), integers(t.source), integers(t.place), booleans(t.visible), integers(t.node),
                             booleans(t.valid)});
  }
  draft->memory = {std::move(head), std::move(tree), std::move(levels)};
  return keep(std::move(draft));
}

// The rows of a draft forward, [B,width].
struct Rows {
  std::vector<int64_t> tokens, slots, positions;
  std::vector<const float*> features;

  explicit Rows(int64_t rows) : tokens(rows), slots(rows), positions(rows), features(rows) {}
};

// A draft under way: the buffers of its forwards, of which none has more than `most` rows, and no level more than `widest`.
// shared_noise: whether the head drafts with the target's noise.
struct Drafting {
  const TreeDraft& d;
  const int64_t B, most;
  const Tensor& kv;
  const bool round, shared_noise, ring;
  const int64_t window;
  std::vector<float> cos, sin, embedding, residual, joined, buffers, normed, noise;
  const std::unique_ptr<float[]> logits;
  float* buffer[3];

  Drafting(const TreeDraft& d, int64_t B, int64_t most, int64_t widest, const Tensor& kv, bool round, bool shared_noise, int64_t window,
           bool ring)
      : d(d), B(B), most(most), kv(kv), round(round), shared_noise(shared_noise), ring(ring), window(window), cos(most * d.half), sin(most * d.half),
        embedding(d.H), residual(most * d.H), joined(most * 2 * d.H), buffers(3 * most * d.layer.widest()), normed(most * d.H),
        noise(shared_noise ? B * d.lm_head.n : 0), logits(new float[widest * d.lm_head.n]) {
    for (int64_t i = 0; i < 3; ++i) buffer[i] = &buffers[i * most * d.layer.widest()];
  }

  // The slot of row `at` of the text and the tree.
  int64_t slot(int64_t at) const { return ring ? at % (kv.size(3) - 1) : std::min(at, kv.size(3) - 1); }

  // The first half of a forward. start [B]: the first slot that `visible` [B,width,R] speaks of.
  Nodes write(const Rows& rows, int64_t width, const int64_t* start, const bool* visible, int64_t R) {
    const int64_t M = B * width, H = d.H, hd = kv.size(4), kv_heads = kv.size(2);
    for (int64_t row = 0; row < M; ++row) {
      const float* token = d.embedding ? embedding.data() : d.table + rows.tokens[row] * H;
      if (d.embedding) d.embedding->row(rows.tokens[row], embedding.data());
      join_row(token, rows.features[row], H, d.token_norm, d.feature_norm, d.eps, d.keep_normed, &residual[row * H], &joined[row * 2 * H]);
      rotary_row(d.cos, d.sin, d.positions, d.half, rows.positions[row], &cos[row * d.half], &sin[row * d.half]);
    }
    const float* x = joined.data();
    if (!d.token_norm) {  // EAGLE-1: the layer reads what `fc` makes of both
      d.fc(joined.data(), M, nullptr, false, round, residual.data());
      x = residual.data();
    }
    Nodes nodes{B, width, d.layer.qkv.n / hd - 2 * kv_heads, kv_heads, hd, kv.size(3), R, window, cos.data(), sin.data(), d.half,
                Cache(kv), rows.slots.data(), start, rows.positions.data(), visible, d.eps};
    nodes.ring = ring;
    d.layer.write(nodes, x, round, buffer);
    return nodes;
  }

  // The second half; out [B,width,H].
  void finish(const Nodes& nodes, float* out) {
    d.layer.finish(nodes, residual.data(), d.scale, round, buffer, out);
    if (d.feeds_normed) norm_rows(out, d.output_norm, B * nodes.T, d.H, d.eps, out);
  }

  // The best children of each row of output [B,width,H]: places and scores [B,width,children]. The children of row b stand at
  // positions[b], and the target draws them with seed[b]. bias [B,n], or null, is added to the logits.
  void propose(const float* output, int64_t width, const int64_t* seed, const int64_t* positions, const float* temperature,
               const float* bias, int64_t* places, float* scores) {
    const int64_t M = B * width, size = d.lm_head.n;
    const bool norms = d.output_norm && !d.feeds_normed;
    if (norms) norm_rows(output, d.output_norm, M, d.H, d.eps, normed.data());
    d.lm_head(norms ? normed.data() : output, M, nullptr, false, round, logits.get());
    const int64_t PART = 2048, parts = (size + PART - 1) / PART;  // of a row of noise
    parallel_for(0, shared_noise ? B * parts : 0, 2, [&](int64_t first, int64_t last) {
      for (int64_t part = first; part < last; ++part) {
        const int64_t b = part / parts, begin = part % parts * PART;
        noise_row(seed[b], positions[b], d.hashes + begin, std::min(PART, size - begin), &noise[b * size + begin]);
      }
    });
    parallel_for(0, M, std::max<int64_t>(1, 16384 / size), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        for (int64_t i = 0; bias && i < size; ++i) logits[row * size + i] += bias[row / width * size + i];
        const float* g = shared_noise ? &noise[row / width * size] : nullptr;
        const DraftRow drafts{&logits[row * size], size, g, nullptr, temperature[row / width], d.noisy};
        best_drafts(drafts, d.children, places + row * d.children, scores + row * d.children);
      }
    });
  }
};

// The longest run of tokens up to position n that the text has had before: its length, and where it ended then.
std::pair<int64_t, int64_t> earlier_run(const int64_t* tokens, int64_t n) {
  constexpr int64_t LONGEST = 64;
  std::pair<int64_t, int64_t> found{0, 0};
  for (int64_t end = n - 1; end >= 0 && found.first < LONGEST; --end) {
    int64_t same = 0;
    while (same <= end && same < LONGEST && tokens[end - same] == tokens[n - same]) ++same;
    if (same > found.first) found = {same, end};
  }
  return found;
}

// The fields of a `Draft` of Z nodes: tokens, parent, depth, ancestors, valid and cumulative scores.
struct Draft {
  const int64_t Z;
  Tensor ids, parent, depth, ancestors, valid, scores;

  Draft(const Tensor& root, const Tensor& temperature, int64_t Z)
      : Z(Z), ids(new_empty(root, {root.size(0), Z})), parent(new_empty(root, {root.size(0), Z})),
        depth(new_empty(root, {root.size(0), Z})), ancestors(new_empty(root, {root.size(0), Z, Z}, ScalarType::Bool)),
        valid(new_empty(root, {root.size(0), Z}, ScalarType::Bool)), scores(new_empty(temperature, {root.size(0), Z})) {
    std::fill_n(booleans(ancestors), root.size(0) * Z * Z, false);
  }

  // Node i of sequence b, whose parent `up` comes before it. What is not real is padding.
  void set(int64_t b, int64_t i, bool real, int64_t id, int64_t up, int64_t level, float score) {
    const int64_t row = b * Z + i;
    bool* sees = booleans(ancestors) + row * Z;
    integers(ids)[row] = id;
    integers(parent)[row] = real ? up : 0;
    integers(depth)[row] = real ? level : 0;
    booleans(valid)[row] = real;
    floats(scores)[row] = score;
    if (real && i) std::copy_n(booleans(ancestors) + (b * Z + up) * Z, Z, sees);
    sees[i] = true;
  }

  using Fields = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
  Fields fields() const { return {ids, parent, depth, ancestors, valid, scores}; }
};

// After m tokens alike, the next token is that of the earlier text with probability m^2 / (m^2 + d), and then m + 1 are alike.
// (Measured on answers of SmolLM2 behind chats of up to 6,000 tokens.)
double differs_at(double temperature) { return 5.3 + 2.2 * temperature * temperature; }

constexpr int64_t FEW = 4;  // nodes that cost little (`Drafter.priced_nodes`)

// The continuations of what all sequences repeat, at most `most` tokens of each, or nothing if one of them repeats fewer than ENOUGH
// emitted tokens: then a head drafts better. (The template of a chat repeats itself before every answer.)
std::optional<Draft> draft_runs(const Tensor& tokens, const Tensor& n, const Tensor& root, const Tensor& temperature,
                                const Tensor& produced, int64_t most, float least, float more) {
  constexpr double ENOUGH = 4;
  const int64_t B = n.size(0), S = tokens.size(1);
  std::vector<int64_t> ends(B), lengths(B);
  std::vector<float> scores(B * most, -INFINITY);  // cumulative
  for (int64_t b = 0; b < B; ++b) {
    const double differs = differs_at(floats(temperature)[b]);
    double alike, total = 0;
    std::tie(alike, ends[b]) = earlier_run(integers(tokens) + b * S, integers(n)[b]);
    if (std::min(alike, (double)integers(produced)[b]) < ENOUGH) return {};
    for (int64_t& l = lengths[b]; l < most; ++l, ++alike) {
      total -= std::log1p(differs / (alike * alike));
      if (total < (l < FEW ? least : more)) break;
      scores[b * most + l] = total;
    }
    if (!lengths[b]) return {};
  }
  Draft draft(root, temperature, 1 + *std::max_element(lengths.begin(), lengths.end()));
  for (int64_t b = 0; b < B; ++b) {
    const int64_t at = integers(n)[b], period = at - ends[b];
    draft.set(b, 0, true, integers(root)[b], 0, 0, 0.f);
    for (int64_t l = 1; l < draft.Z; ++l) {
      const int64_t id = integers(tokens)[b * S + ends[b] + 1 + (l - 1) % period];
      draft.set(b, l, l <= lengths[b], id, l - 1, l, scores[b * most + l - 1]);
    }
  }
  return draft;
}

// A `Draft` (`TreeDrafter._static`). features [B,R,F], of which `count` [B] rows are true, stand for the tokens before the root.
// If p_min is not 0, the tree is pruned: what is less likely than p_min in every sequence is left out, and nothing is drafted
// below what is less likely than p_forward.
// Only FEW nodes may be as unlikely as that; more of them must be as likely as p_more.
// Where the sequences repeat themselves, a pruned tree gives way to a run of at most `ngram_nodes` tokens. window, ring: as of
// `kernels.records.Nodes`.
Draft::Fields draft_tree(const Tensor& drafts, std::vector<Tensor> list, bool shared_noise, Tensor kv, bool round, double p_min,
                         double p_more, double p_forward, int64_t ngram_nodes, int64_t window, bool ring) {
  const TreeDraft& d = object_of<TreeDraft>(drafts);
  const auto text = record<tensors::DraftText>(list);
  const int64_t B = text.n.size(0), S = text.tokens.size(1), H = d.H, F = text.features.size(2), N = d.N, K = d.children;
  const bool prune = p_min > 0;
  const float least = std::log((float)p_min), more = std::log((float)p_more);
  const int64_t fed = *std::max_element(integers(text.count), integers(text.count) + B);
  int64_t widest = 1, run_rows = 1;
  for (const Level& level : d.levels) {
    widest = std::max(widest, level.width);
    run_rows += level.width;
  }
  const int64_t most = std::max(fed, widest);
  Drafting drafting(d, B, B * most, B * widest, kv, round, shared_noise, window, ring);
  Rows rows(B * most);

  // the accepted tokens again, with their true features
  std::vector<float> given(B * fed * F), fused(d.token_norm ? B * fed * H : 0), output(B * most * H), above(B * most * H);
  std::vector<int64_t> start(B), children(B);
  const std::unique_ptr<bool[]> known(new bool[B * fed]);  // what the root's row sees
  for (int64_t b = 0; b < B; ++b) {
    start[b] = integers(text.n)[b] - integers(text.count)[b];
    std::copy_n(floats(text.features) + b * text.features.size(1) * F, fed * F, &given[b * fed * F]);
    for (int64_t r = 0; r < fed; ++r) {
      const int64_t row = b * fed + r;
      rows.tokens[row] = integers(text.tokens)[b * S + std::min(start[b] + 1 + r, S - 1)];
      rows.positions[row] = start[b] + r;
      rows.slots[row] = drafting.slot(start[b] + r);
      rows.features[row] = d.token_norm ? &fused[row * H] : &given[row * F];
      known[row] = r < integers(text.count)[b];
    }
  }
  for (int64_t at = 0; d.fc_norms && at < B * fed * F; at += d.tapped)
    norm_rows(&given[at], d.fc_norms + at % F, 1, d.tapped, d.eps, &given[at]);
  if (d.token_norm) d.fc(given.data(), B * fed, nullptr, false, round, fused.data());
  Nodes roots = drafting.write(rows, fed, start.data(), known.get(), fed);
  if (prune && ngram_nodes) {
    const std::optional<Draft> found = draft_runs(text.tokens, text.n, text.root, text.temperature, text.produced, ngram_nodes,
                                                  least, more);
    if (found) return found->fields();
  }
  const int64_t wide = roots.heads * roots.hd;
  for (int64_t b = 0; b < B; ++b) {  // only the roots' rows are needed further
    const int64_t row = b * fed + integers(text.count)[b] - 1;
    std::copy_n(drafting.buffer[2] + row * wide, wide, drafting.buffer[2] + b * wide);
    std::copy_n(&drafting.residual[row * H], H, &drafting.residual[b * H]);
    rows.positions[b] = rows.positions[row];
  }
  roots.T = 1;
  drafting.finish(roots, above.data());

  // the tree, level by level; of a level only the rows `live` are run
  std::vector<int64_t> places(B * widest * K), found(B * run_rows * K), live{0}, next, ran, position(widest);
  std::vector<float> scores(places.size()), totals(found.size(), -INFINITY), base(B * widest);
  std::vector<char> is_kept(N, !prune);
  is_kept[0] = true;
  auto total = [&](int64_t b, int64_t candidate) { return totals[b * run_rows * K + candidate]; };
  for (int64_t i = 0, begin = 0;; ++i) {  // begin: the first run row of the level above
    const int64_t width = live.size();
    for (int64_t b = 0; b < B; ++b) children[b] = integers(text.n)[b] + 1 + i;
    drafting.propose(above.data(), width, integers(text.seed), children.data(), floats(text.temperature),
                     text.bias.size(1) ? floats(text.bias) : nullptr, places.data(), scores.data());
    for (int64_t row = 0; row < B * width; ++row)
      for (int64_t c = 0; c < K; ++c) {
        const int64_t from = row * K + c, to = (row / width * run_rows + begin + live[row % width]) * K + c;
        found[to] = d.draft_ids ? d.draft_ids[places[from]] : places[from];
        totals[to] = scores[from] + (i ? base[row] : 0.f);
      }
    for (int64_t at = 0; at < B * N; ++at)
      if (d.depth[at] == i + 1 && d.valid[at] && total(at / N, d.candidate[at]) >= least) is_kept[at % N] = true;
    if (i == (int64_t)d.levels.size()) break;
    const Level& level = d.levels[i];
    next.clear();
    for (int64_t w = 0; w < level.width; ++w) {
      bool worth = !prune;
      for (int64_t b = 0; b < B && !worth; ++b) {
        const int64_t node = level.node[b * level.width + w];
        worth = level.valid[b * level.width + w] && is_kept[node] && total(b, d.candidate[b * N + node]) >= std::log(p_forward);
      }
      if (worth) next.push_back(w);
    }
    if (next.empty()) break;
    std::fill(position.begin(), position.end(), 0);
    for (int64_t k = 0; k < width; ++k) position[live[k]] = k;
    const int64_t first = ran.size(), W = next.size(), R = first + W, below = begin + (i ? d.levels[i - 1].width : 1);
    for (int64_t w : next) ran.push_back(below - 1 + w);
    const std::unique_ptr<bool[]> visible(new bool[B * W * R]);
    for (int64_t row = 0; row < B * W; ++row) {
      const int64_t b = row / W, w = b * level.width + next[row % W], at = (b * run_rows + begin) * K + level.place[w];
      rows.tokens[row] = found[at];
      base[row] = totals[at];
      rows.positions[row] = integers(text.n)[b] + i;
      rows.slots[row] = drafting.slot(integers(text.n)[b] + first + row % W);
      rows.features[row] = &above[(b * width + position[level.source[w]]) * H];
      for (int64_t r = 0; r < R; ++r) visible[row * R + r] = level.visible[w * (below - 1 + level.width) + ran[r]];
    }
    drafting.finish(drafting.write(rows, W, integers(text.n), visible.get(), R), output.data());
    std::swap(output, above);
    std::swap(live, next);
    begin = below;
  }

  if (prune) {  // the most likely nodes first; a node is likelier than those below it
    std::vector<std::pair<float, int64_t>> kept;
    for (int64_t i = 1; i < N; ++i) {
      float best = -INFINITY;
      for (int64_t b = 0; is_kept[i] && b < B; ++b)
        if (d.valid[b * N + i]) best = std::max(best, total(b, d.candidate[b * N + i]));
      if (is_kept[i]) kept.emplace_back(-best, i);
    }
    std::sort(kept.begin(), kept.end());
    for (size_t k = FEW; k < kept.size(); ++k) is_kept[kept[k].second] = -kept[k].first >= more;
  }
  std::vector<int64_t> nodes, place(N, -1);
  for (int64_t i = 0; i < N; ++i)
    if (is_kept[i]) {
      place[i] = nodes.size();
      nodes.push_back(i);
    }
  Draft draft(text.root, text.temperature, nodes.size());
  for (int64_t row = 0; row < B * draft.Z; ++row) {
    const int64_t b = row / draft.Z, i = row % draft.Z, at = b * N + nodes[i], up = place[d.parent[at]];
    const int64_t from = b * run_rows * K + d.candidate[at], id = i ? found[from] : integers(text.root)[b];
    draft.set(b, i, d.valid[at] && up >= 0, id, up, d.depth[at], i ? totals[from] : 0.f);
  }
  return draft.fields();
}

// ---- trees of block heads --------------------------------------------------------------------------------------------

// What may follow a token: places in the draft vocabulary and log-probabilities, the best first.
using Children = std::vector<std::pair<float, int64_t>>;

// The children in a slot after one token (`kernels.follow`), from the slot's shortlist of K. factor [R]: what the products with
// the rows of `successor` are added of.
Children children_after(const float* scores, const int64_t* places, int64_t K, const float* factor, const float* successor, int64_t R,
                        float softness, int64_t count) {
  Children found(K);
  double rest = 1, total = 0;
  for (int64_t k = 0; k < K; ++k) {
    const float* row = successor + places[k] * R;
    float bias = 0;
    for (int64_t r = 0; r < R; ++r) bias += row[r] * factor[r];
    const float u = scores[k] + bias / softness;
    found[k] = {std::isnan(u) ? -INFINITY : u, places[k]};
    if (scores[k] > -INFINITY) rest -= std::exp((double)scores[k]);
  }
  float top = 0;
  for (const auto& [u, place] : found) top = std::max(top, u);
  for (const auto& [u, place] : found) total += std::exp((double)(u - top));
  const float all = top + (float)std::log(total + std::max(rest, 0.0) * std::exp(-(double)top));
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  found.resize(std::min(count, K));
  for (auto& [u, place] : found) u -= all;
  return found;
}

// The root and the best prefixes, N nodes with those that are likelier than p_min, [B,N or fewer]: of every sequence the search
// takes the likeliest candidate, and then its sibling and its first child are candidates.
// scores, places [B,D,K]: the shortlists of the slots. successor [V,R], predecessor [V,R], mixed [B,D,R]: what corrects them by
// the token before (`kernels.Parents`), if anything does. soft: scores are of logits divided by the temperature, 1/2 at least.
Draft::Fields slot_tree(const Tensor& scores, const Tensor& places, const std::optional<Tensor>& draft_ids, const Tensor& root,
                        const Tensor& temperature, const std::optional<Tensor>& successor, const std::optional<Tensor>& predecessor,
                        const std::optional<Tensor>& mixed, bool soft, int64_t N, int64_t count, double p_min) {
  struct Candidate {
    double total;
    int64_t order, parent, depth, rank;
    const Children* list;
    bool operator<(const Candidate& other) const { return total != other.total ? total < other.total : order > other.order; }
  };
  struct Node {
    int64_t id, parent, depth;
    float score;
  };
  const int64_t B = scores.size(0), D = scores.size(1), K = scores.size(2), R = successor ? successor->size(1) : 0;
  const double least = p_min > 0 ? std::log(p_min) : -INFINITY;
  std::vector<std::vector<Node>> trees(B);
  std::vector<float> factor(R);
  size_t widest = p_min > 0 ? 1 : N;
  for (int64_t b = 0; b < B; ++b) {
    std::map<std::pair<int64_t, int64_t>, Children> known;  // by the slot, and by the token before
    const float heat = floats(temperature)[b], softness = soft && heat > 0 ? std::max(heat, 0.5f) : 1.f;
    auto after = [&](int64_t depth, int64_t token) {
      const auto [at, missing] = known.try_emplace({depth, R ? token : 0});
      if (missing) {
        const float* given = floats(scores) + (b * D + depth) * K;
        const int64_t* listed = integers(places) + (b * D + depth) * K;
        if (R) {
          std::copy_n(floats(*predecessor) + token * R, R, factor.begin());
          if (mixed)
            for (int64_t r = 0; r < R; ++r) factor[r] *= floats(*mixed)[(b * D + depth) * R + r];
          at->second = children_after(given, listed, K, factor.data(), floats(*successor), R, softness, count);
        } else {
          for (int64_t k = 0; k < std::min(count, K); ++k) at->second.push_back({given[k], listed[k]});
        }
      }
      return &at->second;
    };
    std::vector<Node>& nodes = trees[b];
    nodes.push_back({integers(root)[b], 0, 0, 0.f});
    std::vector<Candidate> heap;
    int64_t order = 0;
    auto offer = [&](int64_t parent, double base, int64_t depth, int64_t rank, const Children* list) {
      if (rank >= (int64_t)list->size()) return;
      const double total = base + (*list)[rank].first;
      if (!(total >= least) || total == -INFINITY) return;
      heap.push_back({total, order++, parent, depth, rank, list});
      std::push_heap(heap.begin(), heap.end());
    };
    std::vector<double> totals{0};
    offer(0, 0, 0, 0, after(0, nodes[0].id));
    while ((int64_t)nodes.size() < N && !heap.empty()) {
      std::pop_heap(heap.begin(), heap.end());
      const Candidate best = heap.back();
      heap.pop_back();
      const int64_t place = (*best.list)[best.rank].second, id = draft_ids ? integers(*draft_ids)[place] : place;
      nodes.push_back({id, best.parent, best.depth + 1, (float)best.total});
      totals.push_back(best.total);
      offer(best.parent, totals[best.parent], best.depth, best.rank + 1, best.list);
      if (best.depth + 1 < D) offer(nodes.size() - 1, best.total, best.depth + 1, 0, after(best.depth + 1, id));
    }
    widest = std::max(widest, nodes.size());
  }
  Draft draft(root, temperature, widest);
  for (int64_t b = 0; b < B; ++b)
    for (int64_t i = 0; i < draft.Z; ++i) {
      const bool real = i < (int64_t)trees[b].size();
      const Node node = real ? trees[b][i] : Node{0, 0, 0, -INFINITY};
      draft.set(b, i, real, node.id, node.parent, node.depth, node.score);
    }
  return draft.fields();
}

}  // namespace

EAGLET_OPERATOR(CPU, slot_tree, "(Tensor scores, Tensor places, Tensor? draft_ids, Tensor root, Tensor temperature, "
                "Tensor? successor, Tensor? predecessor, Tensor? mixed, bool soft, int N, int count, float p_min) "
                "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
EAGLET_OPERATOR(CPU, tree_draft, "(Tensor[] head, Tensor[] tree, Tensor[] levels, int children, float eps, float scale, "
                "bool keep_normed, bool feeds_normed, bool noisy) -> Tensor");
EAGLET_OPERATOR(CPU, draft_tree, "(Tensor drafts, Tensor[] text, bool shared_noise, Tensor(a!) kv, bool round, float p_min, "
                "float p_more, float p_forward, int ngram_nodes, int window, bool ring) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
