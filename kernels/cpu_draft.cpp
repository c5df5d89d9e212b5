// Static draft trees of an EAGLE head on x86 CPUs with AVX2, a whole tree in one call. kernels/cpu.py builds this file. What
// it computes is said in plain PyTorch in drafters/tree_drafter.py and eagle_draft.py, and has the same bits.

#include "cpu.h"

namespace {

using namespace eaglet;
using torch::headeronly::ScalarType;
using torch::stable::new_empty;

// One draft forward (`tree.Level`).
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
  const std::vector<Tensor> head, tree;  // in the order of `static_draft` in runtime/fused.py
  const Layer layer;
  const Linear fc, lm_head;
  std::optional<Linear> embedding;  // a packed one; else `table` [V,H]
  const float *table = nullptr, *token_norm, *feature_norm, *output_norm, *cos, *sin;
  const int64_t* draft_ids;
  const int64_t H, half, positions, children;
  const float eps, scale, least;  // least: the logarithm of the smallest probability of a node
  const bool keep_normed, noisy;  // noisy: scores are those of the noisy logits (`TreeDrafter.scoring`)
  const int64_t N, *candidate, *parent, *depth;  // [B,N]; candidate: where a node's token is found among those of all rows
  const bool* valid;                             // [B,N]
  std::vector<Level> levels;

  TreeDraft(std::vector<Tensor> of_head, std::vector<Tensor> of_tree, int64_t children, double eps, double scale, bool keep_normed, double p_min)
      : head(std::move(of_head)), tree(std::move(of_tree)), layer(&head[0]), fc(&head[20]), lm_head(&head[24]),
        token_norm(values_or_null(head[32])), feature_norm(values_or_null(head[33])), output_norm(values_or_null(head[34])),
        cos(floats(head[35])), sin(floats(head[36])), draft_ids(head[37].numel() ? integers(head[37]) : nullptr), H(layer.o.n),
        half(head[35].size(1)), positions(head[35].size(0)), children(children), eps((float)eps), scale((float)scale),
        least((float)std::log(p_min)), keep_normed(keep_normed), noisy(p_min > 0), N(tree[0].size(1)), candidate(integers(tree[0])),
        parent(integers(tree[1])), depth(integers(tree[2])), valid(booleans(tree[3])) {
    if (head[28].dim() == 2) table = floats(head[28]);
    else embedding.emplace(&head[28]);
    for (const Tensor* t = tree.data() + 4; t < tree.data() + tree.size(); t += 5)
      levels.push_back({t->size(1), integers(t[0]), integers(t[1]), booleans(t[2]), integers(t[3]), booleans(t[4])});
  }
};

Tensor tree_draft(std::vector<Tensor> head, std::vector<Tensor> tree, int64_t children, double eps, double scale,
                  bool keep_normed, double p_min) {
  STD_TORCH_CHECK(head.size() == 38 && tree.size() % 5 == 4, "a draft has 38 tensors of its head, 4 of its tree and 5 of each level");
  return keep(std::make_unique<TreeDraft>(std::move(head), std::move(tree), children, eps, scale, keep_normed, p_min));
}

// The rows of a draft forward, [B,width].
struct Rows {
  std::vector<int64_t> tokens, slots, positions;
  std::vector<const float*> features;

  explicit Rows(int64_t rows) : tokens(rows), slots(rows), positions(rows), features(rows) {}
};

// A draft under way: the buffers of its forwards, of which none has more than `most` rows, and no level more than `widest`.
struct Drafting {
  const TreeDraft& d;
  const int64_t B, most;
  const Tensor& kv;
  const bool round;
  std::vector<float> cos, sin, embedding, residual, joined, buffers, normed;
  const std::unique_ptr<float[]> logits;

  Drafting(const TreeDraft& d, int64_t B, int64_t most, int64_t widest, const Tensor& kv, bool round)
      : d(d), B(B), most(most), kv(kv), round(round), cos(most * d.half), sin(most * d.half), embedding(d.H), residual(most * d.H),
        joined(most * 2 * d.H), buffers(3 * most * d.layer.widest()), normed(most * d.H), logits(new float[widest * d.lm_head.n]) {}

