// Decoder layers on x86 CPUs with AVX2, from the kernels of cpu_linear.cpp and cpu_attention.cpp. kernels/cpu.py builds these files.

#include "pairs.h"

namespace {

using namespace eaglet;

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  Tensor out = torch::stable::empty_like(x);
  const int64_t size = weight.size(0);
  norm_rows(floats(x), floats(weight), x.numel() / size, size, (float)eps, floats(out));
  return out;
}

// kv: the cache of a layer, or of several.
Nodes nodes_of(int64_t B, int64_t T, int64_t heads, const Tensor& kv) {
  const Cache cache(kv);
  return {B, T, heads, kv.size(kv.dim() - 3), cache.hd, kv.size(kv.dim() - 2), 0, 0, nullptr, nullptr, 0, cache};
}

void place(Nodes& n, const Tensor& cos, const Tensor& sin, const Tensor& slots, double eps) {
  n.cos = floats(cos);
  n.sin = floats(sin);
  n.turn = cos.size(2);
  n.slots = integers(slots);
  n.eps = (float)eps;
}

Tensor rope_write_kv(const Tensor& qkv, const Tensor& cos, const Tensor& sin, Tensor kv, const Tensor& slots,
                     const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
                     bool value_norm, bool shares) {
  Nodes n = nodes_of(qkv.size(0), qkv.size(1), qkv.size(2) - (shares ? 0 : 2 * kv.size(2)), kv);
  place(n, cos, sin, slots, eps);
  n.shares = shares;
  const std::vector<float> ones(value_norm ? n.hd : 0, 1.0f);  // the weights of the norm of values
  const float* const norms[3] = {floats(q_weight), floats(k_weight), value_norm ? ones.data() : nullptr};
  Tensor q = torch::stable::new_empty(qkv, {n.B, n.T, n.heads, n.hd});
  rotate_and_write(n, floats(qkv), norms, floats(q));
  return q;
}

void show(Nodes& n, const Tensor& start, const Tensor& visible, const Tensor& positions, int64_t window) {
  n.start = integers(start);
  n.visible = booleans(visible);
  n.positions = integers(positions);
  n.R = visible.size(2);
  n.window = window;
}

Tensor tree_attention(const Tensor& q, const Tensor& kv, const Tensor& start, const Tensor& visible,
                      const Tensor& positions, int64_t window, double scale, double cap,
                      const std::optional<Tensor>& sinks, const std::optional<Tensor>& segments, bool ring) {
  Nodes n = nodes_of(q.size(0), q.size(1), q.size(2), kv);
  STD_TORCH_CHECK(visible.size(0) == n.B && visible.size(1) == n.T, "every query needs to know which nodes it sees");
  show(n, start, visible, positions, window);
  if (segments) n.segments = integers(*segments);
  n.ring = ring;
  Tensor out = torch::stable::empty_like(q);
  attend(n, floats(q), (float)scale, (float)cap, floats(sinks), floats(out));
  return out;
}

}  // namespace

namespace eaglet {

Layer::Layer(const tensors::LayerWeights& t)
    : input_norm(values_or_null(t.input_norm)), attention_norm(values_or_null(t.attention_norm)),
      post_norm(values_or_null(t.post_norm)), mlp_norm(values_or_null(t.mlp_norm)), q_norm(values_or_null(t.q_norm)),
      k_norm(values_or_null(t.k_norm)), qkv(t.qkv), o(t.o), gate_up(t.gate_up), down(t.down) {}

void Layer::write(const Nodes& n, const float* x, bool round, float* const buffer[3]) const {
  const int64_t M = n.B * n.T;
  const float* const norms[3] = {q_norm, k_norm, nullptr};
  if (input_norm) norm_rows(x, input_norm, M, qkv.k, n.eps, buffer[0]);
  qkv(input_norm ? buffer[0] : x, M, nullptr, false, round, buffer[1]);
  rotate_and_write(n, buffer[1], norms, buffer[2]);
}

// out = x + y, all [size].
void add(const float* x, const float* y, int64_t size, float* out) {
  parallel_for(0, size / TILE, 16384 / TILE, [&](int64_t first, int64_t last) {
    for (int64_t i = first * TILE; i < last * TILE; i += TILE)
      _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(x + i), _mm256_loadu_ps(y + i)));
  });
}

void Layer::finish(const Nodes& n, const float* residual, float scale, bool round, float* const buffer[3], float* out) const {
  const int64_t M = n.B * n.T, H = o.n;
  float *a = buffer[0], *b = buffer[1], *c = buffer[2];
  attend(n, c, scale, cap, nullptr, a);
  o(a, M, attention_norm ? nullptr : residual, 0, round, b);
  if (attention_norm) {
    norm_rows(b, attention_norm, M, H, n.eps, a);
    add(residual, a, M * H, b);
  }
  if (post_norm) norm_rows(b, post_norm, M, H, n.eps, a);
  gate_up(post_norm ? a : b, M, nullptr, gate, round, c);
  if (!mlp_norm) return down(c, M, b, 0, round, out);
  down(c, M, nullptr, 0, round, a);
  norm_rows(a, mlp_norm, M, H, n.eps, c);
  add(b, c, M * H, out);
}

}  // namespace eaglet

