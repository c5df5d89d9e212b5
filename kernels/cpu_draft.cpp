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
  const float eps, scale;
  const bool keep_normed;
  std::vector<Level> levels;
  const int64_t nodes, *candidate;  // below the root; [B,nodes] where each is found among the candidates of all rows

  TreeDraft(std::vector<Tensor> of_head, std::vector<Tensor> of_tree, int64_t children, double eps, double scale, bool keep_normed)
      : head(std::move(of_head)), tree(std::move(of_tree)), layer(&head[0]), fc(&head[20]), lm_head(&head[24]),
        token_norm(values_or_null(head[32])), feature_norm(values_or_null(head[33])), output_norm(values_or_null(head[34])),
        cos(floats(head[35])), sin(floats(head[36])), draft_ids(head[37].numel() ? integers(head[37]) : nullptr), H(layer.o.n),
        half(head[35].size(1)), positions(head[35].size(0)), children(children), eps((float)eps), scale((float)scale),
        keep_normed(keep_normed), nodes(tree[0].size(1)), candidate(integers(tree[0])) {
    if (head[28].dim() == 2) table = floats(head[28]);
    else embedding.emplace(&head[28]);
    for (size_t i = 1; i < tree.size(); i += 3)
      levels.push_back({tree[i].size(1), integers(tree[i]), integers(tree[i + 1]), booleans(tree[i + 2])});
  }
};

Tensor tree_draft(std::vector<Tensor> head, std::vector<Tensor> tree, int64_t children, double eps, double scale, bool keep_normed) {
  STD_TORCH_CHECK(head.size() == 38 && tree.size() % 3 == 1, "a draft has 38 tensors of its head, and 3 of each level");
  return keep(std::make_unique<TreeDraft>(std::move(head), std::move(tree), children, eps, scale, keep_normed));
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
      const int64_t at = std::min(rows.positions[row], d.positions - 1) * d.half;
      std::copy_n(d.cos + at, d.half, &cos[row * d.half]);
      std::copy_n(d.sin + at, d.half, &sin[row * d.half]);
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
        const DraftRow drafts{&logits[row * size], size, g, d.draft_ids, temperature[row / width], false};
        best_drafts(drafts, d.children, places + row * d.children, scores + row * d.children);
      }
    });
  }
};

// Tokens [B,N] of the tree, and their cumulative scores (`TreeDrafter._static`). features [B,R,F], of which `count` [B] rows
// are true, stand for the tokens before the root.
std::tuple<Tensor, Tensor> draft_tree(const Tensor& drafts, const Tensor& tokens, const Tensor& n, const Tensor& root,
                                      const Tensor& features, const Tensor& count, const std::optional<Tensor>& noise,
                                      const Tensor& temperature, Tensor kv, bool round) {
  const TreeDraft& d = kept<TreeDraft>(drafts);
  const int64_t B = n.size(0), S = tokens.size(1), slots = kv.size(3), H = d.H, F = features.size(2), N = d.nodes + 1;
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

  // the tree, level by level
  std::vector<int64_t> places(B * most * d.children), found(B * run_rows * d.children);
  std::vector<float> scores(places.size()), totals(found.size()), base(B * most);
  int64_t width = 1, begin = 0;  // of the level above
  for (size_t i = 0;; ++i) {
    drafting.propose(above.data(), width, noise, i, floats(temperature), places.data(), scores.data());
    for (int64_t row = 0; row < B * width; ++row)
      for (int64_t c = 0; c < d.children; ++c) {
        const int64_t from = row * d.children + c, to = (row / width * run_rows + begin + row % width) * d.children + c;
        found[to] = d.draft_ids ? d.draft_ids[places[from]] : places[from];
        totals[to] = scores[from] + (i ? base[row] : 0.f);
      }
    if (i == d.levels.size()) break;
    const Level& level = d.levels[i];
    for (int64_t row = 0; row < B * level.width; ++row) {
      const int64_t b = row / level.width, w = row % level.width, at = (b * run_rows + begin) * d.children + level.place[row];
      rows.tokens[row] = found[at];
      base[row] = totals[at];
      rows.positions[row] = integers(n)[b] + i;
      rows.slots[row] = std::min(integers(n)[b] + begin + width - 1 + w, slots - 1);
      rows.features[row] = &above[(b * width + level.source[row]) * H];
    }
    begin += width;
    drafting.forward(rows, level.width, integers(n), level.visible, begin - 1 + level.width, output.data());
    std::swap(output, above);
    width = level.width;
  }

  Tensor ids = new_empty(n, {B, N}), values = new_empty(temperature, {B, N});
  for (int64_t b = 0; b < B; ++b) {
    integers(ids)[b * N] = integers(root)[b];
    floats(values)[b * N] = 0.f;
    for (int64_t i = 0; i < d.nodes; ++i) {
      const int64_t at = b * run_rows * d.children + d.candidate[b * d.nodes + i];
      integers(ids)[b * N + 1 + i] = found[at];
      floats(values)[b * N + 1 + i] = totals[at];
    }
  }
  return {ids, values};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(eaglet_cpu, m) {
  m.def("tree_draft(Tensor[] head, Tensor[] tree, int children, float eps, float scale, bool keep_normed) -> Tensor");
  m.def("draft_tree(Tensor drafts, Tensor tokens, Tensor n, Tensor root, Tensor features, Tensor count, Tensor? noise, "
        "Tensor temperature, Tensor(a!) kv, bool round) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(eaglet_cpu, CPU, m) {
  m.impl("tree_draft", TORCH_BOX(&tree_draft));
  m.impl("draft_tree", TORCH_BOX(&draft_tree));
}