  // out [B,width,H]. start [B]: the first slot that `visible` [B,width,R] speaks of.
  void forward(const Rows& rows, int64_t width, const int64_t* start, const bool* visible, int64_t R, float* out) {
    const int64_t M = B * width, H = d.H, hd = kv.size(4), kv_heads = kv.size(2), widest = d.layer.widest();
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
    const Nodes nodes{B, width, d.layer.qkv.n / hd - 2 * kv_heads, kv_heads, hd, kv.size(3), R, 0, kv.stride(0), cos.data(), sin.data(),
                      floats(kv), rows.slots.data(), start, rows.positions.data(), visible, d.eps};
    float* const buffer[3] = {buffers.data(), buffers.data() + most * widest, buffers.data() + 2 * most * widest};
    d.layer(nodes, x, residual.data(), d.scale, round, buffer, out);
  }

  // The best children of each row of output [B,width,H]: places and scores [B,width,children]. noise [B,P,V] has the row `level`.
  void propose(const float* output, int64_t width, const std::optional<Tensor>& noise, int64_t level, const float* temperature,
               int64_t* places, float* scores) {
    const int64_t M = B * width, size = d.lm_head.n;
    if (d.output_norm) norm_rows(output, d.output_norm, M, d.H, d.eps, normed.data());
    d.lm_head(d.output_norm ? normed.data() : output, M, nullptr, false, round, logits.get());
    torch::stable::parallel_for(0, M, std::max<int64_t>(1, 16384 / size), [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        const float* g = noise ? floats(*noise) + (row / width * noise->size(1) + level) * noise->size(2) : nullptr;
        const DraftRow drafts{&logits[row * size], size, g, d.draft_ids, temperature[row / width], d.noisy};
        best_drafts(drafts, d.children, places + row * d.children, scores + row * d.children);
      }
    });
  }
};

// A draft forward is worth its time if a node's probability is at least this many times that of a node worth checking.
constexpr float FORWARD = 2.5f;