namespace {

// Decoder layers that `layers` runs one after another.
struct Stack {
  static constexpr int64_t MARK = 0x65616C6574537461;
  static constexpr char NAME[] = "layers";
  const int64_t mark = mark_of(this);
  std::vector<Tensor> weights;
  std::vector<Layer> layers;
  std::optional<Tensor> norm;            // after the last layer
  std::vector<int64_t> windows, angles;  // of each layer: its window or 0, and the column of its angles
  float eps, scale;
  int64_t widest = 0;
};

Tensor stack_layers(std::vector<Tensor> weights, std::optional<Tensor> norm, std::vector<int64_t> windows,
                    std::vector<int64_t> angles, int64_t gate, double eps, double scale, double cap) {
  auto stack = std::make_unique<Stack>();
  stack->weights = std::move(weights);
  stack->norm = std::move(norm);
  stack->windows = std::move(windows);
  stack->angles = std::move(angles);
  stack->eps = (float)eps;
  stack->scale = (float)scale;
  constexpr size_t TENSORS = tensors::LayerWeights::TENSORS;
  STD_TORCH_CHECK(stack->weights.size() == stack->windows.size() * TENSORS, "a layer has ", TENSORS, " tensors");
  for (size_t i = 0; i < stack->windows.size(); ++i) {
    Layer& layer = stack->layers.emplace_back(tensors::LayerWeights(&stack->weights[i * TENSORS]));
    layer.gate = gate;
    layer.cap = (float)cap;
    stack->widest = std::max(stack->widest, stack->layers[i].widest());
  }
  return keep(std::move(stack));
}

// x [B,T,in] -> ([B,T,H], the inputs of the layers `taps` side by side [B,T,taps H]). kv [L,2,B,Hkv,S,hd]. nodes: what the
// layers share, as `tensors::Nodes`. residual: as for `Layer`, of a single one. window, ring: as of `model.Nodes`.
std::tuple<Tensor, Tensor> layers(const Tensor& x, const std::optional<Tensor>& residual, const Tensor& stacked,
                                  std::vector<Tensor> nodes, Tensor kv, bool round, std::vector<int64_t> taps, int64_t window,
                                  bool ring) {
  const Stack& stack = object_of<Stack>(stacked);
  const auto shared = record<tensors::Nodes>(nodes);
  const std::vector<Layer>& all = stack.layers;
  const int64_t L = all.size(), B = x.size(0), T = x.size(1), M = B * T, widest = stack.widest, H = all[0].o.n, W = taps.size();
  const Cache cache(kv);
  Nodes n = nodes_of(B, T, all[0].qkv.n / cache.hd - 2 * kv.size(3), kv);
  place(n, shared.cos, shared.sin, shared.slots, stack.eps);
  if (shared.segments.numel()) n.segments = integers(shared.segments);
  n.ring = ring;
  Tensor out = torch::stable::new_empty(x, {B, T, H}), tapped = torch::stable::new_empty(x, {B, T, W * H});
  const std::unique_ptr<float[]> memory(new float[M * (3 * widest + H)]);
  float* const buffer[3] = {memory.get(), memory.get() + M * widest, memory.get() + 2 * M * widest};
  float* const outputs[2] = {floats(out), memory.get() + 3 * M * widest};  // taken in turn, so that the last is `out`
  const float* rows = floats(x);
  for (int64_t i = 0; i <= L; ++i) {
    for (int64_t k = 0; k < W; ++k)
      if (taps[k] == i)
        for (int64_t m = 0; m < M; ++m) std::copy_n(rows + m * H, H, floats(tapped) + (m * W + k) * H);
    if (i == L) break;
    const int64_t own = stack.windows[i], narrow = own && window ? std::min(own, window) : own + window;
    show(n, shared.start, own ? shared.visible_window : shared.visible, shared.positions, narrow);
    n.cache = cache.layer(i);
    n.cos = floats(shared.cos) + stack.angles[i];
    n.sin = floats(shared.sin) + stack.angles[i];
    float* to = outputs[(L - 1 - i) % 2];
    all[i].write(n, rows, round, buffer);
    all[i].finish(n, residual ? floats(residual) : rows, stack.scale, round, buffer, to);
    rows = to;
  }
  if (stack.norm) norm_rows(rows, floats(*stack.norm), M, H, stack.eps, floats(out));
  return {out, tapped};
}

bool pair_products() { return PAIRS; }

double seconds_alone() { return Team::of_process().seconds_alone(); }

}  // namespace

EAGLET_OPERATOR(CPU, rms_norm, "(Tensor x, Tensor weight, float eps) -> Tensor");
EAGLET_OPERATOR(CPU, rope_write_kv, "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) kv, Tensor slots, Tensor? q_weight, "
                "Tensor? k_weight, float eps, bool value_norm, bool shares) -> Tensor");
EAGLET_OPERATOR(CPU, tree_attention, "(Tensor q, Tensor kv, Tensor start, Tensor visible, Tensor positions, int window, float scale, "
                "float cap, Tensor? sinks, Tensor? segments, bool ring) -> Tensor");
EAGLET_OPERATOR(CPU, stack_layers, "(Tensor[] weights, Tensor? norm, int[] windows, int[] angles, int gate, float eps, float scale, "
                "float cap) -> Tensor");
EAGLET_OPERATOR(CPU, layers, "(Tensor x, Tensor? residual, Tensor stacked, Tensor[] nodes, Tensor(a!) kv, bool round, int[] taps, "
                "int window, bool ring) -> (Tensor, Tensor)");
EAGLET_OPERATOR(CompositeExplicitAutograd, pair_products, "() -> bool");
EAGLET_OPERATOR(CompositeExplicitAutograd, seconds_alone, "() -> float");