// The fields of a `Draft`: tokens, parent, depth, ancestors, valid and cumulative scores (`TreeDrafter._static`). features
// [B,R,F], of which `count` [B] rows are true, stand for the tokens before the root. If the tree is pruned, what is less likely
// than p_min in every sequence is left out, and nothing is drafted below what is less likely than FORWARD p_min.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> draft_tree(
    const Tensor& drafts, const Tensor& tokens, const Tensor& n, const Tensor& root, const Tensor& features, const Tensor& count,
    const std::optional<Tensor>& noise, const Tensor& temperature, Tensor kv, bool round, bool prune) {
  const TreeDraft& d = kept<TreeDraft>(drafts);
  const int64_t B = n.size(0), S = tokens.size(1), slots = kv.size(3), H = d.H, F = features.size(2), N = d.N, K = d.children;
  const int64_t fed = *std::max_element(integers(count), integers(count) + B);
  int64_t widest = 1, run_rows = 1;
  for (const Level& level : d.levels) {
    widest = std::max(widest, level.width);
    run_rows += level.width;
  }
  const int64_t most = std::max(fed, widest);
  Drafting drafting(d, B, B * most, B * widest, kv, round);
  Rows rows(B * most);

  // the accepted tokens again, with their true features
  std::vector<float> given(B * fed * F), fused(d.token_norm ? B * fed * H : 0), output(B * most * H), above(B * most * H);
  std::vector<int64_t> start(B);
  const std::unique_ptr<bool[]> chain(new bool[B * fed * fed]);
  for (int64_t b = 0; b < B; ++b) {
    start[b] = integers(n)[b] - integers(count)[b];
    std::copy_n(floats(features) + b * features.size(1) * F, fed * F, &given[b * fed * F]);
    for (int64_t r = 0; r < fed; ++r) {
      const int64_t row = b * fed + r;
      rows.tokens[row] = integers(tokens)[b * S + std::min(start[b] + 1 + r, S - 1)];
      rows.positions[row] = start[b] + r;
      rows.slots[row] = std::min(start[b] + r, slots - 1);
      rows.features[row] = d.token_norm ? &fused[row * H] : &given[row * F];
      for (int64_t other = 0; other < fed; ++other) chain[row * fed + other] = other <= r;
    }
  }
  if (d.token_norm) d.fc(given.data(), B * fed, nullptr, false, round, fused.data());
  drafting.forward(rows, fed, start.data(), chain.get(), fed, output.data());
  for (int64_t b = 0; b < B; ++b) std::copy_n(&output[(b * fed + integers(count)[b] - 1) * H], H, &above[b * H]);

  // the tree, level by level; of a level only the rows `live` are run
  std::vector<int64_t> places(B * widest * K), found(B * run_rows * K), live{0}, next, ran, position(widest);
  std::vector<float> scores(places.size()), totals(found.size(), -INFINITY), base(B * widest);
  std::vector<char> is_kept(N, !prune);
  is_kept[0] = true;
  auto total = [&](int64_t b, int64_t candidate) { return totals[b * run_rows * K + candidate]; };
  for (int64_t i = 0, begin = 0;; ++i) {  // begin: the first run row of the level above
    const int64_t width = live.size();
    drafting.propose(above.data(), width, noise, i, floats(temperature), places.data(), scores.data());
    for (int64_t row = 0; row < B * width; ++row)
      for (int64_t c = 0; c < K; ++c) {
        const int64_t from = row * K + c, to = (row / width * run_rows + begin + live[row % width]) * K + c;
        found[to] = d.draft_ids ? d.draft_ids[places[from]] : places[from];
        totals[to] = scores[from] + (i ? base[row] : 0.f);
      }
    for (int64_t at = 0; at < B * N; ++at)
      if (d.depth[at] == i + 1 && d.valid[at] && total(at / N, d.candidate[at]) >= d.least) is_kept[at % N] = true;
    if (i == (int64_t)d.levels.size()) break;
    const Level& level = d.levels[i];
    next.clear();
    for (int64_t w = 0; w < level.width; ++w) {
      bool worth = !prune;
      for (int64_t b = 0; b < B && !worth; ++b) {
        const int64_t node = level.node[b * level.width + w];
        worth = level.valid[b * level.width + w] && is_kept[node] && total(b, d.candidate[b * N + node]) >= d.least + std::log(FORWARD);
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
      rows.positions[row] = integers(n)[b] + i;
      rows.slots[row] = std::min(integers(n)[b] + first + row % W, slots - 1);
      rows.features[row] = &above[(b * width + position[level.source[w]]) * H];
      for (int64_t r = 0; r < R; ++r) visible[row * R + r] = level.visible[w * (below - 1 + level.width) + ran[r]];
    }
    drafting.forward(rows, W, integers(n), visible.get(), R, output.data());
    std::swap(output, above);
    std::swap(live, next);
    begin = below;
  }

  std::vector<int64_t> nodes, place(N, -1);
  for (int64_t i = 0; i < N; ++i)
    if (is_kept[i]) {
      place[i] = nodes.size();
      nodes.push_back(i);
    }
  const int64_t Z = nodes.size();
  Tensor ids = new_empty(n, {B, Z}), parent = new_empty(n, {B, Z}), depth = new_empty(n, {B, Z}), values = new_empty(temperature, {B, Z});
  Tensor ancestors = new_empty(n, {B, Z, Z}, ScalarType::Bool), valid = new_empty(n, {B, Z}, ScalarType::Bool);
  std::fill_n(booleans(ancestors), B * Z * Z, false);
  for (int64_t row = 0; row < B * Z; ++row) {
    const int64_t b = row / Z, i = row % Z, at = b * N + nodes[i], from = b * run_rows * K + d.candidate[at], up = place[d.parent[at]];
    const bool real = d.valid[at] && up >= 0;
    integers(ids)[row] = i ? found[from] : integers(root)[b];
    floats(values)[row] = i ? totals[from] : 0.f;
    integers(parent)[row] = real ? up : 0;
    integers(depth)[row] = real ? d.depth[at] : 0;
    booleans(valid)[row] = real;
    bool* sees = booleans(ancestors) + row * Z;
    if (real && i) std::copy_n(booleans(ancestors) + (b * Z + up) * Z, Z, sees);
    sees[i] = true;
  }
  return {ids, parent, depth, ancestors, valid, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) {
  m.def("tree_draft(Tensor[] head, Tensor[] tree, int children, float eps, float scale, bool keep_normed, "
        "float p_min) -> Tensor");
  m.def("draft_tree(Tensor drafts, Tensor tokens, Tensor n, Tensor root, Tensor features, Tensor count, Tensor? noise, "
        "Tensor temperature, Tensor(a!) kv, bool round, bool prune) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CPU, m) {
  m.impl("tree_draft", TORCH_BOX(&tree_draft));
  m.impl("draft_tree", TORCH_BOX(&draft_tree));
}
